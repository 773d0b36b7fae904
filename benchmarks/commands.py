"""How long does a command take that trains nothing?

    python benchmarks/commands.py [--times 10]

`fastbench --help`, `fastbench list`, and `fastbench compare` of two folders with ten Runs each (of real size, as `digits-xresnet18` leaves them), each as a whole process, in turns, after one
warm-up; beside them a bare `python -c pass`. The bar is 0.7 s for the median of each."""
import argparse
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from fastbench.machine.environment import device_info, environment
from fastbench.compare.paired import time_rounds
from fastbench.recipe import get_recipe
from fastbench.runs.record import Run
from store import profile

BAR = .7


def fill(folder, n=10):
    rng, env, device = random.Random(0), environment(), device_info('cpu')
    for side in 'ab':
        (folder/side).mkdir()
        for i in range(n):
            epochs = [dict(train_loss=rng.random(), valid_loss=rng.random(), accuracy=.95 + .01*rng.random()) for _ in range(4)]
            run = Run(recipe=vars(get_recipe('digits-xresnet18')).copy(), seconds=rng.lognormvariate(1, .02), seed=i, repeat=i, data=dict(name='digits', n_train=1437, n_valid=360),
                      weights='random, seed 42', precision=dict(asked='fp32', effective='fp32'), device=device, environment=env, epochs=epochs, metrics=epochs[-1], profile=profile(rng))
            (folder/side/f'{run.id}.json').write_text(run.to_json(), encoding='utf-8')


def took(cmd, cwd):
    start = time.perf_counter()
    subprocess.run(cmd, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--times', type=int, default=10)
    args = p.parse_args()
    fastbench = [sys.executable, '-c', 'from fastbench.cli import main; main()']
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        fill(folder)
        commands = {'python -c pass': [sys.executable, '-c', 'pass'], '--help': [*fastbench, '--help'], 'list': [*fastbench, 'list'], 'compare of 2 x 10 Runs': [*fastbench, 'compare', 'a', 'b']}
        each = time_rounds({k: partial(took, o, folder) for k, o in commands.items()}, args.times, back=False)
    ok = True
    for k, xs in each.items():
        bar = '' if k.startswith('python') else f"  bar {BAR} s: {'held' if median(xs) < BAR else 'MISSED'}"
        ok &= 'MISSED' not in bar
        print(f'{k:24s} median {median(xs):.3f} s, {min(xs):.3f} to {max(xs):.3f}{bar}')
    return ok


if __name__ == '__main__': sys.exit(not main())

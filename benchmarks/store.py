"""How long are 10,000 Runs in one folder looked through?

    python benchmarks/store.py [--runs 10000]

Runs of real size (a real environment, raw values of 88 training and 24 validation steps, as `digits-xresnet18` leaves them) in a temporary folder. `runs()` over all of them,
cold (the system has forgotten the files) and warm, and the command `fastbench list runs` as a whole process, with the 20 newest and with a question that
looks at each. The bar is 2 s for each. (`--json` writes all that the Runs hold but their raw values, 27 MB: told, without a bar.)"""
import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fastbench.machine.environment import device_info, environment
from fastbench.measure.phases import LEAVES, Profile, step_columns, to_dict
from fastbench.recipe import recipes
from fastbench.runs.record import Run

BAR = 2.


def profile(rng, steps=dict(train=88, valid=24)):
    p = Profile()
    for phase, n in steps.items():
        for i in range(n):
            values = {o: rng.lognormvariate(-5, .3) for o in LEAVES[phase] if o not in ('compile', 'start', 'stop')}
            d = dict(values, warmup=float(not i), samples=64., step=sum(values.values()))
            p.steps[phase].add([d.get(c, 0.) for c in step_columns(phase)])
    return to_dict(p)


def fill(folder, n):
    rng, env, device, all_recipes = random.Random(0), environment(), device_info('cpu'), list(recipes().values())
    profiles = [profile(rng) for _ in range(20)]
    for i in range(n):
        r = rng.choice(all_recipes)
        epochs = [dict(train_loss=rng.random(), valid_loss=rng.random(), accuracy=rng.random()) for _ in range(4)]
        run = Run(recipe=vars(r).copy(), seconds=rng.lognormvariate(3, .1), seed=i, data=dict(name='digits', n_train=1437, n_valid=360), weights='random, seed 42',
                  precision=dict(asked='fp32', effective=rng.choice(['fp32', 'bf16'])), device=device, environment=env, epochs=epochs, metrics=epochs[-1], profile=rng.choice(profiles))
        (folder/f'{run.id}.json').write_text(run.to_json(), encoding='utf-8')  # not `save`: 10,000 times to the disk takes minutes


def forget(folder):
    "Let the system drop what it has of the files in memory"
    if not hasattr(os, 'posix_fadvise'): return False
    for o in os.scandir(folder):
        fd = os.open(o.path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return True


QUERY = 'import sys, time, pandas; from fastbench.runs.query import runs; t = time.perf_counter(); n = len(runs(sys.argv[1])); print(n, time.perf_counter()-t)'


def query(folder, n):
    "Seconds of `runs()` in a fresh Python that has imported pandas"
    got, secs = subprocess.run([sys.executable, '-c', QUERY, folder], capture_output=True, text=True, check=True).stdout.split()
    assert int(got) == n
    return float(secs)


def command(folder, *args):
    "Seconds of a whole command"
    start = time.perf_counter()
    out = subprocess.run([sys.executable, '-m', 'fastbench', 'list', 'runs', '-o', folder, *args], capture_output=True, text=True, check=True).stdout
    return time.perf_counter() - start, len(out.splitlines())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--runs', type=int, default=10_000)
    n = p.parse_args().runs
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d)/'runs'
        folder.mkdir()
        fill(folder, n)
        sizes = [o.stat().st_size for o in os.scandir(folder)]
        print(f'{n:,} Runs, {sum(sizes)/n/1e3:.1f} kB each')
        cold = forget(folder)
        res = {f"runs(), {'cold' if cold else 'first'}": query(folder, n), 'runs(), warm': min(query(folder, n) for _ in range(3))}
        res['fastbench list runs'], lines = min(command(folder) for _ in range(3))
        assert lines == min(n, 20) + 1
        res['fastbench list runs --precision fp16'], lines = min(command(folder, '--precision', 'fp16') for _ in range(3))
        whole = min(command(folder, '--json') for _ in range(3))[0]
    for k, v in res.items(): print(f"{k:40} {v:6.2f} s  {'kept' if v < BAR else 'MISSED'}")
    print(f"{'fastbench list runs --json':40} {whole:6.2f} s")
    print(f"under {BAR:g} s: {'yes' if max(res.values()) < BAR else 'no'}")
    return max(res.values()) >= BAR


if __name__ == '__main__': sys.exit(main())

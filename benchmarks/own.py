"""A function of a user's own, run by fastbench: what that costs, and whether its verdicts can be believed.

    python benchmarks/own.py overhead [PAIRS] [EPOCHS]   # a bare process against `fastbench run`, in turns: start and fit
    python benchmarks/own.py fit [PAIRS]        # the same fit in one process, called and run by fastbench, in turns
    python benchmarks/own.py steps [PAIRS]      # what a step costs more, seen where a step computes next to nothing
    python benchmarks/own.py same [TRIALS]      # A/A: verdicts of `ab` where nothing differs
    python benchmarks/own.py sleep              # 10% of the step, asleep in forward: which row has it?

Bars: under 3 s of start and 1% of the fit; a verdict in at most 1 of 20; `forward` has the sleep.
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bars import middle, verdict

SCRIPT = '''
import time
from fastai.vision.all import *

class Net(nn.Module):
    def __init__(self, width, sleep):
        super().__init__()
        def block(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
        self.body = nn.Sequential(block(3, width), block(width, 2*width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2*width, 2))
        self.sleep = sleep
    def forward(self, x):
        if self.sleep: time.sleep(self.sleep)
        return self.body(x)

def make(bs=32, width=16, size=32, n=640, sleep=0.):
    x = torch.rand(n, 3, size, size)
    data = list(zip(x, (x.mean((1, 2, 3)) > .5).long()))
    dls = DataLoaders.from_dsets(data[:n*4//5], data[n*4//5:], bs=bs, num_workers=0, device=torch.device('cpu'))
    return Learner(dls, Net(width, sleep), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
'''
BARE = '''
import time
from train import make
from fastai.torch_core import set_seed
set_seed(42)
learn = make(**{arguments})
start = time.perf_counter()
with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle({epochs})
print(time.perf_counter() - start)
'''


def bare(folder, epochs, **arguments):
    "Seconds of the process, seconds of the fit"
    start = time.perf_counter()
    code = BARE.format(arguments=arguments, epochs=epochs)
    got = subprocess.run([sys.executable, '-c', code], cwd=folder, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, float(got.stdout.split()[-1])


def ours(folder, epochs, **arguments):
    start = time.perf_counter()
    sets = [x for k, v in arguments.items() for x in ('--set', f'{k}={v}')]
    cmd = [sys.executable, '-m', 'fastbench', 'run', 'train.py', '--set', f'epochs={epochs}', *sets, '--device', 'cpu', '--json']
    got = subprocess.run(cmd, cwd=folder, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, json.loads(got.stdout)[0]['seconds']


def overhead(folder, pairs=12, epochs=12):
    from fastbench.compare.verdict import compare_times
    a, b = [], []
    bare(folder, 1), ours(folder, 1)
    for i in range(pairs):
        for side, f in ((a, bare), (b, ours))[::1 if i % 2 else -1]: side.append(f(folder, epochs=epochs))
    starts = [[whole - fit for whole, fit in o] for o in (a, b)]
    fits = [[fit for _, fit in o] for o in (a, b)]
    more = sorted(y - x for x, y in zip(*starts))[pairs//2]
    v = compare_times(*fits, paired=True, threshold=.01)
    print(f'start: {more:+.2f} s beside a bare process (median of {pairs} pairs): the bar of 3 s is {"met" if more < 3 else "not met"}')
    low, high = 1/v.speedup[2] - 1, 1/v.speedup[1] - 1
    print(f'fit: {1/v.speedup[0] - 1:+.2%} ({low:+.2%} to {high:+.2%}), {v.verdict}: the bar of 1% is {verdict(low, high, .01)}')
    return more < 3 and low <= .01


FIT = """
from time import perf_counter, process_time
import train

def make(n=800):
    def fit(learn):
        began = perf_counter(), process_time()
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2)
        train.took.append((perf_counter() - began[0], process_time() - began[1]))
    return train.make(n=n), fit
"""


def fit(folder, pairs=40):
    "In one process the two sides are beside each other, so that a busy machine is busy for both"
    from fastbench.bench.run import run_recipe
    (Path(folder)/'timed.py').write_text(FIT)
    sys.path.insert(0, str(folder))
    import timed, train
    train.took = []
    from fastai.torch_core import set_seed
    def bare():
        set_seed(42)
        learn, fit = timed.make()
        fit(learn)
    def ours():
        run = run_recipe(timed.make, device='cpu')
        assert run.status == 'ok', run.error
    for f in (bare, ours): f()
    train.took.clear()
    for i in range(pairs):
        for f in (bare, ours)[::-1 if i % 2 else 1]: f()
    sides = [[train.took[2*i + (k ^ i % 2)] for i in range(pairs)] for k in (0, 1)]
    met = True
    for j, what in enumerate(('wall clock', 'processor')):
        low, mid, high = middle(b[j]/a[j] - 1 for a, b in zip(*sides))
        met &= high < .01
        print(f'fit of {sides[0][0][0]:.1f} s, {what}: {mid:+.2%}, the median of {pairs} pairs ({low:+.2%} to {high:+.2%}): the bar of 1% is '
              f'{verdict(low, high, .01)}')
    return met


STEPS = '''
import gc
from time import process_time
from fastai.vision.all import *
import train

def make(n=60):
    x = torch.rand(2*n, 3, 2, 2)
    data = list(zip(x, (x.mean((1, 2, 3)) > .5).long()))
    dls = DataLoaders.from_dsets(data, data[:2], bs=2, num_workers=0, device=torch.device('cpu'))
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    def fit(learn):
        gc.collect()  # or the garbage of what came before is collected in one fit and not in the other
        began = process_time()
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1)
        train.took.append(process_time() - began)
    return learn, fit
'''


def steps(folder, pairs=60):
    "Two fits of the same code differ by several percent of what they compute (memory lies elsewhere), so the cost of a step is measured where little is computed, in microseconds"
    from fastbench.bench.run import run_recipe
    (Path(folder)/'counted.py').write_text(STEPS)
    sys.path.insert(0, str(folder))
    import counted, train
    train.took = []
    from fastai.torch_core import set_seed
    def bare(n):
        set_seed(42)
        learn, fit = counted.make(n)
        fit(learn)
    def ours(n):
        run = run_recipe(counted.make, n=n, device='cpu')
        assert run.status == 'ok', run.error
    def more(n, k):
        for f in (bare, ours)[::(-1)**k]: f(n)
        a, b = train.took[-2:][::(-1)**k]
        return b - a
    few, many = 20, 320
    for n in (few, many): more(n, 0)
    found = []
    for k in range(pairs):
        small, large = more(few, k), more(many, k)
        a = (large - small)/(many - few)
        found.append((a, small - few*a))
    (low, step, high), (least, fixed, most) = map(middle, zip(*found))
    n, seconds = 50, 1.  # of the fit of `fit`
    share, worst = ((n*a + b)/seconds for a, b in ((step, fixed), (high, max(most, 0))))
    print(f'a step costs {1e6*step:.0f} us more ({1e6*low:.0f} to {1e6*high:.0f}), a fit {1000*fixed:.1f} ms ({1000*least:.1f} to {1000*most:.1f}): the medians of {pairs} pairs')
    print(f'a fit of {n} steps and {seconds:.0f} s: {share:.2%}, {worst:.2%} at most: the bar of 1% is {"met" if worst < .01 else "not met"}')
    return worst < .01


def same(folder, trials=20):
    from fastbench.compare.ab import start_ab
    from fastbench.own.kind import other_source
    from fastbench.recipe import get_recipe
    recipe = get_recipe('train.py')
    found = []
    for i in range(trials):
        trial = start_ab('train.py', None, {}, {}, (), (), False, 'runs', 'cpu', True, other=recipe.source, pairs=5, seed=i)
        while not trial.over: trial.measure()
        found.append(trial.result().verdicts['overall', 'fit'].verdict)
        print(f'trial {i+1}: {found[-1]}', flush=True)
    false = sum(o in ('faster', 'slower') for o in found)
    print(f'{false} of {trials} trials of the same function gave a verdict: the bar of 1 in 20 is {"met" if false <= trials/20 else "not met"}')
    return false <= trials/20


def sleep(folder):
    from fastbench.compare.ab import ab
    from fastbench.runs.store import load_all
    base = ab('train.py', changes=dict(sleep=1e-9), pairs=1, device='cpu', folder='first')
    step = next(r['a'] for r in base.rows if (r['phase'], r['action']) == ('train', 'step'))
    c = ab('train.py', changes=dict(sleep=round(.1*step, 5)), pairs=12, early=False, device='cpu', folder='second')
    print(c)
    slower = [r['action'] for r in c.rows if r['phase'] == 'train' and r['verdict'] == 'slower']
    print(f'{.1*step*1000:.2f} ms asleep in forward: slower are {", ".join(slower) or "none"}: the bar is {"met" if "forward" in slower else "not met"}')
    return 'forward' in slower


if __name__ == '__main__':
    what, *rest = sys.argv[1:] or ['overhead']
    os.environ.setdefault('OMP_NUM_THREADS', '1')  # two sides that share cores with other programs wait for their threads
    with TemporaryDirectory() as folder:
        (Path(folder)/'train.py').write_text(SCRIPT)
        os.chdir(folder)
        sys.exit(0 if dict(overhead=overhead, fit=fit, steps=steps, same=same, sleep=sleep)[what](folder, *map(int, rest)) else 1)

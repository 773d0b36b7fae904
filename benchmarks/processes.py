"""Several processes on this machine: what a second one gains, and what starting them costs.

    python benchmarks/processes.py speed [ROUNDS]   # samples a second of two processes with one core each, against one
    python benchmarks/processes.py start [ROUNDS]   # from the command to the first word of the training, against the imports alone
    python benchmarks/processes.py profile [PAIRS]  # the same fit of two processes with and without the profiler, in turns

speed: an XResNet18 at 64 pixels, 64 samples a process, random images in memory, DDP by Gloo. In each round, in turns: one process with one core; two that know nothing of each other, at the same time (do they slow each other?); two that train together.
start: `fastbench.bench.processes.launch_processes` until the first process tells of its data, against two processes at once that import the same and end.
profile: 60 steps of about 10 ms in two processes; each pair is one fit with `learn.profile()` and one without, right after each other in the same processes, the order drawn by turns.
Bars: 1.85 times the samples a second, where two strangers reach 1.9; under 3 s more than the imports; under 1% of the step for the profiler, on each process.
"""
import os
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from statistics import median

os.environ['OMP_NUM_THREADS'] = '1'
warnings.filterwarnings('ignore')

from bars import middle, verdict
from fastbench.bench.processes import launch_processes
from fastbench.recipe import get_recipe
from fastbench.runs.store import load

HERE = f'{os.path.abspath(__file__)}:make'


def make(epochs: int = 1, lr: float = 1e-3):
    import torch
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.vision.models.xresnet import xresnet18
    torch.manual_seed(0)
    items = [(torch.randn(3, 64, 64), i % 10) for i in range(64*24)]
    return Learner(DataLoaders(DataLoader(items, bs=64), DataLoader(items[:64], bs=64)), xresnet18(n_out=10), loss_func=torch.nn.CrossEntropyLoss())


def rate(nproc, folder):
    "Samples a second of all processes together"
    run = load(launch_processes(get_recipe(HERE), nproc, folder, device='cpu'))
    if run.status != 'ok': sys.exit(run.error)
    return sum(r['samples_per_second'] for r in run.ranks)


def speed(rounds=3):
    got = dict(one=[], strangers=[], together=[])
    with tempfile.TemporaryDirectory() as d, ThreadPoolExecutor(2) as pool:
        def strangers(): return sum(pool.map(lambda _: rate_alone(d), range(2)))
        todo = dict(one=lambda: rate(1, d), strangers=strangers, together=lambda: rate(2, d))
        for i in range(rounds):
            for k in list(todo)[::(-1)**i]: got[k].append(todo[k]())
    for k, v in got.items(): print(f'{k:10} {median(v):6.1f} samples/s ({", ".join(f"{o:.1f}" for o in v)})')
    free, gain = (median(a/b for a, b in zip(got[k], got['one'])) for k in ('strangers', 'together'))
    if free < 1.9: print(f'two processes that know nothing of each other are {free:.2f} times as fast as one: this machine has no two free cores, so nothing is shown')
    print(f'two processes train {gain:.2f} times as fast as one, {gain/free:.2f} of what two strangers reach; bar 1.85: {"reached" if gain >= 1.85 else "MISSED"}')
    return gain >= 1.85


def rate_alone(folder):
    "Of one process, started from a thread beside another"
    code = f'import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); from processes import rate; print(rate(1, {folder!r}))'
    return float(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.split()[-1])


def start(rounds=5):
    imports = [sys.executable, '-W', 'ignore', '-c', 'import fastbench.bench.run, fastbench.distributed.learner, fastbench.distributed.ranks']

    def both():
        begin = time.perf_counter()
        procs = [subprocess.Popen(imports, stderr=subprocess.DEVNULL) for _ in range(2)]
        for p in procs: p.wait()
        return time.perf_counter() - begin

    def launched():
        told, begin = [], time.perf_counter()
        def tell(o):
            if o.get('phase') == 'data' and not told: told.append(time.perf_counter() - begin)
        launch_processes(get_recipe(HERE, batches=1), 2, folder, tell, device='cpu')
        return told[0]
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(both(), launched()) for _ in range(rounds)]
    more = median(b - a for a, b in pairs)
    print(f'imports of two processes {median(a for a, _ in pairs):.1f} s, from the launch to their first word {median(b for _, b in pairs):.1f} s: {more:.1f} s more; bar 3 s: {"reached" if more < 3 else "MISSED"}')
    return more < 3


def fits(pairs):
    "In each of two processes: how much longer a fit is with the profiler"
    import torch
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from torch import nn
    import fastbench.distributed.learner, fastbench.measure.profiler
    from fastbench.machine.group import join, leave, rank
    from fastbench.train.learner import BenchLearner
    torch.set_num_threads(1)
    items = [(torch.randn(512), i % 10) for i in range(64*60)]
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
    join('cpu')
    learn = BenchLearner(DataLoaders(DataLoader(items, bs=64), []), model, loss_func=nn.CrossEntropyLoss())
    learn.to_distributed(cpu=True, tell=lambda o: None)

    def fit(profiled):
        if profiled: learn.profile()
        begin = time.perf_counter()
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
        took = time.perf_counter() - begin
        if profiled: learn.remove_cb(learn.profiler)
        return took
    for o in (False, True): fit(o)
    found = []
    for i in range(pairs):
        took = {o: fit(o) for o in (False, True)[::(-1)**i]}
        found.append((took[False], took[True]))
    learn.detach_distributed()
    print(rank(), *(x for o in found for x in o), flush=True)
    leave()


def profile(pairs=40):
    import socket
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        env = os.environ | dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(s.getsockname()[1]), ACCELERATE_USE_CPU='true', PYTHONWARNINGS='ignore')
    procs = [subprocess.Popen([sys.executable, __file__, 'fits', str(pairs)], env=env | dict(RANK=str(i), LOCAL_RANK=str(i)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for i in range(2)]
    met = True
    for i, p in enumerate(procs):
        xs = [*map(float, p.communicate()[0].split()[1:])]
        low, mid, high = middle(b/a - 1 for a, b in zip(xs[::2], xs[1::2]))
        met &= high < .01
        print(f'process {i}: a step of {1000*median(xs[::2])/60:.1f} ms, with the profiler {mid:+.2%} ({low:+.2%} to {high:+.2%}): the bar of 1% is {verdict(low, high, .01)}')
    return met


if __name__ == '__main__':
    what = dict(speed=speed, start=start, profile=profile, fits=fits)
    if sys.argv[1:2] == [] or sys.argv[1] not in what: sys.exit(__doc__)
    sys.exit(0 if what[sys.argv[1]](*map(int, sys.argv[2:3])) else 1)

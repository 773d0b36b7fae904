"""Several processes on this machine: what a second one gains, and what starting them costs.

    python benchmarks/processes.py speed [ROUNDS]   # samples a second of two processes with one core each, against one
    python benchmarks/processes.py buckets [ROUNDS] # samples a second with gradients in the buckets that DDP sends, against copies
    python benchmarks/processes.py start [ROUNDS]   # from the command to the first word of the training, against the imports alone
    python benchmarks/processes.py profile [PAIRS]  # the same fit of two processes with and without the profiler, in turns

speed: an XResNet18 at 64 pixels, 64 samples a process, random images in memory, DDP by Gloo. The same two processes train in turns, a few steps each: the first alone while the second waits; both without knowing of each other (do they slow each other?); both together; and, as what the machine allows, the first alone and both together in a loop of PyTorch with its own DDP. Ratios are of the same round, since the speed of a machine drifts.
buckets: the same two processes together, as usual and with options of one's own for DDP, which then copies gradients. No bar.
start: `fastbench.bench.processes.launch_processes` until the first process tells of its data, against two processes at once that import the same and end.
profile: two processes that compute next to nothing in a step, so that what the profiler adds can be seen in microseconds; two fits of steps that compute differ by more than the bar with or without it. Each pair is one fit with `learn.profile()` and one without, right after each other in the same
processes, the order by turns, of 30 and of 330 steps: what a step costs and what a fit costs are told apart. Seconds are those of the thread that trains (`time.thread_time`), so that waiting for the other process does not count.
Bars: 1.85 times the samples a second, where two strangers reach 1.9; under 3 s more than the imports; under 1% of a step of 10 ms for the profiler, on each process.
"""
import os
import subprocess
import sys
import tempfile
import time
import warnings
from statistics import median

os.environ['OMP_NUM_THREADS'] = '1'
warnings.filterwarnings('ignore')

from bars import middle, verdict
from fastbench.bench.processes import launch_processes
from fastbench.recipe import get_recipe

STEP = .01  # seconds, of the bar
HERE = f'{os.path.abspath(__file__)}:make'


def make(epochs: int = 1, lr: float = 1e-3, batches: int = 24):
    import torch
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.vision.models.xresnet import xresnet18
    from fastbench.train.learner import BenchLearner
    torch.manual_seed(0)
    items = [(torch.randn(3, 64, 64), i % 10) for i in range(64*batches)]
    return BenchLearner(DataLoaders(DataLoader(items, bs=64), DataLoader(items[:64], bs=64)), xresnet18(n_out=10), loss_func=torch.nn.CrossEntropyLoss())


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def started(what, nproc, *args):
    "`nproc` processes of this file that know of each other"
    env = os.environ | dict(WORLD_SIZE=str(nproc), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()), ACCELERATE_USE_CPU='true', PYTHONWARNINGS='ignore')
    ranks = [env | dict(RANK=str(i), LOCAL_RANK=str(i)) for i in range(nproc)]
    return [subprocess.Popen([sys.executable, __file__, what, *map(str, args)], env=o, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for o in ranks]


WARM, STEPS = 2, 10  # of each turn: the first do not count


def fitted(ddp, **options):
    "Seconds of a step in a fit of a Learner, profiled as in a Run"
    from fastai.callback.core import Callback
    import fastbench.distributed.learner, fastbench.measure.profiler
    ends = []

    class Ends(Callback):
        run_valid = False
        def after_batch(self): ends.append(time.perf_counter())
    learn = make(batches=(WARM + STEPS)*(2 if ddp else 1))
    if ddp: learn.to_distributed(cpu=True, tell=lambda o: None, **options)
    learn.profile()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3, cbs=Ends())
    if ddp: learn.detach_distributed()
    return (ends[-1] - ends[WARM-1])/STEPS


def copied(ddp):
    "The same with gradients that are copied into the buckets and back"
    from accelerate import DistributedDataParallelKwargs
    return fitted(ddp, kwargs_handlers=[DistributedDataParallelKwargs()])


def looped(ddp):
    "Seconds of the same step of PyTorch alone, without fastai and without us"
    import torch
    from fastai.vision.models.xresnet import xresnet18
    torch.manual_seed(0)
    x, y, model = torch.randn(64, 3, 64, 64), torch.arange(64) % 10, xresnet18(n_out=10)
    if ddp: model = torch.nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for i in range(WARM + STEPS):
        if i == WARM: began = time.perf_counter()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return (time.perf_counter() - began)/STEPS


SPEED = {'one': (fitted, False, 1), 'strangers': (fitted, False, 2), 'together': (fitted, True, 2), 'loop of one': (looped, False, 1), 'loop of two': (looped, True, 2)}
BUCKETS = {'together': (fitted, True, 2), 'copied': (copied, True, 2)}
TURNS = SPEED | BUCKETS


def turns():
    "Take the turns that are asked for on stdin, one a line; print the samples a second of each"
    import torch
    from fastbench.machine.group import join, leave
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, _, port = line.strip().partition(',')
        f, ddp, _ = TURNS[name]
        os.environ.pop('WORLD_SIZE', None)
        if ddp:
            os.environ.update(WORLD_SIZE='2', MASTER_PORT=port)
            join('cpu')
        print('rate', 64/f(ddp), flush=True)
        if ddp: leave()


def turn(procs, name):
    "Samples a second of all that take part in a turn"
    procs = procs[:TURNS[name][2]]
    port = free_port()
    for p in procs: print(f'{name},{port}', file=p.stdin, flush=True)
    return sum(next(float(line.split()[1]) for line in p.stdout if line.startswith('rate ')) for p in procs)


def in_turns(names, rounds):
    "Samples a second of each round, for each kind of turn"
    got, procs = {k: [] for k in names}, started('turns', 2)
    for i in range(rounds):
        for k in list(names)[::(-1)**i]: got[k].append(turn(procs, k))
    for p in procs: p.communicate()
    for k, v in got.items(): print(f'{k:11} {median(v):6.1f} samples/s ({", ".join(f"{o:.1f}" for o in v)})')
    return got


def speed(rounds=6):
    got = in_turns(SPEED, rounds)
    def gains(two, one): return middle(a/b for a, b in zip(got[two], got[one]))
    _, free, _ = gains('strangers', 'one')
    low, gain, high = gains('together', 'one')
    least, bare, most = gains('loop of two', 'loop of one')
    if free < 1.9: print(f'two processes that know nothing of each other are {free:.2f} times as fast as one: this machine has no two free cores, so nothing is shown')
    print(f'two processes train {gain:.2f} times as fast as one ({low:.2f} to {high:.2f}), {gain/free:.2f} of what two strangers reach; bar 1.85: {"reached" if gain >= 1.85 else "MISSED"}')
    print(f'a loop of PyTorch alone, with its own DDP, gains {bare:.2f} ({least:.2f} to {most:.2f}) from the second process')
    return gain >= 1.85


def buckets(rounds=10):
    got = in_turns(BUCKETS, rounds)
    low, mid, high = middle(a/b for a, b in zip(got['together'], got['copied']))
    print(f'{mid:.3f} times as many samples a second with gradients in the buckets ({low:.3f} to {high:.3f})')
    return True


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


FEW, MANY = 30, 330  # steps of a fit


def fits(pairs):
    "In each of two processes: seconds of the processor that a fit takes with and without the profiler, for fits of two lengths"
    import gc
    import torch
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from torch import nn
    import fastbench.distributed.learner, fastbench.measure.profiler
    from fastbench.machine.group import join, leave, rank
    from fastbench.train.learner import BenchLearner
    torch.set_num_threads(1)
    join('cpu')

    def make(n):
        torch.manual_seed(0)
        items = [(torch.randn(8), i % 2) for i in range(4*2*n)]
        learn = BenchLearner(DataLoaders(DataLoader(items, bs=4), []), nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss())
        return learn.to_distributed(cpu=True, tell=lambda o: None)

    def fit(n, profiled):
        learn = make(n)
        if profiled: learn.profile()
        gc.collect()
        began = time.thread_time()
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
        took = time.thread_time() - began
        learn.detach_distributed()
        return took

    for n in (FEW, MANY): fit(n, True)
    for i in range(pairs):
        turns = (False, True)[::(-1)**i]
        took = {(n, o): fit(n, o) for n in (FEW, MANY) for o in turns}
        print(*(took[n, True] - took[n, False] for n in (FEW, MANY)), flush=True)
    leave()


def profile(pairs=40):
    met = True
    for i, said in enumerate(p.communicate()[0] for p in started('fits', 2, pairs)):
        rows = [[float(o) for o in line.split()] for line in said.splitlines() if line.count('.') == 2]
        steps = [(many - few)/(MANY - FEW) for few, many in rows]
        low, mid, high = middle(steps)
        least, fixed, most = middle(few - FEW*o for (few, _), o in zip(rows, steps))
        met &= high < .01*STEP
        print(f'process {i}: the profiler takes {1e6*mid:.0f} us a step ({1e6*low:.0f} to {1e6*high:.0f}) and {1000*fixed:.1f} ms a fit ({1000*least:.1f} to {1000*most:.1f}), medians of {len(rows)} pairs: '
              f'{mid/STEP:.2%} of a step of {1000*STEP:.0f} ms ({low/STEP:.2%} to {high/STEP:.2%}): the bar of 1% is {verdict(low/STEP, high/STEP, .01)}')
    return met


if __name__ == '__main__':
    what = dict(speed=speed, buckets=buckets, start=start, profile=profile, fits=fits, turns=turns)
    if sys.argv[1:2] == [] or sys.argv[1] not in what: sys.exit(__doc__)
    sys.exit(0 if what[sys.argv[1]](*map(int, sys.argv[2:3])) else 1)

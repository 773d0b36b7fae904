"""A training with checkpoints, killed by kill -9 at random moments and started again, until it is over.

`python benchmarks/kills.py [--kills 50] [--seed 0]` kills as often as that, and says for each training how often it was killed, how many steps were lost at most, whether each kill left a
checkpoint that can be read, and whether the losses are those of a training that nobody killed. `--nproc 2 [--strategy fsdp]`: of a training of two processes, one of which is killed, or both; losses are equal within rounding. `--restarts 20` instead launches trainings of two processes, one of which is killed once, and counts those that torchrun starts anew (`--max-restarts 1`) and that go on from their checkpoint. `--cost` measures what a checkpoint costs instead: fits with and without, in turn."""
import argparse
import contextlib
import hashlib
import json
import mmap
import os
import random
import signal
import statistics
import struct
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Recorder
from fastai.torch_core import set_seed
from torch import nn

import fastai.callback.schedule  # adds fit_one_cycle
import fastbench.distributed.fsdp  # else each forked process would import it
import fastbench.distributed.learner  # adds distributed
import fastbench.distributed.ranks
from fastbench.callback.ema import EMACallback
from fastbench.machine.shard_files import load_parts
from fastbench.train.checkpoint import check_file, checkpoints, read_header, read_state
from fastbench.train.learner import BenchLearner
from fastbench.train.optimizer import fused_adamw
from fastbench.train.resume import CheckpointEvery

INTERVAL, EPOCHS = 4, 4
ROUNDING = 1e-6  # of losses and metrics in several processes


class Tell(Callback):
    "Leaves the number of steps that were begun where another process sees it"
    order = -2000
    def __init__(self, shared): self._shared = shared
    def before_batch(self):
        if self.training: self._shared[:8] = struct.pack('q', self.learn.train_iter + 1)


def train(path, shared=None, width=64, epochs=EPOCHS, stamps=None, strategy=None, **kwargs):
    "Losses, values and weights of a small training, as text"
    set_seed(5)
    xs, ys = torch.randn(192, 8), torch.randint(0, 3, (192,))
    data = list(zip(xs, ys))
    m = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(.3), nn.Linear(width, 3))
    learn = BenchLearner(DataLoaders(DataLoader(data, bs=8, shuffle=True), DataLoader(data, bs=32)), m, loss_func=nn.CrossEntropyLoss(),
                         opt_func=fused_adamw, cbs=[] if str(strategy).startswith('zero3') else EMACallback(.9), path=path)
    cbs = ([CheckpointEvery(folder='c', tell=lambda o: None, **kwargs)] if kwargs else []) + ([Tell(shared)] if shared else []) + ([stamps] if stamps else [])
    together = learn.distributed(strategy, cpu=True, tell=lambda o: None) if strategy else contextlib.nullcontext()
    with together, learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(epochs, 1e-2, cbs=cbs)
    weights = b''.join(p.detach().numpy().tobytes() for p in learn.model.parameters())
    return json.dumps([[o.item().hex() for o in learn.recorder.losses], [[v.hex() for v in o] for o in learn.recorder.values],
                       hashlib.sha1(weights).hexdigest()])


def started(path, shared, **kwargs):
    "The process that trains, and the file that gets what it came to"
    out = Path(path)/'out.json'
    pid = os.fork()
    if pid: return pid, out
    try: out.write_text(train(path, shared, **kwargs))
    except BaseException as e:
        print(f'{type(e).__name__}: {e}', file=sys.stderr)
        os._exit(1)
    os._exit(0)


def started_together(path, shared, nproc, strategy, **kwargs):
    "As many processes that train together, and the file that the first writes"
    out, store = Path(path)/'out.json', tempfile.mktemp(dir=path, prefix='store-')
    def rank(i):
        torch.distributed.init_process_group('gloo', store=torch.distributed.FileStore(store), rank=i, world_size=nproc)
        res = train(path, None if i else shared, strategy=strategy, **kwargs)
        if not i: out.write_text(res)
    pids = []
    for i in range(nproc):
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        try:
            os.dup2(os.open(Path(path)/f'said-{i}.txt', os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            rank(i)
            code = 0
        except BaseException as e: print(f'{type(e).__name__}: {e}', file=sys.stderr, flush=True)
        finally: os._exit(code)
    return pids, out


def kill_together(pids, shared, rng):
    "Kill -9 one of them, or all, while they start or some time after the first step was begun; those that are left end by themselves. True: it was over before"
    starting, after, since = rng.random() < .2, rng.uniform(0, .6), time.monotonic()
    while starting or not struct.unpack('q', shared[:8])[0] or time.monotonic() < since + after:
        if starting and time.monotonic() > since + 2*after: break
        if not starting and not struct.unpack('q', shared[:8])[0]: since = time.monotonic()
        if os.waitpid(pids[0], os.WNOHANG)[0]: return not any([os.waitpid(o, 0)[1] for o in pids[1:]])
        time.sleep(.0005)
    for pid in rng.choice([pids, [rng.choice(pids)]]): os.kill(pid, signal.SIGKILL)
    return not any([os.waitpid(o, 0)[1] for o in pids])


def ended(pid, after):
    "Kill -9 `pid` after some seconds. True: it was over before"
    end = time.monotonic() + after
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]: return True
        time.sleep(.0005)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFEXITED(status)


def check_whole(path):
    "An error if a checkpoint is damaged in any of its files"
    header = read_header(path)
    read_state(path)
    for name, want in header.get('files', {}).items(): check_file(path, name, want)
    if (path/'parts').is_dir(): load_parts(path/'parts')


def one_training(path, rng, most, interval=INTERVAL, nproc=1, strategy=None):
    "kills, the most steps that a kill lost, and what it came to: a training that is killed up to `most` times, and then left alone"
    shared, kills, lost = mmap.mmap(-1, 8), 0, 0
    folder = Path(path)/'models'/'c'
    while True:
        shared[:8] = bytes(8)
        if nproc == 1:
            pid, out = started(path, shared, steps=interval, resume=True)
            if ended(pid, rng.uniform(.02, .5) if kills < most else 600): break
        else:
            pids, out = started_together(path, shared, nproc, strategy, steps=interval, resume=True)
            if kills == most or kill_together(pids, shared, rng): break
        kills += 1
        begun, = struct.unpack('q', shared[:8])
        found = checkpoints(folder)
        for o in found: check_whole(o)
        if begun: lost = max(lost, begun - (read_header(found[-1])['train_iter'] if found else 0))
    if nproc > 1 and kills == most:
        for o in pids: os.waitpid(o, 0)
    return kills, lost, out.read_text() if out.exists() else None


def whole_training(nproc, strategy):
    "What a training comes to that nobody kills"
    with tempfile.TemporaryDirectory() as tmp:
        if nproc == 1: return train(tmp)
        pids, out = started_together(tmp, mmap.mmap(-1, 8), nproc, strategy)
        for o in pids: os.waitpid(o, 0)
        return out.read_text()


def same(got, whole, nproc):
    "Bit for bit in one process, within rounding in several"
    if nproc == 1 or not got: return got == whole
    def numbers(text): return [float.fromhex(v) for o in json.loads(text)[:2] for v in (o if isinstance(o[0], str) else sum(o, []))]
    a, b = numbers(got), numbers(whole)
    return len(a) == len(b) and max(abs(x - y) for x, y in zip(a, b)) <= ROUNDING


def kill_many(n, seed=0, tell=print, nproc=1, strategy='ddp'):
    "Rows (kills, lost steps, equal) of as many trainings as `n` kills take"
    rng, rows, left = random.Random(seed), [], n
    whole = whole_training(nproc, strategy)
    while left:
        with tempfile.TemporaryDirectory() as tmp: kills, lost, got = one_training(tmp, rng, min(left, 10), nproc=nproc, strategy=strategy)
        rows.append((kills, lost, equal := same(got, whole, nproc)))
        left -= kills
        tell(f'killed {kills} times: lost at most {lost} steps (a checkpoint every {INTERVAL}), losses, metrics'
             + (' and weights ' if nproc == 1 else ' ') + ('equal' if equal else 'DIFFER') + (', bit for bit' if got == whole and nproc > 1 else ''))
    return rows


class Stamps(Callback):
    "The seconds of each step but the first two of an epoch, by its number in the fit"
    order = -2000
    def __init__(self): self.seconds = {}
    def before_train(self): self._last = None
    def before_batch(self):
        now, n = time.perf_counter(), self.learn.train_iter
        if self.training and self._last and self.learn.iter > 2: self.seconds[n] = now - self._last
        self._last = now


def own_part(n=20_000):
    "Microseconds of a step that are the callback's, where nothing is due: its events alone"
    class Alone(Callback):
        order = -3000
        def before_step(self):
            if self.learn.train_iter: return
            cb, start = next(o for o in self.learn.cbs if type(o).__name__ == '_StepEnd'), time.perf_counter()
            for _ in range(n):
                cb.after_backward()
                cb.after_step()
                cb.after_batch()
            self._took = 1e6*(time.perf_counter() - start)/n
    alone = Alone()
    with tempfile.TemporaryDirectory() as tmp: train(tmp, epochs=1, stamps=alone, minutes=60)
    return alone._took


def cost(repeats=7):
    "Milliseconds of a step with and without the callback, the fits in turn; of one checkpoint, by the steps at whose end it was written"
    print(f'the events of CheckpointEvery in a step, nothing due: {own_part():.1f} us')
    for width in (64, 200_000):
        plain, idle, due, written = [], [], [], []
        for _ in range(repeats):
            for into, kwargs in ((plain, {}), (idle, dict(minutes=60)), (due, dict(steps=8)), (plain, {})):
                with tempfile.TemporaryDirectory() as tmp:
                    stamps = Stamps()
                    train(tmp, width=width, stamps=stamps, **kwargs)
                for n, t in stamps.seconds.items(): (written if into is due and n % 8 == 0 else into).append(t)
        base, idle, due, written = (1e3*statistics.median(o) for o in (plain, idle, due, written))
        print(f'{12*width/1e6:.1f} M parameters: a step {base:.2f} ms, {idle:.2f} ms with CheckpointEvery and nothing due; '
              f'a checkpoint {written - due:.1f} ms')


def restarts(n, nproc, strategy, tell=print):
    "Of `n` trainings of which a process is killed, how many went on from their checkpoint"
    from fastbench.bench.processes import launch_processes
    from fastbench.recipe import get_recipe
    from fastbench.runs.store import load
    trouble, well = f"{Path(__file__).resolve().parent.parent/'tests'/'examples'/'trouble.py'}:make", 0
    for i in range(n):
        with tempfile.TemporaryDirectory() as tmp:
            run = load(launch_processes(get_recipe(trouble, what='killed once'), nproc, tmp, strategy=strategy, max_restarts=1, checkpoint_every='3steps', device='cpu'))
        ok = run.status == 'ok' and run.resumed.get('steps') == [3]
        well += ok
        tell(f'{i+1}: ' + ('went on after step 3' if ok else f'{run.status}, {run.error or run.resumed}'), flush=True)
    print(f'{well} of {n} trainings were started anew and went on from their checkpoint')
    return well < n


if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--kills', type=int, default=50)
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--nproc', type=int, default=1, help='processes that train together')
    p.add_argument('--strategy', default='ddp', help='ddp, fsdp or a stage of ZeRO, of several processes')
    p.add_argument('--cost', action='store_true')
    p.add_argument('--restarts', type=int, help='trainings of several processes to start, kill once and start anew')
    args = p.parse_args()
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    if args.cost: sys.exit(cost())
    if args.restarts: sys.exit(restarts(args.restarts, max(2, args.nproc), args.strategy))
    if args.strategy.startswith('zero'):
        import fastbench.distributed.zero_state
        from fastbench.distributed.deepspeed import need_deepspeed
        need_deepspeed('cpu')  # before the fork
    rows = kill_many(args.kills, args.seed, nproc=args.nproc, strategy=args.strategy)
    worst = max(o[1] for o in rows)
    print(f'{sum(o[0] for o in rows)} kills in {len(rows)} trainings: lost at most {worst} steps, {sum(not o[2] for o in rows)} trainings differ')
    sys.exit(worst > INTERVAL or not all(o[2] for o in rows))

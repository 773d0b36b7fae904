"""What a speed-up gains on a recipe.

    python benchmarks/gains.py channels-last --recipe photos-xresnet18
    python benchmarks/gains.py bf16+channels-last --recipe photos-xresnet18 --set size=128 --set bs=16 --bar 2.2
    python benchmarks/gains.py fused --recipe mlp --against foreach --memory

Two Learners of one recipe, without and with the change, train in one process: short blocks of real fit steps there and back, after a warm-up that is
not counted (`fastbench.compare.paired`). A pair is the seconds of a step of each, the median of its blocks, and the verdict is the library's: 1% does not matter,
and fewer than 5 pairs are none. Batches are drawn once and reused by both sides, so that a slow loader does not blur the ratio: it is the ratio of the
training step (to-device, forward, loss, backward, optimizer, callbacks), not of a fit. Changes joined with `+` are put on one after another.
"""
import argparse
import platform
import subprocess
import sys
import warnings
from ast import literal_eval
from statistics import median
from threading import Event, Thread

warnings.filterwarnings('ignore')

import fastai
import psutil
import torch
from fastai.data.core import DataLoaders
from torch import nn

from fastbench.bench.learner import bench_learner
from fastbench.compare.paired import at_least, compare_pairs, step_seconds, time_pairs
from fastbench.errors import UserError, unknown
from fastbench.recipe import get_recipe


# Changes: each is a function of a Learner, or the recipe's fields that it sets

def _channels_last(**kwargs):
    def f(learn):
        from fastbench.callback.channelslast import ChannelsLast
        learn.add_cb(ChannelsLast(**kwargs))
    return f

def _compile(learn):
    from fastbench.callback.compiling import Compile
    learn.add_cb(Compile())

def _checkpointing(learn):
    from fastbench.callback.checkpointing import GradientCheckpointing
    learn.add_cb(GradientCheckpointing())

def _ema(learn):
    from fastbench.callback.ema import EMACallback
    learn.add_cb(EMACallback(.99))

def _opt(impl):
    def f(learn):
        from fastbench.train.optimizer import torch_opt
        name = learn.recipe.opt.rpartition('_')[2]  # a recipe's may be fused already
        learn.opt_func, learn.opt = torch_opt(name, impl, **(dict(mom=.9) if name == 'sgd' else {})), None
    return f

CHANGES = {
    'nothing': lambda learn: None,  # A/A: how quiet is the machine?
    'channels-last': _channels_last(),
    'layout': _channels_last(im2col=False),  # and nothing but that
    'compile': _compile,
    'bf16': dict(precision='bf16'),
    'fp16': dict(precision='fp16'),
    'to-half-bf16': lambda learn: learn.to_half('bf16'),
    'to-half-fp16': lambda learn: learn.to_half('fp16'),
    'onednn': dict(onednn=True),
    'fused': _opt('fused'),
    'foreach': _opt('foreach'),
    'ema': _ema,
    'checkpointing': _checkpointing,
}


SHOWN = {True: 'the interval lies above it', False: 'the interval lies below it', None: 'the interval holds it'}


# The two sides

class Batches(list):
    "A loader that has drawn already"
    def to(self, device): return self


def mlp(bs):
    "The scanned digits as rows of numbers, and a perceptron: a step so short that the loop shows"
    learn = bench_learner('digits-xresnet18', offline=True, bs=bs or 64)
    n = learn.dls.one_batch()[0][0].numel()
    learn.model = nn.Sequential(nn.Flatten(), nn.Linear(n, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(learn.dls.device)
    learn.splitter = lambda m: [list(m.parameters())]
    return learn


def make(change, args):
    "The Learner of one side; the data is drawn here"
    names = change.split('+')
    for o in names:
        if o not in CHANGES: raise UserError(unknown('change', o, list(CHANGES)))
    parts, fields = [CHANGES[o] for o in names], {k: _value(v) for k, _, v in (o.partition('=') for o in args.set)}
    for o in parts:
        if isinstance(o, dict): fields.update(o)
    if args.recipe == 'mlp':
        learn, precision = mlp(fields.get('bs')), fields.get('precision')
        if precision: getattr(learn, f'to_{precision}')()
    else: learn = bench_learner(args.recipe, device=args.device, **{'workers': 0, **fields})
    device, dl = learn.dls.device, learn.dls.train
    batches = [b for b, _ in zip(dl, range(args.draw))]
    batches = Batches(batches[i % len(batches)] for i in range(args.warm + args.steps))
    n_inp, learn.dls = learn.dls.n_inp, DataLoaders(batches, Batches(), device=device)
    learn.dls.n_inp = n_inp
    for o in parts:
        if callable(o): o(learn)
    learn.remove_cb(learn.progress)
    learn.logger = lambda *_: None
    return learn


def _value(v):
    try: return literal_eval(v)
    except (ValueError, SyntaxError): return v


def compare(a, b, args):
    "Seconds a step of both sides, a pair a row"
    def tell(i):
        if sys.stderr.isatty(): print(f'\r{i}/{args.pairs}', end='', file=sys.stderr)
    return time_pairs(make(a, args), make(b, args), args.pairs, skip=args.warm, warm=1, seed=None, tell=tell)  # before: compilation, allocators, caches


# Memory: each side in a process of its own, where the peak is only its own

def memory_of(change, args):
    "Run in a fresh process: bytes that training took at its peak, beyond what the process had before it"
    learn = make(change, args)
    device, process, peak, done = torch.device(learn.dls.device), psutil.Process(), [0], Event()
    before = process.memory_info().rss
    def look():
        while not done.wait(.002): peak[0] = max(peak[0], process.memory_info().rss - before)
    if device.type != 'cuda': Thread(target=look, daemon=True).start()
    step_seconds(learn, args.warm)
    done.set()
    return torch.cuda.max_memory_allocated(device) if device.type == 'cuda' else peak[0]


def memory(change, argv):
    got = subprocess.run([sys.executable, __file__, change, *argv, '--memory-of'], capture_output=True, text=True)
    return int(got.stdout.split()[-1]) if not got.returncode else None


def machine():
    cpu = platform.processor() or platform.machine()
    try: cpu = next(o.split(':')[1].strip() for o in open('/proc/cpuinfo') if o.startswith('model name'))
    except (OSError, StopIteration): pass
    gpu = f', {torch.cuda.get_device_name()}' if torch.cuda.is_available() else ''
    return f'{cpu}, {torch.get_num_threads()} threads{gpu}; torch {torch.__version__}, fastai {fastai.__version__}, Python {platform.python_version()}'


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('change', help=f"one of {', '.join(CHANGES)}, or several joined with +")
    parser.add_argument('--against', default='nothing', help='the other side (default: the recipe as it is)')
    parser.add_argument('--recipe', default='photos-xresnet18', help='a name of `fastbench list`, or mlp')
    parser.add_argument('--set', action='append', default=[], metavar='FIELD=VALUE', help='a field of the recipe: bs=16')
    parser.add_argument('--device')
    parser.add_argument('--pairs', type=int, default=10)
    parser.add_argument('--steps', type=int, default=8, help='steps counted in a block')
    parser.add_argument('--warm', type=int, default=2, help='steps at the beginning of a block that are not')
    parser.add_argument('--draw', type=int, default=2, help='batches drawn')
    parser.add_argument('--bar', type=float, help='ratio to be reached; exit code 1 where it is not')
    parser.add_argument('--memory', action='store_true', help='also the peak memory of each side, each in a process of its own')
    parser.add_argument('--memory-of', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pairs < 2: parser.error('--pairs: an interval needs 2 or more')
    if args.warm < 1: parser.error('--warm: 1 or more, a step is timed from the end of the one before it')
    try:
        if args.recipe != 'mlp': get_recipe(args.recipe)
        if args.memory_of: return print(memory_of(args.change, args))
        pairs = compare(args.against, args.change, args)
    except UserError as e: sys.exit(f'gains: {e}')
    verdict = compare_pairs(pairs)
    ratio, lo, hi = verdict.speedup
    against = '' if args.against == 'nothing' else f' against {args.against}'
    print(f"{args.change}{against} on {' '.join([args.recipe, *args.set])}: {verdict.verdict} {ratio:.2f}x [{lo:.2f}, {hi:.2f}]; "
          f'{1e3*median(a for a, _ in pairs):.3g} -> {1e3*median(b for _, b in pairs):.3g} ms a step, {args.pairs} pairs of {args.steps} steps')
    if args.memory:
        argv = [x for k in ('recipe', 'device', 'steps', 'warm', 'draw') if getattr(args, k) is not None for x in (f'--{k}', str(getattr(args, k)))]
        argv += [x for o in args.set for x in ('--set', o)]
        got = [memory(o, argv) for o in (args.against, args.change)]
        print('peak memory of training: ' + ' -> '.join('unknown' if o is None else f'{o/2**20:,.0f} MiB' for o in got))
    print(machine())
    if args.bar: print(f'bar {args.bar}x: {"reached" if ratio >= args.bar else "MISSED"}, {SHOWN[at_least(pairs, args.bar)]}')
    sys.exit(int(bool(args.bar) and ratio < args.bar))


if __name__ == '__main__': main()

"""What the profiler costs on a plain fastai Learner.

    python benchmarks/profiler_overhead.py

One process, fits with and without the profiler there and back (`fastbench.compare.paired`). The cost is the median difference of the pairs,
with the interval that holds it in 95 of 100.
Bars: 50 us a batch on the host, 1% of a 10 ms step.
"""
import argparse
import sys
import warnings
from functools import partial
from statistics import median
from time import perf_counter

warnings.filterwarnings('ignore')

import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

import fastbench.measure.profiler  # noqa: F401  (adds Learner.profile)
from bars import middle, verdict
from fastbench.compare.paired import time_pairs


class Net(nn.Module):
    "A linear layer in a step of at least `seconds`"
    def __init__(self, seconds=0.):
        super().__init__()
        self.lin, self.seconds = nn.Linear(64, 10), seconds

    def forward(self, x):
        end = perf_counter() + self.seconds
        while perf_counter() < end: pass
        return self.lin(x)


def learner(n, seconds):
    b = (torch.randn(64, 64), torch.randint(10, (64,)))
    learn = Learner(DataLoaders([b]*n, [b]), Net(seconds), loss_func=nn.CrossEntropyLoss())
    learn.remove_cb(learn.progress)
    learn.logger = lambda *_: None
    return learn


def fit(learn, profiled):
    if profiled: learn.profile()
    t = perf_counter()
    learn.fit(1)
    t = perf_counter() - t
    if profiled: learn.remove_cb(learn.profiler)
    return t


def pairs(n, seconds, k):
    "k pairs of seconds: (without, with)"
    learn = learner(n, seconds)
    return time_pairs(partial(fit, learn, False), partial(fit, learn, True), k)


def report(name, pairs, f, bar, unit):
    "One line with its verdict: the median of `f(without, with)` over `pairs` against `bar`"
    low, mid, high = middle(f(*o) for o in pairs)
    print(f'{name}: {mid:.2f} {unit} ({low:.2f} to {high:.2f}), bar {bar} {unit}: {verdict(low, high, bar)}')
    return high < bar


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--pairs', type=int, default=60)
    parser.add_argument('--batches', type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    n = args.batches
    short = pairs(n, 0., args.pairs)
    print(f'a batch without the profiler: {1e6*median(a for a, _ in short)/n:.0f} us')
    ok = report('cost of a batch', short, lambda a, b: 1e6*(b-a)/n, 50, 'us')
    ok &= report('share of a 10 ms step', pairs(50, .01, args.pairs//2), lambda a, b: 100*(b/a-1), 1, '%')
    one = pairs(1, 0., args.pairs)
    print(f'cost of a fit of one batch: {1e3*median(b-a for a, b in one):.2f} ms')
    sys.exit(0 if ok else 1)


if __name__ == '__main__': main()

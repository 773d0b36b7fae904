"""What the device's clock costs the host, beside the profiler without it.

    python benchmarks/device_clock.py

There need not be a GPU: events go into a queue that costs nothing and is always empty, so what is measured is our own Python, on fastai's loop, where an action ends at every
event. `torch.cuda.Event.record` comes on top, some 2 us each; how many a step has is printed, and a GPU says the rest (`fastbench selftest`). One process, fits with and without
the clock there and back (`fastbench.compare.paired`). Bar: with 2 us an event 1% of a 10 ms step."""
import argparse
import sys
import warnings
from functools import partial
from statistics import quantiles
from time import perf_counter

warnings.filterwarnings('ignore')

import torch

import fastbench.measure.profiler as profiler
from fastbench.measure.clock import DeviceClock
from fastbench.compare.paired import time_pairs
from profiler_overhead import fit, learner

RECORD = 2  # us, of an event of CUDA


class Event:
    __slots__ = ('at',)
    def query(self): return True
    def synchronize(self): pass
    def elapsed_time(self, o): return 1e3*(o.at - self.at)


class Queue:
    "A device that is never behind"
    side, can_hold, records = True, True, 0
    def event(self): return Event()
    def record(self, e):
        e.at = perf_counter()
        Queue.records += 1
    beside = record
    def hold(self, seconds): pass
    def calibrate(self, asked, took): pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--pairs', type=int, default=30)
    parser.add_argument('--batches', type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    learn, ways = learner(args.batches, 0.), {False: lambda *a: None, True: lambda device, hold: DeviceClock(Queue(), hold)}
    def run(clock):
        profiler._device_clock = ways[clock]
        return fit(learn, True)/args.batches*1e6
    for o in (False, True): run(o)
    Queue.records = 0
    found = [b - a for a, b in time_pairs(partial(run, False), partial(run, True), args.pairs, warm=0)]
    each = Queue.records/args.pairs/2/args.batches  # there and back
    lo, mid, hi = quantiles(found, n=4)
    cost = mid + RECORD*each
    print(f'device clock: {mid:.0f} us a batch [{lo:.0f}, {hi:.0f}] and {each:.0f} events; with {RECORD} us an event {cost:.0f} us, {cost/100:.2f}% of a 10 ms step, '
          f'bar 1%: {"reached" if cost <= 100 else "MISSED"}')


if __name__ == '__main__': sys.exit(main())

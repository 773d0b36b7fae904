"""Stand-ins for macOS and Windows, of which this project has neither machine.

What these tests show is that our code does not ask for what is missing there: processes that are forked, an event that takes a stream.
Whether PyTorch, fastai and the system do there what their sources say is not shown."""
import multiprocessing
import multiprocessing.context
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch


@contextmanager
def spawn_alone(monkeypatch):
    "Processes are begun anew unless one says otherwise, as on Windows and macOS, and with PyTorch from Python 3.14 on"
    spawn = multiprocessing.get_context('spawn')
    with monkeypatch.context() as m:
        m.setattr(multiprocessing.context._default_context, '_default_context', spawn)
        m.setattr(multiprocessing.context._default_context, '_actual_context', None)
        m.setattr(multiprocessing, 'get_all_start_methods', lambda: ['spawn'])
        yield


def having(module, **changes):
    "A module as one of ours sees it there; for all others it stays as it is"
    return SimpleNamespace(**(vars(module) | changes))


class Apple:
    "The part of torch's C++ beneath `torch.mps`, with the contract of ATen/mps/MPSEvent.mm: here the queue is passed at once"
    def __init__(self): self.at, self.asked, self.waits, self.last = {}, set(), 0, 0.
    def acquire(self, timing):
        self.at[n := -len(self.at)-1] = None # PyTorch frees those above 0
        return n
    def record(self, n):
        self.at[n] = time.perf_counter()
        self.asked.discard(n)
    def elapsed(self, a, b):
        self.waits += 1
        assert b not in self.asked, 'PyTorch would hang: it was told of this event once'
        self.asked.add(b)
        if self.at[b] <= self.at[a]: raise RuntimeError(f'End event {b} was not recorded after start event {a}')
        return 1e3*(self.at[b] - self.at[a])
    def synchronize_event(self, n): raise AssertionError('an event that is waited for may never tell its time')
    def synchronize(self): self.waits += 1


@contextmanager
def apple_queue(monkeypatch):
    "`torch.mps` with events, streams and random numbers of their own, as PyTorch 2.15 has them; tensors stay on the CPU"
    gpu = Apple()
    parts = dict(_mps_acquireEvent=gpu.acquire, _mps_releaseEvent=lambda n: None, _mps_recordEvent=gpu.record, _mps_queryEvent=lambda n: True,
                 _mps_synchronizeEvent=gpu.synchronize_event, _mps_elapsedTimeOfEvents=gpu.elapsed, _mps_deviceSynchronize=gpu.synchronize)
    with monkeypatch.context() as m:
        for k, v in parts.items(): m.setattr(torch._C, k, v, raising=False)
        for k in ('current_stream', 'default_stream'): m.setattr(torch.mps, k, lambda: 'the only one', raising=False)
        yield gpu

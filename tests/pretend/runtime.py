"Streams, events, generators, and what `torch.cuda` and `torch.accelerator` ask of the driver."
import os
import types
from itertools import count

import torch

from .state import Memory, merge


def classes(gpu):
    "`Stream`, `Event` and `Generator` of the pretended devices"
    ids, Real = count(32), torch.Generator

    class Stream:
        def __init__(self, device=None, priority=0, default=False):
            if not default: torch.cuda._lazy_init()
            self.device, self.priority, self.seen = gpu.resolve('cuda' if device is None else device), priority, {}
            self.device_index, self.device_type = self.device.index, 1
            self.stream_id = self.cuda_stream = 0 if default else next(ids)

        def __repr__(self): return f'<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>'
        def wait_event(self, event): event.wait(self)
        def wait_stream(self, stream): self.wait_event(stream.record_event())
        def record_event(self, event=None):
            event = Event() if event is None else event
            event.record(self)
            return event
        def query(self): return Event.of(self).query()
        def synchronize(self): gpu.wait('stream.synchronize', self, self.device)
        def is_capturing(self): return False
        def __enter__(self):
            self.context = torch.cuda.stream(self)
            self.context.__enter__()
            return self
        def __exit__(self, *args): self.context.__exit__(*args)

    class Event:
        def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
            self.enable_timing, self.at, self.device, self.stream, self.seen = enable_timing, None, None, None, {}

        @classmethod
        def of(cls, stream):
            event = cls()
            event.record(stream)
            return event

        def record(self, stream=None):
            stream = torch.cuda.current_stream() if stream is None else stream
            if self.device is not None and self.device != stream.device:
                raise RuntimeError(f"Event device {self.device.index} does not match recording stream's device "
                                   f'{stream.device.index}.')
            self.device, self.stream, self.seen, self.at = stream.device, stream, dict(stream.seen), gpu.clock()
            for f in gpu.on_record: f(self, stream)

        def wait(self, stream=None):
            stream = torch.cuda.current_stream() if stream is None else stream
            merge(stream.seen, self.seen)
            for f in gpu.on_stream_wait: f(stream, self)

        def query(self):
            done = self.at is None or self.at <= gpu.clock()
            if done: merge(gpu.host, self.seen)
            return done

        def synchronize(self):
            if self.at is not None: gpu.wait('event.synchronize', self, self.device)

        def elapsed_time(self, end):
            both = 'Both events must be'
            if not (self.enable_timing and end.enable_timing): raise ValueError(f"{both} created with argument 'enable_timing=True'.")
            if self.at is None or end.at is None: raise ValueError(f'{both} recorded before calculating elapsed time.')
            if not (self.query() and end.query()): raise RuntimeError(f'{both} completed before calculating elapsed time.')
            return 1e3*(end.at-self.at)

    class OfAnyKind(type(Real)):
        def __instancecheck__(cls, o): return Real in type(o).__mro__

    class Generator(Real, metaclass=OfAnyKind):
        def __new__(cls, device='cpu'):
            res = super().__new__(cls, 'cpu')
            res._device = gpu.resolve('cpu' if device is None else device)
            return res
        def __init__(self, device='cpu'): pass
        @property
        def device(self): return self._device

    return Stream, Event, Generator


class Driver:
    "The functions behind `torch.cuda`; `functions` has them by their names in `torch._C`"
    def __init__(self, gpu, Stream):
        self.gpu = gpu
        self.defaults = [Stream(i, default=True) for i in range(gpu.devices)]
        gpu.streams = list(self.defaults)

    def init(self): self.gpu.initialized, self.pid = True, os.getpid()
    def forked(self): return self.gpu.initialized and os.getpid() != self.pid

    def ask(self, index):
        "The memory of a device, which is not there before CUDA is initialised"
        if not self.gpu.initialized or not 0 <= index < self.gpu.devices: raise RuntimeError('Invalid device argument ')
        return self.gpu.memory[index]

    def set_device(self, index):
        torch.cuda._lazy_init()
        if not 0 <= index < self.gpu.devices: raise RuntimeError('CUDA error: invalid device ordinal')
        self.gpu.current = index

    def exchange(self, index):
        was = self.gpu.current
        if index >= 0: self.set_device(index)
        return was if index >= 0 else -1

    def synchronize(self, index=None):
        device = torch.device('cuda', self.gpu.current if index is None else index)
        whole = types.SimpleNamespace(device=device, seen={s: s.seen.get(s, 0) for s in self.known(device)})
        self.gpu.wait('synchronize', whole, device)

    def known(self, device):
        "Streams of a device that were ever used"
        heard = {s for o in self.gpu.streams + self.defaults for s in (o, *o.seen)}
        used = {s for b in self.gpu.blocks.values() for s in (*b.reads, *b.wrote)}
        return {s for s in heard | used if s.device == device}

    def empty_cache(self):
        for m in self.gpu.memory: m.trim()
        self.synchronize()

    def set_fraction(self, fraction, index): self.ask(index).fraction = fraction
    def sleep(self, cycles): self.gpu.launch(self.gpu.streams[self.gpu.current], '_sleep')
    def stream(self, device=None): return self.gpu.streams[self.index(device)]
    def default_stream(self, device=None): return self.defaults[self.index(device)]
    def index(self, device):
        torch.cuda._lazy_init()
        return self.gpu.resolve('cuda' if device is None else device).index
    def set_stream(self, stream):
        if stream is None: return
        self.gpu.streams[stream.device.index] = stream
        self.gpu.current = stream.device.index
    def info(self, index):
        m = self.ask(index)
        return m.total-m.reserved, m.total
    def properties(self, index):
        (major, minor), name = self.gpu.capability, self.gpu.name
        return types.SimpleNamespace(name=name, major=major, minor=minor, total_memory=self.gpu.memory[index].total, multi_processor_count=108,
                                     uuid=f'pretended-{index}', gcnArchName=f'sm_{major}{minor}')

    def functions(self):
        "By their names in `torch._C`"
        return {f'_cuda_{k}': v for k, v in self.of_cuda().items()} | {f'_accelerator_{k}': v for k, v in self.of_accelerator().items()}

    def of_cuda(self):
        g, none = self.gpu, lambda *args: None
        return dict(
            getDeviceCount=lambda: g.devices, init=self.init, getDevice=lambda: g.current, setDevice=self.set_device,
            synchronize=self.synchronize, sleep=self.sleep, isCurrentStreamCapturing=lambda: False,
            memoryStats=lambda i: self.ask(i).stats(), resetPeakMemoryStats=lambda i: self.ask(i).forget_peak(),
            resetAccumulatedMemoryStats=none, emptyCache=self.empty_cache, hostMemoryStats=dict,
            setMemoryFraction=self.set_fraction, getMemoryFraction=lambda i: self.ask(i).fraction,
            getArchFlags=lambda: 'sm_75 sm_80 sm_90', canDeviceAccessPeer=lambda a, b: True, clearCublasWorkspaces=none, ipc_collect=none)

    def of_accelerator(self):
        g, none = self.gpu, lambda *args: None
        return dict(
            getAccelerator=lambda: torch.device('cuda'), getDeviceIndex=lambda: g.current, setDeviceIndex=self.set_device,
            exchangeDevice=self.exchange, maybeExchangeDevice=self.exchange,
            getStream=self.stream, setStream=self.set_stream, synchronizeDevice=self.synchronize,
            isAllocatorInitialized=lambda: g.initialized, emptyCache=self.empty_cache, emptyHostCache=none,
            getDeviceStats=lambda i: self.ask(i).stats(), resetAccumulatedStats=none,
            resetPeakStats=lambda i: self.ask(i).forget_peak(), getMemoryInfo=self.info)

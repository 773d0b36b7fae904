"What a pretended device knows: which memory is on it, what was launched on which stream, and for what the host waited."
import math
import sys
import time
import weakref
from collections import namedtuple
from contextlib import contextmanager

import torch

CPU = torch.device('cpu')
Wait = namedtuple('Wait', 'kind place device')
Copy = namedtuple('Copy', 'way bytes pinned blocking stream place')  # way: H2D, D2H, D2D
Race = namedtuple('Race', 'kind place')  # what a device may do in the wrong order
_TORCH = 'overrides _ops _compile _tensor _jit_internal functional utils/ _dynamo/ cuda/ accelerator/ autograd/'.split()
_PLUMBING = ('/pretend/', '/contextlib.py', *(f'/torch/{o}' for o in _TORCH))


def place():
    "Whose code runs: the innermost line of fastbench, if there is one, and the innermost of all others"
    frame, ours, other = sys._getframe(1), None, None
    while frame is not None and not (ours and other):
        file = frame.f_code.co_filename
        if not any(o in file for o in _PLUMBING):
            at = f'{"/".join(file.split("/")[-2:])}:{frame.f_lineno} {frame.f_code.co_name}'
            if '/fastbench/' in file: ours = ours or at
            else: other = other or at
        frame = frame.f_back
    return f'{ours or "-"} < {other or "-"}'


def merge(clock, other):
    "What both know to be done"
    for stream, n in other.items(): clock[stream] = max(n, clock.get(stream, 0))


class Block:
    "One piece of memory. `device` None: made inside torch, on whichever device it is used first"
    __slots__ = 'device', 'bytes', 'pinned', 'home', 'wrote', 'reads', 'kept', 'ref'

    def __init__(self, device, size=0, pinned=False, home=None):
        self.device, self.bytes, self.pinned, self.home = device, size, pinned, home
        self.wrote, self.reads, self.kept, self.ref = {}, {}, set(), None


class Memory:
    "The allocator of one device: what is held now, and the most that was"
    def __init__(self, total):
        self.total, self.fraction, self.ooms = total, 1., 0
        self.allocated = self.peak = self.reserved = self.reserved_peak = 0

    def take(self, index, size, refuse=False):
        if refuse or self.allocated + size > self.total*self.fraction:
            self.ooms += 1
            free = self.total-self.allocated
            raise torch.OutOfMemoryError(f'CUDA out of memory. Tried to allocate {size/2**20:.2f} MiB. GPU {index} has a total '
                                         f'capacity of {self.total/2**30:.2f} GiB of which {free/2**30:.2f} GiB is free.')
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        if self.allocated > self.reserved: self.trim()
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def trim(self): self.reserved = math.ceil(self.allocated/2**21)*2**21
    def forget_peak(self): self.peak, self.reserved_peak = self.allocated, self.reserved

    def stats(self):
        def both(now, peak): return dict(all=dict(current=now, peak=peak))
        return dict(allocated_bytes=both(self.allocated, self.peak), reserved_bytes=both(self.reserved, self.reserved_peak),
                    num_ooms=self.ooms)


class Gpu:
    "The state of all pretended devices; what a test reads"
    def __init__(self, devices, capability, memory, name):
        self.devices, self.capability, self.name, self.initialized, self.current = devices, tuple(capability), name, False, 0
        self.memory = [Memory(memory) for _ in range(devices)]
        self.clock = time.perf_counter  # events are stamped with it
        self.waits, self.copies, self.races, self.ops = [], [], [], []  # ops: names, one for each launch
        self.on_launch, self.on_wait, self.on_record, self.on_stream_wait = [], [], [], []
        self.host, self.blocks, self.paused, self.called, self.fail_in = {}, {}, 0, False, None
        self.streams = []  # the current one of each device; the runtime fills it

    @property
    def launches(self): return len(self.ops)

    def forget(self):
        "Begin to count anew"
        for o in (self.waits, self.copies, self.races, self.ops): o.clear()

    def fail_after(self, n):
        "The allocation after `n` more runs out of memory, once"
        self.fail_in = n

    def resolve(self, device):
        "A device as torch takes it (text, number, `torch.device`), with its index where it is a GPU"
        if isinstance(device, int): device = torch.device('cuda', device)
        device = torch.device(device)
        if device.type != 'cuda': return device
        if device.index is None: return torch.device('cuda', self.current)
        if device.index >= self.devices: raise RuntimeError('CUDA error: invalid device ordinal')
        return device

    @contextmanager
    def pause(self):
        "What happens in the block is our own doing"
        self.paused += 1
        try: yield
        finally: self.paused -= 1

    # Memory

    def block(self, t):
        if t.layout != torch.strided: return None
        try: return self.blocks.get(torch._C.TensorBase.untyped_storage(t)._cdata)
        except NotImplementedError: return None

    def device_of(self, t):
        b = self.block(t)
        return b.device if b is not None and b.device is not None and b.device.type == 'cuda' else None

    def mark(self, t, device=None, pinned=False):
        "From now on the memory of `t` is on `device` (None: not known yet), or page-locked"
        return self.mark_storage(torch._C.TensorBase.untyped_storage(t), device, pinned)

    def mark_storage(self, storage, device=None, pinned=False):
        key = storage._cdata
        b = self.blocks.get(key)
        if b is None:
            b = self.blocks[key] = Block(None)
            b.ref = weakref.ref(storage, lambda _: self._freed(key))
        b.pinned = b.pinned or pinned
        if device is not None and b.device is None: self._settle(b, device, storage.nbytes())
        return b

    def _settle(self, b, device, size):
        if device.type == 'cuda':
            torch.cuda._lazy_init()
            size, refuse = math.ceil(size/512)*512, self.fail_in == 0
            if self.fail_in is not None and size: self.fail_in = None if refuse else self.fail_in-1
            self.memory[device.index].take(device.index, size, refuse)
            b.bytes, b.home = size, self.streams[device.index]
        b.device = device

    def unmark(self, t):
        key = torch._C.TensorBase.untyped_storage(t)._cdata
        if key in self.blocks: self._freed(key, False)

    def _freed(self, key, check=True):
        b = self.blocks.pop(key, None)
        if b is None or b.device is None or b.device.type != 'cuda': return
        self.memory[b.device.index].allocated -= b.bytes
        for stream, n in [*b.reads.items(), *b.wrote.items()]:
            if check and stream is not b.home and stream not in b.kept and not self._after(b.home.seen, stream, n):
                return self.races.append(Race('freed while another stream uses it (record_stream)', place()))

    # Order

    def _after(self, clock, stream, n): return clock.get(stream, 0) >= n or self.host.get(stream, 0) >= n

    def launch(self, stream, name):
        "Something is put into a stream's queue; its number there"
        self.ops.append(name)
        stream.seen[stream] = stream.seen.get(stream, 0)+1
        for f in self.on_launch: f(stream, name)
        return stream.seen[stream]

    def use(self, b, clock, write, stream=None, n=0):
        "A stream (None: the host) reads or writes a piece of memory: is what must come before it done, or ahead in the same queue?"
        who = 'the host' if stream is None else 'a stream'
        if any(not self._after(clock, s, k) for s, k in b.wrote.items()):
            self.races.append(Race(f'{who} uses memory before it is written (no wait for the stream that writes it)', place()))
        if write and any(not self._after(clock, s, k) for s, k in b.reads.items()):
            self.races.append(Race(f'{who} overwrites memory while another reads it', place()))
        if write: b.wrote, b.reads = ({} if stream is None else {stream: n}), {}
        elif stream is not None: b.reads[stream] = n

    def wait(self, kind, target, device=None):
        "The host waits for a stream, or for an event"
        for f in self.on_wait: f(kind, target)
        merge(self.host, target.seen)
        self.waits.append(Wait(kind, place(), device))

    def copied(self, source, target, came, went, non_blocking):
        "A copy between devices (None: the host), and what it makes the host wait for"
        stream, other = self.streams[(came or went).index], self.streams[(went or came).index]
        merge(stream.seen, other.seen)  # between two devices, both streams wait for each other
        n = self.launch(stream, 'copy')
        merge(other.seen, stream.seen)
        a, b = self.block(source), self.block(target)
        at_host = b if came else a
        pinned = at_host is not None and at_host.pinned
        if a is not None and (came or pinned): self.use(a, stream.seen, False, stream, n)
        if b is not None: self.use(b, stream.seen, True, stream, n)
        way = 'D2D' if came and went else 'H2D' if went else 'D2H'
        blocking = way != 'D2D' and not (non_blocking and pinned)
        self.copies.append(Copy(way, target.numel()*target.element_size(), pinned, blocking, stream, place()))
        if not blocking: return
        why = 'blocking' if not non_blocking else 'pageable memory'
        self.wait(f'copy {"to the device" if way == "H2D" else "to the host"}, {why}', stream, came or went)

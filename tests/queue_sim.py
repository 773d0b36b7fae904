"""A host that launches and devices that work off their queues, on a clock that is moved by hand: what is true is known, so what a profiler says can be checked.

What CUDA documents of queues is kept: a launch returns when it is queued, work in a stream runs in order, streams run side by side, an event completes when the
stream has reached it, a copy of pageable memory waits for the stream, at most `depth` launches are pending and the next one blocks. Kernels of two streams do not
slow each other here, and a launch never fails."""
from collections import defaultdict, deque

from fastbench.measure.stopwatch import ManualClock


class Stream:
    "Work in order; `free` is when the last of it ends"
    def __init__(self, device): self.device,self.free = device,0.
    def wait(self, event): self.free = max(self.free, event.at)


class Event:
    "Completes when its stream has come to it"
    at = None
    def query(self): return self.at is not None and self.at <= self.clock()
    def synchronize(self):
        self.device.waits += 1
        self.clock.now = max(self.clock(), self.at)
    def elapsed_time(self, o):
        if self.at is None or o.at is None: raise RuntimeError('Both events must be recorded before calculating elapsed time.')
        return 1e3*(o.at - self.at)


class Device:
    "A device of a host with that clock"
    def __init__(self, clock=None, launch=10e-6, event=1e-6, depth=1024, latency=3e-6):
        self.clock,self.cost,self.event_cost,self.depth,self.latency = clock or ManualClock(),launch,event,depth,latency
        self.main,self.copies,self.pending,self.waits = Stream(self),Stream(self),deque(),0
        self.busy,self.idle,self.label = defaultdict(float),defaultdict(float),'other'
        self.since = []  # (host time, label): where the host was

    def phase(self, label):
        "The host begins `label`; truth is kept by these"
        self.label = label
        self.since.append((self.clock(), label))

    def launch(self, n=1, kernel=2e-6, cost=None, stream=None):
        "`n` kernels"
        stream = stream or self.main
        for _ in range(n):
            while self.pending and self.pending[0] <= self.clock(): self.pending.popleft()
            if len(self.pending) >= self.depth: self.clock.now = self.pending.popleft()
            self.clock.sleep(self.cost if cost is None else cost)
            self._run(stream, kernel, self.label)

    def _run(self, stream, seconds, label):
        begins = max(stream.free, self.clock() + self.latency)
        if stream is self.main: self._waited(stream.free, begins)
        stream.free = begins + seconds
        self.pending.append(stream.free)
        if stream is self.main: self.busy[label] += seconds

    def _waited(self, a, b):
        "The device stood still from `a` to `b`: for what the host did in that time"
        after,end = [],b
        for t,label in reversed(self.since):
            if end <= a: break
            after.append((max(a, min(t, end)), end, label))
            end = min(end, t)
        for x,y,label in after: self.idle[label] += max(0., y - x)
        if end > a: self.idle['before'] += end - a

    def copy(self, seconds, blocking=True, stream=None):
        "To the device; of pageable memory the host waits until it is there"
        stream = stream or self.main
        self.clock.sleep(self.cost)
        self._run(stream, seconds, self.label)
        if blocking: self.sync(stream)

    def sync(self, stream=None):
        self.waits += 1
        self.clock.now = max(self.clock(), (stream or self.main).free)


class Queue:
    "Stands in for `fastbench.measure.clock.DeviceQueue`"
    def __init__(self, device, can_hold=True): self.sim,self.side,self.can_hold,self.paused = device,Stream(device),can_hold,0.
    def event(self):
        e = Event()
        e.clock,e.device = self.sim.clock,self.sim
        return e
    def record(self, e, stream=None):
        d = self.sim
        d.clock.sleep(d.event_cost)
        e.at = max((stream or d.main).free, d.clock() + d.latency)
    def beside(self, e): self.record(e, self.side)
    def hold(self, seconds):
        d = self.sim
        d.clock.sleep(d.cost)
        d.main.free = max(d.main.free, d.clock() + d.latency) + seconds
        self.paused += seconds
    def calibrate(self, asked, took): assert took > .999*asked > 0

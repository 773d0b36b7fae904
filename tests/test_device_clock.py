"""The device's clock against a queue whose truth is known: who waited for whom, and for how much of a step."""
from itertools import product

import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import Learner
from fastai.data.core import DataLoaders
from fastai.optimizer import SGD
from torch import nn

import fastbench.measure.profiler as profiler_module
from fastbench.measure.bound import device_parts, verdict
from fastbench.measure.clock import DeviceClock
from fastbench.measure.loader import copying
from fastbench.train.loop import FastLoop
from fastbench.measure.phases import rows
from queue_sim import Device, Queue

LAUNCHES = dict(forward=200, backward=400, step=60)


class Batches(list):
    "A loader: the host draws for `draw` seconds, copies, and augments on the device"
    def __init__(self, sim, batches, draw, copy, augment, kernel, pageable, pin):
        super().__init__(batches)
        self.sim, self.draw, self.copy, self.augment, self.kernel, self.pageable, self.pin = sim, draw, copy, augment, kernel, pageable, pin

    def __iter__(self):
        for b in super().__iter__():
            self.sim.phase('draw')
            self.sim.clock.sleep(self.draw)
            if self.pin:
                with copying(beside=True):
                    self.sim.clock.sleep(self.pin)
                    self.sim.copy(self.copy, blocking=False, stream=self.sim.copies)
            elif self.copy:
                with copying(): self.sim.copy(self.copy, blocking=self.pageable)
            if self.augment: self.sim.launch(self.augment, self.kernel)
            yield b


class Truth(Callback):
    "Keeps what the simulation knows of training steps, and where the host is"
    order = -1e9
    def __init__(self, sim): self.sim = sim
    def before_batch(self): self.sim.phase('work')
    def after_batch(self): self.sim.phase('draw')
    def after_train(self): self.sim.waits_in_training = self.sim.waits


def fit(loop=FastLoop, launch=10e-6, kernel=2e-6, draw=0., augment=0, copy=0., pageable=True, n=40, sync=False, can_hold=True, callbacks=0, monkeypatch=None, epochs=1, pin=0.):
    "A fit on a simulated device: rows of the table, and the simulation"
    sim = Device(launch=launch)
    queue = Queue(sim, can_hold)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)
        def forward(self, x):
            sim.launch(LAUNCHES['forward'], kernel)
            return self.lin(x)
    class Callbacks(Callback):
        def after_batch(self):
            if callbacks and self.training: sim.launch(callbacks, kernel)
            if sync: sim.sync()
    data = Batches(sim, [(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))]*n, draw, copy, augment, kernel, pageable, pin)
    learn = loop(DataLoaders(data, [], device=torch.device('cpu')), Net(), loss_func=nn.CrossEntropyLoss(), opt_func=SGD, cbs=[Truth(sim), Callbacks()])
    backward, step = learn._backward, learn._step
    learn._backward = lambda: (sim.launch(LAUNCHES['backward'], kernel), backward())
    learn._step = lambda: (sim.launch(LAUNCHES['step'], kernel), step())
    with pytest.MonkeyPatch.context() as m:
        m.setattr(profiler_module, '_device_clock', lambda device, hold: DeviceClock(queue, hold))
        learn.profile()
        learn.profiler.watch.clock = sim.clock
        with learn.no_bar(), learn.no_logging(): learn.fit(epochs)
    return rows(learn.profiler.profile), sim, learn.profiler


def parts(table): return device_parts({r['action']: r for r in table if r['phase'] == 'train'})


def truth(sim, augment, copy, kernel, n=40):
    "Shares of the device's time in the fit: what it did, and what the host did while it waited"
    feed = n*(augment*kernel + copy)
    busy, idle = sum(sim.busy.values()), sum(v for k, v in sim.idle.items() if k in ('draw', 'work'))
    total = busy + idle
    return {'input-bound': sim.idle['draw']/total, 'input-bound on the device': feed/total, 'launch-bound': sim.idle['work']/total, 'compute-bound': (busy - feed)/total}


LEVELS = (2e-6, 10e-6, 30e-6), (2e-6, 10e-6, 40e-6), (0., 2e-3, 20e-3), (0, 600), (0., 2e-3)
# launch, kernel, draw, augment, copy: each combination once with either kind of copy, in turns with fastai's loop and ours
GRID = [(sum(at) % 2, tuple(v[i] for v, i in zip(LEVELS, at))) for at in product(*(range(len(o)) for o in LEVELS))]


@pytest.mark.parametrize('loop', [Learner, FastLoop])
@pytest.mark.parametrize('pageable', [True, False])
def test_verdict_over_the_grid(loop, pageable):
    wrong, half = [], (loop is FastLoop) ^ pageable
    for launch, kernel, draw, augment, copy in (o for side, o in GRID if side == half):
        args = loop, launch, kernel, draw, augment, copy, pageable
        (table, _, prof), (_, sim, _) = fit(*args), fit(*args, can_hold=False)
        got, want = parts(table), truth(sim, augment, copy, kernel)
        off = max(abs(got[k] - want[k]) for k in want)
        if off > .05: wrong.append((launch, kernel, draw, augment, copy, round(off, 3), {k: (round(got[k], 2), round(want[k], 2)) for k in want}))
    assert not wrong, '\n'.join(map(str, wrong))


def row(table, action, column='device_mean', phase='train'): return next(r[column] for r in table if (r['phase'], r['action']) == (phase, action))


@pytest.mark.parametrize('kwargs, bound', [
    (dict(launch=10e-6, kernel=2e-6), 'launch-bound'),
    (dict(launch=10e-6, kernel=40e-6), 'compute-bound'),
    (dict(launch=10e-6, kernel=40e-6, copy=1e-3), 'compute-bound'),  # the host's draw is mostly the device's step before
    (dict(launch=10e-6, kernel=10e-6), 'compute-bound'),
    (dict(launch=10e-6, kernel=2e-6, draw=20e-3), 'input-bound'),
    (dict(launch=10e-6, kernel=40e-6, augment=600), 'input-bound on the device'),
    (dict(launch=10e-6, kernel=40e-6, sync=True), 'compute-bound')])
@pytest.mark.parametrize('loop', [Learner, FastLoop])
def test_the_verdict_names_what_it_is(loop, kwargs, bound):
    table, sim, _ = fit(loop, **kwargs)
    v = verdict(table)
    assert v['bound'] == bound and v['text'].startswith(f'{bound}: {v["share"]:.0%} of the step')


@pytest.mark.parametrize('kwargs', [dict(), dict(kernel=40e-6, augment=600), dict(draw=5e-3, copy=2e-3), dict(callbacks=100), dict(kernel=40e-6, sync=True)])
def test_rows_add_up_to_the_device_step(kwargs):
    table, sim, prof = fit(**kwargs)
    of = {r['action']: r for r in table if r['phase'] == 'train'}
    whole = of.pop('step')
    assert sum(r['device_total'] or 0 for r in of.values()) == pytest.approx(whole['device_total'], rel=.01)
    assert sum(device_parts({'step': whole, **of}).values()) == pytest.approx(1, abs=.01)
    assert whole['device_busy'] + whole['device_waiting'] == pytest.approx(whole['device_mean'], rel=.01)


def test_device_work_has_the_row_of_what_launched_it():
    table, *_ = fit(kernel=40e-6, augment=300, copy=2e-3, pageable=False, callbacks=100)
    ms = {a: 1e3*row(table, a) for a in ('draw', 'to_device', 'forward', 'backward', 'opt_step', 'callbacks')}
    assert ms == pytest.approx(dict(draw=12, to_device=2, forward=8, backward=16, opt_step=2.4, callbacks=4), rel=.01)


def test_the_copy_is_no_wait_for_the_loader():
    "Of a blocking copy the host's draw holds all of the step before"
    table, *_ = fit(kernel=40e-6, copy=2e-3)
    assert row(table, 'to_device', 'mean') > .7*row(table, 'step', 'mean') and row(table, 'draw', 'mean') < 1e-4
    assert 1e3*row(table, 'to_device') == pytest.approx(2, rel=.01)


@pytest.mark.parametrize('kernel', [2e-6, 40e-6])
@pytest.mark.parametrize('pin', [1e-3, 5e-3])
@pytest.mark.parametrize('loop', [Learner, FastLoop])
def test_a_copy_beside_the_computation_is_no_work_of_the_device(loop, pin, kernel):
    "The host pins the batch, and a device that has caught up waits for that: an H200 was said to work on its input for a third of a step"
    table, sim, _ = fit(loop, kernel=kernel, copy=60e-6, pin=pin)
    assert row(table, 'to_device', 'mean') == pytest.approx(pin, rel=.05)
    assert row(table, 'to_device', 'device_busy') < 1e-5 and row(table, 'step', 'device_busy') is not None
    got, want = parts(table), truth(sim, 0, 0, kernel)
    assert got['input-bound on the device'] < .01 and got['input-bound'] == pytest.approx(want['input-bound'], abs=.05)


@pytest.mark.parametrize('kwargs', [dict(), dict(kernel=40e-6), dict(draw=5e-3, augment=300), dict(kernel=10e-6)])
def test_the_host_never_waits_and_is_hardly_slowed(kwargs):
    (_, sim, _), (_, plain, _) = fit(**kwargs, n=400), fit(**kwargs, n=400, can_hold=False)
    assert sim.waits_in_training == 0 and sim.waits > 0  # after the fit
    assert sim.clock() < 1.01*plain.clock()


def test_without_pauses_what_is_not_known_is_missing():
    table, *_ = fit(can_hold=False)
    assert row(table, 'forward', 'device_busy') is None and row(table, 'step', 'device_busy') is None
    assert row(table, 'forward', 'device_waiting') == pytest.approx(row(table, 'forward'), rel=.01)
    assert verdict(table)['text'].startswith('launch-bound: up to ')
    table, *_ = fit(kernel=40e-6, can_hold=False)  # far behind but for the first steps
    assert row(table, 'backward', 'device_busy') == pytest.approx(row(table, 'backward'), rel=.05) and verdict(table)['bound'] == 'compute-bound'


def test_no_pause_where_the_device_is_behind():
    _, _, prof = fit(kernel=40e-6)
    assert len(prof.profile.held['train']) <= 1 and len(prof.profile.device['train']) >= 38


def test_a_device_without_streams_says_less(monkeypatch):
    "As of MPS: events, and nothing beside the queue"
    class Bare(Queue):
        def __init__(self, device, can_hold):
            super().__init__(device, False)
            self.side = None
    monkeypatch.setitem(globals(), 'Queue', Bare)
    table, *_ = fit()
    assert row(table, 'forward') == pytest.approx(2e-3, rel=.02) and row(table, 'forward', 'device_busy') is None
    assert verdict(table)['bound'] == 'compute- or launch-bound'
    table, *_ = fit(draw=20e-3)
    assert verdict(table)['bound'] == 'input-bound'


def test_many_fits_and_a_cut_one():
    table, sim, prof = fit(epochs=3)
    assert prof.profile.steps['train'].n == 120 and row(table, 'step', 'calls') == 120
    assert len(prof.watch.device.pool) < 200  # events are used again


def test_the_profile_survives_json():
    import json
    from fastbench.measure.phases import from_dict, to_dict
    table, _, prof = fit(draw=1e-3)
    again = rows(from_dict(json.loads(json.dumps(to_dict(prof.profile)))))
    assert [r['device_busy'] for r in again] == pytest.approx([r['device_busy'] for r in table], abs=1e-8)
    old = to_dict(prof.profile)
    del old['waited'], old['held']
    assert verdict(rows(from_dict(old)))['bound'] == 'compute- or launch-bound'  # written before anybody knew


# --- the simulation, against what CUDA documents

def test_launches_return_at_once_and_work_is_in_order():
    d = Device(launch=10e-6)
    d.launch(100, 50e-6)
    assert d.clock() == pytest.approx(1e-3) and d.main.free == pytest.approx(10e-6 + 100*50e-6 + d.latency)


def test_the_queue_is_as_long_as_it_is():
    d = Device(launch=1e-6, depth=10)
    d.launch(100, 50e-6)
    assert d.clock() > 80*50e-6  # the host waited for a place


def test_a_pageable_copy_waits_for_the_stream_and_a_pinned_one_does_not():
    d = Device()
    d.launch(100, 50e-6)
    d.copy(1e-3, blocking=False)
    assert d.clock() < 2e-3 and d.waits == 0
    d.copy(1e-3)
    assert d.clock() == d.main.free and d.waits == 1


def test_streams_run_side_by_side_and_wait_for_events():
    d = Device()
    q = Queue(d)
    d.launch(100, 50e-6)
    side, main = q.event(), q.event()
    q.record(side, d.copies)
    q.record(main)
    assert side.query() is False and side.at < d.clock() + 2*d.latency < main.at
    d.copies.wait(main)
    d.copy(1e-3, blocking=False, stream=d.copies)
    assert d.copies.free == pytest.approx(main.at + 1e-3)
    with pytest.raises(RuntimeError): q.event().elapsed_time(main)
    assert side.elapsed_time(main) == pytest.approx(1e3*(main.at - side.at))


def test_devices_do_not_wait_for_each_other():
    a = Device()
    b = Device(a.clock)
    a.launch(10, 1e-3)
    b.launch(1, 1e-6)
    assert b.main.free < a.main.free


def test_truth_says_what_the_host_did_while_the_device_waited():
    d = Device(launch=10e-6, latency=0.)
    d.phase('draw')
    d.clock.sleep(1e-3)
    d.phase('work')
    d.launch(10, 2e-6)
    assert d.idle['draw'] == pytest.approx(1e-3) and d.idle['work'] == pytest.approx(10e-6 + 9*8e-6) and d.busy['work'] == pytest.approx(20e-6)

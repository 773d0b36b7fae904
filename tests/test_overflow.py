"fp16 whose overflowing steps are skipped on the device: the numbers of a host that asks, without its asking."
from functools import partial

import pytest
import torch
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.optimizer import Adam, OptimWrapper
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastbench.callback.amp as amp
from fastbench.callback.amp import MixedPrecision, StepLog, skips_on_device
from fastbench.callback.half import HalfPrecision
from fastbench.train.muon import muon
from fastbench.train.optimizer import foreach_adamw, fused_adam, fused_adamw, fused_sgd
from fastbench.train.learner import BenchLearner
from test_profiler import on

pytestmark = pytest.mark.usefixtures('one_thread')


def wrapped(cls, **more): return lambda p, **kw: OptimWrapper(p, partial(cls, fused=True, **more), **kw)


OPTS = dict(adamw=fused_adamw, adam=fused_adam, sgd=partial(fused_sgd, mom=.9), plain=fused_sgd, l2=partial(fused_sgd, mom=.9, decouple_wd=False),
            nesterov=partial(fused_sgd, mom=.9, nesterov=True), muon=partial(muon, wd=1e-3), wrapped_adamw=wrapped(torch.optim.AdamW), wrapped_sgd=wrapped(torch.optim.SGD, momentum=.9))
CBS = dict(mixed=lambda **kw: MixedPrecision('fp16', **kw), half=lambda **kw: HalfPrecision('fp16', **kw), static=lambda **kw: HalfPrecision('fp16', loss_scale=2.**16),
           scaled=lambda **kw: HalfPrecision('bf16', 'dynamic', allow_emulation=True, **kw), clipped=lambda **kw: HalfPrecision('fp16', clip=.1, **kw))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.lin, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x): return self.out(torch.relu(self.lin(torch.relu(self.bn(self.conv(x))).flatten(1))))


def make(opt_func, cb='mixed', n=14, cbs=None, init_scale=2.**30, growth_interval=2, **kwargs):
    torch.manual_seed(0)
    data = [[(torch.randn(8, 1, 4, 4), torch.randint(3, (8,))) for _ in range(m)] for m in (n, 2)]
    torch.manual_seed(1)
    learn = BenchLearner(DataLoaders(*data), Net(), loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, lr=.01, wd=.5 if 'muon' not in str(opt_func) else None, cbs=cbs, **kwargs)
    learn.logger = lambda *_: None
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    return learn.add_cb(CBS[cb](init_scale=init_scale, growth_interval=growth_interval) if cb else [])


@pytest.fixture(autouse=True)
def fp16_on_cpu(monkeypatch): monkeypatch.setattr(amp, 'check_precision', lambda *a: None)


def kept(learn):
    "Moments and steps, zeros where an optimizer has none yet"
    opt = learn.opt.opt
    return {i: {k: v.clone() for k, v in opt.state.get(p, {}).items() if v is not None} for i, p in enumerate(p for g in opt.param_groups for p in g['params'])}


def same_state(a, b):
    for x, y in zip(kept(a).values(), kept(b).values()):
        for k in {*x, *y}: torch.testing.assert_close(x.get(k, torch.zeros(())).expand_as(y.get(k, x.get(k))), y.get(k, torch.zeros_like(x[k]) if k in x else None), rtol=0, atol=0)


def both(monkeypatch, f, *args, **kwargs):
    "The same fit, told on the device and asked by the host"
    res = []
    for way in (skips_on_device, lambda opt: False):
        monkeypatch.setattr(amp, 'skips_on_device', way)
        res.append(make(*args, **kwargs))
        f(res[-1])
    a, b = res
    assert all(torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values()))
    same_state(a, b)
    m, n = a.mixed_precision, b.mixed_precision
    assert m.scales == n.scales and m.skipped == n.skipped and a.scaler.get_scale() == b.scaler.get_scale()
    return a


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('cb', CBS)
def test_as_if_the_host_had_asked(opt, cb, monkeypatch):
    learn = both(monkeypatch, lambda o: o.fit_one_cycle(2), OPTS[opt], cb)
    mp = learn.mixed_precision
    assert all(p.isfinite().all() for p in learn.model.parameters())
    if cb in ('mixed', 'half', 'clipped'): assert len(mp.skipped) > 8 and mp.skipped[0] == 0 and len(mp.scales) > 4 and len(mp.scales) + len(mp.skipped) == 28


@pytest.mark.parametrize('opt', ['adamw', 'sgd', 'muon', 'wrapped_adamw'])
@pytest.mark.parametrize('kind', ['clip', 'accumulate', 'both'])
def test_with_clipping_and_accumulation(opt, kind, monkeypatch):
    cbs = dict(clip=[partial(GradientClip, .1)], accumulate=[partial(GradientAccumulation, 16)], both=[partial(GradientClip, .1), partial(GradientAccumulation, 16)])[kind]
    learn = both(monkeypatch, lambda o: (o.add_cbs([f() for f in cbs]), o.fit(2)), OPTS[opt])
    assert learn.mixed_precision.skipped and learn.mixed_precision.scales


@pytest.mark.parametrize('opt', OPTS)
def test_a_fit_in_which_all_overflow_changes_nothing(opt):
    learn = make(OPTS[opt], 'static', n=4)
    learn.loss_func = lambda p, y: p.sum()*float('inf')
    before = [p.clone() for p in learn.model.parameters()]
    learn.fit(1)
    assert learn.mixed_precision.skipped == [0, 1, 2, 3] and learn.mixed_precision.scales == []
    assert all(torch.equal(a, b) for a, b in zip(before, learn.model.parameters()))
    assert all(not v.any() for s in kept(learn).values() for v in s.values())


class Reads(TorchDispatchMode):
    "Counts what would make a host wait for its device"
    n = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if str(f) in ('aten._local_scalar_dense.default', 'aten.nonzero.default', 'aten.equal.default'): self.n += 1
        return f(*args, **(kwargs or {}))


def reads(learn):
    "Reads between a loss and the end of its batch"
    seen, mode = [], []
    def begin(): mode.append(Reads()), mode[-1].__enter__()
    def end():
        if learn.training: mode[-1].__exit__(None, None, None), seen.append(mode[-1].n)
    first, last = on(before_backward=begin), on(after_step=end)
    first.order, last.order = -100, 100
    learn.add_cbs([first, last]).fit(1)
    return seen


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('cb', CBS)
def test_nothing_is_read(opt, cb):
    "Except by a CPU's own kernels, which look at `found_inf` themselves"
    learn = make(OPTS[opt], cb, n=6)
    assert set(reads(learn)) == {0}


@pytest.mark.parametrize('opt', [Adam, foreach_adamw, lambda p, **kw: OptimWrapper(p, torch.optim.AdamW, **kw)])
def test_other_optimizers_are_asked(opt):
    learn = make(opt, n=6, init_scale=2.**10)
    assert not skips_on_device((learn.create_opt(), learn.opt)[1]) and min(reads(learn)) > 0 and len(learn.mixed_precision.scales) == 6


def test_which_can():
    w = [nn.Parameter(torch.ones(2))]
    assert skips_on_device(fused_adamw(w, lr=.1)) and skips_on_device(muon(w)) and not skips_on_device(foreach_adamw(w, lr=.1)) and not skips_on_device(Adam(w, lr=.1))
    assert not skips_on_device(OptimWrapper(w, partial(torch.optim.SGD, fused=True, momentum=.9, dampening=.1), lr=.1))
    assert not skips_on_device(fused_adamw([w[0], nn.Parameter(torch.ones(2, device='meta'))], lr=.1)), 'found_inf is on one device'

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True
        def step(self, closure=None, grad_scaler=None): "The contract before"
    assert not skips_on_device(OptimWrapper(w, Old, lr=.1))


def test_the_log_reads_once_and_on_any_number_of_steps(monkeypatch):
    monkeypatch.setattr(StepLog, 'chunk', 4)
    log = StepLog()
    with Reads() as mode:
        for i in range(11): log.add(i, torch.tensor(2.**i), torch.tensor(float(i % 3 == 0)))
        assert mode.n == 0 and log.scales == [] and len(log._rows) == 3
    assert log.read().skipped == [0, 3, 6, 9] and log.scales == [2.**i for i in range(11) if i % 3]
    log.add(11, torch.tensor(1.), torch.tensor(0.))
    assert log.read().scales[-1] == 1. and log.read().scales[-1] == 1. and len(log.scales) == 8


@pytest.mark.parametrize('event', ['before_step', 'after_step', 'after_backward'])
def test_the_optimizer_is_told_for_a_step_alone(event):
    learn, seen = make(fused_adamw, n=4), []
    late = on(**{event: lambda: 1/0})
    late.order = 50
    learn.add_cb(late)
    with pytest.raises(ZeroDivisionError): learn.fit(1)
    assert 'found_inf' not in vars(learn.opt) and learn.mixed_precision._told is None
    learn.remove_cb(late)
    learn.add_cb(on(after_step=lambda: seen.append('found_inf' in vars(learn.opt)))).fit(1)
    assert 'found_inf' not in vars(learn.opt.opt) and len(seen) == 4


def test_events_of_a_step_that_is_skipped():
    "Asked, fastai's: `after_cancel_step`. Told: a step like any other"
    for f, want in ((fused_adamw, ['late', 'after']), (foreach_adamw, ['cancel', 'after'])):
        learn, seen = make(f, 'static', n=1), []
        learn.loss_func = lambda p, y: p.sum()*float('inf')
        late = on(before_step=lambda: seen.append('late'), after_cancel_step=lambda: seen.append('cancel'), after_step=lambda: seen.append('after'))
        late.order = 20
        learn.add_cb(late).fit(1)
        assert seen == want


def test_torchs_own_scaler_may_step_it():
    "PyTorch's recipe with an optimizer of ours: `scaler.step(opt)` hands it the scale, too"
    for f in (fused_adamw, partial(fused_sgd, mom=.9), muon):
        w, v = (nn.Parameter(torch.ones(4)) for _ in range(2))
        a, b, scaler = f([w], lr=.1), f([v], lr=.1), torch.amp.GradScaler('cpu', init_scale=8.)
        for g in (torch.arange(4.), torch.full((4,), float('inf')), torch.ones(4)):
            w.grad, v.grad = g*scaler.get_scale() if scaler._scale is not None else scaler.scale(g), g.clone()
            scaler.step(a)
            scaler.update()
            if g.isfinite().all(): b.step()
        torch.testing.assert_close(w, v)

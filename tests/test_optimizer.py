"TorchOptimizer: fastai's numbers, rules and checkpoints from PyTorch's fused and foreach optimizers."
import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from fastai.callback.schedule import Learner  # noqa: F401  (adds fit_one_cycle, fine_tune, lr_find)
from fastai.callback.tracker import ReduceLROnPlateau
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders, Datasets
from fastai.learner import load_learner
from fastai.optimizer import SGD, Adam
from torch import nn

import fastbench.callback.amp as amp
from fastbench.callback.amp import MixedPrecision
from fastbench.callback.half import HalfPrecision
from fastbench.bench.learner import bench_learner
from fastbench.train.optimizer import TorchOptimizer, foreach_adam, foreach_adamw, foreach_sgd, fused_adam, fused_adamw, fused_sgd, torch_opt
from fastbench.errors import UserError
from fastbench.train.learner import BenchLearner
from fastbench.train.muon import muon
from gpu import needs_gpu, to_gpu
from test_profiler import on

PAIRS = {
    'adamw': (Adam, fused_adamw, foreach_adamw),
    'adamw eps': (partial(Adam, eps=1e-3, sqr_mom=.95), partial(fused_adamw, eps=1e-3, sqr_mom=.95), partial(foreach_adamw, eps=1e-3, sqr_mom=.95)),
    'adam': (partial(Adam, decouple_wd=False), fused_adam, foreach_adam),
    'sgd': (SGD, fused_sgd, foreach_sgd),
    'sgd mom': (partial(SGD, mom=.9), partial(fused_sgd, mom=.9), partial(foreach_sgd, mom=.9)),
    'sgd l2': (partial(SGD, mom=.9, decouple_wd=False), partial(fused_sgd, mom=.9, decouple_wd=False), partial(foreach_sgd, mom=.9, decouple_wd=False)),
}
EACH = [(theirs, ours) for theirs, *both in PAIRS.values() for ours in both]
IDS = [f'{impl} {k}' for k in PAIRS for impl in ('fused', 'foreach')]


pytestmark = pytest.mark.usefixtures('one_thread')


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mid, self.head = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x): return self.head(torch.relu(self.mid(torch.relu(self.body(x)))))


def three(m): return [list(o.parameters()) for o in (m.body, m.mid, m.head)]


def make(opt_func, n=50, splitter=three, cbs=None, lr=.01, wd=.5, data=None, **kwargs):
    torch.manual_seed(0)
    data = data or ([(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(n)], [(torch.randn(16, 8), torch.randint(3, (16,)))])
    torch.manual_seed(1)
    learn = BenchLearner(DataLoaders(*data), Net(), loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, lr=lr, wd=wd, splitter=splitter, cbs=cbs, **kwargs)
    learn.logger = lambda *_: None
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    return learn


def params(learn): return [p.detach().clone() for p in learn.model.parameters()]
def same(a, b): return all(torch.allclose(x, y, rtol=2e-4, atol=2e-6) for x, y in zip(params(a), params(b)))


def both(theirs, ours, f, **kwargs):
    a, b = make(theirs, **kwargs), make(ours, **kwargs)
    start = params(a)
    f(a), f(b)
    assert isinstance(b.opt, TorchOptimizer) and same(a, b) and not all(torch.equal(x, y) for x, y in zip(start, params(b)))
    return a, b


@pytest.mark.parametrize('theirs,ours', EACH, ids=IDS)
class TestAsFastai:
    def test_flat(self, theirs, ours): both(theirs, ours, lambda o: o.fit(1))
    def test_one_cycle(self, theirs, ours):
        a, b = both(theirs, ours, lambda o: o.fit_one_cycle(1, slice(1e-3, 1e-2)))
        assert a.opt.hypers == b.opt.hypers and a.recorder.hps == b.recorder.hps
    def test_one_group(self, theirs, ours): both(theirs, ours, lambda o: o.fit_one_cycle(1), splitter=lambda m: [list(m.parameters())])
    def test_wd_everywhere(self, theirs, ours): both(theirs, ours, lambda o: o.fit(1), wd_bn_bias=True)
    def test_frozen(self, theirs, ours):
        for train_bn in (True, False):
            def f(learn):
                learn.freeze()
                assert [p.requires_grad for p in learn.model.body.parameters()] == [False, train_bn, train_bn]
                learn.fit_one_cycle(1)
            a, b = both(theirs, ours, f, train_bn=train_bn)
            assert torch.equal(a.model.mid.weight, b.model.mid.weight), 'frozen, so untouched'
    def test_clipped_and_accumulated(self, theirs, ours): both(theirs, ours, lambda o: o.add_cbs([GradientClip(.1), GradientAccumulation(48)]).fit(1))


@pytest.mark.parametrize('theirs,ours', EACH, ids=IDS)
@pytest.mark.parametrize('way', ['theirs to ours', 'ours to theirs', 'ours to ours'])
def test_a_checkpoint_goes_on(theirs, ours, way, tmp_path):
    first, _, then = [dict(theirs=theirs, ours=ours).get(o) for o in way.split()]
    a = make(first, path=tmp_path, n=10)
    a.fit(1)
    a.save('x')
    saved = torch.load(tmp_path/'models'/'x.pth', weights_only=first is ours)['opt']
    assert set(saved) == {'state', 'hypers'}
    b = make(then, path=tmp_path, n=10)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='Could not load')
        b.load('x')
        a.load('x')
    b.save('y')  # before any step: what was loaded is saved again
    b.load('y')
    a.fit(1), b.fit(1)
    assert same(a, b)
    fresh = make(then, path=tmp_path, n=10).load('x', with_opt=False)
    fresh.fit(1)
    if 'mom' in str(ours) or 'adam' in str(ours): assert not same(fresh, b), 'the state matters'


def test_state_that_does_not_fit_is_named(tmp_path):
    make(partial(SGD, mom=.9), path=tmp_path, n=2)
    a = make(partial(SGD, mom=.9), path=tmp_path, n=2)
    a.fit(1)
    sd = a.opt.state_dict()
    b = make(fused_adamw, path=tmp_path, n=2)
    b.fit(1)
    before = copy.deepcopy(b.opt.state_dict())
    with pytest.warns(UserWarning, match='not loaded'), pytest.raises(UserError, match='grad_avg of a parameter, AdamW needs grad_avg, sqr_avg, step'):
        b.opt.load_state_dict(sd)
    for bad, why in ((dict(sd, state=sd['state'][1:]), 'has 6 parameters, this optimizer 7'), (dict(sd, hypers=sd['hypers'][:1]), '1 parameter groups'),
                     (torch.optim.AdamW(b.model.parameters()).state_dict(), 'OptimWrapper')):
        with pytest.warns(UserWarning, match='not loaded'), pytest.raises(UserError, match=why): b.opt.load_state_dict(bad)
    after = b.opt.state_dict()
    assert str(before) == str(after), 'untouched'
    a.save('x')
    with pytest.warns(UserWarning, match='AdamW needs'): b.load('x')


def test_unfreezing_and_fine_tune():
    both(Adam, fused_adamw, lambda o: o.fine_tune(1, 1e-2), n=20)


def test_clear_state_keeps_flags():
    learn = make(fused_adamw, n=3)
    learn.fit(1)
    w, bn = learn.model.mid.weight, learn.model.body[1].weight
    assert learn.opt.opt.state[w] and learn.opt.state[bn] == dict(do_wd=False, force_train=True)
    learn.opt.clear_state()
    assert learn.opt.opt is None and learn.opt.state[bn] == dict(do_wd=False, force_train=True) and learn.opt.state_dict()['state'][3] == {}
    learn.fit(1)
    assert learn.opt.state_dict()['state'][3]['step'] == 3


def test_groups_are_fastais_and_split_inside():
    learn = make(fused_adamw, n=1)
    learn.fit(1)
    assert len(learn.opt.param_lists) == len(learn.opt.hypers) == 3 and len(learn.opt.opt.param_groups) == 6
    assert [(len(g['params']), g['weight_decay']) for g in learn.opt.opt.param_groups] == [(1, .5), (2, 0), (1, .5), (1, 0), (1, .5), (1, 0)]
    assert len(learn.opt.all_params()) == 7 and all(p.grad is None for p, *_ in learn.opt.all_params())


def test_hypers_arrive_however_they_are_set():
    learn = make(fused_adamw, n=1)
    learn.fit(1)
    opt = learn.opt

    def lrs():
        opt.step()
        return [g['lr'] for g in opt.opt.param_groups][::2]
    opt.set_hyper('lr', .1)
    assert lrs() == [.1]*3
    opt.set_hyper('lr', np.array([.1, .2, .3]))
    assert lrs() == [.1, .2, .3]
    opt.set_hyper('lr', slice(1e-3, 1e-1))
    assert lrs() == pytest.approx([1e-3, 1e-2, 1e-1])
    opt.set_hyper('lr', slice(1.))
    assert lrs() == [.1, .1, 1.]
    opt.set_hypers(lr=[1., 2., 3.], mom=.5, sqr_mom=.6, eps=.7, wd=.8)
    assert lrs() == [1., 2., 3.] and {(g['betas'], g['eps']) for g in opt.opt.param_groups} == {((.5, .6), .7)}
    assert {g['weight_decay'] for g in opt.opt.param_groups} == {0., .8}
    opt.hypers[1]['lr'] = 7.  # as ReduceLROnPlateau does
    assert lrs() == [1., 7., 3.]
    with pytest.raises(AssertionError, match='3 parameter groups'): opt.set_hyper('lr', [1., 2.])
    learn = make(fused_adamw, n=2, cbs=ReduceLROnPlateau(min_delta=100, factor=10), lr=.01)
    learn.fit(3)
    assert learn.opt.opt.param_groups[0]['lr'] == pytest.approx(.001)


def test_momentum_that_was_not_asked_for_stays_off():
    for f in (SGD, fused_sgd):
        learn = make(f, n=4)
        learn.fit_one_cycle(1)
        assert learn.opt.hypers[0]['mom'] > .8
    assert learn.opt.opt.param_groups[0]['momentum'] == 0 and not learn.opt.opt.state[learn.model.mid.weight].get('momentum_buffer')


@pytest.mark.parametrize('opt', [fused_sgd, foreach_sgd])
def test_a_parameter_that_joins_later(opt):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    o = opt([a, b], lr=.1, mom=.9)
    for p in (a, a, b):
        p.grad = torch.ones(2)
        a.grad = torch.ones(2)
        o.step()
    x, y = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    o = SGD([x, y], lr=.1, mom=.9)
    for p in (x, x, y):
        p.grad = torch.ones(2)
        x.grad = torch.ones(2)
        o.step()
    assert torch.allclose(a, x) and torch.allclose(b, y)


def test_nesterov():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    ours, theirs = fused_sgd([p], lr=.1, mom=.9, nesterov=True), torch.optim.SGD([q], lr=.1, momentum=.9, nesterov=True)
    for _ in range(3):
        p.grad, q.grad = torch.ones(2), torch.ones(2)
        ours.step(), theirs.step()
    assert torch.allclose(p, q)


FORMATS = [torch.contiguous_format, torch.channels_last]

@pytest.mark.parametrize('of_grad', FORMATS, ids=['grad', 'grad last'])
@pytest.mark.parametrize('of_weight', FORMATS, ids=['weight', 'weight last'])
@pytest.mark.parametrize('opt', [fused_adamw, fused_adam, partial(fused_sgd, mom=.9)])
def test_any_memory_layout(opt, of_weight, of_grad):
    "torch's fused kernels on a CPU go by the order in memory: where a gradient lies otherwise than its weight, they take its numbers for those of other places"
    start, grads = torch.randn(8, 4, 3, 3), torch.randn(3, 8, 4, 3, 3)
    def run(of_weight, of_grad):
        w, point, bias = nn.Parameter(start.clone(memory_format=of_weight)), nn.Parameter(start[:,:,:1,:1].clone(memory_format=of_weight)), nn.Parameter(torch.ones(8))
        o = opt([w, point, bias], lr=.1)
        for g in grads:
            w.grad, point.grad, bias.grad = g.clone(memory_format=of_grad), g[:,:,:1,:1].clone(memory_format=of_grad), g[:,0,0,0].clone()
            before = w.grad
            o.step()
            assert w.shape == w.grad.shape == start.shape and w.is_contiguous(memory_format=of_weight) and torch.equal(before, w.grad)
        kept = [v for v in o.state_dict()['state'][0].values() if isinstance(v, torch.Tensor)]
        assert kept and all(v.shape == start.shape and v.is_contiguous(memory_format=of_weight) for v in kept)
        return [w, point, bias, *kept]
    for a, b in zip(run(of_weight, of_grad), run(*[torch.contiguous_format]*2)): assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_step_that_fails_leaves_layouts_as_they_were():
    w, odd = nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)), nn.Parameter(torch.randn(8, 4, 3, 3))
    w.grad, odd.grad = torch.randn_like(w), torch.randn_like(odd)
    opt = fused_adamw([w, odd], lr=.1)
    opt.step()
    data, grad, opt.opt.step = w.data_ptr(), w.grad, lambda: 1/0
    with pytest.raises(ZeroDivisionError): opt.step()
    assert w.shape == (8, 4, 3, 3) and w.data_ptr() == data and w.grad is grad and opt.opt.state[w]['exp_avg'].stride() == w.stride() == w.grad.stride()


@pytest.mark.parametrize('make', [fused_sgd, fused_adamw, foreach_adam, muon])
@pytest.mark.filterwarnings('ignore:muon')
def test_sparse_gradients_are_refused_by_all_that_cannot_step_them(make):
    def step(make, w, e):
        opt = make([w, *e.parameters()], lr=.1, mom=.9)
        w.grad = torch.ones(2)
        e(torch.tensor([1])).sum().backward()
        opt.step()
    w, e = nn.Parameter(torch.ones(2)), nn.Embedding(3, 2, sparse=True)
    with pytest.raises(UserError, match=r'sparse gradient of a parameter of \(3, 2\).*sparse=False'): step(make, w, e)
    assert w.tolist() == [1, 1], 'nothing was stepped'
    ours, fastais = (nn.Embedding.from_pretrained(torch.ones(3, 2), freeze=False, sparse=True) for _ in range(2))
    for f, o in ((foreach_sgd, ours), (SGD, fastais)): step(f, nn.Parameter(torch.ones(2)), o)
    assert torch.equal(ours.weight, fastais.weight) and ours.weight[1, 0] != 1


def test_what_cannot_be_fused_is_refused():
    for p in (nn.Parameter(torch.ones(2, device='meta')), nn.Parameter(torch.ones(2, dtype=torch.complex64))):
        w = nn.Parameter(torch.ones(2))
        w.grad, p.grad = torch.ones(2), torch.ones_like(p)
        opt = fused_adamw([[w], [p]], lr=.1)
        with pytest.raises(UserError, match='cannot step a .* use the foreach'): opt.step()
        assert w.tolist() == [1, 1], 'nothing was stepped'
    w, i = nn.Parameter(torch.ones(2)), nn.Parameter(torch.tensor([1]), requires_grad=False)
    w.grad = torch.ones(2)
    fused_adamw([w, i], lr=.1).step()
    with pytest.raises(UserError, match='unknown optimizer'): torch_opt('adam', 'fast')
    with pytest.raises(NotImplementedError): fused_adamw([w], lr=.1).step(lambda: 0)


@pytest.mark.filterwarnings('ignore')
def test_export(tmp_path):
    tfms = [[lambda i: torch.ones(8)*i], [lambda i: torch.tensor(i % 3)]]
    learn = make(partial(fused_adamw, eps=1e-6), path=tmp_path, data=Datasets(list(range(32)), tfms, splits=[range(24), range(24, 32)]).dataloaders(bs=4, num_workers=0).loaders)
    learn.fit(1)
    before = learn.opt.state_dict()
    learn.export('x.pkl')
    assert str(before) == str(learn.opt.state_dict()), 'exporting keeps the state'
    other = load_learner(tmp_path/'x.pkl')
    assert other.opt is None and other.opt_func.keywords == dict(eps=1e-6) and same(learn, other)


@pytest.mark.parametrize('opt', [fused_adamw, partial(fused_sgd, mom=.9), foreach_adam])
@pytest.mark.parametrize('cb', [lambda: MixedPrecision('fp16', init_scale=2.**10, growth_interval=4), lambda: MixedPrecision('bf16', True), lambda: HalfPrecision('bf16', clip=1., allow_emulation=True),
                                lambda: HalfPrecision('fp16', init_scale=2.**10, growth_interval=4)], ids=['fp16', 'bf16', 'half-bf16', 'half-fp16'])
def test_with_mixed_and_half_precision(opt, cb, monkeypatch, tmp_path):
    monkeypatch.setattr(amp, 'check_precision', lambda *a: None)
    a, b = make(opt, n=8, cbs=cb(), path=tmp_path), make(opt, n=8)
    for o in (a, b): o.fit_one_cycle(1)
    assert all(torch.allclose(x, y, atol=.02) for x, y in zip(params(a), params(b)))
    assert all(s.get('exp_avg', s.get('momentum_buffer')).dtype == torch.float32 for s in a.opt.opt.state.values())
    a.save('x')
    scale = a.scaler.get_scale()
    c = make(opt, n=8, cbs=cb(), path=tmp_path).load('x')
    starts = []
    c.add_cb(on(before_epoch=lambda: starts.append(c.scaler.get_scale())))
    c.fit(1)
    assert starts == [scale] and (scale == 1. or scale == 2.**12)


def test_lr_find_puts_everything_back(tmp_path):
    learn = make(fused_adamw, path=tmp_path)
    learn.fit(1)
    before, state = params(learn), str(learn.opt.state_dict()['state'])
    learn.lr_find(num_it=10, show_plot=False)
    assert all(torch.equal(x, y) for x, y in zip(before, params(learn))) and state == str(learn.opt.state_dict()['state'])


@pytest.mark.parametrize('name', ['fused_adam', 'fused_adamw', 'fused_sgd', 'foreach_adam', 'foreach_adamw', 'foreach_sgd'])
def test_recipes(name):
    learn = bench_learner('digits-xresnet18', opt=name, device='cpu', offline=True)
    learn.create_opt()
    impl, kind = name.split('_')
    assert isinstance(learn.opt, TorchOptimizer) and learn.opt.kwargs[impl] is True and learn.opt.cls.__name__.lower() == kind
    if kind == 'sgd': assert learn.opt.hypers[0]['mom'] == .9
    else: assert bench_learner('digits-xresnet18', opt=name, eps=1e-3, device='cpu', offline=True).opt_func.keywords['eps'] == 1e-3


def test_recipe_refusals():
    with pytest.raises(UserError, match='fused_adamw'): bench_learner('digits-xresnet18', opt='fused')
    with pytest.raises(UserError, match="no eps"): bench_learner('digits-xresnet18', opt='fused_sgd', eps=1e-3)


@needs_gpu
@pytest.mark.parametrize('theirs,ours', EACH, ids=IDS)
def test_on_cuda(theirs, ours, tmp_path):
    got = []
    for f in (theirs, ours):
        learn = to_gpu(make(f, path=tmp_path))
        learn.fit_one_cycle(1)
        learn.save('x')
        learn.load('x')
        learn.fit(1)
        got.append(learn)
    assert all(torch.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in zip(*map(params, got)))


def test_filters_that_begin_at_zero_learn():
    w = torch.nn.Parameter(torch.zeros(4, 2, 3, 3))
    opt = muon([w], lr=.1)
    for _ in range(2):
        w.grad = torch.randn(4, 2, 3, 3)
        opt.step()
    assert w.isfinite().all() and w.norm() > 0


@pytest.mark.parametrize('opt', [fused_sgd, foreach_sgd])
def test_momentum_may_be_zero_for_a_while(opt):
    "torch would leave its averages as they were, and go on from stale ones"
    def steps(f):
        torch.manual_seed(0)
        p, q = (nn.Parameter(torch.randn(5, dtype=torch.float64)) for _ in range(2))
        o = f([[p], [q]], lr=.1, mom=.9)
        for i in range(8):
            o.set_hyper('mom', [0. if i in (2, 3) else .9, 0. if i == 5 else .8])
            for x in p, q: x.grad = torch.randn(5, dtype=torch.float64)
            o.step()
        return torch.cat([p.detach(), q.detach()])
    torch.testing.assert_close(steps(opt), steps(SGD), rtol=1e-12, atol=1e-12)


def test_nesterov_needs_momentum():
    with pytest.raises(UserError, match='nesterov=True looks ahead along the momentum: give mom'): fused_sgd([nn.Parameter(torch.ones(1))], lr=.1, nesterov=True)


def test_momentum_of_muon_may_be_zero_for_a_while():
    "At 0 the next direction is the gradient's, and so is what is kept of it"
    def weights(first):
        torch.manual_seed(0)
        p, grads = nn.Parameter(torch.randn(4, 2, 3, 3)), torch.randn(3, 4, 2, 3, 3)
        o = muon([[p]], lr=.1, mom=.6)
        for i, g in enumerate(grads if first else grads[1:], 0 if first else 1):
            o.set_hyper('mom', 0. if i == 1 else .6)
            if i == 1: p.data.fill_(1.)
            p.grad = g.clone()
            o.step()
        return p.detach()
    torch.testing.assert_close(weights(True), weights(False))


@pytest.mark.parametrize('kwargs', [dict(steps=0), dict(steps=-1), dict(steps=1.5), dict(rest='a'), dict(rest=-1.)])
def test_options_of_muon_that_cannot_be(kwargs):
    with pytest.raises(UserError, match=f'{next(iter(kwargs))}=.* cannot be'): muon([nn.Parameter(torch.ones(1, 1, 1, 1))], **kwargs)

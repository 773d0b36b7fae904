"What ladder dawn is made of: nets, augmentation, Muon, schedules, mirrored prediction, and the ladder itself."
import json
import subprocess
import sys

import pytest
import torch
from fastai.callback.core import CancelBatchException, Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastbench.train.schedule  # noqa: F401  (adds fit_linear)
from fastbench.callback.ema import EMACallback
from fastbench.callback.tta import FlipTTA
from fastbench.compare.ladder import LadderTable, ladder_recipes, rounds
from fastbench.bench.learner import bench_learner
from fastbench.train.muon import MuonSGD, muon, orthogonal
from fastbench.measure.phases import Profile, step_columns, to_dict
from fastbench.errors import UserError
from fastbench.ladders import Rung, get_ladder, ladders, register_ladder
from fastbench.recipe import but, get_recipe, suites
from fastbench.runs.record import Run, from_json
from fastbench.bench.run import run_recipe
from fastbench.train.learner import BenchLearner
from fastbench.train.optimizer import fused_adam
from fastbench.vision.augment import augmented
from fastbench.draw.decode import CorruptImage
from fastbench.vision.data import vision_dls
from fastbench.vision.kinds import XResNet
from fastbench.vision.small import GhostBatchNorm, small_archs, small_net, whiten

HOWS = ['items', 'once', 'bulk', 'batch']
TINY = dict(size=8, sample=.2, precision='fp32', workers=0)


# Nets

@pytest.mark.parametrize('arch', small_archs)
@pytest.mark.parametrize('c_in', [1, 3])
def test_nets_train(arch, c_in):
    net = small_net(arch, c_in, 4, norm=4)
    out = net(torch.randn(8, c_in, 32, 32))
    assert out.shape == (8, 4)
    out.sum().backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


def test_the_kink_is_one_norm_and_one_activation():
    a, b = (sum(isinstance(m, (nn.BatchNorm2d, nn.ReLU)) for m in small_net(o, 3, 10).modules()) for o in ('resnet18-kinked', 'resnet18'))
    assert a == b + 2


@pytest.mark.parametrize('call', [lambda: small_net('resnet99', 3, 10), lambda: small_net('resnet9', 3, 10, act='tanhh'),
                                  lambda: small_net('resnet18', 3, 10, images=torch.randn(4, 3, 8, 8))])
def test_bad_nets(call):
    with pytest.raises(UserError) as e: call()
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_ghost_batch_norm_is_batch_norm_of_the_parts(layout):
    x = torch.randn(12, 3, 4, 4).to(memory_format=layout).requires_grad_()
    ghost = GhostBatchNorm(3, samples=4)
    y = ghost(x)
    parts = [nn.functional.batch_norm(x[i::3], None, None, training=True) for i in range(3)]
    assert all(torch.allclose(y[i::3], o, atol=1e-5) for i, o in enumerate(parts))
    means = torch.stack([x[i::3].mean((0, 2, 3)) for i in range(3)]).mean(0)
    assert torch.allclose(ghost.running_mean, .1*means, atol=1e-6) and ghost.num_batches_tracked == 1
    y.square().sum().backward()
    assert x.grad.isfinite().all()


class Copies(TorchDispatchMode):
    "Operations that make a tensor of another layout than channels-last from one of that"
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        res = f(*args, **(kwargs or {}))
        if isinstance(res, torch.Tensor) and res.numel() == 8*6*5*5 and not res.permute(*range(res.ndim-3), -2, -1, -3).is_contiguous(): self.seen.append(str(f))
        return res


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_ghost_batch_norm_keeps_channels_last(dtype):
    torch.manual_seed(0)
    x, g = (torch.randn(8, 6, 5, 5).to(dtype) for _ in range(2))
    got = []
    for layout in (torch.contiguous_format, torch.channels_last):
        norm, i = GhostBatchNorm(6, samples=4, momentum=.4), x.clone(memory_format=layout).requires_grad_()
        torch.nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(1))
        with Copies() as copies:
            for _ in range(2): y = norm(i)
            y.backward(g.clone(memory_format=layout))
        assert y.dtype == dtype and i.grad.is_contiguous(memory_format=layout) and y.is_contiguous(memory_format=layout)
        got.append((y, i.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var))
        assert norm.num_batches_tracked == 2
    assert copies.seen == []
    tol = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    for a, b in zip(*got): torch.testing.assert_close(b, a, **tol)


def test_ghost_batch_norm_elsewhere_is_batch_norm():
    x, ghost, plain = torch.randn(10, 3, 4, 4), GhostBatchNorm(3, samples=4), nn.BatchNorm2d(3)
    assert torch.equal(ghost(x), plain(x)), '4 does not divide 10'
    assert torch.equal(ghost.eval()(x), plain.eval()(x))


def test_whitening_filters_are_frozen_and_come_in_pairs():
    conv = whiten(nn.Conv2d(3, 24, 2), torch.randn(16, 3, 8, 8))
    assert not conv.weight.requires_grad and torch.equal(conv.weight[:12], -conv.weight[12:])


# Augmentation

def dls(how, workers=0, **kwargs): return augmented(vision_dls('photos', size=16, bs=32, sample=.2, workers=workers, device='cpu', seed=3), how, **kwargs)


def epochs(how, n=2, **kwargs):
    d = dls(how, **kwargs)
    return [torch.cat([b[0] for b in d.train]).float() for _ in range(n)]


@pytest.mark.parametrize('how', HOWS)
def test_the_seed_decides_whatever_the_workers(how):
    a, b = epochs(how), epochs(how)
    assert all(map(torch.equal, a, b)) and not torch.equal(*a), 'the same epochs, each another'
    if how != 'batch': assert all(map(torch.equal, a, epochs(how, workers=2)))


def test_all_ways_make_the_same_images_when_nothing_is_left_to_chance():
    all_ = {how: epochs(how, 1, pad=0, flip=0.)[0] for how in HOWS}
    assert all(torch.allclose(o, all_['items'], atol=1e-5) for o in all_.values())
    valid = {how: torch.cat([b[0] for b in dls(how, cutout=8).valid]) for how in HOWS}
    assert all(torch.allclose(o, valid['items'], atol=1e-5) for o in valid.values()), 'validation images are whole'


@pytest.mark.parametrize('how', HOWS)
def test_mirrors_crops_and_holes(how):
    plain = epochs(how, 1, pad=0, flip=0.)[0]
    assert torch.allclose(epochs(how, 1, pad=0, flip=1.)[0], plain.flip(-1), atol=1e-5)
    hole = epochs(how, 1, pad=0, flip=0., cutout=4)[0]
    changed = (hole != plain).any(1).flatten(1).sum(1)
    assert ((hole == 0) | torch.isclose(hole, plain, atol=1e-5)).all() and changed.max() <= 16 and changed.float().mean() > 14


@pytest.mark.parametrize('kwargs,said', [(dict(how='itemz'), 'itemz'), (dict(how='once', cutout=17), 'cutout=17'), (dict(how='once', pad=16), 'pad=16')])
def test_bad_augmentation(kwargs, said):
    with pytest.raises(UserError, match=said): dls(**kwargs)


def test_batches_are_made_in_this_process():
    with pytest.raises(UserError, match='workers=2'): dls('batch', workers=2)


def test_a_broken_image_is_named(tmp_path):
    d = dls('once')
    path = tmp_path/'broken.jpg'
    path.write_bytes(b'no image')
    d.train.items[0] = (path, 0)
    with pytest.raises(CorruptImage, match='broken.jpg'): next(iter(d.train))


# Muon, schedules, mirrored prediction

def test_muon_turns_filters_and_nesterov_moves_the_rest():
    torch.manual_seed(0)
    conv, lin = nn.Conv2d(3, 8, 3, bias=False), nn.Linear(4, 2)
    w, v = conv.weight.detach().clone(), lin.weight.detach().clone()
    g, h = torch.randn_like(w), torch.randn_like(v)
    opt = MuonSGD([conv.weight, lin.weight], lr=.1, momentum=.6, rest=.5)
    conv.weight.grad, lin.weight.grad = g.clone(), h.clone()
    opt.step()
    want = w*8**.5/w.norm() - .1*orthogonal((g + .6*g).reshape(8, -1)).view_as(w)
    assert torch.allclose(conv.weight, want, atol=1e-5) and torch.allclose(lin.weight, v - .05*(h + .6*h), atol=1e-6)
    lin.weight.grad = None
    opt.step()


def test_muon_without_momentum():
    torch.manual_seed(0)
    conv, lin = nn.Conv2d(3, 8, 3, bias=False), nn.Linear(4, 2, bias=False)
    w, v = conv.weight.detach().clone(), lin.weight.detach().clone()
    opt = MuonSGD([conv.weight, lin.weight], lr=.1, momentum=0., rest=.5)
    for p in (conv.weight, lin.weight): p.grad = torch.randn_like(p)
    opt.step()
    want = w*8**.5/w.norm() - .1*orthogonal(conv.weight.grad.reshape(8, -1)).view_as(w)
    assert torch.allclose(conv.weight, want, atol=1e-5) and torch.allclose(lin.weight, v - .05*lin.weight.grad, atol=1e-6)


def test_muon_takes_filters_of_one_shape_together(monkeypatch):
    "The same as one by one, in any layout, however the gradients lie"
    import fastbench.train.muon as module
    calls, torch_turn = [], module.turn
    monkeypatch.setattr(module, 'turn', lambda g, steps: (calls.append(tuple(g.shape)), torch_turn(g, steps))[1])
    shapes = [(8, 3, 3, 3), (8, 3, 3, 3), (4, 8, 1, 1), (8, 3, 3, 3)]
    torch.manual_seed(0)
    ws, gs = ([torch.randn(s) for s in shapes] for _ in range(2))
    ends = []
    for of_weight, of_grad in [(torch.contiguous_format,)*2, (torch.channels_last,)*2, (torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)]:
        ps = [nn.Parameter(w.clone(memory_format=of_weight)) for w in ws] + [nn.Parameter(torch.ones(3, 2).t())]
        opt = MuonSGD(ps, lr=.1, momentum=.6)
        for _ in range(2):
            for p, g in zip(ps, gs): p.grad = g.clone(memory_format=of_grad)
            ps[-1].grad = torch.arange(6.).view(2, 3)
            opt.step()
        ends.append([p.detach().clone() for p in ps])
        assert all(p.is_contiguous(memory_format=of_weight) for p in ps[:-1])
    assert set(calls) == {(3, 8, 27), (1, 4, 8)} and len(calls) == 16
    for end in ends[1:]: assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(end, ends[0]))
    for i, w in enumerate(ws):
        p, buf = w.clone(), torch.zeros_like(w)
        for _ in range(2):
            buf = .6*buf + gs[i]
            p = p*len(p)**.5/p.norm() - .1*orthogonal((gs[i] + .6*buf).flatten(1)).view_as(p)
        assert torch.allclose(ends[0][i], p, atol=1e-5)


def test_which_dtype_matrices_are_turned_in(monkeypatch):
    from fastbench.train.muon import matmul_dtype
    for capability, dtype in {(9, 0): torch.bfloat16, (8, 0): torch.bfloat16, (7, 5): torch.float16, (7, 0): torch.float16, (6, 1): torch.float32}.items():
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
        assert matmul_dtype(torch.device('cuda', 1)) == dtype
    assert matmul_dtype(torch.device('cpu')) == torch.float32
    torch.manual_seed(0)
    g = torch.randn(2, 16, 300)*1e-4
    for dtype in (torch.bfloat16, torch.float16):
        s = torch.linalg.svdvals(orthogonal(g, 5, dtype).float())
        assert .6 < s.min() and s.max() < 1.3


def test_what_cannot_be_compiled_is_turned_all_the_same(monkeypatch):
    import fastbench.train.muon as module
    class Cuda(torch.Tensor):
        device = torch.device('cuda')
    def fails(*args): raise RuntimeError('no Triton here\nand more')
    monkeypatch.setattr(module, '_compiled', lambda: fails)
    monkeypatch.setattr(module, '_eager', set())
    monkeypatch.setattr(module, 'matmul_dtype', lambda device: torch.float32)
    g = torch.randn(1, 4, 8)
    with pytest.warns(UserWarning, match='single kernels, slower: torch.compile failed .RuntimeError: no Triton here.'): res = module.turn(g.as_subclass(Cuda))
    assert torch.equal(res, orthogonal(g)) and torch.equal(module.turn(g.as_subclass(Cuda)), res)


def test_orthogonal_of_tall_and_wide():
    torch.manual_seed(0)
    for shape in [(4, 20), (20, 4)]:
        s = torch.linalg.svdvals(orthogonal(torch.randn(shape), 5))
        assert .6 < s.min() and s.max() < 1.3


def test_muon_under_a_learner_is_saved_and_loaded(tmp_path):
    def make():
        torch.manual_seed(0)
        b = [(torch.randn(8, 1, 6, 6), torch.arange(8) % 2)]*3
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 2))
        return Learner(DataLoaders(b, b), model, loss_func=nn.CrossEntropyLoss(), opt_func=muon, path=tmp_path, lr=.1)
    a = make()
    with a.no_logging():
        a.fit(1)
        a.save('m')
        b = make().load('m')
        with b.no_logging():
            a.fit(1)
            b.fit(1)
    assert all(map(torch.equal, a.model.state_dict().values(), b.model.state_dict().values()))


@pytest.mark.parametrize('knots', [((0, 0), (.5, 1)), ((.1, 0), (1, 1)), ((0, 0), (.5, 1), (.5, 0), (1, 0))])
def test_bad_knots(knots):
    learn = Learner(DataLoaders([], []), nn.Linear(1, 1), loss_func=nn.MSELoss())
    with pytest.raises(UserError, match='knots'): learn.fit_linear(1, .1, knots)
    with pytest.raises(UserError, match='knots'): XResNet('x', knots=knots[:1] if len(knots) > 2 else knots)


@pytest.mark.parametrize('opt_func', [Adam, fused_adam])
def test_each_group_has_its_peak(opt_func):
    b = [(torch.randn(4, 2), torch.arange(4) % 2)]*5
    learn = Learner(DataLoaders(b, b), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, splitter=lambda m: [[*o.parameters()] for o in m])
    with learn.no_bar(), learn.no_logging(): learn.fit_linear(1, slice(1e-3, 1e-1), ((0, 1), (1, 0)))
    assert learn.recorder.hps['lr'] == pytest.approx([.1, .08, .06, .04, .02]) and [h['lr'] for h in learn.opt.hypers] == pytest.approx([2e-4, 2e-2])


@pytest.mark.parametrize('shape,said', [((4, 2), ['muon: no filter of a convolution ']), ((4, 2, 3, 3), [])])
def test_muon_without_a_filter_says_so(shape, said, recwarn):
    muon([nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(4))])
    assert [str(o.message)[:33] for o in recwarn if o.category is UserWarning] == said  # others may come with the garbage of earlier tests


def test_mirrored_prediction_leaves_the_batch_as_it_was():
    seen = []

    class See(Callback):
        order = 99
        def after_batch(self): seen.append((self.training, tuple(self.x.shape), tuple(self.pred.shape)))
        def after_pred(self):
            if not self.training and self.iter == 0: raise CancelBatchException
    b = [(torch.randn(4, 1, 2, 2), torch.tensor([0, 1, 0, 1]))]*2
    learn = Learner(DataLoaders(b, b), nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), loss_func=nn.CrossEntropyLoss(), cbs=[FlipTTA(), See()])
    with learn.no_logging(): learn.fit(1)
    assert [o[1:] for o in seen] == [((4, 1, 2, 2), (4, 2))]*4
    learn = Learner(DataLoaders([(torch.randn(4, 2), b[0][1])], [(torch.randn(4, 2), b[0][1])]), nn.Linear(2, 2), loss_func=nn.CrossEntropyLoss(), cbs=FlipTTA())
    with learn.no_logging(), pytest.raises(UserError, match='mirrors batches of images'): learn.fit(1)


def test_airbench_on_a_gpu_is_half_and_launches_little(gpu, monkeypatch):
    "Loss, scaler, optimizer, averages and what holds the weights in 16 bits: at most 60 operations a step, Newton-Schulz apart, which is compiled"
    import fastbench.train.muon as module
    turned = []
    def turn(g, steps):
        n = gpu.launches
        res = orthogonal(g, steps, torch.float32)
        turned.append(gpu.launches-n)
        return res
    monkeypatch.setattr(module, 'turn', turn)
    marks = []

    class Marks(Callback):
        def __init__(self, order): self.order = order
        def __call__(self, event):
            if getattr(self.learn, 'training', False): marks.append((event, self.order, gpu.launches-sum(turned), len(gpu.waits)))
    data = [(torch.randn(4, 3, 32, 32).cuda(), torch.randint(10, (4,)).cuda()) for _ in range(5)]
    net = small_net('airbench', 3, 10, 'gelu', images=torch.randn(8, 3, 32, 32)).to(memory_format=torch.channels_last)
    learn = BenchLearner(DataLoaders(data, data[:1]), net.cuda(), loss_func=nn.CrossEntropyLoss(label_smoothing=.2), opt_func=muon, lr=.24, cbs=EMACallback(.99)).to_half('fp16')
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[Marks(-1e9), Marks(1e9)])
    starts = [i for i, (e, order, *_) in enumerate(marks) if e == 'before_batch' and order < 0]
    step = marks[starts[3]:starts[4]+1]
    own = sum(b[2]-a[2] for a, b in zip(step, step[1:]) if (a[0], a[1] > 0) not in {('before_batch', True), ('before_backward', True)})
    assert 20 < own <= 60 and step[0][3] == step[-1][3], 'and waits for nothing'
    assert learn.mixed_precision.scales and not gpu.races


def test_the_airbench_rung_is_half_and_of_2000():
    r = get_recipe('dawn-airbench')
    assert (r.bs, r.precision, r.compile) == (2000, 'half', 'max-autotune') and get_recipe('dawn-photos-airbench').bs == 128


# Recipes and ladders

def test_every_rung_can_be_built():
    rungs = get_ladder('dawn').recipes(data='photos')
    assert [o.name for o in rungs] == list(suites()['dawn']) and len(rungs) == 11
    for r in rungs:
        learn = bench_learner(r, device='cpu', **{**TINY, 'bs': 16, 'size': 32, 'sample': .05, 'compile': False})
        assert learn.recipe.name == r.name and learn.dls.info['augment'] == r.augment
        b = learn.dls.train.one_batch()
        assert learn.model.eval()(b[0]).shape == (16, 10)


@pytest.mark.parametrize('changes,said', [(dict(whiten=True), 'whiten'), (dict(norm=16), 'norm'), (dict(act='celu'), 'act'), (dict(pad=4), 'pad'),
                                          (dict(cutout=4), 'cutout'), (dict(memory='1GB'), 'memory'), (dict(kind='Small', arch='resnet9', pretrained=True), 'pretrained'),
                                          (dict(opt='muon', eps=1e-5), 'eps'), (dict(target=1.2), 'target'), (dict(target=0), 'target'),
                                          (dict(bs='larger'), 'bs'), (dict(bs=0), 'bs'), (dict(norm=1), 'norm')])
def test_what_would_have_no_effect_is_refused(changes, said):
    with pytest.raises(UserError, match=said): bench_learner('digits-xresnet18', device='cpu', **changes)


def test_the_largest_batch():
    learn = bench_learner('digits-xresnet18', device='cpu', bs='largest', size=8, sample=.03, workers=0)
    assert learn.recipe.bs == learn.dls.train.bs == learn.dls.info['n_train']
    with pytest.raises(UserError, match='memory'): bench_learner('digits-xresnet18', device='cpu', bs='largest', memory='some', size=8, workers=0)


def test_a_run_to_a_target():
    run = run_recipe('dawn-photos-airbench', device='cpu', **{**TINY, 'size': 32, 'sample': .1, 'compile': False, 'target': .11, 'bs': 32, 'epochs': 8})
    goal = run.goal
    assert run.status == 'ok' and goal['reached'] >= .11 and goal['epochs'] == len(run.epochs) and 0 < goal['seconds'] <= goal['total_seconds'] <= run.seconds
    assert run.profile['facts']['efficiency']['flops_per_sample'] > 1e8
    again = from_json(run.to_json())
    assert again.recipe['knots'] == [list(o) for o in get_recipe('dawn-photos-airbench').knots] and again.goal == goal
    assert LadderTable(get_ladder('dawn-photos'), [again]).rows[0]['seconds'] == goal['seconds']


def test_a_target_that_is_never_reached_is_said():
    run = run_recipe('digits-xresnet18', device='cpu', **{**TINY, 'bs': 32, 'epochs': 2, 'target': 1., 'lr': 1e-6})
    assert run.status == 'ok' and run.goal['reached'] is None and len(run.epochs) == 2
    assert any('accuracy never reached 1 in 2 epochs' in o for o in run.warnings)


def made_up(ladder, rung, seconds=None, best=.9, host='h', **kwargs):
    goal = dict(target=.9, reached=best if seconds else None, seconds=seconds, epochs=3, best=best)
    return Run(recipe=dict(name=f'{ladder}-{rung}'), data=dict(name='d'), device=dict(name='<b>cpu</b>'), environment=dict(host=host), precision=dict(effective='fp32'), goal=goal, **kwargs)


def trained(rung, epochs, seconds, repeat):
    "A Run without a target"
    from fastbench.measure.phases import Profile, to_dict
    p = Profile()
    for _ in range(4*epochs): p.steps['train'].add([dict(samples=16., step=seconds).get(c, 0.) for c in p.steps['train'].columns])
    for _ in range(epochs): p.fit['train'].add([4*seconds])
    p.fit['fit'].add([4*epochs*seconds])
    return Run(recipe=dict(name=f'mine-{rung}'), seconds=4*epochs*seconds, repeat=repeat, profile=to_dict(p), data=dict(name='d'), device=dict(name='cpu'))


def test_a_rung_that_trained_less_has_no_total():
    from fastbench.ladders import Ladder, Rung
    mine = Ladder('mine', 'one change', tuple(Rung(o, o, {}) for o in ('start', 'quick', 'early')))
    climb = LadderTable(mine, [trained(o, *how, i) for i in range(5) for o,how in (('start', (6, 1.)), ('quick', (6, .5)), ('early', (2, 1.)))])
    rows = {r['rung']: r for r in climb.rows}
    assert rows['quick']['total'] == pytest.approx(2.) and rows['early']['total'] is None and rows['early']['total_low'] is None and rows['early']['gain'] == pytest.approx(.5)
    assert [o for o in climb.notes if 'amount of work' in o] == ['early: not the same amount of work as start (epochs trained 6 / 2), so its seconds are not compared: the gain of a step is']


def test_a_climb():
    ladder = get_ladder('dawn')
    runs = [made_up('dawn', 'baseline', s) for s in (100., 120., 110.)] + [made_up('dawn', 'resnet9', 10.), made_up('dawn', 'once', 50.), made_up('dawn', 'main'),
            made_up('dawn', 'cutout', status='failed', error='x')]
    climb = LadderTable(ladder, runs)
    rows = {r['rung']: r for r in climb.rows}
    assert list(rows) == ['baseline', 'once', 'main', 'cutout', 'resnet9'], "in the ladder's order"
    assert rows['baseline']['seconds'] == pytest.approx((100*120*110)**(1/3)) and (rows['baseline']['low'], rows['baseline']['high']) == (100, 120) and rows['baseline']['n'] == 3
    assert rows['resnet9']['total'] == pytest.approx((100*110*120)**(1/3)/10) and rows['main']['total'] is None and rows['resnet9']['published_total'] == 356/79
    text = str(climb)
    assert 'main: target not reached' in text and 'cutout: failed' in text and 'not run: simple-stem' in text and '10.97x' in text
    assert '<b>cpu' not in climb._repr_html_() and json.loads(climb.to_json())['rows'][0]['rung'] == 'baseline'
    assert climb.to_csv().splitlines()[0].startswith('rung,about,status') and climb.to_markdown().count('\n| ') == 7
    import matplotlib
    matplotlib.use('agg')
    ax = climb.plot()
    assert [o.get_text() for o in ax.get_yticklabels()] == ['baseline', 'once', 'resnet9']
    ax.figure.canvas.draw()
    shown = [o.get_text() for o in ax.get_xticklabels() + ax.get_xticklabels(minor=True) if o.get_text()]
    assert shown and all(float(o.removesuffix('x')) > 0 for o in shown)  # 2x, not 2 × 10⁰
    with pytest.raises(UserError, match='nothing to draw'): LadderTable(ladder, [made_up('dawn', 'baseline')]).plot()


def test_speedups_have_intervals():
    ladder,slower = get_ladder('dawn'),[1, 1.5, 2, 2.5, 3]
    def climb(n=5, **kwargs): return LadderTable(ladder, [made_up('dawn', 'baseline', 100*s, repeat=i) for i,s in enumerate(slower)] +
                                           [made_up('dawn', 'resnet9', 20*s*(1+.01*(i%2)), repeat=i, **kwargs) for i,s in enumerate(slower[:n])])
    first,row = climb().rows
    assert 4.9 < row['total_low'] < row['total'] < row['total_high'] < 5.1 and (first['total'], first['total_low']) == (1, None), 'drift that both had is no spread'
    assert f"{row['total']:.2f}x ({row['total_low']:.2f} to {row['total_high']:.2f})" in str(climb())
    for row in (climb(host='other').rows[1], climb(4).rows[1]): assert row['total_low'] < 4 and row['total_high'] > 6
    assert climb(1).rows[1]['total_low'] is None and climb(1).rows[1]['total'] > 5
    assert json.loads(climb().to_json())['rows'][1]['total_low'] > 4.9


def test_the_step_of_a_rung_is_compared_with_the_rung_before():
    def run(rung, step, repeat):
        p = Profile()
        for _ in range(3): p.steps['train'].add([dict(warmup=0., samples=8., step=step).get(c, 0.) for c in step_columns('train')])
        return made_up('dawn', rung, 10., repeat=repeat, profile=to_dict(p))
    climb = LadderTable(get_ladder('dawn'), [run(o, s*(1+i)*(1+.01*i*(o == 'once')), i) for i in range(3) for o,s in (('baseline', 4.), ('once', 2.), ('resnet9', 1.))])
    rows = {r['rung']: r for r in climb.rows}
    assert 'gain_low' in rows['baseline'] and rows['baseline']['gain'] is None
    assert 1.9 < rows['once']['gain_low'] < rows['once']['gain'] < rows['once']['gain_high'] < 2.1 and rows['resnet9']['gain'] == pytest.approx(2, abs=.03)


def test_later_rounds_have_a_drawn_order():
    got = rounds(list('abcdef'), 4)
    each = [''.join(r for i,r in got if i == k) for k in range(4)]
    assert each[0] == 'abcdef' and all(sorted(o) == list('abcdef') for o in each) and len(set(each)) == 4 and got == rounds(list('abcdef'), 4)
    assert rounds('ab', 2, shuffle=False) == [(0, 'a'), (0, 'b'), (1, 'a'), (1, 'b')]


def test_without_the_first_rung_there_is_no_total():
    rows = LadderTable(get_ladder('dawn'), [made_up('dawn', 'resnet9', 10.)]).rows
    assert len(rows) == 1 and rows[0]['seconds'] == 10 and rows[0]['total'] is None


def test_a_repeat_that_missed_the_target_leaves_the_rung_without_a_time():
    rows = LadderTable(get_ladder('dawn'), [made_up('dawn', 'baseline', 10.), made_up('dawn', 'baseline')]).rows
    assert rows[0]['seconds'] is None and rows[0]['status'] == 'target not reached'


def test_without_runs_a_ladder_is_its_published_figures():
    climb = LadderTable(get_ladder('dawn'), [])
    assert len(climb.rows) == len(get_ladder('dawn').rungs) and climb.notes == [] and '137.5x' in str(climb)


def test_a_ladder_of_ones_own():
    base = XResNet('mine-ladder', 'mine', data='digits', size=8)
    ladder = register_ladder(base, Rung('first', 'as it is', {}), Rung('bigger', 'more at once', dict(bs=128)), Rung('faster', 'and faster', dict(lr=.01), 3.))
    try:
        assert [(o.bs, o.lr) for o in ladder.recipes()] == [(64, 3e-3), (128, 3e-3), (128, .01)]
        assert [o.epochs for o in ladder.recipes(epochs=7)] == [7]*3
        assert ladder_recipes('mine-ladder', ['faster'])[1] == [get_recipe('mine-ladder-faster')]
        with pytest.raises(UserError, match='registered already'): register_ladder(base, Rung('first', '', {}))
        with pytest.raises(UserError, match='unknown field'): register_ladder(but(base, name='other'), Rung('first', '', dict(batch=1)))
    finally:
        from fastbench import ladders as of_ladders, recipe
        of_ladders._ladders.pop('mine-ladder'), recipe._suites.pop('mine-ladder')
        for o in ('first', 'bigger', 'faster'): recipe._registry.pop(f'mine-ladder-{o}')


def test_the_embedded_data_has_its_own_ladder():
    assert ladder_recipes('dawn', data='photos')[0].name == 'dawn-photos' and ladder_recipes('dawn', data='digits')[0].name == 'dawn'
    with pytest.raises(UserError, match="did you mean 'dawn'"): get_ladder('dwan')
    with pytest.raises(UserError, match="unknown rung 'top'"): ladder_recipes('dawn', ['top'])
    assert 'dawn' in ladders()


def test_ladder_command(tmp_path):
    args = '--rungs baseline,bulk --data photos --size 8 --sample .05 --epochs 1 --precision fp32 --target 1 --json --offline'.split()
    p = subprocess.run([sys.executable, '-m', 'fastbench', 'ladder', 'dawn', *args, '--out', tmp_path, '--plot', tmp_path/'p.png'], capture_output=True, text=True, timeout=500)
    d = json.loads(p.stdout)
    assert p.returncode == 0 and [(r['rung'], r['status']) for r in d['rows']] == [('baseline', 'target not reached'), ('bulk', 'target not reached')], p.stderr
    assert 'no picture' in p.stderr and len(list(tmp_path.glob('*.json'))) == 2


@pytest.mark.parametrize('knots', [(), [(0,)], 'abc', ((0, 'a'), (1, 1)), None, 3, ((0, 1), (.5, 1))])
def test_knots_that_cannot_be(knots):
    from fastai.learner import Learner
    with pytest.raises(UserError, match='knots=.* cannot be: pairs of numbers, whose shares of the fit rise from 0 to 1'): Learner.fit_linear(None, 1, 1., knots)

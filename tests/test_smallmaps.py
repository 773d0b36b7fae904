"Convolutions that bf16 on a CPU gets wrong"
import copy
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback  # noqa: F401  (a default callback)
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from fastbench.callback.amp import MixedPrecision
from fastbench.callback.half import HalfPrecision
from fastbench.callback.cpu.smallmaps import SmallMaps, _meets_all

bf16 = pytest.mark.usefixtures('bf16')


@pytest.mark.parametrize('kernel, stride, dilation', [*product((1, 2, 3, 5), (1, 2, 3, 4), (1, 2, 5))])
def test_a_large_map_meets_every_tap(kernel, stride, dilation):
    "What `_at_risk` says without counting"
    for pad in range(dilation*(kernel-1)+1):
        for size in range(dilation*(kernel-1) + stride, 20):
            assert _meets_all(size, (size + 2*pad - dilation*(kernel-1) - 1)//stride + 1, kernel, stride, dilation, pad)


def gradients(conv, x, *args):
    x = x.detach().clone().requires_grad_()
    conv.zero_grad()
    y = conv(x, *args)
    torch.manual_seed(0)
    grad = torch.randn(y.shape).to(y.dtype)
    dirty(conv.weight.numel(), x.numel(), y.numel())
    y.backward(grad)
    return y, x.grad, conv.weight.grad, conv.bias.grad


def dirty(*sizes):
    "Leave NaNs where the next gradients will be"
    for n in sizes: torch.full((n,), float('nan'), dtype=torch.bfloat16)


KINDS = {('conv', 1): nn.Conv1d, ('conv', 2): nn.Conv2d, ('conv', 3): nn.Conv3d, ('transposed', 1): nn.ConvTranspose1d, ('transposed', 2): nn.ConvTranspose2d,
         ('transposed', 3): nn.ConvTranspose3d}
OPTIONS = [dict(kernel_size=k, stride=s, padding=p, dilation=d, groups=g)
           for k, s, p, d, g in [(3, 2, 1, 1, 1), (3, 1, 1, 1, 2), (5, 3, 2, 1, 1), (5, 1, 2, 1, 1), (7, 2, 3, 1, 1), (3, 1, 6, 6, 4), (3, 2, 2, 1, 1), (4, 2, 1, 1, 1), (3, 3, 1, 1, 16)]]
SAME = [dict(kernel_size=k, padding='same', dilation=d) for k, d in [(3, 1), (4, 1), (5, 3)]]


@bf16
@pytest.mark.parametrize('kind, dims, sizes, kwargs', [(kind, len(sizes), sizes, kwargs) for kind in ('conv', 'transposed') for kwargs in OPTIONS + SAME*(kind == 'conv')
                         for sizes in [(1,), (2,), (1, 1), (2, 3), (8, 1), (5, 5), (1, 2, 1), (2, 5, 5)]])
def test_in_bf16_as_in_double(kind, dims, sizes, kwargs):
    torch.manual_seed(0)
    try:
        conv, x = KINDS[kind, dims](16, 32, **kwargs).bfloat16(), torch.randn(8, 16, *sizes).bfloat16()
        exact = gradients(conv.double(), x.double())
    except RuntimeError: return  # no such convolution
    conv, maps = conv.bfloat16(), SmallMaps()
    maps.learn = SimpleNamespace(model=nn.Sequential(conv))
    maps.switch_on()
    maps._since = False  # as a fit that has begun
    for a, b in zip(exact, gradients(conv, x)): assert (a - b).norm() <= .02*a.norm() + 1e-6
    for a, b in zip(gradients(conv, x[:1]), gradients(conv, x[0])): assert torch.allclose(a.squeeze(), b.squeeze(), atol=.05, rtol=.02)
    maps._off()
    assert not {'forward', '_conv_forward'} & set(vars(conv))


def net(): return nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 128, 5, 1, 2), nn.Flatten(), nn.Linear(128, 3))


class Watch(Callback):
    order = -100
    def __init__(self): self.on, self.grads = [], []
    def before_batch(self): self.on.append(sum('_conv_forward' in vars(m) for m in self.learn.model.modules()))
    def before_backward(self): dirty(3*64*9, 64*128*9, 128*128*25)
    def before_step(self): self.grads.append([p.grad.clone() for p in self.learn.model.parameters()])


def make(*cbs, cls=Learner, model=None):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3, 2, 2), torch.arange(8) % 3) for _ in range(2)]
    learn = cls(DataLoaders(batches, batches), model or net(), loss_func=nn.CrossEntropyLoss(), lr=0., cbs=[Watch(), *cbs])
    return learn


def fit(learn, *args, **kwargs):
    with redirect_stdout(StringIO()): learn.fit(1, *args, **kwargs)
    return learn


def left(learn): return [m for m in learn.model.modules() if '_conv_forward' in vars(m)]


PRECISIONS = [pytest.param(o, id=o.__name__) for o in (MixedPrecision, HalfPrecision)]


@bf16
@pytest.mark.parametrize('cls', PRECISIONS)
def test_gradients_in_bf16(cls):
    exact, ours = fit(make()), fit(make(cls('bf16')))
    for a, b in zip(exact.watch.grads, ours.watch.grads):
        for x, y in zip(a, b): assert (x - y).norm() < .1*x.norm() + 1e-6
    assert set(ours.watch.on) == {3} and set(exact.watch.on) == {0} and not left(ours)


class Fail(Callback):
    def __init__(self, e): self.e = e
    def after_pred(self): raise self.e


@bf16
@pytest.mark.parametrize('cls', PRECISIONS)
@pytest.mark.parametrize('e', [ValueError, KeyboardInterrupt])
def test_off_when_a_fit_is_cut(cls, e):
    learn = make(cls('bf16'))
    with pytest.raises(e): fit(learn, cbs=Fail(e('no')))
    assert not left(learn)


@bf16
@pytest.mark.parametrize('cls', PRECISIONS)
def test_off_when_removed_and_on_through_a_validation_inside(cls):
    class Inside(Callback):
        order = 90
        def after_batch(self):
            if self.training and self.iter == 0: self.learn._do_epoch_validate(dl=self.dls[1]), self.learn.model.train()
    learn = make(cls('bf16'))
    fit(learn, cbs=Inside())
    assert set(learn.watch.on) == {3} and not left(learn)

    class Remove(Callback):
        order = 90
        def after_batch(self): self.learn.remove_cb(cls)
    learn = make(cls('bf16'))
    fit(learn, cbs=Remove())
    assert learn.watch.on[0] == 3 and set(learn.watch.on[1:]) == {0} and not left(learn)


@bf16
@pytest.mark.parametrize('cls', PRECISIONS)
def test_a_validation_and_predictions_by_themselves(cls):
    learn = make(cls('bf16'))
    with redirect_stdout(StringIO()): learn.validate(), learn.get_preds(dl=learn.dls[1])
    assert set(learn.watch.on) == {3} and not left(learn)


def test_what_is_left_alone():
    class Own(nn.Conv2d):
        def _conv_forward(self, x, weight, bias): return super()._conv_forward(x, weight, bias)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode='circular'), Own(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 2), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(2, 3, 2, 2))
    assert set(fit(make(SmallMaps(), model=model)).watch.on) == {0}


def test_a_copy_computes_with_its_own_weights():
    learn, copies = make(SmallMaps()), []
    class Copy(Callback):
        def before_batch(self): copies.append(copy.deepcopy(self.learn.model))
    fit(learn, cbs=Copy())
    for p in copies[0].parameters(): p.data.zero_()
    assert not copies[0](torch.randn(2, 3, 2, 2)).any()

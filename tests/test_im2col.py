"Convolutions as one product of matrices: whatever the geometry, the same result; on for a fit alone."
import pickle
from copy import deepcopy

import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from fastbench.callback.cpu import im2col as module
from fastbench.callback.amp import MixedPrecision
from fastbench.callback.channelslast import ChannelsLast
from fastbench.callback.compiling import Compile
from fastbench.callback.half import HalfPrecision
from fastbench.callback.cpu.im2col import im2col

GEOMETRIES = [dict(), dict(padding=1), dict(padding=1, stride=2), dict(padding=(2, 1), stride=(1, 2)), dict(padding=2, dilation=2), dict(kernel_size=1), dict(kernel_size=1, stride=2),
              dict(kernel_size=(1, 3), padding=(0, 1)), dict(kernel_size=(3, 2), padding='same'), dict(kernel_size=5, padding=2, stride=3), dict(padding='same', dilation=2), dict(padding='valid')]


def conv(n=256, bias=True, kernel_size=3, **kwargs):
    torch.manual_seed(0)
    return nn.Conv2d(n, n, kernel_size, bias=bias, **kwargs).to(memory_format=torch.channels_last)


def grads(m, x, autocast):
    "Output and gradients by x, weight, bias; the input is the same for all"
    x = x.clone().requires_grad_()
    m.zero_grad()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast): y = m(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return [o.detach().double() for o in (y, x.grad, *(p.grad for p in m.parameters()))]


def close(got, want, tol=1e-2):
    assert [o.shape for o in got] == [o.shape for o in want]
    for a, b in zip(got, want): assert (a-b).norm() <= tol*b.norm() and torch.isfinite(a).all()


@pytest.fixture
def used(monkeypatch):
    "Which ways were taken"
    ways, way = [], module._way
    monkeypatch.setattr(module, '_way', lambda m, x: (ways.append(way(m, x)), ways[-1])[1])
    return ways


@pytest.mark.parametrize('kwargs', GEOMETRIES, ids=str)
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('half', [False, True])
@pytest.mark.parametrize('whole', [True, False])
@pytest.mark.parametrize('last', [True, False])
def test_equal_to_double(kwargs, bias, half, whole, last, monkeypatch):
    m = conv(64, bias, **kwargs)
    x = torch.randn(3, 64, 6, 7).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    for p in m.parameters(): p.data = p.data.bfloat16().float()  # nothing but the arithmetic differs
    x = x.bfloat16().float()
    want = grads(m.double(), x.double(), False)
    m.float()
    if half: m, x = m.bfloat16(), x.bfloat16()
    pads = m._reversed_padding_repeated_twice
    if pads[::2] != pads[1::2] and not whole: return
    monkeypatch.setattr(module, '_way', lambda *_: whole)
    undo, = im2col(m)
    got = grads(m, x, not half)
    undo()
    close(got, want)


@pytest.mark.parametrize('n,batch,size,stride,way', [(512, 16, 4, 1, True), (512, 2, 1, 2, True), (256, 16, 8, 1, False), (256, 16, 8, 2, True), (64, 16, 8, 1, None), (256, 64, 8, 1, None), (64, 1, 1, 1, None),
                                                      (128, 16, 8, 2, False), (512, 65, 4, 1, False)])
def test_when(n, batch, size, stride, way):
    m = conv(n, padding=1, stride=stride)
    assert module._way(m, torch.empty(batch, n, size, size)) is way


def test_never_where_a_way_is_not_known():
    m = conv(256, kernel_size=2, padding='same')
    assert module._way(m, torch.empty(16, 256, 8, 8)) is None, 'oneDNN is not asked to pad one side'
    assert module._way(m, torch.empty(256, 4, 4)) is None and module._way(m, torch.empty(0, 256, 4, 4)) is None
    assert module._way(conv(256), torch.empty(1, 256, 2, 2)) is None


@pytest.mark.parametrize('stride,size', [(1, 1), (2, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize('n', [96, 512])
def test_taps_that_meet_nothing(stride, size, n):
    "oneDNN leaves their gradients unwritten"
    m = conv(n, False, padding=1, stride=stride)
    x = torch.randn(8, n, size, size).bfloat16().float()
    m.weight.data = m.weight.data.bfloat16().float()
    want = grads(m.double(), x.double(), False)
    m.float()
    im2col(m)
    for _ in range(3):
        torch.full((n, 9*n), float('nan')).bfloat16()  # what may lie in the memory that comes next
        close(grads(m, x, True), want)


@pytest.mark.parametrize('what', ['fp32', 'grouped', 'reflect', 'subclass', 'own forward', 'double', 'fp16 autocast'])
def test_left_as_it_is(what, used):
    class Own(nn.Conv2d):
        def forward(self, x): return super().forward(x)*2
    kwargs = {'grouped': dict(groups=2), 'reflect': dict(padding=1, padding_mode='reflect')}.get(what, {})
    m = (Own if what == 'subclass' else nn.Conv2d)(512, 512, 3, **kwargs)
    if what == 'own forward': m.forward = lambda x: x
    if what == 'double': m.double()
    x, before = torch.randn(2, 512, 4, 4).to(m.weight.dtype), dict(vars(m))
    undo = im2col(m)
    bf16 = what not in ('fp32', 'double', 'fp16 autocast')
    with torch.autocast('cpu', torch.float16 if what == 'fp16 autocast' else torch.bfloat16, enabled=bf16 or what == 'fp16 autocast'):
        if what != 'fp16 autocast': m(x)
    assert not used
    for f in undo: f()
    assert vars(m) == before


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn, self.conv, self.head = nn.Conv2d(3, 512, 3, 2, 1), nn.BatchNorm2d(512), nn.Conv2d(512, 512, 3, 1, 1), nn.Linear(512, 2)
    def forward(self, x): return self.head(self.conv(self.bn(self.stem(x)).relu()).mean((2, 3)))


def make(*cbs):
    torch.manual_seed(0)
    data = [(torch.randn(8, 3, 4, 4), torch.randint(2, (8,))) for _ in range(4)]
    learn = Learner(DataLoaders(data, data[:1]), Net(), loss_func=nn.CrossEntropyLoss(), lr=1e-3, cbs=cbs).remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    return learn


class At(Callback):
    def __init__(self, event, f): setattr(self, event, f)


def fitted(learn, n=2):
    learn.fit(n)
    return [float(o) for o in learn.recorder.losses]


@pytest.mark.parametrize('precision', [lambda: MixedPrecision('bf16', allow_emulation=True), lambda: HalfPrecision('bf16', allow_emulation=True)], ids=['amp', 'half'])
def test_a_fit(precision, used):
    plain = fitted(make(precision(), ChannelsLast(im2col=False)))
    assert not used
    learn = make(precision(), ChannelsLast())
    got = fitted(learn)
    assert used.count(True) == 2*(4+1) and got == pytest.approx(plain, abs=2e-2) and got != plain
    assert 'forward' not in vars(learn.model.conv) and learn.model.conv.weight.is_contiguous()
    x = torch.randn(2, 3, 4, 4)
    used.clear()
    learn.model(x)
    assert not used


@pytest.mark.parametrize('exc', [ValueError, KeyboardInterrupt, CancelFitException])
@pytest.mark.parametrize('event', ['before_fit', 'after_pred', 'after_backward', 'after_fit'])
def test_off_however_it_ends(exc, event):
    def fail(): raise exc('x')
    learn = make(MixedPrecision('bf16', allow_emulation=True), ChannelsLast(), At(event, fail))
    try: learn.fit(1)
    except (ValueError, KeyboardInterrupt, CancelFitException): pass
    assert all('forward' not in vars(o) and '_conv_forward' not in vars(o) for o in learn.model.modules())


def test_copied_and_pickled_in_mid_fit(used):
    copies = []

    class Keep(Callback):
        def after_backward(self):
            copies[:] = [deepcopy(self.learn.model), pickle.loads(pickle.dumps(self.learn.model))]
    learn = make(MixedPrecision('bf16', allow_emulation=True), ChannelsLast(), Keep())
    learn.fit(1)
    assert 'forward' not in vars(learn.model.conv)
    used.clear()
    for m in copies:
        with torch.autocast('cpu', torch.bfloat16): m(torch.randn(8, 3, 4, 4)).sum().backward()
        assert not used and m.conv.weight.grad is not None


def test_not_in_fp32(used):
    fitted(make(ChannelsLast()))
    assert not used


def test_compiled_it_is_left_to_the_compiler():
    plain = fitted(make(MixedPrecision('bf16', allow_emulation=True), ChannelsLast(im2col=False), Compile(backend='aot_eager')))
    assert fitted(make(MixedPrecision('bf16', allow_emulation=True), ChannelsLast(), Compile(backend='aot_eager'))) == plain

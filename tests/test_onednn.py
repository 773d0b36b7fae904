"OneDNNLinear: the same layers by another library, on for a fit and off after it however it ends, refused where it would do nothing."
import pickle

import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastcore.foundation import L
from torch import nn

from fastbench.callback.cpu import onednn
from fastbench.callback.amp import MixedPrecision, native_bf16
from fastbench.callback.checkpointing import GradientCheckpointing
from fastbench.callback.compiling import Compile
from fastbench.callback.half import HalfPrecision
from fastbench.callback.cpu.onednn import OneDNNLinear, check_onednn
from fastbench.bench.learner import bench_learner
from fastbench.errors import UserError


def build(): return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, '_linear_pointwise')


pytestmark = pytest.mark.skipif(not build(), reason='this PyTorch was built without oneDNN')


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))


def make(*cbs, model=None, n=2):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(512*n, 64, generator=g), torch.randint(4, (512*n,), generator=g)
    dls = DataLoaders.from_dsets(*[L(zip(x, y))]*2, bs=512, shuffle=False, num_workers=0)
    return Learner(dls, net() if model is None else model, loss_func=nn.CrossEntropyLoss(), cbs=cbs)


def fit(learn, n=1):
    with learn.no_bar(), learn.no_logging(): learn.fit(n)
    return learn


def own(model): return [m for m in model.modules() if 'forward' in vars(m)]


class Sees(Callback):
    "How the layers are computed in a batch"
    order = 99
    def before_fit(self): self.seen = []
    def after_pred(self): self.seen.append(len(own(self.learn.model)))


def F(layer, x): return onednn._linear(layer, layer.forward, x)


def gradients(layer, x, by=None):
    x = x.detach().requires_grad_(x.requires_grad)
    y = layer(x) if by is None else by(layer, x)
    y.square().sum().backward()
    res = [y.detach(), *(o.grad for o in (x, *layer.parameters()))]
    layer.zero_grad()
    return res


@pytest.fixture
def all_sizes(monkeypatch): monkeypatch.setattr(onednn, '_least', 0)


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('shape', [(3, 8), (2, 5, 8), (2, 3, 4, 8), (1, 8), (2, 1, 8)])
@pytest.mark.parametrize('what', ['all', 'frozen', 'no input', 'turned'])
def test_gradients_are_those_of_a_linear_layer(all_sizes, bias, shape, what):
    torch.manual_seed(0)
    layer = nn.Linear(8, 6, bias=bias)
    x = torch.randn(shape).requires_grad_(what != 'no input')
    if what == 'turned': x = torch.randn(shape[:-2] + shape[:-3:-1]).transpose(-1, -2).requires_grad_() if len(shape) > 1 else x
    if what == 'frozen': layer.weight.requires_grad_(False)
    if what == 'frozen' and not bias: x = x.detach().requires_grad_()
    for a, b in zip(gradients(layer, x), gradients(layer, x, F)):
        assert (a is None) == (b is None)
        if a is not None: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_small_products_and_other_precisions_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(onednn._Linear, 'apply', lambda *o: pytest.fail('oneDNN was asked'))
    F(nn.Linear(8, 8), torch.ones(4, 8))
    big, x = nn.Linear(512, 512), torch.ones(64, 512)
    with torch.autocast('cpu', torch.bfloat16): assert F(big, x).dtype == torch.bfloat16
    assert F(big.bfloat16(), x.bfloat16()).dtype == torch.bfloat16
    assert F(nn.Linear(2**22, 1), torch.ones(2**22)).shape == (1,)


def test_training_is_the_same_up_to_rounding():
    learns = [fit(make(*cbs, n=10), 10) for cbs in ([], [OneDNNLinear()])]
    a, b = (torch.stack(learn.recorder.losses) for learn in learns)
    assert len(a) == 100 and not torch.equal(a, b)  # it is another library
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('event', ['before_fit', 'before_batch', 'after_pred', 'after_backward', 'before_validate', 'after_fit'])
@pytest.mark.parametrize('error', [None, CancelFitException, RuntimeError, KeyboardInterrupt])
def test_off_after_the_fit_however_it_ends(event, error):
    class Ends(Callback):
        order = 98
    def raises(self):
        if error: raise error('stop')
    setattr(Ends, event, raises)
    learn = make(OneDNNLinear(), Ends())
    try: fit(learn)
    except (RuntimeError, KeyboardInterrupt, CancelFitException): pass
    assert not own(learn.model)


def test_on_in_training_validation_and_predictions():
    sees = Sees()
    learn = fit(make(OneDNNLinear(), sees))
    assert sees.seen == [3]*4
    with learn.no_bar(): learn.get_preds()
    assert sees.seen == [3]*2 and not own(learn.model)


def test_layers_of_other_kinds_are_left_alone():
    class Mine(nn.Linear):
        def forward(self, x): return super().forward(x)*2
    model = net()
    model.insert(4, Mine(256, 256))
    model[2].forward = model[2].forward
    kept, sees = model[2].forward, Sees()
    fit(make(OneDNNLinear(), sees, model=model))
    assert sees.seen[0] == 3 and model[2].forward is kept and own(model) == [model[2]]


def test_refusals():
    for cb, match in ((MixedPrecision('bf16'), 'no effect in bf16'), (HalfPrecision('bf16'), 'no effect in bf16'), (Compile(), 'compiled model')):
        learn = make(OneDNNLinear(), cb)
        with pytest.raises(UserError, match=match): fit(learn)
        assert not own(learn.model)
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 4))
        def forward(self, x): return x@self.w
    with pytest.raises(UserError, match='Alone has no linear layer'): fit(make(OneDNNLinear(), model=Alone()))
    with pytest.raises(UserError, match='no effect on mps'): check_onednn('mps')


def test_a_pytorch_without_it(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: False)
    with pytest.raises(UserError, match='built without oneDNN'): check_onednn()


def test_gradient_checkpointing(all_sizes):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)
        def forward(self, x): return self.inner(x).relu()
    def run(*cbs):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(64, 4))
        return torch.stack(fit(make(*cbs, model=model)).recorder.losses)
    assert torch.equal(run(OneDNNLinear()), run(OneDNNLinear(), GradientCheckpointing()))


def test_saved_and_pickled(tmp_path):
    learn = fit(make(OneDNNLinear()))
    learn.path = tmp_path
    before = learn.get_preds()[0]
    learn.save('model')
    assert torch.equal(make().load(tmp_path/'models'/'model').get_preds()[0].argmax(1), before.argmax(1))
    assert set(pickle.loads(pickle.dumps(learn.model)).state_dict()) == set(net().state_dict())


def test_pickled_in_mid_fit():
    class Keep(Callback):
        def after_backward(self): self.kept = pickle.loads(pickle.dumps(self.learn.model))
    learn = fit(make(OneDNNLinear(), Keep()))
    x = next(iter(learn.dls.train))[0]
    assert learn.keep.kept(x).shape == learn.model(x).shape


def test_a_recipe_asks_for_it():
    assert not any(isinstance(o, OneDNNLinear) for o in bench_learner('docstrings-distilbert', device='cpu', sample=.1).cbs)
    assert sum(isinstance(o, OneDNNLinear) for o in bench_learner('docstrings-distilbert', device='cpu', sample=.1, onednn=True).cbs) == 1
    with pytest.raises(UserError, match='no effect in bf16' if native_bf16(torch.device('cpu')) else 'only emulates'): bench_learner('docstrings-distilbert', device='cpu', onednn=True, precision='bf16')
    with pytest.raises(UserError, match='compiled model'): bench_learner('docstrings-distilbert', device='cpu', onednn=True, compile=True)

"MixedPrecision: nothing leaks, however a fit ends; gradients are those of PyTorch's own recipe; the scaler lives on."
from contextlib import suppress

import pytest
import torch
from fastai.callback.core import FetchPredsCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import OptimWrapper, SGD
from torch import nn
from torch.amp import GradScaler, autocast

import fastbench.callback.amp as amp
from fastbench.callback.amp import MixedPrecision, check_precision, to_float
from fastbench.callback.half import HalfPrecision
from fastbench.measure.stopwatch import EVENTS
from fastbench.errors import UserError
from fastbench.train.learner import BenchLearner
from gpu import needs_gpu, to_gpu
from test_profiler import CANCELS, Raise, Validates, items, on


@pytest.fixture
def fp16_on_cpu(monkeypatch): monkeypatch.setattr(amp, 'check_precision', lambda *a: None)


def batches(n=4, bs=4): return [(torch.randn(bs, 8), torch.randint(3, (bs,))) for _ in range(n)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.hook = nn.Linear(8, 3), lambda: None

    def forward(self, x):
        self.hook()
        return self.lin(x)


def make(mode='bf16', n=4, cbs=None, opt_func=SGD, **kwargs):
    torch.manual_seed(0)
    learn = BenchLearner(DataLoaders(batches(n), batches(2)), Net(), loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, lr=.1, cbs=cbs)
    learn.logger = lambda *_: None
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    return learn.add_cb(MixedPrecision(mode, True, **kwargs)) if mode else learn


def clean(learn):
    assert isinstance(learn.model, Net) and 'remove_cbs' not in vars(learn)
    assert not torch.is_autocast_enabled('cpu') and torch.clear_autocast_cache() is None
    assert nn.Linear(8, 3)(torch.ones(1, 8)).dtype == torch.float32
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


@pytest.mark.parametrize('exc', CANCELS + [KeyboardInterrupt, ZeroDivisionError('x')], ids=str)
@pytest.mark.parametrize('event', [o for o in EVENTS if o != 'after_create'])
@pytest.mark.parametrize('order', [0, 20])
def test_nothing_leaks(event, exc, order):
    learn = make()
    cb = Raise(event, exc, times=2 if event in ('before_batch', 'after_pred', 'after_loss') else 1)
    cb.order = order
    learn.add_cb(cb)
    with suppress(BaseException): learn.fit(2)
    clean(learn)


@pytest.mark.parametrize('exc', [RuntimeError('out of memory'), torch.OutOfMemoryError('x'), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize('where', ['forward', 'loss'])
def test_errors_leak_nothing(where, exc):
    def fail(*a, **k): raise exc
    learn = make()
    if where == 'forward': learn.model.hook = fail
    else: learn.loss_func = fail
    with pytest.raises(type(exc)): learn.fit(1)
    clean(learn)
    learn.model.hook, learn.loss_func = lambda: None, nn.CrossEntropyLoss()
    learn.fit(1)
    clean(learn)


def test_predictions_without_labels():
    learn = make()
    preds, _ = learn.get_preds(dl=[(torch.randn(4, 8),)]*2)
    assert preds.dtype == torch.float32
    clean(learn)


def test_validation_inside_a_fit():
    learn = make(cbs=Validates())
    learn.fit(2)
    clean(learn)
    learn = make(cbs=FetchPredsCallback())  # alone: both at once wait for each other's lock, in fastai itself
    learn.dls = DataLoaders(*(DataLoader(items(8), bs=4) for _ in range(2)))
    learn.fit(2)
    clean(learn)


@pytest.mark.parametrize('cls', [MixedPrecision, HalfPrecision])
def test_an_unknown_option_is_named(cls):
    "A CPU has no GradScaler, which would have said it"
    with pytest.raises(UserError, match=f"^unknown option of {cls.__name__} 'init_scal'; did you mean 'init_scale'[^\n]*$"): cls('bf16', init_scal=2.)
    assert cls('bf16', init_scale=2., growth_interval=7).kwargs == dict(init_scale=2., growth_interval=7)


def test_refusals(monkeypatch):
    learn = make(None)
    with pytest.raises(UserError, match='slower than fp32'): learn.to_fp16()
    monkeypatch.setattr(amp, 'native_bf16', lambda device: False)
    with pytest.raises(UserError, match=r'only emulates.*; use learn.to_fp32\(\), or'): learn.to_bf16()
    with pytest.raises(UserError, match=r'slower than fp32 \(.*\); use learn.to_fp32\(\)$'): learn.to_fp16()  # not bf16, which is refused next
    assert learn.precision == 'fp32' and not hasattr(learn, 'mixed_precision')
    learn.to_bf16(allow_emulation=True).fit(1)
    assert learn.mixed_precision.emulated and learn.precision == 'bf16'
    with pytest.raises(UserError, match='one of'): check_precision('fp8', torch.device('cpu'))


def by_hand(n_acc=1, clip=None, dtype=torch.float16, n=4):
    "PyTorch's recipe; the gradients of each step"
    torch.manual_seed(0)
    data, _ = batches(n), batches(2)
    model, scaler, grads = Net(), GradScaler('cpu', enabled=dtype == torch.float16), []
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    for i, (x, y) in enumerate(data):
        with autocast('cpu', dtype=dtype): pred = model(x)
        loss = nn.functional.cross_entropy(pred.float(), y)
        scaler.scale(loss/n_acc).backward()
        if (i+1) % n_acc: continue
        scaler.unscale_(opt)
        if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
        grads.append([p.grad.clone() for p in model.parameters()])
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return model, grads


@pytest.mark.parametrize('dtype', ['fp16', 'bf16'])
@pytest.mark.parametrize('kind', ['plain', 'clip', 'accumulate'])
@pytest.mark.parametrize('order', [-20, 5, 12])
def test_bit_for_bit(kind, dtype, order, fp16_on_cpu):
    cbs = {'plain': None, 'clip': GradientClip(.1), 'accumulate': GradientAccumulation(8)}[kind]
    learn, grads = make(dtype, cbs=cbs), []
    seen = on(before_step=lambda: grads.append([p.grad.clone() for p in learn.model.parameters()]))
    seen.order = order
    learn.add_cb(seen)
    learn.fit(1)
    model, want = by_hand(2 if kind == 'accumulate' else 1, .1 if kind == 'clip' else None, dict(fp16=torch.float16, bf16=torch.bfloat16)[dtype])
    assert all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), model.parameters()))
    if kind == 'clip' and order < 12: return  # it comes before the clipping
    if kind == 'accumulate' and order < 6: grads = grads[1::2]  # it sees the partial sums as well
    assert len(grads) == len(want) and all(torch.equal(a, b) for g, w in zip(grads, want) for a, b in zip(g, w))


def test_the_last_partial_accumulation_goes_on_in_the_next_fit(fp16_on_cpu):
    learn = make('fp16', n=3, cbs=GradientAccumulation(8))
    learn.fit(1)
    left = [p.grad.clone() for p in learn.model.parameters()]
    assert all(g.abs().max() < 10 for g in left), 'not scaled by 65536'


def test_unscale_recipe_works_once(fp16_on_cpu):
    learn, seen = make('fp16'), []
    learn.add_cb(on(before_step=lambda: (learn.scaler.unscale_(learn.opt), seen.append(learn.model.lin.weight.grad.abs().max().item()))))
    learn.fit(1)
    assert len(seen) == 4 and .001 < max(seen) < 10
    learn.add_cb(on(before_step=lambda: learn.scaler.unscale_(learn.opt)))
    with pytest.raises(RuntimeError, match='already been called'): learn.fit(1)


def test_overflow_is_survived(fp16_on_cpu):
    learn = make('fp16', n=6, init_scale=2.**30)
    learn.fit(1)
    mp = learn.mixed_precision
    assert mp.skipped and mp.skipped[0] == 0 and len(mp.scales) + len(mp.skipped) == 6
    assert all(p.isfinite().all() for p in learn.model.parameters())
    assert mp.plot_scales().lines


def test_the_scaler_lives_on(fp16_on_cpu, tmp_path):
    learn = make('fp16', init_scale=2.**10, growth_interval=2)
    learn.path = tmp_path
    learn.fit(1)
    scale = learn.scaler.get_scale()
    assert scale == 2**12 and learn.mixed_precision.scales == [2**10, 2**10, 2**11, 2**11]
    learn.save('x')
    learn.fit(1)
    assert learn.scaler.get_scale() == 2**14 and len(learn.mixed_precision.scales) == 8
    other = make('fp16')
    other.path = tmp_path
    other.create_opt()
    other.load('x')
    starts = []
    other.add_cb(on(before_epoch=lambda: starts.append(other.scaler.get_scale())))
    other.fit(1)
    assert starts == [2**12]


def test_with_a_torch_optimizer(fp16_on_cpu, tmp_path):
    learn = make('fp16', opt_func=lambda p, **kw: OptimWrapper(p, torch.optim.AdamW, **kw))
    learn.path = tmp_path
    learn.fit(2)
    learn.save('x')
    learn.load('x')
    learn.fit(1)
    assert len(learn.mixed_precision.scales) == 12


@pytest.mark.parametrize('mode,tol', [('bf16', .05), ('fp16', .01)])
def test_losses_agree_with_fp32(mode, tol, fp16_on_cpu):
    losses = []
    for m in (None, mode):
        learn = make(m, n=100)
        learn.fit(1, .05)
        losses.append(torch.stack([torch.as_tensor(o) for o in learn.recorder.losses]))
    assert (losses[0] - losses[1]).abs().max() < tol


def test_outputs_stay_what_they_were():
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast
    cache = DynamicCache()
    out = CausalLMOutputWithPast(logits=torch.ones(1, 2).bfloat16(), past_key_values=cache, hidden_states=((torch.ones(1).half(),),))
    got = to_float(out)
    assert got is out and got.past_key_values is cache and got.logits.dtype == torch.float32 and got.hidden_states[0][0].dtype == torch.float32
    assert to_float({'a': [torch.ones(1).half()]})['a'][0].dtype == torch.float32 and to_float(None) is None


def test_export(tmp_path):
    learn = make()
    learn.fit(1)
    import cloudpickle
    assert type(cloudpickle.loads(cloudpickle.dumps(learn.mixed_precision))).__name__ == 'MixedPrecision'
    clean(learn)


@needs_gpu
@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_on_cuda(mode):
    learn = to_gpu(make(mode))
    learn.fit(2)
    assert learn.mixed_precision._device == 'cuda'
    clean(learn)


def test_signatures_are_their_own():
    from inspect import signature

    from fastbench.callback.half import HalfPrecision
    assert [*signature(MixedPrecision).parameters] == ['amp_mode', 'allow_emulation', 'kwargs']
    assert [*signature(HalfPrecision).parameters] == ['dtype', 'loss_scale', 'clip', 'allow_emulation', 'kwargs']


def test_a_layer_that_has_no_kernel_is_named():
    "An LSTM, where bf16 is emulated"
    learn = make()
    def fail(): raise RuntimeError('could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with ...')
    learn.model.hook = fail
    with pytest.raises(UserError, match=r"precision bf16: PyTorch cannot compute Net in it on this cpu \(could not .* primitive\); use precision='fp32'"): learn.fit(1)
    assert not torch.is_autocast_enabled('cpu') and isinstance(learn.model, Net)


def test_a_mode_that_cannot_be_is_named():
    with pytest.raises(UserError, match="amp_mode='x' cannot be: 'fp16' or 'bf16'"): MixedPrecision('x')

"HalfPrecision: fp32 outside of forward and backward, however a fit ends; the arithmetic of a loop with master weights by hand."
import copy
from collections import namedtuple
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from fastai.callback.core import CancelFitException, FetchPredsCallback
from fastai.callback.schedule import Learner  # noqa: F401  (adds fit_one_cycle, lr_find)
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.learner import load_learner
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn
from torch.amp import GradScaler

import fastbench.callback.amp as amp
from fastbench.callback.channelslast import ChannelsLast
from fastbench.callback.ema import EMACallback
from fastbench.callback.half import HalfPrecision, _to
from fastbench.measure.stopwatch import EVENTS
from fastbench.bench.learner import bench_learner
from fastbench.errors import UserError
from fastbench.train.learner import BenchLearner
from gpu import needs_gpu, to_gpu
from test_profiler import CANCELS, Raise, Validates, items, on

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture
def fp16_on_cpu(monkeypatch): monkeypatch.setattr(amp, 'check_precision', lambda *a: None)


def batches(n=4, bs=8): return [(torch.randn(bs, 8), torch.randint(3, (bs,))) for _ in range(n)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.bn, self.out, self.hook, self.dtypes = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3), lambda: None, set()

    def forward(self, x):
        self.hook()
        x = self.lin(x)
        self.dtypes |= {self.lin.weight.dtype, x.dtype}
        return self.out(torch.relu(self.bn(x)))


def make(dtype='bf16', n=4, cbs=None, opt_func=SGD, model=None, data=None, **kwargs):
    torch.manual_seed(0)
    data = data or (batches(n), batches(2))
    torch.manual_seed(1)
    learn = BenchLearner(DataLoaders(*data), model or Net(), loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, lr=.1, cbs=cbs)
    learn.logger = lambda *_: None
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    return learn.add_cb(HalfPrecision(dtype, allow_emulation=True, **kwargs)) if dtype else learn


def clean(learn, cls=Net):
    assert isinstance(learn.model, cls) and 'remove_cbs' not in vars(learn)
    assert {t.dtype for t in [*learn.model.parameters(), *learn.model.buffers()] if t.is_floating_point()} == {torch.float32}
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in learn.model.parameters())
    assert not any(m._state_dict_hooks or m._forward_hooks or m._forward_pre_hooks for m in learn.model.modules())
    assert learn.mixed_precision._half is None


@pytest.mark.parametrize('exc', CANCELS + [KeyboardInterrupt, ZeroDivisionError('x')], ids=str)
@pytest.mark.parametrize('event', [o for o in EVENTS if o != 'after_create'])
@pytest.mark.parametrize('order', [0, 20])
def test_nothing_leaks(event, exc, order):
    learn = make()
    ptrs = [p.data_ptr() for p in learn.model.parameters()]
    cb = Raise(event, exc, times=2 if event in ('before_batch', 'after_pred', 'after_loss') else 1)
    cb.order = order
    learn.add_cb(cb)
    with suppress(BaseException): learn.fit(2)
    clean(learn)
    assert ptrs == [p.data_ptr() for p in learn.model.parameters()], 'the very masters'


@pytest.mark.parametrize('exc', [RuntimeError('out of memory'), torch.OutOfMemoryError('x'), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize('where', ['forward', 'loss', 'backward', 'step', 'before_fit'])
def test_errors_leak_nothing(where, exc):
    def fail(*a, **k): raise exc
    learn = make()
    if where == 'forward': learn.model.hook = fail
    elif where == 'loss': learn.loss_func = fail
    elif where == 'backward': learn.loss_func = lambda p, t: Fails.apply(p, exc).sum()
    elif where == 'step':
        learn.create_opt()
        learn.opt.step = fail
    else: learn.add_cb(on(before_fit=fail))
    before = copy.deepcopy(learn.model.state_dict())
    with pytest.raises(type(exc)): learn.fit(1)
    clean(learn)
    assert all(torch.equal(a, b) for (k, a), b in zip(before.items(), learn.model.state_dict().values()) if 'bn' not in k)
    learn.model.hook, learn.loss_func, learn.opt = lambda: None, nn.CrossEntropyLoss(), None
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'Callback'])
    learn.fit(1)
    clean(learn)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exc):
        ctx.exc = exc
        return x*1

    @staticmethod
    def backward(ctx, g): raise ctx.exc


def test_a_refused_start_changes_nothing():
    learn = make(None)
    learn.to_bf16(allow_emulation=True)
    before = list(learn.cbs)
    for f in (lambda: learn.to_half('fp16'), lambda: learn.to_half('fp8'), lambda: learn.to_half(loss_scale='static'), lambda: learn.to_half(clip=0)):
        with pytest.raises(UserError) as e: f()
        assert '\n' not in str(e.value)
        assert learn.cbs == before and learn.precision == 'bf16'
    learn = make('fp16')
    with pytest.raises(UserError, match='slower than fp32'): learn.fit(1)
    clean(learn)
    assert not learn.model.dtypes


def test_each_replaces_the_other(monkeypatch):
    monkeypatch.setattr('fastbench.train.learner.check_precision', lambda *a: None)
    learn = make(None)
    assert learn.to_half().precision == 'half-bf16' and learn.to_half('fp16').precision == 'half-fp16' and learn.to_half(BF16).precision == 'half-bf16'
    assert learn.to_bf16().precision == 'bf16' and learn.to_half().precision == 'half-bf16'
    assert sum(isinstance(o, amp.MixedPrecision) for o in learn.cbs) == 1
    assert learn.to_fp32().precision == 'fp32' and not hasattr(learn, 'mixed_precision')


def test_only_the_call_is_half():
    seen = set()
    learn = make(cbs=on(**{e: (lambda: seen.update(p.dtype for p in learn.model.parameters())) for e in (
        'before_batch', 'before_step', 'after_step', 'after_batch', 'before_validate', 'after_epoch')}))
    learn.fit(2)
    assert learn.model.dtypes == {BF16} and seen == {torch.float32}
    clean(learn)


def by_hand(dtype=BF16, n_acc=1, clip=None, opt=torch.optim.SGD, scaler=None):
    "Master weights, a half copy, batch norm in fp32; the gradients of each step"
    torch.manual_seed(0)
    data, _ = batches(4), batches(2)
    torch.manual_seed(1)
    master = Net()
    half = copy.deepcopy(master).to(dtype)
    half.bn.float()
    opt, grads = opt(master.parameters(), lr=.1), []
    sums = [torch.zeros_like(p) for p in master.parameters()]
    scaler = scaler or GradScaler('cpu', enabled=dtype == FP16)
    for i, (x, y) in enumerate(data):
        with torch.no_grad():
            for h, m in zip(half.parameters(), master.parameters()): h.copy_(m)
        loss = nn.functional.cross_entropy(half(x.to(dtype)).float(), y)/n_acc
        scaler.scale(loss).backward()
        for s, p in zip(sums, half.parameters()): s += p.grad.float()/scaler.get_scale()
        half.zero_grad()
        if (i+1) % n_acc: continue
        for p, s in zip(master.parameters(), sums): p.grad = s.clone()
        if clip: nn.utils.clip_grad_norm_(master.parameters(), clip)
        grads.append([p.grad.clone() for p in master.parameters()])
        opt.step()
        sums = [torch.zeros_like(p) for p in master.parameters()]
    return master, grads


@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
@pytest.mark.parametrize('kind', ['plain', 'clip', 'own clip', 'accumulate', 'static'])
@pytest.mark.parametrize('order', [-20, 5, 12])
def test_bit_for_bit(kind, dtype, order, fp16_on_cpu):
    cbs = {'clip': GradientClip(.1), 'accumulate': GradientAccumulation(16)}.get(kind)
    kwargs = {'own clip': dict(clip=.1), 'static': dict(loss_scale=128)}.get(kind, {})
    learn, grads = make(dtype, cbs=cbs, **kwargs), []
    seen = on(before_step=lambda: grads.append([p.grad.clone() for p in learn.model.parameters()]))
    seen.order = order
    learn.add_cb(seen)
    learn.fit(1)
    clean(learn)
    model, want = by_hand(dict(fp16=FP16, bf16=BF16)[dtype], 2 if kind == 'accumulate' else 1, .1 if 'clip' in kind else None,
                          scaler=GradScaler('cpu', init_scale=128) if kind == 'static' else None)
    assert all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), model.parameters()))
    if 'clip' in kind and order < 12: return  # it comes before the clipping
    if kind == 'accumulate' and order < 6: grads = grads[1::2]  # it sees the partial sums as well
    assert len(grads) == len(want) and all(torch.equal(a, b) for g, w in zip(grads, want) for a, b in zip(g, w))


@pytest.mark.parametrize('fused', [False, True])
def test_torch_optimizers_update_masters(fused):
    opt = partial(torch.optim.AdamW, fused=fused)
    learn = make(opt_func=lambda p, **kw: OptimWrapper(p, opt, **kw))
    learn.fit(1)
    model, _ = by_hand(opt=opt)
    assert all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), model.parameters()))
    assert all(s['exp_avg'].dtype == torch.float32 for s in learn.opt.opt.state.values())


def test_the_last_partial_accumulation_goes_on_in_the_next_fit(fp16_on_cpu):
    for dtype in ('fp16', 'bf16'):
        learn = make(dtype, n=3, cbs=GradientAccumulation(16))
        learn.fit(1)
        left = [p.grad.clone() for p in learn.model.parameters()]
        assert all(0 < g.abs().max() < 10 for g in left[-2:]), 'kept, and not scaled by 65536'
        clean(learn)


def test_overflow_is_survived(fp16_on_cpu):
    learn = make('fp16', n=20, init_scale=2.**22)
    learn.fit(1)
    mp = learn.mixed_precision
    assert mp.skipped and mp.skipped[0] == 0 and len(mp.scales) + len(mp.skipped) == 20 and mp.scales[-1] < 2**22
    assert all(p.isfinite().all() for p in learn.model.parameters()) and mp.plot_scales().lines


def test_a_static_scale_stays(fp16_on_cpu):
    learn = make('fp16', n=6, loss_scale=2.**30)
    before = [p.clone() for p in learn.model.parameters()]
    learn.fit(1)
    assert len(learn.mixed_precision.skipped) == 6
    assert learn.scaler.get_scale() == 2.**30 and all(torch.equal(a, b) for a, b in zip(before, learn.model.parameters()))
    learn = make('fp16', loss_scale=64)
    learn.fit(2)
    assert learn.mixed_precision.scales == [64.]*8
    learn = make('bf16', loss_scale='dynamic', init_scale=2.**4, growth_interval=2)
    learn.fit(1)
    assert learn.mixed_precision.scales == [2**4, 2**4, 2**5, 2**5]


def test_the_scaler_lives_on(fp16_on_cpu, tmp_path):
    learn = make('fp16', init_scale=2.**10, growth_interval=2)
    learn.path = tmp_path
    learn.fit(1)
    learn.save('x')
    other = make('fp16')
    other.path = tmp_path
    other.load('x')
    starts = []
    other.add_cb(on(before_epoch=lambda: starts.append(other.scaler.get_scale())))
    other.fit(1)
    assert starts == [2**12]


@pytest.mark.parametrize('dtype,tol', [('bf16', .1), ('fp16', .02)])
def test_losses_agree_with_fp32(dtype, tol, fp16_on_cpu):
    losses = []
    for d in (None, dtype):
        learn = make(d, n=100)
        learn.fit(1, .05)
        losses.append(torch.stack([torch.as_tensor(o) for o in learn.recorder.losses]))
    diff = (losses[0] - losses[1]).abs().max()
    assert 0 < diff < tol


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_batch', 'after_epoch'])
@pytest.mark.parametrize('order', [0, 20])
def test_saving_writes_fp32(event, order, tmp_path):
    saves = on(**{event: lambda: (learn.save('x', with_opt=False), want.update({k: v.clone() for k, v in masters()}))})
    saves.order = order
    learn, want = make(cbs=saves), {}
    tied = dict(learn.model.named_parameters())

    def masters():
        h = learn.mixed_precision._half
        open_ = dict(zip(map(id, h.live), h.masters)) if h is not None and h.masters is not None else {}
        return [(k, open_.get(id(p), p.data)) for k, p in tied.items()]
    learn.path = tmp_path
    learn.fit(1)
    got = torch.load(tmp_path/'models'/'x.pth', weights_only=True)
    assert {v.dtype for v in got.values() if v.is_floating_point()} == {torch.float32}
    assert all(torch.equal(got[k], v) for k, v in want.items()) and want


def test_save_model_callback_and_lr_find(tmp_path):
    learn = make(cbs=SaveModelCallback(fname='best'))
    learn.path = tmp_path
    learn.fit(3)
    best = torch.load(tmp_path/'models'/'best.pth', weights_only=True)
    assert all(torch.equal(v, best[k]) for k, v in learn.model.state_dict().items())
    clean(learn)
    learn = make(n=20)
    learn.path = tmp_path
    before = copy.deepcopy(learn.model.state_dict())
    learn.lr_find(num_it=10, show_plot=False)
    assert all(torch.equal(v, before[k]) for k, v in learn.model.state_dict().items())
    clean(learn)


def test_predictions_and_validation():
    learn = make()
    preds, _ = learn.get_preds(dl=[(torch.randn(4, 8),)]*2)
    assert preds.dtype == torch.float32 and learn.model.dtypes == {BF16}
    clean(learn)
    learn.validate()
    clean(learn)
    learn.model.hook = lambda: 1/0
    with pytest.raises(ZeroDivisionError): learn.validate()
    clean(learn)
    learn = make(cbs=Validates())
    learn.fit(2)
    clean(learn)
    learn = make(cbs=FetchPredsCallback())
    learn.dls = DataLoaders(*(DataLoader(items(8), bs=4) for _ in range(2)))
    learn.fit(2)
    clean(learn)


def test_training_without_labels():
    learn = make()
    learn.dls = DataLoaders([(torch.randn(4, 8),)]*3, [(torch.randn(4, 8),)])
    learn.dls.n_inp = 1
    learn.fit(1)
    clean(learn)


def test_ema_averages_masters():
    seen = []
    spy = on(after_batch=lambda: seen.append(learn.model.lin.weight.detach().clone()) if learn.training else None)
    spy.order = 80
    learn = make(cbs=[EMACallback(.5), spy])
    learn.fit(1)
    want = seen[0]
    for w in seen[1:]: want = .5*want + .5*w
    assert torch.allclose(learn.model.lin.weight, want, atol=1e-7) and not torch.equal(want, want.bfloat16().float())
    clean(learn)


class Odd(nn.Module):
    "Tied and frozen weights, layer norm, integer, complex and float buffers, one that changes and one that is replaced"
    def __init__(self):
        super().__init__()
        self.emb, self.head, self.ln, self.body = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False), nn.LayerNorm(8), nn.Linear(8, 8)
        self.head.weight = self.emb.weight
        self.body.weight.requires_grad_(False)
        self.cplx = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.steps = nn.Parameter(torch.tensor([3]), requires_grad=False)
        self.register_buffer('count', torch.tensor(0))
        self.register_buffer('scale', torch.ones(8))
        self.register_buffer('last', torch.zeros(8))
        self.seen = {}

    def forward(self, x, extra=None):
        self.seen = dict(x=x.dtype, extra=extra['a'][0].dtype if extra else None, cplx=self.cplx.dtype, steps=self.steps.dtype, ln=self.ln.weight.dtype)
        self.count += 1
        x = self.body(self.emb(x))*self.scale.clone()
        self.scale.mul_(1.5)
        self.last = x.detach().mean((0, 1))
        return self.head(self.ln(x))[:, -1] + 0*torch.view_as_real(self.cplx).sum().to(x.dtype)


def test_odd_models():
    data = [(torch.randint(11, (4, 5)), torch.randint(11, (4,))) for _ in range(3)]
    learn = make(model=Odd(), data=(data, data[:1]))
    frozen, tied = learn.model.body.weight.clone(), learn.model.emb.weight.clone()
    learn.fit(1)
    m = learn.model
    assert m.seen == dict(x=torch.int64, extra=None, cplx=torch.complex64, steps=torch.int64, ln=BF16)
    assert m.count == 4 and torch.equal(m.scale, torch.full((8,), 1.5**4)) and m.last.abs().sum() > 0 and m.last.dtype == torch.float32
    assert torch.equal(frozen, m.body.weight) and not m.body.weight.requires_grad and not torch.equal(tied, m.emb.weight)
    assert m.head.weight is m.emb.weight and m.cplx.dtype == torch.complex64
    assert all(t.dtype == torch.float32 for k, t in m.state_dict().items() if k not in ('count', 'steps', 'cplx'))


def test_inputs_in_containers():
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput
    Pair = namedtuple('Pair', 'a b')
    x, i = torch.ones(2), torch.ones(2, dtype=torch.long)
    got = _to((x, [i, x], dict(a=x), Pair(x, i), None, 3, BaseModelOutput(last_hidden_state=x), BatchEncoding(dict(input_ids=i, weights=x))), BF16)
    assert got[0].dtype == got[1][1].dtype == got[2]['a'].dtype == got[3].a.dtype == got[6].last_hidden_state.dtype == got[7]['weights'].dtype == BF16
    assert got[1][0] is i and got[3].b is i and type(got[3]) is Pair and got[4:6] == (None, 3) and type(got[6]) is BaseModelOutput
    assert type(got[7]) is BatchEncoding and got[7]['input_ids'] is i


def test_transformers_output():
    from transformers import BertConfig, BertForSequenceClassification
    model = BertForSequenceClassification(BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    data = [(torch.randint(20, (4, 6)), torch.randint(2, (4,))) for _ in range(2)]
    learn = make(model=model, data=(data, data))
    kinds = []
    learn.loss_func = lambda out, y: (kinds.append((type(out).__name__, out.logits.dtype)), nn.functional.cross_entropy(out.logits, y))[1]
    learn.fit(1)
    assert set(kinds) == {('SequenceClassifierOutput', torch.float32)}
    clean(learn, BertForSequenceClassification)


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.shift = nn.Linear(8, 3), torch.ones(8)

    def forward(self, x): return self.lin(x + self.shift)


class MixesByProduct(Mixes):
    def __init__(self):
        super().__init__()
        self.turn = torch.eye(8)

    def forward(self, x): return self.lin(x @ self.turn)


@pytest.mark.parametrize('model', [Mixes, MixesByProduct])
def test_a_model_that_mixes_is_told(model):
    learn = make(model=model())
    with pytest.raises(UserError, match='neither parameter nor buffer'): learn.fit(1)
    clean(learn, model)


def test_weights_in_double_precision_are_named():
    learn = make()
    learn.model.double()
    with pytest.raises(UserError, match=r'weights of Net are float64.*model.float\(\)'): learn.fit(1)
    assert next(learn.model.parameters()).dtype == torch.float64


def test_channels_last_stays():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).to(memory_format=torch.channels_last)
    formats = []
    model[0].register_forward_hook(lambda m, i, o: formats.append((m.weight.is_contiguous(memory_format=torch.channels_last), i[0].dtype)))
    data = [(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.randint(3, (2,))) for _ in range(2)]
    learn = make(model=model, data=(data, data))
    learn.fit(1)
    assert set(formats) == {(True, BF16)} and model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_a_recurrent_model():
    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x): return self.out(self.rnn(x)[0][:, -1])
    data = [(torch.randn(4, 5, 8), torch.randint(3, (4,))) for _ in range(2)]
    learn = make(model=RNN(), data=(data, data))
    learn.fit(2)
    clean(learn, RNN)


def test_compiled():
    learn = make()
    learn.model.compile(backend='eager')
    learn.fit(2)
    clean(learn)


@pytest.mark.parametrize('event', ['before_batch', 'after_backward', 'after_batch', 'after_epoch', 'after_pred', 'after_loss', 'before_backward'])
def test_taken_off_in_mid_fit(event):
    cb = on(**{event: lambda: learn.to_fp32()})
    cb.order = 20
    learn = make(cbs=cb)
    half, inside = learn.mixed_precision, event in ('after_pred', 'after_loss', 'before_backward')
    with pytest.raises(UserError, match='between forward and backward') if inside else nullcontext(): learn.fit(2)
    assert hasattr(learn, 'mixed_precision') == inside
    learn.mixed_precision = half
    clean(learn)


def test_profiled():
    learn = make(n=6).profile(flops=True)
    learn.fit(1)
    clean(learn)
    assert learn.profiler.profile.facts['efficiency']['precision'] == 'bf16'
    r = learn.profiler.results
    assert r[(r.phase == 'train') & (r.action == 'step')].calls.item() == 6


def test_export(tmp_path):
    tfms = [[lambda i: torch.ones(8)*i], [lambda i: torch.tensor(i % 3)]]
    learn = make(data=Datasets(list(range(32)), tfms, splits=[range(24), range(24, 32)]).dataloaders(bs=4, num_workers=0).loaders)
    learn.path = tmp_path
    learn.fit(1)
    learn.export('e.pkl')
    with pytest.warns(UserWarning): other = load_learner(tmp_path/'e.pkl')
    assert other.precision == 'fp32' and not hasattr(other, 'mixed_precision')
    assert all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), other.model.parameters()))


def test_recipes():
    with pytest.raises(UserError, match='half-bf16'): bench_learner('digits-xresnet18', precision='half-fp8')
    with pytest.raises(UserError, match='slower than fp32'): bench_learner('digits-xresnet18', precision='half-fp16', device='cpu')
    if amp.native_bf16(torch.device('cpu')):
        assert bench_learner('digits-xresnet18', precision='half-bf16', device='cpu', offline=True).precision == 'half-bf16'


@needs_gpu
@pytest.mark.parametrize('dtype', ['fp16', 'bf16'])
@pytest.mark.parametrize('opt', [SGD, Adam])
def test_on_cuda(dtype, opt):
    learn = to_gpu(make(dtype, opt_func=opt))
    learn.fit(2)
    assert learn.mixed_precision._device == 'cuda' and learn.model.dtypes == {learn.mixed_precision.dtype}
    learn.validate()
    clean(learn)


def test_a_language_model_of_fastai_on_a_cpu_is_told():
    "Its hidden state is kept in fp32 from batch to batch: oneDNN has no kernel for both"
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)
            self.state = [torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)]

        def forward(self, x): return self.out(self.rnn(x, self.state)[0][:, -1])

    class NoKernel(Net):
        def forward(self, x): raise RuntimeError('could not create a primitive descriptor for an LSTM. Run with verbose on')
    data = [(torch.randn(4, 5, 8), torch.randint(3, (4,))) for _ in range(2)]
    for model, said in ((Keeps(), 'half precision: '), (NoKernel(), r'half precision: PyTorch cannot compute NoKernel in 16 bits on this cpu \(could not .* LSTM\): .*leave it in fp32')):
        learn = make(model=model, data=(data, data))
        with pytest.raises(UserError, match=said) as e: learn.fit(1)
        assert '\n' not in str(e.value)
        clean(learn, type(model))


def test_a_gan_is_told():
    "Its losses call the model, in fp32"
    class GANModule(Net): ...
    learn = make(model=GANModule())
    with pytest.raises(UserError, match='half precision does not go with a GAN, whose losses call the model in fp32; use to_bf16'): learn.fit(1)
    clean(learn, GANModule)


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward', 'after_backward'])
def test_a_fit_cancelled_in_mid_batch_in_channels_last(event):
    "The weights are in fp32 again before other callbacks undo what is theirs"
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    data = [(torch.randn(2, 3, 8, 8), torch.randint(3, (2,))) for _ in range(3)]
    cb = Raise(event, CancelFitException, times=1)
    cb.order = -20
    learn = make(model=model, data=(data, data), cbs=[ChannelsLast(), cb])
    learn.fit(1)
    clean(learn, nn.Sequential)
    assert model[0].weight.is_contiguous() and model[0].weight.dtype == torch.float32
    learn.fit(1)

"Packed batches on a device: no step waits, the right kernel is taken and was asked before, and what cannot be is said before a fit"
import random
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from fastai.callback.core import Callback

import fastbench.callback.amp as amp
from fastbench.callback.compiling import Compile
from fastbench.callback.ema import EMACallback
from fastbench.train.optimizer import fused_adamw
from fastbench.errors import UserError
from fastbench.text import kernels
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from pretend import pretend
from test_text_data import WORDS, make_tokenizer
from varlen import on_cpu

pytestmark = pytest.mark.usefixtures('no_hub', 'one_thread')
RNG = random.Random(0)
TEXTS = [(' '.join(RNG.choices(WORDS, k=1 + RNG.choice([1, 2, 4, 28]))), 'ab'[RNG.random() < .5]) for _ in range(120)]


@pytest.fixture(autouse=True)
def real_autocast(monkeypatch):
    "Autocast of a pretended device changes no precision: let that of the CPU do it"
    @contextmanager
    def both(device_type, dtype=None):
        with torch.autocast(device_type, dtype=dtype), torch.autocast('cpu', dtype=dtype): yield
    monkeypatch.setattr(amp, 'autocast', both)
    kernels._band.cache_clear()


def make(model, task='sequence-classification', device='cuda:0', loader='packed', cbs=(), **kwargs):
    texts, label = (TEXTS, 'label') if task == 'sequence-classification' else ([o for o, _ in TEXTS], None)
    dls = hf_dls(texts[:90], make_tokenizer(), valid=texts[90:], label_col=label, loader=loader, max_length=40, seed=1, workers=0, device=device,
                 **dict(max_tokens=96) if loader == 'packed' else dict(bs=4))
    torch.manual_seed(0)
    return hf_learner(dls, model, task, pretrained=False, opt_func=fused_adamw, cbs=list(cbs), **kwargs)


class Waits(Callback):
    order = 1e9
    def __init__(self, gpu): self.gpu, self.n = gpu, []
    def after_batch(self):
        if self.training: self.n.append(len(self.gpu.waits))


def fit(learn, gpu, n=1):
    waits = Waits(gpu)
    with learn.no_bar(), learn.no_logging(): learn.fit(n, cbs=waits)
    return [o.place for o in gpu.waits[waits.n[2]:waits.n[-3]]]


FAST = dict(fp32=lambda o: o, fp16=lambda o: o.to_fp16(), bf16=lambda o: o.to_bf16(), half=lambda o: o.to_half('fp16'))


@pytest.mark.parametrize('model,task,precision,capability,kernel', [
    ('distilbert-tiny', None, 'fp16', (8, 0), 'flash'), ('bert-tiny', None, 'fp32', (8, 0), 'efficient'), ('bert-tiny', None, 'half', (9, 0), 'flash'), ('bert-tiny', None, 'fp16', (7, 5), 'efficient'),
    ('modernbert-tiny', None, 'bf16', (8, 0), 'flash'), ('bert-tiny', 'masked-lm', 'bf16', (8, 0), 'flash'), ('gpt2-tiny', 'causal-lm', 'fp16', (8, 0), 'flash'),
    ('gpt2-tiny', None, 'fp16', (7, 5), 'efficient')])
def test_no_step_waits(model, task, precision, capability, kernel):
    with pretend(capability=capability) as gpu, on_cpu() as calls, warnings.catch_warnings():
        warnings.filterwarnings('error', message='packed batches')
        learn = FAST[precision](make(model, task or 'sequence-classification', cbs=[EMACallback(.9)]))
        assert fit(learn, gpu) == [] and not gpu.races
    assert {o for o, _ in calls} == {kernel} and {d['dropout'] for _, d in calls} >= {0.} and (precision == 'fp32') == (calls[-1][1]['dtype'] == torch.float32)


def test_the_numbers_are_those_of_a_cpu():
    "The same losses, by the kernel of a GPU and by that of a CPU"
    def losses(device):
        learn = make('bert-tiny', device=device, config=dict(attention_dropout=0., hidden_dropout_prob=0.))
        with learn.no_bar(), learn.no_logging(): learn.fit(2)
        return torch.stack([torch.as_tensor(o).cpu() for o in learn.recorder.losses])
    want = losses('cpu')
    with pretend(), on_cpu() as calls: got = losses('cuda:0')
    assert calls and {o for o, _ in calls} == {'efficient'}
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_it_is_asked_once_a_device_and_precision():
    with pretend() as gpu, on_cpu() as calls:
        learn = make('distilbert-tiny')
        def asked(f):
            del calls[:]
            seen = []
            class First(Callback):
                def before_epoch(self): seen.append(len(calls))
            with learn.no_bar(), learn.no_logging(): f(cbs=First())
            return seen[0]
        assert asked(partial(learn.fit, 1)) > 2 and calls[0][1]['dtype'] == torch.float32
        assert asked(partial(learn.fit, 1)) == 0
        learn.to_fp16()
        assert asked(partial(learn.fit, 1)) > 2 and {d['dtype'] for _, d in calls} == {torch.float16}
        assert any(d['dropout'] == .1 for _, d in calls)
        assert asked(partial(learn.fit, 1)) == 0 and not gpu.races
    learn = make('distilbert-tiny', device='cpu')
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert not learn.check_packed._done, 'asked when it was built'


@pytest.mark.parametrize('longest,asked', [(40, 90), (101, 90), (102, 111), (None, 111)])
def test_a_wide_window_is_asked_with_a_text_that_is_longer(monkeypatch, longest, asked):
    seen = {}
    def ask(device, dtype, bounds, heads, kv, dim, window=None, **kwargs): seen[window] = max(bounds.n), heads/kv
    monkeypatch.setattr('fastbench.text.check.ask_kernel', ask)
    with pretend(), on_cpu():
        learn = make('modernbert-tiny', config=dict(local_attention=200)).to_fp16()
        learn.dls.train.tokens.max_length = longest
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert seen == {None: (90, 1), 101: (asked, 1)}


def test_a_kernel_that_is_wrong_is_refused(monkeypatch):
    with pretend(), on_cpu():
        learn = make('bert-tiny').to_fp16()
        real = kernels._flash
        for f, why in ((lambda q, *args: real(q, *args) + 30*torch.arange(q.shape[2], device=q.device).half()[:, None], 'gives other results for packed batches than for padded ones on cuda:0 in float16'), (lambda q, k, v, b, causal, window, scale, p:
                       real(q, k, v, b, causal, window, scale, p)*(1. if not q.requires_grad else 1.5), 'is not right on cuda:0 in float16, for .* heads of .* .output wrong by 50%')):
            monkeypatch.setitem(kernels._kernels, 'flash', f)
            learn.model.hf.set_attn_implementation('fastbench')
            before = [p.detach().cpu().clone() for p in learn.model.parameters()]
            with learn.no_bar(), learn.no_logging(), pytest.raises(UserError, match=why): learn.fit(1)
            assert all((a == b.detach().cpu()).all() for a, b in zip(before, learn.model.parameters())) and 'remove_cbs' not in vars(learn)


def test_a_kernel_that_is_missing_is_refused(monkeypatch):
    def gone(*args): raise RuntimeError('FlashAttention was not compiled into this build\nand more')
    with pretend(), on_cpu():
        learn = make('bert-tiny').to_half('fp16')
        monkeypatch.setitem(kernels._kernels, 'flash', gone)
        with learn.no_bar(), learn.no_logging(), pytest.raises(UserError, match=r"was not compiled into this build\): loader='budget'"): learn.fit(1)
        assert learn.mixed_precision._half is None


def test_compile_is_refused_before_the_fit():
    learn = make('bert-tiny', device='cpu', cbs=[Compile(backend='eager')])
    with learn.no_bar(), learn.no_logging(), pytest.raises(UserError, match='torch.compile does not go with packed batches'): learn.fit(1)
    assert learn.model._compiled_call_impl is None
    learn.dls = make('bert-tiny', device='cpu', loader='sorted').dls
    learn.model.hf.set_attn_implementation('sdpa')
    with learn.no_bar(), learn.no_logging(): learn.fit(1)


def test_a_window_to_both_sides_on_an_old_device_is_told():
    with pretend(capability=(7, 5)) as gpu, on_cpu(), pytest.warns(UserWarning, match='each of the .* texts by itself in each layer'):
        kernels._said.clear()
        learn = make('modernbert-tiny', config=dict(local_attention=4)).to_fp16()
        assert fit(learn, gpu) == []

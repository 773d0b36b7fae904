"Texts in training: figures that stay right whatever a batch holds, and every task with every speed-up"
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import Learner  # noqa: F401  (adds fit_one_cycle)
from transformers import ByT5Tokenizer

import fastbench.measure.profiler  # noqa: F401  (adds profile)
from fastbench.callback.checkpointing import GradientCheckpointing
from fastbench.callback.ema import EMACallback
from fastbench.train.optimizer import fused_adamw
from fastbench.measure.phases import values
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.loader import TextDL
from test_text_data import WORDS, drawn, make_tokenizer


@pytest.fixture(scope='module')
def tok(): return make_tokenizer()


@pytest.fixture(scope='module')
def rows():
    import random
    rng = random.Random(0)
    return [(' '.join(rng.choices(WORDS[:30] if i % 2 else WORDS[20:], k=rng.randint(1, 60))), 'ab'[i % 2]) for i in range(120)]


def learner(tok, rows, loader, **kwargs):
    torch.manual_seed(0)
    dls = hf_dls(rows, tok, loader=loader, bs=8, max_tokens=256 if loader in ('budget', 'packed') else None, max_length=64, device='cpu')
    return hf_learner(dls, 'bert-tiny', pretrained=False, opt_func=fused_adamw, **kwargs)


class Seen(Callback):
    def before_fit(self): self.n, self.lrs, self.pct = [], [], []
    def after_batch(self):
        if not self.training: return
        self.n.append(len(self.y)), self.lrs.append(self.opt.hypers[-1]['lr']), self.pct.append(self.learn.pct_train)


@pytest.mark.parametrize('loader', ['sorted', 'budget', 'packed'])
def test_schedule_throughput_and_losses_stay_right(tok, rows, loader):
    learn = learner(tok, rows, loader, cbs=Seen()).profile()
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(3, 1e-3)
    seen, steps = learn.seen, learn.profiler.profile.steps['train']
    assert sum(seen.n) == 3*96 and sum(values(steps, 'samples')) == 3*96 and max(seen.n) <= (8 if loader == 'sorted' else 96)
    assert seen.pct[-1] == pytest.approx(1) and seen.lrs[-1] < 1e-3/100 and max(seen.lrs) == pytest.approx(1e-3, rel=.2)
    tokens = sum(min(len(tok(t)['input_ids']), 64) for t in learn.dls.train_ds.texts)
    assert sum(values(steps, 'tokens')) == 3*tokens
    assert learn.profiler.padding == 0 if loader == 'packed' else 0 <= learn.profiler.padding < .5
    if loader != 'sorted': assert len(set(seen.n)) > 1
    learn.model.eval()
    with torch.no_grad(): each = [torch.nn.functional.cross_entropy(learn.model(x), y, reduction='none') for x, y in learn.dls.valid]
    valid, _ = learn.validate()
    assert valid == pytest.approx(torch.cat(each).mean().item(), rel=1e-4)  # a text is a text, in a batch of many or of few


@pytest.mark.parametrize('loader', ['sorted', 'budget', 'packed'])
def test_predictions_come_in_the_order_of_the_texts(tok, rows, loader):
    learn = learner(tok, rows, loader)
    texts = [t for t, _ in rows]
    with learn.no_bar():
        together = torch.stack([o[2] for o in learn.predict(texts)])
        one_by_one = torch.stack([learn.predict(o)[2] for o in texts[:10]])
    torch.testing.assert_close(together[:10], one_by_one, rtol=1e-4, atol=1e-5)


def test_loaders_train_alike(tok, rows):
    "One epoch of the same texts: padded and packed batches of the same rows give the same weights"
    res = []
    for loader in ('sorted', 'packed'):
        learn = learner(tok, rows, loader, config=dict(hidden_dropout_prob=0., attention_dropout=0.))
        learn.dls.train.get_idxs = learn.dls.valid.get_idxs  # the same order for both
        x = [b for b in learn.dls.valid]
        y = torch.cat([o for _, o in x])
        loss = sum(torch.nn.functional.cross_entropy(learn.model(o), t, reduction='sum') for o, t in x)/len(y)
        loss.backward()
        res.append((loss.item(), {k: p.grad for k, p in learn.model.named_parameters() if p.grad is not None}))
    (a, ga), (b, gb) = res
    assert a == pytest.approx(b, rel=1e-5) and all(torch.allclose(ga[k], gb[k], atol=1e-5) for k in gb)


def lm(task): return lambda tok, rows, **kw: hf_learner(hf_dls([t for t, _ in rows], tok, label_col=None, loader=kw.pop('loader', 'sorted'), bs=8, max_length=64, device='cpu'),
                                                        'gpt2-tiny' if task == 'causal-lm' else 'bert-tiny', task, pretrained=False, **kw)


def tags(tok, rows, **kw):
    from fastbench.text.examples import task_dls
    from fastbench.text.tokens import TokenClassification
    examples = [(t.split(), ['O' if w in WORDS[:30] else 'B-X' for w in t.split()]) for t, _ in rows]
    task = TokenClassification.of(examples)
    return hf_learner(task_dls(task, examples[:96], examples[96:], tok, bs=8, max_length=64, device='cpu'), 'bert-tiny', task, pretrained=False, **kw)


TASKS = dict(classes=lambda tok, rows, **kw: learner(tok, rows, 'sorted', **kw), packed=lambda tok, rows, **kw: learner(tok, rows, 'packed', **kw), causal=lm('causal-lm'), masked=lm('masked-lm'),
             tags=tags)


@pytest.mark.parametrize('name', TASKS)
def test_every_task_with_every_speed_up(tok, rows, name):
    learn = TASKS[name](tok, rows, cbs=[EMACallback(.9), GradientCheckpointing()]).to_bf16(allow_emulation=True).profile()
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, 1e-3)
    assert torch.isfinite(learn.recorder.losses[-1]) and learn.precision == 'bf16' and learn.profiler.results.total.sum() > 0
    assert 0 <= learn.profiler.padding < 1


@pytest.mark.parametrize('name', ['causal', 'masked'])
def test_a_language_model_packed_is_the_same(tok, rows, name):
    with torch.no_grad():
        res = []
        for loader in ('sorted', 'packed'):
            torch.manual_seed(0)
            learn = TASKS[name](tok, rows, loader=loader)
            learn.model.eval()
            total = n = 0
            for x, y in learn.dls.valid:
                keep = (y != -100).sum().item()
                total, n = total + learn.loss_func(learn.model(x), y).item()*keep, n + keep
            res.append((total/n, n))
    if name == 'causal': assert res[0][1] == res[1][1] and res[0][0] == pytest.approx(res[1][0], rel=1e-4)
    else: assert res[0][0] == pytest.approx(res[1][0], rel=.05)  # other words are masked


def test_a_tokenizer_without_rust(rows):
    "ByT5's is Python: bytes"
    tok = ByT5Tokenizer()
    assert not tok.is_fast
    texts = [t[:30] for t, _ in rows[:40]]
    got = [o for b in drawn(TextDL(texts, tok, bs=8, shuffle=True, max_length=16)) for o in b]
    assert sorted(got) == sorted(tok(t, truncation=True, max_length=16)['input_ids'] for t in texts)


@pytest.mark.parametrize('loader', ['sorted', 'packed'])
@pytest.mark.parametrize('name', ['classes', 'causal', 'masked', 'tags'])
def test_accumulation_counts_texts(tok, rows, name, loader):
    "A packed batch of tokens has one row of targets, and many texts; a step weighs all its tokens the same"
    from copy import deepcopy
    from fastai.callback.training import GradientAccumulation
    from fastai.optimizer import SGD
    from fastbench.text.examples import task_dls
    from fastbench.text.tokens import TokenClassification
    from functools import partial
    class Batches(Callback):
        run_valid = False
        def before_fit(self): self.got = []
        def before_batch(self): self.got.append((self.x, self.y))
    kw = dict(opt_func=partial(SGD, mom=0., wd=0.), cbs=[Batches(), GradientAccumulation(20)], config=dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.) if name != 'causal' else dict(resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.))
    if name == 'classes': learn = hf_learner(hf_dls(rows[:40], tok, loader=loader, bs=8, max_length=64, workers=0, device='cpu'), 'bert-tiny', pretrained=False, **kw)
    elif name == 'tags':
        task, few = TokenClassification(['O', 'B-X']), [(t.split(), ['O' if w in WORDS[:30] else 'B-X' for w in t.split()]) for t, _ in rows[:40]]
        learn = hf_learner(task_dls(task, few[:32], few[32:], tok, bs=8, max_length=64, device='cpu', loader=loader), 'bert-tiny', task, pretrained=False, **kw)
    else: learn = hf_learner(hf_dls([t for t, _ in rows[:40]], tok, label_col=None, loader=loader, bs=8, max_length=64, workers=0, device='cpu'), 'gpt2-tiny' if name == 'causal' else 'bert-tiny', f'{name}-lm', pretrained=False, **kw)
    model = deepcopy(learn.model).train()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
    n, tokens, steps, opt = 0, 0, 0, torch.optim.SGD(model.parameters(), lr=.1)
    for epoch in (0, 1):
        for x, y in learn.batches.got[epoch*len(learn.batches.got)//2:(epoch+1)*len(learn.batches.got)//2]:
            texts = len(x['cu_seq_lens'])-1 if loader == 'packed' else len(x['input_ids'])
            count = len(y) if name == 'classes' else (y != -100).sum().item()
            (learn.loss_func(model(x), y)*count).backward()  # the sum over what is learned from
            n, tokens = n+texts, tokens+count
            if n >= 20:
                for p in model.parameters(): p.grad *= n/20/tokens
                opt.step(), opt.zero_grad()
                n, tokens, steps = 0, 0, steps+1
    assert steps >= 2
    for a, b in zip(learn.model.parameters(), model.parameters()): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)

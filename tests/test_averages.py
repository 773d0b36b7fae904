"One rule for every loader: a loss over texts is a mean over texts, a loss over tokens one over the tokens that count, however they are batched"
import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fastbench.train.fast_callbacks import LeanLoss, LeanMetric
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.lm import CausalLM, TokenPerplexity
from fastbench.text.qa import QuestionAnswering
from fastbench.text.rnn import rnn_learner
from fastbench.text.words import lm_dls
from fastbench.text.seq2seq import Summarization
from fastbench.text.examples import task_dls
from fastbench.text.tokens import TokenClassification
from test_text_data import WORDS, make_tokenizer

pytestmark = pytest.mark.usefixtures('no_hub', 'one_thread')

RNG = random.Random(0)
TEXTS = [' '.join(RNG.choices(WORDS, k=1 + RNG.choice([1, 2, 4, 28]))) for _ in range(41)]  # very uneven
VALID = TEXTS[12:]
SIZES = dict(random=dict(bs=4), sorted=dict(bs=4), budget=dict(max_tokens=96), packed=dict(max_tokens=96), one=dict(loader='random', bs=1))


def examples(task, rows):
    def make(tok, loader):
        a = dict(loader=loader) | SIZES[loader]
        return task_dls(task, rows[:12], rows[12:], tok, max_length=40, device='cpu', seed=1, **a)
    return make


def texts(label=lambda o: 'ab'[len(o) % 2]):
    def make(tok, loader):
        rows = [(o, label(o)) for o in TEXTS]
        a = dict(loader=loader) | SIZES[loader]
        return hf_dls(rows[:12], tok, valid=rows[12:], max_length=40, seed=1, workers=0, device='cpu', **a)
    return make


TAGS = TokenClassification(['O', 'B-X', 'I-X'])
TASKS = dict(
    classes=('bert-tiny', 'sequence-classification', texts()),
    numbers=('bert-tiny', 'sequence-classification', texts(lambda o: float(len(o)) / 50)),
    tags=('bert-tiny', TAGS, examples(TAGS, [(o.split(), [TAGS.vocab[len(w) % 3] for w in o.split()]) for o in TEXTS])),
    causal=('gpt2-tiny', 'causal-lm', texts()),
    masked=('bert-tiny', 'masked-lm', texts()),
    questions=('bert-tiny', QuestionAnswering(stride=4), examples(QuestionAnswering(stride=4), [('ba', o, o.split()[-1]) for o in TEXTS])))


@pytest.fixture(scope='module')
def tok(): return make_tokenizer()


@torch.no_grad()
def by_hand(learn):
    "Mean over all the tokens that count, loss first, then the share that is right"
    out = [(learn.model.eval()(x).flatten(0, 1), y.flatten()) for x, y in learn.dls.valid]
    pred, y = (torch.cat(o) for o in zip(*out))
    return F.cross_entropy(pred, y).item(), (pred.argmax(-1) == y)[y != -100].float().mean().item()


@pytest.fixture(scope='module')
def recorded(tok):
    "What `validate` gives for the same model on each loader"
    done = {}
    def get(name):
        if name not in done:
            model, task, make = TASKS[name]
            torch.manual_seed(0)
            body, res = None, {}
            for loader in SIZES:
                dls = make(tok, loader)
                learn = hf_learner(dls, model if body is None else copy.deepcopy(body), task, **(dict(pretrained=False) if body is None else {}))
                if body is None:
                    body = copy.deepcopy(learn.model.hf)
                    for p in body.parameters(): p.data *= 4
                    learn.model.hf.load_state_dict(body.state_dict())
                with learn.no_bar(), learn.no_logging(): res[loader] = [float(o) for o in learn.validate()]
                if loader == 'one' and learn.model.per_token: res['by hand'] = by_hand(learn)
            done[name] = res
        return done[name]
    return get


@pytest.mark.parametrize('loader', SIZES)
@pytest.mark.parametrize('name', TASKS)
def test_loss_and_metrics_are_those_of_one_text_at_a_time(recorded, name, loader):
    got = recorded(name)
    assert len(got[loader]) > 1 and got[loader] == pytest.approx(got['one'], rel=2e-4, abs=1e-5)


@pytest.mark.parametrize('name', ['tags', 'causal', 'masked'])
def test_a_loss_over_tokens_is_a_mean_over_tokens(recorded, name):
    loss, right = recorded(name)['by hand']
    got = recorded(name)['packed']
    assert got[:2] == pytest.approx([loss, right if name == 'tags' else math.exp(loss)], rel=2e-4)


def test_words_of_a_target_and_of_a_short_last_window_weigh_the_same(tok):
    torch.manual_seed(0)
    rows, res = [(o, ' '.join(o.split()[:9])) for o in TEXTS], []
    for bs in (1, 7):
        dls = task_dls(Summarization(max_target=12), rows[:12], rows[12:], tok, bs=bs, max_length=40, device='cpu')
        learn = hf_learner(dls, 't5-tiny' if bs == 1 else learn.model.hf, 'summarization', **(dict(pretrained=False) if bs == 1 else {}))
        with learn.no_bar(), learn.no_logging(): res.append([float(o) for o in learn.validate()])
    assert res[0] == pytest.approx(res[1], rel=1e-5)
    learn = rnn_learner(lm_dls((TEXTS, TEXTS), bs=2, bptt=30, device='cpu'), model_args=dict(n_emb=8, n_hid=8))
    for p in learn.model.parameters(): p.data *= 20
    assert learn.dls.valid.length % 30
    with learn.no_bar(), learn.no_logging(): loss, acc, perplexity = learn.validate()
    learn.model.reset()
    with torch.no_grad(): hits = torch.cat([(learn.model(x).argmax(-1) == y).flatten() for x, y in learn.dls.valid])
    assert loss == pytest.approx(math.log(perplexity), rel=1e-5) and acc == pytest.approx(hits.float().mean().item())


def test_a_batch_in_which_nothing_counts_spoils_nothing(tok):
    "Texts of one token have no next one"
    dls = hf_dls(TEXTS[:4], make_tokenizer(specials=False), label_col=None, valid=[*TEXTS[:3], 'ba', 'be'], loader='random', bs=1, max_length=40, workers=0, device='cpu')
    learn = hf_learner(dls, 'gpt2-tiny', CausalLM(), metrics=lambda p, y: p.mean(), pretrained=False)
    with learn.no_bar(), learn.no_logging(): assert all(map(math.isfinite, learn.validate()))


def test_masks_are_of_a_text_in_validation_and_new_in_training(tok):
    learn = hf_learner(hf_dls(TEXTS, tok, label_col=None, bs=4, max_length=40, workers=0, device='cpu'), 'bert-tiny', 'masked-lm', pretrained=False)
    def told(dl): return {tuple(o[o > 0].tolist()): (y[o > 0] != -100).tolist() for x, ys in dl for o, y in zip(torch.where(ys == -100, x['input_ids'], ys), ys)}
    train, valid = learn.dls
    assert told(valid) == told(valid.new(bs=3)) and told(train) != told(train)


def test_nothing_waits_for_the_device():
    "A tensor without data cannot be read"
    y = torch.zeros(2, 3, dtype=torch.long, device='meta')
    learn = SimpleNamespace(yb=(y,), pred=y, loss=y.float().mean(), n_targets=lambda yb: TAGS.n_targets(yb[0]), to_detach=lambda o, **kwargs: o.detach())
    for metric in (LeanLoss(), TokenPerplexity(), LeanMetric(lambda p, y: p.float().mean())):
        metric.reset()
        for _ in range(2): metric.accumulate(learn)
        assert metric.total.is_meta and metric.count.is_meta

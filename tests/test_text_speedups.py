"Every task with compile, EMA, batch-size finder, mixed precision and profiler: a step or two each, and what it changed"
import random
from functools import cache

import fastai.callback.schedule  # noqa: F401
import pandas as pd
import pytest
import torch
from fastai.data.core import DataLoaders

import fastbench.train.batch_size, fastbench.measure.profiler  # noqa: F401, E401
from fastbench.train.batch_size import _rows
from fastbench.callback.cpu import onednn
from fastbench.callback.ema import EMACallback
from fastbench.measure.loader import batch_size
from fastbench.text.data import hf_dls
from fastbench.text.learner import HFLearner, hf_learner
from fastbench.text.qa import QuestionAnswering
from fastbench.text.rnn import rnn_learner
from fastbench.text.words import lm_dls
from fastbench.text.seq2seq import Summarization, Translation
from fastbench.text.examples import task_dls
from fastbench.text.tokens import TokenClassification
from test_text_data import WORDS, make_tokenizer

pytestmark = [pytest.mark.usefixtures('no_hub', 'one_thread'), pytest.mark.filterwarnings('ignore')]

rng = random.Random(0)
TEXTS = [' '.join(rng.choices(WORDS, k=rng.randint(2, 12))) for _ in range(24)]
DF = pd.DataFrame(dict(text=TEXTS, other=TEXTS[::-1], label=['a', 'b']*12, many=['a', 'a;b', 'b', 'b']*6, score=[i/7 for i in range(24)]))
TAGS = [(t.split(), ['B-X' if w[0] in 'bd' else 'O' for w in t.split()]) for t in TEXTS]
ASKED = [('ba be', t, t.split()[-1]) for t in TEXTS]
PAIRS = [(t, t.split()[0]) for t in TEXTS]
cache_tok = cache(make_tokenizer)


def texts(model='bert-tiny', task='sequence-classification', loader='sorted', **kw):
    kw = dict(bs=4, loader=loader, max_tokens=48 if loader in ('budget', 'packed') else None, max_length=16, workers=0, device='cpu') | kw
    return lambda: hf_learner(hf_dls(DF, cache_tok(), **kw), model, task, **small(model))


def examples(model, task, rows, loader=None):
    max_tokens = dict(max_tokens=48) if loader else {}
    return lambda: hf_learner(task_dls(task(), rows[:16], rows[16:], cache_tok(), bs=4, max_length=16, device='cpu', loader=loader, **max_tokens), model, task(), **small(model))


def words(arch):
    dls = lambda: lm_dls(([' '.join(WORDS)]*9, [' '.join(WORDS)]*3), bs=4, bptt=8, device='cpu')
    return lambda: rnn_learner(dls(), arch, model_args=dict(n_emb=16, n_hid=16))


ONE = {'bert-tiny': 'num_hidden_layers', 'distilbert-tiny': 'n_layers', 'roberta-tiny': 'num_hidden_layers', 'gpt2-tiny': 'n_layer', 'modernbert-tiny': 'num_hidden_layers', 't5-tiny': 'num_layers'}
def small(model): return dict(config={ONE[model]: 1} if model in ONE else dict(encoder_layers=1, decoder_layers=1), pretrained=False)
def tagging(): return TokenClassification(['O', 'B-X'])
def asking(): return QuestionAnswering(stride=4)


TASKS = dict(classes=texts(), budget=texts('distilbert-tiny', loader='budget'), packed=texts('distilbert-tiny', loader='packed'), many=texts(label_col='many', label_delim=';'),
             numbers=texts(label_col='score'), pairs=texts('roberta-tiny', text_col=['text', 'other']), causal=texts('gpt2-tiny', 'causal-lm', label_col=None),
             causal_packed=texts('gpt2-tiny', 'causal-lm', 'packed', label_col=None), masked=texts('modernbert-tiny', 'masked-lm', label_col=None),
             tags=examples('distilbert-tiny', tagging, TAGS), tags_packed=examples('bert-tiny', tagging, TAGS, 'packed'), questions=examples('bert-tiny', asking, ASKED),
             questions_packed=examples('distilbert-tiny', asking, ASKED, 'packed'), summaries=examples('t5-tiny', lambda: Summarization(max_target=8), PAIRS),
             translations=examples('bart-tiny', lambda: Translation(max_target=8), PAIRS), words=words('lstm'))


@pytest.fixture(params=TASKS)
def learn(request):
    torch.manual_seed(0)
    return TASKS[request.param]()


class Batches(list):
    def to(self, device): return self


def steps(learn, batches, cbs=()):
    torch.manual_seed(0)
    learn.dls = DataLoaders(Batches(batches), Batches(), device='cpu')
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3, cbs=cbs)
    return [o.item() for o in learn.recorder.losses]


def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]
def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_ema_bf16_and_profiler(learn, request):
    if any(isinstance(m, torch.nn.LSTM) for m in learn.model.modules()): request.getfixturevalue('bf16')  # no kernel otherwise
    before, seen = weights(learn), set()
    for m in learn.model.modules():
        if isinstance(m, torch.nn.Linear): m.register_forward_hook(lambda m, a, o: seen.add(o.dtype) if m.training else None)
    learn.add_cb(EMACallback(.5)).to_bf16(allow_emulation=True).profile()
    packed, loss = getattr(learn.dls.train, 'loader', None) == 'packed', steps(learn, [learn.dls.one_batch()]*2)[0]
    after = weights(learn)
    assert learn.precision == 'bf16' and torch.bfloat16 in seen and {p.dtype for p in learn.model.parameters()} == {torch.float32}
    assert learn.ema.average.n_averaged == 2 and not same(before, after) and same(after, [p.detach() for p in learn.ema.average.module.parameters()])
    r = learn.profiler.results.reset_index()
    assert r[(r.phase == 'train') & (r.action == 'step')].calls.item() == 2 and r[(r.phase == 'train') & (r.action == 'step')].samples_per_second.item() > 0
    if packed: assert learn.profiler.padding == 0
    elif isinstance(learn, HFLearner): assert 0 <= learn.profiler.padding < 1
    assert 0 < loss < 20


@pytest.mark.parametrize('name', ['packed', 'causal', 'masked', 'tags', 'questions', 'summaries'])
def test_compile(name):
    "The same loss, by compiled code, and nothing is left of it"
    graphs, losses = [], []
    def backend(gm, inputs): graphs.append(gm); return gm.forward
    for compiled in (False, True):
        torch.manual_seed(0)
        learn = TASKS[name]()
        if compiled: learn.compile(backend=backend, dynamic=False)
        losses += steps(learn, [next(iter(learn.dls.valid))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and graphs and learn.model._compiled_call_impl is None


def test_find_batch_size(learn):
    before, seen = weights(learn), []
    learn.model.register_forward_pre_hook(lambda m, args: seen.append(batch_size(args[0])[0]))
    n = learn.find_batch_size(start=3, max=3)
    assert n == 3 and n.seconds > 0 and seen == [3, 3] and same(before, weights(learn))


def test_a_packed_batch_grows_text_by_text():
    x = dict(input_ids=torch.tensor([[5, 6, 7]]), position_ids=torch.tensor([[0, 1, 0]]), cu_seq_lens=torch.tensor([0, 2, 3], dtype=torch.int32))
    got, y, each = _rows((x, torch.tensor([1, 2]), torch.tensor([[1, 2, 3]])), 2, 3)
    assert got['input_ids'].tolist() == [[5, 6, 7, 5, 6]] and got['position_ids'].tolist() == [[0, 1, 0, 0, 1]] and got['cu_seq_lens'].tolist() == [0, 2, 3, 5]
    assert got['cu_seq_lens'].dtype == torch.int32 and y.tolist() == [1, 2, 1] and each.tolist() == [[1, 2, 3, 1, 2]]


@pytest.mark.parametrize('name', TASKS)
def test_onednn(name, monkeypatch):
    "The same steps up to rounding, each product asked of oneDNN"
    monkeypatch.setattr(onednn, '_least', 0)
    asked, product, losses = [], onednn.onednn_linear, []
    monkeypatch.setattr(onednn, 'onednn_linear', lambda *o: asked.append(1) or product(*o))
    for cbs in ([], [onednn.OneDNNLinear()]):
        torch.manual_seed(0)
        learn = TASKS[name]()
        losses.append(steps(learn, [next(iter(learn.dls.valid))]*3, cbs))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(asked) > 6

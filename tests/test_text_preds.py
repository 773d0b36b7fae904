"Predictions, losses and top losses of every task, one row for each text in the order of the texts, against the model called with each text alone"
import random

import pytest
import torch
import torch.nn.functional as F
from fastai.interpret import Interpretation
from transformers import BertConfig, GPT2Config, T5Config

from fastbench.errors import UserError
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.order import kinds
from fastbench.text.qa import QuestionAnswering
from fastbench.text.seq2seq import Seq2Seq
from fastbench.text.examples import task_dls
from fastbench.text.tokens import TokenClassification
from test_text_data import WORDS, make_tokenizer

pytestmark = pytest.mark.usefixtures('no_hub', 'one_thread')

rng = random.Random(0)
TEXTS = [' '.join(rng.choices(WORDS, k=1+(7*i) % 23)) for i in range(30)]
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, initializer_range=.3)
BERT, GPT = BertConfig(**SIZES), GPT2Config(n_embd=16, n_layer=1, n_head=2, initializer_range=.3)


def small(dls, config, task):
    torch.manual_seed(0)
    learn = hf_learner(dls, config, task, pretrained=False)
    learn.no_bar().__enter__()
    learn.model.eval()
    return learn


def alone(learn, x):
    with torch.no_grad(): return learn.model({k: v[None] for k, v in x.items()})


def example(i):
    words = TEXTS[i].split()
    return words, ['B-X' if w in WORDS[:30] else 'O' for w in words]


def tags(tok, loader):
    task = TokenClassification(['O', 'B-X'])
    return small(task_dls(task, [example(i) for i in range(18)], [example(i) for i in range(18, 30)], tok, bs=4, max_length=20, device='cpu', loader=loader), BERT, task)


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize('loader', [None, *kinds])
def test_tags_of_all_texts_in_their_order(loader, side):
    tok = make_tokenizer(side=side)
    learn = tags(tok, loader)
    inputs, preds, targs, dec, losses = learn.get_preds(with_input=True, with_decoded=True, with_loss=True)
    assert len(preds) == len(targs) == len(losses) == 12
    for i in range(12):
        words, names = example(18+i)
        enc = tok(words, is_split_into_words=True, truncation=True, max_length=20, return_tensors='pt')
        n = enc['input_ids'].shape[1]
        with torch.no_grad(): want = learn.model.hf(**enc).logits[0]
        torch.testing.assert_close(preds[i, :n], want.softmax(-1), rtol=1e-4, atol=1e-5)
        assert (preds[i, n:] == 0).all() and (targs[i, n:] == -100).all() and (dec[i, n:] == -100).all() and torch.equal(dec[i, :n], want.argmax(-1))
        ids = enc.word_ids(0)
        y = torch.tensor([-100 if w is None or ids[at-1] == w else ['O', 'B-X'].index(names[w]) for at, w in enumerate(ids)])
        assert torch.equal(targs[i, :n], y) and torch.equal(inputs['input_ids'][i, :n], enc['input_ids'][0]) and inputs['attention_mask'][i].sum() == n
        assert losses[i].item() == pytest.approx(F.cross_entropy(want, y).item(), rel=1e-4)
    few, none, dec = learn.get_preds(dl=learn.dls.test_dl([example(i)[0] for i in (20, 19)]), with_decoded=True)
    assert none is None
    for row, got, i in zip(few, dec, (2, 1)):
        n = int(inputs['attention_mask'][i].sum())
        torch.testing.assert_close(row[:n], preds[i, :n], rtol=1e-4, atol=1e-5)
        assert (got[n:] == -100).all()


def test_a_batch_without_tags_keeps_its_rows():
    rows = [example(i) for i in range(8)] + [([], []), ([], [])]
    task = TokenClassification(['O', 'B-X'])
    learn = small(task_dls(task, rows, rows, make_tokenizer(), bs=2, max_length=20, device='cpu'), BERT, task)
    preds, targs, losses = learn.get_preds(with_loss=True)
    assert len(preds) == len(targs) == len(losses) == 10 and (targs[8:] == -100).all() and (losses[8:] == 0).all() and (losses[:8] > 0).all()


@pytest.mark.parametrize('loader', kinds)
@pytest.mark.parametrize('name', ['causal-lm', 'masked-lm'])
def test_words_of_all_texts_in_their_order(loader, name):
    tok = make_tokenizer()
    learn = small(hf_dls(TEXTS, tok, label_col=None, loader=loader, bs=4, max_length=20, workers=0, device='cpu'), GPT if name == 'causal-lm' else BERT, name)
    inputs, preds, targs, losses = learn.get_preds(with_input=True, with_loss=True)
    assert len(preds) == len(learn.dls.valid_ds) == len(losses)
    for i, text in enumerate(learn.dls.valid_ds.texts):
        ids = torch.tensor(tok(text, truncation=True, max_length=20)['input_ids'])
        n, keep = len(ids), targs[i] != -100
        if name == 'causal-lm': assert targs[i, :n-1].tolist() == ids[1:].tolist() and keep.sum() == n-1
        else: assert torch.equal(targs[i][keep], ids[keep[:n]])
        want = alone(learn, {k: v[i, :n] for k, v in inputs.items()})[0]
        torch.testing.assert_close(preds[i, :n], want.softmax(-1), rtol=1e-4, atol=1e-5)
        assert losses[i].item() == pytest.approx(F.cross_entropy(want, targs[i, :n]).item(), rel=1e-4)


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize('loader', [None, *kinds])
def test_windows_of_all_contexts_in_their_order(loader, side):
    "A context is several windows: none is left out, whatever batches they are in"
    rows = [dict(question='ba be', context=o + ' ba bi', answers=dict(text=['ba bi'], answer_start=[len(o)+1])) for o in TEXTS]
    task, tok = QuestionAnswering(stride=4), make_tokenizer(side=side)
    learn = small(task_dls(task, rows[:18], rows[18:], tok, bs=3, max_length=18, device='cpu', loader=loader), BERT, task)
    x, (start, end), targs, dec, losses = learn.get_preds(with_input=True, with_decoded=True, with_loss=True)
    enc = tok(['ba be']*12, [o['context'] for o in rows[18:]], truncation='only_second', max_length=18, stride=4, return_overflowing_tokens=True, return_offsets_mapping=True)
    assert len(start) == len(targs) == len(losses) == len(enc['input_ids']) > 12
    for i, ids in enumerate(enc['input_ids']):
        n, context = len(ids), rows[18+enc['overflow_to_sample_mapping'][i]]['context']
        assert x['input_ids'][i, :n].tolist() == ids
        with torch.no_grad(): out = learn.model.hf(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([enc['token_type_ids'][i]]))
        torch.testing.assert_close(start[i, :n], out.start_logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(end[i, :n], out.end_logits[0], rtol=1e-4, atol=1e-4)
        a, b = targs[i].tolist()
        said = context[enc['offset_mapping'][i][a][0]:enc['offset_mapping'][i][b][1]] if a else ''
        assert said in ('', 'ba bi')
        assert losses[i].item() == pytest.approx((F.cross_entropy(out.start_logits, targs[i, :1]) + F.cross_entropy(out.end_logits, targs[i, 1:])).item()/2, rel=1e-3)
    assert (targs[:, 0] > 0).sum() >= 12 and dec.max() < 18


def test_targets_of_unequal_length_are_padded():
    pairs = [(o, ' '.join(o.split()[:1+i % 7])) for i, o in enumerate(TEXTS)]
    task, tok = Seq2Seq(max_target=12), make_tokenizer()
    learn = small(task_dls(task, pairs[:18], pairs[18:], tok, bs=4, max_length=20, device='cpu'), T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2), task)
    preds, targs, losses = learn.get_preds(with_loss=True)
    assert len(preds) == 12 and preds.shape[:2] == targs.shape
    for i, (_, t) in enumerate(pairs[18:]):
        ids = tok(t)['input_ids']
        assert targs[i][targs[i] != -100].tolist() == ids
        assert losses[i].item() == pytest.approx(F.nll_loss(preds[i].log(), targs[i]).item(), rel=1e-3)


# Top losses

def top(learn, k):
    from fastai.interpret import plot_top_losses
    i = Interpretation.from_learner(learn)
    losses, idx = i.top_losses(k)
    inputs, preds, targs, dec, again = i[idx]
    learn.dls.valid.show_results((inputs, targs), dec, show=False)
    x, y, its = i.dl._pre_show_batch((inputs, targs), max_n=k)
    outs = i.dl._pre_show_batch((inputs, dec), max_n=k)[2]
    return i, plot_top_losses(x, y, its, outs.itemgot(slice(1, None)), preds, losses, show=False)


@pytest.mark.parametrize('loader', kinds)
def test_top_losses_are_those_of_the_texts_beside_them(loader, capsys):
    "fastai asks for the rows in its order, and the loader would sort them"
    learn = small(hf_dls([(o, 'ab'[i % 2]) for i, o in enumerate(TEXTS)], make_tokenizer(), loader=loader, bs=2, max_length=40, workers=0, device='cpu'), BERT, 'sequence-classification')
    i, df = top(learn, 5)
    assert list(df) == ['text', 'category', 'prediction', 'loss'] and df.loss.is_monotonic_decreasing
    ds = learn.dls.valid_ds
    for row in df.itertuples():
        at = ds.texts.index(row.text)
        name, _, p = learn.predict(row.text)
        assert row.category == 'ab'[ds.y[at]] and row.prediction == name and row.loss == pytest.approx(-p[ds.y[at]].log().item(), rel=1e-3)
    i.plot_top_losses(3), i.plot_top_losses(range(2), largest=False), i.show_results([0, 2])
    assert len(i.top_losses(4, items=True)[2]) == 4


@pytest.mark.parametrize('loader', [None, 'sorted', 'packed'])
def test_top_losses_of_tags(loader):
    _, df = top(tags(make_tokenizer(), loader), 4)
    assert list(df) == ['text', 'tags', 'prediction', 'loss'] and all(len(a.split()) == len(b.split()) for a, b in zip(df.tags, df.prediction))


def test_top_losses_of_questions():
    rows = [('ba be', o, o.split()[0]) for o in TEXTS]
    def make(loader):
        task = QuestionAnswering(stride=4)
        return small(task_dls(task, rows[:18], rows[18:], make_tokenizer(), bs=3, max_length=18, device='cpu', loader=loader), BERT, task)
    assert list(top(make('sorted'), 3)[1]) == ['question', 'context', 'answer', 'prediction', 'loss']
    with pytest.raises(UserError, match="has several rows here, so items cannot be told by their rows: make the data with task_dls"): Interpretation.from_learner(make(None)).plot_top_losses(2)


def test_one_text_with_a_number():
    learn = small(hf_dls([(o, i+.5) for i, o in enumerate(TEXTS[:2])], make_tokenizer(), max_length=40, workers=0, device='cpu'), BERT, 'sequence-classification')
    loss, r, _ = learn.validate()
    assert loss > 0 and r != r


def test_a_text_without_its_target_has_no_next_word():
    from transformers import BartConfig
    pairs = [(o, o) for o in TEXTS]
    task = Seq2Seq(max_target=12)
    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32)
    learn = small(task_dls(task, pairs[:18], pairs[18:], make_tokenizer(), bs=4, max_length=20, device='cpu'), config, task)
    with pytest.raises(UserError, match='these texts have no targets, .*: learn.predict writes'): learn.get_preds(dl=learn.dls.test_dl(TEXTS[:3]))
    assert len(learn.predict(TEXTS[:3])) == 3

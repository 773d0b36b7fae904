"Tags and questions in every loader, padded and packed alike; what show_batch and show_results say of every task"
import random

import fastai.callback.schedule  # noqa: F401
import numpy as np
import pytest
import torch
from transformers import BertConfig, DebertaV2Config, DistilBertConfig, ElectraConfig, ModernBertConfig, RobertaConfig

from fastbench.errors import UserError
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.order import kinds
from fastbench.text.qa import QuestionAnswering
from fastbench.text.seq2seq import Summarization, Translation
from fastbench.text.examples import ExampleTokens, task_dls
from fastbench.text.tokenize import by_text
from fastbench.text.tokens import EntityF1, TokenClassification
from test_text_tasks import WORDS, tok  # noqa: F401

pytestmark = pytest.mark.usefixtures('no_hub', 'one_thread')

rng = random.Random(0)


def sentence():
    words = rng.choices(WORDS, k=rng.randint(1, 14))
    return words, [('B-X' if w[0] in 'bd' else 'I-X' if w[0] == 'f' else 'O') for w in words]


def question():
    words = rng.choices(WORDS, k=rng.randint(3, 40))
    return 'ba be', ' '.join(words), rng.choice([words[0], words[-1], ''])


TAGS, ASKED = [sentence() for _ in range(48)], [question() for _ in range(48)]


def make(name, tok, **kwargs):
    "DataLoaders and task"
    task = TokenClassification.of(TAGS) if name == 'tags' else QuestionAnswering(stride=4)
    rows = TAGS if name == 'tags' else ASKED
    return task_dls(task, rows[:36], rows[36:], tok, bs=6, max_length=24, device='cpu', **kwargs), task


def each(dl, name):
    "Text -> its tokens' tags, or its span"
    res = []
    for x, y in dl:
        ys = by_text(x, y) if name == 'tags' else y - (0 if 'cu_seq_lens' in x else x['attention_mask'].argmax(1)[:, None])
        res += [(tuple(i.tolist()), tuple(t.tolist())) for i, t in zip(by_text(x, x['input_ids']), ys)]
    return sorted(res)


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize('name', ['tags', 'questions'])
def test_every_loader_draws_the_same_examples(tok, name, side, monkeypatch):
    monkeypatch.setattr(tok, 'padding_side', side)
    plain, _ = make(name, tok)
    want = each(plain.train, name)
    assert len(want) == 36 if name == 'tags' else len(want) > 36
    if name == 'questions': assert any(a == b == 0 for _, (a, b) in want) and any(a > 0 for _, (a, b) in want)
    for loader in kinds:
        dls, _ = make(name, tok, loader=loader, max_tokens=96)
        for _ in range(2): assert each(dls.train, name) == want, loader
        if loader in ('budget', 'packed'): assert max(x['input_ids'].numel() for x, _ in dls.train) <= 96
        assert dls.info['loader'] == loader and dls.train.task is dls.valid.task


def test_a_worker_makes_them_as_well(tok):
    assert each(make('tags', tok, loader='sorted', num_workers=1)[0].train, 'tags') == each(make('tags', tok)[0].train, 'tags')


def test_sorted_wastes_less(tok):
    waste = {k: np.mean([1 - x['attention_mask'].float().mean().item() for x, _ in make('tags', tok, loader=k)[0].train]) for k in ('random', 'sorted')}
    assert waste['sorted'] < waste['random']/2


SMALL = dict(vocab_size=60, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, initializer_range=.2, pad_token_id=0)
FAMILIES = dict(bert=BertConfig(**SMALL), roberta=RobertaConfig(**SMALL), electra=ElectraConfig(embedding_size=16, **SMALL),
                distilbert=DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=64, initializer_range=.2, qa_dropout=0.),
                modernbert=ModernBertConfig(**SMALL, local_attention=4, global_attn_every_n_layers=2, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3))


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('name', ['tags', 'questions'])
def test_packed_is_padded_without_the_padding(tok, name, family):
    torch.manual_seed(0)
    packed, task = make(name, tok, loader='packed', max_tokens=128)
    learn = hf_learner(packed, FAMILIES[family], task, pretrained=False)
    model, bt, res = learn.model.eval(), packed.train.tokens, []
    idxs = packed.train.get_idxs().batches[0]
    encoded, y = bt.encode([packed.train_ds.texts[i] for i in idxs]), packed.train_ds.y
    for x in (bt.pad(encoded), bt.pack(encoded)):
        x, t = task.finish(x, None if y is None else y[torch.from_numpy(idxs)])
        model.zero_grad()
        pred = model(x)
        loss = learn.loss_func(pred, t)
        loss.backward()
        preds = torch.cat(by_text(x, pred)) if name == 'tags' else torch.stack(pred)
        res.append((preds.detach(), loss.item(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}))
    (a, la, ga), (b, lb, gb) = res
    assert len(idxs) > 3 and a.isfinite().all() and a[a > -1e30].std() > .02
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert la == pytest.approx(lb, rel=1e-5) and set(ga) == set(gb)
    assert max((ga[k] - gb[k]).abs().max()/gb[k].abs().max().clamp(min=1e-3) for k in ga) < 5e-4


def test_a_window_is_the_same_whoever_is_beside_it(tok):
    dls, task = make('questions', tok, loader='sorted')
    model, bt = hf_learner(dls, 'bert-tiny', task, pretrained=False).model.eval(), dls.train.tokens
    o = sorted(dls.train_ds.texts, key=lambda o: len(o['input_ids']))
    y = torch.tensor([[1, 2]])
    with torch.no_grad(): alone, among = (dls.train_ds.tokens.task.loss_func()([p[:1] for p in model(bt.pad(b))], y) for b in ([o[0]], [o[0], o[-1]]))
    assert len(o[0]['input_ids']) < len(o[-1]['input_ids'])
    torch.testing.assert_close(alone, among)


@pytest.mark.parametrize('loader', ['sorted', 'budget', 'packed'])
@pytest.mark.parametrize('name', ['tags', 'questions'])
def test_they_learn_predict_and_are_kept(tok, name, loader, tmp_path):
    from fastbench.text.learner import load_hf_learner
    dls, task = make(name, tok, loader=loader)
    torch.manual_seed(0)
    learn = hf_learner(dls, 'bert-tiny', task, pretrained=False)
    with learn.no_bar(), learn.no_logging():
        before = learn.validate(0)[0]
        learn.fit(3, 3e-3)
        assert learn.validate(0)[0] < before
    item = 'ba be fi' if name == 'tags' else ASKED[0][:2]
    assert load_hf_learner(learn.export(tmp_path/'o'), device='cpu').predict(item)[0] == learn.predict(item)[0]
    assert learn.task is task and hf_learner(dls, 'bert-tiny', task.name, pretrained=False).task is task


def test_entities_end_with_their_sentence():
    class Packed: pred, xb, yb = torch.eye(3)[torch.tensor([[1, 2, 2]])], (dict(cu_seq_lens=torch.tensor([0, 2, 3])),), (torch.tensor([[1, 2, 2]]),)
    f1 = EntityF1(['O', 'B-X', 'I-X'])
    f1.reset()
    f1.accumulate(Packed)
    assert (f1.right, f1.true) == (2, 2)


def test_what_cannot_be(tok):
    dls, task = make('tags', tok, loader='packed')
    with pytest.raises(UserError, match='DebertaV2ForTokenClassification computes attention in a way of its own.*works with every model') as e:
        hf_learner(dls, DebertaV2Config(**SMALL), task, pretrained=False)
    assert '\n' not in str(e.value)
    with pytest.raises(UserError, match='translation makes batches of whole examples'): task_dls(Translation(), [('ba', 'be')], [('ba', 'be')], tok, loader='sorted')
    with pytest.raises(UserError, match="did you mean 'sorted'"): make('tags', tok, loader='sortd')
    with pytest.raises(UserError, match='max_tokens=8 cannot be'): next(iter(make('questions', tok, loader='budget', max_tokens=8)[0].train))


# Shown

def test_tags_are_shown_word_by_word(tok):
    from tokenizers import decoders
    tok.backend_tokenizer.decoder = decoders.WordPiece()
    rows = [(['baae', 'zzz', 'be'], ['B-X', 'O', 'I-X']), (['ba'], ['O'])]
    task = TokenClassification(['O', 'B-X', 'I-X'])
    for loader in (None, 'sorted', 'packed'):
        dls = task_dls(task, rows, rows, tok, bs=2, max_length=16, device='cpu', loader=loader)
        learn = hf_learner(dls, 'bert-tiny', task, pretrained=False)
        df = dls.valid.show_batch(show=False)
        assert df.values.tolist() == [['baae <unk> be', 'B-X O I-X'], ['ba', 'O']], loader
        res = learn.show_results(show=False, shuffle=False)
        assert list(res.columns) == ['text', 'tags', 'prediction'] and [len(o.split()) for o in res.prediction] == [3, 1]
        dls.show_batch()
    assert list(dls.test_dl([['ba', 'be']]).show_batch(show=False).columns) == ['text']


def test_questions_are_shown_with_their_answers(tok):
    rows = [('be ba', 'bi bo bu ga', 'bo bu'), ('fa', 'ge', '')]
    for loader in (None, 'sorted', 'packed'):
        dls = task_dls(QuestionAnswering(stride=4), rows, rows, tok, bs=2, max_length=16, device='cpu', loader=loader)
        learn = hf_learner(dls, 'bert-tiny', 'question-answering', pretrained=False)
        want = [['be ba', 'bi bo bu ga', 'bo bu'], ['fa', 'ge', '']]
        assert dls.valid.show_batch(show=False).values.tolist() == want, loader
        b = dls.valid.one_batch()
        assert dls.valid.show_results(b, b[1], show=False).prediction.tolist() == ['bo bu', '']
        res = learn.show_results(show=False, shuffle=False)
        assert list(res.columns) == ['question', 'context', 'answer', 'prediction'] and len(res) == 2


@pytest.mark.parametrize('task', [Summarization(max_target=4), Translation(max_target=4)], ids=lambda o: o.name)
def test_what_is_written_is_shown(tok, task):
    rows = [('ba be bi', 'bi bo'), ('ba', 'be')]
    dls = task_dls(task, rows, rows, tok, bs=2, max_length=16, device='cpu')
    learn = hf_learner(dls, 't5-tiny', task, pretrained=False)
    assert dls.valid.show_batch(show=False).values.tolist() == [list(o) for o in rows]
    res = learn.show_results(show=False, shuffle=False)
    assert res.prediction.tolist() == [o[0] for o in learn.predict([o for o, _ in rows])] and '<' not in ''.join(res.values.ravel())


@pytest.mark.parametrize('task,model', [('causal-lm', 'gpt2-tiny'), ('masked-lm', 'bert-tiny')])
@pytest.mark.parametrize('loader', ['sorted', 'packed'])
def test_language_models_show_what_is_to_be_told(tok, task, model, loader):
    dls = hf_dls(['ba be bi bo', 'ga gu'], tok, label_col=None, valid=['ba be bi bo'], loader=loader, max_tokens=64, max_length=16, workers=0, device='cpu')
    learn = hf_learner(dls, model, task, pretrained=False)
    df = learn.show_results(show=False)
    assert list(df.columns) == ['text', 'target', 'prediction']
    if task == 'causal-lm': assert df.values.tolist()[0][:2] == ['ba be bi bo', 'ba be bi bo']
    else: assert len(df.target[0].split()) >= 1 and len(df.prediction[0].split()) <= len(df.target[0].split())

"Tags of words, language models, question answering, summaries: collating, faults, agreement with others' counts"
import math, random

import fastai.callback.schedule
import pytest
import torch

from fastbench.errors import UserError
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.lm import CausalLM, MaskedLM
from fastbench.text.qa import QuestionAnswering, answer_scores, best_span, qa_example
from fastbench.text.seq2seq import Seq2Seq, Summarization
from fastbench.text.task import find_task, task_dls, tasks
from fastbench.text.tokens import TokenClassification, entities

pytestmark = pytest.mark.usefixtures('no_hub')

WORDS = [f'{a}{b}' for a in 'bdfgklmn' for b in 'aeiou']


@pytest.fixture(scope='module')
def tok():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.WordPiece({o: i for i,o in enumerate('<pad> <unk> <s> </s> <mask> ##a ##e'.split() + WORDS)}, unk_token='<unk>'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.post_processor = processors.TemplateProcessing(single='<s> $A </s>', pair='<s> $A </s> $B </s>', special_tokens=[('<s>', 2), ('</s>', 3)])
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token='<pad>', unk_token='<unk>', bos_token='<s>', eos_token='</s>', mask_token='<mask>')


def small(dls, model, task):
    torch.manual_seed(0)
    return hf_learner(dls, model, task, pretrained=False)


TEXTS = [' '.join(random.Random(i).choices(WORDS, k=3+i%9)) for i in range(40)]


def test_all_tasks_are_known(): assert set(tasks) >= {'sequence-classification', 'token-classification', 'question-answering', 'causal-lm', 'masked-lm', 'summarization', 'translation'}


# Tags

def test_entities_are_counted_as_seqeval_counts():
    seqeval = pytest.importorskip('seqeval.metrics.sequence_labeling')
    rng = random.Random(0)
    for _ in range(300):
        tags = rng.choices('O B-X I-X B-Y I-Y'.split(), k=rng.randint(1, 8))
        assert {(k, a, b-1) for k,a,b in entities(tags)} == set(seqeval.get_entities(tags)), tags


def test_every_word_is_tagged_once_and_words_behind_the_end_are_none(tok):
    task = TokenClassification(['O', 'B-X'])
    words = ['baae', 'zzz', 'be']
    x, y = task.collate(tok, [(words, ['B-X', 'O', 'O']), (['ba'], ['O'])])
    assert (y != -100).sum(1).tolist() == [3, 1] and y[0,1] == 1 and y[0,2] == -100
    learn = small(task_dls(task, [(words, ['B-X', 'O', 'O'])]*4, [(words, ['O']*3)], tok, bs=2, max_length=8, device='cpu'), 'bert-tiny', task)
    with pytest.warns(UserWarning, match='12 words are behind'): got = learn.predict(' '.join(['ba']*18))
    assert len(got[0]) == 18 and got[0][6:] == [None]*12 and None not in got[0][:6]
    assert learn.predict('')[0] == []


def test_tags_that_cannot_be(tok):
    with pytest.raises(UserError, match='example 1 has 2 words and 1 tag:'): TokenClassification.of([(['a'], ['O']), (['a', 'b'], ['O'])])
    with pytest.raises(UserError, match="'B-Z' is none"): TokenClassification(['O', 'B-X']).collate(tok, [(['ba'], ['B-Z'])])
    with pytest.raises(UserError, match='one tag only'): TokenClassification(['O'])
    two = TokenClassification(['O', 'B-X'])
    with pytest.raises(UserError, match='example 0 has 2 words and 1 tag:'): two.collate(tok, [(['ba', 'be'], ['O'])])
    with pytest.raises(UserError, match='example 0 has None among its words'): two.collate(tok, [(['ba', None], ['O', 'O'])])
    assert len(two.collate(tok, [([], []), (['ba'], ['O'])])[1]) == 2
    with pytest.raises(UserError, match=r"takes a task that is made, such as QuestionAnswering\(\.\.\.\), not its name 'question-answering'"):
        task_dls('question-answering', [1], [1], tok)


# Language models

@pytest.mark.parametrize('model,task', [('gpt2-tiny', 'causal-lm'), ('roberta-tiny', 'masked-lm')])
@pytest.mark.parametrize('loader', ['sorted', 'packed'])
def test_language_models_learn_from_any_loader(tok, model, task, loader):
    learn = small(hf_dls([' '.join(['ba', 'be']*(2+i%6)) for i in range(40)], tok, label_col=None, loader=loader, max_tokens=128, max_length=32, workers=0, device='cpu'), model, task)
    with learn.no_bar(), learn.no_logging():
        before = learn.validate()[1]
        learn.fit(2, 3e-3)
        assert learn.validate()[1] < before and learn.validate() == learn.validate()
        assert math.isclose(math.log(before), math.log(len(tok)), rel_tol=.2)


def test_padded_and_packed_perplexity_are_the_same(tok):
    make = lambda loader: hf_dls(TEXTS, tok, label_col=None, loader=loader, max_tokens=128, max_length=32, workers=0, device='cpu')
    a = small(make('sorted'), 'gpt2-tiny', 'causal-lm')
    b = hf_learner(make('packed'), a.model.hf, 'causal-lm')
    with a.no_bar(), b.no_bar(): assert math.isclose(a.validate()[1], b.validate()[1], rel_tol=1e-4)


def test_left_padding_and_the_next_token():
    x = dict(input_ids=torch.tensor([[0, 0, 5, 6]]), attention_mask=torch.tensor([[0, 0, 1, 1]]))
    assert CausalLM().targets(x)[1].tolist() == [[-100, -100, 6, -100]]


def test_masks(tok):
    task, t = MaskedLM(), ' '.join(WORDS*9)
    x, y = task.collate(tok, [t])
    plain, told = tok(t, return_tensors='pt', truncation=True, max_length=512)['input_ids'], y != -100
    kept, masked = (x['input_ids'] == plain)[told].float().mean(), (x['input_ids'] == 4)[told].float().mean()
    assert .1 < told.float().mean() < .2 and masked > .6 and 0 < kept < .3 and (x['input_ids'] == plain)[~told].all()
    assert not (torch.isin(plain, torch.tensor([0, 2, 3]))[told]).any()
    assert (task.collate(tok, ['ba'])[1] != -100).sum() == 1  # a short text has one all the same
    with pytest.raises(UserError, match='between 0 and 1'): MaskedLM(share=1.)


def test_fill_in_wants_a_mask(tok):
    learn = small(hf_dls(TEXTS, tok, label_col=None, max_length=32, workers=0, device='cpu'), 'bert-tiny', 'masked-lm')
    assert len(learn.predict('ba <mask> be <mask>')[1]) == 2
    with pytest.raises(UserError, match='put <mask>'): learn.predict('ba be')


# Questions

def test_no_answer_is_lost_between_windows(tok):
    task, rng = QuestionAnswering(stride=6), random.Random(1)
    for _ in range(40):
        words = rng.choices(WORDS, k=rng.randint(1, 60))
        i = rng.randrange(len(words))
        answer = words[i:i+rng.randint(1, 3)]
        start = len(' '.join(words[:i]))+(i > 0)
        ex = dict(question='ba be', context=' '.join(words), answers=dict(text=[' '.join(answer)], answer_start=[start]))
        x, y = task.collate(tok, [ex], max_length=20)
        hits = [ex['context'][x['offsets'][k,a,0]:x['offsets'][k,b,1]] for k,(a,b) in enumerate(y.tolist()) if a]
        assert hits and all(o == ' '.join(answer) for o in hits)


def test_questions_that_cannot_be(tok):
    with pytest.raises(UserError, match='not in its context at character 1'): qa_example(dict(question='q', context='ba be', answers=dict(text=['ba'], answer_start=[1])))
    with pytest.raises(UserError, match='leaves no room'): QuestionAnswering().collate(tok, [(' '.join(WORDS), 'ba', 'ba')], max_length=20)
    x, y = QuestionAnswering().collate(tok, [('ba', '', ''), dict(question='ba', context='be', answers=dict(text=[], answer_start=[]))])
    assert y.tolist() == [[0, 0], [0, 0]]


def test_long_contexts_and_no_answer(tok):
    task = QuestionAnswering(stride=4, impossible=True)
    examples = [('ba', ' '.join(WORDS), 'be'), ('be', 'ba bi', '')]*4
    learn = small(task_dls(task, examples, examples[:2], tok, max_length=16, device='cpu'), 'bert-tiny', task)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    for text,at,_ in learn.predict([('ba', ' '.join(WORDS*5)), ('ba', '')]): assert text == (' '.join(WORDS*5)[at[0]:at[1]])
    assert answer_scores(['x'], ['']) == dict(exact=0., f1=0.)


# Summaries

@pytest.mark.parametrize('model,start', [('t5-tiny', 0), ('bart-tiny', 3)])
def test_the_decoder_begins_as_its_model_does(tok, model, start):
    task = Summarization(max_target=4)
    examples = [('ba be bi', 'bi bo'), ('ba', 'be')]
    learn = small(task_dls(task, examples*4, examples, tok, max_length=16, device='cpu'), model, task)
    x, y = learn.dls.one_batch()
    assert set(x['decoder_input_ids'][:,0].tolist()) == {start} and (y[:,-1] == -100).any()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    assert set(task.evaluate(learn, examples)) == {'rouge1', 'rouge2', 'rougeL'}


def test_a_missing_library_is_named(monkeypatch):
    import importlib
    def gone(name): raise ImportError(name)
    monkeypatch.setattr(importlib, 'import_module', gone)
    from fastbench.text.seq2seq import bleu
    with pytest.raises(UserError, match='pip install sacrebleu'): bleu(['a'], ['a'])
    with pytest.raises(UserError, match='unknown score'): Seq2Seq(score='meteor')


# Batches and data from which nothing can be learned

@pytest.mark.parametrize('task,model,odd', [('causal-lm', 'gpt2-tiny', 'ba'), ('masked-lm', 'bert-tiny', '')])
def test_a_batch_without_a_target_has_a_loss_of_zero(task, model, odd):
    from fastai.learner import Learner
    from test_text_data import make_tokenizer
    tok = make_tokenizer(specials=task == 'masked-lm')
    dls = hf_dls(TEXTS[:8] + [odd]*8, tok, valid=TEXTS[:3] + [odd]*3, label_col=None, loader='sorted', bs=4, max_length=40, workers=0, device='cpu')
    learn = small(dls, model, task)
    for o in (learn, Learner(dls, learn.model, loss_func=learn.loss_func)):
        with o.no_bar(), o.no_logging(): o.fit(1, 1e-3)
        assert all(map(math.isfinite, map(float, o.recorder.losses)))
        assert all(p.isfinite().all() for p in learn.model.parameters())
    loss = learn.loss_func(torch.randn(2, 3, 5, requires_grad=True), torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize('loader', [None, 'sorted'])
def test_questions_as_dicts_are_predicted_and_exported(tok, tmp_path, loader):
    rows = [dict(question='ba', context=o, answers=dict(text=[o.split()[0]], answer_start=[0])) for o in TEXTS[:8]]
    task = QuestionAnswering(stride=4)
    learn = small(task_dls(task, rows, rows[:4], tok, max_length=40, bs=4, device='cpu', loader=loader), 'bert-tiny', task)
    one, two = learn.predict(dict(question='ba', context=TEXTS[0])), learn.predict(('ba', TEXTS[0]))
    assert one[0] == two[0] and (learn.export(tmp_path/'out')/'config.json').is_file()


@pytest.mark.parametrize('label_col', ['label', None])
@pytest.mark.parametrize('task,model', [('question-answering', 'bert-tiny'), ('token-classification', 'bert-tiny'), ('translation', 't5-tiny'), (Summarization(), 't5-tiny')])
def test_texts_are_no_examples(tok, task, model, label_col):
    dls = hf_dls([(o, 'ab'[i % 2]) for i, o in enumerate(TEXTS)], tok, label_col=label_col, max_length=40, workers=0, device='cpu')
    with pytest.raises(UserError, match='make them with task_dls') as e: small(dls, model, task)
    assert '\n' not in str(e.value)


def test_data_of_another_task_are_refused(tok):
    tags = TokenClassification(['O', 'B-X'])
    dls = task_dls(tags, [(['ba'], ['O'])]*4, [(['be'], ['B-X'])], tok, device='cpu')
    with pytest.raises(UserError, match='are of the task token-classification'): small(dls, 'bert-tiny', 'question-answering')
    dls = hf_dls(TEXTS, tok, label_col=None, max_length=40, workers=0, device='cpu')
    small(dls, 'gpt2-tiny', 'causal-lm')
    with pytest.raises(UserError, match='are of the task causal-lm'): small(dls, 'bert-tiny', 'masked-lm')
    small(dls, 'gpt2-tiny', 'causal-lm')


@pytest.mark.parametrize('loader', [None, 'sorted'])
@pytest.mark.parametrize('task,model,row', [(QuestionAnswering(), 'bert-tiny', ('ba', 'be bi')), (TokenClassification(['O', 'B-X']), 'bert-tiny', ['ba', 'be']), (Summarization(), 't5-tiny', 'ba be')])
def test_examples_without_targets_teach_nothing(tok, task, model, row, loader):
    if loader and task.head == 'seq2seq': pytest.skip('whole examples only')
    dls = task_dls(task, [row]*4, [row]*2, tok, max_length=40, device='cpu', loader=loader)
    with pytest.raises(UserError, match='nothing can be learned from them') as e: small(dls, model, task)
    assert '\n' not in str(e.value)

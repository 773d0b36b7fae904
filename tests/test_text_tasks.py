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
from fastbench.text.examples import task_dls
from fastbench.text.classify import SequenceClassification
from fastbench.text.task import find_task, tasks
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


@pytest.mark.parametrize('task, example, model', [
    (TokenClassification(['O', 'B-X']), (['ba'], ['B-X']), 'bert-tiny'), (MaskedLM(), 'ba be bi', 'bert-tiny'), (CausalLM(), 'ba be bi', 'gpt2-tiny'),
    (QuestionAnswering(stride=4), ('be', 'ba be', 'be'), 'bert-tiny'), (Summarization(max_target=4), ('ba be', 'ba'), 't5-tiny'),
    (SequenceClassification(['a', 'b']), ('ba', 'b'), 'bert-tiny')], ids=lambda o: getattr(o, 'name', ''))
def test_the_task_is_that_of_the_data_unless_another_is_said(tok, task, example, model):
    dls = task_dls(task, [example]*4, [example]*2, tok, bs=2, max_length=16, device='cpu')
    learn = hf_learner(dls, model, pretrained=False)
    assert type(learn.task) is type(task) and learn.task.settings == task.settings
    for same in task.name, type(task): assert hf_learner(dls, model, same, pretrained=False).task.settings == task.settings
    if task.name != 'sequence-classification':
        with pytest.raises(UserError, match='has other targets'): hf_learner(dls, model, 'sequence-classification', pretrained=False)


def test_another_class_of_the_same_kind_is_made_with_the_settings_of_the_data(tok):
    dls = task_dls(Summarization(max_target=4), [('ba be', 'ba')]*4, [('ba be', 'ba')]*2, tok, bs=2, max_length=16, device='cpu')
    found = find_task('translation', dls)
    assert found.name == 'translation' and found.settings == dls.train.task.settings
    assert find_task('summarization', dls) is dls.train.task
    with pytest.raises(UserError, match='max_target=4, and the task has max_target=8'): find_task('summarization', dls, max_target=8)


def test_rows_of_the_hub_are_told_how_to_become_examples():
    with pytest.raises(UserError, match=r"words and as many tags; for each row: \(row\['tokens'\], \[names\[i\] for i in row\['ner_tags'\]\]\)$"): TokenClassification(['O', 'B-X']).check([dict(id='1', tokens=['ba'], ner_tags=[0])])
    with pytest.raises(UserError, match=r"example 0 is .*words and as many tags; for each row: \(row\['tokens'\], row\['tags'\]\)$"): TokenClassification.of([dict(tokens=['ba', 'be'], tags=['O', 'B-X'])]*2)
    with pytest.raises(UserError, match='example 1 has no tags: an example is'): TokenClassification.of([(['ba'], ['O']), 'ba be'])
    with pytest.raises(UserError, match=r"for it; for each row: \(row\['document'\], row\['summary'\]\)$"): Summarization().check([dict(document='ba be', summary='ba', id='x')])


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


@pytest.mark.parametrize('loader', [None, 'sorted'])
@pytest.mark.parametrize('names', [('O', 'B-X'), (3, 7)], ids=['names', 'numbers'])
def test_tags_in_arrays(tok, loader, names):
    "As pandas reads a column of lists from parquet; a sentence without words has an empty array"
    import numpy as np
    rows = [(['ba', 'be'], list(names)), ([], []), (['bi'], [names[1]])]
    arrays = [(np.array(w, object), np.array(t)) for w, t in rows]
    task = TokenClassification.of(arrays)
    assert task.settings == TokenClassification.of(rows).settings
    want, got = (task_dls(task, o, o, tok, bs=3, max_length=8, loader=loader, device='cpu').valid.one_batch() for o in (rows, arrays))
    assert torch.equal(want[1], got[1]) and torch.equal(want[0]['input_ids'], got[0]['input_ids']) and (got[1] != -100).sum() == 3
    assert type(task.vocab[0]) is type(names[0])
    with pytest.raises(UserError, match='is none of those for training'): task.collate(tok, [(np.array(['ba']), np.array(['B-Z']))])


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


@pytest.mark.parametrize('loader', [None, 'sorted'])
@pytest.mark.parametrize('bad,said', [(dict(context=None), 'example 2: its context is missing'), (dict(question=float('nan')), 'example 2: its question is nan'), (dict(answers=None), 'example 2 has no target'),
                                      (dict(answers=['bi']), r"example 2: its answer is \['bi'\], not a text"), (dict(answers=dict(text=['bi'], answer_start=['3'])), "example 2: its answer_start is '3', not a number")])
def test_a_question_that_cannot_be_is_named_with_its_field(tok, loader, bad, said):
    ok = dict(question='ba', context='ba bi bo', answers=dict(text=['bi'], answer_start=[3]))
    rows = [ok, ok, ok | bad, ok]
    with pytest.raises(UserError, match=f'valid: {said}') as e: task_dls(QuestionAnswering(), [ok]*4, rows, tok, max_length=24, device='cpu', loader=loader)
    assert '\n' not in str(e.value)
    lacking = {k: v for k, v in ok.items() if k not in bad}
    if 'answers' not in bad:
        with pytest.raises(UserError, match=f'example 1: its {list(bad)[0]} is missing'): task_dls(QuestionAnswering(), [ok, lacking], [ok], tok, device='cpu', loader=loader)


def test_labels_of_an_array_are_plain_ones(tok, tmp_path):
    "As `np.unique` gives them: those of NumPy cannot be exported"
    import numpy as np
    task = SequenceClassification(np.unique([1, 0, 1, 0]))
    assert task.vocab == [0, 1] and {type(o) for o in task.vocab} == {int}
    with pytest.raises(UserError, match='1 label'): SequenceClassification(np.unique([1]))
    rows = [('ba bi', 0), ('bo', 1)]*2
    learn = small(task_dls(task, rows, rows, tok, device='cpu', bs=2), 'bert-tiny', task)
    learn.export(tmp_path/'model')
    assert (tmp_path/'model').exists() and type(learn.predict('ba')[0]) is int


def test_questions_in_every_form_of_squad():
    import numpy as np
    for o in (dict(text=['bi'], answer_start=[3]), dict(text=np.array(['bi'], object), answer_start=np.array([3])), dict(text='bi', answer_start=3), dict(text=['bi']), 'bi'):
        assert qa_example(dict(question='ba', context='ba bi bo', answers=o)) == ('ba', 'ba bi bo', 'bi', 3)
    for o in (dict(text=[], answer_start=[]), dict(text=np.array([]), answer_start=np.array([]))): assert qa_example(dict(question='a', context='b', answers=o))[2:] == ('', -1)
    with pytest.raises(UserError, match='example 3 is None'): qa_example(None, 3)


def test_predicted_and_scored_questions_are_named_too(tok):
    ok = dict(question='ba', context='ba bi bo', answers=dict(text=['bi'], answer_start=[3]))
    task = QuestionAnswering(stride=4)
    learn = small(task_dls(task, [ok]*2, [ok], tok, max_length=24, device='cpu'), 'bert-tiny', task)
    with pytest.raises(UserError, match='example 1: its context is missing'): learn.predict([ok, dict(question='ba')])
    with pytest.raises(UserError, match='example 1 has no answer to compare with'): task.evaluate(learn, [ok, ('ba', 'bi')])


@pytest.mark.parametrize('task,rows', [(TokenClassification(['O', 'B-X']), [(['ba'], ['O']), (['ba'], None)]), (Summarization(), [('ba', 'be'), 'ba']), (Summarization(), [('ba', 'be'), ('ba', None)])])
def test_an_example_without_a_target_is_not_dropped_with_its_batch(tok, task, rows):
    with pytest.raises(UserError, match='train: example 1 has no target, and others have one') as e: task_dls(task, rows, rows[:1], tok, device='cpu')
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('task,row', [(TokenClassification(['O', 'B-X']), 3), (Summarization(), 3), (Summarization(), ('ba', 3)), (QuestionAnswering(), ('ba', 3, 'ba'))])
def test_an_example_that_cannot_be_is_one_line(tok, task, row):
    with pytest.raises(UserError, match='train: example 0') as e: task_dls(task, [row]*2, [row], tok, device='cpu')
    assert '\n' not in str(e.value)


def test_targets_fit_the_decoder(tok):
    from transformers import BartConfig
    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=24)
    rows = [('ba be', ' '.join(['ba']*40))]*4
    def make(n):
        task = Summarization(max_target=n)
        return small(task_dls(task, rows, rows, tok, max_length=24, bs=2, device='cpu'), config, task)
    with pytest.raises(UserError, match='max_target=64 cannot be: the decoder of BartForConditionalGeneration has positions for 24 tokens'): make(64)
    learn = make(24)
    assert learn.dls.valid.one_batch()[1].shape[1] == 24 and math.isfinite(learn.validate()[0]) and len(learn.predict('ba')[1]) <= 25
    with pytest.raises(UserError, match='alone adds 2 tokens'): make(2)
    for n in (0, 2.5, None):
        with pytest.raises(UserError, match=f'max_target={n} cannot be: a whole number'): make(n)


def test_an_encoder_with_more_positions_than_its_decoder(tok):
    from transformers import LEDConfig
    config = LEDConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
                       max_encoder_position_embeddings=64, max_decoder_position_embeddings=24, attention_window=8)
    rows, task = [(' '.join(['ba']*40), 'ba')]*4, Summarization(max_target=24)
    learn = small(task_dls(task, rows, rows, tok, max_length=64, bs=2, device='cpu'), config, task)
    assert learn.model.max_length == 64 and math.isfinite(learn.validate()[0])
    with pytest.raises(UserError, match='has positions for 64'): small(task_dls(task, rows, rows, tok, max_length=65, bs=2, device='cpu'), config, task)


def test_no_more_is_written_than_a_model_has_positions_for(tok):
    from transformers import BartConfig
    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=24)
    rows, task = [('ba be', 'ba')]*4, Summarization(max_target=8)
    learn = small(task_dls(task, rows, rows, tok, max_length=24, bs=2, device='cpu'), config, task)
    with learn.no_bar(), learn.no_logging():
        assert len(learn.predict('ba', max_new_tokens=24, min_new_tokens=24)[1]) == 25
        with pytest.raises(UserError, match='max_new_tokens=25 cannot be: BartForConditionalGeneration has positions for 24 tokens'): learn.predict('ba', max_new_tokens=25)


def test_a_long_text_is_continued_at_its_end(tok):
    from transformers import GPT2Config
    from transformers import GPT2Config
    dls = hf_dls(TEXTS, tok, label_col=None, max_length=12, workers=0, device='cpu')
    learn = small(dls, GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=24), CausalLM())
    text = ' '.join(['ba']*19 + ['do'])
    got, new, _ = learn.predict(text, n=5, eos_token_id=None)
    assert got.startswith(text) and len(new) == 5, 'the text is longer than those of the training'
    with pytest.raises(UserError, match='20 tokens, and with n=6 more it needs 25 positions: GPT2LMHeadModel has 24'): learn.predict(text, n=6)


# Settings of the data and of the task

def test_data_with_other_settings_than_the_tasks_are_refused(tok):
    "Targets are made by the task that the data have"
    dls = hf_dls(TEXTS, tok, label_col=None, max_length=40, workers=0, device='cpu')
    first = small(dls, 'bert-tiny', MaskedLM(.3))
    with pytest.raises(UserError, match='made with share=0.3, and the task has share=0.6: make others'): small(dls, 'bert-tiny', MaskedLM(.6))
    assert small(dls, 'bert-tiny', 'masked-lm').task is first.task and small(dls, 'bert-tiny', MaskedLM(.3)).task.share == .3
    made = MaskedLM(.4)
    assert small(task_dls(made, TEXTS, TEXTS[:9], tok, device='cpu'), 'bert-tiny', 'masked-lm').task is made


def test_names_in_another_order_are_refused(tok):
    dls = hf_dls([(o, 'ab'[i % 2]) for i, o in enumerate(TEXTS)], tok, max_length=40, workers=0, device='cpu')
    with pytest.raises(UserError, match=r"made with vocab=\['a', 'b'\], and the task has vocab=\['b', 'a'\]"): small(dls, 'bert-tiny', SequenceClassification(['b', 'a']))
    assert small(dls, 'bert-tiny', SequenceClassification(['a', 'b'])).task.vocab == ['a', 'b']
    rows = [(['ba'], ['O']), (['be'], ['B-X'])]
    dls = task_dls(TokenClassification(['O', 'B-X']), rows, rows, tok, device='cpu')
    with pytest.raises(UserError, match="the task has vocab="): small(dls, 'bert-tiny', TokenClassification(['B-X', 'O']))


# What can be predicted

def test_what_predict_takes(tok):
    import pandas as pd
    dls = hf_dls([(o, 'ab'[i % 2]) for i, o in enumerate(TEXTS)], tok, max_length=40, workers=0, device='cpu')
    learn = small(dls, 'bert-tiny', 'sequence-classification')
    with learn.no_bar(): want, got = learn.predict(TEXTS[:3]), learn.predict(o for o in TEXTS[:3])
    assert [o[0] for o in got] == [o[0] for o in want] and all(torch.allclose(a[2], b[2]) for a, b in zip(want, got))
    for o in ({'text': 'ba'}, {'ba'}, b'ba', 3, None):
        with pytest.raises(UserError, match='is not a text: give a text, a list'): learn.predict(o)
    lm = small(hf_dls(pd.DataFrame(dict(body=TEXTS)), tok, text_col='body', label_col=None, max_length=40, workers=0, device='cpu'), 'gpt2-tiny', 'causal-lm')
    got = lm.predict(pd.DataFrame(dict(n=[1, 2], body=TEXTS[:2])), n=2)
    assert [o[0] for o in got] == [o[0] for o in lm.predict(TEXTS[:2], n=2)]
    with pytest.raises(UserError, match="unknown column 'body'"): lm.predict(pd.DataFrame(dict(text=TEXTS[:2])))


def test_questions_of_a_table(tok):
    import pandas as pd
    rows = [dict(question='ba', context=o, answers=dict(text=[o.split()[0]], answer_start=[0])) for o in TEXTS[:4]]
    task = QuestionAnswering(stride=4)
    learn = small(task_dls(task, rows, rows, tok, max_length=40, bs=4, device='cpu'), 'bert-tiny', task)
    assert [o[0] for o in learn.predict(pd.DataFrame(rows))] == [o[0] for o in learn.predict(rows)] == [o[0] for o in learn.predict(iter(rows))]


@pytest.mark.parametrize('beams', [1, 3])
def test_log_probabilities_are_those_of_the_tokens(tok, beams):
    "Of several beams, those of the one that was chosen"
    from transformers import GPT2Config
    learn = small(hf_dls(TEXTS, tok, label_col=None, max_length=40, workers=0, device='cpu'), GPT2Config(n_embd=16, n_layer=1, n_head=2, initializer_range=.5), 'causal-lm')
    text, new, logs = learn.predict(TEXTS[1], n=5, num_beams=beams)
    ids = torch.tensor([*tok(TEXTS[1], add_special_tokens=False)['input_ids'], *new.tolist()])[None]
    with torch.no_grad(): want = learn.model.eval().hf(ids).logits[0].log_softmax(-1)[-len(new)-1:-1].gather(1, new[:, None])[:, 0]
    torch.testing.assert_close(logs, want, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_written(tok):
    dls = hf_dls(TEXTS, tok, label_col=None, max_length=12, workers=0, device='cpu')
    lm, masked = small(dls, 'gpt2-tiny', 'causal-lm'), small(hf_dls(TEXTS, tok, label_col=None, max_length=12, workers=0, device='cpu'), 'bert-tiny', 'masked-lm')
    task = Summarization(max_target=8)
    writer = small(task_dls(task, [('ba', 'be')]*4, [('ba', 'be')], tok, max_length=12, device='cpu'), 't5-tiny', task)
    for f, said in ((lambda: lm.predict(''), 'there is nothing to continue'), (lambda: lm.predict('ba', n=0), 'n=0 cannot be'), (lambda: lm.predict('ba', num_return_sequences=2, do_sample=True), 'num_return_sequences=2 cannot be'),
                    (lambda: writer.predict(['ba', 'be'], num_return_sequences=2, num_beams=2), 'num_return_sequences=2 cannot be'), (lambda: masked.predict('ba '*30 + '<mask>'), '<mask> is behind the 12 tokens')):
        with pytest.raises(UserError, match=said) as e: f()
        assert '\n' not in str(e.value)


def test_texts_that_fill_no_batch_train_nothing(tok):
    rows = [(o, 'ab'[i % 2]) for i, o in enumerate(TEXTS[:7])]
    for loader in ('sorted', 'random'):
        with pytest.raises(UserError, match='5 texts for training fill no batch of bs=16'): hf_dls(rows[:5], tok, valid=rows[5:], loader=loader, bs=16, drop_last=True, max_length=40, workers=0, device='cpu')
        assert len(hf_dls(rows[:5], tok, valid=rows[5:], loader=loader, bs=4, drop_last=True, max_length=40, workers=0, device='cpu').train) == 1


@pytest.mark.parametrize('loader', [None, 'sorted', 'random'])
def test_examples_that_fill_no_batch_train_nothing(tok, loader):
    examples = [(o.split(), ['O']*(len(o.split())-1) + ['X']) for o in ['a few words', 'and more of them']*4]
    def made(bs): return task_dls(TokenClassification(['O', 'X']), examples[:5], examples[5:], tok, bs=bs, loader=loader, drop_last=True, max_length=40, device='cpu')
    with pytest.raises(UserError, match='5 texts for training fill no batch of bs=16'): made(16)
    assert len(made(4).train) == 1


def test_no_loss_without_targets(tok):
    learn = small(hf_dls([(o, 'ab'[i % 2]) for i, o in enumerate(TEXTS)], tok, max_length=40, workers=0, device='cpu'), 'bert-tiny', 'sequence-classification')
    with learn.no_bar(), pytest.raises(UserError, match='no targets, so there is no loss'): learn.get_preds(dl=learn.dls.test_dl(TEXTS[:3]), with_loss=True)
    with learn.no_bar(): preds, targs, losses = learn.get_preds(with_loss=True)
    torch.testing.assert_close(losses, -preds.log().gather(1, targs[:, None])[:, 0], rtol=1e-3, atol=1e-4)


def test_metrics_that_count_padding_are_refused(tok):
    from fastai.metrics import accuracy, error_rate
    rows = [(['ba'], ['O']), (['be'], ['B-X'])]
    dls = task_dls(TokenClassification(['O', 'B-X']), rows, rows, tok, device='cpu')
    for o in (accuracy, [error_rate]):
        with pytest.raises(UserError, match='counts padding and other places without a target as wrong: take fastbench.text.task.TokenAccuracy'): hf_learner(dls, 'bert-tiny', 'token-classification', pretrained=False, metrics=o)
    texts = hf_dls([(o, 'ab'[i % 2]) for i, o in enumerate(TEXTS)], tok, max_length=40, workers=0, device='cpu')
    hf_learner(texts, 'bert-tiny', pretrained=False, metrics=accuracy)


def token_metrics():
    from functools import partial
    from fastai.learner import AvgMetric
    from fastai.metrics import AccumMetric, DiceMulti, F1Score, accuracy, error_rate, skm_to_fastai, top_k_accuracy
    from sklearn.metrics import f1_score
    return dict(partial=partial(accuracy, axis=-1), wrapped=AvgMetric(error_rate), both=AvgMetric(partial(accuracy, axis=-1)), top=partial(top_k_accuracy, k=1), f1=F1Score(average='macro'),
                sklearn=skm_to_fastai(f1_score, average='macro'), gathered=AccumMetric(accuracy, flatten=False), dice=DiceMulti(axis=-1))


@pytest.mark.parametrize('name', list(token_metrics()))
def test_metrics_in_wraps_count_padding_too(tok, name):
    rows = [(['ba'], ['O']), (['be'], ['B-X'])]
    dls = task_dls(TokenClassification(['O', 'B-X']), rows, rows, tok, device='cpu')
    with pytest.raises(UserError, match=r'counts padding and other places without a target as wrong: take .*leaves out targets of -100$') as e: hf_learner(dls, 'bert-tiny', pretrained=False, metrics=[token_metrics()[name]])
    assert '\n' not in str(e.value) and 'partial' not in str(e.value)
    learn = hf_learner(dls, 'bert-tiny', pretrained=False)
    before = list(learn.metrics)
    with pytest.raises(UserError, match='counts padding'): learn.metrics = [token_metrics()[name]]
    assert list(learn.metrics) == before


def test_metrics_that_know_padding_are_taken(tok):
    "What the error says to take has the number of sklearn over the words"
    from fastai.metrics import AccumMetric, Perplexity
    from sklearn.metrics import f1_score
    from fastbench.text.task import TokenAccuracy
    def f1(preds, targets): return f1_score(targets[keep := targets != -100], preds[keep], average='macro')
    rows = [(o.split(), ['B-X' if w[0] in 'bd' else 'O' for w in o.split()]) for o in TEXTS]
    task = TokenClassification(['O', 'B-X'])
    learn = small(task_dls(task, rows, rows, tok, max_length=40, bs=8, loader='sorted', device='cpu'), 'bert-tiny', None)
    again = hf_learner(learn.dls, learn.model, pretrained=True, metrics=[AccumMetric(f1, dim_argmax=-1), TokenAccuracy, Perplexity, *task.metrics(), lambda p, y: 0.])
    with again.no_bar(): got, (preds, targs) = again.validate(), again.get_preds()
    keep = targs != -100
    assert got[1] == pytest.approx(f1_score(targs[keep], preds.argmax(-1)[keep], average='macro'))

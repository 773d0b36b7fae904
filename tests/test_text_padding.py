"A tokenizer without a token to pad with: one place decides, says so once and leaves a note; real ends of texts are no padding"
import random, warnings

import fastai.callback.schedule  # noqa: F401
import pytest
import torch
from transformers import GPT2Config, RobertaConfig

from fastbench.errors import UserError
from fastbench.text.data import HFTextBlock, hf_dls
from fastbench.text.hf import hf_model
from fastbench.text.learner import hf_learner, load_hf_learner
from fastbench.text.lm import CausalLM
from fastbench.text.packed import fast_attention
from fastbench.text.examples import task_dls
from fastbench.text.tokenize import BatchTokenizer
from fastbench.text.tokens import TokenClassification
from test_text_data import WORDS

pytestmark = pytest.mark.usefixtures('no_hub')


@pytest.fixture
def tok():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.WordLevel({o: i for i, o in enumerate(['<unk>', '</s>', *WORDS])}, '<unk>'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.post_processor = processors.TemplateProcessing(single='$A </s>', pair='$A </s> $B </s>', special_tokens=[('</s>', 1)])
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token='<unk>', eos_token='</s>', name_or_path='toys/gpt')


rng = random.Random(0)
ROWS = [(' '.join(rng.choices(WORDS, k=rng.randint(1, 12))), 'ab'[i % 2]) for i in range(40)]


def said(f):
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter('always')
        res = f()
    return res, [str(o.message) for o in got if 'no token to pad' in str(o.message)]


@pytest.mark.parametrize('make', [lambda t: BatchTokenizer(t), lambda t: HFTextBlock(t), lambda t: hf_dls(ROWS, t, device='cpu'), lambda t: hf_model('gpt2-tiny', tokenizer=t, pretrained=False),
                                  lambda t: task_dls(TokenClassification(['O', 'X']), [(['ba'], ['O'])], [(['ba'], ['X'])], t, device='cpu')],
                         ids=['batch', 'block', 'dls', 'model', 'task'])
def test_it_is_said_wherever_the_tokenizer_comes_first(tok, make):
    _, got = said(lambda: (make(tok), make(tok)))
    assert len(got) == 1 and 'the tokenizer gpt has' in got[0] and "'</s>' stands in" in got[0] and 'set tokenizer.pad_token before' in got[0]


def test_it_is_noted_and_a_choice_of_ones_own_is_not(tok):
    with pytest.warns(UserWarning, match='no token to pad'): dls = hf_dls(ROWS, tok, device='cpu')
    assert dls.info['pad_fallback'] == '</s>' and hf_dls(ROWS, tok, device='cpu').info['pad_fallback'] == '</s>'
    tok.pad_token, tok.pad_fallback = '<unk>', None
    dls, got = said(lambda: hf_dls(ROWS, tok, device='cpu'))
    assert dls.info['pad_fallback'] is None and not got and dls.tokens.fill['input_ids'] == 0


def test_neither_end_nor_unknown(tok):
    tok.eos_token = tok.unk_token = None
    with pytest.raises(UserError, match='gpt has no token to pad with'): BatchTokenizer(tok)


def test_masks_and_targets_know_the_ends_of_texts(tok):
    with pytest.warns(UserWarning): bt = BatchTokenizer(tok)
    x = bt.pad(bt.encode(['ba', 'ba be bi']))
    assert x['input_ids'].tolist()[0][1:] == [1, 1, 1] and x['attention_mask'].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert CausalLM().targets(x)[1].tolist()[0] == [1, -100, -100, -100]
    assert CausalLM().collate(tok, ['ba', 'ba be bi'])[1].tolist()[0] == [1, -100, -100, -100]


SMALL = dict(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, initializer_range=.3)


@pytest.mark.parametrize('cfg', [GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=2, initializer_range=.3), RobertaConfig(**SMALL)], ids=lambda o: o.model_type)
def test_a_text_is_the_same_alone_padded_and_packed(tok, cfg):
    "The head of GPT-2 looks for the last token that is no padding; RoBERTa counts positions without padding"
    torch.manual_seed(0)
    with pytest.warns(UserWarning): m = hf_model(cfg, tokenizer=tok, pretrained=False, n_out=2).eval()
    bt = BatchTokenizer(tok)
    few = bt.encode(['ba be </s> bi', 'bo bu ba be bi bo', 'bu'])
    ids = [o['input_ids'].tolist() for o in few]
    assert ids[0].count(1) == 2
    with torch.no_grad():
        alone, padded = torch.cat([m(bt.pad([o])) for o in few]), m(bt.pad(few))
        body = [m.hf.base_model(input_ids=torch.tensor([o]), **({'position_ids': torch.arange(len(o))[None]+2} if cfg.model_type == 'roberta' else {}))[0] for o in ids]
        want = torch.cat([m.hf.score(o)[:, -1] if cfg.model_type == 'gpt2' else m.hf.classifier(o) for o in body])
        fast_attention(m.hf)
        packed = m(bt.pack(few))
    for got in (alone, padded, packed): torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_end_is_learned(tok):
    with pytest.warns(UserWarning): m = hf_model('roberta-tiny', tokenizer=tok, pretrained=False, n_out=2)
    bt = BatchTokenizer(tok)
    m(bt.pad(bt.encode(['ba', 'ba be bi']))).sum().backward()
    assert m.hf.get_input_embeddings().weight.grad[1].abs().sum() > 0


@pytest.mark.parametrize('model', ['bart-tiny', 't5-tiny'])
def test_a_head_that_counts_ends_wants_another_token_to_pad_with(tok, model):
    "BART's and T5's heads for classes read a text at its end token; those that write have no such head"
    with pytest.warns(UserWarning, match='no token to pad'): dls = hf_dls(ROWS, tok, bs=4, workers=0, device='cpu')
    with pytest.raises(UserError, match=r"reads a text at its end token, and this tokenizer pads with it \('</s>'\): .*tokenizer.add_special_tokens\(dict\(pad_token='<pad>'\)\)") as e: hf_learner(dls, model, pretrained=False)
    assert '\n' not in str(e.value)
    assert hf_model(model, 'seq2seq', tokenizer=tok, pretrained=False).pad_is_word
    tok.add_special_tokens(dict(pad_token='<pad>'))
    learn = hf_learner(hf_dls(ROWS, tok, bs=4, workers=0, device='cpu'), model, pretrained=False)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    tok.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match=r"end token, and this tokenizer adds none to a text \(token 1\): take the model's own tokenizer"): hf_learner(learn.dls, model, pretrained=False)


def test_an_exported_learner_knows_it_still(tok, tmp_path):
    texts = ['ba be', 'ba be bi bo bu']
    with pytest.warns(UserWarning): learn = hf_learner(hf_dls(ROWS, tok, max_length=32, device='cpu'), 'gpt2-tiny', pretrained=False)
    again, got = said(lambda: load_hf_learner(learn.export(tmp_path/'o'), device='cpu'))
    assert again.model.pad_is_word and not got
    for a, b in zip(learn.predict(texts), again.predict(texts)): torch.testing.assert_close(a[2], b[2])
    torch.testing.assert_close(again.predict(texts[0])[2], again.predict(texts)[0][2])


def test_a_run_tells_it(monkeypatch, tmp_path):
    "A recipe's tokenizer of GPT-2's kind has no token to pad with"
    from fastbench.bench.run import run_recipe
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path))
    run = run_recipe('docstrings-distilbert', device='cpu', offline=True, arch='gpt2-tiny', data='reviews', sample=.02, bs=8, batches=1, epochs=1, workers=0, max_length=32)
    assert run.status == 'ok' and run.data['pad_fallback'] == '<|endoftext|>' and sum('no token to pad' in o for o in run.warnings) == 1

"The side of the padding: the answer for a text does not depend on the other texts of its batch, or the model is refused."
import random

import pytest
import torch
from transformers import AutoConfig

from fastbench.errors import UserError
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner, load_hf_learner
from fastbench.text.examples import task_dls
from fastbench.text.tokenize import BatchTokenizer
from fastbench.text.tokens import TokenClassification
from test_text_data import WORDS

pytestmark = pytest.mark.usefixtures('no_hub')
SMALL = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, initializer_range=.3, num_labels=2)
FAMILIES = dict(
    gpt2=dict(vocab_size=60, n_embd=32, n_layer=2, n_head=2, initializer_range=.3), llama=SMALL | dict(num_key_value_heads=2), gemma=SMALL | dict(head_dim=16, num_key_value_heads=1),
    qwen2=SMALL | dict(num_key_value_heads=2), opt=dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=48, word_embed_proj_dim=32, init_std=.3),
    xlnet=dict(vocab_size=60, d_model=32, n_layer=2, n_head=2, d_inner=48, initializer_range=.3),
    bert=SMALL, roberta=SMALL, electra=SMALL | dict(embedding_size=32), distilbert=dict(vocab_size=60, dim=32, n_layers=2, n_heads=2, hidden_dim=48, initializer_range=.3),
    mpnet=SMALL, modernbert=SMALL | dict(global_attn_every_n_layers=1), **{'deberta-v2': SMALL | dict(relative_attention=True, position_biased_input=False, pos_att_type=['p2c', 'c2p'])})
WRONG = dict.fromkeys(['bert', 'roberta', 'electra', 'distilbert', 'mpnet', 'modernbert', 'deberta-v2'], 'left') | dict(xlnet='right')  # heads that read the first place, or the last

rng = random.Random(0)
ROWS = [(' '.join(rng.choices(WORDS, k=rng.randint(1, 12))), 'ab'[i % 2]) for i in range(40)]


@pytest.fixture
def tok():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.WordLevel({o: i for i, o in enumerate(['<unk>', '<pad>', *WORDS])}, '<unk>'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token='<unk>', pad_token='<pad>', name_or_path='toys/left')


def config(family): return AutoConfig.for_model(family, pad_token_id=1, **FAMILIES[family])


def alone_and_together(learn):
    m, bt = learn.model.eval(), learn.dls.tokens
    few = bt.encode(['ba be bi', 'bo bu ba be bi bo ba be', 'bu'])
    with torch.no_grad(): return [m(bt.pad([o])) for o in few], m(bt.pad(few))


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_text_is_the_same_alone_and_in_a_batch(tok, family, side):
    torch.manual_seed(0)
    tok.padding_side = side
    dls = hf_dls(ROWS, tok, device='cpu', bs=4, max_length=64)
    if side == WRONG.get(family):
        place, other = dict(left=('first', 'right'), right=('last', 'left'))[side]
        with pytest.raises(UserError, match=f"pads on the {side}.*reads the {place} place.*padding_side='{other}'"): hf_learner(dls, config(family), pretrained=False)
        return
    alone, got = alone_and_together(hf_learner(dls, config(family), pretrained=False))
    torch.testing.assert_close(torch.cat(alone), got, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('family', ['gpt2', 'bert', 'roberta', 'electra', 'distilbert'])
def test_a_head_on_each_token_needs_no_first_place(tok, family):
    torch.manual_seed(0)
    tok.padding_side = 'left'
    task = TokenClassification(['O', 'X'])
    rows = [(t.split(), ['X']*len(t.split())) for t, _ in ROWS]
    learn = hf_learner(task_dls(task, rows, rows, tok, device='cpu', bs=4, max_length=64), config(family), task, pretrained=False)
    few = [dict(input_ids=torch.arange(2, 2+n).numpy()) for n in (3, 8, 1)]
    bt, m = BatchTokenizer(tok), learn.model.eval()
    with torch.no_grad(): alone, got = [m(bt.pad([o])) for o in few], m(bt.pad(few))
    for a, b in zip(alone, got): torch.testing.assert_close(a[0], b[-a.shape[1]:], rtol=1e-4, atol=1e-5)


def test_an_exported_learner_pads_as_before(tok, tmp_path):
    tok.padding_side = 'left'
    learn = hf_learner(hf_dls(ROWS, tok, device='cpu', bs=4, max_length=64), config('gpt2'), pretrained=False)
    again = load_hf_learner(learn.export(tmp_path/'out'), device='cpu')
    assert again.dls.tokenizer.padding_side == 'left'
    alone, got = alone_and_together(again)
    torch.testing.assert_close(torch.cat(alone), got, rtol=1e-4, atol=1e-5)


PAIRS = dict(t5=dict(vocab_size=60, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, eos_token_id=2),
             bart=dict(vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=.3, eos_token_id=2))


@pytest.mark.parametrize('family,task,fits', [('t5', 'seq2seq', True), ('bart', 'seq2seq', False), ('t5', 'sequence-classification', False), ('bart', 'sequence-classification', False)])
def test_an_encoder_with_a_decoder_is_asked_too(family, task, fits):
    "BART counts the padding as places of the text, and the decoder of a classifier reads it; T5's encoder does not look at it"
    from fastbench.text.seq2seq import Seq2Seq
    from test_text_data import make_tokenizer
    for side in ('right', 'left'):
        tok = make_tokenizer(side=side)
        seq, few = Seq2Seq(max_target=8), [(o, o) for o, _ in ROWS]
        dls = task_dls(seq, few, few, tok, bs=4, max_length=40, device='cpu') if task == 'seq2seq' else hf_dls(ROWS, tok, device='cpu', bs=4, max_length=40)
        def make(): return hf_learner(dls, AutoConfig.for_model(family, pad_token_id=0, **PAIRS[family]), seq if task == 'seq2seq' else task, pretrained=False)
        if side == 'right' or fits: make()
        else:
            with pytest.raises(UserError, match="pads on the left.*counts the padding.*padding_side='right'"): make()


@pytest.mark.parametrize('side', ['right', 'left'])
def test_spans_depend_on_no_other_text_and_nobody_says_so(side):
    import warnings
    from fastbench.text.qa import QuestionAnswering
    from test_text_data import make_tokenizer
    task, rows = QuestionAnswering(stride=4), [('ba', o, o.split()[0]) for o, _ in ROWS]
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter('always')
        hf_learner(task_dls(task, rows, rows[:4], make_tokenizer(side=side), bs=4, max_length=40, device='cpu'), config('bert'), task, pretrained=False)
    assert not [str(o.message) for o in got if 'another answer' in str(o.message)]


def test_a_model_that_goes_through_the_padding_is_said_to_count_it(tok):
    "RWKV has no attention that could leave out what stands before a text, and its head answers for every place"
    tok.padding_side = 'left'
    c = AutoConfig.for_model('rwkv', vocab_size=60, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=64, pad_token_id=1)
    dls = hf_dls([t for t, _ in ROWS], tok, label_col=None, device='cpu', bs=4, max_length=64)
    with pytest.raises(UserError, match=r"pads on the left.*\(the padding counts as words before it\).*padding_side='right'"): hf_learner(dls, c, 'causal-lm', pretrained=False)

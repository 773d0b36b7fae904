"A mixture of experts: the loss of its router is part of the gradient, as transformers adds it, where the config asks for it"
import copy
from functools import partial

import pytest
import torch
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import SGD
from transformers import MixtralConfig, NllbMoeConfig, Qwen2MoeConfig

from fastbench.callback.amp import MixedPrecision
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.seq2seq import Summarization
from fastbench.text.examples import task_dls
from test_text_data import WORDS, make_tokenizer

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, router_aux_loss_coef=.5, attention_dropout=0.)
CONFIGS = dict(mixtral=lambda tok, **kw: MixtralConfig(vocab_size=len(tok), pad_token_id=tok.pad_token_id, num_local_experts=4, **SMALL, **kw),
               qwen2=lambda tok, **kw: Qwen2MoeConfig(vocab_size=len(tok), pad_token_id=tok.pad_token_id, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, **SMALL, **kw))


def make_texts(n): return [' '.join(WORDS[(7*i + j) % len(WORDS)] for j in range(3 + i*5 % 11)) for i in range(n)]


@pytest.fixture(scope='module')
def tok(): return make_tokenizer()


def learner(tok, kind, cbs=(), bs=8, **kw):
    torch.manual_seed(0)
    dls = hf_dls(make_texts(16), tok, label_col=None, loader='sorted', bs=bs, max_length=32, workers=0, device='cpu')
    return hf_learner(dls, CONFIGS[kind](tok, **kw), 'causal-lm', pretrained=False, opt_func=partial(SGD, mom=0.), cbs=cbs)


def stepped(learn, x, y, lr=.1):
    learn.dls.train.__class__ = type('Same', (type(learn.dls.train),), dict(__iter__=lambda self: iter([(x, y)]), __len__=lambda self: 1))
    with learn.no_bar(), learn.no_logging(): learn.fit(1, lr, wd=0.)
    return learn


@pytest.mark.parametrize('asked', [True, False])
@pytest.mark.parametrize('kind', CONFIGS)
def test_a_step_is_that_of_transformers(tok, kind, asked):
    learn = learner(tok, kind, output_router_logits=asked)
    x, y = learn.dls.train.one_batch()
    own = copy.deepcopy(learn.model.hf).train()
    labels = x['input_ids'].masked_fill(x['attention_mask'] == 0, -100)
    out = own(input_ids=x['input_ids'], attention_mask=x['attention_mask'], labels=labels)
    out.loss.backward()
    stepped(learn, x, y)
    for (k, p), q in zip(own.named_parameters(), learn.model.hf.parameters()): torch.testing.assert_close(q, p - .1*p.grad, atol=2e-6, rtol=1e-4, msg=k)
    if asked: assert out.aux_loss > 1
    shown = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert learn.recorder.losses[-1].item() == pytest.approx(shown.item(), rel=1e-4), 'the loss shown is that of the words, as in validation'


def test_without_it_the_step_would_be_another(tok):
    a, b = (learner(tok, 'mixtral', output_router_logits=o) for o in (True, False))
    x, y = a.dls.train.one_batch()
    a, b = stepped(a, x, y), stepped(b, x, y)
    apart = max((p - q).abs().max().item() for (k, p), q in zip(a.model.named_parameters(), b.model.parameters()) if 'gate.' in k)
    assert apart > 1e-4


def test_beside_mixed_precision_and_accumulation(tok):
    learn = learner(tok, 'mixtral', [MixedPrecision('bf16', allow_emulation=True), GradientAccumulation(8)], bs=4, output_router_logits=True)
    with learn.no_bar(), learn.no_logging(): learn.fit(2, .01)
    assert torch.isfinite(learn.recorder.losses[-1]) and not hasattr(learn.model, 'router_loss')


def test_nothing_is_kept_after_predictions(tok):
    learn = learner(tok, 'mixtral', output_router_logits=True)
    with learn.no_bar(): learn.get_preds()
    assert not getattr(learn.model, 'router_loss', None)


def test_a_model_that_gives_no_such_loss_is_named(tok):
    rows = [(t, ' '.join(t.split()[:2])) for t in make_texts(16)]
    task = Summarization(max_target=8)
    dls = task_dls(task, rows[:12], rows[12:], tok, bs=4, max_length=24, device='cpu')
    c = NllbMoeConfig(vocab_size=len(tok), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_experts=2,
                      encoder_sparse_step=2, decoder_sparse_step=2, pad_token_id=tok.pad_token_id, decoder_start_token_id=2, eos_token_id=3, expert_capacity=16, output_router_logits=True)
    learn = hf_learner(dls, c, task, pretrained=False, opt_func=SGD)
    with pytest.warns(UserWarning, match="NllbMoeForConditionalGeneration.*gives no loss of its router"), learn.no_bar(), learn.no_logging(): learn.fit(1, .01)

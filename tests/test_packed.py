"Packed batches: the same logits and gradients as padded ones, for every family, and a refusal where that cannot be"
import pickle

import pytest
import torch
from torch import nn
from transformers import (AlbertConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, BertConfig,
                          DebertaV2Config, DistilBertConfig, ElectraConfig, GPT2Config, LlamaConfig, MistralConfig, MobileBertConfig, ModernBertConfig, Qwen2Config,
                          RobertaConfig, T5Config, XLMRobertaConfig, XLNetConfig)

from fastbench.errors import UserError
from fastbench.text.check import check_packed
from fastbench.text.hf import HFModel
from fastbench.text.kernels import _by_text, _dense
from fastbench.text.packed import Bounds, fast_attention, packed_call

N = [5, 2, 9, 1, 7]
SMALL = dict(vocab_size=60, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, initializer_range=.2, pad_token_id=0)
LLAMA = SMALL | dict(num_key_value_heads=2, max_position_embeddings=64)
FAMILIES = dict(
    bert=BertConfig(**SMALL), roberta=RobertaConfig(**(SMALL | dict(pad_token_id=1, max_position_embeddings=40, type_vocab_size=1))),
    xlm=XLMRobertaConfig(**(SMALL | dict(pad_token_id=1, max_position_embeddings=40))),
    distilbert=DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=64, initializer_range=.2), electra=ElectraConfig(embedding_size=16, **SMALL),
    modernbert=ModernBertConfig(**SMALL, local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    modernbert_mean=ModernBertConfig(**SMALL, local_attention=4, classifier_pooling='mean', cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    albert=AlbertConfig(embedding_size=16, classifier_dropout_prob=0., **SMALL), mobilebert=MobileBertConfig(embedding_size=16, intra_bottleneck_size=32, num_feedforward_networks=2, **SMALL),
    gpt2=GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, initializer_range=.2, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    llama=LlamaConfig(**LLAMA), qwen2=Qwen2Config(**LLAMA), mistral=MistralConfig(**LLAMA, sliding_window=4))


def build(name, auto=AutoModelForSequenceClassification, dropout='weights', **kwargs):
    torch.manual_seed(0)
    cfg = FAMILIES[name]
    for k, v in kwargs.items(): setattr(cfg, k, v)
    cfg.num_labels = 3
    return fast_attention(auto.from_config(cfg), dropout).eval()


def batches(pad, types=False):
    torch.manual_seed(1)
    rows = torch.randint(5, 60, (sum(N),)).split(N)
    x = dict(input_ids=torch.cat(rows)[None], position_ids=torch.cat([torch.arange(o) for o in N])[None], cu_seq_lens=torch.tensor([0, *N]).cumsum(0).int())
    p = dict(input_ids=nn.utils.rnn.pad_sequence(rows, True, pad), attention_mask=nn.utils.rnn.pad_sequence([torch.ones_like(o) for o in rows], True))
    if types:
        t = [(torch.arange(len(o)) > len(o)//2).long() for o in rows]
        x['token_type_ids'], p['token_type_ids'] = torch.cat(t)[None], nn.utils.rnn.pad_sequence(t, True)
    return x, p


def grads(model, out):
    model.zero_grad()
    out.square().sum().backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


AVX512 = torch.backends.cpu.get_cpu_capability().startswith('AVX512')


def close(a, b, tol=1e-9):
    "In float64, where rounding, which differs from processor to processor, is far below `tol`"
    assert set(a) == set(b)
    worst = max((a[k] - b[k]).abs().max()/b[k].abs().max().clamp(min=1e-3) for k in a)
    assert worst < tol, worst


@pytest.mark.parametrize('name', FAMILIES)
def test_classification_is_that_of_a_padded_batch(name):
    model = build(name).double()
    x, p = batches(model.config.pad_token_id, types=name in ('bert', 'electra'))
    want, got = model(**p).logits, packed_call(model, x).logits
    assert want.std() > .02, 'logits that are all alike would show nothing'
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    close(grads(model, packed_call(model, x).logits), grads(model, model(**p).logits))
    assert check_packed(model) is model


@pytest.mark.parametrize('name', [o for o in FAMILIES if o not in ('gpt2', 'llama', 'qwen2', 'mistral')])
def test_masked_language_model_stays_packed(name):
    model = build(name, AutoModelForMaskedLM)
    x, p = batches(model.config.pad_token_id)
    want = model(**p).logits[p['attention_mask'].bool()]
    got = packed_call(model, x, per_token=True).logits
    assert got.shape[:2] == (1, sum(N))
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-4)
    check_packed(model, per_token=True)


@pytest.mark.parametrize('name', ['gpt2', 'llama', 'mistral'])
def test_causal_language_model_stays_packed(name):
    model = build(name, AutoModelForCausalLM)
    x, p = batches(0)
    torch.testing.assert_close(packed_call(model, x, per_token=True).logits[0], model(**p).logits[p['attention_mask'].bool()], rtol=1e-4, atol=1e-4)
    check_packed(model, per_token=True)


def test_tags_of_words_stay_packed():
    model = build('bert', AutoModelForTokenClassification)
    x, p = batches(0)
    torch.testing.assert_close(packed_call(model, x, per_token=True).logits[0], model(**p).logits[p['attention_mask'].bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', ['bert', 'roberta', 'distilbert', 'electra', 'modernbert', 'gpt2'])
def test_bf16(name):
    model = build(name)
    x, p = batches(model.config.pad_token_id)
    with torch.autocast('cpu', torch.bfloat16): a, b = packed_call(model, x).logits, model(**p).logits
    assert (a - b).abs().max() < .05*b.abs().max()


@pytest.mark.parametrize('impl', ['eager', 'sdpa', 'flex_attention'])
@pytest.mark.parametrize('name', ['bert', 'roberta', 'distilbert', 'electra', 'gpt2', 'llama'])
def test_attention_of_transformers_own(name, impl):
    model = build(name)
    x, p = batches(model.config.pad_token_id)
    want = model(**p).logits
    try: model.set_attn_implementation(impl)
    except (ValueError, ImportError) as e: pytest.skip(f'{name} has no {impl}: {str(e)[:60]}')
    try: check_packed(model)
    except UserError as e:
        if impl != 'flex_attention' or AVX512: raise
        assert 'wrong on a CPU without AVX-512' in str(e)
        return
    with torch.no_grad(): got = packed_call(model, x).logits
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_an_attention_that_is_wrong_at_some_lengths(monkeypatch):
    model = build('bert')
    model.set_attn_implementation('sdpa')
    sdpa = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(nn.functional, 'scaled_dot_product_attention', lambda q, *args, **kw: sdpa(q, *args, **kw)*(2 if q.shape[-2] == 24 else 1))
    with pytest.raises(UserError, match='other results for packed batches'): check_packed(model)


@pytest.mark.parametrize('name', ['modernbert', 'mistral'])
def test_a_window_is_not_lost(name):
    model = build(name)
    model.set_attn_implementation('sdpa')
    with pytest.raises(UserError, match="leave attn out, or take attn='fastbench'"): check_packed(model)


@pytest.mark.parametrize('name', ['bert', 'modernbert', 'gpt2', 'mistral'])
def test_dense_mask_and_text_by_text_agree(name, monkeypatch):
    "What a GPU without varlen uses computes the same"
    model = build(name)
    x, _ = batches(model.config.pad_token_id)
    a = packed_call(model, x).logits
    monkeypatch.setattr('fastbench.text.kernels.kernel_for', lambda *args: 'dense')
    torch.testing.assert_close(packed_call(model, x).logits, a, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_sees_the_boundaries():
    model = build('bert').double().train()
    for m in model.modules():
        if isinstance(m, nn.Dropout): m.p = 0.
    x, _ = batches(0)
    want = grads(model, packed_call(model, x).logits)
    model.gradient_checkpointing_enable()
    close(grads(model, packed_call(model, x).logits), want)


def test_dropout_of_values_only_in_training():
    model = build('distilbert', dropout='values')
    x, p = batches(0)
    a = packed_call(model, x).logits
    torch.testing.assert_close(a, packed_call(model, x).logits)
    torch.testing.assert_close(a, model(**p).logits, rtol=1e-4, atol=1e-5)
    model.train()
    for m in model.modules():
        if isinstance(m, nn.Dropout) and m is not model.distilbert.transformer.layer[0].attention.dropout: m.p = 0.
    torch.manual_seed(0)
    b = packed_call(model, x).logits
    assert not torch.equal(b, packed_call(model, x).logits) and not torch.equal(a, b)


@pytest.mark.parametrize('cfg', [DebertaV2Config(**SMALL), XLNetConfig(vocab_size=60, d_model=32, n_layer=2, n_head=4, d_inner=64), T5Config(vocab_size=60, d_model=32, num_layers=2)], ids=lambda o: o.model_type)
def test_a_model_with_attention_of_its_own_is_refused(cfg):
    model = AutoModelForSequenceClassification.from_config(cfg)
    with pytest.raises(UserError, match="loader='budget' or 'sorted' works"): check_packed(fast_attention(model))


def test_a_model_that_keeps_to_its_attention_is_refused(monkeypatch):
    "As ModernBERT of transformers before 5.7, which only logs a warning"
    model = AutoModelForSequenceClassification.from_config(BertConfig(**SMALL))
    monkeypatch.setattr(type(model), 'set_attn_implementation', lambda self, name: None)
    with pytest.raises(UserError, match="computes attention in a way of its own.*loader='budget' or 'sorted' works"): fast_attention(model)


def test_a_model_that_comes_from_another_process_finds_its_attention(monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    model = HFModel(build('bert'))
    x, parcel = batches(0)[0], pickle.dumps(model)
    for o in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS): monkeypatch.delitem(o._global_mapping, 'fastbench')
    assert torch.equal(pickle.loads(parcel)(x), model(x))


def test_wrong_results_are_found():
    model = build('bert')
    model.bert.embeddings.register_forward_hook(lambda m, args, out: out + out.mean(1, keepdim=True))  # looks across texts
    with pytest.raises(UserError, match='gives other results for packed batches'): check_packed(model)


def test_after_an_error_nothing_is_left():
    model = build('bert')
    x, p = batches(0)
    want = model(**p).logits
    hooks = lambda: [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    n = hooks()
    handle = model.classifier.register_forward_pre_hook(lambda *args: 1/0)
    with pytest.raises(ZeroDivisionError): packed_call(model, x)
    handle.remove()
    assert hooks() == n
    torch.testing.assert_close(model(**p).logits, want)


def test_other_batches_go_through_as_before():
    model = build('bert')
    _, p = batches(0)
    want = model(**p).logits
    model.set_attn_implementation('sdpa')
    torch.testing.assert_close(model(**p).logits, want)


def test_bounds():
    b = Bounds(torch.tensor([0, 2, 3], dtype=torch.int32), 2)
    assert b.n == [2, 1] and b.text.tolist() == [0, 0, 1] and b.place.tolist() == [0, 1, 2]
    x = torch.arange(6.).view(1, 3, 2).requires_grad_()
    out = b.pad(x, -1.)
    assert out.tolist() == [[[0, 1], [2, 3]], [[4, 5], [-1, -1]]]
    out.sum().backward()
    assert x.grad.tolist() == [[[1, 1]]*3]
    q = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(_by_text(q, q, q, b, True, None), _dense(q, q, q, b, True, None))


def test_hidden_words_of_one_text_do_not_scale_another():
    "ESM scales a text's embeddings by its own share of hidden words"
    from transformers import EsmConfig
    torch.manual_seed(0)
    cfg = EsmConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, pad_token_id=0, mask_token_id=4, token_dropout=True, initializer_range=.3)
    model = fast_attention(AutoModelForMaskedLM.from_config(cfg)).eval()
    x, p = batches(0)
    x['input_ids'][0, :2], p['input_ids'][0, :2] = 4, 4
    real = p['attention_mask'].bool()
    torch.testing.assert_close(packed_call(model, x, per_token=True).logits[0], model(**p).logits[real], rtol=1e-4, atol=1e-4)

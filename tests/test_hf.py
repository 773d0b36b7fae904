"Building transformers models and cutting them into groups: every family, faults, no network"
import json, warnings

import pytest
import torch
from torch import nn

from fastbench.machine.download import DataUnavailable
from fastbench.errors import UserError
from fastbench.text import hf as H
from fastbench.text.hf import HFModel, find_model, hf_config, hf_configs, hf_model, n_params
from fastbench.text.classify import SequenceClassification
from fastbench.text.task import find_task
from fastbench.text.splitter import hf_splitter, layer_decay, layer_groups

TINY = [o for o in hf_configs if o.endswith('-tiny')]


def one_line(e): s = str(e.value); assert '\n' not in s and len(s) < 900; return s


@pytest.fixture(scope='module')
def tok():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    def make(pad=True):
        words = '<s> <pad> </s> <unk> <mask> a b c d e f'.split()
        t = Tokenizer(models.WordLevel({o: i for i,o in enumerate(words)}, '<unk>'))
        t.pre_tokenizer = pre_tokenizers.Whitespace()
        t.post_processor = processors.TemplateProcessing(single='<s> $A </s>', special_tokens=[('<s>', 0), ('</s>', 2)])
        return PreTrainedTokenizerFast(tokenizer_object=t, bos_token='<s>', eos_token='</s>', unk_token='<unk>', mask_token='<mask>',
                                       **(dict(pad_token='<pad>') if pad else {}))
    return make


S = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48)
P, ENC = dict(pad_token_id=0), dict(d_model=32, encoder_layers=3, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48)
T5 = dict(d_model=32, d_kv=16, d_ff=48, num_layers=3, num_heads=2)
# kind: its config, and how many groups `layer_groups` makes
KINDS = {
    'bert': (S, 5), 'roberta': (S, 5), 'electra': (S|dict(embedding_size=16), 5), 'albert': (S|dict(embedding_size=16), 3), 'mpnet': (S, 5),
    'distilbert': (dict(dim=32, n_layers=3, n_heads=2, hidden_dim=48), 5), 'gpt2': (P|dict(n_embd=32, n_layer=3, n_head=2), 5),
    'modernbert': (S|P|dict(bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2), 5), 't5': (T5, 8), 'mt5': (T5, 8), 'bart': (ENC, 7),
    'xlnet': (dict(d_model=32, n_layer=3, n_head=2, d_inner=48), 5),
    'funnel': (dict(block_sizes=[2,2], num_decoder_layers=1, d_model=32, n_head=2, d_head=16, d_inner=48), 6),
    'llama': (S|P, 5), 'qwen2': (S|P, 5), 'qwen3': (S|P|dict(head_dim=16), 5), 'mistral': (S|P|dict(num_key_value_heads=1), 5),
    'gemma': (S|dict(num_key_value_heads=1, head_dim=16), 5), 'bloom': (P|dict(hidden_size=32, n_layer=3, n_head=2), 5),
    'opt': (dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, ffn_dim=48, word_embed_proj_dim=16), 5),
    'longformer': (S|dict(attention_window=8), 5), 'camembert': (S, 5), 'xlm-roberta': (S, 5), 'nystromformer': (S, 5),
    'deberta-v2': (S|dict(relative_attention=True, pos_att_type=['p2c', 'c2p']), 5), 'big_bird': (S, 5),
    'gpt_neo': (P|dict(hidden_size=32, num_layers=2, attention_types=[[['global', 'local'], 1]], num_heads=2), 4), 'gpt_neox': (S|P, 5),
    'xlm': (dict(n_words=100, emb_dim=32, n_layers=2, n_heads=2), 4), 'convbert': (S|dict(embedding_size=16), 5), 'squeezebert': (S|dict(embedding_size=32), 5),
    'roformer': (S, 5), 'mobilebert': (S|dict(embedding_size=16, intra_bottleneck_size=16), 5), 'fnet': (S, 5), 'esm': (S|dict(pad_token_id=1, mask_token_id=3), 5)}

pytestmark = pytest.mark.usefixtures('no_hub')


@pytest.mark.parametrize('kind', KINDS)
def test_every_parameter_is_in_one_group_and_the_head_is_the_heads(kind):
    from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification
    config, n = KINDS[kind]
    with torch.device('meta'): hf = AutoModelForSequenceClassification.from_config(CONFIG_MAPPING[kind](vocab_size=100, **config))
    model = HFModel(hf)
    three, many = hf_splitter(model), layer_groups(hf)
    assert len(three) == 3 and len(many) == n
    everything = sorted(id(p) for p in hf.parameters())
    for groups in three, many: assert sorted(id(p) for g in groups for p in g) == everything and all(len(g) for g in groups)
    name, base = {id(p): k for k,p in hf.named_parameters()}, {id(p) for p in hf.base_model.parameters()}
    assert all('pool' in name[id(p)] for p in three[2] if id(p) in base) and three[2][-1] is list(hf.parameters())[-1] or kind in ('camembert', 'xlm-roberta')
    assert {id(p) for p in hf.parameters()} - base <= {id(p) for p in three[2]}
    assert all('pool' not in k for k in (name[id(p)] for g in (*three[:2], *many[:-1]) for p in g))
    blocks = [k for g in many[1:-1] for k in {name[id(p)].split('embed')[0] for p in g}]
    assert not any('word_embeddings' in name[id(p)] for p in three[1] + three[2]), blocks


@pytest.mark.parametrize('auto,kind', [('CausalLM', 'gpt2'), ('CausalLM', 'llama'), ('MaskedLM', 'bert'), ('Seq2SeqLM', 't5'), ('Seq2SeqLM', 'bart'), ('QuestionAnswering', 'roberta'),
                                       ('TokenClassification', 'electra')])
def test_other_heads_are_never_empty(auto, kind):
    import transformers
    with torch.device('meta'): hf = getattr(transformers, 'AutoModelFor'+auto).from_config(transformers.CONFIG_MAPPING[kind](vocab_size=100, **KINDS[kind][0]))
    hf.tie_weights()
    groups = layer_groups(hf)
    assert len(groups[-1]) and len(groups[0]) and sorted(id(p) for g in groups for p in g) == sorted(id(p) for p in hf.parameters())


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError) as e: hf_splitter(nn.Sequential(nn.Linear(2, 2)))
    assert 'no stack of blocks' in one_line(e)


def test_layer_decay_wants_a_learner_with_a_group_a_layer():
    from fastai.learner import Learner
    learn = Learner([], hf_model('bert-tiny', pretrained=False), loss_func=nn.CrossEntropyLoss(), splitter=hf_splitter)
    with pytest.raises(UserError, match='splitter=layer_groups'): layer_decay(learn, 1e-4)
    with pytest.raises(UserError, match='above 0 to 1'): layer_decay(learn.model, 1e-4, 0)


@pytest.mark.parametrize('name', TINY)
def test_tiny_models_train_and_padding_is_not_seen(name, tok):
    t = tok()
    model = hf_model(name, n_out=2, tokenizer=t, pretrained=False)
    x = t(['a b c d', 'e'], padding=True, return_tensors='pt').data
    model.train()(x | dict(token_type_ids=x['input_ids']*0+1)).sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    with torch.no_grad(): assert torch.allclose(model.eval()(x)[1], model({k: v[1:,:3] for k,v in x.items()})[0], atol=1e-5)


def test_padding_ids_far_from_the_start_leave_roberta_its_positions(tok):
    t = tok()
    t.pad_token = 'f'  # the last word
    model = hf_model('roberta-tiny', tokenizer=t, pretrained=False)
    assert model.max_length == 512 and model({'input_ids': torch.zeros(1, 512, dtype=torch.long)}).shape == (1,2)
    with pytest.raises(UserError, match='max_length=512'): model({'input_ids': torch.zeros(1, 513, dtype=torch.long)})


def test_the_published_size_stays_with_a_small_tokenizer(tok):
    assert hf_config('roberta-base', tok()).vocab_size == 50265 and hf_config('roberta-tiny', tok()).vocab_size == 11


def test_no_padding_token_is_said_once(tok):
    t = tok(pad=False)
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter('always')
        a, b = (hf_model('gpt2-tiny', tokenizer=t, pretrained=False) for _ in range(2))
    assert a.config.pad_token_id == 2 and sum('no token to pad' in str(o.message) for o in got) == 1


def test_counting_leaves_the_seed_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    n_params(hf_config('bert-tiny'))
    assert before.equal(torch.get_rng_state())


# Folders

@pytest.fixture
def folder(tmp_path, tok):
    hf_model('bert-tiny', n_out=3, tokenizer=tok(), pretrained=False).hf.save_pretrained(tmp_path)
    return tmp_path


def test_pickled_weights_are_refused_by_name(folder):
    (folder/'model.safetensors').rename(folder/'pytorch_model.bin')
    with pytest.raises(DataUnavailable) as e: hf_model(folder)
    assert 'only pytorch_model.bin' in one_line(e) and str(folder) in one_line(e)


@pytest.mark.parametrize('file,what', [('model.safetensors', b'\x08'), ('model.safetensors', b'x'*500), ('config.json', b'{"model_type": "bert"'), ('config.json', b'{}'),
                                       ('config.json', b'{"model_type": "no-such"}')])
def test_a_damaged_folder_is_one_line(folder, file, what):
    (folder/file).write_bytes(what)
    with pytest.raises(DataUnavailable) as e: hf_model(folder)
    assert str(folder) in one_line(e)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(DataUnavailable) as e: hf_model(tmp_path)
    assert 'no config.json' in one_line(e)


def test_code_in_a_folder_is_not_run(folder):
    c = json.loads((folder/'config.json').read_text()) | dict(auto_map={'AutoConfig': 'evil.C', 'AutoModelForSequenceClassification': 'evil.M'}, model_type='evil')
    (folder/'config.json').write_text(json.dumps(c))
    (folder/'evil.py').write_text(f'open({str(folder/"ran")!r}, "w")\n')
    with pytest.raises(UserError) as e: hf_model(folder)
    one_line(e)
    assert not (folder/'ran').exists()


def test_weights_of_another_model_are_refused(folder):
    from safetensors.torch import load_file, save_file
    s = load_file(folder/'model.safetensors')
    save_file({k: v for k,v in s.items() if 'layer.1.output' not in k}, folder/'model.safetensors', metadata=dict(format='pt'))
    with pytest.raises(DataUnavailable) as e: hf_model(folder)
    assert 'do not fit' in one_line(e)


def test_half_weights_are_trained_in_fp32(folder):
    from transformers import AutoModelForSequenceClassification as A
    A.from_pretrained(folder).half().save_pretrained(folder)
    assert {p.dtype for p in hf_model(folder).parameters()} == {torch.float32}


def test_a_new_head_is_said(folder):
    with pytest.warns(UserWarning, match='start random'): model = hf_model(folder, n_out=4)
    assert set(model.fresh) == {'classifier.weight', 'classifier.bias'} and model.source == str(folder)


def test_random_weights_from_a_folders_config(folder):
    (folder/'model.safetensors').unlink()
    assert hf_model(folder, pretrained=False).config.hidden_size == 64


# The hub

def test_a_lost_hub_is_asked_once(monkeypatch):
    import huggingface_hub
    asked = []
    def look(url, **kwargs): asked.append(url); raise OSError('Name or service not known')
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', look)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda *a, **k: None)
    with pytest.raises(DataUnavailable) as e: hf_model('roberta-base')
    assert 'not known' in one_line(e) and 'pretrained=False' in one_line(e) and len(asked) == 1
    with pytest.raises(DataUnavailable) as e: hf_model('roberta-base', offline=True)
    assert 'offline' in one_line(e) and len(asked) == 1


def test_a_repository_with_pickles_only(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError
    def look(url, **kwargs): raise EntryNotFoundError('404')
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', look)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda *a, **k: None)
    with pytest.raises(DataUnavailable) as e: find_model('some/model')
    assert 'no weights in safetensors' in one_line(e)


def test_the_cache_is_enough(folder, monkeypatch):
    import huggingface_hub
    def never(*a, **k): raise AssertionError('the hub was asked')
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', never)
    seen = []
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda repo, name, revision=None: seen.append(revision) or (str(folder/name) if (folder/name).exists() else None))
    assert hf_model('some/model', revision='abc').source == 'some/model' and set(seen) == {'abc'}


def test_a_model_larger_than_memory(monkeypatch):
    monkeypatch.setattr(H, '_free_memory', lambda: 10**6)
    with pytest.raises(UserError) as e: hf_model('roberta-base', pretrained=False)
    assert '125 million parameters take 0.5 GB' in one_line(e)
    monkeypatch.setattr(H, '_free_memory', lambda: 10**9)
    hf_model('bert-tiny', pretrained=False)


def test_a_model_that_is_there_keeps_its_outputs_and_attention():
    m = hf_model('bert-tiny', pretrained=False, n_out=3)
    with pytest.raises(UserError, match='with 3 outputs, and 7 are wanted'): hf_model(m, n_out=7)
    with pytest.raises(UserError, match='attn cannot change it'): hf_model(m, attn='eager')
    assert hf_model(m, n_out=3, attn=m.config._attn_implementation).hf is m.hf
    with pytest.raises(UserError, match='kind cannot change it'): find_task(SequenceClassification(['a', 'b']), kind='multi')


@pytest.mark.parametrize('wrapped', [True, False])
def test_checkpointing_goes_by_the_name_of_today(wrapped):
    "transformers warns of the old names since 5.24"
    from fastbench.callback.checkpointing import _own_switch
    m = hf_model('gpt2-tiny', pretrained=False)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        off = _own_switch(m if wrapped else m.hf)()
        assert m.is_gradient_checkpointing and _own_switch(m if wrapped else m.hf) is None
        off()
        assert not m.is_gradient_checkpointing


def test_a_model_that_is_there_keeps_its_head():
    from transformers import AutoModel
    m = hf_model('bert-tiny', 'token-classification', pretrained=False, n_out=3)
    assert hf_model(m, 'token-classification').hf is m.hf
    with pytest.raises(UserError, match="a BertForTokenClassification with the head for token-classification, and the task is sequence-classification: .*say task='token-classification'"): hf_model(m)
    with pytest.raises(UserError, match='a BertModel with no head, and the task is causal-lm: make it with AutoModelForCausalLM$'):
        hf_model(AutoModel.from_config(m.config), 'causal-lm')
    t5 = hf_model('t5-tiny', 'seq2seq', pretrained=False)
    assert hf_model(t5, 'summarization').hf is t5.hf
    own = type('Own', (type(m.hf),), {})(m.config)
    assert hf_model(own, 'token-classification').hf is own


@pytest.mark.parametrize('attn,said', [('typo', "unknown attn 'typo'"), (3, 'unknown attn 3'), ('spda', "did you mean 'sdpa'"), ('flash_attention_2', "attn='flash_attention_2' cannot be: .*lash")])
def test_an_attention_that_is_not_there_is_one_line(tok, attn, said):
    with pytest.raises(UserError, match=said) as e: hf_model('bert-tiny', tokenizer=tok(), pretrained=False, attn=attn)
    one_line(e)


def test_a_config_without_a_size_of_the_vocabulary_takes_the_tokenizers(tok):
    from transformers import EsmConfig
    config = EsmConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    assert config.vocab_size is None and hf_model(config, tokenizer=tok(), pretrained=False, n_out=2).config.vocab_size == len(tok())
    with pytest.raises(UserError, match='config of esm has no vocab_size'): hf_model(config, pretrained=False)

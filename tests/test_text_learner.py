"hf_learner with everything a Learner can have, and what can go wrong with data, folders and labels"
import json, random, subprocess, sys, warnings

import fastai.callback.schedule
import numpy as np
import pandas as pd
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.optimizer import SGD

import fastbench.train.batch_size, fastbench.measure.profiler
from fastbench.callback.checkpointing import GradientCheckpointing
from fastbench.callback.ema import EMACallback
from fastbench.machine.download import DataUnavailable
from fastbench.errors import UserError
from fastbench.text.data import HFTextBlock, hf_dls
from fastbench.text.hf import hf_model
from fastbench.text.learner import HFLearner, hf_learner, load_hf_learner
from fastbench.text.loader import TextDataset, TextDL

pytestmark = pytest.mark.usefixtures('no_hub')

WORDS = [f'{a}{b}' for a in 'bdfgklmn' for b in 'aeiou']


def one_line(e): s = str(e.value); assert '\n' not in s and len(s) < 700; return s


@pytest.fixture(scope='module')
def tok():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.WordLevel({o: i for i,o in enumerate('<pad> <unk> <s> </s> <mask> good bad'.split() + WORDS)}, '<unk>'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.post_processor = processors.TemplateProcessing(single='<s> $A </s>', pair='<s> $A </s> $B </s>', special_tokens=[('<s>', 2), ('</s>', 3)])
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token='<pad>', unk_token='<unk>', bos_token='<s>', eos_token='</s>', mask_token='<mask>')


@pytest.fixture(scope='module')
def df():
    rng = random.Random(0)
    rows = [(' '.join(rng.sample(WORDS, rng.randint(2, 20)) + [o]), o) for o in (rng.choice(['good', 'bad']) for _ in range(120))]
    return pd.DataFrame(rows, columns=['text', 'label'])


@pytest.fixture
def dls(df, tok): return hf_dls(df, tok, max_length=32, bs=16, workers=0, device='cpu')


def quiet(learn, *args, **kwargs):
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(*args, **kwargs)
    return learn


def small(dls, model='distilbert-tiny', **kwargs):
    torch.manual_seed(0)
    return hf_learner(dls, model, pretrained=False, **kwargs)


TEXTS = ['good ba be bi bo bu da de', 'bad', '', 'good ba', 'ba '*20 + 'bad']


# All of fastbench's switches on batches that are dicts

@pytest.mark.parametrize('model', ['distilbert-tiny', 'bert-tiny', 'roberta-tiny', 'electra-tiny', 'gpt2-tiny', 'modernbert-tiny', 't5-tiny', 'bart-tiny'])
def test_every_family_learns_one_batch(dls, model):
    learn = small(dls, model)
    b = dls.one_batch()
    before = learn.loss_func(learn.model(b[0]), b[1]).item()
    learn.model.train()
    opt = torch.optim.Adam(learn.model.parameters(), 3e-3)
    for _ in range(8):
        loss = learn.loss_func(learn.model(b[0]), b[1])
        opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad(): assert learn.loss_func(learn.model.eval()(b[0]), b[1]).item() < before


@pytest.mark.parametrize('how', [lambda o: o.to_bf16(allow_emulation=True), lambda o: o.to_half('bf16', allow_emulation=True)])
def test_precision(dls, how):
    learn = small(dls)
    dtypes, f = set(), learn.loss_func
    learn.loss_func = lambda p,y: (dtypes.add(p.dtype), f(p, y))[1]
    quiet(how(learn), 1, 1e-3)
    assert dtypes == {torch.float32} and {p.dtype for p in learn.model.parameters()} == {torch.float32}


def test_compile(dls):
    learn = small(dls).compile(backend='eager', dynamic=True)
    quiet(learn, 1, 1e-3)
    assert learn.compiling.recompiles == 0 and learn.model._compiled_call_impl is None


def test_ema(dls):
    learn = quiet(small(dls, cbs=EMACallback(decay=.5)), 2, 1e-3)
    assert learn.ema.average.n_averaged > 0
    for a,b in zip(learn.model.parameters(), learn.ema.average.module.parameters()): assert torch.equal(a, b)


@pytest.mark.parametrize('model', ['distilbert-tiny', 'gpt2-tiny', 't5-tiny'])
def test_gradient_checkpointing_changes_no_gradient(df, tok, model):
    params = []
    for cbs in [], [GradientCheckpointing()]:
        learn = small(hf_dls(df, tok, max_length=32, bs=32, workers=0, device='cpu'), model, cbs=cbs, opt_func=SGD)
        for m in learn.model.modules():
            if isinstance(m, torch.nn.Dropout): m.p = 0.
        for k in 'attention_dropout', 'attn_pdrop': setattr(learn.model.config, k, 0.)
        for m in learn.model.modules():
            if hasattr(m, 'attn_dropout') and isinstance(m.attn_dropout, float): m.attn_dropout = 0.
        quiet(learn, 1, 1e-2)
        params.append([p.detach().clone() for p in learn.model.parameters()])
        assert not learn.model.is_gradient_checkpointing
    for a,b in zip(*params): assert torch.allclose(a, b, atol=1e-5)


def test_gradient_checkpointing_uses_the_models_own_switch(dls):
    seen = []
    learn = small(dls, cbs=GradientCheckpointing())
    learn.model.register_forward_pre_hook(lambda m, a: seen.append(m.is_gradient_checkpointing))
    quiet(learn, 1)
    assert all(seen) and seen


def test_find_batch_size(dls):
    learn = small(dls)
    before = [p.clone() for p in learn.model.parameters()]
    n = learn.find_batch_size(start=4, max=8)
    assert n == 8 and all(torch.equal(a, b) for a,b in zip(before, learn.model.parameters()))


def test_profile(dls):
    learn = small(dls).profile()
    quiet(learn, 1, 1e-3)
    assert learn.profiler.results is not None and 0 < learn.profiler.padding < 1


# Predicting

def test_predictions_come_in_the_order_of_the_input(dls):
    learn = quiet(small(dls), 1, 1e-3)
    alone = torch.stack([learn.predict(t)[2] for t in TEXTS])
    together = torch.stack([o[2] for o in learn.predict(TEXTS)])
    with learn.no_bar(): preds = learn.get_preds(dl=dls.test_dl(pd.DataFrame(dict(text=TEXTS))))[0]
    assert torch.allclose(alone, together, atol=1e-5) and torch.allclose(alone, preds, atol=1e-5) and alone.std(0).min() > 0
    assert learn.predict([]) == [] and learn.predict(tuple(TEXTS))[1][0] == learn.predict(TEXTS[1])[0]


def test_show_results_and_get_preds_on_both_sets(dls, capsys):
    learn = small(dls)
    with learn.no_bar():
        learn.show_results(max_n=2)
        for i in 0, 1:
            p, y = learn.get_preds(i)
            assert len(p) == len(y) == len(dls[i].dataset) and torch.equal(y, dls[i].dataset.y)
    assert capsys.readouterr().out.strip()
    b = dls.valid.one_batch()
    assert 'prediction' in dls.valid.show_results(b, b[1], show=False).columns


def test_a_data_block_will_do(df, tok):
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import ColReader, RandomSplitter
    block = DataBlock((HFTextBlock(tok, max_length=32), CategoryBlock), get_x=ColReader('text'), get_y=ColReader('label'), splitter=RandomSplitter(seed=1))
    dls = block.dataloaders(df, bs=16, num_workers=0, device='cpu')
    learn = quiet(small(dls), 1, 1e-3)
    assert learn.task.kind == 'single' and learn.predict('good ba')[0] in ('good', 'bad')


def block_learner(df, tok, get_x):
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import ColReader, RandomSplitter
    block = DataBlock((HFTextBlock(tok, max_length=32), CategoryBlock), get_x=get_x, get_y=ColReader('label'), splitter=RandomSplitter(seed=1))
    return small(block.dataloaders(df, bs=16, num_workers=0, device='cpu'), config=dict(initializer_range=.1))  # answers far apart


def reads():
    from fastai.data.transforms import ColReader
    return dict(function=lambda r: r['other']+' bad', column=ColReader('other'), added=ColReader('other', suff=' bad'), pair=ColReader(['other', 'text']), pair_of_function=lambda r: (r['other'], r['text']))


@pytest.mark.parametrize('name', list(reads()))
def test_a_table_is_predicted_as_it_was_read(df, tok, name, tmp_path):
    "By a `DataBlock`: not its column of labels, nor one that is called 'text'; without the function only columns are known"
    df = df.assign(other=df.text[::-1].tolist())
    learn = block_learner(df, tok, reads()[name])
    want = dict(function=df.other + ' bad', column=df.other, added=df.other + ' bad').get(name, pd.Series(list(zip(df.other, df.text)))).tolist()
    def same(a, b): assert len(a) == len(b); [torch.testing.assert_close(o[2], p[2], rtol=1e-4, atol=1e-5) for o, p in zip(a, b)]
    alone = [learn.model.eval()(dict(tok(*([o] if isinstance(o, str) else o), return_tensors='pt', truncation=True, max_length=32)))[0].softmax(-1).detach() for o in want[:5]]
    same(learn.predict(df[:5]), [(0, 0, o) for o in alone])
    same(learn.predict(want[:5]), [(0, 0, o) for o in alone])
    if 'pair' in name: same(learn.predict(list(map(list, want[:5]))), [(0, 0, o) for o in alone])
    same([learn.predict(want[2])], [(0, 0, alone[2])])
    assert min((a-b).abs().max() for i, a in enumerate(alone) for b in alone[:i]) > 1e-3 and learn.predict(df[:0]) == [] and len(learn.predict(('good', 'bad') if 'pair' in name else ['good', 'bad'])) == (3 if 'pair' in name else 2)
    again = load_hf_learner(learn.export(tmp_path/'o'), device='cpu')
    same(again.predict(want[:5]), [(0, 0, o) for o in alone])
    same([again.predict(want[2])], [(0, 0, alone[2])])
    if name in ('column', 'pair'): same(again.predict(df[:5]), [(0, 0, o) for o in alone])
    else:
        for f in (again.predict, again.dls.test_dl):
            with pytest.raises(UserError, match='nothing says which column of a table holds the texts') as e: f(df[:5])
            one_line(e)


def test_a_row_of_a_table_is_one_text(df, tok, tmp_path):
    "Not its texts and labels one below the other; a column of texts is several"
    learn = small(hf_dls(df, tok, max_length=32, workers=0, device='cpu'))
    by_function = block_learner(df.assign(other=df.text), tok, reads()['function'])
    for o, text in (learn, df.text[1]), (load_hf_learner(learn.export(tmp_path/'o'), device='cpu'), df.text[1]), (by_function, df.text[1] + ' bad'):
        got, want = o.predict(df.assign(other=df.text).iloc[1]), o.predict(text)
        assert got[0] == want[0] and torch.allclose(got[2], want[2], atol=1e-5)
    assert len(learn.predict(df.text[:5])) == 5


@pytest.mark.parametrize('at', [0, np.int64(0)], ids=['int', 'numpy'])
def test_columns_may_be_numbers(df, tok, at, tmp_path):
    table = df[['text', 'label']].set_axis([0, 1], axis=1)
    learn = small(hf_dls(table, tok, text_col=at, label_col=1, max_length=32, workers=0, device='cpu'))
    want = [o[2] for o in learn.predict(df.text[:5].tolist())]
    for o in (learn, load_hf_learner(learn.export(tmp_path/'o'), device='cpu')):
        torch.testing.assert_close([p[2] for p in o.predict(table[:5])], want, rtol=1e-4, atol=1e-5)


def test_a_table_without_the_column_of_a_data_block(df, tok):
    from fastai.data.transforms import ColReader
    with pytest.raises(UserError, match="unknown column 'text'; did you mean 'txt'") as e: block_learner(df, tok, ColReader('text')).predict(df.rename(columns=dict(text='txt')))
    one_line(e)


def test_a_table_for_a_data_block_of_texts(df, tok):
    "Not made of a table: the column 'text' is read, as in every other case"
    from fastai.data.block import CategoryBlock, DataBlock
    block = DataBlock((HFTextBlock(tok, max_length=32), CategoryBlock), get_y=lambda o: o.split()[-1])
    learn = small(block.dataloaders(df.text.tolist(), bs=16, num_workers=0, device='cpu'))
    assert [o[0] for o in learn.predict(df[:5])] == [o[0] for o in learn.predict(df.text[:5].tolist())]


# Faults

def test_data_without_labels_or_tokenizer(df, tok):
    with pytest.raises(UserError) as e: small(hf_dls(df.drop(columns='label'), tok, label_col=None, workers=0, device='cpu'))
    assert 'no labels' in one_line(e)
    dl = torch.utils.data.DataLoader([(1, 2)])
    with pytest.raises(UserError) as e: small(DataLoaders(dl, dl))
    assert 'no tokenizer' in one_line(e)


def test_texts_longer_than_the_models_positions(df, tok):
    with pytest.raises(UserError) as e: small(hf_dls(df, tok, max_length=64, workers=0, device='cpu'), 'bert-tiny', config=dict(max_position_embeddings=32))
    assert 'max_length=32' in one_line(e)


def test_one_class_only(df, tok):
    y = torch.zeros(len(df), dtype=torch.long)
    dl = TextDL(TextDataset(df.text.tolist(), y, ['good']), tok)
    with pytest.raises(UserError) as e: small(DataLoaders(dl, dl))
    assert 'nothing to tell apart' in one_line(e)


def test_unknown_names(dls):
    with pytest.raises(UserError) as e: small(dls, task='classification')
    assert 'unknown task' in one_line(e)
    with pytest.raises(UserError) as e: hf_learner(dls, 'no/such/folder')
    assert 'no such folder' in one_line(e)


# Export

@pytest.fixture
def folder(dls, tmp_path): return quiet(small(dls), 1, 1e-3).export(tmp_path/'out')


LOAD = '''
import sys, json, torch
torch.set_num_threads(1)
from fastbench.text.learner import load_hf_learner
for folder in sys.argv[2:]: print(json.dumps([[o[0], o[2].tolist()] for o in load_hf_learner(folder, device='cpu').predict(json.loads(sys.argv[1]))]))
'''


def test_another_process_predicts_the_same(df, tok, tmp_path):
    learns = [quiet(small(hf_dls(df, tok, max_length=32, loader=o, workers=0, device='cpu')), 1, 1e-3) for o in ('sorted', 'packed')]
    folders = [str(o.export(tmp_path/str(i))) for i,o in enumerate(learns)]
    out = subprocess.run([sys.executable, '-c', LOAD, json.dumps(TEXTS), *folders], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-2000:]
    for learn,line in zip(learns, out.stdout.splitlines()[-2:], strict=True):
        for a,(name,probs) in zip(learn.predict(TEXTS), json.loads(line), strict=True): assert a[0] == name and torch.allclose(a[2], torch.tensor(probs), atol=1e-4)


def test_nothing_in_the_folder_is_a_pickle(folder):
    for o in folder.iterdir():
        head = o.read_bytes()[:2]
        assert head not in (b'\x80\x02', b'\x80\x04', b'PK'), o
    assert not [o for o in folder.iterdir() if o.suffix in ('.pkl', '.pt', '.bin', '.pth')]


@pytest.mark.parametrize('name', ['config.json', 'model.safetensors', 'fastbench.json', 'tokenizer_config.json'])
@pytest.mark.parametrize('how', ['gone', 'cut'])
def test_a_damaged_folder_is_one_line_with_its_name(folder, name, how):
    if how == 'gone': (folder/name).unlink()
    else: (folder/name).write_bytes((folder/name).read_bytes()[:50])
    with pytest.raises(DataUnavailable) as e: load_hf_learner(folder, device='cpu')
    assert str(folder) in one_line(e) and (name in str(e.value) or how == 'cut')


def test_a_foreign_folder_and_a_newer_format(folder, tmp_path):
    with pytest.raises(DataUnavailable, match='no fastbench.json'): load_hf_learner(tmp_path)
    info = json.loads((folder/'fastbench.json').read_text())
    (folder/'fastbench.json').write_text(json.dumps(info | dict(format=99)))
    with pytest.raises(UserError, match='newer one: update'): load_hf_learner(folder)


def test_a_head_of_another_task_is_not_filled_at_random(folder):
    info = json.loads((folder/'fastbench.json').read_text())
    info['settings']['vocab'] = ['a', 'b', 'c']
    (folder/'fastbench.json').write_text(json.dumps(info))
    with pytest.raises(DataUnavailable) as e, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        load_hf_learner(folder, device='cpu')
    assert 'model.safetensors' in one_line(e)


def test_export_replaces_its_own_only(dls, folder, tmp_path):
    learn = small(dls)
    assert learn.export(folder) == folder
    (tmp_path/'mine').mkdir()
    (tmp_path/'mine'/'thesis.txt').write_text('all my work')
    with pytest.raises(UserError, match='left alone'): learn.export(tmp_path/'mine')
    assert (tmp_path/'mine'/'thesis.txt').read_text() == 'all my work'


def test_labels_that_json_cannot_hold(df, tok, tmp_path):
    d = df.assign(label=pd.to_datetime(df.label.map(dict(good='2020-01-01', bad='2021-01-01'))))
    learn = small(hf_dls(d, tok, max_length=32, workers=0, device='cpu'))
    with pytest.raises(UserError) as e: learn.export(tmp_path/'o')
    assert 'JSON' in one_line(e) and not (tmp_path/'o').exists()


def test_train_what_was_loaded(folder, dls):
    learn = load_hf_learner(folder, device='cpu')
    learn.dls = dls
    quiet(learn, 1, 1e-3)


# Other data for a Learner

TASK_MODELS = dict(causal=('gpt2-tiny', 'causal-lm'), masked=('bert-tiny', 'masked-lm'))
def flat(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()]).clone()
def one_start(learn): return {o[0].item() for dl in learn.dls.loaders for o in dl.one_batch()[0]['decoder_input_ids']}


def refused(learn, dls, match):
    before, how = learn.dls, (learn.model.pads_left, learn.model.config._attn_implementation)
    with pytest.raises(UserError, match=match) as e: learn.dls = dls
    one_line(e)
    assert learn.dls is before and (learn.model.pads_left, learn.model.config._attn_implementation) == how
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)


@pytest.fixture
def more(tok):
    def make(rows, label='label', tokenizer=tok, **kwargs):
        df = pd.DataFrame(rows, columns=['text', 'label'])
        return hf_dls(df, tokenizer, **dict(label_col=label, max_length=32, bs=8, workers=0, device='cpu') | kwargs)
    return make


def labelled(f): return [(' '.join(WORDS[i % 9:i % 9+i % 5+1]), f(i)) for i in range(40)]


@pytest.mark.parametrize('kind', TASK_MODELS)
def test_a_loaded_language_model_trains_on(more, tmp_path, kind):
    model, task = TASK_MODELS[kind]
    def data(loader='sorted'): return more(labelled(lambda i: 0), None, loader=loader)
    learn = small(data(), model, task=task)
    want = learn.no_bar().__enter__().validate()
    again = load_hf_learner(learn.export(tmp_path/kind), device='cpu')
    for o, learner in ((data(), again), (data(), learn), (data('packed'), learn)):
        learner.dls = o
        with learner.no_bar(): got = learner.validate()
        assert all(abs(a-b) < 2e-3*abs(b) for a, b in zip(got, want)), (got, want)
    if kind == 'masked':
        from copy import deepcopy
        without = deepcopy(again.dls.tokenizer)
        without.mask_token = None
        refused(again, other := more(labelled(lambda i: 0), None, tokenizer=without), 'no mask token')
        assert other.train.finish is None
        task = type(learn.task)(share=.3)
        refused(again, small(data(), model, task=task).dls, 'made with share=0.3, and the task has share=0.15: make others for this Learner')
    before = flat(again)
    quiet(again, 1, 1e-3)
    assert not torch.equal(before, flat(again)) and all(np.isfinite(again.recorder.values[-1]))


def test_texts_without_labels_are_refused_by_a_classifier(dls, df, tok, more):
    learn = small(dls)
    refused(learn, more(labelled(str), None), 'these texts have no labels')


def test_names_in_another_order_or_fewer_are_refused_and_can_be_given(more, tmp_path):
    rows = labelled(lambda i: 'ABC'[i % 3])
    learn = small(more(rows))
    again = load_hf_learner(learn.export(tmp_path/'abc'), device='cpu')
    some = [o for o in rows if o[1] != 'A']
    for o in (more(some), more(rows, vocab=['C', 'B', 'A'])): refused(learn, o, r'number the labels as .*A, B, C.*vocab=learn.task.vocab')
    with pytest.raises(UserError, match='vocab=learn.task.vocab'): again.dls = more(some)
    again.dls = data = more(some, vocab=again.task.vocab)
    for ds in data.train_ds, data.valid_ds: assert all((t, data.vocab[int(y)]) in some for t, y in zip(ds.texts, ds.y))
    assert again.task.vocab == list(data.vocab) == ['A', 'B', 'C'] and {*map(int, data.train_ds.y)} == {1, 2}
    quiet(again, 1, 1e-3)
    refused(learn, more(labelled(lambda i: 'ABCD'[i % 4])), "the label 'D', which .* does not know")
    refused(learn, more(labelled(lambda i: 'xyz'[i % 3])), "the labels 'x', 'y' and 1 more, which .* does not know")


def test_names_that_are_given_are_checked(more):
    rows = labelled(lambda i: 'ABC'[i % 3])
    with pytest.raises(UserError, match="row 2 has the label 'C', which is none of vocab"): more(rows, vocab=['A', 'B'])
    with pytest.raises(UserError, match='vocab names labels, and column label holds numbers'): more(labelled(lambda i: i/3), vocab=['A', 'B'])
    with pytest.raises(UserError, match='vocab .*twice'): more(rows, vocab=['A', 'B', 'C', 'A'])
    with pytest.raises(UserError, match='label_col names the labels'): hf_dls(pd.DataFrame(dict(text=['ba', 'be'], a=[0, 1], b=[1, 0])), more(rows).tokenizer, label_col=['a', 'b'], vocab=['b', 'a'])
    d = more(labelled(lambda i: [[], ['B'], ['A', 'B']][i % 3]), vocab=['B', 'X', 'A'])
    assert d.vocab == ['B', 'X', 'A'] and {tuple(o.tolist()) for o in d.train_ds.y} == {(0, 0, 0), (1, 0, 0), (1, 0, 1)}
    assert d.test_dl([('ba', ['X'])], with_labels=True).dataset.y.tolist() == [[0, 1, 0]]


def test_other_data_from_a_data_block(df, dls, tok):
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import ColReader
    def data(df, vocab=None):
        return DataBlock((HFTextBlock(tok, max_length=32), CategoryBlock(vocab, sort=vocab is None)), get_x=ColReader('text'), get_y=ColReader('label')).dataloaders(df, bs=8, device='cpu')
    for learn in small(dls), small(data(df)):
        learn.dls = data(df)
        quiet(learn, 1, 1e-3)
        refused(learn, data(df[df.label == 'good']), 'vocab=learn.task.vocab|nothing to tell apart')
        refused(learn, data(df, ['good', 'bad']), 'number the labels as good, bad, .* as bad, good')
        learn.dls = data(df[df.label == 'good'], learn.task.vocab)
        assert [o[0] for o in learn.predict(TEXTS)] and {y.item() for _, y in learn.dls.valid for y in y} == {1}
        learn.dls = dls
        quiet(learn, 1, 1e-3)


def test_another_kind_of_labels_is_refused(more):
    kinds = dict(single=lambda i: 'ab'[i % 2], multi=lambda i: ['ab'[i % 2]], regression=lambda i: i/3)
    said = dict(single='one label', multi='several labels', regression='1 number')
    for a, f in kinds.items():
        learn = small(more(labelled(f)))
        for b, g in kinds.items():
            if a != b: refused(learn, more(labelled(g)), f'{said[b]} for each text, and .* {said[a]}')
    two = hf_dls(pd.DataFrame(dict(text=WORDS, a=[.5*i for i in range(40)], b=[.3]*40)), learn.dls.tokenizer, label_col=['a', 'b'], workers=0, device='cpu')
    refused(learn, two, '2 numbers for each text, and .* 1')
    learn = small(two)
    learn.dls = DataLoaders(two.train.new(bs=4), two.valid.new(bs=4))
    quiet(learn, 1, 1e-3)


def test_a_summary_starts_as_its_model_does(tok, tmp_path):
    from fastbench.text.examples import task_dls
    from fastbench.text.seq2seq import Summarization
    pairs = [(t, t[:5]) for t, _ in labelled(str)]
    def data(n=8): return task_dls(Summarization(max_target=n), pairs[:30], pairs[30:], tok, bs=8, max_length=16, device='cpu')
    learn = small(data(), 'bart-tiny')
    start = learn.model.config.decoder_start_token_id
    assert start != tok.pad_token_id and one_start(learn) == {start}
    again = load_hf_learner(learn.export(tmp_path/'s'), device='cpu')
    for o in learn, again:
        o.dls = data()
        assert one_start(o) == {start}
        quiet(o, 1, 1e-3)
    refused(learn, data(6), 'made with max_target=6, and the task has max_target=8: .*task_dls.learn.task')


def test_examples_of_another_task_are_refused(tok, dls, more):
    from fastbench.text.examples import task_dls
    from fastbench.text.tokens import TokenClassification
    rows = [(t.split(), ['B-X' if w[0] == 'b' else 'I-X' if w[0] == 'd' else 'O' for w in t.split()]) for t, _ in labelled(str)]
    def data(task, rows=rows): return task_dls(task, rows[:30], rows[30:], tok, bs=8, max_length=16, device='cpu')
    learn = small(data(TokenClassification.of(rows)), 'bert-tiny')
    learn.dls = data(TokenClassification.of(rows))
    quiet(learn, 1, 1e-3)
    few = [(w, ['O' if o == 'I-X' else o for o in y]) for w, y in rows]
    refused(learn, data(TokenClassification.of(few), few), "made with vocab=.*task_dls.learn.task")
    learn.dls = data(learn.task, few)
    refused(learn, data(learn.task, [w for w, _ in rows]), 'these examples have no targets')
    refused(learn, dls, 'learns from words and as many tags: make them with task_dls')
    refused(small(dls), data(learn.task), 'are of the task token-classification')


def test_the_side_of_the_padding(more, tmp_path):
    from copy import deepcopy
    rows = labelled(lambda i: 'ab'[i % 2])
    left = deepcopy(more(rows).tokenizer)
    left.padding_side = 'left'
    refused(small(more(rows), 'bert-tiny'), more(rows, tokenizer=left), 'the tokenizer pads on the left.*padding_side=.right.')
    learn = small(more(rows), 'gpt2-tiny')
    want = learn.no_bar().__enter__().get_preds()[0]
    for o in learn, load_hf_learner(learn.export(tmp_path/'g'), device='cpu'):
        o.dls = more(rows, tokenizer=left)
        assert o.model.pads_left and o.dls.valid.one_batch()[0]['attention_mask'][:, 0].min() == 0
        torch.testing.assert_close(o.no_bar().__enter__().get_preds()[0], want, rtol=1e-4, atol=1e-4)
        o.dls = more(rows)
        assert not o.model.pads_left


def test_data_that_the_model_has_no_room_for(more):
    from copy import deepcopy
    from transformers import BertConfig, DebertaV2Config
    rows, little = labelled(lambda i: 'ab'[i % 2]), dict(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    big = deepcopy(more(rows).tokenizer)
    big.add_tokens([f'new{i}' for i in range(99)])
    short = small(more(rows), BertConfig(**little, max_position_embeddings=32))
    refused(short, more(rows, max_length=64), 'keeps up to 64 tokens of a text, and .* positions for 32')
    refused(short, more(rows, tokenizer=big), 'the tokenizer has 146 tokens, and BertForSequenceClassification embeddings for 60')
    deberta = small(more(rows), DebertaV2Config(**little, relative_attention=True, pos_att_type=['p2c', 'c2p']))
    refused(deberta, more(rows, loader='packed'), "loader='budget' or 'sorted' works with every model")


def test_packed_data_set_later(more):
    from fastbench.text.check import CheckPacked
    from fastbench.text.fit import CountTexts
    rows = labelled(lambda i: 'ab'[i % 2])
    def names(learn): return [type(o) for o in learn.cbs if type(o) in (CheckPacked, CountTexts)]
    for task, label in ((None, 'label'), ('causal-lm', None)):
        def data(loader): return more(rows, label, loader=loader)
        learn, other = small(data('sorted'), 'gpt2-tiny', task=task), small(data('packed'), 'gpt2-tiny', task=task)
        assert names(learn) == []
        for loader in ('packed', 'sorted', 'packed'):
            learn.dls = data(loader)
            quiet(learn, 1, 1e-3)
        assert names(learn) == names(other) and learn.model.config._attn_implementation == other.model.config._attn_implementation
        for _ in range(2): other.dls = data('packed')
        assert names(learn) == names(other)


def test_loaders_made_from_those_of_the_learner_are_not_checked_again(dls, df, tok, monkeypatch):
    import copy, pickle
    from fastbench.text import fit
    learn = small(dls)
    def fail(*args): raise AssertionError('computed again')
    for o in ('check_padding', 'check_packed'): monkeypatch.setattr(fit, o, fail)
    learn.dls = DataLoaders(dls.train.new(bs=4), dls.valid.new(bs=4))
    learn.dls = DataLoaders(dls.train.new([]), dls.valid.new([]), device='cpu')
    assert learn.dls.train_ds is not dls.train_ds and vars(learn)['dls'] is learn.dls
    learn.dls = DataLoaders([dls.one_batch()]*2, [dls.one_batch()])
    quiet(learn, 1, 1e-3)
    learn.dls = hf_dls(df, tok, max_length=32, bs=8, workers=0, device='cpu')
    assert copy.copy(learn).dls is learn.dls
    for o in copy.deepcopy(learn), pickle.loads(pickle.dumps(learn)):
        assert o.dls.train.bs == 8 and o.task.vocab == learn.task.vocab
        quiet(o, 1, 1e-3)


def test_fastais_own_export_is_untouched():
    from fastai.learner import Learner
    assert Learner.export is not HFLearner.export and 'fname' in Learner.export.__code__.co_varnames

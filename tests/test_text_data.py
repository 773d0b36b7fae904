"Loaders of raw texts: every text once, whatever the order, the ranks, the workers; hostile texts; one line for what cannot be"
import gc
import json
import math
import os
import pickle
import random

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from fastbench.machine.download import DataUnavailable
from fastbench.errors import UserError
from fastbench.text.data import HFTextBlock, as_frame, hf_dls, labels_of
from fastbench.text.examples import task_dls
from fastbench.text.lm import MaskedLM
from fastbench.text.loader import TextDataset, TextDL
from fastbench.text.order import kinds, plan_epoch
from fastbench.text.tokenize import BatchTokenizer, TokenCache, find_tokenizer

WORDS = [f'{a}{b}' for a in 'bdfgklmnprst' for b in 'aeiou']


def make_tokenizer(pad=True, side='right', types=True, specials=True):
    t = Tokenizer(models.WordPiece(unk_token='[UNK]'))
    t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    t.train_from_iterator([' '.join(WORDS)], trainers.WordPieceTrainer(vocab_size=200, show_progress=False, special_tokens=['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '</s>']))
    if specials: t.post_processor = processors.TemplateProcessing(single='[CLS] $A [SEP]', pair='[CLS] $A [SEP] $B:1 [SEP]:1', special_tokens=[('[CLS]', 2), ('[SEP]', 3)])
    names = ['input_ids', 'token_type_ids', 'attention_mask'] if types else ['input_ids', 'attention_mask']
    more = dict(pad_token='[PAD]') if pad else dict(eos_token='</s>')
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token='[UNK]', cls_token='[CLS]', sep_token='[SEP]', mask_token='[MASK]', model_max_length=512, padding_side=side,
                                   model_input_names=names, **more)


@pytest.fixture(scope='module')
def tok(): return make_tokenizer()


@pytest.fixture(scope='module')
def texts():
    rng = random.Random(0)
    return [' '.join(rng.choices(WORDS, k=int(math.exp(rng.gauss(3, .8)))+1)) for _ in range(400)]


def rows(x):
    ids = x['input_ids']
    if 'cu_seq_lens' in x: return [o.tolist() for o in ids[0].split(x['cu_seq_lens'].diff().tolist())]
    return [o[m.bool()].tolist() for o, m in zip(ids, x['attention_mask'])]


def ids_of(tok, texts, n=512): return sorted(tok(o, max_length=n, truncation=True)['input_ids'] for o in texts)
def drawn(dl): return [rows(x) for x, *_ in dl]
def flat(batches): return sorted(o for b in batches for o in b)


# the order of an epoch

@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=8, max_size=120), st.sampled_from(kinds), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(1, 5), st.integers(0, 99))
def test_an_epoch_is_every_text_once(lengths, kind, bs, world, shuffle, window, seed):
    lengths = np.array(lengths)
    ranks = [plan_epoch(lengths, kind, bs, 64, np.random.default_rng(seed) if shuffle else None, window, rank=r, world_size=world) for r in range(world)]
    assert sorted(i for r in ranks for b in r for i in b.tolist()) == list(range(len(lengths)))
    assert len({len(r) for r in ranks}) == 1 and all(len(b) for r in ranks for b in r)
    big = [b for r in ranks for b in r]
    if kind == 'random' or (kind == 'sorted' and world == 1): assert max(map(len, big)) <= bs + (world > 1)
    elif kind == 'sorted': assert max(lengths[b].max()*len(b) for b in big) <= (bs+1)*lengths.max()  # fewer long ones, more short ones
    elif world == 1: assert max((lengths[b].sum() if kind == 'packed' else lengths[b].max()*len(b)) for b in big) <= 64
    if shuffle and kind == 'sorted' and world == 1 and len(lengths) >= 2*bs: assert lengths[ranks[0][0]].max() == lengths.max()


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=50), st.integers(1, 9))
def test_drop_last(lengths, bs):
    for kind in ('sorted', 'random'):
        got = plan_epoch(np.array(lengths), kind, bs, rng=np.random.default_rng(0), drop_last=True)
        assert [len(o) for o in got] == [bs]*(len(lengths)//bs)


@pytest.mark.parametrize('n,most', [(20_000, 1.02), (2_000, 1.03)])
@pytest.mark.parametrize('kind', ['sorted', 'budget', 'packed'])
def test_ranks_share_the_work(kind, n, most):
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(5.4, .7, n)), 512).astype(int)
    def tokens(b): return lengths[b].sum() if kind == 'packed' else lengths[b].max()*len(b)
    def plan(**kwargs): return [tokens(b) for b in plan_epoch(lengths, kind, 16, 16*512, np.random.default_rng(1), **kwargs)]
    alone = sum(plan())
    for world in (2, 4, 8):
        work = np.array([plan(rank=r, world_size=world) for r in range(world)])
        each, pace = work.sum(1), work.max(0).sum()  # of an epoch; of one in which each step waits for the slowest
        assert each.max() < (1.02 if kind == 'sorted' else most)*each.mean() and pace < (most + .01*(world == 8))*work.mean(0).sum(), (world, each/each.mean(), pace/work.mean(0).sum())
        assert work.sum() <= 1.001*alone, 'no more padding than in one process'


def test_unknown_kind_and_budget():
    with pytest.raises(UserError, match="did you mean 'sorted'"): plan_epoch([1], 'sortd')
    with pytest.raises(UserError, match='text 1 alone has 9 tokens'): plan_epoch([1, 9], 'packed', max_tokens=8)
    with pytest.raises(UserError, match='need a number of tokens'): plan_epoch([1, 9], 'budget')


# the loader

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('workers', [0, 1, 3])
@pytest.mark.parametrize('cache', [True, False])
def test_every_text_once_in_every_epoch(tok, texts, kind, workers, cache):
    dl = TextDL(texts, tok, bs=7, max_tokens=600, loader=kind, shuffle=True, seed=1, num_workers=workers, cache=cache, group=4)
    for _ in range(3):
        n = len(dl)
        got = drawn(dl)
        assert len(got) == n and flat(got) == ids_of(tok, texts)


@pytest.mark.parametrize('max_tokens,max_length,group', [(64, 32, 32), (100, 50, 32), (300, 100, 8)])
def test_a_first_epoch_has_the_batches_that_were_told(tok, max_tokens, max_length, group):
    "Some texts have more tokens than their characters promise"
    rng = random.Random(0)
    def some(n): return ' '.join(rng.choices(WORDS, k=n))
    def dense(n): return ' '.join(''.join(rng.choices(WORDS, k=3)) for _ in range(n))
    texts = [(some if rng.random() < .75 else dense)(int(math.exp(rng.gauss(3, .8)))+1) for _ in range(400)]
    for seed in range(8):
        dl = TextDL(texts, tok, max_tokens=max_tokens, max_length=max_length, loader='packed', shuffle=True, seed=seed, group=group)
        n = len(dl)
        got = drawn(dl)
        assert len(got) == n and flat(got) == ids_of(tok, texts, max_length)


@pytest.mark.parametrize('kind', ['budget', 'packed'])
def test_no_batch_is_over_the_budget(tok, texts, kind):
    dl = TextDL(texts, tok, max_tokens=600, loader=kind, shuffle=True, seed=1, group=4)
    for _ in range(2): assert max(x['input_ids'].numel() for x, in dl) <= 600


def test_the_budget_holds_where_characters_mislead(tok):
    "Texts without a blank have one token; the first that are measured are long words"
    rng = random.Random(0)
    texts = ['ba'*rng.randint(1, 200) if rng.random() < .5 else 'b '*rng.randint(1, 200) for _ in range(300)]
    for kind in ('budget', 'packed'):
        dl = TextDL(texts, tok, max_tokens=500, loader=kind, shuffle=True, seed=1, group=3)
        for _ in range(2):
            n, sizes = 0, []
            for x, in dl: n, _ = n + len(rows(x)), sizes.append(x['input_ids'].numel())
            assert n == 300 and max(sizes) <= 500


def test_order_depends_on_the_seed_alone(tok, texts):
    def epochs(seed, workers=0, n=2):
        dl = TextDL(texts, tok, shuffle=True, seed=seed, num_workers=workers)
        res = []
        for _ in range(n):
            len(dl), len(dl)
            res.append(drawn(dl))
        return res
    a = epochs(1)
    random.random()
    assert a == epochs(1) and a != epochs(2) and a[0] != a[1]
    assert [sorted(map(len, o)) for o in a] == [sorted(map(len, o)) for o in epochs(1, 2)]
    dl = TextDL(texts, tok, shuffle=True, seed=9)
    len(dl)
    dl.rng = random.Random(1)  # as fastai's users do
    assert drawn(dl) == a[0]


@pytest.mark.parametrize('kind', kinds)
def test_where_an_epoch_was_cut_off_does_not_change_the_next(tok, texts, kind):
    "A GPU is a batch ahead, loader processes are several: what they have tokenized by then is more"
    def second(stop, workers=0):
        dl = TextDL(texts, tok, bs=7, max_tokens=600, loader=kind, shuffle=True, seed=1, group=4, num_workers=workers)
        for _ in zip(range(stop), dl): pass
        return drawn(dl)
    assert second(2) == second(3) == second(9)
    assert flat(second(2, 2)) == flat(second(2))


def test_n_is_honoured(tok, texts):
    dl = TextDL(texts, tok, shuffle=True, n=50)
    assert flat(drawn(dl)) == ids_of(tok, texts[:50]) and len(dl) == 4


def test_ranks_together_cover_all(tok, texts):
    for kind in kinds:
        dls = [TextDL(texts, tok, bs=5, max_tokens=500, loader=kind, shuffle=True, seed=3, rank=r, world_size=3) for r in range(3)]
        assert len({len(o) for o in dls}) == 1
        assert flat(b for o in dls for b in drawn(o)) == ids_of(tok, texts)


def test_longest_first(tok, texts):
    dl = TextDL(texts, tok, shuffle=True, seed=3)
    longest = max(len(o) for o in ids_of(tok, texts))
    drawn(dl)
    assert next(iter(dl))[0]['input_ids'].shape[1] == longest


def test_predictions_can_be_put_back(tok, texts):
    dl = TextDL(texts, tok, bs=7)
    idxs = dl.get_idxs()
    again = dl.new(get_idxs=lambda: idxs)
    got = [o for b in drawn(again) for o in b]
    assert [got[i] for i in np.argsort(idxs)] == [tok(o)['input_ids'] for o in texts]


def test_tokens_are_remembered(tok, texts, monkeypatch):
    dl = TextDL(texts, tok, shuffle=True)
    drawn(dl)
    monkeypatch.setattr(BatchTokenizer, '_encode', lambda *args: 1/0)
    assert flat(drawn(dl)) and flat(drawn(dl.new(shuffle=False))) == ids_of(tok, texts)


def test_a_worker_fills_the_cache_of_all(tok, texts, monkeypatch):
    dl = TextDL(texts, tok, shuffle=True, num_workers=1)
    drawn(dl)
    assert dl.cache.n.all() and dl.fake_l.num_workers == 1
    monkeypatch.setattr('torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__', lambda *args: 1/0)
    assert flat(drawn(dl)) == ids_of(tok, texts)  # nobody is started


def test_an_abandoned_epoch_leaves_nothing(tok, texts):
    gc.collect()  # an epoch that an earlier test abandoned ends here
    before = os.environ.get('TOKENIZERS_PARALLELISM')
    dl = TextDL(texts, tok, shuffle=True, num_workers=1)
    it = iter(dl)
    next(it)
    it.close()
    assert dl.fake_l.num_workers == 1 and os.environ.get('TOKENIZERS_PARALLELISM') == before
    assert flat(drawn(dl)) == ids_of(tok, texts)


def test_pickled(tok, texts):
    dl = TextDL(texts[:40], tok, shuffle=True, seed=1)
    drawn(dl)
    other = pickle.loads(pickle.dumps(dl))
    assert other.cache.n.tolist() == dl.cache.n.tolist() and not other.cache.shared
    assert flat(drawn(other)) == ids_of(tok, texts[:40])


def test_lengths_are_never_read_by_loading_items(tok):
    class Items:
        n_inp, loaded = 1, 0
        def __len__(self): return 100
        def __getitem__(self, i):
            Items.loaded += 1
            return 'ba '*(i+1),
    dl = TextDL(Items(), tok, shuffle=True, group=2)
    assert Items.loaded == 0
    next(iter(dl))
    assert Items.loaded <= 4*16


# one batch

@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('multiple', [None, 8])
def test_as_the_tokenizer_pads(texts, side, multiple):
    tok = make_tokenizer(side=side)
    bt = BatchTokenizer(tok, 32, multiple)
    want = tok(texts[:20], truncation=True, max_length=32, padding=True, pad_to_multiple_of=multiple, return_tensors='pt')
    cache = TokenCache([32]*20, bt.keys)
    for i, o in enumerate(bt.encode(texts[:20])): cache.put(i, o)
    for got in (bt.pad(bt.encode(texts[:20])), bt.pad_known(cache, np.arange(20))):
        assert set(got) == set(want)
        for k, v in want.items(): assert torch.equal(got[k], v), k


def test_pairs_and_types(tok):
    pairs = [('ba da', 'ga'), ('ba', 'da '*40)]
    want = tok([a for a, _ in pairs], [b for _, b in pairs], truncation=True, max_length=16, padding=True, return_tensors='pt')
    got = next(iter(TextDL(TextDataset(pairs), tok, max_length=16)))[0]
    at = got['input_ids'][:, 1].argsort() if got['input_ids'].shape == want['input_ids'].shape else None
    assert at is not None and sorted(map(tuple, got['token_type_ids'].tolist())) == sorted(map(tuple, want['token_type_ids'].tolist()))


def test_slow_tokenizer_and_keys_of_its_own(tmp_path, texts):
    (tmp_path/'vocab.txt').write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *WORDS]))
    slow = BertTokenizer(str(tmp_path/'vocab.txt'))
    bt = BatchTokenizer(slow, 16, return_special_tokens_mask=True)
    assert not bt.direct
    want = slow(texts[:5], truncation=True, max_length=16, padding=True, return_tensors='pt', return_special_tokens_mask=True)
    got = bt.pad(bt.encode(texts[:5]))
    for k, v in want.items(): assert torch.equal(got[k], v), k
    assert flat(drawn(TextDL(texts[:40], bt, shuffle=True))) == ids_of(slow, texts[:40], 16)


def test_without_a_token_to_pad_with(texts):
    "GPT-2 has none: its end stands in, and the mask tells"
    tok = make_tokenizer(pad=False, types=False, specials=False)
    dl = TextDL([*texts[:9], '', ' '], tok, bs=11)
    x, = next(iter(dl))
    assert tok.pad_token == '</s>' and x['attention_mask'].sum(1).min() == 1
    assert 'token_type_ids' not in x


HOSTILE = ['', '   ', '\n\t', '\x00\x01\x7f', '☕🎉👩‍👩‍👧', 'مرحبا بالعالم', '\u202eabc', 'a'*100_000, 'ba '*100_000, '\ufeff', '<script>alert(1)</script>', '[MASK] [CLS]']


@pytest.mark.parametrize('kind', ['sorted', 'packed'])
def test_hostile_texts_work(tok, kind):
    dl = TextDL(HOSTILE, tok, bs=4, loader=kind, max_tokens=1024)
    assert flat(drawn(dl)) == ids_of(tok, HOSTILE)


def test_ten_megabytes_are_not_read(tok, monkeypatch):
    seen = []
    encode = BatchTokenizer._encode
    monkeypatch.setattr(BatchTokenizer, '_encode', lambda self, texts: (seen.append(sum(map(len, texts))), encode(self, texts))[1])
    text = 'ba da ga '*1_100_000
    assert rows(next(iter(TextDL([text], tok)))[0]) == ids_of(tok, [text[:10_000]]) and sum(seen) < 20_000


# what it is made of

def test_sources_of_texts(tok, tmp_path):
    import datasets
    df = pd.DataFrame(dict(text=[f'{WORDS[i]} ba' for i in range(20)], label=['no', 'yes']*10))
    df.to_csv(tmp_path/'a.csv', index=False)
    df.to_json(tmp_path/'a.jsonl', orient='records', lines=True)
    (tmp_path/'folder').mkdir()
    for i, o in df.iterrows():
        f = tmp_path/'folder'/('train' if i < 16 else 'test')/o.label/f'{i}.txt'
        f.parent.mkdir(parents=True, exist_ok=True)
        f.write_text(o.text)
    ds = datasets.Dataset.from_pandas(df)
    named = ds.class_encode_column('label')
    for data in (df, tmp_path/'a.csv', str(tmp_path/'a.jsonl'), tmp_path/'folder', list(zip(df.text, df.label)), df.to_dict('records'), ds, named,
                 datasets.DatasetDict(train=named.select(range(16)), test=named.select(range(16, 20)))):
        dls = hf_dls(data, tok, bs=4, device='cpu')
        assert list(dls.vocab) == ['no', 'yes'] and (dls.info['n_train'], dls.info['n_valid']) == (16, 4)
        by_text = dict(zip(df.text, df.label))
        for dl in dls:
            for b in dl: assert [by_text[t] for t, _ in dl.decode_batch(b)] == [y for _, y in dl.decode_batch(b)]
    assert hf_dls(list(df.text), tok, label_col=None, device='cpu').one_batch()[0]['input_ids'].shape[0] == 16
    dls = hf_dls(df.assign(held=[False]*15 + [True]*5), tok, valid='held', device='cpu')
    assert dls.info['n_valid'] == 5


@pytest.mark.parametrize('loader', ['packed', 'budget'])
@pytest.mark.parametrize('n', [30, 400])
@pytest.mark.parametrize('workers', [0, 2])
def test_the_first_epoch_of_a_datablock_heeds_its_budget(forked_loaders, tok, texts, loader, n, workers):
    "No length is known before a text is tokenized"
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import ColReader
    df = pd.DataFrame(dict(a=texts[:n], label=['x', 'y']*(n//2)))
    dls = DataBlock((HFTextBlock(tok, 128, loader=loader, max_tokens=256), CategoryBlock), get_x=ColReader('a'), get_y=ColReader('label')).dataloaders(df, device='cpu', num_workers=workers)
    told = len(dls.train)
    each = [x['input_ids'].numel() for x, _ in dls.train]
    assert len(each) == told and max(each) <= 256 and (n < 400 or sum(each)/told > 200)
    assert not dls.train._items


@pytest.mark.parametrize('loader', ['packed', 'budget'])
def test_a_single_batch_that_was_guessed_too_small_is_cut(tok, loader):
    "Texts that the sample of 64 does not meet have more tokens a letter than it says"
    some = set(np.linspace(0, 199, 64).astype(int))
    dl = TextDL(['q'*100 if i in some or i % 9 else 'ba '*30 for i in range(200)], tok, loader=loader, max_tokens=1000, shuffle=True, seed=1)
    assert len(dl) == 1
    assert max(x['input_ids'].numel() for x, *_ in dl) <= 1000


def test_datablock(forked_loaders, tok, texts):
    from fastai.data.block import CategoryBlock, DataBlock, RegressionBlock
    from fastai.data.transforms import ColReader
    df = pd.DataFrame(dict(a=texts[:60], b=texts[60:120], label=['x', 'y', 'z']*20, score=np.linspace(0, 1, 60)))
    dls = DataBlock((HFTextBlock(tok, 32), CategoryBlock), get_x=lambda r: (r['a'], r['b']), get_y=ColReader('label')).dataloaders(df, bs=8, device='cpu', num_workers=2)
    want = {tuple(tok(a, b, truncation=True, max_length=32)['input_ids']): y for a, b, y in zip(df.a, df.b, df.label)}
    seen = [(tuple(r), dls.vocab[int(y)]) for _ in range(2) for dl in dls for x, ys in dl for r, y in zip(rows(x), ys)]
    assert len(seen) >= 2*56 and all(want[r] == y for r, y in seen)
    x, y = DataBlock((HFTextBlock(tok), RegressionBlock), get_x=ColReader('a'), get_y=ColReader('score')).dataloaders(df, bs=8, device='cpu').one_batch()
    assert y.dtype == torch.float32 and y.shape == (8,)


BAD = [
    (dict(text=['a', None, 'b', 'c'], label=[0, 1]*2), {}, 'row 1 of text is nan'),
    (dict(text=['a', 'b', float('nan'), 'c'], label=[0, 1]*2), {}, 'row 2 of text is nan'),
    (dict(text=['a', 'b', 3, 'c'], label=[0, 1]*2), {}, 'row 2 of text is 3'),
    (dict(text=pd.Series(['a', 'b', '\ud83d', 'c'], dtype=object), label=[0, 1]*2), {}, 'row 2 of text is not valid text'),
    (dict(text=list('abcd'), label=[0, 1, None, 1]), {}, 'row 2 has no label in column label'),
    (dict(text=list('abcd'), label=['x']*4), {}, 'has one label only'),
    (dict(txt=list('abcd'), label=[0, 1]*2), {}, "unknown column 'text'; did you mean 'txt'"),
    (dict(text=list('abcd'), lable=[0, 1]*2), {}, "unknown column 'label'; did you mean 'lable'"),
    (dict(text=list('abcd'), label=[0, 1]*2, v=[0, 0, 0, 1]), dict(valid='w'), "unknown column 'w'"),
    (dict(text=list('abcd'), label=['x', 'y', 'x', 'z'], v=[0, 0, 0, 1]), dict(valid='v'), "row 3 has the label 'z', which no row for training has"),
    (dict(text=list('abcd'), label=[0, 1]*2), dict(valid_pct=1.5), 'valid_pct=1.5 of 4 texts cannot be'),
    (dict(text=list('abcd'), label=[0, 1]*2), dict(max_length=2), 'max_length=2 cannot be'),
    (dict(text=list('abcd'), label=[0, 1]*2), dict(loader='sort'), "did you mean 'sorted'"),
    (dict(text=['ba '*600]*4, label=[0, 1]*2), dict(loader='budget', max_tokens=100), 'alone has 512 tokens. Raise max_tokens, or cut texts with max_length=100'),
    (dict(text=['ba '*600]*4, label=[0, 1]*2), dict(loader='packed', max_tokens=100), 'alone has 512 tokens'),
]


@pytest.mark.parametrize('cols,kwargs,says', BAD, ids=[o[2][:30] for o in BAD])
def test_one_line_for_a_mistake(tok, cols, kwargs, says):
    with pytest.raises(UserError) as e:
        for _ in hf_dls(pd.DataFrame(cols), tok, device='cpu', **kwargs).train: pass
    assert says in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('given,meant', [('batch_size', 'bs'), ('num_workers', 'workers'), ('valid_size', 'valid_pct'), ('y_col', 'label_col'), ('text', 'text_col'), ('windw', 'window'), ('shuffle', None)])
def test_an_unknown_option_is_named(tok, given, meant):
    "fastai's loaders ignore it: with valid_size=.5 a fifth was held out; and with batch_size=4 batches had 4 texts, and the budget of tokens was that of 16"
    df = pd.DataFrame(dict(review=list('abcd'), stars=[0, 1]*2))
    with pytest.raises(UserError, match=f"^unknown option of hf_dls '{given}'") as e: hf_dls(df, tok, **{given: 2})
    assert '\n' not in str(e.value) and (meant is None or f"did you mean '{meant}'" in str(e.value)) and '`help(hf_dls)` shows all' in str(e.value)


def test_other_makers_of_loaders_name_it_too(tok):
    with pytest.raises(UserError, match="option of TextDL 'batch_size'; did you mean 'bs'"): TextDL(['a', 'b'], tok, batch_size=2)
    with pytest.raises(UserError, match="option of HFTextBlock 'max_len'; did you mean 'max_length'"): HFTextBlock(tok, max_len=8)
    for o in (None, 'sorted'):
        with pytest.raises(UserError, match="option of task_dls 'batch_size'; did you mean 'bs'"): task_dls(MaskedLM(), ['a b'], ['a'], tok, loader=o, batch_size=2)
    assert [len(x['input_ids']) for x, in TextDL(['a', 'b', 'c'], tok, bs=2, pin_memory=False, device='cpu', after_batch=None)] == [2, 1]


def test_the_option_that_names_a_column_is_said(tok):
    df = pd.DataFrame(dict(review=list('abcd'), stars=[0, 1]*2))
    for kwargs, option in (({}, 'text_col'), (dict(text_col='review'), 'label_col')):
        with pytest.raises(UserError, match=f'unknown column .* Known: review, stars; {option}= names another$'): hf_dls(df, tok, **kwargs)


def test_half_a_character_in_a_list(tok):
    for data in (['a', '\ud83d', 'c'], [('a', 0), ('\ud83d', 1), ('c', 0)]):
        with pytest.raises(UserError, match='row 1 of text is not valid text'): hf_dls(data, tok, label_col=None)


def test_files_that_cannot_be_read(tok, tmp_path):
    (tmp_path/'bad.csv').write_bytes(b'text,label\ncaf\xe9,1\n')
    with pytest.raises(UserError, match='bad.csv is not UTF-8'): as_frame(tmp_path/'bad.csv')
    (tmp_path/'empty.csv').write_text('')
    with pytest.raises(UserError, match='empty.csv cannot be read'): as_frame(tmp_path/'empty.csv')
    with pytest.raises(UserError, match='a.xyz cannot be read: its name ends in none of'): (tmp_path/'a.xyz').write_text('') or as_frame(tmp_path/'a.xyz')
    with pytest.raises(DataUnavailable, match='no such file or folder'): as_frame(tmp_path/'gone.csv')
    (tmp_path/'no').mkdir()
    with pytest.raises(DataUnavailable, match='has no texts'): as_frame(tmp_path/'no')
    with pytest.raises(DataUnavailable, match='has no tokenizer'): find_tokenizer(tmp_path/'no')
    make_tokenizer().save_pretrained(tmp_path/'cut')
    (tmp_path/'cut'/'tokenizer.json').write_text('{"version"')
    with pytest.raises(DataUnavailable, match='cut cannot be read'): find_tokenizer(tmp_path/'cut')
    with pytest.raises(DataUnavailable, match='there is no such folder'): find_tokenizer('./models/of/mine')


def test_a_lost_hub_is_said_at_once(monkeypatch):
    import huggingface_hub
    def lost(*args, **kwargs): raise ConnectionError('name resolution failed')
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', lost)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', False)
    with pytest.raises(DataUnavailable, match='name resolution failed. A local folder or a tokenizer works offline'): find_tokenizer('nobody/nothing')


def test_stars_are_numbers_where_that_is_said(tok):
    df = pd.DataFrame(dict(text=['one', 'two words', 'and three words', 'four'], label=[5, 1, 3., 3]))
    def made(**kwargs): return hf_dls(df, tok, valid=df, workers=0, device='cpu', max_length=20, **kwargs)
    assert made().info['labels'] == 'single' and made().vocab == [1, 3, 5]
    dls = made(labels='regression')
    assert dls.info['labels'] == 'regression' and getattr(dls, 'vocab', None) is None and sorted(dls.one_batch()[1].tolist()) == [1, 3, 3, 5]
    assert dls.test_dl(df[:2], with_labels=True).one_batch()[1].dtype == torch.float32
    df['label'] = [.5, 1., .5, 1.]
    assert made().info['labels'] == 'regression' and made(labels='single').vocab == [.5, 1.]
    with pytest.raises(UserError, match="unknown kind of labels 'numbers'"): made(labels='numbers')
    df['label'] = ['a', 'b', 'c', 'd']
    with pytest.raises(UserError, match='column label is for a regression, and holds a value that is not a number'): made(labels='regression')
    df['label'], df['other'] = [.5, 1., math.inf, 2.], [1., -math.inf, 2., 3.]
    with pytest.raises(UserError, match='row 2 has inf in column label'): made()
    with pytest.raises(UserError, match='row 1 has -inf in column other'): hf_dls(df.assign(label=1.), tok, valid=df.assign(label=1.), label_col=['label', 'other'], workers=0, device='cpu')


def test_labels_of_all_kinds():
    df = pd.DataFrame(dict(a=[1, 2, 1], b=[.5, 1, 2.], c=[['x'], [], ['x', 'y']], d=[True, False, True], e=[1., 2., 1.], f=[0, 1, 1], g=[1, 0, 1]))
    train = np.array([True]*3)
    assert labels_of(df, 'a', train)[1:] == ([1, 2], 'single') and labels_of(df, 'b', train)[1:] == (None, 'regression')
    y, vocab, kind = labels_of(df, 'c', train)
    assert (y.tolist(), vocab, kind) == ([[1, 0], [0, 0], [1, 1]], ['x', 'y'], 'multi')
    assert labels_of(df, 'd', train)[1] == [False, True] and labels_of(df, 'e', train)[2] == 'single'
    assert labels_of(df, ['f', 'g'], train)[1:] == (['f', 'g'], 'multi') and labels_of(df, ['b', 'e'], train)[2] == 'regression'
    json.dumps(labels_of(df, 'a', train)[1])


# Texts for which the number of bytes is no upper limit of the tokens

def plain_and_odd(normal=None, specials=False):
    "A tokenizer of words that a normalizer may draw out, as NFKC does in XLM-R; which tokens it adds"
    t = make_tokenizer(specials=specials, types=specials)
    if normal: t.backend_tokenizer.normalizer = normalizers.Replace(normal, ' '.join(WORDS[:9]))
    return t


def kept(dl): return [dl.cache.get(i)['input_ids'].tolist() for i in range(len(dl.dataset))]


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('odd', ['', '~'])
def test_a_text_of_more_tokens_than_bytes_leaves_the_others_alone(texts, odd, kind, workers):
    "An empty text has one token, though the tokenizer adds none; a character may become nine words"
    tok, mine = plain_and_odd(odd), list(texts[:100])
    mine[10:90:4] = [odd]*20
    dl = TextDL(mine, tok, 8, kind, 512, shuffle=True, seed=1, num_workers=workers, max_length=40)
    want = [tok(o, truncation=True, max_length=40)['input_ids'] or [dl.tokens.empty] for o in mine]
    assert len(tok('~')['input_ids']) == (9 if odd else 1)
    for _ in range(2): assert sorted(o for x, *_ in dl for o in rows(x)) == sorted(want)
    assert kept(dl) == want == kept(pickle.loads(pickle.dumps(dl)))
    assert not dl.cache.n.all() or dl.lengths().tolist() == [*map(len, want)]


def test_an_empty_text_alone_is_a_batch():
    for kind in kinds:
        dl = TextDL([''], plain_and_odd(), loader=kind, max_tokens=64)
        assert rows(dl.one_batch()[0]) == [[dl.tokens.empty]]


def test_a_loader_process_that_broke_off_left_no_hole():
    "It wrote how many tokens a text has, and the tokens themselves, which do not fit, are lost with it"
    dl = TextDL(['~', 'ba da'], plain_and_odd('~'), max_length=40)
    dl.cache.n[0] = 9
    assert flat([rows(dl.one_batch()[0])]) == ids_of(dl.tokenizer, ['~', 'ba da'])


# Labels as fastai has them, and arguments that cannot be

def labelled(n=20, **more): return pd.DataFrame(dict(text=[f'{WORDS[i % 40]} ba' for i in range(n)], label=['no', 'yes']*(n//2)) | more)


def test_fastai_understands_the_names_of_the_labels(tok):
    from fastai.interpret import ClassificationInterpretation
    from fastbench.text.learner import hf_learner
    for df in (labelled(), labelled().assign(label=[0, 1]*10)):
        learn = hf_learner(hf_dls(df, tok, max_length=16, workers=0, device='cpu'), 'bert-tiny', pretrained=False)
        with learn.no_bar(): seen = ClassificationInterpretation.from_learner(learn)
        with learn.no_bar(): assert list(seen.vocab) == list(df.label.unique()) and seen.confusion_matrix().sum() == 4
        assert learn.dls.vocab.o2i == {o: i for i, o in enumerate(df.label.unique())} and learn.task.vocab == list(df.label.unique())


@pytest.mark.parametrize('label_col,kw', [('label', {}), ('score', {}), ('tags', dict(label_delim=' ')), ('lists', {}), (['a', 'b'], {})])
def test_more_texts_have_labels_if_they_are_asked_for(tok, label_col, kw):
    df = labelled(score=np.arange(20)/7, tags=['x y', 'y', '', 'x']*5, lists=[['x', 'y'], ['y'], [], ['x']]*5, a=[0, 1]*10, b=[1, 0]*10)
    dls = hf_dls(df, tok, label_col=label_col, valid=df, max_length=16, workers=0, device='cpu', **kw)
    dl = dls.test_dl(df, with_labels=True)
    assert torch.equal(dl.dataset.y, dls.valid_ds.y) and dl.dataset.y.dtype == dls.valid_ds.y.dtype and len(dl.one_batch()) == 2
    assert len(dls.test_dl(df).one_batch()) == len(dls.test_dl(['ba']).one_batch()) == 1
    with pytest.raises(UserError, match='unknown column'): dls.test_dl(df[['text']], with_labels=True)


def test_an_empty_cell_has_no_labels_where_a_text_may_have_several(tok, tmp_path):
    lists = labelled(label=[['x', 'y'], [], ['y'], ['x']]*5)
    lists.assign(label=[';'.join(o) for o in lists.label], number=['1', '', '2', '3']*5).to_csv(tmp_path/'a.csv', index=False)
    kw = dict(valid=list(lists.itertuples(index=False))[:4], max_length=16, workers=0, device='cpu')
    want = hf_dls(lists, tok, **kw)
    for data in (tmp_path/'a.csv', pd.read_csv(tmp_path/'a.csv').astype('string'), pd.read_csv(tmp_path/'a.csv', keep_default_na=False)):
        got = hf_dls(data, tok, label_delim=';', **kw | dict(valid=data))
        assert got.vocab == want.vocab == ['x', 'y'] and torch.equal(got.train_ds.y, want.train_ds.y) and got.train_ds.y[1].tolist() == [0, 0]
        assert torch.equal(got.test_dl(data, with_labels=True).dataset.y, got.train_ds.y)
    df = pd.read_csv(tmp_path/'a.csv')
    with pytest.raises(UserError, match='row 1 has no label'): hf_dls(df, tok, device='cpu')
    with pytest.raises(UserError, match=r'row 0 has 1.0 in column number, and label_delim separates texts: read .*dtype=str'): hf_dls(df, tok, label_col='number', label_delim=';', device='cpu')
    assert hf_dls(pd.read_csv(tmp_path/'a.csv', dtype=str), tok, label_col='number', label_delim=';', device='cpu').vocab == ['1', '2', '3']


def test_labels_that_nobody_knows_are_refused(tok):
    dls = hf_dls(labelled(), tok, max_length=16, workers=0, device='cpu')
    with pytest.raises(UserError, match="has the label 'other'"): dls.test_dl(labelled().assign(label='other'), with_labels=True)
    dls = hf_dls(labelled(), tok, label_col=None, max_length=16, workers=0, device='cpu')
    with pytest.raises(UserError, match='without labels'): dls.test_dl(labelled(), with_labels=True)


@pytest.mark.parametrize('values', [[False]*15 + [True]*5, [0]*15 + [1]*5, ['train']*15 + ['valid']*5, ['False']*15 + ['True']*5])
def test_a_column_says_what_is_for_validation(tok, values):
    assert hf_dls(labelled(is_valid=values), tok, valid='is_valid', workers=0, device='cpu').info['n_valid'] == 5


@pytest.mark.parametrize('bad', [np.nan, None, 'maybe', 2, .5])
def test_a_column_that_says_neither_is_refused(tok, bad):
    with pytest.raises(UserError, match='row 3 of column is_valid') as e: hf_dls(labelled(is_valid=[False]*3 + [bad] + [True]*16), tok, valid='is_valid', device='cpu')
    assert repr(bad) in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('kw,why', [(dict(bs=0), 'bs=0 cannot be'), (dict(bs=-1), 'bs=-1'), (dict(bs=2.5), 'bs=2.5'), (dict(workers=-1), 'workers=-1'), (dict(workers='2'), "workers='2'"),
                                    (dict(valid_pct='20%'), "valid_pct='20%'"), (dict(valid_pct=None), 'valid_pct=None'), (dict(data=None), 'None holds no texts'), (dict(data=5), '5 holds no texts'), (dict(data=print), 'holds no texts')])
def test_arguments_that_cannot_be(tok, kw, why):
    with pytest.raises(UserError, match=why) as e: hf_dls(**dict(data=labelled(), tokenizer=tok, device='cpu') | kw)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('item', [None, 5, .5])
def test_what_is_no_text_is_not_predicted(tok, item):
    from fastbench.text.learner import hf_learner
    learn = hf_learner(hf_dls(labelled(), tok, max_length=16, workers=0, device='cpu'), 'bert-tiny', pretrained=False)
    with pytest.raises(UserError, match='not a text') as e: learn.predict(item)
    assert '\n' not in str(e.value)


def test_names_of_columns_that_are_no_text(tok, texts):
    df = pd.DataFrame({0: texts[:40], 1: ['x', 'y']*20, 2: [False]*30 + [True]*10})
    dls = hf_dls(df, tok, text_col=0, label_col=1, valid=2, bs=4)
    assert (dls.info['n_train'], dls.info['n_valid'], dls.info['n_classes']) == (30, 10, 2)
    assert rows(dls.test_dl(df[:3]).one_batch()[0])
    with pytest.raises(UserError, match='unknown column 7'): hf_dls(df, tok, text_col=7, label_col=1)
    named = df.set_axis(['text', 'label', 'is_valid'], axis=1)
    for i, o in enumerate(named.columns):
        twice = pd.concat([named, named[[o]]], axis=1)
        with pytest.raises(UserError, match=f"column '{o}' is there more than once: give each a name of its own") as e: hf_dls(twice, tok, valid='is_valid')
        assert '\n' not in str(e.value)
    levels = df.set_axis(pd.MultiIndex.from_tuples([('a', 't'), ('a', 'l'), ('b', 'v')]), axis=1)
    with pytest.raises(UserError, match=r"have several levels, as \('a', 't'\): give them one"): hf_dls(levels, tok, text_col=[('a', 't')], label_col=[('a', 'l')])


@pytest.mark.parametrize('column', [pd.Series([1, 0, 1]).astype('category'), pd.Series([np.array([1, 0]), np.array([0]), np.array([1])]), pd.Series([list(np.array([1, 0])), [], []])], ids=['category', 'arrays', 'lists'])
def test_names_of_labels_are_plain_numbers(column):
    "As JSON can hold them: a Learner is exported with them, and `predict` shows them"
    assert [(o, type(o)) for o in labels_of(pd.DataFrame(dict(label=column)), 'label', [True]*3)[1]] == [(0, int), (1, int)]

"Text sources: what is given, what is refused, what stays the same"
import re, socket, subprocess, sys, warnings

import pytest

from fastbench.machine.download import DataUnavailable
from fastbench.errors import UserError
from fastbench.text import sources as ts
from fastbench.text.docstrings import docstrings_of, group_texts, package_docstrings, packages
from fastbench.text.reviews import fingerprint, make_reviews, review_lengths
from fastbench.text.sources import (Texts, families, load_text_source, read_table, read_text, source_tokenizer, split_texts,
                                    text_sources, train_tokenizer)


@pytest.fixture
def home(tmp_path, monkeypatch):
    "An empty cache, no archive of fastai's, no network"
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'home'))
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path/'fastai'))
    def no(*args, **kwargs): raise socket.gaierror(-2, 'Name or service not known')
    monkeypatch.setattr(socket, 'getaddrinfo', no)
    return tmp_path/'home'


@pytest.fixture
def imdb(home):
    "IMDB of 80 texts"
    for part in ('train', 'test'):
        for c in ('neg', 'pos'):
            (home/'data/imdb'/part/c).mkdir(parents=True)
            for i in range(20): (home/'data/imdb'/part/c/f'{i}_1.txt').write_text(f'{part} {c} {i} caf\u00e9', encoding='utf-8')
    return home/'data/imdb'


@pytest.fixture
def wiki(home):
    "WikiText-2 of six articles"
    f = home/'data/wikitext2'
    f.mkdir(parents=True)
    for part,n in (('train', 4), ('test', 2)): (f/f'{part}.csv').write_text(''.join(f'" \n = Title {i} = \n \n Some <unk> ""words"" , NA . \n"\n' for i in range(n)))
    return f


def one_line(e): assert '\n' not in str(e.value), str(e.value); return str(e.value)


# --- sources

def test_every_source_says_what_it_is():
    for o in text_sources.values():
        assert o.version and len(o.origin) > 30 and o.n_classes in (2, 10, None) and o.words in ('prose', 'split')
        assert not text_sources[o.fallback].url and bool(o.url) != (o.name in ('docstrings', 'reviews', 'reviews-25k'))
        assert o.real == (not o.n)


@pytest.mark.parametrize('name', ['imbd', 'auto:imbd', '', None, 3])
def test_unknown_source(name):
    with pytest.raises(UserError, match='unknown text source') as e: load_text_source(name)
    assert 'docstrings' in one_line(e) and (name != 'imbd' or "did you mean 'imdb'" in str(e.value))


@pytest.mark.parametrize('kwargs,said', [(dict(split='half'), 'split'), (dict(sample=0), 'sample'), (dict(sample=2), 'sample'), (dict(sample=True), 'sample'),
                                         (dict(n=3), 'n=3'), (dict(n=True), 'n=True')])
def test_bad_argument(kwargs, said):
    with pytest.raises(UserError, match=said) as e: load_text_source('reviews', **kwargs)
    one_line(e)
    with pytest.raises(UserError, match='sample=.1'): load_text_source('docstrings', n=100)


@pytest.mark.parametrize('name', ['imdb', 'wikitext2'])
@pytest.mark.parametrize('offline', [True, False])
def test_lost_network_is_said_at_once(home, name, offline):
    with pytest.raises(DataUnavailable) as e: load_text_source(name, offline=offline)
    assert all(o in one_line(e) for o in ('docstrings', 'reviews', name, str(home)))


def test_auto_takes_another_and_says_so(home):
    with pytest.warns(UserWarning, match="'reviews' in place of 'imdb'"): got = load_text_source('auto', offline=True)
    assert got.info['name'] == 'reviews' and got.info['fallback'] == 'imdb' and got.info['asked'] == 'auto' and got.info['synthetic']


def test_imdb_as_published(imdb):
    got = load_text_source('imdb', offline=True)
    assert got.classes == ['neg', 'pos'] and (len(got.train), len(got.valid), got.test) == (40, 40, None)
    assert all(t.startswith(f'train {got.classes[y]}') and t.endswith('caf\u00e9') for t,y in zip(got.train.texts, got.train.labels))
    assert all(t.startswith(f'test {got.classes[y]}') for t,y in zip(got.valid.texts, got.valid.labels))


def test_imdb_sample_is_stratified_and_seeded(imdb):
    a,b,c = (load_text_source('imdb', sample=.2, seed=s) for s in (42, 42, 1))
    assert sorted(a.train.labels) == sorted(a.valid.labels) == [0]*4+[1]*4
    assert a.train.texts == b.train.texts != c.train.texts and set(a.train.texts) != set(c.train.texts)


def test_pooled_is_a_partition(imdb):
    got = load_text_source('imdb', split='pooled', seed=123)
    parts = [got.train, got.valid, got.test]
    assert [len(o) for o in parts] == [56, 8, 16] and len({t for o in parts for t in o.texts}) == 80
    assert any('test' in t for t in got.train.texts) and all(got.classes[y] in t.split() for o in parts for t,y in zip(o.texts, o.labels))
    assert load_text_source('imdb', split='pooled', seed=1).test.texts != got.test.texts
    assert len({sum(load_text_source('imdb', split='pooled', seed=s).test.labels) for s in range(5)}) > 1 # shuffled, not stratified


def test_bad_byte_names_the_file(imdb):
    (imdb/'test/pos/3_1.txt').write_bytes(b'good \xff')
    with pytest.raises(UserError, match=r'3_1\.txt.*0xff at position 5') as e: load_text_source('imdb')
    one_line(e)


def test_only_what_is_sampled_is_read(imdb, monkeypatch):
    read = []
    monkeypatch.setattr(ts, 'read_text', lambda o: read.append(o) or 'x')
    load_text_source('imdb', sample=.1)
    assert len(read) == 8


def test_imdb_incomplete(imdb):
    for o in (imdb/'test/neg').iterdir(): o.unlink()
    with pytest.raises(DataUnavailable, match='test/neg') as e: load_text_source('imdb')
    one_line(e)


def test_wikitext(wiki):
    got = load_text_source('wikitext2', offline=True)
    assert got.classes is None and got.train.labels is None and (len(got.train), len(got.valid)) == (4, 2)
    assert got.train.texts[1].split() == '= Title 1 = Some <unk> "words" , NA .'.split() and got.info['n_classes'] is None
    assert len(load_text_source('wikitext2', sample=.5).train) == 2
    (wiki/'test.csv').unlink()
    with pytest.raises(DataUnavailable, match=r'test\.csv'): load_text_source('wikitext2')


# --- files

@pytest.mark.parametrize('content,said', [(b'', 'empty'), (b'text,label\n', 'no row'), (b'a,b\n1,2\n', "column 'text'"), (b'text\n"a\n', 'not a table'),
                                          (b'text\ncaf\xe9\n', '0xe9 at position 8')])
def test_bad_table(tmp_path, content, said):
    (tmp_path/'t.csv').write_bytes(content)
    with pytest.raises(UserError, match=said) as e: read_table(tmp_path/'t.csv', 'text')
    assert 't.csv' in one_line(e)


def test_table_keeps_what_looks_missing(tmp_path):
    (tmp_path/'t.csv').write_text('text,label\nNA,1\n,2\nnull,3\n')
    assert read_table(tmp_path/'t.csv', 'text', 'label').text.tolist() == ['NA', '', 'null']


def test_byte_order_mark(tmp_path):
    (tmp_path/'t').write_bytes(b'\xef\xbb\xbfhello')
    assert read_text(tmp_path/'t') == 'hello'


# --- docstrings

def test_docstrings_are_built_once(home, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(ts, 'package_docstrings', lambda o: calls.append(o) or [f'{o} text number {i} has words of its own {i*7919}' for i in range(20)])
    a = load_text_source('docstrings')
    assert capsys.readouterr().err.count('\n') == 1
    b = load_text_source('docstrings', seed=1)
    assert calls == list(packages) and capsys.readouterr().err == ''
    assert a.info['fingerprint'] == b.info['fingerprint'] and set(a.info['versions']) == set(packages) and a.train.texts != b.train.texts
    assert sorted(a.valid.labels) == [i for i in range(10) for _ in range(4)]
    monkeypatch.setattr(ts, 'package_versions', lambda: dict(numpy='another'))
    load_text_source('docstrings')
    assert len(calls) == 20


def test_docstrings_damaged(home, monkeypatch):
    monkeypatch.setattr(ts, 'package_docstrings', lambda o: [f'{o} says so and so'])
    load_text_source('docstrings')
    next(home.glob('data/docstrings-*/texts.json')).write_text('{')
    with pytest.raises(DataUnavailable, match='remove that folder') as e: load_text_source('docstrings')
    one_line(e)


def test_docstrings_of_hostile_files(tmp_path):
    for i,b in enumerate([b'\xff\xfe', b'def f(:', b'\0', b'', b'"""one"""\ndef f():\n    "two"\nx = "three"']): (tmp_path/f'{i}.py').write_bytes(b)
    assert [docstrings_of(tmp_path/f'{i}.py') for i in range(5)] == [[], [], [], [], ['one', 'two']]
    assert docstrings_of(tmp_path/'none.py') == []


def test_package_docstrings_import_nothing():
    code = "import sys; from fastbench.text.docstrings import package_docstrings as f; n = len(f('networkx', 40)); print(n, 'networkx' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.split() == ['40', 'False', 'False']


def test_package_docstrings_are_apart_and_stay():
    a = package_docstrings('networkx', 60)
    assert a == package_docstrings('networkx', 60) and len({re.sub(r'\W+', ' ', o).lower() for o in a}) == 60 and min(len(o.split()) for o in a) >= 5


def test_groups_are_not_parted():
    texts = [f'text {i//3} '+' '.join(f'w{i//3*50+j}' for j in range(40))+(' more words' if i%3 else '') for i in range(300)]
    groups = group_texts(texts)
    assert groups == [i//3*3 for i in range(300)]
    train,valid = split_texts(Texts(texts, [i//3%2 for i in range(300)], groups), [.2], 42)
    assert len(train)+len(valid) == 300 and not set(train.groups) & set(valid.groups) and 54 <= len(valid) <= 60


def test_a_group_too_large_for_a_part_stays_out():
    got = split_texts(Texts(list(range(100)), None, [0]*50+list(range(50, 100))), [.2], 42)
    assert [len(o) for o in got] == [80, 20] and 0 not in got[1].groups


def test_texts_that_share_less_than_half_are_no_group():
    texts = [' '.join(f'w{i//2}x{j if j < 25 else j+100*(i%2)}' for j in range(43)) for i in range(60)] # pairs share 22 of 58 runs
    assert group_texts(texts) == list(range(60)) and group_texts(texts, near=.3) != list(range(60))


def test_split_is_exact_and_seeded():
    x = Texts(list(range(1000)), [i%10 for i in range(1000)])
    a,b,c = split_texts(x, [.1, .2], 7)
    assert [len(o) for o in (a, b, c)] == [700, 100, 200] and sorted(a.texts+b.texts+c.texts) == x.texts
    assert [b.labels.count(i) for i in range(10)] == [10]*10 and a.texts == split_texts(x, [.1, .2], 7)[0].texts != split_texts(x, [.1, .2], 8)[0].texts


# --- reviews

def test_reviews_never_change():
    assert fingerprint(*make_reviews(100)) == '5d5c4fc56679' and fingerprint(*make_reviews(2000)) == FINGERPRINT


FINGERPRINT = 'a4b8c1743134'


@pytest.mark.parametrize('n', [10, 101, 2000])
def test_reviews_of_any_number(n):
    texts,labels = make_reviews(n)
    assert len(texts) == len(labels) == n and abs(sum(labels)-n/2) < 1
    assert sorted(len(o.split()) for o in texts) == review_lengths(n)
    assert all(t[0].isupper() and t[-1] in '.!?' for t in texts)


def test_reviews_n_and_seed():
    a,b = load_text_source('reviews', n=100), load_text_source('reviews', n=100, seed=1)
    assert a.info['fingerprint'] == b.info['fingerprint'] == '5d5c4fc56679' and a.train.texts != b.train.texts and a.info['n_train'] == 80
    assert a.info['synthetic'] and not a.info['real']


def test_fingerprint_tells_texts_apart():
    assert len({fingerprint(o) for o in (['ab', 'c'], ['a', 'bc'], ['abc'], ['ab', 'c', ''])}) == 4
    assert fingerprint(['\ud800']) and fingerprint(['a'], [1]) != fingerprint(['a'], [0])


# --- tokenizers

@pytest.fixture(scope='module')
def small(): return make_reviews(60)[0]


@pytest.mark.parametrize('family', list(families))
def test_tokenizer_of_each_family(home, small, family, tmp_path):
    from transformers import AutoTokenizer
    tok = train_tokenizer(small, 600, family)
    assert len(tok) == tok.info['vocab_size'] == 600 and tok.info['wanted'] is None
    one,two = tok('A good film', truncation=True), tok('A good film', 'not this one')
    ids = lambda o: tok.convert_ids_to_tokens(o['input_ids'])
    a,b = {'bert': ('[CLS]', '[SEP]'), 'roberta': ('<s>', '</s>')}.get('roberta' if family == 'roberta' else 'bert')
    if family == 'gpt2': assert not set(ids(two)) & set(tok.all_special_tokens) and tok.eos_token == '<|endoftext|>' and tok.pad_token is None
    else:
        assert ids(one)[0] == a and ids(one)[-1] == b and ids(two).count(b) == (3 if family == 'roberta' else 2)
        assert tok.pad_token_id == {'roberta': 1, 'modernbert': 3}.get(family, 0) and tok.mask_token
    assert ('token_type_ids' in two) == (family in ('bert', 'electra')) and 'attention_mask' in two
    assert tok.model_max_length == (1024 if family == 'gpt2' else 512)
    if family in ('bert', 'electra'): assert two['token_type_ids'] == [0]*len(one['input_ids'])+[1]*(len(two['input_ids'])-len(one['input_ids']))
    tok.save_pretrained(tmp_path/'t')
    again = AutoTokenizer.from_pretrained(tmp_path/'t')
    assert again(small[0], small[1])['input_ids'] == tok(small[0], small[1])['input_ids'] and again.model_input_names == tok.model_input_names


@pytest.mark.parametrize('family', ['bert', 'gpt2'])
def test_tokenizer_is_the_same_each_time(family):
    texts = make_reviews(500)[0]
    assert len({ts._train(texts, 2500, family).to_str() for _ in range(3)}) == 1


def test_tokenizer_is_trained_once(home, small, capsys, monkeypatch):
    a = train_tokenizer(small, 600, 'bert')
    assert capsys.readouterr().err.count('once') == 1
    monkeypatch.setattr(ts, '_train', None)
    assert train_tokenizer(small, 600, 'bert').get_vocab() == a.get_vocab() and capsys.readouterr().err == ''
    with pytest.raises(TypeError): train_tokenizer(small[:30], 600, 'bert')


def test_source_tokenizer_says_what_the_corpus_lacks(home):
    with pytest.warns(UserWarning, match='of the 30,522 that bert has'): tok = source_tokenizer('reviews', n=50)
    assert tok.info['wanted'] == 30522 and tok.info['source'] == 'reviews' and tok.info['vocab_size'] < 5000
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert source_tokenizer('reviews', vocab_size=500, n=50).info['wanted'] is None


@pytest.mark.parametrize('args,said', [((None, 'bart'), "did you mean 'bert'"), ((20, 'bert'), 'vocab_size=20'), ((True, 'bert'), 'vocab_size=True')])
def test_bad_tokenizer(home, small, args, said):
    with pytest.raises(UserError, match=said) as e: train_tokenizer(small, *args)
    one_line(e)


def test_tokenizer_takes_hostile_text(home):
    hostile = ['', ' ', '\x00\x07', '\U0001f600 emoji \u05e9\u05dc\u05d5\u05dd', 'x'*100_000, ''.join(map(chr, range(0x4e00, 0x4e00+1500)))]*2
    for f in ('bert', 'roberta'):
        tok = train_tokenizer(hostile, 400, f)
        assert all(tok(o)['input_ids'] for o in hostile)
    assert tok.decode(tok(hostile[3], add_special_tokens=False)['input_ids']) == hostile[3]

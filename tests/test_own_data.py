"Data of one's own: every format, what is refused and how, and what a Run says of them"
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from fastbench.bench.learner import bench_learner
from fastbench.bench.run import run_recipe
from fastbench.command.terminal import print_run
from fastbench.compare.ab import ab_recipes
from fastbench.compare.sides import differences, said
from fastbench.data.table import read_rows
from fastbench.errors import UserError
from fastbench.machine.download import DataUnavailable
from fastbench.data import fingerprint
from fastbench.data.images import own_images
from fastbench.data.place import is_path, own_name
from fastbench.data.texts import own_texts
from fastbench.recipe import as_dict, get_recipe
from fastbench.runs.record import Run
from fastbench.runs.store import save
from fastbench.text.sources import load_text_source
from fastbench.vision.data import vision_dls
from fastbench.vision.sources import load_source

pytestmark = pytest.mark.usefixtures('one_thread')
CLASSES = 'cat', 'dog', 'red fox'
IMAGES = dict(precision='fp32', size=8, bs=4, epochs=1, workers=0, batches=1)
TEXTS = dict(bs=4, epochs=1, batches=1, max_length=16)


def picture(path, n):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (12, 10), (n*37%256, n*11%256, n)).save(path)
    return path


def pictures(folder, n=5, classes=CLASSES, start=0):
    for c in classes:
        for i in range(n): picture(folder/c/f'{i}.png', start + i + 50*classes.index(c))
    return folder


def rows(n=6): return [dict(text=f'number {i} of the {c} texts here', label=c) for i in range(n) for c in ('good', 'bad')]


def write(df, path):
    df, kind = pd.DataFrame(df), path.suffix
    if kind == '.parquet': df.to_parquet(path)
    elif kind in ('.json', '.jsonl'): df.to_json(path, orient='records', lines=kind == '.jsonl')
    else: df.to_csv(path, index=False, sep='\t' if kind == '.tsv' else ',')
    return str(path)


def learner(recipe, **changes):
    learn = bench_learner(recipe, device='cpu', offline=True, **changes)
    return learn, learn.dls.info


def line(e):
    assert '\n' not in str(e.value), str(e.value)
    return str(e.value)


def images_of(dl): return [Path(o.x).name for o in dl.dataset.items] if hasattr(dl.dataset, 'items') else None


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch): monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path_factory.getbasetemp()/'home'))


# --- names and paths

@pytest.mark.parametrize('data', ['~/x', './x', '.', '..', 'a/b', '/a', './x.csv'])
def test_paths(data): assert is_path(data)


@pytest.mark.parametrize('data', ['digits', 'auto:imagenette', 'x.csv', 'own:x', '', None])
def test_names(data): assert not is_path(data)


def test_a_path_object_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path/'digits')
    assert get_recipe('digits-xresnet18', data=Path('digits')).data == './digits'
    assert vision_dls(Path('digits'), bs=2, size=8, device='cpu').info['name'] == 'own:digits'
    assert load_source(Path('digits'), 8).info == load_source('./digits', 8).info and load_source('digits').info['name'] == 'digits'  # a name is a source first


def test_a_bare_name_is_told_how_to_be_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path/'pictures')
    write(rows(), tmp_path/'reviews.csv')
    for load, name, what in ((load_source, 'pictures', 'folder'), (load_text_source, 'reviews.csv', 'file')):
        with pytest.raises(UserError, match=f"There is a {what} of that name here: that is data='./{name}'") as e: load(name)
        line(e)
    with pytest.raises(UserError, match='how a Run calls data'): load_source('own:pictures')


def test_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    pictures(tmp_path/'my pictures')
    assert load_source('~/my pictures', 8).info['name'] == 'own:my pictures'


# --- images through bench_learner

def test_folders_by_class(tmp_path):
    learn, info = learner('imagenette-xresnet18', data=str(pictures(tmp_path/'pictures')), **IMAGES)
    assert info['format'] == 'folders' and info['n_items'] == 15 and info['n_classes'] == 3 and (info['n_train'], info['n_valid']) == (12, 3)
    assert info['valid'] == .2 and 'each class' in info['held_out'] and info['fingerprint_of'] == 'contents' and len(info['fingerprint']) == 12
    assert list(learn.dls.vocab) == list(CLASSES) and info['size'] == 8
    learn.fit(1)


@pytest.mark.parametrize('held', ['valid', 'val', 'validation', 'test', 'Val'])
def test_folders_with_parts(tmp_path, held):
    pictures(tmp_path/'train')
    pictures(tmp_path/held, n=2, start=7)
    learn, info = learner('imagenette-xresnet18', data=str(tmp_path), **IMAGES)
    assert (info['n_train'], info['n_valid'], info['n_classes']) == (15, 6, 3) and info['held_out'] == f'folders train and {held}'
    assert {Path(o.x).parts[-3] for o in learn.dls.valid.dataset.items} == {held}


@pytest.mark.parametrize('kind', ['csv', 'tsv', 'parquet', 'jsonl', 'json'])
def test_a_table_of_files(tmp_path, kind):
    pictures(tmp_path/'files')
    df = pd.DataFrame([dict(id=i, image=f'files/{c}/{i}.png', animal=c) for c in CLASSES for i in range(5)])
    data = write(df, tmp_path/f'labels.{kind}')
    learn, info = learner('imagenette-xresnet18', data=data, label_col='animal', **IMAGES)
    assert info['format'] == kind and info['label_col'] == 'animal' and (info['n_train'], info['n_valid']) == (12, 3)
    learn.fit(1)


def test_tables_say_what_is_held_out(tmp_path):
    pictures(tmp_path)
    df = pd.DataFrame([dict(file=f'{c}/{i}.png', label=c, is_valid=i == 0, part=['test', 'val', 'train'][i % 3]) for c in CLASSES for i in range(5)])
    data = write(df, tmp_path/'labels.csv')
    for valid, n in ((None, 3), ('is_valid', 3), ('part', 6), (.4, 6)):
        info = learner('imagenette-xresnet18', data=data, valid=valid, **{**IMAGES, 'bs': 2})[1]
        assert info['n_valid'] == n and info['valid'] == (valid or 'is_valid'), valid
        assert info['n_items'] == (9 if valid == 'part' else 15)  # test is left alone


def test_the_formats_of_a_set_are_the_same_work(tmp_path):
    folder = pictures(tmp_path/'a'/'pictures')
    df = pd.DataFrame([dict(file=f'{c}/{i}.png', label=c) for c in CLASSES for i in range(5)])
    prints = {load_source(write(df.sample(frac=1, random_state=i), folder/f'labels.{k}'), 8).info['fingerprint'] for i, k in enumerate(('csv', 'jsonl'))}
    assert prints == {load_source(str(folder), 8).info['fingerprint']}
    outside = write(df.assign(file=[str(folder/o) for o in df.file]), tmp_path/'labels.csv')
    assert load_source(outside, 8).info['fingerprint'] in prints


def test_valid_may_lie_elsewhere(tmp_path):
    data, more = pictures(tmp_path/'pictures'), pictures(tmp_path/'more', n=2, start=9)
    info = load_source(str(data), 8, valid=str(more)).info
    assert info['valid'] == info['held_out'] == 'own:more'
    got = load_source(str(data), 8, valid=str(more))
    assert len(got.train) == 15 and len(got.valid) == 6
    pictures(data/'holdout', n=1)
    inside = load_source(str(data), 8, valid='holdout'), load_source(str(data), 8, valid=str(data/'holdout'))
    for o in inside: assert len(o.train) == 15 and len(o.valid) == 3 and o.classes == list(CLASSES)
    table = write([dict(file=f'{c}/0.png', label=c) for c in CLASSES], data/'held.csv')
    got = load_source(str(data), 8, valid=table)
    assert {o.x.name for o in got.valid} == {'0.png'} and len(got.valid) == 3 and all(o.x not in {v.x for v in got.valid} for o in got.train)


def test_other_parts_are_told(tmp_path):
    for o in ('train', 'valid', 'test'): pictures(tmp_path/o, n=2)
    with pytest.warns(UserWarning, match='not used, since train is to train with, valid to validate: test/cat/0.png and 5 more'): got = load_source(str(tmp_path), 8)
    assert len(got.train) == len(got.valid) == 6


def test_hostile_folders(tmp_path):
    folder = pictures(tmp_path/'a b ünï 🐱', classes=('k ät', "do'g", '日本'))
    for o in ('.DS_Store', 'Thumbs.db', 'k ät/.DS_Store', 'k ät/Thumbs.db', 'k ät/._0.png', '.hidden/cat/1.png', 'k ät/@eaDir/0.png', '__MACOSX/k ät/0.png', 'notes.txt'):
        (folder/o).parent.mkdir(parents=True, exist_ok=True)
        (folder/o).write_bytes(b'x')
    picture(folder/'k ät'/'deep'/'down'/'9.PNG', 3)
    os.symlink(folder, folder/'k ät'/'loop')
    os.symlink('self', folder/'self')
    (tmp_path/'elsewhere').mkdir()
    picture(tmp_path/'elsewhere'/'1.png', 4)
    os.symlink(tmp_path/'elsewhere', folder/'linked')
    got = load_source(str(folder), 8)
    assert got.classes == ["do'g", 'k ät', 'linked', '日本'] and got.info['n_items'] == 17
    if sys.platform == 'linux':
        bad = os.fsencode(str(folder)) + b'/k\xff'
        os.mkdir(bad)
        with open(folder/'k ät'/'0.png', 'rb') as f, open(bad + b'/1.png', 'wb') as t: t.write(f.read())
        got = load_source(str(folder), 8)
        assert len(got.classes) == 5 and json.dumps(run_recipe('digits-xresnet18', data=str(folder), device='cpu', **IMAGES).as_dict())


def test_numbers_are_in_order(tmp_path):
    assert load_source(str(pictures(tmp_path, classes=tuple('0 1 2 9 10'.split()))), 8).classes == '0 1 2 9 10'.split()


def test_the_size_is_that_of_most(tmp_path):
    pictures(tmp_path)
    assert vision_dls(str(tmp_path), bs=2, device='cpu').info['size'] == 10


# --- the split

def test_the_draw_is_the_seeds(tmp_path):
    folder = pictures(tmp_path/'a', n=10)
    def held(seed, where=folder, **kwargs): return sorted(o.x.relative_to(where).as_posix() for o in load_source(str(where), 8, seed=seed, **kwargs).valid)
    assert held(1) == held(1) != held(2) and len(held(1)) == 6 and len(held(1, valid=.5)) == 15
    assert held(1) == held(1, pictures(tmp_path/'elsewhere'/'b', n=10))
    assert load_source(str(folder), 8, seed=1).info['fingerprint'] == load_source(str(folder), 8, seed=2).info['fingerprint']


def test_a_share_may_be_written_in_per_cent(tmp_path):
    folder = pictures(tmp_path, n=10)
    assert get_recipe('imagenette-xresnet18', data=str(folder), valid='25%').valid == .25
    for o in (load_source(str(folder), 8, valid='40%').info, vision_dls(str(folder), size=8, bs=2, valid='40%', device='cpu').info):
        assert o['valid'] == .4 and o['held_out'] == '40% of each class, drawn by the seed'
    with pytest.raises(UserError, match='valid=1.5 cannot be: a share'): load_source(str(folder), 8, valid='150%')


def test_pooled_and_sample_keep_their_meaning(tmp_path):
    pictures(tmp_path/'train', n=8)
    pictures(tmp_path/'valid', n=2)
    info = vision_dls(str(tmp_path), size=8, bs=2, split='pooled', device='cpu').info
    assert (info['n_train'], info['n_valid'], info['valid']) == (24, 6, None) and info['held_out'] == '20% of all, drawn by the seed'
    info = vision_dls(str(tmp_path), size=8, bs=2, sample=.5, device='cpu').info
    assert (info['n_train'], info['n_valid'], info['n_items']) == (12, 3, 30)
    with pytest.raises(UserError, match="valid=0.5 has no effect with split='pooled'") as e: vision_dls(str(tmp_path), size=8, bs=2, split='pooled', valid=.5)
    line(e)


def test_a_folder_smaller_than_the_recipes_batch(tmp_path):
    changes = {k: v for k, v in IMAGES.items() if k != 'bs'}
    with pytest.warns(UserWarning, match='a batch of 64 was asked for, these data have 12 training images: batches of 12'):
        learn, info = learner('imagenette-xresnet18', data=str(pictures(tmp_path)), **changes)
    assert info['bs'] == learn.recipe.bs == 12
    with pytest.raises(UserError, match='bs=32 cannot be'): learner('imagenette-xresnet18', data=str(tmp_path), **changes, bs=32)


@pytest.mark.parametrize('valid', [0, 1, 1.5, -1, True, '', ' ', '0%', '100%', []])
def test_bad_shares(valid):
    with pytest.raises(UserError, match='valid=.* is a share between 0 and 1, a column') as e: get_recipe('imagenette-xresnet18', valid=valid)
    line(e)
    if valid not in ('', ' '):
        with pytest.raises(UserError, match='valid=.* cannot be: a share'): load_source('.', 8, valid=valid)


# --- texts through bench_learner

@pytest.mark.parametrize('kind', ['csv', 'tsv', 'parquet', 'jsonl', 'json'])
def test_a_table_of_texts(tmp_path, kind):
    learn, info = learner('docstrings-distilbert', data=write(rows(), tmp_path/f'reviews.{kind}'), **TEXTS)
    assert info['format'] == kind and (info['n_items'], info['n_classes'], info['n_train'], info['n_valid']) == (12, 2, 10, 2)
    assert (info['text_col'], info['label_col'], info['valid']) == ('text', 'label', .2) and list(learn.dls.vocab) == ['bad', 'good']
    learn.fit(1)


def test_a_format_is_no_other_work(tmp_path):
    assert len({load_text_source(write(rows(), tmp_path/f'r.{k}')).info['fingerprint'] for k in ('csv', 'tsv', 'parquet', 'jsonl', 'json')}) == 1


def test_folders_of_texts(tmp_path):
    for i, o in enumerate(rows()):
        for folder in ('flat', 'parts/train', 'parts/test'):
            f = tmp_path/folder/o['label']/f'{i}.txt'
            f.parent.mkdir(parents=True, exist_ok=True)
            f.write_text(f"\ufeff{o['text']} é", encoding='utf-8')
    info = learner('docstrings-distilbert', data=str(tmp_path/'flat'), **TEXTS)[1]
    assert (info['n_train'], info['n_valid']) == (10, 2)
    learn, info = learner('docstrings-distilbert', data=str(tmp_path/'parts'), **TEXTS)
    assert (info['n_train'], info['n_valid']) == (12, 12) and info['held_out'] == 'folders train and test'
    assert learn.dls.train.dataset.texts[0][0] != '\ufeff'
    (tmp_path/'parts/train/unsup').mkdir()
    (tmp_path/'parts/train/unsup/1.txt').write_text('x')
    (tmp_path/'parts/train/urls.txt').write_text('x')
    with pytest.warns(UserWarning, match='in no folder of a class: train/unsup/1.txt and 1 more'): assert load_text_source(str(tmp_path/'parts')).classes == ['bad', 'good']


def test_columns_of_texts(tmp_path):
    df = pd.DataFrame(dict(id=range(8), comment_of=['what somebody wrote of it']*8, stars=['5', '1']*4, split=['train', 'train', 'train', 'dev']*2))
    data = write(df, tmp_path/'a.csv')
    info = learner('docstrings-distilbert', data=data, label_col='stars', **TEXTS)[1]
    assert (info['text_col'], info['valid'], info['n_valid'], info['held_out']) == ('comment_of', 'split', 2, 'column split')
    got = own_texts(write(df.assign(title='so it is called, at some length'), tmp_path/'b.csv'), text_col='title', label_col='stars')
    assert set(got.items) == {'so it is called, at some length'}
    assert own_texts(write([dict(text=str(i), label=o) for i in range(3) for o in ('007', 'None', 'NA')], tmp_path/'c.csv')).classes == ['007', 'NA', 'None']
    assert own_texts(write([dict(text=str(i), label=o) for i in range(3) for o in (True, False)], tmp_path/'d.jsonl')).classes == ['False', 'True']


def test_pooled_texts_have_a_test_set(tmp_path):
    learn, info = learner('docstrings-distilbert', data=write(rows(20), tmp_path/'a.csv'), split='pooled', **TEXTS)
    assert (info['n_train'], info['n_valid'], info['n_test'], len(learn.dls.loaders)) == (28, 4, 8, 3) and '20% to test' in info['held_out']


def test_language_models_need_no_labels(tmp_path):
    words = ' '.join(f'word{i%7} and more' for i in range(200))
    (tmp_path/'book.txt').write_text('\n\n'.join([words]*5))
    for i in range(5):
        (tmp_path/'texts').mkdir(exist_ok=True)
        (tmp_path/'texts'/f'{i}.txt').write_text(words)
    table = write([dict(id=i, text=words) for i in range(5)], tmp_path/'texts.parquet')
    for data, kind in ((tmp_path/'book.txt', 'txt'), (tmp_path/'texts', 'folders'), (table, 'parquet')):
        learn, info = learner('docstrings-lstm', data=str(data), sample=1., bs=4, bptt=5, batches=1, epochs=1)
        assert (info['format'], info['n_items'], info['n_classes'], info['n_train'], info['n_valid']) == (kind, 5, None, 4, 1)
    learn.fit(1)


# --- what is refused, in one line each

def refuses(match, recipe='imagenette-xresnet18', error=UserError, **changes):
    with pytest.raises(error, match=match) as e: bench_learner(recipe, device='cpu', offline=True, **{**(IMAGES if recipe == 'imagenette-xresnet18' else TEXTS), **changes})
    return line(e)


def test_what_is_not_there(tmp_path):
    refuses("data='.*no such' is not there", error=DataUnavailable, data=str(tmp_path/'no such'))
    refuses("data='.*no such' is not there", 'docstrings-distilbert', error=DataUnavailable, data=str(tmp_path/'no such'))
    refuses("valid='.*no such' is not there", error=DataUnavailable, data=str(pictures(tmp_path)), valid=str(tmp_path/'no such'))
    refuses('data=.* is not there', error=DataUnavailable, data='./a\0b')


def test_bad_folders(tmp_path):
    (tmp_path/'empty').mkdir()
    refuses('has no images: no file in it ends in .jpg.*put them into CLASS/ or train/CLASS/', data=str(tmp_path/'empty'))
    refuses('has no texts: no file in it ends in .txt', 'docstrings-distilbert', data=str(tmp_path/'empty'))
    refuses('no folders of classes: put them into CLASS/', data=str(pictures(tmp_path/'one')/'cat'))
    refuses('own:only has one class only, cat', data=str(pictures(tmp_path/'only', classes=('cat',))))
    refuses('nothing to validate with: none of its 3 classes has two items', data=str(pictures(tmp_path/'single', n=1)))
    pictures(tmp_path/'parts'/'train', classes=('cat', 'dog'))
    pictures(tmp_path/'parts'/'valid')
    refuses('own:parts: class red fox has no items to train with', data=str(tmp_path/'parts'))
    for o in ('train', 'test'): pictures(tmp_path/'inside'/'cat'/o, classes=('x',))
    refuses('inside/cat has test and train in it: parts are looked for at the top', data=str(tmp_path/'inside'))
    refuses("unknown folder 'dogg'; did you mean 'dog'", data=str(pictures(tmp_path/'p')), valid='dogg')
    refuses("label_col='x' has no effect: .* is a folder", data=str(tmp_path/'p'), label_col='x')
    os.symlink('gone', tmp_path/'p'/'cat'/'9.png')
    refuses('9.png is a link to a file that is not there', data=str(tmp_path/'p'))


def test_bad_tables_of_files(tmp_path):
    pictures(tmp_path)
    df = pd.DataFrame([dict(file=f'{c}/{i}.png', animal=c, colour='red') for c in CLASSES for i in range(5)])
    data = write(df, tmp_path/'a.csv')
    refuses('a.csv: which column has the labels\\? Say it by --label-col NAME .*: file, animal, colour', data=data)
    refuses("a.csv: unknown column 'animals'; did you mean 'animal'", data=data, label_col='animals')
    refuses("a.csv: unknown column 'vaild'", data=data, label_col='animal', valid='vaild')
    refuses("row 1 has 'red' in column colour", data=data, label_col='animal', valid='colour')
    refuses('own:a.csv has one class only, red', data=data, label_col='colour')
    refuses('a.csv: row 2 has no label', data=write(df.assign(animal=['cat', None]+['dog']*13), tmp_path/'a.csv'), label_col='animal')
    refuses('row 3 names cat/nine.png, which is not there, looked for beside a.csv', label_col='animal',
            data=write(df.assign(file=[*df.file[:2], 'cat/nine.png', *df.file[3:]]), tmp_path/'a.csv'))
    refuses('no column has names of images', data=write(df.drop(columns='file'), tmp_path/'a.csv'))
    (tmp_path/'b.csv').write_text('file;label\ncat/1.png;cat\n')
    refuses('semicolons|no column has names', data=str(tmp_path/'b.csv'))
    (tmp_path/'c.zip').write_bytes(b'PK')
    refuses('c.zip is not a table that can be read: its name ends in none of .csv', data=str(tmp_path/'c.zip'))


@pytest.mark.parametrize('col,values,says', [('split', ['train', 'holdout'], "row 1 has 'holdout' in column split"), ('is_valid', ['N', 'Y'], "row 1 has 'Y' in column is_valid"), ('is_valid', [True]*2, 'is_valid leaves nothing to train with')])
def test_a_column_that_should_say_what_is_held_out_is_not_passed_over(tmp_path, col, values, says):
    "A share would be drawn from rows that were put aside"
    df = pd.DataFrame(rows())
    data = write(df.assign(**{col: [values[i % 4 == 0] for i in range(len(df))]}), tmp_path/'a.csv')
    error = refuses(f'{says}.*To have a share drawn instead, say so', 'docstrings-distilbert', data=data)
    assert len(error.splitlines()) == 1
    assert load_text_source(data, valid=.25).info['held_out'] == '25% of each class, drawn by the seed'
    (tmp_path/'cat').mkdir(), (tmp_path/'cat/1.png').touch()
    with pytest.raises(UserError, match=says): own_images(write(pd.DataFrame(dict(file=['cat/1.png']*8, label=['cat', 'dog']*4, **{col: [values[i % 4 == 0] for i in range(8)]})), tmp_path/'b.csv'))


def test_a_column_of_the_trained_part_alone_says_nothing(tmp_path):
    data = write(pd.DataFrame(rows()).assign(split=' train'), tmp_path/'a.csv')
    assert load_text_source(data).info['held_out'] == '20% of each class, drawn by the seed'


def test_bad_tables_of_texts(tmp_path, monkeypatch):
    bert, df = 'docstrings-distilbert', pd.DataFrame(rows())
    refuses("unknown column 'txt'; did you mean 'text'", bert, data=write(df, tmp_path/'a.csv'), text_col='txt')
    refuses('which column has the texts\\? Say it by --text-col NAME', bert, data=write(df.rename(columns=dict(text='a')).assign(b=df.text), tmp_path/'a.csv'))
    refuses('row 2 has no label', bert, data=write(df.assign(label=['good', None]+['bad']*10), tmp_path/'a.jsonl'))
    refuses('row 1 has no text', bert, data=write(df.assign(text=[None]+['x']*11), tmp_path/'a.csv'))
    refuses('a.csv: column split leaves nothing to train with', bert, data=write(df.assign(split='valid'), tmp_path/'a.csv'), valid='split')
    for name, content in (('e.csv', b''), ('f.csv', b'text,label\n'), ('g.csv', b'text\ncaf\xe9\n'), ('h.jsonl', b'{'), ('i.json', b'3'), ('j.parquet', b'x'), ('k.csv', b'a,b\n1,2,3,4\n"')):
        (tmp_path/name).write_bytes(content)
        refuses(f'{name}.*(cannot be read|has no row|not UTF-8|which column)', bert, data=str(tmp_path/name))
    (tmp_path/'a.txt').write_text('x')
    refuses('a.txt has no labels: only a language model', bert, data=str(tmp_path/'a.txt'))
    data = write(df, tmp_path/'a.parquet')
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    assert "pip install 'fastbench[table]'" in refuses('Parquet needs pyarrow', bert, data=data)


def test_lines_of_json_end_at_a_line_feed_alone(tmp_path):
    "A text may hold other signs that end a line, which JSON need not escape"
    odd = [f'a{o}b' for o in '\u2028\u2029\x85\x1c']
    (f := tmp_path/'a.jsonl').write_text('\n'.join(json.dumps(dict(text=o), ensure_ascii=False) for o in odd) + '\r\n', encoding='utf-8', newline='')
    assert read_rows(f).text.tolist() == odd
    f.write_text('{"text": "x"}\n\n{"text": "y"\n')
    with pytest.raises(UserError, match='cannot be read: line 3: Expecting'): read_rows(f)


def test_too_little_that_is_left(tmp_path):
    df = pd.DataFrame(rows(20) + [dict(text='rare', label='rare')]*3)
    refuses('own:a.csv: no items of class rare are left to train with: use a larger sample', 'docstrings-distilbert', data=write(df, tmp_path/'a.csv'), sample=.1)
    pictures(tmp_path/'one', n=1)
    refuses('own:one: (no items of class .* are left to train with|nothing is left)', data=str(tmp_path/'one'), split='pooled', bs=1)


def test_fields_go_with_paths():
    refuses("label_col='x' has no effect with data='imagenette'", label_col='x')
    refuses("valid=0.3 has no effect with data='docstrings'", 'docstrings-distilbert', valid=.3)
    refuses('text_col=.* has no effect in this recipe: it goes with Transformer, LanguageModel', text_col='x')


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    folder = pictures(tmp_path/'pictures')
    def spoil(*numbers):
        for c in CLASSES:
            for i in numbers: (folder/c/f'{i}.png').write_bytes(b'no image')
    first = {o.x.name for o in load_source(str(folder), 8).train if o.x.parent.name == 'cat'}
    spoil(*(int(o[0]) for o in sorted(first)[1:]))  # fastai looks at the first image while it makes the data
    for workers in (0, 1):
        run = run_recipe('imagenette-xresnet18', data=str(folder), device='cpu', **{**IMAGES, 'workers': workers, 'batches': None})
        assert run.status == 'failed' and 'cannot read the image own:pictures/' in run.error, run.error
        assert str(tmp_path) not in json.dumps(run.as_dict())
    spoil(*range(5))
    run = run_recipe('imagenette-xresnet18', data=str(folder), device='cpu', **IMAGES)
    assert run.status == 'failed' and "image file 'own:pictures/cat/" in run.error and str(tmp_path) not in json.dumps(run.as_dict())
    refuses('cannot read the image .*0.png', data=str(folder), size=None)


def test_pickles_are_never_run(tmp_path):
    (tmp_path/'a.pkl').write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    refuses('not a table that can be read', 'docstrings-distilbert', data=str(tmp_path/'a.pkl'))


# --- what a Run says

def test_a_run_holds_no_path(tmp_path):
    data, more = pictures(tmp_path/'pictures'), pictures(tmp_path/'more', n=2)
    table = write([dict(file=str(data/c/f'{i}.png'), label=c) for c in CLASSES for i in range(5)], tmp_path/'labels.csv')
    texts = write(rows(), tmp_path/'reviews.jsonl')
    for recipe, changes in (('imagenette-xresnet18', dict(data=str(data), **IMAGES)), ('imagenette-xresnet18', dict(data=str(data), valid=str(more), **IMAGES)),
                            ('imagenette-xresnet18', dict(data=table, **IMAGES)), ('docstrings-distilbert', dict(data=texts, **TEXTS))):
        run = run_recipe(recipe, device='cpu', offline=True, **changes)
        assert run.status == 'ok' and str(tmp_path) not in json.dumps(run.as_dict()) and tmp_path.name not in str(run)
        assert run.recipe['data'] == run.data['name'] == own_name(changes['data']) and run.data['fingerprint'] in run.title and not run.asked
    assert run.recipe['valid'] == .2 and run.recipe['label_col'] == 'label' and '12 items in 2 classes' in run.title
    assert as_dict(get_recipe('imagenette-xresnet18', data=str(data), valid='./x'))['valid'] == 'own:x'


def test_published_figures_are_of_other_data(tmp_path, capsys):
    def shown(data): print_run(Run(recipe=dict(name='imagenette-xresnet18', data=data)))
    shown('own:pictures')
    assert 'published' not in capsys.readouterr().out
    shown('imagenette')
    assert 'published' in capsys.readouterr().out


def work(folder, **changes): return run_recipe('imagenette-xresnet18', data=str(folder), device='cpu', **{**IMAGES, **changes})


def test_what_is_the_same_work(tmp_path):
    here, there, other = pictures(tmp_path/'a'/'pictures'), pictures(tmp_path/'b'/'moved'), pictures(tmp_path/'c'/'pictures', start=1)
    a, b, c, half, again = work(here), work(there), work(other), work(here, valid=.5), work(here, seed=43)
    must, listed, _ = differences([a], [b])
    assert not must and 'data.name own:pictures / own:moved' in map(said, listed)
    assert [o['field'] for o in differences([a], [c])[0]] == ['data.fingerprint']
    assert {'valid', 'data.n_valid'} <= {o['field'] for o in differences([a], [half])[0]}
    assert not differences([a], [again])[0]
    assert not differences([a], [c], on=['data'])[0]


def test_how_data_are_written_down_is_no_work(tmp_path):
    folder = pictures(tmp_path/'pictures')
    df = pd.DataFrame([dict(file=f'{c}/{i}.png', label=c, kind=c, held=i == 0, kept=i == 0) for c in CLASSES for i in range(5)])
    table = write(df, folder/'a.csv')
    a, b, c = work(folder), work(table, label_col='label'), work(table, label_col='kind', valid=.2)
    assert not differences([a], [b, c])[0]
    one, two = (work(table, label_col='kind', valid=o) for o in ('held', 'kept'))
    assert not differences([one], [two])[0] and not differences([one], [two], on=['valid'])[0]
    assert 'valid' in [o['field'] for o in differences([a], [one])[0]]


def test_ab_sees_two_folders_of_one_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b, meant = ab_recipes('imagenette-xresnet18', both=dict(data='./a/x'), changes=dict(data='./b/x'))
    assert (a.data, b.data, meant) == ('./a/x', './b/x', ['data'])


@pytest.mark.parametrize('recipe,changes', [('imagenette-timm_resnet50', dict(arch='resnet18')), ('cifar100-resnet18', dict(pretrained=False)), ('dawn-main', {}), ('dawn-ten-epochs', {}), ('photos-xresnet18', dict(augment='batch'))])
def test_every_kind_of_image_training(tmp_path, recipe, changes):
    folder = pictures(tmp_path/'pictures', n=8)
    run = run_recipe(recipe, device='cpu', offline=True, data=str(folder), **{**IMAGES, 'size': 32, 'target': None, 'compile': False, **changes})
    assert run.status == 'ok' and run.data['n_items'] == 24 and run.data['n_train'] + run.data['n_valid'] == 24, run.error


def test_contents_count(tmp_path):
    def mark(folder, text):
        for c in 'ab':
            for i in range(2):
                (tmp_path/folder/c).mkdir(parents=True, exist_ok=True)
                (tmp_path/folder/c/f'{i}.txt').write_text(text)
        return load_text_source(str(tmp_path/folder)).info['fingerprint']
    assert mark('x', 'one') == mark('y', 'one') != mark('z', 'two')


def test_large_sets_go_by_names_and_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, 'WHOLE', 10)
    a, b = (load_source(str(pictures(tmp_path/o/'x')), 8).info for o in 'ab')
    assert a['fingerprint_of'] == 'names and sizes' and a['fingerprint'] == b['fingerprint']
    picture(tmp_path/'a'/'x'/'cat'/'more.png', 1)
    assert load_source(str(tmp_path/'a'/'x'), 8).info['fingerprint'] != b['fingerprint']


# --- the command line

def fastbench(*args, cwd, code=0):
    env = {k: v for k, v in os.environ.items() if k != 'FASTBENCH_OUT'} | dict(PYTHONPATH=str(Path(__file__).resolve().parent.parent), OMP_NUM_THREADS='1')
    got = subprocess.run([sys.executable, '-m', 'fastbench', *args], capture_output=True, text=True, cwd=cwd, env=env)
    assert got.returncode == code, got.stdout[-2000:] + got.stderr[-2000:]
    return got


def test_on_the_command_line(in_process, tmp_path):
    pictures(tmp_path/'a'/'pictures')
    pictures(tmp_path/'b'/'pictures', start=1)
    small = '--epochs 1 --batch-size 4 --precision fp32 --set size=8 --workers 0 --batches 1 --device cpu'.split()
    def run(where, *args, code=0):
        got = in_process('run', 'imagenette-xresnet18', '--data', './pictures', *small, '--json', *args, cwd=where)
        assert got.returncode == code, got.stdout[-2000:] + got.stderr[-2000:]
        return got
    def kept(where, *args): return where/json.loads(run(where, *args).stdout)[0]['path']
    a, b = kept(tmp_path/'a', '--valid', '40%'), kept(tmp_path/'b', '--valid', '.4')
    got = json.loads(a.read_text())
    assert got['recipe']['data'] == 'own:pictures' and got['data']['n_valid'] == 6 and got['recipe']['valid'] == .4 and str(tmp_path) not in a.read_text()
    os.rename(tmp_path/'a'/'pictures', tmp_path/'pictures')
    moved = kept(tmp_path, '--valid', '.4')
    got = fastbench('compare', a, b, cwd=tmp_path, code=3)
    assert 'not comparable' in got.stderr and 'data.fingerprint' in got.stderr
    fastbench('compare', a, moved, cwd=tmp_path)
    got = run(tmp_path, '--label-col', 'x', code=2)
    assert got.stderr.count('fastbench: ') == 1 and '--label-col x has no effect' in got.stderr

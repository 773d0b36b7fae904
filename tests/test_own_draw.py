"Loaders of a user's own training made faster by a switch: `fastbench ab train.py --set fast_images=true`"
import pytest
from PIL import Image

from fastbench.bench.learner import bench_learner
from fastbench.command.doctor import _takes
from fastbench.command.options import field
from fastbench.compare.runs import compare
from fastbench.draw.affine import BatchAffine
from fastbench.draw.cached import CachedItems
from fastbench.draw.diagnose import InputDiagnosis, Remedies, Stalls, Stations, remedies
from fastbench.draw.loader import PoolDL
from fastbench.draw.workers import WatchedPoolDL
from fastbench.errors import UserError
from fastbench.bench.run import run_recipe
from fastbench.own.kind import Function
from fastbench.recipe import check_field, get_recipe
from test_cli import command

pytestmark = pytest.mark.usefixtures('one_thread')

TRAIN = '''
from pathlib import Path
from fastai.vision.all import *

def kind(o): return o.parent.name

def make(bs=4, size=16, tfms=True, cache='mine'):
    here = Path(__file__).parent/'photos'
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=kind, splitter=IndexSplitter(range(4)), item_tfms=Resize(size),
                      batch_tfms=aug_transforms() if tfms else None)
    dls = block.dataloaders(here, bs=bs, num_workers=0)
    return Learner(dls, nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

def other(bs=4): return make(bs)
'''


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    d = tmp_path_factory.mktemp('mine')
    for i in range(12):
        path = d/'photos'/'ab'[i % 2]/f'{i}.jpg'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (40, 30), (20*i, 5, 9)).save(path)
    (d/'train.py').write_text(TRAIN)
    return d


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch): monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path))


def learner(home, name='other', **changes): return bench_learner(f'{home}/train.py:{name}', device='cpu', **changes)


def test_images_are_drawn_by_threads(home):
    assert not isinstance(learner(home).dls.train, PoolDL)
    learn = learner(home, fast_images=True)
    assert all(type(o) is PoolDL for o in learn.dls.loaders)
    apart = learner(home, fast_images='process')
    assert all(type(o) is WatchedPoolDL and o.fake_l.num_workers == 1 for o in apart.dls.loaders)
    assert [y.tolist() for _, y in apart.dls.valid] == [y.tolist() for _, y in learn.dls.valid]


def test_batch_transforms_are_the_faster_ones(home):
    fs = learner(home, fast_augment=True).dls.train.after_batch.fs
    assert any(isinstance(o, BatchAffine) for o in fs)


@pytest.mark.parametrize('cache', ['items', 'whole'])
def test_a_cache(home, cache):
    learn = learner(home, cache=cache)
    assert isinstance(learn.dls.train.dataset, CachedItems)
    both = learner(home, cache='items', fast_images=True)
    assert isinstance(both.dls.train, PoolDL) and isinstance(both.dls.train.dataset, CachedItems)


def test_a_parameter_of_that_name_belongs_to_the_function(home):
    learn = learner(home, 'make', cache='whole')
    assert learn.recipe.cache == 'whole' and not isinstance(learn.dls.train.dataset, CachedItems)


def test_what_does_not_apply_is_refused(home):
    with pytest.raises(UserError, match='none of these batch transforms'): learner(home, 'make', tfms=False, fast_augment=True)
    with pytest.raises(UserError, match='fast_images .*True or False'): learner(home, fast_images='threads')


def test_runs_with_and_without_are_compared(home):
    runs = [run_recipe(f'{home}/train.py:other', device='cpu', fast_images=o) for o in (False, True)]
    assert all(o.status == 'ok' for o in runs)
    assert 'fast_images' in str(compare(*[[o] for o in runs], on='fast_images'))


def row(**changes): return dict(name='decoding by threads', line='learn.fast_images()', step=.1, gain=1.5, why=None, changes=['fast_images=true', 'loader=threads']) | changes


def diagnosis(waits, *remedies):
    stalls = [dict(part='compute', what='', of='', step=1-waits, more=1-waits, share=1-waits), dict(part='items', what='', of='', step=1., more=waits, share=waits)]
    return InputDiagnosis(Stalls(stalls), Stations([]), Remedies(list(remedies)))


def test_the_best_remedy():
    none, small, good = row(step=None, gain=None, why='no'), row(gain=1.02), row(gain=1.3)
    assert diagnosis(.3, none, small, good).best is good
    assert diagnosis(.3, none, small).best is None and diagnosis(.05, good).best is None
    assert 'decoding by threads: no' in str(diagnosis(.3, none))


def test_each_remedy_names_a_field_that_a_function_has():
    changes = [o.changes[0] for o in remedies if len(o.changes) and not o.changes[0].startswith('workers')]
    assert len(changes) == 4
    for k, v in map(field, changes): assert check_field(Function, k, v) != Function.__dataclass_fields__[k].default


@pytest.mark.parametrize('recipe, takes', [('photos-xresnet18', ['workers', 'loader=threads', 'loader=process', 'cache=array loader=whole']),
                                           ('scale-as-it-was', ['workers', 'cache=array loader=whole']), ('docstrings-lstm', [])])
def test_a_recipe_proves_a_remedy_by_its_own_fields(recipe, takes):
    changes = [c.format(cores=2) for o in remedies for c in o.changes]
    assert [o.removesuffix('=2') for o in changes if _takes(get_recipe(recipe), o)] == takes


def test_doctor_says_how_to_prove_it(home, monkeypatch, capsys):
    from fastai.learner import Learner
    monkeypatch.setattr(Learner, 'diagnose_input', lambda *_: diagnosis(.3, row()), raising=False)
    code, out, err = command(monkeypatch, capsys, 'doctor', home/'train.py:other', '--set', 'bs=2')
    assert not code and err.splitlines()[-1] == f'to prove it: fastbench ab {home}/train.py:other --set fast_images=true --both bs=2'

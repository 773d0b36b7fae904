"The stations of a loader: timed in whatever process they are, and gone after the block, however it ended."
import json
import multiprocessing

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.data.transforms import Normalize, RandomSplitter, get_image_files, parent_label
from fastai.learner import Learner
from fastai.vision.augment import RandomResizedCrop, aug_transforms
from fastai.vision.core import PILImage
from fastai.vision.data import CategoryBlock, ImageBlock
from fasttransform import Transform
from PIL import Image
from torch import nn

from fastbench.measure import profiler  # adds Learner.profile
from fastbench.measure.phases import from_dict, notes, rows, to_dict
from fastbench.measure.stations import Timed, timed_stations


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp('images')
    for i in range(40):
        to = root/'ab'[i%2]/f'{i}.jpg'
        to.parent.mkdir(exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (60, 80, 3), 'u1')).save(to)
    return root


def make(folder, workers=0, **kwargs):
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label, splitter=RandomSplitter(seed=1),
                      item_tfms=RandomResizedCrop(32), batch_tfms=[*aug_transforms(), Normalize.from_stats([.5]*3, [.5]*3, cuda=False)])
    return block.dataloaders(folder, bs=8, num_workers=workers, device='cpu', **kwargs)


def learner(dls): return Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*32*32, 2)), loss_func=nn.CrossEntropyLoss())


def fit(learn, n=1, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, **kwargs)
    return learn


def by_name(rows): return {r['station']: r for r in rows}


@pytest.mark.parametrize('workers', [0, 1, 2])
def test_every_station_is_seen_wherever_it_is(folder, workers):
    dls = make(folder, workers)
    with timed_stations(dls.train) as ledger: n = len([*dls.train])
    got = by_name(ledger.rows())
    assert got['RandomResizedCrop']['calls'] == got['PILBase.create']['calls'] == got['parent_label']['calls'] == 8*n
    assert got['PILBase.create']['where'] == 'decode' and got['parent_label']['where'] == 'label'
    assert got['read']['calls'] == 8*n - max(1, workers)  # the first file of each process is not told apart
    assert got['collate']['calls'] == got['Normalize']['calls'] == n
    assert ledger.processes == max(1, workers) and sum(r['share'] for r in ledger.rows()) == pytest.approx(1)


def test_rows_add_up_to_what_making_the_batches_took(folder):
    dls = make(folder)
    with timed_stations(dls.train) as ledger: [*dls.train]
    inside = sum(r['total'] for r in ledger.rows() if r['where'] != 'batch')
    assert inside == pytest.approx(ledger.sums[0, -1, 0].item(), rel=1e-6)


def test_the_batches_are_the_same(folder):
    def draw(timed):
        torch.manual_seed(1), np.random.seed(1), __import__('random').seed(1)
        dls = make(folder)
        if not timed: return [*dls.train]
        with timed_stations(dls.train): return [*dls.train]
    for a, b in zip(draw(False), draw(True)): assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def as_it_was(dl):
    pipes = [dl.after_item, dl.before_batch, dl.after_batch, *(o.tfms for o in dl.dataset.tls)]
    return not {'create_batch', 'create_batches'} & set(vars(dl)) and not any(type(f) is Timed for p in pipes for f in p.fs)


class Stop(Callback):
    def __init__(self, error): self.error = error
    def after_batch(self):
        if self.iter == 1: raise self.error


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError('a mistake')])
def test_nothing_is_left_on_the_loader_however_a_fit_ends(folder, error):
    learn = learner(make(folder)).profile(loader=True)
    with pytest.raises(BaseException): fit(learn, cbs=Stop(error))
    assert as_it_was(learn.dls.train) and as_it_was(learn.dls.valid)
    fit(learn)
    assert as_it_was(learn.dls.train) and as_it_was(learn.dls.valid)


def test_a_loader_with_timed_stations_is_still_what_it_was(folder):
    dls = make(folder)
    with timed_stations(dls.train):
        norm = next(f for f in dls.train.after_batch.fs if isinstance(f, Normalize))
        assert norm.mean.shape == (1, 3, 1, 1) and isinstance(norm, Transform)
        again = dls.train.new(after_item=[], after_batch=[], dataset=dls.train_ds.items)
        assert not {'create_batch', 'create_batches'} & set(vars(again))  # methods are not handed on


def test_the_profiler_has_a_row_for_each_station_and_phase(folder):
    learn = fit(learner(make(folder, 1)).profile(loader=True), 2)
    got = rows(learn.profiler.profile)
    train = {r['action']: r for r in got if r['phase'] == 'loader'}
    valid = {r['action']: r for r in got if r['phase'] == 'valid loader'}
    assert train['RandomResizedCrop']['calls'] == 64 and valid['RandomResizedCrop']['calls'] == 16
    assert train['RandomResizedCrop']['mean'] == pytest.approx(train['RandomResizedCrop']['total']/64)
    assert any(o.startswith('loader: ') and '1 worker process' in o for o in notes(learn.profiler.profile))
    assert 'loader' in str(learn.profiler) and '"loader"' in learn.profiler.to_json()


def test_rows_of_a_loader_are_kept_in_a_run(folder):
    learn = fit(learner(make(folder)).profile(loader=True))
    back = from_dict(json.loads(json.dumps(to_dict(learn.profiler.profile))))
    assert [r['action'] for r in rows(back)] == [r['action'] for r in rows(learn.profiler.profile)]


def test_without_being_asked_nothing_is_timed(folder):
    learn = fit(learner(make(folder)).profile())
    assert 'loader' not in learn.profiler.profile.facts and not [r for r in rows(learn.profiler.profile) if 'loader' in r['phase']]


def test_any_loader_of_fastai_is_taken():
    items = [(torch.zeros(3), 0) for _ in range(8)]
    dls = DataLoaders(*(DataLoader(items, bs=4) for _ in range(2)))
    with timed_stations(dls.train) as ledger: [*dls.train]
    assert [r['station'] for r in ledger.rows()] == ['collate', 'the rest']


class Fails(Transform):
    def encodes(self, o:PILImage): raise OSError('no such thing')


def test_an_error_inside_is_the_users_own(folder):
    dls = make(folder)
    dls.train.after_item.add(Fails())
    with pytest.raises(OSError, match='no such thing'), timed_stations(dls.train): [*dls.train]
    assert as_it_was(dls.train)


@pytest.mark.parametrize('threads', [0, 2])
def test_a_loader_with_threads_tells_its_own_stations(folder, threads):
    from fastbench.draw.fast import fast_images
    dls = fast_images(make(folder), threads=threads)
    with timed_stations(dls.train) as ledger: n = len([*dls.train])
    got = by_name(ledger.rows())
    assert got['decode and crop']['calls'] == got['read']['calls'] == got['targets']['calls'] == 8*n and got['Normalize']['calls'] == n
    assert dls.train.told is None and as_it_was(dls.train)


@pytest.fixture
def spawn():
    multiprocessing.set_start_method('spawn', force=True)
    yield
    multiprocessing.set_start_method(None, force=True)


@pytest.mark.parametrize('processes', [0, 1])
def test_worker_processes_that_are_not_forked_are_timed_too(folder, spawn, processes):
    "As on macOS, on Windows, and anywhere with Python 3.14: it was a PicklingError"
    from fastbench.draw.fast import fast_images
    dls = make(folder, 1)
    if processes: dls = fast_images(dls, processes=1, threads=1)
    with timed_stations(dls.train) as ledger: n = len([*dls.train])
    got = by_name(ledger.rows())
    assert got['collate']['calls'] == got['Normalize']['calls'] == n and ledger.sums[1, -1, 1] >= n
    assert got['decode and crop' if processes else 'RandomResizedCrop']['calls'] == 8*n
    assert as_it_was(dls.train)

"What a step waits for: the arithmetic, that the Learner is left as it was, and what is refused."
import json
import os
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.core import DataLoaders, Datasets, TfmdDL
from fastai.data.load import DataLoader
from fastai.data.transforms import IntToFloatTensor, ToTensor
from fastai.learner import Learner
from fastai.vision.augment import Resize
from fastai.vision.core import PILImage
from fastai.vision.data import ImageDataLoaders
from PIL import Image
from torch import nn

from fastbench.draw import diagnose, pace  # adds Learner.diagnose_input
from fastbench.draw.diagnose import InputDiagnosis, Remedies, Remedy, Stalls, Stations, beside, fits_in_memory, remedies, stall_rows
from fastbench.draw.pace import Metronome, Pace, files_of, forget_files, host_loader, loader_pace, same_order, step_pace, together
from fastbench.errors import UserError
from fastbench.measure.stations import timed_stations


def loaders(n=64, bs=8, **kwargs):
    items = [(torch.full((4,), float(i)), i % 2) for i in range(n)]
    return DataLoaders(*(DataLoader(items, bs=bs, shuffle=i == 0, **kwargs) for i in range(2)))


def learner(dls=None): return Learner(dls or loaders(), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), loss_func=nn.CrossEntropyLoss())


def test_the_learner_is_left_as_it_was():
    learn = learner()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    before, opt = deepcopy(learn.model.state_dict()), deepcopy(learn.opt.state_dict())
    cbs, dls, rng, order = [*learn.cbs], learn.dls, random.getstate(), learn.dls.train.rng.getstate()
    state = torch.get_rng_state()
    learn.diagnose_input(1)
    assert all(torch.equal(v, before[k]) for k, v in learn.model.state_dict().items())
    assert str(opt) == str(learn.opt.state_dict()) and learn.dls is dls and [*learn.cbs] == cbs
    assert random.getstate() == rng and learn.dls.train.rng.getstate() == order and torch.equal(torch.get_rng_state(), state)


class Saves(Callback):
    def __init__(self): self.n = 0
    def after_epoch(self): self.n += 1
    def before_fit(self): self.n += 1


def test_callbacks_of_the_user_do_not_act():
    learn = learner()
    learn.add_cb(Saves())
    learn.diagnose_input(1)
    assert learn.saves.n == 0 and learn.opt is None


def test_what_it_found_can_be_read_in_every_form():
    found = learner().diagnose_input(1)
    assert [r['part'] for r in found.stalls.rows] == ['compute', 'batch', 'items']  # no file, and no device to copy to
    assert found.verdict.split(':')[0] in ('compute-bound', 'input-bound') and found.verdict in str(found)
    got = json.loads(found.to_json())
    assert set(got) == {'stalls', 'stations', 'remedies', 'verdict'} and '<table' in found._repr_html_()
    assert {r['name'] for r in got['remedies']} >= {'a worker for each core', 'twice the cores'}


def test_a_remedy_that_does_not_apply_says_why(monkeypatch):
    def no(learn): raise UserError('no pictures here')
    monkeypatch.setattr(diagnose, 'remedies', [Remedy('pictures', 'f()', no)])
    row = learner().diagnose_input(1).remedies.rows[-1]
    assert row['why'] and row['step'] is None


def test_a_remedy_that_fails_leaves_the_rest(monkeypatch):
    def breaks(learn): raise RuntimeError('sizes do not match\nand more of it')
    monkeypatch.setattr(diagnose, 'remedies', [Remedy('broken', 'f()', breaks), Remedy('the same', 'g()', lambda learn: learn.dls)])
    rows = {r['name']: r for r in learner().diagnose_input(1).remedies.rows}
    assert rows['broken']['why'] == 'it fails here: RuntimeError: sizes do not match' and rows['the same']['step']


def test_what_helps_beside_a_gpu_alone_is_not_tried_without_one(monkeypatch):
    assert [o.line for o in remedies if o.gpu] == ['learn.fast_images(processes=1)']
    def must_not(learn): raise AssertionError('tried')
    monkeypatch.setattr(diagnose, 'remedies', [Remedy('with a GPU', 'f()', must_not, gpu=True)])
    assert [r['name'] for r in learner().diagnose_input(1).remedies.rows] == ['twice the cores']


@pytest.mark.parametrize('n, says', [(16, 'an epoch has 2 batches'), (4, 'an epoch has')])
def test_too_few_batches_are_named(n, says):
    with pytest.raises(UserError, match=says): learner(loaders(n)).diagnose_input(1)


def test_another_librarys_loader_is_named():
    dl = torch.utils.data.DataLoader([(torch.zeros(4), 0)]*80, batch_size=8)
    learn = learner(DataLoaders(dl, dl))
    with pytest.raises(UserError, match=r'torch.utils.data.dataloader.DataLoader: learn.profile\(\)'): learn.diagnose_input(1)


# Arithmetic

def test_shares_add_up():
    rows = stall_rows(dict(compute=Pace(.01, 0, 1), transfer=Pace(.02, 0, 1), batch=Pace(.02, 0, 1), items=Pace(.03, 0, 1), disk=Pace(.05, 0, 1)))
    assert sum(r['share'] for r in rows) == pytest.approx(1) and [round(1000*r['more']) for r in rows] == [10, 10, 0, 10, 20]


def test_what_seems_faster_by_chance_adds_nothing():
    rows = stall_rows(dict(compute=Pace(.02, 0, 1), batch=Pace(.019, 0, 1), items=Pace(.0195, 0, 1)))
    assert [r['more'] for r in rows] == [.02, 0., 0.] and sum(r['share'] for r in rows) == pytest.approx(1)


@pytest.mark.parametrize('step, loader, is_beside, cores, expected', [
    (Pace(.1, .1, 1), Pace(.3, .3, 1), False, 8, .4), (Pace(.1, .1, 1), Pace(.3, .6, 1), True, 8, .3),
    (Pace(.3, .3, 1), Pace(.1, .2, 1), True, 8, .3), (Pace(.3, .6, 1), Pace(.1, .2, 1), True, 2, .4)])
def test_a_step_with_its_loader(step, loader, is_beside, cores, expected):
    assert together(step, loader, is_beside, cores) == pytest.approx(expected)


def test_paces_are_added_by_how_many_they_are_of():
    p = Pace(1., .5, 1) + Pace(2., 2., 3)
    assert (p.seconds, p.cpu, p.n) == (1.75, 1.625, 4)


def test_a_metronome_leaves_the_first_out_and_ends_in_time():
    tick = Metronome(0., skip=3, least=2)
    assert [tick() for _ in range(5)] == [False]*4 + [True] and tick.pace().n == 2
    assert Metronome(1.).pace() is None


@pytest.fixture
def clock(monkeypatch):
    "`clock.now` is what the metronome sees"
    class Clock: now = 0.
    monkeypatch.setattr(pace, 'perf_counter', lambda: Clock.now)
    return Clock


def pairs(tick, clock, n=100):
    "One batch at once, the next after ten seconds: two workers that finish together"
    for i in range(n):
        clock.now += 10 if i % 2 else 0
        if tick(): return True


@pytest.mark.parametrize('skip', [1, 2])
@pytest.mark.parametrize('seconds', [29, 41])
def test_whole_groups_are_counted(clock, skip, seconds):
    tick = Metronome(seconds, skip=skip, group=2)
    assert pairs(tick, clock) and tick.pace().seconds == 5 and tick.pace().n % 2 == 0


def test_a_loader_that_is_over_in_the_middle_of_a_group(clock):
    tick = Metronome(1000, skip=1, group=2)
    assert not pairs(tick, clock, n=8)
    assert (tick.pace().seconds, tick.pace().n) == (5, 6)


def test_the_end_of_workers_is_not_counted(clock, monkeypatch):
    tick = Metronome(20, skip=1)
    while not tick(): clock.now += 5
    clock.now += 1000
    assert tick.pace().seconds == 5


class EndsLate(list):
    "Batches whose workers take long to end"
    def __iter__(self):
        try: yield from super().__iter__()
        finally: self.clock.now += 1000


@pytest.mark.parametrize('n', [20, 1000])  # ended by the epoch, by the time
def test_a_fit_that_ends_its_workers_is_over_before_that(clock, n):
    class Net(nn.Linear):
        def forward(self, x):
            clock.now += 5
            return super().forward(x)
    train = EndsLate([(torch.ones(2, 1), torch.ones(2, 1))]*n)
    train.clock = clock
    learn = Learner(DataLoaders(train, []), Net(1, 1), loss_func=nn.MSELoss())
    assert step_pace(learn, train, 92.).seconds == 5


# Loaders

def test_the_order_is_the_same_each_time():
    dl = loaders().train
    first = [b[0][:, 0].tolist() for b in same_order(dl)]
    assert [b[0][:, 0].tolist() for b in same_order(dl)] == first and [b[0][:, 0].tolist() for b in dl] != first


def test_on_the_host_nothing_is_copied_or_transformed():
    dl = loaders(after_batch=lambda b: 1/0).train
    assert len([*host_loader(dl)]) == 8


def test_an_epoch_that_is_too_short_has_no_pace():
    assert loader_pace(loaders(8).train, .1) is None and loader_pace(loaders().train, .01).n >= 2


def test_workers_and_threads_are_beside():
    assert not beside(loaders().train) and beside(loaders(num_workers=1).train)


def test_files_are_found_among_the_items(tmp_path):
    paths = [tmp_path/f'{i}' for i in range(3)]
    for p in paths: p.write_bytes(b'x'*1000)
    class Files(list):
        items = [paths[0], str(paths[1]), (paths[2], 1), tmp_path/'gone', 3]
    assert files_of(DataLoader(Files(), bs=1)) == [paths[0], str(paths[1]), paths[2]]
    assert fits_in_memory(paths) and fits_in_memory([]) and not forget_files([])


# The verdict

def test_the_slowest_station_is_named_whatever_it_works_on():
    rows = stall_rows(dict(compute=Pace(.01, 0, 1), batch=Pace(.02, 0, 1), items=Pace(.03, 0, 1)))
    made = [dict(where='item', station='Resize', item=.001, each=.01, share=.1), dict(where='batch', station='Flip', item=None, each=.05, share=.5)]
    assert 'the slowest station is Flip, 50% of a batch' in InputDiagnosis(Stalls(rows), Stations(made), Remedies([])).verdict


def test_parts_of_what_waits_are_no_more_than_the_whole():
    "A step with the loader may seem faster, by chance, than one with less to do"
    rows = stall_rows(dict(compute=Pace(.048, 0, 1), batch=Pace(.1, 0, 1), items=Pace(.098, 0, 1)))
    d = InputDiagnosis(Stalls(rows), Stations([]), Remedies([]))
    assert d.waits == pytest.approx(.52) and '52% of a step waits for its input (transforming batches 52%)' in d.verdict


@pytest.mark.parametrize('whole', [True, False])
def test_a_cache_is_named_as_it_was_tried(monkeypatch, tmp_path, whole):
    "Whole batches would lose what a WeightedDL samples"
    for i in range(20): Image.fromarray(np.full((20, 20, 3), i, 'uint8')).save(tmp_path/f'{i}.png')
    dsets = Datasets(sorted(tmp_path.glob('*.png')), [[PILImage.create], [lone_label]], splits=[range(20), range(2)])
    cls = TfmdDL if whole else WeightedDL
    dls = dsets.dataloaders(dl_type=cls, bs=2, after_item=[Resize(8), ToTensor()], after_batch=[IntToFloatTensor()], num_workers=0, device='cpu')
    monkeypatch.setattr(diagnose, 'remedies', [o for o in remedies if 'cached' in o.line])
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), loss_func=nn.CrossEntropyLoss())
    row = next(r for r in learn.diagnose_input(1).remedies.rows if 'cached' in r['line'])
    assert row['step'] and (row['line'], row['changes']) == (('learn.dls = cached(learn.dls, whole=True)', ['cache=whole', 'cache=array loader=whole']) if whole
                                                             else ('learn.dls = cached(learn.dls)', ['cache=items', 'cache=array']))


def lone_label(o): return int(o.stem) % 2


def test_the_loader_that_is_measured_draws_what_the_learners_does(monkeypatch):
    items, drawn = [(torch.full((4,), float(i)), i % 2) for i in range(64)], []
    train = PartialDL(items, bs=4, partial_n=24, shuffle=True, num_workers=0, device='cpu')
    learn = learner(DataLoaders(train, TfmdDL(items[:8], bs=4, num_workers=0, device='cpu'), device='cpu'))
    def seen(learn, dl, *args):
        if hasattr(dl, 'partial_n'): drawn.append(dl)
        return step_pace(learn, dl, *args)
    def stations(dl): drawn.append(dl); return timed_stations(dl)
    monkeypatch.setattr(diagnose, 'step_pace', seen)
    monkeypatch.setattr(diagnose, 'timed_stations', stations)
    monkeypatch.setattr(diagnose, 'remedies', [o for o in remedies if 'num_workers' in o.line])
    learn.diagnose_input(1)
    assert {o.fake_l.num_workers > 0 for o in drawn} == {True, False}
    assert all(o is not train and o.partial_n == 24 and len(o) == 6 for o in [*drawn, host_loader(train)])


# Rows of a table, and loaders without a length

@pytest.fixture
def table(tmp_path):
    "120 images, their names and labels in a table"
    import pandas as pd
    rng = np.random.default_rng(0)
    for i in range(120): Image.fromarray(rng.integers(0, 255, (12, 12, 3), dtype='uint8')).save(tmp_path/f'{i}.png')
    df = pd.DataFrame(dict(name=[f'{i}.png' for i in range(120)], label=list('abc')*40))
    dls = ImageDataLoaders.from_df(df, tmp_path, valid_pct=.1, seed=1, item_tfms=Resize(8), bs=2, num_workers=0, device='cpu')
    return Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*8*8, 3)), loss_func=nn.CrossEntropyLoss())


@pytest.mark.parametrize('fast', [False, True])
def test_a_cache_of_the_rows_of_a_table_is_tried(table, fast):
    "With more rows than are tried of it"
    if fast: table.fast_images(threads=1)
    rows = table.diagnose_input(.5).remedies.rows
    assert next(r for r in rows if r['name'].startswith('a cache'))['why'] is None
    few = diagnose.some_items(table.dls.train, 5)
    assert few.n == 5 and [o[1].item() for o in few.dataset] == [o[1].item() for o in list(table.dls.train.dataset)[:5]]


def test_files_are_found_in_the_rows_of_a_table(table):
    files = files_of(table.dls.train)
    assert len(files) == table.dls.train.n and sorted(os.path.basename(o) for o in files) == sorted(table.dls.train.items['name'])


def test_an_epoch_of_unknown_length_is_named():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self): return iter([(torch.zeros(4), 0)]*80)
    learn = learner(DataLoaders(*[DataLoader(Endless(), bs=8, num_workers=0)]*2))
    with pytest.raises(UserError, match='how many items') as e: learn.diagnose_input(1)
    assert '\n' not in str(e.value)

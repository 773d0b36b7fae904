"The rungs of scale: the same pixels from each, and what does not go together is named."
import pytest
import torch

from fastbench.errors import UserError
from fastbench.bench.run import run_recipe
from fastbench.compare.ladder import LadderTable, about_input, ladder_recipes
from fastbench.ladders import get_ladder, ladders
from fastbench.recipe import get_recipe

CHANGES = dict(sample=.06, workers=0)



def same(a, b): return all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize('cache', ['array', 'parquet'])
def test_a_cache_gives_the_same_pixels(cache):
    plain, kept = (get_recipe('scale-as-it-was', **CHANGES, cache=o).make_dls(16, device='cpu') for o in ('none', cache))
    assert same([*plain.train], [*kept.train]) and same([*plain.valid], [*kept.valid])
    assert kept.info == plain.info and list(kept.vocab) == list(plain.vocab)


def test_whole_batches_have_the_same_labels_and_about_the_same_pixels():
    plain, whole = (get_recipe('scale-as-it-was', **CHANGES, **o).make_dls(16, device='cpu') for o in ({}, dict(cache='array', loader='whole')))
    for a, b in zip(plain.valid, whole.valid, strict=True):
        assert torch.equal(a[1], b[1]) and a[0].shape == b[0].shape and (a[0] - b[0]).abs().mean() < .1
    xs = [torch.cat([b[0] for b in dls.train]) for dls in (plain, whole)]
    assert xs[0].shape == xs[1].shape and abs(xs[0].mean() - xs[1].mean()) < .1 and abs(xs[0].std()/xs[1].std() - 1) < .1


@pytest.mark.parametrize('changes', [dict(cache='parquet'), dict(cache='array', encode='png')])
def test_threads_draw_the_same_crops_from_a_cache(changes):
    "In the same order; resized as threads do, which is not quite Pillow's way"
    plain, fast = (get_recipe('scale-as-it-was', **CHANGES | o).make_dls(16, device='cpu') for o in ({}, dict(loader='threads', workers=2) | changes))
    for a, b in zip([*plain.train, *plain.valid], [*fast.train, *fast.valid], strict=True):
        assert torch.equal(a[1], b[1]) and a[0].shape == b[0].shape and (a[0] - b[0]).abs().mean() < .05
    assert fast.info['threads'] == 2 and fast.info['workers'] == 0


def test_images_are_kept_smaller_where_that_is_asked_for():
    dls = get_recipe('scale-as-it-was', **CHANGES, cache='array', resize=48).make_dls(16, device='cpu')
    assert min(dls.train.dataset[0][0].size) == 48
    assert [o.codec for o in dls.train.dataset.store.fields] == ['', '']


def test_images_are_kept_encoded_where_that_is_asked_for():
    dls = get_recipe('scale-as-it-was', **CHANGES, cache='parquet', encode='webp').make_dls(16, device='cpu')
    assert [o.codec for o in dls.train.dataset.store.fields] == ['webp', '']


@pytest.mark.parametrize('changes, says', [
    (dict(loader='whole'), "loader='whole' cuts batches from a cache"), (dict(loader='whole', cache='parquet'), "cache='array'"), (dict(resize=32), 'resize'),
    (dict(loader='threads'), "prepare"), (dict(augment='batch'), 'prepare'), (dict(cache='zip'), 'cache'),
    (dict(encode='png'), "encode='png' has no effect .*: it goes with cache="), (dict(cache='array', encode='gif'), 'encode'),
    (dict(loader='threads', cache='array', decoder='pillow'), "decoder='pillow' has no effect")])
def test_what_does_not_go_together_is_named(changes, says):
    with pytest.raises(UserError, match=says): get_recipe('scale-as-it-was', **changes).check()


def test_images_in_memory_are_not_prepared():
    with pytest.raises(UserError, match='Align works on files'): get_recipe('scale-as-it-was', data='digits').make_dls(16, device='cpu')


def test_the_published_factor_is_beside_ours():
    rungs = {o.name: o for o in get_ladder('scale').rungs}
    assert list(rungs) == ['as-it-was', 'workers', 'slurm', 'once', 'threads', 'array', 'whole', 'zero2']
    factors = {k: rungs['as-it-was'].seconds/o.seconds for k, o in rungs.items() if o.seconds}
    assert factors == pytest.approx({'as-it-was': 1, 'slurm': 3.63, 'once': 13.29, 'zero2': 21.53}) and rungs['whole'].changes == dict(loader='whole', workers=0)
    zero = get_ladder('faster').rungs[-1]
    assert (zero.name, zero.seconds, zero.accuracy) == ('zero2', 3.15*60, .926)


def test_rungs_of_several_machines_are_left_out_with_the_reason(tmp_path, monkeypatch):
    import fastbench.bench.launch as module
    from fastbench.compare.ladder import ladder
    from fastbench.runs.store import save
    from test_scaling import made
    monkeypatch.setattr(module, 'launch', lambda r, folder, repeat, **kw: str(save(made(name=r.name, repeat=repeat), folder)))
    climb = ladder('scale', tmp_path, ['as-it-was', 'slurm', 'zero2'])
    assert [r['rung'] for r in climb.rows] == ['as-it-was']
    for k, s in (('slurm', 'ddp'), ('zero2', 'zero2')): assert f'{k}: not run: it is meant for 4 machines: --slurm --nodes 4 --strategy {s} on a cluster, or --nproc 2 --strategy {s} for two processes of this machine' in climb.notes


# How long a batch takes to arrive

def test_how_long_a_batch_takes_is_a_column():
    "On the stand-in, since Imagenette is not here: two rungs, two steps each"
    runs = [run_recipe(f'draw-photos-{o}', device='cpu', sample=.1) for o in ('threads', 'whole')]
    climb = LadderTable(get_ladder('draw-photos'), runs)
    assert [r['rung'] for r in climb.rows] == ['threads', 'whole'] and all(r['waits'] == r['draw'] > 0 for r in climb.rows)
    assert 'the same on photos, a stand-in' in str(climb) and 'draw' in str(climb).splitlines()[1].split()
    assert [(o.recipe['loader'], o.recipe['size'], o.recipe['bs']) for o in runs] == [('threads', 128, 64), ('whole', 128, 64)]
    assert [o.name for o in ladder_recipes('draw', ['whole'], data='photos')[1]] == ['draw-photos-whole']


def test_the_size_is_the_published_one():
    a, b = get_ladder('draw').recipes()[0], get_recipe('imagenette-xresnet18')
    assert {k: (getattr(a, k), getattr(b, k)) for k in b.__dataclass_fields__ if getattr(a, k) != getattr(b, k)}.keys() <= {'name', 'about', 'epochs', 'refs'}
    for o in (*get_ladder('draw').recipes(), *get_ladder('draw-photos').recipes()): o.check()


def test_only_ladders_of_loaders_have_a_column_for_it():
    assert {o for o in ladders() if about_input(get_ladder(o))} == {'draw', 'draw-photos', 'scale'}

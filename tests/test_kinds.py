"Kinds of training: what each has, what it refuses, and one from outside the package."
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import fastbench.measure.profiler  # noqa: F401  (adds profile)
from fastbench.errors import UserError
from fastbench.bench.learner import bench_learner
from fastbench.recipe import Recipe, as_dict, but, get_recipe, kinds, recipes, upgrade
from fastbench.runs.record import from_json
from fastbench.compare.sides import work
from fastbench.runs.store import load

ROOT = Path(__file__).resolve().parent.parent
OLD = [o for o in sorted((ROOT/'benchmarks'/'results').glob('dawn-photos-*.json')) if json.loads(o.read_text())['schema'] == 1] + [ROOT/'tests'/'golden'/'run-1.json']


def test_kinds_share_what_every_training_has_and_nothing_else():
    assert set(kinds()) >= {'XResNet', 'Timm', 'Torchvision', 'Small', 'Transformer', 'LanguageModel'}
    base = set(Recipe.__dataclass_fields__)
    for name, kind in kinds().items(): assert base <= set(kind.__dataclass_fields__), name
    assert not base & {'size', 'max_length', 'bptt', 'arch', 'whiten', 'loader'}


@pytest.mark.parametrize('name', ['digits-xresnet18', 'imagenette-timm_resnet50', 'cifar100-resnet18', 'dawn', 'docstrings-distilbert', 'docstrings-lstm'])
def test_a_field_of_another_kind_is_refused_by_name(name):
    recipe = recipes().get(name) or get_recipe(f'{name}-baseline')
    have = as_dict(recipe)
    others = {f: k for k, o in kinds().items() if o.__module__.startswith('fastbench') for f in o.__dataclass_fields__ if f not in have}
    assert others
    for field, kind in others.items():
        with pytest.raises(UserError, match=f'{field}=.* has no effect in this recipe: it goes with .*{kind}'): but(recipe, **{field: 1})


@pytest.mark.parametrize('recipe', ['digits-xresnet18', 'imdb-roberta'])
@pytest.mark.parametrize('changes, most', [(dict(seed=10**20), 2**53), (dict(workers=9_999_999), 1024)])
def test_numbers_that_no_machine_holds_are_refused(recipe, changes, most):
    with pytest.raises(UserError, match=f'cannot be: .*a whole number from 0 to {most}'): get_recipe(recipe, **changes)


def test_another_kind_keeps_what_both_have():
    r = but(get_recipe('digits-xresnet18'), kind='Timm', arch='resnet10t')
    assert type(r).__name__ == 'Timm' and (r.size, r.bs, r.arch) == (32, 64, 'resnet10t')
    with pytest.raises(UserError, match="unknown kind 'Tim'; did you mean 'Timm'"): but(r, kind='Tim')


# Runs of the version before

@pytest.mark.parametrize('path', OLD, ids=lambda o: o.stem[:30])
def test_runs_of_the_version_before_load(path):
    was = json.loads(path.read_text())
    run = load(path)
    assert was['schema'] == 1 and run.schema == 2
    kind = dict(xresnet='XResNet', small='Small')[was['recipe']['learner']]
    assert run.recipe['kind'] == kind and 'learner' not in run.recipe and 'bptt' not in run.recipe
    assert all(run.recipe[k] == v for k, v in was['recipe'].items() if k in run.recipe)
    assert set(run.recipe) <= {'kind', *kinds()[kind].__dataclass_fields__}


def test_an_old_run_did_the_work_of_a_new_one():
    old = json.loads(OLD[-1].read_text())
    new = {**old, 'schema': 2, 'recipe': as_dict(get_recipe('digits-xresnet18')) | {k: v for k, v in upgrade(old['recipe']).items()}}
    assert work(from_json(json.dumps(old)))[0] == work(from_json(json.dumps(new)))[0]


def test_a_run_of_a_kind_that_is_not_installed_is_kept_as_it_is():
    recipe = dict(kind='Elsewhere', name='x', colour='green', data='d', precision='fp32')
    run = from_json(json.dumps(dict(schema=2, recipe=recipe)))
    assert run.recipe == recipe and work(run)[0]['colour'] == 'green'


# A kind from outside

OUTSIDE = """
from fastbench.all import *
from dataclasses import dataclass
from fastai.tabular.all import *
import pandas as pd, torch
from fastbench.rules import whole

@dataclass(frozen=True)
class Tabular(Kind):
    "A tabular network on made-up rows"
    rows: int = setting(whole(100), 'rows of the table', default=400)

    def make_dls(self, bs, device=None, offline=False):
        x = torch.rand(self.rows, 3, generator=torch.Generator().manual_seed(self.seed))
        df = pd.DataFrame(x.numpy(), columns=list('abc')).assign(y=(x.sum(1) > 1.5).int().numpy())
        return TabularDataLoaders.from_df(df, cont_names=list('abc'), y_names='y', y_block=CategoryBlock(), bs=bs, device=device, seed=1)

    def make_learner(self, dls, offline=False, **kwargs):
        return BenchLearner(dls, TabularModel([], 3, 2, [20]), metrics=accuracy, **kwargs)

register(Tabular('mine', rows=600, bs=32, epochs=2, lr=1e-2))
"""


def test_a_kind_from_outside_is_under_20_lines(): assert OUTSIDE.count('\n') < 22 and len(OUTSIDE.split('class ')[1].splitlines()) < 16


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp('outside')
    (out/'my_kinds.py').write_text(OUTSIDE)
    return out


def outside(folder, code):
    got = subprocess.run([sys.executable, '-c', f'from my_kinds import *\n{code}'], cwd=folder, capture_output=True, text=True,
                         env={**__import__('os').environ, 'PYTHONPATH': f'{ROOT}'})
    assert got.returncode == 0, got.stderr[-3000:]
    return got.stdout


def test_a_kind_from_outside_runs_and_profiles(folder):
    out = outside(folder, """
learn = bench_learner('mine', device='cpu', rows=300, batches=3).profile()
learn.fit(1)
assert learn.recipe.rows == 300 and len(learn.profiler.profile.steps['train']) == 3
for i in range(6): print(save(run_recipe('mine', device='cpu', repeat=i), 'b' if i%2 else 'a'))
""")
    run = load(folder/out.split()[-1])
    assert run.status == 'ok' and run.recipe['kind'] == 'Tabular' and run.recipe['rows'] == 600 and 'accuracy' in run.metrics


def test_a_kind_from_outside_is_compared_and_reported(folder):
    out = outside(folder, """
print(compare('a', 'b'))
print(report('a', against='b', out='r.html'))
""")
    assert 'overall' in out and '<html' in (folder/'r.html').read_text()[:300]


def test_a_kind_from_outside_goes_by_the_command_line(folder):
    outside(folder, "import sys; sys.argv = ['fastbench', 'run', 'mine', '--device', 'cpu', '--set', 'rows=300', '--out', 'c']\nfrom fastbench.cli import main\ntry: main()\nexcept SystemExit as e: assert not e.code, e.code")
    run, = map(load, (folder/'c').glob('*.json'))
    assert run.recipe['rows'] == 300 and run.status == 'ok'


# Every field acts wherever a Learner is made

def test_batches_are_those_of_the_recipe():
    learn = bench_learner('digits-xresnet18', device='cpu', size=8, batches=4, workers=0).profile()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert len(learn.profiler.profile.steps['train']) == 4
CHANGED = dict(data='photos', sample=.5, workers=1, batches=3, bs=16, memory='4GB', epochs=2, lr=.1, wd=.3, opt='fused_sgd', eps=1e-3, schedule='flat',
               knots=[[0., 0.], [1., 1.]], label_smoothing=.1, precision='bf16', compile=True, tf32=True, keep_memory=True, onednn=True, ema=.9, best=True, target=.5,
               seed=1, split='pooled', valid=.3, label_col='label', size=16, prefetch=3, loader='whole', decoder='pillow', prepare='align', cache='array', encode='png', resize=8,
               channels_last=True, augment='batch', min_scale=.5, flip=.5, pad=1, cutout=3, progressive=.5, tta=True, arch='xresnet34', act='mish', pretrained=True)


class Asked(list):
    "Writes down what a fit was asked for"
    def __getattr__(self, name): return lambda *args: self.append((name, args))


def seen_of(o, depth=4):
    "What can be seen of an object: its class and its plain values, and those of what it holds"
    if isinstance(o, torch.Tensor): return tuple(o.shape), str(o.dtype), float(o.float().sum())
    if o is None or isinstance(o, (bool, int, float, str, Path)): return str(o)
    if isinstance(o, partial): return seen_of([o.func, o.args, o.keywords], depth)
    if isinstance(o, dict): return {str(k): seen_of(v, depth-1) for k, v in o.items()} if depth else len(o)
    if isinstance(o, (list, tuple)): return [seen_of(v, depth-1) for v in o[:20]] if depth else len(o)
    if callable(o) and hasattr(o, '__qualname__'): return o.__qualname__
    return type(o).__name__, {k: seen_of(v, depth-1) for k, v in sorted(getattr(o, '__dict__', {}).items()) if not k.startswith('__')} if depth else ''


def seen(learn):
    "Callbacks, loss, optimizer, model, and the loaders with their first batch"
    learn.recipe.fit(asked := Asked())
    dl, model = learn.dls.train, learn.model
    loaders = [(o.n, o.bs, o.fake_l.num_workers, getattr(o.fake_l, 'prefetch_factor', None), type(o).__name__, seen_of([o.after_item, o.after_batch])) for o in learn.dls.loaders]
    cbs = [(type(o).__name__, {k: str(v) for k, v in vars(o).items() if isinstance(v, (int, float, str))}) for o in learn.cbs]
    weights = [seen_of(o) + (o.is_contiguous(memory_format=torch.channels_last) if o.ndim == 4 else None,) for o in list(model.parameters())[:2]]
    kinds = [type(o).__name__ for o in model.modules()]
    fixed = [learn.lr, learn.wd, learn.opt_func, learn.loss_func, list(learn.dls.valid.one_batch())]
    return json.dumps([asked, loaders, cbs, weights, kinds, seen_of(fixed)], default=str, sort_keys=True)


@pytest.fixture(scope='module')
def as_it_is(): return seen(bench_learner('digits-xresnet18', device='cpu', workers=0))


@pytest.mark.parametrize('name', sorted(set(get_recipe('digits-xresnet18').__dataclass_fields__) - {'name', 'about', 'refs'}))
def test_every_field_acts_or_is_refused(name, as_it_is):
    "On a Learner, or on the fit that the recipe asks of it"
    assert name in CHANGED, f'{name} is new: say here to what it may be changed'
    try: learn = bench_learner('digits-xresnet18', device='cpu', offline=True, **{'workers': 0, name: CHANGED[name]})
    except UserError as e: assert name in str(e) or CHANGED[name] in (True,) or 'install' in str(e), e
    else: assert seen(learn) != as_it_is


def test_the_learner_as_it_is_can_be_told(as_it_is):
    assert seen(bench_learner('digits-xresnet18', device='cpu', workers=0)) == as_it_is


@pytest.mark.parametrize('given', ['digits-xresnet18', None, 3])
def test_but_names_what_is_not_a_recipe(given):
    with pytest.raises(UserError, match=f'^{given!r} is not a Recipe.*get_recipe'): but(given, epochs=1)

"Functions of a user's own: found, called, run, compared; what they may do wrong, and what is said of it."
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fastai.learner import Learner

from fastbench.bench.launch import launch
from fastbench.bench.learner import bench_learner
from fastbench.bench.run import run_recipe
from fastbench.compare.ab import AB, ab, against, start_ab
from fastbench.compare.ladder import LadderTable, ladder, ladder_recipes
from fastbench.errors import UserError
from fastbench.own.call import check_returned
from fastbench.own.kind import Function
from fastbench.own.source import find_source, origin
from fastbench.own.worktree import at_commit
from fastbench.ladders import Rung
from fastbench.recipe import as_dict, but, get_recipe
from fastbench.runs.store import load
from fastbench.train.loop import FastLoop
from test_cli import command

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT/'tests'/'examples'/'documented.py'
ALL = 'pets multi_label segmentation tabular collaborative ulmfit gan'.split()

TRAIN = '''
import os, subprocess, sys, time
from fastai.vision.all import *
from sizes import width

def make(bs=16, lr=1e-2, n=64, act='relu', path=Path('somewhere')):
    x = torch.rand(n, 1, 8, 8)
    data = list(zip(x, (x.mean((1, 2, 3)) > .5).long()))
    dls = DataLoaders.from_dsets(data[:n*3//4], data[n*3//4:], bs=bs, device=default_device(), num_workers=0)
    dls.c = 2
    model = nn.Sequential(nn.Conv2d(1, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, lr=lr)

def fitted(n_fits=2): return make(), lambda learn: [learn.fit(1) for _ in range(n_fits)]
def fails_late():
    def fit(learn): raise ZeroDivisionError('in the fit')
    return make(), fit
def broken(): return _deeper()
def _deeper(): raise KeyError('nothing there')
def nothing(): make()
def pair(): return make(), 3
def twins(): return make(), make()
def needs(path, bs): return make()
def asks(): return make(bs=int(input('batch size? ')))
def loud():
    for i in range(200_000): print('line', i)
    return make(bs=1/0)
def leaves(): sys.exit(0)
def leaves_late(): return make(), lambda learn: sys.exit('no more data')
def starts():
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
    return make()
def threads():
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_float32_matmul_precision('high')
    return make()
def seeds():
    set_seed(3)
    return make()
def trains():
    learn = make()
    learn.fit(2)
    return learn
def empty(path): return vision_learner(ImageDataLoaders.from_folder(path, item_tfms=Resize(32)), resnet18)
def held(path): return DataBlock((ImageBlock, CategoryBlock), get_items=lambda o: [path/'a.jpg'], splitter=IndexSplitter([0]), get_y=parent_label).dataloaders(path)
def of_another(path):
    "A TypeError of their own, where there are items"
    return Datasets([1, 2], [3])
def takes_seed(seed=0): return make()
def dies(): os._exit(3)
async def later(): return make()
bound = partial(make, n=32)
class Twice(Learner):
    def one_batch(self, i, b):
        for _ in range(2): super().one_batch(i, b)
def twice():
    learn = make()
    learn.__class__ = Twice
    return learn
class Ends(Callback):
    order = 60
    def __init__(self, at): self.at = at
    def after_epoch(self):
        if self.epoch+1 == self.at: raise CancelFitException
    def after_batch(self):
        if self.training and self.epoch+1 == -self.at: raise CancelFitException
def ends(at=2, find=False):
    def fit(learn):
        if find: learn.lr_find(num_it=10, show_plot=False)
        learn.fit(3)
    return make().add_cb(Ends(at)), fit
'''


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    out = tmp_path_factory.mktemp('user')
    (out/'train.py').write_text(TRAIN)
    (out/'sizes.py').write_text('width = 4\n')
    return out


def cli(*args, cwd, **env):
    return subprocess.run([sys.executable, '-m', 'fastbench', *map(str, args)], cwd=cwd, capture_output=True, text=True,
                          timeout=300, env={**os.environ, 'PYTHONPATH': str(ROOT), **env})


def git(folder, *args):
    got = subprocess.run(['git', '-C', folder, '-c', 'user.name=x', '-c', 'user.email=x@x', *args], check=True, capture_output=True, text=True)
    return got.stdout.strip()


def test_a_folder_without_images_is_named(home, tmp_path):
    with pytest.raises(UserError, match='train.py:empty made a data set with nothing to train on, from ') as e: bench_learner(f'{home}/train.py:empty', path=tmp_path, device='cpu')
    assert str(tmp_path) in str(e.value) and '\n' not in str(e.value)
    with pytest.raises(UserError, match='does the splitter leave some'): bench_learner(f'{home}/train.py:held', path=tmp_path, device='cpu')
    with pytest.raises(TypeError, match='not callable'): bench_learner(f'{home}/train.py:of_another', path=tmp_path, device='cpu')


@pytest.mark.parametrize('loop', ['fastai', 'lean'])
@pytest.mark.parametrize('at, said', [(2, 'stopped after 2 of 3 epochs: a callback ended the fit'), (-2, 'stopped in epoch 2 of 3: a callback ended the fit'), (3, None), (9, None)])
def test_a_fit_that_a_callback_ended_says_how_far_it_came(home, loop, at, said):
    run = run_recipe(f'{home}/train.py:ends', device='cpu', at=at, loop=loop)
    assert run.status == 'ok' and [o for o in run.warnings if 'stopped' in o] == [said]*bool(said)


def test_what_ends_on_purpose_was_not_stopped_by_a_callback(home):
    run = run_recipe(f'{home}/train.py:ends', device='cpu', at=9, find=True)
    assert run.status == 'ok' and not any('stopped' in o for o in run.warnings)
    run = run_recipe(f'{home}/train.py:ends', device='cpu', at=9, target=.01)
    assert run.goal['reached'] and not any('stopped' in o for o in run.warnings)


# What fastai's own documentation shows

@pytest.mark.parametrize('name', ALL)
def test_a_documented_example_runs_as_it_is(name):
    run = run_recipe(f'{EXAMPLES}:{name}', device='cpu')
    assert run.status == 'ok', run.traceback
    assert run.phases.rows and run.figures.step and run.data['n_train'] and run.source['function'] == name
    assert run.recipe['kind'] == 'Function' and run.recipe['bs'] == get_recipe(f'{EXAMPLES}:{name}').bs


@pytest.mark.parametrize('name', ALL)
def test_a_documented_example_goes_through_ab_ladder_and_report(name, tmp_path):
    from fastbench.page.report import report
    recipe = f'{EXAMPLES}:{name}'
    trial = start_ab(recipe, None, dict(bs=6), {}, (), (), False, tmp_path/'ab', 'cpu', True, pairs=1)
    trial.measure()
    assert trial.result().rows
    which, todo = ladder_recipes(recipe, [Rung('smaller', 'smaller batches', dict(bs=4))])
    climb = LadderTable(which, [run_recipe(o, device='cpu') for o in todo])
    assert [o['rung'] for o in climb.rows] == ['start', 'smaller'] and all(o['status'] == 'ok' for o in climb.rows)
    report(tmp_path/'ab', out=tmp_path/'r.html')
    assert name in (tmp_path/'r.html').read_text()


# The recipe

def test_fields_are_the_parameters_and_what_can_be_switched(home):
    r = get_recipe(f'{home}/train.py:make', bs=8, act='mish', precision='bf16')
    assert (r.bs, r.act, r.path, r.precision, r.lr) == (8, 'mish', None, 'bf16', 1e-2)
    assert r.arguments() == dict(bs=8, act='mish') and r == but(r, bs=8) and hash(r) == hash(but(r, bs=8))
    for bad, said in ((dict(sample=.5), 'no parameter .sample.'), (dict(bsz=3), 'bsz'), (dict(bs='x'), 'a number'), (dict(size=3), 'size')):
        with pytest.raises(UserError, match=said): but(r, **bad)


def test_a_parameter_called_as_a_switch_is_the_functions(home):
    (home/'own_names.py').write_text(TRAIN + '\ndef mine(precision="low", target=3, ema="no"): return make()\n')
    run = run_recipe(f'{home}/own_names.py:mine', device='cpu', precision='higher')
    assert run.status == 'ok' and run.recipe['precision'] == 'higher' and run.precision['effective'] == 'fp32' and not run.goal


def test_a_recipe_goes_to_another_process(home):
    import pickle
    r = get_recipe(f'{home}/train.py:make', bs=8, path=Path('x'))
    assert pickle.loads(pickle.dumps(r)) == r


def test_a_name_that_is_bound_without_def_is_imported(home):
    r = get_recipe(f'{home}/train.py:bound', bs=8)
    assert r.n == 32 and run_recipe(r, device='cpu').status == 'ok'


def test_the_seed_of_a_repeat_reaches_the_parameter(home):
    r = get_recipe(f'{home}/train.py:takes_seed')
    assert but(r, seed=7).arguments() == dict(seed=7)
    (home/'seedless.py').write_text(TRAIN.replace('seed=0', 'seed=None'))
    run = run_recipe(f'{home}/seedless.py:takes_seed', device='cpu', repeat=2)
    assert run.status == 'ok' and run.seed == run.recipe['seed'] == 44


def test_functions_and_classes_are_kept_by_name(home):
    from fastai.losses import CrossEntropyLossFlat
    r = but(get_recipe(f'{home}/train.py:make'), path=CrossEntropyLossFlat)
    assert as_dict(r)['path'] == 'fastai.losses.CrossEntropyLossFlat'


# What is switched on

@pytest.mark.usefixtures('any_bf16')
@pytest.mark.parametrize('changes,effective,lean', [
    ({}, 'fp32', False), (dict(precision='bf16'), 'bf16', False), (dict(precision='half-bf16'), 'half-bf16', False),
    (dict(loop='lean'), 'fp32', True), (dict(loop='lean', precision='bf16', channels_last=True, opt='fused_adam', ema=.9, batches=2), 'bf16', True)])
def test_a_plain_learner_gets_what_is_asked_for(home, changes, effective, lean):
    run = run_recipe(f'{home}/train.py:make', device='cpu', **changes)
    assert run.status == 'ok' and run.precision['effective'] == effective, run.traceback
    learn = bench_learner(f'{home}/train.py:make', device='cpu', **changes)
    assert isinstance(learn, FastLoop) == lean
    if not changes: assert type(learn) is Learner


def test_what_it_cannot_get_is_one_line(home, any_bf16):
    with pytest.raises(UserError, match='has a training loop of its own'): run_recipe(f'{home}/train.py:twice', device='cpu', loop='lean')
    assert run_recipe(f'{home}/train.py:twice', device='cpu', precision='bf16').precision['effective'] == 'bf16'
    with pytest.raises(UserError, match="eps=.* goes with opt"): run_recipe(f'{home}/train.py:make', device='cpu', eps=1e-3)


def test_a_fit_of_its_own_refuses_what_would_have_no_effect(home):
    with pytest.raises(UserError, match='returns a fit of its own'): run_recipe(f'{home}/train.py:fitted', device='cpu', epochs=3)
    run = run_recipe(f'{home}/train.py:fitted', device='cpu', n_fits=3)
    assert len(run.epochs) == 3 and len(run.profile['steps']['train']) >= 1


def test_time_to_accuracy_counts_all_fits(home):
    run = run_recipe(f'{home}/train.py:fitted', device='cpu', n_fits=3, target=1.)
    assert run.goal['reached'] is None or run.goal['epochs'] >= 1
    easy = run_recipe(f'{home}/train.py:fitted', device='cpu', n_fits=4, target=.01)
    assert easy.goal['epochs'] == 1 and len(easy.epochs) == 1


# Imports

def test_imports_come_from_the_files_own_folder(home, tmp_path):
    (tmp_path/'sizes.py').write_text('raise RuntimeError("the current folder was imported")')
    got = cli('run', home/'train.py:make', '--out', 'r', cwd=tmp_path)
    assert got.returncode == 0, got.stderr


def test_two_folders_with_a_file_of_the_same_name(home, tmp_path):
    (tmp_path/'train.py').write_text(TRAIN)
    (tmp_path/'sizes.py').write_text('width = 6\n')
    widths = [run_recipe(f'{o}/train.py:make', device='cpu') and bench_learner(f'{o}/train.py:make', device='cpu').model[0].out_channels
              for o in (home, tmp_path, home)]
    assert widths == [4, 6, 4]
    run_recipe(f"{home}/train.py:make", device="cpu")
    assert str(home) not in sys.path and str(tmp_path) not in sys.path


def test_a_module_of_a_package(tmp_path, monkeypatch):
    pkg = tmp_path/'things'
    pkg.mkdir()
    (pkg/'__init__.py').write_text('')
    (pkg/'sizes.py').write_text('width = 4')
    (pkg/'train.py').write_text(TRAIN.replace('from sizes', 'from .sizes'))
    monkeypatch.chdir(tmp_path)
    assert run_recipe('things.train:make', device='cpu').status == 'ok'
    assert run_recipe('things/train.py:make', device='cpu').status == 'ok'


# What a Run says

def test_a_run_names_file_function_commit_and_no_path(home, tmp_path):
    (tmp_path/'exp').mkdir()
    for o in ('train.py', 'sizes.py'): (tmp_path/'exp'/o).write_text((home/o).read_text())
    git(tmp_path, 'init', '-q')
    git(tmp_path, 'add', '.')
    git(tmp_path, 'commit', '-qm', 'one')
    run = run_recipe(f'{tmp_path}/exp/train.py:make', device='cpu')
    assert run.source['file'] == 'exp/train.py' and run.source['commit'] == git(tmp_path, 'rev-parse', 'HEAD') and not run.source['dirty']
    assert str(tmp_path) not in run.to_json()
    from fastbench.page.report import report
    from fastbench.runs.query import select
    from fastbench.runs.store import save
    save(run, tmp_path/'r')
    assert len(select(tmp_path/'r', commit=run.source['commit'][:8])[0]) == 1 and not select(tmp_path/'r', commit='0000aaaa')[0]
    report(tmp_path/'r', out=tmp_path/'r.html')
    assert run.source['commit'] in (tmp_path/'r.html').read_text() and 'exp/train.py' in (tmp_path/'r.html').read_text()
    before = run.source['sha256']
    (tmp_path/'exp'/'sizes.py').write_text('width = 5\n')
    now = origin(find_source(f'{tmp_path}/exp/train.py:make'))
    assert now['dirty'] and now['sha256'] != before


def test_a_failed_run_has_the_users_part_of_the_traceback(home):
    run = run_recipe(f'{home}/train.py:broken', device='cpu')
    assert run.status == 'failed' and 'KeyError' in run.error
    assert 'in _deeper' in run.traceback and 'in broken' in run.traceback and 'fastbench' not in run.traceback and str(home) not in run.traceback
    late = run_recipe(f'{home}/train.py:fails_late', device='cpu')
    assert late.status == 'failed' and 'in fit' in late.traceback and 'run_recipe' not in late.traceback


# What a function may do wrong, by the command line

@pytest.mark.parametrize('name,code,said', [
    ('broken', 4, 'KeyError: \'nothing there\''), ('nothing', 2, 'returned None: did it forget `return learn`?'),
    ('pair', 2, 'the second is a function that fits it'), ('twins', 2, 'returned a Learner and a Learner: the second is a function that fits it'), ('needs', 2, 'needs path, bs: give the parameter a default'),
    ('asks', 4, 'it asks for input, and nobody is there to answer'), ('loud', 4, 'line 199999'), ('leaves', 4, 'SystemExit: 0: it ends the whole process'), ('leaves_late', 4, 'SystemExit: no more data: it ends'), ('dies', 4, 'exit code 3'),
    ('later', 2, 'is async'), ('mak', 2, "did you mean 'make'"), ('threads', 0, 'changed threads from'),
    ('seeds', 0, 'seeds random numbers itself'), ('trains', 0, 'had trained 2 epochs before train.py:trains returned it'), ('starts', 0, '1 process that the training started still ran')])
def test_what_is_wrong_is_said(home, tmp_path, monkeypatch, capfd, name, code, said):
    monkeypatch.chdir(tmp_path)
    got, *printed = command(monkeypatch, capfd, 'run', home/f'train.py:{name}', '--out', tmp_path/'r')
    text = ''.join(printed)
    assert got == code and said in text, text
    assert len(text) < 8000 and 'multiprocessing' not in text


@pytest.mark.parametrize('module,says', [('transformers', 'TrainerProfiler()'), ('pytorch_lightning', 'LightningProfiler()'), ('lightning.pytorch', 'LightningProfiler()'), ('mine', 'profiling_steps(')])
def test_what_is_trained_without_fastai_is_told_how_it_is_measured(module, says):
    made = type('Trainer', (), dict(__module__=f'{module}.trainer'))()
    with pytest.raises(UserError, match=re.escape(says)) as e: check_returned(made, 'train.py:make')
    assert str(e.value).startswith('train.py:make returned a Trainer, and not a fastai Learner') and '\n' not in str(e.value)


def test_what_it_changed_is_put_back_here(home):
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    run = run_recipe(f'{home}/train.py:threads', device='cpu')
    assert any('fp32_precision from' in o for o in run.warnings)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


def test_what_it_prints_is_shown_on_request(home, tmp_path):
    (tmp_path/'says.py').write_text(TRAIN.replace('from sizes import width', 'width = 4') + '\ndef says():\n    print("good morning")\n    return make()\n')
    assert 'good morning' not in (got := cli('run', 'says.py:says', cwd=tmp_path)).stderr and not got.returncode
    assert 'good morning' in cli('run', 'says.py:says', '--show-output', cwd=tmp_path).stderr


# Against another commit

@pytest.fixture
def repo(home, tmp_path):
    for o in ('train.py', 'sizes.py'): (tmp_path/o).write_text((home/o).read_text())
    git(tmp_path, 'init', '-q', '-b', 'main')
    git(tmp_path, 'add', '.')
    git(tmp_path, 'commit', '-qm', 'one')
    (tmp_path/'sizes.py').write_text('width = 8\n')
    return tmp_path


def test_against_a_commit_each_side_has_its_own_code(repo):
    with against(f'{repo}/train.py:make', 'main', folder=repo/'r', device='cpu', python=(), on=(), anyway=False, offline=True,
                 both=None, pairs=1) as trial:
        trial.measure()
        there = trial.recipes[0].source.file
    c = trial.result()
    a, b = trial.a[0].source, trial.b[0].source
    assert a['commit'] == b['commit'] and not a['dirty'] and b['dirty'] and a['sha256'] != b['sha256'] and a['file'] == b['file'] == 'train.py'
    assert not there.exists() and git(repo, 'worktree', 'list').count('\n') == 0
    assert 'A is main' in c.notes[0] and 'changes that are not committed' in c.notes[0]


def test_against_leaves_nothing_behind_when_it_fails(repo):
    (repo/'train.py').write_text(TRAIN + '\ndef new(): return make()\n')
    for name, ref, said in (('new', 'main', "unknown function of train.py at main"), ('make', 'mian', "'mian' is not a commit")):
        with pytest.raises(UserError, match=said):
            ab(f'{repo}/train.py:{name}', against=ref, folder=repo/'r', device='cpu')
    with pytest.raises(UserError, match='no parameter .depth.'):
        (repo/'train.py').write_text(TRAIN.replace("act='relu'", "act='relu', depth=2"))
        ab(f'{repo}/train.py:make', against='main', both=dict(depth=3), folder=repo/'r', device='cpu')
    assert git(repo, 'worktree', 'list').count('\n') == 0


def test_against_in_three_lines_of_ci(repo):
    got = cli('ab', 'train.py:make', '--against', 'main', '--pairs', 1, '--fail-above', '5%', '--device', 'cpu', cwd=repo)
    assert got.returncode == 0 and 'A is main' in got.stdout, got.stderr
    assert git(repo, 'worktree', 'list').count('\n') == 0


@pytest.mark.parametrize('absolute', [True, False])
def test_in_a_hook_of_git_what_is_staged_stays_so(repo, monkeypatch, absolute):
    "Git tells its hooks which index is theirs, and checking out another commit wrote into that"
    git(repo, 'add', '.')
    staged = git(repo, 'ls-files', '-s')
    monkeypatch.chdir(repo)
    monkeypatch.setenv('GIT_INDEX_FILE', str(repo/'.git'/'index') if absolute else '.git/index')
    if absolute: monkeypatch.setenv('GIT_DIR', str(repo/'.git'))
    with at_commit(find_source(f'{repo}/train.py:make'), 'HEAD') as other: assert (other.top/'sizes.py').is_file()
    for o in ('GIT_INDEX_FILE', 'GIT_DIR'): monkeypatch.delenv(o, raising=False)
    assert git(repo, 'ls-files', '-s') == staged


def test_a_submodule_comes_along_at_its_own_commit(repo, tmp_path):
    lib = tmp_path/'r'/'lib'
    lib.mkdir(parents=True)
    (lib/'helper.py').write_text('then')
    git(lib, 'init', '-q')
    git(lib, 'add', '.')
    git(lib, 'commit', '-qm', 'lib')
    git(repo, '-c', 'protocol.file.allow=always', 'submodule', 'add', '-q', str(lib), 'lib')
    git(repo, 'add', 'lib', 'train.py')
    git(repo, 'commit', '-qm', 'two')
    (repo/'lib'/'helper.py').write_text('now')
    git(repo/'lib', 'commit', '-qam', 'now')
    with at_commit(find_source(f'{repo}/train.py:make'), 'HEAD') as other: assert (other.top/'lib'/'helper.py').read_text() == 'then'
    assert all(git(o, 'worktree', 'list').count('\n') == 0 for o in (repo, repo/'lib'))


def test_what_git_cannot_say_is_told(home, tmp_path, monkeypatch):
    (tmp_path/'train.py').write_text(TRAIN)
    git(tmp_path, 'init', '-q')
    source = find_source(f'{tmp_path}/train.py:make')
    with pytest.raises(UserError, match='^the repository has no commit yet'), at_commit(source, 'main'): pass
    monkeypatch.setenv('GIT_TEST_ASSUME_DIFFERENT_OWNER', '1')
    with pytest.raises(UserError, match='belongs to another user.*git config --global --add safe.directory'), at_commit(source, 'main'): pass
    monkeypatch.setenv('PATH', '/nowhere')
    with pytest.raises(UserError, match='^git is not here'), at_commit(source, 'main'): pass


def test_hooks_of_the_repository_are_not_run(repo):
    (repo/'.git'/'hooks'/'post-checkout').write_text('#!/bin/sh\nexit 1\n')
    (repo/'.git'/'hooks'/'post-checkout').chmod(0o755)
    with at_commit(find_source(f'{repo}/train.py:make'), 'main') as other: assert other.file.is_file()


def test_code_that_would_come_from_the_checkout_is_moved_or_refused(repo, monkeypatch):
    (repo/'lib').mkdir()
    (repo/'lib'/'shared.py').write_text('which = "then"')
    (repo/'train.py').write_text(TRAIN + '\nimport shared\ndef shares():\n    learn = make()\n    learn.which = shared.which\n    return learn\n')
    git(repo, 'add', '.')
    git(repo, 'commit', '-qm', 'two')
    (repo/'lib'/'shared.py').write_text('which = "now"')
    monkeypatch.syspath_prepend(str(repo/'lib'))
    with at_commit(find_source(f'{repo}/train.py:shares'), 'main') as other:
        from fastbench.own.kind import recipe_of
        assert bench_learner(recipe_of(other), device='cpu').which == 'then'
    assert bench_learner(f'{repo}/train.py:shares', device='cpu').which == 'now'


# Functions without a file

SCRIPT = '''
from fastbench.all import *
from fastbench.bench.launch import launch
from fastai.vision.all import *
scale = 2
lock = __import__('threading').Lock()

def make(bs=16):
    x = torch.rand(48*scale, 4)
    data = list(zip(x, (x.mean(1) > .5).long()))
    dls = DataLoaders.from_dsets(data[:32], data[32:], bs=bs, num_workers=0)
    return Learner(dls, nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

def locked():
    lock.acquire()
    return make()

from dataclasses import dataclass
@dataclass(frozen=True)
class Line(Kind):
    "A line"
    def make_learner(self, dls, offline=False, **kwargs): return make(self.bs)
    def make_dls(self, bs, device=None, offline=False): return None

import sys
sys.stdout.write('begins\\n')
def part(name, f):
    try: print(f'<{name}>', f())
    except BaseException as e: print(f'<{name}> refused', e)
part('run', lambda: load(launch(make, 'r', bs=8)).headline)
part('ab', lambda: ab(make, changes=dict(bs=8), pairs=1, folder='r'))
part('kind', lambda: ladder(register_ladder(Line('mine', data='d', bs=8), Rung('a', 'a', {}), Rung('b', 'b', dict(bs=4))).name, 'r'))
part('locked', lambda: launch(locked, 'r'))
'''


@pytest.fixture(scope='module')
def of_script(tmp_path_factory):
    folder = tmp_path_factory.mktemp('script')
    (folder/'script.py').write_text(SCRIPT)
    return subprocess.run([sys.executable, 'script.py'], cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, 'PYTHONPATH': str(ROOT)})


@pytest.mark.parametrize('which,said', [('run', 'ok: finished'), ('ab', 'overall'), ('kind', 'mine'), ('locked', 'refused locked cannot be sent to a fresh process')])
def test_what_a_notebook_or_script_defines_reaches_a_fresh_process(of_script, which, said):
    part, = re.findall(f'^<{which}> (.*?)(?=^<|\\Z)', of_script.stdout, re.M | re.S)
    assert said in part and of_script.stdout.count('begins') == 1, of_script.stdout + of_script.stderr[-3000:]


def test_what_is_no_recipe_is_named():
    for bad in (3, int, None):
        with pytest.raises(UserError, match='not a recipe'): get_recipe(bad)


# Suites and ladders

def test_a_suite_in_a_file_by_the_command_line(home, in_process, tmp_path):
    for name, text in (('night.toml', f'suite = ["{home}/train.py:make", {{run = "{home}/train.py:make", bs = 8, name = "small"}}]'),
                       ('both.py', f'suite = ["{home}/train.py:make", "{home}/train.py:fitted"]')):
        (tmp_path/name).write_text(text)
        got = in_process('run', name, '--out', 'r', '--device', 'cpu', cwd=tmp_path)
        assert got.returncode == 0 and f'suite {name.split(".")[0]}' in got.stdout, got.stdout + got.stderr


def test_rungs_by_the_command_line(home, in_process, tmp_path):
    got = in_process('ladder', home/'train.py:make', '--rung', 'bigger:bs=32', '--rung', 'fast:lr=.1,act=mish', '--json', '--device', 'cpu', cwd=tmp_path)
    assert [o['rung'] for o in json.loads(got.stdout)['rows']] == ['start', 'bigger', 'fast'], got.stderr
    runs = [load(o) for o in sorted((tmp_path/'fastbench-runs').glob('*.json'))]
    assert sorted((o.recipe['bs'], o.recipe['lr']) for o in runs) == [(16, .01), (32, .01), (32, .1)]
    assert 'NAME:FIELD=VALUE' in in_process('ladder', home/'train.py:make', '--rung', 'x', cwd=tmp_path).stderr


def test_show_lists_the_fields(home, tmp_path):
    got = cli('show', home/'train.py:make', cwd=tmp_path)
    assert got.stdout.splitlines()[1].split()[:2] == ['bs', '16'] and 'Path(' in got.stdout and 'sample' not in got.stdout
    assert re.search(r'^  size +32 ', cli('show', 'digits-xresnet18', cwd=tmp_path).stdout, re.M)


def test_showing_and_listing_a_function_needs_no_torch(home, tmp_path):
    code = f"import sys\nfrom fastbench.recipe import get_recipe\nget_recipe({str(home/'train.py:make')!r}, bs=3)\nassert 'torch' not in sys.modules"
    got = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert got.returncode == 0, got.stderr


@pytest.mark.parametrize('words', [('doctor', 'train.py:broken'), ('find-batch-size', 'train.py:broken', '--device', 'cpu')], ids=['doctor', 'find-batch-size'])
def test_an_error_of_a_function_is_told_by_each_command_as_by_run(home, monkeypatch, capsys, words):
    monkeypatch.chdir(home)
    code, out, err = command(monkeypatch, capsys, *words)
    assert code == 4 and err.splitlines()[-1] == "fastbench: train.py:broken failed: KeyError: 'nothing there'"
    assert 'def broken(): return _deeper()' in err and 'typer' not in err


@pytest.mark.parametrize('words', ['doctor', 'find-batch-size'])
def test_a_function_that_ends_the_process_is_no_success_of_a_command(home, monkeypatch, capsys, words):
    monkeypatch.chdir(home)
    code, out, err = command(monkeypatch, capsys, words, 'train.py:leaves', '--device', 'cpu')
    assert code == 4 and err.splitlines()[-1].startswith('fastbench: train.py:leaves failed: SystemExit: 0')


@pytest.mark.parametrize('line,said', [('import nothing_there', "ModuleNotFoundError: No module named 'nothing_there'"), ('sys.exit(2)', 'SystemExit: 2')])
def test_a_bound_name_whose_file_cannot_be_run_is_one_line(home, tmp_path, monkeypatch, capsys, line, said):
    (home/'fails.py').write_text(f'import sys\n{line}\nmake = make_learner\n')
    code, out, err = command(monkeypatch, capsys, 'run', home/'fails.py:make', '--out', tmp_path)
    assert code == 2 and err.count('\n') == 1 and err.startswith(f'fastbench: fails.py:make cannot be imported (fails.py, line 2): {said}')


def test_the_largest_batch_of_a_function_without_workers(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    code, out, err = command(monkeypatch, capsys, 'find-batch-size', 'train.py:make', '--device', 'cpu', '--max', '4')
    assert not code and int(out.split()[0]) > 0 and 'Warning' not in err


@pytest.mark.parametrize('made', ['make(bs: int = 4)', 'make(lr=.1)'])
def test_the_word_largest_is_for_recipes(tmp_path, monkeypatch, capsys, made):
    "A number of the function, or none, as it was typed"
    (tmp_path/'my train.py').write_text(f'def {made}: raise ValueError\n')
    monkeypatch.chdir(tmp_path)
    words = ('run', 'my train.py:make', '--batch-size', 'largest')
    monkeypatch.setattr(sys, 'argv', ['fastbench', *words])
    code, out, err = command(monkeypatch, capsys, *words)
    assert code == 2 and err.count('\n') == 1 and err.startswith('fastbench: --batch-size largest is for recipes, and my train.py:make makes its loaders itself')
    assert "`fastbench find-batch-size 'my train.py:make'` or learn.find_batch_size()" in err
    with pytest.raises(UserError, match="^bs='largest' is for recipes"): get_recipe('my train.py:make', bs='largest')


def test_a_function_may_have_a_word_of_its_own(tmp_path):
    (tmp_path/'train.py').write_text('def make(bs: int|str = 4): raise ValueError\n')
    assert get_recipe(f'{tmp_path}/train.py:make', bs='largest').bs == 'largest'


def test_an_epoch_without_a_batch_is_not_called_diverged(home, tmp_path):
    (tmp_path/'few.py').write_text(TRAIN + '\ndef few():\n    learn = make()\n    learn.dls.loaders[0] = learn.dls.train.new(bs=10**6, drop_last=True)\n    return learn\n')
    (tmp_path/'sizes.py').write_text('width = 4\n')
    with pytest.raises(UserError, match='an epoch has no batch: the training data have .* items, a batch 1000000. Use a smaller bs'):
        run_recipe(f'{tmp_path}/few.py:few', device='cpu')


@pytest.mark.parametrize('name', ['train.py', 'train.py:make', 'digits-xresnet18'])
def test_a_training_is_no_ladder_until_rungs_are_named(name):
    with pytest.raises(UserError, match=f'{name} is not a ladder: say what each rung changes, --rung bigger:bs=128'): ladder_recipes(name)


def test_a_ladder_of_which_nothing_trains_says_why(home, tmp_path):
    table = ladder(f'{home}/train.py:broken', tmp_path, rungs=[Rung('wide', 'wider', dict(lr=.1))], device='cpu')
    assert [o for o in table.notes if 'None' in o or 'chance' in o] == []
    assert [o for o in table.notes if ': failed' in o] == [f"{o}: failed (KeyError: 'nothing there')" for o in ('start', 'wide')]


@pytest.mark.parametrize('k', ['name', 'function'])
def test_a_parameter_that_is_called_as_the_recipe_calls_itself_is_named(home, k):
    "It was the recipe that got the name, while the function trained with its default"
    file = home/f'own_{k}.py'
    file.write_text(TRAIN + f'\ndef mine({k}="small", bs=8): return make(bs)\ndef must({k}): return make()\n')
    with pytest.raises(UserError, match=f"mine has a parameter '{k}'.*Call the parameter otherwise") as e: get_recipe(f'{file}:mine', **{k: 'large'})
    assert '\n' not in str(e.value)
    assert run_recipe(f'{file}:mine', device='cpu', bs=4).status == 'ok'  # with its default, as ever
    with pytest.raises(UserError, match=f"must has a parameter '{k}'"): get_recipe(f'{file}:must').ready()
    assert len(ladder_recipes(f'{file}:mine', [Rung('four', 'smaller batches', dict(bs=4))])) == 2


@pytest.mark.parametrize('k', ['about', 'build', 'fit', 'inert', 'kind', 'own', 'parameters', 'quiet', 'source'])
def test_a_parameter_with_the_name_of_something_of_the_recipe_keeps_its_default(home, k):
    "It is called all the same, and where it is set, that is said"
    (home/'taken.py').write_text(TRAIN + f"\ndef mine({k}='ours', bs=16):\n    assert {k} == 'ours'\n    return make(bs)\n")
    r = get_recipe(f'{home}/taken.py:mine', bs=8)
    assert run_recipe(r, device='cpu', precision='fp32').status == 'ok' and as_dict(r)['kind'] == 'Function'
    with pytest.raises(UserError, match=f"^taken.py:mine has a parameter {k!r}, and that is what a recipe calls its own {k}"): but(r, **{k: 'x'})
    (home/'taken.py').write_text(TRAIN + f'\ndef needy({k}): return make()\n')
    with pytest.raises(UserError, match=f'has a parameter {k!r}'): get_recipe(f'{home}/taken.py:needy').ready()


def test_a_parameter_that_goes_by_position_is_given_so(home):
    (home/'placed.py').write_text(TRAIN + '\ndef mine(n, bs=16, /, act="relu"):\n    assert (n, bs, act) == (32, 16, "mish"), (n, bs, act)\n    return make(bs, n=n)\n')
    assert run_recipe(f'{home}/placed.py:mine', device='cpu', n=32, act='mish').status == 'ok'


def test_an_annotation_in_quotes_counts(home):
    (home/'own_quoted.py').write_text(TRAIN + '\ndef mine(bs: "int" = 8, lr: "float | None" = None): return make(bs)\n')
    with pytest.raises(UserError, match="bs='abc' cannot be: bs .* is a whole number"): get_recipe(f'{home}/own_quoted.py:mine', bs='abc')
    assert get_recipe(f'{home}/own_quoted.py:mine', bs=4, lr=None).bs == 4


@pytest.mark.parametrize('value', ['abc', float('nan'), float('inf'), 2.5, True])
def test_what_is_no_whole_number_is_said(home, value):
    (home/'own_whole.py').write_text(TRAIN + '\ndef mine(bs: int = 8): return make(bs)\n')
    with pytest.raises(UserError, match='bs=.* cannot be: bs .* is a whole number') as e: get_recipe(f'{home}/own_whole.py:mine', bs=value)
    assert '\n' not in str(e.value)


def test_how_long_the_last_run_took_is_said(home, tmp_path):
    from fastbench.command.terminal import how_long
    from fastbench.runs.record import Run
    from fastbench.runs.store import save
    recipe = get_recipe(f'{home}/train.py:make', epochs=1)
    save(Run(recipe=as_dict(recipe), started='now', seconds=12.), tmp_path)
    assert how_long(recipe, tmp_path) == ', about 12.0 s as last time'

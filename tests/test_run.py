"What a Run says of the training that made it, however that ended."
import json
import math
import os
import platform
import random
import signal
import socket
import subprocess
import warnings

import fastai.data.load
import numpy as np
import pytest
import torch

import fastbench.bench.run as module
from fastbench.measure.loader import TimedLoader
from fastbench.measure.phases import LEAVES, from_dict
from fastbench.errors import UserError
from fastbench.recipe import as_dict, get_recipe, recipes
from fastbench.runs.record import from_json, plain
from fastbench.bench.learner import bench_learner
from fastbench.bench.run import run_recipe
from fastbench.train.learner import find_device

SMALL = dict(epochs=1, batches=2, workers=0, bs=32, size=8, sample=.2, device='cpu')


def train(name='digits-xresnet18', **kwargs): return run_recipe(name, **{**SMALL, **kwargs})


pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def told(): return []


@pytest.fixture(scope='module')
def run(told):
    os.environ.update(SECRET_TOKEN='hunter2-7351', OMP_PLACES='cores')
    try: return train(epochs=2, repeat=3, seed=5, tell=told.append)
    finally:
        for o in ('SECRET_TOKEN', 'OMP_PLACES'): del os.environ[o]


# What it says

def test_recipe_as_really_run(run):
    want = plain(as_dict(get_recipe('digits-xresnet18', epochs=2, batches=2, workers=0, bs=32, size=8, sample=.2, seed=8)))
    assert run.recipe == want | dict(min_scale=1., flip=0.)  # as suits the digits
    assert (run.repeat, run.seed, run.recipe['seed'], run.data['seed']) == (3, 8, 8, 8)
    assert run.status == 'ok' and run.error is None and run.seconds > 0 and run.schema == 2 and run.noise and not run.extra


def test_data_weights_precision_device(run):
    assert {k: run.data[k] for k in ('name', 'version', 'asked', 'fallback', 'synthetic', 'sample')} == dict(
        name='digits', version='1', asked='digits', fallback=None, synthetic=False, sample=.2)
    assert .19 < run.data['n_train']/1438 < .21 and .19 < run.data['n_valid']/359 < .21
    assert run.weights == 'random, seed 8' and run.precision == dict(asked='fp32', effective='fp32')
    assert run.device['kind'] == 'cpu' and run.device['name'] and run.device['memory'] > 2**28


def test_environment_holds_no_secret_and_no_name(run):
    text = run.to_json()
    assert 'hunter2' not in text and 'SECRET' not in text and run.environment['variables']['OMP_PLACES'] == 'cores'
    for name in {platform.node(), socket.gethostname()}: assert len(name) < 4 or name not in text
    assert len(run.environment['host']) == 12 and run.environment['torch']['threads'] == torch.get_num_threads()
    assert {'fastbench', 'torch', 'fastai'} <= set(run.environment['versions'])


def test_commit(run, root):
    if not (root/'.git').exists(): pytest.skip('not a checkout')
    assert len(run.environment['git']['fastbench']['commit']) == 40


def test_raw_values_of_every_step(run):
    p = from_dict(run.profile)
    assert len(run.profile['steps']['train']['values']['draw']) == 4 and p.steps['train'].n == 4
    assert run.profile['steps']['valid']['n'] == 2*math.ceil(run.data['n_valid']/32)
    rows = run.table.rows
    whole = next(o['total'] for o in rows if (o['phase'], o['action']) == ('fit', 'fit'))
    assert sum(o['total'] for o in rows if o['phase'] in LEAVES and o['action'] != 'step') == pytest.approx(whole, rel=.01)
    assert run.seconds >= whole*.99 and run.table.verdict


def test_metrics(run, told):
    assert len(run.epochs) == 2 and run.metrics == run.epochs[-1] and set(run.metrics) == {'train_loss', 'valid_loss', 'accuracy'}
    assert [o['values'] for o in told if o['phase'] == 'epoch'] == run.epochs
    assert [o['phase'] for o in told if o['phase'] in ('data', 'fit', 'done')] == ['data', 'fit', 'done']
    last = [o for o in told if o['phase'] == 'train'][-1]
    assert (last['epoch'], last['epochs'], last['step'], last['steps']) == (1, 2, 2, 2)


def test_file_and_back(run):
    back = from_json(run.to_json())
    assert back == run and back.table.rows == run.table.rows and json.loads(run.to_json())['started'].endswith('+00:00')
    assert str(back) == str(run) and 'finished' in run.headline and 'digits-xresnet18 · fp32' in run.title
    assert '<table' in run._repr_html_() and 'finished' in run._repr_html_()


def test_the_same_seed_gives_the_same_run_another_another(monkeypatch):
    drawn = []
    in_step(monkeypatch, lambda o: drawn.append((torch.rand(1).item(), np.random.rand(), random.random())))  # as dropout or an augmentation would
    a,b,c = train(), train(), train(repeat=1)
    assert a.epochs == b.epochs != c.epochs and c.seed == a.seed + 1 and a.id != b.id
    assert drawn[0] == drawn[1] and all(x != y for x,y in zip(drawn[0], drawn[2]))


# What fastbench warned of

def test_a_fallback_is_told_once_and_kept(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path))
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path))
    run = train(data='auto:cifar10', offline=True)
    assert run.status == 'ok' and (run.data['name'], run.data['asked'], run.data['fallback']) == ('digits', 'auto:cifar10', 'cifar10')
    assert sum("using 'digits' in place of 'cifar10'" in o for o in run.warnings) == 1 and 'asked: auto:cifar10' in run.title
    assert not any('in place of' in str(o.message) for o in recwarn)
    with pytest.raises(UserError, match='cifar10'): train(data='cifar10', offline=True)


def test_warnings_of_others_go_their_way(monkeypatch):
    real = module.bench_learner
    def noisy(*args, **kwargs):
        warnings.warn_explicit('of another', UserWarning, '/elsewhere/other.py', 1)
        return real(*args, **kwargs)
    monkeypatch.setattr(module, 'bench_learner', noisy)
    with pytest.warns(UserWarning, match='of another'): run = train()
    assert not any('of another' in o for o in run.warnings)


def test_a_disturbed_machine_is_told(monkeypatch):
    states = iter([dict(clock=0., swapped=0), dict(clock=2., swapped=2**30)])
    monkeypatch.setattr(module, 'machine_state', lambda device: next(states))
    monkeypatch.setattr(module, 'glance', lambda device: dict(on_battery=True))
    run = train()
    assert [o.split(':')[0] for o in run.warnings if o.startswith(('swapping', 'on battery'))] == ['swapping', 'on battery'] and run.noise == dict(seconds=2., swapped=2**30)


# How it ended

def in_step(monkeypatch, f, step=1):
    "Call `f` in the forward of a step"
    real = module.bench_learner
    def made(*args, **kwargs):
        learn,n = real(*args, **kwargs),iter(range(100))
        learn.model.register_forward_hook(lambda m, i, o: f(o) if next(n) == step else None)
        return learn
    monkeypatch.setattr(module, 'bench_learner', made)


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_diverged_and_no_timing(monkeypatch, value):
    in_step(monkeypatch, lambda o: o*value)
    run = train(batches=20)
    assert run.status == 'diverged' and run.seconds is None and run.table.rows == [] and run.table.verdict is None
    assert run.profile['steps']['train']['n'] == 2  # at once
    assert 'not a timing' in str(run) and 'fit  ' not in str(run) and ' s ' not in run.headline
    assert from_json(run.to_json()) == run


def test_a_loss_that_is_no_number_in_validation_only(monkeypatch):
    in_step(monkeypatch, lambda o: o*math.nan, step=3)  # after the two of training
    run = train()
    assert run.status == 'diverged' and math.isnan(run.metrics['valid_loss']) and math.isnan(from_json(run.to_json()).metrics['valid_loss'])


def boom(o): raise RuntimeError('the model\nis odd')


def test_an_error_is_a_failed_run_with_its_traceback(monkeypatch):
    in_step(monkeypatch, boom)
    run = train()
    assert run.status == 'failed' and run.error == 'RuntimeError: the model' and 'in boom' in run.traceback
    assert run.profile['steps']['train']['n'] == 1 and run.data['name'] == 'digits' and run.environment and from_json(run.to_json()).traceback == run.traceback
    assert 'failed: ended by an error (RuntimeError: the model)' in run.headline


def test_an_error_while_the_learner_is_made(monkeypatch):
    monkeypatch.setattr(module, 'bench_learner', lambda *args, **kwargs: boom(0))
    run = train()
    assert run.status == 'failed' and 'RuntimeError' in run.error and 'in boom' in run.traceback and run.environment and run.table.rows == []
    assert str(run)


def test_an_error_in_a_loader_process_names_the_error(monkeypatch):
    monkeypatch.setattr(module, 'bench_learner', lambda *a, **k: (_ for _ in ()).throw(
        RuntimeError('Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  x\nOSError: broken image')))
    assert train().error == 'OSError: broken image'


def test_shared_memory_that_is_short_is_explained(monkeypatch):
    monkeypatch.setattr(module, 'bench_learner', lambda *a, **k: (_ for _ in ()).throw(
        RuntimeError('Caught RuntimeError in a loader process.\nOriginal Traceback (most recent call last):\n  x\n'
                     'RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)')))
    assert '--shm-size' in train().error and '/torch_1' in train().error


@pytest.fixture
def kept_loaders(monkeypatch):
    "What the process of a run does before it trains; its loaders are forked"
    from torch.utils.data._utils import worker
    from fastbench.bench.loaders import keep_loaders
    if not hasattr(signal, 'sigwaitinfo'): pytest.skip('this system cannot tell who sent a signal')
    monkeypatch.setattr(worker, '_worker_loop', worker._worker_loop)
    keep_loaders()


class Unsendable(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return lambda: i


def loaders(kind, items, **kwargs):
    if kind == 'torch': return torch.utils.data.DataLoader(items, batch_size=2, num_workers=1, collate_fn=list, **kwargs)
    return fastai.data.load.DataLoader(items, bs=2, num_workers=1, create_batch=list, **kwargs)


@pytest.mark.parametrize('kind', ['fastai', 'torch'])
def test_a_batch_that_cannot_be_handed_over_is_an_error_and_no_wait(kept_loaders, kind):
    with pytest.raises(Exception, match="Caught.* in a loader process(.|\n)*Can't (pickle|get) local object"): list(loaders(kind, Unsendable(), timeout=300))


class Signalled(torch.utils.data.Dataset):
    "Its third item has somebody else send SIGTERM to the loader process"
    def __len__(self): return 6
    def __getitem__(self, i):
        if i == 2: subprocess.run(['kill', '-TERM', str(os.getpid())], check=True)
        return i


@pytest.mark.parametrize('kind,context', [('fastai', None), ('torch', None), ('torch', 'spawn')])
def test_loader_processes_outlive_a_signal_that_reaches_all(kept_loaders, monkeypatch, kind, context):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)  # or NumPy has no threads, which could take the signal
    made = loaders(kind, Signalled(), **(dict(multiprocessing_context=context) if context else {}))
    assert [list(map(int, o)) for o in made] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize('where', ['learner', 'fit'])
def test_a_graph_that_draws_into_the_progress_bar_is_left_out(monkeypatch, where):
    "As courses of fastai have it: nobody looks at the bar of a run, so there is none, and fastai's `ShowGraphCallback` insists on it"
    from fastai.callback.progress import ShowGraphCallback
    real = module.bench_learner
    def made(*args, **kwargs): return real(*args, **kwargs).add_cb(ShowGraphCallback())
    if where == 'learner': monkeypatch.setattr(module, 'bench_learner', made)
    else: monkeypatch.setattr(type(get_recipe('digits-xresnet18')), 'fit', lambda self, learn: learn.fit(1, cbs=ShowGraphCallback()))
    run = train()
    assert run.status == 'ok', run.error


def test_one_checkpoint_that_was_not_written_is_one():
    import types
    run = types.SimpleNamespace(warnings=[])
    for failed in (['the disk is full'], ['the disk is full']*2): module._resumed(run, types.SimpleNamespace(failed=failed, resumed=[]))
    assert [o.split(' could')[0] for o in run.warnings] == ['1 checkpoint', '2 checkpoints']


def interrupt(o): raise KeyboardInterrupt


def test_interrupted_in_a_step(monkeypatch):
    in_step(monkeypatch, interrupt)
    run = train(batches=9)
    assert run.status == 'interrupted' and run.profile['steps']['train']['n'] == 1 and run.seconds > 0 and run.error is None


@pytest.mark.parametrize('after,n_train,n_valid', [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 2, 1)])
def test_a_wish_to_stop_is_heard_after_the_step(after, n_train, n_valid):
    asked = []
    def stop():
        asked.append(1)
        return len(asked) > after
    run = train(batches=2, stop=stop)
    n = {k: v['n'] for k,v in run.profile['steps'].items()}
    assert run.status == 'interrupted' and (n.get('train', 0), n.get('valid', 0)) == (n_train, n_valid)


def test_a_wish_that_comes_too_late_changes_nothing():
    done = []
    run = train(tell=lambda o: done.append(1) if o['phase'] == 'done' else None, stop=lambda: bool(done))
    assert run.status == 'ok'


def test_diverged_counts_for_more_than_stopped(monkeypatch):
    bad = []
    in_step(monkeypatch, lambda o: bad.append(1) or o*math.nan)
    assert train(stop=lambda: bool(bad)).status == 'diverged'


def test_nothing_is_left_on_the_learner(monkeypatch):
    kept,real = [],module.bench_learner
    monkeypatch.setattr(module, 'bench_learner', lambda *a, **k: kept.append(real(*a, **k)) or kept[0])
    train(stop=lambda: True)
    assert not isinstance(getattr(kept[0], 'dl', None), TimedLoader) and 'remove_cbs' not in vars(kept[0])


# Mistakes of the user: one line, before anything is trained

@pytest.mark.parametrize('kwargs,why', [
    (dict(name='digits-xresnet81'), "unknown recipe 'digits-xresnet81'; did you mean 'digits-xresnet18'"), (dict(speed=9), "unknown field 'speed'"),
    (dict(precision='fp16'), 'precision fp16 on a CPU'), (dict(bs=0), 'bs=0'),
    (dict(bs=5000, sample=1.), '5000.*training images'), (dict(data='nosuch'), "unknown data source 'nosuch'"), (dict(device='tpu'), "'tpu' cannot be.*cpu, cuda"),
    (dict(device='meta'), "'meta' cannot be"), (dict(device=[]), 'cannot be')])
def test_mistakes(kwargs, why):
    with pytest.raises(UserError, match=why) as e: train(**kwargs)
    assert '\n' not in str(e.value)


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    with pytest.raises(UserError, match="'cuda' is not there.*finds no CUDA.*device='cpu'"): train(device='cuda')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    assert find_device('cuda:1') == torch.device('cuda:1') and find_device(0) == torch.device('cuda:0')
    with pytest.raises(UserError, match='finds 2 of this kind'): find_device('cuda:2')
    if not torch.backends.mps.is_available():
        with pytest.raises(UserError, match='finds no MPS'): find_device('mps')
    assert find_device('cpu') == torch.device('cpu') and find_device(None).type in ('cpu', 'cuda', 'mps')


def test_bench_learner_refuses_a_device_in_one_line():
    with pytest.raises(UserError, match="device 'tpu' cannot be"): bench_learner('digits-xresnet18', device='tpu')


def test_recipes_are_not_changed(run): assert recipes()['digits-xresnet18'].seed == 42 and recipes()['digits-xresnet18'].min_scale is None

"Suite fp16: ResNets of torchvision, where their weights are from, the pooled split, and the table of both precisions."
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torchvision import models

from fastbench.machine.download import DataUnavailable
from fastbench.bench.learner import bench_learner
from fastbench.measure.phases import Profile, to_dict
from fastbench.compare.precision import Precisions, _clock
from fastbench.errors import UserError
from fastbench.recipe import but, expand, get_recipe, published
from fastbench.runs.record import Run, from_json
from fastbench.bench.run import run_recipe
from fastbench.vision import resnet
from fastbench.vision.data import vision_dls
from fastbench.vision.resnet import resnet_weights, torchvision_learner

SMALL = dict(data='digits', size=32, sample=.05, bs=16, workers=0, epochs=1)


@pytest.fixture
def home(tmp_path, monkeypatch):
    "A cache of our own and of the hub, both empty"
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'home'))
    before = torch.hub._hub_dir
    torch.hub.set_dir(str(tmp_path/'hub'))
    yield tmp_path
    torch.hub._hub_dir = before


@pytest.fixture
def planted(tmp_path):
    "A file of weights, named by its hash as PyTorch does it"
    torch.manual_seed(1)
    net = models.resnet18()
    torch.save(net.state_dict(), tmp_path/'x.pth')
    sha = hashlib.sha256((tmp_path/'x.pth').read_bytes()).hexdigest()[:8]
    return net, (tmp_path/'x.pth').rename(tmp_path/f'resnet18-{sha}.pth')


@pytest.fixture(scope='module')
def dls(): return vision_dls('digits', size=32, bs=16, sample=.1, device='cpu')


# Weights

def test_offline_means_random_marked_and_not_frozen(dls, home):
    with pytest.warns(UserWarning, match='offline') as got: learn = torchvision_learner(dls, 'resnet18', offline=True)
    ours, = (o for o in got if issubclass(o.category, UserWarning))  # there may be others, of what an earlier test has left to the collector
    assert '\n' not in str(ours.message) and ours.filename == __file__
    assert learn.weights == 'random, asked for IMAGENET1K_V1 (offline)'
    assert all(p.requires_grad for p in learn.model.parameters())


def test_no_weights_asked_no_warning(dls, home):
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        learn = torchvision_learner(dls, 'resnet18', pretrained=False)
    assert learn.weights is None and learn.model[0][0].weight.requires_grad


def test_weights_of_the_hubs_cache(dls, home, planted, monkeypatch):
    net, file = planted
    (home/'hub/checkpoints').mkdir(parents=True)
    name = file.rename(home/'hub/checkpoints'/file.name).name
    monkeypatch.setattr(resnet, '_published', lambda arch: type('W', (), dict(url=f'https://nowhere.invalid/{name}')))
    learn = torchvision_learner(dls, 'resnet18', offline=True)
    assert learn.weights == 'resnet18 IMAGENET1K_V1'
    assert torch.equal(learn.model[0][7][1].conv2.weight, net.layer4[1].conv2.weight)
    frozen = [p.requires_grad for p in learn.model[0][7][1].conv2.parameters()]
    assert not any(frozen) and all(p.requires_grad for p in learn.model[1].parameters())
    (home/'hub/checkpoints'/name).write_bytes(b'cut off')
    with pytest.warns(UserWarning, match='offline, and there is no'): learn = torchvision_learner(dls, 'resnet18', offline=True)
    assert learn.weights.startswith('random')


def test_weights_from_an_address(dls, home, planted):
    net, file = planted
    assert torch.equal(resnet_weights('resnet18', file.as_uri(), offline=True)['conv1.weight'], net.conv1.weight)
    assert (home/'home/models'/file.name).is_file()
    wrong = file.rename(file.with_name('resnet18-00000000.pth'))
    with pytest.raises(DataUnavailable, match='sha256'): resnet_weights('resnet18', wrong.as_uri())
    with pytest.warns(UserWarning, match='do not fit'): learn = torchvision_learner(dls, 'resnet34', url=wrong.rename(wrong.with_name('mine.pth')).as_uri())
    assert learn.weights == 'random, asked for mine.pth'


def test_a_file_with_code_is_not_run(home):
    class Evil:
        def __reduce__(self): return os.mkdir, (str(home/'owned'),)
    torch.save(Evil(), home/'evil.pth')
    with pytest.raises(DataUnavailable, match='not a file of weights'): resnet_weights('resnet18', (home/'evil.pth').as_uri())
    assert not (home/'owned').exists()


def test_unknown_arch(dls):
    with pytest.raises(UserError, match="unknown ResNet of torchvision 'resnet19'; did you mean 'resnet1"): torchvision_learner(dls, 'resnet19')


# Data

def test_pooled_split_is_a_fifth_of_all_by_seed():
    own, a, b, c = [vision_dls('photos', size=32, bs=8, workers=0, device='cpu', **o)
                    for o in (dict(), dict(split='pooled'), dict(split='pooled'), dict(split='pooled', seed=1))]
    names = [[o.x.name for o in d.valid.items] for d in (own, a, b, c)]
    assert names[1] == names[2] != names[3] and len(names[1]) == 320 and set(names[1]) != set(names[0])
    assert not set(names[1]) & {o.x.name for o in a.train.items} and len(a.train.items) == 1280
    with pytest.raises(UserError, match="split='both'"): vision_dls('digits', split='both')


def test_a_batch_larger_than_a_sample():
    with pytest.warns(UserWarning, match='a batch of 408 was asked for'):
        learn = bench_learner('cifar100-resnet18', device='cpu', offline=True, pretrained=False, **{**SMALL, 'bs': 408})
    assert learn.recipe.bs == learn.dls.info['bs'] == learn.dls.info['n_train'] and len(learn.dls.train) == 1
    with pytest.raises(UserError, match='bs=408000 cannot be'):
        bench_learner('cifar100-resnet18', device='cpu', offline=True, **{**SMALL, 'bs': 408000, 'sample': 1.})
    with pytest.raises(UserError, match='bs=200 cannot be'): bench_learner('cifar100-resnet18', device='cpu', offline=True, **{**SMALL, 'bs': 200})


def test_what_has_no_effect_is_refused():
    for o in dict(act='mish'), dict(memory='3GB'):
        with pytest.raises(UserError, match=f'{next(iter(o))}=.* has no effect'): bench_learner('cifar100-resnet18', device='cpu', **SMALL, **o)


def test_the_suite_and_its_published_figures():
    todo = expand(['fp16'])
    assert len(todo) == 20 and len(set(todo)) == 20
    assert [o['bs'] for o in published('cifar100-resnet50')][:2] == [98, 164] and get_recipe('cifar100-resnet50').bs == 98
    assert [o['bs'] for o in published('cifar100-resnet152')] == [48, 88]


# Runs

@pytest.fixture(scope='module')
def trained(bf16):
    "A net in both precisions, at an equal batch and at the largest"
    runs = [run_recipe('cifar100-resnet18', device='cpu', offline=True, precision=p, **{**SMALL, **o})
            for o in (dict(), dict(bs='largest', memory='20GB')) for p in ('fp32', 'mixed')]
    return [from_json(o.to_json()) for o in runs]


def test_a_run_says_what_it_is(trained):
    assert all(o.status == 'ok' for o in trained), [o.error for o in trained]
    last = trained[-1]
    assert last.precision == dict(asked='mixed', effective='bf16') and last.data['split'] == 'pooled'
    assert last.asked == dict(bs='largest', memory='20GB') and last.recipe['bs'] == last.largest['bs'] == last.data['n_train']
    if last.weights.startswith('random'): assert len([o for o in last.warnings if 'not frozen' in o]) == 1


def test_table_of_real_runs(trained):
    table = Precisions(trained)
    assert [(r['batch'], r['precision']) for r in table.rows] == [('equal', 'fp32'), ('equal', 'bf16'), ('largest', 'fp32'), ('largest', 'bf16')]
    assert all(r['seconds'] and r['memory'] and r['accuracy'] is not None for r in table.rows)
    r32, r16 = table.rows[:2]
    assert r16['faster'] == r32['seconds']/r16['seconds'] and r16['memory_ratio'] == r16['memory']/r32['memory'] and 'faster' not in r32
    assert table.rows[3]['batch_ratio'] is None and 'all training images' in str(table), 'no ratio where the data is the limit'
    assert table.rows[3]['published_faster'] == 1692/1708 and 'published_faster' not in r16


# The table of made up Runs

def made_up(n, asked, bs, really=None, status='ok', seconds=10., **kwargs):
    more = dict(asked=dict(bs='largest'), largest=dict(why='9 does not fit')) if really else {}
    return Run(recipe=dict(name=f'cifar100-resnet{n}', arch=f'resnet{n}', bs=really or bs), status=status, seconds=seconds if status == 'ok' else None,
               precision=dict(asked=asked, effective={'mixed': 'fp16'}.get(asked, asked)), data=dict(name='<b>'), device=dict(name='made|up'),
               metrics=dict(accuracy=.5) if status == 'ok' else {}, **more, **kwargs)


def test_ratios_failures_and_refusals():
    failed = made_up(50, 'mixed', 98, status='failed', error='OutOfMemoryError: no room')
    refused = [(but(get_recipe('cifar100-resnet50'), precision='fp32'), 'no data')]
    table = Precisions([made_up(18, 'mixed', 'largest', 720, seconds=5.), made_up(18, 'fp32', 'largest', 400), failed, made_up(18, 'fp32', 408)], refused)
    rows = {(r['net'], r['batch'], r['precision']): r for r in table.rows}
    assert list(rows) == [('resnet18', 'equal', 'fp32'), ('resnet18', 'largest', 'fp32'), ('resnet18', 'largest', 'fp16'),
                          ('resnet50', 'equal', 'fp32'), ('resnet50', 'equal', 'fp16')]
    best = rows['resnet18', 'largest', 'fp16']
    assert (best['faster'], best['batch_ratio'], best['published_seconds'], best['published_bs']) == (2., 1.8, 1708, 720)
    text = str(table)
    assert 'resnet50, equal batch, fp32: refused (no data)' in text and 'failed (OutOfMemoryError: no room)' in text and 'one run of each' in text
    assert rows['resnet50', 'equal', 'fp16']['seconds'] is None and rows['resnet50', 'equal', 'fp16']['faster'] is None


def test_times_of_unequal_work_have_no_ratio():
    def of(asked, n, bs):
        p = Profile()
        log = p.steps['train']
        log.add([dict(samples=n, step=1.).get(c, 0.) for c in log.columns])
        return made_up(18, asked, 'largest', bs, profile=to_dict(p))
    a, b = Precisions([of('fp32', 16, 16), of('mixed', 26, 26)]).rows, Precisions([of('fp32', 99, 16), of('mixed', 100, 26)]).rows
    assert a[1]['faster'] is None and b[1]['faster'] == 1. and a[1]['batch_ratio'] == 26/16


def test_repeats_are_medians():
    table = Precisions([made_up(18, 'fp32', 408, seconds=o) for o in (10., 30., 11.)])
    assert [(r['seconds'], r['n']) for r in table.rows] == [(11., 3)] and 'medians' in str(table) and 'one run' not in str(table)


def test_formats_say_the_same(tmp_path):
    table = Precisions([made_up(18, 'fp32', 408), made_up(18, 'mixed', 408, seconds=4.)])
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert float(rows[1]['faster']) == 2.5 and rows[0]['faster'] == '' and json.loads(table.to_json())['rows'][1]['faster'] == 2.5
    assert '| resnet18 | equal | fp16 |' in table.to_markdown() and '2.50x' in table.to_markdown()
    table.rows[0]['net'] = '<i>'
    assert '>&lt;i&gt;</td>' in table._repr_html_() and '<i>' not in table._repr_html_()
    assert '&lt;b&gt;' in table._repr_html_() and '<b>' not in table._repr_html_().split('</b>', 1)[1]
    import matplotlib
    matplotlib.use('agg')
    table.plot().savefig(tmp_path/'x.png')
    assert (tmp_path/'x.png').read_bytes()[:4] == b'\x89PNG'
    with pytest.raises(UserError, match='nothing to draw'): Precisions([made_up(18, 'fp32', 408, status='failed', error='x')]).plot()


# The command

def fastbench(*args, cwd):
    return subprocess.run([sys.executable, '-m', 'fastbench', *args], capture_output=True, text=True, cwd=cwd)


def test_refused_recipes_are_in_the_table(tmp_path):
    got = fastbench('run', 'fp16', '--data', 'digits', '--precision', 'fp16', '--device', 'cpu', '--offline', '--plot', 'x.png', cwd=tmp_path)
    assert got.returncode == 2 and 'Traceback' not in got.stderr, got.stderr
    assert got.stdout.count('refused (') == 10 and 'resnet152, largest batch, fp16: refused' in got.stdout and 'no picture' in got.stderr
    assert not (tmp_path/'x.png').exists()


def test_plot_goes_with_the_suite(tmp_path):
    got = fastbench('run', 'digits-xresnet18', '--plot', 'x.png', cwd=tmp_path)
    assert got.returncode == 2 and got.stderr.count('\n') == 1 and '--plot' in got.stderr


def test_a_time_near_a_full_minute():
    assert [_clock(o) for o in (59.7, 119.4, 119.7, 3599.7, 7199.6)] == ['1:00', '1:59', '2:00', '1:00:00', '2:00:00']

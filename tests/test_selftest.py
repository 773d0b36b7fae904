"""`fastbench selftest`: what a failing check, a failing device and a mistyped name come to, and that its Runs stand beside others."""
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import fastbench.selftest.checks as checks
import fastbench.selftest.numbers as numbers
import fastbench.selftest.report as reports
import fastbench.selftest.trainings as trainings
from fastbench.errors import UserError
from fastbench.selftest.checks import CHECKS, Here, NotHere
from fastbench.selftest.report import Selftest, selftest
from fastbench.runs.store import load, save
from pretend import pretend


@pytest.fixture
def few(monkeypatch):
    "Three checks in place of all"
    def holds(here): return 'seen'
    def breaks(here): raise RuntimeError('no <b>such</b> luck\nmore lines')
    def elsewhere(here): raise NotHere('not on this device')
    monkeypatch.setattr(checks, 'CHECKS', found := {'holds': (holds, 'it holds', False), 'breaks': (breaks, 'it breaks', False), 'elsewhere': (elsewhere, 'it is elsewhere', False),
                                                    'slow': (holds, 'it takes minutes', True)})
    return found


def verdicts(found): return {o['check']: o['verdict'] for o in found.rows}


def test_each_check_gets_a_verdict(few):
    found = selftest('cpu')
    assert verdicts(found) == dict(holds='passed', breaks='failed', elsewhere='skipped', slow='skipped')
    assert found.failed == ['breaks'] and found.run.status == 'failed' and found.run.error == 'breaks'
    row = next(o for o in found.rows if o['check'] == 'breaks')
    assert row['detail'] == 'RuntimeError: no <b>such</b> luck'
    assert '1 passed, 1 failed, 2 skipped (breaks)' in found.line and '\n' not in found.line
    assert verdicts(selftest('cpu', full=True))['slow'] == 'passed'


def test_the_page_escapes_what_others_wrote(few):
    html = selftest('cpu').html
    assert '<b>such' not in html and '&lt;b&gt;such' in html and html.startswith('<!DOCTYPE html>')


def test_after_a_lost_device_nothing_is_believed(few):
    def lost(here): raise RuntimeError('CUDA error: GPU is lost')
    few = {'lost': (lost, 'it fails', False), **few}
    checks.CHECKS.clear()
    checks.CHECKS.update(few)
    found = selftest('cpu')
    assert verdicts(found) == dict(lost='failed', holds='not run', breaks='not run', elsewhere='not run', slow='skipped')
    assert found.run.status == 'failed'


def test_a_quick_one_begins_nothing_after_two_minutes(few, monkeypatch):
    assert reports.QUICK == 120
    def takes_them(here): monkeypatch.setattr(reports, 'QUICK', 0)
    few['holds'], few['late'] = (takes_them, 'it takes two minutes', False), few['holds']
    found = selftest('cpu')
    assert verdicts(found) == dict(holds='passed', breaks='skipped', elsewhere='skipped', slow='skipped', late='skipped')
    assert found.rows[-1]['detail'].endswith('minutes are over: --full') and found.run.status == 'ok'
    assert verdicts(selftest('cpu', full=True))['late'] == 'passed'
    assert verdicts(selftest('cpu', only=('breaks', 'late'))) == dict(breaks='failed', late='passed')  # asked for by name


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
def test_what_was_seen_is_kept_when_it_is_ended(few, signum):
    "In a check, also in one that takes every error for its own"
    def ends(here):
        try: os.kill(os.getpid(), signum)
        except Exception: return 'seen'
    before = signal.getsignal(signum)
    few |= dict(breaks=(ends, 'it is ended', False))
    found = selftest('cpu')
    assert verdicts(found) == dict(holds='passed', breaks='not run', elsewhere='not run', slow='skipped')
    assert [o['detail'] for o in found.rows][1:3] == [f'ended by {signum.name}', 'the selftest was ended']
    assert found.run.status == 'interrupted' and signal.getsignal(signum) is before


def test_names(few):
    assert verdicts(selftest('cpu', only=('slow',))) == dict(slow='passed')  # asked for by name: it may take its time
    with pytest.raises(UserError, match="unknown check 'brakes'; did you mean 'breaks'"): selftest('cpu', only=('brakes',))


def test_a_run_like_others(few, tmp_path):
    path = save(selftest('cpu').run, tmp_path)
    run = load(path)
    assert run.extra['kind'] == 'selftest' and Selftest(run).line == selftest('cpu').line
    assert 'failed' in str(run) and run.table.rows == []


def command(*args): return subprocess.run([sys.executable, '-m', 'fastbench', *args], capture_output=True, text=True)


def test_command(tmp_path):
    out = command('selftest', '--device', 'cpu', '--only', 'driver', '--only', 'mps', '--out', str(tmp_path), '--json')
    assert out.returncode == 0, out.stderr
    assert [o['verdict'] for o in json.loads(out.stdout)['rows']] == ['skipped', 'skipped'] and (tmp_path/'selftest.html').exists()
    out = command('selftest', '--device', 'cuda:7', '--out', str(tmp_path))
    assert out.returncode == 2 and out.stderr.startswith("fastbench: device 'cuda:7' is not there") and out.stderr.count('\n') == 1
    out = command('list', 'runs', '--out', str(tmp_path))
    assert out.returncode == 0 and 'selftest-' in out.stdout


def test_a_failed_check_is_the_exit_code(few, tmp_path):
    from typer.testing import CliRunner
    from fastbench.command.selftest import app
    assert CliRunner().invoke(app, ['selftest', '--device', 'cpu', '--out', str(tmp_path)]).exit_code == 1
    few.pop('breaks')
    assert CliRunner().invoke(app, ['selftest', '--device', 'cpu', '--out', str(tmp_path)]).exit_code == 0


def test_a_page_that_cannot_be_written_is_refused_before_the_checks(few, tmp_path):
    "A file that is not a report of ours is not replaced"
    from typer.testing import CliRunner
    from fastbench.command.selftest import app
    (tmp_path/'train.py').write_text('mine')
    for page, said in (('train.py', 'train.py exists and is not a report of fastbench'), ('train.py/x.html', 'train.py is a file'), ('.', 'is a folder')):
        got = CliRunner().invoke(app, ['selftest', '--device', 'cpu', '--out', str(tmp_path/'runs'), '-o', str(tmp_path/page)])
        assert isinstance(got.exception, UserError) and said in str(got.exception) and not list(tmp_path.glob('runs/*.json'))
    assert (tmp_path/'train.py').read_text() == 'mine'
    few.clear()
    for _ in range(2): assert CliRunner().invoke(app, ['selftest', '--device', 'cpu', '--out', str(tmp_path/'runs')]).exit_code == 0  # its own page is


def test_the_verdicts_are_shown_where_the_page_cannot_be_written(few, tmp_path, monkeypatch):
    "The disk is full in the meantime"
    from typer.testing import CliRunner
    import fastbench.page.report as module
    from fastbench.command.selftest import app
    def full(*args): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(module, 'write_whole', full)
    got = CliRunner().invoke(app, ['selftest', '--device', 'cpu', '--out', str(tmp_path)])
    assert isinstance(got.exception, UserError) and 'No space left' in str(got.exception) and 'such</b> luck' in got.stdout and 'holds the report' not in got.stdout


@pytest.mark.parametrize('signum, code', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_the_exit_code(few, tmp_path, signum, code):
    "1 means that a check failed"
    from typer.testing import CliRunner
    from fastbench.command.selftest import app
    def ends(here): os.kill(os.getpid(), signum)
    few |= dict(elsewhere=(ends, 'it is ended', False))  # after one that has failed
    got = CliRunner().invoke(app, ['selftest', '--device', 'cpu', '--out', str(tmp_path)])
    assert got.exit_code == code and f'ended by {signum.name}' in got.stdout and len(list(tmp_path.glob('selftest-*.json'))) == 1


def test_a_report_of_a_folder_with_one(few, tmp_path, root):
    save(selftest('cpu').run, tmp_path)
    for o in list((root/'benchmarks'/'results').glob('dawn-photos-airbench*.json'))[:1]: shutil.copy(o, tmp_path)
    from fastbench.page.report import report
    assert 'selftest' in report(tmp_path).html


# --- the checks themselves, where a CPU or a pretended GPU can answer

def test_every_point_is_there():
    assert {'waits', 'packed', 'device clock', 'device names', 'largest batch', 'compiled', 'overflow', 'peak', 'time to accuracy', 'airbench', 'faster', 'driver', 'mps', 'tests'} <= set(CHECKS)
    assert all(about and '\n' not in about for _, about, _ in CHECKS.values())


@pytest.mark.parametrize('name', ['profiler', 'packed', 'device names'])
def test_on_a_cpu(name):
    row, = selftest('cpu', only=(name,)).rows
    assert row['verdict'] == 'passed', row['detail']


@pytest.mark.parametrize('name', ['waits', 'device clock', 'overflow', 'driver', 'mps', 'airbench'])
def test_what_a_cpu_cannot_answer(name):
    row, = selftest('cpu', only=(name,)).rows
    assert row['verdict'] == 'skipped' and len(row['detail']) > 10


def test_a_packed_batch_that_is_wrong_is_found(monkeypatch):
    from fastbench.selftest.numbers import packed_call
    monkeypatch.setattr(numbers, 'packed_call', lambda m, x, *a: [packed_call(m, x, *a)[0].roll(1, 1)])
    row, = selftest('cpu', only=('packed',)).rows
    assert row['verdict'] == 'failed' and row['detail'].startswith('BERT in fp32: packed and padded differ by')


def test_a_peak_that_makes_no_sense_is_found(monkeypatch):
    monkeypatch.setattr(numbers, 'measure_peak', lambda d, p, budget: dict(fp32=2e12).get(p, 1e12))
    monkeypatch.setattr(checks, '_can', lambda here, p: True)
    row, = selftest('cpu', only=('peak',)).rows
    assert row['verdict'] == 'failed' and 'fewer bits is not faster' in row['detail']


# airbench94 is read by what it prints; this prints the same, and reads the data that it is given
AIRBENCH = '''
import os, torch
def _row(run, epoch, accuracy, seconds): print('|  %s  |  %s  |      1.2345  |     0.9000  |   0.9300  |  %s  |  %s  |' % (run, epoch, accuracy, seconds))
def warmup94(): _row('warmup', 0, '', '')
def train94(run):
    parts = {o: torch.load(f'cifar10/{o}.pt', weights_only=True) for o in ('train', 'test')}
    assert all(o['images'].dtype == torch.uint8 and o['images'].shape[1:] == (32, 32, 3) and len(o['images']) == len(o['labels']) for o in parts.values())
    assert len(parts['train']['classes']) == 3
    print('-'*20)
    _row(run, 0, '      ', '0.4000')
    _row('    ', 'eval', '0.9402', f'3.{run}000')
    print('-'*20)
'''


def test_beside_airbench(monkeypatch, tmp_path, gpu):
    from types import SimpleNamespace
    from PIL import Image
    from fastbench.vision.sources import Item
    def row(): return selftest('cuda', only=('airbench',)).rows[0]
    monkeypatch.setitem(sys.modules, 'airbench', None)
    assert row()['verdict'] == 'skipped' and row()['detail'] == 'airbench is not installed: pip install airbench'
    monkeypatch.delitem(sys.modules, 'airbench')
    (tmp_path/'airbench.py').write_text(AIRBENCH)
    monkeypatch.syspath_prepend(tmp_path)
    def none(*a, **k): raise UserError('offline, and cifar10 is not here')
    monkeypatch.setattr(trainings, 'load_source', none)
    assert row()['verdict'] == 'skipped' and row()['detail'] == 'offline, and cifar10 is not here'
    Image.new('L', (32, 32)).save(tmp_path/'a.png')  # gray, as some sets have it
    items = [Item(tmp_path/'a.png', i % 3) for i in range(6)]
    monkeypatch.setattr(trainings, 'load_source', lambda name, offline: SimpleNamespace(train=items[:4], valid=items[4:], classes=['a', 'b', 'c']))
    goal, asked, folder = dict(reached=.94, seconds=2.5), [], os.getcwd()
    def ours(here, name, repeat): asked.append((name, repeat, os.getcwd())); return SimpleNamespace(status='ok', goal=goal, error=None)
    monkeypatch.setattr(trainings, '_run', ours)
    got = row()
    assert got['verdict'] == 'passed', got['detail']
    assert got['detail'] == 'fastbench 2.5, 2.5, 2.5 s, airbench94 3, 3.1, 3.2 s (to 94.0% at least)'
    assert asked == [('dawn-airbench', i, folder) for i in range(3)] and os.getcwd() == folder
    goal['reached'] = None
    assert row()['verdict'] == 'failed' and row()['detail'] == '0 of 3 reached it: missed, missed, missed'


def test_on_a_pretended_gpu(monkeypatch):
    "The kernels for packed texts, the peak and CUPTI are not there; the rest of a training is"
    with pretend(devices=2) as gpu:
        row, = selftest('cuda', only=('device names',)).rows
        assert row['verdict'] == 'passed' and row['detail'] == 'cuda, cuda:0, cuda:1'


def test_waits_are_counted_by_what_pytorch_says(monkeypatch, gpu):
    import warnings
    mode = []
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', mode.append)
    gpu.on_wait.append(lambda *a: warnings.warn('called a synchronizing CUDA operation') if mode and mode[-1] == 'warn' else None)
    here = Here(torch.device('cuda:0'))
    assert checks.count_waits(here, 'digits-xresnet18', sample=.1, bs=16) == 0 and mode[-1] == 'default'
    real = checks._fit
    from fastai.callback.core import Callback
    class Reads(Callback):
        def after_loss(self): self.learn.loss.item()
    made = checks._learner
    monkeypatch.setattr(checks, '_learner', lambda *a, **k: made(*a, **k).add_cb(Reads()))
    assert checks.count_waits(here, 'digits-xresnet18', sample=.1, bs=16) == 1


def test_readme_and_docs_say_on_what_it_was_kept(root):
    "The table grows by Runs in benchmarks/results, and must not be behind them"
    from fastbench.selftest.report import hardware
    table = hardware(root/'benchmarks'/'results')
    assert table.rows and all(o['failed'] == 0 for o in table.rows)
    for line in table.to_markdown().splitlines():
        if line.startswith('|'): assert line.strip() in (root/'README.md').read_text(), 'run the cell of nbs/index.ipynb that makes the table, then docs/readme.py'

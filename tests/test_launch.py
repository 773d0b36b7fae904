"Runs in processes of their own: fresh, stopped politely or not, killed, orphaned; and what the parent is left with."
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fastbench.bench import launch as module
from fastbench.machine.download import DataUnavailable
from fastbench.bench.child import Stop
from fastbench.bench.launch import CannotStart, Interrupted, launch
from fastbench.errors import UserError
from fastbench.recipe import get_recipe
from fastbench.runs.store import NotKept, load, load_all

pytestmark = pytest.mark.skipif(os.name != 'posix', reason='signals of POSIX')
SMALL = get_recipe('digits-xresnet18', epochs=1, batches=2, workers=0, bs=32, size=8, sample=.2)
LONG = get_recipe(SMALL, epochs=10_000, batches=None)
LIMIT = 120  # seconds; only against hanging


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    "Several threads wait for each other where the machine is busy; the fork server learns it when it starts"
    with pytest.MonkeyPatch.context() as m:
        m.setenv('OMP_NUM_THREADS', '1')
        m.setattr(module, '_GPU', ())  # forked also beside a GPU: nothing here uses it
        yield


@pytest.fixture(autouse=True)
def nothing_changes():
    "Each test leaves handlers, the mask, environment and __main__ as they were, and no child"
    def state(): return ([signal.getsignal(o) for o in (signal.SIGINT, signal.SIGTERM)], signal.pthread_sigmask(signal.SIG_BLOCK, ()), dict(os.environ),
                         vars(sys.modules['__main__']).get('__file__'), vars(sys.modules['__main__']).get('__spec__'))
    before, children = state(), set(multiprocessing.active_children())
    yield
    after = state()
    for o in (before, after): o[2].pop('PYTEST_CURRENT_TEST', None)
    assert after == before and not set(multiprocessing.active_children()) - children


def at(phase, f, n=1):
    "A `tell` that calls `f` with what is told once `phase` is told the `n`th time; told['pid'] is the child"
    told = dict(phases=[])
    def tell(o):
        told['phases'].append(o['phase'])
        told['pid'] = o.get('pid', told.get('pid'))
        if o['phase'] == phase and told['phases'].count(phase) == n: f(told)
    tell.told = told
    return tell


def kill(signum, n=1): return lambda told: [os.kill(os.getpid(), signum) for _ in range(n)]


def gone(pid):
    for _ in range(LIMIT*10):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE: return True
        time.sleep(.1)


# A fresh process each

def test_each_repeat_is_fresh(tmp_path):
    tells = [at('start', lambda told: None) for _ in range(3)]
    a,b,c = [load(launch(SMALL, tmp_path, tell, device='cpu', repeat=i)) for tell,i in zip(tells, (0, 0, 1))]
    assert len({os.getpid(), *(o.told['pid'] for o in tells)}) == 4
    assert a.status == 'ok' and a.epochs == b.epochs and (a.seed, c.seed, c.repeat) == (42, 43, 1) and c.epochs != a.epochs
    assert a.profile['facts'] == b.profile['facts'] and a.environment['torch']['threads'] == 1
    assert tells[0].told['phases'][:3] == ['start', 'data', 'fit'] and all(gone(o.told['pid']) for o in tells)


def test_the_module_is_light_and_importing_it_changes_nothing():
    code = '''import os, signal, sys
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ)
import fastbench.cli, fastbench.bench.launch
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ))
assert not {'torch', 'fastai', 'transformers', 'numpy', 'pandas'} & set(sys.modules), sys.modules'''
    subprocess.run([sys.executable, '-c', code], check=True, timeout=LIMIT)


def test_a_script_is_not_run_again_in_the_child(tmp_path, monkeypatch):
    (tmp_path/'script.py').write_text(f'open({str(tmp_path/"mark")!r}, "w")')
    monkeypatch.setattr(sys.modules['__main__'], '__file__', str(tmp_path/'script.py'), raising=False)
    monkeypatch.setattr(sys.modules['__main__'], '__spec__', None)
    assert load(launch(SMALL, tmp_path, device='cpu')).status == 'ok' and not (tmp_path/'mark').exists()


def test_in_a_notebook_and_in_a_thread(tmp_path, monkeypatch):
    monkeypatch.delattr(sys.modules['__main__'], '__file__', raising=False)  # as in a notebook
    before,got = signal.getsignal(signal.SIGINT),[]
    t = threading.Thread(target=lambda: got.append(launch(SMALL, tmp_path, lambda o: got.append(signal.getsignal(signal.SIGINT) is before), device='cpu')))
    t.start()
    t.join(LIMIT)
    assert load(got[-1]).status == 'ok' and all(got[:-1])


def test_offline_reaches_the_child_alone(tmp_path):
    assert load(launch(SMALL, tmp_path, offline=True, device='cpu')).environment['variables']['HF_HUB_OFFLINE'] == '1'
    assert 'HF_HUB_OFFLINE' not in load(launch(SMALL, tmp_path, device='cpu')).environment['variables']


def test_another_environment_gets_another_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(module, '_of_server', {})  # a test of another file may have started the server
    assert module.start_method() == ('forkserver' if sys.platform == 'linux' else 'spawn')
    monkeypatch.setenv('OMP_NUM_THREADS', '2')
    assert module.start_method() == 'spawn'
    run = load(launch(SMALL, tmp_path, device='cpu'))
    assert run.status == 'ok' and run.environment['torch']['threads'] == 2
    monkeypatch.setattr(module, '_GPU', ('/',))
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    assert module.start_method() == 'spawn'


@pytest.mark.skipif(sys.platform != 'linux', reason='runs are forked on Linux alone')
def test_the_fork_server_has_imported_what_each_run_would_import():
    module._start_server()
    code = "import sys; sys.exit(not {'fastbench.bench.run', 'torch._dynamo'} <= set(sys.modules))"
    process = multiprocessing.get_context('forkserver').Process(target=exec, args=(code,))
    with module._no_script(): process.start()
    process.join(LIMIT)
    assert process.exitcode == 0


# Mistakes and errors

def test_mistakes_come_back_as_what_they_are(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'home'))
    for kwargs,kind,why in ((dict(device='tpu'), UserError, "'tpu'"), (dict(device='cpu', data='nosuch'), UserError, 'nosuch'),
                            (dict(device='cpu', data='cifar10'), DataUnavailable, 'cifar10')):
        with pytest.raises(kind, match=why): launch(SMALL, tmp_path/'runs', offline=True, **kwargs)
    with pytest.raises(UserError, match='unknown recipe'): launch('nosuch', tmp_path/'runs')
    (tmp_path/'file').write_text('')
    with pytest.raises(UserError, match='is a file'): launch(SMALL, tmp_path/'file')
    assert load_all(tmp_path/'runs') == ([], []) and 'Traceback' not in capfd.readouterr().err


def test_a_run_that_cannot_be_written_says_where_it_is(tmp_path):
    out = tmp_path/'runs'
    def spoil(told):
        out.rmdir()
        out.write_text('now a file')
    with pytest.raises(NotKept, match='the Run is kept as') as e: launch(SMALL, out, at('fit', spoil), device='cpu')
    path = Path(str(e.value).split('kept as ')[1].split(': ')[0])
    assert load(path).status == 'ok'
    path.unlink()


def test_an_error_outside_of_the_training_is_a_failed_run(tmp_path, capfd):
    run = load(launch(SMALL, tmp_path, device='cpu', stop='given twice', repeat=2))
    assert run.status == 'failed' and run.error.startswith('TypeError') and (run.seed, run.repeat) == (44, 2) and 'in _child' in run.traceback
    assert run.environment['python'] and 'Traceback' not in capfd.readouterr().err


# Killed

@pytest.mark.parametrize('phase', ['start', 'fit', 'train'])
def test_kill_9_of_the_child(tmp_path, phase):
    run = load(launch(LONG, tmp_path, at(phase, lambda told: os.kill(told['pid'], signal.SIGKILL)), device='cpu', repeat=1))
    assert run.status == 'failed' and 'SIGKILL' in run.error and 'memory' in run.error and run.seed == 43 and run.recipe['seed'] == 43
    assert len(list(tmp_path.iterdir())) == 1 and run.environment['host'] and 'failed' in run.headline


def test_kill_9_of_a_child_with_loader_processes(tmp_path):
    run = load(launch(get_recipe(LONG, workers=1), tmp_path, at('train', lambda told: os.kill(told['pid'], signal.SIGKILL)), device='cpu'))
    assert run.status == 'failed' and 'SIGKILL' in run.error


ORPHAN = """
import multiprocessing, os, signal, time
def outlive(): time.sleep(30); open(os.environ['OUTLIVED'], 'w').close()
def make():
    multiprocessing.get_context('fork').Process(target=outlive).start()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_child_has_forked_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path/'train.py').write_text(ORPHAN)
    monkeypatch.setenv('OUTLIVED', str(outlived := tmp_path/'outlived'))
    run = load(launch(f'{tmp_path}/train.py:make', tmp_path/'runs', device='cpu'))
    assert run.status == 'failed' and 'SIGKILL' in run.error and not outlived.exists()


def test_sigterm_to_the_child_alone(tmp_path):
    run = load(launch(LONG, tmp_path, at('train', lambda told: os.kill(told['pid'], signal.SIGTERM)), device='cpu'))
    assert run.status == 'interrupted' and run.profile['steps']['train']['n'] > 0
    run = load(launch(LONG, tmp_path, at('data', lambda told: os.kill(told['pid'], signal.SIGTERM)), device='cpu'))
    assert run.status in ('failed', 'interrupted') and (run.status == 'interrupted' or 'asked it to stop' in run.error)


def test_what_a_cell_shows_of_a_training_that_was_stopped():
    "It was `Interrupted: (2, None, '')`"
    assert str(Interrupted(signal.SIGINT, '/runs/a.json')) == 'the training was stopped by SIGINT; what was measured is kept: /runs/a.json'
    assert str(Interrupted(signal.SIGTERM)) == 'the training was stopped by SIGTERM; it had measured nothing'
    assert str(Interrupted(signal.SIGINT, None, 'no such data')) == 'the training was stopped by SIGINT; no such data'


# Stopped

@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_keeps_what_was_measured(tmp_path, signum, capfd):
    tell = at('train', kill(signum))
    with pytest.raises(Interrupted) as e: launch(LONG, tmp_path, tell, device='cpu')
    run = load(e.value.path)
    assert e.value.signum == signum and run.status == 'interrupted' and run.seconds > 0 and run.table.rows
    assert 'stopping' in tell.told['phases'] and 'Traceback' not in capfd.readouterr().err and gone(tell.told['pid'])
    n = run.profile['steps']['train']
    assert n['n'] >= 1 and all(x > 0 for x in n['values']['forward']) and all(x > 0 for x in n['values']['opt_step'])  # whole steps


def test_two_signals_end_it_at_once(tmp_path):
    with pytest.raises(Interrupted) as e: launch(LONG, tmp_path, at('train', kill(signal.SIGINT, 2)), device='cpu')
    assert e.value.path is None or load(e.value.path).status == 'interrupted'


def test_a_child_that_does_not_hear_is_killed_after_the_second(tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'GRACE', .3)
    def deaf(told):
        os.kill(told['pid'], signal.SIGSTOP)  # as in a step that takes minutes
        kill(signal.SIGINT, 2)(told)
    tell = at('fit', deaf)
    with pytest.raises(Interrupted) as e: launch(LONG, tmp_path, tell, device='cpu')
    assert e.value.path is None and gone(tell.told['pid']) and not list(tmp_path.iterdir())


def test_a_signal_before_there_is_anything_to_keep(tmp_path, capfd):
    with pytest.raises(Interrupted) as e: launch(LONG, tmp_path, at('start', kill(signal.SIGINT)), device='cpu')
    assert e.value.path is None or load(e.value.path).status == 'interrupted'
    assert 'Traceback' not in capfd.readouterr().err


def test_a_run_that_was_whole_when_the_signal_came_is_kept_as_ok(tmp_path):
    with pytest.raises(Interrupted) as e: launch(SMALL, tmp_path, at('done', kill(signal.SIGTERM)), device='cpu')
    assert load(e.value.path).status == 'ok'


@pytest.mark.skipif(sys.platform != 'linux', reason='pipes of another size')
def test_a_parent_that_does_not_read_does_not_hold_up_the_training(tmp_path, monkeypatch):
    real = multiprocessing.context.BaseContext.Pipe
    def small(self, duplex=True):
        a,b = real(self, duplex)
        fcntl.fcntl(b.fileno(), 1031, 4096)  # F_SETPIPE_SZ: two dozen messages
        return a,b
    monkeypatch.setattr(multiprocessing.context.BaseContext, 'Pipe', small)
    def wait(told):
        for _ in range(LIMIT*10):
            if list(tmp_path.glob('*.json')): return
            time.sleep(.1)
        os.kill(told['pid'], signal.SIGKILL)
    assert load(launch(get_recipe(SMALL, epochs=30, batches=1, sample=.02, bs=4), tmp_path, at('fit', wait), device='cpu')).status == 'ok'


def test_loader_processes_start_as_in_any_training(tmp_path):
    run = load(launch(get_recipe(SMALL, workers=1), tmp_path, device='cpu'))
    assert run.status == 'ok' and run.data['workers'] == 1


# The unit that decides: when does the child stop?

@pytest.mark.parametrize('phase,asked,raises', [('start', [1], True), ('fit', [1], False), ('fit', [1, 1], True), ('fit', [1, 2], False), ('done', [1, 1, 2], False)])
def test_when_a_wish_is_an_interrupt(phase, asked, raises):
    stop,n = Stop(),0
    stop.phase = phase
    for o in (*asked, *asked):
        try: stop.handle(o, None)
        except KeyboardInterrupt: n += 1
        if o is asked[-1] and n == 0 and not raises: break
    assert bool(stop) or stop()
    assert n == raises  # once, so that what follows is not disturbed


# Orphans and the fork server

PARENT = '''import sys
from fastbench.bench.launch import launch, CannotStart, Interrupted
from fastbench.recipe import get_recipe
from multiprocessing import forkserver
def connect(*args, of=forkserver.connect_to_new_process):
    res = of(*args)
    print('connected', file=sys.stderr, flush=True)
    return res
forkserver.connect_to_new_process = connect
r = get_recipe('digits-xresnet18', epochs=10_000, workers=0, bs=32, size=8, sample=.2)
try: launch(r, sys.argv[1], lambda o: print(o['phase'], o.get('pid', ''), flush=True), device='cpu')
except CannotStart as e: sys.exit(f'line: {e}')
except Interrupted as e: sys.exit(f'interrupted {e.signum} {e.path}')
'''  # no `if __name__ == '__main__'`, as a user's script may lack it


def parent(folder, file, **kwargs):
    file.write_text(PARENT)
    return subprocess.Popen([sys.executable, str(file), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def family(p, n=1):
    "The processes below `p`, once there are `n`"
    for _ in range(LIMIT*20):
        found = psutil.Process(p.pid).children(recursive=True)
        if len(found) >= n: return found
        time.sleep(.05)


def test_kill_9_of_the_parent_leaves_no_orphan(tmp_path):
    (tmp_path/'here').mkdir()
    (tmp_path/'here'/'numpy.py').write_text("open('mark', 'w')")  # what lies in the current folder is not imported
    p = parent(tmp_path/'runs', tmp_path/'script.py', cwd=tmp_path/'here')
    for line in p.stdout:
        if line.startswith('train'): break
    below = family(p, 2)
    p.kill()
    p.communicate(timeout=LIMIT)
    assert len(below) >= 2 and not psutil.wait_procs(below, timeout=LIMIT)[1]
    run, = load_all(tmp_path/'runs')[0]
    assert run.status == 'interrupted' and run.profile['steps']['train']['n'] > 0
    assert not (tmp_path/'here'/'mark').exists() or sys.version_info < (3, 11)


def server(p): return next((o for o in family(p) if 'forkserver' in ' '.join(o.cmdline())), None)


@pytest.mark.skipif(sys.platform != 'linux' or any(map(os.path.exists, module._GPU)), reason='no fork server here')
@pytest.mark.parametrize('who,signum,said', [('server', signal.SIGKILL, 'line: the process that imports torch'), ('parent', signal.SIGINT, 'interrupted 2 None'),
                                             ('parent', signal.SIGTERM, 'interrupted 15 None'), ('group', signal.SIGINT, 'interrupted 2 None')])
def test_before_torch_is_imported(tmp_path, who, signum, said):
    p = parent(tmp_path/'runs', tmp_path/'script.py', start_new_session=True)
    while not (s := server(p)): time.sleep(.01)
    below = family(p)
    deaf = int(next(o.split()[1] for o in open(f'/proc/{s.pid}/status') if o.startswith('SigBlk')), 16)
    assert all(deaf >> (o-1) & 1 for o in (signal.SIGINT, signal.SIGTERM))  # born deaf to them: no traceback whenever they come
    if who == 'server': assert 'connected\n' in p.stderr  # before that, Python itself starts another one
    if who == 'group': os.killpg(p.pid, signum)
    else: os.kill(s.pid if who == 'server' else p.pid, signum)
    out,err = p.communicate(timeout=LIMIT)
    assert said in err and out == '' and 'Traceback' not in err and p.returncode == 1 and not list((tmp_path/'runs').iterdir())
    assert not psutil.wait_procs(below, timeout=LIMIT)[1]


def test_the_fork_server_may_die_between_runs(tmp_path):
    "The next run gets another one; here it is only asked for, not waited for"
    from multiprocessing import forkserver
    pid = forkserver._forkserver._forkserver_pid
    if not pid: pytest.skip('no fork server here')
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    over, before = threading.Event(), signal.getsignal(signal.SIGINT)
    def ask():
        while signal.getsignal(signal.SIGINT) is before and not over.wait(.01): pass  # earlier, the signal would end all tests
        if not over.wait(.5): os.kill(os.getpid(), signal.SIGINT)
    t = threading.Thread(target=ask)
    with pytest.raises((Interrupted, CannotStart)):
        t.start()
        try: launch(SMALL, tmp_path, device='cpu')
        finally:
            over.set()  # or the signal would end a later test
            t.join()
    assert not forkserver._forkserver._forkserver_pid or gone(forkserver._forkserver._forkserver_pid)


@pytest.mark.parametrize('code,frozen', [('import fastbench.bench.imports', True), ('import fastbench.all, fastbench.bench.run', False)])
def test_only_processes_of_our_own_freeze_what_they_imported(code, frozen):
    "Whoever imports fastbench keeps Python's garbage collection as it was"
    code += '; import gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000, gc.get_threshold())'
    p = subprocess.run([sys.executable, '-c', f'import gc; was = gc.get_threshold(); {code}; assert gc.get_threshold() == was'], capture_output=True, text=True)
    assert p.stdout.split()[:2] == ['True', str(frozen)], p.stderr

"fastbench launch: two processes, one Run; whatever happens to one of them ends both with one line, and nothing is left running"
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import fastbench
from fastbench.bench.processes import STRATEGIES, launch_processes, _rank_variables
from fastbench.distributed.board import Board, blame
from fastbench.errors import UserError
from fastbench.measure.phases import SYNCS
from fastbench.recipe import get_recipe
from fastbench.runs.ranks import RanksTable
from fastbench.runs.store import load
from started import hears_signals

TROUBLE = str(Path(__file__).parent/'examples'/'trouble.py') + ':make'


def left():
    "Processes of a training that still run"
    def of_training(p):
        try: return 'fastbench.bench.rank' in ' '.join(p.cmdline())
        except psutil.Error: return False
    return [p for p in psutil.Process().children(recursive=True) if of_training(p)]


def launched(tmp_path, what='', tell=None, workers=0, **options):
    run = load(launch_processes(get_recipe(TROUBLE, what=what, workers=workers), 2, tmp_path, tell, device='cpu', **options))
    assert not left()
    return run


def test_the_strategies_known_without_torch_are_those_there():
    import fastbench.distributed.ddp, fastbench.distributed.fsdp, fastbench.distributed.zero_state  # noqa: E401,F401
    from fastbench.distributed.strategy import strategies
    assert set(STRATEGIES) == set(strategies)


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_one_run_of_two_processes(tmp_path, monkeypatch, strategy):
    (tmp_path/'here').mkdir()
    for o in ('token', 'numpy'): (tmp_path/'here'/f'{o}.py').write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path/'here')
    told = []
    run = launched(tmp_path, 'late', told.append, strategy=strategy)
    assert run.status == 'ok' and (run.world_size, run.strategy) == (2, strategy) and run.engine['sharded'] == (strategy == 'fsdp')
    assert [r['rank'] for r in run.ranks] == [0, 1] and all(r['phases']['backward'] > 0 for r in run.ranks) and len(list(tmp_path.glob('*.json'))) == 1
    assert not any('busy machine' in o for o in run.warnings) and 'others' not in run.noise
    assert '2 x 4 = 8 samples' in run.engine['batch'] and f'2 x {strategy}' in run.title
    assert {'start', 'data', 'fit', 'epoch', 'done'} - {'start'} <= {o['phase'] for o in told}
    a, b = (r['phases'] for r in run.ranks)  # the second reads slowly, and the first waits for it in the first exchange of a step
    assert a['transfer'] == b['transfer'] > 0 and RanksTable(run).verdict['text'].startswith('process 1 is waited for: its draw takes ')
    assert strategy == 'fsdp' or a['waiting'] > 2*b['waiting']  # with fsdp it waits in forward already
    assert run.ranks[0]['syncs'] == ['loss_sync', *['gradient_sync']*(strategy == 'ddp'), 'step_sync'] and not set(a) & {*SYNCS}
    assert any('not measured apart' in o for o in RanksTable(run).notes) == (strategy == 'fsdp')


def test_a_checkout_that_is_not_installed_is_found(tmp_path, monkeypatch):
    "The processes look in the current folder where this fastbench itself lies, and nowhere else"
    monkeypatch.chdir(Path(fastbench.__file__).parent.parent)
    there = _rank_variables()
    monkeypatch.chdir(tmp_path)
    assert _rank_variables() == there | dict(PYTHONSAFEPATH='1') and 'PYTHONSAFEPATH' not in there


def test_an_error_of_one_ends_both_and_is_said_once(tmp_path):
    run = launched(tmp_path, 'error')
    assert run.status == 'failed' and run.error == 'process 1: ValueError: a sample of this process is bad (in Trouble.before_batch)'
    assert 'trouble.py' in run.traceback and (run.world_size, run.strategy) == (2, 'ddp')


def test_one_that_ends_itself_ends_both_with_a_line_of_the_users_code(tmp_path):
    run = launched(tmp_path, 'exit')
    assert run.status == 'failed' and run.error.startswith('process 1: SystemExit: 0: it ends the whole process') and '\n' not in run.error
    assert 'trouble.py' in run.traceback and 'rank.py' not in run.traceback


def test_memory_that_runs_out_in_one_ends_both_and_says_what_needs_less(tmp_path):
    run = launched(tmp_path, 'memory')
    assert run.status == 'failed' and run.error.startswith('process 1: ') and 'out of memory on cpu: a batch of 4 does not fit' in run.error and "bs='largest'" in run.error


@pytest.mark.parametrize('workers', [0, 1])
def test_a_killed_process_is_named(tmp_path, workers):
    "Not the loader process of the other one, which torchrun ends with it"
    assert launched(tmp_path, 'kill', workers=workers).error == 'process 1 was killed by SIGKILL: often the system ran out of memory'


def test_what_the_processes_print_is_shown_without_words_of_torchrun(tmp_path, capfd, monkeypatch):
    "It knows all the same how one ended, and leaves nothing among temporary files"
    (tmp_path/'t').mkdir()
    monkeypatch.setenv('TMPDIR', str(tmp_path/'t'))
    assert launched(tmp_path/'r', 'kill', show_output=True).error == 'process 1 was killed by SIGKILL: often the system ran out of memory'
    said = ''.join(capfd.readouterr())
    assert 'this process is about to be killed' in said and 'torch' not in said and 'Traceback' not in said, said
    assert not list((tmp_path/'t').glob('torchelastic*'))


def test_a_process_that_hangs_is_named_with_its_place(tmp_path):
    run = launched(tmp_path, 'hang', timeout=30)  # they may begin that far apart
    assert run.error.startswith('process 1 hung: it stood in stand_still (trouble.py:') and 'stand_still' in run.traceback


GLOO = 'RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/{}'
CLOSED = 'pair.cc:561] Connection closed by peer [10.0.0.2]:9369. This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! \U0001f3d6\ufe0f'


@pytest.mark.parametrize('said,why', [('unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation to complete (in Own.after_step)', 'it waited 15 s in vain'), (CLOSED + ' (in Own.after_step)', 'its connection to 10.0.0.2 was closed')])
def test_processes_that_fall_out_of_step_are_told_so_in_plain_words(tmp_path, said, why):
    for r, line in enumerate((CLOSED, said)):
        Board(tmp_path, r).begin()
        Board(tmp_path, r).say('error', line=GLOO.format(line), of_user=False, echo=True, traceback='of it', time=2-r)
    line = blame(Board(tmp_path, None))['line']
    assert line.startswith(f'process 1 and the others lost each other (process 1 in Own.after_step): {why}. They fell out of step') and 'any_rank(flag)' in line
    assert not any(o in line for o in ('gloo', '__w', 'GLHF', '.cc')) and '\n' not in line


BUSY = """
import ctypes, sys, time
from fastbench.distributed.board import Board, Lookout

def deep(n):
    yield n
    if n: yield from deep(n-1)

def busy():
    while True: list(deep(30))

def in_c():
    time.sleep(1)
    ctypes.PyDLL(None).sleep(60) # keeps Python from running

with Lookout(Board(sys.argv[1]), timeout=-1) as look:
    look.step()
    globals()[sys.argv[2]]()
"""


@pytest.mark.parametrize('where', ('busy', 'in_c'))
def test_the_stacks_of_a_process_that_hangs_are_whole(tmp_path, where):
    "They were read while the threads ran on: that of a busy one was mostly cut off, and now and then the process crashed"
    ended = subprocess.run([sys.executable, '-c', BUSY, str(tmp_path), where], timeout=60, cwd=tmp_path).returncode
    stacks = (tmp_path/'0.stack').read_text()
    assert ended in (1, 70) and f' in {where}\n' in stacks and stacks.rstrip().endswith('in <module>')


def test_all_are_started_anew_where_that_was_asked_for(tmp_path):
    run = launched(tmp_path, 'once', max_restarts=1)
    assert run.status == 'ok' and len(run.ranks) == 2


def test_nan_in_one_stops_both_at_the_same_step(tmp_path):
    assert launched(tmp_path, 'nan').status == 'diverged'


def test_a_target_that_is_reached_ends_both(tmp_path):
    run = load(launch_processes(get_recipe(TROUBLE, target=.01, epochs=3), 2, tmp_path, device='cpu'))
    assert run.status == 'ok' and run.goal['epochs'] == 1 and len(run.epochs) == 1 and len(run.ranks) == 2 and run.goal['reached'] > .01


def test_one_process_trains_as_without_others(tmp_path):
    run = load(launch_processes(get_recipe(TROUBLE), 1, tmp_path, device='cpu', strategy=None))
    assert run.status == 'ok' and run.processes == (1, '') and len(run.ranks) == 1 and not run.engine


STARTER = f'''
import sys
from fastbench.bench.launch import Interrupted
from fastbench.bench.processes import launch_processes
from fastbench.recipe import get_recipe
def tell(o):
    if o["phase"] == "train" and o["step"] > 2: print("fit", flush=True)
try: launch_processes(get_recipe({TROUBLE!r}, what="slow", epochs=100, workers=int(sys.argv[2])), 2, sys.argv[1], tell, device="cpu")
except Interrupted as e: print(e.signum, e.path, flush=True)
'''


@contextmanager
def starter(tmp_path, workers=0):
    "A process that has started two, once they train, for minutes: they are ended before; workers: loader processes of each"
    p = subprocess.Popen([sys.executable, '-c', STARTER, str(tmp_path), str(workers)], stdout=subprocess.PIPE, text=True, preexec_fn=hears_signals)
    try:
        assert p.stdout.readline() == 'fit\n'
        yield p
    finally: p.kill()


@pytest.mark.parametrize('signum,workers', [(signal.SIGINT, 1), (signal.SIGHUP, 0)])
def test_a_signal_stops_both_after_the_step_and_keeps_the_run(tmp_path, signum, workers):
    "A terminal that is closed sends one, too; loader processes live until the step is over"
    with starter(tmp_path, workers) as p:
        p.send_signal(signum)
        got, path = next(o for o in p.stdout if o != 'fit\n').split(' ', 1)
        assert p.wait(300) == 0 and int(got) == signum
        run = load(path.strip())
        assert run.status == 'interrupted' and len(run.ranks) == 2


def test_both_end_if_who_started_them_is_killed(tmp_path):
    with starter(tmp_path) as p:
        ours = psutil.Process(p.pid).children(recursive=True)
        assert len(ours) >= 3  # torchrun and two
        p.kill()
        p.wait()
        assert not psutil.wait_procs(ours, timeout=300)[1]


@pytest.mark.parametrize('kwargs,match', [(dict(nproc=0), 'nproc=0 cannot be'), (dict(nproc=2, strategy='zeor'), "unknown strategy 'zeor'"), (dict(nproc=2, strategy=None), '2 processes need a strategy')])
def test_slips_are_one_line(tmp_path, kwargs, match):
    with pytest.raises(UserError, match=match) as e: launch_processes('digits-xresnet18', folder=tmp_path, **kwargs)
    assert '\n' not in str(e.value)


def test_what_the_processes_refuse_is_said_once(tmp_path):
    with pytest.raises(UserError, match="bs='largest' is found in one process") as e:
        launch_processes(get_recipe('digits-xresnet18', bs='largest'), 2, tmp_path, device='cpu')
    assert '\n' not in str(e.value) and not left()


def test_other_data_on_one_of_them_is_refused_before_it_trains(tmp_path):
    with pytest.raises(UserError, match='^the processes differ: data is 128 in process 0 and 64 in process 1. Give all machines'): launched(tmp_path, 'fewer')
    assert not list(tmp_path.glob('*.json')) and not left()


def test_more_processes_than_gpus_are_refused(gpu, monkeypatch):
    from fastbench.bench.rank import _device
    def of(process, asked=None):
        monkeypatch.setenv('LOCAL_RANK', str(process))
        monkeypatch.setenv('LOCAL_WORLD_SIZE', '3')
        return _device(asked)
    assert of(1, 'cpu') == 'cpu' and of(0) == 'cuda:0' and of(1, 'cuda') == 'cuda:1' and of(2, 'cuda:0') == 'cuda:0'
    with pytest.raises(UserError, match='^process 2 of this machine has no GPU: torch finds 2. Start 2 '): of(2)


def test_a_full_disk_is_the_same_error_as_of_one_process(tmp_path):
    "Its exit code says that what was asked for was right"
    from fastbench.bench.processes import ended
    from fastbench.distributed.board import Board
    from fastbench.runs.store import NotKept
    for error, kind in ((NotKept('no room'), NotKept), (UserError('a slip'), UserError)):
        board = Board(tmp_path)
        board.begin()
        board.failed(error)
        with pytest.raises(UserError) as e: ended(board, '', [], get_recipe('digits-xresnet18'), 0, tmp_path)
        assert type(e.value) is kind and str(e.value) == str(error)

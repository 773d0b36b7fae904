"A real Slurm of two nodes on this machine: what is submitted leaves one Run, however the job ends"
import os
import shlex
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastbench.bench.launch import Interrupted
from fastbench.bench.processes import launch_processes
from fastbench.bench.slurm import Slurm
from fastbench.errors import UserError
from fastbench.recipe import get_recipe
from fastbench.runs.store import load

HERE = Path(__file__).parent
TROUBLE = f'{HERE}/examples/trouble.py:make'
PARTS = 'slurmctld', 'slurmd', 'sbatch', 'srun', 'munged'


@pytest.fixture(scope='module')
def slurm(tmp_path_factory):
    missing = [o for o in PARTS if not shutil.which(o)]
    if missing or os.geteuid(): pytest.skip(f"needs Slurm, as root: {', '.join(missing) or 'not root'} (.ci/run installs slurmctld slurmd slurm-client munge where it may)")
    folder = tmp_path_factory.mktemp('slurm')
    env = os.environ | dict(PORT=str(random.randint(11000, 19000)))
    started = subprocess.run([HERE/'slurm.sh', 'start', folder], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    os.environ['SLURM_CONF'] = f'{folder}/slurm.conf'
    try:
        if started.returncode: pytest.skip(f'Slurm does not start here: {started.stdout[-300:]}')
        tried = subprocess.run(['srun', '--nodes=2', 'true'], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        if tried.returncode: pytest.skip(f'Slurm runs nothing here: {tried.stderr[-300:]}')
        yield folder
    finally:
        subprocess.run([HERE/'slurm.sh', 'stop', folder], stdin=subprocess.DEVNULL, timeout=300)
        del os.environ['SLURM_CONF']


def notes(told): return [o['line'] for o in told if o['phase'] == 'note']


def launched(folder, what='', told=None, job=None, epochs=1, **options):
    told = [] if told is None else told
    place = Slurm(nodes=2, goes_on='checkpoint_every' in options, **(job or {}))
    return load(launch_processes(get_recipe(TROUBLE, what=what, epochs=epochs), 1, folder, told.append, device='cpu', place=place, **options))


def jobs(): return subprocess.run(['squeue', '--noheader', '--format=%T'], capture_output=True, text=True).stdout.split()


def wait_for(f, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if got := f(): return got
        time.sleep(.2)
    raise AssertionError(f'not within {seconds} s')


def test_two_nodes_leave_one_run(slurm, tmp_path):
    told = []
    run = launched(tmp_path, told=told, strategy='fsdp')
    assert (run.status, run.world_size, run.strategy, len(run.ranks)) == ('ok', 2, 'fsdp', 2) and run.engine['sharded']
    assert re.fullmatch(r'job \d+ is submitted, and goes on if this command is killed: .*/job.sh', notes(told)[0])
    assert {'data', 'fit', 'epoch', 'done'} <= {o['phase'] for o in told} and len(list(tmp_path.glob('*.json'))) == 1
    script, = tmp_path.glob('slurm/*/job.sh')
    assert subprocess.run(['sbatch', '--test-only', script], capture_output=True).returncode == 0


def test_an_error_on_the_second_node_is_said_once(slurm, tmp_path):
    run = launched(tmp_path, 'error')
    assert run.error == 'process 1: ValueError: a sample of this process is bad (in Trouble.before_batch)' and run.world_size == 2


def test_a_killed_process_is_named(slurm, tmp_path):
    assert launched(tmp_path, 'kill').error == 'process 1 was killed by SIGKILL: often the system ran out of memory'


def test_a_process_that_hangs_is_named_with_its_place(slurm, tmp_path):
    assert launched(tmp_path, 'hang', timeout=30).error.startswith('process 1 hung: it stood in stand_still (trouble.py:')


SCRIPT = '''
import sys
from fastbench.bench.launch import Interrupted
from fastbench.bench.processes import launch_processes
from fastbench.bench.slurm import Slurm
from fastbench.recipe import get_recipe
from fastbench.runs.store import load
def tell(o): print(o['phase'], o.get('line', ''), flush=True)
more = dict(checkpoint_every='4steps') if sys.argv[4:] else {}
try: path = launch_processes(get_recipe(sys.argv[1], what='slow', epochs=int(sys.argv[3])), 1, sys.argv[2], tell, place=Slurm(nodes=2, goes_on=bool(more)), device='cpu', **more)
except Interrupted as e: print('interrupted', e.path, load(e.path).status if e.path else '', flush=True)
else: print('kept', load(path).status, load(path).error, flush=True); print('file', path, flush=True)
'''


@pytest.fixture
def beside(slurm, tmp_path, request):
    "A job that takes a while (given its epochs, of 3 s each: one of higher priority has to come meanwhile), followed by another process"
    p = subprocess.Popen([sys.executable, '-c', SCRIPT, TROUBLE, tmp_path, *getattr(request, 'param', ['4'])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    def until(*words):
        while line := p.stdout.readline():
            said.append(line.strip())
            if all(o in line for o in words): return line.strip()
        raise AssertionError('\n'.join(said))
    p.until = until
    yield p
    p.kill()
    subprocess.run(['scancel', '--user=root'])
    wait_for(lambda: not jobs())


def number(line): return re.search(r'job (\d+)', line)[1]


LONG = pytest.mark.parametrize('beside', [['100']], indirect=True)  # it is over when it is ended, on a busy machine too


@LONG
def test_ctrl_c_ends_the_job_after_the_step_and_keeps_the_run(beside, tmp_path):
    beside.until('train')
    beside.send_signal(signal.SIGINT)
    assert 'interrupted' in beside.until('interrupted').split()[2:] and not jobs()


@LONG
def test_a_cancelled_job_stays_cancelled(beside):
    n = number(beside.until('is submitted'))
    beside.until('train')
    subprocess.run(['scancel', n], check=True)
    last = beside.until('kept')
    assert last.startswith('kept interrupted') or last == f'kept failed job {n} was cancelled'
    assert not jobs()


@pytest.mark.parametrize('beside', [['4', 'checkpoints']], indirect=True)
def test_a_preempted_job_goes_on_from_its_checkpoint_exactly(beside, slurm, tmp_path):
    preempt(beside)
    run = load(beside.until('file').split(' ', 1)[1])
    assert run.status == 'ok' and run.resumed['steps'][0] > 2
    whole = launched(tmp_path/'whole', 'slow', epochs=4)
    for k in ('train_loss', 'valid_loss'): assert run.epochs[-1][k] == pytest.approx(whole.epochs[-1][k], rel=1e-6)
    assert not whole.resumed and [o.stem for o in tmp_path.glob('*.json')] == [Path(run.path).stem]  # its first part left one, too


def test_a_preempted_job_without_checkpoints_begins_anew(beside, slurm, tmp_path):
    preempt(beside)
    assert beside.until('kept').startswith('kept ok') and len(list(tmp_path.glob('*.json'))) == 1


def preempt(beside):
    for _ in range(4): beside.until('train')
    subprocess.run(['sbatch', '--partition=high', '--nodes=2', '--output=/dev/null', '--wrap', 'sleep 2'], check=True, stdout=subprocess.DEVNULL)
    assert 'goes back into the queue' in beside.until('note a job of higher priority')
    beside.until('waits: ')


OWN = '''
import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
import fastbench.distributed.learner
from fastbench.train.learner import BenchLearner
from fastbench.machine.group import gather, rank, world_size
torch.manual_seed(0)
items = [(torch.randn(8), i % 2) for i in range(32)]
learn = BenchLearner(DataLoaders(DataLoader(items, bs=4), DataLoader(items[:8], bs=4)), torch.nn.Linear(8, 2), loss_func=torch.nn.CrossEntropyLoss(), lr=.1)
with learn.distributed(cpu=True), learn.no_bar(), learn.no_logging():
    learn.fit(1)
    same = gather(sum(p.sum().item() for p in learn.model.parameters()))
    if rank() == 0: print('processes', world_size(), 'differ' if len(set(same)) > 1 else 'agree', flush=True)
'''


def test_own_script_that_srun_starts(slurm, tmp_path):
    "No torchrun: Slurm's own words are enough"
    (tmp_path/'train.py').write_text(OWN)
    p = subprocess.run(['srun', '--nodes=2', '--ntasks-per-node=1', sys.executable, tmp_path/'train.py'], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert not p.returncode and 'processes 2 agree' in p.stdout, p.stderr[-2000:]


def test_what_slurm_refuses_is_one_line(slurm, tmp_path):
    with pytest.raises(UserError, match='^sbatch: .*invalid partition') as e: launched(tmp_path, job=dict(partition='nowhere'))
    assert '\n' not in str(e.value)


def test_a_folder_that_the_nodes_do_not_see(slurm, tmp_path, monkeypatch):
    "A Python that is on one machine alone stands for it"
    python = tmp_path/'python'
    python.symlink_to(sys.executable)
    monkeypatch.setattr('sys.executable', str(python))
    def submitted(o):
        if 'is submitted' in o.get('line', ''): python.unlink(missing_ok=True)
    with pytest.raises(UserError, match='has no .*/python: are environment and folder shared'):
        launch_processes(get_recipe(TROUBLE), 1, tmp_path/'runs', submitted, place=Slurm(nodes=2), device='cpu')


def test_slips_are_one_line():
    with pytest.raises(UserError, match='nodes=0 cannot be'): Slurm(nodes=0)


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', '/nowhere')
    with pytest.raises(UserError, match='sbatch is not here: --slurm is for a machine'): launch_processes('digits-xresnet18', 1, tmp_path, place=Slurm())


@pytest.mark.parametrize('options', [['gres=gpu:2'], ['--gpus-per-task=1']])
def test_own_words_for_gpus_are_the_only_ones(options):
    assert 'gpus-per-node' not in Slurm(options=options).script('digits-xresnet18', 2, device='cuda')
    assert '#SBATCH --gpus-per-node=2' in Slurm().script('digits-xresnet18', 2, device='cuda')


def test_words_for_slurm_with_spaces_stay_whole(tmp_path, monkeypatch):
    "Slurm reads these lines as a shell does, and a % as the beginning of a number"
    monkeypatch.chdir(tmp_path)
    Path('my train.py').write_text('def make(): ...')
    script = Slurm(options=['comment=two words', 'mem 64G', 'qos="a b"'], told='fastbench launch\nrm').script(get_recipe('my train.py'), path=tmp_path/'100% mine')
    lines = [o for o in script.splitlines() if o.startswith('#')]
    words = [shlex.split(o)[1:] for o in lines if o.startswith('#SBATCH')]
    for o in ['--job-name=my train.py:make'], [f'--output={tmp_path}/100%% mine/said.txt'], ['--comment=two words'], ['--mem', '64G'], ['--qos=a b']: assert o in words
    assert '# fastbench launch rm' in lines

"macOS and Windows by stand-ins (see elsewhere.py): never run on either"
import io
import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import nn

import fastbench.bench.child as child
import fastbench.bench.launch as launch
import fastbench.bench.processes as processes
import fastbench.bench.rank as rank
import fastbench.compare.ab as ab
import fastbench.distributed.board as board
import fastbench.draw.build as build
import fastbench.machine.noise as noise
import fastbench.measure.profiler as profiler_module
import fastbench.train.batch_size as batch_size
from fastbench.bench.learner import seeded
from fastbench.draw.fast import fast_images
from fastbench.errors import UserError
from fastbench.machine.device import draws_kept, wait_for
from fastbench.machine.group import join
from fastbench.measure.clock import DeviceClock, DeviceQueue
from fastbench.measure.phases import rows
from fastbench.train.arriving import mark_queue
from fastbench.train.loop import FastLoop
from elsewhere import apple_queue, having, spawn_alone

MPS = torch.device('mps')


def double(x): return 2*x


def learner(kind=Learner, workers=0, n=32, bs=4):
    items = [(torch.randn(3), torch.tensor(0)) for _ in range(n)]
    dl = TfmdDL(items, bs=bs, num_workers=workers, after_batch=[double])
    return kind(DataLoaders(dl, TfmdDL(items[:4], bs=4), device=torch.device('cpu')), nn.Linear(3, 2), loss_func=nn.CrossEntropyLoss(), opt_func=SGD)


def fit(learn, n=1):
    with learn.no_bar(), learn.no_logging(): learn.fit(n)
    return learn


# Loader processes that are not forked

def test_profile_with_processes_that_are_begun_anew(monkeypatch):
    before = set(multiprocessing.active_children()) # an earlier test's Learner may still hold its loader's process
    with spawn_alone(monkeypatch): learn = fit(learner(workers=1).profile(loader=True))
    got = {(r['phase'], r['action']): r for r in learn.profiler.table.rows}
    for o in (left := set(multiprocessing.active_children()) - before): o.join(60)
    assert got['train', 'step']['calls'] == 8 and not [o for o in left if o.is_alive()]
    stations = learn.profiler.profile.facts['loader']['train']
    assert stations['batches'] == 8 and {r['station']: r['calls'] for r in stations['rows']}['collate'] >= 8


# Apple's GPU

@pytest.mark.parametrize('kind', [Learner, FastLoop])
def test_the_clock_of_an_apple_gpu(monkeypatch, kind):
    with apple_queue(monkeypatch) as gpu:
        monkeypatch.setattr(profiler_module, '_device_clock', lambda device, hold: DeviceClock(DeviceQueue(MPS), hold))
        learn, waits = learner(kind, n=20*4).profile(), []
        class Count(Callback):
            def after_train(self): waits.append(gpu.waits)
        learn.add_cb(Count())
        fit(learn)
    got = {(r['phase'], r['action']): r for r in rows(learn.profiler.profile)}
    assert got['train', 'step']['calls'] == 20 and 0 < got['train', 'forward']['device_mean'] <= got['train', 'step']['device_mean']
    assert waits == [0] and gpu.waits


def test_events_of_an_apple_gpu(monkeypatch):
    with apple_queue(monkeypatch) as gpu:
        a, b = (mark_queue(MPS, enable_timing=True) for _ in range(2))
        b.synchronize()
        assert gpu.waits == 1 and a.query() and a.elapsed_time(b) > 0 and a.elapsed_time(a) == 0
        gpu.at[-2] = gpu.at[-1]
        gpu.asked.clear()
        assert a.elapsed_time(b) == 0


def test_an_apple_gpu_is_waited_for_and_its_draws_are_given_back(monkeypatch):
    with apple_queue(monkeypatch) as gpu:
        wait_for(MPS)
        assert gpu.waits == 1
        states = []
        monkeypatch.setattr(torch.mps, 'get_rng_state', lambda device='mps': 'as it was')
        monkeypatch.setattr(torch.mps, 'set_rng_state', lambda state, device='mps': states.append(state))
        monkeypatch.setattr(torch.mps, 'manual_seed', lambda n: None)
        with draws_kept(MPS): pass
        with seeded(1, MPS): pass
        assert states == ['as it was']*2


def test_several_processes_refuse_an_apple_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    for k, v in dict(WORLD_SIZE='2', RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT='29500').items(): monkeypatch.setenv(k, v)
    assert rank._device(None) == 'mps' and rank._device('cpu') == 'cpu'
    with pytest.raises(UserError, match='cannot share Apple.*--device cpu'): join(rank._device(None))


def test_memory_of_an_apple_gpu(monkeypatch):
    monkeypatch.setattr(torch.mps, 'recommended_max_memory', lambda: 1000)
    monkeypatch.setattr(torch.mps, 'driver_allocated_memory', lambda: 600)
    room = batch_size._Room(MPS, None, .1, 0)
    assert room.limit == 900 and room.measure(8, lambda: .5) == .5 and room.peak == 600
    assert batch_size._Room(MPS, 500, 0., 0).measure(8, lambda: .5) is None


# macOS

def test_a_cache_is_built_without_forks_on_macos(monkeypatch, tmp_path):
    monkeypatch.setattr(build, 'sys', having(build.sys, platform='darwin'))
    monkeypatch.setattr(build, '_in_processes', lambda *args: pytest.fail('forked'))
    assert build.build(tmp_path/'cache', build.Items(lambda i: (torch.tensor(i),), 10), workers=2, per_part=4)
    assert len(build.Store(tmp_path/'cache', build.read_about(tmp_path/'cache'))) == 10


def test_processes_that_fastai_does_not_make_are_refused(monkeypatch, tmp_path):
    import fastai.data.load as load
    from fastai.vision.augment import Resize
    from fastai.vision.data import ImageDataLoaders
    from PIL import Image
    for i in range(8):
        (to := tmp_path/'ab'[i % 2]/f'{i}.png').parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), i, 'u1')).save(to)
    dls = ImageDataLoaders.from_folder(tmp_path, valid_pct=.5, seed=2, bs=2, num_workers=0, device='cpu', item_tfms=Resize(8))  # both labels are in each half
    monkeypatch.setattr(load, 'sys', having(load.sys, platform='darwin'))
    with pytest.raises(UserError, match='processes=1: fastai makes no loader processes here'): fast_images(dls, processes=1)
    assert len(list(fast_images(dls, threads=1).train)) == 2


def test_noise_counts_what_psutil_leaves_out(monkeypatch):
    "psutil's cpu_times of macOS and Windows are without finished children, its `sin` of macOS is all pages that were read"
    gone = os.times()
    swap = SimpleNamespace(sin=2**40, sout=7)
    monkeypatch.setattr(psutil, 'swap_memory', lambda: swap)
    monkeypatch.setattr(psutil.Process, 'cpu_times', lambda self: (gone.user, gone.system, 0., 0.))
    monkeypatch.setattr(noise.os, 'times', lambda: os.times_result((1., 2., 30., 40., 0.)))
    assert noise._cpu_seconds([psutil.Process()]) == 73 and noise.machine_state()['swapped'] == 2**40 + 7
    monkeypatch.setattr(noise, 'sys', having(noise.sys, platform='darwin'))
    assert noise.machine_state()['swapped'] == 7
    monkeypatch.setattr(noise, 'os', having(os, name='nt'))
    state = noise.machine_state()
    assert 'cpu_own' not in state and 'others' not in noise.noise(state, state | dict(clock=state['clock']+9))


# Windows

def test_output_of_a_run_is_shown_on_windows(monkeypatch, tmp_path):
    "A pipe has a handle there, and no descriptor that a process could print into"
    class Started(Exception): pass
    def start(*args): raise Started
    monkeypatch.setattr(launch, 'os', having(os, name='nt'))
    monkeypatch.setattr(launch, '_Output', lambda ctx: pytest.fail('a descriptor was asked for'))
    monkeypatch.setattr(launch, '_start', start)
    with pytest.raises(Started): launch.launch(make_learner, tmp_path)


def make_learner(): return learner()


def test_ctrl_c_counts_once_on_windows(monkeypatch):
    "The console tells both processes, and the parent passes it on"
    hears, windows = {}, having(signal, SIGBREAK=21)
    for k in ('SIGUSR1', 'pthread_kill', 'pthread_sigmask'): delattr(windows, k)
    windows.signal, windows.raise_signal = hears.__setitem__, lambda s: None
    monkeypatch.setattr(child, 'signal', windows)
    monkeypatch.setattr(child, 'os', having(os, dup2=lambda *a: None))
    delattr(child.os, 'setsid')
    monkeypatch.setattr(child, '_POKE', child._poke_signal())
    monkeypatch.setattr(multiprocessing, 'set_start_method', lambda *a, **k: None)
    stop = child.Stop()
    child.settle(stop, SimpleNamespace(recv_bytes=lambda: b''), False, {})
    assert hears[signal.SIGINT] == signal.SIG_IGN and hears[21] == hears[signal.SIGTERM] == stop.handle


def test_processes_of_torchrun_on_windows(monkeypatch):
    monkeypatch.setattr(processes, 'os', having(os, name='nt'))
    monkeypatch.delenv('USE_LIBUV', raising=False)
    assert processes._environment(2)['USE_LIBUV'] == '0'
    ended = []
    monkeypatch.setattr(processes, 'kill_tree', ended.append)
    process = SimpleNamespace(poll=lambda: None, send_signal=lambda s: pytest.fail('torchrun alone was ended'))
    job = SimpleNamespace(follow=lambda: None, heed=lambda: [(1, signal.SIGINT)], board=SimpleNamespace(is_over=lambda n: False), grace=1)
    processes._follow(process, job)
    assert ended == [process]


def test_what_the_output_cannot_show_does_not_end_a_training(monkeypatch):
    "Output that goes into a file or a pipe has the system's code page there"
    out = io.TextIOWrapper(io.BytesIO(), encoding='cp1252')
    monkeypatch.setattr('sys.stdout', out)
    child.quiet_process(False)
    print('snow \u2603', flush=True)
    assert out.buffer.getvalue().strip() == b'snow ?'


def test_another_python_may_print_in_another_code_page():
    code = "import sys; sys.stderr.buffer.write(b'caf\\xe9 \\x81')"
    process = subprocess.Popen([sys.executable, '-c', code], **ab._captured)
    assert process.communicate()[1].startswith('caf')


def test_a_process_that_waits_for_others_is_not_blamed_on_windows(tmp_path):
    "Its stack has paths with backslashes"
    b = board.Board(tmp_path, None)
    for rank_, where in ((0, 'distributed_c10d.py'), (1, 'own.py')):
        board.Board(tmp_path, rank_).begin()
        b.file('stack', rank_).write_text(f'Current thread 0x1 (most recent call first):\n  File "C:\\Users\\me\\{where}", line 7 in step\n')
    said = board.blame(b)
    assert said['rank'] == 1 and said['line'] == 'process 1 hung: it stood in step (own.py:7)'


def test_output_that_is_moved_from_a_file_to_a_pipe(tmp_path):
    "`fastbench run train.py > log`: the process of the run prints into a pipe from then on"
    code = ("from types import SimpleNamespace as N; from fastbench.bench.child import Stop, settle; import os, time; r, w = os.pipe(); "
            "settle(Stop(), N(recv_bytes=lambda: time.sleep(900)), False, {}, N(fileno=lambda: w)); print('snow \u2603', flush=True); os.write(2, os.read(r, 99))")
    with open(tmp_path/'log', 'w') as f:
        p = subprocess.run([sys.executable, '-c', code], stdout=f, stderr=subprocess.PIPE, env=dict(os.environ, PYTHONIOENCODING='cp1252'))
    assert p.returncode == 0, p.stderr

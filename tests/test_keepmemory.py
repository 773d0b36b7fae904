"KeepMemory: on for a fit and off after it however it ends, refused where it would do nothing, and what the system counts."
import subprocess
import sys
from types import SimpleNamespace as NS

import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from fastbench.callback.cpu import keepmemory
from fastbench.callback.cpu.keepmemory import KeepMemory, check_malloc
from fastbench.bench.learner import bench_learner
from fastbench.errors import UserError

MMAP, PAD, TRIM = -3, -2, -1
ON, OFF = [(MMAP, 2**31-1), (TRIM, -1), (PAD, 2**26)], [(MMAP, 32*2**20), (TRIM, 64*2**20), (PAD, 2**17), 'trim']
glibc = pytest.mark.skipif(not sys.platform.startswith('linux'), reason='glibc is of Linux')


@pytest.fixture
def libc(monkeypatch):
    "What the C library was told"
    said = []
    library = NS(gnu_get_libc_version=None, mallopt=lambda *o: said.append(o), malloc_trim=lambda n: said.append('trim'))
    monkeypatch.setattr(keepmemory, 'ctypes', NS(CDLL=lambda name: library))  # its own name: what others import meanwhile loads libraries, too
    monkeypatch.setattr(keepmemory.sys, 'platform', 'linux')
    for o in ('LD_PRELOAD', 'GLIBC_TUNABLES', 'MALLOC_MMAP_THRESHOLD_', 'MALLOC_TRIM_THRESHOLD_'): monkeypatch.delenv(o, raising=False)
    yield said
    assert keepmemory._on == []


def make(*cbs):
    data = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(2)]
    return Learner(DataLoaders(data, data), nn.Linear(3, 1), loss_func=nn.MSELoss(), cbs=cbs)


def fit(learn, n=1):
    with learn.no_logging(): learn.fit(n)


@pytest.mark.parametrize('event', ['before_fit', 'before_batch', 'after_loss', 'after_step', 'before_validate', 'after_epoch', 'after_fit'])
@pytest.mark.parametrize('error', [None, CancelFitException, RuntimeError, KeyboardInterrupt])
def test_off_after_the_fit_however_it_ends(libc, event, error):
    class Ends(Callback):
        order = 99
    def raises(self):
        if error: raise error('stop')
    setattr(Ends, event, raises)
    learn = make(KeepMemory(), Ends())
    try: fit(learn)
    except (RuntimeError, KeyboardInterrupt, CancelFitException): pass
    assert libc == ON + OFF
    fit(make(KeepMemory()))
    assert libc == (ON + OFF)*2


def test_a_fit_inside_of_a_fit(libc):
    class Inner(Callback):
        def after_epoch(self): fit(make(KeepMemory()))
    fit(make(KeepMemory(), Inner()))
    assert libc == ON + ON + OFF


def test_a_validation_inside_and_taken_off_in_mid_fit(libc):
    class Inner(Callback):
        def after_batch(self):
            if self.training and not self.iter: self.learn.validate()
    fit(make(KeepMemory(), Inner()))
    assert libc == ON + OFF
    class Removes(Callback):
        def after_batch(self):
            if self.training and self.iter: self.learn.remove_cb(KeepMemory)
    fit(make(KeepMemory(), Removes()))
    assert libc == (ON + OFF)*2


def test_off_also_where_it_would_be_refused_by_now(libc, monkeypatch):
    class Preloads(Callback):
        def after_batch(self): monkeypatch.setenv('LD_PRELOAD', 'libtcmalloc.so')
    fit(make(KeepMemory(), Preloads()))
    assert libc == ON + OFF


def test_refused_where_it_does_nothing(libc, monkeypatch):
    with pytest.raises(UserError, match='no effect on cuda'): check_malloc('cuda:1')
    with pytest.raises(UserError, match='no effect on mps'): check_malloc(torch.device('mps'))
    monkeypatch.setenv('LD_PRELOAD', '/home/me/lib/libtcmalloc.so.4:/x/libiomp5.so')
    with pytest.raises(UserError, match='libtcmalloc.so.4 is preloaded') as e: fit(make(KeepMemory()))
    assert '/home/me' not in str(e.value) and libc == []
    monkeypatch.setenv('LD_PRELOAD', '/x/libiomp5.so')
    check_malloc()
    monkeypatch.setenv('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1')
    check_malloc()
    monkeypatch.setenv('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=9')
    with pytest.raises(UserError, match='GLIBC_TUNABLES sets'): check_malloc()
    monkeypatch.delenv('GLIBC_TUNABLES')
    monkeypatch.setenv('MALLOC_MMAP_THRESHOLD_', '9')
    with pytest.raises(UserError, match='MALLOC_MMAP_THRESHOLD_ sets'): check_malloc()
    monkeypatch.delenv('MALLOC_MMAP_THRESHOLD_')
    monkeypatch.setattr(keepmemory.ctypes, 'CDLL', lambda name: NS())
    with pytest.raises(UserError, match='another C library'): check_malloc()
    monkeypatch.setattr(keepmemory.sys, 'platform', 'darwin')
    with pytest.raises(UserError, match='Linux with glibc'): check_malloc()


def test_a_recipe_asks_for_it(libc):
    assert not any(isinstance(o, KeepMemory) for o in bench_learner('digits-xresnet18', device='cpu').cbs)
    assert sum(isinstance(o, KeepMemory) for o in bench_learner('digits-xresnet18', device='cpu', keep_memory=True).cbs) == 1
    keepmemory.sys.platform = 'win32'
    with pytest.raises(UserError, match='keep_memory is for Linux'): bench_learner('digits-xresnet18', device='cpu', keep_memory=True)


FAULTS = '''
import resource, sys, threading, torch
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn
from fastbench.callback.cpu.keepmemory import KeepMemory, check_malloc
torch.set_num_threads(1)
data = [(torch.randn(16, 3, 64, 64), torch.randint(2, (16,))) for _ in range(6)]
net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
learn = Learner(DataLoaders(data, data[:1]), net, loss_func=nn.CrossEntropyLoss())
def faults(*cbs):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with learn.no_bar(), learn.no_logging(): learn.fit(4, cbs=cbs)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
lib = check_malloc()
lib.mallopt(-3, 2**17), lib.mallopt(-1, 2**17)  # where glibc begins: it moves them as it likes
faults()  # the gradients are in the main thread's memory: nothing else of the other thread's outlives a batch
def count(): print(faults(), faults(KeepMemory()))
if sys.argv[1] == 'main': count()
else:
    t = threading.Thread(target=count)
    t.start()
    t.join()
'''


@glibc
@pytest.mark.parametrize('where', ['main', 'thread'])
def test_the_system_counts_far_fewer_page_faults(where):
    try: check_malloc()
    except UserError as e: pytest.skip(str(e))
    got = subprocess.run([sys.executable, '-W', 'ignore', '-c', FAULTS, where], capture_output=True, text=True, check=True)
    without,with_it = map(int, got.stdout.split()[-2:])
    assert with_it < without/20, (without, with_it)

"Workers: how many, by measurement; and what is said when one hangs, dies, or is only slow"
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest
import torch
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner

from fastbench.bench.learner import bench_learner
from fastbench.draw import pool, workers
from fastbench.draw.decode import CorruptImage
from fastbench.draw.fast import fast_images
from fastbench.draw.loader import PoolDL
from fastbench.draw.pool import StuckWorker
from fastbench.draw.seeded import SeededDL
from fastbench.draw.swap import fast_augment
from fastbench.draw.workers import WatchedDL, WatchedPoolDL, WatchedSeededDL, auto_workers, best_count, time_workers, worker_counts
from fastbench.errors import UserError
from fastbench.measure.stopwatch import ManualClock
from test_draw_loader import folder, loaders, same, seeded  # noqa: F401

pytestmark = pytest.mark.usefixtures('forked_loaders')
ITEMS = [torch.tensor(i) for i in range(12)]


class At:
    "Something happens at item 5"
    def __init__(self, what): self.what = what
    def __call__(self, o):
        if o == 5: self.what()
        return o


def hang(): time.sleep(60)
def leave(): os._exit(3)
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def fail(): raise KeyError('my own')


def dl(what, cls=WatchedDL, timeout=1., **kwargs):
    res = cls(ITEMS, bs=2, after_item=At(what), num_workers=2, **kwargs)
    res.item_timeout = timeout
    return res


def ended(p):
    "Wait until a process has ended, which nobody has asked for its exit code yet"
    while psutil.Process(p.pid).status() != psutil.STATUS_ZOMBIE: time.sleep(.05)
    return p


def one_line(e): assert '\n' not in str(e.value), str(e.value); return str(e.value)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    yield
    assert not glob.glob(str(tmp_path/'fastbench-*'))


@pytest.mark.parametrize('cls', [WatchedDL, WatchedSeededDL])
def test_a_process_that_hangs(cls, monkeypatch):
    monkeypatch.setattr(workers._Board.stack, '__defaults__', (60.,))  # seconds for its answer
    with pytest.raises(StuckWorker, match=r'at 5 for .* hang \(test_draw_workers.py:\d+\)') as e: list(dl(hang, cls))
    one_line(e)


def test_the_limit_as_it_is_set_is_below_ten_seconds(): assert 0 < WatchedDL.item_timeout < 9 and PoolDL(ITEMS, bs=2).item_timeout < 9


@pytest.mark.parametrize('what, said', [(leave, 'exit code 3|exited unexpectedly'), (killed, 'Killed|exited unexpectedly')], ids=['leaves', 'killed'])
def test_a_process_that_dies(what, said):
    with pytest.raises(StuckWorker, match=f'a loader died at 5: .*({said})') as e: list(dl(what, timeout=60.))  # ending a large process may take a second, and more on a busy machine
    one_line(e)


def test_an_error_is_its_own():
    with pytest.raises(KeyError, match='my own'): list(dl(fail))


def test_who_computes_for_long_is_not_disturbed():
    "A worker may wait for the main process as long as it takes"
    seen = []
    for b in dl(lambda: None, timeout=2.):
        if not seen: time.sleep(2.5)
        seen += b.tolist()
    assert sorted(seen) == list(range(12))


def test_a_loop_that_is_left_leaves_no_thread():
    n = threading.active_count()
    for _ in dl(lambda: None): break
    until = time.monotonic() + 120
    while threading.active_count() > n and time.monotonic() < until: time.sleep(.05)
    assert threading.active_count() <= n


def test_without_processes_nothing_is_watched():
    x = dl(lambda: None).new(num_workers=0)
    assert len(list(x)) == 6 and x.board is None


# How many

def test_counts():
    assert worker_counts(1) == [0, 1] and worker_counts(16) == [0, 1, 2, 4, 8, 16]
    assert best_count({0: (100., 0), 1: (96., 0)}) == 0 and best_count({0: (100., 0), 1: (94., 0), 2: (106., 0)}) == 2


def test_one_batch_is_enough_and_none_is_said():
    assert time_workers(TfmdDL(ITEMS, bs=12, num_workers=0), [0])[0][0] > 0
    with pytest.raises(UserError, match='no batch: 12 items, bs=20') as e: time_workers(TfmdDL(ITEMS, bs=20, drop_last=True, num_workers=0), [0])
    assert one_line(e)


def test_auto_keeps_order_items_and_kind(folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(workers, 'time_workers', lambda dl, counts, batches: {0: (10., 0.), 2: (30., .1), 4: (30., .1)})
    for make, kind in ((lambda: DataLoaders(seeded(folder), seeded(folder, part=1)), WatchedSeededDL), (lambda: fast_images(loaders(folder)), PoolDL), (lambda: loaders(folder), WatchedDL)):
        dls = make()
        new = auto_workers(dls)
        assert type(new.train) is type(new.valid) is kind and new.workers == 2 and new.worker_rates == {0: 10, 2: 30, 4: 30}
        assert (new.train.threads if kind is PoolDL else new.train.fake_l.num_workers) == 2
        for _ in range(2): assert [y.tolist() for _, y in dls.train] == [y.tolist() for _, y in new.train]
        if kind is not WatchedDL: assert same(list(dls.train), list(new.train))


OWN_DLS = dict(weighted=(WeightedDL, dict(wgts=[0, 0, 1, 0, 1]+[0]*7)), partial=(PartialDL, dict(partial_n=5)))


@pytest.mark.parametrize('kind', OWN_DLS)
def test_auto_keeps_how_a_loader_samples(monkeypatch, kind):
    cls, given = OWN_DLS[kind]
    dls, tried = DataLoaders(*(cls(ITEMS, bs=2, shuffle=True, num_workers=0, device='cpu', **given) for _ in range(2))), []
    with_number = workers._with
    monkeypatch.setattr(workers, '_with', lambda dl, n: tried.append(with_number(dl, n)) or tried[-1])
    for o in (auto_workers(dls, counts=[0, 1], batches=1).train, *tried):
        items = torch.cat(list(o)).tolist()
        assert type(o) is cls and (set(items) <= {2, 4} if kind == 'weighted' else len(items) == 5 and len(o) == 3)


def test_what_is_no_dataloaders_is_named():
    dls = DataLoaders(TfmdDL(ITEMS, bs=2, num_workers=0))
    learn = Learner(dls, torch.nn.Linear(1, 1), loss_func=torch.nn.MSELoss())
    torchs = DataLoaders(torch.utils.data.DataLoader(ITEMS), path='.')
    for f in (auto_workers, fast_augment):
        for o, said in ((learn, rf'{f.__name__} takes DataLoaders; for a Learner: learn\.'), (dls.train, 'this is a TfmdDL: give it'), (None, 'a NoneType'), ([1], 'a list')):
            with pytest.raises(UserError, match=said) as e: f(o)
            assert one_line(e)
    with pytest.raises(UserError, match=r'auto_workers takes loaders of fastai, and this is a torch\.\S+\.DataLoader: give it num_workers') as e: auto_workers(torchs)
    assert one_line(e)


def test_auto_keeps_how_long_an_item_may_take():
    watched = dl(lambda: None, timeout=3.)
    assert workers._with(watched, 1).item_timeout == 3.


def test_measured(folder):  # noqa: F811
    rates = time_workers(fast_images(loaders(folder)).train, [0, 1], batches=3)
    assert sorted(rates) == [0, 1] and all(r > 0 for r, _ in rates.values())
    assert type(seeded(folder)) is SeededDL


def test_a_recipe_measures_its_workers(monkeypatch):
    monkeypatch.setattr(workers, 'time_workers', lambda dl, counts, batches: {0: (10., 0.), 1: (30., .1)})
    few = dict(sample=.1, bs=8, workers='auto')
    assert bench_learner('photos-xresnet18', **few).dls.info['workers'] == 1
    learn = bench_learner('photos-xresnet18', loader='threads', **few)
    assert learn.dls.info['threads'] == learn.dls.train.threads == 1
    with pytest.raises(UserError, match="workers='auto' has no effect"): bench_learner('photos-xresnet18', loader='whole', cache='array', **few)


def test_a_process_that_has_died_does_not_hang():
    "However late its death is noticed, as on a busy machine"
    board, p = workers._Board(1), ended(subprocess.Popen([sys.executable, '-c', '']))
    board.notes[0], board.waiting = torch.tensor([6., time.monotonic() - 100, p.pid], dtype=torch.float64), True
    watch = threading.Thread(target=workers._watch, args=(board, 1, str))
    watch.start()
    time.sleep(.7)
    p.wait()  # and when it is gone for good
    time.sleep(.7)
    board.over = True
    watch.join(60)
    assert board.found is None and not watch.is_alive()
    shutil.rmtree(board.folder)


def test_standing_still_as_a_whole_is_no_hung_process(monkeypatch):
    "Ctrl-Z and `fg`; a process that does hang after it is still found"
    clock, board, child = ManualClock(), workers._Board(1), subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)
    for o in (workers, pool): monkeypatch.setattr(o, 'monotonic', clock)
    looks = []
    def sleep(seconds):
        looks.append(board.found)
        if len(looks) > 1000: board.over = True
        clock.sleep(100 if len(looks) == 5 else seconds)
    monkeypatch.setattr(workers, 'sleep', sleep)
    monkeypatch.setattr(board, 'stack', lambda row: 'somewhere')
    board.notes[0], board.waiting = torch.tensor([6., clock(), child.pid], dtype=torch.float64), True
    workers._watch(board, 60, str)
    shutil.rmtree(board.folder)
    assert board.found and 300 <= len(looks) <= 310 and child.wait(60) == -signal.SIGKILL


class Broken:
    "Breaks the connection, as a worker does that dies while its batch crosses"
    def __init__(self, of): self.of = of
    def __call__(self, it, *args, **kwargs):
        if not (it._rcvd_idx < 2): raise ConnectionResetError(104, 'Connection reset by peer')
        return self.of(it, *args, **kwargs)


def die_later():
    time.sleep(1)
    killed()


def test_a_broken_connection_is_the_death_that_follows(monkeypatch):
    monkeypatch.setattr(workers, '_await_death', lambda board, of=workers._await_death: of(board, wait=60))  # it raises as soon as there is one
    it = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    broken = Broken(it._try_get_data)
    monkeypatch.setattr(it, '_try_get_data', lambda *args, **kwargs: broken(*args, **kwargs))
    with pytest.raises(StuckWorker, match='a loader died at 5: .*(Killed|exited unexpectedly)') as e: list(dl(die_later, timeout=60.))
    one_line(e)


def test_a_broken_connection_without_a_death_is_told_as_it_is(monkeypatch):
    monkeypatch.setattr(workers, '_await_death', lambda board, of=workers._await_death: of(board, wait=.5))

    def batches():
        raise EOFError('of my own')
        yield
    board = workers._Board(1)
    board.notes[0] = torch.tensor([6., time.monotonic(), os.getpid()], dtype=torch.float64)
    with pytest.raises(EOFError, match='of my own'): next(workers._waited(batches(), board))
    p = ended(subprocess.Popen([sys.executable, '-c', '']))
    board.notes[0, 2] = p.pid
    with pytest.raises(RuntimeError, match=rf'\(pid\(s\) {p.pid}\) exited unexpectedly'): next(workers._waited(batches(), board))
    p.wait()
    shutil.rmtree(board.folder)


# Threads in processes of their own

def in_processes(folder, n=1, threads=2, what=None, **kwargs):  # noqa: F811
    "A loader whose threads are in other processes; `what` happens at item 5"
    res = seeded(folder, WatchedPoolDL, threads=threads, num_workers=n, **kwargs)
    own = res.parts.others
    if what: res.parts.others = lambda i: (what() if i == 5 else None, own(i))[1]
    return res


@pytest.mark.parametrize('n, threads', [(1, 2), (2, 1), (2, 0)])
def test_threads_of_other_processes_draw_the_same(folder, n, threads):  # noqa: F811
    alone, dl = seeded(folder, PoolDL, threads=0), in_processes(folder, n, threads)
    first, second = ((list(alone), list(dl)) for _ in range(2))
    assert same(*first) and same(*second) and not same(first[0], second[0])


def test_fast_images_in_a_process(folder):  # noqa: F811
    dls, few = loaders(folder), fast_images(loaders(folder), threads=2)
    fast = fast_images(dls, threads=2, processes=1)
    assert type(fast.train) is WatchedPoolDL and (fast.train.fake_l.num_workers, fast.train.threads) == (1, 2)
    assert type(fast_images(fast).train) is PoolDL and fast_images(fast).train.fake_l.num_workers == 0
    for i in range(2): assert same(list(few[i]), list(fast[i]))
    assert same([few.train.one_batch()], [fast.train.one_batch()])
    with pytest.raises(UserError, match='skip_bad=True lists what it left out in the process of the training: leave processes out') as e: fast_images(dls, processes=1, skip_bad=True)
    one_line(e)


@pytest.mark.parametrize('kwargs', [dict(threads=-2), dict(threads='x'), dict(processes=-1), dict(processes=1.5), dict(processes='two')], ids=str)
def test_a_number_that_cannot_be_is_refused_at_once(folder, kwargs):  # noqa: F811
    (k, v), = kwargs.items()
    with pytest.raises(UserError, match=f"{k}='?{v}'? cannot be: a whole number, 0 or more") as e: fast_images(loaders(folder), **kwargs)
    one_line(e)


def test_each_process_has_its_share_of_the_cores(folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr('fastbench.draw.loader.worker_cores', lambda: 6)
    assert [seeded(folder, WatchedPoolDL, num_workers=n).threads for n in (0, 1, 2, 9)] == [6, 6, 3, 1]


def test_a_thread_of_another_process_that_hangs(folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(WatchedPoolDL, 'grace', 60.)  # it is to say it itself, however busy the machine
    with pytest.raises(StuckWorker, match=r'a loader has been at \S+\.jpg for .* hangs.*allow more than item_timeout=1$') as e: list(in_processes(folder, what=hang, item_timeout=1.))
    assert '<lambda>' in one_line(e)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # the thread goes on until another one has taken the signal


def test_a_process_of_threads_that_stands_still(folder):  # noqa: F811
    "None of its threads can say so"
    with pytest.raises(StuckWorker, match=r'a loader has been at \S+\.jpg for .* hangs') as e: list(in_processes(folder, what=stopped, item_timeout=1.))
    one_line(e)


@pytest.mark.parametrize('what', [leave, killed])
def test_a_process_of_threads_that_dies(folder, what):  # noqa: F811
    with pytest.raises(StuckWorker, match=r'a loader died at \S+\.jpg') as e: list(in_processes(folder, what=what))
    one_line(e)


def test_a_file_that_such_a_process_cannot_read(folder, tmp_path):  # noqa: F811
    shutil.copytree(folder, tmp_path/'copy')
    bad = sorted((tmp_path/'copy').rglob('*.jpg'))[3]
    bad.write_bytes(bad.read_bytes()[:500])
    with pytest.raises(CorruptImage, match=f'cannot read the image .*{bad.name}') as e: list(in_processes(tmp_path/'copy'))
    one_line(e)


def test_beside_a_gpu_another_process_pins_nothing(folder, gpu):  # noqa: F811
    dl = fast_images(loaders(folder).to('cuda'), threads=1, processes=1).train
    x, _ = list(dl)[-1]
    assert x.device.type == 'cuda' and all(o.pinned for o in gpu.copies if o.bytes == x.numel())


def test_loaders_of_auto_workers_are_made_fast(folder):
    for make in (lambda: loaders(folder), lambda: DataLoaders(seeded(folder), seeded(folder, part=1))):
        dls = auto_workers(make(), counts=[1], batches=2)
        assert type(dls.train) in (WatchedDL, WatchedSeededDL)
        fast, want = fast_images(dls, threads=1, exact=True), fast_images(make(), threads=1, exact=True)
        for a, b in zip(fast.valid, want.valid, strict=True): assert (a[0] == b[0]).all() and a[1].tolist() == b[1].tolist()

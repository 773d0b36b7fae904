"The profiler on every kind of fit, however it ends: what it says, and what it leaves behind."
import copy
import json
import random
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException
from fastai.callback.core import CancelStepException, CancelTrainException, CancelValidException, FetchPredsCallback, GatherPredsCallback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import Learner  # noqa: F401  (adds fit_one_cycle, fine_tune, lr_find)
from fastai.callback.training import GradientAccumulation, GradientClip, ShortEpochCallback
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.learner import load_learner
from fastai.metrics import accuracy
from fastai.vision.core import TensorImage
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset

import fastbench.measure.profiler as profiler_module
from fastbench.measure.profiler import Profiler
from fastbench.measure.clock import DeviceClock
from fastbench.measure.stopwatch import DRAW, DRAWN, END, EVENTS, FIRST, LAST, ManualClock, Stopwatch
from fastbench.measure.loader import TimedLoader, batch_size
from fastbench.machine.flops import count_flops, matmul_peak, measure_peak
from fastbench.train.loop import FastLoop
from fastbench.measure.phases import TRAIN, VALID, rows, values, SYNCS
from fastbench.errors import UserError
from gpu import needs_gpu, to_gpu

CANCELS = [CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
           CancelTrainException, CancelValidException]


@pytest.fixture(autouse=True, params=[Learner, FastLoop])
def loop(request, monkeypatch):
    "Everything holds on fastai's own loop and on ours"
    monkeypatch.setitem(globals(), 'learner_class', request.param)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 3)
        self.hook = lambda: None

    def forward(self, x):
        self.hook()
        return self.lin(x)


def loss_func(pred, targ, reduction='mean'): return nn.functional.cross_entropy(pred, targ, reduction=reduction)


class Validates(Callback):
    "A validation inside the fit"
    ran = False

    def after_epoch(self):
        if not self.ran:
            self.ran = True
            self.learn.validate()


def items(n): return [(torch.randn(8), i % 3) for i in range(n)]


def make(n=32, n_valid=16, bs=4, workers=0, cbs=None, dls=None, **kwargs):
    torch.manual_seed(0)
    dls = dls or DataLoaders(DataLoader(items(n), bs=bs, shuffle=True, num_workers=workers), DataLoader(items(n_valid), bs=bs, num_workers=workers))
    learn = learner_class(dls, Net(), loss_func=loss_func, metrics=accuracy, cbs=cbs, **kwargs)
    learn.logger = lambda *_: None
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    return learn.profile()


def clean(learn):
    "Only the callback itself is left: no wrapped loader, no hook, no patched attribute"
    assert not isinstance(getattr(learn, 'dl', None), TimedLoader)
    assert 'remove_cbs' not in vars(learn)
    assert not any(type(cb).__name__ in ('_Last', '_Unscaling') for cb in learn.cbs)
    assert sum(isinstance(cb, Profiler) for cb in learn.cbs) == 1
    for dl in learn.dls.loaders: assert '_index_sampler' not in vars(getattr(dl, 'fake_l', object.__new__(Net)))
    for m in learn.model.modules(): assert not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks
    prof = learn.profiler
    learn.remove_cb(prof)
    assert not hasattr(learn, 'profiler') and not any(isinstance(cb, Profiler) for cb in learn.cbs)
    return prof.results


def value(r, phase, action, column='calls'):
    row = r[(r.phase == phase) & (r.action == action)]
    return row[column].item() if len(row) else None


def adds_up(r):
    def leaves(p): return r[(r.phase == p) & (r.action != 'step')].total.sum()
    for p in ('train', 'valid'):
        if value(r, 'fit', p): assert leaves(p) == pytest.approx(value(r, 'fit', p, 'total'), rel=.01)
    assert sum(map(leaves, ('train', 'valid', 'between'))) == pytest.approx(value(r, 'fit', 'fit', 'total'), rel=.01)


def check(learn, train, valid, fits=1):
    r = clean(learn)
    assert (value(r, 'train', 'step'), value(r, 'valid', 'step'), value(r, 'fit', 'fit')) == (train, valid, fits)
    if train: assert value(r, 'train', 'draw') == train
    adds_up(r)
    return r


def test_fit_and_columns():
    learn = make()
    learn.fit(2)
    assert learn.profiler.results.columns.tolist() == ['phase', 'action', 'calls', 'mean', 'std', 'total', 'share', 'samples_per_second']
    assert isinstance(learn.profiler.results, pd.DataFrame)
    r = check(learn, 16, 8)
    assert set(r[r.phase == 'fit'].action) == {'fit', 'epoch', 'train', 'valid'}
    assert set(r[r.phase == 'train'].action) == {'step', *TRAIN} - {'compile', *SYNCS} and set(r[r.phase == 'valid'].action) == {'step', *VALID} - {'compile'}
    assert value(r, 'fit', 'epoch') == value(r, 'train', 'start') == value(r, 'train', 'stop') == 2
    assert value(r, 'fit', 'fit', 'share') == 1


def test_profile_returns_the_learner_and_stays_over_fits():
    learn = make()
    assert learn.profile() is learn
    learn.fit(1)
    learn.fit(1)
    check(learn, 16, 8, fits=2)


def test_a_second_profile_starts_over():
    learn = make()
    learn.fit(1)
    learn.profile()
    assert learn.profiler.results.empty
    learn.fit(1)
    check(learn, 8, 4)


def test_profiling_block():
    learn = make()
    learn.remove_cb(learn.profiler)
    before = list(learn.cbs)
    with learn.profiling() as prof: learn.fit(1)
    assert list(learn.cbs) == before and not hasattr(learn, 'profiler')
    assert value(prof.results, 'train', 'step') == 8


def test_profiling_block_inside_an_attached_profiler():
    learn = make()
    learn.fit(1)
    outer = learn.profiler
    with learn.profiling() as prof: learn.fit(1)
    assert learn.profiler is outer and prof is not outer
    assert value(prof.results, 'train', 'step') == 8
    check(learn, 8, 4)


def test_fit_one_cycle():
    learn = make()
    learn.fit_one_cycle(2)
    check(learn, 16, 8)


def test_fine_tune():
    learn = make(splitter=lambda m: [list(m.lin.parameters())[:1], list(m.lin.parameters())[1:]])
    learn.fine_tune(1)
    check(learn, 16, 8, fits=2)


def test_lr_find(tmp_path):
    learn = make(path=tmp_path)
    learn.lr_find(num_it=12, show_plot=False)
    r = clean(learn)
    assert value(r, 'train', 'step') == 12
    adds_up(r)


def test_validate():
    learn = make()
    learn.validate()
    r = check(learn, None, 4)
    assert value(r, 'fit', 'train') is None and value(r, 'valid', 'predict') == 4


def test_get_preds():
    learn = make()
    preds, _ = learn.get_preds()
    assert len(preds) == 16
    check(learn, None, 4)


def test_get_preds_without_labels():
    learn = make()
    learn.get_preds(dl=[(torch.randn(4, 8),)]*3)
    check(learn, None, 3)


def test_one_batch():
    learn = make(n=4, n_valid=4)
    learn.fit(1)
    r = check(learn, 1, 1)
    assert pd.isna(value(r, 'train', 'forward', 'mean')), 'the only step is a warm-up: no mean'


def test_empty_validation_set():
    learn = make(n_valid=0)
    learn.fit(1)
    r = clean(learn)
    assert value(r, 'train', 'step') == 8 and value(r, 'valid', 'step') is None
    adds_up(r)


def test_gradient_accumulation():
    learn = make(cbs=GradientAccumulation(8))
    learn.fit(1)
    r = check(learn, 8, 4)
    assert value(r, 'train', 'opt_step') == 4 and value(r, 'train', 'backward') == 8


def test_gradient_clip():
    learn = make(cbs=GradientClip())
    learn.fit(1)
    check(learn, 8, 4)


def test_short_epoch():
    learn = make(cbs=ShortEpochCallback(.5))
    learn.fit(1)
    r = clean(learn)
    assert 0 < value(r, 'train', 'step') < 8
    adds_up(r)


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
@pytest.mark.filterwarnings('ignore')
def test_mixed_precision_of_fastai(mode):
    learn = make(cbs=MixedPrecision(mode))
    learn.fit(1)
    check(learn, 8, 4)


def test_unscaling_is_the_optimizers_work():
    clock, learn = manual(make())

    class MP(MixedPrecision):
        def before_fit(self): pass
        def before_batch(self): pass
        def after_pred(self): pass
        def after_loss(self): pass
        def before_backward(self): pass
        def before_step(self): clock.sleep(1)
        def after_step(self): pass
        def after_fit(self): pass
    learn.add_cb(MP())
    learn.add_cb(on(before_step=lambda: clock.sleep(.5)))
    learn.fit(1)
    r = clean(learn)
    assert value(r, 'train', 'opt_step', 'total') == 8 and value(r, 'train', 'callbacks', 'total') == 4


def on(**events): return Callback(**{k: (lambda self, f=f: f()) for k, f in events.items()})


class Raise(Callback):
    def __init__(self, event, exc, times=1):
        self.count = times

        def f():
            self.count -= 1
            if self.count == 0: raise exc
        setattr(self, event, f)


@pytest.mark.parametrize('exc', CANCELS, ids=lambda o: o.__name__)
@pytest.mark.parametrize('event', [o for o in EVENTS if o != 'after_create'])
def test_cancel_exceptions_at_every_event(event, exc):
    learn = make(n=12, n_valid=8)
    learn.add_cb(Raise(event, exc, times=2 if event in ('before_batch', 'after_batch', 'after_loss', 'after_pred') else 1))
    with suppress(exc, AttributeError): learn.fit(2)  # fastai's Recorder has no log when before_epoch was cancelled
    adds_up(clean(learn))


@pytest.mark.parametrize('exc', [KeyboardInterrupt, CancelFitException, ZeroDivisionError('x')], ids=str)
@pytest.mark.parametrize('event', ['before_fit', 'before_epoch', 'before_validate', 'before_batch', 'after_batch', 'after_epoch', 'after_fit'])
@pytest.mark.parametrize('how', ['fit', 'get_preds'])
def test_errors_at_events(how, event, exc):
    learn = make()
    learn.add_cb(Raise(event, exc))
    with suppress(BaseException): learn.fit(1) if how == 'fit' else learn.get_preds()
    if how == 'get_preds' and learn.lock.locked():  # fastai leaves its own lock held here: no event, no way to know
        assert event in ('before_fit', 'before_epoch')
        learn.lock.release()
        learn.remove_cb(GatherPredsCallback)
        learn.fit(1)
    clean(learn)


@pytest.mark.parametrize('exc', [KeyboardInterrupt, RuntimeError], ids=lambda o: o.__name__)
@pytest.mark.parametrize('phase', ['train', 'valid'])
def test_error_in_forward(exc, phase):
    learn = make()
    calls = []

    def hook():
        calls.append(1)
        if len(calls) == (3 if phase == 'train' else 10): raise exc
    learn.model.hook = hook
    with pytest.raises(exc): learn.fit(1)
    prof, n = learn.profiler, 2 if phase == 'train' else 8
    assert value(prof.results, 'train', 'step') == n, 'the step that was cut off is no step'
    assert 'ended by an error' in str(prof)
    learn.model.hook = lambda: None
    learn.fit(1)
    r = clean(learn)
    assert value(r, 'train', 'step') == n + 8
    adds_up(r)


def test_error_in_the_data():
    class Bad:
        def __len__(self): return 8
        def __getitem__(self, i):
            if i == 6: raise OSError('file 6')
            return torch.randn(8), 0
    learn = make(dls=DataLoaders(DataLoader(Bad(), bs=2), DataLoader(items(4), bs=2)))
    with pytest.raises(OSError, match='file 6'): learn.fit(1)
    assert value(learn.profiler.results, 'train', 'step') == 3
    adds_up(clean(learn))


def test_a_loader_without_length():
    class Stream:
        def __iter__(self): return iter([])
    learn = make(dls=DataLoaders(Stream(), Stream()))
    with pytest.raises(TypeError): learn.fit(1)
    clean(learn)


@pytest.mark.parametrize('workers', [0, 1, 2])
def test_workers(workers):
    learn = make(workers=workers)
    learn.fit(1)
    check(learn, 8, 4)


@pytest.mark.parametrize('workers', [0, 1, 2])
def test_plain_pytorch_loader(workers):
    ds = TensorDataset(torch.randn(32, 8), torch.zeros(32, dtype=torch.long))
    learn = make(dls=DataLoaders(*(TorchDataLoader(ds, batch_size=4, num_workers=workers) for _ in range(2))))
    learn.fit(1)
    check(learn, 8, 8)


def test_nested_validation_belongs_to_its_callback():
    clock, learn = manual(make())

    class Nested(Callback):
        run_valid = False
        def after_batch(self):
            if self.iter == 2 and self.training:
                learn = self.learn
                dl, n_iter, i = learn.dl, learn.n_iter, learn.iter
                clock.sleep(5)
                learn.validate()
                learn.dl, learn.n_iter, learn.iter, learn.training = dl, n_iter, i, True
    learn.add_cb(Nested())
    learn.fit(1)
    n, r = len(learn.profiler.profile.steps['train']), clean(learn)
    assert n == 8 and value(r, 'train', 'callbacks', 'total') == 5 and value(r, 'fit', 'fit') == 1


def test_real_nested_validation():
    learn = make()

    class Nested(Callback):
        def after_epoch(self):
            if not hasattr(self, 'done'):
                self.done = True
                self.learn.validate()
    learn.add_cb(Nested())
    learn.fit(2)
    check(learn, 16, 8)


def test_fetch_preds():
    learn = make(cbs=FetchPredsCallback())
    learn.fit(1)
    check(learn, 8, 4)


def test_an_inner_validation_that_fails_and_is_caught():
    class Careless(FetchPredsCallback):
        def after_validate(self):
            with suppress(ZeroDivisionError): super().after_validate()
    learn = make(cbs=Careless())
    learn.add_cb(Raise('after_pred', ZeroDivisionError('x'), times=8 + 4 + 2))
    learn.fit(2)
    assert value(clean(learn), 'fit', 'fit') == 1


def test_a_validation_that_failed_early_does_not_poison_the_next_fit():
    learn = make()
    learn.add_cb(Raise('before_epoch', ZeroDivisionError('x')))
    with pytest.raises(ZeroDivisionError): learn.validate()
    learn.fit(1)
    r = clean(learn)
    assert value(r, 'train', 'step') == 8


def test_attached_in_the_middle_of_a_fit():
    learn = make()
    prof = learn.profiler
    learn.remove_cb(prof)
    learn.add_cb(on(after_batch=lambda: None if hasattr(learn, 'profiler') else learn.profile()))
    learn.fit(1)
    assert learn.profiler.results.empty
    learn.fit(1)
    check(learn, 8, 4)


def test_removed_in_the_middle_of_a_fit():
    learn = make()
    prof = learn.profiler
    learn.add_cb(on(after_batch=lambda: learn.remove_cb(prof) if learn.iter == 3 else None))
    learn.fit(1)
    assert not hasattr(learn, 'profiler') and 'remove_cbs' not in vars(learn)
    assert not any(type(cb).__name__ in ('_Last', '_Unscaling') for cb in learn.cbs)
    assert value(prof.results, 'train', 'step') == 4


# --- attribution, on a clock that only our sleeps move

def manual(learn):
    clock = ManualClock()
    learn.profiler.watch.clock = clock
    return clock, learn


SLEEP = {'dataset': 'draw', 'batch transform': 'draw', 'item transform': 'draw', 'forward': 'forward', 'loss': 'loss', 'backward': 'backward',
         'optimizer': 'opt_step', 'zero_grad': 'zero_grad', 'to device': 'to_device', **{f'callback {e}': 'callbacks' for e in
         ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch')}}


@pytest.mark.parametrize('where', SLEEP)
def test_a_sleep_lands_in_its_row_alone(where):
    clock = ManualClock()

    def sleep(o=None):
        clock.sleep(1/4 if where in ('dataset', 'item transform') else 1)
        return o

    class Sleepy(list):
        def __getitem__(self, i): return sleep(list.__getitem__(self, i)) if where == 'dataset' else list.__getitem__(self, i)
    kw = {'batch transform': dict(after_batch=sleep), 'item transform': dict(after_item=sleep)}.get(where, {})
    learn = make(dls=DataLoaders(DataLoader(Sleepy(items(32)), bs=4, **kw), DataLoader(items(4), bs=4)))
    learn.profiler.watch.clock = clock
    if where == 'forward': learn.model.hook = lambda: sleep() if learn.training else None
    if where == 'loss': learn.loss_func = lambda p, t: (sleep() if learn.training else None, loss_func(p, t))[1]
    if where == 'backward': learn.model.lin.weight.register_hook(lambda g: sleep(g))
    if where in ('optimizer', 'zero_grad'):
        learn.create_opt()
        name = 'step' if where == 'optimizer' else 'zero_grad'
        old = getattr(learn.opt, name)
        setattr(learn.opt, name, lambda: (sleep(), old())[1])
    if where == 'to device': learn._set_device = lambda b: sleep(b) if learn.training else b
    if where.startswith('callback'): learn.add_cb(on(**{where.split()[1]: lambda: sleep() if learn.training else None}))
    learn.fit(1)
    r = learn.profiler.results
    total = {a: t for a, t in zip(r[r.phase == 'train'].action, r[r.phase == 'train'].total) if t and a != 'step'}
    assert total == {SLEEP[where]: 8.}
    assert value(r, 'fit', 'valid', 'total') in (0, None)
    assert value(r, 'train', SLEEP[where], 'mean') == 1 and value(r, 'train', SLEEP[where], 'calls') == 8


def test_time_between_the_phases():
    clock, learn = manual(make())
    learn.add_cb(on(before_fit=lambda: clock.sleep(1), after_epoch=lambda: clock.sleep(2), before_train=lambda: clock.sleep(4),
                          after_train=lambda: clock.sleep(8), after_fit=lambda: clock.sleep(16)))
    learn.fit(1)
    r = learn.profiler.results
    assert value(r, 'between', 'callbacks', 'total') == 19 and value(r, 'train', 'callbacks', 'total') == 12
    assert value(r, 'fit', 'fit', 'total') == 31 and value(r, 'fit', 'train', 'total') == 12


# --- the device's clock

class FakeEvent:
    clock, waits = ManualClock(), 0
    def query(self): return False
    def synchronize(self):
        type(self).waits += 1
        type(self).query = lambda self: True
    def elapsed_time(self, o): return 1e3*(o.at - self.at)


class FakeQueue:
    "No second stream: as of a device that only tells when it passed an event"
    side, can_hold = None, False
    def event(self): return FakeEvent()
    def record(self, e): e.at = FakeEvent.clock()


def test_device_clock_never_waits_while_training(monkeypatch):
    monkeypatch.setattr(profiler_module, '_device_clock', lambda device, hold: DeviceClock(FakeQueue()))
    monkeypatch.setattr(FakeEvent, 'query', FakeEvent.query)
    FakeEvent.waits = 0
    learn, waits = make(), []
    for name in ('synchronize', 'current_stream'):
        monkeypatch.setattr(torch.cuda, name, lambda *a, **k: pytest.fail('the profiler synchronised'))
    learn.model.hook = lambda: FakeEvent.clock.sleep(.25)
    learn.add_cb(on(after_fit=lambda: waits.append(FakeEvent.waits)))
    learn.fit(2)
    assert waits == [0] and FakeEvent.waits > 0
    r = check(learn, 16, 8)
    assert value(r, 'train', 'forward', 'device_mean') == .25 and value(r, 'valid', 'predict', 'device_mean') == .25


@needs_gpu
def test_device_clock_on_cuda(monkeypatch):
    learn, calls = to_gpu(make()), []
    sync = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda *a: (calls.append(1), sync(*a)))
    learn.fit(2)
    assert not calls
    r = check(learn, 16, 8)
    assert 0 < value(r, 'train', 'forward', 'device_mean') < value(r, 'train', 'step', 'mean')


# --- warm-up, memory, output

def test_first_step_of_each_fit_is_warm_up():
    clock, learn = manual(make())
    n = []
    learn.model.hook = lambda: (n.append(1), clock.sleep(100. if len(n) == 1 else 1.))
    learn.fit(1)
    r = learn.profiler.results
    assert value(r, 'train', 'forward', 'mean') == 1 and value(r, 'train', 'forward', 'std') == 0
    assert value(r, 'train', 'forward', 'total') == 107 and value(r, 'train', 'forward', 'calls') == 8


@pytest.mark.filterwarnings('ignore')
def test_compiling_steps_are_warm_up():
    learn = make(n=34)  # the last batch is smaller: with dynamic=False it is compiled again
    learn.model = torch.compile(learn.model, backend='eager', dynamic=False)
    learn.fit(1)
    log = learn.profiler.profile.steps['train']
    assert values(log, 'warmup') == [1.] + [0.]*7 + [1.]
    torch._dynamo.reset()


def test_memory_is_bounded():
    watch = Stopwatch()
    watch.profile.__init__(keep=256)
    watch.open()
    watch.mark(FIRST['before_train'])
    for _ in range(20_000):
        watch.mark(DRAW)
        watch.mark(FIRST['after_batch'])
    watch.close()
    log = watch.profile.steps['train']
    assert len(log) == 20_000 and len(log.fresh) + len(log.sample) <= 256*len(log.columns)
    r = {(o['phase'], o['action']): o for o in rows(watch.profile)}
    assert r['train', 'step']['calls'] == 20_000


def test_outputs(tmp_path, capsys):
    learn = make()
    learn.fit(1)
    prof = learn.profiler
    prof.show()
    out = capsys.readouterr().out
    assert out == str(prof) + '\n' and '\x1b' not in out and 'opt_step' in out
    assert '<table' in prof._repr_html_() and prof.to_markdown().startswith('| phase')
    assert prof.to_csv().startswith('phase,action,calls') and json.loads(prof.to_json())['rows'][0]['action'] == 'fit'
    assert prof.plot().patches and prof.verdict.split(':')[0] in ('input-bound', 'compute-bound', 'launch/overhead-bound')


def test_verdict_names_the_loader():
    clock, learn = manual(make())
    learn.model.hook = lambda: clock.sleep(.57)
    learn.dls.train.after_item = lambda o: (clock.sleep(.43/4), o)[1]
    learn.fit(1)
    assert learn.profiler.verdict.startswith('input-bound: 43% of the step is spent waiting for the loader')


def test_tokens():
    def collate(b): return {'input_ids': torch.ones(4, 8), 'attention_mask': torch.tensor([[1]*k + [0]*(8-k) for k in (1, 2, 3, 8)])}, torch.zeros(4).long()
    learn = make(dls=DataLoaders(*(TorchDataLoader(items(16), batch_size=4, collate_fn=collate) for _ in range(2))))
    learn.model.forward = lambda b: learn.model.lin(b['input_ids'])
    learn.fit(1)
    assert values(learn.profiler.profile.steps['train'], 'tokens') == [14.]*4 and 'tokens/s without padding; 56.25% of what' in str(learn.profiler)
    assert learn.profiler.padding == 1-14/32


def test_peak_memory_per_fit():
    learn = make()
    learn.fit(1)
    learn.fit(1)
    assert len(learn.profiler.profile.peaks) == 2 and learn.profiler.profile.peaks[0]['host'] > 2**20


def test_flops(monkeypatch, tmp_path):
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path))
    monkeypatch.setattr('fastbench.machine.flops.measure_peak', lambda device, precision: 1e12)
    learn = make().profile(flops=True)
    learn.fit(1)
    e = learn.profiler.profile.facts['efficiency']
    assert e['flops_per_sample'] == 2*8*3*2 and e['peak'] == 1e12 and 0 < e['share'] < 1
    assert 'FLOPs a sample' in str(learn.profiler)
    assert 'fp32' in (tmp_path/'peaks.json').read_text()
    learn.validate()
    assert learn.profiler.profile.facts['efficiency'] == e and 'FLOPs a sample' in str(learn.profiler)


class Attends(nn.Module):
    def __init__(self): super().__init__(); self.emb,self.wide,self.lin = nn.Embedding(9, 8),nn.Linear(8, 96),nn.Linear(96, 3)
    def forward(self, x):
        x = self.emb(x['input_ids'] if isinstance(x, dict) else x)
        return self.lin(self.wide(x @ x.transpose(1, 2) @ x)).mean(1)


def of_width(n, width, named):
    x = torch.ones(n, width, dtype=torch.long)
    return (dict(input_ids=x, attention_mask=x) if named else x), torch.zeros(n, dtype=torch.long)


@pytest.mark.parametrize('named', [True, False], ids=['masked', 'plain'])
@pytest.mark.parametrize('kind', ['sorted', 'budget', 'random', 'equal'])
def test_flops_of_batches_of_many_widths(monkeypatch, kind, named):
    "The longest texts come first, and are not the average"
    monkeypatch.setattr('fastbench.machine.flops.measure_peak', lambda device, precision: 1e12)
    rng = random.Random(1)
    widths = [min(120, int(3 + rng.expovariate(1/20))) for _ in range(150)]
    if kind != 'random': widths.insert(0, 120)
    batches = [of_width(600//o if kind == 'budget' else 8, 30 if kind == 'equal' else o, named) for o in widths]
    learn = make(dls=DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None))).profile(flops=True)
    learn.model = Attends()
    learn.fit(1, 0.)
    one = {o: count_flops(learn.model, loss_func, *zip(of_width(1, o, named))) for o in {30, *widths}}
    true = [one[30 if kind == 'equal' else o]*len(y) for o, (_, y) in zip(widths, batches)]
    n, e, step = [len(y) for _, y in batches], learn.profiler.profile.facts['efficiency'], learn.profiler.results.set_index(['phase', 'action'])
    assert e['flops_per_sample'] == pytest.approx(sum(true)/sum(n), rel=0 if kind == 'equal' else .15)
    assert e['flops_per_second']*step.loc[('train', 'step'), 'mean'] == pytest.approx(sum(true[1:])/(len(true) - 1), rel=1e-9 if kind == 'equal' else .15)  # without warm-up


def test_a_peak_that_cannot_be_kept_is_measured_by_each_process(monkeypatch, tmp_path):
    "A home that is a file, another list in the file: no fit ends by it"
    monkeypatch.setattr('fastbench.machine.flops.measure_peak', lambda device, precision: 1e12)
    (tmp_path/'file').touch()
    (tmp_path/'peaks.json').write_text('[1, 2]')
    for o in (tmp_path/'file'/'home', tmp_path):
        monkeypatch.setenv('FASTBENCH_HOME', str(o))
        assert matmul_peak() == 1e12
    assert 'fp32' in (tmp_path/'peaks.json').read_text()


def test_the_peak_of_slow_arithmetic_takes_no_minutes(monkeypatch):
    "As of bf16 where it is emulated"
    sides, clock = [], [0.]
    def slow(a, b): sides.append(len(a)); clock[0] += 2*len(a)**3/1e9  # 1 GFLOP/s
    monkeypatch.setattr('fastbench.machine.flops._products', lambda *_: [slow])
    monkeypatch.setattr('fastbench.machine.flops.perf_counter', lambda: clock[0])
    assert measure_peak(precision='bf16') == pytest.approx(1e9) and set(sides) == {512}


def test_trace(tmp_path):
    learn = make().profile(trace=tmp_path/'x.json', trace_steps=3)
    learn.fit(1)
    names = [o.get('name') for o in json.loads((tmp_path/'x.json').read_text())['traceEvents']]
    for o in ('draw', 'to_device', 'forward', 'loss', 'backward', 'opt_step', 'zero_grad', 'callbacks'): assert o in names, o
    assert names.count('backward') == 3 and [o.name for o in tmp_path.iterdir()] == ['x.json']
    check(learn, 8, 4)


def test_trace_of_an_interrupted_fit(tmp_path):
    learn = make().profile(trace=tmp_path/'x.json')
    learn.add_cb(Raise('after_pred', KeyboardInterrupt, times=4))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert 'forward' in (tmp_path/'x.json').read_text()
    clean(learn)


def test_trace_into_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match='does not exist'): make().profile(trace=tmp_path/'no'/'x.json')


def row_of(i): return torch.ones(8)*i
def class_of(i): return torch.tensor(i % 3)
def of_numbers():
    return Datasets(list(range(32)), [[row_of], [class_of]], splits=[range(24), range(24, 32)]).dataloaders(bs=4, num_workers=0)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('again', [lambda learn, d: load_learner(d/'x.pkl'), lambda learn, d: copy.deepcopy(learn)], ids=['exported', 'deep-copied'])
def test_a_profiled_learner_goes_on_elsewhere(tmp_path, again):
    learn = make(dls=of_numbers(), path=tmp_path)
    learn.fit(1)
    want = learn.get_preds()[0]
    learn.export('x.pkl')
    new = again(learn, tmp_path)
    assert new.profiler.learn is new and not len(new.profiler.results)
    new.dls = learn.dls  # an exported Learner has no items
    assert new.get_preds()[0].equal(want)
    new.fit(1)
    assert value(new.profiler.results, 'train', 'step') == value(learn.profiler.results, 'train', 'step') == len(learn.dls.train)


@pytest.mark.filterwarnings('ignore')
def test_export_carries_no_measurements(tmp_path):
    learn = make(dls=of_numbers(), path=tmp_path)
    learn.fit(1)
    learn.export('x.pkl')
    other = load_learner(tmp_path/'x.pkl')
    assert isinstance(other.profiler, Profiler) and other.profiler.results.empty
    assert value(learn.profiler.results, 'train', 'step') == len(learn.dls.train)
    clean(learn)


def test_as_a_callback_of_one_fit():
    learn, prof = make(), Profiler()
    learn.remove_cb(learn.profiler)
    learn.fit(1, cbs=prof)
    assert value(prof.results, 'train', 'step') == 8 and value(prof.results, 'valid', 'step') == 4
    adds_up(prof.results)
    assert not hasattr(learn, 'profiler') and 'remove_cbs' not in vars(learn)


def test_flops_that_cannot_be_counted_do_not_fail_the_fit():
    learn = make().profile(flops=True)
    learn.model.__deepcopy__ = lambda memo: 1/0
    with pytest.warns(UserWarning, match='no FLOPs were counted: UserError: .*cannot be copied'): learn.fit(1)
    check(learn, 8, 4)


@pytest.mark.filterwarnings('ignore')
def test_compile_time_is_its_own_row():
    import torch._dynamo
    clock, learn = manual(make(n=34))

    def backend(graph, _):
        clock.sleep(50.)
        return graph
    learn.model.hook = lambda: clock.sleep(1.)
    learn.model.lin = torch.compile(learn.model.lin, backend=backend, dynamic=False)
    learn.fit(1)
    r = clean(learn)
    adds_up(r)
    assert value(r, 'train', 'compile', 'total') == 100 and value(r, 'train', 'compile') == 2, 'the first batch, and the last one: it is smaller'
    assert pd.isna(value(r, 'train', 'compile', 'mean')) and value(r, 'train', 'forward', 'total') == 9
    assert value(r, 'train', 'step', 'total') == 109 and value(r, 'train', 'step', 'mean') == 1
    handler = torch._dynamo.callback.callback_handler
    assert not handler.start_callbacks and not handler.end_callbacks
    torch._dynamo.reset()


@pytest.mark.filterwarnings('ignore')
def test_compilation_that_fails_leaves_no_hook():
    import torch._dynamo
    clock, learn = manual(make())

    def backend(graph, _):
        clock.sleep(50.)
        raise NotImplementedError
    learn.model.lin = torch.compile(learn.model.lin, backend=backend)
    with pytest.raises(Exception): learn.fit(1)
    assert value(learn.profiler.results, 'train', 'compile', 'total') == 50
    assert not torch._dynamo.callback.callback_handler.start_callbacks
    torch._dynamo.reset()


# the tape of a hot loop

@pytest.mark.parametrize('b,size', [((torch.ones(3, 2), torch.ones(3)), 3), ((torch.ones(2),), 2), ([torch.ones(4, 1), 0], 4), ((torch.tensor(1.), 0), 1), ((), 0), (None, 0), (7, 1),
                                    (torch.ones(5, 2), 5), ((TensorImage(torch.ones(6, 1)), 0), 6), (((torch.ones(7, 1), 1), 0), 7), (({'x': torch.ones(8)}, 0), 8)],
                         ids=lambda o: type(o).__name__ if not isinstance(o, int) else str(o))
@pytest.mark.parametrize('watched', [False, True])
def test_how_large_batches_are(b, size, watched):
    w = Stopwatch()
    if watched: w.watchers = (lambda *_: None,)
    w.open()
    w.mark(FIRST['before_train'])
    for _ in TimedLoader([b]*40, w): w.mark(LAST['after_batch'])
    w.close()
    assert batch_size(b) == (size, 0, 0)
    assert values(w.profile.steps['train'], 'samples') == [size]*40


def plain(kind):
    "The marks of a batch by what happened in it"
    events = {'whole': ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch'],
              'no step': ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_cancel_step', 'after_step', 'after_batch'],
              'cancelled': ['before_batch', 'after_cancel_batch', 'after_batch'], 'cut off': ['before_batch', 'after_pred']}[kind]
    return [DRAWN, *(m for e in events for m in ((FIRST[e], LAST[e]) if e in ('before_batch', 'after_batch', 'after_cancel_step') else (LAST[e],))), DRAW]


@pytest.mark.parametrize('odd', [[], ['no step', 'cancelled'], ['cut off'], ['no step', 'cut off', 'cut off', 'cancelled']], ids=lambda o: '+'.join(o) or 'plain')
@pytest.mark.parametrize('n,every', [(300, 1000), (300, 100), (40, 1000), (300, 7), (1, 1), (66, 66)])
@pytest.mark.parametrize('tokens', [0, .5, 1])
def test_tape(n, every, odd, tokens):
    "What is credited from the tape is what marks would have credited, to the last bit, however often it is replayed"
    from fastbench.measure.phases import Profile, to_dict
    class Random:
        def __init__(self): self.now,self.rng = 0.,random.Random(1)
        def __call__(self):
            self.now += self.rng.random()
            return self.now
    def run(taped):
        rng,w = random.Random(n),Stopwatch(Profile(128), Random())
        w.open()
        w.mark(FIRST['before_train'])
        w.mark(DRAW)
        mark,time,now,count = w.tape() if taped else (w.mark,len,str,w._count)
        for i in range(n):
            for j,m in enumerate(plain(rng.choice(odd) if odd and i % 50 == 20 else 'whole')):
                mark(m)
                time(now())
                if not j: count((rng.randrange(9), rng.randrange(5), rng.randrange(7)) if rng.random() < tokens else rng.randrange(9))
            if taped and not i % every: w.replay()
        w.mark(END)
        w.close()
        assert not w.taped and not w.counts
        return to_dict(w.profile)
    a,b = run(True),run(False)
    assert a == b and a['steps']['train']['n'] > .8*n


# --- kernels

def test_kernels_of_a_few_steps():
    learn = make()
    learn.profile(kernels=True)
    learn.fit(1)
    table, log = learn.profiler.kernels, learn.profiler.profile.steps['train']
    assert table.found['device'] == 'cpu' and table.found['steps'] == 3 and 0 < table.found['busy'] <= 1 and len(table.rows) == 10
    assert next(o['calls'] for o in table.rows if o['name'] == 'aten::addmm') == 1
    assert values(log, 'warmup') == [1., 0., 1., 1., 1., 0., 0., 0.]  # recorded steps are slower
    assert 'cpu busy' in str(learn.profiler) and 'calls a step' in str(table)
    learn.fit(1)  # recorded once
    assert learn.profiler.kernels.found == table.found and learn.profiler.profile.steps['train'].n == 16
    check(learn, 16, 8, fits=2)


def test_a_fit_too_short_has_no_kernels():
    learn = make(n=16)
    learn.profile(kernels=True)
    learn.fit(1)
    assert learn.profiler.kernels is None
    assert not torch.autograd._profiler_enabled()
    check(learn, 4, 4)


def test_kernels_end_with_the_fit_however_it_ended():
    learn = make()
    learn.profile(kernels=True)
    n = []
    learn.model.hook = lambda: (n.append(1), 1/0 if len(n) == 4 else None)
    with pytest.raises(ZeroDivisionError): learn.fit(1)
    learn.model.hook = lambda: None
    assert learn.profiler.kernels is None
    learn.fit(1)
    assert learn.profiler.kernels.found['steps'] == 3


def test_trace_and_kernels_are_refused_together():
    with pytest.raises(UserError, match='cannot both be had'): make().profile(trace='x.json', kernels=True)


def test_another_profiler_at_work_costs_the_kernels_and_no_fit():
    learn = make()
    learn.profile(kernels=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.warns(UserWarning, match='no kernels were recorded'): learn.fit(1)
    assert learn.profiler.kernels is None
    check(learn, 8, 4)


@pytest.mark.parametrize('event, exc, ended', [('after_pred', CancelTrainException, 2), ('before_batch', CancelEpochException, 2), ('after_loss', KeyboardInterrupt, 2), ('before_batch', CancelBatchException, 8),
                                               ('after_pred', ZeroDivisionError, 0)])
def test_the_sum_of_the_steps_is_that_of_their_parts(event, exc, ended):
    "Also where a step was not finished"
    seen = []

    class Boom(Callback):
        def __call__(self, name):
            if name != event or not self.training: return
            seen.append(name)
            if len(seen) == ended % 8 + 1: raise exc()
    learn = make(cbs=Boom())
    with suppress(KeyboardInterrupt, ZeroDivisionError): learn.fit(1)
    total = {r['action']: r['total'] for r in rows(learn.profiler.profile) if r['phase'] == 'train'}
    found = learn.profiler.profile.outside['train']
    around = sum(found.get(k, (0, 0.))[1] for k in ('callbacks', 'unattributed'))  # of before_train and after_train, and of what was not finished
    parts = sum(v for k, v in total.items() if k not in ('step', 'start', 'stop'))
    assert parts - around - 1e-9 <= total['step'] <= parts + 1e-9
    unfinished = sum(v[1] for k, v in found.items() if k in ('draw', 'to_device', 'forward', 'loss', 'backward', 'opt_step', 'zero_grad'))
    assert unfinished <= found.get('step', (0, 0.))[1] + 1e-9
    assert len(learn.profiler.profile.steps['train']) == ended


def test_the_time_of_a_step_that_was_not_finished():
    clock = ManualClock()
    w = Stopwatch(clock=clock)
    w.open()
    for m in (FIRST['before_epoch'], LAST['before_epoch'], FIRST['before_train'], LAST['before_train']): w.mark(m)

    def step(*marks):
        for m in marks:
            w.mark(m)
            clock.sleep(1)
    whole = DRAW, DRAWN, FIRST['before_batch'], LAST['before_batch'], FIRST['after_pred'], LAST['after_pred']
    step(*whole, FIRST['after_batch'], LAST['after_batch'])
    step(*whole)
    w.mark(FIRST['after_cancel_train'])
    w.mark(LAST['after_train'])
    w.close()
    found = {r['action']: r for r in rows(w.profile) if r['phase'] == 'train'}
    assert found['step']['total'] == 8 + 6 and found['step']['calls'] == 1
    assert sum(r['total'] for k, r in found.items() if k != 'step') == 14


@pytest.mark.parametrize('keep', [1, 2, 3, 4, 5])
def test_a_few_raw_rows_are_enough(keep):
    "With three and fewer it went on thinning for ever, and no Ctrl-C ended it"
    from fastbench.measure.phases import Log, stats
    for columns in ('step',), ('step', 'warmup', 'x'):
        log = Log(columns, keep=keep)
        for i in range(100): log.add([float(i+1)]*len(columns))
        log.add_all(np.ones((50, len(columns))))
        assert len(log) == 150 and stats(log, 'step')['total'] == 5100. and 1 <= len(log.sample)//len(columns) <= max(keep, 2)


@pytest.mark.parametrize('kwargs,says', [(dict(keep=0), 'keep=0 cannot be'), (dict(keep=-1), 'keep=-1 cannot be'), (dict(keep='a'), "keep='a' cannot be")])
def test_rows_that_cannot_be_kept(kwargs, says):
    with pytest.raises(UserError, match=says): Profiler(**kwargs)


def test_a_trace_that_cannot_be_written_is_told_before_the_fit(tmp_path):
    from fastbench.measure.trace import Trace
    for path, says in ((tmp_path, 'is a folder: name a file in it, .*trace.json.gz'), (True, 'trace=True cannot be: a file'), (tmp_path/'no'/'t.json', 'the folder .* does not exist; make it first')):
        with pytest.raises(UserError, match=says): Trace(path)
    with pytest.raises(UserError, match='trace_steps=0 cannot be'): Trace(tmp_path/'t.json', 0)

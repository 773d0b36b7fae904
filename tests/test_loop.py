"The lean loop against fastai's own: the same weights, the same events, the same record, whatever the callbacks do."
import gc
import os
import re
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException
from fastai.callback.core import CancelStepException, CancelTrainException, CancelValidException, TrainEvalCallback, event
from fastai.callback.fp16 import MixedPrecision  # noqa: F401
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import Learner, ParamScheduler, SchedCos, SchedExp, combine_scheds, combined_cos
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip, ShortEpochCallback
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.learner import AvgMetric, AvgSmoothLoss, CastToTensor, Recorder, load_learner
from fastai.metrics import F1Score, accuracy
from fastai.torch_core import TensorBase, defaults
from torch import nn

from fastbench.train.fast_callbacks import LeanLoss, LeanRecorder, SmoothLoss, _plain
from fastbench.train.loop import FastLoop

EVENTS = [o for o in vars(event) if o.startswith(('before_', 'after_'))]
CANCELS = [CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
           CancelTrainException, CancelValidException]


class Spy(Callback):
    "Writes down what a callback can see at each event"
    order = 1000

    def __init__(self): self.seen = []

    def __call__(self, event_name):
        learn = self.learn
        see = [event_name, learn.training, [cb.name for cb in learn.cbs.sorted('order')]]
        for o in ('iter', 'n_iter', 'epoch', 'n_epoch', 'train_iter', 'pct_train', 'loss', 'loss_grad', 'pred', 'xb', 'yb', 'smooth_loss'):
            v = vars(learn).get(o, None) if o != 'smooth_loss' else getattr(learn, o, None)
            if o == 'smooth_loss' and event_name in ('after_batch', 'before_fit'): v = None  # fastai's recorder writes it in that event
            see.append(v.detach().clone() if isinstance(v, torch.Tensor) else v)
        rec = getattr(learn, 'recorder', None)
        if hasattr(rec, 'losses') and event_name == 'after_train': see += [len(rec.losses), list(rec.losses), list(rec.lrs)]
        self.seen.append(see)


def same(a, b):
    if isinstance(a, torch.Tensor): return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b


def items(n): return [(torch.randn(8), i % 3) for i in range(n)]


def make(cls, n=26, bs=4, dls=None, **kwargs):
    torch.manual_seed(0)
    if dls is None: dls = DataLoaders(DataLoader(items(n), bs=bs), DataLoader(items(10), bs=bs))
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    learn = cls(dls, model, loss_func=nn.CrossEntropyLoss(), **{'metrics': accuracy, **kwargs})
    return learn


def outcome(cls, use, cbs=(), **kwargs):
    "What is left after `use(learn)`: error, record, weights, and what a spy saw"
    learn, spy, error = make(cls, **kwargs), Spy(), None
    learn.add_cbs([*(cb() for cb in cbs), spy])
    with redirect_stdout(StringIO()) as out:
        try: use(learn)
        except BaseException as e: error = (type(e), str(e).replace('Lean', '').replace('Progress`', 'ProgressCallback`'))
    rec = getattr(learn, 'recorder', None)
    values = [re.sub(r'\d\d:\d\d', '', str(v)) for v in getattr(rec, 'values', [])]
    return dict(error=error, weights=list(learn.model.state_dict().values()), seen=spy.seen, values=values, lrs=getattr(rec, 'lrs', None),
                losses=list(getattr(rec, 'losses', [])), iters=getattr(rec, 'iters', None), cbs=len(learn.cbs), training=learn.training,
                table=[o for o in out.getvalue().splitlines() if 'epoch' in o])


def agree(use, **kwargs):
    a, b = outcome(Learner, use, **kwargs), outcome(FastLoop, use, **kwargs)
    for k in a:
        if k == 'seen':
            assert [o[0] for o in a[k]] == [o[0] for o in b[k]]
            for x, y in zip(a[k], b[k]): assert same(x, y), (x[0], x, y)
        else: assert same(a[k], b[k]), (k, a[k], b[k])
    return b


def test_fit_and_one_cycle():
    res = agree(lambda learn: (learn.fit(2, .1), learn.fit_one_cycle(2, .1), learn.validate(), learn.get_preds(), learn.fine_tune(1)))
    assert res['error'] is None and len(res['losses']) == 7 and len(res['seen']) > 200


@pytest.mark.parametrize('how', [lambda o: o.fit_one_cycle(2, slice(1e-3, .1)), lambda o: o.fit_flat_cos(2, .1), lambda o: o.fit_sgdr(2, 1, .1),
                                 lambda o: o.fit(2, cbs=ParamScheduler(dict(lr=SchedExp(.1, .01), mom=lambda pct: .9 - pct/10)))])
def test_schedules(how):
    "Same weights, rates and record as fastai's `ParamScheduler`"
    def use(learn):
        learn.splitter = lambda m: [list(m[:2].parameters()), list(m[2:].parameters())]
        how(learn)
        learn.recorder.values.append([*map(str, learn.recorder.hps.values())])
    assert agree(use)['error'] is None


def test_a_schedule_changed_in_mid_fit():
    class Change(Callback):
        def before_batch(self):
            if self.train_iter == 3: self.learn.param_scheduler.scheds = dict(lr=combined_cos(.5, .3, .2, .1), mom=lambda pct: .5)
    assert agree(lambda o: o.fit_one_cycle(1, .1), cbs=[Change])['lrs'][-1] < .2


def test_a_scheduler_stays_the_same_object_and_ones_own_class_its_own():
    class Mine(ParamScheduler): pass
    learn, sched, mine = make(FastLoop), ParamScheduler(dict(lr=combined_cos(.5, .1, .2, .1))), Mine(dict(mom=lambda pct: .9))
    with redirect_stdout(StringIO()): learn.fit(1, cbs=[sched, mine])
    assert isinstance(sched, ParamScheduler) and sched.name == 'param_scheduler' and type(mine) is Mine and sched not in learn.cbs
    assert learn.recorder.lrs == sched.hps['lr'] and mine.hps['mom'][-1] == .9
    plain = make(Learner)
    with redirect_stdout(StringIO()): plain.fit(1, cbs=sched)  # goes on to work anywhere
    assert plain.recorder.lrs == learn.recorder.lrs


@pytest.mark.parametrize('shares', [(.25, .75), (0, 1), (1, 0), (.1, .2, .7)])
def test_plain_schedules_are_exact(shares):
    f = combine_scheds(shares, [SchedCos(.1*i, 1) for i in range(len(shares))])
    g, at = _plain(f), [*torch.rand(500).tolist(), *torch.rand(500, dtype=torch.float64).tolist(), 0, *torch.tensor(shares).cumsum(0).tolist(), 1 + 1e-6, -.1]
    def told(h, o):
        try: return repr(h(o))
        except (RuntimeError, ValueError) as e: return repr(e)
    assert g is not f and [told(f, o) for o in at] == [told(g, o) for o in at]


def test_freeze_and_lr_find(tmp_path): agree(lambda learn: (learn.lr_find(show_plot=False, num_it=15), learn.unfreeze(), learn.fit(1)), path=tmp_path)


@pytest.mark.parametrize('cbs', [[lambda: GradientAccumulation(8)], [GradientClip], [lambda: GradientAccumulation(6), GradientClip],
                                 [lambda: ShortEpochCallback(.5)], [lambda: EarlyStoppingCallback(patience=1, min_delta=9)]])
def test_fastai_callbacks(cbs): agree(lambda learn: learn.fit(3, .1), cbs=cbs)


def test_save_model(tmp_path): agree(lambda learn: learn.fit(2, .1), cbs=[SaveModelCallback], path=tmp_path)


def raiser(name, e, why=('wrong',)):
    class Raise(Callback):
        order = 20
        n = 0
    def f(self):
        self.n += 1
        if self.n == 2 or name.endswith(('fit', 'epoch', 'train', 'validate')): raise e(*why)
    setattr(Raise, name, f)
    return Raise


@pytest.mark.parametrize('name', EVENTS[1:])
@pytest.mark.parametrize('e', [*CANCELS, ValueError, KeyboardInterrupt])
def test_whatever_is_raised(name, e): agree(lambda learn: learn.fit(2, .1), cbs=[raiser(name, e)], n=12)


def test_an_error_without_a_message_says_what_it_is():
    learn = make(FastLoop)
    learn.add_cb(raiser('after_pred', ValueError, ()))
    with pytest.raises(ValueError, match='`Raise` when calling event `after_pred`'), learn.no_bar(), learn.no_logging(): learn.fit(1)


class Second(Callback):
    order = 30
    def __init__(self): self.calls = []
    def before_batch(self): self.calls.append('before')
    def after_step(self): self.calls.append('step')
    def after_batch(self): self.calls.append('after')


@pytest.mark.parametrize('name', ['before_batch', 'after_pred', 'after_backward', 'after_step', 'after_batch', 'before_train', 'before_validate', 'after_epoch'])
@pytest.mark.parametrize('how', ['add', 'append', 'remove', 'order', 'run', 'run_train', 'method', 'listener'])
def test_callbacks_come_and_go_in_mid_fit(name, how):
    second = []

    class Change(Callback):
        n = 0

    def change(self):
        self.n += 1
        if self.n != 2: return
        cb, cbs = second[-1], self.learn.cbs
        if how == 'add': self.learn.add_cb(second.append(Second()) or second[-1])
        if how == 'append':
            second.append(Second())
            second[-1].learn = self.learn
            cbs.append(second[-1])
        if how == 'remove': self.learn.remove_cb(cb)
        if how == 'order': cb.order = -1
        if how == 'run': cb.run = False
        if how == 'run_train': cb.run_train = False
        if how == 'method': cb.after_batch = lambda: cb.calls.append('new')
        if how == 'listener' and name.endswith(('train', 'validate', 'epoch')): cb.after_pred = lambda: cb.calls.append('pred')

    setattr(Change, name, change)
    seen = []

    def use(learn):
        second.append(Second())
        learn.add_cbs([Change(), second[-1]])
        learn.fit(3, .1)
        seen.append([cb.calls for cb in second])
        second.clear()
    agree(use, n=12)
    assert seen[0] == seen[1] and seen[0][0]


def test_who_listens_is_not_asked_again_for_a_profiler():
    class Silent(Callback): by_stamps = True
    learn = make(FastLoop)
    learn.add_cb(Second())
    table = learn._look()

    def same():
        learn._check()
        return learn._listeners is table
    learn.add_cb(Silent())
    assert same()
    learn.remove_cb(Silent)
    assert same()
    learn.cbs.append(Silent())
    learn.second.order = -1  # at the same moment
    assert not same()
    table = learn._look()
    learn.remove_cb(learn.second)
    assert not same()


def test_a_callback_that_is_added_while_a_validation_runs_inside_a_fit():
    class Nested(Callback):
        def after_step(self):
            if self.train_iter == 1: self.learn.validate(cbs=Second())
    agree(lambda learn: learn.fit(2, .1), cbs=[Nested])


def test_events_called_by_hand():
    def use(learn):
        cb = Second()
        learn.add_cb(cb)
        learn.create_opt()
        learn.dl, learn.n_iter, learn.training = learn.dls.train, 7, True
        learn.epoch, learn.train_iter, learn.pct_train = 0, 0, 0.
        learn.recorder.before_fit()
        learn.recorder.before_epoch()
        learn.one_batch(0, learn.dls.train.one_batch())
        learn.cbs.append(other := Second())
        other.learn = learn
        learn.one_batch(1, learn.dls.train.one_batch())
        learn(['after_batch', 'before_batch'])
        assert len(cb.calls) == 8 and len(other.calls) == 5
        with pytest.raises(Exception, match='missing'): learn('no_such_event')
    with suppress(AttributeError): make(FastLoop).remove_cb(ProgressCallback)
    for cls in (Learner, FastLoop):
        learn = make(cls)
        learn.remove_cb(learn.progress)
        use(learn)


def test_what_a_model_calls_its_own_passes_for_a_callbacks():
    "fastai asks the Learner, and that the model, for a method that a callback lacks"
    def use(learn):
        learn.model.after_step = lambda: calls.append(1)
        learn.fit(1)
    calls = []
    agree(use, n=8)
    assert len(calls) and len(calls) % 2 == 0


def test_inputs_and_targets_of_every_kind():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 3)
        def forward(self, a, b=None): return self.lin(a['x'] if isinstance(a, dict) else a)

    x, y = TensorBase(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0])
    for b in [(x, y), [x, y], (x, x, y), ({'x': x}, y), (x, (y, ))]:
        def use(learn, b=b):
            learn.model = Two()
            if isinstance(b[-1], tuple): learn.loss_func = lambda p, t: nn.functional.cross_entropy(p, t[0])
            learn.fit(1)
        res = agree(use, dls=DataLoaders([b]*3, [b]*2), metrics=[])
        assert res['error'] is None


def test_no_targets():
    b = torch.randn(4, 8)
    res = agree(lambda learn: learn.get_preds(dl=[(b,)]), dls=DataLoaders([(b, torch.tensor([0, 1, 2, 0]))]*2, [(b,)]*2))
    assert res['error'] is None


def test_our_metrics_measure_in_a_learner_of_fastai():
    ours = make(FastLoop)
    theirs = make(Learner, dls=ours.dls, metrics=[*ours.metrics, LeanLoss()])
    theirs.model = ours.model
    loss, acc = ours.validate()
    assert list(theirs.validate()) == pytest.approx([loss, acc, loss])


def test_train_metrics_and_metrics_of_every_kind():
    def use(learn):
        learn.recorder.train_metrics = True
        learn.fit(2, .1)
    agree(use, metrics=[accuracy, F1Score(average='macro'), AvgMetric(accuracy)])
    agree(lambda learn: setattr(learn.recorder, 'valid_metrics', False) or learn.fit(1))


def test_the_recorder_in_mid_fit():
    seen = []

    class Look(Callback):
        order = 60
        def after_batch(self):
            if self.training: seen.append((len(self.recorder.losses), float(self.recorder.losses[-1]), float(self.learn.smooth_loss),
                                           self.recorder.smooth_loss.count, float(self.recorder.smooth_loss.value)))
    agree(lambda learn: learn.fit(2, .1), cbs=[Look])
    assert len(seen) == 28 and seen[:14] == seen[14:]


def test_many_steps_are_worked_out_in_between():
    s, n = SmoothLoss(), 3000
    class Step: loss = torch.tensor(1.)
    for _ in range(n): s.accumulate(Step)
    assert s.count == n and len(s._steps) == 0 and float(s.value) == pytest.approx(1, rel=1e-4)
    assert len(s.steps) == n and s.steps is s.steps and float(s.steps[1024]) == pytest.approx(1, rel=1e-4)


def test_losses_of_another_kind_in_mid_fit():
    a, b = SmoothLoss(), AvgSmoothLoss()
    for loss in [torch.tensor(1.), torch.tensor([2., 4.]), TensorBase(3.), torch.tensor(4., requires_grad=True)]:
        for s in (a, b): s.accumulate(SimpleNamespace(loss=loss))
        if loss.ndim: assert same([a.value, a.val], [b.value, b.val])
    assert same([a.value, a.val, a.count], [b.value, b.val, b.count]) and not a.value.requires_grad
    for loss in torch.ones(1500): a.accumulate(SimpleNamespace(loss=loss))
    half = SmoothLoss()
    half.accumulate(SimpleNamespace(loss=torch.tensor(2., dtype=torch.bfloat16)))
    assert half.steps[0].dtype == torch.bfloat16
    half.accumulate(SimpleNamespace(loss=torch.tensor(2.)))
    with pytest.raises(RuntimeError, match='dtype'): half.steps  # as fastai's: nothing is cast in silence


def test_no_small_tensor_outlives_its_step():
    "Each would be put between the large buffers of a step: the heap grows by about one of them a step"
    counts = []
    class Count(Callback):
        order = 2000
        def after_batch(self):
            if self.training and self.iter in (9, 199): counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    learn = make(FastLoop, n=800)
    gc.collect()  # else what earlier tests left may go in the middle
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=Count())
    assert abs(counts[1] - counts[0]) < 10, counts
    assert len(learn.recorder.losses) == 200


def test_no_loss_is_read_in_a_step(monkeypatch):
    "On a GPU each of these is a synchronisation"
    reads, learn = [], make(FastLoop, n=64)
    monkeypatch.setattr(torch.Tensor, 'is_cpu', False)  # on a CPU a loss is read at once: nothing is waited for
    for name in ('item', 'cpu', '__float__', '__bool__', 'tolist', 'numpy'):
        before = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _f=before, _n=name, **k: reads.append((learn.training, _n)) or _f(self, *a, **k))
    class Watch(Callback):
        order = 2000
        def before_batch(self):
            reads.clear()
        def after_batch(self): found.extend(reads)
    found = []
    learn.remove_cb(learn.progress)
    with learn.no_logging(): learn.fit(2, .1, cbs=Watch())
    assert found == [] and len(learn.recorder.losses) == 32


def test_the_bar_shows_the_loss_when_it_is_drawn():
    with redirect_stdout(StringIO()) as out: make(FastLoop).fit(1)
    assert re.search(r'14\.29% \[1/7 .*?\.\.\. \d\.\d{4}\]', out.getvalue())


def test_export_and_load(tmp_path):
    learn = make(FastLoop, path=tmp_path)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    learn.dls = DataLoaders.from_dsets(Datasets(list(range(6))), Datasets(list(range(6))), bs=2)
    learn.export()
    with pytest.warns(UserWarning): other = load_learner(tmp_path/'export.pkl')
    assert type(other) is FastLoop and not other._listeners
    assert torch.equal(other.model[0].weight, learn.model[0].weight)
    other.dls = make(FastLoop).dls
    with other.no_bar(), other.no_logging(): other.fit(1)


def test_default_callbacks():
    learn = make(FastLoop)
    assert isinstance(learn.recorder, LeanRecorder) and learn.default_cbs and [cb.name for cb in learn.cbs] == [cb.name for cb in make(Learner).cbs]
    assert Recorder in defaults.callbacks and LeanRecorder not in defaults.callbacks
    assert list(make(FastLoop, default_cbs=False).cbs) == []
    mine = Recorder(train_metrics=True)
    learn = make(FastLoop, default_cbs=False, cbs=[mine, CastToTensor])
    assert learn.recorder is mine and type(learn.cbs[1]) is CastToTensor


# fastai's own test notebooks

FOLDER = os.environ.get('FASTAI_NBS')
NOTEBOOKS = ['13_callback.core', '13a_learner', '14_callback.schedule', '14a_callback.data', '15_callback.hook', '16_callback.progress', '17_callback.tracker',
             '18_callback.fp16', '18a_callback.training', '18b_callback.preds', '18c_callback.channelslast', '19_callback.mixup', '34_callback.rnn']


def run_notebook(path, cls, folder):
    "Run the cells of a fastai notebook that are not the library itself with `cls` in place of `Learner`; the errors by cell"
    from fastcore.nbio import read_nb
    import importlib
    import fastai.test_utils
    errors, done, space = {}, 0, {'__name__': 'notebook'}
    nb = read_nb(path)
    name = next(re.search(r'default_exp (\S+)', c.source)[1] for c in nb.cells if 'default_exp' in c.source)
    module = importlib.import_module(f'fastai.{name}')
    exec('from fastai.basics import *\nfrom fastai.callback.all import *\nfrom fastai.test_utils import *\nfrom fastcore.test import *\nfrom nbdev.showdoc import *', space)
    space.update({k: v for k, v in vars(module).items() if not k.startswith('__')})
    space['Learner'] = fastai.test_utils.Learner = cls
    here, callbacks = os.getcwd(), defaults.callbacks
    os.chdir(folder)
    if path.name.startswith('13'): defaults.callbacks = [TrainEvalCallback]  # the others are made in the course of it
    try:
        for i, c in enumerate(nb.cells):
            for line in c.source.splitlines():
                if line.startswith('if ') and 'defaults.callbacks' in line: exec(line, space)
            flags = [o.strip().replace(' ', '') for o in c.source.splitlines() if o.startswith('#|')]
            if c.cell_type != 'code' or any(o.startswith(('#|export', '#|cuda', '#|slow', '#|default_exp', '#|eval:false')) for o in flags): continue
            if c.source.lstrip().startswith(('%', '!', 'from nbdev', 'show_doc')) or 'nbdev_export' in c.source: continue
            torch.manual_seed(i)
            try:
                with redirect_stdout(StringIO()): exec(c.source.replace('%matplotlib inline', ''), space)
            except BaseException as e: errors[i] = f'{type(e).__name__}: {str(e)[:200]}'
            done += 1
    finally:
        os.chdir(here)
        defaults.callbacks = callbacks
        fastai.test_utils.Learner = Learner
    return errors, done


@pytest.mark.skipif(not FOLDER, reason='FASTAI_NBS does not name the nbs folder of a checkout of fastai')
@pytest.mark.parametrize('name', NOTEBOOKS)
def test_fastai_notebooks(name, tmp_path):
    path = Path(FOLDER)/f'{name}.ipynb'
    before, _ = run_notebook(path, Learner, tmp_path)
    after, done = run_notebook(path, FastLoop, tmp_path)
    print(f'{name}: {done} cells, {len(before)} fail with fastai itself')
    new = {k: v for k, v in after.items() if k not in before}
    assert done and not new, new


def test_the_bar_that_comes_back_is_lean():
    "fastai's `no_bar` adds its own again"
    from fastbench.train.learner import BenchLearner
    learn = BenchLearner(DataLoaders(*[DataLoader([(torch.randn(4), 0)]*4, bs=2)]*2), nn.Linear(4, 2), loss_func=nn.CrossEntropyLoss())
    before = [type(o) for o in learn.cbs]
    with learn.no_bar(): pass
    assert [type(o) for o in learn.cbs] == before

"Phases in other people's loggers, and joules: real TensorBoard files, stand-ins for what needs an account or a sensor."
import math
import sys
import types
import warnings
from types import SimpleNamespace as NS

import pytest
import torch
from fastai.callback.core import CancelFitException, Callback
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.test_utils import synth_learner

import fastbench.measure.profiler  # noqa: F401, adds profile
from fastbench.measure.energy import Energy, joules, zeus_monitor
from fastbench.measure.logger import LogPhases, _counts, scalars
from fastbench.measure.phases import Profile, notes, step_columns
from fastbench.errors import UserError
from fastbench.train.learner import BenchLearner

pytestmark = pytest.mark.usefixtures('one_thread')


def fit(learn, n=2, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-3, **kwargs)
    return learn


def learner(**kwargs):
    learn = synth_learner(n_trn=6, **kwargs)
    learn.profile()
    return learn


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    acc = EventAccumulator(str(folder)).Reload()
    return {k: [(o.step, o.value) for o in acc.Scalars(k)] for k in acc.Tags()['scalars']}


# What an epoch took

def add(p, phase, *rows):
    for r in rows: p.steps[phase].add([float(r.get(c, 0.)) for c in step_columns(phase)])


def test_scalars_are_of_the_steps_in_between():
    p = Profile(keep=64)
    old = _counts(p)
    add(p, 'train', dict(warmup=1, samples=8, step=99, forward=99), dict(samples=8, step=.4, forward=.1, tokens=30, slots=40), dict(samples=8, step=.6, forward=.3, tokens=30, slots=40))
    first,now = scalars(old, _counts(p)),_counts(p)
    assert first == pytest.approx({'fastbench/train/step_ms': 500, 'fastbench/train/forward_ms': 200, 'fastbench/train/samples_per_second': 16, 'fastbench/train/tokens_per_second': 60, 'fastbench/train/padding': .25})
    for _ in range(100): add(p, 'train', dict(samples=8, step=1., forward=.5))  # folds
    add(p, 'valid', dict(samples=4, step=.5, predict=.25))
    p.fit['train'].add([100.])
    second = scalars(now, _counts(p))
    assert second == pytest.approx({'fastbench/train/step_ms': 1000, 'fastbench/train/forward_ms': 500, 'fastbench/train/samples_per_second': 8, 'fastbench/valid/step_ms': 500, 'fastbench/valid/predict_ms': 250,
                                    'fastbench/valid/samples_per_second': 8, 'fastbench/train_s': 100})
    assert scalars(_counts(p), _counts(p)) == {}


@pytest.mark.parametrize('cls', [None, BenchLearner])
def test_epochs_add_up_to_the_table(cls):
    learn,said = learner(),[]
    if cls: learn = cls(learn.dls, learn.model, loss_func=learn.loss_func).profile()
    fit(learn, 3, cbs=LogPhases(lambda values, step: said.append((step, values))))
    rows = {(r['phase'], r['action']): r for r in learn.profiler.table.rows}
    assert [step for step,_ in said] == [6, 12, 18]
    for phase,a in (('train', 'forward'), ('train', 'step'), ('valid', 'predict')):
        each = [v[f'fastbench/{phase}/{a}_ms'] for _,v in said]
        n = [5, 6, 6] if phase == 'train' else [1, 2, 2]
        assert sum(x*k for x,k in zip(each, n))/sum(n)/1e3 == pytest.approx(rows[phase, a]['mean'])
    assert all(math.isfinite(v) and v > 0 for _,o in said for v in o.values()) and said[0][1]['fastbench/memory/host_MiB'] > 10


# TensorBoard

def test_tensorboard(tmp_path):
    learn,said = learner(),[]
    tb = TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)
    fit(learn, 2, cbs=[LogPhases(), tb, LogPhases(lambda values, step: said.append((step, values)))])
    got = events(tmp_path)
    ours = {k: v for k,v in got.items() if k.startswith('fastbench/')}
    assert 'train_loss' in got and ours.keys() == said[0][1].keys() and [s for s,_ in ours['fastbench/train/step_ms']] == [6, 12]
    for k,v in ours.items():
        if 'memory' not in k: assert [x for _,x in v] == pytest.approx([o[k] for _,o in said], rel=1e-5)


def test_nothing_is_logged_of_what_is_no_epoch_of_a_fit(tmp_path):
    learn,said = learner(),[]
    log = LogPhases(lambda values, step: said.append(step))
    class Inside(Callback):
        order = 70
        def after_epoch(self):
            if not self.learn.lock.locked(): self.learn.validate()
    fit(learn, 1, cbs=[log, Inside()])
    assert said == [6]
    learn.add_cb(log)
    with learn.no_bar(), learn.no_logging():
        learn.validate()
        learn.get_preds()
        learn.lr_find(num_it=3, show_plot=False)
    assert len(said) <= 2  # the search for a learning rate is a fit of one epoch
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)])
    assert said[-1] == 6


@pytest.mark.parametrize('end', [CancelFitException, KeyboardInterrupt, RuntimeError])
def test_a_fit_that_is_cut(tmp_path, end):
    learn = learner()
    class Cut(Callback):
        def after_batch(self):
            if self.training and self.epoch == 1 and self.iter == 3: raise end('cut')
    def run(): fit(learn, 2, cbs=[TensorBoardCallback(tmp_path, trace_model=False, log_preds=False), LogPhases(), Cut()])
    if end is CancelFitException: run()
    else: pytest.raises(end, run)
    fit(learn, 1, cbs=[TensorBoardCallback(tmp_path/'b', trace_model=False, log_preds=False), LogPhases()])
    assert len(events(tmp_path/'b')['fastbench/train/forward_ms']) == 1


def test_what_is_missing_is_said():
    with pytest.raises(UserError, match='no logger'): fit(learner(), cbs=LogPhases())
    with pytest.raises(UserError, match='learn.profile'): fit(synth_learner(), cbs=LogPhases(print))


# W&B

class WandbCallback(Callback):
    order = TensorBoardCallback.order
    _wandb_step = -1
    def after_batch(self): self._wandb_step += self.training


def test_wandb_by_a_stand_in(monkeypatch):
    logged,wandb = [],types.ModuleType('wandb')
    wandb.run,wandb.log = NS(step=0),lambda values, step: logged.append((step, values))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    fit(learner(), 2, cbs=[WandbCallback(), LogPhases()])
    assert [s for s,_ in logged] == [5, 11] and logged[1][1]['fastbench/train/backward_ms'] > 0
    wandb.run = None
    fit(learner(), 1, cbs=[WandbCallback(), LogPhases()])
    assert len(logged) == 2


def test_wandb_itself(monkeypatch, tmp_path):
    monkeypatch.setenv('WANDB_SILENT', 'true')
    wandb = pytest.importorskip('wandb', reason='W&B is not installed: its own files were not looked at')
    import fastai.callback.wandb as theirs
    # today's fastcore breaks how fastai 2.8.12 describes a Learner to W&B ("vars() argument must have __dict__ attribute"), whatever else is on it
    monkeypatch.setattr(theirs, '_format_config', lambda config: {})
    run = wandb.init(mode='offline', dir=tmp_path, project='fastbench')
    try:
        fit(learner(), 2, cbs=[theirs.WandbCallback(log_preds=False), LogPhases()])
        assert run.summary['fastbench/train/forward_ms'] > 0 and run.summary['train_loss'] > 0
        fit(learner(), 1, cbs=LogPhases(lambda values, step: run.log({f'own/{k}': v for k,v in values.items()})))
        assert run.summary['own/fastbench/train/forward_ms'] > 0
    finally: run.finish()


# Energy

class Meter:
    "A processor of 10 J an epoch"
    def __init__(self, found=lambda n: NS(gpu_energy={}, cpu_energy={0: 10.*n}, dram_energy={0: 1.})): self.found,self.n,self.open = found,0,[]
    def begin_window(self, key):
        assert key not in self.open
        self.open.append(key)
    def end_window(self, key, cancel=False):
        self.open.remove(key)
        self.n += 1
        return self.found(self.n)


def test_energy_of_each_epoch():
    meter,learn,e = Meter(),learner(),None
    e = Energy(lambda device: meter)
    class Inside(Callback):
        def after_epoch(self):
            if not self.learn.lock.locked(): self.learn.validate()
    fit(learn, 2, cbs=[e, Inside()])
    assert e.history == [dict(cpu=10., dram=1.), dict(cpu=20., dram=1.)] and not meter.open and e.why == ''
    assert learn.profiler.profile.facts['energy'] == dict(epochs=e.history) and notes(learn.profiler.profile)[-1] == 'energy: 16 J an epoch (cpu, dram)'
    fit(synth_learner(), 1, cbs=Energy(lambda device: Meter()))  # without a profiler


@pytest.mark.parametrize('end', [CancelFitException, KeyboardInterrupt, RuntimeError])
def test_a_window_is_closed_however_the_fit_ends(end):
    meter,learn = Meter(),learner()
    e = Energy(lambda device: meter)
    class Cut(Callback):
        def after_batch(self):
            if self.training and self.epoch == 1: raise end('cut')
    def run(): fit(learn, 2, cbs=[e, Cut()])
    if end is CancelFitException: run()
    else: pytest.raises(end, run)
    assert not meter.open and len(e.history) in (1, 2)
    fit(learn, 1, cbs=e)
    assert len(e.history) == 1


@pytest.mark.parametrize('found', [NS(gpu_energy={}, cpu_energy=None, dram_energy=None), NS(gpu_energy={0: 0.}, cpu_energy={0: 0.}), NS(gpu_energy={}, soc_energy=None)])
def test_nothing_is_never_zero(found):
    assert joules(found) == {}
    learn,e = learner(),Energy(lambda device: Meter(lambda n: found))
    with pytest.warns(UserWarning, match='counters stand still'): fit(learn, 2, cbs=e)
    assert e.history == [] and 'stand still' in e.why and set(learn.profiler.profile.facts['energy']) == {'why'} and 'J an epoch' not in str(learn.profiler.table)


def test_parts():
    assert joules(NS(gpu_energy={0: 5., 1: 6.}, cpu_energy={0: 1.}, dram_energy={})) == dict(gpu=11., cpu=1.)
    apple = NS(cpu_total_mj=4000, efficiency_cores_mj=[1000, 1000], performance_core_manager_mj=500, gpu_mj=2000, dram_mj=None, ane_mj=0)
    assert joules(NS(gpu_energy={}, soc_energy=apple)) == dict(soc=6.) and joules(NS(gpu_energy={}, soc_energy=NS(total_energy_mj=9000., cpu_energy_mj=1000.))) == dict(soc=9.)


def zeus(monkeypatch, monitor):
    package,module = types.ModuleType('zeus'),types.ModuleType('zeus.monitor')
    module.ZeusMonitor = monitor
    monkeypatch.setitem(sys.modules, 'zeus', package)
    monkeypatch.setitem(sys.modules, 'zeus.monitor', module)


def test_why_it_cannot_be_measured(monkeypatch):
    cpu = torch.device('cpu')
    monkeypatch.setitem(sys.modules, 'zeus', None)
    with pytest.raises(UserError, match=r'fastbench\[energy\]'): zeus_monitor(cpu)
    zeus(monkeypatch, lambda gpu_indices: NS(gpu_indices=[], cpu_indices=[], soc=None))
    with pytest.raises(UserError, match='shows no counter.*intel-rapl'): zeus_monitor(cpu)
    def denied(gpu_indices): raise PermissionError('RAPL\nis for root')
    zeus(monkeypatch, denied)
    with pytest.raises(UserError, match='PermissionError: RAPL is for root') as e: zeus_monitor(cpu)
    assert '\n' not in str(e.value)
    asked = []
    zeus(monkeypatch, lambda gpu_indices: asked.append(gpu_indices) or NS(gpu_indices=gpu_indices, cpu_indices=[0]))
    zeus_monitor(cpu), zeus_monitor(torch.device('cuda', 1)), zeus_monitor(torch.device('cuda'))
    assert asked == [[], [1], [0]]
    learn = learner()
    zeus(monkeypatch, denied)
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter('always')
        fit(learn, 2, cbs=Energy())
    assert sum('no energy was measured' in str(o.message) for o in got) == 1 and 'no energy was measured' in notes(learn.profiler.profile)[-1]


def test_odd_facts_do_not_break_a_table():
    for odd in (3, [], dict(), dict(why='x')):
        p = Profile()
        p.facts['energy'] = odd
        notes(p)


def test_a_run_tells_its_energy(monkeypatch):
    from fastbench.bench.run import run_recipe
    monkeypatch.setattr('fastbench.measure.energy.zeus_monitor', lambda device: Meter())
    run = run_recipe('digits-xresnet18', epochs=1, batches=2, energy=True)
    assert run.profile['facts']['energy'] == dict(epochs=[dict(cpu=10., dram=1.)]) and 'energy' not in run_recipe('digits-xresnet18', epochs=1, batches=2).profile['facts']

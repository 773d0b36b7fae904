"""Every recipe and callback runs to its end on a pretended GPU, and nothing in a training step makes the host wait for it.

`python tests/test_waits.py` prints the table of waits in Markdown."""
import sys
import tempfile
import types
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation, GradientClip

sys.path.insert(0, str(Path(__file__).parent))  # as a script

import fastbench.all
import fastbench.callback.amp as amp
import fastbench.bench.run as run
from fastbench.callback.checkpointing import GradientCheckpointing
from fastbench.callback.ema import EMACallback
from fastbench.callback.cpu.keepmemory import KeepMemory
from fastbench.callback.limit import FirstBatches
from fastbench.measure.logger import LogPhases
from fastbench.callback.cpu.onednn import OneDNNLinear
from fastbench.callback.target import TimeToAccuracy
from fastbench.callback.tta import FlipTTA
from fastbench.bench.learner import bench_learner
from fastbench.errors import UserError
from fastbench.ladders import processes_of
from fastbench.recipe import recipes
from fastbench.text import recipes as text_recipes
from fastbench.train.resume import CheckpointEvery
from pretend import pretend
from test_text_data import make_tokenizer
from varlen import on_cpu

MASK = 'masking_utils.py'  # transformers asks whether a mask is all ones: `mask.all()`
SKIP = 2  # steps at the beginning that are not looked at


# What a fit did

class Steps(Callback):
    "What each step of training launched, and for what the host waited in it"
    order = FirstBatches.order-1
    def __init__(self, gpu): self._gpu, self.rows = gpu, dict(train=[], valid=[])
    def before_train(self): self._gpu.forget()
    def before_validate(self): self._gpu.forget()
    def after_batch(self):
        g = self._gpu
        self.rows['train' if self.training else 'valid'].append((list(g.waits), g.launches, list(g.races), list(g.copies), self.iter+1 < self.n_iter))
        g.forget()


@dataclass
class Waits:
    "Waits of the steps that count: all but the first two, in which buffers are made, and the last by the loader's count, at whose end an epoch is summed up"
    rows: list
    status: str = 'ok'
    error: str = ''
    precision: str = ''
    def __post_init__(self): self.steps = [o for o in self.rows[SKIP:] if o[-1]]
    @property
    def seen(self): return Counter((w.kind, w.place) for o in self.steps for w in o[0])
    @property
    def mean(self): return sum(len(o[0]) for o in self.steps)/len(self.steps)
    @property
    def launches(self): return sum(o[1] for o in self.steps)/len(self.steps)
    @property
    def races(self): return [r for o in self.rows for r in o[2]]
    @property
    def exposed(self): return [c for o in self.steps for c in o[3] if c.blocking or not c.pinned]


# Cases

@dataclass
class Case:
    name: str # Row of the table
    recipe: str # A recipe's name
    changes: dict = field(default_factory=dict) # Of its fields
    tune: object = None # Called with the Learner
    expect: int = 0 # Waits of a step
    allow: tuple = () # Parts of the places that may wait
    gpu: dict = field(default_factory=dict) # Of `pretend`


def mixed(mode): return lambda learn: getattr(learn, f'to_{mode}')()


def profiled(learn):
    learn.profile()
    return learn


def logged(learn):
    learn.profile()
    return learn.add_cb(LogPhases(log=lambda values, step: None))


def turned_once(learn):
    "Muon's matrices are multiplied often, and once is enough to see whether the host waits"
    learn.opt_func = partial(learn.opt_func, steps=1)
    return learn


def with_cb(*make): return lambda learn: learn.add_cbs([o() for o in make])


DIGITS = dict(sample=.2, bs=16, size=16, epochs=1, arch='xresnet18', batches=6)
TEXTS = dict(sample=.04, max_length=32, epochs=1, batches=8)
WORDS = dict(sample=.1, epochs=1, batches=6)
PHOTOS = dict(sample=.1, bs=16, size=16, epochs=1, target=None, batches=6)
SORTED = dict(expect=1, allow=(MASK,))


def digits(name, tune=None, changes=None, **kwargs): return Case(name, 'digits-xresnet18', DIGITS | (changes or {}), tune, **kwargs)
def texts(name, tune=None, changes=None, **kwargs): return Case(name, 'docstrings-distilbert', TEXTS | (changes or {}), tune, **kwargs)


CALLBACKS = [
    digits('fp32'), digits('fp32, stock optimizer', changes=dict(opt='adam')), digits('bf16', mixed('bf16')), digits('half-bf16', mixed('half')),
    digits('fp16', mixed('fp16'), expect=2, allow=('amp.py',)), digits('fp16, fused optimizer', mixed('fp16'), dict(opt='fused_adam')),
    digits('half-fp16', lambda learn: learn.to_half('fp16'), dict(bs=4, batches=5), expect=2, allow=('amp.py', 'half.py')),
    digits('fp32, fused AdamW', changes=dict(opt='fused_adamw')), digits('fp32, fused SGD', changes=dict(opt='fused_sgd')), digits('fp32, foreach Adam', changes=dict(opt='foreach_adam')),
    digits('Muon', turned_once, dict(opt='muon', lr=.01, batches=5)), digits('ranger', changes=dict(opt='ranger')),
    digits('channels-last', changes=dict(channels_last=True)), digits('channels-last, bf16', mixed('bf16'), dict(channels_last=True)),
    digits('EMA', with_cb(EMACallback)), digits('EMA, half-bf16', lambda learn: learn.to_half().add_cb(EMACallback())),
    digits('TTA', with_cb(FlipTTA)), digits('checkpointing', with_cb(GradientCheckpointing)), digits('profiler', profiled), digits('profiler, bf16', lambda learn: profiled(learn.to_bf16())),
    digits('loggers', logged), digits('target', with_cb(lambda: TimeToAccuracy(.99, tell=lambda o: None))),
    digits('checkpoints, none due', with_cb(lambda: CheckpointEvery(minutes=60, folder=tempfile.mkdtemp(), signals=(), tell=lambda o: None))),
    digits('accumulation', with_cb(lambda: GradientAccumulation(32))), digits('clipping', with_cb(GradientClip)),
    digits('flips and crops of a batch', changes=dict(min_scale=.5, flip=.5)), digits('two loader processes', changes=dict(workers=2)),
    texts('sorted', **SORTED), texts('sorted, profiler', profiled, **SORTED), texts('budget', changes=dict(loader='budget', max_tokens=128), **SORTED), texts('random', changes=dict(loader='random'), **SORTED),
    texts('packed', changes=dict(loader='packed', max_tokens=128)), texts('packed, profiler', profiled, dict(loader='packed', max_tokens=128)),
    texts('packed, fp16, fused optimizer', mixed('fp16'), dict(loader='packed', max_tokens=128, opt='fused_adam')),
    texts('packed, fp16, fused optimizer, sm_75', mixed('fp16'), dict(loader='packed', max_tokens=128, opt='fused_adam'), gpu=dict(capability=(7, 5))),
    Case('language model', 'docstrings-lstm', WORDS), Case('language model, fp16, fused optimizer', 'docstrings-lstm', WORDS | dict(opt='fused_adam'), mixed('fp16'))]


def recipe_case(name):
    "A recipe at its smallest"
    r = recipes()[name]
    kind = type(r).__name__
    if kind == 'Transformer':
        changes, kwargs = dict(TEXTS), dict(SORTED) if r.loader != 'packed' else {}
        if r.loader == 'packed': changes |= dict(max_tokens=128)
        if r.best: changes |= dict(target=None)
    elif kind == 'LanguageModel': changes, kwargs = dict(WORDS), {}
    else: changes, kwargs = dict(DIGITS if r.data == 'digits' else PHOTOS), {}
    changes.pop('arch', None)
    if r.compile: changes['compile'] = False  # cannot be pretended
    if kind == 'Small' and r.augment in ('items', 'once', 'bulk'): changes['workers'] = 0  # many short-lived processes take longer than what they do
    if r.precision != 'fp32' and r.opt == 'adam':  # fastai's reads whether gradients are finite
        kwargs |= dict(expect=kwargs.get('expect', 0)+2, allow=(*kwargs.get('allow', ()), 'amp.py'))
    return Case(name, name, changes, **kwargs)


NAMES = [o for o in recipes() if o.startswith(('digits', 'photos', 'docstrings', 'dawn-photos', 'faster-docstrings')) and processes_of(o)[0] == 1]
RECIPES = [recipe_case(o) for o in NAMES] + [
    Case(f'{kind.lower()} {arch}', 'digits-xresnet18', DIGITS | dict(kind=kind, arch=arch, size=32)) for kind, arch in (('Torchvision', 'resnet18'), ('Timm', 'test_resnet'))]


# Running them

@cache
def tokenizer(): return make_tokenizer()


class Still(types.SimpleNamespace):
    "The module `time` for `run`, which looks at the last loss five times a second of a clock that stands"
    def __init__(self): super().__init__(monotonic=lambda: 0., perf_counter=lambda: 0.)


def set_up(monkeypatch):
    "What costs time and is beside the point: a trained tokenizer, the measurement of a peak"
    monkeypatch.setattr(text_recipes, 'source_tokenizer', lambda *args: tokenizer())
    monkeypatch.setattr(run, 'time', Still())


def learner(case, gpu, device='cuda'):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn = bench_learner(case.recipe, device=device, offline=True, **case.changes)
    learn = case.tune(learn) if case.tune else learn
    return learn.add_cbs([Steps(gpu)] + ([FirstBatches(n)] if (n := case.changes.get('batches')) else []))


@contextmanager
def kernels(case, monkeypatch):
    "What packed batches need of a GPU: its attention, which asks for 16 bits where autocast makes them"
    if 'packed' not in (case.changes.get('loader'), getattr(recipes()[case.recipe], 'loader', None)):
        yield
        return
    @contextmanager
    def both(device_type, dtype=None):
        with torch.autocast(device_type, dtype=dtype), torch.autocast('cpu', dtype=dtype): yield
    with monkeypatch.context() as patch, on_cpu():
        patch.setattr(amp, 'autocast', both)
        yield


def fit(case, monkeypatch, device='cuda'):
    "Waits of a fit of the Learner"
    with pretend(**case.gpu) as gpu, kernels(case, monkeypatch):
        learn = learner(case, gpu, device)
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        return Waits(learn.steps.rows['train'], precision=learn.precision)


def run_to_end(case, monkeypatch):
    "Waits of a Run"
    with pretend(**case.gpu) as gpu, kernels(case, monkeypatch):
        steps = Steps(gpu)
        monkeypatch.setattr(run, 'bench_learner', lambda *args, **kwargs: bench_learner(*args, **kwargs).add_cb(steps))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            res = run.run_recipe(case.recipe, device='cuda', offline=True, **case.changes)
        return Waits(steps.rows['train'], res.status, f"{res.error}\n{res.traceback}", res.precision['effective'])


def check(case, got):
    assert got.status == 'ok', got.error
    assert len(got.steps) >= 2 and not got.races
    strange = {k: n for k, n in got.seen.items() if not any(o in k[1] for o in case.allow)}
    good = not strange and got.mean <= case.expect and not got.exposed
    assert good, (dict(got.seen), got.exposed[:1])


@pytest.mark.parametrize('case', CALLBACKS, ids=lambda o: o.name)
def test_waits_of_a_step(case, monkeypatch, one_thread):
    set_up(monkeypatch)
    check(case, fit(case, monkeypatch))


@pytest.mark.parametrize('case', RECIPES, ids=lambda o: o.name)
def test_recipes_run_to_their_end(case, monkeypatch, one_thread):
    set_up(monkeypatch)
    check(case, run_to_end(case, monkeypatch))


@pytest.mark.parametrize('case', [digits('EMA', lambda learn: profiled(learn).add_cb(EMACallback())), digits('fp16', lambda learn: profiled(learn.to_fp16())),
                                  texts('packed', profiled, dict(loader='packed', max_tokens=128))], ids=lambda o: o.name)
def test_on_the_second_device(case, monkeypatch, one_thread):
    "All is on cuda:1 while cuda:0 is the current one"
    set_up(monkeypatch)
    with pretend(devices=2) as gpu, kernels(case, monkeypatch):
        learn = learner(case, gpu, 'cuda:1')
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        used = {o.device for o in gpu.waits} | {o.stream.device for o in gpu.copies}
        assert gpu.current == 0 and not gpu.memory[0].peak and gpu.memory[1].peak and torch.device('cuda:0') not in used
        assert not any(r for o in learn.steps.rows['train'] for r in o[2])


@pytest.mark.parametrize('change', [dict(keep_memory=True), dict(onednn=True)])
def test_what_is_for_a_cpu_is_refused(gpu, change):
    with pytest.raises(UserError, match='no effect on cuda|CPU'): bench_learner('digits-xresnet18', device='cuda', offline=True, sample=.1, **change)


@pytest.mark.parametrize('cb', [KeepMemory, OneDNNLinear])
def test_callbacks_for_a_cpu_are_refused(gpu, cb):
    learn = bench_learner('digits-xresnet18', device='cuda', offline=True, sample=.1)
    with pytest.raises(UserError, match='no effect on cuda|CPU'), learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=cb())


def table(rows):
    "Rows of (case, `Waits`) as Markdown"
    yield '| case | precision | waits a step | operations | for what, and whose code |\n|---|---|---|---|---|'
    for case, got in rows:
        why = '; '.join(f'{n/len(got.steps):g} {kind} ({place.split(" < ")[0 if not place.startswith("-") else 1]})' for (kind, place), n in got.seen.most_common())
        yield f'| {case.name} | {got.precision} | {got.mean:g} | {got.launches:.0f} | {why} |'


def main():
    with pytest.MonkeyPatch.context() as patch:
        set_up(patch)
        torch.set_num_threads(1)
        rows = [(o, fit(o, patch)) for o in CALLBACKS] + [(o, run_to_end(o, patch)) for o in RECIPES]
    print(*table(rows), sep='\n')


if __name__ == '__main__': main()

"Loops that are not fastai's: what the profiler says of them, and what it leaves behind."
import copy
import gc
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from contextlib import suppress
from time import perf_counter

import pytest
import torch
from fastcore.basics import noop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastbench.errors import UserError
from fastbench.loops.lit import LightningProfiler, _same_variable
from fastbench.loops.plain import _model_facts, learner_run, profiling_steps
from fastbench.loops.steps import StepProfiler
from fastbench.loops.trainer import Drawn, TrainerProfiler, completed
from fastbench.measure.phases import values
from fastbench.measure.stopwatch import ManualClock

F = nn.functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.hook = nn.Linear(8, 3), noop

    def forward(self, x):
        self.hook()
        return self.lin(x)


def data(n=32): return TensorDataset(torch.randn(n, 8), torch.arange(n) % 3)


def parts(n=32, bs=4, **kwargs):
    torch.manual_seed(0)
    model = Net()
    return DataLoader(data(n), batch_size=bs, **kwargs), model, torch.optim.SGD(model.parameters(), lr=.01)


def clean(model, *opts):
    "Nothing of ours is left on them"
    for m in (model, *model.modules()):
        assert not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks and 'zero_grad' not in vars(m)
    for o in opts: assert not o._optimizer_step_pre_hooks and not o._optimizer_step_post_hooks and 'zero_grad' not in vars(o)


def value(prof, phase, action, column='calls'):
    return next((r[column] for r in prof.table.rows if (r['phase'], r['action']) == (phase, action)), None)


def totals(prof, phase='train'):
    return {r['action']: r['total'] for r in prof.table.rows if r['phase'] == phase and r['total'] and r['action'] != 'step'}


def adds_up(prof):
    for p in ('train', 'valid'):
        if value(prof, 'fit', p): assert sum(totals(prof, p).values()) == pytest.approx(value(prof, 'fit', p, 'total'), rel=.01)
    assert sum(sum(totals(prof, p).values()) for p in ('train', 'valid', 'between')) == pytest.approx(value(prof, 'fit', 'fit', 'total'), rel=.01)


def train(loader, model, opt, loss_func=F.cross_entropy):
    for xb, yb in loader:
        loss_func(model(xb), yb).backward()
        opt.step()
        opt.zero_grad()


def test_a_plain_loop():
    dl, model, opt = parts()
    with profiling_steps(dl, model, opt) as prof:
        for _ in range(2):
            train(prof.batches, model, opt)
            with torch.no_grad():
                for xb, yb in prof.valid(dl): F.cross_entropy(model(xb), yb)
    clean(model, opt)
    assert (value(prof, 'train', 'step'), value(prof, 'valid', 'step'), value(prof, 'fit', 'epoch')) == (16, 16, 2)
    for o in 'draw forward loss backward opt_step zero_grad'.split(): assert value(prof, 'train', o) == 16, o
    assert value(prof, 'valid', 'predict') == 16 and value(prof, 'valid', 'backward') is None
    assert values(prof.profile.steps['train'], 'samples') == [4.]*16
    adds_up(prof)
    assert prof.verdict and 'forward' in str(prof) and len(prof.results) == len(prof.table.rows)


def test_it_trains_as_without():
    weights = []
    for profiled in (False, True):
        dl, model, opt = parts()
        with profiling_steps(dl, model, opt) as prof: train(prof.batches if profiled else dl, model, opt)
        weights.append(model.lin.weight.detach().clone())
    assert torch.equal(*weights)


# --- attribution, on a clock that only our sleeps move

ROWS = {'dataset': 'draw', 'collate': 'draw', 'copy': 'to_device', 'forward': 'forward', 'loss': 'loss', 'backward': 'backward', 'clip': 'callbacks',
        'optimizer': 'opt_step', 'zero_grad': 'zero_grad', 'scheduler': 'callbacks'}


class Loss(nn.Module):
    f = staticmethod(noop)
    def forward(self, pred, y):
        self.f()
        return F.cross_entropy(pred, y)


def needs_lightning():
    "Looked for without importing it, which would set a variable that other tests look at"
    if find_spec('lightning') is None: pytest.skip('lightning is not installed: it is the extra `lightning`')


def planted(at, draw):
    "A collate function and an optimizer class that call what `at` returns for a place"
    def collate(b):
        at(draw)(0)
        return torch.utils.data.default_collate(b)
    class Planted(torch.optim.SGD):
        def step(self, closure=None):
            at('optimizer')(0)
            return super().step(closure)
        def zero_grad(self, set_to_none=True):
            at('zero_grad')(0)
            super().zero_grad(set_to_none)
    return collate, Planted


@pytest.mark.parametrize('given', ['nothing', 'module', 'function'])
@pytest.mark.parametrize('where', ROWS)
def test_a_sleep_lands_in_its_row_alone(where, given):
    clock = ManualClock()
    def sleep(*a): clock.sleep(1)
    def at(name): return sleep if where == name else noop
    class Sleepy(torch.utils.data.Dataset):
        def __len__(self): return 32
        def __getitem__(self, i):
            if where == 'dataset': clock.sleep(.25)
            return torch.randn(8), i % 3
    collate, Slow = planted(at, 'collate')
    model, loss = Net(), Loss()
    opt, dl = Slow(model.parameters(), lr=.1), DataLoader(Sleepy(), batch_size=4, collate_fn=collate)
    model.hook, loss.f = lambda: at('forward')(0), lambda: at('loss')(0)
    if where == 'backward': model.lin.weight.register_hook(lambda g: sleep() or g)
    loss_func = loss if given != 'function' else lambda p, y: loss(p, y)
    prof = profiling_steps(dl, model, opt, None if given == 'nothing' else loss_func)
    prof.watch.clock = clock
    with prof:
        f = prof.loss_func if given == 'function' else loss_func
        for xb, yb in prof.batches:
            at('copy')(0)
            pred = model(xb)
            f(pred, yb).backward()
            at('clip')(0)
            opt.step()
            at('scheduler')(0)
            opt.zero_grad()
    assert totals(prof) == {ROWS[where]: 8.}
    assert value(prof, 'train', ROWS[where], 'mean') == 1 and value(prof, 'train', 'step') == 8


class SlowLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        return x.mean()

    @staticmethod
    def backward(ctx, g):
        ctx.f()
        return g.expand(4, 3)/12, None


@pytest.mark.parametrize('known', [False, True])
def test_the_losss_own_backward_is_backward_where_the_loss_is_known(known):
    dl, model, opt = parts()
    clock = ManualClock()
    def loss_func(p, y): return SlowLoss.apply(p, lambda: clock.sleep(1))
    prof = profiling_steps(dl, model, opt, loss_func if known else None)
    prof.watch.clock = clock
    with prof: train(prof.batches, model, opt, prof.loss_func or loss_func)
    assert totals(prof) == {'backward' if known else 'loss': 8.}


def test_zero_grad_between_the_batch_and_the_model_is_its_own_row():
    dl, model, opt = parts()
    clock = ManualClock()
    model.hook = lambda: clock.sleep(1)
    zero = type(opt).zero_grad
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = clock
    with prof:
        for xb, yb in prof.batches:
            clock.sleep(2)
            opt.zero_grad()
            clock.sleep(4)
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
    assert totals(prof) == dict(to_device=48., forward=8.) and type(opt).zero_grad is zero


def test_a_closure():
    dl, model, _ = parts()
    opt, clock = torch.optim.LBFGS(model.parameters(), max_iter=2), ManualClock()
    model.hook = lambda: clock.sleep(1)
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = clock
    with prof:
        for xb, yb in prof.batches:
            def closure():
                opt.zero_grad()
                loss = F.cross_entropy(model(xb), yb)
                loss.backward()
                clock.sleep(2)
                return loss
            opt.step(closure)
    t = totals(prof)
    assert set(t) == {'forward', 'opt_step'} and t['opt_step'] == 2*t['forward'], t
    clean(model, opt)


def test_time_between_loops():
    dl, model, opt = parts()
    clock = ManualClock()
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = clock
    with prof:
        clock.sleep(1)
        for _ in range(2):
            train(prof.batches, model, opt)
            clock.sleep(2)
    assert totals(prof, 'between') == dict(callbacks=5.) and value(prof, 'fit', 'fit', 'total') == 5 and value(prof, 'fit', 'epoch', 'total') == 4


# --- kinds of loops

def test_gradient_accumulation():
    dl, model, opt = parts()
    with profiling_steps(dl, model, opt) as prof:
        for i, (xb, yb) in enumerate(prof.batches):
            F.cross_entropy(model(xb), yb).backward()
            if i % 4 == 3:
                opt.step()
                opt.zero_grad()
    assert (value(prof, 'train', 'step'), value(prof, 'train', 'backward'), value(prof, 'train', 'opt_step')) == (8, 8, 2)
    adds_up(prof)


def test_two_models_with_an_optimizer_each():
    dl, g, og = parts()
    d = nn.Linear(3, 1)
    od, clock = torch.optim.Adam(d.parameters()), ManualClock()
    g.hook = lambda: clock.sleep(1)
    d.weight.register_hook(lambda x: clock.sleep(2) or x)
    prof = profiling_steps(dl, [g, d], [og, od])
    prof.watch.clock = clock
    with prof:
        for xb, _ in prof.batches:
            fake = g(xb)
            od.zero_grad()
            d(fake.detach()).mean().backward()
            od.step()
            og.zero_grad()
            (-d(fake).mean()).backward()
            og.step()
    assert totals(prof) == dict(forward=8., backward=32.)
    clean(g, og)
    clean(d, od)


def test_two_loaders_in_one_step():
    dl, model, opt = parts()
    with profiling_steps(dl, model, opt) as prof:
        for (xa, ya), (xb, _) in zip(prof.batches, prof(dl)):
            F.cross_entropy(model(xa) + model(xb), ya).backward()
            opt.step()
    assert value(prof, 'train', 'step') == 8
    adds_up(prof)


def test_validation_in_the_middle_of_a_training_loop():
    dl, model, opt = parts()
    clock = ManualClock()
    model.hook = lambda: clock.sleep(1)
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = clock
    with prof:
        for i, (xb, yb) in enumerate(prof.batches):
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            if i == 3:
                with torch.no_grad():
                    for x, y in prof.valid(dl): model(x)
                clock.sleep(4)
    assert (value(prof, 'train', 'step'), value(prof, 'valid', 'step'), value(prof, 'fit', 'epoch')) == (8, 8, 1)
    assert totals(prof) == dict(forward=8., callbacks=4.) and totals(prof, 'valid') == dict(predict=8.)
    assert value(prof, 'train', 'step', 'mean') == 1, 'what comes after the validation is in no step'


@pytest.mark.parametrize('n', [2, 40])
def test_a_validation_iterator_that_stays_open(n):
    "One batch of it every three steps; the second of two is the last, and of forty some are never drawn"
    dl, model, opt = parts()
    clock = ManualClock()
    model.hook = lambda: clock.sleep(1)
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = clock
    with prof:
        held = iter(prof.valid(DataLoader(data(4*n), batch_size=4)))
        for i, (xb, yb) in enumerate(prof.batches):
            F.cross_entropy(model(xb), yb).backward()
            opt.step(), opt.zero_grad()
            if i % 3 != 2: continue
            with torch.no_grad(): model(next(held)[0])
            clock.sleep(4)
        clock.sleep(2)
    assert (value(prof, 'train', 'step'), value(prof, 'valid', 'step'), value(prof, 'fit', 'epoch')) == (8, 2, 1)
    assert totals(prof)['forward'] == 8 and totals(prof, 'valid')['predict'] == 2
    assert values(prof.profile.steps['train'], 'samples') == [4.]*8
    adds_up(prof)
    del held
    gc.collect()
    clean(model, opt)


def test_a_second_pass_inside_of_an_open_one_is_named():
    dl, model, opt = parts()
    prof = profiling_steps(dl, model, opt)
    with prof, pytest.warns(UserWarning, match='inside of another pass over the same loader') as got:
        held = iter(prof.batches)
        next(held)
        for _ in range(2): train(prof.batches, model, opt)
    assert len(got) == 1 and value(prof, 'train', 'step') == 1


@pytest.mark.parametrize('when', ['before', 'after'])
def test_leaving_a_loop_early(when):
    dl, model, opt = parts()
    with profiling_steps(dl, model, opt) as prof:
        for i, (xb, yb) in enumerate(prof.batches):
            if when == 'before' and i == 3: break
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            if when == 'after' and i == 2: break
        train(prof.batches, model, opt)
    assert value(prof, 'train', 'step') == 3 + 8 and value(prof, 'fit', 'train') == 2
    adds_up(prof)


@pytest.mark.filterwarnings('ignore')
def test_workers_that_persist():
    dl, model, opt = parts(num_workers=1, persistent_workers=True)
    with profiling_steps(dl, model, opt) as prof:
        for _ in range(2): train(prof.batches, model, opt)
    assert value(prof, 'train', 'step') == 16 and value(prof, 'train', 'start') == 2
    adds_up(prof)


def test_autocast_is_seen():
    dl, model, opt = parts()
    with profiling_steps(dl, model, opt) as prof:
        for xb, yb in prof.batches:
            with torch.autocast('cpu', torch.bfloat16): loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
    assert prof.autocast == torch.bfloat16 and value(prof, 'train', 'backward') == 8


def test_a_gradient_scaler_and_a_step_that_it_skips():
    dl, model, opt = parts()
    scaler, clock = torch.amp.GradScaler('cpu', init_scale=4.), ManualClock()
    inner = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda *a: clock.sleep(1) or inner(*a)
    prof = profiling_steps(dl, model, opt, scaler=scaler)
    prof.watch.clock = clock
    with prof:
        for i, (xb, yb) in enumerate(prof.batches):
            scaler.scale(F.cross_entropy(model(xb), yb)*(torch.inf if i == 2 else 1)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert totals(prof) == dict(opt_step=8.) and scaler.get_scale() == 2.
    assert not {'step', 'update', 'unscale_'} & set(vars(scaler))
    clean(model, opt)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('how', ['wrapped', 'in place', 'hidden'])
def test_compiled_models(how):
    dl, model, opt = parts()
    called = torch.compile(model, backend='eager') if how != 'in place' else model
    if how == 'in place': model.compile(backend='eager')
    with profiling_steps(dl, model if how == 'hidden' else called, opt) as prof: train(prof.batches, called, opt)
    for o in 'forward backward opt_step'.split(): assert value(prof, 'train', o) == 8, o
    assert value(prof, 'train', 'compile', 'total') > 0 and values(prof.profile.steps['train'], 'warmup')[0] == 1.
    clean(model, opt)
    assert not called._forward_hooks and 'Around' not in type(vars(model).get('_compiled_call_impl')).__name__
    torch._dynamo.reset()


def test_the_model_called_in_its_own_backward():
    dl, model, opt = parts()
    clock = ManualClock()
    model.hook = lambda: clock.sleep(1)
    model.lin.weight.register_hook(lambda g: clock.sleep(2) or g)
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = clock
    with prof:
        for xb, yb in prof.batches:
            F.cross_entropy(torch.utils.checkpoint.checkpoint(model, xb.requires_grad_(), use_reentrant=False), yb).backward()
            opt.step()
    assert totals(prof) == dict(forward=8., backward=24.)


def test_by_hand():
    dl, model, opt = parts()
    clock = ManualClock()
    prof = profiling_steps()
    prof.watch.clock = clock
    with prof:
        it = iter(dl)
        for _ in range(8):
            prof.step()
            xb, yb = prof.drawn(next(it))
            for i, o in enumerate('draw to_device forward loss backward opt_step zero_grad callbacks'.split()):
                prof.mark(o)
                clock.sleep(2**i)
    assert totals(prof) == {o: 8.*2**i for i, o in enumerate('draw to_device forward loss backward opt_step zero_grad callbacks'.split())}
    assert value(prof, 'train', 'step') == 8 and values(prof.profile.steps['train'], 'samples') == [4.]*8


def test_a_mark_that_is_none():
    with profiling_steps() as prof, pytest.raises(UserError, match="did you mean 'forward'"): prof.mark('forwards')


# --- nothing is left behind

@pytest.mark.parametrize('exc', [KeyboardInterrupt, ZeroDivisionError], ids=lambda o: o.__name__)
@pytest.mark.parametrize('where', ['draw', 'forward', 'loss', 'backward', 'optimizer', 'zero_grad', 'body', 'valid', 'outside'])
def test_errors(where, exc):
    calls = []
    def fail(*a):
        calls.append(1)
        if len(calls) == 3: raise exc
    def at(name): return fail if where == name else noop
    collate, Fails = planted(at, 'draw')
    model, loss = Net(), Loss()
    loss.f, model.hook = lambda: at('loss')(0), lambda: at('forward')(0)
    if where == 'backward': model.lin.weight.register_hook(lambda g: fail())
    opt, dl = Fails(model.parameters(), lr=.1), DataLoader(data(), batch_size=4, collate_fn=collate)
    prof = profiling_steps(dl, model, opt, loss)
    with pytest.raises(exc), prof:
        for xb, yb in prof.batches:
            loss(model(xb), yb).backward()
            at('body')(0)
            opt.step()
            opt.zero_grad()
        for _ in prof.valid(dl): at('valid')(0)
        if where == 'outside': raise exc
    clean(model, opt)
    clean(loss)
    n = dict(valid=8, outside=8, zero_grad=3).get(where, 2)
    assert value(prof, 'train', 'step') == n, 'a step counts once the optimizer has stepped'
    assert value(prof, 'valid', 'step') == dict(valid=2, outside=8).get(where)
    adds_up(prof)
    assert 'ended by an error' in str(prof) and not prof.watch.running
    calls[:] = [0]*9
    with prof: train(prof.batches, model, opt, loss)
    assert value(prof, 'train', 'step') == n + 8


def test_an_error_in_a_loop_whose_iterator_lives_on():
    dl, model, opt = parts()
    calls, clock = [], ManualClock()
    def hook():
        calls.append(1)
        clock.sleep(1)
        if len(calls) == 3: raise ZeroDivisionError
    model.hook = hook
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = clock
    with pytest.raises(ZeroDivisionError), prof:
        it = iter(prof.batches)
        train(it, model, opt)
    assert value(prof, 'fit', 'train', 'total') == 3. and totals(prof) == dict(forward=3.)
    clock.sleep(5)
    del it
    gc.collect()
    assert totals(prof) == dict(forward=3.) and not totals(prof, 'between') and value(prof, 'fit', 'fit', 'total') == 3.


def test_a_block_that_cannot_begin_leaves_nothing():
    dl, model, opt = parts()
    with pytest.raises(UserError, match='not an optimizer'):
        with profiling_steps(dl, model, [opt, 3]): pass
    clean(model, opt)
    with pytest.raises(UserError, match='not a model'):
        with profiling_steps(dl, [model, 3], opt): pass
    clean(model, opt)


def test_an_error_that_the_loop_catches():
    dl, model, opt = parts()
    calls = []
    def hook():
        calls.append(1)
        if len(calls) == 3: raise ZeroDivisionError
    model.hook = hook
    with profiling_steps(dl, model, opt) as prof:
        for xb, yb in prof.batches:
            with suppress(ZeroDivisionError):
                F.cross_entropy(model(xb), yb).backward()
                opt.step()
    assert value(prof, 'train', 'step') == 8 and value(prof, 'train', 'forward') == 8 and value(prof, 'train', 'backward') == 7
    adds_up(prof)


def test_copies_have_no_hooks():
    dl, model, opt = parts()
    with profiling_steps(dl, model, opt) as prof:
        train(prof.batches, model, opt)
        copied, read = copy.deepcopy(model), pickle.loads(pickle.dumps(Plain(model)))
        before = len(prof.watch.taped)
        copied(torch.randn(1, 8))
        read.model(torch.randn(1, 8))
        assert len(prof.watch.taped) == before
        torch.optim.lr_scheduler.StepLR(opt, 1)
        opt.zero_grad()
    clean(model, opt)


class Plain:
    def __init__(self, model):
        self.model = copy.copy(model)
        self.model.hook = noop


def test_a_scheduler_made_in_the_block_goes_on():
    dl, model, opt = parts()
    with profiling_steps(dl, model, opt) as prof:
        sched = torch.optim.lr_scheduler.StepLR(opt, 1)
        for xb, yb in prof.batches:
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            sched.step()
    assert value(prof, 'train', 'opt_step') == 8 and opt.param_groups[0]['lr'] < .01


def test_loops_outside_of_the_block_are_told():
    dl, model, opt = parts()
    prof = StepProfiler(dl, model, opt)
    with pytest.raises(UserError, match='not running'): next(iter(prof.batches))
    with pytest.raises(UserError, match='not running'): prof.step()
    with profiling_steps() as other, pytest.raises(UserError, match='no loader'): other.batches


def test_batches_are_the_loader_to_whoever_asks():
    dl, model, opt = parts()
    b = StepProfiler(dl, model, opt).batches
    assert len(b) == 8 and b.batch_size == 4 and b.dataset is dl.dataset


# --- Runs

def test_a_run_is_saved_compared_and_reported(tmp_path):
    from fastbench.compare.runs import compare
    from fastbench.compare.sides import NotComparable
    from fastbench.page.report import report
    from fastbench.runs.store import load, save
    sides = {}
    for bs in (4, 4, 8):
        dl, model, opt = parts(bs=bs)
        with profiling_steps(dl, model, opt) as prof: train(prof.batches, model, opt)
        sides.setdefault(bs, []).append(prof.run('tiny', 'noise', lr=.01))
    a, b = sides[4]
    assert a.recipe | dict(kind='Loop', name='tiny', loop='pytorch', bs=4, precision='fp32', epochs=1, arch='Net', parameters=27, lr=.01, data='noise') == a.recipe
    assert a.status == 'ok' and a.data == dict(name='noise', n_train=32) and a.seconds > 0 and a.figures.rate > 0 and a.figures.samples == 32
    assert load(save(a, tmp_path)).as_dict() == a.as_dict()
    assert compare(a, b).rows
    with pytest.raises(NotComparable, match='bs'): compare(a, sides[8][0])
    assert 'tiny' in report(a, b).html


@pytest.mark.parametrize('exc', [None, KeyboardInterrupt(), RuntimeError('no more\nmemory')], ids=str)
def test_a_run_says_how_it_ended(exc):
    dl, model, opt = parts()
    prof = profiling_steps(dl, model, opt)
    with suppress(BaseException), prof:
        train(prof.batches, model, opt)
        if exc: raise exc
    run = prof.run()
    assert (run.status, run.error) == {type(None): ('ok', None), KeyboardInterrupt: ('interrupted', None)}.get(type(exc), ('failed', 'RuntimeError: no more'))


def test_no_run_before_there_is_one():
    with pytest.raises(UserError, match='nothing was measured'): profiling_steps().run()
    with profiling_steps() as prof, pytest.raises(UserError, match='still running'): prof.run()


def test_fastais_loop_beside_it():
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastbench.compare.runs import compare
    dl, model, opt = parts()
    learn = Learner(DataLoaders(dl, []), Net(), loss_func=F.cross_entropy)
    with pytest.raises(UserError, match='not profiled'): learner_run(learn)
    learn.profile()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    with profiling_steps(dl, model, opt) as prof: train(prof.batches, model, opt)
    a, b = learner_run(learn, 'tiny', 'noise'), prof.run('tiny', 'noise')
    assert compare(a, b, on='loop').rows
    assert {k: a.recipe[k] for k in ('bs', 'precision', 'arch', 'parameters', 'epochs')} == {k: b.recipe[k] for k in ('bs', 'precision', 'arch', 'parameters', 'epochs')}


# --- Hugging Face's Trainer, Lightning, Accelerate: the same work, the same rows

CLOCK, SLEEPS = ManualClock(), {}


def sleeps(name):
    if name in SLEEPS: CLOCK.sleep(SLEEPS[name])


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 3)

    def forward(self, x):
        sleeps('forward')
        return self.lin(x)


class WithLoss(nn.Module):
    "A model that gives its loss, as transformers' do"
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, labels):
        logits = self.inner(x)
        return dict(loss=F.cross_entropy(logits, labels), logits=logits)

    def zero_grad(self, set_to_none=True):  # Trainer's way
        sleeps('zero_grad')
        super().zero_grad(set_to_none)


class Rows(torch.utils.data.Dataset):
    def __init__(self, n=32): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return dict(x=torch.full((8,), i/self.n), labels=torch.tensor(i % 3))


def collate(rows):
    sleeps('collate')
    return torch.utils.data.default_collate(rows)


class Opt(torch.optim.SGD):
    def step(self, closure=None):
        loss = closure and closure()
        sleeps('optimizer')
        super().step()
        return loss

    def zero_grad(self, set_to_none=True):
        sleeps('zero_grad')
        super().zero_grad(set_to_none)


@pytest.fixture
def slow(request):
    SLEEPS.update({request.param: 1.})
    yield request.param
    SLEEPS.clear()


def slow_backward(model): model.lin.weight.register_hook(lambda g: sleeps('backward') or g)


def trainer(tmp_path, **kwargs):
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate')
    model = WithLoss()
    slow_backward(model.inner)
    args = dict(per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=1, report_to='none', use_cpu=True, disable_tqdm=True,
                save_strategy='no', logging_strategy='no') | kwargs
    opt = Opt(model.parameters(), lr=.1)
    return transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), **args), train_dataset=Rows(), eval_dataset=Rows(16), data_collator=collate,
                                optimizers=(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1.)))


def by_trainer(tmp_path, **kwargs):
    prof = TrainerProfiler()
    prof.watch.clock = CLOCK
    t = trainer(tmp_path, **kwargs)
    t.add_callback(prof)
    t.train()
    clean(t.model, t.optimizer.optimizer)
    assert not prof.watch.running and not isinstance(vars(prof.loader)['base_dataloader'], Drawn) and type(prof.loader.base_dataloader) is DataLoader
    return prof


def test_nothing_is_measured_before_a_training_begins():
    prof = TrainerProfiler()
    for f in (prof.on_step_begin, prof.on_step_end, prof.on_epoch_end): f(None, None, None)
    assert not prof.watch.running


def lightning(**kwargs):
    needs_lightning()
    with _same_variable(): import lightning.pytorch as pl
    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Inner()
            slow_backward(self.net)
        def forward(self, x): return self.net(x)
        def training_step(self, b, i): return F.cross_entropy(self(b['x']), b['labels'])
        def validation_step(self, b, i): self.training_step(b, i)
        def configure_optimizers(self): return Opt(self.parameters(), lr=.1)
    dl = DataLoader(Rows(), 4, collate_fn=collate)
    quiet = dict(max_epochs=1, accelerator='cpu', logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
    return pl.Trainer(**quiet | kwargs), Lit(), dl


def by_lightning(tmp_path, **kwargs):
    needs_lightning()
    prof = LightningProfiler()
    prof.watch.clock = CLOCK
    t, module, dl = lightning(callbacks=[prof], **kwargs)
    before = t.profiler
    t.fit(module, dl, dl)
    clean(module, *t.optimizers)
    assert t.profiler is before and not prof.watch.running
    return prof


def by_accelerate(tmp_path):
    accelerate = pytest.importorskip('accelerate')
    model = Inner()
    slow_backward(model)
    acc = accelerate.Accelerator(cpu=True)
    model, opt, dl, valid = acc.prepare(model, Opt(model.parameters(), lr=.1), DataLoader(Rows(), 4, collate_fn=collate), DataLoader(Rows(), 4, collate_fn=collate))
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = CLOCK
    with prof:
        for b in prof.batches:
            acc.backward(F.cross_entropy(model(b['x']), b['labels']))
            opt.step()
            opt.zero_grad()
    clean(model, opt.optimizer)
    return prof


def by_fastai(tmp_path):
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper
    def as_tuple(rows):
        b = collate(rows)
        return b['x'], b['labels']
    model = Inner()
    slow_backward(model)
    learn = Learner(DataLoaders(DataLoader(Rows(), 4, collate_fn=as_tuple), []), model, loss_func=F.cross_entropy,
                    opt_func=lambda ps, lr=.1, **kw: OptimWrapper(ps, Opt, lr=lr))
    learn.profile()
    learn.profiler.watch.clock = CLOCK
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return learn.profiler


def by_hand(tmp_path):
    dl, model = DataLoader(Rows(), 4, collate_fn=collate), Inner()
    slow_backward(model)
    opt = Opt(model.parameters(), lr=.1)
    prof = profiling_steps(dl, model, opt)
    prof.watch.clock = CLOCK
    with prof:
        for b in prof.batches:
            F.cross_entropy(model(b['x']), b['labels']).backward()
            opt.step()
            opt.zero_grad()
    return prof


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('loop', [by_fastai, by_hand, by_accelerate, by_trainer, by_lightning])
@pytest.mark.parametrize('slow', ['collate', 'forward', 'backward', 'optimizer', 'zero_grad'], indirect=True)
def test_the_same_work_has_the_same_row_in_every_loop(loop, slow, tmp_path):
    prof = loop(tmp_path)
    row = dict(collate='draw', optimizer='opt_step').get(slow, slow)
    assert totals(prof) == {row: 8.} and len(prof.profile.steps['train']) == 8


@pytest.mark.filterwarnings('ignore')
def test_what_follows_a_prediction_has_one_row_in_all_batches(tmp_path, monkeypatch):
    "The first batch of a validation, whose call tells that there is one, is as the others"
    from transformers import Trainer
    predict = Trainer.prediction_step
    def slow(*args, **kwargs):
        res = predict(*args, **kwargs)
        CLOCK.sleep(1)
        return res
    monkeypatch.setattr(Trainer, 'prediction_step', slow)
    prof = by_trainer(tmp_path, num_train_epochs=1, eval_strategy='steps', eval_steps=4)
    assert totals(prof, 'valid') == dict(loss=8.) and value(prof, 'valid', 'loss') == 8


@pytest.mark.filterwarnings('ignore')
def test_trainer_counts_what_it_does(tmp_path):
    CLOCK.sleep(1)
    prof = by_trainer(tmp_path, num_train_epochs=2, eval_strategy='steps', eval_steps=4, logging_strategy='steps', logging_steps=3)
    assert (len(prof.profile.steps['train']), len(prof.profile.steps['valid'])) == (16, 4*4)
    assert values(prof.profile.steps['train'], 'samples') == [4.]*16 and values(prof.profile.steps['valid'], 'samples') == [4.]*16
    run = prof.run('rows')
    assert (run.recipe['loop'], run.recipe['bs'], run.recipe['epochs'], run.status) == ('trainer', 4, 2, 'ok')


@pytest.mark.filterwarnings('ignore')
def test_a_step_of_trainer_is_an_update(tmp_path):
    prof = by_trainer(tmp_path, gradient_accumulation_steps=4)
    assert values(prof.profile.steps['train'], 'samples') == [16.]*2


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('managed', [True, False])
def test_a_training_of_trainer_that_fails(tmp_path, managed):
    prof, t = TrainerProfiler(), trainer(tmp_path)
    t.add_callback(prof)
    calls = []
    def fail(g):
        calls.append(1)
        if len(calls) == 3: raise ZeroDivisionError
    t.model.inner.lin.weight.register_hook(fail)
    def go():
        if not managed: return t.train()
        with prof: t.train()
    with pytest.raises(ZeroDivisionError): go()
    if not managed: prof.close()
    clean(t.model, t.optimizer.optimizer)
    assert value(prof, 'train', 'step') == 2 and not prof.watch.running
    adds_up(prof)
    t.train()
    clean(t.model, t.optimizer.optimizer)
    assert value(prof, 'train', 'step') == 10


@pytest.mark.filterwarnings('ignore')
def test_trainer_trains_as_without(tmp_path):
    weights = []
    for profiled in (False, True):
        torch.manual_seed(0)
        t = trainer(tmp_path)
        if profiled: t.add_callback(TrainerProfiler())
        t.train()
        weights.append(t.model.inner.lin.weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('exc', [KeyboardInterrupt, ZeroDivisionError], ids=lambda o: o.__name__)
def test_a_fit_of_lightning_that_fails(exc):
    needs_lightning()
    prof = LightningProfiler()
    t, module, dl = lightning(callbacks=[prof])
    calls = []
    def fail(g):
        calls.append(1)
        if len(calls) == 3: raise exc
    module.net.lin.weight.register_hook(fail)
    before = t.profiler
    with suppress(BaseException): t.fit(module, dl, dl)
    clean(module, *t.optimizers)
    assert t.profiler is before and value(prof, 'train', 'step') == 2 and 'ended by an error' in str(prof)
    adds_up(prof)


@pytest.mark.filterwarnings('ignore')
def test_lightning_counts_what_it_does(tmp_path):
    prof = by_lightning(tmp_path, max_epochs=2, val_check_interval=4, accumulate_grad_batches=2)
    assert (len(prof.profile.steps['train']), len(prof.profile.steps['valid'])) == (16, 4*8)
    assert values(prof.profile.steps['train'], 'samples') == [4.]*16
    assert prof.run('rows').recipe['loop'] == 'lightning'


def test_an_optimizer_around_another_that_has_its_zero_grad():
    "As Lightning's and Fabric's: their class extends that of the optimizer, so the one within is never asked"
    class Outer(torch.optim.SGD):
        def __init__(self, within): self.__dict__, self.optimizer = dict(vars(within)), within
        def step(self): return self.optimizer.step()
    model = torch.nn.Linear(2, 1)
    opt = Outer(torch.optim.SGD(model.parameters(), lr=.1))
    with profiling_steps([torch.ones(4, 2)]*3, model, opt) as prof:
        for x in prof.batches:
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
    assert [value(prof, 'train', o) for o in ('zero_grad', 'opt_step')] == [3, 3]
    clean(model, opt)


class Casting(torch.nn.Sequential):
    "As Accelerate and Fabric have it: autocast is on inside of the model's call alone"
    def forward(self, x):
        with torch.autocast('cpu', torch.bfloat16): return super().forward(x).float()


@pytest.mark.parametrize('make, seen', [(torch.nn.Sequential, 'fp32'), (Casting, 'bf16')], ids=['plain', 'casting'])
def test_autocast_inside_of_the_model_is_seen(make, seen):
    model = make(torch.nn.Linear(2, 2), torch.nn.Dropout(0.), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    unused = model[3]
    model[3] = torch.nn.Identity()
    model[3].unused = unused
    with profiling_steps([torch.ones(4, 2)]*2, model) as prof:
        for x in prof.batches: model(x).sum().backward()
    assert prof.run('seen').precision['effective'] == seen
    clean(model)


def test_autocast_inside_of_the_model_by_accelerate():
    accelerate = pytest.importorskip('accelerate')
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)
    try:
        acc = accelerate.Accelerator(mixed_precision='bf16', cpu=True)
        model = acc.prepare(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        with profiling_steps([torch.ones(4, 2)]*2, model) as prof:
            for x in prof.batches: acc.backward(model(x).sum())
    finally: AcceleratorState._reset_state(True)
    assert prof.run('seen').precision['effective'] == 'bf16'


def test_who_is_trained_inside_of_what_distributes_it():
    class Parallel(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
    lin = torch.nn.Linear(2, 1)
    assert _model_facts(torch.nn.DataParallel(lin)) == _model_facts(lin) == dict(arch='Linear', parameters=3)
    assert _model_facts(Parallel(lin))['arch'] == 'Parallel', 'a model of the user that has a part of that name'


@pytest.mark.filterwarnings('ignore')
def test_lightning_optimized_by_hand():
    needs_lightning()
    prof = LightningProfiler()
    t, module, dl = lightning(callbacks=[prof])
    def step(b, batch_idx):
        opt = module.optimizers()
        opt.zero_grad()
        module.manual_backward(F.cross_entropy(module(b['x']), b['labels']))
        opt.step()
    module.automatic_optimization, module.training_step = False, step
    t.fit(module, dl)
    assert [value(prof, 'train', o) for o in ('zero_grad', 'opt_step', 'backward')] == [8]*3
    clean(module, *t.optimizers)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('make', [by_trainer, by_lightning, by_accelerate])
def test_real_times_add_up(tmp_path, make):
    prof = _on_a_real_clock(make, tmp_path)
    adds_up(prof)
    for o in 'forward backward opt_step'.split(): assert value(prof, 'train', o) == 8, o


def _on_a_real_clock(make, tmp_path):
    global CLOCK
    manual, CLOCK = CLOCK, perf_counter
    try: return make(tmp_path)
    finally: CLOCK = manual


def test_importing_all_of_this_imports_neither_of_them():
    code = ('import os, sys, fastbench.loops.plain, fastbench.loops.trainer, fastbench.loops.lit; '
            'print([o for o in ("transformers", "lightning", "accelerate") if o in sys.modules], "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ)')
    env = {k: v for k, v in os.environ.items() if k != 'PYTORCH_NVML_BASED_CUDA_CHECK'}  # another test may have imported DeepSpeed
    said = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, env=env)
    assert said.stdout.strip() == '[] False', said


@pytest.mark.parametrize('cls,module,extra', [('TrainerProfiler', 'transformers', 'trainer'), ('LightningProfiler', 'lightning.pytorch', 'lightning')])
def test_a_package_that_is_missing_is_told(cls, module, extra, monkeypatch):
    completed.cache_clear()
    for o in ('lightning', 'pytorch_lightning'): monkeypatch.delitem(sys.modules, o, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"pip install 'fastbench\[{extra}\]'"): globals()[cls]()
    completed.cache_clear()


def test_lightnings_variable_is_put_back():
    needs_lightning()
    code = 'import os; from fastbench.loops.lit import LightningProfiler; LightningProfiler(); print("PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ)'
    assert subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True).stdout.strip() == 'False'


def test_misspelt_arguments_are_no_facts_of_the_work():
    with pytest.raises(TypeError, match="unexpected keyword argument 'optimiser'"): profiling_steps(optimiser=None)
    with profiling_steps([torch.ones(2)]) as prof:
        for _ in prof.batches: pass
    for k, near in (('metric', 'metrics'), ('precison', 'precision'), ('nmae', None), ('lr', None)):
        if near is None: assert prof.run(**{k: 1}).recipe[k] == 1
        else:
            with pytest.raises(UserError, match=f"unknown argument '{k}'; did you mean '{near}'") as e: prof.run(**{k: 1})
            assert '\n' not in str(e.value)
    with pytest.raises(UserError, match="did you mean 'name'"): learner_run(None, names='x')


def test_what_is_no_scaler_and_no_device_is_named():
    model = torch.nn.Linear(2, 1)
    for kwargs, says in ((dict(scaler=3), 'int is no gradient scaler: give a torch.amp.GradScaler'), (dict(device='cuda:77'), "device='cuda:77' is not there"), (dict(device='gpu'), "device='gpu' is not there")):
        with pytest.raises(UserError, match=says) as e, profiling_steps([], model, torch.optim.SGD(model.parameters(), .1), **kwargs): pass
        assert '\n' not in str(e.value)

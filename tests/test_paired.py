"Two in one process: what the order does against a machine that drifts, what is counted, and by which rules it is judged."
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from fastbench.compare.paired import at_least, compare_pairs, step_seconds, time_pairs, time_rounds
from fastbench.compare.verdict import MIN_RUNS, compare_times
from fastbench.errors import UserError

ROOT = Path(__file__).parent.parent


class Machine:
    "A clock that work moves on, and who worked when"
    def __init__(self, drift=0.): self.now, self.drift, self.who = 0., drift, []
    def clock(self): return self.now
    def work(self, name, seconds):
        def f():
            self.now += seconds + self.drift*len(self.who)
            self.who.append(name)
        return f


def both(m, a=1., b=1.): return dict(a=m.work('a', a), b=m.work('b', b))


def test_there_and_back_a_steady_drift_is_the_same_for_both():
    m = Machine(.1)
    got = time_rounds(both(m, 1., 2.), n=20, clock=m.clock)
    assert all(y - x == pytest.approx(1.) for x, y in zip(got['a'], got['b']))
    rounds = [''.join(m.who[i:i+4]) for i in range(0, len(m.who), 4)]
    assert len(rounds) == 21 and set(rounds) == {'abba', 'baab'}
    m = Machine(.1)
    got = time_rounds(both(m), n=20, back=False, clock=m.clock)
    assert {round(abs(x - y), 6) for x, y in zip(got['a'], got['b'])} == {.1}


def test_a_seed_says_the_order():
    def order(seed):
        m = Machine()
        time_rounds(both(m), n=20, seed=seed, clock=m.clock)
        return m.who
    assert order(0) == order(0) == order(Random(0)) != order(1)


def test_warm_up_is_not_counted_and_a_budget_ends_it():
    m = Machine()
    slow_first = iter([100.]*4 + [1.]*400)
    def work(): m.now += next(slow_first)
    told = []
    got = time_rounds(dict(a=work, b=work), n=50, budget=30., clock=m.clock, tell=told.append)
    assert set(got['a'] + got['b']) == {1.} and len(got['a']) == 2 and told == [1, 2], 'the warm-up is part of the budget, two rounds are the least'
    m = Machine()
    assert len(time_rounds(both(m), n=50, warm=0, budget=30., clock=m.clock)['a']) == 7


def test_who_says_its_seconds_is_believed_and_other_values_are_not():
    m = Machine()
    def says(): m.work('a', 9.)(); return .5
    def returns(): m.work('b', 9.)(); return torch.ones(3)
    assert time_pairs(says, returns, n=2, clock=m.clock) == [(.5, 9.)]*2


def test_the_rules_are_those_of_runs():
    r = Random(0)
    pairs = [(r.gauss(2, .01), r.gauss(1, .01)) for _ in range(10)]
    v = compare_pairs(pairs)
    assert v == compare_times([x for x, _ in pairs], [y for _, y in pairs]) and v.verdict == 'faster'
    ratio, low, high = v.speedup
    assert low < ratio < high and ratio == pytest.approx(2, rel=.02) and (1/v.high, 1/v.low) == (low, high)
    assert compare_pairs(pairs[:MIN_RUNS-1]).verdict == 'unknown' and compare_pairs(pairs[:1]).speedup[1:] == (None, None)
    assert at_least(pairs, 1.9) is True and at_least(pairs, 2.1) is False and at_least(pairs, v.speedup[0]) is None and at_least(pairs[:MIN_RUNS-1], 1.) is None
    almost = [(x, x*1.001*(1 + .0001*i)) for i, (x, _) in enumerate(pairs)]
    assert compare_pairs(almost).verdict == 'same', 'what is below the threshold is no difference'


def learner(n=6):
    b = (torch.randn(4, 8), torch.randint(2, (4,)))
    return Learner(DataLoaders([b]*n, [b]), nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss())


def test_steps_of_a_learner(monkeypatch):
    learn, ticks = learner(), iter([0., 50., 51., 53., 56., 60.])
    monkeypatch.setattr('fastbench.compare.paired.perf_counter', lambda: next(ticks))
    before = [type(o) for o in learn.cbs]
    assert step_seconds(learn, 2) == 2.5 and next(ticks, None) is None, 'the median of 1, 2, 3, 4: a tick a training step, none of validation'
    assert [type(o) for o in learn.cbs] == before
    monkeypatch.undo()
    got = time_pairs(learner(), learner(), n=2)
    assert len(got) == 2 and all(x > 0 for p in got for x in p)


@pytest.mark.parametrize('n', [1, 2])
def test_an_epoch_of_too_few_steps_is_named(n):
    few = learner(n)
    with pytest.raises(UserError, match=f'an epoch has {n} steps, and the first 2 do not count'): step_seconds(few)


@pytest.mark.parametrize('args, said', [(['nothing', '--recipe', 'mlp', '--pairs', '5', '--steps', '3', '--bar', '1e-9'], 'reached, the interval lies above it'),
                                        (['fused', '--recipe', 'mlp', '--pairs', '2', '--steps', '3', '--bar', '1e9'], 'MISSED, the interval holds it')])
def test_gains_judges_as_the_library_does(args, said):
    got = subprocess.run([sys.executable, ROOT/'benchmarks'/'gains.py', *args], capture_output=True, text=True, cwd=ROOT)
    assert said in got.stdout and got.returncode == ('MISSED' in said), got.stderr[-2000:]
    if '2' in args: assert ': unknown ' in got.stdout

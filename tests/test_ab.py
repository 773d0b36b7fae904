"A against B: early looks that keep their promise, budgets, failures, other Pythons, the command"
import json
import os
import stat
import sys
import time
from math import exp
from pathlib import Path
from random import Random

import pytest

from fastbench.compare import ab as module
from fastbench import cli
from fastbench.compare.ab import AB, RunFailed, ab, ab_recipes, interpreter, last_level, launch_with, looks, start_ab
from fastbench.bench.launch import Interrupted
from fastbench.errors import UserError
from fastbench.measure.phases import Profile, to_dict
from fastbench.recipe import get_recipe
from fastbench.runs.record import Run
from fastbench.compare.runs import compare
from fastbench.compare.sides import NotComparable, load_side
from fastbench.runs.store import load, load_all, save
from fastbench.compare.verdict import compare_times

R = get_recipe('digits-xresnet18')


def made(recipe, seconds, repeat=0, **kwargs):
    data = dict(name=recipe.data)
    return Run(**dict(recipe=vars(recipe).copy(), seconds=seconds, seed=recipe.seed+repeat, data=data, environment=dict(host='here'), precision=dict(effective=recipe.precision)) | kwargs)


class Machine:
    "Runs that nobody trains: `slower` times as long, each with a spread, both with what a pair has in common"
    def __init__(self, seed=0, spread=.01, slower=(1., 1.), drift=.05, change=lambda i: {}):
        self.random,self.spread,self.slower,self.drift,self.change,self.made,self.now = Random(seed),spread,slower,drift,change,[],0.
    def __call__(self, k):
        def run(recipe, folder, tell=None, repeat=0, device=None, offline=False):
            seconds = self.slower[k]*exp(self.random.gauss(0, self.spread) + self.drift*repeat)
            self.made.append((k, repeat, recipe.batches))
            self.now += seconds
            return str(save(made(recipe, seconds, repeat, **self.change(len(self.made))), folder))
        return run
    def trial(self, folder, b=R, **kwargs): return AB(R, b, run=(self(0), self(1)), folder=folder, clock=lambda: self.now, **kwargs)


def finish(t):
    while not t.over: t.measure()
    return t.result()


def verdict(c): return c.verdicts['overall', 'fit'].verdict


# Statistics: the same code that decides, without the files

class Quick(AB):
    def __init__(self, r, shift=0., pairs=10, spread=.01):
        super().__init__(R, R, pairs=pairs)
        self.r,self.shift,self.spread = r,shift,spread
    def measure(self):
        for s,x in ((self.a, 0.), (self.b, self.shift)): s.append(exp(x + self.r.gauss(0, self.spread)))
    def result(self, level=None):
        v = compare_times(self.a, self.b, threshold=0., level=level or self.level or last_level(self.looked))
        return type('C', (), dict(verdicts={('overall', 'fit'): v}))
    def _keep_level(self): pass


@pytest.mark.parametrize('pairs', [10, 40])
def test_early_looks_do_not_find_what_is_not_there(pairs):
    differ = sum(verdict(finish(Quick(Random(f'{pairs}-{i}'), pairs=pairs))) in ('faster', 'slower') for i in range(400))
    assert differ <= 30  # 5% of 400 is 20; 31 and more has a chance of 1%


def test_looking_after_each_pair_at_5_percent_would():
    "The negative control"
    def peek(i):
        t = Quick(Random(f'peek{i}'), pairs=40)
        for n in range(40):
            t.measure()
            if n >= 4 and compare_times(t.a, t.b, threshold=0.).verdict in ('faster', 'slower'): return True
    assert sum(bool(peek(i)) for i in range(200)) > 30


def test_5_percent_at_1_percent_spread_is_found_in_ten_pairs():
    found = [verdict(finish(Quick(Random(f'five{i}'), shift=.04879, spread=.01))) for i in range(200)]
    assert found.count('slower') >= 190 and 'faster' not in found


def test_a_large_difference_ends_early(tmp_path):
    t = Machine(slower=(1., 1.3), spread=.005).trial(tmp_path, pairs=50)
    c = finish(t)
    assert len(t.a) < 10 and verdict(c) == 'slower' and c.level == .001 and 'the answer is clear' in str(c) and '99.9% interval' in str(c)


def test_a_gate_keeps_the_question_open(tmp_path):
    "A slowdown of 10% is clear long before it is clear that it is more than 5%"
    def trial(name, **kwargs): return Machine(3, slower=(1., 1.1), spread=.015).trial(tmp_path/name, pairs=40, **kwargs)
    early,asked = trial('early'),trial('asked', limit=.05)
    c,d = finish(early),finish(asked)
    assert 5 <= len(early.a) < len(asked.a) < 40 and verdict(c) == verdict(d) == 'slower'
    assert not c.slower_than(.05) and d.slower_than(.05) == [('overall', 'fit')] and d.level == .001


def test_the_gate_fires_as_often_as_without_early_looks(tmp_path):
    def fires(i, **kwargs): return bool(finish(Machine(i, slower=(1., 1.1), spread=.015).trial(tmp_path/f'{i}{kwargs}', pairs=10, **kwargs)).slower_than(.05))
    assert sum(fires(i, early=False) for i in range(20)) >= 19 and sum(fires(i, limit=.05) for i in range(20)) >= 18
    assert sum(fires(i) for i in range(20)) < 10  # what it was


class Phased(Machine):
    "Of the same speed as a whole, while drawing a batch, 3% of a step, takes a quarter longer in B"
    def __call__(self, k):
        def run(recipe, folder, tell=None, repeat=0, **kwargs):
            noise = lambda spread: exp(self.random.gauss(0, spread))
            draw,step = .03*(1, 1.25)[k]*noise(.05),noise(.001)
            p = Profile()
            for _ in range(12): p.steps['train'].add([dict(samples=16, step=step, draw=draw, forward=step-draw).get(c, 0.) for c in p.steps['train'].columns])
            p.fit['fit'].add([12*step])
            return str(save(made(recipe, 12*step, repeat, profile=to_dict(p)), folder))
        return run


def test_the_gate_sees_a_slower_phase_as_often_as_without_early_looks(tmp_path):
    "The whole is clearly the same after five pairs, where a phase would be judged at 0.1%"
    def fires(i, **kwargs): return finish(Phased(i).trial(tmp_path/f'{i}{kwargs}', pairs=12, **kwargs)).slower_than(.05) == [('train', 'draw')]
    every = sum(fires(i, early=False) for i in range(12))
    assert every >= 10 and sum(fires(i, limit=.05) for i in range(12)) >= every-2


class Cut(Machine):
    "B ends after a third of its epochs"
    def __init__(self, steps, **kwargs):
        super().__init__(spread=.005, **kwargs)
        self.steps = steps
    def __call__(self, k):
        def run(recipe, folder, tell=None, repeat=0, **kwargs):
            p,epochs = Profile(),(6, 2)[k]
            for i in range(epochs*self.steps):
                row = dict(samples=16, step=self.slower[k]*exp(self.random.gauss(0, self.spread)), warmup=float(self.steps == 1 or not i))
                p.steps['train'].add([row.get(c, 0.) for c in p.steps['train'].columns])
            for _ in range(epochs): p.fit['train'].add([1.])
            p.fit['fit'].add([epochs*self.steps])
            return str(save(made(recipe, epochs*self.steps*self.slower[k], repeat, profile=to_dict(p)), folder))
        return run


def test_a_side_that_ends_early_is_judged_by_its_samples(tmp_path):
    t = Cut(8, slower=(1., 1.3)).trial(tmp_path/'a', pairs=20)
    c = finish(t)
    assert c.verdicts['train', 'samples/s'].verdict == 'slower' and 'a sample 3' in c.title and t.why == 'the answer is clear' and len(t.a) < 20
    t = Cut(1).trial(tmp_path/'b', pairs=7)  # nothing but warm-up: no answer to wait for
    assert not finish(t).verdicts.get(('overall', 'fit')) and len(t.a) == 7


@pytest.mark.parametrize('slower,spread,level', [((1., 1.3), .005, .001), ((1., 1.), .2, .045)])
def test_its_runs_say_the_same_later(tmp_path, slower, spread, level):
    c = finish(Machine(slower=slower, spread=spread).trial(tmp_path))
    later = compare('ab:A', 'ab:B', folder=tmp_path)
    assert c.level == pytest.approx(level) == later.level and later.rows == c.rows and later.paired
    assert compare([load(o.path) for o in c.a[:3]], [load(o.path) for o in c.b[:3]]).level <= .05
    for o in (*c.a, *c.b): o.extra = {}
    assert compare(c.a, c.b).level == .05


def test_a_pair_that_lost_a_run_is_left_out_and_the_others_stay_pairs(tmp_path):
    "A failed one, which does not know all of its work, and one whose file is gone"
    m = Machine(slower=(1., 1.1), spread=.001, drift=.3, change=lambda i: dict(status='failed', data={}, precision={}, error='ouch') if i == 15 else {})
    t = m.trial(tmp_path, early=False)
    with pytest.raises(RunFailed): finish(t)
    c = compare('ab:A', 'ab:B', folder=tmp_path)
    assert c.paired and c.verdicts['overall', 'fit'].n == 7 and verdict(c) == 'slower' and 'failed; of a pair both' in str(c)
    Path(t.b[2].path).unlink()
    c = compare('ab:A', 'ab:B', folder=tmp_path)
    assert c.paired and c.verdicts['overall', 'fit'].n == 6 and verdict(c) == 'slower'


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path):
    finish(Machine().trial(tmp_path))
    (tmp_path/'digits-xresnet18-29991231T000000-00000000.json').write_text('{"schema": ')
    c = compare('ab:A', 'ab:B', folder=tmp_path)
    assert len(c.a) == len(c.b) == 10 and 'passed over: ' in str(c) and '29991231' in str(c)


def test_all_pairs_if_asked(tmp_path):
    t = Machine(slower=(1., 1.3), spread=.005).trial(tmp_path, pairs=12, early=False)
    c = finish(t)
    assert len(t.a) == 12 and t.looked == 0 and c.level == .05 and '95% interval' in str(c)


def test_the_last_look_has_what_is_left(tmp_path):
    c = finish(Machine(spread=.2).trial(tmp_path))
    assert c.level == pytest.approx(.045) and '95.5% interval' in str(c) and json.loads(c.to_json())['level'] == c.level


@pytest.mark.parametrize('pairs,n', [(1, 0), (5, 0), (6, 1), (10, 5)])
def test_looks(pairs, n): assert looks(pairs)[-1] == pairs and len(looks(pairs)) == n+1 and len(set(looks(pairs))) == n+1


# Pairs

def test_a_pair_has_one_seed_and_a_drawn_order(tmp_path):
    t = Machine().trial(tmp_path, early=False)
    c = finish(t)
    assert [o.seed for o in t.a] == [o.seed for o in t.b] == [R.seed+i for i in range(10)] and c.paired
    firsts = [o.extra['ab']['turn'] for o in map(lambda r: load(r.path), t.a)]
    assert [o.extra['ab']['pair'] for o in t.b] == list(range(10))
    assert all(x + y == 1 for x,y in zip(firsts[::2], firsts[1::2]))  # each side goes first as often


def test_the_order_is_reproducible(tmp_path):
    def order(seed):
        m = Machine()
        finish(m.trial(tmp_path/str(seed), seed=seed, early=False))
        return [k for k,*_ in m.made]
    assert order(1) == order(1) != order(2)


def test_warm_up_keeps_nothing(tmp_path):
    m = Machine()
    t = m.trial(tmp_path)
    t.warm_up()
    assert m.made == [(0, 0, 2), (1, 0, 2)] and not list(tmp_path.iterdir()) and not t.a


def test_a_refused_warm_up_is_no_end(tmp_path):
    def no(*a, **k): raise UserError('no')
    AB(R, R, run=(no, no), folder=tmp_path).warm_up()


def test_budget(tmp_path):
    t = Machine(spread=.001, drift=0.).trial(tmp_path, budget=9.)
    c = finish(t)
    assert len(t.a) == 4 and 'the budget of 9.00 s holds no other pair' in str(c) and verdict(c) == 'unknown'


def test_a_budget_for_less_than_a_pair_gives_one(tmp_path): assert len(finish(Machine().trial(tmp_path, budget=.1)).a) == 1


def test_what_cannot_be_compared_is_seen_after_one_pair(tmp_path):
    m = Machine(change=lambda i: dict(weights=f'of {i}'))
    with pytest.raises(NotComparable, match='weights of . / of .'): finish(m.trial(tmp_path))
    assert len(m.made) == 2


def test_a_failed_run_ends_it_and_is_named(tmp_path):
    m = Machine(change=lambda i: dict(status='failed', error='RuntimeError: out of memory') if i == 6 else {})
    t = m.trial(tmp_path)
    with pytest.raises(RunFailed, match=r'pair 3: the run of [AB] failed \(RuntimeError: out of memory\); its Run is kept as') as e: finish(t)
    assert load(e.value.path).status == 'failed' and len(t.a) == len(t.b) == 2 and len(load_all(tmp_path)[0]) == 6 and len(t.result().a) == 2


@pytest.mark.parametrize('kwargs,said', [(dict(), 'A and B are the same'), (dict(python=['a', 'b', 'c']), '3 Pythons'), (dict(python='nowhere'), 'no Python there'), (dict(bs=32, pairs=0), 'pairs=0'),
                                         (dict(b='docstrings-distilbert'), 'not comparable: data digits / docstrings'), (dict(nothing=1), 'nothing')])
def test_slips_are_found_before_anything_runs(tmp_path, monkeypatch, kwargs, said):
    monkeypatch.setattr(module, 'launch', lambda *a, **k: 1/0)
    with pytest.raises(UserError, match=said): ab('digits-xresnet18', folder=tmp_path, **kwargs)


@pytest.mark.parametrize('on', ['precison', 'versoins.torch', 'train.step'])
def test_a_field_that_nothing_has_is_found_before_anything_runs(monkeypatch, capsys, tmp_path, on):
    machine = Machine()
    assert fastbench(monkeypatch, machine, 'digits-xresnet18', '--set', 'bs=32', '--on', 'precision', '--on', on, '--out', tmp_path) == 2
    err = capsys.readouterr().err
    assert f"unknown field '{on}'" in err and err.count('\n') == 1 and not machine.made
    if on == 'precison': assert "did you mean 'precision'?" in err


@pytest.mark.parametrize('on', ['variables.NOBODY_SET_IT', 'data.versoin'])
def test_a_field_that_no_run_has_is_found_after_the_warm_up(monkeypatch, capsys, tmp_path, on):
    machine = Machine()
    assert fastbench(monkeypatch, machine, 'digits-xresnet18', '--set', 'bs=32', '--on', on, '--out', tmp_path) == 2
    assert f"unknown field '{on}'" in capsys.readouterr().err and len(machine.made) == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize('on', ['device', 'device.name', 'source', 'torch.threads', 'versions', 'data.version', 'world_size', 'weights', 'variables.OMP_NUM_THREADS'])
def test_a_field_that_a_run_may_have_is_not_refused(tmp_path, on): start_ab(R, None, dict(bs=32), None, (), [on], False, tmp_path, None, True)


def test_other_data_on_purpose():
    assert 'data' in ab_recipes('digits-xresnet18', 'docstrings-distilbert', anyway=True)[2]
    assert ab_recipes('digits-xresnet18', changes=dict(sample=.5))[2] == ['sample']  # what B is told to change is on purpose
    a,b,meant = ab_recipes('digits-xresnet18', both=dict(epochs=1), changes=dict(bs=32))
    assert (a.epochs, b.epochs, a.bs, b.bs, meant) == (1, 1, 64, 32, ['bs'])


# Other Pythons

def fake(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder/'python'
    path.write_text(f'#!{sys.executable}\n{text}')
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_who_is_named(tmp_path):
    assert interpreter(sys.executable) == (sys.executable, None)
    exe = fake(tmp_path/'env'/'bin', '')
    assert interpreter(tmp_path/'env') == (str(exe), None)
    (tmp_path/'tree'/'fastbench').mkdir(parents=True)
    (tmp_path/'tree'/'fastbench'/'__init__.py').touch()
    assert interpreter(tmp_path/'tree') == (sys.executable, str(tmp_path/'tree'))
    own = fake(tmp_path/'tree'/'.venv'/'bin', '')
    assert interpreter(tmp_path/'tree') == (str(own), str(tmp_path/'tree'))
    with pytest.raises(UserError, match='no Python there'): interpreter(tmp_path/'env'/'bin')


def test_only_words_pass_between(tmp_path):
    exe = fake(tmp_path, f"import json, sys; open({str(tmp_path/'said')!r}, 'w').write(json.dumps(sys.argv[3:])); print(json.dumps([dict(path='x.json')]))")
    recipe = get_recipe('digits-xresnet18', bs=32, precision='bf16')
    assert launch_with(exe, recipe, tmp_path/'runs', repeat=3, device='cpu', offline=True) == 'x.json'
    assert json.loads((tmp_path/'said').read_text()) == ['run', 'digits-xresnet18', '--json', '--offline', '--out', str(tmp_path/'runs'), '--seed', str(recipe.seed+3), '--device', 'cpu',
                                                         '--set', 'bs=32', '--set', "precision='bf16'"]


@pytest.mark.parametrize('text,said', [("import sys; print('fastbench: no recipe of that name', file=sys.stderr); sys.exit(2)", 'python: no recipe of that name'), ('raise SystemExit(7)', 'python: exit code 7'),
                                       ("print('[]')", 'exit code 0'), ('import nothing_like_it', 'ModuleNotFoundError')])
def test_a_python_that_cannot_is_named(tmp_path, text, said):
    with pytest.raises(UserError, match=said): launch_with(fake(tmp_path, text), R, tmp_path)


def test_a_signal_is_passed_on(tmp_path):
    exe = fake(tmp_path, "import json, os, signal, time\ndef end(*_):\n    print(json.dumps([dict(path='half.json')]), flush=True)\n    os._exit(0)\nsignal.signal(signal.SIGINT, end)\n"
                         "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)")
    with pytest.raises(Interrupted) as e: launch_with(exe, R, tmp_path)
    assert e.value.path == 'half.json'


def test_a_worktree_trains(tmp_path):
    "The package in another folder, as a git worktree would be, with a sign that it was the one"
    import shutil

    import fastbench
    tree = tmp_path/'a tree'
    shutil.copytree(Path(fastbench.__file__).parent, tree/'fastbench', ignore=shutil.ignore_patterns('__pycache__'))
    (tree/'fastbench'/'bench'/'run.py').open('a').write('\nfind_device_of = find_device\ndef find_device(d): Run.weights = "the other"; return find_device_of(d)\nimport fastbench.runs.record\n'
                                                '_save = Run.as_dict\nRun.as_dict = lambda self: _save(self) | dict(sign="the other")\n')
    path = launch_with(tree, get_recipe('digits-xresnet18', epochs=1, batches=2, sample=.1, workers=0), tmp_path/'runs', device='cpu')
    run = load(path)
    assert run.status == 'ok' and run.extra['sign'] == 'the other' and run.recipe['batches'] == 2


# The command

def fastbench(monkeypatch, machine, *args):
    monkeypatch.setattr(module, 'launch', None)
    start = module.start_ab
    def started(*a, **k):
        t = start(*a, **k)
        t.run,t.clock,t.start = (machine(0), machine(1)),lambda: machine.now,0.
        return t
    monkeypatch.setattr(module, 'start_ab', started)
    monkeypatch.setattr(module, 'partial', lambda *a, **k: None)
    monkeypatch.setattr(sys, 'argv', ['fastbench', 'ab', *map(str, args)])
    with pytest.raises(SystemExit) as e: cli.main()
    return e.value.code


def test_command(monkeypatch, capsys, tmp_path):
    code = fastbench(monkeypatch, Machine(slower=(1., 1.2)), 'digits-xresnet18', '--set', 'bs=32', '--out', tmp_path, '--json')
    out = json.loads(capsys.readouterr().out)
    row = out['rows'][0]
    assert code == 0 and row['verdict'] == 'slower' and {'ratio', 'low', 'high', 'detectable', 'level'} <= set(row) and out['meant'][0]['field'] == 'bs'


def test_the_last_line_is_ready_to_be_run(monkeypatch, capsys, tmp_path):
    "Both sides have one recipe: `ab:A` and `ab:B` tell those of the last trial apart"
    def at_another_moment(i): return time.sleep(.002) or {}  # an id knows the millisecond
    for slower in (1.3, 1.2): fastbench(monkeypatch, Machine(slower=(1., slower), change=at_another_moment), 'digits-xresnet18', '--set', 'bs=32', '--out', tmp_path)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f'fastbench report ab:B --against ab:A --on bs --out {tmp_path} -o report.html'
    monkeypatch.setattr(sys, 'argv', [*line.split()[:-1], str(tmp_path/'page.html')])
    with pytest.raises(SystemExit) as e: cli.main()
    assert not e.value.code and (tmp_path/'page.html').exists()
    a, b = (load_side(f'ab:{o}', tmp_path)[0] for o in 'AB')
    assert {o.recipe['bs'] for o in a} == {64} and {o.recipe['bs'] for o in b} == {32} and len(a) == len(b) and [o.extra['ab']['pair'] for o in a] == list(range(len(a)))
    assert len({o.extra['ab']['of'] for o in (*a, *b)}) == 1 and len(list(tmp_path.glob('*.json'))) > len(a) + len(b)
    with pytest.raises(UserError, match="holds no Run of side A of an `ab`"): load_side('ab:A', tmp_path/'none')


@pytest.mark.parametrize('slower,code', [(1.2, 1), (1.0, 0)])
def test_gate(monkeypatch, capsys, tmp_path, slower, code):
    assert fastbench(monkeypatch, Machine(slower=(1., slower)), 'digits-xresnet18', '--set', 'bs=32', '--out', tmp_path, '--fail-above', '5%') == code
    assert ('slower by more than 5%' in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize('args,code,said', [(['digits-xresnet18'], 2, 'are the same'), (['digits-xresnet18', 'docstrings-distilbert'], 3, 'data digits / docstrings'), (['digits-xresnet18', '--set', 'bs'], 2, '--set FIELD=VALUE'),
                                            (['digits-xresnet18', '--set', 'bs=32', '--budget', 'soon'], 2, 'write 90s, 10m or 1h'), (['no-such'], 2, 'no-such')])
def test_mistakes(monkeypatch, capsys, tmp_path, args, code, said):
    assert fastbench(monkeypatch, Machine(), *args, '--out', tmp_path) == code
    err = capsys.readouterr().err
    assert said in err and err.count('\n') == 1


def test_a_failed_run_shows_the_pairs_before_it(monkeypatch, capsys, tmp_path):
    machine = Machine(change=lambda i: dict(status='diverged') if i == 8 else {})  # the warm-up makes two
    assert fastbench(monkeypatch, machine, 'digits-xresnet18', '--set', 'bs=32', '--out', tmp_path) == 4
    got = capsys.readouterr()
    assert 'pair 3: the run of' in got.err and 'diverged' in got.err and '2 of 10 pairs' in got.out


def test_interrupted_shows_whole_pairs(monkeypatch, capsys, tmp_path):
    def change(i):
        if i == 8: raise Interrupted(15)
        return {}
    assert fastbench(monkeypatch, Machine(change=change), 'digits-xresnet18', '--set', 'bs=32', '--out', tmp_path) == 143
    got = capsys.readouterr()
    assert 'interrupted after 2 whole pairs; their Runs are kept in' in got.err and '2 of 10 pairs' in got.out

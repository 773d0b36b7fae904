"Runs of several processes beside those of one: who starts them, and what is said where they are set side by side"
from statistics import geometric_mean

import pytest

from fastbench.bench.processes import Starter
from fastbench.bench.slurm import Slurm
from fastbench.compare.ab import start_ab
from fastbench.compare.ladder import LadderTable
from fastbench.compare.runs import Compared
from fastbench.compare.scaling import ScalingTable, efficiency, scaling_starts
from fastbench.compare.sides import NotComparable
from fastbench.compare.suite import suite_table
from fastbench.errors import UserError
from fastbench.ladders import get_ladder
from fastbench.recipe import get_recipe
from fastbench.runs.record import Run


def made(world_size=None, strategy='', rate=100., repeat=0, bs=16, name='mine', **fields):
    "A Run that nobody trained"
    ranks = [dict(rank=i, host='a', step=bs/rate, samples_per_second=rate, memory=None, phases=dict(forward=.01)) for i in range(world_size or 1)]
    return Run(**dict(recipe=dict(name=name, bs=bs), seconds=10., repeat=repeat, seed=repeat, world_size=world_size, strategy=strategy, ranks=ranks, data=dict(name='digits', n_train=1000),
                      device=dict(kind='cpu', name='a processor'), environment=dict(host='here')) | fields)


# One seam

def test_who_starts_a_run(monkeypatch):
    launched = []
    monkeypatch.setattr('fastbench.bench.processes.launch_processes', lambda recipe, *args, **kwargs: launched.append((recipe.name, args, kwargs)))
    monkeypatch.setattr('fastbench.bench.launch.launch', lambda recipe, *args, **kwargs: launched.append((recipe.name, args, kwargs)))
    def of(name, **kwargs): return Starter(**kwargs).processes(get_recipe(name))
    assert of('digits-xresnet18') == of('faster-fused') == (1, '') and of('faster-ddp') == (4, 'ddp') and of('faster-docstrings-fsdp') == (2, 'fsdp')
    for name, strategy in (('digits-xresnet18', 'ddp'), ('faster-ddp', 'ddp'), ('faster-docstrings-fsdp', 'fsdp'), ('faster-zero2', 'zero2')):
        assert of(name, nproc=2) == (2, strategy)
        Starter(2, timeout=5.)(name, 'folder', repeat=1)
        assert launched.pop() == (name, (2, 'folder'), dict(strategy=strategy, timeout=5., place=None, repeat=1))
    Starter(timeout=5.)(get_recipe('faster-docstrings-fsdp'), 'folder')
    Starter()(get_recipe('digits-xresnet18'), 'folder')
    assert launched == [('faster-docstrings-fsdp', (2, 'folder'), dict(strategy='fsdp', timeout=5., place=None)), ('digits-xresnet18', ('folder',), {})]
    assert of('faster-zero2', nproc=2, strategy='fsdp') == (2, 'fsdp')
    assert of('digits-xresnet18', place=Slurm()) == (1, '') and of('digits-xresnet18', nproc=2, place=Slurm(nodes=3)) == (6, 'ddp')
    for args, says in (((None, 'fsdp'), 'say how many'), ((2, 'zeor'), "unknown strategy 'zeor'"), ((0,), 'nproc=0 cannot be')):
        with pytest.raises(UserError, match=says) as e: Starter(*args)
        assert '\n' not in str(e.value)


def test_both_sides_of_an_ab_are_started_in_the_same_way(tmp_path):
    trial = start_ab('digits-xresnet18', None, dict(bs=32), None, (), (), False, tmp_path, 'cpu', True, nproc=2, strategy='fsdp')
    assert [o.func.processes(r) for o, r in zip(trial.run, trial.recipes, strict=True)] == [(2, 'fsdp')]*2


def test_another_python_is_told_how_many(tmp_path, monkeypatch):
    import sys
    import fastbench.compare.ab as module
    seen = []
    monkeypatch.setattr(module, '_wait', lambda *a: (0, '[{"path": "x"}]', ''))
    monkeypatch.setattr(module.subprocess, 'Popen', lambda cmd, **k: seen.append(cmd))
    trial = start_ab('digits-xresnet18', None, None, None, (sys.executable,), (), False, tmp_path, 'cpu', True, nproc=2, strategy='fsdp')
    assert [o(trial.recipes[0], tmp_path) for o in trial.run] == ['x', 'x']
    for cmd in seen: assert ' '.join(cmd).count('--nproc 2 --strategy fsdp') == 1


# Never mixed in silence

@pytest.mark.parametrize('b, says', [(dict(world_size=2, strategy='ddp'), 'world_size 1 / 2; strategy none / ddp'), (dict(world_size=1, strategy='fsdp'), 'strategy none / fsdp')])
def test_a_comparison_names_other_processes(b, says):
    with pytest.raises(NotComparable, match=says): Compared([made()], [made(**b)])


def test_what_torchrun_tells_the_processes_is_no_other_difference():
    def env(n): return dict(host='here', variables=dict(WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n)))
    assert ScalingTable([made(environment=env(1)), made(2, 'ddp', environment=env(2))]).rows[1]['efficiency'] == 1


def test_on_purpose_it_says_whose_times_these_are():
    c = Compared([made()], [made(2, 'ddp')], on=('world_size', 'strategy'))
    assert any('those of the first process of each Run' in o for o in c.notes) and any('world_size 1 / 2' in o for o in c.notes)
    assert not any('first process' in o for o in Compared([made(2, 'ddp')], [made(2, 'ddp')]).notes)


def test_tables_of_recipes_name_other_processes():
    def runs(*each): return [made(n, 'ddp' if n else '', name=name) for n, name in zip(each, ('dawn-baseline', 'dawn-once'), strict=True)]
    mixed = 'NOT COMPARABLE: these Runs are of different numbers of processes: 1, 2 (ddp)'
    assert mixed in LadderTable(get_ladder('dawn'), runs(None, 2)).notes
    own = [made(n, 'ddp' if n else '', name='digits-xresnet18') for n in (None, 2)]
    assert mixed in suite_table('quick', own).notes and mixed in suite_table('fp16', [made(n, 'ddp' if n else '', name='cifar100-resnet18') for n in (None, 2)]).notes
    assert any(o.startswith('2 (ddp) processes that train together: times') for o in LadderTable(get_ladder('dawn'), runs(2, 2)).notes)
    assert not any('processes' in o for o in LadderTable(get_ladder('dawn'), runs(None, None)).notes)


def test_rungs_of_several_processes_are_on_purpose():
    rungs = [made(name='faster-docstrings-fused'), made(2, 'ddp', rate=80., name='faster-docstrings-ddp')]
    climb = LadderTable(get_ladder('faster-docstrings'), rungs)
    assert climb.rows[1]['processes'] == '2' and climb.rows[1]['gain'] == pytest.approx(1.6) and climb.rows[0]['processes'] is None
    assert 'processes that train together: 1, 2 (ddp); times are those of the first, samples/s those of all' in climb.notes and not any('NOT COMPARABLE' in o for o in climb.notes)
    rungs[1].world_size = 3
    assert any('NOT COMPARABLE' in o for o in LadderTable(get_ladder('faster-docstrings'), rungs).notes)


def test_a_rung_that_is_refused_leaves_the_others(monkeypatch, tmp_path):
    from fastbench.compare.ladder import ladder
    from fastbench.ladders import Rung
    from fastbench.runs.store import save
    def start(self, r, folder, repeat, **kw):
        if r.name.endswith('-ddp'): raise UserError('process 1 of this machine has no GPU')
        return str(save(made(name=r.name, repeat=repeat), folder))
    monkeypatch.setattr(Starter, '__call__', start)
    climb = ladder('faster-docstrings', tmp_path, ['fused', 'ddp', 'fsdp'], repeats=2)
    assert [(r['rung'], r['n']) for r in climb.rows] == [('fused', 2), ('fsdp', 2)] and 'ddp: not run: process 1 of this machine has no GPU' in climb.notes
    with pytest.raises(UserError, match='has no GPU'): ladder('faster-docstrings', tmp_path, ['ddp'])
    with pytest.raises(UserError, match='rung two is of several processes: make the ladder known'): ladder('digits-xresnet18', tmp_path, [Rung('two', '', {}, nproc=2)])


# Scaling

def several(rates, bs=lambda n: 16):
    "Three rounds of each: `rates` is processes -> samples a second of each process; the machine becomes slower"
    return [made(n, 'ddp' if n > 1 else '', rate=r*o, repeat=i, bs=bs(n)) for i, o in enumerate((1., .8, .9)) for n, r in rates.items()]


def test_efficiency_is_that_of_the_same_round():
    table = ScalingTable(several({1: 100., 2: 90., 4: 70.}))
    one, two, four = table.rows
    assert table.kind == 'weak' and one['efficiency'] is None and one['global_samples_per_second'] == pytest.approx(geometric_mean([100, 80, 90]))
    assert two['efficiency'] == pytest.approx(.9) and two['low'] == pytest.approx(.9) and two['high'] == pytest.approx(.9) and two['paired']
    assert four['speedup'] == pytest.approx(2.8) and four['global_samples_per_second'] == pytest.approx(4*.7*geometric_mean([100, 80, 90])) and four['device_samples_per_second'] == pytest.approx(.7*geometric_mean([100, 80, 90]))
    assert '4 processes train 2.80 times as fast as one' in str(table) and 'per-device samples/s' in str(table) and 'global samples/s' in str(table)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    from math import exp
    from random import Random
    rng, inside, n = Random(0), 0, 400
    for _ in range(n):
        drift = [rng.gauss(0, .2) for _ in range(5)]
        base, two = ([made(k, 'ddp' if k > 1 else '', rate=100*f*exp(d + rng.gauss(0, .03)), repeat=i) for i, d in enumerate(drift)] for k, f in ((1, 1.), (2, .9)))
        got = efficiency(base, two)
        inside += got['low'] <= .9 <= got['high']
    assert .92 <= inside/n <= .98


def test_one_round_has_no_interval_and_says_so():
    table = ScalingTable([made(), made(2, 'ddp', rate=90.)])
    assert table.rows[1]['low'] is None and any(o.startswith('one Run of each') for o in table.notes) and '95% interval' not in str(table)


def test_a_run_that_failed_spoils_the_pairs_and_is_named():
    runs = several({1: 100., 2: 90.})
    runs[-1].status = 'failed'
    table = ScalingTable(runs)
    assert table.rows[1]['n'] == 2 and not table.rows[1]['paired'] and {'2 processes: failed', 'Runs are not in pairs (Welch)'} <= {*table.notes}


def test_strong_scaling_divides_the_batch():
    table = ScalingTable(several({1: 100., 2: 80.}, bs=lambda n: 16//n))
    assert table.kind == 'strong' and table.title.startswith('strong scaling of mine: batch 16 divided among them') and [r['bs'] for r in table.rows] == [16, 8]
    with pytest.raises(UserError, match='does not come out even: --set bs=63, or --weak') as e: scaling_starts(get_recipe('digits-xresnet18', bs=64), [1, 3], strong=True)
    assert '\n' not in str(e.value)


def test_other_work_is_refused():
    with pytest.raises(NotComparable, match='neither weak nor strong'): ScalingTable([made(), made(2, 'ddp', bs=12)])
    with pytest.raises(NotComparable, match='data.n_train 1000 / 500'): ScalingTable([made(), made(2, 'ddp', data=dict(name='digits', n_train=500))])
    with pytest.raises(UserError, match='no Run'): ScalingTable([])


def test_without_one_process_nothing_is_claimed():
    table = ScalingTable([made(2, 'ddp')])
    assert table.rows[0]['efficiency'] is None and 'no Run of one process, so no efficiency' in table.notes and table.verdict is None
    with pytest.raises(UserError, match='nothing to draw'): table.plot()


def test_more_processes_than_cores_are_named():
    environment = dict(host='here', cores=dict(usable=2.), torch=dict(threads=1))
    notes = ScalingTable([made(environment=environment), made(4, 'ddp', environment=environment)]).notes
    assert any('4 processes on 2 cores take turns: their efficiency is at most 50%' in o for o in notes) and any('1 thread' in o for o in notes)


def test_all_that_is_started_has_as_many_threads():
    todo = scaling_starts(get_recipe('digits-xresnet18'), [4, 2]).values()
    assert [start.processes(r) for r, start in todo] == [(1, ''), (2, 'ddp'), (4, 'ddp')] and len({start.options['threads'] for _, start in todo}) == 1


def test_the_command(tmp_path, monkeypatch, capsys):
    import fastbench.command.terminal
    import fastbench.cli
    from fastbench.runs.store import save
    from typer.testing import CliRunner
    def start(r, nproc, folder, repeat, strategy, **kw): return str(save(made(nproc, strategy or '', rate=100 - 5*nproc + repeat, repeat=repeat, name=r.name), folder))
    monkeypatch.setattr('fastbench.bench.processes.launch_processes', start)
    def said(*words): return CliRunner().invoke(fastbench.command.terminal.app, ['scale', 'digits-xresnet18', '--nproc', '1,2', '--out', str(tmp_path), *words])
    got = said('--plot', str(tmp_path/'a.png'), '--repeats', '2')
    assert got.exit_code == 0 and 'weak scaling of digits-xresnet18' in got.stdout and (tmp_path/'a.png').stat().st_size > 5000
    import json
    rows = json.loads(said('--json').stdout)['rows']
    assert [r['processes'] for r in rows] == [1, 2] and rows[1]['n'] == 3 and rows[1]['low'] < rows[1]['efficiency'] < rows[1]['high']


def test_scaling_keeps_the_strategy_of_a_recipe():
    def at_two(name, **kwargs): return scaling_starts(get_recipe(name), [1, 2], **kwargs)[2][1].strategy
    assert [at_two(o) for o in ('digits-xresnet18', 'faster-docstrings-fsdp')] == ['ddp', 'fsdp']
    assert at_two('faster-docstrings-fsdp', strategy='ddp') == 'ddp'

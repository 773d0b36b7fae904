"Comparing Runs: what is refused, what the table says, what a gate lets through, what hostile texts become."
import csv
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
from statistics import geometric_mean

import pytest

from fastbench import cli
from fastbench.compare.runs import Compared, NotComparable, compare, differences, load_side, overall, run_values
from fastbench.compare.verdict import percent, roughly, signed
from fastbench.machine.download import DataUnavailable
from fastbench.measure.phases import Profile, to_dict
from fastbench.errors import UserError
from fastbench.recipe import Recipe
from fastbench.runs.record import Run
from fastbench.runs.store import save

ENV = dict(os='Debian', host='aaaa', cpu='EPYC', cores=dict(physical=2, usable=2), python='3.11.7', versions=dict(torch='2.15.0'), variables=dict(OMP_NUM_THREADS='1'),
           torch=dict(threads=1), git=dict(fastbench=dict(commit='c0ffee', dirty=False)))
PHASES = dict(forward=.03, backward=.06)


def make(i=0, side=0, scale=1., spread=.005, n=30, accuracy=.9, peak=5e8, status='ok', name='digits-xresnet18', phases=PHASES, env=ENV, data=(), precision='fp32', turns=True, **recipe):
    "A Run of made up steps; pair `i`, of which `side` is one"
    r,p = random.Random(f'{i}/{side}'),Profile()
    noise,columns = math.exp(r.gauss(0, spread)),p.steps['train'].columns
    for j in range(n):
        row = {k: v*noise*math.exp(r.gauss(0, .02)) for k,v in phases.items()}
        row['forward'] *= scale
        row |= dict(step=sum(row.values()), samples=64., warmup=float(j == 0))
        p.steps['train'].add([row.get(c, 0.) for c in columns])
    total = sum(p.steps['train']._column(p.steps['train'].fresh, 'step'))
    p.fit['fit'].add([total])
    p.peaks.append(dict(host=peak, host_exact=True))
    at = f'{i:02}{side}0' if turns else f'{side:02}{i:02}'
    return Run(recipe={**vars(Recipe(name)), **recipe, 'seed': 42+i, 'precision': precision}, id=f'{name}-20260101T00{at}-{side:04x}{i:04x}', seconds=total, profile=to_dict(p), seed=42+i, repeat=i, status=status,
               metrics=dict(accuracy=accuracy + r.gauss(0, .003)), weights=f'random, seed {42+i}', data=dict(name='digits', version='1', fingerprint='ab', n_train=1438) | dict(data),
               precision=dict(asked=precision, effective=precision), device=dict(kind='cpu', name='EPYC', memory=1), environment=env)


def side(which=0, n=10, steps=30, **kwargs): return [make(i, which, n=steps, **kwargs) for i in range(n)]


def row(c, *at): return next(r for r in c.rows if (r['phase'], r['action']) == at)


# The table

def test_what_is_slower_is_found_in_its_phase():
    c = compare(side(), side(1, scale=1.15))
    assert c.paired and row(c, 'train', 'forward')['verdict'] == row(c, 'overall', 'fit')['verdict'] == row(c, 'train', 'step')['verdict'] == 'slower'
    assert row(c, 'train', 'backward')['verdict'] in ('same', 'unknown') and row(c, 'train', 'forward')['ratio'] == pytest.approx(1.15, abs=.02)
    assert row(c, 'train', 'samples/s')['verdict'] == 'slower' and row(c, 'train', 'samples/s')['ratio'] == pytest.approx(1/row(c, 'train', 'step')['ratio'])
    d = compare(side(1, scale=1.15), side())
    assert row(d, 'train', 'forward')['verdict'] == 'faster' and row(d, 'train', 'forward')['ratio'] == pytest.approx(1/row(c, 'train', 'forward')['ratio'])
    for r in c.rows: assert r['low'] <= r['ratio'] <= r['high'] and r['robust_low'] <= r['robust'] <= r['robust_high'], r


def test_a_run_is_one_value_its_mean_step_without_warm_up():
    r = make()
    steps = r.profile['steps']['train']['values']
    assert run_values(r)['train', 'forward']['value'] == pytest.approx(sum(steps['forward'][1:])/29)
    assert run_values(r)['overall', 'fit']['value'] == r.seconds and run_values(r)['memory', 'process']['value'] == 5e8 and ('fit', 'fit') not in run_values(r)


def test_equal_sides_are_seldom_called_different():
    wrong = 0
    for k in range(40):
        a,b = ([make(100*k+i, s, n=5, spread=.03) for i in range(10)] for s in (0, 1))
        for o in (*a, *b): o.id = o.id[-13:]  # no time in it: not in pairs
        c = compare(a, b, threshold=0, on=())
        assert not c.paired
        wrong += any(r['verdict'] in ('faster', 'slower') for r in c.rows if r['phase'] == 'train')
    assert wrong <= 5


@pytest.mark.parametrize('change,paired', [(dict(), True), (dict(turns=False), False), (dict(env={**ENV, 'host': 'bbbb'}), False), (dict(n=9), False)])
def test_pairs_are_runs_that_took_turns_on_one_machine(change, paired):
    a = side(**({k: v for k,v in change.items() if k == 'turns'}))
    b = [o for o in side(1, **{k: v for k,v in change.items() if k != 'n'})][:change.get('n', 10)]
    c = compare(a, b)
    assert c.paired is paired and c.rows[0]['paired'] is paired
    random.Random(0).shuffle(a)
    assert [r['ratio'] for r in compare(a, b).rows] == pytest.approx([r['ratio'] for r in c.rows])
    if len(a) == len(b): assert compare(a, b, paired=True).paired
    assert not compare(a, b, paired=False).paired


def test_pairs_that_are_none():
    with pytest.raises(UserError, match='10 and 9 Runs are not pairs'): compare(side(), side(1, n=9), paired=True)


def test_memory_and_accuracy():
    c = compare(side(), side(1, peak=6e8, accuracy=.85, scale=.5))
    assert row(c, 'memory', 'process')['verdict'] == 'more' and row(c, 'memory', 'process')['why'].startswith('more by')
    assert c.accuracy['verdict'] == 'worse' and c.accuracy['high'] < 0 and c.faster_but_worse == 'b' and 'FASTER BUT LESS ACCURATE: B' in str(c)
    assert compare(side(1, accuracy=.85, scale=.5), side()).faster_but_worse == 'a'
    assert compare(side(), side(1, scale=.5)).faster_but_worse is None
    assert compare(side(), side(1, accuracy=.85)).faster_but_worse is None  # not faster
    few = compare(side(n=3), side(1, n=3, accuracy=.5, scale=.5))
    assert few.accuracy['verdict'] == 'unknown' and few.faster_but_worse is None and 'too few runs to judge' in str(few)
    a = side()
    for o in a: o.metrics = {}
    assert compare(a, side(1)).accuracy is None


# The headline says no more than the verdict

@pytest.mark.parametrize('n', [1, 2, 4])
def test_few_runs_have_no_interval_and_no_percent_in_the_headline(n):
    c = compare(side(n=n), side(1, n=n, scale=1.5))
    assert c.title.endswith('(A): too few runs to tell (you need at least 5)') and '%' not in c.title
    assert 'interval' not in str(c) and 'could see' not in str(c) and 'unknown' not in str(c) and c.paired == (n > 1)


def test_the_headline_cannot_tell_what_the_verdict_cannot():
    c = compare(side(spread=.1), side(1, spread=.1))
    assert overall(c.verdicts).verdict == 'unknown' and re.search(r'overall: cannot tell \(-[0-9.]+% to \+[0-9.]+% time\)$', c.title), c.title
    assert 'cannot tell' in str(c).splitlines()[2] and 'unknown' not in str(c)
    assert compare(side(), side(1)).title.endswith(('overall: no difference larger than 1%', 'time)')) and compare(side(), side(1, scale=2.)).title.endswith('slower')


@pytest.mark.parametrize('field, a, b', [('epochs', 4, 1), ('batches', 30, 10), ('size', 64, 32)])
def test_other_amounts_of_work_are_not_compared_by_the_seconds_of_a_fit(field, a, b):
    "A quarter of the epochs is not 75% faster"
    c = compare(side(**{field: a}), side(1, n=10, **{field: b}), on=field)
    assert not any(r['phase'] in ('overall', 'fit') for r in c.rows) and row(c, 'train', 'samples/s') and overall(c.verdicts) is c.verdicts['train', 'samples/s']
    assert any(f'did not do the same amount of work ({field} {a} / {b}), so seconds of the fit are not compared' in o for o in c.notes) and 'overall' not in c.title and 'a sample' in c.title


def ran(side_, n=6, epochs=1, steps=8, bs=64, sizes=None, each=(), goal=None, world=None, **kwargs):
    "Runs that trained `epochs` epochs of `steps` batches; `each`: epochs of each Run"
    runs = []
    for i,k in enumerate(each or [epochs]*n):
        r = make(i, side_, n=k*steps, bs=bs, **kwargs)
        r.profile['steps']['train']['values']['samples'] = [float(o) for o in sizes or [bs]*steps]*k
        r.profile['fit']['train'] = dict(columns=['seconds'], n=k, keep=2**16, stride=1, values=dict(seconds=[1.]*k))
        if goal: r.goal = dict(target=.9, reached=.91, seconds=r.seconds, total_seconds=r.seconds, epochs=k, best=.91)
        if world: r.world_size,r.ranks = world,[dict(rank=j, samples_per_second=100., samples=float(k*steps*bs)) for j in range(world)]
        runs.append(r)
    return runs


def other_work(a, b, **kwargs):
    "What `compare` says of the amount of work; None where the seconds of the fit are compared"
    c = compare(a, b, on=['bs', 'batches', 'world_size', 'target'], **kwargs)
    said = next((re.search(r'same amount of work \((.*?)\)', o)[1] for o in c.notes if 'same amount of work' in o), None)
    assert (said is None) == (('overall', 'fit') in c.verdicts) == ('overall' in c.title) == (not c.work), (said, c.title)
    return said


def test_fewer_samples_in_as_many_batches_are_not_faster():
    assert other_work(ran(0, steps=4, bs=64, batches=4), ran(1, steps=4, bs=16, batches=4)) == 'samples trained 256 / 64'
    assert other_work(ran(0, steps=4, bs=64, batches=4), ran(1, steps=4, bs=60, batches=4)) == 'samples trained 256 / 240'
    assert other_work(ran(0, steps=2, bs=16), ran(1, steps=2, bs=32)) == 'samples trained 32 / 64'
    assert other_work(ran(0, steps=4, bs=64, batches=4, world=2), ran(1, steps=4, bs=64, batches=4)) == 'samples trained 512 / 256'


def test_a_training_that_ended_early_is_not_faster():
    assert other_work(ran(0, epochs=6), ran(1, epochs=2)) == 'epochs trained 6 / 2'
    assert other_work(ran(0, epochs=6, steps=1), ran(1, epochs=5, steps=1)) == 'epochs trained 6 / 5'
    assert other_work(ran(0, epochs=6), ran(1, each=[2, 3, 2, 4, 6, 6])) == 'epochs trained 6 / 2, 3, 4, ...'
    cut = ran(1, epochs=2)
    for r in cut:
        log = r.profile['steps']['train']
        log |= dict(n=11, values={k: v[:11] for k,v in log['values'].items()})
    assert other_work(ran(0, epochs=2), cut) == 'samples trained 1024 / 704'
    gate = compare(ran(0, epochs=2), ran(1, epochs=6, scale=2.))
    assert gate.slower_than(.05)[0] == ('train', 'samples/s') and ('overall', 'fit') not in gate.slower_than(.05)


@pytest.mark.parametrize('a, b', [(dict(steps=8, bs=16), dict(steps=2, bs=64)), (dict(epochs=3, sizes=[64, 36], steps=2), dict(epochs=3, steps=1)),
                                  (dict(steps=10), dict(sizes=[64]*9+[63])), (dict(sizes=[30, 34, 64, 128], steps=4), dict(steps=4)),
                                  (dict(epochs=4, goal=True), dict(epochs=2, goal=True)), (dict(steps=8, world=2), dict(steps=16)),
                                  (dict(steps=8, bs=32, batches=50), dict(steps=4, bs=64, batches=50))])
def test_as_many_samples_but_for_a_last_batch_are_the_same_work(a, b):
    "In larger batches, without the last one, in groups of other sizes, in several processes, to a target"
    b = dict(b, steps=len(b['sizes'])) if 'sizes' in b else b
    assert other_work(ran(0, **a), ran(1, **b)) is None and other_work(ran(0, **b), ran(1, **a)) is None


def test_runs_that_do_not_say_how_much_they_trained_are_compared():
    a, b = ran(0, epochs=6), ran(1, epochs=2)
    for r in (*a, *b):
        del r.profile['fit']['train']
        r.profile['steps']['train']['values']['samples'] = [0.]*r.profile['steps']['train']['n']
    assert ('overall', 'fit') in compare(a, b).verdicts
    for r in (*a, *b): r.profile = None
    assert ('overall', 'fit') in compare(a, b).verdicts
    a, b = ran(0, steps=8, world=2), ran(1, steps=4, world=2)
    for r in (*a, *b): r.ranks = [{k: v for k,v in o.items() if k != 'samples'} for o in r.ranks]
    assert ('overall', 'fit') in compare(a, b).verdicts


def begun(runs, seconds):
    "The same Runs, whose loader took so long to start in all epochs together"
    for r in runs: r.profile['outside']['train']['start'] = [2, seconds*r.seconds]
    return runs


def test_totals_of_a_fit_are_not_compared_between_fits_of_different_length():
    a, b = begun(side(epochs=2), .2), begun(side(1, epochs=4), .4)
    c = compare(a, b, on='epochs')
    assert 'start' not in [r['action'] for r in c.rows] and not c.slower_than(.05)
    assert row(compare(a, begun(side(1, epochs=2), .4)), 'train', 'start')['verdict'] == 'slower'


def test_a_first_step_is_not_compared_with_others():
    "The only step of an epoch in B is warm-up"
    c = compare(side(), side(1, n=10, phases={k: v*8 for k, v in PHASES.items()}, steps=1, bs=512), on='bs')
    assert ('train', 'step') not in c.verdicts and any('not every Run has it: train step' in o and 'train forward' in o for o in c.notes)
    both = compare(side(steps=1), side(1, steps=1))
    assert [r['action'] for r in both.rows] == ['fit', 'process']


def test_batches_of_another_size_are_judged_by_the_fit():
    c = compare(side(bs=64), side(1, bs=128, scale=1.5), on='bs')
    assert row(c, 'train', 'step')['verdict'] == 'slower' and c.slower_than(.05) == [('overall', 'fit')]
    less = compare(side(bs=64, epochs=1), side(1, bs=128, epochs=2, scale=1.5), on=['bs', 'epochs'])
    assert less.slower_than(.05) == [('train', 'samples/s')]


@pytest.mark.parametrize('on', ['data.n_train', 'data', 'sample'])
def test_more_data_is_more_work_by_whichever_name(on):
    c = compare(side(sample=1., data=dict(n_train=1438)), side(1, scale=2., sample=.5 if on == 'sample' else 1., data=dict(n_train=2876)), on=on)
    assert ('overall', 'fit') not in c.verdicts and any('did not do the same amount of work' in o for o in c.notes)


def test_a_narrow_terminal_promises_no_column_that_is_empty():
    from rich.console import Console
    from fastbench.measure.table import Table
    class Small(Table):
        columns, drops = (('a', 'word', str), ('device', 'on the GPU', str), ('more', 'a long one', str)), ('device', 'more')
        def __init__(self, rows): self.rows = rows
    console = Console(width=12, file=io.StringIO())
    console.print(Small([dict(a='a word', device=None, more='0123456789')]))
    assert ' '.join(console.file.getvalue().split()).endswith('a wider terminal shows a long one, too')


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words():
    from rich.console import Console
    def shown(width):
        console = Console(width=width, file=io.StringIO())
        console.print(compare(side(), side(1, scale=1.15)))
        return console.file.getvalue().splitlines()
    narrow, wide = shown(80), shown(140)
    assert max(map(len, narrow)) <= 80 and any('train' in o and 'step' in o and 'slower' in o for o in narrow) and not any('could see  ' in o for o in narrow)
    assert any(o.startswith('a wider terminal shows A, B, could see') for o in narrow) and not any('wider terminal' in o for o in wide)
    def rows(lines): return [o for o in lines if re.search(r'% to [+-]', o) and 'points' not in o]
    assert len(rows(narrow)) == len(rows(wide)) == len(compare(side(), side(1, scale=1.15)).rows)


def test_far_beyond_ten_times_digits_say_nothing():
    assert percent(11.) == 'more than 10x slower' and signed(102723.) == 'more than 10x' and roughly(226765.) == 'more than 10x' and percent(9.) == '800% slower'


@pytest.mark.parametrize('n', [1, 4])
def test_few_runs_have_figures_and_no_verdict(n):
    c = compare(side(n=n), side(1, n=n, scale=3.))
    assert {r['verdict'] for r in c.rows} == {'unknown'} and 'no verdicts: they need 5 runs a side' in str(c) and not c.slower_than(0)


def test_phases_that_are_missing_or_tiny_are_named():
    c = compare(side(phases=PHASES | dict(draw=1e-6, loss=.01)), side(1, phases=PHASES | dict(draw=1e-6)))
    assert 'below 0.1% of the fit: train draw' in str(c) and 'not every Run has it: train loss' in str(c)
    assert not {'draw', 'loss'} & {r['action'] for r in c.rows}


def test_what_weighs_nearly_nothing_does_not_close_the_gate():
    "A phase of half a percent of the fit may double: it cannot cost anybody 5%"
    c = compare(side(phases=PHASES | dict(to_device=.0002)), side(1, phases=PHASES | dict(to_device=.0005)))
    r = row(c, 'train', 'to_device')
    assert r['verdict'] == 'slower' and .003 < r['share'] < .01
    assert c.slower_than(.05) == [] and c.slower_than(.05, least=.003) == [('train', 'to_device')]


def test_runs_that_did_not_go_well_are_left_out_and_said():
    b = side(1)
    b[3] = make(3, 1, status='failed')
    c = compare(side(), b)
    assert c.paired and c.rows[0]['n'] == 9 and '2 Runs left out (failed; of a pair both)' in str(c)
    assert compare(side(), b, paired=False).rows[0]['n_b'] == 9
    with pytest.raises(UserError, match=r'B has no Run that went well \(diverged\)'): compare(side(), side(1, status='diverged'))


def test_a_broken_profile_is_named():
    b = side(1)
    b[2].profile = dict(fit={})
    with pytest.raises(UserError, match=f'{b[2].id}: this is not a profile'): compare(side(), b)
    for o in b: o.profile = None
    assert [(r['phase'], r['action']) for r in compare(side(), b).rows] == [('overall', 'fit')]


def test_a_run_is_not_compared_with_itself():
    with pytest.raises(UserError, match='stands on both sides'): compare(side(), [*side(1, n=9), make()])
    with pytest.raises(UserError, match='empty'): compare([], side())
    with pytest.raises(UserError, match='int is not a side'): compare(1, 2)


# What is comparable

@pytest.mark.parametrize('change,field', [(dict(lr=.1), 'lr'), (dict(bs=32), 'bs'), (dict(sample=.5), 'sample'), (dict(precision='bf16'), 'precision'), (dict(data=dict(name='photos')), 'data'),
    (dict(data=dict(version='2')), 'data.version'), (dict(data=dict(fingerprint='cd')), 'data.fingerprint'), (dict(data=dict(n_train=9)), 'data.n_train'), (dict(channels_last=True), 'channels_last'),
    (dict(env={**ENV, 'variables': {}}), 'variables.OMP_NUM_THREADS'), (dict(env={**ENV, 'torch': dict(threads=2)}), 'torch.threads'), (dict(env={**ENV, 'turbo': 'on'}), 'turbo')])
def test_other_work_is_refused_named_and_can_be_meant(change, field):
    with pytest.raises(NotComparable, match=field) as e: compare(side(), side(1, **change))
    assert [d['field'] for d in e.value.differences] == [field] and '\n' not in str(e.value) and '--anyway' in str(e.value)
    c = compare(side(), side(1, **change), anyway=True)
    assert f'NOT COMPARABLE, compared anyway: {field} ' in str(c) and json.loads(c.to_json())['differences'][0]['field'] == field
    c = compare(side(), side(1, **change), on=[field])
    assert not c.differences and f'compared on purpose: {field} ' in str(c)


@pytest.mark.parametrize('env', [{**ENV, 'host': 'bbbb'}, {**ENV, 'versions': dict(torch='2.16.0')}, {**ENV, 'git': dict(fastbench=dict(commit='beef', dirty=True))},
                                 {**ENV, 'cores': dict(physical=8, usable=8), 'torch': dict(threads=8)}])
def test_another_machine_or_version_is_listed(env):
    c = compare(side(), side(1, env=env))
    assert not c.differences and c.environment and 'environment, A / B: ' in str(c)


def test_a_side_that_mixes_is_no_side():
    with pytest.raises(NotComparable, match=r'bs 64, 32 / 64'): compare([*side(n=5), *[make(i, 2, bs=32) for i in range(5, 9)]], side(1))


def test_names_seeds_and_older_runs_do_not_matter():
    b = side(1, name='another')
    for o in b: del o.recipe['ema']  # a field that an older fastbench did not have
    assert not compare(side(), b).differences
    assert 'seeds differ' in str(compare(side(), side(1)[:9])) and 'seeds differ' not in str(compare(side(), side(1)))


def test_what_is_meant():
    with pytest.raises(UserError, match="unknown field 'presicion'; did you mean 'precision'"): compare(side(), side(1), on='presicion')
    assert 'meant to differ, and equal: precision' in str(compare(side(), side(1), on='precision'))
    assert not differences(side(), side(1, data=dict(name='photos', version='9', fingerprint='x')), on=['data'])[0]


# What would be counted twice, judged twice or not at all

def written(runs, folder):
    for o in runs: save(o, folder)
    return folder


def test_a_copy_of_a_run_is_no_second_measurement(tmp_path):
    a,b = side(n=2),side(1)
    written(a, tmp_path/'a')
    for i in range(4): shutil.copy(a[0].path, tmp_path/'a'/f'backup-{i}.json')
    assert load_side(tmp_path/'a')[1] == ['passed over: 4 copies of Runs that are there already']
    c = compare([a[0], a[0], a[1]], b)
    assert c.verdicts['overall', 'fit'].n == 2 and '1 copy of Runs' in str(c) and 'too few runs' in str(c)
    with pytest.raises(UserError, match=f'the Run {a[0].id} stands twice in A'): Compared([a[0], a[0]], b)


def test_figures_of_a_row_say_what_its_change_says():
    "One run of A took ten times as long: arithmetic means would call B faster"
    a,b = side(),side(1)
    for o in b: o.seconds *= 1.085
    a[0].seconds *= 2
    c = compare(a, b, price=(1, 1))
    r = row(c, 'overall', 'fit')
    assert r['b']/r['a'] == pytest.approx(r['ratio']) and (sum(o.seconds for o in b) > sum(o.seconds for o in a)) != (r['ratio'] > 1)
    assert c.price['epoch']['b']/c.price['epoch']['a'] == pytest.approx(c.price['epoch']['ratio'])


def test_table_and_gate_agree_on_the_whole():
    "`overall` is judged by itself in both, however many phases there are"
    phases = {o: .02 for o in ('draw', 'forward', 'backward', 'opt_step')}
    for k in range(12):
        a,b = ([make(100*k+i, s, phases=phases, spread=.02) for i in range(8)] for s in (0, 1))
        for o in b: o.seconds *= 1.06
        c = compare(a, b, threshold=.05)
        assert (row(c, 'overall', 'fit')['verdict'] == 'slower') == (('overall', 'fit') in c.slower_than(.05))


def test_a_gate_with_nothing_to_judge(monkeypatch, capsys, tmp_path):
    a,b = side(epochs=1),side(1, epochs=2)
    for o in (*a, *b): o.profile = None
    written(a, tmp_path/'a'), written(b, tmp_path/'b')
    monkeypatch.setattr(sys, 'argv', ['fastbench', 'compare', str(tmp_path/'a'), str(tmp_path/'b'), '--on', 'epochs', '--fail-above', '5%'])
    with pytest.raises(SystemExit) as e: cli.main()
    assert e.value.code == 2 and 'no time was measured on both sides' in capsys.readouterr().err


def test_two_devices_of_one_machine_in_turns_are_pairs():
    a,b = side(),side(1, scale=1.15)
    for o in b: o.device = dict(o.device, name='another')
    assert compare(a, b).paired
    b[3].device = dict(b[3].device, name='a third')
    assert not compare(a, b).paired
    a[0].device = b[0].device = dict(name=['no', 'text'])
    assert not compare(a, b).paired


@pytest.mark.parametrize('odd', [math.inf, math.nan, None, True, '97%'])
def test_an_accuracy_that_is_no_number(odd):
    a,b = side(),side(1)
    a[4].metrics['accuracy'] = odd
    c = compare(a, b)
    assert c.accuracy is None and 'accuracy is not compared' in str(c)
    json.loads(c.to_json(), parse_constant=lambda o: pytest.fail(o))


def test_doubts_are_said_below_the_table():
    a,b = side(spread=.001),side(1, spread=.001)
    for o in b: o.seconds *= 1.1
    for o,x in zip(b, (1.2, .95, .96, .95, .97, 1.4, .95, 1.3, .96, 1.5)): o.seconds *= x
    c = compare(a, b, threshold=0)
    whole = row(c, 'overall', 'fit')
    assert ('robust interval' in whole['why']) == ('the robust interval holds no difference of overall fit' in str(c))
    many = compare(side(), side(1, scale=1.012), threshold=0)
    lost = [f"{r['phase']} {r['action']}" for r in many.rows if 'can be chance' in r['why']]
    assert ('it can be chance: ' + ', '.join(lost) in str(many)) == bool(lost)


@pytest.mark.parametrize('what,why', [('nofile.json', 'is not there'), ('nofolder/', 'is not there'), ('a/b', 'is not there'), ('', 'a variable of the shell')])
def test_a_side_that_is_not_there(tmp_path, what, why):
    written(side(n=1), tmp_path)
    with pytest.raises(UserError, match=why): load_side(what, tmp_path)


# What an epoch costs

def reached(runs, scale=1.):
    for o in runs: o.goal = dict(target=.9, reached=.91, seconds=5*o.seconds*scale, total_seconds=6*o.seconds*scale, epochs=6, best=.91)
    return runs


def test_the_price_of_an_epoch():
    "Half the time at three times the price of an hour: half as much again"
    a, b = side(epochs=4), side(1, scale=1, phases={k: v/2 for k,v in PHASES.items()}, epochs=4)
    c = compare(a, b, price=(.36, 1.08))
    p = c.price['epoch']
    assert c.price['per_hour'] == [.36, 1.08] and c.price['target'] is None and p['verdict'] == 'more expensive' and p['low'] < 1.5 < p['high']
    assert p['a'] == pytest.approx(geometric_mean(o.seconds for o in a)/4/3600*.36) and p['ratio'] == pytest.approx(3*row(c, 'overall', 'fit')['ratio'])
    assert re.search(r'^an epoch costs 0\.0000[0-9]+ on A and 0\.000[0-9]+ on B \(0\.36 and 1\.08 an hour\): 5[0-9.]+% more expensive on B \(\+4', str(c), re.M), str(c)
    assert json.loads(c.to_json())['price'] == json.loads(json.dumps(c.price))
    d = compare(b, a, price=(1.08, .36))
    assert d.price['epoch']['verdict'] == 'cheaper' and re.search(r'\): 3[0-9.]+% cheaper on B \(-3', str(d))
    assert compare(a, b).price is None and json.loads(compare(a, b).to_json())['price'] is None and 'costs' not in str(compare(a, b))


def test_the_price_says_no_more_than_its_verdict():
    c = compare(side(spread=.2), side(1, spread=.2), price=(1, 1))
    assert c.price['epoch']['verdict'] == 'unknown' and re.search(r'an hour\): cannot tell \(-[0-9.]+% to \+[0-9.]+%\)$', str(c), re.M)
    assert 'an hour): no difference larger than 20%' in str(compare(side(), side(1), price=(1, 1), threshold=.2))
    few = compare(side(n=2), side(1, n=2), price=(1, 2))
    assert re.search(r'\(1\.00 and 2\.00 an hour\): too few runs to tell$', str(few), re.M)
    assert 'more than 10x as expensive on B' in str(compare(side(), side(1), price=(.1, 9)))


def test_the_price_to_the_target():
    a, b = reached(side()), reached(side(1), 2.)
    c = compare(a, b, price=(1, 1))
    assert c.price['target']['verdict'] == 'more expensive' and c.price['target']['a'] == pytest.approx(6*c.price['epoch']['a']*a[0].recipe['epochs']) and 'to an accuracy of 0.9 it costs' in str(c)
    b[3].goal['reached'] = None
    d = compare(a, b, price=(1, 1))
    assert d.price['target'] is None and 'to an accuracy of' not in str(d)
    c = compare(a, side(1, epochs=9), price=(1, 1), on='epochs')
    assert c.price is None and 'what an epoch costs is not compared' in str(c)


@pytest.mark.parametrize('price', [(1,), (1, 2, 3), (0, 1), (1, -2), (1, math.inf), ('x', 1), 3, (True, 1)])
def test_what_is_no_price(price):
    with pytest.raises(UserError, match='cannot be: two prices') as e: compare(side(), side(1), price=price)
    assert '\n' not in str(e.value)


# Formats

EVIL = '<script>alert(1)</script>|\n"\'&${x}$'


def test_every_format_and_hostile_texts(monkeypatch):
    b = side(1, name=EVIL, data=dict(version=EVIL), env={**ENV, 'host': EVIL})
    for o in b: o.warnings,o.device = [EVIL],dict(name=EVIL)
    c = compare(side(), b, anyway=True)
    html,d = c._repr_html_(),json.loads(c.to_json())
    assert '<script' not in html and '&lt;script' in html
    want = set('ratio low high verdict detectable n outliers robust why phase action kind a b change'.split())
    assert all(want <= set(r) for r in d['rows']) and d['rows'] == json.loads(json.dumps(c.rows)) and len(d['runs']) == 20
    table = list(csv.DictReader(io.StringIO(c.to_csv())))
    assert [float(r['ratio']) for r in table] == [r['ratio'] for r in c.rows] and want <= set(table[0])
    assert list(c.frame.ratio) == [r['ratio'] for r in c.rows]
    body = [o for o in c.to_markdown().splitlines() if o.startswith('| ')]
    assert len(body) == len(c.rows)+2 and len({o.replace('\\|', '').count('|') for o in body}) == 1
    monkeypatch.setenv('MPLBACKEND', 'agg')
    ax = c.plot()
    ax.figure.savefig(io.BytesIO(), format='svg')


# Sides

def test_sides(tmp_path):
    a,b = tmp_path/'a',tmp_path/'b'
    for o in side(n=6): save(o, a)
    for o in side(1, n=6, name='photos'): save(o, b)
    (a/'cut.json').write_text('{"schema"')
    c = compare(a, str(b))
    assert c.paired and len(c.runs) == 12 and 'passed over:' in str(c) and 'cut.json' in str(c)
    for o in side(1, n=6, name='photos'): save(o, a)
    assert len(load_side('digits', a)[0]) == 6 and len(load_side('photos', a)[0]) == 6 and len(load_side('last', a)[0]) == 1
    assert [o.id for o in load_side([make(), str(a/f'{make().id}.json'), make().id], a)[0]] == [make().id]  # one Run, whatever names it
    for missing in (tmp_path/'nothing', tmp_path/'nothing'/'x.json', tmp_path/'empty'):
        (tmp_path/'empty').mkdir(exist_ok=True)
        with pytest.raises(DataUnavailable) as e: load_side(missing, a)
        assert '\n' not in str(e.value)
    with pytest.raises(UserError, match='unknown Run'): load_side('nosuch', a)


# The command

def fastbench(*args, **kwargs): return subprocess.run([sys.executable, '-m', 'fastbench', *map(str, args)], capture_output=True, text=True, timeout=120, **kwargs)


def command(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, 'argv', ['fastbench', *map(str, args)])
    with pytest.raises(SystemExit) as e: cli.main()
    return (e.value.code or 0, *capsys.readouterr())


@pytest.fixture(scope='module')
def kept(tmp_path_factory):
    d = tmp_path_factory.mktemp('sides')
    for name,runs in dict(a=side(), slow=side(1, scale=1.15), same=side(1), bf16=side(1, precision='bf16', scale=.5), noisy=side(1, scale=1.15, spread=.3), few=side(1, n=4, scale=9.)).items():
        for o in runs: save(o, d/name)
    return d


@pytest.mark.parametrize('b,options,code,why', [('slow', [], 0, ''), ('slow', ['--fail-above', '5%'], 1, 'slower by more than 5%: train forward'), ('slow', ['--fail-above', '.3'], 0, ''), ('same', ['--fail-above', '0%'], 0, ''),
    ('noisy', ['--fail-above', '1%'], 0, ''), ('few', ['--fail-above', '5%'], 0, 'fewer than 5 runs a side'), ('bf16', [], 3, 'precision fp32 / bf16'), ('bf16', ['--on', 'precision', '--fail-above', '5%'], 0, ''),
    ('bf16', ['--anyway'], 0, ''), ('bf16', ['--on', 'preci'], 2, 'unknown field'), ('slow', ['--fail-above', 'x'], 2, 'not a share'), ('slow', ['--threshold', '-1'], 2, 'not a share'), ('nothing/x', [], 4, 'is not there'), ('nosuch', [], 2, 'no Runs in')])
def test_exit_codes(kept, monkeypatch, capsys, tmp_path, b, options, code, why):
    monkeypatch.chdir(kept)
    monkeypatch.setenv('FASTBENCH_OUT', str(tmp_path/'none'))
    got,out,err = command(monkeypatch, capsys, 'compare', 'a', b, *options)
    assert got == code and why in err and 'Traceback' not in err and (why or not err), err
    assert bool(out) == (code < 2)
    if code > 1: assert err.count('\n') == 1


def test_formats_of_the_command(kept, monkeypatch, capsys):
    monkeypatch.chdir(kept)
    d = json.loads(command(monkeypatch, capsys, 'compare', 'a', 'slow', '--json')[1])
    assert d['rows'] == json.loads(json.dumps(compare(kept/'a', kept/'slow').rows)) and d['paired'] is True
    d = json.loads(command(monkeypatch, capsys, 'compare', 'a', 'bf16', '--json')[1])
    assert [o['field'] for o in d['differences']] == ['precision']
    assert '| overall | fit |' in command(monkeypatch, capsys, 'compare', 'a', 'slow', '--markdown')[1]
    assert 'not in pairs' in command(monkeypatch, capsys, 'compare', 'a', 'slow', '--not-paired')[1]
    assert 'beyond 20%' in command(monkeypatch, capsys, 'compare', 'a', 'slow', '--threshold', '20%')[1]
    d = json.loads(command(monkeypatch, capsys, 'compare', 'a', 'slow', '--price', 'B=2.5, A=1', '--json')[1])
    assert d['price']['per_hour'] == [1, 2.5]
    assert 'an epoch costs' in command(monkeypatch, capsys, 'compare', 'a', 'slow', '--price', 'A=1,B=2.5')[1]


@pytest.mark.parametrize('price', ['1,2', '1', 'A=1', 'A=1,B=', 'A=1,B=x', 'A=0,35,B=1,10', 'A=1,A=2', 'A=0,B=1', 'A=1,B=-1', 'A=1,B=nan', 'A=1,B=2,C=3', ''])
def test_a_price_that_could_be_mistaken_is_refused_in_a_line(kept, monkeypatch, capsys, price):
    monkeypatch.chdir(kept)
    got,out,err = command(monkeypatch, capsys, 'compare', 'a', 'slow', '--price', price)
    assert got == 2 and not out and 'write A=0.35,B=1.10' in err and err.count('\n') == 1, err


def test_for_real_in_a_process_of_its_own(kept):
    got = fastbench('compare', kept/'a', kept/'slow', '--fail-above', '5%')
    assert got.returncode == 1 and 'train' in got.stdout and 'slower by more than 5%' in got.stderr
    assert fastbench('compare', kept/'a', kept/'bf16').returncode == 3
    code = ("import sys; sys.argv = ['fastbench', 'compare', *sys.argv[1:]]\nfrom fastbench.cli import main\ntry: main()\nexcept SystemExit: pass\n"
            "print([o for o in 'torch fastai transformers scipy numpy pandas matplotlib'.split() if o in sys.modules])")
    out = subprocess.run([sys.executable, '-c', code, kept/'a', kept/'slow'], capture_output=True, text=True).stdout
    assert out.splitlines()[-1] == '[]'


def test_one_phase_that_goes_far_beyond_does_not_hide_the_others():
    def both(spread): return [[make(i, s, scale=1.1**s, phases={**PHASES, 'draw': .0003*math.exp(spread*(i % 3)*s)}) for i in range(6)] for s in (0, 1)]
    near, far = (compare(*both(o)).plot() for o in (0, 2.5))
    assert all(o.get_clip_on() for o in near.lines)
    arrows = [o for o in far.lines if o.get_marker() == '>']
    assert arrows and far.get_xlim()[1] < 400 and all(o.get_xdata()[0] <= far.get_xlim()[1] + 1e-9 for o in arrows)

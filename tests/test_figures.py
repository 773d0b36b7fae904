"What a Run answers of itself: of files that were written before it could, of broken ones, and without its raw values."
import json
import math
import sys
from pathlib import Path

import pytest
from test_query import profile
from test_store import make

from fastbench.runs.figures import Goal, peaks_of, read_phases
from fastbench.errors import UserError
from fastbench.runs.record import ADDED, from_json
from fastbench.runs.store import load, save

ROOT = Path(__file__).parent.parent
WRITTEN = sorted([*(ROOT/'benchmarks'/'results').glob('*.json'), *(ROOT/'tests'/'golden').glob('run-*.json')])
OLDER = [o for o in WRITTEN if json.loads(o.read_text())['schema'] == 1]


@pytest.mark.parametrize('path', OLDER, ids=[o.stem[:40] for o in OLDER])
def test_runs_written_before_are_read_with_their_fields(path):
    "They had these fields in `extra`; in the file they always stood where they stand now"
    held, run = json.loads(path.read_text()), load(path)
    for k in ADDED: assert getattr(run, k) == held.get(k, type(getattr(run, k))()), k
    assert not set(run.extra) & set(ADDED) and (run.schema, held['schema']) == (2, 1)
    again = json.loads(run.to_json())
    new = ('pace', 'schema', 'recipe')  # recipes are of a kind since schema 2: tests/test_kinds.py
    assert {k: v for k, v in again.items() if k not in new} == {k: v for k, v in held.items() if k not in new}
    pace, rel = held.get('pace', {}), 1e-12 if sys.version_info >= (3, 12) else 0  # from there on Python adds up more exactly
    assert {k: again['pace'].get(k) for k in pace} == pytest.approx(pace, rel=rel, abs=0)
    f, head = run.figures, load(path, profile=False).figures
    for k in ('bs', 'seconds', 'step', 'rate', 'accuracy', 'goal'): assert getattr(f, k) == getattr(head, k), k
    if held['profile']:
        raw = held['profile']['steps']['train']['values']
        calm = [x for x, w in zip(raw['step'], raw['warmup']) if not w]
        assert f.step == pytest.approx(sum(calm)/len(calm)) and f.memory == max(o['host'] for o in held['profile']['peaks']) and f.memory_of == 'process'
    assert (f.goal and f.goal.seconds) == held.get('goal', {}).get('seconds')


def test_some_of_them_have_a_goal_and_noise(): assert sum(bool(load(o).goal and load(o).noise) for o in WRITTEN) >= 10


def test_fields_that_hold_nothing_are_not_written(tmp_path):
    run = make(goal=dict(target=.9, best=math.nan), traceback='a\nb')
    held = json.loads(run.to_json())
    assert held['traceback'] == 'a\nb' and not set(ADDED) - {'goal', 'traceback'} & set(held)
    back = load(save(run, tmp_path))
    assert math.isnan(back.goal['best']) and back.traceback == 'a\nb' and back.figures.goal.target == .9
    assert 'note' in from_json(make(extra=dict(note=1)).to_json()).extra


@pytest.mark.parametrize('break_', [lambda p: p.update(steps=3), lambda p: p.pop('fit'), lambda p: p['steps']['train']['values'].update(step=['a']), lambda p: p['steps']['train'].update(n='x')])
def test_a_broken_profile_names_its_run(break_, tmp_path):
    run = make(profile=profile())
    break_(run.profile)
    for what in (lambda: run.phases, lambda: run.figures, lambda: run.table):
        with pytest.raises(UserError, match=run.id) as e: what()
        assert '\n' not in str(e.value)
    assert run.pace == {}, 'its file can be written all the same'


def test_without_raw_values_the_figures_of_the_list_remain(tmp_path):
    d = profile()
    d['peaks'] = [dict(host=1e9, host_exact=True), dict(host=2e9, host_exact=True, device=3e9)]
    path = save(make(profile=d, seconds=9.), tmp_path)
    whole, head = load(path).figures, load(path, profile=False).figures
    assert (head.step, head.rate, head.memory, head.memory_of, head.seconds) == (.5, 16., 3e9, 'device', 9.)
    assert head.samples is None and whole.samples == 24. and whole.memory == head.memory and load(path, profile=False).phases is None
    assert peaks_of(read_phases(d).profile) == dict(host=2e9, device=3e9, exact=True)


def test_odd_goals():
    assert Goal.of({}) is None and Goal.of(dict(target='x')) is None and Goal.of(dict(target=True)) is None
    assert Goal.of(dict(target=.9, reached=None, later='x')) == Goal(.9)

"Which Runs were there: files of older versions, files that somebody else wrote, questions that cannot be, tables for other programs."
import csv
import json
import math
import os
import subprocess
import sys
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings

from fastbench.runs import query
from fastbench.runs import record
from fastbench.runs import store
from fastbench.measure.phases import Profile, step_columns, to_dict
from fastbench.runs.query import COLUMNS, export, moment, row, runs, select, steps
from fastbench.errors import UserError
from fastbench.runs.record import Run, from_head, from_json
from fastbench.runs.store import load, save
from test_store import made, make, same

GOLDEN = Path(__file__).parent/'golden'


def profile(n=3):
    p = Profile()
    for i in range(n): p.steps['train'].add([{'warmup': float(not i), 'samples': 8., 'step': .5, 'forward': .25}.get(c, 0.) for c in step_columns('train')])
    return to_dict(p)


# Older and newer files

def test_a_run_of_schema_1_is_read():
    run = load(GOLDEN/'run-1.json')
    assert run.recipe['name'] == 'digits-xresnet18' and run.status == 'ok' and run.metrics['accuracy'] == pytest.approx(.1) and not run.extra
    step = next(r for r in run.table.rows if (r['phase'], r['action']) == ('train', 'step'))
    assert step['calls'] == 3 and run.pace['step'] == step['mean'] > 0
    head = load(GOLDEN/'run-1.json', profile=False)
    assert head.profile is None and head.pace == run.pace and row(head) == row(run)
    assert from_json(run.to_json()).to_json() == run.to_json()


@pytest.fixture
def third(monkeypatch):
    "A fastbench that is at its third schema"
    monkeypatch.setattr(record, 'SCHEMA', 3)
    monkeypatch.setattr(record, '_migrations', {})
    @record.migration(1)
    def _(d): return {**d, 'metrics': {k: v*100 for k,v in d['metrics'].items()}}
    @record.migration(2)
    def _(d): return {**d, 'weights': d['weights'].upper()}


def old(**kwargs): return json.dumps(make().as_dict() | dict(metrics=dict(accuracy=.5), weights='random') | kwargs)


def test_a_file_goes_through_all_that_it_has_missed(third, tmp_path):
    run = from_json(old(schema=1))
    assert (run.schema, run.metrics, run.weights) == (3, dict(accuracy=50.), 'RANDOM')
    run = from_json(old(schema=2))
    assert (run.schema, run.metrics, run.weights) == (3, dict(accuracy=.5), 'RANDOM')
    assert from_json(old(schema=3)).weights == 'random'
    text = make(metrics=dict(accuracy=.5), schema=1).to_json()
    assert from_head(text) is None  # only the whole file can be migrated
    (tmp_path/'a.json').write_text(text)
    assert load(tmp_path/'a.json', profile=False).metrics == dict(accuracy=50.)
    assert json.loads(load(tmp_path/'a.json').to_json())['schema'] == 3


def test_what_cannot_be_migrated_is_named(third, tmp_path):
    for text,why in ((old(schema=1, metrics=3), 'b.json is not a Run of schema 1'), (old(schema=4), 'b.json has schema 4.*up to 3.*upgrade')):
        (tmp_path/'b.json').write_text(text)
        for o in (True, False):
            with pytest.raises(UserError, match=why) as e: load(tmp_path/'b.json', profile=o)
            assert '\n' not in str(e.value)
    record._migrations.pop(1)
    with pytest.raises(UserError, match='cannot read any more'): from_json(old(schema=1))


# The beginning of a file

@settings(max_examples=200, deadline=None)
@given(made)
def test_the_beginning_says_what_the_whole_says(run):
    whole,head = from_json(run.to_json()),from_head(run.to_json())
    assert head is not None and head.profile is None
    for k in vars(whole).keys() - {'profile', '_pace', 'path'}: assert same(getattr(whole, k), getattr(head, k)), k
    assert head.pace == whole.pace


@pytest.mark.parametrize('change', [dict(error='x, "profile": {', status='failed'), dict(data={'a': 1, 'profile': {'x': 1}}), dict(extra={'note': 1, 'z': {'a': 1, 'profile': None}}),
                                    dict(recipe={'name': ', "profile": ', 'profile': 1})])
def test_a_text_that_looks_like_the_profile(change, tmp_path):
    path = save(make(profile=profile(), **change), tmp_path)
    head = load(path, profile=False)
    assert row(head) == row(load(path)) and head.pace == dict(step=.5, samples_per_second=16.)


def test_layouts_of_other_programs(tmp_path):
    run = make(profile=profile(), metrics=dict(accuracy=.5, loss=math.nan))
    d = json.loads(run.to_json())
    for i,text in enumerate((json.dumps(d, sort_keys=True), json.dumps(d, indent=2), json.dumps(d) + '\n', json.dumps(d, separators=(',', ':')),
                             json.dumps({'profile': d['profile']} | d), json.dumps({k: v for k,v in d.items() if k != 'pace'}), json.dumps(d | dict(pace=3)))):
        (tmp_path/f'{i}.json').write_text(text)
        whole,head = load(tmp_path/f'{i}.json'),load(tmp_path/f'{i}.json', profile=False)
        assert head.id == run.id and head.pace == whole.pace == run.pace and head.profile is None and math.isnan(head.metrics['loss']) and whole.table.rows == run.table.rows


def test_a_file_that_was_cut_off_is_told_or_shown_rightly(tmp_path):
    path = save(make(profile=profile(300), warnings=['ä'*50]), tmp_path)
    whole,data,told = load(path),path.read_bytes(),0
    assert len(data) > 8000
    for n in range(0, len(data), 7):
        path.write_bytes(data[:n])
        try: head = load(path, profile=False)
        except UserError as e: told += path.name in str(e)
        else: assert data[:n].endswith(b'}') and row(head) == row(whole)
    assert told > .99*len(range(0, len(data), 7))


def test_bytes_that_are_no_text_are_told(tmp_path):
    path = save(make(error='here', status='failed', profile=profile(300)), tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"here"', b'"h\xffre"'))
    with pytest.raises(UserError, match='not a text file'): load(path, profile=False)


def test_a_run_without_its_profile_is_not_saved(tmp_path):
    path = save(make(profile=profile()), tmp_path)
    with pytest.raises(UserError, match='load it whole'): save(load(path, profile=False), tmp_path)
    assert load(path).profile


# Questions

@pytest.fixture
def kept(tmp_path):
    "Four Runs, ten minutes apart from noon"
    def env(*commits): return dict(git=dict(zip(('fastbench', 'folder'), [dict(commit=o*10, dirty=o == 'beef') for o in commits])), versions=dict(fastbench='0.1'), host='h')
    rows = [dict(recipe='digits', device=dict(kind='cpu', name='AMD EPYC'), environment=env('abcd', 'beef')), dict(recipe='digits', device=dict(kind='cuda', name='NVIDIA H100'), environment=env('beef')),
            dict(recipe='imdb-roberta', data=dict(name='reviews', asked='imdb'), precision=dict(asked='mixed', effective='bf16')), dict(recipe='imdb-lstm', status='failed', error='no memory')]
    for i,o in enumerate(rows):
        defaults = dict(data=dict(name='digits'), precision=dict(asked='fp32', effective='fp32'), device=dict(kind='cpu', name='Xeon'), metrics=dict(accuracy=.9+i/100, seconds=3.))
        o = {**defaults, **o}
        save(make(**{**o, 'recipe': dict(name=o['recipe'], bs=8)}, started=f'2026-11-20T12:{i}0:00+00:00', seconds=10.+i, id=f'r{i}-20261120T12{i}000-0000000{i}'), tmp_path/'runs')
    return tmp_path/'runs'


def numbers(df): return [int(o[1]) for o in df['id']]


@pytest.mark.parametrize('asked,found', [
    ({}, [0, 1, 2, 3]), (dict(recipe='digits'), [0, 1]), (dict(recipe='imdb-*'), [2, 3]), (dict(recipe=['digits', '*-lstm']), [0, 1, 3]), (dict(recipe='nosuch'), []),
    (dict(recipe='dig'), []), (dict(data='reviews'), [2]), (dict(data='imdb'), []), (dict(device='cpu'), [0, 2, 3]), (dict(device='h100'), [1]), (dict(device='cu'), []), (dict(device=('cuda', 'xeon')), [1, 2, 3]),
    (dict(precision='bf16'), [2]), (dict(precision='mixed'), []), (dict(commit='beefbeef'), [0, 1]), (dict(commit='ABCD'), [0]), (dict(commit='efbe'), []), (dict(status='failed'), [3]),
    (dict(since='2026-11-20'), [0, 1, 2, 3]), (dict(until='2026-11-20'), [0, 1, 2, 3]), (dict(until='2026-11-19'), []), (dict(since='2026-11-21'), []), (dict(since='2026-11-20T12:10', until='2026-11-20T12:20'), [1]),
    (dict(since='2026-11-20T13:10+01:00', until=datetime(2026, 11, 20, 12, 30)), [1, 2]), (dict(since=date(2026, 11, 20), until=date(2026, 11, 20)), [0, 1, 2, 3]),
    (dict(since=pd.Timestamp('2026-11-20 12:30Z')), [3]), (dict(last=2), [2, 3]), (dict(last=1, recipe='digits', status='ok'), [1]), (dict(last=9), [0, 1, 2, 3])])
def test_questions(kept, asked, found): assert numbers(runs(kept, **asked)) == found


@pytest.mark.parametrize('asked,why', [
    (dict(since='yesterday'), "since='yesterday' is not a date"), (dict(until='2026-13-01'), "until='2026-13-01' is not a date"), (dict(since='2026-1-1'), 'is not a date'), (dict(since=20261120), 'is not a date'),
    (dict(since='2026-11-20', until='2026-11-19'), 'no time lies between'), (dict(status='okay'), 'unknown status'), (dict(commit='main'), 'hexadecimal'), (dict(commit='abc'), 'four or more'),
    (dict(recipe=3), 'recipe=3 cannot be'), (dict(data=[]), 'data=.. cannot be'), (dict(device=['cpu', 1]), 'cannot be'), (dict(precision=''), 'cannot be'), (dict(last=0), 'last=0'), (dict(last=True), 'last=True')])
def test_questions_that_cannot_be(tmp_path, asked, why):
    with pytest.raises(UserError, match=why) as e: runs(tmp_path, **asked)
    assert '\n' not in str(e.value)


def test_a_run_with_an_odd_time_is_in_no_span(kept):
    path = save(make(started='long ago', id='r9-20261120T130000-00000009'), kept)
    assert numbers(runs(kept)) == [0, 1, 2, 3, 9] and numbers(runs(kept, since='2000-01-01')) == [0, 1, 2, 3] and pd.isna(runs(kept).started.iloc[-1])
    path.unlink()


def test_columns(kept, tmp_path):
    df = runs(kept)
    assert list(df.columns) == [*COLUMNS, 'metric.seconds'] and list(df.seconds) == [10, 11, 12, 13] and set(df['metric.seconds']) == {3.}
    assert df.commit.iloc[0] == 'abcd'*10 and df.dirty.iloc[0] == False and df.dirty.iloc[1] == True and pd.isna(df.dirty.iloc[2]) and df.fastbench.iloc[1] == '0.1'  # noqa: E712
    assert df.data.iloc[2] == 'reviews' and df.data_asked.iloc[2] == 'imdb' and df.precision_asked.iloc[2] == 'mixed' and df.error.iloc[3] == 'no memory'
    assert df.started.dt.tz is not None and df.step.isna().all() and df.accuracy.max() == pytest.approx(.93)
    for o in (tmp_path/'nothing', kept):
        none = runs(o, recipe='nosuch')
        assert len(none) == 0 and list(none.columns) == COLUMNS and (none.dtypes == df.dtypes[COLUMNS]).all()


def test_texts_where_numbers_should_be(tmp_path):
    odd = dict(metrics=dict(accuracy='great', f1=[1]), device=dict(kind=3, name=['a']), environment=dict(git=[1], versions='x', host=5), data=dict(name=7), precision=dict(effective=None), recipe=dict(name=None, bs='x', epochs=True))
    text = json.dumps(json.loads(make().to_json()) | odd)
    tmp_path.joinpath('odd.json').write_text(text)
    df = runs(tmp_path)
    assert len(df) == 1 and df.accuracy.isna().all() and df.bs.isna().all() and df.device[0] == "['a']" and df.host[0] == '5'
    assert len(runs(tmp_path, recipe='x', device='cpu', commit='abcd')) == 0


def test_what_is_corrupt_is_named_and_hides_nothing(kept):
    (kept/'cut.json').write_text('{"schema": 1')
    (kept/'later.json').write_text(json.dumps(make().as_dict() | dict(schema=99)))
    with pytest.warns(UserWarning, match='2 files passed over.*cut.json'): df = runs(kept)
    assert len(df) == 4 and len(df.attrs['passed_over']) == 2 and any('later.json has schema 99' in o for o in df.attrs['passed_over'])


def test_the_newest_are_found_without_reading_the_rest(kept, monkeypatch):
    read = []
    monkeypatch.setattr(query, 'load', lambda path, **kwargs: (read.append(path), load(path, **kwargs))[1])
    assert len(select(kept, 2)[0]) == 2 and len(read) == 2
    read.clear()
    assert numbers(runs(kept, last=1, device='cuda')) == [1] and len(read) == 3


def test_the_profile_is_not_read(kept, monkeypatch):
    save(make(profile=profile(3000), id='r4-20261121T120000-00000004'), kept)
    monkeypatch.setattr(store, '_whole', lambda path: pytest.fail('read whole'))
    assert runs(kept).step.iloc[-1] == .5


def test_the_collector_is_left_as_it_was(kept):
    import gc
    gc.disable()
    try: runs(kept); assert not gc.isenabled()
    finally: gc.enable()
    runs(kept)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError): select(kept, keep=lambda r: 1/0)
    assert gc.isenabled()


# Tables for other programs

HARMFUL = ['=1+1', '+1', '-1', '@SUM(A1)', '\t=1', '\r=1', '  =1', '\n=1', '＝1', '=cmd|\' /C calc\'!A0', '"=1"', "'=1", 'a,"b"\nc', 'plain']


def test_a_spreadsheet_computes_nothing(tmp_path):
    for o in HARMFUL: save(make(recipe=dict(name=o, bs=8), error=o, status='failed', data=dict(name=o), device=dict(kind='cpu', name=o), metrics={o: -.5}, seconds=-1.5), tmp_path/'runs')
    assert export(tmp_path/'a.csv', tmp_path/'runs') == (len(HARMFUL), [])
    with open(tmp_path/'a.csv', encoding='utf-8', newline='') as f: lines = list(csv.reader(f))
    for cell in (c for line in lines for c in line):
        try: float(cell)
        except ValueError: assert cell.lstrip()[:1] not in tuple('=+-@＝') or cell == '', cell
    df = pd.read_csv(tmp_path/'a.csv')
    assert set(df.seconds) == {-1.5} and list(df.error) == [o if o in ('"=1"', "'=1", 'a,"b"\nc', 'plain') else f"'{o}".replace('\r', '\n') for o in runs(tmp_path/'runs').error]
    export(tmp_path/'a.parquet', tmp_path/'runs')
    assert set(pd.read_parquet(tmp_path/'a.parquet').error) == set(HARMFUL)


def test_both_formats_hold_the_same(kept, tmp_path):
    for o in ('csv', 'parquet'): assert export(tmp_path/f'a.{o}', kept, status='ok') == (3, [])
    a,b = pd.read_csv(tmp_path/'a.csv'),pd.read_parquet(tmp_path/'a.parquet')
    assert list(a.columns) == list(b.columns) == list(runs(kept).columns) and list(a['id']) == list(b['id']) and list(a.seconds) == list(b.seconds) == [10, 11, 12]
    pd.testing.assert_frame_equal(b, runs(kept, status='ok'), check_dtype=False)
    assert str(b.started.dtype).startswith('datetime64') and b.started.dt.tz is not None
    for o in ('csv', 'parquet'):
        assert export(tmp_path/f'none.{o}', kept, recipe='nosuch') == (0, [])
        assert list(getattr(pd, f'read_{o}')(tmp_path/f'none.{o}').columns) == COLUMNS
    (kept/'cut.json').write_text('{')
    assert len(export(tmp_path/'a.parquet', kept)[1]) == 1 and b'cut.json' not in (tmp_path/'a.parquet').read_bytes()


def test_steps(kept, tmp_path):
    one,two = (save(make(profile=profile(n), id=f'r{n}-20261121T12000000{i}-00000000'), kept) for i,n in enumerate((3, 2)))  # not of one millisecond
    (kept/'broken.json').write_text(json.dumps(json.loads(make(id='b').to_json()) | dict(profile=dict(fit=1))))
    df = steps(kept)
    assert len(df) == 2*(3+2) and set(df.action) == {'step', 'forward'} and list(df.groupby('id', sort=False).step.max()) == [2, 1] and df.tokens.isna().all()
    assert df.warmup.sum() == 4 and set(df.seconds) == {.5, .25} and 'broken.json' in df.attrs['passed_over'][0]
    for o,read in (('csv', pd.read_csv), ('parquet', pd.read_parquet)):
        n,bad = export(tmp_path/f's.{o}', kept, steps=True)
        got = read(tmp_path/f's.{o}')
        assert n == 2 and len(bad) == 5 and sum('has no profile, so no steps' in o for o in bad) == 4 and len(got) == 10 and list(got['id'].unique()) == [one.stem, two.stem] and got.seconds.sum() == df.seconds.sum()
    assert len(steps(kept, recipe='digits')) == 0 and list(steps(kept, recipe='nosuch').columns) == query.STEP_COLUMNS


def test_a_number_that_no_table_holds_is_left_out(kept, tmp_path):
    "It would be refused by pandas, with all other Runs"
    save(make(seed=10**30, repeat=-10**30, metrics=dict(accuracy=10**400)), kept)
    assert export(tmp_path/'a.csv', kept)[0] == 5 and export(tmp_path/'a.parquet', kept)[0] == 5
    assert runs(kept)[['seed', 'repeat', 'accuracy']].iloc[-1].isna().all()


def test_an_export_that_fails_leaves_what_was_there(kept, tmp_path, monkeypatch):
    for o in ('a.xlsx', 'a', '.csv'):
        with pytest.raises(UserError, match='.csv or .parquet'): export(tmp_path/o, kept)
    with pytest.raises(UserError, match='cannot be written: No such file'): export(tmp_path/'nowhere'/'a.csv', kept)
    export(tmp_path/'a.parquet', kept)
    with pytest.raises(UserError, match='nowhere is not there'): export(tmp_path/'a.parquet', tmp_path/'nowhere')
    before = (tmp_path/'a.parquet').read_bytes()
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    with pytest.raises(UserError, match=r"fastbench\[table\]"): export(tmp_path/'a.parquet', kept)
    assert (tmp_path/'a.parquet').read_bytes() == before and sorted(o.name for o in tmp_path.iterdir()) == ['a.parquet', 'runs']


def test_a_moment_is_the_same_in_every_zone():
    t = datetime(2026, 11, 20, 23, 30, tzinfo=timezone(timedelta(hours=-5)))
    assert moment(t) == moment(t.isoformat()) == moment('2026-11-21T04:30') == moment('2026-11-21T04:30:00Z') and moment(t, end=True) == moment(t)


@pytest.mark.parametrize('asked', [dict(recipe='None'), dict(data='N*'), dict(precision='None'), dict(device='none'), dict(device='one')])
def test_what_a_run_lacks_matches_nothing(tmp_path, asked):
    save(Run(recipe={}), tmp_path)
    assert len(runs(tmp_path)) == 1 and len(runs(tmp_path, **asked)) == 0


def test_the_dates_are_said_as_they_were_typed(tmp_path):
    with pytest.raises(UserError, match="since 2026-11-21 is not before until 2026-11-19"): runs(tmp_path, since='2026-11-21', until='2026-11-19')


def test_the_lesson_shows_its_warnings_whatever_the_filter():
    lesson = Path(__file__).parent.parent/'nbs/runs/03_query.ipynb'
    code = f'from execnb.shell import CaptureShell; CaptureShell(path={str(lesson.parent)!r}).execute({str(lesson)!r}, exc_stop=True)'
    env = os.environ | dict(IN_TEST='1')  # else its last cell writes the package anew, which other tests import
    got = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, env=env)
    assert not got.returncode, got.stderr[-2000:]

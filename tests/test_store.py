"What happens to a Run on its way to the disk and back: odd values, killed writers, many writers, full disks, files of others."
import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fastbench.runs import store
from fastbench.compare.sides import load_side
from fastbench.errors import UserError
from fastbench.runs.record import STATUSES, Run, from_json, new_id, plain, when
from fastbench.runs.store import NotKept, check_folder, files, find, load, load_all, of_recipe, save, write_whole


def make(**kwargs): return Run(**{'recipe': dict(name='digits-xresnet18', bs=64), **kwargs})


def strict(text): return json.loads(text, parse_constant=lambda o: pytest.fail(f'{o} is not JSON'))


# JSON, both ways

words = st.text(max_size=8)
whole = st.recursive(st.none() | st.booleans() | st.integers(-2**53, 2**53) | st.floats(allow_nan=False, allow_infinity=False) | words,
                     lambda o: st.lists(o, max_size=3) | st.dictionaries(words, o, max_size=3), max_leaves=6)
objects = st.dictionaries(words, whole, max_size=3)
numbers = st.dictionaries(words, st.floats() | st.integers(-2**53, 2**53), max_size=3)
known = {o.name for o in fields(Run)}
made = st.builds(Run, recipe=objects, id=st.just(new_id('r')), status=st.sampled_from(list(STATUSES)), error=st.none() | words, started=words.filter(bool),
    seconds=st.none() | st.floats(), repeat=st.integers(0, 9), seed=st.none() | st.integers(0, 2**53), data=objects, weights=words, precision=objects,
    device=objects, environment=objects, epochs=st.lists(numbers, max_size=3), metrics=numbers, profile=st.none() | numbers,
    warnings=st.lists(words, max_size=3), extra=objects.map(lambda d: {k: v for k,v in d.items() if k not in known - {'extra'}}))


def same(a, b):
    "Equal, type by type; NaN is NaN, and -0. is not 0."
    if isinstance(a, dict): return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list): return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


@settings(max_examples=200, deadline=None)
@given(made)
def test_round_trip(run):
    strict(run.to_json())
    back = from_json(run.to_json())
    for o in fields(Run): assert same(getattr(run, o.name), getattr(back, o.name)), o.name
    assert back.to_json() == run.to_json()


def test_a_nan_is_a_number_again_only_where_numbers_are():
    back = from_json(make(metrics=dict(a=math.nan), epochs=[dict(b=-math.inf)], data=dict(name='NaN'), error='Infinity').to_json())
    assert math.isnan(back.metrics['a']) and back.epochs[0]['b'] == -math.inf and back.data['name'] == 'NaN' and back.error == 'Infinity'


def test_odd_values_do_not_lose_a_run(tmp_path):
    odd = dict(f=np.float32(.5), i=np.int64(3), a=np.arange(3), p=Path('x'), t=(1, 2), n=np.float64('nan'), k={1: 2})
    run = load(save(make(error='file \udcff', data=odd, extra={'status': 'ok', 'note\udc80': 1}, status='failed'), tmp_path))
    assert run.data == dict(f=.5, i=3, a=[0, 1, 2], p='x', t=[1, 2], n='NaN', k={'1': 2}) and run.error == 'file \\udcff'
    assert run.status == 'failed' and run.extra == {'note\\udc80': 1}
    (tmp_path/f'{run.id}.json').read_bytes().decode('utf-8')


@pytest.mark.parametrize('field', sorted(known - {'extra'}))
def test_a_field_of_the_wrong_kind_is_named(field, tmp_path):
    d = make().as_dict() | {field: 'x' if not isinstance(getattr(make(), field), str) and field not in ('error', 'seed') else [1]}
    (tmp_path/'a.json').write_text(json.dumps(d))
    with pytest.raises(UserError, match=r'a\.json') as e: load(tmp_path/'a.json')
    assert field in str(e.value) and '\n' not in str(e.value)


def test_schemas():
    for bad in (0, -1, True, '1', 1.): pytest.raises(UserError, from_json, json.dumps(make().as_dict() | dict(schema=bad))).match('not a Run')
    pytest.raises(UserError, from_json, json.dumps(make().as_dict() | dict(schema=3)), 'new.json').match(r'new\.json has schema 3.*upgrade')
    later = from_json(json.dumps(make().as_dict() | dict(joules=12, extra=[1])))
    assert later.extra == dict(joules=12, extra=[1]) and strict(later.to_json())['joules'] == 12
    pytest.raises(UserError, from_json, json.dumps(make().as_dict() | dict(status='great'))).match('great')


def test_ids_are_unique_sort_by_time_and_are_file_names():
    ids = [new_id('digits') for _ in range(2000)]
    assert len(set(ids)) == 2000 and [when(o) for o in ids] == sorted(map(when, ids)) and all(map(when, ids))
    for name in ('a/b', '../../x', '.hidden', 'ü ö', 'x'*300, 'con:|?*'):
        o = new_id(name)
        assert Path(o).name == o and o[0] != '.' and len(o) < 150 and o.isascii() and ':' not in o and when(o)
    assert make().started.endswith('+00:00')


# A folder of Runs

def test_what_is_corrupt_is_named_and_passed_over(tmp_path):
    good = [save(make(), tmp_path) for _ in range(3)]
    bad = dict(cut=good[0].read_bytes()[:99], empty=b'', bytes=b'\xff\xfe\x00', list=b'[1]', deep=b'['*100000, foreign=b'{"name": "package"}')
    for k,v in bad.items(): (tmp_path/f'{k}.json').write_bytes(v)
    (tmp_path/'folder.json').mkdir()
    (tmp_path/'notes.txt').write_text('x')
    read,errors = load_all(tmp_path)
    assert {o.path for o in read} == set(map(str, good)) and len(errors) == 7
    for k in (*bad, 'folder'): assert sum(f'{k}.json' in o for o in errors) == 1, k
    assert not any('\n' in o for o in errors)


def test_find(tmp_path):
    a,b = [save(make(recipe=dict(name=o)), tmp_path) for o in ('digits', 'photos')]
    (tmp_path/'z-z-z.json').write_text('{}')  # has a date only by its looks
    for name,path in ((str(a), a), (a.stem, a), (a.name, a), ('dig', a), ('last', b), ('photos', b)): assert find(name, tmp_path).id == path.stem
    for name,why in (('nosuch', 'unknown Run'), ('x'*5000, 'unknown Run'), ('a\0b', 'unknown Run'), ('', 'beginning of 3')):
        with pytest.raises(UserError, match=why): find(name, tmp_path)
    with pytest.raises(UserError, match='no Runs in'): find('last', tmp_path/'nothing')
    with pytest.raises(UserError, match='is a folder, not a Run: name a file in it'): find(str(tmp_path), tmp_path/'nothing')
    time.sleep(.002)  # an id knows the millisecond
    c = save(make(recipe=dict(name='digits')), tmp_path)
    with pytest.raises(UserError, match='beginning of 2 Runs'): find('digits', tmp_path)
    assert [o.id for o in load_all(tmp_path, 1)[0]] == [c.stem]


def test_a_folder_that_is_none(tmp_path):
    (tmp_path/'f').write_text('x')
    assert files(tmp_path/'nothing') == []
    for o in (tmp_path/'f', tmp_path/'f'/'g'):
        with pytest.raises(UserError, match='f is a file'): check_folder(o)
        with pytest.raises(UserError, match='f is a file'): files(o)
    check_folder(tmp_path/'new'/'deep')
    assert list((tmp_path/'new'/'deep').iterdir()) == []


@pytest.mark.skipif(os.name != 'posix', reason='permissions of POSIX')
def test_a_folder_without_permission_is_known_before_the_run():
    with tempfile.TemporaryDirectory() as d:  # pytest's own folder is closed to others, and root may write anywhere
        os.chmod(d, 0o555)
        pid = os.fork()
        if not pid:
            if os.geteuid() == 0: os.setuid(65534)
            try: check_folder(d)
            except UserError as e: os._exit(7 if 'Permission denied' in str(e) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        os.chmod(d, 0o755)


def test_leftovers_are_cleared_and_nothing_else(tmp_path):
    old,new,theirs = (tmp_path/o for o in (f'.{new_id("a")}.json.12.tmp', f'.{new_id("b")}.json.12.tmp', '.their.tmp'))
    for o in (old, new, theirs): o.write_text('{"sch')
    for o in (old, theirs): os.utime(o, (time.time()-1e5,)*2)
    assert load_all(tmp_path) == ([], []) and old.exists()  # reading changes nothing
    save(make(), tmp_path)
    assert not old.exists() and new.exists() and theirs.exists()


# Faults

WRITER = '''
import sys
from fastbench.runs.record import Run
from fastbench.runs.store import save

class Fast(Run):  # made in no time, so that most of the time is spent writing
    def to_json(self): return text.replace('THE ID', self.id)

text = Run(recipe=dict(name='digits'), id='THE ID', profile=dict(values=list(range(int(sys.argv[3]))))).to_json()
for i in range(int(sys.argv[2])):
    r = Fast(recipe=dict(name='digits'))
    save(r, sys.argv[1])
    print(r.id, flush=True)
'''


def writer(folder, n, size): return subprocess.Popen([sys.executable, '-c', WRITER, str(folder), str(n), str(size)], stdout=subprocess.PIPE, text=True)


def test_several_writers(tmp_path):
    ps = [writer(tmp_path, 20, 10) for _ in range(6)]
    ids = [o for p in ps for o in p.communicate(timeout=120)[0].split()]
    good,bad = load_all(tmp_path)
    assert len(ids) == 120 and sorted(o.id for o in good) == sorted(ids) and not bad
    assert len(list(tmp_path.iterdir())) == 120


def test_kill_9_of_a_writer_loses_no_finished_run_and_leaves_no_half_file(tmp_path):
    cut = 0
    for seed in range(40):
        p = writer(tmp_path, 10**6, 100_000)
        told = [p.stdout.readline().strip()]
        time.sleep(random.Random(seed).random()*.1)
        p.kill()
        told += p.communicate(timeout=60)[0].split()
        good,bad = load_all(tmp_path)
        assert not bad and set(told) <= {o.id for o in good} and all(len(o.profile['values']) == 100_000 for o in good)
        cut += len(list(tmp_path.glob('.*.tmp')))
        for o in tmp_path.iterdir(): o.unlink()
        if seed > 5 and cut > 1: return
    pytest.fail('no writer was killed in the middle of a write: this shows nothing')


def no_room(*args): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_rescues_the_new_run_and_keeps_the_old(tmp_path, monkeypatch):
    kept,spare = save(make(), tmp_path/'runs'),tmp_path/'spare'
    monkeypatch.setattr(tempfile, 'gettempdir', lambda: str(spare))
    whole = write_whole
    monkeypatch.setattr(store, 'write_whole', lambda path, text: no_room() if path.parent.name == 'runs' else whole(path, text))
    new = make()
    with pytest.raises(NotKept, match='No space left.*it is kept as') as e: save(new, tmp_path/'runs')
    assert str(spare/f'{new.id}.json') in str(e.value) and load(spare/f'{new.id}.json').id == new.id
    monkeypatch.setattr(store, 'write_whole', whole)
    monkeypatch.setattr(os, 'fsync', no_room)
    with pytest.raises(NotKept, match='is lost'): save(make(), tmp_path/'runs')
    assert [o.name for o in (tmp_path/'runs').iterdir()] == [kept.name] and len(list(spare.iterdir())) == 1


@pytest.fixture
def tiny(tmp_path):
    "A disk of 256 KiB"
    d = tmp_path/'disk'
    d.mkdir()
    if not shutil.which('mount') or subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=256k', 'tmpfs', str(d)], capture_output=True).returncode:
        pytest.skip('this user may not mount')
    yield d
    subprocess.run(['umount', str(d)], check=True)


def test_a_disk_that_is_really_full(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'gettempdir', lambda: str(tmp_path))
    n = 0
    with pytest.raises(NotKept, match='No space left'):
        for n in range(100): save(make(profile=dict(values=list(range(8000)))), tiny)
    good,bad = load_all(tiny)
    assert n > 2 and len(good) == n and not bad and not list(tiny.glob('.*.tmp'))
    assert len(list(tmp_path.glob('*.json'))) == 1 and not load_all(tmp_path)[1]
    (tiny/'fill').write_bytes(b'') if (n := shutil.disk_usage(tiny).free) < 4096 else (tiny/'fill').write_bytes(b'x'*n)
    with pytest.raises(NotKept, match='kept as'): save(make(), tiny)


def test_a_folder_that_cannot_be_synced_still_keeps_the_run(tmp_path, monkeypatch):
    real = os.fsync
    def fsync(fd): real(fd) if os.path.isfile(f'/proc/self/fd/{fd}') else (_ for _ in ()).throw(OSError(errno.EINVAL, 'no'))
    if not os.path.isdir('/proc/self/fd'): pytest.skip('needs /proc')
    monkeypatch.setattr(os, 'fsync', fsync)
    assert load(save(make(), tmp_path)).id


def test_written_then_flushed_then_renamed(tmp_path, monkeypatch):
    "The order that survives a power cut: data to the disk, then the name, then the folder"
    seen,fsync,replace = [],os.fsync,os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: (seen.append('fsync'), fsync(fd)))
    monkeypatch.setattr(os, 'replace', lambda a, b: (seen.append('replace'), replace(a, b)))
    save(make(), tmp_path)
    assert seen == ['fsync', 'replace', 'fsync'][:3 if os.name == 'posix' else 2]


def test_plain_is_strict(): assert strict(json.dumps(plain(dict(a=math.inf, b=[math.nan, -math.inf])))) == dict(a='Infinity', b=['NaN', '-Infinity'])


@pytest.mark.parametrize('name', ['../evil', 'a/b', '.', '..', 'a\\b', '.hidden', 'C:evil', 'a\nb', 'x'*300, 5])
def test_an_id_is_no_path(tmp_path, name):
    with pytest.raises(UserError, match='not a file name'): save(make(id=name), tmp_path/'runs')
    assert not [*tmp_path.rglob('*.json')]


def test_none_of_the_newest_is_none(tmp_path):
    save(make(), tmp_path)
    assert load_all(tmp_path, last=0) == ([], []) and len(load_all(tmp_path, last=1)[0]) == len(load_all(tmp_path)[0]) == 1


def test_a_file_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'gettempdir', lambda: str(tmp_path/'spare'))
    (tmp_path/'runs').write_text('notes')
    with pytest.raises(UserError, match='runs is a file, not a folder') as e: save(make(), tmp_path/'runs')
    assert 'room' not in str(e.value)


def test_two_runs_are_both_named(tmp_path):
    a, b = (save(make(), tmp_path).stem for _ in range(2))
    with pytest.raises(UserError, match='is the beginning of 2 Runs') as e: find(os.path.commonprefix([a, b]), tmp_path)
    assert a in str(e.value) and b in str(e.value) and 'among' not in str(e.value)


@pytest.mark.parametrize('odd', [dict(x=1), dict(seconds='x', steps=[1]), dict(seconds=1., steps=3), dict(seconds=None, steps=[1]), dict(seconds=True, steps='ab')])
def test_odd_parts_of_a_training_are_not_told(odd): assert make(resumed=odd, id='a').headline == make(id='a').headline


def test_a_run_as_the_last_line_of_a_cell_says_how_it_ended_not_its_fields():
    "A notebook showed the repr of a dataclass: some thousand characters of dictionaries"
    run = make(recipe=dict(name='<mine>'), status='failed', error='a <b> is gone', warnings=['the battery'])
    html = run._repr_html_()
    assert '&lt;mine&gt;' in html and 'ended by an error (a &lt;b&gt; is gone)' in html and 'warning: the battery' in html
    assert all(o in str(run) for o in run.lines) and '<mine>' not in html


def test_a_recipe_of_ones_own_is_named_as_it_is_typed(tmp_path):
    "Files have no colon in their names; another function that begins alike is not meant"
    for o in ('train.py:make', 'train.py:make_large', 'train.py:make'): save(Run(recipe=dict(name=o), started='now'), tmp_path)
    assert [load(o).recipe['name'] for o in of_recipe('train.py:make', tmp_path)] == ['train.py:make']*2
    assert find('train.py:make_large', tmp_path).recipe['name'] == 'train.py:make_large'
    assert [len(load_side(o, tmp_path)[0]) for o in ('train.py:make', 'train.py:make_large', 'train.py_make')] == [2, 1, 3]
    with pytest.raises(UserError, match="'train.py:make' is the beginning of 2 Runs"): find('train.py:make', tmp_path)

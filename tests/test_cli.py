"The `fastbench` command, as a person and as a program use it: words in, answers and exit codes out, no traceback."
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import psutil
import pytest

from fastbench import __version__
from fastbench import cli
from fastbench.bench import launch as launch_module
from fastbench.errors import UserError
from fastbench.machine.download import DataUnavailable
from fastbench.measure.table import seconds
from fastbench.recipe import as_dict, get_recipe, suites, typical_seconds
from fastbench.runs.record import Run
from fastbench.runs.store import load, load_all, save

LIMIT = 600  # seconds; only against hanging


def make(**kwargs): return Run(**{'recipe': dict(vars(get_recipe('digits-xresnet18'))), **kwargs})


def fastbench(*args, env=None, **kwargs):
    return subprocess.run([sys.executable, '-m', 'fastbench', *map(str, args)], capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **(env or {})}, **kwargs)


def command(monkeypatch, capsys, *args):
    "The command in this process: exit code, stdout, stderr"
    monkeypatch.setattr(sys, 'argv', ['fastbench', *map(str, args)])
    with pytest.raises(SystemExit) as e: cli.main()
    return (e.value.code or 0, *capsys.readouterr())


@pytest.fixture
def launched(monkeypatch):
    "Runs that are not trained: a list of what was asked for; `launched.outcome` makes the Run, or raises"
    class Asked(list): outcome = staticmethod(lambda r, **kwargs: make(recipe=as_dict(r), seconds=1., metrics=dict(accuracy=.9), seed=r.seed + kwargs['repeat'],
                                                                      repeat=kwargs['repeat']))
    asked = Asked()
    def launch(r, folder, tell=None, **kwargs):
        asked.append((r, kwargs))
        time.sleep(.002)  # an id knows the millisecond
        for o in (dict(phase='data'), dict(phase='train', epoch=0, epochs=1, step=1, steps=2), dict(phase='epoch', epoch=0, epochs=1, values=dict(valid_loss=.5))): tell(o)
        return str(save(asked.outcome(r, **kwargs), folder))
    monkeypatch.setattr(launch_module, 'launch', launch)
    return asked


# Words in

def test_options_become_the_recipe(launched, monkeypatch, capsys, tmp_path):
    code,*_ = command(monkeypatch, capsys, 'run', 'digits-xresnet18', *'--repeats 2 --precision bf16 --batch-size 7 --epochs 3 --batches 5 --device cuda:1 --data auto '
                      '--workers 1 --seed 9 --offline --energy'.split(), '--out', tmp_path)
    want = get_recipe('digits-xresnet18', precision='bf16', bs=7, epochs=3, batches=5, data='auto:digits', workers=1, seed=9)
    assert code == 0 and launched == [(want, dict(repeat=i, device='cuda:1', offline=True, energy=True)) for i in range(2)]
    assert [o.seed for o in load_all(tmp_path)[0]] == [9, 10]


@pytest.mark.parametrize('name', ['launch', 'scale', 'doctor'])
def test_what_trains_one_recipe_takes_the_options_of_run(name, monkeypatch, capsys, tmp_path):
    "One need not know that --epochs is a field"
    asked = []
    def instead(*args, **kwargs):
        asked.append((args, kwargs))
        raise UserError('that is all')
    for o in ('fastbench.command.launch.run_all', 'fastbench.command.scale.run_all', 'fastbench.bench.learner.bench_learner'): monkeypatch.setattr(o, instead)
    words = '--precision bf16 --batch-size 8 --epochs 3 --batches 5 --data auto --workers 1 --seed 9 --sample .5 --offline --set wd=.1'.split()
    assert command(monkeypatch, capsys, name, 'digits-xresnet18', *words, *('--out', tmp_path)*(name != 'doctor'))[0] == 2
    ((what, *_), how), = asked
    want = get_recipe('digits-xresnet18', precision='bf16', bs=8, epochs=3, batches=5, data='auto:digits', workers=1, seed=9, sample=.5, wd=.1)
    assert {getattr(o, 'recipe', o) for o in (what if isinstance(what, list) else [what])} == {want} and how['offline']


def test_doctor_of_the_machine_takes_no_field(monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, 'doctor', '--no-trial', '--epochs', '2')
    assert code == 2 and err == 'fastbench: epochs would change a recipe: name it, `fastbench doctor RECIPE`\n'


def test_the_largest_batch_of_another_size(monkeypatch, capsys):
    made = []
    monkeypatch.setattr('fastbench.bench.learner.bench_learner', lambda recipe, **_: made.append(recipe) or SimpleNamespace(find_batch_size=lambda **_: 1/0))
    command(monkeypatch, capsys, 'find-batch-size', 'photos-xresnet18', '--set', 'size=48')
    assert made[0].size == 48


def test_a_suite_ends_with_its_table(launched, monkeypatch, capsys, tmp_path):
    code,out,_ = command(monkeypatch, capsys, 'run', 'colab', '--epochs', '1', '--device', 'cpu', '--out', tmp_path, '--plot', tmp_path/'x.png')
    table = out.partition('\nsuite colab\n')[2]
    assert code == 0 and '556.4 s' in table and 'epochs 1 instead of 4' in table and (tmp_path/'x.png').stat().st_size > 1000
    for words,why in ((['digits-xresnet18'], 'none is named'), (['quick', 'colab'], 'several are named')):
        code,_,err = command(monkeypatch, capsys, 'run', *words, '--out', tmp_path, '--plot', 'x.png')
        assert code == 2 and why in err and err.count('\n') == 1
    code,out,_ = command(monkeypatch, capsys, 'run', 'digits-xresnet18', 'photos-xresnet18', '--out', tmp_path)
    assert '\nsuite ' not in out


def test_quick_is_the_default_and_suites_are_recipes(launched, monkeypatch, capsys, tmp_path):
    command(monkeypatch, capsys, 'run', '--out', tmp_path)
    assert tuple(r.name for r,_ in launched) == suites()['quick']
    launched.clear()
    command(monkeypatch, capsys, 'run', 'quick', 'digits-xresnet18', '--repeats', 2, '--out', tmp_path)
    assert [r.name for r,_ in launched] == [*suites()['quick'], 'digits-xresnet18']*2  # interleaved


def test_a_line_before_each_run_says_how_long_it_takes(launched, monkeypatch, capsys, tmp_path):
    err = command(monkeypatch, capsys, 'run', '--out', tmp_path)[2]
    for name in suites()['quick']: assert re.search(f'^{name}, about .* on two cores$', err, re.M), err
    run = load(next(tmp_path.glob('digits*.json')))
    run.recipe, run.seconds = {**run.recipe, **as_dict(get_recipe('digits-xresnet18', epochs=3))}, 7.5
    save(run, tmp_path)
    err = command(monkeypatch, capsys, 'run', 'digits-xresnet18', '--epochs', 3, '--out', tmp_path)[2]
    assert 'digits-xresnet18, about 7.50 s as last time' in err
    about = seconds(typical_seconds(get_recipe('digits-xresnet18'))/2)
    assert f'digits-xresnet18, about {about} on two cores' in command(monkeypatch, capsys, 'run', 'digits-xresnet18', '--epochs', 2, '--out', tmp_path)[2]


def test_runs_are_kept_here_unless_told(launched, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert 'kept in fastbench-runs' in command(monkeypatch, capsys, 'run', 'digits-xresnet18')[1]
    monkeypatch.setenv('FASTBENCH_OUT', 'there')
    command(monkeypatch, capsys, 'run', 'digits-xresnet18')
    assert len(load_all('fastbench-runs')[0]) == len(load_all('there')[0]) == 1


# Answers out

def test_lines_when_piped_and_the_end(launched, monkeypatch, capsys, tmp_path):
    code,out,err = command(monkeypatch, capsys, 'run', 'digits-xresnet18', '--out', tmp_path, '--repeats', 2)
    about = seconds(typical_seconds(get_recipe('digits-xresnet18')))
    assert err == (f'digits-xresnet18 1/2, about {about} on two cores\n  epoch 1/1: valid_loss 0.5\n'
                   'digits-xresnet18 2/2, about 1.00 s as last time\n  epoch 1/1: valid_loss 0.5\n')
    assert code == 0 and 'accuracy 0.9' in out and all(f'kept in {o.path}' in out for o in load_all(tmp_path)[0])


def test_json_alone_on_stdout(launched, monkeypatch, capsys, tmp_path):
    launched.outcome = lambda r, **kwargs: make(status='diverged', metrics=dict(valid_loss=math.nan))
    code,out,err = command(monkeypatch, capsys, 'run', 'digits-xresnet18', '--json', '--out', tmp_path)
    d, = json.loads(out, parse_constant=lambda o: pytest.fail(f'{o} is not JSON'))
    assert code == 4 and d['status'] == 'diverged' and d['rows'] == [] and d['verdict'] is None and d['metrics']['valid_loss'] == 'NaN' and 'epoch' in err
    assert load(d['path']).id == d['id']


def test_a_bar_in_a_terminal(tmp_path):
    "With no torch: what is launched is not trained"
    pty = pytest.importorskip('pty')
    code = '''import sys
import fastbench.bench.launch as l
from fastbench.runs.record import Run
from fastbench.runs.store import save
def launch(r, folder, tell, **kwargs):
    for i in range(1, 4):
        tell(dict(phase='train', epoch=0, epochs=2, step=i, steps=3))
    sys.stdin.readline()
    tell(dict(phase='stopping', asked=1))
    sys.stdin.readline()
    return str(save(Run(recipe=vars(r)), folder))
l.launch = launch
from fastbench.cli import main
sys.argv[1:] = ['run', 'digits-xresnet18', '--json', '--out', sys.argv[1]]
main()'''
    main,side = pty.openpty()
    p = subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=side, env={**os.environ, 'TERM': 'xterm', 'COLUMNS': '100'})
    os.close(side)
    def go_on(): p.stdin.write(b'\n'), p.stdin.flush()
    seen = read_all(main, (b'epoch 1/2, train 3/3', go_on), (b'finishing the step', go_on))  # a bar is drawn now and then
    assert 'digits-xresnet18' in seen and '━' in seen and 'epoch 1/2, train 3/3' in seen and 'finishing the step' in seen and '\x1b[' in seen
    assert json.loads(p.communicate(timeout=LIMIT)[0])[0]['status'] == 'ok' and p.returncode == 0


def read_all(fd, *waits):
    "All that comes; `waits`: what to wait for, and what to do then"
    seen, waits = b'', [*waits]
    while True:
        try: got = os.read(fd, 65536)
        except OSError: got = b''
        if not got: return seen.decode(errors='replace')
        seen += got
        while waits and waits[0][0] in seen: waits.pop(0)[1]()


# Exit codes

@pytest.mark.parametrize('status,code', [('ok', 0), ('failed', 4), ('diverged', 4), ('interrupted', 4)])
def test_exit_code_of_a_run(launched, monkeypatch, capsys, tmp_path, status, code):
    launched.outcome = lambda r, **kwargs: make(status=status, error='RuntimeError: odd' if status == 'failed' else None)
    got,out,_ = command(monkeypatch, capsys, 'run', 'quick', '--out', tmp_path)
    assert got == code and status in out and len(launched) == 3


def test_one_that_cannot_be_run_does_not_stop_the_others(launched, monkeypatch, capsys, tmp_path):
    good = launched.outcome
    def outcome(r, **kwargs):
        if r.name == 'digits-xresnet18': raise DataUnavailable('digits cannot be had')
        return good(r, **kwargs)
    launched.outcome = outcome
    code,out,err = command(monkeypatch, capsys, 'run', 'quick', '--repeats', 3, '--out', tmp_path)
    assert code == 4 and len(load_all(tmp_path)[0]) == 6 and len(launched) == 7 and err.count('fastbench: digits cannot be had') == 1


@pytest.mark.parametrize('kind,code', [('UserError', 2), ('NotKept', 4), ('CannotStart', 4)])
def test_exit_code_of_a_refusal(launched, monkeypatch, capsys, tmp_path, kind, code):
    class_ = next(getattr(m, kind) for m in (cli, launch_module) if hasattr(m, kind))
    def outcome(r, **kwargs): raise class_('odd\nthing')
    launched.outcome = outcome
    got,out,err = command(monkeypatch, capsys, 'run', 'quick', '--out', tmp_path, '--json')
    assert got == code and err.count('fastbench: odd thing\n') == 1 and json.loads(out) == []  # said once, in one line


@pytest.mark.parametrize('error,code', [(lambda path: launch_module.Interrupted(2, path), 130), (lambda path: launch_module.Interrupted(15), 143),
                                        (lambda path: KeyboardInterrupt(), 130)])
def test_after_a_signal_nothing_more_is_run_and_what_is_kept_is_said(launched, monkeypatch, capsys, tmp_path, error, code):
    path,good = save(make(status='interrupted'), tmp_path/'part'),launched.outcome
    def outcome(r, **kwargs):
        if len(launched) == 2: raise error(str(path))
        return good(r, **kwargs)
    launched.outcome = outcome
    got,out,err = command(monkeypatch, capsys, 'run', 'quick', '--repeats', 9, '--out', tmp_path)
    first, = load_all(tmp_path)[0]
    assert got == code and len(launched) == 2 and first.path in err and f'kept in {first.path}' in out
    assert (str(path) in err) == (str(path) in out) == (code == 130 and 'Interrupted' in repr(error(0)))


# two of them: ours, and those of a typer that checks without pydantic
MISTAKES = [('run --foo', 'No such option'), ('run --precision fp8', 'fp8'), ('run --batch-size 0', '--batch-size'), ('run --repeats 0', ("'--repeats': 0 is less than 1", "'--repeats': 0 is not in the range x>=1")),
            ('run --epochs x', ("'--epochs': 'x' is not a whole number", "'--epochs': 'x' is not a valid integer")), ('run --sample x', ("'--sample': 'x' is not a number", "'--sample': 'x' is not a valid float")), ('run --workers -1', '--workers'), ('run nosuch', "unknown recipe or suite 'nosuch'"), ('nosuch', 'nosuch'),
            ('run digit-xresnet18', "did you mean 'digits-xresnet18'"), ('list nosuch', 'nosuch'), ('show nosuch', 'no Runs in fastbench-runs'), ('show a b', ''),
            ('run digits-xresnet18 --out FILE', 'is a file'), ('list --out FILE', 'is a file'), ('show last --out FILE', 'is a file'),
            ('list runs --since yesterday', "since='yesterday' is not a date"), ('list --status okay', 'unknown status'), ('list runs --commit main', 'hexadecimal'),
            ('ab digits-xresnet18 --epochs 2', '--both epochs=... sets it for A and B, --set epochs=... for B alone'), ('ab digits-xresnet18 --batch-size 8', '--both bs=...'), ('ab digits-xresnet18 --foo', 'No such option'),
            ('export runs.xlsx', '.csv or .parquet'), ('export', 'FILE'), ('export no/where.csv', 'cannot be written'), ('export a.csv --until 2026-13-01', 'is not a date')]


@pytest.mark.parametrize('args,why', MISTAKES)
def test_a_mistake_is_one_line(monkeypatch, capsys, tmp_path, args, why):
    (tmp_path/'file').write_text('')
    monkeypatch.chdir(tmp_path)
    code,out,err = command(monkeypatch, capsys, *(str(tmp_path/'file') if o == 'FILE' else o for o in args.split()))
    assert code == 2 and out == '' and err.count('\n') == 1 and err.startswith('fastbench: ') and any(o in err for o in ([why] if isinstance(why, str) else why))
    assert not re.search('Value error|Input should|unable to parse', err), 'the words of pydantic'
    assert sorted(os.listdir(tmp_path)) == ['file']


# list and show

@pytest.fixture
def kept(tmp_path):
    "A folder with three Runs and a broken file"
    for i,o in enumerate(('ok', 'failed', 'diverged')):
        save(make(status=o, seed=i, error='RuntimeError: odd' if o == 'failed' else None, metrics=dict(valid_loss=math.nan)), tmp_path)
        time.sleep(.002)
    (tmp_path/'cut.json').write_text('{"schema"')
    return tmp_path


def test_list(kept, monkeypatch, capsys):
    code,out,err = command(monkeypatch, capsys, 'list', '--out', kept)
    assert code == 0 and all(o in out for o in ('quick', 'digits-xresnet18', 'imagenette-xse_resnet50', 'Suites', 'Recipes')) and out.count('digits-xresnet18-2') == 3
    assert err.count('\n') == 1 and 'cut.json' in err
    assert command(monkeypatch, capsys, 'list', 'runs', '-n', 1, '--out', kept)[1].count('digits-xresnet18-2') == 1
    assert 'none yet' in command(monkeypatch, capsys, 'list', 'runs', '--out', kept/'nothing')[1]


def test_a_list_is_read_down_its_columns(kept, monkeypatch, capsys):
    def said(width, *args):
        if width: monkeypatch.setattr('fastbench.command.keep._room', lambda: width)
        return command(monkeypatch, capsys, 'list', *args, '--out', kept)[1].splitlines()
    recipes = said(None, 'recipes')
    starts = {o.index(k) for o in recipes if (k := next((k for k in ('XResNet ', 'Transformer ', 'Small ') if k in o), None))}
    assert len(starts) == 1 and any(o.split()[:5] == ['dawn-*', 'Small', 'cifar10', 'yes', 'GPU'] for o in recipes) and not any('dawn-once' in o for o in recipes)
    assert any(o.split()[:5] == ['digits-xresnet18', 'XResNet', 'digits', 'no', 'any'] for o in recipes) and max(map(len, recipes)) > 120
    assert any(o.startswith('  dawn ') and o.endswith('11 rungs: baseline, simple-stem, once, bulk, main, larger-batch, fast-norm, cutout, resnet9, ten-epochs, airbench') for o in said(None, 'suites'))
    for o in ('recipes', 'suites', 'runs'): assert max(map(len, said(80, o))) <= 80
    assert said(80, 'recipes')[1].split() == ['kind', 'data', 'download', 'device'] and 'scanned' not in ' '.join(said(80, 'recipes')) and 'scanned' in ' '.join(said(200, 'recipes'))


def test_a_long_name_leaves_the_other_columns_their_room(monkeypatch, capsys):
    "That of a training of one's own is a path"
    from fastbench import recipe
    recipes = {'p'*61: get_recipe('digits-xresnet18', name='p'*61), 'q'*90: get_recipe('digits-xresnet18', name='q'*90)}
    for k, o in recipes.items(): monkeypatch.setitem(recipe._registry, k, o)
    for room in (80, 120):
        monkeypatch.setattr('fastbench.command.keep._room', lambda: room)
        lines = command(monkeypatch, capsys, 'list', 'recipes')[1].splitlines()
        i = lines.index('  ' + 'q'*90)
        assert lines[i + 1].split()[:4] == ['XResNet', 'digits', 'no', 'any'] and max(len(o) for o in lines if o != lines[i]) <= room
        assert lines[i + 1].index('XResNet') == next(o.index('XResNet') for o in lines if o.startswith('  digits-xresnet18'))


def test_runs_are_told_apart_by_what_differs(tmp_path, monkeypatch, capsys):
    for i, bs in enumerate((64, 128)): save(make(id=f'digits-xresnet18-20261120T12000000{i}-00000000', recipe=dict(name='digits-xresnet18', bs=bs, size=32), precision=dict(effective='fp32')), tmp_path)
    lines = command(monkeypatch, capsys, 'list', 'runs', '--out', tmp_path)[1].splitlines()
    assert [('batch 64' in o, 'batch 128' in o) for o in lines[1:]] == [(True, False), (False, True)] and not any('fp32' in o or ' 32 ' in o for o in lines)


def test_what_needs_no_download():
    from fastbench.recipe import ALWAYS_THERE
    from fastbench.text.sources import text_sources
    from fastbench.vision.sources import sources
    assert {*ALWAYS_THERE} == {k for k, o in {**sources, **text_sources}.items() if not o.url}


def test_many_names_are_not_all_said(monkeypatch, capsys):
    "A suggestion first, then where all stand"
    for args, says in ((('run', 'digit-xresnet18'), "unknown recipe or suite 'digit-xresnet18'; did you mean 'digits-xresnet18'? `fastbench list` shows all"),
                       (('run', 'digits-xresnet18', '--set', 'batch_size=3'), "unknown field 'batch_size'; did you mean 'bs'? `fastbench show RECIPE` lists the fields")):
        assert command(monkeypatch, capsys, *args)[2] == f'fastbench: {says}\n'


def test_list_and_export_of_some(kept, monkeypatch, capsys, tmp_path):
    code,out,err = command(monkeypatch, capsys, 'list', '--status', 'failed', '--status', 'diverged', '--out', kept)
    assert code == 0 and out.count('digits-xresnet18-2') == 2 and 'Suites' not in out and 'cut.json' in err
    found = json.loads(command(monkeypatch, capsys, 'list', 'runs', '--status', 'failed', '--json', '--out', kept)[1])['runs']
    assert [o['seed'] for o in found] == [1]
    code,out,_ = command(monkeypatch, capsys, 'list', '--recipe', 'imdb-*', '--out', kept)
    assert code == 0 and 'none like that' in out
    code,out,err = command(monkeypatch, capsys, 'export', tmp_path/'a.csv', '--status', 'ok', '--out', kept)
    assert code == 0 and out == f'1 Run written to {tmp_path/"a.csv"}\n' and 'cut.json' in err and (tmp_path/'a.csv').read_text().count('\n') == 2
    _,out,err = command(monkeypatch, capsys, 'export', tmp_path/'a.parquet', '--steps', '--out', kept)
    assert out.startswith('0 Runs') and err.count('has no profile, so no steps') == 3
    d = json.loads(command(monkeypatch, capsys, 'list', '--json', '--out', kept)[1], parse_constant=lambda o: pytest.fail(o))
    assert set(d) == {'suites', 'recipes', 'runs'} and [o['status'] for o in d['runs']] == ['ok', 'failed', 'diverged'] and 'profile' not in d['runs'][0]
    assert [load(o['path']).id for o in d['runs']] == [o['id'] for o in d['runs']]
    for _ in range(25): save(make(), kept)
    count = lambda *args: command(monkeypatch, capsys, 'list', 'runs', '--out', kept, *args)[1].count('"id"' if args else 'digits-xresnet18-2')
    assert count() == 20 and count('--json') == 28


def test_suggestions_of_commands_rungs_and_recipes(tmp_path):
    for words, said in (('rum', "Did you mean 'run'? `fastbench"), ('ladder dawn-photos --rungs baselin', "did you mean 'baseline'?"), ('show digits-xresnet81', "did you mean 'digits-xresnet18'?"),
                        (f'run digits-xresnet18 --data {tmp_path} --valid 150%', "'150%' is not a share")):
        p = subprocess.run([sys.executable, '-m', 'fastbench', *words.split()], capture_output=True, text=True, cwd=tmp_path)
        assert p.returncode == 2 and said in p.stderr and p.stderr.count('\n') == 1, p.stderr


def test_show(kept, monkeypatch, capsys):
    a,b,c = load_all(kept)[0]
    for name,run in ((a.id, a), (b.path, b), ('last', c), (c.id[:-3], c)):
        d = json.loads(command(monkeypatch, capsys, 'show', name, '--json', '--out', kept)[1])
        assert (d['id'], d['seed'], d['path']) == (run.id, run.seed, run.path) and d['rows'] == []
    assert 'RuntimeError: odd' in command(monkeypatch, capsys, 'show', b.id, '--out', kept)[1]
    assert 'not a timing' in command(monkeypatch, capsys, 'show', '--out', kept)[1]
    code,_,err = command(monkeypatch, capsys, 'show', 'digits', '--out', kept)
    assert code == 2 and 'beginning of 3 Runs' in err
    assert command(monkeypatch, capsys, 'show', kept/'cut.json')[0] == 2


def test_the_beginning_of_several_runs_is_no_unknown_name(kept, monkeypatch, capsys):
    "Though it is like the name of a recipe"
    for name in ('digits-xresnet18-2', 'digits-xresnet18-20'):
        code,_,err = command(monkeypatch, capsys, 'show', name, '--out', kept)
        assert code == 2 and f"{name!r} is the beginning of 3 Runs" in err and 'unknown' not in err and err.count('\n') == 1
    for o in kept.glob('*.json'): o.write_text('{')
    assert 'is not JSON' in command(monkeypatch, capsys, 'show', sorted(kept.glob('digits*.json'))[0].stem[:-3], '--out', kept)[2]
    for out in (kept, kept/'none'): assert "did you mean 'digits-xresnet18'?" in command(monkeypatch, capsys, 'show', 'digits-xresnet19', '--out', out)[2]


def test_a_reader_that_goes_away(kept):
    p = subprocess.Popen([sys.executable, '-m', 'fastbench', 'list', '--json', '--out', str(kept)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.close()
    assert p.stderr.read().decode().count('\n') == 1 and p.wait(LIMIT) == 141  # the broken file is named, nothing else


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_an_answer_that_cannot_be_written(kept):
    with open('/dev/full', 'w') as full: p = subprocess.run([sys.executable, '-m', 'fastbench', 'list', '--out', str(kept)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert p.returncode == 4 and 'the answer cannot be written: No space left' in p.stderr and 'Traceback' not in p.stderr
    p = subprocess.run(['sh', '-c', f'{sys.executable} -m fastbench show last --out "{kept}" >&-'], stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert p.returncode in (0, 2) and 'Traceback' not in p.stderr


def test_an_error_of_fastbench_is_no_gate(monkeypatch, capsys, kept):
    def broken(*args, **kwargs): raise ZeroDivisionError('ours')
    monkeypatch.setattr('fastbench.command.keep.select', broken)
    code,_,err = command(monkeypatch, capsys, 'list', '--out', kept)
    assert code == 70 and err.rstrip().endswith('ZeroDivisionError: ours') and 'Traceback' in err


def test_a_terminal_without_all_letters(kept):
    p = fastbench('list', '--out', kept, env=dict(PYTHONIOENCODING='ascii'))
    assert p.returncode == 0 and 'digits-xresnet18' in p.stdout and 'Traceback' not in p.stderr


def test_the_help_says_in_one_whole_line_what_each_command_does(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    code, out, _ = command(monkeypatch, capsys, '--help')
    lines = out.split('Commands:')[1].strip().splitlines()
    assert code == 0 and len(lines) > 12 and all(o.endswith('.') and not o.endswith('...') for o in lines), lines


@pytest.mark.parametrize('args', ['--help', 'run --help', 'list', 'list --json', 'show', 'show --json', '--version', 'show nosuch', 'run nosuch'])
def test_what_answers_at_once_imports_nothing_heavy(kept, args):
    p = subprocess.run([sys.executable, '-X', 'importtime', '-m', 'fastbench', *args.split()], capture_output=True, text=True, timeout=LIMIT,
                       env={**os.environ, 'FASTBENCH_OUT': str(kept)})
    names = {o.rpartition('|')[2].strip().split('.')[0] for o in p.stderr.splitlines() if o.startswith('import time:')}
    assert 'fastbench' in names and not {'torch', 'fastai', 'transformers', 'timm', 'numpy', 'pandas', 'matplotlib', 'sklearn', 'PIL'} & names
    assert 'Traceback' not in p.stderr and p.returncode == (2 if 'nosuch' in args else 0)


def test_completion(kept):
    def complete(line, shell='bash'):
        return fastbench(env=dict(_FASTBENCH_COMPLETE=f'complete_{shell}', COMP_WORDS=line, COMP_CWORD=str(len(line.split(' '))-1), FASTBENCH_OUT=str(kept))).stdout.split()
    assert complete('fastbench run dig') == ['digits-xresnet18'] and complete('fastbench run qu') == ['quick']
    assert {'run', 'list', 'show'} <= set(complete('fastbench ')) and '--repeats' in complete('fastbench run --re')
    assert complete(f'fastbench show --out {kept} la') == ['last'] and len(complete(f'fastbench show --out {kept} digits')) == 3
    for shell in ('bash', 'zsh', 'fish'):
        p = fastbench(env={'_FASTBENCH_COMPLETE': f'source_{shell}'})
        assert p.returncode == 0 and '_FASTBENCH_COMPLETE' in p.stdout
    if shutil.which('bash'):  # whose completion is shown is known from the shell that asks
        p = subprocess.run(['bash', '-c', f'"{sys.executable}" -m fastbench --show-completion; exit $?'], capture_output=True, text=True, timeout=LIMIT)
        assert p.returncode == 0 and '_FASTBENCH_COMPLETE' in p.stdout


def test_the_script_is_the_module():
    a = fastbench('--version')
    b = subprocess.run([os.path.join(os.path.dirname(sys.executable), 'fastbench'), '--version'], capture_output=True, text=True)
    assert a.stdout == b.stdout == f'fastbench {__version__}\n'


@pytest.mark.parametrize('in_an_import', [False, True])
def test_ctrl_c_before_anything(monkeypatch, capsys, in_an_import):
    def app(**kwargs):
        try: raise KeyboardInterrupt
        except KeyboardInterrupt as e: raise (ImportError('initialization failed') if in_an_import else e)  # as of an extension in C
    monkeypatch.setattr(cli, 'app', app)
    assert command(monkeypatch, capsys, 'list') == (130, '', '')


# For real, once each

REAL = ['--epochs', '1', '--batches', '2', '--workers', '0', '--batch-size', '64', '--device', 'cpu']


def test_a_real_run(tmp_path):
    p = fastbench('run', 'digits-xresnet18', *REAL, '--repeats', 2, '--json', '--offline', '--seed', 7, '--out', tmp_path, env=dict(SECRET_TOKEN='hunter2-7351', OMP_NUM_THREADS='1'))
    a,b = json.loads(p.stdout)
    assert p.returncode == 0 and (a['status'], b['status'], a['seed'], b['seed']) == ('ok', 'ok', 7, 8) and a['verdict'] and a['rows'][0]['action'] == 'fit'
    assert p.stderr.splitlines()[0] == 'digits-xresnet18 1/2' and 'Warning' not in p.stderr and 'Traceback' not in p.stderr
    assert a['precision'] == dict(asked='fp32', effective='fp32') and a['recipe']['bs'] == 64 and a['metrics']['accuracy'] >= 0
    assert not any('hunter2' in o.read_text() or 'SECRET' in o.read_text() for o in tmp_path.iterdir())
    p = fastbench('show', '--out', tmp_path)
    assert 'forward' in p.stdout and 'bound: ' in p.stdout and 'accuracy' in p.stdout


def test_ctrl_c_in_a_terminal(tmp_path):
    "The terminal sends SIGINT to all processes in front: the command and the fork server"
    pty,fcntl,termios = pytest.importorskip('pty'),pytest.importorskip('fcntl'),pytest.importorskip('termios')
    main,side = pty.openpty()
    def front(): os.setsid(), fcntl.ioctl(side, termios.TIOCSCTTY, 0)
    p = subprocess.Popen([sys.executable, '-m', 'fastbench', 'run', 'digits-xresnet18', 'photos-xresnet18', '--epochs', '10000', '--batch-size', '64', '--device', 'cpu',
        '--out', str(tmp_path)], stdin=side, stdout=subprocess.PIPE, stderr=side, preexec_fn=front, text=True,
        env={**os.environ, 'TERM': 'xterm', 'COLUMNS': '120', 'OMP_NUM_THREADS': '1'})
    os.close(side)
    below = []
    def press():
        below.extend(psutil.Process(p.pid).children(recursive=True))
        os.write(main, b'\x03')
    seen = read_all(main, (b', train ', press))
    out = p.communicate(timeout=LIMIT)[0]
    run, = load_all(tmp_path)[0]
    assert p.returncode == 130 and run.status == 'interrupted' and run.profile['steps']['train']['n'] > 0 and 'Traceback' not in seen
    assert run.path in seen.replace('\r\n', '') and 'interrupted: stopped by its user' in out and f'kept in {run.path}' in out
    assert below and not psutil.wait_procs(below, timeout=LIMIT)[1]


@pytest.mark.parametrize('said,value', [('true', True), ('True', True), ('false', False), ('None', None), ('.5', .5), ('xresnet34', 'xresnet34'), ('TRUE', 'TRUE')])
def test_a_value_of_set(said, value):
    from fastbench.command.options import field
    assert field(f'x={said}') == ('x', value)


def test_a_refusal_is_in_the_words_of_the_command(tmp_path):
    got = subprocess.run([sys.executable, '-m', 'fastbench', 'run', 'digits-xresnet18', '--set', 'precision=fp16', '--device', 'cpu', '--out', str(tmp_path)], capture_output=True, text=True, timeout=LIMIT)
    assert got.returncode == 2 and '--set precision=fp32' in got.stderr and "precision='" not in got.stderr


@pytest.mark.parametrize('words', ['run digits-xresnet18', 'ladder dawn-photos', 'scale digits-xresnet18'])
@pytest.mark.parametrize('path,why', [('nowhere/a.png', "there is no folder 'nowhere'"), ('a.txt', "'a.txt' is not a picture")])
def test_a_picture_is_refused_before_the_training(launched, monkeypatch, capsys, tmp_path, words, path, why):
    code,_,err = command(monkeypatch, capsys, *words.split(), '--plot', path, '--out', tmp_path)
    assert code == 2 and why in err and not launched


@pytest.mark.parametrize('words', ['run digits-xresnet18 --out', 'cache clear --where', 'doctor digits-xresnet18 --keep'])
def test_an_empty_folder_is_no_folder(launched, monkeypatch, capsys, words):
    "As of a shell's variable that is not set: it would be the current folder"
    code,_,err = command(monkeypatch, capsys, *words.split(), '')
    assert code == 2 and 'names no folder' in err and not launched


@pytest.mark.parametrize('made', ['a:', 'a:bs', ':bs=2', 'a:lr,bs=2'])
def test_a_rung_is_refused_in_its_own_words(launched, monkeypatch, capsys, tmp_path, made):
    code,_,err = command(monkeypatch, capsys, 'ladder', 'digits-xresnet18', '--rung', made, '--out', tmp_path)
    assert code == 2 and not launched and '--rung' in err and '--set' not in err


def test_a_letter_means_the_same_in_every_command():
    import inspect
    from fastbench.cli import app
    seen = {}
    for command in app.registered_commands:
        for p in inspect.signature(command.callback).parameters.values():
            for words in (o.param_decls or () for o in getattr(p.annotation, '__metadata__', ()) if hasattr(o, 'param_decls')):
                for letter in (o for o in words if len(o) == 2): seen.setdefault(letter, set()).add(next((o for o in words if o.startswith('--')), f'--{p.name}'))
    assert '-o' in seen and all(len(o) == 1 for o in seen.values()), seen


def test_a_warning_of_fastbench_is_one_line(monkeypatch, capsys):
    def app(**_):
        for f in (cli.__file__, '/elsewhere/module.py'): warnings.warn_explicit('mind this', UserWarning, f, 1)
    monkeypatch.setattr(cli, 'app', app)
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = lambda message, category, filename, *args, **kwargs: print(f'{filename}: {message}', file=sys.stderr)
        with pytest.raises(SystemExit): cli.main()
        assert warnings.showwarning.__name__ == '<lambda>'
    assert capsys.readouterr().err == 'warning: mind this\n/elsewhere/module.py: mind this\n'

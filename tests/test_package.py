"The package as a whole: each fact has one home, it builds and installs, rooms import downwards only, and nothing is patched."
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_string
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
NBS = sorted((ROOT/'nbs').rglob('[!._]*.ipynb'))
# What must start in well under a second: no torch, fastai, transformers, timm, pandas or matplotlib, also not indirectly
TORCH_FREE = '''
    errors rules experiments measure.bound vision.images vision.kinds vision.sources text.kinds text.sources text.split
    draw.kept data.place data.fingerprint data.table data.folders data.parts data.images data.texts
    recipe ladders runs.figures runs.record machine.environment machine.noise compare.doctor measure.phases
    measure.palette measure.table compare.ladder compare.precision runs.store runs.query bench.child bench.launch
    compare.verdict compare.sides compare.runs compare.ab page.charts page.html page.raw page.sections page.details
    page.report command.terminal cli machine.download'''.split()
HEAVY = 'torch torchvision fastai transformers timm pandas matplotlib'.split()
# Modules that no notebook writes
BY_HAND = {'__init__', '__main__', '_modidx'}


def read(name): return (ROOT/name).read_text(encoding='utf-8')


@cache  # read once: the tests ask hundreds of times
def cells(path, kind): return [''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == kind]


def exported(path):
    "Module that the notebook at `path` writes, or None"
    found = re.search(r'^#\|\s*default_exp\s+(\S+)', '\n'.join(cells(path, 'code')), re.M)
    return found and found[1]


def settings():
    config = ConfigParser(delimiters=['='], comment_prefixes=['#'])
    config.read_string(read('settings.ini'))
    return {k: [o for o in v.splitlines() if o.strip()] for k, v in config['DEFAULT'].items()}


def version(): return re.search(r'^__version__ = "(.+)"$', read('fastbench/__init__.py'), re.M)[1]


def python(code, **kw):
    "Run `code` in a fresh Python and return what it printed"
    got = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, **kw)
    assert got.returncode == 0, got.stderr[-2000:]
    return got.stdout


# Each fact once

def test_version_has_one_home():
    files = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True).stdout.split()
    files = files or ['settings.ini', 'setup.py', 'pyproject.toml']
    stated = [f for f in files if f.endswith(('.py', '.ini', '.toml', '.cfg')) and re.search(r'^_*version_*\s*=\s*["\']?\d', read(f), re.M | re.I)]
    assert stated == ['fastbench/__init__.py']


def test_pyproject_states_identity_only():
    tomllib = pytest.importorskip('tomllib', reason='Python 3.10 has no TOML reader')
    conf = tomllib.loads(read('pyproject.toml'))
    assert conf['project']['name'] == 'fastbench' and conf['project']['requires-python'] == '>=3.10'
    assert set(conf['project']['dynamic']) == {'version', 'dependencies', 'optional-dependencies', 'scripts', 'entry-points'}
    assert not set(conf['project']) & set(conf['project']['dynamic'])
    assert conf['tool']['nbdev']['update_pyproject'] is False and conf['tool']['nbdev']['put_version_in_init'] is False


def test_dependencies_are_the_agreed_ones():
    names = {Requirement(o).name for o in settings()['requirements']}
    assert names >= set('fastai torch torchvision transformers timm fastcore typer rich psutil nvidia-ml-py'.split())


def test_tested_versions_are_within_the_bounds():
    lines = [o for o in read('constraints.txt').splitlines() if not o.startswith('#')]
    tested = {}
    for o in lines:
        assert re.fullmatch(r'[a-z0-9.-]+==[0-9a-z.!+]+', o), f'constraints.txt holds more than name==version: {o}'
        name, tested[name] = o.split('==')[0], o.split('==')[1]
    for o in map(Requirement, settings()['requirements'] + settings()['dev_requirements']):
        assert o.name in tested and o.specifier.contains(tested[o.name]), f'{o}: tested was {tested.get(o.name)}'


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "Folder with the sdist and the wheel, the wheel built from the sdist, as `python -m build` does"
    out = tmp_path_factory.mktemp('dist dir')
    src = out/'src'
    src.mkdir()
    for o in ['settings.ini', 'setup.py', 'pyproject.toml', 'MANIFEST.in', 'LICENSE', 'README.md', 'CHANGELOG.md', 'CONTRIBUTING.md',
              'bootstrap.py', 'constraints.txt']: shutil.copy(ROOT/o, src/o)
    for o in ['fastbench', 'nbs', 'tests', 'docs']: shutil.copytree(ROOT/o, src/o, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints'))
    got = subprocess.run([sys.executable, '-m', 'build', '--no-isolation', '--outdir', out, src], capture_output=True, text=True)
    assert got.returncode == 0, got.stdout[-2000:] + got.stderr[-2000:]
    return out


def test_sdist(built):
    sdist, = built.glob('*.tar.gz')
    with tarfile.open(sdist) as f: names = {o.split('/', 1)[1] for o in f.getnames() if '/' in o}
    assert names >= {'settings.ini', 'setup.py', 'pyproject.toml', 'LICENSE', 'README.md', 'CHANGELOG.md', 'bootstrap.py', 'tests/test_package.py'}
    assert names >= {str(o.relative_to(ROOT)) for o in NBS}


def test_wheel_says_what_settings_say(built):
    wheel, = built.glob('*.whl')
    with zipfile.ZipFile(wheel) as f:
        names = f.namelist()
        info, = {o.split('/')[0] for o in names if '.dist-info/' in o}
        meta = f.read(f'{info}/METADATA').decode()
        entry = f.read(f'{info}/entry_points.txt').decode()
    meta = message_from_string(meta)
    def same(o): r = Requirement(o); return r.name, str(r.specifier), frozenset(r.extras)
    given = [Requirement(o) for o in meta.get_all('Requires-Dist')]
    extra = {e: {same(str(o)) for o in given if o.marker and o.marker.evaluate({'extra': e})} for e in (o.removesuffix('_requirements') for o in settings() if o.endswith('_requirements'))}
    always = [o for o in settings()["requirements"] if not Requirement(o).marker]
    assert {same(str(o)) for o in given if not o.marker} == {same(o) for o in always}
    def here(o): return not Requirement(o).marker or Requirement(o).marker.evaluate()
    assert extra == {e: {same(o) for o in settings()[f'{e}_requirements'] if here(o)} for e in extra} and meta.get_all('Provides-Extra') == [*extra]
    assert meta['Name'] == 'fastbench' and meta['Version'] == version() and meta['License-Expression'] == 'Apache-2.0'
    assert meta['Requires-Python'] == '>=3.10'
    assert entry.split('[console_scripts]')[1].split('[')[0].split() == [o.replace('=', ' = ') for o in settings()['console_scripts']][0].split()
    modules = {str(o.relative_to(ROOT)).replace(os.sep, '/') for o in (ROOT/'fastbench').rglob('*.py')}
    assert modules == {o for o in names if o.endswith('.py')}  # every module, and no tests, notebooks or setup.py


def test_wheel_installs(built, tmp_path):
    wheel, = built.glob('*.whl')
    venv = tmp_path/'a venv'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv], check=True)
    py = venv/('Scripts' if os.name == 'nt' else 'bin')/'python'
    subprocess.run([sys.executable, '-m', 'pip', '--python', py, 'install', '--quiet', '--no-deps', '--no-index', wheel], check=True, cwd=tmp_path)
    code = 'import fastbench, importlib.metadata as m; print(fastbench.__version__, m.version("fastbench"), fastbench.__file__)'
    got = subprocess.run([py, '-I', '-c', code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split(maxsplit=2)
    assert got[:2] == [version()]*2 and str(tmp_path) in got[2]
    assert (py.parent/('fastbench.exe' if os.name == 'nt' else 'fastbench')).exists()


def test_console_script_is_there():
    script, = settings()['console_scripts']
    mod, func = script.split('=')[1].split(':')
    path = ROOT/(mod.replace('.', '/') + '.py')
    assert func in {o.name for o in ast.parse(path.read_text()).body if isinstance(o, ast.FunctionDef)}


# Notebooks

@pytest.mark.parametrize('path', NBS, ids=lambda o: o.name)
def test_notebook_starts_with_title_and_subtitle(path):
    lines = [o for o in cells(path, 'markdown')[0].splitlines() if o.strip()]
    assert lines[0].startswith('# ') and lines[1].startswith('> ')


@pytest.mark.parametrize('path', NBS, ids=lambda o: o.name)
def test_notebook_is_small_and_of_no_machine(path):
    text = path.read_text(encoding='utf-8')
    assert len(text) < 1_500_000
    for o in {str(Path.home()), str(ROOT), '/home/', '/Users/'} - {'/'}: assert o not in text, f'{path.name} holds the path {o}'


def test_every_module_has_its_notebook():
    written = {exported(o).replace('.', '/') for o in NBS if exported(o)}
    there = {str(o.relative_to(ROOT/'fastbench').with_suffix('')) for o in (ROOT/'fastbench').rglob('*.py')}
    assert {o for o in there if Path(o).name not in BY_HAND} == written


@pytest.mark.parametrize('path', sorted([*ROOT.glob('*.py'), *(ROOT/'fastbench').rglob('*.py'), *(ROOT/'tests').glob('*.py')]), ids=lambda o: str(o.relative_to(ROOT)))
def test_parses_on_the_oldest_python(path):
    src = path.read_text(encoding='utf-8')
    ast.parse(src, feature_version=(3, 10))  # does not see f-strings that only 3.12 can read
    newer = {'tomllib', 'asyncio.taskgroups', 'wsgiref.types'}
    for node in ast.parse(src).body:  # at the top, not behind a try
        if isinstance(node, ast.Import): assert not newer & {o.name for o in node.names}


# Rooms

# Each wing knows only those before it; within a wing a room knows lower numbers
WINGS = """errors compat machine data rules recipe ladders measure runs loops callback train distributed draw text vision experiments own bench compare page selftest
    command cli all""".split()


@cache
def rooms():
    "module -> its place: the number of the wing, the number of the notebook in it"
    found = {exported(o): int(re.match(r'\d+', o.name)[0]) for o in NBS if exported(o) and re.match(r'\d', o.name)}
    return {'fastbench.'+o: (WINGS.index(o.split('.')[0]), n if '.' in o else 0) for o, n in found.items()}


def test_notebooks_stand_in_folders_that_mirror_the_package():
    for path in NBS:
        if not (module := exported(path)): continue
        assert path.relative_to(ROOT/'nbs').parent.parts == tuple(module.split('.')[:-1]), f'{path} writes {module}'
        assert re.fullmatch(r'\d\d_' + module.split('.')[-1], path.stem), f'{path} writes {module}'


@pytest.mark.parametrize('file', ['CONTRIBUTING.md', 'docs/architecture.md'])
def test_paths_in_the_guides_are_there(file):
    paths = re.findall(r'`((?:nbs|tests|docs|benchmarks|fastbench|\.ci)/[\w./-]+)`', read(file))
    assert paths and not [o for o in paths if not re.search('[A-Z]{4}', o) and not (ROOT/o).exists()]  # NAME stands for any


def test_the_architecture_names_each_wing():
    table = read('docs/architecture.md').split('| wing |')[1].split('\n\n')[0]
    assert [o for row in table.splitlines()[2:] for o in re.findall(r'`(\w+)`', row.split('|')[1])] == WINGS


def imports(src, module):
    "Modules of fastbench that `src`, the source of `module`, imports, wherever in the file it does"
    known, package = set(rooms()), module.rpartition('.')[0]
    for node in ast.walk(ast.parse(src)):
        if isinstance(node, ast.Import): found = [o.name for o in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            if node.level: base = '.'.join(package.split('.')[:len(package.split('.'))-node.level+1] + ([base] if base else []))
            found = [base] + [f'{base}.{o.name}' for o in node.names]
        else: continue
        yield from (o for o in found if o in known)


def test_imports_are_found_however_they_are_written(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], 'rooms', lambda: {'fastbench.a': (0, 0), 'fastbench.vision.b': (1, 0), 'fastbench.vision.c': (1, 1)})
    for src in ['import fastbench.a', 'from fastbench.a import x', 'from fastbench import a', 'from ..a import x', 'from .. import a',
                'def f():\n    from fastbench.a import x']:
        assert list(imports(src, 'fastbench.vision.c')) == ['fastbench.a'], src
    assert list(imports('from .b import x', 'fastbench.vision.c')) == ['fastbench.vision.b']
    assert list(imports('import torch\nfrom fastbench import __version__', 'fastbench.a')) == []


def test_rooms_import_lower_numbers_only():
    number, wrong = rooms(), []
    for mod in number:
        src = (ROOT/(mod.replace('.', '/') + '.py')).read_text(encoding='utf-8')
        wrong += [f'{mod} {number[mod]} imports {o} {number[o]}' for o in imports(src, mod) if number[o] >= number[mod]]
    assert not wrong


@pytest.mark.parametrize('name', [o for o in TORCH_FREE if f'fastbench.{o}' in rooms()])
def test_light_rooms_import_nothing_heavy(name):
    out = python(f'import sys, fastbench.{name}; print([o for o in {HEAVY} if o in sys.modules])')
    assert out.strip() == '[]'


def test_a_run_in_one_process_imports_nothing_that_only_several_need():
    out = python("""import sys, fastai.data.all
had = set(sys.modules)
import fastbench.bench.run
print([o for o in ('torch.distributed.tensor', 'torch.distributed.checkpoint', 'triton') if o in sys.modules and o not in had])""")
    assert out.strip() == '[]'


# Importing changes nothing

UNCHANGED = """
import fastai.learner, fastai.callback.all, fastai.vision.all, fastai.text.all, fastai.tabular.all, fastcore.all
from fastai.learner import Learner
from fastai.callback.core import Callback, event
from fastcore.basics import defaults
from fastai.optimizer import Optimizer
from fastai.data.all import DataLoader, DataLoaders
from fastai.callback.fp16 import MixedPrecision
import torch
CLASSES = Learner, Callback, Optimizer, DataLoader, DataLoaders, MixedPrecision, torch.nn.Module, torch.Tensor  # fastai's and torch's own
def state():
    classes = {c.__name__: dict(vars(c)) for c in CLASSES}
    return {**classes, 'defaults': dict(vars(defaults)), 'callbacks': list(defaults.callbacks), 'torch': [
        torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cudnn.benchmark, torch.is_grad_enabled(), torch.get_rng_state().sum().item()]}
before = state()
from fastbench.all import *
after = state()
for key, old in before.items():
    new = after[key]
    if isinstance(old, dict):
        changed = [k for k in old if k not in new or new[k] is not old[k] and new[k] != old[k]]
        assert not changed, f'{key}: replaced or removed {changed}'
        added = set(new) - set(old)
        assert key == 'Learner' or not {o for o in added if not o.startswith('__')}, f'{key}: added {added}'
    else: assert new == old, f'{key}: {old} became {new}'
print(sorted(set(after['Learner']) - set(before['Learner'])))
"""


@pytest.mark.skipif('fastbench.all' not in rooms(), reason='fastbench.all is not written yet')
def test_import_leaves_fastai_as_it_was():
    added = ast.literal_eval(python(UNCHANGED).splitlines()[-1])
    assert {'profile', 'profiling'} <= set(added)


# The check of .ci/run

def drift(folder): return subprocess.run([folder/'.ci'/'drift'], env={**os.environ, 'PYTHON': sys.executable}, capture_output=True, text=True)


@pytest.mark.skipif(os.name == 'nt', reason='a bash script')
def test_drift_is_named(checkout):
    assert drift(checkout).returncode == 0, drift(checkout).stderr
    module = checkout/'fastbench'/'recipe.py'
    module.write_text(module.read_text() + '\n# edited by hand\n')
    nb = checkout/'nbs'/'02_recipe.ipynb'
    nb.write_text(nb.read_text().replace('"execution_count": null', '"execution_count": 7', 1))
    got = drift(checkout)
    assert got.returncode == 1
    assert 'fastbench/recipe.py' in got.stderr and 'nbs/02_recipe.ipynb' in got.stderr and '_modidx' not in got.stderr


def test_no_lock_file():
    files = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not [o for o in files if o.endswith(('uv.lock', 'poetry.lock', 'Pipfile.lock', 'package-lock.json'))]

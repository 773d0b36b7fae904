"What every test file may use: the checkout, and a copy of it without what was built."
import gc
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from browser import browser, visit  # fixtures, for pages

ROOT = Path(__file__).resolve().parent.parent
# files that take a minute and more, those that mostly wait at the very beginning: what is long and begins last is waited for by all
LONG = [f'test_{o}.py' for o in ('slurm', 'docs', 'own', 'hosts', 'waits', 'resume', 'on_gpu', 'dawn', 'batch_size', 'report', 'packed', 'processes', 'launch', 'real_model', 'kinds', 'device_clock', 'scale', 'selftest')]


def pytest_configure(): gc.disable()


def freeze():
    "Garbage collections skip what is there now"
    gc.freeze()
    freeze.modules = len(sys.modules)


def pytest_collection_finish():
    "What imports and the search for tests have made: looking at it takes half a second each time"
    freeze()
    gc.enable()


def pytest_runtest_setup():
    "And what tests have imported since then: transformers and torch.compile make half a million objects"
    if len(sys.modules) < freeze.modules+100: return
    gc.collect()
    freeze()


def pytest_unconfigure(): gc.unfreeze()  # or libraries that look for leaks at the end report what was frozen


def pytest_collection_modifyitems(items):
    "The long files first; needs xdist's --no-loadscope-reorder"
    items.sort(key=lambda o: LONG.index(o.path.name) if o.path.name in LONG else len(LONG))


@pytest.fixture(scope='session')
def root(): return ROOT


@pytest.fixture
def checkout(tmp_path):
    "A copy of the checkout in a path with a space, without .venv, .git and build outputs"
    dest = tmp_path/'a clone'
    shutil.copytree(ROOT, dest, ignore=shutil.ignore_patterns(
        '.*venv*', '.git', '__pycache__', '*.egg-info', 'build', 'dist', '_proc', '_docs', '.pytest_cache', '.hypothesis', 'fastbench-runs', 'models'))
    return dest


@pytest.fixture
def in_process(monkeypatch, capfd):
    """The command in this process, which has the libraries already: exit code, stdout and stderr as `subprocess.run` gives them.
    Without what a function of the user's prints: it goes where the server of the runs' processes was started"""
    from fastbench import cli, recipe
    recipe.recipes()
    known = [(o, dict(o)) for o in (recipe._registry, recipe._suites, recipe._published, recipe._variants, recipe._typical)]
    def run(*args, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.delenv('FASTBENCH_OUT', raising=False)
        monkeypatch.setattr(sys, 'argv', ['fastbench', *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as e: cli.main()
        out, err = capfd.readouterr()
        return SimpleNamespace(returncode=e.value.code or 0, stdout=out, stderr=err)
    yield run
    for o, was in known: # a suite in a file registers what it trains, and the next test has this process too
        o.clear()
        o.update(was)


@pytest.fixture(scope='module')
def one_thread():
    "Tiny networks: threads would only wait for each other, more so where the machine is busy"
    import torch
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.fixture
def forked_loaders():
    "fastai makes a transform of a function that cannot be pickled, and Python 3.14 pickles what it gives to a process"
    import multiprocessing
    before = multiprocessing.get_start_method(True)
    multiprocessing.set_start_method('fork', force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(scope='session')
def bf16():
    "What emulation would make slow, or PyTorch has no kernel for"
    import torch
    from fastbench.callback.amp import native_bf16
    if not native_bf16(torch.device('cpu')): pytest.skip('this processor does not multiply bf16')


@pytest.fixture
def any_bf16(monkeypatch):
    "bf16 on a processor that only emulates it, for networks so small that nobody notices"
    monkeypatch.setattr('fastbench.callback.amp.native_bf16', lambda device: True)


@pytest.fixture
def gpu():
    "Two GPUs that are not there: see `pretend`"
    from pretend import pretend
    with pretend(devices=2) as gpu: yield gpu


@pytest.fixture
def no_hub(monkeypatch):
    "The hub is not asked, in this process and in those that it starts"
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)


@pytest.fixture
def cgroup(tmp_path):
    "Files of a control group: what `root=` and `membership=` stand for"
    def make(membership, **files):
        (tmp_path/'membership').write_text(membership)
        for name, text in files.items():
            path = tmp_path/name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return dict(root=tmp_path, membership=tmp_path/'membership')
    return make

"bootstrap.py without a real installation: every step that would take minutes is replaced by a recorder."
import ast
import importlib.util
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from started import hears_signals

try: import fcntl
except ImportError: fcntl = None

SOURCE = Path(__file__).resolve().parent.parent/'bootstrap.py'
posix = pytest.mark.skipif(os.name == 'nt', reason='execv, flock and symlinks are of POSIX')


def load(path):
    "bootstrap.py at `path` as a module of its own"
    spec = importlib.util.spec_from_file_location('bootstrap', path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


class Boot:
    "A checkout with a bootstrap whose steps are recorded in `steps`; the step named `fail` raises"
    def __init__(self, folder, monkeypatch):
        self.mod, self.steps, self.fail, self.mp = load(folder/'bootstrap.py'), [], {}, monkeypatch
        self.venv = folder/'.venv'
        monkeypatch.setattr(self.mod, 'call', self.call)

    def call(self, what, cmd, env=None):
        self.steps.append((what, cmd))
        if what in self.fail: raise self.fail.pop(what)
        if what == 'making .venv': self.python()
        return ''

    def python(self, target=sys.executable):
        "What `python -m venv` leaves, as far as bootstrap.py looks at it"
        bin = self.venv/('Scripts' if os.name == 'nt' else 'bin')
        bin.mkdir(parents=True, exist_ok=True)
        (self.venv/'pyvenv.cfg').write_text('home = x\n')
        if not (bin/'python').is_symlink(): (bin/'python').symlink_to(target)

    def names(self):
        res, self.steps = [what for what, _ in self.steps], []
        return res


ALL = ['making .venv', 'installing uv', 'installing fastbench', 'checking torch']


@pytest.fixture
def folder(tmp_path):
    dest = tmp_path/'a folder'
    (dest/'fastbench').mkdir(parents=True)
    for name in ['bootstrap.py', 'settings.ini', 'pyproject.toml', 'setup.py', 'constraints.txt', 'fastbench/__init__.py']:
        shutil.copy(SOURCE.parent/name, dest/name)
    return dest


@pytest.fixture
def boot(folder, monkeypatch):
    res = Boot(folder, monkeypatch)
    monkeypatch.setattr(res.mod.signal, 'signal', lambda *args: None)  # this process is pytest's
    # the recorder's python has no pip of the .venv to ask
    monkeypatch.setattr(res.mod, 'uv_env', lambda: dict(os.environ))
    return res


# What an old Python is told

def test_parses_on_python_2():
    src = SOURCE.read_bytes()
    src.decode('ascii')
    too_new = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.AsyncFunctionDef, ast.Starred, ast.YieldFrom)
    for node in ast.walk(ast.parse(src)):
        assert not isinstance(node, too_new), f'line {getattr(node, "lineno", "?")}: {type(node).__name__} does not parse on Python 2.7'
        if isinstance(node, ast.arguments): assert not node.kwonlyargs and not node.posonlyargs
        if isinstance(node, ast.FunctionDef): assert node.returns is None and not any(a.annotation for a in node.args.args)
        if isinstance(node, ast.Raise): assert node.cause is None
        if isinstance(node, ast.Dict): assert None not in node.keys  # {**d}


@pytest.mark.parametrize('version', [(2, 7, 18), (3, 6, 15), (3, 9, 18)])
def test_old_python_is_one_line(version, tmp_path):
    code = f'import sys, runpy; sys.version_info = {version}; runpy.run_path({str(SOURCE)!r}, run_name="__main__")'
    got = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, 'PATH': str(tmp_path)})
    assert got.returncode == 4
    line, = got.stderr.splitlines()
    assert f'Python {version[0]}.{version[1]} is too old' in line and '3.10 or newer' in line and 'apt install python3' in line


@posix
def test_old_python_names_a_newer_one_on_the_path(boot, tmp_path):
    for name in ('python3.9', 'python3.11', 'python3.12'):
        (tmp_path/name).write_text('')
        (tmp_path/name).chmod(0o755)
    assert boot.mod.newer_python(str(tmp_path)) == 'python3.12'
    assert 'python3.12 bootstrap.py' in boot.mod.too_old((3, 9), 'python3.12')
    assert boot.mod.too_old((3, 10)) is None


def test_oldest_python_is_the_one_of_pyproject(boot):
    oldest = '.'.join(map(str, boot.mod.OLDEST))
    assert f'requires-python = ">={oldest}"' in (SOURCE.parent/'pyproject.toml').read_text()


# Setting up

def test_sets_up_once(boot):
    boot.mod.setup()
    uv = dict(boot.steps)['installing fastbench']
    assert '.[dev]' in uv and 'install' in uv and '--compile-bytecode' in uv and '--constraint' not in uv
    assert boot.names() == ALL
    boot.mod.setup()
    assert boot.names() == []


def test_writes_no_lock_file(boot, folder):
    boot.mod.setup()
    assert not any(word in ('sync', 'lock', 'run') for _, cmd in boot.steps for word in cmd)
    assert {o.name for o in folder.iterdir()} - {'__pycache__'} == {'bootstrap.py', 'settings.ini', 'pyproject.toml', 'setup.py', 'constraints.txt', 'fastbench', '.venv'}


@pytest.mark.parametrize('name', ['settings.ini', 'pyproject.toml', 'setup.py', 'fastbench/__init__.py'])
def test_a_changed_input_installs_again_into_the_same_venv(boot, folder, name):
    boot.mod.setup()
    boot.names()
    with open(folder/name, 'a') as f: f.write('\n# changed\n')
    boot.mod.setup()
    assert boot.names() == ALL[1:]


def test_tested_versions(boot, folder):
    boot.mod.setup()
    boot.names()
    boot.mod.setup(tested=True)
    assert '--constraint' in dict(boot.steps)['installing fastbench']
    assert boot.names() == ALL[1:]
    boot.mod.setup()  # what was tested is also within the bounds
    assert boot.names() == []
    (folder/'constraints.txt').write_text('torch==2.6.0\n')
    boot.mod.setup(tested=True)
    assert boot.names() == ALL[1:]


@pytest.mark.parametrize('step', ALL)
def test_a_half_made_venv_is_made_anew(boot, step):
    boot.fail[step] = boot.mod.Failed('power cut')
    with pytest.raises(boot.mod.Failed): boot.mod.setup()
    left = boot.venv/'left behind'
    left.write_text('')
    boot.names()
    boot.mod.setup()
    assert boot.names() == ALL and not left.exists()


def test_an_interrupted_upgrade_is_not_taken_for_the_old_state(boot, folder):
    boot.mod.setup()
    before = (folder/'settings.ini').read_text()
    (folder/'settings.ini').write_text(before.replace('pytest>=8', 'pytest>=9'))
    boot.fail['installing fastbench'] = boot.mod.Failed('power cut')
    with pytest.raises(boot.mod.Failed): boot.mod.setup()
    (folder/'settings.ini').write_text(before)
    boot.names()
    boot.mod.setup()
    assert boot.names() == ALL


@pytest.mark.parametrize('make', ['empty', 'no python', 'dangling python', 'file', 'link'])
def test_a_broken_venv_is_made_anew(boot, tmp_path, make):
    if make == 'file': boot.venv.write_text('')
    elif make == 'link': boot.venv.symlink_to(tmp_path/'gone')
    else: boot.venv.mkdir()
    if make == 'no python': (boot.venv/'pyvenv.cfg').write_text('')
    if make == 'dangling python': boot.python(tmp_path/'gone')
    boot.mod.setup()
    assert boot.names() == ALL


@posix
def test_a_venv_of_another_python_is_made_anew(boot, tmp_path):
    fake = tmp_path/'python'
    fake.write_text('#!/bin/sh\nexit 1\n')
    fake.chmod(0o755)
    boot.python(fake)
    boot.mod.setup()
    assert boot.names() == ALL


def test_a_venv_that_works_is_kept(boot):
    boot.python()
    mine = boot.venv/'mine'
    mine.write_text('')
    boot.mod.setup()
    assert mine.exists() and 'making .venv' not in boot.names()


def test_a_folder_that_is_no_venv_is_left_alone(boot, capsys):
    boot.venv.mkdir()
    (boot.venv/'thesis.tex').write_text('')
    assert boot.mod.main(['setup']) == 4
    assert (boot.venv/'thesis.tex').exists() and 'is not a virtual environment' in capsys.readouterr().err


@posix
def test_a_moved_checkout_is_installed_again(boot, folder, tmp_path, monkeypatch):
    boot.mod.setup()
    moved = Boot(folder.rename(tmp_path/'elsewhere'), monkeypatch)
    monkeypatch.setattr(moved.mod, 'uv_env', dict)
    moved.mod.setup()
    assert moved.names() == ALL[1:]


@posix
def test_two_at_once_install_once(boot, monkeypatch):
    said = queue.Queue()
    monkeypatch.setattr(boot.mod, 'say', said.put)
    waits = threading.Thread(target=boot.mod.setup, daemon=True)
    with boot.mod.locked():
        waits.start()
        assert 'waiting for it' in said.get(timeout=60)
        boot.python()
        boot.mod.write_stamp(boot.mod.fingerprint())
    waits.join(60)
    assert not waits.is_alive()
    assert boot.names() == []


# What can be missing

@pytest.mark.parametrize('missing', ['venv', 'ensurepip'])
@pytest.mark.parametrize('left', [False, True], ids=['gone', 'empty folder left'])
def test_missing_module_of_debian(boot, monkeypatch, capsys, missing, left):
    def without(name):
        if name != missing: return importlib.import_module(name)
        if not left: raise ImportError(name)
        return types.SimpleNamespace(__file__=None)
    monkeypatch.setattr(boot.mod, 'import_module', without)
    assert boot.mod.main(['run']) == 4
    err, = capsys.readouterr().err.splitlines()
    assert f"no '{missing}'" in err and 'apt install python3-venv' in err
    assert not boot.venv.exists()


# What the tools printed in each case, word for word where it matters
OUTPUTS = {
    'pip, no network': ("Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<HTTPSConnection>: Failed to establish a new "
                        "connection: [Errno -3] Temporary failure in name resolution')': /simple/uv/\nERROR: No matching distribution found for uv>=0.5",
                        ['does not answer', 'HTTPS_PROXY', 'UV_DEFAULT_INDEX']),
    'uv, no network': ('error: Failed to fetch: `x`\n  Caused by: error sending request for url\n  Caused by: dns error\n'
                       '  Caused by: failed to lookup address information', ['does not answer', 'HTTPS_PROXY']),
    'pip, disk full': ('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device', ['disk is full', 'GB free', 'UV_CACHE_DIR']),
    'uv, disk full': ('error: Failed to install: torch.whl\n  Caused by: failed to copy file: No space left on device (os error 28)', ['disk is full']),
    'certificate': ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate in chain'))", ['SSL_CERT_FILE']),
    'uv, certificate': ('error sending request\n  Caused by: invalid peer certificate: UnknownIssuer', ['SSL_CERT_FILE']),
    'no build': ('  x No solution found when resolving dependencies:\n  Because torch==2.6.0 has no wheels with a matching Python ABI tag',
                 ['no set of packages fits', f'Python {sys.version_info[0]}.{sys.version_info[1]}']),
    'not writable': ('error: failed to create directory `/x/.cache/uv`: Permission denied (os error 13)', ['cannot be written', 'UV_CACHE_DIR']),
}


@pytest.mark.parametrize('case', OUTPUTS)
def test_cause_is_named(folder, case):
    text, says = OUTPUTS[case]
    mod = load(folder/'bootstrap.py')
    code = f'import sys; sys.stdout.write("a line first\\n"); sys.stderr.write({text!r}); sys.exit(1)'
    with pytest.raises(mod.Failed) as e: mod.call('installing it', [sys.executable, '-c', code])
    assert str(e.value).startswith('installing it failed: ')
    for o in says: assert o in str(e.value)


def test_unknown_cause_shows_the_lines(folder, capsys):
    mod = load(folder/'bootstrap.py')
    with pytest.raises(mod.Failed, match='exit code 7, see the lines above'):
        mod.call('it', [sys.executable, '-c', 'print("odd"); raise SystemExit(7)'])
    assert 'odd' in capsys.readouterr().err
    with pytest.raises(mod.Failed, match='it failed'): mod.call('it', [str(folder/'gone')])


def test_disk_full_outside_a_tool(boot, monkeypatch, capsys):
    def full(path): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(boot.mod.os, 'mkdir', full)
    assert boot.mod.main(['setup']) == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert 'disk is full' in last and '[Errno 28]' in last


def test_interrupted(boot, capsys):
    boot.fail['installing fastbench'] = KeyboardInterrupt()
    assert boot.mod.main(['run']) == 130
    assert boot.mod.read_stamp() == 'begun'


@posix
@pytest.mark.parametrize('sig, code', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_installer_too(folder, tmp_path, sig, code):
    "Only bootstrap.py is told, as by a service manager; what it started must not go on"
    pid = tmp_path/'pid'
    slow = f'import os, time; open({str(pid)!r}, "w").write(str(os.getpid())); print("started", flush=True); time.sleep(600)'
    main = (f'import sys; sys.path.insert(0, {str(folder)!r}); import bootstrap as b\n'
            f'b.setup = lambda tested: b.call("it", [sys.executable, "-c", {slow!r}])\nsys.exit(b.main(["setup"]))')
    proc = subprocess.Popen([sys.executable, '-c', main], stderr=subprocess.PIPE, text=True, preexec_fn=hears_signals)
    assert proc.stderr.readline() == 'started\n'
    proc.send_signal(sig)
    assert proc.wait(60) == code
    for _ in range(600):  # until it is gone
        try: os.kill(int(pid.read_text()), 0)
        except ProcessLookupError: break
        time.sleep(.05)
    else: pytest.fail('the installer went on')


@posix
def test_an_installer_that_outlives_us_keeps_the_lock(folder, tmp_path):
    "kill -9 of bootstrap.py alone: the next set-up waits for the installer that still writes into .venv"
    slow = 'print("started", flush=True); import sys; sys.stdin.read()'
    main = (f'import sys; sys.path.insert(0, {str(folder)!r}); import bootstrap as b\n'
            f'with b.locked(): b.call("it", [sys.executable, "-c", {slow!r}])')
    proc = subprocess.Popen([sys.executable, '-c', main], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert proc.stderr.readline() == 'started\n'
    proc.kill()
    proc.wait()
    with open(folder/'bootstrap.py') as f:
        with pytest.raises(BlockingIOError): fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        proc.stdin.close()  # the installer ends
        fcntl.flock(f, fcntl.LOCK_EX)


def test_pair_of_torch_and_torchvision(boot):
    boot.fail['checking torch'] = boot.mod.Failed('checking torch failed: torch 2.13.0+cpu and torchvision 0.29.2 do not go together')
    with pytest.raises(boot.mod.Failed, match='UV_FIND_LINKS'): boot.mod.setup()
    # the symptom of a pair that does not match: torchvision's operators are not there
    broken = 'import sys, types; t = types.ModuleType("torchvision"); sys.modules["torchvision"] = t\n' + boot.mod.PAIR
    got = subprocess.run([sys.executable, '-c', broken], capture_output=True, text=True)
    assert got.returncode == 1 and 'do not go together' in got.stderr and 'Traceback' not in got.stderr


def test_pips_mirror_reaches_uv_and_its_find_links_do_not(folder, monkeypatch):
    mod = load(folder/'bootstrap.py')
    for o in [k for k in os.environ if k.startswith(('PIP_', 'UV_'))] + ['SSL_CERT_FILE', 'HTTPS_PROXY']: monkeypatch.delenv(o, raising=False)
    monkeypatch.setattr(mod, 'PYTHON', sys.executable)
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    assert not [k for k in mod.uv_env() if k.startswith('UV_')]
    monkeypatch.setenv('PIP_INDEX_URL', 'file:///mirror')
    monkeypatch.setenv('PIP_FIND_LINKS', 'wheels')
    monkeypatch.setenv('PIP_CERT', 'ours.pem')
    env = mod.uv_env()
    assert env['UV_DEFAULT_INDEX'] == 'file:///mirror' and env['SSL_CERT_FILE'] == 'ours.pem' and 'UV_FIND_LINKS' not in env
    monkeypatch.setenv('UV_DEFAULT_INDEX', 'file:///mine')
    monkeypatch.setenv('UV_SYSTEM_PYTHON', '1')
    env = mod.uv_env()
    assert env['UV_DEFAULT_INDEX'] == 'file:///mine' and 'UV_SYSTEM_PYTHON' not in env


# The commands

@posix
def test_run_passes_its_arguments_on(boot, monkeypatch):
    ran = []
    monkeypatch.setattr(boot.mod.os, 'execv', lambda path, cmd: ran.append((path, cmd)))
    boot.mod.main(['run', 'photos-xresnet18', '--repeats', '3', '--help'])
    assert boot.names() == ALL
    (path, cmd), = ran
    assert path == boot.mod.PYTHON and cmd[1].endswith('fastbench') and cmd[2:] == ['run', 'photos-xresnet18', '--repeats', '3', '--help']


@pytest.mark.parametrize('codes, expect', [((0, 0), 0), ((3, 0), 3), ((0, 5), 5), ((3, 5), 3)])
def test_test_runs_both_parts(boot, monkeypatch, codes, expect):
    ran, left = [], list(codes)
    def fake(cmd, cwd, env): ran.append((cmd, Path(cwd).name, env['OMP_NUM_THREADS'])); return left.pop(0)
    monkeypatch.setattr(boot.mod, 'crew', lambda: (3, 2))
    monkeypatch.setattr(boot.mod, 'flags', lambda: ['--flags', 'bf16'])
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    boot.mod.setup()
    monkeypatch.setattr(boot.mod.subprocess, 'call', fake)
    assert boot.mod.main(['test', '-k', 'one']) == expect
    (notebooks, where, threads), (pytests, there, _) = ran
    assert notebooks[-4:] == ['--flags', 'bf16', '--n-workers', '3'] and where == 'nbs' and threads == '2'
    assert pytests[-9:] == ['-m', 'pytest', '-n', '4', '--dist', 'loadfile', '--no-loadscope-reorder', '-k', 'one'] and there == 'a folder'


@pytest.mark.parametrize('printed, expect', [(b'True\n', ['--flags', 'bf16']), (b'False\n', []), (b'', [])])
def test_cells_that_need_bf16(boot, monkeypatch, capsys, printed, expect):
    monkeypatch.setattr(boot.mod.subprocess, 'run', lambda cmd, **kw: types.SimpleNamespace(stdout=printed))
    assert boot.mod.flags() == expect and ('does not multiply bf16' in capsys.readouterr().err) != bool(expect)


@pytest.mark.parametrize('cores, expect', [(1, (1, 1)), (2, (2, 1)), (4, (4, 1)), (16, (4, 4))])
def test_tests_share_the_cores(boot, monkeypatch, cores, expect):
    monkeypatch.setattr(boot.mod.os, 'sched_getaffinity', lambda pid: set(range(cores)), raising=False)
    assert boot.mod.crew() == expect


@pytest.mark.parametrize('args, code', [([], 2), (['rum'], 2), (['setup', 'x'], 2), (['docs', 'x'], 2), (['--tested'], 2), (['-h'], 0), (['--help'], 0)])
def test_usage(boot, capsys, args, code):
    assert boot.mod.main(args) == code
    out = capsys.readouterr()
    assert 'usage:' in (out.err if code else out.out)
    assert boot.names() == []


def test_starts_from_any_folder(tmp_path):
    got = subprocess.run([sys.executable, str(SOURCE), '--help'], cwd=tmp_path, capture_output=True, text=True)
    assert got.returncode == 0 and 'python3 bootstrap.py' in got.stdout


# The documentation

def test_docs_sets_up_and_makes_the_site(boot, monkeypatch, folder):
    calls = []
    monkeypatch.setattr(boot.mod.subprocess, 'call', lambda cmd, **kw: calls.append((cmd, kw)) or 0)
    monkeypatch.setattr(boot.mod, 'setup', lambda tested: calls.append('set up'))
    assert boot.mod.main(['docs']) == 0
    assert calls[0] == 'set up' and calls[1][0][1:] == [str(folder/'docs'/'make.py')] and calls[1][1]['cwd'] == str(folder)


def test_docs_says_which_python_it_needs_before_it_sets_up(boot, monkeypatch, capsys):
    monkeypatch.setattr(boot.mod.sys, 'version_info', (3, 10, 12))
    assert boot.mod.main(['docs']) == 4 and boot.steps == []
    line, = capsys.readouterr().err.splitlines()
    assert '3.11 or newer, this is 3.10' in line


def test_docs_and_zensical_agree_on_the_python(boot):
    text = (SOURCE.parent/'settings.ini').read_text()
    assert text.count('zensical>=0.0.73,<0.2; python_version >= "%d.%d"' % boot.mod.DOCS) == 2
    assert 'OLDEST = %d, %d' % boot.mod.DOCS in (SOURCE.parent/'docs'/'make.py').read_text()

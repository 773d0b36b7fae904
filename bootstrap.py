"""Two commands from a fresh clone, `python3 bootstrap.py run` and `python3 bootstrap.py test`, and `docs` for the documentation site.

Makes `.venv` beside this file, installs uv into it, then fastbench (editable, with its dev extra) through uv, and
runs the command there. Standard library only. This file must also *parse* on Python 2.7, so that an old Python
prints one clear line instead of a SyntaxError: no f-strings, no annotations, ASCII only.
"""
import os, sys

OLDEST = (3, 10)


def newer_python(path=None):
    "Name of a Python on `path` that is new enough, or None"
    for name in ['python3.%d' % i for i in (14, 13, 12, 11, 10)]:
        for folder in (path if path is not None else os.environ.get('PATH', '')).split(os.pathsep):
            if os.access(os.path.join(folder, name), os.X_OK): return name


def too_old(version, newer=None):
    "What to tell a Python that is too old, or None"
    if tuple(version[:2]) >= OLDEST: return None
    do = ('Run it with the one that is here: %s bootstrap.py' % newer if newer else
          'Install a newer one (Debian 12 or Ubuntu 22.04 and later: apt install python3 python3-venv) and run it with that')
    return 'bootstrap: Python %d.%d is too old, fastbench needs %d.%d or newer. %s\n' % (tuple(version[:2])+OLDEST+(do,))


if __name__ == '__main__' and too_old(sys.version_info):
    sys.stderr.write(too_old(sys.version_info, newer_python()))
    sys.exit(4)

import errno, hashlib, re, shutil, signal, subprocess, time
from contextlib import contextmanager
from importlib import import_module

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, '.venv')
BIN = os.path.join(VENV, 'Scripts' if os.name == 'nt' else 'bin')
PYTHON = os.path.join(BIN, 'python.exe' if os.name == 'nt' else 'python')
STAMP = os.path.join(VENV, 'fastbench-setup')  # 'begun' while setting up, then the fingerprint of what was installed
INPUTS = ['settings.ini', 'pyproject.toml', 'setup.py', os.path.join('fastbench', '__init__.py')]
TESTED = 'constraints.txt'

USAGE = """usage: python3 bootstrap.py [--tested] COMMAND [ARGUMENTS]

  run    set up, then `fastbench run ARGUMENTS`
  test   set up, then the notebooks' tests, then `pytest ARGUMENTS`
  docs   set up, then the documentation site: site/index.html
  setup  only set up

  --tested  install exactly the versions in constraints.txt instead of the newest that settings.ini allows
"""

class Failed(Exception): "A step failed in a way that one line can explain"


def say(text):
    sys.stderr.write('bootstrap: %s\n' % text)
    sys.stderr.flush()


# What a tool printed -> what is wrong and what to do. The order matters: pip without a network also says "no matching
# distribution", so the network is asked first.
CAUSES = [
    (r'No space left on device|os error 28\b|Errno 28\b|not enough space|quota exceeded|os error 122\b|Errno 122\b',
     'the disk is full ({free:.1f} GB free in {venv}). Set-up needs about 7 GB here and as much in the cache of uv: free some, '
     'or put the cache on another disk with UV_CACHE_DIR'),
    (r'CERTIFICATE_VERIFY_FAILED|invalid peer certificate|UnknownIssuer|certificate verify failed',
     'the certificate of the package registry is not trusted here. Behind a proxy that signs its own, point SSL_CERT_FILE to its certificate'),
    (r'name resolution|dns error|failed to lookup address|nodename nor servname|Name or service not known|getaddrinfo failed|'
     r'Connection refused|Connection reset|Network is unreachable|No route to host|timed out|operation timed out|'
     r'NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries exceeded|error sending request|tunnel error|'
     r'Network connectivity is disabled',
     'the package registry does not answer: there is no network, or it needs a proxy or a mirror. '
     'Set HTTPS_PROXY for a proxy, PIP_INDEX_URL and UV_DEFAULT_INDEX for a mirror, and run this again'),
    (r'No matching distribution|No solution found|no wheels with a matching|has no usable wheels|Could not find a version',
     'no set of packages fits Python {python} on this machine ({platform}); the lines above name the one that does not. '
     'Run bootstrap.py with another Python (3.10 to 3.13 are the usual choice), and without --tested if it was given'),
    (r'Permission denied|os error 13\b|Errno 13\b|Read-only file system|os error 30\b|Errno 30\b',
     'a file cannot be written (which one, it says beside this or above). Set-up writes {venv} and the cache of uv (UV_CACHE_DIR moves that)'),
]


def cause(output):
    "The likely cause that `output` of a failed step shows, or None"
    for pattern, text in CAUSES:
        if re.search(pattern, output, re.I):
            free = shutil.disk_usage(HERE).free/1e9
            return text.format(free=free, venv=VENV, python='%d.%d' % sys.version_info[:2], platform=sys.platform)


def explain(error):
    "An OSError with its likely cause"
    return '%s (%s)' % (cause(str(error)), error) if cause(str(error)) else str(error)


def call(what, cmd, env=None):
    "Run `cmd`, passing on its lines as they come; `Failed` with the likely cause if it fails"
    try: proc = subprocess.Popen(cmd, env=env, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=HELD)
    except OSError as e: raise Failed('%s failed: %s' % (what, explain(e)))
    lines = []
    try:
        for line in proc.stdout:
            line = line.decode('utf-8', 'replace')
            sys.stderr.write(line)
            lines = lines[-300:] + [line]
        if proc.wait() == 0: return ''.join(lines)
    finally:  # interrupted: leave no installer behind that goes on writing
        if proc.poll() is None: proc.terminate()
    raise Failed('%s failed: %s' % (what, cause(''.join(lines)) or 'exit code %d, see the lines above' % proc.returncode))


def fingerprint(tested=False):
    "Changes whenever what would be installed, or where, changes"
    h = hashlib.sha256(('%s\0%s\0' % (sys.version, HERE)).encode())
    for name in INPUTS + ([TESTED] if tested else []):
        with open(os.path.join(HERE, name), 'rb') as f: h.update(f.read() + b'\0')
    return h.hexdigest() + (' tested' if tested else '')


def read_stamp():
    try:
        with open(STAMP) as f: return f.read().strip()
    except (OSError, IOError): return None


def write_stamp(text):
    with open(STAMP, 'w') as f: f.write(text + '\n')


def works():
    "Does the Python in .venv start, and is it the version that runs this?"
    code = 'import sys; sys.exit(sys.version_info[:2] != (%d, %d))' % sys.version_info[:2]
    try: return subprocess.call([PYTHON, '-c', code], stderr=subprocess.DEVNULL) == 0
    except OSError: return False


def clear():
    "Remove a .venv that is half made; refuse a folder that is not a virtual environment at all"
    if os.path.islink(VENV) or os.path.isfile(VENV): return os.unlink(VENV)
    if not os.path.isdir(VENV): return
    names = os.listdir(VENV)
    if names and not {'pyvenv.cfg', 'bin', 'lib', 'Scripts', os.path.basename(STAMP)} & set(names):
        raise Failed('%s is there and is not a virtual environment. Move it away and run this again' % VENV)
    say('removing a .venv that is half made or of another Python')
    shutil.rmtree(VENV)


def make_venv():
    "A new .venv with pip in it"
    for name in ('venv', 'ensurepip'):
        try: found = import_module(name).__file__  # None: a folder that a removed package left behind
        except ImportError: found = None
        if not found:
            raise Failed("this Python has no '%s' (Debian and Ubuntu ship it apart). As root: apt install python3-venv, "
                         'and run this again' % name)
    say('making .venv with Python %d.%d.%d' % sys.version_info[:3])
    os.mkdir(VENV)
    write_stamp('begun')  # a .venv that stays at 'begun' is half made, and is made anew next time
    try: call('making .venv', [sys.executable, '-m', 'venv', VENV])
    except Failed as e:
        if 'see the lines above' not in str(e): raise
        raise Failed('%s. If they speak of ensurepip, as root: apt install python3-venv' % e)


def uv_env():
    "The environment for uv. It does not read pip's settings, so a mirror, a certificate or a proxy set there is passed on"
    env = {k: v for k, v in os.environ.items() if k not in ('UV_SYSTEM_PYTHON', 'VIRTUAL_ENV', 'CONDA_PREFIX')}
    out = subprocess.run([PYTHON, '-m', 'pip', 'config', 'list'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env).stdout
    found = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", out.decode('utf-8', 'replace'), re.M))
    for key, var in (('index-url', 'UV_DEFAULT_INDEX'), ('cert', 'SSL_CERT_FILE'), ('proxy', 'HTTPS_PROXY')):
        if key in found and not (var == 'UV_DEFAULT_INDEX' and 'UV_INDEX_URL' in env): env.setdefault(var, found[key])
    # pip's find-links stays behind on purpose: a CPU-only torch offered there does not fit the registry's torchvision
    return env


# torch and torchvision must come from the same place, else "operator torchvision::nms does not exist"
PAIR = """import torch, importlib.metadata as m
try: import torchvision; torch.ops.torchvision.nms
except (RuntimeError, AttributeError, ImportError) as e: raise SystemExit('torch %s and torchvision %s do not go together (%s)' % (
    torch.__version__, m.version('torchvision'), str(e).splitlines()[0]))"""


def install(tested=False):
    "uv by pip, then the package and everything that it needs by uv"
    if subprocess.call([PYTHON, '-m', 'pip', '--version'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        call('installing pip', [PYTHON, '-m', 'ensurepip', '--upgrade'])
    say('installing uv')
    call('installing uv', [PYTHON, '-m', 'pip', 'install', '--quiet', '--retries', '2', '--disable-pip-version-check', 'uv>=0.5'])
    say('installing fastbench and what it needs (minutes the first time: 2 to 3 GB)')
    # compiled once, here: uv leaves that to the first import, and where PYTHONDONTWRITEBYTECODE is set every process would compile torch and its like anew
    uv = [PYTHON, '-m', 'uv', 'pip', 'install', '--compile-bytecode', '--python', PYTHON]
    call('installing fastbench', uv + (['--constraint', TESTED] if tested else []) + ['-e', '.[dev]'], env=uv_env())
    try: call('checking torch', [PYTHON, '-c', PAIR])
    except Failed as e:
        raise Failed('%s. Is UV_FIND_LINKS, UV_INDEX or a uv.toml offering another torch? Unset it, remove %s, and run this again' % (e, VENV))


HELD = []  # the lock, passed on to what `call` starts: if this process is killed, an installer that goes on still holds it


@contextmanager
def locked():
    "Hold a lock while setting up, so that two at once do not write one .venv. No file is left: the script itself is locked"
    with open(os.path.join(HERE, 'bootstrap.py')) as f:
        try: import fcntl
        except ImportError: fcntl = None  # Windows
        try: fcntl and fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EWOULDBLOCK, errno.EACCES):  # anything else: a file system without locks
                say('another set-up is running here, waiting for it')
                fcntl.flock(f, fcntl.LOCK_EX)
        HELD[:] = [f.fileno()] if fcntl else []
        try: yield
        finally: HELD[:] = []


def is_ready(tested=False):
    "Is everything installed? A set made with --tested also serves a call without it"
    stamp = read_stamp() or ''
    tested = tested or stamp.endswith(' tested')
    return os.path.exists(PYTHON) and stamp == fingerprint(tested)


def setup(tested=False):
    "Make .venv match settings.ini; returns at once when it does already"
    if is_ready(tested): return
    with locked():
        if is_ready(tested): return  # another set-up did it while this one waited
        start = time.time()
        if read_stamp() == 'begun' or not works():
            clear()
            make_venv()
        write_stamp('begun')
        install(tested)
        write_stamp(fingerprint(tested))
        say('set up in %.0f s' % (time.time()-start))


def command(name):
    "A console script of .venv, run through its Python: a path with a space breaks #! lines"
    return [PYTHON, os.path.join(BIN, name + ('.exe' if os.name == 'nt' else ''))][os.name == 'nt':]


def run(args):
    "`fastbench run` in the caller's folder, in place of this process: signals and exit code are its own"
    cmd = command('fastbench') + ['run'] + args
    sys.stdout.flush()
    if os.name == 'nt': return subprocess.call(cmd)
    os.execv(cmd[0], cmd)


def crew():
    "How many tests run at once, and the threads of each: processes that all use every core wait for each other"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    n = min(4, cores)
    return n, cores//n


def flags():
    "Of the cells that not every machine can run (tst_flags in pyproject.toml), those that this one can"
    probe = "import torch; from fastbench.callback.amp import native_bf16; print(native_bf16(torch.device('cpu')))"
    found = subprocess.run([PYTHON, '-c', probe], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    if found.strip() == b'True': return ['--flags', 'bf16']
    say('skipped: cells marked `#| bf16`, as this processor does not multiply bf16')
    return []


def test(args):
    "Notebooks, then pytest, with a process more, as some tests wait; both always run, the first failure is the exit code"
    n, threads = crew()
    env, codes = dict({'OMP_NUM_THREADS': str(threads)}, **dict(os.environ, MPLBACKEND='agg')), []
    notebooks = [PYTHON, os.path.join(HERE, 'tests', 'notebooks.py')]
    parts = [('notebooks', notebooks + flags() + ['--n-workers', str(n)], os.path.join(HERE, 'nbs')),
             ('pytest', [PYTHON, '-m', 'pytest', '-n', str(n+1), '--dist', 'loadfile', '--no-loadscope-reorder'] + args, HERE)]
    for name, cmd, cwd in parts:
        start = time.time()
        codes.append(subprocess.call(cmd, cwd=cwd, env=env))
        say('%s: %s in %.0f s' % (name, 'passed' if codes[-1] == 0 else 'FAILED (exit code %d)' % codes[-1], time.time()-start))
    return next((c for c in codes if c), 0)


DOCS = (3, 11)  # the oldest Python that Zensical runs on


def docs(args):
    "The site, by docs/make.py"
    return subprocess.call([PYTHON, os.path.join(HERE, 'docs', 'make.py')], cwd=HERE, env=dict(os.environ, MPLBACKEND='agg'))


def check_docs():
    "Before minutes are spent: can the site be made with this Python?"
    if sys.version_info[:2] < DOCS:
        raise Failed('the documentation site needs Python %d.%d or newer, this is %d.%d (run and test work with it)' % (DOCS + tuple(sys.version_info[:2])))


COMMANDS = {'run': run, 'test': test, 'docs': docs, 'setup': lambda args: 0}


def main(argv):
    tested = argv[:1] == ['--tested']
    argv = argv[tested:]
    if argv[:1] in (['-h'], ['--help']):
        sys.stdout.write(USAGE)
        return 0
    if argv[:1] and argv[0] in COMMANDS and not (argv[0] in ('setup', 'docs') and argv[1:]):
        signal.signal(signal.SIGTERM, lambda *args: sys.exit(143))  # by way of the clean-up of what is going on
        try:
            if argv[0] == 'docs': check_docs()
            setup(tested)
            return COMMANDS[argv[0]](argv[1:])
        except Failed as e: say(e)
        except OSError as e: say('%s failed: %s' % (argv[0], explain(e)))
        except KeyboardInterrupt:
            say('interrupted')
            return 130
        return 4
    sys.stderr.write(USAGE)
    return 2


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))

"A program of a test that starts several processes: ended in any case, and where it hangs, all of them say where"
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path


def hears_signals():
    "For preexec_fn: a shell makes what it starts with & deaf to Ctrl-C, nohup to a terminal that is closed"
    for o in signal.SIGINT, signal.SIGTERM, signal.SIGHUP: signal.signal(o, signal.SIG_DFL)


def outcome(script, *words, env, seconds=500):
    "Exit code and output of a Python script; after `seconds` each of its processes prints where it stands"
    with tempfile.TemporaryFile('w+') as said:
        p = subprocess.Popen([sys.executable, str(script), *map(str, words)], env=env | dict(PYTHONFAULTHANDLER='1'), stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                             preexec_fn=hears_signals)
        try: p.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGABRT)
            p.wait(20)
        finally:
            with suppress(ProcessLookupError): os.killpg(p.pid, signal.SIGKILL)
        said.seek(0)
        return p.returncode, said.read()


@contextmanager
def kept_port():
    "A free port: bound while this lasts, so that nobody else gets it; who says SO_REUSEADDR, as torch does, can listen there all the same"
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(('127.0.0.1', 0))
        yield str(s.getsockname()[1])


def done_by_all(script, folder, without):
    "What a script of this folder, which starts its processes itself on a free port, leaves in `folder`; `without` variables of processes"
    here = Path(__file__).parent
    env = {k: v for k, v in os.environ.items() if k not in without} | dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(here), str(here.parent)]))
    with kept_port() as port: code, said = outcome(here/script, folder, port, env=env)
    assert not code, said[-6000:]
    return folder

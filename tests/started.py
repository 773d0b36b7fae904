"A program of a test that starts several processes: ended in any case, and where it hangs, all of them say where"
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path


def outcome(script, *words, env, seconds=500):
    "Exit code and output of a Python script; after `seconds` each of its processes prints where it stands"
    def hears_ctrl_c(): signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell makes what it starts with & deaf to it
    with tempfile.TemporaryFile('w+') as said:
        p = subprocess.Popen([sys.executable, str(script), *map(str, words)], env=env | dict(PYTHONFAULTHANDLER='1'), stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                             preexec_fn=hears_ctrl_c)
        try: p.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGABRT)
            p.wait(20)
        finally:
            with suppress(ProcessLookupError): os.killpg(p.pid, signal.SIGKILL)
        said.seek(0)
        return p.returncode, said.read()


def free_port():
    "One that is free, and not of those that the system gives to whoever asks for any: it may be a minute until our processes meet there"
    for port in random.SystemRandom().sample(range(21000, 32000), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(('', port))
            return port
    raise AssertionError('no port is free')


def done_by_all(script, folder, without):
    "What a script of this folder, which starts its processes itself on a free port, leaves in `folder`; `without` variables of processes"
    here = Path(__file__).parent
    env = {k: v for k, v in os.environ.items() if k not in without} | dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(here), str(here.parent)]))
    code, said = outcome(here/script, folder, free_port(), env=env)
    assert not code, said[-6000:]
    return folder

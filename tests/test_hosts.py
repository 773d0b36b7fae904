"Two machines that are network namespaces of this one, entered in place of ssh: one Run, and an end within the time limit when the network is cut"
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from fastbench.bench.hosts import Hosts, check_hosts
from fastbench.bench.launch import CannotStart
from fastbench.bench.processes import launch_processes
from fastbench.cli import app
from fastbench.errors import UserError
from fastbench.recipe import get_recipe
from fastbench.runs.store import load

TROUBLE = str(Path(__file__).parent/'examples'/'trouble.py') + ':make'
SSH = '''#!/bin/bash
while [ $# -gt 2 ]; do shift; done
[ "$1" != 10.213.7.9 ] || { echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; }
exec ip netns exec "SPACE-$1" bash -c "$2"
'''
SPACE = f'fastbench{os.getpid()}'
HOSTS = ['10.213.7.1', '10.213.7.2']


def ip(*words): return subprocess.run(['ip', *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope='module')
def hosts(tmp_path_factory):
    if not shutil.which('ip') or os.geteuid(): pytest.skip('network namespaces need root and iproute2')
    spaces = [f'{SPACE}-{o}' for o in HOSTS]
    made = [ip('netns', 'add', o) for o in spaces]
    made.append(ip('link', 'add', 'eth0', 'netns', spaces[0], 'type', 'veth', 'peer', 'name', 'eth0', 'netns', spaces[1]))
    for space, o in zip(spaces, HOSTS): made += [ip('-n', space, *w.split()) for w in ('link set lo up', f'addr add {o}/24 dev eth0', 'link set eth0 up')]
    made += [ip('netns', 'exec', o, 'true') for o in spaces]
    folder = tmp_path_factory.mktemp('bin')
    (folder/'ssh').write_text(SSH.replace('SPACE', SPACE))
    (folder/'ssh').chmod(0o755)
    old = os.environ['PATH']
    os.environ |= dict(PATH=f'{folder}:{old}', GLOO_SOCKET_IFNAME='eth0')
    try:
        if bad := [o.stderr for o in made if o.returncode]: pytest.skip(f'no network namespaces here: {bad[0]}')
        yield HOSTS
    finally:
        os.environ['PATH'] = old
        del os.environ['GLOO_SOCKET_IFNAME']
        for o in spaces: ip('netns', 'del', o)


def left():
    "Processes of a training that still run, on whichever machine"
    def of_training(p):
        try: return 'fastbench.bench.rank' in ' '.join(p.cmdline()) and os.readlink(f'/proc/{p.pid}/ns/net') != os.readlink('/proc/self/ns/net')
        except (psutil.Error, OSError): return False
    return [p for p in psutil.process_iter() if of_training(p)]


def launched(tmp_path, hosts, what='', tell=None, timeout=300, epochs=1):
    return load(launch_processes(get_recipe(TROUBLE, what=what, epochs=epochs), 1, tmp_path, tell, place=Hosts(hosts), device='cpu', timeout=timeout))


def none_left(seconds=120):
    end = time.monotonic() + seconds
    while left() and time.monotonic() < end: time.sleep(.2)
    return not left()


def test_two_machines_leave_one_run(hosts, tmp_path):
    run = launched(tmp_path, hosts)
    assert (run.status, run.world_size, len(run.ranks)) == ('ok', 2, 2)
    assert [o.suffix for o in tmp_path.iterdir()] == ['.json'] and none_left()


def test_every_command_that_trains_takes_machines(hosts, tmp_path):
    words = ['run', TROUBLE, '--hosts', ','.join(hosts), '--device', 'cpu', '--out', str(tmp_path), '--json']
    got = CliRunner().invoke(app, words)
    run, = json.loads(got.stdout)
    assert (got.exit_code, run['status'], run['world_size'], run['strategy']) == (0, 'ok', 2, 'ddp')
    for more in (['--python', sys.executable], ['--against', 'HEAD']):
        got = CliRunner().invoke(app, ['ab', TROUBLE, '--hosts', ','.join(hosts), '--set', 'lr=.2'*(more[0] == '--python') or 'epochs=1', *more])
        assert 'on this machine alone: leave out --slurm and --hosts' in str(got.exception)


def test_an_error_on_the_second_machine_is_said_once(hosts, tmp_path):
    assert launched(tmp_path, hosts, 'error').error == 'process 1: ValueError: a sample of this process is bad (in Trouble.before_batch)' and none_left()


def test_a_cut_network_ends_both_machines(hosts, tmp_path):
    def tell(o):
        if o['phase'] == 'train' and o['step'] > 2: ip('-n', f'{SPACE}-{HOSTS[1]}', 'link', 'set', 'eth0', 'down')
    try: run = launched(tmp_path, hosts, 'slow', tell, timeout=30, epochs=100)
    finally: ip('-n', f'{SPACE}-{HOSTS[1]}', 'link', 'set', 'eth0', 'up')
    assert run.status == 'failed' and 'lost each other' in run.error and none_left()


def test_nothing_is_left_when_the_command_is_killed(hosts, tmp_path):
    code = f'''
from fastbench.bench.hosts import Hosts
from fastbench.bench.processes import launch_processes
from fastbench.recipe import get_recipe
launch_processes(get_recipe({TROUBLE!r}, what="slow", epochs=100), 1, {str(tmp_path)!r}, lambda o: print(o["phase"], flush=True), place=Hosts({hosts!r}), device="cpu")
'''
    p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    while p.stdout.readline() not in ('train\n', ''): pass
    assert left()
    p.send_signal(signal.SIGKILL)
    assert none_left()


def test_a_port_in_use_is_one_line(hosts, tmp_path):
    code = 'import socket, time; s = socket.socket(); s.bind(("", 29555)); s.listen(); print(flush=True); time.sleep(300)'
    p = subprocess.Popen(['ip', 'netns', 'exec', f'{SPACE}-{HOSTS[0]}', sys.executable, '-c', code], stdout=subprocess.PIPE)
    try:
        p.stdout.readline()
        with pytest.raises(CannotStart, match='the port at which they meet is in use'): launch_processes(get_recipe(TROUBLE), 1, tmp_path, place=Hosts(hosts, port=29555), device='cpu')
        assert none_left() and not list(tmp_path.iterdir())
    finally: p.kill()


def test_machines_that_do_not_answer_or_do_not_see_the_folder(hosts):
    with pytest.raises(UserError, match='10.213.7.9 does not answer: ssh says .*No route to host'): check_hosts([*hosts, '10.213.7.9'], [])
    with pytest.raises(UserError, match=r'10.213.7.1 has no /no/such folder: .*shared.*\(and 1 more\)'): check_hosts(hosts, ['/', '/no/such folder'])


@pytest.mark.parametrize('hosts', [[], ['a', 'a']])
def test_names_of_machines_that_cannot_be(hosts):
    with pytest.raises(UserError, match='names of machines, each once'): Hosts(hosts)


def test_a_token_is_not_among_the_words_of_a_command(tmp_path, monkeypatch, capsys):
    "Everybody on a machine sees those; the processes get it from a file of the board, which only its user can read"
    from fastbench.distributed.board import Board
    monkeypatch.setenv('HF_TOKEN', 'hf_secret')
    monkeypatch.setenv('HF_HOME', '/shared/hub')
    two = Hosts(['a', 'b'])
    said = two.script('digits-xresnet18', 1, tmp_path)
    assert 'HF_HOME=/shared/hub' in said and 'hf_secret' not in said and 'HF_TOKEN' not in said
    with two.folder(tmp_path) as board:
        assert Board(board).variables() == dict(HF_TOKEN='hf_secret') and not board.stat().st_mode & 0o077


@pytest.mark.parametrize('words,said', [(['--strategy', 'zeor'], "unknown strategy 'zeor'"), (['--set', 'bs=largest'], "bs='largest' is found in one process"), (['--hosts', ''], 'hosts= cannot be')])
def test_a_dry_run_refuses_what_a_real_one_would(words, said):
    "An empty --hosts, of a variable that is not set, would have trained here"
    got = CliRunner().invoke(app, ['launch', 'digits-xresnet18', '--dry-run', *words])
    assert isinstance(got.exception, UserError) and said in str(got.exception)
    assert [o.split()[5] for o in CliRunner().invoke(app, ['launch', 'digits-xresnet18', '--dry-run', '--hosts', 'a, b']).output.splitlines()] == ['a', 'b']

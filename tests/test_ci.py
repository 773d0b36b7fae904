"What `.ci/run` installs on a bare machine, with commands that only write down what they were asked."
import os
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(os.name == 'nt' or not shutil.which('bash'), reason='a bash script')


CLUSTER = ('slurmctld', 'slurmd', 'sbatch', 'munged', 'ip')  # commands of what tests of several machines need


@pytest.fixture
def system(tmp_path, root):
    "system(what is there, ...) -> exit code, output, what apt-get was asked"
    text = (root/'.ci'/'run').read_text()
    part = text[text.index('system() {'):text.index('versions() {')]

    def _system(*there, venv=True, uid=0, broken='', cluster=True):
        there += CLUSTER*cluster
        folder = tmp_path/'bin'
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        log = tmp_path/'log'
        log.write_text('')
        scripts = {o: 'exit 0' for o in there} | dict(python=f'[ "$1" = -V ] && echo Python 3 || exit {0 if venv else 1}', id=f'echo {uid}')
        scripts['apt-get'] = f'echo "$*" >> {log}\ncase "$*" in {broken or "nothing"}) exit 1;; esac'
        if 'sudo' in there: scripts['sudo'] = '[ "$2" = true ] || { shift; exec "$@"; }'
        for name, body in scripts.items():
            if name == 'apt-get' and 'apt-get' not in there: continue
            (folder/name).write_text(f'#!{shutil.which("bash")}\n{body}\n')
            (folder/name).chmod(0o755)
        (folder/'env').symlink_to(shutil.which('env'))
        got = subprocess.run([shutil.which('bash'), '-c', f'set -uo pipefail\npython=python\n{part}\nsystem'], env={'PATH': str(folder)}, capture_output=True, text=True)
        return got.returncode, got.stdout + got.stderr, [o.split('recommends ')[-1] for o in log.read_text().splitlines() if 'update' not in o]
    return _system


def test_nothing_to_do(system):
    for browser in ('chromium', 'chromium-browser', 'google-chrome'):
        code, said, asked = system(browser, 'apt-get')
        assert (code, asked) == (0, []) and 'has venv' in said and 'browser is there' in said


def test_what_is_missing_is_installed(system):
    assert system('apt-get')[::2] == (0, ['chromium'])
    assert system('apt-get', 'chromium', venv=False)[::2] == (0, ['python3 python3-venv'])
    assert system('apt-get', venv=False)[::2] == (0, ['python3 python3-venv', 'chromium'])
    assert system('apt-get', 'sudo', uid=7)[::2] == (0, ['chromium'])


def test_a_cluster_on_one_machine(system):
    parts = ['slurmctld', 'slurmd', 'slurm-client', 'munge', 'iproute2']
    assert system('apt-get', 'chromium', cluster=False)[::2] == (0, parts)
    code, said, asked = system('apt-get', 'chromium', cluster=False, broken='*munge*')
    assert code == 0 and 'no munge here' in said and asked == parts


def test_what_cannot_be_installed_is_named(system):
    for there, uid in ((('true',), 0), (('apt-get',), 7)):
        code, said, asked = system(*there, uid=uid)
        assert (code, asked) == (0, []) and 'without chromium' in said and 'tests that need a browser or Slurm are skipped' in said
    code, said, _ = system('apt-get', broken='*chromium*')
    assert code == 0 and 'no chromium here' in said
    assert system('apt-get', venv=False, broken='*python3-venv*')[0] != 0  # without it nothing works

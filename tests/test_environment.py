"What a Run says of its machine: limits, secrets, every warning and what must not warn, GPUs from a stand-in for NVML."
import json
import os
import subprocess
import sys
from types import SimpleNamespace as NS

import pytest

from fastbench.machine import environment as e
from fastbench.errors import UserError
from test_noise import FakeNVML


# What stays

def test_environment_is_json_and_holds_no_secret(monkeypatch):
    monkeypatch.setenv('HF_TOKEN', 'sesame')
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'sesame')
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    text = json.dumps(got := e.environment())
    assert 'sesame' not in text and e.platform.node() not in (text if len(e.platform.node()) > 3 else '')
    assert got['variables']['OMP_NUM_THREADS'] == '3'
    assert got['memory'] > 0 and got['cores']['usable'] > 0 and len(got['host']) == 12


def test_allowed_variables_hold_no_secrets_by_name():
    assert not [o for o in e.ALLOWED if any(w in o for w in ('TOKEN_', 'SECRET', 'KEY', 'PASS', 'AUTH', 'CREDENTIAL', 'PROXY', 'URL'))]
    assert len(set(e.ALLOWED)) == len(e.ALLOWED)
    assert {'OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'CUDA_VISIBLE_DEVICES', 'PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF', 'HF_HUB_OFFLINE',
            'TOKENIZERS_PARALLELISM', 'SLURM_JOB_ID'} <= set(e.ALLOWED)


def test_values_that_cannot_be_read_are_missing(monkeypatch):
    monkeypatch.setattr(e, '_read', lambda *args: None)
    monkeypatch.setattr(e.psutil, 'cpu_count', lambda logical=True: None)
    assert e.cpu_limit() is None and e.memory_limit() is None and 'physical' not in e.cores() and e.cores()['usable'] >= 1


def test_limits_of_version_2(cgroup):
    kw = cgroup('0::/a/b\n', **{'cpu.max': 'max 100000', 'a/cpu.max': '150000 100000', 'a/b/cpu.max': 'max 100000', 'a/memory.max': '1000', 'a/b/memory.max': 'max'})
    assert e.cpu_limit(**kw) == 1.5 and e.memory_limit(**kw) == 1000


def test_limits_of_version_1(cgroup):
    kw = cgroup('4:memory:/x\n3:cpu,cpuacct:/x\n', **{'cpu/x/cpu.cfs_quota_us': '50000', 'cpu/x/cpu.cfs_period_us': '100000', 'cpu/cpu.cfs_quota_us': '-1',
                                                     'memory/x/memory.limit_in_bytes': '9223372036854771712', 'memory/memory.limit_in_bytes': '2000'})
    assert e.cpu_limit(**kw) == .5 and e.memory_limit(**kw) == 2000


def test_no_limit(cgroup):
    kw = cgroup('4:memory:/\n', **{'memory/memory.limit_in_bytes': '9223372036854771712'})  # how version 1 says "none"
    assert e.memory_limit(**kw) is None
    kw = cgroup('0::/gone\n', **{'cpu.max': 'max 100000'})
    assert e.cpu_limit(**kw) is None and e.memory_limit(**kw) is None
    assert e.cpu_limit(root='/nowhere', membership='/nowhere') is None


def git(folder, *args): subprocess.run(['git', '-C', folder, '-c', 'user.name=a', '-c', 'user.email=a@b', *args], check=True, capture_output=True)


def test_commit_and_dirty(tmp_path, monkeypatch):
    git(tmp_path, 'init', '-q')
    assert e.git_state(tmp_path) is None  # no commit yet
    (tmp_path/'a').write_text('1')
    git(tmp_path, 'add', 'a')
    git(tmp_path, 'commit', '-qm', 'one')
    (tmp_path/'untracked').write_text('')
    got = e.git_state(tmp_path)
    assert len(got['commit']) == 40 and got['dirty'] is False
    (tmp_path/'a').write_text('2')
    assert e.git_state(tmp_path) == {**got, 'dirty': True}
    monkeypatch.chdir(tmp_path)
    assert e.commits()['folder'] == {**got, 'dirty': True}
    # installed below somebody else's checkout: not that checkout's commit
    (tmp_path/'site-packages').mkdir()
    monkeypatch.setattr(e.fastbench, '__file__', str(tmp_path/'site-packages'/'fastbench'/'__init__.py'))
    assert 'fastbench' not in e.commits()
    monkeypatch.setenv('PATH', str(tmp_path))
    assert e.git_state(tmp_path) is None  # no git


def test_torch_is_asked_only_if_it_is_loaded():
    code = ('import sys; from fastbench.machine.environment import *; got = environment(); device_info("cpu");'
            'assert "torch" not in sys.modules and "torch" not in got')
    subprocess.run([sys.executable, '-c', code], check=True)
    torch = pytest.importorskip('torch')
    assert e.environment()['torch']['threads'] == torch.get_num_threads()


# GPUs, by a stand-in for NVML

@pytest.mark.parametrize('visible, index, expect', [(None, 1, 1), ('1,0', 0, 1), ('1', 0, 1), ('GPU-bbbb,GPU-aaaa', 0, 1), ('GPU-b', 0, 1), ('GPU-bbbb', 0, 1)])
def test_visible_devices(visible, index, expect):
    assert e._handle(FakeNVML(), index, {} if visible is None else {'CUDA_VISIBLE_DEVICES': visible}) == expect


@pytest.mark.parametrize('hides', ['', ' ', '-1'])
def test_no_device_is_visible(monkeypatch, hides):
    "As for CUDA itself, which counts an empty list as one"
    monkeypatch.setattr(e, '_nvml', FakeNVML)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', hides)
    with pytest.raises(UserError, match='cuda:0: there is no such GPU'): e.device_info('cuda:0')


def test_device_info(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setattr(e, '_nvml', lambda: FakeNVML(lacks=['PowerLimit']))
    assert e.device_info('cuda:1') == dict(kind='cuda', name='NVIDIA Test 1', memory=16*2**30, driver='575.1', capability='9.0')
    with pytest.raises(UserError, match='cuda:5: there is no such GPU.*nvidia-smi -L'): e.device_info('cuda:5')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    with pytest.raises(UserError, match='CUDA_VISIBLE_DEVICES is 0'): e.device_info('cuda:1')


@pytest.mark.parametrize('uuid, expect', [('bbbb', 1), ('aaaa', 0), ('unknown', 1)])
def test_torch_says_which_gpu_if_it_has_started_cuda(monkeypatch, uuid, expect):
    cuda = NS(is_initialized=lambda: True, get_device_properties=lambda i: NS(uuid=uuid))
    monkeypatch.setitem(sys.modules, 'torch', NS(cuda=cuda))
    assert e._handle(FakeNVML(), 1, {}) == expect


def test_no_driver(monkeypatch):
    monkeypatch.setattr(e, '_nvml', lambda: None)
    with pytest.raises(UserError, match='no NVIDIA driver answers.*use cpu'): e.device_info('cuda')


def test_nvml_is_started_once_a_process():
    assert e._nvml() is e._nvml()
    e._nvml_of.cache_clear()
    e._nvml(), e._nvml(), e._nvml_of(os.getpid() + 1)
    assert e._nvml_of.cache_info().misses == 2


def test_what_fp32_is_on_a_gpu(monkeypatch):
    import torch
    assert 'fp32' not in e.torch_state() or torch.cuda.is_initialized()
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91000)
    assert e.torch_state()['fp32'] == dict(matmul=torch.backends.cuda.matmul.fp32_precision, conv=torch.backends.cudnn.conv.fp32_precision)
    older = NS(cuda=NS(matmul=NS(allow_tf32=False)), cudnn=NS(allow_tf32=True))
    assert e.fp32_modes(older) == dict(matmul='ieee', conv='tf32')

"What a Run says of its machine: limits, secrets, every warning and what must not warn, GPUs from a stand-in for NVML."
import json
import os
import subprocess
import sys
from types import SimpleNamespace as NS

import pytest

from fastbench import environment as e
from fastbench.recipe import UserError


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
    assert not {'cpu_hot', 'throttled', 'cpu_mhz'} & set(e.machine_state())


@pytest.fixture
def cgroup(tmp_path):
    def make(membership, **files):
        (tmp_path/'membership').write_text(membership)
        for name, text in files.items():
            path = tmp_path/name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return dict(root=tmp_path, membership=tmp_path/'membership')
    return make


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


def test_time_held_back(cgroup):
    assert e._cgroup_throttled(**cgroup('0::/a\n', **{'a/cpu.stat': 'usage_usec 9\nthrottled_usec 2500000\n', 'cpu.stat': 'throttled_usec 1\n'})) == 2.5


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
    code = ('import sys; from fastbench.environment import *; got = environment(); machine_state(); device_info("cpu");'
            'assert "torch" not in sys.modules and "torch" not in got')
    subprocess.run([sys.executable, '-c', code], check=True)
    torch = pytest.importorskip('torch')
    assert e.environment()['torch']['threads'] == torch.get_num_threads()


# What may change

def test_own_work_is_not_others():
    before = e.machine_state()
    subprocess.run([sys.executable, '-c', 'sum(i*i for i in range(5_000_000))'], check=True)  # a child that has ended
    running = subprocess.Popen([sys.executable, '-c', 'import sys\nx = sum(i*i for i in range(5_000_000))\nprint(flush=True); sys.stdin.read()'],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    running.stdout.readline()  # a child that goes on
    after = e.machine_state()
    running.communicate()
    assert after['cpu_own'] - before['cpu_own'] > .3


def test_a_process_that_has_gone_is_no_error(): assert e._own_processes(2**30) == [] and e.machine_state(root=2**30)['cpu_own'] == 0


BEFORE = dict(clock=100., logical=8, cpu_total=1000., cpu_busy=500., cpu_own=50., cpu_steal=5., swapped=1000, throttled=1., cpu_hot=3, load=.2,
              on_battery=False, gpu=dict(busy=0., others=0, reasons=[], power_slow=1., heat_slow=1.))


def later(gpu=None, **change):
    "The state 10 s later, in which only our own 4 cores worked, but for what `change` adds"
    after = {**BEFORE, 'clock': 110., 'cpu_total': 1080., 'cpu_busy': 540., 'cpu_own': 90.}
    for k, v in change.items(): after[k] = v if isinstance(v, bool) else after[k] + v
    return {**after, 'gpu': {**BEFORE['gpu'], **(gpu or {})}}


def warned(before, after): return e.warnings_between(before, after)


def test_a_quiet_machine_is_not_warned_of(): assert warned(BEFORE, later()) == []


# what changes -> the fact with its number, and what to do
CASES = {
    'others': (later(cpu_busy=20), 'busy machine: other programs used 2.0 of 8 cores', 'stop it and repeat'),
    'steal': (later(cpu_steal=8), 'stolen time: the hypervisor took 10%', 'dedicated machine'),
    'swap': (later(swapped=200*2**20), 'swapping: 200 MB', 'smaller batch'),
    'container': (later(throttled=3), 'throttled container: it was held back for 30%', 'OMP_NUM_THREADS'),
    'heat': (later(cpu_hot=2), 'throttled processor: it slowed down 2 times', 'let it cool down'),
    'battery': (later(on_battery=True), 'on battery', 'plug it in'),
    'one on the GPU': (later(gpu=dict(others=1)), 'shared GPU: 1 other process had', 'CUDA_VISIBLE_DEVICES'),
    'two on the GPU': (later(gpu=dict(others=2)), 'shared GPU: 2 other processes had', 'CUDA_VISIBLE_DEVICES'),
    'hot GPU': (later(gpu=dict(heat_slow=6.)), 'throttled GPU: too hot for 50% of the time', 'let it cool down'),
    'reasons of a GPU': (later(gpu=dict(reasons=['short of power', 'too hot'])), 'throttled GPU: short of power and too hot', 'check both'),
    'power limit': (later(gpu=dict(power_slow=3.)), 'throttled GPU: at its power limit for 20%', 'same limit'),
}


@pytest.mark.parametrize('case', CASES)
def test_warning(case):
    after, fact, do = CASES[case]
    text, = warned(BEFORE, after)
    assert text.startswith(fact) and do in text and len(text.split('. ')) == 2


def test_a_gpu_busy_before_we_began():
    text, = warned({**BEFORE, 'gpu': {**BEFORE['gpu'], 'busy': .9}}, later())
    assert text.startswith('shared GPU: it was 90% busy before')
    assert warned(BEFORE, later(gpu=dict(busy=1.))) == []  # after: that was us


@pytest.mark.parametrize('change', [dict(cpu_busy=7), dict(cpu_steal=1), dict(swapped=2**20), dict(throttled=.05), dict(gpu=dict(power_slow=1.4))])
def test_below_the_limit_is_silent(change): assert warned(BEFORE, later(**change)) == []


def test_what_is_missing_is_not_warned_of():
    for key in BEFORE:
        a, b = dict(BEFORE), later(cpu_busy=20)
        a.pop(key), b.pop(key)
        assert len(warned(a, b)) == (0 if key in ('clock', 'cpu_total', 'cpu_busy', 'cpu_own') else 1), key
    assert warned({}, {}) == [] and e.noise({}, {}) == {}


def test_a_counter_that_went_back_says_nothing():
    "The machine was started anew between the samples"
    assert e.noise(later(cpu_busy=20, swapped=5), BEFORE) == {}
    assert 'swapped' not in e.noise({**BEFORE, 'swapped': 10**12}, later())


def test_machine_without_counters_says_nothing(): assert 'others' not in e.noise({**BEFORE, 'cpu_total': 0.}, {**later(cpu_busy=20), 'cpu_total': 0.})


def test_a_very_short_run_says_nothing():
    a, b = dict(BEFORE), {**BEFORE, 'clock': 100.02, 'cpu_busy': 500.03, 'cpu_total': 1000.04}
    assert warned(a, b) == []


def test_two_real_samples_make_sense():
    a, b = e.machine_state(), e.machine_state()
    assert json.dumps(a) and b['clock'] >= a['clock'] and b['cpu_total'] >= a['cpu_total']
    assert all(isinstance(o, str) for o in e.warnings_between(a, b))


@pytest.mark.parametrize('battery, expect', [(None, None), (NS(power_plugged=True), False), (NS(power_plugged=False), True), (NS(power_plugged=None), None)])
def test_battery(monkeypatch, battery, expect):
    monkeypatch.setattr(e.psutil, 'sensors_battery', lambda: battery, raising=False)
    assert e._on_battery() is expect
    monkeypatch.delattr(e.psutil, 'sensors_battery')
    assert e._on_battery() is None


# GPUs, by a stand-in for NVML

class NVMLError(Exception): pass


class FakeNVML:
    "Two GPUs; `lacks` names the questions that they do not answer"
    NVMLError = NVMLError

    def __init__(self, pids=(), bits=0, lacks=()): self.pids, self.bits, self.lacks = pids, bits, lacks

    def __getattribute__(self, name):
        if name.startswith('nvml') and any(name.endswith(o) for o in object.__getattribute__(self, 'lacks')):
            def no(*args): raise NVMLError('Not Supported')
            return no
        return object.__getattribute__(self, name)

    def nvmlDeviceGetCount(self): return 2
    def nvmlDeviceGetHandleByIndex(self, i):
        if i > 1: raise NVMLError('Invalid Argument')
        return i
    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in ('GPU-aaaa', 'GPU-bbbb'): raise NVMLError('Not Found')
        return ['GPU-aaaa', 'GPU-bbbb'].index(uuid)
    def nvmlDeviceGetUUID(self, h): return ['GPU-aaaa', 'GPU-bbbb'][h]
    def nvmlDeviceGetName(self, h): return f'NVIDIA Test {h}'
    def nvmlSystemGetDriverVersion(self): return '575.1'
    def nvmlDeviceGetMemoryInfo(self, h): return NS(total=16*2**30, used=2**30)
    def nvmlDeviceGetCudaComputeCapability(self, h): return (9, 0)
    def nvmlDeviceGetEnforcedPowerLimit(self, h): return 700_000
    def nvmlDeviceGetUtilizationRates(self, h): return NS(gpu=40)
    def nvmlDeviceGetComputeRunningProcesses(self, h): return [NS(pid=p) for p in self.pids]
    def nvmlDeviceGetCurrentClocksEventReasons(self, h): return self.bits
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, h): return self.bits
    def nvmlDeviceGetViolationStatus(self, h, policy): return NS(violationTime=int((policy+1)*1e9))
    def nvmlDeviceGetTemperature(self, h, sensor): return 61
    def nvmlDeviceGetClockInfo(self, h, kind): return 1980


def test_gpu_state():
    got = e.gpu_state(FakeNVML(pids=[7, 8], bits=0x20 | 0x40 | 0x80 | 0x4 | 0x1), 0, own={7}, using=True)
    assert got == dict(busy=.4, memory=2**30, others=1, reasons=['short of power', 'too hot'], celsius=61, mhz=1980, power_slow=1., heat_slow=2.)


@pytest.mark.parametrize('pids, own, using, others', [
    ([], {7}, True, 0), ([7], {7}, True, 0), ([7, 8], {7}, True, 1), ([8], {7}, False, 1),
    ([90001], {7}, True, 0), ([90001, 90002], {7}, True, 1)])  # the numbers are those of the host: one of them is ours
def test_others_on_the_gpu(pids, own, using, others): assert e.gpu_state(FakeNVML(pids), 0, own, using)['others'] == others


def test_what_a_gpu_cannot_say_is_missing():
    assert 'reasons' in e.gpu_state(FakeNVML(lacks=['EventReasons']), 0, using=False)  # older drivers have the older question
    got = e.gpu_state(FakeNVML(lacks=['Reasons', 'Status', 'Rates', 'Processes', 'Info', 'Temperature']), 0, using=False)
    assert got == {}


@pytest.mark.parametrize('visible, index, expect', [(None, 1, 1), ('', 1, 1), ('1,0', 0, 1), ('1', 0, 1), ('GPU-bbbb,GPU-aaaa', 0, 1), ('GPU-b', 0, 1), ('GPU-bbbb', 0, 1)])
def test_visible_devices(visible, index, expect):
    assert e._handle(FakeNVML(), index, {} if visible is None else {'CUDA_VISIBLE_DEVICES': visible}) == expect


def test_device_info(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setattr(e, '_nvml', lambda: FakeNVML(lacks=['PowerLimit']))
    assert e.device_info('cuda:1') == dict(kind='cuda', name='NVIDIA Test 1', memory=16*2**30, driver='575.1', capability='9.0')
    assert e.machine_state('cuda')['gpu']['busy'] == .4 and 'gpu' not in e.machine_state('cpu')
    with pytest.raises(UserError, match='cuda:5: there is no such GPU.*nvidia-smi -L'): e.device_info('cuda:5')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    with pytest.raises(UserError, match='CUDA_VISIBLE_DEVICES is 0'): e.device_info('cuda:1')


@pytest.mark.parametrize('uuid, expect', [('bbbb', 1), ('aaaa', 0), ('unknown', 1)])
def test_torch_says_which_gpu_if_it_has_started_cuda(monkeypatch, uuid, expect):
    cuda = NS(is_initialized=lambda: True, get_device_properties=lambda i: NS(uuid=uuid))
    monkeypatch.setitem(sys.modules, 'torch', NS(cuda=cuda))
    assert e._handle(FakeNVML(), 1, {}) == expect


def test_a_gpu_that_nvml_does_not_know_is_missing(monkeypatch):
    monkeypatch.setattr(e, '_nvml', lambda: FakeNVML())
    assert 'gpu' not in e.machine_state('cuda:5')


def test_no_driver(monkeypatch):
    monkeypatch.setattr(e, '_nvml', lambda: None)
    with pytest.raises(UserError, match='no NVIDIA driver answers.*use cpu'): e.device_info('cuda')
    assert 'gpu' not in e.machine_state('cuda')


def test_nvml_is_started_once_a_process():
    assert e._nvml() is e._nvml()
    e._nvml_of.cache_clear()
    e._nvml(), e._nvml(), e._nvml_of(os.getpid() + 1)
    assert e._nvml_of.cache_info().misses == 2

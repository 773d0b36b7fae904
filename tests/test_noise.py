"What disturbed a run: each thing that the issue names, by samples that are made up, and what the machine really says."
import json
import subprocess
import sys
from types import SimpleNamespace as NS

import pytest

from fastbench.machine import environment as e
from fastbench.machine import noise as n


def test_own_work_is_not_others():
    before = n.machine_state()
    work = 'import sys, time\nwhile time.process_time() < .5: pass\n'  # as long on every processor
    subprocess.run([sys.executable, '-c', work], check=True)  # a child that has ended
    running = subprocess.Popen([sys.executable, '-c', work + 'print(flush=True); sys.stdin.read()'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    running.stdout.readline()  # a child that goes on
    after = n.machine_state()
    running.communicate()
    assert after['cpu_own'] - before['cpu_own'] > .9  # of both


def test_a_process_that_has_gone_is_no_error(): assert n._own_processes(2**30) == [] and n.machine_state(root=2**30)['cpu_own'] == 0


BEFORE = dict(clock=100., logical=8, cpu_total=1000., cpu_busy=500., cpu_own=50., cpu_steal=5., swapped=1000, throttled=1., cpu_hot=3, load=.2,
              on_battery=False, cpu_mhz=3500., gpu=dict(busy=0., others=0, reasons=[], power_slow=1., heat_slow=1.))


def later(gpu=None, **change):
    "The state 10 s later, in which only our own 4 cores worked, but for what `change` adds"
    after = {**BEFORE, 'clock': 110., 'cpu_total': 1080., 'cpu_busy': 540., 'cpu_own': 90.}
    for k, v in change.items(): after[k] = after[k] + v if k in after and not isinstance(v, bool) else v
    return {**after, 'gpu': {**BEFORE['gpu'], **(gpu or {})}}


def warned(before, after): return n.warnings_between(before, after)


def test_a_quiet_machine_is_not_warned_of(): assert warned(BEFORE, later()) == []


# what changes -> the fact with its number, and what to do
CASES = {
    'others': (later(cpu_busy=20), 'busy machine: other programs used 2.0 of 8 cores', 'stop it and repeat'),
    'steal': (later(cpu_steal=8), 'stolen time: the hypervisor took 10%', 'dedicated machine'),
    'swap': (later(swapped=200*2**20), 'swapping: 200 MiB', 'smaller batch'),
    'container': (later(throttled=3), 'throttled container: it was held back for 30%', 'OMP_NUM_THREADS'),
    'heat, once': (later(cpu_hot=1), 'throttled processor: it slowed down once because', 'let it cool down'),
    'heat': (later(cpu_hot=2), 'throttled processor: it slowed down 2 times', 'let it cool down'),
    'clock': (later(cpu_mhz=-1500.), 'uneven processor: its clock was between 2,000 and 3,500 MHz', 'governor'),
    'governor': (later(saving='governor powersave'), 'slow processor: its clock is held low by the governor powersave', 'cpupower'),
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


@pytest.mark.parametrize('change', [dict(cpu_busy=7), dict(cpu_steal=1), dict(swapped=2**20), dict(throttled=.05), dict(cpu_mhz=-800.), dict(gpu=dict(power_slow=1.4))])
def test_below_the_limit_is_silent(change): assert warned(BEFORE, later(**change)) == []


def test_what_is_missing_is_not_warned_of():
    for key in BEFORE:
        a, b = dict(BEFORE), later(cpu_busy=20)
        a.pop(key), b.pop(key)
        assert len(warned(a, b)) == (0 if key in ('clock', 'cpu_total', 'cpu_busy', 'cpu_own') else 1), key
    assert warned({}, {}) == [] and n.noise({}, {}) == {}


def test_a_counter_that_went_back_says_nothing():
    "The machine was started anew between the samples"
    assert n.noise(later(cpu_busy=20, swapped=5), BEFORE) == {}
    assert 'swapped' not in n.noise({**BEFORE, 'swapped': 10**12}, later())


def test_machine_without_counters_says_nothing(): assert 'others' not in n.noise({**BEFORE, 'cpu_total': 0.}, {**later(cpu_busy=20), 'cpu_total': 0.})


def test_a_very_short_run_says_nothing():
    a, b = dict(BEFORE), {**BEFORE, 'clock': 100.02, 'cpu_busy': 500.03, 'cpu_total': 1000.04}
    assert warned(a, b) == []


@pytest.mark.parametrize('seen, fact', [
    (dict(cpu_mhz=1200.), 'uneven processor: its clock was between 1,200 and 3,500'), (dict(on_battery=True), 'on battery'), (dict(saving='energy preference power'), 'slow processor'),
    (dict(gpu=dict(others=3)), 'shared GPU: 3 other'), (dict(gpu=dict(reasons=['too hot'])), 'throttled GPU: too hot'), (dict(gpu=dict(busy=1.)), None), ({}, None)])
def test_what_was_seen_in_the_middle(seen, fact):
    "Gone again when the run ends"
    got = n.warnings_between(BEFORE, later(), [dict(cpu_mhz=3500.), seen])
    assert got == [] if fact is None else len(got) == 1 and got[0].startswith(fact)


@pytest.fixture
def cpus(tmp_path, monkeypatch):
    "Cores with a clock that the test writes"
    monkeypatch.setattr(n, 'CPUS', tmp_path)
    def make(core=0, **files):
        (tmp_path/f'cpu{core}'/'cpufreq').mkdir(parents=True, exist_ok=True)
        for k, v in files.items(): (tmp_path/f'cpu{core}'/'cpufreq'/k).write_text(f'{v}\n')
    return make


def test_the_clock_is_that_of_the_fastest_core(cpus):
    cpus(0, scaling_cur_freq=800_000)
    cpus(11, scaling_cur_freq=3_400_000)
    cpus(2, scaling_cur_freq='<unknown>')
    assert n.glance()['cpu_mhz'] == 3400 and n.machine_state()['cpu_mhz'] == 3400


@pytest.mark.parametrize('files, said', [
    (dict(scaling_driver='acpi-cpufreq', scaling_governor='powersave'), 'governor powersave'), (dict(scaling_driver='intel_pstate', scaling_governor='powersave'), None),
    (dict(scaling_driver='amd-pstate-epp', scaling_governor='powersave', energy_performance_preference='balance_performance'), None),
    (dict(scaling_driver='intel_pstate', scaling_governor='powersave', energy_performance_preference='power'), 'energy preference power'),
    (dict(scaling_governor='performance', scaling_max_freq=2_000_000, cpuinfo_max_freq=4_000_000), 'limit of 2,000 MHz of 4,000'),
    (dict(scaling_governor='performance', scaling_max_freq=3_900_000, cpuinfo_max_freq=4_000_000), None), ({}, None)])
def test_a_clock_that_is_held_low(cpus, files, said):
    cpus(**files)
    assert n.glance().get('saving') == said


def test_values_that_cannot_be_read_are_missing(monkeypatch):
    monkeypatch.setattr(n, '_read', lambda *args: None)
    assert not {'cpu_hot', 'cpu_mhz', 'saving'} & set(n.machine_state()) and 'cpu_mhz' not in n.glance()


def test_a_look_at_a_gpu_is_optional(monkeypatch):
    monkeypatch.setattr(n, '_nvml', lambda: None)
    assert 'gpu' not in n.machine_state('cuda') and 'gpu' not in n.glance('cuda')


def test_what_a_run_keeps():
    assert n.noise(BEFORE, later(cpu_busy=20)) == dict(seconds=10., load=.2, cpu_mhz=[3500., 3500.], others=2., steal=0., swapped=0, throttled=0., cpu_hot=0, gpu_hot=0., gpu_power=0.)


def test_time_held_back(cgroup):
    assert n._cgroup_throttled(**cgroup('0::/a\n', **{'a/cpu.stat': 'usage_usec 9\nthrottled_usec 2500000\n', 'cpu.stat': 'throttled_usec 1\n'})) == 2.5


def test_two_real_samples_make_sense():
    a, b = n.machine_state(), n.machine_state()
    assert json.dumps(a) and b['clock'] >= a['clock'] and b['cpu_total'] >= a['cpu_total']
    assert all(isinstance(o, str) for o in n.warnings_between(a, b))


@pytest.mark.parametrize('battery, expect', [(None, None), (NS(power_plugged=True), False), (NS(power_plugged=False), True), (NS(power_plugged=None), None)])
def test_battery(monkeypatch, battery, expect):
    monkeypatch.setattr(n.psutil, 'sensors_battery', lambda: battery, raising=False)
    assert n._on_battery() is expect
    monkeypatch.delattr(n.psutil, 'sensors_battery')
    assert n._on_battery() is None


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
    got = n.gpu_state(FakeNVML(pids=[7, 8], bits=0x20 | 0x40 | 0x80 | 0x4 | 0x1), 0, own={7}, using=True)
    assert got == dict(busy=.4, memory=2**30, others=1, reasons=['short of power', 'too hot'], celsius=61, mhz=1980, power_slow=1., heat_slow=2.)


@pytest.mark.parametrize('pids, own, using, others', [
    ([], {7}, True, 0), ([7], {7}, True, 0), ([7, 8], {7}, True, 1), ([8], {7}, False, 1),
    ([90001], {7}, True, 0), ([90001, 90002], {7}, True, 1)])  # the numbers are those of the host: one of them is ours
def test_others_on_the_gpu(pids, own, using, others): assert n.gpu_state(FakeNVML(pids), 0, own, using)['others'] == others


def test_what_a_gpu_cannot_say_is_missing():
    assert 'reasons' in n.gpu_state(FakeNVML(lacks=['EventReasons']), 0, using=False)  # older drivers have the older question
    got = n.gpu_state(FakeNVML(lacks=['Reasons', 'Status', 'Rates', 'Processes', 'Info', 'Temperature']), 0, using=False)
    assert got == {}


def test_a_gpu_that_nvml_does_not_know_is_missing(monkeypatch):
    for o in (n, e): monkeypatch.setattr(o, '_nvml', lambda: FakeNVML())
    assert n.machine_state('cuda')['gpu']['busy'] == .4 and 'gpu' not in n.machine_state('cpu')
    assert 'gpu' not in n.machine_state('cuda:5')

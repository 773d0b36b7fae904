"""What a GPU does to a Run, on a pretended one: devices and their numbers, precision, memory, failures, what is measured and what is not."""
import types
import warnings

import pytest
import torch
from fastai.callback.core import Callback

import fastbench.machine.environment as environment
import fastbench.machine.flops as flops
import fastbench.bench.run as run_module
from fastbench.train.batch_size import is_oom
from fastbench.callback.backends import Backends, check_tf32
from fastbench.measure.clock import DeviceQueue, train_device
from fastbench.bench.failure import explain, is_lost
from fastbench.bench.learner import bench_learner
from fastbench.errors import UserError
from fastbench.recipe import get_recipe, recipes
from fastbench.bench.run import run_recipe
from fastbench.train.learner import find_device, precision_on
from pretend import pretend

SMALL = dict(offline=True, epochs=1, batches=4, bs=16, workers=0)


def quiet(recipe='digits-xresnet18', **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return run_recipe(recipe, **{**SMALL, **kwargs})


def run_with(callback):
    "A Run on the pretended GPU, with one more callback on its Learner"
    def build(*args, _build=run_module._build):
        learn, warned = _build(*args)
        learn.add_cb(callback)
        return learn, warned
    with pytest.MonkeyPatch.context() as m:
        m.setattr(run_module, '_build', build)
        return quiet(device='cuda')


# --- devices

@pytest.mark.parametrize('asked, got', [('cuda', 'cuda:0'), ('cuda:0', 'cuda:0'), ('cuda:1', 'cuda:1'), ('cpu', 'cpu')])
def test_a_device_gets_its_number(gpu, asked, got): assert str(find_device(asked)) == got


def test_the_current_device_is_meant_by_cuda(gpu):
    torch.cuda.set_device(1)
    assert str(find_device('cuda')) == 'cuda:1'
    assert str(train_device(types.SimpleNamespace(dls=types.SimpleNamespace(device=torch.device('cuda'))))) == 'cuda:1'


@pytest.mark.parametrize('device', ['cuda', 'cuda:1'])
def test_largest_batch_with_and_without_a_number(gpu, device):
    learn = bench_learner('digits-xresnet18', device=device, offline=True, workers=0)
    learn.dls.device = torch.device(device)  # as DataLoaders of a user have it
    assert learn.find_batch_size(start=8, max=16) == 16


@pytest.mark.parametrize('device', ['cuda:0', 'cuda:1'])
def test_a_profiled_fit_on_a_fresh_process(gpu, device):
    "Nothing was initialised, and the second device is not the current one"
    run = quiet(device=device)
    assert run.status == 'ok', run.error
    assert run.table.rows and torch.cuda.current_device() == 0


def test_events_belong_to_the_device_of_the_data(gpu):
    queue = DeviceQueue(torch.device('cuda:1'))
    e, side = queue.event(), queue.event()
    queue.record(e)
    queue.beside(side)
    queue.hold(1e-6)
    assert e.device == side.device == queue.side.device == torch.device('cuda:1') and torch.cuda.current_device() == 0


def test_nothing_is_there(monkeypatch):
    if torch.cuda.is_available(): pytest.skip('a GPU is there')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES='' shows none: unset it") as e: find_device('cuda')
    assert '\n' not in str(e.value)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES')
    def old(): warnings.warn('CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver'); return False
    monkeypatch.setattr(torch.cuda, 'is_available', old)
    if torch.version.cuda:
        with pytest.raises(UserError, match='the NVIDIA driver is too old for CUDA'): find_device('cuda')
    monkeypatch.setattr(torch.version, 'cuda', None)
    with pytest.raises(UserError, match='built for CPUs only'): find_device('cuda')
    with pytest.raises(UserError, match='one of cpu, cuda, cuda:1, mps, xpu'): find_device('tpu')


def test_nvml_and_torch_number_devices_differently(gpu, monkeypatch):
    "torch's first is the fastest, NVML's the first on the bus: asked by UUID, torch woken for it"
    props = [types.SimpleNamespace(uuid='fast'), types.SimpleNamespace(uuid='slow')]
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda i: props[i])
    class NVML:
        NVMLError = RuntimeError
        def nvmlDeviceGetCount(self): return 2
        def nvmlDeviceGetHandleByIndex(self, i): return ['GPU-slow', 'GPU-fast'][i]
        def nvmlDeviceGetHandleByUUID(self, uuid): return uuid if uuid.startswith('GPU') else None
    assert not gpu.initialized
    assert environment._handle(NVML(), 0, {}) == 'GPU-fast'


# --- precision

@pytest.mark.parametrize('capability, mixed', [((7, 5), 'fp16'), ((8, 0), 'bf16'), ((9, 0), 'bf16')])
def test_mixed_is_what_the_device_multiplies(capability, mixed):
    with pretend(capability=capability):
        cuda = torch.device('cuda:0')
        assert (precision_on('mixed', cuda), precision_on('half', cuda), precision_on('fp16-cuda', cuda)) == (mixed, f'half-{mixed}', 'fp16')
        run = quiet(device='cuda', precision='mixed')
    assert run.status == 'ok' and run.precision == dict(asked='mixed', effective=mixed)


def test_published_fp16_is_fp16_on_every_gpu():
    "By name, where the authors' figures are of fp16; DeepSpeed's rung is in bf16, and says so"
    from fastbench.recipe import expand
    asked = {o.precision for name in ('fp16', 'wikitext', 'colab', 'faster') for o in expand([name]) if o.name != 'faster-zero2'} | {o.precision for o in expand(['dawn'])[:10]}
    assert not asked & {'mixed', 'bf16', 'half', 'half-bf16'} and 'fp16-cuda' in asked


def test_tf32_and_cudnn_are_switched_for_the_fit(gpu):
    seen = []
    class Look(Callback):
        def before_batch(self): seen.append((torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()))
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    for tf32, want in ((True, 'high'), (False, 'highest'), (None, before[1])):
        learn = bench_learner('digits-xresnet18', device='cuda', offline=True, workers=0, batches=2, tf32=tf32)
        learn.add_cb(Look())
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        assert set(seen) == {(True, want)} and (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()) == before
        seen.clear()
    assert not any(isinstance(o, Backends) for o in bench_learner('digits-xresnet18', device='cpu', offline=True).cbs)


def test_tf32_without_effect_is_refused():
    with pytest.raises(UserError, match='tf32=True has no effect on cpu'): bench_learner('digits-xresnet18', device='cpu', offline=True, tf32=True)
    with pretend(capability=(7, 5)), pytest.raises(UserError, match='compute capability 7.5'): check_tf32(torch.device('cuda:0'))


@pytest.mark.parametrize('mode, ok', [(True, True), ('max-autotune', True), ('reduce-overhead', True), ('fast', False), (1, False), (None, False)])
def test_compile_takes_a_mode(mode, ok):
    if ok: return get_recipe('digits-xresnet18', compile=mode)
    with pytest.raises(UserError, match='compile=.* cannot be'): get_recipe('digits-xresnet18', compile=mode)


def test_a_mode_reaches_torch_compile():
    learn = bench_learner('digits-xresnet18', device='cpu', offline=True, compile='max-autotune')
    assert learn.compiling._options['mode'] == 'max-autotune'
    assert 'mode' not in bench_learner('digits-xresnet18', device='cpu', offline=True, compile=True).compiling._options


def test_fused_unless_the_experiment_says_otherwise():
    opts = {k: o.opt for k, o in recipes().items()}
    assert opts['digits-xresnet18'] == opts['docstrings-lstm'] == opts['imdb-roberta'] == 'fused_adam'
    assert opts['imdb-distilbert'] == opts['faster-plain'] == 'adam' and opts['imagenette-timm_resnet50'] == 'adamw' and opts['dawn-baseline'] == 'nesterov'


# --- memory and failures

@pytest.mark.parametrize('text', ['cuDNN error: CUDNN_STATUS_NOT_SUPPORTED', 'GET was unable to find an engine to execute this computation',
                                  'CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`', 'CUDA out of memory. Tried'])
def test_signs_of_exhausted_memory(text): assert is_oom(RuntimeError(text)) and explain(RuntimeError(text), 'cuda:0', 8).startswith('out of memory on cuda:0: a batch of 8')


def test_memory_that_runs_out_in_mid_fit(gpu):
    class Fill(Callback):
        def before_batch(self):
            if self.iter == 2: gpu.fail_after(0)
    run = run_with(Fill())
    assert run.status == 'failed' and run.error.startswith('out of memory on cuda:0: a batch of 16 does not fit') and '\n' not in run.error
    assert run.profile['steps']['train']['n'] >= 1 and 'OutOfMemoryError' in run.traceback


def test_a_device_that_vanishes_in_mid_fit(gpu):
    "Whatever asks it from then on fails; the Run is kept, with what the host measured"
    def fail(*args): raise RuntimeError('CUDA error: GPU is lost\nCUDA kernel errors might be asynchronously reported at some other API call')
    class Unplug(Callback):
        def before_batch(self):
            if self.iter == 3: gpu.on_launch.append(fail); gpu.on_wait.append(fail)
    run = run_with(Unplug())
    assert run.status == 'failed' and run.error.startswith('cuda:0 failed: CUDA error: GPU is lost; the GPU fell off the bus')
    assert run.profile['steps']['train']['n'] == 3 and run.to_json()


@pytest.mark.parametrize('text', ['CUDA error: device-side assert triggered', 'CUDA error: an illegal memory access was encountered',
                                  'CUDA error: CUDA-capable device(s) is/are busy or unavailable', 'CUDA error: no kernel image is available for execution on the device'])
def test_one_line_for_each_failure(text):
    line = explain(RuntimeError(text + '\nmore\nlines'), 'cuda:0')
    assert is_lost(RuntimeError(text)) and line.startswith(f'cuda:0 failed: {text}; ') and '\n' not in line and len(line) > len(text) + 40


def test_the_searching_model_is_gone_when_the_largest_batch_trains(gpu):
    held = []
    def build(*args, _build=run_module._build):
        res = _build(*args)
        held.append(torch.cuda.memory_allocated())
        return res
    with pytest.MonkeyPatch.context() as m:
        m.setattr(run_module, '_build', build)
        quiet(device='cuda', bs=16)
        quiet(device='cuda', bs='largest', memory='250MB')
    assert held[1] <= 1.1*held[0] + 2**20


# --- what a Run says

def test_seconds_are_of_the_fit_alone(monkeypatch):
    "Not of counting FLOPs, nor of measuring the peak, after it"
    import fastbench.measure.profiler as profiler_module
    from time import monotonic, perf_counter
    took = []
    def now(): return perf_counter() + sum(took)
    monkeypatch.setattr(profiler_module, 'matmul_peak', lambda *a: took.append(1e6) or 1e12)
    monkeypatch.setattr(profiler_module, 'perf_counter', now)
    monkeypatch.setattr(run_module, 'time', types.SimpleNamespace(perf_counter=now, monotonic=monotonic))
    run = quiet(device='cpu', target=.99)
    assert run.profile['facts']['efficiency']['peak'] == 1e12
    fit = run.profile['fit']['fit']['values']['seconds'][0]
    assert run.seconds < fit + 9e5  # of a million that the peak took


def test_a_target_with_batches_is_reached():
    run = quiet(device='cpu', epochs=3, target=.05)
    goal = run.goal
    assert goal['reached'] == run.metrics['accuracy'] > .05 and goal['epochs'] == 1


def test_a_target_in_a_cut_epoch_with_metrics_of_training_too():
    from fastbench.callback.limit import FirstBatches
    from fastbench.callback.target import TimeToAccuracy
    learn = bench_learner('digits-xresnet18', device='cpu', offline=True, workers=0)
    learn.recorder.train_metrics = True
    goal = TimeToAccuracy(.01, 'valid_accuracy', tell=lambda o: None)
    with pytest.raises(UserError): learn.fit(1, cbs=[goal, FirstBatches(3)])


def test_our_own_search_is_nobody_elses_work(monkeypatch):
    "The GPU was idle when the Run began, and busy with our search when its fit did"
    busy = [0.]
    def build(*args, _build=run_module._build):
        res = _build(*args)
        busy[0] = .9  # as after a search for the largest batch
        return res
    def state(*args, **kwargs): return dict(gpu=dict(busy=busy[0]))
    full = run_module.machine_state
    monkeypatch.setattr(run_module, '_build', build)
    monkeypatch.setattr(run_module, 'glance', state)
    monkeypatch.setattr(run_module, 'machine_state', lambda d: {**full('cpu'), **state()})
    assert not [o for o in quiet(device='cpu').warnings if 'GPU' in o]
    busy[0] = .8  # by somebody else, when the Run begins
    assert [o for o in quiet(device='cpu').warnings if o.startswith('shared GPU: it was 80% busy before the run began')]


def test_memory_is_asked_before_anything_was_initialised(gpu):
    "As of a Learner of texts that is profiled before a tensor was on the GPU"
    from fastbench.machine.memory import PeakMemory
    assert not gpu.initialized
    assert PeakMemory(torch.device('cuda:0')).start().stop()['device'] == 0


def test_the_peak_is_of_random_numbers_and_says_tf32(gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(flops, '_products', lambda *a: [lambda a, b: seen.append(a) or a@b])
    flops.measure_peak('cuda:1', sizes=(64,), budget=.01)
    assert len(set(seen[0].flatten().tolist())) > 1000 and {o.device for o in seen} == {torch.device('cuda:1')}
    plain = flops._device_key(torch.device('cuda:0'), 'fp32')
    torch.set_float32_matmul_precision('high')
    try: assert flops._device_key(torch.device('cuda:0'), 'fp32') != plain and 'tf32' in flops._device_key(torch.device('cuda:0'), 'fp32')
    finally: torch.set_float32_matmul_precision('highest')


def test_a_look_at_the_loss_is_no_wait(gpu, monkeypatch):
    "However often it looks; and a loss that is not a number ends the fit"
    now = iter(range(10**6))
    monkeypatch.setattr(run_module.time, 'monotonic', lambda: float(next(now)))
    class Count(Callback):
        order = 1e6
        waits = {}
        def before_batch(self): self.at = len(gpu.waits)
        def after_batch(self):
            if self.training: self.waits[self.iter] = len(gpu.waits) - self.at
    learn = bench_learner('digits-xresnet18', device='cuda', offline=True, workers=0, bs=8, sample=.1)
    learn.add_cbs([run_module.Watch(), Count()])
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert len(Count.waits) > 10 and not any(Count.waits.values())
    monkeypatch.undo()
    assert quiet(device='cuda', lr=1e30, schedule='flat', batches=None, sample=.1).status == 'diverged'

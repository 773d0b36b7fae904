"The pretended GPU does what CUDA documents, and leaves torch as it was"
import copy
import gc

import numpy as np
import pytest
import torch
from fastai.torch_core import TensorImage
from torch import nn

from pretend import pretend

CUDA0, CUDA1 = torch.device('cuda:0'), torch.device('cuda:1')


def kinds(gpu): return [o.kind for o in gpu.waits]


# Where tensors are

def test_tensors_say_where_they_are(gpu):
    x = torch.zeros(3, device='cuda')
    assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (CUDA0, True, False, 0)
    y = torch.zeros(3)
    assert (y.device, y.is_cuda, y.is_cpu, y.get_device()) == (torch.device('cpu'), False, True, -1)


@pytest.mark.parametrize('make', [
    lambda d: torch.empty(2, device=d), lambda d: torch.rand(2, device=d), lambda d: torch.arange(3, device=d), lambda d: torch.tensor([1.], device=d),
    lambda d: torch.zeros(2).to(d), lambda d: torch.zeros(2).to(device=d, dtype=torch.half), lambda d: torch.zeros(2).to(torch.zeros(1, device=d)),
    lambda d: nn.Linear(2, 2, device=d).weight, lambda d: nn.Linear(2, 2).to(d).weight, lambda d: torch.zeros_like(torch.zeros(2), device=d),
    lambda d: torch.zeros(1, device=d).new_ones(3), lambda d: torch.zeros(1, device=d).new_tensor([1]), lambda d: copy.deepcopy(nn.Linear(2, 2, device=d)).weight,
    lambda d: torch.ones(2, 2, device=d).max(1)[0], lambda d: torch.ones(4, device=d)[1:].view(3, 1), lambda d: nn.Parameter(torch.ones(2, device=d)).detach()])
def test_what_is_made_on_a_device_is_there(gpu, make): assert make('cuda:1').device == CUDA1


def test_a_device_without_a_number_is_the_current_one(gpu):
    assert torch.zeros(1, device='cuda').device == CUDA0
    torch.cuda.set_device(1)
    assert torch.zeros(1).to('cuda').device == torch.zeros(1).cuda().device == CUDA1 and torch.cuda.current_device() == 1
    with torch.cuda.device(0):
        assert torch.zeros(1, device='cuda').device == CUDA0
        with torch.cuda.device('cuda:1'): assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 1
    with torch.device('cuda'): assert torch.zeros(1).device == CUDA1


def test_a_device_that_is_not_there(gpu):
    with pytest.raises(RuntimeError, match='invalid device ordinal'): torch.zeros(1, device='cuda:2')
    with pytest.raises(RuntimeError, match='invalid device ordinal'): torch.cuda.set_device(2)


def test_devices_do_not_mix(gpu):
    a, b, c = torch.ones(2, device='cuda:0'), torch.ones(2, device='cuda:1'), torch.ones(2)
    for x, y in ((a, b), (a, c), (c, b)):
        with pytest.raises(RuntimeError, match='Expected all tensors to be on the same device'): x + y
    with pytest.raises(RuntimeError, match='cuda:0 and cpu'): nn.Linear(2, 2, device='cuda')(c)
    assert (a + torch.tensor(1.)).device == CUDA0  # one number of the host is an argument
    assert a.to('cuda:1').device == CUDA1 and (a.to('cuda:1') + b).tolist() == [2, 2]


def test_gradients_are_where_their_weights_are(gpu):
    m = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3), nn.LogSoftmax(1)).to('cuda:1')
    x = torch.rand(4, 1, 4, 4, device='cuda:1')
    gpu.forget()
    nn.functional.nll_loss(m(x), torch.zeros(4, dtype=torch.long, device='cuda:1')).backward()
    assert {p.grad.device for p in m.parameters()} == {CUDA1} and not gpu.waits and not gpu.races


def test_the_same_numbers_as_on_the_cpu(gpu):
    torch.manual_seed(0)
    m, x = nn.Linear(3, 2), torch.rand(4, 3)
    want = m(x)
    assert (m.to('cuda')(x.cuda()).cpu() == want).all()


def test_types_and_attributes_stay(gpu):
    x = TensorImage(torch.rand(2, 3))
    x.title = 'an image'
    y = x.to('cuda', non_blocking=True)
    assert type(y) is TensorImage and y.title == 'an image' and y.device == CUDA0 and type(y.cpu()) is TensorImage and type(x.pin_memory()) is TensorImage


def test_no_numpy_of_a_device(gpu):
    x = torch.zeros(1, device='cuda')
    with pytest.raises(TypeError, match=r'cuda:0.*Tensor.cpu\(\)'): x.numpy()
    with pytest.raises(TypeError): np.asarray(x)
    assert x.cpu().numpy() == [0]


def test_saved_weights_come_back_to_a_device(gpu, tmp_path):
    m = nn.Linear(2, 2, device='cuda:1')
    torch.save(m.state_dict(), tmp_path/'m.pth')
    state = torch.load(tmp_path/'m.pth', map_location='cuda:1')
    assert state['weight'].device == CUDA1 and torch.equal(state['weight'], m.weight)


# Waits

@pytest.mark.parametrize('kind, act', {
    'item': lambda x: x[0].item(), 'tolist': lambda x: x.tolist(), 'nonzero': lambda x: x.nonzero(), 'unique': lambda x: x.unique(), 'equal': lambda x: torch.equal(x, x),
    'masked_select': lambda x: x.masked_select(x > 1), 'index by a mask': lambda x: x[x > 1], 'index in host memory': lambda x: x[torch.tensor([0, 1])],
    'bincount': lambda x: x.long().bincount(), 'repeat_interleave': lambda x: torch.repeat_interleave(x.long()), 'copy to the host, blocking': lambda x: x.cpu(),
    'synchronize': lambda x: torch.cuda.synchronize(), 'stream.synchronize': lambda x: torch.cuda.current_stream().synchronize(),
    'event.synchronize': lambda x: torch.cuda.current_stream().record_event().synchronize(), 'tensor(device=cuda)': lambda x: torch.tensor(1, device='cuda'),
    'copy to the device, blocking': lambda x: torch.ones(2).cuda(), 'copy to the device, pageable memory': lambda x: torch.ones(2).to('cuda', non_blocking=True),
    'copy to the host, pageable memory': lambda x: torch.empty(3).copy_(x, non_blocking=True)}.items())
def test_waits(gpu, kind, act):
    x = torch.tensor([0., 1, 2]).pin_memory().to('cuda', non_blocking=True)
    assert not gpu.waits
    act(x)
    assert kinds(gpu) == [kind] and gpu.waits[0].device == CUDA0 and 'test_pretend.py' in gpu.waits[0].place


@pytest.mark.parametrize('act', [
    lambda x: bool(x[0] > 1), lambda x: float(x[0]), lambda x: int(x[0]), lambda x: x.allclose(x), lambda x: torch.as_tensor([1.], device='cuda'), lambda x: x.new_tensor([1.]),
    lambda x: x.__setitem__(x >= 1, torch.ones(2, device='cuda')), lambda x: torch.accelerator.synchronize(),
    lambda x: x.copy_(torch.ones(3)), lambda x: torch.linalg.eigh(x[:, None]*x)])
def test_other_ways_to_wait(gpu, act):
    x = torch.arange(3., device='cuda')
    act(x)
    assert len(gpu.waits) == 1


@pytest.mark.parametrize('act', [
    lambda x: x+1, lambda x: x.sum(), lambda x: torch.where(x > 1, x, 0), lambda x: x.masked_fill_(x > 1, 0), lambda x: x.to('cuda'), lambda x: x.half(), lambda x: x[1:],
    lambda x: torch.zeros(3, device='cuda'), lambda x: x[torch.arange(2, device='cuda')], lambda x: x.to('cpu', non_blocking=True), lambda x: x.sort(),
    lambda x: torch.empty(3).pin_memory().copy_(x, non_blocking=True), lambda x: torch.ones(3).pin_memory().to('cuda', non_blocking=True), lambda x: x.__setitem__(x > 1, 0.),
    lambda x: torch.repeat_interleave(x, torch.ones(3, dtype=torch.long, device='cuda'), output_size=3), lambda x: torch.cuda.Event().record(), lambda x: x.shape[0]])
def test_no_wait(gpu, act):
    x = torch.arange(3., device='cuda')
    act(x)
    assert not gpu.waits


def test_copies_are_counted(gpu):
    s, x = torch.cuda.Stream(), torch.ones(4).pin_memory()
    with torch.cuda.stream(s): y = x.to('cuda', non_blocking=True)
    x.to('cuda')
    y.to('cuda:1')
    got = [(o.way, o.bytes, o.pinned, o.blocking, o.stream) for o in gpu.copies[:2]]
    assert got == [('H2D', 16, True, False, s), ('H2D', 16, True, True, torch.cuda.default_stream())] and gpu.copies[2].way == 'D2D'


def test_launches_are_counted_and_told(gpu):
    told = []
    gpu.on_launch.append(lambda stream, name: told.append(name))
    gpu.on_wait.append(lambda kind, target: told.append(kind))
    x = torch.ones(4, device='cuda')
    (x.view(2, 2)[0] + 1).sum().item()
    assert told == ['ones', 'add', 'sum', '_local_scalar_dense', 'item'] and gpu.launches == 4
    torch.cuda._sleep(100)
    assert gpu.ops[-1] == '_sleep'
    gpu.forget()
    assert gpu.launches == 0 and not gpu.waits


# Order

def test_a_copy_that_was_not_waited_for(gpu):
    x = torch.ones(3, device='cuda')
    y = x.to('cpu', non_blocking=True)
    assert y.is_pinned()
    y.sum()
    assert 'the host uses memory before it is written' in gpu.races[0].kind
    gpu.forget()
    y = x.to('cpu', non_blocking=True)
    torch.cuda.current_stream().record_event().synchronize()
    assert y.tolist() == [1, 1, 1] and not gpu.races


@pytest.mark.parametrize('wait', [lambda s: torch.cuda.current_stream().wait_stream(s), lambda s: s.record_event().wait(), lambda s: s.synchronize(),
                                  lambda s: torch.cuda.synchronize(), lambda s: s.query()])
def test_streams_wait_for_each_other(gpu, wait):
    s = torch.cuda.Stream()
    def make():
        with torch.cuda.stream(s): return torch.ones(3, device='cuda')*2
    make() + 1
    assert 'a stream uses memory before it is written' in gpu.races[0].kind
    gpu.forget()
    x = make()
    wait(s)
    x + 1
    assert not gpu.races


def test_memory_is_kept_for_the_stream_that_uses_it(gpu):
    s = torch.cuda.Stream()
    for keep in (False, True):
        with torch.cuda.stream(s): x = torch.ones(3, device='cuda')*2
        torch.cuda.current_stream().wait_stream(s)
        y = x+1
        if keep: x.record_stream(torch.cuda.current_stream())
        del x
        assert len(gpu.races) == 1 and 'record_stream' in gpu.races[0].kind
    assert y.tolist() == [3, 3, 3]


def test_pinned_memory_is_not_overwritten_while_it_is_copied(gpu):
    x = torch.ones(3).pin_memory()
    x.to('cuda', non_blocking=True)
    x.add_(1)
    assert 'overwrites' in gpu.races[0].kind
    x.to('cuda', non_blocking=True)
    torch.cuda.synchronize()
    x.add_(1)
    assert len(gpu.races) == 1


# Streams and events

def test_streams_belong_to_devices(gpu):
    s = torch.cuda.Stream(1)
    assert s.device == CUDA1 and s != torch.cuda.Stream(1) and torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
    with torch.cuda.stream(s):
        assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() is s is torch.cuda.current_stream(1)
        assert torch.accelerator.current_stream() is s
    assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(1) is torch.cuda.default_stream(1)


def test_events(gpu):
    a, b, plain = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    with pytest.raises(ValueError, match='must be recorded'): a.elapsed_time(b)
    with pytest.raises(ValueError, match='enable_timing=True'): a.elapsed_time(plain)
    assert a.query()
    a.synchronize()
    assert not gpu.waits  # of an event that was not recorded
    a.record()
    b.record()
    assert a.elapsed_time(b) >= 0
    with torch.cuda.device(1), pytest.raises(RuntimeError, match="does not match recording stream's device 1"): a.record()


def test_events_on_a_clock_that_is_moved_by_hand(gpu):
    now = [0.]
    gpu.clock = lambda: now[0]
    gpu.on_record.append(lambda event, stream: setattr(event, 'at', now[0]+2))  # the device is two seconds behind
    gpu.on_wait.append(lambda kind, target: now.__setitem__(0, target.at))
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    now[0] = .5
    b.record()
    assert not a.query()
    with pytest.raises(RuntimeError, match='must be completed'): a.elapsed_time(b)
    b.synchronize()
    assert now[0] == 2.5 and a.query() and a.elapsed_time(b) == 500 and kinds(gpu) == ['event.synchronize']


# Capability

@pytest.mark.parametrize('capability, bf16', [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_capability(capability, bf16):
    with pretend(capability=capability):
        assert torch.cuda.get_device_capability() == capability and torch.cuda.get_device_properties(0).major == capability[0]
        assert torch.cuda.is_bf16_supported(including_emulation=False) is bf16 and torch.cuda.is_bf16_supported() and torch.cuda.is_tf32_supported() is bf16
    assert not torch.cuda.is_bf16_supported() or torch.cuda.is_available()


# Memory

def test_memory_is_that_of_live_tensors(gpu):
    x = torch.zeros(1000, device='cuda')
    y = x[10:]
    assert torch.cuda.memory_allocated() == 4096 and torch.cuda.memory_allocated(1) == 0
    del x
    assert torch.cuda.memory_allocated() == 4096  # of which `y` is a part
    del y
    gc.collect()
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 4096 and torch.cuda.max_memory_reserved() == 2**21
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0 and torch.cuda.memory_reserved() == 2**21
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_memory_runs_out():
    with pretend(memory=2**20) as gpu:
        x = torch.zeros(2**17, device='cuda')
        with pytest.raises(torch.OutOfMemoryError, match='Tried to allocate 0.50 MiB. GPU 0'): x.repeat(1) + x
        gc.collect()
        assert torch.cuda.memory_allocated() == 2**19 and torch.cuda.memory_stats()['num_ooms'] == 1
        gpu.fail_after(1)
        y = torch.zeros(2, device='cuda')
        with pytest.raises(torch.OutOfMemoryError): torch.zeros(2, device='cuda')
        assert (y+1).tolist() == [1, 1]


def test_share_of_the_memory(gpu):
    with pytest.raises(ValueError, match='specified index'): torch.cuda.set_per_process_memory_fraction(.5, torch.device('cuda'))
    torch.cuda.set_per_process_memory_fraction(1e-6, 1)
    assert torch.cuda.get_per_process_memory_fraction(1) == 1e-6 and torch.cuda.get_per_process_memory_fraction(0) == 1
    torch.zeros(10**4, device='cuda:0')
    with pytest.raises(torch.OutOfMemoryError): torch.zeros(10**4, device='cuda:1')
    assert torch.cuda.mem_get_info(0)[1] == 16*10**9


# Before CUDA is initialised

def test_nothing_is_initialised_by_asking(gpu):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.accelerator.current_accelerator().type == 'cuda'
    torch.device('cuda')
    torch.cuda.Event(enable_timing=True)
    torch.zeros(2)
    assert not gpu.initialized and torch.cuda.memory_stats(0) == {} and torch.cuda.max_memory_allocated(0) == 0
    with pytest.raises(RuntimeError, match='Invalid device argument'): torch.cuda.reset_peak_memory_stats(torch.device('cuda:0'))
    torch.cuda.Event().record()
    assert gpu.initialized and torch.cuda.is_initialized()
    torch.cuda.reset_peak_memory_stats(torch.device('cuda:0'))


@pytest.mark.parametrize('use', [lambda: torch.zeros(1, device='cuda'), lambda: torch.zeros(1).cuda(), lambda: torch.zeros(1).pin_memory(), lambda: torch.cuda.set_device(0),
                                 lambda: torch.cuda.Stream(), lambda: torch.cuda.synchronize()])
def test_what_initialises(gpu, use):
    use()
    assert gpu.initialized


# Random numbers

def test_generators(gpu):
    g = torch.Generator('cuda').manual_seed(1)
    assert g.device == CUDA0 and torch.Generator().device.type == 'cpu' and isinstance(torch.default_generator, torch.Generator)
    x = torch.rand(3, generator=g, device='cuda')
    assert x.device == CUDA0 and x.tolist() == torch.rand(3, generator=torch.Generator('cuda').manual_seed(1), device='cuda').tolist()
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"): torch.rand(3, generator=torch.Generator(), device='cuda')
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"): torch.rand(3, generator=g)
    torch.cuda.manual_seed_all(3)
    state = torch.cuda.get_rng_state(1)
    torch.cuda.set_rng_state(state, 1)
    with torch.random.fork_rng(): torch.manual_seed(0)


# Training

@pytest.mark.parametrize('kwargs, waits', [(dict(fused=True), 0), (dict(foreach=True), 0)])
def test_optimizers(gpu, kwargs, waits):
    m = nn.Linear(3, 3, device='cuda')
    opt = torch.optim.Adam(m.parameters(), **kwargs)
    for _ in range(2):
        m(torch.ones(2, 3, device='cuda')).sum().backward()
        opt.step()
    assert len(gpu.waits) == waits and opt.state[m.weight]['exp_avg'].device == CUDA0


def test_a_scaler_reads_whether_gradients_are_finite(gpu):
    m, scaler = nn.Linear(3, 3, device='cuda'), torch.amp.GradScaler('cuda')
    opt = torch.optim.SGD(m.parameters(), .1)
    with torch.autocast('cuda', torch.float16): loss = m(torch.ones(2, 3, device='cuda')).sum()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    assert kinds(gpu) == ['item'] and scaler.get_scale() == 2**16


# After it

def test_torch_is_as_it_was(tmp_path):
    owners = (torch, torch._C, torch.cuda, torch.cuda.memory, torch.cuda.streams, torch.cuda.random, torch.accelerator, getattr(torch.accelerator, 'memory', torch.accelerator), torch.backends.cudnn,
              torch.Tensor, torch._C.TensorBase, torch.storage._StorageBase, torch.UntypedStorage, torch.Generator, nn.Module)
    def state(): return [dict(vars(o)) for o in owners]
    torch.overrides.get_overridable_functions()
    torch.cuda.device_count()
    before, error = state(), _error()
    with pytest.raises(ZeroDivisionError):
        with pretend() as gpu:
            x = nn.Linear(2, 2).to('cuda')(torch.ones(1, 2, device='cuda'))
            torch.cuda.manual_seed(1)
            x.sum().item()
            1/0
    for a, b in zip(before, state()): assert a.keys() == b.keys() and all(a[k] is b[k] for k in a)
    assert not torch.cuda.is_initialized() and _error() == error and not torch.overrides._get_current_function_mode_stack() and gpu.waits
    assert x.device.type == 'cpu' and x.is_cpu


def _error():
    if torch.cuda.is_available(): return None
    with pytest.raises((RuntimeError, AssertionError)) as e: torch.zeros(1, device='cuda')
    return str(e.value)


def test_one_at_a_time(gpu):
    with pytest.raises(RuntimeError, match='nest'):
        with pretend(): pass

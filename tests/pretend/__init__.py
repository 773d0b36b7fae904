"""CUDA devices that are not there, for tests on machines without one.

    with pretend(devices=2, capability=(8, 0), memory=16*10**9) as gpu:
        x = torch.ones(3, device='cuda')    # a CPU tensor that says cuda:0
        x.sum().item()
    gpu.waits                               # [Wait('item', 'place of the code', device(type='cuda', index=0))]

Arithmetic runs on the CPU, unchanged. What `gpu` (a `state.Gpu`) tells of:

- `waits`: each wait of the host for a device, of which kind and whose code. `copies`: each copy, pinned or not, blocking or not, on which stream.
- `races`: what could happen in the wrong order: a stream uses what another one has not finished writing, memory is freed or overwritten while a copy
  still reads it, the host reads a copy that it has not waited for.
- `launches`, `ops`: operations put into a stream, views apart. A real operation may be several kernels, or part of one.
- `memory[i]`: what live tensors hold, in steps of 512 bytes, the peak, and what a caching allocator would have reserved. It runs out above `memory`, above
  `set_per_process_memory_fraction`, or by `gpu.fail_after(n)`.
- `on_launch(stream, name)`, `on_wait(kind, target)`, `on_record(event, stream)`, `on_stream_wait(stream, event)`: lists of functions that are called then.
  With `gpu.clock` moved by hand and `event.at` set in `on_record` they make a device that works behind its host; an event is done when `clock()` is past `at`.
- `initialized`: False until something uses the device, as with CUDA.

What cannot be pretended, and only a GPU shows:

- Speed, and kernels: which one is taken, whether it supports a shape or a precision, its workspace and its rounding. Errors of an operation that has a CPU kernel and none for CUDA.
- `torch.autocast('cuda')`: it is entered and left, and changes no precision. fp16 arithmetic is the CPU's.
- Code inside torch that asks for the true device sees a CPU: C++ functions may choose another path (`one_hot` checks its values, LSTMs do not use cuDNN),
  `type()` and `untyped_storage().device` say so, and files written by `torch.save` do.
- Numbers drawn on a device come from the CPU's generators: another sequence than on CUDA, and `torch.cuda.manual_seed` does not change it.
- `torch.compile`, CUDA graphs, CUPTI, NCCL, NVML, IPC and peer access. Another thread of Python does not see operations (modes belong to a thread).
- A pageable copy counts as a wait; a driver may return before it is done. Fragmentation of memory.
- What a forked process does: it is told that CUDA cannot be used there, as by torch.
"""
from contextlib import ExitStack, contextmanager

import torch

from . import state
from .modes import Factories, Operations
from .runtime import Driver, classes
from .state import Copy, Gpu, Race, Wait
from .tensors import attributes, groups, storage_attributes

__all__ = ['pretend', 'Gpu', 'Wait', 'Copy', 'Race']


class Patches:
    "Attributes of modules and classes that are others for a while"
    def __init__(self): self.old = []
    def set(self, owner, **values):
        for k, v in values.items():
            self.old.append((owner, k, k in vars(owner), vars(owner).get(k)))
            setattr(owner, k, v)
    def undo(self):
        for owner, k, there, v in reversed(self.old): setattr(owner, k, v) if there else delattr(owner, k)


def replacements(gpu, patches):
    "Put everything in place"
    Stream, Event, Generator = classes(gpu)
    c, driver = torch.cuda, Driver(gpu, Stream)
    patches.set(torch._C, **driver.functions(), _group_tensors_by_device_and_dtype=groups(gpu))
    patches.set(c, _initialized=False, _queued_calls=[], _cached_device_count=gpu.devices, _is_in_bad_fork=driver.forked, _cudart=c._cudart or object(),
                _exchange_device=driver.exchange, _maybe_exchange_device=driver.exchange, _get_device_properties=driver.properties,
                default_generators=tuple(Generator(torch.device('cuda', i)) for i in range(gpu.devices)),
                current_stream=driver.stream, default_stream=driver.default_stream, set_stream=driver.set_stream, Stream=Stream, Event=Event,
                mem_get_info=lambda device=None: driver.info(driver.index(device)))
    patches.set(c.streams, Stream=Stream, Event=Event)
    patches.set(c.graphs, _cuda_isCurrentStreamCapturing=driver.functions()['_cuda_isCurrentStreamCapturing'])  # what optimizers ask before torch 2.15
    patches.set(c.memory, mem_get_info=c.mem_get_info)
    patches.set(torch, Generator=Generator)
    patches.set(torch.backends.cudnn, is_acceptable=lambda t: False)
    patches.set(torch.Tensor, **attributes(gpu))
    patches.set(torch.storage._StorageBase, **storage_attributes(gpu))


@contextmanager
def pretend(devices=1, # GPUs
            capability=(8, 0), # Their compute capability
            memory=16*10**9, # Bytes of each
            name='Pretended GPU', # What they are called
    ): # A `Gpu`
    "Pretend that there are GPUs"
    if isinstance(vars(torch.Tensor).get('device'), property): raise RuntimeError('pretend() does not nest')
    torch.overrides.get_overridable_functions()  # torch keeps that table: of its own functions, not of ours
    gpu, patches = Gpu(devices, capability, memory, name), Patches()
    torch.cuda._check_bf16_tensor_supported.cache_clear()
    try:
        replacements(gpu, patches)
        with Factories(gpu), Operations(gpu): yield gpu
    finally:
        patches.undo()
        gpu.blocks.clear()
        torch.cuda._check_bf16_tensor_supported.cache_clear()

"What torch does with pretended tensors: every operation passes here before the CPU computes it."
from functools import lru_cache

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .state import CPU

# Operations whose result's size, or an error, depends on values: CUDA's read them
WAITING = {o: o for o in 'equal allclose nonzero masked_select unique_dim unique_consecutive bincount multinomial'.split()} | {
    '_local_scalar_dense': 'item', '_unique2': 'unique'} | dict.fromkeys(('_linalg_check_errors', '_linalg_eigh', '_linalg_svd'), 'linalg')
INDEXING = {'index', '_unsafe_index', 'index_put', 'index_put_', '_index_put_impl_'}
# Operations that take tensors of the host beside those of a device
# What a GPU multiplies in 16 bits and adds up in 32: a processor without such instructions does it bit by bit, a hundred times slower
PRODUCTS = {'mm', 'bmm', 'addmm', 'baddbmm', 'convolution', 'convolution_backward'}
HALVES = torch.bfloat16, torch.float16
MIXING = INDEXING | {'copy_', '_foreach_copy_', 'set_', '_pack_padded_sequence', 'tensor_split'}


def tensors(o):
    "The tensors in arguments or results, which are never nested deeper than lists"
    if isinstance(o, torch.Tensor): return [o]
    if isinstance(o, (tuple, list)): return [t for x in o for t in tensors(x)]
    return []


@lru_cache(None)
def facts(f):
    "Name of an operation, whether it is a view, and which arguments it writes to"
    s = f._schema
    writes = [i for i, a in enumerate(s.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return f.overloadpacket.__name__, f.is_view, writes


def written(args, writes):
    "Ids of the tensors that an operation writes to"
    return {id(t) for i in writes if i < len(args) for t in tensors(args[i])}


def in_fp32(f, args, kwargs):
    "Products of 16-bit tensors, added up in 32 bits and rounded once, as a GPU does it"
    half = next((t.dtype for t in tensors(args) if t.dtype in HALVES), None)
    if half is None: return f(*args, **kwargs)
    wide = [o.float() if isinstance(o, torch.Tensor) and o.dtype in HALVES else o for o in args]
    res = f(*wide, **kwargs)
    return tuple(o if o is None else o.to(half) for o in res) if isinstance(res, tuple) else res.to(half)


class OfGpu:
    "A mode of torch, the base after this one, that knows the pretended devices"
    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu


class Factories(OfGpu, TorchFunctionMode):
    "Functions that are given a device: they make their tensors on the CPU, and the tensors are marked"
    def __torch_function__(self, f, types, args=(), kwargs=None):
        kwargs, gpu = kwargs or {}, self.gpu
        was, gpu.called = gpu.called, not tensors(args)
        try:
            if kwargs.get('device') is None and not kwargs.get('pin_memory'):
                check_generator(gpu, kwargs, args)
                return f(*args, **kwargs)
            if getattr(f, '__name__', '') == '_parse_to': return f(*args, **kwargs)
            return self.make(f, args, dict(kwargs))
        finally: gpu.called = was

    def make(self, f, args, kwargs):
        gpu, pinned = self.gpu, kwargs.pop('pin_memory', False)
        device = gpu.resolve(kwargs['device']) if kwargs.get('device') is not None else CPU
        if device.type not in ('cpu', 'cuda'): return f(*args, **kwargs)
        check_generator(gpu, kwargs, args, device)
        kwargs['device'], gpu.called = CPU, True
        res = f(*args, **kwargs)
        for t in tensors(res):
            if device.type == 'cpu': gpu.unmark(t)
            if pinned: gpu.mark(t, CPU, pinned=True)
            if device.type == 'cuda': self.place(f.__name__, t, device)
        return res

    def place(self, name, t, device):
        gpu = self.gpu
        if gpu.device_of(t) == device: return
        b, stream = gpu.mark(t, device), gpu.streams[device.index]
        if name in ('tensor', 'as_tensor', 'asarray', 'new_tensor'): return gpu.wait(f'{name}(device=cuda)', stream, device)
        if not name.startswith(('empty', 'new_empty')): b.wrote = {stream: gpu.launch(stream, name)}


def check_generator(gpu, kwargs, args, device=None):
    "CUDA's random functions take CUDA's generators alone"
    g = kwargs.get('generator')
    if not isinstance(g, torch.Generator): return
    device = device or next((gpu.device_of(t) or CPU for t in tensors(args)), CPU)
    if g.device.type != device.type:
        raise RuntimeError(f"Expected a '{device.type}' device type for generator but found '{g.device.type}'")


class Operations(OfGpu, TorchDispatchMode):
    "Operations: on which device they are, whether the host waits for them, and where their results are"
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        gpu, kwargs = self.gpu, kwargs or {}
        if gpu.paused: return f(*args, **kwargs)
        inputs = tensors(args) + tensors([*kwargs.values()])
        blocks = [gpu.block(t) for t in inputs]
        asked = kwargs.get('device')
        if asked is not None and asked.type == 'cuda': return self.make(f, args, kwargs, gpu.resolve(asked))
        name, view, writes = facts(f)
        device = self.device(name, args, inputs, blocks)
        if device is None: return self.on_host(f, args, kwargs, inputs, blocks, writes)
        for t, b in zip(inputs, blocks):
            if b is not None and b.device is None: gpu.mark(t, device)
        return self.on_device(f, args, kwargs, inputs, blocks, device)

    def make(self, f, args, kwargs, device):
        res = f(*args, **kwargs | dict(device=CPU, **(dict(pin_memory=False) if 'pin_memory' in kwargs else {})))
        for t in tensors(res): self.gpu.mark(t, device)
        return res

    def device(self, name, args, inputs, blocks):
        "The one device of the inputs; None: the host"
        found = {b.device for b in blocks if b is not None and b.device is not None and b.device.type == 'cuda'}
        if not found: return None
        host = any(t.dim() and (b is None or b.device == CPU) for t, b in zip(inputs, blocks))
        if name in MIXING and (name not in ('index', '_unsafe_index') or self.gpu.device_of(args[0])): return next(iter(found))
        if len(found) > 1 or host:
            names = [str(o) for o in sorted(found, key=str)] + (['cpu'] if host else [])
            raise RuntimeError('Expected all tensors to be on the same device, but found at least two devices, '
                               f'{names[0]} and {names[1]}!')
        return found.pop()

    def on_host(self, f, args, kwargs, inputs, blocks, writes):
        gpu = self.gpu
        changed = written(args, writes)
        for t, b in zip(inputs, blocks):
            if b is not None and (b.wrote or b.reads): gpu.use(b, gpu.host, id(t) in changed)
        res = f(*args, **kwargs)
        if not inputs and not gpu.called:  # made inside torch, in a function that was given tensors: where those are
            for t in tensors(res): gpu.mark(t)
        return res

    def on_device(self, f, args, kwargs, inputs, blocks, device):
        gpu, (name, view, writes) = self.gpu, facts(f)
        if name == 'copy_': return self.copy(f, args, kwargs)
        if name == '_foreach_copy_':
            for a, b in zip(args[0], args[1]): a.copy_(b, *args[2:])
            return
        stream = gpu.streams[device.index]
        why = None if view else self.waits(name, args, kwargs)
        if not view: self.order(name, args, inputs, blocks, writes, stream)
        if why: gpu.wait(why, stream, device)
        res = in_fp32(f, args, kwargs) if name in PRODUCTS else f(*args, **kwargs)
        for t in tensors(res):
            if gpu.block(t) is None or gpu.block(t).device is None:
                b = gpu.mark(t, device)
                if not view: b.wrote = {stream: stream.seen[stream]}
        return res

    def order(self, name, args, inputs, blocks, writes, stream):
        gpu, n = self.gpu, self.gpu.launch(stream, name)
        changed = written(args, writes)
        for t, b in zip(inputs, blocks):
            if b is not None and b.device is not None and b.device.type == 'cuda': gpu.use(b, stream.seen, id(t) in changed, stream, n)

    def waits(self, name, args, kwargs):
        if name in WAITING: return WAITING[name]
        if name == 'repeat_interleave': return name if kwargs.get('output_size') is None else None
        if name not in INDEXING: return None
        idxs = [o for o in args[1] if o is not None]
        if any(o.dim() and self.gpu.device_of(o) is None for o in idxs): return 'index in host memory'
        mask = any(o.dtype in (torch.bool, torch.uint8) for o in idxs)
        return 'index by a mask' if mask and ('put' not in name or args[2].numel() > 1) else None

    def copy(self, f, args, kwargs):
        gpu, (dst, src) = self.gpu, args[:2]
        a, b = gpu.device_of(src), gpu.device_of(dst)
        if a == b: return self.in_place(f, args, kwargs, b)
        with gpu.pause(): res = f(*args, **kwargs)
        non_blocking = args[2] if len(args) > 2 else kwargs.get('non_blocking', False)
        gpu.copied(src, dst, a, b, non_blocking)
        return res

    def in_place(self, f, args, kwargs, device):
        stream = self.gpu.streams[device.index]
        self.order('copy_', args, args[:2], [self.gpu.block(t) for t in args[:2]], [0], stream)
        return f(*args, **kwargs)

"The attributes of `torch.Tensor` and of storages that say or change where a tensor is."
import torch

from .state import CPU

_REST = ('non_blocking', 'copy')


def to_arguments(args, kwargs):
    "The arguments of `Tensor.to` by name"
    if not args: return dict(kwargs)
    first = args[0]
    names = ('other',) if isinstance(first, torch.Tensor) else ('dtype',) if isinstance(first, torch.dtype) else ('device', 'dtype')
    return dict(zip((*names, *_REST), args)) | kwargs


def attributes(gpu):
    "New attributes of `torch.Tensor`, by name"
    T = torch.Tensor
    real = {o: getattr(T, o) for o in ('device', 'to', 'tolist', 'numpy', 'pin_memory', 'is_pinned', 'new_tensor')}

    def where(t): return gpu.device_of(t) or real['device'].__get__(t)

    def move(t, came, went, non_blocking, **kwargs):
        with gpu.pause(): res = real['to'](t, copy=True, **kwargs)
        if came and not went and non_blocking: gpu.mark(res, CPU, pinned=True)  # so does torch, where a copy may come later
        elif went: gpu.mark(res, went)
        gpu.copied(t, res, came, went, non_blocking)
        return res

    def to(self, *args, **kwargs):
        a = to_arguments(args, kwargs)
        other = a.pop('other', None)
        device = a.pop('device', None) if other is None else where(other)
        if other is not None: a['dtype'] = other.dtype
        a = {k: v for k, v in a.items() if v is not None}
        came, went = gpu.device_of(self), gpu.resolve(device) if device is not None else where(self)
        if went.type == 'meta' or (came or CPU) == went: return real['to'](self, **a) if a else self
        a.pop('copy', None)
        return move(self, came, went if went.type == 'cuda' else None, a.pop('non_blocking', False), **a)

    def tolist(self):
        device = gpu.device_of(self)
        if device is None or gpu.paused: return real['tolist'](host(self))
        gpu.wait('tolist', gpu.streams[device.index], device)
        with gpu.pause(): return real['tolist'](self)

    def numpy(self, *args, **kwargs):
        if (d := gpu.device_of(self)) is not None:
            raise TypeError(f"can't convert {d} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
                            'first.')
        return real['numpy'](host(self), *args, **kwargs)

    def host(self):
        if not gpu.paused and (b := gpu.block(self)) is not None: gpu.use(b, gpu.host, False)
        return self

    def pin_memory(self, *args, **kwargs):
        if gpu.device_of(self): raise RuntimeError(f"cannot pin 'torch.cuda.{self.dtype}' only dense CPU tensors can be pinned")
        if is_pinned(self): return self
        torch.cuda._lazy_init()
        with gpu.pause(): res = real['to'](self, copy=True)
        gpu.mark(res, CPU, pinned=True)
        return res

    def is_pinned(self, *args, **kwargs):
        b = gpu.block(self)
        return b is not None and b.pinned

    def new_tensor(self, data, *args, device=None, **kwargs):
        device = where(self) if device is None else gpu.resolve(device)
        return torch.tensor(data, *args, device=device, **(dict(dtype=self.dtype) | kwargs))

    def record_stream(self, stream):
        if (b := gpu.block(self)) is not None: b.kept.add(stream)

    def cuda(self, device=None, non_blocking=False, **kwargs):
        return self.to('cuda' if device is None else device, non_blocking=non_blocking, **kwargs)

    def cpu(self, **kwargs): return self.to('cpu', **kwargs)
    def get_device(self): return where(self).index if gpu.device_of(self) else -1

    return dict(device=property(where), is_cuda=property(lambda s: gpu.device_of(s) is not None),
                is_cpu=property(lambda s: where(s).type == 'cpu'), get_device=get_device, to=to, cpu=cpu, cuda=cuda, tolist=tolist,
                numpy=numpy, pin_memory=pin_memory, is_pinned=is_pinned, new_tensor=new_tensor, record_stream=record_stream)


def storage_attributes(gpu):
    "New methods of storages: what is copied stays where it was (deepcopy), what is loaded goes where it is asked to"
    real = torch.storage._StorageBase.clone

    def clone(self):
        res, b = real(self), gpu.blocks.get(self._cdata)
        if b is not None and b.device is not None: gpu.mark_storage(res, b.device)
        return res

    def to(self, *, device, non_blocking=False):
        device, res = gpu.resolve(device), real(self)
        if device.type == 'cuda': gpu.mark_storage(res, device)
        return res
    return dict(clone=clone, to=to)


def groups(gpu):
    "`torch._C._group_tensors_by_device_and_dtype`, by the devices that tensors say"
    def group(lists, with_indices=False):
        res = {}
        for i, t in enumerate(lists[0]):
            g, idxs = res.setdefault((t.device, t.dtype), ([[] for _ in lists], []))
            for o, l in zip(g, lists):
                if l: o.append(l[i])
            idxs.append(i)
        return {k: (g, idxs if with_indices else []) for k, (g, idxs) in res.items()}
    return group

"Batches reach a (pretended) GPU without a wait, in the right order, as they are on a CPU"
import gc
import os
import subprocess
import sys
from functools import cache

import pandas as pd
import pytest
import torch
from fastai.data.load import DataLoader
from fastai.torch_core import TensorImage
from transformers import BatchEncoding

from fastbench.text.words import lm_dls
from fastbench.measure.loader import on_copy
from fastbench.train.transfer import CopiesAhead, batches_on, pinned, put
from fastbench.vision.augment import augmented, prepare, prepare_on
from fastbench.vision.data import vision_dls
from fastbench.text.data import hf_dls
from pretend import pretend
from test_text_data import WORDS, make_tokenizer

CUDA = torch.device('cuda:0')


def photos(device, **kwargs): return vision_dls('photos', size=32, bs=16, sample=.1, workers=0, device=device, **kwargs)


def texts(n=60): return [' '.join(WORDS[(i*7+j) % len(WORDS)] for j in range(1+i % 13)) for i in range(n)]


tokenizer = cache(make_tokenizer)


def hf(loader):
    def make(device):
        kwargs = dict(max_tokens=64) if loader in ('budget', 'packed') else dict(bs=8)
        return hf_dls(pd.DataFrame(dict(text=texts(), label=[i % 2 for i in range(60)])), tokenizer(), loader=loader, seed=1, device=device, **kwargs)
    return make


LOADERS = dict(
    arrays=lambda d: vision_dls('digits', bs=16, sample=.1, min_scale=.5, flip=.5, device=d), files=photos,
    **{o: (lambda d, o=o: augmented(photos(d), o, cutout=8)) for o in ('items', 'once', 'bulk', 'batch')},
    **{f'texts {o}': hf(o) for o in ('sorted', 'budget', 'packed', 'random')},
    words=lambda d: lm_dls((['a b c d e f g']*60, ['a b c d e f g']*60), bs=2, bptt=5, shuffle=True, device=d))


def each(b):
    if isinstance(b, torch.Tensor): return [b]
    return [t for o in (b.values() if hasattr(b, 'values') else b if isinstance(b, (tuple, list)) else ()) for t in each(o)]


def epochs(dls, stop=None):
    "Two epochs, the first one cut off after `stop` batches, as numbers; what a step would do with the batches is done"
    res = []
    for k in (stop, None):
        for i, b in enumerate(dls.train):
            for t in each(b): t.float().mul(2).sum()
            res.append([t.detach().to('cpu', copy=True) for t in each(b)])
            if k is not None and i+1 == k: break
    return res


def same(a, b, equal=torch.equal): return len(a) == len(b) and all(len(x) == len(y) and all(equal(o, p) for o, p in zip(x, y)) for x, y in zip(a, b))


def nearly(a, b): return torch.allclose(a.float(), b.float(), atol=1e-4)


@pytest.mark.parametrize('stop', [None, 2])
@pytest.mark.parametrize('name', LOADERS)
def test_the_same_batches_as_on_a_cpu(name, stop):
    want = epochs(LOADERS[name]('cpu'), stop)
    with pretend() as gpu: got = epochs(LOADERS[name](CUDA), stop)
    assert same(want, got, nearly if name == 'arrays' else torch.equal) and not gpu.races and len(want) > 3  # crops on a device are products of matrices


@pytest.mark.parametrize('name', LOADERS)
def test_no_wait_for_a_batch(name):
    with pretend() as gpu:
        seen = []
        dls = LOADERS[name](CUDA)
        for b in dls.train:
            assert {t.device for t in each(b)} == {CUDA}
            seen.append((list(gpu.waits), list(gpu.copies)))
            gpu.forget()
        waits, copies = zip(*seen[1:])
        assert not any(waits) and not gpu.races
        assert all(o.pinned and not o.blocking for c in copies for o in c)


def test_copies_are_on_a_stream_of_their_own(gpu):
    dls = photos(CUDA)
    list(dls.train)
    streams = {o.stream for o in gpu.copies if o.bytes > 10**4}
    list(dls.train)
    assert len(streams) == 1 and torch.cuda.default_stream() not in streams  # the same one in the next epoch
    assert {o.stream for o in gpu.copies if o.bytes > 10**4} == streams


class Loader(CopiesAhead, DataLoader): pass


def test_one_batch_ahead(gpu):
    drawn = []
    class Items:
        def __len__(self): return 8
        def __getitem__(self, i):
            drawn.append(i)
            return torch.tensor(i)
    seen = [(b.item(), list(drawn)) for b in Loader(Items(), bs=1, device=CUDA)]
    assert seen[0] == (0, [0]) and seen[1] == (1, [0, 1, 2]) and seen[4] == (4, [*range(6)]) and [o for o, _ in seen] == [*range(8)]
    drawn.clear()
    Loader(Items(), bs=2, device=CUDA).one_batch()
    assert drawn == [0, 1]  # and not the next ones
    drawn.clear()
    for b in Loader(Items(), bs=1): pass
    assert drawn == [*range(8)]


class Failing:
    def __len__(self): return 6
    def __getitem__(self, i):
        if i == 3: raise ValueError('no more')
        return torch.tensor(i)


@pytest.mark.parametrize('workers', [0, 2])
def test_what_came_before_an_error_is_used(gpu, workers):
    seen = []
    with pytest.raises(ValueError, match='no more'):
        for b in Loader(Failing(), bs=1, device=CUDA, num_workers=workers): seen.append(b.item())
    assert seen == [0, 1, 2] or workers


@pytest.mark.parametrize('device', ['cpu', CUDA])
def test_workers(gpu, device):
    def epoch(workers): return [b.tolist() for b in Loader(torch.arange(20), bs=4, device=torch.device(device), num_workers=workers)]
    assert epoch(2) == epoch(0) and not gpu.races


def test_memory_is_not_given_back_while_a_step_uses_it(gpu):
    for b in batches_on([torch.ones(4) for _ in range(5)], CUDA):
        b = b*2
    assert not gpu.races and torch.cuda.memory_allocated() == 512  # `b` alone
    assert gpu.ops.count('copy') == 5


def test_a_batch_that_is_there_passes(gpu):
    b = (torch.ones(2, device=CUDA), torch.ones(2, device=CUDA))
    drawn = []
    def loader():
        for i in range(4):
            drawn.append(i)
            yield b
    for i, got in enumerate(batches_on(loader(), CUDA)): assert got is b and len(drawn) == i+1
    assert not gpu.copies
    x, y = next(batches_on([(b[0], torch.ones(3))], CUDA))
    assert x is b[0] and y.device == CUDA and len(gpu.copies) == 1


def test_containers_and_types(gpu):
    x = TensorImage(torch.ones(1, 2, 2))
    x.title = 'a photograph'
    b = (x, [torch.ones(2), 3, None], dict(ids=torch.arange(3), texts=2, more=(torch.ones(1), 'a')), BatchEncoding(dict(mask=torch.ones(2))))
    got, = batches_on([b], 'cuda')
    assert type(got) is tuple and type(got[0]) is TensorImage and got[0].title == 'a photograph' and type(got[1]) is list and got[1][1:] == [3, None]
    assert got[2]['texts'] == 2 and got[2]['more'][1] == 'a' and {t.device for t in each(got)} == {CUDA} and got[3]['mask'].device == CUDA
    assert not gpu.waits


@pytest.mark.parametrize('make', [lambda: torch.rand(2, 3, 4, 5), lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), lambda: torch.rand(6, 4)[1:5], lambda: torch.tensor(3.),
                                  lambda: torch.empty(0, 4), lambda: torch.tensor([True, False]), lambda: torch.rand(5).bfloat16(), lambda: torch.rand(4, dtype=torch.complex64),
                                  lambda: torch.rand(3, requires_grad=True), lambda: TensorImage(torch.arange(12, dtype=torch.uint8).reshape(1, 3, 2, 2), title='an image')])
def test_one_thread_pins_a_batch(gpu, monkeypatch, make):
    x = make()
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda *args: pytest.fail('by all threads'))
    y = pinned(x)
    assert y.is_pinned() and y.equal(x) and y.stride() == x.stride() and y.dtype == x.dtype and type(y) is type(x) and getattr(y, 'title', None) == getattr(x, 'title', None)
    if x.numel(): assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize('make', [lambda: torch.rand(6, 4).T, lambda: torch.rand(6, 8)[:, ::2], lambda: torch.zeros(2**24 + 1, dtype=torch.uint8)])
def test_pytorch_pins_what_is_large_or_scattered(gpu, monkeypatch, make):
    x, seen, own = make(), [], torch.Tensor.pin_memory
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda o, *args: seen.append(o) or own(o, *args))
    y = pinned(x)
    assert y.is_pinned() and y.equal(x) and len(seen) == 1


def test_what_is_pinned_already_is_not_copied(gpu):
    x = torch.ones(3).pin_memory()
    assert pinned(x) is x and pinned(torch.ones(3)).is_pinned()
    put((x, 1), CUDA)
    assert len(gpu.copies) == 1 and gpu.copies[0].pinned and not gpu.waits


def test_the_device_of_the_tensor_is_meant_and_not_the_current_one(gpu):
    for b in batches_on([torch.ones(4)]*3, 'cuda:1'):
        assert b.device == torch.device('cuda:1') and torch.cuda.current_device() == 0
        b*2
    assert not gpu.races and {o.stream.device.index for o in gpu.copies} == {1}


def test_begin_and_end_of_a_copy_are_told(gpu):
    told = []
    token = on_copy.set((lambda beside: told.append('beside' if beside else 'begin'), lambda: told.append('end')))
    try:
        for b in batches_on([torch.ones(2), torch.ones(2)], CUDA): told.append('used')
        assert told == ['beside', 'end', 'used', 'beside', 'end', 'used']
        told.clear()
        list(batches_on([torch.ones(2, device=CUDA)], CUDA))
        list(batches_on([torch.ones(2)], 'cpu'))
        assert not told
    finally: on_copy.reset(token)


def test_prepared_in_parts_as_at_once():
    x = torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    args = (.4, .5, .6), (.2, .3, .2), 12, 2
    assert torch.equal(prepare_on(x, 'cpu', *args, chunk=4), prepare(x, *args))
    with pretend() as gpu: y = prepare_on(x, CUDA, *args, chunk=4).to('cpu')
    assert torch.equal(y, prepare(x, *args)) and sum(o.bytes for o in gpu.copies if o.way == 'H2D') < 2*x.numel() and gpu.memory[0].peak < 80_000


def test_bytes_go_to_the_device():
    with pretend() as gpu:
        dls = augmented(photos(CUDA), 'batch')
        gpu.forget()
        next(iter(dls.train))
        n = dls.info['n_train']
        assert sum(o.bytes for o in gpu.copies) < n*(3*32*32 + 8+8) + 1000 and not gpu.waits


class Freed:
    "Says in which process it was freed"
    def __init__(self, path): self.path = path
    def __del__(self):
        with open(self.path, 'a') as f: f.write(f'{os.getpid()}\n')


class Collects:
    "Each item collects garbage"
    def __len__(self): return 4
    def __getitem__(self, i):
        gc.collect()
        return i


def test_a_worker_leaves_the_garbage_of_its_parent_alone(tmp_path):
    "A batch that two streams used cannot be freed in a forked process: PyTorch aborts it"
    with pretend(): list(batches_on([torch.zeros(2)], CUDA))
    cycle = [Freed(tmp_path/'freed')]
    cycle.append(cycle)
    del cycle
    assert [b.tolist() for b in DataLoader(Collects(), bs=2, num_workers=1)] == [[0, 1], [2, 3]]
    gc.collect()
    assert set((tmp_path/'freed').read_text().split()) == {str(os.getpid())}


COLLECTS_AT_ONCE = """
import gc, os, sys
def much(): [[] for _ in range(10**5)]  # a library's own preparation for forks, in which a collection is due
os.register_at_fork(after_in_child=much)
sys.path.insert(0, sys.argv[1])
import torch
from pretend import pretend
from fastbench.train.transfer import batches_on
with pretend(): list(batches_on([torch.zeros(2)], torch.device('cuda', 0)))
class Freed:
    def __del__(self): print(os.getpid() == parent, flush=True)
parent, cycle = os.getpid(), [Freed()]
cycle.append(cycle)
del cycle
pid = os.fork()
if not pid: os._exit(int(not gc.isenabled()))
assert os.waitpid(pid, 0)[1] == 0 and gc.isenabled()
gc.collect()
"""


def test_a_collection_that_is_due_waits_until_a_fork_has_frozen_its_garbage(root):
    out = subprocess.run([sys.executable, '-c', COLLECTS_AT_ONCE, str(root/'tests')], capture_output=True, text=True)
    assert out.stdout.split() == ['True'], out.stdout + out.stderr

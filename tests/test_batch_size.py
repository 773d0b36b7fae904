"find_batch_size: exact where the limit is known, within a memory limit, and nothing is touched."
import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper, SGD
from fasttransform import Pipeline
from torch import nn

import fastbench.draw.diagnose  # adds diagnose_input
from fastbench.train.batch_size import BatchSize, _raw, _Room, _search, free, is_oom, only_new_collected, parse_memory
from fastbench.train.rehearsal import again, attributes_kept
from fastbench.callback.amp import MixedPrecision
from fastbench.callback.channelslast import ChannelsLast
from fastbench.callback.checkpointing import GradientCheckpointing
from fastbench.callback.compiling import Compile
from fastbench.callback.ema import EMACallback
from fastbench.callback.half import HalfPrecision
from fastbench.errors import UserError
from fastbench.train.learner import BenchLearner
from gpu import needs_gpu, to_gpu


class Net(nn.Module):
    "Raises like a device above `limit` samples, at `where`"
    def __init__(self, limit=10**9, where='forward', error=torch.OutOfMemoryError('CUDA out of memory'), width=8):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)))
        self.drop, self.lin = nn.Dropout(.5), nn.Linear(3*width*width, 3)
        self.limit, self.where, self.error, self.seen = limit, where, error, []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.limit and self.where == 'forward': raise self.error
        y = self.lin(self.drop(self.blocks(x)).flatten(1))
        if len(x) > self.limit and self.where == 'backward': y.register_hook(self.fail)
        return y

    def fail(self, _): raise self.error


class Items:
    def __init__(self, n, width=8): self.n, self.width = n, width
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i >= self.n: raise IndexError
        return torch.randn(3, self.width, self.width), i % 3


def make(*cbs, n=200, bs=16, cls=BenchLearner, model=None, width=8, **kwargs):
    torch.manual_seed(0)
    dls = DataLoaders(DataLoader(Items(n, width), bs=bs, shuffle=True), DataLoader(Items(8, width), bs=4))
    learn = cls(dls, model or Net(width=width), loss_func=nn.CrossEntropyLoss(), cbs=cbs, **kwargs)
    learn.logger = lambda *_: None
    learn.remove_cb(learn.progress)
    return learn


@pytest.mark.parametrize('collects', [lambda: free(torch.device('cpu')), lambda: only_new_collected().__enter__()])
def test_the_stop_button_is_heard_while_garbage_is_collected(collects):
    "`Exception ignored in: <function WeakValueDictionary...>`, and the search went on: most of it is collecting"
    gc.collect()  # or one that is due by itself may come first, where nobody holds the signal back
    class Node: pass
    node = Node()
    node.me, gone = node, []
    ref = weakref.ref(node, lambda o: (os.kill(os.getpid(), signal.SIGINT), time.sleep(.01), gone.append(o)))
    del node
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes what it starts with & deaf to it
    try:
        with pytest.raises(KeyboardInterrupt): collects()
        assert gone and ref() is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally: signal.signal(signal.SIGINT, was)


@pytest.mark.parametrize('limit', [1, 2, 15, 16, 17, 77, 199, 200, 500])
def test_search_is_exact(limit): assert _search(lambda bs: bs <= limit, 16, 200) == min(limit, 200)


@pytest.mark.parametrize('limit,where', [(5, 'forward'), (37, 'backward'), (16, 'forward')])
@pytest.mark.parametrize('cls', [Learner, BenchLearner])
def test_exact_answer(limit, where, cls):
    learn = make(model=Net(limit, where), cls=cls)
    bs = learn.find_batch_size()
    assert bs == limit and isinstance(bs, BatchSize) and bs.seconds > 0 and f'{limit+1} does not fit' in bs.why
    tried = {b: s for b, s, _ in bs.tries}
    assert tried[limit] is not None and tried[limit+1] is None


def test_all_of_the_data():
    bs = make(n=50).find_batch_size()
    assert bs == 50 and 'data set' in bs.why
    bs = make(n=50).find_batch_size(max=20)
    assert bs == 20 and bs.why == 'max'
    assert make(n=50).find_batch_size(start=1000, max=1000) == 50


def test_other_errors_come_through():
    learn = make(model=Net(20, error=ValueError('a bug')))
    with pytest.raises(ValueError, match='a bug'): learn.find_batch_size()
    assert learn.model.training and learn.opt is None


def state(learn):
    m, opt = learn.model, learn.opt
    inner = (getattr(opt, 'opt', None) or opt).state if opt is not None else {}
    return dict(weights=[(id(t), t.clone()) for t in (*m.parameters(), *m.buffers())], data=[p.data_ptr() for p in m.parameters()],
                grads=[None if p.grad is None else p.grad.clone() for p in m.parameters()], needs=[p.requires_grad for p in m.parameters()],
                modes=[o.training for o in m.modules()], opt=[(k, v.clone()) for s in inner.values() for k, v in s.items() if isinstance(v, torch.Tensor)], cbs=list(learn.cbs),
                own={k: v for k, v in vars(learn).items()}, rng=[random.getstate(), str(np.random.get_state()), torch.get_rng_state()],
                dl=[learn.dls.train, learn.dls.train.rng.getstate(), learn.dls.train.bs], hypers=[dict(h) for h in opt.hypers] if opt is not None else None,
                attrs=[{k: repr(v) for k, v in vars(cb).items()} for cb in learn.cbs])


def equal(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict): return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a is b or a == b


@pytest.mark.parametrize('fitted', [False, True])
@pytest.mark.parametrize('limit', [0, 40, 10**9])
def test_nothing_is_touched(fitted, limit):
    learn = make(EMACallback(.5), MixedPrecision('bf16', True), ChannelsLast(), GradientCheckpointing(modules=nn.Conv2d), model=Net(limit))
    if fitted:
        learn.model.limit = 10**9
        learn.fit(1)
        learn.model.limit = limit
        learn.model.blocks[0][0].weight.requires_grad_(False)
        learn.model.lin.weight.grad = torch.ones_like(learn.model.lin.weight)
        learn.model.drop.eval()
    before = state(learn)
    try: learn.find_batch_size()
    except UserError: assert not limit
    after = state(learn)
    for k in before: assert equal(before[k], after[k]), k
    assert not [o for o in learn.model.modules() if 'forward' in vars(o)] and 'remove_cbs' not in vars(learn)


class Center(nn.Module):
    "A loss with a buffer, a weight that is trained, and plain attributes"
    def __init__(self):
        super().__init__()
        self.register_buffer('c', torch.zeros(3))
        self.w, self.n, self.seen, self.avg = nn.Parameter(torch.ones(1)), 0, [], torch.zeros(3)

    def forward(self, p, y):
        self.c.mul_(.9).add_(.1*p.detach().mean(0))
        self.avg.add_(p.detach().mean(0))
        self.n += 1
        self.seen.append(self.n)
        return nn.functional.cross_entropy((p - self.c)*self.w, y)


class Held:
    "A plain loss that holds one"
    def __init__(self): self.inner, self.n = Center(), 0
    def __call__(self, p, y):
        self.n += 1
        return self.inner(p, y)


@pytest.mark.parametrize('kind', [Center, Held])
@pytest.mark.parametrize('tried', [lambda o: o.find_batch_size(max=16), lambda o: o.diagnose_input(.5)], ids=['find_batch_size', 'diagnose_input'])
def test_a_loss_function_is_left_as_it_was(kind, tried):
    loss = kind()
    inner = loss if kind is Center else loss.inner
    learn = make(n=80, splitter=lambda m: [list(m.parameters()), list(inner.parameters())])
    learn.loss_func = loss
    learn.model.count, before = 0, learn.model.forward
    def counting(x):
        learn.model.count += 1
        return before(x)
    learn.model.forward = counting
    tried(learn)
    assert inner.c.eq(0).all() and inner.w.eq(1).all() and inner.avg.eq(0).all() and (inner.n, inner.seen, loss.n, learn.model.count) == (0, [], 0, 0)
    assert learn.loss_func is loss and inner.w.grad is None


@pytest.mark.parametrize('loader, tokens', [('sorted', None), ('budget', 8*26), ('packed', 8*26)])
def test_a_loader_that_counts_tokens_is_told_how_many(loader, tokens):
    from fastbench.text.data import hf_dls
    from fastbench.text.learner import hf_learner
    from test_text_data import WORDS, make_tokenizer
    rows = [(' '.join(WORDS[:24]), 'ab'[i % 2]) for i in range(60)]
    budget = dict(bs=4) if loader == 'sorted' else dict(max_tokens=100)
    found = hf_learner(hf_dls(rows, make_tokenizer(), loader=loader, workers=0, device='cpu', **budget), 'bert-tiny', pretrained=False).find_batch_size(max=8)
    assert (found, found.max_tokens) == (8, tokens)


class Wide(DataLoader):
    "Its batches hold each item several times"
    def __init__(self, dataset=None, times=1, **kwargs): super().__init__(dataset, **kwargs); self.times = times
    def create_batch(self, b): return torch.stack(b).repeat(1, self.times)


def test_the_batches_that_are_tried_are_those_of_the_loader():
    dl = Wide([torch.ones(1)]*8, times=3, bs=4)
    assert next(iter(_raw(dl))).shape == dl.one_batch().shape == (4, 3)


def test_attributes_that_cannot_be_written_are_left_alone():
    m = nn.Linear(2, 2)
    m.mask, m.nowhere, m.sparse, m.seen = torch.ones(1).expand(5), torch.ones(3, device='meta'), torch.eye(3).to_sparse(), dict(n=1)
    was = dict(vars(m))
    with attributes_kept(m):
        m.seen['n'], m.more = 2, 3
        m.mask = None
    assert vars(m) == was and m.mask is was['mask'] and m.seen == dict(n=1)


@pytest.mark.parametrize('tried', [lambda o: o.find_batch_size(max=8), lambda o: o.diagnose_input(.5)], ids=['find_batch_size', 'diagnose_input'])
def test_the_coming_batches_are_the_same(tried):
    "Batch transforms count images, and a loader of texts plans an epoch by the tokens that it knows"
    from fastbench.draw.crop import BatchCrop
    from fastbench.text.data import hf_dls
    from fastbench.text.learner import hf_learner
    from test_text_data import WORDS, make_tokenizer
    tok = make_tokenizer()
    def texts():
        rows = [(' '.join(WORDS[:1 + i*7 % 23]), 'ab'[i % 2]) for i in range(60)]
        return hf_learner(hf_dls(rows, tok, bs=4, seed=1, workers=0, device='cpu'), 'bert-tiny', pretrained=False)
    def images():
        learn = make(n=80)
        for dl in learn.dls.loaders: dl.after_batch = Pipeline([BatchCrop(6, seed=3)])
        learn.dls.train.after_batch.split_idx = 0
        return learn
    for kind in texts, images:
        def batches(tried):
            torch.manual_seed(1)
            learn = kind()
            tried(learn)
            return [x['input_ids'] if isinstance(x, dict) else x for x, _ in learn.dls.train]
        assert equal(batches(lambda o: None), batches(tried)), kind


@pytest.mark.parametrize('cb', [lambda: MixedPrecision('bf16', True), lambda: HalfPrecision('bf16', allow_emulation=True), lambda: Compile(backend='eager'),
                                lambda: GradientCheckpointing(modules=nn.Conv2d), lambda: EMACallback(.9), lambda: ChannelsLast()],
                         ids=['amp', 'half', 'compile', 'checkpointing', 'ema', 'channels-last'])
def test_under_the_callbacks_that_matter(cb):
    cb = cb()
    seen = []

    class Spy(type(cb)):
        def after_pred(self):
            seen.append(type(self))
            if hasattr(super(), 'after_pred'): super().after_pred()
    cb.__class__ = Spy
    learn = make(cb, model=Net(20))
    assert learn.find_batch_size() == 20 and seen
    assert again(cb) is not cb and cb.learn is learn


def test_callbacks_that_do_not_matter_are_not_called():
    class Writes(Callback):
        def before_fit(self): raise AssertionError('called')
    assert make(Writes(), n=20).find_batch_size() == 20


@pytest.mark.parametrize('kw,says', [(dict(start=0), 'start=0'), (dict(max=0), 'max=0'), (dict(start=True), 'start=True'), (dict(memory='lots'), "memory='lots'"),
                                     (dict(memory=0), 'memory=0'), (dict(headroom=1), 'headroom=1'), (dict(memory='1MB'), 'not even one sample')])
def test_bad_input_is_one_line(kw, says):
    with pytest.raises(UserError, match=says) as e: make().find_batch_size(**kw)
    assert '\n' not in str(e.value)


def test_not_even_one():
    with pytest.raises(UserError, match='not even one sample'): make(model=Net(0)).find_batch_size()


def test_a_norm_that_needs_two_samples_is_not_short_memory():
    with pytest.raises(UserError, match='a batch of 1 cannot be trained: batch norm.*larger max'): make(width=1).find_batch_size(max=1)
    assert make(width=1).find_batch_size(max=3) == 3


def test_an_optimizer_that_is_there_already():
    model = Net()
    with pytest.raises(UserError, match='OptimWrapper'): make(model=model, opt_func=OptimWrapper(opt=torch.optim.SGD(model.parameters(), .1))).find_batch_size()


def test_the_longest_items():
    texts = [torch.zeros(n, dtype=torch.long) for n in (3, 4, 50, 5)]
    data = [(t[None].repeat(2, 1), torch.tensor([0, 1])) for t in texts]
    seen = []

    class Mean(nn.Module):
        def __init__(self): super().__init__(); self.emb = nn.Embedding(2, 2)
        def forward(self, x): seen.append(tuple(x.shape)); return self.emb(x).mean(1)
    learn = BenchLearner(DataLoaders(data, data), Mean(), loss_func=nn.CrossEntropyLoss())
    assert learn.find_batch_size(start=2, max=8) == 8
    assert {s[1] for s in seen} == {50} and {s[0] for s in seen} == {2, 4, 8}


def test_memory_is_parsed():
    assert [parse_memory(o) for o in ('2 kB', '1KiB', '3gb', 5.5, '7')] == [2000, 1024, 3*10**9, 5, 7]
    for o in ('', 'GB', '-1GB', '1XB', None, 'nan'):
        with pytest.raises(UserError): parse_memory(o)


def test_signs_of_memory():
    for o in (MemoryError(), torch.OutOfMemoryError('x'), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
              RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED'), RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate')): assert is_oom(o)
    wrapped = ValueError('compile')
    wrapped.__cause__ = torch.OutOfMemoryError('x')
    assert is_oom(wrapped) and not is_oom(RuntimeError('shape')) and not is_oom(ValueError('out of memory'))


HALF = """
import psutil, torch
from fastbench.train.batch_size import free
import sys; sys.path.insert(0, {tests!r})
from test_batch_size import make
torch.set_num_threads(1)
learn = make(n=4096, width=64)
learn.find_batch_size(max=2)  # libraries, kernels
free(torch.device('cpu'))
base = psutil.Process().memory_info().rss
res = [learn.find_batch_size(memory=base + o*2**20, headroom=0.) for o in (200, 100)]
print([int(o) for o in res], [(o.peak - base)/2**20 for o in res])
"""


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='elsewhere the peak is sampled')
def test_less_memory_smaller_batch(root):
    "What is freed goes back to the system at once, or the C library's own choice decides which batch fits: twice as much memory, and hardly a larger batch"
    env = os.environ | dict(MALLOC_MMAP_THRESHOLD_='65536')
    got = subprocess.run([sys.executable, '-c', HALF.format(tests=str(root/'tests'))], capture_output=True, text=True, env=env)
    assert got.returncode == 0, got.stderr[-2000:]
    (big, small), (p, q) = eval(got.stdout.splitlines()[-1].replace('] [', '],['))
    assert 1 < small < big < 4096 and 1.4 < big/small < 3 and p <= 200 and q <= 100


@needs_gpu
def test_on_cuda():
    learn = to_gpu(make(n=2**20, width=64))
    learn.find_batch_size(memory='1GB')  # cuBLAS keeps the workspaces of its first products: 65 MiB on an H200
    before = torch.cuda.memory_allocated()
    big, small = (learn.find_batch_size(memory=o) for o in ('2GB', '1GB'))
    assert 1.5 < big/small < 3 and big.peak <= 2e9 and small.peak <= 1e9
    assert torch.cuda.memory_allocated() <= before + sum(p.numel()*4 for p in learn.model.parameters()) + 2**20
    torch.empty(int(3e9), dtype=torch.uint8, device='cuda')  # the limit is gone


def test_sgd_without_state(): assert make(model=Net(9), opt_func=SGD).find_batch_size() == 9


def test_command():
    def command(*args): return subprocess.run([sys.executable, '-m', 'fastbench', 'find-batch-size', *args], capture_output=True, text=True)
    got = command('digits-xresnet18', '--max', '2', '--device', 'cpu', '--offline')
    assert got.returncode == 0, got.stderr
    assert got.stdout.splitlines()[0] == '2' and 'samples/s' in got.stdout and got.stdout.splitlines()[2].endswith('max')
    got = command('digits-xresnet18', '--memory', 'lots')
    assert got.returncode == 2 and '--memory lots cannot be' in got.stderr.splitlines()[-1] and not got.stdout


def test_one_try_that_fails_foretells_nothing_of_a_smaller_batch():
    room = _Room(torch.device('cpu'), 10**9, 0., 0)
    room.seen = [(16, 2*10**9)]
    assert not room.hopeless(8) and room.hopeless(32)
    room.seen.append((8, 13*10**8))
    assert room.hopeless(5) and not room.hopeless(4)


def test_rows_of_a_table():
    "Which become tensors by a batch transform"
    import pandas as pd
    from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_learner
    df = pd.DataFrame(dict(a=np.arange(200.), c=list('xyzx')*50, y=list('uv')*100))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['c'], cont_names=['a'], y_names='y', bs=16, num_workers=0, valid_idx=list(range(40)))
    learn, seen = tabular_learner(dls, layers=[20, 10], n_out=2), []
    learn.model.register_forward_pre_hook(lambda m, x: seen.append(len(x[0])))
    assert learn.find_batch_size(max=100) == 100 and set(seen) == {16, 32, 64, 100}
    assert learn.find_batch_size() == len(dls.train_ds)


def test_batches_without_tensors_are_named():
    class Word(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    dl = DataLoader(list('abcd'), bs=2, create_batch=''.join)
    with pytest.raises(UserError, match='find_batch_size: a batch is a str, which holds no tensor') as e: Learner(DataLoaders(dl, dl), Word(), loss_func=nn.MSELoss()).find_batch_size()
    assert '\n' not in str(e.value)


def test_data_without_a_length():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self): return iter([(torch.zeros(4), 0)]*80)
    learn = Learner(DataLoaders(*[DataLoader(Endless(), bs=8, num_workers=0)]*2), nn.Linear(4, 2), loss_func=nn.CrossEntropyLoss())
    assert learn.find_batch_size(max=32) == 32


def test_what_a_loader_of_ones_own_calls_n_is_not_its_samples():
    "As a plain class whose `n` counts batches"
    class Batches:
        n = 3
        def __len__(self): return self.n
        def __iter__(self): yield from [(torch.randn(8, 4), torch.randn(8, 1))]*self.n
    assert Learner(DataLoaders(Batches(), Batches()), nn.Linear(4, 1), nn.MSELoss()).find_batch_size(max=64) == 64

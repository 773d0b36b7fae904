"Plain loaders of fastai: our loop copies them to a GPU ahead and without a wait, fastai's loop as ever, and the profiler changes neither"
import pytest
import torch
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.data.core import DataLoaders, TfmdDL
from fastai.data.load import DataLoader
from fastai.learner import Learner
from torch import nn

import fastbench.train.batch_size
import fastbench.measure.profiler
from fastbench.distributed.dealt import RankDL
from fastbench.train.loop import FastLoop
from fastbench.train.learner import BenchLearner
from fastbench.train.transfer import CopiesAhead
from pretend import pretend

CUDA = torch.device('cuda:0')


class Steps(Callback):
    "What the host waited for and which copies there were, batch by batch"
    order = 90
    def __init__(self, gpu): self._gpu, self.rows = gpu, []
    def before_train(self): self._gpu.forget()
    def after_batch(self):
        if self.training: self.rows.append((list(self._gpu.waits), list(self._gpu.copies), list(self._gpu.races)))
        self._gpu.forget()


def items(n=48): return [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 2)) for i in range(n)]


def loader(device, **kwargs):
    dl = DataLoader(items(), bs=4, shuffle=True, device=torch.device(device), after_batch=lambda b: (b[0]*2, b[1]), **kwargs)
    dl.rng.seed(1)
    return dl


def steps(cls, gpu, profile=False, device=CUDA, **kwargs):
    "The Learner and its steps but for the first two and the last"
    torch.manual_seed(0)
    learn = cls(DataLoaders(loader(device, **kwargs), loader(device), device=device), nn.Linear(4, 2), loss_func=nn.CrossEntropyLoss(), opt_func=lambda ps, **kw: sgd(ps), cbs=Steps(gpu))
    if profile: learn.profile()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
    return learn, learn.steps.rows[2:-1]


def sgd(ps):
    from fastai.optimizer import OptimWrapper
    return OptimWrapper(ps, torch.optim.SGD)


@pytest.mark.parametrize('profile', [False, True])
def test_our_loop_does_not_wait_for_a_plain_loader(gpu, profile):
    learn, rows = steps(FastLoop, gpu, profile)
    copies = [o for _, copies, _ in rows for o in copies if o.way == 'H2D']
    assert len(copies) >= 20 and all(o.pinned and not o.blocking and o.stream is not torch.cuda.default_stream() for o in copies)
    assert not any(races for *_, races in rows) and not any('copy' in w.kind for waits, *_ in rows for w in waits)


def test_the_profiler_leaves_a_plain_learner_its_copies(gpu):
    def seen(profile): return [[(o.way, o.bytes, o.pinned, o.blocking) for o in copies if o.way == 'H2D'] for _, copies, _ in steps(Learner, gpu, profile)[1]]
    plain = seen(False)
    assert plain == seen(True) and all(o[-1] for step in plain for o in step)


@pytest.mark.parametrize('workers', [0, 2])
def test_the_same_training(gpu, workers):
    def weights(cls, device, profile=False): return steps(cls, gpu, profile, torch.device(device), num_workers=workers)[0].model.weight.detach().cpu()
    want = weights(Learner, 'cpu')
    for cls in (Learner, FastLoop):
        for profile in (False, True): assert torch.equal(weights(cls, CUDA, profile), want)


def test_a_loader_for_ranks_copies_ahead(gpu):
    dl = RankDL(TfmdDL(items(), bs=4, do_setup=False), 0, 2, CUDA)
    dl._broadcast = lambda t, rank: t
    want = RankDL(TfmdDL(items(), bs=4, do_setup=False), 0, 2, 'cpu')
    want._broadcast = dl._broadcast
    seen = []
    for b in dl:
        seen.append((list(gpu.waits), list(gpu.copies)))
        gpu.forget()
    assert isinstance(dl, CopiesAhead) and not any(waits for waits, _ in seen) and all(o.pinned and not o.blocking for _, copies in seen for o in copies)
    assert len(seen) == len(dl) == 6 and not gpu.races
    assert all(torch.equal(a.cpu(), b) for x, y in zip(dl, want) for a, b in zip(x, y))


class Wide(nn.Module):
    "Next to nothing but its batch"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)
    def forward(self, x): return self.lin(x[:, :4].float())


class Bytes:
    def __len__(self): return 4000
    def __getitem__(self, i):
        if i >= 4000: raise IndexError
        return torch.full((2**13,), i % 7, dtype=torch.uint8), i % 2


class OurDL(CopiesAhead, DataLoader): pass


def wide(cls, dl, bs, n):
    kwargs = dict(device=CUDA, after_batch=lambda b: (b[0].half(), b[1]))
    dls = DataLoaders(dl(Bytes(), bs=bs, n=n, **kwargs), dl(Bytes(), bs=4, n=8, **kwargs), device=CUDA)
    learn = cls(dls, Wide().to(CUDA), loss_func=nn.CrossEntropyLoss(), default_cbs=False, cbs=TrainEvalCallback)
    learn.logger = lambda *_: None
    return learn


@pytest.mark.parametrize('cls,dl', [(BenchLearner, DataLoader), (BenchLearner, OurDL), (Learner, OurDL), (Learner, DataLoader)])
def test_the_largest_batch_leaves_room_for_what_is_copied_ahead(cls, dl):
    "What is found trains, and a few more do not: there are three batches at once in a loop that copies ahead"
    def trains(bs):
        with pretend(memory=10**7):
            try: wide(cls, dl, bs, 5*bs).fit(1)
            except torch.OutOfMemoryError: return False
        return True
    with pretend(memory=10**7): bs = wide(cls, dl, 16, 4000).find_batch_size(headroom=0., max=600)
    assert 100 < bs < 600 and trains(int(bs)) and not trains(int(bs*1.02)+1)

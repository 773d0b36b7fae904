"A step of GradientAccumulation with WeighBatches is that of one large batch: precisions, optimizers, what is left over, what was set to zero"
from functools import partial

import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import Learner  # adds lr_find
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import SGD, Adam
from torch import nn

from fastbench.callback.amp import MixedPrecision
from fastbench.callback.ema import EMACallback
from fastbench.callback.half import HalfPrecision
from fastbench.distributed.accumulate import WeighBatches
from fastbench.train.learner import BenchLearner
from fastbench.train.optimizer import fused_adamw, fused_sgd
from test_amp import fp16_on_cpu

G = torch.Generator().manual_seed(3)
X, Y = torch.randn(24, 6, 4, generator=G), torch.randint(3, (24, 6), generator=G)
for i, row in enumerate(Y): row[1 + (i//2*5) % 6:] = -100  # texts of 1 to 6 words, of one length in a batch of two


def words_loss(pred, y): return nn.functional.cross_entropy(pred.flatten(0, 1), y.flatten())


class Given(DataLoader):
    "Batches of these sizes"
    def __init__(self, sizes): super().__init__(dataset=list(range(24)), bs=2), setattr(self, 'sizes', sizes)
    def __iter__(self):
        at = 0
        for n in self.sizes:
            yield X[at:at + n], Y[at:at + n]
            at += n
    def __len__(self): return len(self.sizes)


def make(sizes, *cbs, cls=Learner, **kwargs):
    torch.manual_seed(0)
    learn = cls(DataLoaders(Given(sizes), Given([24]), device='cpu'), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
                **dict(loss_func=words_loss, opt_func=partial(SGD, mom=.9)) | kwargs, cbs=cbs)
    learn.n_targets = lambda yb: (yb[0] != -100).sum()
    return learn


def trained(sizes, *cbs, n=2, lr=.5, **kwargs):
    learn = make(sizes, *cbs, **kwargs)
    with learn.no_bar(), learn.no_logging(): learn.fit(n, lr)
    return learn


def apart(a, b): return max((p - q).abs().max().item() for p, q in zip(a.model.parameters(), b.model.parameters()))


LARGE, SMALL, UNEVEN = [8]*3, [2]*12, [1, 5, 2]*3


@pytest.mark.parametrize('sizes', [SMALL, UNEVEN])
@pytest.mark.parametrize('cls,opt', [(c, o) for c in (Learner, BenchLearner) for o in (partial(SGD, mom=.9), Adam)] + [(BenchLearner, fused_sgd), (BenchLearner, fused_adamw)])
def test_a_step_is_that_of_a_large_batch(opt, cls, sizes):
    lr = .02 if opt in (Adam, fused_adamw) else .5
    want, got, theirs = (trained(*o, cls=cls, opt_func=opt, lr=lr) for o in ([LARGE], [sizes, GradientAccumulation(8), WeighBatches()], [sizes, GradientAccumulation(8)]))
    assert apart(got, want) < 2e-5 < 1e-3 < apart(theirs, want)


@pytest.mark.parametrize('cbs', [lambda: [GradientClip(.1)], lambda: [EMACallback(.5)], lambda: [MixedPrecision('bf16', allow_emulation=True)], lambda: [HalfPrecision('bf16', allow_emulation=True)],
                                 lambda: [HalfPrecision('bf16', loss_scale='dynamic', allow_emulation=True), GradientClip(.1)]], ids=['clip', 'ema', 'amp', 'half', 'scaled'])
def test_beside_other_callbacks(cbs):
    want = trained(LARGE, *cbs(), cls=BenchLearner)
    got, theirs = (trained(SMALL, GradientAccumulation(8), *o, *cbs(), cls=BenchLearner) for o in ([WeighBatches()], []))
    assert apart(got, want) < apart(theirs, want)/4


def test_with_a_scaled_loss(fp16_on_cpu):
    want = trained(LARGE, MixedPrecision('fp16'), cls=BenchLearner)
    got, theirs = (trained(SMALL, GradientAccumulation(8), *o, MixedPrecision('fp16'), cls=BenchLearner) for o in ([WeighBatches()], []))
    assert apart(got, want) < 2e-3 < apart(theirs, want)
    assert got.mixed_precision.scaler.get_scale() == want.mixed_precision.scaler.get_scale()


def test_what_is_left_over_is_part_of_the_next_fit():
    "The first fit ends after 7 of 8 samples"
    learn = make([2, 5], GradientAccumulation(8), WeighBatches())
    own = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    own.load_state_dict(learn.model.state_dict())
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, .5)
        assert all(torch.equal(p, q) for p, q in zip(learn.model.parameters(), own.parameters()))
        learn.dls = DataLoaders(Given([8]), Given([24]), device='cpu')
        learn.fit(1, .5)
    x, y = torch.cat([X[:7], X[:8]]), torch.cat([Y[:7], Y[:8]])
    (words_loss(own(x), y)*15/8).backward()
    for p, q in zip(learn.model.parameters(), own.parameters()): torch.testing.assert_close(p, q - .5*q.grad, atol=1e-6, rtol=1e-5)


def test_gradients_that_were_set_to_zero_do_not_count():
    learn, other = make([2, 5], GradientAccumulation(8), WeighBatches()), make([8], GradientAccumulation(8), WeighBatches())
    with learn.no_bar(), learn.no_logging(), other.no_bar(), other.no_logging():
        learn.fit(1, .5), learn.opt.zero_grad()
        learn.dls = other.dls
        learn.fit(1, .5), other.fit(1, .5)
    assert apart(learn, other) < 1e-7


def test_a_batch_without_targets_and_a_step_without_any():
    learn = make([2, 2, 4], GradientAccumulation(8), WeighBatches(), loss_func=lambda p, y: words_loss(p, y) if (y != -100).any() else p.sum()*0)
    learn.dls.train.__class__ = type('Empty', (Given,), dict(__iter__=lambda self: iter([(X[:2], torch.full_like(Y[:2], -100)), (X[2:4], Y[2:4]), (X[4:8], Y[4:8]), (X[:8], torch.full_like(Y[:8], -100))])))
    learn.dls.train.sizes = [2, 2, 4, 8]
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .5)
    assert all(torch.isfinite(p).all() for p in learn.model.parameters())


def test_a_sum_is_left_alone():
    def summed(p, y): return words_loss(p, y)*(y != -100).sum()
    summed.reduction = 'sum'
    a, b = (trained(SMALL, GradientAccumulation(8), *o, loss_func=summed, lr=.01) for o in ([WeighBatches()], []))
    assert apart(a, b) == 0


def test_losses_are_logged_as_ever():
    a, b = (trained(SMALL, GradientAccumulation(100), *o) for o in ([WeighBatches()], []))  # no step
    assert a.recorder.losses == b.recorder.losses

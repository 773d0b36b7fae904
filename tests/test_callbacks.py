"EMA and FirstBatches where a reader of the lessons does not look: inner validations, cancelled ones, batch norm, several fits."
import torch
from fastai.callback.core import Callback, CancelValidException, FetchPredsCallback
from fastai.callback.schedule import Learner  # noqa: F401
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import SGD
from torch import nn

from fastbench.callback.amp import MixedPrecision
from fastbench.callback.ema import EMACallback
from fastbench.callback.limit import FirstBatches
from test_profiler import items, on


def make(cbs, n=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    learn = Learner(DataLoaders(*(DataLoader(items(n), bs=4) for _ in range(2))), model, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, lr=.1, cbs=cbs)
    learn.logger = lambda *_: None
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    return learn


def weights(learn): return learn.model[0].weight.detach().clone()


class Last(Callback):
    order = 80
    def after_batch(self):
        if self.training: self.raw = weights(self.learn)


def test_ema_of_batch_norm_and_integers():
    learn = make(EMACallback(.9))
    learn.fit(1)
    bn = learn.model[1]
    assert bn.num_batches_tracked.dtype == torch.int64 and bn.running_var.isfinite().all() and not torch.equal(bn.running_mean, torch.zeros(4))


def test_ema_with_inner_validations():
    class Validates(Callback):
        seen = None

        def after_epoch(self):
            if self.seen is None:
                self.seen = ()
                self.learn.validate()
                self.seen = weights(self.learn)
    last, inner = Last(), Validates()
    learn = make([EMACallback(.9), last, inner, FetchPredsCallback()])
    learn.remove_cb(FetchPredsCallback)
    learn.fit(2)
    assert not learn.ema._on and not torch.equal(weights(learn), last.raw) and 'remove_cbs' not in vars(learn)
    assert not torch.equal(inner.seen, weights(learn)), 'training went on after the inner validation'


def test_ema_with_fetched_predictions():
    learn = make([EMACallback(.9), FetchPredsCallback()])
    learn.fit(1)
    assert not learn.ema._swapped and not learn.ema._on


def test_ema_of_a_cancelled_validation():
    def cancel(): raise CancelValidException
    last = Last()
    learn = make([EMACallback(.9, keep=False), last])
    learn.add_cb(on(before_batch=lambda: None if learn.training else cancel()))
    learn.fit(1)
    assert torch.equal(weights(learn), last.raw) and not learn.ema._swapped


def test_ema_starts_anew_with_each_fit_and_leaves_validation_alone():
    learn = make(EMACallback(.9))
    learn.validate()
    assert learn.ema.average is None
    learn.fit(1)
    first = learn.ema.average
    learn.validate()
    assert learn.ema.average is first and not learn.ema._on
    learn.fit(1)
    assert learn.ema.average is not first


def test_ema_every_few_steps_under_mixed_precision():
    learn = make([EMACallback(.9, every=3), MixedPrecision('bf16', True)])
    learn.fit(1)
    assert learn.ema.average.n_averaged == 8//3


def test_first_batches_with_more_than_there_are():
    learn = make(FirstBatches(100))
    learn.fit(1)
    assert len(learn.recorder.losses) == 8

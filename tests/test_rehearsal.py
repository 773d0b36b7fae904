"""Rehearsals with what users' Learners are made of: text models of fastai, callbacks of their own"""
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.text.data import TextDataLoaders
from fastai.text.learner import text_classifier_learner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config
from torch import nn

import fastbench.draw.diagnose, fastbench.train.convert, fastbench.train.batch_size  # add methods
from fastbench.errors import UserError
from fastbench.text.rnn import Penalties
from fastbench.train.rehearsal import again, model_kept, rehearse, takes_part


@pytest.fixture(scope='module')
def texts():
    df = pd.DataFrame(dict(text=['the cat sat on the mat', 'a bird sang in the tree'] * 32, label=['cat', 'bird'] * 32))
    return TextDataLoaders.from_df(df, text_col='text', label_col='label', bs=4, seq_len=8, num_workers=0)


def classifier(texts, **kwargs):
    config = awd_lstm_clas_config | dict(emb_sz=8, n_hid=8, n_layers=1)
    return text_classifier_learner(texts, AWD_LSTM, pretrained=False, config=config, seq_len=8, metrics=accuracy, **kwargs)


def test_text_models_of_fastai_are_diagnosed(texts):
    found = classifier(texts, alpha=2., beta=1.).diagnose_input(.4)
    assert 'of a step' in found.verdict and {r['part'] for r in found.stalls.rows} >= {'compute', 'items'}


def test_text_models_of_fastai_find_a_batch_size(texts): assert classifier(texts).find_batch_size(max=8) == 8


class Pair(nn.Module):
    "Returns more than a prediction, which a callback takes apart"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 1)
    def forward(self, x): return self.lin(x), x.mean()


class Apart(Callback):
    def after_pred(self): self.learn.pred = self.pred[0]


class Teacher(Callback):
    "Adds a loss to the loss"
    def __init__(self, teacher): self.teacher, self.seen = teacher, []
    def after_loss(self):
        with torch.no_grad(): want = self.teacher(self.xb[0])
        self.seen.append(self.epoch)
        self.learn.loss_grad += (self.pred - want).pow(2).mean()


def make(*cbs, model=None):
    data = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(3)]
    return Learner(DataLoaders(data, data), model or nn.Linear(2, 1), loss_func=nn.MSELoss(), cbs=cbs)


def test_callbacks_of_a_user_that_change_a_step_take_part():
    teacher = nn.Linear(2, 1)
    learn = make(Apart(), Teacher(teacher), model=Pair())
    with model_kept(learn.model): new = rehearse(learn, learn.dls)
    assert new.teacher.seen == [0]*6 and not learn.teacher.seen
    assert new.teacher.teacher is teacher


def test_callbacks_that_watch_are_left_out():
    class Watches(Callback):
        def before_fit(self): raise AssertionError('called')
        def after_batch(self): raise AssertionError('called')

    class Says(Apart): rehearsed = False
    assert not any(map(takes_part, (Watches(), Says(), SaveModelCallback())))
    assert all(map(takes_part, (Apart(), Penalties())))
    rehearse(make(Watches()), make().dls)


def test_a_callback_that_cannot_be_copied_is_left_out_and_named(tmp_path):
    class Logs(Callback):
        def after_loss(self): self.file.write('1')
    cb = Logs()
    cb.file = open(tmp_path/'log', 'w')
    with pytest.warns(UserWarning, match='Logs takes no part .* cannot be copied'): rehearse(make(cb), make().dls)
    cb.file.close()
    assert not (tmp_path/'log').read_text()


def test_who_only_inherits_from_a_tracker_is_left_out():
    class Mine(SaveModelCallback): pass
    class Scheduled(ParamScheduler): pass
    assert not takes_part(Mine('valid_loss')) and not takes_part(Scheduled({}))


TAKEN = []


class TwoSteps(Learner):
    "A Learner whose steps are its own"
    def __init__(self, dls, model, weight, **kwargs):
        super().__init__(dls, model, **kwargs)
        self.weight, self.count = weight, [0]

    def _do_one_batch(self):
        TAKEN.append(self.xb[0].shape[0])
        self.count[0] += 1
        self.pred = self.model(self.xb[0])
        self.loss_grad = self.loss_func(self.pred, *self.yb)*self.weight
        self.loss = self.loss_grad.clone()
        if self.training: self.loss_grad.backward(); self.opt.step(); self.opt.zero_grad()


@pytest.mark.parametrize('bench', [False, True])
def test_steps_of_a_learner_of_ones_own(bench):
    x = torch.randn(32, 2)
    dls = DataLoaders.from_dsets(list(zip(x, x[:, :1])), list(zip(x, x[:, :1])), bs=4)
    learn = TwoSteps(dls, nn.Linear(2, 1), 2., loss_func=nn.MSELoss())
    if bench: learn.bench()
    before = [p.clone() for p in learn.model.parameters()]
    TAKEN.clear()
    learn.find_batch_size(max=8)
    assert 8 in TAKEN and learn.count == [0] and type(learn).__mro__.count(TwoSteps) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, learn.model.parameters())) and learn.opt is None


def test_steps_of_a_gan_are_refused():
    class GANTrainer(Callback): ...
    x = torch.randn(8, 2)
    dls = DataLoaders.from_dsets(list(zip(x, x[:, :1])), list(zip(x, x[:, :1])), bs=4)
    learn = Learner(dls, nn.Linear(2, 1), loss_func=nn.MSELoss(), cbs=GANTrainer())
    with pytest.raises(UserError, match='steps of a GAN cannot be tried out') as e: learn.find_batch_size(max=8)
    assert '\n' not in str(e.value)


def time_first(b): return torch.stack([o[0] for o in b], 1), torch.stack([o[1] for o in b])
def in_lists(b): return tuple(o[0] for o in b), tuple(o[1] for o in b)


@pytest.mark.parametrize('collate', [time_first, in_lists])
def test_batches_that_cannot_be_made_larger(collate):
    "A batch of another size is made along the first dimension: that has to be the samples"
    x = [(torch.randn(7, 2), torch.randn(1)) for _ in range(12)]
    learn = Learner(DataLoaders(*(DataLoader(x, bs=4, create_batch=collate) for _ in range(2))), nn.Linear(2, 1), loss_func=nn.MSELoss())
    with pytest.raises(UserError, match='the first tensor of a batch of 4 samples has 7 rows') as e: learn.find_batch_size(max=8)
    assert '\n' not in str(e.value)

"A training that is killed and started again ends as one that was not, bit for bit."
import errno
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import traceback
import warnings
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.callback.progress import CSVLogger
from fastai.callback.rnn import ModelResetter
from fastai.callback.schedule import Learner  # adds fit_one_cycle
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets, TfmdDL
from fastai.data.transforms import Categorize, ColReader, RandomSplitter
from fastai.learner import Recorder
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam, OptimWrapper, ranger
from fastai.text.data import LMDataLoader
from fastai.torch_core import TensorImage, set_seed
from fastai.vision.all import params
from torch import nn

import fastbench.train.schedule  # adds fit_linear
from fastbench.bench.launch import Interrupted, launch
from fastbench.distributed.accumulate import WeighBatches
from fastbench.callback.ema import EMACallback
from fastbench.callback.half import HalfPrecision
from fastbench.callback.limit import FirstBatches
from fastbench.callback.target import TimeToAccuracy
from fastbench.compare.runs import compare
from fastbench.draw.batch import batch_augment
from fastbench.errors import UserError
from fastbench.recipe import get_recipe
from fastbench.runs.record import from_json
from fastbench.runs.store import load
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.rnn import rnn_learner
from fastbench.text.words import lm_dls
from fastbench.train.checkpoint import HEADER, STATE, checkpoints, claim, read_header, read_state
from fastbench.train.learner import BenchLearner
from fastbench.train.muon import muon
from fastbench.train.optimizer import foreach_adamw, fused_adam, fused_sgd
from fastbench.train.resume import CheckpointEvery
from gpu import needs_gpu
from reader import Reader
from test_text_data import WORDS, make_tokenizer

TOKENIZER = make_tokenizer()  # once: what it learns is another each time
pytestmark = [pytest.mark.usefixtures('one_thread'), pytest.mark.skipif(not hasattr(os, 'fork'), reason='processes are forked here')]
LIMIT = 300  # seconds; only against hanging


# A training in a process of its own

def in_child(f, *args):
    "What `f` gives, from a forked process; or the number of the signal or the exit code that ended it"
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        code = 70
        try:
            os.close(r)
            signal.alarm(LIMIT)
            with os.fdopen(w, 'w') as out: json.dump(f(*args), out)
            code = 0
        except SystemExit as e: code = e.code
        except BaseException: traceback.print_exc()
        finally: os._exit(code)
    os.close(w)
    with os.fdopen(r) as f: said = f.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status): return -os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    return json.loads(said) if code == 0 else code


def noisy(i, X):
    "An item with draws of all three generators"
    return X[i] + torch.randn(6)*.1 + random.random()*.01 + float(np.random.rand())*.01


def dls(workers=0, n=80):
    g = torch.Generator().manual_seed(3)
    X, Y = torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)
    ds = Datasets(list(range(n)), [[partial(noisy, X=X)], [lambda i: Y[i]]])
    return DataLoaders(TfmdDL(ds, bs=8, shuffle=True, num_workers=workers), TfmdDL(ds, bs=16, num_workers=workers))


def split(m): return [params(m[:3]), params(m[3:])]


def make(path, cls=Learner, workers=0, cbs=(), recorder=None, **kwargs):
    set_seed(7)
    m = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(.5), nn.Linear(32, 3))
    kwargs = dict(loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=Adam) | kwargs
    learn = cls(dls(workers), m, path=path, cbs=cbs, **kwargs)
    if recorder:
        learn.remove_cb(Recorder)
        learn.add_cb(recorder)
    return learn


def one_cycle(learn, cbs): learn.fit_one_cycle(3, 1e-2, cbs=cbs)


def text_learner(path, loader='sorted'):
    set_seed(7)
    rows = [(f'{a} {b}' + f' {b}'*(i % 7), 'ab'[i % 2]) for i, (a, b) in enumerate(zip(WORDS, WORDS[1:]))][:45]
    d = hf_dls(rows[:35], TOKENIZER, valid=rows[35:], loader=loader, bs=4, max_tokens=48, max_length=16, seed=1, workers=0, device='cpu')
    learn = hf_learner(d, 'bert-tiny', pretrained=False, config=dict(num_hidden_layers=1))
    learn.path = path
    return learn


def lm_learner(path):
    set_seed(7)
    words = ' '.join(f'w{i*i % 23}' for i in range(900))
    learn = rnn_learner(lm_dls(([words, words[100:], words[:900]], [words[:1500]]), bs=4, bptt=20, shuffle=True, device='cpu'),
                        'awd', model_args=dict(n_emb=8, n_hid=8, n_layers=2))
    learn.path = path
    return learn


def fastai_lm_learner(path):
    "With fastai's loader, which shuffles texts in place"
    set_seed(7)
    texts = [torch.arange(i*i, i*i + 40 + i) % 23 for i in range(12)]
    d = DataLoaders(*[LMDataLoader(texts, bs=4, seq_len=20, shuffle=o, do_setup=False) for o in (True, False)], device='cpu')
    return Learner(d, Reader(8), path=path, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=ModelResetter())


def pictures(path, seed=None):
    "Augmented a batch at a time; with a seed of its own, a transform counts its images"
    set_seed(7)
    ds = Datasets(list(range(80)), [[lambda i: TensorImage(torch.full((3, 8, 8), i/80.) + torch.arange(8)/50)], [lambda i: i % 3]])
    d = DataLoaders(TfmdDL(ds, bs=8, shuffle=True, num_workers=0, after_batch=batch_augment(6, max_rotate=9., max_lighting=.2, seed=seed)), TfmdDL(ds, bs=16, num_workers=0, after_batch=batch_augment(6, min_scale=1.)))
    return Learner(d, nn.Sequential(nn.Flatten(), nn.Linear(108, 3)), path=path, loss_func=CrossEntropyLossFlat(), metrics=accuracy)


class Branch(nn.Module):
    "A layer that has no gradient in most steps, and a count in a plain attribute"
    def __init__(self):
        super().__init__()
        self.n, self.a, self.b = 0, nn.Linear(6, 3), nn.Linear(6, 3)
    def forward(self, x):
        self.n += self.training
        return self.a(x) + (self.b(x) if self.n % 5 == 1 else 0)


def branched(path):
    learn = make(path, opt_func=partial(SGD, mom=.9))
    learn.model = Branch()
    return learn


class Mean:
    "A loss with a state: a running mean, a count, and a layer that counts"
    y_int, reduction = True, 'mean'
    def __init__(self): self.avg, self.n, self.scale = torch.zeros(()), 0, Branch()

    def __call__(self, pred, y):
        loss = nn.functional.cross_entropy(pred*(1 + .01*self.scale.n) + self.scale.a(torch.ones(6)).detach(), y, reduction=self.reduction)*(1 - .1*self.avg)
        if torch.is_grad_enabled():
            self.n += 1
            self.scale.n += self.n % 2
            self.avg = .9*self.avg + .1*loss.detach().mean()
        return loss


class MeanModule(Mean, nn.Module):
    def __init__(self):
        nn.Module.__init__(self)
        Mean.__init__(self)


class Draws(Callback):
    "A callback as a user writes it: it counts, and it draws"
    def __init__(self, share=.5): self.share, self.seen = share, []
    def before_epoch(self): self.seen.append(random.random())
    def before_batch(self):
        if self.training: self.seen.append(torch.rand(()).item())
    def after_batch(self): self.learn.opt.set_hypers(wd=.01*(len(self.seen) % 7))


CASES = dict(
    plain=(make, one_cycle),
    workers=(partial(make, workers=2), one_cycle),
    lean=(partial(make, cls=BenchLearner), one_cycle),
    lean_workers=(partial(make, cls=BenchLearner, workers=2), one_cycle),
    wrapper=(partial(make, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), one_cycle),
    sgd=(partial(make, opt_func=partial(SGD, mom=.9)), lambda learn, cbs: learn.fit(3, .1, cbs=cbs)),
    ranger=(partial(make, opt_func=ranger), lambda learn, cbs: learn.fit_flat_cos(3, 1e-2, cbs=cbs)),
    fused_adam=(partial(make, cls=BenchLearner, opt_func=fused_adam), lambda learn, cbs: learn.fit_linear(3, 1e-2, cbs=cbs)),
    fused_sgd=(partial(make, cls=BenchLearner, opt_func=partial(fused_sgd, mom=.9)), one_cycle),
    foreach=(partial(make, opt_func=foreach_adamw, splitter=split), lambda learn, cbs: learn.fit_one_cycle(3, slice(1e-3, 1e-2), cbs=cbs)),
    muon=(partial(make, cls=BenchLearner, opt_func=muon), one_cycle),
    ema=(lambda path: make(path, cls=BenchLearner, cbs=[EMACallback(.8, every=3), TimeToAccuracy(.99, tell=lambda o: None)]), one_cycle),
    trackers=(lambda path: make(path, cbs=[SaveModelCallback(), EarlyStoppingCallback(patience=2), ReduceLROnPlateau(patience=1)]),
              lambda learn, cbs: learn.fit(5, .3, cbs=cbs)),
    scaler=(lambda path: make(path, cls=BenchLearner, cbs=HalfPrecision('bf16', loss_scale='dynamic', allow_emulation=True, growth_interval=4, init_scale=2.**126)),
            one_cycle),
    accumulated=(lambda path: make(path, cbs=GradientAccumulation(24)), one_cycle),
    weighed=(lambda path: make(path, loss_func=CrossEntropyLossFlat(ignore_index=2), cbs=[GradientAccumulation(24), WeighBatches()]), one_cycle),
    train_metrics=(lambda path: make(path, recorder=Recorder(train_metrics=True)), one_cycle),
    branch=(branched, one_cycle),
    mixup=(lambda path: make(path, cbs=MixUp(.4)), one_cycle),
    own=(lambda path: make(path, cbs=Draws()), lambda learn, cbs: learn.fit(3, 1e-2, cbs=cbs)),
    limited=(lambda path: make(path, cls=BenchLearner, cbs=FirstBatches(8)), one_cycle),
    pictures=(pictures, one_cycle), seeded_pictures=(partial(pictures, seed=5), one_cycle),
    texts=(text_learner, one_cycle),
    budget=(partial(text_learner, loader='budget'), one_cycle),
    words=(lm_learner, one_cycle), fastai_words=(fastai_lm_learner, one_cycle),
    loss=(lambda path: make(path, loss_func=Mean()), one_cycle), loss_module=(lambda path: make(path, loss_func=MeanModule()), one_cycle),
    mixed_loss=(lambda path: make(path, loss_func=MeanModule(), cbs=MixUp(.4)), one_cycle),
    fine_tune=(partial(make, splitter=split), lambda learn, cbs: learn.fine_tune(2, 1e-2, cbs=cbs)),
)


# whose second fit has no checkpoint before it is killed
EARLY = dict(left_over=(lambda path: make(path, opt_func=SGD, cbs=[HalfPrecision('bf16', loss_scale='dynamic', allow_emulation=True), GradientAccumulation(24)]), lambda learn, cbs: (learn.fit(1, .05, cbs=cbs), learn.fit(2, .05, cbs=cbs))))


def quiet(o): pass


def train(case, path, *cbs):
    "What a training came to: all that a user sees of it, to the last bit"
    new, fit = (CASES | EARLY)[case]
    learn = new(path)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn, list(cbs))
    rec = learn.recorder
    tensors = [*learn.model.parameters(), *learn.model.buffers()]
    res = dict(losses=[o.item().hex() for o in rec.losses], lrs=[float(o).hex() for o in rec.lrs], iters=list(rec.iters),
               values=[[float(v).hex() for v in o if v is not None] for o in rec.values],
               weights=hashlib.sha1(b''.join(o.detach().contiguous().numpy().tobytes() for o in tensors)).hexdigest(),
               next=[random.random(), np.random.rand(), torch.rand(()).item()], train_iter=learn.train_iter)
    for cb in learn.cbs:
        if isinstance(cb, HalfPrecision): res['scales'] = cb.scales, cb.skipped
        if isinstance(cb, Draws): res['seen'] = cb.seen
        if isinstance(cb, TimeToAccuracy): res['best'] = cb.best, [o[2] for o in cb.history]
    return res


class Kill(Callback):
    "kill -9 at an event: its `n`th"
    order = 500
    def __init__(self, event, n): self._event, self._left = event, n
    def __call__(self, event_name):
        self._left -= event_name == self._event and not self.learn.lock.locked()
        if not self._left: os.kill(os.getpid(), signal.SIGKILL)


every = partial(CheckpointEvery, steps=4, tell=quiet)
ENDS = dict(mid=('after_backward', 15), first=('after_backward', 2), epoch=('after_epoch', 2), validation=('after_validate', 2), fit=('after_fit', 1))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "Each case without checkpoints, once"
    known = {}
    def get(case):
        if case not in known: known[case] = in_child(train, case, tmp_path_factory.mktemp(case))
        return known[case]
    return get


def killed_and_resumed(case, path, *ends):
    for end in ends: assert in_child(train, case, path, every(resume=True), Kill(*ENDS.get(end, end))) == -signal.SIGKILL
    return in_child(train, case, path, every(resume=True))


@pytest.mark.parametrize('case', CASES)
def test_killed_in_an_epoch(case, whole, tmp_path):
    assert isinstance(whole(case), dict) and len(whole(case)['losses']) > 12
    assert killed_and_resumed(case, tmp_path, 'mid') == whole(case)
    headers = [read_header(o) for o in checkpoints(tmp_path/'models'/'checkpoints')]
    assert headers[-1]['resumed'] and headers[-1]['done'] and headers[-1]['seconds'] > 0


@pytest.mark.parametrize('case, end', [(o, e) for o in ('plain', 'ema') for e in ENDS if e != 'mid'] + [('trackers', 'epoch'), ('lean_workers', 'validation')])
def test_killed_elsewhere(case, end, whole, tmp_path):
    assert killed_and_resumed(case, tmp_path, end) == whole(case)


class Thaws(Callback):
    "Trains the first layers from the second epoch on, as gradual unfreezing does"
    def before_epoch(self):
        if self.epoch == 1: self.learn.unfreeze()


def thawed(learn, cbs):
    learn.freeze()
    learn.fit(3, 1e-2, cbs=[Thaws(), *cbs])


def pairs(learn, cbs):
    "PyTorch's loaders, whose workers live on between epochs"
    g = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(80, 6, generator=g), torch.randint(0, 3, (80,), generator=g))
    more = dict(batch_size=8, num_workers=1, persistent_workers=True)
    learn.dls = DataLoaders(torch.utils.data.DataLoader(data, shuffle=True, **more), torch.utils.data.DataLoader(data, **more))
    one_cycle(learn, cbs)


CASES |= dict(thawed=(partial(make, splitter=split), thawed), torch_workers=(make, pairs),
              torch_twice=(make, lambda learn, cbs: (pairs(learn, cbs), learn.fit(2, 1e-2, cbs=cbs))))


@pytest.mark.parametrize('case, end', [('thawed', ('after_backward', 28)), ('left_over', ENDS['mid']), *[('torch_workers', ENDS[o]) for o in ('validation', 'epoch')], ('torch_twice', ('after_backward', 36))])
def test_what_an_earlier_epoch_has_changed_or_started_is_there_again(case, end, whole, tmp_path):
    assert killed_and_resumed(case, tmp_path, end) == whole(case)


def said_on_the_way(case, path, end):
    assert in_child(train, case, path, every(), Kill(*end)) == -signal.SIGKILL
    def heard():
        said = []
        train(case, path, CheckpointEvery(steps=4, resume=True, tell=said.append))
        return said
    return in_child(heard)


def test_workers_that_lived_on_are_told_of(tmp_path):
    said = said_on_the_way('torch_workers', tmp_path, ENDS['mid'])
    assert len(said) == 2 and 'going on from' in said[0] and 'persistent_workers' in said[1]


def logged(append, path, *cbs):
    learn = make(path)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(4, 1e-2, cbs=[CSVLogger(append=append), *cbs])
    return [o.rpartition(',')[0] for o in (path/'history.csv').read_text().splitlines()]


@pytest.mark.parametrize('append', [False, True])
@pytest.mark.parametrize('end', [('after_backward', 25), ('after_validate', 2), ('after_epoch', 2), ('after_fit', 1)])
def test_the_history_of_a_resumed_fit_has_all_epochs_once(append, end, tmp_path):
    (tmp_path/'whole').mkdir()
    old = 'epoch,train_loss,valid_loss,accuracy,time\n0,1,1,1,00:00\n' # of an earlier training
    for o in (tmp_path, tmp_path/'whole'): (o/'history.csv').write_text(old)
    want = in_child(logged, append, tmp_path/'whole')
    assert len(want) == 5 + 2*append
    assert in_child(logged, append, tmp_path, every(), Kill(*end)) == -signal.SIGKILL
    assert in_child(logged, append, tmp_path, every(resume=True)) == want


class Halves(Callback):
    "Smaller batches from the second epoch on, which no later epoch says again"
    def before_epoch(self):
        if self.epoch == 1: self.learn.dls.train.bs = 4


CASES['halves'] = make, lambda learn, cbs: learn.fit(3, 1e-2, cbs=[Halves(), *cbs])


def test_an_epoch_with_other_batches_is_refused_in_one_line(tmp_path):
    assert in_child(train, 'halves', tmp_path, every(), Kill('after_backward', 36)) == -signal.SIGKILL
    def why():
        try: train('halves', tmp_path, every(resume=True))
        except UserError as e: return str(e)
    said = in_child(why)
    assert '10 batches' in said and '20' in said and '\n' not in said


@pytest.mark.parametrize('seed, refused', [(1, False), (2, True)])
def test_another_split_is_refused_in_one_line(seed, refused, tmp_path):
    def fitted(seed, *cbs):
        items, learn = list(range(80)), make(tmp_path)
        X = torch.randn(80, 6, generator=torch.Generator().manual_seed(3))
        learn.dls = Datasets(items, [[lambda i: X[i]], [lambda i: i % 3]], splits=RandomSplitter(seed=seed)(items)).dataloaders(bs=8, num_workers=0, device='cpu')
        with learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=cbs)
    assert in_child(fitted, 1, every(), Kill('after_backward', 11)) == -signal.SIGKILL
    def why():
        try: fitted(seed, every(resume=True))
        except UserError as e: return str(e)
    said = in_child(why)
    if refused: assert 'was trained on other items' in said and 'RandomSplitter(seed=42)' in said and '\n' not in said
    else: assert said is None


def text_of(labels):
    return hf_dls(pd.DataFrame(dict(text=[f'{WORDS[i % 9]} {i}' for i in range(80)], label=labels)), TOKENIZER, bs=8, max_length=16, seed=1, workers=0, device='cpu')


def table_of(labels, get_y=ColReader('label')):
    df = pd.DataFrame(dict(x=[i/80 for i in range(80)], label=labels))
    return Datasets(df, [[ColReader('x'), lambda x: torch.full((6,), x)], [get_y, Categorize]], splits=RandomSplitter(seed=1)(df)).dataloaders(bs=8, num_workers=0, device='cpu')


LABELS = ['abc'[i % 3] for i in range(80)]
RENAMED, SHUFFLED = [dict(a='z', b='y', c='x')[o] for o in LABELS], LABELS[40:] + LABELS[:40]
OTHER_NAMES = r'other labels or words, or with them in another order: \["a", "b", "c"\] there, and \["x", "y", "z"\] here'


def labelled(dls, folder, *cbs):
    learn = make(folder)
    learn.dls = dls
    if isinstance(dls.one_batch()[0], dict): learn.model = OfWords()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=cbs)


class OfWords(nn.Module):
    def __init__(self): super().__init__(); self.emb, self.lin = nn.Embedding(len(TOKENIZER), 8), nn.Linear(8, 3)
    def forward(self, x): return self.lin(self.emb(x['input_ids']).mean(1))


@pytest.mark.parametrize('of', [text_of, table_of, partial(table_of, get_y=lambda o: o.label)], ids=['texts', 'table', 'function'])
@pytest.mark.parametrize('labels, said', [(LABELS, None), (RENAMED, OTHER_NAMES), (SHUFFLED, 'other labels of the same items')], ids=['same', 'renamed', 'shuffled'])
def test_other_labels_are_refused_in_one_line(of, labels, said, tmp_path):
    "Unless a function makes them, which nobody calls for it, or the checkpoint is of a version that did not say them"
    assert in_child(labelled, of(LABELS), tmp_path, every(), Kill('after_backward', 9)) == -signal.SIGKILL
    def why():
        try: labelled(of(labels), tmp_path, every(resume=True))
        except UserError as e: return str(e)
    if said and not (said.endswith('items') and isinstance(of, partial)):
        got = in_child(why)
        assert re.search(said, got) and '\n' not in got
        for at in checkpoints(tmp_path/'models'/'checkpoints'):
            head = json.loads((at/HEADER).read_text())
            del head['made_of']['labels'], head['made_of']['names']
            (at/HEADER).write_text(json.dumps(head))
    assert in_child(why) is None


@pytest.mark.parametrize('case', ['accumulated', 'weighed'])
def test_killed_while_gradients_are_collected(case, whole, tmp_path):
    assert killed_and_resumed(case, tmp_path, ('after_backward', 11)) == whole(case)  # two of three batches, at step 8


def test_killed_again_and_again(whole, tmp_path):
    assert killed_and_resumed('ema', tmp_path, ('after_backward', 6), ('before_backward', 9), 'validation', ('after_batch', 4)) == whole('ema')


@pytest.mark.parametrize('end', [('after_backward', 7), ('after_fit', 1), ('after_backward', 14), ('after_fit', 2)])
def test_fine_tune_knows_its_fit(end, whole, tmp_path):
    assert killed_and_resumed('fine_tune', tmp_path, end) == whole('fine_tune')


# What is not a kill

def signalled(path, signum, where):
    "Losses and code of a process that gets a signal in the middle of a step, twice"
    learn, lines = make(path), []
    def handler(*args): lines.append('old handler')
    signal.signal(signum, handler)
    class Send(Callback):
        def __call__(self, event_name):
            if event_name == where and self.learn.train_iter == 13:
                for _ in range(2): os.kill(os.getpid(), signum)
    try:
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(3, 1e-2, cbs=[CheckpointEvery(minutes=60, tell=lines.append), Send()])
    except SystemExit as e: code = e.code
    os.kill(os.getpid(), signum)  # the handler is the old one again
    return dict(lines=[o.replace(str(path), '') for o in lines], code=code, left=[repr(o) for o in learn.cbs], at=learn.train_iter,
                extra=sorted({'_with_events', 'one_batch', 'remove_cbs'} & set(vars(learn))))


@pytest.mark.parametrize('name, where, at', [('SIGTERM', 'after_backward', 14), ('SIGUSR1', 'before_batch', 14)])
def test_a_signal_ends_the_fit_at_the_steps_end(name, where, at, whole, tmp_path):
    got = in_child(signalled, tmp_path, getattr(signal, name), where)
    assert got['code'] == 128 + getattr(signal, name) and got['at'] == at and got['lines'][-1] == 'old handler' and len(got['lines']) == 2
    assert got['lines'][0] == f'{name}: the fit ended after step {at}; the same script goes on with resume=True'
    assert 'CheckpointEvery' not in got['left'] and '_StepEnd' not in got['left'] and not got['extra']
    header, = map(read_header, checkpoints(tmp_path/'models'/'checkpoints'))
    assert (header['train_iter'], header['epoch'], header['steps'], header['stage'], header['done']) == (at, 1, 4, 'train', False)
    assert in_child(train, 'plain', tmp_path, every(resume=True)) == whole('plain')


def stopped_at(path, event, n):
    "Asked to stop at an event of the first epoch"
    asked, left = [], [n]
    class Ask(Callback):
        order = 40
        def __call__(self, event_name):
            left[0] -= event_name == event and not self.learn.training
            if not left[0]: asked.append(1)
    cb = CheckpointEvery(minutes=60, tell=quiet, stop=lambda: bool(asked))
    got = train('ema', path, Ask(), cb)
    return dict(stopped=cb.stopped, steps=got['train_iter'])


@pytest.mark.parametrize('event, n, place', [('after_batch', 3, ('valid', 0, 0)), ('after_validate', 1, ('train', 1, 0))])
def test_a_stop_in_a_validation_and_after_it(event, n, place, whole, tmp_path):
    assert in_child(stopped_at, tmp_path, event, n) == dict(stopped=True, steps=10)
    header, = map(read_header, checkpoints(tmp_path/'models'/'checkpoints'))
    assert (header['stage'], header['epoch'], header['steps']) == place and header['train_iter'] == 10
    assert in_child(train, 'ema', tmp_path, every(resume=True)) == whole('ema')


def said(path, make_learn=make, n=1, **kwargs):
    "The one line that a fit is refused with; what it told, if it was not"
    learn, lines = make_learn(path), []
    try:
        with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-2, cbs=CheckpointEvery(tell=lines.append, **kwargs))
    except UserError as e: return str(e).replace(str(path), 'HERE')
    return [o.replace(str(path), 'HERE') for o in lines]


@pytest.fixture(scope='module')
def kept(tmp_path_factory):
    "A folder with two checkpoints of a fit of one epoch that is not over"
    path = tmp_path_factory.mktemp('kept')
    def go(path):
        with pytest.raises(RuntimeError): fit_that_fails(path)
        return 1
    assert in_child(go, path) == 1
    return path


def fit_that_fails(path, *cbs):
    class Fails(Callback):
        def after_step(self):
            if self.train_iter == 9: raise RuntimeError('no power')
    learn = make(path)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2, cbs=[every(), Fails(), *cbs])


def edit_header(**changes):
    def f(at): (at/HEADER).write_text(json.dumps(json.loads((at/HEADER).read_text()) | changes))
    return f


class Planted:
    "Runs code where it is unpickled in the old way"
    def __reduce__(self): return os.mkdir, ('planted',)


def plant(at):
    from zlib import crc32
    torch.save(dict(fit=Planted()), at/STATE)
    data = (at/STATE).read_bytes()
    edit_header(state=dict(bytes=len(data), crc32=crc32(data)))(at)


BAD = dict(
    cut=(lambda at: (at/STATE).write_bytes((at/STATE).read_bytes()[:2000]), r'HERE\S+checkpoint-000002 is damaged \(state.pt has 2000 bytes, not \d+\): remove it'),
    flipped=(lambda at: (at/STATE).write_bytes((at/STATE).read_bytes()[:-5000] + b'?' + (at/STATE).read_bytes()[-4999:]), r'is damaged \(the checksum of state.pt is another\)'),
    gone=(lambda at: (at/STATE).unlink(), r'is damaged \(it has no state.pt\)'),
    headless=(lambda at: (at/HEADER).unlink(), r'is damaged \(it has no header.json\)'),
    json=(lambda at: (at/HEADER).write_text('{"format": 1, '), 'is damaged .its header.json is not JSON'),
    newer=(edit_header(format=2), 'has format 2, this fastbench reads 1'),
    code=(plant, 'is damaged .UnpicklingError'),
)


@pytest.mark.parametrize('bad', BAD)
def test_a_bad_checkpoint_is_named_in_one_line(bad, kept, tmp_path, monkeypatch):
    shutil.copytree(kept, tmp_path/'x')
    monkeypatch.chdir(tmp_path)
    BAD[bad][0](checkpoints(tmp_path/'x'/'models'/'checkpoints')[-1])
    got = in_child(said, tmp_path/'x', make, 1)  # without resume: refused before anything is read
    assert got.startswith('HERE') and 'resume=True goes on' in got
    got = in_child(partial(said, resume=True), tmp_path/'x')
    assert isinstance(got, str) and re.search(BAD[bad][1], got) and '\n' not in got and not (tmp_path/'planted').exists()


def wider(path):
    learn = make(path)
    learn.model[0], learn.model[1] = nn.Linear(6, 33), nn.BatchNorm1d(33)
    learn.model[4] = nn.Linear(33, 3)
    return learn


@pytest.mark.parametrize('change, why', [
    (dict(make_learn=wider), r'0.weight is 32x6 there and 33x6 here'), (dict(n=2), 'epochs is 1 there and 2 here'),
    (dict(make_learn=partial(make, opt_func=SGD)), r'optimizer is Optimizer\(weight_decay, average_grad.* there and Optimizer\(weight_decay, sgd_step\) here'), (dict(make_learn=partial(make, wd=.3)), r'wd is \[0.01\] there and \[0.3\] here')])
def test_the_checkpoint_of_another_training_is_refused(change, why, kept):
    got = in_child(partial(said, resume=True, **change), kept)
    assert re.search(why, got) and got.count('\n') == 0 and 'is of another training' in got


def test_a_stop_after_the_last_epoch_is_gone_on_from(tmp_path):
    def go(stop):
        learn, told = make(tmp_path), []
        cb = CheckpointEvery(steps=100, resume=True, tell=told.append, stop=lambda: stop and len(learn.recorder.values) >= 2)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2, cbs=cb)
        return [cb.stopped, told]
    assert in_child(go, True) == [True, []]
    stopped, told = in_child(go, False)
    assert not stopped and len(told) == 1 and 'going on from' in told[0] and read_header(checkpoints(tmp_path/'models'/'checkpoints')[-1])['done']
    assert 'fit 1 was finished' in in_child(go, False)[1][0]


def test_a_fit_after_one_that_was_stopped_says_that_it_does_not_begin(tmp_path):
    def go():
        told, learn = [], make(tmp_path)
        learn.add_cb(CheckpointEvery(steps=100, tell=told.append, stop=lambda: True))
        with learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-2)
            learn.fit(1, 1e-2)
        return told
    told = in_child(go)
    assert len(told) == 1 and told[0].startswith('this fit does not begin, as the one before it was stopped')


class Watches(Callback):
    def after_step(self): pass


def test_a_callback_without_a_state_may_be_left_out(tmp_path):
    assert in_child(said, tmp_path, lambda path: make(path, cbs=Watches()), 1) == []
    assert 'fit 1 was finished' in in_child(partial(said, resume=True), tmp_path)[0]


def test_texts_in_another_kind_of_batches_are_another_training(tmp_path):
    assert in_child(said, tmp_path, text_learner, 1) == []
    got = in_child(partial(said, resume=True), tmp_path, partial(text_learner, loader='budget'))
    assert 'is of another training: loader is sorted there and budget here' in got and '\n' not in got


@pytest.mark.parametrize('steps', [1, 2, 4, 100])
def test_what_could_not_be_written_is_said_once(tmp_path, monkeypatch, steps):
    "Also of the last step, after which the end of the fit tries once more"
    from fastai.test_utils import synth_learner
    lines, learn = [], synth_learner(n_trn=4, n_val=1, path=tmp_path)
    def full(*args, **kwargs): raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr('fastbench.train.resume.save_together', full)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=(every := CheckpointEvery(steps=steps, tell=lines.append)))
    assert len(lines) == len(set(lines)) == len(every.failed) == max(1, 4//steps)
    assert all('and there is no checkpoint before it' in o for o in lines)


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    from fastai.test_utils import synth_learner
    lines, learn = [], synth_learner(n_trn=4, n_val=1, path=tmp_path)
    def full(where, *args, **kwargs):
        if any(where.glob('checkpoint-*')): raise OSError(errno.ENOSPC, 'No space left on device')
        (where/'checkpoint-000001').mkdir(parents=True)
    monkeypatch.setattr('fastbench.train.resume.save_together', full)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=CheckpointEvery(steps=1, tell=lines.append))
    assert lines and all(o.endswith('the checkpoint before it is whole') for o in lines)


def test_ctrl_c_while_a_checkpoint_is_written_is_no_error_of_torch(tmp_path, monkeypatch):
    "Its writer failed to end the file, and said `unexpected pos 64 vs 0`; the checkpoint before is still whole"
    from fastai.test_utils import synth_learner
    from fastbench.train.checkpoint import _Counted
    learn, write, seen = synth_learner(n_trn=4, n_val=1, path=tmp_path), _Counted.write, []
    def interrupted(self, b):
        seen.append(len(b))
        if any((tmp_path/'kept').glob('checkpoint-*')) and self.bytes: raise KeyboardInterrupt
        return write(self, b)
    monkeypatch.setattr(_Counted, 'write', interrupted)
    with learn.no_bar(), learn.no_logging(), pytest.raises(KeyboardInterrupt) as e:
        learn.fit(1, cbs=CheckpointEvery(steps=1, folder=tmp_path/'kept'))
    assert len(seen) > 4 and e.value.__suppress_context__
    assert [o.name for o in checkpoints(tmp_path/'kept')] == ['checkpoint-000001'] and read_state(checkpoints(tmp_path/'kept')[0])


def test_a_full_disk_is_told_and_the_training_goes_on(whole, tmp_path):
    import resource
    def go(path):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        lines = []
        class Full(Callback):
            "Files of more than 3 kB cannot be written from the second epoch on"
            def before_epoch(self):
                if self.epoch == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        def tell(o): lines.append(o.replace(str(path), 'HERE'))
        cb = CheckpointEvery(steps=4, tell=tell)
        res = train('plain', path, cb, Full())
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return dict(res=res, lines=lines, failed=len(cb.failed))
    got = in_child(go, tmp_path)
    assert got['res'] == whole('plain') and got['failed'] == len(got['lines']) > 2
    assert all(o.startswith('no checkpoint after step') and 'File too large' in o and '\n' not in o for o in got['lines'])
    folder = tmp_path/'models'/'checkpoints'
    assert [read_header(o)['train_iter'] for o in checkpoints(folder)] == [4, 8] and {o.name[0] for o in folder.iterdir()} == {'c', '.'} and len(list(folder.iterdir())) == 3  # and the lock
    for o in checkpoints(folder): read_state(o)
    assert in_child(train, 'plain', tmp_path, every(resume=True)) == whole('plain')


def test_lr_find_and_validation_are_no_trainings(tmp_path):
    def go(path):
        learn = make(path, cbs=CheckpointEvery(steps=2, tell=quiet))
        with learn.no_bar(), learn.no_logging():
            learn.lr_find(show_plot=False)
            learn.validate()
            learn.get_preds()
            none = not (path/'models'/'checkpoints').exists()
            learn.fit(1)
        return none and len(checkpoints(path/'models'/'checkpoints'))
    assert in_child(go, tmp_path) == 2


def test_bad_values_are_refused():
    for bad in (dict(minutes=0), dict(steps=-1), dict(steps=1.5), dict(keep=0), dict(minutes='10')):
        with pytest.raises(UserError, match=f'{next(iter(bad))}=.* cannot be: a number above 0'): CheckpointEvery(**bad)


def test_a_folder_that_cannot_hold_checkpoints_is_refused_before_the_training(tmp_path):
    (tmp_path/'file').write_text('')
    with pytest.raises(UserError, match=r'file/c cannot hold checkpoints: Not a directory\. Give another folder'): claim(tmp_path/'file'/'c')


def test_a_file_that_is_named_as_a_checkpoint_is_none(tmp_path):
    (tmp_path/'checkpoint-000099').write_text('')
    assert checkpoints(tmp_path) == []


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    def go(path):
        class Another(Callback):
            def before_train(self): got.append(in_child(said, path, make, 1))
        got = []
        with pytest.raises(RuntimeError): fit_that_fails(path, Another())
        return got
    got, = in_child(go, tmp_path)
    assert got == 'HERE/models/checkpoints is in use: another process writes its checkpoints there. Wait for it or end it, or give another folder'


# At any moment

def killed_while_writing(path, n):
    "kill -9 in place of the `n`th call that writes a checkpoint for good, renames or removes one"
    left = [n]
    def counted(f):
        def g(*args, **kwargs):
            left[0] -= 1
            if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
            return f(*args, **kwargs)
        return g
    for module, name in ((os, 'fsync'), (os, 'rename'), (shutil, 'rmtree')): setattr(module, name, counted(getattr(module, name)))
    train('plain', path, every(steps=2, keep=1, resume=True))


def test_killed_while_a_checkpoint_is_written(whole, tmp_path):
    for n in range(6, 13):  # each part of the second checkpoint, the removal of the first included
        path = tmp_path/str(n)
        assert in_child(killed_while_writing, path, n) == -signal.SIGKILL
        found = checkpoints(path/'models'/'checkpoints')
        assert 1 <= len(found) <= 2 and read_header(found[-1])['train_iter'] in (2, 4)
        for o in found: read_state(o)
    assert in_child(train, 'plain', path, every(resume=True)) == whole('plain') and len(checkpoints(path/'models'/'checkpoints')) == 2
    assert not [o for o in (path/'models'/'checkpoints').iterdir() if o.name.startswith(('.new', '.old'))]


def test_killed_at_random_moments(root):
    spec = importlib.util.spec_from_file_location('kills', root/'benchmarks'/'kills.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = module.kill_many(6, seed=1, tell=quiet)
    assert sum(o[0] for o in rows) == 6 and all(equal for _, _, equal in rows) and max(lost for _, lost, _ in rows) <= module.INTERVAL


# A recipe, and its Run

@pytest.fixture(scope='module')
def store(tmp_path_factory): return tmp_path_factory.mktemp('runs')


RECIPE = get_recipe('digits-xresnet18', epochs=3, workers=0, bs=16, size=8, sample=.1, ema=.9, target=.99)


@pytest.fixture(scope='module')
def whole_run(store):
    "The Run of a training that nobody interrupted"
    with pytest.MonkeyPatch.context() as m:
        m.setenv('OMP_NUM_THREADS', '1')
        return load(launch(RECIPE, store/'whole', device='cpu'))


def at_step(epoch, step, f):
    "A `tell` that calls `f` with the number of the process, once, when it is at a step"
    told, done = {}, []
    def tell(o):
        told.update(o)
        if o['phase'] == 'train' and (o['epoch'], o['step']) >= (epoch, step) and not done: done.append(f(told['pid']))
    return tell


def test_a_run_goes_on_after_kill_9_and_after_ctrl_c(store, whole_run, monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    assert whole_run.status == 'ok' and whole_run.seconds and not whole_run.resumed and len(whole_run.epochs) == 3
    options, out = dict(device='cpu', checkpoint_every='3steps'), store/'cut'
    first = load(launch(RECIPE, out, at_step(0, 5, lambda pid: os.kill(pid, signal.SIGKILL)), **options))
    assert first.status == 'failed' and 'SIGKILL' in first.error
    with pytest.raises(UserError, match='which was interrupted: --resume goes on'): launch(RECIPE, out, **options)
    with pytest.raises(Interrupted) as e: launch(RECIPE, out, at_step(1, 3, lambda pid: os.kill(os.getpid(), signal.SIGTERM)), resume=True, **options)
    part = load(e.value.path)
    assert part.status == 'interrupted' and len(part.resumed['steps']) == 1 and part.seconds is None
    run = load(launch(RECIPE, out, resume=True, **options))
    assert run.status == 'ok' and (run.epochs, run.metrics) == (whole_run.epochs, whole_run.metrics)
    assert run.resumed['steps'] == sorted(run.resumed['steps']) and len(run.resumed['steps']) == 2
    assert run.seconds is None and run.resumed['seconds'] > 0 and run.goal['best'] == whole_run.goal['best'] and run.goal['seconds'] is None
    assert 'in 3 parts' in run.headline and any(o.startswith('the training was interrupted and went on at step') for o in run.warnings)
    assert not (out/'checkpoints').exists()  # its Run is kept
    with pytest.raises(UserError, match='resumed: no timing'): compare([whole_run], [run])
    again = from_json(run.to_json())
    assert again.resumed == run.resumed and 'resumed' not in json.loads(whole_run.to_json())


# On a GPU

class Losses(Callback):
    "Of each step; they are kept in the checkpoint, as the state of any callback"
    def before_fit(self): self.got = []
    def after_batch(self):
        if self.training: self.got.append(float(self.loss))


class Cut(Callback):
    def after_step(self):
        if self.train_iter == 15: raise KeyboardInterrupt


@needs_gpu
@pytest.mark.parametrize('precision', ['fp32', 'mixed', 'half'])
def test_on_cuda_a_resumed_training_has_the_same_losses(tmp_path, monkeypatch, precision):
    from fastbench.bench.learner import bench_learner
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', True)
    def fit(*cbs):
        seen, learn = Losses(), bench_learner('digits-xresnet18', device='cuda', offline=True, workers=0, precision=precision, batches=10, epochs=3)
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(3, 1e-3, cbs=[seen, *cbs])
        return seen.got
    whole, folder = fit(), tmp_path/'checkpoints'
    with pytest.raises(KeyboardInterrupt): fit(CheckpointEvery(steps=4, folder=folder), Cut())
    assert fit(CheckpointEvery(steps=4, folder=folder, resume=True)) == whole and len(whole) == 30


def test_a_second_learner_is_told_that_it_takes_the_first_ones_weights(tmp_path):
    said, learns = [], [make(tmp_path) for _ in range(2)]
    for learn in [learns[0], *learns]:
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=CheckpointEvery(steps=2, resume=True, folder='shared', tell=said.append))
    assert len(said) == 1 and 'was finished, by another Learner of this process (one that is to be trained itself needs a folder of its own), and is not trained again' in said[0]


def test_with_fastais_own_processes_the_way_to_checkpoints_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr('fastbench.train.resume.world_size', lambda: 2)
    learn = make(tmp_path)
    learn.distributed_trainer = object()  # as in its distrib_ctx
    with pytest.raises(UserError, match="2 processes were started, but fastai's distrib_ctx writes none: `with learn.distributed"): learn.fit(1, cbs=CheckpointEvery())

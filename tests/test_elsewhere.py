"macOS and Windows by stand-ins (see elsewhere.py): never run on either"
import multiprocessing

import torch
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import nn

from elsewhere import spawn_alone

MPS = torch.device('mps')


def double(x): return 2*x


def learner(kind=Learner, workers=0, n=32, bs=4):
    items = [(torch.randn(3), torch.tensor(0)) for _ in range(n)]
    dl = TfmdDL(items, bs=bs, num_workers=workers, after_batch=[double])
    return kind(DataLoaders(dl, TfmdDL(items[:4], bs=4), device=torch.device('cpu')), nn.Linear(3, 2), loss_func=nn.CrossEntropyLoss(), opt_func=SGD)


def fit(learn, n=1):
    with learn.no_bar(), learn.no_logging(): learn.fit(n)
    return learn


# Loader processes that are not forked

def test_profile_with_processes_that_are_begun_anew(monkeypatch):
    with spawn_alone(monkeypatch): learn = fit(learner(workers=1).profile(loader=True))
    got = {(r['phase'], r['action']): r for r in learn.profiler.table.rows}
    assert got['train', 'step']['calls'] == 8 and not multiprocessing.active_children()
    stations = learn.profiler.profile.facts['loader']['train']
    assert stations['batches'] == 8 and {r['station']: r['calls'] for r in stations['rows']}['collate'] >= 8


# macOS

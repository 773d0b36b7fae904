"What happens to one of two processes, by name: for test_processes.py"
import os
import signal
import time

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import accuracy
from torch import nn


class Trouble(Callback):
    def __init__(self, what): self.what = what

    def before_batch(self):
        if os.environ.get('RANK') != '1' or not self.training or self.learn.train_iter != 5: return
        if self.what == 'once' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('not yet')
        if self.what == 'killed once' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), signal.SIGKILL)
        if self.what == 'error': raise ValueError('a sample of this process is bad')
        if self.what == 'exit': raise SystemExit(0)
        if self.what == 'memory': raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
        if self.what == 'kill': print('this process is about to be killed', flush=True)
        if self.what == 'kill': os.kill(os.getpid(), signal.SIGKILL)
        if self.what == 'hang': stand_still()
        if self.what == 'nan': self.learn.xb = (self.x*float('nan'),)

    def after_batch(self):
        if self.what == 'slow': time.sleep(.2)


class Late(list):
    "Items that the second process reads slowly: 0.2 s a batch, far more than a busy machine delays the other"
    def __getitem__(self, i):
        if os.environ.get('RANK') == '1': time.sleep(.05)
        return super().__getitem__(i)


def stand_still():
    while True: time.sleep(1)


def make(what: str = '', epochs: int = 1, lr: float = .1, workers: int = 0):
    torch.manual_seed(0)
    items = [(torch.randn(8), i % 2) for i in range(64 if what == 'fewer' and os.environ.get('RANK') == '1' else 128)]
    dls = DataLoaders(DataLoader(Late(items) if what == 'late' else items, bs=4, num_workers=workers), DataLoader(items[:16], bs=4))
    return Learner(dls, nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss(), metrics=accuracy, cbs=Trouble(what), lr=lr)

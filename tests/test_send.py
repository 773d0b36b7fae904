"A Learner that is already there trains in two processes (gloo, CPU), and its next fit goes on as after one process"
import threading

import pytest
import torch

pytest.importorskip('accelerate')
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import SGD, Adam
from torch import nn

from fastbench.all import BenchLearner, UserError
from fastbench.bench.send import pack_learner, unpack_learner


class Elsewhere(Callback): "Of a file that the processes do not find"


def learner(bs, opt=Adam, **kwargs):
    torch.manual_seed(0)
    items = [(torch.randn(4), torch.tensor(i % 3)) for i in range(16)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return BenchLearner(DataLoaders(*(DataLoader(items, bs=bs) for _ in range(2)), device='cpu'), model, loss_func=nn.CrossEntropyLoss(), opt_func=opt, **kwargs)


def quiet(learn, f):
    with learn.no_bar(), learn.no_logging(): f(learn)


def apart(a, b): return max((x - y).abs().max().item() for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))


@pytest.mark.parametrize('strategy,opt', [('ddp', SGD), ('fsdp', Adam)])
def test_it_comes_back_as_from_one_process(tmp_path, strategy, opt):
    "Two processes of 8 samples are one of 16; before and after them each trains in this process"
    def train(learn): learn.fit(3, .05)
    one, two = learner(16, opt), learner(8, opt)
    two.dls, small = one.dls, two.dls
    for o in (one, two): quiet(o, train)
    two.dls, model, told = small, two.model, []
    quiet(one, train)
    run = two.launch(2, fit=train, strategy=strategy, folder=tmp_path, tell=told.append, threads=1)
    assert apart(one, two) < 1e-6 and two.model is model and (run.status, run.world_size, run.strategy) == ('ok', 2, strategy)
    assert [float(o) for o in two.recorder.losses] == pytest.approx([float(o) for o in one.recorder.losses], rel=1e-5) and 'epoch' in {o['phase'] for o in told}
    two.dls = one.dls
    for o in (one, two): quiet(o, train)
    assert apart(one, two) < 1e-6 and not hasattr(two, 'distributed_trainer')


class Locked(Callback):
    def __init__(self): self.of = threading.Lock()


def spoilt(what):
    learn = learner(8)
    if what == 'callback locked': learn.add_cb(Locked())
    if what == 'the model': learn.model.of = threading.Lock()
    if what == 'its data (dls)': learn.dls.train.of = threading.Lock()
    if what == 'learn.loss_func': learn.loss_func = type('Loss', (nn.CrossEntropyLoss,), {})(); learn.loss_func.of = threading.Lock()
    return learn


@pytest.mark.parametrize('what', ['callback locked', 'the model', 'its data (dls)', 'learn.loss_func'])
def test_what_cannot_be_sent_is_named(what):
    learn = spoilt(what)
    learn.create_opt()
    opt, cbs = learn.opt, list(learn.cbs)
    with pytest.raises(UserError, match='launch_processes') as e: learn.launch(2)
    assert str(e.value).startswith(f"{what} cannot be sent to other processes (TypeError: cannot pickle '_thread.lock' object)") and '\n' not in str(e.value)
    assert learn.opt is opt and list(learn.cbs) == cbs


def test_a_profiler_stays_here():
    learn = learner(8).profile()
    quiet(learn, lambda o: o.fit(1))
    copy = unpack_learner(pack_learner(learn))
    assert hasattr(learn, 'profiler') and not hasattr(copy, 'profiler') and learn.opt is not None


def test_slips_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match='epochs and lr are for one cycle'): learner(8).launch(2, 3, fit=lambda learn: learn.fit(1))
    with pytest.raises(UserError, match="did you mean 'fsdp'"): learner(8).launch(2, strategy='fsdb', folder=tmp_path)
    for k, v in dict(nproc='2', epochs=0).items():
        with pytest.raises(UserError, match=f'{k}={v!r} cannot be'): learner(8).launch(**{k: v})
    data = pack_learner(learner(8, cbs=Elsewhere()))
    monkeypatch.setattr(Elsewhere, '__module__', 'test_send')
    monkeypatch.delattr('test_send.Elsewhere')
    with pytest.raises(UserError, match='do not find what the Learner is made of .*Elsewhere'): unpack_learner(data)

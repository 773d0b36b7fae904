"The second of two GPUs, several processes with a GPU each, and settings of PyTorch by its newer names: on pretended GPUs"
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.data.transforms import Normalize
from fastai.learner import AvgMetric
from torch import nn

import fastbench.distributed.learner
import fastbench.machine.group as group
from fastbench.bench.learner import bench_learner, seeded
from fastbench.callback.backends import Backends
from fastbench.compare.paired import step_seconds
from fastbench.distributed.ddp import DDP
from fastbench.distributed.strategy import Strategy
from fastbench.distributed.weigh import WeighShares
from fastbench.draw.fastest import choose_decoder
from fastbench.errors import UserError
from fastbench.machine.flops import _tf32
from fastbench.own.call import GlobalState
from fastbench.train.learner import BenchLearner
from fastbench.train.optimizer import foreach_sgd, fused_adamw, fused_sgd
from fastbench.train.state import metric_state, rng_state, set_metric_state, set_rng_state
from fastbench.vision.kinds import Timm
from fastbench.vision.small import GhostBatchNorm

pytestmark = pytest.mark.usefixtures('one_thread')

SECOND = torch.device('cuda:1')


def digits(device): return bench_learner('digits-xresnet18', device=device, offline=True, workers=0, sample=.2)


# A process for each GPU

@pytest.fixture
def second_of_two(monkeypatch):
    for k, v in dict(WORLD_SIZE=2, RANK=1, LOCAL_RANK=1, MASTER_ADDR='127.0.0.1', MASTER_PORT=29555).items(): monkeypatch.setenv(k, str(v))


class Looks(Strategy):
    name = 'looks'
    def begin(self, learn): self.saw = [learn.dls.device, next(learn.model.parameters()).device, torch.cuda.current_device()]


def users_learner():
    "As in a script that torchrun starts: loaders are made before anything is said of processes"
    items = [(torch.rand(3, 4, 4), torch.tensor(i % 2)) for i in range(16)]
    dls = DataLoaders(*(DataLoader(items, bs=4) for _ in range(2)))
    dls.to(torch.device('cuda', torch.cuda.current_device()))
    return BenchLearner(dls, nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), loss_func=nn.CrossEntropyLoss(weight=torch.ones(2)))


def test_each_process_trains_on_its_own_gpu(gpu, second_of_two):
    learn, looks = users_learner(), Looks()
    learn.to_distributed(strategy=looks, tell=lambda _: None).detach_distributed()
    assert looks.saw == [SECOND, SECOND, 1]


def test_a_gpu_that_the_user_chose_is_kept(gpu, second_of_two, monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '0')
    torch.cuda.set_device(1)
    learn, looks = users_learner(), Looks()
    learn.to_distributed(strategy=looks, tell=lambda _: None).detach_distributed()
    assert looks.saw == [SECOND, SECOND, 1]


def test_transforms_of_a_batch_go_there_too(gpu, second_of_two):
    learn = digits('cuda:0')
    learn.dls.add_tfms([norm := Normalize.from_stats([.5], [.2], cuda=True)], 'after_batch')
    learn.to_distributed(strategy=Looks(), tell=lambda _: None).detach_distributed()
    assert norm.mean.device == SECOND


def test_one_process_stays_where_it_is(gpu):
    torch.cuda.set_device(1)
    learn, looks = digits('cuda:0'), Looks()
    learn.to_distributed(strategy=looks).detach_distributed()
    assert looks.saw[0] == torch.device('cuda:0') and torch.cuda.current_device() == 1


@pytest.mark.parametrize('visible', [1, 2])
def test_a_process_that_sees_its_own_gpu_alone(monkeypatch, second_of_two, visible):
    "As with `srun --gpus-per-task=1`"
    from pretend import pretend
    monkeypatch.setattr(dist, 'init_process_group', lambda *_, **kw: None)
    with pretend(devices=visible):
        group.join('cuda')
        assert torch.cuda.current_device() == visible - 1


@pytest.mark.parametrize('asked, waits', [(None, 1800), (60, 60)])
def test_the_group_for_the_host_waits_as_long_as_the_other(monkeypatch, second_of_two, gpu, asked, waits):
    "NCCL's own default is 10 minutes"
    told = {}
    monkeypatch.setattr(dist, 'init_process_group', lambda *_, timeout=None, **kw: told.update(world=timeout))
    monkeypatch.setattr(dist, 'new_group', lambda *_, timeout=None, **kw: told.update(beside=timeout))
    monkeypatch.setattr(dist, 'get_backend', lambda *_: 'nccl')
    group.join('cuda', asked)
    group._beside['of'] = 'another'
    group.host_group()
    assert {k: v.total_seconds() for k, v in told.items()} == dict(world=waits, beside=waits)
    group.leave()
    assert not group._beside


class _Accelerator:
    def __init__(self, fails=False): self.fails = fails
    def prepare(self, model):
        if self.fails: raise RuntimeError('no')
        return model


@pytest.mark.parametrize('fails', [False, True])
def test_batch_norm_over_all_processes_is_for_plain_batch_norm(gpu, fails):
    "A ghost batch norm is one because its batches are small"
    model = nn.Sequential(nn.BatchNorm2d(3), GhostBatchNorm(3, 2), nn.Sequential(nn.BatchNorm1d(4))).to('cuda')
    own, ddp = [type(o) for o in model.modules()], DDP()
    ddp.accelerator = _Accelerator(fails)
    if fails:
        with pytest.raises(RuntimeError): ddp.wrap(model)
    else:
        wrapped = [type(o) for o in ddp.wrap(model).modules()]
        assert wrapped.count(nn.SyncBatchNorm) == 2 and wrapped.count(GhostBatchNorm) == 1
        ddp.unwrap(model)
    assert [type(o) for o in model.modules()] == own


@pytest.mark.parametrize('opt, ok', [(fused_sgd, False), (foreach_sgd, True), (fused_adamw, True)])
def test_fused_sgd_does_not_step_parts_of_weights(opt, ok):
    from fastbench.distributed.fsdp import FSDP
    learn = bench_learner('digits-xresnet18', device='cpu', offline=True, workers=0, sample=.2)
    learn.opt_func = opt
    if ok: FSDP()._refuse(learn, torch.device('cpu'))
    else:
        with pytest.raises(UserError, match="fused SGD.*strategy 'fsdp'.*foreach_sgd"): FSDP()._refuse(learn, torch.device('cpu'))


# Times on the second GPU

@pytest.mark.parametrize('device', ['cuda:0', 'cuda:1'])
def test_steps_are_timed_on_the_gpu_that_trains(gpu, device):
    at = []
    gpu.on_record.append(lambda event, stream: at.append(str(stream.device)))
    assert step_seconds(digits(device)) >= 0
    assert set(at) == {device}


def test_the_largest_batch_waits_for_the_gpu_that_trains(gpu):
    learn = digits('cuda:1')
    gpu.forget()
    learn.find_batch_size(start=8, max=16)
    assert {str(o.device) for o in gpu.waits if 'wait_for' in o.place} == {'cuda:1'}


# A checkpoint

def test_random_numbers_of_more_gpus_than_there_are_now(monkeypatch):
    from pretend import pretend
    with pretend(devices=2):
        torch.zeros(1, device='cuda')
        state = rng_state()
        old = dict(state, cuda=torch.cuda.get_rng_state_all())  # as checkpoints of older versions have it
    with pretend(devices=1):
        torch.zeros(1, device='cuda')
        for o in (state, old): set_rng_state(o)


def test_random_numbers_follow_the_gpu_that_trains(monkeypatch):
    "It was the second one, and is the first now"
    from pretend import pretend
    put = {}
    with pretend(devices=2):
        torch.zeros(1, device='cuda')
        state = rng_state(SECOND)
        assert state['own'] == 1
        state['cuda'] = ['of the first', 'of the second']
        monkeypatch.setattr(torch.cuda, 'set_rng_state', lambda s, device='cuda': put.update({device: s}))
        set_rng_state(state, torch.device('cuda:0'))
        assert put == {0: 'of the second', 1: 'of the second'}
        set_rng_state(state, SECOND)
        assert put == {0: 'of the first', 1: 'of the second'}


def test_sums_of_a_metric_go_on_where_they_were(gpu):
    m = AvgMetric(lambda p, y: (p == y).float().mean())
    m.total, m.count = torch.tensor(2., device='cuda:1'), 3
    state = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in metric_state(m).items()}
    new = AvgMetric(m.func)
    set_metric_state(new, state, SECOND)
    assert new.total.device == SECOND and new.count == 3


def test_training_metrics_go_on_in_mid_epoch(gpu, tmp_path):
    from fastbench.train.resume import CheckpointEvery
    def go(stop=None, resume=False):
        learn, steps = digits('cuda:1'), []
        learn.recorder.train_metrics = True
        def over():
            steps.append(1)
            return stop is not None and len(steps) >= stop
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=CheckpointEvery(steps=1000, folder=tmp_path/'c', stop=over, resume=resume, signals=()))
        return learn.recorder.values
    go(stop=2)
    assert len(go(resume=True)) == 1


# What an exchange costs

def test_each_pass_is_in_the_precision_of_the_training(monkeypatch):
    "And the pass of the training itself, which comes after it"
    import fastbench.distributed.exchange as exchange
    for k, v in dict(world_size=lambda: 2, barrier=lambda: None, max_over_ranks=lambda o: o, sum_over_ranks=lambda o: o).items(): monkeypatch.setattr(exchange, k, v)
    learn, seen = bench_learner(Timm('x', '', data='digits', arch='test_resnet', pretrained=False), device='cpu', offline=True, workers=0, sample=.1, epochs=1).to_bf16(allow_emulation=True), []
    learn.model.no_sync = nullcontext
    learn.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled('cpu')) if learn.training else None)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[cost := exchange.ExchangeCost(2)])
    assert len(cost.pairs) == 2 and len(seen) > 7 and all(seen)


# Settings

@pytest.fixture
def newer_names():
    "PyTorch refuses the old names once a new one was used"
    b, was = torch.backends, None
    if not hasattr(b.cuda.matmul, 'fp32_precision'): pytest.skip('this PyTorch has no newer names')
    places = b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn
    was = [o.fp32_precision for o in places]
    b.cuda.matmul.fp32_precision, b.cudnn.conv.fp32_precision = 'tf32', 'ieee'
    yield lambda: [o.fp32_precision for o in places]
    for o, v in zip(places, was): o.fp32_precision = v
    torch.set_float32_matmul_precision('highest')


@pytest.mark.parametrize('tf32', [None, True, False])
def test_settings_by_newer_names_are_kept(newer_names, tf32):
    before, seen = newer_names(), []
    class Looks(Callback):
        def before_batch(self): seen.append(newer_names())
    learn = digits('cpu')
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[Backends(benchmark=True, tf32=tf32), Looks()])
    assert seen[0] == (before if tf32 is None else ['tf32' if tf32 else 'ieee']*3) and newer_names() == before


def test_a_function_that_uses_newer_names(newer_names):
    state, before = GlobalState(), newer_names()
    assert not state.changed() and _tf32(torch.device('cuda'), 'fp32')
    torch.backends.cuda.matmul.fp32_precision = 'ieee'
    assert list(state.changed()) == ['fp32_precision']
    state.restore()
    assert newer_names() == before and not state.changed()


def test_a_learner_on_a_cpu_starts_no_gpu():
    from pretend import pretend
    with pretend(devices=2):
        with seeded(3, torch.device('cpu')): torch.rand(1)
        assert not torch.cuda.is_initialized()


# Without waiting

class _Counts:
    "A loss of several processes, of which this one has `n` of the targets"
    def __init__(self, n): self.n_targets, self.yb, self.cbs, self.pred = lambda yb: n, (torch.zeros(4),), [], torch.ones(2, device='cuda', requires_grad=True)
    loss_func = staticmethod(lambda: 0)


@pytest.mark.parametrize('n', [torch.tensor(3), 4], ids=['on the GPU', 'on the host'])
def test_weighing_shares_waits_for_no_gpu(gpu, monkeypatch, second_of_two, n):
    import fastbench.distributed.weigh as weigh
    monkeypatch.setattr(weigh, 'start_sum', lambda t: lambda: t*2)
    monkeypatch.setattr(weigh, 'sum_over_ranks', lambda t: t)
    learn, cb = _Counts(n.cuda() if isinstance(n, torch.Tensor) else n), WeighShares()
    cb.learn, learn.loss_grad, learn.loss = learn, learn.pred.sum(), torch.ones((), device='cuda')
    gpu.forget()
    cb.before_batch()
    cb.after_loss()
    learn.loss_grad.backward()
    cb.after_backward()
    assert {o.kind for o in gpu.waits} <= {'event.synchronize'} and learn.loss.device.type == 'cuda' and learn.pred.grad.tolist() == [1, 1]


def test_no_targets_weigh_nothing(gpu, monkeypatch, second_of_two):
    import fastbench.distributed.weigh as weigh
    monkeypatch.setattr(weigh, 'start_sum', lambda t: lambda: t + torch.tensor([5., 4.]).to(t))
    monkeypatch.setattr(weigh, 'sum_over_ranks', lambda t: t)
    learn, cb = _Counts(torch.tensor(0).cuda()), WeighShares()
    cb.learn, learn.loss_grad, learn.loss = learn, learn.pred.sum()/torch.zeros((), device='cuda'), torch.full((), float('nan'), device='cuda')
    cb.before_batch()
    cb.after_loss()
    learn.loss_grad.backward()
    cb.after_backward()
    assert learn.pred.grad.tolist() == [0, 0] and learn.loss == 0


# A decoder of the GPU

def test_worker_processes_cannot_decode_on_the_gpu(gpu, monkeypatch):
    "A forked process cannot use CUDA, and images are not decoded by another decoder in silence"
    import fastbench.draw.fastest as fastest
    monkeypatch.setattr(fastest, '_rates', lambda *_: dict(nvjpeg=9000, pillow=500))
    assert choose_decoder().decoder.name == 'nvjpeg' and choose_decoder(shared=False).decoder.name == 'pillow'
    assert choose_decoder('nvjpeg').decoder.name == 'nvjpeg'
    with pytest.raises(UserError, match="'nvjpeg' decodes on the GPU, which a worker process cannot use: leave processes out"): choose_decoder('nvjpeg', shared=False)

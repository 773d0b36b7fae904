"EMA and FirstBatches where a reader of the lessons does not look: inner validations, cancelled ones, batch norm, several fits."
import copy

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback, CancelBatchException, CancelEpochException, CancelFitException, CancelValidException, FetchPredsCallback
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import Learner  # noqa: F401
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.learner import load_learner
from fastai.optimizer import SGD
from fastai.torch_core import TensorImage
from fastai.vision.core import TensorBBox, TensorPoint
from fastcore.basics import noop
from torch import nn

from fastbench.callback.amp import MixedPrecision
from fastbench.callback.backends import Backends
from fastbench.callback.channelslast import ChannelsLast
from fastbench.callback.checkpointing import GradientCheckpointing
from fastbench.callback.compiling import Compile
from fastbench.callback.ema import EMACallback
from fastbench.callback.limit import FirstBatches
from fastbench.callback.progressive import ProgressiveResize
from fastbench.callback.target import TimeToAccuracy
from fastbench.callback.tta import FlipTTA
from fastbench.errors import UserError
from fastbench.measure.profiler import Profiler
from fastbench.train.learner import BenchLearner
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


@pytest.mark.parametrize('ends', ['early', 'late'])
def test_a_search_for_a_learning_rate_leaves_the_weights(ends, tmp_path):
    learn = make(EMACallback(.5))
    learn.path = tmp_path
    learn.fit(1)
    before = [o.clone() for o in learn.model.state_dict().values()]
    learn.lr_find(num_it=4 if ends == 'early' else 30, show_plot=False)
    assert all(map(torch.equal, before, learn.model.state_dict().values())) and not learn.ema._on


@pytest.mark.parametrize('keep', [True, False])
@pytest.mark.parametrize('kwargs, ended', [(dict(), False), (dict(), True), (dict(every_epoch=True), False), (dict(at_end=True), False)])
def test_what_is_saved_is_what_was_validated(keep, kwargs, ended, tmp_path):
    "Also where the best epoch is not the last, and where another callback ends the fit"
    learn, valid = make(EMACallback(.5, keep=keep)), []
    learn.path, after = tmp_path, Last()
    learn.add_cb(after).add_cb(on(before_batch=lambda: None if learn.training else valid.append(weights(learn)) if learn.iter == 0 else None))
    save = SaveModelCallback(monitor='train_loss', comp=lambda now, best: learn.epoch == 1, **kwargs)  # the second is the best
    learn.fit(6, cbs=[save, *([EarlyStoppingCallback(monitor='train_loss', comp=np.greater, patience=2)] if ended else [])])
    assert learn.epoch == (2 if ended else 5) or not ended
    final = valid[-1] if keep else after.raw
    if kwargs.get('every_epoch'):
        for i, w in enumerate(valid): assert torch.equal(torch.load(tmp_path/f'models/model_{i}.pth')['0.weight'], w)
    else:
        saved = torch.load(tmp_path/'models/model.pth')['0.weight']
        assert torch.equal(saved, final if kwargs else valid[1])
        if not kwargs: final = valid[1]
    assert torch.equal(weights(learn), final) and not learn.ema._on and not learn.ema._swapped


def test_after_a_validation_inside_that_failed_the_raw_weights_are_trained():
    "And one at the end of an epoch leaves the average to the callbacks that come after it"
    def fails(*_): raise ValueError
    last, before, seen = Last(), [], []
    def inside():
        if not learn.training or learn.iter != 2: return
        own, learn.loss_func = learn.loss_func, fails
        with pytest.raises(ValueError): learn.validate()
        learn.loss_func = own
        learn.training = True
        learn.model.train()
        before.append(weights(learn))
    def at_end():
        if learn.lock.locked(): return
        learn.validate()
        seen.append((weights(learn), learn.ema._swapped))
    learn = make([EMACallback(.5, keep=False), last])
    learn.add_cbs([on(after_batch=inside), on(after_epoch=at_end)])
    raw = []
    then = on(after_batch=lambda: raw.append(weights(learn)) if learn.training else None)
    then.order = 79
    learn.add_cb(then)
    learn.fit(1)
    assert torch.equal(before[0], raw[2]) and seen[0][1] and not torch.equal(seen[0][0], last.raw) and torch.equal(weights(learn), last.raw)


class Counts(nn.Module):
    "Weights, and every kind of buffer"
    def __init__(self):
        super().__init__()
        self.lin, self.bn = nn.Linear(1, 4), nn.BatchNorm1d(4)
        for k, v in dict(n=torch.arange(6).view(2, 3), flag=torch.tensor([True, False]), small=torch.ones(3).half(), z=torch.ones(2, dtype=torch.complex64)).items(): self.register_buffer(k, v)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        if self.training:
            self.n += 7
            self.flag.logical_not_()
            self.small *= 1.25
            self.z *= 1j
        return self.out(self.bn(self.lin(x)))


def counts(*cbs, device='cpu', every=1):
    torch.manual_seed(0)
    data = [(torch.randn(8, 1).to(device), torch.randn(8, 1).to(device)) for _ in range(12)]
    learn = BenchLearner(DataLoaders(data, data[:1]), Counts().to(device), loss_func=nn.MSELoss(), lr=.1, cbs=[EMACallback(.9, every), *cbs])
    learn.logger = lambda *_: None
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    return learn


@pytest.mark.parametrize('every', [1, 5])
def test_averages_are_torchs_own_bit_for_bit(every):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    torchs = []
    def start(): torchs.append(AveragedModel(learn.model, multi_avg_fn=get_ema_multi_avg_fn(.9**every), use_buffers=True)) if not torchs else None
    def step():
        if learn.training and (learn.iter+1 + 12*learn.epoch) % every == 0: torchs[0].update_parameters(learn.model)
    by_torch = on(before_train=start, after_batch=step)
    by_torch.order = 80
    learn = counts(by_torch, every=every)
    learn.fit(2)
    ours, theirs = learn.ema.average, torchs[0]
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values())) and ours.n_averaged == 24//every
    assert {str(v.dtype) for v in ours.module.state_dict().values()} == {'torch.float32', 'torch.float16', 'torch.int64', 'torch.bool', 'torch.complex64'}


@pytest.mark.parametrize('cls', [Learner, BenchLearner])
@pytest.mark.parametrize('every', [1, 2])
def test_an_average_counts_steps_and_not_the_batches_of_one_step(cls, every):
    "A step of four batches is one; a batch that another callback leaves out is none"
    def averaged(bs, *cbs):
        torch.manual_seed(0)
        learn = cls(DataLoaders(*(DataLoader(items(64), bs=bs) for _ in range(2))), nn.Linear(8, 3), loss_func=nn.CrossEntropyLoss(), opt_func=SGD, cbs=[EMACallback(.9, every), *cbs])
        with learn.no_bar(), learn.no_logging(): learn.fit(2, .1)
        return learn.ema.average.n_averaged, learn.model.weight.detach()
    def leave():
        if learn_in.learn.training and learn_in.learn.iter % 2: raise CancelBatchException
    want = averaged(16)
    n, got = averaged(4, GradientAccumulation(16))
    assert n == want[0] == 8//every and torch.allclose(got, want[1], atol=1e-6)
    learn_in = on(before_batch=leave)
    assert averaged(16, learn_in)[0] == 4//every


def test_an_average_waits_for_nothing(gpu):
    learn, seen = counts(device='cuda:1'), []
    ops = lambda: seen.append((len(gpu.waits), gpu.launches)) if learn.training else None
    first, last = on(after_batch=ops), on(after_batch=ops)
    first.order, last.order = 84, 86
    learn.add_cbs([first, last]).fit(1)
    for (waits, launches), (then, after) in list(zip(seen[::2], seen[1::2]))[1:]:
        assert waits == then and after - launches < 30, 'four kinds of tensors'


class Keeps(nn.Sequential):
    "As fastai's AWD_LSTM, it keeps results of its last training batch, which cannot be copied"
    kept = None

    def forward(self, x):
        out = super().forward(x)
        if self.training: self.kept = [out]
        return out


def test_ema_of_a_model_that_cannot_be_copied():
    "A second fit averages as with a model that can"
    ends = []
    for keeps in (False, True):
        last, at_valid = Last(), []
        learn = make([EMACallback(.5), last])
        if keeps: learn.model = Keeps(*learn.model)
        learn.add_cb(on(before_batch=lambda: None if learn.training else at_valid.append(weights(learn))))
        for i in range(2):
            torch.manual_seed(i)
            learn.fit(1)
        ends.append((weights(learn), last.raw, at_valid[-1]))
        assert not learn.ema._on and not learn.ema._swapped and torch.equal(ends[-1][0], ends[-1][2]) and not torch.equal(ends[-1][0], last.raw)
    assert all(torch.equal(a, b) for a, b in zip(*ends))


@pytest.mark.parametrize('kwargs, said', [(dict(decay='x'), "decay='x' cannot be: a share"), (dict(every=1.5), 'every=1.5 cannot be: a whole number, 1 or more'), (dict(every=0), 'every=0 cannot be')])
def test_ema_takes_no_other_numbers(kwargs, said):
    with pytest.raises(UserError, match=said): EMACallback(**kwargs)


@pytest.mark.parametrize('event', ['before_batch', 'after_batch', 'after_validate'])
@pytest.mark.parametrize('exc', [CancelEpochException, CancelFitException])
def test_ema_of_an_epoch_cancelled_in_its_validation(event, exc):
    "Training goes on from the raw weights, and the layout of weights is put back by who changed it"
    class Cancels(Callback):
        order, run_train, done = -1, True, False

        def __call__(self, name):
            if name == event and not self.done and not self.training:
                self.done = True
                raise exc()
    ends = []
    for ema in ([], [EMACallback(.9, keep=False), ChannelsLast()]):
        last = Last()
        learn = make([*ema, last, Cancels()])
        if ema: learn.model.append(nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 3, 3, padding=1), nn.Flatten()))
        else:
            torch.manual_seed(0)
            learn.model.append(nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 3, 3, padding=1), nn.Flatten()))
        with torch.no_grad(): learn.model[3][1].weight.copy_(torch.arange(81.).view(3, 3, 3, 3)/81)
        with torch.no_grad(): learn.model[3][1].bias.zero_()
        torch.manual_seed(1)
        learn.fit(2)
        ends.append((last.raw, weights(learn)))
        assert learn.model[3][1].weight.is_contiguous()
    for a, b in zip(*ends): assert torch.allclose(a, b, atol=1e-6)
    assert not learn.ema._swapped and not learn.ema._on


# FlipTTA

def flipped(model, n_inp, *items, loss=lambda p, *y: torch.zeros(())):
    "Predictions of a batch by FlipTTA"
    dls = DataLoaders([items], [items])
    dls.n_inp = n_inp
    learn = Learner(dls, model, loss_func=loss, cbs=FlipTTA())
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    seen = []
    learn.add_cb(on(after_loss=lambda: seen.append((learn.pred, learn.xb))))
    learn.validate(dl=[items])
    return seen[0]


class Several(nn.Module):
    "Takes two images and a table; gives labels, and a map by name"
    def __init__(self):
        super().__init__()
        self.lin, self.conv = nn.Linear(2*3*4*4 + 2, 2), nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, a, t, b): return self.lin(torch.cat([a.flatten(1), b.flatten(1), t], 1)), dict(map=self.conv(a), n=7)


def test_flips_of_several_inputs_and_outputs():
    "Maps are mirrored back, and what is not an image is not mirrored"
    torch.manual_seed(0)
    model, a, b, t, y = Several(), torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randn(2, 2), torch.tensor([0, 1])
    (label, maps), xb = flipped(model, 3, a, t, b, y)
    with torch.no_grad(): (l1, m1), (l2, m2) = model(a, t, b), model(a.flip(-1), t, b.flip(-1))
    assert torch.allclose(label, (l1 + l2)/2, atol=1e-6) and torch.allclose(maps['map'], (m1['map'] + m2['map'].flip(-1))/2, atol=1e-6) and maps['n'] == 7
    assert [o.shape for o in xb] == [a.shape, t.shape, b.shape] and torch.equal(xb[0], a)


@pytest.mark.parametrize('target', [TensorPoint(torch.zeros(2, 1, 2)), TensorBBox(torch.zeros(2, 1, 4))])
def test_flips_of_points_are_refused(target):
    with pytest.raises(UserError, match='FlipTTA cannot mirror predictions of places .*Tensor(Point|BBox)'): flipped(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), 1, torch.randn(2, 3, 4, 4), target)


def test_tta_refuses_places_where_a_batch_has_no_targets(tmp_path):
    "In `predict` and `get_preds` of new images: the mean of a point and its mirror image is no place"
    from fastai.data.block import DataBlock
    from fastai.vision.data import ImageBlock, PointBlock
    from PIL import Image
    files = [tmp_path/f'{i}.png' for i in range(4)]
    for o in files: Image.new('RGB', (8, 8)).save(o)
    dls = DataBlock((ImageBlock, PointBlock), get_y=lambda o: [[1., 2.]], splitter=lambda o: ([0, 1], [2, 3])).dataloaders(files, bs=2, device='cpu')
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), loss_func=nn.MSELoss(), cbs=FlipTTA())
    with learn.no_bar(), pytest.raises(UserError, match='TensorPoint: leave it out'): learn.predict(files[0])


# Numbers that cannot be

@pytest.mark.parametrize('make, said', [(lambda: FirstBatches(0), 'n=0 cannot be: a whole number, 1 or more'), (lambda: FirstBatches(1.5), 'n=1.5 cannot be'), (lambda: ProgressiveResize('x'), "start='x' cannot be"),
                                        (lambda: ProgressiveResize(multiple=1.5), 'multiple=1.5 cannot be'), (lambda: ProgressiveResize(begin='x'), "begin='x'")])
def test_numbers_that_cannot_be(make, said):
    with pytest.raises(UserError, match=said): make()


@pytest.mark.parametrize('metric, less', [('rmse', True), ('cross_entropy', True), ('mse', True), ('mae', True), ('perplexity', True), ('valid_loss', True), ('error_rate', True), ('brier_score', True), ('accuracy', False), ('f1_score', False),
                                          ('dice', False), ('pearsonr', False), ('r2_score', False)])
def test_which_metrics_are_better_when_they_are_less(metric, less): assert TimeToAccuracy(.5, metric).comp(.4, .5) == less


def test_images_that_grow_all_at_once():
    cb = ProgressiveResize(.5, begin=.5, end=.5)
    assert [cb.side(64, o) for o in (0., .4, .5, 1.)] == [32, 32, 64, 64]


@pytest.mark.parametrize('cls', [Learner, BenchLearner])
@pytest.mark.parametrize('n', [1, 3])
def test_an_average_has_the_last_of_the_first_batches(cls, n):
    items = [(torch.randn(4), torch.tensor(i % 2)) for i in range(16)]
    ema = EMACallback(.5)
    learn = cls(DataLoaders(*[DataLoader(items, bs=2)]*2), nn.Linear(4, 2), loss_func=nn.CrossEntropyLoss(), cbs=[ema, FirstBatches(n)])
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    assert (ema._updates, learn.train_iter) == (2*n, 2*n)


@pytest.mark.parametrize('backend', ['aot_eager', 'inductor'])
def test_norms_that_are_checkpointed_cannot_be_compiled(backend):
    items = [(torch.randn(3, 8, 8), torch.tensor(i % 2)) for i in range(8)]
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3))) for _ in range(2)], nn.Flatten(), nn.Linear(192, 2))
    learn = Learner(DataLoaders(*[DataLoader(items, bs=4)]*2), model, loss_func=nn.CrossEntropyLoss(), cbs=[GradientCheckpointing(modules=nn.Sequential), Compile(backend=backend)])
    with learn.no_bar(), learn.no_logging(), pytest.raises(UserError, match='blocks with batch norm that GradientCheckpointing .*without Compile, or without GradientCheckpointing$'): learn.fit(1)


class Enlarges(nn.Module):
    "As for super-resolution: the output has twice the side"
    def __init__(self):
        super().__init__()
        self.conv, self.seen = nn.Conv2d(3, 12, 1), []

    def forward(self, x):
        self.seen.append(tuple(x.shape[-2:]))
        return nn.functional.pixel_shuffle(self.conv(x), 2)


@pytest.mark.parametrize('side, first', [((48, 48), (32, 32)), ((36, 50), (16, 32))])
def test_targets_that_are_images_grow_too(side, first):
    h, w = side
    items = [(TensorImage(torch.randn(3, h, w)), TensorImage(torch.randn(3, 2*h, 2*w))) for _ in range(8)]
    learn = Learner(DataLoaders(*[DataLoader(items, bs=2)]*2), Enlarges(), loss_func=nn.MSELoss())
    with learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=ProgressiveResize(.5))
    assert learn.model.seen[0] == first and side in learn.model.seen


# A copy of a Learner that is made in the middle of a fit

def row_of(i): return torch.ones(3, 4, 4)*i
def class_of(i): return torch.tensor(i % 3)


class OwnSwitch(nn.Sequential):
    "As timm's models"
    grad_checkpointing = False

    def set_grad_checkpointing(self, enable=True): self.grad_checkpointing = enable


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('cb', [lambda: EMACallback(.5), lambda: Backends(benchmark=True), Profiler, GradientCheckpointing, ChannelsLast, lambda: Compile(backend='eager')],
                         ids=['ema', 'backends', 'profiler', 'checkpointing', 'channels-last', 'compile'])
@pytest.mark.parametrize('again', [lambda learn: copy.deepcopy(learn), lambda learn: (learn.export('x.pkl'), load_learner(learn.path/'x.pkl'))[1]], ids=['deep-copied', 'exported'])
@pytest.mark.parametrize('cls', [Learner, BenchLearner])
def test_a_copy_made_in_mid_fit_fits_like_another(cls, again, cb, tmp_path):
    def dls(): return Datasets(list(range(20)), [[row_of], [class_of]], splits=[range(16), range(16, 20)]).dataloaders(bs=4, num_workers=0, shuffle=False, device=torch.device('cpu'))
    def new(*cbs):
        torch.manual_seed(0)
        model = OwnSwitch(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
        learn = cls(dls(), model, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, lr=.001, path=tmp_path, cbs=cbs)
        learn.logger = noop
        return learn.remove_cb(ProgressCallback)
    def last(learn): return [o.detach().clone() for o in learn.model.parameters()]
    copies = []
    learn = new(cb())
    class Makes(Callback):
        order = 90
        def __reduce__(self): return Callback, ()
        def after_epoch(self): copies.append(again(self.learn)) if self.learn.epoch == 0 else None
    learn.add_cb(Makes())
    learn.fit(2)
    made, like = copies[0], new(cb())
    made.dls, made.opt = dls(), None
    if not hasattr(made, 'channels_last'): like.remove_cb(ChannelsLast)  # fastai's load_learner takes it off on a CPU
    like.model.load_state_dict(made.model.state_dict())
    for o in (made, like): o.fit(1)
    assert all(map(torch.equal, last(made), last(like)))
    for o in (made, learn):
        assert 'remove_cbs' not in vars(o) and not o.model.grad_checkpointing and o.model[0].weight.is_contiguous()
        assert vars(o.model).get('_compiled_call_impl') is None
    if cb is Profiler: assert len(made.profiler.results) and made.profiler is not learn.profiler


# A search for a learning rate is no fit

def test_first_batches_leave_a_search_for_a_learning_rate_its_steps(tmp_path):
    learn = make(FirstBatches(2))
    learn.path = tmp_path
    learn.lr_find(num_it=20, show_plot=False, stop_div=False)
    assert len(learn.recorder.losses) == 20
    learn.fit(1)
    assert len(learn.recorder.losses) == 2


@pytest.mark.parametrize('whole', [True, False])
def test_a_target_is_not_asked_for_in_a_search_for_a_learning_rate(whole, tmp_path):
    said = []
    learn = make(TimeToAccuracy(100., 'valid_loss', whole=whole, tell=said.append))
    learn.path = tmp_path
    learn.fit(2)
    reached, history = learn.time_to_accuracy.reached, learn.time_to_accuracy.history
    learn.lr_find(num_it=20, show_plot=False)
    assert learn.time_to_accuracy.reached == reached and learn.time_to_accuracy.history == history and len(said) == 1


def test_an_error_inside_a_fit_that_a_callback_catches_switches_nothing_off():
    def fails(): raise ValueError('inside')
    def tries():
        if learn.lock.locked() or learn.epoch: return
        with pytest.raises(ValueError): learn.get_preds(cbs=on(after_pred=fails))
    layouts, ema = [], EMACallback(.9)
    learn = make([ChannelsLast(), ema])
    learn.model.append(nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 3, 3, padding=1), nn.Flatten()))
    learn.add_cb(on(after_epoch=tries, before_batch=lambda: layouts.append(learn.model[3][1].weight.is_contiguous())))
    learn.fit(2)
    assert not any(layouts) and ema.average.n_averaged == 16 and 'remove_cbs' not in vars(learn) and learn.model[3][1].weight.is_contiguous()
    learn.add_cb(on(after_pred=fails))
    for f in (learn.fit, lambda n: learn.get_preds(cbs=on())):
        with pytest.raises(ValueError): f(1)
        assert 'remove_cbs' not in vars(learn) and learn.model[3][1].weight.is_contiguous()

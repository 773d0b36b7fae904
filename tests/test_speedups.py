"Channels-last, torch.compile, gradient checkpointing and time-to-accuracy where a reader of the lessons does not look."
import shutil
import warnings

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException, CancelTrainException, CancelValidException, TrainEvalCallback
from fastai.callback.schedule import Learner  # noqa: F401  (adds fit_one_cycle, lr_find)
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.learner import Metric, load_learner
from fastai.metrics import accuracy
from fastai.optimizer import OptimWrapper
from fastai.torch_core import TensorImage
from torch import nn

from fastbench.callback.amp import MixedPrecision
from fastbench.callback.channelslast import ChannelsLast, conv_weights
from fastbench.callback.checkpointing import GradientCheckpointing
from fastbench.callback.compiling import Compile
from fastbench.callback.ema import EMACallback
from fastbench.callback.half import HalfPrecision
from fastbench.callback.target import TimeToAccuracy
from fastbench.errors import UserError
from fastbench.train.learner import BenchLearner


def nothing(): pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop, self.lin = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Dropout(.1), nn.Linear(288, 3)
        self.hook = nothing

    def forward(self, x):
        self.hook()
        return self.lin(self.drop(self.bn(self.conv(x)).relu()).flatten(1))


def items(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(TensorImage(torch.randn(3, 8, 8, generator=g)), i % 3) for i in range(n)]


def loss_func(pred, targ, reduction='mean'): return nn.functional.cross_entropy(pred, targ, reduction=reduction)


def make(*cbs, n=32, n_valid=16, bs=8, model=None, dls=None, cls=Learner, **kwargs):
    torch.manual_seed(0)
    dls = dls or DataLoaders(DataLoader(items(n), bs=bs, shuffle=False), DataLoader(items(n_valid, 1), bs=bs), path='.')
    learn = cls(dls, Net() if model is None else model, **{'loss_func': loss_func, **kwargs}, cbs=cbs)
    learn.logger = lambda *_: None
    if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
    return learn


def same(a, b, **kwargs):
    for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values()): torch.testing.assert_close(x, y, **kwargs)


def fit(*learns, epochs=1):
    "The same dropout for all"
    for o in learns:
        torch.manual_seed(1)
        o.fit(epochs)


def raises(e):
    def f(*_, **__): raise e
    return f


class At(Callback):
    "Calls `f` at `where`"
    order = 50
    def __init__(self, where, f): setattr(self, where, f)


ENDS = {'loss': lambda o, e: setattr(o, 'loss_func', raises(e)), 'forward': lambda o, e: setattr(o.model, 'hook', raises(e)),
        **{k: lambda o, e, k=k: o.add_cb(At(k, raises(e))) for k in
           ('before_fit', 'before_train', 'before_batch', 'after_backward', 'before_validate', 'after_validate', 'after_epoch', 'after_fit')}}


# --- channels last

def last(learn): return learn.model.conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('where', ENDS)
@pytest.mark.parametrize('exc', [KeyboardInterrupt('stop'), RuntimeError('out of memory'), CancelFitException('fit'), CancelTrainException('train')], ids=lambda o: type(o).__name__)
def test_channels_last_ends_with_the_fit(where, exc):
    learn = make(ChannelsLast())
    ENDS[where](learn, exc)
    try: learn.fit(1)
    except BaseException as e: assert isinstance(e, type(exc))
    assert not last(learn) and 'remove_cbs' not in vars(learn)
    try: learn.validate()
    except BaseException as e: assert isinstance(e, type(exc))
    assert not last(learn) or where in ('before_fit', 'after_epoch'), 'a validation that fails there sends nothing any more'
    learn = make(*learn.cbs.filter(lambda o: isinstance(o, ChannelsLast)))
    learn.fit(1)
    assert not last(learn)


@pytest.mark.parametrize('opt', ['fastai', 'torch', 'fused'])
def test_channels_last_takes_the_optimizer_along(opt):
    def wrapped(params, lr=.01, **kwargs): return OptimWrapper(params, torch.optim.AdamW, lr=lr, fused=opt == 'fused' or None)
    kw = {} if opt == 'fastai' else dict(opt_func=wrapped)
    plain, learn = (make(lr=.01, **kw) for _ in range(2))
    plain.model.drop.p = learn.model.drop.p = 0.  # another layout, another order of the same random numbers
    fit(plain, learn)  # moments lie as the weights did
    learn.add_cb(ChannelsLast())
    fit(plain, learn)
    same(plain, learn, rtol=1e-4, atol=1e-5)
    p = learn.model.conv.weight
    state = [v for v in getattr(learn.opt, 'opt', learn.opt).state[p].values() if isinstance(v, torch.Tensor) and v.shape == p.shape]
    assert state and all(v.is_contiguous() for v in state)


def test_channels_last_with_everything_else():
    def f(*cbs):
        learn = make(*cbs, MixedPrecision('bf16', True), EMACallback(.5), GradientAccumulation(16))
        fit(learn, epochs=2)
        return learn
    learn = f(ChannelsLast())
    same(f(), learn, rtol=.05, atol=.02)
    assert not last(learn) and learn.model.conv.weight.is_contiguous()


def test_channels_last_under_half_precision_that_is_cut():
    learn = make(ChannelsLast(), HalfPrecision('bf16', allow_emulation=True))
    learn.add_cb(At('after_pred', raises(KeyboardInterrupt('stop'))))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert learn.model.conv.weight.dtype == torch.float32 and learn.model.conv.weight.is_contiguous()


def test_channels_last_touches_convolutions_only():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.table = nn.Conv3d(3, 4, 2), nn.Parameter(torch.randn(2, 3, 2, 2))
            self.twice = self.conv

        def forward(self, x): return self.conv(x[:, :, None].repeat(1, 1, 2, 1, 1)).mean((2, 3, 4)) + self.table.view(-1)[:4]
    m = Odd()
    assert len(conv_weights(m)) == 1
    seen = []
    learn = make(ChannelsLast(), At('after_pred', lambda: seen.append(m.conv.weight.is_contiguous(memory_format=torch.channels_last_3d))), model=m)
    learn.fit(1)
    assert all(seen) and seen and m.conv.weight.is_contiguous()


def test_channels_last_inner_validation_and_removal():
    learn = make(ChannelsLast())
    seen = []
    class Inner(Callback):
        def after_train(self):
            self.learn.validate()
            seen.append(last(self.learn))
    learn.add_cb(Inner())
    learn.fit(1)
    assert seen == [True] and not last(learn)
    learn.get_preds()
    assert not last(learn)
    learn.add_cb(At('after_train', lambda: learn.remove_cb(ChannelsLast)))
    learn.fit(1)
    assert not last(learn) and not hasattr(learn, 'channels_last')


def test_channels_last_of_the_users_own_stays():
    learn = make(ChannelsLast())
    learn.model.to(memory_format=torch.channels_last)
    learn.fit(1)
    assert last(learn)


def test_channels_last_is_refused_where_it_does_nothing():
    with pytest.raises(UserError, match='no 2-d or 3-d convolution'): make(ChannelsLast(), model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3))).fit(1)


# --- compile

@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    if 'torch._dynamo' in __import__('sys').modules: torch._dynamo.reset()


def graphs():
    from torch._dynamo.utils import counters
    return counters['stats']['unique_graphs']


def compiled(*cbs, predictions=False, **kwargs): return make(Compile(backend='eager', predictions=predictions), *cbs, **kwargs)


@pytest.mark.parametrize('where', ENDS)
def test_compile_ends_with_the_fit(where):
    learn = compiled()
    ENDS[where](learn, KeyboardInterrupt('stop'))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert learn.model._compiled_call_impl is None and 'remove_cbs' not in vars(learn)


def test_compiled_training_is_the_same():
    plain, learn = make(), compiled()
    fit(plain, learn, epochs=2)
    same(plain, learn)
    assert learn.compiling.recompiles == 0 and graphs() > 0


def test_the_tenth_model_of_a_class_is_compiled_too():
    class Other(Net):
        def __init__(self, n):
            super().__init__()
            self.n = n
        def forward(self, x): return super().forward(x)*self.n
    n = graphs()
    for i in range(10): make(Compile(backend='eager', dynamic=False), model=Other(i + 1)).fit(1)
    assert graphs() == n + 20  # training and validation


@pytest.mark.parametrize('cb', [lambda: MixedPrecision('bf16', True), lambda: HalfPrecision('bf16', allow_emulation=True), lambda: EMACallback(.5),
                                lambda: GradientAccumulation(16), lambda: ChannelsLast()], ids=['amp', 'half', 'ema', 'accumulation', 'channels-last'])
def test_compile_with(cb):
    plain, learn = make(cb()), compiled(cb())
    fit(plain, learn, epochs=2)
    same(plain, learn, rtol=1e-4, atol=1e-5)
    assert learn.compiling.recompiles == 0


def test_compiled_code_survives_fits_freezing_and_precision():
    learn = compiled()
    learn.fit(1)
    n = graphs()
    learn.fit(1)
    assert graphs() == n
    learn.splitter = lambda m: [list(m.conv.parameters()), [p for k, p in m.named_parameters() if not k.startswith('conv')]]
    learn.create_opt()
    learn.freeze()
    learn.fit(1)
    learn.unfreeze()
    learn.add_cb(MixedPrecision('bf16', True))
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='compile')
        learn.fit(1)
    assert learn.compiling.recompiles == 0


def test_compiled_learner_is_saved_and_exported(tmp_path):
    tfms = [[lambda i: torch.ones(3, 8, 8)*i], [lambda i: torch.tensor(i % 3)]]
    learn = compiled(dls=Datasets(list(range(32)), tfms, splits=[range(24), range(24, 32)]).dataloaders(bs=8, num_workers=0, path=tmp_path))
    learn.fit(1)
    file = learn.save('model')
    assert list(torch.load(file, weights_only=False)['model']) == list(Net().state_dict())
    learn.export('x.pkl')
    assert b'torch._dynamo' not in (tmp_path/'x.pkl').read_bytes() and learn.compiling._call is not None
    other = load_learner(tmp_path/'x.pkl')
    want, got = learn.predict(3)[2], other.predict(3)[2]
    assert torch.allclose(want, got) and other.compiling._call is None and other.compiling._options == dict(backend='eager', fullgraph=False)
    learn.load('model')
    n = graphs()
    learn.fit(1)
    assert graphs() == n


@pytest.mark.parametrize('predictions', [False, True])
def test_predictions_are_compiled_where_asked(predictions):
    learn, plain = compiled(predictions=predictions), make()
    n = graphs()
    assert torch.equal(learn.get_preds()[0], plain.get_preds()[0])
    assert (graphs() > n) == predictions
    learn.validate()
    assert learn.model._compiled_call_impl is None


def test_compile_with_lr_find(tmp_path):
    learn = compiled()
    learn.path = tmp_path
    learn.lr_find(num_it=5, show_plot=False)
    assert learn.model._compiled_call_impl is None and list(learn.model.state_dict()) == list(Net().state_dict())


def test_recompilation_is_counted_and_said_once():
    learn = make(Compile(backend='eager', dynamic=False), n=30, n_valid=20)
    with pytest.warns(UserWarning, match='drop_last=True.*dynamic=True') as got: learn.fit(2)
    assert learn.compiling.recompiles == 2 and sum('compile:' in str(o.message) for o in got) == 1
    assert all('size mismatch' in o for o in learn.compiling.reasons)


def test_dynamic_needs_no_recompilation():
    learn = make(Compile(backend='eager', dynamic=True), n=30, n_valid=18, bs=4)  # sizes that no other side has
    learn.fit(1)
    assert learn.compiling.recompiles == 0


def test_what_cannot_be_compiled_is_one_line():
    def backend(graph, _): raise NotImplementedError('no such thing')
    learn = make(Compile(backend=backend))
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    with pytest.raises(UserError, match='compile.*NotImplementedError: no such thing') as e: learn.fit(1)
    assert len(str(e.value).splitlines()) <= 2 and learn.model._compiled_call_impl is None
    assert all(torch.equal(v, before[k]) for k, v in learn.model.state_dict().items())
    learn.remove_cb(Compile)
    learn.fit(1)


def test_unknown_backend_and_mode():
    for kw in (dict(backend='indoctor'), dict(mode='fastest')):
        with pytest.raises(UserError, match='compile|inductor') as e: make(Compile(**kw)).fit(1)
        assert {'indoctor': "did you mean: 'inductor'", 'fastest': 'Known: default, reduce-overhead, max-autotune'}[next(iter(kw.values()))] in str(e.value)


def test_a_model_compiled_already_is_refused():
    learn = make(Compile(backend='eager'))
    learn.model.compile(backend='eager')
    with pytest.raises(UserError, match='already'): learn.fit(1)
    assert learn.model._compiled_call_impl is not None, 'it is the user\'s'
    with pytest.raises(UserError, match='already'): make(Compile(backend='eager'), model=torch.compile(Net(), backend='eager')).fit(1)


def test_tensor_types_that_cannot_be_traced():
    learn = make(Compile(backend='eager'), default_cbs=False)
    learn.add_cb(TrainEvalCallback())
    with pytest.raises(UserError, match='CastToTensor'): learn.fit(1)


@pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++')), reason='inductor needs a C++ compiler')
def test_inductor():
    plain, learn = make(), make(Compile())
    plain.model.drop.p = learn.model.drop.p = 0.  # its code draws other numbers
    fit(plain, learn)
    same(plain, learn, rtol=1e-3, atol=1e-4)


def test_no_compiler_is_one_line():
    import torch._inductor.config as config
    with config.patch({'cpp.cxx': ('no-such-compiler',)}), torch._inductor.utils.fresh_cache():
        torch._inductor.cpp_builder.get_cpp_compiler.cache_clear() if hasattr(torch._inductor.cpp_builder.get_cpp_compiler, 'cache_clear') else None
        learn = make(Compile())
        with pytest.raises(UserError, match=r'C\+\+ compiler'): learn.fit(1)
    assert learn.model._compiled_call_impl is None


# --- gradient checkpointing

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop, self.n = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(.1), 0

    def forward(self, x):
        self.n += 1
        return x + self.drop(self.bn(self.conv(x)).relu())


def stack(n=3): return nn.Sequential(nn.Sequential(*(Block() for _ in range(n))), nn.Flatten(), nn.Linear(192, 3))


def checkpointed(learn): return [o for o in learn.model.modules() if 'forward' in vars(o)]


@pytest.mark.parametrize('cb', [lambda: None, lambda: MixedPrecision('bf16', True), lambda: HalfPrecision('bf16', allow_emulation=True), lambda: EMACallback(.5),
                                lambda: GradientAccumulation(16), lambda: ChannelsLast(), lambda: Compile(backend='eager')],
                         ids=['alone', 'amp', 'half', 'ema', 'accumulation', 'channels-last', 'compile'])
def test_checkpointing_is_bit_for_bit(cb):
    torch.manual_seed(0)
    plain, learn = (make(*[o for o in (cb(),) if o], *cbs, model=stack()) for cbs in ((), (GradientCheckpointing(),)))
    learn.model.load_state_dict(plain.model.state_dict())
    fit(plain, learn, epochs=2)
    for a, b in zip(plain.model.state_dict().values(), learn.model.state_dict().values()): assert torch.equal(a, b)
    assert not checkpointed(learn)


@pytest.mark.parametrize('where', ENDS)
def test_checkpointing_ends_with_the_fit(where):
    learn = make(GradientCheckpointing(), model=stack())
    if where == 'forward': learn.model[1].register_forward_hook(raises(KeyboardInterrupt('stop')))
    else: ENDS[where](learn, KeyboardInterrupt('stop'))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert not checkpointed(learn)


@pytest.mark.parametrize('kw,n', [({}, 4), (dict(every=2), 2), (dict(modules=nn.BatchNorm2d), 4), (dict(modules=lambda m: isinstance(m, Block)), 4),
                                  (dict(modules=[Block, nn.Conv2d]), 4)])
def test_which_blocks(kw, n):
    seen = []
    learn = make(GradientCheckpointing(**kw), model=stack(4))
    learn.add_cb(At('after_pred', lambda: seen.append(len(checkpointed(learn)))))
    learn.fit(1)
    assert set(seen) == {n}


def test_a_failing_recomputation_leaves_the_statistics():
    learn = make(GradientCheckpointing(), model=stack(2), n=8)

    def fails(*_):
        if learn.model[0][0].n == 2: raise KeyboardInterrupt('stop')
    bn = learn.model[0][0].bn
    bn.register_forward_pre_hook(fails)
    mean = bn.running_mean
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert bn.num_batches_tracked == 1 and bn.running_mean is mean


@pytest.mark.parametrize('kind', ['timm', 'transformers'])
def test_the_models_own_switch(kind):
    if kind == 'timm':
        timm = pytest.importorskip('timm')
        m = timm.create_model('vit_tiny_patch16_224', img_size=32, num_classes=3)
        def on(): return m.grad_checkpointing
    else:
        t = pytest.importorskip('transformers')
        m = t.BertForSequenceClassification(t.BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20))
        def on(): return m.is_gradient_checkpointing
    cb = GradientCheckpointing()
    learn = make(cb, model=m)
    cb._since = False
    cb.switch_on()
    assert on() and not checkpointed(learn)
    cb._off()
    assert not on()


def test_nothing_to_checkpoint():
    with pytest.raises(UserError, match='no repeated blocks'): make(GradientCheckpointing()).fit(1)
    with pytest.raises(UserError, match='every=0'): GradientCheckpointing(0)


# --- time to accuracy

class Fixed(Metric):
    "Values that are known beforehand"
    def __init__(self, values): self._values, self._n = values, -1
    def reset(self): pass
    def accumulate(self, learn): pass
    @property
    def value(self): return self._values[self.learn_epoch()]
    @property
    def name(self): return 'score'


def timed(values, target, n=None, **kwargs):
    lines, cb = [], None
    metric = Fixed(values)
    cb = TimeToAccuracy(target, 'score', tell=lines.append, **kwargs)
    learn = make(cb, metrics=metric)
    metric.learn_epoch = lambda: learn.epoch
    learn.fit(n or len(values))
    return cb, lines, learn


def test_target_ends_the_fit():
    cb, lines, learn = timed([.1, .5, .9, .95], .9)
    assert (cb.reached, cb.epochs, cb.best) == (.9, 3, .9) and [o[2] for o in cb.history] == [.1, .5, .9]
    assert len(learn.recorder.losses) == 12 and len(lines) == 1 and 'reached 0.9' in lines[0]
    assert 0 < cb.seconds < cb.total_seconds and [o[1] for o in cb.history] == sorted(o[1] for o in cb.history)


@pytest.mark.parametrize('right, of, kwargs', [(304, 320, {}), (19, 20, {}), (1, 3, dict(comp=np.less)), (9_400, 10_000, {})])
def test_target_in_fp32_is_reached_by_as_many_as_it_takes(right, of, kwargs):
    value = torch.tensor(right/of).item()
    for off in (1, 1 + 2e-7, 1 - 2e-7): assert timed([value*off], right/of, **kwargs)[0].epochs == 1
    worse = (right + (1 if kwargs else -1))/of
    assert timed([worse], right/of, **kwargs)[0].reached is None


def test_target_with_less_is_better():
    cb, _, _ = timed([.5, .2, .3], .2, comp=np.less)
    assert (cb.reached, cb.epochs) == (.2, 2)
    learn = make(TimeToAccuracy(100., 'valid_loss', tell=nothing_of))
    learn.fit(2)
    assert learn.time_to_accuracy.epochs == 1


def nothing_of(_): pass


def test_target_never_reached():
    cb, lines, _ = timed([.1, float('nan'), .3], .9)
    assert cb.reached is None and cb.seconds is None and cb.best == .3 and len(cb.history) == 3
    assert lines == ['score never reached 0.9 in 3 epochs: 0.3 at best']
    cb, lines, _ = timed([float('nan')], .9)
    assert cb.best is None and lines == ['score never reached 0.9 in 1 epoch: no value at all']


def test_target_that_cannot_be():
    learn = make(TimeToAccuracy(.9, 'acuracy'), metrics=accuracy)
    before = [p.clone() for p in learn.model.parameters()]
    with pytest.raises(UserError, match="did you mean 'accuracy'.*Known: accuracy, valid_loss"): learn.fit(1)
    assert all(torch.equal(a, b) for a, b in zip(before, learn.model.parameters()))
    for o in (None, float('nan'), '94%'):
        with pytest.raises(UserError, match='target='): TimeToAccuracy(o)


def test_target_in_odd_fits():
    learn = make(TimeToAccuracy(2., tell=nothing_of), metrics=accuracy)
    learn.validate()
    assert learn.time_to_accuracy.history == []

    def cancel():
        if not learn.training: raise CancelValidException
    cb = At('before_batch', cancel)
    learn.add_cb(cb)
    learn.fit(1)
    assert np.isnan(learn.time_to_accuracy.history[0][2])
    learn.remove_cb(cb)
    class Inner(Callback):
        def after_train(self): self.learn.validate()
    learn.add_cb(Inner())
    learn.fit(2)
    assert [o[0] for o in learn.time_to_accuracy.history] == [0, 1]
    learn.add_cb(At('after_pred', raises(KeyboardInterrupt('stop'))))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    learn = make(TimeToAccuracy(.5, tell=nothing_of), metrics=accuracy, n_valid=0)
    learn.fit(1)
    assert learn.time_to_accuracy.reached is None


@pytest.mark.parametrize('cls', [Learner, BenchLearner])
def test_target_on_both_learners(cls):
    learn = make(TimeToAccuracy(.01, tell=nothing_of), metrics=accuracy, cls=cls)
    learn.fit(3)
    t = learn.time_to_accuracy
    assert t.epochs == 1 and t.reached == pytest.approx(learn.recorder.values[0][-1])

"What each of two processes does in test_dealt.py: train as people do with fastai's and PyTorch's loaders, and the same in one process with batches of both"
import json, os, random, sys, warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import fastai.callback.schedule  # adds lr_find
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException, CancelTrainException, CancelValidException
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.callback.rnn import ModelResetter
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets, TfmdDL
from fastai.data.load import DataLoader
from fastai.data.transforms import RandomSplitter
from fastai.learner import Learner, load_learner
from fastai.metrics import CorpusBLEUMetric, Dice, DiceMulti, JaccardCoeff, JaccardCoeffMulti
from fastai.losses import CrossEntropyLossFlat, FocalLossFlat, LabelSmoothingCrossEntropy
from fastai.text.data import LMDataLoader
from fastai.text.learner import LMLearner
from fastcore.basics import chunked
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data import DataLoader as TorchDL

import fastbench.distributed.learner  # adds distributed
import fastbench.train.convert  # adds bench
from fastbench.machine import group
from fastbench.train.learner import BenchLearner
from fastbench.train.state import layer_numbers
from processes import NAMES, apart, flat, forked
from reader import Reader

G = torch.Generator().manual_seed(3)
N, BS = 64, 8
X, Y = torch.randn(N, 4, generator=G), torch.randint(0, 3, (N,), generator=G)
SKEWED = torch.linspace(.05, .95, N)[:, None] > torch.rand(N, 5, generator=G)  # early items have fewer targets
POINTS = torch.where(SKEWED, torch.randint(0, 3, (N, 5), generator=G), 255)
WEIGHT = torch.tensor([1., 9., .1])


def alone(): return not group.is_joined()
def interleaved(n): return [o for i in range(0, n//2, BS) for o in (*range(i, min(i+BS, n//2)), *range(n//2+i, min(n//2+i+BS, n)))]
def both(*ts, n=N, used=N): return TensorDataset(*(t[[*interleaved(used), *range(used, n)]] if alone() else t[:n] for t in ts))  # each process takes a stretch of the order
def bs(): return BS*2 if alone() else BS


def fastai_dls(y=Y, n=N, used=N, drop_last=False): return DataLoaders(*[TfmdDL(both(X, y, n=n, used=min(n, used)), bs=bs(), do_setup=False, num_workers=0, drop_last=drop_last) for _ in range(2)], device='cpu')


def tripled(items):
    xs, ys = zip(*items)
    return torch.stack(xs)*3, torch.stack(ys)


class Halves(torch.utils.data.Sampler):
    "Eight items again and again"
    def __init__(self): pass
    def __len__(self): return 32
    def __iter__(self): return iter([i % 8 for i in range(32)])


class Points(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 15)
    def forward(self, x): return self.layer(x).view(-1, 3, 5)


def torch_dls(**kwargs):
    def made(): return TorchDL(both(X, Y) if 'sampler' not in kwargs else TensorDataset(X, Y), batch_size=bs(), **kwargs)
    return DataLoaders(made(), made(), device='cpu')


def two_layers(): return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Thaws(Callback):
    "Gradual unfreezing"
    def before_epoch(self): self.learn.unfreeze() if self.epoch else self.learn.freeze()


class Freezes(Callback):
    "The first layer is trained in the first epoch only"
    def before_epoch(self): own_layers(self.learn.model)[0].requires_grad_(not self.epoch)


class Two(nn.Module):
    "One of two layers, whose scale is set from outside, as the models of GANs are switched"
    def __init__(self):
        super().__init__()
        self.layers, self.scale, self.i = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), 1., 0
    def switch(self, i):
        self.i = i
        for j, o in enumerate(self.layers): o.requires_grad_(i == j)
    def forward(self, x): return self.layers[self.i](x)*self.scale


class Directs(Callback):
    "Reaches into the model, as fastai's GANTrainer does"
    def before_epoch(self): self.model.switch(0)
    def before_validate(self): self.model.switch(0)
    def after_batch(self):
        self.model.scale = self.model.scale + .1
        if self.training: self.model.switch(self.iter % 2)


def own_layers(model): return getattr(model, 'module', model)


def texts_dls():
    "With fastai's loader of language models; each process would draw an order of its own"
    random.seed(group.rank())
    def made(texts, shuffle): return LMDataLoader(texts, bs=2 if alone() else 1, seq_len=10, shuffle=shuffle, do_setup=False)
    return DataLoaders(made([torch.arange(i*i, i*i + 12 + i) % 23 for i in range(8)], True), made([torch.arange(65) % 23], False), device='cpu')


class Takes(nn.Linear):
    "Something else if it is fed a target"
    def __init__(self): super().__init__(4, 3)
    def forward(self, x, target=None): return super().forward(x) if target is None else super().forward(x)*target[:, None]


def of_last(p, *ys): return F.cross_entropy(p, ys[-1])


def two_targets(cls):
    "`n_inp` set on the loaders themselves"
    dls = DataLoaders(*[cls(both(X, Y, Y), batch_size=bs()) for _ in range(2)], device='cpu')
    for o in dls: o.n_inp = 1
    return dict(dls=dls, model=Takes(), loss_func=of_last)


def ignoring(): return dict(dls=fastai_dls(POINTS), model=Points())
CASES = dict(class_weights=lambda: dict(loss_func=CrossEntropyLossFlat(weight=WEIGHT)), torch_weights=lambda: dict(loss_func=nn.CrossEntropyLoss(weight=WEIGHT)),
             nll=lambda: dict(loss_func=nn.NLLLoss(weight=WEIGHT), model=nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))),
             ignored=lambda: dict(ignoring(), loss_func=CrossEntropyLossFlat(axis=1, ignore_index=255)), weights_and_ignored=lambda: dict(ignoring(), loss_func=nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255)),
             probabilities=lambda: dict(dls=fastai_dls(torch.eye(3)[Y]*.8 + .1), loss_func=nn.CrossEntropyLoss(weight=WEIGHT)),
             partly=lambda: dict(loss_func=partial(F.cross_entropy, weight=WEIGHT)), partly_ignored=lambda: dict(ignoring(), loss_func=partial(F.cross_entropy, ignore_index=255)),
             own_count=lambda: dict(loss_func=nn.CrossEntropyLoss(weight=WEIGHT.flip(0)), n_targets=lambda yb: WEIGHT.flip(0)[yb[0]].sum()),
             n_inp=lambda: two_targets(DataLoader), reversed=lambda: dict(dls=of_own(lambda: Reversed(both(X, Y), bs=bs(), do_setup=False, num_workers=0))), n_inp_of_torch=lambda: two_targets(TorchDL), drop_last=lambda: dict(dls=fastai_dls(n=58, used=48, drop_last=True)), thawed=lambda: dict(model=two_layers(), cbs=[Thaws()], splitter=lambda m: [list(m[0].parameters()), list(m[2].parameters())]), frozen=lambda: dict(model=two_layers(), cbs=[Freezes(), GradientAccumulation(32)]),
             collate=lambda: dict(dls=torch_dls(collate_fn=tripled)), directed=lambda: dict(model=Two(), cbs=[Directs()]), language_model=lambda: dict(dls=texts_dls(), model=Reader(), loss_func=CrossEntropyLossFlat(), cbs=[ModelResetter()]), sampler=lambda: dict(dls=torch_dls(sampler=Halves())), torch_loader=lambda: dict(dls=torch_dls()))


def learner(dls=None, model=None, loss_func=None, n_targets=None, cbs=(), loop='lean', **kwargs):
    torch.manual_seed(0)
    if model: model.apply(lambda m: getattr(m, 'reset_parameters', lambda: None)())
    learn = (BenchLearner if loop == 'lean' else Learner)(dls or fastai_dls(), model or nn.Linear(4, 3), loss_func=loss_func or nn.CrossEntropyLoss(), cbs=cbs, **kwargs).bench(lean=loop == 'lean')
    if n_targets: learn.n_targets = n_targets
    return learn


def fit(learn, n=2):
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n, .05)
    return learn


def seen(learn): return dict(losses=[float(o) for o in learn.recorder.losses], lrs=[float(o) for o in learn.recorder.lrs], pct=float(learn.pct_train), values=[v for o in learn.recorder.values for v in map(float, o[1:])])


def found(learn):
    with learn.no_bar(): learn.lr_find(num_it=20, show_plot=False, stop_div=False)
    return seen(learn)


class Endless(IterableDataset):
    def __iter__(self): return iter([(X[0], Y[0])]*40)


class Own(TorchDL):
    def __iter__(self): return iter([(X[:8], Y[:8])])


class OwnBatches(torch.utils.data.Sampler):
    "Batches of items of one class"
    def __init__(self): pass
    def __len__(self): return 3
    def __iter__(self): return iter([(Y == i).nonzero()[:8, 0].tolist() for i in range(3)])


class Fixed(DataLoader):
    "Always makes the same batches"
    def create_batches(self, samps): yield from (self.do_batch([self.dataset[i] for i in range(8)]) for _ in range(2))


class Reversed(TfmdDL):
    "Makes the batches of the items that it is told"
    def create_batches(self, samps): yield from (self.do_batch([self.dataset[i] for i in b]) for b in chunked(reversed([*samps]), self.bs))


def of_own(made): return DataLoaders(made(), fastai_dls().valid, device='cpu')


REFUSED = dict(own_batches=lambda: of_own(lambda: Fixed(TensorDataset(X, Y), bs=8)), own_sample=lambda: of_own(lambda: DataLoader(TensorDataset(X, Y), bs=8, sample=lambda: iter(range(8)))),
               too_few=lambda: fastai_dls(n=10, drop_last=True), few_tokens=lambda: DataLoaders(*[LMDataLoader([torch.arange(2)]*2, bs=2, seq_len=10, do_setup=False) for _ in range(2)], device='cpu'), stream=lambda: DataLoaders(TorchDL(Endless(), batch_size=8), fastai_dls().valid, device='cpu'),
               fastai_stream=lambda: DataLoaders(DataLoader(Endless(), bs=8), fastai_dls().valid, device='cpu'),
               dealt=lambda: torch_dls(sampler=DistributedSampler(range(N), 2, group.rank())), by_batches=lambda: DataLoaders(*[TorchDL(TensorDataset(X, Y), batch_sampler=OwnBatches()) for _ in range(2)], device='cpu'),
               own=lambda: DataLoaders(Own(TensorDataset(X, Y), batch_size=8), fastai_dls().valid, device='cpu'), strange=lambda: DataLoaders(iter([(X[:8], Y[:8])]), fastai_dls().valid))


def refusal(make, strategy):
    learn = learner(make())
    with learn.distributed(strategy, cpu=True, tell=lambda o: None):
        try: fit(learn, 1)
        except Exception as e: return f'{type(e).__name__}: {e}'


class Opens(torch.utils.data.Dataset):
    "Items that a worker can only read after `opened`"
    def __len__(self): return 16
    def __getitem__(self, i): return X[i], Y[i] + self.shift


def opened(i): torch.utils.data.get_worker_info().dataset.shift = 0


def with_workers():
    "A generator of one's own draws the order, and workers are prepared"
    dl = TorchDL(Opens(), batch_size=4, num_workers=1, worker_init_fn=opened, shuffle=True, generator=torch.Generator().manual_seed(4))
    learn = learner(DataLoaders(dl, fastai_dls().valid, device='cpu'))
    with learn.distributed('ddp', cpu=True, tell=lambda o: None): fit(learn, 1)
    return float(learn.recorder.losses[-1]), torch.equal(dl.generator.get_state(), torch.Generator().manual_seed(4).get_state())


def history(folder, strategy):
    "What fastai's logger has written, into one file in one process"
    learn = learner()
    learn.path = Path(folder)/strategy
    learn.path.mkdir(exist_ok=True)
    with learn.distributed(strategy, cpu=True, tell=lambda o: None):
        for _ in range(2):
            with learn.no_bar(), learn.no_logging(): learn.fit(2, .05, cbs=CSVLogger(append=True))
    return [o.split(',')[0] for o in (learn.path/'history.csv').read_text().splitlines()]


def graph(strategy):
    "Only the first process has a bar to draw it into"
    with (learn := learner()).distributed(strategy, cpu=True, tell=lambda o: None):
        return said(lambda: learn.fit(1, cbs=ShowGraphCallback()))


class Alone(Callback):
    "Cancels a step in the last process only"
    def before_step(self):
        if group.rank() and self.iter == 1: raise CancelStepException


def said(f):
    try: f()
    except Exception as e: return f'{type(e).__name__}: {e}'


def alone_in_a_step(strategy):
    def f():
        with (learn := learner(cbs=[Alone()])).distributed(strategy, cpu=True, tell=lambda o: None): fit(learn)
    return said(f)


LEAVES = dict(batch=CancelBatchException, backward=CancelBackwardException, epoch=CancelEpochException, fit=CancelFitException)
LEFT = [f'{e}-{k}' for e in ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward') for k in LEAVES if k != 'backward' or e == 'before_backward'] + ['after_loss-batch-given']


def leaving(event, why, given, ranks):
    "Callbacks: one that leaves the second batch of an epoch in some processes (of a class, or given as `Callback(after_loss=f)`), one that counts steps"
    def leave(self):
        if self.training and self.iter == 1 and group.rank() in ranks: raise LEAVES[why]
    def count(self): self.learn.steps = getattr(self.learn, 'steps', 0) + 1
    leaves = Callback(**{event: leave}) if given else type('Leaves', (Callback,), {event: leave})()
    return leaves, type('Counts', (Callback,), dict(after_step=count))()


def left(strategy, what, *ranks):
    "What is said when the processes `ranks` leave a batch, and the steps of all and their weights if nothing is"
    learn = learner(cbs=leaving(*f'{what}-'.split('-')[:3], ranks))
    def f():
        with learn.distributed(strategy, cpu=True, tell=lambda o: None): fit(learn)
    line = said(f)
    return line, group.gather(learn.steps), line or len(set(group.gather(str(flat(learn.model).tolist()))))


ENDS = LEAVES | dict(train=CancelTrainException, validate=CancelValidException)
OUTSIDE = [f'{e}:{k}:{order}:{loop}' for e, k, order, loop in [*((f'{when}_{what}', 'fit', order, 'lean') for what in ('epoch', 'train', 'validate') for when in ('before', 'after') for order in (0, 200)),
           ('before_epoch', 'epoch', 0, 'lean'), ('before_train', 'epoch', 0, 'fastai'), ('after_train', 'epoch', 0, 'lean'), ('after_validate', 'epoch', 0, 'lean'), ('before_train', 'train', -20, 'lean'), ('before_validate', 'validate', 0, 'lean'),
           ('before_validate', 'validate', 200, 'fastai'), ('after_cancel_train', 'fit', 0, 'lean'), ('after_epoch', 'fit', 0, 'fastai')]]


def ended(strategy, what, *ranks):
    "As `left`, of what the processes `ranks` end in the second epoch outside of a batch, with a callback of the same order that exchanges something"
    event, why, order, loop = what.split(':')
    def end(self):
        if self.epoch == 1 and group.rank() in ranks: raise ENDS[why]
    def cancel(self): raise CancelTrainException
    def exchange(self): group.gather(0)
    def count(self): self.learn.steps = getattr(self.learn, 'steps', 0) + 1
    def made(**events): return type('Mine', (Callback,), dict(order=int(order), **events))()
    learn = learner(cbs=[made(**{event: end}), made(**{event: exchange}), made(after_step=count), *[made(before_train=cancel)]*('cancel' in event)], loop=loop)
    learn.steps = 0
    def f():
        with learn.distributed(strategy, cpu=True, tell=lambda o: None): fit(learn, 3)
    line = said(f)
    return line, group.gather((learn.steps, len(learn.recorder.values))), line or len(set(group.gather(str(flat(learn.model).tolist()))))


def validated(strategy):
    "How a validation on its own ends in each process, if the last one ends it"
    def end(self):
        if group.rank(): raise CancelFitException
    learn = learner(cbs=[type('Mine', (Callback,), dict(before_validate=end))()])
    with learn.distributed(strategy, cpu=True, tell=lambda o: None), learn.no_bar(), learn.no_logging(): return group.gather(said(learn.validate))


class Spare(nn.Linear):
    "Has weights that are not used"
    def __init__(self):
        super().__init__(4, 3)
        self.spare = nn.Linear(2, 2)


def another_split(strategy):
    "As RandomSplitter draws it without a seed"
    def f():
        torch.manual_seed(group.rank())
        items = list(range(N))
        dls = Datasets(items, [[lambda i: X[i]], [lambda i: Y[i]]], splits=RandomSplitter()(items)).dataloaders(bs=8, num_workers=0, device='cpu')
        with (learn := learner(dls)).distributed(strategy, cpu=True, tell=lambda o: None): fit(learn)
    return said(f)


def dropping(p, y): return F.cross_entropy(F.dropout(p, .5), y)  # draws


def of_pairs(p, y): return (p[:, None] - p).pow(2).mean()  # compares samples


LOSSES = dict(smooth=LabelSmoothingCrossEntropy(weight=WEIGHT), of_pairs=of_pairs, even=LabelSmoothingCrossEntropy(), focal=FocalLossFlat(weight=WEIGHT), drawn=dropping, plain=nn.CrossEntropyLoss(weight=WEIGHT))


class FewPoints(Points):
    "Classes that are rare: some processes meet none of them"
    def forward(self, x): return super().forward(x) - torch.tensor([0., 0., 3.])[:, None]


def measured():
    "fastai's metrics of segmentation and translation, on a validation set that cannot be divided evenly"
    y = torch.where(SKEWED, POINTS, 0) % 3
    dls = fastai_dls()
    dls = DataLoaders(dls.train, TfmdDL(TensorDataset(X[:37], y[:37]), bs=8, do_setup=False, num_workers=0), device='cpu')
    dls.train = TfmdDL(both(X, y), bs=bs(), do_setup=False, num_workers=0)
    learn = learner(dls, FewPoints(), loss_func=CrossEntropyLossFlat(axis=1), metrics=[Dice(), DiceMulti(), JaccardCoeff(), JaccardCoeffMulti(), CorpusBLEUMetric(axis=1)])
    return learn


def values(learn): return [float(o) for o in learn.recorder.values[-1]]


def lines_of(loss_func, strategy):
    "What is said in a fit about a loss, and whether the next random number is that of processes that say nothing"
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter('always')
        with (learn := learner(loss_func=loss_func)).distributed(strategy, cpu=True, tell=lambda o: None): fit(learn)
    return [str(o.message) for o in got if 'several processes' in str(o.message)], group.gather(torch.rand(1).item())


def unused(strategy):
    def f():
        with (learn := learner(model=Spare())).distributed(strategy, cpu=True, tell=lambda o: None): fit(learn)
    return said(f)


def wrong_option(strategy):
    def f():
        with learner().distributed(strategy, cpus=True): pass
    return said(f)


def of_x(i): return X[i]
def of_y(i): return Y[i]


def exported(folder, strategy):
    "Exported in the block by all processes; what it predicts, and whether the training goes on"
    ds = Datasets(list(range(32)), [[of_x], [of_y]], splits=[list(range(16)), list(range(16, 32))])
    learn = learner(ds.dataloaders(bs=8, device='cpu', num_workers=0), nn.Sequential(nn.Linear(4, 3)))
    learn.path = Path(folder)
    with learn.distributed(strategy, cpu=True, tell=lambda o: None):
        fit(learn, 1)
        why = said(lambda: learn.export(f'{strategy}.pkl'))
        fit(learn, 1)
    if why: return why
    again = load_learner(learn.path/f'{strategy}.pkl')
    return [type(o).__name__ for o in again.cbs], tuple(again.model[0].weight.shape), learn.engine['world_size']


def afterwards(strategy):
    "What all processes predict when the block is over, and what the first one does alone"
    with (learn := learner()).distributed(strategy, cpu=True, tell=lambda o: None): fit(learn, 1)
    with learn.no_bar(), learn.no_logging():
        n = len(learn.get_preds()[0])
        alone = None if group.rank() else [len(learn.get_preds()[0]), learn.validate()[0]]
        group.barrier()
        return n, alone, learn.validate()[0]


class Model(Reader):
    "As fastai's AWD_LSTM: it keeps a result of its last batch, and begins with a state of the kind of its weights"
    def reset(self): self.state = self.emb.weight.new_zeros(1, 2 if alone() else 1, 4)
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept, [self.kept], [self.kept]


def of_texts(strategy=None):
    "fastai's Learner of language models: how it ends, and what it predicts for whole rows"
    torch.manual_seed(0)
    learn = LMLearner(texts_dls(), Model(), loss_func=CrossEntropyLossFlat(), alpha=0., beta=0.).bench()
    learn.model(torch.zeros(2 if alone() else 1, 3, dtype=torch.long))
    with learn.distributed(strategy, cpu=True, tell=lambda o: None) if strategy else nullcontext(): preds = fit(learn, 1).get_preds(reorder=bool(strategy))  # fastai's own order is that of parts of rows
    return [float(preds[0].sum()), *preds[0].shape, preds[1].tolist()]


def main(folder):
    told = {k: os.environ.pop(k) for k in NAMES}  # for what one process does
    ones = {k: fit(learner(**f())) for k, f in CASES.items()}
    one, all_values, rows = found(learner()), values(fit(measured())), of_texts()
    os.environ.update(told)
    group.join(timeout=60)
    res = {}
    for strategy in ('ddp', 'fsdp'):
        res[strategy] = own = dict(equal={}, refused={k: refusal(f, strategy) for k, f in REFUSED.items()})
        for k, f in CASES.items():
            learn = learner(**f())
            with learn.distributed(strategy, cpu=True, tell=lambda o: None): fit(learn)
            own['equal'][k] = dict(apart=apart(ones[k].model, learn.model), want=seen(ones[k]), got=seen(learn), numbers=[layer_numbers(o.model) for o in (ones[k], learn)])
        learn = measured()
        with learn.distributed(strategy, cpu=True, tell=lambda o: None): fit(learn)
        own['metrics'] = dict(want=all_values, got=values(learn))
        own['lines'] = {k: lines_of(f, strategy) for k, f in LOSSES.items()}
        own['history'] = history(folder, strategy)
        own['afterwards'], own['rows'] = afterwards(strategy), dict(want=rows, got=of_texts(strategy))
        group.barrier()
        own |= dict(split=another_split(strategy), graph=graph(strategy), alone=alone_in_a_step(strategy), option=wrong_option(strategy), unused=unused(strategy), exported=exported(folder, strategy))
        own['left'] = {k: dict(by_one=left(strategy, k, 1), by_all=left(strategy, k, 0, 1)) for k in LEFT}
        own['ended'] = {k: dict(by_one=ended(strategy, k, 1), by_all=ended(strategy, k, 0, 1)) for k in OUTSIDE}
        own['validated'] = validated(strategy)
        learn = learner()
        with learn.distributed(strategy, cpu=True, tell=lambda o: None): own['lr_find'] = dict(want=one, got=found(learn))
    res['workers'] = with_workers()
    Path(folder, f'{group.rank()}.json').write_text(json.dumps(res))
    group.leave()


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    sys.exit(not forked(Path(sys.argv[1])/'two', 2, False, sys.argv[2], main))

"What each of several processes does in test_distributed.py: train with every strategy beside one process, decide together, save and load, predict"
import faulthandler, json, os, signal, sys, traceback, warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.schedule import Learner  # adds lr_find
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Metric
from fastai.metrics import F1Score, accuracy
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn

import fastbench.distributed.learner  # adds distributed
from fastbench.callback.ema import EMACallback
from fastbench.callback.half import HalfPrecision
from fastbench.callback.target import TimeToAccuracy
from fastbench.distributed import exchange
from fastbench.distributed.accumulate import WeighBatches
from fastbench.distributed.exchange import ExchangeCost
from fastbench.distributed.memory import held_memory, strategy_memory
from fastbench.machine.shards import own_part
from fastbench.errors import UserError
from fastbench.machine import group
from fastbench.measure.stopwatch import ManualClock
from fastbench.train.learner import BenchLearner
from fastbench.train.muon import muon
from fastbench.train.optimizer import fused_adamw

G = torch.Generator().manual_seed(3)
X, Y = torch.randn(64, 4, generator=G), torch.randint(0, 3, (64,), generator=G)
SHARES = {1: [16], 2: [12, 4], 4: [7, 1, 5, 3]}  # of each batch of 16


class Net(nn.Module):
    "A batch norm nobody weighs would differ between processes, so there is none; a layer stays frozen, and a buffer counts"
    _no_split_modules = ['Sequential']
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 16)), nn.Linear(16, 3)
        self.register_buffer('seen', torch.zeros(()))
    def forward(self, x):
        if self.training: self.seen += 1
        return self.head(torch.tanh(self.body(x)))


class Dealt(DataLoader):
    "Deals its share of each batch of 16 to a process: shares are not equal"
    def __init__(self, n=64, shares=None, rank=0):
        self.batches, at = [], sum((shares or [16])[:rank])
        for b in range(0, n, 16): self.batches.append((X[b+at:b+at+(shares or [16])[rank]], Y[b+at:b+at+(shares or [16])[rank]]))
        super().__init__(list(range(n)), bs=16)
        self.world_size, self.drop_last = len(shares or [16]), False
    def __iter__(self): return iter(self.batches)
    def __len__(self): return len(self.batches)
    def to_detach(self, b, cpu=True, gather=True): return b.detach()


def dls(alone=False):
    size = 1 if alone else group.world_size()
    made = [Dealt(n, SHARES[size], 0 if alone else group.rank()) for n in (64, 32)]
    res = DataLoaders(*made, device='cpu')
    return res


def learner(opt=SGD, alone=False, seed=0, data=None, metrics=(), loss_func=None, **kwargs):
    torch.manual_seed(seed)
    learn = BenchLearner(data or dls(alone), Net(), loss_func=loss_func or nn.CrossEntropyLoss(), opt_func=opt, metrics=list(metrics), **kwargs)
    if loss_func is WORDS: learn.n_targets = lambda yb: (yb[0] != 2).sum()
    return learn


def fit(learn, n=2, lr=.05, cbs=()):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, lr, cbs=list(cbs))
    return learn


def flat(m): return torch.cat([p.detach().flatten() for p in m.parameters()])


def apart(a, b): return (flat(a) - flat(b)).abs().max().item()


OPTS = dict(sgd=partial(SGD, mom=.9), adam=Adam, torch_adamw=partial(OptimWrapper, opt=torch.optim.AdamW), torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD), fused_adamw=fused_adamw, muon=muon)


class Kinds(Callback):
    "In what the layers compute, and of what kind the weights are that are stepped"
    order = 90
    def before_fit(self):
        learn, found = self.learn, set()
        def see(m, args, out):
            found.update([f'{m.weight.dtype} {out.dtype}'])
            learn.computed = [sorted(found), str(next(p for p, *_ in learn.opt.all_params()).dtype)]
        for m in learn.model.modules():
            if isinstance(m, nn.Linear): m.register_forward_hook(see)


WORDS = nn.CrossEntropyLoss(ignore_index=2)  # as a language model's: a share may have fewer targets than samples, or none
def summed(p, y): return nn.functional.cross_entropy(p, y, reduction='sum')
summed.reduction = 'sum'
CASES = {**{k: dict(opt=v) for k, v in OPTS.items()},
         'clip': dict(opt=OPTS['sgd'], cbs=lambda: [GradientClip(.05)]), 'accumulate': dict(opt=Adam, cbs=lambda: [GradientAccumulation(32)]),
         'both': dict(opt=OPTS['torch_adamw'], cbs=lambda: [GradientAccumulation(32), GradientClip(.02)]), 'sum': dict(opt=SGD, loss_func=summed, lr=.003), 'tokens': dict(opt=OPTS['torch_adamw'], loss_func=WORDS),
         'weighed': dict(opt=OPTS['sgd'], loss_func=WORDS, cbs=lambda: [GradientAccumulation(32), WeighBatches()]),
         'average': dict(opt=Adam, cbs=lambda: [EMACallback(.7, every=3)]), 'half': dict(opt=OPTS['sgd'], always=lambda: [HalfPrecision(allow_emulation=True), Kinds()])}
REFUSED = ('fsdp', 'muon'), ('ddp', 'half')
FEW = ('sgd', 'torch_adamw', 'both', 'tokens')  # with four processes


class Holds(Callback):
    "What this process holds, when everything is there"
    order = 98
    def before_step(self):
        self.learn.held = held_memory(self.learn.model, self.learn.opt)
        self.learn.in_buckets = all(g.untyped_storage().nbytes() > g.nbytes for g in (own_part(p.grad) for p in self.learn.model.parameters() if p.grad is not None))


def cases(): return {k: v for k, v in CASES.items() if group.world_size() == 2 or k in FEW or not group.is_joined()}


def parts_of_case(o): return o.get('cbs', list), o.get('lr', .05), {k: v for k, v in o.items() if k in ('opt', 'loss_func')} | (dict(cbs=o['always']()) if 'always' in o else {})


def by_one_process():
    "Every case in this process alone, which has not been told of others yet: a Learner after two epochs"
    res = {}
    for name, o in CASES.items():
        cbs, lr, kw = parts_of_case(o)
        res[name] = fit(learner(alone=True, **kw), cbs=cbs(), lr=lr)
    return res


def by_all(strategy, ones):
    "The same by all processes"
    res, learns = {}, {}
    for name, o in cases().items():
        if (strategy, name) in REFUSED: continue
        cbs, lr, kw = parts_of_case(o)
        one = ones[name]
        learn = learns[name] = learner(seed=group.rank(), **kw)  # each process begins with weights of its own: those of the first count
        own, tell = learn.model, []
        with learn.distributed(strategy, cpu=True, tell=tell.append):
            fit(learn, cbs=[*cbs(), Holds()], lr=lr)
            parts = {type(p).__name__ for p in learn.model.parameters()}
        res[name] = dict(apart=apart(one.model, own), same=learn.model is own, engine=learn.engine, parts=sorted(parts), held=learn.held, in_buckets=learn.in_buckets, told=strategy_memory(learn, strategies=[strategy])[0], tell=tell, loss=float(learn.recorder.losses[-1]), want=float(one.recorder.losses[-1]),
                         values=[float(o) for o in learn.recorder.values[-1]], want_values=[float(o) for o in one.recorder.values[-1]], seen=own.seen.item(), computed=getattr(learn, 'computed', None))
    return res, learns


def goes_on(learns):
    "One more epoch in one process again"
    ones = by_one_process()
    for name in learns:
        cbs, lr, _ = parts_of_case(CASES[name])
        for learn in (ones[name], learns[name]):
            learn.dls = dls(alone=True)
            fit(learn, 1, lr, cbs())
        yield name, apart(ones[name].model, learns[name].model)


class OnOne(Callback):
    "Does something in the last process, at one step"
    def __init__(self, f, event='after_loss', at=3): self.f, self.event, self.at = f, event, at
    def act(self, event):
        if event == self.event and self.training and group.rank() == group.world_size()-1 and self.learn.train_iter == self.at: self.f(self)
    def after_loss(self): self.act('after_loss')
    def after_batch(self): self.act('after_batch')


class Steps(Callback):
    order = 200
    def before_fit(self): self.n = 0
    def after_step(self): self.n += 1


def nan(cb): cb.learn.loss_grad = cb.learn.loss_grad*float('nan'); cb.learn.loss = cb.learn.loss*float('nan')
def stop(cb): raise CancelFitException
def kill(cb): os.kill(os.getpid(), signal.SIGTERM)
def ctrl_c(cb): os.kill(os.getpid(), signal.SIGINT)


class Own(Metric):
    "Each process has another value, which no sum makes the same"
    name = 'own'
    def reset(self): self.n = getattr(self, 'n', 0)
    def accumulate(self, learn): pass
    @property
    def value(self):
        self.n += 1
        return float([1, 2, 0, 0, 0][self.n % 5] if group.rank() else [1, 2, 3, 4, 5][self.n % 5])


def decided(strategy, folder):
    res = {}
    for name, (cbs, n) in dict(nan=([OnOne(nan), TerminateOnNaNCallback()], 3), stop=([OnOne(stop, 'after_batch')], 3), term=([OnOne(kill)], 3), ctrl_c=([OnOne(ctrl_c)], 3)).items():
        learn, how = learner(OPTS['sgd'], cbs=Steps()), None
        before = signal.getsignal(signal.SIGTERM)
        with learn.distributed(strategy, cpu=True, tell=lambda o: None):
            try: fit(learn, n, cbs=cbs)
            except KeyboardInterrupt as e: how = f'KeyboardInterrupt: {e}'
        res[name] = dict(steps=learn.steps.n, how=how, whole=flat(learn.model).shape[0], handler=signal.getsignal(signal.SIGTERM) is before, wrapped='one_batch' in vars(learn))
    learn = learner(OPTS['sgd'], metrics=[accuracy, Own()])
    learn.path = Path(folder)
    with learn.distributed(strategy, cpu=True, tell=lambda o: None), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn, 6, cbs=[EarlyStoppingCallback(monitor='own', patience=2), SaveModelCallback(monitor='own', fname=f'best-{strategy}', with_opt=True)])
    res['early'] = [float(o[-1]) for o in learn.recorder.values]
    learn = learner(OPTS['sgd'])
    with learn.distributed(strategy, cpu=True, tell=lambda o: None), learn.no_bar():
        res['lr_find'] = learn.lr_find(num_it=30, show_plot=False).valley
    goal = TimeToAccuracy(.1, 'accuracy', tell=lambda o: None)
    learn = learner(OPTS['sgd'], metrics=[accuracy])
    with learn.distributed(strategy, cpu=True, tell=lambda o: None): fit(learn, 4, cbs=[goal])
    res['goal'] = goal.epochs
    return res


class Item(Callback):
    "Fails in the last process while it predicts"
    def after_pred(self):
        if group.rank() == group.world_size()-1: raise ValueError('no luck')


def files_and_predictions(strategy, folder):
    learn = learner(Adam, data=plain(), metrics=[accuracy, F1Score(average='macro')])
    learn.path = Path(folder)
    res = {}
    with learn.distributed(strategy, cpu=True, tell=lambda o: None):
        fit(learn, 1)
        learn.save(f'whole-{strategy}')
        fit(learn, 1)
        learn.load(f'whole-{strategy}')
        with learn.no_bar(), learn.no_logging():
            res['valid'] = [float(o) for o in learn.validate()]
            res['preds'] = learn.get_preds()[0].tolist()
            res['targs'] = learn.get_preds()[1].tolist()
            try: learn.get_preds(cbs=Item())
            except Exception as e: res['fails'] = f'{type(e).__name__}: {e}'
    return res


def plain():
    data = [(x, y) for x, y in zip(X, Y)]
    return DataLoaders(DataLoader(data, bs=8), DataLoader(data[:13], bs=3), device='cpu')


def refused(strategy):
    "One line each, and nothing left behind"
    res = {}
    def why(f):
        try: f()
        except Exception as e: return f'{type(e).__name__}: {e}'
    if strategy == 'fsdp':
        res['muon'] = why(lambda: learner(muon).to_distributed(strategy='fsdp'))
        res['fp16'] = why(lambda: learner(cbs=HalfPrecision('fp16')).to_distributed(strategy='fsdp'))
        def later():
            with (learn := learner()).distributed(strategy, cpu=True, tell=lambda o: None): fit(learn, 1, cbs=[HalfPrecision(allow_emulation=True)])
        res['later'] = why(later)
    learn = learner(OPTS['sgd'])
    with learn.distributed(strategy, cpu=True, tell=lambda o: None): res['twice'] = why(lambda: learn.to_distributed(cpu=True))
    def broken():
        with learn.distributed(strategy, cpu=True, tell=lambda o: None): fit(learn, 1, cbs=[Broken()])
    res['broken'] = why(broken)
    res['after'] = [type(p).__name__ for p in learn.model.parameters()] + [flat(learn.model).shape[0], type(learn.model).__name__, hasattr(learn, 'distributed_trainer')]
    return res


class Slow(Callback):
    "An exchange that takes 30 ms of a clock after the backward pass, at the call of DDP's hook"
    order = 50
    def __init__(self, clock): self._clock = clock
    def before_batch(self):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        if hasattr(self.learn.model, 'register_comm_hook') and not hasattr(self, 'on'):
            self.on = True
            self.learn.model.register_comm_hook(None, lambda state, bucket: (self._clock.sleep(.03), allreduce_hook(state, bucket))[1])


def exchanged(strategy):
    "What the exchange costs is measured beside the training, which goes on as if nothing had been measured"
    res, weights, clock, sum_over_ranks = {}, [], ManualClock(), group.sum_over_ranks
    def summed_up(g):
        clock.sleep(.01)
        return sum_over_ranks(g)
    for cbs in ([], [Slow(clock), ExchangeCost(4)]):
        learn = learner(OPTS['sgd'])
        with patch.multiple(exchange, perf_counter=clock, sum_over_ranks=summed_up), learn.distributed(strategy, cpu=True, tell=lambda o: None):
            try: fit(learn, 2, cbs=cbs)
            except UserError as e: return str(e)
        weights.append(flat(learn.model))
    cost = cbs[-1]
    return dict(apart=(weights[0] - weights[1]).abs().max().item(), exposed=cost.exposed, share=cost.share, alone=cost.alone, pairs=cost.pairs, said=str(cost), sync=learn.model.__dict__.get('require_backward_grad_sync'))


class Broken(Callback):
    def after_pred(self): raise ValueError('in every process')


NAMES = 'WORLD_SIZE', 'RANK', 'LOCAL_RANK'


def adds_up():
    "Reduce as Gloo of PyTorch 2.8 does: where it is asked for the mean, it adds up"
    dist = torch.distributed
    def summing(f): return lambda *args, **kwargs: f(*args, **(kwargs | dict(op=dist.ReduceOp.SUM) if kwargs.get('op') == dist.ReduceOp.AVG else kwargs))
    for name in ('reduce_scatter_tensor', 'reduce_scatter_single'):  # the newer name is the second
        if hasattr(dist, name): setattr(dist, name, summing(getattr(dist, name)))


def main(folder, *given):
    "`given`: rank and number of processes, where the group is made by somebody else and the environment says nothing"
    told = {k: os.environ.pop(k) for k in NAMES if k in os.environ}
    ones = by_one_process()
    os.environ.update(told)
    if given:
        adds_up()
        torch.distributed.init_process_group('gloo', store=torch.distributed.FileStore(str(Path(folder, 'store'))), rank=int(given[0]), world_size=int(given[1]))
    else: group.join(timeout=300)
    res, learns, me = {}, {}, group.rank()
    res['words'] = [group.gather(me), group.broadcast(dict(a=me)), group.sum_over_ranks([1, me]).tolist(), group.max_over_ranks(me), group.any_rank(me == 1)]
    for strategy in ('ddp', 'fsdp'):
        equal, learns[strategy] = by_all(strategy, ones)
        res[strategy] = dict(equal=equal)
        if not given: res[strategy] |= dict(decided=decided(strategy, folder), files=files_and_predictions(strategy, folder), refused=refused(strategy), exchanged=exchanged(strategy))
    res['told'] = {k: os.environ.get(k) for k in NAMES}
    group.leave()
    for k in told: del os.environ[k]
    for strategy, o in learns.items(): res[strategy]['goes_on'] = dict(goes_on(o))
    Path(folder, f'{me}.json').write_text(json.dumps(res))


def forked(folder, n, given, port, main=main):
    "`n` children of this process, which has imported everything: as torchrun tells them, or in a group that they make themselves; is all well?"
    folder.mkdir()
    def child(i):
        os.environ.update({} if given else dict(WORLD_SIZE=str(n), RANK=str(i), LOCAL_RANK=str(i), MASTER_ADDR='127.0.0.1', MASTER_PORT=port))
        main(folder, *((i, n) if given else ()))
    pids = []
    for i in range(n):
        if pid := os.fork(): pids.append(pid)
        else:
            code = 1
            try:
                faulthandler.dump_traceback_later(100)
                child(i)
                code = 0
            except BaseException: traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
    return not any([os.waitpid(o, 0)[1] for o in pids])


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    folder, port = Path(sys.argv[1]), sys.argv[2]
    sys.exit(not (forked(folder/'two', 2, False, port) and forked(folder/'four', 4, True, port)))

"What each of two processes, or four, does in test_zero.py: train with each stage of ZeRO beside one process, save and load, go on, be refused"
import contextlib, json, os, sys, warnings
from functools import partial
from pathlib import Path

import torch
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.fp16 import AMPMode, MixedPrecision as FastaiMixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, OptimWrapper, ranger

import fastbench.distributed.learner  # adds distributed
from fastbench.callback.amp import MixedPrecision
from fastbench.callback.channelslast import ChannelsLast
from fastbench.callback.compiling import Compile
from fastbench.callback.ema import EMACallback
from fastbench.callback.half import HalfPrecision
from fastbench.distributed.accumulate import WeighBatches
from fastbench.distributed.deepspeed import need_deepspeed
from fastbench.distributed.memory import strategy_memory
from fastbench.machine import group
from fastbench.train.optimizer import fused_adamw
from processes import Holds, WORDS, apart, decided, dls, files_and_predictions, fit, flat, forked, learner, parts_of_case

STAGES = 'zero1', 'zero2', 'zero3', 'zero2-offload', 'zero3-offload'
FEW = 'torch_adamw', 'both', 'adam', 'sgd'  # with offloading, or four processes
SPLIT = lambda m: [list(m.body.parameters()), list(m.head.parameters())]
CASES = dict(torch_adamw=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW)), torch_sgd=dict(opt=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)),
             sgd=dict(opt=partial(SGD, mom=.9, wd=.1)), plain=dict(opt=SGD), adam=dict(opt=Adam), l2=dict(opt=partial(Adam, decouple_wd=False)), fused=dict(opt=fused_adamw),
             clip=dict(opt=partial(SGD, mom=.9), cbs=lambda: [GradientClip(.05)]), accumulate=dict(opt=Adam, cbs=lambda: [GradientAccumulation(32)]),
             both=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW), cbs=lambda: [GradientAccumulation(32), GradientClip(.02)]),
             weighed=dict(opt=partial(SGD, mom=.9), loss_func=WORDS, cbs=lambda: [GradientAccumulation(32), WeighBatches()]),
             tokens=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW), loss_func=WORDS), groups=dict(opt=Adam, splitter=SPLIT, lr=slice(.005, .05)), frozen=dict(opt=Adam, splitter=SPLIT, freeze=True),
             average=dict(opt=Adam, cbs=lambda: [EMACallback(.7, every=3)]), bf16=dict(opt=partial(SGD, mom=.9), cbs=lambda: [MixedPrecision('bf16', allow_emulation=True), Kinds()]))


class Kinds(Callback):
    "In what the layers compute"
    order = 90
    def before_fit(self):
        learn, found = self.learn, set()
        def see(m, args, out): found.add(str(out.dtype)), setattr(learn, 'computed', sorted(found))
        for m in self.learn.model.modules():
            if isinstance(m, torch.nn.Linear): m.register_forward_hook(see)


def make(name, **kwargs):
    o = CASES[name]
    cbs, lr, kw = parts_of_case(o)
    learn = learner(**kw, **kwargs, **({'splitter': o['splitter']} if 'splitter' in o else {}))
    if o.get('freeze'): learn.freeze()
    return learn, cbs, lr


def train(learn, cbs, lr, n=2, more=()):
    "A schedule changes lr and mom at each step"
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n, lr, cbs=[*cbs(), *more])


def by_one_process():
    res = {}
    for name in CASES:
        learn, cbs, lr = make(name, alone=True)
        train(learn, cbs, lr)
        res[name] = learn
    return res


def by_all(strategy, ones):
    res, learns = {}, {}
    for name in CASES if 'offload' not in strategy and group.world_size() == 2 else FEW:
        if (strategy, name) == ('zero3', 'average'): continue  # refused
        learn, cbs, lr = make(name, seed=0 if CASES[name].get('freeze') else group.rank())  # the weights of the first process count
        own, learns[name], tell = learn.model, learn, []
        with learn.distributed(strategy, cpu=True, tell=tell.append):
            train(learn, cbs, lr, more=[Holds()])
        one, foretold = ones[name], strategy_memory(learn, group.world_size(), [strategy])[0]
        res[name] = dict(held=learn.held, foretold=foretold, apart=apart(one.model, own), same=learn.model is own, engine=learn.engine, tell=tell, kinds=sorted({type(p).__name__ for p in own.parameters()}), seen=own.seen.item(),
                         left=sorted({k for p in own.parameters() for k in vars(p)}), loss=float(learn.recorder.losses[-1]), want=float(one.recorder.losses[-1]), opt=type(learn.opt).__name__, computed=getattr(learn, 'computed', None))
    return res, learns


def goes_on(learns, ones):
    "One more epoch in one process again, for both"
    for name, learn in learns.items():
        _, cbs, lr = make(name, alone=True)
        learn.dls = dls(alone=True)
        for o in (ones[name], learn): train(o, cbs, lr, 1)
        yield name, apart(ones[name].model, learn.model)


def back_and_forth(strategy):
    "In the block, out of it and in again, beside one process that never was in one"
    res = {}
    for name in ('torch_adamw', 'sgd'):
        learns = []
        for alone in (True, False):
            learn, cbs, lr = make(name, alone=alone)
            for _ in range(2):
                if alone: train(learn, cbs, lr, 1)
                else:
                    with learn.distributed(strategy, cpu=True, tell=lambda o: None): train(learn, cbs, lr, 1)
            learns.append(learn)
        res[name] = apart(*(o.model for o in learns))
    return res if strategy == 'zero3' else res | dict(twice=twice(strategy))


def twice(strategy):
    "Two fits in one block, the second from the average of the first"
    learns = []
    for alone in (True, False):
        learn, cbs, lr = make('average', alone=alone)
        with contextlib.nullcontext() if alone else learn.distributed(strategy, cpu=True, tell=lambda o: None):
            for _ in range(2): train(learn, cbs, lr, 1)
        learns.append(learn)
    return apart(*(o.model for o in learns))


class CancelsStep(Callback):
    def before_step(self): raise CancelStepException


def refused():
    "One line each, and nothing left behind"
    res, adamw = {}, CASES['torch_adamw']['opt']
    def why(opt=adamw, cbs=(), f=lambda learn: fit(learn, 1), stage='zero2', more=None, **kwargs):
        learn = learner(opt, cbs=cbs, **kwargs)
        if more: learn.model.more = more
        own = learn.model
        try:
            with learn.distributed(stage, cpu=True, tell=lambda o: None): f(learn)
        except Exception as e: said = f'{type(e).__name__}: {e}'
        else: said = 'nothing'
        assert learn.model is own and flat(own).shape[0] == 256 and not hasattr(learn, 'distributed_trainer') and '_backward' not in vars(learn)
        return said
    res['ranger'] = why(ranger)
    res['gan'] = why(cbs=[type('GANTrainer', (Callback,), {})()])
    res['dropped'] = why(stage='zero3', more=type('WeightDropout', (torch.nn.Module,), {})())
    res['rmsprop'] = why(partial(OptimWrapper, opt=torch.optim.RMSprop))
    res['made'] = why(OptimWrapper(opt=torch.optim.AdamW(learner().model.parameters())))
    res |= {type(o).__name__: why(cbs=o) for o in (Compile(), HalfPrecision(), ChannelsLast())} | dict(EMACallback=why(cbs=EMACallback(), stage='zero3'))
    res |= dict(fastais=why(cbs=FastaiMixedPrecision(amp_mode=AMPMode.BF16)), fp16=why(cbs=MixedPrecision('fp16')))
    res['later'] = why(f=lambda learn: fit(learn, 1, cbs=[Compile()]))
    res['norm'] = why(cbs=GradientClip(1., 1.))
    res['cancelled'] = why(cbs=CancelsStep())
    res['reset'] = why(f=lambda learn: learn.fit(1, reset_opt=True))
    res['freeze'] = why(f=lambda learn: learn.freeze(), splitter=SPLIT)
    def whole(learn):
        learn.distributed_trainer.strategy.wrap = lambda model: model
        fit(learn, 1)
    def clips(learn):
        s = learn.distributed_trainer.strategy
        during = s.during
        def spoilt(learn):
            undo = during(learn)
            s.engine.optimizer.clip_grad = 1.
            return undo
        s.during = spoilt
        fit(learn, 1)
    res['beside'], res['clips'] = why(f=whole), why(f=clips)
    return res


def main(folder, *given):
    told = {k: os.environ.pop(k) for k in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK') if k in os.environ}
    ones = by_one_process()
    os.environ.update(told)
    group.join(timeout=300)
    res, learns, me = {}, {}, group.rank()
    few = group.world_size() > 2
    only = os.environ.get('ONLY', '').split() or STAGES[:3 if few else None]
    for strategy in only:
        equal, learns[strategy] = by_all(strategy, ones)
        res[strategy] = dict(equal=equal)
        if strategy in ('zero2', 'zero3') and not few: res[strategy] |= dict(files=files_and_predictions(strategy, folder), decided=decided(strategy, folder), back=back_and_forth(strategy))
    if not few: res['refused'] = refused()
    group.leave()
    for k in told: del os.environ[k]
    for strategy in only: res[strategy]['goes_on'] = dict(goes_on(learns[strategy], by_one_process()))
    Path(folder, f'{me}.json').write_text(json.dumps(res))


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    need_deepspeed('cpu')  # before the fork
    own = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device='cpu': own(device)  # DeepSpeed asks for CUDA's, and switches it off: here as on a GPU
    sys.exit(not all(forked(Path(sys.argv[1])/name, n, False, sys.argv[2], main) for name, n in dict(two=2, four=4).items()))

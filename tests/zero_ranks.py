"What each of two processes does in test_zero.py: train with each stage of ZeRO beside one process, save and load, go on, be refused"
import json, os, sys, warnings
from functools import partial
from pathlib import Path

import torch
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, OptimWrapper, ranger

import fastbench.distributed.learner  # adds distributed
from fastbench.distributed.zero import need_deepspeed
from fastbench.machine import group
from fastbench.train.optimizer import fused_adamw
from processes import WORDS, apart, dls, fit, flat, forked, learner, parts_of_case

STAGES = 'zero1', 'zero2', 'zero3', 'zero2-offload', 'zero3-offload'
FEW = 'torch_adamw', 'both', 'adam'  # with offloading
SPLIT = lambda m: [list(m.body.parameters()), list(m.head.parameters())]
CASES = dict(torch_adamw=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW)), torch_sgd=dict(opt=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)),
             sgd=dict(opt=partial(SGD, mom=.9, wd=.1)), plain=dict(opt=SGD), adam=dict(opt=Adam), l2=dict(opt=partial(Adam, decouple_wd=False)), fused=dict(opt=fused_adamw),
             clip=dict(opt=partial(SGD, mom=.9), cbs=lambda: [GradientClip(.05)]), accumulate=dict(opt=Adam, cbs=lambda: [GradientAccumulation(32)]),
             both=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW), cbs=lambda: [GradientAccumulation(32), GradientClip(.02)]),
             tokens=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW), loss_func=WORDS), groups=dict(opt=Adam, splitter=SPLIT, lr=slice(.005, .05)), frozen=dict(opt=Adam, splitter=SPLIT, freeze=True))


def make(name, **kwargs):
    o = CASES[name]
    cbs, lr, kw = parts_of_case(o)
    learn = learner(**kw, **kwargs, **({'splitter': o['splitter']} if 'splitter' in o else {}))
    if o.get('freeze'): learn.freeze()
    return learn, cbs, lr


def train(learn, cbs, lr, n=2):
    "A schedule changes lr and mom at each step"
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n, lr, cbs=cbs())


def by_one_process():
    res = {}
    for name in CASES:
        learn, cbs, lr = make(name, alone=True)
        train(learn, cbs, lr)
        res[name] = learn
    return res


def by_all(strategy, ones):
    res, learns = {}, {}
    for name in CASES if 'offload' not in strategy else FEW:
        learn, cbs, lr = make(name, seed=0 if CASES[name].get('freeze') else group.rank())  # the weights of the first process count
        own, learns[name], tell = learn.model, learn, []
        with learn.distributed(strategy, cpu=True, tell=tell.append):
            train(learn, cbs, lr)
        one = ones[name]
        res[name] = dict(apart=apart(one.model, own), same=learn.model is own, engine=learn.engine, tell=tell, kinds=sorted({type(p).__name__ for p in own.parameters()}), seen=own.seen.item(),
                         left=sorted({k for p in own.parameters() for k in vars(p)}), loss=float(learn.recorder.losses[-1]), want=float(one.recorder.losses[-1]), opt=type(learn.opt).__name__)
    return res, learns


def goes_on(learns, ones):
    "One more epoch in one process, and in several again"
    for name, learn in learns.items():
        _, cbs, lr = make(name, alone=True)
        learn.dls = dls(alone=True)
        train(learn, cbs, lr, 1)
        yield name, apart(ones[name].model, learn.model)


def main(folder, *given):
    told = {k: os.environ.pop(k) for k in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK') if k in os.environ}
    ones = by_one_process()
    os.environ.update(told)
    group.join(timeout=60)
    res, learns, me = {}, {}, group.rank()
    only = os.environ.get('ONLY', '').split() or STAGES
    for strategy in only:
        equal, learns[strategy] = by_all(strategy, ones)
        res[strategy] = dict(equal=equal)
    group.leave()
    for k in told: del os.environ[k]
    Path(folder, f'{me}.json').write_text(json.dumps(res))


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    need_deepspeed('cpu')  # before the fork
    sys.exit(not forked(Path(sys.argv[1])/'two', 2, False, sys.argv[2], main))

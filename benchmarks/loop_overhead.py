"""What a training loop adds to a raw PyTorch loop: fastai's, ours, Lightning's, HF Trainer's, Accelerate's.

    python benchmarks/loop_overhead.py [--pairs 15] [--batches 400] [--only]

The digits of scikit-learn, a network of three linear layers (64-256-256-10), batches of 64, AdamW; every loop gets the same list of batches, so that no loader
is measured. fastai's and ours train with their default callbacks (train/eval, recorder, progress bar); "one-cycle" is their
`fit_one_cycle` and PyTorch's `OneCycleLR`. One process, one thread; in every round each loop runs beside the
one that it is set against, first and last or twice between (`fastbench.compare.paired`), so that a machine which grows slower or faster meanwhile does not blur the ratio. Peers that are not installed are left
out and named: pip install lightning accelerate transformers.
Bars: ours with a fused optimizer at most 1.15 times and 70 us a batch above the raw loop with the same optimizer; the profiler at most 10 us a batch.
"""
import argparse
import contextlib
import logging
import os
import random
import sys
import tempfile
import warnings
from functools import partial
from statistics import median, quantiles
from time import perf_counter

warnings.filterwarnings('ignore')

import torch
from fastai.callback.progress import ProgressCallback  # noqa: F401  (a default callback)
from fastai.callback.schedule import ParamScheduler  # noqa: F401  (adds Learner.fit_one_cycle)
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import fastbench.measure.profiler  # noqa: F401  (adds Learner.profile)
from fastbench.train.loop import FastLoop
from fastbench.train.optimizer import fused_adamw
from fastbench.compare.paired import time_pairs

LR, WD = 1e-3, .01


def batches(n, bs=64):
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32)/16, torch.tensor(d.target)
    i = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = [(x[o], y[o]) for o in i[:len(i)//bs*bs].view(-1, bs)]
    return [parts[o % len(parts)] for o in range(n)]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def adamw(params, fused): return torch.optim.AdamW(params, lr=LR, weight_decay=WD, fused=fused)


def raw(b, fused, cycle=False):
    model = mlp()
    opt = adamw(model.parameters(), fused)
    def fit():
        model.train()
        schedule = OneCycleLR(opt, LR, len(b)) if cycle else None
        for x, y in b:
            loss = cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            if cycle: schedule.step()
            opt.zero_grad()
    return fit, model


def fastai(b, cls, opt_func=None):
    learn = cls(DataLoaders(b, []), mlp(), loss_func=cross_entropy, lr=LR, wd=WD, **({} if opt_func is None else dict(opt_func=opt_func)))
    return lambda: learn.fit(1), learn.model, learn


def cycled(learn): return lambda: learn.fit_one_cycle(1), learn.model


def profiled(learn):
    "The same Learner, so that nothing differs but the profiler"
    def fit():
        with learn.profiling(): learn.fit(1)
    return fit, learn.model


def accelerate(b):
    from accelerate import Accelerator
    acc, model = Accelerator(cpu=True), mlp()
    model, opt = acc.prepare(model, adamw(model.parameters(), True))
    def fit():
        model.train()
        for x, y in b:
            loss = cross_entropy(model(x), y)
            acc.backward(loss)
            opt.step()
            opt.zero_grad()
    return fit, model


def lightning(b):
    from lightning import LightningModule, Trainer
    os.environ.pop('PYTORCH_NVML_BASED_CUDA_CHECK', None)  # it sets this, and every later torch.cuda.is_available() is slow
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()
        def training_step(self, batch, i): return cross_entropy(self.net(batch[0]), batch[1])
        def configure_optimizers(self): return adamw(self.parameters(), True)

    module, loader = Module(), torch.utils.data.DataLoader(b, batch_size=None)
    def fit(): Trainer(max_epochs=1, accelerator='cpu', logger=False, enable_checkpointing=False, enable_model_summary=False).fit(module, loader)
    return fit, module.net


def trainer(b):
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
        def forward(self, x, labels): return {'loss': cross_entropy(self.net(x), labels)}

    net, folder = Net(), tempfile.mkdtemp()
    data = [dict(x=x, labels=y) for x, y in b]
    args = TrainingArguments(folder, num_train_epochs=1, per_device_train_batch_size=1, optim='adamw_torch_fused', learning_rate=LR, weight_decay=WD,
                             lr_scheduler_type='constant', max_grad_norm=0, report_to=[], save_strategy='no', use_cpu=True, dataloader_pin_memory=False)
    return lambda: Trainer(net, args, train_dataset=data, data_collator=lambda o: o[0]).train(), net.net


def loops(b):
    "name -> (a function that trains an epoch, the model), those whose library is installed; the names of the others"
    wrapped = partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True))
    res = {'raw': raw(b, None), 'raw, fused': raw(b, True), 'fastai': fastai(b, Learner), 'fastai, fused': fastai(b, Learner, wrapped),
           'fastbench': fastai(b, FastLoop), 'fastbench, fused': fastai(b, FastLoop, fused_adamw)}
    res['raw, fused, one-cycle'] = raw(b, True, cycle=True)
    res |= {f'{k}, one-cycle': cycled(res[k][2]) for k in ('fastai, fused', 'fastbench, fused')}
    res['fastbench, fused, profiled'] = profiled(res['fastbench, fused'][2])
    missing = []
    for name, f in {'Accelerate, fused': accelerate, 'Lightning, fused': lightning, 'HF Trainer, fused': trainer}.items():
        try: res[name] = f(b)
        except ImportError: missing.append(name)
    return res, missing


def measure(loops, against, rounds, n):
    "name -> a pair a round, seconds a batch of this loop and of the one that it is set against, which ran beside it: first and last, or twice between"
    res, fresh, rng = {k: [] for k in against}, mlp().state_dict(), random.Random(0)
    def run(name):
        fit, model = loops[name][:2]
        model.load_state_dict(fresh)  # no loop gets further than another
        start = perf_counter()
        fit()
        return (perf_counter() - start)/n
    with open(os.devnull, 'w') as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        for i in range(rounds + 1):
            for k in rng.sample(list(against), len(against)):
                pairs = time_pairs(partial(run, k), partial(run, against[k]), 1, warm=0, seed=rng)
                if i: res[k] += pairs  # the first round warms up
    return res


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--pairs', type=int, default=15, help='rounds')
    parser.add_argument('--batches', type=int, default=400)
    parser.add_argument('--only', action='store_true', help='only what has a bar: ours with a fused optimizer, without and with the profiler')
    args = parser.parse_args()
    torch.set_num_threads(1)
    all_loops, missing = loops(batches(args.batches))
    plain, profiled = 'fastbench, fused', 'fastbench, fused, profiled'
    def reference(k): return plain if k == profiled else 'raw' + ', fused'*('fused' in k) + ', one-cycle'*('one-cycle' in k)
    against = {k: reference(k) for k in all_loops if not k.startswith('raw')}
    if args.only: against = {k: against[k] for k in (plain, profiled)}
    times = measure(all_loops, against, args.pairs, args.batches)

    def row(k): return [x/y for x, y in times[k]], [1e6*(x - y) for x, y in times[k]]
    print(f'torch {torch.__version__}, one thread, {args.pairs} rounds of 4 x {args.batches} batches each; medians, quartiles in brackets')
    print(f'{"loop":28}{"us a batch":>11}{"times":>8}{"":14}{"us above":>10}{"":15}against')
    for k in times:
        (r1, r2, r3), (a1, a2, a3) = (quantiles(o, n=4) for o in row(k))
        print(f'{k:28}{1e6*median(x for x, _ in times[k]):>11.0f}{r2:>8.2f} {f"[{r1:.2f}, {r3:.2f}]":13}{a2:>10.0f} {f"[{a1:.0f}, {a3:.0f}]":13} {against[k]}')
    if missing: print(f'not installed, left out: {", ".join(missing)}')

    same = args.only or all(torch.equal(a, b) for a, b in zip(all_loops['fastai'][1].parameters(), all_loops['fastbench'][1].parameters()))
    if not args.only: print(f'weights after all of it, fastbench and fastai: {"the same to the last bit" if same else "DIFFERENT"}')
    ok = same
    for what, value, bar in [('loop, times raw', median(row(plain)[0]), 1.15), ('loop, us a batch', median(row(plain)[1]), 70),
                             ('profiler, us a batch', median(row(profiled)[1]), 10)]:
        ok &= value <= bar
        print(f'{what}: {value:.{2 if bar < 2 else 0}f}, bar {bar}: {"reached" if value <= bar else "MISSED"}')
    sys.exit(0 if ok else 1)


if __name__ == '__main__': main()

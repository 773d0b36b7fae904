"""What the profilers of other loops cost: plain PyTorch, Accelerate, Hugging Face's Trainer, Lightning.

    pip install 'fastbench[trainer,lightning]'
    python benchmarks/loop_profilers.py

One process; epochs with and without the profiler there and back (`fastbench.compare.paired`), each loop on the same linear layer and the same batches. The cost is the median difference of the pairs; the quartiles beside it
show how quiet the machine was. A loop whose package is missing is left out.
Seconds are the processor's, of this process alone, so that a busy machine disturbs less. A fit also costs something once (counters of the machine before and after it), so each pair is of a short fit and one of four times
its batches: the difference of their costs is that of the batches alone, and what is left is the fit's.
Bar: 1% of a 10 ms step, which is 100 us a batch.
"""
import argparse
import logging
import os
import sys
import tempfile
import warnings
from functools import partial
from importlib.util import find_spec
from statistics import median, quantiles
from time import process_time

warnings.filterwarnings('ignore')

import torch
from torch import nn
from torch.utils.data import Dataset

from fastbench.compare.paired import time_pairs
from fastbench.loops.lit import LightningProfiler
from fastbench.loops.plain import profiling_steps
from fastbench.loops.trainer import TrainerProfiler

BS = 64


class Net(nn.Module):
    "A linear layer which gives its loss"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(64, 10)

    def forward(self, x, labels):
        logits = self.lin(x)
        return dict(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


class Batches(Dataset):
    "The same batch `n` times: what a loader does is not what is measured"
    def __init__(self, n):
        self.n, self.x, self.labels = n, torch.randn(BS, 64), torch.randint(0, 10, (BS,))
    def __len__(self): return self.n
    def __getitem__(self, i): return dict(x=self.x, labels=self.labels)


def loader(n): return torch.utils.data.DataLoader(Batches(n), batch_size=None)
def sgd(model): return torch.optim.SGD(model.parameters(), lr=.01)


def steps(model, opt, batches, backward=lambda loss: loss.backward()):
    for b in batches:
        backward(model(**b)['loss'])
        opt.step()
        opt.zero_grad()


def timed(f):
    t = process_time()
    f()
    return process_time() - t


def plain(n):
    model, dl = Net(), loader(n)
    opt = sgd(model)
    return _plain(model, opt, dl)


def _plain(model, opt, dl, **kwargs):
    def run(profiled):
        if not profiled: return timed(lambda: steps(model, opt, dl, **kwargs))
        with profiling_steps(dl, model, opt) as prof: return timed(lambda: steps(model, opt, prof.batches, **kwargs))
    return run


def accelerate(n):
    from accelerate import Accelerator
    acc, model = Accelerator(cpu=True), Net()
    model, opt, dl = acc.prepare(model, sgd(model), loader(n))
    return _plain(model, opt, dl, backward=acc.backward)


def trainer(n):
    from transformers import Trainer, TrainingArguments
    folder = tempfile.mkdtemp()
    args = TrainingArguments(folder, per_device_train_batch_size=1, num_train_epochs=1, report_to='none', use_cpu=True, disable_tqdm=True, save_strategy='no',
                             logging_strategy='no')
    t = Trainer(Net(), args, train_dataset=Batches(n), data_collator=lambda o: o[0])
    prof = TrainerProfiler()
    def run(profiled):
        if profiled: t.add_callback(prof)
        try: return timed(t.train)
        finally:
            if profiled: t.remove_callback(prof)
    return run


def lightning(n):
    import lightning.pytorch as pl
    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
        def training_step(self, b, i): return self.net(**b)['loss']
        def configure_optimizers(self): return sgd(self)
    module, dl, quiet = Lit(), loader(n), dict(logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
    def run(profiled):
        t = pl.Trainer(max_epochs=1, accelerator='cpu', callbacks=[LightningProfiler(part='net')]*profiled, **quiet)
        return timed(lambda: t.fit(module, dl))
    return run


LOOPS = dict(plain=(plain, 'torch'), accelerate=(accelerate, 'accelerate'), trainer=(trainer, 'transformers'), lightning=(lightning, 'lightning'))


def pairs(make, n, k):
    "k pairs of seconds: (without, with)"
    run = make(n)
    return time_pairs(partial(run, False), partial(run, True), k)


def costs(make, n, k):
    "Microseconds of a batch without the profiler; k costs of a batch with it, k of a fit in ms"
    short, long = pairs(make, n, k), pairs(make, 4*n, k)
    more = [((b2-a2) - (b1-a1))/(3*n) for (a1, b1), (a2, b2) in zip(short, long)]
    return 1e6*median(a for a, _ in long)/(4*n), [1e6*o for o in more], [1e3*(b-a - n*median(more)) for a, b in short]


def report(name, costs, bar, unit):
    "One line with its verdict: the median of `costs` against `bar`"
    lo, mid, hi = quantiles(costs, n=4)
    print(f'{name}: {mid:.2f} {unit}, bar {bar} {unit}: {"reached" if mid <= bar else "MISSED"} (quartiles {lo:.2f} to {hi:.2f})', flush=True)
    return mid <= bar


def quietly():
    "Trainer prints what it trained, Lightning what it found"
    logging.disable(logging.WARNING)
    if find_spec('transformers'):
        from transformers.trainer_callback import PrinterCallback
        PrinterCallback.on_log = lambda *args, **kwargs: None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--pairs', type=int, default=40)
    parser.add_argument('--batches', type=int, default=200)
    parser.add_argument('--loops', default=','.join(LOOPS), help='of ' + ', '.join(LOOPS))
    args = parser.parse_args()
    os.environ['HF_HUB_OFFLINE'] = '1'
    torch.set_num_threads(1)
    quietly()
    ok, n = True, args.batches
    for name in args.loops.split(','):
        make, package = LOOPS[name]
        if not find_spec(package):
            print(f'{name}: left out, {package} is not installed')
            continue
        bare, batch, fit = costs(make, n, args.pairs)
        print(f'{name}: a batch without the profiler: {bare:.0f} us; what the profiler costs a fit once: {median(fit):.0f} ms')
        ok &= report(f'{name}: cost of a batch', batch, 100, 'us')
    sys.exit(0 if ok else 1)


if __name__ == '__main__': main()

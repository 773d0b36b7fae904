"""fastxtend's profiler and ours in the situations in which a Learner is used: which of them go through.

    pip install --no-deps fastxtend
    python benchmarks/fastxtend_profiler.py

A linear layer on 256 made-up rows, on a CPU. fastxtend's `learn.profile` has two modes; each situation has a process of its own, since importing fastxtend replaces methods of fastai.
The bar: ours goes through everywhere.
"""
import subprocess
import sys

OURS, THEIRS = 'import fastbench.measure.profiler', 'from fastxtend.callback.profiler import ProfileMode'
PROFILERS = {'fastbench': (OURS, 'learn.profile()'), 'fastxtend, throughput': (THEIRS, "learn.profile(mode=ProfileMode.Throughput, plain=True)"),
             'fastxtend, simple': (THEIRS, "learn.profile(mode=ProfileMode.Simple, plain=True)")}
SITUATIONS = {'a fit': 'learn.fit(1)', 'gradient accumulation': 'learn.fit(1, cbs=GradientAccumulation(64))', 'lr_find': 'learn.lr_find(show_plot=False)',
              'validate': 'learn.validate()', 'get_preds': 'learn.get_preds()', 'a fit of one batch': 'learn.fit(1, cbs=ShortEpochCallback(pct=.05))'}
CODE = """
import warnings; warnings.filterwarnings('ignore')
import torch
from fastai.basics import *
from fastai.callback.all import *
before = Callback.__call__, Learner._call_one, Learner.all_batches
{load}
print('replaced', sum(a is not b for a, b in zip(before, (Callback.__call__, Learner._call_one, Learner.all_batches))))
rows = list(zip(torch.randn(256, 8), torch.randint(0, 2, (256,))))
learn = Learner(DataLoaders.from_dsets(rows, rows, bs=16, device='cpu'), nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss())
{profile}
with learn.no_bar(), learn.no_logging(): {act}
print('went through')
"""


def outcome(load, profile, act):
    "(methods of fastai that the import replaced, how it went)"
    got = subprocess.run([sys.executable, '-c', CODE.format(load=load, profile=profile, act=act)], capture_output=True, text=True)
    if 'No module named' in got.stderr: return None, got.stderr.strip().splitlines()[-1]
    replaced = next((int(o.split()[1]) for o in got.stdout.splitlines() if o.startswith('replaced')), None)
    return replaced, 'went through' if 'went through' in got.stdout else got.stderr.strip().splitlines()[-1].strip()


def main():
    failed = 0
    for name, (load, profile) in PROFILERS.items():
        for what, act in SITUATIONS.items():
            replaced, how = outcome(load, profile, act)
            if what == 'a fit': print(f'{name}: {how if replaced is None else f"importing it replaces {replaced} methods of fastai"}')
            if replaced is None: break
            print(f'  {what:22} {how}')
            failed += name == 'fastbench' and how != 'went through'
    print('bar, ours goes through everywhere: ' + ('missed' if failed else 'reached'))
    return bool(failed)


if __name__ == '__main__': sys.exit(main())

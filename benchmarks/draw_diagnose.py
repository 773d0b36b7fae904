"""Does `learn.diagnose_input()` foretell what a remedy gives? Six bottlenecks are planted, and each remedy is then really used.

    python benchmarks/draw_diagnose.py [--seconds 15] [--rounds 3] [--only NAME,...]

Each line: the row of the diagnosis that has most of the wait, the step that was foretold and the step with the remedy. All six in turns, some rounds of them, since a machine may be twice as fast a minute later; the median of a bottleneck's rounds counts. Bar: within 15%, for each of the six.
"""
import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

os.environ.setdefault('OMP_NUM_THREADS', '1')
warnings.filterwarnings('ignore')

import torch
from fastai.data.block import DataBlock
from fastai.data.transforms import RandomSplitter, get_image_files, parent_label
from fastai.learner import Learner
from fastai.vision.augment import RandomResizedCrop, Resize
from fastai.vision.core import PILImage
from fastai.vision.data import CategoryBlock, ImageBlock
from fasttransform import Transform
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn

import fastbench.draw.diagnose  # adds Learner.diagnose_input
from fastbench.draw import diagnose
from fastbench.draw.pace import same_order, step_pace
from fastbench.train.rehearsal import model_kept, rng_kept


def pictures(folder, n, side):
    "JPEGs of `side` pixels, cut from scikit-learn's two photographs"
    photos = [Image.fromarray(o) for o in load_sample_images().images]
    for i in range(n):
        to = Path(folder)/f'{side}'/'ab'[i%2]/f'{i}.jpg'
        to.parent.mkdir(parents=True, exist_ok=True)
        x, y = 7*i % 100, 5*i % 60
        photos[i%2].crop((x, y, x+540, y+360)).resize((side*3//2, side)).save(to, quality=90)
    return Path(folder)/f'{side}'


class SlowDisk(Transform):
    "A disk that takes 6 ms for a file"
    order = -1
    def encodes(self, o:Path):
        time.sleep(.006)
        return o


class SlowItem(Transform):
    "5 ms of Python for an image"
    def encodes(self, o:PILImage):
        end = time.thread_time() + .005
        while time.thread_time() < end: pass
        return o


class Heavy(Transform):
    "20 ms of work without chance: detect, crop, align"
    order = 0
    def encodes(self, o:PILImage):
        end = time.thread_time() + .02
        while time.thread_time() < end: pass
        return o.resize((96, 96), Image.BILINEAR)


class SlowCollate(Transform):
    "80 ms for a batch, before it is collated"
    def encodes(self, o:list):
        time.sleep(.08)
        return o
    def __call__(self, o, **kwargs): return self.encodes(o)


def net(width): return nn.Sequential(nn.Conv2d(3, width, 5, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


def learner(folder, first=(), items=(), collate=(), width=8, workers=1, crop=RandomResizedCrop(64, min_scale=.35)):
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label, splitter=RandomSplitter(.1, seed=1), item_tfms=[*items, crop])
    block.type_tfms[0][:0] = first
    dls = block.dataloaders(folder, bs=16, num_workers=workers, device='cpu', before_batch=list(collate) or None)
    return Learner(dls, net(width), loss_func=nn.CrossEntropyLoss())


def planted(folder):
    "name -> (a Learner, the remedy that is to be foretold)"
    small, large = pictures(folder, 640, 200), pictures(folder, 320, 1000)
    workers, threads, cache = 'a worker for each core', 'decoding by threads', 'a cache of what is the same each time'
    return dict(reading=(lambda: learner(small, first=[SlowDisk()]), workers), decoding=(lambda: learner(large), threads), item=(lambda: learner(small, items=[SlowItem()]), workers),
                collate=(lambda: learner(small, collate=[SlowCollate()]), workers), preparing=(lambda: learner(small, items=[Heavy()], workers=0), cache),
                computing=(lambda: learner(small, width=96, workers=1), workers))


def check(name, make, remedy, seconds):
    "How far the prediction is off, as a share of the truth"
    learn = make()
    found = learn.diagnose_input(seconds)
    row = next((r for r in found.remedies.rows if r['name'] == remedy), None)
    if row is None or row['step'] is None:
        print(f"{name}: {remedy} was not foretold: {row and row['why']}")
        return float('inf')
    waits = max(found.stalls.rows, key=lambda r: r['more'])
    dl = next(o for o in diagnose.remedies if o.name == remedy).make(learn).train
    with rng_kept(torch.device('cpu')), model_kept(learn.model):
        skip = 1 + dl.fake_l.num_workers*dl.fake_l.prefetch_factor
        true = step_pace(learn, same_order(dl), seconds/4, skip).seconds
    off = row['step']/true - 1
    print(f"{name}: {waits['of'].split(':')[0]} {waits['share']:.0%}; {remedy}: {1000*row['step']:.1f} ms foretold, {1000*true:.1f} ms true, {off:+.0%}", flush=True)
    return off


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seconds', type=float, default=15, help='of a diagnosis')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--only', default='', help='names, with commas')
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        todo = {k: v for k, v in planted(folder).items() if not args.only or k in args.only.split(',')}
        rounds = [{k: check(k, *v, args.seconds) for k, v in todo.items()} for _ in range(args.rounds)]
    off = {k: median(r[k] for r in rounds) for k in todo}
    met = [abs(o) <= .15 for o in off.values()]
    print('medians:', ', '.join(f'{k} {o:+.0%}' for k, o in off.items()))
    print(f'{sum(met)} of {len(met)} within 15%: the bar is {"met" if all(met) else "MISSED"}')
    sys.exit(0 if all(met) else 1)


if __name__ == '__main__': main()

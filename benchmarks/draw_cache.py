"""An epoch from a cache on one core, against the loader of fastai on the JPEG files, and against bare reading and cropping.

    OMP_NUM_THREADS=1 python benchmarks/draw_cache.py

One process, in turns, there and back (`fastbench.compare.paired`). Images: JPEGs of about 400x350 pixels and 78 KB, to 128 pixels by `RandomResizedCrop(128, min_scale=.35)` and `FlipItem`, then `IntToFloatTensor` and `Normalize`; no workers, one
thread. fastai's side is that pipeline as it is. Ours is `cached(dls, whole=True, size=160)`, as it is and with `channels_last=True`, and for information a cache of whole images, and one whose items are made one by one (`whole=False`: the very batches of fastai). The bare side
maps a file of images of 160x160 pixels, slices a crop of each image, resizes it with PyTorch's kernel and stacks them: no mirror images, floats, labels or order.
Last, two threads that cut batches against none, where a device is busy for 10 ms with each batch and the processor waits for it (a stand-in for a GPU: the processor sleeps); for information.
Bars: a cached epoch 25 times as fast as fastai's; at most 3 times as long as the bare one.
"""
import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import median
from time import sleep

os.environ.setdefault('OMP_NUM_THREADS', '1')
warnings.filterwarnings('ignore')

import numpy as np
import torch
import torch.nn.functional as F
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.transforms import EndSplitter, Normalize, get_image_files, parent_label
from fastai.vision.augment import FlipItem, RandomResizedCrop
from fastai.vision.core import imagenet_stats
from fastai.vision.data import ImageBlock
from PIL import Image

from fastbench.compare.paired import at_least, compare_pairs, time_pairs
from fastbench.draw.cached import cached
from fastbench.draw.chance import uniforms
from fastbench.draw.crop import random_boxes


def make_jpegs(folder, n):
    "Pictures of smooth areas and fine grain, about 78 KB each"
    rng, sizes = np.random.default_rng(0), []
    for i in range(n):
        h, w = rng.integers(330, 371), rng.integers(380, 421)
        smooth = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype='uint8')).resize((w, h), Image.BICUBIC)
        x = np.asarray(smooth) + rng.normal(0, 22, (h, w, 1)) + rng.normal(0, 4, (h, w, 3))
        path = folder/'ab'[i % 2]/f'{i}.jpg'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x.clip(0, 255).astype('uint8')).save(path, quality=88)
        sizes.append(path.stat().st_size)
    return np.mean(sizes)


def fastai_dls(folder, bs):
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label, splitter=EndSplitter(.05),
                      item_tfms=[RandomResizedCrop(128, min_scale=.35), FlipItem()], batch_tfms=Normalize.from_stats(*imagenet_stats, cuda=False))
    return block.dataloaders(folder, bs=bs, num_workers=0, device='cpu')


def epoch(dl, busy=0):
    for _ in dl: sleep(busy)


class Bare:
    "Slices of a mapped file, resized and stacked"
    def __init__(self, folder, n, bs):
        path = folder/'bare.bin'
        np.random.default_rng(0).integers(0, 255, (n, 160, 160, 3), dtype='uint8').tofile(path)
        self.x, self.n, self.bs, self.key = np.memmap(path, np.uint8, 'c', shape=(n, 160, 160, 3)), n, bs, 0

    def __call__(self):
        self.key += 1
        boxes = random_boxes(uniforms(self.key, range(self.n), 40).reshape(self.n, 10, 4), 160, 160, .35)
        for i in range(0, self.n - self.n % self.bs, self.bs):
            torch.cat([F.interpolate(torch.from_numpy(self.x[j:j+1, t:t+h, l:l+w]).permute(0, 3, 1, 2), (128, 128), mode='bilinear', antialias=True)
                       for j, (t, l, h, w) in enumerate(boxes[i:i+self.bs].tolist(), i)])


def report(name, pairs, n, bar=None, inverse=False):
    "One line with its verdict"
    v = compare_pairs(pairs)
    reached = bar and at_least(pairs, 1/bar if inverse else bar)
    verdict = '' if bar is None else f', bar {bar}: {({True: "reached", False: "MISSED"}).get(reached, "these pairs cannot tell")}'
    rates = ' -> '.join(f'{n/median(o[i] for o in pairs):,.0f}' for i in (0, 1))
    lo, hi = (f'{1/o:.2f}' for o in v.speedup[:0:-1]) if inverse else (f'{o:.1f}' for o in v.speedup[1:])
    print(f'{name}: {rates} images/s, {1/v.speedup[0] if inverse else v.speedup[0]:.2f} times as {"long" if inverse else "fast"} [{lo}, {hi}]{verdict}', flush=True)
    return bar is None or bool(reached)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--pairs', type=int, default=6)
    parser.add_argument('--images', type=int, default=800)
    parser.add_argument('--bs', type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as d:
        d = Path(d)
        kb = make_jpegs(d/'jpegs', args.images)/1e3
        dls = fastai_dls(d/'jpegs', args.bs)
        n = len(dls.train)*args.bs
        print(f'{args.images} JPEGs of {kb:.0f} KB; epochs of {n} images in batches of {args.bs}, one thread', flush=True)
        def ours(busy=0, **kwargs):
            dl = cached(dls, d/'caches', workers=0, **kwargs).train
            return lambda: epoch(dl, busy)
        fast, last = (ours(whole=True, size=160, channels_last=o) for o in (False, True))
        def against(f): return time_pairs(lambda: epoch(dls.train), f, args.pairs)
        ok = report('cached at 160 pixels, whole batches, against fastai', against(fast), n, 25)
        ok &= report('the same in channels-last memory, against fastai', against(last), n, 25)
        bare = Bare(d, n, args.bs)
        ok &= report('the same, against a bare memory map and crop', time_pairs(bare, fast, 3*args.pairs), n, 3, inverse=True)
        report('cached whole images, whole batches, against fastai', against(ours(whole=True)), n)
        report('cached whole images, one by one, against fastai', against(ours()), n)
        report('cached at 160 pixels, one by one, against fastai', against(ours(size=160)), n)
        report('cached at 160 pixels as Parquet, whole batches, against fastai', against(ours(whole=True, size=160, store='parquet')), n)
        alone, threads = (ours(.01, whole=True, size=160, threads=o) for o in (0, 2))
        report('beside a device that is busy for 10 ms a batch, cut by two threads against none', time_pairs(alone, threads, args.pairs), n)
    sys.exit(0 if ok else 1)


if __name__ == '__main__': main()

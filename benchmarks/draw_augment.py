"""Augmentation of whole batches on one core: ours, each image its own, against the default batch transforms of fastai.

    OMP_NUM_THREADS=1 python benchmarks/draw_augment.py

One process, in turns, there and back (`fastbench.compare.paired`), on the same batch of bytes, with the same size of the results. fastai's side is `IntToFloatTensor`, `aug_transforms()` (flip, warp, rotation, zoom, brightness,
contrast) and `Normalize`; for the second bar with `RandomErasing` added. Ours is a random resized crop, flip and `Normalize`, for the second bar with the same erasing, each image its own; and for information, all that `aug_transforms` does, and `Saturation` and `Hue`.
Bars: crop, flip and normalise 9 times as fast; with erasing 4 times. Bytes come as decoders and caches have them, the channels of a pixel side by side; `--layout contiguous` is the layout of `ToTensor`.
"""
import argparse
import os
import sys
import warnings
from functools import partial
from statistics import median

os.environ.setdefault('OMP_NUM_THREADS', '1')
warnings.filterwarnings('ignore')

import torch
from fastai.data.transforms import IntToFloatTensor, Normalize
from fastai.torch_core import TensorImage
from fastai.vision.augment import Hue, RandomErasing, Saturation, aug_transforms
from fastai.vision.core import imagenet_stats
from fasttransform import Pipeline

from fastbench.compare.paired import at_least, compare_pairs, time_pairs
from fastbench.draw.batch import batch_augment
from fastbench.draw.colour import BatchColour


def fastai_pipe(size, **kwargs): return Pipeline([IntToFloatTensor(), *aug_transforms(size=size, **kwargs), Normalize.from_stats(*imagenet_stats, cuda=False)], split_idx=0)


def our_pipe(size, **kwargs): return Pipeline(batch_augment(size, stats=imagenet_stats, **kwargs), split_idx=0)


def report(name, pairs, n, bar=None):
    "One line with its verdict"
    v = compare_pairs(pairs)
    reached = bar and at_least(pairs, bar)
    verdict = '' if bar is None else f', bar {bar}: {({True: "reached", False: "MISSED"}).get(reached, "these pairs cannot tell")}'
    a, b = (1e3*median(o[i] for o in pairs) for i in (0, 1))
    print(f'{name}: {a:.1f} -> {b:.1f} ms a batch ({n/b*1e3:,.0f} images/s), {v.speedup[0]:.1f} times as fast [{v.speedup[1]:.1f}, {v.speedup[2]:.1f}]{verdict}', flush=True)
    return bar is None or bool(reached)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--pairs', type=int, default=31)
    parser.add_argument('--bs', type=int, default=64)
    parser.add_argument('--side', type=int, default=160, help='of the images of the batch')
    parser.add_argument('--size', type=int, default=128, help='of the results')
    parser.add_argument('--layout', choices=['interleaved', 'contiguous'], default='interleaved')
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randint(0, 256, (args.bs, args.side, args.side, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    theirs = TensorImage(x.contiguous())
    ours = TensorImage(x) if args.layout == 'interleaved' else theirs
    print(f'batches of {args.bs}x3x{args.side}x{args.side} bytes to {args.size} pixels, one thread, {args.layout}')
    def run(pipe, b): pipe(b)
    def pairs(a, b): return time_pairs(partial(run, a, theirs), partial(run, b, ours), args.pairs)
    ok = report('crop, flip, normalise', pairs(fastai_pipe(args.size), our_pipe(args.size, min_scale=.35)), args.bs, 9)
    ok &= report('and erase a rectangle', pairs(fastai_pipe(args.size, xtra_tfms=RandomErasing()), our_pipe(args.size, min_scale=.35, erase=.5)), args.bs, 4)
    ok &= report('and a hole (cutout)', pairs(fastai_pipe(args.size, xtra_tfms=RandomErasing()), our_pipe(args.size, min_scale=.35, cutout=args.size//4)), args.bs, 4)
    every = dict(min_scale=.35, max_rotate=10, max_zoom=1.1, max_warp=.2, max_lighting=.2)
    report('crop and all of aug_transforms', pairs(fastai_pipe(args.size), our_pipe(args.size, **every)), args.bs)
    colours = [Pipeline([IntToFloatTensor(), *o], split_idx=0) for o in ([Saturation(.2), Hue(.1)], [BatchColour(0, 0, .2, .1)])]
    report(f'saturation and hue, at {args.side} pixels', pairs(*colours), args.bs)
    sys.exit(0 if ok else 1)


if __name__ == '__main__': main()

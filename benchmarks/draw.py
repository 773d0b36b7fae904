"""What it costs to draw a batch of images: decoding alone, whole loaders beside fastai's, and a training with threads.

    pip install 'fastbench[jpeg]'
    python benchmarks/draw.py decode
    python benchmarks/draw.py rows
    python benchmarks/draw.py threads
    python benchmarks/draw.py loader
    python benchmarks/draw.py beside
    python benchmarks/draw.py accuracy

JPEGs of about 400x350 pixels and 78 KB, made from the two photographs that come with scikit-learn. Everything in one process, in turns, there and back (`fastbench.compare.paired.time_rounds`); a ratio is the median of the rounds' ratios, with their quartiles.

decode: one thread, from bytes in memory to the middle of the image at 128 pixels, as `Resize(128)` has it; seconds are the processor's. Bar: this runs at 0.85 or more of the rate of a bare decode at half size, the fastest that is installed; and the mean difference from Pillow's bilinear result is at most 5/255.
rows: one thread, random crops of `RandomResizedCrop(128)`, with the rows below a crop decoded and without. No bar; the pixels must be the same.
threads: every decoder in one, four and as many threads as there are cores, and where there is a GPU also while it multiplies matrices. No bar.
loader: an epoch with 2 threads, beside an epoch of fastai's loader with 2 worker processes. Bar: 4 times as fast, with fastai's default augmentation (`aug_transforms`) and without. Two crops are shown: `Resize`, for which every image can be halved,
and `RandomResizedCrop`, for which only the larger crops can. The default augmentation is `aug_transforms` on fastai's side and `batch_augment` with the same distributions on ours. Where another program
has a core, the processor's seconds for an image say more than the clock: both are printed, the verdict is by the clock.
beside: how much longer a step takes that is bound by Python (2,000 small operations, as where a GPU computes faster than Python launches) while a loader draws the next batch: with its threads in the process of the training, and in one
of their own. No bar. The loader needs processor time in both cases: the difference between them is Python's lock.
accuracy: `photos-xresnet18` at 64 pixels trained to its end as it is and with 2 loader threads, 5 runs of each in turns, each pair with a seed of its own (`fastbench.compare.ab`). Bars: the median run with threads waits for less than 2% of its step;
and its accuracy is that of the other, within 3 points: the 90% interval of the mean difference (paired t, so that two one-sided tests hold at 5%) lies inside.
"""
import argparse
import io
import os
import resource
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles, stdev
from time import perf_counter, process_time

if 'accuracy' not in sys.argv: os.environ.setdefault('OMP_NUM_THREADS', '1')  # per core
warnings.filterwarnings('ignore')

import numpy as np
import torch
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.transforms import RandomSplitter, ToTensor, get_image_files, parent_label
from fastai.torch_core import set_seed
from fastai.vision.augment import RandomResizedCrop, Resize, aug_transforms
from fastai.vision.data import ImageBlock
from PIL import Image
from scipy.stats import t as student_t
from sklearn.datasets import load_sample_images

from fastbench.compare.ab import ab
from fastbench.compare.paired import time_rounds
from fastbench.draw.batch import batch_augment
from fastbench.draw.cut import CropPlan, cut
from fastbench.draw.decode import decoders, read_header
from fastbench.draw.fast import fast_images
from fastbench.draw.fastest import choose_decoder
from fastbench.machine.environment import worker_cores
from fastbench.runs.store import load

SIDE = 128


def jpeg(photos, seed, size=(400, 350), least=76_000):
    "A piece of a photograph at the lowest quality at which it has about 78 KB"
    rng, im = np.random.default_rng(seed), photos[seed % len(photos)]
    w, h = size
    k, x, y = .7 + .3*rng.random(), *rng.random(2)
    k = k*min(im.width/w, im.height/h)
    x, y = x*(im.width - w*k), y*(im.height - h*k)
    im = im.resize(size, Image.Resampling.BICUBIC, box=(x, y, x + w*k, y + h*k))
    for quality in (88, 91, 93, 95, 96, 97, 98):
        f = io.BytesIO()
        im.save(f, 'JPEG', quality=quality)
        if f.tell() >= least: break
    return f.getvalue()


def jpegs(n):
    photos = [Image.fromarray(o) for o in load_sample_images().images]
    return [jpeg(photos, i) for i in range(n)]


def ratio(times, a, b):
    "How many times as fast b is: median and quartiles"
    all = [x/y for x, y in zip(times[a], times[b])]
    return median(all), quantiles(all, n=4)


def verdict(name, found, bar, unit='times'):
    got, (lo, _, hi) = found
    print(f'{name}: {got:.3g} {unit}, bar {bar}: {"reached" if got >= bar else "MISSED"} (quartiles {lo:.3g} to {hi:.3g})', flush=True)
    return got >= bar


def per_second(times, n): return {k: round(n/median(v)) for k, v in times.items()}


def bench_decode(args):
    data, choice = jpegs(args.images), choose_decoder(again=True)
    heads, out = [read_header(o) for o in data], np.empty((SIDE, SIDE, 3), 'uint8').transpose(2, 0, 1)
    print(f'{len(data)} JPEGs of {np.mean([o.width for o in heads]):.0f}x{np.mean([o.height for o in heads]):.0f} and {np.mean([len(o) for o in data])/1e3:.0f} KB; decoder: {choice}')
    plan = CropPlan([Resize(SIDE), ToTensor()], 1)
    crops = [plan.draw(o.width, o.height, None) for o in heads]
    def bare(name):
        def run():
            for o in data: decoders[name].decode(o, 2, False)
        return run
    def ours():
        for o, c in zip(data, crops): cut(o, read_header(o), c, out, choice.decoder)
    def pillow():
        for o, c in zip(data, crops): cut(o, read_header(o), c, out, exact=True)
    scaled = [o.name for o in decoders.values() if 2 in o.divisors and not o.missing()]
    times = time_rounds({**{f'bare {o}': bare(o) for o in scaled}, 'ours': ours, 'Pillow': pillow}, args.rounds, clock=process_time)
    print('images a second:', per_second(times, len(data)))
    fastest = min((o for o in times if o.startswith('bare')), key=lambda o: median(times[o]))
    ok = verdict(f'decode and resize to {SIDE} px against {fastest}', ratio(times, fastest, 'ours'), .85)
    far, want = [], np.empty_like(out)
    for o, h, c in zip(data, heads, crops):
        cut(o, h, c, out, choice.decoder)
        cut(o, h, c, want, exact=True)
        far.append(np.abs(out.astype(int) - want).mean())
    print(f'mean difference from Pillow: {np.mean(far):.2f} of 255, of the farthest image {max(far):.2f}, bar 5: {"reached" if max(far) <= 5 else "MISSED"}')
    return ok and max(far) <= 5


def bench_rows(args):
    data, decoder, ok = jpegs(args.images), choose_decoder(again=True).decoder, True
    heads = [read_header(o) for o in data]
    whole = [o._replace(height_at=0) for o in heads]  # as of a file that cannot be cut short
    for least in (.08, .35):
        plan, rng = CropPlan([RandomResizedCrop(SIDE, min_scale=least), ToTensor()], 0), Random(0)
        crops = [plan.draw(o.width, o.height, rng) for o in heads]
        def drawn(heads):
            out = np.empty((len(data), SIDE, SIDE, 3), 'uint8').transpose(0, 3, 1, 2)
            for o, h, c, x in zip(data, heads, crops, out): cut(o, h, c, x, decoder)
            return out
        times = time_rounds(dict(whole=lambda: drawn(whole), needed=lambda: drawn(heads)), args.rounds, clock=process_time)
        got, (lo, _, hi) = ratio(times, 'whole', 'needed')
        same = np.array_equal(drawn(whole), drawn(heads))
        ok &= same
        print(f'RandomResizedCrop({SIDE}, min_scale={least}), {decoder.name}: {got:.3g} times as fast without the rows below ({lo:.3g} to {hi:.3g}); same pixels: {"yes" if same else "NO"}', flush=True)
    return ok


def bench_threads(args):
    "Print images a second of each decoder: nvJPEG serves all threads at once, so that more of them hardly help"
    data, gpu = jpegs(args.images), torch.cuda.is_available()
    big = torch.randn(8192, 8192, device='cuda') if gpu else None
    def rate(decoder, threads, busy=False):
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(60*busy): big @ big
            start = perf_counter()
            for _ in pool.map(lambda o: decoder.decode(o, 2 if 2 in decoder.divisors else 1, False), data): pass
            took = perf_counter() - start
        if gpu: torch.cuda.synchronize()
        return round(len(data)/took)
    for decoder in (o for o in decoders.values() if not o.missing()):
        rate(decoder, 1)
        for threads in sorted({1, 4, worker_cores()}):
            rates = [rate(decoder, threads) for _ in range(args.rounds)]
            beside = f', {median(rate(decoder, threads, True) for _ in range(args.rounds)):g} while the GPU is busy' if gpu else ''
            print(f'{decoder.name}, {threads} thread{"s"*(threads > 1)}: {median(rates):g} images a second{beside}', flush=True)
    return True


def folder_of(data, path):
    for i, o in enumerate(data):
        fn = Path(path)/f'kind{i % 10}'/f'{i:05}.jpg'
        fn.parent.mkdir(exist_ok=True)
        fn.write_bytes(o)
    return path


def aug_ours(): return batch_augment(max_rotate=10., max_zoom=1.1, max_warp=.2, max_lighting=.2)  # what `aug_transforms` does


def make(path, crop, batch_tfms, workers, bs=64):
    set_seed(1)
    block = DataBlock(blocks=(ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label, splitter=RandomSplitter(.1, seed=1), item_tfms=crop,
                      batch_tfms=batch_tfms)
    return block.dataloaders(path, bs=bs, num_workers=workers, device=torch.device('cpu'))


def processor_seconds():
    "Of this process and of the workers that it waited for"
    return sum(o.ru_utime + o.ru_stime for o in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def drained(dl, spent):
    "An epoch, and what it took of all cores"
    def run():
        start = processor_seconds()
        for b in dl: pass
        spent.append(processor_seconds() - start)
    return run


def decoded(data, decoder, threads):
    "Decode all at half size, and do nothing else"
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda i: [decoder.decode(o, 2, False) for o in data[i::threads]], range(threads)): pass


def bench_loader(args):
    ok = True
    with tempfile.TemporaryDirectory() as tmp:
        data = jpegs(args.images)
        path = folder_of(data, tmp)
        for name, crop in (('Resize', Resize(SIDE)), ('RandomResizedCrop(min_scale=.35)', RandomResizedCrop(SIDE, min_scale=.35))):
            for aug in (False, True):
                dls = make(path, crop, aug_transforms() if aug else None, args.workers)
                fast = fast_images(make(path, crop, aug_ours() if aug else None, args.workers), threads=args.workers)
                n = len(dls.train)*dls.train.bs
                bare = partial(decoded, data[:n], fast.train.choice.decoder, args.workers)
                spent = dict(fastai=[], ours=[])
                work = dict(fastai=drained(dls.train, spent['fastai']), ours=drained(fast.train, spent['ours']), bare=bare)
                times = time_rounds(work, args.rounds)
                what = f'{name}, {"with default augmentation" if aug else "without augmentation"}'
                print(f'{what}: images a second:', per_second(times, n), '; ms of a core for an image:', {k: round(1e3*median(v)/n, 2) for k, v in spent.items()})
                most, _ = ratio(times, 'fastai', 'bare')
                print(f'  decoding alone, at half size, in {args.workers} threads: {most:.2f} times as fast as fastai: no loader that decodes is faster')
                ok &= verdict(f'{what}, {args.workers} threads against fastai with {args.workers} workers', ratio(times, 'fastai', 'ours'), 4)
    return ok


def bench_beside(args):
    x = torch.zeros(8)
    def step():
        start = perf_counter()
        for _ in range(2000): x.add_(1)
        return perf_counter() - start
    def beside(dl): return lambda: median(step() for _ in dl)
    with tempfile.TemporaryDirectory() as tmp:
        dls = make(folder_of(jpegs(args.images), tmp), Resize(SIDE), None, 0)
        ways = {(n, o): fast_images(dls, threads=n, processes=o).train for n in (1, args.workers) for o in (0, 1)}
        times = time_rounds(dict(alone=lambda: median(step() for _ in range(9))) | {k: beside(dl) for k, dl in ways.items()}, args.rounds)
    print(f'a step alone: {1e3*median(times["alone"]):.1f} ms')
    for n, o in ways:
        got, (lo, _, hi) = ratio(times, (n, o), 'alone')
        print(f'beside {n} thread{"s"*(n > 1)} of {"another" if o else "its own"} process: {got:.2f} times as long ({lo:.2f} to {hi:.2f})', flush=True)
    return True


def equivalent(differences, margin, level=.9):
    "Mean difference, its interval, and whether all of that lies within the margin"
    n = len(differences)
    half = float(student_t(n-1).ppf((1+level)/2))*stdev(differences)/n**.5
    m = mean(differences)
    return m, (m-half, m+half), -margin < m-half and m+half < margin


def bench_accuracy(args):
    changes = dict(loader='threads', workers=args.workers)
    with tempfile.TemporaryDirectory() as tmp:
        ab('photos-xresnet18', pairs=args.rounds, early=False, folder=tmp, device='cpu', changes=changes, both={k: v for k in ('epochs', 'sample') if (v := getattr(args, k))}, tell=told)
        runs = [load(o) for o in sorted(Path(tmp).glob('*.json'))]
    before, after = ({r.repeat: r for r in runs if (r.recipe['loader'] == 'threads') == o} for o in (False, True))
    waits = [r.phases.mean('train', 'draw')/r.phases.mean('train', 'step') for r in after.values()]
    for k in sorted(before): print(f'seed {before[k].recipe["seed"]}/{after[k].recipe["seed"]}, pair {k}: accuracy {before[k].figures.accuracy:.4f} -> {after[k].figures.accuracy:.4f}')
    mid, (lo, hi), same = equivalent([after[k].figures.accuracy - before[k].figures.accuracy for k in sorted(before)], args.margin)
    said = 'reached' if same else 'MISSED' if lo > args.margin or hi < -args.margin else 'these runs cannot tell'
    print(f'accuracy with threads: {100*mid:+.2f} points ({100*lo:+.2f} to {100*hi:+.2f}, 90%), bar: within {100*args.margin:g}: {said}')
    short = median(waits) < .02
    print(f'draw with threads: {median(waits):.2%} of the step ({min(waits):.2%} to {max(waits):.2%}), bar 2%: {"reached" if short else "MISSED"}')
    return same and short


def told(d):
    if "epoch" not in d: print({k: v for k, v in d.items() if isinstance(v, (str, int, float))}, file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('part', choices=['decode', 'rows', 'threads', 'loader', 'beside', 'accuracy'])
    parser.add_argument('--images', type=int, help='default: 96 to decode and for rows, 256 for threads, 640 to load, 360 for beside')
    parser.add_argument('--rounds', type=int, help='default: 30 to decode, 12 for rows and beside, 3 for threads, 4 to load, 5 pairs to train')
    parser.add_argument('--workers', type=int, default=2, help='worker processes of fastai, threads of ours')
    parser.add_argument('--epochs', type=int, help='of each training; default: those of the recipe')
    parser.add_argument('--sample', type=float, help='share of the images, to try it; default: all')
    parser.add_argument('--margin', type=float, default=.03, help='difference in accuracy that does not matter, as a share')
    args = parser.parse_args()
    run, images, rounds = dict(decode=(bench_decode, 96, 30), rows=(bench_rows, 96, 12), threads=(bench_threads, 256, 3), loader=(bench_loader, 640, 4), beside=(bench_beside, 360, 12), accuracy=(bench_accuracy, 0, 5))[args.part]
    args.images, args.rounds = args.images or images, args.rounds or rounds
    if args.part != 'accuracy': torch.set_num_threads(1)
    sys.exit(0 if run(args) else 1)


if __name__ == '__main__': main()

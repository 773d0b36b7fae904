"""What an epoch of a transformer computes: random padded batches as transformers' Trainer makes them, against sorted and packed ones.

    python benchmarks/text_compute.py [--arch distilbert-base-uncased] [--rounds 6] [--seconds 120] [--texts 25000] [--threads 2]

Lengths of IMDB's reviews, cut at 512 tokens; random weights (they cost what published ones cost), training mode, dropout as published, fp32, forward and backward of batches of 16 texts (packed: as
many tokens as 16 texts have on average). What a batch costs depends on its lengths, so a round draws few batches that stand for all: the order of an epoch is cut into as many parts as a candidate
has batches in a round, batches ranked by what they cost (a part's middle, moved by the round's number), one of each part is timed, and the mean of the parts times the number of batches is an
epoch. Of a batch every second text is computed, padded to the width of all: work grows with the texts, and what
does not (gradients set to zero, the embedding's own) counts twice on each side, against the faster one. Candidates take turns within a round, in drawn order (`fastbench.compare.paired`); ratios are of one round, judged as pairs of Runs are. One process. It ends with the round in which `--seconds` are over,
after two at least. Bar: the last at least 4 times as fast as random batches with the same regularisation (`values`: dropout of rows of the values, of the same strength;
`weights` is dropout as published; `kept`: with `KeepMemory`, whose first batch of a fit, which fetches the memory, is not timed; `onednn`: with `OneDNNLinear`).
"""
import argparse
import itertools
import os
import random
import time
import warnings
from statistics import mean, median

os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')  # threads that wait do not spin: on busy cores that takes the time of those that work
warnings.filterwarnings('ignore')

import numpy as np
import torch
from transformers import AutoTokenizer  # noqa: F401  (its import takes its time here, not in a round)

from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastcore.basics import noop

from fastbench.callback.cpu.keepmemory import KeepMemory
from fastbench.callback.cpu.onednn import OneDNNLinear
from fastbench.compare.paired import at_least, compare_pairs, time_rounds
from fastbench.text.hf import hf_model
from fastbench.text.order import plan_epoch
from fastbench.text.packed import fast_attention, packed_call
from fastbench.text.reviews import review_lengths


SHARE = 2  # of the texts of a batch, every second is computed


def padded(n, vocab):
    ids, mask = (torch.zeros(len(n[::SHARE]), int(n.max()), dtype=torch.long) for _ in range(2))
    for i, k in enumerate(n[::SHARE].tolist()): ids[i, :k], mask[i, :k] = torch.randint(5, vocab, (k,)), 1
    return dict(input_ids=ids, attention_mask=mask)


def packed(n, vocab):
    n = n[::SHARE].tolist()
    return dict(input_ids=torch.randint(5, vocab, (1, sum(n))), position_ids=torch.cat([torch.arange(k) for k in n])[None],
                cu_seq_lens=torch.tensor([0, *n]).cumsum(0).int())


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--arch', default='distilbert-base-uncased')
    p.add_argument('--rounds', type=int, default=6)
    p.add_argument('--seconds', type=float, default=120, help='begin no round that would end later')
    p.add_argument('--texts', type=int, default=25_000)
    p.add_argument('--threads', type=int, default=os.cpu_count())
    a = p.parse_args()
    began = time.perf_counter()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    random.seed(0)
    words = np.random.default_rng(1).permutation(review_lengths(a.texts))
    lengths = np.minimum(words*1.15 + 2, 512).astype(int)  # tokens of a word, and the special ones
    hf = hf_model(a.arch, pretrained=False, n_out=2).hf.train()
    fast_attention(hf)
    vocab, rng = hf.config.vocab_size, np.random.default_rng(0)
    def cost(b, kind): return lengths[b].sum() if kind == 'packed' else lengths[b].max()*len(b)
    orders = {k: sorted(plan_epoch(lengths, k, 16, int(16*lengths.mean()), rng=rng), key=lambda b: cost(b, k)) for k in ('random', 'sorted', 'packed')}
    cbs = dict(kept=KeepMemory(), onednn=OneDNNLinear())
    learn = Learner(DataLoaders([], []), hf, loss_func=noop)
    for cb in cbs.values(): cb.learn = learn
    sides = [('random, weights', 'random', 'sdpa'), ('sorted, weights', 'sorted', 'sdpa'), ('packed, weights', 'packed', 'fastbench'), ('sorted, values', 'sorted', 'fastbench_values')]
    sides += [(f'packed, values{more}', 'packed', 'fastbench_values') for more in ('', ', kept', ', onednn', ', kept, onednn')]
    drawn = dict(random=1, sorted=2, packed=1)

    def once(name, kind, attn, at):
        hf.set_attn_implementation(attn)
        on = [cb for k, cb in cbs.items() if k in name.split(', ')]
        try:
            for cb in on: cb.switch_on()
            if 'kept' in name: epoch_seconds(kind, [(i+1) % len(orders[kind]) for i in at])  # another batch fetches what is kept
            return epoch_seconds(kind, at)
        finally:
            for cb in on: cb.switch_off()

    def epoch_seconds(kind, at):
        took = []
        for i in at:
            x = (packed if kind == 'packed' else padded)(lengths[orders[kind][i]], vocab)
            t = time.perf_counter()
            hf.zero_grad()
            (packed_call(hf, x) if kind == 'packed' else hf(**x)).logits.float().sum().backward()
            took.append((time.perf_counter() - t)*len(orders[kind][i])/len(orders[kind][i][::SHARE]))
        return mean(took)*len(orders[kind])

    def work(name, kind, attn):
        "Each time other batches that stand for all; first, to warm up, the shortest"
        k, n, times = drawn[kind], len(orders[kind]), itertools.count(-1)
        def run():
            at = next(times)
            return once(name, kind, attn, [0] if at < 0 else [int((i + (.5, .25, .75)[at % 3])*n/k) for i in range(k)])
        return run

    took = time_rounds({o[0]: work(*o) for o in sides}, a.rounds, back=False, budget=a.seconds - (time.perf_counter() - began))
    rounds = len(took['random, weights'])
    print(f'{a.arch}, {a.texts:,} texts, {lengths.mean():.0f} tokens on average, {a.threads} threads, {rounds} rounds; an epoch by its mean batch')
    pairs = {name: list(zip(took['random, weights'], took[name])) for name, *_ in sides}
    for name, *_ in sides:
        ratio, low, high = compare_pairs(pairs[name]).speedup
        inside = '' if low is None else f' [{low:.2f}, {high:.2f}]'
        print(f'  {name:29} {median(took[name])/60:7.1f} min  {ratio:5.2f}x{inside}')
    o = 'packed, values, kept, onednn'
    unsure = 'UNDECIDED, the interval holds the bar, or 5 rounds were not reached (more --rounds and --seconds, or a quieter machine):'
    print(f'  {({True: "reached", False: "MISSED "}).get(at_least(pairs[o], 4), unsure)}  {o}: {compare_pairs(pairs[o]).speedup[0]:.2f}x (bar 4x)')
    print(f'  took {time.perf_counter() - began:.0f} s')


if __name__ == '__main__': main()

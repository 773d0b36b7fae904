"""What an epoch of a transformer computes: random padded batches as transformers' Trainer makes them, against sorted and packed ones.

    python benchmarks/text_compute.py [--arch distilbert-base-uncased] [--rounds 3] [--texts 25000] [--threads 2]

Lengths of IMDB's reviews, cut at 512 tokens; random weights (they cost what published ones cost), training mode, dropout as published, fp32, forward and backward of batches of 16 texts (packed: as
many tokens as 16 texts have on average). A round times some batches of each candidate, in random order: three random ones; of the sorted ones eight that stand for all lengths. From the mean
batch and the number of batches follows an epoch. One process; ratios are of one round, the interval is that of their logarithms (t). Bar: at least 4 times as fast as random batches with the
same regularisation (`values`: dropout of rows of the values, of the same strength); `weights` is dropout as published.
"""
import argparse
import math
import os
import random
import statistics
import time
import warnings

os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
warnings.filterwarnings('ignore')

import numpy as np
import torch
from scipy import stats
from transformers import AutoTokenizer  # noqa: F401  (its import takes its time here, not in a round)

from fastbench.text.hf import hf_model
from fastbench.text.order import epoch
from fastbench.text.packed import fast_attention, packed_call
from fastbench.text.reviews import review_lengths


def padded(n, vocab):
    ids, mask = torch.zeros(len(n), int(n.max()), dtype=torch.long), torch.zeros(len(n), int(n.max()), dtype=torch.long)
    for i, k in enumerate(n.tolist()): ids[i, :k], mask[i, :k] = torch.randint(5, vocab, (k,)), 1
    return dict(input_ids=ids, attention_mask=mask)


def packed(n, vocab):
    n = n.tolist()
    return dict(input_ids=torch.randint(5, vocab, (1, sum(n))), position_ids=torch.cat([torch.arange(k) for k in n])[None],
                cu_seq_lens=torch.tensor([0, *n]).cumsum(0).int())


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--arch', default='distilbert-base-uncased')
    p.add_argument('--rounds', type=int, default=3)
    p.add_argument('--texts', type=int, default=25_000)
    p.add_argument('--threads', type=int, default=os.cpu_count())
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    random.seed(0)
    words = np.random.default_rng(1).permutation(review_lengths(a.texts))
    lengths = np.minimum(words*1.15 + 2, 512).astype(int)  # tokens of a word, and the special ones
    hf = hf_model(a.arch, pretrained=False, n_out=2).hf.train()
    fast_attention(hf)
    vocab, rng = hf.config.vocab_size, np.random.default_rng(0)
    orders = dict(random=epoch(lengths, 'random', 16, rng=rng), sorted=sorted(epoch(lengths, 'sorted', 16, rng=rng), key=lambda b: lengths[b].max()),
                  packed=epoch(lengths, 'packed', 16, int(16*lengths.mean()), rng))
    sides = [('random, weights', 'random', 'sdpa'), ('sorted, weights', 'sorted', 'sdpa'), ('packed, weights', 'packed', 'fastbench'), ('sorted, values', 'sorted', 'fastbench_values'),
             ('packed, values', 'packed', 'fastbench_values')]

    def once(kind, attn, k):
        order = orders[kind]
        if kind == 'sorted': at = [int((i + random.random())*len(order)/k) for i in range(k)]
        else: at = random.sample(range(len(order)), k)
        hf.set_attn_implementation(attn)
        took = []
        for i in at:
            x = (packed if kind == 'packed' else padded)(lengths[order[i]], vocab)
            t = time.perf_counter()
            hf.zero_grad()
            (packed_call(hf, x) if kind == 'packed' else hf(**x)).logits.float().sum().backward()
            took.append(time.perf_counter() - t)
        return statistics.mean(took)*len(order)

    for _, kind, attn in sides: once(kind, attn, 1)  # warm-up
    took = {name: [] for name, *_ in sides}
    for _ in range(a.rounds):
        for name, kind, attn in random.sample(sides, len(sides)): took[name].append(once(kind, attn, 8 if kind == 'sorted' else 3))
    print(f'{a.arch}, {a.texts:,} texts, {lengths.mean():.0f} tokens on average, {a.threads} threads, {a.rounds} rounds; an epoch by its mean batch')
    for name, *_ in sides:
        r = [math.log(x/y) for x, y in zip(took['random, weights'], took[name])]
        m, half = statistics.mean(r), stats.t.ppf(.975, len(r)-1)*statistics.stdev(r)/math.sqrt(len(r)) if len(r) > 1 else math.nan
        print(f'  {name:16} {statistics.median(took[name])/60:7.1f} min  {math.exp(m):5.2f}x [{math.exp(m-half):.2f}, {math.exp(m+half):.2f}]')
        best = math.exp(m) if name == 'packed, values' else None
    print(f'  {"reached" if best >= 4 else "MISSED "}  packed, values: {best:.2f}x (bar 4x)')


if __name__ == '__main__': main()

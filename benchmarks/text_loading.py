"""What padding and tokenizing cost: ours beside fastai's SortedDL, transformers' length-grouped sampler and lists of tokens.

    python benchmarks/text_loading.py [--texts 25000] [--texts-of reviews|docstrings]

Texts with the lengths of IMDB's reviews (generated; `--texts-of docstrings`: real ones, repeated), cut at 512 tokens, a tokenizer of BERT's kind trained on them. One process, one
thread; where a time is measured, the candidates take turns. Bars, batch 16: padding of `sorted` at most 0.3% (2% in the first epoch, in which nothing is known but characters), of
`budget` at most 0.4%, of `packed` 0; the order of an epoch in 0.1 s; the first batch within 1 s of calling hf_dls; from the second epoch on 10 us a text to assemble a batch; with one
worker at most 3 ms of wait before a step of 40 ms.
"""
import argparse
import os
import random
import time
import warnings
from statistics import mean, median

os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
warnings.filterwarnings('ignore')

import numpy as np
import torch
from fastai.text.data import SortedDL
from transformers.trainer_pt_utils import LengthGroupedSampler

from fastbench.compare.paired import time_rounds
from fastbench.text.data import hf_dls
from fastbench.text.order import plan_epoch
from fastbench.text.sources import load_text_source, source_tokenizer

torch.set_num_threads(1)


def verdict(name, value, bar, unit='', digits=2):
    print(f'  {"reached" if value <= bar else "MISSED "}  {name}: {value:.{digits}f}{unit} (bar {bar:g}{unit})')


def share(batches, lengths):
    n = [lengths[b] for b in batches]
    return 100*(1 - sum(map(np.sum, n))/sum(o.max()*len(o) for o in n))


def chunks(order, bs=16): return [np.array(order[i:i+bs]) for i in range(0, len(order), bs)]


def orders(lengths):
    print('\nPadding of an epoch whose lengths are known, and what its order takes')
    rng = np.random.default_rng(0)
    peer = SortedDL(list(range(len(lengths))), sort_func=None, res=lengths.tolist(), bs=16, shuffle=True, num_workers=0)
    rows = [('random', lambda: plan_epoch(lengths, 'random', 16, rng=rng)),
            ("fastai's SortedDL", lambda: chunks(list(peer.get_idxs()))),
            ("transformers' LengthGroupedSampler", lambda: chunks(list(LengthGroupedSampler(16, lengths=lengths.tolist())))),
            *((f'ours, {o}', lambda o=o: plan_epoch(lengths, o, 16, 16*256, rng)) for o in ('sorted', 'budget', 'packed'))]
    found = {}
    for name, f in rows:
        t = time.perf_counter()
        b = f()
        t = time.perf_counter() - t
        found[name] = 0. if 'packed' in name else share(b, lengths),t
        print(f'  {name:36} {found[name][0]:6.2f}%  {t:.3f} s')
    verdict('sorted', found['ours, sorted'][0], .3, '%')
    verdict('budget', found['ours, budget'][0], .4, '%')
    verdict('order of an epoch', max(t for k, (_, t) in found.items() if 'ours' in k), .1, ' s', 3)


def padded(batches):
    masks = [x['attention_mask'] for x, *_ in batches]
    return 100*(1 - sum(int(o.sum()) for o in masks)/sum(o.numel() for o in masks))


def first_epoch(df, tok, loaders):
    print('\nFrom raw texts: the first batch, and the epoch in which lengths are not known yet')
    for kind in loaders:
        t = time.perf_counter()
        dls = hf_dls(df, tok, loader=kind, device='cpu', workers=0, valid_pct=.02)
        next(iter(dls.train))
        verdict(f'{kind}: first batch', time.perf_counter() - t, 1, ' s')
    dls = hf_dls(df, tok, device='cpu', workers=0, valid_pct=.02)
    verdict('sorted: padding in the first epoch', padded(dls.train), 2, '%')
    verdict('sorted: padding in the second', padded(dls.train), .3, '%')
    return dls


def assembling(dls, tok, texts):
    print('\nFrom the second epoch on: making a batch, a text')
    dl, n = dls.train, len(dls.train.dataset)
    lists = tok(texts[:4096], truncation=True, max_length=512)['input_ids']
    def by_lists():
        for i in range(0, 4096, 16): tok.pad(dict(input_ids=lists[i:i+16]), return_tensors='pt')
    def ours():
        for _ in dl: pass
    took = time_rounds({'ours': ours, 'lists of tokens, tokenizer.pad': by_lists}, 3, warm=0, back=False)
    each = {k: 1e6*median(v)/m for (k, v), m in zip(took.items(), (n, 4096))}
    for k, v in each.items(): print(f'  {k:36} {v:6.1f} us')
    verdict('assembling', each['ours'], 10, ' us', 1)


def hidden(df, tok, steps=150):
    print('\nOne worker tokenizes behind steps of 40 ms: the wait for a batch (first epoch)')
    dls = hf_dls(df, tok, device='cpu', workers=1, valid_pct=.02)
    it, waits = iter(dls.train), []
    next(it)
    for _ in range(steps):
        time.sleep(.04)
        t = time.perf_counter()
        next(it)
        waits.append((time.perf_counter() - t)*1e3)
    it.close()
    print(f'  median {median(waits):.2f} ms, mean {mean(waits):.2f} ms, largest {max(waits):.1f} ms')
    verdict('mean wait', mean(waits), 3, ' ms')


if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--texts', type=int, default=25_000)
    p.add_argument('--texts-of', default='reviews', choices=['reviews', 'docstrings'])
    a = p.parse_args()
    random.seed(0)
    ts = load_text_source(a.texts_of, **(dict(n=a.texts) if a.texts_of == 'reviews' else {}))
    texts = (ts.train.texts + ts.valid.texts)
    texts = [texts[i % len(texts)] for i in range(a.texts)]
    tok = source_tokenizer(ts, 'bert')
    import pandas as pd
    df = pd.DataFrame(dict(text=texts, label=np.arange(len(texts)) % 2))
    lengths = np.array([len(o) for o in tok(texts, truncation=True, max_length=512)['input_ids']])
    print(f'{len(texts):,} texts of {a.texts_of}: {np.median(lengths):.0f} tokens in the middle, {lengths.mean():.0f} on average')
    orders(lengths)
    dls = first_epoch(df, tok, ('sorted', 'budget', 'packed'))
    assembling(dls, tok, texts)
    hidden(df, tok)

"""Does `ab` find what is there, and nothing else, on this machine?

    python benchmarks/truth.py [--trials 20] [--pairs 10] [--recipe digits-xresnet18] [--epochs 1] [--batches 8] [--share .05] [--only injected|same]

injected: two copies of the package, as two worktrees, one of them slower: while training, the model's forward waits for 5% of the time it took. `fastbench ab RECIPE --python COPY
--python SLOW` of 10 pairs has to call `train forward` slower, the true 5% inside its interval, and no phase that is not slower, or to say that this machine cannot see 5% (smallest
difference it could have seen above 5%).
same: `ab` of one training against itself, 20 times, with its early stops: at most one verdict faster or slower in the whole, and at most one in the family of phases."""
import argparse
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import fastbench
from fastbench.compare.ab import AB, ab
from fastbench.bench.launch import launch
from fastbench.recipe import get_recipe

SLOW = '''

def _wait_in_forward(learn, share={share}):
    from time import perf_counter
    begun = []
    def before(module, args): begun.append(perf_counter())
    def after(module, args, out):
        took = perf_counter() - begun.pop()
        until = perf_counter() + share*took*module.training
        while perf_counter() < until: pass
    learn.model.register_forward_pre_hook(before)
    learn.model.register_forward_hook(after)
    return learn

_as_it_was = bench_learner

def bench_learner(*args, **kwargs): return _wait_in_forward(_as_it_was(*args, **kwargs))
'''
HOLDS_FORWARD = {('overall', 'fit'), ('fit', 'train'), ('train', 'step'), ('train', 'forward')}


def copies(folder, share):
    "Two copies of the package, the second slower"
    for name in ('plain', 'slow'): shutil.copytree(Path(fastbench.__file__).parent, folder/name/'fastbench', ignore=shutil.ignore_patterns('__pycache__'))
    with open(folder/'slow'/'fastbench'/'bench'/'learner.py', 'a') as f: f.write(SLOW.format(share=share))
    return folder/'plain', folder/'slow'


def injected(args, folder):
    start = time.monotonic()
    res = ab(args.recipe, python=copies(folder, args.share), pairs=args.pairs, folder=folder/'runs', offline=True, early=False, both=args.both)
    print(res)
    rows = {(r['phase'], r['action']): r for r in res.rows}
    r = rows['train', 'forward']
    false = [k for k, o in rows.items() if o['kind'] == 'time' and o['verdict'] in ('faster', 'slower') and (k not in HOLDS_FORWARD or o['verdict'] == 'faster')]
    found, cannot = r['verdict'] == 'slower' and r['low'] <= 1+args.share <= r['high'], r['verdict'] == 'unknown' and r['detectable'] > args.share
    print(f"injected {args.share:.0%} in forward: called {r['verdict']}, ratio {r['ratio']:.4f} ({r['low']:.4f} to {r['high']:.4f}), could see {r['detectable']:.1%}; "
          f"false verdicts: {', '.join(map(' '.join, false)) or 'none'}; {time.monotonic()-start:.0f} s")
    ok = (found or cannot) and not false
    print(f"bar: the injected slowdown is found, or it is said that it cannot be: {'held' if ok else 'MISSED'}{'' if found else ' (this machine cannot)' if cannot else ''}")
    return ok


def same(args, folder):
    recipe, start, whole, phases = get_recipe(args.recipe, **args.both), time.monotonic(), 0, 0
    for i in range(args.trials):
        trial = AB(recipe, recipe, pairs=args.pairs, run=[partial(launch, offline=True)]*2, folder=folder/f'same{i}', seed=i)
        (folder/f'same{i}').mkdir()
        if not i: trial.warm_up()
        while not trial.over: trial.measure()
        res = trial.result()
        called = [k for k, v in res.verdicts.items() if v.verdict in ('faster', 'slower')]
        whole += ('overall', 'fit') in called
        phases += any(k != ('overall', 'fit') for k in called)
        v = res.verdicts['overall', 'fit']
        print(f"trial {i+1:2d}: {len(trial.a)} pairs, {v.verdict}, ratio {v.ratio:.4f} ({v.low:.4f} to {v.high:.4f}), could see {v.detectable:.1%}"
              f"{''.join(f'; {a} {b} called {res.verdicts[a, b].verdict}' for a, b in called)}", flush=True)
    ok = whole <= 1 and phases <= 1
    print(f"bar: at most 1 of 20 A/A trials called different: {whole} of {args.trials} in the whole, {phases} in a phase, {time.monotonic()-start:.0f} s: {'held' if ok else 'MISSED'}")
    return ok


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--trials', type=int, default=20)
    p.add_argument('--pairs', type=int, default=10)
    p.add_argument('--recipe', default='digits-xresnet18')
    p.add_argument('--epochs', type=int, help="instead of the recipe's")
    p.add_argument('--batches', type=int, help='training batches an epoch, at most')
    p.add_argument('--share', type=float, default=.05)
    p.add_argument('--only', choices=['injected', 'same'])
    args = p.parse_args()
    args.both = {k: getattr(args, k) for k in ('epochs', 'batches') if getattr(args, k) is not None}
    print(f"{args.recipe}{''.join(f', {k} {v}' for k, v in args.both.items())}, {args.pairs} pairs", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        parts = [o for o in (injected, same) if args.only in (None, o.__name__)]
        return all([o(args, Path(folder)) for o in parts])


if __name__ == '__main__': sys.exit(not main())

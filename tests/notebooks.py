"""Runs the code of every notebook, as nbdev-test does, but each in a process of its own: what one notebook leaves behind
(a patched class, a setting read at import) is not there in the next. The processes are forked from one that has imported
what all of them need.

    python tests/notebooks.py [--flags bf16] [--n-workers 2]
"""
import argparse
import sys
import time
from multiprocessing import get_context
from pathlib import Path

from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb

ROOT = Path(__file__).resolve().parent.parent


def run(fn, flags):
    "(notebook, did it pass, seconds)"
    passed, took = test_nb(fn, skip_flags=get_config(ROOT/'nbs').tst_flags, force_flags=flags, basepath=ROOT)
    return fn, passed, took


def job(args): return run(*args)


def warm():
    "What nearly every notebook imports; no thread is started by it"
    import fastai.basics  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch  # noqa: F401


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument('--flags', default='')
    parser.add_argument('--n-workers', type=int, default=1)
    args, failed, start = parser.parse_args(argv), [], time.time()
    files = sorted(o.absolute() for o in nbglob(ROOT/'nbs', as_path=True))
    way = 'fork' if sys.platform.startswith('linux') else 'spawn'
    if way == 'fork': warm()
    with get_context(way).Pool(args.n_workers, maxtasksperchild=1) as pool:
        for fn, passed, took in pool.imap_unordered(job, [(o, args.flags.split()) for o in files], chunksize=1):
            if not passed: failed.append(fn.relative_to(ROOT))
    for o in sorted(failed): print(f'failed: {o}', file=sys.stderr)
    print(f'{len(files)-len(failed)} of {len(files)} notebooks passed in {time.time()-start:.0f} s')
    return bool(failed)


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))

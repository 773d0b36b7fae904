"""Runs the code of every notebook, as nbdev-test does, but each in a process of its own: what one notebook leaves behind
(a patched class, a setting read at import) is not there in the next. The processes are forked from one that has imported
what all of them need. One that takes more than ten minutes hangs: it is ended, and says where it hung.

    python tests/notebooks.py [--flags bf16] [--n-workers 2]
"""
import argparse
import faulthandler
import gc
import sys
import threading
import time
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb

ROOT = Path(__file__).resolve().parent.parent
HANGS = 600  # seconds


def run(fn, flags):
    faulthandler.dump_traceback_later(HANGS, exit=True)
    passed, _ = test_nb(fn, skip_flags=get_config(ROOT/'nbs').tst_flags, force_flags=flags, basepath=ROOT)
    sys.exit(not passed)


def run_all(files, flags, n, way):
    "How long each notebook took and which failed; `n` processes at a time, none a daemon, since a notebook starts its own"
    waiting, alive, took, failed = list(files), {}, {}, []
    while waiting or alive:
        while waiting and len(alive) < n:
            fn = waiting.pop(0)
            process = get_context(way).Process(target=run, args=(fn, flags))
            process.start()
            alive[process.sentinel] = fn, process, time.time()
        for o in wait(list(alive)):
            fn, process, start = alive.pop(o)
            process.join()
            took[fn.relative_to(ROOT)] = time.time()-start
            if process.exitcode: failed.append(fn.relative_to(ROOT))
    return took, sorted(failed)


def warm():
    """Imports what many notebooks need. Nothing of fastbench and no more of fastai, else a notebook that forgets an import would pass;
    and not transformers, which reads the environment when it is imported."""
    gc.disable()  # what imports make stays: there is nothing to collect
    for o in ('fastai.basics', 'matplotlib.pyplot', 'pandas', 'scipy.stats', 'sklearn.metrics', 'torch', 'torchvision'):
        import_module(o)
    threads = [o.name for o in threading.enumerate()]
    if len(threads) > 1: raise SystemExit(f'forked processes would miss these threads: {threads}')
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection would touch, and so copy, all memory that a fork shares


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument('--flags', default='')
    parser.add_argument('--n-workers', type=int, default=1)
    args, start = parser.parse_args(argv), time.time()
    files = sorted((o.absolute() for o in nbglob(ROOT/'nbs', as_path=True)), key=lambda o: ('tutorials' not in o.parts, o))  # the long ones first
    way = 'fork' if sys.platform.startswith('linux') else 'spawn'
    if way == 'fork': warm()
    took, failed = run_all(files, args.flags.split(), args.n_workers, way)
    gc.unfreeze()  # or libraries that look for leaks at the end report what was frozen
    print('slowest: '+', '.join(f'{o} {took[o]:.0f} s' for o in sorted(took, key=took.get)[:-11:-1]))
    for o in failed: print(f'failed: {o}', file=sys.stderr)
    print(f'{len(files)-len(failed)} of {len(files)} notebooks passed in {time.time()-start:.0f} s')
    return bool(failed)


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))

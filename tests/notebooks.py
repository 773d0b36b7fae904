"""Runs the code of every notebook, as nbdev-test does, but each in a process of its own: what one notebook leaves behind
(a patched class, a setting read at import) is not there in the next. The processes are forked from one that has imported
what all of them need.

    python tests/notebooks.py [--flags bf16] [--n-workers 2]
"""
import argparse
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb

ROOT = Path(__file__).resolve().parent.parent


def run(fn, flags):
    passed, _ = test_nb(fn, skip_flags=get_config(ROOT/'nbs').tst_flags, force_flags=flags, basepath=ROOT)
    sys.exit(not passed)


def run_all(files, flags, n, way):
    "The notebooks that failed; `n` processes at a time, none a daemon, since a notebook starts processes of its own"
    waiting, alive, failed = list(files), {}, []
    while waiting or alive:
        while waiting and len(alive) < n:
            fn = waiting.pop(0)
            process = get_context(way).Process(target=run, args=(fn, flags))
            process.start()
            alive[process.sentinel] = fn, process
        for o in wait(list(alive)):
            fn, process = alive.pop(o)
            process.join()
            if process.exitcode: failed.append(fn.relative_to(ROOT))
    return sorted(failed)


def warm():
    "What nearly every notebook imports; no thread is started by it"
    import fastai.basics  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch  # noqa: F401


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument('--flags', default='')
    parser.add_argument('--n-workers', type=int, default=1)
    args, start = parser.parse_args(argv), time.time()
    files = sorted(o.absolute() for o in nbglob(ROOT/'nbs', as_path=True))
    way = 'fork' if sys.platform.startswith('linux') else 'spawn'
    if way == 'fork': warm()
    failed = run_all(files, args.flags.split(), args.n_workers, way)
    for o in failed: print(f'failed: {o}', file=sys.stderr)
    print(f'{len(files)-len(failed)} of {len(files)} notebooks passed in {time.time()-start:.0f} s')
    return bool(failed)


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))

"What processes of ZeRO do in test_zero.py: be killed with checkpoints, and go on with the same stage, with another strategy, or in one process"
import json, os, sys, warnings
from pathlib import Path

import torch
from fastai.callback.training import GradientAccumulation

import fastbench.distributed.zero_state  # before the fork
from fastbench.callback.ema import EMACallback
from fastbench.distributed.deepspeed import need_deepspeed
from resume_ranks import copied, exported, forked, of_strategy, train

COLLECTS = lambda: [GradientAccumulation(40), EMACallback(.8, every=3)]  # three batches of two processes


def main(at):
    res = dict(zero3=of_strategy(at/'zero3', 'zero3', 'adamw'), collected=of_strategy(at/'collected', 'zero2', 'adamw', COLLECTS))
    for name, n, strategy in (('on_1', 1, None), ('as_fsdp', 2, 'fsdp')):
        path = copied(at/'zero3'/'kept', name)
        res['zero3'][name] = forked(path, n, train, path, strategy, 'adamw')
    res['zero3']['exported'] = exported(at/'zero3'/'cut', at/'zero3.safetensors')
    (at/'result.json').write_text(json.dumps(res))


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    need_deepspeed('cpu')
    os.chdir(sys.argv[1])
    main(Path(sys.argv[1]))

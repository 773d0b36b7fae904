"Workers that are forked beside a GPU: what they must not free."
import gc
import os

import pytest
import torch
from fastai.data.load import DataLoader

from fastbench.measure.loader import fastai_batches


class Freed:
    "Says in which process it was freed"
    def __init__(self, path): self.path = path
    def __del__(self):
        with open(self.path, 'a') as f: f.write(f'{os.getpid()}\n')


class Collects:
    "Each item collects garbage"
    def __len__(self): return 4
    def __getitem__(self, i):
        gc.collect()
        return i


@pytest.fixture(params=[False, True])
def frozen(request):
    "Has the program frozen objects itself?"
    gc.unfreeze()
    gc.collect()
    if request.param: gc.freeze()
    yield gc.get_freeze_count()
    gc.freeze()  # as tests/conftest.py has it


def test_a_worker_leaves_the_garbage_of_its_parent_alone(tmp_path, monkeypatch, frozen):
    "A batch that another stream used cannot be freed in a forked process: PyTorch aborts it"
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    it = DataLoader(Collects(), bs=2, num_workers=1)
    cycle = [Freed(tmp_path/'freed')]
    cycle.append(cycle)
    del cycle
    assert [b.tolist() for b in fastai_batches(it)] == [[0, 1], [2, 3]]
    gc.collect()
    assert set((tmp_path/'freed').read_text().split()) == {str(os.getpid())}
    assert (gc.get_freeze_count() > 0) == (frozen > 0) and gc.get_freeze_count() <= frozen

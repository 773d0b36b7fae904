"For tests that need a real GPU."
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.torch_core import to_device

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')


def to_gpu(learn):
    "The model of a Learner, and its data: batches in lists are copied, loaders copy them"
    cuda = torch.device('cuda', torch.cuda.current_device())
    learn.model.to(cuda)
    if all(isinstance(o, list) for o in learn.dls.loaders): learn.dls = DataLoaders(*(to_device(o, cuda) for o in learn.dls.loaders))
    else: learn.dls.to(cuda)
    learn.dls._device = cuda  # lists cannot be told
    return learn

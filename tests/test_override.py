"Several callbacks override methods of one layer: none undoes another, none stays."
import pickle
from copy import deepcopy
from itertools import permutations

import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from fastbench.callback.amp import MixedPrecision
from fastbench.callback.channelslast import ChannelsLast
from fastbench.callback.checkpointing import GradientCheckpointing
from fastbench.callback.half import HalfPrecision
from fastbench.callback.cpu.onednn import OneDNNLinear
from fastbench.callback.override import has_method, override


class Adds:
    def __init__(self, s): self.s = s
    def __call__(self, f, x): return f(x) + self.s


class Text:
    def shout(self, x): return x


@pytest.mark.parametrize('order', [*permutations('abc')])
def test_given_back_in_any_order(order):
    o = Text()
    undo = {s: override(o, 'shout', Adds(s)) for s in 'abc'}
    left = 'abc'
    for s in order:
        assert o.shout('') == left
        undo[s]()
        left = left.replace(s, '')
    assert o.shout('') == '' and not vars(o)


def test_whose_a_method_is():
    class Own(Text):
        def shout(self, x): return x
    o = Text()
    undo = override(o, 'shout', Adds('a'))
    assert has_method(o, 'shout', Text) and has_method(o, 'shout', Own, Text) and not has_method(o, 'shout', Own) and not has_method(o, 'whisper', Text)
    undo()
    assert has_method(o, 'shout', Text) and not has_method(Own(), 'shout', Text)


def test_the_same_function_twice():
    o, f = Text(), Adds('a')
    one, two = override(o, 'shout', f), override(o, 'shout', f)
    assert o.shout('') == 'aa'
    one()
    one()
    assert o.shout('') == 'a'
    two()
    assert not vars(o)


def test_what_an_object_had_of_its_own_is_there_again():
    o = Text()
    o.shout = own = lambda x: x + '!'
    undo = override(o, 'shout', Adds('a'))
    assert o.shout('') == '!a' and not has_method(o, 'shout', Text)
    undo()
    assert vars(o) == dict(shout=own)


def test_somebody_else_overrides_it_meanwhile():
    o = Text()
    undo = override(o, 'shout', Adds('a'))
    ours = o.shout
    o.shout = theirs = lambda x: ours(x) + '?'
    undo()
    assert o.shout is theirs and o.shout('') == '?'


def test_copies_have_nothing_to_give_back():
    m = nn.Linear(2, 2)
    undo = override(m, 'forward', Adds(1))
    for m2, undo2 in (deepcopy((m, undo)), pickle.loads(pickle.dumps((m, undo)))):
        x = torch.randn(3, 2)
        plain = nn.functional.linear(x, m.weight, m.bias)
        assert torch.equal(m2(x), plain) and m2.forward.__self__ is m2
        undo2()
        assert torch.equal(m2(x), plain) and torch.equal(m(x), plain + 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn, self.conv, self.head = nn.Conv2d(3, 512, 3, 2, 1, bias=False), nn.BatchNorm2d(512), nn.Conv2d(512, 512, 3, 2, 1), nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 2))
    def forward(self, x): return self.head(self.conv(self.bn(self.stem(x)).relu()).mean((2, 3)))


class Keeps(Callback):
    order = 5
    def before_fit(self): self.grads = []
    def before_step(self): self.grads.append([p.grad.double() for p in self.learn.model.parameters()])


def fitted(*cbs, size=4):
    torch.manual_seed(0)
    data = [(torch.randn(8, 3, size, size), torch.randint(2, (8,))) for _ in range(2)]
    learn = Learner(DataLoaders(data, data[:1]), Net(), loss_func=nn.CrossEntropyLoss(), lr=0., train_bn=True, cbs=[*cbs, Keeps()]).remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    for _ in range(2):
        learn.fit(1)
        assert not [m for m in learn.model.modules() if {'forward', '_conv_forward'} & set(vars(m))]
    return learn.keeps.grads


def close(a, b, tol):
    for x, y in zip(sum(a, []), sum(b, []), strict=True): assert (x - y).norm() <= tol*y.norm() + 1e-6, (x - y).norm()/y.norm()


SHAPES = (nn.Conv2d, nn.Linear, (nn.Conv2d, nn.Linear))


@pytest.mark.parametrize('cls', SHAPES, ids=str)
def test_oneDNN_in_checkpointed_layers(cls):
    close(fitted(OneDNNLinear(), GradientCheckpointing(modules=cls)), fitted(), 1e-4)


@pytest.mark.parametrize('cls', SHAPES, ids=str)
@pytest.mark.parametrize('precision', [MixedPrecision, HalfPrecision])
@pytest.mark.parametrize('size', [1, 2, 4])  # maps on which taps meet nothing
def test_products_and_fp32_in_checkpointed_layers(precision, cls, size):
    got = fitted(precision('bf16', allow_emulation=True), ChannelsLast(), GradientCheckpointing(modules=cls), size=size)
    same = fitted(precision('bf16', allow_emulation=True), ChannelsLast(), size=size)
    for a, b in zip(sum(got, []), sum(same, []), strict=True): assert torch.equal(a, b)
    close(got, fitted(size=size), .2)

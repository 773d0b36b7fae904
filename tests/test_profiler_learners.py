"The profiler on fastai's own applications: tabular, vision and text, trained, validated and asked for a prediction."
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.data.transforms import ToTensor
from fastai.learner import Learner  # noqa: F401
from fastai.metrics import accuracy
from fastai.tabular.all import Categorify, CategoryBlock, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import AWD_LSTM, TextDataLoaders, awd_lstm_clas_config, text_classifier_learner
from fastai.vision.all import DataBlock, DataLoaders, ImageBlock, PILImage, RandomSplitter, TensorCategory, TensorImage, resnet18, vision_learner
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastbench.machine.flops as flops
import fastbench.measure.profiler  # noqa: F401  (adds Learner.profile)
from fastbench.machine.flops import count_flops
from test_profiler import adds_up, clean, value

pytestmark = pytest.mark.filterwarnings('ignore')


def tabular(path):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=rng.normal(size=64), b=rng.choice(list('xyz'), 64)))
    df['y'] = np.where(df.a > 0, 'up', 'down')
    dls = TabularDataLoaders.from_df(df, path, [Categorify, Normalize], ['b'], ['a'], 'y', bs=8, valid_idx=list(range(16)), num_workers=0)
    return tabular_learner(dls, layers=[8], metrics=accuracy), df.iloc[0]


def vision(path):
    d = load_digits()
    images = [np.kron(o, np.ones((4, 4))).astype(np.uint8)*15 for o in d.images[:32]]
    block = DataBlock((ImageBlock, CategoryBlock), get_x=lambda i: PILImage.create(np.stack([images[i]]*3, -1)), get_y=lambda i: str(d.target[i] % 2),
                      item_tfms=[ToTensor], splitter=RandomSplitter(.25, seed=0))
    dls = block.dataloaders(range(32), path=path, bs=8, num_workers=0)
    return vision_learner(dls, resnet18, pretrained=False, metrics=accuracy), 0


def text(path):
    df = pd.DataFrame(dict(text=['the quick brown fox jumps', 'over the lazy dog again']*16, label=['a', 'b']*16))
    dls = TextDataLoaders.from_df(df, path, text_col='text', label_col='label', bs=8, seq_len=8, valid_pct=.25, seed=0, num_workers=0)
    return text_classifier_learner(dls, AWD_LSTM, pretrained=False, metrics=accuracy), 'the quick dog'


@pytest.mark.parametrize('make', [tabular, vision, text], ids=lambda f: f.__name__)
def test_application(make, tmp_path):
    torch.manual_seed(0)
    learn, item = make(tmp_path)
    learn.profile()
    with learn.no_bar(), learn.no_logging():
        learn.fine_tune(1)
        learn.validate()
        learn.predict(item)
        n = len(learn.dls.train)
        r = learn.profiler.results
        assert value(r, 'train', 'step') == 2*n and value(r, 'valid', 'step') == 3*len(learn.dls.valid) + 1
        assert value(r, 'fit', 'fit') == 4 and value(r, 'train', 'step', 'samples_per_second') > 0
    open_ = learn.profiler.profile.facts['remedies']
    assert ('channels-last' in open_) == ('images' in open_) == (make is vision) and {'torch.compile', 'a fused optimizer'} <= {*open_}
    adds_up(r)
    clean(learn)


def test_advice_is_what_this_training_does_not_have(tmp_path):
    "Who has channels-last, bf16 and compile is not told to try them"
    learn, _ = vision(tmp_path)
    learn.model.to(memory_format=torch.channels_last)
    learn.model.compile(backend='eager')
    learn.profile()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert not {'channels-last', 'torch.compile'} & {*learn.profiler.profile.facts['remedies']}
    assert 'channels-last' not in learn.profiler.verdict and 'torch.compile' not in learn.profiler.verdict


def test_before_a_fit_the_profiler_says_what_to_do(tmp_path):
    learn, _ = tabular(tmp_path)
    prof = learn.profile().profiler
    assert str(prof) == (line := 'nothing measured yet: call learn.fit') and prof.verdict is None
    assert prof._repr_html_() == f'<b>{line}</b>' and prof.to_markdown() == f'**{line}**\n'
    assert {'results', 'table', 'verdict', 'show', 'plot', 'to_csv'} <= {*dir(prof)} and not {'fit_one_cycle', 'state_dict', 'forward'} & {*dir(prof)}


@pytest.mark.parametrize('method', ['to_bf16', 'to_fp16'])
def test_a_precision_that_does_nothing_is_said(tmp_path, method):
    "fastai's mixed precision is CUDA's, whatever the device"
    learn, _ = tabular(tmp_path)
    learn.profile()
    getattr(learn, method)()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert f'{method[3:]} asked, fp32 in effect: ' in str(learn.profiler) and 'learn.bench()' in str(learn.profiler)
    learn.remove_cb(learn.mixed_precision)
    learn.profiler.reset()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert 'asked' not in str(learn.profiler)


def test_flops_of_models_that_keep_results_and_of_images(monkeypatch):
    "fastai's AWD_LSTM keeps its last batch, which cannot be copied, and gives more than predictions; a loss of one's own sees plain tensors"
    monkeypatch.setattr('fastbench.machine.flops.measure_peak', lambda device, precision: 1e12)
    df = pd.DataFrame(dict(text=['the cat sat on the mat', 'a bird sang in the tree'] * 12, label=['cat', 'bird'] * 12))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', bs=4, seq_len=8, num_workers=0)
    texts = text_classifier_learner(dls, AWD_LSTM, pretrained=False, config=awd_lstm_clas_config | dict(emb_sz=8, n_hid=8, n_layers=1))
    x = [(TensorImage(torch.randn(3, 4, 4)), TensorCategory(i % 2)) for i in range(8)]
    images = Learner(DataLoaders.from_dsets(x, x, bs=4), nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), loss_func=lambda p, y: nn.functional.cross_entropy(p, y))
    for learn in (texts, images):
        with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
            warnings.simplefilter('error', UserWarning)
            learn.profile(flops=True).fit(1)
        assert learn.profiler.profile.facts['efficiency']['flops_per_sample'] > 0


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 1)
    def forward(self, x): return self.lin(x)


def by_name(p, y): return nn.functional.mse_loss(p, y['u'])


def test_flops_of_a_sample_with_targets_by_name(monkeypatch):
    "A dict of two targets is no batch of two samples"
    monkeypatch.setattr('fastbench.machine.flops.measure_peak', lambda device, precision: 1e12)
    x = [(torch.randn(3), dict(u=torch.randn(1), v=torch.randn(1))) for _ in range(8)]
    learn = Learner(DataLoaders.from_dsets(x, x, bs=4), Sums(), loss_func=by_name)
    with learn.no_bar(), learn.no_logging(): learn.profile(flops=True).fit(1)
    assert learn.profiler.profile.facts['efficiency']['flops_per_sample'] == 2*3*2


@pytest.mark.parametrize('kw', [{}, dict(num_layers=2, bidirectional=True), dict(batch_first=True, bias=False)], ids=lambda o: '+'.join(o) or 'plain')
@pytest.mark.parametrize('layer', ['RNN', 'GRU', 'LSTM'])
def test_flops_of_recurrent_layers(layer, kw):
    "On a CPU, where an LSTM is one operator"
    m, x, gates = getattr(nn, layer)(8, 16, **kw), torch.randn(5, 5, 8), dict(RNN=1, GRU=3, LSTM=4)[layer]
    weights = sum(p.numel() for p in m.parameters() if p.dim() == 2)
    assert count_flops(m, None, (x,)) == 2*5*5*weights and m.weight_hh_l0.numel() == gates*16*16
    both = count_flops(m, lambda p, y: p[0].sum(), (x,), (0,))
    assert 4.5*5*5*weights < both <= 6*5*5*weights  # no gradient of the input, or of the first state


@pytest.mark.parametrize('two_ways', [False, True])
def test_flops_of_recurrent_layers_by_cudnn(two_ways):
    "Shapes alone: no GPU is needed"
    m = nn.GRU(8, 16, 2, bidirectional=two_ways, device='meta')
    x, h, ways = torch.randn(5, 4, 8, device='meta'), torch.randn(2*(1 + two_ways), 4, 16, device='meta'), 1 + two_ways
    n, w = 2*5*4*sum(p.numel() for p in m.parameters() if p.dim() == 2), [*m.parameters()]
    tail = [3, 16, 0, 2, False, 0., True, two_ways, [], None]
    def counted(f):
        with FlopCounterMode(display=False, custom_mapping=flops._formulas()) as c: f()
        return c.get_total_flops()
    assert counted(lambda: torch.ops.aten._cudnn_rnn(x, w, 4, None, h, None, *tail)) == n
    count = flops._formulas()[torch.ops.aten._cudnn_rnn_backward]
    def back(*asked): return count(x.shape, [p.shape for p in w], 4, None, h.shape, None, x.shape, x.shape, None, None, *tail, None, [*asked])
    first = 2*5*4*ways*48*8
    assert (back(True, True, False, True), back(False, False, False, True), back(True, False, False, False)) == (2*n, 2*n - first, n)


def test_a_recurrent_layer_that_cannot_be_counted_is_named(monkeypatch):
    "By an operator that a later PyTorch or another device has"
    monkeypatch.setattr('fastbench.machine.flops.measure_peak', lambda device, precision: 1e12)
    monkeypatch.setattr(flops, '_formulas', dict)
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.lstm, self.lin = nn.LSTM(3, 4), nn.Linear(4, 2)
        def forward(self, x): return self.lin(self.lstm(x)[0])
    x = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(8)]
    learn = Learner(DataLoaders.from_dsets(x, x, bs=4), Net(), loss_func=lambda p, y: nn.functional.cross_entropy(p.flatten(0, 1), y.flatten()))
    with learn.no_bar(), learn.no_logging(): learn.profile(flops=True).fit(1)
    note = 'without LSTM, which could not be counted'
    if torch.backends.mkldnn.is_available():
        assert learn.profiler.profile.facts['efficiency']['uncounted'] == ['LSTM'] and note in str(learn.profiler)
        with pytest.warns(UserWarning, match='the FLOPs of LSTM are not counted'): count_flops(learn.model, None, (torch.randn(4, 5, 3),))
    monkeypatch.undo()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert note not in str(learn.profiler)

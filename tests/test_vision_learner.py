"Every architecture, the right weights or none, the right layers frozen"
import socket, warnings
from types import SimpleNamespace

import fastai.callback.schedule, fastai.callback.progress # fit_one_cycle, no_bar
import numpy as np
import pytest
import timm
import torch
from fastai.data.block import CategoryBlock, DataBlock, MultiCategoryBlock, RegressionBlock
from fastai.data.core import DataLoaders
from fastai.data.transforms import IndexSplitter, Normalize
from fastai.metrics import mae
from fastai.torch_core import params
from fastai.vision.core import PILImage, PILMask
from fastai.vision.data import ImageBlock, MaskBlock, PointBlock
from fastai.vision.models import xresnet
from torch import nn

from fastbench.machine import hub
from fastbench.machine.download import DataUnavailable
from fastbench.errors import UserError
from fastbench.train.learner import BenchLearner
from fastbench.vision.data import vision_dls
from fastbench.vision.learner import (fill_body, timm_learner, timm_model, timm_splitter, xresnet50_weights, xresnet_archs, xresnet_learner,
                                      xresnet_splitter)
from fastbench.vision.match import item_shape, normalize_as
from fastbench.vision.resnet import torchvision_learner
from fastbench.vision.small import small_learner


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'home'))
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path/'hub'))
    return tmp_path/'home'


@pytest.fixture
def dls(): return vision_dls('digits', size=32, bs=16, device='cpu')


def batches(c=3, n_out=10, size=32, n=4):
    "Plain PyTorch loaders"
    ds = [(torch.randn(c, size, size), i%n_out) for i in range(n)]
    res = DataLoaders(*[torch.utils.data.DataLoader(ds, batch_size=2) for _ in range(2)])
    res.c = n_out
    return res


def one_line(e): assert '\n' not in str(e.value), str(e.value); return str(e.value)


# --- xresnets

def test_the_list_is_fastais():
    names = {o for o in dir(xresnet) if o.startswith(('xres', 'xse')) and callable(getattr(xresnet, o))}
    assert set(xresnet_archs()) == names - {'xsenet154'} and len(names) == 31
    with pytest.raises(TypeError): xresnet.xsenet154() # once this works, it belongs into the list


@pytest.mark.parametrize('arch', xresnet_archs())
def test_every_xresnet_builds_splits_and_runs(arch):
    "Shapes and groups without memory or arithmetic: on the meta device"
    with torch.device('meta'):
        m = getattr(xresnet, arch)(n_out=7, c_in=2)
        assert m(torch.empty(2, 2, 64, 64)).shape == (2, 7)
    groups = xresnet_splitter(m)
    ids = [id(p) for g in groups for p in g]
    assert len(groups) == 3 and all(groups) and sorted(ids) == sorted(map(id, m.parameters())) and len(groups[2]) == 2


@pytest.mark.parametrize('arch', ['xresnet18', 'xresnet18_deep', 'xse_resnet18', 'xresnext18', 'xse_resnext18_deeper'])
def test_one_of_each_family_learns_on_a_cpu(arch, dls):
    learn = xresnet_learner(dls, arch, 'mish')
    dls.train.n = dls.valid.n = 16
    assert type(learn) is BenchLearner and learn.arch == arch
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, 1e-3)
    assert torch.isfinite(torch.tensor(learn.recorder.losses)).all()


@pytest.mark.parametrize('c', [1, 2, 3, 5])
def test_channels_come_from_the_data(c):
    learn = xresnet_learner(batches(c), loss_func=nn.CrossEntropyLoss())
    assert learn.model[0][0].in_channels == c == item_shape(learn.dls)[0]
    assert timm_learner(batches(c), 'resnet18', loss_func=nn.CrossEntropyLoss()).model.conv1.in_channels == c


def test_arguments_reach_model_and_learner(dls, tmp_path):
    learn = xresnet_learner(dls, xresnet.xresnet18, nn.SiLU, n_out=3, c_in=1, model_args=dict(p=.25, sa=True), lr=.5, wd=.1, path=tmp_path, metrics=[])
    assert learn.model[-1].out_features == 3 and learn.model[-2].p == .25 and (learn.lr, learn.wd, learn.path) == (.5, .1, tmp_path)
    assert any(isinstance(o, nn.SiLU) for o in learn.model.modules()) and len(learn.metrics) == 0
    assert any(type(o).__name__ == 'SimpleSelfAttention' for o in learn.model.modules())
    with pytest.raises(TypeError): xresnet_learner(dls, no_such=1)


def test_looking_at_an_item_leaves_the_order_of_batches(dls):
    other = vision_dls('digits', size=32, bs=16, device='cpu')
    item_shape(dls)
    assert next(iter(dls.train))[0].equal(next(iter(other.train))[0])


def test_no_items_no_classes_no_images():
    empty = SimpleNamespace(loaders=[])
    with pytest.raises(UserError, match='pass c_in'): item_shape(empty)
    flat = DataLoaders(torch.utils.data.DataLoader([(torch.randn(5), 1)]*2, batch_size=2))
    with pytest.raises(UserError, match='4 dimensions'): item_shape(flat)
    dls = batches(); dls.c = 0
    with pytest.raises(UserError, match='pass n_out'): xresnet_learner(dls)


def of_images(block, label):
    rng = np.random.default_rng(0)
    images = [PILImage.create(rng.integers(0, 255, (32, 32, 3), 'uint8')) for _ in range(6)]
    return DataBlock((ImageBlock, block), get_x=lambda i: images[i], get_y=label, splitter=IndexSplitter([4, 5])).dataloaders(range(6), bs=2, num_workers=0, device='cpu')


MAKERS = dict(xresnet=xresnet_learner, timm=lambda dls, **kw: timm_learner(dls, 'resnet10t', **kw), torchvision=lambda dls, **kw: torchvision_learner(dls, pretrained=False, **kw), small=small_learner)


@pytest.mark.parametrize('maker', MAKERS)
@pytest.mark.parametrize('block,label,names', [
    (CategoryBlock, lambda i: 'ab'[i % 2], ['accuracy']), (MultiCategoryBlock, lambda i: ['a', 'b'][:i % 3], ['accuracy_multi']),
    (RegressionBlock, lambda i: [i, -i], []), (PointBlock, lambda i: torch.tensor([[1., 2.], [3., i]]), [])], ids=['classes', 'labels', 'numbers', 'points'])
def test_loss_and_metrics_suit_the_labels(maker, block, label, names):
    learn = MAKERS[maker](of_images(block, label))
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert [o.name for o in learn.metrics] == names and learn.loss_func is learn.dls.train.dataset.loss_func
    assert [o.name for o in MAKERS[maker](learn.dls, metrics=mae).metrics] == ['mae']


@pytest.mark.parametrize('maker', MAKERS)
def test_a_mask_for_each_image_is_for_another_model(maker):
    dls = of_images(MaskBlock(codes=['a', 'b']), lambda i: PILMask.create(np.zeros((32, 32), 'uint8')))
    with pytest.raises(UserError) as e: MAKERS[maker](dls)
    assert 'a mask for each image' in one_line(e) and 'unet_learner' in one_line(e)


@pytest.mark.parametrize('kwargs,says', [
    (dict(arch='xresnet19'), "unknown xresnet 'xresnet19'; did you mean 'xresnet18'?"), (dict(arch='xsenet154'), 'cannot build it'),
    (dict(arch=xresnet.xsenet154), 'cannot build it'), (dict(arch='resnet18'), "unknown xresnet 'resnet18'"),
    *((dict(arch=o, pretrained=True), f'{o} has no pretrained weights') for o in xresnet_archs() if o != 'xresnet50'),
    (dict(act_cls='gelu'), "unknown activation 'gelu'")])
def test_mistakes_are_one_line(dls, kwargs, says):
    with pytest.raises(UserError) as e: xresnet_learner(dls, **kwargs)
    assert says in one_line(e)


# --- freezing

def trained(model, learn, steps=1):
    "Names of the modules whose parameters a step changed"
    old = {k: v.clone() for k,v in model.named_parameters()}
    learn.dls.train.n,learn.dls.valid.n = 16*steps,16
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
    return {k.rsplit('.', 1)[0] for k,v in model.named_parameters() if not v.equal(old[k])}

@pytest.mark.parametrize('make', [lambda d: xresnet_learner(d), lambda d: timm_learner(d, 'resnet18')], ids=['xresnet', 'timm'])
def test_after_freeze_only_head_and_batch_norm_train(dls, make):
    learn = make(dls)
    learn.freeze()
    kinds = {type(learn.model.get_submodule(o)).__name__ for o in trained(learn.model, learn)}
    assert kinds == {'Linear', 'BatchNorm2d'} or kinds == {'Linear', 'BatchNormAct2d', 'BatchNorm2d'}
    learn.unfreeze()
    assert 'Conv2d' in {type(learn.model.get_submodule(o)).__name__ for o in trained(learn.model, learn)}


# --- xresnet50's weights

def old_names(m):
    "The state dict of an XResNet under the names of 2019, in which the published file was written"
    import re
    return {re.sub(r'idpath\.\d\.', 'idconv.', k.replace('convpath', 'convs')): v for k,v in m.state_dict().items()}

def test_the_old_names_hide_the_weights_from_fastai_and_not_from_us():
    torch.manual_seed(0)
    src,ours,theirs = xresnet.xresnet50(),xresnet.xresnet50(n_out=10),xresnet.xresnet50()
    state = old_names(src)
    theirs.load_state_dict(state, strict=False) # what fastai does
    assert not theirs[4][0].convpath[0][0].weight.equal(src[4][0].convpath[0][0].weight)
    fill_body(ours, state, '11.', 'file')
    for (k,a),b in zip(src.state_dict().items(), ours.state_dict().values()): assert k.startswith('11.') or a.equal(b), k
    same = xresnet.xresnet50()
    fill_body(same, state, '11.', 'file')
    assert same[11].weight.equal(src[11].weight) # the head too, where it fits


@pytest.mark.parametrize('c', [1, 4])
def test_weights_for_another_number_of_channels(c):
    src,m = xresnet.xresnet50(),xresnet.xresnet50(n_out=10, c_in=c)
    fill_body(m, src.state_dict(), '11.', 'file')
    gray = torch.rand(2, 1, 32, 32)
    assert src.eval()[0](gray.expand(-1, 3, -1, -1)).allclose(m.eval()[0](gray.expand(-1, c, -1, -1)), atol=1e-5)


def test_weights_of_another_model_are_refused():
    with pytest.raises(DataUnavailable, match='tensors of its body are missing'):
        fill_body(xresnet.xresnet50(), xresnet.xresnet34().state_dict(), '11.', 'file')


def test_pretrained_xresnet50_end_to_end(home, dls):
    src = xresnet.xresnet50()
    (home/'models').mkdir(parents=True)
    torch.save(dict(model=old_names(src)), home/'models/xrn50_940.pth')
    learn = xresnet_learner(dls, 'xresnet50', pretrained=True, offline=True)
    assert learn.weights == 'xrn50_940' and learn.model[4][0].convpath[1][0].weight.equal(src[4][0].convpath[1][0].weight)
    assert not learn.model[4][0].convpath[0][0].weight.requires_grad and learn.model[-1].weight.requires_grad
    assert learn.opt.frozen_idx == 2


def test_xresnet50_weights_that_cannot_be_had_or_are_code(home, dls):
    with pytest.raises(DataUnavailable) as e: xresnet_learner(dls, 'xresnet50', pretrained=True, offline=True)
    assert 'pretrained=False works without a download' in one_line(e)
    class Evil:
        def __reduce__(self): return (exec, ("raise SystemExit('code was run')",))
    (home/'models').mkdir(parents=True)
    torch.save(dict(model=Evil()), home/'models/xrn50_940.pth')
    with pytest.raises(DataUnavailable, match='is not a file of weights'): xresnet50_weights(offline=True)


# --- normalisation

def norm_of(dl):
    n, = [o for o in dl.after_batch.fs if isinstance(o, Normalize)]
    return [round(o, 3) for o in n.mean.flatten().tolist()]

def test_normalisation_is_added_kept_or_replaced_aloud():
    dls = vision_dls('digits', bs=16, device='cpu')
    for dl in dls.loaders: dl.after_batch.fs = type(dl.after_batch.fs)(o for o in dl.after_batch.fs if not isinstance(o, Normalize))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert normalize_as(dls, [.4], [.2], 1) == 'added' and normalize_as(dls, [.4], [.2], 1) == 'kept'
    with pytest.warns(UserWarning, match='replaced the data'): assert normalize_as(dls, [.3, .3, .6], [.1, .2, .6], 1) == 'replaced'
    assert [norm_of(o) for o in dls.loaders] == [[.4]]*2
    x = dls.train.one_batch()[0]
    raw = x*.3+.4
    assert raw.min() > -1e-5 and raw.max() < 1+1e-5
    with pytest.warns(UserWarning, match='are not fastai'): assert normalize_as(batches(), [.5]*3, [.5]*3, 3) == 'impossible'


# --- timm

@pytest.mark.parametrize('arch', ['resnet18', 'efficientnet_b0', 'convnext_atto', 'vit_tiny_patch16_224', 'mobilenetv3_small_050', 'densenet121'])
def test_timm_groups(arch):
    with torch.device('meta'): m,weights = timm_model(arch, n_out=7, c_in=1)
    body,head = timm_splitter(m)
    assert weights is None and {id(p) for p in head} == {id(p) for p in params(m.get_classifier())}
    assert sorted(map(id, [*body, *head])) == sorted(map(id, m.parameters())) and head[0].shape[0] == 7


def test_two_heads_and_none():
    with torch.device('meta'): m,_ = timm_model('deit_tiny_distilled_patch16_224', n_out=7)
    assert len(timm_splitter(m)[1]) == 4
    with torch.device('meta'): m,_ = timm_model('resnet18', n_out=0)
    with pytest.raises(UserError, match='has no classifier'): timm_splitter(m)


@pytest.mark.parametrize('kwargs,says', [
    (dict(arch='resnett50'), 'did you mean resnet50'), (dict(arch='resnet18', model_args=dict(no_such=1)), 'timm cannot build resnet18'),
    (dict(arch='vit_tiny_patch16_224'), 'takes images of 224x224 pixels only, and these have 32x32')])
def test_timm_mistakes_are_one_line(dls, kwargs, says):
    with pytest.raises(UserError) as e: timm_learner(dls, **kwargs)
    assert says in one_line(e)


def test_a_fixed_size_can_be_changed(dls):
    learn = timm_learner(dls, 'vit_tiny_patch16_224', model_args=dict(img_size=32, patch_size=8))
    assert learn.model(dls.one_batch()[0]).shape == (16, 10)


def test_weights_that_cannot_be_had_fail_after_one_try(dls, monkeypatch, tmp_path):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    import huggingface_hub
    asked = []
    def look(url, **kwargs): asked.append(url); raise OSError('Name or service not known')
    def never(*a, **k): raise AssertionError('timm was sent to download')
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', look)
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda *a, **k: None)
    monkeypatch.setattr(timm, 'create_model', never)
    before = huggingface_hub.constants.HF_HUB_OFFLINE
    with pytest.raises(DataUnavailable) as e: timm_learner(dls, 'resnet18', pretrained=True)
    msg = one_line(e)
    assert 'resnet18' in msg and 'Name or service not known' in msg and 'pretrained=False' in msg and len(asked) == 1
    assert huggingface_hub.constants.HF_HUB_OFFLINE == before


@pytest.mark.parametrize('how', ['argument', 'variable'])
def test_offline_asks_nobody(dls, monkeypatch, how):
    import huggingface_hub
    def never(*a, **k): raise AssertionError('a socket was opened')
    for o in 'socket', 'getaddrinfo': monkeypatch.setattr(socket, o, never)
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda *a, **k: None)
    if how == 'variable': monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    for arch in 'resnet18', 'hf-hub:timm/resnet18.a1_in1k' if how == 'argument' else 'resnet34':
        with pytest.raises(DataUnavailable, match='offline'): timm_learner(dls, arch, pretrained=True, offline=how == 'argument')


def test_a_file_under_the_second_name_is_found(monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError
    asked = []
    def look(url, **kwargs):
        asked.append(url.rsplit('/', 1)[1])
        if len(asked) == 1: raise EntryNotFoundError('404')
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', look)
    hub.look_up('timm/resnet18.a1_in1k', ['model.safetensors', 'pytorch_model.bin'])
    assert asked == ['model.safetensors', 'pytorch_model.bin']


def test_cached_weights_are_used_frozen_and_normalised_for(dls, monkeypatch, tmp_path):
    import huggingface_hub
    from safetensors.torch import save_file
    src = timm.create_model('resnet18')
    save_file(src.state_dict(), tmp_path/'model.safetensors')
    def never(*a, **k): raise AssertionError('the hub was asked')
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', never)
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda repo, name, **k: str(tmp_path/name) if name == 'model.safetensors' else None)
    with pytest.warns(UserWarning, match='replaced the data'): learn = timm_learner(dls, 'resnet18', pretrained=True, offline=True)
    assert learn.weights == 'timm/resnet18.a1_in1k'
    assert learn.model.layer1[0].conv1.weight.equal(src.layer1[0].conv1.weight)
    assert learn.model.conv1.weight.allclose(src.conv1.weight.sum(1, keepdim=True), atol=1e-5) # one channel instead of three
    assert norm_of(dls.train) == [round((.485+.456+.406)/3, 3)]
    assert not learn.model.layer1[0].conv1.weight.requires_grad and learn.model.fc.weight.requires_grad and learn.opt.frozen_idx == 1


def test_a_hub_model_unreachable_or_cached(monkeypatch, tmp_path, dls):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    import huggingface_hub, json
    from safetensors.torch import save_file
    asked = []
    def look(url, **kwargs): asked.append(url); raise OSError('Name or service not known')
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', look)
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda *a, **k: None)
    for pretrained in True, False:
        with pytest.raises(DataUnavailable) as e: timm_learner(dls, 'hf-hub:someone/model', pretrained=pretrained)
        assert 'Name or service not known' in one_line(e) and asked.pop().endswith('config.json') and not asked
    src = timm.create_model('resnet18', num_classes=5)
    save_file(src.state_dict(), tmp_path/'model.safetensors')
    (tmp_path/'config.json').write_text(json.dumps(dict(architecture='resnet18', num_classes=5, num_features=512, pretrained_cfg=dict(
        mean=[.1, .2, .3], std=[.2, .2, .2], num_classes=5, input_size=[3, 224, 224], first_conv='conv1', classifier='fc'))))
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda repo, name, **k: str(tmp_path/name) if repo == 'someone/model' else None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn = timm_learner(dls, 'hf-hub:someone/model', pretrained=True, offline=True)
    assert learn.model.layer1[0].conv1.weight.equal(src.layer1[0].conv1.weight) and learn.weights == learn.arch == 'hf-hub:someone/model'
    assert norm_of(dls.train) == [.2] and not asked


def test_a_model_without_weights_says_so(dls):
    arch = next(o for o in timm.list_models('resnet*') if not timm.is_model_pretrained(o))
    with pytest.raises(UserError) as e: timm_learner(dls, arch, pretrained=True)
    assert 'timm has no weights for' in one_line(e)


def test_the_data_is_left_alone_without_pretrained(dls):
    old = norm_of(dls.train)
    timm_learner(dls, 'resnet18'); xresnet_learner(dls)
    assert norm_of(dls.train) == old

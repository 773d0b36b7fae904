"Augmentation of whole batches: fastai's distributions, each image its own, the same by seed, epoch and item, on any device"
import math
import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import fastai.callback.progress  # adds no_bar
from fastai.callback import mixup
from fastai.callback.core import Callback
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.core import DataLoaders, Datasets
from fastai.data.transforms import IntToFloatTensor, Normalize, RandomSplitter, get_image_files, parent_label
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import TensorImage
from fastai.vision import augment as fa
from fastai.vision.core import TensorBBox, TensorMask, TensorPoint, imagenet_stats
from fastai.vision.data import BBoxBlock, BBoxLblBlock, ImageBlock
from fasttransform import Pipeline, Transform
from PIL import Image
from scipy.stats import chisquare, ks_2samp
from torch import nn

from fastbench.draw.affine import BatchAffine, reductions, warp_matrices
from fastbench.draw.batch import BatchNormalize, batch_augment
from fastbench.draw.chance import uniforms
from fastbench.draw.colour import BatchColour, turn_hue
from fastbench.draw.crop import BatchCrop, BatchFit, BatchFlip, crop_nearest, crop_slices, crop_weighted, random_boxes, resized
from fastbench.draw.erase import BatchCutout, BatchErase, erase_masked, erase_slices, noise_images
from fastbench.draw.fast import fast_images  # adds the method
from fastbench.draw.swap import fast_augment  # adds the method
from fastbench.draw.mix import BatchCutMix, BatchMixUp, patches
from fastbench.errors import UserError
from gpu import needs_gpu

pytestmark = pytest.mark.usefixtures('one_thread')
N = 4000


@pytest.fixture(autouse=True)
def seeds():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def same(a, b, name=''):
    "Two samples of one distribution: by the largest distance of their distribution functions"
    p = ks_2samp(np.asarray(a, float), np.asarray(b, float)).pvalue
    assert p > .001, f'{name}: p={p:.2g}'


def images(n=8, h=60, w=80, dtype=torch.uint8):
    x = torch.randint(0, 256, (n, 3, h, w), dtype=torch.uint8)
    return TensorImage(x if dtype == torch.uint8 else x.float()/255)


# Random numbers

def test_numbers_are_even_and_independent():
    u = uniforms(5, range(20_000), 6)
    for col in u.T: assert chisquare(np.histogram(col, 20, (0, 1))[0]).pvalue > .001
    assert np.abs(np.corrcoef(u.T) - np.eye(6)).max() < .03
    assert abs(np.corrcoef(u[:-1,0], u[1:,0])[0,1]) < .03  # neighbours
    v = uniforms(6, range(20_000), 6)  # the next key
    assert abs(np.corrcoef(u[:,0], v[:,0])[0,1]) < .03


def test_an_items_numbers_do_not_depend_on_its_batch():
    a, b = uniforms(3, [10, 11, 12], 4), uniforms(3, [12, 7, 10], 4)
    assert np.array_equal(a[0], b[2]) and np.array_equal(a[2], b[0])
    assert uniforms(-3, [0], 2).shape == (1, 2) and uniforms(2**80, [0], 2).shape == (1, 2)


# Crops

@pytest.mark.parametrize('kwargs', [{}, dict(min_scale=.35), dict(min_scale=.2, max_scale=.5, ratio=(.9, 1.1)), dict(min_scale=.9, ratio=(1., 1.))])
@pytest.mark.parametrize('h,w', [(120, 160), (100, 100), (40, 200)])
def test_crops_are_those_of_random_resized_crop(kwargs, h, w):
    theirs = fa.RandomResizedCrop(32, **kwargs)
    class Sized: size = (w, h)
    rows = []
    for _ in range(N):
        theirs.before_call(Sized(), 0)
        rows.append((theirs.tl[1], theirs.tl[0], theirs.cp_size[1], theirs.cp_size[0]))
    theirs = np.array(rows)
    k = dict(min_scale=.08) | kwargs
    ours = random_boxes(uniforms(0, range(N), 40).reshape(N, 10, 4), h, w, **k)
    for i, name in enumerate(('top', 'left', 'height', 'width')): same(ours[:,i], theirs[:,i], name)
    same(ours[:,2]*ours[:,3], theirs[:,2]*theirs[:,3], 'area')
    same(ours[:,3]/ours[:,2], theirs[:,3]/theirs[:,2], 'ratio')


def test_a_shape_that_no_crop_fits():
    ours = random_boxes(uniforms(0, range(50), 40).reshape(50, 10, 4), 10, 100, min_scale=.9)
    assert (ours == [0, 43, 10, 13]).all()  # fastai's: the largest of 4/3 in the middle


def test_flips_are_even():
    t = BatchCrop(16, flip=.3, seed=1)
    t(images(N, 20, 20), split_idx=0)
    assert chisquare([t.mirror.sum(), N-t.mirror.sum()], [.3*N, .7*N]).pvalue > .001
    assert abs(np.corrcoef(t.mirror, t.boxes[:,0])[0,1]) < .05


@pytest.mark.parametrize('size', [(64, 64), (17, 30), (100, 90)])
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_slices_and_weights_give_the_same_picture(size, layout):
    x = images().as_subclass(torch.Tensor).contiguous(memory_format=layout)
    boxes = random_boxes(uniforms(0, range(8), 40).reshape(8, 10, 4), 60, 80)
    flip = np.arange(8) % 3 == 0
    a, b = crop_slices(x, boxes, size, flip), crop_weighted(x, boxes, size, flip)
    assert a.dtype == b.dtype == torch.uint8 and (a.int()-b.int()).abs().max() <= 1
    for o, (t, l, h, w), f, y in zip(x, boxes, flip, a):
        want = F.interpolate(o[None,:,t:t+h,l:l+w].float(), size, mode='bilinear', antialias=True)[0]
        assert (y - (want.flip(-1) if f else want)).abs().max() < 1.01


def test_arrays_and_batches_keep_the_fast_layout():
    from fastbench.draw.crop import _slice
    x = np.random.default_rng(0).integers(0, 255, (2, 60, 80, 3), dtype='uint8')
    for o in x[0], torch.from_numpy(x[0]).permute(2, 0, 1): assert _slice(o, 3, 5, 20, 30).is_contiguous() is False and F.interpolate(
        _slice(o, 3, 5, 20, 30), (16, 16), mode='bilinear', antialias=True).is_contiguous(memory_format=torch.channels_last)
    boxes = np.array([[3, 5, 20, 30], [0, 0, 60, 80]])
    assert torch.equal(crop_slices(list(x), boxes, (16, 16)), crop_slices(torch.from_numpy(x).permute(0, 3, 1, 2), boxes, (16, 16)))


def test_crop_is_what_pillow_gives():
    from PIL import Image
    yy, xx = np.mgrid[:200, :260]
    a = np.stack([127+120*np.sin(xx/9+c)*np.cos(yy/(7+c)) for c in range(3)], -1).astype('uint8')
    x = torch.from_numpy(a).permute(2, 0, 1)[None]
    got = crop_slices(x, np.array([[20, 30, 150, 170]]), (64, 64))[0].permute(1, 2, 0).numpy()
    want = np.asarray(Image.fromarray(a).crop((30, 20, 200, 170)).resize((64, 64), Image.BILINEAR))
    assert np.abs(got.astype(int)-want).max() <= 2


def test_validation_is_what_random_resized_crop_does():
    from PIL import Image
    x = images(2, 90, 110)
    got = BatchCrop(48)(x, split_idx=1)
    for o, y in zip(x, got):
        im = fa.PILImage.create(o.permute(1, 2, 0).numpy()) if hasattr(fa, 'PILImage') else Image.fromarray(o.permute(1, 2, 0).numpy())
        want = torch.from_numpy(np.asarray(fa.RandomResizedCrop(48)(im, split_idx=1)).copy()).permute(2, 0, 1)
        assert want.shape == y.shape and (want.int()-y.int()).abs().max() <= 2


def test_images_masks_and_points_move_together():
    x = torch.zeros(20, 3, 64, 96)
    at = torch.stack([torch.randint(20, 76, (20,)), torch.randint(15, 49, (20,))], 1)
    for i, (c, r) in enumerate(at): x[i, :, r-1:r+2, c-1:c+2] = 1.
    p = (at+.5)*2/torch.tensor([96, 64])-1
    for t in BatchCrop(64, min_scale=.5, flip=.5, seed=3), BatchAffine(64, min_scale=.5, seed=3), BatchAffine(seed=3), BatchFlip(seed=3):
        y, m, q = t((TensorImage(x), TensorMask(x[:,0].long()), TensorPoint(p[:,None])), split_idx=0)
        h, w = y.shape[-2:]
        seen = 0
        for i in range(20):
            c, r = (((q[i,0]+1)/2*torch.tensor([w, h]))).tolist()
            if not (2 < c < w-2 and 2 < r < h-2): continue
            seen += 1
            near = y[i, 0, max(int(r)-2, 0):int(r)+3, max(int(c)-2, 0):int(c)+3]
            assert near.max() > .5, (type(t), i)
            assert m[i, max(int(r)-2, 0):int(r)+3, max(int(c)-2, 0):int(c)+3].max() == 1
        assert seen > 6


def place(x):
    "Where the light of each image is: x and y, from -1 to 1"
    x = x.as_subclass(torch.Tensor).float().reshape(len(x), -1, *x.shape[-2:])[:,0]
    ways = [torch.linspace(-1, 1, n*2+1)[1::2] for n in x.shape[-2:]]
    return torch.stack([(x*o).sum((1, 2))/x.sum((1, 2)) for o in (ways[1], ways[0][:,None])], 1)


@pytest.mark.parametrize('make, size', [(lambda: BatchCrop(32, min_scale=.5, flip=.5, seed=3), (32, 32)), (lambda: BatchFit((20, 50), flip=.5, seed=3), (20, 50)), (lambda: BatchAffine(32, min_scale=.5, seed=3), (32, 32)),
                                        (lambda: BatchAffine(seed=3, pad_mode='zeros'), None), (lambda: BatchFlip(seed=3), None)], ids=['crop', 'fit', 'affine', 'same', 'flip'])
@pytest.mark.parametrize('split', [0, 1])
def test_a_target_of_another_size_moves_with_its_image(make, size, split):
    "As in super-resolution, or with masks of half the side"
    spot = torch.zeros(24, 3, 48, 64)
    for i in range(24): spot[i,:,20+i % 8:26+i % 8,24+i % 12:32+i % 12] = 1
    large, half = (F.interpolate(spot, scale_factor=o, mode='area' if o < 1 else 'nearest') for o in (2, .5))
    x, y, m = make()((TensorImage(spot), TensorImage(large), TensorMask((half[:,0] > .4).long())), split_idx=split)
    if size: assert {tuple(o.shape[-2:]) for o in (x, y, m)} == {size}
    else: assert [tuple(o.shape[-2:]) for o in (x, y, m)] == [(48, 64), (96, 128), (24, 32)]
    assert m.dtype == torch.int64 and type(m) is TensorMask
    assert (place(x) - place(y)).abs().median() < .02 and (place(x) - place(m)).abs().median() < .06


def test_a_part_of_a_pixel_can_be_cut():
    x = torch.rand(3, 3, 4, 4)
    got = BatchCrop(8, min_scale=.01, max_scale=.01, seed=0)((TensorImage(torch.rand(3, 3, 64, 64)), TensorImage(x)), split_idx=0)[1]
    assert got.isfinite().all() and got.min() >= x.min() - 1e-6 and got.max() <= x.max() + 1e-6


def test_without_a_seed_pytorchs_generator_decides_alone():
    x = images(6, 30, 40, torch.float32)
    for t in BatchCrop(16), BatchAffine(16, min_scale=.3), BatchColour(), BatchErase(1.), BatchFlip(), BatchCutout(5):
        def drawn():
            torch.manual_seed(3)
            return t(x.clone(), split_idx=0).clone()
        assert torch.equal(drawn(), drawn()), type(t)


def test_a_mask_keeps_its_classes():
    m = TensorMask(torch.randint(0, 9, (4, 50, 70)))
    for t in BatchCrop(32, seed=0), BatchAffine(32, seed=0):
        for split in 0, 1:
            got = t((TensorImage(torch.rand(4, 3, 50, 70)), m), split_idx=split)[1]
            assert got.dtype == m.dtype and got.shape == (4, 32, 32) and set(got.unique().tolist()) <= set(range(9))
    assert crop_nearest(m[:,None], np.tile([0, 0, 50, 70], (4, 1)), (50, 70)).equal(m[:,None])


def test_boxes_are_refused_by_name():
    boxes = TensorBBox(torch.rand(2, 3, 4))
    for t in BatchCrop(16), BatchAffine(16), BatchFlip():
        with pytest.raises(UserError, match='does not move boxes'): t((images(2), boxes), split_idx=0)


def images_with_boxes(folder, tfm):
    for i in range(8): Image.new('RGB', (40, 40), (i, 9*i, 99)).save(folder/f'{i}.png')
    block = DataBlock((ImageBlock, BBoxBlock, BBoxLblBlock), get_items=get_image_files, get_y=[one_box, one_name], n_inp=1, item_tfms=fa.Resize(32), batch_tfms=tfm, splitter=RandomSplitter(.25, seed=0))
    return block.dataloaders(folder, bs=2, num_workers=0, device='cpu')


def one_box(f): return [[4., 4., 20., 30.]]
def one_name(f): return ['x']


@pytest.mark.parametrize('tfm', [fa.Flip(), fa.aug_transforms(size=24), fa.Brightness()])
def test_a_learner_of_boxes_keeps_fastais_augmentation(tmp_path, tfm):
    learn = Learner(dls := images_with_boxes(tmp_path, tfm), nn.Flatten(), loss_func=CrossEntropyLossFlat())
    with pytest.raises(UserError, match=r'these items have boxes \(TensorBBox\), and Batch\w+ does not move boxes: leave') as e: learn.fast_augment()
    assert '\n' not in str(e.value) and learn.dls is dls and len(dls.one_batch()) == 3


def test_normalisation_of_images_with_boxes_is_swapped(tmp_path):
    dls = images_with_boxes(tmp_path, Normalize.from_stats(*imagenet_stats, cuda=False))
    for a, b in zip(dls.valid.one_batch(), fast_augment(dls).valid.one_batch()): assert type(a) is type(b) and torch.allclose(a, b, atol=1e-4)


# Affine

class Recorded:
    "fastai's own matrices and coordinates of a batch"
    def __init__(self, **kwargs): self.tfms = fa.aug_transforms(max_lighting=0, **kwargs)
    def matrices(self, x):
        t = self.tfms[0]
        t.before_call(x, 0)
        return np.asarray(t.mat), t.coord_fs


@pytest.mark.parametrize('name,kwargs', [('rotate', dict(max_rotate=10, max_zoom=1, max_warp=0)), ('zoom', dict(max_rotate=0, max_zoom=1.3, max_warp=0)),
                                         ('flip', dict(max_rotate=0, max_zoom=1, max_warp=0))])
def test_matrices_are_fastais(name, kwargs):
    x = TensorImage(torch.zeros(N, 1, 6, 8))
    theirs, _ = Recorded(**kwargs).matrices(x)
    t = BatchAffine(seed=2, **kwargs)
    t.draw(x)
    for i in range(2):
        for j in range(3): same(t.matrices[:,i,j].round(5), theirs[:,i,j].round(5), f'{name} {i}{j}')


def test_warp_is_fastais():
    x = TensorImage(torch.zeros(N, 1, 6, 8))
    theirs = fa._WarpCoord(magnitude=.2, p=.75)
    theirs.before_call(x)
    k = fa.find_coeffs(theirs.orig_pts, theirs.targ_pts)[...,0].numpy()
    t = BatchAffine(seed=2, flip=0, max_rotate=0, max_zoom=1, max_warp=.2, p=.75)
    t.draw(x)
    ours = t.matrices.reshape(N, 9)
    for i in range(8): same(ours[:,i].round(4), k[:,i].round(4), f'coefficient {i}')
    xy = theirs.targ_pts.numpy()
    again = warp_matrices(-1-xy[:,0,1], -1-xy[:,0,0])
    assert np.allclose(again.reshape(N, 9)[:,:8], k, atol=1e-4)


@pytest.mark.parametrize('size', [None, (40, 48)])
def test_pixels_are_fastais_for_the_same_draws(size):
    x = TensorImage(F.interpolate(torch.rand(6, 3, 8, 8), (60, 80), mode='bicubic').clamp(0, 1))
    t = BatchAffine(size, seed=4, val_xtra=0)
    y = t(x, split_idx=0)
    affine = torch.from_numpy(t._affine(uniforms(t.key, range(6), 51))).float()
    warp = t._warped(uniforms(t.key, range(6), 51)).reshape(6, 9, 1)[:,:8]
    def coord(c): return fa.apply_perspective(c, torch.from_numpy(warp).float()[...,0])
    want = x.affine_coord(affine[:,:2], coord, sz=size, align_corners=True)
    assert (y-want).abs().max() < 1e-3


def test_large_crops_are_averaged_before_they_are_sampled():
    x = TensorImage((torch.arange(256) % 2).float().expand(2, 3, 256, 256).clone())  # stripes of one pixel
    t = BatchAffine(32, flip=0, max_rotate=0, max_zoom=1, max_warp=0, seed=0)
    y = t(x, split_idx=0)
    assert (y-.5).abs().max() < .01
    assert reductions(np.array([[0, 0, 256, 256], [0, 0, 60, 60], [0, 0, 20, 20]]), (32, 32)).tolist() == [3, 0, 0]


def test_bytes_and_floats_are_moved_alike():
    x = images(4)
    a, b = (BatchAffine(32, min_scale=.4, seed=1)(o, split_idx=0) for o in (x, x.float()))
    assert a.dtype == torch.float32 and torch.equal(a, b)
    pipe = Pipeline([IntToFloatTensor(), BatchAffine(32, seed=1)], split_idx=0)
    assert 0 <= pipe(x).min() and pipe(x).max() <= 1.0001


# Colours

@pytest.mark.parametrize('name,theirs', [('brightness', fa.Brightness), ('contrast', fa.Contrast), ('saturation', fa.Saturation), ('hue', fa.Hue)])
def test_colours_are_fastais(name, theirs):
    x, most = TensorImage(torch.rand(N, 3, 2, 2)), .3
    f = theirs(most, p=.6).fs[0]
    f.before_call(x)
    want = np.asarray(f.change)
    if name == 'brightness': want = np.log(want/(1-want))
    none = dict(brightness=0, contrast=0, saturation=0, hue=0)
    t = BatchColour(**(none | {name: most}), p=.6, seed=0)
    t.draw(x)
    same(t.change[name].round(5), want.round(5), name)
    # and, with the same numbers, the same colours
    fixed = torch.from_numpy(t.change[name]).float()
    f.change = fixed.sigmoid() if name == 'brightness' else fixed
    tfm = theirs(most, p=.6)
    tfm.fs[0].change = f.change
    want = tfm.encodes(TensorImage(x.clone()))
    assert torch.allclose(t.encodes(x), want, atol=2e-4)


def test_colours_are_composed_as_fastai_does():
    x = TensorImage(torch.rand(5, 3, 6, 6))
    t = BatchColour(.3, .3, .3, seed=0)
    t.draw(x)
    b, c, s = (fa.Brightness(.3), fa.Contrast(.3), fa.Saturation(.3))
    for o, k in ((b, 'brightness'), (c, 'contrast'), (s, 'saturation')):
        v = torch.from_numpy(t.change[k]).float()
        o.fs[0].change = v.sigmoid() if k == 'brightness' else v
    theirs, = fa.setup_aug_tfms([b, c, s])
    assert torch.allclose(t.encodes(x), theirs.encodes(TensorImage(x.clone())), atol=2e-4)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32, torch.float64])
def test_hue_is_turned_as_fastai_does(dtype):
    "Greys, black, white and pixels with two equal values, too"
    steps = torch.tensor([0, .001, .25, .5, .999, 1.], dtype=dtype)
    x = torch.cartesian_prod(steps, steps, steps).T.reshape(1, 3, 12, 18).repeat(7, 1, 1, 1)
    by = torch.tensor([-1, -.4, -.1, 0, .1, 1/3, 1.], dtype=dtype).view(7, 1, 1)
    h, s, v = fa.rgb2hsv(x.double()).unbind(1)
    want = fa.hsv2rgb(torch.stack([(h + by.double()) % 1, s, v], 1))
    assert (turn_hue(x, by).double() - want).abs().max() < (1e-2 if dtype == torch.float16 else 1e-5)


def test_colours_say_what_they_need():
    with pytest.raises(UserError, match='IntToFloatTensor'): BatchColour()(images(2), split_idx=0)
    with pytest.raises(UserError, match='3 channels'): BatchColour(hue=.1)(TensorImage(torch.rand(2, 1, 4, 4)), split_idx=0)
    with pytest.raises(UserError, match='contrast=1.5'): BatchColour(contrast=1.5)


# Erasing

@pytest.mark.parametrize('count', [1, 3])
def test_erased_areas_are_fastais(count):
    theirs = fa.RandomErasing(p=1., sl=.02, sh=.4, max_count=count)
    n, boxes = [], []
    for _ in range(N):
        k = random.randint(1, count)
        n.append(k)
        boxes += [[min(o, m) for o, m in zip(theirs._bounds(48*64/k, 48, 64), (48, 48, 64, 64))] for _ in range(k)]
    t = BatchErase(p=1., sl=.02, sh=.4, max_count=count, seed=0)
    t.draw(torch.empty(N, 1, 48, 64))
    ours = np.concatenate([o[o[:,1] > 0] for o in t.boxes])
    for i, name in enumerate(('begin of rows', 'end of rows', 'begin of columns', 'end of columns')):
        same(ours[:,i], np.array(boxes)[:,i], name)


def test_some_images_are_erased_by_noise_of_their_own():
    x = TensorImage(torch.full((400, 3, 32, 32), 7.))
    y = BatchErase(p=.5, seed=0)(x.clone(), split_idx=0)
    lost = (y != 7).flatten(1).any(1)
    assert chisquare([lost.sum(), 400-lost.sum()]).pvalue > .001
    noise = y[y != 7]
    assert abs(noise.mean()) < .02 and abs(noise.std()-1) < .02
    again = BatchErase(p=.5, seed=0)
    assert torch.equal(again(x.clone(), split_idx=0), y) and not torch.equal(again(x.clone(), split_idx=0), y)
    assert torch.equal(BatchErase(seed=0)(x.clone(), split_idx=1), x)


@pytest.mark.parametrize('make', [partial(BatchErase, p=1., max_count=2), partial(BatchCutout, 5, value=None)])
def test_the_noise_of_an_image_does_not_depend_on_its_batch(make):
    t, x = make(seed=3), TensorImage(torch.full((9, 3, 20, 24), 7.))
    t.reseed(4)
    whole = t(x.clone(), split_idx=0)
    for items in [8, 1], [5, 0, 7, 2]:
        t.next_items(items)
        assert torch.equal(t(x[items], split_idx=0), whole[items])
    assert len({o.item() for o in whole[whole != 7].unique()}) > 600


def test_masks_and_slices_erase_the_same():
    t = BatchErase(p=.7, max_count=1, value=0., seed=5)
    x = torch.rand(9, 3, 20, 24)
    t.draw(x)
    assert torch.equal(erase_masked(x, t.boxes[0], 0.), erase_slices(x.clone(), t.boxes[0], 0.))
    noise = noise_images(t.begin, x.shape[1:], 'cpu')
    assert torch.equal(erase_masked(x, t.boxes[0], torch.stack(noise)), erase_slices(x.clone(), t.boxes[0], noise))


def test_cutout():
    x = torch.ones(300, 2, 16, 20)
    t = BatchCutout(5, seed=0)
    assert ((t(TensorImage(x.clone()), split_idx=0) == 0).sum((1, 2, 3)) == 50).all()
    assert chisquare(np.bincount(t.boxes[0][:,0], minlength=12)).pvalue > .001
    with pytest.raises(UserError, match='17 pixels does not fit into images of 16x20'): BatchCutout(17)(TensorImage(x), split_idx=0)


# MixUp and CutMix

def mixed(cb, bs=N, classes=4):
    "The callback after a batch"
    data = [(torch.rand(bs, 1, 8, 10), torch.arange(bs) % classes)]
    learn = Learner(DataLoaders(data, data), nn.Sequential(nn.Flatten(), nn.Linear(80, classes)), loss_func=CrossEntropyLossFlat())
    seen = {}
    class Look(mixup.Callback):
        order = 99
        def before_batch(self):
            if self.training: seen.update(x=self.x.clone(), yb=self.yb)
    learn.add_cb(cb).add_cb(Look())
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return data[0][0], seen['x'], cb


def test_mixup_is_fastais():
    _, _, a = mixed(BatchMixUp(.4))
    _, _, b = mixed(mixup.MixUp(.4))
    same(a.lam, b.lam)


def test_each_image_has_its_own_patch_with_fastais_distribution():
    ours = patches(1-np.random.default_rng(0).beta(1., 1., N), np.random.default_rng(1).random((N, 2)), 24, 32)
    cb = mixup.CutMix(1.)
    cb.learn = type('L', (), dict(xb=(torch.zeros(1),), x=torch.zeros(1)))()
    theirs = np.array([[int(o) for o in cb.rand_bbox(32, 24, cb.distrib.sample((1,)))] for _ in range(N)])[:, [1, 3, 0, 2]]
    for i in range(4): same(ours[:,i], theirs[:,i], str(i))
    x, y, cb = mixed(BatchCutMix(), bs=300)
    changed = (x != y).float().mean((1, 2, 3))
    assert changed.unique().numel() > 20 and (changed <= 1-cb.lam+1e-6).all()
    own = changed == 0  # its own partner, or an empty patch
    assert own.float().mean() < .1 and torch.allclose(changed[~own], 1-cb.lam[~own], atol=1e-3)


@pytest.mark.parametrize('make', [BatchMixUp, BatchCutMix])
def test_the_loss_is_given_back_after_an_error(make):
    data = [(torch.rand(4, 1, 8, 8), torch.zeros(4).long())]*2
    class Broken(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
        def forward(self, x): raise KeyboardInterrupt
    learn = Learner(DataLoaders(data, data), Broken(), loss_func=CrossEntropyLossFlat(), cbs=make())
    loss = learn.loss_func
    with pytest.raises(KeyboardInterrupt), learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert learn.loss_func is loss


def test_mixing_of_float_targets():
    data = [(torch.rand(6, 1, 8, 8), torch.rand(6, 3))]
    for cb in BatchMixUp(), BatchCutMix():
        learn = Learner(DataLoaders(data, data), nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), loss_func=nn.MSELoss(), cbs=cb)
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        assert cb.lam.shape == (6,)
    with pytest.raises(UserError, match='alpha=0'): BatchMixUp(0)


# As batch transforms

def all_of(**kwargs): return batch_augment(24, min_scale=.4, max_lighting=.2, erase=.5, cutout=4, stats=imagenet_stats, **kwargs)


def test_a_seed_and_an_epoch_repeat():
    x = images(16)
    def run(tfms, key):
        p = Pipeline(tfms, split_idx=0)
        for t in p.fs:
            if hasattr(t, 'reseed'): t.reseed(key)
        return [p(x.clone()) for _ in range(2)]
    a, b, c = run([IntToFloatTensor(), *all_of()], 7), run([IntToFloatTensor(), *all_of()], 7), run([IntToFloatTensor(), *all_of()], 8)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and not torch.equal(a[0], a[1]) and not torch.equal(a[0], c[0])


def test_without_a_seeded_loader_set_seed_repeats():
    x = images(8)
    def run():
        torch.manual_seed(3)
        return Pipeline([IntToFloatTensor(), *all_of()], split_idx=0)(x.clone())
    assert torch.equal(run(), run()) and not torch.equal(run(), Pipeline([IntToFloatTensor(), *all_of()], split_idx=0)(x.clone()))


def test_each_image_is_its_own():
    x = images(1).repeat(30, 1, 1, 1)
    for t in BatchCrop(24, seed=0), BatchAffine(24, seed=0):
        assert len({o.numpy().tobytes() for o in t(TensorImage(x.clone()), split_idx=0)}) == 30
    floats = TensorImage(x.float()/255)
    for t in BatchColour(p=1., seed=0), BatchErase(p=1., seed=0):
        assert len({o.numpy().tobytes() for o in t(floats.clone(), split_idx=0)}) == 30


def test_fused_normalisation_is_fastais():
    x = images(4)
    want = Pipeline([IntToFloatTensor(), Normalize.from_stats(*imagenet_stats, cuda=False)])(x)
    ours = BatchNormalize.from_stats(*imagenet_stats, cuda=False)
    for got in ours(x), Pipeline([IntToFloatTensor(), ours])(x), ours(x.contiguous(memory_format=torch.channels_last)):
        assert torch.allclose(got, want, atol=1e-5) and got.is_contiguous() and type(got) is TensorImage
    assert x.dtype == torch.uint8


@pytest.mark.parametrize('t', [BatchAffine(16, min_scale=.3, seed=0), BatchAffine(seed=0), BatchColour(saturation=.2, hue=.1, seed=0), BatchNormalize.from_stats(*imagenet_stats, cuda=False)], ids=lambda o: type(o).__name__)
def test_a_result_stays_as_long_as_it_is_held(t):
    "And its memory is used again after that"
    def batch(): return images(40, dtype=torch.float32 if isinstance(t, BatchColour) else torch.uint8)
    first = t(batch(), split_idx=0)
    held, copy = first[1:], first.clone()
    del first
    second = t(batch(), split_idx=0)
    assert torch.equal(held, copy[1:]) and not torch.equal(second, copy)
    at = held.untyped_storage().data_ptr()
    del held
    assert t(batch(), split_idx=0).data_ptr() == at
    assert not pickle.loads(pickle.dumps(t)).memory.arrays


@pytest.mark.parametrize('n', [3, 40])
def test_colours_keep_the_layout(n):
    x = images(n, dtype=torch.float32).to(memory_format=torch.channels_last)
    assert BatchColour(saturation=.2, seed=0)(x, split_idx=0).is_contiguous(memory_format=torch.channels_last)


def test_a_batch_is_changed_part_by_part_as_at_once(monkeypatch):
    x = images(7)
    def made():
        tfms = batch_augment(12, min_scale=.05, max_rotate=10., max_warp=.2, max_lighting=.2, max_saturation=.2, max_hue=.1, stats=imagenet_stats, seed=3)
        return Pipeline([IntToFloatTensor(), *tfms], split_idx=0)(x)
    want = made()
    for room in 'affine', 'colour', 'batch': monkeypatch.setattr(f'fastbench.draw.{room}.chunk_size', lambda x: 2)
    assert torch.allclose(made(), want, atol=1e-5)


def test_in_a_data_block(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(24):
        (f := tmp_path/'ab'[i % 2]/f'{i}.png').parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype='uint8')).save(f)
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label, splitter=RandomSplitter(.25, seed=0),
                      batch_tfms=batch_augment(32, min_scale=.4, max_rotate=5., max_lighting=.1, stats=imagenet_stats, erase=.5))
    dls = block.dataloaders(tmp_path, bs=4, num_workers=0, device='cpu')
    x, y = dls.one_batch()
    assert x.shape == (4, 3, 32, 32) and x.dtype == torch.float32 and -4 < x.mean() < 4
    v, _ = next(iter(dls.valid))
    w, _ = next(iter(dls.valid))
    assert torch.equal(v, w) and v.shape == (4, 3, 32, 32)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*32*32, 2)), loss_func=CrossEntropyLossFlat(), cbs=BatchCutMix())
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    learn.export(tmp_path/'learn.pkl')
    dls.show_batch(max_n=2)


def test_a_learners_augmentation_is_swapped(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(24):
        (f := tmp_path/'ab'[i % 2]/f'{i}.png').parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype='uint8')).save(f)
    def made(*tfms):
        block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label, splitter=RandomSplitter(.25, seed=0), item_tfms=fa.Resize(32), batch_tfms=[*tfms])
        return Learner(block.dataloaders(tmp_path, bs=4, num_workers=0, device='cpu'), nn.Sequential(nn.Flatten(), nn.Linear(3*32*32, 2)), loss_func=CrossEntropyLossFlat())
    learn, plain = (made(*fa.aug_transforms(max_rotate=5.), Normalize.from_stats(*imagenet_stats, cuda=False)) for _ in range(2))
    learn.fast_images().fast_augment()
    assert [type(o).__name__ for o in learn.dls.train.after_batch.fs] == ['BatchAffine', 'IntToFloatTensor', 'BatchColour', 'BatchNormalize']
    for (x, y), (a, b) in zip(learn.dls.valid, plain.dls.valid): assert torch.allclose(x, a, atol=.05) and torch.equal(y, b)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    learn.export(tmp_path/'learn.pkl')
    with pytest.raises(UserError, match='none of these batch transforms has a faster one: Nothing, IntToFloatTensor'): made(Nothing()).fast_augment()
    with pytest.raises(UserError, match='Dihedral cannot be swapped: dihedral_mat'): made(*fa.aug_transforms(flip_vert=True)).fast_augment()


class Nothing(Transform):
    def encodes(self, x:TensorImage): return x


@pytest.mark.parametrize('kwargs,match', [(dict(flip=2), 'flip=2'), (dict(min_scale=.3), 'needs a size'), (dict(size=8, min_scale=0.), 'min_scale=0'),
                                          (dict(size=8, min_scale=3), 'min_scale=3'), (dict(erase=-1), 'erase=-1')])
def test_slips_are_one_line(kwargs, match):
    with pytest.raises(UserError, match=match) as e: batch_augment(**kwargs)
    assert '\n' not in str(e.value)


def test_nothing_waits_on_a_device():
    "On the meta device there are no values to wait for: whatever asked for one would raise"
    x = TensorImage(torch.empty(4, 3, 40, 50, device='meta'))
    for t in BatchCrop(16, flip=.5, seed=0), BatchAffine(16, min_scale=.3, seed=0), BatchColour(saturation=.1, seed=0), BatchFlip(seed=0), BatchCutout(3, seed=0):
        y = t(x, split_idx=0)
        assert y.device.type == 'meta' and math.prod(y.shape) > 0


@needs_gpu
@pytest.mark.parametrize('dtype', [torch.uint8, torch.float32])
@pytest.mark.parametrize('make', [lambda: BatchCrop(48, min_scale=.3, flip=.5, seed=0), lambda: BatchFlip(seed=0), lambda: BatchAffine(48, min_scale=.3, seed=0), lambda: BatchColour(seed=0),
                                  lambda: BatchColour(.2, .2, .2, .1, seed=0), lambda: BatchCutout(8, seed=0), lambda: BatchErase(.5, seed=0)],
                         ids=['crop', 'flip', 'affine', 'light', 'colour', 'cutout', 'erase'])
def test_on_cuda_the_pictures_are_those_of_a_cpu_and_nothing_waits(make, dtype):
    if isinstance(make(), BatchColour) and dtype == torch.uint8: pytest.skip('colours are changed as floats')
    x = images(32, 60, 80, dtype)
    want = make()(x.clone(), split_idx=0).as_subclass(torch.Tensor).float()
    x = x.to('cuda')
    make()(x.clone(), split_idx=0)  # kernels are loaded
    y, t = x.clone(), make()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try: got = t(y, split_idx=0)
    finally: torch.cuda.set_sync_debug_mode('default')
    off = (got.cpu().as_subclass(torch.Tensor).float() - want).abs().max()
    assert off <= (1 if dtype == torch.uint8 else 1e-5)


def mixes(cb, xb, yb, n_inp=1, loss=None):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
        def forward(self, *xs): return sum(o.float().mean(tuple(range(1, o.ndim))) for o in xs)[:, None]*self.w*torch.tensor([1., 2.])
    dls = DataLoaders([(*xb, *yb)], [(*xb, *yb)])
    dls.n_inp = n_inp
    learn = Learner(dls, Net(), loss_func=loss or CrossEntropyLossFlat(), cbs=cb)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return learn


@pytest.mark.parametrize('cb', [BatchMixUp, BatchCutMix])
def test_batches_that_cannot_be_mixed(cb):
    image, label = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])
    mixes(cb(), [image], [label])
    for xb, yb, n, said in (([torch.ones(4, 8, dtype=torch.long)], [label], 1, 'mixes images, and an input is a Tensor of int64: leave it out'),
                            ([image], [torch.zeros(4, 8, 8, dtype=torch.long)], 1, r'mixes one label of each image, and a target is a Tensor of int64 and shape \(4, 8, 8\): leave it out'),
                            ([image], [dict(a=label)], 1, 'mixes one label of each image, and a target is a dict: leave it out')):
        with pytest.raises(UserError, match=said): mixes(cb(), xb, yb, n)


@pytest.mark.parametrize('cb', [BatchMixUp, BatchCutMix])
def test_labels_are_not_averaged(cb):
    def loss(pred, y): return F.cross_entropy(pred, y)
    with pytest.raises(UserError, match='takes a mean of targets, and a target is a Tensor of int64: leave it out, or let a loss .*y_int = True'): mixes(cb(), [torch.rand(4, 3, 8, 8)], [torch.tensor([0, 1, 0, 1])], loss=loss)


def test_two_images_are_mixed_alike_or_refused():
    image, label = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])
    seen = []
    cb = BatchMixUp()
    learn = mixes([cb, Keep(seen)], [image, image*2], [label], 2)
    a, b = seen[0]
    assert a.shape == image.shape and torch.allclose(a*2, b, atol=1e-6) and not torch.equal(a, image)
    with pytest.raises(UserError, match='BatchCutMix mixes one image, and there are 2 inputs'): mixes(BatchCutMix(), [image, image], [label], 2)


class Keep(Callback):
    order = 99
    def __init__(self, seen): self.seen = seen
    def before_batch(self):
        if self.training: self.seen.append(self.learn.xb)


@pytest.mark.parametrize('cls, given', [(WeightedDL, dict(wgts=[0, 1, 0, 0, 0, 1, 0, 0])), (PartialDL, dict(partial_n=4))])
def test_a_swapped_loader_samples_as_before(cls, given):
    items = [(TensorImage(torch.rand(3, 8, 8)), torch.tensor(i)) for i in range(8)]
    dl = cls(items, bs=2, shuffle=True, num_workers=0, device='cpu', after_batch=[fa.Flip()], **given)
    got = fast_augment(DataLoaders(dl)).train
    drawn = torch.cat([y for _, y in got]).tolist()
    assert type(got) is cls and (set(drawn) <= {1, 5} if cls is WeightedDL else len(drawn) == 4 and len(got) == 2)


class Darkest(fa.Brightness):
    def encodes(self, x:TensorImage): return x*0


class Turned(fa.Rotate):
    def encodes(self, x:TensorImage): return x.flip(-2)


class Cleared(fa.RandomErasing):
    def encodes(self, x:TensorImage): return x*0 + .5


@pytest.mark.parametrize('own', [Darkest(p=1.), Turned(), Cleared(p=1.)])
def test_a_class_derived_from_fastais_is_left_as_it_is(tmp_path, own):
    "It may do anything: the settings of its base say nothing of that"
    rng = np.random.default_rng(0)
    for i in range(12):
        (f := tmp_path/'ab'[i % 2]/f'{i}.png').parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype='uint8')).save(f)
    block = DataBlock((ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label, splitter=RandomSplitter(.25, seed=0), item_tfms=fa.Resize(32, method='squish'),
                      batch_tfms=[own, Normalize.from_stats(*imagenet_stats, cuda=False)])
    dls = block.dataloaders(tmp_path, bs=4, num_workers=0, device='cpu')
    assert any(type(o) is type(own) for o in fast_augment(dls).train.after_batch.fs)

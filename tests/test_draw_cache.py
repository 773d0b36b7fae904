"Caches: the same items and batches, a key that tells every change, faults of disks and files, several processes"
import functools
import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import fastai.callback.progress  # adds no_bar
from fastai.data.block import CategoryBlock, DataBlock, RegressionBlock, TransformBlock
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.core import DataLoaders, Datasets, TfmdDL
from fastai.data.load import fa_collate
from fastai.data.transforms import Categorize, FuncSplitter, IndexSplitter, Normalize, RegexLabeller, ToTensor, get_image_files, parent_label
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.text.data import TensorText
from fastai.torch_core import TensorCategory, TensorImage, TensorMask, set_seed
from fastai.vision.augment import FlipItem, RandomResizedCrop, Resize
from fastai.vision.core import PILImage, PILImageBW, TensorPoint, imagenet_stats
from fastai.vision.data import ImageBlock, ImageDataLoaders, MaskBlock
from fasttransform import DisplayedTransform, Transform
from PIL import Image
from scipy.stats import ks_2samp
from torch import nn

from fastbench.draw import build as build_room
from fastbench.draw import decode as decode_room
from fastbench.draw.batch import batch_augment
from fastbench.draw.build import Items, NoSpace, open_store
from fastbench.draw.cached import CachedLoaders, cached
from fastbench.draw.crop import BatchFit, crop_slices
from fastbench.draw.describe import NoFingerprint, describe, fingerprint, fingerprint_items
from fastbench.draw.fast import fast_images
from fastbench.draw.kept import FORMAT, clear_caches, kept_caches, read_about
from fastbench.draw.memory import RecycledMemory
from fastbench.draw.pool import StuckWorker
from fastbench.draw.seeded import SeededDL
from fastbench.draw.store import PartWriter, as_bytes, encoded, from_bytes
from fastbench.draw.whole import batch_crop
from fastbench.draw.workers import auto_workers
from fastbench.errors import UserError
from test_draw_loader import ended, older, threads

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture
def pets(tmp_path):
    "40 pictures of uneven size in two classes"
    rng = np.random.default_rng(0)
    for i in range(40):
        h, w = rng.integers(50, 90, 2)
        (f := tmp_path/'pets'/'ab'[i % 2]/f'{i:02}.jpg').parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype='uint8')).resize((int(w), int(h)), Image.BICUBIC).save(f, quality=95)
    return tmp_path/'pets'


def is_valid(o): return int(o.stem) >= 32
CROP = [RandomResizedCrop(32, min_scale=.35), FlipItem()]


def make(folder, item_tfms=CROP, batch_tfms=None, bs=8, **kwargs):
    block = DataBlock((ImageBlock, CategoryBlock), get_items=sorted_files, get_y=parent_label, splitter=FuncSplitter(is_valid), item_tfms=item_tfms,
                      batch_tfms=Normalize.from_stats(*imagenet_stats, cuda=False) if batch_tfms is None else batch_tfms)
    return block.dataloaders(folder, bs=bs, num_workers=0, device='cpu', **kwargs)


def sorted_files(folder): return sorted(get_image_files(folder))


def epochs(dl, n=2):
    set_seed(3)
    dl.rng.seed(3)
    return [b for _ in range(n) for b in dl]


def equal(a, b):
    assert len(a) == len(b) > 0
    for x, y in zip(a, b):
        assert all(type(o) is type(p) and torch.equal(o, p) for o, p in zip(x, y))


def folders(where): return sorted(o.name for o in where.glob('[!.]*'))


# The same batches

@pytest.mark.parametrize('store', ['array', 'parquet'])
@pytest.mark.parametrize('tfms', [CROP, Resize(32), Resize(32, method='squish'), [Resize(40), RandomResizedCrop(24)]])
def test_batches_are_those_without_a_cache(pets, tmp_path, tfms, store):
    plain = make(pets, tfms)
    got = cached(plain, tmp_path/'c', store=store, workers=0)
    for i in range(2): equal(epochs(plain[i]), epochs(got[i]))
    again = cached(make(pets, tfms), tmp_path/'c', store=store, workers=0)  # from disk
    for i in range(2): equal(epochs(plain[i]), epochs(again[i]))
    assert len(folders(tmp_path/'c')) == 2


@pytest.mark.parametrize('store', ['array', 'parquet'])
@pytest.mark.parametrize('encode', ['png', 'webp'])
def test_encoded_without_loss_the_batches_are_the_same(pets, tmp_path, encode, store):
    plain = make(pets)
    raw, got = (cached(plain, tmp_path/'c', store=store, encode=o, workers=0) for o in (None, encode))
    for i in range(2): equal(epochs(raw[i]), epochs(got[i]))
    assert [str(o) for o in got.train.dataset.store.fields] == [f'PILImage ({encode})', 'TensorCategory'] and len(folders(tmp_path/'c')) == 4
    whole = cached(plain, tmp_path/'c', store=store, encode=encode, whole=True, workers=0)
    equal(epochs(whole.train), epochs(cached(plain, tmp_path/'c', store=store, whole=True, workers=0).train))
    assert any(f'PILImage ({encode})' in o.says for o in kept_caches(tmp_path/'c'))


def test_what_loses_something_is_only_done_when_asked(pets, tmp_path):
    "And never to a mask"
    for i, f in enumerate(sorted_files(pets)): Image.fromarray(np.full(np.asarray(Image.open(f)).shape[:2], i, 'uint8')).save(f.with_suffix('.png'))
    block = DataBlock((ImageBlock, MaskBlock), get_items=_jpgs, get_y=_mask_of, splitter=FuncSplitter(is_valid), item_tfms=RandomResizedCrop(32))
    plain = block.dataloaders(pets, bs=8, num_workers=0, device='cpu')
    got = cached(plain, tmp_path/'c', encode='jpeg', workers=0)
    assert [str(o) for o in got.train.dataset.store.fields] == ['PILImage (jpeg)', 'PILMask (png)']
    far = []
    for (x, m), (x2, m2) in zip(epochs(plain.train), epochs(got.train)):
        assert torch.equal(m, m2)
        far.append(float((x - x2).abs().mean()))
    assert 0 < max(far) < 4/255
    a, b = (cached(make(pets), tmp_path/'c', encode=o, workers=0).train.dataset.store.folder for o in ('png', 'jpeg'))
    assert a != b and sum(o.stat().st_size for o in a.iterdir()) > sum(o.stat().st_size for o in b.iterdir())


def test_grey_and_other_modes(tmp_path):
    "What cannot be encoded as it is stays as pixels, and what has no image to encode is told"
    x = np.random.default_rng(0).integers(0, 255, (9, 7, 4), dtype='uint8')
    for mode, codec in dict(RGB='png', L='png', RGBA='', P='', CMYK='').items():
        im = Image.fromarray(x).convert(mode) if mode != 'CMYK' else Image.fromarray(x, 'CMYK')
        im.info |= dict(icc_profile=b'x'*99, transparency=3 if mode in 'PL' else (1, 2, 3), exif=b'y'*99)
        f, raw, shape = as_bytes(encoded(im, 'png'))
        assert f.codec == codec and np.array_equal(np.asarray(from_bytes(f, raw, shape)), np.asarray(im)) and b'x'*99 not in bytes(raw)
    with pytest.raises(UserError, match="encode='png' has no effect: these items hold no image"): cached(Datasets(['a b'], [[_tokens]]), tmp_path/'t', encode='png', workers=0)
    with pytest.raises(UserError, match="jpg.*jpeg"): cached([1], tmp_path, encode='jpg')


def test_a_pillow_without_webp_says_so(pets, tmp_path, monkeypatch):
    monkeypatch.setattr('fastbench.draw.store.features.check', lambda o: False)
    with pytest.raises(UserError, match="built without WebP. Use encode='png'"): cached(make(pets), tmp_path/'c', encode='webp', workers=0)


def test_all_that_one_asks_of_loaders(pets, tmp_path):
    plain = make(pets)
    got = cached(plain, tmp_path/'c', workers=0)
    assert isinstance(got, CachedLoaders) and (got.vocab, got.c, len(got.train), len(got.valid)) == (plain.vocab, 2, len(plain.train), len(plain.valid))
    assert got.train_ds.items == plain.train_ds.items and got.train_ds.split_idx == 0 and got.valid_ds.split_idx == 1
    test = got.test_dl(sorted_files(pets)[:5])
    assert test.one_batch()[0].shape == (5, 3, 32, 32)
    got.show_batch(max_n=2)


ways = dict(items=cached, whole=partial(cached, whole=True), threads=lambda *args, **kwargs: fast_images(cached(*args, **kwargs)))


@pytest.mark.parametrize('way', list(ways))
def test_new_data_are_transformed_as_the_cached_ones_by_now(pets, tmp_path, way):
    "As `vision_learner` adds `Normalize` to the loaders it is given, and `to` moves them"
    norm, files = partial(Normalize.from_stats, *imagenet_stats, cuda=False), sorted_files(pets)[:5]
    plain, got = make(pets, batch_tfms=[]), ways[way](make(pets, batch_tfms=[]), tmp_path/'c', workers=0)
    for o in plain, got: o.add_tfms([norm()], 'after_batch')
    want, = plain.test_dl(files, bs=5)
    loaders = [got.test_dl(files, bs=5)] + [got.valid.new(got.test_dl(files).dataset, bs=5)]*(way == 'whole')
    for o in loaders: torch.testing.assert_close(next(iter(o))[0], want[0])
    assert [len(o.after_batch.fs) for o in got.new_empty().loaders] == [2, 2]
    assert got.test_dl(files, after_batch=[]).one_batch()[0].dtype == torch.uint8
    got.to(torch.device('meta'))
    assert {o.device.type for o in (got.test_dl(files), *got.new_empty().loaders)} == {'meta'} and got.test_dl(files, device='cpu').device.type == 'cpu'


@pytest.mark.parametrize('whole', [False, True])
def test_a_learner_trains_predicts_and_is_exported(pets, tmp_path, whole):
    dls = cached(make(pets), tmp_path/'c', whole=whole, workers=0)
    learn = Learner(dls, nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2)), loss_func=CrossEntropyLossFlat())
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        preds, targs = learn.get_preds()
        assert preds.shape == (8, 2)
        assert learn.predict(sorted_files(pets)[0])[0] in ('a', 'b')
    learn.path = tmp_path
    learn.export('x.pkl')
    from fastai.learner import load_learner
    assert load_learner(tmp_path/'x.pkl').dls.vocab == dls.vocab


def test_masks_and_texts(pets, tmp_path):
    for i, f in enumerate(sorted_files(pets)): Image.fromarray(np.full(np.asarray(Image.open(f)).shape[:2], i, 'uint8')).save(f.with_suffix('.png'))
    block = DataBlock((ImageBlock, MaskBlock), get_items=_jpgs, get_y=_mask_of, splitter=FuncSplitter(is_valid), item_tfms=RandomResizedCrop(32))
    plain = block.dataloaders(pets, bs=8, num_workers=0, device='cpu')
    got = cached(plain, tmp_path/'c', workers=0)
    equal(epochs(plain.train), epochs(got.train))
    before = folders(tmp_path/'c')
    m = _mask_of(_jpgs(pets)[0])  # a mask is a source file, too
    Image.fromarray(np.full(np.asarray(Image.open(m)).shape, 7, 'uint8')).save(m)
    cached(block.dataloaders(pets, bs=8, num_workers=0, device='cpu'), tmp_path/'c', workers=0)
    assert len(folders(tmp_path/'c')) == len(before)+1  # training's alone

    ds = Datasets(['a b', 'c', 'd e f'], [[_tokens]])
    c = cached(ds, tmp_path/'t', workers=0)
    assert all(torch.equal(a[0], b[0]) and type(a[0]) is type(b[0]) is TensorText for a, b in zip(c, ds))


def _jpgs(folder): return sorted(get_image_files(folder).filter(lambda o: o.suffix == '.jpg'))
def _mask_of(o): return o.with_suffix('.png')
def _bytes_of_mask(o): return TensorMask(torch.full((32, 32), int(o.stem), dtype=torch.uint8))
def _tokens(o): return TensorText(torch.tensor([ord(c) for c in o]))


# Threads

@pytest.mark.parametrize('store', ['array', 'parquet'])
@pytest.mark.parametrize('encode', [None, 'png', 'webp', 'jpeg'])
def test_threads_draw_from_a_cache(pets, tmp_path, encode, store):
    "The very batches of the cache, if that is asked for; else the same crops, resized as threads do"
    kept = cached(make(pets), tmp_path/'c', store=store, encode=encode, workers=0)
    exact, near, one = (fast_images(kept, exact=e, threads=n) for e, n in ((True, 2), (False, 2), (False, 0)))
    assert type(exact) is CachedLoaders and exact.vocab == kept.vocab and exact.test_dl(sorted_files(pets)[:3]).one_batch()[0].shape == (3, 3, 32, 32)
    for i in range(2):
        if encode != 'jpeg': equal(epochs(fast_images(make(pets), exact=True)[i]), epochs(exact[i]))
        equal(epochs(near[i]), epochs(one[i]))
        for (x, y), (x2, y2) in zip(epochs(exact[i]), epochs(near[i]), strict=True): assert torch.equal(y, y2) and (x - x2).abs().mean() < .1


def test_no_row_of_a_kept_jpeg_is_decoded_below_its_crop(pets, tmp_path, monkeypatch):
    "As of a JPEG in a file"
    cut_short = decode_room._shortened
    short = []
    monkeypatch.setattr(decode_room, '_shortened', lambda *args: short.append(res := cut_short(*args)) or res)
    kept = cached(make(pets, [RandomResizedCrop(16, min_scale=.08)]), tmp_path/'c', encode='jpeg', workers=0)
    fast = fast_images(kept, decoder='pillow-scaled', threads=0)
    few = epochs(fast.train)
    assert sum(o is not None for o in short) > len(short)/4 > 0
    monkeypatch.setattr(decode_room, '_shortened', lambda *args: None)
    equal(few, epochs(fast.train))


def test_threads_leave_other_caches_alone(pets, tmp_path):
    for i, f in enumerate(sorted_files(pets)): Image.fromarray(np.full(np.asarray(Image.open(f)).shape[:2], i, 'uint8')).save(f.with_suffix('.png'))
    block = DataBlock((ImageBlock, MaskBlock), get_items=_jpgs, get_y=_mask_of, splitter=FuncSplitter(is_valid), item_tfms=RandomResizedCrop(32))
    for dls, why in ((block.dataloaders(pets, bs=8, num_workers=0, device='cpu'), 'a target is a PILMask'), (make(pets, Resize(32, 'squish')), 'has no images')):
        with pytest.raises(UserError, match=f'cannot be drawn by threads: .*{why}') as e: fast_images(cached(dls, tmp_path/'c', workers=0))
        assert '\n' not in str(e.value)


def test_a_cache_may_be_read_by_several_threads_at_once(tmp_path):
    "More parts than are kept in memory"
    class Slow(dict):
        def pop(self, *args):
            time.sleep(1e-4)  # another thread may take it away first
            return super().pop(*args)
    store = open_store(tmp_path/'x', Items(square, 200), store='parquet', per_part=4, workers=0)
    store.room, store.parts = 3, Slow()
    def read(seed): return [float(store[i][0][0, 0]) == i for i in np.random.default_rng(seed).permutation(200)]
    with ThreadPoolExecutor(4) as pool: assert all(map(all, pool.map(read, range(4))))
    assert len(store.parts) <= 6


def test_parts_of_parquet_are_kept_while_there_is_room(tmp_path, monkeypatch):
    "Of 50 parts all, where memory allows; 16 at least, and a share for each process"
    monkeypatch.setattr('fastbench.draw.store.psutil.virtual_memory', lambda: SimpleNamespace(available=free))
    def kept():
        store = open_store(tmp_path/'x', Items(square, 200), store='parquet', per_part=4, workers=0)
        for i in range(200): store[i]
        return len(store.parts)
    free = 4*40*4*(64 + 8)  # a part has four items of 64 and 8 bytes
    assert kept() == 40
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    assert kept() == 20
    free = 0
    assert kept() == 16


# Whole batches

@pytest.mark.parametrize('tfms', [CROP, [Resize(32), FlipItem()]])
def test_whole_batches_have_the_same_distribution(tmp_path, tfms):
    set_seed(1)  # first: loaders draw the seed of their order when they are made
    ramp = np.tile(np.linspace(0, 255, 80).astype('uint8')[None,:,None], (60, 1, 3))  # where a crop was, and how wide, shows in its colours
    for i in range(16):
        (f := tmp_path/'r'/'a'/f'{i:02}.png').parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(ramp).save(f)
        if i == 15: Image.fromarray(ramp).save(f.with_name('40.png'))
    plain = make(tmp_path/'r', tfms, batch_tfms=[], bs=16)
    whole = cached(plain, tmp_path/'c', whole=True, workers=0)
    def ends(dl): return np.array([[float(x[0,:,0].mean()), float(x[0,:,-1].mean())] for _ in range(60) for x in dl.one_batch()[0]])
    a, b = ends(plain.train), ends(whole.train)
    for i in range(2): assert ks_2samp(a[:,i].round(2), b[:,i].round(2)).pvalue > .001
    assert ks_2samp((a[:,1]-a[:,0]).round(2), (b[:,1]-b[:,0]).round(2)).pvalue > .001
    v, w = plain.valid.one_batch()[0], whole.valid.one_batch()[0]
    assert (v-w).abs().max() < 3/255


def test_whole_batches_keep_order_and_labels_and_repeat(pets, tmp_path):
    plain = make(pets)
    whole = cached(plain, tmp_path/'c', whole=True, workers=0)
    for i in range(2): assert [y.tolist() for _, y in epochs(plain[i])] == [y.tolist() for _, y in epochs(whole[i])]
    a, b = epochs(whole.train), epochs(whole.train)
    equal(a, b)
    assert not torch.equal(a[0][0], a[len(whole.train)][0]), 'another epoch, other crops'
    x, y = a[0]
    assert type(x) is TensorImage and x.dtype == torch.float32 and x.shape == (8, 3, 32, 32) and type(y).__name__ == 'TensorCategory'
    assert abs(float(x.mean()) - float(epochs(plain.train)[0][0].mean())) < .5


def test_an_items_crop_does_not_depend_on_its_batch(pets, tmp_path):
    whole = cached(make(pets), tmp_path/'c', whole=True, workers=0).train
    whole.epoch_key = 5
    def of(idxs):
        whole.crop.reseed(5)
        return dict(zip(idxs, whole.cut(idxs)[0].clone()))
    a, b = of([0, 1, 2, 3]), of([3, 9, 1])
    assert torch.equal(a[3], b[3]) and torch.equal(a[1], b[1])


def test_normalisation_in_one_step_is_the_same(pets, tmp_path):
    a, b = (cached(make(pets, batch_tfms=o), tmp_path/'c', whole=True, workers=0).train for o in (None, [Normalize.from_stats(*imagenet_stats, cuda=False), Nothing()]))
    assert [type(f).__name__ for f in a.after_batch.fs] == ['NormalizeBytes'] and len(b.after_batch.fs) == 3
    for (x, _), (y, _) in zip(epochs(a), epochs(b)): assert (x-y).abs().max() < 1e-4


def test_a_transform_between_the_two_gets_what_it_would(pets, tmp_path):
    "`IntToFloatTensor` and `Normalize` are one step until something comes between"
    class Negative(Transform):
        order = 50
        def encodes(self, x: TensorImage): return 1-x
    a, b = (cached(make(pets), tmp_path/'c', whole=True, workers=0) for _ in range(2))
    b.add_tfms([Negative()], 'after_batch')
    mean, std = (torch.tensor(o).view(3, 1, 1) for o in imagenet_stats)
    for (x, _), (y, _) in zip([*epochs(a.train), *a.valid], [*epochs(b.train), *b.valid], strict=True): assert (((1 - (x*std+mean))-mean)/std - y).abs().max() < 1e-4
    assert a.train.decode(a.train.one_batch())[0].max() > 100, 'as fastai decodes: whole numbers to 255'


def test_masks_are_classes_in_whole_batches_too(pets, tmp_path):
    block = DataBlock((ImageBlock, TransformBlock(type_tfms=_bytes_of_mask)), get_items=sorted_files, splitter=FuncSplitter(is_valid), item_tfms=Resize(32), batch_tfms=Normalize.from_stats(*imagenet_stats, cuda=False))
    plain = block.dataloaders(pets, bs=8, num_workers=0, device='cpu')
    for (x, y), (x2, y2) in zip(plain.valid, cached(plain, tmp_path/'c', whole=True, workers=0).valid, strict=True):
        assert (x-x2).abs().max() < .02 and torch.equal(y, y2) and (type(y), y.dtype) == (type(y2), y2.dtype)


def test_channels_last_has_the_same_numbers(pets, tmp_path):
    plain, last = (cached(make(pets), tmp_path/'c', whole=True, workers=0, channels_last=o) for o in (False, True))
    for (x, y), (x2, y2) in zip(epochs(plain.train), epochs(last.train)):
        assert x.is_contiguous() and x2.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(x, x2) and torch.equal(y, y2)
    assert last.train.new().channels_last
    with pytest.raises(UserError, match='add whole=True'): cached(make(pets), tmp_path/'c', channels_last=True)


@pytest.fixture
def cutters():
    "Threads of this test that draw: one of an earlier test may hang on for a while"
    older.update(threads())
    return threads


@pytest.mark.parametrize('kwargs', [dict(), dict(channels_last=True), dict(encode='jpeg'), dict(store='parquet', size=40)], ids=['plain', 'channels-last', 'jpeg', 'parquet'])
@pytest.mark.parametrize('image', [PILImage, PILImageBW], ids=['rgb', 'grey'])
def test_threads_cut_the_same_batches(pets, tmp_path, kwargs, image, cutters):
    block = DataBlock((ImageBlock(image), CategoryBlock), get_items=sorted_files, get_y=parent_label, splitter=FuncSplitter(is_valid), item_tfms=CROP)
    plain = block.dataloaders(pets, bs=20, num_workers=0, device='cpu')  # more than one piece each
    alone, *others = (cached(plain, tmp_path/'c', whole=True, workers=0, threads=o, **kwargs) for o in (0, 1, 3))
    assert [o.train.threads for o in (alone, *others)] == [0, 1, 3] and others[1].train.new().threads == 3
    for other in others:
        for i in range(2): equal(epochs(alone[i]), epochs(other[i]))
    assert ended()


def test_threads_stack_what_is_not_cut(pets, tmp_path):
    plain = make(pets, [Resize(24, method='squish')])
    equal(*(epochs(cached(plain, tmp_path/'c', whole=True, workers=0, threads=o).train) for o in (0, 2)))


def test_threads_of_a_cache_end_with_its_loop(pets, tmp_path, cutters):
    dl = cached(make(pets), tmp_path/'c', whole=True, workers=0, threads=2).train
    for b in dl: assert cutters()
    for b in dl: break
    del b
    dl.one_batch()
    assert ended() and len(list(dl)) == 4 and 'begin_more' not in vars(dl)
    with pytest.raises(UserError, match=r'threads=2 is for whole batches: .*fast_images\(cached\(dls\)\)'): cached(make(pets), tmp_path/'c', threads=2)
    with pytest.raises(UserError, match=r'a CachedDL, which has threads of its own: cached\(\.\.\., threads=2\)'): fast_images(cached(make(pets), tmp_path/'c', whole=True, workers=0))
    with pytest.raises(UserError, match='threads=-2 cannot be: a whole number, 0 or more'): cached(make(pets), tmp_path/'c', whole=True, workers=0, threads=-2)
    best = auto_workers(cached(make(pets), tmp_path/'c', whole=True, workers=0), counts=[0, 2], batches=2)
    assert best.train.threads == best.workers in (0, 2) and list(best.worker_rates) == [0, 2]


def test_a_cache_whose_drive_is_gone_is_named(pets, tmp_path, cutters):
    dl = cached(make(pets), tmp_path/'c', whole=True, workers=0, threads=2).train.new(item_timeout=.3)
    there = threading.Event()
    dl.dataset.store.image = lambda i: there.wait(120)
    with pytest.raises(StuckWorker, match=r'a loader has been at the cache pets-train-\w+ for .* hangs') as e: list(dl)
    assert len(str(e.value).splitlines()) == 1
    there.set()
    assert ended()
    del dl.dataset.store.image


@pytest.mark.parametrize('store', ['array', 'parquet'])
@pytest.mark.parametrize('whole', [False, True])
def test_a_cache_that_is_cleared_while_it_is_used_is_named(pets, tmp_path, store, whole):
    if store == 'parquet': pytest.importorskip('pyarrow')
    dls = cached(make(pets), tmp_path/'c', store=store, whole=whole, workers=0)
    clear_caches(where=tmp_path/'c')
    with pytest.raises(UserError, match='part-00000.* is gone: was this cache cleared') as e: list(dls.train)
    assert '\n' not in str(e.value)


def test_beside_a_gpu_a_thread_cuts_into_pinned_memory(pets, tmp_path, gpu):
    host = cached(make(pets), tmp_path/'c', whole=True, workers=0)
    want = [x.clone() for x, _ in epochs(host.train, 1)]
    dls = cached(make(pets).to('cuda'), tmp_path/'c', whole=True, workers=0)
    assert (host.train.threads, dls.train.threads) == (0, 1)
    assert dls.train._begun([0, 1])[0].fields[0].is_pinned(), 'no copy is made to pin it'
    del gpu.copies[:]
    got = [x for x, _ in epochs(dls.train, 1)]
    images = [o for o in gpu.copies if o.bytes == 8*3*32*32]
    assert len(images) == 4 and all(o.pinned and not o.blocking for o in images) and not gpu.races
    for a, b in zip(want, got): assert b.device.type == 'cuda' and (a - b.cpu()).abs().max() < 1e-4


class Nothing(Transform):
    order = 50
    def encodes(self, x:TensorImage): return x


@pytest.mark.parametrize('tfms', [None, batch_augment(max_rotate=10., max_lighting=.2, erase=.5, cutout=8, stats=imagenet_stats)], ids=['normalised', 'augmented'])
def test_a_batch_is_freed_as_soon_as_nobody_uses_it(pets, tmp_path, tfms):
    "What is left to the garbage collector keeps the batch, and its memory cannot be used again"
    dl = cached(make(pets, batch_tfms=tfms), tmp_path/'c', whole=True, workers=0).train
    for _ in dl: pass  # what happens once is not counted
    gc.collect()
    gc.disable()
    try: images = [weakref.ref(x) for x, y in dl]
    finally: gc.enable()
    assert len(images) == 4 and not any(o() is not None for o in images[:-1])


def test_a_batch_that_is_held_is_not_written_over(pets, tmp_path):
    dl = cached(make(pets, bs=4), tmp_path/'c', whole=True, workers=0).train
    held, copies = [], []
    for x, _ in dl:
        held.append(x[:2])  # a slice of it
        copies.append(x[:2].clone())
    assert len({o.data_ptr() for o in held}) == len(held) and all(torch.equal(a, b) for a, b in zip(held, copies))


def test_memory_is_used_again():
    m = RecycledMemory(2)
    x = m.empty(4, 4)
    at = x.data_ptr()
    saved = (x.requires_grad_()*2).sum().grad_fn
    loss = (x**2).sum()  # holds x for its gradient
    del x
    assert m.empty(4, 4).data_ptr() != at
    del saved, loss
    assert any(m.empty(4, 4).data_ptr() == at for _ in range(3))


@pytest.mark.parametrize('tfms,match', [([RandomResizedCrop(32), Nothing()], None), ([RandomResizedCrop(32), RandomResizedCrop(24)], 'RandomResizedCrop'),
                                        ([FlipItem()], 'images of one size'), ([Resize(32, method='pad')], "method='pad'")])
def test_what_cannot_be_done_to_whole_batches_is_named(tfms, match):
    if match is None:
        with pytest.raises(UserError, match='Nothing'): batch_crop(tfms)
    else:
        with pytest.raises(UserError, match=match): batch_crop(tfms)


@pytest.mark.parametrize('size', [(32, 32), (20, 60)])
@pytest.mark.parametrize('w,h', [(80, 50), (70, 70), (33, 90)])
def test_fit_is_fastais_resize(size, w, h):
    r, x = Resize(size), np.random.default_rng(0).integers(0, 255, (h, w, 3), dtype='uint8')
    want = np.asarray(r(PILImage.create(x), split_idx=0))
    box = BatchFit(size)._fit(np.array([r.pcts[::-1]]), h, w)
    got = crop_slices([x], box, size)[0].permute(1, 2, 0).numpy()
    assert np.abs(got.astype(int)-want).max() <= 2


# Smaller images

def test_images_can_be_kept_smaller(pets, tmp_path):
    dls = cached(make(pets), tmp_path/'c', size=40, workers=0)
    assert {min(o[0].size) for o in dls.train_ds} == {40} and type(dls.train_ds[0][0]) is PILImage
    cached(make(pets), tmp_path/'c', workers=0)
    assert len(folders(tmp_path/'c')) == 4  # another size, another cache
    assert cached(make(pets), tmp_path/'c', size=40, whole=True, workers=0).train.one_batch()[0].shape == (8, 3, 32, 32)


# The key

class Shifted(Transform):
    def __init__(self, by=0): self.by = by
    def encodes(self, x:PILImage): return x


SOURCE = '''
from fasttransform import DisplayedTransform, Transform
from fastai.vision.core import PILImage
CONSTANT = {constant}
def helper(x): return x + {number}
class Mine(Transform):
    "{doc}"
    def encodes(self, x:PILImage): return helper(x) * CONSTANT
'''


def test_a_change_anywhere_is_another_key(tmp_path, monkeypatch):
    def key(**kwargs):
        given = dict(constant=1, number=1, doc='') | kwargs
        (tmp_path/'mine.py').write_text(SOURCE.format(**given))
        sys.modules.pop('mine', None)
        import linecache
        linecache.checkcache()
        shutil.rmtree(tmp_path/'__pycache__', ignore_errors=True)
        import mine
        return fingerprint(describe(mine.Mine()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    first = key()
    assert key() == first and len({first, key(number=2), key(constant=2)}) == 3, 'its code, what it calls, what it refers to'
    assert fingerprint(describe(Shifted(1))) != fingerprint(describe(Shifted(2)))


HELPERS = """
FACTOR = {by}
def clean(x): return {body}
def other(x): return x
"""
NOTEBOOK = """
import cleaning, pkg.deep
def by_module(x): return cleaning.clean(x)
def by_package(x): return pkg.deep.cleaning.clean(x)
def in_function(x):
    import cleaning
    from pkg.deep import cleaning as c
    return cleaning.clean(x) + c.clean(x)
def named(x): return x.size, x.fit
"""

@pytest.fixture
def notebook(tmp_path, monkeypatch):
    "Names of a notebook, whose functions use a file beside it"
    import linecache
    def write(by, body='FACTOR*x'):
        (tmp_path/'cleaning.py').write_text(HELPERS.format(by=by, body=body))
        linecache.checkcache()
    def keys(): return {k: fingerprint(describe(names[k])) for k in ('by_module', 'by_package', 'in_function', 'named')}
    write(2)
    (tmp_path/'pkg').mkdir()
    (tmp_path/'pkg'/'__init__.py').touch()
    (tmp_path/'pkg'/'deep.py').write_text('import cleaning')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    for o in 'cleaning', 'pkg', 'pkg.deep': monkeypatch.delitem(sys.modules, o, raising=False)
    names = {'__name__': '__main__'}
    exec(NOTEBOOK, names)
    return SimpleNamespace(write=write, keys=keys, names=names)


def test_a_module_of_ones_own_counts_by_what_is_used_of_it(notebook):
    "`helpers.clean(x)` in a cell: an old cache was read after helpers.py was edited and reloaded"
    import importlib
    first = notebook.keys()
    notebook.write(30)
    importlib.reload(sys.modules['cleaning'])
    now = notebook.keys()
    assert {k for k in now if now[k] != first[k]} == {'by_module', 'by_package', 'in_function'}


def test_what_a_module_has_besides_does_not_count(notebook):
    first = notebook.keys()
    sys.modules['cleaning'].another = 3
    sys.modules['cleaning'].other = None
    assert notebook.keys() == first


def test_a_file_that_was_edited_but_not_imported_again_is_not_what_it_says(notebook):
    "Otherwise what the old code made would be read as the new one's, once the kernel was restarted"
    import importlib
    notebook.write(2, 'FACTOR*x*x')
    old = notebook.keys()
    importlib.reload(sys.modules['cleaning'])
    assert notebook.keys()['by_module'] != old['by_module']


def test_a_name_after_a_dot_is_no_variable_of_the_notebook(notebook):
    "`image.size` beside `size = 128` made another cache, and beside a lambda called `size` none at all"
    first = notebook.keys()
    notebook.names.update(size=128, fit=lambda x: x)
    assert notebook.keys() == first


def side_of(o): return float(o.with_suffix('.txt').read_text())
def xml_of(o): return float((o.parents[1]/'labels'/o.parent.name/f'box_{o.stem}.xml').read_text())
def table_of(o): return float((o.parents[1]/'labels.csv').read_text())
def mask_of(o): return float(np.asarray(Image.open(o.with_suffix('.png'))).mean())
def one_of_some(o): return float((o.parents[1]/f"{dict(a='x', b='y')[o.parent.name]}{int(o.stem) % 3}.txt").read_text())
@functools.lru_cache(None)
def kept_table(file): return float(file.read_text())
def once_of(o): return kept_table(o.parents[1]/'labels.csv')


def places(pets, how, value):
    for o in _jpgs(pets):
        (pets/'labels'/o.parent.name).mkdir(parents=True, exist_ok=True)
        o.with_suffix('.txt').write_text(value), (pets/'labels'/o.parent.name/f'box_{o.stem}.xml').write_text(value)
        Image.fromarray(np.full((4, 4), int(value), 'uint8')).save(o.with_suffix('.png'))
    (pets/'labels.csv').write_text(value)


@pytest.mark.parametrize('read', [side_of, xml_of, table_of, mask_of])
def test_what_a_function_of_labels_reads_counts(pets, tmp_path, read):
    "Its files are in none of the transforms: a change of the last one alone is seen"
    places(pets, read, '0')
    def labels(): return torch.cat([b[1] for b in cached(DataBlock((ImageBlock, RegressionBlock), get_items=_jpgs, get_y=read, splitter=FuncSplitter(is_valid), item_tfms=Resize(32)).dataloaders(pets, bs=8, num_workers=0, device='cpu', shuffle=False), tmp_path/'c', workers=0).valid])
    before = set_seed(1), labels(), torch.rand(1)
    names = folders(tmp_path/'c')
    assert set_seed(1) is None and torch.equal(labels(), before[1]) and folders(tmp_path/'c') == names, 'nothing has changed'
    for o in (_jpgs(pets)[-1].with_suffix('.txt'), pets/'labels'/'b'/f'box_{_jpgs(pets)[-1].stem}.xml', pets/'labels.csv'): o.write_text('1')
    Image.fromarray(np.ones((4, 4), 'uint8')).save(_jpgs(pets)[-1].with_suffix('.png'))
    assert labels()[-1] == 1


def test_a_function_that_keeps_results_is_refused():
    with pytest.raises(NoFingerprint, match=r'the transform once_of cannot be cached: it keeps results \(functools.lru_cache\)'): describe(once_of)


def test_files_that_nobody_can_tell_are_named(pets, tmp_path):
    for o in 'x0 x1 x2 y0 y1 y2'.split(): (pets/f'{o}.txt').write_text('0')
    block = DataBlock((ImageBlock, RegressionBlock), get_items=_jpgs, get_y=one_of_some, splitter=FuncSplitter(is_valid), item_tfms=Resize(32))
    with pytest.warns(UserWarning, match=r'an item is made of .*[xy]\d.txt, and where such a file lies cannot be told from its item.*cache clear'): cached(block.dataloaders(pets, bs=8, num_workers=0, device='cpu'), tmp_path/'c', workers=0)


def test_the_hook_listens_only_in_its_block(tmp_path):
    from fastbench.draw.reads import opened_files
    (tmp_path/'a').touch()
    with opened_files() as seen: open(tmp_path/'a').close()
    with ThreadPoolExecutor(1) as pool, opened_files() as other: pool.submit(lambda: open(tmp_path/'a').close()).result()
    open(tmp_path/'a').close()
    assert seen == [str(tmp_path/'a')] and other == []


def test_the_key_is_the_same_in_another_process(tmp_path):
    code = ('import sys; sys.path.insert(0, sys.argv[1]); import mine; from fastbench.draw.describe import describe, fingerprint; from fastai.vision.all import *;'
            'print(fingerprint([describe(mine.Mine()), describe(RandomResizedCrop(8)), describe(Transform(PILImage.create)), describe(Categorize(vocab=["a"]))]))')
    (tmp_path/'mine.py').write_text(SOURCE.format(constant=1, number=1, doc=''))
    def run(seed): return subprocess.run([sys.executable, '-W', 'ignore', '-c', code, tmp_path], capture_output=True, text=True, env=os.environ | dict(PYTHONHASHSEED=str(seed)))
    a, b = run(1), run(2)
    assert a.returncode == 0, a.stderr[-800:]
    assert a.stdout == b.stdout and len(a.stdout.strip()) == 12


def test_things_that_code_refers_to_can_be_told():
    import enum, logging, typing
    from abc import ABC
    from collections import namedtuple
    from dataclasses import dataclass, field
    log = logging.getLogger('x')
    class Point(typing.NamedTuple): x: int = 1
    class Way(enum.Enum): left = 1
    class Base(ABC):
        __slots__ = ('a',)
    @dataclass
    class Data: x: list = field(default_factory=list)
    Pair = namedtuple('Pair', 'a b')
    def f(x): return log, Point(), Way.left, Base, Data(), Pair(1, 2), np.float32, torch.nn.functional.relu, len
    assert fingerprint(describe(Transform(f))) == fingerprint(describe(Transform(f)))


def test_patterns_and_methods_of_plain_values_can_be_told():
    "As `from_path_re` has them, and `get_y=labels.get`"
    def of(*os): return [fingerprint(describe(o)) for o in os]
    a, b, c, same = of(*(RegexLabeller(re.compile(*o)) for o in ((r'(.*)_', ), (r'(.+)_', ), (r'(.*)_', re.I), (r'(.*)_', ))))
    assert a == same and len({a, b, c}) == 3
    for x, y in ((re.compile('a').search, re.compile('b').search), ({'a': 1}.get, {'a': 2}.get), ('a'.__add__, 'b'.__add__)): assert len(set(of(x, y))) == 2


def test_loaders_that_label_by_a_pattern(pets, tmp_path):
    dls = ImageDataLoaders.from_path_re(pets, sorted_files(pets), r'/([ab])/', item_tfms=Resize(32), bs=8, num_workers=0, device='cpu', seed=1)
    equal(epochs(dls.train), epochs(cached(dls, tmp_path/'c', workers=0).train))


def test_a_package_counts_by_its_version_wherever_pip_has_put_it(tmp_path, monkeypatch):
    "`pip install --target`: its code may hold what cannot be told, such as a lock; own code beside it counts by its source"
    (tmp_path/'far_away').mkdir()
    code = 'import threading\nlock = threading.Lock()\ndef soften(x):\n    with lock: return x\n'
    for o in ('far_away/__init__.py', 'beside_it.py'): (tmp_path/o).write_text(code)
    info = tmp_path/'far_away-1.5.dist-info'
    info.mkdir()
    (info/'METADATA').write_text('Metadata-Version: 2.1\nName: far-away\nVersion: 1.5\n')
    (info/'RECORD').write_text('far_away/__init__.py,,\nfar_away-1.5.dist-info/METADATA,,\n')
    monkeypatch.syspath_prepend(tmp_path)
    import beside_it, far_away
    assert 'far_away 1.5' in str(describe(far_away.soften))
    with pytest.raises(NoFingerprint, match='lock'): describe(beside_it.soften)


def test_files_labels_and_order_are_part_of_the_key(pets, tmp_path):
    def key(): return folders(tmp_path/'c')
    def use(folder):
        shutil.rmtree(tmp_path/'c', ignore_errors=True)
        cached(make(folder), tmp_path/'c', workers=0)
        return key()
    first = use(pets)
    moved = pets.rename(tmp_path/'elsewhere')
    assert [o.split('-')[1:] for o in use(moved)] == [o.split('-')[1:] for o in first], 'a folder that was moved is the same'
    f = sorted_files(moved)[0]
    Image.fromarray(np.zeros((60, 60, 3), 'uint8')).save(f)
    assert use(moved)[0] != first[0]
    assert fingerprint_items(['a', 'b']) != fingerprint_items(['b', 'a'])


def test_each_file_is_looked_for_once(tmp_path, monkeypatch):
    "There may be a million of them. The key is the same whatever leads to the folder"
    files, seen = [tmp_path/f'{i%3}'/f'{i}.jpg' for i in range(12)], []
    for i, o in enumerate(files):
        o.parent.mkdir(exist_ok=True)
        o.write_bytes(bytes([i]))
    is_file = os.path.isfile
    monkeypatch.setattr(os.path, 'isfile', lambda o: (seen.append(o), is_file(o))[1])
    key = fingerprint_items(files)
    assert seen == files
    monkeypatch.chdir(tmp_path)
    for same in [map(str, files), (o.relative_to(tmp_path) for o in files), (tmp_path/'0'/'..'/o.relative_to(tmp_path) for o in files)]:
        assert fingerprint_items([*same]) == key


class Named:
    "Images of a data set of one's own, which knows their names and their folder, or their paths"
    def __init__(self, names, folder=''): self.names, self.folder = names, folder
    def __len__(self): return len(self.names)
    def __getitem__(self, i): return PILImage.create(Path(self.folder)/self.names[i]).resize((8, 8)), i % 2


class Numbered(Named):
    "Whose code makes the names of the files"
    def __getitem__(self, i): return PILImage.create(f'{self.folder}/{self.names[i]}.jpg').resize((8, 8)), i % 2


def opened(stem): return PILImage.create(FOLDER/f'{stem}.jpg').resize((8, 8))
def odd(stem): return len(stem) % 2


@pytest.mark.parametrize('how', ['paths', 'strings', 'array', 'folder', 'ImageFolder', 'numbered', 'relative', 'by_a_transform'])
def test_a_file_that_a_data_set_of_ones_own_names_is_part_of_the_key(pets, tmp_path, how, monkeypatch):
    "One that was replaced is not read from an old cache"
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2
    files, stems = sorted_files(pets), [str(o.relative_to(pets).with_suffix('')) for o in sorted_files(pets)]
    monkeypatch.setitem(globals(), 'FOLDER', pets)
    monkeypatch.chdir(pets.parent)
    data = dict(numbered=Numbered(stems, str(pets)), relative=Numbered(stems, Path(pets.name)), by_a_transform=Datasets(stems, [[opened], [odd]]), paths=Named(files), strings=Named([*map(str, files)]), array=Named(np.array([*map(str, files)])),
                folder=Named([str(o.relative_to(pets)) for o in files], str(pets)),
                ImageFolder=ImageFolder(pets, v2.Compose([v2.ToImage(), v2.Resize((8, 8)), v2.ToDtype(torch.float32, scale=True)])))[how]
    def first(): return np.asarray(cached(data, tmp_path/'c', workers=0)[0][0]).astype(float)
    before = first()
    assert np.array_equal(before, first()) and len(folders(tmp_path/'c')) == 1
    Image.new('RGB', (60, 60), (255, 0, 0)).save(files[0])
    assert np.array_equal(first(), np.asarray(data[0][0]).astype(float)) and not np.array_equal(first(), before)


def test_what_else_lies_in_the_folder_of_a_data_set_makes_no_other_key(pets):
    "A model that was saved, a log, and the caches themselves"
    data = Numbered([str(o.relative_to(pets).with_suffix('')) for o in sorted_files(pets)], pets)
    cached(data, pets/'caches', workers=0)
    (pets/'models').mkdir()
    for o in 'models/best.pth', 'history.csv', 'caches/.unfinished.npz': (pets/o).write_bytes(b'x')
    cached(data, pets/'caches', workers=0)
    assert len(folders(pets/'caches')) == 1
    Image.new('RGB', (60, 60)).save(pets/'another.jpg')
    cached(data, pets/'caches', workers=0)
    assert len(folders(pets/'caches')) == 2


def test_types_of_numbers_can_be_told():
    "As of torchvision's `ToDtype`, and numbers of NumPy in the vocabulary of labels"
    of = [torch.float32, torch.float16, torch.device('cpu'), torch.channels_last, np.dtype('int8'), np.int64(1), np.int64(2), np.float32(1), range(3), slice(1)]
    assert len({fingerprint(describe(partial(sorted, o))) for o in of}) == len(of)
    assert fingerprint(describe(partial(sorted, [np.int64(1)]))) == fingerprint(describe(partial(sorted, [np.int64(1)])))


def test_an_error_does_not_show_half_of_the_settings(pets, tmp_path):
    class Shown(DisplayedTransform):
        def __init__(self, rng): self.rng = rng
        def encodes(self, x: PILImage): return x
    one_line(lambda: cached(make(pets, [Shown(random.Random(1)), Resize(32)]), tmp_path/'c', workers=0), '^the transform Shown cannot be cached')


def _image(o): return o['image']
def _label(o): return o['label']
def _ones(o): return torch.ones(2)


def test_pictures_in_memory_are_items(tmp_path):
    "As a data set of the hub gives them: what they show is part of the key, and so is a palette"
    rng = np.random.default_rng(0)
    def items(): return [dict(image=Image.fromarray(o), label='ab'[i % 2]) for i, o in enumerate(rng.integers(0, 255, (8, 20, 30, 3), dtype='uint8'))]
    def loaders(o): return DataBlock((ImageBlock, CategoryBlock), get_x=_image, get_y=_label, splitter=IndexSplitter([6, 7]), item_tfms=Resize(16)).dataloaders(o, bs=3, num_workers=0, device='cpu')
    made = items()
    equal(epochs(loaders(made).train), epochs(cached(loaders(made), tmp_path/'c', workers=0).train))
    assert len(folders(tmp_path/'c')) == 2
    other = [dict(image=Image.new('RGB', (30, 20)), label='a'), *made[1:]]
    equal(epochs(loaders(other).train), epochs(cached(loaders(other), tmp_path/'c', workers=0).train))
    assert len(folders(tmp_path/'c')) > 2
    red, blue = (Image.new('P', (4, 4)) for _ in range(2))
    red.putpalette([255, 0, 0]), blue.putpalette([0, 0, 255])
    assert fingerprint(describe(partial(sorted, [red]))) != fingerprint(describe(partial(sorted, [blue])))


def test_what_cannot_be_told_is_named_as_what_it_is(tmp_path):
    "The items or the data set, where it is no transform"
    with open(tmp_path/'x', 'w') as f:
        items = [dict(image=f, label='a'), dict(image=f, label='b')]
        block = DataBlock((TransformBlock, CategoryBlock), get_x=_ones, get_y=_label, splitter=IndexSplitter([1]))
        one_line(lambda: cached(block.dataloaders(items, bs=1, num_workers=0, device='cpu'), tmp_path/'c', workers=0), '^an item cannot be cached: it holds')
        class Own:
            def __init__(self): self.log = f
            def __len__(self): return 4
            def __getitem__(self, i): return torch.ones(2), i
        one_line(lambda: cached(Own(), tmp_path/'c', workers=0), '^the data set Own cannot be cached: it holds')


def test_a_changed_transform_never_reads_an_old_cache(pets, tmp_path):
    def dls(by): return make(pets, [Flat(by), Resize(32)], batch_tfms=[])
    a = cached(dls(10), tmp_path/'c', workers=0).valid.one_batch()[0]
    b = cached(dls(20), tmp_path/'c', workers=0).valid.one_batch()[0]
    assert torch.allclose(a, torch.tensor(10/255)) and torch.allclose(b, torch.tensor(20/255))


class Flat(Transform):
    order = 0
    def __init__(self, by): self.by = by
    def encodes(self, x:PILImage): return PILImage.create(np.full((40, 40, 3), self.by, 'uint8'))


def test_what_has_no_fingerprint_is_named(pets, tmp_path):
    def hidden():
        f = open(os.devnull, 'rb')
        def of_closure(x): return x if f else x
        return of_closure
    for tfm, name in ((lambda x: x, 'lambda'), (hidden(), 'of_closure')):
        with pytest.raises(NoFingerprint) as e: cached(make(pets, [Transform(tfm), Resize(32)]), tmp_path/'c', workers=0)
        assert name in str(e.value) and '\n' not in str(e.value), str(e.value)
    assert not (tmp_path/'c').exists()


def test_chance_in_the_data_set_is_refused(pets, tmp_path):
    ds = Datasets(sorted_files(pets), [[PILImage.create, RandomResizedCrop(8)], [parent_label, Categorize()]])
    with pytest.raises(UserError, match='RandomResizedCrop draws at random'): cached(ds, tmp_path/'c', workers=0)


# Faults

def square(i): return torch.full((4, 4), float(i)), i
def items(n=10): return Items(square, n)
def check(store, n=10): assert len(store) == n and all(torch.equal(store[i][0], square(i)[0]) and store[i][1] == i for i in range(n))


@pytest.mark.parametrize('harm', ['flip', 'cut', 'gone', 'index', 'about', 'empty about', 'n'])
@pytest.mark.parametrize('store', ['array', 'parquet'])
def test_a_damaged_cache_is_found_and_mended(tmp_path, harm, store):
    folder, said = tmp_path/'x-1', []
    check(open_store(folder, items(), store=store, per_part=4, workers=0))
    part = next(folder.glob('part-00001.[bp]*[nt]'))
    before = (folder/f'{part.name.replace("00001", "00000")}').stat().st_mtime_ns
    if harm == 'flip': part.write_bytes(part.read_bytes()[:9] + b'\xff' + part.read_bytes()[10:])
    elif harm == 'cut': part.write_bytes(part.read_bytes()[:-3])
    elif harm == 'gone': part.unlink()
    elif harm == 'index': (folder/'index.npz').write_bytes(b'')
    elif harm == 'about': (folder/'cache.json').write_text('{"format": 1, "n"')
    elif harm == 'empty about': (folder/'cache.json').unlink()
    elif harm == 'n': (folder/'cache.json').write_text(json.dumps(read_about(folder) | dict(n=11)))
    check(open_store(folder, items(), store=store, per_part=4, workers=0, tell=said.append))
    assert len(said) == 1 and 'is damaged' in said[0]
    assert (folder/f'{part.name.replace("00001", "00000")}').stat().st_mtime_ns == before, 'whole parts are kept'
    open_store(folder, items(), store=store, per_part=4, workers=0, tell=said.append)
    assert len(said) == 1


def test_a_cache_of_another_version_is_made_anew(tmp_path):
    folder, said = tmp_path/'x-1', []
    open_store(folder, items(), workers=0)
    (folder/'cache.json').write_text(json.dumps(read_about(folder) | dict(format=99)))
    assert 'another version (format 99)' in kept_caches(tmp_path)[0].says
    check(open_store(folder, items(), workers=0, tell=said.append))
    assert f'was made by another version (format 99, not {FORMAT})' in said[0]


def test_space_is_looked_at_first(tmp_path, monkeypatch):
    monkeypatch.setattr(build_room.shutil, 'disk_usage', lambda o: type('D', (), dict(free=1_200_000))())
    with pytest.raises(NoSpace) as e: open_store(tmp_path/'x', Items(lambda i: (torch.zeros(1000, 1000),), 5), workers=0)
    assert '20.' in str(e.value) and '1.2 MB left' in str(e.value) and '\n' not in str(e.value)
    assert not list(tmp_path.rglob('part-*'))


def test_a_disk_that_fills_up_loses_nothing(tmp_path, monkeypatch):
    real, n = build_room._save, []
    def full(path, **kwargs):
        n.append(path)
        if len(n) == 2: raise OSError(28, 'No space left on device')
        return real(path, **kwargs)
    monkeypatch.setattr(build_room, '_save', full)
    with pytest.raises(NoSpace, match='What is done is kept'): open_store(tmp_path/'x', items(100), per_part=4, workers=0)
    assert not (tmp_path/'x').exists() and 'unfinished' in kept_caches(tmp_path)[0].says
    seen = []
    check(open_store(tmp_path/'x', Items(lambda i: seen.append(i) or square(i), 100), per_part=4, workers=0), 100)
    assert not set(range(1, 4)) & set(seen) and 5 in seen, 'the first part was not made again (its first item is looked at, for its size)'


@pytest.mark.parametrize('file', ['index.npz', 'cache.json.tmp'])
def test_a_disk_that_is_full_when_all_parts_are_there(tmp_path, monkeypatch, file):
    def full(path, *args, **kwargs):
        if path.name == file: raise OSError(28, 'No space left on device')
        return real(path, *args, **kwargs)
    owner, name = (build_room, '_save') if file == 'index.npz' else (type(tmp_path), 'write_text')
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(NoSpace, match='What is done is kept'): open_store(tmp_path/'x', items(20), per_part=4, workers=0)
    monkeypatch.undo()
    check(open_store(tmp_path/'x', items(20), per_part=4, workers=0), 20)


def test_an_item_that_cannot_be_prepared_is_named(pets, tmp_path):
    bad = sorted_files(pets)[11]
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(UserError) as e: cached(make(pets, Resize(32)), tmp_path/'c', workers=2)
    assert bad.name in str(e.value) and '\n' not in str(e.value)
    Image.fromarray(np.zeros((60, 60, 3), 'uint8')).save(bad)
    cached(make(pets, Resize(32)), tmp_path/'c', workers=2)


@pytest.mark.parametrize('item,match', [((object(),), 'not object'), ((torch.zeros(2), {}), 'not dict')])
def test_what_a_cache_cannot_keep_is_named(tmp_path, item, match):
    with pytest.raises(UserError, match=match): open_store(tmp_path/'x', Items(lambda i: item, 3), workers=0)


def test_items_of_uneven_types_are_named(tmp_path):
    def get(i): return (torch.zeros(2) if i < 3 else torch.zeros(2).long(),)
    for per_part in 10, 2:
        with pytest.raises(UserError, match='type'): open_store(tmp_path/f'x{per_part}', Items(get, 5), workers=0, per_part=per_part)


def test_nothing_to_cache(tmp_path):
    with pytest.raises(UserError, match='no items'): cached([], tmp_path)
    with pytest.raises(UserError, match="store"): cached([1], tmp_path, store='zip')


def test_parquet_without_pyarrow_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    with pytest.raises(UserError, match=r"fastbench\[table\]"): open_store(tmp_path/'x', items(), store='parquet', workers=0)


@pytest.mark.parametrize('make_it', [fast_images, cached], ids=['threads', 'cache'])
def test_training_data_without_items_are_named(pets, tmp_path, make_it, monkeypatch):
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'c'))
    files = sorted_files(pets)[:8]
    dsets = Datasets(files, [[PILImage.create], [parent_label, Categorize(['a', 'b'])]], splits=[list(range(8)), []])
    dls = dsets.dataloaders(bs=4, after_item=[Resize(16), ToTensor()], num_workers=0, device='cpu', path=pets)
    with pytest.raises(UserError, match='the training data have no items') as e: make_it(dls.new_empty())
    assert '\n' not in str(e.value)
    got = make_it(dls)
    assert len(got.valid) == 0 and [len(b[1]) for b in got.train] == [4, 4]  # nothing to validate on is no mistake


# Several processes

def test_processes_make_the_same_cache(tmp_path):
    a, b = (open_store(tmp_path/f'x{w}', items(300), workers=w, per_part=16) for w in (0, 2))
    check(a, 300), check(b, 300)
    assert [o['crc'] for o in a.about['parts']] == [o['crc'] for o in b.about['parts']]


STOP = 200  # where a build stands still, so that it is not over when it is killed; none of those that are looked at for their size


def _race(folder, n, out, stop=None):
    made = []
    def get(i):
        made.append(i)
        time.sleep(600 if i == stop else .002)
        return square(i)
    s = open_store(folder, Items(get, n), workers=0, per_part=8)
    check(s, n)
    out.put(len(made))


def test_one_builds_and_the_others_wait(tmp_path):
    ctx = multiprocessing.get_context('fork')
    out = ctx.Queue()
    ps = [ctx.Process(target=_race, args=(tmp_path/'x', 40, out)) for _ in range(3)]
    for p in ps: p.start()
    made = sorted(out.get(timeout=300) for _ in ps)
    for p in ps: p.join(60)
    assert made[:2] == [0, 0] and made[2] >= 40


def parts_of(folder, n):
    "Wait until so many are there"
    end = time.monotonic() + 120
    while len(list(folder.glob('.x.building/*.npz'))) < n: assert time.monotonic() < end; time.sleep(.01)


def test_a_killed_build_goes_on(tmp_path):
    ctx = multiprocessing.get_context('fork')
    out = ctx.Queue()
    p = ctx.Process(target=_race, args=(tmp_path/'x', 400, out, STOP))
    p.start()
    parts_of(tmp_path, 3)
    os.kill(p.pid, signal.SIGKILL)
    p.join(60)
    assert not (tmp_path/'x').exists()
    seen = []
    check(open_store(tmp_path/'x', Items(lambda i: seen.append(i) or square(i), 400), workers=0, per_part=8), 400)
    assert len(seen) < 400
    assert not list(tmp_path.glob('.x.building'))


def _in_two_processes(folder, out, stop=None):
    def get(i):
        time.sleep(600 if i == stop else .002)
        return square(i)
    check(open_store(folder, Items(get, 400), workers=2, per_part=8), 400)
    out.put(True)


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='kill -9')
def test_processes_of_a_killed_build_end_and_free_the_lock(tmp_path):
    ctx = multiprocessing.get_context('fork')
    out = ctx.Queue()
    p = ctx.Process(target=_in_two_processes, args=(tmp_path/'x', out, STOP))
    p.start()
    parts_of(tmp_path, 3)
    os.kill(p.pid, signal.SIGKILL)
    p.join(60)
    again = ctx.Process(target=_in_two_processes, args=(tmp_path/'x', out))
    again.start()
    try: assert out.get(timeout=300), 'the lock is still held'
    finally: again.kill()


@pytest.mark.parametrize('n', [10, 100])
def test_a_build_leaves_torch_as_many_threads_as_before(tmp_path, n):
    torch.set_num_threads(2)
    open_store(tmp_path/'x', items(n), per_part=16, workers=2)
    assert torch.get_num_threads() == 2


def test_workers_read_the_same(pets, tmp_path):
    dls = cached(make(pets, Resize(32)), tmp_path/'c', workers=0)
    dl = dls.valid.new(num_workers=2)
    equal(list(dls.valid), list(dl))


# Listing and clearing

def test_the_command(tmp_path, capsys):
    from typer.testing import CliRunner
    from fastbench.cli import app
    def run(*args):
        r = CliRunner().invoke(app, ['cache', *args, '--where', str(tmp_path/'c')])
        return r.exit_code, r.stdout
    assert 'no caches' in run('list')[1]
    open_store(tmp_path/'c'/'x-1', items(), workers=0)
    open_store(tmp_path/'c'/'y-2', items(), workers=0)
    code, out = run('list')
    assert code == 0 and '10 items, Tensor, int' in out and 'x-1' in out and '2 in' in out
    assert [o['name'] for o in json.loads(run('list', '--json')[1])] == ['x-1', 'y-2']
    assert 'cleared 1' in run('clear', 'x')[1] and [o.path.name for o in kept_caches(tmp_path/'c')] == ['y-2']
    with pytest.raises(UserError, match='no cache begins with'): clear_caches(['z'], tmp_path/'c')
    assert 'cleared 1' in run('clear')[1] and not kept_caches(tmp_path/'c')


def test_a_notebook_shows_how_far_a_build_is(tmp_path, monkeypatch):
    import builtins
    from IPython.display import HTML
    shown = []
    class ZMQInteractiveShell: pass
    class Handle:
        def update(self, o): shown.append(o.data if isinstance(o, HTML) else str(o))
    monkeypatch.setattr(builtins, 'get_ipython', ZMQInteractiveShell, raising=False)
    monkeypatch.setattr('IPython.display.display', lambda o, **kwargs: shown.append(str(o)) or Handle())
    open_store(tmp_path/'x-1', items(), workers=0, per_part=4)
    bars = [o for o in shown if 'preparing items' in o]
    assert '0/10' in bars[0] and '10/10' in bars[-1] and len(bars) > 2 and not shown[-1]
    def fails(i): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): open_store(tmp_path/'x-2', Items(fails, 3), workers=0)
    assert not shown[-1]


def test_a_cache_that_is_built_while_one_lists_and_clears(tmp_path, monkeypatch):
    from fastbench.draw import kept as kept_room
    open_store(tmp_path/'x-1', items(), workers=0)
    building = tmp_path/'.y-2.building'
    building.mkdir()
    (building/'part-00000.bin').touch()
    real = os.walk
    def vanishing(folder):  # names that are read, and gone before one asks for their size
        for at, folders, names in real(folder): yield at, folders, [*names, 'part-00001.bin.tmp']
    monkeypatch.setattr(os, 'walk', vanishing)
    def scan(self, pattern): return [*self.iterdir(), Gone(self/'part-00001.bin.tmp')]
    class Gone(type(tmp_path)):
        def is_file(self): return True
    monkeypatch.setattr(type(tmp_path), 'rglob', scan)
    assert len(kept_caches(tmp_path)) == 2
    real_locked = kept_room.locked
    def finished(lock):  # another process ends its build while this one waits for the lock
        if building.exists(): building.rename(tmp_path/'y-2')
        return real_locked(lock)
    monkeypatch.setattr(kept_room, 'locked', finished)
    assert [o.path.name for o in clear_caches(where=tmp_path)] == ['x-1'] and (tmp_path/'y-2').exists()


def test_listing_needs_no_torch():
    code = 'import sys; from fastbench.draw.kept import kept_caches; import fastbench.command.cache; sys.exit(bool({"torch", "fastai", "numpy"} & set(sys.modules)))'
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_only_caches_are_cleared(tmp_path):
    (tmp_path/'photos').mkdir()
    (tmp_path/'photos'/'mine.txt').write_text('keep')
    open_store(tmp_path/'x-1', items(), workers=0)
    clear_caches(where=tmp_path)
    assert (tmp_path/'photos'/'mine.txt').exists() and not (tmp_path/'x-1').exists()


def test_an_error_tells_types_apart():
    for a, b, says in ((np.zeros(3), np.zeros(3, 'float32'), 'ndarray of float32, that of other items ndarray of float64'),
                       (Image.new('L', (2, 2)), Image.new('RGB', (2, 2)), 'Image of RGB, that of other items Image of L'),
                       (torch.zeros(1), torch.zeros(1, dtype=torch.int64), 'Tensor of int64, that of other items Tensor of float32')):
        parts = PartWriter()
        parts.add((a,))
        with pytest.raises(UserError, match=re.escape(says)): parts.add((b,))


@pytest.mark.parametrize('whole', [False, True])
def test_loaders_of_pytorch_are_refused_in_one_line(whole):
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)), 2)
    for given in (dl, DataLoaders(dl, dl)):
        with pytest.raises(UserError, match='cached takes loaders of the class TfmdDL, and this is a torch.utils.data.dataloader.DataLoader') as e: cached(given, whole=whole)
        assert '\n' not in str(e.value)


@pytest.mark.parametrize('make_fast', [cached, fast_images])
def test_loaders_without_a_data_set_are_refused_in_one_line(make_fast):
    "As FFCV's and DALI's, which only know their batches; and streams, which do not know how many items they have"
    class Batches:
        def __len__(self): return 2
        def __iter__(self): yield from [(torch.zeros(2, 3), torch.zeros(2))]*2
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self): yield from range(8)
    for dl in (Batches(), [(torch.zeros(2, 3), torch.zeros(2))], torch.utils.data.DataLoader(Stream(), 2)):
        one_line(lambda: make_fast(DataLoaders(dl, dl)), f'{type(dl).__name__}')


@pytest.mark.parametrize('given', [dict(whole='yes'), dict(check='no'), dict(channels_last=1, whole=True), dict(tell=3)], ids=str)
def test_an_argument_of_another_kind_is_named(pets, tmp_path, given):
    name, v = next(iter(given.items()))
    with pytest.raises(UserError, match=f'^{name}={v!r} cannot be: ') as e: cached(make(pets), tmp_path/'c', **given)
    assert '\n' not in str(e.value) and not (tmp_path/'c').exists()


def spoil(f, how):
    if how == 'gone': f.unlink()
    else: f.write_bytes(dict(empty=b'', text=b'hello').get(how, f.read_bytes()[:-100]))


@pytest.mark.parametrize('how, why', [('gone', 'No such file or directory'), ('empty', 'the file is empty'), ('text', 'its content is not that of an image that Pillow knows'), ('cut', 'image file is truncated.*')])
def test_a_file_that_cannot_be_cached_is_named_with_a_remedy(pets, tmp_path, how, why):
    dls = make(pets, Resize(32))
    spoil(f := dls.train.items[3], how)
    one_line(lambda: cached(dls, tmp_path/'c', workers=0), f'^cannot prepare {f} for the cache: {why}. Restore or remove that file$')


@pytest.mark.parametrize('store', ['array', 'parquet'])
@pytest.mark.parametrize('name', ['index.npz', 'part-00000'])
def test_a_damaged_cache_that_is_not_checked_is_named_when_it_is_read(pets, tmp_path, name, store):
    def made(**kwargs): return cached(make(pets, Resize(32)), tmp_path/'c', store=store, workers=0, **kwargs)
    folder = made().train.dataset.store.folder
    bad = next(o for o in (folder/name, folder/f'{name}.bin', folder/f'{name}.parquet') if o.exists())
    bad.write_bytes(bad.read_bytes()[:len(bad.read_bytes())//2])
    one_line(lambda: made(check=False).train.one_batch(), rf'^the cache {folder} is damaged \({bad.name}\): call cached\(...\) with check=True, which makes it anew, or clear it')
    bad.write_text('{')
    one_line(lambda: made(check=False).train.one_batch(), 'is damaged')
    assert len(made().train.one_batch()) == 2


@pytest.mark.parametrize('whole', [False, True])
def test_numbers_of_numpy_stay_as_they_are(tmp_path, whole):
    items = [(torch.full((2,), float(i)), np.int64(i), np.float32(i/3), np.bool_(i % 2), np.float64(i/3), np.uint8(i)) for i in range(8)]
    data = cached(items, tmp_path/'c', workers=0)
    for a, b in zip(items, data): assert [(type(o), o) for o in a[1:]] == [(type(o), o) for o in b[1:]]
    dl = TfmdDL(items, bs=4, num_workers=0)
    equal(list(dl), list(cached(dl, tmp_path/'c', whole=whole, workers=0)))


def test_a_tensor_with_more_than_numbers_is_refused_with_a_remedy(tmp_path):
    items = [(TensorPoint(torch.zeros(1, 2), img_size=(9, 9)),)]
    one_line(lambda: cached(items, tmp_path/'c', workers=0), 'TensorPoint carries img_size beside its numbers, .*leave its loader as it is, or make that another part of the item')


def test_a_dict_is_no_data_set(tmp_path):
    with pytest.raises(UserError, match="cached takes DataLoaders, a loader or a data set, not {'a': 1}") as e: cached({'a': 1}, tmp_path/'c')
    assert '\n' not in str(e.value)


# Loaders that sample or batch in a way of their own

def sevens(items): return [(x, TensorCategory(torch.tensor(7))) for x, _ in items]
def fives(items): x, y = fa_collate(items); return x, y*0+5
def first_item(i): return (torch.zeros(3, 32, 32), TensorCategory(torch.tensor(0)))


class Odd(TfmdDL):
    "The odd items alone, by a name that only it has"
    def __init__(self, dataset=None, which=0, **kwargs): super().__init__(dataset, **kwargs); self.which = which
    def get_idxs(self): return [i for i in super().get_idxs() if i % 2 == self.which]


OWN_DLS = dict(weighted=lambda dl: WeightedDL(dl.dataset, bs=8, shuffle=True, wgts=np.arange(32) == 3, num_workers=0, after_item=dl.after_item, after_batch=dl.after_batch),
               partial=lambda dl: PartialDL(dl.dataset, bs=8, shuffle=True, partial_n=16, num_workers=0, after_item=dl.after_item, after_batch=dl.after_batch),
               own_class=lambda dl: dl.new(cls=partial(Odd, which=1)), before_batch=lambda dl: dl.new(before_batch=[sevens]), create_batch=lambda dl: dl.new(create_batch=fives),
               n=lambda dl: dl.new(n=16), get_idxs=lambda dl: dl.new(get_idxs=lambda: list(range(0, 32, 2))))


@pytest.mark.parametrize('kind', OWN_DLS)
def test_a_cache_keeps_how_a_loader_samples_and_batches(pets, tmp_path, kind):
    dl = OWN_DLS[kind](make(pets).train)
    got = cached(dl, tmp_path/'c', workers=0)
    assert type(got) is type(dl) and len(got) == len(dl)
    equal(epochs(dl), epochs(got))


@pytest.mark.parametrize('kind', OWN_DLS)
def test_whole_batches_keep_it_or_say_that_they_cannot(pets, tmp_path, kind):
    dl = OWN_DLS[kind](make(pets).train)
    if kind in ('n', 'get_idxs'):
        got = cached(dl, tmp_path/'c', workers=0, whole=True)
        assert [y.tolist() for _, y in epochs(dl)] == [y.tolist() for _, y in epochs(got)]
        return
    with pytest.raises(UserError, match='whole=True cannot make these batches: .*whole=False') as e: cached(dl, tmp_path/'c', workers=0, whole=True)
    assert '\n' not in str(e.value) and not (tmp_path/'c').exists()


def test_a_loader_that_makes_its_items_itself_is_refused(pets, tmp_path):
    dl = make(pets, Resize(32, 'squish')).train.new(create_item=first_item)
    with pytest.raises(UserError, match='a create_item of its own') as e: cached(dl, tmp_path/'c', workers=0)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('kind', ['watched', 'threads', 'seeded'])
def test_whole_batches_from_loaders_of_fastbench(pets, tmp_path, kind):
    dls = make(pets)
    dl = dict(watched=lambda: auto_workers(dls, counts=[0], batches=1).train, threads=lambda: fast_images(dls, threads=1).train, seeded=lambda: dls.train.new(cls=SeededDL))[kind]()
    assert [x.shape[0] for x, _ in cached(dl, tmp_path/'c', workers=0, whole=True)] == [8]*4


# Mistakes

def one_line(f, match):
    with pytest.raises(UserError, match=match) as e: f()
    assert '\n' not in str(e.value) and ' at 0x' not in str(e.value)


@pytest.mark.parametrize('kwargs,match', [
    (dict(workers=-1), 'workers=-1 cannot be: a whole number, 0 or more'), (dict(workers='x'), "workers='x' cannot be"), (dict(size=0), 'size=0 cannot be: a whole number, 1 or more'),
    (dict(size='x'), "size='x' cannot be"), (dict(size=48.5), 'size=48.5 cannot be'), (dict(whole=True, threads=-1), 'threads=-1 cannot be'),
    (dict(where='/proc/x'), 'caches cannot be kept in /proc/x: .*where='), (dict(where=3), 'where=3')], ids=str)
def test_an_argument_that_cannot_be_is_named(pets, tmp_path, kwargs, match):
    one_line(lambda: cached(make(pets), **dict(where=tmp_path/'c', workers=0) | kwargs), match)
    assert not (tmp_path/'c').exists()


def test_a_file_where_caches_should_be(pets, tmp_path):
    (tmp_path/'file').touch()
    for where in (tmp_path/'file', tmp_path/'file'/'x'): one_line(lambda: cached(make(pets), where, workers=0), f'caches cannot be kept in {where}: ')


def test_what_is_nothing_to_cache(pets, tmp_path):
    dls = make(pets)
    one_line(lambda: cached(Learner(dls, nn.Linear(1, 1), loss_func=CrossEntropyLossFlat())), r'learn.dls = cached\(learn.dls\)')
    for o in ('pictures', 7): one_line(lambda: cached(o, tmp_path/'c'), 'cached takes DataLoaders, a loader or a data set, not')


@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('whole', [False, True])
def test_a_cache_is_not_cached(pets, tmp_path, whole, again):
    once = cached(make(pets), tmp_path/'c', workers=0, whole=whole)
    for o in (once, once.train): one_line(lambda: cached(o, tmp_path/'c', whole=again), 'come from a cache already: .*source')
    if not whole: one_line(lambda: cached(fast_images(once, threads=1), tmp_path/'c', whole=again), 'come from a cache already')
    one_line(lambda: cached(once.train.dataset, tmp_path/'c'), 'come from a cache already')


@pytest.mark.parametrize('whole', [False, True])
def test_rows_of_a_table_are_not_cached(tmp_path, whole):
    import pandas as pd
    from fastai.tabular.all import Categorify, TabularDataLoaders
    df = pd.DataFrame(dict(c=list('xyzx')*5, y=list('uv')*10))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify], cat_names=['c'], y_names='y', bs=4, num_workers=0, valid_idx=[0, 1, 2, 3])
    one_line(lambda: cached(dls, tmp_path/'c', whole=whole), 'rows of a table')


def test_images_of_a_table_are_cached(pets, tmp_path):
    import pandas as pd
    df = pd.DataFrame(dict(name=[str(o.relative_to(pets)) for o in sorted_files(pets)], label=[o.parent.name for o in sorted_files(pets)]))
    dls = ImageDataLoaders.from_df(df, pets, item_tfms=Resize(32), bs=4, num_workers=0, device='cpu', seed=1)
    equal(epochs(dls.train), epochs(cached(dls, tmp_path/'c', workers=0).train))


def test_folders_that_cannot_be_written(pets, tmp_path, monkeypatch):
    "A whole cache is used all the same; what cannot be made, read or removed is named in one line"
    dls = make(pets)
    kept = cached(dls, workers=0, where=tmp_path/'c')

    def deny(*args, **kwargs): raise PermissionError(13, 'Permission denied', str(tmp_path/'x'))
    monkeypatch.setattr('fastbench.machine.download.open', deny, raising=False)
    again = cached(dls, workers=0, where=tmp_path/'c')
    assert len(again.train.dataset) == len(kept.train.dataset)
    other = tmp_path/'other'
    with pytest.raises(UserError, match='cannot write in the folder .*other: Permission denied. Name one that can be written') as e: cached(dls, workers=0, where=other)
    assert '\n' not in str(e.value)
    with pytest.raises(UserError, match='cannot open .*lock, which another user made'): clear_caches(where=tmp_path/'c')
    monkeypatch.undo()
    monkeypatch.setattr(shutil, 'rmtree', deny)
    with pytest.raises(UserError, match=r'the cache .* cannot be removed: Permission denied') as e: clear_caches(where=tmp_path/'c')
    assert '\n' not in str(e.value) and kept_caches(tmp_path/'c')
    monkeypatch.undo()
    monkeypatch.setattr(type(tmp_path), 'is_dir', deny)
    with pytest.raises(UserError, match='x cannot be read: Permission denied') as e: kept_caches(tmp_path/'c')


def test_a_cache_of_another_user_stops_nobody(tmp_path, monkeypatch):
    "Where a folder cannot be read the list says so, and shows the others; clearing leaves it as it is"
    for name in ('pets-0123456789ab', 'photos-0123456789ab', 'lost+found', '.cars-0123456789ab.building'):
        (tmp_path/name).mkdir()
        (tmp_path/name/'cache.json').write_text('{"format": 1}')
    opened, private = Path.open, [tmp_path/o for o in ('photos-0123456789ab', 'lost+found')]

    def deny(path, *args, **kwargs):
        if path.parent in private: raise PermissionError(13, 'Permission denied', str(path))
        return opened(path, *args, **kwargs)
    monkeypatch.setattr(Path, 'open', deny)
    assert {o.path.name: o.says.split(':')[0] for o in kept_caches(tmp_path)} == {
        '.cars-0123456789ab.building': 'unfinished', 'pets-0123456789ab': 'made by another version (format 1)', 'photos-0123456789ab': 'cannot be read'}
    with pytest.raises(UserError, match='photos-0123456789ab cannot be read: another user made it'): clear_caches(['photos'], tmp_path)
    assert {o.path.name for o in clear_caches((), tmp_path)} == {'.cars-0123456789ab.building', 'pets-0123456789ab'}
    assert all(o.is_dir() for o in private)


# Tables

@pytest.mark.parametrize('how', ['split', 'label', 'file', 'column', 'content'])
def test_rows_and_files_of_a_table_are_part_of_the_key(pets, tmp_path, how):
    "Another split, label, file or content of a file never meets the old cache"
    import pandas as pd
    files = sorted_files(pets)
    df = pd.DataFrame(dict(name=[str(o.relative_to(pets)) for o in files], label=[o.parent.name for o in files], other=['xyz'[i % 3] for i in range(len(files))]))

    def loaders(df, seed=1, **kwargs):
        dls = ImageDataLoaders.from_df(df, pets, item_tfms=Resize(32, method='squish'), bs=4, num_workers=0, device='cpu', seed=seed, **kwargs)
        return dls, cached(dls, tmp_path/'c', workers=0)
    loaders(df)
    loaders(df.copy())
    assert len(folders(tmp_path/'c')) == 2  # the same rows, the same caches
    if how == 'label': df.loc[[0, 20, 30, 39], 'label'] = ['b', 'b', 'a', 'a']
    if how == 'file': df['name'] = df['name'].to_numpy()[::-1]
    if how == 'content': Image.new('RGB', (60, 60)).save(files[3])
    dls, kept = loaders(df, **dict(split=dict(seed=2), column=dict(label_col='other')).get(how, {}))
    for a, b in zip(dls.loaders, kept.loaders): equal(epochs(a, 1), epochs(b, 1))


def test_cells_of_any_kind_can_be_told():
    import pandas as pd
    df = pd.DataFrame(dict(a=['x', None], b=[1, pd.NA], c=pd.Categorical(['u', 'v']), d=pd.to_datetime(['2020', None]), e=[1., float('nan')]))
    key = fingerprint_items(df)
    assert fingerprint_items(df.copy()) == key
    for col, value in dict(a='y', b=2, c='v', d=pd.Timestamp('2021'), e=2.).items():
        other = df.copy()
        other.loc[0, col] = value
        assert fingerprint_items(other) != key, col
    assert len({key, fingerprint_items(df.rename(columns=dict(a='z'))), fingerprint_items(df[::-1]), fingerprint_items(df.set_index(pd.Index([5, 6])))}) == 4


def test_a_row_whose_image_cannot_be_prepared_is_one_line(pets, tmp_path):
    import pandas as pd
    df = pd.DataFrame(dict(name=[str(o.relative_to(pets)) for o in sorted_files(pets)], label='a'))
    (pets/df['name'][2]).write_bytes(b'')
    dls = ImageDataLoaders.from_df(df, pets, item_tfms=Resize(32), bs=4, num_workers=0, device='cpu', seed=1)
    one_line(lambda: cached(dls, tmp_path/'c', workers=0), f"cannot prepare {pets/df['name'][2]} for the cache")


# Chance that nobody told of

class Noisy(Transform):
    order = 2

    def __init__(self, draw): self.draw = draw
    def encodes(self, x: PILImage): return PILImage.create((np.asarray(x).astype(int) + self.draw()).clip(0, 255).astype('uint8'))


def by_python(): return random.randint(0, 60)
def by_numpy(): return np.random.randint(0, 60)
def by_torch(): return int(torch.randint(0, 60, ()))
def rarely(): return random.randint(1, 60) if random.random() < .2 else 0


def seeded_by_itself():
    random.seed(5)
    return random.randint(0, 60)


@pytest.mark.parametrize('draw', [by_python, by_numpy, by_torch, rarely])
@pytest.mark.parametrize('whole', [False, True])
def test_a_transform_that_draws_without_saying_so_is_refused(pets, tmp_path, draw, whole):
    "It would be drawn once for all epochs"
    dls = make(pets, [Resize(32, method='squish'), Noisy(draw)])
    one_line(lambda: cached(dls, tmp_path/'c', workers=0, whole=whole), 'Noisy draws at random.*RandTransform')


def by_a_new_generator(): return int(np.random.default_rng().integers(0, 60))
def as_planned(): return globals()['PLANNED'].pop(0)
def seldom_by_a_new_one(): return by_a_new_generator() if np.random.default_rng().random() < .7 else 0

PLANNED = []


@pytest.mark.parametrize('draw', [by_a_new_generator, seldom_by_a_new_one])
@pytest.mark.parametrize('whole', [False, True])
def test_draws_of_a_generator_that_nobody_can_watch_are_refused(pets, tmp_path, draw, whole):
    "`np.random.default_rng()` in a transform, or OpenCV's own: the state of no generator of the process changes"
    dls = make(pets, [Resize(32, method='squish'), Noisy(draw)])
    one_line(lambda: cached(dls, tmp_path/'c', workers=0, whole=whole), r'(Noisy|one of its transforms) draws at random.*RandTransform')


def test_the_transform_that_draws_is_named_though_it_often_draws_the_same(pets, tmp_path):
    "It drew twice the same: a step after it is not taken for the one that draws"
    PLANNED[:] = [0, 1, 0, 0, 0, 1]*50
    dls = make(pets, [Resize(32, method='squish'), Noisy(as_planned)])
    one_line(lambda: cached(dls, tmp_path/'c', workers=0), 'Noisy draws at random')


def test_draws_that_change_nothing_are_left_alone(pets, tmp_path):
    dls = make(pets, [Resize(32, method='squish'), Noisy(seeded_by_itself)])
    equal(epochs(dls.train), epochs(cached(dls, tmp_path/'c', workers=0).train))


def test_a_data_set_that_draws_is_refused(tmp_path):
    class Drawn:
        def __len__(self): return 8
        def __getitem__(self, i): return torch.rand(3), i
    one_line(lambda: cached(Drawn(), tmp_path/'c', workers=0), 'the data set draws at random')


@pytest.mark.parametrize('own', [random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator()])
def test_a_generator_of_ones_own_is_refused(pets, tmp_path, own):
    dls = make(pets, [Resize(32, method='squish'), Noisy(partial(getattr, own, 'x', 1))])
    one_line(lambda: cached(dls, tmp_path/'c', workers=0), 'cannot be cached: it holds .*, which draws at random')


# Whole batches do what was asked, or nothing

class Darker(Resize):
    def encodes(self, x: PILImage): return PILImage.create(np.zeros((32, 32, 3), 'uint8'))


class Lower(RandomResizedCrop):
    def before_call(self, b, split_idx):
        super().before_call(b, split_idx)
        self.tl = (0, 0)


def corner(b, split_idx=None): AT_CORNER.pcts = (0, 0)


AT_CORNER = Resize(32, before_call=corner)


class Upright(FlipItem):
    def encodes(self, x: PILImage): return x


@pytest.mark.parametrize('tfms,match', [
    ([Darker(32)], 'not Darker'), ([Lower(32)], 'not Lower'), ([Resize(32), Upright()], 'not Upright'),
    ([Resize(32, resamples=(Image.NEAREST, Image.NEAREST))], 'Resize.*resamples'), ([RandomResizedCrop(32, resamples=(Image.BICUBIC, Image.NEAREST))], 'RandomResizedCrop.*resamples'),
    ([AT_CORNER], 'before_call')])
def test_whole_batches_take_fastais_own_transforms_alone(pets, tmp_path, tfms, match):
    one_line(lambda: cached(make(pets, tfms), tmp_path/'c', workers=0, whole=True), match)


@pytest.mark.parametrize('kwargs', [{}, dict(whole=True)])
def test_item_transforms_that_come_too_late_are_refused(pets, tmp_path, kwargs):
    "What is added to loaders from a cache would act on tensors, or on nothing"
    kept = cached(make(pets), tmp_path/'c', workers=0, **kwargs)
    one_line(lambda: kept.add_tfms([Resize(16)], 'after_item', 'train'), 'before they are cached')
    kept.add_tfms([Doubled()], 'after_batch', 'train')
    assert any(isinstance(o, Doubled) for o in kept.train.after_batch.fs)


class Doubled(Transform):
    def encodes(self, x: TensorImage): return x*2


@pytest.mark.parametrize('column', [False, True])
@pytest.mark.parametrize('used', [False, True])
def test_labels_from_a_table_can_be_told(column, used):
    "As a function finds them in a table or a column of its module, whether pandas remembers what was asked or not"
    import pandas as pd

    def of(value, name='1.jpg'):
        df = pd.DataFrame(dict(name=['0.jpg', name], label=['cat', value])).set_index('name')
        table = df['label'] if column else df
        if used: str(df['label'].iloc[0])
        return fingerprint(describe(partial(sorted, table)))
    assert of('dog') == of('dog') and len({of('dog'), of('cat'), of('dog', '2.jpg')}) == 3


def test_what_somebody_keeps_beside_a_cache_stays(tmp_path):
    for name, text in dict(webapp='{"format": "v1"}', other='{"format": 1}', numbers='{}', house=None).items():
        (folder := tmp_path/(f'{name}.building' if text is None else name)).mkdir()
        if text: (folder/'cache.json').write_text(text)
        if name == 'numbers': (folder/'index.npz').touch()
        (folder/'thesis.txt').touch()
    (tmp_path/'empty.building').mkdir()
    open_store(tmp_path/'x-1', items(), workers=0)
    before = sorted(o.name for o in tmp_path.iterdir() if o.is_dir())
    assert [o.path.name for o in clear_caches((), tmp_path)] == ['x-1']
    assert sorted(o.name for o in tmp_path.iterdir() if o.is_dir()) == [o for o in before if o != 'x-1']


def test_an_empty_name_clears_nothing(tmp_path):
    open_store(tmp_path/'x-1', items(), workers=0)
    for names in ([''], ['x', '']):
        with pytest.raises(UserError, match='the name of a cache is empty'): clear_caches(names, tmp_path)
    assert len(kept_caches(tmp_path)) == 1


def test_clearing_says_what_was_built_meanwhile(tmp_path, monkeypatch, capsys):
    from fastbench.command import cache
    kept = open_store(tmp_path/'y-2', items(), workers=0) and kept_caches(tmp_path)
    monkeypatch.setattr(cache, 'clear_caches', lambda *_: [])
    cache.clear(None, tmp_path)
    assert capsys.readouterr().out == 'y-2 is left: it was built meanwhile, clear again\n' and len(kept) == 1


def test_a_folder_with_a_file_of_another_program_is_no_cache(tmp_path):
    "`fastbench cache clear --where` removed it with all that was in it"
    for name, text in dict(editor='{"files": []}', broken='{"n": 3', odd='{"format": 2}').items():
        (tmp_path/name).mkdir()
        (tmp_path/name/'cache.json').write_text(text)
        if name != 'odd': (tmp_path/name/'work').touch()
    (tmp_path/'odd'/'index.npz').touch()
    assert [(o.path.name, o.says) for o in kept_caches(tmp_path)] == [('odd', 'damaged: the next call makes it anew')]
    clear_caches((), tmp_path)
    assert sorted(o.name for o in tmp_path.iterdir() if o.is_dir()) == ['broken', 'editor']
    (tmp_path/'own').mkdir()
    (tmp_path/'own'/'cache.json').write_text('{"format": 1}')
    (tmp_path/'linked').symlink_to('own')
    with pytest.raises(UserError, match='linked is a link: clear the cache own in'): clear_caches(['linked'], tmp_path)

"The loader with threads: fastai's own crops and order, whatever happens to the epoch; and `fast_images` of any plain pipeline, or one line that says why not"
import gc
import pickle
import random
import shutil
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastai.callback.core import CancelFitException, Callback
from fastai.data.all import (CategoryBlock, ColReader, DataBlock, DataLoaders, Datasets, MultiCategoryBlock, Normalize, RandomSplitter, RegressionBlock, ToTensor,
                             IntToFloatTensor, get_image_files, parent_label)
from fastai.callback.data import WeightedDL
from fastai.data.core import TfmdDL
from fastai.data.transforms import Categorize, MultiCategorize, RegressionSetup
from fastai.interpret import Interpretation
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import TensorCategory, TensorImage, TensorImageBW, set_seed
from fastai.vision.all import (CropPad, FlipItem, ImageBlock, ImageDataLoaders, MaskBlock, PILImage, PILImageBW, PointBlock, RandomCrop, RandomResizedCrop, Resize, ResizeMethod,
                               imagenet_stats)
from fasttransform import ItemTransform, Pipeline, Transform
from PIL import Image
from scipy.stats import ks_2samp

from fastbench.distributed.dealt import RankDL
from fastbench.draw.cached import cached
from fastbench.draw.cut import CannotPlan, Crop, CropPlan, cut, cut_pixels, pick_divisor
from fastbench.draw.decode import CorruptImage, decoders, read_header
from fastbench.draw.fast import fast_images, why_not_fast
from fastbench.draw.loader import ImageItems, PoolDL
import fastbench.draw.pool as pool
from fastbench.draw.pool import StuckWorker, Threads, in_threads
from fastbench.draw.seeded import SeededDL, item_name
from fastbench.draw.workers import auto_workers
from fastbench.errors import UserError
from test_decode import photo, saved

N = 37
older = set()  # threads that an earlier test file has left


def one_line(e): assert '\n' not in str(e.value), str(e.value); return str(e.value)
def threads(): return [o for o in threading.enumerate() if o.name.startswith('fastbench-draw') and o not in older]


def settled(begun, want):
    "How many are begun once `want` are, however busy the machine, and a moment has passed in which more could be"
    until = time.monotonic() + 60
    while len(begun) < want and time.monotonic() < until: time.sleep(.01)
    time.sleep(.1)
    return len(begun)


def ended():
    "Have all threads ended, however busy the machine?"
    until = time.monotonic() + 60
    while threads():
        if time.monotonic() > until: return False
        time.sleep(.01)
    return True


@pytest.fixture(autouse=True)
def no_thread_left():
    if threads(): gc.collect()  # an epoch that was abandoned ends here
    older.update(threads())
    yield
    assert ended()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Pictures of several sizes and formats in three classes"
    root = tmp_path_factory.mktemp('pictures')
    for i in range(N):
        fn = root/'abc'[i % 3]/f'{i:02}.{"png" if i % 7 == 0 else "jpg"}'
        fn.parent.mkdir(exist_ok=True)
        im = photo(90 + 7*i, 160 - 3*i, seed=i)
        fn.write_bytes(saved(im.convert('L') if i == 5 else im, 'PNG' if i % 7 == 0 else 'JPEG'))
    return root


class OwnCategorize(Categorize):
    def encodes(self, o): return TensorCategory(self.vocab.o2i[o] + 100)


def odd(i): return i % 2
def text(i): return str(i)
def parity(i): return 'even odd'.split()[i % 2]
def numpy_number(i): return np.int64(i % 2)


TARGETS = dict(numbers=[odd, Categorize], names=[parity, Categorize], numpy=[numpy_number, Categorize], subclass=[odd, OwnCategorize], several=[lambda i: ['even', 'odd'][:1 + i % 2], MultiCategorize],
               regression=[odd, RegressionSetup], unknown=[text, Categorize(vocab=['4', '5'], add_na=True)], floats=[lambda i: float(i)], plain=[odd])


@pytest.mark.parametrize('name', TARGETS)
def test_targets_are_what_fastai_makes(name):
    data = Datasets([4, 7, 5, 6], [[lambda i: np.full((2, 3), i, np.uint8), PILImageBW.create], TARGETS[name]], splits=[[0, 1], [2, 3]])
    for part in (data.train, data.valid):
        for i in range(2):
            (got,), want = ImageItems(part).others(i), part.tls[1][i]
            assert type(got) is type(want) and np.array_equal(got, want) and getattr(got, 'dtype', None) == getattr(want, 'dtype', None)


def test_targets_that_fastai_refuses_are_refused_in_its_words():
    for tfm, x in ((Categorize(vocab=['4']), 7), (Categorize(vocab=['4', 'x']), ('a', 'x'))):
        data = Datasets([4], [[lambda i: np.full((2, 3), i, np.uint8), PILImageBW.create], [text, tfm]])
        tl = data.tls[1]
        tl.tfms.fs[0] = Transform(lambda o, x=x: x)
        with pytest.raises(KeyError) as said: ImageItems.others(SimpleNamespace(rest=[tl]), 0)
        with pytest.raises(KeyError) as own: tl[0]
        assert str(said.value) == str(own.value)


def listed(folder): return get_image_files(folder).sorted()  # a file system has an order of its own


def block(item_tfms, blocks=(ImageBlock, CategoryBlock), get_y=parent_label, **kwargs):
    return DataBlock(blocks=blocks, get_items=listed, get_y=get_y, splitter=RandomSplitter(.3, seed=1), item_tfms=item_tfms, **kwargs)


def loaders(folder, item_tfms=None, bs=5, **kwargs):
    set_seed(1)
    return block(item_tfms or Resize(32), **kwargs).dataloaders(folder, bs=bs, num_workers=0, device=torch.device('cpu'))


def seeded(folder, cls=SeededDL, tfms=None, seed=3, part=0, cls_image=PILImage, **kwargs):
    files = sorted(get_image_files(folder))
    dsets = Datasets(files, [[cls_image.create], [parent_label, Categorize(['a', 'b', 'c'])]], splits=[list(range(25)), list(range(25, N))])
    kwargs = dict(bs=4, shuffle=not part, drop_last=not part, num_workers=0, seed=seed, after_item=tfms or [RandomResizedCrop(32), FlipItem(), ToTensor()]) | kwargs
    return cls(dsets.subset(part), **kwargs)


def same(a, b): return len(a) == len(b) and all(len(x) == len(y) and all(type(o) is type(p) and o.equal(p) for o, p in zip(x, y)) for x, y in zip(a, b))


# Crops

TFMS = dict(rrc=lambda: [RandomResizedCrop(32)], rrc_scale=lambda: [RandomResizedCrop((24, 40), min_scale=.35, ratio=(.5, 2)), FlipItem()], rrc_never=lambda: [RandomResizedCrop(32, ratio=(9, 10)), FlipItem(1.)],
            rrc_no_extra=lambda: [RandomResizedCrop(32, val_xtra=0)], resize=lambda: [Resize(32), FlipItem()], wide=lambda: [Resize((24, 48))], squish=lambda: [Resize(32, ResizeMethod.Squish), FlipItem()],
            pad=lambda: [Resize(32, ResizeMethod.Pad, pad_mode='zeros'), FlipItem()], pad_reflect=lambda: [Resize((48, 24), ResizeMethod.Pad)], pad_border=lambda: [Resize(32, 'pad', pad_mode='border')],
            then_crop=lambda: [Resize(40), RandomCrop(32), FlipItem()], then_crop_wide=lambda: [FlipItem(), RandomResizedCrop(40), RandomCrop((16, 32))], flip_after=lambda: [Resize(32), After()], bicubic=lambda: [Resize(32, resamples=(3, 0))],
            nearest=lambda: [Resize(32, resamples=(0, 0))])


def After():
    f = FlipItem()
    f.order = 2
    return f


@pytest.mark.parametrize('split_idx', [0, 1, None])
@pytest.mark.parametrize('kind', TFMS)
@pytest.mark.parametrize('size', [(101, 75), (75, 101), (300, 33), (40, 40), (17, 9)], ids=str)
def test_a_crop_is_fastais(kind, size, split_idx):
    data = saved(photo(*size), quality=92)
    pipe = Pipeline([*TFMS[kind](), ToTensor()], split_idx=split_idx)
    plan = CropPlan(pipe.fs, split_idx)
    for seed in range(4):
        random.seed(seed)
        want = pipe(PILImage.create(data)).numpy().astype(int)
        rng = random.Random(seed)
        c = plan.draw(*size, rng)
        assert rng.getstate() == random.getstate()  # no number more or less
        assert c.shape == plan.shape == want.shape[1:]
        for name, exact in (('pillow', True), ('pillow', False), ('pillow-scaled', False)):
            out = np.full(want.shape, 99, 'uint8')
            cut(data, read_header(data), c, out, decoders[name], exact)
            if exact: assert np.array_equal(out, want)
            assert np.abs(out - want).mean() <= (5 if min(size) > 30 else 12), (c, name)


@pytest.mark.parametrize('name', [o.name for o in decoders.values() if not o.missing() and o.formats])
def test_the_picture_stays_within_the_tolerance(name):
    "At 400x350 to 128 pixels, the tolerance that is promised"
    for seed in range(6):
        im = photo(400, 350, seed)
        noisy = Image.fromarray((np.asarray(im) + np.random.default_rng(seed).normal(0, 12, (350, 400, 1))).clip(0, 255).astype('uint8'))
        data, plan = saved(noisy, quality=93), CropPlan(Pipeline([RandomResizedCrop(128, min_scale=.35), FlipItem(), ToTensor()]).fs, 0)
        for i in range(5):
            c, a, b = plan.draw(400, 350, random.Random(i)), *np.empty((2, 3, 128, 128), 'uint8')
            cut(data, read_header(data), c, a, exact=True)
            cut(data, read_header(data), c, b, decoders[name])
            assert np.abs(a.astype(int) - b).mean() <= 5


@pytest.mark.parametrize('w', range(1, 34))
def test_divided_sizes_are_told_from_each_other(w):
    "A decoder may divide by less than it was asked to: the size of the result says by how much"
    full = np.repeat(np.repeat(np.arange(w, dtype='uint8')[None, :, None]*7, 40, 0), 3, 2)
    for d in (1, 2, 4, 8):
        x, out = full[::d, ::d], np.empty((3, 1, 1), 'uint8')
        cut_pixels(np.ascontiguousarray(x), Crop((1, 1), (0, 0, w, 40)), (w, 40), out)
        assert abs(int(out[0, 0, 0]) - x[0, :, 0].mean()) < 2


def test_divisors():
    def d(box, size): return pick_divisor(Crop((size, size), box), (400, 350))
    assert [d((0, 0, 400, 350), o) for o in (351, 175, 176, 87, 44, 43, 10)] == [1, 2, 1, 4, 4, 8, 8] and d((-50, 0, 450, 350), 128) == 1


class Odd(RandomResizedCrop): pass
class Blur(ItemTransform):
    def encodes(self, o): return o


@pytest.mark.parametrize('tfms, why', [([Odd(32)], 'Odd has to see'), ([Resize(32), Blur()], 'Blur has to see'), ([], 'sizes of their own'), ([FlipItem()], 'sizes of their own'), ([Resize(40), CropPad(32)], 'CropPad has to see'),
                                       ([Resize(40), RandomResizedCrop(32)], 'twice'), ([Resize(24), RandomCrop(32)], 'larger than')], ids=str)
def test_what_cannot_be_planned_is_named(tfms, why):
    with pytest.raises(CannotPlan, match=why) as e: CropPlan(Pipeline([*tfms, ToTensor()]).fs)
    assert one_line(e)
    with pytest.raises(CannotPlan, match='ToTensor'): CropPlan(Pipeline([Resize(32)]).fs)


# The loader

@pytest.mark.parametrize('part', [0, 1])
@pytest.mark.parametrize('image', [PILImage, PILImageBW])
def test_batches_are_fastais_exactly(folder, part, image):
    want = [list(seeded(folder, part=part, cls_image=image)) for _ in range(2)]
    dl = seeded(folder, partial(PoolDL, threads=2, exact=True), part=part, cls_image=image)
    assert same(want[0], list(dl)) and type(want[0][0][0]) is (TensorImage if image is PILImage else TensorImageBW)
    again = seeded(folder, part=part, cls_image=image)
    for _ in range(3): assert len(list(again)) == len(want[0])  # epochs go on alike
    for _ in range(2): list(dl)
    assert same(list(again), list(dl))


@pytest.mark.parametrize('n', [1, 2, 5])
def test_threads_do_not_matter(folder, n):
    make = partial(seeded, folder, cls=PoolDL)
    def epochs(**kwargs):
        dl = make(**kwargs)
        return [b for _ in range(2) for b in dl]
    assert same(epochs(threads=0), epochs(threads=n)) and not same(epochs(threads=n), epochs(threads=n, seed=4))
    dl = make(threads=n)
    random.seed(7)
    state = random.getstate()
    list(dl)
    assert random.getstate() == state


def test_the_order_without_a_seed_is_fastais(folder):
    dls = loaders(folder)
    new = fast_images(dls, threads=2)
    for _ in range(3): assert [y.tolist() for _, y in dls.train] == [y.tolist() for _, y in new.train]
    a, b = (list(fast_images(loaders(folder, RandomResizedCrop(32)), threads=n).train) for n in (0, 3))
    assert same(a, b)  # `set_seed` is enough
    def order():
        set_seed(5)
        dl = PoolDL(dls.train_ds, bs=5, shuffle=True, after_item=list(dls.train.after_item.fs), threads=0)
        return [y.tolist() for _, y in dl]
    assert order() == order()


def test_semantics_of_a_loader(folder):
    dl = seeded(folder, partial(PoolDL, threads=2))
    assert len(dl) == len(list(dl)) == 6
    assert [len(x) for x, _ in dl.new(drop_last=False, shuffle=False)] == [4]*6 + [1]
    few = dl.new(n=9, drop_last=False)
    assert isinstance(few, PoolDL) and (few.threads, few.seed) == (2, 3) and sum(len(x) for x, _ in few) == 9
    own = dl.new(get_idxs=lambda: [5]*4 + [6]*4, shuffle=False)
    assert [y.unique().numel() for _, y in own] == [1, 1]
    x, y = dl.one_batch()
    assert x.shape == (4, 3, 32, 32) and ended()
    assert dl.new(bs=3).one_batch()[0].shape[0] == 3
    dl.show_batch(max_n=2)
    with pytest.raises(UserError): list(dl.new(after_item=[Blur(), ToTensor()]))


def test_nothing_is_begun_beyond_one_batch(folder):
    seen = []
    class Told(PoolDL):
        def _item_into(self, made, row, i, *args):
            seen.append(i)
            return super()._item_into(made, row, i, *args)
    dl = seeded(folder, partial(Told, threads=2))
    dl.one_batch()
    assert len(seen) == 4
    del seen[:]
    it = iter(dl)
    next(it)
    assert settled(seen, 4*(1 + dl.prefetch)) == 4*(1 + dl.prefetch)  # bounded
    del it


@pytest.mark.parametrize('wrap', [lambda dl: dl, partial(RankDL, rank=0, world_size=1)])
def test_the_next_batch_begins_when_one_is_transformed(folder, monkeypatch, wrap):
    "Else threads share Python's lock and the cores with batch transforms"
    monkeypatch.setattr(RankDL, '_broadcast', lambda self, t, rank: t)
    begun, seen = [], []
    class Slow(Transform):
        def encodes(self, x:TensorImage):
            time.sleep(.1)
            seen.append(len(begun))
            return x
    dl = seeded(folder, partial(PoolDL, threads=2, prefetch=1)).new(after_batch=[Slow()])
    own, dl.parts.file = dl.parts.file, lambda i: begun.append(i) or own(i)
    for i, _ in enumerate(wrap(dl)):
        assert settled(begun, want := min(4*(i + 2), 24)) == want
    assert seen == [4, 8, 12, 16, 20, 24] and 'begin_more' not in vars(dl)


def test_a_loop_that_begins_nothing_has_the_next_batch_begun(folder):
    "Another loader around it, such as fastai's `DistributedDL`"
    begun, made = [], in_threads((([], [i]) for i in range(6)), lambda made, o: begun.append(o), 2, ahead=1, hand=lambda more: None)
    wants = [1, 2, 4, 5, 6, 6]
    for i, _ in enumerate(made): assert settled(begun, wants[i]) == wants[i]
    assert i == 5


def test_pickled(folder):
    dl = seeded(folder, partial(PoolDL, threads=2))
    other = pickle.loads(pickle.dumps(dl))
    assert same(list(dl), list(other))


def test_test_sets_and_images_in_memory(folder):
    dls = fast_images(loaders(folder, RandomResizedCrop(32)), threads=2, exact=True)
    files = get_image_files(folder)[:7]
    old = loaders(folder, RandomResizedCrop(32))
    for items in (files, [str(o) for o in files], [PILImage.create(o) for o in files], [np.asarray(PILImage.create(o)) for o in files]):
        a, b = list(old.test_dl(items)), list(dls.test_dl(items))
        assert type(dls.test_dl(items)) is PoolDL and same(a, b)
    a, b = (list(o.test_dl(files, with_labels=True)) for o in (old, dls))
    assert same(a, b)


# What interrupts an epoch

def spoiled(folder, tmp_path, n=1):
    import shutil
    shutil.copytree(folder, tmp_path/'p')
    files = sorted((tmp_path/'p').rglob('*.jpg'))[:n]
    for o in files: o.write_bytes(o.read_bytes()[:400])
    return tmp_path/'p', files


@pytest.mark.parametrize('n', [0, 2])
def test_a_file_that_cannot_be_read_is_named(folder, tmp_path, n):
    path, (bad,) = spoiled(folder, tmp_path)
    dl = seeded(path, partial(PoolDL, threads=n), shuffle=False)
    with pytest.raises(CorruptImage) as e: list(dl)
    assert str(bad) in one_line(e)
    bad.unlink()
    with pytest.raises(CorruptImage, match='No such file') as e: list(dl)
    assert str(bad) in one_line(e)


def test_batches_before_an_error_come_first(folder, tmp_path):
    path, files = spoiled(folder, tmp_path)
    dl, seen = seeded(path, partial(PoolDL, threads=3), shuffle=False, drop_last=False), 0
    bad = sorted(get_image_files(path)).index(files[0])
    dl = dl.new(get_idxs=lambda: [i for i in range(25) if i != bad] + [bad])
    with pytest.raises(CorruptImage):
        for b in dl: seen += 1
    assert seen == 6


def test_left_out_where_that_was_asked_for(folder, tmp_path):
    path, bad = spoiled(folder, tmp_path, 2)
    dl = seeded(path, partial(PoolDL, threads=2, skip_bad=True), shuffle=False, drop_last=False)
    with pytest.warns(UserWarning, match='left out 2 of 25 images: cannot read the image .*runcated'): got = list(dl)
    assert sum(len(x) for x, _ in got) == 23 and sorted(dl.skipped) == [str(o) for o in bad] and all(len(x) == len(y) for x, y in got)
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # told once
        list(dl)


@pytest.mark.parametrize('n', [0, 2])
def test_a_file_that_is_gone_is_left_out_too(folder, tmp_path, n):
    path, (bad,) = spoiled(folder, tmp_path)
    dl = seeded(path, partial(PoolDL, threads=n, skip_bad=True), shuffle=False, drop_last=False)
    bad.unlink()
    with pytest.warns(UserWarning, match='left out 1 of 25 images: cannot read the image .*No such file'): got = list(dl)
    assert sum(len(x) for x, _ in got) == 24 and list(dl.skipped) == [str(bad)]
    shutil.rmtree(bad.parent)
    with pytest.raises(CorruptImage, match=r'No such file or directory, nor its folder \(is its drive there\?\)') as e: list(dl)
    assert one_line(e)


def test_where_each_image_has_its_row_none_is_left_out(folder, tmp_path):
    path, bad = spoiled(folder, tmp_path, 2)
    files = sorted(get_image_files(path))
    dsets = Datasets(files, [[PILImage.create], [parent_label, Categorize]], splits=[[i for i, o in enumerate(files) if o not in bad and i % 5], [i for i, o in enumerate(files) if o in bad or not i % 5]])
    dls = fast_images(dsets.dataloaders(bs=5, after_item=[Resize(32), ToTensor()], after_batch=[IntToFloatTensor()], num_workers=0, device='cpu'), threads=2, skip_bad=True)
    learn = Learner(dls, torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3)), loss_func=CrossEntropyLossFlat())
    good = [o for o in files[:6] if o not in bad]
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1)
        learn.validate()
        assert sorted(dls.valid.skipped) == [str(o) for o in bad]
        for f in (learn.get_preds, learn.tta, lambda: learn.predict(bad[0]), lambda: Interpretation.from_learner(learn).top_losses(2),
                  lambda: learn.get_preds(dl=dls.valid), lambda: learn.get_preds(dl=dls.test_dl([*good, bad[0]])), lambda: learn.get_preds(dl=dls.test_dl([*good, bad[0]]), reorder=False)):
            with pytest.raises(CorruptImage) as e: f()
            assert str(bad[0]) in one_line(e)
        assert len(learn.get_preds(dl=dls.test_dl(good))[0]) == len(good)
    assert auto_workers(dls, counts=[1], batches=1).valid.skip_bad


def test_an_error_of_a_target_is_its_own(folder):
    def label(o): raise KeyError('no such label')
    dls = loaders(folder)
    dl = fast_images(dls, threads=2).train
    dl.dataset.tls[1].tfms = Pipeline([label])
    with pytest.raises(KeyError, match='no such label'): list(dl)


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError, CancelFitException])
def test_a_loop_that_is_left(folder, error):
    dl = seeded(folder, partial(PoolDL, threads=2))
    with pytest.raises(error):
        for i, b in enumerate(dl):
            if i == 1: raise error
    for b in dl: break
    assert len(list(dl)) == 6


def test_no_thread_is_left_where_ctrl_c_comes_while_they_begin(monkeypatch):
    "As at the start of each epoch: those that had begun waited for ever"
    start = threading.Thread.start
    def interrupted(self):
        start(self)
        if self.name == 'fastbench-draw-1': raise KeyboardInterrupt
    monkeypatch.setattr(threading.Thread, 'start', interrupted)
    with pytest.raises(KeyboardInterrupt): list(in_threads([([], [1])], lambda made, i: None, n=3))
    assert ended()


def test_standing_still_as_a_whole_is_no_hung_item(monkeypatch):
    "Ctrl-Z and `fg`, a machine that was frozen: the clock went on, the threads did not"
    stopped = [0]
    monkeypatch.setattr(pool, 'monotonic', lambda: time.monotonic() + stopped[0])
    def work(made, i):
        if i == 2: stopped[0] = 100
        for _ in range(24): time.sleep(.05) # seen twice by who waits
    assert len(list(in_threads([([], [1, 2]), ([], [3])], work, n=1, timeout=60))) == 2


def test_fits(folder):
    class Stop(Callback):
        def __init__(self, error): self.error = error
        def after_batch(self):
            if self.iter == 2: raise self.error
    dls = fast_images(loaders(folder), threads=2)
    learn = Learner(dls, torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3)), loss_func=torch.nn.CrossEntropyLoss())
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=Stop(CancelFitException()))
        assert ended()
        for o in (KeyboardInterrupt(), ValueError('x')):
            with pytest.raises(type(o)): learn.fit(1, cbs=Stop(o))
        learn.fit(2)
        assert len(learn.recorder.values) == 2 and learn.get_preds()[0].shape == (len(dls.valid_ds), 3)


def test_a_thread_that_hangs_is_named_with_its_place(folder):
    release = threading.Event()
    def slow(o):
        if at and o == at[0]: release.wait(600)
        return parent_label(o)
    at = []
    dls = loaders(folder, get_y=slow)
    dls = DataLoaders(dls.train.new(shuffle=False), dls.valid)
    dl = fast_images(dls, threads=2, item_timeout=2.).train
    at.append(dls.train_ds.items[8])
    try:
        with pytest.raises(StuckWorker, match=at[0].name + r' for .* slow \(test_draw_loader.py:\d+\)') as e: list(dl)
        one_line(e)
    finally: release.set()


def test_a_slow_item_is_no_hung_one():
    def work(made, i): time.sleep(.3)
    assert len(list(in_threads([([], [1]), ([], [2])], work, n=1, timeout=60))) == 2
    assert len(list(in_threads([([], [1, 2])], work, n=1, timeout=0))) == 1


def test_what_the_garbage_collector_waits_for_is_no_hung_item():
    "It runs in any thread; a forgotten loader of PyTorch waits there for its processes"
    class Loader:
        def __del__(self): time.sleep(2.5)
    def work(made, i):
        if i == 1: del (o := [Loader()])[0]
        made.append(i)
    assert list(in_threads([([], [1, 2]), ([], [3])], work, n=1, timeout=1.)) == [[1, 2], [3]]


def test_threads_of_a_hung_pool_do_not_hold_up_its_end():
    pool, release = Threads(1), threading.Event()
    done = []
    pool.tasks.put(lambda me: done.append(release.wait(60)))
    pool.close(wait=.2)
    assert not done
    release.set()


# Several ranks

def test_ranks_share_it(folder, monkeypatch):
    "fastai's wrapper deals the order of an epoch in stretches, ours each batch"
    from fastai.distributed import DistributedDL
    for kind in (DistributedDL, RankDL):
        monkeypatch.setattr(kind, '_broadcast', lambda self, t, rank: t)
        whole = [b for b in seeded(folder, partial(PoolDL, threads=0, exact=True), shuffle=True, drop_last=False)]
        parts = [list(kind(seeded(folder, partial(PoolDL, threads=2, exact=True), drop_last=False), rank=r, world_size=2)) for r in (0, 1)]
        rows = torch.cat([x for p in (zip(*parts) if kind is RankDL else parts) for x, _ in p])
        assert torch.cat([x for x, _ in whole]).equal(rows[:25]) and len(rows) == 26


def test_a_rank_that_can_read_no_image_of_a_batch_ends_all(folder, tmp_path, monkeypatch):
    "It would be a batch short, and the others would wait for it"
    path, bad = spoiled(folder, tmp_path, 2)
    dl = seeded(path, partial(PoolDL, threads=1, skip_bad=True), shuffle=False, drop_last=False, bs=1)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(CorruptImage, match='no image of a batch can be read, and 2 processes need a batch each') as e: list(dl)
    assert bad[0].name in one_line(e)


def test_processes_share_the_cores_of_a_machine(folder, monkeypatch):
    monkeypatch.setattr('fastbench.draw.loader.worker_cores', lambda: 6)
    assert seeded(folder, PoolDL).threads == 6
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '4')
    assert seeded(folder, PoolDL).threads == 1 and seeded(folder, partial(PoolDL, threads=3)).threads == 3


def test_a_batch_of_all_ranks_is_needed(folder):
    dl = RankDL(seeded(folder, PoolDL, bs=13), 0, 2, 'cpu')
    dl._broadcast = lambda o, rank: o
    assert len(dl) == 0
    with pytest.raises(UserError, match='25 items are less than one batch of all processes, 2 x 13') as e: list(dl)
    one_line(e)


# fast_images

def table(folder):
    import pandas as pd
    files = sorted(get_image_files(folder))
    return pd.DataFrame(dict(file=[str(o) for o in files], tags=['a b' if i % 2 else 'b' for i in range(len(files))], age=[float(i) for i in range(len(files))]))


def from_table(folder, blocks, cols, **kwargs):
    set_seed(1)
    block = DataBlock(blocks=blocks, get_x=ColReader('file'), get_y=cols, splitter=RandomSplitter(.3, seed=1), item_tfms=Resize(32), **kwargs)
    return block.dataloaders(table(folder), bs=5, num_workers=0, device=torch.device('cpu'))


def vision(folder, **kwargs):
    from fastbench.vision.data import vision_dls
    return vision_dls(str(folder), size=32, bs=5, workers=0, device='cpu', valid=.3, **kwargs)


SETS = dict(block=lambda f: loaders(f, [RandomResizedCrop(32), FlipItem()], batch_tfms=Normalize.from_stats(*imagenet_stats, cuda=False)),
            from_folder=lambda f: ImageDataLoaders.from_folder(f, valid_pct=.3, seed=1, item_tfms=Resize(32), bs=5, num_workers=0, device='cpu'),
            from_name=lambda f: ImageDataLoaders.from_path_func(f, get_image_files(f), parent_label, item_tfms=Resize(32, 'pad'), bs=5, num_workers=0, device='cpu'),
            from_df=lambda f: ImageDataLoaders.from_df(table(f), path='/', fn_col='file', label_col='tags', label_delim=' ', item_tfms=Resize(32), bs=5, num_workers=0, device='cpu'),
            multi=lambda f: from_table(f, (ImageBlock, MultiCategoryBlock), ColReader('tags', label_delim=' ')), regression=lambda f: from_table(f, (ImageBlock, RegressionBlock), ColReader('age')),
            two_targets=lambda f: from_table(f, (ImageBlock, RegressionBlock, MultiCategoryBlock), [ColReader('age'), ColReader('tags', label_delim=' ')], n_inp=1),
            gray=lambda f: loaders(f, blocks=(ImageBlock(PILImageBW), CategoryBlock)), vision=vision, vision_crop=partial(vision, min_scale=.3, flip=.5))


@pytest.mark.parametrize('kind', SETS)
def test_same_items_order_labels_and_pixels(folder, kind):
    old = SETS[kind](folder)
    new, near = (fast_images(old, threads=2, exact=o) for o in (True, False))
    assert type(new) is type(old) and new.vocab == old.vocab if hasattr(old, 'vocab') else True
    assert [o.after_batch.fs == p.after_batch.fs for o, p in zip(old.loaders, new.loaders)] == [True]*2 and (new.path, torch.device(new.device)) == (old.path, torch.device(old.device))
    a, b, c = (list(o.valid) for o in (old, new, near))
    assert same(a, b) and all(same([x[1:]], [y[1:]]) for x, y in zip(a, c))
    scale = 255*(.225 if any(isinstance(o, Normalize) for o in old.valid.after_batch.fs) else 1)
    assert max((x[0] - y[0]).abs().mean().item()*scale for x, y in zip(a, c)) <= 5
    a, b = (list(o.train) for o in (old, new))
    assert same([x[1:] for x in a], [y[1:] for y in b]) and [[type(o) for o in x] for x in a] == [[type(o) for o in x] for x in b]
    if isinstance(old.train, SeededDL): assert same(a, b)


def test_crops_have_fastais_distribution(folder, monkeypatch):
    "Without a seed the crops differ, and are distributed alike: scale, ratio, position, mirrored"
    seen = []
    old = loaders(folder, [RandomResizedCrop(32, min_scale=.2), FlipItem()], bs=5)
    draw, before = CropPlan.draw, RandomResizedCrop.before_call
    def told(self, w, h, rng):
        c = draw(self, w, h, rng)
        if (w, h) != (1000, 1000): seen.append((c.box, w, h, c.mirrored))
        return c
    monkeypatch.setattr(CropPlan, 'draw', told)
    new = fast_images(old, threads=2).train
    for _ in range(40): list(new)
    ours, seen = sorted(seen), []  # else the threads decide which number makes which crop, and with it how far the two are apart
    tfm, flip = RandomResizedCrop(32, min_scale=.2), FlipItem()
    random.seed(0)
    for _, w, h, _ in ours:
        flip.before_call(None, 0)
        tfm.before_call(Image.new('L', (w, h)), 0)
        (l, t), (cw, ch) = tfm.tl, tfm.cp_size
        seen.append(((l, t, l+cw, t+ch), w, h, flip.do))
    assert len(ours) > 900
    def scale(box, w, h): return (box[2]-box[0])*(box[3]-box[1])/(w*h)
    def aspect(box, w, h): return (box[2]-box[0])/(box[3]-box[1])
    def x(box, w, h): return box[0]/max(1, w-box[2]+box[0])
    def y(box, w, h): return box[1]/max(1, h-box[3]+box[1])
    for f in (scale, aspect, x, y): assert ks_2samp(*([f(*o[:3]) for o in part] for part in (ours, seen))).pvalue > .01, f.__name__
    assert abs(np.mean([o[3] for o in ours]) - .5) < .06
    assert ks_2samp([scale(*o[:3])**2 for o in ours], [scale(*o[:3]) for o in seen]).pvalue < .01  # the test can tell


def noisy(o): return o


class Shown(PILImage):
    @classmethod
    def create(cls, fn, **kwargs): return super().create(fn, **kwargs)


REFUSED = dict(transform=(lambda f: loaders(f, [Resize(32), Blur()]), 'Blur has to see each image'), subclass=(lambda f: loaders(f, Odd(32)), 'Odd has to see'),
               no_resize=(lambda f: block(None).dataloaders(f, bs=1, num_workers=0, device='cpu'), 'keep sizes of their own'),
               mask=(lambda f: loaders(f, blocks=(ImageBlock, MaskBlock), get_y=noisy), 'AddMaskCodes has to see|PILMask, which has to be|has 2 images'),
               points=(lambda f: loaders(f, blocks=(ImageBlock, PointBlock), get_y=lambda o: [[1., 1.]]), 'PointScaler has to see|TensorPoint, which has to be cropped'), two_images=(lambda f: loaders(f, blocks=(ImageBlock, ImageBlock), get_y=noisy), 'has 2 images'),
               own_image=(lambda f: loaders(f, blocks=(ImageBlock(Shown), CategoryBlock)), 'has no images that PILImage.create opens'),
               loader=(lambda f: DataLoaders(WeightedDL(loaders(f).train_ds, wgts=[1]*26, bs=5, num_workers=0, after_item=[Resize(32), ToTensor()])), 'a WeightedDL, which makes its batches'),
               own_method=(lambda f: DataLoaders(loaders(f).train.new(create_batch=noisy)), 'given a create_batch'), before_batch=(lambda f: DataLoaders(loaders(f).train.new(before_batch=[noisy])), 'noisy has to see'),
               not_datasets=(lambda f: DataLoaders(TfmdDL(list(range(9)), bs=3, num_workers=0)), 'a list, not from a Datasets'))


@pytest.mark.parametrize('kind', REFUSED)
def test_what_cannot_be_made_fast_says_why(folder, kind):
    make, why = REFUSED[kind]
    with pytest.raises(UserError, match=f'the training data cannot be drawn by threads: .*({why})') as e: fast_images(make(folder))
    assert one_line(e)


def test_fast_images_can_be_called_twice(folder):
    dls = loaders(folder)
    one = fast_images(dls, threads=2)
    two = fast_images(one, threads=1, exact=True)
    assert two.train.threads == 1 and two.train.exact and not why_not_fast(two.train) and 'exact' in two.fast
    assert [y.tolist() for _, y in one.train] == [y.tolist() for _, y in two.train]


def test_learner(folder, monkeypatch):
    import fastbench.all  # noqa: F401
    dls = loaders(folder)
    learn = Learner(dls, torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3)), loss_func=torch.nn.CrossEntropyLoss())
    assert learn.fast_images(threads=2) is learn and isinstance(learn.dls.train, PoolDL)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        assert len(learn.predict(get_image_files(folder)[0])[2]) == 3
        learn.export(folder/'x.pkl')
    loaded = load_learner(folder/'x.pkl')
    test = loaded.dls.test_dl(get_image_files(folder)[:4])
    assert isinstance(test, PoolDL) and test.parts is not None and not why_not_fast(test)  # still by threads
    with pytest.raises(UserError, match="did you mean 'simplejpeg'"): learn.fast_images(decoder='simplejpg')


@pytest.mark.parametrize('kwargs', [dict(prefetch=-1), dict(prefetch='x'), dict(prefetch=0, processes=1), dict(item_timeout='x'), dict(item_timeout=-1), dict(item_timeout=float('nan'))], ids=str)
def test_an_argument_that_cannot_be_is_named(folder, kwargs):
    name, v = next(iter(kwargs.items()))
    with pytest.raises(UserError, match=f'{name}={v!r} cannot be: ') as e: fast_images(loaders(folder), **kwargs)
    assert one_line(e)


def test_what_is_no_dataloaders_is_named(folder):
    dls = loaders(folder)
    for o, match in ((Learner(dls, torch.nn.Linear(1, 1), loss_func=CrossEntropyLossFlat()), r'learn.fast_images\(\)'), (dls.train, 'a TfmdDL.*DataLoaders'), (str(folder), 'a str')):
        with pytest.raises(UserError, match=match) as e: fast_images(o)
        assert one_line(e)


def test_the_method_takes_what_the_function_takes(folder):
    learn = Learner(loaders(folder), torch.nn.Linear(1, 1), loss_func=CrossEntropyLossFlat()).fast_images(3, 'pillow')
    assert (learn.dls.train.threads, learn.dls.train.decoder) == (3, 'pillow')


def test_targets_that_are_transforms_of_their_own(folder):
    class Twice(Transform):
        def encodes(self, o): return o*2
    dls = from_table(folder, (ImageBlock, RegressionBlock), [Pipeline([ColReader('age'), Twice()])])
    assert same([b[1:] for b in dls.valid], [b[1:] for b in fast_images(dls, threads=2).valid])


# A recipe

def test_a_recipe_with_threads(folder):
    from fastbench.recipe import but, get_recipe
    recipe = get_recipe('photos-xresnet18', data=str(folder), size=32, bs=5, valid=.3, min_scale=.35, flip=.5, loader='threads', workers=2, decoder='pillow-scaled')
    old, new = (r.make_dls(r.bs, 'cpu') for r in (get_recipe('photos-xresnet18', data=str(folder), size=32, bs=5, valid=.3, min_scale=.35, flip=.5, workers=0), recipe))
    assert type(new.train) is PoolDL and {k: new.info[k] for k in ('workers', 'threads', 'decoder')} == dict(workers=0, threads=2, decoder='pillow-scaled')
    for (x, y), (xf, yf) in zip(old.train, new.train): assert y.equal(yf) and (x - xf).abs().mean()*255*.225 < 5
    again, apart = (but(recipe, loader=o).make_dls(recipe.bs, 'cpu') for o in ('threads', 'process'))
    assert apart.train.fake_l.num_workers == apart.info['workers'] == 1 and apart.info['threads'] == 2 and same(list(again.train), list(apart.train))
    for bad, why in ((dict(loader='threads', augment='batch'), "loader='threads' has no effect in this recipe: it goes with augment='auto'"), (dict(decoder='pillow'), "goes with loader='threads'")):
        with pytest.raises(UserError, match=why): get_recipe('digits-xresnet18', **bad).check()
    with pytest.raises(UserError, match='ArrayDL, which makes its batches'): get_recipe('digits-xresnet18', loader='threads').make_dls(64, 'cpu')


@pytest.mark.parametrize('size,tfm', [((1, 1), Resize((24, 40))), ((1, 90), Resize((24, 40))), ((90, 1), Resize((40, 31))), ((2, 40), RandomResizedCrop(32))])
@pytest.mark.parametrize('decoder', ['pillow', 'pillow-scaled'])
def test_a_crop_of_no_pixels_is_fastais(tmp_path, size, tfm, decoder):
    "In pictures of a pixel or two fastai's rounding leaves none, and Pillow makes black of it"
    rng = np.random.default_rng(0)
    for i in range(8):
        for fmt in 'png', 'jpg': Image.fromarray(rng.integers(0, 255, (*size[::-1], 3), dtype='uint8')).save(tmp_path/f'{i}.{fmt}')
    files = sorted(tmp_path.glob('*.*'))
    dls = ImageDataLoaders.from_lists(tmp_path, files*2, [0]*32, valid_pct=.5, seed=1, item_tfms=tfm, bs=4, num_workers=0, device='cpu')
    fast = fast_images(dls, threads=1, decoder=decoder)
    for a, b in zip(dls.valid, fast.valid): assert (a[0]-b[0]).abs().max() <= 3/255
    for _ in range(5): assert len(list(fast.train)) == 4


@pytest.mark.parametrize('make', [lambda f: Resize(32, before_call=f), lambda f: RandomResizedCrop(32, before_call=f)])
def test_a_before_call_of_ones_own_is_named(folder, make):
    def mine(b, split_idx=None): tfm.pcts, tfm.cp_size, tfm.tl, tfm.orig_sz, tfm.final_size = (0, 0), (9, 9), (0, 0), b[0].size, (32, 32)
    tfm = make(mine)
    dls = ImageDataLoaders.from_folder(folder, valid_pct=.2, seed=1, item_tfms=tfm, bs=2, num_workers=0, device='cpu')
    with pytest.raises(UserError, match='before_call of its own') as e: fast_images(dls)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('harm', [lambda f: f.write_bytes(b''), lambda f: f.unlink(), lambda f: (f.unlink(), f.mkdir())], ids=['empty', 'gone', 'folder'])
def test_the_file_in_a_row_of_a_table_is_named(folder, tmp_path, harm):
    "And not the number of its row in the part that it is in"
    import pandas as pd
    files = [shutil.copy(o, tmp_path/f'{i}.jpg') for i, o in enumerate(sorted(folder.rglob('*.jpg'))[:8])]
    df = pd.DataFrame(dict(name=[o.name for o in map(Path, files)], label='x'))
    dls = ImageDataLoaders.from_df(df, tmp_path, valid_pct=.25, seed=1, item_tfms=Resize(32), bs=2, num_workers=0, device='cpu')
    bad = tmp_path/dls.train.items['name'].iloc[3]
    harm(bad)
    with pytest.raises(CorruptImage, match=f'cannot read the image {bad}:') as e: list(fast_images(dls, threads=1).train)
    assert '\n' not in str(e.value)
    with pytest.raises(UserError, match=str(bad)): cached(dls, tmp_path/'c', workers=0)
    assert item_name(dls.train.dataset, 3) == str(bad)  # as for an item that hangs

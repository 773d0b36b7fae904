"Sources and loaders: what is given, what is refused, what stays the same"
import hashlib, io, random, subprocess, sys, tarfile, warnings

import numpy as np
import pytest
import torch
from fastai.torch_core import TensorImage
from PIL import Image
from scipy.stats import kstest

from fastbench.machine import download
from fastbench.machine.download import DataUnavailable
from fastbench.errors import UserError
from fastbench.vision import sources as vs
from fastbench.draw.decode import CorruptImage
from fastbench.vision.data import BatchResize, vision_dls
from fastbench.vision.sources import draw_photo, find_source, load_source, make_photos, shapes, sources, split_each


@pytest.fixture
def home(tmp_path, monkeypatch):
    "An empty cache, and no archive of fastai's"
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'home'))
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path/'fastai'))
    return tmp_path/'home'


@pytest.fixture
def small_photos(home, monkeypatch):
    "photos of 60 images in the empty cache"
    monkeypatch.setattr(vs, 'make_photos', lambda folder: make_photos(folder, 40, 20))
    return home/'data/photos-1'


def make_set(folder, classes=('a', 'b'), n=6, parts=('train', 'val'), ext='jpg', deep=''):
    rng = np.random.default_rng(0)
    for part in parts:
        for c in classes:
            for i in range(n):
                fn = folder/part/(deep and f'{deep}{c}')/c/f'{i}.{ext}'
                fn.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype='uint8')).save(fn)
    return folder


def one_line(e): assert '\n' not in str(e.value), str(e.value); return str(e.value)


# --- sources

def test_every_source_says_what_it_is():
    for o in sources.values():
        assert o.version and len(o.origin) > 30 and len(o.stats[0]) == len(o.stats[1]) in (1, 3) and o.n_classes in (10, 100)
        assert o.fallback in ('photos', 'digits') and bool(o.url) == (o.name not in ('photos', 'digits'))
    assert not sources['photos'].real and all(o.real for n,o in sources.items() if n != 'photos')


@pytest.mark.parametrize('name', [o for o in sources if sources[o].url])
def test_fastai_knows_size_and_hash_of_each(name):
    url,size,md5 = download.archive_of(sources[name].url)
    assert url.startswith('https://') and size > 1e7 and len(md5) == 32


def test_digits_split_is_stratified_seeded_and_disjoint():
    a,b,c = (load_source('digits', seed=o) for o in (1, 1, 2))
    key = lambda s: [(o.x.tobytes(), o.y) for o in s.valid]
    assert key(a) == key(b) != key(c)
    assert len(a.train)+len(a.valid) == 1797 and 355 < len(a.valid) < 365
    n = np.bincount([o.y for o in a.valid])
    assert n.min() >= 34 and n.max() <= 38
    assert a.info['fingerprint'] == c.info['fingerprint'] # the data is the same, its split is not
    assert max(o.x.max() for o in a.train) == 255


def test_split_each():
    assert split_each([0]*10+[1]*5, .2, 0) == split_each([0]*10+[1]*5, .2, 0)
    picked = split_each([0]*10+[1], .2, 3)
    assert len([o for o in picked if o < 10]) == 2 and 10 in picked


def test_photos_are_made_once_whole_and_the_same(small_photos, tmp_path, capsys):
    a = load_source('photos')
    assert 'once' in capsys.readouterr().err and len(a.train) == 40 and len(a.valid) == 20
    when = small_photos.stat().st_mtime_ns
    b = load_source('photos')
    assert capsys.readouterr().err == '' and small_photos.stat().st_mtime_ns == when and a.info == b.info
    assert a.info['synthetic'] and not a.info['real'] and a.info['fingerprint']
    make_photos(tmp_path/'again', 40, 20)
    assert [(tmp_path/'again'/o.x.relative_to(small_photos)).read_bytes() for o in a.train] == [o.x.read_bytes() for o in a.train]


@pytest.mark.parametrize('harm', ['remove', 'cut', 'manifest'])
def test_a_harmed_photos_folder_is_made_anew(small_photos, harm):
    fn = load_source('photos').train[3].x
    whole = fn.read_bytes()
    if harm == 'remove': fn.unlink()
    elif harm == 'cut': fn.write_bytes(whole[:100])
    else: (small_photos/'manifest.json').write_text('{"files"')
    assert load_source('photos').train[3].x.read_bytes() == whole
    assert [o.name for o in small_photos.parent.iterdir() if o.is_dir()] == ['photos-1']


def test_photos_by_two_processes_at_once(home):
    code = ('from fastbench.vision import sources as s; m = s.make_photos; s.make_photos = lambda f: m(f, 60, 20); '
            'print(len(s.load_source("photos").train))')
    ps = [subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in ps] == ['60', '60']
    assert [o.name for o in (home/'data').iterdir() if o.is_dir()] == ['photos-1']


@pytest.fixture(scope='module')
def drawn():
    from sklearn.datasets import load_sample_images
    photos = [Image.fromarray(o) for o in load_sample_images().images]
    kinds = list(shapes)
    return [(draw_photo(photos, kinds[i%10], np.random.default_rng([7, i])), i%10) for i in range(300)]


def test_photos_look_like_files_of_real_size(drawn):
    sizes = []
    for im,_ in drawn:
        assert min(im.size) == 320 and max(im.size) <= 480 and im.mode == 'RGB'
        f = io.BytesIO(); im.save(f, 'JPEG', quality=82); sizes.append(f.tell()/1024)
    assert 20 < np.mean(sizes) < 30


def test_no_pixel_gives_the_class_away(drawn):
    "The nearest mean of one pixel's colour, for pixels all over the image, stays far below what a network reaches"
    x = np.stack([np.asarray(im.resize((8, 8), Image.Resampling.NEAREST)) for im,_ in drawn]).astype(float)
    y = np.array([o for _,o in drawn])
    best = 0
    for r in range(8):
        for c in range(8):
            p = x[:,r,c]
            means = np.stack([p[:200][y[:200] == k].mean(0) for k in range(10)])
            best = max(best, (((p[200:,None]-means)**2).sum(-1).argmin(1) == y[200:]).mean())
    assert best < .4


def test_imagenette_is_chosen_by_size():
    assert [find_source('imagenette', o).name for o in (None, 64, 224, 225, 512)] == ['imagenette-320']*3+['imagenette-full']*2
    assert find_source('imagenette-160', 512).name == 'imagenette-160' and find_source('auto:cifar100').name == 'cifar100'


@pytest.mark.parametrize('name', ['imagenette', 'imagenette-160', 'cifar10', 'cifar100'])
def test_a_named_set_that_cannot_be_had_is_an_error_that_helps(home, name):
    with pytest.raises(DataUnavailable) as e: load_source(name, offline=True)
    msg = one_line(e)
    assert 'offline' in msg and "works without a download" in msg and str(home/'data'/find_source(name).name) in msg
    assert not home.exists() or not any(o.is_dir() for o in home.rglob('*'))


@pytest.mark.parametrize('name,instead', [('auto', 'photos'), ('auto:cifar10', 'digits')])
def test_auto_says_what_it_took_instead(small_photos, name, instead):
    with pytest.warns(UserWarning, match=f'using {instead!r} in place of') as said: got = load_source(name, offline=True)
    said = [o for o in said if o.category is UserWarning]  # others may come with the garbage of earlier tests
    assert len(said) == 1 and got.info['name'] == instead and got.info['asked'] == name and got.info['fallback'] == find_source(name).name
    assert got.info['synthetic'] == (instead == 'photos')


@pytest.mark.parametrize('name,classes,parts,deep', [
    ('imagenette-320', [f'n{i}' for i in range(10)], ('train', 'val'), ''),
    ('cifar100', [f'c{i}' for i in range(100)], ('train', 'test'), 'super_')])
def test_a_folder_put_there_by_hand_serves(home, name, classes, parts, deep):
    make_set(home/'data'/name, classes, 1, parts, 'png', deep)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        got = load_source('auto:'+name, offline=True)
    assert all(got.classes[o.y] == o.x.parent.name for o in got.train+got.valid)
    assert got.info['name'] == name and got.info['fallback'] is None and len(got.classes) == len(classes) == len(got.train) == len(got.valid)


def test_a_folder_that_is_another_set_is_refused(home):
    make_set(home/'data/cifar10', ('a', 'b'), 1, ('train', 'test'))
    with pytest.raises(DataUnavailable, match='10 classes expected'): load_source('cifar10', offline=True)
    make_set(home/'data/imagenette-160', list('abcdefghij'), 1, ('train',))
    with pytest.raises(DataUnavailable, match='0 in val'): load_source('imagenette-160', offline=True)


def test_an_archive_is_fetched_checked_and_unpacked(home, tmp_path, monkeypatch):
    make_set(tmp_path/'cifar10', list('abcdefghij'), 2, ('train', 'test'), 'png')
    with tarfile.open(tmp_path/'cifar10.tgz', 'w:gz') as t: t.add(tmp_path/'cifar10', 'cifar10')
    raw = (tmp_path/'cifar10.tgz').read_bytes()
    known = ((tmp_path/'cifar10.tgz').as_uri(), len(raw), hashlib.md5(raw[:1<<20]).hexdigest())
    monkeypatch.setattr(download, 'archive_of', lambda name: known)
    got = load_source('cifar10')
    assert len(got.train) == len(got.valid) == 20 and got.classes == list('abcdefghij')
    (tmp_path/'cifar10.tgz').unlink() # from now on only what was kept counts
    assert len(load_source('cifar10', offline=True).train) == 20


def test_an_archive_that_fastai_downloaded_serves_offline(home, tmp_path, monkeypatch):
    make_set(tmp_path/'cifar10', list('abcdefghij'), 1, ('train', 'test'), 'png')
    (tmp_path/'fastai/archive').mkdir(parents=True)
    with tarfile.open(tmp_path/'fastai/archive/cifar10.tgz', 'w:gz') as t: t.add(tmp_path/'cifar10', 'cifar10')
    raw = (tmp_path/'fastai/archive/cifar10.tgz').read_bytes()
    monkeypatch.setattr(download, 'archive_of', lambda name: ('https://x.invalid/cifar10.tgz', len(raw), hashlib.md5(raw).hexdigest()))
    assert len(load_source('cifar10', offline=True).train) == 10


def test_an_altered_archive_of_the_right_size_is_refused(home, tmp_path, monkeypatch):
    (home/'archive').mkdir(parents=True)
    (home/'archive/cifar10.tgz').write_bytes(b'x'*1000)
    monkeypatch.setattr(download, 'archive_of', lambda name: ('https://x.invalid/cifar10.tgz', 1000, '0'*32))
    with pytest.raises(DataUnavailable, match='is not the published file: its md5'): load_source('cifar10', offline=True)
    assert not (home/'data').exists()


# --- loaders

KEYS = 'name version asked fallback synthetic real seed n_train n_valid n_classes sample size channels workers min_scale flip fingerprint'.split()

def test_info_is_complete_and_plain(small_photos):
    import json
    for data in 'digits', 'photos':
        info = vision_dls(data, bs=8, workers=0, device='cpu').info
        assert set(KEYS) <= set(info) and json.loads(json.dumps(info)) == info
    assert info['size'] == 320 and vision_dls('photos', bs=8, size=64, workers=0, device='cpu').info['size'] == 64


@pytest.mark.parametrize('size', [None, 8, 32, 33])
def test_digits_sizes(size):
    dls = vision_dls('digits', size=size, device='cpu')
    for dl in dls.loaders: assert next(iter(dl))[0].shape == (64, 1, size or 8, size or 8)
    assert len(dls.train) == 1438//64 and sum(len(y) for _,y in dls.valid) == 359 and dls.train.fake_l.num_workers == 0


def test_digits_batches_hold_the_right_labels():
    "By pixels: each image of an epoch is one of the set, with the set's label"
    dls,known = vision_dls('digits', device='cpu'),{o.x.tobytes(): o.y for o in load_source('digits').train+load_source('digits').valid}
    for dl,n in (dls.train, 22*64), (dls.valid, 359):
        seen = 0
        for x,y in dl:
            px = (dl.after_batch.fs[-1].decodes(x)*255).round().byte()
            for a,b in zip(px, y): assert known[np.asarray(a[0]).tobytes()] == int(b)
            seen += len(y)
        assert seen == n


def test_digits_with_workers_and_without_are_the_same():
    a,b = ([(x.clone(), y.clone()) for x,y in vision_dls('digits', bs=200, workers=w, device='cpu', flip=.5, min_scale=.5).train] for w in (0, 2))
    assert len(a) == len(b) == 7 and all(p[0].equal(q[0]) and p[1].equal(q[1]) for p,q in zip(a, b))


def test_digits_crop_and_flip_only_where_asked_and_only_in_training():
    plain,flipped = (vision_dls('digits', device='cpu', flip=f).train.one_batch()[0] for f in (None, 1.))
    assert plain.flip(-1).allclose(flipped) and not plain.equal(flipped)
    a,b = (next(iter(vision_dls('digits', size=16, device='cpu', flip=f, min_scale=s).valid))[0] for f,s in ((None, None), (1., .3)))
    assert a.equal(b)


def test_each_image_of_a_batch_has_its_own_crop():
    x = TensorImage(torch.rand(1, 3, 40, 60)).repeat(300, 1, 1, 1)
    t = BatchResize(32, min_scale=.25, flip=.5, seed=0)
    y = t(x, split_idx=0)
    assert y.shape == (300, 3, 32, 32) and len({o.numpy().tobytes() for o in y}) > 200 and .4 < t.mirror.mean() < .6
    top, left, h, w = t.boxes.T
    assert abs(h/40 - w/60).max() < .03 and (top+h <= 40).all() and (left+w <= 60).all()  # in the shape of the image, within it
    assert kstest(h*w/2400, 'uniform', args=(.25, .75)).pvalue > .001
    t.reseed(5); whole = t(x, split_idx=0)
    t.next_items([7, 3])
    assert torch.allclose(t(x[:2], split_idx=0), whole[[7, 3]])
    assert (t(x, split_idx=1) == t(x, split_idx=1)[0]).all()


def epoch(**kwargs): return [(x.clone(), y.clone()) for x,y in vision_dls('photos', size=32, bs=8, device='cpu', **kwargs).train]

def same(a, b): return len(a) == len(b) and all(p[0].equal(q[0]) and p[1].equal(q[1]) for p,q in zip(a, b))

def test_the_seed_alone_decides(small_photos):
    a = epoch(workers=0)
    random.seed(99); torch.manual_seed(99); np.random.seed(99)
    assert same(a, epoch(workers=0))
    assert same(a, epoch(workers=2)), 'augmentation depends on the workers'
    assert not same(a, epoch(workers=0, seed=43))


def test_epochs_differ_and_global_random_numbers_are_left_alone(small_photos):
    dls = vision_dls('photos', size=32, bs=8, workers=0, device='cpu')
    it = iter(dls.train)
    random.seed(5); want = random.random(); random.seed(5)
    next(it)
    random.seed(5); next(it)
    assert random.random() == want
    assert not same([dls.train.one_batch()], [dls.train.one_batch()])


def test_validation_is_the_same_twice_and_whole(small_photos):
    dls = vision_dls('photos', size=32, bs=8, workers=0, device='cpu')
    a,b = ([(x.clone(), y) for x,y in dls.valid] for _ in range(2))
    assert same(a, b) and sum(len(y) for _,y in a) == 20


def test_augmentation_really_happens(small_photos):
    "One image, drawn in 20 epochs: crops differ; without crops it is as it is, or mirrored"
    dls = vision_dls('photos', size=32, bs=8, workers=0, device='cpu')
    i = next(i for i,o in enumerate(dls.train_ds.items) if len(set(Image.open(o.x).size)) == 1)
    def draw(epoch_key): dls.train.epoch_key = epoch_key; dls.train.before_iter(); return dls.train.do_item(i)[0]
    assert len({draw(o).numpy().tobytes() for o in range(20)}) == 20
    assert draw(3).equal(draw(3))
    dls = vision_dls('photos', size=32, bs=8, workers=0, device='cpu', min_scale=1., flip=.5)
    both = {draw(o).numpy().tobytes(): draw(o) for o in range(20)}
    a,b = both.values()
    assert a.flip(-1).equal(b)


def test_prefetch_reaches_pytorch(small_photos):
    dls = vision_dls('photos', size=32, bs=8, workers=1, prefetch=5, device='cpu')
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
    assert _MultiProcessingDataLoaderIter(dls.train.fake_l)._prefetch_factor == 5
    assert [o.fake_l.prefetch_factor for o in (*dls.loaders, dls.train.new(shuffle=False))] == [5]*3


@pytest.mark.parametrize('sample', [.1, .5])
def test_sample_is_stratified_and_seeded(sample):
    a,b = (vision_dls('digits', sample=sample, bs=8, device='cpu') for _ in range(2))
    assert abs(a.info['n_train']-1438*sample) < 6 and abs(a.info['n_valid']-359*sample) < 6 and len(a.vocab) == 10
    full = load_source('digits')
    for dl,items in (a.train, full.train), (a.valid, full.valid):
        have,of = (np.bincount([o.y for o in it], minlength=10) for it in (dl.dataset.items, items))
        assert (abs(have-of*sample) <= .5).all()
    assert next(iter(a.train))[0].equal(next(iter(b.train))[0])


@pytest.mark.parametrize('harm', ['cut', 'empty', 'text', 'gone'])
@pytest.mark.parametrize('workers', [0, 1])
def test_a_broken_image_names_its_file_in_one_line(small_photos, harm, workers):
    dls = vision_dls('photos', size=32, bs=8, workers=workers, device='cpu')
    fn = dls.train_ds.items[7].x
    if harm == 'gone': fn.unlink()
    else: fn.write_bytes({'cut': fn.read_bytes()[:2000], 'empty': b'', 'text': b'not an image'}[harm])
    with pytest.raises(CorruptImage) as e:
        for _ in dls.train: pass
    msg = one_line(e)
    assert str(fn) in msg and 'Restore or remove' in msg and 'Traceback' not in msg


@pytest.mark.parametrize('kwargs,says', [
    (dict(data='photo'), "unknown data source 'photo'; did you mean 'photos'?"), (dict(data=3), 'unknown data source 3'),
    (dict(size=0), 'size=0 cannot be'), (dict(size=1.5), 'size=1.5'), (dict(size=True), 'size=True'), (dict(bs=0), 'bs=0'), (dict(bs=None), 'bs=None'),
    (dict(bs='largest'), "bs='largest' cannot be"), (dict(bs=2000), 'less than a batch'), (dict(sample=0), 'sample=0'), (dict(sample=1.01), 'sample=1.01'), (dict(sample='a'), "sample='a'"),
    (dict(sample=float('nan')), 'sample=nan'), (dict(workers=-1), 'workers=-1'), (dict(prefetch=0), 'prefetch=0'), (dict(seed=-1), 'seed=-1'),
    (dict(min_scale=0), 'min_scale=0'), (dict(flip=2), 'flip=2')])
def test_mistakes_are_one_line(kwargs, says):
    with pytest.raises(UserError) as e: vision_dls(**kwargs)
    assert says in one_line(e)


def test_a_set_of_files_at_its_native_size(home):
    make_set(home/'data/cifar10', list('abcdefghij'), 3, ('train', 'test'), 'png')
    dls = vision_dls('cifar10', bs=6, workers=0, device='cpu', offline=True)
    assert dls.info['size'] == 32 and dls.info['min_scale'] == 1. and dls.one_batch()[0].shape == (6, 3, 32, 32)


def test_predict_test_dl_and_show(small_photos):
    from fastbench.vision.learner import xresnet_learner
    for data,raw in ('digits', np.zeros((8, 8), 'uint8')), ('photos', None):
        dls = vision_dls(data, size=32, bs=8, workers=0, device='cpu')
        learn = xresnet_learner(dls)
        raw = load_source('photos').valid[0].x if raw is None else raw
        with learn.no_bar():
            assert learn.predict(raw)[0] in dls.vocab
            preds,_ = learn.get_preds(dl=dls.test_dl([raw, raw]))
            assert preds.shape == (2, 10) and preds[0].allclose(preds[1])
            whole,targs = learn.get_preds(ds_idx=0)
        assert len(whole) == len(targs) == dls.info['n_train']


def test_a_picture_in_colours_is_predicted_from_in_grey():
    from fastbench.vision.learner import xresnet_learner
    learn = xresnet_learner(vision_dls('digits', size=8, bs=8, workers=0, device='cpu'))
    grey = np.random.default_rng(0).integers(0, 255, (8, 8), 'uint8')
    with learn.no_bar(): one,*others = [learn.predict(o)[2] for o in (grey, np.stack([grey]*3, -1), Image.fromarray(np.stack([grey]*3, -1)))]
    for o in others: torch.testing.assert_close(o, one)


def test_a_digit_alone_is_a_digit_in_a_batch():
    dls = vision_dls('digits', size=16, device='cpu')
    x = next(iter(dls.valid))[0]
    alone = next(iter(dls.test_dl([o.x for o in load_source('digits').valid[:64]])))[0]
    assert x.allclose(alone, atol=1e-5)


def test_the_statistics_of_a_source_are_those_of_its_images(small_photos):
    for data,kwargs in ('digits', {}), ('photos', dict(size=64, min_scale=1., flip=0.)):
        x = torch.cat([x for x,_ in vision_dls(data, bs=20, workers=0, device='cpu', **kwargs).train])
        assert x.mean((0,2,3)).abs().max() < .2 and (x.std((0,2,3))-1).abs().max() < .15, data


def test_the_folder_of_a_source_is_one_that_fastai_reads(small_photos, monkeypatch, tmp_path):
    from fastai.vision.all import ImageDataLoaders
    from fastbench.all import source_folder
    folder = source_folder('photos')
    assert folder == small_photos and len(ImageDataLoaders.from_folder(folder, valid_pct=.2, num_workers=0).vocab) == 10
    for name, why in (('digits', 'digits is an array.*photos'), ('photo', "unknown data source 'photo'"), (str(tmp_path), 'is a path already')):
        with pytest.raises(UserError, match=why) as e: source_folder(name)
        assert '\n' not in str(e.value)
    with pytest.raises(DataUnavailable): source_folder('cifar10', offline=True)

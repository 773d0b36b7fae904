"fastai's documented examples, each wrapped in one function and otherwise as they are; the data are made up, as nothing is downloaded."
from tempfile import mkdtemp

from fastai.collab import *
from fastai.tabular.all import *
from fastai.text.all import *
from fastai.vision.all import *
from fastai.vision.gan import *


def _pictures(n=40, size=32):
    path = Path(mkdtemp())
    for i in range(n):
        label = ('cat', 'dog')[i % 2]
        pixels = np.full((size, size, 3), 60 + 120*(i % 2), dtype='uint8')
        PILImage.create(pixels).save(path/f'{label}_{i}.png')
        PILMask.create((np.arange(size)[:, None] + np.zeros(size) > size/2).astype('uint8')).save(path/f'mask_{i}.bmp')
    return path


def pets(bs=8, arch=resnet18):
    path = _pictures()
    dls = ImageDataLoaders.from_name_func(path, [o for o in get_image_files(path) if 'mask' not in o.name], valid_pct=.2, seed=42,
                                          label_func=lambda o: o.split('_')[0], item_tfms=Resize(32), bs=bs, num_workers=0)
    learn = vision_learner(dls, arch, metrics=error_rate, pretrained=False)
    return learn, lambda learn: learn.fine_tune(1)


def multi_label(bs=8):
    path = _pictures()
    names = [o.name for o in get_image_files(path) if 'mask' not in o.name]
    df = pd.DataFrame(dict(fname=names, labels=[o.split('_')[0] + ' animal' for o in names]))
    dls = ImageDataLoaders.from_df(df, path, label_delim=' ', item_tfms=Resize(32), batch_tfms=aug_transforms(size=32), bs=bs, num_workers=0)
    return vision_learner(dls, resnet18, metrics=partial(accuracy_multi, thresh=.5), pretrained=False)


def segmentation(bs=4):
    path = _pictures(20)
    fnames = [o for o in get_image_files(path) if 'mask' not in o.name]
    dls = SegmentationDataLoaders.from_label_func(path, bs=bs, fnames=fnames, codes=np.array(['sky', 'ground']), num_workers=0,
                                                  label_func=lambda o: o.parent/f"mask_{o.stem.split('_')[1]}.bmp")
    return unet_learner(dls, resnet18, pretrained=False)


def tabular(bs=32, layers=(20, 10), lr=1e-2):
    df = pd.DataFrame(dict(age=np.arange(200) % 70, work=['private', 'state']*100, salary=(np.arange(200) % 70 > 35).astype(str)))
    dls = TabularDataLoaders.from_df(df, y_names='salary', cat_names=['work'], cont_names=['age'], procs=[Categorify, FillMissing, Normalize], bs=bs)
    return tabular_learner(dls, layers=list(layers), metrics=accuracy, lr=lr)


def collaborative(bs=16):
    df = pd.DataFrame(dict(user=np.arange(200) % 20, item=np.arange(200) % 13, rating=1 + np.arange(200) % 5))
    return collab_learner(CollabDataLoaders.from_df(df, bs=bs, num_workers=0), n_factors=5, y_range=(.5, 5.5))


def ulmfit(bs=8):
    df = pd.DataFrame(dict(text=['a fine film that I liked', 'a bad film, and far too long']*30, label=['pos', 'neg']*30))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', bs=bs, num_workers=0, n_workers=0)
    learn = text_classifier_learner(dls, AWD_LSTM, pretrained=False, drop_mult=.5, metrics=accuracy, config={**awd_lstm_clas_config, 'emb_sz': 20, 'n_hid': 24})
    return learn, lambda learn: (learn.freeze(), learn.fit_one_cycle(1, 2e-2), learn.unfreeze(), learn.fit_one_cycle(1, 1e-3))


def gan(bs=8):
    path = _pictures(24)
    block = DataBlock(blocks=(TransformBlock, ImageBlock), get_x=generate_noise, get_items=get_image_files,
                      splitter=IndexSplitter([]), item_tfms=Resize(32), batch_tfms=Normalize.from_stats(tensor([.5]*3), tensor([.5]*3)))
    dls = block.dataloaders(path, path=path, bs=bs, num_workers=0)
    learn = GANLearner.wgan(dls, basic_generator(32, n_channels=3, n_extra_layers=0), basic_critic(32, n_channels=3, n_extra_layers=0), opt_func=RMSProp)
    learn.recorder.train_metrics, learn.recorder.valid_metrics = True, False
    return learn, lambda learn: learn.fit(1, 2e-4, wd=0.)

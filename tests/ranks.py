"What each of two processes does in test_ranks.py: train on every loader, tell which texts it saw, measure and predict; and one process, to compare"
import io, json, random, sys, warnings
from pathlib import Path

import numpy as np
import torch
from fastai.callback.core import Callback, FetchPredsCallback
from fastai.data.core import DataLoaders, Datasets, TfmdDL
from fastai.data.transforms import Categorize, IntToFloatTensor, ToTensor
from fastai.learner import AvgMetric, Metric
from fastai.metrics import F1Score, accuracy, error_rate
from fastai.torch_core import num_distrib, rank_distrib
from fastai.vision.augment import FlipItem, RandomResizedCrop
from fastai.vision.core import PILImage
from fastcore.foundation import L
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset
from transformers import PreTrainedTokenizerFast

from fastbench.draw.batch import batch_augment
from fastbench.draw.cached import cached
from fastbench.draw.loader import PoolDL
from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.qa import QuestionAnswering
from fastbench.text.rnn import rnn_learner
from fastbench.text.words import lm_dls
from fastbench.text.seq2seq import Summarization
from fastbench.text.examples import task_dls
from fastbench.text.tokenize import by_text
from fastbench.text.tokens import TokenClassification
from fastbench.train.learner import BenchLearner
from test_text_data import WORDS

TEXTS = [f'{a} {b}' + f' {b}'*(i % 7) for i, (a, b) in enumerate(zip(WORDS, WORDS[1:]))][:45]  # every text another
TINY = dict(pretrained=False, config=dict(num_hidden_layers=1, hidden_dropout_prob=0., attention_dropout=0.))


class Seen(Callback):
    remove_on_fetch = True
    def __init__(self, tok): self.tok = tok
    def before_fit(self): self.texts, self.valid = [], []
    def before_batch(self):
        x = self.xb[0]
        rows = [[self.tok.decode(o), len(o)] for o in by_text(x, x['input_ids'])] if isinstance(x, dict) else x.tolist()
        (self.texts if self.training else self.valid).append(rows)


def texts(tok, loader, seed=42, task='sequence-classification'):
    rows = [(t, 'ab'[i % 2]) for i, t in enumerate(TEXTS)]
    dls = hf_dls(rows[:35], tok, valid=rows[35:], loader=loader, bs=4, max_tokens=48, max_length=16, seed=seed, workers=0, device='cpu')
    return hf_learner(dls, 'bert-tiny', **TINY, task=task)


def examples(tok, task, rows, loader, valid=slice(35, 45)):
    dls = task_dls(task, rows[:35], rows[valid], tok, bs=4, max_length=16, device='cpu', loader=loader, **({'max_tokens': 48} if loader else {}))
    return hf_learner(dls, 'bert-tiny' if loader else 't5-tiny', task, **(TINY if loader else dict(pretrained=False)))


def unseeded(tok):
    random.seed(rank_distrib())
    learn = texts(tok, 'sorted')
    learn.dls.train.seed, learn.dls.train.rng = None, random.Random(rank_distrib())
    return learn


class Last(Metric):
    "What nobody knows how to add up"
    def accumulate(self, learn): self.value = learn.loss.mean().item()
    value, name = None, 'last'


def numbers():
    "A loader that fastai splits, seven and six to a process: in batches of three, one has a batch less; and batch norm, whose buffers are sent in every forward"
    torch.manual_seed(0)
    train, valid = (TfmdDL(TensorDataset(torch.randn(n, 4), torch.arange(n) % 3), bs=3, device='cpu', do_setup=False, num_workers=0) for n in (12, 13))
    return BenchLearner(DataLoaders(train, valid), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), loss_func=nn.CrossEntropyLoss(),
                        metrics=[accuracy, AvgMetric(error_rate), F1Score(average='macro'), *([Last()] if num_distrib() else [])])


def picture(i):
    "A small image, as the bytes of its file"
    Image.fromarray(np.random.default_rng(i).integers(0, 255, (12, 14, 3), dtype='uint8')).save(f := io.BytesIO(), 'PNG')
    return f.getvalue()


def kind_of(i): return i % 3


def images(folder=None):
    "Images by threads, or in whole batches from a cache that both processes share; no seed, so that each process would draw in its own way"
    random.seed(rank_distrib())
    dsets = Datasets(list(range(45)), [[picture, PILImage.create], [kind_of, Categorize([0, 1, 2])]], splits=[list(range(35)), list(range(35, 45))])
    tfms = dict(after_item=[RandomResizedCrop(8), FlipItem(), ToTensor()], after_batch=[IntToFloatTensor(), *batch_augment(max_lighting=.2)], bs=4, device='cpu', num_workers=0)
    cls = dict(cls=TfmdDL) if folder else dict(cls=PoolDL, threads=2)
    train = cls.pop('cls')(dsets.train, shuffle=True, **tfms, **cls)
    dls = DataLoaders(train, train.new(dsets.valid, shuffle=False))
    if folder: dls = cached(dls, folder/'kept', whole=True, workers=0)
    return BenchLearner(dls, nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), loss_func=nn.CrossEntropyLoss(), metrics=accuracy)


CASES = dict(images=lambda t: images(), kept=lambda t: images(Path(sys.argv[1])), masked=lambda t: texts(t, 'budget', task='masked-lm'), numbers=lambda t: numbers(), random=lambda t: texts(t, 'random'), sorted=lambda t: texts(t, 'sorted'), budget=lambda t: texts(t, 'budget'), packed=lambda t: texts(t, 'packed'), unseeded=unseeded,
             tags=lambda t: examples(t, TokenClassification(['O', 'B-X']), [(o.split(), [['B-X', 'O'][i % 3 > 1] for i in range(len(o.split()))]) for o in TEXTS], 'packed'),
             questions=lambda t: examples(t, QuestionAnswering(), [('ba', o, o.split()[0]) for o in TEXTS], 'budget'),
             examples=lambda t: examples(t, Summarization(max_target=4), [(o, ' '.join(o.split()[:1 + i % 3])) for i, o in enumerate(TEXTS)], None, slice(36, 45)),
             words=lambda t: rnn_learner(lm_dls((TEXTS*2, TEXTS), bs=2 if num_distrib() else 4, bptt=8, device='cpu'), model_args=dict(n_emb=8, n_hid=8)))


AFTER = ('random', 'sorted', 'budget', 'packed')  # measured and predicted when the block is over, by each process for itself
FETCHED = ('numbers', 'sorted')  # predictions in the midst of training, too


class Fails(Callback):
    "A failure in the last process alone"
    def after_pred(self):
        if rank_distrib() or not num_distrib(): raise ValueError('no luck')


def measured(learn):
    "Loss and metrics of all the validation set"
    with learn.no_bar(), learn.no_logging(): return [float(o) for o in learn.validate()]


def predicted(learn):
    "Predictions and targets of all the validation set as lists, and an error in words; of raw texts, too"
    def plain(o): return [plain(p) for p in o] if isinstance(o, (tuple, list, L)) else o.tolist() if hasattr(o, 'tolist') else o
    def get(f):
        try:
            with learn.no_bar(): return plain(f())
        except Exception as e: return f'{type(e).__name__}: {e}'
    raw = [TEXTS[40], TEXTS[3], TEXTS[20]]
    res = dict(preds=get(learn.get_preds), more=get(lambda: learn.get_preds(with_loss=True, with_decoded=True)), shuffled=get(lambda: learn.get_preds(dl=learn.dls.valid.new(shuffle=True))))
    if 'Classification' in type(getattr(learn, 'task', None)).__name__: res |= {k: get(lambda: [o[0] for o in f()]) for k, f in dict(raw=lambda: learn.predict(raw), one=lambda: [learn.predict(raw[0])]).items()}
    res['fails'] = get(lambda: learn.get_preds(cbs=Fails()))
    return res


FSDP = 'masked', 'numbers', 'sorted', 'budget', 'words'  # with weights in parts, too


def together(folder, strategy='ddp', names=tuple(CASES)):
    tok, res = tokenizer(folder), {}
    for name, make in [(k, CASES[k]) for k in names]:
        torch.manual_seed(0)
        learn = make(tok)
        learn.to_distributed(cpu=True, strategy=strategy).add_cb(Seen(tok))
        n, before = len(learn.dls.train), list(learn.dls.loaders)
        learn.recorder.train_metrics = name == 'numbers'
        fetch = FetchPredsCallback(ds_idx=1)
        with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
            warnings.simplefilter('always')
            learn.fit(2 if name == 'numbers' else 1, 1e-3, cbs=fetch if name in FETCHED else None)
        res[name] = dict(n=n, texts=learn.seen.texts, valid=learn.seen.valid, back=before == list(learn.dls.loaders), values=list(learn.recorder.values[-1]),
                         names=list(learn.recorder.metric_names[1:-1]), measured=measured(learn), predicted=predicted(learn), told=[str(o.message) for o in told])
        learn.detach_distributed()
        res[name]['weights'] = torch.cat([p.detach().flatten() for p in learn.model.parameters()]).double().sum().item()
        if name in AFTER: res[name]['after'] = dict(measured=measured(learn), predicted=predicted(learn), drawn=sorted(o for x, *_ in learn.dls.train for o in map(learn.dls.tokenizer.decode, by_text(x, x['input_ids']))))
        if name in FETCHED: res[name]['fetched'] = [o.tolist() for o in fetch.preds]
        if not rank_distrib(): torch.save(learn.model.state_dict(), Path(folder, f'{name}-{strategy}.pth'))
    Path(folder, f'{rank_distrib()}-{strategy}.json').write_text(json.dumps(res))


def alone(folder):
    tok, res = tokenizer(folder), {}
    for name, strategy in [(k, 'ddp') for k in CASES] + [(k, 'fsdp') for k in FSDP]:
        learn = CASES[name](tok)
        learn.model.load_state_dict(torch.load(Path(folder, f'{name}-{strategy}.pth')))
        res[f'{name}-{strategy}'] = dict(measured=measured(learn), predicted=predicted(learn))
    res['drawn'] = {o: drawn(CASES[o](None).dls.train) for o in ('images', 'kept')}
    Path(folder, 'alone.json').write_text(json.dumps(res))


def drawn(dl):
    "What one process draws, in batches as large as those of both together"
    dl.bs *= 2
    return [x.tolist() for x, _ in dl]


def tokenizer(folder): return PreTrainedTokenizerFast.from_pretrained(folder)


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    if not num_distrib(): alone(sys.argv[1])
    else:
        together(sys.argv[1])
        together(sys.argv[1], 'fsdp', FSDP)
        torch.distributed.destroy_process_group()

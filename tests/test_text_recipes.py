"Recipes of texts, from a name to a Run"
import warnings

import pytest
import torch

from fastbench.compare.ladder import LadderTable, ladder_recipes
from fastbench.bench.learner import bench_learner
from fastbench.errors import UserError
from fastbench.ladders import get_ladder
from fastbench.recipe import get_recipe, recipes, suites
from fastbench.bench.processes import Starter
from fastbench.bench.run import run_recipe
from fastbench.callback.amp import native_bf16
from fastbench.runs.store import load

SMALL = dict(device='cpu', offline=True)
TINY = SMALL | dict(sample=.03, epochs=1)


def test_what_is_there():
    assert {'imdb-roberta', 'imdb-distilbert', 'docstrings-distilbert', 'wikitext2-lstm', 'wikitext2-gru', 'wikitext2-rnn'} <= set(recipes())
    assert 'imdb-roberta' in suites()['colab'] and suites()['wikitext'] == ('wikitext2-lstm', 'wikitext2-gru', 'wikitext2-rnn') and 'faster' in suites()
    assert ladder_recipes('faster', data='docstrings')[0].name == 'faster-docstrings'


@pytest.mark.parametrize('kw', [dict(loader='packed'), dict(loader='budget'), dict(loader='padded', attention='values'), dict(opt='fused_adam', precision='bf16'),
                                dict(loader='packed', attention='values', precision='bf16', best=True), dict(arch='roberta-tiny'), dict(arch='gpt2-tiny', loader='packed')],
                         ids=str)
def test_a_run(kw, request):
    if 'precision' in kw: request.getfixturevalue('bf16')
    run = run_recipe('docstrings-distilbert', **TINY, **kw)
    assert run.status == 'ok', run.error
    assert run.data['name'] == 'docstrings' and run.data['loader'] == kw.get('loader', 'sorted') and run.weights == 'random' and 0 <= run.metrics['accuracy'] <= 1
    assert ('padding' in str(run.table)) and run.precision['effective'] == kw.get('precision', 'fp32')


def test_padded_is_padded_and_packed_is_not():
    def batch(loader): return bench_learner('docstrings-distilbert', **TINY, loader=loader).dls.one_batch()[0]
    assert batch('padded')['input_ids'].shape == (16, 128)
    x = batch('packed')
    assert x['cu_seq_lens'][-1] == x['input_ids'].shape[1] and 'attention_mask' not in x


def test_the_best_epoch_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = bench_learner('docstrings-distilbert', **TINY, best=True)
    accuracies = iter([.1, .9, .2])
    learn.metrics = [type('accuracy', (), {'__call__': lambda self, *args: torch.tensor(now[0]), 'name': 'accuracy', '__name__': 'accuracy'})()]
    now, states = [0.], []
    from fastai.callback.core import Callback
    class Set(Callback):
        order = -50
        def before_epoch(self): now[0] = next(accuracies)
        def after_epoch(self): states.append({k: v.clone() for k, v in self.learn.model.state_dict().items()})
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-3, cbs=Set())
    assert all(torch.equal(v, states[1][k]) for k, v in learn.model.state_dict().items()) and not list(tmp_path.iterdir())


def test_the_best_epoch_is_kept_of_epochs_cut_short():
    with_best = TINY | dict(best=True, max_length=32)
    run = run_recipe('docstrings-distilbert', **with_best | dict(epochs=2), batches=2)
    assert run.status == 'ok' and [set(o) for o in run.epochs] == [{'train_loss', 'valid_loss', 'accuracy'}]*2, run.error
    ended = run_recipe('docstrings-distilbert', **with_best, stop=iter([False, True, True]).__next__)  # before there is a best one
    assert ended.status == 'interrupted', ended.error


@pytest.mark.parametrize('rung', ['ddp', 'fsdp'])
def test_the_best_epoch_is_kept_in_several_processes(tmp_path, rung):
    "Each has a folder of its own, and only the first writes"
    fits = {} if native_bf16(torch.device('cpu')) else dict(precision='fp32')
    run = load(Starter()(get_recipe(f'faster-docstrings-{rung}', sample=.03, epochs=1, max_length=32, **fits), tmp_path, device='cpu', offline=True))
    assert run.status == 'ok' and run.processes == (2, rung) and set(run.test) == {'loss', 'accuracy'}, run.error


@pytest.mark.usefixtures('bf16')
def test_a_test_set_is_looked_at_once():
    run = run_recipe('faster-docstrings-fused', **TINY)
    assert run.status == 'ok' and run.data['test'] and set(run.test) == {'loss', 'accuracy'} and run.precision['effective'] == 'bf16'
    row = LadderTable(get_ladder('faster-docstrings'), [run]).rows[0]
    assert row['status'] == 'ok' and row['seconds'] == pytest.approx(run.seconds)
    assert 'packed' in str(run.data) and len(run.epochs) == 1


def test_weights_that_cannot_be_had_are_said(monkeypatch):
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter('always')
        learn = bench_learner('imdb-roberta', **SMALL, data='reviews', sample=.05, arch='roberta-tiny', precision='fp32')
    assert learn.weights == 'random' and any('roberta-tiny starts from random weights, so its accuracy says little' in str(o.message) for o in got)


@pytest.mark.usefixtures('bf16')
def test_a_language_model():
    run = run_recipe('wikitext2-gru', device='cpu', offline=True, data='docstrings', sample=.05, epochs=1, batches=5, precision='bf16')
    assert run.status == 'ok' and run.metrics['perplexity'] > 1 and run.data['bptt'] == 35


@pytest.mark.parametrize('name,kw,says', [
    ('docstrings-distilbert', dict(size=32), 'size=32 has no effect'), ('docstrings-distilbert', dict(channels_last=True), 'channels_last=True has no effect'),
    ('docstrings-distilbert', dict(bptt=10), 'bptt=10 has no effect'), ('docstrings-distilbert', dict(max_tokens=100), 'max_tokens=100 has no effect'),
    ('digits-xresnet18', dict(loader='packed'), "loader='packed' cannot be"), ('digits-xresnet18', dict(attention='values'), "attention='values' has no effect"),
    ('docstrings-lstm', dict(pretrained=True), 'pretrained=True has no effect'), ('docstrings-distilbert', dict(data='wikitext2'), 'wikitext2'),
    ('docstrings-distilbert', dict(data='digits'), "unknown text source 'digits'"), ('docstrings-distilbert', dict(loader='packed', max_tokens=20), 'max_tokens=20 cannot be'),
    ('docstrings-distilbert', dict(arch='deberta'), 'deberta')])
def test_one_line_for_what_cannot_be(name, kw, says):
    with pytest.raises(UserError, match=says) as e:
        learn = bench_learner(name, **TINY | kw)
        next(iter(learn.dls.train))
    assert '\n' not in str(e.value)


def test_the_largest_batch_of_texts():
    learn = bench_learner('docstrings-distilbert', **TINY, bs='largest', memory='8GB')
    assert learn.recipe.bs == learn.largest['bs'] >= 1

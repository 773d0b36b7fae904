"Two processes (gloo, CPU) train together: every loader splits fairly, no text twice, the same weights in the end"
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('accelerate')
from fastai.data.core import DataLoaders
from fastai.distributed import DistributedDL
from fastai.learner import Learner
from torch import nn

from fastbench.errors import UserError
from fastbench.text.loader import TextDL
from fastbench.text.words import BPTTLoader
from ranks import AFTER, FSDP
from started import kept_port, outcome
from test_text_data import WORDS, make_tokenizer

LOADERS = ('random', 'sorted', 'budget', 'packed', 'unseeded', 'tags', 'questions')
IMAGES = ('images', 'kept')
CASES = (*LOADERS, *IMAGES, 'examples', 'words', 'masked', 'numbers')


def by_strategy(names): return [(o, 'ddp') for o in names] + [(o, 'fsdp') for o in names if o in FSDP]


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    folder, here = tmp_path_factory.mktemp('ranks'), Path(__file__).parent
    make_tokenizer().save_pretrained(folder)
    env = os.environ | dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', ACCELERATE_USE_CPU='true',
                            PYTHONPATH=os.pathsep.join([str(here), str(here.parent)]))
    def run(i): return outcome(here/'ranks.py', folder, env=env | dict(RANK=str(i), LOCAL_RANK=str(i), MASTER_PORT=port))
    with kept_port() as port, ThreadPoolExecutor(2) as pool: ended = list(pool.map(run, range(2)))
    assert not any(code for code, _ in ended), '\n'.join(o[-6000:] for _, o in ended)
    code, said = outcome(here/'ranks.py', folder, env={k: v for k, v in env.items() if k != 'WORLD_SIZE'})
    assert not code, said[-6000:]
    def read(name): return json.loads((folder/f'{name}.json').read_text())
    return [{f'{k}-{s}': v for s in ('ddp', 'fsdp') for k, v in read(f'{i}-{s}').items()} for i in (0, 1)] + [read('alone')]


def flat(batches): return sorted(o for b in batches for o, _ in b)


@pytest.mark.parametrize('name,strategy', by_strategy(CASES))
def test_both_take_as_many_steps_and_end_alike(ranks, name, strategy):
    a, b, _ = (o[f'{name}-{strategy}'] for o in ranks)
    assert len(a['texts']) == len(b['texts']) == (-(-a['n']//2)*(1 + (name == 'numbers')) if name in ('examples', 'numbers', *IMAGES) else a['n'])
    assert a['weights'] == pytest.approx(b['weights'], abs=1e-9) and a['back'] and b['back'] and np.isfinite(a['values']).all()


@pytest.mark.parametrize('name,strategy', by_strategy(LOADERS))
def test_no_text_is_drawn_twice_and_none_left_out(ranks, name, strategy):
    a, b, _ = (o[f'{name}-{strategy}'] for o in ranks)
    for part, n in (('texts', 35), ('valid', 10)):
        both = flat(a[part] + b[part])
        assert len(both) == len(set(both)) == n, part
        assert abs(len(flat(a[part])) - len(flat(b[part]))) <= (4 if name in ('random', 'sorted', 'unseeded') else 10)


@pytest.mark.parametrize('name,strategy', by_strategy(CASES))
def test_loss_and_metrics_are_those_of_one_process(ranks, name, strategy):
    a, b, one = (o[f'{name}-{strategy}'] for o in ranks)
    n, at = len(one['measured']), a['names'].index('valid_loss')
    for o in (a, b):
        assert o['values'][at:at+n] == pytest.approx(one['measured'], rel=1e-4)
        assert o['measured'][-len(a['values'][at:]):][:n] == pytest.approx(one['measured'], rel=1e-4)
    known = [i for i, o in enumerate(a['names']) if 'last' not in o]
    assert [a['values'][i] for i in known] == pytest.approx([b['values'][i] for i in known], rel=1e-9)


@pytest.mark.parametrize('name', AFTER)
def test_after_the_block_each_process_has_all_data(ranks, name):
    a, b, one = (o[f'{name}-ddp'] for o in ranks)
    for o in (a['after'], b['after']):
        assert len(o['drawn']) == len(set(o['drawn'])) == 35
        assert o['measured'] == pytest.approx(one['measured'], rel=1e-4)
        for k in ('preds', 'raw', 'one'): assert close(o['predicted'][k], one['predicted'][k]), k


def close(a, b):
    "Equal nested lists, numbers about"
    if isinstance(b, list): return isinstance(a, list) and len(a) == len(b) and all(map(close, a, b))
    return a == (pytest.approx(b, rel=1e-3, abs=1e-5) if isinstance(b, float) else b)


@pytest.mark.parametrize('name,strategy', by_strategy([o for o in CASES if o != 'words']))
def test_each_has_all_predictions_in_the_order_of_the_data(ranks, name, strategy):
    a, b, one = (o[f'{name}-{strategy}'] for o in ranks)
    fails = [o['predicted'].pop('fails') for o in (a, b)]
    assert 'process 1 could not predict, so none did: ValueError' in fails[0] and fails[1].startswith('ValueError')
    assert set(a['predicted']) <= set(one['predicted'])
    for k, want in one['predicted'].items():
        if k == 'fails': continue
        for o in (a, b): assert close(o['predicted'][k], want), (k, o['predicted'][k], want)
    assert len(one['predicted']['preds'][1]) == dict(numbers=13, examples=9).get(name, 10)
    if 'fetched' in a: assert close(a['fetched'], one['predicted']['preds']) and close(b['fetched'], a['fetched'])


def test_predictions_of_words_end_in_an_error_on_both(ranks):
    for o in ranks[:2]: assert 'which items are whose' in o['words-ddp']['predicted']['preds'] or 'so none did' in o['words-ddp']['predicted']['preds']


def test_a_metric_that_cannot_be_added_up_is_named_once(ranks):
    assert [[o for o in r['numbers-ddp']['told'] if 'last' in o] for r in ranks[:2]] == [['last: of each process its own part only; name what adds up in the metric\'s `sums`'], []]
    assert not [o for r in ranks[:2] for c in CASES if c != 'numbers' for o in r[f'{c}-ddp']['told'] if 'own part' in o]


@pytest.mark.parametrize('name', ['sorted', 'unseeded', 'packed', 'budget', 'tags'])
def test_steps_are_equally_long(ranks, name):
    "What a process waits for the other"
    def work(o): return [sum(n for _, n in b) if name in ('packed', 'tags') else max(n for _, n in b)*len(b) for b in o[f'{name}-ddp']['texts']]
    a, b = map(np.array, map(work, ranks[:2]))
    assert np.maximum(a, b)[:-2].sum() <= 1.35*(a + b)[:-2].sum()/2


def test_other_loaders_are_split_as_fastai_does(ranks):
    a, b = (flat(o['examples-ddp']['texts']) for o in ranks[:2])
    assert len(a) == len(b) == 18 and len(set(a + b)) == 35  # one is drawn twice, since 35 are odd


@pytest.mark.parametrize('name', IMAGES)
def test_images_are_those_that_one_process_draws(ranks, name):
    "Step by step, the same items with the same crops and colours; 35 do not divide evenly, so the first is drawn again"
    a, b, one = (o[f'{name}-ddp']['texts'] if i < 2 else o['drawn'][name] for i, o in enumerate(ranks))
    assert [x + y for x, y in zip(a, b, strict=True)][:-1] == one[:-1] and (a[-1] + b[-1])[:-1] == one[-1]
    assert [len(x) for x in a] == [len(x) for x in b] == [4, 4, 4, 4, 2]


def test_rows_of_words_are_split_not_windows(ranks):
    a, b = (np.concatenate(o['words-ddp']['texts'], 1) for o in ranks[:2])
    assert a.shape == b.shape and a.shape[0] == 2 and not (a == b).all()


# without processes

def test_a_loader_made_for_other_processes_is_refused(monkeypatch):
    from fastbench.distributed.ranks import RankTrainer
    dl = TextDL(['ba be']*4, make_tokenizer(), world_size=1)
    cb = RankTrainer(cpu=True)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(UserError, match='deals to 1 processes, and 2 are training'): cb._wrap_dl(dl)


def test_one_process_predicts_as_ever(monkeypatch):
    from fastbench.distributed.ranks import RankTrainer
    from ranks import numbers
    learn = numbers()
    with learn.no_bar():
        want = learn.get_preds()[0]
        learn.distributed_trainer = cb = RankTrainer(cpu=True)
        assert torch.equal(learn.get_preds()[0], want)
    monkeypatch.setenv('WORLD_SIZE', '2')
    cb.learn = learn
    with pytest.raises(UserError, match='write over each other'): learn.get_preds(save_preds='x')
    cb.learn = None


def test_fastais_wrapper_is_refused():
    dl = DistributedDL(TextDL(WORDS[:20], make_tokenizer(), bs=2, seed=1), rank=0, world_size=2)
    dl._broadcast = lambda t, rank: t
    with pytest.raises(UserError, match='would deal once more'): next(iter(dl))


def test_ranks_need_a_seed():
    dl = TextDL(WORDS[:20], make_tokenizer(), shuffle=True, rank=0, world_size=2)
    with pytest.raises(UserError, match='give the loader a seed='): len(dl)


def test_words_are_dealt_while_something_puts_the_parts_together(monkeypatch):
    "A loader made before, among or after several processes: its rows are all of them whenever nobody trains together"
    from fastbench.distributed.ranks import RankTrainer
    monkeypatch.setenv('WORLD_SIZE', '2'), monkeypatch.setenv('RANK', '1')
    dl = BPTTLoader(torch.arange(101), bs=2, bptt=7)
    learn, cb = Learner(DataLoaders(dl, dl), nn.Linear(1, 1), loss_func=nn.MSELoss()), RankTrainer(cpu=True)
    alone = torch.cat([x for x, _ in dl], 1)
    assert (dl.rank, dl.world_size, dl.n) == (0, 1, 16) and len(dl) == 8 and alone.shape == (2, 50)
    learn.add_cb(cb)
    among = dl.new()
    for o in (dl, among):
        assert (o.rank, o.world_size) == (1, 2) and len(o) == 4 == len(list(o)) and cb._wrap_dl(o) is o
        assert torch.cat([x for x, _ in o], 1).tolist() == [list(range(50, 75)), list(range(75, 100))]
    learn.remove_cb(cb)
    for o in (dl, among): assert torch.equal(torch.cat([x for x, _ in o], 1), alone)
    few, one = BPTTLoader(torch.arange(4), bs=2, bptt=7), BPTTLoader(torch.arange(100), bs=2, bptt=5, rank=0, world_size=2)
    learn.add_cb(cb)
    assert (one.rank, one.new().world_size) == (0, 2)
    with pytest.raises(UserError, match='4 words cannot be cut into 4 rows'): next(iter(few))
    learn.remove_cb(cb)


def test_texts_are_dealt_while_something_puts_the_parts_together(monkeypatch):
    "The number of the batches may be asked for before, and changes no order"
    from fastbench.distributed.ranks import RankTrainer
    monkeypatch.setenv('WORLD_SIZE', '2'), monkeypatch.setenv('RANK', '1')
    a, b = (TextDL(WORDS[:20], make_tokenizer(), 4, kind, 32, shuffle=True, seed=1) for kind in ('budget', 'budget'))
    learn, cb = Learner(DataLoaders(a, a), nn.Linear(1, 1), loss_func=nn.MSELoss()), RankTrainer(cpu=True)
    assert (a.rank, a.world_size) == (0, 1) and len(a.get_idxs()) == 20 and len(a)
    learn.add_cb(cb)
    assert (a.rank, a.world_size) == (a.new().rank, a.new().world_size) == (1, 2) and cb._wrap_dl(a) is a
    assert len(a.get_idxs()) == 10 and list(a.get_idxs()) == list(b.get_idxs())
    learn.remove_cb(cb)
    assert (a.rank, a.world_size) == (0, 1) and len(a.get_idxs()) == 20


def test_without_accelerate_it_is_one_line(monkeypatch):
    from fastbench.bench.learner import bench_learner
    from fastbench.errors import UserError
    learn = bench_learner('digits-xresnet18', device='cpu')
    monkeypatch.setattr('fastbench.distributed.learner.find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'fastbench\[distributed\]'): learn.to_distributed(cpu=True)
    assert not hasattr(learn, 'distributed_trainer')

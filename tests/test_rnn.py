"Word-level language models: what is read, what is remembered, what is refused"
import copy, math

import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip

import fastbench.measure.profiler # learn.profile
from fastbench.train.batch_size import BatchSize
from fastbench.callback.compiling import Compile
from fastbench.callback.ema import EMACallback
from fastbench.errors import UserError
from fastbench.text.rnn import Penalties, generate, rnn_archs, rnn_learner, word_lm
from fastbench.text.words import BPTTLoader, WordVocab, lm_dls, word_tokens
from fastbench.text.sources import Texts, TextSet, text_sources

SMALL = dict(n_emb=16, n_hid=16, n_layers=2)


@pytest.fixture(scope='module')
def texts():
    "Sentences that can be learnt: after each word comes its successor"
    words = 'one two three four five six seven eight nine ten'.split()
    def f(i): return ' '.join(words[(i+j)%10] for j in range(40))+f' .\n\nword{i} end'
    return [f(i) for i in range(100)], [f(i) for i in range(20)]


@pytest.fixture
def dls(texts): return lm_dls(texts, bs=8, bptt=10, device='cpu')


def learner(dls, arch='lstm', **kwargs):
    torch.manual_seed(0)
    return rnn_learner(dls, arch, model_args=SMALL, **kwargs)


def quiet(learn, n=1, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, **kwargs)
    return learn


def one_line(e): assert '\n' not in str(e.value), str(e.value); return str(e.value)


# --- words

def test_tokens():
    assert word_tokens('\n\n A b.\n\n\n  \n\nC') == ['a', 'b', '.', '<eos>', 'c', '<eos>'] and word_tokens(' \n ') == []
    assert word_tokens(' \n = T = \n \n a , b \n', 'split') == ['<eos>', '=', 'T', '=', '<eos>', '<eos>', 'a', ',', 'b', '<eos>']
    assert word_tokens('a\u2028b c', 'split') == ['a', 'b', 'c', '<eos>'] # only \n ends a line


def test_vocab_is_of_the_training_texts():
    v = WordVocab.of([['b', 'a', 'b', '<eos>', '<unk>'], ['c']])
    assert v.words == ['<unk>', '<eos>', 'b', 'a', 'c'] and v.encode(['c', 'x', '<eos>', '<unk>']).tolist() == [4, 0, 1, 0]
    assert WordVocab.of([['b', 'a', 'b']], max_words=3).words == ['<unk>', '<eos>', 'b'] and v.decode([2, 1]) == ['b', '<eos>']


def test_wikitext_keeps_its_words():
    ts = TextSet(text_sources['wikitext2'], None, Texts([' = Title = \n A <unk> , once \n'*20]), Texts([' = Title = \n A new one \n'*20]))
    dls = lm_dls(ts, bs=2, bptt=5, device='cpu')
    assert dls.vocab.words == ['<unk>', '<eos>', '=', ',', 'A', 'Title', 'once'] # no lower case
    assert dls.info['train_words'] == 9*20 and dls.info['unknown'] == .25


# --- the loader

def test_layout_by_hand():
    got = list(BPTTLoader(torch.arange(11), bs=2, bptt=3))
    assert [(x.tolist(), y.tolist()) for x,y in got] == [([[0,1,2],[5,6,7]], [[1,2,3],[6,7,8]]), ([[3,4],[8,9]], [[4,5],[9,10]])]
    assert len(BPTTLoader(torch.arange(11), bs=2, bptt=3)) == 2 and got[0][0].is_contiguous()


@pytest.mark.parametrize('n', [50, 97, 100, 121])
@pytest.mark.parametrize('bptt', [1, 7, 100])
def test_a_row_goes_on(n, bptt):
    dl = BPTTLoader(torch.arange(n), bs=4, bptt=bptt)
    batches = list(dl)
    assert len(batches) == len(dl)
    x,y = (torch.cat(o, 1) for o in zip(*batches))
    assert x.shape == (4, (n-1)//4) and torch.equal(x.flatten(), torch.arange(x.numel())) and torch.equal(y, x+1)


@pytest.mark.parametrize('world', [1, 2, 3])
@pytest.mark.parametrize('shuffle', [False, True])
def test_ranks_read_the_rows_of_one(world, shuffle):
    ends,args = list(range(10, 301, 10)), dict(bptt=7, seed=5, shuffle=shuffle)
    one = BPTTLoader(torch.arange(300), bs=6, ends=ends, **args)
    ranks = [BPTTLoader(torch.arange(300), bs=6//world, ends=ends, rank=i, world_size=world, **args) for i in range(world)]
    for _ in range(2): # epochs
        for whole,*parts in zip(one, *ranks, strict=True):
            for i in (0, 1): assert torch.equal(whole[i], torch.cat([o[i] for o in parts]))


def test_shuffle_is_of_documents_seeded_and_new_each_epoch():
    ends = [10, 25, 40, 70, 100]
    def orders(seed): return [dl.order() for dl in [BPTTLoader(torch.arange(100), bs=2, ends=ends, shuffle=True, seed=seed)] for _ in range(4)]
    a,b,c = orders(1), orders(1), orders(2)
    assert all(torch.equal(x, y) for x,y in zip(a, b)) and not all(torch.equal(x, y) for x,y in zip(a, c))
    for o in a:
        assert sorted(o.tolist()) == list(range(100))
        starts = {0, *ends}
        assert all(int(y) == int(x)+1 or (int(x)+1 in starts and int(y) in starts) for x,y in zip(o, o[1:]))
    dl = BPTTLoader(torch.arange(100), bs=2, ends=ends, shuffle=True)
    assert not torch.equal(next(iter(dl))[0], next(iter(dl))[0])


def test_last_window_left_out(texts):
    dl = BPTTLoader(torch.arange(11), bs=2, bptt=3, drop_last=True)
    assert [x.tolist() for x,_ in dl] == [[[0,1,2],[5,6,7]]] and len(dl) == 1 and len(dl.new()) == 1 and len(dl.new(drop_last=False)) == 2
    dls = lm_dls(texts, bs=8, bptt=10, drop_last=True, device='cpu')
    assert {x.shape[1] for x,_ in dls.train} == {10} and {x.shape[1] for x,_ in dls.valid} == {10, 2}


def test_new_loader_keeps_what_it_is():
    dl = BPTTLoader(torch.arange(300), bs=3, bptt=7, ends=[100, 300], shuffle=True, rank=1, world_size=2, device='cpu')
    new = dl.new(num_workers=0, drop_last=False)
    assert all(getattr(new, o) == getattr(dl, o) for o in ('bs', 'bptt', 'by_doc', 'rank', 'world_size', 'seed', 'device')) and len(new) == len(dl)
    assert dl.new(bs=5).bs == 5 and next(iter(dl.new(bs=5)))[0].shape == (5, 7)


@pytest.mark.parametrize('kwargs,said', [(dict(bs=0), 'bs=0'), (dict(bptt=True), 'bptt=True'), (dict(bptt=2.), 'bptt=2.0'), (dict(rank=1), 'rank=1'),
                                         (dict(bs=100), '100 words cannot be cut into 100 rows'), (dict(shuffle=True), 'ends')])
def test_bad_loader(kwargs, said):
    with pytest.raises(UserError, match=said) as e: BPTTLoader(torch.arange(100), **kwargs)
    one_line(e)


def test_short_corpus(texts):
    with pytest.raises(UserError, match='4,500 words for training.*128 rows') as e: lm_dls(texts, bs=128, bptt=36, device='cpu')
    one_line(e)
    with pytest.raises(UserError, match='for validation') as e: lm_dls(texts, bs=8, bptt=300, device='cpu')
    with pytest.raises(UserError, match='256 rows'): lm_dls(texts, bs=128, bptt=18, world_size=2, device='cpu')
    with pytest.raises(UserError, match='unknown text source'): lm_dls('wikitext')


# --- models

@pytest.mark.parametrize('arch', rnn_archs())
def test_state_goes_on(arch):
    m,x = word_lm(50, arch, **SMALL).eval(), torch.randint(0, 50, (4, 20))
    with torch.no_grad(): two,again = torch.cat([m(x[:,:8]), m(x[:,8:])], 1),m(x)
    m.reset()
    with torch.no_grad(): one = m(x)
    assert torch.allclose(two, one, atol=1e-5) and not torch.allclose(again, one, atol=1e-5)


@pytest.mark.parametrize('arch', rnn_archs())
def test_gradients_stay_within_a_window(arch):
    m,x = word_lm(50, arch, **SMALL), torch.randint(0, 50, (4, 6))
    for _ in range(3): m(x).float().mean().backward() # a second pass through a freed graph would raise
    if arch != 'awd': assert all(not o.requires_grad and o.dtype == torch.float32 for o in m.state)


@pytest.mark.parametrize('arch', rnn_archs())
def test_another_number_of_rows_starts_anew(arch):
    m,x = word_lm(50, arch, **SMALL).eval(), torch.randint(0, 50, (6, 9))
    with torch.no_grad():
        want = m(x[:3])
        m(x)
        got = m(x[:3])
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize('arch', rnn_archs())
@pytest.mark.parametrize('tie', [True, False])
def test_tied_weights(arch, tie):
    m = word_lm(50, arch, tie_weights=tie, **SMALL)
    a,b = (m.encoder.encoder, m.decoder.decoder) if arch == 'awd' else (m.emb, m.out)
    assert (a.weight is b.weight) == tie and 'state' not in ''.join(m.state_dict())


@pytest.mark.parametrize('arch', rnn_archs())
def test_no_dropout_at_all(arch, dls):
    torch.manual_seed(0)
    learn = quiet(rnn_learner(dls, arch, model_args=dict(SMALL, dropout=0.)))
    assert math.isfinite(learn.recorder.values[-1][0])


def test_bad_models(dls):
    with pytest.raises(UserError, match="did you mean 'lstm'") as e: word_lm(50, 'ltsm')
    one_line(e)
    with pytest.raises(UserError, match='tie_weights') as e: word_lm(50, 'gru', n_emb=8, n_hid=9)
    one_line(e)
    assert word_lm(50, 'gru', n_emb=8, n_hid=9, tie_weights=False)(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 50)
    del dls.vocab
    with pytest.raises(UserError, match='lm_dls'): rnn_learner(dls)


# --- training

@pytest.mark.parametrize('arch', rnn_archs())
def test_it_learns(arch, dls):
    learn = quiet(learner(dls, arch), 6, lr=.02)
    losses = [o[1] for o in learn.recorder.values]
    assert losses[-1] < .7*losses[0], losses


@pytest.mark.parametrize('arch', rnn_archs())
@pytest.mark.parametrize('precision', ['bf16', 'half'])
def test_16_bits_come_close(arch, precision, dls, request):
    if precision == 'bf16' and arch in ('lstm', 'awd'): request.getfixturevalue('bf16')  # no kernel otherwise
    def to(o): return o.to_bf16(allow_emulation=True) if precision == 'bf16' else o.to_half(allow_emulation=True)
    full,low = quiet(learner(dls, arch), 2, lr=.01), quiet(to(learner(dls, arch)), 2, lr=.01)
    a,b = full.recorder.values[-1], low.recorder.values[-1]
    assert abs(a[1]-b[1]) < .03*a[1] and a[1] != b[1]
    assert all(p.dtype == torch.float32 for p in low.model.parameters())


def test_state_starts_anew_with_each_epoch_and_ends_with_the_fit(dls):
    seen = []
    class Look(Callback):
        def before_batch(self): seen.append((self.training, self.iter, self.model.state is None))
    learn = quiet(learner(dls), 2, cbs=Look())
    assert all(none == (i == 0) for _,i,none in seen) and sum(none for *_,none in seen) == 4 and learn.model.state is None


def test_perplexity_counts_words(dls):
    learn = learner(dls)
    assert dls.valid.length % 10 # the last window is shorter
    with learn.no_bar(): perplexity = learn.validate()[-1]
    learn.model.eval()
    total = n = 0
    with torch.no_grad():
        for x,y in dls.valid:
            total += torch.nn.functional.cross_entropy(learn.model(x).flatten(0, 1), y.flatten(), reduction='sum').item()
            n += y.numel()
    assert perplexity == pytest.approx(math.exp(total/n), rel=1e-5)


def test_penalties_count(dls):
    def loss(**kwargs):
        seen = []
        class Look(Callback):
            order = Penalties.order+1
            def after_loss(self):
                if self.training: seen.append((self.loss_grad-self.loss).item())
        quiet(learner(dls, 'awd', cbs=Look(), **kwargs))
        return seen
    both,alpha = loss(), loss(beta=0)
    assert set(loss(alpha=0, beta=0)) == {0.} and all(a > b > 0 for a,b in zip(both[:1], alpha[:1]))


def test_callbacks_are_as_asked(dls):
    assert next(o for o in learner(dls).cbs if isinstance(o, GradientClip)).max_norm == .25
    assert not any(isinstance(o, GradientClip) for o in learner(dls, clip=None).cbs)
    for o in (Callback, Callback(), [Callback()]): assert sum(type(c) is Callback for c in learner(dls, cbs=o).cbs) == 1
    assert any(isinstance(o, Penalties) for o in learner(dls, 'awd').cbs) and not any(isinstance(o, Penalties) for o in learner(dls).cbs)


@pytest.mark.parametrize('arch', ['gru', 'awd'])
def test_the_other_tools(arch, dls, tmp_path):
    learn = learner(dls, arch, path=tmp_path)
    before = copy.deepcopy(learn.model.state_dict())
    n = learn.find_batch_size(max=16)
    assert isinstance(n, BatchSize) and n == 16 and all(torch.equal(a, b) for a,b in zip(before.values(), learn.model.state_dict().values()))
    quiet(learn.profile(), cbs=EMACallback())
    assert len(learn.profiler.results) > 10
    learn.save('m')
    other = learner(dls, arch, path=tmp_path).load('m')
    with learn.no_bar(), other.no_bar(): assert learn.validate() == other.validate()


def test_compiled(dls):
    want = quiet(learner(dls)).recorder.values[-1][1]
    got = quiet(learner(dls, cbs=Compile(backend='eager'))).recorder.values[-1][1]
    assert got == pytest.approx(want, rel=1e-4)


def test_generate(dls):
    learn = quiet(learner(dls), 12, lr=.02)
    learn.model.train()
    assert generate(learn, 'one two', 4, temperature=0) == 'three four five six'
    assert learn.model.training and learn.model.state is None
    assert generate(learn, 'one', 30, 2., seed=1) == generate(learn, 'one', 30, 2., seed=1) != generate(learn, 'one', 30, 2., seed=2)
    assert len(generate(learn, '', 3, seed=1).split()) == 3 and '<unk>' not in generate(learn, 'zzz', 50, 5., seed=1)


def test_a_learner_of_fastais_text_is_saved_and_loaded_with_our_methods(tmp_path):
    "Its `load` takes its arguments in another order than the one of a Learner"
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.text.learner import TextLearner
    import fastbench.train.convert  # noqa: F401  (adds bench)
    class Net(torch.nn.Linear):
        def reset(self): pass
        def forward(self, x): return (y := super().forward(x)), [y], [y]
    dls = DataLoaders(*(DataLoader([(torch.ones(2), torch.ones(1))]*8, bs=4) for _ in range(2)), device='cpu')
    learn = TextLearner(dls, Net(2, 1), loss_func=torch.nn.MSELoss(), path=tmp_path).bench()
    quiet(learn)
    was = learn.model.weight.clone()
    learn.save('own')
    quiet(learn)
    for kwargs in ({}, dict(with_opt=False), dict(device='cpu')): assert learn.load('own', **kwargs).model.weight.equal(was)

"Attention over packed texts: which kernel for which device, and that each is told what it needs; no GPU is asked"
import warnings

import pytest
import torch

from fastbench.compat import efficient_learns_windows
from fastbench.text import kernels
from fastbench.text.kernels import _by_text, _dense, _efficient, _flash, ask_kernel, kernel_for, packed_attention
from fastbench.text.packed import Bounds
from pretend import pretend
from varlen import on_cpu

@pytest.fixture(autouse=True)
def no_bands(): kernels._band.cache_clear()  # kept ones are of a pretended device that is gone


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
N = [3, 7, 1, 9]
pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.mark.parametrize('device,capability,dtype,more,name', [
    ('cuda', (9, 0), FP16, {}, 'flash'), ('cuda', (8, 0), BF16, {}, 'flash'), ('cuda', (8, 9), FP16, dict(window=4), 'flash'), ('cuda', (12, 0), BF16, dict(window=4, causal=True), 'flash'),
    ('cuda', (8, 0), FP16, dict(head_dim=256), 'flash'), ('cuda', (8, 6), FP16, dict(head_dim=256), 'efficient'), ('cuda', (9, 0), FP16, dict(head_dim=512), 'efficient'),
    ('cuda', (9, 0), FP32, {}, 'efficient'), ('cuda', (7, 5), FP16, {}, 'efficient'), ('cuda', (7, 0), FP32, {}, 'efficient'),
    ('cuda', (7, 5), FP16, dict(window=4), 'by_text'), ('cuda', (9, 0), FP32, dict(window=4), 'by_text'), ('cuda', (9, 0), FP32, dict(window=4, lengths=False), 'dense'),
    ('cuda', (7, 5), BF16, {}, 'by_text'), ('cuda', (7, 5), BF16, dict(lengths=False), 'dense'), ('cuda', (9, 0), torch.float64, dict(lengths=False), 'dense'),
    ('cuda', (3, 7), FP32, {}, 'by_text'), ('cuda', None, FP16, {}, 'by_text'), ('mps', None, FP32, {}, 'by_text'), ('xpu', None, FP16, dict(lengths=False), 'dense'),
    ('cpu', None, FP32, {}, 'by_text'), ('cpu', None, BF16, dict(lengths=False, window=4), 'by_text')])
def test_the_table(device, capability, dtype, more, name): assert kernel_for(device, capability, dtype, **more) == name


@pytest.mark.parametrize('version,name', [('2.8.0+cu128', 'by_text'), ('2.14.1', 'by_text'), ('2.15.0+cu130', 'efficient')])
def test_a_window_only_where_the_gradient_keeps_to_it(monkeypatch, version, name):
    monkeypatch.setattr(torch, '__version__', type(torch.__version__)(version))
    assert kernel_for('cuda', (6, 1), FP16, causal=True, window=4) == name and kernel_for('cuda', (6, 1), FP16, causal=True) == 'efficient'


def bounds_of(n=N, device='cpu', **kwargs):
    return Bounds(torch.tensor([0, *n]).cumsum(0).int().to(device), **dict(longest=max(n), lengths=n, tokens=sum(n)) | kwargs)


@pytest.mark.parametrize('kernel', [_flash, _efficient])
@pytest.mark.parametrize('kv', [4, 2, 1])
@pytest.mark.parametrize('dim', [8, 20, 64])
@pytest.mark.parametrize('dropout', [0., .1])
def test_shapes_without_a_device(kernel, kv, dim, dropout):
    if kernel is _efficient and torch.__version__ < (2, 15): pytest.skip('before 2.15 PyTorch cannot do this gradient on meta tensors: it is called with an argument too many')
    bounds = bounds_of(device='meta')
    dtype = FP16 if kernel is _flash else FP32
    q, k, v = (torch.empty(1, h, sum(N), dim, dtype=dtype, device='meta', requires_grad=True) for h in (4, kv, kv))
    out = kernel(q, k, v, bounds, True, 4, dropout_p=dropout)
    assert out.shape == q.shape and out.dtype == dtype
    out.float().sum().backward()
    assert all(o.grad.shape == o.shape and o.grad.dtype == dtype for o in (q, k, v))


def test_arguments_are_those_of_torch_2_6_too():
    "By name, as far as they are given by name; by place the first ten"
    for op, names, more in ((torch.ops.aten._flash_attention_forward, 'query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask', {'scale', 'window_size_left', 'window_size_right'}),
                            (torch.ops.aten._efficient_attention_forward, 'query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type compute_log_sumexp',
                             {'scale', 'window_size'})):
        args = op.default._schema.arguments
        assert [o.name for o in args if not o.kwarg_only] == names.split() and more <= {o.name for o in args if o.kwarg_only}


def answers(f, q, k, v, *args, **kwargs):
    ps = [o.detach().clone().requires_grad_() for o in (q, k, v)]
    out = f(*ps, *args, **kwargs)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), ps)]


CASES = dict(plain={}, causal=dict(causal=True), window=dict(window=4), both=dict(window=4, causal=True), wide=dict(window=64), scaled=dict(scale=.3))


@pytest.mark.parametrize('how', CASES)
@pytest.mark.parametrize('kv', [4, 2])
@pytest.mark.parametrize('capability,dtype,name', [((8, 0), FP16, 'flash'), ((9, 0), BF16, 'flash'), ((7, 5), FP16, 'efficient'), ((9, 0), FP32, 'efficient')])
def test_what_each_kernel_is_told_gives_the_same(capability, dtype, name, kv, how):
    torch.manual_seed(0)
    kw, (q, k, v) = CASES[how], (torch.randn(1, h, sum(N), 12).to(dtype).float() for h in (4, kv, kv))
    want = answers(_by_text, q, k, v, bounds_of(), kw.get('causal', False), kw.get('window'), kw.get('scale'))
    by_text = name == 'efficient' and (how == 'window' or how == 'both' and not efficient_learns_windows())
    if by_text and how == 'both' and kv == 2: pytest.skip('before 2.15 PyTorch makes a mask on the true device there, which is a CPU')
    with pretend(capability=capability) as gpu, on_cpu() as calls, warnings.catch_warnings():
        if not by_text: warnings.simplefilter('error')
        on, bounds = [o.to('cuda', dtype) for o in (q, k, v)], bounds_of(device='cuda')
        gpu.waits.clear()
        got = answers(packed_attention, *on, bounds, dropout=0., **kw)
        assert not gpu.waits and got[0].device.type == 'cuda' and got[0].dtype == dtype
        got = [o.cpu().float() for o in got]
    assert [o[0] for o in calls] == ([] if by_text else [name])
    if calls: assert calls[0][1]['kv_heads'] == (kv if name == 'flash' else 4)
    for a, b in zip(got, want): torch.testing.assert_close(a, b, **(dict(rtol=1e-4, atol=1e-5) if dtype == FP32 else dict(rtol=.02, atol=.03 if dtype == FP16 else .2)))


def test_dropout_takes_the_same_kernel():
    for capability, dtype, name in (((8, 0), FP16, 'flash'), ((7, 5), FP16, 'efficient'), ((8, 0), FP32, 'efficient')):
        with pretend(capability=capability), on_cpu() as calls:
            q = torch.randn(1, 2, sum(N), 8).to('cuda', dtype)
            packed_attention(q, q, q, bounds_of(device='cuda'), dropout=.1)
        assert [(o, d['dropout']) for o, d in calls] == [(name, .1)]


def test_queries_in_fp32_under_autocast():
    "As of models that multiply positions into them"
    with pretend(), on_cpu() as calls:
        q, v = torch.randn(1, 2, sum(N), 8).to('cuda'), torch.randn(1, 2, sum(N), 8).to('cuda', FP16)
        with torch.autocast('cuda', FP16): assert packed_attention(q, q, v, bounds_of(device='cuda')).dtype == FP16
        assert packed_attention(q, q, v.to(BF16), bounds_of(device='cuda')).dtype == BF16
    assert [d['dtype'] for _, d in calls] == [FP16, BF16]


def test_the_dense_path_names_its_cost_once(monkeypatch):
    monkeypatch.setattr(kernels, '_said', set())
    with pretend(capability=(7, 5)), on_cpu() as calls:
        q = torch.randn(1, 2, sum(N), 8).to('cuda')
        bounds = bounds_of(device='cuda', lengths=None)
        with pytest.warns(UserWarning, match=r'packed batches: attention on cuda in float32 has no kernel .* all 20 x 20 pairs of tokens in each layer, about 3.2e-06 GB .*loader=.sorted.'):
            out = packed_attention(q, q, q, bounds, window=4)
        with pytest.warns(UserWarning, match='each of the 4 texts by itself'): packed_attention(q, q, q, bounds_of(device='cuda'), window=4)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            packed_attention(q, q, q, bounds, window=4)
        assert not calls
        torch.testing.assert_close(out.cpu(), _by_text(*[q.cpu()]*3, bounds_of(), False, 4))


@pytest.mark.skipif(torch.__version__ < (2, 15), reason='before 2.15 PyTorch makes a mask on the true device here, which is a CPU')
def test_a_kernel_is_asked_on_its_device(monkeypatch):
    bounds = [3, 90, 1, 40]
    with pretend(), on_cpu() as calls:
        state = torch.cuda.get_rng_state('cuda:0')
        for dtype in (FP16, BF16, FP32):
            ask_kernel(torch.device('cuda:0'), dtype, bounds_of(bounds, 'cuda'), heads=4, kv_heads=2, head_dim=16, causal=True, window=30, scale=None)
        assert [(o, d['dropout']) for o, d in calls] == [('flash', 0.), ('flash', .1)]*2 + [('efficient', 0.), ('efficient', .1)]
        assert torch.equal(torch.cuda.get_rng_state('cuda:0').cpu(), state.cpu())
        for wrong, why in ((lambda o: o*1.1, 'wrong by'), (lambda o: o*float('nan'), 'wrong by nan')):
            monkeypatch.setitem(kernels._kernels, 'flash', lambda *args: wrong(_flash(*args)))
            with pytest.raises(ValueError, match=f'output {why}'): ask_kernel(torch.device('cuda:0'), FP16, bounds_of(bounds, 'cuda'), 4, 4, 16)


def test_lengths_that_do_not_fit_are_not_believed():
    "As of a batch whose texts somebody chose anew"
    assert bounds_of(lengths=[3, 7]).lengths is None and bounds_of(lengths=[3, 7, 1, 8]).lengths is None and bounds_of().lengths == N
    b = bounds_of(lengths=None, longest=None)
    assert b.n == N and b.longest == 9
    q = torch.randn(1, 2, sum(N), 4)
    torch.testing.assert_close(_by_text(q, q, q, b, False, None), _dense(q, q, q, bounds_of(), False, None))

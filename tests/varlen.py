"""CUDA's attention for texts of many lengths, on a CPU: `aten._flash_attention_forward` and `aten._efficient_attention_forward` and their gradients, with the rules that CUDA's keep.

    with on_cpu() as calls: packed_attention(...)  # on a pretended device
    calls                                          # [('flash', dict(dtype=torch.float16, heads=4, kv_heads=2, ...))]

Dropout is taken note of and not done. What only a GPU shows: whether a build of PyTorch has the kernels, their rounding, and how they drop."""
from contextlib import contextmanager

import torch


def pieces(q, k, cu_q, cu_k, causal, left, right, scale):
    "For each text: its slice, and the weights of (heads, tokens, tokens)"
    assert cu_q.dtype == cu_k.dtype == torch.int32 and q.stride(-1) == k.stride(-1) == 1
    ends = [int(o) for o in cu_q]
    for a, b in zip(ends, ends[1:]):
        i, j = torch.meshgrid(*[torch.arange(b-a)]*2, indexing='ij')
        seen = (i >= j) if causal else i == i
        if left is not None and left >= 0: seen = seen & (i-j <= left)
        if right is not None and right >= 0: seen = seen & (j-i <= right)
        kk = k[a:b].float().repeat_interleave(q.shape[1]//k.shape[1], 1)
        yield slice(a, b), torch.einsum('ihd,jhd->hij', q[a:b].float(), kk).mul(scale).masked_fill(~seen, -torch.inf).softmax(-1)


def forward(q, k, v, *args):
    "(tokens, heads, numbers) of each"
    out = torch.zeros(*q.shape[:-1], v.shape[-1])
    for s, w in pieces(q, k, *args): out[s] = torch.einsum('hij,jhd->ihd', w, v[s].float().repeat_interleave(q.shape[1]//v.shape[1], 1))
    return out.to(q.dtype)


def backward(g, q, k, v, *args):
    scale, n = args[-1], q.shape[1]//k.shape[1]
    gq, gk, gv = (torch.zeros(*o.shape) for o in (q, k, v))
    for s, w in pieces(q, k, *args):
        gs, (kk, vv) = g[s].float(), (o[s].float().repeat_interleave(n, 1) for o in (k, v))
        gw = torch.einsum('ihd,jhd->hij', gs, vv)
        ds = w*(gw - (gw*w).sum(-1, keepdim=True))*scale
        gq[s] = torch.einsum('hij,jhd->ihd', ds, kk)
        gk[s] = torch.einsum('hij,ihd->jhd', ds, q[s].float()).unflatten(1, (-1, n)).sum(2)
        gv[s] = torch.einsum('hij,ihd->jhd', w, gs).unflatten(1, (-1, n)).sum(2)
    return gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype)


def note(calls, name, q, k, longest, dropout, causal, window, cu):
    assert longest >= max(int(b)-int(a) for a, b in zip(cu, cu[1:])) and q.shape[-1] % 8 == 0
    calls.append((name, dict(dtype=q.dtype, heads=q.shape[-2], kv_heads=k.shape[-2], dropout=dropout, causal=causal, window=window)))


def flash(calls):
    def fwd(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None, window_size_right=None, **kwargs):
        assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype and q.ndim == 3 and q.shape[1] % k.shape[1] == 0
        note(calls, 'flash', q, k, max_q, dropout, causal, window_size_left, cu_q)
        out = forward(q, k, v, cu_q, cu_k, causal, window_size_left, window_size_right, scale)
        return out, q.new_zeros(q.shape[1], len(q), dtype=torch.float), torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_zeros(0)

    def bwd(g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale=None, window_size_left=None, window_size_right=None):
        return backward(g, q, k, v, cu_q, cu_k, causal, window_size_left, window_size_right, scale)
    return fwd, bwd


def efficient(calls):
    def window(causal, size):
        assert not size or causal, 'it has no window to both sides'
        return (size-1 if size else None), None

    def fwd(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask, lse=False, *, scale=None, seqlen_k=None, window_size=None):
        assert q.dtype == k.dtype == v.dtype and q.ndim == 4 and len(q) == 1 and q.shape == k.shape and bias is None and mask in (0, 1)
        note(calls, 'efficient', q, k, max_q, dropout, bool(mask), window_size, cu_q)
        out = forward(q[0], k[0], v[0], cu_q, cu_k, bool(mask), *window(mask, window_size), scale)[None]
        rng = torch.zeros((), dtype=torch.long)
        return out, q.new_zeros(len(cu_q)-1, q.shape[2], -(-max_q//32)*32 if lse else 0, dtype=torch.float), rng, rng.clone(), max_q, max_k

    def bwd(g, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, offset, mask, bias_grad, *, scale=None, num_splits_key=None, window_size=None, shared_storage_dqdkdv=False):
        assert lse.shape[-1], 'the forward pass was not told that gradients are wanted'
        return *(o[None] for o in backward(g[0], q[0], k[0], v[0], cu_q, cu_k, bool(mask), *window(mask, window_size), scale)), torch.zeros(())
    return fwd, bwd


@contextmanager
def on_cpu():
    "The operators, while this lasts; yields what they were called with"
    calls, lib = [], torch.library.Library('aten', 'IMPL')
    try:
        for name, make in (('flash', flash), ('efficient', efficient)):
            for way, f in zip(('forward', 'backward'), make(calls)): lib.impl(f'_{name}_attention_{way}', f, 'CPU')
        yield calls
    finally: lib._destroy()

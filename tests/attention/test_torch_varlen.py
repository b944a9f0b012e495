"""PyTorch's paged attention: what is refused, and, its kernel replaced by the formula, what it is given."""

from __future__ import annotations

import pytest
import torch

from ember.attention.choice import _has_paged_varlen, check_pool, resolve_attention
from ember.attention.torch_varlen import TorchVarlenAttention
from ember.cache.kv_pool import KVLayer, KVShape
from ember.errors import ConfigError
from tests.attention.test_backends import Case

CUDA = torch.device("cuda")


def shape(block_size=256, head_dim=64, dtype=torch.bfloat16):
    return KVShape(n_layer=1, n_kv_head=1, head_dim=head_dim, block_size=block_size, dtype=dtype, interleaved=False)


def test_what_it_can_not_do_is_said_at_the_start(monkeypatch):
    """PyTorch would fail in the first step, after the model was loaded."""
    with pytest.raises(ConfigError, match="attention=torch_varlen: runs on CUDA in bfloat16 or float16, not on cpu"):
        resolve_attention("torch_varlen", torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ConfigError, match="not on cuda in float32; use auto"):
        resolve_attention("torch_varlen", CUDA, torch.float32)
    monkeypatch.setattr("ember.attention.choice._has_paged_varlen", lambda: False)
    with pytest.raises(ConfigError, match=r"no varlen_attn that reads paged K/V; install 2\.13"):
        resolve_attention("torch_varlen", CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (shape(block_size=16), "block_size=16: attention=torch_varlen takes multiples of 256"),
        (shape(head_dim=12), "heads of a multiple of 8 up to 256, this model's are 12 wide; use triton"),
        (shape(dtype=torch.int8), "reads K/V of dtype alone; use auto"),
    ],
)
def test_a_pool_that_it_can_not_read_is_refused(pool, message):
    with pytest.raises(ConfigError, match=message):
        check_pool("torch_varlen", pool, torch.bfloat16, CUDA)
    check_pool("torch_varlen", shape(), torch.bfloat16, CUDA)


@pytest.mark.skipif(not _has_paged_varlen(), reason="needs PyTorch 2.13's varlen_attn")
@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_is_given_pages_tables_and_lengths(window):
    """Its documented meaning, by hand: it shows swapped axes and lengths, not what the real kernel does."""
    case = Case([(0, 9), (300, 1), (20, 3)], 2, 3, 8, 256, window=window)
    backend = TorchVarlenAttention(torch.float32)
    backend._attend = by_the_book
    pool = KVShape(n_layer=1, n_kv_head=2, head_dim=8, block_size=256, dtype=torch.float32, interleaved=False)
    layer = KVLayer(pool, case.num_blocks, torch.device("cpu"))
    for s, (old, _) in enumerate(case.lengths):
        layer.write(case.k[s][:old], case.v[s][:old], case.slots(s, 0, old))
    backend.prepare(case.metadata())
    out = backend.forward(*(case.packed(x) for x in (case.q, case.k, case.v)), layer, case.scale, window)
    torch.testing.assert_close(out.double(), case.dense(), atol=2e-5, rtol=1e-4)


def by_the_book(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table):
    """What `varlen_attn` says that it does, a sequence at a time."""
    assert enable_gqa
    assert int(cu_seq_q.diff().max()) == max_q
    assert int(seqused_k.max()) == max_k
    assert torch.equal(cu_seq_k.diff(), seqused_k)
    out = []
    for s, (first, last, used) in enumerate(zip(cu_seq_q[:-1], cu_seq_q[1:], seqused_k, strict=True)):
        keys, values = (x[block_table[s].long()].flatten(0, 1)[:used].repeat_interleave(3, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:last], keys) * scale
        n = int(last - first)
        seen = torch.ones(n, int(used)).tril(int(used) - n)
        if window_size[0] >= 0:
            seen = seen.triu(int(used) - n - window_size[0])
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(seen == 0, -torch.inf).softmax(-1), values))
    return torch.cat(out)

"""The Triton kernels in Triton's interpreter, on the CPU, held to plain float64 matrices; and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.attention.base import make_backend
from ember.attention.choice import check_pool, resolve_attention
from ember.cache.kv_pool import FP8, KVShape
from ember.errors import ConfigError
from tests.attention.test_backends import SEQUENCES, Case

pytestmark = pytest.mark.triton
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install '.[triton]'")
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 2**-7, torch.int8: 1e-5, FP8: 1e-5}
"""Steps between stored numbers; a float is cut to bfloat16 in the interpreter, where a GPU rounds it."""


@needs_triton
@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    lengths=SEQUENCES,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([3, 8, 40, 64, 80]),
    block_size=st.sampled_from([1, 7, 8, 16, 40, 64, 1024]),
    seed=st.integers(0, 2**31),
    window=st.sampled_from([None, 1, 5, 64, 70]),
)
def test_any_batch_matches_plain_matrices(lengths, kv_heads, group, head_dim, block_size, seed, window):
    """Unused slots and padding are NaN: whatever is read beyond a sequence shows."""
    case = Case(lengths, kv_heads, group, head_dim, block_size, seed, window=window)
    out, _ = case.run("triton")
    torch.testing.assert_close(out.double(), case.dense(), atol=2e-5, rtol=1e-4)


@needs_triton
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_every_kind_of_pool_is_written_and_read_as_the_reference_does(dtype, block_size):
    """A scale of another slot, a key laid out otherwise, or a rounding that is not the pool's own."""
    case = Case([(0, 70), (90, 1), (5, 3), (0, 1)], 2, 3, 24, block_size)
    (out, layer), (expected, other) = case.run("triton", dtype), case.run("reference", dtype)
    slots = torch.cat([case.slots(s, 0, old + new) for s, (old, new) in enumerate(case.lengths)])
    for mine, its in zip(layer.gather(slots), other.gather(slots), strict=True):
        torch.testing.assert_close(mine.float(), its.float(), atol=1e-6, rtol=ROUNDING[dtype])
    torch.testing.assert_close(out, expected, atol=max(3e-5, 4 * ROUNDING[dtype]), rtol=1e-3)


@needs_triton
@pytest.mark.parametrize("window", [None, 150])
def test_a_long_context_is_shared_out_and_joined(window, monkeypatch):
    """Splits of which some see nothing: through a window, or of the shorter of two sequences."""
    monkeypatch.setattr("ember.attention.triton.SPLIT_FROM", 64)
    case = Case([(400, 1), (9, 1), (130, 1), (3, 2)], 1, 4, 16, 16, window=window)
    out, _ = case.run("triton")
    torch.testing.assert_close(out.double(), case.dense(), atol=2e-5, rtol=1e-4)


@needs_triton
def test_a_row_that_decodes_has_the_same_bits_beside_any_other(monkeypatch):
    """A context split by the batch's longest one: its sums, and so a near tie, followed its neighbours."""
    monkeypatch.setattr("ember.attention.triton.SPLIT_FROM", 64)
    row, beside = (200, 1), [(9, 1), (700, 1), (3, 4)]
    case = Case([row, *beside], 1, 2, 8, 16)
    alone = Case([row], 1, 2, 8, 16)
    alone.q, alone.k, alone.v = case.q[:1], case.k[:1], case.v[:1]
    assert torch.equal(alone.run("triton")[0], case.run("triton")[0][:1])


@needs_triton
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_a_wide_head_and_a_whole_block_of_1024(kv_heads):
    """Tiles shrink as heads get wider; in float32 those of 256 did not fit in a GPU's shared memory."""
    case = Case([(40, 1), (3, 30)], kv_heads, 2, 256, 1024, scale=1 / 16)
    out, _ = case.run("triton")
    torch.testing.assert_close(out.double(), case.dense(), atol=2e-5, rtol=1e-4)


@needs_triton
def test_padding_is_neither_written_nor_read():
    """A batch filled up for a graph: its rows' garbage must not reach the pool, nor slot 0 be overwritten."""
    case = Case([(20, 1), (3, 1)], 1, 2, 8, 4)
    attention, layer, meta = make_backend("triton", torch.float32), case.layer(), case.metadata()
    expected, left = case.run("triton")
    attention.prepare(
        replace(
            meta,
            slot_mapping=torch.cat([meta.slot_mapping, torch.tensor([-1, -1])]),
            query_start_loc=torch.arange(5, dtype=torch.int32),
            context_lens=torch.cat([meta.context_lens, torch.zeros(2, dtype=torch.int32)]),
            block_tables=torch.cat([meta.block_tables, torch.zeros_like(meta.block_tables)]),
        )
    )
    q, k, v = (torch.cat([x, torch.full_like(x, torch.nan)]) for x in map(case.packed, (case.q, case.k, case.v)))
    out = attention.forward(q, k, v, layer, case.scale)
    assert torch.equal(out[:2], expected)
    assert not out[2:].any()
    for mine, its in ((layer.k, left.k), (layer.v, left.v)):
        assert torch.equal(mine.nan_to_num(-1.0), its.nan_to_num(-1.0))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [32, 128, 256])
def test_half_precision_loses_no_more_than_its_rounding(dim, dtype):
    """On a GPU all is in 16 bits: the output keeps the dtype, and is the float64 one but for a few roundings."""
    case = Case([(0, 6), (3, 1), (0, 70)], 1, 2, dim, 4, scale=dim**-0.5)
    for stored in (case.q, case.k, case.v):
        stored[:] = [x.to(dtype) for x in stored]
    layer = case.empty_layer(dtype)
    layer.write(case.k[1][:3], case.v[1][:3], case.slots(1, 0, 3))
    attention = make_backend("triton", dtype)
    attention.prepare(case.metadata())
    out = attention.forward(*(case.packed(x) for x in (case.q, case.k, case.v)), layer, case.scale)
    assert out.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), case.dense(), atol=step, rtol=step)


def test_what_it_needs_is_said_at_the_start(monkeypatch):
    """Without a GPU, Triton itself would fail in the middle of the first step."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match=r"attention=triton: .*not on cpu; use auto"):
        resolve_attention("triton", CPU, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("ember.attention.choice.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ember-batch\[triton\]"):
        resolve_attention("triton", CPU, torch.float32)


def pool(dtype):
    return KVShape(n_layer=1, n_kv_head=1, head_dim=8, block_size=16, dtype=dtype)


def test_fp8_is_refused_where_nothing_reads_it(monkeypatch):
    """An older GPU would fail in the compiler, the CPU's kernel in numba, both after the model was loaded."""
    for name in ("reference", "batched", "triton"):
        check_pool(name, pool(FP8), torch.float32, CPU)
    with pytest.raises(ConfigError, match="kv_dtype=fp8: attention=cpu has no such pool; use int8"):
        check_pool("cpu", pool(FP8), torch.float32, CPU)
    with pytest.raises(ConfigError, match="kv_dtype=fp8: mps has no such numbers"):
        check_pool("batched", pool(FP8), torch.float32, torch.device("mps"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"8\.9 or more, this one has 8\.0; use int8"):
        check_pool("triton", pool(FP8), torch.bfloat16, torch.device("cuda"))
    check_pool("triton", pool(torch.int8), torch.bfloat16, torch.device("cuda"))


@needs_triton
def test_the_kernels_compile_for_a_gpu():
    """The interpreter takes types and names that the compiler refuses; no GPU is needed to compile for one.

    K/V must be copied 8 or 16 bytes at a time, asynchronously: one hint less, and keys are loaded number by number.
    """
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.attention.compile_triton"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [line for line in done.stdout.splitlines() if line.startswith(("decode", "prompt"))]
    assert len(kernels) == 6
    for line in kernels:
        assert "mma" in line
        assert "cp.async" in line
        assert "ld.global.b16" not in line
        assert "ld.global.b8" not in line

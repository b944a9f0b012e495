"""Linears with weights of 8 bits against the definition in whole numbers, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ember.model.quantized import Int8Linear, levels
from tests.model.other_processor import outputs_here_and_there

BITS = pytest.mark.parametrize("bits", [16, 8])
SHAPES = [(1, 1), (16, 4), (40, 769), (33, 1537), (100, 3073), (7, 5001)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def defined(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, bits: int = 16) -> np.ndarray:
    """The module's formula with numpy's own int32, row by row."""
    rows, largest, most = x.numpy(), np.abs(x.numpy()).max(1), np.float32(levels(x.shape[1], bits))
    scales = np.maximum(np.abs(weight.numpy()).max(1), np.finfo(np.float32).tiny) / np.float32(127)
    w = np.rint(weight.numpy() / scales[:, None]).astype(np.int32)
    with np.errstate(divide="ignore"):
        factors = np.where(largest > np.float32(1e-30), most / largest, np.float32(0))
    sums = np.rint(rows * factors[:, None]).astype(np.int32) @ w.T
    return sums.astype(np.float32) * scales * (largest / most)[:, None] + bias.numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@BITS
def test_every_sum_is_exact(shape, threads, bits):
    """Ragged ends of panels, pairs and blocks of k; rows that are no neighbours in memory; two threads' shares."""
    out, inner = shape
    weight, bias = normal(out, inner), normal(out, seed=1)
    x = normal(64, inner + 3, seed=2)[:, 1 : inner + 1]
    layer, before = Int8Linear(weight, bias, "none", bits), torch.get_num_threads()
    expected = defined(x, weight, bias, bits)
    try:
        torch.set_num_threads(threads)
        for height in (1, 2, 5, 6, 7, 13, 64):
            assert np.array_equal(layer(x[:height]).numpy(), expected[:height])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("inner", [64, 3072, 20000])
@BITS
def test_the_largest_sums_fit(inner, bits):
    """All numbers at their ends, of one sign or both: a sum past 32 bits would wrap, 16-bit pairs saturate."""
    ones = torch.ones(2, inner)
    mixed = torch.cat([ones, -ones, ones * torch.tensor([1.0, -1.0]).repeat(inner // 2)])
    found = Int8Linear(mixed, None, "none", bits)(mixed)
    assert np.array_equal(found.numpy(), defined(mixed, mixed, torch.zeros(6), bits))
    assert torch.allclose(found.diagonal(), torch.tensor(float(inner)))


@BITS
def test_rows_without_numbers(bits):
    """A row of zeros gives the bias; one with a NaN or an infinity gives NaN, and its neighbours what they are."""
    weight, bias, x = normal(20, 30), normal(20, seed=1), normal(5, 30, seed=2)
    layer = Int8Linear(weight, bias, "none", bits)
    whole = layer(x)
    broken = x.clone()
    broken[0], broken[1, 3], broken[2, 4], broken[3] = 0, torch.nan, -torch.inf, 1e-35
    found = layer(broken)
    assert torch.equal(found[0], bias)
    assert found[1:3].isnan().all()
    assert torch.allclose(found[3], bias)
    assert torch.equal(found[4], whole[4])


def test_what_is_added_comes_last():
    weight, x, more = normal(20, 30), normal(5, 30, seed=2), normal(5, 21, seed=3)[:, 1:]
    layer = Int8Linear(weight, None, "relu")
    assert torch.equal(layer(x, more), layer(x) + more)
    assert torch.equal(layer(x), Int8Linear(weight, None, "none")(x).relu())


def test_no_rows_are_fine():
    assert Int8Linear(normal(7, 5), None, "none")(torch.empty(0, 5)).shape == (0, 7)


@BITS
@pytest.mark.slow
def test_other_instructions_give_the_same_bits(tmp_path, bits):
    """A processor without AVX2 or with AVX-512: no instruction for two or four products, vectors of another width."""
    here, there = outputs_here_and_there(f"Int8Linear(weight, bias, 'gelu_new', {bits})", 1700, tmp_path)
    assert np.array_equal(here, there)

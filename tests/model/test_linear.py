"""The compiled linear layer against an obvious one, and its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, relu

from ember.model.linear import PackedLinear, PlainLinear, make_linear, narrowest
from ember.model.packed_matrix import PackedMatrix
from tests.model.other_processor import outputs_here_and_there

CPU_FLOAT = {"none": lambda x: x, "gelu_new": lambda x: gelu(x, approximate="tanh"), "gelu": gelu, "relu": relu}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 130),
    inner=st.sampled_from([1, 2, 7, 64, 383, 384, 385, 769, 1000]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    activation=st.sampled_from(sorted(CPU_FLOAT)),
    with_bias=st.booleans(),
    with_more=st.booleans(),
)
def test_it_is_the_product(rows, columns, inner, dtype, activation, with_bias, with_more):
    """Ragged ends of panels, tiles and blocks of k; rows that are no neighbours in memory."""
    weight, x = normal(columns, inner).to(dtype).float(), normal(rows, inner + 3, seed=1)[:, :inner]
    bias = normal(columns, seed=2) if with_bias else None
    more = normal(rows, columns + 1, seed=3)[:, 1:] if with_more else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias)
    expected = CPU_FLOAT[activation](expected) + (0 if more is None else more)
    found = PackedLinear(weight, bias, activation, dtype)(x, more)
    assert found.shape == (rows, columns)
    assert (found - expected).abs().max() <= 2e-5 * max(1.0, float(expected.abs().max()))


def test_every_sum_is_a_chain_of_fused_multiply_adds():
    """What the bits are, said apart from how the kernel computes them: so they hold on every machine."""
    weight, bias, x = normal(5, 900), normal(5, seed=1), normal(3, 900, seed=2)
    expected = np.repeat(bias.numpy()[None], 3, axis=0)
    for k in range(900):  # a product of two floats is exact in double; so are all but one sum in 2^29
        exact = np.outer(x[:, k].double(), weight[:, k].double())
        expected = (exact + expected).astype(np.float32)
    assert np.array_equal(PackedLinear(weight, bias, "none", torch.float32)(x).numpy(), expected)


def test_the_bits_do_not_follow_the_width_of_the_vectors(tmp_path):
    """A laptop without AVX-512 and a server with it must make the same rows."""
    here, there = outputs_here_and_there("make_linear(weight, bias, 'gelu_new')", 800, tmp_path)
    assert np.array_equal(here, there)


def test_no_rows_are_fine():
    assert make_linear(normal(7, 5))(torch.empty(0, 5)).shape == (0, 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_fit_into_16_bits_are_kept_in_16_bits(dtype):
    """Half the memory and half of what a small batch reads, at the same bits."""
    weight, x = normal(40, 30).to(dtype).float(), normal(9, 30, seed=1)
    assert narrowest(weight) == dtype
    assert torch.equal(make_linear(weight)(x), PackedLinear(weight, None, "none", torch.float32)(x))


def test_other_weights_stay_as_they_are():
    weight = normal(40, 30)
    assert narrowest(weight) == torch.float32
    assert torch.equal(PackedMatrix(weight, torch.float32).rows(torch.arange(40)), weight)


def test_elsewhere_it_is_pytorchs_own():
    layer = make_linear(normal(6, 5).bfloat16(), activation="relu")
    assert isinstance(layer, PlainLinear)
    x = normal(4, 5, seed=1).bfloat16()
    assert torch.equal(layer(x, torch.ones(4, 6).bfloat16()), layer(x) + 1)

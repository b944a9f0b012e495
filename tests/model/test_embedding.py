"""Rows of the embedding that are read out of a packed LM head."""

from __future__ import annotations

import pytest
import torch

from ember.model.embedding import PackedEmbedding, PlainEmbedding, token_embedding
from ember.model.linear import make_linear


def matrix(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(4096, 192), (50257, 16), (101, 24), (64, 7), (3, 31)], ids=str)
def test_rows_out_of_the_head_are_the_matrixs_own(shape):
    weight = matrix(*shape)
    found = token_embedding(weight, make_linear(weight))
    assert isinstance(found, PackedEmbedding)
    everything = torch.arange(len(weight))
    assert torch.equal(found(everything), weight)
    assert torch.equal(found(everything.flip(0)[:5]), weight.flip(0)[:5])
    assert found(everything[:0]).shape == (0, shape[1])


def test_a_head_of_other_numbers_gives_no_rows():
    """An untied head, or a packing that lies otherwise: its numbers would be taken for the embedding's."""
    weight = matrix(101, 24)
    found = token_embedding(weight, make_linear(matrix(101, 24).flip(0)))
    assert isinstance(found, PlainEmbedding)
    assert torch.equal(found(torch.arange(101)), weight)


@pytest.mark.parametrize("form", ["int8", "fp16"])
def test_the_rows_keep_their_precision_beside_a_head_of_fewer_bits(form):
    weight = matrix(101, 24)
    assert torch.equal(token_embedding(weight, make_linear(weight, form=form))(torch.arange(101)), weight)
    narrow = weight.bfloat16().float()
    assert torch.equal(token_embedding(narrow, make_linear(narrow, form=form))(torch.arange(101)), narrow)

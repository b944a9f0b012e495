"""Queries that share a prefix go through it together: the right ones, and without a bit of difference."""

from __future__ import annotations

from itertools import accumulate, count

import pytest
import torch

from ember.attention.base import AttentionMetadata
from ember.attention.query_tiles import QueryTiles
from tests.attention.test_backends import Case

BLOCK = 16


def tiles_of(*sequences: tuple[list[int], int], new: int = 1, num_threads: int = 2) -> list[tuple[list[int], int]]:
    """Sequences and shared positions of each tile; a sequence is its first blocks and how many more of its own."""
    fresh = count(1000)
    tables = [[*first, *(next(fresh) for _ in range(own))] for first, own in sequences]
    longest = max(map(len, tables))
    meta = AttentionMetadata(
        slot_mapping=torch.zeros(len(tables) * new, dtype=torch.long),
        query_start_loc=torch.tensor([0, *accumulate([new] * len(tables))], dtype=torch.int32),
        context_lens=torch.tensor([len(table) * BLOCK - 1 for table in tables], dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (longest - len(table)) for table in tables], dtype=torch.int32),
        block_size=BLOCK,
        max_query_len=new,
        max_context_len=longest * BLOCK - 1,
    )
    queries = QueryTiles.of(meta, num_threads)
    assert sorted(row for _, row, n, _ in queries.parts.tolist() for row in range(row, row + n)) == [
        *range(len(tables) * new)
    ]
    assert all(n <= 16 for _, _, n, _ in queries.tiles.tolist())
    return [([queries.parts[p, 0] for p in range(i, j)], shared) for i, j, _, shared in queries.tiles.tolist()]


TEMPLATE = list(range(16))


def test_rows_of_one_template_go_together():
    """Each alone would read the template's keys again."""
    found = tiles_of(*[(TEMPLATE, 3)] * 40)
    assert sorted(len(members) for members, _ in found) == [8, 16, 16]
    assert {shared for _, shared in found} == {256}


def test_a_tile_holds_few_queries_of_many_or_many_of_one():
    """Drafts of 5 tokens: three sequences fill a tile. 40 tokens of a prompt share their keys already."""
    assert sorted(len(members) for members, _ in tiles_of(*[(TEMPLATE, 3)] * 7, new=5)) == [1, 3, 3]
    assert {(len(members), shared) for members, shared in tiles_of(*[(TEMPLATE, 3)] * 2, new=40)} == {(1, 0)}


def test_samples_go_with_those_of_their_prompt():
    """Two prompts of a template, eight samples each: one tile for all would read each sample's prompt eight times."""
    prompts = [[*TEMPLATE, *range(100 * i, 100 * i + 16)] for i in (1, 2)]
    found = tiles_of(*[(prompts[i % 2], 1) for i in range(16)])
    assert [(sorted(i % 2 for i in members), shared) for members, shared in found] == [([0] * 8, 512), ([1] * 8, 512)]


def test_one_that_shares_little_does_not_hold_back_the_others():
    """The least that a tile's members have in common is what they share."""
    found = tiles_of((TEMPLATE[:4], 20), *[(TEMPLATE, 3)] * 5)
    assert sorted((len(members), shared) for members, shared in found) == [(1, 0), (5, 256)]


@pytest.mark.parametrize("first", [TEMPLATE[:3], [*TEMPLATE[:2], 99, *TEMPLATE[3:]], []])
def test_no_tile_of_keys_no_sharing(first):
    """Less than 64 positions in common, or a block before the last common one that differs."""
    assert {(len(members), shared) for members, shared in tiles_of((TEMPLATE, 3), (first, 19))} == {(1, 0)}


def case_of_shared_blocks(num_shared: int, lengths: list[tuple[int, int]], **shape: int) -> Case:
    case = Case(lengths, **shape)
    for s in range(1, len(lengths)):
        case.tables[s] = torch.cat([case.tables[0][:num_shared], case.tables[s][num_shared:]])
        for x in (case.k, case.v):
            x[s][: num_shared * case.block_size] = x[0][: num_shared * case.block_size]
    return case


@pytest.mark.parametrize(
    ("block_size", "num_shared", "dtype"),
    [(16, 9, torch.float32), (7, 20, torch.float32), (64, 2, torch.int8), (24, 6, torch.float32)],
)
@pytest.mark.parametrize("group", [1, 3])
def test_beside_others_a_query_has_the_bits_that_it_has_alone(block_size, num_shared, dtype, group):
    """A neighbour's rows written over, a prefix seen too far, or not by all: behind a window all run on their own."""
    lengths = [(150, 1), (163, 1), (210, 3), (145, 1), (300, 1), (149, 30), (170, 1)]
    case = case_of_shared_blocks(num_shared, lengths, kv_heads=2, group=group, head_dim=16, block_size=block_size)
    assert QueryTiles.of(case.metadata(), 2).tiles[:, 3].max() == num_shared * block_size // 64 * 64
    together, _ = case.run("cpu", dtype)
    case.window = 1000
    assert torch.equal(case.run("cpu", dtype)[0], together)
    if dtype == torch.float32:
        torch.testing.assert_close(together.double(), case.dense(), atol=2e-5, rtol=1e-4)

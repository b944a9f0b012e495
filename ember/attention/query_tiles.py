"""Which queries the CPU kernel takes together, so that they share the reading of keys and values.

    part    neighbouring queries of one sequence
    tile    a part of up to 16 queries, or the few queries each of several sequences whose block tables begin alike:
            a prefix found in the cache, samples of one prompt, beams. They go through what they share as one.

Only who reads beside whom is chosen here; what a query computes, and in which order, is the same in any tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ember.attention.base import AttentionMetadata
from ember.attention.cpu_kernel import TILE

QUERY_TILE = 16
"""Most queries that share a pass over their keys: a tile's K/V stays in the cache while they do."""

Ints = np.ndarray
Group = tuple[list[int], int]
"""Sequences, and how many tiles of keys their tables have in common."""


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The queries of a step.

    Attributes:
        parts: [m, 4] int64: sequence, first row of q, number of queries, position of the first.
        tiles: [n, 4] int64: first part, where they end, queries in all, leading positions that the parts share.
        costs: [n + 1] int64: what the tiles before the i-th cost, in positions passed through.
    """

    parts: Ints
    tiles: Ints
    costs: Ints

    @staticmethod
    def of(meta: AttentionMetadata, num_threads: int) -> QueryTiles:
        """All queries of a step, ordered so that equal slices of the tiles cost about the same."""
        starts = meta.query_start_loc.numpy().astype(np.int64)
        lengths = np.diff(starts)
        positions = meta.context_lens.numpy() - lengths
        groups = _groups(meta.block_tables.numpy(), meta.block_size, positions, lengths)
        together = [sequence for members, _ in groups for sequence in members]
        alone = np.setdiff1d(np.arange(len(lengths)), together) if together else np.arange(len(lengths))
        sequence, offset = _cut(alone, lengths)
        count = np.minimum(lengths[sequence] - offset, QUERY_TILE)
        parts = np.stack([sequence, starts[sequence] + offset, count, positions[sequence] + offset], 1)
        first = np.array([len(members) for members, _ in groups] + [1] * len(sequence)).cumsum()
        shared = np.array([tiles * TILE for _, tiles in groups] + [0] * len(sequence))
        if together:
            own = np.stack([together, starts[together], lengths[together], positions[together]], 1)
            parts = np.concatenate([own, parts])
        return _dealt(parts, np.diff(first, prepend=0), shared, num_threads)

    def apart(self) -> QueryTiles:
        """The same with nothing shared: behind a window, neighbours do not see the same tiles of keys."""
        return replace(self, tiles=self.tiles * [1, 1, 1, 0])

    def arrays(self) -> tuple[Ints, Ints, Ints]:
        """As the kernel takes them."""
        return self.parts, self.tiles, self.costs


def _cut(sequences: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Each sequence's queries in parts of up to QUERY_TILE: the sequence of each part, and where in it that begins."""
    num_parts = -(-lengths[sequences] // QUERY_TILE)
    index = np.arange(num_parts.sum()) - np.repeat(num_parts.cumsum() - num_parts, num_parts)
    return np.repeat(sequences, num_parts), index * QUERY_TILE


def _dealt(parts: Ints, num_parts: Ints, shared: Ints, num_threads: int) -> QueryTiles:
    """Tiles of so many parts each, dealt to the threads, the dearest first. Rows are computed four at a time."""
    end = num_parts.cumsum()
    first = end - num_parts
    count, position = parts[:, 2], parts[:, 3]
    own = (position + count - np.repeat(shared, num_parts)) * (count + 3)
    num_queries = np.add.reduceat(count, first)
    cost = np.add.reduceat(own, first) + shared * (num_queries + 3)
    dearest = np.argsort(-cost, kind="stable")
    order = np.concatenate([dearest[thread::num_threads] for thread in range(num_threads)])
    tiles = np.stack([first, end, num_queries, shared], 1)[order]
    return QueryTiles(np.ascontiguousarray(parts), tiles, np.concatenate([[0], cost[order].cumsum()]))


def _groups(tables: Ints, block_size: int, positions: Ints, lengths: Ints) -> list[Group]:
    """Sequences with few queries each whose tables begin with the same blocks, for at least one tile of keys."""
    last = (TILE - 1) // block_size
    short = np.flatnonzero((lengths < QUERY_TILE) & (positions >= TILE))
    if len(short) < 2 or len(np.unique(tables[short, last])) == len(short):
        return []
    ordered = np.array(sorted(short, key=lambda sequence: tables[sequence].tobytes()))  # equal beginnings lie together
    same = (tables[ordered[1:]] == tables[ordered[:-1]]).cumprod(1).sum(1) * block_size
    common = np.minimum(same, np.minimum(positions[ordered[1:]], positions[ordered[:-1]])) // TILE
    return [group for group in _joined(ordered.tolist(), common.tolist(), lengths) if group[1]]


def _joined(ordered: list[int], common: list[int], lengths: Ints) -> Iterator[Group]:
    """Cut a row of sequences into groups, so that little is read twice; `common[i]`: what i and i + 1 share.

    One more joins if the tiles that are then read once for all, instead of once for each, do not become fewer, unless a
    lonely one's next neighbour has more in common with it than the one before.
    """
    members, shared, room = [ordered[0]], 0, QUERY_TILE - int(lengths[ordered[0]])
    for i, sequence in enumerate(ordered[1:]):
        begins, after = len(members) == 1, common[i + 1] if i + 1 < len(common) else 0
        both = common[i] if begins else min(shared, common[i])
        worth = both * len(members) >= shared * (len(members) - 1) and not (begins and common[i] < after)
        if both and worth and lengths[sequence] <= room:
            members, shared, room = [*members, sequence], both, room - int(lengths[sequence])
        else:
            yield members, shared
            members, shared, room = [sequence], 0, QUERY_TILE - int(lengths[sequence])
    yield members, shared

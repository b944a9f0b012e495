"""Paged attention over the whole packed batch in a few large calls of PyTorch's own attention.

Queries are cut into tiles of up to 64 of one sequence (a decoding sequence is a tile of one). Tiles of like context
length are gathered together and attended in one call; padding stays inside that call:

    context   |#####|         \
              |######|         } one group: K/V gathered to [tiles, heads, longest context, head_dim]
              |#######|       /
              |###################|    another group
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from ember.attention.base import AttentionMetadata
from ember.cache.kv_pool import KVLayer

TILE = 64
"""Most queries in a tile."""

GROUP_SLOTS = 32_768
"""Most K/V slots gathered at a time, so that a gathered group stays small beside the pool."""


@dataclass(slots=True)
class _Group:
    """Tiles attended in one call: `queries` [g, w] rows of q, `slots` [g, c] of K/V, `mask` [g, 1, w, c] of seen.

    `last_seen` [g, w] is each query's own position.
    """

    queries: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    last_seen: torch.Tensor
    valid: torch.Tensor

    def seen(self, window: int | None) -> torch.Tensor:
        """Which slots each query sees of the last `window` up to its own, [g, 1, w, c]."""
        if window is None:
            return self.mask
        position = torch.arange(self.slots.shape[1], device=self.slots.device)
        return self.mask & (position > self.last_seen[:, None, :, None] - window)


class BatchedAttention:
    """The default where there is no kernel for the device: runs wherever PyTorch does, over a pool of any dtype."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        """K/V are turned into the queries' dtype as they are gathered."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Group the step's tiles."""
        self._slot_mapping = metadata.slot_mapping
        first, count, context, sequence = _tiles(metadata)
        self._groups = [
            _group(metadata, first[rows], count[rows], context[rows], sequence[rows])
            for rows in _similar(count, context)
        ]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        layer.write(k, v, self._slot_mapping)
        out = torch.empty_like(q)
        for group in self._groups:
            attended = _attend(q[group.queries], *layer.gather(group.slots), group.seen(window), scale)
            out[group.queries[group.valid]] = attended[group.valid]
        return out


def _tiles(meta: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut every sequence's queries into tiles: first row of q, number of queries, context length, sequence; [n]."""
    device = meta.block_tables.device
    starts = meta.query_start_loc.long()
    lengths = starts.diff()
    tiles = (lengths + TILE - 1) // TILE
    sequence = torch.repeat_interleave(torch.arange(len(tiles), device=device), tiles)
    nth = torch.arange(len(sequence), device=device) - (tiles.cumsum(0) - tiles)[sequence]
    count = (lengths[sequence] - nth * TILE).clamp(max=TILE)
    first = starts[:-1][sequence] + nth * TILE
    context = meta.context_lens.long()[sequence] - lengths[sequence] + nth * TILE + count
    return first, count, context, sequence


def _similar(count: torch.Tensor, context: torch.Tensor) -> list[torch.Tensor]:
    """Index sets of tiles to attend together: decodes apart from prefills, like context lengths side by side."""
    groups: list[torch.Tensor] = []
    for members in ((count == 1).nonzero()[:, 0], (count > 1).nonzero()[:, 0]):
        order = members[context[members].argsort(descending=True, stable=True)]
        lengths = context[order].tolist()
        begin = 0
        while begin < len(lengths):
            longest = lengths[begin]
            end = begin + 1
            while end < len(lengths) and (end - begin + 1) * longest <= GROUP_SLOTS and 2 * lengths[end] > longest:
                end += 1
            groups.append(order[begin:end])
            begin = end
    return groups


def _group(
    meta: AttentionMetadata, first: torch.Tensor, count: torch.Tensor, context: torch.Tensor, sequence: torch.Tensor
) -> _Group:
    """Padded rows repeat a real query or slot, so that only real K/V is ever read."""
    device = first.device
    nth = torch.arange(int(count.max()), device=device)
    position = torch.arange(int(context.max()), device=device)
    valid = nth < count[:, None]
    queries = first[:, None] + torch.minimum(nth, count[:, None] - 1)
    clamped = torch.minimum(position, context[:, None] - 1)
    blocks = meta.block_tables[sequence[:, None], clamped // meta.block_size].long()
    last_seen = torch.minimum((context - count)[:, None] + nth, context[:, None] - 1)
    mask = (position <= last_seen[:, :, None])[:, None]
    return _Group(queries, blocks * meta.block_size + clamped % meta.block_size, mask, last_seen, valid)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Q [g, w, H, D] over keys, values [g, c, H_kv, D]; the H / H_kv heads that share K/V become queries of one."""
    g, w, heads, dim = q.shape
    kv_heads = keys.shape[2]
    grouped = q.view(g, w, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4).reshape(g, kv_heads, -1, dim)
    out = scaled_dot_product_attention(
        grouped,
        keys.to(q.dtype).transpose(1, 2),
        values.to(q.dtype).transpose(1, 2),
        attn_mask=mask.repeat(1, 1, heads // kv_heads, 1),
        scale=scale,
    )
    return out.view(g, kv_heads, heads // kv_heads, w, dim).permute(0, 3, 1, 2, 4).reshape(g, w, heads, dim)

"""Who holds which KV block: integers only, no tensors.

The pool is `num_blocks` blocks of `block_size` slots. A sequence's block table lists its blocks in order; the K/V
of its token `p` lies in slot `p % block_size` of block `table[p // block_size]` (vLLM's PagedAttention,
arXiv:2309.06180).
"""

from __future__ import annotations

from array import array


class BlockManager:
    """Free list and block tables. Taking and giving back a block is O(1)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache
        self._tables: dict[int, array[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks with reusable K/V that no sequence holds; none without a prefix cache."""
        return 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` slots take up."""
        return -(-num_tokens // self.block_size)

    def grow(self, request_id: int, num_tokens: int) -> bool:
        """Extend the table to hold `num_tokens` tokens: all the blocks that takes, or none and False."""
        table = self._tables.get(request_id)
        missing = self.blocks_for(num_tokens) - (0 if table is None else len(table))
        if missing > len(self._free):
            return False
        if table is None:
            table = self._tables[request_id] = array("i")
        for _ in range(missing):
            table.append(self._free.pop())
        return True

    def shrink(self, request_id: int, num_tokens: int) -> None:
        """Give back the blocks beyond those that `num_tokens` tokens take up."""
        table = self._tables[request_id]
        while len(table) > self.blocks_for(num_tokens):
            self._free.append(table.pop())

    def free(self, request_id: int) -> None:
        """Give back all blocks of a sequence; one without blocks is fine."""
        self._free.extend(reversed(self._tables.pop(request_id, array("i"))))

    def block_table(self, request_id: int) -> array[int]:
        """The blocks of a sequence in order. The caller must not change it."""
        return self._tables[request_id]

    def check_integrity(self) -> None:
        """Assert that every block is held once: by one table or by the free list.

        Raises:
            AssertionError: a block is lost, doubled or out of range.
        """
        held = sorted([*self._free, *(block for table in self._tables.values() for block in table)])
        assert held == list(range(self.num_blocks)), f"blocks are lost or doubled: {held}"
        assert self.num_used + self.num_cached + self.num_free == self.num_blocks

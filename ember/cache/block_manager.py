"""Who holds which KV block: integers only, no tensors.

The pool is `num_blocks` blocks of `block_size` slots. A sequence's block table lists its blocks in order; the K/V
of its token `p` lies in slot `p % block_size` of block `table[p // block_size]` (vLLM's PagedAttention,
arXiv:2309.06180).

A block is held by any number of tables (its reference count), or idle with K/V that the prefix cache finds, or free:

    free --grow--> held --free--> idle, if published, else free
                     ^--reuse-------|--evict, least recently held first--> held by another
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from ember.cache.prefix_cache import NO_HIT, PrefixCache, PrefixHit

Copies = list[tuple[int, int]]
"""(source, destination): blocks whose K/V must be copied before a step writes."""


class BlockManager:
    """Free list, reference counts and block tables. Taking, sharing and giving back a block is O(1).

    Args:
        prefixes: finds blocks to reuse; None: nothing is ever found.
        reserved_tokens: a sequence takes the blocks of at least that many tokens, whatever it has.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefixes: PrefixCache | None = None, reserved_tokens: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        self._prefixes = prefixes
        self._reserved_tokens = reserved_tokens
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache
        self._idle: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
        self._ref_counts = array("i", [0]) * num_blocks
        self._tables: dict[int, array[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, with nothing to reuse in them."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, with K/V to reuse until they are evicted."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds; a shared one counts once."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens takes up."""
        return -(-max(num_tokens, self._reserved_tokens) // self.block_size)

    def lookup(self, request_id: int, token_ids: Sequence[int]) -> PrefixHit:
        """What of a waiting sequence's K/V is in the pool already."""
        return NO_HIT if self._prefixes is None else self._prefixes.match(request_id, token_ids)

    def has_room(self, hit: PrefixHit, num_tokens: int, spare: int) -> bool:
        """Whether a sequence of `num_tokens` fits behind its hit, with `spare` blocks left over for others to grow."""
        taken = self.blocks_for(num_tokens) - len(hit.blocks)
        revived = sum(not self._ref_counts[block] for block in hit.blocks)
        spare = 0 if self._reserved_tokens else spare
        return taken + revived + spare <= self.num_available

    def reuse(self, request_id: int, token_ids: Sequence[int], hit: PrefixHit) -> int:
        """Begin a sequence's table with the blocks of its hit; returns the number of tokens whose K/V they hold."""
        if self._prefixes is not None:
            self._prefixes.start(request_id, token_ids, hit)
        for block in hit.blocks:
            self._hold(block)
        self._tables[request_id] = array("i", hit.blocks)
        return len(hit.blocks) * self.block_size

    def grow(self, request_id: int, num_tokens: int, start: int | None = None) -> Copies | None:
        """Make the tokens from `start` up to `num_tokens` writable: all the blocks that takes, or none and None.

        Args:
            start: the first token that is to be written; None: those beyond the table.

        Returns:
            The copies to make first: a block that others hold too is replaced by one of its own (copy on write).
        """
        table = self._tables.get(request_id, array("i"))
        first = len(table) if start is None else start // self.block_size
        shared = [index for index in range(first, len(table)) if self._ref_counts[table[index]] > 1]
        missing = self.blocks_for(num_tokens) - len(table)
        if max(missing, 0) + len(shared) > self.num_available:
            return None
        self._tables[request_id] = table
        copies = [self._replace(table, index) for index in shared]
        for _ in range(missing):
            table.append(self._take())
        return copies

    def publish(self, request_id: int, token_ids: Sequence[int], num_tokens: int) -> None:
        """Let others reuse the full blocks of a sequence's first `num_tokens` tokens, whose K/V are final."""
        if self._prefixes is not None:
            self._prefixes.publish(request_id, token_ids, num_tokens, self._tables[request_id])

    def fork(self, request_id: int, child_id: int) -> None:
        """Give a new sequence the table of another: all blocks shared, each copied once one of them writes it."""
        for block in self._tables[request_id]:
            self._ref_counts[block] += 1
        self._tables[child_id] = self._tables[request_id][:]
        if self._prefixes is not None:
            self._prefixes.fork(request_id, child_id)

    def shrink(self, request_id: int, num_tokens: int) -> None:
        """Give back the blocks beyond those that `num_tokens` tokens take up."""
        table = self._tables[request_id]
        while len(table) > self.blocks_for(num_tokens):
            self._release(table.pop())

    def free(self, request_id: int) -> None:
        """Give back all blocks of a sequence; one without blocks is fine. Its tail will be evicted before its head."""
        for block in reversed(self._tables.pop(request_id, array("i"))):
            self._release(block)
        if self._prefixes is not None:
            self._prefixes.drop(request_id)

    def block_table(self, request_id: int) -> array[int]:
        """The blocks of a sequence in order. The caller must not change it."""
        return self._tables[request_id]

    def num_kept_tokens(self, request_id: int) -> int:
        """Tokens of a sequence that it would find again if it gave up its blocks: others hold them, published."""
        count = 0
        for block in self._tables[request_id]:
            if self._ref_counts[block] < 2 or self._prefixes is None or block not in self._prefixes:
                break
            count += self.block_size
        return count

    def num_own(self, request_id: int) -> int:
        """Blocks that nobody else holds."""
        return sum(self._ref_counts[block] == 1 for block in self._tables[request_id])

    def live_tokens(self, counts: Mapping[int, int]) -> int:
        """Slots in use by sequences with that many tokens each; those of a shared block count once.

        All that is empty lies at a table's end, and those that share a last block have the same tokens in it.
        """
        tables = ((self._tables[request_id], count) for request_id, count in counts.items())
        empty = {table[-1]: len(table) * self.block_size - count for table, count in tables}
        return self.num_used * self.block_size - sum(empty.values())

    def clear_cache(self) -> None:
        """Forget all reusable K/V; what sequences hold stays theirs."""
        if self._prefixes is not None:
            self._prefixes.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def check_integrity(self) -> None:
        """Assert that every block is held, idle or free, once, and that its count is that of the tables it is in.

        Raises:
            AssertionError: a block is lost, doubled, out of range, wrongly counted, or reusable without being known.
        """
        counts = Counter(block for table in self._tables.values() for block in table)
        places = sorted([*self._free, *self._idle, *counts])
        assert places == list(range(self.num_blocks)), f"blocks are lost or doubled: {places}"
        wrong = {block: count for block, count in enumerate(self._ref_counts) if count != counts[block]}
        assert not wrong, f"reference counts are wrong: {wrong}"
        assert self.num_used == len(counts)
        for table in self._tables.values():
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
        if self._prefixes is None:
            assert not self._idle
            return
        self._prefixes.check_integrity()
        assert all(block in self._prefixes for block in self._idle), "an idle block that nobody can find"
        assert not any(block in self._prefixes for block in self._free), "a free block that could be reused"

    def _take(self) -> int:
        """A block to write, out of the cache if no other is left."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._prefixes is not None
            block, _ = self._idle.popitem(last=False)
            self._prefixes.forget(block)
            self.num_evicted += 1
        self._ref_counts[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if not self._ref_counts[block]:
            del self._idle[block]
        self._ref_counts[block] += 1

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if self._prefixes is not None and block in self._prefixes:
            self._idle[block] = None
        else:
            self._free.append(block)

    def _replace(self, table: array[int], index: int) -> tuple[int, int]:
        source, table[index] = table[index], self._take()
        self._release(source)
        return source, table[index]

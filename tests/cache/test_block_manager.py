"""The block manager against a plain model of it: who holds which block, and never one block twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ember.cache.block_manager import BlockManager

IDS = st.integers(0, 5)


class BlockManagerMachine(RuleBasedStateMachine):
    """Guards against lost, doubled and surplus blocks after any history of grow and free."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.blocks = BlockManager(num_blocks, block_size)
        self.tokens = {}
        self.tables = {}

    def _needed(self, num_tokens):
        return (num_tokens + self.blocks.block_size - 1) // self.blocks.block_size

    @rule(request_id=IDS, more=st.integers(0, 20))
    def grow(self, request_id, more):
        """All blocks or none: a refused grow changes nothing; a granted one only appends."""
        wanted = self.tokens.get(request_id, 0) + more
        old = self.tables.get(request_id, [])
        free = self.blocks.num_free
        missing = self._needed(wanted) - len(old)
        granted = self.blocks.grow(request_id, wanted) is not None
        assert granted == (missing <= free)
        if granted:
            self.tokens[request_id] = wanted
            table = self.tables[request_id] = list(self.blocks.block_table(request_id))
            assert table[: len(old)] == old
        assert self.blocks.num_free == free - (missing if granted else 0)

    @rule(request_id=IDS)
    def free(self, request_id):
        """Freeing gives back exactly what was held; freeing an unknown id is no error."""
        held = len(self.tables.pop(request_id, []))
        self.tokens.pop(request_id, None)
        before = self.blocks.num_free
        self.blocks.free(request_id)
        assert self.blocks.num_free == before + held

    @invariant()
    def sound(self):
        """No block is lost or doubled, and no sequence has more than one partly filled block."""
        self.blocks.check_integrity()
        held = [block for table in self.tables.values() for block in table]
        assert len(set(held)) == len(held) == self.blocks.num_used
        for request_id, table in self.tables.items():
            assert len(table) == self._needed(self.tokens[request_id])
            assert list(self.blocks.block_table(request_id)) == table


BlockManagerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
TestBlockManager = BlockManagerMachine.TestCase


def test_refused_grow_takes_nothing():
    """A grow that is one block short must not keep the blocks it could get: they would be lost to all."""
    blocks = BlockManager(3, 2)
    assert blocks.grow(0, 2) is not None
    assert blocks.grow(1, 5) is None
    assert blocks.num_free == 2
    assert blocks.grow(1, 4) is not None
    assert blocks.grow(0, 3) is None
    assert len(blocks.block_table(0)) == 1
    blocks.check_integrity()


@pytest.mark.parametrize(("tokens", "needed"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(tokens, needed):
    """Off by one at a block's edge would waste a block a sequence, or write past the table."""
    assert BlockManager(4, 16).blocks_for(tokens) == needed


def test_growing_within_the_last_block_takes_none():
    """A decode step inside a block must cost no block."""
    blocks = BlockManager(2, 4)
    for tokens in range(1, 5):
        assert blocks.grow(7, tokens) is not None
        assert blocks.num_used == 1
    assert blocks.grow(7, 5) is not None
    assert blocks.num_used == 2
    assert blocks.grow(7, 9) is None


def test_growing_to_fewer_tokens_keeps_the_table():
    """A table is append-only: asking for less than it holds must neither shrink it nor fail."""
    blocks = BlockManager(3, 2)
    assert blocks.grow(0, 6) is not None
    assert blocks.grow(0, 1) is not None
    assert len(blocks.block_table(0)) == 3
    blocks.check_integrity()


def test_check_integrity_sees_a_lost_and_a_doubled_block():
    """The check that all other tests lean on must itself see what it is for."""
    lost = BlockManager(4, 1)
    lost._free.pop()
    doubled = BlockManager(4, 1)
    doubled.grow(0, 1)
    doubled._free[-1] = doubled.block_table(0)[0]
    for broken in (lost, doubled):
        with pytest.raises(AssertionError, match="lost or doubled"):
            broken.check_integrity()


def test_counts_add_up():
    """used + cached + free = total, always."""
    blocks = BlockManager(5, 3)
    blocks.grow(0, 7)
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (3, 0, 2)

"""The block manager against a plain model of it: who holds which block, what is in it, and what may be reused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ember.cache.block_manager import BlockManager
from ember.cache.prefix_cache import PrefixCache, strong_digest

IDS = st.integers(0, 5)
TOKENS = st.integers(0, 1)
DIGESTS = {
    "strong": strong_digest,
    "constant": lambda data: b"same",
    "one bit": lambda data: bytes([sum(data) % 2]),
    "not chained": lambda data: data[-4:],
}
"""Hashes from good to useless: none may lead to a wrong block."""


class BlockManagerMachine(RuleBasedStateMachine):
    """Any history of starting, growing, writing, forking, shrinking, publishing and freeing, with what slots hold.

    Guards against: a block counted free while shared, lost or doubled; K/V found under other tokens; a write into a
    block that others read; surplus blocks; an eviction of what is in use.
    """

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), digest=st.sampled_from(sorted(DIGESTS)))
    def start(self, num_blocks, block_size, digest):
        self.digest = digest
        self.blocks = BlockManager(num_blocks, block_size, PrefixCache(block_size, b"model", DIGESTS[digest]))
        self.slots = {}  # (block, offset) -> (token there, all tokens before it): what its K/V depend on
        self.tokens = {}  # request -> the tokens whose K/V are in the pool

    @rule(request_id=IDS, prompt=st.lists(TOKENS, min_size=1, max_size=10))
    def begin(self, request_id, prompt):
        """A hit covers whole blocks and never the last token; what it holds was computed for these very tokens."""
        if request_id in self.tokens:
            return
        hit = self.blocks.lookup(request_id, prompt)
        assert hit == self.blocks.lookup(request_id, prompt), "looking changes nothing"
        revived = self._revived(hit)
        found = self.blocks.reuse(request_id, prompt, hit)
        assert found == len(hit.blocks) * self.blocks.block_size <= len(prompt) - 1
        assert revived == len(hit.blocks) - self._shared(hit.blocks, request_id)
        self.tokens[request_id] = prompt[:found]
        self._write(request_id, prompt[found:])

    def _revived(self, hit):
        held = {block for i in self.tokens for block in self.blocks.block_table(i)}
        return sum(block not in held for block in hit.blocks)

    def _shared(self, blocks, request_id):
        others = {block for i in self.tokens if i != request_id for block in self.blocks.block_table(i)}
        return sum(block in others for block in blocks)

    @rule(request_id=IDS, more=st.lists(TOKENS, max_size=10), surplus=st.integers(0, 5))
    def append(self, request_id, more, surplus):
        """Tokens after those that are there, as a step writes them; now and then room for more is asked for."""
        if request_id in self.tokens:
            self._write(request_id, more, surplus)

    def _write(self, request_id, new, surplus=0):
        start = len(self.tokens[request_id])
        size, table = self.blocks.block_size, list(self.blocks.block_table(request_id))
        end = start + len(new) + surplus
        shared = self._shared(table[start // size :], request_id)
        needed = max(0, -(-end // size) - len(table)) + shared
        available = self.blocks.num_available
        copies = self.blocks.grow(request_id, end, start)
        assert (copies is not None) == (needed <= available), "all or nothing"
        if copies is None:
            assert list(self.blocks.block_table(request_id)) == table
            assert self.blocks.num_available == available
            return
        assert len(copies) == shared
        assert self.blocks.num_available == available - needed
        for source, destination in copies:
            for offset in range(size):
                self.slots[destination, offset] = self.slots.get((source, offset))
        table = self.blocks.block_table(request_id)
        tokens = self.tokens[request_id]
        for position in range(start, start + len(new)):
            tokens.append(new[position - start])
            self.slots[table[position // size], position % size] = tuple(tokens)

    @rule(request_id=IDS)
    def publish(self, request_id):
        """Twice is as good as once."""
        for _ in range(2 if request_id in self.tokens else 0):
            self.blocks.publish(request_id, self.tokens[request_id], len(self.tokens[request_id]))

    @rule(request_id=IDS, child_id=IDS)
    def fork(self, request_id, child_id):
        """A fork costs no block."""
        if request_id not in self.tokens or child_id in self.tokens:
            return
        available = self.blocks.num_available
        self.blocks.fork(request_id, child_id)
        self.tokens[child_id] = list(self.tokens[request_id])
        assert self.blocks.num_available == available

    @rule(request_id=IDS)
    def shrink(self, request_id):
        """Gives back the surplus, and nothing else."""
        if request_id in self.tokens:
            count = len(self.tokens[request_id])
            self.blocks.shrink(request_id, count)
            assert len(self.blocks.block_table(request_id)) == self.blocks.blocks_for(count)

    @rule(request_id=IDS)
    def free(self, request_id):
        """Freeing makes available what no other holds; freeing an unknown id is no error."""
        own = 0
        if request_id in self.tokens:
            table = self.blocks.block_table(request_id)
            own = len(table) - self._shared(table, request_id)
            assert own == self.blocks.num_own(request_id)
            del self.tokens[request_id]
        available = self.blocks.num_available
        self.blocks.free(request_id)
        assert self.blocks.num_available == available + own

    @precondition(lambda self: self.tokens)
    @rule()
    def live(self):
        """Each slot in use counts once, however many share it."""
        if any(len(self.blocks.block_table(i)) > self.blocks.blocks_for(len(t)) for i, t in self.tokens.items()):
            return  # tables with a surplus differ in their last block
        size = self.blocks.block_size
        slots = {
            (self.blocks.block_table(i)[p // size], p % size) for i, t in self.tokens.items() for p in range(len(t))
        }
        counts = {i: len(tokens) for i, tokens in self.tokens.items() if tokens}
        assert self.blocks.live_tokens(counts) == len(slots)

    @rule()
    def clear(self):
        """Nothing is found any more; what is held stays."""
        self.blocks.clear_cache()
        assert self.blocks.num_cached == 0
        assert not self.blocks.lookup(99, [0] * 9).blocks
        self.blocks.free(99)

    @invariant()
    def every_slot_holds_what_its_readers_wrote(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        size = self.blocks.block_size
        for request_id, tokens in self.tokens.items():
            table = self.blocks.block_table(request_id)
            for position in range(len(tokens)):
                held = self.slots[table[position // size], position % size]
                assert held == tuple(tokens[: position + 1]), f"{self.digest}: request {request_id} reads others' K/V"


BlockManagerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True
)
TestBlockManager = BlockManagerMachine.TestCase


def make_blocks(num_blocks=8, block_size=2, **cache):
    return BlockManager(num_blocks, block_size, PrefixCache(block_size, **cache))


def compute(blocks, request_id, tokens):
    """Begin a request, give it its blocks and publish them; returns how many tokens it found."""
    found = blocks.reuse(request_id, tokens, blocks.lookup(request_id, tokens))
    assert blocks.grow(request_id, len(tokens), found) == []
    blocks.publish(request_id, tokens, len(tokens))
    return found


def test_refused_grow_takes_nothing():
    """A grow that is one block short must not keep the blocks it could get: they would be lost to all."""
    blocks = BlockManager(3, 2)
    assert blocks.grow(0, 2) == []
    assert blocks.grow(1, 5) is None
    assert blocks.num_free == 2
    assert blocks.grow(1, 4) == []
    assert blocks.grow(0, 3) is None
    assert len(blocks.block_table(0)) == 1
    blocks.check_integrity()


@pytest.mark.parametrize(("tokens", "needed"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(tokens, needed):
    """Off by one at a block's edge would waste a block a sequence, or write past the table."""
    assert BlockManager(4, 16).blocks_for(tokens) == needed


def test_a_reservation_is_taken_at_once_and_kept():
    """The baseline must really hold what it reserves, else paging is measured against nothing."""
    blocks = BlockManager(8, 4, reserved_tokens=14)
    assert blocks.grow(0, 1) == []
    assert blocks.num_used == 4
    assert blocks.grow(0, 14) == []
    assert blocks.num_used == 4
    blocks.shrink(0, 2)
    assert blocks.num_used == 4
    assert blocks.live_tokens({0: 3}) == 3
    assert blocks.grow(1, 1) == []
    assert blocks.grow(2, 1) is None
    blocks.check_integrity()


def test_growing_within_the_last_block_takes_none():
    """A decode step inside a block must cost no block."""
    blocks = BlockManager(2, 4)
    for tokens in range(1, 5):
        assert blocks.grow(7, tokens) == []
        assert blocks.num_used == 1
    assert blocks.grow(7, 5) == []
    assert blocks.num_used == 2
    assert blocks.grow(7, 9) is None


def test_growing_to_fewer_tokens_keeps_the_table():
    """A table is append-only: asking for less than it holds must neither shrink it nor fail."""
    blocks = BlockManager(3, 2)
    assert blocks.grow(0, 6) == []
    assert blocks.grow(0, 1) == []
    assert len(blocks.block_table(0)) == 3
    blocks.check_integrity()


def test_check_integrity_sees_what_it_is_for():
    """The check that all other tests lean on."""
    lost, doubled, miscounted, unfindable = (make_blocks(4, 1) for _ in range(4))
    lost._free.pop()
    doubled.grow(0, 1)
    doubled._free[-1] = doubled.block_table(0)[0]
    for broken in (lost, doubled):
        with pytest.raises(AssertionError, match="lost or doubled"):
            broken.check_integrity()
    miscounted.grow(0, 1)
    miscounted._ref_counts[miscounted.block_table(0)[0]] = 2
    with pytest.raises(AssertionError, match="reference counts"):
        miscounted.check_integrity()
    unfindable._idle[unfindable._free.pop()] = None
    with pytest.raises(AssertionError, match="nobody can find"):
        unfindable.check_integrity()


def test_counts_add_up():
    """used + cached + free = total, always."""
    blocks = make_blocks(5, 3)
    compute(blocks, 0, list(range(7)))
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (3, 0, 2)
    blocks.free(0)
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (0, 2, 3)


@pytest.mark.parametrize("length", [5, 6, 7])
def test_a_cached_prompt_computes_at_least_one_token(length):
    """A prompt of whole blocks that is all there would have no token whose logits give the next."""
    blocks = make_blocks()
    tokens = list(range(length))
    assert compute(blocks, 0, tokens) == 0
    assert compute(blocks, 1, tokens) == {5: 4, 6: 4, 7: 6}[length]


def test_blocks_in_use_are_shared():
    """Sharing only what is freed would compute a template once for each row that runs."""
    blocks = make_blocks()
    compute(blocks, 0, [1, 2, 3, 4, 5])
    used = blocks.num_used
    compute(blocks, 1, [1, 2, 3, 4, 6])
    assert blocks.num_used == used + 1
    blocks.free(0)
    blocks.check_integrity()
    assert blocks.num_used == 3


def test_only_what_is_computed_is_found():
    """A block found before its K/V are written would be read as it was."""
    blocks = make_blocks()
    tokens = [1, 2, 3, 4, 5]
    blocks.reuse(0, tokens, blocks.lookup(0, tokens))
    blocks.grow(0, 5)
    assert blocks.lookup(1, tokens).pending
    blocks.publish(0, tokens, 3)
    hit = blocks.lookup(1, tokens)
    assert len(hit.blocks) == 1
    assert hit.pending
    blocks.publish(0, tokens, 5)
    assert len(blocks.lookup(1, tokens).blocks) == 2
    assert not blocks.lookup(1, tokens).pending


def test_nobody_waits_for_one_that_is_gone():
    """A row that waits for the blocks of one that was aborted or preempted would wait for ever."""
    blocks = make_blocks()
    tokens = [1, 2, 3, 4, 5]
    blocks.reuse(0, tokens, blocks.lookup(0, tokens))
    assert blocks.lookup(1, tokens).pending
    blocks.free(0)
    assert not blocks.lookup(1, tokens).pending


def test_the_least_recently_held_goes_first_and_tails_before_heads():
    """Evicted from its head, a prefix would be lost whole, its other blocks held for nothing."""
    blocks = make_blocks(num_blocks=6)
    first, second = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    for request_id, tokens in enumerate((first, second)):
        compute(blocks, request_id, tokens)
    blocks.free(0)
    blocks.free(1)
    assert (blocks.num_cached, blocks.num_free) == (4, 2)
    found = []
    for taken in range(2, 7):
        blocks.grow(9, 2 * taken)
        found.append([len(blocks.lookup(i, tokens).blocks) for i, tokens in ((7, first), (8, second))])
    assert found == [[2, 2], [1, 2], [0, 2], [0, 1], [0, 0]]
    assert blocks.num_evicted == 4


def test_what_was_used_again_stays_longest():
    """First in, first out would evict the template that every row uses."""
    blocks = make_blocks(num_blocks=4)
    for request_id, tokens in enumerate(([1, 2, 3], [4, 5, 6], [1, 2, 3])):
        compute(blocks, request_id, tokens)
        blocks.free(request_id)
    blocks.grow(9, 2 * 3)
    assert len(blocks.lookup(7, [1, 2, 3]).blocks) == 1
    assert len(blocks.lookup(8, [4, 5, 6]).blocks) == 0


def test_room_counts_cached_blocks_as_free_and_hits_as_held():
    """Counting a hit among the blocks that can be evicted for the rest of the same sequence."""
    blocks = make_blocks(num_blocks=4)
    compute(blocks, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    blocks.free(0)
    hit = blocks.lookup(1, [1, 2, 3, 4, 9, 9, 9])
    assert len(hit.blocks) == 2
    assert blocks.has_room(hit, 7, spare=0)
    assert blocks.has_room(hit, 8, spare=0)
    assert not blocks.has_room(hit, 8, spare=1)
    assert not blocks.has_room(hit, 9, spare=0)
    compute(blocks, 2, [1, 2, 3, 4, 5])
    assert blocks.has_room(blocks.lookup(1, [1, 2, 3, 4, 9]), 5, spare=0), "held by others, it costs nothing"


def test_other_tokens_before_make_another_block():
    """A block's K/V depend on all that precedes it: the same tokens at another place are not the same block."""
    blocks = make_blocks()
    compute(blocks, 0, [1, 2, 3, 4, 5])
    assert not blocks.lookup(1, [3, 4, 5]).blocks
    assert len(blocks.lookup(2, [1, 2, 4, 3, 5]).blocks) == 1


def test_the_seed_tells_models_apart():
    """What else changes the K/V must change the address."""
    digests = []

    def recording(data):
        digests.append(strong_digest(data))
        return digests[-1]

    for seed in (b"one", b"other"):
        compute(make_blocks(seed=seed, digest=recording), 0, [1, 2, 3])
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("digest", sorted(set(DIGESTS) - {"strong"}))
def test_a_collision_costs_a_hit_and_never_gives_wrong_blocks(digest):
    """Digests that are equal, tokens that are not."""
    blocks = make_blocks(num_blocks=16, digest=DIGESTS[digest])
    compute(blocks, 0, [1, 2, 3, 4, 5])
    for other in ([1, 2, 5, 4, 5], [5, 2, 3, 4, 5], [3, 4, 3, 4, 5], [2, 1, 4, 3, 5]):
        hit = blocks.lookup(other[0] + 10, other)
        assert len(hit.blocks) == (1 if other[:2] == [1, 2] else 0)
        blocks.free(other[0] + 10)
    blocks.check_integrity()


def test_equal_content_computed_twice_is_found_under_either():
    """The parent of a cached block evicted and computed again: its children are still its children."""
    blocks = make_blocks(num_blocks=6)
    tokens = [1, 2, 3, 4, 5]
    for request_id in (0, 1):  # both at once: neither finds the other
        blocks.reuse(request_id, tokens, blocks.lookup(request_id, tokens))
    for request_id in (0, 1):
        blocks.grow(request_id, 4)
    blocks.publish(0, tokens, 2)
    blocks.publish(1, tokens, 4)  # its second block follows the first of request 0
    blocks.free(0)
    blocks.grow(9, 6)
    blocks.grow(8, 2)
    assert not blocks.lookup(2, tokens).blocks, "the head is gone"
    blocks.free(2)
    blocks.free(9)
    compute(blocks, 3, [1, 2, 7])
    assert len(blocks.lookup(4, tokens).blocks) == 2


def test_fork_shares_all_and_copies_what_is_written():
    """n samples of a prompt must cost one prompt and their own tokens; the last to write needs no copy."""
    blocks = make_blocks()
    compute(blocks, 0, [1, 2, 3])
    blocks.fork(0, 1)
    blocks.fork(0, 2)
    assert blocks.num_used == 2
    shared = blocks.block_table(0)[1]
    copies = [blocks.grow(request_id, 4, 3) for request_id in (0, 1, 2)]
    assert [[source for source, _ in made] for made in copies] == [[shared], [shared], []]
    assert blocks.num_used == 4
    assert len({blocks.block_table(i)[0] for i in range(3)}) == 1
    assert len({blocks.block_table(i)[1] for i in range(3)}) == 3
    blocks.check_integrity()


def test_a_copy_that_finds_no_block_is_refused():
    """Counted as no new block, a copy on write would fail in the middle of a step."""
    blocks = make_blocks(num_blocks=2)
    blocks.grow(0, 3)
    blocks.fork(0, 1)
    assert blocks.grow(0, 4, 3) is None
    blocks.free(1)
    assert blocks.grow(0, 4, 3) == []


def test_shrink_keeps_shared_blocks_alive():
    """A block given back while a fork still reads it."""
    blocks = make_blocks()
    blocks.grow(0, 6)
    blocks.fork(0, 1)
    blocks.shrink(0, 2)
    assert blocks.num_used == 3
    blocks.check_integrity()
    blocks.free(1)
    assert blocks.num_used == 1

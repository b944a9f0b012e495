"""Which blocks hold the K/V of which tokens, so that nobody computes them twice.

A full block is addressed by a digest of its tokens and of all tokens before it, as a chain (vLLM's automatic prefix
caching; SGLang's radix tree, arXiv:2312.07104, finds the same prefixes):

    digest[i] = blake2b(digest[i - 1] + tokens of block i)        digest[-1] = blake2b(seed)

A digest only finds a block. It is reused if its tokens, and those of each block before it, are the ones asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

Digest = Callable[[bytes], bytes]


def strong_digest(data: bytes) -> bytes:
    """128 bits of BLAKE2b."""
    return blake2b(data, digest_size=16).digest()


@dataclass(eq=False, slots=True)
class Prefix:
    """The tokens of a full block, and by `parent` all that precede them."""

    parent: Prefix | None
    tokens: bytes
    digest: bytes

    def continues(self, parent: Prefix | None, tokens: bytes) -> bool:
        """Whether this is `tokens` after `parent`; parents that are the same object end the comparison early."""
        mine, other = self.parent, parent
        if self.tokens != tokens:
            return False
        while mine is not other:
            if mine is None or other is None or mine.tokens != other.tokens:
                return False
            mine, other = mine.parent, other.parent
        return True


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What is there already of a sequence that waits.

    Attributes:
        blocks: hold its first tokens, in order.
        prefix: the tokens of the last of them.
        pending: whether another sequence is to compute the block after them.
    """

    blocks: list[int]
    prefix: Prefix | None
    pending: bool


NO_HIT = PrefixHit([], None, False)


@dataclass(slots=True)
class _Chain:
    """Digest and tokens of a sequence's full blocks as far as anyone asked, and how far they are published."""

    links: list[tuple[bytes, bytes]] = field(default_factory=list)
    prefix: Prefix | None = None
    num_published: int = 0


class PrefixCache:
    """Finds blocks by their tokens. Which of them are in use is the block manager's business.

    Args:
        seed: whatever else the K/V depend on, such as the model.
        digest: a hash; a bad one costs hits, never a wrong block.
    """

    def __init__(self, block_size: int, seed: bytes = b"", digest: Digest = strong_digest) -> None:
        self._block_size = block_size
        self._digest = digest
        self._root = digest(seed)
        self._blocks: dict[bytes, int] = {}
        self._prefixes: dict[int, Prefix] = {}
        self._chains: dict[int, _Chain] = {}
        self._pending: dict[bytes, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._prefixes

    def match(self, request_id: int, token_ids: Sequence[int]) -> PrefixHit:
        """The longest run of reusable blocks from the first token on. At least one token is left to compute."""
        chain = self._chains.setdefault(request_id, _Chain())
        blocks: list[int] = []
        prefix = None
        for digest, tokens in self._links(chain, token_ids, 0, len(token_ids) - 1):
            block = self._blocks.get(digest)
            if block is None or not self._prefixes[block].continues(prefix, tokens):
                return PrefixHit(blocks, prefix, digest in self._pending)
            blocks.append(block)
            prefix = self._prefixes[block]
        return PrefixHit(blocks, prefix, False)

    def start(self, request_id: int, token_ids: Sequence[int], hit: PrefixHit) -> None:
        """A sequence begins behind its hit: until they are published, its other full blocks are pending."""
        chain = self._chains[request_id]
        chain.prefix, chain.num_published = hit.prefix, len(hit.blocks)
        for digest, _ in self._links(chain, token_ids, chain.num_published, len(token_ids)):
            self._pending.setdefault(digest, request_id)

    def publish(self, request_id: int, token_ids: Sequence[int], num_tokens: int, table: Sequence[int]) -> None:
        """Make those blocks of a table reusable that the first `num_tokens` tokens, whose K/V are final, fill.

        A block whose digest another one has already stays its owner's alone: the same tokens twice, or a collision.
        """
        chain = self._chains.setdefault(request_id, _Chain())
        for digest, tokens in self._links(chain, token_ids, chain.num_published, num_tokens):
            self._settle(digest, request_id)
            known = self._blocks.get(digest)
            if known is not None and self._prefixes[known].continues(chain.prefix, tokens):
                chain.prefix = self._prefixes[known]
            else:
                chain.prefix = Prefix(chain.prefix, tokens, digest)
                if known is None:
                    block = table[chain.num_published]
                    self._blocks[digest], self._prefixes[block] = block, chain.prefix
            chain.num_published += 1

    def fork(self, request_id: int, child_id: int) -> None:
        """A child that shares its parent's table so far."""
        parent = self._chains.get(request_id, _Chain())
        self._chains[child_id] = _Chain(parent.links[: parent.num_published], parent.prefix, parent.num_published)

    def drop(self, request_id: int) -> None:
        """Forget a sequence; what it published stays."""
        chain = self._chains.pop(request_id, None)
        if chain is not None:
            for digest, _ in chain.links[chain.num_published :]:
                self._settle(digest, request_id)

    def forget(self, block: int) -> None:
        """A block's K/V are about to be overwritten."""
        del self._blocks[self._prefixes.pop(block).digest]

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._prefixes.clear()

    def check_integrity(self) -> None:
        """Assert that digests and blocks point at each other, and that only live sequences have something pending."""
        assert self._blocks == {prefix.digest: block for block, prefix in self._prefixes.items()}
        assert len(self._blocks) == len(self._prefixes)
        assert set(self._pending.values()) <= self._chains.keys()

    def _links(
        self, chain: _Chain, token_ids: Sequence[int], first: int, num_tokens: int
    ) -> Iterator[tuple[bytes, bytes]]:
        """Digest and tokens of the full blocks from number `first` to token `num_tokens`; each is hashed once."""
        size, links = self._block_size, chain.links
        for index in range(first, num_tokens // size):
            while len(links) <= index:
                begin = len(links) * size
                tokens = array("i", token_ids[begin : begin + size]).tobytes()
                links.append((self._digest((links[-1][0] if links else self._root) + tokens), tokens))
            yield links[index]

    def _settle(self, digest: bytes, request_id: int) -> None:
        if self._pending.get(digest) == request_id:
            del self._pending[digest]

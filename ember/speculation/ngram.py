"""Prompt lookup: text that repeats itself says what comes next.

The tokens that followed the newest earlier occurrence of the last n-gram are proposed as the next ones (Saxena,
"Prompt Lookup Decoding", 2023; LLMA, arXiv:2304.04487). No second model, no tensors.
"""

from __future__ import annotations


class NgramIndex:
    """Where each n-gram of one growing list of tokens last ended; a token is indexed once, O(1) amortised.

    Args:
        shortest, longest: lengths of the n-grams; a longer one that occurred before wins.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def continuation(self, tokens: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`, a list that has only grown since the last call.

        Where the earlier text reaches the end it goes on with its own copy, so that a loop is proposed round and round.
        """
        self._index(tokens)
        size = len(tokens)
        for n in self._lengths:
            end = self._ends.get(tuple(tokens[size - n :])) if n <= size else None
            if end is not None:
                period = size - end
                return [tokens[end + i % period] for i in range(most)]
        return []

    def _index(self, tokens: list[int]) -> None:
        """Enter the n-grams that end before the last token: the last ones are what is looked up."""
        before, until = self._num_indexed, len(tokens) - 1
        for n in self._lengths:
            first = max(n, before + 1)
            window = tokens[first - n : until]
            grams = zip(*(window[i:] for i in range(n)), strict=False)
            self._ends.update(zip(grams, range(first, until + 1), strict=False))
        self._num_indexed = max(before, until)

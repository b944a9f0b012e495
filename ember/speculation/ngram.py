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
        self._lengths = range(shortest, longest + 1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def continuation(self, tokens: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`, a list that has only grown since the last call.

        Where the earlier text reaches the end it goes on with its own copy, so that a loop is proposed round and round.
        """
        self._index(tokens)
        size, end = len(tokens), 0
        for n in self._lengths:
            longer = self._ends.get(tuple(tokens[size - n :])) if n <= size else None
            if longer is None:  # then no n-gram that is longer still occurred before
                break
            end = longer
        return [tokens[end + i % (size - end)] for i in range(most)] if end else []

    def _index(self, tokens: list[int]) -> None:
        """Enter the n-grams that end before the last token: the last ones are what is looked up."""
        for end in range(self._num_indexed + 1, len(tokens)):
            for n in self._lengths:
                if n <= end:
                    self._ends[tuple(tokens[end - n : end])] = end
            self._num_indexed = end

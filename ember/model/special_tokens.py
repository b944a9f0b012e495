"""A tokenizer whose control tokens have a text, `<|endoftext|>`: for outputs that are to show them."""

from __future__ import annotations

from collections.abc import Mapping

from ember.model.decoder import Spelling, TokenBytes


class ShowingSpecial:
    """The bytes of every token of a tokenizer, control tokens too.

    Args:
        special: text -> id of the control tokens.
    """

    def __init__(self, tokenizer: TokenBytes, special: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._texts = {token_id: text.encode() for text, token_id in special.items()}

    @property
    def spelling(self) -> Spelling:
        """The tokenizer's."""
        return self._tokenizer.spelling

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for ids beyond the vocabulary."""
        return self._texts.get(token_id) or self._tokenizer.token_bytes(token_id)

"""What the engine's surroundings ask of a tokenizer, whatever runs it: text to token ids and back.

A prompt comes from anyone, so text never turns into a control token (`<|im_end|>`) by itself: only where it is allowed,
or where a chat template, not a message, put it (see `encode_parts`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from ember.errors import UserError
from ember.model.decoder import IncrementalDecoder, Spelling


class Tokenizer(ABC):
    """Encodes and decodes with one vocabulary. Nothing in it changes, so threads may share it.

    Attributes:
        vocab_size: the highest token id, plus one (a model's may be larger: padding).
        special: text -> id of the control tokens.
        spelling: how the bytes of tokens make a text.
    """

    vocab_size: int
    special: Mapping[str, int]
    spelling: Spelling

    @abstractmethod
    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Token ids of a text in parts: strings are plain text throughout, numbers the ids of control tokens.

        Raises:
            UserError: a string holds a lone surrogate, or what the vocabulary has no token for.
        """

    @abstractmethod
    def split_special(self, text: str) -> list[str | int]:
        """A text as such parts, with the ids of the control tokens that are spelt in it."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for special tokens and ids beyond the vocabulary."""

    @abstractmethod
    def min_tokens(self, text: str) -> int:
        """No fewer tokens than this can spell the text; cheap, without encoding it."""

    def encode(self, text: str, *, allow_special_tokens: bool = False) -> list[int]:
        """Token ids of a prompt; control tokens spelt in it are plain text unless allowed.

        Raises:
            UserError: as `encode_parts`.
        """
        return self.encode_parts(self.split_special(text) if allow_special_tokens else [text])

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids: special tokens vanish, what is not UTF-8 becomes U+FFFD."""
        decoder = IncrementalDecoder(self)
        for token_id in token_ids:
            decoder.push(token_id)
        decoder.finish()
        return decoder.text


def check_text(text: str) -> None:
    """Nothing, if UTF-8 can spell the text.

    Raises:
        UserError: it holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        raise UserError(f"the text can't be tokenised: {bad} is not Unicode text") from None


def finder(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Splits a text at tokens, the longest first, as Hugging Face does; None if there are none."""
    texts = sorted(filter(None, tokens), key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

"""Token ids to text, a token at a time: the same text as decoding them all at once, whatever the vocabulary.

Two kinds of vocabulary spell text. Byte-level ones (GPT-2, Llama 3, Qwen): a token is any bytes, and the bytes of all
together are UTF-8. SentencePiece's (Llama 2, Mistral, Gemma): a token is text, in which a space may stand for the one
that is put before every text, and a character without a token of its own is spelt by byte tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Leading(Enum):
    """What becomes of the space that SentencePiece puts before a text: a text's first token shows it."""

    KEEP = "keep"
    STRIP_ONE = "strip one space"
    STRIP_FIRST_TOKEN = "strip all spaces of the first token"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the bytes of tokens make a text.

    Attributes:
        byte_tokens: the tokens of byte fallback, one byte each; every other token is then whole characters. Empty in
            byte-level vocabularies.
        leading: the rule for a text's first space.
    """

    byte_tokens: frozenset[int] = frozenset()
    leading: Leading = Leading.KEEP


class TokenBytes(Protocol):
    """The part of a tokenizer that decoding needs."""

    @property
    def spelling(self) -> Spelling:
        """How the bytes of tokens make a text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for special tokens and ids beyond the vocabulary."""


class IncrementalDecoder:
    """UTF-8 text of a growing list of tokens; an unfinished character is held back until it is whole.

    What is no UTF-8 becomes U+FFFD: one for each sequence that can't go on in byte-level vocabularies, one for each
    byte in byte fallback, as in the `tokenizers` library. (That library also gives up the whole characters in a run of
    byte tokens that does not end well; here they stay, for they may have been shown.)

    Args:
        prompt_token_ids: the tokens before the text: after any text the first space is one like all others.
    """

    def __init__(self, tokenizer: TokenBytes, prompt_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer, self._spelling = tokenizer, tokenizer.spelling
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        keeps = self._spelling.leading is Leading.KEEP
        self._at_start = not keeps and not any(map(tokenizer.token_bytes, prompt_token_ids))
        self.text = ""

    def push(self, token_id: int) -> None:
        """Add one token's bytes."""
        piece = self._tokenizer.token_bytes(token_id)
        if not piece:
            return
        if self._at_start and self._spelling.leading is Leading.STRIP_FIRST_TOKEN:
            self._at_start, piece = False, piece.replace(b" ", b"")
        if not self._spelling.byte_tokens:
            self._show(self._utf8.decode(piece))
        elif token_id in self._spelling.byte_tokens:
            self._held += piece
            self._show(self._whole_characters(final=False))
        else:
            self._show(self._whole_characters(final=True) + piece.decode(errors="replace"))

    def finish(self) -> None:
        """Show what was held back; half a character becomes U+FFFD."""
        self._show(self._utf8.decode(b"", final=True) + self._whole_characters(final=True))

    def _show(self, text: str) -> None:
        if self._at_start and text:
            self._at_start, text = False, text.removeprefix(" ")
        self.text += text

    def _whole_characters(self, *, final: bool) -> str:
        """Take the held bytes that are characters, or can't become any; all of them if nothing follows."""
        text = ""
        while self._held:
            try:
                text, self._held = text + self._held.decode(), b""
            except UnicodeDecodeError as error:
                text += self._held[: error.start].decode()
                if error.reason == "unexpected end of data" and not final:
                    self._held = self._held[error.start :]
                    break
                text += "\ufffd" * (error.end - error.start)
                self._held = self._held[error.end :]
        return text

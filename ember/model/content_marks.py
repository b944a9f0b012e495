"""Telling a template's control tokens from the same text in a message, after both are one text.

Before a template sees a message, a mark (a code point that is no character, and that occurs nowhere in the
conversation) breaks every control token that the message spells, and every end of it that could become a part of one
beside the template's own text. What then still is a control token in the rendered text was put there by the template.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ember.model.tokenizer import finder

NONCHARACTERS = tuple(chr(point) for point in range(0xFDD0, 0xFDF0))
"""Code points that Unicode keeps for uses like this, and that no text has."""


class ContentMarks:
    """Puts marks into content, for one set of control tokens. Those of one character can't be broken: they stay."""

    def __init__(self, special: Iterable[str]) -> None:
        tokens = [token for token in special if len(token) > 1]
        self._find = finder(tokens)
        self._starts = {token[:n] for token in tokens for n in range(1, len(token))}
        self._ends = {token[n:] for token in tokens for n in range(1, len(token))}
        self._longest = max(map(len, tokens), default=1)

    def put(self, value: Any, mark: str) -> Any:
        """A value with the mark put into all strings within it, keys of objects too."""
        if isinstance(value, str):
            return self._in_text(value, mark)
        if isinstance(value, dict):
            return {self.put(key, mark): self.put(item, mark) for key, item in value.items()}
        return [self.put(item, mark) for item in value] if isinstance(value, list) else value

    def _in_text(self, text: str, mark: str) -> str:
        while self._find is not None and self._find.search(text):
            text = self._find.sub(lambda token: token[0][0] + mark + token[0][1:], text)
        end = len(text.rstrip())
        if any(text[max(0, end - n) : end] in self._starts for n in range(1, self._longest)):
            text = text[:end] + mark + text[end:]
        start = len(text) - len(text.lstrip())
        if any(text[start : start + n] in self._ends for n in range(1, self._longest)):
            text = text[:start] + mark + text[start:]
        return text

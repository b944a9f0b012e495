"""A prompt template: literal text and `{column}` placeholders, and nothing else.

Rows and templates come from strangers, so `str.format` is not used: it reads attributes (`{a.__class__}`), indexes and
format specifications. Here a placeholder is a column's name, to the letter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ember.data.text import RowError, is_encodable, one_line, plain_text
from ember.errors import ConfigError

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[^{}]+|[{}]")
_SPECIAL = frozenset(".[]!:")


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template. Each part is (literal text, None) or (placeholder's text, column name)."""

    parts: tuple[tuple[str, str | None], ...]

    @staticmethod
    def parse(text: str) -> Template:
        """Take a template apart; `{{` and `}}` are literal braces.

        Raises:
            ConfigError: an empty template, a brace without its partner, or `{}` without a name.
        """
        if not text or not is_encodable(text):
            raise ConfigError("template", one_line(text), "must be text that can be a prompt")
        return Template(tuple(_part(match, text) for match in _TOKEN.finditer(text)))

    @property
    def names(self) -> list[str]:
        """The columns that it names, each once, in order."""
        return list(dict.fromkeys(name for _, name in self.parts if name is not None))

    def check(self, columns: Collection[str]) -> None:
        """Refuse what looks like code: attributes, indexes, conversions, formats, unless a column has that very name.

        Raises:
            ConfigError: names the placeholder.
        """
        for name in self.names:
            if name not in columns and not _SPECIAL.isdisjoint(name):
                remedy = "a placeholder is a column's plain name; literal braces are written {{ and }}"
                raise ConfigError("template", one_line(f"{{{name}}}"), remedy)

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt of one row: strings as they are, other values as JSON text.

        Raises:
            RowError: a column that is missing, null or not UTF-8; names it.
        """
        return "".join(literal if name is None else _value(name, values) for literal, name in self.parts)


def _part(match: re.Match[str], text: str) -> tuple[str, str | None]:
    token, name = match[0], match[1]
    if token in ("{{", "}}"):
        return token[0], None
    if token in ("{", "}"):
        near = one_line(text[max(0, match.start() - 10) : match.start() + 20])
        raise ConfigError("template", near, f"`{token}` has no partner; a literal brace is written {token * 2}")
    if name is None:
        return token, None
    if not name:
        raise ConfigError("template", "{}", "a placeholder needs a column's name; literal braces are written {{ and }}")
    return token, name


def _value(name: str, values: Mapping[str, Any]) -> str:
    value = values.get(name)
    if value is None:
        state = "is null" if name in values else "is missing"
        raise RowError(f"template: column {one_line(name, 60)} {state}")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise RowError(f"template: column {one_line(name, 60)} is not UTF-8 text") from None
    return value if isinstance(value, str) else plain_text(value)

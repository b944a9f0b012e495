"""What a prompt may be: text that is not empty, a list of token ids that is not empty, or a conversation."""

from __future__ import annotations

from typing import Any

from ember.checks import json_kind
from ember.data.text import RowError, is_encodable
from ember.errors import UserError
from ember.model.conversation import Conversation

MAX_TOKEN_ID = 2**31 - 1
"""Beyond this a number is no token id of any model, and does not fit the output's columns."""
_NOTHING = "there is nothing to condition on"


def checked_prompt(value: Any, name: str) -> str | list[int]:
    """A prompt column's value as a prompt.

    Raises:
        RowError: `name` (the column) and what the value is instead of text or token ids.
    """
    if isinstance(value, str):
        return checked_text(value, name)
    if isinstance(value, list):
        return _checked_token_ids(value, name)
    if isinstance(value, bytes):
        return checked_text(_decoded(value, name), name)
    if value is None:
        raise RowError(f"{name} is null")
    raise RowError(f"{name} is {json_kind(value)}, not text")


def checked_text(text: str, name: str) -> str:
    """`text`, if a model can be given it.

    Raises:
        RowError: it is empty, or no UTF-8 can spell it.
    """
    if not text:
        raise RowError(f"{name} is empty: {_NOTHING}")
    if not is_encodable(text):
        raise RowError(f"{name} holds a lone surrogate, which is no text")
    return text


def checked_messages(value: Any, name: str) -> Conversation:
    """A conversation, from a list of messages or the JSON text of one.

    Raises:
        RowError: `name` and what is wrong with it.
    """
    try:
        return Conversation.of(value, name)
    except UserError as error:
        raise RowError(str(error)) from None


def _checked_token_ids(value: list[Any], name: str) -> list[int]:
    if not value:
        raise RowError(f"{name} is an empty list: {_NOTHING}")
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RowError(f"{name} is a list, but item {position} is {json_kind(token)}, not a token id")
        if not 0 <= token <= MAX_TOKEN_ID:
            raise RowError(f"{name} is a list, but item {position} is out of a token id's range")
    return value


def _decoded(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RowError(f"{name} is not UTF-8 text") from None

"""A conversation: the messages that a chat template makes a prompt of, checked when it is made.

The shape is OpenAI's: a list of objects with `role` and `content`, and whatever else a template may know
(`tool_calls`, `name`, `reasoning_content`, ...). https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ember.checks import MAX_DEPTH, json_kind, too_deep
from ember.errors import UserError
from ember.model.json_file import show

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Templates build control tokens of roles (`<|user|>`), so a row must not bring any other."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a known role, each with text (or with tool calls instead).

    Attributes:
        kwargs: further variables for the chat template, which win over the model's and the job's; values as in JSON.
    """

    messages: tuple[dict[str, Any], ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(value: Any, name: str = "messages") -> Conversation:
        """Check messages that come from anyone; a list as JSON text is one too.

        Content in parts (`[{"type": "text", "text": ...}]`) becomes one text, a line a part. Keys whose value is null
        count as missing.

        Raises:
            UserError: `name` and what is wrong, with the message's number.
        """
        if isinstance(value, str):
            value = _from_json(value, name)
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{name} is {json_kind(value)}, not a list of messages")
        if not value:
            raise UserError(f"{name} is an empty list: there is nothing to answer")
        if too_deep([*value]):
            raise UserError(f"{name} is nested more than {MAX_DEPTH} deep")
        messages = tuple(_message(item, f"{name}[{i}]") for i, item in enumerate(value))
        try:
            json.dumps(messages, ensure_ascii=False, allow_nan=False).encode()
        except (UnicodeEncodeError, TypeError, ValueError, RecursionError) as error:
            lone = isinstance(error, UnicodeEncodeError)
            what = "hold a lone surrogate, which is no text" if lone else "hold what JSON has no form for"
            raise UserError(f"{name} {what}") from None
        return Conversation(messages)

    @staticmethod
    def of_prompt(text: str) -> Conversation:
        """A prompt as one user message."""
        return Conversation(({"role": "user", "content": text},))

    def with_system(self, text: str | None) -> Conversation:
        """With a system message in front, unless it has one of its own."""
        if text is None or self.messages[0]["role"] in ("system", "developer"):
            return self
        return replace(self, messages=({"role": "system", "content": text}, *self.messages))

    @property
    def text(self) -> str:
        """Roles and contents, one after the other."""
        return "\n".join(f"{m['role']}\n{m['content'] or ''}" for m in self.messages)

    @property
    def continues(self) -> bool:
        """Whether the last message is the assistant's: the completion then goes on with it."""
        return bool(self.messages[-1]["role"] == "assistant")


def _from_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{name} is text, not a list of messages (nor JSON text of one)") from None


def _message(item: Any, name: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise UserError(f"{name} is {json_kind(item)}, not an object with role and content")
    message = {key: value for key, value in item.items() if value is not None}
    role = message.get("role")
    if role is None:
        raise UserError(f"{name}.role is missing")
    if role not in ROLES:
        raise UserError(f"{name}.role is {show(role)}; must be one of {', '.join(ROLES)}")
    if "content" not in message:
        if not message.get("tool_calls"):
            raise UserError(f"{name}.content is missing")
        return {**message, "content": None}
    return {**message, "content": _content(message["content"], f"{name}.content")}


def _content(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{name} is {json_kind(value)}, not text")
    return "\n".join(_part(part, f"{name}[{i}]") for i, part in enumerate(value))


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise UserError(f"{name} is {json_kind(part)}, not an object with type and text")
    if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        raise UserError(f"{name} is of type {show(part.get('type'))}; only parts with text are supported")
    return str(part["text"])

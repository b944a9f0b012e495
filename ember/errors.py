"""The one kind of exception that is the user's to mend: a line of text, no traceback."""

from __future__ import annotations

import json
from typing import Any


class UserError(ValueError):
    """A mistake in a setting, a file or a model folder. The message is one line: what, where, remedy."""


class Shown(str):
    """A value as a message is to show it, whatever the text looks like."""

    __slots__ = ()


class ConfigError(UserError):
    """A setting with a value that is not allowed.

    Args:
        key: the setting's name, dotted when nested (`sampling.top_p`).
        value: what it was set to.
        allowed: what is allowed, as the end of the sentence "must be ...", or a whole remedy.
    """

    def __init__(self, key: str, value: Any, allowed: str) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        super().__init__(f"{key}={_shown(value)}: {allowed}")

    def under(self, parent: str) -> ConfigError:
        """The same error with its key placed below `parent`."""
        return ConfigError(f"{parent}.{self.key}", self.value, self.allowed)


def _shown(value: Any) -> Any:
    """As it is written in a setting. A text that reads like a number, null or a bool, or is empty, in quotes."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str) or isinstance(value, Shown):
        return value
    try:
        is_plain = bool(value.strip()) and isinstance(json.loads(value), (dict, list))
    except (ValueError, RecursionError):
        is_plain = bool(value.strip())
    return value if is_plain else json.dumps(value)


class JobError(UserError):
    """Why a job that had begun can't go on: the disk is full, a file has changed. No mistake in the settings."""


class RequestError(UserError):
    """Why one prompt can't run; it costs that row and no other.

    Args:
        kind: a short stable name to count by (`prompt_too_long`).
        message: one line: what is wrong, with its numbers.
        key: the sampling setting that is to blame; None: the prompt itself.
    """

    def __init__(self, kind: str, message: str, *, key: str | None = None) -> None:
        self.kind, self.key = kind, key
        super().__init__(message)

"""What a whole output must match: a JSON schema, a regular expression, a choice of texts, or a grammar.

Here only the shape of such a setting is checked; `ember.entrypoints.structured_output` compiles it.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from ember.checks import text_list
from ember.errors import ConfigError, Shown

OUTPUT_FORMS = ("json_schema", "regex", "choice", "grammar")
"""The settings, of which at most one is set."""


class HasOutputForm(Protocol):
    """Sampling parameters."""

    json_schema: Any
    regex: str | None
    choice: Any
    grammar: str | None
    ignore_eos: bool


def output_form(params: HasOutputForm) -> tuple[str, Any] | None:
    """The name and value of the form that is set, if any."""
    return next(((key, value) for key in OUTPUT_FORMS if (value := getattr(params, key)) is not None), None)


def check_output_form(params: HasOutputForm) -> None:
    """Bring the forms into one shape: a schema given as text becomes its object.

    Raises:
        ConfigError: a value of the wrong type; two forms; or one with `ignore_eos`, since EOS is how it ends.
    """
    params.json_schema = None if params.json_schema is None else _schema(params.json_schema)
    if params.choice is not None:
        params.choice = text_list("choice", params.choice, "must be a list of texts, none empty, or null")
        if not params.choice:
            raise ConfigError("choice", "[]", "must hold a text at least, or be null")
    for key in ("regex", "grammar"):
        if not isinstance(getattr(params, key), (str, type(None))) or getattr(params, key) == "":
            raise ConfigError(key, Shown(repr(getattr(params, key))), "must be text that is not empty, or null")
    given = [key for key in OUTPUT_FORMS if getattr(params, key) is not None]
    if len(given) > 1:
        raise ConfigError(given[1], getattr(params, given[1]), f"can't be set beside {given[0]}: one form an output")
    if given and params.ignore_eos:
        raise ConfigError("ignore_eos", True, f"can't be set beside {given[0]}: EOS is what ends such an output")


def _schema(value: Any) -> Any:
    allowed = "must be a JSON schema: an object, or its text"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError("json_schema", value[:60], allowed) from None
    if not isinstance(value, dict):
        raise ConfigError("json_schema", value, allowed)
    return value

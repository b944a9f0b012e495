"""A row's own sampling settings: from a column that holds an object, and from columns that the job maps to settings."""

from __future__ import annotations

import math
from dataclasses import fields
from decimal import Decimal
from typing import Any

from ember.data.sources import Record
from ember.data.text import RowError, is_json_encodable, one_line, parse_json
from ember.errors import ConfigError
from ember.sampling_params import SamplingParams


class RowSampling:
    """Collects a row's settings, unchecked but for their shape: `SamplingParams.override` checks them.

    Args:
        column: holds an object, a struct, a map or an object's JSON text; null sets nothing.
        mapped: setting -> column, stronger than the object. Null sets nothing, nor does NaN (a missing number's usual
            form after pandas).

    Raises:
        ConfigError: `mapped` names a setting that there is not, or no column.
    """

    def __init__(self, column: str, mapped: dict[str, str]) -> None:
        known = [field.name for field in fields(SamplingParams)]
        for key, name in mapped.items():
            if key not in known:
                what = f"no such sampling setting (there are: {', '.join(known)})"
                raise ConfigError("sampling_columns", one_line(str(key), 60), what)
            if not isinstance(name, str) or not name:
                raise ConfigError(f"sampling_columns.{key}", one_line(str(name), 60), "must be a column's name")
        self._column = column
        self._shown = one_line(column, 60)
        self._mapped = dict(mapped)

    def of_record(self, record: Record) -> dict[str, Any]:
        """The settings that the row brings.

        Raises:
            RowError: the object is none, or holds text that is no UTF-8.
        """
        values = record.values or {}
        settings = self._object(values.get(self._column), record.typed)
        for key, column in self._mapped.items():
            value = values.get(column)
            if not _is_missing(value):
                settings[key] = value
        if not settings:
            return settings
        if not is_json_encodable(settings):
            raise RowError("the sampling settings hold a lone surrogate, which is no text")
        return {key: _plain_numbers(value) for key, value in settings.items()}

    def _object(self, value: Any, typed: bool) -> dict[str, Any]:
        """A new dict. A struct's null members are not set; JSON's are kept: `max_tokens: null` means no limit."""
        if value is None:
            return {}
        if typed and not isinstance(value, str):
            value = _from_arrow(value)
        elif isinstance(value, str):
            value = self._parsed(value)
        if not isinstance(value, dict):
            raise RowError(f"{self._shown} is not an object of sampling settings")
        return dict(value)

    def _parsed(self, text: str) -> Any:
        try:
            value = parse_json(text)
        except RowError as error:
            raise RowError(f"{self._shown}: {error}") from None
        return {} if value is None else value


def _from_arrow(value: Any) -> Any:
    """A struct or a map (a list of pairs) as a dict without its nulls; anything else as it is."""
    if isinstance(value, list) and all(isinstance(item, tuple) for item in value):
        value = dict(value)
    if not isinstance(value, dict):
        return value
    return {key: member for key, member in value.items() if member is not None}


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain_numbers(value: Any) -> Any:
    """`value` with decimals (DuckDB's form of 0.7) as int or float, which SamplingParams takes."""
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value

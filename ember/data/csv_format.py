"""Completions as CSV, for spreadsheets: written only, since CSV can't tell types apart."""

from __future__ import annotations

from typing import BinaryIO

import pyarrow as pa
from pyarrow import csv

from ember.data.formats import RowSink
from ember.data.json_values import to_json_values
from ember.data.text import json_text


class CsvFormat:
    """A header and one line a row, in UTF-8. Null is an empty field, an empty text is `""`.

    Whatever is no number, truth value or text is spelled as in JSON lines; lists and structs are JSON text.
    """

    def sink(self, file: BinaryIO, schema: pa.Schema) -> RowSink:
        """Write rows of that schema into a file."""
        return _CsvSink(file, schema)


class _CsvSink:
    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._schema = pa.schema([pa.field(field.name, _flat(field.type)) for field in schema])
        self._writer = csv.CSVWriter(file, self._schema)

    def write(self, table: pa.Table) -> None:
        """See RowSink."""
        for batch in table.to_batches():
            columns = [_as_text(c) if _flat(c.type) != c.type else c for c in batch.columns]
            self._writer.write(pa.record_batch(columns, schema=self._schema))

    def close(self) -> None:
        """See RowSink."""
        self._writer.close()


def _flat(arrow: pa.DataType) -> pa.DataType:
    """The type itself if CSV has a form for it, else text."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    return arrow if any(kind(arrow) for kind in kinds) else pa.string()


def _as_text(column: pa.Array) -> pa.Array:
    values = to_json_values(column)
    return pa.array([v if v is None or isinstance(v, str) else json_text(v) for v in values], pa.string())

"""How completions are spelled in a file: Parquet, JSON lines, or the lines of OpenAI's batch output.

Every format gives back what it was given, to the last bit, so any of them can be resumed from and exported to another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ember.data.json_values import from_json_values, to_json_values
from ember.errors import UserError

KEY_COLUMNS = ["row_index", "finish_reason", "error", "id", "num_prompt_tokens", "num_output_tokens"]
"""What a resume needs to know of a row."""
_KEY_SCHEMA = pa.schema(
    [
        *(("row_index", pa.int64()), ("finish_reason", pa.string()), ("error", pa.string()), ("id", pa.string())),
        *(("num_prompt_tokens", pa.int32()), ("num_output_tokens", pa.int32())),
    ]
)
_BATCH_ROWS = 1024
_STATUS_OK = 200


class RowSink(Protocol):
    """Takes tables of rows, one after another, into one open file."""

    def write(self, table: pa.Table) -> None:
        """Append the rows."""

    def close(self) -> None:
        """Write what the format wants at its end; the file stays open."""


class PartFormat(Protocol):
    """A spelling of completions.

    What can't be read raises OSError, ValueError or ArrowException (see `UNREADABLE`).

    Attributes:
        suffix: the ending of a part's name, with its dot.
    """

    suffix: str

    def sink(self, file: BinaryIO, schema: pa.Schema) -> RowSink:
        """Write rows of that schema into a file."""

    def read_keys(self, file: BinaryIO) -> pa.Table:
        """The columns `KEY_COLUMNS` of a part."""

    def read(self, file: BinaryIO, schema: pa.Schema) -> Iterator[pa.Table]:
        """The rows of a part in order, some at a time; `schema` is that of the output."""

    def without_errors(self, file: BinaryIO, target: BinaryIO) -> None:
        """Copy a part without its error rows."""


UNREADABLE = (OSError, ValueError, KeyError, TypeError, pa.ArrowException)


class ParquetFormat:
    """Parquet, compressed with zstd."""

    suffix = ".parquet"

    def sink(self, file: BinaryIO, schema: pa.Schema) -> RowSink:
        """See PartFormat."""
        return _ParquetSink(file, schema)

    def read_keys(self, file: BinaryIO) -> pa.Table:
        """See PartFormat."""
        return pq.ParquetFile(file).read(columns=KEY_COLUMNS)

    def read(self, file: BinaryIO, schema: pa.Schema) -> Iterator[pa.Table]:
        """See PartFormat. A part brings its own schema."""
        for batch in pq.ParquetFile(file).iter_batches(batch_size=_BATCH_ROWS):
            yield pa.Table.from_batches([batch])

    def without_errors(self, file: BinaryIO, target: BinaryIO) -> None:
        """See PartFormat."""
        rows = pq.ParquetFile(file).read()
        failed = pc.equal(rows["finish_reason"], "error")
        pq.write_table(rows.filter(pc.invert(failed)), target, compression="zstd")


class JsonlFormat:
    """One JSON object a line, with the same fields as Parquet (see `ember.data.json_values`)."""

    suffix = ".jsonl"

    def sink(self, file: BinaryIO, schema: pa.Schema) -> RowSink:
        """See PartFormat."""
        return _LineSink(file, self.line)

    def line(self, record: dict[str, Any]) -> dict[str, Any]:
        """The object that stands for a row."""
        return record

    def record(self, line: dict[str, Any]) -> dict[str, Any]:
        """The row that an object stands for."""
        return line

    def read_keys(self, file: BinaryIO) -> pa.Table:
        """See PartFormat."""
        keys = [{key: record[key] for key in KEY_COLUMNS} for record in map(self._parse, file)]
        return pa.Table.from_pylist(keys, schema=_KEY_SCHEMA)

    def read(self, file: BinaryIO, schema: pa.Schema) -> Iterator[pa.Table]:
        """See PartFormat."""
        records = map(self._parse, file)
        while rows := list(islice(records, _BATCH_ROWS)):
            columns = [from_json_values([row[field.name] for row in rows], field.type) for field in schema]
            yield pa.Table.from_arrays(columns, schema=schema)

    def without_errors(self, file: BinaryIO, target: BinaryIO) -> None:
        """See PartFormat."""
        target.writelines(line for line in file if self._parse(line)["finish_reason"] != "error")

    def _parse(self, line: bytes) -> dict[str, Any]:
        return self.record(json.loads(line))


class OpenAIBatchFormat(JsonlFormat):
    """The lines of OpenAI's Batch API output for text completions; each has the whole row too, under the key `ember`.

    Args:
        model: the name to write into each body.
        created: seconds since 1970 to write into each body: one number for all, so that nothing else differs
            between two runs of a job.
    """

    def __init__(self, model: str = "", created: int = 0) -> None:
        self._model, self._created = model, created

    def line(self, record: dict[str, Any]) -> dict[str, Any]:
        """See JsonlFormat."""
        key = f"{record['row_index']}_{record['sample_index']}"
        failed = record["error"] is not None or record["finish_reason"] == "error"
        custom_id = record["id"] if record["id"] is not None else str(record["row_index"])
        return {
            "id": f"batch_req_{key}",
            "custom_id": custom_id,
            "response": None if failed else self._response(record, key),
            "error": _batch_error(record) if failed else None,
            "ember": record,
        }

    def record(self, line: dict[str, Any]) -> dict[str, Any]:
        """See JsonlFormat."""
        record = line["ember"]
        assert isinstance(record, dict)
        return record

    def _response(self, record: dict[str, Any], key: str) -> dict[str, Any]:
        prompt, output = record["num_prompt_tokens"], record["num_output_tokens"]
        choice = {"index": 0, "text": record["completion"], "finish_reason": record["finish_reason"], "logprobs": None}
        body = {
            "id": f"cmpl-{key}",
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice],
            "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
        }
        return {"status_code": _STATUS_OK, "request_id": f"req_{key}", "body": body}


def part_format(name: str, *, model: str = "", created: int = 0) -> PartFormat:
    """The format of the setting `output_format`; `model` and `created` matter to openai_batch only.

    Raises:
        UserError: there is none of that name.
    """
    match name:
        case "parquet":
            return ParquetFormat()
        case "jsonl":
            return JsonlFormat()
        case "openai_batch":
            return OpenAIBatchFormat(model, created)
    raise UserError(f"output_format={name}: this version of ember has no such format")


def write_table(form: PartFormat, table: pa.Table, file: BinaryIO) -> None:
    """Write one table as a whole file."""
    sink = form.sink(file, table.schema)
    sink.write(table)
    sink.close()


class _ParquetSink:
    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(file, schema, compression="zstd")

    def write(self, table: pa.Table) -> None:
        """See RowSink."""
        self._writer.write_table(table)

    def close(self) -> None:
        """See RowSink."""
        self._writer.close()


class _LineSink:
    """Writes tables as JSON lines, a few rows in memory at a time."""

    def __init__(self, file: BinaryIO, line: Any) -> None:
        self._file, self._line = file, line

    def write(self, table: pa.Table) -> None:
        """See RowSink."""
        for record in records(table):
            text = json.dumps(self._line(record), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
            self._file.write(text.encode() + b"\n")

    def close(self) -> None:
        """See RowSink."""


def records(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table as objects of JSON values."""
    names: Sequence[str] = table.schema.names
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        columns = [to_json_values(column) for column in batch.columns]
        yield from (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _batch_error(record: dict[str, Any]) -> dict[str, str]:
    kind, _, message = (record["error"] or "other").partition(": ")
    return {"code": kind, "message": message or kind}

"""How completions are spelled in a file: Parquet, JSON lines, or the lines of OpenAI's batch output.

Every format gives back what it was given, to the last bit, so any of them can be resumed from and exported to another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ember.data.json_values import from_json_values, to_json_values
from ember.data.openai_batch import CHAT
from ember.data.openai_logprobs import Position, chat_logprobs, completion_logprobs
from ember.errors import UserError

_KEY_SCHEMA = pa.schema(
    [
        *(("row_index", pa.int64()), ("sample_index", pa.int32()), ("num_samples", pa.int32())),
        *(("finish_reason", pa.string()), ("error", pa.string()), ("id", pa.string())),
        *(("num_prompt_tokens", pa.int32()), ("num_output_tokens", pa.int32())),
    ]
)
KEY_COLUMNS: list[str] = _KEY_SCHEMA.names
"""What a resume needs to know of a sample."""
Record = dict[str, Any]
"""A sample as an object of JSON values."""
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
        whole_rows: all samples of a row stand together, so they are written together.
    """

    suffix: str
    whole_rows: bool

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
    whole_rows = False

    def sink(self, file: BinaryIO, schema: pa.Schema) -> RowSink:
        """See PartFormat."""
        return _ParquetSink(file, schema)

    def read_keys(self, file: BinaryIO) -> pa.Table:
        """See PartFormat."""
        return pq.ParquetFile(file).read(columns=KEY_COLUMNS).select(KEY_COLUMNS)

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
    whole_rows = False

    def sink(self, file: BinaryIO, schema: pa.Schema) -> RowSink:
        """See PartFormat."""
        return _LineSink(file, self.lines)

    def lines(self, records: Iterator[Record]) -> Iterator[Record]:
        """The objects that stand for samples."""
        return records

    def records(self, line: Record) -> list[Record]:
        """The samples that an object stands for."""
        return [line]

    def read_keys(self, file: BinaryIO) -> pa.Table:
        """See PartFormat."""
        keys = [{key: record[key] for key in KEY_COLUMNS} for record in self._parse(file)]
        return pa.Table.from_pylist(keys, schema=_KEY_SCHEMA)

    def read(self, file: BinaryIO, schema: pa.Schema) -> Iterator[pa.Table]:
        """See PartFormat."""
        records = self._parse(file)
        while rows := list(islice(records, _BATCH_ROWS)):
            columns = [from_json_values([row[field.name] for row in rows], field.type) for field in schema]
            yield pa.Table.from_arrays(columns, schema=schema)

    def without_errors(self, file: BinaryIO, target: BinaryIO) -> None:
        """See PartFormat."""
        for line in file:
            if all(record["finish_reason"] != "error" for record in self._parse([line])):
                target.write(line)

    def _parse(self, lines: Iterable[bytes]) -> Iterator[Record]:
        return chain.from_iterable(self.records(json.loads(line)) for line in lines)


class OpenAIBatchFormat(JsonlFormat):
    """The lines of OpenAI's Batch API output: one a row, a choice a sample.

    Each has the samples' whole records too, under the key `ember`. A line with a sample that failed is an error. A row
    that came from a request for `/v1/chat/completions` is answered with messages, any other with texts.

    Args:
        model: the name to write into each body.
        created: seconds since 1970 to write into each body: one number for all, so that nothing else differs
            between two runs of a job.
    """

    whole_rows = True

    def __init__(self, model: str = "", created: int = 0) -> None:
        self._model, self._created = model, created

    def lines(self, records: Iterator[Record]) -> Iterator[Record]:
        """See JsonlFormat."""
        return (self._line(list(samples)) for _, samples in groupby(records, key=itemgetter("row_index")))

    def records(self, line: Record) -> list[Record]:
        """See JsonlFormat."""
        samples = line["ember"]
        assert isinstance(samples, list)
        return samples

    def _line(self, samples: list[Record]) -> Record:
        first = samples[0]
        key = f"{first['row_index']}_{first['sample_index']}"
        failed = next((s for s in samples if s["error"] is not None or s["finish_reason"] == "error"), None)
        return {
            "id": f"batch_req_{key}",
            "custom_id": first["id"] if first["id"] is not None else str(first["row_index"]),
            "response": self._response(samples, key) if failed is None else None,
            "error": None if failed is None else _batch_error(failed),
            "ember": samples,
        }

    def _response(self, samples: list[Record], key: str) -> Record:
        is_chat = samples[0].get("url") == CHAT
        prompt, output = samples[0]["num_prompt_tokens"], sum(s["num_output_tokens"] for s in samples)
        body = {
            "id": f"chatcmpl-{key}" if is_chat else f"cmpl-{key}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [_choice(sample, is_chat=is_chat) for sample in samples],
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

    def __init__(self, file: BinaryIO, lines: Callable[[Iterator[Record]], Iterator[Record]]) -> None:
        self._file, self._lines = file, lines

    def write(self, table: pa.Table) -> None:
        """See RowSink."""
        for line in self._lines(records(table)):
            text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
            self._file.write(text.encode() + b"\n")

    def close(self) -> None:
        """See RowSink."""


def records(table: pa.Table) -> Iterator[Record]:
    """The rows of a table as objects of JSON values."""
    names: Sequence[str] = table.schema.names
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        columns = [to_json_values(column) for column in batch.columns]
        yield from (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _choice(sample: Record, *, is_chat: bool) -> Record:
    text = sample["completion"]
    return {
        "index": sample["sample_index"],
        **({"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}),
        "finish_reason": sample["finish_reason"],
        "logprobs": _logprobs(sample["logprobs"], is_chat=is_chat),
    }


def _logprobs(positions: list[Position] | None, *, is_chat: bool) -> Record | None:
    if positions is None:
        return None
    return chat_logprobs(positions) if is_chat else completion_logprobs(positions)


def _batch_error(record: Record) -> dict[str, str]:
    kind, _, message = (record["error"] or "other").partition(": ")
    return {"code": kind, "message": message or kind}

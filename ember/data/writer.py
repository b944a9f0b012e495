"""Rows to parts: whole, in order, and never in the engine's way.

Whatever part has its final name is whole and durable (see `ember.data.store`); parts are the only truth of what is
done. One background thread does the writing: an engine step never waits for a disk. DuckDB, pandas and pyarrow read the
folder as one table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from operator import attrgetter
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from ember.core.stats import StepStats
from ember.data.columns import FIXED_COLUMNS
from ember.data.formats import ParquetFormat, PartFormat, write_table
from ember.data.parts import PREFIX, is_part, part_name, part_numbers
from ember.data.store import Store, cant_write

SCHEMA_VERSION = "2"
_METADATA = {b"ember.schema_version": SCHEMA_VERSION.encode()}
_LOGPROBS = pa.list_(
    pa.list_(
        pa.struct([("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32()), ("rank", pa.int32())])
    )
)
_COMPLETION_TYPES: dict[str, pa.DataType] = {
    "row_index": pa.int64(),
    "id": pa.string(),
    "sample_index": pa.int32(),
    "num_samples": pa.int32(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "prompt_token_ids": pa.list_(pa.int32()),
    "token_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "stop_reason": pa.string(),
    "error": pa.string(),
    "seed": pa.int64(),
    "num_prompt_tokens": pa.int32(),
    "num_output_tokens": pa.int32(),
    "num_cached_tokens": pa.int32(),
    "num_preemptions": pa.int32(),
    "cumulative_logprob": pa.float64(),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "queue_s": pa.float64(),
    "ttft_s": pa.float64(),
    "latency_s": pa.float64(),
}
_STAT_NAMES = tuple(field.name for field in fields(StepStats))
_stat_values = attrgetter(*_STAT_NAMES)
# While the disk is slower than the engine, rows wait in memory: at most this many commits' worth.
_MAX_COMMITS_WAITING = 16

STEPS_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field("run_id", pa.string()),
        pa.field("engine", pa.int32()),
        *(pa.field(f.name, {"int": pa.int64(), "float": pa.float64()}[str(f.type)]) for f in fields(StepStats)),
    ],
    metadata=_METADATA,
)


def completions_schema(passthrough: pa.Schema) -> pa.Schema:
    """The fixed columns, then the input's other columns with their own types.

    Passed-through columns become nullable (a row too broken to parse has none of them) and lose the input's metadata.

    Raises:
        ValueError: two columns have the same name; renaming is the reader's part.
    """
    fixed = [pa.field(name, _COMPLETION_TYPES[name], nullable=name != "row_index") for name in FIXED_COLUMNS]
    others = [field.remove_metadata().with_nullable(True) for field in passthrough]
    names = [field.name for field in (*fixed, *others)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"columns named twice: {', '.join(sorted(twice))}")
    return pa.schema([*fixed, *others], metadata=_METADATA)


def step_row(run_id: str, engine: int, stats: StepStats) -> dict[str, Any]:
    """One row of the steps table."""
    return {"run_id": run_id, "engine": engine, **dict(zip(_STAT_NAMES, _stat_values(stats), strict=True))}


class PartWriter:
    """Buffers rows and commits them as `part-00000`, `part-00001`, ... in one folder.

    Numbers go on after the parts that are there; none is overwritten. Needs the folder's lock: one writer a prefix.
    As a context manager it closes on the way out, also on an error: finished rows are worth keeping. A failed write
    never hides the error that was already under way. After a failed write nothing more is written, and every later
    call raises that failure again.

    Args:
        folder: a folder that exists, or a remote one.
        schema: of the rows; a missing key is null.
        form: how the rows are spelled in a part; Parquet if None.
        commit_every: rows that make a commit due.
        commit_every_s: seconds that a row may wait in the buffer.
        prefix: the parts' names before the number.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        folder: Store,
        schema: pa.Schema,
        *,
        form: PartFormat | None = None,
        commit_every: int,
        commit_every_s: float,
        prefix: str = PREFIX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._schema, self._prefix, self._clock = folder, schema, prefix, clock
        self._format = ParquetFormat() if form is None else form
        self._commit_every, self._commit_every_s = commit_every, commit_every_s
        self._names = frozenset(schema.names)
        self._rows: list[dict[str, Any]] = []
        self._oldest = 0.0
        self._next_number = _prepare(folder, prefix, self._format.suffix)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ember-writer")
        self._pending: Future[None] | None = None
        self._failure: Exception | None = None
        self._closed = False

    def write(self, *rows: dict[str, Any]) -> None:
        """Take rows that belong into one part; the dicts are the writer's from now on.

        Raises:
            KeyError: a key that is no column.
            JobError: an earlier write failed: disk full, no permission, folder gone.
            TypeError: a value of an earlier row doesn't fit its column (named).
        """
        if unknown := {key for row in rows for key in row} - self._names:
            raise KeyError(f"no such column: {', '.join(sorted(unknown))}")
        self._check()
        if not self._rows:
            self._oldest = self._clock()
        self._rows.extend(rows)
        self.commit_if_due()

    def commit_if_due(self) -> None:
        """Commit in the background if enough rows, or seconds, have come together. Cheap: call it every step.

        Raises:
            JobError, TypeError: an earlier write failed.
        """
        if self._pending is not None and self._pending.done():
            self._collect()
        waiting = len(self._rows)
        if not waiting:
            return
        if waiting < self._commit_every and self._clock() - self._oldest < self._commit_every_s:
            return
        if self._pending is None or waiting >= self._commit_every * _MAX_COMMITS_WAITING:
            self.commit()

    def commit(self, wait: bool = False) -> None:
        """Hand the buffered rows to the background thread, once the previous part is on the disk.

        Args:
            wait: return only when they are on the disk, too.

        Raises:
            JobError, TypeError: this or an earlier write failed.
        """
        self._check()
        self._collect()
        if self._rows:
            rows, self._rows = self._rows, []
            self._pending = self._thread.submit(self._write_part, rows)
        if wait:
            self._collect()

    def close(self, *, at_least_one: bool = False) -> None:
        """Commit what is buffered, wait for the disk, end the thread. A second call does nothing.

        Args:
            at_least_one: leave an empty part if there is none at all, so that the folder reads as a table.

        Raises:
            JobError, TypeError: this or an earlier write failed.
        """
        if self._closed:
            return
        try:
            self.commit(wait=True)
            if at_least_one and self._next_number == 0:
                self._thread.submit(self._write_part, []).result()
        finally:
            self._closed = True
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close; a clean exit leaves at least one part."""
        try:
            self.close(at_least_one=error is None)
        except Exception as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(f"and the last rows could not be written: {failure}")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError(f"the writer of {self._folder.shown} is closed")

    def _collect(self) -> None:
        """Wait for the part that is being written; its failure is everyone's from then on."""
        if self._pending is None:
            return
        try:
            self._pending.result()
        except Exception as error:
            self._failure, self._pending, self._rows = error, None, []
            raise
        self._pending = None

    def _write_part(self, rows: list[dict[str, Any]]) -> None:
        """Runs in the background thread, one part at a time."""
        table = _table(self._schema, rows)
        name = part_name(self._prefix, self._next_number, self._format.suffix)
        self._folder.put_atomically(name, lambda file: write_table(self._format, table, file), new=True)
        self._next_number += 1


def _prepare(folder: Store, prefix: str, suffix: str) -> int:
    """Remove what killed writers of this prefix left half written; the number of the next part."""
    try:
        folder.clear_temporary(lambda name: is_part(name, prefix))
        return max(part_numbers(folder, suffix, prefix).values(), default=-1) + 1
    except OSError as error:
        raise cant_write(folder.shown, error) from error


def _table(schema: pa.Schema, rows: Sequence[dict[str, Any]]) -> pa.Table:
    columns = [_column(field, [row.get(field.name) for row in rows]) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    """Convert without changing a value.

    Raises:
        TypeError: names the column, its type and the value.
    """
    for value in _silently_changed(field, values):
        raise _misfit(field, value)
    try:
        return pa.array(values, type=field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _misfit(field, _first_refused(field, values)) from error


def _silently_changed(field: pa.Field, values: list[Any]) -> Iterator[Any]:
    """What `pa.array` would change or let pass without a word: 1.5 as 1, True as 1.0, null where none may be."""
    wrong = float if pa.types.is_integer(field.type) else bool if pa.types.is_floating(field.type) else ()
    return (value for value in values if isinstance(value, wrong) or (value is None and not field.nullable))


def _first_refused(field: pa.Field, values: list[Any]) -> Any:
    for value in values:
        try:
            pa.array([value], type=field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return value
    return None


def _misfit(field: pa.Field, value: Any) -> TypeError:
    shown = ascii(value)
    shown = shown if len(shown) <= 100 else shown[:100] + "..."
    return TypeError(f"column {field.name!r} ({field.type}) can't hold {shown}")

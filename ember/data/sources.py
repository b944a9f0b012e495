"""One input file: what is in it, found once at the start, and its rows, streamed as often as asked.

`JsonlSource` and `ParquetSource` give the same things: `num_rows`, the columns, and `records()`, which yields one
Record per row whatever the row looks like. Memory is bounded by a batch of rows, and a file is open only while it is
scanned or its records are being taken. A file that changes between the scan and the reading ends the job: its rows
would no longer be those that the schema and the row numbers were made from.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ember.data.columns import kinds_of_type, kinds_of_value, plain_type
from ember.data.file_kinds import compression, data_error, is_parquet, shown_path
from ember.data.remote import BLOCK_BYTES, PARQUET_BLOCK_BYTES, RemoteFile, is_remote
from ember.data.text import RowError, one_line, parse_json
from ember.errors import UserError

MAX_COLUMNS = 10_000
"""Most columns that JSONL rows may have between them: more means keys that are data, and a schema without end."""
_BUFFER = 1 << 20
_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 1024
_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\x1f\x8b": "is gzip, though its ending does not say so; rename it to end in .jsonl.gz",
    b"\x28\xb5\x2f\xfd": "is zstd, though its ending does not say so; rename it to end in .jsonl.zst",
    b"PAR1": "is Parquet, though its ending does not say so; rename it to end in .parquet",
    b"\xff\xfe": "is UTF-16 text; convert it to UTF-8",
    b"\xfe\xff": "is UTF-16 text; convert it to UTF-8",
}


Wants = Callable[[int], bool]
"""Whether the row of that number, counted within its file, is to be read."""


@dataclass(slots=True)
class Record:
    """One input row as it was read.

    Attributes:
        where: the row's place, "FILE:LINE" (1-based) or "FILE row N" (0-based within a Parquet file).
        values: its values by input column, or None when nothing could be read.
        cause: why the row can't run, if reading it showed so already.
        typed: whether the file has a schema: a null member of an object is then one that is not there.
    """

    where: str
    values: dict[str, Any] | None
    cause: str | None = None
    typed: bool = False


class JsonlSource:
    """A JSON-lines file, plain or compressed. Scanned wholly once for `num_rows` and the kinds of each column's values.

    Raises:
        UserError: the file can't be opened, its compression is corrupt, it is no text, or it has too many columns.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._shown = shown_path(path)
        self._state = _state(path)
        self.num_rows = 0
        self.kinds: dict[str, int] = {}
        self._scan()

    @property
    def columns(self) -> list[str]:
        """Its columns by first appearance."""
        return list(self.kinds)

    def records(self, wants: Wants) -> Iterator[tuple[int, Record]]:
        """The rows that are wanted, by their number among the lines that are not blank; the others are not parsed."""
        _check_unchanged(self.path, self._state)
        for index, (number, line) in enumerate(self._lines()):
            if not wants(index):
                continue
            where = f"{self._shown}:{number}"
            try:
                yield index, Record(where, _parse_line(line))
            except RowError as error:
                yield index, Record(where, None, str(error))

    def _scan(self) -> None:
        kinds = self.kinds
        for _, line in self._lines():
            self.num_rows += 1
            try:
                values = _parse_line(line)
            except RowError:
                continue
            for name, value in values.items():
                kinds[name] = kinds.get(name, 0) | kinds_of_value(value)
            if len(kinds) > MAX_COLUMNS:
                what = f"its rows have more than {MAX_COLUMNS} different keys; put keys that are data under one key"
                raise data_error(self.path, what)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank, with their 1-based numbers. Only a newline byte ends a line."""
        with _readable(self.path), _open_lines(self.path) as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    self._check_text(line)
                    line = line.removeprefix(_BOM)  # noqa: PLW2901
                if line and not line.isspace():
                    yield number, line

    def _check_text(self, line: bytes) -> None:
        for magic, what in _FOREIGN.items():
            if line.startswith(magic):
                raise data_error(self.path, what)


class ParquetSource:
    """A Parquet file: `num_rows` and the columns' types from its footer, rows in small batches.

    Raises:
        UserError: the file can't be opened, is not Parquet, or has two columns of one name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._shown = shown_path(path)
        self._state = _state(path)
        with self._open() as parquet:
            schema = parquet.schema_arrow
            self.num_rows: int = parquet.metadata.num_rows
        self.types: dict[str, pa.DataType] = {field.name: plain_type(field.type) for field in schema}
        if len(self.types) < len(schema):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise data_error(path, f"it has two columns named {one_line(twice, 60)}; rename one")

    @property
    def columns(self) -> list[str]:
        """Its columns in file order."""
        return list(self.types)

    def kinds(self, name: str) -> int:
        """The kinds of value in a column. Whole numbers are read, since only the values tell how wide they are."""
        kinds = kinds_of_type(self.types[name])
        if not pa.types.is_integer(self.types[name]):
            return kinds
        try:
            return self._int_kinds(name)
        except UserError:
            return kinds

    def records(self, wants: Wants) -> Iterator[tuple[int, Record]]:
        """The rows that are wanted, by number. Rows of a row group that can't be decoded are Records with a cause."""
        _check_unchanged(self.path, self._state)
        with self._open() as parquet:
            first = 0
            for group in range(parquet.num_row_groups):
                end = first + parquet.metadata.row_group(group).num_rows
                if any(map(wants, range(first, end))):
                    yield from ((n, record) for n, record in self._group(parquet, group, first) if wants(n))
                first = end

    def _group(self, parquet: pq.ParquetFile, group: int, row: int) -> Iterator[tuple[int, Record]]:
        meta = parquet.metadata.row_group(group)
        end = row + meta.num_rows
        size = max(1, min(_BATCH_ROWS, _BATCH_BYTES * meta.num_rows // max(1, meta.total_byte_size)))
        cause = "the row can't be read"
        try:
            for batch in parquet.iter_batches(batch_size=size, row_groups=[group], use_threads=False):
                yield from self._batch(batch, row)
                row += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None):
                raise
            cause = f"the rest of this row group can't be read ({one_line(str(error))})"
        for lost in range(row, end):
            yield lost, Record(f"{self._shown} row {lost}", None, cause)

    def _batch(self, batch: pa.RecordBatch, first: int) -> Iterator[tuple[int, Record]]:
        causes: dict[int, str] = {}
        names = batch.schema.names
        columns = [_python_values(batch.column(i), names[i], causes) for i in range(batch.num_columns)]
        for i, values in enumerate(zip(*columns, strict=True)):
            row = dict(zip(names, values, strict=True))
            yield first + i, Record(f"{self._shown} row {first + i}", row, causes.get(i), typed=True)

    def _int_kinds(self, name: str) -> int:
        kinds = 0
        with self._open() as parquet:
            for batch in parquet.iter_batches(columns=[name], use_threads=False):
                ends = pc.min_max(batch.column(name).cast(self.types[name]))
                kinds |= kinds_of_value(ends["min"].as_py()) | kinds_of_value(ends["max"].as_py())
        return kinds

    @contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        remote = is_remote(self.path)
        with _readable(self.path), _open_bytes(self.path, block_bytes=PARQUET_BLOCK_BYTES) as file:
            yield pq.ParquetFile(file, buffer_size=0 if remote else _BUFFER, pre_buffer=remote)


Source = JsonlSource | ParquetSource


def open_source(path: str) -> Source:
    """The file's source, by its ending; scans it.

    Raises:
        UserError: the file is not what its ending says, corrupt, or can't be read.
    """
    return ParquetSource(path) if is_parquet(path) else JsonlSource(path)


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 text (byte {error.start + 1} of the line)") from None
    value = parse_json(text)
    if isinstance(value, list):
        raise RowError("a JSON array, not an object; each line must be one object")
    if not isinstance(value, dict):
        raise RowError("the line is no JSON object")
    return value


def _python_values(array: pa.Array, name: str, causes: dict[int, str]) -> list[Any]:
    """A column's values. Those that Python can't hold exactly stay Arrow scalars, which Arrow's builders take too."""
    plain = plain_type(array.type)
    array = array if array.type == plain else array.cast(plain)
    if not _has_nanoseconds(array.type):
        try:
            return list(array.to_pylist())
        except (ArithmeticError, ValueError, LookupError):
            pass
    return [_python_value(scalar, i, name, causes) for i, scalar in enumerate(array)]


def _python_value(scalar: pa.Scalar, index: int, name: str, causes: dict[int, str]) -> Any:
    if not scalar.is_valid:
        return None
    if _has_nanoseconds(scalar.type):
        return scalar
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        causes[index] = f"column {one_line(name, 60)} is not UTF-8 text"
        return None
    except (ArithmeticError, ValueError, LookupError):
        return scalar


def _has_nanoseconds(arrow: pa.DataType) -> bool:
    if pa.types.is_temporal(arrow):
        return getattr(arrow, "unit", "") == "ns"
    return any(_has_nanoseconds(arrow.field(i).type) for i in range(arrow.num_fields))


@contextmanager
def _open_lines(path: str) -> Iterator[IO[bytes]]:
    codec = compression(path)
    with _open_bytes(path, block_bytes=BLOCK_BYTES) as file:
        if codec is None:
            yield file
        elif not file.peek(1):
            raise data_error(path, f"the file is empty, which {codec} never is; make or copy it again")
        else:
            with io.BufferedReader(pa.CompressedInputStream(file, codec), _BUFFER) as stream:
                yield stream


def _open_bytes(path: str, *, block_bytes: int) -> io.BufferedReader:
    """A local or remote file; of a remote one, `block_bytes` come with a request."""
    if is_remote(path):
        return RemoteFile(path).open(block_bytes=block_bytes)
    return io.BufferedReader(io.FileIO(path), _BUFFER)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turn what opening and decoding raise into one line that names the file."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what = f"can't be read ({one_line(reason)}); if it is cut short or damaged, make or copy it again"
        raise data_error(path, what) from error


def _state(path: str) -> tuple[int | None, str]:
    """Size and what tells one content from the next: of a local file the time of change."""
    if is_remote(path):
        return RemoteFile(path).state()
    with _readable(path):
        stat = os.stat(path)
    return stat.st_size, str(stat.st_mtime_ns)


def _check_unchanged(path: str, state: tuple[int | None, str]) -> None:
    if _state(path) != state:
        raise data_error(path, "the file changed while the job ran; start the job again when it is at rest")

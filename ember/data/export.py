"""One ordered file from the parts of an output, whoever wrote them: `ember export OUTPUT --to rows.jsonl`.

Rows come in input order with bounded memory: the input is cut into ranges of row numbers, and each range is gathered
from just those parts that hold some of it. Parts are nearly in input order, so most are read once or twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from ember.data.csv_format import CsvFormat
from ember.data.done import DoneRows, read_parts, unreadable
from ember.data.folder import COMPLETIONS, CONFIG
from ember.data.formats import UNREADABLE, PartFormat, RowSink, part_format
from ember.data.manifest import Manifest
from ember.data.store import Store, open_store, write_atomically
from ember.errors import UserError

_ENDINGS = {".jsonl": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".csv": "csv"}
RANGE_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did: rows written (one a sample), and input rows that are not (yet) there with all samples."""

    num_rows: int
    num_missing: int


def export(
    output: str, to: str, *, order: str = "input", form: str | None = None, force: bool = False, partial: bool = False
) -> Exported:
    """Write all rows of an output into one file; it appears when it is whole.

    Args:
        output: the output of a job, a folder or a URL; it may still be running.
        to: a local file.
        order: `input`, by row number; or `as_written`, part after part.
        form: jsonl, parquet, csv or openai_batch; None: what the file's ending says.
        force: replace a file that is there.
        partial: go on if rows are missing.

    Raises:
        UserError: no output of ember's, rows are missing, the file is there, or something can't be read or written.
    """
    target = _target(to, force)
    spelled = _format_of(target, form)
    parts = CompletionParts.open(output)
    missing = parts.num_missing
    if missing and not partial:
        raise UserError(
            f"{output} is incomplete: {missing:,} of {parts.num_expected:,} rows are missing; run the job to its end, "
            "or export what there is with --partial"
        )
    if order == "as_written" and spelled == "openai_batch" and not parts.whole_rows:
        raise UserError("--order as_written: the samples of a row may lie apart, and openai_batch has them in one line")
    tables = parts.in_order() if order == "input" else parts.as_written()

    def write(file: BinaryIO) -> None:
        sink = _sink(spelled, file, parts)
        for table in tables:
            sink.write(table)
        sink.close()

    write_atomically(target, write)
    return Exported(parts.num_rows, missing)


class CompletionParts:
    """The completions of an output: its parts, those of all shards too.

    Attributes:
        schema: of the rows.
        num_rows: rows that there are, one a sample.
        num_expected: input rows that the finished job has.
        whole_rows: whether all samples of a row stand together in the parts.
        facts: of the manifest.

    Args:
        range_rows: row numbers in a range, the most rows that `in_order` has in memory at once.
    """

    def __init__(self, store: Store, manifest: Manifest, range_rows: int = RANGE_ROWS) -> None:
        self._folder = store.sub(COMPLETIONS)
        self.schema, self.facts = manifest.schema, manifest.facts
        self._form = part_format(str(manifest.fingerprint.get("output_format", "parquet")))
        num_input_rows = int(manifest.facts["num_input_rows"])
        limit = _limit(store)
        self.num_expected = num_input_rows if limit is None else min(limit, num_input_rows)
        self._done = DoneRows(num_input_rows)
        self._range_rows = range_rows
        self._ranges: dict[str, list[int]] = {}
        self.num_rows = 0
        self.whole_rows = True
        for name, keys in read_parts(self._folder, self._form):
            self._done.add(keys, f"{self._folder.shown}/{name}")
            self._ranges[name] = pc.unique(pc.divide(keys["row_index"], range_rows)).to_pylist()
            self.num_rows += len(keys)
            apart = not self._form.whole_rows and bool(pc.any(pc.greater(keys["num_samples"], 1)).as_py())
            self.whole_rows = self.whole_rows and not apart

    @staticmethod
    def open(output: str) -> CompletionParts:
        """The parts of an output.

        Raises:
            UserError: it is none of ember's, or a part can't be read.
        """
        store = open_store(output)
        manifest = Manifest.load(store)
        if manifest is None:
            raise UserError(f"{output} holds no manifest.json; name the output of a job")
        return CompletionParts(store, manifest)

    @property
    def num_missing(self) -> int:
        """Expected input rows of which the parts lack samples."""
        return self.num_expected - self._done.count(0, self.num_expected, 1)

    def as_written(self) -> Iterator[pa.Table]:
        """All rows, part after part, some at a time."""
        for name in self._ranges:
            yield from self._read(name)

    def in_order(self) -> Iterator[pa.Table]:
        """All rows by row_index; each table holds those of one range."""
        holders: dict[int, list[str]] = {}
        for name, numbers in self._ranges.items():
            for number in numbers:
                holders.setdefault(number, []).append(name)
        for number in sorted(holders):
            first, end = number * self._range_rows, (number + 1) * self._range_rows
            pieces = [self._between(name, first, end) for name in holders[number]]
            yield pa.concat_tables(pieces).sort_by([("row_index", "ascending"), ("sample_index", "ascending")])

    def _between(self, name: str, first: int, end: int) -> pa.Table:
        """The rows of a part with first <= row_index < end."""
        row_index = pc.field("row_index")
        inside = (row_index >= first) & (row_index < end)
        return pa.concat_tables([table.filter(inside) for table in self._read(name)])

    def _read(self, name: str) -> Iterator[pa.Table]:
        try:
            with self._folder.open(name) as file:
                for table in self._form.read(file, self.schema):
                    yield table.cast(self.schema)
        except UNREADABLE as error:
            raise unreadable(self._folder, name, error) from error


def _target(to: str, force: bool) -> Path:
    if "://" in to:
        raise UserError(f"--to {to}: must be a local file; copy it from there")
    target = Path(to).expanduser()
    if target.is_dir():
        raise UserError(f"--to {to}: is a folder, must be a file")
    if not target.parent.is_dir():
        raise UserError(f"--to {to}: there is no folder {target.parent}; make it first")
    if target.exists() and not force:
        raise UserError(f"--to {to}: exists already; choose another file, or replace it with --force")
    return target


def _format_of(target: Path, form: str | None) -> str:
    name = form or _ENDINGS.get(target.suffix.lower())
    if name is None:
        raise UserError(
            f"--to {target}: the ending {target.suffix or '(none)'} names no format; "
            f"end it in {', '.join(_ENDINGS)}, or add --format"
        )
    return name


def _sink(form: str, file: BinaryIO, parts: CompletionParts) -> RowSink:
    if form == "csv":
        return CsvFormat().sink(file, parts.schema)
    spelled: PartFormat = part_format(form, model=str(parts.facts.get("model", "")), created=int(time.time()))
    return spelled.sink(file, parts.schema)


def _limit(store: Store) -> int | None:
    """The `limit` that the job was last run with."""
    try:
        with store.open(CONFIG) as file:
            settings: Any = yaml.safe_load(file.read())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    limit = settings.get("limit") if isinstance(settings, dict) else None
    return limit if isinstance(limit, int) else None

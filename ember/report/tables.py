"""The parts of an output as tables: only the columns that are asked for, whatever format and shard wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ember.data.done import unreadable
from ember.data.formats import UNREADABLE, ParquetFormat, PartFormat
from ember.data.parts import part_numbers
from ember.data.store import Store

T = TypeVar("T")


class Parts:
    """The parts in one folder of an output, in the order in which they were written, shard by shard.

    Args:
        folder: `completions` or `steps` of an output; it need not exist.
        form: how they are spelled; Parquet for step statistics.
        schema: of the output, which formats other than Parquet are read by.
    """

    def __init__(self, folder: Store, form: PartFormat | None = None, schema: pa.Schema | None = None) -> None:
        self.folder, self._form, self._schema = folder, ParquetFormat() if form is None else form, schema
        self.names = list(part_numbers(folder, self._form.suffix))

    def read(self, columns: Sequence[str] | None = None, names: Iterable[str] | None = None) -> pa.Table:
        """The rows of all parts, or of some.

        Args:
            columns: those that a part lacks are left out of it, and null where another part has them; None is all.

        Raises:
            UserError: a part can't be read.
        """
        tables = [self._read(name, columns) for name in (self.names if names is None else names)]
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})

    def num_rows(self) -> dict[str, int]:
        """Rows of each part.

        Raises:
            UserError: a part can't be read.
        """
        return {name: self.num_rows_of(name) for name in self.names}

    def num_rows_of(self, name: str) -> int:
        """Rows of one part.

        Raises:
            UserError: it can't be read.
        """
        return self._of(name, self._count)

    def _read(self, name: str, columns: Sequence[str] | None) -> pa.Table:
        return self._of(name, lambda file: self._columns(file, columns))

    def _columns(self, file: BinaryIO, columns: Sequence[str] | None) -> pa.Table:
        if isinstance(self._form, ParquetFormat):
            part = pq.ParquetFile(file)
            wanted = None if columns is None else [name for name in columns if name in part.schema_arrow.names]
            return part.read(columns=wanted).replace_schema_metadata(None)
        assert self._schema is not None
        tables = list(self._form.read(file, self._schema))
        table = pa.concat_tables(tables) if tables else self._schema.empty_table()
        return table if columns is None else table.select([name for name in columns if name in table.schema.names])

    def _count(self, file: BinaryIO) -> int:
        if isinstance(self._form, ParquetFormat):
            return int(pq.ParquetFile(file).metadata.num_rows)
        return len(self._form.read_keys(file))

    def _of(self, name: str, read: Callable[[BinaryIO], T]) -> T:
        try:
            with self.folder.open(name) as file:
                return read(file)
        except UNREADABLE as error:
            raise unreadable(self.folder, name, error) from error

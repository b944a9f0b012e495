"""Which rows an output already holds: read from its parts, the only truth of what is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ember.data.folder import write_atomically
from ember.errors import UserError

KEY_COLUMNS = ["row_index", "finish_reason", "error", "id", "num_prompt_tokens", "num_output_tokens"]


class DoneRows:
    """A bit for every row of the input; memory is a byte a row."""

    def __init__(self, num_rows: int) -> None:
        self._done = bytearray(num_rows)

    def __contains__(self, row_index: int) -> bool:
        return row_index < len(self._done) and self._done[row_index] == 1

    def add(self, row_indices: pa.ChunkedArray, part: Path) -> None:
        """Mark rows as done.

        Raises:
            UserError: a row is there twice, or is none of the input's: the folder was tampered with.
        """
        for row_index in row_indices.to_pylist():
            if not 0 <= row_index < len(self._done) or self._done[row_index]:
                raise UserError(f"{part}: row_index {row_index} is doubled or not of this input; remove this output")
            self._done[row_index] = 1

    def count(self, start: int, stop: int, step: int) -> int:
        """Done rows among range(start, stop, step)."""
        return sum(self._done[start:stop:step])


def read_parts(folder: Path, prefix: str) -> Iterator[tuple[Path, pa.Table]]:
    """Every whole part of that prefix in a completions folder, with the columns that tell what is done.

    Raises:
        UserError: a part can't be read.
    """
    for path in sorted(folder.glob(f"{prefix}[0-9]*.parquet")):
        try:
            yield path, pq.read_table(path, columns=KEY_COLUMNS, partitioning=None)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path}: can't be read ({error}); move it away and run again") from error


def drop_error_rows(folder: Path, prefix: str) -> int:
    """Take the error rows out of all parts, so that they are computed again; returns how many.

    A part is replaced by one rename, so a row is there or not at any instant.
    """
    dropped = 0
    for path, keys in list(read_parts(folder, prefix)):
        failed = pc.equal(keys["finish_reason"], "error")
        count = pc.sum(failed).as_py() or 0
        if count:
            kept = pq.read_table(path, partitioning=None).filter(pc.invert(failed))
            write_atomically(path, lambda file, kept=kept: pq.write_table(kept, file, compression="zstd"))
            dropped += count
    return dropped

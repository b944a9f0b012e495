"""Which rows, and which samples of them, an output already holds: read from its parts, the only truth of what is done.

A row of the input is done when all of its samples are there; how many it has, each of them says.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from ember.data.formats import UNREADABLE, PartFormat
from ember.data.parts import part_numbers
from ember.data.store import Store
from ember.data.text import one_line
from ember.errors import UserError

_KEY = ("row_index", "sample_index", "num_samples")


class DoneRows:
    """Done rows of the input, and the samples of those that are half done; memory is a byte a row.

    Args:
        num_rows: of the input.
        shard: whose rows may be marked: every `num_shards`-th from this one on; None for every row.
    """

    def __init__(self, num_rows: int, shard: int | None = None, num_shards: int = 1) -> None:
        self._done = bytearray(num_rows)
        self._samples: dict[int, set[int]] = {}
        self._shard, self._num_shards = shard, num_shards

    def __contains__(self, row_index: int) -> bool:
        return 0 <= row_index < len(self._done) and self._done[row_index] == 1

    def samples(self, row_index: int) -> frozenset[int]:
        """The samples that are there of a row that is not done."""
        return frozenset(self._samples.get(row_index, ()))

    def add(self, keys: pa.Table, part: str) -> None:
        """Mark the samples of a part as done.

        Raises:
            UserError: a sample is there twice, or is none of the input's or the shard's: the folder was tampered with.
        """
        for row_index, sample_index, num_samples in zip(*(keys[name].to_pylist() for name in _KEY), strict=True):
            if not self._may_have(row_index) or not self._add_sample(row_index, sample_index, num_samples):
                raise UserError(
                    f"{part}: row_index {row_index}, sample_index {sample_index} is doubled or not of this input; "
                    "remove this output"
                )

    def _may_have(self, row_index: int | None) -> bool:
        if row_index is None or not 0 <= row_index < len(self._done) or self._done[row_index]:
            return False
        return self._shard is None or row_index % self._num_shards == self._shard

    def _add_sample(self, row_index: int, sample_index: int | None, num_samples: int | None) -> bool:
        """Whether it is new and can be; the row's last one makes the row done."""
        if sample_index is None or num_samples is None or not 0 <= sample_index < num_samples:
            return False
        if num_samples > 1:
            there = self._samples.setdefault(row_index, set())
            if sample_index in there:
                return False
            there.add(sample_index)
            if len(there) < num_samples:
                return True
            del self._samples[row_index]
        self._done[row_index] = 1
        return True

    def count(self, start: int, stop: int, step: int) -> int:
        """Done rows among range(start, stop, step)."""
        return sum(self._done[start:stop:step])


def read_parts(folder: Store, form: PartFormat, prefix: str | None = None) -> Iterator[tuple[str, pa.Table]]:
    """Every whole part in a completions folder by name, with the columns that tell what is done (`KEY_COLUMNS`).

    Args:
        prefix: only parts of this prefix.

    Raises:
        UserError: a part can't be read.
    """
    for name in _names(folder, form, prefix):
        try:
            with folder.open(name) as file:
                keys = form.read_keys(file)
        except UNREADABLE as error:
            raise unreadable(folder, name, error) from error
        yield name, keys


def drop_error_rows(folder: Store, form: PartFormat, prefix: str) -> int:
    """Take the error rows out of all parts, so that they are computed again; returns how many.

    A part is replaced in one go, so a row is there or not at any instant.

    Raises:
        UserError: a part can't be read; JobError: it can't be written.
    """
    dropped = 0
    for name, keys in read_parts(folder, form, prefix):
        count = pc.sum(pc.equal(keys["finish_reason"], "error")).as_py() or 0
        if count:
            with folder.open(name) as file:
                folder.put_atomically(name, partial(form.without_errors, file))
            dropped += count
    return dropped


def unreadable(folder: Store, name: str, error: Exception) -> UserError:
    """The line for a part that is damaged or gone."""
    why = one_line(f"{type(error).__name__}: {error}", 200)
    return UserError(f"{folder.shown}/{name}: can't be read ({why}); move it away and run again")


def _names(folder: Store, form: PartFormat, prefix: str | None) -> list[str]:
    try:
        return list(part_numbers(folder, form.suffix, prefix))
    except OSError as error:
        raise UserError(f"can't read {folder.shown}: {one_line(str(error), 200)}") from error

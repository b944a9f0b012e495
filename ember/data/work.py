"""Which rows a job is to compute: its shard's share of the input within `limit`, less what is done already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ember.config import JobConfig
from ember.data.done import DoneRows
from ember.data.reader import PromptReader, PromptRow


@dataclass(frozen=True, slots=True)
class Share:
    """A shard's fixed rows: every `num_shards`-th from `shard` on, within the first `end` rows of the input."""

    end: int
    shard: int
    num_shards: int

    @staticmethod
    def of(config: JobConfig, num_input_rows: int) -> Share:
        """The share that a job's settings name."""
        end = num_input_rows if config.limit is None else min(config.limit, num_input_rows)
        return Share(end, config.shard or 0, config.num_shards)

    def __contains__(self, row_index: int) -> bool:
        return row_index in range(self.shard, self.end, self.num_shards)

    def within(self, keys: pa.Table) -> pa.Table:
        """The rows of a part, of this share's job, that are within `end`: `limit` may be lower than it was."""
        return keys.filter(pc.less(keys["row_index"], self.end))

    @property
    def num_rows(self) -> int:
        """Rows in the share."""
        return len(range(self.shard, self.end, self.num_shards))


@dataclass(frozen=True, slots=True)
class Work:
    """The rows of a share that are not done, whole or in part."""

    share: Share
    done: DoneRows

    def wants(self, row_index: int) -> bool:
        """Whether a row is still to be computed."""
        return row_index in self.share and row_index not in self.done

    def rows(self, reader: PromptReader) -> Iterator[PromptRow]:
        """The rows still to be computed, each with the samples that are there."""
        for row in reader.rows(self.wants):
            row.samples_done = self.done.samples(row.row_index)
            yield row

    @property
    def num_done(self) -> int:
        """Rows of the share that are done."""
        return self.done.count(self.share.shard, self.share.end, self.share.num_shards)

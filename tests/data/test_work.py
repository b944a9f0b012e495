"""Which rows a shard computes: every row by exactly one, whatever the limit and the number of shards."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ember.config import JobConfig
from ember.data.done import DoneRows
from ember.data.work import Share, Work


def share(num_rows, shard=None, num_shards=1, limit=None):
    return Share.of(JobConfig(data="x.jsonl", shard=shard, num_shards=num_shards, limit=limit), num_rows)


@pytest.mark.parametrize("limit", [None, 0, 1, 7, 20, 21, 1000])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8, 30])
def test_shards_are_disjoint_and_cover_the_input(num_shards, limit):
    """A row that two shards write, or none; a limit taken per shard; more shards than rows."""
    shares = [share(20, shard, num_shards, limit) for shard in range(num_shards)]
    rows = [[i for i in range(-5, 40) if i in one] for one in shares]
    assert sorted(i for one in rows for i in one) == list(range(min(20, 20 if limit is None else limit)))
    assert [len(r) for r in rows] == [one.num_rows for one in shares]
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_a_job_without_shards_has_all_rows():
    """shard=null read as no shard at all."""
    assert share(5).num_rows == 5
    assert share(5, shard=0).num_rows == 5


def test_work_is_the_share_less_what_is_done():
    """Done rows of other shards, or beyond the limit, counted as this shard's."""
    done = DoneRows(20)
    zeros, ones = [0] * 4, [1] * 4
    done.add(pa.table({"row_index": [0, 1, 4, 16], "sample_index": zeros, "num_samples": ones}), "part")
    work = Work(share(20, shard=1, num_shards=3, limit=12), done)
    assert [i for i in range(20) if work.wants(i)] == [7, 10]
    assert work.num_done == 2
    assert work.share.num_rows == 4

"""What a resume believes: rows that are there once, of this input, in whole parts."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ember.data.done import DoneRows, drop_error_rows, read_parts
from ember.data.formats import part_format
from ember.data.store import LocalStore
from ember.data.writer import PartWriter, completions_schema
from ember.errors import UserError

SCHEMA = completions_schema(pa.schema([("topic", pa.string()), ("big", pa.int64())]))
FORMATS = ("parquet", "jsonl", "openai_batch")


def row(i, error=None):
    return {
        **{
            "row_index": i,
            "id": f"id{i}",
            "sample_index": 0,
            "num_samples": 1,
            "prompt": "p",
            "completion": "c",
            "token_ids": [i],
        },
        **{"prompt_token_ids": [1], "finish_reason": "error" if error else "stop", "error": error, "seed": 2**63 - 1},
        **{"num_prompt_tokens": 1, "num_output_tokens": 1, "topic": None, "big": -(2**63), "latency_s": 0.1},
    }


def write(folder, form, *rows, prefix="part-"):
    with PartWriter(
        LocalStore(folder), SCHEMA, form=part_format(form), commit_every=100, commit_every_s=100, prefix=prefix
    ) as writer:
        for one in rows:
            writer.write(one)


def rows_of(folder, form):
    spelled = part_format(form)
    store = LocalStore(folder)
    for name, _ in read_parts(store, spelled):
        with store.open(name) as file:
            for table in spelled.read(file, SCHEMA):
                yield from table.to_pylist()


def keys(*triples):
    """(row_index, sample_index, num_samples) of the samples in a part."""
    names = ("row_index", "sample_index", "num_samples")
    return pa.table({name: pa.array([t[i] for t in triples], pa.int64()) for i, name in enumerate(names)})


def done_rows(num_rows, *indices, **shard):
    done = DoneRows(num_rows, **shard)
    done.add(keys(*((i, 0, 1) for i in indices)), "here/part-00000.parquet")
    return done


def test_rows_that_are_there_are_done():
    """A row computed twice, or never; an index beyond the input, or a negative one, that wraps around."""
    done = done_rows(10, 0, 3, 9)
    assert [i for i in range(-10, 20) if i in done] == [0, 3, 9]
    assert done.count(0, 10, 1) == 3
    assert done.count(1, 10, 2) == 2
    assert done.count(0, 4, 3) == 2


@pytest.mark.parametrize("indices", [(3, 3), (10,), (-1,), (None,)], ids=["doubled", "beyond", "negative", "null"])
def test_a_row_that_cannot_be_is_named_with_its_part(indices):
    """Parts copied together from two outputs: the job would finish with rows missing or doubled."""
    with pytest.raises(
        UserError, match=rf"here/part-00000\.parquet: row_index {indices[-1]}, sample_index 0 is doubled or not"
    ):
        done_rows(10, *indices)


def test_another_shards_row_is_foreign():
    """A part of another shard under this one's name would hide that a row of that shard is done twice."""
    assert done_rows(10, 1, 4, 7, shard=1, num_shards=3).count(1, 10, 3) == 3
    with pytest.raises(UserError, match="row_index 2,"):
        done_rows(10, 1, 2, shard=1, num_shards=3)


def test_a_row_doubled_across_parts_is_found():
    """Each part alone looks fine."""
    done = done_rows(10, 1)
    with pytest.raises(UserError, match="other"):
        done.add(keys((0, 0, 1), (1, 0, 1)), "other")


def test_a_row_is_done_when_all_its_samples_are():
    """A row with one of three samples taken as done, and two samples never written; or all three computed again."""
    done = DoneRows(4)
    done.add(keys((1, 2, 3), (0, 0, 1), (2, 0, 2)), "a")
    assert [i for i in range(4) if i in done] == [0]
    assert [done.samples(i) for i in range(4)] == [frozenset(), {2}, {0}, frozenset()]
    done.add(keys((1, 0, 3), (1, 1, 3)), "b")
    assert [i for i in range(4) if i in done] == [0, 1]
    assert done.samples(1) == frozenset()
    assert done.count(0, 4, 1) == 2


@pytest.mark.parametrize("key", [(1, 2, 3), (0, 0, 1), (2, 2, 2), (2, -1, 2), (2, None, 2), (2, 0, None)])
def test_a_sample_that_cannot_be_is_named(key):
    """Two samples overwriting each other's output: the same key twice, and another one missing for ever."""
    done = DoneRows(4)
    done.add(keys((1, 2, 3), (0, 0, 1)), "a")
    with pytest.raises(UserError, match=rf"b: row_index {key[0]}, sample_index {key[1]} is doubled or not"):
        done.add(keys(key), "b")


@pytest.mark.parametrize("form", FORMATS)
def test_parts_are_read_in_order_and_only_those_of_the_prefix(tmp_path, form):
    """part-100000 before part-99999; another shard's rows, a half-written or a foreign file counted as this one's."""
    for number in (99_999, 100_000, 2):
        write(tmp_path, form, row(number))
        suffix = part_format(form).suffix
        (tmp_path / f"part-00000{suffix}").rename(tmp_path / f"aside-{number}")
    for number in (99_999, 100_000, 2):
        (tmp_path / f"aside-{number}").rename(tmp_path / f"part-{number:05d}{suffix}")
    write(tmp_path, form, row(7), prefix="part-s000of002-")
    (tmp_path / f".part-00003{suffix}.tmp-1").write_bytes(b"torn")
    (tmp_path / f"party{suffix}").write_bytes(b"mine")
    read = list(read_parts(LocalStore(tmp_path), part_format(form), "part-"))
    assert [name for name, _ in read] == [f"part-{n}{suffix}" for n in ("00002", "99999", "100000")]
    assert [table["row_index"].to_pylist() for _, table in read] == [[2], [99_999], [100_000]]
    shard = read_parts(LocalStore(tmp_path), part_format(form), "part-s000of002-")
    assert [table["row_index"].to_pylist() for _, table in shard] == [[7]]
    assert len(list(read_parts(LocalStore(tmp_path), part_format(form)))) == 4


@pytest.mark.parametrize("form", FORMATS)
def test_a_damaged_part_is_named(tmp_path, form):
    """A traceback of pyarrow's or json's; or the rows of a damaged part silently computed again."""
    write(tmp_path, form, row(0))
    (part,) = tmp_path.iterdir()
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"part-00000.*can't be read.*move it away and run again") as caught:
        list(read_parts(LocalStore(tmp_path), part_format(form)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMATS)
def test_error_rows_go_and_nothing_else_changes(tmp_path, form):
    """retry_errors that loses a good row, its types, or a part's number; or rewrites parts that have no errors."""
    write(tmp_path, form, row(0), row(1, error="bad_row: x"), row(2))
    write(tmp_path, form, row(3))
    write(tmp_path, form, row(4, error="bad_row: y"))
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert drop_error_rows(LocalStore(tmp_path), part_format(form), "part-") == 2
    expected = [{**dict.fromkeys(SCHEMA.names), **row(i)} for i in (0, 2, 3)]
    assert list(rows_of(tmp_path, form)) == expected
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert [name[:10] for name in sorted(before) if before[name] == after[name]] == ["part-00001"]
    assert drop_error_rows(LocalStore(tmp_path), part_format(form), "part-") == 0


@pytest.mark.parametrize("form", FORMATS)
def test_a_kill_while_errors_are_dropped_leaves_every_good_row(tmp_path, form, monkeypatch):
    """A part rewritten in place: killed in the middle, its good rows are gone."""
    write(tmp_path, form, row(0), row(1, error="bad_row: x"))
    (part,) = tmp_path.iterdir()
    whole = part.read_bytes()

    def die(_fd):
        assert part.read_bytes() == whole
        raise KeyboardInterrupt

    monkeypatch.setattr("ember.data.store.os.fsync", die)
    with pytest.raises(KeyboardInterrupt):
        drop_error_rows(LocalStore(tmp_path), part_format(form), "part-")
    assert part.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [part]


def test_a_part_whose_rows_all_go_stays_readable(tmp_path):
    """An empty part without a schema breaks everyone who reads the folder as one table."""
    write(tmp_path, "parquet", row(0, error="bad_row: x"))
    drop_error_rows(LocalStore(tmp_path), part_format("parquet"), "part-")
    table = pq.read_table(tmp_path)
    assert table.cast(SCHEMA).num_rows == 0
    assert table.schema.metadata == SCHEMA.metadata

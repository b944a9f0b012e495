"""Parts: whole, in order, exact, and readable by everyone; what a failing disk leaves behind."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig
from ember.core.stats import StepStats
from ember.data import store as store_module
from ember.data.columns import FIXED_COLUMNS
from ember.data.formats import ParquetFormat
from ember.data.store import LocalStore
from ember.data.writer import STEPS_SCHEMA, PartWriter, completions_schema, step_row
from ember.errors import JobError, UserError
from ember.job import Job, run_job
from ember.sampling_params import SamplingParams

SCHEMA = pa.schema([pa.field("row_index", pa.int64(), nullable=False), pa.field("text", pa.string())])
DESIGN_COMPLETIONS = [
    "row_index",
    "id",
    "sample_index",
    "num_samples",
    "prompt",
    "completion",
    "prompt_token_ids",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "error",
    "seed",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "cumulative_logprob",
    "logprobs",
    "prompt_logprobs",
    "queue_s",
    "ttft_s",
    "latency_s",
]
DESIGN_STEPS = [
    "run_id",
    "engine",
    "step",
    "start_s",
    "duration_s",
    "schedule_s",
    "model_s",
    "sample_s",
    "num_prefill_seqs",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_recomputed_tokens",
    "num_running",
    "num_waiting",
    "num_preempted",
    "num_finished",
    "blocks_total",
    "blocks_used",
    "blocks_cached",
    "blocks_free",
    "kv_tokens",
    "kv_utilization",
    "prefix_hit_tokens",
    "num_proposed_tokens",
    "num_accepted_tokens",
    "num_evicted_blocks",
]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Gate:
    """A disk that hangs: holds every part back until it is opened."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        real = store_module.os.fsync

        def wait_and_flush(fd):
            assert self.open.wait(10)
            real(fd)

        monkeypatch.setattr(store_module.os, "fsync", wait_and_flush)


def make(folder, *, commit_every=2, commit_every_s=1000.0, **kwargs):
    return PartWriter(LocalStore(folder), SCHEMA, commit_every=commit_every, commit_every_s=commit_every_s, **kwargs)


def part_sizes(folder):
    return [pq.read_metadata(part).num_rows for part in sorted(folder.iterdir())]


def row(i):
    return {"row_index": i, "text": f"row {i}"}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def indices(folder):
    return ds.dataset(folder).to_table()["row_index"].to_pylist()


def fail_with(code):
    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def test_completion_columns_are_the_design_s():
    """A column lost, renamed or moved would break everyone who reads completions by name or by position."""
    schema = completions_schema(pa.schema([]))
    assert schema.names == DESIGN_COMPLETIONS == list(FIXED_COLUMNS)
    assert schema.field("row_index").type == pa.int64()
    assert not schema.field("row_index").nullable
    assert schema.field("token_ids").type == pa.list_(pa.int32())
    assert schema.field("seed").type == pa.int64()
    assert schema.metadata == {b"ember.schema_version": b"2"}


def test_step_columns_are_the_design_s():
    """A field added to StepStats must not reach the file unnoticed, and none may be missing."""
    assert STEPS_SCHEMA.names == DESIGN_STEPS
    assert STEPS_SCHEMA.field("num_running").type == pa.int64()
    assert STEPS_SCHEMA.field("kv_utilization").type == pa.float64()


def test_passed_columns_keep_their_types_and_take_nulls():
    """A row too broken to parse has no value for a column that the input calls required; foreign metadata misleads."""
    passed = pa.schema([pa.field("n", pa.int16(), nullable=False, metadata={"a": "b"})], metadata={"pandas": "{}"})
    schema = completions_schema(passed)
    assert schema.field("n").type == pa.int16()
    assert schema.field("n").nullable
    assert schema.metadata == {b"ember.schema_version": b"2"}


def test_two_columns_of_one_name_are_refused():
    """Parquet takes them without a word, and no reader can tell them apart afterwards."""
    with pytest.raises(ValueError, match="prompt"):
        completions_schema(pa.schema([("prompt", pa.string())]))


def test_every_completion_value_comes_back_exactly(tmp_path):
    """Large seeds through a double, or a None list turned into an empty one."""
    schema = completions_schema(pa.schema([("price", pa.float32())]))
    full = {
        **{"row_index": 2**40, "id": "a", "sample_index": 1, "num_samples": 2, "prompt": "é\n", "completion": "漢字"},
        **{"prompt_token_ids": [1, 2], "token_ids": [], "finish_reason": "stop", "stop_reason": "\n", "error": None},
        **{"seed": 2**63 - 1, "num_prompt_tokens": 2, "num_output_tokens": 0, "num_cached_tokens": 0},
        **{"cumulative_logprob": -0.1, "logprobs": [[{"token_id": 1, "token": "a", "logprob": -0.5, "rank": 1}]]},
        **{
            "prompt_logprobs": [None, []],
            "num_preemptions": 3,
            "queue_s": 0.1,
            "ttft_s": None,
            "latency_s": 1e-9,
            "price": 0.5,
        },
    }
    with PartWriter(LocalStore(tmp_path), schema, commit_every=8, commit_every_s=8) as writer:
        writer.write(dict(full))
        writer.write({"row_index": 0, "error": "broken"})
    rows = pq.read_table(tmp_path).to_pylist()
    assert rows[0] == full
    assert rows[1] == {**dict.fromkeys(full), "row_index": 0, "error": "broken"}
    assert pq.read_schema(tmp_path / "part-00000.parquet").metadata[b"ember.schema_version"] == b"2"


def test_a_step_row_holds_the_statistics(tmp_path):
    """A value under its neighbour's name."""
    stats = StepStats(**{name: i for i, name in enumerate(DESIGN_STEPS[2:])})
    with PartWriter(LocalStore(tmp_path), STEPS_SCHEMA, commit_every=8, commit_every_s=8) as writer:
        writer.write(step_row("r1", 0, stats))
    assert pq.read_table(tmp_path).to_pylist() == [
        {"run_id": "r1", "engine": 0, **{name: i for i, name in enumerate(DESIGN_STEPS[2:])}}
    ]


def test_parts_hold_the_rows_in_order_and_nothing_else_is_left(tmp_path):
    """Rows lost, doubled or reordered between the buffer and the thread; a temporary file left over."""
    with make(tmp_path) as writer:
        for i in range(7):
            writer.write(row(i))
    assert indices(tmp_path) == list(range(7))
    assert all(name.startswith("part-") and name.endswith(".parquet") for name in names(tmp_path))


def test_rows_make_a_commit_due(tmp_path):
    """Parts that never come before the end, or one for each row."""
    writer = make(tmp_path, commit_every=3)
    for i in range(2):
        writer.write(row(i))
    writer.commit_if_due()
    assert names(tmp_path) == []
    writer.write(row(2))
    writer.commit(wait=True)
    assert names(tmp_path) == ["part-00000.parquet"]
    writer.close()


def test_seconds_make_a_commit_due_without_another_row(tmp_path):
    """A finished row that waits for hours in memory, because the next one takes hours."""
    clock = Clock()
    writer = make(tmp_path, commit_every=100, commit_every_s=30.0, clock=clock)
    clock.now += 500
    writer.write(row(0))
    clock.now += 29.9
    writer.commit_if_due()
    writer.write(row(1))
    clock.now += 0.1
    writer.commit_if_due()
    writer.write(row(2))
    writer.close()
    assert part_sizes(tmp_path) == [2, 1]


def test_a_folder_that_fails_at_the_start_is_no_mistake_in_the_settings(tmp_path, monkeypatch):
    """The disk went between the check of the folder and the first part: exit code 2 for it."""
    monkeypatch.setattr(LocalStore, "clear_temporary", fail_with(errno.EIO))
    with pytest.raises(JobError, match=f"can't write {tmp_path}: Input/output error"):
        make(tmp_path)


def test_an_empty_buffer_writes_nothing(tmp_path):
    """An empty part for each quiet half minute."""
    clock = Clock()
    writer = make(tmp_path, clock=clock)
    clock.now += 5000
    writer.commit_if_due()
    writer.commit(wait=True)
    writer.close()
    assert names(tmp_path) == []


def test_a_job_without_rows_leaves_a_readable_table(tmp_path):
    """pd.read_parquet fails on an empty folder: a job over an empty file must still be readable."""
    pandas = pytest.importorskip("pandas")
    with make(tmp_path):
        pass
    assert list(pandas.read_parquet(tmp_path).columns) == ["row_index", "text"]
    with make(tmp_path):
        pass
    assert names(tmp_path) == ["part-00000.parquet"]


def test_a_failed_job_without_rows_leaves_no_part(tmp_path):
    """An empty part after a failed start would make the next try refuse the folder as full of results."""
    with pytest.raises(ZeroDivisionError), make(tmp_path):
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_numbers_go_on_after_the_parts_that_are_there(tmp_path):
    """A second run that overwrites part-00000; parts of another prefix (a shard) or a gap counted wrongly."""
    for name in ("part-00000", "part-00007", "part-s000of002-00031"):
        pq.write_table(pa.table({"row_index": [9]}), tmp_path / f"{name}.parquet")
    before = (tmp_path / "part-00007.parquet").read_bytes()
    with make(tmp_path) as writer:
        writer.write(row(0))
    with make(tmp_path, prefix="part-s000of002-") as writer:
        writer.write(row(0))
    assert names(tmp_path)[2:] == [
        *("part-00008.parquet", "part-s000of002-00031.parquet", "part-s000of002-00032.parquet")
    ]
    assert (tmp_path / "part-00007.parquet").read_bytes() == before


def test_a_half_written_file_is_no_part(tmp_path):
    """What a killed writer left must not be read as a part, not be counted, and not pile up."""
    (tmp_path / ".part-00000.parquet.tmp-4711").write_bytes(b"PAR1 torn")
    (tmp_path / ".part-s001of002-00000.parquet.tmp-4711").write_bytes(b"another shard's, alive")
    with make(tmp_path) as writer:
        writer.write(row(0))
        writer.commit(wait=True)
        assert indices(tmp_path) == [0]
    assert names(tmp_path) == [".part-s001of002-00000.parquet.tmp-4711", "part-00000.parquet"]


def test_a_part_is_not_there_until_it_is_whole(tmp_path, monkeypatch):
    """A reader, or a kill, between the first byte and the last: the final name must not exist yet."""
    seen = []
    real = store_module.os.fsync
    monkeypatch.setattr(store_module.os, "fsync", lambda fd: (seen.append(names(tmp_path)), real(fd)))
    with make(tmp_path) as writer:
        writer.write(row(0))
    (temporary,) = seen[0]
    assert temporary.startswith(".part-00000.parquet.tmp-")
    assert seen[1] == ["part-00000.parquet"]


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_a_full_disk_costs_one_part_and_says_so(tmp_path, monkeypatch, where):
    """A torn part, a temporary file left over, earlier parts harmed, or a traceback instead of one line."""
    writer = make(tmp_path)
    writer.write(row(0))
    writer.commit(wait=True)
    if where == "write":
        monkeypatch.setattr(ParquetFormat, "sink", fail_with(errno.ENOSPC))
    else:
        monkeypatch.setattr(store_module.os, "fsync", fail_with(errno.ENOSPC))
    writer.write(row(1))
    with pytest.raises(UserError) as caught:
        writer.close()
    text = str(caught.value)
    assert "part-00001.parquet" in text
    assert "No space left on device" in text
    assert "\n" not in text
    assert names(tmp_path) == ["part-00000.parquet"]
    assert indices(tmp_path) == [0]
    writer.close()


def test_a_removed_folder_is_named(tmp_path):
    """FileNotFoundError as a traceback out of a thread."""
    folder = tmp_path / "completions"
    folder.mkdir()
    writer = make(folder)
    folder.rmdir()
    writer.write(row(0))
    with pytest.raises(UserError, match=r"completions/part-00000\.parquet: No such file"):
        writer.close()


def test_a_failure_in_the_background_surfaces_at_the_next_call(tmp_path, monkeypatch):
    """A job that computes for hours after its disk has failed, and then reports success."""
    monkeypatch.setattr(ParquetFormat, "sink", fail_with(errno.EIO))
    writer = make(tmp_path, commit_every=1)
    writer.write(row(0))
    for call in (lambda: writer.commit(wait=True), lambda: writer.write(row(1)), writer.commit, writer.close):
        with pytest.raises(UserError, match="Input/output error"):
            call()
    assert names(tmp_path) == []


def test_write_notices_a_failure_by_itself(tmp_path, monkeypatch):
    """A caller that only ever writes must hear of it, too."""
    monkeypatch.setattr(ParquetFormat, "sink", fail_with(errno.EIO))
    writer = make(tmp_path, commit_every=1)
    with pytest.raises(UserError, match="Input/output error"):
        for i in range(1000):
            writer.write(row(i))
            time.sleep(0.001)
    with pytest.raises(UserError):
        writer.close()


def test_a_failed_write_does_not_hide_the_first_error(tmp_path, monkeypatch):
    """The engine's error is the one to mend; the disk's comes as a note to it."""
    monkeypatch.setattr(ParquetFormat, "sink", fail_with(errno.ENOSPC))
    with pytest.raises(ZeroDivisionError) as caught, make(tmp_path) as writer:
        writer.write(row(0))
        raise ZeroDivisionError
    assert "No space left" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_finished_rows_are_kept_when_the_job_fails(tmp_path, error):
    """Up to commit_every finished rows thrown away because a later one met a bug or Ctrl-C."""
    with pytest.raises(error), make(tmp_path) as writer:
        writer.write(row(0))
        raise error
    assert indices(tmp_path) == [0]


def test_the_engine_does_not_wait_for_a_slow_disk(tmp_path, monkeypatch):
    """A step that waits for fsync; then order and completeness of what piled up meanwhile."""
    gate = Gate(monkeypatch)
    writer = make(tmp_path, commit_every=2)
    for i in range(20):
        writer.write(row(i))
    assert list(tmp_path.glob("*.parquet")) == []
    gate.open.set()
    writer.close()
    assert indices(tmp_path) == list(range(20))
    assert len(names(tmp_path)) == 2


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "The sea"}\n' * 12)
    return path


def job(prompts, output, **settings):
    sampling = SamplingParams(max_tokens=3)
    return JobConfig(data=str(prompts), output=str(output), sampling=sampling, progress=False, **settings)


def test_steps_go_on_while_a_part_is_being_flushed(prompts, tmp_path, monkeypatch):
    """A part that is written between two steps: here its fsync returns only once later steps have run."""
    steps, flushed_by, in_time = [], [], []
    fsync, record = store_module.os.fsync, Job._record

    def slow_fsync(fd):
        if "completions/.part-00000" in os.readlink(f"/proc/self/fd/{fd}"):
            flushed_by.append(threading.current_thread().name)
            before = len(steps)
            deadline = time.monotonic() + 20
            while len(steps) < before + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            in_time.append(len(steps) >= before + 3)
        fsync(fd)

    monkeypatch.setattr(store_module.os, "fsync", slow_fsync)
    monkeypatch.setattr(Job, "_record", lambda self, *args: (record(self, *args), steps.append(None))[0])
    run_job(job(prompts, tmp_path / "out", commit_every=2, max_num_seqs=2))
    assert in_time == [True]
    assert flushed_by[0].startswith("ember-writer")


@pytest.mark.parametrize("commit", [{"commit_every": 4}, {"commit_every_s": 1e-9}], ids=["rows", "seconds"])
def test_a_job_commits_as_it_is_told(prompts, tmp_path, commit):
    """commit_every or commit_every_s that never reaches the writer: all rows in memory until the end."""
    run_job(job(prompts, tmp_path / "out", max_num_seqs=4, **commit))
    sizes = [pq.read_metadata(part).num_rows for part in sorted((tmp_path / "out" / "completions").iterdir())]
    assert sum(sizes) == 12
    assert len(sizes) >= 2


def test_memory_is_bounded_when_the_disk_hangs(tmp_path, monkeypatch):
    """Rows without end in memory behind a disk that is slower than the engine."""
    gate = Gate(monkeypatch)
    writer = make(tmp_path, commit_every=1)
    writer.write(row(0))
    threading.Timer(0.2, gate.open.set).start()
    for i in range(1, 40):
        writer.write(row(i))
    assert gate.open.is_set()
    writer.close()
    assert max(part_sizes(tmp_path)) <= 16  # a part takes all rows that waited
    assert indices(tmp_path) == list(range(40))


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), 1.0),
        (pa.int64(), True),
        (pa.int64(), "7"),
        (pa.int64(), 2**63),
        (pa.int32(), 2**31),
        (pa.float64(), True),
        (pa.float64(), 2**53 + 1),
        (pa.string(), 7),
        (pa.string(), "\ud800"),
        (pa.bool_(), 1),
        (pa.list_(pa.int32()), [1, "x"]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(tmp_path, type_, value):
    """pa.array writes 1.5 into an integer column as 1, and True into a double as 1.0, without a word."""
    schema = pa.schema([("good", pa.string()), ("odd_one", type_)])
    writer = PartWriter(LocalStore(tmp_path), schema, commit_every=10, commit_every_s=10)
    writer.write({"good": "x", "odd_one": None})
    writer.write({"good": "x", "odd_one": value})
    with pytest.raises(TypeError, match=r"column 'odd_one' \(.*\) can't hold") as caught:
        writer.close()
    assert ascii(value) in str(caught.value)
    assert names(tmp_path) == []


def test_a_row_without_its_key_is_refused(tmp_path):
    """Parquet would store a null row_index, and a resume could not tell which row it was."""
    writer = make(tmp_path)
    writer.write({"text": "x"})
    with pytest.raises(TypeError, match="row_index"):
        writer.close()


def test_an_unknown_column_is_refused(tmp_path):
    """A misspelt column would be null in every row."""
    writer = make(tmp_path)
    with pytest.raises(KeyError, match="txet"):
        writer.write({"row_index": 0, "txet": "x"})
    writer.close()


def test_a_closed_writer_takes_no_rows(tmp_path):
    """A row written after the last commit would vanish."""
    writer = make(tmp_path)
    writer.close()
    with pytest.raises(RuntimeError, match="closed"):
        writer.write(row(0))


def test_a_part_that_appears_from_elsewhere_is_not_overwritten(tmp_path):
    """Two writers of one prefix (no lock, a copied file): the second must fail, not replace."""
    writer = make(tmp_path)
    (tmp_path / "part-00000.parquet").write_bytes(b"somebody's")
    writer.write(row(0))
    with pytest.raises(UserError, match="exists already"):
        writer.close()
    assert (tmp_path / "part-00000.parquet").read_bytes() == b"somebody's"


def test_duckdb_reads_the_folder_as_one_table(tmp_path):
    """Parts whose schemas differ (a column null throughout one part), or a file among them that is no part."""
    duckdb = pytest.importorskip("duckdb")
    schema = completions_schema(pa.schema([("topic", pa.string())]))
    with PartWriter(LocalStore(tmp_path), schema, commit_every=1, commit_every_s=10) as writer:
        for i in range(3):
            writer.write({"row_index": i, "topic": "a" if i else None, "token_ids": [i]})
            writer.commit(wait=True)
    (tmp_path / ".part-00003.parquet.tmp-1").write_bytes(b"torn")
    query = f"select row_index, topic, token_ids from read_parquet('{tmp_path}/*.parquet') order by 1"
    assert duckdb.sql(query).fetchall() == [(0, None, [0]), (1, "a", [1]), (2, "a", [2])]
    assert ds.dataset(tmp_path).to_table().num_rows == 3

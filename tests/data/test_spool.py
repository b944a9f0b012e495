"""`data=-`: rows from standard input, kept in the output before anything is made of them."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig
from ember.data.folder import OutputFolder
from ember.data.spool import stdin_as_file
from ember.errors import UserError
from ember.job import run_job
from ember.sampling_params import SamplingParams

ROWS = b'{"prompt": "Call me", "id": "a", "n": 1}\n{"prompt": "The sea", "id": "a", "n": 2.5}\n{"prompt": "A whale"}\n'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def pipe(monkeypatch):
    """Gives stdin its content; None closes it."""

    def give(data: bytes | None):
        monkeypatch.setattr(sys, "stdin", None if data is None else io.TextIOWrapper(io.BytesIO(data)))

    give(b"")
    return give


def job(output, **config) -> JobConfig:
    fast = {"sampling": SamplingParams(max_tokens=2), "progress": False, "attention": "batched", "pool_size": "4096tok"}
    return JobConfig(data="-", output=str(output), **(fast | config))


def completions(output) -> list[dict]:
    table = pq.read_table(output / "completions")
    return sorted(table.to_pylist(), key=lambda row: row["row_index"])


def test_stdin_reads_like_a_file(tmp_path, pipe):
    """Stdin can be read once only: there were no types, no row count and nothing to resume from."""
    pipe(ROWS)
    summary = run_job(job(tmp_path / "o"))
    rows = completions(tmp_path / "o")
    assert [(row["prompt"], row["id"], row["n"]) for row in rows] == [
        ("Call me", "a", 1.0),
        ("The sea", "a", 2.5),
        ("A whale", None, None),
    ]
    assert summary.exit_code == 0 and summary.num_duplicate_ids == 1
    assert (tmp_path / "o" / "stdin.jsonl").read_bytes() == ROWS
    assert not [path for path in (tmp_path / "o").iterdir() if "tmp" in path.name or "new" in path.name]


def test_resume_with_nothing_the_same_and_other_rows(tmp_path, pipe, capsys):
    """A restart without the pipe lost the input; one with other rows mixed two inputs in one output."""
    output = tmp_path / "o"
    pipe(ROWS)
    run_job(job(output, limit=1))
    for again, total in [(b"", 2), (None, 2), (ROWS, 3)]:
        pipe(again)
        assert run_job(job(output, limit=total)).num_rows_done == total
    parts = sorted(path.name for path in (output / "completions").iterdir())
    for config in ({}, {"limit": 1}):
        pipe(ROWS.replace(b"sea", b"sky"))
        with pytest.raises(UserError, match=r"results of another job.*data: "):
            run_job(job(output, **config))
        assert (output / "stdin.jsonl").read_bytes() == ROWS
        assert not (output / "stdin-new.jsonl").exists()
    assert sorted(path.name for path in (output / "completions").iterdir()) == parts
    sys.stdin = Terminal()
    assert run_job(job(output)).num_rows_done == 3


def test_duplicate_ids_are_counted_over_all_attempts(tmp_path, pipe, capsys):
    """After a resume only the rows of the last attempt were compared."""
    pipe(b"".join(b'{"prompt": "x", "id": "%d"}\n' % (i % 2) for i in range(4)) + b'{"prompt": "x"}\n' * 2)
    assert run_job(job(tmp_path / "o", limit=2)).num_duplicate_ids == 0
    assert "occurred before" not in capsys.readouterr().out
    summary = run_job(job(tmp_path / "o"))
    assert summary.num_duplicate_ids == 2
    assert "2 rows have an id that occurred before" in capsys.readouterr().out
    assert json.loads((tmp_path / "o" / "summary.json").read_text())["num_duplicate_ids"] == 2


def test_force_moves_the_old_rows_aside(tmp_path, pipe, capsys):
    """`force=true` read the old stdin again, or lost it."""
    output = tmp_path / "o"
    pipe(ROWS)
    run_job(job(output, limit=1))
    pipe(b"")
    with pytest.raises(UserError, match=r"nothing came"):
        run_job(job(output, force=True))
    pipe(b"\x1f\x8bnot rows")
    with pytest.raises(UserError, match=r"gzip"):
        run_job(job(output, force=True))
    assert (output / "stdin.jsonl").read_bytes() == ROWS and (output / "manifest.json").exists()
    pipe(b'{"prompt": "New"}\n')
    run_job(job(output, force=True))
    assert [row["prompt"] for row in completions(output)] == ["New"]
    (aside,) = output.glob("old-*")
    assert (aside / "stdin.jsonl").read_bytes() == ROWS
    assert "old results are now in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stdin", "what"), [(Terminal(), "terminal"), (None, "closed"), (io.TextIOWrapper(io.BytesIO()), "nothing")]
)
def test_first_run_needs_rows(tmp_path, monkeypatch, stdin, what):
    """A forgotten pipe waited for the keyboard, or finished with no rows and exit code 0."""
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(UserError, match=f"^data=-: .*{what}"):
        run_job(job(tmp_path / "o"))
    assert not (tmp_path / "o").exists()


def test_dry_run_leaves_nothing(tmp_path, pipe, capsys, monkeypatch):
    """A dry run made the output folder, or left its copy of stdin behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    pipe(ROWS)
    run_job(job(tmp_path / "o", dry_run=True))
    assert "data    3 rows" in capsys.readouterr().out
    assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]


def test_what_stdin_cannot_do():
    """Two shards each read half of one pipe."""
    with pytest.raises(UserError, match=r"^num_shards=2: shards can't share stdin"):
        JobConfig(data="-", shard=0, num_shards=2)
    with pytest.raises(UserError, match=r"^data=-: stdin stands alone"):
        JobConfig(data=["-", "a.jsonl"])


def test_rows_of_a_failed_start_are_kept(tmp_path, pipe):
    """A typo in a setting threw away what a long query had produced."""
    pipe(ROWS)
    with pytest.raises(UserError, match=r"id_column"):
        run_job(job(tmp_path / "o", id_column="nope"))
    pipe(b"")
    assert run_job(job(tmp_path / "o", limit=1)).num_rows_done == 1
    pipe(b'{"prompt": "other"}\n')
    with pytest.raises(UserError):
        run_job(job(tmp_path / "p", id_column="nope"))
    pipe(ROWS)
    assert run_job(job(tmp_path / "p", limit=1)).num_rows_total == 1
    assert (tmp_path / "p" / "stdin.jsonl").read_bytes() == ROWS


def test_stdin_against_results_of_a_file_leaves_no_spool(tmp_path, pipe):
    """A refused start left rows that a later one took for the output's own."""
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    config = job(tmp_path / "o", limit=1)
    config.data = [str(tmp_path / "a.jsonl")]
    run_job(config)
    pipe(b'{"prompt": "other"}\n')
    with pytest.raises(UserError, match=r"another job"):
        run_job(job(tmp_path / "o"))
    assert not (tmp_path / "o" / "stdin.jsonl").exists()
    pipe(ROWS)
    assert run_job(job(tmp_path / "o")).num_rows_done == 3


def test_half_written_spool_of_a_killed_start(tmp_path, pipe):
    """A killed start's half of stdin was read as the whole, or lay there for ever."""
    output = tmp_path / "o"
    output.mkdir()
    for name in (".stdin.jsonl.tmp-0123456789ab", "stdin-new.jsonl"):
        (output / name).write_bytes(ROWS[:50])
    pipe(ROWS)
    with OutputFolder(str(output)) as folder, stdin_as_file(job(output), folder) as source:
        assert Path(source.data[0]).read_bytes() == ROWS
    assert [path.name for path in output.iterdir() if "stdin" in path.name] == ["stdin.jsonl"]


def test_interrupt_while_waiting(tmp_path, monkeypatch):
    """Ctrl-C did nothing until the other end of the pipe closed."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as stdin, open(writing, "wb") as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        writer.write(ROWS)
        writer.flush()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        summary = run_job(job(tmp_path / "o"))
    assert summary.exit_code == 130
    assert not (tmp_path / "o").exists()

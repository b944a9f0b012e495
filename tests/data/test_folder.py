"""The output folder: one job at a time, never over results, small files whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ember.data import store as store_module
from ember.data.folder import OutputFolder
from ember.data.store import FileLock
from ember.errors import JobError, UserError

HOLDER = """
import sys, time
from ember.data.folder import OutputFolder
from ember.data.store import FileLock
folder = OutputFolder(sys.argv[1]).create()
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path/out."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def refuse(path, *words):
    with pytest.raises(UserError) as caught:
        OutputFolder(str(path)).create()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_the_layout_is_made_with_its_parents(tmp_path):
    """A fresh checkout has no outputs/ folder, let alone a dated one."""
    with OutputFolder(str(tmp_path / "a" / "b")) as folder:
        assert folder.path == str(tmp_path / "a" / "b")
        assert names(folder.path) == [".lock", "completions", "steps"]
        assert not folder.has_parts()


def test_hydras_folder_and_log_are_no_results(tmp_path):
    """Hydra writes into the default output before the job starts: that must not read as an earlier job."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "run.log").write_text("")
    OutputFolder(str(tmp_path)).create().release()


def test_a_second_try_after_a_failed_start_is_allowed(tmp_path):
    """A job that failed before its first row leaves folders and a config.yaml; that must not block the folder."""
    for text in ("seed: 0\n", "seed: 1\n"):
        with OutputFolder(str(tmp_path)) as folder:
            folder.write_config(text)
            folder.write_summary({"status": "failed"})
    assert (tmp_path / "config.yaml").read_text().endswith("seed: 1\n")


def test_a_failed_start_leaves_nothing_behind(tmp_path):
    """output=typo with a wrong data path must not litter the disk with empty folders."""
    out = tmp_path / "out"
    with pytest.raises(UserError), OutputFolder(str(out)):
        raise UserError("no such data")
    assert not out.exists()


def test_a_failed_start_takes_its_lock_along(tmp_path):
    """In a folder that was there before, which Hydra's is, the lock file stayed, and so the folder did."""
    for shard in (None, 1):
        with pytest.raises(UserError), OutputFolder(str(tmp_path), shard, 2):
            raise UserError("no such data")
    (tmp_path / "config.yaml").write_text("mine: true\n")
    refuse(tmp_path, "ember did not write")
    assert names(tmp_path) == ["config.yaml"]


def test_a_full_disk_is_no_mistake_in_the_settings(tmp_path, monkeypatch):
    """Exit code 2, and the advice to choose another output, for a disk without room for the folder."""

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(JobError, match=r"can't write .*/out: No space left on device$"):
        OutputFolder(str(tmp_path / "out")).create()


def test_a_refused_folder_is_not_left_locked(tmp_path):
    """A refusal that keeps the lock would block the folder for the rest of a sweep."""
    (tmp_path / "config.yaml").write_text("mine: true\n")
    refuse(tmp_path, "ember did not write")
    (tmp_path / "config.yaml").unlink()
    OutputFolder(str(tmp_path)).create().release()


def test_results_move_aside_whole_and_nothing_is_mixed(tmp_path):
    """force=true that leaves old parts beside new ones, or loses the old manifest."""
    with OutputFolder(str(tmp_path)) as folder:
        assert folder.move_aside() is None
        (tmp_path / "completions" / "part-00000.parquet").write_text("old")
        (tmp_path / "manifest.json").write_text("{}")
        aside = Path(folder.move_aside())
        assert aside.parent == tmp_path
        assert names(aside) == ["completions", "manifest.json", "steps"]
        assert (aside / "completions" / "part-00000.parquet").read_text() == "old"
        assert not folder.has_parts() and names(tmp_path / "steps") == []


def test_shards_share_a_folder_but_not_a_lock(tmp_path):
    """Eight shards of one job in one folder: each may run, none twice."""
    with OutputFolder(str(tmp_path), 0, 2) as first, OutputFolder(str(tmp_path), 1, 2) as second:
        assert (first.part_prefix, second.part_prefix) == ("part-s000of002-", "part-s001of002-")
        assert first.summary_name == "summary-s000of002.json"
        with pytest.raises(UserError, match="another job"):
            OutputFolder(str(tmp_path), 1, 2).create()
        (tmp_path / "manifest.json").write_text("{}")
        with pytest.raises(UserError, match="another job"):
            first.move_aside()


def test_somebody_elses_config_is_not_written_over(tmp_path):
    """output=. in a Hydra project of one's own would replace that project's config.yaml."""
    (tmp_path / "config.yaml").write_text("mine: true\n")
    refuse(tmp_path, "config.yaml", "another output")
    assert (tmp_path / "config.yaml").read_text() == "mine: true\n"


def test_a_file_in_the_way_is_named(tmp_path):
    """NotADirectoryError or FileExistsError as a traceback."""
    (tmp_path / "file").write_text("")
    refuse(tmp_path / "file", f"output={tmp_path}/file", "is a file")
    refuse(tmp_path / "file" / "below", f"output={tmp_path}/file/below", "is a file")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "completions").write_text("")
    refuse(tmp_path / "out", f"output={tmp_path}/out", "completions is in the way")


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_an_unwritable_folder_is_named(tmp_path, monkeypatch, call):
    """PermissionError or EROFS as a traceback, and a lock that stays."""

    def refused(*_args, **_kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, call, refused)
        refuse(tmp_path / "out", f"output={tmp_path}/out", "Read-only file system")
    OutputFolder(str(tmp_path / "out")).create().release()


def test_a_url_is_not_made_a_folder(tmp_path, monkeypatch):
    """Path("s3://b") is the local folder s3:/b: the results would lie where nobody looks."""
    monkeypatch.chdir(tmp_path)
    refuse("nope://bucket/out", "output=nope://bucket/out", "no such kind of URL")
    OutputFolder(f"file://{tmp_path}/out").create().release()
    assert names(tmp_path) == ["out"]


def test_two_moves_in_one_second_do_not_meet(tmp_path, monkeypatch):
    """force=true twice within a second: the second move failed on the first one's folder."""
    monkeypatch.setattr("ember.data.folder.time.strftime", lambda form: "old-then")
    with OutputFolder(str(tmp_path)) as folder:
        for text in ("first", "second"):
            (tmp_path / "completions" / "part-00000.parquet").write_text(text)
            folder.move_aside()
    texts = [
        (tmp_path / name / "completions" / "part-00000.parquet").read_text() for name in ("old-then", "old-then-2")
    ]
    assert texts == ["first", "second"]


def test_a_shard_moves_only_its_own_parts(tmp_path):
    """-m shard=range(2) force=true: the second shard moved away what the first had just written."""
    with OutputFolder(str(tmp_path), 1, 2) as folder:
        for shard in (0, 1):
            (tmp_path / "completions" / f"part-s00{shard}of002-00000.parquet").write_text("")
            (tmp_path / f"summary-s00{shard}of002.json").write_text("{}")
        folder.move_aside(own_only=True)
    (old,) = [name for name in names(tmp_path) if name.startswith("old-")]
    assert names(tmp_path / "completions") == ["part-s000of002-00000.parquet"]
    assert names(tmp_path / old) == ["completions", "summary-s001of002.json"]
    assert names(tmp_path / old / "completions") == ["part-s001of002-00000.parquet"]


def test_a_lock_of_a_removed_folder_keeps_nobody_out(tmp_path):
    """A failed start removes its .lock: a job that had opened it before locked a file that no other could see."""
    path = tmp_path / ".lock"
    first = FileLock(path)
    waiting = threading.Thread(target=lambda: held.append(FileLock(path, wait=True)))
    held = []
    waiting.start()
    path.unlink()
    first.release()
    waiting.join(10)
    with pytest.raises(BlockingIOError):
        FileLock(path)
    held[0].release()


def test_two_jobs_of_one_process_do_not_share_a_folder(tmp_path):
    """A lock that belongs to the process would let a sweep in one process write twice to one folder."""
    with OutputFolder(str(tmp_path)):
        refuse(tmp_path, "another job is writing to", str(tmp_path))
    OutputFolder(str(tmp_path)).create().release()


def test_another_process_is_kept_out(tmp_path, holder):
    """Two jobs that write part-00000 of one folder."""
    refuse(tmp_path / "out", "another job is writing to", str(tmp_path / "out"))


def test_the_lock_dies_with_its_job(tmp_path, holder):
    """A lock file that outlives a killed job would have to be removed by hand."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    OutputFolder(str(tmp_path / "out")).create().release()


def test_small_files_hold_what_was_given(tmp_path):
    """Escaped or mangled text; a lone surrogate in an error message must not cost the summary."""
    with OutputFolder(str(tmp_path)) as folder:
        folder.write_config("prompt: 漢字\n")
        folder.write_summary({"error": "漢\ud800"})
    assert (tmp_path / "config.yaml").read_text("utf-8").splitlines()[1:] == ["prompt: 漢字"]
    assert "漢" in (tmp_path / "summary.json").read_text("utf-8")
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == {"error": "漢\ud800"}
    assert names(tmp_path) == [".lock", "completions", "config.yaml", "steps", "summary.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """An empty or torn summary.json after a full disk, or a temporary file left over."""
    with OutputFolder(str(tmp_path)) as folder:
        folder.write_summary({"n": 1})
        before = names(tmp_path)

        def full(_fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(store_module.os, "fsync", full)
        with pytest.raises(UserError, match=r"can't write .*summary\.json: No space left on device"):
            folder.write_summary({"n": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"n": 1}
    assert names(tmp_path) == before


def test_not_a_number_is_no_json(tmp_path):
    """NaN in a .json file breaks every strict reader; the old file must survive the refusal."""
    with OutputFolder(str(tmp_path)) as folder:
        folder.write_summary({"n": 1})
        with pytest.raises(ValueError, match="JSON"):
            folder.write_summary({"n": float("nan")})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"n": 1}


def test_nothing_is_written_without_the_lock(tmp_path):
    """A summary written after release() could hit the next job's folder."""
    with OutputFolder(str(tmp_path)) as folder:
        pass
    with pytest.raises(RuntimeError, match="lock"):
        folder.write_summary({})


def test_what_a_killed_job_left_half_written_is_cleared_away(tmp_path):
    """A temporary file for each kill, for ever; or the one that another shard is about to rename."""
    for name in (".summary-s000of002.json.tmp-ab12", ".summary-s001of002.json.tmp-ab12", ".manifest.json.tmp-ab12"):
        (tmp_path / name).write_text("{")
    OutputFolder(str(tmp_path), 0, 2).create().release()
    left = [name for name in names(tmp_path) if ".tmp-" in name]
    assert left == [".manifest.json.tmp-ab12", ".summary-s001of002.json.tmp-ab12"]
    OutputFolder(str(tmp_path)).create().release()
    assert [name for name in names(tmp_path) if ".tmp-" in name] == [".summary-s001of002.json.tmp-ab12"]


def test_a_file_system_that_cannot_flush_folders_is_used_all_the_same(tmp_path, monkeypatch):
    """fsync of a folder is EINVAL on some network file systems."""
    real = os.fsync

    def fsync(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd)

    monkeypatch.setattr(store_module.os, "fsync", fsync)
    with OutputFolder(str(tmp_path)) as folder:
        folder.write_summary({"n": 1})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"n": 1}

"""Where results lie: on a disk that fills up, goes read-only or goes away, and in an object store."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ember.config import JobConfig
from ember.data.export import export
from ember.data.remote_store import RemoteStore
from ember.data.store import LocalStore, open_store
from ember.errors import ConfigError, JobError, UserError
from ember.job import Job, run_job
from ember.run import main
from ember.sampling_params import SamplingParams


@pytest.fixture(params=["local", "remote"])
def store(request, tmp_path):
    """An empty store of each kind."""
    if request.param == "local":
        yield open_store(str(tmp_path / "out"))
        return
    remote = open_store("memory://test-store/out")
    yield remote
    remote._fs.rm("/test-store", recursive=True)


def put(store, name, data, **how):
    store.put_atomically(name, lambda file: file.write(data), **how)


def read(store, name):
    with store.open(name) as file:
        return file.read()


def test_both_kinds_of_store_do_the_same(store):
    """A difference that a writer or a resume would have to know of."""
    assert store.names() == [] and not store.exists("a")
    assert store.make()
    below = store.sub("below")
    below.make()
    put(store, "a", b"1")
    put(store, "a", b"22")
    put(below, "b", b"3")
    assert read(store, "a") == b"22"
    assert (store.names(), below.names()) == (["a", "below"], ["b"])
    assert store.exists("a") and store.exists("below") and not store.exists("b")
    assert store.create_exclusive("c", b"4") and not store.create_exclusive("c", b"5")
    assert read(store, "c") == b"4"
    with pytest.raises(UserError, match="exists already; another job writes"):
        put(store, "a", b"7", new=True)
    put(store, "d", b"8", new=True)
    with pytest.raises(FileNotFoundError):
        store.open("nothing")
    with store.open("a") as file:
        file.seek(1)
        assert file.read() == b"2"
    store.remove("d")
    store.remove("d")
    assert store.names() == ["a", "below", "c"]


def test_files_and_folders_move(store):
    """force=true in an object store, which knows no rename: files lost, or left where they were."""
    store.make()
    store.sub("completions").make()
    put(store.sub("completions"), "part-00000.parquet", b"1")
    put(store, "manifest.json", b"2")
    store.sub("old").make()
    store.move("completions", "old")
    store.move("manifest.json", "old")
    assert store.names() == ["old"]
    assert read(store.sub("old").sub("completions"), "part-00000.parquet") == b"1"
    assert read(store.sub("old"), "manifest.json") == b"2"


def test_a_failed_write_changes_nothing(store):
    """A torn object or file after an error while a part is made."""
    store.make()
    put(store, "a", b"old")

    def fail(file):
        file.write(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put_atomically("a", fail)
    assert read(store, "a") == b"old"
    assert store.names() == ["a"]


class Service:
    """A file system that refuses what `pipe_file` is asked, as a service's own library does."""

    def __init__(self, error, *, conditional=True):
        self.error, self.conditional, self.put = error, conditional, []

    def pipe_file(self, path, data, mode="overwrite"):
        if not self.conditional and mode == "create":
            raise NotImplementedError
        if self.error is not None:
            raise self.error
        self.put.append((path, data))

    def exists(self, path):
        return path in dict(self.put)

    def invalidate_cache(self):
        pass


class NoCredentialsError(Exception):
    """botocore's is no OSError either."""


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Access\nDenied"), NoCredentialsError("no\nkeys")])
def test_a_refusal_of_a_service_is_one_line(error):
    """A traceback through five libraries."""
    remote = RemoteStore(Service(error), "bucket/out", "s3://bucket/out")
    with pytest.raises(UserError, match=r"can't write s3://bucket/out/a: .*(Access Denied|no keys)") as caught:
        put(remote, "a", b"")
    assert "\n" not in str(caught.value)


def test_without_conditional_puts_the_name_is_looked_up():
    """A service that does not know them: no manifest at all, or one written over another."""
    remote = RemoteStore(Service(None, conditional=False), "bucket/out", "s3://bucket/out")
    assert remote.create_exclusive("a", b"1")
    assert not remote.create_exclusive("a", b"2")


def test_a_missing_package_is_named(monkeypatch):
    """ImportError as a traceback, and no word of what to install."""
    import fsspec

    def missing(_protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "get_filesystem_class", missing)
    for url, package, extra in (("s3://b/x", "s3fs", "s3"), ("gs://b/x", "gcsfs", "gcs")):
        with pytest.raises(ConfigError, match=rf"output={url}: needs {package}: pip install 'ember-batch\[{extra}\]'"):
            open_store(url)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "prompt": f"The sea {i}"}) + "\n" for i in range(8)))
    return path


def job(prompts, output, **settings):
    defaults = {"sampling": SamplingParams(max_tokens=2), "progress": False, "commit_every": 2, "max_num_seqs": 2}
    return JobConfig(data=str(prompts), output=str(output), **{**defaults, **settings})


def completions(output, to):
    export(str(output), str(to), force=True)
    return [json.loads(line)["token_ids"] for line in to.open()]


def run_and_resume(prompts, url, tmp_path):
    """A job in a bucket, in two goes: the rows of a local job, and nothing but whole files."""
    run_job(job(prompts, tmp_path / "local"))
    assert run_job(job(prompts, url, limit=3)).num_rows_done == 3
    resumed = run_job(job(prompts, url))
    assert (resumed.num_rows_before, resumed.num_rows_done, resumed.exit_code) == (3, 8, 0)
    assert completions(url, tmp_path / "r.jsonl") == completions(tmp_path / "local", tmp_path / "l.jsonl")
    store = open_store(url)
    assert store.names() == [".hashes.json", "completions", "config.yaml", "manifest.json", "steps", "summary.json"]
    assert json.loads(read(store, "summary.json"))["total"]["num_rows"] == 8
    with pytest.raises(UserError, match="holds results of another job"):
        run_job(job(prompts, url, seed=1))
    run_job(job(prompts, url, seed=1, force=True, limit=1))
    (old,) = [name for name in store.names() if name.startswith("old-")]
    assert read(store.sub(old), "manifest.json")


def test_a_job_in_an_object_store_resumes(prompts, tmp_path):
    """Results in a local folder called memory:, rows computed twice, or half an object."""
    run_and_resume(prompts, "memory://test-job/out", tmp_path)
    open_store("memory://test-job")._fs.rm("/test-job", recursive=True)


@pytest.fixture
def bucket(monkeypatch):
    """An S3 server of this process's own."""
    for package in ("moto", "s3fs", "flask"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'moto[server]' s3fs")
    import fsspec
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    fsspec.filesystem("s3").mkdir("results")
    yield "s3://results"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_job_in_s3_resumes(prompts, tmp_path, bucket):
    """What a fake in memory does not show: listings that are remembered, conditional puts, errors of botocore's."""
    run_and_resume(prompts, f"{bucket}/deep/out", tmp_path)
    store = open_store(f"{bucket}/exclusive")
    assert store.create_exclusive("a", b"1") and not store.create_exclusive("a", b"2")
    with pytest.raises(UserError, match=r"can't write s3://no-such-bucket/out/manifest\.json"):
        run_job(job(prompts, "s3://no-such-bucket/out"))


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root that may mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def command(prompts, output):
    """The job as the command line runs it; returns its exit code."""
    given = [f"data={prompts}", f"output={output}", "progress=false", "sampling.max_tokens=2", "commit_every=2"]
    return main([*given, "max_num_seqs=2", f"hydra.run.dir={prompts.parent}/hydra"])


def parts(output):
    return {path.name: path.read_bytes() for path in (Path(output) / "completions").iterdir()}


def fill(disk, *, leave):
    """Take all but `leave` bytes of a disk."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(b"x" * (free - leave))


def test_a_full_disk_stops_the_job_and_costs_nothing(prompts, tmp_path, small_disk, capsys):
    """A torn part, a traceback, exit code 0, or a resume that fails on what the full disk left."""
    out = small_disk / "out"
    run_job(job(prompts, out, limit=2))
    before = parts(out)
    fill(small_disk, leave=24 * 1024)
    assert command(prompts, out) == 1, "2 is for mistakes in the settings"
    assert re.fullmatch(r"error: can't write .*: No space left on device\n", capsys.readouterr().err)
    after = parts(out)
    assert before.items() <= after.items()
    assert all(name.startswith("part-") for name in after)
    (small_disk / "ballast").unlink()
    resumed = run_job(job(prompts, out))
    assert (resumed.num_rows_before, resumed.num_rows_done) == (2 * len(after), 8)
    run_job(job(prompts, tmp_path / "clean"))
    assert completions(out, tmp_path / "r.jsonl") == completions(tmp_path / "clean", tmp_path / "c.jsonl")


def test_a_disk_that_is_full_from_the_start_is_one_line(prompts, small_disk):
    """The manifest, or the folder itself, does not fit."""
    (small_disk / "out").mkdir()
    fill(small_disk, leave=0)
    with pytest.raises(JobError, match="No space left on device") as caught:
        run_job(job(prompts, small_disk / "out"))
    assert "\n" not in str(caught.value)


def test_a_read_only_disk_is_one_line(prompts, small_disk):
    """EROFS as a traceback; before the first row, and in the middle of a job."""
    out = small_disk / "out"
    run_job(job(prompts, out, limit=2))
    before = parts(out)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=f"output={out}: is not writable: Read-only file system"):
        run_job(job(prompts, out))
    assert parts(out) == before
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert run_job(job(prompts, out)).num_rows_done == 8


def after_steps(monkeypatch, count, act):
    """Do something after the first `count` rows of engine steps."""
    real, done = Job._record, []

    def record(self, *args):
        real(self, *args)
        done.append(None)
        if len(done) == count:
            act()

    monkeypatch.setattr(Job, "_record", record)


def test_a_folder_removed_in_the_middle_is_one_line(prompts, tmp_path, monkeypatch):
    """A job that computes on for hours although its results go nowhere, or a traceback at its end."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        after_steps(patch, 3, lambda: shutil.rmtree(out))
        with pytest.raises(UserError, match=r"can't write .*part-0000\d\.parquet: No such file or directory") as caught:
            run_job(job(prompts, out))
    assert "\n" not in str(caught.value)
    assert run_job(job(prompts, out)).num_rows_done == 8


def test_a_failed_job_reports_the_rows_that_are_on_the_disk(prompts, tmp_path, monkeypatch):
    """summary.json counts rows that were computed and never written."""
    out = tmp_path / "out"
    real, count = LocalStore.put_atomically, []

    def second_part_fails(self, name, write, **how):
        if name.startswith("part-") and self.path.name == "completions":
            count.append(name)
            if len(count) == 2:
                raise UserError(f"can't write {name}: No space left on device")
        real(self, name, write, **how)

    monkeypatch.setattr(LocalStore, "put_atomically", second_part_fails)
    with pytest.raises(UserError, match="No space left"):
        run_job(job(prompts, out))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["num_rows_done"], summary["exit_code"]) == ("failed", 2, 1)
    assert summary["attempts"][-1]["num_rows"] == 2
    assert summary["num_output_tokens"] == summary["attempts"][-1]["num_output_tokens"] == 4
    assert summary["finish_reasons"] == {"length": 2}

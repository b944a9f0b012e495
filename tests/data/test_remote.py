"""Rows behind URLs: web servers on loopback, S3 by moto, fsspec's memory and file systems."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig
from ember.data import remote
from ember.data.hashes import FileHashes
from ember.data.reader import PromptReader
from ember.data.settings_file import settings_text
from ember.data.store import LocalStore
from ember.data.text import redacted, without_credentials
from ember.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SECRET = "X-Amz-Signature=sesame&user=me"
web = pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="needs aiohttp (the http extra)")
s3 = pytest.mark.skipif(
    importlib.util.find_spec("s3fs") is None or importlib.util.find_spec("moto") is None, reason="needs s3fs and moto"
)


def lines(*rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


ROWS = lines({"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}, {"prompt": "c"})


def read(data, **config):
    reader = PromptReader(JobConfig(data=data, **config))
    return reader, list(reader.rows())


def refused(data) -> str:
    with pytest.raises(UserError) as caught:
        read(data)
    message = str(caught.value)
    assert message.isprintable() and message.startswith("data=")
    assert "sesame" not in message and "hunter2" not in message
    return message


class Site:
    """A web server on loopback: `files` by path, and what it answers otherwise."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.status: dict[str, int] = {}
        self.ranges = True
        self.tag = '"1"'
        self.secret: str | None = None
        self.breaks = 0
        self.requests: list[tuple[str, str, str | None]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, *, body):
                path, _, query = self.path.partition("?")
                wanted = self.headers.get("Range")
                site.requests.append((self.command, path, wanted))
                data = site.files.get(path)
                status = site.status.get(path, 200 if data is not None else 404)
                if site.secret is not None and query != site.secret:
                    status = 403
                if status != 200:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                total, first = len(data), 0
                self.send_response(206 if wanted and site.ranges else 200)
                if wanted and site.ranges:
                    first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
                    data = data[first : last + 1]
                    self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{total}")
                if site.tag:
                    self.send_header("ETag", site.tag)
                self.send_header("Content-Length", str(len(data)))
                if path.endswith("/"):
                    self.send_header("Content-Type", "text/html")
                self.end_headers()
                if body and site.breaks and len(data) > 1:
                    site.breaks -= 1
                    data = data[: len(data) // 2]
                    self.close_connection = True
                if body:
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote, "_PAUSES_S", (0.01, 0.01))
    site = Site()
    yield site
    site.close()


@pytest.fixture
def memory():
    import fsspec

    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


# Any file system


def test_memory_files_folders_globs_and_lists(memory, tmp_path):
    """A URL was refused, or its rows came in another order than those of a local folder."""
    memory.pipe({f"/d/{name}": lines({"prompt": name}) for name in ["b.jsonl", "a.json", "sub/c.jsonl", "_x.jsonl"]})
    memory.pipe("/d/.hidden/y.jsonl", ROWS)
    memory.pipe("/d/readme.md", b"no rows")
    for data, expected in [
        ("memory://d", ["a.json", "b.jsonl", "sub/c.jsonl"]),
        ("memory://d/*.jsonl", ["b.jsonl"]),
        ("memory://d/**/*.jsonl", ["b.jsonl", "sub/c.jsonl"]),
        (["memory://d/sub/c.jsonl", "memory://d/a.json"], ["a.json", "sub/c.jsonl"]),
    ]:
        reader, rows = read(data)
        assert [row.prompt for row in rows] == expected, data
        assert not reader.warnings
    (tmp_path / "z.jsonl").write_bytes(lines({"prompt": "local"}))
    reader, rows = read(["memory://d/b.jsonl", "memory:///d/b.jsonl", str(tmp_path)])
    assert [row.prompt for row in rows] == ["local", "b.jsonl"] and "read once" in reader.warnings[0]


def test_places_show_the_url(memory):
    """An error row named a path within a file system that nobody typed."""
    memory.pipe("/a.jsonl", b'{"prompt": "x"}\nnonsense\n')
    assert [row.where for row in read("memory://a.jsonl")[1]] == ["memory://a.jsonl:1", "memory://a.jsonl:2"]


def test_compressed_and_parquet_through_the_file_url(tmp_path):
    """Only plain JSON lines were streamed; a file:// URL is the same file as its path."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(ROWS))
    table = pa.table({"prompt": [f"p{i}" for i in range(5000)], "at": pa.array(range(5000), pa.timestamp("ns"))})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=700)
    assert [row.prompt for row in read(f"file://{tmp_path}/a.jsonl.gz")[1]] == ["a", "b", "c"]
    _, rows = read(f"file://{tmp_path}/b.parquet")
    assert [row.prompt for row in rows] == table["prompt"].to_pylist()
    assert pa.array([row.columns["at"] for row in rows], table["at"].type).equals(table["at"].combine_chunks())
    assert rows[3].where == f"file://{tmp_path}/b.parquet row 3"


def test_file_that_changes_after_the_scan(memory):
    """Rows of a replaced object were read against the schema and the numbers of the old one."""
    memory.pipe("/a.jsonl", ROWS)
    reader = PromptReader(JobConfig(data="memory://a.jsonl"))
    memory.pipe("/a.jsonl", lines({"prompt": "x", "n": 9}, {"prompt": "y", "n": 8}, {"prompt": "z"}))
    with pytest.raises(UserError, match=r"changed"):
        list(reader.rows())


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("nope://x/a.jsonl", "no such kind of URL"),
        ("memory://gone/a.jsonl", "no such file"),
        ("memory://gone/", "no such file or folder"),
        ("memory://gone/*.jsonl", "the glob matches no file"),
        ("file:///no/such/a.jsonl", "no such file"),
        ("memory://d/a.csv", "unknown ending"),
    ],
)
def test_a_mistake_is_one_line(url, what, memory):
    """A typo in a URL was a traceback of a package that nobody asked for."""
    memory.pipe("/d/a.csv", b"x")
    message = refused(url)
    assert message.startswith(f"data={url}: ") and what in message


def test_a_missing_package_names_the_extra():
    """ImportError as a traceback; the extra had to be guessed."""
    code = """
import sys
for name in ("s3fs", "gcsfs", "aiohttp"):
    sys.modules[name] = None
from ember.data.files import resolve_files
for url in ("s3://bkt/a.jsonl", "gs://b/a.jsonl", "https://h/a.jsonl"):
    try:
        resolve_files([url])
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert [line.partition("pip install ")[2] for line in said] == [
        f"'ember-batch[{x}]'" for x in ("s3", "gcs", "http")
    ]


def test_credentials_are_cut_out_of_text():
    """A signed URL's signature, or a password, stood in a log."""
    for url, shown in [
        ("https://me:hunter2@h/a.jsonl?sig=x#y", "https://h/a.jsonl"),
        ("s3://key:hun@ter2@bkt/a.jsonl", "s3://bkt/a.jsonl"),
        ("hf://datasets/o/n@main/a.jsonl", "hf://datasets/o/n@main/a.jsonl"),
        ("s3://bkt/part-?.jsonl", "s3://bkt/part-?.jsonl"),
        ("zip://a.jsonl::https://h/z.zip?sig=x", "zip://a.jsonl::https://h/z.zip"),
        ("a?b=c@d.jsonl", "a?b=c@d.jsonl"),
    ]:
        assert without_credentials(url) == shown
    text = "403 for url='https://me:hunter2@h/a?sig=1&x=2', path /a?sig=1 of s3://k:v@b"
    assert redacted(text) == "403 for url='https://h/a', path /a of s3://b"


@web
def test_hashes_of_urls_are_remembered_only_where_they_can_be(site, tmp_path):
    """A replaced object kept its old hash; an unchanged one was downloaded for every restart."""
    site.secret = SECRET

    def hashed() -> tuple[bool, int]:
        """Whether the hash is right, and how often the content was fetched for it."""
        site.requests.clear()
        hashes = FileHashes(LocalStore(tmp_path))
        digest = hashes.of(f"{site.url}/a.jsonl?{SECRET}")
        hashes.save()
        fetched = [r for r in site.requests if r[0] == "GET" and r[2] != "bytes=0-0"]
        return digest == hashlib.sha256(site.files["/a.jsonl"]).hexdigest(), len(fetched)

    site.files["/a.jsonl"] = ROWS
    assert [hashed(), hashed()] == [(True, 1), (True, 0)]
    site.files["/a.jsonl"], site.tag = ROWS.replace(b"1", b"9"), '"2"'
    assert hashed() == (True, 1)
    site.tag = ""
    assert [hashed(), hashed()] == [(True, 1), (True, 1)]
    assert "sesame" not in (tmp_path / ".hashes.json").read_text()


# The web


@web
@pytest.mark.parametrize("ranges", [True, False])
def test_web_files_with_and_without_ranges(site, ranges):
    """A server without byte ranges (python -m http.server) failed on Parquet and on files longer than one request."""
    site.ranges = ranges
    many = [{"prompt": f"p{i}", "pad": "x" * 500} for i in range(10_000)]
    site.files["/a.jsonl"] = lines(*many)
    site.files["/b.jsonl.gz"] = gzip.compress(ROWS)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["q0", "q1"]}), sink)
    site.files["/c.parquet"] = sink.getvalue().to_pybytes()
    assert len(site.files["/a.jsonl"]) > remote.BLOCK_BYTES
    _, rows = read([f"{site.url}/{name}" for name in ["a.jsonl", "b.jsonl.gz", "c.parquet"]])
    assert [row.prompt for row in rows] == [r["prompt"] for r in many] + ["a", "b", "c", "q0", "q1"]


@web
def test_web_folder_and_glob_by_its_index(site):
    """Where a server lists its files, a folder reads like a local one."""
    site.files["/d/"] = b'<a href="a.jsonl">a</a> <a href="../">up</a> <a href="b.jsonl">b</a> <a href="x.txt">x</a>'
    site.files["/d/a.jsonl"], site.files["/d/b.jsonl"] = lines({"prompt": "a"}), lines({"prompt": "b"})
    for data in (f"{site.url}/d/", f"{site.url}/d/*.jsonl"):
        _, rows = read(data)
        assert [row.prompt for row in rows] == ["a", "b"]


@web
def test_signed_url_reads_and_leaves_no_trace(site, capsys):
    """The query of a signed URL was cut before the request, or stood in config.yaml, errors and row places."""
    site.secret = SECRET
    site.files["/a.jsonl"] = ROWS + b"nonsense\n"
    config = JobConfig(data=f"{site.url}/a.jsonl?{SECRET}")
    reader = PromptReader(config)
    rows = list(reader.rows())
    assert [row.prompt for row in rows] == ["a", "b", "c", None]
    kept = repr([(row.where, row.error) for row in rows]) + settings_text(config) + "".join(reader.warnings)
    assert "sesame" not in kept and f"{site.url}/a.jsonl:4" in kept


@web
@pytest.mark.parametrize(
    ("status", "what"),
    [(404, "no such file"), (403, "access is refused"), (401, "access is refused"), (503, "HTTP 503")],
)
def test_web_errors_are_one_line(site, status, what):
    """aiohttp's errors quote the whole URL, with its signature."""
    site.files["/a.jsonl"], site.status["/a.jsonl"] = ROWS, status
    assert what in refused(f"{site.url.replace('//', '//me:hunter2@')}/a.jsonl?{SECRET}")


@web
def test_host_that_does_not_answer(site):
    """Connection refused as a traceback."""
    site.close()
    assert "can't be reached" in refused(f"{site.url}/a.jsonl?{SECRET}")


@web
def test_broken_connection_is_tried_again(site):
    """One dropped connection in hours of reading ended the job."""
    site.files["/a.jsonl"] = ROWS
    reader = PromptReader(JobConfig(data=f"{site.url}/a.jsonl"))
    site.breaks = 2
    assert [row.prompt for row in reader.rows()] == ["a", "b", "c"]
    site.breaks = 99
    with pytest.raises(UserError, match=r"can't be reached"):
        list(reader.rows())


@web
def test_broken_parquet_download_costs_no_rows(site):
    """A network error within a row group was taken for damage, and its rows became error rows."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": [str(i) * 50 for i in range(30_000)]}), sink, use_dictionary=False)
    site.files["/a.parquet"] = sink.getvalue().to_pybytes()
    reader = PromptReader(JobConfig(data=f"{site.url}/a.parquet"))
    rows = reader.rows()
    site.breaks = 99
    with pytest.raises(UserError, match=r"can't be reached"):
        list(rows)


# S3


@pytest.fixture(scope="module")
def bucket():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}".replace("0.0.0.0", "127.0.0.1"))
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        system = s3fs.S3FileSystem()
        system.mkdir("bkt")
        yield system
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@s3
def test_s3_files_folders_and_globs(bucket):
    """s3://bucket/folder read like a local folder, Parquet too."""
    bucket.pipe({"bkt/d/a.jsonl": ROWS, "bkt/d/sub/c.jsonl.gz": gzip.compress(ROWS), "bkt/d/_x.jsonl": ROWS})
    with bucket.open("bkt/d/b.parquet", "wb") as file:
        pq.write_table(pa.table({"prompt": ["q"], "n": [3]}), file)
    for data in ("s3://bkt/d", "s3://bkt/d/*", ["s3://bkt/d/sub/*.gz", "s3://bkt/d/a.jsonl", "s3://bkt/d/b.parquet"]):
        reader, rows = read(data)
        assert [row.prompt for row in rows] == ["a", "b", "c", "q", "a", "b", "c"]
        assert rows[0].where == "s3://bkt/d/a.jsonl:1"
    bucket.pipe("bkt/d/a.jsonl", ROWS.replace(b"1", b"7"))
    with pytest.raises(UserError, match=r"changed"):
        list(reader.rows())


@s3
def test_s3_mistakes_are_one_line(bucket, monkeypatch):
    """No bucket, no key and no credentials were tracebacks of botocore."""
    assert "no such file" in refused("s3://bkt/gone.jsonl")
    assert "no such" in refused("s3://no-such-bucket/a.jsonl")
    assert "no such" in refused("s3://no-such-bucket/folder")
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    s3fs.S3FileSystem.clear_instance_cache()
    assert "AWS_PROFILE" in refused("s3://bkt/a.jsonl")
    s3fs.S3FileSystem.clear_instance_cache()

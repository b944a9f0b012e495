"""Remote input: files behind URLs, read through fsspec and the package that knows that kind of URL.

Both are imported here only, and only when `data` names a URL. Credentials come from where each package looks for them
(environment variables, the files of its login command); none is ever written or shown.
"""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ember.data.file_kinds import READABLE, data_error, is_jsonl, is_parquet
from ember.data.own_files import OwnFiles, fixed_part
from ember.data.text import redacted, without_credentials

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
"""The extra of ember that brings the package for a kind of URL."""
BLOCK_BYTES = 4 << 20
"""One request reads this much of a file of lines. Parquet says itself what it needs: a request may be shorter."""
PARQUET_BLOCK_BYTES = 1 << 18
_PAUSES_S = (1.0, 3.0, 9.0)
"""Seconds between the tries of a read that the network broke."""
_AS_IT_IS = {"Accept-Encoding": "identity"}
_TAGS = ("ETag", "etag", "e_tag", "blob_id", "generation", "Content-MD5", "content_md5", "md5Hash")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "modified")
_LOGIN = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (a public bucket: FSSPEC_S3_ANON=true)",
    "gcs": "run `gcloud auth application-default login` or set GOOGLE_APPLICATION_CREDENTIALS",
    "http": "a signed URL may have expired; make a new one",
    "hf": "run `hf auth login` or set HF_TOKEN",
}
_NO_CREDENTIALS = re.compile(r"Credential|LocalToken|Token(Retrieval|Not)|DefaultCredentials|UnauthorizedSSO")
_NO_NETWORK = re.compile(
    r"Connect|EndpointConnection|ConnectionError|Timeout|gaierror|ProxyError|ServerDisconnected|ClientPayload|"
    r"IncompleteRead|RemoteProtocol"
)


def is_remote(path: str) -> bool:
    """Whether an entry of `data` is a URL."""
    return "://" in path


class RemoteFile:
    """A file behind a URL; nothing is asked of the network yet.

    Raises:
        UserError: no such kind of URL, or its package is missing (names the extra).
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._system, self._path = _filesystem(url)

    @property
    def identity(self) -> str:
        """Equal for two spellings of one URL."""
        return f"{_scheme(self.url)}://{self._path}"

    def state(self) -> tuple[int | None, str]:
        """Size in bytes and what else tells one content from the next (ETag, time of change); "" if nothing does.

        Raises:
            UserError: there is no such file, or it can't be reached.
        """
        info = self._info()
        tags = [str(next((info[key] for key in keys if info.get(key)), "")) for keys in (_TAGS, _TIMES)]
        tag = " ".join(filter(None, tags)) or str(info.get("created") or "")
        return info.get("size"), tag

    def check(self) -> None:
        """Ask whether it is there, and is a file.

        Raises:
            UserError: there is no such file, or it can't be reached.
        """
        if self._info().get("type") == "directory":
            raise data_error(self.url, "is a folder, though its name ends like a file's; add /* to read what is in it")

    def open(self, *, block_bytes: int = BLOCK_BYTES) -> io.BufferedReader:
        """Its bytes, seekable. A read that the network breaks is tried again; what stays broken is a UserError.

        A web server that can't give a part of a file has the whole copied to a temporary file here first: a job reads
        for hours, and no server waits that long.

        Raises:
            UserError: there is no such file, or it can't be reached.
        """
        with _translated(self.url):
            if _is_web(self.url) and not self._answers_ranges():
                return self._copy()
            file = self._system.open(self._path, "rb", block_size=block_bytes)
        return io.BufferedReader(_PatientStream(self.url, file), 1 << 20)

    def _info(self) -> dict[str, Any]:
        with _translated(self.url):
            self._system.invalidate_cache()
            info: dict[str, Any] = self._system.info(self._path)
        return info

    def _answers_ranges(self) -> bool:
        from fsspec.asyn import sync

        return bool(sync(self._system.loop, _answers_ranges, self._system, self._path))

    def _copy(self) -> io.BufferedReader:
        copy = io.BufferedWriter(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
        try:
            with self._system.open(self._path, "rb", block_size=0, headers=_AS_IT_IS) as file:
                shutil.copyfileobj(file, copy, 1 << 20)
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
        return io.BufferedReader(copy.detach(), 1 << 20)


def listed(url: str) -> tuple[list[str], list[str]]:
    """The files that a URL stands for, itself or what its folder or glob holds, and notes on what was passed over.

    Raises:
        UserError: there is none, it can't be reached, or can't be listed.
    """
    system, path = _filesystem(url)
    if _is_chain(url):
        RemoteFile(url).check()
        return [url], []
    if _is_glob(url):
        return _readable(url, system, _matches(url, system, path), path, "the glob matches")
    if is_parquet(url) or is_jsonl(url):
        RemoteFile(url).check()
        return [url], []
    with _translated(url):
        files = system.find(path)
    folder = path.rstrip("/")
    found = [name for name in sorted(files) if name.rstrip("/") != folder]
    if not found:
        raise data_error(url, f"no such file or folder, or one with an unknown ending; {READABLE}")
    return _readable(url, system, found, f"{folder}/", "the folder holds")


def _matches(url: str, system: Any, pattern: str) -> list[str]:
    """A glob's files, and all files in the folders that it matches."""
    with _translated(url):
        found: set[str] = set()
        for name, info in system.glob(pattern, detail=True).items():
            found.update(system.find(name) if info["type"] == "directory" else [name])
    return sorted(found)


def _readable(url: str, system: Any, names: list[str], pattern: str, what: str) -> tuple[list[str], list[str]]:
    """Those with a known ending that are neither results of ember nor below a part that starts with `.` or `_`."""
    scheme, fixed = f"{_scheme(url)}://", len(fixed_part(pattern))
    own = OwnFiles(system.cat_file, "" if names and "://" in names[0] else scheme)
    kept = []
    for name in names:
        hidden = any(part.startswith((".", "_")) for part in name[fixed:].split("/"))
        if hidden or not (is_parquet(name) or is_jsonl(name)):
            continue
        with _translated(url):
            if own.on_the_way(name, pattern):
                continue
        kept.append(name if "://" in name else f"{scheme}{name}")
    if not kept:
        raise data_error(url, "; ".join([f"{what} no file to read", *(own.notes or [READABLE])]))
    return kept, own.notes


class _PatientStream(io.RawIOBase):
    """A remote file that outlives a broken connection. It keeps its own position: some files share theirs."""

    def __init__(self, url: str, file: Any) -> None:
        super().__init__()
        self._url, self._file, self._position = url, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _translated(self._url):
            start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}.get(whence)
            self._position = int(self._file.seek(offset, whence)) if start is None else start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        for pause_s in _PAUSES_S:
            try:
                return self._read_once(size)
            except Exception as error:
                if not _is_passing(error):
                    break
                time.sleep(pause_s)
        with _translated(self._url):
            return self._read_once(size)

    def _read_once(self, size: int) -> bytes:
        if self._file.tell() != self._position:
            self._file.seek(self._position)
        return bytes(self._file.read(size))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


async def _answers_ranges(system: Any, url: str) -> bool:
    """Whether a web server gives parts of a file; its body is not read."""
    session = await system.set_session()
    headers = {"Range": "bytes=0-0", **_AS_IT_IS}
    async with session.get(system.encode_url(url), headers=headers) as answer:
        if answer.status == 416:  # an empty file has no first byte
            return False
        answer.raise_for_status()
        return bool(answer.status == 206) and not answer.headers.get("Content-Range", "/*").endswith("/*")


def _filesystem(url: str) -> tuple[Any, str]:
    """fsspec's filesystem for a URL, and the URL's path in it."""
    with _translated(url):
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url, **(_web_options() if _is_web(url) else {}))
    return system, str(path)


def _web_options() -> dict[str, Any]:
    """Proxies as the environment names them; no limit on a whole download, but on each wait within it."""
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=30, sock_read=120)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def _is_web(url: str) -> bool:
    return _scheme(url) in ("http", "https")


def _is_chain(url: str) -> bool:
    """Whether it is fsspec's `zip://a.jsonl::https://host/b.zip`: read as it is, never listed."""
    return "::" in url


def _is_glob(url: str) -> bool:
    return any(char in without_credentials(url) for char in ("*[" if _is_web(url) else "*?["))


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn whatever a package raises (each has its own errors) into one line without credentials."""
    try:
        yield
    except Exception as error:
        raise data_error(url, _reason(error, _scheme(url).rpartition("::")[2])) from error


def _reason(error: Exception, scheme: str) -> str:
    """What went wrong and the remedy, from an error and those that led to it."""
    errors = list(_chain(error))
    names = " ".join(base.__name__ for e in errors for base in type(e).__mro__)
    status = next((s for e in errors if (s := _status(e)) is not None), None)
    extra = EXTRAS.get(scheme)
    if isinstance(error, ImportError):
        package = f"'ember-batch[{extra}]'" if extra else "the package that it names"
        return f"needs a package that is not installed ({redacted(str(error))}): pip install {package}"
    if "Protocol not known" in str(error):
        return "no such kind of URL; there are hf, s3, gs, http, https and what else fsspec knows"
    login = _LOGIN.get(extra or scheme, "check its credentials")
    if _NO_CREDENTIALS.search(names):
        return f"there are no credentials for it; {login}"
    if status in (401, 403) or any(isinstance(e, PermissionError) for e in errors):
        return f"access is refused; {login}"
    if status is not None and status not in (404, 410):
        return f"the server answers with an error (HTTP {status}); try again later"
    if status is None and _NO_NETWORK.search(names):
        return "it can't be reached; check the network and the host's name, and run again"
    if status in (404, 410) or any(isinstance(e, FileNotFoundError) for e in errors):
        private = f" (or it is private: {login})" if scheme == "hf" else ""
        return f"no such file, folder or bucket{private}; check the URL"
    return f"can't be read ({type(error).__name__}: {redacted(str(error))}); check the URL"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error tells of: aiohttp's, botocore's, huggingface_hub's, gcsfs's."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
        if status is None and type(error).__module__.startswith("gcsfs"):
            status = getattr(error, "code", None)
    return status if isinstance(status, int) and 400 <= status < 600 else None


def _is_passing(error: Exception) -> bool:
    """Whether trying again may help."""
    errors = list(_chain(error))
    status = next((s for e in errors if (s := _status(e)) is not None), None)
    if status is not None:
        return status >= 500 or status == 429
    return any(_NO_NETWORK.search(base.__name__) for e in errors for base in type(e).__mro__)

"""The output folder of a job: its layout, its lock, and its small files.

One job at a time writes to a folder, and never over another job's results. Every file appears under its final name
only when it is whole and durable (see `ember.data.store`), so a reader, or a later run, may trust whatever it finds.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from types import TracebackType
from typing import Any, Self

from ember.data.attempts import Attempts, read_summary
from ember.data.manifest import MANIFEST
from ember.data.parts import PREFIX, part_prefix
from ember.data.shard_summaries import merge_summaries
from ember.data.store import Lock, Store, cant_write, disk_is_full, open_store, os_reason
from ember.data.summary import JobSummary
from ember.errors import ConfigError, UserError

CONFIG = "config.yaml"
CONFIG_HEADER = "# Written by ember: the resolved settings of this job.\n"
SUMMARY = "summary.json"
COMPLETIONS = "completions"
STEPS = "steps"
_SUMMARY_LOCK = ".lock-summary"
_ANOTHER = "choose another output"
_RESULTS = (COMPLETIONS, STEPS, CONFIG, ".hashes.json", "stdin.jsonl", "report")


class OutputFolder:
    """`OUTPUT/` with `completions/`, `steps/`, `manifest.json`, `config.yaml` and `summary.json`.

    Hydra's `.hydra/` and a log may lie in it too; they are not results. Also a context manager that releases the lock.

    Args:
        path: a local folder, made by `create()` if it does not exist, relative to the working directory; or a URL.
        shard: of a job spread over `num_shards` processes that share the folder; None for a job that is alone in it.
            Every shard has a lock, parts and a summary of its own; `summary.json` is then made of all summaries.
    """

    def __init__(self, path: str, shard: int | None = None, num_shards: int = 1) -> None:
        self._given = path
        self.store: Store = open_store(path)
        self._num_shards = num_shards
        self._tag = "" if shard is None or num_shards == 1 else f"s{shard:03d}of{num_shards:03d}"
        self._lock: Lock | None = None
        self._made: list[Store] = []

    @property
    def path(self) -> str:
        """Where the results are, as people know it: a path or a URL."""
        return self.store.shown

    @property
    def part_prefix(self) -> str:
        """How this job's parts are named before the number."""
        return part_prefix(self._tag)

    @property
    def summary_name(self) -> str:
        """This job's own summary: `summary.json`, of a shard `summary-s003of008.json`."""
        return f"summary-{self._tag}.json" if self._tag else SUMMARY

    @property
    def completions(self) -> Store:
        """Where the completions' parts go."""
        return self.store.sub(COMPLETIONS)

    @property
    def steps(self) -> Store:
        """Where the step statistics' parts go."""
        return self.store.sub(STEPS)

    def attempts(self, run_id: str) -> Attempts:
        """This job's earlier attempts and a new one."""
        return Attempts.load(self.store, self.summary_name, run_id)

    def has_parts(self) -> bool:
        """Whether any part of completions is there."""
        return any(name.startswith(PREFIX) for name in self.completions.names())

    def create(self) -> Self:
        """Make the folder and lock it; the lock ends with `release()` or with the process, however it dies.

        Raises:
            ConfigError: `output` is no folder, can't be written, or holds somebody else's config.yaml.
            UserError: another job is writing to it.
            JobError: the disk is full.
        """
        if self._lock is not None:
            raise RuntimeError(f"{self.path} is already locked by this OutputFolder")
        self._make(self.store)
        self._lock = self._acquire(self._lock_name)
        try:
            self._refuse_a_foreign_config()
            self._make(self.completions)
            self._make(self.steps)
            self.store.clear_temporary(self._is_own)
        except BaseException as error:
            self._remove_if_unused()
            self.release()
            if isinstance(error, OSError):
                raise self._unusable(error) from error
            raise
        return self

    def check(self) -> None:
        """Refuse an `output` that is no folder or somebody else's; makes and locks nothing.

        Raises:
            ConfigError: as `create` does.
        """
        try:
            self.store.names()
            self._refuse_a_foreign_config()
        except NotADirectoryError as error:
            raise self._is_a_file(self.store) from error
        except OSError as error:
            raise self._unusable(error) from error

    def write_config(self, text: str) -> None:
        """Write the resolved settings (YAML) as `config.yaml`, below a comment line that marks it as ember's.

        Raises:
            JobError: the file can't be written.
        """
        self._write(CONFIG, CONFIG_HEADER + text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write this job's summary in place of an earlier one; of a shard, also the one of all shards.

        Raises:
            JobError: a file can't be written.
        """
        self._write(self.summary_name, _json(summary))
        if self._tag:
            self._write_merged_summary()

    def finish_summary(self, summary: JobSummary) -> None:
        """Say that all rows are there, where the attempt that wrote the last one was killed before it could.

        Raises:
            JobError: a file can't be written.
        """
        recorded = read_summary(self.store, self.summary_name)
        if recorded.get("status") != summary.status:
            self.write_summary(self.attempts(summary.run_id).without_this(summary))
        elif self._tag:
            self._write_merged_summary()

    def _write_merged_summary(self) -> None:
        try:
            with self.store.lock(_SUMMARY_LOCK, wait=True):
                self._write(SUMMARY, _json(merge_summaries(self._shard_summaries(), self._num_shards)))
        except OSError as error:
            raise cant_write(f"{self.path}/{SUMMARY}", error) from error

    def _shard_summaries(self) -> dict[int, dict[str, Any]]:
        name_of_shard = re.compile(rf"summary-s(\d+)of{self._num_shards:03d}\.json")
        found = {name: match for name in self.store.names() if (match := name_of_shard.fullmatch(name))}
        summaries = {int(match[1]): read_summary(self.store, name) for name, match in found.items()}
        return {shard: summary for shard, summary in summaries.items() if summary}

    def move_aside(self, *, own_only: bool = False) -> str | None:
        """Move results into a new folder `old-...` below this one; returns it, None if there were none.

        The manifest goes last: if this is broken off, what stays still belongs to it.

        Args:
            own_only: leave the manifest and what other shards wrote.

        Raises:
            UserError: a shard of the job is at work here, or a file can't be moved.
        """
        try:
            names = self._own_results() if own_only else self._all_results()
            if not names:
                return None
            if not own_only:
                self._check_alone()
            aside = self._new_name(time.strftime("old-%Y%m%d-%H%M%S"))
            self.store.sub(aside).make()
            for name in names:
                self.store.move(name, aside)
            self._make(self.completions)
            self._make(self.steps)
        except OSError as error:
            raise self._unusable(error) from error
        return f"{self.path}/{aside}"

    def _all_results(self) -> list[str]:
        there = self.store.names()
        if MANIFEST not in there and not self.has_parts():
            return []
        wanted = [*_RESULTS, *(name for name in there if re.fullmatch(r"summary.*\.json", name)), MANIFEST]
        return [name for name in wanted if name in there]

    def _own_results(self) -> list[str]:
        """This shard's parts and summary."""
        parts = [
            f"{folder}/{name}"
            for folder in (COMPLETIONS, STEPS)
            for name in self.store.sub(folder).names()
            if name.startswith(self.part_prefix)
        ]
        return [*parts, *([self.summary_name] if parts and self.store.exists(self.summary_name) else [])]

    def _new_name(self, wanted: str) -> str:
        taken = self.store.names()
        names = (wanted if number == 1 else f"{wanted}-{number}" for number in range(1, len(taken) + 3))
        return next(name for name in names if name not in taken)

    def _check_alone(self) -> None:
        """Refuse if another shard holds its lock."""
        for name in self.store.names():
            if name.startswith(".lock") and name != self._lock_name:
                self._acquire(name).release()

    @property
    def _lock_name(self) -> str:
        return f".lock-{self._tag}" if self._tag else ".lock"

    def _acquire(self, name: str) -> Lock:
        try:
            return self.store.lock(name)
        except BlockingIOError as error:
            raise UserError(f"another job is writing to {self._given}; wait for it or {_ANOTHER}") from error
        except OSError as error:
            raise self._unusable(error) from error

    def _is_own(self, name: str) -> bool:
        """Whether only this job writes a file: other shards may be about to write those that they share."""
        return name == self.summary_name or (not self._tag and name in (*_RESULTS, MANIFEST))

    def _remove_if_unused(self) -> None:
        """Leave nothing behind if the job failed before it had a manifest; the lock goes, whoever made the folder."""
        with contextlib.suppress(OSError):
            if self.store.exists(MANIFEST):
                return
            for folder in reversed([made for made in self._made if made is not self.store]):
                folder.remove_if_empty()
            self.store.remove(self._lock_name)
            if self.store in self._made:
                self.store.remove_if_empty()

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self if self._lock is not None else self.create()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._remove_if_unused()
        self.release()

    def _make(self, folder: Store) -> None:
        try:
            if folder.make():
                self._made.append(folder)
        except (FileExistsError, NotADirectoryError) as error:
            raise self._is_a_file(folder) from error
        except OSError as error:
            raise self._unusable(error) from error

    def _is_a_file(self, folder: Store) -> ConfigError:
        place = "" if folder is self.store else f" ({folder.shown} is in the way)"
        return ConfigError("output", self._given, f"is a file, must be a folder{place}; {_ANOTHER}")

    def _refuse_a_foreign_config(self) -> None:
        if not self.store.exists(CONFIG):
            return
        with self.store.open(CONFIG) as file:
            start = file.read(len(CONFIG_HEADER))
        if start != CONFIG_HEADER.encode():
            raise ConfigError("output", self._given, f"holds a config.yaml that ember did not write; {_ANOTHER}")

    def _unusable(self, error: OSError) -> UserError:
        if disk_is_full(error):
            return cant_write(self.path, error)
        return ConfigError("output", self._given, f"is not writable: {os_reason(error)}; {_ANOTHER}")

    def _write(self, name: str, text: str) -> None:
        if self._lock is None:
            raise RuntimeError(f"{name} is written under the folder's lock: call create() first")
        # A lone surrogate (it can come from a JSON prompt in an error message) becomes its \ud800 escape.
        data = text.encode("utf-8", "backslashreplace")
        self.store.put_atomically(name, lambda file: file.write(data))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

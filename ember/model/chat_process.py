"""The process that renders a chat template (see `chat_worker`): started when first needed, replaced when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any

from ember.errors import UserError

MOST_DEATHS = 3
"""Templates that end so many workers in a row would hold up every row of a job for nothing."""
_TOO_MUCH = "the chat template ran longer, or took more memory, than any should"
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TMPDIR")
_WORKER = Path(__file__).with_name("chat_worker.py")


class ChatProcess:
    """Asks one worker at a time; threads take turns.

    Args:
        source: the template.
        now: the ISO date that it may be told, or None.
        cpu_seconds: the most that rendering one conversation may compute.

    Attributes:
        most_deaths: workers that may die in a row before it is not tried again; None: any number.
    """

    def __init__(self, source: str, now: str | None, *, cpu_seconds: float = 10.0) -> None:
        self._setup: dict[str, Any] = {"source": source, "now": now, "cpu_seconds": cpu_seconds}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0
        self._deaths = 0
        self.most_deaths: int | None = MOST_DEATHS

    def another(self) -> ChatProcess:
        """One of the same template with a worker of its own."""
        return ChatProcess(**self._setup)

    def render(self, variables: dict[str, Any]) -> str:
        """The text of a template with these variables.

        Raises:
            UserError: the template is none, refuses the variables, fails, or takes more time or memory than any should.
        """
        with self._lock:
            if self.most_deaths is not None and self._deaths >= self.most_deaths:
                raise UserError(f"{_TOO_MUCH}; it did so {self._deaths} times in a row and is not tried again")
            self._ensure()
            return self._ask(variables)

    def check(self) -> None:
        """See that the template can be read.

        Raises:
            UserError: it can't, or jinja2 is missing.
        """
        with self._lock:
            self._ensure()

    def close(self) -> None:
        """End the worker, if there is one."""
        if self._process is not None and self._pid == os.getpid():
            _end(self._process)
        self._process = None

    def _ensure(self) -> None:
        """A worker of this process's own: one that was forked must not share its parent's pipes."""
        if self._process is None or self._pid != os.getpid():
            self._start()

    def _start(self) -> None:
        _check_jinja()
        self._process, self._pid = (
            subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the job, which finishes its rows
            ),
            os.getpid(),
        )
        weakref.finalize(self, _end, self._process)
        self._ask(self._setup)

    def _ask(self, question: dict[str, Any]) -> str:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            self.close()
            self._deaths += 1
            raise UserError(_TOO_MUCH)
        if question is not self._setup:
            self._deaths = 0
        reply = json.loads(answer)
        if "error" in reply:
            if question is self._setup:
                self.close()
            raise UserError(f"the chat template says: {reply['error']}")
        return str(reply["text"])


def _check_jinja() -> None:
    """jinja2 is there, without the known ways out of the sandbox of versions before 3.1.6 (CVE-2025-27516)."""
    try:
        version = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        version = ""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if numbers < (3, 1, 6):
        there = f"not {version}" if version else "which is missing"
        raise UserError(f"chat templates need the package jinja2>=3.1.6, {there}; pip install 'ember-batch[hf]'")


def _environment() -> dict[str, str]:
    """What Python needs to start with this process's packages, and nothing else: a stranger's code runs there."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was still to be written
                pipe.close()

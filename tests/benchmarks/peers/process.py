"""A peer's process: started with its own Python, told to run a workload, asked what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.catalogue import EMBER, VENVS, Peer
from tests.benchmarks.workloads import Request

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LAST_WORDS = 600
"""Characters of a failed peer's stderr that are shown."""
PATIENCE = 1800
"""Seconds that a peer may load or run, then it is taken out: one that hangs must not cost the others' figures."""


class PeerError(Exception):
    """A peer that can't be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds of a run, and the output tokens of each request."""

    seconds: float
    tokens: list[list[int]]


class PeerProcess:
    """A running peer.

    Raises:
        PeerError: its environment is missing, or it ends or PATIENCE does before it is ready.
    """

    def __init__(self, peer: Peer, venvs: Path, log: Path, options: dict[str, Any]) -> None:
        self._log = log
        command = [_python(peer, venvs), str(HERE / f"run_{peer.runner}.py"), json.dumps(peer.options | options)]
        threads = {"OMP_NUM_THREADS": str(options["threads"]), "OMP_WAIT_POLICY": "PASSIVE"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(peer) | threads,
            )
        self.version: str = self._answer()["ready"]

    def run(self, workload: Path) -> Answer:
        """Compute the workload in a file.

        Raises:
            PeerError: it ended instead, or took too long.
        """
        assert self._process.stdin is not None
        try:
            print(workload, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        return Answer(**self._answer())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(PATIENCE, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        words = self._log.read_text(errors="replace")[-LAST_WORDS:]
        return f"ended with exit code {self._process.wait()} (all of it in {self._log}):\n{words}"


def write_workload(requests: Seq[Request], path: Path) -> Path:
    """The requests as the peers read them."""
    path.write_text(json.dumps([asdict(request) for request in requests]))
    return path


def install(name: str, venvs: Path) -> None:
    """Make a peer's environment (from the package index)."""
    venv, folder = VENVS[name], venvs / name
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", *venv.install], check=True)
    if venv.uninstall:
        subprocess.run([*pip, "uninstall", "-y", *venv.uninstall], check=True)


def _python(peer: Peer, venvs: Path) -> str:
    if peer.venv == EMBER:
        return sys.executable
    python = venvs / peer.venv / "bin" / "python"
    if not python.exists():
        raise PeerError(f"not installed: --install {peer.venv}")
    return str(python)


def _environment(peer: Peer) -> dict[str, str]:
    """The peer's own packages only; ember comes from this checkout."""
    rest = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return rest | {"PYTHONPATH": str(ROOT)} if peer.venv == EMBER else rest

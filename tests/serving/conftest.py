"""A real server in a process of its own, on loopback, with the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat_models import PLAIN, chat_folder

ROOT = Path(__file__).resolve().parent.parent.parent
READY = re.compile(r"serving on (http://\S+)")


class RunningServer:
    """`ember serve` with these words; `url` once it listens."""

    def __init__(self, *words: str, **environment: str) -> None:
        code = "import sys; from ember.entrypoints.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "port=0", *words],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self._wait()

    def _wait(self) -> str:
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if ready := READY.search(line):
                return ready[1]
        raise AssertionError("".join(said))

    def stop(self) -> tuple[int, str]:
        """SIGTERM; the exit code and what it said last."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server for all tests that leave it as it was."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    pytest.importorskip("uvicorn", reason="needs the serve extra")
    running = RunningServer()
    yield running
    code, said = running.stop()
    assert code == 0, said
    assert "Traceback" not in said


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a chat template that has a variable of its own."""
    return chat_folder(tmp_path_factory.mktemp("chat") / "model", "{{ opening }}" + PLAIN)


@pytest.fixture(scope="session")
def chat_server(chat_model: Path) -> Iterator[RunningServer]:
    """A server of a chat model: short answers, one choice a request."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    words = (f"model={chat_model}", "max_choices=1", "max_model_len=256", "pool_size=512")
    running = RunningServer(*words)
    yield running
    code, said = running.stop()
    assert code == 0, said
    assert "Traceback" not in said

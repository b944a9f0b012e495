"""The server does what its own OpenAPI document says, as schemathesis sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import RunningServer

pytest.importorskip("schemathesis", reason="needs the serve extra")
pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with short answers, and one choice a request, as JSON Schema can't limit prompts times n."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    running = RunningServer("max_choices=1", "max_model_len=128", "pool_size=512")
    yield running
    assert running.stop()[0] == 0


def test_schemathesis(server: RunningServer, tmp_path: Path) -> None:
    """Requests that the document allows are answered as it says; others are refused."""
    words = ["run", f"{server.url}/openapi.json", "--max-examples=4", "--workers=4", "--generation-deterministic"]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""The server does what its own OpenAPI document says, as schemathesis sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.conftest import RunningServer

pytest.importorskip("schemathesis", reason="needs the serve extra")
pytestmark = pytest.mark.serve


def test_schemathesis(chat_server: RunningServer, tmp_path: Path) -> None:
    """Requests that the document allows are answered as it says; others are refused.

    The server allows one choice a request, as JSON Schema can't limit prompts times n.
    """
    words = ["run", f"{chat_server.url}/openapi.json", "--max-examples=2", "--generation-deterministic"]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

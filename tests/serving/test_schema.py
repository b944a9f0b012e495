"""The server does what its own OpenAPI document says, as schemathesis sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.serving.conftest import RunningServer

pytest.importorskip("schemathesis", reason="needs the serve extra")
pytestmark = pytest.mark.serve


CHAT = "/v1/chat/completions"
RUNS = {
    "all but chats": ["--exclude-path", CHAT, "--max-examples=2"],
    "chats": ["--include-path", CHAT, "--phases=fuzzing", "--max-examples=4"],
}
"""Chats share the code that checks most keys: their boundary cases need not be gone through again."""


@pytest.mark.parametrize("name", RUNS)
def test_schemathesis(chat_server: RunningServer, tmp_path: Path, name: str) -> None:
    """Requests that the document allows are answered as it says; others are refused.

    The server allows one choice a request, as JSON Schema can't limit prompts times n.
    """
    words = ["run", f"{chat_server.url}/openapi.json", "--generation-deterministic", *RUNS[name]]
    command = [sys.executable, "-m", "schemathesis.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_document_allows_any_variable_of_a_template(chat_server: RunningServer) -> None:
    """It named enable_thinking and no other, where the server takes what the template has."""
    with urllib.request.urlopen(f"{chat_server.url}/openapi.json", timeout=60) as answer:
        document = json.load(answer)
    found = list(_named(document, "chat_template_kwargs"))
    assert found
    for schema in found:
        jsonschema.validate({"opening": "Once"}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"messages": []}, schema)


def _named(value: Any, name: str) -> Iterator[Any]:
    """What stands under a name anywhere in a document."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key == name:
            yield child
        yield from _named(child, name)

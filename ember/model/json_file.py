"""Reading a model folder's JSON files, which come from strangers: whatever is in them, one line of text or a dict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ember.errors import Shown, UserError

MAX_BYTES = 256 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: missing, unreadable, larger than 256 MiB, not UTF-8, not JSON, or not an object; names the file.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a file")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: larger than 256 MiB, which no such file of a model is")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a model folder needs it") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def show(value: Any) -> Shown:
    """A value from a file as a short, one-line, printable text for an error message."""
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
    return Shown(text if len(text) <= 60 else text[:57] + "...")


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of at most 160 characters."""
    return " ".join(str(error).split())[:160]

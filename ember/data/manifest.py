"""What an output belongs to: a fingerprint of everything that determines its results.

Settings that can't change a token (block size, pool size, batch limits, policy, `limit`) are not in it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ember.data.store import Store
from ember.data.text import one_line
from ember.errors import UserError

MANIFEST = "manifest.json"
_SHOWN = 4
_VALUE_CHARS = 60
_BEFORE_DIFFERENCE = 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fingerprint of a job's results and the facts that go with it.

    Attributes:
        fingerprint: flat, JSON-ready; equal fingerprints give equal rows.
        facts: not compared: versions, names, paths, and the completions' schema (see `encoded_schema`).
    """

    fingerprint: dict[str, Any]
    facts: dict[str, Any]

    @staticmethod
    def load(folder: Store) -> Manifest | None:
        """The manifest in an output folder, or None if there is none.

        Raises:
            UserError: it can't be read or is no manifest of ember's.
        """
        try:
            with folder.open(MANIFEST) as file:
                value = json.loads(file.read())
            return Manifest(dict(value["fingerprint"]), dict(value["facts"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = f"{folder.shown}/{MANIFEST}"
            why = one_line(f"{type(error).__name__}: {error}")
            raise UserError(f"{where}: not a manifest that ember wrote ({why}); choose another output") from None

    def create(self, folder: Store) -> bool:
        """Write it where none is; False if another process was first. Both see a whole file.

        Raises:
            JobError: it can't be written.
        """
        text = json.dumps({"fingerprint": self.fingerprint, "facts": self.facts}, indent=2, ensure_ascii=False)
        return folder.create_exclusive(MANIFEST, text.encode("utf-8", "backslashreplace"))

    def check(self, now: Mapping[str, Any], output: str) -> None:
        """Compare with the fingerprint of the job that wants to go on here.

        Raises:
            UserError: it differs; names the keys with both values, side by side.
        """
        changed = self.changed(now)
        if not changed:
            return
        pairs = [f"{k}: {' -> '.join(_side_by_side(self.fingerprint.get(k), now.get(k)))}" for k in changed[:_SHOWN]]
        more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
        raise UserError(
            f"output={output} holds results of another job ({'; '.join(pairs + more)}); "
            "choose another output, or force=true to move the old results aside and start over"
        )

    def changed(self, now: Mapping[str, Any]) -> list[str]:
        """The keys in which a fingerprint differs from this one."""
        keys = [*self.fingerprint, *(key for key in now if key not in self.fingerprint)]
        return [key for key in keys if self.fingerprint.get(key) != now.get(key)]

    @property
    def schema(self) -> pa.Schema:
        """The completions' schema.

        Raises:
            UserError: the manifest has none that can be read.
        """
        try:
            return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.facts["schema"])))
        except (KeyError, TypeError, ValueError, OSError, pa.ArrowException):
            what = "holds no schema of the completions; another version of ember wrote it"
            raise UserError(f"{MANIFEST} {what}") from None


def encoded_schema(schema: pa.Schema) -> str:
    """A schema as text for the manifest's facts: what JSON lines can't say of themselves."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _side_by_side(old: Any, new: Any) -> tuple[str, str]:
    """Both values as JSON; of long ones the same stretch, so chosen that the first difference is in it."""
    texts = [json.dumps(value, ensure_ascii=False) for value in (old, new)]
    if max(map(len, texts)) <= _VALUE_CHARS:
        return texts[0], texts[1]
    length = min(map(len, texts))
    first = next((i for i in range(length) if texts[0][i] != texts[1][i]), length)
    start = max(0, first - _BEFORE_DIFFERENCE) if first >= _VALUE_CHARS else 0
    shown = [_cut(text, start) for text in texts]
    return shown[0], shown[1]


def _cut(text: str, start: int) -> str:
    end = start + _VALUE_CHARS
    return ("..." if start else "") + text[start:end] + ("..." if len(text) > end else "")

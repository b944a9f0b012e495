"""What an output belongs to: a fingerprint of everything that determines its results.

Settings that can't change a token (block size, pool size, batch limits, policy, `limit`) are not in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ember.data.folder import temporary_path, write_atomically
from ember.errors import UserError

_SHOWN = 4
_VALUE_CHARS = 60


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fingerprint of a job's results and the facts that go with it.

    Attributes:
        fingerprint: flat, JSON-ready; equal fingerprints give equal rows.
        facts: not compared: versions, names and paths, for people.
    """

    fingerprint: dict[str, Any]
    facts: dict[str, Any]

    @staticmethod
    def load(path: Path) -> Manifest | None:
        """The manifest at `path`, or None if there is none.

        Raises:
            UserError: it can't be read or is no manifest of ember's.
        """
        try:
            value = json.loads(path.read_bytes())
            return Manifest(dict(value["fingerprint"]), dict(value["facts"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a manifest that ember wrote ({error!r}); choose another output") from None

    def create(self, path: Path) -> bool:
        """Write it where none is; False if another process was first. Both see a whole file.

        Raises:
            UserError: it can't be written.
        """
        text = json.dumps({"fingerprint": self.fingerprint, "facts": self.facts}, indent=2, ensure_ascii=False)
        draft = temporary_path(path).with_suffix(".draft")
        write_atomically(draft, lambda file: file.write(text.encode("utf-8", "backslashreplace")))
        try:
            os.link(draft, path)  # unlike a rename, a link never replaces what is there
            return True
        except FileExistsError:
            return False
        except OSError as error:
            raise UserError(f"can't write {path}: {error.strerror}") from error
        finally:
            draft.unlink(missing_ok=True)

    def check(self, now: Mapping[str, Any], output: str) -> None:
        """Compare with the fingerprint of the job that wants to go on here.

        Raises:
            UserError: it differs; names the keys with both values, side by side.
        """
        keys = [k for k in [*self.fingerprint, *(k for k in now if k not in self.fingerprint)]]
        changed = [k for k in keys if self.fingerprint.get(k) != now.get(k)]
        if not changed:
            return
        pairs = [f"{k}: {_shown(self.fingerprint.get(k))} -> {_shown(now.get(k))}" for k in changed[:_SHOWN]]
        more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
        raise UserError(
            f"output={output} holds results of another job ({'; '.join(pairs + more)}); "
            "choose another output, or force=true to move the old results aside and start over"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARS else f"{text[:_VALUE_CHARS]}..."

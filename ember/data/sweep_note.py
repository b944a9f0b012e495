"""Which jobs of a sweep left no results, as a small file beside the folders of those that did.

A job that never began leaves no folder, so that without this a report would pass over it in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ember.data.store import Store

FILE_NAME = ".ember_sweep.json"


def write_sweep_note(folder: Store, failed: Mapping[str, str]) -> None:
    """Replace what an earlier sweep left.

    Args:
        failed: how each job that did not come to its end went, by the name of its folder; if empty, no file stays.

    Raises:
        JobError: it can't be written.
    """
    if failed:
        data = json.dumps({"failed": dict(failed)}).encode()
        folder.put_atomically(FILE_NAME, lambda file: file.write(data))
    elif folder.exists(FILE_NAME):
        folder.remove(FILE_NAME)


def read_sweep_note(folder: Store) -> dict[str, str]:
    """How the jobs went that failed, by folder; empty if there is no file, or none that can be read."""
    try:
        with folder.open(FILE_NAME) as file:
            failed = json.loads(file.read())["failed"]
            return {str(name): str(end) for name, end in failed.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}

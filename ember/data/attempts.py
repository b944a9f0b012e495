"""The attempts at a job, each with its numbers and all together: the history in summary.json.

A killed attempt leaves no numbers, only its entry, which says `running` until the next attempt finds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ember.data.store import Store
from ember.data.summary import JobSummary

SUMS = ("num_rows", "num_output_tokens", "num_steps", "num_preemptions", "num_recomputed_tokens", "duration_s")


class Attempts:
    """The attempts of one job (or one shard), oldest first."""

    def __init__(self, earlier: list[dict[str, Any]], run_id: str) -> None:
        self._earlier = [a | {"status": "killed"} if a.get("status") == "running" else a for a in earlier]
        self._this: dict[str, Any] = {
            "run_id": run_id,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "status": "running",
        }

    @staticmethod
    def load(folder: Store, name: str, run_id: str) -> Attempts:
        """Those in an earlier summary of that name, if there is one, and a new one."""
        earlier = read_summary(folder, name).get("attempts")
        return Attempts([a for a in earlier if isinstance(a, dict)] if isinstance(earlier, list) else [], run_id)

    def started(self) -> dict[str, Any]:
        """A summary to write before the first step: all that is known of a job that is then killed."""
        return {"status": "running", "attempts": [*self._earlier, self._this]}

    def finished(self, summary: JobSummary) -> dict[str, Any]:
        """The summary to write at the end: the rows of all attempts, the engine's numbers of this one, the history."""
        this = self._this | {
            "status": summary.status,
            "num_rows": summary.num_rows_done - summary.num_rows_before,
            "num_output_tokens": summary.num_output_tokens_new,
            "num_steps": summary.num_steps,
            "num_preemptions": summary.num_preemptions,
            "num_recomputed_tokens": summary.num_recomputed_tokens,
            "duration_s": summary.duration_s,
            "tokens_per_s": summary.tokens_per_s,
        }
        return _with_history(summary, [*self._earlier, this])

    def without_this(self, summary: JobSummary) -> dict[str, Any]:
        """The summary to write if all rows were there already, so that there was nothing to attempt."""
        return _with_history(summary, self._earlier)


def read_summary(folder: Store, name: str) -> dict[str, Any]:
    """A summary as it was written; empty if there is none, or none that can be read: only history would be lost."""
    try:
        with folder.open(name) as file:
            value = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def total_of(attempts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How many attempts there were, and their numbers added up; a killed one counts, without numbers."""
    entries = list(attempts)
    sums = {key: sum(a.get(key) or 0 for a in entries) for key in SUMS}
    return {"num_attempts": len(entries), **sums}


def _with_history(summary: JobSummary, attempts: list[dict[str, Any]]) -> dict[str, Any]:
    return {**summary.to_dict(), "attempts": attempts, "total": total_of(attempts)}

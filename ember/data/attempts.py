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

_SUMS = (
    *("num_rows", "num_output_tokens", "num_steps", "num_preemptions", "num_recomputed_tokens"),
    *("num_prefill_tokens", "num_decode_tokens", "prefix_hit_tokens", "num_evicted_blocks"),
    *("num_proposed_tokens", "num_accepted_tokens"),
    *("duration_s", "engine_s", "load_s"),
)
_MOST = ("peak_kv_utilization", "peak_blocks_used", "peak_running")


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
        """The summary to write at the end: the whole job's numbers, then every attempt's own, then those added up."""
        return _with_history(summary, [*self._earlier, self._this | summary.attempt_numbers()])

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
    """The attempts' numbers added up, of peaks the highest; a killed attempt is counted but left no numbers.

    `tokens_per_s` is per second of one process.
    """
    entries = list(attempts)
    sums = {key: sum(a.get(key) or 0 for a in entries) for key in _SUMS}
    seconds = sums["duration_s"]
    return {
        "num_attempts": len(entries),
        "num_killed": sum(a.get("status") == "killed" for a in entries),
        **sums,
        "tokens_per_s": sums["num_output_tokens"] / seconds if seconds > 0 else 0.0,
        **{key: max((a.get(key) or 0 for a in entries), default=0) for key in _MOST},
    }


def _with_history(summary: JobSummary, attempts: list[dict[str, Any]]) -> dict[str, Any]:
    return {**summary.job_numbers(), "total": total_of(attempts), "attempts": attempts}

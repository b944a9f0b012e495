"""The attempts at a job, each with its numbers and all together: the history in summary.json.

A killed attempt leaves no numbers, only its entry, which says `running` until the next attempt finds it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
    def load(path: Path, run_id: str) -> Attempts:
        """Those in an earlier summary, if there is one, and a new one."""
        try:
            earlier = json.loads(path.read_bytes())["attempts"]
        except (OSError, ValueError, KeyError, TypeError):
            earlier = []
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
        attempts = [*self._earlier, this]
        total = {key: sum(a.get(key) or 0 for a in attempts) for key in SUMS}
        return {**summary.to_dict(), "attempts": attempts, "total": {"num_attempts": len(attempts), **total}}

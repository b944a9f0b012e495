"""One summary.json of all shards of a job, made anew from the shards' own summaries whenever one of them changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ember.data.attempts import total_of
from ember.data.row_counts import ERRORS_A_KIND
from ember.data.summary import JobStatus, exit_code

_SUMS = (
    *("num_rows_total", "num_rows_done", "num_samples_done", "num_errors"),
    *("num_prompt_tokens", "num_output_tokens"),
)
_WORST_FIRST = ("running", JobStatus.FAILED.value, JobStatus.INTERRUPTED.value)


def merge_summaries(shards: Mapping[int, Mapping[str, Any]], num_shards: int) -> dict[str, Any]:
    """The summary of the whole job.

    Rows, tokens and errors are those of all shards, `total` and `attempts` all attempts at any of them. `status` is
    finished only if all shards have; else the worst of running, failed and interrupted that a shard reports, or
    `incomplete` if shards are missing or say nothing.

    Args:
        shards: the summaries that there are, by shard.
    """
    known = [shards[shard] for shard in sorted(shards)]
    sums = {key: sum(s.get(key) or 0 for s in known) for key in _SUMS}
    attempts = _attempts(shards)
    status = _status(known, num_shards)
    return {
        "status": status,
        "exit_code": exit_code(status, sums["num_errors"]) if status == JobStatus.FINISHED else None,
        "num_shards": num_shards,
        "shards_missing": [shard for shard in range(num_shards) if shard not in shards],
        "shard_status": {str(shard): shards[shard].get("status") for shard in sorted(shards)},
        **sums,
        "errors_by_kind": _added(s.get("errors_by_kind") for s in known),
        "first_errors": _first_errors(known),
        "finish_reasons": _added(s.get("finish_reasons") for s in known),
        "total": total_of(attempts),
        "attempts": attempts,
    }


def _status(known: list[Mapping[str, Any]], num_shards: int) -> str:
    reported = [s.get("status") for s in known]
    if len(known) == num_shards and all(status == JobStatus.FINISHED for status in reported):
        return JobStatus.FINISHED.value
    return next((status for status in _WORST_FIRST if status in reported), "incomplete")


def _attempts(shards: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All attempts with their shard, the oldest first."""
    attempts = [
        {"shard": shard, **attempt} for shard in sorted(shards) for attempt in shards[shard].get("attempts") or []
    ]
    return sorted(attempts, key=lambda attempt: str(attempt.get("started_at")))


def _added(counts: Iterable[Mapping[str, int] | None]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for one in counts:
        added.update(one or {})
    return dict(added.most_common())


def _first_errors(known: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first few of each kind, by row."""
    errors = sorted((e for s in known for e in s.get("first_errors") or []), key=lambda error: error["row_index"])
    seen: Counter[str] = Counter()
    kept = []
    for error in errors:
        seen[error["kind"]] += 1
        if seen[error["kind"]] <= ERRORS_A_KIND:
            kept.append(error)
    return kept

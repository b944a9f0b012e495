"""Sums, peaks and rates over the engine steps of one attempt at a job, as its summary has them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ember.core.stats import StepStats

_SUMS = {
    "engine_s": "duration_s",
    "num_preemptions": "num_preempted",
    "num_prefill_tokens": "num_prefill_tokens",
    "num_decode_tokens": "num_decode_tokens",
    "num_recomputed_tokens": "num_recomputed_tokens",
    "prefix_hit_tokens": "prefix_hit_tokens",
    "num_evicted_blocks": "num_evicted_blocks",
    "num_proposed_tokens": "num_proposed_tokens",
    "num_accepted_tokens": "num_accepted_tokens",
}
"""Number of the summary -> what of a step is added up for it."""
_PEAKS = {
    "peak_running": "num_running",
    "blocks_total": "blocks_total",
    "peak_blocks_used": "blocks_used",
    "peak_kv_utilization": "kv_utilization",
}
_summed, _highest = attrgetter(*_SUMS.values()), attrgetter(*_PEAKS.values())


class StepCounts:
    """Counts steps as they come."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums: list[float] = [0] * len(_SUMS)
        self._peaks: list[float] = [0] * len(_PEAKS)
        self._utilization = 0.0
        self._steps_with_blocks = 0

    def add(self, stats: StepStats) -> None:
        """Count one step."""
        self._steps += 1
        self._sums = [a + b for a, b in zip(self._sums, _summed(stats), strict=True)]
        self._peaks = [max(a, b) for a, b in zip(self._peaks, _highest(stats), strict=True)]
        self._utilization += stats.kv_utilization
        self._steps_with_blocks += stats.blocks_used > 0

    def numbers(self) -> dict[str, Any]:
        """Fields of a JobSummary by name."""
        sums: dict[str, Any] = dict(zip(_SUMS, self._sums, strict=True))
        computed = sums["num_prefill_tokens"] + sums["num_decode_tokens"] + sums["num_recomputed_tokens"]
        wanted = sums["prefix_hit_tokens"] + sums["num_prefill_tokens"] + sums["num_recomputed_tokens"]
        return {
            "num_steps": self._steps,
            **sums,
            **dict(zip(_PEAKS, self._peaks, strict=True)),
            "mean_kv_utilization": _share(self._utilization, self._steps_with_blocks) or 0.0,
            "prefix_hit_rate": _share(sums["prefix_hit_tokens"], wanted),
            "recomputed_share": _share(sums["num_recomputed_tokens"], computed),
            "acceptance_rate": _share(sums["num_accepted_tokens"], sums["num_proposed_tokens"]),
        }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None

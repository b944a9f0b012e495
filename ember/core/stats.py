"""What one engine step did: a row of the steps table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepStats:
    """Counts, times (seconds; `start_s` since the engine was made) and pool use of one step.

    Block counts are taken while the step runs, before what it finished is freed. `kv_tokens` counts each live
    token slot once; `kv_utilization` is its share of the slots in used blocks. `prefix_hit_tokens` are those that
    sequences admitted in this step found in the pool, `num_evicted_blocks` the reusable blocks given up for room. Of
    the decode tokens `num_proposed_tokens` were proposed by speculation, of which `num_accepted_tokens` were kept.
    """

    step: int
    start_s: float = 0.0
    duration_s: float = 0.0
    schedule_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0
    num_prefill_seqs: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    kv_tokens: int = 0
    kv_utilization: float = 0.0
    prefix_hit_tokens: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    num_evicted_blocks: int = 0

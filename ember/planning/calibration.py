"""A short run of the job's own rows on its own engine, timed: what its steps cost here, and how early rows stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from ember.core.sequence import FinishReason
from ember.entrypoints.llm import LLM
from ember.entrypoints.plan import EnginePlan
from ember.planning.costs import StepCosts
from ember.planning.rows import RowCost, RowSample
from ember.planning.simulation import SimulatedStep
from ember.sampling_params import SamplingParams

STAGES = ((1.0, 5.0), (0.25, 2.0), (0.03, 1.0))
"""Of each stage the share of a full batch that runs, and its seconds: steps of several sizes tell what a row costs."""
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Attributes:
        stop_rate: how likely an output token was to end its row.
        load_s: seconds that loading the model took.
        took_s: seconds of the timed steps.
    """

    costs: StepCosts
    stop_rate: float
    load_s: float
    took_s: float


def calibrate(plan: EnginePlan, sample: RowSample, sampling: SamplingParams) -> Calibration:
    """Load the model and run some of the sampled rows for a few seconds."""
    begin = time.perf_counter()
    llm = LLM.from_plan(plan)
    load_s = time.perf_counter() - begin
    timer = _Timer(llm, sampling)
    most = min(plan.config.max_num_seqs, len(sample.costs))
    stages = [(max(1, round(share * most)), most_s) for share, most_s in STAGES]
    with closing(llm):
        for count, _ in stages:  # compiles what is compiled late
            timer.run(sample.repeated(count), most_s=60.0, most_steps=_WARM_UP_STEPS)
        timer.forget()
        for count, most_s in stages:
            timer.run(sample.repeated(count), most_s=most_s)
    stop_rate = timer.num_stops / max(1, timer.num_tokens)
    return Calibration(StepCosts.fitted(timer.steps, timer.durations), stop_rate, load_s, sum(timer.durations))


class _Timer:
    """Runs rows and keeps what each step did and how long it took, with all that the engine does around it."""

    def __init__(self, llm: LLM, sampling: SamplingParams) -> None:
        self._llm, self._sampling = llm, sampling
        self._ids: Iterator[int] = iter(range(2**62))
        self.forget()

    def forget(self) -> None:
        """Start again."""
        self.steps: list[SimulatedStep] = []
        self.durations: list[float] = []
        self.num_tokens = self.num_stops = 0

    def run(self, rows: list[RowCost], *, most_s: float, most_steps: int = 2**62) -> None:
        """Run rows together until they end, or time or steps do; then give up the rest."""
        self._llm.reset_prefix_cache()
        for row in rows:
            params = self._sampling.override({"max_tokens": row.max_tokens, "n": row.num_samples})
            self._llm.add(next(self._ids), list(row.prompt), params)
        end = time.perf_counter() + most_s
        for _ in range(most_steps):
            if not self._llm.engine.num_unfinished or time.perf_counter() > end:
                break
            self._step()
        self._llm.abort_all()

    def _step(self) -> None:
        begin = time.perf_counter()
        _, out = self._llm.step()
        self.durations.append(time.perf_counter() - begin)
        stats = out.stats
        self.num_tokens += len(out.tokens)
        self.num_stops += sum(token.finish_reason is FinishReason.STOP for token in out.tokens)
        self.steps.append(
            SimulatedStep(
                prefill_tokens=stats.num_prefill_tokens + stats.num_recomputed_tokens,
                decode_tokens=stats.num_decode_tokens,
                kv_tokens=stats.kv_tokens,
                num_sampled=len(out.tokens),
                num_running=stats.num_running,
                num_preempted=stats.num_preempted,
                blocks_used=stats.blocks_used,
            )
        )

"""What the server does, in numbers for Prometheus. The only module that imports prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ember.core.batch import StepOutput
from ember.data.output import CompletionOutput
from ember.entrypoints.llm import LLM

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SECONDS_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)

_SUMS = {
    "generation_tokens": ("", "Tokens sampled."),
    "engine_steps": ("", "Engine steps."),
    "preemptions": ("num_preempted", "Sequences put back to wait."),
    "prefill_tokens": ("num_prefill_tokens", "Prompt tokens computed."),
    "recomputed_tokens": ("num_recomputed_tokens", "Tokens computed again after a preemption."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Prompt tokens taken from the prefix cache."),
}
"""Name -> field of StepStats, what it is."""


class Metrics:
    """Counters and histograms of one server, in a registry of its own.

    `step` is called by the engine's thread, the rest by the event loop: each has its own numbers.
    """

    def __init__(self, llm: LLM) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        own: dict[str, Any] = {"namespace": "ember", "registry": CollectorRegistry()}
        self._registry: Any = own["registry"]
        self._totals = EngineTotals(llm)
        self._registry.register(self._totals)
        self._answers = Counter("http_responses", "Answers by path and status.", ["path", "status"], **own)
        self._finished = Counter("requests_finished", "Choices that ended, by finish_reason.", ["finish_reason"], **own)
        self._prompt = Counter("prompt_tokens", "Tokens of the prompts that were put in line.", **own)
        self._ttft = Histogram("time_to_first_token_seconds", "From arrival.", buckets=_SECONDS, **own)
        self._latency = Histogram("request_latency_seconds", "From arrival to the end.", buckets=_SECONDS, **own)
        self._queue = Histogram("request_queue_seconds", "From arrival to admission.", buckets=_SECONDS, **own)
        self._tpot = Histogram(
            "time_per_output_token_seconds", "Mean of a choice after its first.", buckets=_SECONDS_A_TOKEN, **own
        )

    def step(self, step: StepOutput) -> None:
        """Count an engine step."""
        self._totals.add(step)

    def accepted(self, num_prompt_tokens: int) -> None:
        """Count a prompt that was put in line."""
        self._prompt.inc(num_prompt_tokens)

    def finished(self, output: CompletionOutput) -> None:
        """Count a choice that ended."""
        self._finished.labels(output.finish_reason).inc()
        for histogram, value in ((self._ttft, output.ttft_s), (self._queue, output.queue_s)):
            if value is not None:
                histogram.observe(value)
        if output.latency_s is None:
            return
        self._latency.observe(output.latency_s)
        if output.ttft_s is not None and len(output.token_ids) > 1:
            self._tpot.observe((output.latency_s - output.ttft_s) / (len(output.token_ids) - 1))

    def answered(self, path: str, status: int) -> None:
        """Count an answer; `path` is a route's, never what a client made up."""
        self._answers.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """All numbers in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class EngineTotals:
    """A collector: sums over the engine's steps, and the state of its queues and pool when it is asked."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._sums = dict.fromkeys(_SUMS, 0)

    def add(self, step: StepOutput) -> None:
        """Count a step."""
        self._sums["generation_tokens"] += step.num_sampled
        self._sums["engine_steps"] += 1
        for name in ("preemptions", "prefill_tokens", "recomputed_tokens", "prefix_hit_tokens"):
            self._sums[name] += getattr(step.stats, _SUMS[name][0])

    def collect(self) -> Iterable[Metric]:
        """Prometheus asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, (_, text) in _SUMS.items():
            yield CounterMetricFamily(f"ember_{name}", text, value=self._sums[name])
        engine = self._llm.engine
        blocks = engine.scheduler.blocks
        gauges = {
            "requests_running": ("Sequences that run.", len(engine.scheduler.running)),
            "requests_waiting": ("Sequences in line.", engine.num_waiting),
            "kv_blocks": ("Blocks of the KV pool.", blocks.num_blocks),
            "kv_blocks_used": ("Blocks that running sequences hold.", blocks.num_used),
            "kv_blocks_cached": ("Blocks with reusable K/V that nobody holds.", blocks.num_cached),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"ember_{name}", text, value=value)

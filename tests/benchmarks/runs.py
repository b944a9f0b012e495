"""One timed run of ember on a workload, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

from ember import LLM, SamplingParams
from ember.config import EngineConfig
from ember.core.stats import StepStats
from ember.entrypoints.plan import EnginePlan
from ember.errors import UserError
from tests.benchmarks.models import model_config
from tests.benchmarks.workloads import Request

WARM_UP = 8
"""Short requests that are run first: code is compiled and memory touched before the clock runs."""


@dataclass(slots=True)
class Split:
    """Seconds of a run by part.

    Attributes:
        schedule: who runs next, and their blocks.
        prepare: plain data to tensors.
        attention, network: the network's two halves: the attention backend, and everything else.
        sample: logits to token ids.
        bookkeeping: the rest: counters, finished requests, text, statistics.
    """

    schedule: float = 0.0
    prepare: float = 0.0
    attention: float = 0.0
    network: float = 0.0
    sample: float = 0.0
    bookkeeping: float = 0.0

    def shares(self) -> list[float]:
        """Each part's share of the whole."""
        parts = [getattr(self, field.name) for field in fields(self)]
        whole = sum(parts)
        return [part / whole for part in parts]


SPLIT_NAMES = tuple(field.name for field in fields(Split))


@dataclass(frozen=True, slots=True)
class Run:
    """What a run did. `tokens` are the output tokens of each request; `seconds` includes all of the split."""

    seconds: float
    tokens: list[list[int]]
    steps: list[StepStats]
    split: Split

    @property
    def num_output_tokens(self) -> int:
        """Of all requests."""
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds


def median_run(runs: Seq[Run]) -> Run:
    """The run of median speed, of an even number the slower one in the middle."""
    return sorted(runs, key=lambda run: run.rate)[(len(runs) - 1) // 2]


class Timed:
    """Stands before an object and adds up the seconds spent in each of some methods."""

    def __init__(self, inner: Any, *methods: str) -> None:
        self._inner = inner
        self.seconds_of = dict.fromkeys(methods, 0.0)
        for method in methods:
            setattr(self, method, self._timed(method, getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def seconds(self) -> float:
        """In all of them."""
        return sum(self.seconds_of.values())

    def reset(self) -> None:
        """Start again from 0."""
        self.seconds_of = dict.fromkeys(self.seconds_of, 0.0)

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*args: Any) -> Any:
            begin = perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds_of[name] += perf_counter() - begin

        return timed


class Bench:
    """A loaded model that runs workloads and is timed.

    Raises:
        UserError: a setting that this version of ember doesn't know, or that doesn't run here.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(set(settings) - known):
            raise UserError(f"this version of ember has no setting {', '.join(unknown)}")
        self.llm = LLM.from_plan(EnginePlan.resolve(EngineConfig(model=model_config(model), **settings)))
        self._runner: Any = self.llm.engine.runner
        self._attention = self._runner.attention = Timed(self._runner.attention, "prepare", "forward")
        self.replace_network(self._runner.model)

    def replace_network(self, network: Any) -> None:
        """Compute with another object that has `forward` and `logits`."""
        self._network = self._runner.model = Timed(network, "forward", "logits")

    def warm_up(self, requests: Seq[Request]) -> None:
        """Run a few short requests."""
        self.run([Request(r.prompt[:32], 4) for r in requests[:WARM_UP]])

    def run(self, requests: Seq[Request]) -> Run:
        """All requests at once, EOS ignored, with nothing in the prefix cache that an earlier run left there.

        Raises:
            RuntimeError: a request could not run, or got another number of tokens than asked.
        """
        self._attention.reset()
        self._network.reset()
        self.llm.reset_prefix_cache()
        begin = perf_counter()
        for index, request in enumerate(requests):
            params = SamplingParams(max_tokens=request.out, ignore_eos=True, temperature=request.temperature)
            failed = self.llm.add(index, request.prompt, params)
            if failed is not None:
                raise RuntimeError(f"request {index}: {failed.error}")
        tokens: dict[int, list[int]] = {}
        steps: list[StepStats] = []
        while self.llm.engine.num_unfinished:
            finished, out = self.llm.step()
            tokens.update({output.request_id: output.token_ids for output in finished})
            steps.append(out.stats)
        seconds = perf_counter() - begin
        check_lengths(requests, outputs := [tokens[index] for index in range(len(requests))])
        return Run(seconds, outputs, steps, self._split(seconds, steps))

    def _split(self, seconds: float, steps: list[StepStats]) -> Split:
        schedule, model, sample = (
            sum(getattr(s, f"{part}_s") for s in steps) for part in ("schedule", "model", "sample")
        )
        attention = self._attention.seconds
        return Split(
            schedule=schedule,
            prepare=model - self._network.seconds - self._attention.seconds_of["prepare"],
            attention=attention,
            network=self._network.seconds - self._attention.seconds_of["forward"],
            sample=sample,
            bookkeeping=seconds - schedule - model - sample,
        )


def check_lengths(requests: Seq[Request], outputs: Seq[Seq[int]]) -> None:
    """Nothing, if every request got exactly its tokens.

    Raises:
        RuntimeError: one did not: the run is not worth timing.
    """
    wrong = [i for i, (r, tokens) in enumerate(zip(requests, outputs, strict=True)) if len(tokens) != r.out]
    if wrong:
        first = wrong[0]
        got = f"request {first} got {len(outputs[first])} tokens, not {requests[first].out}"
        raise RuntimeError(f"{len(wrong)} of {len(requests)} requests have a wrong length: {got}")

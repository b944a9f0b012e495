"""What speculation gains on text that repeats itself or its prompt, and what it costs on text that doesn't.

    python -m tests.benchmarks.speculation

The same requests with `speculative=off` and `ngram` take turns, and must give the same tokens. `gain` is how many times
as fast speculation is (the median of the rounds), `steps` how many times fewer steps it takes; then proposed tokens an
output token, and the share of them that was accepted. Prompts are made of the humaneval rows.

code edit   the prompt asks for its code with the function renamed, and the output is that code. No model at hand edits
            code: the network is computed in full, but the tokens drawn are those of the edited code
own text    what the model itself writes, greedily: sooner or later it goes round in a loop
sampled     the same at temperature 1, which seldom says anything twice
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ember.core.batch import ScheduledSequence
from ember.model.tokenizer import Tokenizer
from tests.benchmarks.arguments import add_common, chosen, repeats
from tests.benchmarks.models import EMBEDDED
from tests.benchmarks.runs import Bench, Run, median_run
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import Request

PROMPTS = Path(__file__).parents[2] / "jobs" / "prompts" / "humaneval.jsonl"
ASK = "Rename the function {old} to {new} in this code:\n\n{code}\nThe code with the new name:\n\n"
OWN_OUT = 128
"""Output tokens of a request whose text is the model's own."""
BATCHES = (1, 8, 32, 128)
WORKLOADS = ("code edit", "own text", "sampled")
CERTAIN = 1e4
"""A logit above all others."""


class Scripted:
    """A runner that computes everything, and then makes the given output the likeliest.

    Args:
        scripts: the output of each request.
    """

    def __init__(self, inner: Any, scripts: list[list[int]]) -> None:
        self._inner, self._scripts = inner, scripts

    @torch.inference_mode()
    def execute(self, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        logits: torch.Tensor = self._inner.execute(scheduled)
        ends = [(s, s.start + s.num_new_tokens) for s in scheduled]
        places = [(s.sequence, p + 1) for s, end in ends for p in range(end - s.num_logits, end)]
        for row, (sequence, place) in zip(logits, places, strict=True):
            script, at = self._scripts[sequence.parent_id], place - sequence.num_prompt_tokens
            if 0 <= at < len(script):
                row[script[at]] = CERTAIN
        return logits


def code_edits(tokenizer: Tokenizer, max_len: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and the outputs they ask for, those that fit."""
    edits = []
    for row in map(json.loads, PROMPTS.read_text().splitlines()):
        code, old = row["prompt"].lstrip("\n"), row["entry_point"]
        new = f"compute_{old}"
        prompt = tokenizer.encode(ASK.format(old=old, new=new, code=code))
        output = tokenizer.encode(code.replace(old, new))
        if len(prompt) + len(output) <= max_len:
            edits.append((prompt, output))
    return edits


def own_texts(tokenizer: Tokenizer, max_len: int) -> list[Request]:
    """Plain prompts, cut where the output would not fit."""
    rows = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    return [Request(tokenizer.encode(row)[: max_len - OWN_OUT], OWN_OUT) for row in rows]


def main(argv: list[str] | None = None) -> None:
    """A row a workload and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.set_defaults(model=EMBEDDED)
    parser.add_argument("--batch", type=int, action="append", help="max_num_seqs; may be given more than once")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="may be given more than once")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=NUMBER", help="a setting of speculation")
    options = parser.parse_args(argv)
    print(f"{options.model}, {repeats(options)} rounds")
    table = Table("workload ", "batch", "off tok/s", "ngram tok/s", "gain", "steps", "proposed", "accepted")
    for batch in options.batch or BATCHES:
        for workload in options.workload or WORKLOADS:
            table.add(workload, batch, *_compared(workload, batch, options))


def _compared(workload: str, batch: int, options: argparse.Namespace) -> list[str]:
    """Off and on take turns, each the first in every second round.

    Raises:
        RuntimeError: the tokens differ.
    """
    extra = {key: int(value) for key, value in (pair.split("=") for pair in options.set)}
    benches = [_bench(options.model, batch), _bench(options.model, batch, speculative="ngram", **extra)]
    requests = _requests(workload, benches, 2 * batch if batch > 8 else 16, options)
    runs: list[list[Run]] = [[], []]
    for bench in benches:
        bench.run(requests[:8])
    for turn in range(repeats(options)):
        for which in (0, 1) if turn % 2 else (1, 0):
            runs[which].append(benches[which].run(requests))
    if any(run.tokens != runs[0][0].tokens for done in runs for run in done):
        raise RuntimeError(f"{workload}: speculation changed tokens")
    gain = statistics.median(on.rate / off.rate for off, on in zip(*runs, strict=True))
    return _cells(*(median_run(done) for done in runs), gain)


def _bench(model: str, batch: int, **settings: Any) -> Bench:
    return Bench(model, max_num_seqs=batch, prefix_cache=False, **settings)


def _requests(workload: str, benches: list[Bench], count: int, options: argparse.Namespace) -> list[Request]:
    """The requests; for code edits the benches' runners draw the edited code."""
    plan = benches[0].llm.plan
    if workload != "code edit":
        requests = chosen(own_texts(plan.tokenizer, plan.max_model_len)[:count], options)
        return [replace(r, temperature=1.0) for r in requests] if workload == "sampled" else requests
    edits = code_edits(plan.tokenizer, plan.max_model_len)[:count]
    requests = chosen([Request(prompt, len(output)) for prompt, output in edits], options)
    scripts = {tuple(prompt): output for prompt, output in edits}
    for bench in benches:
        engine = bench.llm.engine
        engine.runner = Scripted(engine.runner, [scripts[tuple(r.prompt)] for r in requests])
    return requests


def _cells(off: Run, on: Run, gain: float) -> list[str]:
    proposed, accepted = (sum(getattr(s, f"num_{kind}_tokens") for s in on.steps) for kind in ("proposed", "accepted"))
    return [
        *(f"{run.rate:.1f}" for run in (off, on)),
        f"{gain:.2f}x",
        f"{len(off.steps) / len(on.steps):.2f}x",
        f"{proposed / on.num_output_tokens:.2f}",
        f"{accepted / proposed:.0%}" if proposed else "-",
    ]


if __name__ == "__main__":
    main()

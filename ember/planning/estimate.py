"""The numbers of `ember plan`: batch, steps, output size, time."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ember.entrypoints.plan import EnginePlan
from ember.planning.calibration import Calibration
from ember.planning.rows import RowSample
from ember.planning.simulation import SimulatedStep, simulate

MOST_SIMULATED = 2048
_BYTES_A_STEP = 90
"""Of the step statistics, as Parquet."""
_SIZED_ROWS = 64
_TRIAL_S = 0.3
_TRIAL_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job will take.

    Attributes:
        mean_running, peak_running: sequences at once.
        mean_kv_use, peak_kv_use: blocks of running sequences, of all.
        num_output_tokens: of all rows; at most, where it is not known how early rows stop.
        num_bytes: of the output.
        seconds: of the steps, without loading.
    """

    num_steps: int
    mean_running: float
    peak_running: int
    mean_kv_use: float
    peak_kv_use: float
    num_preemptions: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_bytes: int
    seconds: float


def estimate(plan: EnginePlan, sample: RowSample, measured: Calibration | None) -> Estimate:
    """The estimate from a sample of the rows; with a calibration, from measured times."""
    count = min(sample.num_running, MOST_SIMULATED)
    rows = sample.repeated(count)
    steps = simulate(plan, rows, stop_rate=0.0 if measured is None else measured.stop_rate)
    scale = sample.num_running / max(1, count)
    total = max(1, len(steps))
    samples = sum(row.num_samples for row in rows)
    output = sum(s.num_sampled for s in steps)
    taken = _rough_s(plan, steps) if measured is None else measured.costs.total_s(steps)
    return Estimate(
        num_steps=round(scale * len(steps)),
        mean_running=sum(s.num_running for s in steps) / total,
        peak_running=max((s.num_running for s in steps), default=0),
        mean_kv_use=sum(s.blocks_used for s in steps) / total / plan.num_blocks,
        peak_kv_use=max((s.blocks_used for s in steps), default=0) / plan.num_blocks,
        num_preemptions=round(scale * sum(s.num_preempted for s in steps)),
        num_prefill_tokens=round(scale * sum(s.prefill_tokens for s in steps)),
        num_output_tokens=round(scale * output),
        num_bytes=round(_row_bytes(plan, sample, output / max(1, samples)) * samples * scale)
        + round(scale * len(steps) * _BYTES_A_STEP),
        seconds=scale * taken,
    )


def num_parameters(plan: EnginePlan) -> int:
    """Numbers in the network's weights."""
    return sum(prod(shape) for shape in plan.network.weight_layout.shapes.values())


def _row_bytes(plan: EnginePlan, sample: RowSample, output_tokens: float) -> float:
    """Bytes of a row of completions in Parquet: some are written to memory, prompts standing in for outputs."""
    rows = sample.repeated(min(_SIZED_ROWS, len(sample.costs)))
    if not rows:
        return 0.0
    outputs = [(list(row.prompt) * 4096)[: round(output_tokens)] for row in rows]
    texts = [[plan.tokenizer.decode(ids) for ids in column] for column in ([list(r.prompt) for r in rows], outputs)]
    ids = pa.list_(pa.int32())
    table = pa.table(
        {
            "prompt": texts[0],
            "completion": texts[1],
            "prompt_token_ids": pa.array([list(row.prompt) for row in rows], ids),
            "token_ids": pa.array(outputs, ids),
            "times": pa.array([[0.1 * i, 0.3 * i, 0.7 * i] for i in range(len(rows))]),
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.tell() / len(rows)


def _rough_s(plan: EnginePlan, steps: Seq[SimulatedStep]) -> float:
    """Seconds if all were products of matrices, two operations a weight and token, at the speed of one of the sizes."""
    tokens = sum(s.prefill_tokens + s.decode_tokens for s in steps)
    mean = max(1, round(tokens / max(1, len(steps))))
    return 2.0 * num_parameters(plan) * tokens / _operations_per_s(plan, mean)


def _operations_per_s(plan: EnginePlan, num_tokens: int) -> float:
    x = torch.ones(num_tokens, _TRIAL_WIDTH, device=plan.device, dtype=plan.dtype)
    weight = torch.ones(4 * _TRIAL_WIDTH, _TRIAL_WIDTH, device=plan.device, dtype=plan.dtype)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < _TRIAL_S:
        float((x @ weight.T)[0, 0])  # waits for a GPU
        count += 1
    return count * 2.0 * num_tokens * weight.numel() / (time.perf_counter() - begin)

"""What `ember plan` prints."""

from __future__ import annotations

import statistics

from ember.config import JobConfig
from ember.data.reader import PromptReader
from ember.dry_run import show_engine
from ember.entrypoints.plan import EnginePlan
from ember.planning.calibration import Calibration, calibrate
from ember.planning.estimate import Estimate, estimate
from ember.planning.rows import RowSample, sample_rows
from ember.report.words import seconds, size


def show_forecast(config: JobConfig, plan: EnginePlan, reader: PromptReader) -> Estimate | None:
    """Print what the job will take; None if no row can run. No result is written.

    Raises:
        UserError: a file can't be read.
    """
    show_engine(config, plan)
    print(f"        {plan.kv_bytes_per_token:,} bytes a token")
    sample = sample_rows(config, plan, reader)
    _show_rows(sample)
    if not sample.costs:
        print("time    none: no row can run")
        return None
    if config.speculative != "off":
        print("note    the steps are counted as without speculation, which may save some")
    measured = calibrate(plan, sample, config.sampling) if config.calibrate else None
    forecast = estimate(plan, sample, measured)
    for line in _lines(forecast, measured, plan):
        print(line)
    return forecast


def _show_rows(sample: RowSample) -> None:
    looked = "all looked at" if sample.num_sampled == sample.num_rows else f"{sample.num_sampled:,} looked at"
    cant = sample.num_sampled - len(sample.costs)
    print(f"rows    {sample.num_rows:,}, {looked}" + (f"; {cant:,} of these can't run" if cant else ""))
    if sample.costs:
        lengths = [len(row.prompt) for row in sample.costs]
        most = statistics.mean(row.max_tokens * row.num_samples for row in sample.costs)
        print(
            f"        prompts of {min(lengths):,} to {max(lengths):,} tokens, mean {statistics.mean(lengths):,.0f}; "
            f"at most {most:,.0f} output tokens a row"
        )


def _lines(forecast: Estimate, measured: Calibration | None, plan: EnginePlan) -> list[str]:
    most = "" if measured is not None else "at most "
    lines = [
        f"batch   {forecast.mean_running:,.1f} sequences at once on average, {forecast.peak_running:,} at most, "
        f"in {forecast.num_steps:,} steps",
        f"        {forecast.mean_kv_use:.0%} of the pool used on average, {forecast.peak_kv_use:.0%} at most; "
        f"{forecast.num_preemptions:,} preemptions",
        f"tokens  {forecast.num_prefill_tokens:,} of prompts to compute, "
        f"{most}{forecast.num_output_tokens:,} of output",
        f"output  {most}about {size(forecast.num_bytes)}",
    ]
    if measured is None:
        rough = "a rough guess from one matrix product; calibrate=true measures"
        return [*lines, f"time    about {seconds(forecast.seconds)} ({rough})"]
    speed = forecast.num_output_tokens / forecast.seconds if forecast.seconds > 0 else 0.0
    ended = f"; {measured.stop_rate:.2%} of output tokens ended a row" if measured.stop_rate else ""
    return [
        *lines,
        f"time    about {seconds(forecast.seconds)}, {speed:,.0f} output tokens/s, "
        f"and {seconds(measured.load_s)} to load",
        f"        measured on {plan.device} in {seconds(measured.took_s)}{ended}",
    ]

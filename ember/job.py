"""A job: rows stream from the reader through the engine into the writers.

The engine is fed from a bounded window of rows, so memory stays flat and the batch stays full while input remains,
across files and output parts alike.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from ember.claim import claim
from ember.config import JobConfig
from ember.core.batch import StepOutput
from ember.core.random_stream import row_seed
from ember.core.sequence import FinishReason
from ember.data.attempts import Attempts
from ember.data.folder import OutputFolder
from ember.data.output import RequestOutput
from ember.data.reader import PromptReader, PromptRow
from ember.data.summary import JobStatus, JobSummary, SummaryBuilder, final_table
from ember.data.work import Work
from ember.data.writer import STEPS_SCHEMA, PartWriter, completions_schema, step_row
from ember.dry_run import show_plan
from ember.entrypoints.llm import LLM
from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError, RequestError, UserError
from ember.interrupt import Interrupted, Interrupts
from ember.progress import ProgressBar

ONE_ATTEMPT = ("force", "verify", "retry_errors", "dry_run")


def run_job(config: JobConfig) -> JobSummary:
    """Run a job to its end, or go on with it where it stopped; prints what it did.

    Returns:
        Its numbers; `exit_code` is what a process should return.

    Raises:
        UserError: a mistake in settings, data, model or output folder; one line with the remedy.
    """
    begin = time.perf_counter()
    run_id = uuid.uuid4().hex[:12]
    with Interrupts() as interrupts:
        try:
            with interrupts.breakable(after=1):
                plan = EnginePlan.resolve(config)
                if config.dry_run:
                    return _dry_run(config, plan, run_id)
                if config.output is None:
                    raise ConfigError("output", None, "must be a folder for the results")
            with OutputFolder(config.output, config.shard, config.num_shards) as folder:
                with interrupts.breakable(after=1):
                    reader = _read(config)
                    counts = SummaryBuilder()
                    work = claim(config, plan, reader, folder, counts)
                    if work.num_done == work.share.num_rows > 0:
                        return _nothing_to_do(counts, folder, work, run_id)
                    llm = LLM.from_plan(plan)
                job = Job(config, work, reader.rows(work.wants), llm, interrupts, counts)
                return job.run(folder, reader.schema, run_id, load_s=time.perf_counter() - begin)
        except Interrupted:
            print("interrupted before the first row", file=sys.stderr)
            return SummaryBuilder().build(
                status=JobStatus.INTERRUPTED, run_id=run_id, num_rows_total=0, duration_s=0.0, signum=interrupts.signum
            )


def _read(config: JobConfig) -> PromptReader:
    reader = PromptReader(config)
    for warning in reader.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return reader


def _dry_run(config: JobConfig, plan: EnginePlan, run_id: str) -> JobSummary:
    reader = _read(config)
    show_plan(config, plan, reader)
    return SummaryBuilder().build(
        status=JobStatus.FINISHED, run_id=run_id, num_rows_total=reader.num_rows, duration_s=0.0
    )


def _nothing_to_do(counts: SummaryBuilder, folder: OutputFolder, work: Work, run_id: str) -> JobSummary:
    summary = counts.build(status=JobStatus.FINISHED, run_id=run_id, num_rows_total=work.share.num_rows, duration_s=0.0)
    print(
        f"nothing to do: all {work.share.num_rows:,} rows are in {folder.path} ({summary.num_errors:,} with an error)"
    )
    return summary


class Job:
    """One attempt at a job: feeds rows, steps the engine, hands finished rows to the writers."""

    def __init__(
        self,
        config: JobConfig,
        work: Work,
        rows: Iterator[PromptRow],
        llm: LLM,
        interrupts: Interrupts,
        counts: SummaryBuilder,
    ) -> None:
        self.config, self.work, self.llm, self.interrupts = config, work, llm, interrupts
        self._rows = rows
        self._counts = counts
        self._input_left = True
        self._live: dict[int, PromptRow] = {}
        self._deadline_s: float | None = None
        self._num_sampled = 0
        self._num_errors = 0

    def run(self, folder: OutputFolder, columns: pa.Schema, run_id: str, *, load_s: float) -> JobSummary:
        """Work until the rows, or the time left after a signal, run out. Finished rows are always committed."""
        begin = time.perf_counter()
        self._run_id = run_id
        attempts = Attempts.load(folder.summary_path, run_id)
        folder.write_config(yaml.safe_dump(_kept(self.config), sort_keys=False, allow_unicode=True))
        folder.write_summary(attempts.started())
        self._completions = self._writer(folder.completions_dir, folder.part_prefix, completions_schema(columns))
        self._steps = self._writer(folder.steps_dir, folder.part_prefix, STEPS_SCHEMA)
        num_rows = self.work.share.num_rows
        bar = ProgressBar(num_rows, self.config.progress, initial_rows=self._counts.num_rows_done)
        try:
            with self._steps, self._completions:
                self._loop(bar)
        except BaseException:
            with contextlib.suppress(UserError):  # the disk may be why it failed
                failed = self._summary(JobStatus.FAILED, begin, load_s)
                folder.write_summary(attempts.finished(failed))
            raise
        finally:
            bar.close()
        summary = self._summary(self._status(), begin, load_s)
        folder.write_summary(attempts.finished(summary))
        print(final_table(summary, str(folder.path)))
        return summary

    def _status(self) -> JobStatus:
        if self._too_many_errors:
            return JobStatus.FAILED
        return JobStatus.INTERRUPTED if self._input_left or self._live else JobStatus.FINISHED

    def _writer(self, folder: Path, prefix: str, schema: pa.Schema) -> PartWriter:
        every, every_s = self.config.commit_every, self.config.commit_every_s
        return PartWriter(folder, schema, commit_every=every, commit_every_s=every_s, prefix=prefix)

    @property
    def _too_many_errors(self) -> bool:
        """Whether this attempt met more bad rows than the job is to bear."""
        most = 0 if self.config.on_error == "stop" else self.config.max_errors
        return most is not None and self._num_errors > most

    def _loop(self, bar: ProgressBar) -> None:
        while True:
            self._feed()
            if self.interrupts.signum is not None:
                self._wind_down()
            if not self.llm.engine.num_unfinished or self._out_of_time() or self._too_many_errors:
                return
            try:
                with self.interrupts.breakable(after=2):
                    outputs, step = self.llm.step()
            except Interrupted:
                return
            self._record(outputs, step)
            bar.update(self._counts.num_rows_done, self._num_sampled, step.stats)

    def _feed(self) -> None:
        """Keep as many rows in line as may run, so that a place that falls free is taken in the next step."""
        window = self.config.max_num_seqs
        while self._input_left and self.llm.engine.num_waiting < window:
            if self.interrupts.signum is not None or self._too_many_errors:
                return
            row = next(self._rows, None)
            if row is None:
                self._input_left = False
                return
            self._live[row.row_index] = row
            done = self._start(row)
            if done is not None:
                self._write(done)

    def _start(self, row: PromptRow) -> RequestOutput | None:
        """Put a row in line; returns its result if there is nothing to compute."""
        try:
            if row.error is not None or row.prompt is None:
                raise RequestError("bad_row", row.error or "the row has no prompt")
            params = self.config.sampling.override(row.sampling)
        except (ConfigError, RequestError) as error:
            return RequestOutput(
                request_id=row.row_index,
                prompt=row.prompt if isinstance(row.prompt, str) else None,
                finish_reason=FinishReason.ERROR,
                error=str(error),
                error_kind=error.kind if isinstance(error, RequestError) else "bad_sampling",
                seed=row_seed(self.config.seed, row.row_index),
            )
        return self.llm.add(row.row_index, row.prompt, params, allow_special_tokens=self.config.allow_special_tokens)

    def _wind_down(self) -> None:
        """After the first signal: nothing new starts, what runs has `grace_s` to finish."""
        if self._deadline_s is None:
            self._deadline_s = time.perf_counter() + self.config.grace_s
            self.llm.abort_waiting()
            print(
                f"stopping: {self.llm.engine.num_unfinished} running rows have {self.config.grace_s:g} s to finish "
                "(once more to stop at once)",
                file=sys.stderr,
            )

    def _out_of_time(self) -> bool:
        return self.interrupts.at_once or (self._deadline_s is not None and time.perf_counter() > self._deadline_s)

    def _record(self, outputs: list[RequestOutput], step: StepOutput) -> None:
        self._num_sampled += len(step.tokens)
        self._counts.add_step(step.stats)
        self._steps.write(step_row(self._run_id, 0, step.stats))
        for output in outputs:
            self._write(output)
        self._completions.commit_if_due()

    def _write(self, output: RequestOutput) -> None:
        row = self._live.pop(output.request_id)
        if output.error is not None:
            self._num_errors += 1
            output.error = f"{output.error_kind}: {row.where}: {output.error}"
        self._completions.write(_completion_row(row, output))
        self._counts.add_row(
            finish_reason=output.finish_reason,
            error=output.error,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=len(output.token_ids),
            row_index=row.row_index,
            id=row.id,
        )

    def _summary(self, status: JobStatus, begin: float, load_s: float) -> JobSummary:
        plan = self.llm.plan
        return self._counts.build(
            status=status,
            run_id=self._run_id,
            num_rows_total=self.work.share.num_rows,
            duration_s=time.perf_counter() - begin,
            load_s=load_s,
            block_size=self.config.block_size,
            signum=self.interrupts.signum,
            settings={
                "model": plan.folder.name,
                "device": str(plan.device),
                "dtype": plan.dtype_name,
                "attention": plan.attention,
                "scheduler": self.config.scheduler,
                "pool_size": self.config.pool_size,
            },
        )


def _kept(config: JobConfig) -> dict[str, Any]:
    """The settings to go on with: those that speak of one attempt only are left at their defaults."""
    return {key: value for key, value in asdict(config).items() if key not in ONE_ATTEMPT}


def _completion_row(row: PromptRow, output: RequestOutput) -> dict[str, Any]:
    return {
        "row_index": row.row_index,
        "id": row.id,
        "sample_index": output.sample_index,
        "prompt": output.prompt,
        "completion": output.text,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": None if output.stop_reason is None else str(output.stop_reason),
        "error": output.error,
        "seed": output.seed,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(output.token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_preemptions": output.num_preemptions,
        "queue_s": output.queue_s,
        "ttft_s": output.ttft_s,
        "latency_s": output.latency_s,
        **row.columns,
    }

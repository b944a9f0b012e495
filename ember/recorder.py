"""The recording half of a job: finished rows and step statistics into parts, counts, error limits, bar and summary.

Whoever computes the rows, the engine in this process or those of a cluster, hands them to this one place: what is
durable and how a job ends does not depend on the runner.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from ember.config import JSON_LINES, JobConfig
from ember.core.stats import StepStats
from ember.data.done import read_parts
from ember.data.folder import OutputFolder
from ember.data.formats import KEY_COLUMNS, ParquetFormat, PartFormat, part_format
from ember.data.logprobs import as_rows
from ember.data.output import CompletionOutput, RequestOutput
from ember.data.reader import PromptRow
from ember.data.settings_file import settings_text
from ember.data.store import Store
from ember.data.summary import JobStatus, JobSummary, SummaryBuilder, final_table
from ember.data.work import Work
from ember.data.writer import STEPS_SCHEMA, PartWriter, completions_schema, step_row
from ember.entrypoints.job_plan import JobPlan
from ember.errors import JobError, UserError
from ember.interrupt import Interrupts
from ember.progress import ProgressBar


class Recorder:
    """Writes one attempt at a job.

    Args:
        folder: locked.
        columns: the input columns that pass through.
        counts: knows the rows of earlier attempts.
    """

    def __init__(
        self,
        config: JobConfig,
        plan: JobPlan,
        work: Work,
        folder: OutputFolder,
        columns: pa.Schema,
        counts: SummaryBuilder,
        interrupts: Interrupts,
        run_id: str,
    ) -> None:
        self.config, self.plan, self.work, self.interrupts = config, plan, work, interrupts
        self._folder, self._columns, self._counts, self._run_id = folder, columns, counts, run_id
        self._num_sampled = 0
        self._num_errors = 0
        self._failed_rows: set[int] = set()  # of several samples: others may still fail
        self._load_s = 0.0

    def run(self, compute: Callable[[], bool], *, load_s: float) -> JobSummary:
        """Record what `compute` hands over until it returns. Finished rows are always committed.

        Args:
            compute: calls `write` and `steps`; returns whether every row that was left is written.
            load_s: seconds that loading took.

        Raises:
            JobError: it can't go on: one line with the reason.
        """
        self._begin, self._load_s = time.perf_counter(), load_s
        attempts = self._folder.attempts(self._run_id)
        self._folder.write_config(settings_text(self.config))
        self._folder.write_summary(attempts.started())
        self._completions = self._writer(self._folder.completions, completions_schema(self._columns), self._format())
        self._steps = self._writer(self._folder.steps, STEPS_SCHEMA, ParquetFormat())
        num_rows = self.work.share.num_rows
        self._bar = ProgressBar(
            num_rows,
            self.config.progress is not False,
            json_lines=self.config.progress == JSON_LINES,
            initial_rows=self._counts.num_rows_done,
        )
        try:
            with self._steps, self._completions:
                complete = compute()
        except BaseException as error:
            status = JobStatus.FAILED if isinstance(error, Exception) else JobStatus.INTERRUPTED
            with contextlib.suppress(UserError):  # the disk may be why it failed
                self._counts.recount(self._committed())
                self._folder.write_summary(attempts.finished(self._summary(status)))
            if isinstance(error, UserError):
                raise JobError(str(error)) from error
            raise
        finally:
            self._bar.close()
        summary = self._summary(self._status(complete))
        self._folder.write_summary(attempts.finished(summary))
        with contextlib.suppress(BrokenPipeError):  # `ember ... | head`: the results are on the disk
            if self.too_many_errors:
                print(
                    f"ended by {_error_limit(self.config)}: {self._num_errors} rows with an error in this attempt",
                    file=sys.stderr,
                )
            print(final_table(summary, str(self._folder.path)), flush=True)
        return summary

    @property
    def too_many_errors(self) -> bool:
        """Whether this attempt met more bad rows than the job is to bear."""
        most = 0 if self.config.on_error == "stop" else self.config.max_errors
        return most is not None and self._num_errors > most

    def write(self, row: PromptRow, output: RequestOutput) -> None:
        """Take finished samples of a row, which go into one part; of `row` all but its prompt and sampling is used."""
        self._count_error(row, output)
        rows = [_completion_row(row, output, sample) for sample in output.outputs]
        self._completions.write(*rows)
        for written in rows:
            self._counts.add_sample(**{name: written[name] for name in KEY_COLUMNS})

    def _count_error(self, row: PromptRow, output: RequestOutput) -> None:
        """A row counts once, however many of its samples fail, at once or one after the other."""
        if all(sample.error is None for sample in output.outputs) or row.row_index in self._failed_rows:
            return
        self._num_errors += 1
        if output.num_samples > 1:
            self._failed_rows.add(row.row_index)

    def steps(self, engine: int, stats: Sequence[StepStats], num_sampled: int) -> None:
        """Take the statistics of an engine's latest steps, in which it sampled that many tokens."""
        self._num_sampled += num_sampled
        for step in stats:
            self._counts.add_step(step)
            self._steps.write(step_row(self._run_id, engine, step))

    def tick(self, stats: StepStats) -> None:
        """Commit what is due and draw the bar; `stats` are of the latest step."""
        self._completions.commit_if_due()
        self._bar.update(self._counts.num_rows_done, self._num_sampled, stats)

    def loaded(self) -> None:
        """The engines are only ready now: what has passed counts as loading."""
        now = time.perf_counter()
        self._load_s, self._begin = self._load_s + now - self._begin, now

    def _status(self, complete: bool) -> JobStatus:
        if self.too_many_errors:
            return JobStatus.FAILED
        return JobStatus.FINISHED if complete else JobStatus.INTERRUPTED

    def _committed(self) -> Iterator[pa.Table]:
        parts = read_parts(self._folder.completions, self._format(), self._folder.part_prefix)
        return (self.work.share.within(keys) for _, keys in parts)

    def _format(self) -> PartFormat:
        return part_format(self.config.output_format, model=self.plan.model_name, created=int(time.time()))

    def _writer(self, folder: Store, schema: pa.Schema, form: PartFormat) -> PartWriter:
        every, every_s, prefix = self.config.commit_every, self.config.commit_every_s, self._folder.part_prefix
        return PartWriter(folder, schema, form=form, commit_every=every, commit_every_s=every_s, prefix=prefix)

    def _summary(self, status: JobStatus) -> JobSummary:
        plan = self.plan
        summary = self._counts.build(
            status=status,
            run_id=self._run_id,
            num_rows_total=self.work.share.num_rows,
            duration_s=time.perf_counter() - self._begin,
            load_s=self._load_s,
            block_size=self.config.block_size,
            signum=self.interrupts.signum,
            settings=plan.settings() | ({} if self.config.runner == "local" else {"runner": self.config.runner}),
        )
        summary.deterministic, summary.deterministic_why = plan.why_not_exact is None, plan.why_not_exact
        return summary


def _completion_row(row: PromptRow, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
    return {
        "row_index": row.row_index,
        "id": row.id,
        "sample_index": sample.index,
        "num_samples": output.num_samples,
        "prompt": output.prompt,
        "completion": sample.text,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": None if sample.stop_reason is None else str(sample.stop_reason),
        "error": None if sample.error is None else f"{sample.error_kind}: {row.where}: {sample.error}",
        "seed": output.seed,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_output_tokens": sample.num_tokens,
        "num_cached_tokens": sample.num_cached_tokens,
        "num_preemptions": sample.num_preemptions,
        "cumulative_logprob": sample.cumulative_logprob,
        "logprobs": as_rows(sample.logprobs),
        "prompt_logprobs": as_rows(sample.prompt_logprobs),
        "queue_s": sample.queue_s,
        "ttft_s": sample.ttft_s,
        "latency_s": sample.latency_s,
        **row.columns,
    }


def _error_limit(config: JobConfig) -> str:
    return "on_error=stop" if config.on_error == "stop" else f"max_errors={config.max_errors}"

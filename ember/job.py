"""A job: rows stream from the reader through the engine into the writers.

The engine is fed from a bounded window of rows, so memory stays flat and the batch stays full while input remains,
across files and output parts alike.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing

from ember.claim import claim
from ember.config import JobConfig
from ember.core.batch import StepOutput
from ember.data.attempts import read_summary
from ember.data.folder import OutputFolder
from ember.data.output import RequestOutput
from ember.data.reader import PromptReader, PromptRow
from ember.data.spool import stdin_as_file
from ember.data.summary import JobStatus, JobSummary, SummaryBuilder
from ember.data.work import Work
from ember.dry_run import show_plan
from ember.entrypoints.admission import NO_TEMPLATE
from ember.entrypoints.job_plan import JobPlan
from ember.entrypoints.llm import LLM
from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError, UserError
from ember.interrupt import Interrupted, Interrupts
from ember.planning.show import show_forecast
from ember.recorder import Recorder
from ember.report.report import check_report, report_at_the_end
from ember.request import start
from ember.threads import same_threads_after


def run_job(config: JobConfig) -> JobSummary:
    """Run a job to its end, or go on with it where it stopped; prints what it did.

    Returns:
        Its numbers; `exit_code` is what a process should return.

    Raises:
        UserError: a mistake in settings, data, model or output folder; one line with the remedy.
    """
    check_report(config.report, config.report_sort)
    summary = _run(config)
    if config.report and not (config.dry_run or config.plan) and summary.status == JobStatus.FINISHED:
        report_at_the_end(str(config.output))
    return summary


def _run(config: JobConfig) -> JobSummary:
    begin = time.perf_counter()
    run_id = uuid.uuid4().hex[:12]
    with Interrupts() as interrupts, same_threads_after():
        try:
            with interrupts.breakable(after=1):
                plan = _plan(config)
                if config.dry_run or config.plan:
                    return _look_ahead(config, plan, run_id)
                if config.output is None:
                    raise ConfigError("output", None, "must be a folder for the results")
            with OutputFolder(config.output, config.shard, config.num_shards) as folder:
                with interrupts.breakable(after=1), stdin_as_file(config, folder) as source:
                    reader = _read(source)
                    counts = SummaryBuilder()
                    work = claim(config, plan, reader, folder, counts)
                    if work.num_done == work.share.num_rows > 0:
                        return _nothing_to_do(counts, folder, work, run_id)
                recorder = Recorder(config, plan, work, folder, reader.schema, counts, interrupts, run_id)
                if config.runner == "ray":
                    from ember.runners.ray import run_on_ray

                    return run_on_ray(recorder, reader, begin)
                if config.engine == "http":
                    from ember.runners.http import HttpJob

                    remote = HttpJob(recorder, work.rows(reader))
                    return recorder.run(remote.run, load_s=time.perf_counter() - begin)
                assert isinstance(plan, EnginePlan)
                with interrupts.breakable(after=1):
                    llm = LLM.from_plan(plan)
                with closing(llm):
                    job = Job(recorder, work.rows(reader), llm)
                    return recorder.run(job.run, load_s=time.perf_counter() - begin)
        except Interrupted:
            print("interrupted before the first row", file=sys.stderr)
            return SummaryBuilder().build(
                status=JobStatus.INTERRUPTED, run_id=run_id, num_rows_total=0, duration_s=0.0, signum=interrupts.signum
            )


def _plan(config: JobConfig) -> JobPlan:
    if config.engine == "http":
        from ember.runners.remote_plan import RemotePlan

        return RemotePlan.resolve(config)
    plan = EnginePlan.resolve(config)
    try:
        plan.check_sampling(config.sampling)
        plan.structured_output().matcher(config.sampling, plan.eos_token_ids(is_chat=True))
    except ConfigError as error:
        raise error.under("sampling") from None
    _check_chat(config, plan)
    if plan.why_not_exact is not None:
        print(f"note: not exact to the bit: {plan.why_not_exact}", file=sys.stderr)
    if config.sampling.greedy and config.sampling.n > 1 and config.sampling.beam_width is None:
        print(f"note: sampling.n={config.sampling.n} with temperature 0 gives equal samples", file=sys.stderr)
    return plan


def _check_chat(config: JobConfig, plan: EnginePlan) -> None:
    """A job that asks for chat needs a template that can be read; a row that does, without one, is an error row."""
    if not (config.chat or config.messages_column is not None or config.chat_template is not None):
        return
    key, value = ("chat", True) if config.chat else ("messages_column", config.messages_column)
    if plan.chat is None:
        raise ConfigError(key, value, f"{plan.folder.name} {NO_TEMPLATE}")
    try:
        plan.chat.check()
    except UserError as error:
        if config.chat_template is not None:
            key, value = "chat_template", config.chat_template
        raise ConfigError(key, value, str(error)) from None


def _read(config: JobConfig) -> PromptReader:
    reader = PromptReader(config)
    for warning in reader.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return reader


def _own_engine(plan: JobPlan) -> EnginePlan:
    if not isinstance(plan, EnginePlan):
        raise ConfigError("plan", True, "forecasts ember's own engine only; leave out engine=http")
    return plan


def _look_ahead(config: JobConfig, plan: JobPlan, run_id: str) -> JobSummary:
    with stdin_as_file(config, None) as source:
        reader = _read(source)
        if config.plan:
            show_forecast(config, _own_engine(plan), reader)
        else:
            show_plan(config, plan, reader)
    return SummaryBuilder().build(
        status=JobStatus.FINISHED, run_id=run_id, num_rows_total=reader.num_rows, duration_s=0.0
    )


def _nothing_to_do(counts: SummaryBuilder, folder: OutputFolder, work: Work, run_id: str) -> JobSummary:
    summary = counts.build(status=JobStatus.FINISHED, run_id=run_id, num_rows_total=work.share.num_rows, duration_s=0.0)
    folder.finish_summary(summary)
    total = read_summary(folder.store, folder.summary_name).get("total") or {}
    summary.tokens_per_s = float(
        total.get("tokens_per_s") or 0.0
    )  # a search that tries a setting again learns the same
    print(
        f"nothing to do: all {work.share.num_rows:,} rows are in {folder.path} ({summary.num_errors:,} with an error)"
    )
    return summary


class Job:
    """The engine in this process: feeds rows, steps, hands finished rows to the recorder."""

    def __init__(self, recorder: Recorder, rows: Iterator[PromptRow], llm: LLM) -> None:
        self.config, self.llm, self.interrupts = recorder.config, llm, recorder.interrupts
        self._recorder, self._rows = recorder, rows
        self._input_left = True
        self._given_up = False
        self._live: dict[int, PromptRow] = {}
        self._deadline_s: float | None = None

    def run(self) -> bool:
        """Work until the rows, or the time left after a signal, run out; returns whether all rows are written."""
        while True:
            self._feed()
            if self.interrupts.signum is not None:
                self._wind_down()
            if not self.llm.engine.num_unfinished or self._out_of_time() or self._recorder.too_many_errors:
                break
            try:
                with self.interrupts.breakable(after=2):
                    outputs, step = self.llm.step()
            except Interrupted:
                break
            self._record(outputs, step)
        return not self._input_left and not self._live and not self._given_up

    def _feed(self) -> None:
        """Keep as many rows in line as may run, so that a place that falls free is taken in the next step."""
        window = self.config.max_num_seqs
        while self._input_left and self.llm.engine.num_waiting < window:
            if self.interrupts.signum is not None or self._recorder.too_many_errors:
                return
            row = next(self._rows, None)
            if row is None:
                self._input_left = False
                return
            self._live[row.row_index] = row
            done = start(self.llm, row, self.config)
            if done is not None:
                self._write(done)

    def _wind_down(self) -> None:
        """After the first signal: nothing new starts, what runs has `grace_s` to finish."""
        if self._deadline_s is None:
            self._deadline_s = time.perf_counter() + self.config.grace_s
            self._given_up = bool(self.llm.abort_waiting())
            print(
                f"stopping: {self.llm.engine.num_unfinished} running rows have {self.config.grace_s:g} s to finish "
                "(once more to stop at once)",
                file=sys.stderr,
            )

    def _out_of_time(self) -> bool:
        return self.interrupts.at_once or (self._deadline_s is not None and time.perf_counter() > self._deadline_s)

    def _record(self, outputs: list[RequestOutput], step: StepOutput) -> None:
        self._recorder.steps(self.config.shard or 0, [step.stats], step.num_sampled)
        for output in outputs:
            self._write(output)
        self._recorder.tick(step.stats)

    def _write(self, output: RequestOutput) -> None:
        row = self._live.pop(output.request_id) if output.finished else self._live[output.request_id]
        self._recorder.write(row, output)

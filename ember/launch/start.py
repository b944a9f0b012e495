"""From the words of a command line to jobs that Hydra starts. Free of torch until a job runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig

import ember
from ember.data.store import disk_is_full, os_reason
from ember.environment import environment
from ember.errors import JobError, UserError
from ember.launch.arguments import Arguments
from ember.launch.help import HELP
from ember.launch.job_file import check_flags
from ember.launch.messages import report
from ember.launch.outcome import BUG, CLEAN, TERMINATED, Outcome
from ember.launch.overrides import check_overrides
from ember.launch.places import CONFIG_DIR, shipped
from ember.launch.plugins import register
from ember.launch.settings import job_config
from ember.launch.slot import JobSlot
from ember.threads import sleep_when_idle

register()

REQUEUES = "SUBMITIT_FOLDER"
"""Set in the process of a single job that submitit runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job, or a sweep of jobs, from command-line arguments; returns the exit code."""
    try:
        arguments = Arguments.parse(sys.argv[1:] if argv is None else argv)
    except Exception as error:
        return report(error)
    if arguments.help or arguments.version:
        print(HELP if arguments.help else f"ember {ember.__version__}")
        return CLEAN
    with _for_hydra(arguments), _terminable():
        return _start(arguments)


def task(cfg: DictConfig) -> float:
    """One job; returns output tokens a second, for sweepers that optimise (NaN: none).

    It never raises, as an exception would end the whole sweep, but lets a job go that its queue takes back. The exit
    code goes into the job's folder.
    """
    slot = JobSlot.current()
    stopped = slot.stopped()
    if stopped is not None:
        outcome = Outcome(exit_code=stopped, started=False)
    else:
        slot.begin()
        outcome = _run(cfg, slot)
    slot.end(outcome)
    return outcome.tokens_per_s


def _start(arguments: Arguments) -> int:
    try:
        check_overrides(arguments.overrides)
        check_flags(arguments.files)
        hydra.main(config_path=str(shipped("conf")), config_name="config", version_base="1.3")(task)()
    except SystemExit as end:
        return _exit_code(end)
    except OSError as error:  # Hydra's: a job's own errors end in its outcome
        if isinstance(error, HydraException):
            return report(error, arguments.overrides)
        where = f"can't write {error.filename}: {os_reason(error)}" if error.filename else str(error)
        if disk_is_full(error):
            return report(JobError(where))
        return report(UserError(f"{where}; start in a folder that can be written, or set hydra.run.dir=FOLDER"))
    except (Exception, KeyboardInterrupt) as error:
        return report(error, arguments.overrides)
    return CLEAN


def _run(cfg: DictConfig, slot: JobSlot) -> Outcome:
    try:
        config = job_config(cfg, slot.overrides)
        config.output = slot.results(config.output)
        sleep_when_idle()
        from ember.job import run_job

        summary = run_job(config)
    except SystemExit as end:
        if REQUEUES in os.environ:
            raise  # the job's time is over; it is queued again and goes on in a process of its own
        return Outcome(exit_code=_exit_code(end))
    except (Exception, KeyboardInterrupt) as error:
        return Outcome(exit_code=report(error, slot.overrides))
    return Outcome(exit_code=summary.exit_code, tokens_per_s=summary.tokens_per_s, output=config.output)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return CLEAN
    return end.code if isinstance(end.code, int) else BUG


@contextmanager
def _for_hydra(arguments: Arguments) -> Iterator[None]:
    """Hydra reads sys.argv, and with this variable it hands us its errors instead of printing them."""
    changes = {"HYDRA_FULL_ERROR": "1"} | ({CONFIG_DIR: arguments.config_dir} if arguments.config_dir else {})
    argv = sys.argv
    sys.argv = [argv[0], *arguments.words]
    try:
        with environment(changes):
            yield
    finally:
        sys.argv = argv


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM between jobs ends a sweep in order; by default a launcher's processes would outlive this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

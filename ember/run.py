"""The Hydra entry point: `python -m ember.run data=prompts.jsonl block_size=16`. Free of torch until a job runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ember.launch import places
from ember.launch.arguments import Arguments
from ember.launch.help import HELP
from ember.launch.messages import report
from ember.launch.outcome import BUG, CLEAN, INTERRUPTED, Outcome, interruption
from ember.launch.plugins import register
from ember.launch.settings import job_config

register()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job, or a sweep of jobs, from command-line arguments; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = Arguments.parse(words)
        if arguments.help:
            print(HELP, end="")
            return CLEAN
        with _for_hydra(arguments):
            hydra.main(config_path=str(places.shipped("conf")), config_name="config", version_base="1.3")(task)()
    except SystemExit as end:
        return _exit_code(end)
    except (Exception, KeyboardInterrupt) as error:
        return report(error, words)
    return CLEAN


def task(cfg: DictConfig) -> float:
    """One job; returns output tokens a second, for sweepers that optimise (NaN: none).

    It never raises: an exception would end the whole sweep. The exit code goes into the job's folder.
    """
    slot = JobSlot.current()
    stopped = interruption(slot.sweep) if slot.sweep else None
    if stopped is not None:
        outcome = Outcome(exit_code=stopped, started=False)
    else:
        slot.begin()
        outcome = _run(cfg, slot)
    slot.end(outcome)
    return outcome.tokens_per_s


@dataclass(slots=True)
class JobSlot:
    """A job's place: Hydra's folder for it and, in a sweep, the sweep's folder, its number and varied overrides."""

    folder: Path
    sweep: Path | None
    number: int
    varied: list[str]

    @staticmethod
    def current() -> JobSlot:
        """The slot of the job that Hydra is running in this process."""
        config = HydraConfig.get()
        folder = Path(config.runtime.output_dir)
        if config.mode != RunMode.MULTIRUN:
            return JobSlot(folder, None, 0, [])
        fixed = config.job.config.override_dirname.exclude_keys
        return JobSlot(
            folder, Path(config.sweep.dir), config.job.num, places.varied(list(config.overrides.task), fixed)
        )

    def begin(self) -> None:
        """Announce a sweep's job, and leave a mark that stands if the process dies."""
        if self.sweep is not None:
            print(f"\njob {self.number}: {' '.join(self.varied)}".rstrip(), flush=True)
        self.end(Outcome())

    def end(self, outcome: Outcome) -> None:
        """Leave the outcome where the sweep's end finds it."""
        outcome.number, outcome.overrides = self.number, self.varied
        outcome.write(self.folder)

    def results(self, output: str | None) -> str:
        """Where the results go."""
        return places.results_folder(output, str(self.folder), places.folder_name(self.varied))


def _run(cfg: DictConfig, slot: JobSlot) -> Outcome:
    try:
        config = job_config(cfg)
        config.output = slot.results(config.output)
        from ember.job import run_job

        summary = run_job(config)
    except SystemExit as end:
        return Outcome(exit_code=_exit_code(end))
    except (Exception, KeyboardInterrupt) as error:
        return Outcome(exit_code=report(error))
    return Outcome(exit_code=summary.exit_code, tokens_per_s=summary.tokens_per_s, output=config.output)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return CLEAN
    return end.code if isinstance(end.code, int) else BUG


@contextmanager
def _for_hydra(arguments: Arguments) -> Iterator[None]:
    """Hydra reads sys.argv, and with this variable it hands us its errors instead of printing them."""
    changes = {"HYDRA_FULL_ERROR": "1"} | ({places.CONFIG_DIR: arguments.config_dir} if arguments.config_dir else {})
    argv, environment = sys.argv, {key: os.environ.get(key) for key in changes}
    sys.argv = [argv[0], *arguments.words]
    os.environ.update(changes)
    try:
        yield
    finally:
        sys.argv = argv
        for key, value in environment.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


if __name__ == "__main__":
    # Launchers pickle the task with its module's globals: as part of `ember.run` it is pickled by name instead.
    from ember import run

    sys.exit(run.main())

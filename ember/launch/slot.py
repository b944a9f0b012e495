"""The place of one job among Hydra's folders: where it says how it ended, and where its results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from ember.launch.outcome import Outcome, interruption
from ember.launch.places import folder_name, override_key, results_folder, varied
from ember.launch.settings import as_typed


@dataclass(slots=True)
class JobSlot:
    """Hydra's folder for a job; in a sweep also the sweep's folder, the job's number and what sets it apart.

    Attributes:
        overrides: everything that was set for this job on the command line or by the sweep.
        varied: those of `overrides` that differ from job to job.
    """

    folder: Path
    sweep: Path | None
    number: int
    overrides: list[str]
    varied: list[str]

    @staticmethod
    def current() -> JobSlot:
        """The slot of the job that Hydra is running in this process."""
        config = HydraConfig.get()
        folder, overrides = Path(config.runtime.output_dir), as_typed(config.overrides.task)
        if config.mode != RunMode.MULTIRUN:
            return JobSlot(folder, None, 0, overrides, [])
        fixed = list(config.job.config.override_dirname.exclude_keys)
        return JobSlot(folder, Path(config.sweep.dir).absolute(), config.job.num, overrides, varied(overrides, fixed))

    def stopped(self) -> int | None:
        """The exit code of an interrupted job of the same sweep: this one is not to start."""
        return None if self.sweep is None else interruption(self.sweep)

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
        """Where the results go; shards share a folder, so theirs is the sweep's and not each one's own."""
        if output is None and self.sweep is not None and "shard" in map(override_key, self.varied):
            output = str(self.sweep)
        return results_folder(output, str(self.folder), folder_name(self.varied))

"""How a job ended, as a small file in Hydra's folder of that job: the only thing that leaves a launcher's process."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE_NAME = ".ember_exit.json"
CLEAN, BUG, MISTAKE, ERROR_ROWS, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
WORST_FIRST = (TERMINATED, INTERRUPTED, BUG, MISTAKE, ERROR_ROWS, CLEAN)
"""An interrupted sweep is not finished, whatever else went wrong: a caller must know that first, to start it again."""
_NOTES = {FILE_NAME, ".hydra", "multirun.yaml"}
_WORDS = {
    CLEAN: "ok",
    BUG: "failed",
    MISTAKE: "mistake",
    ERROR_ROWS: "error rows",
    INTERRUPTED: "interrupted",
    TERMINATED: "terminated",
}


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One job's end.

    Attributes:
        exit_code: what a run of this job alone exits with; BUG until it has ended.
        tokens_per_s: output tokens a second; NaN when there is none.
        number: the job's number in its sweep.
        overrides: what sets it apart from the sweep's other jobs.
        output: where its results are.
        started: false for a job that an interruption kept from starting.
    """

    exit_code: int = BUG
    tokens_per_s: float = math.nan
    number: int = 0
    overrides: list[str] = field(default_factory=list)
    output: str = ""
    started: bool = True

    def write(self, folder: Path) -> None:
        """Put it in Hydra's folder of the job."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{FILE_NAME}.tmp"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(folder / FILE_NAME)

    @staticmethod
    def read(folder: Path) -> Outcome:
        """What the job in `folder` left; a job that left nothing, or nothing that can be read, has failed."""
        try:
            return Outcome(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Outcome()

    @property
    def word(self) -> str:
        """How it ended."""
        return _WORDS.get(self.exit_code, "failed") if self.started else "not started"

    def line(self) -> str:
        """The job's line in the list at the end of a sweep."""
        rate = "" if math.isnan(self.tokens_per_s) else f"{self.tokens_per_s:,.1f} tok/s"
        return (
            f"{self.number:>4}  {self.exit_code:>4}  {self.word:<11}  {rate:>14}  {' '.join(self.overrides)}".rstrip()
        )


def sweep_outcomes(sweep: Path) -> list[Outcome]:
    """The outcomes of all jobs in a sweep's folder, by number."""
    return sorted((Outcome.read(path.parent) for path in sweep.rglob(FILE_NAME)), key=lambda o: o.number)


def forget_outcomes(sweep: Path) -> None:
    """Drop what an earlier sweep left in the same folder."""
    for path in sweep.rglob(FILE_NAME):
        path.unlink()


def drop_bare(folder: Path, root: Path) -> None:
    """Remove Hydra's folder of a run or sweep, and what it leaves empty below `root`, if only notes are in it.

    The results of its jobs lie elsewhere then, or there are none. What the operating system will not let go stays.
    """
    with contextlib.suppress(OSError):
        _drop_bare(folder, root)


def _drop_bare(folder: Path, root: Path) -> None:
    files = [path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()]
    if root not in folder.parents or any(not _NOTES.intersection(path.parts) for path in files):
        return
    shutil.rmtree(folder)
    while (folder := folder.parent).is_relative_to(root):
        folder.rmdir()  # raises at the first that is not empty


def interruption(sweep: Path) -> int | None:
    """The exit code of a job of this sweep that was interrupted, if one was."""
    codes = [o.exit_code for o in sweep_outcomes(sweep)]
    return next((code for code in (TERMINATED, INTERRUPTED) if code in codes), None)


def worst(codes: Iterable[int]) -> int:
    """The exit code of a sweep; an unknown one counts as a bug."""
    known = {code if code in WORST_FIRST else BUG for code in codes}
    return next((code for code in WORST_FIRST if code in known), CLEAN)

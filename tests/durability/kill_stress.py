"""Kill a job at random instants, again and again, and count what was lost or doubled.

    python -m tests.durability.kill_stress --kills 200

Each attempt is a real process (forked, so that torch is imported only once) that runs the whole job on the embedded
model and is ended by a real SIGKILL: at a random time, or by its own hand inside the part writer (before, in the middle
of and after the write, before and after the rename). After every kill all parts that have their final names must be
whole and hold no row twice; at the end their union must equal a clean run's, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ember.config import JobConfig
from ember.data import store as folder_module
from ember.job import run_job
from ember.sampling_params import SamplingParams

KEY = ("row_index", "sample_index")
FAULTS = ("before_write", "half_written", "before_rename", "after_rename")
WORDS = ["the", "people", "of", "the", "United", "States", "and", "Congress", "in", "the", "course", "of", "the", "war"]


@dataclass
class Tally:
    """What a stress run saw."""

    kills: int = 0
    kills_in_writer: int = 0
    attempts: int = 0
    rows: int = 0
    rows_lost: int = 0
    rows_doubled: int = 0
    rows_changed: int = 0
    torn_files: int = 0
    leftovers: int = 0


def write_prompts(path: Path, num_rows: int, rng: random.Random) -> None:
    """Prompts of random length, some with several samples or the best of several; every seventh row is bad."""
    ways = ({}, {"n": 3}, {}, {"n": 2, "best_of": 3}, {})
    with path.open("w") as file:
        for i in range(num_rows):
            prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 40))) if i % 7 else ""
            file.write(json.dumps({"id": f"row-{i}", "prompt": prompt, "extra": i, "sampling": ways[i % 5]}) + "\n")


def job(data: Path, output: Path) -> JobConfig:
    """A small job with many parts: a commit every 3 rows, steps that preempt."""
    sampling = SamplingParams(temperature=0.9, max_tokens=24)
    return JobConfig(
        data=str(data), output=str(output), sampling=sampling, commit_every=3, pool_size="600tok", progress=False
    )


def attempt(config: JobConfig, prepare: Callable[[], None] | None = None) -> int:
    """Fork a process that runs the job to its end, or to its death; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if prepare is not None:
            prepare()
        code = run_job(config).exit_code
    except BaseException as error:
        print(f"attempt failed: {error!r}", file=sys.stderr)
    finally:
        os._exit(code)


def die_in_writer(fault: str, nth: int) -> Callable[[], None]:
    """Replace the steps of an atomic write by ones that SIGKILL the process on the nth part."""

    def prepare() -> None:
        count = 0
        fsync, replace = os.fsync, Path.replace

        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def dying_fsync(fd: int) -> None:
            nonlocal count
            name = os.readlink(f"/proc/self/fd/{fd}")
            if ".parquet" in name:
                count += 1
                if count == nth and fault == "before_write":
                    os.ftruncate(fd, 0)
                    die()
                if count == nth and fault == "half_written":
                    os.ftruncate(fd, os.fstat(fd).st_size // 2)
                    die()
            fsync(fd)

        def dying_replace(self: Path, target: Path) -> Path:
            if count == nth and fault == "before_rename" and ".parquet" in self.name:
                die()
            moved = replace(self, target)
            if count == nth and fault == "after_rename" and ".parquet" in self.name:
                die()
            return moved

        folder_module.os.fsync = dying_fsync
        Path.replace = dying_replace  # type: ignore[method-assign]

    return prepare


Key = tuple[int, int]
"""(row_index, sample_index)"""


def rows_of(output: Path, tally: Tally) -> dict[Key, tuple[str, list[int], str | None]]:
    """Every row in the parts that have their final names; doubled rows and torn files are counted."""
    rows: dict[Key, tuple[str, list[int], str | None]] = {}
    for part in sorted((output / "completions").glob("part-*.parquet")):
        try:
            table = pq.read_table(part, columns=[*KEY, "completion", "token_ids", "error"], partitioning=None)
        except (OSError, pa.ArrowException):
            tally.torn_files += 1
            continue
        for row in table.to_pylist():
            key = (row["row_index"], row["sample_index"])
            tally.rows_doubled += key in rows
            rows[key] = (row["completion"], row["token_ids"], row["error"])
    return rows


def compare(clean: dict, found: dict, tally: Tally) -> None:
    """Count what a killed job's rows lack or have otherwise."""
    tally.rows_lost += len(clean.keys() - found.keys())
    tally.rows_changed += sum(found[key] != row for key, row in clean.items() if key in found)


def finish(config: JobConfig) -> int:
    """Run a job to its end; returns its exit code."""
    _, status = os.waitpid(attempt(config), 0)
    return os.waitstatus_to_exitcode(status)


def stress(kills: int, seed: int, num_rows: int) -> Tally:
    """Kill jobs until `kills` have died; every job is then run to its end and compared with a clean run."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    tally = Tally()
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        write_prompts(home / "prompts.jsonl", num_rows, rng)
        begin = time.monotonic()
        assert finish(job(home / "prompts.jsonl", home / "clean")) == 3, "the clean run has error rows: exit code 3"
        length_s = time.monotonic() - begin
        clean = rows_of(home / "clean", tally)
        number = 0
        while tally.kills < kills:
            number += 1
            kill_one_job(home, number, clean, length_s, min(20, kills - tally.kills), rng, tally)
    return tally


def kill_one_job(
    home: Path, number: int, clean: dict, length_s: float, most: int, rng: random.Random, tally: Tally
) -> None:
    """One output, killed up to `most` times, then finished and compared."""
    output = home / f"out-{number}"
    config = job(home / "prompts.jsonl", output)
    for _ in range(most):
        in_writer = rng.random() < 0.4
        fault = die_in_writer(rng.choice(FAULTS), rng.randint(1, 3)) if in_writer else None
        pid = attempt(config, fault)
        tally.attempts += 1
        if not in_writer:
            time.sleep(rng.uniform(0.0, 0.6 * length_s))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            break  # it was done before the blow
        tally.kills += 1
        tally.kills_in_writer += in_writer
        rows_of(output, tally)
    assert finish(config) == 3
    tally.attempts += 1
    tally.rows += len(clean)
    compare(clean, rows_of(output, tally), tally)
    tally.leftovers += sum(1 for path in output.rglob("*.tmp-*") if path.is_file())


def main() -> None:
    """Print the tally as one line of JSON; exit code 1 if anything was lost, doubled, changed or torn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=120, help="rows of each job")
    options = parser.parse_args()
    tally = stress(options.kills, options.seed, options.rows)
    print(json.dumps(vars(tally)))
    bad = tally.rows_lost + tally.rows_doubled + tally.rows_changed + tally.torn_files + tally.leftovers
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()

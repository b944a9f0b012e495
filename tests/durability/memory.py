"""Peak memory of a job by number of rows: it must not grow with them.

    python -m tests.durability.memory --rows 10000
    python -m tests.durability.memory --rows 1000000 --fake

`--fake` replaces the network by constant logits, so that a million rows take minutes; everything else is the real job.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

from ember.config import JobConfig
from ember.core.batch import ScheduledSequence
from ember.core.model_runner import ModelRunner
from ember.job import run_job
from ember.model.network import network_config
from ember.model.presets import TINY
from ember.sampling_params import SamplingParams

VOCAB_SIZE = network_config(TINY).vocab_size


def constant_logits(self: ModelRunner, scheduled: list[ScheduledSequence]) -> torch.Tensor:
    """The same logits for every token."""
    return torch.zeros(sum(s.num_logits for s in scheduled), VOCAB_SIZE)


def write_rows(path: Path, num_rows: int) -> None:
    """Tiny rows, ids all different."""
    with path.open("w") as file:
        for i in range(num_rows):
            file.write(f'{{"id": "row-{i}", "prompt": "the people of {i % 97}", "n": {i}}}\n')


def main() -> None:
    """Print rows, seconds and peak resident memory in MiB as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--fake", action="store_true")
    options = parser.parse_args()
    if options.fake:
        ModelRunner.execute = constant_logits  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "rows.jsonl", options.rows)
        sampling = SamplingParams(max_tokens=2)
        output = str(Path(folder) / "out")
        begin = time.perf_counter()
        summary = run_job(
            JobConfig(data=f"{folder}/rows.jsonl", output=output, sampling=sampling, progress=False, commit_every=4096)
        )
        seconds = time.perf_counter() - begin
    assert summary.num_rows_done == options.rows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps({"rows": options.rows, "fake": options.fake, "seconds": round(seconds), "peak_rss_mib": round(peak)})
    )


if __name__ == "__main__":
    main()

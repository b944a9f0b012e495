"""Jobs to report on: run once, on the embedded model, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ember.config import JobConfig
from ember.job import run_job
from ember.sampling_params import SamplingParams

TEXTS = ("Call me Ishmael.", "The sea", "<script>alert('x')</script> & more \\u0007", "Of whales and men")


def make_job(folder: Path, *, rows: int = 10, max_tokens: int = 12, bad: bool = True, **settings) -> str:
    """Run a job of short rows, with two bad ones among them; returns its output."""
    lines = [
        {"prompt": f"{TEXTS[i % len(TEXTS)]} {i}", "id": f"r{i}", "n": 3 + (5 * i) % max_tokens} for i in range(rows)
    ]
    if bad:
        lines[2:2] = [{"prompt": ""}, {"prompt": "word " * 600, "id": "long"}]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    chosen = {"block_size": 4, "pool_size": "16", "max_model_len": 64, "max_num_seqs": 6} | settings
    config = JobConfig(
        data=str(data),
        output=str(folder / "out"),
        progress=False,
        prefix_cache=False,
        scheduler="prefill_first",
        sampling=SamplingParams(ignore_eos=True),
        sampling_columns={"max_tokens": "n"},
        **chosen,
    )
    run_job(config)
    return str(folder / "out")


@pytest.fixture(scope="package")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A finished job of two attempts, with preemptions and error rows."""
    folder = tmp_path_factory.mktemp("job")
    make_job(folder, limit=5)
    return make_job(folder, limit=None)

"""Everything shipped in conf/ and jobs/ composes, says what it is, and runs on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import ember.launch.start  # registers the schema
import ember.run
from ember.config import JobConfig
from ember.launch.places import shipped
from ember.launch.settings import job_config
from ember.model.presets import PRESETS
from ember.report.report import check_report
from ember.sampling_params import SamplingParams

CONF, JOBS = shipped("conf"), shipped("jobs")
JOB_NAMES = sorted(path.stem for path in JOBS.glob("*.yaml"))
SWEEPS = {"cache_sweep": 9}
"""Sweeps that are run whole, and how many jobs they have."""
STUDIES = {"paper_waste", "continuous_vs_static", "preemption_cost", "prefix_sharing", "chunked_prefill", "pool_size"}
"""Sweeps of which one job is run."""
ROWS = {"quickstart": 24, "dataset": 20}


@pytest.fixture
def composed(job_folder: Path) -> Iterator[None]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield


def build(*overrides: str, job: str = "config") -> JobConfig:
    return job_config(compose(job, overrides=list(overrides)), list(overrides))


def test_the_defaults_are_the_dataclasses_own(composed: None) -> None:
    """With the schema last in the defaults list, or the YAML repeating a value, the two drift apart."""
    assert build("data=x") == JobConfig(data="x")


@pytest.mark.parametrize("path", sorted((CONF / "model").glob("*.yaml")), ids=lambda p: p.stem)
def test_model_files_only_name_a_preset(path: Path, composed: None) -> None:
    config = build("data=x", f"model={path.stem}")
    assert config.model.name == path.stem
    assert config.model.path is None
    assert path.stem in PRESETS


def test_every_preset_has_a_file() -> None:
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} == set(PRESETS)


def test_mappings_with_any_keys(composed: None) -> None:
    """Hydra closes every mapping: what a chat template asks for could not be typed."""
    config = build("data=x", "chat_template_kwargs={enable_thinking: false, n: [1, {a: b}]}", "schema.a=int64")
    assert config.chat_template_kwargs == {"enable_thinking": False, "n": [1, {"a": "b"}]}
    assert build("data=x", "chat_template_kwargs.n=3").chat_template_kwargs == {"n": 3}
    assert config.schema == {"a": "int64"}


def test_a_path_wins_over_the_presets_name(composed: None) -> None:
    config = build("data=x", "model=gpt2", "model.path=/some/where")
    assert (config.model.name, config.model.path) == ("gpt2", "/some/where")


@pytest.mark.parametrize("path", sorted((CONF / "sampling").glob("*.yaml")), ids=lambda p: p.stem)
def test_sampling_files_compose(path: Path, composed: None) -> None:
    sampling = build("data=x", f"sampling={path.stem}").sampling
    assert type(sampling) is SamplingParams
    assert sampling.greedy == (path.stem == "greedy")


@pytest.mark.parametrize("job", JOB_NAMES)
def test_jobs_compose_in_any_folder(job: str, composed: None) -> None:
    config = build(job=job)
    check_report(False, config.report_sort)
    assert all(Path(file).is_file() for file in config.data)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda p: p.stem)
def test_jobs_open_with_what_they_show_and_how_to_run_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"ember -cn {path.stem}\n" in text.partition("defaults:")[0]


def test_job_settings_below_run_are_plain(composed: None) -> None:
    config = build("data=[a,b]", "sampling.stop=[x]", "sampling_columns={top_p: p}")
    assert not any(isinstance(getattr(config, name), DictConfig) for name in JobConfig.__dataclass_fields__)
    assert type(config.sampling.stop) is type(config.data) is list
    assert type(config.sampling_columns) is dict


@pytest.mark.slow
@pytest.mark.parametrize("job", JOB_NAMES)
def test_jobs_run_clean_on_the_embedded_model(job: str, job_folder: Path) -> None:
    """A shipped job with a row over the context, or a column that is gone, would end with 3."""
    limit = ["limit=6"] if job in {*SWEEPS, *STUDIES} else []
    limit += ["hydra.mode=RUN"] if job in STUDIES else []
    assert ember.run.main(["-cn", job, "output=out", "progress=false", "sampling.max_tokens=8", *limit]) == 0
    folders = sorted((job_folder / "out").iterdir()) if job in SWEEPS else [job_folder / "out"]
    assert len(folders) == SWEEPS.get(job, 1)
    for folder in folders:
        assert pq.read_table(folder / "completions").num_rows == (6 if limit else ROWS[job])


def test_sample_prompts_have_ids_topics_and_varied_lengths() -> None:
    rows = [json.loads(line) for line in (JOBS / "prompts" / "sample.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 24
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["topic"] and row["prompt"] for row in rows)
    lengths = sorted(row["max_tokens"] for row in rows)
    assert lengths[-1] >= 20 * lengths[0]


def test_every_prompt_file_has_its_licence_named() -> None:
    notes = (JOBS / "prompts" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.name}`" in notes for path in (JOBS / "prompts").glob("*.jsonl"))


def test_readmes_lines_are_short():
    """Prose that had grown past what an editor shows; rows of tables can't be broken."""
    lines = (JOBS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []

"""Results of ember below a folder of inputs: passed over, and said so, unless `data` names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ember.config import JobConfig
from ember.data.files import resolve_files
from ember.errors import UserError
from ember.job import run_job
from ember.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with prompts and, below it, the output of a job on them."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "in").mkdir()
    (folder / "in" / "p.jsonl").write_text('{"prompt": "Call me", "id": "a"}\n{"prompt": "The sea", "id": "b"}\n')
    run(data=str(folder / "in"), output=str(folder / "out"))
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(**settings):
    return run_job(JobConfig(sampling=SamplingParams(max_tokens=2), progress=False, **settings))


@pytest.mark.parametrize("data", [".", "*", "**/*", "**", "**/*.*", "[io]*"])
def test_a_folder_with_an_output_in_it_gives_only_the_inputs(place, data):
    """data=. read the completions and step statistics of earlier jobs as prompts."""
    files, warnings = resolve_files([data])
    assert [Path(file).as_posix().removeprefix("./") for file in files] == ["in/p.jsonl"]
    assert len(warnings) == 1
    assert "results of ember in " in warnings[0] and warnings[0].endswith("out/completions")


def test_what_a_url_lists_is_looked_at_alike(place):
    files, warnings = resolve_files([f"file://{place}"])
    assert [Path(file).name for file in files] == ["p.jsonl"]
    assert warnings[0].endswith(f"name file://{place}/out/completions")
    assert [Path(f).parent.name for f in resolve_files([f"file://{place}/*/completions/*"])[0]] == ["completions"]
    assert [Path(f).parent.name for f in resolve_files([f"file://{place}/out/completions"])[0]] == ["completions"]


@pytest.mark.parametrize("data", ["out/completions", "out/completions/*.parquet", "*/completions", "out/comp*/part*"])
def test_completions_that_are_named_are_the_input_of_the_next_job(place, data):
    if data == "out/comp*/part*":
        with pytest.raises(UserError, match=r"no file to read; results of ember .* name out/completions$"):
            resolve_files([data])
        return
    assert run(data=data, output="next", prompt_column="completion").num_rows_done == 2


def test_an_output_itself_is_no_input_and_the_remedy_is_named(place):
    with pytest.raises(UserError, match=r"^data=out: the folder holds no file to read; .* name out/completions$"):
        resolve_files(["out"])


def test_a_job_that_writes_into_its_own_input_goes_on(place):
    """The second run found parts, manifest and summaries among its prompts and was another job."""
    first = run(data="in", output="in", commit_every=1, limit=1)
    assert (first.num_rows_total, first.num_rows_done) == (1, 1)
    second = run(data="in", output="in", commit_every=1)
    assert (second.num_rows_total, second.num_rows_before, second.exit_code) == (2, 1, 0)
    (place / "in" / "p.jsonl").write_text('{"prompt": "Else"}\n')
    run(data="in", output="in", force=True)
    assert [Path(file).name for file in resolve_files(["in"])[0]] == ["p.jsonl"], "old-... is ember's too"


def test_folders_of_those_names_without_embers_manifest_are_input(place):
    """Somebody else's steps/ and manifest.json are data like any other."""
    for folder in ("web/steps", "web/completions"):
        (place / folder).mkdir(parents=True)
        (place / folder / "a.jsonl").write_text('{"prompt": "x"}\n')
    (place / "web" / "manifest.json").write_text(json.dumps({"name": "an app"}))
    assert len(resolve_files(["web"])[0]) == 3


def test_the_report_of_a_sweep_is_no_input(place):
    """jobs.parquet lies beside the sweep's jobs, in no job's output."""
    Path("report").mkdir()
    Path("report/jobs.parquet").write_bytes(b"")
    assert len(resolve_files(["."])[0]) == 2
    Path("report/report.html").write_text("<!doctype html>")
    assert [Path(file).name for file in resolve_files(["."])[0]] == ["p.jsonl"]

"""dry_run=true: what the job would do, refusals included, and not a file is touched."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig, ModelConfig
from ember.errors import UserError
from ember.job import run_job
from ember.model.presets import TINY
from ember.sampling_params import SamplingParams


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Runs a job on rows of every kind; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": "good", "prompt": "Call me"},
        {"id": "long", "prompt": "the sea " * 40},
        {"id": "too long", "prompt": "the sea " * 4000},
        {"id": "empty", "prompt": ""},
        {"id": "hot", "prompt": "a", "sampling": {"top_p": 7}},
        {"id": "sixth", "prompt": [1, 2, 3] * 10},
    ]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(**settings):
        given = {"data": "p.jsonl", "output": "out", "sampling": SamplingParams(max_tokens=2), "progress": False}
        run_job(JobConfig(**{**given, **settings}))
        return capsys.readouterr().out

    return run


def tree():
    """Every file below here with its content."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(Path().rglob("*"))}


def line(said, start):
    return next(line for line in said.splitlines() if line.startswith(start))


def test_rows_are_shown_with_what_would_become_of_them(say):
    """A prompt too long for the model looked like any other; a long one was printed whole."""
    before = tree()
    said = say(dry_run=True)
    assert tree() == before
    assert re.fullmatch(r"row 0 \(good\): [23] tokens, at most 2 more: 'Call me'", line(said, "row 0"))
    assert line(said, "row 1").endswith("... (the first 200 of 320 characters)")
    assert line(said, "row 2").startswith(
        "row 2 (too long): would be an error row: prompt_too_long: p.jsonl:3: the prompt"
    )
    assert "would be an error row: bad_row: p.jsonl:4: prompt is empty" in line(said, "row 3")
    assert "would be an error row: bad_sampling: p.jsonl:5: top_p=7" in line(said, "row 4")
    assert "row 5" not in said
    assert max(map(len, said.splitlines())) < 400


def test_the_errors_are_those_that_the_job_writes(say):
    """A dry run that judges by other rules than the job."""
    foretold = [text.partition("error row: ")[2] for text in say(dry_run=True).splitlines() if "error row: " in text]
    say()
    rows = pq.read_table("out/completions", columns=["row_index", "error"]).sort_by("row_index").to_pylist()
    assert foretold == [row["error"] for row in rows if row["error"]]
    assert len(foretold) == 3


def test_with_on_error_stop_it_says_that_the_job_would_end(say):
    assert "would end the job (on_error=stop): prompt_too_long" in line(say(dry_run=True, on_error="stop"), "row 2")


def test_it_says_what_the_output_holds(say):
    """Results of the same job looked like an empty folder."""
    assert "output  out: no row is there yet" in say(dry_run=True)
    say(limit=2)
    before = tree()
    said = say(dry_run=True)
    assert "output  out: 2 of 6 rows are there, the job would go on" in said
    assert line(said, "row 5").endswith("... (the first 20 of 30 token ids)")
    assert "row 0" not in said
    assert "force=true would move the old results aside" in say(dry_run=True, force=True)
    assert tree() == before
    say()
    assert "6 of 6 rows are there, nothing to do" in say(dry_run=True)
    assert "3 of 6 rows are there, the job would go on" in say(dry_run=True, retry_errors=True)
    assert "other: no row is there yet" in say(dry_run=True, output="other", shard=1, num_shards=2)


def test_with_verify_it_hashes_again(say):
    """A file changed under its old size and time passed the dry run and was refused by the job."""
    say(limit=1)
    data, stat = Path("p.jsonl"), os.stat("p.jsonl")
    with data.open("r+b") as file:
        file.write(data.read_bytes().replace(b"Call me", b"Call us"))
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    say(dry_run=True)
    with pytest.raises(UserError, match="holds results of another job"):
        say(dry_run=True, verify=True)


def test_it_is_refused_as_the_job_would_be(say):
    """The mistake came to light only when the real run was started."""
    say(limit=1)
    before = tree()
    said = []
    for dry_run in (True, False):
        with pytest.raises(UserError, match=r"^output=out holds results of another job \(seed: 0 -> 1\)") as caught:
            say(dry_run=dry_run, seed=1)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert tree() == before
    os.remove("out/manifest.json")
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("a: 1\n")
    for output, words in {
        "out": "no manifest",
        "p.jsonl": "is a file",
        "mine": "config.yaml that ember did not",
    }.items():
        with pytest.raises(UserError, match=words):
            say(dry_run=True, output=output)


def test_weights_that_do_not_fit_are_refused(say, tmp_path):
    """A dry run said yes to a model that the job then refused: a layer too many in config.json."""
    model = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "n_layer": config["n_layer"] + 1}))
    with pytest.raises(UserError, match=r"^model.path=.*the weights lack .*which config.json asks for"):
        say(dry_run=True, model=ModelConfig(path=str(model)))

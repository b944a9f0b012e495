"""The report of a sweep: the best job on top, numbers as in the Parquet, a check that no setting changed a token."""

from __future__ import annotations

import csv
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ember.run
from ember.entrypoints.cli import main
from ember.report.advice import advice
from ember.report.measures import BY_KEY, MEASURES, measure
from ember.report.results import JobResults
from ember.report.same_tokens import compare_tokens
from ember.report.sweep import Sweep, ordered
from ember.report.words import written
from tests.report.browser import image_widths

ROW_TOKENS = ("row_index", "token_ids")
ROWS = "\n".join(f'{{"prompt": "Of whales and men, number {i}"}}' for i in range(8))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four jobs by the command line, and their report."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "rows.jsonl").write_text(ROWS, encoding="utf-8")
    words = ["block_size=4,16", "pool_size=80tok,640tok", "max_model_len=64", "sampling.max_tokens=10"]
    words += ["sampling.ignore_eos=true", f"output={folder}/out", "progress=false"]
    assert ember.run.main(["-m", f"data={folder}/rows.jsonl", *words, f"hydra.sweep.dir={folder}/hydra"]) == 0
    assert main(["report", str(folder / "out")]) == 0
    return folder / "out"


def test_report_true_writes_one_of_each_job_and_one_of_the_sweep(job_folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("ember.report.job_report.job_pictures", lambda results, values: [])
    words = ["-m", "data=prompts.jsonl", "block_size=8,16", "sampling.max_tokens=2", "output=out", "report=true"]
    assert ember.run.main(words) == 0
    pages = [path.relative_to(job_folder).as_posix() for path in (job_folder / "out").rglob("report.html")]
    of_jobs = [f"out/block_size={size}/report/report.html" for size in (16, 8)]
    assert sorted(pages) == [*of_jobs, "out/report/report.html"]
    assert capsys.readouterr().out.count("  report       ") == 3


def test_a_report_that_fails_costs_the_job_nothing(job_folder: Path, monkeypatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr("ember.report.job_report.job_pictures", fail)
    assert ember.run.main(["data=prompts.jsonl", "sampling.max_tokens=2", "output=out", "report=true"]) == 0
    assert "there is no report (no ink); to try again: ember report out" in capsys.readouterr().err


def test_the_table_holds_what_each_jobs_parquet_holds(sweep: Path) -> None:
    """In Parquet, in CSV and on the page: the same jobs in the same order with the same numbers."""
    table = pq.read_table(sweep / "report" / "jobs.parquet").to_pylist()
    with (sweep / "report" / "jobs.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    page = unescape((sweep / "report" / "report.html").read_text(encoding="utf-8"))
    assert [row["tokens_per_s"] for row in table] == sorted((r["tokens_per_s"] for r in table), reverse=True)
    for row, line in zip(table, lines, strict=True):
        values = measure(JobResults.open(str(sweep / row["job"])))
        assert {m.key: row[m.key] for m in MEASURES} == values
        assert float(line["tokens_per_s"]) == values["tokens_per_s"]
        assert f">{written(values['tokens_per_s'], BY_KEY['tokens_per_s'].unit)}<" in page
        assert row["job"] == f"block_size={row['block_size']},pool_size={row['pool_size']}"
        assert row["pool_tokens"] == int(row["pool_size"].removesuffix("tok"))


def test_the_answer_comes_first(sweep: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("ember.report.sweep_report.sweep_pictures", lambda sweep: [])
    assert main(["report", str(sweep), "--sort", "num_preemptions", "--to", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.match(r"Best: .*pool_size=640tok, preemptions 0\b", said)
    assert "Against block_size=" in said and " costs: a pool of 640 tokens (the smallest tried: 80)" in said
    assert "All 4 jobs gave identical tokens in all 8 rows." in said
    assert main(["report", str(sweep), "--sort", "num_steps", "--to", str(tmp_path)]) == 0
    assert re.search(
        r"steps, pool_size=640tok over 80tok: 0\.\d\d with block_size=4, 0\.\d\d with block_size=16\.",
        capsys.readouterr().out,
    )


def test_pictures_over_two_keys(sweep: Path) -> None:
    names = {path.stem for path in (sweep / "report").glob("*.png")}
    assert {"sweep_tokens_per_s", "sweep_map", "sweep_waste", "sweep_num_preemptions", "sweep_trade"} <= names


@pytest.mark.browser
def test_a_browser_shows_every_picture(sweep: Path, tmp_path: Path) -> None:
    widths = image_widths(sweep / "report" / "report.html", tmp_path)
    assert len(widths) >= 5
    assert all(natural > 100 and width > 300 for natural, width in widths)


def test_the_first_row_with_other_tokens_is_named(sweep: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """One wrong token in one of the jobs must not pass as identical."""
    copy = Path(shutil.copytree(sweep, tmp_path / "copy"))
    part = next(copy.glob("block_size=16,pool_size=640tok/completions/*"))
    rows = pq.read_table(part)
    tokens = rows["token_ids"].to_pylist()
    (place,) = [i for i, row in enumerate(rows["row_index"].to_pylist()) if row == 5]
    tokens[place][3] += 1
    column = rows.schema.get_field_index("token_ids")
    pq.write_table(rows.set_column(column, "token_ids", pa.array(tokens, rows.schema.field("token_ids").type)), part)
    monkeypatch.setattr("ember.report.sweep_report.sweep_pictures", lambda sweep: [])
    (comparison,) = compare_tokens(Sweep.open(str(copy)).jobs)
    assert comparison.difference is not None
    assert (comparison.difference.row_index, comparison.difference.position) == (5, 3)
    assert main(["report", str(copy)]) == 0
    assert "Tokens differ: first in row 5, from output token 3 on" in capsys.readouterr().out


def test_jobs_with_other_results_are_not_compared(sweep: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Two temperatures give other tokens by right: no alarm, and no claim either."""
    monkeypatch.setattr("ember.report.sweep_report.sweep_pictures", lambda sweep: [])
    copy = Path(shutil.copytree(sweep, tmp_path / "copy"))
    for job in copy.glob("block_size=16*"):
        manifest = job / "manifest.json"
        text = manifest.read_text(encoding="utf-8")
        assert '"sampling.temperature": 0.0' in text
        manifest.write_text(text.replace('temperature": 0.0', 'temperature": 0.5'), encoding="utf-8")
    assert main(["report", str(copy)]) == 0
    said = capsys.readouterr().out
    assert "Jobs that differ in sampling.temperature, which may change tokens, are not compared" in said
    assert "Within each of 2 groups, 4 jobs in all, tokens are identical in all 8 rows." in said


def test_jobs_that_were_killed_before_their_first_step(sweep: Path, tmp_path: Path, capsys) -> None:
    """A sweep looked at too early has manifests and settings, but no numbers."""
    for job in sweep.glob("block_size=*"):
        (tmp_path / job.name).mkdir()
        for name in ("manifest.json", "config.yaml"):
            shutil.copy(job / name, tmp_path / job.name / name)
    assert main(["report", str(tmp_path)]) == 0
    assert "There is nothing to compare" in capsys.readouterr().out


def test_sizes_are_in_order_of_size() -> None:
    """As text, 1024tok comes before 512tok."""
    assert ordered(["4096tok", "512tok", "1GiB", "2KiB"]) == ["512tok", "2KiB", "4096tok", "1GiB"]
    assert ordered([64, 4, 16, None]) == [4, 16, 64, None]


def test_mistakes_are_one_line(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(sweep), "--sort", "speed"]) == 2
    assert "error: --sort speed: no such number; there are: tokens_per_s," in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "nor do its folders; name the output of a job or sweep" in capsys.readouterr().err


def test_a_number_that_no_report_has_is_a_mistake_before_the_job(job_folder: Path, capsys) -> None:
    """A typing error in a job file's report_sort would only show, or not, once the sweep is done."""
    assert ember.run.main(["data=prompts.jsonl", "output=out", "report_sort=speed"]) == 2
    assert "error: report_sort=speed: no such number; there are: tokens_per_s," in capsys.readouterr().err


def test_report_without_matplotlib_is_a_mistake_before_the_job(job_folder: Path, monkeypatch, capsys) -> None:
    """Not after hours of work."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert ember.run.main(["data=prompts.jsonl", "output=out", "report=true"]) == 2
    assert "pip install 'ember-batch[report]'" in capsys.readouterr().err
    assert not (job_folder / "out" / "completions").exists()


def test_jobs_that_failed_are_counted_and_named(job_folder: Path, monkeypatch, capsys) -> None:
    """A job that never began leaves no folder: page and terminal spoke of 1 job where 3 had been started."""
    monkeypatch.setattr("ember.report.job_report.job_pictures", lambda results, values: [])
    monkeypatch.setattr("ember.report.sweep_report.sweep_pictures", lambda sweep: [])
    words = ["-m", "data=prompts.jsonl", "sampling.max_tokens=2", "output=out", "report=true"]
    assert ember.run.main([*words, "pool_size=40,5,bogus"]) == 2
    capsys.readouterr()
    assert main(["report", "out"]) == 0
    said = "2 of 3 jobs left no results: pool_size=5 (mistake), pool_size=bogus (mistake)."
    assert said in capsys.readouterr().out
    page = unescape((job_folder / "out/report/report.html").read_text(encoding="utf-8"))
    assert said in page and "1 of 3 jobs, sorted by" in page
    assert ember.run.main([*words, "pool_size=40,48"]) == 0
    assert "left no results" not in unescape((job_folder / "out/report/report.html").read_text(encoding="utf-8"))


def test_folders_without_results_and_unfinished_jobs_are_said(sweep: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("ember.report.sweep_report.sweep_pictures", lambda sweep: [])
    copy = Path(shutil.copytree(sweep, tmp_path / "copy"))
    (copy / "sampling.temperature=0.5").mkdir()
    summary = copy / "block_size=4,pool_size=80tok" / "summary.json"
    text = summary.read_text(encoding="utf-8")
    summary.write_text(text.replace('"status": "finished"', '"status": "interrupted"'), encoding="utf-8")
    assert main(["report", str(copy)]) == 0
    said = capsys.readouterr().out
    assert "1 of 5 jobs left no results: sampling.temperature=0.5 (no results)." in said
    assert "1 of the 4 jobs in the table did not finish: block_size=4,pool_size=80tok (interrupted)." in said


def test_no_winner_by_the_clock_without_a_caution(sweep: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """A factor of 1.3 between jobs of a tenth of a second, with equal steps and tokens, was given as the answer."""
    monkeypatch.setattr("ember.report.sweep_report.sweep_pictures", lambda sweep: [])
    assert main(["report", str(sweep), "--to", str(tmp_path)]) == 0
    assert "Caution: 4 of 4 jobs worked less than 5 s, the shortest " in capsys.readouterr().out
    assert main(["report", str(sweep), "--sort", "num_steps", "--to", str(tmp_path)]) == 0
    assert "Caution" not in capsys.readouterr().out
    opened = Sweep.open(str(sweep))
    first, second = (job for job in opened.jobs if job.settings["pool_size"] == "640tok")
    first.values.update(tokens_per_s=200.0, duration_s=60.0)
    second.values.update(first.values, tokens_per_s=100.0)
    said = list(advice(replace(opened, jobs=[first, second])))
    assert [text.split(":")[0] for text in said if "Caution" in text] == ["Caution"]
    assert any("best and last took the same " in text for text in said)


def test_groups_that_may_differ_are_counted(sweep: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Jobs of two kv_dtype are no error if they differ, but a reader wants to know in how many rows."""
    monkeypatch.setattr("ember.report.sweep_report.sweep_pictures", lambda sweep: [])
    copy = Path(shutil.copytree(sweep, tmp_path / "copy"))
    for job in copy.glob("block_size=16*"):
        manifest = job / "manifest.json"
        text = manifest.read_text(encoding="utf-8")
        manifest.write_text(text.replace('temperature": 0.0', 'temperature": 0.5'), encoding="utf-8")
        (part,) = (job / "completions").iterdir()
        rows = pq.read_table(part)
        tokens = [t[:-1] if r in (3, 6) else t for r, t in zip(*(rows[n].to_pylist() for n in ROW_TOKENS), strict=True)]
        column = rows.schema.get_field_index("token_ids")
        pq.write_table(
            rows.set_column(column, "token_ids", pa.array(tokens, rows.schema.field("token_ids").type)), part
        )
    assert main(["report", str(copy)]) == 0
    assert ": others in 2 of 8 rows, the first row 3, in block_size=" in capsys.readouterr().out


def test_tokens_per_second_are_named_by_what_they_count(sweep: Path) -> None:
    """The table in the terminal counts a job's whole time, the page its steps: one name for both misled."""
    page = unescape((sweep / "report" / "report.html").read_text(encoding="utf-8"))
    assert ">tokens/s at work<" in page and "the `speed` that a job prints is lower" in page


def test_inspecting_a_sweep_points_to_report(sweep: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(sweep)]) == 2
    assert f"holds 4 jobs, not one; to compare them: ember report {sweep}; " in capsys.readouterr().err

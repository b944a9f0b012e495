"""The report of a job: its numbers are those of the Parquet, and a browser shows all of its pictures."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ember.entrypoints.cli import main
from ember.report.columns import Columns
from ember.report.measures import MEASURES, measure
from ember.report.results import JobResults
from ember.report.timeline import Timeline
from ember.report.words import written
from tests.report.browser import image_widths
from tests.report.conftest import make_job

PICTURES = {
    *("throughput", "sequences", "tokens_a_step", "blocks", "kv_utilization", "preemptions", "step_time"),
    *("lengths", "times", "times_cumulative"),
}


@pytest.fixture(scope="module")
def page(job: str) -> Path:
    assert main(["report", job]) == 0
    return Path(job) / "report" / "report.html"


def duck(output: str) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for view, folder in (("rows", "completions"), ("steps", "steps")):
        connection.execute(
            f"create view {view} as from read_parquet('{output}/{folder}/*.parquet', union_by_name=true)"
        )
    return connection


def facts(page: Path) -> dict[str, str]:
    found = re.findall(r'<th scope="row">(.*?)</th><td class="number">(.*?)</td>', page.read_text(encoding="utf-8"))
    return {unescape(name): unescape(value) for name, value in found}


@pytest.mark.parametrize("measured", MEASURES, ids=lambda m: m.key)
def test_each_number_is_what_duckdb_gets_from_the_parquet(measured, job: str, page: Path) -> None:
    """The page prints SQL beside each number: a reader who runs it must see the same."""
    (value,) = duck(job).execute(measured.sql).fetchone()
    assert measure(JobResults.open(job))[measured.key] == pytest.approx(value, rel=1e-9)
    assert facts(page)[measured.label] == written(float(value), measured.unit)


def test_the_job_under_test_has_something_to_show(job: str) -> None:
    """Without preemptions, errors and a second attempt the tests here would hold for an empty page."""
    values = measure(JobResults.open(job))
    assert values["num_preemptions"] and values["num_recomputed_tokens"]
    assert values["num_errors"] == 2
    assert len(duck(job).execute("select distinct run_id from steps").fetchall()) == 2


def test_every_picture_is_a_png_and_on_the_page(job: str, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    drawn = {path.stem for path in page.parent.glob("*.png")}
    assert drawn >= PICTURES
    assert set(re.findall(r'<figure id="(\w+)"', text)) == drawn
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in page.parent.glob("*.png"))


def test_the_page_needs_nothing_from_elsewhere(page: Path) -> None:
    """Self-contained: no script, no link to a file or host."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"<script|<link|(?:src|href)=\"(?!data:)", text)
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", text).replace("http-equiv", "")


def test_rows_cannot_inject_markup(page: Path) -> None:
    assert "&lt;script&gt;" in page.read_text(encoding="utf-8")


def test_errors_completions_and_settings_are_shown(page: Path) -> None:
    text = unescape(page.read_text(encoding="utf-8"))
    assert "1 bad_row" in text and "1 prompt_too_long" in text and "long" in text
    assert "Of whales and men" in text
    assert "pool_size" in text and "sampling.temperature" in text


def test_a_column_that_nobody_knew_gets_a_picture_also_elsewhere(job: str, tmp_path: Path) -> None:
    """What an engine counts must show up without a change here; and an output need not be writable."""
    output = Path(shutil.copytree(job, tmp_path / "out", ignore=shutil.ignore_patterns("report")))
    for part in (output / "steps").iterdir():
        steps = pq.read_table(part)
        pq.write_table(steps.append_column("num_evictions", pa.array(range(len(steps)), pa.int64())), part)
    assert main(["report", str(output), "--to", str(tmp_path / "r")]) == 0
    assert (tmp_path / "r" / "report.html").is_file()
    assert {path.stem for path in (tmp_path / "r").glob("*.png")} >= PICTURES | {"num_evictions"}
    assert not (output / "report").exists()


def test_bins_keep_every_token(job: str) -> None:
    """A step that spans several bins must not be counted in one of them, nor twice."""
    results = JobResults.open(job)
    steps = Columns(results.steps)
    time = Timeline.of(steps, results.summary)
    width = time.edges[1] - time.edges[0]
    assert time.rate("num_decode_tokens").sum() * width == pytest.approx(steps.sum("num_decode_tokens"))


def test_shards_that_ran_at_once_lie_at_the_same_time() -> None:
    """Two shards of one second each are a second of work, of two seconds apart with a pause two."""
    names = ("run_id", "engine", "start_s", "duration_s", "num_running")
    rows = [(run, engine, 0.1 * i, 0.1, 4) for engine, run in enumerate("ab") for i in range(10)]
    steps = Columns(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))))

    def timeline(second: str) -> Timeline:
        began = {"a": "2026-01-01T00:00:00+00:00", "b": second}
        return Timeline.of(steps, {"attempts": [{"run_id": r, "started_at": t} for r, t in began.items()]})

    together, apart = timeline("2026-01-01T00:00:00+00:00"), timeline("2026-01-01T00:10:00+00:00")
    assert (together.edges[-1], apart.edges[-1]) == pytest.approx((1.0, 2.0))
    assert together.means("num_running").tolist() == pytest.approx([8.0] * len(together.middles))
    assert apart.means("num_running").tolist() == pytest.approx([4.0] * len(apart.middles))
    assert (together.starts, apart.starts) == ([], pytest.approx([1.0]))


def test_an_output_without_rows_has_a_report(job: str, tmp_path: Path) -> None:
    """A job that was killed before its first part."""
    for name in ("manifest.json", "config.yaml"):
        shutil.copy(Path(job) / name, tmp_path / name)
    assert main(["report", str(tmp_path)]) == 0
    assert main(["inspect", str(tmp_path)]) == 0


@pytest.mark.parametrize("form", ["jsonl", "openai_batch"])
def test_completions_in_any_format_have_the_same_numbers(form, job: str, tmp_path: Path, capsys) -> None:
    """Only Parquet was read column by column."""
    output = make_job(tmp_path, output_format=form)
    counts = [m.key for m in MEASURES if m.key.startswith("num_") and m.key not in ("num_steps", "num_preemptions")]
    one, other = measure(JobResults.open(job)), measure(JobResults.open(output))
    assert {key: one[key] for key in counts[:4]} == {key: other[key] for key in counts[:4]}
    texts = [[row["completion"] for row in JobResults.open(place).samples(10)] for place in (job, output)]
    assert texts[0] == texts[1]
    assert main(["inspect", output]) == 0
    assert "1 bad_row" in capsys.readouterr().out


def test_inspect_shows_counts_errors_completions_settings_and_files(job: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", job, "--samples", "2"]) == 0
    said = capsys.readouterr().out
    for words in ("12; 12 expected, 0 missing", "1 bad_row", "row 0 (r0)", "block_size", "completions/", "steps/"):
        assert words in said
    assert said.isascii() or "\x07" not in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["report"], "error: report: the following arguments are required: OUTPUT (see ember report --help)\n"),
        (
            ["report", "nowhere"],
            "error: nowhere holds no manifest.json, nor do its folders; name the output of a job or sweep\n",
        ),
        (["inspect", "nowhere"], "error: nowhere holds no manifest.json; name the output of a job\n"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(words, line, job_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == line


def test_without_matplotlib_the_error_names_the_extra(job: str, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["report", job]) == 2
    assert "pip install 'ember-batch[report]'" in capsys.readouterr().err


@pytest.mark.browser
def test_a_browser_shows_every_picture(page: Path, tmp_path: Path) -> None:
    """An image that does not decode is an empty frame, which no test of the markup sees."""
    widths = image_widths(page, tmp_path)
    assert len(widths) == len(list(page.parent.glob("*.png")))
    assert all(natural > 100 and width > 300 for natural, width in widths)


def test_a_job_without_steps_has_its_speed_from_the_summary(job: str, tmp_path: Path, capsys) -> None:
    """An engine elsewhere leaves none: `0 s: – tokens/s` and a cache of which nothing is known."""
    output = Path(shutil.copytree(job, tmp_path / "out", ignore=shutil.ignore_patterns("report", "steps")))
    speed = json.loads((output / "summary.json").read_text(encoding="utf-8"))["total"]["tokens_per_s"]
    assert main(["inspect", str(output)]) == 0
    assert main(["report", str(output)]) == 0
    said = capsys.readouterr().out
    page = unescape((output / "report" / "report.html").read_text(encoding="utf-8"))
    for text in (said, page):
        assert f"{speed:,.1f} tokens/s." in " ".join(text.split())
        assert not [words for words in ("prefix hits", "pool used", "preemptions", "at work") if words in text]
    assert "latency, median" in said

"""Completions in another spelling: nothing is lost, and a job goes on from them."""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig
from ember.data.formats import part_format
from ember.data.json_values import from_json_values, to_json_values
from ember.data.store import LocalStore
from ember.data.writer import PartWriter, completions_schema
from ember.errors import ConfigError, UserError
from ember.job import run_job
from ember.sampling_params import SamplingParams

LINES = ("jsonl", "openai_batch")
TIMES = ("queue_s", "ttft_s", "latency_s")
VALUES = [
    (pa.int64(), [2**63 - 1, -(2**63), None]),
    (pa.uint64(), [2**64 - 1, 2**53 + 1]),
    (pa.float64(), [0.1, 5e-324, -0.0, 1.7976931348623157e308, math.inf, -math.inf, None]),
    (pa.float32(), [0.1, 3.4028234663852886e38]),
    (pa.string(), ['é\n\u2028\x00"\\', "", None]),
    (pa.large_string(), ["a"]),
    (pa.bool_(), [True, False, None]),
    (pa.null(), [None]),
    (pa.binary(), [b"\x00\xff", b"", None]),
    (pa.binary(2), [b"ab"]),
    (pa.timestamp("ns"), [-1, 1_700_000_000_123_456_789, None]),
    (pa.timestamp("us", "Europe/Paris"), [1_700_000_000_123_456]),
    (pa.timestamp("s"), [-1, 2**60]),
    (pa.time64("ns"), [86_399_999_999_999]),
    (pa.time32("s"), [3661]),
    (pa.date32(), [-1, 20_000, 2**31 - 1]),
    (pa.date64(), [86_400_000]),
    (pa.duration("ms"), [5, -5]),
    (pa.decimal128(20, 3), [decimal.Decimal("1.230"), None]),
    (pa.list_(pa.timestamp("ns")), [[1], None, [], [None]]),
    (pa.list_(pa.int8(), 2), [[1, 2], None, [3, None]]),
    (pa.large_list(pa.string()), [["a"], None]),
    (
        pa.struct([("a", pa.binary()), ("b", pa.list_(pa.int64()))]),
        [{"a": b"x", "b": [1]}, None, {"a": None, "b": None}],
    ),
    (pa.map_(pa.string(), pa.float64()), [[("k", 0.5)], None, []]),
]


@pytest.mark.parametrize(("arrow", "values"), VALUES, ids=[str(arrow) for arrow, _ in VALUES])
def test_every_type_comes_back_exactly(arrow, values):
    """Nanoseconds cut to microseconds, large whole numbers through a double, null as 0, bytes as broken text."""
    array = pa.array(values, type=arrow)
    for some in (array, pa.concat_arrays([array, array]).slice(1)):
        text = json.dumps(to_json_values(some), allow_nan=False)
        assert from_json_values(json.loads(text), arrow).equals(some), text


def test_not_a_number_is_valid_json():
    """A bare NaN is no JSON: jq, DuckDB and JavaScript refuse the whole line."""
    values = to_json_values(pa.array([math.nan, math.inf], pa.float64()))
    assert values == ["NaN", "Infinity"]
    back = from_json_values(values, pa.float64()).to_pylist()
    assert math.isnan(back[0]) and back[1] == math.inf


def test_times_are_iso_8601():
    """Times in a spelling that only Arrow reads; a time zone lost."""
    when = datetime.datetime(2024, 2, 29, 12, 30, 1, 500_000)
    naive, zoned = pa.array([when], pa.timestamp("us")), pa.array([when], pa.timestamp("ms", "UTC"))
    assert to_json_values(naive) == ["2024-02-29T12:30:01.500000"]
    assert to_json_values(zoned) == ["2024-02-29T12:30:01.500Z"]
    assert to_json_values(pa.array([when.date()])) == ["2024-02-29"]


SCHEMA = completions_schema(pa.schema([("raw", pa.binary()), ("nested", pa.struct([("a", pa.list_(pa.int64()))]))]))
GOOD = {
    **{"row_index": 2**40, "id": "a", "sample_index": 0, "num_samples": 1, "prompt": "é\n", "completion": "漢 \u2028"},
    **{
        "error": None,
        "prompt_token_ids": [1, 2],
        "token_ids": [],
        "finish_reason": "length",
        "stop_reason": None,
        "seed": 2**63 - 1,
    },
    **{"num_prompt_tokens": 2, "num_output_tokens": 3, "num_cached_tokens": 0, "num_preemptions": 3, "queue_s": 0.1},
    **{"cumulative_logprob": -0.1, "prompt_logprobs": None},
    "logprobs": [[{"token_id": 7, "token": "漢", "logprob": -0.5, "rank": 2}]],
    **{"ttft_s": None, "latency_s": 1e-9, "raw": b"\x00\xff", "nested": {"a": [2**60, None]}},
}
LOGPROBS = {"tokens": ["漢"], "token_logprobs": [-0.5], "top_logprobs": [{"漢": -0.5}], "text_offset": [0]}
BAD = {
    **dict.fromkeys(GOOD),
    **{"row_index": 0, "sample_index": 0, "num_samples": 1, "completion": "", "prompt_token_ids": [], "token_ids": []},
    **{"finish_reason": "error", "error": "bad_row: in.jsonl:1: a: b", "num_prompt_tokens": 0, "num_output_tokens": 0},
}


def write(folder, form):
    with PartWriter(LocalStore(folder), SCHEMA, form=form, commit_every=9, commit_every_s=9) as writer:
        for row in (GOOD, BAD):
            writer.write(dict(row))
    return folder / f"part-00000{form.suffix}"


@pytest.mark.parametrize("name", ["parquet", *LINES])
def test_a_part_gives_back_its_rows_and_keys(tmp_path, name):
    """A resume or an export from a spelling that lost something."""
    form = part_format(name)
    data = write(tmp_path, form).read_bytes()
    rows = [row for table in form.read(io.BytesIO(data), SCHEMA) for row in table.to_pylist()]
    assert rows == [GOOD, BAD]
    keys = form.read_keys(io.BytesIO(data)).to_pylist()
    assert keys == [{key: row[key] for key in keys[0]} for row in (GOOD, BAD)]


def test_a_line_has_the_same_fields_as_parquet(tmp_path):
    """Fields left out when null, reordered, or nested values as text in text."""
    good, bad = map(json.loads, write(tmp_path, part_format("jsonl")).read_text().rstrip("\n").split("\n"))
    assert list(good) == list(bad) == SCHEMA.names
    assert good["nested"] == {"a": [2**60, None]}
    assert base64.b64decode(good["raw"]) == b"\x00\xff"
    assert (good["seed"], good["latency_s"], good["ttft_s"]) == (2**63 - 1, 1e-9, None)


def test_a_batch_line_is_openais(tmp_path):
    """A client of OpenAI's batch API that misses a field, or gets another type."""
    form = part_format("openai_batch", model="tiny", created=1_700_000_000)
    good, bad = map(json.loads, write(tmp_path, form).read_text().rstrip("\n").split("\n"))
    assert [record["row_index"] for record in good.pop("ember")] == [2**40]
    assert good == {
        "id": f"batch_req_{2**40}_0",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{2**40}_0",
            "body": {
                "id": f"cmpl-{2**40}_0",
                "object": "text_completion",
                "created": 1_700_000_000,
                "model": "tiny",
                "choices": [{"index": 0, "text": "漢 \u2028", "finish_reason": "length", "logprobs": LOGPROBS}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
            },
        },
        "error": None,
    }
    assert (bad["custom_id"], bad["response"]) == ("0", None)
    assert bad["error"] == {"code": "bad_row", "message": "in.jsonl:1: a: b"}


def test_an_unknown_format_is_refused():
    """A manifest of a newer version, or a typing error, as a KeyError."""
    with pytest.raises(ConfigError, match="output_format=csv: must be one of parquet, jsonl, openai_batch"):
        JobConfig(data="x", output_format="csv")
    with pytest.raises(UserError, match="output_format=xml"):
        part_format("xml")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"r{i}", "prompt": "The sea" if i != 2 else "", "n": 2**53 + i} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def job(prompts, output, **settings):
    defaults = {"sampling": SamplingParams(max_tokens=3, temperature=0.9), "progress": False, "commit_every": 2}
    return JobConfig(data=str(prompts), output=str(output), **{**defaults, **settings})


def rows_of(output, form):
    """Rows by row_index without what differs from attempt to attempt."""
    spelled, rows = part_format(form), {}
    for part in sorted((output / "completions").iterdir()):
        schema = pq.read_schema(part) if form == "parquet" else None
        for line in part.read_bytes().splitlines() if schema is None else []:
            (record,) = spelled.records(json.loads(line))
            rows[record["row_index"]] = {k: v for k, v in record.items() if k not in TIMES}
        for table in spelled.read(part.open("rb"), schema) if schema else []:
            rows |= {r["row_index"]: {k: v for k, v in r.items() if k not in TIMES} for r in table.to_pylist()}
    return rows


@pytest.mark.parametrize("form", LINES)
def test_a_job_resumes_from_lines_to_the_same_rows(prompts, tmp_path, form, capsys):
    """Rows computed twice because the keys in JSON lines are not found; other tokens than in Parquet."""
    assert run_job(job(prompts, tmp_path / "parquet")).exit_code == 3
    expected = rows_of(tmp_path / "parquet", "parquet")
    assert run_job(job(prompts, tmp_path / form, output_format=form, limit=4)).num_rows_done == 4
    resumed = run_job(job(prompts, tmp_path / form, output_format=form))
    assert (resumed.num_rows_before, resumed.num_rows_done, resumed.num_errors) == (4, 6, 1)
    assert rows_of(tmp_path / form, form) == expected
    assert sorted(p.suffix for p in (tmp_path / form / "steps").iterdir())[0] == ".parquet"
    retried = run_job(job(prompts, tmp_path / form, output_format=form, retry_errors=True))
    assert (retried.num_rows_before, retried.num_rows_done) == (5, 6)
    assert rows_of(tmp_path / form, form) == expected
    with pytest.raises(UserError, match=f'output_format: "{form}" -> "parquet"'):
        run_job(job(prompts, tmp_path / form))
    assert run_job(job(prompts, tmp_path / form, output_format=form)).num_rows_before == 6
    assert "nothing to do" in capsys.readouterr().out


def test_a_lower_limit_counts_only_its_rows(prompts, tmp_path):
    """`6 of 3 rows done` after a resume with a lower limit."""
    run_job(job(prompts, tmp_path / "out"))
    done = run_job(job(prompts, tmp_path / "out", limit=3))
    assert (done.num_rows_done, done.num_rows_total, done.num_errors) == (3, 3, 1)

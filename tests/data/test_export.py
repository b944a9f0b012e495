"""One file from an output: every row once, in order, the same values in every spelling, or one clear line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ember.data.export import CompletionParts, export
from ember.data.formats import part_format
from ember.data.manifest import Manifest, encoded_schema
from ember.data.store import LocalStore
from ember.data.writer import PartWriter, completions_schema
from ember.entrypoints.cli import main
from ember.errors import UserError

SCHEMA = completions_schema(pa.schema([("when", pa.timestamp("ns")), ("tags", pa.list_(pa.string()))]))
ROOT = Path(__file__).resolve().parents[2]


def row(i):
    return {
        **dict.fromkeys(SCHEMA.names),
        **{
            "row_index": i,
            "id": f"id{i}",
            "sample_index": 0,
            "num_samples": 1,
            "prompt": 'a "b",\nc',
            "completion": f"c{i}",
        },
        **{"prompt_token_ids": [1], "token_ids": [i, 2], "finish_reason": "stop", "seed": 2**63 - 1 - i},
        **{"num_prompt_tokens": 1, "num_output_tokens": 2, "latency_s": 0.1, "tags": [], "when": None if i else 1},
    }


def output(folder, parts, *, form="parquet", num_rows=None, limit=None):
    """An output whose parts hold the rows of these numbers; a part's key is its shard, or None."""
    num_rows = sum(len(rows) for _, rows in parts) if num_rows is None else num_rows
    folder.mkdir()
    (folder / "completions").mkdir()
    facts = {"schema": encoded_schema(SCHEMA), "num_input_rows": num_rows, "model": "tiny"}
    Manifest({"output_format": form}, facts).create(LocalStore(folder))
    (folder / "config.yaml").write_text(f"limit: {json.dumps(limit)}\n")
    for shard, indices in parts:
        prefix = "part-" if shard is None else f"part-s00{shard}of002-"
        store = LocalStore(folder / "completions")
        with PartWriter(
            store, SCHEMA, form=part_format(form), commit_every=999, commit_every_s=999, prefix=prefix
        ) as writer:
            for i in indices:
                writer.write(row(i))
    return folder


SCATTERED = [(None, [3, 0, 1, 9]), (None, [2, 5, 4]), (None, [7, 8, 6])]
SHARDS = [(1, [3, 1]), (0, [2, 0]), (1, [5, 9, 7]), (0, [8, 6, 4])]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "openai_batch"])
@pytest.mark.parametrize("parts", [SCATTERED, SHARDS], ids=["one job", "shards"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_every_row_once_in_input_order(tmp_path, form, parts, ending):
    """Rows in the order in which they finished, or shard after shard; a value changed by a change of spelling."""
    out, to = output(tmp_path / "out", parts, form=form), tmp_path / f"all.{ending}"
    assert export(str(out), str(to)).num_rows == 10
    if ending == "parquet":
        table = pq.read_table(to).cast(SCHEMA)
    else:
        table = pa.concat_tables(part_format("jsonl").read(to.open("rb"), SCHEMA))
    assert table.equals(pa.Table.from_pylist([row(i) for i in range(10)], schema=SCHEMA))


@pytest.mark.parametrize("range_rows", [1, 2, 3, 4, 9, 10, 100])
def test_memory_holds_one_range_at_a_time(tmp_path, range_rows):
    """All rows of a job of a hundred million in memory; rows lost or doubled where two ranges meet."""
    store = LocalStore(output(tmp_path / "out", SCATTERED))
    tables = list(CompletionParts(store, Manifest.load(store), range_rows).in_order())
    assert max(map(len, tables)) <= range_rows
    assert [i for table in tables for i in table["row_index"].to_pylist()] == list(range(10))


def test_only_the_parts_of_a_range_are_read(tmp_path, monkeypatch):
    """Every part read again for every range: hours for a large output."""
    store = LocalStore(output(tmp_path / "out", [(None, [2 * i, 2 * i + 1]) for i in range(8)]))
    parts = CompletionParts(store, Manifest.load(store), range_rows=4)
    opened = []
    real = LocalStore.open
    monkeypatch.setattr(LocalStore, "open", lambda self, name: (opened.append(name), real(self, name))[1])
    assert len(list(parts.in_order())) == 4
    assert sorted(opened) == sorted(set(opened)) and len(opened) == 8


def test_as_written_keeps_the_order_of_the_parts(tmp_path):
    """--order that does nothing."""
    out, to = output(tmp_path / "out", SCATTERED), tmp_path / "all.jsonl"
    export(str(out), str(to), order="as_written")
    assert [json.loads(line)["row_index"] for line in to.open()] == [3, 0, 1, 9, 2, 5, 4, 7, 8, 6]


def test_csv_keeps_texts_apart_from_numbers_and_nulls(tmp_path):
    """A line break or a quote in a prompt that breaks the table; lists as Python text."""
    out, to = output(tmp_path / "out", [(None, [0])]), tmp_path / "all.csv"
    export(str(out), str(to))
    (read,) = csv.DictReader(to.open(newline="", encoding="utf-8"))
    assert (read["prompt"], read["token_ids"], read["seed"]) == ('a "b",\nc', "[0, 2]", str(2**63 - 1))
    assert (read["when"], read["error"], read["tags"]) == ("1970-01-01T00:00:00.000000001", "", "[]")


def test_openai_batch_is_asked_for_by_name(tmp_path):
    """`--format` ignored in favour of the ending."""
    out, to = output(tmp_path / "out", SCATTERED), tmp_path / "all.jsonl"
    export(str(out), str(to), form="openai_batch")
    first = json.loads(to.open().readline())
    assert (first["custom_id"], first["response"]["body"]["model"]) == ("id0", "tiny")


def test_an_output_without_rows_is_an_empty_table(tmp_path):
    """An empty input: no file, or a Parquet file without columns."""
    out, to = output(tmp_path / "out", []), tmp_path / "all.parquet"
    assert export(str(out), str(to)).num_rows == 0
    assert pq.read_table(to).schema.names == SCHEMA.names


def test_missing_rows_are_counted_and_allowed_only_on_request(tmp_path):
    """Half a data set taken for a whole one; a limit, or rows of a higher limit before, counted as missing."""
    out, to = output(tmp_path / "out", SCATTERED, num_rows=13), tmp_path / "all.jsonl"
    with pytest.raises(UserError, match=r"is incomplete: 3 of 13 rows are missing; .*--partial"):
        export(str(out), str(to))
    assert not to.exists()
    done = export(str(out), str(to), partial=True)
    assert (done.num_rows, done.num_missing, len(to.read_text().splitlines())) == (10, 3, 10)
    limited = output(tmp_path / "limited", SCATTERED, num_rows=13, limit=9)
    assert export(str(limited), str(to), force=True).num_rows == 10


def test_a_file_that_is_there_is_kept(tmp_path):
    """An export over somebody's file; with --force, half a file after a failure."""
    out, to = output(tmp_path / "out", SCATTERED), tmp_path / "all.jsonl"
    to.write_text("mine")
    with pytest.raises(UserError, match=r"exists already.*--force"):
        export(str(out), str(to))
    part = next(iter((out / "completions").iterdir()))
    whole = part.read_bytes()
    keys_only = pq.read_table(part).select(["row_index", "finish_reason", "error", "id"])
    pq.write_table(keys_only, part)
    with pytest.raises(UserError, match="can't be read"):
        export(str(out), str(to), force=True)
    assert to.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2
    part.write_bytes(whole)
    export(str(out), str(to), force=True)
    assert len(to.read_text().splitlines()) == 10


MISTAKES = {
    ("export",): "export: the following arguments are required: OUTPUT, --to",
    ("export", "nowhere", "--to", "x.jsonl"): "nowhere holds no manifest.json",
    ("export", "out", "--to", "x.txt"): "--to x.txt: the ending .txt names no format",
    ("export", "out", "--to", "s3://b/x.jsonl"): "--to s3://b/x.jsonl: must be a local file",
    ("export", "out", "--to", "none/x.jsonl"): "--to none/x.jsonl: there is no folder none; make it first",
    ("export", "out", "--to", "."): "--to .: is a folder",
    ("export", "out", "--to", "x.csv", "--order", "random"): "export: argument --order: invalid choice",
}


@pytest.mark.parametrize(("words", "line"), MISTAKES.items(), ids=[" ".join(words) for words in MISTAKES])
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, words, line):
    """argparse prints its usage, and pathlib a traceback."""
    output(tmp_path / "out", SCATTERED)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}")
    assert said.count("\n") == 1


def test_the_verb_needs_no_torch(tmp_path):
    """An export that waits seconds for torch, or asks for it on a machine that has none."""
    output(tmp_path / "out", SCATTERED)
    code = (
        "import sys; sys.modules['torch'] = None; from ember.entrypoints.cli import main; "
        "sys.exit(main(['export', 'out', '--to', 'all.csv']))"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10 rows in all.csv\n", "")

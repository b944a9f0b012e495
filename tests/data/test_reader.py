"""The input side of a job, from real files to PromptRows."""

from __future__ import annotations

import decimal
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ember.config import JobConfig
from ember.data.columns import FIXED_COLUMNS, output_names
from ember.data.reader import PromptReader, PromptRow
from ember.data.store import LocalStore
from ember.data.writer import PartWriter, completions_schema
from ember.errors import UserError


def jsonl(path, *rows):
    """Write rows (objects, or raw bytes for a line as it is) and return the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def parquet(path, table, **options):
    table = table if isinstance(table, pa.Table) else pa.table(table)
    pq.write_table(table, path, **options)
    return str(path)


def read(data, **config) -> tuple[PromptReader, list[PromptRow]]:
    """Read all rows and check what must hold for every input."""
    reader = PromptReader(JobConfig(data=data, **config))
    rows = list(reader.rows())
    assert len(rows) == min(reader.num_rows, config.get("limit", reader.num_rows))
    assert [row.row_index for row in rows] == list(range(len(rows)))
    for row in rows:
        assert (row.prompt is None) == (row.error is not None)
        assert row.error is None or row.error.isprintable()
        assert list(row.columns) == reader.schema.names
        repr((row.id, row.prompt, row.columns, row.sampling, row.error)).encode()
    for field in reader.schema:
        pa.array([row.columns[field.name] for row in rows], type=field.type)
    return reader, rows


def refused(data, **config) -> str:
    with pytest.raises(UserError) as caught:
        PromptReader(JobConfig(data=data, **config))
    message = str(caught.value)
    assert message.isprintable()
    return message


def column(rows, name):
    return [row.columns[name] for row in rows]


# Which files


@pytest.mark.parametrize("name", ["a b,c=d.jsonl", "[1].jsonl", "50%#1.json", "提示.ndjson", "*.jsonl", "{x}?.jsonl"])
def test_path_with_special_characters_is_literal(tmp_path, name):
    """A file called `[1].jsonl` was taken for a glob and not found."""
    jsonl(tmp_path / "other.jsonl", {"prompt": "no"})
    _, rows = read(jsonl(tmp_path / name, {"prompt": "yes"}))
    assert [row.prompt for row in rows] == ["yes"]


def test_folder_glob_and_list_in_sorted_order(tmp_path):
    """row_index depended on the order in which a file system or a list gave the files."""
    for name in ["b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden.jsonl", "_part.jsonl", "_tmp/x.jsonl", ".git/y.jsonl"]:
        jsonl(tmp_path / name, {"prompt": Path(name).stem})
    (tmp_path / "README.md").write_text("no rows")
    for data, expected in [
        (str(tmp_path), "abc"),
        ([str(tmp_path / "sub"), str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")], "abc"),
        (str(tmp_path / "*"), "abc"),
        (str(tmp_path / "*.jsonl"), "ab"),
        (str(tmp_path / "**"), "abc"),
    ]:
        reader, rows = read(data)
        assert "".join(row.prompt for row in rows) == expected
        assert not reader.warnings


def test_file_named_twice_is_read_once_with_a_warning(tmp_path):
    """`data=[folder,folder/a.jsonl]` ran every row twice."""
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    os.symlink(path, tmp_path / "link.jsonl")
    reader, rows = read([str(tmp_path), path])
    assert len(rows) == 1
    assert reader.files == [path]
    assert "a.jsonl" in reader.warnings[0] and "once" in reader.warnings[0]


def test_link_to_a_parent_folder_ends(tmp_path):
    """A folder that links to itself was walked for ever."""
    jsonl(tmp_path / "d" / "a.jsonl", {"prompt": "x"})
    os.symlink(tmp_path, tmp_path / "d" / "up", target_is_directory=True)
    assert len(read(str(tmp_path))[1]) == 1


def test_relative_path_is_shown_as_typed(tmp_path, monkeypatch):
    """Errors named an absolute path that the user never typed."""
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "in" / "a.jsonl", {"prompt": "x"}, b"nonsense")
    reader, rows = read("in")
    assert reader.files == ["in/a.jsonl"]
    assert rows[1].where == "in/a.jsonl:2" and rows[1].error.startswith("broken JSON")


@pytest.mark.parametrize("data", ["nope://bucket/a.jsonl", "file:///no/a.jsonl", "-", "nowhere.jsonl", "no*.jsonl"])
def test_what_cannot_be_found_is_one_line(tmp_path, monkeypatch, data):
    """A typo in `data` was a traceback."""
    monkeypatch.chdir(tmp_path)
    assert refused(data).startswith(f"data={data}: ")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", b"hello, no Parquet here"),
        ("a.parquet", b""),
        ("a.csv", b"prompt\nx\n"),
        ("noending", b"{}"),
        ("a.jsonl.gz", b""),
        ("a.jsonl.gz", b'{"prompt": "plain"}\n'),
        ("a.jsonl.zst", b'{"prompt": "plain"}\n'),
        ("a.jsonl", gzip.compress(b'{"prompt": "x"}\n', mtime=0)),  # a fixed time: every process collects the same name
        ("a.jsonl", '{"prompt": "x"}\n'.encode("utf-16")),
        ("a.jsonl.bz2", b""),
    ],
)
def test_file_that_is_not_what_it_says(tmp_path, name, content):
    """A file of the wrong kind gave one error row a line of binary, or a traceback."""
    path = tmp_path / name
    path.write_bytes(content)
    assert refused(str(path)).startswith(f"data={path}: ")


def test_folder_with_nothing_to_read(tmp_path):
    """An empty folder made a job of no rows that said it had succeeded."""
    assert refused(str(tmp_path)).startswith(f"data={tmp_path}: ")
    (tmp_path / "a.txt").write_text("x")
    assert ".jsonl" in refused(str(tmp_path))
    assert ".jsonl" in refused(str(tmp_path / "*"))
    os.symlink(tmp_path / "gone.jsonl", tmp_path / "dangling.jsonl")
    assert "link" in refused(str(tmp_path / "dangling.jsonl"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "regular" in refused(str(tmp_path / "pipe.jsonl"))


def test_newline_in_a_path_stays_one_line(tmp_path):
    """A path with a line break broke the one-line error in two."""
    refused(str(tmp_path / "a\nb.jsonl"))
    read(jsonl(tmp_path / "c\nd.jsonl", b"[1]"))


def test_truncated_gzip_is_found_at_the_start(tmp_path):
    """A gzip cut in the middle ended a job hours in."""
    text = b"".join(b'{"prompt": "%s"}\n' % os.urandom(40).hex().encode() for _ in range(5000))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(text)[:-2000])
    assert refused(str(path)).startswith(f"data={path}: ")


def test_compressed_files_read_like_plain_ones(tmp_path):
    """Only the first member of a concatenated gzip was read."""
    one, two = b'{"prompt": "1"}\n', b'{"prompt": "2"}\n\n{"prompt": "3"}'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(one) + gzip.compress(two))
    (tmp_path / "b.json.zst").write_bytes(
        pa.compress(one, "zstd", asbytes=True) + pa.compress(two, "zstd", asbytes=True)
    )
    (tmp_path / "c.ndjson.GZ").write_bytes(gzip.compress(one + two))
    _, rows = read(str(tmp_path))
    assert [row.prompt for row in rows] == ["1", "2", "3"] * 3


def test_no_rows_warns(tmp_path):
    """An empty file ended in success without a word."""
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf\n \n")
    reader, rows = read(str(tmp_path), id_column="key")
    assert rows == [] and "no rows" in reader.warnings[0] and len(reader.warnings) == 1


def test_file_that_changes_after_the_scan(tmp_path):
    """Rows added while the job ran shifted every later row_index."""
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    reader = PromptReader(JobConfig(data=path))
    with open(path, "a") as file:
        file.write('{"prompt": "y"}\n')
    with pytest.raises(UserError, match="changed"):
        list(reader.rows())


def test_rows_start_over_limit_and_open_files(tmp_path):
    """A second pass went on where the first stopped, and each pass leaked file handles."""
    for i in range(5):
        jsonl(tmp_path / f"{i}.jsonl", {"prompt": f"{i}a"}, {"prompt": f"{i}b"})
    reader = PromptReader(JobConfig(data=str(tmp_path), limit=7))
    assert reader.num_rows == 10
    before = len(os.listdir("/proc/self/fd"))
    first = []
    for row in reader.rows():
        first.append(row.prompt)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert [row.prompt for row in reader.rows()] == first and len(first) == 7
    next(reader.rows())
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(PromptReader(JobConfig(data=str(tmp_path), limit=0)).rows()) == []


# Bad and odd lines


BAD_LINES = [
    (b"[1]", "array"),
    (b"null", "object"),
    (b'"text"', "object"),
    (b'{"prompt": 123}', "prompt is a number, not text"),
    (b'{"prompt": true}', "prompt is a boolean, not text"),
    (b'{"prompt": {"a": 1}}', "prompt is an object, not text"),
    (b'{"prompt": null}', "prompt is null"),
    (b'{"prompt": ""}', "nothing to condition on"),
    (b'{"prompt": []}', "nothing to condition on"),
    (b'{"prompt": [1, null]}', "item 1 is null"),
    (b'{"prompt": [1, -1]}', "item 1"),
    (b'{"prompt": [true]}', "boolean"),
    (b'{"prompt": [1.0]}', "number"),
    (b'{"prompt": [99999999999999999999]}', "range"),
    (b'{"prompt": ["a"]}', "text"),
    (b'{"text": "x"}', "no column prompt"),
    (b"{}", "no column prompt"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "x"', "broken JSON"),
    (b'{"prompt": "x"} {"prompt": "y"}', "broken JSON"),
    (b'{"prompt": "a\x00b"}', "broken JSON"),
    (b'{"prompt": "\\ud800"}', "lone surrogate"),
    (b'{"prompt": "x", "d": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    (b'{"prompt": "x", "d": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}", "nested"),
    (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "digits"),
]


def test_each_bad_line_is_one_error_row_with_file_line_and_cause(tmp_path):
    """One bad line stopped the job, was dropped, or shifted the rows after it."""
    lines = [item for bad, _ in BAD_LINES for item in (bad, b'{"prompt": "ok", "k": 1}')]
    path = jsonl(tmp_path / "a.jsonl", *lines)
    reader, rows = read(path)
    assert reader.num_rows == 2 * len(BAD_LINES)
    for i, (_, cause) in enumerate(BAD_LINES):
        assert rows[2 * i].where == f"{path}:{2 * i + 1}"
        assert cause in rows[2 * i].error
        assert rows[2 * i + 1].prompt == "ok" and rows[2 * i + 1].columns["k"] == 1
    assert reader.schema.field("k").type == pa.int64()


def test_odd_lines_that_are_fine(tmp_path):
    """BOM, CRLF, blank lines, U+2028, a long line or a missing last newline broke a row or the count."""
    long = "y" * 5_000_000
    lines = [
        b"\xef\xbb\xbf" + b'{"prompt": "bom"}\r',
        b"\r",
        b" \t ",
        '{"prompt": "a\u2028b\u0085c\x0bd"}'.replace("\x0b", "\\u000b").encode(),
        b'{"prompt": "' + long.encode() + b'"}',
        b'  {"prompt": "nul\\u0000"}  ',
        b'{"prompt": "first", "prompt": "last"}',
        b'{"prompt": [5, 0]}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    _, rows = read(str(tmp_path / "a.jsonl"))
    assert [row.prompt for row in rows] == ["bom", "a\u2028b\x85c\x0bd", long, "nul\0", "last", [5, 0]]


def test_line_numbers_count_blank_lines(tmp_path):
    """The error named the row's number where an editor shows the line's."""
    path = jsonl(tmp_path / "a.jsonl", b"", {"prompt": "x"}, b"", b"oops")
    _, rows = read(path)
    assert rows[1].row_index == 1 and rows[1].where == f"{path}:4" and rows[1].error


def test_error_row_keeps_id_and_columns(tmp_path):
    """An error row lost the id by which the user finds it again."""
    _, rows = read(jsonl(tmp_path / "a.jsonl", {"id": 9, "prompt": None, "k": "v", "n": [1]}))
    assert rows[0].id == "9" and rows[0].columns == {"k": "v", "n": "[1]"} and rows[0].sampling == {}


def test_lone_surrogates_are_escaped_everywhere(tmp_path):
    """A lone surrogate in any text crashed the writer."""
    line = rb'{"prompt": "ok", "id": "\ud800", "a": "x\udc00", "b": ["\ud800"], "k\ud800": 1}'
    _, rows = read(jsonl(tmp_path / "a.jsonl", line))
    assert rows[0].id == "\\ud800"
    assert rows[0].columns == {"a": "x\\udc00", "b": '["\\ud800"]', "k\\ud800": 1}
    assert json.loads(rows[0].columns["b"]) == ["\ud800"]


def test_deep_caller_reads_the_same(tmp_path):
    """Whether a nested row could be read depended on how deep the caller's stack was."""
    nested = b'{"prompt": "x", "d": ' + b"[" * 190 + b"]" * 190 + b"}"
    path = jsonl(tmp_path / "a.jsonl", nested)

    def deeper(levels):
        return deeper(levels - 1) if levels else read(path)[1]

    assert deeper(0) == deeper(300)
    assert deeper(0)[0].error is None


# Schema


def test_jsonl_types(tmp_path):
    """Types were guessed from the first rows, and mixed columns lost digits."""
    path = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "x", "i": 1, "f": 1, "b": True, "s": "é", "z": None, "big": 2**63, "mix": 2**53 + 1, "any": "t"},
        {
            "prompt": "x",
            "i": -(2**63),
            "f": 0.5,
            "b": None,
            "bi": 1,
            "big": 1,
            "mix": 0.5,
            "any": 1,
            "nan": float("nan"),
        },
        {"prompt": "x", "bi": True, "nest": {"é": [1]}},
    )
    reader, rows = read(path)
    types = {field.name: str(field.type) for field in reader.schema}
    assert types == {
        **{"i": "int64", "f": "double", "b": "bool", "s": "string", "z": "string", "big": "string", "mix": "string"},
        **{"any": "string", "bi": "string", "nan": "double", "nest": "string"},
    }
    assert column(rows, "i") == [1, -(2**63), None]
    assert column(rows, "f") == [1.0, 0.5, None]
    assert column(rows, "big") == [str(2**63), "1", None]
    assert column(rows, "mix") == [str(2**53 + 1), "0.5", None]
    assert column(rows, "any") == ['"t"', "1", None]
    assert column(rows, "bi") == [None, "1", "true"]
    assert column(rows, "nest") == [None, None, '{"é": [1]}']


def test_key_and_type_that_first_appear_late(tmp_path):
    """Only the first 1,000 rows decided, so row 1,001 lost its column or stopped the job."""
    rows_in = [{"prompt": "x", "a": 1}] * 1000 + [{"prompt": "x", "a": {"n": 1}, "late": 2**40}]
    reader, rows = read(jsonl(tmp_path / "a.jsonl", *rows_in))
    assert str(reader.schema.field("late").type) == "int64"
    assert rows[-1].columns == {"a": '{"n": 1}', "late": 2**40} and rows[0].columns == {"a": "1", "late": None}


def test_drift_over_many_rows(tmp_path):
    """Rows read so far had one type, those after row 1,000 another; the first bad line moved everything after it."""
    rows_in: list = [{"prompt": f"p{i}", "n": i, "text": i} for i in range(2500)]
    rows_in[1000] = b'{"prompt": "cut off'
    rows_in[1001] = {"prompt": "p1001", "n": 0.5, "late": [1]}
    rows_in[2400] = {"prompt": "p2400", "n": None, "text": "t", "late": "x"}
    reader, rows = read(jsonl(tmp_path / "a.jsonl", *rows_in))
    assert {field.name: str(field.type) for field in reader.schema} == {
        "n": "double",
        "text": "string",
        "late": "string",
    }
    assert [row.row_index for row in rows if row.error] == [1000]
    assert rows[1000].where.endswith("a.jsonl:1001")
    assert all(row.prompt == f"p{i}" for i, row in enumerate(rows) if i != 1000)
    plain = [i for i in range(2500) if i not in (1000, 1001, 2400)]
    assert all(rows[i].columns == {"n": float(i), "text": str(i), "late": None} for i in plain)
    assert rows[1001].columns == {"n": 0.5, "text": None, "late": "[1]"}
    assert rows[2400].columns == {"n": None, "text": '"t"', "late": '"x"'}


def test_keys_without_end_are_refused(tmp_path):
    """Rows keyed by data (a new key each) made a schema that ate the memory."""
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "x", **{f"k{i}-{j}": 1 for j in range(100)}} for i in range(101)))
    assert "keys" in refused(path)


def test_taken_names(tmp_path):
    """An input column overwrote one of the output's, or two that differ by case became one."""
    row = {"prompt": "x", "id": "i", "Error": 1, "input_error": 2, "seed": 3, "Foo": 4, "foo": 5, "FOO": 6, "text": 7}
    reader, rows = read(jsonl(tmp_path / "a.jsonl", row))
    assert rows[0].columns == {
        "input_Error_2": 1,
        "input_error": 2,
        "input_seed": 3,
        "Foo": 4,
        "input_foo": 5,
        "input_FOO_2": 6,
        "text": 7,
    }
    lowered = [name.lower() for name in [*FIXED_COLUMNS, *reader.schema.names]]
    assert len(set(lowered)) == len(lowered)


@given(st.lists(st.sampled_from(["a", "A", "id", "ID", "input_id", "input_id_2", "Input_ID", "error", "input_a"])))
def test_output_names_never_collide(names):
    """`input_<name>` met a column of that very name."""
    outputs = [*FIXED_COLUMNS, *output_names(names).values()]
    assert len({name.lower() for name in outputs}) == len(outputs)


DEEP = pa.struct({"m": pa.map_(pa.string(), pa.list_(pa.struct({"t": pa.timestamp("ns", "UTC")})))})


def test_parquet_types_pass_unchanged(tmp_path):
    """Types without a JSON form came out as text, or lost nanoseconds and far years on the way through Python."""
    table = pa.table(
        {
            "prompt": pa.array(["a", "b"], pa.large_string()),
            "ns": pa.array([1, None], pa.timestamp("ns", "Europe/Berlin")),
            "far": pa.array([2**60, 0], pa.timestamp("us")),
            "fold": pa.array([1698539400000000, 1698543000000000], pa.timestamp("us", "Europe/Berlin")),
            "time": pa.array([1, None], pa.time64("ns")),
            "span": pa.array([1, None], pa.duration("ns")),
            "dec": pa.array([decimal.Decimal("1.10"), None]),
            "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
            "list": pa.array([[1, None], None], pa.list_(pa.timestamp("ns"))),
            "struct": pa.array([{"a": 1, "b": ["x"]}, None]),
            "bin": pa.array([b"\xff", None]),
            "u64": pa.array([2**64 - 1, None], pa.uint64()),
            "f16": pa.array([1.5, None], pa.float16()),
            "large": pa.array(["t", None], pa.large_string()),
            "fold_ns": pa.array([1698539400000000001, None], pa.timestamp("ns", "Europe/Berlin")),
            "offset": pa.array([1, None], pa.timestamp("ms", "+05:30")),
            "span_us": pa.array([-(2**62), None], pa.duration("us")),
            "time32": pa.array([1, None], pa.time32("ms")),
            "dec256": pa.array([decimal.Decimal("9" * 70 + ".123"), None], pa.decimal256(76, 3)),
            "large_list": pa.array([["x", None], None], pa.large_list(pa.string())),
            "view": pa.array([[1], None], pa.list_view(pa.int8())),
            "large_view": pa.array([[{"a": 1}], None], pa.large_list_view(pa.struct({"a": pa.int8()}))),
            "pair": pa.array([[1, 2], None], pa.list_(pa.int16(), 2)),
            "fixed": pa.array([b"abc", None], pa.binary(3)),
            "string_view": pa.array(["s", None], pa.string_view()),
            "binary_view": pa.array([b"\xff", None], pa.binary_view()),
            "large_binary": pa.array([b"\xff", None], pa.large_binary()),
            "twice": pa.array([[("k", None), ("k", 1)], None], pa.map_(pa.string(), pa.int8())),
            "deep": pa.array([{"m": [("k", [{"t": 5}])]}, None], DEEP),
            "zero": pa.array([-0.0, float("inf")], pa.float32()),
        }
    )
    reader, rows = read(parquet(tmp_path / "a.parquet", table))
    for field in reader.schema:
        assert field.type == table.schema.field(field.name).type
        got = pa.array([row.columns[field.name] for row in rows], type=field.type)
        assert got.equals(table[field.name].combine_chunks()), field.name
    schema = completions_schema(reader.schema)
    with PartWriter(LocalStore(tmp_path), schema, commit_every=9, commit_every_s=9, prefix="out-") as writer:
        for row in rows:
            writer.write({"row_index": row.row_index, **row.columns})
    (path,) = tmp_path.glob("out-*")
    written = pq.read_table(path).select(reader.schema.names)
    assert written.schema.remove_metadata().equals(reader.schema)
    for name in reader.schema.names:
        assert written[name].combine_chunks().equals(table[name].combine_chunks()), name


def test_dictionaries_are_decoded(tmp_path):
    """A dictionary-encoded prompt or column could not be read or not be written."""
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    nested = pa.ListArray.from_arrays([0, 1, 2, 3], words)
    reader, rows = read(parquet(tmp_path / "a.parquet", {"prompt": words, "w": words, "nested": nested}))
    assert [row.prompt for row in rows] == ["a", "b", "a"] == column(rows, "w")
    assert reader.schema.field("w").type == pa.string()
    assert reader.schema.field("nested").type.value_type == pa.string()


def test_several_files_unite_their_columns(tmp_path):
    """A column that two files type differently stopped the job or was cut to the first file's type."""
    parquet(
        tmp_path / "a.parquet",
        {
            "prompt": ["p"],
            "same": pa.array([1], pa.int32()),
            "num": pa.array([3], pa.int64()),
            "wide": pa.array([2**60], pa.int64()),
            "clash": pa.array([1], pa.timestamp("us")),
            "kept": pa.array([2], pa.int8()),
        },
    )
    parquet(tmp_path / "b.parquet", {"prompt": ["q"], "num": [0.5], "wide": [0.5], "new": [True]})
    jsonl(tmp_path / "c.jsonl", {"prompt": "r", "clash": "now", "same": 5, "kept": None})
    reader, rows = read(str(tmp_path))
    assert [(field.name, str(field.type)) for field in reader.schema] == [
        ("same", "int64"),
        ("num", "double"),
        ("wide", "string"),
        ("clash", "string"),
        ("kept", "int8"),
        ("new", "bool"),
    ]
    assert column(rows, "same") == [1, None, 5]
    assert column(rows, "num") == [3.0, 0.5, None]
    assert column(rows, "wide") == [str(2**60), "0.5", None]
    assert column(rows, "clash") == ['"1970-01-01T00:00:00.000001"', None, '"now"']


def test_parquet_with_a_column_twice(tmp_path):
    """The second of two columns of one name vanished."""
    table = pa.Table.from_arrays([pa.array(["x"])] * 2, names=["prompt", "prompt"])
    assert "two columns" in refused(parquet(tmp_path / "a.parquet", table))


# Parquet rows


def test_parquet_prompts_of_every_kind(tmp_path):
    """A binary or list<int> prompt column stopped the job."""
    path = parquet(tmp_path / "bin.parquet", {"prompt": pa.array([b"\xc3\xa9", b"\xff", b"", None])})
    _, rows = read(path)
    assert rows[0].prompt == "é"
    assert (rows[1].where, rows[1].error) == (f"{path} row 1", "prompt is not UTF-8 text")
    assert "empty" in rows[2].error and "null" in rows[3].error
    _, rows = read(parquet(tmp_path / "ids.parquet", {"prompt": pa.array([[1, 2], [1, None], [-1], [], None])}))
    assert rows[0].prompt == [1, 2]
    assert ["item 1" in rows[1].error, "item 0" in rows[2].error, "empty" in rows[3].error] == [True] * 3
    _, rows = read(parquet(tmp_path / "int.parquet", {"prompt": [1]}))
    assert "prompt is a number, not text" in rows[0].error


def test_invalid_utf8_in_a_parquet_string(tmp_path):
    """Arrow hands out strings unchecked: one bad row raised from a whole batch."""
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xffa")]
    )
    path = parquet(tmp_path / "a.parquet", {"prompt": ["x", "y"], "s": bad})
    _, rows = read(path)
    assert (rows[0].where, rows[0].error) == (f"{path} row 0", "column s is not UTF-8 text")
    assert rows[0].columns == {"s": None}
    assert rows[1].prompt == "y" and rows[1].columns == {"s": "a"}


def test_corrupt_row_group_costs_only_its_rows(tmp_path):
    """One damaged page ended the job, though the other row groups were whole."""
    table = pa.table({"prompt": [os.urandom(20).hex() for _ in range(3000)]})
    path = parquet(tmp_path / "a.parquet", table, row_group_size=1000, use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    raw = bytearray(Path(path).read_bytes())
    raw[chunk.data_page_offset : chunk.data_page_offset + chunk.total_compressed_size] = (
        b"\xaa" * chunk.total_compressed_size
    )
    Path(path).write_bytes(raw)
    _, rows = read(path)
    assert [i for i, row in enumerate(rows) if row.error] == list(range(1000, 2000))
    assert rows[1500].where == f"{path} row 1500"
    assert rows[2999].prompt == table["prompt"][2999].as_py()


# Ids, prompt column, template


def test_ids_are_text(tmp_path):
    """`7` and `"7"` as ids made a column of no single type."""
    ids = [7, "7", 1.5, True, None, {"é": 1}, [1], 10**30]
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "x", "id": i} for i in ids), {"prompt": "x"})
    reader, rows = read(path)
    assert [row.id for row in rows] == ["7", "7", "1.5", "true", None, '{"é": 1}', "[1]", str(10**30), None]
    assert reader.schema.names == []


def test_id_column_that_is_not_there(tmp_path):
    """A typo in `id_column` gave a file of null ids."""
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x", "key": 1})
    assert "key" in refused(path, id_column="kye")
    reader, rows = read(path, id_column="key")
    assert rows[0].id == "1" and reader.schema.names == []


def test_prompt_column_that_is_not_there(tmp_path):
    """Every row failed, and nothing said that the setting was wrong."""
    message = refused(parquet(tmp_path / "a.parquet", {"text": ["x"], "k": [1]}))
    assert message.startswith("prompt_column=prompt: ") and "text, k" in message
    reader, rows = read(jsonl(tmp_path / "a.jsonl", {"text": "x"}))
    assert rows[0].error and "prompt_column=prompt" in reader.warnings[0] and "text" in reader.warnings[0]


def test_prompt_column_is_consumed_and_prompt_is_then_another_column(tmp_path):
    """With `prompt_column=q` the output had two columns called prompt."""
    path = jsonl(tmp_path / "a.jsonl", {"q": "x", "prompt": "y"})
    assert read(path, prompt_column="q")[1][0].columns == {"input_prompt": "y"}
    _, rows = read(path, template="{q}/{prompt}")
    assert rows[0].prompt == "x/y" and rows[0].columns == {"q": "x", "input_prompt": "y"}


def test_template_renders_values_as_text_and_json(tmp_path):
    """Python's spelling of a value (True, None, 'a') got into prompts."""
    row = {"s": "é{s}", "i": 2**70, "b": True, "f": 0.5, "n": {"é": [None]}, "a.b": "dot"}
    _, rows = read(jsonl(tmp_path / "a.jsonl", row), template="{{{s}}} {i} {b} {f} {n} {a.b}\\n{s}")
    assert rows[0].prompt == '{é{s}} 1180591620717411303424 true 0.5 {"é": [null]} dot\né{s}'


def test_template_with_a_missing_or_null_column(tmp_path):
    """A missing column was rendered as an empty string."""
    path = jsonl(tmp_path / "a.jsonl", {"a": 1, "b": None}, {"b": 2}, {"a": "", "b": ""})
    _, rows = read(path, template="{a}{b}")
    assert "column b is null" in rows[0].error and "column a is missing" in rows[1].error
    assert "nothing to condition on" in rows[2].error
    reader, _ = read(path, template="{c}")
    assert "template=c" in reader.warnings[0]
    assert "template" in refused(parquet(tmp_path / "a.parquet", {"a": ["x"]}), template="{c}")
    assert "equal" in read(path, template="same")[0].warnings[0]


@pytest.mark.parametrize(
    "template",
    ["{a.__class__}", "{a[0]}", "{a!r}", "{a:>9}", "{a", "a}", "{}", "{a{b}}", "{{a}", '{"a": 1}', ""],
)
def test_template_that_is_no_template(tmp_path, template):
    """`{a.__class__}` read attributes of Python objects; a lone brace was a traceback."""
    assert refused(jsonl(tmp_path / "a.jsonl", {"a": "x"}), template=template).startswith("template=")


# Sampling


def test_sampling_column(tmp_path):
    """A row's settings were dropped when written as text, and a null in them meant different things."""
    path = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "x", "sampling": {"max_tokens": None, "stop": ["a"]}},
        {"prompt": "x", "sampling": '{"temperature": 0.5}'},
        {"prompt": "x", "sampling": None},
        {"prompt": "x", "sampling": "null"},
        {"prompt": "x", "sampling": "hot"},
        {"prompt": "x", "sampling": [1]},
        {"prompt": "x", "sampling": 1},
        rb'{"prompt": "x", "sampling": {"stop": "\ud800"}}',
    )
    reader, rows = read(path)
    assert [row.sampling for row in rows[:4]] == [{"max_tokens": None, "stop": ["a"]}, {"temperature": 0.5}, {}, {}]
    assert all("sampling" in row.error for row in rows[4:])
    assert reader.schema.names == ["sampling"]
    assert rows[1].columns["sampling"] == json.dumps('{"temperature": 0.5}')


def test_sampling_struct_map_and_decimals_of_parquet(tmp_path):
    """A struct has every member in every row: its nulls switched limits off; decimals of DuckDB were refused."""
    struct = pa.array([{"max_tokens": 3, "temperature": None}, {"max_tokens": None, "temperature": 0.5}, None])
    path = parquet(tmp_path / "s.parquet", {"prompt": ["x"] * 3, "sampling": struct})
    assert [row.sampling for row in read(path)[1]] == [{"max_tokens": 3}, {"temperature": 0.5}, {}]
    pairs = pa.array([[("top_p", 0.5), ("min_p", None)], []], pa.map_(pa.string(), pa.float64()))
    path = parquet(tmp_path / "m.parquet", {"prompt": ["x"] * 2, "s": pairs, "t": [decimal.Decimal("0.7"), None]})
    _, rows = read(path, sampling_column="s", sampling_columns={"temperature": "t"})
    assert [row.sampling for row in rows] == [{"top_p": 0.5, "temperature": 0.7}, {}]


def test_mapped_sampling_columns(tmp_path):
    """Mapped columns lost to the object, or a null or NaN became a setting."""
    path = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "x", "n": 5, "sampling": {"max_tokens": 1, "seed": 2}},
        {"prompt": "x", "n": None, "sampling": {"max_tokens": 1}},
        {"prompt": "x", "n": float("nan")},
    )
    reader, rows = read(path, sampling_columns={"max_tokens": "n"})
    assert [row.sampling for row in rows] == [{"max_tokens": 5, "seed": 2}, {"max_tokens": 1}, {}]
    assert reader.schema.names == ["n", "sampling"]
    assert "max_token" in refused(path, sampling_columns={"max_token": "n"})
    assert "sampling_columns.seed" in read(path, sampling_columns={"seed": "s"})[0].warnings[0]
    table = parquet(tmp_path / "a.parquet", {"prompt": ["x"]})
    assert "sampling_columns.seed=s" in refused(table, sampling_columns={"seed": "s"})


# Any input, and its cost

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
KEYS = st.sampled_from(["prompt", "id", "n", "s", "N", "seed", "sampling"]) | st.text(max_size=3)
OBJECTS = st.lists(st.dictionaries(KEYS, VALUES, max_size=5), max_size=12)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(OBJECTS, st.booleans())
def test_any_objects_give_one_row_each(tmp_path, objects, ascii_only):
    """Some value, in some column, raised, vanished or lost digits."""
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in objects)
    path = tmp_path / "any.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    _, rows = read(str(path))
    assert len(rows) == len(objects)
    for row, original in zip(rows, objects, strict=True):
        if row.error is None:
            assert row.prompt == original["prompt"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.lists(st.tuples(st.integers(), st.text(st.characters(codec="utf-8"), min_size=1)), min_size=1, max_size=12))
def test_ints_and_strings_are_kept(tmp_path, pairs):
    """Integers went through floats, strings through a lossy decoding."""
    path = jsonl(tmp_path / "kept.jsonl", *({"prompt": text, "n": n, "s": text} for n, text in pairs))
    _, rows = read(path)
    assert [row.prompt for row in rows] == [text for _, text in pairs] == column(rows, "s")
    assert [int(value) for value in column(rows, "n")] == [n for n, _ in pairs]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_is_flat(tmp_path, kind):
    """The whole file was held in memory: 500,000 rows did not fit."""
    rows = ({"prompt": "x" * 400, "n": i, "tags": ["a"]} for i in range(25_000))
    if kind == "jsonl":
        path = jsonl(tmp_path / "a.jsonl", *rows)
    else:
        path = parquet(
            tmp_path / "a.parquet", pa.Table.from_pylist(list(rows)), compression="none", use_dictionary=False
        )
    assert os.path.getsize(path) > 10_000_000
    tracemalloc.start()
    pool = pa.total_allocated_bytes()
    count = grown = 0
    for _ in PromptReader(JobConfig(data=path)).rows():
        count += 1
        if count % 1000 == 0:
            grown = max(grown, pa.total_allocated_bytes() - pool)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 25_000
    assert peak < 5_000_000
    assert grown < 6_000_000


# Order


def test_order_prefix_brings_alike_prompts_together(tmp_path, monkeypatch):
    """A row lost or doubled at a window's border; text beside token ids, and rows that can't run, in one window."""
    monkeypatch.setattr("ember.data.reader.ORDER_WINDOW", 5)
    prompts = ["b1", [2, 1], "a2", "b0", "a1", [1, 5], "a9", 7, "b2", [1, 4], "c"]
    data = jsonl(tmp_path / "rows.jsonl", *({"prompt": prompt} for prompt in prompts))
    reader = PromptReader(JobConfig(data=data, order="prefix"))
    rows = list(reader.rows())
    assert [row.row_index for row in rows] == [4, 2, 3, 0, 1, 7, 6, 8, 9, 5, 10]
    assert [row.row_index for row in reader.rows(lambda index: index % 2 == 0)] == [4, 2, 6, 0, 8, 10]


def test_order_input_is_the_default(tmp_path):
    """Rows in another order than the file's, unasked."""
    data = jsonl(tmp_path / "rows.jsonl", {"prompt": "b"}, {"prompt": "a"})
    assert [row.row_index for row in PromptReader(JobConfig(data=data)).rows()] == [0, 1]
    with pytest.raises(UserError, match="order=sorted"):
        JobConfig(data=data, order="sorted")

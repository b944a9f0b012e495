"""Declared types (`schema`): what they are, what fits them, and that nothing is changed on the way to Parquet."""

from __future__ import annotations

import decimal
import json
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ember.config import JobConfig
from ember.data.declared_types import declared_type
from ember.data.reader import PromptReader
from ember.data.store import LocalStore
from ember.data.text import RowError
from ember.data.writer import PartWriter, completions_schema
from ember.errors import ConfigError, UserError


def write(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(data, **schema):
    reader = PromptReader(JobConfig(data=data, schema=schema))
    return reader, list(reader.rows())


def stored(text: str, value):
    """A value by way of the declared type and Arrow, as the writer does it."""
    column = declared_type("c", text)
    return pa.array([column.convert(value)], column.arrow)[0].as_py()


def round_trip(folder, reader, rows) -> pa.Table:
    """What the completions file holds of the columns that pass through."""
    schema = completions_schema(reader.schema)
    with PartWriter(LocalStore(folder), schema, commit_every=100, commit_every_s=9) as writer:
        for row in rows:
            writer.write({"row_index": row.row_index, **row.columns})
    return pq.read_table(next(folder.glob("part-*"))).select(reader.schema.names)


TYPES = {
    **{
        name: getattr(pa, name)() for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    **{name: getattr(pa, name)() for name in ("float16", "float32", "float64", "string", "binary", "date32")},
    "bool": pa.bool_(),
    "json": pa.string(),
    "timestamp[us]": pa.timestamp("us"),
    "timestamp[ns, tz=UTC]": pa.timestamp("ns", "UTC"),
    "timestamp[ms,tz=Europe/Berlin]": pa.timestamp("ms", "Europe/Berlin"),
    "timestamp[s, tz=+05:30]": pa.timestamp("s", "+05:30"),
    "decimal128(10, 2)": pa.decimal128(10, 2),
    " list < string > ": pa.list_(pa.string()),
    "large_list<list<int8>>": pa.large_list(pa.list_(pa.int8())),
    "map<string, list<json>>": pa.map_(pa.string(), pa.list_(pa.string())),
    'struct<a: int8, "odd name": struct<b: map<string, date32>>>': pa.struct(
        {"a": pa.int8(), "odd name": pa.struct({"b": pa.map_(pa.string(), pa.date32())})}
    ),
}


@pytest.mark.parametrize(("text", "arrow"), TYPES.items(), ids=TYPES)
def test_types_are_written_as_arrow_prints_them(text, arrow):
    """A type copied from Arrow's own output was not understood."""
    assert declared_type("c", text).arrow == arrow


@pytest.mark.parametrize(
    "text",
    ["int65", "", "list", "list<", "list<int8", "list<int8>>", "map<int8, string>", "struct<>", "struct<a>", "int64[]",
     "struct<a: int8, a: int8>", "timestamp", "timestamp[h]", "timestamp[us, tz=Mars/North]", "timestamp[us, tz=UTC",
     "decimal128(40, 1)", "decimal128(4, 5)", "decimal128(4)", "decimal128(0, 0)", "float64;", "лист"],
)  # fmt: skip
def test_what_is_no_type_names_the_key(tmp_path, text):
    """A typo in a type was a traceback, or the scan's type without a word."""
    with pytest.raises(UserError) as caught:
        declared_type("tags", text)
    shown = text or '""'
    assert str(caught.value).startswith(f"schema.tags={shown}: ") and str(caught.value).isprintable()


FITS = [
    ("float64", 3, 3.0),
    ("float64", 1.5, 1.5),
    ("int8", -128, -128),
    ("int64", 3.0, 3),
    ("uint64", 2**64 - 1, 2**64 - 1),
    ("float32", 0.1, 0.10000000149011612),
    ("float16", 2048, 2048.0),
    ("string", "é", "é"),
    ("binary", "é", b"\xc3\xa9"),
    ("date32", "2024-02-29", date(2024, 2, 29)),
    ("decimal128(5, 2)", 1.1, decimal.Decimal("1.10")),
    ("decimal128(5, 2)", "-123.450", decimal.Decimal("-123.45")),
    ("decimal128(38, 0)", 10**37, decimal.Decimal(10**37)),
    ("decimal128(38, 2)", "1e3", decimal.Decimal("1000.00")),
    ("list<int8>", [1, None], [1, None]),
    ("map<string, int8>", {"b": 1, "a": None}, [("b", 1), ("a", None)]),
    ("struct<a: int8, b: string>", {"b": "x"}, {"a": None, "b": "x"}),
    ("json", {"a": [1, "é"]}, '{"a": [1, "é"]}'),
    ("json", "x", '"x"'),
    ("list<json>", [{"a": 1}, 2], ['{"a": 1}', "2"]),
]
DOES_NOT = [
    ("int64", 1.5), ("int64", "3"), ("int64", True), ("int8", 128), ("uint8", -1), ("int64", 2**63), ("int64", 1e300),
    ("float64", "1.5"), ("float64", True), ("float64", 2**53 + 1), ("float64", 10**400), ("float32", 2**24 + 1),
    ("float32", 1e39), ("float16", 70000), ("bool", 1), ("bool", "true"), ("string", 1), ("binary", [1]),
    ("date32", "2024-02-30"), ("date32", "2024-2-3"), ("date32", 19000), ("date32", "2024-02-29T00:00:00"),
    ("decimal128(5, 2)", 1.111), ("decimal128(5, 2)", 1000), ("decimal128(5, 2)", "1_0"), ("decimal128(5, 2)", True),
    ("decimal128(5, 2)", "nan"), ("decimal128(5, 2)", "1e999"), ("list<int8>", [1, "x"]), ("list<int8>", "x"),
    ("list<int8>", {"a": 1}), ("map<string, int8>", [["a", 1]]), ("map<string, int8>", {"a": 1.5}),
    ("struct<a: int8>", {"a": 1, "extra": 2}), ("struct<a: int8>", [1]), ("struct<a: int8>", {"a": "1"}),
    ("timestamp[us]", "2024-01-01T00:00:00Z"), ("timestamp[us, tz=UTC]", "2024-01-01T00:00:00"),
    ("timestamp[s]", "2024-01-01T00:00:00.5"), ("timestamp[us]", "2024-01-01T00:00:00.0000001"),
    ("timestamp[us]", "2024-13-01"), ("timestamp[us]", "2024-01-01T24:00"), ("timestamp[us]", 0),
    ("timestamp[us]", "now"),
    ("timestamp[ns]", "9999-01-01"), ("timestamp[s, tz=UTC]", "2024-01-01T00:00:00+25:00"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value", "expected"), FITS)
def test_what_fits_keeps_its_meaning(text, value, expected):
    """3 in a float column was refused, a decimal went through a binary float."""
    got = stored(text, value)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(("text", "value"), DOES_NOT)
def test_what_does_not_fit_is_an_error(text, value):
    """1.5 became 1, "3" became 3, true became 1.0, a member that the type lacks was dropped."""
    with pytest.raises(RowError) as caught:
        declared_type("c", text).convert(value)
    assert str(caught.value).endswith(f", which is no {text}") and len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("text", "value", "utc"),
    [
        ("timestamp[us]", "2024-01-31 12:30:00.000001", "2024-01-31 12:30:00.000001"),
        ("timestamp[s]", "2024-01-31", "2024-01-31 00:00:00"),
        ("timestamp[ns, tz=UTC]", "1969-12-31T23:59:59.999999999Z", "1969-12-31 23:59:59.999999999"),
        ("timestamp[ms, tz=Europe/Berlin]", "2023-10-29T02:30:00+01:00", "2023-10-29 01:30:00.000"),
        ("timestamp[ms, tz=Europe/Berlin]", "2023-10-29T02:30:00+0200", "2023-10-29 00:30:00.000"),
        ("timestamp[us, tz=-03:00]", "0001-01-01T00:00:00Z", "0001-01-01 00:00:00.000000"),
    ],
)
def test_timestamps_are_instants(text, value, utc):
    """The hour that happens twice in autumn became one; nanoseconds were cut."""
    column = declared_type("c", text)
    stored = pa.array([column.convert(value)], column.arrow)
    assert stored.cast(pa.timestamp(column.arrow.unit)).cast(pa.string()).to_pylist() == [utc]


@given(
    st.integers() | st.floats(allow_nan=False),
    st.sampled_from(["int16", "uint32", "int64", "float64", "decimal128(20, 3)"]),
)
def test_a_number_is_kept_exactly_or_refused(value, text):
    """Some number near a limit came out as another."""
    try:
        got = stored(text, value)
    except RowError:
        return
    assert got == value or (isinstance(value, float) and got == decimal.Decimal(repr(value)))


def test_declared_types_go_before_the_scan(tmp_path):
    """The scan typed a column by what this file happened to hold; the next file's output could not be joined to it."""
    rows_in = [
        {"prompt": "a", "score": 1, "tags": [], "when": "2024-01-31T00:00:00Z", "any": 1},
        {"prompt": "b", "score": 1.5, "tags": ["x", None], "any": "x", "free": 1},
        {"prompt": "c", "score": "high", "tags": None, "any": {"k": 1}},
    ]
    path = write(tmp_path / "a.jsonl", *rows_in)
    types = {"score": "float64", "tags": "list<string>", "when": "timestamp[us, tz=UTC]", "any": "json", "gone": "int8"}
    reader, rows = read(path, **types)
    assert [str(field.type) for field in reader.schema] == [
        "double", "list<item: string>", "timestamp[us, tz=UTC]", "string", "int64", "int8",
    ]  # fmt: skip
    assert [row.error for row in rows] == [None, None, 'column score is "high", which is no float64']
    assert reader.warnings == ["schema.gone: no row has this column; it is null in every row"]
    table = round_trip(tmp_path, reader, rows)
    assert table.schema.remove_metadata().equals(reader.schema)
    assert table["score"].to_pylist() == [1.0, 1.5, None]
    assert table["tags"].to_pylist() == [[], ["x", None], None]
    assert table["any"].to_pylist() == ["1", '"x"', '{"k": 1}']
    assert table["gone"].to_pylist() == [None] * 3


def test_error_names_a_cut_value(tmp_path):
    """A megabyte of value stood in the error column."""
    _, rows = read(write(tmp_path / "a.jsonl", {"prompt": "x", "n": "y\n" * 10_000}), n="int8")
    assert rows[0].error.startswith('column n is "y\\') and rows[0].error.endswith("which is no int8")
    assert len(rows[0].error) < 150 and rows[0].error.isprintable()


def test_declared_types_over_parquet(tmp_path):
    """A file's own type won over the declared one, or a value was cast with a loss."""
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "same": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
            "n": pa.array([1, 300], pa.int64()),
            "at": pa.array([1_500, 1_000_000_000], pa.timestamp("ns", "Europe/Berlin")),
            "day": pa.array([0, 1], pa.date32()),
            "dec": pa.array([decimal.Decimal("1.50"), decimal.Decimal("1.55")]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    reader, rows = read(
        str(tmp_path / "a.parquet"),
        **{"same": "map<string, int32>", "n": "uint8", "at": "timestamp[us, tz=UTC]", "day": "date32"},
        dec="decimal128(4, 1)",
    )
    assert rows[0].error.startswith("column at is ") and rows[0].error.endswith("which is no timestamp[us, tz=UTC]")
    assert rows[1].error.startswith("column n is 300, which is no uint8")
    assert rows[1].columns["dec"] is None and rows[0].columns["dec"] == decimal.Decimal("1.5")
    out = round_trip(tmp_path, reader, rows)
    assert out["same"].to_pylist() == [[("k", 1)], None] and out["n"].to_pylist() == [1, None]
    assert out["at"].cast(pa.int64()).to_pylist() == [None, 1_000_000]


@pytest.mark.parametrize("name", ["prompt", "id"])
def test_a_column_that_does_not_pass_through_has_no_declared_type(tmp_path, name):
    """A type for `id`, which is text, was silently not used."""
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "id": 1})
    with pytest.raises(ConfigError, match=f"^schema.{name}=int64: "):
        read(path, **{name: "int64"})

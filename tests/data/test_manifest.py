"""The manifest: written once by exactly one process, and a clear word when it is another job's."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os

import pyarrow as pa
import pytest

from ember.data.manifest import Manifest, encoded_schema
from ember.data.store import LocalStore, open_store
from ember.errors import UserError

ROUNDS, PROCESSES = 25, 3


def race(root, number, barrier, results, links):
    """In a process of its own: try to be first in each of many folders, and read what is there then."""
    if not links:

        def refuse(*_args):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        os.link = refuse
    for round_ in range(ROUNDS):
        folder = LocalStore(root / str(round_))
        barrier.wait(30)
        try:
            won = Manifest({"writer": number, "long": "x" * 20_000}, {}).create(folder)
            results.put((round_, number, won, Manifest.load(folder).fingerprint["writer"]))
        except Exception as error:
            results.put((round_, number, repr(error), None))


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_of_several_processes_exactly_one_creates_it(tmp_path, links):
    """Shards that start at once shared one draft: two could win, or one found its draft gone and failed."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(PROCESSES), context.Queue()
    for round_ in range(ROUNDS):
        (tmp_path / str(round_)).mkdir()
    racers = [
        context.Process(target=race, args=(tmp_path, number, barrier, results, links)) for number in range(PROCESSES)
    ]
    for racer in racers:
        racer.start()
    seen = [results.get(timeout=60) for _ in range(ROUNDS * PROCESSES)]
    for racer in racers:
        racer.join(30)
    for round_ in range(ROUNDS):
        mine = [entry for entry in seen if entry[0] == round_]
        winners = [number for _, number, won, _ in mine if won is True]
        assert len(winners) == 1, mine
        assert [found for *_, found in mine] == winners * PROCESSES
        assert [name for name in os.listdir(tmp_path / str(round_)) if "tmp" in name] == []


def test_it_is_durable_once_it_is_there(tmp_path, monkeypatch):
    """A link that no fsync of the folder follows: after a power cut there are parts without a manifest."""
    flushed = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (flushed.append((os.readlink(f"/proc/self/fd/{fd}"), os.listdir(tmp_path))), real(fd))
    )
    assert Manifest({}, {}).create(LocalStore(tmp_path))
    path, names = flushed[-1]
    assert path == str(tmp_path)
    assert "manifest.json" in names


def test_an_existing_one_is_left_alone(tmp_path):
    """A second job that replaces the first one's manifest makes its results look like its own."""
    folder = LocalStore(tmp_path)
    assert Manifest({"seed": 1}, {}).create(folder)
    assert not Manifest({"seed": 2}, {}).create(folder)
    assert Manifest.load(folder).fingerprint == {"seed": 1}
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_a_failing_disk_is_one_line(tmp_path, monkeypatch):
    """A traceback, or a draft that stays."""

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(UserError, match=r"can't write .*manifest\.json: No space left on device"):
        Manifest({}, {}).create(LocalStore(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"fingerprint": 1, "facts": {}}', "\xff"])
def test_a_file_that_is_no_manifest_is_named(tmp_path, text):
    """Somebody's own manifest.json as a KeyError with a traceback, or taken for an empty one and replaced."""
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"manifest\.json: not a manifest that ember wrote") as caught:
        Manifest.load(LocalStore(tmp_path))
    assert "\n" not in str(caught.value)


def check(old, new):
    with pytest.raises(UserError) as caught:
        Manifest(old, {}).check(new, "out")
    return str(caught.value)


def test_the_same_job_passes():
    """A resume refused because a fact (a version, a path) differs, or because of the order of keys."""
    Manifest({"a": 1, "b": [1.0]}, {"ember_version": "0"}).check({"b": [1], "a": 1}, "out")


def test_what_differs_is_named_with_both_values():
    """`another job`, and the user may guess which of thirty settings it was."""
    text = check({"seed": 0, "template": None, "same": 1}, {"seed": 7, "template": "Q: é\n", "same": 1})
    assert 'seed: 0 -> 7; template: null -> "Q: é\\n"' in text
    assert "same" not in text
    assert "choose another output, or force=true" in text
    assert "\n" not in text


def test_keys_that_one_side_lacks_count():
    """A setting that a newer version added, or dropped."""
    assert "new: null -> 2" in check({}, {"new": 2})
    assert "old: 1 -> null" in check({"old": 1}, {})


def test_many_differences_are_counted_not_listed():
    """A line of two thousand characters after a change of the model."""
    text = check({f"k{i}": 0 for i in range(9)}, {f"k{i}": 1 for i in range(9)})
    assert "k3: 0 -> 1; and 5 more" in text
    assert "k4" not in text


def hashes_with(ending):
    return ["a" * 64, "b" * 63 + ending]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x" * 200 + "1", "x" * 200 + "2"),
        (hashes_with("0"), hashes_with("1")),
        ("x" * 200, "x" * 201),
        ("1" + "x" * 200, "2" + "x" * 200),
        ("short", "x" * 200),
        (["a" * 64], ["a" * 64, "b" * 64]),
    ],
)
def test_long_values_are_cut_where_they_differ(old, new):
    """Two hashes or templates that differ only at the end, shown as two equal beginnings."""
    shown = check({"data": old}, {"data": new}).partition("data: ")[2].partition(")")[0]
    left, _, right = shown.partition(" -> ")
    assert left != right
    assert max(len(left), len(right)) <= 66


def test_what_json_files_cannot_hold_is_the_same_after_a_round_trip(tmp_path):
    """A lone surrogate in a template: an error, or a manifest that refuses the job that wrote it."""
    folder = LocalStore(tmp_path)
    fingerprint = {"template": "\ud800 漢", "sampling_columns": {"seed": "s"}}
    Manifest(fingerprint, {}).create(folder)
    Manifest.load(folder).check(fingerprint, "out")
    assert json.loads((tmp_path / "manifest.json").read_bytes())["facts"] == {}


def test_the_schema_is_kept_to_the_last_field(tmp_path):
    """JSON lines say nothing of time zones, units and widths: an export would guess them."""
    schema = pa.schema([pa.field("t", pa.timestamp("ns", "Europe/Paris")), ("n", pa.int8())], metadata={"a": "b"})
    assert Manifest({}, {"schema": encoded_schema(schema)}).schema.equals(schema, check_metadata=True)
    with pytest.raises(UserError, match="no schema"):
        _ = Manifest({}, {}).schema


def test_an_object_store_keeps_the_first_one_too():
    """The manifest of an output in a bucket, replaced by the next job."""
    folder = open_store("memory://test-manifest")
    assert Manifest({"seed": 1}, {}).create(folder)
    assert not Manifest({"seed": 2}, {}).create(folder)
    assert Manifest.load(folder).fingerprint == {"seed": 1}
    folder.remove("manifest.json")

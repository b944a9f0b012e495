"""Before the first step: whether this output is this job's, and what is left to do in it."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow.compute as pc

import ember
from ember.config import JobConfig
from ember.data.done import DoneRows, drop_error_rows, read_parts
from ember.data.folder import OutputFolder
from ember.data.formats import part_format
from ember.data.hashes import FileHashes
from ember.data.manifest import Manifest, encoded_schema
from ember.data.reader import PromptReader
from ember.data.summary import SummaryBuilder
from ember.data.text import without_credentials
from ember.data.work import Share, Work
from ember.data.writer import SCHEMA_VERSION, completions_schema
from ember.entrypoints.job_plan import JobPlan
from ember.errors import UserError
from ember.fingerprint import fingerprint


def claim(config: JobConfig, plan: JobPlan, reader: PromptReader, folder: OutputFolder, counts: SummaryBuilder) -> Work:
    """Check the output's manifest, or write it in a new output; the rows that are left to do.

    Args:
        folder: locked.
        counts: is told of every row that is there already.

    Raises:
        UserError: the output belongs to another job (names what differs), or a file can't be read.
        JobError: a file can't be written.
    """
    hashes = FileHashes(folder.store, verify=config.verify)
    now = fingerprint(config, plan, reader.files, hashes)
    if config.force:
        _start_over(now, config, folder)
    _check_manifest(now, _facts(config, plan, reader), folder, str(config.output))
    hashes.save()
    if config.retry_errors:
        drop_error_rows(folder.completions, part_format(config.output_format), folder.part_prefix)
    return _left(config, reader.num_rows, folder, counts)


def foresee(config: JobConfig, plan: JobPlan, reader: PromptReader, folder: OutputFolder) -> Work:
    """What `claim` would find; nothing is changed, and `folder` need not exist nor be locked.

    Raises:
        UserError: as `claim` does.
    """
    folder.check()
    found = None if config.force else Manifest.load(folder.store)
    if found is not None:
        hashes = FileHashes(folder.store, verify=config.verify)
        found.check(fingerprint(config, plan, reader.files, hashes), str(config.output))
        return _left(config, reader.num_rows, folder, SummaryBuilder())
    if not config.force:
        _refuse_parts(folder, str(config.output))
    share = Share.of(config, reader.num_rows)
    return Work(share, DoneRows(reader.num_rows, share.shard, share.num_shards))


def _left(config: JobConfig, num_input_rows: int, folder: OutputFolder, counts: SummaryBuilder) -> Work:
    share = Share.of(config, num_input_rows)
    done = DoneRows(num_input_rows, share.shard, share.num_shards)
    for part, keys in read_parts(folder.completions, part_format(config.output_format), folder.part_prefix):
        if config.retry_errors:  # `claim` has dropped them
            keys = keys.filter(pc.not_equal(keys["finish_reason"], "error"))  # noqa: PLW2901
        done.add(keys, f"{folder.completions.shown}/{part}")
        counts.add_committed(share.within(keys))
    return Work(share, done)


def _start_over(now: dict[str, Any], config: JobConfig, folder: OutputFolder) -> None:
    """Move old results aside. A shard leaves what its fellows of the same job wrote, perhaps a moment ago."""
    aside = folder.move_aside(own_only=config.num_shards > 1 and _belongs(now, folder))
    if aside is not None:
        print(f"force=true: the old results are now in {aside}", file=sys.stderr)


def _belongs(now: dict[str, Any], folder: OutputFolder) -> bool:
    try:
        found = Manifest.load(folder.store)
    except UserError:
        return False
    return found is not None and not found.changed(now)


def _check_manifest(now: dict[str, Any], facts: dict[str, Any], folder: OutputFolder, output: str) -> None:
    found = Manifest.load(folder.store)
    if found is None:
        _refuse_parts(folder, output)
        if Manifest(now, facts).create(folder.store):
            return
        found = Manifest.load(folder.store)  # another shard was first
    assert found is not None
    found.check(now, output)


def _refuse_parts(folder: OutputFolder, output: str) -> None:
    if folder.has_parts():
        raise UserError(f"output={output} holds completions but no manifest.json; choose another output")


def _facts(config: JobConfig, plan: JobPlan, reader: PromptReader) -> dict[str, Any]:
    return {
        "ember_version": ember.__version__,
        "schema_version": SCHEMA_VERSION,
        **plan.facts(),
        "data": [without_credentials(file) for file in reader.files],
        "num_input_rows": reader.num_rows,
        "schema": encoded_schema(completions_schema(reader.schema)),
    }

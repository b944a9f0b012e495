"""Before the first step: whether this output is this job's, and what is left to do in it."""

from __future__ import annotations

import sys
from typing import Any

import ember
from ember.config import JobConfig
from ember.data.done import DoneRows, drop_error_rows, read_parts
from ember.data.folder import OutputFolder
from ember.data.hashes import FileHashes
from ember.data.manifest import Manifest
from ember.data.reader import PromptReader
from ember.data.summary import SummaryBuilder
from ember.data.work import Share, Work
from ember.data.writer import SCHEMA_VERSION
from ember.entrypoints.plan import EnginePlan
from ember.errors import UserError
from ember.fingerprint import fingerprint


def claim(
    config: JobConfig, plan: EnginePlan, reader: PromptReader, folder: OutputFolder, counts: SummaryBuilder
) -> Work:
    """Check the output's manifest, or write it in a new output; the rows that are left to do.

    Args:
        folder: locked.
        counts: is told of every row that is there already.

    Raises:
        UserError: the output belongs to another job (names what differs), or a file can't be read or written.
    """
    if config.force and (aside := folder.move_aside()) is not None:
        print(f"force=true: the old results are now in {aside}", file=sys.stderr)
    hashes = FileHashes(folder.hashes_path, verify=config.verify)
    now = fingerprint(config, plan, reader.files, hashes)
    _check_manifest(now, _facts(config, plan, reader), folder, str(config.output))
    hashes.save()
    if config.retry_errors:
        drop_error_rows(folder.completions_dir, folder.part_prefix)
    done = DoneRows(reader.num_rows)
    for path, keys in read_parts(folder.completions_dir, folder.part_prefix):
        done.add(keys["row_index"], path)
        counts.add_committed(keys)
    return Work(Share.of(config, reader.num_rows), done)


def _check_manifest(now: dict[str, Any], facts: dict[str, Any], folder: OutputFolder, output: str) -> None:
    found = Manifest.load(folder.manifest_path)
    if found is None:
        if folder.has_parts():
            raise UserError(f"output={output} holds completions but no manifest.json; choose another output")
        if Manifest(now, facts).create(folder.manifest_path):
            return
        found = Manifest.load(folder.manifest_path)  # another shard was first
    assert found is not None
    found.check(now, output)


def _facts(config: JobConfig, plan: EnginePlan, reader: PromptReader) -> dict[str, Any]:
    return {
        "ember_version": ember.__version__,
        "schema_version": SCHEMA_VERSION,
        "model": plan.folder.name,
        "model_folder": str(plan.folder.path),
        "data": reader.files,
        "num_input_rows": reader.num_rows,
    }

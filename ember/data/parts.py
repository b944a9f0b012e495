"""The names of parts: `part-00000.parquet`, of a shard `part-s003of008-00000.parquet`."""

from __future__ import annotations

import re

from ember.data.store import Store

PREFIX = "part-"
_NAME = re.compile(r"(part-(?:s\d+of\d+-)?)(\d+)(\.\w+)")


def part_prefix(tag: str = "") -> str:
    """How the parts of a job (or of the shard `tag`) are named before the number."""
    return f"{PREFIX}{tag}-" if tag else PREFIX


def part_name(prefix: str, number: int, suffix: str) -> str:
    """The name of one part."""
    return f"{prefix}{number:05d}{suffix}"


def is_part(name: str, prefix: str) -> bool:
    """Whether a file is a part of that prefix."""
    match = _NAME.fullmatch(name)
    return match is not None and match[1] == prefix


def part_numbers(folder: Store, suffix: str, prefix: str | None = None) -> dict[str, int]:
    """The parts that are there with their numbers: in the order they were written, shard by shard.

    Args:
        prefix: of the job or shard that is asked about; None for all.

    Raises:
        OSError: the folder can't be read.
    """
    found = [match for name in folder.names() if (match := _NAME.fullmatch(name)) and match[3] == suffix]
    wanted = [match for match in found if prefix is None or match[1] == prefix]
    return {match[0]: int(match[2]) for match in sorted(wanted, key=lambda match: (match[1], int(match[2])))}

"""How many rows have an id that another row had before: allowed, since a row's key is its index, but worth saying."""

from __future__ import annotations

from collections.abc import Iterable


class DuplicateIds:
    """Counts rows whose id occurred before; rows without an id never count. The order of rows makes no difference.

    It keeps 64 bits of each distinct id, about 70 MB for a million. Two different ids of ten million share these with
    a probability of about 3 in a million.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.count = 0

    def add(self, ids: Iterable[str | None]) -> None:
        """Take the ids of rows."""
        for row_id in ids:
            if row_id is None:
                continue
            key = hash(row_id)
            if key in self._seen:
                self.count += 1
            self._seen.add(key)

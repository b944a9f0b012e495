"""A table in plain text, as the benchmarks print it: each row when it is known, since a row may take minutes."""

from __future__ import annotations

LEAST_WIDTH = 7


class Table:
    """Columns by name, a name's length being its column's width; text to the left, numbers to the right."""

    def __init__(self, *names: str) -> None:
        self._widths = [max(LEAST_WIDTH, len(name)) for name in names]
        self._left = [name.endswith(" ") for name in names]
        header = self.line(names)
        print(header, "-" * len(header), sep="\n", flush=True)

    def add(self, *cells: object) -> None:
        """Print a row; a row shorter than the header ends in a note that may be as long as it likes."""
        print(self.line(cells), flush=True)

    def line(self, cells: tuple[object, ...]) -> str:
        """The cells in their columns. Columns whose name ends in a space are set to the left."""
        columns = zip(cells, self._widths, self._left, strict=False)
        return "  ".join(str(c).ljust(width) if left else str(c).rjust(width) for c, width, left in columns).rstrip()

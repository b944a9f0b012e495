"""A table in plain text, as the benchmarks print it."""

from __future__ import annotations


class Table:
    """Columns by name; text to the left, everything else to the right."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._rows: list[tuple[object, ...]] = []

    def add(self, *cells: object) -> None:
        """Add a row; a row shorter than the header ends in a note that may be as long as it likes."""
        self._rows.append(cells)

    def lines(self) -> list[str]:
        """Header, rule and rows."""
        widths = [len(name) for name in self._names]
        for row in self._rows:
            cells = row if len(row) == len(widths) else row[:-1]
            for i, cell in enumerate(cells):
                widths[i] = max(widths[i], len(str(cell)))
        header = self._line(self._names, widths)
        return [header, "-" * len(header), *(self._line(row, widths) for row in self._rows)]

    def show(self) -> None:
        """Print it."""
        print("\n".join(self.lines()), flush=True)

    def _line(self, row: tuple[object, ...], widths: list[int]) -> str:
        cells = [_aligned(str(cell), width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=False))]
        return "  ".join(cells).rstrip()


def _aligned(text: str, width: int, index: int) -> str:
    return text.ljust(width) if index == 0 else text.rjust(width)

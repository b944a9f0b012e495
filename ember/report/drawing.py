"""How pictures look, and how they become PNG and SVG. The only module that imports matplotlib.

The colours are Okabe and Ito's (https://jfly.uni-koeln.de/color), which colour-blind people tell apart; lines also
differ in style and bars in hatching, so that a black-and-white print can be read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ember.errors import UserError

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, BLACK = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"),
)
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, BLACK)
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo")
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "ember",
    "figure.dpi": 100,
}
SIZE, TALL = (6.4, 2.9), (6.4, 3.6)
"""Of a picture of one and of two plots above each other, in inches."""
PNG_DPI = 150


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn plot.

    Attributes:
        name: of its file, without the ending.
        title: a line above it.
        alt: what it shows, in words with numbers, for those who can't see it.
    """

    name: str
    title: str
    alt: str
    png: bytes
    svg: bytes


def picture(name: str, title: str, alt: str, draw: Callable[[Any], None], size: tuple[float, float] = SIZE) -> Picture:
    """Draw on a figure.

    Raises:
        UserError: matplotlib is not installed.
    """
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        png = _saved(figure, "png")
        figure.set_layout_engine("none")  # it is laid out now, and that takes a third of the time
        return Picture(name, title, alt, png, _saved(figure, "svg"))


def check_drawing() -> None:
    """Nothing, if pictures can be drawn.

    Raises:
        UserError: matplotlib is not installed.
    """
    with _style():
        pass


def thousands(axis: Any) -> None:
    """Write an axis' numbers as 12,000."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def whole(axis: Any) -> None:
    """Mark an axis at whole numbers only, written as 12,000."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins="auto"))
    thousands(axis)


def percent(axis: Any) -> None:
    """Write an axis' shares as 12%."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def times(axis: Any) -> None:
    """Write an axis' seconds as 12 ms or 1.2 s."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter("s"))


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'ember-batch[report]'") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _saved(figure: Any, form: str) -> bytes:
    file = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {}
    figure.savefig(file, format=form, dpi=PNG_DPI, metadata=metadata)
    return file.getvalue()

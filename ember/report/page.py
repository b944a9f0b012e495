"""One self-contained HTML page: no script, no font and no file from elsewhere; it prints."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from ember.report.drawing import Picture

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff; margin: 0 auto; max-width: 76rem;
  padding: 1rem 1.5rem 4rem; }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #bbb; }
p { margin: .4rem 0; max-width: 60rem; }
.lead { font-size: 1.05rem; }
.answer { font-size: 1.2rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .45rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { font-weight: 600; }
thead th { border-bottom: 2px solid #888; }
.number { text-align: right; white-space: nowrap; }
thead .number { white-space: normal; vertical-align: bottom; }
.best td, .best th { background: #e8f2fa; font-weight: 600; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; break-inside: avoid; }
figure img { width: 100%; height: auto; display: block; }
figure b { display: block; }
figcaption { font-size: .87rem; color: #333; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 1rem; padding: .5rem .7rem; background: #f5f5f5;
  border-left: 3px solid #999; font-size: .85rem; }
pre b { font-weight: inherit; background: #dcecf8; }
code { font-size: .87rem; overflow-wrap: anywhere; }
.bad { color: #a33a00; font-weight: 600; }
.good { color: #00643f; font-weight: 600; }
@media print { body { max-width: none; padding: 0; font-size: 9pt; } .lead { font-size: 10pt; }
  .answer { font-size: 12pt; }
  .scroll { overflow: visible; } table { font-size: 6.5pt; } th, td { padding: .1rem .2rem; }
  .pictures { grid-template-columns: 1fr 1fr; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""


@dataclass(slots=True)
class Page:
    """A page that is put together from top to bottom; all text that it is given is escaped."""

    title: str
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """A section begins."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind` is a class of the style sheet."""
        self._parts.append(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def facts(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """A table of names, values and meanings."""
        lines = [
            f'<tr><th scope="row">{escape(name)}</th><td class="number">{escape(value)}</td>'
            f"<td>{escape(meaning)}</td></tr>"
            for name, value, meaning in rows
        ]
        self._table("", "".join(lines))

    def table(
        self, head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1, best: Collection[int] = ()
    ) -> None:
        """A table: the first `texts` columns hold text, the others numbers; the rows `best` stand out."""
        heads = [f'<th scope="col"{_numeric(i, texts)}>{escape(cell)}</th>' for i, cell in enumerate(head)]
        lines = []
        for number, row in enumerate(rows):
            cells = [f"<td{_numeric(i, texts)}>{escape(cell)}</td>" for i, cell in enumerate(row)]
            mark = ' class="best"' if number in best else ""
            lines.append(f"<tr{mark}>{''.join(cells)}</tr>")
        self._table(f"<thead><tr>{''.join(heads)}</tr></thead>", "".join(lines))

    def pictures(self, pictures: Iterable[Picture]) -> None:
        """Pictures side by side, as many as fit."""
        figures = "".join(_figure(p) for p in pictures)
        self._parts.append(f'<div class="pictures">{figures}</div>')

    def sample(self, name: str, before: str, text: str) -> None:
        """A text with what stood before it; the text itself is marked."""
        self._parts.append(f"<div><code>{escape(name)}</code><pre>{escape(before)}<b>{escape(text)}</b></pre></div>")

    def _table(self, head: str, body: str) -> None:
        self._parts.append(f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>')

    def html(self) -> str:
        """The whole page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            "style-src 'unsafe-inline'\">"
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(self.title)}</h1>\n"
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )


def _numeric(column: int, texts: int) -> str:
    return "" if column < texts else ' class="number"'


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.svg).decode()
    return (
        f'<figure id="{escape(picture.name)}"><b>{escape(picture.title)}</b>'
        f'<img alt="{escape(f"{picture.title}. {picture.alt}")}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(picture.alt)}</figcaption></figure>"
    )

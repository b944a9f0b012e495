"""The verb `ember report OUTPUT|SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence

from ember.entrypoints.verb import VerbParser, spoken

_DESCRIPTION = "Write a page (report/report.html) and pictures of what a job did; of a sweep, which setting is best."


def main(argv: Sequence[str]) -> int:
    """Run `ember report` with these words; returns the exit code. Mistakes are one line on stderr."""
    return spoken(lambda: _report(argv))


def _report(argv: Sequence[str]) -> None:
    parser = VerbParser(prog="ember report", description=_DESCRIPTION)
    parser.add_argument("output", metavar="OUTPUT", help="the output of a job, or the folder of a sweep; or a URL")
    parser.add_argument("--to", metavar="FOLDER", help="where to write; by default the folder `report` in OUTPUT")
    parser.add_argument("--sort", metavar="NUMBER", help="of a sweep: what decides (default: tokens_per_s)")
    words = parser.parse_args(list(argv))
    from ember.report.report import report  # pyarrow is slow to import

    print(report(words.output, sort=words.sort, to=words.to))

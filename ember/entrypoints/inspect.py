"""The verb `ember inspect OUTPUT`."""

from __future__ import annotations

from collections.abc import Sequence

from ember.entrypoints.verb import VerbParser, spoken

_DESCRIPTION = "Show what an output holds: counts, errors, a few completions, settings, files."


def main(argv: Sequence[str]) -> int:
    """Run `ember inspect` with these words; returns the exit code. Mistakes are one line on stderr."""
    return spoken(lambda: _inspect(argv))


def _inspect(argv: Sequence[str]) -> None:
    parser = VerbParser(prog="ember inspect", description=_DESCRIPTION)
    parser.add_argument("output", metavar="OUTPUT", help="the output of a job: a folder or a URL")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="completions to show (default: 3)")
    words = parser.parse_args(list(argv))
    if words.samples < 0:
        parser.error(f"--samples {words.samples}: must be 0 or more")
    from ember.report.terminal import inspect_output  # pyarrow is slow to import

    print(inspect_output(words.output, num_samples=words.samples))

"""The verb `ember top OUTPUT`."""

from __future__ import annotations

from collections.abc import Sequence

from ember.entrypoints.verb import VerbParser, spoken

_DESCRIPTION = "Follow a running job from another terminal, by its files; ends when the job does."


def main(argv: Sequence[str]) -> int:
    """Run `ember top` with these words; returns the exit code. Mistakes are one line on stderr."""
    return spoken(lambda: _top(argv))


def _top(argv: Sequence[str]) -> None:
    parser = VerbParser(prog="ember top", description=_DESCRIPTION)
    parser.add_argument("output", metavar="OUTPUT", help="the output of a job: a folder or a URL")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look once")
    words = parser.parse_args(list(argv))
    if not 0 < words.every < 86_400:
        parser.error(f"--every {words.every}: must be more than 0 and less than a day")
    from ember.report.follow import follow  # pyarrow is slow to import

    follow(words.output, every_s=words.every, once=words.once)

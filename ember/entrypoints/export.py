"""The verb `ember export OUTPUT --to FILE`: its words, and what it says."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ember.entrypoints.verb import VerbParser
from ember.errors import UserError

CLEAN, MISTAKE = 0, 2
_DESCRIPTION = "Write the completions of an output, of all its shards, into one file; it appears when it is whole."


def main(argv: Sequence[str]) -> int:
    """Run `ember export` with these words; returns the exit code. Mistakes are one line on stderr."""
    try:
        words = _parser().parse_args(list(argv))
        from ember.data.export import export  # pyarrow is slow to import

        done = export(
            words.output, words.to, order=words.order, form=words.format, force=words.force, partial=words.partial
        )
    except UserError as error:
        line = str(error).replace("\n", "\\n")
        print(f"error: {line}", file=sys.stderr)
        return MISTAKE
    missing = f" ({done.num_missing:,} rows are missing)" if done.num_missing else ""
    print(f"{done.num_rows:,} rows in {words.to}{missing}")
    return CLEAN


def _parser() -> VerbParser:
    parser = VerbParser(prog="ember export", description=_DESCRIPTION)
    parser.add_argument("output", metavar="OUTPUT", help="the output of a job: a folder or a URL")
    parser.add_argument("--to", required=True, metavar="FILE", help="a local file; its ending says the format")
    parser.add_argument("--format", choices=("jsonl", "parquet", "csv", "openai_batch"), help="instead of the ending's")
    parser.add_argument(
        "--order", choices=("input", "as_written"), default="input", help="of the rows; by default that of the input"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parser.add_argument("--partial", action="store_true", help="go on although rows are missing")
    return parser

"""The verb `ember export OUTPUT --to FILE`: its words, and what it says."""

from __future__ import annotations

from argparse import Namespace

from ember.entrypoints.verb import Verb, VerbParser


def _options(parser: VerbParser) -> None:
    parser.add_argument("--to", required=True, metavar="FILE", help="a local file; its ending says the format")
    parser.add_argument("--format", choices=("jsonl", "parquet", "csv", "openai_batch"), help="instead of the ending's")
    parser.add_argument(
        "--order", choices=("input", "as_written"), default="input", help="of the rows; by default that of the input"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parser.add_argument("--partial", action="store_true", help="go on although rows are missing")


def _export(parser: VerbParser, words: Namespace) -> None:
    from ember.data.export import export  # pyarrow is slow to import

    done = export(
        words.output, words.to, order=words.order, form=words.format, force=words.force, partial=words.partial
    )
    missing = f" ({done.num_missing:,} rows are missing)" if done.num_missing else ""
    print(f"{done.num_rows:,} rows in {words.to}{missing}")


EXPORT = Verb(
    name="export",
    description="Write the completions of an output, of all its shards, into one file; it appears when it is whole.",
    output="the output of a job: a folder or a URL",
    options=_options,
    run=_export,
)

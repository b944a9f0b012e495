"""The verbs of outputs: `ember export`, `inspect`, `top`, `report`. What they do is slow to import: later."""

from __future__ import annotations

from argparse import Namespace

from ember.entrypoints.verb import Verb, VerbParser

_OF_A_JOB = "the output of a job: a folder or a URL"


def _export_options(parser: VerbParser) -> None:
    parser.add_argument("--to", required=True, metavar="FILE", help="a local file; its ending says the format")
    parser.add_argument("--format", choices=("jsonl", "parquet", "csv", "openai_batch"), help="instead of the ending's")
    parser.add_argument(
        "--order", choices=("input", "as_written"), default="input", help="of the rows; by default that of the input"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parser.add_argument("--partial", action="store_true", help="go on although rows are missing")


def _export(parser: VerbParser, words: Namespace) -> None:
    from ember.data.export import export

    done = export(
        words.output, words.to, order=words.order, form=words.format, force=words.force, partial=words.partial
    )
    missing = f" ({done.num_missing:,} rows are missing)" if done.num_missing else ""
    print(f"{done.num_rows:,} rows in {words.to}{missing}")


def _inspect_options(parser: VerbParser) -> None:
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="completions to show (default: 3)")


def _inspect(parser: VerbParser, words: Namespace) -> None:
    if words.samples < 0:
        parser.error(f"--samples {words.samples}: must be 0 or more")
    from ember.report.terminal import inspect_output

    print(inspect_output(words.output, num_samples=words.samples))


def _top_options(parser: VerbParser) -> None:
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look once")


def _top(parser: VerbParser, words: Namespace) -> None:
    if not 0 < words.every < 86_400:
        parser.error(f"--every {words.every}: must be more than 0 and less than a day")
    from ember.report.follow import follow

    follow(words.output, every_s=words.every, once=words.once)


def _report_options(parser: VerbParser) -> None:
    parser.add_argument("--to", metavar="FOLDER", help="where to write; by default the folder `report` in OUTPUT")
    parser.add_argument(
        "--sort", metavar="NUMBER", help="of a sweep: what decides (default: its jobs' report_sort, or tokens_per_s)"
    )


def _report(parser: VerbParser, words: Namespace) -> None:
    from ember.report.report import report

    print(report(words.output, sort=words.sort, to=words.to))


EXPORT = Verb(
    name="export",
    description="Write the completions of an output, of all its shards, into one file; it appears when it is whole.",
    output=_OF_A_JOB,
    options=_export_options,
    run=_export,
)
INSPECT = Verb(
    name="inspect",
    description="Show what an output holds: counts, errors, a few completions, settings, files.",
    output=_OF_A_JOB,
    options=_inspect_options,
    run=_inspect,
)
TOP = Verb(
    name="top",
    description="Follow a running job from another terminal, by its files; ends when the job does.",
    output=_OF_A_JOB,
    options=_top_options,
    run=_top,
)
REPORT = Verb(
    name="report",
    description="Write a page (report/report.html) and pictures of what a job did; of a sweep, which setting to use.",
    output="the output of a job, or the folder of a sweep; or a URL",
    options=_report_options,
    run=_report,
)
OF_OUTPUTS = {verb.name: verb for verb in (EXPORT, INSPECT, REPORT, TOP)}

"""ember's speed: a row a workload and configuration, with the share of the machine's roof and of each part.

    python -m tests.benchmarks.throughput
    python -m tests.benchmarks.throughput --workload w1 --configuration fp32 --configuration int8 --quick

`roof` is the time that the arithmetic and the reading of K/V take at the rates that `machine` measures, all in
float32, over the time taken: other formats can pass 100%. The columns after it split the time of the median run.
"""

from __future__ import annotations

import argparse
from typing import Any

from ember.errors import UserError
from tests.benchmarks.arguments import add_common, repeats, requests_of
from tests.benchmarks.costs import Work
from tests.benchmarks.machine import Machine
from tests.benchmarks.models import network_of
from tests.benchmarks.runs import SPLIT_NAMES, Bench, Run, median_run
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import NAMES

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 mixed": {"scheduler": "mixed"},
    "fp32 static": {"scheduler": "static"},
    "fp32 one thread": {"num_threads": 1},
    "int8 weights": {"weights": "int8"},
    "fp16 weights": {"weights": "fp16"},
    "int8 KV": {"kv_dtype": "int8"},
    "int8 weights and KV": {"weights": "int8", "kv_dtype": "int8"},
    "w8a8 weights, int8 KV": {"weights": "w8a8", "kv_dtype": "int8"},
}
"""Settings of ember by name; one that this version doesn't know is skipped, and the table says so."""


def main(argv: list[str] | None = None) -> None:
    """A row a workload and configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--workload", action="append", choices=NAMES, help="may be given more than once; default: all")
    parser.add_argument("--configuration", action="append", choices=CONFIGURATIONS, help="the same; default: all")
    options = parser.parse_args(argv)
    machine = Machine.measure()
    print(f"{options.model} on {machine}")
    table = Table("workload ", "configuration        ", "tok/s", "    min..max", "roof", "steps", *SPLIT_NAMES)
    for name in options.workload or NAMES:
        roof = machine.seconds(Work.of(network_of(options.model), requests_of(name, options)))
        for configuration in options.configuration or CONFIGURATIONS:
            table.add(name, configuration, *_measured(name, CONFIGURATIONS[configuration], roof, options))


def _measured(workload: str, settings: dict[str, Any], roof: float, options: argparse.Namespace) -> list[str]:
    requests = requests_of(workload, options)
    try:
        bench = Bench(options.model, **settings)
    except UserError as error:
        return [f"skipped: {error}"]
    bench.warm_up(requests)
    return _cells([bench.run(requests) for _ in range(repeats(options))], roof)


def _cells(runs: list[Run], roof: float) -> list[str]:
    run = median_run(runs)
    extremes = f"{min(r.rate for r in runs):.1f}..{max(r.rate for r in runs):.1f}"
    shares = [f"{share:.1%}" for share in run.split.shares()]
    return [f"{run.rate:.1f}", extremes, f"{roof / run.seconds:.0%}", str(len(run.steps)), *shares]


if __name__ == "__main__":
    main()

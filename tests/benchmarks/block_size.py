"""Speed and use of the KV pool by block size, in a pool of the same number of tokens.

    python -m tests.benchmarks.block_size

`filled` is the mean share of the slots in used blocks that hold a token (`kv_utilization` of the steps table).
"""

from __future__ import annotations

import argparse
import statistics

from tests.benchmarks.arguments import add_common, repeats, requests_of
from tests.benchmarks.runs import Bench, median_run
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import NAMES

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def main(argv: list[str] | None = None) -> None:
    """A row a block size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, repeat=1, every=8)
    parser.add_argument("--workload", default="w1", choices=NAMES)
    parser.add_argument("--size", type=int, action="append", help="may be given more than once; default: 1 .. 1024")
    parser.add_argument("--pool", default="65536tok", help="default: %(default)s")
    options = parser.parse_args(argv)
    requests = requests_of(options.workload, options)
    print(f"{options.model}, {options.workload}, {len(requests)} requests, pool_size={options.pool}")
    table = Table("block size", "tok/s", "attention", "filled", "most blocks used", "preempted")
    for size in options.size or SIZES:
        bench = Bench(options.model, block_size=size, pool_size=options.pool)
        bench.warm_up(requests)
        run = median_run([bench.run(requests) for _ in range(repeats(options))])
        filled = statistics.mean(step.kv_utilization for step in run.steps)
        used, preempted = max(s.blocks_used for s in run.steps), sum(s.num_preempted for s in run.steps)
        share = run.split.attention / run.seconds
        table.add(size, f"{run.rate:.1f}", f"{share:.1%}", f"{filled:.1%}", f"{used:,}", preempted)


if __name__ == "__main__":
    main()

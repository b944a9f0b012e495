"""The Hydra entry point: `python -m ember.run data=prompts.jsonl block_size=16`. Light, so that Ctrl-C is met early."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ember.interrupt import or_interrupted


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job, or a sweep of jobs, from command-line arguments; returns the exit code."""

    def start() -> int:
        from ember.launch.start import main as run  # hydra is slow to import

        return run(argv)

    return or_interrupted(start)


if __name__ == "__main__":
    sys.exit(main())

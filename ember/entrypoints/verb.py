"""What the verbs of `ember` share: words are parsed and mistakes said the same way."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import NoReturn

from ember.errors import JobError, UserError

CLEAN, FAILED, MISTAKE = 0, 1, 2


class VerbParser(argparse.ArgumentParser):
    """Raises what it dislikes."""

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser.

        Raises:
            UserError: always.
        """
        raise UserError(f"{self.prog.removeprefix('ember ')}: {message} (see {self.prog} --help)")


def spoken(run: Callable[[], None]) -> int:
    """Run a verb; returns the exit code. What the user can mend is one line on stderr."""
    try:
        with contextlib.suppress(BrokenPipeError):  # `ember inspect ... | head`
            run()
    except UserError as error:
        line = str(error).replace("\n", "\\n")
        print(f"error: {line}", file=sys.stderr)
        return FAILED if isinstance(error, JobError) else MISTAKE
    return CLEAN

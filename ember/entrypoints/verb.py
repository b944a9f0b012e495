"""What the verbs of `ember` share: words are parsed and mistakes said the same way."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Verb:
    """`ember NAME OUTPUT [options]`: something done with an output.

    Attributes:
        output: what OUTPUT may be, for the help.
        options: adds the others to a parser.
        run: does it; what is wrong with the words it hands to the parser's `error`.
    """

    name: str
    description: str
    output: str
    options: Callable[[VerbParser], None]
    run: Callable[[VerbParser, argparse.Namespace], None]

    def __call__(self, argv: Sequence[str]) -> int:
        """Run it with these words; returns the exit code. What the user can mend is one line on stderr."""
        parser = VerbParser(prog=f"ember {self.name}", description=self.description)
        parser.add_argument("output", metavar="OUTPUT", help=self.output)
        self.options(parser)
        try:
            with contextlib.suppress(BrokenPipeError):  # `ember inspect ... | head`
                self.run(parser, parser.parse_args(list(argv)))
        except UserError as error:
            line = str(error).replace("\n", "\\n")
            print(f"error: {line}", file=sys.stderr)
            return FAILED if isinstance(error, JobError) else MISTAKE
        return CLEAN

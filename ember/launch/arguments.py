"""The command line, read once before Hydra does: flags and overrides in any order, mistakes in one line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.utils import get_args_parser

from ember.errors import UserError
from ember.launch.keys import is_group
from ember.launch.places import override_key


@dataclass(frozen=True, slots=True)
class Arguments:
    """Flags and overrides as typed, and the flags that ember looks at itself."""

    flags: list[str]
    overrides: list[str]
    help: bool = False
    version: bool = False
    config_dir: str | None = None
    config_name: str | None = None

    @property
    def files(self) -> list[str]:
        """The job file and the choices of groups by their files' names (`sampling/mine`)."""
        choices = [o.replace("=", "/", 1) for o in self.overrides if is_group(override_key(o))]
        return [*([self.config_name.removesuffix(".yaml")] if self.config_name else []), *choices]

    @property
    def words(self) -> list[str]:
        """What Hydra gets: it takes overrides only in one piece."""
        return [*self.flags, *self.overrides]

    @staticmethod
    def parse(argv: Sequence[str]) -> Arguments:
        """Read the words of a command line.

        Raises:
            UserError: an unknown flag, or a flag without its value.
        """
        if "--version" in argv:  # the parser would answer with Hydra's
            return Arguments([], [], version=True)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                options = get_args_parser().parse_intermixed_args(list(argv))
        except SystemExit:
            raise UserError(f"{said.getvalue().splitlines()[-1].partition('error: ')[2]} (see --help)") from None
        flags = [word for word in argv if word not in options.overrides]
        return Arguments(
            flags,
            options.overrides,
            help=options.help,
            config_dir=options.config_dir,
            config_name=options.config_name,
        )

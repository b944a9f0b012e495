"""Renders chat templates in a process of its own: `python chat_worker.py`, JSON lines in and out.

A template is a stranger's program. Jinja's sandbox keeps it from the machine, and this process keeps it from taking all
of the machine's time and memory: no loop or string that it makes outlives the limits below. Needs only jinja2.

The first line is `{"source": ..., "now": ISO date or null, "cpu_seconds": most for one line}`, each further one the
template's variables; every line is answered with `{"text": ...}` or `{"error": ...}`. A template that runs out of time
ends the process.

Variables, filters and functions are those of transformers' `apply_chat_template`, except that `strftime_now` is only
there with a date, and tells only that: a prompt must not depend on the day on which it is made.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
MOST_CHARS = 16 << 20


class GenerationBlocks(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body's statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, now: str | None) -> jinja2.Template:
    """The template with transformers' environment around it.

    Raises:
        jinja2.TemplateError: it is no template.
    """
    extensions = [GenerationBlocks, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    if now is not None:
        environment.globals["strftime_now"] = datetime.fromisoformat(now).strftime
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The prompt.

    Raises:
        Exception: of whatever kind the template ends in.
    """
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_CHARS:
            raise jinja2.TemplateError(f"it makes a prompt of more than {MOST_CHARS:,} characters")
    return "".join(pieces)


def main() -> None:
    """Answer lines until there are no more."""
    _limit_memory()
    setup = json.loads(sys.stdin.readline())
    template: list[jinja2.Template] = []

    def start() -> str:
        template.append(compile_template(setup["source"], setup["now"]))
        return ""

    _answer(start, setup["cpu_seconds"])
    for line in sys.stdin:
        variables = json.loads(line)
        _answer(lambda variables=variables: render(template[0], variables), setup["cpu_seconds"])  # type: ignore[misc]


def _answer(work: Callable[[], str], seconds: float) -> None:
    """Do a piece of work within the time that it may take, and say what came of it."""
    _set_clock(seconds)
    try:
        reply = {"text": work()}
    except Exception as error:
        name = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        reply = {"error": name + " ".join(str(error).split())[:300]}
    _set_clock(0.0)
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _set_clock(seconds: float) -> None:
    """The system ends the process when it has computed so long, whatever it is in; 0 stops the clock."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (ImportError, OSError, ValueError):  # a system without such limits
        pass


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()

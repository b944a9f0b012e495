"""The `ember` command: a first word that is a verb, or overrides for a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import ember
from ember.entrypoints.verbs import OF_OUTPUTS
from ember.interrupt import or_interrupted
from ember.launch.help import HELP
from ember.launch.outcome import CLEAN, MISTAKE

VERBS = ("run", "plan", "serve", *OF_OUTPUTS, "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return or_interrupted(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(words: list[str]) -> int:
    if not words:
        print(HELP)
        return CLEAN
    verb = words.pop(0) if _is_verb(words[0]) else "run"
    if verb == "version":
        print(f"ember {ember.__version__}")
        return CLEAN
    if verb == "serve":
        from ember.entrypoints.serve import serve

        return serve(words)
    if verb in OF_OUTPUTS:
        return OF_OUTPUTS[verb](words)
    if verb not in ("run", "plan"):
        print(
            f"error: {verb}: no such verb (there are: {', '.join(VERBS)}); settings are written key=value, "
            "as in data=prompts.jsonl",
            file=sys.stderr,
        )
        return MISTAKE
    from ember.run import main as run

    return run([*words, "plan=true"] if verb == "plan" else words)


def _is_verb(word: str) -> bool:
    return "=" not in word and not word.startswith(("-", "+", "~"))

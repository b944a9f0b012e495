"""ember itself, in a process of its own as the peers are. Options: settings, any of the engine's."""

from __future__ import annotations

from typing import Any

from worker import Requests, Run, serve


def load(options: dict[str, Any]) -> tuple[str, Run]:
    """An LLM with the settings asked for."""
    from ember import LLM, SamplingParams, __version__

    llm = LLM(options["model"], **options["settings"])

    def run(requests: Requests) -> list[list[int]]:
        llm.reset_prefix_cache()  # each round is a job of its own
        params = [SamplingParams(max_tokens=r["out"], ignore_eos=True) for r in requests]
        return [output.token_ids for output in llm.generate([r["prompt"] for r in requests], params)]

    return f"ember {__version__}", run


if __name__ == "__main__":
    serve(load)

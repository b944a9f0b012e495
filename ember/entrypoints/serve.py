"""`ember serve` and `ember-serve`: load the model, listen, and stop in order."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ember.errors import UserError
from ember.interrupt import or_interrupted
from ember.threads import sleep_when_idle

if TYPE_CHECKING:
    from ember.serving.settings import ServerConfig

CLEAN, MISTAKE = 0, 2
SWITCH_S = 0.0001
"""After this the event loop gives Python's lock to the engine's thread, which asks for it after every kernel."""
HELP = """\
ember serve [KEY=VALUE ...]      (or: ember-serve [--KEY VALUE ...])

Serves one model on an OpenAI-compatible endpoint.

  model          a preset, a folder or a Hub repo id
  host, port     where to listen (127.0.0.1, 8000)
  api_key        what clients must send as a bearer token (or the environment's EMBER_API_KEY)
  served_model   the model's id for clients
  max_queue      choices that may wait in line before requests are refused with 429 (1024)
  max_choices    most choices of a request (128; max_num_seqs + max_queue, if that is less)
  grace_s        seconds that open requests have to finish when the server is stopped (20)
and every setting of the engine (block_size, pool_size, max_num_seqs, ...).

  ember serve model=gpt2 port=8000 block_size=32
  ember-serve --model ./my-export --port 8000"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; returns the exit code. Mistakes are one line on stderr."""
    return or_interrupted(lambda: serve(list(sys.argv[1:] if argv is None else argv)))


def serve(words: Sequence[str]) -> int:
    """`main` without its care for Ctrl-C."""
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return CLEAN
    try:
        from ember.serving.settings import ServerConfig

        return asyncio.run(_serve(ServerConfig.from_words(words)))
    except UserError as error:
        line = str(error).replace("\n", "\\n")
        print(f"error: {line}", file=sys.stderr)
        return MISTAKE


async def _serve(config: ServerConfig) -> int:
    sleep_when_idle()
    sys.setswitchinterval(SWITCH_S)
    from ember.entrypoints.api_server import ApiServer
    from ember.entrypoints.async_engine import AsyncEngine
    from ember.entrypoints.llm import LLM
    from ember.entrypoints.plan import EnginePlan
    from ember.serving.http_server import HttpServer, listen
    from ember.serving.metrics import Metrics

    _check_extra()
    plan = EnginePlan.resolve(config)
    with listen(config.host, config.port) as bound, closing(LLM.from_plan(plan)) as llm:
        metrics = Metrics(llm)
        engine = AsyncEngine(llm, max_open=config.choice_limits.most_open)
        app = ApiServer(config, plan, engine, metrics).app()
        gc.collect()
        gc.freeze()  # what is loaded stays: each search of it for garbage stopped the server for a quarter of a second
        return await HttpServer(config, app, engine, bound).run(metrics)


def _check_extra() -> None:
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(name) is None:
            raise UserError(f"serving needs {name}: pip install 'ember-batch[serve]'")

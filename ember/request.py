"""From a row of the input to a request in an engine: the same for every runner."""

from __future__ import annotations

from ember.config import JobConfig
from ember.core.random_stream import row_seed
from ember.core.sequence import FinishReason
from ember.data.output import RequestOutput
from ember.data.reader import PromptRow
from ember.entrypoints.llm import LLM
from ember.errors import ConfigError, RequestError


def start(llm: LLM, row: PromptRow, config: JobConfig) -> RequestOutput | None:
    """Put a row in line under its `row_index`; returns its result if there is nothing to compute."""
    try:
        if row.error is not None or row.prompt is None:
            raise RequestError("bad_row", row.error or "the row has no prompt")
        params = config.sampling.override(row.sampling)
    except (ConfigError, RequestError) as error:
        return RequestOutput(
            request_id=row.row_index,
            prompt=row.prompt if isinstance(row.prompt, str) else None,
            finish_reason=FinishReason.ERROR,
            error=str(error),
            error_kind=error.kind if isinstance(error, RequestError) else "bad_sampling",
            seed=row_seed(config.seed, row.row_index),
        )
    return llm.add(row.row_index, row.prompt, params, allow_special_tokens=config.allow_special_tokens)

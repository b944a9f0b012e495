"""From a row of the input to a request in an engine: the same for every runner."""

from __future__ import annotations

from ember.config import JobConfig
from ember.core.random_stream import row_seed
from ember.core.sequence import FinishReason
from ember.data.output import RequestOutput
from ember.data.reader import PromptRow
from ember.entrypoints.llm import LLM
from ember.errors import ConfigError, RequestError
from ember.sampling_params import SamplingParams


def row_params(row: PromptRow, config: JobConfig) -> SamplingParams:
    """A row's sampling parameters: the job's, with its own on top.

    Raises:
        RequestError: the row can't run (`bad_row`), or its own settings are wrong (`bad_sampling`).
    """
    if row.error is not None or row.prompt is None:
        raise RequestError("bad_row", row.error or "the row has no prompt")
    try:
        return config.sampling.override(row.sampling)
    except ConfigError as error:
        raise RequestError("bad_sampling", str(error)) from None


def start(llm: LLM, row: PromptRow, config: JobConfig) -> RequestOutput | None:
    """Put a row in line under its `row_index`; returns its result if there is nothing to compute."""
    try:
        params = row_params(row, config)
    except RequestError as error:
        return RequestOutput(
            request_id=row.row_index,
            prompt=row.prompt if isinstance(row.prompt, str) else None,
            finish_reason=FinishReason.ERROR,
            error=str(error),
            error_kind=error.kind,
            seed=row_seed(config.seed, row.row_index),
        )
    assert row.prompt is not None
    return llm.add(row.row_index, row.prompt, params, allow_special_tokens=config.allow_special_tokens)

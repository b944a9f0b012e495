"""From a row of the input to a request in an engine: the same for every runner."""

from __future__ import annotations

from ember.config import JobConfig
from ember.core.random_stream import row_seed
from ember.data.formats import part_format
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


def num_samples(row: PromptRow, config: JobConfig) -> int:
    """How many samples a row gives, also one that can't run: its own `n`, or the job's if that is wrong too."""
    try:
        return config.sampling.override({key: row.sampling[key] for key in row.sampling if key == "n"}).n
    except ConfigError:
        return config.sampling.n


def start(llm: LLM, row: PromptRow, config: JobConfig, *, together: bool = False) -> RequestOutput | None:
    """Put the samples of a row that are not done in line under its `row_index`.

    Args:
        together: its result comes when all of them are finished.

    Returns:
        Its result if there is nothing to compute.
    """
    try:
        params = row_params(row, config)
    except RequestError as error:
        count = num_samples(row, config)
        output = RequestOutput(
            request_id=row.row_index,
            prompt=row.prompt if isinstance(row.prompt, str) else None,
            seed=row_seed(config.seed, row.row_index),
            num_samples=count,
        )
        return output.with_error(error, (i for i in range(count) if i not in row.samples_done))
    assert row.prompt is not None
    return llm.add(
        row.row_index,
        row.prompt,
        params,
        allow_special_tokens=config.allow_special_tokens,
        samples_done=row.samples_done,
        together=together or part_format(config.output_format).whole_rows,
    )

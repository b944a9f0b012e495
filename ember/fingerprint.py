"""Everything that determines a job's results, as one flat comparable record."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ember.config import JobConfig
from ember.data.hashes import FileHashes
from ember.entrypoints.job_plan import JobPlan

RESULT_VERSION = 4
"""Goes up when the same settings would give other tokens or other rows."""


def fingerprint(config: JobConfig, plan: JobPlan, files: list[str], hashes: FileHashes) -> dict[str, Any]:
    """The record: content of the model's and the data's files, and every setting that can change a row.

    Paths are not in it, so a moved folder resumes; neither is what can't change a token.

    Raises:
        UserError: a file can't be read.
    """
    sampling = {
        f"sampling.{key}": json.loads(json.dumps(value))
        for key, value in asdict(config.sampling).items()
        if key != "seed"
    }
    return {
        "result_version": RESULT_VERSION,
        **plan.identity(hashes),
        **sampling,
        "seed": config.seed,
        "template": config.template,
        "format": config.format,
        "schema": dict(config.schema),
        "prompt_column": config.prompt_column,
        "id_column": config.id_column,
        "messages_column": config.messages_column,
        "chat": config.chat,
        "system": config.system,
        "chat_template_kwargs": dict(config.chat_template_kwargs),
        "chat_date": config.chat_date,
        "sampling_column": config.sampling_column,
        "sampling_columns": dict(config.sampling_columns),
        "allow_special_tokens": config.allow_special_tokens,
        "num_shards": config.num_shards,
        "output_format": config.output_format,
        "data": [hashes.of(file) for file in files],
    }

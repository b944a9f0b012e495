"""What a job would do, without doing it: settings, the first prompts, the size of the KV pool."""

from __future__ import annotations

from itertools import islice

from ember.config import JobConfig
from ember.data.file_kinds import shown_path
from ember.data.reader import PromptReader, PromptRow
from ember.entrypoints.plan import EnginePlan
from ember.errors import UserError

ROWS_SHOWN = 5


def show_plan(config: JobConfig, plan: EnginePlan, reader: PromptReader) -> None:
    """Print the resolved job. Nothing is computed or written, no weights are read."""
    network, blocks = plan.network, plan.num_blocks
    num_rows = reader.num_rows if config.limit is None else min(config.limit, reader.num_rows)
    size = blocks * plan.kv_shape.bytes_per_block
    tokens = f"{blocks:,} blocks of {config.block_size} tokens = {blocks * config.block_size:,} tokens, {size:,} bytes"
    print(f"model   {plan.folder.name}: {network.n_layer} layers, {network.n_head} heads, width {network.n_embd}")
    print(f"        {plan.folder.path}")
    print(f"runs    on {plan.device} in {plan.dtype_name}, attention {plan.attention}, scheduler {config.scheduler}")
    print(f"        max_model_len {plan.max_model_len}, max_num_seqs {config.max_num_seqs}")
    print(f"pool    {tokens}")
    print(f"data    {num_rows:,} rows in {len(reader.files)} file(s): {', '.join(map(shown_path, reader.files[:3]))}")
    print(f"columns passed through: {', '.join(reader.schema.names) or 'none'}")
    print(f"output  {config.output}")
    for row in islice(reader.rows(), ROWS_SHOWN):
        print(f"row {row.row_index}{'' if row.id is None else f' ({row.id})'}: {_describe(row, config, plan)}")
    print("dry run: nothing was computed or written")


def _describe(row: PromptRow, config: JobConfig, plan: EnginePlan) -> str:
    if row.error is not None or row.prompt is None:
        return f"error: {row.where}: {row.error}"
    if isinstance(row.prompt, list):
        return f"{len(row.prompt)} token ids: {row.prompt[:20]}"
    try:
        ids = plan.tokenizer.encode(row.prompt, allow_special_tokens=config.allow_special_tokens)
    except UserError as error:
        return f"error: {error}"
    return f"{len(ids)} tokens: {row.prompt!r}"

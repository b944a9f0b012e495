"""What a job would do, without doing it: settings, the size of the KV pool, what is there already, the next prompts."""

from __future__ import annotations

from itertools import islice

from ember.claim import foresee
from ember.config import JobConfig
from ember.data.file_kinds import shown_path
from ember.data.folder import OutputFolder
from ember.data.reader import PromptReader, PromptRow
from ember.data.work import Work
from ember.entrypoints.admission import Admission
from ember.entrypoints.job_plan import JobPlan
from ember.entrypoints.plan import EnginePlan
from ember.errors import RequestError
from ember.model.conversation import Conversation
from ember.model.weights import load_weights
from ember.request import row_params

ROWS_SHOWN = 5
_CHARS_SHOWN = 200
_TOKENS_SHOWN = 20


def show_plan(config: JobConfig, plan: JobPlan, reader: PromptReader) -> None:
    """Print the resolved job. Nothing is computed, no file of `output` is touched, of weights headers only.

    Raises:
        UserError: the job would be refused for what its `output` holds, or the weights do not fit the model's config.
    """
    folder = None if config.output is None else OutputFolder(config.output, config.shard, config.num_shards)
    work = None if folder is None else foresee(config, plan, reader, folder)
    if isinstance(plan, EnginePlan):
        with plan.folder.blamed():
            load_weights(plan.folder.path, plan.network.weight_layout, dtype=plan.dtype, device=plan.device)
        show_engine(config, plan)
    else:
        print("".join(f"{key:<12}{value}\n" for key, value in plan.settings().items()), end="")
    num_rows = reader.num_rows if config.limit is None else min(config.limit, reader.num_rows)
    print(f"data    {num_rows:,} rows in {len(reader.files)} file(s): {', '.join(map(shown_path, reader.files[:3]))}")
    print(f"columns passed through: {', '.join(reader.schema.names) or 'none'}")
    print(f"output  {config.output}" + ("" if work is None or folder is None else f": {_state(config, work, folder)}"))
    rows = list(islice(reader.rows(None if work is None else work.wants), ROWS_SHOWN))
    if rows:
        print(f"the first {len(rows)} rows to compute:")
    for row in rows:
        print(f"row {row.row_index}{'' if row.id is None else f' ({row.id})'}: {_describe(row, config, plan)}")
    print("dry run: nothing was computed and no result written")


def show_engine(config: JobConfig, plan: EnginePlan) -> None:
    """Print the model, how it runs, and the size of the pool."""
    network, blocks = plan.network, plan.num_blocks
    size = blocks * plan.kv_shape.bytes_per_block
    tokens = f"{blocks:,} blocks of {config.block_size} tokens = {blocks * config.block_size:,} tokens, {size:,} bytes"
    print(f"model   {plan.folder.name}: {network.n_layer} layers, {network.n_head} heads, width {network.n_embd}")
    print(f"        {plan.folder.path}")
    weights = "" if config.weights == "auto" else f", weights {config.weights}"
    print(
        f"runs    on {plan.device} in {plan.dtype_name}{weights}, attention {plan.attention}, "
        f"scheduler {config.scheduler}"
    )
    print(f"        max_model_len {plan.max_model_len}, max_num_seqs {config.max_num_seqs}")
    print(f"pool    {tokens}, in {plan.kv_dtype_name}")
    if plan.meter is not None:
        print("        at most: the job runs its largest step beside the weights, and takes what that leaves")


def _state(config: JobConfig, work: Work, folder: OutputFolder) -> str:
    """What the job would do with what is in its output."""
    if config.force and folder.has_parts():
        return "force=true would move the old results aside and start over"
    if not work.num_done:
        return "no row is there yet"
    done = f"{work.num_done:,} of {work.share.num_rows:,} rows are there"
    return f"{done}, nothing to do" if work.num_done == work.share.num_rows else f"{done}, the job would go on"


def _describe(row: PromptRow, config: JobConfig, plan: JobPlan) -> str:
    try:
        params = row_params(row, config)
        assert row.prompt is not None
        if not isinstance(plan, EnginePlan):  # only the server can count
            return _shown(row.prompt.text if isinstance(row.prompt, Conversation) else row.prompt)
        admission = Admission(plan)
        prompt: str | list[int]
        if isinstance(row.prompt, Conversation):
            chat = admission.chat_prompt(row.prompt)
            shown, prompt = _shown(chat.text), chat.token_ids
        else:
            shown, prompt = _shown(row.prompt), row.prompt
        ids = admission.token_ids(prompt, params, allow_special_tokens=config.allow_special_tokens)
        room = admission.room(len(ids), params)
    except RequestError as error:
        effect = "would end the job (on_error=stop)" if config.on_error == "stop" else "would be an error row"
        return f"{effect}: {error.kind}: {row.where}: {error}"
    return f"{len(ids):,} tokens, at most {room:,} more: {shown}"


def _shown(prompt: str | list[int]) -> str:
    """The prompt; of a long one the beginning, which says so."""
    most, unit = (_CHARS_SHOWN, "characters") if isinstance(prompt, str) else (_TOKENS_SHOWN, "token ids")
    cut = "" if len(prompt) <= most else f" ... (the first {most} of {len(prompt):,} {unit})"
    return f"{prompt[:most]!r}{cut}"

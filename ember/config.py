"""Every setting of a job, typed and checked where it is built. Plain dataclasses: no Hydra below `run.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ember.errors import ConfigError
from ember.sampling_params import SamplingParams

ATTENTION_BACKENDS = ("auto", "cpu", "batched", "reference")
POLICIES = ("prefill_first", "mixed", "static")
ON_ERROR = ("row", "stop")
FORMATS = ("auto", "openai_batch")
OUTPUT_FORMATS = ("parquet", "jsonl", "openai_batch")
RUNNERS = ("local", "ray")
DTYPES = ("auto", "float32", "bfloat16", "float16")
STDIN = "-"
_OWN_COLUMNS = {"prompt_column": "prompt", "id_column": "id", "sampling_column": "sampling"}
_POOL_SIZE = re.compile(r"^(\d+)(tok|KiB|MiB|GiB|TiB)?$")
_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Which model: a preset's `name`, or a `path` (folder or Hub repo id, `@revision` allowed), which wins."""

    name: str = "tiny"
    path: str | None = None

    def __post_init__(self) -> None:
        if self.path is not None and not self.path.strip():
            raise ConfigError("path", repr(self.path), "must be a folder or a Hub repo id")


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """What the engine needs: the model, its arithmetic, the KV pool and the scheduler.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    scheduler: str = "prefill_first"
    block_size: int = 16
    pool_size: str = "auto"
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            raise ConfigError("model", self.model, "must be a ModelConfig; use ModelConfig(name=...) or (path=...)")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("attention", self.attention, ATTENTION_BACKENDS)
        _one_of("scheduler", self.scheduler, POLICIES)
        _at_least("block_size", self.block_size, 1)
        self.pool_size = str(self.pool_size)
        PoolSize.parse(self.pool_size)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        _seed("seed", self.seed)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`pool_size` taken apart: a count of `blocks`, `tokens` or `bytes`, or all None for `auto`."""

    blocks: int | None = None
    tokens: int | None = None
    bytes: int | None = None

    @staticmethod
    def parse(text: str) -> PoolSize:
        """Read `512` (blocks), `4096tok`, `2GiB` or `auto`.

        Raises:
            ConfigError: anything else, or a size of zero.
        """
        if text == "auto":
            return PoolSize()
        match = _POOL_SIZE.match(text)
        if match is None or int(match[1]) == 0:
            raise ConfigError(
                "pool_size", text, "must be a number of blocks (512), tokens (4096tok), bytes (2GiB, 512MiB) or auto"
            )
        number, unit = int(match[1]), match[2]
        if unit is None:
            return PoolSize(blocks=number)
        return PoolSize(tokens=number) if unit == "tok" else PoolSize(bytes=number * _BYTES[unit])


@dataclass(kw_only=True, slots=True)
class JobConfig(EngineConfig):
    """A whole job: engine settings, where rows come from, how they are sampled, where results go."""

    data: Any = None
    format: str = "auto"
    schema: dict[str, str] = field(default_factory=dict)
    output: str | None = None
    output_format: str = "parquet"
    resume: str | None = None
    prompt_column: str = "prompt"
    id_column: str = "id"
    template: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_column: str = "sampling"
    sampling_columns: dict[str, str] = field(default_factory=dict)
    allow_special_tokens: bool = False
    limit: int | None = None
    shard: int | None = None
    num_shards: int = 1
    force: bool = False
    verify: bool = False
    retry_errors: bool = False
    on_error: str = "row"
    max_errors: int | None = None
    dry_run: bool = False
    progress: bool = True
    commit_every: int = 256
    commit_every_s: float = 30.0
    grace_s: float = 20.0
    runner: str = "local"
    num_engines: int = 1
    max_engines: int | None = None
    cpus_per_engine: int | None = None
    gpus_per_engine: float = 0.0
    ray_address: str | None = None

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        self.data = _data(self.data)
        if self.sampling.seed is not None:
            raise ConfigError("sampling.seed", self.sampling.seed, "set the job's `seed` instead (or a seed a row)")
        if self.template is not None:
            self.template = unescape(self.template)
        self.sampling.stop = [unescape(s) for s in self.sampling.stop]
        if self.limit is not None:
            _at_least("limit", self.limit, 0)
        _check_shard(self.shard, self.num_shards)
        _check_input(self)
        _one_of("output_format", self.output_format, OUTPUT_FORMATS)
        _one_of("on_error", self.on_error, ON_ERROR)
        if self.max_errors is not None:
            _at_least("max_errors", self.max_errors, 0)
        _at_least("commit_every", self.commit_every, 1)
        _positive("commit_every_s", self.commit_every_s)
        if not 0 <= self.grace_s < float("inf"):
            raise ConfigError("grace_s", self.grace_s, "must be a number of seconds >= 0")
        _check_runner(self)


def unescape(text: str) -> str:
    r"""Turn a typed backslash-n or backslash-t into the character; a doubled backslash stays one backslash."""
    return re.sub(r"\\([nt\\])", lambda m: {"n": "\n", "t": "\t", "\\": "\\"}[m[1]], text)


def _data(value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not items or not all(isinstance(i, str) and i for i in items):
        raise ConfigError("data", value, "must be a file, folder or glob, or a list of them (data=prompts.jsonl)")
    if STDIN in items and len(items) > 1:
        raise ConfigError("data", STDIN, "stdin stands alone, not in a list (a file called - is ./-)")
    return list(items)


def _check_input(config: JobConfig) -> None:
    _one_of("format", config.format, FORMATS)
    if config.data == [STDIN] and config.num_shards > 1:
        raise ConfigError("num_shards", config.num_shards, "shards can't share stdin (data=-); name a file instead")
    for name, text in config.schema.items():
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"schema.{name}", text, "must be a type's name (int64, list<string>, ...)")
    if config.format == "openai_batch":
        own = ("template", "prompt_column", "id_column", "sampling_column", "sampling_columns")
        given = [key for key in own if getattr(config, key) not in (None, {}, _OWN_COLUMNS.get(key))]
        if given:
            key = given[0]
            raise ConfigError(key, getattr(config, key), "format=openai_batch has its own prompt, id and sampling")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(key, value, f"must be one of {', '.join(allowed)}")


def _at_least(key: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(key, value, f"must be a whole number >= {low}")


def _check_shard(shard: int | None, num_shards: int) -> None:
    _at_least("num_shards", num_shards, 1)
    if shard is None and num_shards > 1:
        raise ConfigError("num_shards", num_shards, f"needs shard too (-m 'shard=range({num_shards})' runs all)")
    if shard is not None and not 0 <= shard < num_shards:
        raise ConfigError("shard", shard, f"must be a whole number in 0 .. num_shards-1 = {num_shards - 1}")


def _check_runner(config: JobConfig) -> None:
    _one_of("runner", config.runner, RUNNERS)
    _at_least("num_engines", config.num_engines, 1)
    if config.max_engines is not None:
        _at_least("max_engines", config.max_engines, config.num_engines)
    if config.cpus_per_engine is not None:
        _at_least("cpus_per_engine", config.cpus_per_engine, 1)
    if not 0 <= config.gpus_per_engine <= 1:
        raise ConfigError("gpus_per_engine", config.gpus_per_engine, "must be 0, 1 or a share of a GPU between them")
    if config.runner == "local" and max(config.num_engines, config.max_engines or 1) > 1:
        key = "num_engines" if config.num_engines > 1 else "max_engines"
        raise ConfigError(key, getattr(config, key), "needs runner=ray; runner=local has one engine")


def _positive(key: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(key, value, "must be a number > 0")


def _seed(key: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ConfigError(key, value, "must be a whole number in 0 .. 2^63-1")

"""Every setting of a job, typed and checked where it is built. Plain dataclasses: no Hydra below `run.py`."""

from __future__ import annotations

import copy
import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from ember.checks import MOST, at_least, boolean, one_of, real, too_deep, whole
from ember.errors import ConfigError, Shown
from ember.sampling_params import SamplingParams

ATTENTION_BACKENDS = ("auto", "cpu", "batched", "reference", "triton", "torch_varlen")
POLICIES = ("prefill_first", "mixed", "static")
RESERVATIONS = ("none", "max")
ON_ERROR = ("row", "stop")
FORMATS = ("auto", "openai_batch")
OUTPUT_FORMATS = ("parquet", "jsonl", "openai_batch")
ORDERS = ("input", "prefix")
RUNNERS = ("local", "ray")
ENGINES = ("local", "http")
WEIGHTS = ("auto", "int8", "w8a8", "fp16")
DETERMINISTIC = ("auto", "require")
CUDA_GRAPHS = ("auto", "true", "false")
SPECULATIVE = ("off", "ngram")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
STDIN = "-"
JSON_LINES = "json"
_OWN_COLUMNS = {"prompt_column": "prompt", "id_column": "id", "sampling_column": "sampling"}
_POOL_SIZE = re.compile(r"([0-9]+)(tok|KiB|MiB|GiB|TiB)?")
_ENGINE_NUMBERS = {
    "num_threads": (1, 4096),
    "tensor_parallel_size": (1, 1024),
    "block_size": (1, 2**16),
    "max_num_seqs": (1, MOST),
    "max_num_batched_tokens": (1, MOST),
    "max_model_len": (2, MOST),
    "num_speculative_tokens": (1, 64),
    "ngram_min": (1, 64),
    "ngram_max": (1, 64),
}
_JOB_NUMBERS = {
    "limit": (0, MOST),
    "num_shards": (1, 100_000),
    "max_errors": (0, MOST),
    "commit_every": (1, MOST),
    "num_engines": (1, 10_000),
    "max_engines": (1, 10_000),
    "cpus_per_engine": (1, 10_000),
    "concurrency": (1, 10_000),
    "max_retries": (0, 1000),
}
"""The least and the most of each whole number."""
_NULLABLE = ("num_threads", "max_model_len", "limit", "max_errors", "max_engines", "cpus_per_engine")
_TEXTS = (
    "output",
    "resume",
    "prompt_column",
    "id_column",
    "template",
    "sampling_column",
    "ray_address",
    "served_model",
    "report_sort",
)
_TAKEN_AS_TEXT = ("pool_size", "speculative", "chat_date", "cuda_graphs")
"""What is typed like a number, a bool or a date is meant as text there."""
_OF_ANY_ENGINE = ("model", "seed", "chat_template_kwargs")
"""What of EngineConfig a job against a server has a use for, or a check of its own."""
_CHAT_TEXTS = ("messages_column", "system")
_FLAGS = ("chat", "allow_special_tokens", "force", "verify", "retry_errors", "dry_run", "report", "plan", "calibrate")
_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Which model: a preset's `name`, or a `path` (folder or Hub repo id, `@revision` allowed), which wins."""

    name: str = "tiny"
    path: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
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
    weights: str = "auto"
    kv_dtype: str = "auto"
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    deterministic: str = "auto"
    attention: str = "auto"
    cuda_graphs: str = "auto"
    scheduler: str = "mixed"
    prefill_share: float = 1.0
    block_size: int = 16
    pool_size: str = "auto"
    reservation: str = "none"
    prefix_cache: bool = True
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    speculative: str = "off"
    num_speculative_tokens: int = 8
    ngram_min: int = 2
    ngram_max: int = 4
    seed: int = 0
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_date: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            raise ConfigError("model", self.model, "must be a ModelConfig; use ModelConfig(name=...) or (path=...)")
        _check_types(self)
        one_of("dtype", self.dtype, DTYPES)
        one_of("weights", self.weights, WEIGHTS)
        one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        one_of("deterministic", self.deterministic, DETERMINISTIC)
        one_of("attention", self.attention, ATTENTION_BACKENDS)
        self.cuda_graphs = str(self.cuda_graphs).lower()  # YAML makes a truth value of it
        one_of("cuda_graphs", self.cuda_graphs, CUDA_GRAPHS)
        one_of("scheduler", self.scheduler, POLICIES)
        if str(self.speculative) == "False":  # what YAML makes of off
            self.speculative = "off"
        one_of("speculative", self.speculative, SPECULATIVE)
        _whole_numbers(self, _ENGINE_NUMBERS)
        if self.ngram_min > self.ngram_max:
            raise ConfigError("ngram_min", self.ngram_min, f"must be at most ngram_max={self.ngram_max}")
        self.pool_size = str(self.pool_size)
        PoolSize.parse(self.pool_size)
        one_of("reservation", self.reservation, RESERVATIONS)
        boolean("prefix_cache", self.prefix_cache)
        share = "must be a share of the token budget: more than 0, at most 1"
        self.prefill_share = real("prefill_share", self.prefill_share, share, high=1.0, open_low=True)
        if self.prefill_share < 1 and self.scheduler != "mixed":
            raise ConfigError(
                "prefill_share", self.prefill_share, "only scheduler=mixed computes prompts beside decodes"
            )
        self.seed = whole("seed", self.seed, "must be a whole number in 0 .. 2^63-1")
        _check_chat_kwargs(self.chat_template_kwargs)
        _check_chat_date(self.chat_date)


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
        if len(text) > 30:
            raise ConfigError("pool_size", f"{text[:20]}...", "too long for a size; say 512, 4096tok, 2GiB or auto")
        match = _POOL_SIZE.fullmatch(text)
        if match is None or int(match[1]) == 0:
            allowed = "must be a number of blocks (512), tokens (4096tok), bytes (2GiB, 512MiB) or auto"
            raise ConfigError("pool_size", Shown(text), allowed)
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
    messages_column: str | None = None
    chat: bool = False
    system: str | None = None
    template: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_column: str = "sampling"
    sampling_columns: dict[str, str] = field(default_factory=dict)
    allow_special_tokens: bool = False
    limit: int | None = None
    order: str = "input"
    shard: int | None = None
    num_shards: int = 1
    force: bool = False
    verify: bool = False
    retry_errors: bool = False
    on_error: str = "row"
    max_errors: int | None = None
    dry_run: bool = False
    progress: Any = True
    report: bool = False
    report_sort: str | None = None
    plan: bool = False
    calibrate: bool = False
    commit_every: int = 256
    commit_every_s: float = 30.0
    grace_s: float = 20.0
    runner: str = "local"
    num_engines: int = 1
    max_engines: int | None = None
    cpus_per_engine: int | None = None
    gpus_per_engine: float = 0.0
    ray_address: str | None = None
    engine: str = "local"
    base_url: str | None = None
    served_model: str | None = None
    api_key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 64
    max_retries: int = 8
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        self.data = _data(self.data)
        if self.sampling.seed is not None:
            raise ConfigError("sampling.seed", self.sampling.seed, "set the job's `seed` instead (or a seed a row)")
        self._respell(unescape)
        _whole_numbers(self, _JOB_NUMBERS)
        for key in (*_TEXTS, *_CHAT_TEXTS):
            if getattr(self, key) == "":
                raise ConfigError(key, "''", "must not be empty; leave it out for its default")
        for key in _FLAGS:
            boolean(key, getattr(self, key))
        if self.calibrate and not self.plan:
            raise ConfigError("calibrate", True, "belongs to a plan: ember plan calibrate=true, or plan=true")
        if not isinstance(self.progress, bool) and self.progress != JSON_LINES:
            raise ConfigError("progress", self.progress, f"must be true, false or {JSON_LINES}")
        _check_shard(self.shard, self.num_shards)
        _check_input(self)
        one_of("order", self.order, ORDERS)
        _check_chat(self)
        one_of("output_format", self.output_format, OUTPUT_FORMATS)
        one_of("on_error", self.on_error, ON_ERROR)
        self.commit_every_s = real("commit_every_s", self.commit_every_s, "must be a number > 0", open_low=True)
        self.grace_s = real("grace_s", self.grace_s, "must be a number of seconds >= 0")
        _check_runner(self)
        _check_engine(self)

    def as_typed(self) -> JobConfig:
        """A copy whose texts are spelt as `unescape` reads them, to be read again."""
        typed = copy.deepcopy(self)
        typed._respell(lambda text: text.replace("\\", "\\\\"))
        return typed

    def _respell(self, spell: Callable[[str], str]) -> None:
        for key in ("template", "system"):
            text = getattr(self, key)
            setattr(self, key, None if text is None else spell(text))
        for key in ("stop", "bad_words", "choice"):
            texts = getattr(self.sampling, key)
            setattr(self.sampling, key, None if texts is None else [spell(text) for text in texts])


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


def _check_chat_kwargs(kwargs: Any) -> None:
    """A template gets them as JSON; YAML has more, as dates without quotes."""
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs) or not _is_json(kwargs):
        allowed = "must map names of a template's variables to values that JSON has (text, numbers, true, lists, ...)"
        raise ConfigError("chat_template_kwargs", kwargs, allowed)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return not too_deep(value)


def _check_chat_date(date: str | None) -> None:
    allowed = "must be a date, YYYY-MM-DD: what a chat template is told as today's"
    if date is not None and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", str(date)):
        raise ConfigError("chat_date", date, allowed)
    try:
        datetime.date.fromisoformat(date or "2000-01-01")
    except ValueError:
        raise ConfigError("chat_date", date, allowed) from None


def _check_chat(config: JobConfig) -> None:
    if config.messages_column is not None and (config.chat or config.template is not None):
        other = "chat=true makes" if config.chat else "template makes"
        what = f"{other} a prompt of other columns, this names a column of whole conversations; leave one out"
        raise ConfigError("messages_column", config.messages_column, what)


def _check_input(config: JobConfig) -> None:
    one_of("format", config.format, FORMATS)
    if config.data == [STDIN] and config.num_shards > 1:
        raise ConfigError("num_shards", config.num_shards, "shards can't share stdin (data=-); name a file instead")
    for name, text in config.schema.items():
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"schema.{name}", text, "must be a type's name (int64, list<string>, ...)")
    if config.format == "openai_batch":
        own = ("template", "prompt_column", "id_column", "sampling_column", "sampling_columns", "chat", "system")
        given = [
            key
            for key in (*own, "messages_column")
            if getattr(config, key) not in (None, False, {}, _OWN_COLUMNS.get(key))
        ]
        if given:
            key = given[0]
            raise ConfigError(key, getattr(config, key), "format=openai_batch has its own prompt, id and sampling")


def _check_types(config: EngineConfig | ModelConfig) -> None:
    """What Python hands over is not checked by a schema, as what YAML and the command line hold is."""
    for f in fields(config):
        key, value = f.name, getattr(config, f.name)
        if f.type in ("str", "str | None") and key not in _TAKEN_AS_TEXT:
            if not isinstance(value, str) and (value is not None or f.type == "str"):
                raise ConfigError(key, value, "must be text")
        elif f.type == "dict[str, str]" and not isinstance(value, dict):
            raise ConfigError(key, value, "must map names to texts")


def _whole_numbers(config: EngineConfig, ranges: dict[str, tuple[int, int]]) -> None:
    for key, (low, high) in ranges.items():
        value = getattr(config, key)
        if value is not None or key not in _NULLABLE:
            setattr(config, key, at_least(key, value, low, high=high))


def _check_shard(shard: int | None, num_shards: int) -> None:
    if shard is None and num_shards > 1:
        raise ConfigError("num_shards", num_shards, f"needs shard too (-m 'shard=range({num_shards})' runs all)")
    allowed = f"must be a whole number in 0 .. num_shards-1 = {num_shards - 1}"
    if shard is not None and whole("shard", shard, allowed) >= num_shards:
        raise ConfigError("shard", shard, allowed)


def _check_runner(config: JobConfig) -> None:
    one_of("runner", config.runner, RUNNERS)
    if config.max_engines is not None:
        at_least("max_engines", config.max_engines, config.num_engines)
    share = "must be 0, 1 or a share of a GPU between them"
    config.gpus_per_engine = real("gpus_per_engine", config.gpus_per_engine, share, high=1.0)
    if config.runner == "ray" and config.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size", config.tensor_parallel_size, "needs runner=local; with ray use 1")
    if config.runner == "local" and max(config.num_engines, config.max_engines or 1) > 1:
        key = "num_engines" if config.num_engines > 1 else "max_engines"
        raise ConfigError(key, getattr(config, key), "needs runner=ray; runner=local has one engine")


def _check_no_engine_keys(config: JobConfig) -> None:
    """Settings of an engine that computes elsewhere would do nothing."""
    mine = [f for f in fields(EngineConfig) if f.name not in _OF_ANY_ENGINE]
    changed = [f.name for f in mine if getattr(config, f.name) != f.default]
    changed += ["allow_special_tokens"] if config.allow_special_tokens else []
    if changed:
        others = "".join(f", {key}" for key in changed[1:])
        allowed = f"is the server's to decide: leave {changed[0]}{others} out with engine=http"
        raise ConfigError(changed[0], getattr(config, changed[0]), allowed)


def _check_engine(config: JobConfig) -> None:
    one_of("engine", config.engine, ENGINES)
    config.request_timeout_s = real("request_timeout_s", config.request_timeout_s, "must be > 0", open_low=True)
    if config.engine == "local":
        for key in ("base_url", "served_model"):
            if getattr(config, key) is not None:
                raise ConfigError(key, getattr(config, key), "needs engine=http")
        return
    url = urlsplit(config.base_url or "")
    if url.scheme not in ("http", "https") or not url.netloc or "@" in url.netloc or url.query or url.fragment:
        allowed = "must be a server's URL, as http://localhost:8000/v1; a key goes into the environment"
        raise ConfigError("base_url", None if config.base_url is None else url.hostname, allowed)
    if (config.model.path, config.model.name) != (None, ModelConfig().name):
        raise ConfigError("model", config.model.path or config.model.name, "engine=http takes served_model=ID instead")
    if config.runner != "local":
        raise ConfigError("runner", config.runner, "engine=http needs runner=local")
    _check_no_engine_keys(config)
    if config.sampling.max_tokens is None:
        raise ConfigError("sampling.max_tokens", None, "engine=http needs a number; servers have their own default")

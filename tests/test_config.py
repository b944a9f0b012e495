"""Settings built in Python: every value is checked where it is built, however large and of whatever type."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pytest

from ember.cache.kv_pool import KVShape, num_blocks_for
from ember.config import EngineConfig, JobConfig, ModelConfig
from ember.errors import ConfigError, UserError
from ember.model.json_file import show
from ember.sampling_params import SamplingParams

HUGE = 10**400
"""Past every float: math.isfinite raises on it."""


def numbers(schema: type) -> list[tuple[type, str]]:
    kinds = {"int", "int | None", "float"}
    return [(schema, field.name) for field in dataclasses.fields(schema) if field.type in kinds]


@pytest.mark.parametrize("value", [HUGE, True, float("nan"), float("inf"), "x", -10])
@pytest.mark.parametrize(("schema", "key"), [*numbers(JobConfig), *numbers(SamplingParams)])
def test_a_number_out_of_range_is_refused_by_name(schema: type, key: str, value: object) -> None:
    """An OverflowError from deep inside the engine, or a pool that is blamed for a block."""
    given = {"data": "x"} if schema is JobConfig else {}
    with pytest.raises(ConfigError) as caught:
        schema(**given, **{key: value})
    assert caught.value.key.rpartition(".")[2] == key


@pytest.mark.parametrize("size", ["9" * 5000, "9" * 40 + "GiB", "\u0663", "1e3", "", "-1", "0"])
def test_a_pool_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="pool_size="):
        EngineConfig(pool_size=size)


def test_whole_floats_become_whole_numbers() -> None:
    assert type(EngineConfig(block_size=16.0).block_size) is int  # type: ignore[arg-type]


def test_flags_take_only_true_and_false() -> None:
    with pytest.raises(ConfigError, match="force=1: must be true or false"):
        JobConfig(data="x", force=1)  # type: ignore[arg-type]


def test_a_block_too_large_for_the_pool_is_named_and_not_the_pool() -> None:
    import torch

    shape = KVShape(n_layer=1, n_kv_head=1, head_dim=1, block_size=4096, dtype=torch.float32)
    with pytest.raises(UserError, match=r"block_size=4096: pool_size=auto holds 0 blocks .*; set 512 or less"):
        num_blocks_for("auto", shape, max_model_len=512, max_num_seqs=1, free_bytes=9000, total_bytes=10**9)


@pytest.mark.parametrize("value", ["off", False])
def test_off_in_a_job_file_is_off(value: object) -> None:
    """YAML reads a bare `off` as false."""
    assert EngineConfig(speculative=value).speculative == "off"  # type: ignore[arg-type]


def test_ngram_lengths_are_a_range() -> None:
    with pytest.raises(ConfigError, match="ngram_min=5: must be at most ngram_max=4"):
        EngineConfig(ngram_min=5)


@pytest.mark.parametrize("value", [None, 5, ["a"], {1: 2}, {"a": datetime.date(2024, 7, 26)}, {"a": float("nan")}])
def test_chat_template_kwargs_are_json(value: object) -> None:
    """YAML makes a date of `date_string: 2024-07-26`: a traceback at the first row."""
    with pytest.raises(ConfigError, match="chat_template_kwargs="):
        EngineConfig(chat_template_kwargs=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["3", "null", "true", "", " "])
def test_a_text_of_the_wrong_type_is_shown_as_one(value):
    """`n=3: must be a whole number`: the 3 was text."""
    assert str(ConfigError("n", value, "must be")) == f'n="{value}": must be'
    assert str(ConfigError("data", "[1]", "must be")) == "data=[1]: must be"


@pytest.mark.parametrize("value", [3, 4.5, "3", "text", None, True])
def test_a_value_of_a_file_is_quoted_once(value):
    """`model_type="\\"bert\\""`, `n_embd="48.0"`: what was quoted already was quoted again."""
    assert str(ConfigError("n", show(value), "must be").under("a")) == f"a.n={json.dumps(value)}: must be"


def test_a_size_of_zero_is_shown_as_given() -> None:
    """`pool_size="0"`: nobody had written quotes."""
    with pytest.raises(ConfigError, match=r"^pool_size=0: must be"):
        EngineConfig(pool_size="0")


def test_what_is_no_text_is_refused_by_name():
    """JobConfig(report_sort=["kv_utilization"]) was a TypeError, out of the report's depths."""
    for config, given in ((JobConfig, {"data": "p.jsonl"}), (ModelConfig, {})):
        texts = [f.name for f in dataclasses.fields(config) if f.type in ("str", "str | None")]
        assert texts
        for key in texts:
            with pytest.raises(ConfigError, match=rf"^{key}="):
                config(**given, **{key: ["x"]})
    for key in ("schema", "sampling_columns"):
        with pytest.raises(ConfigError, match=f"{key}=5: must map names to texts"):
            JobConfig(data="p.jsonl", **{key: 5})

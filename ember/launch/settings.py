"""From what Hydra composed to a JobConfig: nothing after this sees a DictConfig."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf

from ember.config import JobConfig
from ember.errors import ConfigError, UserError
from ember.launch.keys import NO_BASE, no_such_key
from ember.launch.places import override_key


def job_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> JobConfig:
    """Check and convert the composed settings.

    Args:
        cfg: what Hydra composed, without its own `hydra`.
        overrides: what was set on top of the files, as typed.

    Raises:
        UserError: an unknown key, a value that is not allowed, or no data; one line with the dotted key.
    """
    if OmegaConf.get_type(cfg) is not JobConfig:
        raise UserError(NO_BASE)
    for key, value in _unknown(cfg, JobConfig, ""):
        raise UserError(no_such_key(key, value))
    if cfg.resume is not None:
        cfg = _resumed(cfg, overrides)
    if cfg.data is None:
        raise UserError("data must be given: data=prompts.jsonl (a file, a folder, a glob or a list of them)")
    _check_groups(cfg)
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, JobConfig)
    _check_model_choice(config, overrides)
    _expand_home(config)
    return config


def _resumed(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The settings saved in the output that `resume` names, with what was typed now on top."""
    from ember.data.settings_file import load_settings  # brings pyarrow, which a mistake or --help need not wait for

    saved = OmegaConf.merge(OmegaConf.structured(JobConfig), _literal(load_settings(cfg.resume)))
    assert isinstance(saved, DictConfig)
    for override in overrides:
        key = override_key(override)
        if key in ("resume", "output") or key.startswith("hydra"):
            continue
        OmegaConf.update(saved, key, _literal(OmegaConf.select(cfg, key)), merge=False)
    saved.output = cfg.resume
    return saved


def _literal(value: Any) -> Any:
    """Values whose every `${` is plain text, as OmegaConf has it: it would take another setting's value."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def as_typed(overrides: Any) -> list[str]:
    """Hydra's list of overrides; read as any other list, a `${...}` in one would be resolved, or fail."""
    lines: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(line) for line in lines]


def _check_groups(cfg: DictConfig) -> None:
    """Build each group alone first: its errors name a key without the group."""
    for group in (f.name for f in fields(JobConfig)):
        if not OmegaConf.is_dict(cfg[group]):
            continue
        try:
            OmegaConf.to_object(cfg[group])
        except ConfigError as error:
            raise error.under(group) from None


def _unknown(cfg: DictConfig, schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Keys that came in by `+` or from a group file, past the schema."""
    types = get_type_hints(schema)
    for key in map(str, cfg):
        name = f"{prefix}{key}"
        if key not in types:
            yield name, OmegaConf.select(cfg, key)
        elif is_dataclass(types[key]):
            yield from _unknown(cfg[key], types[key], f"{name}.")


def _check_model_choice(config: JobConfig, overrides: Sequence[str]) -> None:
    """A preset asked for by name must not lose, unseen, to the `model.path` of a job file."""
    keys = [override_key(override) for override in overrides]
    if "model" in keys and "model.path" not in keys and config.model.path is not None:
        chosen = overrides[keys.index("model")]
        raise UserError(f"{chosen}: the job file's model.path={config.model.path} would win; add model.path=null")


def _expand_home(config: JobConfig) -> None:
    config.data = [os.path.expanduser(item) for item in config.data]
    if config.output is not None:
        config.output = os.path.expanduser(config.output)
    if config.model.path is not None:
        config.model.path = os.path.expanduser(config.model.path)

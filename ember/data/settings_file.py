"""`config.yaml` of an output: the resolved settings of a job, to look at and to go on from."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ember.config import JobConfig
from ember.data.folder import CONFIG_HEADER
from ember.data.text import without_credentials
from ember.errors import ConfigError

ONE_ATTEMPT = ("resume", "force", "verify", "retry_errors", "dry_run", "plan", "calibrate")
"""Settings that speak of one attempt only: not kept."""


def settings_text(config: JobConfig) -> str:
    """The settings as YAML, paths made absolute, so that the job can go on from any directory."""
    kept = {key: value for key, value in asdict(config.as_typed()).items() if key not in ONE_ATTEMPT}
    kept["data"] = [without_credentials(_absolute(item)) for item in config.data]
    kept["output"] = None if config.output is None else _absolute(config.output)
    kept["chat_template"] = None if config.chat_template is None else _absolute(config.chat_template)
    path = config.model.path
    if path is not None and Path(path).expanduser().exists():  # a folder or a GGUF file, not a Hub repo
        kept["model"]["path"] = _absolute(path)
    return str(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))


def load_settings(folder: str) -> dict[str, Any]:
    """The settings that an output was made with.

    Raises:
        ConfigError: `resume` names no folder with a config.yaml of ember's.
    """
    path = Path(folder).expanduser() / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8")
        settings = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not YAML"
        raise ConfigError("resume", folder, f"can't read {path} ({reason}); name the output of a job") from None
    if not text.startswith(CONFIG_HEADER) or not isinstance(settings, dict):
        raise ConfigError("resume", folder, f"{path} was not written by ember; name the output of a job")
    return settings


def _absolute(path: str) -> str:
    return path if "://" in path or path == "-" else os.path.abspath(Path(path).expanduser())

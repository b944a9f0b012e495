"""The server's settings: those of the engine, as in a job, and its own; read from the words of a command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from ember.checks import MOST, at_least, real
from ember.config import EngineConfig, ModelConfig
from ember.errors import ConfigError, Shown, UserError
from ember.model.presets import PRESETS
from ember.serving.choice_limits import ChoiceLimits

API_KEY_VARIABLE = "EMBER_API_KEY"
_NUMBERS = {"port": (0, 65535), "max_queue": (0, MOST), "max_choices": (1, MOST), "max_body_bytes": (1, MOST)}
_SECONDS = ("grace_s", "send_timeout_s", "body_timeout_s")
_TEXTS = ("host", "api_key", "served_model")
_MODEL = ("model", "model.name", "model.path")


@dataclass(kw_only=True, slots=True)
class ServerConfig(EngineConfig):
    """Engine settings, and how the engine is served.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        api_key: what clients must send as a bearer token; None: the environment's EMBER_API_KEY, if any.
        served_model: the model's id for clients; None: as it was named.
        max_queue: most choices (prompts times `n`) in line beside `max_num_seqs` that run; more are refused with 429.
        max_choices: most choices of one request; what can never run and wait together is refused as well.
        max_body_bytes: of a request.
        body_timeout_s, send_timeout_s: for a client to send its body, or to take a piece of the answer.
        grace_s: seconds that open requests have to finish after Ctrl-C or SIGTERM.
        cors_origins: web origins whose pages may call; none by default.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model: str | None = None
    max_queue: int = 1024
    max_choices: int = 128
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    grace_s: float = 20.0
    cors_origins: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if self.api_key is None:
            self.api_key = os.environ.get(API_KEY_VARIABLE) or None
        for key, (low, high) in _NUMBERS.items():
            setattr(self, key, at_least(key, getattr(self, key), low, high=high))
        for key in _SECONDS:
            setattr(self, key, real(key, getattr(self, key), "must be a number of seconds >= 0"))
        for key in _TEXTS:
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(key, Shown(repr(value)), "must be text that is not empty")
        if isinstance(self.cors_origins, str):
            self.cors_origins = [self.cors_origins]
        if not isinstance(self.cors_origins, list) or not all(isinstance(o, str) and o for o in self.cors_origins):
            raise ConfigError("cors_origins", self.cors_origins, "must be an origin or a list of them")

    @property
    def choice_limits(self) -> ChoiceLimits:
        """How many choices there may be."""
        return ChoiceLimits(max_choices=self.max_choices, max_num_seqs=self.max_num_seqs, max_queue=self.max_queue)

    @staticmethod
    def from_words(words: Sequence[str]) -> ServerConfig:
        """Read `port=8000 model=gpt2 block_size=32`, or the same as flags: `--port 8000 --block-size=32`.

        Raises:
            UserError: a word that is no setting, or a value that is not allowed.
        """
        given = _pairs(words)
        model = {key: given.pop(key) for key in _MODEL if key in given}
        known = [f.name for f in fields(ServerConfig) if f.name != "model"]
        for key in given:
            if key not in known:
                raise UserError(f"{key}: no such setting of the server (there are: {', '.join([*_MODEL, *known])})")
        texts = {f.name for f in fields(ServerConfig) if str(f.type).startswith("str")}
        values: dict[str, Any] = {key: text if key in texts else _value(key, text) for key, text in given.items()}
        return ServerConfig(model=_model(model), **values)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    left, pairs = list(words), {}
    while left:
        word = left.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not word.startswith("--") or not left:
                raise UserError(f"{word}: settings are written key=value or --key value, as in port=8000")
            value = left.pop(0)
        pairs[key.replace("-", "_")] = value
    return pairs


def _value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(key, text, "can't be read as a value") from None


def _model(given: dict[str, str]) -> ModelConfig:
    """`model` is a preset, a folder or a Hub repo id, `model.path` never a preset."""
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one of them")
    key, text = next(iter(given.items()), ("model", "tiny"))
    is_preset = text in PRESETS if key == "model" else key == "model.name"
    return ModelConfig(name=text) if is_preset else ModelConfig(path=os.path.expanduser(text))

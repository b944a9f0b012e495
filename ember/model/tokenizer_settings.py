"""What a model folder says beside its vocabulary: names of special tokens, automatic BOS and EOS, the chat template.

Hugging Face's files: `tokenizer_config.json`, `special_tokens_map.json` for names that the former lacks, and
`chat_template.jinja`, which wins over a template within the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ember.errors import UserError
from ember.model.gguf_file import GgufFile, is_gguf
from ember.model.json_file import read_json_object, show

MAX_TEMPLATE_BYTES = 2**20
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """The settings, as a chat template and a tokenizer need them.

    Attributes:
        named: special tokens by their names (`bos_token`, `eos_token`, ...).
        extra: special tokens without a name.
        add_bos, add_eos: whether every text gets them; None: as tokenizer.json says.
        chat_template: Jinja source, or None.
        added: added tokens by id, as Hugging Face lists them.
    """

    named: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_template: str | None = None
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @staticmethod
    def from_folder(folder: Path) -> TokenizerSettings:
        """Read a folder's files, which may all be missing, or a GGUF file.

        Raises:
            UserError: one is broken. Names the file and the key.
        """
        if is_gguf(folder):
            from ember.model.gguf_tokenizer import gguf_settings  # which makes these settings

            return gguf_settings(GgufFile.open(folder))
        path = folder / "tokenizer_config.json"
        data = {**_optional(folder / "special_tokens_map.json"), **_optional(path)}
        extra = [token for key in _EXTRA if isinstance(data.get(key), list) for token in data[key]]
        return TokenizerSettings(
            named={key: text for key, value in data.items() if key.endswith("_token") and (text := _token_text(value))},
            extra=tuple(filter(None, map(_token_text, extra))),
            add_bos=_flag(data, "add_bos_token", path),
            add_eos=_flag(data, "add_eos_token", path),
            chat_template=template_file(folder / "chat_template.jinja") or _template(data.get("chat_template"), path),
            added=_added(data.get("added_tokens_decoder"), path),
        )


def _optional(path: Path) -> Mapping[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    """A token is given as its text, or as an object that describes it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _flag(data: Mapping[str, Any], key: str, path: Path) -> bool | None:
    value = data.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path}: {key}={show(value)} must be true or false")
    return value


def template_file(path: Path) -> str | None:
    """The Jinja source in a file; None if there is none.

    Raises:
        UserError: it can't be read.
    """
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise UserError(f"{path}: larger than 1 MiB, which no chat template is")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({str(error)[:100]})") from None


def _template(value: Any, path: Path) -> str | None:
    """A template, or of several with names the one named `default`."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise UserError(f"{path}: chat_template must be text, or a list of named templates")
    return value


def _added(value: Any, path: Path) -> Mapping[str, Mapping[str, Any]]:
    listed = value or {}
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise UserError(f"{path}: added_tokens_decoder must be an object of objects")
    return listed

"""From what the user calls a model (a preset, a folder, a Hub repo) to a folder on this machine.

A local folder never touches the network. A download is kept in Hugging Face's cache, and only what ember reads is
fetched. A preset's pinned revision belongs to the preset: a path brings its own (`org/name@revision`) or means `main`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ember.errors import ConfigError, UserError
from ember.model.gguf_file import is_gguf
from ember.model.json_file import one_line
from ember.model.presets import PRESETS, TINY

NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
_REPO_ID = re.compile(r"([\w.-]+/)?[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on this machine: its folder (or GGUF file), and the name that the user gave it."""

    path: Path
    name: str

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Errors of what is read from the folder begin with the setting that named it."""
        try:
            yield
        except UserError as error:
            key = "model" if is_preset(self.name) else "model.path"
            raise UserError(f"{key}={self.name}: {error}") from None


def find_model(name: str | None, path: str | None) -> ModelFolder:
    """The folder of a preset's `name`, or of a `path`, which wins: a folder or a Hub repo id, `@revision` allowed.

    Raises:
        UserError: (ConfigError) no such preset; no such folder; the repo can't be had: no network and not in the
            cache, no such repo or revision, gated. Names repo, revision and remedy.
    """
    if path is not None:
        return _local(path) or _from_hub(path)
    preset = PRESETS.get(name or "tiny")
    if preset is None:
        allowed = f"no such preset; one of {', '.join(PRESETS)}, or model.path=FOLDER_OR_REPO_ID for any other model"
        raise ConfigError("model", name, allowed)
    if preset.repo is None:
        return ModelFolder(TINY, preset.name)
    return ModelFolder(
        _download(preset.repo, preset.revision, f"model={preset.name}: {preset.repo}@{preset.revision}"), preset.name
    )


def resolve(text: str) -> ModelFolder:
    """The model that one text means: a preset's name, else a local folder, else a Hub repo id.

    Raises:
        UserError: as `find_model`.
    """
    return find_model(text, None) if is_preset(text) else find_model(None, text)


def is_preset(text: str) -> bool:
    """Whether a text is a preset's name."""
    return text in PRESETS


def _local(text: str) -> ModelFolder | None:
    """The folder of that name, or None where the text can only be a repo id."""
    if not text.strip():
        raise UserError(f"model.path={text!r}: is empty; give a folder or a Hub repo id")
    try:
        folder = Path(text).expanduser()
        if folder.is_dir():
            return ModelFolder(folder, text)
        is_file = folder.exists()
        if is_gguf(folder) and folder.is_file():
            return ModelFolder(folder, text)
    except (OSError, ValueError, RuntimeError) as error:  # too long, not allowed, a NUL in it, no such ~user
        raise UserError(f"{_setting(text)}: not a folder that can be read ({error})") from None
    if is_file:
        raise UserError(f"{_setting(text)}: is a file; give the folder that it lies in, or a .gguf file")
    if is_gguf(folder):
        raise UserError(f"{_setting(text)}: no such file")
    if _looks_like_path(text):
        raise UserError(f"{_setting(text)}: no such folder (a Hub repo id looks like org/name or org/name@revision)")
    return None


def _setting(text: str) -> str:
    return f"model.path={text if text.isprintable() else repr(text)}"


def _looks_like_path(text: str) -> bool:
    starts = text.startswith(("/", "./", "../", "~")) or text in (".", "..")
    return starts or "\\" in text or text.partition("@")[0].count("/") > 1


def _from_hub(text: str) -> ModelFolder:
    repo, at, revision = text.partition("@")
    if not _REPO_ID.fullmatch(repo) or (at and not revision.strip()):
        raise UserError(f"{_setting(text)}: neither a folder nor a Hub repo id (org/name or org/name@revision)")
    return ModelFolder(_download(repo, revision or None, f"{_setting(repo)}@{revision or 'main'}"), text)


def _download(repo: str, revision: str | None, asked: str) -> Path:
    """The repo's files in Hugging Face's cache; asks the network only for what is not there.

    Errors begin with `asked`, the setting that named the repo.
    """
    import huggingface_hub
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]  # not its retries, at length; the reason comes below
    try:
        folder = huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(NEEDED_FILES))
    except Exception as error:
        raise UserError(f"{asked}: {_reason(error, repo)}") from None
    if not (Path(folder) / "config.json").exists():
        raise UserError(f"{asked}: has no config.json, so it is not a model ember can read")
    return Path(folder)


def _reason(error: Exception, repo: str) -> str:
    """What went wrong with a download and what to do; a subclass stands before its base."""
    from huggingface_hub import errors

    login = "set HF_TOKEN or run `hf auth login`"
    match error:
        case errors.GatedRepoError():
            return f"is gated; accept its terms at https://huggingface.co/{repo}, then {login}"
        case errors.RepositoryNotFoundError():
            return f"no such repo on the Hub; check the spelling, or if it is private {login}"
        case errors.RevisionNotFoundError():
            return "the repo has no such revision; check what stands after the @ (a branch, tag or commit)"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            return (
                "not in the local cache, and the Hub can't be reached (no network, or HF_HUB_OFFLINE is set); download "
                "it where there is a network, or give a local folder: model.path=FOLDER"
            )
        case errors.HFValidationError():
            return "neither a folder nor a Hub repo id (org/name or org/name@revision)"
    return f"can't be downloaded ({type(error).__name__}: {one_line(error)})"

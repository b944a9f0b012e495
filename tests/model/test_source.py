"""Where a model comes from: presets, folders, the Hub's cache; and one clear line when it can't be had."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

import ember
from ember.errors import ConfigError, UserError
from ember.model.presets import PRESETS, TINY
from ember.model.source import find_model, is_preset, resolve

ROOT = Path(ember.__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A Hub that has every repo; what was asked of it."""
    asked: list[dict[str, Any]] = []
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").write_text("{}")

    def download(repo_id: str, **settings: Any) -> str:
        asked.append({"repo_id": repo_id, **settings})
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    return asked


def test_presets_are_read_only() -> None:
    """A preset that code can change is a global setting."""
    with pytest.raises(TypeError):
        PRESETS["gpt2"] = PRESETS["tiny"]  # type: ignore[index]
    assert {"tiny", "gpt2", "scribe", "smollm2", "qwen3-0.6b", "llama-3.2-1b", "tinyllama"} <= set(PRESETS)
    pins = {preset.name: preset.revision for preset in PRESETS.values() if preset.repo is not None}
    assert {name for name, pin in pins.items() if not re.fullmatch("[0-9a-f]{40}", pin or "")} == {"scribe"}


def test_tiny_needs_no_network(calls: list) -> None:
    """The default model must run on a machine that has never seen the Hub."""
    assert find_model("tiny", None).path == find_model(None, None).path == resolve("tiny").path == TINY
    assert not calls


def test_preset_is_pinned_and_fetches_only_what_is_needed(calls: list) -> None:
    """Without the pin a job changes when the repo does; without patterns gpt2 downloads 5 GB of other formats."""
    assert find_model("gpt2", None).name == "gpt2"
    (call,) = calls
    assert (call["repo_id"], call["revision"]) == ("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e")
    assert "model.safetensors" in call["allow_patterns"] and "model-*.safetensors" in call["allow_patterns"]
    assert not any("bin" in pattern or pattern.startswith("*") for pattern in call["allow_patterns"])


@pytest.mark.parametrize(
    ("path", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("name", "name", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("gpt2", "gpt2", None),
        ("openai-community/gpt2", "openai-community/gpt2", None),
    ],
)
def test_repo_ids(calls: list, path: str, repo: str, revision: str | None) -> None:
    """A preset's revision must never leak to a path, which would pin the wrong repo to it."""
    assert find_model("gpt2", path).name == path
    assert (calls[0]["repo_id"], calls[0]["revision"]) == (repo, revision)


def test_a_folder_wins_over_the_hub(calls: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder called like a repo must not be fetched; nor may one with an @ be taken apart."""
    for name in ("org/name", "a@b", "deep/er/still"):
        (tmp_path / name).mkdir(parents=True)
        assert find_model("tiny", name).path == Path(name)
        assert resolve(name).path == Path(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model(None, "~/org").path == tmp_path / "org"
    assert find_model(None, str(tmp_path)).path == tmp_path
    assert not calls


@pytest.mark.parametrize("path", ["/no/where", "./nowhere", "../nowhere", "~/nowhere", "a/b/c", "a\\b", "~nobody/x"])
def test_paths_that_are_not_there(calls: list, path: str) -> None:
    """A mistyped path must not become a request to the Hub with its 'Repo id must be ...'."""
    with pytest.raises(UserError, match=r"no such folder|not a folder") as caught:
        find_model(None, path)
    assert "\n" not in str(caught.value) and not calls


@pytest.mark.parametrize("path", ["a b", "org/na me", "org/name@", "@x", "x\x00y", "ü/x", "a" * 5000, ""])
def test_neither_folder_nor_repo_id(calls: list, path: str) -> None:
    """What can't be either is said at once."""
    with pytest.raises(UserError) as caught:
        find_model(None, path)
    assert "\n" not in str(caught.value) and not calls


def test_a_file_is_not_a_folder(calls: list, tmp_path: Path) -> None:
    """Pointing at model.safetensors itself is a common slip."""
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(UserError, match="is a file; give the folder"):
        find_model(None, "model.safetensors")


def test_unknown_preset_lists_the_presets() -> None:
    """`model=org/name` is a common slip for `model.path=`."""
    with pytest.raises(ConfigError, match=r"tiny, gpt2, .*model\.path="):
        find_model("org/name", None)
    assert is_preset("gpt2") and not is_preset("org/name")


def _http(kind: type) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "401 Client Error.\n\nLong text with\nlines.")
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_http(errors.GatedRepoError), r"gated; accept its terms at https://huggingface\.co/org/name"),
        (_http(errors.RepositoryNotFoundError), "no such repo"),
        (_http(errors.RevisionNotFoundError), "no such revision"),
        (_http(errors.HfHubHTTPError), "can't be downloaded"),
        (errors.LocalEntryNotFoundError("x\ny"), "not in the local cache"),
        (errors.OfflineModeIsEnabled("x"), "not in the local cache"),
        (errors.HFValidationError("x"), "neither a folder nor"),
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("first\nsecond"), r"RuntimeError: first second"),
    ],
)
def test_what_the_hub_answers(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    """Each failure is one line with repo, revision and remedy, not the Hub client's page of text."""

    def download(*args: Any, **settings: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=says) as caught:
        find_model(None, "org/name@v1")
    assert "org/name@v1" in str(caught.value) and "\n" not in str(caught.value)


def test_repo_without_a_config(calls: list, tmp_path: Path) -> None:
    """A repo of another kind (a data set's, GGUF files) downloads nothing and then fails strangely."""
    (tmp_path / "snapshot" / "config.json").unlink()
    with pytest.raises(UserError, match=r"org/name@main: has no config\.json"):
        find_model(None, "org/name")


def _cached(home: Path) -> Path:
    repo = home / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return snapshot


def _offline(home: Path, path: str) -> str:
    code = (
        "import sys\nfrom ember.errors import UserError\nfrom ember.model.source import find_model\n"
        "try: print(find_model(None, sys.argv[1]).path)\nexcept UserError as error: print('error', error)\n"
    )
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code, path], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_offline_uses_the_cache(tmp_path: Path) -> None:
    """A cluster node without network must find what was downloaded before, by branch and by commit."""
    snapshot = _cached(tmp_path)
    assert _offline(tmp_path, "org/name") == _offline(tmp_path, f"org/name@{COMMIT}") == str(snapshot)


def test_offline_and_not_cached(tmp_path: Path) -> None:
    """The line must name the repo and what to do, not only say that traffic is disabled."""
    said = _offline(tmp_path, "org/other@v2")
    assert said.startswith("error model.path=org/other@v2: not in the local cache") and "model.path=FOLDER" in said


def test_hub_client_is_imported_late() -> None:
    """Finding a local folder, and importing ember, must not pay for the Hub client."""
    code = (
        "import sys; from ember.model.source import find_model; find_model('tiny', None); "
        "print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""One line on stderr for what the user can mend, a traceback for a bug: the only place that words Hydra's errors."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import hydra
import omegaconf
import yaml
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigLoadError
from omegaconf.errors import GrammarParseError, InterpolationKeyError, OmegaConfBaseException
from yaml import YAMLError
from yaml.error import MarkedYAMLError

from ember.errors import JobError, UserError
from ember.interrupt import is_ctrl_c
from ember.launch.job_file import in_file
from ember.launch.keys import NO_BASE, known_keys, must_be, no_such_key
from ember.launch.outcome import BUG, INTERRUPTED, MISTAKE
from ember.launch.places import job_folders, job_names, override_key

_QUOTING = "cannot be read as it stands; a value with , = [ ] ( ) { } % # : ~ or letters beyond ASCII needs quotes"
_INTERPOLATION = "${...} takes another setting's value; as plain text it is written \\${...}"
_LAUNCHERS = {
    "joblib": "joblib",
    "submitit_slurm": "slurm",
    "submitit_local": "slurm",
    "slurm": "slurm",
    "ray": "ray-launcher",
}
"""The extra that brings each launcher."""
_READERS = [Path(inspect.getfile(package)).resolve().parent for package in (hydra, omegaconf, yaml)]


def report(error: BaseException, overrides: Sequence[str] = ()) -> int:
    """Say on stderr what went wrong; returns the exit code."""
    sys.stdout.flush()
    if is_ctrl_c(error):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    line = explain(error, overrides)
    if line is None:
        traceback.print_exception(error)
        return BUG
    print("error:", line.replace("\n", "\\n"), file=sys.stderr, flush=True)
    return BUG if isinstance(error, JobError) else MISTAKE


def explain(error: BaseException, overrides: Sequence[str] = ()) -> str | None:
    """What the user did wrong and may do instead; None if it is a bug."""
    match error:
        case UserError():
            return str(error)
        case OverrideParseException():
            return _unreadable(error.override)
        case MissingConfigException():
            return _missing(error, overrides)
        case ConfigCompositionException():
            return _composition(error, overrides)
        case InterpolationKeyError() | GrammarParseError():
            return f"{error.full_key or 'a setting'}: {_first_line(error)}; {_INTERPOLATION}"
        case OmegaConfBaseException():
            return f"{error.full_key}: {_first_line(error)}"
        case MarkedYAMLError():
            return f"{str(error.problem_mark).strip()}: {error.problem}"
        case HydraException() | ConfigLoadError() | YAMLError():
            return in_file(str(error)) or _first_line(error)
        case ValueError() | OverflowError() if _from_reading(error):
            return _unreadable_number(error)
    return None


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override}: a setting is written key=value"
    if '"' in value or "'" in value:
        example = _quoted("data", "a,b.jsonl")
        return f'{override}: {_QUOTING}: {example}; within them " is written \\"'
    return f"{override}: {_QUOTING}: {_quoted(key, value)}"


def _quoted(key: str, value: str) -> str:
    return f"{key}='\"{value}\"'"


def _missing(error: MissingConfigException, overrides: Sequence[str]) -> str:
    name = error.missing_cfg_file
    if name is None:
        return str(error).replace("\n", " ")
    if error.options is not None:
        return _no_such_choice(name, error.options, overrides)
    where = re.match(r"In '(.*?)'", str(error))
    if name.startswith("hydra/launcher/"):
        return _no_such_launcher(name.removeprefix("hydra/launcher/"))
    if name == "hydra/sweeper/optuna":
        return "hydra/sweeper=search: Optuna's sweeper is not installed: pip install 'ember-batch[optuna]'"
    shipped = f"there are: {', '.join(job_names(job_folders()))}; other folders: -cd FOLDER -cn NAME"
    return f"{where[1]}.yaml: no config {name} to build on" if where else f"no job named {name} ({shipped})"


def _no_such_choice(name: str, options: Sequence[str], overrides: Sequence[str]) -> str:
    """`missing_cfg_file` is group/choice, and either may hold a slash."""
    groups = [override_key(o) for o in overrides if "=" in o]
    group = next((g for g in groups if name.startswith(f"{g}/")), name.rpartition("/")[0])
    choice = name.removeprefix(f"{group}/")
    if group == "hydra/launcher" and choice in _LAUNCHERS:
        return _no_such_launcher(choice)
    line = f"{group}={choice}: no such choice (there are: {', '.join(sorted(options))})"
    if group == "model":
        return f"{line}; a folder or Hub repo is model.path={choice}"
    return line


def _no_such_launcher(name: str) -> str:
    extra = _LAUNCHERS.get(name, name)
    return f"hydra/launcher={name}: this launcher is not installed: pip install 'ember-batch[{extra}]'"


def _composition(error: ConfigCompositionException, overrides: Sequence[str]) -> str:
    text, cause = str(error), error.__cause__
    if override := re.match(r"Error merging override (.*)", text, re.DOTALL):
        return _wrong_type(override[1], cause)
    if unknown := re.match(r"Could not override '([^']*)'\.\n", text):
        return _unknown(unknown[1], cause, overrides)
    if comma := re.match(r"Ambiguous value for argument '(.*)'\n1\.", text, re.DOTALL):
        key, _, value = comma[1].partition("=")
        return f"{comma[1]}: a comma makes a sweep, which needs -m; as one text: {_quoted(key, value)}; as a list: " + (
            f"{key}=[{value}]"
        )
    if sweep := re.match(r"Sweep parameters '(.*)' requires --multirun", text, re.DOTALL):
        key = override_key(sweep[1])
        return f"{sweep[1]}: makes a sweep, which needs -m; for a text, as a file pattern: {_quoted(key, '*.jsonl')}"
    if plus := re.match(r"Could not append to config\. An item is already at '(.*)'", text):
        return f"+{plus[1]}: the setting exists; write it without the +"
    if not text and cause is not None:
        return explain(cause, overrides) or _first_line(cause)
    return in_file(text) or _first_line(error)


def _wrong_type(override: str, cause: BaseException | None) -> str:
    key = str(getattr(cause, "full_key", "") or override_key(override))
    allowed = must_be(key) if key == override_key(override) or not key.startswith("hydra") else None
    if key != override_key(override) and not isinstance(getattr(cause, "value", None), str | int | float):
        below = (
            f"{key} "
            if "not Optional" in str(cause) or "None" in str(getattr(cause, "value", None))
            else f"{key} has no settings below it; it "
        )
        return f"{override}: {below}{allowed}"
    return f"{override}: {allowed or _first_line(cause)}"


def _unknown(key: str, cause: BaseException | None, overrides: Sequence[str]) -> str:
    value = next((o.partition("=")[2] for o in overrides if override_key(o) == key), None)
    if key in known_keys() and getattr(cause, "object_type_str", "") == "dict":
        return f"{key}: {NO_BASE}"
    if key.startswith("hydra"):
        return f"{key}: {_first_line(cause)}"
    return no_such_key(key, value)


def _from_reading(error: BaseException) -> bool:
    """Whether it comes from what reads settings, not from code below a job."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(Path(frames[-1].filename).resolve().is_relative_to(reader) for reader in _READERS)


def _unreadable_number(error: BaseException) -> str:
    """Python words its limits on numbers without the setting's name; OmegaConf may add it."""
    key = re.search(r"full_key: (\S+)", str(error))
    if key or isinstance(error, OverflowError) or "digits" in str(error):
        return f"{key[1] if key else 'a setting'}: the number is too large"
    return in_file(str(error)) or _first_line(error)


def _first_line(error: BaseException | None) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

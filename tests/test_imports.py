"""Imports go one way, heavy packages stay where they belong, and the engine's core stays readable in an hour."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "ember").rglob("*.py"))
}
LEVELS = {
    "ember": 0,
    "ember.errors": 0,
    "ember.threads": 0,
    "ember.kernel_cache": 0,
    "ember.huge_pages": 0,
    "ember.environment": 0,
    "ember.transfer": 0,
    "ember.checks": 1,
    "ember.output_form": 1,
    "ember.sampling_params": 1,
    "ember.config": 2,
    "ember.cache": 3,
    "ember.model": 3,
    "ember.attention": 3,
    "ember.beam_search": 0,
    "ember.core": 4,
    "ember.sampling": 4,
    "ember.core.scheduler": 5,
    "ember.core.model_runner": 5,
    "ember.core.sampler": 5,
    "ember.speculation": 5,
    "ember.core.engine": 6,
    "ember.parallel": 6,
    "ember.data": 7,
    "ember.entrypoints": 7,
    "ember.serving": 7,
    "ember.interrupt": 7,
    "ember.progress": 7,
    "ember.dry_run": 8,
    "ember.fingerprint": 7,
    "ember.claim": 8,
    "ember.report": 7,
    "ember.job": 9,
    "ember.launch": 10,
    "ember.run": 11,
    "ember.entrypoints.verbs": 9,
    "ember.entrypoints.cli": 12,
}
"""A module imports from its own level or below; a name stands for everything under it that has none of its own."""
HELPS_THE_JOB = 8
"""The level of any other module right under ember: what the job is made of."""
WITHIN_A_LEVEL = {("ember.core.scheduler", "ember.core.model_runner"), ("ember.core.scheduler", "ember.core.sampler")}
PURE = ("ember.core", "ember.sampling", "ember.cache", "ember.attention", "ember.model")
HEAVY = {"hydra", "omegaconf", "pyarrow", "tqdm"}
CORE = ["core/*.py", "cache/*.py", "attention/base.py", "attention/reference.py", "attention/batched.py"]
CORE += ["model/gpt2.py", "model/weights.py"]
CORE_LINES = 2423


def imports(path: Path) -> Iterator[str]:
    """Absolute names that a file imports anywhere; `from a import b` gives a.b where that is a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                yield deeper if deeper in MODULES else str(node.module)


def level(module: str) -> int:
    while module.count(".") > 1 and module not in LEVELS:
        module = module.rpartition(".")[0]
    return LEVELS.get(module, HELPS_THE_JOB)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    own = [name for name in imports(MODULES[module]) if name.split(".")[0] == "ember"]
    if module == "ember":  # its names load lazily
        own = []
    upwards = [name for name in own if level(name) > level(module)]
    assert not upwards, f"{module} imports upwards"
    sideways = [name for name in own if {(module, name), (name, module)} & WITHIN_A_LEVEL]
    assert not sideways, f"{module} imports its peer"


@pytest.mark.parametrize("module", [m for m in MODULES if within(m, PURE)])
def test_the_engine_knows_no_files_and_no_config_library(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(MODULES[module])} & HEAVY


@pytest.mark.parametrize("module", [m for m in MODULES if within(m, ("ember.cache",))])
def test_the_cache_imports_nothing_of_the_core(module: str) -> None:
    assert not [name for name in imports(MODULES[module]) if within(name, ("ember.core",))]


@pytest.mark.parametrize("module", [m for m in MODULES if not within(m, ("ember.launch",))])
def test_only_run_and_its_helpers_import_hydra(module: str) -> None:
    """Below it nothing sees a DictConfig."""
    assert not {name.split(".")[0] for name in imports(MODULES[module])} & {"hydra", "omegaconf"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["ember", "ember.config", "ember.run", "ember.entrypoints.cli"])
def test_importing_brings_no_torch(module: str) -> None:
    """`import ember`, --help and mistakes must not wait seconds for torch."""
    done = python(f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'pyarrow'}} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr


def test_every_module_imports_with_the_base_dependencies() -> None:
    """A module that needs an extra imports it where it is used; here those of the test and dev extras are blocked."""
    blocked = [
        "pytest",
        "hypothesis",
        "transformers",
        "tokenizers",
        "triton",
        "ray",
        "fastapi",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "matplotlib",
        "pandas",
        "duckdb",
    ]
    code = f"""
import importlib, sys
for name in {blocked}:
    sys.modules[name] = None
for name in {list(MODULES)}:
    importlib.import_module(name)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_for(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_no_function_is_long() -> None:
    """House style: none over 60 lines."""
    long = [
        f"{module}.{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno + 1 > 60
    ]
    assert not long


def test_the_engines_core_stays_small() -> None:
    files = [path for pattern in CORE for path in (ROOT / "ember").glob(pattern)]
    assert len(files) >= len(CORE)
    lines = sum(1 for path in files for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    assert lines <= CORE_LINES

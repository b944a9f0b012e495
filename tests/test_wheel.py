"""The wheel, built and installed elsewhere: everything that a user gets is in it, and works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.wheel, pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)], ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin folder of a new environment with the wheel in it.

    It borrows this environment's dependencies by a path file; unlike the real thing, such a folder's own path files
    are not read, so an editable install of the checkout is not seen.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    borrowed = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--no-deps",
        "--no-index",
    ]
    run([*pip, str(wheel)], folder)
    yield folder / "bin"


def run(words: list[str], folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_everything(wheel: Path) -> None:
    """conf/ and jobs/ lie outside the package, model files are no Python: each is easily left out."""
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ember").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for folder in ("conf", "jobs"):
        expected |= {
            f"ember/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.*") if path.is_file()
        }
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = {name.rpartition(".dist-info/")[2] for name in archive.namelist() if ".dist-info/" in name}
    assert held == expected
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= metadata


def test_the_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    where = run([str(installed / "python"), "-c", "import ember; print(ember.__file__)"], tmp_path)
    assert where.startswith(str(installed.parent))


def test_a_shipped_job_runs_anywhere(installed: Path, tmp_path: Path) -> None:
    run([str(installed / "ember"), "-cn", "quickstart", "sampling.max_tokens=2", "output=out"], tmp_path)
    assert "OpenAI-compatible" in run([str(installed / "ember-serve"), "--help"], tmp_path)
    assert pq.read_table(tmp_path / "out" / "completions").num_rows == 24


def test_a_shipped_sweep_runs_anywhere(installed: Path, tmp_path: Path) -> None:
    words = ["-m", "ember.run", "-cn", "cache_sweep", "limit=2", "sampling.max_tokens=2", "output=out"]
    run([str(installed / "python"), *words], tmp_path)
    assert len(list((tmp_path / "out").glob("block_size=*,pool_size=*"))) == 9

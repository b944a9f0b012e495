"""In CI a test that is skipped for a reason nobody expects fails the run: a check must not vanish unseen."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""Before torch loads: threads that spin beside other processes make a test up to 100 times slower on two cores."""
os.environ.setdefault("TRITON_INTERPRET", "1")
"""Before anything imports Triton: its kernels then run on the CPU."""

EXPECTED_SKIPS = (
    "needs a GPU",
    "needs CUDA",
    "needs the network",
    "needs Ray",
    "needs Triton",
    "needs PyTorch 2.13",
    "needs root",
    "needs the SmolLM2 package",
    "needs the launcher",
    "needs the sweeper",
    "needs the serve extra",
    "needs Chromium",
)
HERE = "EMBER_TESTS_HERE"
"""An environment variable: expected skips, separated by commas, that this run is not to have."""


class NoSilentSkips:
    """Collects skips with a reason outside EXPECTED_SKIPS."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []
        here = os.environ.get(HERE, "").split(",")
        self._expected = tuple(reason for reason in EXPECTED_SKIPS if reason not in here)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            if not reason.startswith(self._expected):
                self.unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unexpected:
            terminalreporter.section("skips that CI does not expect (tests/conftest.py)")
            for line in self.unexpected:
                terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def no_log_file_of_another_test() -> Iterator[None]:
    """A job that ran in this process leaves a handler whose folder is soon gone: whoever logs next would fail."""
    before = list(logging.root.handlers)
    yield
    for handler in [h for h in logging.root.handlers if isinstance(h, logging.FileHandler) and h not in before]:
        logging.root.removeHandler(handler)
        handler.close()


@pytest.fixture(scope="session", autouse=True)
def embedded_model_is_loaded_once() -> Iterator[None]:
    """Its tokenizer and, for each form, its network: nobody writes to them, and hundreds of tests ask for them."""
    if "torch" not in sys.modules:  # no test of this session is about models
        yield
        return
    from ember.entrypoints import plan
    from ember.model.presets import TINY
    from ember.model.ranks import ALONE
    from ember.parallel import rank

    load_tokenizer, make_network, networks = plan.load_tokenizer, rank.make_network, {}
    tokenizer = cache(load_tokenizer)

    def shared_tokenizer(folder: Path, **options: bool) -> object:
        return (tokenizer if folder == TINY else load_tokenizer)(folder, **options)

    def shared_network(config: object, weights: Mapping[str, object], form: str, ranks: object) -> object:
        if weights._folder != TINY or ranks is not ALONE:
            return make_network(config, weights, form, ranks)
        key = (config, weights._dtype, weights._device, form)
        if key not in networks:
            networks[key] = make_network(config, weights, form, ranks)
        return networks[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "load_tokenizer", shared_tokenizer)
        patch.setattr(rank, "make_network", shared_network)
        yield


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI"):
        config.pluginmanager.register(NoSilentSkips(), "no-silent-skips")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the modules hold by now stays to the end: searching it for garbage again and again is a tenth of it all."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder with two prompts in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Call me"}\n{"prompt": "The sea"}\n', encoding="utf-8")
    yield tmp_path

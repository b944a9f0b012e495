"""An engine in a process of a cluster: what it is made of, and what it does with a chunk of rows."""

from __future__ import annotations

import copy
import pickle
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

import ember
from ember.config import JobConfig, ModelConfig
from ember.core.stats import StepStats
from ember.data.output import RequestOutput
from ember.data.reader import PromptRow
from ember.entrypoints.llm import LLM
from ember.entrypoints.plan import EnginePlan
from ember.errors import UserError
from ember.runners.desk import Flag
from ember.runners.shared_engine import SharedEngine
from ember.threads import num_cores


@dataclass(kw_only=True, slots=True)
class Result:
    """What an engine sends back for one chunk.

    Attributes:
        engine: tells apart the engines, also one from its successor after a restart.
        rows: the finished rows; those of a stopped job that had not started are missing.
        stats: the engine's steps since its last result.
        num_sampled: tokens drawn in them.
        mistake: why the engine can't be made at all, in one line.
    """

    engine: str
    rows: list[tuple[PromptRow, RequestOutput]] = field(default_factory=list)
    stats: list[StepStats] = field(default_factory=list)
    num_sampled: int = 0
    mistake: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """How every engine is made: the job's settings with all that this process has resolved, and its share of a node.

    Attributes:
        folder: the model's files here; where they are not, the settings' own model is looked for.
        num_threads: of an engine, unless the settings say another number.
        num_sharing: engines that share a node's memory, or one GPU.
    """

    config: JobConfig
    folder: str
    num_threads: int
    num_sharing: int
    version: str = ember.__version__

    def load(self) -> LLM:
        """The engine.

        Raises:
            UserError: this machine lacks the model, the device or this version of ember.
        """
        if self.version != ember.__version__:
            raise UserError(f"a worker has ember {ember.__version__}, the job {self.version}; install the same")
        config = copy.deepcopy(self.config)
        if config.num_threads is None:
            config.num_threads = min(self.num_threads, num_cores())
        if Path(self.folder).exists():
            config.model = ModelConfig(path=self.folder)
        return LLM.from_plan(EnginePlan.resolve(config, self.num_sharing))


class RayEngine:
    """An engine as Ray Data runs it: an actor that is called with chunks, several at a time."""

    def __init__(self, spec: EngineSpec, desk: Any) -> None:
        self._name, self._mistake = uuid.uuid4().hex, ""
        try:
            llm = spec.load()
        except UserError as error:  # an exception here would reach the user as Ray's own, pages long
            self._mistake = str(error)
            return
        self._engine = SharedEngine(llm, spec.config, Flag(desk.stopped.remote()))
        desk.set_loaded.remote()

    def __call__(self, batch: pa.Table) -> dict[str, list[bytes]]:
        """One chunk of rows to one Result, both pickled."""
        if self._mistake:
            return {"result": [pickle.dumps(Result(engine=self._name, mistake=self._mistake))]}
        rows = [row for chunk in batch["chunk"].to_pylist() for row in pickle.loads(chunk)]
        done = [(replace(row, prompt=None, sampling={}), output) for row, output in self._engine.compute(rows)]
        stats, num_sampled = self._engine.take_stats()
        return {"result": [pickle.dumps(Result(engine=self._name, rows=done, stats=stats, num_sampled=num_sampled))]}

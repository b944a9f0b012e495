"""`runner=ray`: Ray Data streams the rows that are left through a pool of engines; this process records the results.

    reader (one task on this node) -> chunks of rows -> engines (actors) -> results -> this process -> Recorder
                                                           "loaded", "stopped" -> Desk

Ray schedules, restarts and retries. A chunk is the unit of all this: a lost worker's chunks are computed again, and
the results of a chunk come in one piece, because Ray takes up a retried stream of results where the lost one broke
off, and rows that are computed again finish in another order. No row's tokens depend on the engine that computes it.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import queue
import sys
import threading
import time
from typing import Any

from ember.config import JobConfig
from ember.data.reader import PromptReader
from ember.data.summary import JobSummary
from ember.data.work import Work
from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError, UserError
from ember.interrupt import Interrupted
from ember.recorder import Recorder
from ember.runners.cluster import cluster, cpus_per_engine, import_ray, most_engines, node_cpus
from ember.runners.desk import LOOK_EVERY_S, Desk, Flag, read_chunks
from ember.runners.worker import EngineSpec, RayEngine, Result

CHUNKS_AT_ONCE = 4
"""Chunks that an engine computes at a time: while one drains, the others keep its batch full."""
DEATHS = 5
"""So many workers may die one after the other, with no result between: then it is not bad luck."""
RESULTS_AHEAD = 16


def run_on_ray(recorder: Recorder, reader: PromptReader, begin: float) -> JobSummary:
    """Compute a job's rows on a Ray cluster and record them here.

    Args:
        begin: when the job began, on `time.perf_counter`'s clock.

    Raises:
        UserError: Ray is not installed or not reachable, or a worker can't load the model.
    """
    plan = recorder.plan
    assert isinstance(plan, EnginePlan)
    _check_device(recorder.config, plan)
    with cluster(recorder.config) as ray:
        patience = most_engines(recorder.config) + DEATHS
        desk = ray.remote(num_cpus=0, max_concurrency=1000)(Desk).options(**_here(ray)).remote(patience)
        with _Results(_dataset(ray, recorder, plan, reader, desk)) as results:
            job = RayJob(recorder, results, desk)
            return recorder.run(job.run, load_s=time.perf_counter() - begin)


class RayJob:
    """Takes results as they come until all rows are there, or the time after a signal runs out."""

    def __init__(self, recorder: Recorder, results: _Results, desk: Any) -> None:
        self.config, self.interrupts = recorder.config, recorder.interrupts
        self._recorder, self._results, self._desk = recorder, results, desk
        self._loaded, self._hopeless = Flag(desk.loaded.remote()), Flag(desk.hopeless.remote())
        self._loading = True
        self._written = bytearray(recorder.work.share.end)
        self._num_left = recorder.work.share.num_rows - recorder.work.num_done
        self._engines: dict[str, int] = {}
        self._deadline_s: float | None = None

    def run(self) -> bool:
        """Record until the end; returns whether all rows are written.

        Raises:
            UserError: a worker can't load the model.
        """
        while self._num_left:
            if self.interrupts.signum is not None:
                self._wind_down()
            if self._out_of_time() or self._recorder.too_many_errors:
                break
            try:
                with self.interrupts.breakable(after=2):
                    results = self._results.next(LOOK_EVERY_S)
            except Interrupted:
                break
            if results is None:
                break
            if self._hopeless():
                raise UserError(
                    f"{DEATHS} workers died one after the other, with no result; is a row too large for one?"
                )
            self._record(results)
        if self._num_left and self.interrupts.signum is None and not self._recorder.too_many_errors:
            raise RuntimeError(f"the cluster gave no results for {self._num_left} rows")
        return not self._num_left

    def _record(self, results: list[Result]) -> None:
        if results:
            self._desk.set_progress.remote()
        if self._loading and (results or self._loaded()):
            self._loading = False
            self._recorder.loaded()
        for result in results:
            if result.mistake is not None:
                raise UserError(result.mistake)
            self._write(result)
            number = self._engines.setdefault(result.engine, len(self._engines))
            self._recorder.steps(number, result.stats, result.num_sampled)
            if result.stats:
                self._recorder.tick(result.stats[-1])

    def _write(self, result: Result) -> None:
        """Each row once: Ray may compute one twice, and both may arrive."""
        for row, output in result.rows:
            if self._recorder.too_many_errors:
                return
            if not self._written[row.row_index]:
                self._written[row.row_index] = 1
                self._num_left -= 1
                self._recorder.write(row, output)

    def _wind_down(self) -> None:
        """After the first signal: nothing new starts, what runs has `grace_s` to finish."""
        if self._deadline_s is None:
            self._deadline_s = time.perf_counter() + self.config.grace_s
            self._desk.set_stopped.remote()
            print(
                f"stopping: running rows have {self.config.grace_s:g} s to finish (once more to stop at once)",
                file=sys.stderr,
            )

    def _out_of_time(self) -> bool:
        return self.interrupts.at_once or (self._deadline_s is not None and time.perf_counter() > self._deadline_s)


class _Results:
    """Results of a dataset, taken from it by a thread, so that the main thread can look at signals and the clock."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._queue: queue.Queue[list[Result] | BaseException | None] = queue.Queue(RESULTS_AHEAD)
        self._left = False
        self._thread = threading.Thread(target=self._pump, name="ember-ray-results", daemon=True)

    def next(self, timeout_s: float) -> list[Result] | None:
        """What came next, empty if nothing came in that time, None at the end.

        Raises:
            Exception: the cluster could not go on.
        """
        try:
            item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return []
        if isinstance(item, BaseException):
            raise item
        return item

    def __enter__(self) -> _Results:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the rest: the thread sees it at its next result."""
        self._left = True
        while not self._queue.empty():
            self._queue.get_nowait()

    def _pump(self) -> None:
        try:
            for batch in self._dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                if self._left:
                    return
                self._queue.put([pickle.loads(result) for result in batch["result"].to_pylist()])
            self._queue.put(None)
        except BaseException as error:
            if not self._left:
                self._queue.put(error)


def _dataset(ray: Any, recorder: Recorder, plan: EnginePlan, reader: PromptReader, desk: Any) -> Any:
    """The whole stream, lazily: one task reads chunks, the pool of engines computes them."""
    data = import_ray("ray.data")
    _set_up(data)
    config, work = recorder.config, recorder.work
    cpus = cpus_per_engine(ray, config)
    constants = {"reader": reader, "work": work, "size": _chunk_size(config, work), "folder": os.getcwd(), "desk": desk}
    chunks = data.from_items([0], override_num_blocks=1).map_batches(
        read_chunks, batch_size=None, batch_format="pyarrow", fn_kwargs=constants, num_cpus=0, **_here(ray)
    )
    return chunks.map_batches(
        RayEngine,
        batch_size=None,
        batch_format="pyarrow",
        fn_constructor_args=(_spec(ray, config, plan, cpus), desk),
        compute=data.ActorPoolStrategy(
            min_size=config.num_engines,
            max_size=most_engines(config),
            max_concurrent_calls_per_actor=CHUNKS_AT_ONCE,
            max_tasks_in_flight_per_actor=CHUNKS_AT_ONCE + 2,
            enable_true_multi_threading=True,
        ),
        num_cpus=cpus,
        num_gpus=config.gpus_per_engine or None,
    )


def _set_up(data: Any) -> None:
    """Ray Data's own settings for this process; those that a version lacks are left out."""
    context = data.DataContext.get_current()
    wanted = {
        "target_max_block_size": 1,  # a chunk is one of Ray's rows: each is to be a block, and so a task
        "max_errored_blocks": 0,
        "max_consecutive_actor_init_deaths": DEATHS,
        "execution_no_progress_timeout_s": -1,
        "enable_progress_bars": False,
        "print_on_execution_start": False,
    }
    for name, value in wanted.items():
        if hasattr(context, name):
            setattr(context, name, value)
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _spec(ray: Any, config: JobConfig, plan: EnginePlan, cpus: int) -> EngineSpec:
    """Settings for the engines, in which nothing is left to what a worker's machine has."""
    fixed = copy.deepcopy(config)
    fixed.device, fixed.dtype, fixed.attention = plan.device.type, plan.dtype_name, plan.attention
    fixed.max_model_len = plan.max_model_len
    on_a_node = max(1, node_cpus(ray) // cpus)
    sharing = int(1 / config.gpus_per_engine) if config.gpus_per_engine else min(most_engines(config), on_a_node)
    return EngineSpec(config=fixed, folder=str(plan.folder.path), num_threads=cpus, num_sharing=sharing)


def _chunk_size(config: JobConfig, work: Work) -> int:
    """Half a batch, or less if there are not enough rows to give every engine several chunks."""
    left = work.share.num_rows - work.num_done
    return max(1, min(-(-config.max_num_seqs // 2), -(-left // (most_engines(config) * CHUNKS_AT_ONCE))))


def _here(ray: Any) -> dict[str, Any]:
    """For what must run on this process's own node, where the data's files are: a crumb of that node."""
    own = ray.get_runtime_context().get_node_id()
    names = [name for node in ray.nodes() if node["NodeID"] == own for name in node["Resources"]]
    return {"resources": {name: 0.001 for name in names if name.startswith("node:") and "__" not in name}}


def _check_device(config: JobConfig, plan: EnginePlan) -> None:
    if plan.device.type == "cuda" and not config.gpus_per_engine:
        raise ConfigError("gpus_per_engine", 0, "Ray hides the GPUs from engines without one; set 1, or device=cpu")
    if plan.device.type != "cuda" and config.gpus_per_engine:
        raise ConfigError(
            "gpus_per_engine", config.gpus_per_engine, "needs a GPU on this machine too, or the engines would differ"
        )

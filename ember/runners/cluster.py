"""Ray itself: importing it, starting or finding a cluster, and leaving it. The only module that imports ray."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import ember
from ember.config import JobConfig
from ember.environment import environment
from ember.errors import ConfigError, UserError

OBJECT_STORE_BYTES = 256 << 20
"""Of a local cluster: it holds chunks of rows on their way, nothing else."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}


def import_ray(module: str = "ray") -> ModuleType:
    """Ray, or a module of it.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise UserError("runner=ray needs Ray: pip install 'ember-batch[ray]'") from None


@contextmanager
def cluster(config: JobConfig) -> Iterator[ModuleType]:
    """A cluster that this process is connected to: one that it was already, `ray_address`, or a local one.

    Raises:
        UserError: Ray is not installed, or there is no cluster at that address.
    """
    ours = {key: value for key, value in QUIET.items() if key not in os.environ}
    with environment(ours if config.ray_address else ours | {"PYTHONPATH": _python_path()}):
        ray = import_ray()
        if ray.is_initialized():
            yield ray
            return
        with _own_signals(), _no_chatter():
            _connect(ray, config)
        try:
            yield ray
        finally:
            ray.shutdown()


def cpus_per_engine(ray: Any, config: JobConfig) -> int:
    """What was asked for; else one beside a GPU, and on CPUs an even share of the largest node."""
    if config.cpus_per_engine is not None:
        return config.cpus_per_engine
    return 1 if config.gpus_per_engine else max(1, node_cpus(ray) // most_engines(config))


def most_engines(config: JobConfig) -> int:
    """The upper bound of the pool of engines."""
    return config.max_engines or config.num_engines


def node_cpus(ray: Any) -> int:
    """CPUs of the largest node."""
    return max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=1)


def _connect(ray: Any, config: JobConfig) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.ray_address is not None:
        try:
            ray.init(address=config.ray_address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError("ray_address", config.ray_address, f"no Ray cluster there ({reason})") from None
        return
    cpus = max(len(os.sched_getaffinity(0)), most_engines(config) * (config.cpus_per_engine or 1))
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)


def _python_path() -> str:
    """For the processes of a local cluster: this ember, installed or not."""
    return os.pathsep.join(filter(None, [str(Path(ember.__file__).parent.parent), os.environ.get("PYTHONPATH")]))


@contextmanager
def _no_chatter() -> Iterator[None]:
    """Ray's C++ part announces on the process's own stderr that it was told to be quiet."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts its own handler of SIGTERM in the place of ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)

"""What rank 0 and its workers write into each other's pipes: pickles, between processes of one job only.

A pipe beside the group of tensors: a worker may wait in it for ever while there is nothing to do, and at its end knows
that rank 0 is gone, however it ended.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from typing import IO, Any

import numpy as np
import torch

from ember.core.batch import ModelInput
from ember.core.device_memory import PoolMeter

_TENSORS = [field.name for field in fields(ModelInput) if field.name != "copies"]


@dataclass(frozen=True, slots=True)
class Join:
    """To workers that are ready: meet rank 0 at this port."""

    port: int


@dataclass(frozen=True, slots=True)
class Step:
    """To workers: compute this. Tensors travel as arrays, which pickle ten times as fast."""

    copies: list[tuple[int, int]]
    arrays: list[np.ndarray[Any, Any]]

    @staticmethod
    def of(step: ModelInput) -> Step:
        """For the pipe."""
        return Step(step.copies, [getattr(step, name).numpy() for name in _TENSORS])

    def input(self) -> ModelInput:
        """From the pipe."""
        return ModelInput(self.copies, **dict(zip(_TENSORS, map(torch.from_numpy, self.arrays), strict=True)))


@dataclass(frozen=True, slots=True)
class Measure:
    """To workers: compute this, and say how much room it leaves for a pool."""

    step: Step
    meter: PoolMeter


@dataclass(frozen=True, slots=True)
class Room:
    """From a worker: bytes that a step leaves for its part of the pool."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """To workers: have an empty pool of so many blocks."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: its part is loaded."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker, as its last word: why, in one line."""

    why: str


def send(pipe: IO[bytes], message: object) -> None:
    """Write a message.

    Raises:
        OSError: nobody reads it.
    """
    pickle.dump(message, pipe, protocol=5)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Wait for the next message.

    Raises:
        EOFError: there will be none; one that was cut off counts for none.
    """
    try:
        return pickle.load(pipe)
    except pickle.UnpicklingError:
        raise EOFError from None

"""Decoding without launching kernels one by one: a step's kernels are captured once as a CUDA graph, then replayed.

A graph runs on the tensors that it was captured with. So there is one set of them, into which each step is copied; the
first rows serve a graph of fewer. A step is filled up to the next size that has a graph:

    sequences   a b c d e | . . .     size 8, padding: token 0, a context of 0, no slot to write to
    reach       512, 1024, 2048 ...   the longest context that a graph's grids allow for

Steps in which some sequence has several tokens, or there are more sequences than the largest size, run as ever.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

import torch

from ember.attention.base import AttentionMetadata
from ember.core.batch import ModelInput
from ember.errors import ConfigError

LARGEST = 256
"""Sequences of the largest graph: with more, the kernels take longer than their launches."""
APART = 8
"""Sequences between a size and the next, from this one on; below it sizes double."""
SHORTEST_REACH = 512
WARM_UPS = 2
"""Runs before a capture: kernels are compiled and tuned in the first."""

cuda: Any = torch.cuda  # whose hints are incomplete
Compute = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]
"""Hidden states [T, n_embd] of input ids [T] at positions [T]."""
Replay = Callable[[], torch.Tensor]
"""Computes again, on the same tensors; gives the tensor that has the result until the next one."""


class Capture(Protocol):
    """Keeps what work launches."""

    def __call__(self, work: Callable[[], torch.Tensor]) -> Replay:
        """The replay of a work that may run several times, on the tensors it uses now, and waits for nothing.

        Raises:
            RuntimeError: it can't be captured.
        """


class CudaCapture:
    """As CUDA graphs on a device, which share their memory: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Replay:
        """See `Capture`."""
        with cuda.device(self._device):
            now, beside = cuda.current_stream(), cuda.Stream()
            beside.wait_stream(now)
            with cuda.stream(beside):
                for _ in range(WARM_UPS):
                    work()
            now.wait_stream(beside)
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraphs:
    """The graphs of a network, captured as their sizes are first met.

    Args:
        most: sequences that run at once.
        width: the longest block table.
    """

    def __init__(self, capture: Capture, *, most: int, width: int) -> None:
        self.sizes = _sizes(min(most, LARGEST))
        self._capture, self._width = capture, width
        self._static: _Static | None = None
        self._replays: dict[tuple[int, int], Replay] = {}
        self._broken = False

    def forget(self) -> None:
        """Drop all graphs: they hold the addresses of a pool that is gone."""
        self._replays.clear()

    def padded(self, step: ModelInput) -> ModelInput:
        """The step with sequences that stand for nothing up to a size that has a graph; as it is if none has."""
        count = len(step.input_ids)
        if self._broken or count != len(step.context_lens) or count > self.sizes[-1]:
            return step
        more = self.sizes[bisect_left(self.sizes, count)] - count
        return replace(
            step,
            input_ids=_longer(step.input_ids, more, 0),
            positions=_longer(step.positions, more, 0),
            slot_mapping=_longer(step.slot_mapping, more, -1),
            query_start_loc=torch.arange(count + more + 1, dtype=torch.int32),
            context_lens=_longer(step.context_lens, more, 0),
            block_tables=_longer(step.block_tables, more, 0),
        )

    def run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, compute: Compute
    ) -> torch.Tensor:
        """What `compute` gives: from a graph, if the step has one, in a tensor that the next step may overwrite."""
        size, tables = len(input_ids), metadata.block_tables
        if self._broken or metadata.max_query_len > 1 or size not in self.sizes or tables.shape[1] > self._width:
            return compute(input_ids, positions, metadata)
        if self._static is None:
            self._static = _Static(self.sizes[-1], self._width, input_ids.device)
        self._static.fill(input_ids, positions, metadata)
        key = size, max(SHORTEST_REACH, 1 << (metadata.max_context_len - 1).bit_length())
        if key not in self._replays:
            try:
                self._replays[key] = self._captured(*key, self._static, metadata.block_size, compute)
            except RuntimeError as error:
                self._broken = True
                why = str(error).partition("\n")[0]
                logging.getLogger(__name__).warning("no CUDA graphs from here on, kernels are launched singly: %s", why)
                return compute(input_ids, positions, metadata)
        return self._replays[key]()

    def _captured(self, size: int, reach: int, static: _Static, block_size: int, compute: Compute) -> Replay:
        begin = perf_counter()
        metadata = static.metadata(size, reach, block_size)
        replay = self._capture(lambda: compute(static.input_ids[:size], static.positions[:size], metadata))
        took = perf_counter() - begin
        what = "captured the step of %d sequences with contexts up to %d tokens in %.2f s"
        logging.getLogger(__name__).info(what, size, reach, took)
        return replay


class _Static:
    """The tensors that graphs run on; those of a size are the first rows. What a row does not use is of no meaning."""

    def __init__(self, most: int, width: int, device: torch.device) -> None:
        self.input_ids, self.positions, self.slots = torch.zeros(3, most, dtype=torch.long, device=device)
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.contexts = torch.zeros(most, dtype=torch.int32, device=device)
        self.tables = torch.zeros(most, width, dtype=torch.int32, device=device)

    def fill(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Take over a step of one token a sequence."""
        size, width = metadata.block_tables.shape
        self.input_ids[:size].copy_(input_ids)
        self.positions[:size].copy_(positions)
        self.slots[:size].copy_(metadata.slot_mapping)
        self.contexts[:size].copy_(metadata.context_lens)
        self.tables[:size, :width].copy_(metadata.block_tables)

    def metadata(self, size: int, reach: int, block_size: int) -> AttentionMetadata:
        """Of the first `size` rows."""
        return AttentionMetadata(
            slot_mapping=self.slots[:size],
            query_start_loc=self.starts[: size + 1],
            context_lens=self.contexts[:size],
            block_tables=self.tables[:size],
            block_size=block_size,
            max_query_len=1,
            max_context_len=reach,
        )


def resolve_cuda_graphs(asked: str, device: torch.device, attention: str, num_ranks: int) -> bool:
    """Whether steps are captured: `auto` is wherever they can be.

    Raises:
        ConfigError: asked for where they can't.
    """
    why_not = _why_not(device, attention, num_ranks)
    if asked == "true" and why_not is not None:
        raise ConfigError("cuda_graphs", True, f"{why_not}; use auto")
    return asked != "false" and why_not is None


def _why_not(device: torch.device, attention: str, num_ranks: int) -> str | None:
    if device.type != "cuda":
        return f"graphs are CUDA's, this is {device.type}"
    if attention != "triton":
        return f"needs attention=triton: {attention} plans on the host what it launches, by each step's lengths"
    if num_ranks > 1:
        return "needs tensor_parallel_size=1: messages between ranks are not captured"
    return None


def _sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24 ... up to most."""
    doubling = [1 << power for power in range(APART.bit_length())]
    return [size for size in (*doubling, *range(2 * APART, most, APART)) if size < most] + [most]


def _longer(x: torch.Tensor, more: int, value: int) -> torch.Tensor:
    """Tensor [n, ...] with so many more rows of a value."""
    return torch.cat([x, x.new_full((more, *x.shape[1:]), value)])

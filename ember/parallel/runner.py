"""The model runner of rank 0: it tells the other ranks of each step and computes its own part of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ember.core.batch import ScheduledSequence
from ember.core.device_memory import PoolMeter
from ember.errors import JobError, UserError
from ember.parallel.group import Group
from ember.parallel.messages import Join, Measure, Pool, Step
from ember.parallel.rank import RunnerSpec
from ember.parallel.workers import Workers


class ParallelRunner:
    """Runs steps on several ranks. One that breaks off leaves them out of step: there is no other after it.

    Raises:
        UserError: a rank can't be started, or can't load its part.
    """

    def __init__(self, spec: RunnerSpec) -> None:
        self._num_ranks, self._over = spec.num_ranks, ""
        self._workers = Workers(spec)
        try:
            self._group: Group = spec.group(0)
            self._runner = spec.load(self._group)
            self._workers.wait_ready()
            self._workers.send(Join(self._group.invite()))
            self._group.join()
        except (OSError, RuntimeError) as error:
            why = self._workers.lost() or f"rank 0: {type(error).__name__}: {error}"
            self._workers.close()
            raise UserError(self._line(why)) from error
        except BaseException:
            self._workers.close()
            raise
        self._workers.when_one_ends(self._group.abort)

    def execute(self, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        """See `ModelRunner.execute`.

        Raises:
            JobError: a rank is lost, or the step could not be computed; says which and why.
        """
        if self._over:
            raise JobError(self._over)
        self._over = self._line("a step was broken off")
        try:
            step = self._runner.pack(scheduled)
            self._workers.send(Step.of(step))
            logits = self._runner.run(step)
            if logits.is_cuda:
                torch.cuda.current_stream().synchronize()  # only now it shows that a rank is lost
                if not self._workers.complete:
                    raise RuntimeError("what was computed is of no use")
        except (OSError, RuntimeError, MemoryError) as error:
            lost = self._workers.lost()
            self._over = self._line(lost or f"rank 0: {type(error).__name__}: {error}")
            self.close()
            raise JobError(self._over) from error
        self._over = ""
        return logits

    def pool_room(
        self, scheduled: list[ScheduledSequence], meter: PoolMeter, then: Callable[[torch.Tensor], object]
    ) -> int:
        """See `PoolRunner.pool_room`.

        Raises:
            UserError: a rank could not compute the step; says which and why.
        """
        step = self._runner.pack(scheduled)
        self._workers.send(Measure(Step.of(step), meter))
        own = meter.room(self._group.device, lambda: then(self._runner.run(step)))
        return self._num_ranks * min(own, *self._workers.rooms())

    def set_pool(self, num_blocks: int) -> None:
        """Have an empty pool of so many blocks on every rank."""
        self._workers.send(Pool(num_blocks))
        self._runner.set_pool(num_blocks)

    def close(self) -> None:
        """End the other ranks."""
        self._over = self._over or self._line("it is closed")
        self._workers.close()
        self._group.abort()

    def _line(self, why: str) -> str:
        return f"tensor_parallel_size={self._num_ranks}: {' '.join(why.split())}"

"""The model runner of rank 0: it tells the other ranks of each step and computes its own part of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

from ember.core.batch import ScheduledSequence
from ember.core.device_memory import PoolMeter
from ember.errors import JobError, UserError
from ember.parallel.group import Group
from ember.parallel.messages import Join, Measure, Pool, Step
from ember.parallel.rank import RunnerSpec
from ember.parallel.workers import Workers
from ember.threads import use_threads


class ParallelRunner:
    """Runs steps on several ranks. One that breaks off leaves them out of step: there is no other after it.

    Raises:
        UserError: a rank can't be started, or can't load its part.
    """

    def __init__(self, spec: RunnerSpec) -> None:
        self._num_ranks, self._over = spec.num_ranks, ""
        self._give_threads_back = weakref.finalize(self, use_threads, torch.get_num_threads())
        self._workers = Workers(spec.num_ranks)
        try:
            self._workers.start(spec)
            self._group: Group = spec.group(0)
            self._runner = spec.load(self._group)
            self._workers.wait_ready()
            self._workers.send(Join(self._group.invite()))
            _meet(self._group, self._workers)
        except (OSError, RuntimeError) as error:
            why = self._workers.lost() or f"rank 0: {type(error).__name__}: {error}"
            self._let_go()
            raise UserError(self._line(why)) from error
        except BaseException:
            self._let_go()
            raise

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
        """End the other ranks; torch has its threads back."""
        self._over = self._over or self._line("it is closed")
        self._let_go()
        self._group.abort()

    def _let_go(self) -> None:
        self._workers.close()
        self._give_threads_back()

    def _line(self, why: str) -> str:
        return f"tensor_parallel_size={self._num_ranks}: {' '.join(why.split())}"


def _meet(group: Group, workers: Workers) -> None:
    """Let the ranks meet; from now on the group is aborted when one ends.

    Another thread waits for those that are to come: nothing else can end that wait before its time is over.

    Raises:
        RuntimeError: one has ended, or did not come.
    """
    outcome: SimpleQueue[Exception | None] = SimpleQueue()

    def join() -> None:
        try:
            group.join()
            outcome.put(None)
        except Exception as error:
            outcome.put(error)

    def on_loss() -> None:
        outcome.put(RuntimeError("a rank has ended"))
        group.abort()

    workers.when_one_ends(on_loss)
    threading.Thread(target=join, daemon=True).start()
    if (error := outcome.get()) is not None:
        raise error

"""What one call gets from the engine, piece by piece, in the event loop of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ember.data.logprobs import PositionLogprobs
from ember.data.output import CompletionOutput


@dataclass(slots=True)
class Piece:
    """What a choice got since its last piece; `output` is set on its last one.

    Choices are numbered over all prompts: sample `j` of prompt `i` is choice `i * n + j`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    output: CompletionOutput | None = None

    def extend(self, later: Piece) -> None:
        """Take up what the same choice got after it."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *later.logprobs]
        self.output = later.output


Push = Callable[[Piece], bool]


class Generation:
    """The choices of one call as they are computed. Belongs to the event loop.

    Attributes:
        num_open: choices that have not ended.
    """

    def __init__(self, num_choices: int, give_up: Callable[[Generation], None]) -> None:
        self.num_open = num_choices
        self._give_up = give_up
        self._pieces: dict[int, Piece] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._push: Push | None = None
        self._given_up = False

    async def pieces(self, push: Push | None = None) -> list[Piece]:
        """What has come since the last call, a piece a choice and at least one; nothing once all is over or given up.

        One caller at a time may wait.

        Args:
            push: takes pieces of choices that go on while there is a wait, or declines them.
        """
        if not self._pieces and self.num_open and not self._given_up:
            self._waiter, self._push = asyncio.get_running_loop().create_future(), push
            await self._waiter
        taken, self._pieces = self._pieces, {}
        return [] if self._given_up else list(taken.values())

    async def outputs(self) -> list[CompletionOutput]:
        """The results in the order of the choices; an empty list if they were given up."""
        done: dict[int, CompletionOutput] = {}
        while pieces := await self.pieces():
            done |= {piece.index: piece.output for piece in pieces if piece.output is not None}
        return [] if self._given_up else [done[index] for index in sorted(done)]

    def give_up(self) -> None:
        """Nobody waits for the rest any more; harmless at any time."""
        if self.num_open and not self._given_up:
            self._given_up = True
            self._give_up(self)
            self._wake()

    def put(self, piece: Piece) -> None:
        """Take a piece from the engine; it joins what the caller has not taken yet."""
        if self._push is not None and not self._pieces and piece.output is None and self._push(piece):
            return
        if (waiting := self._pieces.get(piece.index)) is None:
            self._pieces[piece.index] = piece
        else:
            waiting.extend(piece)
        self.num_open -= piece.output is not None
        self._wake()

    def _wake(self) -> None:
        self._push = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

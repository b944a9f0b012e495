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


class Generation:
    """The choices of one call as they are computed. Belongs to the event loop.

    Attributes:
        num_open: choices that have not ended.
    """

    def __init__(self, num_choices: int, give_up: Callable[[Generation], None]) -> None:
        self.num_open = num_choices
        self._give_up = give_up
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._given_up = False

    async def pieces(self) -> list[Piece]:
        """What has come since the last call, at least one piece; nothing once all has ended or was given up."""
        if not self._pieces and self.num_open and not self._given_up:
            self._news.clear()
            await self._news.wait()
        taken, self._pieces = self._pieces, []
        return [] if self._given_up else taken

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
            self._news.set()

    def put(self, piece: Piece) -> None:
        """Take a piece from the engine."""
        self._pieces.append(piece)
        self.num_open -= piece.output is not None
        self._news.set()

"""OpenAI's bodies for completions and chats: the whole answer, or the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ember.data.logprobs import PositionLogprobs, as_rows
from ember.data.openai_logprobs import chat_logprobs, completion_logprobs
from ember.data.output import CompletionOutput
from ember.entrypoints.generation import Piece
from ember.serving.call import Call
from ember.serving.event import MARK, MARK_ID, EventFrame, as_event, as_json

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as the engine was given it. `text`, and that of its first token, are there if they are to be echoed."""

    text: str
    token_ids: list[int]
    first_token: str


class Answer(ABC):
    """Builds what is answered to one call.

    Args:
        model: the id that clients know.
        prompts: in the order of the call's.
    """

    PREFIX, OBJECT, CHUNK = "", "", ""

    def __init__(self, call: Call, model: str, prompts: Sequence[PromptText]) -> None:
        self._call, self._prompts, self._n = call, prompts, call.params.n
        self._ends: dict[int, int] = {}
        self._frames: dict[int, EventFrame] = {}
        self._head = {
            "id": f"{self.PREFIX}-{uuid.uuid4().hex}",
            "object": self.CHUNK if call.stream else self.OBJECT,
            "created": int(time.time()),
            "model": model,
        }
        self._head_json = as_json(self._head)[:-1]

    def whole(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """The body of an answer that does not stream."""
        choices = [self._choice(self._whole(index, output)) for index, output in enumerate(outputs)]
        return {**self._head, "choices": choices, "usage": self._usage(outputs)}

    def opening(self) -> bytes:
        """The events before the first token."""
        firsts = [(index, self._first(index)) for index in range(self.num_choices)]
        return b"".join(self._event(content | {"index": index}) for index, content in firsts if content)

    def piece(self, piece: Piece) -> bytes:
        """The event for one piece. Those of text and token ids alone, nearly all, are one frame a choice, filled in."""
        if piece.output is not None or piece.logprobs is not None:
            return self._event(self._choice(piece, delta=True))
        if (frame := self._frames.get(piece.index)) is None:
            mark = self._event(self._choice(Piece(piece.index, MARK, [MARK_ID]), delta=True))
            frame = self._frames[piece.index] = EventFrame.of(mark, len(b"data: ") + len(self._head_json))
        return frame.event(piece.text, piece.token_ids)

    def closing(self, outputs: Sequence[CompletionOutput]) -> bytes:
        """The events after the last token."""
        usage = {**self._head, "choices": [], "usage": self._usage(outputs)}
        return as_event(usage) if self._call.include_usage else b""

    @property
    def num_choices(self) -> int:
        """Prompts times n."""
        return len(self._prompts) * self._n

    @abstractmethod
    def _first(self, index: int) -> dict[str, Any]:
        """What a choice's stream begins with; empty for nothing."""

    @abstractmethod
    def _content(self, text: str, *, delta: bool) -> dict[str, Any]:
        """The keys of a choice that hold its text."""

    @abstractmethod
    def _logprobs(self, index: int, positions: list[PositionLogprobs]) -> dict[str, Any]:
        """Log-probabilities of a choice's next tokens, in the form of this endpoint."""

    def _whole(self, index: int, output: CompletionOutput) -> Piece:
        return Piece(index, output.text, output.token_ids, output.logprobs, output)

    def _event(self, choice: dict[str, Any]) -> bytes:
        """A chunk with one choice; of its JSON only that differs from chunk to chunk."""
        usage = {"usage": None} if self._call.include_usage else {}
        rest = {"choices": [{"logprobs": None, "finish_reason": None, **choice}], **usage}
        return b"data: %b,%b\n\n" % (self._head_json, as_json(rest)[1:])

    def _choice(self, piece: Piece, *, delta: bool = False) -> dict[str, Any]:
        output = piece.output
        choice = {
            "index": piece.index,
            **self._content(piece.text, delta=delta),
            "logprobs": None if piece.logprobs is None else self._logprobs(piece.index, piece.logprobs),
            "finish_reason": None if output is None else output.finish_reason,
            "stop_reason": None if output is None else output.stop_reason,
        }
        if self._call.return_token_ids:
            prompt_ids = None if output is None else self._prompt(piece.index).token_ids
            choice |= {"token_ids": piece.token_ids, "prompt_token_ids": prompt_ids}
        return choice

    def _prompt(self, index: int) -> PromptText:
        return self._prompts[index // self._n]

    def _usage(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        output = sum(len(o.token_ids) for o in outputs)
        cached = {"cached_tokens": sum(o.num_cached_tokens for o in outputs)}
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return {**counts, "prompt_tokens_details": cached}


class CompletionAnswer(Answer):
    """What `/v1/completions` answers."""

    PREFIX, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def _first(self, index: int) -> dict[str, Any]:
        return self._content(self._prompt(index).text, delta=True) if self._call.echo else {}

    def _content(self, text: str, *, delta: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, positions: list[PositionLogprobs]) -> dict[str, Any]:
        """Offsets go on from piece to piece."""
        form = completion_logprobs(as_rows(positions) or [])
        start = self._ends.get(index, 0)
        self._ends[index] = start + sum(map(len, form["tokens"]))
        return form | {"text_offset": [start + offset for offset in form["text_offset"]]}

    def _whole(self, index: int, output: CompletionOutput) -> Piece:
        piece = super()._whole(index, output)
        if self._call.echo:
            piece.text = self._prompt(index).text + piece.text
            scored = [position for position in output.prompt_logprobs or [] if position is not None]
            piece.logprobs = None if piece.logprobs is None else [*scored, *piece.logprobs]
        return piece

    def _choice(self, piece: Piece, *, delta: bool = False) -> dict[str, Any]:
        choice = super()._choice(piece, delta=delta)
        if self._call.echo and choice["logprobs"] is not None:
            choice["logprobs"] = _behind(self._prompt(piece.index).first_token, choice["logprobs"])
        return choice


def _behind(first: str, form: dict[str, Any]) -> dict[str, Any]:
    """A prompt's first token has no log-probability."""
    return {
        "tokens": [first, *form["tokens"]],
        "token_logprobs": [None, *form["token_logprobs"]],
        "top_logprobs": [None, *form["top_logprobs"]],
        "text_offset": [0, *(len(first) + offset for offset in form["text_offset"])],
    }


class ChatAnswer(Answer):
    """What `/v1/chat/completions` answers."""

    PREFIX, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _first(self, index: int) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def _content(self, text: str, *, delta: bool) -> dict[str, Any]:
        return {"delta": {"content": text}} if delta else {"message": {"role": "assistant", "content": text}}

    def _logprobs(self, index: int, positions: list[PositionLogprobs]) -> dict[str, Any]:
        return chat_logprobs(as_rows(positions) or [])

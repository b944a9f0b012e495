"""OpenAI's bodies for completions: the whole answer, or the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ember.data.logprobs import as_rows
from ember.data.openai_logprobs import completion_logprobs
from ember.data.output import CompletionOutput
from ember.entrypoints.generation import Piece
from ember.serving.call import Call

DONE = b"data: [DONE]\n\n"


class CompletionAnswer:
    """Builds what `/v1/completions` answers to one call.

    Args:
        model: the id that clients know.
        prompts: text and token ids of each prompt.
    """

    def __init__(self, call: Call, model: str, prompts: Sequence[tuple[str, list[int]]]) -> None:
        self._call, self._prompts, self._n = call, prompts, call.params.n
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """The body of an answer that does not stream."""
        choices = [
            self._choice(index, self._echoed(index) + output.text, output.token_ids, output)
            for index, output in enumerate(outputs)
        ]
        return {**self._head, "choices": choices, "usage": self._usage(outputs)}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        if not self._call.echo:
            return []
        return [self._chunk([self._choice(i, self._echoed(i), [], None)]) for i in range(len(self._prompts) * self._n)]

    def piece(self, piece: Piece) -> dict[str, Any]:
        """The chunk for one piece."""
        return self._chunk([self._choice(piece.index, piece.text, piece.token_ids, piece.output)])

    def closing(self, outputs: Sequence[CompletionOutput]) -> list[dict[str, Any]]:
        """The chunks after the last token."""
        return [{**self._head, "choices": [], "usage": self._usage(outputs)}] if self._call.include_usage else []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._call.include_usage else {}
        return {**self._head, "choices": choices, **usage}

    def _choice(self, index: int, text: str, ids: list[int], output: CompletionOutput | None) -> dict[str, Any]:
        reasons = (None, None) if output is None else (output.finish_reason, output.stop_reason)
        choice = {
            "index": index,
            "text": text,
            "logprobs": _logprobs(output),
            "finish_reason": reasons[0],
            "stop_reason": reasons[1],
        }
        if self._call.return_token_ids:
            choice |= {
                "token_ids": ids,
                "prompt_token_ids": None if output is None else self._prompts[index // self._n][1],
            }
        return choice

    def _echoed(self, index: int) -> str:
        return self._prompts[index // self._n][0] if self._call.echo else ""

    def _usage(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        prompt = sum(len(ids) for _, ids in self._prompts)
        output = sum(len(o.token_ids) for o in outputs)
        cached = {"cached_tokens": sum(o.num_cached_tokens for o in outputs)}
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return {**counts, "prompt_tokens_details": cached}


def _logprobs(output: CompletionOutput | None) -> dict[str, Any] | None:
    positions = None if output is None else as_rows(output.logprobs)
    return None if positions is None else completion_logprobs(positions)


def as_json(value: Any) -> bytes:
    """JSON in UTF-8; a lone surrogate stays an escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def as_event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"

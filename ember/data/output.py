"""The text of requests as their tokens come, stop strings, and the result of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ember.core.sequence import FinishReason, Sequence
from ember.model.decoder import IncrementalDecoder, TokenBytes


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        prompt: the prompt's text; None when token ids were given.
        text: the completion, cut before a stop string.
        token_ids: the output tokens, ending with the one that completed the stop (or EOS).
        finish_reason: stop, length or error.
        stop_reason: the stop string or stop token id; None for EOS, length and errors.
        error, error_kind: why it could not run, and that in one word to count by; None otherwise.
        seed: the row seed that its random numbers came from.
        queue_s, ttft_s, latency_s: seconds from arrival to admission, first token and end; None if never reached.
    """

    request_id: int
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: str | None = None
    seed: int | None = None
    sample_index: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    latency_s: float | None = None


class OutputProcessor:
    """Text of every live request: decodes as tokens come, finds stop strings, builds the RequestOutput."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._live: dict[int, _LiveText] = {}

    def add(self, sequence: Sequence, prompt: str | None) -> None:
        """Follow a request from its first token on."""
        params = sequence.params
        decoder = IncrementalDecoder(self._tokenizer, sequence.token_ids[: sequence.num_prompt_tokens])
        self._live[sequence.request_id] = _LiveText(decoder, prompt, params.stop, params.min_tokens)

    def push(self, request_id: int, token_id: int) -> str | None:
        """Take one token; returns the stop string that it completes, if any."""
        return self._live[request_id].push(token_id)

    def text_so_far(self, request_id: int) -> str:
        """The text of a live request, without what is held back of an unfinished character."""
        return self._live[request_id].decoder.text

    def finish(self, sequence: Sequence) -> RequestOutput:
        """The result of a finished sequence, which is no longer followed."""
        live = self._live.pop(sequence.request_id)
        return RequestOutput(
            request_id=sequence.request_id,
            prompt=live.prompt,
            prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
            text=live.final_text(),
            token_ids=sequence.output_token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=None if sequence.error is None else str(sequence.error),
            error_kind=None if sequence.error is None else sequence.error.kind,
            seed=sequence.seed,
            sample_index=sequence.sample_index,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            queue_s=_since(sequence, sequence.admitted_s),
            ttft_s=_since(sequence, sequence.first_token_s),
            latency_s=_since(sequence, sequence.finished_s),
        )

    def discard(self, request_id: int) -> None:
        """Forget a request that was given up."""
        self._live.pop(request_id, None)


@dataclass(slots=True)
class _LiveText:
    decoder: IncrementalDecoder
    prompt: str | None
    stop: list[str]
    min_tokens: int
    num_tokens: int = 0
    cut: int | None = None

    def push(self, token_id: int) -> str | None:
        """A stop string counts when its last character comes from a token beyond `min_tokens`."""
        before = len(self.decoder.text)
        self.decoder.push(token_id)
        self.num_tokens += 1
        if self.num_tokens <= self.min_tokens or not self.stop:
            return None
        text = self.decoder.text
        hits = [(at, s) for s in self.stop if (at := text.find(s, max(0, before - len(s) + 1))) >= 0]
        if not hits:
            return None
        self.cut, stop = min(hits)
        return stop

    def final_text(self) -> str:
        if self.cut is not None:
            return self.decoder.text[: self.cut]
        self.decoder.finish()
        return self.decoder.text


def _since(sequence: Sequence, moment: float | None) -> float | None:
    return None if moment is None else moment - sequence.arrival_s

"""The text of requests as their tokens come, stop strings, and the result of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ember.core.sequence import FinishReason, Sequence
from ember.data.logprobs import PositionLogprobs, by_token
from ember.errors import RequestError
from ember.model.decoder import IncrementalDecoder, TokenBytes
from ember.model.special_tokens import ShowingSpecial
from ember.sampling_params import SamplingParams


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
        index: its number among the prompt's samples.
        text: the completion, cut before a stop string or stop token.
        token_ids: the output tokens, ending with the one that completed the stop (or EOS).
        finish_reason: stop, length or error.
        stop_reason: the stop string or stop token id; None for EOS, length and errors.
        error, error_kind: why it could not run, and that in one word to count by; None otherwise.
        logprobs: an entry an output token; None unless asked for.
        cumulative_logprob: the sum of its tokens' log-probabilities; None unless they are kept.
        prompt_logprobs: an entry a prompt token, None for the first; None unless asked for.
        queue_s, ttft_s, latency_s: seconds from arrival to admission, first token and end; None if never reached.
        counted_tokens: output tokens as a server counts them that does not name their ids.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    latency_s: float | None = None
    counted_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return len(self.token_ids) or self.counted_tokens or 0


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt: its samples, of which `text`, `error` and so on are the first one's.

    Attributes:
        prompt: the prompt's text; None when token ids were given.
        seed: the row seed that its random numbers came from.
        outputs: its samples in order; of a job's step, those that finished in it.
        num_samples: how many it has in all.
        finished: whether none is still to come.
        counted_tokens: tokens of the prompt as a server counts them that does not name their ids.
    """

    request_id: int
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_samples: int = 1
    finished: bool = True
    counted_tokens: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids) or self.counted_tokens or 0

    @property
    def text(self) -> str:
        """The first sample's completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first sample's output tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the first sample ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """What stopped the first sample."""
        return self.outputs[0].stop_reason

    @property
    def error(self) -> str | None:
        """Why the first sample could not run."""
        return self.outputs[0].error

    @property
    def error_kind(self) -> str | None:
        """The first sample's error in one word."""
        return self.outputs[0].error_kind

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:
        """Those of the first sample's tokens."""
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the first sample's tokens."""
        return self.outputs[0].cumulative_logprob

    @property
    def prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """Those of the prompt's tokens."""
        return self.outputs[0].prompt_logprobs

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the first sample's prompt that came from the cache."""
        return self.outputs[0].num_cached_tokens

    @property
    def num_preemptions(self) -> int:
        """How often the first sample was preempted."""
        return self.outputs[0].num_preemptions

    @property
    def queue_s(self) -> float | None:
        """Seconds until the first sample was admitted."""
        return self.outputs[0].queue_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first sample's first token."""
        return self.outputs[0].ttft_s

    @property
    def latency_s(self) -> float | None:
        """Seconds until the first sample's end."""
        return self.outputs[0].latency_s

    def with_error(self, error: RequestError, samples: Iterable[int]) -> RequestOutput:
        """Fill in that none of these samples can run."""
        self.outputs = [
            CompletionOutput(i, finish_reason=FinishReason.ERROR, error=str(error), error_kind=error.kind)
            for i in samples
        ]
        return self


class OutputProcessor:
    """Text of every live sequence: decodes as tokens come, finds stop strings, builds the CompletionOutput."""

    def __init__(self, tokenizer: TokenBytes, special: Mapping[str, int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._showing_special = ShowingSpecial(tokenizer, special or {})
        self._live: dict[int, _LiveText] = {}

    def add(self, sequence: Sequence) -> None:
        """Follow a sequence from its first token on."""
        params = sequence.params
        tokenizer = self._tokenizer if params.skip_special_tokens else self._showing_special
        decoder = IncrementalDecoder(tokenizer, sequence.token_ids[: sequence.num_prompt_tokens])
        hidden = frozenset[int]() if params.include_stop_str_in_output else sequence.stop_ids
        self._live[sequence.request_id] = _LiveText(sequence, decoder, params, hidden)

    def push(self, request_id: int, token_id: int) -> str | None:
        """Take one token; returns the stop string that it completes, if any."""
        return self._live[request_id].push(token_id)

    def text_so_far(self, request_id: int) -> str:
        """The text of a live sequence, without what is held back of an unfinished character."""
        return self._live[request_id].decoder.text

    def logprobs_since(self, request_id: int, start: int) -> list[PositionLogprobs] | None:
        """Log-probabilities of a live sequence's output from token `start` on; None unless asked for."""
        return self._logprobs(self._live[request_id].sequence, start)

    def finish(self, sequence: Sequence) -> CompletionOutput:
        """The result of a finished sequence, which is no longer followed."""
        live = self._live.pop(sequence.request_id)
        for token in sequence.output_token_ids if sequence.search is not None else ():  # known only now
            live.push(token)
        return CompletionOutput(
            index=sequence.sample_index,
            text=live.final_text(),
            token_ids=sequence.output_token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=None if sequence.error is None else str(sequence.error),
            error_kind=None if sequence.error is None else sequence.error.kind,
            logprobs=self._logprobs(sequence),
            cumulative_logprob=sequence.cumulative_logprob,
            prompt_logprobs=self._prompt_logprobs(sequence),
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            queue_s=_since(sequence, sequence.admitted_s),
            ttft_s=_since(sequence, sequence.first_token_s),
            latency_s=_since(sequence, sequence.finished_s),
        )

    def _logprobs(self, sequence: Sequence, start: int = 0) -> list[PositionLogprobs] | None:
        if sequence.params.logprobs is None:
            return None
        return [by_token(entry, self._showing_special) for entry in sequence.logprobs[start:]]

    def _prompt_logprobs(self, sequence: Sequence) -> list[PositionLogprobs | None] | None:
        if sequence.params.prompt_logprobs is None:
            return None
        entries = sequence.prompt_logprobs
        return [None if entry is None else by_token(entry, self._showing_special) for entry in entries]

    def discard(self, request_id: int) -> None:
        """Forget a request that was given up."""
        self._live.pop(request_id, None)


@dataclass(slots=True)
class _LiveText:
    """A token of `hidden` that ends the output does not show."""

    sequence: Sequence
    decoder: IncrementalDecoder
    params: SamplingParams
    hidden: frozenset[int]
    num_tokens: int = 0
    cut: int | None = None

    def push(self, token_id: int) -> str | None:
        """A stop string counts when its last character comes from a token beyond `min_tokens`."""
        before = len(self.decoder.text)
        self.num_tokens += 1
        may_end = self.num_tokens > self.params.min_tokens
        if may_end and token_id in self.hidden:
            return None
        self.decoder.push(token_id)
        if not may_end or not self.params.stop:
            return None
        text = self.decoder.text
        starts = [(text.find(s, max(0, before - len(s) + 1)), str(s)) for s in self.params.stop]
        hits = [(at, stop) for at, stop in starts if at >= 0]
        if not hits:
            return None
        start, stop = min(hits)
        self.cut = start + len(stop) if self.params.include_stop_str_in_output else start
        return stop

    def final_text(self) -> str:
        if self.cut is not None:
            return self.decoder.text[: self.cut]
        self.decoder.finish()
        return self.decoder.text


def _since(sequence: Sequence, moment: float | None) -> float | None:
    return None if moment is None else moment - sequence.arrival_s

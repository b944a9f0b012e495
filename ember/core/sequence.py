"""One request inside the engine: its tokens, how far it is computed, and what happened to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ember.beam_search import BeamSearch
from ember.errors import RequestError
from ember.sampling.constraint import TokenConstraint
from ember.sampling.token_logprobs import TokenLogprobs
from ember.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended: EOS, stop id or stop string; out of room or max_tokens; it could not run."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class SequenceStatus(StrEnum):
    """Where a sequence is.

    PREEMPTED is waiting again, with its tokens kept and its K/V given up. A beam is HELD from when it is computed until
    the others of its search are, too.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    HELD = "held"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """Tokens and counters of one request. `token_ids` is the prompt followed by the output.

    `num_computed_tokens` chases `num_tokens`: the engine computes K/V for the tokens between them, and samples
    when it reaches the last one. `max_tokens` is already cut to the room in `max_model_len`. `order` numbers arrivals;
    `num_cached_tokens` is what of the prompt was in the pool when it was first admitted.
    `request_id` is its own in the engine; `parent_id` is that of the request which it is a sample of. `children` are
    other samples of its prompt, which wait to be forked from it when the prompt is computed. `beams` are those of a
    `search` by number, itself among them.

    `max_tokens` 0 is a prompt that is only scored. `logprobs` has an entry an output token unless `num_logprobs` is
    None, `prompt_logprobs` one for each prompt token that is scored so far; nothing stands before the first one, so
    its entry is None.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    sample_index: int = 0
    parent_id: int = -1
    children: list[Sequence] = field(default_factory=list)
    search: BeamSearch | None = None
    beams: list[Sequence] = field(default_factory=list)
    order: int = 0
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    max_computed_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    search_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words: list[list[int]] = field(default_factory=list)
    constraint: TokenConstraint | None = None
    adjusts_logits: bool = False
    num_logprobs: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    arrival_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.parent_id = self.request_id if self.parent_id < 0 else self.parent_id
        self.adjusts_logits = bool(self.bad_words or self.constraint) or self.params.adjusts_logits
        self.num_logprobs = 0 if self.params.logprobs is None and self.params.best_of else self.params.logprobs

    @property
    def family(self) -> list[Sequence]:
        """Itself and its children."""
        return [self, *self.children]

    @property
    def takes_best_only(self) -> bool:
        """Whether nothing but the largest logit matters of any position."""
        scores = self.num_logprobs is not None or self.params.prompt_logprobs is not None
        return self.params.greedy and not (self.adjusts_logits or scores or self.search is not None)

    def take_hypothesis(self, error: RequestError | None) -> None:
        """End as the hypothesis of its search that has its number, or with an error; without one it has no output."""
        self.finish_reason, self.error = FinishReason.ERROR if error else FinishReason.LENGTH, error
        del self.token_ids[self.num_prompt_tokens :]
        if error is None and self.search is not None and self.sample_index < len(self.search.hypotheses):
            found = self.search.hypotheses[self.sample_index]
            self.token_ids += found.token_ids
            self.search_logprob = found.logprob
            if found.stop_id is not None:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = found.stop_id if found.stop_id in self.params.stop_token_ids else None

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V is not in the pool: 1 while decoding, more in a prefill or recompute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def prefilling(self) -> bool:
        """Whether it has prompt tokens, or after a preemption its own output, to compute before it decodes."""
        return self.num_computed_tokens < self.num_prompt_tokens or self.num_uncomputed_tokens > 1

    @property
    def output_token_ids(self) -> list[int]:
        """The output tokens, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the output tokens' log-probabilities; None unless they are kept."""
        if self.search is not None:
            return self.search_logprob
        return None if self.num_logprobs is None else sum(entry.logprobs[0] for entry in self.logprobs)

    @property
    def reusable_token_ids(self) -> list[int]:
        """The tokens that K/V of others may stand for: all, or up to the one whose logits are still to score the next.

        The last of them is computed in any case.
        """
        scored = len(self.prompt_logprobs)
        waits = self.params.prompt_logprobs is not None and scored < self.num_prompt_tokens
        return self.token_ids[:scored] if waits else self.token_ids

    def first_unscored(self, start: int, end: int) -> int:
        """Of tokens `start` to `end` the first whose next one is a prompt token to be scored still; `end` if none."""
        if self.params.prompt_logprobs is None:
            return end
        first = max(start, len(self.prompt_logprobs) - 1)
        return first if first < min(end, self.num_prompt_tokens - 1) else end

"""Whether a prompt can run: its tokens, and how many may follow. The same for a job, the API and a dry run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ember.entrypoints.plan import EnginePlan
from ember.entrypoints.structured_output import OutputMatcher, StructuredOutput
from ember.errors import ConfigError, RequestError, UserError
from ember.model.chat_template import ChatPrompt
from ember.model.conversation import Conversation
from ember.sampling_params import SamplingParams

NO_TEMPLATE = (
    "has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); use an instruct model, or "
    "give one: chat_template=FILE"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a prompt's sampling parameters only the model's vocabulary makes sense of.

    Attributes:
        stop_ids: tokens that end an output.
        bad_words: tokens that an output may not have in this order.
        matchers: one a sample, None where no form is asked for.
    """

    stop_ids: frozenset[int]
    bad_words: list[list[int]]
    matchers: list[OutputMatcher | None]


class Admission:
    """Checks prompts against a plan; needs no weights.

    Args:
        structured_output: the plan's; None makes a new one, which has to read the vocabulary again.
    """

    def __init__(self, plan: EnginePlan, structured_output: StructuredOutput | None = None) -> None:
        self._plan = plan
        self._structured_output = structured_output or plan.structured_output()

    def token_ids(
        self, prompt: str | list[int], params: SamplingParams, *, allow_special_tokens: bool = False
    ) -> list[int]:
        """The prompt's tokens, at least one; of a truncated prompt its last ones.

        Raises:
            RequestError: it can't run (`bad_prompt`, `empty_prompt`; `prompt_too_long` if that shows without tokens).
        """
        keep = self._most_kept(params)
        if isinstance(prompt, str):
            if keep is None:
                self._check_length(self._plan.tokenizer.min_tokens(prompt), params, "at least ")
            ids = self._encoded(prompt, allow_special_tokens)
        else:
            ids = _checked_ids(prompt, self._plan.network.vocab_size)
        if not ids:
            raise RequestError("empty_prompt", "the prompt is empty: there is nothing to condition on")
        return ids if keep is None else ids[-keep:]

    def chat_prompt(self, conversation: Conversation) -> ChatPrompt:
        """The prompt that the model's chat template makes of a conversation.

        Raises:
            RequestError: the model has no template (`no_chat_template`), or the template fails (`chat_template`).
        """
        if self._plan.chat is None:
            raise RequestError("no_chat_template", f"{self._plan.folder.name} {NO_TEMPLATE}")
        try:
            return self._plan.chat.render(conversation)
        except UserError as error:
            raise RequestError("chat_template", str(error)) from None

    def room(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Most output tokens: `max_tokens` within what `max_model_len` leaves.

        Raises:
            RequestError: no token fits (`prompt_too_long`), or the parameters don't fit the model (`bad_sampling`).
        """
        self._check_length(num_prompt_tokens, params)
        try:
            self._plan.check_sampling(params)
        except ConfigError as error:
            raise RequestError("bad_sampling", str(error), key=error.key) from None
        left = self._plan.max_model_len - num_prompt_tokens
        return left if params.max_tokens is None else min(left, params.max_tokens)

    def limits(self, params: SamplingParams, num_samples: int, *, is_chat: bool) -> Limits:
        """What ends and bounds the samples of one prompt.

        Raises:
            RequestError: bad words can't be tokenised, or there is no such output form (`bad_sampling`).
        """
        eos = self._plan.eos_token_ids(is_chat=is_chat)
        stop_ids = frozenset(params.stop_token_ids)
        try:
            matchers = [self._structured_output.matcher(params, eos) for _ in range(num_samples)]
        except ConfigError as error:
            raise RequestError("bad_sampling", str(error), key=error.key) from None
        return Limits(stop_ids if params.ignore_eos else stop_ids | eos, self._bad_words(params), matchers)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The tokens of each, as at the start of a text and as after a space."""
        try:
            words = [form for word in params.bad_words for form in (word.lstrip(), f" {word.lstrip()}")]
            return [self._encoded(word) for word in words]
        except RequestError as error:
            raise RequestError("bad_sampling", f"bad_words: {error}", key="bad_words") from None

    def _encoded(self, text: str, allow_special_tokens: bool = False) -> list[int]:
        try:
            return self._plan.tokenizer.encode(text, allow_special_tokens=allow_special_tokens)
        except UserError as error:
            raise RequestError("bad_prompt", str(error)) from None

    def _most_kept(self, params: SamplingParams) -> int | None:
        """How many of a prompt's tokens `truncate_prompt_tokens` keeps; None: all."""
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        wanted = 1 if params.max_tokens is None else params.max_tokens
        return max(1, self._plan.max_model_len - wanted)

    def _check_length(self, num_tokens: int, params: SamplingParams, at_least: str = "") -> None:
        """A prompt leaves room for one token, unless none is wanted."""
        most = self._plan.max_model_len
        if num_tokens < most or (num_tokens == most and params.max_tokens == 0):
            return
        room = "is more than" if params.max_tokens == 0 else "leaves no room for one more within"
        raise RequestError(
            "prompt_too_long", f"the prompt has {at_least}{num_tokens} tokens, which {room} max_model_len={most}"
        )


def _checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    if not isinstance(prompt, (list, tuple)):
        raise RequestError("bad_prompt", f"a prompt is a string or a list of token ids, not {type(prompt).__name__}")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError("bad_prompt", f"token id {token!r} is not in the vocabulary of {vocab_size}")
    return list(prompt)

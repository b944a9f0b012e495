"""Whether a prompt can run: its tokens, and how many may follow. The same for a job, the API and a dry run."""

from __future__ import annotations

from typing import Any

from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError, RequestError, UserError
from ember.model.chat_template import ChatPrompt
from ember.model.conversation import Conversation
from ember.sampling_params import SamplingParams

NO_TEMPLATE = (
    "has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); use an instruct model, or "
    "give one: chat_template=FILE"
)


class Admission:
    """Checks prompts against a plan; needs no weights."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan

    def token_ids(self, prompt: str | list[int], *, allow_special_tokens: bool = False) -> list[int]:
        """The prompt's tokens, at least one.

        Raises:
            RequestError: it can't run (`bad_prompt`, `empty_prompt`; `prompt_too_long` if that shows without tokens).
        """
        if isinstance(prompt, str):
            self._check_length(self._plan.tokenizer.min_tokens(prompt), "at least ")
            try:
                ids = self._plan.tokenizer.encode(prompt, allow_special_tokens=allow_special_tokens)
            except UserError as error:
                raise RequestError("bad_prompt", str(error)) from None
        else:
            ids = _checked_ids(prompt, self._plan.network.vocab_size)
        if not ids:
            raise RequestError("empty_prompt", "the prompt is empty: there is nothing to condition on")
        return ids

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
        self._check_length(num_prompt_tokens)
        try:
            self._plan.check_stop_ids(params)
        except ConfigError as error:
            raise RequestError("bad_sampling", str(error)) from None
        left = self._plan.max_model_len - num_prompt_tokens
        return left if params.max_tokens is None else min(left, params.max_tokens)

    def _check_length(self, num_tokens: int, at_least: str = "") -> None:
        if num_tokens >= self._plan.max_model_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {at_least}{num_tokens} tokens, which leaves no room for one more within "
                f"max_model_len={self._plan.max_model_len}",
            )


def _checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    if not isinstance(prompt, (list, tuple)):
        raise RequestError("bad_prompt", f"a prompt is a string or a list of token ids, not {type(prompt).__name__}")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError("bad_prompt", f"token id {token!r} is not in the vocabulary of {vocab_size}")
    return list(prompt)

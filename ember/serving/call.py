"""What a client asks for: the body of a request, checked key by key."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ember.data.openai_batch import request_sampling
from ember.data.text import RowError
from ember.errors import ConfigError, UserError
from ember.model.conversation import Conversation
from ember.output_form import output_form
from ember.sampling_params import SamplingParams
from ember.serving.choice_limits import ChoiceLimits
from ember.serving.errors import ApiError

Prompt = str | list[int] | Conversation

COMPLETION_DEFAULTS = SamplingParams(temperature=1.0, max_tokens=16)
CHAT_DEFAULTS = SamplingParams(temperature=1.0, max_tokens=None)
"""OpenAI's, not those of a job."""
MAX_STOPS, MAX_STOP_CHARS, MAX_LOGPROBS, MAX_BAD_WORDS = 16, 256, 20, 256
MAX_FORM_CHARS = 65_536
MAX_MESSAGES = 16_384
"""Each costs the template its time, also where it has no text."""
_OWN = ("model", "prompt", "messages", "stream", "stream_options", "echo", "return_token_ids", "user")
_OWN_OF_CHAT = ("continue_final_message", "add_generation_prompt", "chat_template_kwargs")
OWN_OF_TEMPLATES = ("messages", "add_generation_prompt")
"""Variables of a chat template that follow from the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request.

    Attributes:
        prompts: text, token ids or a conversation; at least one.
        include_usage: a stream ends with a chunk of token counts.
        echo: the answer's text begins with the prompt.
        return_token_ids: the answer has the ids of prompt and output (vLLM's extension).
    """

    prompts: list[Prompt]
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False

    @staticmethod
    def completion(body: dict[str, Any], *, limits: ChoiceLimits) -> Call:
        """The body of `/v1/completions`; null is the same as left out.

        Raises:
            ApiError: names the key that is wrong or not supported.
        """
        given = {key: value for key, value in body.items() if value is not None}
        _refuse(given, "messages", *_OWN_OF_CHAT, "top_logprobs")
        prompts = _prompts(given)
        limits.check(len(prompts), given)
        params, echo = _params(given, COMPLETION_DEFAULTS), _flag(given, "echo")
        if isinstance(given.get("logprobs"), bool):
            raise _wrong("logprobs", "must be a number for a completion")
        if echo and params.logprobs is not None:
            if _flag(given, "stream"):
                raise _wrong("logprobs", "is not supported with echo in a stream; leave one out")
            params = replace(params, prompt_logprobs=params.logprobs)
        return _call(given, prompts, params, echo=echo)

    @staticmethod
    def chat(body: dict[str, Any], *, limits: ChoiceLimits) -> Call:
        """The body of `/v1/chat/completions`; null is the same as left out.

        Raises:
            ApiError: names the key that is wrong or not supported.
        """
        given = {key: value for key, value in body.items() if value is not None}
        _refuse(given, "prompt", "echo")
        try:
            conversation = Conversation.of(given.get("messages"))
        except UserError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from None
        if len(conversation.messages) > MAX_MESSAGES:
            raise _wrong("messages", f"may hold {MAX_MESSAGES} at most")
        _check_continuing(given, conversation)
        if not isinstance(given.get("logprobs", False), bool):
            raise _wrong("logprobs", "must be true or false for a chat; top_logprobs is the number")
        limits.check(1, given)
        params = _params({k: v for k, v in given.items() if k not in _OWN_OF_CHAT}, CHAT_DEFAULTS)
        return _call(given, [replace(conversation, kwargs=_template_kwargs(given))], params, echo=False)


def _call(given: dict[str, Any], prompts: Sequence[Prompt], params: SamplingParams, *, echo: bool) -> Call:
    """What completions and chats share."""
    if not isinstance(given.get("user", ""), str):
        raise _wrong("user", "must be text")
    stream = _flag(given, "stream")
    if stream and params.ranked:
        raise _wrong("stream", "can't be with best_of or a beam search: which choices are best shows at the end")
    return Call(
        prompts=list(prompts),
        params=params,
        stream=stream,
        include_usage=_include_usage(given, stream),
        echo=echo,
        return_token_ids=_flag(given, "return_token_ids"),
    )


def _prompts(given: dict[str, Any]) -> list[str | list[int]]:
    prompt = given.get("prompt")
    if prompt is None:
        raise _wrong("prompt", "is missing")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _no_prompt()
    if not isinstance(prompt[0], (str, list)):
        return [_ids(prompt)]
    return [item if isinstance(item, str) else _ids(item) for item in prompt]


def _ids(value: Any) -> list[int]:
    """Token ids; JSON knows no whole numbers, so 3.0 is 3."""
    if not isinstance(value, list):
        raise _no_prompt()
    ids = [int(item) if isinstance(item, float) and item.is_integer() else item for item in value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        raise _no_prompt()
    return ids


def _no_prompt() -> ApiError:
    return _wrong("prompt", "must be a string, a list of strings, a list of token ids, or a list of such lists")


def _params(given: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    asked = {key: value for key, value in given.items() if key not in _OWN}
    _refuse(asked, "prompt_logprobs")
    try:
        params = defaults.override(request_sampling({"body": asked}))
    except ConfigError as error:
        raise ApiError(400, str(error), param=error.key, code="invalid_value") from None
    except RowError as error:
        named = re.match(r"body\.(\w+)", str(error))
        message = str(error).removeprefix("body.")
        raise ApiError(400, message, param=named and named[1], code="unsupported_parameter") from None
    _check_limits(params)
    return replace(params, best_of=None) if params.best_of == 1 else params  # the best of one: it may stream


def _check_limits(params: SamplingParams) -> None:
    """A request may cost its own time, not that of all others."""
    if len(params.stop) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in params.stop):
        raise _wrong("stop", f"may have {MAX_STOPS} strings of {MAX_STOP_CHARS} characters at most")
    if len(params.bad_words) > MAX_BAD_WORDS or any(len(word) > MAX_STOP_CHARS for word in params.bad_words):
        raise _wrong("bad_words", f"may have {MAX_BAD_WORDS} texts of {MAX_STOP_CHARS} characters at most")
    form = output_form(params)
    if form is not None and len(json.dumps(form[1])) > MAX_FORM_CHARS:
        raise _wrong(form[0], f"may have {MAX_FORM_CHARS} characters at most")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise _wrong("logprobs", f"may be {MAX_LOGPROBS} at most")


def _check_continuing(given: dict[str, Any], conversation: Conversation) -> None:
    """A conversation that ends with the assistant's message is continued there, as in jobs; vLLM's flags must agree."""
    if _flag(given, "continue_final_message", default=conversation.continues) is not conversation.continues:
        raise _wrong("continue_final_message", "must be true just if the last message is the assistant's, or left out")
    if _flag(given, "add_generation_prompt", default=not conversation.continues) is conversation.continues:
        raise _wrong("add_generation_prompt", "must be false just if the last message is the assistant's, or left out")


def _template_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """vLLM's: further variables for the chat template."""
    kwargs = given.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise _wrong("chat_template_kwargs", "must be an object of the chat template's variables")
    for name in OWN_OF_TEMPLATES:
        if name in kwargs:
            raise _wrong("chat_template_kwargs", f"may not hold {name}, which follows from the request")
    return kwargs


def _refuse(given: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if key in given:
            raise ApiError(400, f"{key} is not supported here; remove it", param=key, code="unsupported_parameter")


def _wrong(key: str, what: str) -> ApiError:
    return ApiError(400, f"{key} {what}", param=key, code="invalid_value")


def _flag(given: dict[str, Any], key: str, *, default: bool = False) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise _wrong(key, "must be true or false")
    return value


def _include_usage(given: dict[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", "must be an object")
    if options and not stream:
        raise _wrong("stream_options", "needs stream=true")
    if unknown := sorted(set(options) - {"include_usage"}):
        message = f"stream_options.{unknown[0]} is not supported; remove it"
        raise ApiError(400, message, param="stream_options", code="unsupported_parameter")
    return _flag({k: v for k, v in options.items() if v is not None}, "include_usage")

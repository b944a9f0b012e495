"""`format=openai_batch`: the request lines of OpenAI's Batch API as prompts or conversations with their own sampling.

https://platform.openai.com/docs/api-reference/batch/request-input: one line is
`{"custom_id": ..., "method": "POST", "url": "/v1/completions", "body": {"model": ..., "prompt": ..., ...}}`, or
`/v1/chat/completions` and `messages`.
What a body asks for and ember can't do makes its row an error that names the key: a result never looks like what was
asked for without being it.
"""

from __future__ import annotations

from typing import Any

from ember.data.prompt import checked_messages, checked_prompt
from ember.data.text import RowError, is_json_encodable, json_text, one_line, plain_text
from ember.model.conversation import Conversation

KEYS = ("custom_id", "method", "url", "body")
"""What a request line has."""
COLUMNS = ("method", "url", "model")
"""What of a request passes through, as text; `model` is the body's."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_ASKS = {COMPLETIONS: "prompt", CHAT: "messages"}
"""The key of a body that each URL answers."""
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "stop", "seed", "n", "best_of"),
    *("top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids"),
    *("prompt_logprobs", "truncate_prompt_tokens", "include_stop_str_in_output"),
)
_TRANSLATED = ("logprobs", "top_logprobs", "response_format", "structured_outputs", "max_completion_tokens")
_ACCEPTED = frozenset({"model", "prompt", "messages", "user", "metadata", "store", *_TRANSLATED, *_SAMPLING})
"""Keys of a body that are honoured, or that change no completion."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "modalities": (["text"],),
}
"""Values that ask for nothing; null never does."""
_FORMS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The settings of vLLM's `structured_outputs`, by its keys."""
_PLACES = {
    setting: f'it goes under structured_outputs: {{"{key}": ...}}'
    + (" or response_format" if setting == "json_schema" else "")
    for key, setting in _FORMS.items()
}
"""Where a setting that is no key of a body belongs."""


def looks_like(columns: list[str]) -> bool:
    """Whether a file with these keys holds request lines."""
    return set(KEYS) <= set(columns)


def request_id(values: dict[str, Any]) -> str | None:
    """A line's `custom_id` as text, None if it has none."""
    value = values.get("custom_id")
    return None if value is None else plain_text(value)


def request_columns(values: dict[str, Any]) -> dict[str, Any]:
    """A line's values by input column, with `body` replaced by the body's `model`."""
    body = values.get("body")
    others = {key: value for key, value in values.items() if key not in ("custom_id", "body")}
    return {**others, "model": body.get("model") if isinstance(body, dict) else None}


def request_prompt(values: dict[str, Any]) -> str | list[int] | Conversation:
    """The prompt of a line.

    Raises:
        RowError: it is no request for completions, has no `custom_id`, or no prompt or messages.
    """
    custom_id = values.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise RowError("custom_id is missing" if custom_id is None else "custom_id must be text that is not empty")
    if "model" in values:
        raise RowError("model belongs into body")
    body = _body(values)
    given = {key for key in ("prompt", "messages") if body.get(key) is not None}
    url = values.get("url", CHAT if "messages" in given else COMPLETIONS)
    if url not in (COMPLETIONS, CHAT):
        raise RowError(f"url is {_shown(url)}; only {COMPLETIONS} and {CHAT} are supported")
    if values.get("method", "POST") != "POST":
        raise RowError(f"method is {_shown(values['method'])}, not POST")
    for key in ("prompt", "messages"):
        if (key in given) != (key == _ASKS[url]):
            raise RowError(f"body.{key} is missing" if key == _ASKS[url] else f"body.{key} does not belong to {url}")
    if url == CHAT:
        return checked_messages(body["messages"], "body.messages")
    prompt = body["prompt"]
    if isinstance(prompt, list) and any(isinstance(item, (str, list)) for item in prompt):
        raise RowError("body.prompt is a list of prompts; give each a line of its own")
    return checked_prompt(prompt, "body.prompt")


def request_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings of a line's body, unchecked; null is not set.

    Raises:
        RowError: the body asks for what ember can't do.
    """
    body = _body(values)
    for key, value in body.items():
        if key not in _ACCEPTED and value is not None and not _is_neutral(key, value):
            remedy = _PLACES.get(key, "remove it")
            raise RowError(f"body.{one_line(key, 60)}={_shown(value)} is not supported; {remedy}")
    settings = {key: body[key] for key in _SAMPLING if body.get(key) is not None}
    settings |= _logprobs(body) | _output_form(body)
    longest = body.get("max_completion_tokens")
    if longest is not None and settings.setdefault("max_tokens", longest) != longest:
        raise RowError("body.max_tokens and max_completion_tokens differ; remove one")
    if not is_json_encodable(settings):
        raise RowError("the sampling settings hold a lone surrogate, which is no text")
    return settings


def _logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """A completion's `logprobs` is a number; a chat's is true, beside a number that is `top_logprobs`."""
    asked, most = body.get("logprobs"), body.get("top_logprobs")
    if most is not None and asked is not True:
        raise RowError("body.top_logprobs needs logprobs=true")
    if asked is True:
        return {"logprobs": 0 if most is None else most}
    return {} if asked is None or asked is False else {"logprobs": asked}


def _output_form(body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `response_format`, or vLLM's `structured_outputs`, as the setting that does it."""
    given, ours = body.get("response_format"), body.get("structured_outputs")
    if ours is not None:
        if given is not None or not isinstance(ours, dict) or not ours.keys() <= _FORMS.keys():
            raise RowError(f"body.structured_outputs must be an object with one of {', '.join(_FORMS)}, alone")
        return {_FORMS[key]: value for key, value in ours.items() if value is not None}
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, dict) else None
    schema = given.get("json_schema") if isinstance(given, dict) else None
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json_schema": schema["schema"]}
    if kind not in ("text", "json_object"):
        raise RowError(f"body.response_format={_shown(given)} is not supported; remove it")
    return {"json_schema": {"type": "object"}} if kind == "json_object" else {}


def _body(values: dict[str, Any]) -> dict[str, Any]:
    body = values.get("body")
    if not isinstance(body, dict):
        raise RowError("body is missing" if body is None else "body is not an object")
    return body


def _is_neutral(key: str, value: Any) -> bool:
    """Python takes True for 1 and False for 0; a request does not."""
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in _NEUTRAL.get(key, ()))


def _shown(value: Any) -> str:
    return one_line(value if isinstance(value, str) else json_text(value), 60)

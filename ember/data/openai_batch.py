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
    *("max_tokens", "temperature", "top_p", "stop", "seed", "n"),
    *("top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos"),
)
_ACCEPTED = frozenset({"model", "prompt", "messages", "user", "metadata", "store", "max_completion_tokens", *_SAMPLING})
"""Keys of a body that are honoured, or that change no completion."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values that ask for nothing; null never does."""


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
            raise RowError(f"body.{one_line(key, 60)}={_shown(value)} is not supported; remove it")
    settings = {key: body[key] for key in _SAMPLING if body.get(key) is not None}
    longest = body.get("max_completion_tokens")
    if longest is not None and settings.setdefault("max_tokens", longest) != longest:
        raise RowError("body.max_tokens and body.max_completion_tokens differ; remove one")
    if not is_json_encodable(settings):
        raise RowError("the sampling settings hold a lone surrogate, which is no text")
    return settings


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

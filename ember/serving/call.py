"""What a client asks for: the body of a request, checked key by key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ember.data.openai_batch import request_sampling
from ember.data.text import RowError
from ember.errors import ConfigError
from ember.sampling_params import SamplingParams
from ember.serving.errors import ApiError

Prompt = str | list[int]

COMPLETION_DEFAULTS = SamplingParams(temperature=1.0, max_tokens=16)
"""OpenAI's, not those of a job."""
MAX_STOPS, MAX_STOP_CHARS = 16, 256
_OWN = ("model", "prompt", "stream", "stream_options", "echo", "return_token_ids", "user")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request.

    Attributes:
        prompts: text or token ids, at least one.
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
    def completion(body: dict[str, Any], *, max_choices: int) -> Call:
        """The body of `/v1/completions`; null is the same as left out.

        Raises:
            ApiError: names the key that is wrong or not supported.
        """
        given = {key: value for key, value in body.items() if value is not None}
        prompts = _prompts(given)
        if not isinstance(given.get("user", ""), str):
            raise ApiError(400, "user must be text", param="user", code="invalid_value")
        params = _params(given, COMPLETION_DEFAULTS)
        if len(prompts) * params.n > max_choices:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n={params.n} are more than {max_choices} choices, the most of a request",
                param="prompt" if params.n == 1 else "n",
                code="too_many_choices",
            )
        stream = _flag(given, "stream")
        _check_logprobs(params, stream or _flag(given, "echo"))
        return Call(
            prompts=prompts,
            params=params,
            stream=stream,
            include_usage=_include_usage(given, stream),
            echo=_flag(given, "echo"),
            return_token_ids=_flag(given, "return_token_ids"),
        )


def _prompts(given: dict[str, Any]) -> list[Prompt]:
    prompt = given.get("prompt")
    if prompt is None:
        raise ApiError(400, "prompt is missing", param="prompt", code="invalid_value")
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
    wanted = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
    return ApiError(400, wanted, param="prompt", code="invalid_value")


def _params(given: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    asked = {key: value for key, value in given.items() if key not in _OWN}
    try:
        params = defaults.override(request_sampling({"body": asked}))
    except ConfigError as error:
        raise ApiError(400, str(error), param=error.key, code="invalid_value") from None
    except RowError as error:
        named = re.match(r"body\.(\w+)", str(error))
        message = str(error).removeprefix("body.")
        raise ApiError(400, message, param=named and named[1], code="unsupported_parameter") from None
    if len(params.stop) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in params.stop):
        limit = f"stop: at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters"
        raise ApiError(400, limit, param="stop", code="invalid_value")
    return params


def _check_logprobs(params: SamplingParams, in_pieces: bool) -> None:
    if params.prompt_logprobs is not None:
        message = "prompt_logprobs is not supported here; a job's rows have them"
        raise ApiError(400, message, param="prompt_logprobs", code="unsupported_parameter")
    if params.logprobs is not None and in_pieces:
        message = "logprobs is not supported with stream or echo; leave one out"
        raise ApiError(400, message, param="logprobs", code="unsupported_parameter")


def _flag(given: dict[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{key} must be true or false", param=key, code="invalid_value")
    return value


def _include_usage(given: dict[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object", param="stream_options", code="invalid_value")
    if options and not stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options", code="invalid_value")
    if unknown := sorted(set(options) - {"include_usage"}):
        message = f"stream_options.{unknown[0]} is not supported; remove it"
        raise ApiError(400, message, param="stream_options", code="unsupported_parameter")
    return _flag({k: v for k, v in options.items() if v is not None}, "include_usage")

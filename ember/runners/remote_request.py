"""From a row to the body of a request to a server, and from its answer to the row's result."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

from ember.config import JobConfig
from ember.core.random_stream import row_seed
from ember.core.sequence import FinishReason
from ember.data.output import CompletionOutput, RequestOutput
from ember.data.prompt import MAX_TOKEN_ID
from ember.data.reader import PromptRow
from ember.data.text import encodable, is_encodable
from ember.errors import RequestError
from ember.model.conversation import Conversation
from ember.output_form import output_form
from ember.request import num_samples, row_params
from ember.runners.openai_client import OpenAIClient
from ember.sampling_params import SamplingParams

Prompt = str | list[int]

_ALWAYS = ("temperature", "max_tokens")
"""Sent even where they are ember's defaults, as a server's own differ."""
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class RemoteRequests:
    """Runs rows on a server."""

    def __init__(self, client: OpenAIClient, model: str, config: JobConfig) -> None:
        self._client, self._model, self._config = client, model, config

    async def run(self, row: PromptRow) -> RequestOutput:
        """A row's samples that are not done yet; one that can't run is an error.

        Raises:
            JobError: no row can run.
        """
        output = RequestOutput(
            request_id=row.row_index,
            prompt=row.prompt if isinstance(row.prompt, str) else None,
            seed=row_seed(self._config.seed, row.row_index),
            num_samples=num_samples(row, self._config),
        )
        missing = [i for i in range(output.num_samples) if i not in row.samples_done]
        try:
            params = row_params(row, self._config)
            output.seed = output.seed if params.seed is None else params.seed
            assert row.prompt is not None
            path = "chat/completions" if isinstance(row.prompt, Conversation) else "completions"
            begin = time.perf_counter()
            fill(output, await self._client.post(path, self._body(row.prompt, params, output.seed)), missing)
            for sample in output.outputs:
                sample.latency_s = time.perf_counter() - begin
        except RequestError as error:
            return output.with_error(error, missing)
        return output

    def _body(self, prompt: Prompt | Conversation, params: SamplingParams, seed: int | None) -> dict[str, Any]:
        if params.max_tokens is None:
            raise RequestError("bad_sampling", "max_tokens=None: engine=http needs a number; servers have their own")
        for key in ("logprobs", "prompt_logprobs"):
            if (value := getattr(params, key)) is not None:
                raise RequestError("bad_sampling", f"{key}={value}: engine=http keeps no log-probabilities")
        for key in ("best_of", "beam_width"):
            if (value := getattr(params, key)) is not None:
                raise RequestError("bad_sampling", f"{key}={value}: servers may pass over it; leave it out")
        own, default = _values(params), _values(SamplingParams())
        given = {key: value for key, value in own.items() if key in _ALWAYS or value != default[key]}
        if not params.greedy:
            given["seed"] = seed
        if (form := output_form(params)) is not None:
            del given[form[0]]
            given["structured_outputs"] = {form[0].removesuffix("_schema"): form[1]}  # vLLM's name
        asked = self._chat(prompt) if isinstance(prompt, Conversation) else {"prompt": prompt}
        return {"model": self._model, "return_token_ids": True, **asked, **given}

    def _chat(self, conversation: Conversation) -> dict[str, Any]:
        """Messages; the two flags are vLLM's and ember's."""
        kwargs = self._config.chat_template_kwargs
        asked: dict[str, Any] = {"messages": list(conversation.messages)}
        if conversation.continues:
            asked |= {"continue_final_message": True, "add_generation_prompt": False}
        return asked | ({"chat_template_kwargs": dict(kwargs)} if kwargs else {})


def fill(output: RequestOutput, answer: dict[str, Any], samples: list[int]) -> None:
    """Take what a server answered for these samples of a row.

    Raises:
        RequestError: it is not what was asked for.
    """
    found = answer.get("choices")
    choices = found if isinstance(found, list) else []
    by_index = {_count(choice.get("index")): choice for choice in choices if isinstance(choice, dict)}
    lacking = [i for i in samples if i not in by_index]
    if lacking:
        raise RequestError("bad_answer", f"the server's answer lacks choice {lacking[0]} of {output.num_samples}")
    output.outputs = [_sample(i, by_index[i]) for i in samples]
    ids = by_index[samples[0]].get("prompt_token_ids") or answer.get("prompt_token_ids")
    output.prompt_token_ids = _token_ids(ids)
    usage = answer.get("usage")
    if isinstance(usage, dict):
        output.counted_tokens = _count(usage.get("prompt_tokens"))
        if output.num_samples == 1:
            output.outputs[0].counted_tokens = _count(usage.get("completion_tokens"))


def _sample(index: int, choice: dict[str, Any]) -> CompletionOutput:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    ids, said = choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(text, str) or not is_encodable(text):
        raise RequestError("bad_answer", "a choice of the server's answer has no text")
    reason = _REASONS.get(said) if isinstance(said, str) else None
    if reason is None:
        raise RequestError("bad_answer", f"the server ended a choice with finish_reason {said!r}")
    stop = choice.get("stop_reason")
    return CompletionOutput(
        index,
        text=text,
        token_ids=_token_ids(ids),
        finish_reason=reason,
        stop_reason=encodable(stop) if isinstance(stop, str) else _count(stop),
    )


def _token_ids(value: Any) -> list[int]:
    """Ids as the output's columns hold them; none where a server names none."""
    if not isinstance(value, list):
        return []
    if any(_count(item) is None for item in value):
        raise RequestError("bad_answer", "the server's answer has token ids that are none")
    return value


def _count(value: Any) -> int | None:
    """A whole number that the output's columns hold; None for anything else."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value <= MAX_TOKEN_ID else None


def _values(params: SamplingParams) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in fields(params) if field.name != "seed"}

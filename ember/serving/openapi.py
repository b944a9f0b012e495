"""The server's OpenAPI 3.1 document: what each path takes and answers, with this server's own limits."""

from __future__ import annotations

from typing import Any

import ember
from ember.checks import MOST
from ember.entrypoints.plan import EnginePlan
from ember.serving.call import MAX_LOGPROBS, MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, OWN_OF_TEMPLATES
from ember.serving.settings import ServerConfig

Schema = dict[str, Any]

_ERRORS = {
    "400": "the body is wrong; `param` names the key",
    "401": "the API key is missing or wrong",
    "404": "no such model",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the body is not declared as JSON",
    "429": "too many requests are open",
    "500": "the server failed",
    "503": "the server is shutting down",
}


def document(config: ServerConfig, plan: EnginePlan, model: str) -> Schema:
    """The document as JSON."""
    chat = _chat(config, plan, model)
    completion = _body(_completion(config, plan, model), ["prompt"])
    paths = {
        "/v1/completions": {"post": _post("Complete prompts", completion)},
        "/v1/chat/completions": {"post": _post("Answer a conversation", _body(chat, ["messages"]))},
        "/v1/models": {"get": _get("The model that is served", {"application/json": _list_of_models()}, "401")},
        "/v1/models/{model}": _model_path(model),
        "/health": {"get": _get("Whether requests are taken", {"application/json": {"type": "object"}}, "503")},
        "/metrics": {"get": _get("Numbers for Prometheus", {"text/plain": {"type": "string"}}, "401")},
    }
    security: Schema = {"security": [{"key": []}]} if config.api_key else {}
    components = {"schemas": {"Error": _error()}}
    if config.api_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "ember", "version": ember.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components, **security}


def _completion(config: ServerConfig, plan: EnginePlan, model: str) -> Schema:
    token = {"type": "integer", "minimum": 0, "maximum": plan.network.vocab_size - 1}
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": token, "minItems": 1, "maxItems": plan.max_model_len - 1}
    many = {"type": "array", "minItems": 1, "maxItems": config.choice_limits.most}
    return {
        "prompt": {"anyOf": [text, ids, {**many, "items": text}, {**many, "items": ids}]},
        **_common(config, plan, model),
        "logprobs": _whole(maximum=MAX_LOGPROBS),
        "echo": _flag(),
        "suffix": {"enum": ["", None], "description": "not supported"},
    }


def _chat(config: ServerConfig, plan: EnginePlan, model: str) -> Schema:
    message = {
        "type": "object",
        "properties": {"role": {"enum": ["system", "user"]}, "content": {"type": "string"}},
        "required": ["role", "content"],
    }
    messages = {
        "type": "array",
        "items": message,
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "description": "or of role assistant, tool, developer",
    }
    kwargs = {
        "type": ["object", "null"],
        "propertyNames": {"not": {"enum": list(OWN_OF_TEMPLATES)}},
        "description": "variables of the chat template, of any name that it has (enable_thinking, ...)",
    }
    own = {"messages": messages, "chat_template_kwargs": kwargs}
    return {**own, **_common(config, plan, model), "logprobs": _flag()}


def _common(config: ServerConfig, plan: EnginePlan, model: str) -> Schema:
    token = {"type": "integer", "minimum": 0, "maximum": plan.network.vocab_size - 1}
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {
        "model": {"enum": [model, None]},
        "max_tokens": _whole(),
        "temperature": _real(minimum=0),
        "top_p": _real(exclusiveMinimum=0, maximum=1),
        "top_k": _whole(),
        "min_p": _real(minimum=0, maximum=1),
        "presence_penalty": _real(minimum=-2, maximum=2),
        "frequency_penalty": _real(minimum=-2, maximum=2),
        "repetition_penalty": _real(minimum=0.01, maximum=100),
        "logit_bias": {
            "type": ["object", "null"],
            "patternProperties": {"^[0-9]{1,3}$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
        },
        "seed": _whole(),
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": config.choice_limits.most},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, {"type": "null"}]},
        "stop_token_ids": {"type": ["array", "null"], "items": token},
        "ignore_eos": _flag(),
        "stream": _flag(),
        "return_token_ids": _flag(),
        "user": {"type": ["string", "null"]},
    }


def _whole(maximum: int = MOST) -> Schema:
    return {"type": ["integer", "null"], "minimum": 0, "maximum": maximum}


def _real(**limits: float) -> Schema:
    return {"type": ["number", "null"], **limits}


def _flag() -> Schema:
    return {"type": ["boolean", "null"]}


def _body(properties: Schema, required: list[str]) -> Schema:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _post(summary: str, body: Schema) -> Schema:
    counts = {"type": "object", "properties": {key: {"type": "integer"} for key in _USAGE}, "required": _USAGE}
    answer = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string"},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            "usage": counts,
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }
    content = {"application/json": {"schema": answer}, "text/event-stream": {"schema": _event()}}
    return {"summary": summary, "requestBody": body, "responses": {"200": _ok(content), **_failures(*_ERRORS)}}


def _event() -> Schema:
    return {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


_MODEL: Schema = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
_USAGE = ["prompt_tokens", "completion_tokens", "total_tokens"]


def _get(summary: str, schemas: Schema, *errors: str) -> Schema:
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"summary": summary, "responses": {"200": _ok(content), **_failures(*errors)}}


def _ok(content: Schema) -> Schema:
    return {"description": "the answer", "content": content}


def _failures(*statuses: str) -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}


def _model_path(model: str) -> Schema:
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"enum": [model]}}
    return {"parameters": [parameter], "get": _get("A model by its id", {"application/json": _MODEL}, "401", "404")}


def _list_of_models() -> Schema:
    return {"type": "object", "properties": {"data": {"type": "array", "items": _MODEL}}, "required": ["data"]}


def _error() -> Schema:
    nullable = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": nullable, "code": nullable}
    inner = {"type": "object", "properties": fields, "required": ["message", "type"]}
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}

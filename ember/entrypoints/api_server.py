"""The OpenAI-compatible server as an ASGI application: what it answers, on top of an AsyncEngine.

https://platform.openai.com/docs/api-reference/completions. FastAPI, the extra `serve`, is imported where it is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import ember
from ember.entrypoints.admission import Admission
from ember.entrypoints.async_engine import AsyncEngine, EngineStopped, QueueFull, Request
from ember.entrypoints.plan import EnginePlan
from ember.errors import RequestError
from ember.model.conversation import Conversation
from ember.serving.answer import Answer, ChatAnswer, CompletionAnswer, PromptText
from ember.serving.body import read_object
from ember.serving.call import Call, Prompt
from ember.serving.errors import ApiError, refused
from ember.serving.guard import ApiKeyGuard
from ember.serving.metrics import CONTENT_TYPE, Metrics
from ember.serving.openapi import document
from ember.serving.respond import BytesResponse, JsonResponse, ObservedResponse, StreamResponse, WholeResponse
from ember.serving.settings import ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request as HttpRequest

    Handler = Callable[[HttpRequest], Awaitable[Any]]


MANY_CHARS = 16_384
"""A prompt that is tokenised in another thread."""


class ApiServer:
    """The handlers, and what they share."""

    def __init__(self, config: ServerConfig, plan: EnginePlan, engine: AsyncEngine, metrics: Metrics) -> None:
        self._config, self._plan, self._engine, self._metrics = config, plan, engine, metrics
        self._admission = Admission(plan)
        if plan.chat is not None:
            plan.chat.serve_strangers()
        self._model = config.served_model or plan.folder.name
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """The application."""
        from fastapi import FastAPI
        from starlette.exceptions import HTTPException
        from starlette.middleware.cors import CORSMiddleware

        app = FastAPI(title="ember", version=ember.__version__, docs_url=None, redoc_url=None)
        app.openapi = lambda: document(self._config, self._plan, self._model)  # type: ignore[method-assign]
        for path, (method, handler) in self._routes().items():
            app.add_route(path, self._counted(path, handler), methods=[method])
        app.add_exception_handler(HTTPException, _on_http_error)
        app.add_exception_handler(Exception, _on_bug)
        if self._config.api_key is not None:
            app.add_middleware(ApiKeyGuard, key=self._config.api_key)
        if origins := self._config.cors_origins:
            app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        return app

    def _routes(self) -> dict[str, tuple[str, Handler]]:
        return {
            "/health": ("GET", self.health),
            "/metrics": ("GET", self.metrics),
            "/v1/models": ("GET", self.models),
            "/v1/models/{model:path}": ("GET", self.model),  # an id may hold slashes
            "/v1/completions": ("POST", self.completions),
            "/v1/chat/completions": ("POST", self.chat),
        }

    def _counted(self, path: str, handler: Handler) -> Handler:
        async def handle(request: HttpRequest) -> Any:
            try:
                response = await handler(request)
            except ApiError as error:
                response = JsonResponse.of_error(error)
            return ObservedResponse(response, partial(self._metrics.answered, path))

        return handle

    async def health(self, request: HttpRequest) -> Any:
        """Whether requests are taken."""
        if not self._engine.healthy:
            raise ApiError(503, "the server takes no requests: it is shutting down, or its engine has died")
        return JsonResponse({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Any:
        """Numbers for Prometheus."""
        return BytesResponse(self._metrics.text(), CONTENT_TYPE)

    async def models(self, request: HttpRequest) -> Any:
        """The one model there is."""
        return JsonResponse({"object": "list", "data": [self._about()]})

    async def model(self, request: HttpRequest) -> Any:
        """The model of that id; without one, as in the list's path with a slash at its end, the list."""
        if not (asked := request.path_params["model"]):
            return await self.models(request)
        self._check_model(asked)
        return JsonResponse(self._about())

    def _about(self) -> dict[str, Any]:
        about = {"id": self._model, "object": "model", "created": self._created, "owned_by": "ember"}
        return about | {"max_model_len": self._plan.max_model_len}

    async def completions(self, request: HttpRequest) -> Any:
        """Complete one or more prompts."""
        body = await self._read(request)
        return await self._answer(Call.completion(body, limits=self._config.choice_limits), CompletionAnswer)

    async def chat(self, request: HttpRequest) -> Any:
        """Answer a conversation."""
        body = await self._read(request)
        return await self._answer(Call.chat(body, limits=self._config.choice_limits), ChatAnswer)

    async def _read(self, request: HttpRequest) -> dict[str, Any]:
        config = self._config
        body = await read_object(request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        self._check_model(body.get("model"))
        return body

    async def _answer(self, call: Call, form: type[Answer]) -> Any:
        """Tokenising a long text or rendering a chat takes its time: the event loop goes on meanwhile."""
        size = sum(len(p) if isinstance(p, str) else 0 if isinstance(p, list) else MANY_CHARS for p in call.prompts)
        prepare = partial(self._requests, call)
        requests, prompts = await asyncio.to_thread(prepare) if size >= MANY_CHARS else prepare()
        answer = form(call, self._model, prompts)
        generation = self._submit(requests, call.stream)
        self._metrics.accepted(sum(len(prompt.token_ids) for prompt in prompts))
        if call.stream:
            return StreamResponse(generation, answer, self._config.send_timeout_s)
        return WholeResponse(generation, answer)

    def _check_model(self, asked: Any) -> None:
        if asked is not None and asked != self._model:
            message = f"the model {asked!r} is not served here; {self._model!r} is, or leave `model` out"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _requests(self, call: Call) -> tuple[list[Request], list[PromptText]]:
        pairs = [self._request(prompt, call) for prompt in call.prompts]
        return [request for request, _ in pairs], [prompt for _, prompt in pairs]

    def _request(self, prompt: Prompt, call: Call) -> tuple[Request, PromptText]:
        admission = self._admission
        try:
            chat = admission.chat_prompt(prompt) if isinstance(prompt, Conversation) else None
            plain = chat.token_ids if chat is not None else prompt
            assert not isinstance(plain, Conversation)
            ids = admission.token_ids(plain, call.params)
            admission.room(len(ids), call.params)
            admission.limits(call.params, 1, is_chat=chat is not None)
        except RequestError as error:
            raise refused(error, "messages" if isinstance(prompt, Conversation) else "prompt") from None
        echoed = self._plan.tokenizer.decode if call.echo else lambda ids: ""
        text = plain if isinstance(plain, str) else echoed(ids)
        return Request(ids if chat is None else chat, call.params), PromptText(text, ids, echoed(ids[:1]))

    def _submit(self, requests: list[Request], stream: bool) -> Any:
        try:
            return self._engine.submit(requests, stream=stream)
        except QueueFull:
            raise ApiError(429, "too many requests are open; try again soon", code="queue_full") from None
        except EngineStopped:
            raise ApiError(503, "the server is shutting down", code="server_stopped") from None


async def _on_http_error(request: HttpRequest, error: Any) -> Any:
    """No such path or method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = ApiError(error.status_code, message)
    return JsonResponse(refusal.body, status=error.status_code, headers=error.headers)


async def _on_bug(request: HttpRequest, error: Exception) -> Any:
    """The traceback goes to the server's log, not to the client."""
    return JsonResponse.of_error(ApiError(500, "the server failed; see its log", code="internal_error"))

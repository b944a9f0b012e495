"""Who may call: the API key, before anything of a request is read."""

from __future__ import annotations

import hmac

from ember.serving.asgi import App, Message, Receive, Send
from ember.serving.errors import ApiError
from ember.serving.respond import JsonResponse

OPEN_PATHS = ("/health",)
"""What anyone may ask."""


class ApiKeyGuard:
    """ASGI middleware: without the key as a bearer token the answer is 401."""

    def __init__(self, app: App, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows_key(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(401, "the header Authorization: Bearer KEY is missing or wrong", code="invalid_api_key")
        await JsonResponse.of_error(refusal)(scope, receive, send)

    def _knows_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key)

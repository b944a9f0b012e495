"""A client of any server that speaks OpenAI's API: one request at a time, tried again where that may help.

The only module that imports aiohttp, the extra `http`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from types import TracebackType
from typing import Any, Self

from ember.config import JobConfig
from ember.data.text import one_line
from ember.errors import ConfigError, JobError, RequestError, UserError

MAX_ANSWER_BYTES = 256 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
REFUSED = (401, 403, 404, 405)
"""No row will fare better: the key, the model or the URL is wrong."""
_KINDS = {"context_length_exceeded": "prompt_too_long"}


class Unavailable(Exception):
    """No answer, or one that says to come again.

    Args:
        reason: on one line.
        after_s: what the server asks to wait.
        status: its answer's; None without one.
    """

    def __init__(self, reason: str, *, after_s: float = 0.0, status: int | None = None) -> None:
        self.reason, self.after_s, self.status = reason, after_s, status
        super().__init__(reason)


class OpenAIClient:
    """Asks one server; use it as an async context.

    Args:
        base_url: ends in `/v1` for most servers.
        key: sent as a bearer token, if any.
        retries: more tries after the first.
        timeout_s: for one try.
    """

    def __init__(self, base_url: str, key: str | None, *, retries: int, timeout_s: float) -> None:
        self._url, self._key = base_url.rstrip("/"), key
        self._retries, self._timeout_s = retries, timeout_s

    @staticmethod
    def of(config: JobConfig) -> OpenAIClient:
        """The client that a job asks for."""
        key = os.environ.get(config.api_key_variable) or None
        return OpenAIClient(str(config.base_url), key, retries=config.max_retries, timeout_s=config.request_timeout_s)

    async def __aenter__(self) -> Self:
        """Open connections as they are needed."""
        try:
            import aiohttp
        except ModuleNotFoundError:
            raise UserError("engine=http needs aiohttp: pip install 'ember-batch[http]'") from None
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        self._lost = (aiohttp.ClientError, TimeoutError, OSError)
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, connect=min(30.0, self._timeout_s)),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self._session.close()

    async def models(self) -> list[str]:
        """The ids of the server's models; empty if it does not list them.

        Raises:
            UserError: it can't be reached, or refuses the key.
        """
        try:
            status, answer, _ = await self._ask("GET", "models", None)
        except Unavailable as error:
            raise ConfigError("base_url", self._url, f"no answer: {error.reason}") from None
        if status in (401, 403):
            raise ConfigError("base_url", self._url, f"the server refuses the key: {_message(answer)}")
        if status != 200:
            raise ConfigError("base_url", self._url, f"GET models: status {status}; most servers' URL ends in /v1")
        listed = answer.get("data") if isinstance(answer, dict) else None
        models = listed if isinstance(listed, list) else []
        return [m["id"] for m in models if isinstance(m, dict) and isinstance(m.get("id"), str)]

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a body.

        Raises:
            RequestError: this request can't be answered: the server says so, or fails at it time and again.
            JobError: no request can: the key or the model is refused, or the server is away.
        """
        for attempt in range(self._retries + 1):
            try:
                return await self._post_once(path, body)
            except Unavailable as error:
                last = error
            if attempt < self._retries:
                await asyncio.sleep(_pause_s(attempt, last.after_s))
        tries = f"{self._retries + 1} tries"
        if last.status == 500:
            raise RequestError("server_error", f"{last.reason} ({tries})")
        raise JobError(f"{self._url}: {last.reason} ({tries}); the same command goes on when the server is back")

    async def _post_once(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer, after_s = await self._ask("POST", path, body)
        said = _message(answer)
        if status == 200 and isinstance(answer, dict):
            return answer
        if status in TRY_AGAIN or status == 200:
            what = f"status {status}: {said}" if status != 200 else "an answer that is no JSON object"
            raise Unavailable(what, after_s=after_s, status=status)
        if status in REFUSED:
            raise JobError(f"{self._url}: status {status}: {said}")
        code = (
            answer["error"].get("code") if isinstance(answer, dict) and isinstance(answer.get("error"), dict) else None
        )
        raise RequestError(_KINDS.get(str(code), "refused"), f"status {status}: {said}")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any, float]:
        """Status, JSON (or text) and Retry-After of an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = f"{self._url}/{path}"
        try:
            async with self._session.request(method, url, data=data, headers=headers, allow_redirects=False) as answer:
                return answer.status, _json(await _content(answer)), _seconds(answer.headers.get("Retry-After"))
        except self._lost as error:
            raise Unavailable(one_line(f"{type(error).__name__}: {error}".rstrip(": "))) from None


async def _content(answer: Any) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            raise RequestError("server_error", f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")


def _message(answer: Any) -> str:
    """What an error body says, on one line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return one_line(message if isinstance(message, str) else json.dumps(message), 300)


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; its other form, a date, is not worth a clock."""
    return min(float(text), LONGEST_PAUSE_S) if text is not None and text.strip().isdecimal() else 0.0


def _pause_s(attempt: int, after_s: float) -> float:
    """Exponential, with jitter, so that requests that failed together do not come again together."""
    pause: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
    return max(pause, after_s)

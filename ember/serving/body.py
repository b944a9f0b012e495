"""A request's body: read within limits of size and time, and only ever a JSON object."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, NoReturn

from ember.checks import MAX_DEPTH, too_deep
from ember.serving.errors import ApiError

if TYPE_CHECKING:
    from starlette.requests import Request

DISCARD_BYTES = 64 << 20


async def read_object(request: Request, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        ApiError: it is of another type (415), too large (413), too slow (408), or no JSON object (400).
    """
    from starlette.requests import ClientDisconnect

    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a foreign web page may send other types without asking, JSON it may not
        raise ApiError(415, "the body must have the header Content-Type: application/json")
    try:
        async with asyncio.timeout(timeout_s):
            return parse_object(await _read(request, max_bytes))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:  # nobody hears this
        raise ApiError(400, "the client went away before its body had arrived") from None


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ApiError: it is none.
    """
    try:
        value = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and too_deep(value):
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json")
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    """A body that is too large is read on, up to a point: a client that is still sending would not hear the answer."""
    most = max_bytes + DISCARD_BYTES
    said = request.headers.get("content-length", "0")
    body, size = bytearray(), 0
    if not said.isdecimal() or len(said) > 18 or int(said) > most:
        size = most + 1
    else:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                break
            if size <= max_bytes:
                body += chunk
    if size > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    return bytes(body)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")

"""What goes wrong with a request, in OpenAI's words: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from ember.data.output import CompletionOutput
from ember.errors import RequestError

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: the HTTP status.
        message: what is wrong, with its remedy.
        param: the key of the body that is to blame.
        code: a short stable name.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's own headers."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {"prompt_too_long": "context_length_exceeded"}
_STATUSES = {"server_stopped": 503, "out_of_memory": 503, "internal_error": 500, "sampling_failed": 500}


def refused(error: RequestError, param: str) -> ApiError:
    """A prompt, the body's `param`, or its sampling can't run."""
    return ApiError(400, str(error), param=error.key or param, code=_CODES.get(error.kind, error.kind))


def failed(output: CompletionOutput) -> ApiError:
    """A choice ended with an error."""
    kind = output.error_kind or "internal_error"
    return ApiError(_STATUSES.get(kind, 400), output.error or kind, code=_CODES.get(kind, kind))

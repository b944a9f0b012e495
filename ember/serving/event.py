"""Server-sent events: JSON in UTF-8, and events that differ in a piece's text and token ids alone.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

MARK, MARK_ID = "\ufdd0", -1
"""Stand in a frame for the text and the token ids."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class EventFrame:
    """An event around its text and, if it has them, its token ids."""

    start: bytes
    middle: bytes
    end: bytes | None

    @classmethod
    def of(cls, event: bytes, head: int) -> Self:
        """From an event that holds the two marks; they are looked for behind its first `head` bytes, the client's."""
        start, rest = event[:head], event[head:]
        before, _, after = rest.partition(as_json(MARK))
        middle, found, end = after.partition(as_json([MARK_ID]))
        return cls(start + before, middle, end if found else None)

    def event(self, text: str, token_ids: Sequence[int]) -> bytes:
        """The event of a piece."""
        if self.end is None:
            return b"%b%b%b" % (self.start, as_json(text), self.middle)
        ids = ",".join(map(str, token_ids)).encode()
        return b"%b%b%b[%b]%b" % (self.start, as_json(text), self.middle, ids, self.end)


def as_json(value: Any) -> bytes:
    """JSON in UTF-8; a lone surrogate stays an escape."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def as_event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"

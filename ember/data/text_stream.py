"""The text of a request while it grows: what may be shown now, so that nothing shown is ever taken back."""

from __future__ import annotations

from collections.abc import Sequence


class TextStream:
    """Cuts a growing text into pieces whose concatenation is the final text.

    What could still turn out to be the beginning of a stop string is held back until it can't.

    Args:
        stop: the stop strings, none of them empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._shown = 0

    def take(self, text: str) -> str:
        """What is new of `text`, the whole text so far, and certain to stay."""
        end = self._certain(text)
        piece, self._shown = text[self._shown : end], end
        return piece

    def rest(self, text: str) -> str:
        """What is left of the final text."""
        return text[self._shown :]

    def _certain(self, text: str) -> int:
        """Where the longest ending that begins a stop string begins."""
        return min((_open(text, s, max(self._shown, len(text) - len(s) + 1)) for s in self._stop), default=len(text))


def _open(text: str, stop: str, start: int) -> int:
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return start
        start += 1
    return len(text)

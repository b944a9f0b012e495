"""How many choices one request may ask for: what the server allows, and what it could ever hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ember.data.text import one_line
from ember.serving.errors import ApiError


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceLimits:
    """The server's settings of these names."""

    max_choices: int
    max_num_seqs: int
    max_queue: int

    @property
    def most_open(self) -> int:
        """Choices that run or wait; one more is refused until some have ended."""
        return self.max_num_seqs + self.max_queue

    @property
    def most(self) -> int:
        """Choices of a request: more would never find room."""
        return min(self.max_choices, self.most_open)

    def check(self, num_prompts: int, given: dict[str, Any]) -> None:
        """Nothing, if there could be room for so many prompts with the body's `n` and `best_of`.

        Values that are no numbers pass: what else they may be is checked with the other sampling settings.

        Raises:
            ApiError: too many; names the key, the most allowed and the setting behind it.
        """
        for key, most in (("n", self.most), ("best_of", self.max_choices)):
            value = given.get(key)
            each = value if isinstance(value, (int, float)) else 1
            if num_prompts * each > most:
                of_prompts = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
                asked = f"{key}={one_line(str(each), 60)}{of_prompts}" if each > 1 else f"{num_prompts} prompts"
                message = f"{asked}: a request may have {most} choices at most ({self._why(most)})"
                raise ApiError(400, message, param=key if each > 1 else "prompt", code="too_many_choices")

    def _why(self, most: int) -> str:
        if most == self.max_choices:
            return f"max_choices={most}"
        return f"max_num_seqs={self.max_num_seqs} and max_queue={self.max_queue}"

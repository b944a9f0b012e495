"""What speculation knows of one sequence: its n-grams, how often proposed tokens were right, when to try again."""

from __future__ import annotations

from dataclasses import dataclass, field

from ember.speculation.ngram import NgramIndex

GUESS_WEIGHT = 4.0
"""How many seen tokens a guess is worth."""
MEMORY_OF_ONE = 0.9
"""What is left of an observation after one more of the same sequence."""
SHORTEST_PAUSE = 8
"""Output tokens that a sequence goes without proposals when they don't pay; doubled each time they still don't."""


@dataclass(slots=True)
class Watch:
    """How often proposed tokens were right, the latest counting most."""

    memory: float
    right: float = 0.0
    wrong: float = 0.0

    def add(self, num_proposed: int, num_accepted: int) -> None:
        """Those of one step: what follows a wrong one says nothing."""
        self.right = self.right * self.memory + num_accepted
        self.wrong = self.wrong * self.memory + (num_accepted < num_proposed)

    def chance(self, guess: float) -> float:
        """That one more is right; `guess`, below 1, is what to think of it without having seen any."""
        return (self.right + guess * GUESS_WEIGHT) / (self.right + self.wrong + GUESS_WEIGHT)


@dataclass(slots=True)
class Drafting:
    """The state of one sequence. No tokens are proposed before it has `resumes_at` output tokens."""

    index: NgramIndex
    watch: Watch = field(default_factory=lambda: Watch(MEMORY_OF_ONE))
    pause: int = SHORTEST_PAUSE
    resumes_at: int = 0

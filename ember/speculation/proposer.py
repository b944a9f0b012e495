"""Which tokens to propose for a sequence, and when not to.

Whether a proposal pays: a step of r sequences costs about as much as r + FIXED_ROWS tokens, so one of its r tokens is
worth (r + FIXED_ROWS) / r of a token's work, and one more token is worth its work if it is kept with a chance above
r / (r + FIXED_ROWS). The chance is watched, in each sequence and in all of them.
"""

from __future__ import annotations

from math import log
from weakref import WeakKeyDictionary

from ember.config import EngineConfig
from ember.core.sequence import Sequence
from ember.core.speculation import Proposer
from ember.speculation.drafting import SHORTEST_PAUSE, Drafting, Watch
from ember.speculation.ngram import NgramIndex

FIXED_ROWS = 16
"""What a step costs whatever its size (reading the weights, above all), in tokens' work."""
FIRST_GUESS = 0.7
"""The chance that is assumed of a proposed token before any was seen."""
MEMORY_OF_ALL = 0.995
"""What is left of an observation after one more of any sequence."""
LONGEST_PAUSE = 64
"""Output tokens that a sequence goes without proposals at most, when they don't pay."""


class NgramProposer:
    """Proposes the continuation of a repeated n-gram, as many tokens as pay.

    Args:
        num_tokens: most tokens proposed to a sequence a step.
        shortest, longest: n-gram lengths (see `NgramIndex`).
    """

    def __init__(self, num_tokens: int, shortest: int, longest: int) -> None:
        self.num_tokens = num_tokens
        self._lengths = shortest, longest
        self._all = Watch(MEMORY_OF_ALL)
        self._states: WeakKeyDictionary[Sequence, Drafting] = WeakKeyDictionary()  # each lives as long as its sequence

    def propose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        """See `Proposer.propose`. Where not even one token pays, one is tried now and then."""
        state = self._state_of(sequence)
        if most < 1 or sequence.num_output_tokens < state.resumes_at:
            return []
        proposed = state.index.continuation(sequence.token_ids, min(most, self.num_tokens))
        if not proposed:
            return []
        count = self._count_that_pays(state.watch, num_running)
        if count > 0:
            state.pause = SHORTEST_PAUSE
        else:
            state.resumes_at = sequence.num_output_tokens + state.pause
            state.pause = min(2 * state.pause, LONGEST_PAUSE)
        return proposed[: max(1, count)]

    def learn(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """See `Proposer.learn`."""
        state = self._state_of(sequence)
        state.watch.add(num_proposed, num_accepted)
        self._all.add(num_proposed, num_accepted)
        if num_accepted:
            state.resumes_at = 0

    def _state_of(self, sequence: Sequence) -> Drafting:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = Drafting(NgramIndex(*self._lengths))
        return state

    def _count_that_pays(self, watch: Watch, num_running: int) -> int:
        """The most tokens of which the last is still likely enough to be kept."""
        chance = watch.chance(self._all.chance(FIRST_GUESS))
        return int(log(num_running / (num_running + FIXED_ROWS)) / log(chance))


def make_proposer(config: EngineConfig) -> Proposer | None:
    """What `speculative` asks for; None for `off`."""
    if config.speculative == "off":
        return None
    return NgramProposer(config.num_speculative_tokens, config.ngram_min, config.ngram_max)

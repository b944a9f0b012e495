"""Random numbers as a pure function of (row seed, sample, position), so that no order of work can change them.

The mixer is SplitMix64's finaliser (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = (z + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def row_seed(seed: int, row_index: int) -> int:
    """The seed of a row that brings none, in 0 .. 2^63-1, from the job's seed and the row's index."""
    return _mix(_mix(seed) ^ row_index) >> 1


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) for output `position` of sample `sample_index` of a row."""
    return (_mix(_mix(_mix(seed) ^ sample_index) ^ position) >> 11) * 2.0**-53

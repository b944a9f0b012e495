"""The random numbers: recorded, so that a seed means the same text for ever; and good enough to sample from."""

from __future__ import annotations

import itertools

import pytest

from ember.core.random_stream import row_seed, uniform

MASK = 2**64 - 1


def splitmix64(state):
    """Steele, Lea and Flood's generator, as published: the next output of a state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_published_generator():
    """The helper below is only worth something if it is SplitMix64: its first outputs from state 1234567."""
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) & MASK
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ((0, 0, 0), 0.13870941014555427),
        ((0, 0, 1), 0.18436667429957676),
        ((0, 1, 0), 0.2691303195904541),
        ((1, 0, 0), 0.6935121390102292),
        ((12345, 0, 7), 0.9158200672851483),
        ((9223372036854775807, 3, 511), 0.05695934716378215),
    ],
)
def test_recorded_uniforms(where, value):
    """A changed mixer would silently change every sampled row of every job."""
    assert uniform(*where) == value
    seed, sample, position = where
    assert uniform(*where) == (splitmix64(splitmix64(splitmix64(seed) ^ sample) ^ position) >> 11) / 2**53


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ((0, 0), 6017775124710473527),
        ((0, 1), 313702574736366215),
        ((1, 0), 3395948882924712079),
        ((42, 7), 793502930448478848),
        ((9223372036854775807, 1000000000), 5598521312297494285),
    ],
)
def test_recorded_row_seeds(where, value):
    """A row without a seed of its own must get the same one in every version, shard and resume."""
    assert row_seed(*where) == value
    assert 0 <= value < 2**63


def test_uniforms_are_in_range_and_distinct():
    """A number of 1.0 would fall beyond the last token; a collision over samples or positions would couple them."""
    numbers = [uniform(seed, s, i) for seed in range(5) for s in range(20) for i in range(100)]
    assert all(0.0 <= u < 1.0 for u in numbers)
    assert len(set(numbers)) == len(numbers)


def test_arguments_are_not_interchangeable():
    """If (seed, sample, position) were merely added or xored, swapped or shifted ones would collide."""
    assert len({uniform(a, b, c) for a in range(12) for b in range(12) for c in range(12)}) == 12**3


def test_row_seeds_are_distinct():
    """Two rows with one seed would get the same completion for the same prompt; nor may jobs share rows' seeds."""
    seeds = [row_seed(seed, row) for seed in range(20) for row in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("vary", [0, 1, 2])
def test_uniforms_are_uniform_and_uncorrelated(vary):
    """A bias along any of the arguments would bias every sampled token (fixed numbers, loose bounds)."""
    count, bins = 4000, 20
    numbers = [uniform(*[i if axis == vary else 7 for axis in range(3)]) for i in range(count)]
    histogram = [0] * bins
    for u in numbers:
        histogram[int(u * bins)] += 1
    chi_square = sum((n - count / bins) ** 2 / (count / bins) for n in histogram)
    assert chi_square < 45, "19 degrees of freedom: beyond 45 once in 1500 draws"
    mean = sum(numbers) / count
    correlation = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(numbers)) / (count / 12)
    assert abs(correlation) < 0.05


def test_rows_of_one_job_are_independent():
    """Neighbouring rows, each with its derived seed, must not draw alike at the same position."""
    first = [uniform(row_seed(0, row), 0, 0) for row in range(3000)]
    second = [uniform(row_seed(0, row + 1), 0, 0) for row in range(3000)]
    correlation = sum((a - 0.5) * (b - 0.5) for a, b in zip(first, second, strict=True)) / (3000 / 12)
    assert abs(correlation) < 0.06
    assert abs(sum(first) / 3000 - 0.5) < 0.02

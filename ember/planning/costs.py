"""What a step costs, learnt from timed steps: so much a step, a prompt token, an output token, a token read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ember.planning.simulation import SimulatedStep

_OUTLIER, _REFITS, _TINY = 3.0, 3, 1e-12
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: a constant, then a prefill token, a decode token, a live token that attention reads."""

    seconds: tuple[float, ...]

    @staticmethod
    def fitted(steps: Seq[SimulatedStep], durations: Seq[float]) -> StepCosts:
        """Non-negative costs that come nearest to these steps' durations, relative to each.

        Steps that took much longer than the rest say they should are left out: something else was at work. In the end
        all costs are scaled so that the sum over the other steps is what was measured.
        """
        features, measured = _features(steps), np.array(durations)
        kept = np.ones(len(measured), dtype=bool)
        for _ in range(_REFITS):
            costs = _nearest(features[kept], measured[kept])
            predicted = features @ costs
            kept = measured <= _OUTLIER * np.median(measured[kept] / np.maximum(predicted[kept], _TINY)) * predicted
        scale = float(measured[kept].sum()) / max(float(predicted[kept].sum()), _TINY)
        return StepCosts(tuple((costs * scale).tolist()))

    def total_s(self, steps: Seq[SimulatedStep]) -> float:
        """Seconds that these steps take."""
        return float((_features(steps) @ np.array(self.seconds)).sum()) if steps else 0.0


def _nearest(features: Array, measured: Array) -> Array:
    """Costs by least squares of relative errors; one that would be negative is none."""
    weighted = features / measured[:, None]
    chosen = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(measured)), rcond=None)
        if (found >= 0).all() or len(chosen) == 1:
            break
        chosen.pop(int(found.argmin()))
    costs = np.zeros(features.shape[1])
    costs[chosen] = np.maximum(found, 0.0)
    return costs


def _features(steps: Seq[SimulatedStep]) -> Array:
    return np.array([(1.0, s.prefill_tokens, s.decode_tokens, s.kv_tokens) for s in steps])

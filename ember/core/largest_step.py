"""The largest step that the settings allow, to see what it takes."""

from __future__ import annotations

from array import array

from ember.core.batch import ScheduledSequence
from ember.core.sequence import Sequence
from ember.sampling_params import SamplingParams

SORTED = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1)
"""A way to sample that takes all the memory sampling can."""


def largest_step(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_proposed: int, block_size: int
) -> list[ScheduledSequence]:
    """As many tokens of as many sequences as may be, each with logits for its last one and `num_proposed` before it.

    The first sequence has the longest context; nobody's tokens mean anything, so all of them lie in block 0.
    """
    count = min(max_num_seqs, max_num_batched_tokens)
    left, step = max_num_batched_tokens, []
    for index in range(count):
        tokens = min(max_model_len, left - (count - 1 - index))
        end = max_model_len if index == 0 else tokens
        table = array("i", [0] * -(-end // block_size))
        sequence = Sequence(index, [0] * end, SORTED, seed=0, max_tokens=1)
        logits = min(tokens, 1 + num_proposed)
        step.append(ScheduledSequence(sequence, end - tokens, tokens, table, samples=True, num_logits=logits))
        left -= tokens
    return step

"""A prompt in the engine: which of its samples have come, and when its result may go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ember.data.output import CompletionOutput, RequestOutput
from ember.sampling_params import SamplingParams


@dataclass(slots=True)
class LiveRequest:
    """Collects the samples of one prompt, which finish in any order.

    Attributes:
        output: what all its samples share.
        together: whether they are handed out all at once, in order, or each as it comes.
        params: how many are wanted, and whether these are the best of all that come.
        sequence_ids: the ids in the engine of those that are still to come, by sample.
    """

    output: RequestOutput
    together: bool
    params: SamplingParams
    sequence_ids: dict[int, int] = field(default_factory=dict)
    _held: list[CompletionOutput] = field(default_factory=list)

    def take(self, sample: CompletionOutput) -> RequestOutput | None:
        """Take a finished sample, no longer to come; the result to hand out now, if any."""
        finished = not self.sequence_ids
        if not self.together:
            return replace(self.output, outputs=[sample], finished=finished)
        self._held.append(sample)
        return replace(self.output, outputs=self._chosen()) if finished else None

    def _chosen(self) -> list[CompletionOutput]:
        """The samples to hand out, in order. What is ranked stands or falls together."""
        samples = sorted(self._held, key=lambda s: s.index)
        if not self.params.ranked:
            return samples
        failed = next((s for s in samples if s.error is not None), None)
        if failed is not None:
            return [replace(failed, index=i, text="", token_ids=[]) for i in range(self.params.n)]
        if self.params.best_of is not None:
            samples.sort(key=lambda s: -(s.cumulative_logprob or 0.0))
        return [replace(sample, index=i) for i, sample in enumerate(samples[: self.params.n])]

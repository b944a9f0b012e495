"""A prompt in the engine: which of its samples have come, and when its result may go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ember.data.output import CompletionOutput, RequestOutput


@dataclass(slots=True)
class LiveRequest:
    """Collects the samples of one prompt, which finish in any order.

    Attributes:
        output: what all its samples share.
        together: whether they are handed out all at once, in order, or each as it comes.
        sequence_ids: the ids in the engine of those that are still to come, by sample.
    """

    output: RequestOutput
    together: bool
    sequence_ids: dict[int, int] = field(default_factory=dict)
    _held: list[CompletionOutput] = field(default_factory=list)

    def take(self, sample: CompletionOutput) -> RequestOutput | None:
        """Take a finished sample, no longer to come; the result to hand out now, if any."""
        finished = not self.sequence_ids
        if not self.together:
            return replace(self.output, outputs=[sample], finished=finished)
        self._held.append(sample)
        return replace(self.output, outputs=sorted(self._held, key=lambda s: s.index)) if finished else None

"""A sample of a job's rows by what they cost: prompt tokens, and how many may follow."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ember.config import JobConfig
from ember.data.reader import PromptReader
from ember.data.work import Share
from ember.entrypoints.admission import Admission
from ember.entrypoints.plan import EnginePlan
from ember.errors import RequestError
from ember.model.conversation import Conversation
from ember.request import row_params

MOST_SAMPLED = 512


@dataclass(frozen=True, slots=True)
class RowCost:
    """One request: the tokens of its prompt, and the most output tokens of each of its samples."""

    prompt: Seq[int]
    max_tokens: int
    num_samples: int = 1


@dataclass(frozen=True, slots=True)
class RowSample:
    """Rows spread evenly over the input.

    Attributes:
        costs: of the sampled rows that can run.
        num_rows: rows of the whole job (its shard's, within `limit`).
        num_sampled: rows looked at, those that can't run too.
    """

    costs: list[RowCost]
    num_rows: int
    num_sampled: int

    @property
    def num_running(self) -> int:
        """Rows of the whole job that can be expected to run."""
        return round(self.num_rows * len(self.costs) / self.num_sampled) if self.num_sampled else 0

    def repeated(self, count: int) -> list[RowCost]:
        """`count` rows like those of the sample, in its order."""
        return [self.costs[i * len(self.costs) // count] for i in range(count)] if self.costs else []


def sample_rows(config: JobConfig, plan: EnginePlan, reader: PromptReader) -> RowSample:
    """Look at some rows as the job will; nothing is computed.

    Raises:
        UserError: a file can't be read.
    """
    share = Share.of(config, reader.num_rows)
    own = range(share.shard, share.end, share.num_shards)
    stride = max(1, -(-len(own) // MOST_SAMPLED))
    chosen = own[::stride]
    costs: list[RowCost] = []
    for row in reader.rows(lambda index: index in chosen):
        try:
            params = row_params(row, config)
            admission = Admission(plan)
            assert row.prompt is not None
            prompt = admission.chat_prompt(row.prompt).token_ids if isinstance(row.prompt, Conversation) else row.prompt
            ids = admission.token_ids(prompt, params, allow_special_tokens=config.allow_special_tokens)
            costs.append(RowCost(ids, admission.room(len(ids), params), params.n))
        except RequestError:
            continue
    return RowSample(costs, len(own), len(chosen))

"""The rows of a job and their samples, counted: by how they ended, their tokens, their errors, their ids."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ember.data.duplicate_ids import DuplicateIds

ERRORS_A_KIND = 3
_ERROR_CHARS = 300


class RowCounts:
    """Sums over rows. Keeps a few numbers and the first errors of each kind, whatever the size of the job.

    Attributes:
        rows: input rows that are there with all samples.
        samples, output_tokens: of all that is written.
        prompt_tokens: a prompt counts once, however many samples it has.
        finish_reasons, errors: samples by how they ended, error rows by kind.
        first_errors: `kind`, `row_index`, `id` and `error` of the first few rows of each kind.
        ids: counts those that occurred before.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.samples = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finish_reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.first_errors: list[dict[str, Any]] = []
        self.ids = DuplicateIds()
        self._missing: dict[int, int] = {}

    def add_sample(
        self,
        *,
        finish_reason: str | None,
        error: str | None = None,
        num_prompt_tokens: int = 0,
        num_output_tokens: int = 0,
        row_index: int,
        sample_index: int = 0,
        num_samples: int = 1,
        id: str | None = None,
    ) -> None:
        """Count one sample of a row.

        Args:
            finish_reason: stop, length or error.
            error: why the row could not run, beginning with its kind (`bad_row: ...`); None for a good row.
            num_samples: of the row in all.
        """
        self._complete(row_index, num_samples)
        if sample_index == 0:
            self.ids.add([id])
            self.prompt_tokens += num_prompt_tokens
        self.output_tokens += num_output_tokens
        if finish_reason is not None:
            self.finish_reasons[str(finish_reason)] += 1
        if error is not None:
            self._add_error(error, row_index, id)

    def add_part(self, keys: pa.Table) -> None:
        """Count the samples of a part, given its key columns (see `ember.data.done`)."""
        for row_index, num_samples in zip(keys["row_index"].to_pylist(), keys["num_samples"].to_pylist(), strict=True):
            self._complete(row_index, num_samples)
        first = keys.filter(pc.equal(keys["sample_index"], 0))
        self.ids.add(first["id"].to_pylist())
        self.prompt_tokens += pc.sum(first["num_prompt_tokens"]).as_py() or 0
        self.output_tokens += pc.sum(keys["num_output_tokens"]).as_py() or 0
        for item in pc.value_counts(keys["finish_reason"]).to_pylist():
            self.finish_reasons[item["values"]] += item["counts"]
        failed = keys.filter(pc.equal(keys["finish_reason"], "error"))
        for row in failed.select(["row_index", "id", "error"]).to_pylist():
            self._add_error(row["error"], row["row_index"], row["id"])

    def _complete(self, row_index: int, num_samples: int) -> None:
        """One more sample of a row: its last one makes the row complete."""
        self.samples += 1
        missing = (num_samples if num_samples == 1 else self._missing.pop(row_index, num_samples)) - 1
        if missing:
            self._missing[row_index] = missing
        else:
            self.rows += 1

    def _add_error(self, error: str | None, row_index: int, id: str | None) -> None:
        kind = error_kind(error)
        self.errors[kind] += 1
        shown_rows = [e["row_index"] for e in self.first_errors if e["kind"] == kind]
        if len(shown_rows) < ERRORS_A_KIND and row_index not in shown_rows:
            shown = _cut((error or "").removeprefix(f"{kind}: "), _ERROR_CHARS)
            self.first_errors.append({"kind": kind, "row_index": row_index, "id": id, "error": shown})


def error_kind(error: str | None) -> str:
    """The kind of an error row: what stands before the first colon of its `error`."""
    return (error or "").partition(":")[0] or "other"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."

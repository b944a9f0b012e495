"""What one output holds, read for a report: settings, history, step statistics, and rows without their texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from ember.data.attempts import read_summary
from ember.data.folder import COMPLETIONS, CONFIG, STEPS, SUMMARY
from ember.data.formats import part_format
from ember.data.manifest import Manifest
from ember.data.store import Store, open_store
from ember.errors import UserError
from ember.report.tables import Parts

ROW_COLUMNS = (
    *("row_index", "sample_index", "id", "finish_reason", "error", "num_prompt_tokens", "num_output_tokens"),
    *("num_cached_tokens", "num_preemptions", "queue_s", "ttft_s", "latency_s"),
)
TEXT_COLUMNS = ("row_index", "sample_index", "id", "prompt", "completion", "finish_reason", "num_output_tokens")


@dataclass(frozen=True, slots=True)
class JobResults:
    """One job, finished or not.

    Attributes:
        store: the output.
        settings: of `config.yaml`, by dotted key, as the job was last started.
        summary: `summary.json`; empty if it can't be read.
        steps: the step statistics of all attempts and shards, with whatever columns they have.
        rows: `ROW_COLUMNS` of the completions, in the order in which they were written.
        completions: their parts, for texts and tokens.
    """

    store: Store
    manifest: Manifest
    settings: dict[str, Any]
    summary: dict[str, Any]
    steps: pa.Table
    rows: pa.Table
    completions: Parts

    @staticmethod
    def open(output: str) -> JobResults:
        """Read an output, a folder or a URL; it may still be written to.

        Raises:
            UserError: it is none of ember's, or a part can't be read.
        """
        return JobResults.of(open_store(output))

    @staticmethod
    def of(store: Store) -> JobResults:
        """See `open`."""
        manifest = Manifest.load(store)
        if manifest is None:
            raise UserError(f"{store.shown} holds no manifest.json; name the output of a job")
        completions = completion_parts(store, manifest)
        return JobResults(
            store=store,
            manifest=manifest,
            settings=saved_settings(store),
            summary=read_summary(store, SUMMARY),
            steps=Parts(store.sub(STEPS)).read(),
            rows=completions.read(ROW_COLUMNS),
            completions=completions,
        )

    @property
    def num_rows_expected(self) -> int:
        """Rows of the finished job."""
        return num_expected(self.manifest, self.settings)

    @property
    def num_rows_missing(self) -> int:
        """Rows of the finished job that are not there yet."""
        there = pc.count_distinct(self.rows["row_index"]).as_py() if len(self.rows) else 0
        return max(0, self.num_rows_expected - int(there))

    def samples(self, count: int) -> list[dict[str, Any]]:
        """Some rows that ran, spread evenly over the output, with their texts (`TEXT_COLUMNS`), by row."""
        ran = [i for i, reason in enumerate(_column(self.rows, "finish_reason")) if reason != "error"]
        chosen = sorted({ran[i * len(ran) // count] for i in range(count)}) if ran else []
        found: list[dict[str, Any]] = []
        first = 0
        for name, size in self.completions.num_rows().items():
            inside = [i - first for i in chosen if first <= i < first + size]
            if inside:
                found += self.completions.read(TEXT_COLUMNS, [name]).take(inside).to_pylist()
            first += size
        return sorted(found, key=lambda row: (row["row_index"], row["sample_index"]))

    def errors(self) -> dict[str, list[dict[str, Any]]]:
        """Error rows by kind, the commonest first, each kind by row."""
        if not len(self.rows):
            return {}
        failed = self.rows.filter(pc.equal(self.rows["finish_reason"], "error")).sort_by("row_index")
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in failed.to_pylist():
            kinds.setdefault(str(row["error"]).partition(": ")[0], []).append(row)
        return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def completion_parts(store: Store, manifest: Manifest) -> Parts:
    """The parts of an output's completions."""
    form = part_format(str(manifest.fingerprint.get("output_format", "parquet")))
    return Parts(store.sub(COMPLETIONS), form, manifest.schema)


def num_expected(manifest: Manifest, settings: dict[str, Any]) -> int:
    """Rows of the finished job: of the input, within `limit`."""
    num_input_rows, limit = int(manifest.facts["num_input_rows"]), settings.get("limit")
    return min(limit, num_input_rows) if isinstance(limit, int) else num_input_rows


def saved_settings(store: Store) -> dict[str, Any]:
    """The settings in an output's `config.yaml` by dotted key; none if it can't be read."""
    try:
        with store.open(CONFIG) as file:
            return flat(yaml.safe_load(file.read()))
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; an empty mapping stays a value."""
    if not isinstance(value, dict):
        return {}
    found: dict[str, Any] = {}
    for key, item in value.items():
        inner = flat(item, f"{prefix}{key}.")
        found |= inner or {f"{prefix}{key}": item}
    return found


def _column(table: pa.Table, name: str) -> list[Any]:
    return list(table[name].to_pylist()) if name in table.schema.names else []

"""The input side of a job: from the files that `data` names to one PromptRow per input row.

The reader looks at every file once at the start, for the row count and the schema of the columns that pass through, and
then streams the rows as often as asked. Mistakes in the settings are UserErrors at once. Whatever is wrong with one row
becomes that row's `error`: rows are never dropped, and no row stops the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa

from ember.config import JobConfig
from ember.data import openai_batch
from ember.data.columns import ColumnType, Converter, kept_type, output_names, type_of_kinds
from ember.data.declared_types import declared_type
from ember.data.file_kinds import shown_path
from ember.data.files import resolve_files
from ember.data.prompt import checked_messages, checked_prompt, checked_text
from ember.data.row_sampling import RowSampling
from ember.data.sources import JsonlSource, ParquetSource, Record, Source, Wants, open_source
from ember.data.template import Template
from ember.data.text import RowError, one_line, plain_text
from ember.errors import ConfigError
from ember.model.conversation import Conversation

DEFAULT_ID_COLUMN = "id"
DEFAULT_SAMPLING_COLUMN = "sampling"
ORDER_WINDOW = 4096
"""Rows that `order=prefix` holds in memory to sort."""
DEFAULT_MESSAGES_COLUMN = "messages"
_MAKE_PROMPTS = ("prompt_column", "messages_column", "template")
_A = TypeVar("_A")
_T = TypeVar("_T")


@dataclass(slots=True)
class PromptRow:
    """One input row, ready to run or with the reason why it can't.

    Attributes:
        row_index: 0-based number over all files in sorted order; blank lines are not counted.
        where: the row's place, "FILE:LINE" or "FILE row N" (N is 0-based within that Parquet file).
        id: the id column as text, None where it is missing or null.
        prompt: text (a template is rendered already), token ids or a conversation; None with an error.
        sampling: the row's own sampling settings, raw, for `SamplingParams.override`; empty with an error.
        columns: the values that pass through, by output name, in the schema's types. Every name is there; what is
            missing or can't be read is None. A Parquet value that Python can't hold exactly (nanoseconds, years past
            9999) is an Arrow scalar, which `pa.array` takes among plain values.
        error: why the row can't run, on one line that does not repeat `where`; or None.
        samples_done: the samples that an earlier attempt has written.
    """

    row_index: int
    where: str
    id: str | None
    prompt: str | list[int] | Conversation | None
    sampling: dict[str, Any]
    columns: dict[str, Any]
    error: str | None
    samples_done: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _PassThrough:
    source: str
    output: str
    convert: Converter


class PromptReader:
    """Reads the rows of a job.

    Attributes:
        files: the files in reading order, spelled as `data` spelled them (see `resolve_files` for which these are).
        num_rows: rows in all files, before `limit`.
        schema: the columns that pass through, by output name, all nullable.
        warnings: one line each, for what is probably a mistake but stops nothing.

    Raises:
        UserError: `data` names no readable file, a file is corrupt, a column that a setting names is nowhere, or the
            template or `sampling_columns` is malformed.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._template = None if config.template is None else Template.parse(config.template)
        self._sampling = RowSampling(config.sampling_column, config.sampling_columns)
        self.files, self.warnings = resolve_files(config.data)
        self._sources = [open_source(path) for path in self.files]
        self.num_rows = sum(source.num_rows for source in self._sources)
        self._found = list(dict.fromkeys(name for source in self._sources for name in source.columns))
        self._is_batch = config.format == "openai_batch"
        if self._is_batch:
            self._check_batch()
        else:
            self._check_columns()
        self._check_declared()
        self._plan, self.schema = self._pass_through()
        self._no_values = dict.fromkeys(self.schema.names)

    def rows(self, wants: Wants | None = None) -> Iterator[PromptRow]:
        """The rows, at most `limit`, lazily; one file is open at a time. In order, or with `order=prefix` nearly.

        Args:
            wants: which row numbers to read; all if None. What is not wanted is not even parsed.

        Raises:
            UserError: a file has changed, vanished or become unreadable since the reader was made. Never for a bad row.
        """
        rows = self._in_order(wants)
        return by_prefix(rows) if self._config.order == "prefix" else rows

    def _in_order(self, wants: Wants | None) -> Iterator[PromptRow]:
        limit = self._config.limit
        end = self.num_rows if limit is None else min(limit, self.num_rows)
        first = 0
        for source in self._sources:
            if first >= end:
                return
            yield from self._rows_of(source, first, end, wants)
            first += source.num_rows

    def _rows_of(self, source: Source, first: int, end: int, wants: Wants | None) -> Iterator[PromptRow]:
        def wanted(index: int) -> bool:
            return first + index < end and (wants is None or wants(first + index))

        for index, record in islice(source.records(wanted), end - first):
            yield self._row(first + index, record)

    def _row(self, row_index: int, record: Record) -> PromptRow:
        values = record.values
        if values is None:
            return PromptRow(row_index, record.where, None, None, {}, dict(self._no_values), record.cause)
        causes = [] if record.cause is None else [record.cause]
        if self._is_batch:
            prompt = _attempt(causes, openai_batch.request_prompt, values)
            sampling = _attempt(causes, openai_batch.request_sampling, values)
            row_id = openai_batch.request_id(values)
            values = openai_batch.request_columns(values)
        else:
            prompt = _attempt(causes, self._prompt, values)
            sampling = _attempt(causes, self._sampling.of_record, record)
            row_id = self._id(values)
        columns = self._columns(values, causes)
        if causes:
            return PromptRow(row_index, record.where, row_id, None, {}, columns, causes[0])
        return PromptRow(row_index, record.where, row_id, prompt, sampling or {}, columns, None)

    def _prompt(self, values: dict[str, Any]) -> str | list[int] | Conversation:
        column = self._messages_column(values)
        if column is not None:
            return checked_messages(values.get(column), one_line(column, 60)).with_system(self._config.system)
        prompt = self._plain_prompt(values)
        if not self._config.chat:
            return prompt
        if not isinstance(prompt, str):
            raise RowError(f"{one_line(self._config.prompt_column, 60)} is token ids; chat=true needs text")
        return Conversation.of_prompt(prompt).with_system(self._config.system)

    def _messages_column(self, values: dict[str, Any]) -> str | None:
        """The column with the row's conversation; None if its prompt is something else."""
        config = self._config
        if config.messages_column is not None or self._template is not None:
            return config.messages_column
        has_prompt = values.get(config.prompt_column) is not None
        return None if has_prompt or values.get(DEFAULT_MESSAGES_COLUMN) is None else DEFAULT_MESSAGES_COLUMN

    def _plain_prompt(self, values: dict[str, Any]) -> str | list[int]:
        name = self._config.prompt_column
        if self._template is not None:
            return checked_text(self._template.render(values), "the rendered template")
        if name not in values:
            raise RowError(f"no column {one_line(name, 60)} (there are: {_listed(list(values))})")
        return checked_prompt(values[name], one_line(name, 60))

    def _id(self, values: dict[str, Any]) -> str | None:
        value = values.get(self._config.id_column)
        return None if value is None else plain_text(value)

    def _columns(self, values: dict[str, Any], causes: list[str]) -> dict[str, Any]:
        columns = {}
        for item in self._plan:
            value = values.get(item.source)
            try:
                columns[item.output] = None if value is None else item.convert(value)
            except RowError as error:
                columns[item.output] = None
                causes.append(f"column {one_line(item.source, 60)} is {error}")
        return columns

    def _check_batch(self) -> None:
        if parquet := next((s for s in self._sources if isinstance(s, ParquetSource)), None):
            what = f"request lines are JSON, and {shown_path(parquet.path)} is Parquet; leave format out"
            raise ConfigError("format", self._config.format, what)
        if not self.num_rows:
            self.warnings.append("data: the files hold no rows")
        elif missing := [key for key in openai_batch.KEYS if key not in self._found]:
            self.warnings.append(f"format=openai_batch: no row has the key {missing[0]}; are these request lines?")

    def _check_declared(self) -> None:
        """Refuse, or warn about, declared columns that don't pass through or that no row has."""
        for name in self._config.schema:
            if name in self._consumed():
                raise ConfigError(
                    f"schema.{name}",
                    self._config.schema[name],
                    "this column does not pass through (it becomes the prompt or the id); name one that does",
                )
            if name not in self._passing() and self.num_rows:
                self.warnings.append(f"schema.{one_line(name, 60)}: no row has this column; it is null in every row")

    def _check_columns(self) -> None:
        """Refuse, or warn about, columns that the settings name and no row has."""
        config = self._config
        only_parquet = all(isinstance(source, ParquetSource) for source in self._sources)
        if self._template is not None:
            self._template.check(self._found)
        if not self.num_rows:
            self.warnings.append("data: the files hold no rows")
        if openai_batch.looks_like(self._found) and self._config.prompt_column not in self._found:
            self.warnings.append("data: these look like request lines of OpenAI's Batch API; set format=openai_batch")
        if config.system is not None and not self._has_chat():
            raise ConfigError("system", one_line(config.system, 60), "needs chat=true, or rows with messages")
        for setting, name in self._named_columns():
            if name in self._found:
                continue
            what = f"no row has this column (there are: {_listed(self._found)})"
            if only_parquet or (setting == "id_column" and self.num_rows):
                raise ConfigError(setting, one_line(name, 60), f"{what}; name one of those")
            if self.num_rows:
                effect = "; every row is an error row" if setting in _MAKE_PROMPTS else ""
                self.warnings.append(f"{setting}={one_line(name, 60)}: {what}{effect}")
        if self._template is not None and not self._template.names:
            self.warnings.append(
                f"template={one_line(config.template or '')}: it names no column; all prompts are equal"
            )

    def _named_columns(self) -> Iterator[tuple[str, str]]:
        """(setting, column) for each column that must be there; the defaults of id and sampling need not."""
        config = self._config
        if config.messages_column is not None:
            yield "messages_column", config.messages_column
        elif self._template is None:
            if DEFAULT_MESSAGES_COLUMN not in self._found:
                yield "prompt_column", config.prompt_column
        else:
            yield from (("template", name) for name in self._template.names)
        if config.id_column != DEFAULT_ID_COLUMN:
            yield "id_column", config.id_column
        if config.sampling_column != DEFAULT_SAMPLING_COLUMN:
            yield "sampling_column", config.sampling_column
        yield from ((f"sampling_columns.{key}", name) for key, name in config.sampling_columns.items())

    def _has_chat(self) -> bool:
        """Whether any row can be a conversation."""
        config = self._config
        in_rows = self._template is None and DEFAULT_MESSAGES_COLUMN in self._found
        return config.chat or config.messages_column is not None or in_rows

    def _consumed(self) -> set[str]:
        """Input columns that the output has in another form."""
        if self._is_batch:
            return {"custom_id", "body"}
        config = self._config
        passes = self._template is not None or config.chat or config.messages_column is not None
        return {config.id_column} if passes else {config.id_column, config.prompt_column}

    def _passing(self) -> list[str]:
        """Input columns that pass through, as they were found."""
        found = list(dict.fromkeys([*openai_batch.COLUMNS, *self._found])) if self._is_batch else self._found
        consumed = self._consumed()
        return [name for name in found if name not in consumed]

    def _pass_through(self) -> tuple[list[_PassThrough], pa.Schema]:
        plan, schema = [], []
        for name, output in output_names([*self._passing(), *self._config.schema]).items():
            column = self._column_type(name)
            plan.append(_PassThrough(name, output, column.convert))
            schema.append(pa.field(output, column.arrow))
        return plan, pa.schema(schema)

    def _column_type(self, name: str) -> ColumnType:
        """Parquet's own type where all files agree on it, else the type that holds the values of all files.

        A declared type goes before both.
        """
        declared = self._config.schema.get(name)
        column = None if declared is None else declared_type(name, declared)
        if column is None and self._is_batch and name in openai_batch.COLUMNS:
            return ColumnType(pa.string(), plain_text)
        parquet = [s for s in self._sources if isinstance(s, ParquetSource) and name in s.types]
        kinds = 0
        for source in self._sources:
            if isinstance(source, JsonlSource):
                kinds |= source.kinds.get(name, 0)
        types = {source.types[name] for source in parquet if not pa.types.is_null(source.types[name])}
        if column is not None:
            return kept_type(column.arrow) if types == {column.arrow} and not kinds else column
        if len(types) == 1 and not kinds:
            return kept_type(types.pop())
        for source in parquet:
            kinds |= source.kinds(name)
        return type_of_kinds(kinds)


def by_prefix(rows: Iterator[PromptRow]) -> Iterator[PromptRow]:
    """Rows so that those that begin alike follow each other, within each window of `ORDER_WINDOW` rows."""
    while window := list(islice(rows, ORDER_WINDOW)):
        yield from sorted(window, key=_prefix_key)


def _prefix_key(row: PromptRow) -> tuple[int, str | list[int]]:
    if isinstance(row.prompt, list):
        return 2, row.prompt
    return (1, row.prompt.text) if isinstance(row.prompt, Conversation) else (0, row.prompt or "")


def _attempt(causes: list[str], part: Callable[[_A], _T], argument: _A) -> _T | None:
    """A part of a row, or None with the cause added to `causes`."""
    try:
        return part(argument)
    except RowError as error:
        causes.append(str(error))
        return None


def _listed(names: list[str]) -> str:
    shown = ", ".join(one_line(name, 40) for name in names[:12]) or "none"
    return f"{shown}, ..." if len(names) > 12 else shown

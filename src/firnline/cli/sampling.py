"""Finds out, by a sample of what would be read first, which columns the rows of a source will have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.jobs.read_orders import Context, columns_of, staged_schema
from firnline.ndjson import Choice, choose, shown_path
from firnline.options import SourceOptions
from firnline.schema import RESCUED_COLUMN
from firnline.sources.base import Sample, Source, SourcePlan
from firnline.sources.columns import Columns, agree
from firnline.types import Json


@dataclass(slots=True)
class SampleTotals:
    """What was read of all sources, and what is noteworthy about it."""

    files: int = 0
    records: int = 0
    bad: int = 0
    rescued: int = 0  # records with a value or a field that goes to `_rescued_data`
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, int]:
        return {"files": self.files, "records": self.records, "bad": self.bad, "rescued": self.rescued}

    def add(self, sample: Sample) -> None:
        self.files += sample.files
        self.records += sample.records
        self.bad += sample.bad
        self.rescued += sample.rescued
        self.warnings += sample.warnings


@dataclass(frozen=True, slots=True)
class Sampled:
    """The columns that the rows of a source will have, as far as the sample tells, and how new ones were inferred."""

    columns: Columns
    schema: pa.Schema
    choices: dict[str, Choice] = field(default_factory=dict)  # by path


def sample_source(
    source: Source,
    options: SourceOptions,
    plan: SourcePlan,
    base: pa.Schema | None,
    targets: Sequence[dict[str, Json]],
    totals: SampleTotals,
) -> Sampled | None:
    """Decode the beginning of what a plan takes first, and merge its columns with those that are known.

    As in a run, the sample is read again until the types of new columns are chosen. None: the source gives no sample.

    Raises:
        SchemaError: a record does not fit, and the spec says that this stops the epoch.
    """
    context = Context(0, "", options, {}, list(targets), {}, base)
    columns = columns_of(context, plan)
    choices: dict[str, Choice] = {}
    while True:
        sample = source.sample(plan, columns)
        if sample is None:
            return None
        columns, again = agree(columns, [sample.end])
        kinds: dict[str, Counter[str]] = {
            path: Counter(counts) for path, counts in sample.end.kinds.items() if path not in choices
        }
        chosen = {path: choose(path, counts) for path, counts in kinds.items()}
        choices |= {path: choice for path, choice in chosen.items() if choice.kind == columns.kinds.get(path)}
        if not again:
            break
    totals.add(sample)
    totals.warnings += [_odd_warning(path, choice) for path, choice in choices.items() if choice.odd]
    return Sampled(columns, staged_schema(context, columns), choices)


def _odd_warning(path: str, choice: Choice) -> str:
    share = 100 * choice.odd / choice.values
    return (
        f"{shown_path(path)}: of {choice.values:,} sampled values, {choice.odd:,} ({share:.2g} %) would not fit "
        f"{choice.kind} and would go to {RESCUED_COLUMN}; to choose another type, declare it under schema.fields"
    )

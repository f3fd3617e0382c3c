"""Samples of inputs, for `dry-run`: reads the start of inputs that are spread over a slice, as a worker would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from firnline.ndjson import add_counts
from firnline.ndjson.infer import Counts
from firnline.rescued import Rescued
from firnline.schema import RESCUED_COLUMN
from firnline.sources.base import (
    MAIN_PORT,
    Budget,
    ReadColumns,
    RestartError,
    Rows,
    Sample,
    SourcePlan,
    Split,
    SplitReader,
)
from firnline.sources.columns import Columns
from firnline.types import Json

SAMPLE_FILES = 50
SAMPLE_BYTES = 32 * 1024 * 1024  # as stored, shared by the files
FIRST_BAD = 3  # bad records to name
_NO_LIMIT = 1 << 62


@dataclass(slots=True)
class _Tally:
    """What was read so far."""

    schema: pa.Schema
    files: set[str] = field(default_factory=set)
    records: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    with_rescued: int = 0
    size_bytes: int = 0
    complete: bool = True
    kinds: Counts = field(default_factory=dict)
    values: Counter[str] = field(default_factory=Counter)
    rescued: list[Rescued] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    first_bad: list[str] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        batch = rows.batch
        self.bad.update(record.reason for record in rows.bad)
        some = rows.bad[: FIRST_BAD - len(self.first_bad)]
        self.first_bad += [f"{rows.origin} line {record.line}: {record.reason}" for record in some]
        self.rescued += rows.rescued
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self.values[name] += len(column) - column.null_count
        if RESCUED_COLUMN in batch.schema.names:
            column = batch.column(RESCUED_COLUMN)
            self.with_rescued += len(column) - column.null_count


def spread(count: int, wanted: int) -> list[int]:
    """Return up to `wanted` of the numbers below `count`: the first, the last, and some evenly between."""
    if count <= wanted:
        return list(range(count))
    return sorted({number * (count - 1) // (wanted - 1) for number in range(wanted)})


def sample_inputs(open_reader: Callable[[Split], SplitReader], plan: SourcePlan, columns: Columns) -> Sample:
    """Decode the start of inputs of a plan; small ones whole. Their outcomes may say whether they were `finished`.

    Raises:
        SchemaError, BadRecordsError: a record does not fit, and the spec says that this stops the epoch.
    """
    inputs = [item for split in plan.splits for item in split.inputs]
    chosen = [inputs[index] for index in spread(len(inputs), SAMPLE_FILES)]
    tally = _Tally(columns.decoded, complete=len(chosen) == len(inputs))
    for item in chosen:
        _sample_input(open_reader, item, SAMPLE_BYTES // len(chosen), tally)
    return Sample(
        columns={MAIN_PORT: ReadColumns(tally.schema, {path: dict(counts) for path, counts in tally.kinds.items()})},
        files=len(tally.files),
        records=tally.records,
        bad=dict(tally.bad),
        rescued=tally.with_rescued,
        warnings=tuple(tally.warnings),
        size_bytes=tally.size_bytes,
        complete=tally.complete,
        values={MAIN_PORT: dict(tally.values)},
        rescued_values=tuple(tally.rescued),
        first_bad=tuple(tally.first_bad),
        paths=frozenset(tally.files),
    )


def _sample_input(
    open_reader: Callable[[Split], SplitReader], item: dict[str, Json], max_bytes: int, tally: _Tally
) -> None:
    split = Split([item], max_records=_NO_LIMIT, max_bytes=max_bytes, max_output_files=_NO_LIMIT)
    reader = open_reader(split)
    while True:
        budget = Budget(split)
        try:
            found: Sequence[Rows] = [rows for some in reader.read({MAIN_PORT: tally.schema}, budget) for rows in some]
            break
        except RestartError:
            continue  # the file is broken, and the reader now leaves it out
    end = reader.end()
    for path, reason in end.failed.items():
        tally.warnings.append(f"{path} cannot be read ({reason}): a run would set it aside")
    if end.failed:
        return
    for rows in found:
        tally.add(replace(rows, rescued=[replace(one, source=MAIN_PORT) for one in rows.rescued]))
    read = end.columns[MAIN_PORT]
    tally.schema = read.schema
    add_counts(tally.kinds, read.kinds)
    tally.files.add(str(item["path"]))
    tally.records += budget.records
    tally.size_bytes += budget.bytes_read
    tally.complete = tally.complete and all(outcome.get("finished", not budget.is_full) for outcome in end.outcomes)

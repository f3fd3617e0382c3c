"""Reads the beginning of a source's first files, to tell which columns its rows will have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.errors import SchemaError
from firnline.jobs.read_orders import Context, columns_of, staged_schema
from firnline.ndjson import (
    BrokenFileError,
    Choice,
    DecodeOptions,
    Decoder,
    KindCounter,
    MismatchError,
    UnexpectedFieldError,
    choose,
    compression_of,
    open_blocks,
    shown_path,
)
from firnline.options import FileSourceOptions
from firnline.schema import RESCUED_COLUMN
from firnline.sources.base import SourcePlan, SplitEnd
from firnline.sources.columns import Columns, agree
from firnline.storage import open_storage
from firnline.types import Json

SAMPLE_FILES = 3  # of each source
SAMPLE_RECORDS = 10_000  # of each file


@dataclass(slots=True)
class Sample:
    """What was read, and what is noteworthy about it."""

    files: int = 0
    records: int = 0
    bad: int = 0
    rescued: int = 0  # records with a value or a field that goes to `_rescued_data`
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, int]:
        return {"files": self.files, "records": self.records, "bad": self.bad, "rescued": self.rescued}

    def add(self, other: Sample) -> None:
        self.files += other.files
        self.records += other.records
        self.bad += other.bad
        self.rescued += other.rescued
        self.warnings += other.warnings


@dataclass(frozen=True, slots=True)
class Sampled:
    """The columns that the rows of a source will have, as far as the sample tells, and how new ones were inferred."""

    columns: Columns
    schema: pa.Schema
    choices: dict[str, Choice] = field(default_factory=dict)  # by path


def sample_source(
    options: FileSourceOptions,
    root: str,
    plan: SourcePlan,
    base: pa.Schema | None,
    targets: Sequence[dict[str, Json]],
    sample: Sample,
) -> Sampled:
    """Decode the beginning of the files that a plan takes first, and merge their columns with those that are known.

    As in a run, the sample is read again until the types of new columns are chosen.

    Raises:
        SchemaError: a record does not fit, and the spec says that this stops the epoch.
    """
    context = Context(0, "", options, {}, list(targets), {}, base)
    columns = columns_of(context, plan)
    paths = [str(item["path"]) for split in plan.splits for item in split.inputs][:SAMPLE_FILES]
    choices: dict[str, Choice] = {}
    again, read = True, Sample()
    while again:
        read = Sample()
        end, counter = _read(options, root, columns, paths, read)
        columns, wanted = agree(columns, [end])
        chosen = {path: choose(path, counts) for path, counts in counter.counts.items() if path not in choices}
        choices |= {path: choice for path, choice in chosen.items() if choice.kind == columns.kinds.get(path)}
        again = bool(wanted)
    sample.add(read)
    sample.warnings += [_odd_warning(path, choice) for path, choice in choices.items() if choice.odd]
    return Sampled(columns, staged_schema(context, columns), choices)


def _odd_warning(path: str, choice: Choice) -> str:
    share = 100 * choice.odd / choice.values
    return (
        f"{shown_path(path)}: of {choice.values:,} sampled values, {choice.odd:,} ({share:.2g} %) would not fit "
        f"{choice.kind} and would go to {RESCUED_COLUMN}; to choose another type, declare it under schema.fields"
    )


def _read(
    options: FileSourceOptions, root: str, columns: Columns, paths: Sequence[str], sample: Sample
) -> tuple[SplitEnd, KindCounter]:
    """Read the sample once; what a task would report of its columns, and the kinds that were counted."""
    decoding = DecodeOptions(
        evolution=columns.evolution,
        on_mismatch="fail" if columns.evolution == "fail" else "rescue",
        reserved=columns.reserved,
        kinds=columns.kinds,
    )
    decoder = Decoder(columns.decoded, columns.frozen, decoding)
    counter = KindCounter(columns.decoded, columns.frozen, columns.reserved)
    for path in paths:
        _sample_file(options, root, path, decoder, counter, sample)
    return SplitEnd([], decoder.schema, counter.to_json()), counter


def _sample_file(
    options: FileSourceOptions, root: str, path: str, decoder: Decoder, counter: KindCounter, sample: Sample
) -> None:
    storage = open_storage(root, options.storage_options)
    key = path.removeprefix(root).lstrip("/")
    try:
        blocks = open_blocks(
            storage.open_read(key),
            path=path,
            compression=compression_of(path),
            max_records=SAMPLE_RECORDS,
            max_record_bytes=options.max_record_bytes,
        )
        for block in blocks:
            decoded = decoder.decode(block)
            counter.add(decoded.batch)
            sample.records += block.records
            sample.bad += len(decoded.bad)
            if RESCUED_COLUMN in decoded.batch.schema.names:
                rescued = decoded.batch.column(RESCUED_COLUMN)
                sample.rescued += len(rescued) - rescued.null_count
            if decoded.bad and options.on_bad_record == "fail":
                first = decoded.bad[0]
                sample.warnings.append(f"{path}, line {first.line}: {first.reason}; on_bad_record is fail")
    except (UnexpectedFieldError, MismatchError) as error:
        raise SchemaError(f"{path}: {error}", file=path) from error
    except (BrokenFileError, OSError) as error:
        sample.warnings.append(f"{path} cannot be read: {error}")
        return
    sample.files += 1

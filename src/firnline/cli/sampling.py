"""Reads the beginning of a source's first files, to tell which columns its rows will have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from firnline.engine.orders import Columns, Context, collect, columns_of
from firnline.errors import SchemaError
from firnline.ndjson import (
    BrokenFileError,
    DecodeOptions,
    Decoder,
    MismatchError,
    UnexpectedFieldError,
    compression_of,
    open_blocks,
)
from firnline.options import FileSourceOptions
from firnline.sources.base import SourcePlan
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
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, int]:
        return {"files": self.files, "records": self.records, "bad": self.bad}


@dataclass(frozen=True, slots=True)
class Sampled:
    """The columns that the rows of a source will have, as far as the sample tells."""

    columns: Columns
    schema: pa.Schema


def sample_source(
    options: FileSourceOptions,
    root: str,
    plan: SourcePlan,
    base: pa.Schema | None,
    targets: Sequence[dict[str, Json]],
    sample: Sample,
) -> Sampled:
    """Decode the beginning of the files that a plan takes first, and merge their columns with those that are known.

    Raises:
        SchemaError: a record does not fit, and the spec says that this stops the epoch.
    """
    context = Context(0, "", options, root, list(targets), {}, base)
    columns = columns_of(context, plan)
    decoding = DecodeOptions(
        evolution=context.evolution,
        on_mismatch="fail" if context.evolution == "fail" else "rescue",
        reserved=columns.reserved,
    )
    decoder = Decoder(columns.decoded, columns.frozen, decoding)
    inputs = [item for task in plan.tasks for item in task.inputs]
    for item in inputs[:SAMPLE_FILES]:
        _sample_file(options, root, str(item["path"]), decoder, sample)
    produced = collect(context, replace(columns, decoded=decoder.schema), [])
    return Sampled(columns, produced.columns[options.name])


def _sample_file(options: FileSourceOptions, root: str, path: str, decoder: Decoder, sample: Sample) -> None:
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
            sample.records += block.records
            sample.bad += len(decoded.bad)
            if decoded.bad and options.on_bad_record == "fail":
                first = decoded.bad[0]
                sample.warnings.append(f"{path}, line {first.line}: {first.reason}; on_bad_record is fail")
    except (UnexpectedFieldError, MismatchError) as error:
        raise SchemaError(f"{path}: {error}", file=path) from error
    except (BrokenFileError, OSError) as error:
        sample.warnings.append(f"{path} cannot be read: {error}")
        return
    sample.files += 1

"""Reads the start of the first files of a slice, to find the columns of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from firnline.errors import SchemaError
from firnline.ndjson import (
    BrokenFileError,
    DecodeOptions,
    Decoder,
    KindCounter,
    MismatchError,
    UnexpectedFieldError,
    compression_of,
    open_blocks,
)
from firnline.schema import RESCUED_COLUMN
from firnline.sources.base import Sample, SourcePlan, SplitEnd
from firnline.sources.columns import Columns
from firnline.sources.files.messages import FileReaderSettings
from firnline.storage import open_storage

SAMPLE_FILES = 3
SAMPLE_RECORDS = 10_000  # of each file


@dataclass(slots=True)
class _Tally:
    files: int = 0
    records: int = 0
    bad: int = 0
    rescued: int = 0
    warnings: list[str] = field(default_factory=list)


def sample_files(settings: FileReaderSettings, plan: SourcePlan, columns: Columns) -> Sample:
    """Decode the start of the first files of a plan.

    Raises:
        SchemaError: a record does not fit, and the spec makes this an error.
    """
    options = DecodeOptions(
        evolution=columns.evolution,
        on_mismatch="fail" if columns.evolution == "fail" else "rescue",
        reserved=columns.reserved,
        kinds=columns.kinds,
    )
    decoder = Decoder(columns.decoded, columns.frozen, options)
    counter = KindCounter(columns.decoded, columns.frozen, columns.reserved)
    tally = _Tally()
    for path in [str(item["path"]) for split in plan.splits for item in split.inputs][:SAMPLE_FILES]:
        _sample_file(settings, path, decoder, counter, tally)
    end = SplitEnd([], decoder.schema, dict(counter.to_json()))
    return Sample(end, tally.files, tally.records, tally.bad, tally.rescued, tuple(tally.warnings))


def _sample_file(
    settings: FileReaderSettings, path: str, decoder: Decoder, counter: KindCounter, tally: _Tally
) -> None:
    storage = open_storage(settings.root, settings.storage_options)
    key = path.removeprefix(settings.root).lstrip("/")
    try:
        blocks = open_blocks(
            storage.open_read(key),
            path=path,
            compression=compression_of(path),
            max_records=SAMPLE_RECORDS,
            max_record_bytes=settings.max_record_bytes,
        )
        for block in blocks:
            decoded = decoder.decode(block)
            counter.add(decoded.batch)
            tally.records += block.records
            tally.bad += len(decoded.bad)
            if RESCUED_COLUMN in decoded.batch.schema.names:
                rescued = decoded.batch.column(RESCUED_COLUMN)
                tally.rescued += len(rescued) - rescued.null_count
            if decoded.bad and settings.on_bad_record == "fail":
                first = decoded.bad[0]
                tally.warnings.append(f"{path}, line {first.line}: {first.reason}; on_bad_record is fail")
    except (UnexpectedFieldError, MismatchError) as error:
        raise SchemaError(f"{path}: {error}", file=path) from error
    except (BrokenFileError, OSError) as error:
        tally.warnings.append(f"{path} cannot be read: {error}")
        return
    tally.files += 1

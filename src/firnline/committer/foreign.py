"""Files of other programs: one Parquet file per unit, no epoch, committed once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import Schema as DeltaSchema

from firnline.committer.validate import InvalidUnitError, footer_metadata, footer_schema, read_footer
from firnline.errors import SchemaError
from firnline.sinks.delta.contents import missing_fields
from firnline.sinks.delta.stats import file_stats
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.unit import ForeignUnit
from firnline.storage import Storage
from firnline.types import Json

_NANOS = "timestamp[ns"


def check_age(put_at: datetime, now: datetime, retention: timedelta | None) -> None:
    """Refuse a unit that may have been committed so long ago that its transaction expired."""
    if retention is not None and now - put_at > retention / 2:
        raise InvalidUnitError(
            "too old: its transaction may have expired, so it cannot be told whether it was committed"
        )


def foreign_file(table: Table, storage: Storage, unit: ForeignUnit) -> dict[str, Json]:
    """Return the file that a commit adds for a foreign unit; statistics come from the file itself.

    Raises:
        InvalidUnitError: the file is missing or not as described, or columns or partition values do not fit.
        OSError: the storage failed; try again.
    """
    metadata, modified_at = _read_metadata(storage, unit)
    columns = footer_schema(metadata, unit.path)
    _check_types(columns)
    _check_partition(table, unit)
    try:
        missing_fields(table.schema(), columns)
    except SchemaError as error:
        raise InvalidUnitError(f"schema incompatible: {error.message}") from error
    return {
        "path": unit.path,
        "size_bytes": unit.size_bytes,
        "rows": metadata.num_rows,
        "partition_values": unit.partition_values,
        "modification_time": int(modified_at.timestamp() * 1000),
        "stats": file_stats(metadata, columns),
        "columns": columns,
    }


def first_columns(storage: Storage, unit: ForeignUnit) -> tuple[pa.Schema, list[str]]:
    """Return the columns of a table that starts with this unit, and its partition columns.

    They are the file's columns, and a text column for each partition value without a column in the file. Partition
    columns are in the order of the folders in the path.

    Raises:
        InvalidUnitError: the file is missing or not as described, or a column has a type that Delta lacks.
        OSError: the storage failed; try again.
    """
    found = footer_schema(_read_metadata(storage, unit)[0], unit.path)
    folders = [part.partition("=")[0] for part in unquote(unit.path).split("/")[:-1]]
    names = list(unit.partition_values)
    names.sort(key=lambda name: folders.index(name) if name in folders else len(folders))
    lacking = [pa.field(name, pa.string()) for name in names if name not in found.names]
    columns = pa.schema([field.with_nullable(True) for field in (*found, *lacking)])
    _check_types(columns)
    return columns, names


def _check_types(columns: pa.Schema) -> None:
    """Refuse columns of a type that Delta lacks, or that a table would return as another type."""
    for field in columns:
        odd = next(
            (kind for kind in _leaves(field.type) if pa.types.is_null(kind) or str(kind).startswith(_NANOS)), None
        )
        if odd is not None:  # delta-rs has its own names for these, which no other reader knows
            raise InvalidUnitError(f"column {field.name} is {odd}, which is no type of Delta")
        try:
            stored = DeltaSchema.from_json(DeltaSchema.from_arrow(pa.schema([field])).to_json())
            missing_fields(pa.schema(stored.to_arrow()), pa.schema([field]))
        except Exception as error:  # delta-rs raises nothing narrower
            reason = error.message if isinstance(error, SchemaError) else "which is no type of Delta"
            raise InvalidUnitError(f"column {field.name} is {field.type}, {reason}") from error


def _leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    if not pa.types.is_nested(kind):
        yield kind
    for number in range(kind.num_fields):
        yield from _leaves(kind.field(number).type)


def _read_metadata(storage: Storage, unit: ForeignUnit) -> tuple[pq.FileMetaData, datetime]:
    footer, modified_at = read_footer(storage, unit.path, unit.size_bytes)
    metadata = footer_metadata(footer, unit.path)
    if metadata.num_rows != unit.record_count:
        raise InvalidUnitError(f"{unit.path} has {metadata.num_rows} rows, the unit says {unit.record_count}")
    return metadata, modified_at


def _check_partition(table: Table, unit: ForeignUnit) -> None:
    """Check that every partition column has a text that every reader can convert to the column's type."""
    partitions = table.partition_columns()
    if set(unit.partition_values) != set(partitions):
        raise InvalidUnitError(
            f"the table is partitioned by {partitions}, the unit has {sorted(unit.partition_values)}"
        )
    for name in partitions:
        text, kind = unit.partition_values[name], table.schema().field(name).type
        if text and not any(_casts(text, each) for each in (kind, _zoneless(kind))):
            raise InvalidUnitError(f"partition value {text!r} of {name} is not of type {kind}")


def _casts(text: str, kind: pa.DataType) -> bool:
    try:
        pa.array([text], pa.string()).cast(kind)
    except pa.ArrowException:
        return False
    return True


def _zoneless(kind: pa.DataType) -> pa.DataType:
    """Return the type without a zone: Delta writes instants with or without one."""
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind

"""Files that other programs bring: one Parquet file per unit, no epoch, committed once."""

from __future__ import annotations

from datetime import datetime, timedelta

import pyarrow as pa

from firnline.errors import SchemaError
from firnline.sinks.delta.columns import missing_fields
from firnline.sinks.delta.stats import file_stats
from firnline.sinks.delta.table import Table
from firnline.staging.committed import PREFIX
from firnline.staging.unit import ForeignUnit
from firnline.staging.validate import InvalidUnitError, footer_metadata, footer_schema, read_footer
from firnline.storage import Storage
from firnline.types import Json


def unit_id(unit: ForeignUnit) -> str:
    """The transaction that proves that a unit was committed."""
    return PREFIX + unit.name


def check_age(put_at: datetime, now: datetime, retention: timedelta | None) -> None:
    """Refuse a unit that may have been committed so long ago that its transaction expired."""
    if retention is not None and now - put_at > retention / 2:
        raise InvalidUnitError(
            "too old: its transaction may have expired, so it cannot be told whether it was committed"
        )


def foreign_file(table: Table, storage: Storage, unit: ForeignUnit) -> dict[str, Json]:
    """What a commit adds for a foreign unit; statistics come from the file itself.

    Raises:
        InvalidUnitError: file missing or not as described, columns or partition values that do not fit.
        OSError: the storage failed; try again.
    """
    footer, modified_at = read_footer(storage, unit.path, unit.size_bytes)
    metadata = footer_metadata(footer, unit.path)
    if metadata.num_rows != unit.record_count:
        raise InvalidUnitError(f"{unit.path} has {metadata.num_rows} rows, the unit says {unit.record_count}")
    columns = footer_schema(metadata, unit.path)
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


def _check_partition(table: Table, unit: ForeignUnit) -> None:
    """Every partition column, each with a text that every reader can turn into the column's type."""
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
    """Delta writes instants with or without a zone."""
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind

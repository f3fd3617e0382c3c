"""Files that other programs bring: one Parquet file per unit, no epoch, committed once."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.errors import SchemaError
from firnline.sinks.delta.columns import missing_fields
from firnline.sinks.delta.stats import file_stats
from firnline.sinks.delta.table import Table
from firnline.staging.committed import PREFIX
from firnline.staging.unit import PENDING, SUFFIX, ForeignUnit
from firnline.staging.validate import InvalidUnitError, read_footer
from firnline.storage import Storage
from firnline.types import Json

_INTERVAL = re.compile(r"interval (\d+) (second|minute|hour|day|week)s?")


def unit_id(unit: ForeignUnit) -> str:
    """The transaction that proves that a unit was committed."""
    return PREFIX + unit.name


def foreign_file(table: Table, storage: Storage, unit: ForeignUnit, now: datetime) -> dict[str, Json]:
    """What a commit adds for a foreign unit; statistics come from the file itself.

    Raises:
        InvalidUnitError: too old to be proven uncommitted, file missing or not as described, columns that do not fit.
    """
    age = now - storage.stat(f"{PENDING}/{unit.name}{SUFFIX}").modified_at
    retention = _find_retention(table)
    if retention is not None and age > retention / 2:
        raise InvalidUnitError(
            "too old: its transaction may have expired, so it cannot be told whether it was committed"
        )
    footer = read_footer(storage, unit.path, unit.size_bytes)
    metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
    if metadata.num_rows != unit.record_count:
        raise InvalidUnitError(f"{unit.path} has {metadata.num_rows} rows, the unit says {unit.record_count}")
    columns = metadata.schema.to_arrow_schema()
    partitions = table.partition_columns()
    if set(unit.partition_values) != set(partitions):
        raise InvalidUnitError(
            f"the table is partitioned by {partitions}, the unit has {sorted(unit.partition_values)}"
        )
    try:
        missing_fields(table.schema(), columns)
    except SchemaError as error:
        raise InvalidUnitError(f"schema incompatible: {error.message}") from error
    return {
        "path": unit.path,
        "size_bytes": unit.size_bytes,
        "rows": metadata.num_rows,
        "partition_values": unit.partition_values,
        "modification_time": int(storage.stat(unit.path).modified_at.timestamp() * 1000),
        "stats": file_stats(metadata, columns),
        "columns": columns,
    }


def _find_retention(table: Table) -> timedelta | None:
    """How long a transaction with a time lives in this table; None: for ever."""
    text = table.setting("delta.setTransactionRetentionDuration")
    found = _INTERVAL.fullmatch(text.lower()) if text else None
    return timedelta(**{found[2] + "s": int(found[1])}) if found else None

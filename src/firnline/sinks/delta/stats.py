"""Delta's per-file statistics, from the footer of a Parquet file: numRecords, min, max, nullCount.

Statistics of struct fields are nested; lists and maps have none. Text bounds are cut to 32 characters, as Spark does.
An upper bound that was cut gets the highest character at its end, so it stays an upper bound. A column of floats has
bounds only if they are finite, as JSON has no other numbers, and if it has no NaN, which readers take for the highest
value and the footer does not show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

TEXT_BOUND = 32
MAX_COLUMNS = 32  # Delta's default dataSkippingNumIndexedCols
_HIGHEST = "\U0010ffff"


Path = tuple[str, ...]  # of a column, or of a field of structs


def file_stats(metadata: pq.FileMetaData, schema: pa.Schema, nan: Collection[Path] | None = None) -> str:
    """Return the `stats` string of an Add action. `nan` has the columns with NaN; None: they are unknown."""
    leaves = [path for field in schema for path in _leaf_paths(field, ())]
    wanted = dict.fromkeys(leaves[:MAX_COLUMNS])
    found: dict[Path, _Bounds] = {}
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            path = tuple(column.path_in_schema.split("."))
            if path in wanted:
                found.setdefault(path, _Bounds()).add(column.statistics)
    out: dict[str, Any] = {"numRecords": metadata.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for path, bounds in found.items():
        if bounds.nulls is not None:
            _put(out["nullCount"], path, bounds.nulls)
        low, high = _lower(bounds.low), _upper(bounds.high)
        if isinstance(low, float) and (nan is None or path in nan or not (math.isfinite(low) and math.isfinite(high))):
            continue
        if bounds.bounded and low is not None and high is not None:
            _put(out["minValues"], path, low)
            _put(out["maxValues"], path, high)
    return _dump(out)


def find_nan(table: pa.Table) -> Iterator[Path]:
    """Yield the columns, and the fields of structs, that hold NaN."""
    for field, column in zip(table.schema, table.columns, strict=True):
        for path in _leaf_paths(field, ()):
            leaf = pc.struct_field(column, list(path[1:])) if path[1:] else column
            if pa.types.is_floating(leaf.type) and pc.any(pc.is_nan(leaf)).as_py():
                yield path


def _dump(value: Any) -> str:
    """Return JSON text in which decimals keep all their digits."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_dump(item)}" for key, item in value.items()) + "}"
    return format(value, "f") if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False, allow_nan=False)


def _leaf_paths(field: pa.Field, above: Path) -> list[Path]:
    path = (*above, field.name)
    if pa.types.is_struct(field.type):
        return [leaf for child in field.type for leaf in _leaf_paths(child, path)]
    if pa.types.is_nested(field.type) or "." in field.name:
        return []  # a dot in a name looks like nesting in Parquet's own paths
    return [path]


class _Bounds:
    """Statistics of one column over all row groups; unknown if one row group lacks them."""

    def __init__(self) -> None:
        self.low: Any = None
        self.high: Any = None
        self.nulls: int | None = 0
        self.bounded = True

    def add(self, statistics: Any) -> None:
        if statistics is None or not statistics.has_null_count or self.nulls is None:
            self.nulls = None
        else:
            self.nulls += statistics.null_count
        if statistics is None:
            self.bounded = False
        elif statistics.has_min_max:
            self.low = statistics.min if self.low is None else min(self.low, statistics.min)
            self.high = statistics.max if self.high is None else max(self.high, statistics.max)
        elif statistics.num_values:
            self.bounded = False  # values without bounds: NaN, or a type without an order


def _put(target: dict[str, Any], path: Path, value: Any) -> None:
    for name in path[:-1]:
        target = target.setdefault(name, {})
    target[path[-1]] = value


def _lower(value: Any) -> Any:
    return value[:TEXT_BOUND] if isinstance(value, str) else _plain(value)


def _upper(value: Any) -> Any:
    if isinstance(value, datetime) and value.microsecond % 1000:
        # Times are written in milliseconds: a bound is raised, never cut; at the end of time there is none.
        return _plain(value + timedelta(milliseconds=1)) if value.year < 9999 else None
    if not isinstance(value, str):
        return _plain(value)
    if len(value) <= TEXT_BOUND:
        return value
    return value[:TEXT_BOUND] + _HIGHEST


def _plain(value: Any) -> Any:
    """Return a bound as JSON; None for types that have no bounds in Delta."""
    if isinstance(value, bool | bytes):
        return None
    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=UTC)
        return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
    if isinstance(value, date):
        return value.isoformat()
    return value if isinstance(value, int | float | Decimal) else None

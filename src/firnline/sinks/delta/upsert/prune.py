"""Finds the files of a table that may hold changed keys, by partition values and statistics alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from firnline.sinks.delta.stage import partition_text
from firnline.sinks.delta.stats import TEXT_BOUND
from firnline.sinks.delta.upsert.changes import Mask, comparable

_MILLISECOND_US = 1000
_HIGHEST = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


@dataclass(frozen=True, slots=True)
class ActiveFile:
    """One file of the version that was read. `path` and partition values are spelled as in the log."""

    path: str
    size_bytes: int
    rows: int | None
    partition_values: dict[str, str | None]


class KeyRanges:
    """The changed keys, each column sorted, to be held against the bounds of files.

    Only types whose bounds can be trusted are compared: numbers without a point, dates, times and text. A file stays
    a candidate unless some column of the key proves that it has none of the keys.
    """

    def __init__(self, keys: pa.Table, partition_by: Sequence[str]) -> None:
        self._keys = keys
        self._partition_by = [name for name in partition_by if name in keys.column_names]
        self._columns = [name for name in keys.column_names if name not in self._partition_by]
        self._sorted = {name: _sorted_values(keys.column(name)) for name in self._columns}

    def find_candidates(self, delta: DeltaTable) -> tuple[list[ActiveFile], set[str]]:
        """Return the files of a version that may hold a changed key, and the paths of all its files."""
        actions = pa.table(delta.get_add_actions())
        mask = np.ones(actions.num_rows, np.bool_)
        for name in self._partition_by:
            mask &= self._in_partition(comparable(_child(actions, "partition", name), True), name)
        records = actions.column("num_records").combine_chunks()
        for name in self._columns:
            parts = [_find_child(actions, part, name) for part in ("min", "max", "null_count")]
            mask &= self._may_hold(name, parts[0], parts[1], parts[2], records, is_rounded=True)
        paths = actions.column("path").to_pylist()
        partitions = list(delta.metadata().partition_columns)
        chosen = actions.filter(pa.array(mask))
        return list(_files(chosen, partitions)), set(paths)

    @staticmethod
    def all_files(delta: DeltaTable) -> list[ActiveFile]:
        """Return the files of a version."""
        return list(_files(pa.table(delta.get_add_actions()), list(delta.metadata().partition_columns)))

    def find_row_groups(self, metadata: pq.FileMetaData, types: pa.Schema) -> list[int]:
        """Return the row groups of a file that may hold a changed key, by the statistics in its footer."""
        groups = range(metadata.num_row_groups)
        mask = np.ones(len(groups), np.bool_)
        place = {metadata.schema.column(n).path: n for n in range(metadata.num_columns)}
        rows = pa.array([metadata.row_group(g).num_rows for g in groups], pa.int64())
        for name in self._columns:
            if name not in place or "." in name or self._sorted[name][0] is None:
                continue
            found = [metadata.row_group(g).column(place[name]).statistics for g in groups]
            nulls = [s.null_count if s is not None and s.has_null_count else None for s in found]
            known = [s is not None and s.has_min_max for s in found]
            try:
                low = pa.array(
                    [s.min if k else None for s, k in zip(found, known, strict=True)], types.field(name).type
                )
                high = pa.array(
                    [s.max if k else None for s, k in zip(found, known, strict=True)], types.field(name).type
                )
            except (pa.ArrowException, TypeError, OverflowError):  # another type than the table's: bounds say nothing
                continue
            mask &= self._may_hold(name, low, high, pa.array(nulls, pa.int64()), rows, is_rounded=False)
        return [int(g) for g in np.flatnonzero(mask)]

    def _in_partition(self, values: pa.Array, name: str) -> Mask:
        found: Mask = pc.is_in(values, self._keys.column(name).combine_chunks(), skip_nulls=False).to_numpy(
            zero_copy_only=False
        )
        return found

    def _may_hold(
        self,
        name: str,
        low: pa.Array | None,
        high: pa.Array | None,
        nulls: pa.Array | None,
        rows: pa.Array,
        *,
        is_rounded: bool,
    ) -> Mask:
        """Return for each file whether it may have one of the changed keys' values in this column."""
        values, has_null = self._sorted[name]
        unknown = np.full(len(rows), -1, np.int64)
        counted = unknown if nulls is None else pc.fill_null(nulls, -1).to_numpy().astype(np.int64)
        total = pc.fill_null(rows, -2).to_numpy().astype(np.int64)
        by_value = np.ones(len(rows), np.bool_)
        if values is not None and low is not None and high is not None:
            by_value = values.may_overlap(low, high, is_rounded=is_rounded)
        by_value &= counted != total  # all null: no value is there
        by_null = (counted != 0) & has_null
        found: Mask = by_value | by_null
        return found


class _Values:
    """The values of one column, ascending, in a form that numpy can search."""

    def __init__(self, column: pa.Array) -> None:
        self._kind = column.type
        convert = _converter(column.type)
        assert convert is not None, "checked by the caller"
        self._convert: Callable[[pa.Array], npt.NDArray[Any]] = convert
        self._values = convert(column.take(pc.sort_indices(column)))

    def may_overlap(self, low: pa.Array, high: pa.Array, *, is_rounded: bool) -> Mask:
        """Return for each pair of bounds whether a value is between them; True without bounds."""
        known = pc.and_(pc.is_valid(low), pc.is_valid(high)).to_numpy(zero_copy_only=False)
        found = np.ones(len(low), np.bool_)
        where = pa.array(known)
        if not known.any():
            return found
        lows, highs = (
            self._convert(_like(low.filter(where), self._kind)),
            self._convert(_like(high.filter(where), self._kind)),
        )
        if pa.types.is_timestamp(self._kind) and is_rounded:  # writers cut to milliseconds, up or down
            lows, highs = lows - _MILLISECOND_US, highs + _MILLISECOND_US
        first = np.searchsorted(self._values, lows, side="left")
        if pa.types.is_string(self._kind):
            last = np.array([self._after_text(text) for text in highs], np.int64)
        else:
            last = np.searchsorted(self._values, highs, side="right")
        found[known] = first < last
        return found

    def _after_text(self, bound: str) -> int:
        """Return how many values are not above an upper bound, which may be a truncated text."""
        successor = after_prefix(bound if len(bound) < TEXT_BOUND else bound[: TEXT_BOUND - 2])
        if successor is None:
            return len(self._values)
        return int(np.searchsorted(self._values, np.array([successor], object), side="left")[0])


def after_prefix(prefix: str) -> str | None:
    """Return the smallest text above everything that starts with `prefix`; None if there is none."""
    for end in range(len(prefix), 0, -1):
        code = ord(prefix[end - 1])
        if code < _HIGHEST:
            following = code + 1 if code + 1 not in _SURROGATES else _SURROGATES.stop
            return prefix[: end - 1] + chr(following)
    return None


def _sorted_values(column: pa.ChunkedArray) -> tuple[_Values | None, bool]:
    """The values of a key column, None when bounds of its type are not compared; and whether it has a null."""
    one = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    has_null = one.null_count > 0
    if _converter(one.type) is None:
        return None, has_null
    return _Values(pc.unique(one).drop_null()), has_null


def _converter(kind: pa.DataType) -> Callable[[pa.Array], npt.NDArray[Any]] | None:
    if pa.types.is_string(kind):
        return lambda column: np.array([*column.to_pylist(), None], object)[:-1]  # always of objects
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return lambda column: column.cast(pa.int64()).to_numpy()
    if pa.types.is_date32(kind):
        return lambda column: column.cast(pa.int32()).to_numpy().astype(np.int64)
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return lambda column: column.cast(pa.int64()).to_numpy()
    return None


def _like(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type.equals(kind) else column.cast(kind)


def _child(actions: pa.Table, part: str, name: str) -> pa.Array:
    return pc.struct_field(actions.column(part).combine_chunks(), [name])


def _find_child(actions: pa.Table, part: str, name: str) -> pa.Array | None:
    """What the log says of a column per file; None when it says nothing of it in any file."""
    if part not in actions.column_names or actions.schema.field(part).type.get_field_index(name) < 0:
        return None
    return _child(actions, part, name)


def _files(actions: pa.Table, partitions: list[str]) -> Iterator[ActiveFile]:
    values = {name: partition_text(_child(actions, "partition", name)).to_pylist() for name in partitions}
    plain = actions.select(["path", "size_bytes", "num_records"]).to_pylist()
    for number, row in enumerate(plain):
        yield ActiveFile(
            path=str(row["path"]),
            size_bytes=int(row["size_bytes"]),
            rows=row["num_records"],
            partition_values={name: values[name][number] for name in partitions},
        )

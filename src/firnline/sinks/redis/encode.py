"""Rows in the wire format of Redis, built column by column: no Python runs per row.

A value that is null is left out of the fields of its row. A row whose values are all null has the one field `_null`,
which is empty, because Redis keeps no entry without a field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError
from firnline.names import REDIS_PREFIX
from firnline.options import MISSING, MOVED, OP, SEQUENCE
from firnline.sinks.encoding import encode_rows, encode_text
from firnline.sinks.follower import EpochRows
from firnline.sinks.redis.options import RedisShape
from firnline.sinks.redis.script import NOTHING, Packed, bulk
from firnline.sinks.shaping import ShapedRows

JSON_FIELD = "json"
NULL_FIELD = "_null"
ID_FIELD = "_firnline_id"
MOST_COLUMNS = 3000  # a script passes at most about 8,000 values to one command
MOST_ROW_BYTES = 512 * 1024 * 1024  # a server takes no larger value, by default
RANGE_BYTES = 4 * 1024 * 1024
_BYTES = pa.large_binary()
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Range:
    """Rows that one script writes: all that are not delivered yet, up to the row number `end`."""

    rows: Packed
    keys: Packed  # hash, string: the key of each row
    first: int  # the place of the first row in its batch
    end: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of rows in the wire format."""

    shaped: ShapedRows
    rows: pa.Array  # large_binary: the arguments of each row
    counts: np.ndarray[tuple[int], np.dtype[np.int64]]  # of the arguments
    keys: pa.Array | None  # large_binary: the key of each row
    moved: Flags | None = None  # hash: rows that take fields along from the key of the row before them

    def find_bad(self) -> dict[int, str]:
        """Return the rows that Redis cannot hold, with the reason, by their place in the batch."""
        found = dict.fromkeys(
            np.flatnonzero(_sizes(self.rows) > MOST_ROW_BYTES).tolist(), f"is larger than {MOST_ROW_BYTES:,} bytes"
        )
        if self.keys is not None:
            own = pc.fill_null(pc.starts_with(self.keys, REDIS_PREFIX), False).to_numpy(zero_copy_only=False)
            found |= dict.fromkeys(np.flatnonzero(own).tolist(), f"its key begins with {REDIS_PREFIX}")
            nulls = np.flatnonzero(self.keys.is_null().to_numpy(zero_copy_only=False))
            found |= dict.fromkeys(nulls.tolist(), "a column of its key is null")
        if self.moved is not None:
            homeless = self.moved & ~_follows(self.shaped.numbers)
            found |= dict.fromkeys(np.flatnonzero(homeless).tolist(), "its old key, which has its values, is left out")
        return found

    def ranges(self) -> Iterator[Range]:
        """Yield the rows, cut where a script would get larger than `RANGE_BYTES`; none of them may be bad."""
        keys = _bulk(self.keys) if self.keys is not None else None
        edges, first = np.cumsum(_sizes(self.rows)), 0
        while first < len(self.rows):
            before = int(edges[first - 1]) if first else 0
            until = max(first + 1, int(np.searchsorted(edges, before + RANGE_BYTES, side="right")))
            while self.moved is not None and until < len(self.rows) and self.moved[until]:
                until += 1  # one script moves a key and writes to it
            yield Range(
                rows=Packed(int(self.counts[first:until].sum()), [_data(self.rows.slice(first, until - first))]),
                keys=Packed(until - first, [_data(keys.slice(first, until - first))]) if keys is not None else NOTHING,
                first=first,
                end=self.shaped.end if until == len(self.rows) else self.shaped.numbers[until].as_py(),
            )
            first = until


def encode(shaped: ShapedRows, shape: RedisShape, epoch: EpochRows) -> Encoded:
    """Return rows in the wire format.

    Raises:
        SchemaError: they have more columns than one command takes, or lack a column of the key.
    """
    batch, keyed = shaped.batch, shape.mode != "stream"
    keys = _keys(batch, shape, epoch.sink) if keyed else None
    written = ~_deletes(batch) if keyed else np.ones(batch.num_rows, bool)
    if keyed:
        lacks = batch.column(MISSING) if MISSING in batch.schema.names and shape.keeps_old else None
        batch = batch.select([name for name in batch.schema.names if name not in (OP, SEQUENCE, MISSING, MOVED)])
    if shape.event_id:
        batch = batch.append_column(ID_FIELD, epoch.event_ids(shaped.numbers))
    if batch.num_columns > MOST_COLUMNS:
        raise SchemaError(
            f"sink {epoch.sink!r}: {batch.num_columns:,} columns, and a command takes at most {MOST_COLUMNS:,}",
            hint=f"Set `columns` or `exclude` on sink {epoch.sink!r}, or `fields: json`.",
        )
    moved = _moved(shaped.batch) if keyed and lacks is not None else None
    counts, fields = _fields(batch, shape)
    counts = np.where(written, counts, 0)
    lead = _stream_ids(shaped.numbers, epoch.epoch) if not keyed else _choose(written, bulk("w"), bulk("d"))
    fields = _only(written, fields)
    if keyed and lacks is not None:
        keeps = written & lacks.is_valid().to_numpy(zero_copy_only=False)
        stay = pc.fill_null(pc.list_value_length(lacks), 0).to_numpy(zero_copy_only=False)
        lead = pc.if_else(pa.array(keeps), pa.scalar(bulk("k"), _BYTES), lead)
        fields = _join(_only(keeps, _staying(lacks, stay)), fields)
        counts = counts + np.where(keeps, 1 + stay, 0)
        if moved is not None:
            lead = pc.if_else(pa.array(np.append(moved[1:], False)), pa.scalar(bulk("m"), _BYTES), lead)
    rows = _join(lead, _bulk(_text(pa.array(counts))), fields)
    return Encoded(shaped, rows, counts + 2, keys, moved)


def keep_together(batches: Iterable[ShapedRows]) -> Iterator[ShapedRows]:
    """Yield batches, cut elsewhere where a row that takes fields along from the key of the row before it is the first
    one of a batch."""
    held: ShapedRows | None = None
    for shaped in batches:
        if held is not None:
            shaped = ShapedRows(
                pa.Table.from_batches([held.batch, shaped.batch]).combine_chunks().to_batches()[0],
                pa.concat_arrays([held.numbers, shaped.numbers]),
                held.first,
                shaped.end,
                shaped.table,
            )
            held = None
        rows = len(shaped.numbers)
        if rows and MOVED in shaped.batch.schema.names and _deletes(shaped.batch.slice(rows - 1))[0]:
            last = shaped.numbers[rows - 1].as_py()
            held = replace(
                shaped, batch=shaped.batch.slice(rows - 1), numbers=shaped.numbers.slice(rows - 1), first=last
            )
            shaped = replace(
                shaped, batch=shaped.batch.slice(0, rows - 1), numbers=shaped.numbers.slice(0, rows - 1), end=last
            )
        yield shaped
    if held is not None:
        yield held


def _moved(batch: pa.RecordBatch) -> Flags | None:
    """Return which rows take fields along from the key of the row before them; None if none does."""
    if MOVED not in batch.schema.names:
        return None
    found: Flags = batch.column(MOVED).fill_null(False).to_numpy(zero_copy_only=False)
    return found if found.any() else None


def _follows(numbers: pa.Array) -> Flags:
    """Return which rows are, by number, the next after the row before them."""
    follows: Flags = np.diff(numbers.to_numpy(), prepend=-2) == 1
    return follows


def _staying(lacks: pa.Array, counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
    """Return the arguments of each row that name the fields which stay: how many, and their names."""
    names = pa.LargeListArray.from_arrays(
        pa.array(np.concatenate(([0], np.cumsum(counts))), pa.int64()), _bulk(lacks.flatten())
    )
    return _join(_bulk(_text(pa.array(counts.astype(np.int64)))), pc.binary_join(names, pa.scalar(b"", _BYTES)))


def _fields(batch: pa.RecordBatch, shape: RedisShape) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], pa.Array]:
    """Return the arguments of each row after its lead: how many, and their bytes."""
    rows = batch.num_rows
    if shape.mode == "string":
        return np.ones(rows, np.int64), _bulk(encode_rows(batch))
    if shape.fields == "json":
        return np.full(rows, 2, np.int64), _join(bulk(JSON_FIELD), _bulk(encode_rows(batch)))
    count, parts = np.zeros(rows, np.int64), []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        parts.append(_join(bulk(name), _bulk(encode_text(column))))  # null where the value is null
        count += 2 * column.is_valid().to_numpy(zero_copy_only=False)
    empty = count == 0
    parts.append(_choose(empty, bulk(NULL_FIELD) + bulk(""), b""))
    return np.where(empty, 2, count), _join(*parts, nulls="replace")


def _keys(batch: pa.RecordBatch, shape: RedisShape, sink: str) -> pa.Array:
    """Return the key of each row. Several columns cannot give the same key, because a colon in a value is escaped."""
    names = shape.template_columns
    for name in names:
        if name not in batch.schema.names:
            raise SchemaError(
                f"sink {sink!r}: the key column {name!r} is not among the columns {', '.join(batch.schema.names)}",
                hint=f"Set the sink's key to columns that its input has, and deliver them: key of sink {sink!r}.",
            )
    values = [encode_text(batch.column(name)) for name in names]
    if len(values) > 1:
        values = [pc.replace_substring(pc.replace_substring(v, "%", "%25"), ":", "%3A") for v in values]
    parts: list[pa.Array | bytes] = []
    for literal, value in zip(shape.literals, values, strict=False):
        parts += [literal.encode(), value]
    return _join(*parts, shape.literals[-1].encode())


def _deletes(batch: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows delete their key."""
    if OP not in batch.schema.names:
        return np.zeros(batch.num_rows, bool)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = pc.fill_null(
        pc.equal(batch.column(OP).cast(pa.string()), "delete"), False
    ).to_numpy(zero_copy_only=False)
    return found


def _stream_ids(numbers: pa.Array, epoch: int) -> pa.Array:
    """Return the ids of entries: epoch and row number. No id is 0-0, because the first epoch is 1."""
    return _bulk(_join(f"{epoch}-".encode(), _text(numbers)))


def _bulk(column: pa.Array) -> pa.Array:
    """Return each value as one argument in the wire format; null stays null."""
    column = column.cast(_BYTES)
    return _join(b"$", _text(pc.binary_length(column)), b"\r\n", column, b"\r\n")


def _text(numbers: pa.Array) -> pa.Array:
    return numbers.cast(pa.large_string()).cast(_BYTES)


def _join(*parts: pa.Array | bytes, nulls: str = "emit_null") -> pa.Array:
    values = [pa.scalar(part, _BYTES) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*values, pa.scalar(b"", _BYTES), null_handling=nulls, null_replacement="")


def _choose(where: np.ndarray[tuple[int], np.dtype[np.bool_]], yes: bytes, no: bytes) -> pa.Array:
    return pc.if_else(pa.array(where), pa.scalar(yes, _BYTES), pa.scalar(no, _BYTES))


def _only(where: np.ndarray[tuple[int], np.dtype[np.bool_]], fields: pa.Array) -> pa.Array:
    return fields if where.all() else pc.if_else(pa.array(where), fields, pa.scalar(b"", _BYTES))


def _offsets(column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return where each value of a large_binary column begins in its data, and where the last ends."""
    return np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]


def _sizes(column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.diff(_offsets(column)) if len(column) else np.zeros(0, np.int64)


def _data(column: pa.Array) -> memoryview:
    """Return the bytes of all values, one after the other, without copying them."""
    offsets, data = _offsets(column), column.buffers()[2]
    return memoryview(data)[offsets[0] : offsets[-1]] if data is not None else memoryview(b"")

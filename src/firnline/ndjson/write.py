"""Writes rows as JSON objects, compiled, whole batches at a time.

| Arrow              | JSON                                                                          |
|--------------------|-------------------------------------------------------------------------------|
| integers, decimals | a number with all digits                                                      |
| doubles            | the shortest number that reads back the same; "NaN", "Infinity", "-Infinity"  |
| timestamps         | RFC 3339 with microseconds: "2024-05-01T12:00:00.000000Z"; no Z without a zone |
| dates              | "2024-05-01"                                                                  |
| lists, structs     | arrays and objects; null is null                                              |

Other types, and times outside of the years 0001 to 9999, are left to the caller: it gives the JSON of such a column as
text (`raw_column`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline import jit
from firnline.ndjson import write_kernel as k
from firnline.ndjson.numbers import FIRST_SECOND, LAST_SECOND
from firnline.schema import is_json

_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_LONGEST = 28  # bytes of the text of any number or time
_MOST_ESCAPED = 6  # bytes for one byte of text
_DECIMAL_DIGITS = 18  # of decimals that fit into 64 bits
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A column in the form that the kernel takes."""

    kind: int
    words: _Numbers  # the values; of texts where each begins, and where the last one ends
    valid: _Bytes | None = None  # None: no value is null
    text: _Bytes | None = None
    scale: int = 0

    @property
    def longest(self) -> int:
        """The bytes that all values take at most."""
        if self.text is None:
            return _LONGEST * len(self.words)
        factor = 1 if self.kind == k.RAW else _MOST_ESCAPED
        return factor * len(self.text) + 4 * len(self.words)


def is_ready() -> bool:
    """Return whether the writer is compiled."""
    return jit.is_compiled(k.write_rows) and jit.is_compiled(k.write_lists)


def warm_up() -> None:
    """Compile the writer, or load it from numba's cache; later calls are cheap."""
    with jit.compiling():
        lists = as_column(pa.array([[1]]), pa.field("a", pa.list_(pa.int64())))
        assert lists is not None
        write_objects(["a"], [lists], 1)


def as_column(values: pa.Array, field: pa.Field) -> Column | None:
    """Return a column for `write_objects`; None if the writer does not know its type, or cannot write a value."""
    kind = values.type
    if isinstance(values, pa.ExtensionArray) or is_json(field):
        return None
    if pa.types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    valid = None if not values.null_count else _validity(values)
    if pa.types.is_null(kind):
        return Column(k.WHOLE, np.zeros(len(values), np.int64), np.zeros(len(values), np.uint8))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _text_column(k.TEXT, values, valid)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_column(values, kind.value_field)
    if pa.types.is_struct(kind):
        return _struct_column(values, valid)
    if pa.types.is_boolean(kind):
        return Column(k.TRUTH, _words(values.cast(pa.uint8())), valid)
    if pa.types.is_uint64(kind):
        return Column(k.UNSIGNED, _words(values.view(pa.int64())), valid)
    if pa.types.is_integer(kind):
        return Column(k.WHOLE, _words(values), valid)
    if pa.types.is_float64(kind):
        return Column(k.DOUBLE, _words(values.view(pa.int64())), valid)
    if pa.types.is_date32(kind):
        days = values.view(pa.int32())
        return Column(k.DAY, _words(days), valid) if _is_between(days, 86_400, floor=False) else None
    if pa.types.is_timestamp(kind):
        return _time_column(values, valid)
    if pa.types.is_decimal128(kind) and kind.precision <= _DECIMAL_DIGITS and kind.scale >= 0:
        wide = np.frombuffer(values.buffers()[1], np.int64)[2 * values.offset : 2 * (values.offset + len(values)) : 2]
        return Column(k.DECIMAL, wide, valid, scale=kind.scale)
    return None


def raw_column(texts: pa.Array) -> Column:
    """Return a column whose values are JSON already, as string or large_string."""
    return _text_column(k.RAW, texts, None if not texts.null_count else _validity(texts))


def write_objects(names: Sequence[str], columns: Sequence[Column], rows: int) -> pa.Array:
    """Return one object per row, as large_binary."""
    text, ends = _write_objects(names, columns, rows, None)
    return _binary(text, ends)


def write_values(column: Column, rows: int) -> pa.Array:
    """Return the JSON of each value, `null` for null, as large_binary."""
    return _binary(*_write([b"", b""], [column], rows, None))


def _write_objects(
    names: Sequence[str], columns: Sequence[Column], rows: int, valid: _Bytes | None
) -> tuple[_Bytes, _Numbers]:
    labels = [json.dumps(name, ensure_ascii=False).encode() + b":" for name in names]
    return _write([(b"," if n else b"{") + label for n, label in enumerate(labels)] + [b"}"], columns, rows, valid)


def _write(
    labels: Sequence[bytes], columns: Sequence[Column], rows: int, row_valid: _Bytes | None
) -> tuple[_Bytes, _Numbers]:
    """Return the text of all rows, and where each ends."""
    words = np.empty((len(columns), rows + 1), np.int64)
    valid = np.ones((len(columns) + 1, rows), np.uint8)
    text = np.empty(sum(len(c.text) for c in columns if c.text is not None) + k.SLACK, np.uint8)
    start = 0
    for number, column in enumerate(columns):
        words[number, : len(column.words)] = column.words
        if column.valid is not None:
            valid[number] = column.valid
        if column.text is not None:
            text[start : start + len(column.text)] = column.text
            words[number] += start
            start += len(column.text)
    if row_valid is not None:
        valid[-1] = row_valid
    joined = b"".join(labels)
    most = (len(joined) + 4) * rows + sum(column.longest for column in columns) + k.SLACK
    out, ends = np.empty(most, np.uint8), np.zeros(rows + 1, np.int64)
    shapes = np.array([(column.kind, column.scale) for column in columns], np.int64).reshape(-1, 2)
    label_ends = np.cumsum([0, *(len(label) for label in labels)])
    k.write_rows(shapes, words, valid, text, _padded(joined), label_ends, out, ends)
    return out[: ends[-1]], ends


def _list_column(values: pa.Array, field: pa.Field) -> Column | None:
    flat = values.flatten()
    column = as_column(flat, field)
    if column is None:
        return None
    text, value_ends = _write([b"", b""], [column], len(flat), None)
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    ends = np.zeros(len(values) + 1, np.int64)
    out = np.empty(len(text) + len(flat) + 4 * len(values) + k.SLACK, np.uint8)
    k.write_lists(starts, _validity(values), value_ends, np.concatenate([text, _SLACK]), out, ends)
    return Column(k.RAW, ends, None, out[: ends[-1]])


def _struct_column(values: pa.Array, valid: _Bytes | None) -> Column | None:
    if not values.type.num_fields or any(_CONTROL.search(field.name) for field in values.type):
        return None
    columns: list[Column] = []
    for number, field in enumerate(values.type):
        column = as_column(values.field(number), field)
        if column is None:
            return None
        columns.append(column)
    text, ends = _write_objects([field.name for field in values.type], columns, len(values), valid)
    return Column(k.RAW, ends, None, text)


def _time_column(values: pa.Array, valid: _Bytes | None) -> Column | None:
    per_second = _PER_SECOND[values.type.unit]
    times = values.view(pa.int64())
    if not _is_between(times, per_second, floor=True):
        return None
    words = _words(times)
    microseconds = words * (1_000_000 // per_second) if per_second <= 1_000_000 else words // 1_000
    return Column(k.TIME if values.type.tz is None else k.ZONED_TIME, microseconds, valid)


def _is_between(values: pa.Array, unit: int, *, floor: bool) -> bool:
    """Return whether all values lie in the years 0001 to 9999; `unit` is per second, or (not floor) its seconds."""
    least, most = (scalar.as_py() for scalar in pc.min_max(values).values())
    if least is None:
        return True
    low, high = (least // unit, most // unit) if floor else (least * unit, most * unit)
    return bool(low >= FIRST_SECOND and high <= LAST_SECOND)


def _text_column(kind: int, values: pa.Array, valid: _Bytes | None) -> Column:
    _, offsets, data = values.buffers()
    width: Any = np.int64 if pa.types.is_large_string(values.type) else np.int32
    if offsets is None or not len(values):
        return Column(kind, np.zeros(len(values) + 1, np.int64), valid, np.empty(0, np.uint8))
    edges = np.frombuffer(offsets, width)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Column(kind, edges - edges[0], valid, whole[edges[0] : edges[-1]])


def _words(values: pa.Array) -> _Numbers:
    """Return the values of numbers as they lie in memory, also where they are null."""
    words: _Numbers = np.frombuffer(values.buffers()[1], values.type.to_pandas_dtype())[
        values.offset : values.offset + len(values)
    ]
    return words


def _validity(values: pa.Array) -> _Bytes:
    found: _Bytes = values.is_valid().cast(pa.uint8()).to_numpy()
    return found


def _padded(data: bytes) -> _Bytes:
    return np.frombuffer(data + bytes(k.SLACK), np.uint8)


_SLACK = np.zeros(k.SLACK, np.uint8)


def _binary(text: _Bytes, ends: _Numbers) -> pa.Array:
    return pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(text)])

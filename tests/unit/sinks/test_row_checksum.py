"""The checksum of rows: equal for equal rows, however they are cut; different for any other row or order."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.sinks.row_checksum import RowChecksum

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [True, False]),
    "int": (pa.int64(), [0, -1, 2**40]),
    "double": (pa.float64(), [0.0, -0.0, 1.5]),
    "text": (pa.string(), ["", "a", "ab"]),
    "large": (pa.large_string(), ["", "xyz"]),
    "bytes": (pa.binary(), [b"", b"\0", b"a"]),
    "fixed": (pa.binary(2), [b"ab", b"\0\0"]),
    "time": (pa.timestamp("us", "UTC"), [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)]),
    "date": (pa.date32(), [datetime.date(2026, 1, 1), datetime.date(1970, 1, 1)]),
    "decimal": (pa.decimal128(10, 2), [decimal.Decimal("1.25"), decimal.Decimal("0.00")]),
    "list": (pa.list_(pa.string()), [[], ["a"], ["a", None]]),
    "struct": (pa.struct([("a", pa.int32()), ("b", pa.list_(pa.bool_()))]), [{"a": 1, "b": [True]}, {"a": None}]),
    "map": (pa.map_(pa.string(), pa.int64()), [[("a", 1)], [], [("b", None), ("c", 2)]]),
    "null": (pa.null(), [None]),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in TYPES.items()])
row = st.fixed_dictionaries({name: st.none() | st.sampled_from(values) for name, (_, values) in TYPES.items()})


def checksum(*batches: pa.RecordBatch) -> str:
    found = RowChecksum()
    for batch in batches:
        found.add(batch)
    return found.hex()


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


@settings(deadline=None)
@given(st.lists(row, max_size=8), st.data())
def test_cuts_do_not_matter(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    whole = batch_of(rows)
    padded = batch_of([*rows[:1], *rows, *rows[:1]]).slice(1 if rows else 0, len(rows))
    assert checksum(whole) == checksum(whole.slice(0, cut), whole.slice(cut)) == checksum(padded)


@settings(deadline=None)
@given(st.lists(row, min_size=1, max_size=6), st.lists(row, min_size=1, max_size=6))
def test_other_rows_have_another_checksum(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    first, second = batch_of(one), batch_of(other)
    # Rows are compared as text: -0.0 equals 0.0, and the checksum tells them apart.
    same = repr(first.to_pylist()) == repr(second.to_pylist())
    has_values = any(column.null_count < len(column) for column in (*first.columns, *second.columns))
    if has_values:
        assert (checksum(first) == checksum(second)) == same


def test_a_column_without_a_value_counts_for_nothing() -> None:
    rows = pa.RecordBatch.from_pylist([{"id": 1}, {"id": 2}])
    wider = pa.RecordBatch.from_arrays([*rows.columns, pa.nulls(2, pa.string())], names=["id", "new"])
    assert checksum(rows) == checksum(wider)


def test_what_lies_in_the_place_of_a_null_counts_for_nothing() -> None:
    values, valid = pa.py_buffer(b"\1\0\0\0\7\0\0\0"), pa.py_buffer(b"\1")
    dirty = pa.Array.from_buffers(pa.int32(), 2, [valid, values])
    clean = pa.array([1, None], pa.int32())
    one, other = (pa.RecordBatch.from_arrays([column], names=["id"]) for column in (dirty, clean))
    assert checksum(one) == checksum(other)


@pytest.mark.parametrize("kind", [pa.int32(), pa.string()])
def test_the_type_of_a_column_counts(kind: pa.DataType) -> None:
    one = pa.RecordBatch.from_arrays([pa.array([1, 2], pa.int64())], names=["id"])
    other = pa.RecordBatch.from_arrays([one.column(0).cast(kind)], names=["id"])
    assert checksum(one) != checksum(other)

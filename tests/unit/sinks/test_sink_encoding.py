"""Rows as text and as JSON: compared with Python's own JSON, value by value."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.schema import json_field
from firnline.sinks.encoding import encode_json, encode_rows, encode_text

NOON = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
D1 = date(2026, 1, 1)
QUOTED = b'{"a":1,"b\\"":null}'
CASES: list[tuple[pa.DataType, Any, Any, bytes]] = [
    (pa.string(), 'a"b\\c\n\x00é', 'a"b\\c\n\x00é', 'a"b\\c\n\x00é'.encode()),
    (pa.large_string(), "", "", b""),
    (pa.string_view(), "view", "view", b"view"),
    (pa.dictionary(pa.int8(), pa.string()), "word", "word", b"word"),
    (pa.int64(), -(2**63), -(2**63), b"-9223372036854775808"),
    (pa.uint64(), 2**64 - 1, 2**64 - 1, b"18446744073709551615"),
    (pa.float64(), 0.1, 0.1, b"0.1"),
    (pa.float64(), 1e300, 1e300, b"1e+300"),
    (pa.float64(), math.inf, None, b"inf"),
    (pa.float64(), math.nan, None, b"nan"),
    (pa.decimal128(20, 2), Decimal("-12345678901234567.89"), -12345678901234567.89, b"-12345678901234567.89"),
    (pa.bool_(), True, True, b"true"),
    (pa.date32(), date(2026, 1, 31), "2026-01-31", b"2026-01-31"),
    (pa.time64("us"), time(23, 59, 59), "23:59:59.000000", b"23:59:59.000000"),
    (pa.timestamp("us", "UTC"), NOON, "2026-01-31T12:00:00.000005Z", b"2026-01-31T12:00:00.000005Z"),
    (pa.timestamp("us", "Europe/Oslo"), NOON, "2026-01-31T12:00:00.000005Z", b"2026-01-31T12:00:00.000005Z"),
    (pa.timestamp("ms"), datetime(2026, 1, 31), "2026-01-31T00:00:00.000", b"2026-01-31T00:00:00.000"),
    (pa.duration("s"), timedelta(seconds=90), 90, b"90"),
    (pa.binary(), b"\x00\xff", base64.b64encode(b"\x00\xff").decode(), b"\x00\xff"),
    (pa.binary(2), b"\x00\xff", base64.b64encode(b"\x00\xff").decode(), b"\x00\xff"),
    (pa.list_(pa.int32()), [1, None, 3], [1, None, 3], b"[1,null,3]"),
    (pa.list_(pa.string()), [], [], b"[]"),
    (pa.list_(pa.int32(), 2), [1, 2], [1, 2], b"[1,2]"),
    (pa.struct({"a": pa.int32(), 'b"': pa.string()}), {"a": 1, 'b"': None}, {"a": 1, 'b"': None}, QUOTED),
    (pa.map_(pa.string(), pa.int32()), [("x", 1), ("y", None)], {"x": 1, "y": None}, b'{"x":1,"y":null}'),
    (pa.map_(pa.int32(), pa.list_(pa.date32())), [(7, [D1])], {"7": [str(D1)]}, b'{"7":["2026-01-01"]}'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "in_json", "text"), CASES, ids=lambda value: str(value)[:30])
def test_every_type(kind: pa.DataType, value: Any, in_json: Any, text: bytes) -> None:
    column = pa.array([None, value, None, value], kind)
    for part, expected in ((column, [None, value, None, value]), (column[1:2], [value]), (column[:0], [])):
        assert [json.loads(one) for one in encode_json(part).to_pylist()] == [
            None if one is None else in_json for one in expected
        ]
        assert encode_text(part).to_pylist() == [None if one is None else text for one in expected]


def test_columns_without_values() -> None:
    nothing = pa.nulls(2)
    assert encode_json(nothing).to_pylist() == ["null", "null"]
    assert encode_text(nothing).to_pylist() == [None, None]
    batch = pa.RecordBatch.from_arrays([nothing], names=["a\n"])
    assert [json.loads(row) for row in encode_rows(batch).to_pylist()] == [{"a\n": None}] * 2


def test_a_column_of_json_is_no_text_in_json() -> None:
    schema = pa.schema([json_field("j"), pa.field("e", pa.struct([]))])
    batch = pa.RecordBatch.from_pylist([{"j": '{"a": [1]}', "e": {}}, {"j": None, "e": None}], schema)
    assert [json.loads(row) for row in encode_rows(batch).to_pylist()] == [
        {"j": {"a": [1]}, "e": {}},
        {"j": None, "e": None},
    ]


leaf = st.none() | st.text(max_size=8)
record = st.fixed_dictionaries(
    {
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "f": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "s": leaf,
        "l": st.none() | st.lists(leaf, max_size=3),
        "o": st.none() | st.fixed_dictionaries({"a": leaf, "b": st.none() | st.lists(st.booleans(), max_size=2)}),
    }
)
SCHEMA = pa.schema(
    {
        "i": pa.int64(),
        "f": pa.float64(),
        "s": pa.string(),
        "l": pa.list_(pa.string()),
        "o": pa.struct({"a": pa.string(), "b": pa.list_(pa.bool_())}),
    }
)


@given(st.lists(record, max_size=6), st.integers(0, 3))
def test_any_row_reads_back(rows: list[dict[str, Any]], skip: int) -> None:
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA).slice(skip)
    assert [json.loads(row) for row in encode_rows(batch).to_pylist()] == rows[skip:]

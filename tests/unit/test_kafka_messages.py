"""How rows become Kafka messages: JSON with every digit, keys, topics and lanes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from firnline.errors import SchemaError
from firnline.schema import json_field
from firnline.sinks.kafka import encode
from firnline.sinks.kafka.encode import MessageEncoder, Messages
from firnline.sinks.shaping import ShapedRows

SHAPE = {"topic": "t", "topics_allowed": "", "key": [], "write": "append", "value": "json", "lanes": 1}


def shaped(batch: pa.RecordBatch, first: int = 0) -> ShapedRows:
    numbers = pa.array(range(first, first + batch.num_rows), pa.int64())
    return ShapedRows(batch, numbers, first, first + batch.num_rows)


def messages(batch: pa.RecordBatch, lane: int | None = None, **shape: Any) -> list[Messages]:
    return list(MessageEncoder({**SHAPE, **shape}).encode(shaped(batch), lane))


def values(batch: pa.RecordBatch, **shape: Any) -> list[str | None]:
    found = [value for part in messages(batch, **shape) for value in part.values.to_pylist()]
    return [value.decode() if value is not None else None for value in found]


def keys(batch: pa.RecordBatch, **shape: Any) -> list[bytes | None]:
    return [key for part in messages(batch, **shape) if part.keys is not None for key in part.keys.to_pylist()]


def one(kind: pa.DataType, value: Any) -> str:
    """Return the JSON of one value."""
    field = kind if isinstance(kind, pa.Field) else pa.field("v", kind)
    text = values(pa.RecordBatch.from_arrays([pa.array([value], field.type)], schema=pa.schema([field])))[0]
    assert text is not None
    json.loads(text)
    prefix = f'{{"{field.name}":'
    assert text.startswith(prefix)
    return text[len(prefix) : -1]


NOON = datetime(2024, 5, 1, 12, 0, 0, 250, tzinfo=UTC)
UTC_TIME = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.int64(), 2**63 - 1, "9223372036854775807"),
        (pa.int32(), -1, "-1"),
        (pa.float64(), 0.1, "0.1"),
        (pa.float64(), -0.0, "-0.0"),
        (pa.float64(), 5e-324, "5e-324"),
        (pa.float32(), 0.1, "0.1"),
        (pa.float64(), float("nan"), '"NaN"'),
        (pa.float64(), float("inf"), '"Infinity"'),
        (pa.float32(), float("-inf"), '"-Infinity"'),
        (pa.decimal128(5, 2), Decimal("12.30"), "12.30"),
        (pa.decimal128(18, 2), Decimal("9999999999999999.99"), "9999999999999999.99"),
        (pa.decimal128(38, 9), Decimal("12345678901234567890123456789.123456789"),
         "12345678901234567890123456789.123456789"),
        (pa.bool_(), True, "true"),
        (pa.string(), 'a"b\\c\n\0\u2028é😀/', '"a\\"b\\\\c\\n\\u0000\u2028é😀/"'),
        (UTC_TIME, NOON, '"2024-05-01T12:00:00.000250Z"'),
        (UTC_TIME, datetime(1, 1, 1, tzinfo=UTC), '"0001-01-01T00:00:00.000000Z"'),
        (pa.date32(), date(2024, 5, 1), '"2024-05-01"'),
        (pa.binary(), b"\x00\xff", '"AP8="'),
        (json_field("v"), '{"a":12345678901234567890123, "b": 1.10}', '{"a":12345678901234567890123, "b": 1.10}'),
        (json_field("v"), "no json", '"no json"'),
        (pa.list_(pa.string()), ["a", None], '["a",null]'),
        (pa.list_(UTC_TIME), [NOON, None], '["2024-05-01T12:00:00.000250Z",null]'),
        (pa.list_(pa.list_(pa.decimal128(4, 1))), [[Decimal("1.0")], [], None], "[[1.0],[],null]"),
        (pa.list_(pa.float64()), [], "[]"),
        (pa.map_(pa.string(), pa.float64()), [("k\"", 1.5), ("n", float("nan"))], '{"k\\"":1.5,"n":"NaN"}'),
        (pa.struct([("a", pa.decimal128(4, 2)), ("b c", pa.binary())]), {"a": Decimal("1.50"), "b c": None},
         '{"a":1.50,"b c":null}'),
        (pa.struct([("a", pa.struct([("b", UTC_TIME)]))]), {"a": {"b": NOON}},
         '{"a":{"b":"2024-05-01T12:00:00.000250Z"}}'),
        (pa.struct([("a", pa.int64())]), None, "null"),
        (pa.null(), None, "null"),
        (pa.string(), None, "null"),
        (pa.float64(), None, "null"),
    ],
)  # fmt: skip
def test_values_keep_every_digit(kind: pa.DataType, value: Any, expected: str) -> None:
    assert one(kind, value) == expected


def test_names_of_columns_are_escaped_and_differ_in_case() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["id", "ID", 'it\'s "x"'])
    assert values(batch) == ['{"id":1,"ID":2,"it\'s \\"x\\"":3}']


def test_a_key_is_text_or_an_object() -> None:
    batch = pa.RecordBatch.from_pylist([{"a": 1, "b": "x", "c": NOON}, {"a": None, "b": "y", "c": None}])
    assert keys(batch, key=["b"]) == [b"x", b"y"]
    assert keys(batch, key=["a"]) == [b"1", None]
    assert keys(batch, key=["c"]) == [b"2024-05-01T12:00:00.000250Z", None]
    assert keys(batch, key=["b", "a"]) == [b'{"b":"x","a":1}', b'{"b":"y","a":null}']
    assert keys(batch, key=["b", "a"], write="upsert") == [b'{"b":"x","a":1}', None]
    assert keys(batch) == []


def test_a_delete_is_a_tombstone() -> None:
    rows = [{"id": 1, "_op": "insert", "_sequence": 1}, {"id": 2, "_op": "delete", "_sequence": 2}]
    batch = pa.RecordBatch.from_pylist(rows)
    assert values(batch, key=["id"], write="upsert") == ['{"id":1}', None]
    assert values(batch, key=["id"])[1] == '{"id":2,"_op":"delete","_sequence":2}'


def test_a_template_names_a_topic_for_each_row() -> None:
    batch = pa.RecordBatch.from_pylist([{"r": "eu", "n": 1}, {"r": None, "n": 2}, {"r": "eu", "n": 3}])
    (found,) = messages(batch, topic="o.{r}.{n}")
    assert found.topics is not None
    assert found.topics.to_pylist() == ["o.eu.1", None, "o.eu.3"]


@pytest.mark.parametrize("shape", [{"key": ["x"]}, {"topic": "t.{x}"}])
def test_a_missing_column_is_an_error(shape: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="no column 'x'"):
        messages(pa.RecordBatch.from_pylist([{"id": 1}]), **shape)


def test_lanes_part_the_rows_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PART_BYTES", 1000)
    batch = pa.RecordBatch.from_pylist([{"id": n, "k": f"key {n % 17}"} for n in range(500)])
    lane_of: dict[bytes, int] = {}
    seen: Counter[int] = Counter()
    for lane in range(3):
        parts = messages(batch, lane, key=["k"], lanes=3)
        numbers = [number for part in parts for number in part.numbers.to_pylist()]
        assert numbers == sorted(numbers)
        assert [part.end for part in parts][-1] == 500
        seen.update(numbers)
        for part in parts:
            assert part.keys is not None
            for key in part.keys.to_pylist():
                assert lane_of.setdefault(key, lane) == lane
    assert seen == Counter(range(500))
    assert set(lane_of.values()) == {0, 1, 2}


def test_lanes_of_rows_without_a_key_are_by_number() -> None:
    batch = pa.RecordBatch.from_pylist([{"id": n} for n in range(7)])
    found = [messages(batch, lane, lanes=2)[0].numbers.to_pylist() for lane in (0, 1)]
    assert found == [[0, 2, 4, 6], [1, 3, 5]]


def test_parts_are_small_and_end_where_the_rows_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PART_BYTES", 100)
    parts = messages(pa.RecordBatch.from_pylist([{"id": n} for n in range(100)]))
    assert len(parts) > 3
    ends: Sequence[int] = [part.end for part in parts]
    assert list(ends) == sorted(ends)
    assert ends[-1] == 100
    rows = pa.RecordBatch.from_pylist([], pa.schema([("id", pa.int64())]))
    (empty,) = MessageEncoder(SHAPE).encode(ShapedRows(rows, pa.array([], pa.int64()), 5, 9))
    assert (len(empty), empty.end) == (0, 9), "rows that a condition leaves out still move the row number"

"""Avro records against fastavro, another implementation: what one writes the other reads; damage is never a crash."""

from __future__ import annotations

import io
import itertools
import math
import os
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.avro import UnsupportedSchemaError, decode_records, derive_schema, encode_rows, parse_schema
from firnline.avro.schema import escape_name

EXAMPLES = 1_000 if os.environ.get("FIRNLINE_PROOF") else 60
WIDE = Context(prec=60)
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 5}
EVERYTHING = {
    "type": "record",
    "name": "a.b.All",
    "fields": [
        {"name": "n", "type": "null"},
        {"name": "b", "type": "boolean"},
        {"name": "i", "type": ["null", "int"]},
        {"name": "l", "type": "long"},
        {"name": "f", "type": "float"},
        {"name": "d", "type": ["double", "null"]},
        {"name": "s", "type": ["null", "string"]},
        {"name": "raw", "type": "bytes"},
        {"name": "e", "type": {"type": "enum", "name": "Suit", "symbols": ["CLUBS", "HEARTS"]}},
        {"name": "x", "type": {"type": "fixed", "name": "Two", "size": 2}},
        {"name": "dec", "type": ["null", DECIMAL]},
        {"name": "fix", "type": {"type": "fixed", "name": "D", "size": 5, "logicalType": "decimal", "precision": 9}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "local", "type": ["null", {"type": "long", "logicalType": "local-timestamp-micros"}]},
        {"name": "clock", "type": {"type": "long", "logicalType": "time-micros"}},
        {"name": "list", "type": {"type": "array", "items": ["null", {"type": "array", "items": "Suit"}]}},
        {"name": "map", "type": ["null", {"type": "map", "values": ["null", "Two"]}]},
        {"name": "in", "type": ["null", {"type": "record", "name": "In", "fields": [
            {"name": "s", "type": "string"}, {"name": "l", "type": {"type": "array", "items": "int"}}]}]},
        {"name": "many", "type": ["long", "null", "string", "In"]},
        {"name": "last", "type": {"type": "array", "items": {
            "type": "map", "values": {"type": "array", "items": "In"}}}},
    ],
}  # fmt: skip
_INSIDE = st.fixed_dictionaries({"s": st.text(max_size=5), "l": st.lists(st.integers(-9, 9), max_size=3)})
_TIMES = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))
_SUIT = st.sampled_from(["CLUBS", "HEARTS"])
RECORDS = st.fixed_dictionaries(
    {
        "n": st.none(),
        "b": st.booleans(),
        "i": st.none() | st.integers(-(2**31), 2**31 - 1),
        "l": st.integers(-(2**63), 2**63 - 1),
        "f": st.floats(width=32, allow_nan=False),
        "d": st.none() | st.floats(allow_nan=False),
        "s": st.none() | st.text(max_size=20),
        "raw": st.binary(max_size=20),
        "e": _SUIT,
        "x": st.binary(min_size=2, max_size=2),
        "dec": st.none() | st.integers(1 - 10**38, 10**38 - 1).map(lambda n: WIDE.scaleb(Decimal(n), -5)),
        "fix": st.integers(1 - 10**9, 10**9 - 1).map(Decimal),
        "day": st.dates(),
        "at": _TIMES.map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000, tzinfo=UTC)),
        "local": st.none() | _TIMES,
        "clock": st.times(),
        "list": st.lists(st.none() | st.lists(_SUIT, max_size=3), max_size=3),
        "map": st.none()
        | st.dictionaries(st.text(max_size=3), st.none() | st.binary(min_size=2, max_size=2), max_size=3),
        "in": st.none() | _INSIDE,
        "many": st.none() | st.integers(0, 9) | st.text(max_size=3) | _INSIDE,
        "last": st.lists(st.dictionaries(st.text(max_size=3), st.lists(_INSIDE, max_size=2), max_size=2), max_size=2),
    }
)


def written(schema: Any, records: list[Any]) -> list[bytes]:
    parsed, found = fastavro.parse_schema(schema), []
    for record in records:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, record)
        found.append(out.getvalue())
    return found


def decoded(schema: Any, values: list[bytes]) -> tuple[list[Any], dict[int, str]]:
    lengths = np.array([len(value) for value in values], np.int64)
    ends = np.cumsum(lengths)
    batch, bad = decode_records(parse_schema(schema), b"".join(values), ends - lengths, ends)
    batch.validate(full=True)
    rows: list[Any] = []
    for number in range(batch.num_rows):
        try:
            rows += batch.slice(number, 1).to_pylist()
        except (OverflowError, ValueError):
            rows.append(None)  # has a time that Python's datetime does not know
    return rows, dict(bad)


def encoded(batch: pa.RecordBatch) -> tuple[Any, list[bytes]]:
    schema = derive_schema(batch.schema, "firnline.Row")
    out, ends = encode_rows(parse_schema(schema), batch)
    return schema, [out[start:end].tobytes() for start, end in itertools.pairwise(ends)]


def read(schema: Any, value: bytes) -> Any:
    """Return a record as fastavro reads it, to the last byte."""
    stream = io.BytesIO(value)
    found = fastavro.schemaless_reader(stream, fastavro.parse_schema(schema), None)
    assert not stream.read(1)
    return found


def as_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of `EVERYTHING` as Arrow shows it."""
    many = record["many"]
    members = {"member0": int, "member1": str, "member2": dict}
    return {
        **record,
        "map": list(record["map"].items()) if record["map"] is not None else None,
        "many": None
        if many is None
        else {name: many if type(many) is kind else None for name, kind in members.items()},
        "last": [list(one.items()) for one in record["last"]],
    }


def shown(row: dict[str, Any]) -> str:
    """Return a row as text: NaN equals itself there."""
    return repr(row).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc")


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(RECORDS, max_size=5))
def test_what_fastavro_writes_is_read(records: list[dict[str, Any]]) -> None:
    rows, bad = decoded(EVERYTHING, written(EVERYTHING, records))
    assert (rows, bad) == ([as_row(record) for record in records], {})


@settings(max_examples=EXAMPLES, deadline=None)
@given(RECORDS, st.data())
def test_damage_is_a_bad_record_or_another_value_that_fastavro_reads_alike(record: dict[str, Any], data: Any) -> None:
    [good] = written(EVERYTHING, [record])
    places = st.integers(0, len(good) - 1)
    flipped = [
        good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :]
        for at in data.draw(st.lists(places, min_size=1, max_size=20))
        for bit in (1, 2, 16, 128)
    ]
    cut = [good[:at] for at in data.draw(st.lists(places, max_size=5))]
    rows, bad = decoded(EVERYTHING, [good, *flipped, *cut, good + b"\0", good])
    assert set(bad.values()) <= {"not-avro", "invalid-utf8", "does-not-fit"}
    assert rows[0] == rows[-1] == as_row(record)
    assert all(len(flipped) + 1 + number in bad for number in range(len(cut) + 1))
    values = [value for number, value in enumerate([good, *flipped]) if number not in bad]
    for row, value in zip(rows[:-1], values, strict=True):
        if row is not None:
            assert shown(row) == shown(as_row(read(EVERYTHING, value)))


def test_every_flipped_byte_of_a_record() -> None:
    record = {
        "n": None, "b": True, "i": 5, "l": -(2**40), "f": 1.5, "d": None, "s": "grün", "raw": b"\0\xff", "e": "HEARTS",
        "x": b"ab", "dec": Decimal("-12.34567"), "fix": Decimal(-5), "day": date(2026, 1, 1),
        "at": datetime(2026, 1, 1, tzinfo=UTC), "local": datetime(2026, 1, 1), "clock": time(1, 2, 3),
        "list": [None, ["CLUBS"]], "map": {"k": b"cd", "l": None}, "in": {"s": "x", "l": [1, 2]}, "many": "text",
        "last": [{"a": [{"s": "y", "l": []}]}],
    }  # fmt: skip
    [good] = written(EVERYTHING, [record])
    values = [
        good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :] for at in range(len(good)) for bit in range(8)
    ]
    lengths = np.array([len(value) for value in values], np.int64)
    ends = np.cumsum(lengths)
    batch, bad = decode_records(parse_schema(EVERYTHING), b"".join(values), ends - lengths, ends)
    batch.validate(full=True)
    assert 0 < len(bad) < len(values)
    assert batch.num_rows == len(values) - len(bad)


# -- rows ---------------------------------------------------------------------------------------------

_SCALARS: list[tuple[pa.DataType, Any]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint32(), st.integers(0, 2**32 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), st.text(max_size=20)),
    (pa.large_string(), st.text(max_size=20)),
    (pa.binary(), st.binary(max_size=20)),
    (pa.decimal128(38, 10), st.integers(1 - 10**38, 10**38 - 1).map(lambda n: WIDE.scaleb(Decimal(n), -10))),
    (pa.decimal128(5, 0), st.integers(-99999, 99999).map(Decimal)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), _TIMES.map(lambda t: t.replace(tzinfo=UTC))),
    (pa.timestamp("us"), _TIMES),
    (pa.time64("us"), st.times()),
]


def columns() -> Any:
    scalar = st.sampled_from(_SCALARS)
    deeper = st.recursive(
        scalar,
        lambda inner: st.one_of(
            inner.map(lambda one: (pa.list_(one[0]), st.lists(st.none() | one[1], max_size=3))),
            inner.map(lambda one: (pa.struct([("x", one[0])]), st.fixed_dictionaries({"x": st.none() | one[1]}))),
            inner.map(
                lambda one: (
                    pa.map_(pa.string(), one[0]),
                    st.dictionaries(st.text(max_size=3), st.none() | one[1], max_size=3).map(lambda d: list(d.items())),
                )
            ),
        ),
        max_leaves=4,
    )
    return st.lists(deeper, min_size=1, max_size=6)


def plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value of Arrow as fastavro shows it."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: plain(item, kind.item_type) for key, item in value}
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {"x": plain(value["x"], kind.field(0).type)}
    return value


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data(), columns(), st.integers(0, 3))
def test_what_is_written_fastavro_reads(data: Any, chosen: Any, skip: int) -> None:
    rows = data.draw(st.lists(st.tuples(*[st.none() | one[1] for one in chosen]), max_size=6))
    arrays = [pa.array([row[n] for row in rows], one[0]) for n, one in enumerate(chosen)]
    batch = pa.RecordBatch.from_arrays(arrays, names=[f"c{n}" for n in range(len(chosen))]).slice(skip)
    schema, values = encoded(batch)
    kinds = [one[0] for one in chosen]
    wanted = [{f"c{n}": plain(row[n], kinds[n]) for n in range(len(kinds))} for row in rows[skip:]]
    assert [read(schema, value) for value in values] == wanted
    found, bad = decoded(schema, values)
    assert (found, bad) == (batch.to_pylist(), {})


def test_types_without_an_equal_in_avro() -> None:
    nan = float("nan")
    batch = pa.record_batch(
        {
            "u": pa.array([2**64 - 1, None], pa.uint64()),
            "h": pa.array([np.float16(1.5), None]),
            "n": pa.nulls(2),
            "ns": pa.array([1, None], pa.timestamp("ns", "UTC")),
            "dur": pa.array([timedelta(seconds=1), None], pa.duration("us")),
            "dict": pa.array(["a", None]).dictionary_encode(),
            "keys": pa.array([[(1, "x")], None], pa.map_(pa.int64(), pa.string())),
            "nan": [nan, math.inf],
            "empty": pa.array([{}, None], pa.struct([])),
            "order id": [1, 2],
            "größe": [1, 2],
            "1st": [1, 2],
        }
    )
    schema, values = encoded(batch)
    rows, bad = decoded(schema, values)
    assert not bad
    assert rows[0] | {"nan": 0} == {
        "u": Decimal(2**64 - 1), "h": 1.5, "n": None, "ns": rows[0]["ns"], "dur": 1_000_000, "dict": "a",
        "keys": [{"key": 1, "value": "x"}], "nan": 0, "empty": {}, "order_x20_id": 1, "gr_xf6__xdf_e": 1, "_x31_st": 1,
    }  # fmt: skip
    assert math.isnan(rows[0]["nan"])
    assert rows[1]["u"] is rows[1]["keys"] is rows[1]["empty"] is None
    assert isinstance(read(schema, values[0])["u"], Decimal)


def test_a_required_column_has_no_null_branch() -> None:
    kind = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("x", pa.string())])
    batch = pa.RecordBatch.from_pylist([{"id": 1, "x": None}], schema=kind)
    schema, values = encoded(batch)
    assert schema["fields"] == [
        {"name": "id", "type": "long"},
        {"name": "x", "type": ["null", "string"], "default": None},
    ]
    assert values == [b"\x02\x00"]


def test_blocks_with_sizes_and_several_blocks() -> None:
    schema = {"type": "record", "name": "r", "fields": [{"name": "l", "type": {"type": "array", "items": "int"}}]}
    values = [b"\x03\x04\x02\x04\x02\x06\x00", b"\x02\x02\x02\x04\x00", b"\x00"]  # -2 of 2 bytes; 1 and 1; none
    assert decoded(schema, values) == ([{"l": [1, 2, 3]}, {"l": [1, 2]}, {"l": []}], {})
    huge = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    wrong = [huge + b"\x00", b"\x01\x01\x02", b"\x7f", b"", b"\x02", b"\xff" * 11, b"\x80" * 9 + b"\x02"]
    assert decoded(schema, wrong) == ([], dict.fromkeys(range(len(wrong)), "not-avro"))


def test_values_that_do_not_fit() -> None:
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 1}
    schema = {
        "type": "record",
        "name": "r",
        "fields": [{"name": "d", "type": decimal}, {"name": "s", "type": "string"}],
    }
    text = b"\x02x"
    values = [b"\x04\x03\xe7" + text, b"\x04\x03\xe8" + text, b"\x04\xfc\x19" + text, b"\x04\xfc\x18" + text,
              b"\x00" + text, b"\x28" + b"\xff" * 20 + text, b"\x28" + b"\x01" * 20 + text,
              b"\x22\xff" + b"\x00" * 16 + text, b"\x02\x01\x02\xff", b"\x02\x01\x06\xed\xa0\x80"]  # fmt: skip
    rows, bad = decoded(schema, values)
    assert [row["d"] for row in rows] == [Decimal("99.9"), Decimal("-99.9"), Decimal(0), Decimal("-0.1")]
    assert bad == {1: "does-not-fit", 3: "does-not-fit", 6: "does-not-fit", 7: "does-not-fit", 8: "invalid-utf8",
                   9: "invalid-utf8"}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "record", "name": "r", "fields": [{"name": "next", "type": ["null", "r"]}]}, "contains itself"),
        ({"type": "array", "items": "null"}, "without bytes"),
        ("unknown", "unknown type"),
        ({"type": "record", "name": "r"}, "invalid"),
        (["null", ["null", "int"]], "union inside"),
        ({"type": "fixed", "name": "f", "size": 2**40}, "fixed type"),
        (7, "invalid"),
    ],
)
def test_schemas_that_cannot_become_columns(schema: Any, words: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=words):
        parse_schema(schema)


def test_a_schema_that_is_too_deep() -> None:
    schema: Any = "int"
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UnsupportedSchemaError, match="levels"):
        parse_schema(schema)


def test_a_schema_may_use_types_of_others_and_be_no_record() -> None:
    other = {"type": "enum", "name": "shop.Suit", "symbols": ["A", "B"]}
    schema = parse_schema(["null", "shop.Suit"], [other])
    batch, _ = decode_records(schema, b"\x02\x02\x00", np.array([0, 2]), np.array([2, 3]))
    assert batch.to_pylist() == [{"value": "B"}, {"value": None}]


def test_two_columns_with_one_name_in_avro() -> None:
    assert escape_name("a b") == escape_name("a_x20_b")
    with pytest.raises(UnsupportedSchemaError, match="two columns"):
        derive_schema(pa.schema([("a b", pa.int64()), ("a_x20_b", pa.int64())]), "r")

"""Parquet files: every value becomes a value of the table, or is rescued; nothing changes on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.ndjson import BrokenFileError, MismatchError, UnexpectedFieldError
from firnline.sources.columns import Columns
from firnline.sources.files.formats.arrow_json import json_texts
from firnline.sources.files.formats.base import Place
from tests.support.formats import ReadFile, parquet_bytes, read_bytes

PARQUET = {"format": "parquet"}
US = pa.timestamp("us", "UTC")


def read(
    table: pa.Table,
    known: pa.Schema | None = None,
    evolution: Literal["add", "rescue", "fail"] = "add",
    place: Place | None = None,
    **settings: Any,
) -> ReadFile:
    schema = known if known is not None else pa.schema([])
    columns = Columns(schema, frozenset(schema.names), {}, evolution=evolution)
    return read_bytes(parquet_bytes(table, **settings), PARQUET, place or Place(), columns=columns)


# -- ranges -------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 11))
def test_rows_are_read_in_parts_over_row_groups(rows: int, group: int, size: int) -> None:
    data = parquet_bytes(pa.table({"id": pa.array(range(rows), pa.int64())}), group)
    place, ids, numbers = Place(max_records=size), [], []
    while True:
        part = read_bytes(data, PARQUET, place)
        ids += [row["id"] for row in part.rows]
        numbers += part.numbers
        assert len(part.rows) <= size
        if part.finished:
            break
        place = replace(part.place, max_records=size)
    assert ids == numbers == list(range(rows))


def test_a_file_with_fewer_rows_than_were_read_is_broken() -> None:
    with pytest.raises(BrokenFileError, match="has 3 rows, but 5 were read from it before"):
        read(pa.table({"a": [1, 2, 3]}), place=Place(record=5))


def test_every_cut_of_a_file_is_found() -> None:
    whole = parquet_bytes(pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]}), 2)
    for size in range(len(whole)):
        with pytest.raises(BrokenFileError):
            read_bytes(whole[:size], PARQUET)
    assert len(read_bytes(whole, PARQUET).rows) == 3


def test_a_damaged_page_is_found_by_its_checksum() -> None:
    table = pa.table({"a": list(range(1000))})
    whole = parquet_bytes(table, compression="none", use_dictionary=False, write_page_checksum=True)
    at = whole.index((500).to_bytes(8, "little"))
    with pytest.raises(BrokenFileError, match="not a valid Parquet file"):
        read_bytes(whole[:at] + b"\xff" + whole[at + 1 :], PARQUET)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty, and so not a Parquet file"),
        (b"whatever", "is not a Parquet file"),
        (b"PARE....", "is an encrypted Parquet file"),
        (b'{"a": 1}\n', "holds newline-delimited JSON, and the source reads parquet: set format: ndjson"),
        (b"a,b\n1,2\n", "looks like CSV, and the source reads parquet: set format: csv"),
    ],
)
def test_another_file_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(BrokenFileError) as caught:
        read_bytes(data, PARQUET)
    assert caught.value.reason == reason


# -- types of new columns -----------------------------------------------------------------------------

NOON = datetime(2026, 5, 1, 12, 0, 0, 5, UTC)
NAIVE = NOON.replace(tzinfo=None)
TYPES: list[tuple[pa.DataType, Any, pa.DataType, Any]] = [
    (pa.int8(), 5, pa.int32(), 5),
    (pa.uint16(), 65535, pa.int32(), 65535),
    (pa.int32(), -5, pa.int32(), -5),
    (pa.uint32(), 4294967295, pa.int64(), 4294967295),
    (pa.uint64(), 2**64 - 1, pa.decimal128(20, 0), Decimal(2**64 - 1)),
    (pa.float16(), 1.5, pa.float32(), 1.5),
    (pa.float32(), 1.5, pa.float32(), 1.5),
    (pa.bool_(), True, pa.bool_(), True),
    (pa.large_string(), "ä", pa.string(), "ä"),
    (pa.dictionary(pa.int8(), pa.string()), "x", pa.string(), "x"),
    (pa.binary(2), b"ab", pa.binary(), b"ab"),
    (pa.decimal128(9, 2), Decimal("1.25"), pa.decimal128(9, 2), Decimal("1.25")),
    (pa.decimal256(50, 2), Decimal("1.25"), pa.string(), "1.25"),
    (pa.date32(), date(2026, 5, 1), pa.date32(), date(2026, 5, 1)),
    (pa.timestamp("ms"), NAIVE.replace(microsecond=5000), US, NOON.replace(microsecond=5000)),
    (pa.timestamp("us", "Europe/Berlin"), NOON, US, NOON),
    (pa.timestamp("ns"), NAIVE, US, NOON),
    (pa.time64("us"), time(12, 0, 0, 5), pa.string(), "12:00:00.000005"),
    (pa.duration("us"), timedelta(microseconds=7), pa.int64(), 7),
    (pa.list_(pa.int8()), [1, None], pa.list_(pa.int32()), [1, None]),
    (pa.large_list(pa.timestamp("ns")), [NAIVE], pa.list_(US), [NOON]),
    (pa.map_(pa.string(), pa.int32()), [("k", 1)], pa.map_(pa.string(), pa.int32()), [("k", 1)]),
    (
        pa.map_(pa.int32(), pa.string()),
        [(1, "x")],
        pa.list_(pa.struct([("key", pa.int32()), ("value", pa.string())])),
        [{"key": 1, "value": "x"}],
    ),
    (
        pa.struct([("a", pa.int8()), ("b", pa.struct([("c", pa.large_string())]))]),
        {"a": 1, "b": {"c": "x"}},
        pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))]),
        {"a": 1, "b": {"c": "x"}},
    ),
]


@pytest.mark.parametrize(("kind", "value", "own", "expected"), TYPES, ids=[str(one[0]) for one in TYPES])
def test_every_type_becomes_a_column(kind: pa.DataType, value: Any, own: pa.DataType, expected: Any) -> None:
    if kind == pa.float16():
        import numpy as np

        value = np.float16(value)
    found = read(pa.table({"id": [1, 2], "x": pa.array([value, None], kind)}))
    assert found.schema.field("x").type == own
    assert [row["x"] for row in found.rows] == [expected, None]
    assert not found.rescued


def test_a_column_without_values_and_names_that_no_table_has() -> None:
    table = pa.table({"id": [1], "none": pa.nulls(1), "a b": ["x"], "ID": [2], "_rescued_data": ["old"]})
    found = read(table)
    assert found.schema.names == ["id", "_rescued_data"]
    assert found.rows == [{"id": 1, "_rescued_data": '{"a b":"x","ID":2,"_rescued_data":"old"}'}]
    assert found.rescued == [("(unknown fields)", 3)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.date32(), [-719_163, 2_932_897, 0]),
        (pa.timestamp("us", "UTC"), [-(2**62), 2**62, 0]),
        (pa.timestamp("ms"), [-62_135_596_800_001, 253_402_300_800_000, 0]),
    ],
)
def test_times_outside_the_years_1_to_9999_are_rescued(kind: pa.DataType, values: list[int]) -> None:
    got = read(pa.table({"t": pa.array(values, kind), "n": [1, 2, 3]}))
    assert [row["t"] is None for row in got.rows] == [True, True, False]
    assert [row["_rescued_data"] is None for row in got.rows] == [False, False, True]
    assert got.rescued == [("t", 2)]


def test_nanoseconds_are_rescued_not_rounded() -> None:
    at = pa.array([1_000, 1_001, None], pa.timestamp("ns"))
    found = read(pa.table({"id": [1, 2, 3], "at": at}))
    assert [row["at"] for row in found.rows] == [datetime(1970, 1, 1, 0, 0, 0, 1, UTC), None, None]
    assert found.rows[1]["_rescued_data"] == '{"at":"1970-01-01T00:00:00.000001001Z"}'
    assert found.rescued == [("at", 1)]


# -- known columns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "fitting", "rescued"),
    [
        (pa.array([1, 2**40], pa.int64()), pa.int32(), [1, None], [2**40]),
        (pa.array([1.0, 1.5, 1e300, float("nan")]), pa.int64(), [1, None, None, None], [1.5, 1e300, "NaN"]),
        (pa.array([1, 2**53 + 1, 2**63 - 1]), pa.float64(), [1.0, None, None], [2**53 + 1, 2**63 - 1]),
        (pa.array([0.5, 0.1]), pa.float32(), [0.5, None], [0.1]),
        (pa.array([1, 12345]), pa.decimal128(5, 2), [Decimal("1.00"), None], [12345]),
        (pa.array([0.25, 0.123]), pa.decimal128(5, 2), [Decimal("0.25"), None], [0.123]),
        (pa.array([Decimal("1.0"), Decimal("1.5")]), pa.int64(), [1, None], [1.5]),
        (pa.array([Decimal("0.1"), Decimal("0.3")]), pa.float64(), [0.1, 0.3], []),
        (pa.array([1, 2]), pa.string(), ["1", "2"], []),
        (pa.array([True]), pa.string(), ["true"], []),
        (pa.array(["7"]), pa.int64(), [None], ["7"]),
        (pa.array([True]), pa.int64(), [None], [True]),
        (pa.array([date(2026, 5, 1)]), US, [datetime(2026, 5, 1, tzinfo=UTC)], []),
        (pa.array([NOON], US), pa.date32(), [None], ["2026-05-01T12:00:00.000005Z"]),
        (pa.array([b"\x00\xff"]), pa.string(), [None], ["AP8="]),
        (pa.array([[1, 2**40], [3]]), pa.list_(pa.int32()), [None, [3]], [[1, 2**40]]),
        (pa.array([{"a": 1}]), pa.string(), [None], [{"a": 1}]),
    ],
)
def test_a_value_fits_a_known_column_only_if_it_does_not_change(
    values: pa.Array, kind: pa.DataType, fitting: list[Any], rescued: list[Any]
) -> None:
    found = read(pa.table({"x": values}), pa.schema([("x", kind)]))
    assert found.schema.field("x").type == kind
    assert [row["x"] for row in found.rows] == fitting
    texts = [json.loads(row["_rescued_data"])["x"] for row in found.rows if row.get("_rescued_data")]
    assert texts == rescued
    assert sum(count for _, count in found.rescued) == len(rescued)


def test_a_known_struct_gains_fields_and_rescues_inside() -> None:
    known = pa.schema([("s", pa.struct([("a", pa.int32())]))])
    table = pa.table({"s": pa.array([{"a": 1, "b": "x"}, {"a": 2**40, "b": None}, None])})
    added = read(table, known)
    assert [row["s"] for row in added.rows] == [{"a": 1, "b": "x"}, {"a": None, "b": None}, None]
    assert [row["_rescued_data"] for row in added.rows] == [None, '{"s":{"a":1099511627776}}', None]
    kept = read(table, known, "rescue")
    assert kept.schema.field("s").type == known.field("s").type
    assert [row["_rescued_data"] for row in kept.rows] == ['{"s":{"b":"x"}}', '{"s":{"a":1099511627776}}', None]
    assert kept.rescued == [("s.a", 1), ("(unknown fields)", 1)]


def test_unknown_columns_follow_the_evolution() -> None:
    table, known = pa.table({"id": [1, 2], "new": ["x", None]}), pa.schema([("id", pa.int64())])
    assert read(table, known).rows == [{"id": 1, "new": "x"}, {"id": 2, "new": None}]
    assert read(table, known, "rescue").rows == [
        {"id": 1, "_rescued_data": '{"new":"x"}'},
        {"id": 2, "_rescued_data": None},
    ]
    with pytest.raises(UnexpectedFieldError, match="record 0: unknown field 'new'"):
        read(table, known, "fail")
    with pytest.raises(MismatchError, match="record 1: field 'id'"):
        read(pa.table({"id": [1.0, 1.5]}), known, "fail")


def test_a_null_in_a_required_column_is_a_bad_record() -> None:
    known = pa.schema([pa.field("id", pa.int64(), nullable=False), ("t", pa.string())])
    found = read(pa.table({"id": [1, None, 3], "t": ["x", "y", "z"]}), known)
    assert [(row["id"], row["t"]) for row in found.rows] == [(1, "x"), (3, "z")]
    assert found.numbers == [0, 2]
    assert found.bad == [(1, 2, "missing-required", b'{"id":null,"t":"y"}')]


# -- JSON text ----------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=6)
values = st.fixed_dictionaries(
    {
        "t": st.none() | texts,
        "n": st.none() | st.integers(-(2**63), 2**63 - 1),
        "f": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "b": st.none() | st.booleans(),
        "l": st.none() | st.lists(st.none() | st.fixed_dictionaries({"x": st.none() | texts}), max_size=3),
    }
)
KIND = pa.struct(
    [
        ("t", pa.string()),
        ("n", pa.int64()),
        ("f", pa.float64()),
        ("b", pa.bool_()),
        ("l", pa.list_(pa.struct([("x", pa.string())]))),
    ]
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.none() | values, max_size=8), st.integers(0, 3))
def test_json_text_is_what_python_writes(records: list[Any], start: int) -> None:
    array = pa.array(records, KIND).slice(start)
    found = [None if text is None else json.loads(text) for text in json_texts(array).to_pylist()]
    assert found == records[start:]


@pytest.mark.parametrize(
    "kind",
    [
        pa.null(), pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.decimal128(5, 2), pa.string(),
        pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3),
        pa.date32(), pa.time64("us"), US, pa.duration("s"), pa.list_(pa.binary()), pa.struct({"x": pa.binary()}),
        pa.map_(pa.string(), pa.binary()), pa.dictionary(pa.int8(), pa.string()), pa.uuid(),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rows", [0, 2])
def test_columns_without_values_have_json_texts(kind: pa.DataType, rows: int) -> None:
    for array in (pa.nulls(rows, kind), pa.StructArray.from_arrays([pa.nulls(rows, kind)], ["x"])):
        texts = json_texts(array)
        assert texts.type == pa.string()
        assert texts.to_pylist() == ([None] * rows if array.type == kind else ['{"x":null}'] * rows)

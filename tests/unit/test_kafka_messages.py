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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firnline.errors import SchemaError
from firnline.ndjson import write, write_kernel
from firnline.schema import json_field
from firnline.sinks.kafka import encode
from firnline.sinks.kafka.encode import MessageEncoder, Messages
from firnline.sinks.shaping import RowShape, ShapedRows

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
        (pa.decimal128(2, 2), Decimal("-0.05"), "-0.05"),
        (pa.decimal128(38, 38), Decimal("0.05"), "0.05" + 36 * "0"),
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
@pytest.mark.parametrize("is_compiled", [True, False])
def test_values_keep_every_digit(
    kind: pa.DataType, value: Any, expected: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_writer(is_compiled, monkeypatch)
    assert one(kind, value) == expected


def compile_writer(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled code write the values, or DuckDB."""
    write.warm_up()
    monkeypatch.setattr(write, "is_ready", lambda: is_compiled)
    monkeypatch.setattr(encode, "compile_beside", lambda: None)


SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    (pa.uint16(), st.integers(0, 2**16 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float64(), st.floats()),
    (pa.float64(), st.integers(-(2**60), 2**60).map(float)),
    (pa.float64(), st.decimals(-1000, 1000, places=3).map(float)),
    (pa.float32(), st.floats(width=32)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(st.characters(exclude_categories=["Cs"]), max_size=40)),
    (pa.large_string(), st.text('ab"\\\n\té\0', max_size=80)),
    (pa.decimal128(18, 6), st.decimals(-(10**12) + 1, 10**12 - 1, places=6)),
    (pa.decimal128(3, 3), st.decimals("-0.999", "0.999", places=3)),
    (pa.decimal128(30, 0), st.integers(-(10**30) + 1, 10**30 - 1).map(Decimal)),
    (pa.date32(), st.integers(-800_000, 3_100_000)),
    (pa.date32(), st.dates()),
    (pa.timestamp("s"), st.integers(-(2**36), 2**36)),
    (pa.timestamp("ms", "UTC"), st.integers(-(10**14), 10**14)),
    (pa.timestamp("us", "Europe/Oslo"), st.integers(-(10**17), 3 * 10**17)),
    (pa.timestamp("ns"), st.integers(-(2**62), 2**62)),
    (pa.binary(), st.binary(max_size=9)),
    (pa.null(), st.none()),
]
WORDS = (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a", "b c", "é"]))
DEPTH = 2  # of lists and structs


@st.composite
def columns(draw: st.DrawFn, depth: int = DEPTH) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """A type, and its values with nulls among them."""
    shape = draw(st.sampled_from(["scalar", "list", "struct"])) if depth else "scalar"
    if shape == "scalar":
        # DuckDB takes no dictionary inside of a list.
        kind, some = draw(st.sampled_from([*SCALARS, WORDS] if depth == DEPTH else SCALARS))
    elif shape == "list":
        inner, value = draw(columns(depth - 1))
        kind, some = pa.list_(inner), st.lists(value, max_size=3)
    else:
        parts = {name: draw(columns(depth - 1)) for name in draw(st.sampled_from([["a"], ["a", 'b "c"'], ["é", "x"]]))}
        kind = pa.struct([(name, inner) for name, (inner, _) in parts.items()])
        some = st.fixed_dictionaries({name: value for name, (_, value) in parts.items()})
    return kind, st.none() | some


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Rows of one to four columns, cut out of a longer batch."""
    rows = draw(st.integers(0, 12))
    arrays = []
    for _ in range(draw(st.integers(1, 4))):
        kind, value = draw(columns())
        arrays.append(pa.array(draw(st.lists(value, min_size=rows, max_size=rows)), kind))
    whole = pa.RecordBatch.from_arrays(arrays, names=[f"column {n}" for n in range(len(arrays))])
    return whole.slice(draw(st.integers(0, 3)))


@given(batches(), st.integers(0, 2), st.sampled_from(["append", "upsert"]))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_compiled_code_writes_what_duckdb_writes(batch: pa.RecordBatch, key_columns: int, how: str) -> None:
    def found() -> list[Any]:
        parts = messages(batch, key=batch.schema.names[:key_columns], write=how)
        return [(p.values.to_pylist(), p.keys.to_pylist() if p.keys is not None else None) for p in parts]

    with pytest.MonkeyPatch.context() as patch:
        compile_writer(True, patch)
        compiled = found()
    with pytest.MonkeyPatch.context() as patch:
        compile_writer(False, patch)
        assert compiled == found()
    assert len(write_kernel.write_rows.overloads) == 1, "a second one would be compiled in the middle of a run"
    assert len(write_kernel.write_lists.overloads) == 1


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


def test_a_condition_sees_the_right_values_of_a_slice() -> None:
    batch = pa.RecordBatch.from_pylist([{"a": {"b": {"c": n}}} for n in range(20)]).slice(7)
    found = RowShape(where="a.b.c >= 18").apply(batch, 7)
    assert found.numbers.to_pylist() == [18, 19]
    assert found.batch.column("a").to_pylist() == [{"b": {"c": 18}}, {"b": {"c": 19}}]


CHANGES = pa.table(
    {
        "id": pa.array([1, 2, 3, None], pa.int64()),
        "price": pa.array([Decimal("1.50"), None, None, None], pa.decimal128(8, 2)),
        "note": pa.array(["é\n", None, None, None]),
        "at": pa.array([NOON, None, None, None], UTC_TIME),
        "raw": pa.array([b"\x00", None, None, None]),
        "_op": ["insert", "update", "delete", "truncate"],
        "_missing": pa.array([None, ["note", "price"], None, ["id"]], pa.list_(pa.string())),
        "_position": ["16/B374D848", "16/B374D848", "16/B374D850", "16/B374D850"],
        "_transaction": ["7", "7", "8", "8"],
        "_committed_at": pa.array([NOON] * 4, UTC_TIME),
        "_rescued_data": pa.array([None, '{"at": "x"}', None, None]),
    }
).to_batches()[0]
ENVELOPE = {"envelope": "debezium", "source": "shop", "table": "billing.orders", "key": ["id"]}


@pytest.mark.parametrize("is_compiled", [True, False])
def test_change_rows_in_the_envelope_of_debezium(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code and DuckDB write the same."""
    compile_writer(is_compiled, monkeypatch)
    millis = int(NOON.timestamp() * 1000)
    source = {
        "name": "shop", "ts_ms": millis, "snapshot": "false", "schema": "billing", "table": "orders", "txId": 7,
        "lsn": 0x16B374D848, "gtid": None, "file": None, "pos": None, "missing": None, "rescued": None,
    }  # fmt: skip
    later = {**source, "txId": 8, "lsn": 0x16B374D850}
    row = {"id": 1, "price": 1.50, "note": "é\n", "at": "2024-05-01T12:00:00.000250Z", "raw": "AA=="}
    nothing = dict.fromkeys(row)
    wanted = [
        (None, row, source, "c"),
        (
            None,
            {**nothing, "id": 2, "note": "__debezium_unavailable_value"},
            {**source, "missing": ["note", "price"], "rescued": '{"at": "x"}'},
            "u",
        ),
        ({**nothing, "id": 3}, None, later, "d"),
        (None, None, {**later, "missing": ["id"]}, "t"),
    ]
    texts = [text for text in values(CHANGES, **ENVELOPE) if text is not None]
    names = ("before", "after", "source", "op")
    assert [json.loads(text) for text in texts] == [
        {**dict(zip(names, one_row, strict=True)), "ts_ms": millis} for one_row in wanted
    ]
    assert '"price":1.50' in texts[0]
    assert keys(CHANGES, **ENVELOPE) == [b'{"id":1}', b'{"id":2}', b'{"id":3}', None]


def test_rows_of_the_envelope_do_not_depend_on_each_other() -> None:
    """A delivery that is repeated from some row on writes the same bytes."""
    whole = values(CHANGES, **ENVELOPE)
    assert [values(CHANGES.slice(n, 1), **ENVELOPE)[0] for n in range(4)] == whole


def test_rows_that_are_no_changes_have_no_envelope() -> None:
    with pytest.raises(SchemaError, match="lack the column _op"):
        values(CHANGES.select(["id"]), **ENVELOPE)
    odd = CHANGES.slice(0, 1).set_column(5, "_op", pa.array(["upsert"]))
    with pytest.raises(SchemaError, match="'upsert'"):
        values(odd, **ENVELOPE)

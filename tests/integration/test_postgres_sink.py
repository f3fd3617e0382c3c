"""The PostgreSQL sink on a real server: the contract, every type, bad rows, growth, keys, going back, shared tables."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from firnline.checkpoint.ledger import Ledger
from firnline.errors import BadRowError, RollbackRefusedError, SchemaError, SinkError
from firnline.sinks.base import ReplaceRows, RestoreVersion
from firnline.sinks.postgres.kind import open_sink as open_postgres
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, OpenSink, ReadRows, SinkConformance, rows
from tests.support.postgres_sink import (
    column_types,
    drive,
    execute,
    limited_role,
    postgres_ids,
    read_all_letters,
    table_rows,
)

TABLE = "lake.events"
EPOCH_START = datetime(1970, 1, 1)
SECOND, MICRO = timedelta(seconds=1), timedelta(microseconds=1)
DURATION = timedelta(days=3, microseconds=-1)
STRUCTS = [{"a": "é", "b": [1.5]}, None, {"a": None, "b": None}]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)


class TestAppend(SinkConformance):
    @pytest.fixture
    def open_sink(self, postgres: str) -> OpenSink:
        options = PostgresSinkOptions("copy", postgres, TABLE)
        return lambda context: open_postgres(options, context)

    @pytest.fixture
    def read_rows(self, postgres: str) -> ReadRows:
        return lambda: table_rows(postgres, TABLE)


class TestUpsert(TestAppend):
    writes_changes = True

    @pytest.fixture
    def open_sink(self, postgres: str) -> OpenSink:
        options = PostgresSinkOptions("copy", postgres, TABLE, write="upsert", key=("id",))
        return lambda context: open_postgres(options, context)


# -- types ------------------------------------------------------------------------------------------------

UTC_TIME = datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=UTC)
NAIVE = datetime(1901, 1, 2, 3, 4, 5, 6)
EVERY_TYPE: dict[str, tuple[pa.Array, str, list[Any]]] = {
    # column: values as Arrow, the type of the table, and what a reader gets
    "b": (pa.array([True, False, None]), "boolean", [True, False, None]),
    "i8": (pa.array([-128, 127, None], pa.int8()), "smallint", [-128, 127, None]),
    "i16": (pa.array([-(2**15), 2**15 - 1, None], pa.int16()), "smallint", [-(2**15), 2**15 - 1, None]),
    "i32": (pa.array([-(2**31), 2**31 - 1, None], pa.int32()), "integer", [-(2**31), 2**31 - 1, None]),
    "i64": (pa.array([-(2**63), 2**63 - 1, None], pa.int64()), "bigint", [-(2**63), 2**63 - 1, None]),
    "u8": (pa.array([0, 255, None], pa.uint8()), "smallint", [0, 255, None]),
    "u16": (pa.array([0, 2**16 - 1, None], pa.uint16()), "integer", [0, 2**16 - 1, None]),
    "u32": (pa.array([0, 2**32 - 1, None], pa.uint32()), "bigint", [0, 2**32 - 1, None]),
    "u64": (pa.array([0, 2**64 - 1, None], pa.uint64()), "numeric(20,0)", [0, 2**64 - 1, None]),
    "f16": (pa.array(np.array([1.5, -2.0, 0.0], np.float16)), "real", [1.5, -2.0, 0.0]),
    "f32": (pa.array([1.5, -0.25, None], pa.float32()), "real", [1.5, -0.25, None]),
    "f64": (pa.array([1e300, -1e-300, None]), "double precision", [1e300, -1e-300, None]),
    "dec": (
        pa.array([Decimal("-12345678901234567890.12"), Decimal("0.01"), None], pa.decimal128(38, 2)),
        "numeric(38,2)",
        [Decimal("-12345678901234567890.12"), Decimal("0.01"), None],
    ),
    "small": (
        pa.array([Decimal("0.00012345"), Decimal("-9.99999999"), Decimal(0)], pa.decimal128(9, 8)),
        "numeric(9,8)",
        [Decimal("0.00012345"), Decimal("-9.99999999"), Decimal(0)],
    ),
    "large": (
        pa.array([Decimal("9" * 60 + "." + "1" * 10), Decimal(-1), None], pa.decimal256(70, 10)),
        "numeric(70,10)",
        [Decimal("9" * 60 + "." + "1" * 10), Decimal(-1), None],
    ),
    "whole": (pa.array([Decimal(10**17), Decimal(-7), None], pa.decimal128(18)), "numeric(18,0)", [10**17, -7, None]),
    "s": (pa.array(["häß \n\t'\"", "", None]), "text", ["häß \n\t'\"", "", None]),
    "ls": (pa.array(["a", "b", None], pa.large_string()), "text", ["a", "b", None]),
    "sv": (pa.array(["a", "b", None], pa.string_view()), "text", ["a", "b", None]),
    "dict": (pa.array(["x", "y", None]).dictionary_encode(), "text", ["x", "y", None]),
    "bin": (pa.array([b"\x00\xff", b"", None]), "bytea", [b"\x00\xff", b"", None]),
    "fixed": (pa.array([b"ab", b"cd", None], pa.binary(2)), "bytea", [b"ab", b"cd", None]),
    "d32": (pa.array([date(1, 1, 1), date(9999, 12, 31), None]), "date", [date(1, 1, 1), date(9999, 12, 31), None]),
    "d64": (pa.array([date(2024, 2, 29)] * 3, pa.date64()), "date", [date(2024, 2, 29)] * 3),
    "tz": (pa.array([UTC_TIME, None, None], pa.timestamp("us", "UTC")), "timestamptz", [UTC_TIME, None, None]),
    "oslo": (
        pa.array([UTC_TIME, None, None], pa.timestamp("us", "Europe/Oslo")),
        "timestamptz",
        [UTC_TIME, None, None],
    ),
    "ts": (pa.array([NAIVE, None, None], pa.timestamp("us")), "timestamp", [NAIVE, None, None]),
    "ts_s": (pa.array([0, -1, None], pa.timestamp("s")), "timestamp", [EPOCH_START, EPOCH_START - SECOND, None]),
    "ts_ns": (
        pa.array([1_999, -1, None], pa.timestamp("ns")),
        "timestamp",
        [EPOCH_START + MICRO, EPOCH_START - MICRO, None],
    ),
    "t32": (pa.array([time(1, 2, 3), None, None], pa.time32("s")), "time", [time(1, 2, 3), None, None]),
    "t64": (pa.array([time(1, 2, 3, 4), None, None], pa.time64("us")), "time", [time(1, 2, 3, 4), None, None]),
    "dur": (pa.array([timedelta(days=3, microseconds=-1), None, None]), "interval", [DURATION, None, None]),
    "list": (pa.array([[1, None], [], None]), "jsonb", [[1, None], [], None]),
    "struct": (pa.array([{"a": "é", "b": [1.5]}, None, {"a": None, "b": None}]), "jsonb", STRUCTS),
    "map": (pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())), "jsonb", [{"k": 1}, {}, None]),
    "nothing": (pa.nulls(3), "text", [None] * 3),
}


def test_every_type_arrives_as_it_is(postgres: str, ledger: Ledger) -> None:
    columns = {"id": pa.array([0, 1, 2]), **{name: values for name, (values, _, _) in EVERY_TYPE.items()}}
    run = drive(postgres, ledger)
    run.apply_batch(pa.RecordBatch.from_pydict(columns))
    rows = sorted(table_rows(postgres, TABLE), key=lambda row: row["id"])
    for name, (_, _, expected) in EVERY_TYPE.items():
        assert [row[name] for row in rows] == expected, name
    types = column_types(postgres, TABLE)
    names = {"timestamptz": "timestamp with time zone", "timestamp": "timestamp without time zone",
             "time": "time without time zone"}  # fmt: skip
    assert {name: types[name] for name in EVERY_TYPE} == {n: names.get(t, t) for n, (_, t, _) in EVERY_TYPE.items()}
    assert {row["_firnline_sink"] for row in rows} == {"demo/copy"}
    assert {row["_firnline_epoch"] for row in rows} == {1}


def test_the_columns_of_the_table_are_known(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger)
    assert run.sink.find_schema() is None
    run.apply_batch(pa.RecordBatch.from_pydict({n: v for n, (v, _, _) in EVERY_TYPE.items() if n != "nothing"}))
    schema = run.sink.find_schema()
    assert schema is not None
    assert schema.field("dec").type == pa.decimal128(38, 2)
    assert schema.field("tz").type == pa.timestamp("us", "UTC")
    assert "_firnline_epoch" not in schema.names
    run.sink.check_columns(pa.schema([(n, v.type) for n, (v, _, _) in EVERY_TYPE.items() if n != "nothing"]))
    with pytest.raises(SchemaError, match=r"'i32' of table lake\.events is integer"):
        run.sink.check_columns(pa.schema([("i32", pa.list_(pa.int64()))]))


def test_floats_keep_what_is_no_number(postgres: str, ledger: Ledger) -> None:
    values = [math.nan, math.inf, -math.inf, -0.0]
    drive(postgres, ledger).apply_batch(
        pa.RecordBatch.from_pydict(
            {"id": pa.array(range(4)), "f": pa.array(values), "g": pa.array(values, pa.float32())}
        )
    )
    with psycopg.connect(postgres) as db:
        rows = db.execute("SELECT f::text, g::text FROM lake.events ORDER BY id").fetchall()
    assert rows == [("NaN", "NaN"), ("Infinity", "Infinity"), ("-Infinity", "-Infinity"), ("-0", "-0")]


def test_rows_fit_the_types_of_a_table_that_exists(postgres: str, ledger: Ledger) -> None:
    """Types that have no encoding of their own are read by the server from text."""
    execute(
        postgres,
        "CREATE SCHEMA lake",
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN short AS varchar(3)",
        "CREATE TABLE lake.events (id integer, u uuid, ip inet, m mood, price numeric(10,2), word short,"
        " j json, tags text[], at timestamptz, day timestamp, n double precision, whole integer)",
    )
    batch = pa.RecordBatch.from_pydict(
        {
            "id": pa.array([1], pa.int64()),
            "u": pa.array(["6f1ed002-ab5e-4d5a-8f0a-5f2d1a1f4c11"]),
            "ip": pa.array(["10.0.0.1"]),
            "m": pa.array(["ok"]),
            "price": pa.array([12.345]),
            "word": pa.array(["abc"]),
            "j": pa.array(['{"a": 1}']),
            "tags": pa.array(["{a,b}"]),
            "at": pa.array([NAIVE], pa.timestamp("us")),
            "day": pa.array([date(2024, 1, 2)]),
            "n": pa.array([Decimal("1.5")], pa.decimal128(4, 2)),
            "whole": pa.array([3.0]),
        }
    )
    drive(postgres, ledger).apply_batch(batch)
    row = table_rows(postgres, TABLE)[0]
    assert str(row["u"]) == "6f1ed002-ab5e-4d5a-8f0a-5f2d1a1f4c11"
    assert (str(row["ip"]), row["m"], row["price"], row["word"]) == ("10.0.0.1", "ok", Decimal("12.35"), "abc")
    assert (row["j"], row["tags"], row["at"]) == ({"a": 1}, ["a", "b"], NAIVE.replace(tzinfo=UTC))
    assert (row["day"], row["n"], row["whole"]) == (datetime(2024, 1, 2), 1.5, 3)


def test_names_are_quoted(postgres: str, ledger: Ledger) -> None:
    table = 'la"ke.100% "x"; drop'
    execute(postgres, 'DROP SCHEMA IF EXISTS "la""ke" CASCADE')
    run = drive(postgres, ledger, table=table)
    for number in (1, 2):
        run.apply_batch(pa.RecordBatch.from_pydict({"id": [number], 'a"%s b': ["x"], "Order": [True]}))
    assert {row['a"%s b'] for row in table_rows(postgres, table)} == {"x"}
    run.edit(run.stage_edit("rollback", to_epoch=1), RestoreVersion(1))
    assert postgres_ids(postgres, table) == Counter([1])
    with pytest.raises(SchemaError, match="cannot have a column named"):
        run.apply_batch(pa.RecordBatch.from_pydict({"x" * 64: [1]}))


# -- bad rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["append", "upsert"])
@pytest.mark.parametrize("text_column", [False, True], ids=["direct", "staged"])
def test_bad_rows_become_dead_letters_and_no_other_row_is_lost(
    postgres: str, ledger: Ledger, write: str, text_column: bool
) -> None:
    execute(
        postgres,
        "CREATE SCHEMA lake",
        "CREATE TABLE lake.events (id bigint PRIMARY KEY, name varchar(5) NOT NULL, n integer CHECK (n <> 13)"
        + (", u uuid)" if text_column else ")"),
    )
    count = 2000
    names: list[str | None] = [f"n{number % 10}" for number in range(count)]
    numbers = [number if number != 13 else 14 for number in range(count)]
    names[7], names[500], names[1999] = "a\0b", "too long", None
    numbers[3], numbers[1000] = 13, 2**31
    columns: dict[str, pa.Array] = {
        "id": pa.array(range(count)), "name": pa.array(names), "n": pa.array(numbers, pa.int64())
    }  # fmt: skip
    bad = {3, 7, 500, 1000, 1999}
    if text_column:
        uuids = [str(UUID(int=number)) for number in range(count)]
        uuids[42] = "no uuid"
        columns["u"] = pa.array(uuids)
        bad.add(42)
    run = drive(postgres, ledger, write=write, on_bad_row="dead_letter")
    receipt = run.apply_batch(pa.RecordBatch.from_pydict(columns))
    assert receipt.epoch == 1
    assert postgres_ids(postgres, TABLE) == Counter(set(range(count)) - bad)
    letters = read_all_letters(ledger)
    assert {letter.row for letter in letters} == bad
    reasons = {letter.row: letter.reason for letter in letters}
    assert "check constraint" in reasons[3]
    assert "too long" in reasons[500]
    assert reasons[1000] == "the value of column 'n' does not fit its type int4"
    assert [letter.values["n"] for letter in letters if letter.row == 1000] == [2**31]


@pytest.mark.parametrize("raised", ["45000", "assert_failure", "no_data_found"])
def test_a_row_that_a_trigger_refuses_is_a_bad_row(postgres: str, ledger: Ledger, raised: str) -> None:
    execute(
        postgres,
        "CREATE SCHEMA lake",
        "CREATE TABLE lake.events (id bigint)",
        "CREATE FUNCTION lake.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.id = 3 THEN RAISE EXCEPTION 'no threes' USING ERRCODE = '{raised}'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER refuse BEFORE INSERT ON lake.events FOR EACH ROW EXECUTE FUNCTION lake.refuse()",
    )
    run = drive(postgres, ledger, on_bad_row="dead_letter")
    run.apply([{"id": number} for number in range(6)])
    assert postgres_ids(postgres, TABLE) == Counter([0, 1, 2, 4, 5])
    assert [(letter.row, letter.reason) for letter in read_all_letters(ledger)] == [(3, "no threes")]


def test_a_bad_row_stops_a_sink_that_says_so(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger)
    with pytest.raises(BadRowError, match=r"row demo/1/numbers/1: invalid byte sequence"):
        run.apply_batch(pa.RecordBatch.from_pydict({"id": [1, 2], "name": ["a", "b\0"]}))
    assert table_rows(postgres, TABLE) == []
    assert run.sink.load().epoch == 0


def test_a_row_twice_in_one_epoch_is_bad_the_second_time(postgres: str, ledger: Ledger) -> None:
    execute(postgres, "CREATE SCHEMA lake", "CREATE TABLE lake.events (id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    run = drive(postgres, ledger, on_bad_row="dead_letter")
    run.apply_batch(pa.RecordBatch.from_pydict({"id": [1, 2, 1, 3, 2]}))
    assert postgres_ids(postgres, TABLE) == Counter([1, 2, 3])
    assert [letter.row for letter in read_all_letters(ledger)] == [2, 4]


def test_when_the_newest_change_of_a_key_is_bad_the_one_before_counts(postgres: str, ledger: Ledger) -> None:
    """So a repeated delivery, which leaves the dead letter out, has the same result."""
    execute(postgres, "CREATE SCHEMA lake", "CREATE TABLE lake.events (id bigint PRIMARY KEY, v integer CHECK (v > 0))")
    run = drive(postgres, ledger, write="upsert", on_bad_row="dead_letter")
    run.apply([{"id": 1, "v": 1, "_sequence": 1}, {"id": 1, "v": -1, "_sequence": 2}, {"id": 2, "v": 5}])
    assert {row["id"]: row["v"] for row in table_rows(postgres, TABLE)} == {1: 1, 2: 5}
    assert [letter.values["v"] for letter in read_all_letters(ledger)] == [-1]


def test_what_concerns_the_table_is_no_bad_row(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, on_bad_row="dead_letter")
    run.apply(rows(1))
    limited = limited_role(postgres, "GRANT USAGE ON SCHEMA lake, firnline TO limited",
                           "GRANT SELECT, UPDATE, INSERT ON firnline.checkpoints TO limited")  # fmt: skip
    other = drive(limited, ledger, on_bad_row="dead_letter", generation=2)
    with pytest.raises(SinkError, match="permission denied for table events") as failed:
        other.apply(rows(2))
    assert not isinstance(failed.value, BadRowError)
    assert read_all_letters(ledger) == []
    with pytest.raises(SinkError, match="lacks INSERT"):
        other.sink.check()


# -- columns ----------------------------------------------------------------------------------------------


def test_columns_are_added_or_refused(postgres: str, ledger: Ledger) -> None:
    execute(postgres, "CREATE SCHEMA lake", "CREATE TABLE lake.events (id bigint)")
    strict = drive(postgres, ledger, evolution="fail")
    strict.apply(rows(1))
    assert list(table_rows(postgres, TABLE)[0]) == ["id"], "no column is added to a table that may not change"
    with pytest.raises(SchemaError, match="lacks the column 'name'"):
        strict.apply(rows(2, name="x"))
    plan, problems = strict.sink.plan_return(0, ())
    assert "do not say which epoch" in problems[0].message
    assert plan.version_then is None
    run = drive(postgres, ledger, generation=2)
    run.apply(rows(2, name="x"))
    assert {row["id"]: row["name"] for row in table_rows(postgres, TABLE)} == {1: None, 2: "x"}


def test_a_numeric_column_gets_more_digits_but_never_rounds(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger)
    run.apply_batch(pa.RecordBatch.from_pydict({"d": pa.array([Decimal("1.25")], pa.decimal128(5, 2))}))
    run.apply_batch(pa.RecordBatch.from_pydict({"d": pa.array([Decimal("123456.75")], pa.decimal128(10, 2))}))
    assert column_types(postgres, TABLE)["d"] == "numeric(10,2)"
    with pytest.raises(SchemaError, match="would round") as failed:
        run.apply_batch(pa.RecordBatch.from_pydict({"d": pa.array([Decimal("1.255")], pa.decimal128(10, 3))}))
    assert "TYPE numeric(11,3)" in failed.value.hint
    assert len(table_rows(postgres, TABLE)) == 2


def test_a_table_that_may_forget_rows_is_refused(postgres: str, ledger: Ledger) -> None:
    execute(postgres, "CREATE SCHEMA lake", "CREATE UNLOGGED TABLE lake.events (id bigint)",
            "CREATE VIEW lake.view AS SELECT 1 AS id")  # fmt: skip
    with pytest.raises(SchemaError, match="unlogged"):
        drive(postgres, ledger).sink.check()
    with pytest.raises(SchemaError, match="is no table"):
        drive(postgres, ledger, table="lake.view", generation=2).sink.check()


def test_each_row_may_have_its_id(postgres: str, ledger: Ledger) -> None:
    drive(postgres, ledger, event_id=True).apply(rows(7, 8))
    assert [row["_firnline_id"] for row in table_rows(postgres, TABLE)] == ["demo/1/numbers/0", "demo/1/numbers/1"]


# -- changes by key ---------------------------------------------------------------------------------------


def test_of_one_key_the_newest_change_counts(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, write="upsert")
    run.apply([{"id": 1, "v": "c", "_sequence": 3}, {"id": 1, "v": "a", "_sequence": 1}, {"id": 2, "v": "x"}])
    run.apply([{"id": 1, "v": "d"}, {"id": 2, "v": None, "_op": "delete"}, {"id": 3, "v": None, "_op": "delete"}])
    assert {row["id"]: row["v"] for row in table_rows(postgres, TABLE)} == {1: "d"}
    run.apply([{"id": 1, "v": None, "_op": "delete", "_sequence": 1}, {"id": 1, "v": "e", "_sequence": 2}])
    assert {row["id"]: row["v"] for row in table_rows(postgres, TABLE)} == {1: "e"}
    assert {"_op", "_sequence"}.isdisjoint(table_rows(postgres, TABLE)[0])


def test_records_are_ordered_by_a_column_and_delete_by_a_value(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, write="upsert", records=True, sequence_by="at", delete_when={"op": ("D",)})
    run.apply([{"id": 1, "at": 5.0, "op": "I"}, {"id": 1, "at": math.nan, "op": "I"}, {"id": 2, "at": 5.0, "op": "I"}])
    run.apply([{"id": 1, "at": 4.0, "op": "U"}, {"id": 2, "at": 4.0, "op": "D"}])
    assert {row["id"]: (row["at"], row["op"]) for row in table_rows(postgres, TABLE)} == {1: (5, "I"), 2: (5, "I")}
    run.apply([{"id": 1, "at": 5.0, "op": "U"}, {"id": 2, "at": 6.0, "op": "D"}, {"id": 3, "at": None, "op": "I"}])
    assert {row["id"]: row["op"] for row in table_rows(postgres, TABLE)} == {1: "U", 3: "I"}


def test_a_null_key_is_held_where_the_index_holds_it(postgres: str, ledger: Ledger) -> None:
    execute(postgres, "CREATE SCHEMA lake", "CREATE TABLE lake.events (id bigint, v text)",
            "CREATE UNIQUE INDEX ON lake.events (id) NULLS NOT DISTINCT")  # fmt: skip
    run = drive(postgres, ledger, write="upsert")
    run.apply([{"id": None, "v": "a"}, {"id": 1, "v": "b"}])
    run.apply([{"id": None, "v": "c"}, {"id": 1, "v": "b"}])
    assert {row["id"]: row["v"] for row in table_rows(postgres, TABLE)} == {None: "c", 1: "b"}
    run.apply([{"id": None, "v": "", "_op": "delete"}, {"id": 1, "v": "z"}])
    assert {row["id"]: row["v"] for row in table_rows(postgres, TABLE)} == {1: "z"}


def test_an_upsert_needs_a_unique_index(postgres: str, ledger: Ledger) -> None:
    execute(postgres, "CREATE SCHEMA lake", "CREATE TABLE lake.events (id bigint, v text)")
    run = drive(postgres, ledger, write="upsert")
    with pytest.raises(SchemaError, match="no unique index on id"):
        run.sink.check()
    with pytest.raises(SchemaError, match="no unique index on id"):
        run.apply(rows(1))


# -- going back -------------------------------------------------------------------------------------------


def test_a_rollback_touches_its_own_rows_only(postgres: str, tmp_path: Path) -> None:
    runs = [
        drive(postgres, Ledger(LocalStorage(str(tmp_path / name)), PIPELINE), name=name) for name in ("copy", "other")
    ]
    for run, first in zip(runs, (0, 100), strict=True):
        for number in (1, 2, 3):
            run.apply(rows(first + number))
    execute(postgres, "INSERT INTO lake.events (id) VALUES (1000)")
    a, b = runs
    plan, problems = a.sink.plan_return(1, ())
    assert (plan.version_then, plan.rows_removed, problems) == (1, 2, [])
    a.edit(a.stage_edit("rollback", to_epoch=1), RestoreVersion(1))
    assert postgres_ids(postgres, TABLE) == Counter([1, 101, 102, 103, 1000])
    b.apply(rows(104))
    a.apply(rows(5))
    a.edit(a.stage_edit("fresh", truncate=True), ReplaceRows())
    assert postgres_ids(postgres, TABLE) == Counter([101, 102, 103, 104, 1000])


def test_an_epoch_whose_rows_were_removed_is_no_way_back(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger)
    for number in (1, 2, 3):
        run.apply(rows(number))
    run.edit(run.stage_edit("rollback", to_epoch=1), RestoreVersion(1))
    run.apply(rows(5))  # epoch 5
    for gone in (2, 3):
        with pytest.raises(RollbackRefusedError, match="removed the rows of epochs 2 to 3"):
            run.sink.version_of(gone)
        with pytest.raises(RollbackRefusedError):
            run.sink.edit(run.stage_edit("rollback", to_epoch=gone), RestoreVersion(gone), run.entry)
    assert run.sink.find_missing(RestoreVersion(2)) != []
    assert postgres_ids(postgres, TABLE) == Counter([1, 5])
    run.edit(run.stage_edit("rollback", to_epoch=4), RestoreVersion(4))
    assert postgres_ids(postgres, TABLE) == Counter([1])

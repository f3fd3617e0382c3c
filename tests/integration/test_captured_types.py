"""Every kind of column goes all the way: from a database into a Delta table and the schema history."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from firnline.history.schemas import load_schema_history
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.schema import type_to_text
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import captured, execute
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end

MICROS = pa.timestamp("us", "UTC")
NOON = datetime(2024, 2, 29, 12, 30, 0, 250_000, UTC)
# Native type, a value in SQL, the type in tables, the value there.
Case = tuple[str, str, pa.DataType, Any]
BOTH: list[Case] = [
    ("smallint", "-7", pa.int32(), -7),
    ("bigint", "9007199254740993", pa.int64(), 9007199254740993),
    ("double precision", "2.5", pa.float64(), 2.5),
    ("numeric(10,2)", "1.25", pa.decimal128(10, 2), Decimal("1.25")),
    ("varchar(20)", "'z\u00fcrich'", pa.string(), "z\u00fcrich"),
    ("date", "'2024-02-29'", pa.date32(), date(2024, 2, 29)),
]
POSTGRES: list[Case] = [
    ("integer", "7", pa.int32(), 7),
    ("oid", "4000000000", pa.int64(), 4000000000),
    ("real", "1.5", pa.float32(), 1.5),
    ("numeric", "1.2345678901234567890", pa.string(), "1.2345678901234567890"),
    ("numeric(50,2)", "1.25", pa.string(), "1.25"),
    ("boolean", "true", pa.bool_(), True),
    ("bytea", "'\\xff00'", pa.binary(), b"\xff\0"),
    ("time", "'12:30:00.25'", pa.string(), "12:30:00.250000"),
    ("timestamp", "'2024-02-29 12:30:00.25'", MICROS, NOON),
    ("timestamptz", "'2024-02-29 14:30:00.25+02'", MICROS, NOON),
    ("jsonb", "'{\"a\": 1}'", pa.string(), '{"a": 1}'),
    ("integer[]", "'{1,2}'", pa.string(), "{1,2}"),
]
MYSQL: list[Case] = [
    ("tinyint", "-7", pa.int32(), -7),
    ("int unsigned", "4000000000", pa.int64(), 4000000000),
    ("bigint unsigned", "18446744073709551615", pa.decimal128(20, 0), Decimal(18446744073709551615)),
    ("float", "1.5", pa.float32(), 1.5),
    ("bit(1)", "b'1'", pa.bool_(), True),
    ("blob", "x'ff00'", pa.binary(), b"\xff\0"),
    ("time(6)", "'12:30:00.25'", pa.string(), "12:30:00.250000"),
    ("datetime(6)", "'2024-02-29 12:30:00.25'", MICROS, NOON),
    ("year", "2024", pa.int32(), 2024),
    ("enum('x','y')", "'y'", pa.string(), "y"),
]


def statements(table: str, cases: list[Case]) -> list[str]:
    columns = ", ".join(f"c{number} {case[0]}" for number, case in enumerate(cases))
    values = ", ".join(case[1] for case in cases)
    return [
        f"CREATE TABLE {table} (id bigint PRIMARY KEY, {columns})",
        f"INSERT INTO {table} VALUES (1, {values})",
        f"INSERT INTO {table} (id) VALUES (2)",
    ]


def check(options: PipelineOptions, folder: Path, cases: list[Case]) -> None:
    """The table has every value and a null, with its type; the schema history names the same types."""
    table = DeltaTable(str(folder / "history")).to_pyarrow_table().sort_by("id")
    (version,) = load_schema_history(open_pipeline(options))
    recorded = {column.name: column.type for column in version.version.columns}
    for number, (native, _, kind, value) in enumerate(cases):
        name = f"c{number}"
        found = table[name]
        assert (found.type, found.to_pylist()) == (kind, [value, None]), native
        assert recorded[name] == type_to_text(pa.field(name, kind)), native
    assert recorded["id"] == "int64"


def test_postgres(postgres: str, tmp_path: Path) -> None:
    cases = BOTH + POSTGRES
    create, *inserts = statements("orders", cases)
    execute(postgres, create)
    options = captured(postgres, tmp_path)
    run_to_end(options)
    execute(postgres, *inserts)
    run_to_end(options)
    check(options, tmp_path, cases)


@pytest.mark.mysql
@pytest.mark.mariadb
def test_mysql(binlog_server: BinlogServer, tmp_path: Path) -> None:
    cases = BOTH + MYSQL
    create, *inserts = statements("shop.orders", cases)
    binlog_server.run("CREATE DATABASE shop", create)
    source = MySqlSourceOptions("db", f"{binlog_server.dsn}/shop", tables=("orders",))
    sink = DeltaSinkOptions("history", str(tmp_path / "history"), input="db.orders")
    options = PipelineOptions(name="shop", sources=(source,), sinks=(sink,))
    run_to_end(options)
    binlog_server.run(*inserts)
    run_to_end(options)
    check(options, tmp_path, cases)

"""Statements in the log of MySQL and MariaDB, as servers write them: tables end as the database has them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import SourceGapError
from firnline.options import BatchOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.binlog import end_of, flat, log_of, reading
from tests.support.captured import delta_rows
from tests.support.mariadb import running_mariadb
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end

COLUMNS = "(id int PRIMARY KEY, amount int, note varchar(50))"
PARTITIONS = "PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (100), PARTITION p1 VALUES LESS THAN (1000))"
ROWS = "VALUES (1, 1, 'a'), (2, 2, 'b')"
TABLES = ("moved", "parted", "given", "again", "later", "graded")


def run_as(server: BinlogServer, *statements: str, **settings: Any) -> None:
    """Run statements on a connection with settings."""
    with contextlib.closing(server.connect(**settings)) as db, db.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def captured(server: BinlogServer, folder: Path, tables: Sequence[str]) -> PipelineOptions:
    return PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{server.dsn}/shop", tuple(tables), on_ddl="resnapshot"),),
        sinks=tuple(
            DeltaSinkOptions(f"t{number}", str(folder / table), input=f"db.{table}", write="upsert", key=("id",))
            for number, table in enumerate(tables)
        ),
        batch=BatchOptions(max_events=1000),
    )


def check(server: BinlogServer, folder: Path, tables: Sequence[str], columns: str = "id, amount, note") -> None:
    for table in tables:
        held = sorted(server.run(f"SELECT {columns} FROM shop.`{table}`"), key=repr)
        assert (table, delta_rows(folder / table, *columns.split(", "))) == (table, held)


def test_altered_tables_end_as_the_database_has_them(binlog_server: BinlogServer, tmp_path: Path) -> None:
    server = binlog_server
    server.run("CREATE DATABASE shop")
    for table in (*TABLES, "fresh", "parts"):
        server.run(
            f"CREATE TABLE shop.{table} {COLUMNS} {PARTITIONS if table in ('parted', 'parts') else ''}",
            f"INSERT INTO shop.{table} {ROWS.replace('1, 1', '77, 7') if table in ('fresh', 'parts') else ROWS}",
        )
    options = captured(server, tmp_path, TABLES)
    run_to_end(options)
    check(server, tmp_path, TABLES)
    is_mariadb = "mariadb" in server.run("SELECT version()")[0][0].lower()
    server.run("ALTER TABLE shop.later DROP note")
    run_to_end(options)
    server.run(
        "RENAME TABLE shop.moved TO shop.old",
        "SET SESSION sql_mode = 'ANSI_QUOTES'",
        'ALTER TABLE "shop"."fresh" RENAME TO "shop"."moved"',
        "SET SESSION sql_mode = DEFAULT",
        "ALTER TABLE shop.parts EXCHANGE PARTITION p0 WITH TABLE shop.given",
        "ALTER TABLE shop.again DROP COLUMN note, ADD COLUMN note varchar(50)",
        "ALTER TABLE shop.later ADD note varchar(50)",
        "ALTER TABLE shop.parted CONVERT PARTITION p0 TO TABLE shop.cold"
        if is_mariadb
        else "ALTER TABLE shop.parted TRUNCATE PARTITION p0",
        "ALTER TABLE shop.graded ADD COLUMN grade varchar(10) COMMENT 'grade #1' DEFAULT 'B'",
    )
    run_to_end(options)
    run_to_end(options)
    check(server, tmp_path, TABLES)
    check(server, tmp_path, ["graded"], "id, grade")


def test_tables_are_emptied_however_it_is_written(binlog_server: BinlogServer) -> None:
    """The bytes of a statement are of the client's character set; a name may have any sign."""
    server = binlog_server
    names = ("bücher", "or#ders", "it's -- a `name`", "drüben")
    quoted = ["shop.`" + name.replace("`", "``") + "`" for name in names]
    server.run("CREATE DATABASE shop", *(f"CREATE TABLE {name} {COLUMNS}" for name in quoted))

    def work() -> None:
        run_as(server, *(f"TRUNCATE TABLE {name}" for name in quoted), charset="latin1")
        run_as(
            server,
            f"DROP TABLE {quoted[3]}",
            f"CREATE TABLE {quoted[3]} AS SELECT id FROM {quoted[0]}",
            charset="latin1",
        )
        run_as(server, "SET sql_mode = 'ANSI_QUOTES'", 'TRUNCATE "shop" . "bücher" # why', charset="cp1250")

    decoded = log_of(server, work, cuts=7)
    emptied = [f"shop.{name}" for name in (*names, names[0])]
    assert [(table, op) for table, op, _ in flat(decoded)] == [(table, "TRUNCATE") for table in emptied]
    assert [one.tables for one in decoded.ddl] == [("shop.drüben",)] * 2


@pytest.mark.mariadb
def test_statements_of_mariadb(mariadb: BinlogServer) -> None:
    mariadb.run("CREATE DATABASE shop", f"CREATE TABLE shop.a {COLUMNS}")
    decoded = log_of(
        mariadb,
        lambda: mariadb.run(
            "SET STATEMENT lock_wait_timeout = 10 FOR TRUNCATE TABLE shop.a",
            "TRUNCATE TABLE shop.a NOWAIT",
            "SET STATEMENT lock_wait_timeout = 9 FOR ALTER TABLE shop.a ADD COLUMN grade varchar(10) DEFAULT 'B'",
            "RENAME TABLE shop.a NOWAIT TO shop.b",
            "DROP TABLE shop.b WAIT 5",
        ),
        cuts=5,
    )
    assert [(table, op) for table, op, _ in flat(decoded)] == [("shop.a", "TRUNCATE")] * 2
    effects = [{table: effect.again for table, effect in one.silent.items()} for one in decoded.ddl]
    assert effects == [{"shop.a": "read"}, {"shop.a": "replace", "shop.b": "replace"}, {"shop.b": "replace"}]


@pytest.mark.mariadb
@pytest.mark.usefixtures("started_mariadb")
def test_a_server_that_has_names_in_small_letters() -> None:
    with running_mariadb("--lower-case-table-names=1") as server:
        server.run("CREATE DATABASE shop", f"CREATE TABLE shop.orders {COLUMNS}")
        work = ("TRUNCATE TABLE Shop.ORDERS", "ALTER TABLE shop.Orders DROP note", "DROP DATABASE SHOP")
        decoded = log_of(server, lambda: server.run(*work), cuts=3)
    assert [(table, op) for table, op, _ in flat(decoded)] == [("shop.orders", "TRUNCATE")]
    assert [list(one.silent) for one in decoded.ddl] == [["shop.orders"], ["shop.*"]]


def test_rows_that_statements_change_stop_the_stream(binlog_server: BinlogServer) -> None:
    server = binlog_server
    server.run("CREATE DATABASE shop", f"CREATE TABLE shop.orders {COLUMNS}")
    changes = ["INSERT INTO shop.orders VALUES (100, 1, 'lost')"]
    if "mariadb" in server.run("SELECT version()")[0][0].lower():
        changes.append("SET STATEMENT max_statement_time = 100 FOR UPDATE shop.orders SET note = 'x'")
        changes.append("ANALYZE UPDATE shop.orders SET note = 'y'")
    for change in changes:
        start = end_of(server)
        run_as(server, "SET SESSION binlog_format = 'STATEMENT'", change, database="mysql")
        with reading(server, start) as log, pytest.raises(SourceGapError, match="changed by a statement"):
            log.read(1)

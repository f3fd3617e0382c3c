"""What a captured server must have: each lack is refused or named, with the statement that mends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from firnline.errors import ConfigError, SourceGapError
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.cdc.options import LogSourceOptions
from firnline.sources.mysql import events as ev
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.mysql.server import Server, setting_remarks
from firnline.sources.mysql.stream import MySqlStream
from firnline.sources.postgres.options import PostgresSourceOptions
from tests.support.captured import ORDERS, captured, delta_rows, execute, query
from tests.support.pipelines import run_once, run_to_end


def test_no_room_for_a_slot(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS)
    most = int(query(postgres, "SHOW max_replication_slots")[0][0])
    options = captured(postgres, tmp_path)
    make = "SELECT pg_create_logical_replication_slot('other' || g, 'pgoutput')"
    try:
        query(postgres, f"{make} FROM generate_series(1, {most}) g")
        with pytest.raises(ConfigError, match="replication slots are in use") as caught:
            open_pipeline(options).sources["db"].check()
        assert f"ALTER SYSTEM SET max_replication_slots = {most + 10};" in str(caught.value.hint)
        assert run_once(options).error_code == "config"
    finally:
        query(postgres, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    run_to_end(options)


def test_a_role_that_may_not_read_a_table(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS, "CREATE PUBLICATION shop FOR TABLE orders")
    execute(postgres, "DROP ROLE IF EXISTS reader", "CREATE ROLE reader LOGIN REPLICATION PASSWORD 's3cret'")
    try:
        parts = urlsplit(postgres)
        dsn = postgres.replace(parts.netloc, f"reader:s3cret@127.0.0.1:{parts.port}")
        options = captured(dsn, tmp_path, publication="shop")
        with pytest.raises(ConfigError, match=r"may not read public\.orders") as caught:
            open_pipeline(options).sources["db"].check()
        execute(postgres, *str(caught.value.hint).partition("; or ")[0].split("; "))
        run_to_end(options)
        execute(postgres, "INSERT INTO orders VALUES (1, 1, 'x')")
        run_to_end(options)
        assert delta_rows(tmp_path / "current", "id") == [(1,)]
    finally:
        execute(postgres, "DROP OWNED BY reader", "DROP ROLE reader")


def test_the_statements_for_a_publication_break_no_application(postgres: str, tmp_path: Path) -> None:
    """The server refuses updates of a published table that has no identity."""
    execute(postgres, ORDERS, 'CREATE TABLE "Audit Log" (n int)', 'INSERT INTO "Audit Log" VALUES (1)')
    execute(postgres, "CREATE PUBLICATION shop FOR TABLE orders")
    options = captured(postgres, tmp_path, tables=("orders", "Audit Log"), publication="shop")
    source = open_pipeline(options).sources["db"]
    (remark,) = source.remarks()
    assert "publication shop has not the table public.Audit Log" in remark
    execute(postgres, *remark.partition("(")[2].rstrip(")").split("; then "))
    execute(postgres, 'UPDATE "Audit Log" SET n = 2')
    assert source.remarks() == []
    execute(postgres, 'ALTER TABLE "Audit Log" REPLICA IDENTITY DEFAULT')
    (remark,) = source.remarks()
    assert "the server refuses the application's own updates" in remark
    execute(postgres, remark.partition("(")[2].rstrip(")"), 'UPDATE "Audit Log" SET n = 3')


def test_own_tables_are_not_captured(postgres: str, tmp_path: Path) -> None:
    """A publication of all tables has Firnline's own ones, too."""
    execute(postgres, ORDERS, "CREATE SCHEMA IF NOT EXISTS firnline", "CREATE TABLE firnline.own (id int PRIMARY KEY)")
    execute(postgres, "CREATE PUBLICATION every FOR ALL TABLES")
    options = captured(postgres, tmp_path, tables=("*.*",), publication="every")
    options = replace(options, sinks=(replace(options.sinks[0], input="db"),))
    run_to_end(options)
    execute(postgres, "INSERT INTO firnline.own VALUES (1)", "INSERT INTO orders VALUES (1, 1, 'x')")
    run_to_end(options)
    assert set(delta_rows(tmp_path / "history", "_table")) == {("public.orders",)}


def test_settings_that_are_not_the_best_are_named() -> None:
    server = Server(("db", 3306), "8.4.0", False, "", 1, False, "CRC32", {"binlog_row_image": "MINIMAL"})
    image, gtids = setting_remarks(server)
    assert "SET PERSIST binlog_row_image = 'FULL'" in image
    assert "SET PERSIST enforce_gtid_consistency = ON; SET PERSIST gtid_mode = OFF_PERMISSIVE" in gtids
    assert setting_remarks(replace(server, has_gtids=True, settings={"binlog_row_image": "FULL"})) == []


def test_lost_events_stop_the_stream() -> None:
    stream = MySqlStream("mysql://a:b@127.0.0.1", lambda _: True, 5)
    incident = ev.make_event(ev.Header(0, ev.INCIDENT, 1, 0, 700, 0), b"\1\0\0")
    with pytest.raises(SourceGapError, match="INCIDENT: the server lost events"):
        stream._take(memoryview(incident), True)


def test_a_role_that_may_not_use_a_schema(postgres: str, tmp_path: Path) -> None:
    """Without `publication`: the hint of dry-run and that of a run have the GRANT."""
    execute(postgres, 'CREATE SCHEMA "Sales"', 'CREATE TABLE "Sales".orders (id int PRIMARY KEY)')
    execute(postgres, "DROP ROLE IF EXISTS reader", "CREATE ROLE reader LOGIN REPLICATION PASSWORD 's3cret'")
    execute(postgres, "GRANT CREATE ON DATABASE postgres TO reader", 'ALTER TABLE "Sales".orders OWNER TO reader')
    try:
        parts = urlsplit(postgres)
        dsn = postgres.replace(parts.netloc, f"reader:s3cret@127.0.0.1:{parts.port}")
        options = captured(dsn, tmp_path, tables=("Sales.orders",))
        options = replace(options, sinks=(replace(options.sinks[0], input="db.Sales.orders"),))
        with pytest.raises(ConfigError, match="may not use the schema") as caught:
            open_pipeline(options).sources["db"].check()
        error = run_once(options).result.error
        assert error is not None
        assert caught.value.hint == error.hint == 'GRANT USAGE ON SCHEMA "Sales" TO "reader";'
        execute(postgres, str(error.hint))
        run_to_end(options)
    finally:
        execute(postgres, 'DROP SCHEMA "Sales" CASCADE', "DROP OWNED BY reader", "DROP ROLE reader")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        (PostgresSourceOptions("db", "mysql://u:p@h/d", ("orders",)), "Write `type: mysql` in source db"),
        (MySqlSourceOptions("db", "postgresql://u:p@h/d", ("orders",)), "Write `type: postgres` in source db"),
        (PostgresSourceOptions("db", "oracle://u:p@h/d", ("orders",)), "Write a dsn that begins with postgresql://"),
    ],
    ids=["mysql", "postgres", "unknown"],
)
def test_an_address_of_another_kind_of_server(source: LogSourceOptions, hint: str, tmp_path: Path) -> None:
    options = replace(captured("", tmp_path), sources=(source,))
    with pytest.raises(ConfigError, match=f"source 'db' has type {source.type}, and its dsn begins with") as caught:
        open_pipeline(options)
    assert hint in str(caught.value.hint)


def test_a_port_that_is_no_captured_table(tmp_path: Path) -> None:
    options = captured("postgresql://u:p@h/d", tmp_path, tables=("orders", "billing.*", "!billing.x"))
    options = replace(options, sinks=(replace(options.sinks[0], input="db.ordres"),))
    with pytest.raises(ConfigError, match='has no port "ordres"') as caught:
        open_pipeline(options)
    assert caught.value.hint == "Did you mean db.orders? Read one of these: db, db.orders, db.billing.*."

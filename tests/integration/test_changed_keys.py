"""Tables whose key changes, in one sink of all captured tables: they are read again, and all others go on."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from firnline.cli.main import run_command
from firnline.errors import SchemaError
from firnline.history.edits.rollback import Rollback
from firnline.options import BatchOptions, PipelineOptions, SinkOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions
from firnline.spec.build import build_options
from firnline.spec.loading import load_spec
from tests.integration.test_captured_tables import Database
from tests.support.captured import Capturing, delta_rows, position, query, wait_until
from tests.support.pipelines import run_once, run_to_end

COLUMNS = "id, amount, note"
FILL = "INSERT INTO @orders VALUES (1, 1, 'a'), (2, 2, 'b'), (3, 3, 'c')"


@pytest.fixture
def database(captured_server: Any, tmp_path: Path) -> Database:
    return Database(captured_server, tmp_path)


def drop_key(database: Database, table: str = "orders") -> str:
    return "DROP PRIMARY KEY" if database.is_binlog else f"DROP CONSTRAINT {table}_pkey"


def change_key(database: Database, key: str, table: str = "orders") -> str:
    """The statement that gives a table another key."""
    return f"ALTER TABLE @{table} {drop_key(database, table)}, ADD PRIMARY KEY ({key})"


def not_null(database: Database, column: str, kind: str) -> str:
    """The statement that makes a column one that a key may have."""
    if database.is_binlog:
        return f"ALTER TABLE @orders MODIFY {column} {kind} NOT NULL"
    return f"ALTER TABLE @orders ALTER COLUMN {column} SET NOT NULL"


def prepared(database: Database) -> PipelineOptions:
    """The pipeline, with three orders that were read or inserted."""
    options = database.options()
    database.run(FILL)
    run_to_end(options)
    database.run("INSERT INTO @lines VALUES ('l', 'r', 1)", "UPDATE @orders SET amount = 10 WHERE id = 1")
    run_to_end(options)
    database.check("orders", COLUMNS)
    return options


def check_all(database: Database) -> None:
    """All tables are what the database holds, by two readers."""
    database.check("orders", COLUMNS)
    database.check("lines", "note, region, number")
    held = duckdb.sql(f"SELECT {COLUMNS} FROM delta_scan('{database.folder}/lake/orders')") if has_delta() else None
    if held is not None:
        assert sorted(held.fetchall(), key=repr) == database.rows("orders", COLUMNS)


def has_delta() -> bool:
    try:
        duckdb.sql("LOAD delta")
    except duckdb.Error:
        return False
    return True


def test_a_table_with_another_key_is_read_again_and_others_go_on(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows before and after the change are in one epoch; those of the old key lie beside each other by the new one."""
    options = prepared(database)
    database.run(
        "UPDATE @orders SET amount = 20 WHERE id = 2",
        "DELETE FROM @orders WHERE id = 3",
        change_key(database, "id, note"),
        "INSERT INTO @orders VALUES (1, 100, 'second'), (1, 101, 'third'), (4, 4, 'd')",
        "UPDATE @orders SET note = 'moved' WHERE id = 4",
        "INSERT INTO @lines VALUES ('l', 'r', 2)",
        "INSERT INTO @notes VALUES ('n')",
    )
    with caplog.at_level(logging.WARNING):
        run_to_end(options)
    warned = [one.getMessage() for one in caplog.records if "another key" in one.getMessage()]
    assert len(warned) == 1
    assert "its key was id and is id, note now" in warned[0]
    check_all(database)
    assert delta_rows(tmp_path / "lake" / "notes", "words", "_op") == [("n", "insert")]
    database.run("DELETE FROM @orders WHERE note = 'second'", "UPDATE @orders SET amount = 7 WHERE note = 'third'")
    run_to_end(options)
    check_all(database)
    assert run_once(options).result.epochs == 0
    name = f"{'shop' if database.is_binlog else 'public'}.orders"
    assert set(position(options).keys[name] or ()) == {"id", "note"}


def test_several_keys_in_one_epoch(database: Database, tmp_path: Path) -> None:
    options = prepared(database)
    database.run(
        change_key(database, "id, note"),
        "INSERT INTO @orders VALUES (1, 100, 'second')",
        "DELETE FROM @orders WHERE note = 'second'",
        not_null(database, "amount", "decimal(10,2)"),
        change_key(database, "amount"),
        "INSERT INTO @orders VALUES (1, 102, 'a')",
        "UPDATE @orders SET id = 5 WHERE amount = 102",
        change_key(database, "id"),
        "DELETE FROM @orders WHERE id = 2",
        "INSERT INTO @lines VALUES ('l', 'r', 3)",
    )
    run_to_end(options)
    check_all(database)
    database.run("UPDATE @orders SET amount = 8 WHERE id = 5", change_key(database, "id, note"))
    run_to_end(options)
    database.run("INSERT INTO @orders VALUES (5, 9, 'beside')")
    run_to_end(options)
    check_all(database)


def test_keys_change_while_a_run_goes_on(database: Database, tmp_path: Path) -> None:
    """Small epochs: the change, what comes behind it, and the snapshot are in epochs of their own."""
    options = replace(prepared(database), batch=BatchOptions(max_events=1))
    keys = ["id, note", "note", "id", "note, id"]
    with Capturing(options):
        for number, key in enumerate(keys, 1):
            database.run(
                change_key(database, key),
                f"INSERT INTO @orders VALUES ({number}00, 1, 'n{number}')",
                f"UPDATE @orders SET amount = {number} WHERE id = 1",
                f"UPDATE @orders SET id = {number}01 WHERE id = {number}00",
                f"INSERT INTO @lines VALUES ('l', 'r', {number}0)",
            )
            database.run(
                f"DELETE FROM @orders WHERE id = {number}01", f"INSERT INTO @orders VALUES ({number}02, 1, 'e{number}')"
            )
        wanted = database.rows("lines", "note, region, number")
        wait_until(lambda: delta_rows(tmp_path / "lake" / "lines", "note", "region", "number") == wanted)
        wait_until(
            lambda: delta_rows(tmp_path / "lake" / "orders", "id", "amount", "note") == database.rows("orders", COLUMNS)
        )
    run_to_end(options)
    check_all(database)


def test_an_emptied_table_takes_the_key_of_its_next_rows(database: Database, tmp_path: Path) -> None:
    options = prepared(database)
    database.run(change_key(database, "id, note"), "UPDATE @orders SET amount = 5", "DELETE FROM @orders")
    run_to_end(options)
    assert delta_rows(tmp_path / "lake" / "orders", "id") == []
    database.run("INSERT INTO @orders VALUES (1, 1, 'a'), (1, 1, 'b')")
    run_to_end(options)
    database.run("DELETE FROM @orders WHERE note = 'b'")
    run_to_end(options)
    check_all(database)


def test_a_table_loses_its_key_and_gets_one(database: Database, tmp_path: Path) -> None:
    """Without a key it is appended, after what it held was read again; with one it is upserted as before."""
    options = prepared(database)
    database.run(
        f"ALTER TABLE @orders {drop_key(database)}",
        "INSERT INTO @orders VALUES (1, 1, 'beside')",
        "INSERT INTO @lines VALUES ('l', 'r', 4)",
    )
    run_to_end(options)
    database.check("lines", "note, region, number")
    table = delta_rows(tmp_path / "lake" / "orders", "id", "note", "_op")
    assert table == sorted(((id_, note, "read") for id_, note in database.rows("orders", "id, note")), key=repr)
    database.run("INSERT INTO @orders VALUES (1, 2, 'more')")
    run_to_end(options)
    assert (1, "more", "insert") in delta_rows(tmp_path / "lake" / "orders", "id", "note", "_op")
    database.run(
        "ALTER TABLE @orders ADD PRIMARY KEY (id, note)",
        "UPDATE @orders SET amount = 50 WHERE note = 'more'",
        "DELETE FROM @orders WHERE note = 'beside'",
    )
    run_to_end(options)
    check_all(database)
    database.run("UPDATE @orders SET amount = 51", "DELETE FROM @orders WHERE note = 'more'")
    run_to_end(options)
    check_all(database)


def test_a_rollback_across_the_change(database: Database, tmp_path: Path) -> None:
    options = prepared(database)
    pipeline = open_pipeline(options)
    before = pipeline.load().epoch
    held = delta_rows(tmp_path / "lake" / "orders", "id", "amount", "note")
    database.run(
        "UPDATE @orders SET amount = 30 WHERE id = 3",
        change_key(database, "id, note"),
        "INSERT INTO @orders VALUES (1, 100, 'second')",
    )
    run_to_end(options)
    check_all(database)
    after = open_pipeline(options).load().epoch
    for epoch in reversed(range(before, after)):
        Rollback(open_pipeline(options), epoch).perform("person")
        if epoch == before:
            assert delta_rows(tmp_path / "lake" / "orders", "id", "amount", "note") == held
        run_to_end(options)
        check_all(database)
        database.run(f"INSERT INTO @orders VALUES (1, {epoch}, 'again {epoch}')")
        run_to_end(options)
        check_all(database)


def test_a_sink_that_comes_later_follows_every_key(database: Database, tmp_path: Path) -> None:
    options = prepared(database)
    database.run(
        "DELETE FROM @orders WHERE id = 3",
        change_key(database, "id, note"),
        "INSERT INTO @orders VALUES (1, 100, 'second')",
    )
    run_to_end(options)
    database.run("INSERT INTO @orders VALUES (1, 101, 'third')")
    copy: SinkOptions = DeltaPartsOptions(
        "copy", f"{tmp_path}/copy/{{table}}", input="db.*", write="upsert", start="beginning"
    )
    options = replace(options, sinks=(*options.sinks, copy))
    run_to_end(options)
    check_all(database)
    assert delta_rows(tmp_path / "copy" / "orders", "id", "amount", "note") == database.rows("orders", COLUMNS)


# -- replica identities -----------------------------------------------------------------------------------


def test_another_replica_identity(postgres: str, tmp_path: Path) -> None:
    """An index of other columns is another key; identity FULL is none: the primary key stays the key."""
    database = Database(postgres, tmp_path)
    options = prepared(database)
    name = "public.orders"
    first = position(options).snapshots[name].id
    database.run("ALTER TABLE orders REPLICA IDENTITY FULL", "UPDATE orders SET amount = 11 WHERE id = 1")
    run_to_end(options)
    check_all(database)
    assert position(options).snapshots[name].id == first
    database.run(
        "ALTER TABLE orders ALTER COLUMN note SET NOT NULL",
        "CREATE UNIQUE INDEX by_note ON orders (note)",
        "ALTER TABLE orders REPLICA IDENTITY USING INDEX by_note",
        "UPDATE orders SET id = 30 WHERE note = 'c'",
        "DELETE FROM orders WHERE id = 2",
        "INSERT INTO lines VALUES ('l', 'r', 9)",
    )
    run_to_end(options)
    check_all(database)
    assert position(options).keys[name] == ("note",)
    database.run("UPDATE orders SET note = 'z' WHERE id = 30", "ALTER TABLE orders REPLICA IDENTITY DEFAULT")
    database.run("UPDATE orders SET note = 'y' WHERE id = 30")
    run_to_end(options)
    check_all(database)
    assert position(options).keys[name] == ("id",)


# -- ways out ---------------------------------------------------------------------------------------------


SPEC = """
name: shop
home: {folder}/home
sources:
  db: {{type: {kind}, dsn: "{dsn}", tables: ["*"], snapshot: never}}
sinks:
  - {{name: current, table: "{folder}/lake/{{table}}", input: "db.*", write: upsert}}
"""


def test_a_table_that_is_never_read_is_read_once_when_a_person_says_so(
    captured_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops before the epoch is decided; the command of the hint, and a run, bring everything."""
    database = Database(captured_server, tmp_path)
    kind, dsn = ("mysql", f"{captured_server.dsn}/shop") if database.is_binlog else ("postgres", captured_server)
    spec = tmp_path / "firnline.yml"
    spec.write_text(SPEC.format(folder=tmp_path, kind=kind, dsn=dsn))
    monkeypatch.chdir(tmp_path)
    options = build_options(load_spec(str(spec), environ={}), environ={})
    run_to_end(options)
    database.run(FILL, "INSERT INTO @lines VALUES ('l', 'r', 1)")
    run_to_end(options)
    check_all(database)
    database.run(
        "UPDATE @orders SET amount = 20 WHERE id = 2",
        change_key(database, "id, note"),
        "INSERT INTO @orders VALUES (1, 100, 'second')",
        "INSERT INTO @lines VALUES ('l', 'r', 2)",
    )
    run_once(options)
    error = run_once(options).result.error
    assert isinstance(error, SchemaError)
    assert "its key was id and is id, note now" in error.message
    assert "`snapshot: never` forbids to read the table again" in error.message
    words = error.hint.rpartition("nothing is lost: firnline ")[2].split()
    assert words[0] == "snapshot"
    assert run_command([*words, "--yes"]) == 0
    run_to_end(options)
    check_all(database)
    database.run("DELETE FROM @orders WHERE note = 'second'", "INSERT INTO @lines VALUES ('l', 'r', 3)")
    run_to_end(options)
    check_all(database)


ALONE = """
name: shop
sources:
  db: {{type: {kind}, dsn: "{dsn}", tables: [orders]}}
sinks:
  - {{name: history, table: "{folder}/history", input: db.orders}}
"""
CURRENT = '  - {{name: {name}, type: delta, table: "{folder}/{name}", input: db.orders, write: upsert{more}}}\n'
COPY = '  - {{name: {name}, type: postgres, dsn: "{dsn}", table: lake.{name}, input: db.orders, write: upsert}}\n'


@pytest.mark.parametrize("kind", ["delta", "postgres"])
def test_a_sink_of_one_table_begins_anew(
    kind: str, captured_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops by name, and what the hint says brings all rows, one step after the other."""
    database = Database(captured_server, tmp_path)
    if kind == "postgres" and database.is_binlog:
        pytest.skip("one server for source and sink")
    source, dsn = ("mysql", f"{captured_server.dsn}/shop") if database.is_binlog else ("postgres", captured_server)
    monkeypatch.chdir(tmp_path)

    def options(*sinks: str, **more: str) -> PipelineOptions:
        text = "".join((ALONE, *sinks)).format(folder=tmp_path, kind=source, dsn=dsn, **more)
        (tmp_path / "firnline.yml").write_text(text)
        return build_options(load_spec("firnline.yml", environ={}), environ={})

    sink = CURRENT if kind == "delta" else COPY
    first = options(sink, name="current", more="")
    database.run(FILL)
    run_to_end(first)
    database.run(
        "UPDATE @orders SET amount = 20 WHERE id = 2",
        change_key(database, "note"),
        "INSERT INTO @orders VALUES (1, 100, 'second')",
        "DELETE FROM @orders WHERE note = 'c'",
    )
    error = run_once(first).result.error
    assert isinstance(error, SchemaError)
    assert "firnline run --once" in error.hint
    without = options()
    if kind != "delta":
        assert "firnline sinks forget SINK --yes" in error.hint
        assert run_command(["sinks", "forget", "current", "--yes"]) == 0
    run_to_end(without)
    again = options(sink, name="anew", more=", start: snapshot")
    run_to_end(again)
    if kind != "delta":
        words = error.hint.partition("for any other type: firnline ")[2].partition(". ")[0].split()
        assert words[:2] == ["snapshot", "--table"]
        assert run_command([*words, "--yes"]) == 0
        run_to_end(again)
    for statement in ("UPDATE @orders SET amount = 7 WHERE note = 'second'", "DELETE FROM @orders WHERE note = 'b'"):
        database.run(statement)
        run_to_end(again)
        held = (
            delta_rows(tmp_path / "anew", "id", "amount", "note")
            if kind == "delta"
            else sorted(query(captured_server, f"SELECT {COLUMNS} FROM lake.anew"), key=repr)
        )
        assert held == database.rows("orders", COLUMNS)


def test_a_sink_that_comes_after_a_change_that_no_sink_followed(
    captured_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fill waits at the change, and loses nothing; what the hint says brings all rows."""
    database = Database(captured_server, tmp_path)
    kind, dsn = ("mysql", f"{captured_server.dsn}/shop") if database.is_binlog else ("postgres", captured_server)
    monkeypatch.chdir(tmp_path)
    head = SPEC.replace(", snapshot: never", "").partition("  - ")[0]
    history = '  - {{name: history, table: "{folder}/history/{{table}}", input: "db.*"}}\n'
    later = '  - {{name: {name}, table: "{folder}/{name}/{{table}}", input: "db.*", write: upsert, start: {start}}}\n'

    def options(*sinks: str, **more: str) -> PipelineOptions:
        text = "".join((head, history, *sinks)).format(folder=tmp_path, kind=kind, dsn=dsn, **more)
        (tmp_path / "firnline.yml").write_text(text)
        return build_options(load_spec("firnline.yml", environ={}), environ={})

    database.run(FILL)
    run_to_end(options())
    database.run(change_key(database, "id, note"), "INSERT INTO @orders VALUES (1, 100, 'second')")
    run_to_end(options())
    run_once(options(later, name="stuck", start="beginning"))
    assert delta_rows(tmp_path / "stuck" / "orders", "id", "note") == [(1, "a"), (2, "b"), (3, "c")]
    without = options()
    assert run_command(["sinks", "forget", "stuck", "--yes"]) == 0
    run_to_end(without)
    again = options(later, name="lake", start="now")
    run_to_end(again)
    assert run_command(["snapshot", "--table", "orders", "--empty", "--yes"]) == 0
    run_to_end(again)
    database.check("orders", COLUMNS)


def test_a_table_that_is_appended_stays_so(database: Database, tmp_path: Path) -> None:
    """If no sink upserts the table, its key does not matter: it is not read again."""
    options = database.options()
    options = replace(options, sinks=tuple(one for one in options.sinks if one.write == "append"))
    database.run(FILL)
    run_to_end(options)
    database.run(change_key(database, "id, note"), "INSERT INTO @orders VALUES (1, 100, 'second')")
    run_to_end(options)
    rows = delta_rows(tmp_path / "history" / "orders", "id", "note", "_op")
    assert [row for row in rows if row[2] == "truncate"] == []
    assert [row for row in rows if row[:2] == (1, "second")] == [(1, "second", "insert")]

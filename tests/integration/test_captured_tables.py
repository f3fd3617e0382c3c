"""All tables of a captured database in one sink: one Delta table each, as history and as current state.

Each is what a sink of this table alone makes, and what the database holds.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.errors import FirnlineError
from firnline.history.edits.rollback import Rollback
from firnline.history.snapshots import find_table
from firnline.options import BatchOptions, CheckpointOptions, Home, PipelineOptions, SinkOptions, SourceOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions, journal_in
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.postgres.options import PostgresSourceOptions
from tests.integration.test_captured_keys import KINDS, LARGE, WHOLE, move_rows
from tests.support.captured import delta_rows, execute, query
from tests.support.pipelines import run_once, run_to_end

ORDERS = "CREATE TABLE {}orders (id bigint PRIMARY KEY, amount numeric(10,2), note varchar(500))"
LINES = "CREATE TABLE {}lines (note varchar(20), region varchar(9), number int, PRIMARY KEY (number, region))"
NOTES = "CREATE TABLE {}notes (words varchar(20))"  # without a key


def pipeline(source: SourceOptions, folder: Path, *alone: str, template: str = "{table}") -> PipelineOptions:
    """Decides in its journal; has the history and the current state of all tables, and of some tables `alone`, too."""
    sinks: list[SinkOptions] = [
        DeltaPartsOptions("current", f"{folder}/lake/{template}", input="db.*", write="upsert"),
        DeltaPartsOptions("history", f"{folder}/history/{template}", input="db.*"),
    ]
    for table in alone:
        path = folder / "alone" / table
        sinks.append(DeltaSinkOptions(f"{table}-now", f"{path}-now", input=f"db.{table}", write="upsert"))
        sinks.append(DeltaSinkOptions(f"{table}-past", f"{path}-past", input=f"db.{table}"))
    return PipelineOptions(
        name="shop",
        sources=(source,),
        sinks=tuple(sinks),
        batch=BatchOptions(max_events=1000),
        checkpoint=CheckpointOptions(rollback_window=64),
        journal=None if alone else journal_in(Home(str(folder / "home"))),
    )


def whole(dsn: str, folder: Path, *alone: str, template: str = "{table}", **source: Any) -> PipelineOptions:
    return pipeline(PostgresSourceOptions("db", dsn, ("*.*",), **source), folder, *alone, template=template)


class Database:
    """A database of any kind with the tables above."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.is_binlog = not isinstance(server, str)
        self._server, self.folder = server, folder
        self.prefix = "shop." if self.is_binlog else ""
        if self.is_binlog:
            server.run("CREATE DATABASE shop")
        self.run(*(text.format(self.prefix) for text in (ORDERS, LINES, NOTES)))

    def options(self, *alone: str) -> PipelineOptions:
        if self.is_binlog:
            return pipeline(MySqlSourceOptions("db", f"{self._server.dsn}/shop", ("*",)), self.folder, *alone)
        return whole(self._server, self.folder, *alone)

    def run(self, *statements: str) -> None:
        """Execute statements, with `@` before the names of tables."""
        found = [statement.replace("@", self.prefix) for statement in statements]
        if self.is_binlog:
            self._server.run(*found)
        else:
            execute(self._server, *found)

    def rows(self, table: str, columns: str) -> list[tuple[Any, ...]]:
        statement = f"SELECT {columns} FROM {self.prefix}{table}"
        found = self._server.run(statement) if self.is_binlog else query(self._server, statement)
        return sorted((tuple(row) for row in found), key=repr)

    def check(self, table: str, columns: str) -> None:
        """The part is what the database holds."""
        assert delta_rows(self.folder / "lake" / table, *columns.split(", ")) == self.rows(table, columns)


@pytest.fixture
def database(captured_server: Any, tmp_path: Path) -> Database:
    return Database(captured_server, tmp_path)


def tables_in(folder: Path) -> list[str]:
    return sorted(str(log.parent.relative_to(folder)) for log in folder.glob("**/_delta_log"))


def version_of(folder: Path, part: str) -> int:
    return DeltaTable(str(folder / "lake" / part)).version()


def content(path: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """The columns of a Delta table in the order of their names, and its rows."""
    table = DeltaTable(str(path)).to_pyarrow_table()
    # A table that is created before its first row begins with this column.
    empty = "_rescued_data" in table.column_names and table.column("_rescued_data").null_count == table.num_rows
    names = sorted(set(table.column_names) - ({"_rescued_data"} if empty else set()))
    rows = sorted(repr([row[name] for name in names]) for row in table.to_pylist())
    return [(name, str(table.schema.field(name).type)) for name in names], rows


def check_same(folder: Path, table: str) -> None:
    """Both parts of a table are what a sink of this table alone has."""
    assert content(folder / "lake" / table) == content(folder / "alone" / f"{table}-now")
    assert content(folder / "history" / table) == content(folder / "alone" / f"{table}-past")


# -- every kind of database -------------------------------------------------------------------------------


def test_every_table_is_a_delta_table_of_its_own(database: Database, tmp_path: Path) -> None:
    options = database.options()
    database.run("INSERT INTO @orders VALUES (1, 1, 'a'), (2, 2, 'b'), (7, 7, 'g')")
    run_to_end(options)
    database.check("orders", "id, amount, note")
    assert tables_in(tmp_path / "lake") == tables_in(tmp_path / "history") == ["orders"]
    versions = version_of(tmp_path, "orders")
    database.run(
        "INSERT INTO @lines VALUES ('x', 'r1', 1), ('y', 'r2', 1), ('z', 'r1', 2)",
        "UPDATE @lines SET number = 3 WHERE region = 'r2'",
        "INSERT INTO @notes VALUES ('one'), ('one')",
    )
    run_to_end(options)
    database.check("lines", "note, region, number")
    assert version_of(tmp_path, "orders") == versions, "only touched tables are committed"
    database.run("UPDATE @orders SET note = 'new' WHERE id < 3", "DELETE FROM @orders WHERE id = 7")
    database.run("INSERT INTO @notes VALUES ('two')")
    run_to_end(options)
    database.check("orders", "id, amount, note")
    database.check("lines", "note, region, number")
    noted = [("one", "insert"), ("one", "insert"), ("two", "insert")]
    assert delta_rows(tmp_path / "lake" / "notes", "words", "_op") == noted
    assert tables_in(tmp_path / "lake") == tables_in(tmp_path / "history") == ["lines", "notes", "orders"]
    ops = Counter(op for (op,) in delta_rows(tmp_path / "history" / "orders", "_op"))
    assert ops == {"read": 3, "update": 2, "delete": 1}
    assert not any("_firnline" in name for name, _ in content(tmp_path / "lake" / "orders")[0])
    assert run_once(options).result.epochs == 0


def test_a_unique_key_without_nulls_is_a_key_where_the_log_says_so(database: Database, tmp_path: Path) -> None:
    """The rows of a snapshot and those of the log agree on the key."""
    database.run("CREATE TABLE @codes (code varchar(9) NOT NULL, n int, UNIQUE (code))")
    database.run("INSERT INTO @codes VALUES ('a', 1), ('b', 2)")
    options = database.options()
    run_to_end(options)
    database.run("INSERT INTO @codes VALUES ('c', 3)")
    if database.is_binlog:
        database.run("UPDATE @codes SET n = 20 WHERE code = 'b'", "DELETE FROM @codes WHERE code = 'a'")
    run_to_end(options)
    if database.is_binlog:
        database.check("codes", "code, n")
    else:
        found = delta_rows(tmp_path / "lake" / "codes", "code", "n", "_op")
        assert found == [("a", 1, "read"), ("b", 2, "read"), ("c", 3, "insert")]


def test_altered_tables_are_what_sinks_of_one_table_make_of_them(database: Database, tmp_path: Path) -> None:
    """Columns are added, dropped, widened and retyped at their place, before and after the first epoch of a table."""
    options, change = database.options("orders", "lines"), "MODIFY" if database.is_binlog else "ALTER COLUMN"
    kind = "" if database.is_binlog else "TYPE "
    run_to_end(options)
    database.run(
        "INSERT INTO @orders VALUES (1, 1.5, 'a'), (2, 2, 'b'), (3, 3, 'c')",
        "ALTER TABLE @orders ADD COLUMN extra int",
        "INSERT INTO @orders VALUES (4, 4, 'd', 40)",
        f"ALTER TABLE @orders {change} extra {kind}bigint",
        "INSERT INTO @orders VALUES (5, 5, 'e', 30000000000)",
        "INSERT INTO @lines VALUES ('x', 'r', 1), ('y', 'r', 2)",
    )
    run_to_end(options)
    check_same(tmp_path, "orders")
    database.run(
        "INSERT INTO @orders VALUES (6, 6, 'f', 60)",
        "ALTER TABLE @orders DROP COLUMN note",
        f"ALTER TABLE @orders {change} amount {kind}varchar(20)",
        "INSERT INTO @orders VALUES (7, 'much', 70)",
        "UPDATE @orders SET amount = 'more' WHERE id = 2",
        "UPDATE @orders SET amount = NULL WHERE id = 3",
        "ALTER TABLE @lines ADD COLUMN seen date",
        "INSERT INTO @lines VALUES ('z', 'r', 3, '2024-02-29')",
    )
    run_to_end(options)
    database.run("DELETE FROM @orders WHERE id = 6", "UPDATE @orders SET extra = 0, amount = 'x' WHERE id = 7")
    run_to_end(options)
    assert {"amount", "amount_v2", "note"} <= {name for name, _ in content(tmp_path / "lake" / "orders")[0]}
    for table in ("orders", "lines"):
        check_same(tmp_path, table)
    database.check("lines", "note, region, number, seen")
    now = "id, CASE WHEN id IN (2, 3, 7) THEN amount END, extra"
    assert delta_rows(tmp_path / "lake" / "orders", "id", "amount_v2", "extra") == database.rows("orders", now)


def test_a_truncate_empties_its_own_table(database: Database, tmp_path: Path) -> None:
    options = database.options("orders")
    run_to_end(options)
    database.run("TRUNCATE TABLE @lines")  # before its first row
    database.run("INSERT INTO @orders VALUES (1, 1, 'a'), (2, 2, 'b')", "INSERT INTO @lines VALUES ('x', 'r', 1)")
    database.run("INSERT INTO @notes VALUES ('one')")
    run_to_end(options)
    database.run("TRUNCATE TABLE @orders", "INSERT INTO @orders VALUES (3, 3, 'c')", "TRUNCATE TABLE @notes")
    run_to_end(options)
    database.check("orders", "id, amount, note")
    database.check("lines", "note, region, number")
    check_same(tmp_path, "orders")
    assert delta_rows(tmp_path / "lake" / "notes", "words", "_op") == [("one", "insert"), (None, "truncate")]
    database.run("TRUNCATE TABLE @lines")
    run_to_end(options)
    database.check("lines", "note, region, number")
    database.check("orders", "id, amount, note")


def test_a_rollback_brings_every_table_back(database: Database, tmp_path: Path) -> None:
    options = database.options()
    run_to_end(options)
    database.run("INSERT INTO @orders VALUES (1, 1, 'a'), (2, 2, 'b')", "INSERT INTO @notes VALUES ('one')")
    run_to_end(options)
    before = {name: content(tmp_path / "lake" / name) for name in ("orders", "notes")}
    past = content(tmp_path / "history" / "orders")
    epoch = open_pipeline(options).load().epoch
    database.run(
        "UPDATE @orders SET note = 'new'",
        "ALTER TABLE @orders ADD COLUMN extra int",
        "DELETE FROM @orders WHERE id = 1",
        "INSERT INTO @lines VALUES ('x', 'r', 1)",
        "INSERT INTO @notes VALUES ('two')",
        "INSERT INTO @orders VALUES (3, 3, 'c', 30)",
    )
    run_to_end(options)
    Rollback(open_pipeline(options), epoch).perform("person")
    assert {name: content(tmp_path / "lake" / name) for name in ("orders", "notes")} == before
    assert content(tmp_path / "history" / "orders") == past
    assert content(tmp_path / "lake" / "lines")[1] == []
    run_to_end(options)
    database.check("orders", "id, amount, note, extra")
    database.check("lines", "note, region, number")
    noted = [("one", "insert"), ("two", "insert")]
    assert delta_rows(tmp_path / "lake" / "notes", "words", "_op") == noted


# -- PostgreSQL -------------------------------------------------------------------------------------------


def test_moved_keys_and_values_that_the_log_leaves_out(postgres: str, tmp_path: Path) -> None:
    execute(postgres, KINDS, KINDS.replace("orders", "others"))
    execute(postgres, "ALTER TABLE others REPLICA IDENTITY FULL")
    options = whole(postgres, tmp_path, "orders", "others")
    run_to_end(options)
    for table in ("orders", "others"):
        execute(postgres, f"INSERT INTO {table} SELECT g, g, {LARGE}, 'e', 'a' FROM generate_series(1, 9) g")
    run_to_end(options)
    for table in ("orders", "others"):
        move_rows(lambda *statements: execute(postgres, *statements), LARGE, table)
    execute(postgres, "UPDATE orders SET amount = 100 WHERE id > 100")
    run_to_end(options)
    for table in ("orders", "others"):
        wanted = sorted(query(postgres, f"SELECT {', '.join(WHOLE)} FROM {table}"), key=repr)
        assert delta_rows(tmp_path / "lake" / table, *WHOLE) == wanted
        check_same(tmp_path, table)


def test_another_replica_identity_is_the_key_of_a_part(postgres: str, tmp_path: Path) -> None:
    execute(
        postgres,
        "CREATE TABLE places (id int PRIMARY KEY, code text NOT NULL UNIQUE, name text)",
        "ALTER TABLE places REPLICA IDENTITY USING INDEX places_code_key",
        "CREATE TABLE seen (id int PRIMARY KEY)",
        "ALTER TABLE seen REPLICA IDENTITY NOTHING",
        "CREATE TABLE pairs (a int, b int)",
        "ALTER TABLE pairs REPLICA IDENTITY FULL",
        "INSERT INTO places SELECT g, 'c' || g, 'n' FROM generate_series(1, 5) g",
        "INSERT INTO seen VALUES (1)",
        "INSERT INTO pairs VALUES (1, 1), (1, 1)",
    )
    options = whole(postgres, tmp_path)
    run_to_end(options)
    execute(postgres, "UPDATE places SET id = id + 10", "UPDATE places SET code = 'new' WHERE id = 12")
    execute(postgres, "DELETE FROM places WHERE id = 13", "INSERT INTO seen VALUES (2)", "DELETE FROM pairs")
    run_to_end(options)
    held = query(postgres, "SELECT id, code, name FROM places")
    assert delta_rows(tmp_path / "lake" / "places", "id", "code", "name") == sorted(held, key=repr)
    assert delta_rows(tmp_path / "lake" / "seen", "id", "_op") == [(1, "read"), (2, "insert")]
    assert Counter(delta_rows(tmp_path / "lake" / "pairs", "a", "b", "_op")) == {
        (1, 1, "read"): 2,
        (1, 1, "delete"): 2,
    }


ODD = ("Order Lines", "a/b", "größe", "_hidden", ".dot", "x~y", "CON:", "100%", "Orders", "-rf", "end.")


def test_odd_names_give_safe_folders(postgres: str, tmp_path: Path) -> None:
    execute(postgres, "CREATE SCHEMA sales", "CREATE TABLE sales.orders (id int PRIMARY KEY)", ORDERS.format(""))
    execute(postgres, *(f'CREATE TABLE "{name}" (id int PRIMARY KEY)' for name in ODD))
    names = ("orders", "sales.orders", *(f'"{name}"' for name in ODD))
    execute(postgres, *(f"INSERT INTO {name} VALUES ({number})" for number, name in enumerate(names)))
    run_to_end(whole(postgres, tmp_path))
    found = {name: delta_rows(tmp_path / "lake" / name, "id") for name in tables_in(tmp_path / "lake")}
    folders = ["orders", "sales.orders", "Order~20Lines", "a~2Fb", "gr~C3~B6~C3~9Fe", "~5Fhidden", "~2Edot", "x~7Ey",
               "CON~3A", "100~25", "Orders", "~2Drf", "end~2E"]  # fmt: skip
    assert found == {name: [(number,)] for number, name in enumerate(folders)}


def test_the_schema_may_be_a_folder(postgres: str, tmp_path: Path) -> None:
    execute(postgres, "CREATE SCHEMA sales", "CREATE TABLE sales.orders (id int PRIMARY KEY)", ORDERS.format(""))
    options = whole(postgres, tmp_path, template="{schema}/t_{table}")
    run_to_end(options)
    execute(postgres, "INSERT INTO sales.orders VALUES (1)", "INSERT INTO orders VALUES (2)")
    run_to_end(options)
    assert tables_in(tmp_path / "lake") == ["public/t_orders", "sales/t_orders"]
    assert delta_rows(tmp_path / "lake" / "sales" / "t_orders", "id") == [(1,)]


def test_two_tables_that_would_have_the_same_part_are_refused(postgres: str, tmp_path: Path) -> None:
    execute(postgres, "CREATE SCHEMA a", "CREATE SCHEMA a_b")
    execute(postgres, "CREATE TABLE a.b_c (id int PRIMARY KEY)", "CREATE TABLE a_b.c (id int PRIMARY KEY)")
    options = whole(postgres, tmp_path, template="{schema}_{table}")
    options = replace(options, sinks=options.sinks[:1])
    execute(postgres, "INSERT INTO a.b_c VALUES (1)")
    run_to_end(options)
    execute(postgres, "INSERT INTO a_b.c VALUES (2)")
    assert "cannot have a table for a_b.c: table 'a_b_c' has the rows of a.b_c" in failure(options).message
    assert delta_rows(tmp_path / "lake" / "a_b_c", "id") == [(1,)]


def test_a_pattern_takes_some_of_the_tables(postgres: str, tmp_path: Path) -> None:
    execute(postgres, "CREATE SCHEMA sales", "CREATE TABLE sales.orders (id int PRIMARY KEY)")
    execute(postgres, ORDERS.format(""), LINES.format(""))
    options = whole(postgres, tmp_path)
    current, history = options.sinks
    options = replace(options, sinks=(replace(current, input="db.sales.*"), replace(history, input="db.o*")))
    run_to_end(options)
    execute(postgres, "INSERT INTO sales.orders VALUES (1)", "INSERT INTO orders VALUES (2)")
    execute(postgres, "INSERT INTO lines VALUES ('x', 'r', 1)")
    run_to_end(options)
    assert (tables_in(tmp_path / "lake"), tables_in(tmp_path / "history")) == (["sales.orders"], ["orders"])


def test_a_table_that_is_read_again_is_emptied_first(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS.format(""), LINES.format(""), "INSERT INTO lines VALUES ('x', 'r', 1)")
    execute(postgres, "INSERT INTO orders SELECT g, g, 'n' FROM generate_series(1, 50) g")
    options = whole(postgres, tmp_path)
    run_to_end(options)
    execute(postgres, "ALTER PUBLICATION firnline_shop_db DROP TABLE orders", "DELETE FROM orders WHERE id > 10")
    asked = open_pipeline(options)
    owner, name = find_table(asked, "orders")
    asked.requests.ask_snapshot(name, owner, where="", empties=True, ids=asked.ids)
    run_to_end(options)
    held = query(postgres, "SELECT id, amount, note FROM orders")
    assert delta_rows(tmp_path / "lake" / "orders", "id", "amount", "note") == sorted(held, key=repr)
    assert delta_rows(tmp_path / "lake" / "lines", "number") == [(1,)]


def test_facts_and_the_row_before_are_columns(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS.format(""), "ALTER TABLE orders REPLICA IDENTITY FULL")
    options = whole(postgres, tmp_path, "orders", include=("transaction", "before"))
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'a')", "UPDATE orders SET amount = 2")
    run_to_end(options)
    execute(postgres, "ALTER TABLE orders ADD COLUMN extra int", "UPDATE orders SET extra = 3")
    execute(postgres, "UPDATE orders SET extra = 4")
    run_to_end(options)
    check_same(tmp_path, "orders")
    assert {"_before", "_transaction"} <= {name for name, _ in content(tmp_path / "history" / "orders")[0]}


def failure(options: PipelineOptions) -> FirnlineError:
    error = run_once(replace(options, restart=replace(options.restart, attempts=1))).result.error
    assert error is not None
    return error


def test_a_table_that_gets_a_key_is_appended_as_before(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS.format(""), NOTES.format(""), "INSERT INTO notes VALUES ('a')")
    options = whole(postgres, tmp_path)
    options = replace(options, sinks=options.sinks[:1])
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'a')")
    run_to_end(options)
    execute(postgres, "ALTER TABLE notes ADD PRIMARY KEY (words)", "INSERT INTO notes VALUES ('b')")
    run_to_end(options)
    # Until it had a key, its updates and deletes were not published: it is read again.
    rows = sorted(delta_rows(tmp_path / "lake" / "notes", "words", "_op"), key=repr)
    assert rows == [("a", "read"), ("a", "read"), ("b", "insert"), ("b", "read"), (None, "truncate")]


def test_columns_are_masked_and_left_out(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS.format(""), LINES.format(""))
    options = whole(postgres, tmp_path)
    shaped = replace(options.sinks[0], exclude=("amount",), mask={"note": "redact"})  # type: ignore[call-arg]
    options = replace(options, sinks=(shaped,))
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'a')", "INSERT INTO lines VALUES ('x', 'r', 1)")
    run_to_end(options)
    assert content(tmp_path / "lake" / "orders")[0] == [("id", "int64"), ("note", "string")]
    assert delta_rows(tmp_path / "lake" / "orders", "id", "note") == [(1, "***")]
    assert delta_rows(tmp_path / "lake" / "lines", "note", "region", "number") == [("***", "r", 1)]
    options = replace(options, sinks=(replace(shaped, exclude=("region",)),))  # type: ignore[call-arg]
    execute(postgres, "INSERT INTO lines VALUES ('x', 'r', 2)")
    assert "region is a column of the key of part lines, and `exclude` leaves it out" in failure(options).message


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_damaged_rows_of_the_outbox_are_made_again(
    postgres: str, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    execute(postgres, ORDERS.format(""), LINES.format(""), NOTES.format(""))
    options = whole(postgres, tmp_path)
    optional = replace(options, sinks=(options.sinks[0], replace(options.sinks[1], required=False)))
    run_to_end(optional)
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'a')", "INSERT INTO lines VALUES ('x', 'r', 1)")
    execute(postgres, "INSERT INTO orders VALUES (2, 1, 'a')", "INSERT INTO notes VALUES ('one')")
    history = tmp_path / "history"
    away = history.rename(tmp_path / "away")
    history.write_text("in the way")
    run_to_end(optional)
    history.unlink()
    away.rename(history)
    files = sorted((tmp_path / "home").rglob("*.arrow"))
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x20
        path.unlink() if damage == "gone" else path.write_bytes(data)
    run_to_end(options)
    assert "outbox repaired: the input gave the same rows" in caplog.text
    assert delta_rows(history / "orders", "id", "_op") == [(1, "insert"), (2, "insert")]
    assert delta_rows(history / "lines", "number", "_op") == [(1, "insert")]
    assert delta_rows(history / "notes", "words", "_op") == [("one", "insert")]


def test_a_sink_that_comes_later_gets_every_table_from_the_beginning(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS.format(""), LINES.format(""), "INSERT INTO orders VALUES (1, 1, 'a')")
    options = whole(postgres, tmp_path)
    current, history = options.sinks
    run_to_end(replace(options, sinks=(history,)))
    execute(postgres, "INSERT INTO lines VALUES ('x', 'r', 1)", "UPDATE orders SET amount = 2")
    run_to_end(replace(options, sinks=(history,)))
    execute(postgres, "ALTER TABLE orders ADD COLUMN extra int", "INSERT INTO orders VALUES (2, 2, 'b', 3)")
    later = replace(options, sinks=(history, replace(current, start="beginning")))  # type: ignore[call-arg]
    run_to_end(later)
    execute(postgres, "DELETE FROM lines")
    run_to_end(later)
    held = query(postgres, "SELECT id, amount, note, extra FROM orders")
    assert delta_rows(tmp_path / "lake" / "orders", "id", "amount", "note", "extra") == sorted(held, key=repr)
    assert delta_rows(tmp_path / "lake" / "lines", "number") == []
    ops = Counter(op for (op,) in delta_rows(tmp_path / "history" / "orders", "_op"))
    assert ops == {"read": 1, "update": 1, "insert": 1}


def test_a_lost_table_comes_again_from_the_outbox(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS.format(""), LINES.format(""))
    options = whole(postgres, tmp_path)
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'a')", "INSERT INTO lines VALUES ('x', 'r', 1)")
    run_to_end(options)
    execute(postgres, "UPDATE orders SET note = 'b'", "UPDATE lines SET number = 2")
    run_to_end(options)
    shutil.rmtree(tmp_path / "lake" / "orders")
    execute(postgres, "INSERT INTO lines VALUES ('y', 'r', 3)")
    run_to_end(options)
    assert delta_rows(tmp_path / "lake" / "orders", "id", "note") == [(1, "b")]
    assert delta_rows(tmp_path / "lake" / "lines", "note", "number") == [("x", 2), ("y", 3)]


SPEC = """
name: shop
sources:
  db: {{type: postgres, dsn: "{dsn}", tables: [orders, notes]}}
sinks:
  - {{name: current, table: "lake/{{table}}", input: "db.*", write: upsert}}
"""


def test_dry_run_says_which_tables_are_only_appended_to(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(postgres, ORDERS.format(""), NOTES.format(""), LINES.format(""))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "firnline.yml").write_text(SPEC.format(dsn=postgres))
    assert run_command(["dry-run"]) == 0
    said = capsys.readouterr()
    words = " ".join((said.out + said.err).split())
    assert "public.notes none: append only" in words
    assert (
        "current has a Delta table for each captured table, with one row per key of that table; to those of tables"
        in words
    )

"""Altered tables: every change takes effect at its place in the log, and what the log does not have is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.output import Output
from firnline.cli.status import show_status
from firnline.errors import ConfigError
from firnline.history.snapshots import find_table, load_progress
from firnline.history.status import load_status
from firnline.options import PipelineOptions, SchemaOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions, delta_tables
from firnline.sources.cdc.chunks import SnapshotBegin
from firnline.sources.cdc.snapshots import SnapshotTaker
from firnline.sources.cdc.source import LogSource
from firnline.sources.cdc.spool import SpoolFile
from firnline.sources.mysql.statements import classify
from firnline.spec.build import build_options
from firnline.spec.loading import load_spec
from tests.integration.test_mysql_source import DATABASE
from tests.integration.test_mysql_source import ORDERS as BINLOG_ORDERS
from tests.integration.test_mysql_source import captured as captured_binlog
from tests.support.captured import ORDERS, captured, delta_rows, execute, history, position, query
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_once, run_to_end, run_until_epoch


class Database:
    """The table `orders` of either kind of server."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.is_binlog = not isinstance(server, str)
        self._server = server
        if self.is_binlog:
            server.run(f"CREATE DATABASE {DATABASE}", BINLOG_ORDERS)
            self.options = captured_binlog(server, folder)
        else:
            execute(server, ORDERS)
            self.options = captured(server, folder)

    def run(self, *statements: str) -> None:
        """Execute statements, with `orders` for the table."""
        if self.is_binlog:
            self._server.run(*(one.replace("orders", f"{DATABASE}.orders", 1) for one in statements))
        else:
            execute(self._server, *statements)

    def transact(self, *statements: str) -> None:
        """Execute statements in one transaction."""
        if self.is_binlog:
            self.run("START TRANSACTION", *statements, "COMMIT")
        else:
            execute(self._server, "; ".join(["BEGIN", *statements, "COMMIT"]))

    def with_source(self, **settings: Any) -> PipelineOptions:
        """Return the options with settings of the source."""
        return replace(self.options, sources=(replace(self.options.sources[0], **settings),))

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        if self.is_binlog:
            return [tuple(row) for row in self._server.run(statement.replace("orders", f"{DATABASE}.orders", 1))]
        return query(self._server, statement)

    def retype(self, column: str, kind: str, native: str = "") -> None:
        """Change the type of a column; `native`: as PostgreSQL calls it."""
        if self.is_binlog:
            self.run(f"ALTER TABLE orders MODIFY {column} {kind}")
        else:
            self.run(f"ALTER TABLE orders ALTER COLUMN {column} TYPE {native or kind}")


@pytest.fixture
def database(captured_server: Any, tmp_path: Path) -> Database:
    return Database(captured_server, tmp_path)


def silent(options: PipelineOptions) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load_status(open_pipeline(options)).sources[0]["silent_changes"]
    return found


def test_columns_are_added_dropped_renamed_and_widened_at_their_place(database: Database, tmp_path: Path) -> None:
    """Every row is decoded by the schema of its own place; PostgreSQL does all of it in one transaction."""
    run_to_end(database.options)
    statements = [
        "INSERT INTO orders VALUES (1, 1, 'a')",
        "ALTER TABLE orders ADD COLUMN extra int",
        "INSERT INTO orders VALUES (2, 2, 'b', 20)",
        f"ALTER TABLE orders {'MODIFY extra' if database.is_binlog else 'ALTER COLUMN extra TYPE'} bigint",
        "INSERT INTO orders VALUES (3, 3, 'c', 30000000000)",
        "ALTER TABLE orders DROP COLUMN note",
        "INSERT INTO orders VALUES (4, 4, 40)",
        "ALTER TABLE orders RENAME COLUMN extra TO other",
        "INSERT INTO orders VALUES (5, 5, 50)",
        "UPDATE orders SET other = 21 WHERE id = 2",
        "ALTER TABLE orders RENAME COLUMN other TO " + ("Other" if database.is_binlog else '"Other"'),
        "INSERT INTO orders VALUES (6, 6, 60)",
    ]
    database.run(*(statements if database.is_binlog else [f"BEGIN; {'; '.join(statements)}; COMMIT"]))
    run = run_once(database.options)
    assert run.exit_code == 0
    assert database.is_binlog or run.result.epochs == 1
    assert delta_rows(tmp_path / "current", "id", "note", "extra", "other") == [
        (1, "a", None, None), (2, None, None, 21), (3, "c", 30000000000, None), (4, None, 40, None),
        (5, None, None, 50), (6, None, None, 60),
    ]  # fmt: skip
    assert delta_rows(tmp_path / "history", "id", "_op", "note", "extra", "other") == [
        (1, "insert", "a", None, None), (2, "insert", "b", 20, None), (2, "update", None, None, 21),
        (3, "insert", "c", 30000000000, None), (4, "insert", None, 40, None), (5, "insert", None, None, 50),
        (6, "insert", None, None, 60),
    ]  # fmt: skip
    versions = load_status(open_pipeline(database.options)).sources[0]["schemas"]
    assert versions[0]["version"] == 6


def test_a_widened_column_of_a_table_that_is_there_is_widened(database: Database, tmp_path: Path) -> None:
    database.run("ALTER TABLE orders ADD COLUMN extra int")
    run_to_end(database.options)
    database.run("INSERT INTO orders VALUES (1, 1, 'a', 10)")
    run_to_end(database.options)
    database.retype("extra", "bigint")
    database.run("INSERT INTO orders VALUES (2, 2, 'b', 30000000000)")
    run_to_end(database.options)
    assert delta_rows(tmp_path / "current", "id", "extra") == [(1, 10), (2, 30000000000)]


def test_a_type_that_the_column_cannot_hold_gets_a_column_of_its_own(database: Database, tmp_path: Path) -> None:
    run_to_end(database.options)
    database.run("INSERT INTO orders VALUES (1, 1.5, 'a'), (2, 2, 'b')")
    run_to_end(database.options)
    database.run("INSERT INTO orders VALUES (3, 3, 'c')")
    database.retype("amount", "varchar(20)")
    database.run("INSERT INTO orders VALUES (4, 'much', 'd')", "UPDATE orders SET amount = 'more' WHERE id = 2")
    database.run("UPDATE orders SET amount = NULL WHERE id = 3")
    run_to_end(database.options)
    expected = [(1, Decimal("1.50"), None), (2, None, "more"), (3, None, None), (4, None, "much")]
    assert delta_rows(tmp_path / "current", "id", "amount", "amount_v2") == expected
    database.run("DELETE FROM orders WHERE id IN (2, 4)")
    database.retype("amount", "decimal(10,2)", "numeric(10,2) USING amount::numeric")
    database.run("INSERT INTO orders VALUES (5, 5, 'e')")
    database.retype("amount", "decimal(14,2)")
    database.run("INSERT INTO orders VALUES (6, 123456789012.5, 'f')")
    run_to_end(database.options)
    rows = delta_rows(tmp_path / "current", "id", "amount", "amount_v2")
    assert rows == [
        (1, Decimal("1.50"), None),
        (3, None, None),
        (5, Decimal("5.00"), None),
        (6, None, "123456789012.50"),
    ]


def test_a_table_beside_the_deciding_one_gets_wider_values_in_a_column_of_its_own(
    postgres: str, tmp_path: Path
) -> None:
    """Only rows that the deciding table takes can widen a column: nothing is rescued, and no key is lost."""
    execute(postgres, *(f"CREATE TABLE {name} (id int PRIMARY KEY, n int)" for name in ("orders", "lines")))
    sinks = tuple(
        DeltaSinkOptions(name, str(tmp_path / name), input=f"db.{name}", write="upsert") for name in ("orders", "lines")
    )
    options = replace(captured(postgres, tmp_path, tables=("orders", "lines")), sinks=sinks)
    execute(postgres, "INSERT INTO orders VALUES (1, 1)", "INSERT INTO lines VALUES (1, 1), (2, 2)")
    run_to_end(options)
    for name in ("orders", "lines"):
        execute(postgres, f"ALTER TABLE {name} ALTER n TYPE bigint", f"UPDATE {name} SET n = 5000000000 WHERE id = 1")
    run_to_end(options)
    assert delta_rows(tmp_path / "orders", "id", "n") == [(1, 5000000000)]
    assert delta_rows(tmp_path / "lines", "id", "n", "n_v2") == [(1, None, 5000000000), (2, 2, None)]
    execute(postgres, "ALTER TABLE lines ALTER id TYPE bigint", "INSERT INTO lines VALUES (5000000001, 7)")
    run = run_once(options)
    assert run.error_code == "schema"
    assert "lines: id, a column of the key, has the type bigint now" in str(run.result)


def test_a_type_that_does_not_fit_stops_a_run_that_must_not_change_columns(database: Database, tmp_path: Path) -> None:
    source = replace(database.options.sources[0], schema=SchemaOptions(evolution="fail"))
    options = replace(database.options, sources=(source,))
    run_to_end(database.options)
    database.run("INSERT INTO orders VALUES (1, 1.5, 'a')")
    run_to_end(database.options)
    database.retype("amount", "varchar(20)")
    database.run("INSERT INTO orders VALUES (2, 'much', 'b')")
    run = run_once(options)
    assert run.error_code == "schema"
    assert run.result.error is not None
    assert "amount" in run.result.error.message
    assert delta_rows(tmp_path / "current", "id", "amount") == [(1, Decimal("1.50"))]
    run_to_end(database.options)
    assert delta_rows(tmp_path / "current", "id", "amount_v2") == [(1, None), (2, "much")]


@pytest.mark.parametrize("strict", [0, 1], ids=["deciding", "beside it"])
def test_a_sink_that_takes_no_new_columns_stops_alone(database: Database, tmp_path: Path, strict: int) -> None:
    """The other sink goes on, if it decides; nothing is lost when columns are allowed again."""
    tables = delta_tables(database.options.sinks)
    sinks = [replace(one, evolution="fail" if one is tables[strict] else "add") for one in tables]
    options = replace(database.options, sinks=tuple(sinks))
    run_to_end(options)
    database.run("INSERT INTO orders VALUES (1, 1.5, 'a')")
    run_to_end(options)  # the first columns are no change
    database.run("ALTER TABLE orders ADD COLUMN extra int", "INSERT INTO orders VALUES (2, 2.5, 'b', 7)")
    error = run_once(options).result.error
    assert error is not None
    name = sinks[strict].name
    assert f"lacks the column 'extra' (int32), and the sink {name} has evolution: fail" in error.message
    assert f"`evolution: add` on the sink {name}" in error.hint
    assert delta_rows(tmp_path / "current", "id") == [(1,)]
    assert len(history(tmp_path)) == (1 if strict == 0 else 2)
    run_to_end(database.options)
    assert delta_rows(tmp_path / "current", "id", "extra") == [(1, None), (2, 7)]
    assert len(history(tmp_path)) == 2


def test_one_table_of_a_template_takes_no_new_columns(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS)
    options = captured(postgres, tmp_path)
    parts = DeltaPartsOptions("all", f"{tmp_path}/lake/{{table}}", input="db.*", write="upsert", evolution="fail")
    options = replace(options, sinks=(options.sinks[0], parts))
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'a')")
    run_to_end(options)
    execute(postgres, "ALTER TABLE orders ADD COLUMN extra int", "INSERT INTO orders VALUES (2, 2, 'b', 7)")
    error = run_once(options).result.error
    assert error is not None
    assert "lacks the column 'extra' (int32), and the sink all has evolution: fail" in error.message
    assert delta_rows(tmp_path / "lake/orders", "id") == [(1,)]
    run_to_end(replace(options, sinks=(options.sinks[0], replace(parts, evolution="add"))))
    assert delta_rows(tmp_path / "lake/orders", "id", "extra") == [(1, None), (2, 7)]


def test_a_key_of_another_type_stops_the_run(database: Database, tmp_path: Path) -> None:
    run_to_end(database.options)
    database.run("INSERT INTO orders VALUES (1, 1.5, 'a')")
    run_to_end(database.options)
    database.retype("id", "varchar(20)")
    database.run("INSERT INTO orders VALUES ('x', 1, 'b')")
    run = run_once(database.options)
    assert run.error_code == "schema"
    assert run.result.error is not None
    assert "a column of the key" in run.result.error.message
    assert delta_rows(tmp_path / "current", "id") == [(1,)]


def test_rows_that_changed_without_being_in_the_log_are_named(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run_to_end(database.options)
    database.run("INSERT INTO orders VALUES (1, 1, 'a')")
    run_to_end(database.options)
    assert silent(database.options) == []
    database.run("ALTER TABLE orders ADD COLUMN extra int DEFAULT 7")
    database.retype("note", "varchar(700)")
    database.run("INSERT INTO orders VALUES (2, 2, 'b', 8)")
    caplog.clear()
    run_to_end(database.options)
    assert "rows may have changed that are not in the log" in caplog.text
    assert "firnline snapshot --table" in caplog.text
    reasons = " ".join(one["reason"] for one in silent(database.options))
    assert "extra" in reasons
    assert "note" in reasons
    assert {one["table"].partition(".")[2] for one in silent(database.options)} == {"orders"}
    show_status(Output(), load_status(open_pipeline(database.options)))
    shown = " ".join(capsys.readouterr().out.split())
    assert "not in the log of db" in shown
    table = silent(database.options)[0]["table"]
    assert f"to read the table again: `firnline snapshot --table {table}" in shown
    assert position(database.options).due == {}


@pytest.mark.parametrize("kind", ["default", "type", "renamed", "added again"])
def test_a_changed_table_is_read_again_once(database: Database, tmp_path: Path, kind: str) -> None:
    """The current state equals the database, though the log has no changes of the rows from before."""
    options = database.with_source(on_ddl="resnapshot")
    database.run("INSERT INTO orders VALUES (1, 1, 'a'), (2, 2, 'b')")
    run_to_end(options)
    if kind == "default":
        database.run("ALTER TABLE orders ADD COLUMN extra int DEFAULT 7")
    elif kind == "type":
        database.retype("note", "varchar(1)", "varchar(1) USING upper(note)")
    elif kind == "added again":  # with the same name, type and place
        kept = "varchar(500)" if database.is_binlog else "text"
        database.run("ALTER TABLE orders DROP COLUMN note", f"ALTER TABLE orders ADD COLUMN note {kept} DEFAULT 'new'")
    else:
        database.run("ALTER TABLE orders RENAME COLUMN note TO remark")
    database.run("INSERT INTO orders (id, amount) VALUES (3, 3)")
    run_to_end(options)
    run_to_end(options)
    columns = {"default": ["note", "extra"], "type": ["note"], "renamed": ["remark"], "added again": ["note"]}[kind]
    rows = database.query(f"SELECT id, amount, {', '.join(columns)} FROM orders")
    assert delta_rows(tmp_path / "current", "id", "amount", *columns) == sorted(rows, key=repr)
    ops = Counter(op for _, op in history(tmp_path))
    assert ops == {"read": 2 + 3, "insert": 1}
    assert silent(options) == []
    assert position(options).due == {}
    database.run("INSERT INTO orders (id, amount) VALUES (4, 4)")
    run_to_end(options)
    assert Counter(op for _, op in history(tmp_path)) == ops + Counter(insert=1)


def test_a_snapshot_that_is_due_is_listed_and_outlives_the_run(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is a part of the position: the run that found the change ends before it begins the snapshot."""
    options = database.with_source(on_ddl="resnapshot")
    database.run("INSERT INTO orders VALUES (1, 1, 'a')")
    run_to_end(options)
    database.run("ALTER TABLE orders ADD COLUMN extra int DEFAULT 7", "INSERT INTO orders VALUES (2, 2, 'b', 8)")
    with monkeypatch.context() as patched:
        patched.setattr(SnapshotTaker, "begins", lambda *_: [])
        run_to_end(options)
    assert list(position(options).due.values()) == [False]
    assert [(one.table.partition(".")[2], one.state) for one in load_progress(open_pipeline(options))] == [
        ("orders", "asked")
    ]
    (change,) = silent(options)
    assert change["asked"]
    assert change["command"] == ""
    run_to_end(options)
    assert delta_rows(tmp_path / "current", "id", "extra") == [(1, 7), (2, 8)]
    assert Counter(op for _, op in history(tmp_path)) == {"read": 1 + 2, "insert": 1}


def test_a_snapshot_that_somebody_asked_for_is_the_one_that_is_due(database: Database, tmp_path: Path) -> None:
    options = database.with_source(on_ddl="resnapshot")
    database.run("INSERT INTO orders VALUES (1, 1, 'a')")
    run_to_end(options)
    database.run("ALTER TABLE orders ADD COLUMN extra int DEFAULT 7", "INSERT INTO orders VALUES (2, 2, 'b', 8)")
    pipeline = open_pipeline(options)
    source, table = find_table(pipeline, "orders")
    pipeline.requests.ask_snapshot(table, source, where="", empties=False, ids=pipeline.ids)
    run_to_end(options)
    assert delta_rows(tmp_path / "current", "id", "extra") == [(1, 7), (2, 8)]
    ops = Counter(op for _, op in history(tmp_path))
    assert ops["read"] in (1 + 2, 1 + 2 + 2)  # it may begin in an epoch before that of the change
    assert position(options).due == {}
    run_to_end(options)
    assert Counter(op for _, op in history(tmp_path)) == ops


def test_ddl_that_leaves_rows_as_they_are_asks_for_nothing(database: Database, tmp_path: Path) -> None:
    options = database.with_source(on_ddl="resnapshot")
    database.run("INSERT INTO orders VALUES (1, 1, 'a')")
    run_to_end(options)
    database.run(
        # The log of PostgreSQL has no statements: there, a column that comes is noticed, and one that goes is not.
        f"ALTER TABLE orders {'ADD COLUMN extra int' if database.is_binlog else 'DROP COLUMN note'}",
        "INSERT INTO orders (id, amount) VALUES (2, 2)",
        "CREATE TABLE orders_of_others (id int PRIMARY KEY, x int)",
        "INSERT INTO orders_of_others VALUES (1, 1)",
        "ALTER TABLE orders_of_others ADD COLUMN y int DEFAULT 7",
        "INSERT INTO orders_of_others VALUES (2, 2, 2)",
        "DROP TABLE orders_of_others",
        "INSERT INTO orders (id, amount) VALUES (3, 3)",
    )
    run_to_end(options)
    assert silent(options) == []
    assert Counter(op for _, op in history(tmp_path)) == {"read": 1, "insert": 2}


def test_rows_of_whole_partitions_are_taken_away(mysql: BinlogServer, tmp_path: Path) -> None:
    database = Database(mysql, tmp_path)
    options = database.with_source(on_ddl="resnapshot")
    database.run("ALTER TABLE orders PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (10), "
                 "PARTITION p1 VALUES LESS THAN (20))")  # fmt: skip
    database.run("INSERT INTO orders VALUES (1, 1, 'a'), (11, 1, 'b')")
    run_to_end(options)
    database.run("ALTER TABLE orders TRUNCATE PARTITION p1")
    run_to_end(options)
    assert delta_rows(tmp_path / "current", "id") == [(1,)]


@pytest.mark.parametrize("is_first", [True, False])
def test_rows_of_a_partition_are_taken_away_in_the_epoch_that_begins_a_snapshot(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """The snapshot, the first one or one that somebody asked for, does not empty the table: another one does."""
    database = Database(binlog_server, tmp_path)
    options = database.with_source(on_ddl="resnapshot")
    database.run("ALTER TABLE orders PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (10), "
                 "PARTITION p1 VALUES LESS THAN (20))", "INSERT INTO orders VALUES (1, 1, 'a')")  # fmt: skip
    if is_first:
        run_until_epoch(options, 1)  # it says where the log begins
    else:
        run_to_end(options)
        pipeline = open_pipeline(options)
        owner, name = find_table(pipeline, "orders")
        pipeline.requests.ask_snapshot(name, owner, where="", empties=False, ids=pipeline.ids)
    choose, together = LogSource._choose, list[bool]()

    def choose_both(self: LogSource, *args: Any, **settings: Any) -> list[Any]:
        """Choose nothing until one epoch can begin the snapshot and have the statement."""
        has_all = args[0].has_all_until(self._until)
        chosen = choose(self, *args, **settings)
        if has_all and {SnapshotBegin, SpoolFile} <= {type(one) for one in chosen}:
            together.append(True)
        return chosen if together else []

    monkeypatch.setattr(LogSource, "_choose", choose_both)
    database.transact("INSERT INTO orders VALUES (11, 1, 'b')", "INSERT INTO orders VALUES (12, 1, 'c')")
    database.run("ALTER TABLE orders DROP PARTITION p1")
    run_to_end(options)
    assert together
    assert delta_rows(tmp_path / "current", "id") == [(1,)]
    assert silent(options) == []


def test_a_table_without_a_key_is_not_read_again(
    postgres: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    execute(postgres, "CREATE TABLE orders (id bigint, note text)", "INSERT INTO orders VALUES (1, 'a')")
    options = captured(postgres, tmp_path, on_ddl="resnapshot")
    options = replace(options, sinks=options.sinks[:1])
    run_to_end(options)
    execute(postgres, "ALTER TABLE orders ADD COLUMN extra int DEFAULT 7", "INSERT INTO orders VALUES (2, 'b', 8)")
    run_to_end(options)
    assert "column extra is new" in caplog.text
    assert position(options).due == {}
    assert len(silent(options)) == 1
    assert history(tmp_path) == [(1, "read"), (2, "insert")]


def test_a_new_schema_that_a_snapshot_shows_first(postgres: str, tmp_path: Path) -> None:
    """No change of the table has the new column yet when somebody has it read again: that is enough."""
    execute(postgres, ORDERS, "INSERT INTO orders VALUES (1, 1, 'a')")
    options = captured(postgres, tmp_path, on_ddl="resnapshot")
    run_to_end(options)
    execute(postgres, "ALTER TABLE orders ADD COLUMN extra int DEFAULT 7")
    pipeline = open_pipeline(options)
    source, table = find_table(pipeline, "orders")
    pipeline.requests.ask_snapshot(table, source, where="", empties=False, ids=pipeline.ids)
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (2, 2, 'b', 8)")
    run_to_end(options)
    assert delta_rows(tmp_path / "current", "id", "extra") == [(1, 7), (2, 8)]
    assert Counter(op for _, op in history(tmp_path)) == {"read": 1 + 1, "insert": 1}
    assert silent(options) == []


def test_a_spec_that_forbids_what_it_asks_for(tmp_path: Path) -> None:
    spec = tmp_path / "firnline.yml"
    spec.write_text("""
name: shop
sources:
  db: {type: postgres, dsn: postgresql://localhost/x, tables: [orders], snapshot: never, on_ddl: resnapshot}
sinks:
  - {name: history, type: delta, table: lake/history, input: db.orders}
""")
    with pytest.raises(ConfigError, match="snapshot: never forbids it"):
        build_options(load_spec(str(spec), environ={}), environ={})


@pytest.mark.parametrize(
    ("statement", "again"),
    [
        ("DROP TABLE orders", {"shop.orders": "replace"}),
        ("DROP TABLES IF EXISTS `orders`, b.c", {"shop.orders": "replace", "b.c": "replace"}),
        ("DROP TEMPORARY TABLE orders", {}),
        ("DROP DATABASE IF EXISTS `shop`", {"shop.*": "replace"}),
        ("ALTER DATABASE shop CHARACTER SET latin1", {}),
        ("CREATE OR REPLACE TABLE orders (id int)", {"shop.orders": "replace"}),
        ("RENAME TABLE orders TO old", {"shop.orders": "replace", "shop.old": "replace"}),
        (
            "RENAME TABLE orders TO old, new TO orders",
            dict.fromkeys(("shop.new", "shop.orders", "shop.old"), "replace"),
        ),
        ("ALTER TABLE orders RENAME TO old", {"shop.orders": "replace", "shop.old": "replace"}),
        ("ALTER TABLE orders RENAME old", {"shop.orders": "replace", "shop.old": "replace"}),
        ("ALTER TABLE orders RENAME=`old`", {"shop.orders": "replace", "shop.old": "replace"}),
        ("ALTER TABLE orders RENAME AS`old`", {"shop.orders": "replace", "shop.old": "replace"}),
        ("ALTER TABLE orders DROP COLUMN `rename`, ADD COLUMN renamed int", {"shop.orders": "read"}),
        ("ALTER TABLE orders TRUNCATE PARTITION p1", {"shop.orders": "empty"}),
        ("ALTER IGNORE TABLE orders ADD UNIQUE (x)", {"shop.orders": "empty"}),
        ("ALTER TABLE orders CONVERT TO CHARACTER SET latin1", {"shop.orders": "read"}),
        ("alter table orders add column x int not null", {"shop.orders": "read"}),
        ("ALTER TABLE orders ADD x int DEFAULT 5, ADD INDEX (x)", {"shop.orders": "read"}),
        ("ALTER TABLE orders ADD COLUMN (x int GENERATED ALWAYS AS (id * 2))", {"shop.orders": "read"}),
        ("ALTER TABLE orders RENAME COLUMN a TO b", {"shop.orders": "read"}),
        ("ALTER TABLE orders ADD COLUMN x int", {}),
        ("ALTER TABLE orders ADD COLUMN x int NULL DEFAULT NULL", {}),
        ("ALTER TABLE orders ADD COLUMN x varchar(9) COMMENT 'NOT NULL DEFAULT'", {}),
        ("ALTER TABLE orders ADD INDEX (x)", {}),
        ("ALTER TABLE orders RENAME INDEX a TO b", {}),
        ("ALTER TABLE orders DROP COLUMN x", {"shop.orders": "read"}),
        ("ALTER TABLE orders DROP INDEX x", {}),
        ("CREATE TABLE orders (id int NOT NULL)", {}),
    ],
)
def test_statements_that_change_rows_silently(statement: str, again: dict[str, str]) -> None:
    found = dict(classify(statement, "shop").effects)
    assert {table: effect.again for table, effect in found.items()} == again
    assert all(statement[:20] in effect.reason for effect in found.values())

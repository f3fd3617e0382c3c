"""Keys of captured tables: a sink that upserts takes the table's own key, and follows rows whose key changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command
from firnline.errors import BadRowError, ConfigError, SchemaError
from firnline.options import PipelineOptions, SinkOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.redis.options import RedisSinkOptions
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import Capturing, captured, delta_rows, execute, query, wait_until
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_once, run_to_end
from tests.support.redis import RedisServer
from tests.support.redis_sink import hashes

LINES = "CREATE TABLE lines (place int, note text, region text NOT NULL, number int, PRIMARY KEY (number, region))"
COLUMNS = ("place", "note", "region", "number")
SPEC = """
name: shop
sources:
  db: {{type: postgres, dsn: "{dsn}", tables: [lines, notes, seen]}}
sinks:
  - {{name: history, table: out/history, input: db.lines}}
  - {{name: current, table: out/current, input: "{input}", write: upsert}}
"""


def upserts(dsn: str, folder: Path) -> tuple[SinkOptions, ...]:
    """Sinks of every kind that upsert the table without a key in the spec."""
    reads: dict[str, Any] = {"input": "db.lines", "write": "upsert"}
    return (
        DeltaSinkOptions("current", str(folder / "current"), **reads),
        DeltaSinkOptions("optional", str(folder / "optional"), required=False, **reads),
        PostgresSinkOptions("copy", dsn, "lake.lines", **reads),
        DeltaPartsOptions("parts", str(folder / "parts" / "{region}"), **reads),
    )


def test_the_key_is_that_of_the_table(postgres: str, tmp_path: Path) -> None:
    execute(postgres, LINES)
    options = captured(postgres, tmp_path, tables=("lines",))
    options = replace(options, sinks=upserts(postgres, tmp_path))
    run_to_end(options)
    execute(postgres, "INSERT INTO lines SELECT g, 'n', 'r' || g % 2, g / 2 FROM generate_series(1, 40) g")
    run_to_end(options)
    execute(
        postgres,
        "UPDATE lines SET note = 'new' WHERE number < 5",
        "UPDATE lines SET number = number + 100 WHERE number > 15",
        "DELETE FROM lines WHERE number = 7",
    )
    run_to_end(options)
    run_to_end(options)  # an optional table may come later
    wanted = sorted(query(postgres, f"SELECT {', '.join(COLUMNS)} FROM lines"), key=repr)
    assert delta_rows(tmp_path / "current", *COLUMNS) == wanted
    assert delta_rows(tmp_path / "optional", *COLUMNS) == wanted
    assert sorted(query(postgres, f"SELECT {', '.join(COLUMNS)} FROM lake.lines"), key=repr) == wanted
    parts = [row for name in ("r0", "r1") for row in delta_rows(tmp_path / "parts" / name, *COLUMNS)]
    assert sorted(parts, key=repr) == wanted


def test_another_replica_identity_is_the_key(postgres: str, tmp_path: Path) -> None:
    execute(
        postgres,
        LINES,
        "ALTER TABLE lines ALTER COLUMN place SET NOT NULL",
        "CREATE UNIQUE INDEX by_place ON lines (place)",
        "ALTER TABLE lines REPLICA IDENTITY USING INDEX by_place",
    )
    options = captured(postgres, tmp_path, tables=("lines",))
    options = replace(options, sinks=upserts(postgres, tmp_path)[:1])
    run_to_end(options)
    execute(postgres, "INSERT INTO lines SELECT g, 'n', 'r', g FROM generate_series(1, 5) g")
    execute(postgres, "UPDATE lines SET number = 50 WHERE place = 3", "DELETE FROM lines WHERE number = 4")
    run_to_end(options)
    wanted = sorted(query(postgres, f"SELECT {', '.join(COLUMNS)} FROM lines"), key=repr)
    assert delta_rows(tmp_path / "current", *COLUMNS) == wanted


def test_commands_that_only_look_ask_no_server(postgres: str, tmp_path: Path) -> None:
    """What is held can be shown while the database is away."""
    execute(postgres, LINES)
    options = captured(postgres, tmp_path, tables=("lines",))
    options = replace(options, sinks=upserts(postgres, tmp_path))
    run_to_end(options)
    source = replace(options.sources[0], dsn="postgresql://nobody@127.0.0.1:9/none")  # type: ignore[call-arg]
    away = open_pipeline(replace(options, sources=(source,)))
    assert [sink.load().epoch for sink in away.sinks if sink.name != "optional"] == [away.load().epoch] * 3


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("lines", "current keeps one row per number, region: the later row counts"),
        ("notes", "table public.notes has no key, so its changes can be appended and not upserted"),
        ("seen", "table public.seen has no key"),
        ("", "a source does not say what identifies a row"),
    ],
)
def test_dry_run_says_which_key(
    table: str,
    words: str,
    postgres: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    execute(postgres, LINES, "CREATE TABLE notes (text text)")
    execute(postgres, "CREATE TABLE seen (id int PRIMARY KEY)", "ALTER TABLE seen REPLICA IDENTITY NOTHING")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "firnline.yml").write_text(SPEC.format(dsn=postgres, input=f"db.{table}" if table else "db"))
    code = run_command(["dry-run"])
    captured_text = capsys.readouterr()
    assert words in " ".join((captured_text.out + captured_text.err).split())
    assert (code == 0) == (table == "lines")


def test_a_table_that_does_not_exist_has_no_key(postgres: str, tmp_path: Path) -> None:
    options = captured(postgres, tmp_path, tables=("lines",))
    options = replace(options, sinks=upserts(postgres, tmp_path)[:1])
    run = run_once(options)
    assert isinstance(run.result.error, ConfigError)
    assert "table public.lines does not exist yet" in run.result.error.message


def test_a_row_without_the_key_of_a_sink_leaves_it(postgres: str, tmp_path: Path) -> None:
    """A value becomes null and comes back; such rows go to quarantine, also the first of all."""
    execute(postgres, "CREATE TABLE orders (id int PRIMARY KEY, code text)", "ALTER TABLE orders REPLICA IDENTITY FULL")
    execute(postgres, "INSERT INTO orders VALUES (1, NULL), (2, 'b'), (3, 'c'), (4, 'd')")
    options = captured(postgres, tmp_path)
    options = replace(options, sinks=(options.sinks[0], replace(options.sinks[1], key=("code",))))
    assert run_once(options).result.set_aside == {}
    assert delta_rows(tmp_path / "current", "id", "code") == [(2, "b"), (3, "c"), (4, "d")]
    execute(
        postgres,
        "UPDATE orders SET code = NULL WHERE id = 2",
        "UPDATE orders SET code = 'a' WHERE id = 1",
        "UPDATE orders SET code = NULL WHERE id = 3",
        "UPDATE orders SET code = 'x' WHERE id = 3",
        "UPDATE orders SET code = NULL WHERE id = 4",
        "DELETE FROM orders WHERE id = 4",
    )
    run_to_end(options)
    assert delta_rows(tmp_path / "current", "id", "code") == [(1, "a"), (3, "x")]
    folder = tmp_path / "history" / "_firnline" / "shop" / "quarantine"
    assert len(list(folder.glob("*.parquet"))) == 2


# -- MySQL and MariaDB ------------------------------------------------------------------------------------


def test_the_key_of_a_binlog_table(binlog_server: BinlogServer, tmp_path: Path) -> None:
    binlog_server.run(
        "CREATE DATABASE shop", LINES.replace("lines", "shop.lines").replace("region text", "region varchar(9)")
    )
    options = PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{binlog_server.dsn}/shop", ("lines",)),),
        sinks=upserts("", tmp_path)[:1],
    )
    run_to_end(options)
    values = ", ".join(f"({n}, 'n', 'r{n % 2}', {n // 2})" for n in range(20))
    binlog_server.run(
        f"INSERT INTO shop.lines VALUES {values}",
        "UPDATE shop.lines SET number = number + 100 WHERE number > 7",
        "UPDATE shop.lines SET note = 'new' WHERE number = 3",
        "DELETE FROM shop.lines WHERE number = 4 AND region = 'r0'",
    )
    run_to_end(options)
    held = binlog_server.run(f"SELECT {', '.join(COLUMNS)} FROM shop.lines")
    assert delta_rows(tmp_path / "current", *COLUMNS) == sorted((tuple(row) for row in held), key=repr)


# -- keys that change -------------------------------------------------------------------------------------

LARGE = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 400) g)"
ORDERS = "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(10,2), note text)"


def test_a_key_changes_under_identity_full(postgres: str, tmp_path: Path) -> None:
    """The log has whole old rows, and does not say which columns are the key."""
    execute(postgres, ORDERS, "ALTER TABLE orders REPLICA IDENTITY FULL")
    options = captured(postgres, tmp_path)
    copy = PostgresSinkOptions("copy", postgres, "lake.orders", input="db.orders", write="upsert")
    options = replace(options, sinks=(*options.sinks, copy))
    run_to_end(options)
    execute(postgres, f"INSERT INTO orders SELECT g, g, {LARGE} FROM generate_series(1, 6) g")
    run_to_end(options)
    execute(
        postgres,
        "UPDATE orders SET id = 20 WHERE id = 1",
        "UPDATE orders SET amount = 5, id = id + 100 WHERE id IN (2, 3)",
        "UPDATE orders SET amount = 7 WHERE id = 4",
        "UPDATE orders SET note = NULL WHERE id = 5",
        "DELETE FROM orders WHERE id = 6",
    )
    run_to_end(options)
    rows = "SELECT id, amount, note FROM {} ORDER BY id"
    wanted = query(postgres, rows.format("orders"))
    assert delta_rows(tmp_path / "current", "id", "amount", "note") == sorted(wanted, key=repr)
    assert query(postgres, rows.format("lake.orders")) == wanted
    ops = [op for _, op in delta_rows(tmp_path / "history", "id", "_op")]
    assert {op: ops.count(op) for op in ops} == {"insert": 9, "delete": 4, "update": 2}


KINDS = "CREATE TABLE orders (id bigint PRIMARY KEY, amount int, note text, extra text, kind text)"
WHOLE = ("id", "amount", "note", "extra", "kind")


def move_rows(run: Callable[..., object], large: str, table: str = "orders") -> None:
    """Change keys of rows whose values only the table has, or an earlier change: once, twice, in a circle."""
    run(f"UPDATE {table} SET id = 101 WHERE id = 1")
    run(f"UPDATE {table} SET amount = 7 WHERE id = 2", f"UPDATE {table} SET id = 102 WHERE id = 2")
    run(f"UPDATE {table} SET id = 103 WHERE id = 3", f"UPDATE {table} SET id = 203, extra = 'x' WHERE id = 103")
    run(f"INSERT INTO {table} VALUES (50, 5, {large}, 'new', 'a')", f"UPDATE {table} SET id = 150 WHERE id = 50")
    run(f"UPDATE {table} SET amount = 8 WHERE id = 150")
    run(f"DELETE FROM {table} WHERE id = 4", f"UPDATE {table} SET id = 4 WHERE id = 5")  # a key that was deleted
    for old, new in ((6, 99), (7, 6), (99, 7)):  # two rows change places
        run(f"UPDATE {table} SET id = {new} WHERE id = {old}")
    run(f"UPDATE {table} SET id = 108, note = 'short' WHERE id = 8", f"UPDATE {table} SET amount = 9 WHERE id = 108")
    run(f"UPDATE {table} SET kind = 'b' WHERE id = 9")  # another partition
    run(f"UPDATE {table} SET kind = 'b', id = 110 WHERE id = 10")
    run(f"UPDATE {table} SET amount = 1 WHERE id = 11")
    run(f"UPDATE {table} SET id = 112 WHERE id = 12", f"DELETE FROM {table} WHERE id = 112")


@pytest.mark.parametrize("partition_by", [(), ("kind",)], ids=["plain", "partitioned"])
def test_moved_rows_take_their_values_along(postgres: str, tmp_path: Path, partition_by: tuple[str, ...]) -> None:
    execute(postgres, KINDS)
    options = captured(postgres, tmp_path)
    history, current = options.sinks
    options = replace(options, sinks=(history, replace(current, partition_by=partition_by)))  # type: ignore[call-arg]
    run_to_end(options)
    execute(postgres, f"INSERT INTO orders SELECT g, g, {LARGE} || g, {LARGE} || -g, 'a' FROM generate_series(1, 12) g")
    run_to_end(options)
    move_rows(partial(execute, postgres), LARGE)
    run_to_end(options)
    held = query(postgres, f"SELECT {', '.join(WHOLE)} FROM orders")
    assert delta_rows(tmp_path / "current", *WHOLE) == sorted(held, key=repr)
    assert run_once(options).result.epochs == 0
    lost = [path for path in (tmp_path / "current").rglob("*.parquet") if "changes" in str(path)]
    assert len(lost) <= 3  # those that ledger entries name; what was staged anew is gone


@pytest.mark.parametrize("partition_by", [(), ("kind",)], ids=["plain", "partitioned"])
def test_moved_rows_of_minimal_images(
    binlog_server: BinlogServer, tmp_path: Path, partition_by: tuple[str, ...]
) -> None:
    binlog_server.run(
        "CREATE DATABASE shop", KINDS.replace("orders", "shop.orders").replace("kind text", "kind varchar(9)")
    )
    options = PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{binlog_server.dsn}/shop", ("orders",)),),
        sinks=(
            DeltaSinkOptions(
                "current", str(tmp_path / "current"), input="db.orders", write="upsert", partition_by=partition_by
            ),
        ),
    )
    run_to_end(options)
    binlog_server.run(*(f"INSERT INTO shop.orders VALUES ({n}, {n}, 'n{n}', 'e{n}', 'a')" for n in range(1, 13)))
    run_to_end(options)
    minimal = "SET SESSION binlog_row_image = 'MINIMAL'"
    move_rows(lambda *statements: binlog_server.run(minimal, *statements), "'new'", "shop.orders")
    run_to_end(options)
    held = binlog_server.run(f"SELECT {', '.join(WHOLE)} FROM shop.orders")
    assert delta_rows(tmp_path / "current", *WHOLE) == sorted((tuple(row) for row in held), key=repr)


FILLED = f"INSERT INTO orders SELECT g, g, {LARGE} || g, {LARGE} || -g, 'a' FROM generate_series(1, 12) g"


def moved_into(dsn: str, folder: Path, *sinks: SinkOptions) -> PipelineOptions:
    """A pipeline with a history that decides and these sinks, after its rows were moved in one epoch."""
    execute(dsn, KINDS)
    options = captured(dsn, folder)
    options = replace(options, sinks=(options.sinks[0], *sinks))
    run_to_end(options)
    execute(dsn, FILLED)
    run_to_end(options)
    move_rows(partial(execute, dsn), LARGE)
    run_to_end(options)
    return options


def test_moved_rows_take_their_values_along_into_postgres(postgres: str, tmp_path: Path) -> None:
    """Into a table of the sink's own, and into one whose columns PostgreSQL reads as text; the next epoch, too."""
    execute(
        postgres,
        "CREATE SCHEMA lake",
        "CREATE TABLE lake.odd (id numeric PRIMARY KEY, amount text, note varchar, extra text, kind text, own int)",
    )
    reads: dict[str, Any] = {"input": "db.orders", "write": "upsert"}
    options = moved_into(
        postgres,
        tmp_path,
        PostgresSinkOptions("copy", postgres, "lake.orders", **reads),
        PostgresSinkOptions("odd", postgres, "lake.odd", **reads),
        PostgresSinkOptions("some", postgres, "lake.some", columns=("id", "extra"), where="id < 100000", **reads),
    )
    whole = f"SELECT {', '.join(WHOLE)} FROM {{}} ORDER BY id"
    plain = "SELECT id::bigint, amount::int, note, extra, kind FROM {} ORDER BY id"
    for _ in range(2):
        wanted = query(postgres, whole.format("orders"))
        assert query(postgres, whole.format("lake.orders")) == wanted
        assert query(postgres, plain.format("lake.odd")) == wanted
        held = query(postgres, "SELECT id, extra FROM lake.some ORDER BY id")
        assert held == [(row[0], row[3]) for row in wanted]
        execute(postgres, "UPDATE orders SET id = id + 1000", "UPDATE orders SET id = id - 999 WHERE id > 1100")
        run_to_end(options)


def test_a_table_that_is_emptied_has_no_values_to_take_along(postgres: str, tmp_path: Path) -> None:
    copy = PostgresSinkOptions("copy", postgres, "lake.orders", input="db.orders", write="upsert")
    options = moved_into(postgres, tmp_path, copy)
    execute(postgres, "UPDATE orders SET id = 500 WHERE id = 6", "TRUNCATE orders", FILLED)
    execute(postgres, "UPDATE orders SET id = 600 WHERE id = 6", "UPDATE orders SET id = 6 WHERE id = 7")
    run_to_end(options)
    whole = f"SELECT {', '.join(WHOLE)} FROM {{}} ORDER BY id"
    assert query(postgres, whole.format("lake.orders")) == query(postgres, whole.format("orders"))


def test_moved_rows_take_their_values_along_into_redis(
    postgres: str, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the rows are cut into scripts."""
    copy = RedisSinkOptions(
        "copy", redis_server.url, input="db.orders", mode="hash", write="upsert", key=("id",), durability="none"
    )
    execute(postgres, KINDS)
    options = captured(postgres, tmp_path)
    options = replace(options, sinks=(options.sinks[0], copy))
    run_to_end(options)
    execute(postgres, FILLED)
    run_to_end(options)
    for rows, size in ((1, 1 << 20), (2, 1 << 20), (3, 1), (1000, 1), (1000, 1 << 20)):
        monkeypatch.setattr("firnline.sinks.redis.sink.RANGE_ROWS", rows)
        monkeypatch.setattr("firnline.sinks.redis.encode.RANGE_BYTES", size)
        move_around(postgres)
        run_to_end(options)
        wanted = {
            f"copy:{row[0]}": {name: str(value) for name, value in zip(WHOLE, row, strict=True) if value is not None}
            for row in query(postgres, f"SELECT {', '.join(WHOLE)} FROM orders")
        }
        assert hashes(redis_server, "copy:*") == wanted


def move_around(dsn: str) -> None:
    """Move rows to other keys and two to each other's, with values that only the table has."""
    for old, new in ((1, 99), (2, 1), (99, 2)):
        execute(dsn, f"UPDATE orders SET id = {new}, amount = amount + 1 WHERE id = {old}")
    execute(dsn, "UPDATE orders SET id = id + 20 WHERE id BETWEEN 3 AND 12")
    execute(dsn, "UPDATE orders SET id = id - 20 WHERE id > 20", "UPDATE orders SET amount = 1 WHERE id = 5")


def test_moved_rows_take_their_values_along_into_tables_of_a_template(postgres: str, tmp_path: Path) -> None:
    """Within a table of the template, and with one table for each captured table. Optional tables, too."""
    execute(postgres, "CREATE TABLE lines (id int, kind text, note text, PRIMARY KEY (id, kind))")
    options = captured(postgres, tmp_path, tables=("lines",))
    reads: dict[str, Any] = {"input": "db.lines", "write": "upsert"}
    options = replace(
        options,
        sinks=(
            DeltaSinkOptions("history", str(tmp_path / "history"), input="db.lines"),
            DeltaSinkOptions("optional", str(tmp_path / "optional"), required=False, **reads),
            DeltaPartsOptions("parts", str(tmp_path / "parts" / "{kind}"), **reads),
            DeltaPartsOptions("tables", str(tmp_path / "tables" / "{table}"), input="db.*", write="upsert"),
            PostgresSinkOptions("copy", postgres, "lake.{kind}", **reads),
        ),
    )
    run_to_end(options)
    execute(postgres, f"INSERT INTO lines SELECT g, 'k' || g % 2, {LARGE} || g FROM generate_series(1, 8) g")
    run_to_end(options)
    execute(postgres, "UPDATE lines SET id = id + 100 WHERE id < 5", "UPDATE lines SET id = 9 WHERE id = 101")
    run_to_end(options)
    run_to_end(options)  # an optional table may come later
    wanted = sorted(query(postgres, "SELECT id, kind, note FROM lines"), key=repr)
    parts = [row for name in ("k0", "k1") for row in delta_rows(tmp_path / "parts" / name, "id", "kind", "note")]
    assert sorted(parts, key=repr) == wanted
    assert delta_rows(tmp_path / "optional", "id", "kind", "note") == wanted
    assert delta_rows(tmp_path / "tables" / "lines", "id", "kind", "note") == wanted
    copies = query(
        postgres, "SELECT * FROM (SELECT id, kind, note FROM lake.k0 UNION SELECT id, kind, note FROM lake.k1) u"
    )
    assert sorted(copies, key=repr) == wanted


@pytest.mark.parametrize("kind", ["parts", "postgres", "condition"])
def test_a_row_that_leaves_its_table_behind_is_a_bad_row(kind: str, postgres: str, tmp_path: Path) -> None:
    """The values are in another table of the template, or nowhere in the sink."""
    execute(postgres, "CREATE TABLE lines (id int, kind text, note text, PRIMARY KEY (id, kind))")
    options = captured(postgres, tmp_path, tables=("lines",))
    reads: dict[str, Any] = {"input": "db.lines", "write": "upsert"}
    sinks: dict[str, SinkOptions] = {
        "parts": DeltaPartsOptions("copy", str(tmp_path / "parts" / "{kind}"), **reads),
        "postgres": PostgresSinkOptions("copy", postgres, "lake.{kind}", **reads),
        "condition": PostgresSinkOptions("copy", postgres, "lake.lines", where="kind = 'b'", **reads),
    }
    history = DeltaSinkOptions("history", str(tmp_path / "history"), input="db.lines")
    options = replace(options, sinks=(history, sinks[kind]))
    run_to_end(options)
    execute(postgres, f"INSERT INTO lines VALUES (1, 'a', {LARGE}), (2, 'b', {LARGE})")
    run_to_end(options)
    execute(postgres, "UPDATE lines SET id = 3 WHERE id = 2", "UPDATE lines SET kind = 'b' WHERE id = 1")
    run = run_once(options)
    assert isinstance(run.result.error, BadRowError)
    assert "the log of the database does not have its value of note" in run.result.error.message
    assert "ALTER TABLE ... REPLICA IDENTITY FULL" in run.result.error.hint
    assert "firnline sinks resync copy" in run.result.error.hint


# -- sinks with another key than the log ------------------------------------------------------------------

BY_ID = "CREATE TABLE shop.orders (pk int PRIMARY KEY, id int NOT NULL UNIQUE, note varchar(9))"
NO_KEY = "CREATE TABLE shop.orders (pk int, id int NOT NULL, note varchar(9))"
OTHER = ("pk", "id", "note")
FILL = "INSERT INTO {} VALUES (1, 1, 'a'), (2, 2, 'b'), (3, 3, 'c'), (4, 4, 'd')"
CHANGES = (
    "UPDATE {} SET id = 100 WHERE id = 1",
    "UPDATE {} SET note = 'u' WHERE id = 2",
    "DELETE FROM {} WHERE id = 3",
    "UPDATE {} SET id = 400, note = NULL WHERE id = 4",
    "UPDATE {} SET id = 4 WHERE id = 2",
)


def changes_of(table: str) -> list[str]:
    return [statement.format(table) for statement in CHANGES]


def keyed(source: Any, folder: Path, key: tuple[str, ...] = ("id",)) -> PipelineOptions:
    current = DeltaSinkOptions("current", str(folder / "current"), input="db.orders", write="upsert", key=key)
    return PipelineOptions(name="shop", sources=(source,), sinks=(current,))


def binlog_orders(server: BinlogServer, folder: Path, ddl: str, key: tuple[str, ...] = ("id",)) -> PipelineOptions:
    server.run("CREATE DATABASE shop", ddl)
    options = keyed(MySqlSourceOptions("db", f"{server.dsn}/shop", ("orders",)), folder, key)
    run_to_end(options)
    server.run(FILL.format("shop.orders"))
    run_to_end(options)
    return options


def check_binlog(server: BinlogServer, folder: Path) -> None:
    held = server.run(f"SELECT {', '.join(OTHER)} FROM shop.orders")
    assert delta_rows(folder / "current", *OTHER) == sorted((tuple(row) for row in held), key=repr)


@pytest.mark.parametrize("ddl", [BY_ID, NO_KEY], ids=["another-key", "no-key"])
def test_rows_move_by_the_key_of_the_sink(binlog_server: BinlogServer, tmp_path: Path, ddl: str) -> None:
    options = binlog_orders(binlog_server, tmp_path, ddl)
    binlog_server.run(*changes_of("shop.orders"))
    run_to_end(options)
    check_binlog(binlog_server, tmp_path)


@pytest.mark.parametrize("change", ["UPDATE shop.orders SET note = 'u' WHERE id = 2", "DELETE FROM shop.orders"])
def test_minimal_images_without_the_key_of_the_sink(binlog_server: BinlogServer, tmp_path: Path, change: str) -> None:
    options = binlog_orders(binlog_server, tmp_path, BY_ID)
    before = delta_rows(tmp_path / "current", *OTHER)
    binlog_server.run("SET SESSION binlog_row_image = 'MINIMAL'", change)
    check_refused(options, "table shop.orders: a sink upserts its rows by id, the log identifies them by pk")
    assert delta_rows(tmp_path / "current", *OTHER) == before


def check_refused(options: PipelineOptions, words: str) -> None:
    run = run_once(options)
    assert isinstance(run.result.error, SchemaError)
    assert words in run.result.error.message


@pytest.mark.parametrize("image", ["FULL", "MINIMAL"])
def test_the_key_of_the_table_changes_in_a_run(binlog_server: BinlogServer, tmp_path: Path, image: str) -> None:
    """The sink has the key that the table had when the run began: several rows may have the same values there."""
    options = binlog_orders(binlog_server, tmp_path, f"{NO_KEY[:-1]}, PRIMARY KEY (id))", key=())

    def has(key: int) -> bool:
        return (key,) in delta_rows(tmp_path / "current", "id")

    with Capturing(options, fails="schema") as run:
        binlog_server.run("INSERT INTO shop.orders VALUES (8, 800, 'begin')")
        wait_until(lambda: has(800))
        binlog_server.run(
            f"SET SESSION binlog_row_image = '{image}'",
            "ALTER TABLE shop.orders DROP PRIMARY KEY, ADD PRIMARY KEY (pk), ADD UNIQUE (id)",
            *changes_of("shop.orders"),
            "INSERT INTO shop.orders VALUES (9, 900, 'end')",
        )
        wait_until(lambda: run.has_ended)
    assert not has(900)
    check_refused(options, "were upserted by the key id")  # the spec names none, and that of the table is another
    if image == "FULL":  # id identifies a row as before
        run_to_end(replace(options, sinks=(replace(options.sinks[0], key=("id",)),)))
        assert has(900)
        check_binlog(binlog_server, tmp_path)


def test_rows_move_by_the_key_of_the_sink_under_identity_full(postgres: str, tmp_path: Path) -> None:
    execute(postgres, BY_ID.replace("shop.", ""), "ALTER TABLE orders REPLICA IDENTITY FULL")
    options = keyed(captured(postgres, tmp_path).sources[0], tmp_path)
    run_to_end(options)
    execute(postgres, FILL.format("orders"))
    run_to_end(options)
    execute(postgres, *changes_of("orders"))
    run_to_end(options)
    held = query(postgres, f"SELECT {', '.join(OTHER)} FROM orders")
    assert delta_rows(tmp_path / "current", *OTHER) == sorted(held, key=repr)
    execute(postgres, "ALTER TABLE orders REPLICA IDENTITY DEFAULT", "DELETE FROM orders WHERE id = 100")
    check_refused(options, "table public.orders: a sink upserts its rows by id, the log identifies them by pk")
    assert delta_rows(tmp_path / "current", *OTHER) == sorted(held, key=repr)


def test_a_date_that_is_none_in_a_key(binlog_server: BinlogServer, tmp_path: Path) -> None:
    zero = ("SET sql_mode = 'ALLOW_INVALID_DATES'", "INSERT INTO shop.orders VALUES ('0000-00-00', 1)")
    binlog_server.run(
        "CREATE DATABASE shop", "CREATE TABLE shop.orders (day date, id int, PRIMARY KEY (day, id))", *zero
    )
    options = keyed(MySqlSourceOptions("db", f"{binlog_server.dsn}/shop", ("orders",)), tmp_path, key=())
    words = "table shop.orders: a row has 0000-00-00 in day, a column of the key"
    check_refused(options, words)  # by the chunk
    binlog_server.run("DELETE FROM shop.orders", "INSERT INTO shop.orders VALUES ('2020-01-01', 1)")
    binlog_server.run(*zero)
    check_refused(options, words)  # by the log

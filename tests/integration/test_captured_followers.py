"""Captured changes in followers that upsert: every target is compared with the database, row by row."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.history.edits.sinks import SinkEdit
from firnline.options import FollowerOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.redis.options import RedisSinkOptions
from tests.support.captured import ORDERS, captured, delta_rows, execute, query
from tests.support.pipelines import run_once, run_to_end
from tests.support.redis import RedisServer
from tests.support.redis_sink import hashes

LARGE = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 400) g)"
ROWS = "SELECT id, amount, note FROM {} ORDER BY id"


@pytest.fixture
def database(postgres: str) -> str:
    execute(postgres, ORDERS)
    return postgres


def into(dsn: str, folder: Path, sink: FollowerOptions, **source: Any) -> PipelineOptions:
    """The history of `orders`, which decides, and one follower."""
    options = captured(dsn, folder, **source)
    return replace(options, sinks=(options.sinks[0], sink))


def copy_of(dsn: str, **settings: Any) -> PostgresSinkOptions:
    values = {"input": "db.orders", "write": "upsert", "key": ("id",), **settings}
    return PostgresSinkOptions("copy", dsn, "lake.orders", **values)


def check_copy(dsn: str, table: str = "lake.orders") -> None:
    assert query(dsn, ROWS.format(table)) == query(dsn, ROWS.format("orders"))


# -- PostgreSQL -------------------------------------------------------------------------------------------


def test_values_that_the_log_leaves_out_stay(database: str, tmp_path: Path) -> None:
    """Within an epoch, over several, after a delete, for a row that is new in the epoch, and in several columns."""
    execute(database, "ALTER TABLE orders ADD COLUMN extra text")
    options = into(database, tmp_path, copy_of(database))
    rows = "SELECT id, amount, note, extra FROM {} ORDER BY id"
    run_to_end(options)
    execute(database, f"INSERT INTO orders SELECT g, 1, {LARGE} || g, {LARGE} || -g FROM generate_series(1, 7) g")
    execute(database, "INSERT INTO orders VALUES (8, 1, 'short', NULL)")
    run_to_end(options)
    execute(
        database,
        "UPDATE orders SET amount = 2 WHERE id IN (1, 8)",
        "UPDATE orders SET amount = 3 WHERE id = 1",
        f"UPDATE orders SET note = {LARGE} || 'x', amount = 4 WHERE id = 2",
        "UPDATE orders SET amount = 5 WHERE id = 2",
        "DELETE FROM orders WHERE id = 3",
        f"INSERT INTO orders VALUES (3, 1, {LARGE} || 'y', {LARGE})",
        "UPDATE orders SET amount = 6 WHERE id = 3",
        f"INSERT INTO orders VALUES (9, 1, {LARGE} || 'z', NULL)",
        "UPDATE orders SET amount = 7 WHERE id = 9",
        "UPDATE orders SET note = NULL WHERE id = 4",
        "UPDATE orders SET amount = 8 WHERE id = 4",
        "UPDATE orders SET extra = 'now short' WHERE id = 5",
        "UPDATE orders SET note = 'now short' WHERE id = 5",
        "UPDATE orders SET amount = 9 WHERE id = 6",
        "DELETE FROM orders WHERE id = 6",
    )
    run_to_end(options)
    held = query(database, rows.format("lake.orders"))
    assert held == query(database, rows.format("orders"))
    assert [row[0] for row in held] == [1, 2, 3, 4, 5, 7, 8, 9]
    assert len(held[0][2]) > 12_000


def test_an_emptied_table_is_emptied_in_log_order(database: str, tmp_path: Path) -> None:
    options = into(database, tmp_path, copy_of(database))
    run_to_end(options)
    execute(database, "INSERT INTO orders SELECT g, g, 'x' FROM generate_series(1, 50) g")
    run_to_end(options)
    execute(
        database,
        "INSERT INTO orders VALUES (60, 1, 'gone')",
        "UPDATE orders SET amount = 0 WHERE id = 7",
        "TRUNCATE orders",
        "INSERT INTO orders VALUES (5, 1, 'gone')",
        "TRUNCATE orders",
        f"INSERT INTO orders VALUES (7, 7, {LARGE})",
        "UPDATE orders SET amount = 8 WHERE id = 7",
    )
    run_to_end(options)
    check_copy(database)
    assert len(query(database, ROWS.format("lake.orders"))) == 1
    execute(database, "TRUNCATE orders")
    run_to_end(options)
    check_copy(database)
    execute(database, "INSERT INTO orders VALUES (8, 8, 'again')")
    run_to_end(options)
    check_copy(database)


def test_chosen_columns_and_renamed_types_keep_old_values(database: str, tmp_path: Path) -> None:
    """`columns` still lets the list of missing values through; values that PostgreSQL reads as text are kept, too."""
    execute(database, "ALTER TABLE orders ADD COLUMN tags text", "CREATE SCHEMA lake")
    execute(database, "CREATE TABLE lake.orders (id bigint PRIMARY KEY, note jsonb, tags text[])")
    options = into(database, tmp_path, copy_of(database, columns=("id", "note", "tags")))
    run_to_end(options)
    large = "(SELECT to_json(string_agg(md5(g::text), ''))::text FROM generate_series(1, 400) g)"
    many = "(SELECT array_agg(md5(g::text))::text FROM generate_series(1, 400) g)"
    execute(database, f"INSERT INTO orders VALUES (1, 1, {large}, {many}), (2, 1, {large}, {many})")
    run_to_end(options)
    execute(
        database,
        f"UPDATE orders SET note = {large} || ' '",
        "UPDATE orders SET amount = 2",
        "UPDATE orders SET tags = '{}'",
    )
    run_to_end(options)
    held = query(database, "SELECT id, length(note #>> '{}'), tags FROM lake.orders ORDER BY id")
    assert held == [(1, 12_800, []), (2, 12_800, [])]


def test_a_condition_on_a_value_that_the_log_leaves_out_is_a_bad_row(database: str, tmp_path: Path) -> None:
    """Nobody knows whether such a row fulfils the condition; an emptied table concerns all rows."""
    sink = copy_of(database, where="Note LIKE 'c4%' OR amount = 2")
    options = into(database, tmp_path, sink)
    run_to_end(options)
    execute(database, f"INSERT INTO orders VALUES (1, 1, {LARGE}), (2, 2, 'x'), (3, 3, 'x')")
    run_to_end(options)
    assert query(database, "SELECT id FROM lake.orders ORDER BY id") == [(1,), (2,)]
    execute(database, "UPDATE orders SET amount = 4 WHERE id = 1")
    run = run_once(options)
    assert run.result.error is not None
    assert "the log of the database does not have its value of note" in run.result.error.message
    letters = replace(options, sinks=(options.sinks[0], replace(sink, on_bad_row="dead_letter")))
    run_to_end(letters)
    assert query(database, "SELECT id, amount FROM lake.orders ORDER BY id") == [(1, 1), (2, 2)]
    execute(database, "TRUNCATE orders", "INSERT INTO orders VALUES (4, 2, 'y')")
    run_to_end(letters)
    assert query(database, "SELECT id, amount FROM lake.orders ORDER BY id") == [(4, 2)]


def test_a_table_that_cannot_be_emptied_is_a_bad_row(database: str, tmp_path: Path) -> None:
    options = into(database, tmp_path, copy_of(database, on_bad_row="dead_letter"))
    run_to_end(options)
    execute(database, "INSERT INTO orders VALUES (1, 1, 'x'), (2, 2, 'x')")
    run_to_end(options)
    execute(database, "CREATE TABLE lake.lines (of bigint REFERENCES lake.orders)", "INSERT INTO lake.lines VALUES (1)")
    execute(database, "UPDATE orders SET amount = 3", "TRUNCATE orders", "INSERT INTO orders VALUES (3, 3, 'new')")
    run_to_end(options)
    assert query(database, "SELECT id, amount FROM lake.orders ORDER BY id") == [(1, 3), (2, 3), (3, 3)]


def test_an_appended_table_gets_change_rows_as_they_are(database: str, tmp_path: Path) -> None:
    options = into(database, tmp_path, copy_of(database, write="append", key=()))
    run_to_end(options)
    execute(database, f"INSERT INTO orders VALUES (1, 1, {LARGE})", "UPDATE orders SET amount = 2", "TRUNCATE orders")
    run_to_end(options)
    held = query(database, "SELECT id, _op, _missing, length(note) FROM lake.orders ORDER BY _op")
    assert held == [
        (1, "insert", None, 12_800),
        (None, "truncate", ["id", "amount", "note"], None),
        (1, "update", ["note"], None),
    ]


# -- tables with a template -------------------------------------------------------------------------------


def test_every_table_of_a_template_is_emptied(database: str, tmp_path: Path) -> None:
    """In PostgreSQL and in Delta, with values that the log leaves out, by upserts and in a history."""
    execute(database, "ALTER TABLE orders ADD COLUMN region text")
    template: dict[str, Any] = {"input": "db.orders", "write": "upsert", "key": ("id",)}
    options = captured(database, tmp_path)
    options = replace(
        options,
        sinks=(
            options.sinks[0],
            PostgresSinkOptions("copy", database, "lake.{region}", **template),
            DeltaPartsOptions("parts", str(tmp_path / "lake" / "{region}"), **template),
            DeltaPartsOptions(
                "histories", str(tmp_path / "all" / "{region}"), input="db.orders", on_bad_row="dead_letter"
            ),
        ),
    )
    run_to_end(options)
    execute(database, f"INSERT INTO orders SELECT g, g, {LARGE}, 'r' || g % 3 FROM generate_series(1, 9) g")
    run_to_end(options)
    execute(database, "UPDATE orders SET amount = -1 WHERE id < 4", "DELETE FROM orders WHERE id IN (4, 5)")
    run_to_end(options)
    for number in range(3):
        wanted = query(database, f"SELECT id, amount, note FROM orders WHERE region = 'r{number}' ORDER BY id")
        assert query(database, ROWS.format(f"lake.r{number}")) == wanted
        assert delta_rows(tmp_path / "lake" / f"r{number}", "id", "amount", "note") == wanted
    execute(
        database,
        "INSERT INTO orders VALUES (20, 1, 'gone', 'r1'), (21, 1, 'gone', 'r9')",
        "TRUNCATE orders",
        "INSERT INTO orders VALUES (22, 1, 'stays', 'r1')",
    )
    run_to_end(options)
    left = {"r0": [], "r1": [(22, 1, "stays")], "r2": [], "r9": []}
    for name, rows in left.items():
        assert query(database, ROWS.format(f"lake.{name}")) == rows
        assert delta_rows(tmp_path / "lake" / name, "id", "amount", "note") == rows
        assert [op for (op,) in delta_rows(tmp_path / "all" / name, "_op")].count("truncate") == 1


# -- Redis ------------------------------------------------------------------------------------------------


def test_fields_of_a_hash_stay(database: str, tmp_path: Path, redis_server: RedisServer) -> None:
    sink = RedisSinkOptions(
        "copy", redis_server.url, input="db.orders", mode="hash", write="upsert", key=("id",), durability="none"
    )
    execute(database, "ALTER TABLE orders ADD COLUMN extra text")
    options = into(database, tmp_path, sink)
    run_to_end(options)
    execute(database, f"INSERT INTO orders VALUES (1, 1, {LARGE}, {LARGE} || 1), (2, 1, {LARGE}, 'x'), (3, 3, 'x', '')")
    run_to_end(options)
    execute(
        database,
        "UPDATE orders SET amount = NULL WHERE id = 1",
        "UPDATE orders SET extra = 'short' WHERE id = 1",
        f"UPDATE orders SET note = {LARGE} || 'new' WHERE id = 2",
        "UPDATE orders SET amount = 7 WHERE id = 2",
        "DELETE FROM orders WHERE id = 3",
        f"INSERT INTO orders VALUES (4, 4, {LARGE}, NULL)",
        "UPDATE orders SET amount = 8 WHERE id = 4",
    )
    run_to_end(options)
    held = hashes(redis_server, "copy:*")
    for row in query(database, "SELECT id, amount, note, extra FROM orders"):
        wanted = {
            name: str(value)
            for name, value in zip(("id", "amount", "note", "extra"), row, strict=True)
            if value is not None
        }
        assert held.pop(f"copy:{row[0]}") == wanted
    assert not held
    caveats = [words for one in open_pipeline(options).sinks for words in one.find_caveats()]
    assert any("a change row that empties its table (TRUNCATE) is a bad row there" in words for words in caveats)
    execute(database, "TRUNCATE orders")
    run = run_once(options)
    assert run.result.error is not None
    assert "it empties the table, which this sink cannot do" in run.result.error.message


def test_a_row_in_one_value_cannot_keep_a_part_of_it(database: str, tmp_path: Path, redis_server: RedisServer) -> None:
    sink = RedisSinkOptions(
        "copy", redis_server.url, input="db.orders", mode="string", write="upsert", key=("id",), durability="none"
    )
    options = into(database, tmp_path, sink)
    run_to_end(options)
    execute(database, f"INSERT INTO orders VALUES (1, 1, {LARGE})", "UPDATE orders SET amount = 2")
    run = run_once(options)
    assert run.result.error is not None
    assert "the log of the database does not have its value of note" in run.result.error.message


# -- many changes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8 if os.environ.get("FIRNLINE_PROOF") else 1))
def test_random_changes_leave_the_rows_of_the_database(
    seed: int, database: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Large values that stay, several changes of one key in one epoch, and emptied tables, in PostgreSQL and Redis."""
    chance = random.Random(seed)
    keyed: dict[str, Any] = {"input": "db.orders", "write": "upsert"}
    fields = RedisSinkOptions(
        "fields", redis_server.url, mode="hash", key=("id",), durability="none", where="_op <> 'truncate'", **keyed
    )
    execute(database, "ALTER TABLE orders ADD COLUMN extra text")
    options = captured(database, tmp_path)
    options = replace(options, sinks=(options.sinks[0], copy_of(database, key=()), fields))
    run_to_end(options)
    for number in range(6):
        statements = []
        for _ in range(25):
            key, large = chance.randrange(8), f"{LARGE} || {chance.randrange(1000)}"
            values = [chance.choice((large, "NULL", "'short'")) for _ in range(2)]
            statements.append(
                chance.choices(
                    [
                        f"INSERT INTO orders VALUES ({key}, 1, {values[0]}, {values[1]}) ON CONFLICT DO NOTHING",
                        f"UPDATE orders SET amount = {chance.randrange(99)} WHERE id = {key}",
                        f"UPDATE orders SET note = {values[0]} WHERE id = {key}",
                        f"UPDATE orders SET extra = {values[1]}, amount = NULL WHERE id = {key}",
                        f"DELETE FROM orders WHERE id = {key}",
                    ],
                    [30, 30, 15, 15, 10],
                )[0]
            )
        if number == 4:
            statements.insert(chance.randrange(25), "DELETE FROM orders")
            statements.insert(chance.randrange(25), "TRUNCATE orders")
        execute(database, *statements)
        run_to_end(options)
        rows = query(database, "SELECT id, amount, note, extra FROM orders ORDER BY id")
        assert query(database, "SELECT id, amount, note, extra FROM lake.orders ORDER BY id") == rows
        if number < 4:
            names = ("id", "amount", "note", "extra")
            wanted = [{n: str(v) for n, v in zip(names, row, strict=True) if v is not None} for row in rows]
            held = hashes(redis_server, "fields:*")
            assert [held[key] for key in sorted(held)] == wanted


def test_a_resync_gives_other_tables_no_columns(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS, "CREATE TABLE lines (id int PRIMARY KEY, other text)")
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'x')", "INSERT INTO lines VALUES (1, 'y')")
    options = captured(postgres, tmp_path, tables=("orders", "lines"))
    sinks = (
        DeltaSinkOptions("orders", str(tmp_path / "orders"), input="db.orders", write="upsert"),
        DeltaSinkOptions("lines", str(tmp_path / "lines"), input="db.lines", write="upsert"),
        PostgresSinkOptions("mirror", postgres, "lake.mirror", input="db.orders", write="upsert", required=False),
    )
    options = replace(options, sinks=sinks)
    run_to_end(options)
    SinkEdit(open_pipeline(options), "resync", "mirror", "orders").perform("person")
    run_to_end(options)
    assert [field.name for field in DeltaTable(tmp_path / "lines").schema().fields] == ["_rescued_data", "id", "other"]
    assert query(postgres, "SELECT id, note FROM lake.mirror") == [(1, "x")]

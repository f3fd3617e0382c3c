"""PostgreSQL tables that others take the name of, or whose key changes, while they are captured and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots, spooling
from firnline.sources.postgres.tables import PostgresTables
from tests.support.captured import (
    ORDERS,
    Capturing,
    captured,
    check_current,
    delta_rows,
    execute,
    has_read_all,
    history,
    position,
    query,
    wait_until,
)
from tests.support.kills import kill
from tests.support.pipelines import run_once, run_to_end

CODED = "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(10,2), note text, code int NOT NULL UNIQUE)"
SWAP = """
    BEGIN;
    CREATE TABLE orders_new (LIKE orders INCLUDING ALL);
    INSERT INTO orders_new SELECT id + 1000, amount, note FROM orders;
    DROP TABLE orders;
    ALTER TABLE orders_new RENAME TO orders;
    COMMIT"""


@pytest.fixture
def database(postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 100)
    return postgres


def fill(dsn: str, rows: int) -> None:
    execute(dsn, ORDERS, f"INSERT INTO orders SELECT g, g / 4.0, 'n' || g FROM generate_series(1, {rows}) g")


def once_after(monkeypatch: pytest.MonkeyPatch, chunks: int, do: Callable[[], None]) -> None:
    """Do something once, before the chunk behind so many is read."""
    real, count = PostgresTables.read_chunk, [0]

    def read(*arguments: Any, **more: Any) -> Any:
        if count[0] == chunks:
            count[0] += 1
            do()
        found = real(*arguments, **more)
        count[0] += found is not None
        return found

    monkeypatch.setattr(PostgresTables, "read_chunk", read)


# -- another table -------------------------------------------------------------------------------------


def test_a_table_that_takes_the_name_is_read_while_the_run_goes_on(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 0.2)
    fill(database, 50)
    options = captured(database, tmp_path)
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
        first = position(options).snapshots["public.orders"]
        execute(database, SWAP, "INSERT INTO orders VALUES (1, 1, 'after')")
        wait_until(lambda: position(options).snapshots["public.orders"].id != first.id and has_read_all(options))
        execute(database, "UPDATE orders SET amount = 9 WHERE id = 1")  # the log has its changes
        wait_until(lambda: (1, "update") in history(tmp_path))
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path))["truncate"] == 1
    oid = query(database, "SELECT 'orders'::regclass::oid::text")[0][0]
    assert position(options).snapshots["public.orders"].identity == oid != first.identity


def test_a_table_that_takes_the_name_between_runs_is_read_behind_the_changes_of_the_old_one(
    database: str, tmp_path: Path
) -> None:
    """The log still has changes of the old table: none of its rows stays."""
    fill(database, 5)
    options = captured(database, tmp_path)
    run_to_end(options)
    old = "INSERT INTO orders SELECT g, 0, 'old' FROM generate_series(100, 3000) g"
    new = "INSERT INTO orders VALUES (7, 7, 'seven')"
    execute(database, old, "UPDATE orders SET amount = 1 WHERE id < 5", "DROP TABLE orders", ORDERS, new)
    run_to_end(options)
    check_current(database, tmp_path)
    execute(database, "INSERT INTO orders VALUES (8, 8, 'eight')")
    run_to_end(options)
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {
        "read": 6,
        "insert": 2902,
        "update": 4,
        "truncate": 1,
    }


def test_a_table_that_takes_the_name_between_two_chunks(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(database, 500)
    other = "INSERT INTO orders SELECT g, 1, 'second' FROM generate_series(1, 450) g"
    once_after(monkeypatch, 2, lambda: execute(database, "DROP TABLE orders", ORDERS, other))
    options = captured(database, tmp_path)
    run_to_end(options)
    check_current(database, tmp_path)


def test_a_table_that_takes_the_name_is_not_read_if_changes_alone_are_wanted(database: str, tmp_path: Path) -> None:
    fill(database, 5)
    options = captured(database, tmp_path, snapshot="never")
    run_to_end(options)
    execute(database, "DROP TABLE orders", ORDERS, "INSERT INTO orders VALUES (7, 7, 'seven')")
    run_to_end(options)  # puts the new table into the publication
    execute(database, "INSERT INTO orders VALUES (8, 8, 'eight')")
    run_to_end(options)
    assert history(tmp_path) == [(8, "insert")]


# -- another key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (code)", id="key"),
        pytest.param("ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (code, id)", id="longer-key"),
        pytest.param("ALTER TABLE orders REPLICA IDENTITY USING INDEX orders_code_key", id="identity"),
    ],
)
@pytest.mark.parametrize("chunks", [1, 2])
def test_another_key_between_two_chunks(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, chunks: int
) -> None:
    """The last key of a chunk says nothing of rows that have another order."""
    execute(database, CODED, "INSERT INTO orders SELECT g, 0, 'n', 301 - g FROM generate_series(1, 300) g")
    once_after(monkeypatch, chunks, lambda: execute(database, change))
    run_to_end(captured(database, tmp_path))
    check_current(database, tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "values"),
    [
        pytest.param("kinds", "text", "(ARRAY['b', 'a', 'c'])[1 + g % 3]::kinds", id="type"),
        pytest.param("text", "uuid USING md5(kind)::uuid", "'k' || g % 3", id="type-that-the-last-key-has-not"),
        pytest.param('text COLLATE "C"', 'text COLLATE "und-x-icu"', "chr(64 + g % 58)", id="collation"),
    ],
)
def test_another_type_of_the_key_between_two_chunks(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, values: str
) -> None:
    execute(
        database,
        "DROP TYPE IF EXISTS kinds",
        "CREATE TYPE kinds AS ENUM ('c', 'b', 'a')",
        f"CREATE TABLE orders (kind {before}, id int, amount numeric(10,2), note text, PRIMARY KEY (kind, id))",
        f"INSERT INTO orders SELECT {values}, g, 0, 'n' FROM generate_series(1, 300) g",
    )
    once_after(monkeypatch, 1, lambda: execute(database, f"ALTER TABLE orders ALTER COLUMN kind TYPE {after}"))
    run_to_end(captured(database, tmp_path))
    check_current(database, tmp_path)


def test_another_key_between_two_runs(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position of a run that ended in the middle of a snapshot says by what its rows were ordered."""
    execute(database, CODED, "INSERT INTO orders SELECT g, 0, 'n', 1001 - g FROM generate_series(1, 1000) g")
    options = captured(database, tmp_path)
    real = PostgresTables.read_chunk

    def stuck(self: PostgresTables, table: str, after: Any, limit: int, **more: Any) -> Any:
        return real(self, table, after, limit, **more) if after is None else None

    monkeypatch.setattr(PostgresTables, "read_chunk", stuck)
    with Capturing(options):
        wait_until(lambda: (one := position(options).snapshots.get("public.orders")) and one.chunks == 1)
    monkeypatch.setattr(PostgresTables, "read_chunk", real)
    execute(database, "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (code)")
    run_to_end(options)
    check_current(database, tmp_path)


def test_a_key_with_identity_full_is_that_of_the_log(database: str, tmp_path: Path) -> None:
    """Rows of the snapshot and of the log have one schema: the history of schemas has one version."""
    execute(database, ORDERS, "ALTER TABLE orders REPLICA IDENTITY FULL", "INSERT INTO orders VALUES (1, 1, 'one')")
    options = captured(database, tmp_path)
    run_to_end(options)
    first = position(options).schemas
    execute(database, "UPDATE orders SET amount = 2 WHERE id = 1")
    run_to_end(options)
    assert position(options).schemas == first
    check_current(database, tmp_path)


# -- without a key -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_key", ["", " PRIMARY KEY"])
def test_a_table_without_a_key_that_takes_the_name_is_read_whole(database: str, tmp_path: Path, first_key: str) -> None:
    """The rows that it had before it was published come, and the old ones go."""
    execute(database, f"CREATE TABLE events (n int{first_key})", "INSERT INTO events SELECT generate_series(1, 150)")
    current = DeltaSinkOptions("current", str(tmp_path / "current"), input="db.events", write="upsert", key=("n",))
    all_rows = DeltaSinkOptions("history", str(tmp_path / "history"), input="db.events")
    options = replace(captured(database, tmp_path, tables=("events",)), sinks=(all_rows, current))
    run_to_end(options)
    first = position(options).snapshots["public.events"]
    execute(
        database,
        "INSERT INTO events VALUES (200)",
        "DROP TABLE events",
        "CREATE TABLE events (n int)",
        "INSERT INTO events SELECT generate_series(1000, 1150)",
    )
    run_to_end(options)
    execute(database, "INSERT INTO events VALUES (2000)")
    run_to_end(options)
    run_to_end(options)
    held = query(database, "SELECT n FROM events")
    assert delta_rows(tmp_path / "current", "n") == sorted(held, key=repr)
    counts = Counter(op for (op,) in delta_rows(tmp_path / "history", "_op"))
    assert counts == {"read": 150 + 151, "insert": 2, "truncate": 1}
    found = position(options)
    assert (found.left, found.left_out) == ({}, {})
    assert found.snapshots["public.events"].serial > first.serial


# -- killed --------------------------------------------------------------------------------------------


def work(dsn: str, folder: Path) -> None:
    """In a child: small chunks, and a run that ends soon."""
    snapshots.CHUNK_ROWS, spooling.WAIT_SECONDS = 100, 0.02
    assert run_once(captured(dsn, folder)).exit_code == 0


@pytest.mark.crash
@pytest.mark.parametrize("point", ["spool.chunk.before:1", "spool.chunk.after:2", "delta.commit.after:2"])
def test_killed_while_a_table_that_took_the_name_is_read(database: str, tmp_path: Path, point: str) -> None:
    """Before its snapshot has begun, or in the middle of it: the result is the database."""
    fill(database, 250)
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "UPDATE orders SET amount = 1 WHERE id < 50", SWAP, "INSERT INTO orders VALUES (1, 1, 'after')")
    kill(point, partial(work, database, tmp_path))
    execute(database, "UPDATE orders SET amount = 2 WHERE id = 1")
    run_to_end(options)
    check_current(database, tmp_path)

"""MySQL and MariaDB tables that others take the name of, or whose key changes, while they are captured and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firnline.options import BatchOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.mysql.table_reader import MySqlTableReader
from tests.support.captured import Capturing, delta_rows, has_read_all, history, position, wait_until
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end

ORDERS = "CREATE TABLE shop.orders (id int PRIMARY KEY, amount int, note varchar(50), code int NOT NULL)"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 100)


def captured(dsn: str, folder: Path, **source: Any) -> PipelineOptions:
    return PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{dsn}/shop", ("orders",), **source),),
        sinks=(
            DeltaSinkOptions("history", str(folder / "history"), input="db.orders"),
            DeltaSinkOptions("current", str(folder / "current"), input="db.orders", write="upsert", key=("id",)),
        ),
        batch=BatchOptions(max_events=1000),
    )


def rows(first: int, last: int, table: str = "orders", note: str = "n") -> str:
    values = ", ".join(f"({i}, {i % 7}, '{note}{i}', {10_000 - i})" for i in range(first, last + 1))
    return f"INSERT INTO shop.{table} VALUES {values}"


def fill(server: BinlogServer, count: int) -> None:
    server.run("CREATE DATABASE shop", ORDERS, rows(1, count))


def check_current(server: BinlogServer, folder: Path) -> None:
    """The current state is what the database holds."""
    held = sorted(server.run("SELECT id, amount, note, code FROM shop.orders"), key=repr)
    assert delta_rows(folder / "current", "id", "amount", "note", "code") == held


def once_after(
    monkeypatch: pytest.MonkeyPatch, chunks: int, do: Callable[[], object], *, then: Callable[[], object] | None = None
) -> None:
    """Do something once: before the chunk behind so many is read, or `then`, when it was read."""
    real, count = MySqlTableReader.read_chunk, [0]

    def read(*arguments: Any, **more: Any) -> Any:
        is_now = count[0] == chunks
        if is_now:
            count[0] += 1
            do()
        found = real(*arguments, **more)
        count[0] += found is not None
        if is_now and then is not None:
            then()
        return found

    monkeypatch.setattr(MySqlTableReader, "read_chunk", read)


# -- another table -------------------------------------------------------------------------------------

SWAPS = [
    pytest.param(("DROP TABLE shop.orders", ORDERS, rows(20, 25, note="m")), id="drop"),
    pytest.param(
        (
            ORDERS.replace("orders", "orders_new"),
            rows(1000, 1150, "orders_new"),
            "RENAME TABLE shop.orders TO shop.orders_old, shop.orders_new TO shop.orders",
            "DROP TABLE shop.orders_old",
        ),
        id="rename",
    ),
    pytest.param(
        (
            ORDERS.replace("orders", "orders_new"),
            rows(1000, 1150, "orders_new"),
            "DROP TABLE shop.orders",
            "ALTER TABLE shop.orders_new RENAME shop.orders",
        ),
        id="alter",
    ),
    pytest.param(("DROP DATABASE shop", "CREATE DATABASE shop", ORDERS, rows(20, 25)), id="database"),
]


@pytest.mark.parametrize("statements", SWAPS)
def test_a_table_that_takes_the_name_between_runs(
    binlog_server: BinlogServer, tmp_path: Path, statements: tuple[str, ...]
) -> None:
    fill(binlog_server, 250)
    options = captured(binlog_server.dsn, tmp_path)
    run_to_end(options)
    binlog_server.run("UPDATE shop.orders SET amount = 100 WHERE id < 10", *statements, rows(5000, 5001))
    run_to_end(options)
    check_current(binlog_server, tmp_path)
    binlog_server.run("UPDATE shop.orders SET amount = 50 WHERE id > 5000")
    run_to_end(options)
    check_current(binlog_server, tmp_path)
    assert Counter(op for _, op in history(tmp_path))["truncate"] == 1


@pytest.mark.parametrize("statements", SWAPS[:2])
def test_a_table_that_takes_the_name_between_two_chunks(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statements: tuple[str, ...]
) -> None:
    fill(binlog_server, 450)
    once_after(monkeypatch, 2, lambda: binlog_server.run(*statements))
    options = captured(binlog_server.dsn, tmp_path)
    run_to_end(options)
    run_to_end(options)  # the first run ends where the log ended when it began, or where a chunk was read
    check_current(binlog_server, tmp_path)


@pytest.mark.parametrize("statements", [pytest.param(("DROP TABLE shop.orders", ORDERS), id="drop"), SWAPS[1]])
@pytest.mark.parametrize("chunks", [0, 4])
def test_a_table_that_takes_the_name_behind_a_chunk(
    binlog_server: BinlogServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statements: tuple[str, ...],
    chunks: int,
) -> None:
    """The rows of the chunk are those of the old table: none of them stays."""
    fill(binlog_server, 450)
    once_after(monkeypatch, chunks, lambda: None, then=lambda: binlog_server.run(*statements))
    options = captured(binlog_server.dsn, tmp_path)
    run_to_end(options)
    binlog_server.run(rows(9000, 9000))
    run_to_end(options)
    check_current(binlog_server, tmp_path)


def test_a_table_that_is_gone_keeps_its_rows_until_it_comes_again(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 0.2)
    fill(binlog_server, 50)
    options = captured(binlog_server.dsn, tmp_path)
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
        binlog_server.run(rows(51, 52), "DROP TABLE shop.orders")
        wait_until(lambda: position(options).due)
    run_to_end(options)
    assert len(delta_rows(tmp_path / "current", "id")) == 52
    with Capturing(options):
        binlog_server.run(ORDERS, rows(7, 8))
        wait_until(lambda: not position(options).due and has_read_all(options))
    run_to_end(options)
    check_current(binlog_server, tmp_path)


# -- another key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("ALTER TABLE shop.orders DROP PRIMARY KEY, ADD PRIMARY KEY (code)", id="key"),
        pytest.param("ALTER TABLE shop.orders DROP PRIMARY KEY, ADD PRIMARY KEY (code, id)", id="longer-key"),
    ],
)
@pytest.mark.parametrize("chunks", [1, 2])
def test_another_key_between_two_chunks(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, chunks: int
) -> None:
    """The last key of a chunk says nothing of rows that have another order."""
    fill(binlog_server, 300)
    once_after(monkeypatch, chunks, lambda: binlog_server.run(change))
    run_to_end(captured(binlog_server.dsn, tmp_path))
    check_current(binlog_server, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("enum('c', 'b', 'a')", "varchar(5)", id="type"),
        pytest.param("enum('c', 'b', 'a')", "enum('a', 'b', 'c')", id="names"),
        pytest.param("varchar(5) COLLATE utf8mb4_bin", "varchar(5) COLLATE utf8mb4_general_ci", id="collation"),
    ],
)
def test_another_type_of_the_key_between_two_chunks(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    names = ("a", "b", "c") if before.startswith("enum") else ("a", "B", "c", "D")
    table = f"CREATE TABLE shop.orders (kind {before}, id int, amount int, note text, code int, PRIMARY KEY (kind, id))"
    binlog_server.run("CREATE DATABASE shop", table)
    values = ", ".join(f"('{names[i % len(names)]}', {i}, 0, 'n', 1)" for i in range(300))
    binlog_server.run(f"INSERT INTO shop.orders VALUES {values}")
    change = f"ALTER TABLE shop.orders MODIFY kind {after} NOT NULL"
    once_after(monkeypatch, 1, lambda: binlog_server.run(change))
    run_to_end(captured(binlog_server.dsn, tmp_path))
    check_current(binlog_server, tmp_path)

"""Rows that are in MySQL and MariaDB tables before their changes are captured: read in chunks while the log goes on."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.options import BatchOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots, spooling
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import Capturing, delta_rows, has_read_all, history, position, wait_until
from tests.support.kills import kill
from tests.support.mysql import BinlogServer, running_mysql
from tests.support.pipelines import run_once, run_to_end, run_until_epoch

ROWS = 3000
ORDERS = (
    "CREATE TABLE shop.orders (region char(2), id int, amount decimal(10,2), note varchar(500), at timestamp(3) NULL, "
    "kind enum('a','b'), PRIMARY KEY (region, id))"
)
COLUMNS = "region, id, amount, note, kind"


def captured(dsn: str, folder: Path, **source: Any) -> PipelineOptions:
    key = ("region", "id")
    return PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{dsn}/shop", ("orders",), **source),),
        sinks=(
            DeltaSinkOptions("history", str(folder / "history"), input="db.orders"),
            DeltaSinkOptions("current", str(folder / "current"), input="db.orders", write="upsert", key=key),
        ),
        batch=BatchOptions(max_events=1000),
    )


def fill(server: BinlogServer, rows: int = ROWS) -> None:
    values = ", ".join(
        f"('r{i % 3}', {i}, {i / 4}, 'n{i}', '2020-01-01 00:00:00.{i % 1000:03}', {1 + i % 2})" for i in range(rows)
    )
    server.run("CREATE DATABASE shop", ORDERS, f"INSERT INTO shop.orders VALUES {values}")


@contextlib.contextmanager
def writing(server: BinlogServer) -> Iterator[None]:
    """Somebody writes all the time: inserts, updates, deletes, keys that change."""
    stop, failures = threading.Event(), list[Exception]()

    def write() -> None:
        number = 0
        try:
            with contextlib.closing(server.connect(autocommit=False)) as db, db.cursor() as cursor:
                while not stop.is_set():
                    number += 1
                    at = number * 37 % (ROWS + 100)
                    cursor.execute(f"UPDATE shop.orders SET amount = amount + 1 WHERE id = {at}")
                    cursor.execute(f"DELETE FROM shop.orders WHERE region = 'r{(at + 13) % 3}' AND id = {at + 13}")
                    cursor.execute(f"REPLACE INTO shop.orders VALUES ('r{at % 3}', {at}, 7, 'new', NULL, 'b')")
                    cursor.execute(f"UPDATE IGNORE shop.orders SET region = 'zz' WHERE id = {at + 29}")
                    db.commit()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures


def check_current(server: BinlogServer, folder: Path) -> None:
    """The current state is what the database holds; Delta keeps times by UTC."""
    with contextlib.closing(server.connect()) as db, db.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(f"SELECT {COLUMNS}, CAST(at AS CHAR) FROM shop.orders")
        held = sorted((tuple(row) for row in cursor.fetchall()), key=repr)
    rows = delta_rows(folder / "current", *COLUMNS.split(", "), "at")
    shown = [(*row[:-1], row[-1] and row[-1].strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]) for row in rows]
    assert sorted(shown, key=repr) == held


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 200)


def test_rows_that_were_there_are_read_once(binlog_server: BinlogServer, tmp_path: Path) -> None:
    fill(binlog_server, 1050)
    options = captured(binlog_server.dsn, tmp_path)
    run_to_end(options)
    check_current(binlog_server, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 1050}
    found = position(options).snapshots["shop.orders"]
    assert (found.done, found.rows) == (True, 1050)
    versions = dict(position(options).schemas)
    binlog_server.run("UPDATE shop.orders SET amount = 0 WHERE id = 5")
    run_to_end(options)
    check_current(binlog_server, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 1050, "update": 1}
    assert dict(position(options).schemas) == versions != {}  # the log gives the schema that the chunks gave


def check_while_writing(server: BinlogServer, folder: Path) -> None:
    fill(server)
    options = captured(server.dsn, folder)
    with writing(server), Capturing(options):
        wait_until(lambda: has_read_all(options))
    run_to_end(options)
    check_current(server, folder)
    assert {"read", "insert", "update", "delete"} <= {op for _, op in history(folder)}


def test_changes_during_the_snapshot_and_the_rows_become_one(binlog_server: BinlogServer, tmp_path: Path) -> None:
    check_while_writing(binlog_server, tmp_path)


@pytest.mark.mysql
def test_changes_during_the_snapshot_without_gtids(mysql: BinlogServer, tmp_path: Path) -> None:
    del mysql  # skips where there is none
    with running_mysql("--gtid-mode=OFF", "--enforce-gtid-consistency=OFF") as server:
        check_while_writing(server, tmp_path)


def work(dsn: str, folder: Path) -> None:
    """In a child: small chunks, and a run that ends soon."""
    snapshots.CHUNK_ROWS, spooling.WAIT_SECONDS = 200, 0.02
    assert run_once(captured(dsn, folder)).exit_code == 0


@pytest.mark.crash
@pytest.mark.parametrize("point", ["spool.chunk.before:3", "spool.chunk.after:5"])
def test_killed_between_two_chunks(binlog_server: BinlogServer, tmp_path: Path, point: str) -> None:
    """A kill repeats chunks; the result is the database."""
    fill(binlog_server)
    with writing(binlog_server):
        kill(point, partial(work, binlog_server.dsn, tmp_path))
    run_to_end(captured(binlog_server.dsn, tmp_path))
    check_current(binlog_server, tmp_path)


def test_inserts_that_lack_their_defaults_hold_up_no_snapshot(binlog_server: BinlogServer, tmp_path: Path) -> None:
    """An insert of a minimal row image is no row that moved: the table is read once, whatever comes meanwhile."""
    binlog_server.run(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.orders (id int PRIMARY KEY, amount int DEFAULT 1, note varchar(9))",
        "INSERT INTO shop.orders VALUES " + ", ".join(f"({n}, {n}, 'n')" for n in range(1000)),
    )
    options = captured(binlog_server.dsn, tmp_path, partial_inserts=True)
    current = replace(options.sinks[1], key=("id",))
    options = replace(options, sinks=(current,), batch=BatchOptions(max_events=200))
    run_until_epoch(options, 3)
    assert position(options).running
    values = [f"INSERT INTO shop.orders (id, note) VALUES ({n}, 'x')" for n in range(5000, 5010)]
    binlog_server.run("SET SESSION binlog_row_image = 'MINIMAL'", *values)
    run_to_end(options)
    found = position(options).snapshots["shop.orders"]
    assert (found.done, found.chunks) == (True, 6)
    assert len(delta_rows(tmp_path / "current", "id")) == 1010

"""MySQL and MariaDB as sources: changes of real servers in Delta tables, compared with the database."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.options import BatchOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import delta_rows, history
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_once, run_to_end

DATABASE = "shop"
ORDERS = f"CREATE TABLE {DATABASE}.orders (id bigint PRIMARY KEY, amount decimal(10,2), note varchar(500))"


def captured(server: BinlogServer, folder: Path) -> PipelineOptions:
    return PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{server.dsn}/{DATABASE}", ("orders",)),),
        sinks=(
            DeltaSinkOptions("history", str(folder / "history"), input="db.orders"),
            DeltaSinkOptions("current", str(folder / "current"), input="db.orders", write="upsert", key=("id",)),
        ),
        batch=BatchOptions(max_events=1000),
    )


def check_current(server: BinlogServer, folder: Path) -> None:
    """The current state is what the database holds."""
    held = server.run(f"SELECT id, amount, note FROM {DATABASE}.orders")
    assert delta_rows(folder / "current", "id", "amount", "note") == sorted((tuple(row) for row in held), key=repr)


def test_changes_become_history_and_current_state(binlog_server: BinlogServer, tmp_path: Path) -> None:
    binlog_server.run(f"CREATE DATABASE {DATABASE}", ORDERS)
    options = captured(binlog_server, tmp_path)
    run_to_end(options)
    binlog_server.run(f"INSERT INTO {DATABASE}.orders VALUES (0, 1.5, 'before')")
    run_to_end(options)
    values = ", ".join(f"({number}, {number / 4}, 'n{number}')" for number in range(1, 1500))
    binlog_server.run(
        f"INSERT INTO {DATABASE}.orders VALUES {values}",
        f"UPDATE {DATABASE}.orders SET amount = -1 WHERE id <= 10",
        f"DELETE FROM {DATABASE}.orders WHERE id = 11",
        f"UPDATE {DATABASE}.orders SET id = 9000 WHERE id = 12",
    )
    run_to_end(options)
    check_current(binlog_server, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"insert": 1501, "update": 11, "delete": 2}
    assert run_once(options).result.epochs == 0


def test_nothing_is_read_twice_and_nothing_is_lost_between_runs(binlog_server: BinlogServer, tmp_path: Path) -> None:
    binlog_server.run(f"CREATE DATABASE {DATABASE}", ORDERS)
    options = captured(binlog_server, tmp_path)
    run_to_end(options)
    for number in range(4):
        binlog_server.run(
            f"INSERT INTO {DATABASE}.orders VALUES ({number}, 0, 'x')",
            "FLUSH BINARY LOGS",
            f"UPDATE {DATABASE}.orders SET amount = amount + 1",
        )
        run_to_end(options)
    check_current(binlog_server, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"insert": 4, "update": 10}


def test_a_table_that_is_emptied_before_its_first_row(binlog_server: BinlogServer, tmp_path: Path) -> None:
    """The log names the table, and describes its columns with the first row."""
    binlog_server.run(f"CREATE DATABASE {DATABASE}", ORDERS)
    options = captured(binlog_server, tmp_path)
    source = replace(options.sources[0], include=("committed_at", "position", "transaction"))  # type: ignore[call-arg]
    options = replace(options, sources=(source,))
    run_to_end(options)
    binlog_server.run(f"TRUNCATE {DATABASE}.orders")
    run_to_end(options)
    binlog_server.run(f"INSERT INTO {DATABASE}.orders VALUES (1, 1.5, 'x')")
    run_to_end(options)
    check_current(binlog_server, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"truncate": 1, "insert": 1}


def test_changes_of_a_table_stay_in_their_order(binlog_server: BinlogServer, tmp_path: Path) -> None:
    """Rows before and behind a TRUNCATE, and under a schema that comes back, in one spool file."""
    table = f"{DATABASE}.orders"
    binlog_server.run(f"CREATE DATABASE {DATABASE}", ORDERS)
    options = captured(binlog_server, tmp_path)
    run_to_end(options)
    binlog_server.run(
        f"INSERT INTO {table} VALUES (1, 1, 'gone')",
        f"TRUNCATE {table}",
        f"INSERT INTO {table} VALUES (2, 1, 'a'), (3, 1, 'a')",
        f"ALTER TABLE {table} ADD COLUMN extra int",
        f"UPDATE {table} SET amount = 2",
        f"ALTER TABLE {table} DROP COLUMN extra",
        f"UPDATE {table} SET amount = 3, note = 'b' WHERE id = 2",
        f"DELETE FROM {table} WHERE id = 3",
    )
    run_to_end(options)
    check_current(binlog_server, tmp_path)


@pytest.mark.parametrize("image", ["MINIMAL", "NOBLOB"])
def test_values_go_with_a_row_whose_key_changes(binlog_server: BinlogServer, tmp_path: Path, image: str) -> None:
    table = f"{DATABASE}.orders"
    binlog_server.run(f"CREATE DATABASE {DATABASE}", ORDERS, f"ALTER TABLE {table} MODIFY note text")
    options = captured(binlog_server, tmp_path)
    run_to_end(options)
    binlog_server.run(f"INSERT INTO {table} VALUES (1, 1, 'one'), (2, 2, 'two'), (3, 3, 'three')")
    run_to_end(options)
    binlog_server.run(
        f"SET SESSION binlog_row_image = {image}",
        f"UPDATE {table} SET id = 11 WHERE id = 1",
        f"UPDATE {table} SET amount = 9 WHERE id = 2",
        f"UPDATE {table} SET id = 12 WHERE id = 2",
        f"UPDATE {table} SET id = 2 WHERE id = 3",
    )
    run_to_end(options)
    check_current(binlog_server, tmp_path)

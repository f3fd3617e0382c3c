"""Captured columns whose names a Delta table cannot have: every value comes, under a name that fits."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import ORDERS, captured, delta_rows, execute, query
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end


def with_sinks(options: PipelineOptions, folder: Path, port: str) -> PipelineOptions:
    return replace(
        options,
        sinks=(
            DeltaSinkOptions("history", str(folder / "history"), input=port),
            DeltaSinkOptions("current", str(folder / "current"), input=port, write="upsert"),
        ),
    )


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 2)


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_names_of_postgres(postgres: str, tmp_path: Path, identity: str) -> None:
    columns = '"Order Id", "Line No", "Total (net)", _op, id, "Id"'
    execute(
        postgres,
        'CREATE TABLE "Order Lines" ("Order Id" int, "Line No" int, "Total (net)" numeric(8,2), _op text, id int, '
        '"Id" int, PRIMARY KEY ("Order Id", "Line No"))',
        f'ALTER TABLE "Order Lines" REPLICA IDENTITY {identity}',
        "INSERT INTO \"Order Lines\" SELECT g / 2, g % 2, g, 'mine' || g, g, -g FROM generate_series(1, 7) g",
    )
    options = with_sinks(captured(postgres, tmp_path, tables=("Order Lines",)), tmp_path, "db.Order Lines")
    run_to_end(options)
    execute(
        postgres,
        'UPDATE "Order Lines" SET "Total (net)" = 99 WHERE "Order Id" = 1',
        'UPDATE "Order Lines" SET "Line No" = 5 WHERE "Order Id" = 2 AND "Line No" = 0',
        'DELETE FROM "Order Lines" WHERE "Order Id" = 3 AND "Line No" = 1',
        "INSERT INTO \"Order Lines\" VALUES (50, 1, 2, 'new', 3, 4)",
    )
    run_to_end(options)
    here = ("Order~20Id", "Line~20No", "Total~20~28net~29", "~5Fop", "id", "~49~64")
    assert delta_rows(tmp_path / "current", *here) == sorted(query(postgres, f'SELECT {columns} FROM "Order Lines"'))
    assert {row[0] for row in delta_rows(tmp_path / "history", "_op")} == {"read", "update", "delete", "insert"}


def test_names_of_a_binlog(binlog_server: BinlogServer, tmp_path: Path) -> None:
    server, folder = binlog_server, tmp_path
    columns = "`Order Id`, `Line No`, `Total (net)`, _op"
    server.run(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.lines (`Order Id` int, `Line No` varchar(9), `Total (net)` decimal(8,2), _op varchar(9), "
        "PRIMARY KEY (`Order Id`, `Line No`))",
        "INSERT INTO shop.lines VALUES (1,'a',1,'x'), (1,'b',2,'y'), (2,'a',3,'z'), (3,'a',4,NULL), (4,'a',5,'v')",
    )
    source = MySqlSourceOptions("db", f"{server.dsn}/shop", ("lines",))
    options = with_sinks(PipelineOptions(name="shop", sources=(source,), sinks=()), folder, "db.lines")
    run_to_end(options)
    server.run(
        "UPDATE shop.lines SET `Total (net)` = 99 WHERE `Order Id` = 1",
        "UPDATE shop.lines SET `Line No` = 'q' WHERE `Order Id` = 2",
        "DELETE FROM shop.lines WHERE `Order Id` = 3",
        "INSERT INTO shop.lines VALUES (50, 'n', 2, 'new')",
    )
    run_to_end(options)
    here = ("Order~20Id", "Line~20No", "Total~20~28net~29", "~5Fop")
    assert delta_rows(folder / "current", *here) == sorted(map(tuple, server.run(f"SELECT {columns} FROM shop.lines")))


def test_the_first_columns_of_a_table_are_no_warning(
    postgres: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    execute(postgres, ORDERS, "INSERT INTO orders VALUES (1, 1, 'x')")
    options = captured(postgres, tmp_path)
    run_to_end(options)
    execute(postgres, "ALTER TABLE orders ADD COLUMN more int", "INSERT INTO orders VALUES (2, 2, 'y', 2)")
    run_to_end(options)
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING" and "added" in one.getMessage()]
    assert told == ["added column more (int32)"] * 2


def test_other_names_are_named_once(postgres: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a run, though several chunks and changes have the column; and by `dry-run`."""
    execute(postgres, 'CREATE TABLE orders (id int PRIMARY KEY, "Order Id" int)')
    execute(postgres, "INSERT INTO orders SELECT g, g FROM generate_series(1, 5) g")
    options = with_sinks(captured(postgres, tmp_path), tmp_path, "db.orders")
    words = "public.orders.Order Id: the column is named Order~20Id here"
    assert words in open_pipeline(options).sources["db"].remarks()
    with caplog.at_level(logging.WARNING, "firnline"):
        run_to_end(options)
    assert [record.getMessage() for record in caplog.records].count(words) == 1
    execute(postgres, "INSERT INTO orders VALUES (6, 6)")
    with caplog.at_level(logging.WARNING, "firnline"):
        run_to_end(options)
    assert [record.getMessage() for record in caplog.records].count(words) == 2


def test_other_names_of_a_binlog_table(binlog_server: BinlogServer, tmp_path: Path) -> None:
    binlog_server.run("CREATE DATABASE shop", "CREATE TABLE shop.orders (id int PRIMARY KEY, `Order Id` int)")
    source = MySqlSourceOptions("db", f"{binlog_server.dsn}/shop", ("orders",))
    remarks = open_pipeline(replace(captured("", tmp_path), sources=(source,))).sources["db"].remarks()
    assert "shop.orders.Order Id: the column is named Order~20Id here" in remarks

"""A Delta table of a captured table that is added later: the rows from before come by a snapshot, exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli.dry_run_preview import preview
from firnline.errors import ConfigError
from firnline.history.edits.rollback import Rollback
from firnline.options import BatchOptions, CheckpointOptions, OperatorOptions, PipelineOptions, SinkOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.postgres.options import PostgresSourceOptions
from tests.support.captured import delta_rows, execute, query
from tests.support.pipelines import run_once, run_to_end

TABLES = (
    "CREATE TABLE {}orders (id bigint PRIMARY KEY, note varchar(500))",
    "CREATE TABLE {}customers (id bigint PRIMARY KEY, name varchar(500))",
)


class Shop:
    """A database of any kind with two tables that have rows."""

    def __init__(self, server: Any, folder: Path) -> None:
        self._server, self.folder = server, folder
        self.is_binlog = not isinstance(server, str)
        self.prefix = "shop." if self.is_binlog else ""
        if self.is_binlog:
            server.run("CREATE DATABASE shop")
        self.run(*TABLES)
        self.run(*(f"INSERT INTO {{}}{table} VALUES (1, 'a'), (2, 'b'), (3, 'c')" for table in ("orders", "customers")))

    def run(self, *statements: str) -> None:
        found = [statement.format(self.prefix) for statement in statements]
        if self.is_binlog:
            self._server.run(*found)
        else:
            execute(self._server, *found)

    def change(self, first: int) -> None:
        """Insert, change and delete customers and orders."""
        for table, column in (("orders", "note"), ("customers", "name")):
            self.run(
                f"INSERT INTO {{}}{table} VALUES ({first}, 'new'), ({first + 1}, 'gone'), ({first + 2}, 'old')",
                f"UPDATE {{}}{table} SET {column} = 'x{first}' WHERE id = {first + 2} OR id = 1",
                f"DELETE FROM {{}}{table} WHERE id = {first + 1}",
            )

    def options(self, *sinks: SinkOptions, tables: tuple[str, ...] = ("*",), **settings: Any) -> PipelineOptions:
        source = (
            MySqlSourceOptions("db", f"{self._server.dsn}/shop", tables, **settings)
            if self.is_binlog
            else PostgresSourceOptions("db", self._server, tables, **settings)
        )
        return PipelineOptions(
            name="shop",
            sources=(source,),
            sinks=(self.table("orders"), *sinks),
            batch=BatchOptions(max_events=1000),
            checkpoint=CheckpointOptions(rollback_window=64),
        )

    def table(self, name: str, **settings: Any) -> DeltaSinkOptions:
        return DeltaSinkOptions(
            name, f"{self.folder}/{name}", **{"input": f"db.{name}", "write": "upsert", "key": ("id",), **settings}
        )

    def check(self, name: str, column: str) -> None:
        statement = f"SELECT id, {column} FROM {self.prefix}{name}"
        held = self._server.run(statement) if self.is_binlog else query(self._server, statement)
        found = delta_rows(self.folder / name, "id", column)
        assert found == sorted((tuple(row) for row in held), key=repr)


@pytest.fixture
def shop(captured_server: Any, tmp_path: Path) -> Shop:
    return Shop(captured_server, tmp_path)


@pytest.fixture
def postgres_shop(postgres: str, tmp_path: Path) -> Shop:
    return Shop(postgres, tmp_path)


def requests(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("orders/_firnline/shop/requests/*.json")]


def test_a_table_that_is_added_later_is_complete(shop: Shop, tmp_path: Path) -> None:
    run_to_end(shop.options())
    shop.change(10)
    run_to_end(shop.options())
    shop.change(20)
    options = shop.options(shop.table("customers"))
    found = preview(open_pipeline(options))["sinks"]
    words = f"a run reads {'shop' if shop.is_binlog else 'public'}.customers again, so that it has all rows"
    assert words in found[1]["filled"]
    run_to_end(options)
    assert not requests(tmp_path)
    for first in (30, 40):
        shop.check("customers", "name")
        shop.check("orders", "note")
        shop.change(first)
        run_to_end(options)
    shop.check("customers", "name")


def test_a_table_that_the_source_captures_only_now_is_read_once(shop: Shop, tmp_path: Path) -> None:
    run_to_end(shop.options(tables=("orders",)))
    shop.change(10)
    table = shop.table("customers", write="append", key=())
    options = shop.options(table, tables=("orders", "customers"))
    assert "for the first time" in preview(open_pipeline(options))["sinks"][1]["filled"]
    run_to_end(options)
    assert not requests(tmp_path)
    assert Counter(op for _, op in delta_rows(tmp_path / "customers", "id", "_op"))["read"] == 5


def test_a_rollback_to_before_it_was_added_reads_the_rows_again(postgres_shop: Shop, tmp_path: Path) -> None:
    shop = postgres_shop
    run_to_end(shop.options())
    shop.change(10)
    run_to_end(shop.options())
    before = open_pipeline(shop.options()).load().epoch
    options = shop.options(shop.table("customers"))
    shop.change(20)
    run_to_end(options)
    shop.change(30)
    run_to_end(options)
    Rollback(open_pipeline(options), before).perform("test")
    assert DeltaTable(str(tmp_path / "customers")).to_pyarrow_table().num_rows == 0  # it may have no columns yet
    shop.run("DELETE FROM customers WHERE id = 3")
    run_to_end(options)
    shop.check("customers", "name")
    shop.check("orders", "note")
    assert not requests(tmp_path)


def test_start_says_what_it_gets_where_others_would_get_rows_twice(postgres_shop: Shop, tmp_path: Path) -> None:
    shop = postgres_shop
    past = shop.table("past", input="db.customers", write="append", key=())
    run_to_end(shop.options(past))
    shop.change(10)
    with pytest.raises(ConfigError, match="past would get their rows again, too") as refused:
        preview(open_pipeline(shop.options(past, shop.table("customers"))))
    assert "`start: snapshot`" in refused.value.hint
    assert "`start: now`" in refused.value.hint
    options = shop.options(past, shop.table("customers", start="now"))
    run_to_end(options)
    assert delta_rows(tmp_path / "customers", "id") == [(1,), (10,), (12,)]
    options = shop.options(*options.sinks[1:], shop.table("again", input="db.customers", start="snapshot"))
    assert preview(open_pipeline(options))["sinks"][3]["filled"].endswith("past get these rows again, too")
    run_to_end(options)
    assert len(delta_rows(tmp_path / "again", "id")) == 5
    assert Counter(op for _, op in delta_rows(tmp_path / "past", "id", "_op"))["read"] == 3 + 5
    shop.check("customers", "name")  # a snapshot completes it, too


def test_what_a_snapshot_cannot_give(postgres_shop: Shop) -> None:
    shop = postgres_shop
    shop.run("CREATE TABLE notes (words text)", "INSERT INTO notes VALUES ('x')")
    run_to_end(shop.options())
    keyless = shop.table("notes", write="append", key=())
    with pytest.raises(ConfigError, match="has no key"):
        preview(open_pipeline(shop.options(keyless)))
    with pytest.raises(ConfigError, match="`snapshot: never`"):
        preview(open_pipeline(shop.options(shop.table("customers"), snapshot="never")))
    run_to_end(shop.options(replace(keyless, start="now")))


def test_an_operator_with_state_would_count_twice(postgres_shop: Shop) -> None:
    shop = postgres_shop
    operator = OperatorOptions(
        "counts", "aggregate", ("db.customers",), {"keys": ["id"], "aggregates": [{"name": "n", "function": "count"}]}
    )
    counts = shop.table("counts", input="counts")
    options = replace(shop.options(counts), operators=(operator,))
    run_to_end(options)
    more = replace(options, sinks=(*options.sinks, shop.table("customers", start="snapshot")))
    run = run_once(more)
    assert (run.exit_code, run.error_code) == (2, "config")
    assert "operator counts keeps state" in str(run.result.error)

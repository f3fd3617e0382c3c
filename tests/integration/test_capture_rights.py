"""Tables that the user of a pipeline has no right to read: each is named with the statement that gives the right, the
others go on, and it is read once the right is there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from deltalake.exceptions import TableNotFoundError

from firnline.cli.output import Output
from firnline.cli.status import show_status
from firnline.errors import ConfigError
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import Capturing, captured, delta_rows, execute, position, wait_until
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_once, run_to_end

TABLES = ("orders", "Secret Ones", "plain")
USER, SECRET = "it's a reader", "s3cret"


class Shop:
    """Three tables of either kind of server, of which a user may read the first."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.is_binlog = isinstance(server, BinlogServer)
        self._server = server
        self.schema = "shop" if self.is_binlog else "public"
        if self.is_binlog:
            server.run("CREATE DATABASE shop")
        self.run(
            "CREATE TABLE {orders} (n int PRIMARY KEY)",
            "CREATE TABLE {Secret Ones} (n int PRIMARY KEY)",
            "CREATE TABLE {plain} (n int)",
            *(f"INSERT INTO {{{table}}} VALUES (1)" for table in TABLES),
        )
        self.drop_user()
        if self.is_binlog:
            self.run(
                "CREATE USER {user} IDENTIFIED BY 's3cret'",
                "GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {user}",
                "GRANT LOCK TABLES ON shop.* TO {user}",
                "GRANT SELECT ON {orders} TO {user}",
            )
        else:
            self.run(
                "CREATE ROLE {user} LOGIN REPLICATION PASSWORD 's3cret'",
                "GRANT USAGE ON SCHEMA public TO {user}",
                "GRANT SELECT ON {orders} TO {user}",
                "ALTER TABLE {plain} REPLICA IDENTITY FULL",
                "CREATE PUBLICATION shop FOR TABLE {orders}, {Secret Ones}, {plain}",
            )
        self.options = self._options(folder)

    def run(self, *statements: str) -> None:
        """Execute statements as the owner, with tables and the user in braces."""
        names = {table: self.quoted(table) for table in TABLES}
        names["user"] = "'it''s a reader'@'%'" if self.is_binlog else f'"{USER}"'
        ready = [statement.format_map(names) for statement in statements]
        if self.is_binlog:
            self._server.run(*ready)
        else:
            execute(self._server, *ready)

    def execute(self, statement: str) -> None:
        """Execute a statement of a hint."""
        if self.is_binlog:
            self._server.run(statement)
        else:
            execute(self._server, statement)

    def quoted(self, table: str) -> str:
        return f"shop.`{table}`" if self.is_binlog else f'public."{table}"'

    def drop_user(self) -> None:
        if self.is_binlog:
            self.run("DROP USER IF EXISTS {user}")
        else:
            self.run(
                "DO $$ BEGIN IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'it''s a reader') THEN "
                "DROP OWNED BY {user}; DROP ROLE {user}; END IF; END $$"
            )

    def _options(self, folder: Path) -> PipelineOptions:
        user = USER.replace(" ", "%20").replace("'", "%27")
        if self.is_binlog:
            dsn = f"mysql://{user}:{SECRET}@127.0.0.1:{self._server.port}/shop"
            options = replace(captured("", folder), sources=(MySqlSourceOptions("db", dsn, TABLES),))
        else:
            netloc = urlsplit(self._server).netloc
            dsn = self._server.replace(netloc, f"{user}:{SECRET}@{netloc.rpartition('@')[2]}")
            options = captured(dsn, folder, tables=TABLES, publication="shop")
        sinks = [DeltaSinkOptions(f"s{n}", str(folder / name), input=f"db.{name}") for n, name in enumerate(TABLES)]
        return replace(options, sinks=tuple(sinks), restart=replace(options.restart, attempts=1))

    def unreadable(self) -> dict[str, str]:
        """The tables that `status` names, with their hints."""
        found = load_status(open_pipeline(self.options)).sources[0]["unreadable_tables"]
        return {one["table"]: one["hint"] for one in found}

    def has_read(self, table: str) -> bool:
        """Whether the rows of a table have been read that were there before."""
        found = position(self.options).snapshots.get(f"{self.schema}.{table}")
        return found is not None and found.done

    def names(self, *tables: str) -> list[str]:
        return [f"{self.schema}.{table}" for table in tables]


@pytest.fixture
def shop(captured_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 0.2)
    found = Shop(captured_server, tmp_path)
    yield found
    found.drop_user()


def statement_in(hint: str) -> str:
    """The statement that a hint names."""
    return hint[hint.index("GRANT") :].partition(";")[0]


def numbers(folder: Path, table: str) -> Counter[int]:
    try:
        return Counter(n for (n,) in delta_rows(folder / table, "n"))
    except (TableNotFoundError, KeyError):  # it is made, and gets its columns, with its first row
        return Counter()


def test_a_table_is_named_with_its_statement_and_read_once_the_right_is_there(
    shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    with Capturing(shop.options):
        wait_until(lambda: shop.has_read("orders"))
        wait_until(lambda: "GRANT SELECT ON" in caplog.text)
        shop.run(*(f"INSERT INTO {{{table}}} VALUES (2)" for table in TABLES))
        wait_until(lambda: numbers(tmp_path, "orders") == Counter((1, 2)))
        wait_until(lambda: all(f"table {one} cannot be read" in caplog.text for one in shop.names(*TABLES[1:])))
        hints = shop.unreadable()
        assert sorted(hints) == sorted(shop.names(*TABLES[1:]))
        assert all(statement_in(hint) in caplog.text for hint in hints.values())
        capsys.readouterr()
        show_status(Output(), load_status(open_pipeline(shop.options)))
        shown = capsys.readouterr().out
        assert "not read from db" in shown
        assert all(hint in shown for hint in hints.values())
        for hint in hints.values():
            shop.execute(statement_in(hint))
        wait_until(lambda: not shop.unreadable())
        wait_until(lambda: all(map(shop.has_read, TABLES)))
        shop.run(*(f"INSERT INTO {{{table}}} VALUES (3)" for table in TABLES))
        wait_until(lambda: numbers(tmp_path, "orders") == Counter((1, 2, 3)))
    run_to_end(shop.options)
    assert numbers(tmp_path, "orders") == numbers(tmp_path, "plain") == Counter((1, 2, 3))
    assert set(numbers(tmp_path, "Secret Ones")) == {1, 2, 3}  # a change that came before the rows is in the history


def test_once_ends_with_the_statement_after_the_others_were_read(shop: Shop, tmp_path: Path) -> None:
    for _ in TABLES[1:]:
        ended = run_once(shop.options)
        assert isinstance(ended.result.error, ConfigError), ended.result
        assert numbers(tmp_path, "orders") == Counter((1,))
        shop.execute(statement_in(str(ended.result.error.hint)))
    run_to_end(shop.options)
    assert [numbers(tmp_path, table) for table in TABLES] == [Counter((1,))] * 3
    assert shop.unreadable() == {}


def test_another_right_to_a_table_does_not_keep_the_others_from_being_read(shop: Shop, tmp_path: Path) -> None:
    """The server shows such a table, and refuses its rows."""
    shop.run("GRANT INSERT ON {Secret Ones} TO {user}", "GRANT SELECT ON {plain} TO {user}")
    ended = run_once(shop.options)
    assert ended.error_code == "config"
    assert numbers(tmp_path, "orders") == numbers(tmp_path, "plain") == Counter((1,))
    source = open_pipeline(shop.options).sources["db"]

    def check() -> None:
        """What `dry-run` does."""
        source.check()
        source.find_captured(source.start(None))

    with pytest.raises(ConfigError, match="Secret Ones") as refused:
        check()
    shop.execute(statement_in(str(refused.value.hint)))
    run_to_end(shop.options)
    assert numbers(tmp_path, "Secret Ones") == Counter((1,))


def test_a_right_that_is_taken_away_after_the_snapshot_is_not_missed(shop: Shop, tmp_path: Path) -> None:
    """The log has all that is needed."""
    shop.run(*(f"GRANT SELECT ON {{{table}}} TO {{user}}" for table in TABLES[1:]))
    run_to_end(shop.options)
    shop.run(*(f"REVOKE SELECT ON {{{table}}} FROM {{user}}" for table in TABLES[1:]))
    shop.run(*(f"INSERT INTO {{{table}}} VALUES (2)" for table in TABLES))
    run_to_end(shop.options)
    assert shop.unreadable() == {}
    assert [numbers(tmp_path, table) for table in TABLES] == [Counter((1, 2))] * 3

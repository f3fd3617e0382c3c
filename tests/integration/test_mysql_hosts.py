"""Tables that are read from another host of `dsn` than the log: it is behind, or has transactions of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.errors import ConfigError, FirnlineError, SourceError
from firnline.options import BatchOptions, PipelineOptions
from firnline.sources.cdc import snapshots
from firnline.sources.mysql import stream, table_reader
from firnline.sources.mysql.connect import connect_any
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.integration.test_mysql_source import ORDERS, captured, check_current
from tests.support.captured import position
from tests.support.mariadb import MariaDbServer, running_mariadb
from tests.support.mysql import PASSWORD, BinlogServer, running_mysql
from tests.support.pipelines import run_once, run_to_end, run_until_epoch

pytestmark = [pytest.mark.mysql, pytest.mark.mariadb]
ROWS = 500


@pytest.fixture
def other(binlog_server: BinlogServer) -> Iterator[BinlogServer]:
    running = running_mariadb if isinstance(binlog_server, MariaDbServer) else running_mysql
    with running("--server-id=2") as server:
        yield server


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 50)


def run_with_other_first(options: PipelineOptions) -> FirnlineError | None:
    """Run with the tables of the last host of `dsn`, as if the others did not answer; return how it fails."""
    real = connect_any
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_reader, "connect_any", lambda dsn, hosts: real(dsn, hosts[::-1]))
        patch.setattr(table_reader, "BEHIND_SECONDS", 0.0)
        patch.setattr(stream, "FOREIGN_SECONDS", 0.0)
        return run_once(options).result.error


def fill(server: BinlogServer) -> None:
    values = ", ".join(f"({i}, {i}, 'n{i}')" for i in range(ROWS))
    server.run("SET SESSION sql_log_bin=0", "CREATE DATABASE shop", ORDERS, f"INSERT INTO shop.orders VALUES {values}")


def take_gtids(server: BinlogServer, other: BinlogServer) -> None:
    """Give the other server the GTIDs that this one has, as if it had replicated them."""
    if isinstance(server, MariaDbServer):
        state = server.run("SELECT @@GLOBAL.gtid_binlog_state")[0][0]
        other.run("RESET MASTER", f"SET GLOBAL gtid_binlog_state = '{state}'")
    else:
        executed = server.run("SELECT @@GLOBAL.gtid_executed")[0][0]
        other.run("RESET BINARY LOGS AND GTIDS", f"SET GLOBAL gtid_purged = '{executed}'")


def begun(server: BinlogServer, other: BinlogServer, folder: Path) -> PipelineOptions:
    """A pipeline that has read some chunks of the first server, and then a change of a row behind them."""
    fill(server)
    fill(other)
    server.run("FLUSH BINARY LOGS", "INSERT INTO shop.orders VALUES (-1, 0, 'logged')")
    take_gtids(server, other)
    options = captured(server, folder)
    source = options.sources[0]
    assert isinstance(source, MySqlSourceOptions)
    dsn = f"mysql://firnline:{PASSWORD}@127.0.0.1:{server.port},127.0.0.1:{other.port}/shop"
    options = replace(options, sources=(replace(source, dsn=dsn),), batch=BatchOptions(max_events=50))
    run_until_epoch(options, 3)
    server.run(f"UPDATE shop.orders SET note = 'new' WHERE id = {ROWS - 1}")
    run_until_epoch(options, 6)
    assert position(options).snapshots["shop.orders"].after is not None
    assert not position(options).snapshots["shop.orders"].done
    return options


def test_a_host_that_is_behind(binlog_server: BinlogServer, other: BinlogServer, tmp_path: Path) -> None:
    """Its chunk would lack a change that an epoch before has given on."""
    options = begun(binlog_server, other, tmp_path)
    error = run_with_other_first(options)
    assert isinstance(error, SourceError)
    assert f"127.0.0.1:{other.port} has not yet what was read of the log" in error.message
    run_to_end(options)
    check_current(binlog_server, tmp_path)


def test_a_host_with_transactions_of_its_own(binlog_server: BinlogServer, other: BinlogServer, tmp_path: Path) -> None:
    """The log never has them: the run does not wait for them."""
    options = begun(binlog_server, other, tmp_path)
    take_gtids(binlog_server, other)
    other.run("CREATE DATABASE own")
    query = "SELECT @@GLOBAL.gtid_binlog_pos" if isinstance(other, MariaDbServer) else "SELECT @@server_uuid"
    held, there = (str(server.run(query)[0][0]).split(",") for server in (binlog_server, other))
    (own,) = [one for one in there if one not in held]  # MariaDB: one for each domain
    error = run_with_other_first(options)
    assert isinstance(error, ConfigError)
    assert f"has the transactions {own}" in error.message
    run_to_end(options)
    check_current(binlog_server, tmp_path)

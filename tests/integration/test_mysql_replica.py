"""Tables that are read from a replica (`snapshot_dsn`), while the log comes from the server that it replicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.errors import ConfigError, SourceError
from firnline.names import spool_parts
from firnline.options import BatchOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots, source
from firnline.sources.cdc.spooling import Spooler
from firnline.sources.mysql import stream, table_reader
from firnline.sources.mysql.connect import Dsn, connect
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.integration.test_mysql_source import ORDERS, captured, check_current
from tests.support.captured import Capturing, delta_rows, position, wait_until
from tests.support.mariadb import MariaDbServer, running_mariadb
from tests.support.mysql import PASSWORD, BinlogServer, running_mysql
from tests.support.pipelines import run_once, run_to_end, run_until_epoch

pytestmark = [pytest.mark.mysql, pytest.mark.mariadb]
ROWS = 300


@pytest.fixture
def other(binlog_server: BinlogServer) -> Iterator[BinlogServer]:
    """Another server that logs what it replicates; not a replica yet."""
    running = running_mariadb if isinstance(binlog_server, MariaDbServer) else running_mysql
    with running("--server-id=2", "--log-slave-updates=ON") as server:
        server.run(*reset(server))
        yield server


def reset(server: BinlogServer) -> list[str]:
    return ["RESET MASTER" if isinstance(server, MariaDbServer) else "RESET BINARY LOGS AND GTIDS"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 50)


def fill(server: BinlogServer) -> None:
    values = ", ".join(f"({i}, {i}, 'n{i}')" for i in range(ROWS))
    server.run(*reset(server), "CREATE DATABASE shop", ORDERS, f"INSERT INTO shop.orders VALUES {values}")


def replicate(server: BinlogServer, replica: BinlogServer) -> None:
    """Have one server replicate another, from its first transaction on."""
    address = f"{{0}}_HOST='127.0.0.1', {{0}}_PORT={server.port}, {{0}}_USER='firnline', {{0}}_PASSWORD='{PASSWORD}'"
    if isinstance(server, MariaDbServer):
        statement = f"CHANGE MASTER TO {address.format('MASTER')}, MASTER_USE_GTID=slave_pos"
        replica.run("SET GLOBAL gtid_slave_pos = ''", statement, "START SLAVE")
    else:
        more = "SOURCE_AUTO_POSITION=1, GET_SOURCE_PUBLIC_KEY=1"
        replica.run(f"CHANGE REPLICATION SOURCE TO {address.format('SOURCE')}, {more}", "START REPLICA")


def stop_replicating(replica: BinlogServer) -> None:
    replica.run("STOP SLAVE SQL_THREAD" if isinstance(replica, MariaDbServer) else "STOP REPLICA SQL_THREAD")


def go_on_replicating(replica: BinlogServer) -> None:
    replica.run("START SLAVE" if isinstance(replica, MariaDbServer) else "START REPLICA")


def has_rows(server: BinlogServer) -> bool:
    held = server.run("SELECT table_name FROM information_schema.tables WHERE table_schema = 'shop'")
    return bool(held) and server.run("SELECT count(*) FROM shop.orders")[0][0] >= ROWS


def newest_spool(folder: Path) -> int:
    """The number of the newest spool file."""
    return max(parts[0] for path in folder.rglob("*") if (parts := spool_parts(path.name)) is not None)


def pipeline(server: BinlogServer, replica: BinlogServer, folder: Path) -> PipelineOptions:
    options = captured(server, folder)
    source = options.sources[0]
    assert isinstance(source, MySqlSourceOptions)
    source = replace(source, snapshot_dsn=f"{replica.dsn}/shop")
    return replace(options, sources=(source,), batch=BatchOptions(max_events=50))


def test_tables_are_read_from_a_replica(
    binlog_server: BinlogServer, other: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes come between the chunks, and the replica gets them a little later."""
    asked: list[int] = []

    def note(dsn: Dsn, host: tuple[str, int]) -> object:
        asked.append(host[1])
        return connect(dsn, host)

    monkeypatch.setattr(table_reader, "connect", note)  # for rows
    fill(binlog_server)
    replicate(binlog_server, other)
    wait_until(lambda: has_rows(other))
    options = pipeline(binlog_server, other, tmp_path)
    open_pipeline(options).sources["db"].check()
    run_until_epoch(options, 3)
    binlog_server.run(
        f"UPDATE shop.orders SET note = 'new' WHERE id IN (1, {ROWS - 1})",
        f"DELETE FROM shop.orders WHERE id = {ROWS - 2}",
        "INSERT INTO shop.orders VALUES (-1, 0, 'before'), (1000, 0, 'behind')",
    )
    run_to_end(options)
    check_current(binlog_server, tmp_path)
    assert set(asked) == {other.port}


def test_a_replica_that_is_behind_stops_the_run_and_is_taken_later(
    binlog_server: BinlogServer, other: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(binlog_server)
    replicate(binlog_server, other)
    wait_until(lambda: has_rows(other))
    stop_replicating(other)
    binlog_server.run(f"UPDATE shop.orders SET note = 'new' WHERE id = {ROWS - 1}")
    options = pipeline(binlog_server, other, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(table_reader, "BEHIND_SECONDS", 0.0)
        error = run_once(options).result.error
    assert isinstance(error, SourceError)
    assert f"127.0.0.1:{other.port} has not yet what was read of the log" in error.message
    go_on_replicating(other)
    run_to_end(options)
    check_current(binlog_server, tmp_path)


def test_a_replica_that_dies_or_is_promoted_amid_a_snapshot(
    binlog_server: BinlogServer, other: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FOREIGN_SECONDS", 0.0)
    fill(binlog_server)
    replicate(binlog_server, other)
    wait_until(lambda: has_rows(other))
    options = pipeline(binlog_server, other, tmp_path)
    run_until_epoch(options, 3)
    assert not position(options).snapshots["shop.orders"].done
    other.kill()
    assert isinstance(run_once(options).result.error, SourceError)
    other.start("--server-id=2", "--log-slave-updates=ON")
    other.run("CREATE DATABASE own")
    error = run_once(options).result.error
    assert isinstance(error, ConfigError)
    assert f"127.0.0.1:{other.port} (snapshot_dsn) is no replica of" in error.message
    source = options.sources[0]
    assert isinstance(source, MySqlSourceOptions)
    options = replace(options, sources=(replace(source, snapshot_dsn=""),))
    run_to_end(options)
    check_current(binlog_server, tmp_path)


def test_a_server_without_a_common_history(binlog_server: BinlogServer, other: BinlogServer, tmp_path: Path) -> None:
    fill(binlog_server)
    options = pipeline(binlog_server, other, tmp_path)
    with pytest.raises(ConfigError, match=r"is no replica of .*they have nothing in common"):
        open_pipeline(options).sources["db"].check()
    fill(other)
    with pytest.raises(ConfigError, match=r"is no replica of .*it has the transactions"):
        open_pipeline(options).sources["db"].check()
    assert run_once(options).exit_code == 2


def test_a_replica_that_leaves_rows_out(binlog_server: BinlogServer, other: BinlogServer, tmp_path: Path) -> None:
    fill(binlog_server)
    if isinstance(other, MariaDbServer):
        other.run("SET GLOBAL replicate_ignore_db = 'audit'")
    else:
        other.run("CHANGE REPLICATION FILTER REPLICATE_IGNORE_DB = (audit)")
    replicate(binlog_server, other)
    wait_until(lambda: has_rows(other))
    with pytest.raises(ConfigError, match=r"leaves rows out: .*audit"):
        open_pipeline(pipeline(binlog_server, other, tmp_path)).sources["db"].check()


def test_a_table_that_is_added_while_files_without_it_wait(
    binlog_server: BinlogServer, other: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run left spool files behind that lack the table, and the replica is behind them."""
    fill(binlog_server)
    binlog_server.run("CREATE TABLE shop.late (id int PRIMARY KEY, note text)", "INSERT INTO shop.late VALUES (1, 'a')")
    replicate(binlog_server, other)
    wait_until(lambda: has_rows(other))
    options = pipeline(binlog_server, other, tmp_path)
    late = DeltaSinkOptions("late", str(tmp_path / "late"), input="db.late", write="upsert", key=("id",))
    options = replace(options, sinks=(*options.sinks, late))
    database = options.sources[0]
    assert isinstance(database, MySqlSourceOptions)
    with_late = replace(options, sources=(replace(database, tables=("*",)),))
    options = replace(options, sources=(replace(database, tables=("*", "!late")),))
    run_to_end(options)
    spooled, files_after = position(options).spool, Spooler.files_after
    with monkeypatch.context() as patch:
        # Every transaction is spooled, and no epoch takes it.
        patch.setattr(source, "_take", lambda *_: [])
        patch.setattr(Spooler, "files_after", lambda self, _, wait: files_after(self, self._number, wait))
        with Capturing(options):
            binlog_server.run("UPDATE shop.orders SET note = 'one'")
            wait_until(lambda: newest_spool(tmp_path) > spooled)
            wait_until(lambda: other.run("SELECT count(*) FROM shop.orders WHERE note = 'one'")[0][0] == ROWS)
            stop_replicating(other)
            binlog_server.run("UPDATE shop.late SET note = 'b'", "UPDATE shop.orders SET note = 'two'")
            wait_until(lambda: newest_spool(tmp_path) > spooled + 1)
    with monkeypatch.context() as patch:
        patch.setattr(table_reader, "BEHIND_SECONDS", 0.0)
        run_once(with_late)
    go_on_replicating(other)
    run_to_end(with_late)
    check_current(binlog_server, tmp_path)
    assert delta_rows(tmp_path / "late", "id", "note") == [(1, "b")]

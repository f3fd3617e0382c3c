"""Slots that are lost, restored and promoted servers, damaged spool files: the log continues exactly, or the run stops
and names the ways out."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc.options import SpoolOptions
from tests.support.captured import (
    ORDERS,
    Capturing,
    captured,
    check_current,
    delta_rows,
    execute,
    history,
    query,
)
from tests.support.pipelines import run_once, run_to_end
from tests.support.postgres import PostgresServer, running_postgres
from tests.support.processes import KILLED, Launcher, wait_until

SLOT = "firnline_shop_db"
GAP = "source-gap"


@pytest.fixture(scope="module")
def started() -> Iterator[PostgresServer]:
    """A server that tests stop, copy and replace."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def server(started: PostgresServer) -> PostgresServer:
    started.clear()
    execute(started.dsn, ORDERS, "CREATE TABLE other (id int)")
    return started


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the user of the server may enter."""
    with tempfile.TemporaryDirectory(prefix="firnline-postgres-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def insert(dsn: str, *ids: int) -> None:
    execute(dsn, *[f"INSERT INTO orders VALUES ({number}, 1, 'x')" for number in ids])


def begin(server: PostgresServer, lake: Path, **source: Any) -> PipelineOptions:
    """A pipeline that has read one transaction."""
    options = captured(server.dsn, lake, **source)
    run_to_end(options)
    insert(server.dsn, 1)
    run_to_end(options)
    return options


def expect_gap(options: PipelineOptions, words: str) -> None:
    """The run stops, says why, and names a way out; what is committed stays."""
    held = history(Path(options.sinks[0].location).parent)
    run = run_once(options)
    assert run.error_code == GAP, run.result
    error = run.result.error
    assert error is not None
    assert words in error.message
    assert not error.retryable
    assert error.hint
    assert history(Path(options.sinks[0].location).parent) == held


def test_a_slot_that_was_dropped(server: PostgresServer, tmp_path: Path) -> None:
    options = begin(server, tmp_path)
    execute(server.dsn, f"SELECT pg_drop_replication_slot('{SLOT}')")
    insert(server.dsn, 2)
    expect_gap(options, "does not exist any more")


@pytest.mark.parametrize("loses", [True, False])
def test_a_slot_that_somebody_made_anew(server: PostgresServer, tmp_path: Path, loses: bool) -> None:
    """It begins behind a transaction that was not read; or nothing happened in between, and nothing may be lost."""
    options = begin(server, tmp_path)
    execute(server.dsn, f"SELECT pg_drop_replication_slot('{SLOT}')")
    if loses:
        insert(server.dsn, 2)
    execute(server.dsn, f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')")
    insert(server.dsn, 3)
    run = run_once(options)
    if loses or run.exit_code:
        expect_gap(options, "acknowledged up to")
    else:
        check_current(server.dsn, tmp_path)


def test_a_slot_that_somebody_else_acknowledged(server: PostgresServer, tmp_path: Path) -> None:
    options = begin(server, tmp_path)
    insert(server.dsn, 2)
    execute(server.dsn, f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())")
    insert(server.dsn, 3)
    expect_gap(options, "acknowledged up to")


def test_a_server_shuts_down_while_it_is_read(server: PostgresServer, tmp_path: Path) -> None:
    """It waits for a reader until everything is acknowledged, and the last epoch is not."""
    options = begin(server, tmp_path)
    with Capturing(options):
        insert(server.dsn, 2)
        wait_until(lambda: len(delta_rows(tmp_path / "current", "id")) == 2)
        server.stop()
        server.start()
        insert(server.dsn, 3)
        wait_until(lambda: len(delta_rows(tmp_path / "current", "id")) == 3)
    check_current(server.dsn, tmp_path)


def replace_server(server: PostgresServer, other: PostgresServer) -> None:
    """Start another server at the address of this one."""
    server.stop()
    other.port = server.port
    other.start()


@pytest.mark.parametrize("grows", [True, False], ids=["grows beyond", "stays behind"])
def test_a_server_restored_from_an_older_copy(
    server: PostgresServer, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    """Same identity, same timeline, the same slot: transactions that were read never happened there, and its new ones
    have places that were passed."""
    monkeypatch.setattr("firnline.sources.postgres.stream.PROOF_SECONDS", 5.0)
    options = begin(server, tmp_path)
    server.stop()
    old = server.copy(folder / "old")
    server.start()
    insert(server.dsn, 2, 3)
    run_to_end(options)
    replace_server(server, old)
    try:
        execute(old.dsn, "INSERT INTO orders VALUES (9, 9, 'other history')")
        if grows:
            execute(old.dsn, "INSERT INTO other SELECT generate_series(1, 5000)")
        expect_gap(options, "")
    finally:
        old.stop()
        server.start()


@pytest.mark.parametrize(
    ("known", "grows", "publication"),
    [(True, True, "mine"), (True, False, None), (False, True, None), (False, False, None)],
    ids=["own publication", "stays behind", "no transaction yet", "no transaction yet, stays behind"],
)
def test_a_restored_server_whose_position_had_moved_without_rows(
    server: PostgresServer,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
    grows: bool,
    publication: str | None,
) -> None:
    """The last transaction that was read is in the copy; the place behind it that had nothing for us is not."""
    execute(server.dsn, "CREATE PUBLICATION mine FOR TABLE orders")
    options = captured(server.dsn, tmp_path, publication=publication)
    run_to_end(options)
    if known:
        insert(server.dsn, 1)
        run_to_end(options)
    server.stop()
    old = server.copy(folder / "old")
    server.start()
    before = place_of(options)
    monkeypatch.setattr("firnline.sources.cdc.spooling.IDLE_SECONDS", 0.0)

    move_without_rows(options, lambda: execute(server.dsn, "INSERT INTO other SELECT generate_series(1, 3000)"))
    assert place_of(options) != before
    replace_server(server, old)
    try:
        execute(old.dsn, "INSERT INTO orders VALUES (9, 9, 'other history')")
        if grows:
            for _ in range(10):
                execute(old.dsn, "INSERT INTO other SELECT generate_series(1, 9000)")
        run = run_once(options)
        assert run.error_code == GAP, run.result
    finally:
        old.stop()
        server.start()


def test_a_table_that_is_named_again_had_changes_before_the_position(
    server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no other history: nobody read them. The table is read anew, and its later changes are decoded."""
    execute(server.dsn, "CREATE TABLE items (id int PRIMARY KEY)")
    both = captured(server.dsn, tmp_path, tables=("orders", "items"))
    both = replace(both, sinks=(*both.sinks, DeltaSinkOptions("all", str(tmp_path / "all"), input="db")))
    run_to_end(both)
    execute(server.dsn, "INSERT INTO orders VALUES (1, 1, 'x')", "INSERT INTO items VALUES (1)")
    run_to_end(both)
    one = replace(captured(server.dsn, tmp_path), sinks=both.sinks)
    monkeypatch.setattr("firnline.sources.cdc.spooling.IDLE_SECONDS", 0.0)
    ids = itertools.count(2)
    move_without_rows(one, lambda: execute(server.dsn, f"INSERT INTO items VALUES ({next(ids)})"))
    execute(server.dsn, "DELETE FROM items WHERE id = 1", "INSERT INTO items VALUES (-1)")
    run_to_end(both)
    execute(server.dsn, "INSERT INTO items VALUES (-2)", "INSERT INTO orders VALUES (2, 1, 'x')")
    run_to_end(both)
    check_current(server.dsn, tmp_path)
    rows = delta_rows(tmp_path / "all", "_table", "_op", "after")
    assert ("public.items", "insert", '{"id":-2}') in rows
    ops = Counter(op for table, op, _ in rows if table == "public.items")
    assert (ops["truncate"], ops["read"]) == (1, len(query(server.dsn, "SELECT FROM items")) - 1)


def move_without_rows(options: PipelineOptions, write: Callable[[], None]) -> None:
    """Run until the position has moved without rows of ours, while somebody writes; the first move may be an epoch of
    another kind."""

    def has_moved() -> bool:
        before = place_of(options)
        write()
        run_to_end(options)
        return bool(place_of(options) != before)

    for _ in range(2):
        wait_until(has_moved)


def place_of(options: PipelineOptions) -> Any:
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    return checkpoint.positions["db"]["place"]["lsn"]


@pytest.mark.parametrize("lost", [False, True], ids=["has all", "lacks the last"])
def test_a_promoted_standby(server: PostgresServer, tmp_path: Path, folder: Path, lost: bool) -> None:
    """It has the slot. With all that was read, reading goes on; without, its places are reused: a gap."""
    options = begin(server, tmp_path)
    server.stop()
    standby = server.copy(folder / "standby")
    server.start()
    standby.follow(server)
    standby.start()
    try:
        insert(server.dsn, 2, 3)
        wait_until(lambda: query(standby.dsn, "SELECT count(*) FROM orders") == [(3,)])
        standby.stop()
        if lost:
            insert(server.dsn, 4)
        run_to_end(options)
        replace_server(server, standby)
        execute(standby.dsn, "SELECT pg_promote()")
        insert(standby.dsn, 5)
        if lost:
            expect_gap(options, "timeline")
        else:
            run_to_end(options)
            check_current(standby.dsn, tmp_path)
            assert Counter(op for _, op in history(tmp_path)) == {"insert": 4}
    finally:
        standby.stop()
        server.start()


def spool_files(lake: Path) -> list[Path]:
    return sorted(lake.rglob("*.spool"))


@pytest.mark.parametrize("forgot", [True, False], ids=["the server forgot", "the server has it"])
@pytest.mark.parametrize("damage", ["lost", "flipped"])
def test_spool_files_that_a_rollback_needs_are_damaged(
    server: PostgresServer, tmp_path: Path, damage: str, forgot: bool
) -> None:
    """The server sends its log once more, if it has it. If not, the run stops before a row is missing, and says why."""
    options = begin(server, tmp_path, spool=SpoolOptions(keep="durable" if forgot else "cache"))
    back = open_pipeline(options).load().epoch
    for number in range(2, 6):
        insert(server.dsn, number)
        run_to_end(options)
    if forgot:  # as the run acknowledges it
        execute(server.dsn, f"SELECT pg_replication_slot_advance('{SLOT}', '{place_of(options)}')")
    Rollback(open_pipeline(options), back).perform("test")
    victim = spool_files(tmp_path)[-2]
    if damage == "lost":
        victim.unlink()
    else:
        data = victim.read_bytes()
        victim.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    run = run_once(options)
    if not forgot:
        assert run.exit_code == 0, run.result
        check_current(server.dsn, tmp_path)
    else:
        error = run.result.error
        assert error is not None, "rows are missing"
        assert (run.error_code, error.retryable) == (GAP, False)
        assert error.hint
        expect_gap(options, "acknowledged up to")
    assert len(set(history(tmp_path))) == len(history(tmp_path))


def test_spool_files_that_the_server_still_has_are_read_again(server: PostgresServer, tmp_path: Path) -> None:
    """A file that no epoch has taken: the server sends it once more."""
    options = begin(server, tmp_path)
    insert(server.dsn, 2, 3)
    launcher = Launcher(tmp_path / "children")
    assert launcher.run(options, "epoch.run.before:1:kill").exit_code == KILLED
    for path in spool_files(tmp_path)[-1:]:
        path.write_bytes(path.read_bytes()[:-7])
    run_to_end(options)
    check_current(server.dsn, tmp_path)
    assert history(tmp_path) == [(1, "insert"), (2, "insert"), (3, "insert")]

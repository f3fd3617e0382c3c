"""The slot of a captured PostgreSQL server: what it is told to forget, and what a quiet table does to its log."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import RollbackRefusedError
from firnline.history.edits.rollback import Rollback
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run import runner
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.cdc import source, spooling
from firnline.sources.cdc.options import SpoolOptions
from firnline.sources.cdc.spool import list_names
from firnline.sources.group import EpochPlan
from firnline.sources.postgres import stream
from firnline.sources.postgres.messages import parse_lsn
from tests.support.captured import (
    ORDERS,
    Capturing,
    check_current,
    count_history,
    execute,
    history,
    query,
    wait_until,
)
from tests.support.captured import captured as with_snapshot
from tests.support.pipelines import run_once, run_to_end

SLOT = "SELECT confirmed_flush_lsn, restart_lsn, active_pid FROM pg_replication_slots"


@pytest.fixture
def database(postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(stream, "STATUS_SECONDS", 0.05)  # a wrong status is sent at once
    execute(postgres, ORDERS)
    return postgres


class Gate(Observer):
    """Holds a run up before an epoch runs, from the first one after `close` on."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self.waits = threading.Event()

    def close(self) -> None:
        self.waits.clear()
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        self.waits.set()
        self._is_open.wait()


def captured(dsn: str, folder: Path, **settings: Any) -> PipelineOptions:
    """A pipeline that begins with the log alone: no epoch reads rows that are there."""
    return with_snapshot(dsn, folder, snapshot="never", **settings)


def confirmed(dsn: str) -> int:
    return parse_lsn(str(query(dsn, SLOT)[0][0]))


def newest(options: PipelineOptions) -> int:
    return open_pipeline(options).load().epoch


def decided(options: PipelineOptions, back: int = 0) -> int:
    """The place of the newest decided epoch, or of an earlier one, by the ledger."""
    pipeline = open_pipeline(options)
    entries = list(pipeline.entries(pipeline.load().entry))
    return parse_lsn(str(entries[back].checkpoint.positions["db"]["place"]["lsn"]))


def with_spool(options: PipelineOptions, **spool: object) -> PipelineOptions:
    return replace(options, sources=(replace(options.sources[0], spool=SpoolOptions(**spool)),))  # type: ignore[call-arg, arg-type]


def test_the_slot_is_never_confirmed_beyond_what_is_decided(database: str, tmp_path: Path) -> None:
    """While an epoch is held up, everything behind it is spooled, and statuses are sent all the time."""
    options, gate = captured(database, tmp_path), Gate()
    with Capturing(options, gate) as run:
        wait_until(lambda: newest(options) == 1)
        execute(database, "INSERT INTO orders VALUES (0, 0, 'x')")
        wait_until(lambda: newest(options) == 2)
        gate.close()
        execute(database, *(f"INSERT INTO orders VALUES ({n}, 1, 'x')" for n in range(1, 30)))
        assert gate.waits.wait(60)
        for _ in range(20):
            assert confirmed(database) <= decided(options, back=1)
            time.sleep(0.05)
        assert not run.has_ended
        gate.open()
        wait_until(lambda: count_history(tmp_path) == 30)
        wait_until(lambda: confirmed(database) == decided(options, back=1))
    assert confirmed(database) <= decided(options, back=1) < decided(options)
    check_current(database, tmp_path)


def test_runs_of_one_epoch_each_release_the_log(database: str, tmp_path: Path) -> None:
    """As a timer starts them: every run with `once` releases what the one before decided."""
    options = captured(database, tmp_path)
    run_to_end(options)
    for number in range(3):
        before = decided(options)
        execute(database, f"INSERT INTO orders VALUES ({number}, 1, 'x')")
        run_to_end(options)
        assert confirmed(database) == before < decided(options)


def test_a_cached_spool_leaves_the_log_of_the_rollback_window_to_the_server(database: str, tmp_path: Path) -> None:
    options = with_spool(captured(database, tmp_path, rollback_window=3), keep="cache")
    run_to_end(options)
    positions = []
    for number in range(8):
        execute(database, f"INSERT INTO orders VALUES ({number}, 1, 'x')")
        run_to_end(options)
        positions.append(decided(options))
        assert confirmed(database) <= positions[max(0, number - 3)]
    assert confirmed(database) > positions[0], "what is below the floor may be forgotten"
    back_to = newest(options) - 2
    pipeline = open_pipeline(options)
    captured_source = pipeline.sources["db"].inner  # type: ignore[attr-defined]
    for name in list_names(captured_source.storage, captured_source._folder):
        captured_source.storage.delete(f"{captured_source._folder}/{name}")
    with pytest.raises(RollbackRefusedError, match="the spool file is gone"):
        Rollback(open_pipeline(with_spool(options, keep="durable")), back_to).perform("test")
    Rollback(open_pipeline(options), back_to).perform("test")
    assert len(history(tmp_path)) == 6
    run_to_end(options)  # from the server
    check_current(database, tmp_path)
    assert len(history(tmp_path)) == 8


def test_a_full_spool_stops_reading_and_keeps_the_connection(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends a connection without a sign of life after 1.5 s."""
    monkeypatch.setattr(spooling, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(source, "SpoolSettings", partial(spooling.SpoolSettings, file_bytes=128 << 10))
    dsn = f"{database}?options=-c%20wal_sender_timeout%3D1500"
    options, gate = with_spool(captured(dsn, tmp_path), max_bytes=1 << 20), Gate()
    with Capturing(options, gate):
        wait_until(lambda: query(database, SLOT) and query(database, SLOT)[0][2])
        gate.close()
        execute(database, "INSERT INTO orders VALUES (0, 0, 'x')")
        assert gate.waits.wait(60)
        reader = query(database, SLOT)[0][2]
        rows = "SELECT g, 1, (SELECT string_agg(md5((g * h)::text), '') FROM generate_series(1, 300) h)"
        execute(database, *(f"INSERT INTO orders {rows} FROM generate_series({n}00, {n}99) g" for n in range(1, 21)))
        wait_until(lambda: _spooled(tmp_path) > 1 << 20)
        for _ in range(40):
            assert _spooled(tmp_path) < 4 << 20
            time.sleep(0.1)
        assert query(database, SLOT)[0][2] == reader, "the connection is the same"
        gate.open()
        wait_until(lambda: count_history(tmp_path) == 2001)
    check_current(database, tmp_path)


def test_a_transaction_larger_than_the_spool_is_read(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooling, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(source, "SpoolSettings", partial(spooling.SpoolSettings, file_bytes=128 << 10))
    options = with_spool(captured(database, tmp_path), max_bytes=1 << 20)
    run_to_end(options)
    rows = "SELECT g, 1, (SELECT string_agg(md5((g * h)::text), '') FROM generate_series(1, 300) h)"
    execute(database, f"INSERT INTO orders {rows} FROM generate_series(1, 1000) g")
    run_to_end(options)
    check_current(database, tmp_path)


def test_a_quiet_table_does_not_hold_the_log_back(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another table of the database writes, and the captured one does not."""
    monkeypatch.setattr(spooling, "IDLE_SECONDS", 0.3)
    execute(database, "CREATE TABLE busy (id bigint, note text)")
    options = captured(database, tmp_path)
    with Capturing(options):
        wait_until(lambda: query(database, SLOT))
        before = query(database, SLOT)[0][1]
        for _ in range(200):
            execute(
                database, "INSERT INTO busy SELECT g, repeat('x', 400) FROM generate_series(1, 500) g", "CHECKPOINT"
            )
            if parse_lsn(str(query(database, SLOT)[0][1])) > parse_lsn(str(before)) + 1_000_000:
                break
            time.sleep(0.2)
        else:
            raise AssertionError(f"the slot still keeps the log from {before} on")
    execute(database, "INSERT INTO orders VALUES (1, 1, 'x')")
    run_to_end(options)
    assert history(tmp_path) == [(1, "insert")]


def test_a_place_that_moved_without_rows_is_no_epoch_at_once(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE busy (id bigint)")
    options = captured(database, tmp_path)
    with Capturing(options) as run:
        wait_until(lambda: newest(options) == 1)
        execute(database, *(f"INSERT INTO busy VALUES ({n})" for n in range(20)))
        time.sleep(1.0)
        assert newest(options) == 1
        assert not run.has_ended


def test_a_run_that_ends_moves_the_place_when_much_was_logged(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooling, "IDLE_BYTES", 1 << 20)
    execute(database, "CREATE TABLE busy (id bigint, note text)")
    options = captured(database, tmp_path)
    run_to_end(options)
    assert run_once(options).result.epochs == 0
    execute(database, "INSERT INTO busy SELECT g, repeat('x', 400) FROM generate_series(1, 10000) g")
    before = decided(options)
    assert run_once(options).result.epochs == 1
    assert decided(options) > before + (1 << 20)
    assert run_once(options).result.epochs == 0


def test_idle_epochs_do_not_shorten_the_rollback_window(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooling, "IDLE_BYTES", 1)
    execute(database, "CREATE TABLE busy (id bigint)")
    options = captured(database, tmp_path, rollback_window=2)
    run_to_end(options)
    targets = []
    for number in range(3):
        execute(database, f"INSERT INTO orders VALUES ({number}, 1, 'x')")
        run_to_end(options)
        targets.append(newest(options))
    for number in range(5):
        execute(database, f"INSERT INTO busy VALUES ({number})")
        assert run_once(options).result.epochs >= 1
    Rollback(open_pipeline(options), targets[0]).perform("test")
    assert len(history(tmp_path)) == 1
    run_to_end(options)
    check_current(database, tmp_path)


def test_a_slot_that_keeps_too_much_is_an_alarm(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "LOG_SECONDS", 0.1)
    execute(database, "CREATE TABLE busy (id bigint, note text)")
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "INSERT INTO busy SELECT g, repeat('x', 400) FROM generate_series(1, 10000) g")
    watched = replace(options.sources[0], max_slot_lag_bytes=1_000_000)  # type: ignore[call-arg]
    warned = replace(options, sources=(watched,))
    log = load_status(open_pipeline(warned)).sources[0]["log"]
    assert "more than max_slot_lag_bytes (1,000,000)" in log["alarm"]
    with caplog.at_level(logging.WARNING), Capturing(warned) as run:
        wait_until(lambda: "max_slot_lag_bytes" in caplog.text)
        assert not run.has_ended
    stopped = replace(options, sources=(replace(watched, on_slot_lag="stop"),))  # type: ignore[call-arg]
    with Capturing(stopped, fails="slot-lag") as run:
        wait_until(lambda: run.has_ended)


def _spooled(folder: Path) -> int:
    """Bytes in spool files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if "spool" in str(path) and path.is_file())

"""Operating change capture: status and metrics, by what the servers themselves say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from prometheus_client import generate_latest

from firnline.cli.output import Output
from firnline.cli.run_report import RunReporter, RunTotals
from firnline.cli.status import show_status
from firnline.clock import monotonic
from firnline.errors import SourceError
from firnline.history.status import load_status
from firnline.options import BatchOptions
from firnline.run import runner
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.service.metrics import PipelineMetrics
from firnline.sources.base import SnapshotProgress
from firnline.sources.cdc import snapshots
from firnline.sources.postgres.source import PostgresSource
from tests.integration.test_mysql_source import DATABASE
from tests.integration.test_mysql_source import ORDERS as BINLOG_ORDERS
from tests.integration.test_mysql_source import captured as captured_binlog
from tests.support.captured import ORDERS, Capturing, captured, execute, query, wait_until
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end, run_until_epoch


def test_status_shows_lag_slot_and_schemas(postgres: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    execute(postgres, ORDERS)
    options = captured(postgres, tmp_path)
    first = load_status(open_pipeline(options)).sources[0]
    assert (first["error"], first["log"]["position"], first["log"]["retained_bytes"]) == (None, "", None)
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'x')")
    run_to_end(options)
    execute(postgres, "ALTER TABLE orders ADD COLUMN extra int", "INSERT INTO orders VALUES (2, 2, 'x', 3)")
    run_to_end(options)
    execute(postgres, "INSERT INTO orders SELECT g, g, 'x' FROM generate_series(10, 2000) g")
    report = load_status(open_pipeline(options))
    source = json.loads(json.dumps(report.sources[0]))
    assert source["schemas"] == [
        {"table": "public.orders", "version": 2, "fingerprint": source["schemas"][0]["fingerprint"]}
    ]
    log = source["log"]
    behind, kept = query(
        postgres,
        f"SELECT pg_wal_lsn_diff('{log['server_position']}', '{log['position']}')::bigint, "
        f"pg_wal_lsn_diff('{log['server_position']}', restart_lsn)::bigint FROM pg_replication_slots",
    )[0]
    assert log["lag_bytes"] == behind > 100_000
    assert log["retained_bytes"] == kept >= behind
    assert 0 < log["lag_seconds"] < 600
    show_status(Output(), report)
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("behind", "its slot keeps", "schema public.orders version 2"))
    run_to_end(options)
    log = load_status(open_pipeline(options)).sources[0]["log"]
    assert log["lag_bytes"] < behind


def test_status_of_a_binary_log(binlog_server: BinlogServer, tmp_path: Path) -> None:
    binlog_server.run(f"CREATE DATABASE {DATABASE}", BINLOG_ORDERS)
    options = captured_binlog(binlog_server, tmp_path)
    run_to_end(options)
    binlog_server.run(f"INSERT INTO {DATABASE}.orders VALUES (0, 1.5, 'before')")
    run_to_end(options)
    log = load_status(open_pipeline(options)).sources[0]["log"]
    assert (log["lag_bytes"], log["lag_seconds"], log["retained_bytes"]) == (0, 0.0, None)
    before = _log_bytes(binlog_server)
    binlog_server.run(f"INSERT INTO {DATABASE}.orders VALUES (1, 1.5, '{'x' * 400}')", "FLUSH BINARY LOGS")
    binlog_server.run(f"INSERT INTO {DATABASE}.orders VALUES (2, 1.5, 'y')")
    least = _log_bytes(binlog_server) - before
    source = load_status(open_pipeline(options)).sources[0]
    most = _log_bytes(binlog_server) - before  # MariaDB appends to a new file by itself
    assert least <= source["log"]["lag_bytes"] <= most
    assert 0 < source["log"]["lag_seconds"] < 600
    assert source["schemas"][0]["version"] == 1


def test_a_lost_right_leaves_the_lag_unknown(postgres: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    execute(postgres, ORDERS, "CREATE PUBLICATION shop FOR TABLE orders", "DROP ROLE IF EXISTS reader")
    execute(postgres, "CREATE ROLE reader LOGIN REPLICATION PASSWORD 's3cret'", "GRANT SELECT ON orders TO reader")
    execute(postgres, "GRANT USAGE ON SCHEMA public TO reader")
    parts = urlsplit(postgres)
    options = captured(
        postgres.replace(parts.netloc, f"reader:s3cret@127.0.0.1:{parts.port}"), tmp_path, publication="shop"
    )
    run_to_end(options)
    rights = ["EXECUTE ON FUNCTION pg_current_wal_flush_lsn()", "SELECT ON pg_replication_slots"]
    try:
        for right, shown in zip(rights, ("pg_current_wal_flush_lsn", "pg_replication_slots"), strict=True):
            execute(postgres, f"REVOKE {right} FROM PUBLIC")
            report = load_status(open_pipeline(options))
            log = report.sources[0]["log"]
            assert (log["lag_bytes"], log["retained_bytes"]) == (None, None)
            assert f"permission denied for {'function' if 'FUNCTION' in right else 'view'} {shown}" in log["unknown"]
            assert log["position"]
            capsys.readouterr()
            show_status(Output(), report)
            assert f"lag unknown: {log['unknown']}"[:60] in " ".join(capsys.readouterr().out.split())
            execute(postgres, f"GRANT {right} TO PUBLIC")
        assert load_status(open_pipeline(options)).sources[0]["log"]["unknown"] is None
    finally:
        for right in rights:
            execute(postgres, f"GRANT {right} TO PUBLIC")
        execute(postgres, "DROP OWNED BY reader", "DROP ROLE reader")


def test_a_right_that_is_lost_during_a_run_is_logged_once(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "LOG_SECONDS", 0.05)
    execute(postgres, ORDERS)
    options = captured(postgres, tmp_path)
    metrics = PipelineMetrics("shop", monotonic)
    lag = b'firnline_log_lag_bytes{pipeline="shop",source="db"}'
    with Capturing(options, metrics):
        wait_until(lambda: lag in _scrape(metrics))
        with monkeypatch.context() as patched:
            refused = SourceError("permission denied for view pg_replication_slots")
            patched.setattr(PostgresSource, "measure", Mock(side_effect=refused))
            wait_until(lambda: lag not in _scrape(metrics))
            wait_until(lambda: PostgresSource.measure.call_count > 3)  # type: ignore[attr-defined]
        wait_until(lambda: lag in _scrape(metrics))
    assert [record.message for record in caplog.records].count("the lag is unknown") == 1


def test_a_lost_right_of_a_binary_log_leaves_the_lag_unknown(binlog_server: BinlogServer, tmp_path: Path) -> None:
    binlog_server.run(
        f"CREATE DATABASE {DATABASE}",
        BINLOG_ORDERS,
        "DROP USER IF EXISTS reader",
        "CREATE USER reader IDENTIFIED BY 's3cret'",
        "GRANT SELECT, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO reader",
    )
    try:
        options = captured_binlog(binlog_server, tmp_path)
        parts = urlsplit(options.sources[0].dsn)  # type: ignore[attr-defined]
        dsn = f"mysql://reader:s3cret@{parts.hostname}:{parts.port}/{DATABASE}"
        options = replace(options, sources=(replace(options.sources[0], dsn=dsn),))  # type: ignore[call-arg]
        run_to_end(options)
        assert load_status(open_pipeline(options)).sources[0]["log"]["unknown"] is None
        binlog_server.run("REVOKE REPLICATION CLIENT ON *.* FROM reader")
        source = load_status(open_pipeline(options)).sources[0]
        assert source["log"]["lag_bytes"] is None
        assert source["log"]["position"]
        assert "denied" in source["log"]["unknown"]
        assert source["log"]["unknown"].count("s3cret") == 0
    finally:
        binlog_server.run("DROP USER reader")


def test_metrics_of_a_run(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOG_SECONDS", 0.2)
    execute(postgres, ORDERS)
    options = captured(postgres, tmp_path)
    metrics = PipelineMetrics("shop", monotonic)
    with Capturing(options, metrics):
        wait_until(lambda: b'firnline_log_retained_bytes{pipeline="shop",source="db"}' in _scrape(metrics))
        execute(postgres, "INSERT INTO orders VALUES (1, 1, 'x')")
        wait_until(lambda: b'firnline_log_lag_seconds{pipeline="shop",source="db"}' in _scrape(metrics))
    assert b'firnline_log_alarm{pipeline="shop",source="db"} 0.0' in _scrape(metrics)


def _log_bytes(server: BinlogServer) -> int:
    return sum(int(row[1]) for row in server.run("SHOW BINARY LOGS"))


def _scrape(metrics: PipelineMetrics) -> bytes:
    return generate_latest(metrics.registry())


def test_status_and_displays_show_how_far_tables_are_read(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 10)
    execute(postgres, ORDERS, "INSERT INTO orders SELECT g, g, 'x' FROM generate_series(1, 95) g", "ANALYZE orders")
    options = replace(captured(postgres, tmp_path, snapshot="initial"), batch=BatchOptions(max_events=10))
    epoch = 1
    while True:  # the first epochs have no rows
        run_until_epoch(options, epoch)
        report = load_status(open_pipeline(options))
        [progress] = report.sources[0]["snapshots"] or [{"rows": 0}]
        if progress["rows"]:
            break
        epoch += 1
    assert progress["state"] == "running"
    assert (progress["table"], progress["estimate"], progress["rows"] % 10) == ("public.orders", 95, 0)
    show_status(Output(), report)
    words = f"reads public.orders: {progress['rows']} of about 95 rows"
    assert words in " ".join(capsys.readouterr().out.split())

    said: list[str] = []
    totals = RunTotals(monotonic, options.input_words)
    reporter = RunReporter(said.append, attempts=3, words=options.input_words)
    told: list[Mapping[str, Mapping[str, SnapshotProgress]]] = []

    class Kept(Observer):
        def snapshots(self, progress: Mapping[str, Mapping[str, SnapshotProgress]]) -> None:
            told.append(progress)

    with Capturing(options, Kept()):
        wait_until(lambda: told)
    assert told[0]["db"]["public.orders"].estimate == 95
    part = {"db": {"public.orders": SnapshotProgress(progress["rows"], 95, 3, done=False)}}
    for _ in range(2):
        totals.snapshots(part)
        reporter.snapshots(part)
    assert totals.reading["db"] == [words]
    assert said == [f"source db {words}"]
    run_to_end(options)
    [progress] = load_status(open_pipeline(options)).sources[0]["snapshots"]
    assert (progress["state"], progress["rows"], progress["estimate"]) == ("done", 95, None)
    totals.snapshots({"db": {"public.orders": SnapshotProgress(95, 95, 10, done=True)}})
    assert totals.reading == {"db": []}


def test_displays_speak_of_transactions(postgres: str, tmp_path: Path) -> None:
    """A source without files waits for no files."""
    options = captured(postgres, tmp_path)
    said: list[str] = []
    totals, reporter = (
        RunTotals(monotonic, options.input_words),
        RunReporter(said.append, attempts=3, words=options.input_words),
    )
    totals.idle()
    reporter.idle()
    assert totals.step == "waits for new transactions"
    assert said == ["all read; waiting for new transactions"]
    totals.paused(paused=False)
    assert totals.step == "looks for transactions"

"""A captured server that is away, or never lets the source in: what the run says, how often, and when it gives up."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from firnline.errors import ConfigError
from firnline.options import PipelineOptions
from firnline.run import runner
from firnline.run.observer import Observer
from firnline.sources.cdc import snapshots, spooling
from firnline.sources.cdc.spool import write_file
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import (
    ORDERS,
    Capturing,
    captured,
    check_current,
    count_history,
    execute,
    has_read_all,
    wait_until,
)
from tests.support.mysql import BinlogServer
from tests.support.pipelines import LocalRun, run_once
from tests.support.proxy import running_proxy

TABLES = ("orders", "lines", "notes")


def run_and_fail(options: PipelineOptions) -> LocalRun:
    run = run_once(options)
    assert run.result.error is not None
    return run


@pytest.mark.parametrize("wrong", ["password", "role", "database", "host"])
def test_what_no_retry_mends_stops_at_once(
    wrong: str, postgres: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = urlsplit(postgres)
    at = f"{parts.username}:{parts.password}@127.0.0.1:{parts.port}"
    dsn, words, hint = {
        "password": (
            f"{parts.username}:wrong@127.0.0.1:{parts.port}/postgres",
            "authentication failed",
            "user and password",
        ),
        "role": (f"nobody:x@127.0.0.1:{parts.port}/postgres", "nobody", "user and password"),
        "database": (f"{at}/nowhere", 'database "nowhere" does not exist', "the database"),
        "host": ("u:p@no-such-host.invalid/postgres", "no-such-host.invalid", "the host"),
    }[wrong]
    run = run_and_fail(captured(f"postgresql://{dsn}", tmp_path))
    assert isinstance(run.result.error, ConfigError)
    assert words in run.result.error.message
    assert f"Correct {hint} in `dsn`" in run.result.error.hint
    assert "source 'db'" in run.result.error.message
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_server_that_may_come_back_is_tried_again(tmp_path: Path) -> None:
    """A password of one letter hides no other words of the message."""
    run = run_and_fail(captured("postgresql://u:p@127.0.0.1:9/db", tmp_path))
    assert run.result.error is not None
    assert run.result.error.retryable
    assert "port 9 failed: Connection refused" in run.result.error.message
    assert "`dsn`" in run.result.error.hint


@pytest.mark.parametrize("wrong", ["password", "host"])
def test_a_binlog_server_that_never_lets_the_source_in(wrong: str, binlog_server: BinlogServer, tmp_path: Path) -> None:
    parts = urlsplit(binlog_server.dsn)
    host = "no-such-host.invalid" if wrong == "host" else parts.hostname
    source = MySqlSourceOptions("db", f"mysql://nobody:wrong@{host}:{parts.port}/shop", ("orders",))
    options = replace(captured("", tmp_path), sources=(source,))
    assert isinstance(run_and_fail(options).result.error, ConfigError)


class Idle(Observer):
    """Remembers how much was in the history whenever a run said that everything is read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.rows = folder, list[int]()

    def idle(self) -> None:
        self.rows.append(count_history(self._folder))


def test_an_outage_is_one_warning_and_one_when_it_is_over(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the log, every table and the lag are read by connections of their own."""
    monkeypatch.setattr(runner, "LOG_SECONDS", 0.05)
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 0.05)
    execute(postgres, *(f"CREATE TABLE {name} (id int PRIMARY KEY, amount int, note text)" for name in TABLES))
    parts = urlsplit(postgres)
    assert parts.port is not None
    with running_proxy(parts.port) as proxy:
        dsn = postgres.replace(f":{parts.port}", f":{proxy.port}")
        options = captured(dsn, tmp_path, tables=TABLES)
        options = replace(options, sources=(replace(options.sources[0], poll_interval_secs=0.05),))
        observer = Idle(tmp_path)
        with Capturing(options, observer) as run, caplog.at_level(logging.WARNING, "firnline"):
            wait_until(lambda: observer.rows)
            proxy.treat("refuse")
            proxy.cut()
            source = run.pipeline.sources["db"]
            wait_until(source.unreachable)
            wait_until(lambda: any("waiting for it" in record.getMessage() for record in caplog.records))
            execute(postgres, "INSERT INTO orders VALUES (1, 1, 'x')")
            monkeypatch.setattr(runner, "AWAY_SECONDS", 0.3)
            wait_until(lambda: any("waiting for it for" in record.getMessage() for record in caplog.records))
            monkeypatch.setattr(runner, "AWAY_SECONDS", 600.0)
            proxy.heal()
            wait_until(lambda: count_history(tmp_path) == 1)
            wait_until(lambda: not source.unreachable())
            wait_until(lambda: any("read again" in record.getMessage() for record in caplog.records))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text for text in said if "waiting for it" in text or "read again" in text] == said
    assert len([text for text in said if text.endswith("; waiting for it")]) == 1
    assert said[-1].startswith("the source can be read again")
    check_current(postgres, tmp_path)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), RuntimeError("a library's own")])
def test_a_spool_that_cannot_be_written_for_a_while(
    failure: Exception, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on by itself, also after a failure that ends the thread which reads the log."""
    monkeypatch.setattr(spooling, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the thread's own end is wanted
    write, failed = write_file, list[int]()

    def fail_twice(*arguments: Any, **settings: Any) -> Any:
        if settings["rows"] and len(failed) < 2:
            failed.append(settings["rows"])
            raise failure
        return write(*arguments, **settings)

    execute(postgres, ORDERS)
    options = captured(postgres, tmp_path)
    options = replace(options, restart=replace(options.restart, backoff_secs=0.05))
    with Capturing(options) as run:
        wait_until(lambda: has_read_all(options) or run.has_ended)
        monkeypatch.setattr(spooling, "write_file", fail_twice)
        execute(postgres, "INSERT INTO orders VALUES (1, 1, 'x'), (2, 2, 'y')")
        wait_until(lambda: count_history(tmp_path) == 2 or run.has_ended)
    assert failed == [2, 2]
    check_current(postgres, tmp_path)


def test_nothing_is_said_to_be_read_before_the_tables_are(postgres: str, tmp_path: Path) -> None:
    execute(postgres, "CREATE TABLE orders (id int PRIMARY KEY, amount int, note text)")
    execute(postgres, "INSERT INTO orders SELECT g, g, 'x' FROM generate_series(1, 500) g")
    options = captured(postgres, tmp_path)
    options = replace(options, sources=(replace(options.sources[0], poll_interval_secs=0.05),))
    observer = Idle(tmp_path)
    with Capturing(options, observer):
        wait_until(lambda: observer.rows)
    assert set(observer.rows) == {500}

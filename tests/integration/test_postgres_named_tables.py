"""PostgreSQL tables that the spec leaves out for some time, and names again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots
from firnline.sources.cdc.source import LogSource
from firnline.sources.cdc.spool import SpoolFile
from tests.support.captured import (
    ORDERS,
    Capturing,
    captured,
    check_current,
    delta_rows,
    execute,
    history,
    position,
    wait_until,
)
from tests.support.pipelines import run_to_end

OTHER = "CREATE TABLE other (n int PRIMARY KEY)"
MEANWHILE = (
    "INSERT INTO orders VALUES (1000, 1, 'not captured')",
    "DELETE FROM orders WHERE id < 10",
    "UPDATE orders SET amount = -1 WHERE id = 200",
    "INSERT INTO other VALUES (1)",
)


@pytest.fixture
def database(postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 100)
    rows = "INSERT INTO orders SELECT g, g / 4.0, 'n' || g FROM generate_series(1, 250) g"
    execute(postgres, ORDERS, OTHER, rows)
    return postgres


def both(dsn: str, folder: Path, **more: Any) -> PipelineOptions:
    return captured(dsn, folder, tables=("orders", "other"), **more)


def without(dsn: str, folder: Path) -> PipelineOptions:
    """The pipeline when `orders` is left out; its sinks stay."""
    return captured(dsn, folder, tables=("o*", "!orders"))


def test_a_table_that_is_named_again_is_read_anew(database: str, tmp_path: Path) -> None:
    """What changed meanwhile comes, and what was deleted goes."""
    options = both(database, tmp_path)
    run_to_end(options)
    first = position(options)
    execute(database, *MEANWHILE)
    run_to_end(without(database, tmp_path))
    left = position(options)
    assert list(left.snapshots) == ["public.other"]
    assert list(left.schemas) == ["public.other"]
    run_to_end(without(database, tmp_path))
    assert position(options).left == {"public.orders": first.serial}
    execute(database, "INSERT INTO orders VALUES (1001, 1, 'not captured either')")
    run_to_end(options)
    check_current(database, tmp_path)
    again = position(options)
    assert (again.left, again.snapshots["public.orders"].done) == ({}, True)
    assert again.serial > first.serial, "chunks of the first snapshot are never taken for those of the second"
    execute(database, "UPDATE orders SET amount = 5 WHERE id = 20")
    run_to_end(options)
    check_current(database, tmp_path)
    counts = Counter(op for _, op in history(tmp_path))
    assert (counts["read"], counts["truncate"], counts["update"]) == (250 + 243, 1, 1)


def test_a_table_that_is_left_out_while_it_is_read(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = both(database, tmp_path)
    read = snapshots.SnapshotTaker.ready
    monkeypatch.setattr(snapshots.SnapshotTaker, "ready", lambda *more: read(*more)[:1])  # a chunk in each epoch
    with Capturing(options):
        wait_until(lambda: (one := position(options).snapshots.get("public.orders")) and one.chunks)
    monkeypatch.setattr(snapshots.SnapshotTaker, "ready", read)
    execute(database, *MEANWHILE)
    run_to_end(without(database, tmp_path))
    assert not position(options).running
    run_to_end(options)
    check_current(database, tmp_path)


def test_what_a_run_spooled_without_a_table_is_not_taken_for_its_changes(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that leaves the table out ends before its first epoch, but behind its first spool file."""
    options = both(database, tmp_path)
    run_to_end(options)
    choose, spooled = LogSource._choose, list[str]()

    def choose_nothing(self: LogSource, *arguments: Any, **more: Any) -> Any:
        spooled.extend(one.name for one in choose(self, *arguments, **more) if isinstance(one, SpoolFile))
        return []

    monkeypatch.setattr(LogSource, "_choose", choose_nothing)
    execute(database, *MEANWHILE)
    with Capturing(without(database, tmp_path)):
        wait_until(lambda: spooled)
    monkeypatch.setattr(LogSource, "_choose", choose)
    run_to_end(options)
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 250, "insert": 1, "delete": 9, "update": 1}


def test_a_table_without_a_key_that_is_named_again_is_read_whole(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE events (n int)", "INSERT INTO events SELECT generate_series(1, 150)")
    sink = DeltaSinkOptions("history", str(tmp_path / "history"), input="db.events")
    named = replace(captured(database, tmp_path, tables=("events", "other")), sinks=(sink,))
    left = replace(captured(database, tmp_path, tables=("*", "!events", "!orders")), sinks=(sink,))
    run_to_end(named)
    execute(database, "INSERT INTO events VALUES (200)", "INSERT INTO other VALUES (1)")
    run_to_end(left)
    run_to_end(named)
    execute(database, "INSERT INTO events VALUES (201)")
    run_to_end(named)
    counts = Counter(op for (op,) in delta_rows(tmp_path / "history", "_op"))
    assert counts == {"read": 150 + 151, "insert": 1, "truncate": 1}

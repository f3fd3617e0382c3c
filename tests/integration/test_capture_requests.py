"""Requests to read a captured table again that can no longer be answered: they end, by name, and hold up nobody."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from firnline.cli.run import Gap
from firnline.errors import ConfigError
from firnline.history.snapshots import ask_snapshot, load_progress
from firnline.run.open_pipeline import open_pipeline
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
from tests.support.pipelines import run_to_end

GONE = {
    "dropped": "DROP TABLE orders",
    "renamed": "ALTER TABLE orders RENAME TO others",
    "without a key": "ALTER TABLE orders DROP CONSTRAINT orders_pkey",
}


@pytest.fixture
def database(postgres: str) -> str:
    execute(postgres, ORDERS, "INSERT INTO orders VALUES (1, 1, 'x')")
    return postgres


@pytest.mark.parametrize("way", GONE)
def test_a_request_whose_table_is_gone_ends(
    database: str, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = captured(database, tmp_path)
    run_to_end(options)
    pipeline = open_pipeline(options)
    ask_snapshot(pipeline, "db", "public.orders", empties=True)
    assert [one.state for one in load_progress(pipeline)] == ["asked"]
    execute(database, GONE[way])
    with caplog.at_level(logging.WARNING):
        run_to_end(options)
    assert "table is not read again, and the request is dropped" in caplog.text
    assert pipeline.requests.load() == []
    assert [one.state for one in load_progress(pipeline)] == ["done"]
    # A table that loses its key leaves the publication of updates and deletes, so it is emptied and read again.
    assert count_history(tmp_path) == (3 if way == "without a key" else 1)


def test_a_run_that_is_alive_ends_it_and_reads_a_table_that_comes_later(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path)
    pipeline = open_pipeline(options)
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
        execute(database, "DROP TABLE orders")
        ask_snapshot(pipeline, "db", "public.orders")
        wait_until(lambda: not pipeline.requests.load())
        execute(database, ORDERS, "INSERT INTO orders VALUES (2, 2, 'y')")
        wait_until(lambda: count_history(tmp_path) == 3)
    check_current(database, tmp_path)


@pytest.mark.parametrize(("table", "words"), [("nothing", "has no table"), ("plain", "no key"), ("!", "no source")])
def test_tables_that_cannot_be_read_again_are_refused_by_a_run(
    database: str, tmp_path: Path, table: str, words: str
) -> None:
    """As `firnline snapshot` refuses them."""
    execute(database, "CREATE TABLE plain (n int)")
    pipeline = open_pipeline(captured(database, tmp_path, tables=("orders", "plain", "nothing")))
    with pytest.raises(ConfigError, match=words):
        Gap(resnapshot=("orders", table)).pass_on(pipeline)
    assert pipeline.requests.load() == []

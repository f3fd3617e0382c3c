"""Rows that are in PostgreSQL tables before their changes are captured: read in chunks while the log goes on."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from firnline.cli.common import load_pipeline
from firnline.cli.main import run_command
from firnline.cli.run import Gap
from firnline.errors import SourceGapError
from firnline.history.snapshots import find_table, load_progress
from firnline.options import PipelineOptions
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots
from firnline.sources.cdc.chunks import ChunkFile
from firnline.sources.cdc.source import LogSource
from firnline.sources.postgres import tables
from firnline.testing.local import LocalEngine
from tests.support.captured import (
    ORDERS,
    Capturing,
    captured,
    check_current,
    delta_rows,
    execute,
    has_read_all,
    history,
    position,
    query,
    wait_until,
)
from tests.support.pipelines import run_once, run_to_end


@pytest.fixture
def database(postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 100)
    execute(postgres, ORDERS)
    return postgres


def fill(dsn: str, rows: int) -> None:
    execute(dsn, f"INSERT INTO orders SELECT g, g / 4.0, 'n' || g FROM generate_series(1, {rows}) g")


def test_rows_that_were_there_are_read_once(database: str, tmp_path: Path) -> None:
    fill(database, 1050)
    options = captured(database, tmp_path)
    run_to_end(options)
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 1050}
    found = position(options)
    assert found.snapshots["public.orders"].done
    assert found.snapshots["public.orders"].rows == 1050
    assert found.window == ()
    execute(database, "UPDATE orders SET amount = 0 WHERE id = 5")
    run_to_end(options)
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 1050, "update": 1}
    assert not list(tmp_path.glob("**/*.chunk")) or position(options).snapshots


@contextmanager
def writing(dsn: str) -> Iterator[None]:
    """Somebody writes all the time: inserts, updates, deletes, keys that change."""
    stop, failures = threading.Event(), []

    def write() -> None:
        number = 0
        try:
            with psycopg.connect(dsn, autocommit=True) as db:
                while not stop.is_set():
                    number += 1
                    at = number * 37 % 2000 + 1
                    db.execute("UPDATE orders SET amount = amount + 1 WHERE id = %s", (at,))
                    db.execute("DELETE FROM orders WHERE id = %s", (at + 13,))
                    db.execute("INSERT INTO orders VALUES (%s, 7, 'new') ON CONFLICT DO NOTHING", (at + 7,))
                    db.execute("UPDATE orders SET id = id + 100000 WHERE id = %s", (at + 29,))
        except psycopg.Error as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_changes_during_the_snapshot_and_the_rows_become_one(database: str, tmp_path: Path) -> None:
    fill(database, 3000)
    options = captured(database, tmp_path)
    with writing(database), Capturing(options):
        wait_until(lambda: has_read_all(options))
    run_to_end(options)
    check_current(database, tmp_path)


def test_values_that_the_log_leaves_out_come_from_the_chunk(database: str, tmp_path: Path) -> None:
    """An update during the snapshot that leaves a large value as it is: the log does not have that value."""
    execute(database, "ALTER TABLE orders ALTER COLUMN note SET STORAGE EXTERNAL")
    execute(database, "INSERT INTO orders SELECT g, 0, repeat('x', 3000) || g FROM generate_series(1, 1500) g")
    options = captured(database, tmp_path)
    with Capturing(options):
        for number in range(1, 1500, 7):
            execute(database, f"UPDATE orders SET amount = {number} WHERE id = {number}")
            if number % 70 == 1:
                execute(database, f"UPDATE orders SET id = id + 5000 WHERE id = {number}")
            if number % 70 == 8:
                execute(database, f"UPDATE orders SET id = -id WHERE id = 1500 - {number}")  # behind the last chunk
        wait_until(lambda: has_read_all(options))
    run_to_end(options)
    check_current(database, tmp_path)


def test_a_chunk_of_large_rows_ends_early(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_CHUNK_BYTES", 50_000)
    execute(database, "INSERT INTO orders SELECT g, 0, repeat('x', 20000) || g FROM generate_series(1, 30) g")
    execute(database, "CREATE TABLE plain (note text)", "INSERT INTO plain SELECT note FROM orders")
    options = captured(database, tmp_path, tables=("orders", "plain"))
    run_to_end(options)
    check_current(database, tmp_path)
    found = position(options).snapshots
    assert [(found[f"public.{name}"].chunks, found[f"public.{name}"].rows) for name in ("orders", "plain")] == [
        (11, 30),
        (11, 30),
    ]


def test_a_table_that_is_added_later_is_read_too(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path, tables=("*",))
    run_to_end(options)
    execute(database, "CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later VALUES (1), (2)")
    fill(database, 10)
    run_to_end(options)
    found = position(options).snapshots
    assert found["public.later"].done
    assert found["public.later"].rows == 2
    assert query(database, "SELECT count(*) FROM pg_publication_tables WHERE tablename = 'later'") == [(1,)]


def test_never_reads_changes_alone(database: str, tmp_path: Path) -> None:
    fill(database, 10)
    options = captured(database, tmp_path, snapshot="never")
    run_to_end(options)
    execute(database, "INSERT INTO orders VALUES (11, 0, 'x')")
    run_to_end(options)
    assert history(tmp_path) == [(11, "insert")]


def test_always_reads_the_tables_at_every_start(database: str, tmp_path: Path) -> None:
    fill(database, 10)
    options = captured(database, tmp_path, snapshot="always")
    run_to_end(options)
    run_to_end(options)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 20}
    check_current(database, tmp_path)


def ask(options: PipelineOptions, table: str, *, where: str = "", empties: bool = False) -> None:
    pipeline = open_pipeline(options)
    owner, name = find_table(pipeline, table)
    pipeline.requests.ask_snapshot(name, owner, where=where, empties=empties, ids=pipeline.ids)


def test_a_table_is_read_again_when_somebody_asks(database: str, tmp_path: Path) -> None:
    fill(database, 250)
    options = captured(database, tmp_path)
    run_to_end(options)
    ask(options, "orders", where="id <= 20")
    assert [(one.table, one.state) for one in load_progress(open_pipeline(options))] == [("public.orders", "asked")]
    run_to_end(options)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 270}
    assert [(one.state, one.to_json()["rows"]) for one in load_progress(open_pipeline(options))] == [("done", 20)]
    assert open_pipeline(options).requests.load() == []
    check_current(database, tmp_path)


def test_empty_takes_away_rows_that_the_database_no_longer_has(database: str, tmp_path: Path) -> None:
    """Rows that vanished without a change row: here behind the back of the publication."""
    fill(database, 250)
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "ALTER PUBLICATION firnline_shop_db DROP TABLE orders", "DELETE FROM orders WHERE id > 100")
    ask(options, "orders", empties=True)
    run_to_end(options)
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 350, "truncate": 1}


def test_a_gap_is_accepted_and_the_table_is_read_again(database: str, tmp_path: Path) -> None:
    """The slot is dropped, rows change and vanish, and the run goes on where the log begins now."""
    fill(database, 250)
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(
        database,
        "SELECT pg_drop_replication_slot('firnline_shop_db')",
        "DELETE FROM orders WHERE id > 200",
        "UPDATE orders SET amount = -5 WHERE id < 10",
        "INSERT INTO orders VALUES (999, 9, 'gap')",
    )
    lost = run_once(options)
    assert isinstance(lost.result.error, SourceGapError)
    assert "--resnapshot" in lost.result.error.hint
    pipeline = open_pipeline(options, once=True)
    Gap(resnapshot=("orders",)).pass_on(pipeline)
    Gap(resnapshot=("orders",)).pass_on(pipeline)  # asked once
    result = Runner(pipeline, LocalEngine(1), Observer(), once=True).run()
    assert result.error is None
    check_current(database, tmp_path)
    execute(database, "INSERT INTO orders VALUES (1000, 9, 'after')")
    run_to_end(options)
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 250 + 201, "truncate": 1, "insert": 1}


def test_a_gap_that_is_accepted_alone_loses_what_lies_between(database: str, tmp_path: Path) -> None:
    fill(database, 5)
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "SELECT pg_drop_replication_slot('firnline_shop_db')", "DELETE FROM orders WHERE id = 1")
    pipeline = open_pipeline(options, once=True)
    Gap(accepted=True).pass_on(pipeline)
    assert Runner(pipeline, LocalEngine(1), Observer(), once=True).run().error is None
    execute(database, "INSERT INTO orders VALUES (6, 9, 'after')")
    run_to_end(options)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 5, "insert": 1}
    after = open_pipeline(options)
    gaps = [record for _, record in after.ledger_files(after.load().entry) if record.get("gap")]
    assert len(gaps) == 1


def events(dsn: str, folder: Path) -> PipelineOptions:
    """A pipeline with the history of a table that has no key."""
    options = captured(dsn, folder, tables=("events",))
    return replace(options, sinks=(DeltaSinkOptions("history", str(folder / "history"), input="db.events"),))


def test_a_table_without_a_key_is_read_whole_and_no_insert_is_lost_or_doubled(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE events (n int)", "INSERT INTO events SELECT g FROM generate_series(1, 950) g")
    options = events(database, tmp_path)
    stop, written = threading.Event(), 950

    def write() -> None:
        nonlocal written
        with psycopg.connect(database, autocommit=True) as db:
            while not stop.is_set():
                written += 1
                db.execute("INSERT INTO events VALUES (%s)", (written,))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with Capturing(options):
            wait_until(lambda: has_read_all(options))
            seen = written
            wait_until(lambda: written > seen + 20)
    finally:
        stop.set()
        thread.join()
    run_to_end(options)
    rows = Counter(n for n, _ in delta_rows(tmp_path / "history", "n", "_op"))
    assert rows == Counter(range(1, written + 1))
    assert position(options).left_out == {}, "the log has passed the snapshot"
    run_to_end(options)


def test_a_table_without_a_key_that_comes_later_is_read_once(database: str, tmp_path: Path) -> None:
    options = events(database, tmp_path)
    run_to_end(options)
    execute(database, "CREATE TABLE events (n int)", "INSERT INTO events VALUES (1), (2)")
    for number in range(3, 6):
        run_to_end(options)
        execute(database, f"INSERT INTO events VALUES ({number})")
    run_to_end(options)
    assert [n for (n,) in delta_rows(tmp_path / "history", "n")] == [1, 2, 3, 4, 5]


def test_the_command_asks_for_a_table_and_lists_how_far_it_is(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(database, 250)
    run_to_end(captured(database, tmp_path))
    (tmp_path / "firnline.yml").write_text(
        f"""
name: shop
sources: {{db: {{type: postgres, dsn: "${{env:SHOP_DSN}}", tables: [orders]}}}}
sinks:
  - {{name: history, type: delta, table: {tmp_path}/history, input: db.orders}}
  - {{name: current, type: delta, table: {tmp_path}/current, input: db.orders, write: upsert, key: [id]}}
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOP_DSN", database)

    def answer(*words: str) -> Any:
        capsys.readouterr()
        assert run_command(["snapshot", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    [before] = answer()["tables"]
    assert (before["table"], before["state"], before["rows"]) == ("public.orders", "done", 250)
    assert not answer("--table", "orders", "--dry-run")["done"]
    asked = answer("orders", "--dry-run")
    assert (asked["done"], asked["table"]) == (False, "public.orders")
    assert answer("orders", "firnline.yml", "--dry-run") == answer("public.orders", "--dry-run") == asked
    assert answer("firnline.yml", "--table", "orders", "--dry-run") == asked
    assert [one["state"] for one in answer()["tables"]] == ["done"]
    assert answer("--table", "orders", "--empty", "--yes")["done"]
    assert [one["state"] for one in answer()["tables"]] == ["asked"]
    assert run_command(["snapshot", "--table", "nothing", "--yes"]) == 2
    assert run_command(["snapshot", "nothing", "--yes"]) == 2
    assert run_command(["snapshot", "orders", "firnline.yml", "--table", "orders", "--dry-run"]) == 2
    assert run_command(["snapshot", "--yes"]) == 2
    capsys.readouterr()
    assert run_command(["schema-history", "orders", "--json"]) == 0
    history = json.loads(capsys.readouterr().out)["versions"]
    assert [(one["table"], one["version"], one["changed"]) for one in history] == [("public.orders", 1, ["3 columns"])]

    def audit() -> list[Any]:
        capsys.readouterr()
        assert run_command(["checkpoints", "--audit", "--json"]) == 0
        return list(json.loads(capsys.readouterr().out)["audit"])

    asked = audit()
    assert {one["what"] for one in asked} == {"snapshot"}
    pipeline = load_pipeline(None)
    pipeline.requests.done(pipeline.requests.load())
    Gap(resnapshot=("orders",)).pass_on(load_pipeline(None))  # of `run --resnapshot`
    assert [one["state"] for one in answer()["tables"]] == ["asked"]
    more = audit()
    assert len(more) == 2 * len(asked)
    assert {(one["what"], one["details"]["table"]) for one in more} == {("snapshot", "public.orders")}


def test_a_reader_of_tables_that_fails_in_any_way_is_tried_again(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no contract names, too: neither the rows nor the log wait for ever."""
    execute(database, "CREATE TABLE plain (n int)", "INSERT INTO plain VALUES (1)")
    fill(database, 250)
    left = {"find_tables": 2, "read_chunk": 2, "read_whole": 1, "barrier": 1}

    def failing(name: str) -> Any:
        real = getattr(tables.PostgresTables, name)

        def call(*arguments: Any, **more: Any) -> Any:
            if left[name]:
                left[name] -= 1
                raise EOFError("the connection is gone")
            return real(*arguments, **more)

        return call

    for name in left:
        monkeypatch.setattr(tables.PostgresTables, name, failing(name))
    options = captured(database, tmp_path, tables=("orders", "plain"))
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
    assert not any(left.values())
    run_to_end(options)
    check_current(database, tmp_path)
    assert {table: one.rows for table, one in position(options).snapshots.items()} == {
        "public.orders": 250,
        "public.plain": 1,
    }


@pytest.mark.parametrize("mode", ["initial", "always"])
def test_a_request_for_some_rows_never_takes_the_place_of_all_rows(database: str, tmp_path: Path, mode: str) -> None:
    fill(database, 250)
    options = captured(database, tmp_path, snapshot=mode)
    run_to_end(options)
    ask(options, "orders", where="id <= 5")
    ask(options, "orders", where="id <= 7")
    if mode == "initial":
        ask(options, "orders")
    run_to_end(options)
    assert Counter(op for _, op in history(tmp_path)) == {"read": 250 + 250 + 5 + 7}
    assert open_pipeline(options).requests.load() == []


def test_a_table_is_emptied_in_the_envelope_too(database: str, tmp_path: Path) -> None:
    fill(database, 5)
    options = captured(database, tmp_path)
    options = replace(options, sinks=(DeltaSinkOptions("all", str(tmp_path / "all"), input="db"),))
    run_to_end(options)
    ask(options, "orders", empties=True)
    run_to_end(options)
    rows = delta_rows(tmp_path / "all", "_op", "_table", "after")
    assert Counter(op for op, _, _ in rows) == {"read": 10, "truncate": 1}
    assert [after for op, _, after in rows if op == "truncate"] == [None]


def test_an_older_schema_in_the_epoch_of_a_chunk_takes_no_value_away(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk has a new column, and the log of its epoch has changes from before: the chunk is read again."""
    fill(database, 250)
    read, choose = tables.PostgresTables.read_chunk, LogSource._choose
    reads, given = list[str](), list[str]()

    def read_after_changes(self: tables.PostgresTables, *arguments: Any, **more: Any) -> Any:
        if not reads:
            execute(
                database,
                "UPDATE orders SET amount = 77 WHERE id = 5",
                "INSERT INTO orders VALUES (251, 1, 'new')",
                "ALTER TABLE orders ADD COLUMN c int DEFAULT 5",
            )
        reads.append("")
        return read(self, *arguments, **more)

    def choose_with_chunk(self: LogSource, *arguments: Any, **more: Any) -> Any:
        """As if the epoch before took longer: the log waits for the first chunk."""
        chosen = choose(self, *arguments, **more)
        given.extend(one.name for one in chosen if isinstance(one, ChunkFile))
        return [] if reads and not given else chosen

    monkeypatch.setattr(tables.PostgresTables, "read_chunk", read_after_changes)
    monkeypatch.setattr(LogSource, "_choose", choose_with_chunk)
    options = captured(database, tmp_path)
    run_to_end(options)
    check_current(database, tmp_path, "id, amount, note, c")
    chunks = [record for _, record in open_pipeline(options).ledger_files(open_pipeline(options).load().entry)]
    assert any(record.get("again") for record in chunks), "the log of the chunk's epoch had the older schema"

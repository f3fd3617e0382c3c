"""PostgreSQL tables without a key: read whole while the log waits, each row once, whatever happens meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake.exceptions import TableNotFoundError

from firnline.cli.run import Gap
from firnline.errors import SourceError
from firnline.options import PipelineOptions
from firnline.run.observer import Observer
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots
from firnline.sources.cdc.chunks import SnapshotBegin
from firnline.sources.cdc.log import Chunk, TableFacts
from firnline.sources.cdc.position import LogPosition
from firnline.sources.cdc.snapshots import SnapshotTaker
from firnline.sources.cdc.source import Input, LogSource
from firnline.sources.cdc.spool import SpoolFile
from firnline.sources.cdc.spooling import Spooler
from firnline.sources.postgres.options import PostgresSourceOptions
from firnline.sources.postgres.stream import PostgresStream
from firnline.sources.postgres.tables import PostgresTables
from tests.integration.test_capture_gaps import run_with
from tests.support.captured import Capturing, captured, delta_rows, execute, has_read_all, position, query, wait_until
from tests.support.pipelines import run_once, run_to_end

EVENTS, OTHER = "CREATE TABLE events (n int)", "CREATE TABLE other (n int PRIMARY KEY)"


@pytest.fixture
def database(postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 100)
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(snapshots, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(snapshots, "LONGEST_PAUSE_SECONDS", 0.5)
    return postgres


def pipeline(dsn: str, folder: Path, *tables: str, **more: Any) -> PipelineOptions:
    """A pipeline with the history of tables, one Delta table each."""
    options = captured(dsn, folder, tables=tables, **more)
    sinks = [DeltaSinkOptions(name, str(folder / name), input=f"db.{name}") for name in tables]
    return replace(options, sinks=tuple(sinks), restart=replace(options.restart, attempts=1))


def numbers(folder: Path, table: str) -> Counter[int]:
    return Counter(n for (n,) in delta_rows(folder / table, "n"))


def has(folder: Path, table: str, number: int) -> bool:
    """Whether a row has come; the table is made, and gets its columns, with its first row."""
    try:
        return number in numbers(folder, table)
    except (TableNotFoundError, KeyError):
        return False


def reader_of(dsn: str, *tables: str) -> str:
    """Make a role that may read the log and these tables; returns its connection string."""
    execute(
        dsn,
        "CREATE ROLE reader LOGIN REPLICATION PASSWORD 'x'",
        "GRANT USAGE ON SCHEMA public TO reader",
        *(f"GRANT SELECT ON {table} TO reader" for table in tables),
    )
    return dsn.replace(dsn.split("//")[1].split("@")[0], "reader:x")


class Troubles(Observer):
    """What a run says of sources that cannot be read."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def sources(self, unreachable: Mapping[str, str | None]) -> None:
        self.reasons += [reason for reason in unreachable.values() if reason]


def test_a_first_look_that_fails_loses_no_row(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has no connection left for the first looks at its tables, while changes come."""
    execute(database, EVENTS, "INSERT INTO events SELECT generate_series(1, 5)")
    options = pipeline(database, tmp_path, "events")
    find, failed = PostgresTables.find_tables, list[int]()

    def find_tables(self: PostgresTables) -> list[TableFacts]:
        if len(failed) < 3:
            failed.append(1)
            execute(database, f"INSERT INTO events VALUES ({5 + len(failed)})")
            raise SourceError("FATAL: sorry, too many clients already")
        return find(self)

    monkeypatch.setattr(PostgresTables, "find_tables", find_tables)
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
    execute(database, "INSERT INTO events VALUES (9)")
    run_to_end(options)
    assert numbers(tmp_path, "events") == Counter(range(1, 10))


def test_changes_that_come_before_the_tables_are_known_are_not_given_on(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is read for a while before the first plan."""
    execute(database, EVENTS, "INSERT INTO events SELECT generate_series(1, 5)")
    options = pipeline(database, tmp_path, "events")
    start = Spooler.start

    def start_spooler(self: Spooler) -> None:
        is_first = self._end.place is None
        start(self)
        if is_first:
            wait_until(lambda: self.files_after(0, 0.1))
            execute(database, "INSERT INTO events VALUES (6)")
            wait_until(lambda: len(self.files_after(0, 0.0)) > 1 or self.files_after(1, 0.1))

    monkeypatch.setattr(Spooler, "start", start_spooler)
    run_to_end(options)
    run_to_end(options)
    assert numbers(tmp_path, "events") == Counter(range(1, 7))


def test_a_table_that_is_found_while_its_first_rows_are_in_flight_is_not_read_too(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication of all tables; the look that finds the new table comes while an epoch has its first inserts."""
    execute(database, OTHER, "CREATE PUBLICATION everything FOR ALL TABLES")
    options = pipeline(database, tmp_path, "events", "other", publication="everything")
    is_in_flight, has_looked = threading.Event(), threading.Event()
    find, make, note = PostgresTables.find_tables, LogSource._make_plan, SnapshotTaker._find_wholes

    def find_tables(self: PostgresTables) -> list[TableFacts]:
        return [one for one in find(self) if is_in_flight.is_set() or one.name != "public.events"]

    def find_wholes(self: SnapshotTaker, new: Sequence[TableFacts]) -> None:
        note(self, new)
        if any(one.name == "public.events" for one in new):
            has_looked.set()

    def make_plan(self: LogSource, found: Any, inputs: Sequence[Input], parallelism: int) -> Any:
        if any(isinstance(one, SpoolFile) and one.transactions for one in inputs) and not is_in_flight.is_set():
            is_in_flight.set()
            assert has_looked.wait(60)
        return make(self, found, inputs, parallelism)

    monkeypatch.setattr(PostgresTables, "find_tables", find_tables)
    monkeypatch.setattr(SnapshotTaker, "_find_wholes", find_wholes)
    monkeypatch.setattr(LogSource, "_make_plan", make_plan)
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
        execute(database, f"BEGIN; {EVENTS}; INSERT INTO events SELECT generate_series(1, 5); COMMIT")
        wait_until(lambda: "public.events" in position(options).schemas)
        execute(database, "INSERT INTO events VALUES (6)")
        wait_until(lambda: has(tmp_path, "events", 6))
    run_to_end(options)
    assert numbers(tmp_path, "events") == Counter(range(1, 7))


def test_chunks_stay_until_the_epoch_that_reads_them(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with a key is read. Two come without one: while the second is read, the epoch of the first and others are
    decided, and their files deleted."""
    execute(database, OTHER, "INSERT INTO other SELECT generate_series(1, 1500)")
    options = pipeline(database, tmp_path, "other", "one", "two", rollback_window=1)
    options = replace(options, batch=replace(options.batch, max_events=100))
    reads, floors, order = [], list[LogPosition](), list[str]()
    read_whole, read_chunk = PostgresTables.read_whole, PostgresTables.read_chunk
    ready, acknowledge = SnapshotTaker.ready, LogSource.acknowledge

    def reading_chunk(self: PostgresTables, *arguments: Any, **more: Any) -> Chunk | None:
        reads.append(1)
        if len(reads) == snapshots.MAX_AHEAD:
            for name in ("one", "two"):
                execute(database, f"CREATE TABLE {name} (n int)", f"INSERT INTO {name} SELECT generate_series(1, 250)")
        return read_chunk(self, *arguments, **more)

    def ready_chunks(self: SnapshotTaker, known: LogPosition, end: int) -> list[Any]:
        """Chunks wait until the first of the two is begun: epochs come while the second is read."""
        return ready(self, known, end) if len(known.snapshots) > 1 else []

    def reading_whole(self: PostgresTables, table: str, *arguments: Any, **more: Any) -> Iterator[Chunk] | None:
        found = read_whole(self, table, *arguments, **more)
        return slowly(table, found) if found is not None else None

    def slowly(table: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        order.append(table)
        for number, chunk in enumerate(chunks):
            yield chunk
            if number == 0 and len(order) == 2:
                wait_until(lambda: any(order[0] in floor.snapshots for floor in floors))

    def acknowledged(self: LogSource, found: Any) -> None:
        acknowledge(self, found)
        floors.append(LogPosition.from_json(found, self.kind))

    monkeypatch.setattr(PostgresTables, "read_chunk", reading_chunk)
    monkeypatch.setattr(PostgresTables, "read_whole", reading_whole)
    monkeypatch.setattr(SnapshotTaker, "ready", ready_chunks)
    monkeypatch.setattr(LogSource, "acknowledge", acknowledged)
    run = Capturing(options)
    with run:
        wait_until(lambda: run.has_ended or (len(position(options).snapshots) == 3 and has_read_all(options)))
    run_to_end(options)
    assert [numbers(tmp_path, name) for name in ("one", "two")] == [Counter(range(1, 251))] * 2


def test_the_log_goes_on_without_a_table_that_cannot_be_read_until_it_can(database: str, tmp_path: Path) -> None:
    """No right to read it. Its rows come when the right does, each once, also those that came meanwhile."""
    execute(database, OTHER, EVENTS, "INSERT INTO events SELECT generate_series(1, 5)")
    execute(database, "CREATE PUBLICATION two FOR TABLE other, events")
    options = pipeline(reader_of(database, "other"), tmp_path, "other", "events", publication="two")
    troubles = Troubles()
    with Capturing(options, troubles):
        for number in (6, 7):
            execute(database, f"INSERT INTO other VALUES ({number})", f"INSERT INTO events VALUES ({number})")
            wait_until(partial(has, tmp_path, "other", number))
        assert "public.events" not in position(options).schemas
        wait_until(lambda: any("its changes are left out until it can" in one for one in troubles.reasons))
        assert any("public.events" in one and "may not read" in one for one in troubles.reasons)
    execute(database, "INSERT INTO events VALUES (8)")
    failed = run_once(options)  # it tells, after it has read all else
    assert "may not read" in str(failed.result.error)
    execute(database, "INSERT INTO events VALUES (9)")
    with Capturing(options):
        execute(database, "INSERT INTO other VALUES (8)")
        wait_until(lambda: has(tmp_path, "other", 8))
        execute(database, "GRANT SELECT ON events TO reader", "INSERT INTO events VALUES (10)")
        wait_until(lambda: "public.events" in position(options).snapshots)
        execute(database, "INSERT INTO events VALUES (11)")
        wait_until(lambda: has(tmp_path, "events", 11))
    run_to_end(options)
    assert numbers(tmp_path, "events") == Counter(range(1, 12))


def test_the_log_goes_on_while_a_transaction_stays_open(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "HOLD_SECONDS", 0.3)
    monkeypatch.setattr(snapshots, "HOLD_AGAIN_SECONDS", 0.1)
    execute(database, OTHER)
    options = pipeline(database, tmp_path, "other", "events")
    run_to_end(options)
    execute(database, EVENTS, "INSERT INTO events SELECT generate_series(1, 5)")
    with psycopg.connect(database) as held:
        held.execute("INSERT INTO events VALUES (6)")
        with Capturing(options):
            execute(database, "INSERT INTO other VALUES (1)", "INSERT INTO events VALUES (7)")
            wait_until(lambda: has(tmp_path, "other", 1))
            assert "public.events" not in position(options).snapshots
            held.commit()
            wait_until(lambda: "public.events" in position(options).snapshots)
            execute(database, "INSERT INTO events VALUES (8)")
            wait_until(lambda: has(tmp_path, "events", 8))
    run_to_end(options)
    assert numbers(tmp_path, "events") == Counter(range(1, 9))


def test_a_table_that_cannot_be_published_keeps_no_other_waiting(database: str, tmp_path: Path) -> None:
    dsn = reader_of(database)
    execute(database, OTHER, "ALTER TABLE other OWNER TO reader", "GRANT CREATE ON DATABASE postgres TO reader")
    execute(database, "GRANT CREATE ON SCHEMA public TO reader", "INSERT INTO other VALUES (1)")
    options = pipeline(dsn, tmp_path, "other", "events", "mine")
    run_to_end(options)
    execute(database, EVENTS, "INSERT INTO events VALUES (1)", "GRANT SELECT ON events TO reader")
    execute(dsn, "CREATE TABLE mine (n int)", "INSERT INTO mine VALUES (1)")
    troubles = Troubles()
    with Capturing(options, troubles):
        wait_until(lambda: "public.mine" in position(options).snapshots)
        execute(
            database, "INSERT INTO other VALUES (2)", "INSERT INTO mine VALUES (2)", "INSERT INTO events VALUES (2)"
        )
        wait_until(lambda: has(tmp_path, "other", 2) and has(tmp_path, "mine", 2))
        assert "must be owner of table events" in " ".join(troubles.reasons)
        execute(database, "ALTER TABLE events OWNER TO reader")
        wait_until(lambda: "public.events" in position(options).snapshots)
    run_to_end(options)
    assert [numbers(tmp_path, name) for name in ("other", "mine", "events")] == [Counter((1, 2))] * 3


def test_once_reads_all_tables_that_can_be_read(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with a key that the role may not read fails the run, after the others were read."""
    execute(database, OTHER, "CREATE TABLE aaa (n int PRIMARY KEY)", "INSERT INTO other SELECT generate_series(1, 500)")
    execute(database, "CREATE PUBLICATION two FOR TABLE other, aaa")
    options = pipeline(reader_of(database, "other"), tmp_path, "other", "aaa", publication="two")
    copy, put_off, is_done = PostgresTables._copy, SnapshotTaker._put_off, SnapshotTaker.is_done
    has_failed, asked = threading.Event(), threading.Semaphore(0)

    def copying(self: PostgresTables, *arguments: Any) -> None:
        for _ in range(5):
            assert asked.acquire(timeout=60)
        copy(self, *arguments)

    def putting_off(self: SnapshotTaker, *arguments: Any) -> None:
        put_off(self, *arguments)
        has_failed.set()

    def asking(self: SnapshotTaker, known: LogPosition) -> bool:
        """The run asks whether all is read, when one table has failed and the other is still to be read."""
        try:
            return is_done(self, known)
        finally:
            if has_failed.is_set():
                asked.release()

    monkeypatch.setattr(PostgresTables, "_copy", copying)
    monkeypatch.setattr(SnapshotTaker, "_put_off", putting_off)
    monkeypatch.setattr(SnapshotTaker, "is_done", asking)
    ended = run_once(options)
    assert "may not read public.aaa" in str(ended.result.error)
    assert numbers(tmp_path, "other") == Counter(range(1, 501))


def test_the_window_stays_short_while_a_table_cannot_be_read(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spool files that every later chunk sees are not kept for it; a transaction that stays open changes nothing."""
    monkeypatch.setattr(snapshots, "WINDOW_FILES", 3)
    execute(database, OTHER, "CREATE TABLE aaa (n int PRIMARY KEY)", "INSERT INTO aaa SELECT generate_series(1, 250)")
    execute(database, "CREATE PUBLICATION two FOR TABLE other, aaa")
    options = pipeline(reader_of(database, "other"), tmp_path, "other", "aaa", publication="two", rollback_window=1)
    upsert = DeltaSinkOptions("aaa", str(tmp_path / "aaa"), input="db.aaa", write="upsert", key=("n",))
    options = replace(options, sinks=(options.sinks[0], upsert))
    lengths = []
    with Capturing(options):
        wait_until(lambda: has_begun(options, "public.other"))
        with psycopg.connect(database) as held:
            held.execute("INSERT INTO aaa VALUES (1000)")
            for number in range(1, 25):
                execute(database, f"INSERT INTO other VALUES ({number})", f"INSERT INTO aaa VALUES ({1000 + number})")
                wait_until(partial(has, tmp_path, "other", number))
                lengths.append(len(position(options).window))
            held.commit()
        assert lengths[2] > 0
        assert max(lengths) <= 10
        assert len(list(tmp_path.glob("**/*.spool"))) <= 16
        execute(database, "UPDATE aaa SET n = -n WHERE n = 7", "DELETE FROM aaa WHERE n = 8")
        execute(database, "GRANT SELECT ON aaa TO reader")
        wait_until(lambda: has_read_all(options))
    run_to_end(options)
    assert numbers(tmp_path, "aaa") == Counter(n for (n,) in query(database, "SELECT n FROM aaa"))


def has_begun(options: PipelineOptions, table: str) -> bool:
    return table in position(options).snapshots


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_gap_of_the_log_behind_the_snapshot(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    """A new table is read before the log begins anew, with or without its epoch. What changes in between is lost."""
    options = pipeline(database, tmp_path, "other", "events")
    source = options.sources[0]
    assert isinstance(source, PostgresSourceOptions)
    options = replace(options, sources=(replace(source, tables=("*",)),))
    execute(database, OTHER, "INSERT INTO other VALUES (1)")
    run_to_end(options)
    execute(database, "SELECT pg_drop_replication_slot('firnline_shop_db')", EVENTS, "INSERT INTO events VALUES (1)")
    is_read, is_anew = threading.Event(), threading.Event()
    begin_anew, begins, keep = PostgresStream.begin_anew, SnapshotTaker.begins, SnapshotTaker._keep_whole

    def begin_late(self: PostgresStream) -> Any:
        assert is_read.wait(60)
        if is_begun:
            wait_until(lambda: "public.events" in position(options).snapshots)
        execute(database, "INSERT INTO events VALUES (2)")
        place = begin_anew(self)
        is_anew.set()
        return place

    def keep_whole(self: SnapshotTaker, *given: Any) -> None:
        keep(self, *given)
        is_read.set()

    def begins_late(self: SnapshotTaker, known: LogPosition) -> list[SnapshotBegin]:
        return begins(self, known) if is_begun or is_anew.is_set() else []

    monkeypatch.setattr(PostgresStream, "begin_anew", begin_late)
    monkeypatch.setattr(SnapshotTaker, "_keep_whole", keep_whole)
    monkeypatch.setattr(SnapshotTaker, "begins", begins_late)
    assert run_with(options, Gap(resnapshot_all=True)) is None
    execute(database, "INSERT INTO events VALUES (3)")
    run_to_end(options)
    rows = delta_rows(tmp_path / "events", "n", "_op")
    assert [row for row in rows if row[1] != "read"] == [(3, "insert"), (None, "truncate")]
    assert {n for n, op in rows if op == "read"} == {1, 2}

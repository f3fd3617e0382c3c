"""Tables of MySQL and MariaDB without a key: read whole, each row once, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pymysql
import pytest
from deltalake.exceptions import TableNotFoundError

from firnline.errors import ConfigError, SourceError
from firnline.options import BatchOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots, spooling
from firnline.sources.cdc.log import Chunk, TableGoneError
from firnline.sources.cdc.source import Input, LogSource
from firnline.sources.cdc.spool import SpoolFile
from firnline.sources.mysql import table_reader
from firnline.sources.mysql.decode import MySqlDecoder
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.mysql.table_reader import MySqlTableReader
from tests.integration.test_mysql_chunks import check_same, decoded, held, reader_of
from tests.support.binlog import end_of, only, reading
from tests.support.captured import Capturing, delta_rows, has_read_all, position, wait_until
from tests.support.kills import PROOF, kill
from tests.support.mysql import BinlogServer, MySqlServer, running_mysql
from tests.support.pipelines import run_once, run_to_end

READ_USER = "reader"
ENGINES = ("InnoDB", "MyISAM")
SERVERS = (("mysql", pytest.mark.mysql), ("mariadb", pytest.mark.mariadb))


def shared(*values: Any) -> list[Any]:
    """Parameters, each on every server under FIRNLINE_PROOF; by default, each on one of the two in turn."""
    return [
        pytest.param(name, value, marks=mark)
        for number, value in enumerate(values)
        for name, mark in (SERVERS if PROOF else SERVERS[number % 2 :][:1])
    ]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 100)
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(snapshots, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(snapshots, "LONGEST_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(table_reader, "LOCK_SECONDS", 1)


def make(server: BinlogServer, rows: int = 0, engine: str = "InnoDB", more: str = "") -> None:
    server.run(
        "CREATE DATABASE IF NOT EXISTS shop", f"CREATE TABLE shop.events (n int, words text{more}) ENGINE={engine}"
    )
    if rows:
        values = ", ".join(f"({n}, 'w{n}')" for n in range(1, rows + 1))
        server.run(f"INSERT INTO shop.events (n, words) VALUES {values}")


def ns(chunks: list[Chunk]) -> list[int]:
    return sorted(n for chunk in chunks for n in decoded(chunk).rows.column("n").to_pylist())


def whole(reader: MySqlTableReader, place: Any, limit: int = 100_000) -> list[Chunk]:
    found = reader.read_whole("shop.events", limit, barrier=reader.barrier(place))
    assert found is not None
    return list(found)


def has_more(numbers: Sequence[int], than: int) -> bool:
    return len(numbers) > than


def are_refused(server: BinlogServer, *statements: str) -> bool:
    """Whether each of these statements has to wait for a lock. MySQL waits for a second at least."""

    def is_refused(statement: str) -> bool:
        with contextlib.closing(server.connect()) as db, db.cursor() as cursor:
            cursor.execute(f"SET lock_wait_timeout = {int(isinstance(server, MySqlServer))}")
            try:
                cursor.execute(statement)
            except pymysql.Error as error:
                return bool(error.args[0] == 1205)
        return False

    with ThreadPoolExecutor() as pool:
        return all(pool.map(is_refused, statements))


# -- the reader ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_table_comes_in_parts(binlog_server: BinlogServer, engine: str) -> None:
    """Of so many rows or bytes; the values are those of the log, and so is the schema."""
    binlog_server.run("CREATE DATABASE shop")
    start = end_of(binlog_server)
    make(binlog_server, 950, engine, ", price decimal(10,2) DEFAULT 2.5, at timestamp(3) NULL, kind enum('a','b')")
    with reading(binlog_server, start) as log:
        changes = only(log.read(2).decode())
    end = end_of(binlog_server)
    with reader_of(binlog_server) as reader:
        found = whole(reader, end, 300)
        assert [(one.rows, one.is_last, one.high is None) for one in found] == [
            (300, False, True), (300, False, True), (300, False, True), (50, True, False),
        ]  # fmt: skip
        assert {(one.key, one.last, str(one.sees)) for one in found} == {((), None, str(found[0].sees))}
        (all_rows,) = whole(reader, end)
        check_same(decoded(all_rows), changes, by="n")
        assert [one.rows for one in whole(reader, end, 475)] == [475, 475, 0]  # the last one may have no row
        binlog_server.run("DELETE FROM shop.events")
        assert [(one.rows, one.is_last) for one in whole(reader, end_of(binlog_server))] == [(0, True)]
    with reader_of(binlog_server, max_chunk_bytes=100_000) as reader:
        values = ", ".join(f"({n}, REPEAT('x', 60000))" for n in range(60))
        binlog_server.run(f"INSERT INTO shop.events (n, words) VALUES {values}")
        found = whole(reader, end_of(binlog_server))
        assert [one.is_last for one in found] == [False] * (len(found) - 1) + [True]
        assert len(found) > 1
        assert ns(found) == list(range(60))


def test_large_rows_come_in_parts(mariadb: BinlogServer) -> None:
    """Rows that take several packets."""
    make(mariadb, more=", large longblob")
    mariadb.run(*(f"INSERT INTO shop.events VALUES ({n}, 'w', REPEAT('{n}', {17 << 20}))" for n in (1, 2)))
    with reader_of(mariadb) as reader:
        found = whole(reader, end_of(mariadb), 1)
    assert [one.rows for one in found] == [1, 1, 0]
    values = [value for one in found for value in decoded(one).rows.column("large").to_pylist()]
    assert values == [bytes(str(n), "ascii") * (17 << 20) for n in (1, 2)]


def check_exact(server: BinlogServer, *, waits: bool) -> None:
    """A commit that the log has, and the engine not yet: it is read and seen, or neither."""
    make(server)
    start = end_of(server)
    server.run("INSERT INTO shop.events VALUES (1, '')")
    decoder = MySqlDecoder()
    with reading(server, start) as log, reader_of(server) as reader:
        with held(server, "INSERT INTO shop.events VALUES (2, '')") as commit:
            log.read(2)
            first, second = (cut.position for cut in log.cuts)
            transactions = log.decode().transactions
            if waits:
                with pytest.raises(SourceError, match=r"a transaction that changed table shop\.events"):
                    reader.read_whole("shop.events", 10, barrier=reader.barrier(first))
            else:
                assert reader.read_whole("shop.events", 10, barrier=reader.barrier(second)) is None
                early = whole(reader, first)
                assert ns(early) == [1]
                assert decoder.sees(early[0].sees, transactions).tolist() == [True, False]
            commit.release()
        late = whole(reader, second)
        server.run("INSERT INTO shop.events VALUES (3, '')")
        assert ns(late) == [1, 2]
        assert decoder.sees(late[0].sees, log.read(3).decode().transactions).tolist() == [True, True, False]
        assert log.stream.has_reached(late[-1].high)
        last = whole(reader, second)
        server.run("INSERT INTO shop.events VALUES (4, '')")
        assert decoder.sees(last[0].sees, log.read(4).decode().transactions).tolist() == [True, True, True, False]


def test_what_is_read_is_what_is_seen(binlog_server: BinlogServer) -> None:
    check_exact(binlog_server, waits=isinstance(binlog_server, MySqlServer))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_read_while_others_write_is_what_is_seen(binlog_server: BinlogServer, engine: str) -> None:
    server = binlog_server
    make(server, engine=engine)
    start = end_of(server)
    stop, numbers, written = threading.Event(), itertools.count(1), list[int]()

    def write() -> None:
        with contextlib.closing(server.connect()) as db, db.cursor() as cursor:
            while not stop.is_set():
                number = next(numbers)
                cursor.execute(f"INSERT INTO shop.events VALUES ({number}, '')")
                written.append(number)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    taken: list[list[Chunk]] = []
    try:
        with reader_of(server) as reader:
            for _ in range(6):
                enough = len(written) + 10
                wait_until(partial(has_more, written, enough))
                taken.append(whole(reader, start, 50))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    total = int(server.run("SELECT COUNT(*) FROM shop.events")[0][0])
    with reading(server, start) as log:
        everything = log.read(total).decode()
    (changes,) = everything.changes
    of_row = changes.rows.column("n").to_pylist()
    for chunks in taken:
        seen = MySqlDecoder().sees(chunks[0].sees, everything.transactions)
        assert ns(chunks) == sorted(of_row[i] for i in range(total) if seen[changes.transaction[i]])
    assert len(ns(taken[-1])) > len(ns(taken[0]))


def test_rows_without_transactions_inside_of_one(mariadb: BinlogServer) -> None:
    """A table without transactions: its rows are in the log before the transaction around them ends."""
    make(mariadb, engine="Aria")
    mariadb.run("CREATE TABLE shop.safe (n int)")
    start = end_of(mariadb)
    with contextlib.closing(mariadb.connect(autocommit=False)) as db, db.cursor() as cursor:
        cursor.execute("INSERT INTO shop.safe VALUES (1)")
        cursor.execute("INSERT INTO shop.events VALUES (1, '')")
        with reader_of(mariadb) as reader:
            found = whole(reader, start)
        cursor.execute("INSERT INTO shop.events VALUES (2, '')")
        db.commit()
    with reading(mariadb, start) as log:
        everything = log.read(3).decode()
    seen = MySqlDecoder().sees(found[0].sees, everything.transactions)
    (changes,) = (one for one in everything.changes if one.schema.table == "shop.events")
    rows = changes.rows.column("n").to_pylist()
    assert ns(found) == [n for n, number in zip(rows, changes.transaction, strict=True) if seen[number]] == [1]


def test_writers_and_ddl_while_a_table_is_read(binlog_server: BinlogServer) -> None:
    """Writers do not wait, unless the engine has no snapshots. The table keeps its columns and its name."""
    make(binlog_server, 250)
    with reader_of(binlog_server) as reader:
        chunks = reader.read_whole("shop.events", 100, barrier=reader.barrier(end_of(binlog_server)))
        assert chunks is not None
        found = [next(chunks)]
        binlog_server.run("INSERT INTO shop.events VALUES (1000, '')", "DELETE FROM shop.events WHERE n = 249")
        ddl = ("ALTER TABLE shop.events ADD COLUMN late int", "RENAME TABLE shop.events TO shop.others")
        assert are_refused(binlog_server, *ddl)
        found += list(chunks)
        assert ns(found) == list(range(1, 251))
        binlog_server.run("ALTER TABLE shop.events ADD COLUMN late int DEFAULT 7")
        again = whole(reader, end_of(binlog_server))
        assert decoded(again[0]).rows.column("late").to_pylist() == [7] * 250
        binlog_server.run("DROP TABLE shop.events")
        with pytest.raises(TableGoneError):
            whole(reader, end_of(binlog_server))
        make(binlog_server, 250, "MyISAM")
        for ends in ("read", "closed"):
            chunks = reader.read_whole("shop.events", 100, barrier=reader.barrier(end_of(binlog_server)))
            assert chunks is not None
            found = [next(chunks)]
            assert are_refused(binlog_server, "INSERT INTO shop.events VALUES (1001, '')")
            if ends == "read":
                found += list(chunks)
                assert ns(found) == list(range(1, 251))
            else:
                chunks.close()
            binlog_server.run("DELETE FROM shop.events WHERE n > 1000", "DO 1")


def test_a_lost_connection_leaves_no_lock(binlog_server: BinlogServer) -> None:
    make(binlog_server, 6000, "MyISAM")
    binlog_server.run("UPDATE shop.events SET words = REPEAT('w', 3000)")
    with reader_of(binlog_server) as reader:
        place = end_of(binlog_server)
        chunks = reader.read_whole("shop.events", 10, barrier=reader.barrier(place))
        assert chunks is not None
        next(chunks)
        for number, statement in binlog_server.run("SELECT id, info FROM information_schema.processlist"):
            if statement and "FROM `shop`.`events`" in statement:
                binlog_server.run(f"KILL {number}")
        with pytest.raises(SourceError, match="lost"):
            list(chunks)
        binlog_server.run("INSERT INTO shop.events VALUES (0, '')")
        assert ns(whole(reader, place)) == list(range(6001))


def limited(server: BinlogServer, *grants: str) -> str:
    """Make a user who has these rights and may read the log; returns the dsn."""
    server.run(
        f"DROP USER IF EXISTS '{READ_USER}'@'%'",
        f"CREATE USER '{READ_USER}'@'%' IDENTIFIED BY 'x'",
        f"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO '{READ_USER}'@'%'",
        *(f"GRANT {grant} TO '{READ_USER}'@'%'" for grant in grants),
    )
    return f"mysql://{READ_USER}:x@127.0.0.1:{server.port}"


def statement_of(error: ConfigError) -> str:
    """The statement that a hint names."""
    assert error.hint is not None
    return error.hint.partition("server: ")[2].partition(";")[0]


# -- the pipeline --------------------------------------------------------------------------------------


def pipeline(dsn: str, folder: Path, *tables: str, **source: Any) -> PipelineOptions:
    """A pipeline with the history of tables, one Delta table each."""
    options = PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{dsn}/shop", tables or ("events",), **source),),
        sinks=tuple(DeltaSinkOptions(t, str(folder / t), input=f"db.{t}") for t in tables or ("events",)),
        batch=BatchOptions(max_events=1000),
    )
    return replace(options, restart=replace(options.restart, attempts=1))


def history(folder: Path, table: str = "events") -> Counter[Any]:
    return Counter(delta_rows(folder / table, "n", "_op"))


def has(folder: Path, n: int, table: str = "events") -> bool:
    """Whether a row has come; the table is made, and gets its columns, with its first row."""
    try:
        return any(row[0] == n for row in delta_rows(folder / table, "n"))
    except (TableNotFoundError, KeyError):
        return False


def each(op: str, *numbers: int) -> dict[Any, int]:
    return {(n, op): 1 for n in numbers}


def check_changes_meanwhile(
    server: BinlogServer, folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str = "InnoDB"
) -> None:
    """Changes before the snapshot begins, while the table is read, and after. What ends well and what does not: the
    first reading is lost after some chunks, and begins again."""
    make(server, 250, engine)
    options = pipeline(server.dsn, folder)
    run, read_whole, readings = server.run, MySqlTableReader.read_whole, list[int]()

    def reading_whole(self: MySqlTableReader, *arguments: Any, **more: Any) -> Generator[Chunk] | None:
        if not readings:
            run("INSERT INTO shop.events VALUES (251, 'before')", "DELETE FROM shop.events WHERE n = 1")
        found = read_whole(self, *arguments, **more)
        return slowly(found) if found is not None else None

    def slowly(chunks: Generator[Chunk]) -> Generator[Chunk]:
        readings.append(1)
        with contextlib.closing(chunks):
            for number, chunk in enumerate(chunks):
                yield chunk
                if number == 1 and len(readings) == 1:
                    if engine == "InnoDB":
                        run("INSERT INTO shop.events VALUES (252, 'lost')", "UPDATE shop.events SET n = -2 WHERE n = 2")
                    raise SourceError("the connection is lost")
                if number == 1 and engine == "InnoDB":
                    run("INSERT INTO shop.events VALUES (253, 'while')", "UPDATE shop.events SET n = -3 WHERE n = 3")
                    run("DELETE FROM shop.events WHERE n = 4")

    monkeypatch.setattr(MySqlTableReader, "read_whole", reading_whole)
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
        run("INSERT INTO shop.events VALUES (254, 'after')", "DELETE FROM shop.events WHERE n = 5")
        wait_until(lambda: has(folder, 254))
    run("INSERT INTO shop.events VALUES (255, 'later')")
    run_to_end(options)
    assert len(readings) == 2
    if engine == "InnoDB":
        expected = each("read", *range(3, 253), -2) | each("insert", 253, 254, 255)
        expected |= each("update", -3) | each("delete", 4, 5)
    else:
        expected = each("read", *range(2, 252)) | each("insert", 254, 255) | each("delete", 5)
    assert history(folder) == expected
    assert position(options).snapshots["shop.events"].sees is None  # the log has passed it


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_were_there_and_changes_come_once(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    check_changes_meanwhile(binlog_server, tmp_path, monkeypatch, engine)


@pytest.mark.mysql
@pytest.mark.parametrize("binlog_server", ["mysql"], indirect=True)
def test_a_server_without_gtids(binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del binlog_server  # skips where there is none
    with running_mysql("--gtid-mode=OFF", "--enforce-gtid-consistency=OFF") as server:
        check_exact(server, waits=True)
        server.clear()
        check_changes_meanwhile(server, tmp_path, monkeypatch)


def work(dsn: str, folder: Path) -> None:
    """In a child: small chunks, and a run that ends soon."""
    snapshots.CHUNK_ROWS, spooling.WAIT_SECONDS = 100, 0.02
    assert run_once(pipeline(dsn, folder)).exit_code == 0


KILLS = ("spool.chunk.before:2", "spool.chunk.after:3")
MORE_KILLS = ("spool.chunk.after:1", "spool.chunk.before:3", "stage.file.after:1", "epoch.stage.after:2",
              "delta.commit.before:2", "delta.commit.after:2")  # fmt: skip


@pytest.mark.crash
@pytest.mark.parametrize(
    ("binlog_server", "point"), shared(*KILLS, *(MORE_KILLS if PROOF else ())), indirect=["binlog_server"]
)
def test_killed_while_it_is_read(binlog_server: BinlogServer, tmp_path: Path, point: str) -> None:
    """Until its epoch is decided, the table is read again from its first row, with what came meanwhile."""
    make(binlog_server, 250)
    kill(point, partial(work, binlog_server.dsn, tmp_path))
    binlog_server.run("INSERT INTO shop.events VALUES (251, '')", "UPDATE shop.events SET n = -1 WHERE n = 1")
    run_to_end(pipeline(binlog_server.dsn, tmp_path))
    if point == "delta.commit.after:2":
        assert history(tmp_path) == each("read", *range(1, 251)) | each("insert", 251) | each("update", -1)
    else:
        assert history(tmp_path) == each("read", -1, *range(2, 252))


def test_ddl_and_truncate_around_the_snapshot(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statements that the snapshot sees mean nothing more; those behind it do. One waits until the table is read."""
    make(binlog_server, 150)
    options = pipeline(binlog_server.dsn, tmp_path, on_ddl="resnapshot")
    run, read_whole, threads = binlog_server.run, MySqlTableReader.read_whole, list[threading.Thread]()

    def reading_whole(self: MySqlTableReader, *arguments: Any, **more: Any) -> Generator[Chunk] | None:
        if not threads:
            run("TRUNCATE TABLE shop.events", "ALTER TABLE shop.events ADD COLUMN early int DEFAULT 5")
            make_rows = ", ".join(f"({n}, '', 5)" for n in range(200, 450))
            run(f"INSERT INTO shop.events VALUES {make_rows}")
        found = read_whole(self, *arguments, **more)
        return slowly(found) if found is not None else None

    def slowly(chunks: Generator[Chunk]) -> Generator[Chunk]:
        with contextlib.closing(chunks):
            for chunk in chunks:
                yield chunk
                if not threads:
                    threads.append(threading.Thread(target=run, args=("ALTER TABLE shop.events ADD COLUMN late int",)))
                    threads[0].start()

    monkeypatch.setattr(MySqlTableReader, "read_whole", reading_whole)
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
        threads[0].join()
        run("INSERT INTO shop.events VALUES (450, '', 6, 7)")
        wait_until(lambda: has(tmp_path, 450))
        run("TRUNCATE TABLE shop.events", "INSERT INTO shop.events VALUES (451, '', 6, 7)")
        wait_until(lambda: has(tmp_path, 451))
    found = Counter(delta_rows(tmp_path / "events", "n", "_op", "early", "late"))
    expected: dict[Any, int] = {(n, "read", 5, None): 1 for n in range(200, 450)}
    expected |= {(n, "insert", 6, 7): 1 for n in (450, 451)} | {(None, "truncate", None, None): 1}
    assert found == expected


@pytest.mark.parametrize(("binlog_server", "image"), shared("MINIMAL", "NOBLOB"), indirect=["binlog_server"])
def test_row_images_that_are_not_full(binlog_server: BinlogServer, tmp_path: Path, image: str) -> None:
    """Without a key, the log names a row by all its values."""
    make(binlog_server, 5)
    options = pipeline(binlog_server.dsn, tmp_path)
    binlog_server.run(f"SET GLOBAL binlog_row_image = '{image}'")
    try:
        binlog_server.run("DELETE FROM shop.events WHERE n = 5")
        run_to_end(options)
        binlog_server.run("DELETE FROM shop.events WHERE n = 2", "UPDATE shop.events SET words = 'x' WHERE n = 3")
        binlog_server.run("INSERT INTO shop.events VALUES (6, 'w6')")
    finally:
        binlog_server.run("SET GLOBAL binlog_row_image = 'FULL'")
    run_to_end(options)
    found = Counter(delta_rows(tmp_path / "events", "n", "words", "_op"))
    updated = next(row for row in found if row[2] == "update")
    assert updated[1] == "x"
    assert found - Counter([updated]) == Counter(
        [*((n, f"w{n}", "read") for n in (1, 2, 3, 4)), (2, "w2", "delete"), (6, "w6", "insert")]
    )


def test_tables_that_come_later_and_changes_alone(binlog_server: BinlogServer, tmp_path: Path) -> None:
    """A table that gets its name later is read with the rows that it had; `never` reads none."""
    make(binlog_server, 3)
    binlog_server.run("CREATE TABLE shop.late_ (n int)", "INSERT INTO shop.late_ VALUES (1), (2)")
    options = pipeline(binlog_server.dsn, tmp_path, "events", "late", snapshot="initial")
    never = pipeline(binlog_server.dsn, tmp_path / "never", snapshot="never", server_id=77)
    run_to_end(never)
    with Capturing(options):
        wait_until(lambda: has_read_all(options))
        binlog_server.run("INSERT INTO shop.late_ VALUES (3)", "RENAME TABLE shop.late_ TO shop.late")
        wait_until(lambda: "shop.late" in position(options).snapshots)
        binlog_server.run("INSERT INTO shop.late VALUES (4)", "INSERT INTO shop.events VALUES (4, '')")
        wait_until(lambda: has(tmp_path, 4, "late") and has(tmp_path, 4))
    run_to_end(never)
    assert history(tmp_path) == each("read", 1, 2, 3) | each("insert", 4)
    assert history(tmp_path, "late") == each("read", 1, 2, 3) | each("insert", 4)
    assert history(tmp_path / "never") == each("insert", 4)


WAYS = [("drop", ""), ("drop", " PRIMARY KEY"), ("rename", " PRIMARY KEY"), ("rename", "")]


@pytest.mark.parametrize(("binlog_server", "ways"), shared(*WAYS), indirect=["binlog_server"])
def test_a_table_that_takes_the_name_is_read_whole(
    binlog_server: BinlogServer, tmp_path: Path, ways: tuple[str, str]
) -> None:
    """Its rows come behind a truncate, which says that those of the other one are gone."""
    way, first_key = ways
    binlog_server.run("CREATE DATABASE shop", f"CREATE TABLE shop.events (n int{first_key})")
    binlog_server.run("INSERT INTO shop.events VALUES (1), (2), (3)")
    options = pipeline(binlog_server.dsn, tmp_path)
    current = DeltaSinkOptions("current", str(tmp_path / "current"), input="db.events", write="upsert", key=("n",))
    options = replace(options, sinks=(*options.sinks, current))
    run_to_end(options)
    binlog_server.run("INSERT INTO shop.events VALUES (4)")
    if way == "drop":
        binlog_server.run("DROP TABLE shop.events", "CREATE TABLE shop.events (n int)")
        binlog_server.run("INSERT INTO shop.events VALUES (11), (12)")
    else:
        binlog_server.run("CREATE TABLE shop.next (n int)", "INSERT INTO shop.next VALUES (11), (12)")
        binlog_server.run("RENAME TABLE shop.events TO shop.old, shop.next TO shop.events")
    run_to_end(options)
    binlog_server.run("INSERT INTO shop.events VALUES (13)")
    run_to_end(options)
    run_to_end(options)
    inserted = (4, 11, 12, 13) if way == "drop" else (4, 13)
    expected = each("read", 1, 2, 3, 11, 12) | each("insert", *inserted) | {(None, "truncate"): 1}
    assert history(tmp_path) == expected
    assert delta_rows(tmp_path / "current", "n") == [(11,), (12,), (13,)]
    found = position(options)
    assert (found.left, found.left_out, found.due) == ({}, {}, {})


def test_a_system_versioned_table_is_captured_and_not_read(mariadb: BinlogServer, tmp_path: Path) -> None:
    mariadb.run("CREATE DATABASE shop", "CREATE TABLE shop.events (n int) WITH SYSTEM VERSIONING")
    mariadb.run("INSERT INTO shop.events VALUES (1)")
    options = pipeline(mariadb.dsn, tmp_path)
    run_to_end(options)
    mariadb.run("INSERT INTO shop.events VALUES (2)")
    run_to_end(options)
    assert history(tmp_path) == each("insert", 2)


# -- rights --------------------------------------------------------------------------------------------


@pytest.fixture
def engine_to_lock(binlog_server: BinlogServer) -> str:
    """An engine whose tables are locked for a snapshot."""
    return "InnoDB" if isinstance(binlog_server, MySqlServer) else "MyISAM"


def test_the_right_to_lock(binlog_server: BinlogServer, engine_to_lock: str) -> None:
    """A missing right is found without a lock, by name, with the statement that gives it."""
    make(binlog_server, 3, engine_to_lock)
    binlog_server.run("CREATE TABLE shop.orders (n int PRIMARY KEY)")
    dsn = limited(binlog_server, "SELECT ON shop.events", "SELECT ON shop.orders")
    with contextlib.closing(MySqlTableReader(dsn, lambda table: True)) as reader:
        reader.check_may_read(["shop.orders"])
        with pytest.raises(ConfigError, match=r"LOCK TABLES.* table shop\.events") as refused:
            reader.check_may_read(["shop.orders", "shop.events"])
        with pytest.raises(ConfigError, match="LOCK TABLES"):
            reader.read_whole("shop.events", 10, barrier=reader.barrier(end_of(binlog_server)))
        binlog_server.run(statement_of(refused.value))
        with contextlib.closing(binlog_server.connect()) as db, db.cursor() as cursor:
            cursor.execute("LOCK TABLES shop.events WRITE")
            reader.check_may_read(["shop.orders", "shop.events"])
        assert ns(whole(reader, end_of(binlog_server))) == [1, 2, 3]
    if not isinstance(binlog_server, MySqlServer):
        binlog_server.run("ALTER TABLE shop.events ENGINE = InnoDB")
        dsn = limited(binlog_server, "SELECT ON shop.*")
        with contextlib.closing(MySqlTableReader(dsn, lambda table: True)) as reader:
            reader.check_may_read(["shop.events"])
            assert ns(whole(reader, end_of(binlog_server))) == [1, 2, 3]


def test_a_table_that_cannot_be_locked_keeps_no_other_waiting(
    binlog_server: BinlogServer, tmp_path: Path, engine_to_lock: str
) -> None:
    """`dry-run` refuses it. A run goes on without its changes, and reads it once it can."""
    make(binlog_server, 3, engine_to_lock)
    binlog_server.run("CREATE TABLE shop.other (n int PRIMARY KEY)", "INSERT INTO shop.other VALUES (1)")
    options = pipeline(limited(binlog_server, "SELECT ON shop.*"), tmp_path, "events", "other")
    (source,) = open_pipeline(options).sources
    with pytest.raises(ConfigError, match="LOCK TABLES") as refused:
        source.find_captured(source.start(None))
    with Capturing(options):
        for n in (4, 5):
            binlog_server.run(f"INSERT INTO shop.events VALUES ({n}, '')", f"INSERT INTO shop.other VALUES ({n})")
            wait_until(partial(has, tmp_path, n, "other"))
        assert "shop.events" not in position(options).schemas
    failed = run_once(options)  # it tells, after it has read all else
    assert "LOCK TABLES" in str(failed.result.error)
    binlog_server.run(statement_of(refused.value), "DELETE FROM shop.events WHERE n = 1")
    with Capturing(options):
        wait_until(lambda: "shop.events" in position(options).snapshots)
        binlog_server.run("INSERT INTO shop.events VALUES (6, '')")
        wait_until(lambda: has(tmp_path, 6))
    assert history(tmp_path) == each("read", 2, 3, 4, 5) | each("insert", 6)
    captured = source.find_captured(position(options).to_json())
    assert captured is not None
    assert {one.name: one.would_read for one in captured} == {"shop.events": False, "shop.other": False}


def test_the_log_goes_on_while_a_transaction_stays_open(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MySQL waits for it; MariaDB does not."""
    monkeypatch.setattr(snapshots, "HOLD_SECONDS", 0.3)
    monkeypatch.setattr(snapshots, "HOLD_AGAIN_SECONDS", 0.1)
    make(binlog_server, 3)
    binlog_server.run("CREATE TABLE shop.other (n int PRIMARY KEY)")
    options = pipeline(binlog_server.dsn, tmp_path, "events", "other")
    with contextlib.closing(binlog_server.connect(autocommit=False)) as db, db.cursor() as cursor:
        cursor.execute("INSERT INTO shop.events VALUES (4, '')")
        with Capturing(options):
            binlog_server.run("INSERT INTO shop.other VALUES (1)")
            wait_until(lambda: has(tmp_path, 1, "other"))
            is_begun = "shop.events" in position(options).snapshots
            db.commit()
            wait_until(lambda: "shop.events" in position(options).snapshots)
            binlog_server.run("INSERT INTO shop.events VALUES (5, '')")
            wait_until(lambda: has(tmp_path, 5))
    found = history(tmp_path)
    assert Counter(n for n, _ in found.elements()) == Counter(range(1, 6))
    assert found[(4, "read")] or not isinstance(binlog_server, MySqlServer)
    assert not is_begun or not isinstance(binlog_server, MySqlServer)


def test_changes_that_an_epoch_under_way_leaves_out_are_seen(
    mariadb: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is read again after some failures. An epoch that was planned before has a change which the log has, and
    the engine not yet: the snapshot has to wait for it."""
    make(mariadb, 3)
    mariadb.run("CREATE TABLE shop.other (n int PRIMARY KEY)")
    options = pipeline(mariadb.dsn, tmp_path, "events", "other")
    read_whole, make_plan = MySqlTableReader.read_whole, LogSource._make_plan
    is_held, may_read, has_tried = threading.Event(), threading.Event(), threading.Event()

    def reading_whole(self: MySqlTableReader, *arguments: Any, **more: Any) -> Generator[Chunk] | None:
        if not may_read.is_set():
            raise SourceError("not yet")
        found = read_whole(self, *arguments, **more)
        has_tried.set()
        return found

    def making_plan(self: LogSource, found: Any, inputs: Sequence[Input], parallelism: int) -> Any:
        if is_held.is_set() and any(isinstance(one, SpoolFile) and one.transactions for one in inputs):
            may_read.set()
            assert has_tried.wait(60)
        return make_plan(self, found, inputs, parallelism)

    monkeypatch.setattr(MySqlTableReader, "read_whole", reading_whole)
    monkeypatch.setattr(LogSource, "_make_plan", making_plan)
    with Capturing(options):
        mariadb.run("INSERT INTO shop.other VALUES (1)")
        wait_until(lambda: has(tmp_path, 1, "other"))  # the log goes on without the other table
        is_held.set()
        with held(mariadb, "INSERT INTO shop.events VALUES (4, '')"):
            assert has_tried.wait(60)
        wait_until(lambda: "shop.events" in position(options).snapshots)
        mariadb.run("INSERT INTO shop.events VALUES (5, '')")
        wait_until(lambda: has(tmp_path, 5))
    assert history(tmp_path) == each("read", 1, 2, 3, 4) | each("insert", 5)

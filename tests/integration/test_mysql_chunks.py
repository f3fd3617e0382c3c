"""Chunks of tables of MySQL and MariaDB: their values and schemas are those of the log; what their snapshots see."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from firnline.errors import ConfigError, DamagedError, SourceError
from firnline.sources.cdc.log import Changes, Chunk, ChunkRows, TableFacts, TableGoneError
from firnline.sources.mysql import chunk as chunks
from firnline.sources.mysql.decode import MySqlDecoder
from firnline.sources.mysql.definition import read_definition
from firnline.sources.mysql.table_reader import MySqlTableReader
from tests.integration.test_mysql_damage import FLIPS, ROW
from tests.integration.test_mysql_damage import TABLE as DAMAGED_TABLE
from tests.integration.test_mysql_types import kinds_of
from tests.support.binlog import end_of, only, reading
from tests.support.mysql import BinlogServer, MySqlServer, running_mysql

LONG = bool(os.environ.get("FIRNLINE_PROOF"))

pytestmark = [pytest.mark.mysql, pytest.mark.mariadb]


def reader_of(server: BinlogServer, **settings: Any) -> contextlib.closing[MySqlTableReader]:
    return contextlib.closing(MySqlTableReader(server.dsn, lambda table: table.startswith("shop."), **settings))


def chunk_of(server: BinlogServer, table: str, limit: int = 100_000, **settings: Any) -> Chunk:
    with reader_of(server) as reader:
        chunk = reader.read_chunk(table, None, limit, **settings)
    assert chunk is not None
    return chunk


def decoded(chunk: Chunk) -> ChunkRows:
    return MySqlDecoder().decode_chunk(chunk.context, chunk.content)


def check_same(rows: ChunkRows, changes: Changes, by: str = "id") -> None:
    """A chunk has the schema and the rows that the log has: same names, types, words, key, values, odd values."""
    assert rows.schema == changes.schema
    assert rows.rows.schema == changes.rows.schema
    order = {value: row for row, value in enumerate(changes.rows.column(by).to_pylist())}
    assert len(order) == rows.rows.num_rows
    indices = [order[value] for value in rows.rows.column(by).to_pylist()]
    expected = changes.rows.take(pa.array(indices))
    for column in rows.schema.columns:
        ours, theirs = rows.rows.column(column.name), expected.column(column.name)
        assert ours.to_pylist() == theirs.to_pylist(), f"{rows.schema.table}.{column.name} {column.native}"
        assert ours.equals(theirs), f"{rows.schema.table}.{column.name} {column.native}"
    texts = {name: {indices.index(row): text for row, text in odd.items()} for name, odd in changes.odd.items()}
    assert rows.odd == texts
    rows.rows.validate(full=True)


def test_every_type_has_the_value_of_the_log(binlog_server: BinlogServer) -> None:
    """Each value of each type, null included: the chunk's schema and batch are exactly those of the log."""
    kinds = kinds_of(binlog_server)
    start = end_of(binlog_server)
    with contextlib.closing(binlog_server.connect()) as db, db.cursor() as cursor:
        cursor.execute("CREATE DATABASE shop")
        cursor.execute("SET time_zone = '+03:00', sql_mode = ''")
        for number, kind in enumerate(kinds):
            cursor.execute(f"CREATE TABLE shop.t{number} (id int primary key, v {kind.type}, w int unsigned)")
            rows = ", ".join(f"({i}, {value}, {i})" for i, value in enumerate((*kind.values, "NULL")))
            cursor.execute(f"INSERT INTO shop.t{number} VALUES {rows}")
    with reading(binlog_server, start) as log:
        changes = {one.schema.table: one for one in log.read(2 * len(kinds)).decode().changes}
    with reader_of(binlog_server) as reader:
        for table, expected in changes.items():
            chunk = reader.read_chunk(table, None, 1000)
            assert chunk is not None
            assert chunk.is_last
            assert chunk.key == ("id",)
            check_same(decoded(chunk), expected)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
RANDOM = {
    "tinyint": st.integers(-128, 127),
    "int unsigned": st.integers(0, 2**32 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "bigint unsigned": st.integers(0, 2**64 - 1).map(Decimal),
    "bit(20)": st.integers(0, 2**20 - 1),
    "double": st.floats(allow_nan=False, allow_infinity=False).map(lambda one: one + 0.0),  # the server has no -0
    "decimal(30,10)": st.integers(-(10**30) + 1, 10**30 - 1).map(lambda one: Decimal(one).scaleb(-10)),
    "varchar(20)": TEXT,
    "longtext": TEXT,
    "varbinary(40)": st.binary(max_size=40),
    "blob": st.binary(max_size=40),
    "date": st.dates(datetime.date(1000, 1, 1)),
    "datetime(6)": st.datetimes(datetime.datetime(1000, 1, 1)),
    "time(6)": st.timedeltas(-datetime.timedelta(hours=838), datetime.timedelta(hours=838)),
    "json": st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
        max_leaves=8,
    ).map(lambda one: json.dumps(one, ensure_ascii=False)),
}
ROWS = st.lists(st.fixed_dictionaries({kind: st.none() | of for kind, of in RANDOM.items()}), min_size=1, max_size=12)
WRITTEN_BY_THE_SERVER = ("time(6)", "json")  # SELECT or the server gives another form of the same value


def test_random_values_of_every_type(binlog_server: BinlogServer) -> None:
    """The log has the values that were written, and the chunk has those of the log."""
    columns = {kind: f"c{number}" for number, kind in enumerate(RANDOM)}
    shape = ", ".join(f"{name} {kind}" for kind, name in columns.items())
    binlog_server.run("CREATE DATABASE shop")
    seen: set[str] = set()
    tables = itertools.count()

    @settings(max_examples=100 if LONG else 6, suppress_health_check=list(HealthCheck), database=None,
              derandomize=True, deadline=None, phases=[Phase.generate])  # fmt: skip
    @given(
        st.lists(st.fixed_dictionaries({kind: st.none() | of for kind, of in RANDOM.items()}), min_size=1, max_size=12)
    )
    def check(rows: list[dict[str, Any]]) -> None:
        table, start = f"shop.t{next(tables)}", end_of(binlog_server)
        with contextlib.closing(binlog_server.connect()) as db, db.cursor() as cursor:
            cursor.execute(f"CREATE TABLE {table} (id int primary key, {shape}) CHARACTER SET utf8mb4")
            places = ", ".join(["%s"] * (len(columns) + 1))
            values = [(number, *(row[kind] for kind in columns)) for number, row in enumerate(rows)]
            cursor.executemany(f"INSERT INTO {table} VALUES ({places})", values)
            db.commit()
        with reading(binlog_server, start) as log:
            changes = only(log.read(2).decode())
        for kind, name in columns.items():
            found = changes.rows.column(name).to_pylist()
            written = [row[kind] for row in rows]
            if kind == "datetime(6)":
                found = [one.replace(tzinfo=None) if one is not None else None for one in found]
            if kind not in WRITTEN_BY_THE_SERVER:
                assert found == written, kind
            elif kind == "json":
                assert [one and json.loads(one) for one in found] == [one and json.loads(one) for one in written]
            seen.update(kind for one in found if one is not None)
        with reader_of(binlog_server) as reader:
            chunk = reader.read_chunk(table, None, 1000)
            assert chunk is not None
            check_same(decoded(chunk), changes)

    check()
    assert seen == set(RANDOM)


# -- schemas: name, columns, rows; on one server only --
SHAPES = [
    ("keys", "b int, a int, t varchar(5), primary key (a, b)", "(2, 1, 'x'), (1, 2, 'y')", ""),
    ("uniq", "a int, id int not null, b int, unique (b), unique (id)", "(1, 1, 1), (1, 2, NULL)", ""),
    ("two", "a int, x int not null, id int not null, unique kb (id), unique ka (x)", "(1, 9, 1), (2, 8, 2)", ""),
    ("prefixed", "a int, id varchar(100) not null, primary key (id(10))", "(1, 'abc'), (2, 'abd')", ""),
    ("stored", "a int not null, id int AS (a * 2) STORED NOT NULL, unique (id)", "(1, DEFAULT), (2, DEFAULT)", "mysql"),
    ("hidden", "id int primary key, a int, h int INVISIBLE DEFAULT 9", "(1, 5), (2, NULL)", ""),
    ("generated", "id int primary key, a int, s int AS (a + 1) STORED", "(1, 5, DEFAULT), (2, NULL, DEFAULT)", ""),
    ("computed", "id int primary key, a int, v int AS (a * 2) VIRTUAL, w varchar(9) AS (concat(a, 'x')) VIRTUAL",
     "(1, 5, DEFAULT, DEFAULT), (2, NULL, DEFAULT, DEFAULT)", ""),
    ("func", "id int primary key, a int, key ((a + 1)), unique ((a + 2))", "(1, 5), (2, 6)", "mysql"),
    ("numbers", "id int primary key, a float(7,3) unsigned, b double(8,2), c decimal(10,2) unsigned zerofill, "
     "e int(5) zerofill, f bool, g numeric, h real, i nvarchar(3), j long varchar, k bit, l decimal(60,5) zerofill",
     "(1, 1.5, -2.25, 3.5, 7, true, 1, 2.5, 'é', 'x', b'1', 12.5), (2, 0, 0, 0, 0, false, -1, 0, '', '', 0, 0)", ""),
    ("enums", "id int primary key, c enum('a','b') character set binary, d set('x\\\\y','q''r','é'), "
     "e enum('a\\nb','c;d','/* no */','(x)'), f enum('b','','a'), g enum('')",
     "(1, 'b', 'x\\\\y,é', 'c;d', 'b', 1), (2, 'a', 'q''r', '/* no */', 2, 0), "
     "(3, 'a', '', 'a\\nb', 0, NULL), (4, 'nothing', 'é', '(x)', 'nothing', 'nothing')", ""),
    ("we`ird", "id int primary key, `a``b` int, `select` int, `ü€` int", "(1, 2, 3, 4)", ""),
    ("addresses", "id uuid primary key, i inet6, j inet4",
     "('123e4567-e89b-12d3-a456-426614174000', '::1', '1.2.3.4'), "
     "('01890a5d-ac96-774b-bcce-b302099a8057', '2001:db8::', NULL)", "mariadb"),
    ("hashed", "id int primary key, a text, b text, unique (a), unique (b)", "(1, 'x', 'y'), (2, NULL, '')", "mariadb"),
    ("wide", ", ".join(["id int primary key", *(f"c{i} tinyint" for i in range(300))]),
     f"({', '.join(['1'] * 301)}), ({', '.join(['2', *['NULL', '3'] * 150])})", ""),
]  # fmt: skip


def test_every_shape_has_the_schema_of_the_log(binlog_server: BinlogServer) -> None:
    """Keys, hidden and computed columns, names and words of types: the log's and the chunk's schema are one."""
    server = "mysql" if isinstance(binlog_server, MySqlServer) else "mariadb"
    shapes = [shape for shape in SHAPES if shape[3] in ("", server)]
    start = end_of(binlog_server)
    with contextlib.closing(binlog_server.connect()) as db, db.cursor() as cursor:
        cursor.execute("CREATE DATABASE shop")
        cursor.execute("SET sql_mode = ''")
        for name, columns, rows, _ in shapes:
            table = "shop.`" + name.replace("`", "``") + "`"
            cursor.execute(f"CREATE TABLE {table} ({columns})")
            cursor.execute(f"INSERT INTO {table} VALUES {rows}")
    with reading(binlog_server, start) as log:
        changes = {one.schema.table: one for one in log.read(2 * len(shapes)).decode().changes}
    assert len(changes) == len(shapes)
    with reader_of(binlog_server) as reader:
        facts = {one.name: one.key for one in reader.find_tables()}
        for name, *_ in shapes:
            chunk = reader.read_chunk(f"shop.{name}", None, 100)
            assert chunk is not None
            expected = changes[f"shop.{name}"]
            check_same(decoded(chunk), expected, "a" if name == "keys" else "id")
            assert chunk.key == expected.schema.key == facts[f"shop.{name}"] != ()


# -- reading on --
KEYS: list[tuple[str, list[Any]]] = [
    ("int", [-5, -1, 0, 1, 7, 100, 2000]),
    ("bigint unsigned", [0, 5, 18446744073709551615, 9223372036854775808]),
    ("varchar(20)", ["''", "'a'", "'B'", "'é'", "'z''\\\\'", "'日本'", "'aa'"]),
    ("varchar(20) character set latin1", ["'a'", "'é'", "'z'", "'%'"]),
    ("varbinary(9)", ["''", "x'00'", "x'00ff'", "x'61'"]),
    ("binary(3)", ["x'00'", "x'0001'", "x'616263'"]),
    ("decimal(20,5)", ["-1.5", "0", "0.00001", "99999.12345"]),
    ("float", ["-1.5", "0.1", "0.2", "1e20"]),
    ("double", ["-1.5", "0.1", "1e-300", "1e300"]),
    ("date", ["'0000-00-00'", "'2020-01-31'", "'2020-02-31'", "'2021-01-01'"]),
    ("datetime(3)", ["'0000-00-00'", "'2020-01-31 10:00:00.001'", "'2020-01-31 10:00:00.002'"]),
    ("timestamp(6)", ["'2020-01-31 10:00:00.000001'", "'2020-01-31 10:00:00.000002'", "'2030-01-01'"]),
    ("time(2)", ["'-838:59:59'", "'-00:00:00.01'", "'0'", "'00:00:00.5'", "'838:59:59'"]),
    ("year", ["0", "1901", "2155"]),
    ("bit(40)", ["0", "1", "b'1000000000000000000000000000000000000000'"]),
    ("enum('z','y','x','a')", ["'z'", "'y'", "'x'", "'a'", "0"]),
    ("enum('b','','a')", ["'b'", "2", "'a'", "0"]),
    ("enum('ü','it''s','a') character set latin1", ["1", "2", "3"]),
    ("enum('b','a') character set binary", ["1", "2"]),
    ("set('b','a','c')", ["''", "'b'", "'a,b'", "'c'"]),
    ("uuid", ["'123e4567-e89b-12d3-a456-426614174000'", "'01890a5d-ac96-774b-bcce-b302099a8057'", "UUID()"]),
    ("inet6", ["'::'", "'2001:db8::1'", "'::1.2.3.4'"]),
    ("inet4", ["'1.2.3.4'", "'255.0.0.1'", "'10.0.0.1'"]),
]  # fmt: skip
OF_MARIADB = ("uuid", "inet6", "inet4")


def read_all(reader: MySqlTableReader, table: str, limit: int, **settings: Any) -> list[Chunk]:
    """All chunks of a table."""
    found: list[Chunk] = []
    while not found or not found[-1].is_last:
        chunk = reader.read_chunk(table, json.loads(json.dumps(found[-1].last)) if found else None, limit, **settings)
        assert chunk is not None
        found.append(chunk)
    return found


def test_chunks_follow_each_other_by_keys_of_every_type(binlog_server: BinlogServer) -> None:
    """Every row comes once, in the order of the index, whatever the type of its key."""
    binlog_server.run("CREATE DATABASE shop")
    is_mysql = isinstance(binlog_server, MySqlServer)
    with reader_of(binlog_server) as reader:
        for number, (kind, values) in enumerate(KEYS):
            if is_mysql and kind in OF_MARIADB:
                continue
            rows = ", ".join(f"({value}, {n}, {i})" for i, value in enumerate(values) for n in range(3))
            binlog_server.run(
                "SET sql_mode = 'ALLOW_INVALID_DATES'", f"CREATE TABLE shop.a{number} (v int, k {kind} primary key)",
                f"INSERT INTO shop.a{number} VALUES {', '.join(f'({i}, {value})' for i, value in enumerate(values))}",
                f"CREATE TABLE shop.b{number} (k {kind}, n int, v int, primary key (k, n))",
                f"INSERT INTO shop.b{number} VALUES {rows}",
            )  # fmt: skip
            for table, key in ((f"shop.a{number}", "k"), (f"shop.b{number}", "k, n")):
                expected = [row[0] for row in binlog_server.run(f"SELECT v FROM {table} ORDER BY {key}")]
                chunks = read_all(reader, table, 2)
                found = [row for chunk in chunks for row in decoded(chunk).rows.column("v").to_pylist()]
                assert found == expected, (table, kind)
                assert [chunk.rows for chunk in chunks[:-1]] == [2] * (len(chunks) - 1)


def test_rows_behind_an_enum_are_the_same_without_the_index(binlog_server: BinlogServer) -> None:
    """An empty name beside the value that does not exist, which is shown as empty, too: the server compares words when
    it does not use the index."""
    binlog_server.run(
        "SET sql_mode = ''",
        "CREATE DATABASE shop",
        "CREATE TABLE shop.t (k enum('b','','a'), n int, primary key (k, n))",
        "INSERT INTO shop.t VALUES (0, 1), (0, 2), ('b', 1), ('b', 2), (2, 1), (2, 2), ('a', 1), ('a', 2)",
    )
    keys = binlog_server.run("SELECT k + 0, n FROM shop.t ORDER BY k, n")
    with reader_of(binlog_server) as reader:
        definition = read_definition(*reader._connected(), "shop.t")
    for number, (k, n) in enumerate(keys):
        behind = definition.behind([int(k), n])
        for index in ("FORCE", "IGNORE"):
            rows = f"SELECT k + 0, n FROM shop.t {index} INDEX (PRIMARY) WHERE {behind} ORDER BY k, n"
            assert binlog_server.run(rows) == keys[number + 1 :], (index, k, n)


def test_a_chunk_reads_no_more_rows_than_it_has(binlog_server: BinlogServer) -> None:
    """The server finds the place of a key by the index, also if it has several columns: it does not read the table."""
    numbers = "WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 999) SELECT"
    binlog_server.run(
        "CREATE DATABASE shop", "SET SESSION cte_max_recursion_depth = 10000" if isinstance(binlog_server, MySqlServer)
        else "SET SESSION max_recursive_iterations = 10000",
        "CREATE TABLE shop.t (a int, b enum('x','y','z'), c varchar(9), v int, primary key (a, b, c))",
        f"INSERT INTO shop.t {numbers} i DIV 300, 1 + i DIV 100 % 3, i, i FROM n", "ANALYZE TABLE shop.t",
    )  # fmt: skip
    with reader_of(binlog_server) as reader:
        chunk = reader.read_chunk("shop.t", None, 555)
        assert chunk is not None

        def count() -> int:
            rows = reader._rows.cursor()
            rows.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
            return sum(int(value) for name, value in rows.fetchall())

        before = count()
        chunk = reader.read_chunk("shop.t", chunk.last, 50)
        assert chunk is not None
        assert chunk.rows == 50
        assert count() - before < 200


def test_limits_and_large_rows(binlog_server: BinlogServer) -> None:
    """A chunk ends at its bytes; rows longer than a packet of the protocol come whole; a condition selects rows."""
    binlog_server.run(
        "CREATE DATABASE shop", "SET GLOBAL max_allowed_packet = 1073741824",
        "CREATE TABLE shop.t (id int primary key, v longblob)",
        "INSERT INTO shop.t VALUES (1, 'a'), (2, repeat('b', 16777210)), (3, 'c'), (4, repeat('d', 16777215 * 2 - 12)),"
        "(5, repeat('e', 40000000)), (6, 'f')",
    )  # fmt: skip
    expected = [1, 16777210, 1, 16777215 * 2 - 12, 40000000, 1]
    for max_bytes, several in ((1 << 30, False), (20_000_000, True), (1, True)):
        with reader_of(binlog_server, max_chunk_bytes=max_bytes) as reader:
            chunks = read_all(reader, "shop.t", 100)
            values = [value for chunk in chunks for value in decoded(chunk).rows.column("v").to_pylist()]
        assert [len(value) for value in values] == expected
        assert [value[:1] + value[-1:] for value in values] == [b"aa", b"bb", b"cc", b"dd", b"ee", b"ff"]
        assert (len(chunks) > 1) == several
    with reader_of(binlog_server) as reader:
        chunk = reader.read_chunk("shop.t", [1], 100, where="id < 4 -- not the large ones")
        assert chunk is not None
        assert decoded(chunk).rows.column("id").to_pylist() == [2, 3]
        with pytest.raises(ConfigError, match="condition"):
            reader.read_chunk("shop.t", None, 100, where="nothing = 3")
        empty = reader.read_chunk("shop.t", [6], 100)
        assert empty is not None
        assert (empty.rows, empty.is_last, empty.last) == (0, True, None)
        assert decoded(empty).rows.num_rows == 0


def test_tables_that_there_are(binlog_server: BinlogServer) -> None:
    """Tables of the server by pattern, without views; a table that is gone, has no key or changes while it is read."""
    binlog_server.run(
        "CREATE DATABASE shop", "CREATE DATABASE other", "CREATE TABLE other.t (a int primary key)",
        "CREATE TABLE shop.t (a int primary key)", "CREATE TABLE shop.nokey (a int)",
        "CREATE VIEW shop.v AS SELECT * FROM shop.t", "INSERT INTO shop.t VALUES (1), (2), (3)", "ANALYZE TABLE shop.t",
    )  # fmt: skip
    with reader_of(binlog_server) as reader:
        assert reader.find_tables() == [TableFacts("shop.nokey", (), 0), TableFacts("shop.t", ("a",), 3)]
        for table in ("shop.gone", "nowhere.t"):
            with pytest.raises(TableGoneError, match="does not exist"):
                reader.read_chunk(table, None, 10)
        with pytest.raises(SourceError, match="primary key"):
            reader.read_chunk("shop.nokey", None, 10)
        reader.prepare(["shop.t"])
        first = reader.read_chunk("shop.t", None, 2)
        assert first is not None
        binlog_server.run("ALTER TABLE shop.t ADD COLUMN b int DEFAULT 7, ALGORITHM = INSTANT")
        second = reader.read_chunk("shop.t", first.last, 2)
        assert second is not None
        assert decoded(second).rows.to_pylist() == [{"a": 3, "b": 7}]
        binlog_server.run("DROP TABLE shop.t")
        with pytest.raises(TableGoneError):
            reader.read_chunk("shop.t", None, 10)
    if not isinstance(binlog_server, MySqlServer):
        binlog_server.run("CREATE TABLE shop.past (a int primary key) WITH SYSTEM VERSIONING")
        with reader_of(binlog_server) as reader:
            assert TableFacts("shop.past", (), 0, can_be_read=False) in reader.find_tables()
            with pytest.raises(SourceError, match="system-versioned"):
                reader.read_chunk("shop.past", None, 10)


# -- what a snapshot sees --


class Held:
    """Commits that are in the log and in no engine yet: the server waits for a replica that never answers."""

    def __init__(self, server: BinlogServer) -> None:
        self._server = server
        self._is_mysql = isinstance(server, MySqlServer)
        self._prefix = "rpl_semi_sync_source" if self._is_mysql else "rpl_semi_sync_master"
        self._writer: threading.Thread | None = None

    def begin(self, statement: str) -> None:
        """Hold the commit of a statement."""
        if self._is_mysql and not self._server.run("SHOW GLOBAL VARIABLES LIKE 'rpl_semi_sync_source_enabled'"):
            self._server.run("INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'")
        wait = "wait_no_replica" if self._is_mysql else "wait_no_slave"
        self._server.run(
            f"SET GLOBAL {self._prefix}_timeout = 600000, GLOBAL {self._prefix}_wait_point = 'AFTER_SYNC', "
            f"GLOBAL {self._prefix}_{wait} = ON, GLOBAL {self._prefix}_enabled = ON"
        )
        self._writer = threading.Thread(target=self._server.run, args=(statement,), daemon=True)
        self._writer.start()

    def release(self) -> None:
        if self._writer is not None:
            self._server.run(f"SET GLOBAL {self._prefix}_enabled = OFF")
            self._writer.join(60)
            assert not self._writer.is_alive()


@contextlib.contextmanager
def held(server: BinlogServer, statement: str) -> Iterator[Held]:
    commit = Held(server)
    try:
        commit.begin(statement)
        yield commit
    finally:
        commit.release()


def ids(chunk: Chunk) -> list[int]:
    return sorted(decoded(chunk).rows.column("id").to_pylist())


def check_visibility(server: BinlogServer) -> None:
    """A commit that the log has, and the engine not yet, is neither in a chunk nor among those that it sees."""
    server.run("CREATE DATABASE shop", "CREATE TABLE shop.t (id int primary key)", "CREATE TABLE shop.o (id int)")
    start = end_of(server)
    has_gtids = start["gtid_set"] is not None
    server.run("INSERT INTO shop.t VALUES (1)", "INSERT INTO shop.o VALUES (1)")
    decoder = MySqlDecoder()
    with reading(server, start) as log, reader_of(server) as reader:
        with held(server, "INSERT INTO shop.t VALUES (2)") as commit:
            log.read(3)  # the log has it
            place = log.cuts[-1].position
            transactions = log.decode().transactions
            assert len(transactions) == 3
            assert server.run("SELECT * FROM shop.t") == [(1,)]
            assert reader.barrier(place)["gtid_set"] == place["gtid_set"]
            if has_gtids:
                early = reader.read_chunk("shop.t", None, 10)
                assert early is not None
                assert ids(early) == [1]
                assert decoder.sees(early.sees, transactions).tolist() == [True, True, False]
                assert decoder.sees(reader.find_seen(), transactions).tolist() == [True, True, False]
                assert log.stream.has_reached(early.high)
                assert reader.read_chunk("shop.t", None, 10, barrier=reader.barrier(place)) is None
                first = reader.barrier(log.cuts[0].position)
                assert reader.read_chunk("shop.t", None, 10, barrier=first) is not None
            else:
                assert reader.find_seen() is None
                with pytest.raises(SourceError, match="1205"):  # the lock waits for the commit
                    reader.read_chunk("shop.t", None, 10, barrier=reader.barrier(place))
            commit.release()
        assert not has_gtids or decoder.sees(reader.find_seen(), transactions).all()
        late = reader.read_chunk("shop.t", None, 10, barrier=reader.barrier(place))
        assert late is not None
        assert ids(late) == [1, 2]
        assert decoder.sees(late.sees, transactions).tolist() == [True, True, True]
        server.run("INSERT INTO shop.t VALUES (3)")
        log.read(4)
        assert decoder.sees(late.sees, log.decode().transactions).tolist() == [True, True, True, False]
        newest = reader.read_chunk("shop.t", None, 10)
        assert newest is not None
        assert decoder.sees(newest.sees, log.decode().transactions).all()
        server.run("INSERT INTO shop.t VALUES (4)")
        log.read(5)
        assert log.stream.has_reached(newest.high)
        end = reader.read_chunk("shop.t", None, 10)
        assert end is not None
        assert log.stream.has_reached(end.high)
        server.run("INSERT INTO shop.t VALUES (5)")
        behind = reader.read_chunk("shop.t", None, 10)
        assert behind is not None
        assert not log.stream.has_reached(behind.high)
        log.read(6)
        assert log.stream.has_reached(behind.high)
        assert behind.high == {**end_of(server), "created": 0}


def test_what_a_snapshot_sees(binlog_server: BinlogServer) -> None:
    """MySQL with GTIDs, and MariaDB."""
    check_visibility(binlog_server)


@pytest.mark.parametrize("binlog_server", ["mysql"], indirect=True)
def test_what_a_snapshot_sees_without_gtids(binlog_server: BinlogServer) -> None:
    """File and position, read under a lock that waits for commits that are under way, and for nothing else."""
    del binlog_server  # only for its mark
    with running_mysql("--gtid-mode=OFF", "--enforce-gtid-consistency=OFF") as server:
        check_visibility(server)
        with contextlib.closing(server.connect(autocommit=False)) as db, db.cursor() as cursor:
            cursor.execute("INSERT INTO shop.o VALUES (9)")  # another table: nobody waits
            chunk = chunk_of(server, "shop.t")
            assert chunk.sees["gtid_set"] is None
            assert ids(chunk) == [1, 2, 3, 4, 5]


def test_snapshots_while_others_write(binlog_server: BinlogServer) -> None:
    """While sessions write, a chunk has exactly the changes of transactions that it sees and of some between these and
    its high place, in the order of their commits."""
    server = binlog_server
    server.run("CREATE DATABASE shop", "CREATE TABLE shop.t (id int primary key auto_increment, n int)")
    start = end_of(server)
    stop = threading.Event()

    def write() -> None:
        with contextlib.closing(server.connect()) as db, db.cursor() as cursor:
            while not stop.is_set():
                cursor.execute("INSERT INTO shop.t (n) VALUES (1)")

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    try:
        with reader_of(server) as reader:
            taken = [reader.read_chunk("shop.t", None, 1_000_000) for _ in range(25)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    total = int(server.run("SELECT COUNT(*) FROM shop.t")[0][0])
    with reading(server, start) as log:
        everything = log.read(total).decode()
    (changes,) = everything.changes
    of_row = changes.rows.column("id").to_pylist()
    assert len(everything.transactions) == total == len(of_row)
    grown = []
    for chunk in taken:
        assert chunk is not None
        seen = MySqlDecoder().sees(chunk.sees, everything.transactions)
        surely = {of_row[i] for i in range(total) if seen[changes.transaction[i]]}
        found = set(ids(chunk))
        assert surely <= found
        extra = found - surely
        # What it has beyond that is what came next in the log.
        following = [of_row[i] for i in range(total) if not seen[changes.transaction[i]]][: len(extra)]
        assert set(following) == extra
        grown.append(len(found))
    assert grown == sorted(grown)
    assert grown[-1] > grown[0]


# -- damage --


def with_bytes(chunk: Chunk, name: str, data: bytes) -> Chunk:
    return replace(chunk, content=data) if name == "content" else replace(chunk, context=data)


def test_every_byte_of_a_chunk(binlog_server: BinlogServer) -> None:
    """Each byte changed, and each end: DamagedError."""
    binlog_server.run(
        "CREATE DATABASE shop", DAMAGED_TABLE, f"INSERT INTO shop.t VALUES {ROW.format(1)}, {ROW.format(2)}"
    )
    chunk = chunk_of(binlog_server, "shop.t")
    assert decoded(chunk).rows.num_rows == 2
    for name in ("content", "context"):
        data: Any = getattr(chunk, name)
        for place in range(len(data)):
            changed = bytearray(data)
            changed[place] ^= 1 << place % 8
            with pytest.raises(DamagedError):
                decoded(with_bytes(chunk, name, bytes(changed)))
            if not place % 7:
                with pytest.raises(DamagedError):
                    decoded(with_bytes(chunk, name, data[:place]))
    for other in (chunk.content + chunk.content, b""):
        with pytest.raises(DamagedError):
            decoded(replace(chunk, content=other))


def test_rows_that_pass_the_checksum(binlog_server: BinlogServer) -> None:
    """Bytes changed before the checksum was made: the decoder refuses them or reads something; it ends, and reads
    nothing outside of the chunk."""
    binlog_server.run(
        "CREATE DATABASE shop", DAMAGED_TABLE, f"INSERT INTO shop.t VALUES {ROW.format(1)}, {ROW.format(2)}"
    )
    chunk = chunk_of(binlog_server, "shop.t")
    table = chunks._read_context(chunk.context).table
    seeded = random.Random(14)
    refused = read = 0
    for _ in range(FLIPS):
        data = bytearray(chunk.content)
        for _ in range(seeded.choice((1, 1, 2, 5))):
            data[seeded.randrange(len(data))] = seeded.randrange(256)
        if seeded.random() < 0.2:
            del data[seeded.randrange(len(data)) :]
        content = bytes(data)
        try:
            rows = decoded(replace(chunk, context=chunks.pack_context(table, content, 2), content=content))
        except DamagedError:
            refused += 1
        else:
            read += 1
            rows.rows.validate(full=True)
    assert refused > FLIPS // 20
    assert read > FLIPS // 20

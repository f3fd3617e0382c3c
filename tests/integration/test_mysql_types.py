"""Every type of MySQL and MariaDB: what the log gives is what SELECT gives; and another reader of the log agrees."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import warnings
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from firnline.sources.cdc.log import Decoded
from firnline.sources.mysql import charsets
from tests.support.binlog import end_of, flat, log_of, only, reading
from tests.support.mysql import PASSWORD, BinlogServer, MySqlServer

STEP = 1 if os.environ.get("FIRNLINE_PROOF") else 7  # of pairs of bytes

pytestmark = [pytest.mark.mysql, pytest.mark.mariadb]


@dataclass(frozen=True)
class Kind:
    type: str
    values: tuple[str, ...]  # in SQL
    arrow: pa.DataType
    select: str = "v"  # what SELECT shows as the same value
    on: str = ""  # only on this server


INTEGERS = [
    ("tinyint", 8, pa.int8(), pa.int16()), ("smallint", 16, pa.int16(), pa.int32()),
    ("mediumint", 24, pa.int32(), pa.int32()), ("int", 32, pa.int32(), pa.int64()),
    ("bigint", 64, pa.int64(), pa.decimal128(20, 0)),
]  # fmt: skip
CHARACTER = "CAST(v AS CHAR)"
TEXTS = ("''", "'a'", "'hällo €'", "' two  '", "'\\'\"\\\\ \\n\\t'")
KINDS = [
    *[Kind(name, (f"{-(1 << bits - 1)}", "-1", "0", "1", f"{(1 << bits - 1) - 1}"), signed)
      for name, bits, signed, _ in INTEGERS],
    *[Kind(f"{name} unsigned", ("0", "1", f"{1 << bits - 1}", f"{(1 << bits) - 1}"), unsigned)
      for name, bits, _, unsigned in INTEGERS],
    Kind("float", ("0", "-0.0e0", "1.5", "-3.4028234e38", "1.17549435e-38", "0.1"), pa.float32(), "v + 0e0"),
    Kind("double", ("0", "1.5", "-1.7976931348623157e308", "5e-324", "0.1"), pa.float64()),
    Kind("decimal(10,2)", ("0", "-0.01", "12345678.90", "-99999999.99", "99999999.99"), pa.decimal128(10, 2)),
    Kind("decimal(38,10)", ("1.5", f"-{'9' * 28}.{'9' * 10}", f"{'9' * 28}.{'9' * 10}"), pa.decimal128(38, 10)),
    Kind("decimal(9,9)", ("0.123456789", "-0.999999999", "0"), pa.decimal128(9, 9)),
    Kind("decimal(18,0)", ("999999999999999999", "-1", "0"), pa.decimal128(18, 0)),
    Kind("decimal(65,30)", ("0", f"-{'9' * 35}.{'9' * 30}", "1.000000000000000000000000000001"), pa.string(),
         CHARACTER),
    Kind("bit(1)", ("b'0'", "b'1'"), pa.bool_(), "v + 0"),
    Kind("bit(13)", ("b'0'", "b'1000000000001'", "8191"), pa.int64(), "v + 0"),
    Kind("bit(64)", ("0", "18446744073709551615", "9223372036854775808"), pa.decimal128(20, 0), "v + 0"),
    Kind("char(10)", (*TEXTS[:3], "'x '"), pa.string()),
    Kind("char(255)", (*TEXTS[:3], "repeat('é', 255)"), pa.string()),
    Kind("varchar(20)", TEXTS, pa.string()),
    Kind("varchar(3000)", (*TEXTS, "repeat('ü', 3000)"), pa.string()),
    Kind("tinytext", TEXTS, pa.string()),
    Kind("text", (*TEXTS, "repeat('x', 60000)"), pa.string()),
    Kind("mediumtext", (*TEXTS, "repeat('x', 70000)"), pa.string()),
    Kind("longtext", (*TEXTS, "repeat('😀', 50000)"), pa.string()),
    Kind("binary(6)", ("x''", "x'01'", "x'010000'", "x'000000000000'", "x'ff00ff00ff00'"), pa.binary()),
    Kind("varbinary(300)", ("x''", "x'00'", "x'ff00'", "repeat(x'fe', 300)"), pa.binary()),
    Kind("tinyblob", ("x''", "x'00ff'"), pa.binary()),
    Kind("blob", ("x''", "x'00ff'", "repeat(x'80', 60000)"), pa.binary()),
    Kind("mediumblob", ("x''", "repeat(x'80', 70000)"), pa.binary()),
    Kind("longblob", ("x''", "repeat(x'80', 200000)"), pa.binary()),
    Kind("date", ("'1000-01-01'", "'9999-12-31'", "'1969-12-31'", "'2024-02-29'", "'0001-01-01'"), pa.date32(),
         CHARACTER),
    Kind("datetime", ("'1000-01-01 00:00:00'", "'9999-12-31 23:59:59'", "'1970-01-01 00:00:00'"), pa.timestamp("us"),
         CHARACTER),
    Kind("timestamp null", ("'1970-01-01 00:00:01'", "'2038-01-19 03:14:07'"), pa.timestamp("us", "UTC"), CHARACTER),
    *[Kind(f"datetime({n})", ("'2020-01-02 03:04:05.678901'", "'1815-06-18 11:35:00.9'"), pa.timestamp("us"), CHARACTER)
      for n in range(1, 7)],
    *[Kind(f"timestamp({n}) null", ("'2020-01-02 03:04:05.678901'", "'1970-01-01 00:00:01.5'"),
           pa.timestamp("us", "UTC"), CHARACTER) for n in range(1, 7)],
    *[Kind(f"time({n})", ("'-838:59:59'", "'838:59:59'", "'00:00:00'", "'-00:00:00.1'", "'-12:34:56.789012'",
                          "'12:34:56.789012'", "'-01:00:00.000001'"), pa.string(), CHARACTER) for n in range(7)],
    Kind("year", ("1901", "2155", "0", "2024"), pa.int16()),
    Kind("enum('x','é','it''s')", ("'x'", "'é'", "'it''s'"), pa.string()),
    Kind(f"enum({','.join(repr(f'v{i}') for i in range(300))})", ("'v0'", "'v255'", "'v256'", "'v299'"), pa.string()),
    Kind("set('a','b','ü')", ("''", "'a'", "'a,ü'", "'a,b,ü'"), pa.string()),
    Kind(f"set({','.join(repr(f's{i}') for i in range(64))})", ("'s0'", "'s63'", "'s0,s31,s63'"), pa.string()),
    Kind("geometry", ("ST_GeomFromText('POINT(1 2)')", "ST_GeomFromText('LINESTRING(0 0,1 1,2 2)')"), pa.binary()),
    Kind("point", ("ST_GeomFromText('POINT(-1.5 2)', 4326)",), pa.binary()),
    Kind("vector(3)", ("TO_VECTOR('[1,2,3]')", "TO_VECTOR('[-1.5,0,3e38]')"), pa.binary(), "UNHEX(HEX(v))", on="mysql"),
    Kind("json", tuple(f"'{text}'" for text in (
        "null", "true", "false", "0", "-1", "32767", "32768", "-32769", "2147483648", "-9223372036854775808",
        "18446744073709551615", "1.5", "-0.1", "1e15", "1e-16", "1.25e300", '""', '"hällo €"', "[]", "{}",
        '[1, "a", null, true, [2.5, {"k": []}]]', '{"b": 1, "a": {"c": [1, 2]}, "": 0}',
        '"\\\\"\\\\\\\\\\\\/\\\\b\\\\f\\\\n\\\\r\\\\t\\\\u0001\\\\u001f"',
        '{"long": "' + "x" * 70000 + '"}', "[" + ",".join(["123456"] * 20000) + "]",
    )), pa.string(), CHARACTER),
    Kind("json ", (
        "JSON_ARRAY(CAST('2020-01-02' AS DATE), "
        "CAST('2020-01-02 03:04:05.678' AS DATETIME(6)), CAST('-12:34:56.5' AS TIME(6)))",
        "JSON_OBJECT('d', CAST(-123.4500 AS DECIMAL(20,4)), 'z', CAST(0 AS DECIMAL(10,2)), "
        "'big', CAST(12345678901234567890.5 AS DECIMAL(30,3)))",
        "JSON_ARRAY(b'101', x'00ff', CAST('abc' AS BINARY))", "CAST(CAST(7 AS YEAR) AS JSON)",
    ), pa.string(), CHARACTER, on="mysql"),
    Kind("varchar(50) compressed", ("''", "'abc'", "repeat('x', 50)"), pa.string(), on="mariadb"),
    Kind("text compressed", ("''", "'abc'", "repeat('hällo', 5000)"), pa.string(), on="mariadb"),
    Kind("blob compressed", ("x''", "repeat(x'00', 9000)"), pa.binary(), on="mariadb"),
    Kind("uuid", ("'123e4567-e89b-12d3-a456-426614174000'",), pa.binary(), "UNHEX(REPLACE(v, '-', ''))", on="mariadb"),
    Kind("inet6", ("'2001:db8::1'", "'::'"), pa.binary(), "INET6_ATON(v)", on="mariadb"),
    *[Kind(f"varchar(40) character set {name}", ("''", "'plain'", "'q~'"), pa.string())
      for name in ("ascii", "latin1", "latin2", "latin5", "latin7", "cp850", "cp852", "cp866", "cp1250", "cp1251",
                   "cp1256", "cp1257", "koi8r", "koi8u", "greek", "hebrew", "tis620", "macce", "macroman", "keybcs2",
                   "armscii8", "geostd8", "dec8", "hp8", "swe7")],
    Kind("varchar(40) character set latin1", ("'é€'", "'Ÿ'"), pa.string()),
    Kind("varchar(40) character set cp1251", ("'Привет'",), pa.string()),
    Kind("varchar(40) character set utf8mb3", ("'hällo €'", "'日本'"), pa.string()),
    Kind("varchar(40) character set ucs2", ("''", "'abc'", "'hällo €'"), pa.string()),
    Kind("varchar(40) character set utf16", ("''", "'abc'", "'😀é'"), pa.string()),
    Kind("varchar(40) character set utf16le", ("''", "'abc'", "'😀é'"), pa.string()),
    Kind("char(40) character set utf32", ("''", "'abc'", "'😀é'"), pa.string()),
    *[Kind(f"varchar(40) character set {name}", ("''", "'abc'", "'日本'"), pa.string())
      for name in ("sjis", "cp932", "ujis", "eucjpms", "big5", "gbk", "gb2312")],
    Kind("varchar(40) character set euckr", ("'한국'",), pa.string()),
    Kind("varchar(40) character set gb18030", ("'日本😀'",), pa.string(), on="mysql"),
    Kind("enum('ä','b') character set utf16", ("'ä'",), pa.string()),
    Kind("set('ä','ю') character set utf8mb3", ("'ä,ю'",), pa.string()),
]  # fmt: skip


def kinds_of(server: BinlogServer) -> list[Kind]:
    name = "mysql" if isinstance(server, MySqlServer) else "mariadb"
    return [kind for kind in KINDS if kind.on in ("", name)]


@dataclass(frozen=True)
class Filled:
    """A table per type, with its values and null: what the log says, and what SELECT says."""

    start: Any
    kinds: list[Kind]
    decoded: Decoded
    selected: list[list[Any]]
    others: dict[str, list[Any]]  # what mysql-replication reads


_filled: dict[type, Filled] = {}


@pytest.fixture
def filled(binlog_server: BinlogServer) -> Filled:
    """Filled once for all tests of this module that look at it."""
    found = _filled.get(type(binlog_server))
    if found is None:
        found = _filled[type(binlog_server)] = fill(binlog_server)
    return found


def fill(server: BinlogServer) -> Filled:
    start = end_of(server)
    kinds = kinds_of(server)
    selected = []
    with contextlib.closing(server.connect()) as db, db.cursor() as cursor:
        cursor.execute("CREATE DATABASE shop")
        cursor.execute("SET time_zone = '+00:00', sql_mode = ''")
        for number, kind in enumerate(kinds):
            cursor.execute(f"CREATE TABLE shop.t{number} (id int primary key, v {kind.type}, w int unsigned)")
            rows = ", ".join(f"({i}, {value}, {i})" for i, value in enumerate((*kind.values, "NULL")))
            cursor.execute(f"INSERT INTO shop.t{number} VALUES {rows}")
            cursor.execute(f"SELECT {kind.select} FROM shop.t{number} ORDER BY id")
            selected.append([row[0] for row in cursor.fetchall()])
    with reading(server, start) as log:
        decoded = log.read(2 * len(kinds)).decode()
    others = read_otherwise(server, start) if isinstance(server, MySqlServer) else {}
    return Filled(start, kinds, decoded, selected, others)


def read_otherwise(server: BinlogServer, start: Any) -> dict[str, list[Any]]:
    from pymysqlreplication import BinLogStreamReader
    from pymysqlreplication.row_event import WriteRowsEvent

    other = BinLogStreamReader(
        connection_settings={"host": "127.0.0.1", "port": server.port, "user": "firnline", "password": PASSWORD},
        server_id=4712, log_file=start["file"], log_pos=start["pos"], resume_stream=True, blocking=False,
        only_events=[WriteRowsEvent], only_schemas=["shop"],
        ignored_tables=[f"t{number}" for number, kind in enumerate(kinds_of(server)) if not is_compared(kind)],
    )  # fmt: skip
    found: dict[str, list[Any]] = {}
    left = sum(len(kind.values) + 1 for kind in kinds_of(server) if is_compared(kind))
    logging.getLogger("pymysqlreplication").setLevel(logging.ERROR)
    with contextlib.closing(other), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what it asks of PyMySQL
        for event in other:
            rows = [row["values"]["v"] for row in event.rows]
            found.setdefault(f"shop.{event.table}", []).extend(rows)
            left -= len(rows)
            if not left:  # at the end it would begin again
                break
    return found


def shown(value: Any, kind: Kind) -> Any:
    """A value as SELECT shows it."""
    if kind.select == CHARACTER and isinstance(value, datetime.datetime):
        digits = int(kind.type.split("(")[1][0]) if "(" in kind.type else 0
        text = value.replace(tzinfo=None).isoformat(" ", "microseconds")
        return text[:19] + (text[19 : 20 + digits] if digits else "")
    return str(value) if kind.select == CHARACTER and value is not None else value


def test_the_log_gives_what_select_gives(filled: Filled) -> None:
    """Each value of each type, null included, is the selected one, and has the type that the documentation says."""
    tables = {changes.schema.table: changes for changes in filled.decoded.changes}
    for number, (kind, expected) in enumerate(zip(filled.kinds, filled.selected, strict=True)):
        changes = tables[f"shop.t{number}"]
        assert changes.rows.schema.field("v").type == kind.arrow, kind.type
        assert changes.schema.columns[1].type == kind.arrow
        found = [shown(value, kind) for value in changes.rows.column("v").to_pylist()]
        assert len(expected) == len(kind.values) + 1
        assert found == expected, kind.type
        assert changes.rows.column("w").to_pylist() == list(range(len(expected)))
        changes.rows.validate(full=True)
    assert list(filled.decoded.warnings) == [
        f"shop.t{number}.v: {kind.type} is read as text"
        for number, kind in enumerate(filled.kinds)
        if "65," in kind.type
    ]


def test_the_name_of_a_type_is_the_servers(filled: Filled) -> None:
    """`native` is the server's own name of the type, as far as the log tells it."""
    native = {changes.schema.table: changes.schema.columns[1].native for changes in filled.decoded.changes}
    named = ("int", "bigint", "decimal", "float", "double", "bit", "datetime", "binary", "enum", "year", "date", "time")
    for number, kind in enumerate(filled.kinds):
        if kind.type.startswith("varchar") and "character set" in kind.type:
            assert native[f"shop.t{number}"] == kind.type
        elif kind.type.split("(")[0].split()[0] in named and "character set" not in kind.type:
            assert native[f"shop.t{number}"] == kind.type.replace("time(0)", "time")


def test_dates_that_are_none_are_null_with_a_warning(binlog_server: BinlogServer) -> None:
    """Zero dates, and days that do not exist, are null; the warning names their column."""

    def work() -> None:
        binlog_server.run(
            "CREATE DATABASE shop", "SET sql_mode = 'ALLOW_INVALID_DATES'",
            "CREATE TABLE shop.t (id int primary key, d date, dt datetime(3), ts timestamp NULL)",
            "INSERT INTO shop.t VALUES (1, '0000-00-00', '0000-00-00', '0000-00-00'),"
            "(2, '2020-02-31', '2020-00-01 10:11:12.345', NULL),"
            "(3, '2020-01-01', '2020-01-01', '2020-01-01 12:00:00')",
        )  # fmt: skip

    decoded = log_of(binlog_server, work, 2)
    rows = only(decoded).rows.to_pylist()
    assert [[row["d"], row["dt"], row["ts"]] for row in rows[:2]] == [[None, None, None], [None, None, None]]
    assert rows[2]["d"] == datetime.date(2020, 1, 1)
    assert only(decoded).missing == [None] * 4
    assert sorted(decoded.warnings) == [
        f"shop.t.{name}: zero and invalid dates, and those before year 1, are read as null"
        for name in ("d", "dt", "ts")
    ]
    shown = binlog_server.run("SELECT CAST(d AS CHAR), CAST(dt AS CHAR), CAST(ts AS CHAR) FROM shop.t ORDER BY id")
    assert only(decoded).odd == {
        "d": {0: shown[0][0], 1: shown[1][0]}, "dt": {0: shown[0][1], 1: shown[1][1]}, "ts": {0: shown[0][2]},
    }  # fmt: skip
    assert shown[1][1] == "2020-00-01 10:11:12.345"


def test_generated_and_invisible_columns(binlog_server: BinlogServer) -> None:
    """Columns that the server computes, and hides, are in the log like others."""

    def work() -> None:
        binlog_server.run(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.t (id int primary key, a int, s int AS (a + 1) STORED, v int AS (a * 2) VIRTUAL, "
            "h int INVISIBLE DEFAULT 9)",
            "INSERT INTO shop.t (id, a) VALUES (1, 5)", "UPDATE shop.t SET a = 6",
        )  # fmt: skip

    rows = only(log_of(binlog_server, work, 3)).rows.to_pylist()
    assert [(row["a"], row["s"], row["h"]) for row in rows] == [(5, 6, 9), (6, 7, 9)]
    if isinstance(binlog_server, MySqlServer):
        assert [row["v"] for row in rows] == [10, 12]


def test_all_characters_of_all_sets(binlog_server: BinlogServer) -> None:
    """Each byte of each set with one byte per character, and pairs of bytes of the others, are what the server makes
    of them. (The servers have no character for seven of big5's that have one in Unicode.)"""
    is_mysql = isinstance(binlog_server, MySqlServer)
    with contextlib.closing(binlog_server.connect()) as db, db.cursor() as cursor:
        cursor.execute("SELECT character_set_name, maxlen FROM information_schema.character_sets")
        sets = {str(name): int(width) for name, width in cursor.fetchall()}
        for name in sorted(sets):
            if name == "binary" or name.startswith(("utf", "ucs")):
                continue
            singles = [bytes([byte]) for byte in range(256 if sets[name] == 1 else 128)]
            pairs = (
                [bytes([a, b]) for a in range(0x81, 0xFF) for b in range(0x40, 0xFF, STEP)] if sets[name] > 1 else []
            )
            checked = 0
            for start in range(0, len(singles + pairs), 4000):
                part = (singles + pairs)[start : start + 4000]
                # A text of the set whose bytes are these: null, or shorter, if they are none.
                words = " UNION ALL ".join(f"SELECT x'{raw.hex()}' r" for raw in part)
                cursor.execute(
                    f"SELECT r, CAST(CONVERT(r USING {name}) AS BINARY), "
                    f"CONVERT(CONVERT(r USING {name}) USING utf8mb4) FROM ({words}) x"
                )
                for raw, same, text in cursor.fetchall():
                    if same != raw or (text is not None and "\ufffd" in text and name == "big5") or not text:
                        continue
                    if "?" in text and sets[name] > 1 and raw != b"?":
                        continue  # no character
                    assert charsets.decode(raw, name) == text, (name, raw)
                    checked += 1
            assert checked >= 128, name
        table = "collations" if is_mysql else "collation_character_set_applicability"
        cursor.execute(f"SELECT id, character_set_name FROM information_schema.{table} WHERE id IS NOT NULL")
        for number, name in cursor.fetchall():
            assert (charsets.name_of(int(number)) or "binary") == name


@pytest.mark.parametrize("binlog_server", ["mysql"], indirect=True)
def test_another_reader_agrees(filled: Filled) -> None:
    """mysql-replication, which reads the same log in its own way, finds the same values. (MariaDB's it reads twice.)"""
    ours = {changes.schema.table: changes.rows.column("v").to_pylist() for changes in filled.decoded.changes}
    compared = 0
    for number, kind in enumerate(filled.kinds):
        if is_compared(kind):
            table = f"shop.t{number}"
            found = [same_form(value, kind.type.split("(")[0].split()[0]) for value in ours[table]]
            assert found == filled.others[table], kind.type
            compared += len(found)
    assert compared > 150


COMPARED = (
    "tinyint", "smallint", "mediumint", "int", "bigint", "double", "char", "varchar", "tinytext", "mediumtext",
    "longtext", "text", "tinyblob", "blob", "mediumblob", "longblob", "varbinary", "datetime", "date", "timestamp",
    "time", "enum", "set", "decimal",
)  # fmt: skip


def is_compared(kind: Kind) -> bool:
    """Whether the other reader can read a type. (It reads the fraction of a negative TIME as a positive one, and the
    year 0 as 1900.)"""
    words = kind.type.split("(")[0].split()[0]
    others = ("character set", "compressed", "65,30", *(f" time({digits})" for digits in range(1, 7)))
    return words in COMPARED and not any(other in f" {kind.type}" for other in others)


def same_form(value: Any, base: str) -> Any:
    if value is None:
        return None
    if base == "time":
        sign = -1 if value.startswith("-") else 1
        hours, minutes, seconds = value.lstrip("-").split(":")
        size = datetime.timedelta(
            hours=int(hours), minutes=int(minutes), microseconds=int(Decimal(seconds) * 1_000_000)
        )
        return sign * size
    if base == "timestamp":
        return value.replace(tzinfo=None)
    if base == "set":
        return set(value.split(",")) if value else None
    if value == b"":
        return ""
    return value


def test_json_is_the_same_for_another_reader(mysql: MySqlServer) -> None:
    """The text of binary JSON, read by a JSON parser, is what was inserted."""
    texts = [value[1:-1].replace("\\\\", "\\") for kind in KINDS if kind.type == "json" for value in kind.values]

    def work() -> None:
        mysql.run("CREATE DATABASE shop", "CREATE TABLE shop.t (id int primary key, v json)")
        with contextlib.closing(mysql.connect()) as db, db.cursor() as cursor:
            cursor.executemany("INSERT INTO shop.t VALUES (%s, %s)", list(enumerate(texts)))

    found = [row["v"] for _, _, row in flat(log_of(mysql, work, 2))]
    assert [json.loads(text) for text in found] == [json.loads(text) for text in texts]

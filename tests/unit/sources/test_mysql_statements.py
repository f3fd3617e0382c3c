"""Statements of the binary log: their tokens, what they do to which table, and how a QUERY event holds them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import DamagedError
from firnline.sources.mysql import events as ev
from firnline.sources.mysql.statements import Kind, classify
from firnline.sources.mysql.tokens import ANSI_QUOTES, MSSQL, NO_BACKSLASH_ESCAPES, Token, split

PIECES = ["'", '"', "`", "\\", "/*", "/*!", "/*M!50100 ", "*/", "*", "#", "--", "-- ", "\n", ";", "(", ")", ",", ".",
          "[", "]", " ", "a", "ü", "\0", "ALTER TABLE ", "SET STATEMENT ", "FOR ", "RENAME ", "TRUNCATE ", "DROP ",
          "PARTITION ", "CONVERT ", "WITH TABLE ", "ENGINE=", "ADD ", "CREATE ", "DEFINER="]  # fmt: skip
MODES = st.sampled_from([0, ANSI_QUOTES, NO_BACKSLASH_ESCAPES, ANSI_QUOTES | MSSQL | NO_BACKSLASH_ESCAPES])


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40).map("".join), MODES)
def test_any_text_has_tokens_and_a_kind(text: str, sql_mode: int) -> None:
    tokens = list(split(text, sql_mode))
    assert len(tokens) <= len(text)
    assert classify(text, "db", sql_mode=sql_mode, folds_names=True).kind in Kind


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6))
def test_names_in_quotes_come_back(names: list[str]) -> None:
    for quote, sql_mode in (("`", 0), ('"', ANSI_QUOTES)):
        text = " /* x */ ".join(quote + name.replace(quote, quote * 2) + quote for name in names)
        assert [token.name for token in split(text, sql_mode)] == names


@pytest.mark.parametrize("piece", ["'", "`", '"', "/*", "/*!", "\\", "'\\", "''", "(", "[", "-- "])
def test_long_texts_take_linear_time(piece: str) -> None:
    """A pattern that goes back over what it read would not end."""
    for start in ("ALTER TABLE t ", "'", "SET STATEMENT a = "):
        assert classify(start + piece * 50_000, "db").kind in Kind


@pytest.mark.parametrize(
    ("statement", "sql_mode", "tokens"),
    [
        ("a -- b\nc#d\n--e", 0, ["A", "C", "-", "-", "E"]),
        ("a/*b*/c /*!40000 d /* e */ f */ /*M! g */", 0, ["A", "C", "D", "F", "G"]),
        ("2*/*x*/3", 0, ["2", "*", "3"]),
        ("'it''s # \\' -- ' x", 0, ["", "X"]),
        ("'\\' x", NO_BACKSLASH_ESCAPES, ["", "X"]),
        ("\"a\\\" b\" c", 0, ["", "C"]),
    ],
)  # fmt: skip
def test_tokens(statement: str, sql_mode: int, tokens: list[str]) -> None:
    assert [token.word for token in split(statement, sql_mode)] == tokens


def test_quotes_by_mode() -> None:
    assert list(split('"a""b"')) == [Token()]
    assert list(split('"a""b"', ANSI_QUOTES)) == [Token(name='a"b')]
    assert list(split("[a]", MSSQL)) == [Token(name="a")]


EMPTIED = [
    "TRUNCATE t", "TRUNCATE TABLE t NOWAIT", "truncate db.t wait 5", "TRUNCATE TABLE `t` DROP STORAGE;",
    "SET STATEMENT lock_wait_timeout = 10, sort_buffer_size = (1) FOR TRUNCATE TABLE t",
    "/* a # b */ TRUNCATE /*! TABLE */ `db` . t -- why",
]  # fmt: skip


@pytest.mark.parametrize("statement", EMPTIED)
def test_a_table_is_emptied(statement: str) -> None:
    found = classify(statement, "db")
    assert (found.kind, found.tables) == (Kind.TRUNCATE, ("db.t",))


@pytest.mark.parametrize(
    ("statement", "effects"),
    [
        ("ALTER TABLE p EXCHANGE PARTITION p0 WITH TABLE x.t WITHOUT VALIDATION", {"db.p": "empty", "x.t": "empty"}),
        ("ALTER TABLE t CONVERT PARTITION p0 TO TABLE cold", {"db.t": "empty", "db.cold": "replace"}),
        ("ALTER TABLE t CONVERT TABLE cold TO PARTITION p0 VALUES IN (9)", {"db.t": "read", "db.cold": "replace"}),
        ("ALTER TABLE t LOCK=NONE, DROP PARTITION p0, p1", {"db.t": "empty"}),
        ("ALTER TABLE t REORGANIZE PARTITION p0, p1 INTO (PARTITION p VALUES LESS THAN (5))", {}),
        ("ALTER TABLE t DISCARD TABLESPACE", {"db.t": "empty"}),
        ("ALTER TABLE t DROP COLUMN note, ADD COLUMN note text", {"db.t": "read"}),
        ("ALTER TABLE t DROP note", {"db.t": "read"}),
        ("ALTER TABLE t DROP PRIMARY KEY, ADD PRIMARY KEY (a, b), DROP INDEX i", {}),
        ("ALTER TABLE t ADD c text COMMENT 'grade #1' DEFAULT 'B'", {"db.t": "read"}),
        ("ALTER TABLE t ADD c text COMMENT 'it''s DEFAULT \\' 5'", {}),
        ("ALTER TABLE t ADD c timestamp", {"db.t": "read"}),
        ("ALTER TABLE t ADD c timestamp NULL", {}),
        ("ALTER TABLE t ADD COLUMN IF NOT EXISTS c int AFTER b, ADD UNIQUE u (c)", {}),
        ("SET STATEMENT lock_wait_timeout = 9 FOR ALTER TABLE t ADD c int DEFAULT 1", {"db.t": "read"}),
        ("ALTER TABLE t NOWAIT ADD c int NOT NULL", {"db.t": "read"}),
        ("ALTER ONLINE TABLE IF EXISTS t WAIT 3 ENGINE=InnoDB ROW_FORMAT=DYNAMIC, COMMENT='x', FORCE", {}),
        ("ALTER TABLE t DEFAULT CHARACTER SET = utf8mb4 COLLATE utf8mb4_bin PARTITION BY HASH (id)", {}),
        ("ALTER TABLE t ENGINE = BLACKHOLE", {"db.t": "empty"}),
        ("ALTER TABLE t ALTER COLUMN a SET DEFAULT 5, ALTER INDEX i INVISIBLE", {}),
        ("ALTER TABLE t FROBNICATE 5", {"db.t": "read"}),
        ("ALTER TABLE t MODIFY a int, RENAME TO u", {"db.t": "replace", "db.u": "replace"}),
        ("ALTER TABLE `ren#ame` RENAME `to`", {"db.ren#ame": "replace", "db.to": "replace"}),
        ("RENAME TABLE fresh NOWAIT TO t, x.a WAIT 5 TO x.b",
         {"db.fresh": "replace", "db.t": "replace", "x.a": "replace", "x.b": "replace"}),
        ("DROP TABLE a, `b#` WAIT 5 CASCADE", {"db.a": "replace", "db.b#": "replace"}),
        ("DROP SCHEMA `d`", {"d.*": "replace"}),
        ("REPAIR LOCAL TABLE t", {"db.t": "empty"}),
        ("CREATE TABLE t LIKE u", {}),
    ],
)  # fmt: skip
def test_effects_by_table(statement: str, effects: dict[str, str]) -> None:
    found = classify(statement, "db")
    assert found.kind is Kind.DDL
    assert {table: effect.again for table, effect in found.effects} == effects
    assert set(effects) - {"d.*"} <= set(found.tables)


def test_quotes_and_letters_by_settings() -> None:
    statement = 'ALTER TABLE "fresh" RENAME TO "orders"'
    assert classify(statement, "db", sql_mode=ANSI_QUOTES).tables == ("db.fresh", "db.orders")
    assert classify(statement, "db").kind is Kind.ROWS  # no server takes a text for a name
    assert classify("TRUNCATE Shop.ORDERS", "db", folds_names=True).tables == ("shop.orders",)
    assert classify("TRUNCATE ORDERS", "Shop", folds_names=True).tables == ("shop.orders",)
    assert classify("TRUNCATE Shop.ORDERS", "db").tables == ("Shop.ORDERS",)


@pytest.mark.parametrize(
    "statement",
    [
        "SET STATEMENT max_statement_time = 1 FOR INSERT INTO t VALUES (1)", "ANALYZE UPDATE t SET a = 1",
        "ANALYZE FORMAT=JSON DELETE FROM t", "TRUNCATE t x", "RENAME TABLE a b", "ALTER TABLE 'a' FORCE",
        "BEGIN NOT ATOMIC INSERT INTO t VALUES (1); END", "BINLOG 'x'", "CREATE TABLE t TABLE u", "CREATE FROB x",
        "CREATE TABLE t AS VALUES ROW(1)", "LOAD DATA INFILE 'x' INTO TABLE t", "SET STATEMENT a = 1",
    ],
)  # fmt: skip
def test_what_changes_rows_or_is_unknown(statement: str) -> None:
    assert classify(statement, "db").kind is Kind.ROWS


@pytest.mark.parametrize(
    "statement",
    [
        "ANALYZE TABLE t PERSISTENT FOR ALL", "OPTIMIZE NO_WRITE_TO_BINLOG TABLE t", "SET PASSWORD FOR x = 'y'",
        "CREATE DEFINER=`a`@`%` PROCEDURE p() BEGIN DELETE FROM t; END", "ALTER TABLESPACE s RENAME TO u",
        "CREATE OR REPLACE ALGORITHM=MERGE DEFINER='a'@'b' SQL SECURITY INVOKER VIEW v AS SELECT 1",
        "CREATE DEFINER=CURRENT_USER() TRIGGER g BEFORE INSERT ON t FOR EACH ROW SET @a = 1", "CREATE SCHEMA d",
        "CREATE TEMPORARY TABLE t AS SELECT 1", "DROP TEMPORARY TABLE IF EXISTS t", "CREATE UNIQUE INDEX i ON t (a)",
        "RENAME USER a TO b", "FLUSH TABLES", "CREATE SPATIAL REFERENCE SYSTEM 5 NAME 'x'", "LOAD INDEX INTO CACHE t",
    ],
)  # fmt: skip
def test_what_leaves_rows_alone(statement: str) -> None:
    assert classify(statement, "db").kind is Kind.SILENT


def test_rows_of_the_servers_own_tables() -> None:
    """The table counts, not the database in use."""
    for statement, database, kind in (
        ("INSERT INTO time_zone VALUES (1, 1.5)", "mysql", Kind.SILENT),
        ("DELETE FROM `mysql`.user WHERE a = 1", "shop", Kind.SILENT),
        ("INSERT INTO shop.orders VALUES (1)", "mysql", Kind.ROWS),
        ("UPDATE user, shop.orders SET a = 1", "mysql", Kind.ROWS),
        ("INSERT IGNORE INTO user SELECT shop.f()", "mysql", Kind.ROWS),
        ("INSERT INTO", "mysql", Kind.ROWS),
    ):
        assert classify(statement, database).kind is kind


def query_body(text: bytes, variables: bytes) -> memoryview:
    return memoryview(struct.pack("<IIBHH", 1, 0, 4, 0, len(variables)) + variables + b"shop\0" + text)


def test_the_clients_character_set_and_mode() -> None:
    flags, mode = b"\0" + bytes(4), b"\1" + struct.pack("<Q", ANSI_QUOTES | 1 << 40)
    catalog, charset = b"\6\3std", b"\4" + struct.pack("<HHH", 8, 8, 8)
    body = query_body("TRUNCATE `bücher`".encode("latin-1"), flags + mode + catalog + b"\3" + bytes(4) + charset)
    assert ev.read_query(body) == ev.QueryEvent("shop", "TRUNCATE `bücher`", ANSI_QUOTES | 1 << 40)
    folded = ev.fold_names(ev.Header(0, ev.QUERY, 1, 0, 0, 0), body)
    inside = memoryview(folded)[ev.HEADER_SIZE : -ev.CHECKSUM_SIZE]
    assert ev.read_query(inside) == ev.QueryEvent("shop", "TRUNCATE `bücher`", ANSI_QUOTES | 1 << 40, True)
    assert ev.read_query(query_body("ü".encode(), b"\xc8x")).statement == "ü"
    for text in ("CREATE TABLE `ü` (a int)".encode(), "CREATE TABLE `ü` (a int)".encode("latin-1")):
        assert ev.read_query(query_body(text, charset)).statement == "CREATE TABLE `ü` (a int)"
    unknown = b"\4" + struct.pack("<HHH", 9999, 8, 8)
    assert ev.read_query(query_body(b"BEGIN", unknown)).statement == "BEGIN"
    with pytest.raises(DamagedError, match="collation 9999"):
        ev.read_query(query_body(b"\xfc", unknown))

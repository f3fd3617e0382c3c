"""The decoder of PostgreSQL's log: every type as the server has it, the same as another decoder, and no damaged byte
ends the process."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firnline.errors import DamagedError
from firnline.sources.cdc.log import Op, pack_frame
from firnline.sources.postgres.decode import PostgresDecoder
from firnline.sources.postgres.server import PLAIN_TEXT
from tests.support.binlog import flat
from tests.support.pgoutput import MISSING, read_changes

LONG = bool(os.environ.get("FIRNLINE_PROOF"))
SLOT = "other"

_words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
_days = st.dates(date(1, 1, 1), date(9999, 12, 31))
_moments = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31))
_ints = st.integers(-(2**31), 2**31 - 1)
# Type of PostgreSQL -> values that go in; what comes out is what a SELECT gives.
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "smallint": st.integers(-(2**15), 2**15 - 1), "integer": _ints, "bigint": st.integers(-(2**63), 2**63 - 1),
    "oid": st.integers(0, 2**32 - 1), "boolean": st.booleans(), "bytea": st.binary(max_size=40),
    "real": st.floats(width=32, allow_nan=False), "double precision": st.floats(allow_nan=False),
    "numeric(38,10)": st.decimals(-(10**27), 10**27, places=10),
    "numeric(5,5)": st.decimals("-0.99999", "0.99999", places=5),
    "date": _days, "time": st.times(), "timestamp": _moments,
    "timestamptz": st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),
    "text": _words, "varchar(40)": _words, "char(31)": _words,
}  # fmt: skip
# Types that are read as text: what comes out is the text that PostgreSQL writes.
TEXT: dict[str, st.SearchStrategy[Any]] = {
    "numeric": st.decimals(-(10**60), 10**60), "numeric(60,5)": st.decimals(-(10**40), 10**40, places=5),
    "uuid": st.uuids().map(str), "json": st.sampled_from(['{"a": [1, 2.50]}', "null", '"\\u00e9"', "[]"]),
    "jsonb": st.sampled_from(['{"a": [1, 2.50], "b": null}', "null", '"é"']),
    "interval": _ints.map(lambda n: f"{n} seconds"),
    "timetz": st.sampled_from(["12:00:00+02", "00:00:00.000001-11:30"]), "money": _ints,
    "inet": st.ip_addresses().map(str),
    "cidr": st.sampled_from(["10.0.0.0/8", "::/0"]), "macaddr": st.just("08:00:2b:01:02:03"),
    "integer[]": st.lists(st.one_of(st.none(), _ints), max_size=4), "text[]": st.lists(_words, max_size=4),
    "numeric[]": st.lists(st.decimals(-(10**9), 10**9, places=2), max_size=3),
    "bytea[]": st.lists(st.binary(max_size=5), max_size=3),
    "timestamptz[]": st.lists(st.just("2024-01-01 12:00:00+05"), max_size=2),
    "int4range": st.sampled_from(["[1,5)", "empty", "(,)"]),
    "tstzrange": st.just("[2024-01-01 00:00:00+01,)"), "bit(5)": st.just("10101"),
    "varbit(9)": st.sampled_from(["", "101"]),
    "point": st.just("(1.5,-2)"), "box": st.just("(1,1),(0,0)"), "tsvector": st.just("'a':1 'b':2"),
    "xml": st.just("<a>é</a>"), "mood": st.sampled_from(["ok", "söso"]),
    "short": _ints.map(abs), "pair": st.just("(1,x)"),
    "pg_lsn": st.just("16/B374D848"), "int4multirange": st.just("{[1,3),[5,7)}"),
}  # fmt: skip
KINDS = {**PLAIN, **TEXT}
COLUMNS = {kind: f"c{number}" for number, kind in enumerate(KINDS)}
OWN = (
    "CREATE TYPE mood AS ENUM ('ok', 'söso')",
    "CREATE DOMAIN short AS integer CHECK (VALUE >= 0)",
    "CREATE TYPE pair AS (a int, b text)",
)


class Log:
    """A slot of its own, read through SQL: the bytes that a stream would have."""

    def __init__(self, dsn: str) -> None:
        self.db = psycopg.connect(dsn, autocommit=True, options=PLAIN_TEXT)

    def take(self) -> list[bytes]:
        """The messages since the last time."""
        query = (
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
            "'publication_names', 'all_tables')"
        )
        return [bytes(data) for (data,) in self.db.execute(query, (SLOT,)).fetchall()]


@pytest.fixture
def log(postgres: str) -> Iterator[Log]:
    log = Log(postgres)
    with contextlib.closing(log.db):
        for statement in OWN:
            log.db.execute(statement)
        columns = ", ".join(f"{name} {kind}" for kind, name in COLUMNS.items())
        log.db.execute(f"CREATE TABLE kinds (id serial PRIMARY KEY, {columns})")
        log.db.execute("CREATE PUBLICATION all_tables FOR ALL TABLES")
        log.db.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (SLOT,))
        yield log


def frames_of(messages: list[bytes]) -> bytes:
    return b"".join(pack_frame(message) for message in messages if message[:1] not in b"OM")


ROWS = st.lists(
    st.fixed_dictionaries({kind: st.one_of(st.none(), of) for kind, of in KINDS.items()}), min_size=1, max_size=8
)


def test_every_type_is_what_the_server_has(log: Log) -> None:
    """Random values of every type: the decoded row is the selected row."""
    seen: set[str] = set()

    @settings(
        max_examples=200 if LONG else 12, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )
    @given(ROWS)
    def check(rows: list[dict[str, Any]]) -> None:
        log.take()
        names, places = ", ".join(COLUMNS.values()), ", ".join(f"%s::{kind}" for kind in KINDS)
        with log.db.cursor() as cursor:
            first = cursor.execute("SELECT coalesce(max(id), 0) FROM kinds").fetchone()
            assert first is not None
            values = [[_given(kind, row[kind]) for kind in KINDS] for row in rows]
            cursor.executemany(f"INSERT INTO kinds ({names}) VALUES ({places})", values)
            selected = ", ".join(_as_written(name) if kind in TEXT else name for kind, name in COLUMNS.items())
            held = cursor.execute(f"SELECT {selected} FROM kinds WHERE id > %s ORDER BY id", first).fetchall()
        decoded = PostgresDecoder().decode(b"", frames_of(log.take()))
        (changes,) = decoded.changes
        for kind, expected in zip(KINDS, zip(*held, strict=True), strict=True):
            found = changes.rows.column(COLUMNS[kind]).to_pylist()
            if kind == "real":
                expected = tuple(None if one is None else float(np.float32(one)) for one in expected)
            assert found == list(expected), kind
            assert [str(one) for one in found] == [str(one) for one in expected], kind  # signs of zero, scales
            seen.update(kind for one in expected if one is not None)
        assert all(mask is None for mask in changes.missing)
        assert not changes.odd

    check()
    assert seen == set(KINDS)


def _as_written(name: str) -> str:
    """The text that the type's own output function writes; a cast of inet to text writes another one."""
    return f"CASE WHEN {name} IS NOT NULL THEN format('%%s', {name}) END"


def _given(kind: str, value: Any) -> Any:
    """A value as a parameter: text, unless its type says more."""
    if value is None or isinstance(value, bytes | bool | list | date | time):
        return value
    return str(value)


def test_values_that_no_column_can_hold_are_null_with_their_text(log: Log) -> None:
    log.take()
    odd = {
        "date": ("infinity", "-infinity", "0044-03-15 BC"), "timestamp": ("infinity", "0001-01-01 00:00:00 BC"),
        "timestamptz": ("-infinity", "10000-01-01 00:00:00+00"), "numeric(38,10)": ("NaN",), "time": ("24:00:00",),
    }  # fmt: skip
    for kind, texts in odd.items():
        for text in texts:
            log.db.execute(f"INSERT INTO kinds ({COLUMNS[kind]}) VALUES (%s::{kind})", (text,))
    (changes,) = PostgresDecoder().decode(b"", frames_of(log.take())).changes
    at = 0
    for kind, texts in odd.items():
        name = COLUMNS[kind]
        for text in texts:
            assert changes.rows.column(name)[at].as_py() is None
            assert changes.odd[name][at] == text
            at += 1


def make_history(log: Log, seed: int) -> list[bytes]:
    """Messages of a random history with every kind of message."""
    chances = random.Random(seed)
    db = log.db
    db.execute("DROP TABLE IF EXISTS a, b, c")
    db.execute("CREATE TABLE a (id int PRIMARY KEY, small text, large text, mood mood)")
    db.execute("CREATE TABLE b (x int, y text NOT NULL, v numeric(8,2), PRIMARY KEY (x, y))")
    db.execute("CREATE TABLE c (id int PRIMARY KEY, large text)")
    db.execute("ALTER TABLE c REPLICA IDENTITY FULL")
    log.take()
    for number in range(40):
        with db.transaction():
            for _ in range(chances.randint(1, 4)):
                key = chances.randint(1, 6)
                large = "".join(f"{chances.getrandbits(32):08x}" for _ in range(1000))
                statement, values = chances.choice([
                    ("INSERT INTO a VALUES (%s, 'x', %s) ON CONFLICT (id) DO UPDATE SET small = 'b'", (key, large)),
                    ("UPDATE a SET small = 'é' || small WHERE id = %s", (key,)),
                    ("UPDATE a SET id = id + 10 WHERE id = %s", (key,)),
                    ("DELETE FROM a WHERE id = %s", (key + 10,)),
                    ("INSERT INTO b VALUES (%s, 'y', NULL) ON CONFLICT DO NOTHING", (key,)),
                    ("UPDATE b SET v = 1.5, y = y || 'z' WHERE x = %s", (key,)),
                    ("INSERT INTO c VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET large = c.large", (key, large)),
                    ("DELETE FROM c WHERE id = %s", (key,)),
                ])  # fmt: skip
                db.execute(statement, values)
        if number in (10, 30):
            db.execute("TRUNCATE a, b")
        if number == 20:
            db.execute("ALTER TABLE a ADD COLUMN more int")
    return log.take()


def test_another_decoder_agrees(log: Log) -> None:
    """Operations, keys, values, values that are missing, and the transactions, on the same bytes."""
    messages = make_history(log, 14)
    decoded = PostgresDecoder().decode(b"", frames_of(messages))
    expected: list[tuple[str, str, dict[str, Any]]] = []
    xids: list[str] = []

    def add(table: str, op: Op, values: dict[str, Any], xid: int) -> None:
        kept = {name: value for name, value in values.items() if value is not MISSING}
        expected.append((table, op.name, kept))
        xids.append(str(xid))

    keys = {"public.a": {"id"}, "public.b": {"x", "y"}, "public.c": set[str]()}
    for change in read_changes(messages):
        key = {name: value for name, value in change.old.items() if name in keys[change.table]}
        if change.kind == "T":
            columns = ["id", "small", "large", "mood"] if change.table == "public.a" else ["x", "y", "v"]
            if change.table == "public.a" and len(expected) > len(messages) // 2:
                columns.append("more")
            add(change.table, Op.TRUNCATE, dict.fromkeys(columns), change.xid)
        elif change.kind == "D":
            add(change.table, Op.DELETE, key if change.old_is_key else change.old, change.xid)
        elif change.old_is_key:
            add(change.table, Op.DELETE, key, change.xid)
            add(change.table, Op.INSERT, change.new, change.xid)
        else:
            whole = {name: change.old.get(name) if value is MISSING and change.old else value
                     for name, value in change.new.items()}  # fmt: skip
            add(change.table, Op.INSERT if change.kind == "I" else Op.UPDATE, whole, change.xid)
    found = [(table, op, {name: as_text(value) for name, value in row.items()}) for table, op, row in flat(decoded)]
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if ours[1] != "TRUNCATE":
            assert ours == theirs
    order = sorted((int(at), int(index)) for one in decoded.changes
                   for at, index in zip(one.order, one.transaction, strict=True))  # fmt: skip
    assert [decoded.transactions[index].id for _, index in order] == xids
    ops = {op for _, op, _ in found}
    assert ops == {"INSERT", "UPDATE", "DELETE", "TRUNCATE"}
    assert any(value is MISSING for change in read_changes(messages) for value in change.new.values())


def as_text(value: Any) -> str | None:
    return None if value is None else f"{value:.2f}" if isinstance(value, Decimal) else str(value)


def test_every_byte_changed_is_an_error_or_a_row_of_the_same_table(log: Log) -> None:
    """The log has no checksum of its own (spool files have one): the decoder refuses, or reads whole rows; it ends."""
    whole = frames_of(make_history(log, 15))
    frames = whole[: len(whole) if LONG else 60_000]
    chances, refused, read = random.Random(3), 0, 0
    places = range(len(frames)) if LONG else chances.sample(range(len(frames)), 500) + list(range(1200))
    for place in places:
        damaged = bytearray(frames)
        damaged[place] ^= 1 << chances.randrange(8)
        try:
            decoded = PostgresDecoder(before=True).decode(b"", bytes(damaged))
        except DamagedError:
            refused += 1
            continue
        read += 1
        assert sum(len(one.ops) for one in decoded.changes) == decoded.count
        for one in decoded.changes:
            one.rows.validate(full=True)
            assert 0 <= one.transaction.min() <= one.transaction.max() < len(decoded.transactions)
    assert refused > 100
    for end in chances.sample(range(len(frames)), 300):
        with contextlib.suppress(DamagedError):
            PostgresDecoder().decode(b"", frames[:end])
        with contextlib.suppress(DamagedError):
            PostgresDecoder().decode(frames[:end], frames)

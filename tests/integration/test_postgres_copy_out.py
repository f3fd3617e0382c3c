"""Rows of a query by COPY, taken by compiled code: the rows as another client reads them, errors by name, and a
connection that can be used again."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import Connection
from psycopg.sql import SQL

from firnline.sources.postgres.copy_out import CopyOut

MANY = 1 << 40


@pytest.fixture
def db(postgres: str) -> Iterator[Connection[tuple[object, ...]]]:
    with psycopg.connect(postgres, autocommit=True) as connection:
        yield connection


def numbers(rows: str) -> list[int]:
    return [int(line) for line in rows.split()]


def test_rows_come_in_parts(db: Connection[tuple[object, ...]]) -> None:
    copy = CopyOut(db, SQL("SELECT g FROM generate_series(1, 10000) g").format())
    found: list[int] = []
    sizes = []
    while not copy.has_all:
        rows, count = copy.take(3000, MANY)
        found += numbers(rows.decode())
        sizes.append(count)
    assert found == list(range(1, 10001))
    assert sizes == [3000, 3000, 3000, 1000]
    assert db.execute("SELECT 1").fetchone() == (1,)


def test_rows_that_are_larger_than_the_room_for_them(db: Connection[tuple[object, ...]]) -> None:
    select = SQL("SELECT repeat(chr(96 + g), 1000000 * g) FROM generate_series(1, 9) g").format()
    rows, count = CopyOut(db, select).take(100, MANY)
    assert count == 9
    assert [(line[:1], len(line)) for line in rows.decode().split()] == [
        (chr(96 + number), number * 1_000_000) for number in range(1, 10)
    ]


def test_no_rows(db: Connection[tuple[object, ...]]) -> None:
    copy = CopyOut(db, SQL("SELECT 1 WHERE false").format())
    assert copy.take(10, MANY) == (b"", 0)
    assert copy.has_all


def test_the_others_are_cancelled(db: Connection[tuple[object, ...]]) -> None:
    class _LeftError(Exception):
        pass

    def leave() -> None:
        with db.transaction():
            copy = CopyOut(db, SQL("SELECT repeat('x', 1000) FROM generate_series(1, 10000000)").format())
            rows, count = copy.take(1 << 30, 100_000)
            assert len(rows) == count * 1001 == 100_100
            copy.cancel()
            raise _LeftError

    with pytest.raises(_LeftError):
        leave()
    assert db.execute("SELECT 1").fetchone() == (1,)


def test_a_query_that_is_refused(db: Connection[tuple[object, ...]]) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable), db.transaction():
        CopyOut(db, SQL("SELECT * FROM nothing").format())
    assert db.execute("SELECT 1").fetchone() == (1,)


def test_a_query_that_fails_behind_some_rows(db: Connection[tuple[object, ...]]) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero), db.transaction():
        CopyOut(db, SQL("SELECT 1 / (g - 5000) FROM generate_series(1, 10000) g").format()).take(1 << 30, MANY)
    assert db.execute("SELECT 1").fetchone() == (1,)


def test_a_connection_that_is_lost(postgres: str, db: Connection[tuple[object, ...]]) -> None:
    copy = CopyOut(db, SQL("SELECT repeat('x', 1000) FROM generate_series(1, 100000000)").format())
    with psycopg.connect(postgres, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", (db.info.backend_pid,))

    def take_all() -> None:
        while not copy.has_all:
            copy.take(1 << 30, 1 << 20)

    with pytest.raises(psycopg.OperationalError):
        take_all()

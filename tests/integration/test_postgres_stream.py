"""The stream of PostgreSQL: its frames are the messages that the server has for the captured tables, however they are
cut into pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psycopg
import pytest

from firnline.errors import SourceError, SourceGapError
from firnline.sources.cdc.log import Op, unpack_frames
from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.postgres import messages as m
from firnline.sources.postgres.decode import PostgresDecoder
from firnline.sources.postgres.server import PLAIN_TEXT, PostgresServer
from firnline.sources.postgres.stream import PostgresStream
from tests.support.processes import wait_until

TABLES = ("orders", "items")


def stream_of(dsn: str, may_end_others: Callable[[], bool] = lambda: False) -> PostgresStream:
    return PostgresStream(
        PostgresServer(dsn, "shop"),
        "ours",
        "everything",
        TablePatterns(TABLES, "public"),
        creates=False,
        may_end_others=may_end_others,
    )


def read_transaction(stream: PostgresStream) -> None:
    while not stream.read(1 << 20, 10.0).cuts:
        pass


def expected_messages(db: psycopg.Connection) -> list[bytes]:
    """What the server has for our tables, by SQL."""
    query = (
        "SELECT data FROM pg_logical_slot_get_binary_changes('theirs', NULL, NULL, 'proto_version', '1', "
        "'publication_names', 'everything')"
    )
    names: dict[int, str] = dict(db.execute("SELECT oid, relname FROM pg_class WHERE relkind = 'r'").fetchall())
    found: list[bytes] = []
    of_transaction: list[bytes] = []
    for (data,) in db.execute(query).fetchall():
        message = bytes(data)
        if message[0] == m.RELATION:
            relation = m.Relation.parse(message)  # the stream adds the numbers of columns
            numbers = {column.name: number for number, column in enumerate(relation.columns, 1)}
            message = relation.complete(m.Description((), numbers, is_whole=True)).pack()
        if message[0] == m.BEGIN:
            of_transaction = [message]
        elif message[0] == m.COMMIT:
            found += [*of_transaction, message] if len(of_transaction) > 1 else []
        elif names[int.from_bytes(message[1:5], "big")] in TABLES:
            of_transaction.append(message)
    return found


def test_frames_are_the_messages_of_our_tables(postgres: str) -> None:
    """Rows of several tables in turns, of one that is not captured, long and short, large transactions and small."""
    with contextlib.closing(psycopg.connect(postgres, autocommit=True, options=PLAIN_TEXT)) as db:
        for table in (*TABLES, "other"):
            db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, note text)")
        db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        with contextlib.closing(stream_of(postgres)) as stream:
            start = stream.begin()
        db.execute("SELECT pg_create_logical_replication_slot('theirs', 'pgoutput')")
        fill = "INSERT INTO {} SELECT n, repeat('x', n %% 300) FROM generate_series(%s::int, %s) n"
        db.execute(fill.format("other"), (1, 5000))
        db.execute(fill.format("orders"), (1, 5000))
        with db.transaction():
            for number in range(10_000, 10_300):
                table = ("orders", "other", "items", "items", "orders")[number % 5]
                db.execute(f"INSERT INTO {table} VALUES (%s, repeat('y', %s))", (number, number % 7))
            db.execute("INSERT INTO items VALUES (1, %s)", ("long " * 500_000,))
            db.execute(fill.format("items"), (20_000, 22_000))
        db.execute("UPDATE orders SET id = -id WHERE id < 1000")
        db.execute("DELETE FROM orders WHERE id < 2000")
        for number in range(20):
            db.execute("INSERT INTO orders VALUES (%s, 'small')", (30_000 + number,))
        expected = expected_messages(db)
        cuts = sum(message[0] == m.COMMIT for message in expected)
        assert (len(expected) > 10_000, cuts) == (True, 24)
        for max_bytes in (1, 1000, 100_000, 1 << 20):
            frames, counted = b"", 0
            ends: list[int] = []
            with contextlib.closing(stream_of(postgres)) as stream:
                stream.open(start)
                while len(ends) < cuts:
                    piece = stream.read(max_bytes, 10.0)
                    ends += [len(frames) + cut.offset for cut in piece.cuts]
                    counted += sum(cut.rows for cut in piece.cuts)
                    frames += piece.frames
            assert [bytes(message) for message in unpack_frames(frames)] == expected
            assert ends[-1] == len(frames)
            assert counted == sum(message[0] in m.ROWS for message in expected)
            wait_until(lambda: db.execute("SELECT NOT active FROM pg_replication_slots").fetchall() == [(True,)] * 2)


def test_a_server_that_goes_away_inside_of_a_transaction(postgres: str) -> None:
    with contextlib.closing(psycopg.connect(postgres, autocommit=True)) as db:
        db.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
        db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        with contextlib.closing(stream_of(postgres)) as stream:
            start = stream.begin()
            db.execute("INSERT INTO orders SELECT n, repeat('x', 200) FROM generate_series(1, 200000) n")
            stream.open(start)
            assert stream.read(1000, 30.0).frames
            db.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            with pytest.raises(SourceError):
                read_transaction(stream)
            stream.open(start)
            read_transaction(stream)


def test_the_context_of_a_cut_is_that_of_the_cut(postgres: str) -> None:
    """A table is altered inside of the transaction behind it, which has been read partly."""
    with contextlib.closing(psycopg.connect(postgres, autocommit=True)) as db:
        db.execute("CREATE TABLE orders (id int PRIMARY KEY, a text, b text)")
        db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        with contextlib.closing(stream_of(postgres)) as stream:
            start = stream.begin()
            db.execute("INSERT INTO orders VALUES (1, 'a', 'b')")
            with db.transaction():
                db.execute("INSERT INTO orders VALUES (2, 'a', 'b')")
                for old, new in (("a", "c"), ("b", "a"), ("c", "b")):
                    db.execute(f"ALTER TABLE orders RENAME COLUMN {old} TO {new}")
                db.execute("INSERT INTO orders (id, a, b) VALUES (3, 'a', 'b')")
            stream.open(start)
            while not stream.read(1, 10.0).cuts:
                pass
            frames = b"".join(stream.read(1, 10.0).frames for _ in range(3))
            assert [message[0] for message in unpack_frames(frames)] == [m.BEGIN, m.INSERT, m.RELATION, m.INSERT]
            decoded = PostgresDecoder().decode(stream.context(at_cut=True), frames)
            rows = [row for changes in decoded.changes for row in changes.rows.to_pylist()]
            assert rows == [{"id": 2, "a": "a", "b": "b"}, {"id": 3, "a": "a", "b": "b"}]
            assert stream.read(1, 10.0).cuts
            assert stream.context(at_cut=True) == stream.context(at_cut=False)


def test_truncate_names_captured_tables_alone(postgres: str) -> None:
    """A table that was renamed to a name that is not captured is emptied together with a captured one."""
    with contextlib.closing(psycopg.connect(postgres, autocommit=True)) as db:
        for table in TABLES:
            db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
        db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        with contextlib.closing(stream_of(postgres)) as stream:
            stream.open(stream.begin())
            context = stream.context(at_cut=True)
            db.execute("INSERT INTO orders VALUES (1)")
            db.execute("ALTER TABLE orders RENAME TO orders_old")
            db.execute("INSERT INTO orders_old VALUES (2)")
            db.execute("TRUNCATE items, orders_old")
            frames, cuts = b"", 0
            while cuts < 2:
                piece = stream.read(1 << 20, 10.0)
                frames, cuts = frames + piece.frames, cuts + len(piece.cuts)
            changes = PostgresDecoder().decode(context, frames).changes
            found = [(one.schema.table, Op(op)) for one in changes for op in one.ops.tolist()]
            assert found == [("public.orders", Op.INSERT), ("public.items", Op.TRUNCATE)]
            assert b"orders" not in stream.context(at_cut=True)


def test_a_reader_that_is_ended_has_acknowledged_more(postgres: str) -> None:
    """What it acknowledged between our look at the slot and its end is gone for us: a gap, never passed over."""
    with contextlib.closing(psycopg.connect(postgres, autocommit=True)) as db:
        db.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        confirmed = "SELECT confirmed_flush_lsn FROM pg_replication_slots"
        with contextlib.closing(stream_of(postgres)) as other:
            start = other.begin()
            other.open(start)
            db.execute("INSERT INTO orders VALUES (1)")

            def acknowledge() -> bool:
                before = db.execute(confirmed).fetchone()
                piece = other.read(1 << 20, 30.0)
                other.acknowledge(piece.cuts[-1].position)

                def has_moved() -> bool:
                    other.keep_alive()
                    return db.execute(confirmed).fetchone() != before

                wait_until(has_moved)
                return True

            stream = stream_of(postgres, may_end_others=acknowledge)
            with contextlib.closing(stream), pytest.raises(SourceGapError, match="acknowledged up to"):
                stream.open(start)

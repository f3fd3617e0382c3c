"""Reads tables of a PostgreSQL database chunk by chunk: COPY in a transaction of its own, whose snapshot is known.

The values come as the same text as in the log. A table is described as the log describes it, so that both have one
schema. COPY takes no lock but the one that every SELECT takes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import Connection, IsolationLevel
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from firnline.clock import monotonic
from firnline.errors import ConfigError, FirnlineError, SourceError
from firnline.sources.cdc.column_names import names_here
from firnline.sources.cdc.log import (
    Chunk,
    TableChangedError,
    TableFacts,
    TableGoneError,
    TableReader,
    pack_frame,
)
from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.postgres import messages as m
from firnline.sources.postgres.copy_out import CopyOut
from firnline.sources.postgres.position import LogPlace
from firnline.sources.postgres.server import GENERATED_VERSION, PostgresServer, inserts_only
from firnline.sources.postgres.visibility import Snapshot
from firnline.types import Json

MAX_CHUNK_BYTES = 64 << 20  # of the rows of a chunk; a single larger row comes alone
BEHIND_SECONDS = 20.0  # for a standby to have what was read of the log; then another host is tried
LOCK_SECONDS = 10  # to wait for somebody who changes the table
_PAGE_BYTES, _PAGE_HEADERS = 8192, (24, 40)  # of the log
# A chunk is read by the index of the key. Left to itself, a server whose statistics are old or missing sorts the whole
# table for every chunk.
_BY_INDEX = [
    SQL("SET LOCAL {} = off").format(SQL(name)) for name in ("enable_seqscan", "enable_bitmapscan", "enable_sort")
]
_FIRST_OWN_TYPE = 10_000  # types from here on are named in the log
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\"}

_TABLE = """
    SELECT c.oid, c.relkind::text, c.relreplident::text,
           (SELECT array_agg(a.attname ORDER BY k.place) FROM pg_index i
                   CROSS JOIN unnest(i.indkey) WITH ORDINALITY k (attnum, place)
                   JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
            WHERE i.indrelid = c.oid AND k.place <= i.indnkeyatts
              AND CASE WHEN c.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s"""

_COLUMNS = """
    SELECT a.attname, a.atttypid, a.atttypmod, format_type(a.atttypid, a.atttypmod),
           (SELECT n.nspname || '.' || c.collname FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
            WHERE c.oid = a.attcollation)
    FROM pg_attribute a
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped AND a.attname = ANY (%s) ORDER BY a.attnum"""

_ALL_COLUMNS = """
    SELECT array_agg(a.attname) FROM pg_attribute a
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''"""

_GENERATED = "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attgenerated <> '' AND NOT attisdropped"

_PUBLISHED = """
    SELECT attnames, rowfilter FROM pg_publication_tables
    WHERE pubname = ANY (%s) AND schemaname = %s AND tablename = %s ORDER BY pubname = %s DESC"""

_BASE_TYPE = """
    WITH RECURSIVE base AS (
        SELECT t.* FROM pg_type t WHERE t.oid = %s
        UNION ALL SELECT t.* FROM pg_type t JOIN base ON t.oid = base.typbasetype AND base.typtype = 'd')
    SELECT n.nspname, base.typname FROM base JOIN pg_namespace n ON n.oid = base.typnamespace
    WHERE base.typtype <> 'd'"""

# A number of its own: the end of a snapshot lies behind the last transaction that has ended, and those that the log has
# and that wait for a standby have not. A server in recovery has no numbers to give, and shows what it has replayed.
_NEXT_TRANSACTION = """
    SELECT CASE WHEN pg_is_in_recovery() THEN pg_snapshot_xmax(pg_current_snapshot())::text
                ELSE pg_current_xact_id()::text END"""

_END = """
    SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END"""


class PostgresTables(TableReader):
    """Reads the tables of one source."""

    lapse = "for a while, the publication did not have it, or had not all of its rows, columns or kinds of changes"

    def __init__(
        self, server: PostgresServer, publication: str, tables: TablePatterns, *, creates: bool, name: str
    ) -> None:
        self._server = server
        self._publication = publication
        self._tables = tables
        self._creates = creates
        self._name = name
        self._connection: Connection[tuple[Any, ...]] | None = None
        self._behind_since: float | None = None  # the server has not what was read of the log since then

    def find_tables(self) -> list[TableFacts]:
        found = self._server.find_tables(self._tables)
        if not self._creates:
            published = self._server.published(self._publication) or {}
            unfit = self._server.find_unfit(self._publication, found)
            found = [table for table in found if table.name in published or table.name in unfit]
        logged = self._server.find_members(self._publication)
        return [
            TableFacts(table.name, table.key, table.rows, str(table.oid), logged=logged.get(table.name, ""))
            for table in found
        ]

    def prepare(self, tables: Sequence[str]) -> dict[str, FirnlineError]:
        wanted = [table for table in self._server.find_tables(self._tables) if table.name in tables]
        if not self._creates:
            return self._server.find_unpublished(self._publication, wanted)
        failed: dict[str, FirnlineError] = {}
        try:
            self._server.ensure_publication(self._publication, wanted)
        except SourceError as error:
            if not isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
                raise
            for table in wanted:  # the others, one by one
                try:
                    self._server.ensure_publication(self._publication, [table])
                except SourceError as failure:
                    failed[table.name] = failure
        return failed

    def barrier(self, place: Json) -> Json:
        """The number of the next transaction, since all before it have to have ended; and the place, since the next
        connection may be to another host of dsn, which is behind."""
        return {"next": int(self._ask(_NEXT_TRANSACTION)), **self.later_barrier(place)}

    def later_barrier(self, place: Json) -> Json:
        return {"lsn": LogPlace.from_json(place).lsn if place is not None else 0}

    def find_seen(self) -> Json | None:
        return self._ask("SELECT pg_current_snapshot()::text")

    def _ask(self, query: LiteralString) -> str:
        try:
            row = self._open().execute(query).fetchone()
        except psycopg.Error as error:
            raise self._failed(error) from error
        assert row is not None
        return str(row[0])

    def find_end(self) -> Json:
        try:
            return self._find_end(self._open())
        except psycopg.Error as error:
            raise self._failed(error) from error

    def read_chunk(
        self, table: str, after: Json, limit: int, *, order: Json = None, barrier: Json = None, where: str = ""
    ) -> Chunk | None:
        try:
            return self._read(self._open(), table, after, limit, order, barrier, where)
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            raise TableGoneError(table) from None
        except psycopg.Error as error:
            raise self._failed(error, table) from error

    def find_unreadable(self, tables: Collection[str]) -> dict[str, FirnlineError]:
        return dict(self._server.find_unreadable(tables))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> Connection[tuple[Any, ...]]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._server.conninfo(f"{self._name} tables"), autocommit=True, prepare_threshold=None
            )
            self._connection.isolation_level = IsolationLevel.REPEATABLE_READ
        return self._connection

    def _failed(self, error: psycopg.Error, table: str = "") -> Exception:
        """Return an error of the server, about a table, as ours."""
        self.close()
        if table and isinstance(error, psycopg.errors.InsufficientPrivilege):
            refused = self._server.find_unreadable([table])
            if table in refused:
                return refused[table]
        return self._server.translate(error)

    def _read(
        self,
        db: Connection[tuple[Any, ...]],
        table: str,
        after: Json,
        limit: int,
        order: Json,
        barrier: Json,
        where: str,
    ) -> Chunk | None:
        copied: list[tuple[bytes, int]] = []
        is_cut = False
        if self._is_behind(db, barrier):
            return None
        try:
            with db.transaction():
                snapshot = self._take_snapshot(db, table, barrier)
                if snapshot is None:
                    return None
                described = self._describe(db, table)
                if not described.key:
                    raise ConfigError(f"{self._server.place}: {table} has no key by which it could be read in chunks")
                if after is not None and order not in (None, described.order):
                    raise TableChangedError(table)
                for plan in _BY_INDEX:
                    db.execute(plan)
                self._copy(db, described.select(after, limit, where), limit, copied)
        except _EnoughError:
            is_cut = True
        ((content, rows),) = copied
        last = described.last_key(content) if rows else after
        is_last = rows < limit and not is_cut
        if rows and last == after:
            raise ConfigError(f"{self._server.place}: the key of {table} does not order its rows")
        high = self._find_end(db)
        return Chunk(
            described.context(),
            content,
            rows,
            described.key_here(),
            last,
            is_last,
            snapshot,
            high,
            described.identity,
            described.order,
        )

    def read_whole(self, table: str, limit: int, *, barrier: Json) -> Generator[Chunk] | None:
        try:
            db = self._open()
            if self._is_behind(db, barrier):
                return None
            db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            snapshot = self._take_snapshot(db, table, barrier)
            if snapshot is None:
                db.execute("ROLLBACK")
                return None
        except psycopg.errors.UndefinedTable:
            self.close()
            raise TableGoneError(table) from None
        except psycopg.Error as error:
            raise self._failed(error, table) from error
        return self._read_whole(db, table, limit, snapshot)

    def _read_whole(self, db: Connection[tuple[Any, ...]], table: str, limit: int, snapshot: str) -> Generator[Chunk]:
        try:
            described = self._describe(db, table)
            context = described.context()
            copy = CopyOut(db, described.select(None, None, ""))
            content, rows = copy.take(limit, MAX_CHUNK_BYTES)
            while not copy.has_all:
                yield Chunk(context, content, rows, (), None, False, snapshot, None)
                content, rows = copy.take(limit, MAX_CHUNK_BYTES)
            db.execute("COMMIT")
            high = self._find_end(db)
            yield Chunk(context, content, rows, (), None, True, snapshot, high)
        except psycopg.Error as error:
            raise self._failed(error, table) from error
        except BaseException:  # nobody reads the rest
            self.close()
            raise

    def _is_behind(self, db: Connection[tuple[Any, ...]], barrier: Json) -> bool:
        """Return whether the server, a standby, has not yet what was read of the log.

        Raises:
            SourceError: it is behind for long; the next connection may be to another one.
        """
        if barrier is None or LogPlace.from_json(self._find_end(db)).lsn >= _at_page(int(barrier["lsn"])):
            self._behind_since = None
            return False
        self._behind_since = self._behind_since or monotonic()
        if monotonic() - self._behind_since < BEHIND_SECONDS:
            return True
        self._behind_since = None
        self.close()
        raise SourceError(
            f"{self._server.place}: tables are read from a standby that has not yet what was read of the log",
            hint="Wait until the standby has caught up, or take it out of `dsn`.",
        )

    def _take_snapshot(self, db: Connection[tuple[Any, ...]], table: str, barrier: Json) -> str | None:
        """Take the snapshot of a transaction that has begun; None if it does not see everything of `barrier`."""
        db.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
        db.execute("SET LOCAL statement_timeout = 0")
        # Takes no snapshot. Whoever changes the table has to wait now, and what they did before is seen.
        db.execute(SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(Identifier(*table.split(".", 1))))
        row = db.execute("SELECT pg_current_snapshot()::text").fetchone()
        assert row is not None
        snapshot = str(row[0])
        return None if barrier is not None and Snapshot.parse(snapshot).xmin < barrier.get("next", 0) else snapshot

    def _find_end(self, db: Connection[tuple[Any, ...]]) -> Json:
        row = db.execute(_END).fetchone()
        assert row is not None
        return LogPlace(_at_page(m.parse_lsn(str(row[0])))).to_json()

    def _describe(self, db: Connection[tuple[Any, ...]], table: str) -> _Described:
        schema, name = table.split(".", 1)
        row = db.execute(_TABLE, (schema, name)).fetchone()
        if row is None:
            raise TableGoneError(table)
        oid, kind, identity, key = row
        facts = self._server.describe(db, table)
        columns, condition = self._published(db, oid, schema, name)
        found = db.execute(_COLUMNS, (oid, columns)).fetchall()
        generated = {one[0] for one in db.execute(_GENERATED, (oid,)).fetchall()}
        key = () if set(key or ()) & generated.difference(columns) else tuple(key or ())
        keys = set(key) if identity in "di" else {one[0] for one in found} if identity == "f" else set()
        relation = m.Relation(
            oid,
            schema,
            name,
            identity,
            tuple(m.RelationColumn(one[0], one[1], one[2], one[0] in keys) for one in found),
        )
        relation = relation.complete(facts) if facts is not None else relation
        types = {one[1]: self._base_type(db, one[1]) for one in found if one[1] >= _FIRST_OWN_TYPE}
        casts = {one[0]: str(one[3]) for one in found}
        collations = {one[0]: str(one[4] or "") for one in found}
        missing = [column for column in key if column not in casts]
        if missing:
            raise ConfigError(
                f"{self._server.place}: the publication lacks {missing[0]}, a key column of {schema}.{name}"
            )
        order = [str(oid), *([name, casts[name], collations[name]] for name in key)]
        return _Described(relation, types, tuple(key), casts, condition, order, is_root=kind == "p")

    def _published(
        self, db: Connection[tuple[Any, ...]], oid: int, schema: str, name: str
    ) -> tuple[list[str], str | None]:
        """Return the columns that the log has, and the publication's condition for rows. Before PostgreSQL 18 the log
        has no generated column, though a publication of version 15 lists them."""
        if db.info.server_version >= 150000:
            names = [self._publication, inserts_only(self._publication)]
            row = db.execute(_PUBLISHED, (names, schema, name, self._publication)).fetchone()
            if row is not None:
                logged = db.info.server_version >= GENERATED_VERSION * 10000
                lacks = set() if logged else {one[0] for one in db.execute(_GENERATED, (oid,)).fetchall()}
                return [column for column in row[0] if column not in lacks], row[1]
        row = db.execute(_ALL_COLUMNS, (oid,)).fetchone()
        return list(row[0] or ()) if row is not None else [], None

    def _base_type(self, db: Connection[tuple[Any, ...]], oid: int) -> tuple[str, str]:
        """Return the name that the log gives a type: that of the type below a domain."""
        row = db.execute(_BASE_TYPE, (oid,)).fetchone()
        schema, name = row if row is not None else ("", f"type {oid}")
        return ("" if schema == "pg_catalog" else str(schema)), str(name)

    def _copy(
        self, db: Connection[tuple[Any, ...]], select: Composed, limit: int, copied: list[tuple[bytes, int]]
    ) -> None:
        """Add the rows of a query to `copied`, as COPY writes them, and their number.

        Raises:
            _EnoughError: the rows have so many bytes that the others are left to the next chunk.
        """
        copy = CopyOut(db, select)
        copied.append(copy.take(limit + 1, MAX_CHUNK_BYTES))  # there are `limit` at most: finds their end, too
        if not copy.has_all:
            copy.cancel()
            raise _EnoughError


class _EnoughError(Exception):
    """A chunk is full before it has all rows that were asked for."""


class _Described:
    """A table as its snapshot has it."""

    def __init__(
        self,
        relation: m.Relation,
        types: dict[int, tuple[str, str]],
        key: tuple[str, ...],
        casts: dict[str, str],
        condition: str | None,
        order: Json,
        *,
        is_root: bool,
    ) -> None:
        self._relation = relation
        self._types = types
        self.key = key
        self._casts = casts  # the type of every column, in SQL
        self._condition = condition
        self.identity = str(relation.id)
        self.order = order
        self._is_root = is_root

    def key_here(self) -> tuple[str, ...]:
        """Return the names of the key's columns in change rows."""
        return names_here(self.key, [column.name for column in self._relation.columns])

    def context(self) -> bytes:
        """Return what the log would say before rows of the table."""
        messages = [m.pack_type(oid, *names) for oid, names in self._types.items()]
        return b"".join(pack_frame(message) for message in (*messages, self._relation.pack()))

    def select(self, after: Json, limit: int | None, where: str) -> Composed:
        names = [Identifier(column.name) for column in self._relation.columns]
        key = [Identifier(name) for name in self.key]
        conditions: list[Composable] = [SQL("({})").format(SQL(text)) for text in (self._condition, where) if text]
        if after is not None:
            values = [
                SQL("{}::{}").format(Literal(str(value)), SQL(self._casts[name]))
                for name, value in zip(self.key, after, strict=True)
            ]
            conditions.append(SQL("({}) > ({})").format(SQL(", ").join(key), SQL(", ").join(values)))
        return SQL("SELECT {} FROM {}{}{}{}").format(
            SQL(", ").join(names),
            SQL("") if self._is_root else SQL("ONLY "),  # tables that inherit have a log of their own
            Identifier(self._relation.schema, self._relation.name),
            SQL(" WHERE {}").format(SQL(" AND ").join(conditions)) if conditions else SQL(""),
            SQL(" ORDER BY {} LIMIT {}").format(SQL(", ").join(key), Literal(limit)) if limit is not None else SQL(""),
        )

    def last_key(self, content: bytes) -> list[str]:
        """Return the key of the last row, as PostgreSQL's text."""
        start = content.rfind(b"\n", 0, len(content) - 1) + 1
        values = content[start:-1].decode().split("\t")
        places = {column.name: place for place, column in enumerate(self._relation.columns)}
        return [_unescape(values[places[name]]) for name in self.key]


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    found, signs = [], iter(text)
    for sign in signs:
        found.append(_ESCAPES[next(signs)] if sign == "\\" else sign)
    return "".join(found)


def _at_page(lsn: int) -> int:
    """Return the end of the log without the header of a page that has nothing yet: the server never sends that far."""
    behind = lsn % _PAGE_BYTES
    return lsn - behind if behind in _PAGE_HEADERS else lsn

"""Reads tables of MySQL and MariaDB chunk by chunk; see `chunk` for what a chunk is.

A chunk is one SELECT in a transaction with a consistent snapshot. What this snapshot surely sees:

- MySQL with GTIDs: `gtid_executed`, read before it. A GTID enters it after the storage engine's commit.
- MariaDB: the place in the log that belongs to the snapshot, which the server tells exactly.
- MySQL without GTIDs: the end of the log, read while another connection holds the table with LOCK TABLES ... READ. The
  server grants this lock when no transaction that changed the table is left, and the snapshot begins under it.

A table without a key is read whole, in one SELECT and one snapshot. What it sees must be exact. MySQL's snapshots begin
under that lock, with GTIDs, too; MariaDB's place is exact without one. Engines without transactions have no snapshots:
their tables stay locked until they are read.

Two connections: one has the snapshot and the rows, the other all else.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from firnline.clock import monotonic
from firnline.errors import ConfigError, FirnlineError, SourceError
from firnline.sources.cdc.log import UNREADABLE, Chunk, TableChangedError, TableFacts, TableGoneError, TableReader
from firnline.sources.cdc.tables import without_table
from firnline.sources.mysql import chunk as chunks
from firnline.sources.mysql import select_kernel
from firnline.sources.mysql.connect import Dsn, connect, connect_any
from firnline.sources.mysql.definition import Definition, key_value, read_definition
from firnline.sources.mysql.events import place_order
from firnline.sources.mysql.results import Result, RowReader, error_number
from firnline.sources.mysql.server import (
    Server,
    end_place,
    gtids_at,
    log_place,
    logged_gtids,
    query,
    quoted,
    quoted_table,
    read_server,
    version_of,
)
from firnline.types import Json

logger = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 64 << 20  # of the rows of a chunk; a single larger row comes alone
BEHIND_SECONDS = 20.0  # for a server to show what was read of the log; then another one is tried
LOCK_SECONDS = 2  # to wait for a lock, while others may wait behind it
ATTEMPTS = 5  # of a chunk whose table is changed while it is read
SYSTEM_DATABASES = frozenset({"mysql", "sys", "information_schema", "performance_schema"})
_CHANGED, _GONE = frozenset({1412}), frozenset({1146, 1049, 1932})
_REFUSED = frozenset({1142, 1143})
_NO_DATABASE_RIGHT, _LOCK_TIMEOUT = 1044, 1205
_WRONG_CONDITIONS = frozenset({1052, 1054, 1060, 1064, 1111, 1241, 1242, 1305, 1318, 1582, 1690})
# The session that reads rows: values as they are stored, times in UTC, dates that are none as literals.
_ROWS_SESSION = (
    "SET character_set_results = NULL, time_zone = '+00:00', sql_mode = 'ALLOW_INVALID_DATES'",
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    # A reader may be slow, and a table large.
    f"SET lock_wait_timeout = {LOCK_SECONDS}, net_write_timeout = 86400",
)
_BEGIN = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
_SNAPSHOT_ENGINE = "innodb"  # others have no transactions, or no place in the log that belongs to a snapshot

T = TypeVar("T")


class MySqlTableReader(TableReader):
    """Reads the tables of one server, or of the first of several that answers.

    Args:
        dsn: The address; see `Dsn`.
        is_captured: Whether a table, as `database.table`, is captured.
        max_chunk_bytes: A chunk ends when its rows have so many bytes.
        check: Called with every new connection; refuses a server that tables may not be read from.
    """

    def __init__(
        self,
        dsn: str,
        is_captured: Callable[[str], bool],
        *,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        check: Callable[[Any, Server], None] = lambda *_: None,
    ) -> None:
        self._dsn = Dsn.parse(dsn)
        self._check = check
        self._is_captured = is_captured
        self._max_bytes = max_chunk_bytes
        self._server: Server | None = None
        self._control: Any = None
        self._rows: Any = None
        self._row_reader: RowReader | None = None
        self._seen: Json = None  # what the last snapshot saw
        self._behind_since: float | None = None  # the server does not show what it must since then
        self._refused: dict[str, ConfigError] = {}  # by table that the server shows: its rows cannot be read
        self._fitting: dict[str, int] = {}  # rows of a table that fit into a chunk, where not all did

    # -- the contract --

    def find_tables(self) -> list[TableFacts]:
        db, server = self._connected()
        rows = query(
            db,
            server.host,
            "SELECT table_schema, table_name, table_rows, table_type FROM information_schema.tables "
            "WHERE table_type IN ('BASE TABLE', 'SYSTEM VERSIONED') ORDER BY table_schema, table_name",
        )
        self._refused.clear()
        found = []
        for database, name, count, kind in rows:
            table = f"{database}.{name}"
            if database in SYSTEM_DATABASES or not self._is_captured(table):
                continue
            is_versioned = kind == "SYSTEM VERSIONED"
            try:
                with _errors_of(db, server, table):
                    key = () if is_versioned else read_definition(db, server, table).key
            except TableGoneError:
                continue
            except ConfigError as error:
                if UNREADABLE not in error.fields:
                    raise
                self._refused[table] = error
                continue
            found.append(TableFacts(table, key, int(count or 0), can_be_read=not is_versioned))
        return found

    def find_unreadable(self, tables: Collection[str]) -> dict[str, FirnlineError]:
        db, server = self._connected()
        found: dict[str, FirnlineError] = {}
        for table in tables:
            try:
                with contextlib.suppress(TableGoneError), _errors_of(db, server, table):
                    # A SELECT would wait for whoever has locked the table.
                    columns = query(db, server.host, f"SHOW FULL COLUMNS FROM {quoted_table(table)}")
                    if not all("select" in str(privileges).lower().split(",") for *_, privileges, _ in columns):
                        raise _may_not_select(db, server, table)
            except ConfigError as error:
                if UNREADABLE not in error.fields:
                    raise
                found[table] = error
        return found

    def prepare(self, tables: Sequence[str]) -> dict[str, FirnlineError]:
        """Nothing to do: the log has the changes of all tables."""
        return {}

    def barrier(self, place: Json) -> Json:
        return {name: place[name] for name in ("kind", "gtid_set", "file", "pos", "server_uuid")}

    def later_barrier(self, place: Json) -> Json:
        """The same: a later chunk may come from another host of dsn, which is behind."""
        return self.barrier(place)

    def find_seen(self) -> Json | None:
        control, server = self._connected()
        if not server.is_mariadb and not server.has_gtids:
            return None  # what a lock of one table says is true of that table alone
        try:
            db = self._row_connection(server)
            snapshot = self._begin(control, db, server, "", None)
            query(db, server.host, "ROLLBACK")
            self._check_seen(server, snapshot)
        except BaseException:
            self.close()
            raise
        self._seen = snapshot
        return snapshot

    def find_end(self) -> Json:
        return end_place(*self._connected(), is_exact=False)

    def read_chunk(
        self, table: str, after: Json, limit: int, *, order: Json = None, barrier: Json = None, where: str = ""
    ) -> Chunk | None:
        return self._attempt(lambda: self._read_chunk(table, after, limit, order, barrier, where))

    def read_whole(self, table: str, limit: int, *, barrier: Json) -> Generator[Chunk] | None:
        return self._attempt(lambda: self._begin_whole(table, limit, barrier))

    def check_may_read(self, tables: Collection[str]) -> None:
        db, server = self._connected()
        for error in (*self._refused.values(), *self.find_unreadable(tables).values()):
            raise error
        for table in tables:
            with contextlib.suppress(TableGoneError), _errors_of(db, server, table):
                definition = read_definition(db, server, table)
                is_locked = not definition.order and _needs_lock(server, _engine(db, server, table))
                if is_locked or not server.has_gtids:
                    _check_may_lock(db, server, table)

    def _attempt(self, action: Callable[[], T]) -> T:
        """Do something again whose table is changed meanwhile."""
        for attempt in range(ATTEMPTS):
            try:
                return action()
            except SourceError as error:
                self.close()
                if error_number(error) not in _CHANGED or attempt == ATTEMPTS - 1:
                    raise
            except BaseException:
                self.close()
                raise
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        self._behind_since = None
        self._close_rows()
        control, self._control = self._control, None
        if control is not None:
            control._force_close()

    # -- connections --

    def _connected(self) -> tuple[Any, Server]:
        """Return the connection for all but rows, and its server."""
        if self._control is None or not self._control.open:
            self.close()
            db, host = connect_any(self._dsn, self._dsn.hosts)
            try:
                server = read_server(db, host)
                self._check(db, server)
                settings = f"lock_wait_timeout = {LOCK_SECONDS}"
                if not server.is_mariadb:
                    settings += ", information_schema_stats_expiry = 0"
                    if version_of(server) >= (8, 1):  # shows the column of a key that the server made by itself
                        settings += ", show_gipk_in_create_table_and_information_schema = ON"
                query(db, host, f"SET {settings}")
            except BaseException:
                db._force_close()
                raise
            self._control, self._server = db, server
        assert self._server is not None
        return self._control, self._server

    def _row_connection(self, server: Server) -> Any:
        if self._rows is None or not self._rows.open:
            self._rows = connect(self._dsn, server.host)
            longest = "max_statement_time" if server.is_mariadb else "max_execution_time"
            for statement in (*_ROWS_SESSION, f"SET {longest} = 0"):
                query(self._rows, server.host, statement)
            self._row_reader = RowReader(self._rows, server)
        return self._rows

    def _close_rows(self) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            rows._force_close()

    # -- a chunk --

    def _read_chunk(self, table: str, after: Json, limit: int, order: Json, barrier: Json, where: str) -> Chunk | None:
        control, server = self._connected()
        db = self._row_connection(server)
        snapshot = self._begin(control, db, server, table, barrier)
        self._check_seen(server, snapshot)
        if barrier is not None and not chunks.covers(snapshot, barrier):
            query(db, server.host, "ROLLBACK")
            self._check_behind(server)
            return None
        self._behind_since = None
        with _errors_of(control, server, table, where):
            # From here on to the end of the transaction the table keeps its definition.
            query(db, server.host, f"SELECT 1 FROM {quoted_table(table)} LIMIT 0")  # noqa: S608  # a quoted name
            definition = self._define(control, server, table)
            if not definition.order:
                raise SourceError(
                    f"table {table} has no primary key and no unique key without nulls: it cannot be read in chunks",
                    hint=f"Give it a primary key, or leave it out: {without_table(table)}.",
                )
            if after is not None and order not in (None, definition.describe_order()):
                raise TableChangedError(f"table {table} has another key now")
            asked = min(limit, self._fitting.get(table, limit))
            assert self._row_reader is not None
            result = self._row_reader.select(_statement(table, definition, after, asked, where), self._max_bytes)
        _check_layouts(definition, result)
        high = end_place(control, server, is_exact=False)
        if result.is_whole:
            query(db, server.host, "COMMIT")
        else:  # the server would send the rest
            self._close_rows()
            self._fitting[table] = result.rows
        self._seen = snapshot
        return Chunk(
            context=chunks.pack_context(definition.table, result.content, result.rows),
            content=result.content,
            rows=result.rows,
            key=definition.key,
            last=_last_key(definition, result),
            is_last=result.is_whole and result.rows < asked,
            sees=snapshot,
            high=high,
            order=definition.describe_order(),
        )

    def _check_seen(self, server: Server, snapshot: Json) -> None:
        if self._seen is not None and not chunks.covers(snapshot, self._seen):
            raise _behind(server, "another one had before")

    def _check_behind(self, server: Server) -> None:
        """Wait for a server that does not show what was read of the log: a moment for a commit, not for a replica."""
        if self._behind_since is None:
            self._behind_since = monotonic()
        if monotonic() - self._behind_since >= BEHIND_SECONDS:
            raise _behind(server, "was read of the log")

    def _begin(self, control: Any, db: Any, server: Server, table: str, barrier: Json) -> Json:
        """Begin a transaction with a snapshot; return what it surely sees."""
        if server.is_mariadb:
            gtids = logged_gtids(control, server)
            end = log_place(control, server)
            file, pos = _begin_at(db, server)
            if place_order(file, pos) < place_order(*end[:2]):  # it does not see all that the log had
                gtids = gtids_at(control, server, file, pos)
            return {"kind": server.kind, "gtid_set": gtids, "file": file, "pos": pos, "server_uuid": ""}
        has_gtids = server.has_gtids and (barrier is None or barrier["gtid_set"] is not None)
        with contextlib.nullcontext() if has_gtids else _locked(control, server, table):
            file, pos, executed = log_place(control, server)
            query(db, server.host, _BEGIN)
        gtid_set = executed if has_gtids else None
        return {"kind": server.kind, "gtid_set": gtid_set, "file": file, "pos": pos, "server_uuid": server.uuid}

    # -- a table without a key --

    def _begin_whole(self, table: str, limit: int, barrier: Json) -> Generator[Chunk] | None:
        control, server = self._connected()
        db = self._row_connection(server)  # nobody waits for it behind the lock
        with contextlib.ExitStack() as locks:
            with _errors_of(control, server, table):
                engine = _engine(control, server, table)
                needs_lock = _needs_lock(server, engine)
                locks.enter_context((_locked if needs_lock else _kept)(control, server, table))
                if _engine(control, server, table) != engine:
                    raise SourceError(f"table {table} has another engine now")
            snapshot = self._begin_exact(control, db, server, barrier, is_locked=needs_lock)
            self._check_seen(server, snapshot)
            if not chunks.covers(snapshot, barrier):
                query(db, server.host, "ROLLBACK")
                self._check_behind(server)
                return None
            self._behind_since = None
            high = end_place(control, server, is_exact=False)
            with _errors_of(control, server, table):
                # From here on to the end of the transaction the table keeps its definition.
                query(db, server.host, f"SELECT 1 FROM {quoted_table(table)} LIMIT 0")  # noqa: S608  # a quoted name
                definition = self._define(control, server, table)
            self._seen = snapshot
            if engine == _SNAPSHOT_ENGINE:
                locks.close()
            return self._read_whole(table, definition, limit, snapshot, high, locks.pop_all())
        raise AssertionError("locks pass no error over")

    def _read_whole(
        self, table: str, definition: Definition, limit: int, snapshot: Json, high: Json, locks: contextlib.ExitStack
    ) -> Generator[Chunk]:
        assert self._row_reader is not None
        assert self._server is not None
        statement = f"SELECT {definition.expressions()} FROM {quoted_table(table)}"  # noqa: S608  # quoted names
        try:
            with locks, _errors_of(self._control, self._server, table):
                for result in self._row_reader.select_parts(statement, limit, self._max_bytes):
                    _check_layouts(definition, result)
                    if result.is_whole:
                        query(self._rows, self._server.host, "COMMIT")
                        locks.close()
                    context = chunks.pack_context(definition.table, result.content, result.rows)
                    yield Chunk(
                        context,
                        result.content,
                        result.rows,
                        (),
                        None,
                        is_last=result.is_whole,
                        sees=snapshot,
                        high=high if result.is_whole else None,
                    )
        except BaseException:  # the server would send the rest
            self.close()
            raise

    def _begin_exact(self, control: Any, db: Any, server: Server, barrier: Json, *, is_locked: bool) -> Json:
        """Begin a transaction with a snapshot; return what it sees of a table, exactly."""
        if is_locked:
            query(db, server.host, _BEGIN)
            place = end_place(control, server)
            file, pos, gtids = place["file"], place["pos"], place["gtid_set"]
        else:
            file, pos = _begin_at(db, server)
            gtids = gtids_at(control, server, file, pos)
        gtid_set = gtids if barrier["gtid_set"] is not None or server.is_mariadb else None
        return {"kind": server.kind, "gtid_set": gtid_set, "file": file, "pos": pos, "server_uuid": server.uuid}

    def _define(self, control: Any, server: Server, table: str) -> Definition:
        definition = read_definition(control, server, table)
        if server.is_mariadb and _is_versioned(control, server, table):
            raise SourceError(
                f"table {table} is system-versioned: its log has rows of the past beside those of now",
                hint=f'Leave it out: tables: ["!{table}"].',
            )
        return definition


def _behind(server: Server, what: str) -> SourceError:
    return SourceError(
        f"server {server.host[0]}:{server.host[1]} has not yet what {what}",
        hint="The server is behind. Wait until it has caught up, then run again.",
    )


def _statement(table: str, definition: Definition, after: Json, limit: int, where: str) -> str:
    conditions = [f"({definition.behind(after)})"] if after is not None else []
    conditions += [f"({where}\n)"] if where else []
    clause = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return (  # names are quoted, values are literals; the condition is the operator's own
        f"SELECT {definition.expressions()} FROM {quoted_table(table)} FORCE INDEX ({quoted(definition.index)})"  # noqa: S608
        f"{clause} ORDER BY {definition.order_by()} LIMIT {int(limit)}"
    )


def _check_layouts(definition: Definition, result: Result) -> None:
    """Refuse rows whose values lie otherwise than the decoder takes them."""
    columns = definition.table.schema.columns
    for column, one, layout in zip(columns, definition.table.types, result.layouts, strict=True):
        if chunks.layout_of(one.code) != layout:
            raise SourceError(f"column {column.name} of table {definition.table.schema.table} has the type "
                              f"{column.native}, and the server sends another one")  # fmt: skip


def _last_key(definition: Definition, result: Result) -> Json:
    if not result.rows:
        return None
    row = np.frombuffer(result.content, np.uint8)[result.last :]
    types = definition.table.types
    layout = np.array([chunks.layout_of(one.code) for one in types], np.int64)
    shape = (len(types), 1)
    offsets, lengths, states = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.uint8)
    if not select_kernel.find_values(row, layout, offsets, lengths, states):
        raise SourceError(f"a row of table {definition.table.schema.table} cannot be read")
    places = [(int(offsets[c, 0]), int(lengths[c, 0])) for c in definition.order]
    return [
        key_value(types[c], row[place : place + size].tobytes())
        for c, (place, size) in zip(definition.order, places, strict=True)
    ]


def _is_versioned(db: Any, server: Server, table: str) -> bool:
    created = query(db, server.host, f"SHOW CREATE TABLE {quoted_table(table)}")
    return "WITH SYSTEM VERSIONING" in str(created[0][1]).rpartition(")")[2]


def _engine(db: Any, server: Server, table: str) -> str:
    """Return the engine of a table, in small letters."""
    database, name = (f"_utf8mb4 x'{part.encode().hex()}'" for part in table.split(".", 1))
    rows = query(
        db,
        server.host,
        "SELECT engine FROM information_schema.tables "  # noqa: S608  # literals
        f"WHERE table_schema = {database} AND table_name = {name}",
    )
    if not rows:
        raise TableGoneError(f"table {table} does not exist any more")
    return str(rows[0][0]).lower()


def _needs_lock(server: Server, engine: str) -> bool:
    """Return whether a snapshot that sees a table exactly needs a lock."""
    return not server.is_mariadb or engine != _SNAPSHOT_ENGINE


def _begin_at(db: Any, server: Server) -> tuple[str, int]:
    """Begin a transaction of MariaDB with a snapshot; return the place in the log that belongs to it."""
    query(db, server.host, _BEGIN)
    status = dict(query(db, server.host, "SHOW STATUS LIKE 'binlog_snapshot_%'"))
    return str(status["Binlog_snapshot_file"]), int(status["Binlog_snapshot_position"])


@contextlib.contextmanager
def _kept(db: Any, server: Server, table: str) -> Iterator[None]:
    """Keep a table as it is called and defined; writers do not wait."""
    query(db, server.host, "START TRANSACTION READ ONLY")
    try:
        query(db, server.host, f"SELECT 1 FROM {quoted_table(table)} LIMIT 0")  # noqa: S608  # a quoted name
        yield
    finally:
        query(db, server.host, "COMMIT")


def _check_may_lock(db: Any, server: Server, table: str) -> None:
    """Refuse a user who may not lock a table. It tries a name that no table has: nobody waits for it."""
    nobody = f"{table.partition('.')[0]}.firnline-{secrets.token_hex(8)}"
    try:
        query(db, server.host, f"LOCK TABLES {quoted_table(nobody)} READ")
    except (ConfigError, SourceError) as error:
        if error_number(error) == _NO_DATABASE_RIGHT:
            raise _may_not_lock(db, server, table) from error


def _may_not_lock(db: Any, server: Server, table: str) -> ConfigError:
    name, account = _account(db, server)
    database = quoted(table.partition(".")[0])
    return ConfigError(
        f"user {name} has not the right LOCK TABLES, without which table {table} cannot be read: its snapshot begins "
        "under a lock",
        hint=f"Run on the server: GRANT LOCK TABLES ON {database}.* TO {account}; "
        "or capture changes alone (snapshot: never).",
    )


def _may_not_select(db: Any, server: Server, table: str) -> ConfigError:
    """Return the error of a table whose rows the user may not read; the server does not say whether it exists."""
    name, account = _account(db, server)
    return ConfigError(
        f"user {name} has not the right to read table {table}, or there is no such table",
        hint=f"Run on the server: GRANT SELECT ON {quoted_table(table)} TO {account};",
        **{UNREADABLE: table},
    )


def _account(db: Any, server: Server) -> tuple[str, str]:
    """Return the name of the user, and user and host as statements write them."""
    name, _, host = str(query(db, server.host, "SELECT CURRENT_USER()")[0][0]).rpartition("@")
    return name, "@".join("'" + part.replace("\\", "\\\\").replace("'", "''") + "'" for part in (name, host))


@contextlib.contextmanager
def _locked(db: Any, server: Server, table: str) -> Iterator[None]:
    """Hold a table against writers."""
    try:
        with _errors_of(db, server, table):
            query(db, server.host, f"LOCK TABLES {quoted_table(table)} READ")
    except (ConfigError, SourceError) as error:
        number = error_number(error)
        if number == _NO_DATABASE_RIGHT:
            raise _may_not_lock(db, server, table) from error
        if number == _LOCK_TIMEOUT:
            raise SourceError(f"a transaction that changed table {table}, or a lock, stays open: {error}") from error
        raise
    try:
        yield
    finally:
        query(db, server.host, "UNLOCK TABLES")


@contextlib.contextmanager
def _errors_of(db: Any, server: Server, table: str, where: str = "") -> Iterator[None]:
    """Turn errors of the server about a table into the contract's."""
    try:
        yield
    except SourceError as error:
        number = error_number(error)
        if number in _GONE:
            raise TableGoneError(f"table {table} does not exist any more") from error
        if number in _REFUSED:
            raise _may_not_select(db, server, table) from error
        if where and number in _WRONG_CONDITIONS:
            raise ConfigError(f"the condition for table {table} cannot be used: {error}", hint="Mend it.") from error
        raise

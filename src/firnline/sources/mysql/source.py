"""The MySQL and MariaDB source, in the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from firnline.errors import ConfigError, DamagedError, SourceError
from firnline.sources.base import LogLag
from firnline.sources.cdc.column_names import names_here, renamings
from firnline.sources.cdc.log import LogStream, TableReader
from firnline.sources.cdc.position import LogPosition
from firnline.sources.cdc.source import LogSource
from firnline.sources.cdc.tables import name_like
from firnline.sources.mysql.connect import Dsn, connect_any
from firnline.sources.mysql.events import place_order
from firnline.sources.mysql.gtid import GtidSet
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.mysql.server import (
    Server,
    cascade_lack,
    check_replica,
    file_created,
    find_columns,
    find_dotted,
    find_key,
    find_lacks,
    find_tables,
    find_versioned,
    gtids_at,
    log_filters,
    logs_cascades,
    purged_text,
    query,
    read_log,
    read_server,
    replica_filters,
    server_gtids,
    setting_remarks,
)
from firnline.sources.mysql.statements import makes_cascade
from firnline.sources.mysql.stream import MySqlStream
from firnline.sources.mysql.table_reader import MySqlTableReader
from firnline.types import Json


class MySqlSource(LogSource):
    """The tables of a MySQL or MariaDB server."""

    kind = "mysql"
    never_captured = ("mysql", "sys", "information_schema", "performance_schema")
    key_hint = "Give it one (ALTER TABLE ... ADD PRIMARY KEY)."

    def __init__(self, options: MySqlSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> None:
        super().__init__(options, default_schema=options.database, once=once, moved=moved)
        self._mysql = options
        self._versioned: tuple[str, ...] | None = None  # captured tables of this kind; None: not asked yet

    def open_stream(self) -> LogStream:
        return self._stream()

    def _stream(self) -> MySqlStream:
        assert self._mysql.server_id is not None
        return MySqlStream(
            self._mysql.dsn,
            self._tables.covers,
            self._mysql.server_id,
            partial_inserts=self._mysql.partial_inserts,
            check_tables=self._check_tables,
        )

    def open_tables(self) -> TableReader:
        replica = self._mysql.snapshot_dsn
        if not replica:
            return MySqlTableReader(self._mysql.dsn, self._tables.covers)
        return MySqlTableReader(replica, self._tables.covers, check=self._check_replica)

    def _check_replica(self, db: Any, server: Server) -> None:
        """Refuse a server to read tables from that is no replica of the one whose log is read."""
        if filters := replica_filters(db, server):
            raise ConfigError(
                f"replica {server.host[0]}:{server.host[1]} (snapshot_dsn) leaves rows out: {', '.join(filters)}",
                hint="Name a replica without filters, or leave snapshot_dsn out.",
            )
        gtids = server_gtids(db, server)  # before those of the other one: it has at least as many
        with self._connected() as (primary, log_server):
            check_replica(server, gtids, log_server, server_gtids(primary, log_server))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[tuple[Any, Server]]:
        """Open a connection to the first host that answers."""
        dsn = Dsn.parse(self._mysql.dsn)
        db, host = connect_any(dsn, dsn.hosts)
        try:
            yield db, read_server(db, host)
        finally:
            db.close()

    def describe_place(self, place: Json) -> dict[str, Json]:
        return describe_place(place)

    def read_key(self, table: str) -> tuple[str, ...] | None:
        with self._connected() as (db, server):
            if table not in find_tables(db, server):
                return None
            if table in find_versioned(db, server):
                return ()
            return names_here(find_key(db, server, table), find_columns(db, server, table))

    def find_names(self) -> set[str]:
        with self._connected() as (db, server):
            return find_tables(db, server)

    def check(self) -> None:
        self._stream().check()
        if self._mysql.snapshot_dsn:
            with contextlib.closing(self.open_tables()) as reader:
                reader.find_end()  # connects, and checks the replica

    def remarks(self) -> list[str]:
        user = Dsn.parse(self._mysql.dsn).user
        with self._connected() as (db, server):
            tables = find_tables(db, server)
            told = self._check_tables(db, server)
            told += [
                f"table {table} is system-versioned: its changes can be appended, not upserted, as the log has rows of "
                "the past beside those of now; rows that are there before are not read"
                for table in self.find_unkeyed()
            ]
            filters = ", ".join(log_filters(db, server))
            renamed = [
                text
                for table in sorted(tables)
                if self._tables.covers(table)
                for text in renamings(table, find_columns(db, server, table))
            ]
        missing = [name for name in self._tables.names if name not in tables and self._tables.covers(name)]
        with contextlib.closing(self.open_tables()) as reader:
            unreadable = reader.find_unreadable(missing)
        for name in missing:
            known = f", or user {user} may not read it. {unreadable[name].hint}" if name in unreadable else ""
            told.append(f"table {name} does not exist yet{known or '. ' + name_like(name, tables)}".rstrip(". "))
        if not told and not any(self._tables.covers(table) for table in tables):
            told.append(f"no table that user {user} may read matches `tables`")
        if filters:
            told.append(
                f"{filters} is set: whether DDL and TRUNCATE are in the log depends on the database in use (USE), "
                "not on that of the table"
            )
        return [*told, *renamed, *setting_remarks(server)]

    def _check_tables(self, db: Any, server: Server, ddl: str = "", named: Sequence[str] = ()) -> list[str]:
        """Return what the log lacks of captured tables, as far as the spec accepts it; `ddl` is a statement of the log,
        which names tables (none: any).

        Raises:
            ConfigError: the log lacks changes, and the spec does not accept it.
        """
        self._check_names(db, server)
        self._versioned = tuple(table for table in find_versioned(db, server) if self._tables.covers(table))
        captured = {table for table in find_tables(db, server) if self._tables.covers(table)}
        databases = {table.partition(".")[0] for table in (*captured, *self._tables.names)}
        lacks = find_lacks(db, server, captured.intersection(named) if named else captured, databases)
        if makes_cascade(ddl) and not lacks and not logs_cascades(server):
            lacks = [cascade_lack(server, f"a foreign key of the statement {' '.join(ddl.split())[:200]!r}")]
        refused = [one for one in lacks if not one.is_cascade or not self._mysql.accept_cascades]
        if refused:
            hints = dict.fromkeys(one.hint for one in refused)
            raise ConfigError("; ".join(one.what for one in refused), hint=" ".join(hints))
        return [one.what for one in lacks]

    def find_unkeyed(self) -> tuple[str, ...]:
        if self._versioned is None:  # spool files of an earlier run are read before the server is asked
            try:
                with self._connected() as (db, server):
                    self._versioned = tuple(one for one in find_versioned(db, server) if self._tables.covers(one))
            except (SourceError, ConfigError):
                return ()
        return self._versioned

    def _check_names(self, db: Any, server: Server) -> None:
        """Refuse names in `tables` that match no table, and tables whose names cannot be told apart."""
        patterns = [one for one in self._tables.patterns if one != one.lower()]
        if patterns and server.settings.get("lower_case_table_names") == "1":
            raise ConfigError(
                f"server {server.host[0]}:{server.host[1]} has lower_case_table_names = 1: all its names are in lower "
                f"case, and {', '.join(patterns)} matches none",
                hint="Write the names in `tables`, and the database in dsn, in lower case: "
                f"{', '.join(one.lower() for one in patterns)}.",
            )
        if tables := [one for one in find_dotted(db, server) if self._tables.covers(one)]:
            raise ConfigError(
                f"{', '.join(tables)}: a database with a dot in its name cannot be captured",
                hint="Leave it out of `tables`, or move its tables to a database without a dot: RENAME TABLE.",
            )

    def find_place(self, place: Json, words: str) -> Json:
        if words == "end":
            return self._stream().end_position()
        file, _, pos = words.rpartition(":")
        with self._connected() as (db, server):
            if server.has_gtids and not server.is_mariadb:
                return {**place, "gtid_set": _executed(db, server, words), "last": None}
            log = read_log(db, server)
            is_there = pos.isdigit() and file in log.sizes and int(pos) <= log.sizes[file]
            gtids = gtids_at(db, server, file, int(pos)) if is_there and server.is_mariadb else ""
            if not is_there or (server.is_mariadb and not gtids):
                raise ConfigError(
                    f"the log of server {server.host[0]}:{server.host[1]} has no place {words}",
                    hint="Write the end of a transaction as FILE:POSITION, or end. SHOW BINARY LOGS lists the files.",
                )
        created = file_created(Dsn.parse(self._mysql.dsn), server, file) or 0
        found = {**place, "file": file, "pos": int(pos), "created": created, "server_uuid": server.uuid}
        return {**found, "gtid_set": gtids or None, "previous": "", "last": None}

    def place_without(self, place: Json, words: str) -> Json:
        with self._connected() as (db, server):
            if server.is_mariadb or place["gtid_set"] is None:
                return super().place_without(place, words)
            one = _executed(db, server, words)
        return {**place, "gtid_set": str(GtidSet.parse(f"{place['gtid_set']},{one}" if place["gtid_set"] else one))}

    def distance(self, old: Json, new: Json) -> int:
        if old["gtid_set"] is not None and new["gtid_set"] is not None and old["kind"] == "mysql":
            before, after = GtidSet.parse(old["gtid_set"]), GtidSet.parse(new["gtid_set"])
            if before.minus(after):
                return -1
            return 1 if after.minus(before) else 0
        if old["file"] == new["file"]:
            return int(new["pos"]) - int(old["pos"])
        return 1 if place_order(new["file"], new["pos"]) > place_order(old["file"], old["pos"]) else -1

    def place_text(self, place: Json) -> str:
        return str(place["gtid_set"] or f"{place['file']}:{place['pos']}")

    def log_lag(self, position: Json) -> LogLag:
        lag, known = super().log_lag(position), LogPosition.from_json(position, self.kind)
        if known.place is None or lag.unknown or lag.lag_bytes is not None:
            return lag
        # The log from the position on is gone; what a run has spooled of it is enough.
        spooled = self._find_spooled(known)
        end = spooled[-1].end.place if spooled else known.place
        with contextlib.suppress(SourceError, ConfigError), self._connected() as (db, server):  # it answered just now
            log = read_log(db, server)
            if end["server_uuid"] == server.uuid and end["file"] not in log.sizes:
                return replace(
                    lag, alarm=f"{purged_text(server, end['file'])}: the next run stops, and says how to go on"
                )
        return lag

    def measure(self, place: Json) -> LogLag:
        with self._connected() as (db, server):
            log = read_log(db, server)
        end = f"{log.file}:{log.pos}"
        if place is None:
            return LogLag(end, "")
        behind = log.bytes_behind(place)
        at = int((place["last"] or {}).get("at") or 0)
        seconds = round(max(0.0, (log.now - at) / 1e6), 3) if at else None
        return LogLag(end, f"{place['file']}:{place['pos']}", behind, 0.0 if behind == 0 else seconds)


def _executed(db: Any, server: Server, words: str) -> str:
    """Return a GTID set that a person named, which the server has executed.

    Raises:
        ConfigError: it is none, or the server has not executed all of it.
    """
    try:
        named = GtidSet.parse(words)
    except (ValueError, DamagedError) as error:
        hint = "Write UUID:NUMBERS, as the server does, or end."
        raise ConfigError(f"{words!r} is no GTID set: {error}", hint=hint) from None
    executed = GtidSet.parse(str(query(db, server.host, "SELECT @@GLOBAL.gtid_executed")[0][0]))
    if not str(named) or named.minus(executed):
        raise ConfigError(f"server {server.host[0]}:{server.host[1]} has not executed {words}")
    return str(named)


def describe_place(place: Json) -> dict[str, Json]:
    """Return a place for people."""
    if place is None:
        return {}
    found: dict[str, Json] = {"file": place["file"], "pos": place["pos"]}
    return {**found, "gtid_set": place["gtid_set"]} if place["gtid_set"] else found

"""The MySQL and MariaDB source, in the driver."""

from __future__ import annotations

from firnline.sources.base import LogLag
from firnline.sources.cdc.log import LogStream, TableReader
from firnline.sources.cdc.source import LogSource
from firnline.sources.mysql.connect import Dsn, connect_any
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.mysql.server import find_cascades, find_key, find_tables, read_log, read_server
from firnline.sources.mysql.stream import MySqlStream
from firnline.sources.mysql.table_reader import MySqlTableReader
from firnline.types import Json


class MySqlSource(LogSource):
    """The tables of a MySQL or MariaDB server."""

    kind = "mysql"
    key_hint = "Give it one (ALTER TABLE ... ADD PRIMARY KEY)."

    def __init__(self, options: MySqlSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> None:
        super().__init__(options, default_schema=options.database, once=once, moved=moved)
        self._mysql = options

    def open_stream(self) -> LogStream:
        return self._stream()

    def _stream(self) -> MySqlStream:
        assert self._mysql.server_id is not None
        return MySqlStream(
            self._mysql.dsn, self._tables.covers, self._mysql.server_id, partial_inserts=self._mysql.partial_inserts
        )

    def open_tables(self) -> TableReader:
        return MySqlTableReader(self._mysql.dsn, self._tables.covers)

    def describe_place(self, place: Json) -> dict[str, Json]:
        return describe_place(place)

    def read_key(self, table: str) -> tuple[str, ...] | None:
        dsn = Dsn.parse(self._mysql.dsn)
        db, host = connect_any(dsn, dsn.hosts)
        try:
            server = read_server(db, host)
            return find_key(db, server, table) if table in find_tables(db, server) else None
        finally:
            db.close()

    def check(self) -> None:
        self._stream().check()

    def remarks(self) -> list[str]:
        dsn = Dsn.parse(self._mysql.dsn)
        db, host = connect_any(dsn, dsn.hosts)
        try:
            server = read_server(db, host)
            tables = find_tables(db, server)
            captured = [table for table in tables if self._tables.covers(table)]
            cascades = find_cascades(db, server, captured)
        finally:
            db.close()
        told = [
            f"table {name} does not exist yet, or user {dsn.user} may not read it"
            for name in self._tables.names
            if name not in tables
        ]
        if not told and not captured:
            told.append(f"no table that user {dsn.user} may read matches `tables`")
        told += [
            f"table {table}: its foreign key {key} changes rows by itself (ON DELETE or ON UPDATE), and the binary log "
            "of this server does not have these changes; MySQL 9.6 and later log them"
            for table, key in cascades
        ]
        return told

    def measure(self, place: Json) -> LogLag:
        dsn = Dsn.parse(self._mysql.dsn)
        db, host = connect_any(dsn, dsn.hosts)
        try:
            log = read_log(db, read_server(db, host))
        finally:
            db.close()
        end = f"{log.file}:{log.pos}"
        if place is None:
            return LogLag(end, "")
        behind = log.bytes_behind(place)
        at = int((place["last"] or {}).get("at") or 0)
        seconds = round(max(0.0, (log.now - at) / 1e6), 3) if at else None
        return LogLag(end, f"{place['file']}:{place['pos']}", behind, 0.0 if behind == 0 else seconds)


def describe_place(place: Json) -> dict[str, Json]:
    """Return a place for people."""
    if place is None:
        return {}
    found: dict[str, Json] = {"file": place["file"], "pos": place["pos"]}
    return {**found, "gtid_set": place["gtid_set"]} if place["gtid_set"] else found

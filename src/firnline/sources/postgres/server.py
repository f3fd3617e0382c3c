"""Ordinary sessions with a captured PostgreSQL server: its identity, its settings, publication and slot."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.sql import SQL, Identifier, Literal

from firnline.errors import ConfigError, FirnlineError, SourceError, SourceGapError
from firnline.faults import fault_point
from firnline.postgres_client import DSN_HINT, NETWORK_DEFAULTS
from firnline.sources.cdc.log import GAP_HINT
from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.postgres.messages import parse_lsn

OWN_SCHEMA = "firnline"  # of Firnline's own tables, which are never captured
OLDEST_VERSION = 14
PLUGIN = "pgoutput"
# Text of values does not depend on the settings of server, database or role.
PLAIN_TEXT = (
    "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c bytea_output=hex -c timezone=UTC "
    "-c client_encoding=UTF8 -c lc_monetary=C"
)


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot: the server keeps its log from here on for the slot's reader."""

    name: str
    confirmed: int  # the server may forget what lies before
    active_pid: int | None = None  # of its reader


@dataclass(frozen=True, slots=True)
class LogState:
    """The server's log at a moment."""

    end: int
    now: int  # by the server's clock, microseconds since 1970
    retained_bytes: int | None  # that the slot keeps; None: there is no such slot, or it keeps nothing


@dataclass(frozen=True, slots=True)
class CapturedTable:
    """A table of the publication, as the catalogue describes it now."""

    name: str  # schema.table
    identity: str  # d, n, f, i: what the log says of old rows
    primary_key: tuple[str, ...]
    rows: int  # the server's own estimate
    identity_key: tuple[str, ...] = ()  # of the index that the log names old rows by
    oid: int = 0  # another table that takes the name has another one
    is_partitioned: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The columns by which changes name a row; empty if there are none."""
        return self.identity_key if self.identity == "i" else self.primary_key

    @property
    def has_identity(self) -> bool:
        return self.identity in "fi" or (self.identity == "d" and bool(self.primary_key))


class PostgresServer:
    """One captured database. Each call uses a connection of its own; the password is never shown."""

    def __init__(self, dsn: str, place: str) -> None:
        try:
            self._given: dict[str, Any] = dict(psycopg.conninfo.conninfo_to_dict(dsn))
        except psycopg.Error:  # its message quotes the dsn
            raise ConfigError(
                "the dsn of the source cannot be read",
                hint=DSN_HINT,
            ) from None
        self.place = place

    def conninfo(self, name: str, **more: str) -> str:
        """Return the connection string of a session whose values are plain text."""
        options = " ".join(part for part in (self._given.get("options"), PLAIN_TEXT) if part)
        values = {**NETWORK_DEFAULTS, **self._given, "options": options, "application_name": name, **more}
        return psycopg.conninfo.make_conninfo("", **values)

    @contextlib.contextmanager
    def session(self, name: str = "firnline") -> Iterator[Connection[tuple[Any, ...]]]:
        """Open a session in which every statement is a transaction.

        Raises:
            SourceError: the server does not answer, or refuses.
        """
        try:
            with psycopg.connect(self.conninfo(name), autocommit=True, prepare_threshold=None) as connection:
                yield connection
        except psycopg.Error as error:
            raise self.translate(error) from error

    def translate(self, error: psycopg.Error) -> SourceError:
        """Return an error of the server as ours, without secrets."""
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        password = self._given.get("password")
        words = text.replace(password, "***") if password else text
        return SourceError(
            f"{self.place}: {words}",
            hint="Check the server, and user, password and database of `dsn`; then run again, nothing was lost.",
        )

    # -- settings -------------------------------------------------------------------------------------

    def check_settings(self) -> None:
        """Check what logical replication needs.

        Raises:
            ConfigError: a setting or a right is missing; the hint has the statement.
        """
        with self.session() as db:
            version = db.info.server_version // 10000
            if version < OLDEST_VERSION:
                raise ConfigError(f"{self.place}: PostgreSQL {version} is too old; {OLDEST_VERSION} or later is needed")
            level = _one(db, "SHOW wal_level")[0]
            if level != "logical":
                raise ConfigError(
                    f"{self.place}: wal_level is {level}, and change capture needs logical",
                    hint="ALTER SYSTEM SET wal_level = logical; then restart the server.",
                )
            role, may = _one(
                db, "SELECT rolname, rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user"
            )
            if not may and not self._is_cloud_replica(db):
                raise ConfigError(
                    f"{self.place}: the role {role} may not read the log",
                    hint=f'ALTER ROLE "{role}" REPLICATION;',
                )

    @staticmethod
    def _is_cloud_replica(db: Connection[tuple[Any, ...]]) -> bool:
        """Return whether a role of a hosted server gives the right by membership."""
        query = "SELECT count(*) FROM pg_roles WHERE rolname = 'rds_replication' AND pg_has_role(oid, 'member')"
        return bool(_one(db, query)[0])

    def check_room(self, slot: str) -> None:
        """Check that the server has room for a slot that does not exist yet.

        Raises:
            ConfigError: it has none; the hint has the statements.
        """
        query = """
            SELECT count(*), current_setting('max_replication_slots')::int, bool_or(slot_name = %s)
            FROM pg_replication_slots"""
        with self.session() as db:
            used, most, exists = _one(db, query, slot)
        if not exists and used >= most:
            raise self._no_slot(most)

    def _no_slot(self, most: int) -> ConfigError:
        return ConfigError(
            f"{self.place}: all {most} replication slots are in use",
            hint=f"ALTER SYSTEM SET max_replication_slots = {most + 10}; then restart the server. Or drop one that "
            "nobody uses: SELECT pg_drop_replication_slot('NAME');",
        )

    def check_may_read(self, tables: Sequence[CapturedTable]) -> None:
        """Check that the role may read the rows of the tables, for snapshots.

        Raises:
            ConfigError: it may not; the hint has the statement.
        """
        query = """
            SELECT n.nspname, n.nspname || '.' || c.relname, has_schema_privilege(n.oid, 'USAGE'), current_user::text
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname || '.' || c.relname = ANY(%s)
              AND NOT (has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'))
            ORDER BY 2"""
        with self.session() as db:
            found = db.execute(query, ([table.name for table in tables],)).fetchall()
        if found:
            role, names = found[0][3], [row[1] for row in found]
            closed = ", ".join(dict.fromkeys(sql_name(row[0]) for row in found if not row[2]))
            usage = f'GRANT USAGE ON SCHEMA {closed} TO "{role}"; ' if closed else ""
            raise ConfigError(
                f"{self.place}: the role {role} may not read {', '.join(names)}",
                hint=f'{usage}GRANT SELECT ON {", ".join(map(sql_name, names))} TO "{role}"; or write '
                "`snapshot: never` into the source, to capture changes alone.",
            )

    def end_lsn(self) -> int:
        """Return the end of what the server's log holds for sure."""
        query = "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END"
        with self.session() as db:
            return parse_lsn(str(_one(db, query)[0]))

    def read_log(self, slot: str) -> LogState:
        """Return where the log ends now, and how much of it a slot keeps."""
        query = """
            SELECT end_lsn, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
                   (SELECT pg_wal_lsn_diff(end_lsn, restart_lsn)::bigint FROM pg_replication_slots WHERE slot_name = %s)
            FROM (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                         ELSE pg_current_wal_flush_lsn() END AS end_lsn) log"""
        with self.session() as db:
            end, now, retained = _one(db, query, slot)
        return LogState(parse_lsn(str(end)), int(now), max(0, int(retained)) if retained is not None else None)

    # -- publication ----------------------------------------------------------------------------------

    def find_tables(self, patterns: TablePatterns) -> list[CapturedTable]:
        """Return the tables of the database that the spec names, with what the log will say of them."""
        query = """
            SELECT n.nspname, c.relname, c.oid, c.relkind = 'p', c.relreplident::text, c.reltuples,
                   (SELECT array_agg(a.attname ORDER BY k.place) FROM pg_index i
                           CROSS JOIN unnest(i.indkey) WITH ORDINALITY k (attnum, place)
                           JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                    WHERE i.indrelid = c.oid AND i.indisprimary AND k.place <= i.indnkeyatts),
                   (SELECT array_agg(a.attname ORDER BY k.place) FROM pg_index i
                           CROSS JOIN unnest(i.indkey) WITH ORDINALITY k (attnum, place)
                           JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                    WHERE i.indrelid = c.oid AND i.indisreplident AND k.place <= i.indnkeyatts)
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE (c.relkind = 'p' OR c.relkind = 'r' AND NOT c.relispartition) AND c.relpersistence = 'p'
              AND n.nspname NOT IN ('pg_catalog', 'information_schema', %s) AND n.nspname NOT LIKE 'pg\\_%%'
            ORDER BY 1, 2"""
        with self.session() as db:
            found = [
                CapturedTable(
                    f"{schema}.{name}", identity, tuple(key or ()), max(0, int(rows)), tuple(index or ()), oid, is_root
                )
                for schema, name, oid, is_root, identity, rows, key, index in db.execute(
                    query, (OWN_SCHEMA,)
                ).fetchall()
            ]
        return [table for table in found if patterns.covers(table.name)]

    def find_key(self, table: str) -> tuple[str, ...] | None:
        """Return the columns that identify a row of a table (`schema.table`) in the log: those of its replica identity,
        with identity FULL those of the primary key. None: there is no such table."""
        query = """
            SELECT c.relreplident <> 'n', (SELECT array_agg(a.attname ORDER BY k.place) FROM pg_index i
                           CROSS JOIN unnest(i.indkey) WITH ORDINALITY k (attnum, place)
                           JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                    WHERE i.indrelid = c.oid AND k.attnum > 0 AND k.place <= i.indnkeyatts
                      AND CASE WHEN c.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END)
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')"""
        schema, _, name = table.partition(".")
        with self.session() as db:
            found = db.execute(query, (schema, name)).fetchone()
        return None if found is None else tuple(found[1] or ()) if found[0] else ()

    def find_columns(self, table: str) -> list[str]:
        """Return the columns of a table (`schema.table`), in their order."""
        query = """
            SELECT a.attname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            WHERE n.nspname = %s AND c.relname = %s ORDER BY a.attnum"""
        schema, _, name = table.partition(".")
        with self.session() as db:
            return [str(row[0]) for row in db.execute(query, (schema, name)).fetchall()]

    def published(self, publication: str) -> dict[str, bool] | None:
        """Return the tables of a publication, each with whether its updates and deletes are published; None if there
        is no such publication."""
        with self.session() as db:
            facts = db.execute(
                "SELECT pubupdate OR pubdelete FROM pg_publication WHERE pubname = %s", (publication,)
            ).fetchone()
            if facts is None:
                return None
            rows = db.execute(
                "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = %s", (publication,)
            ).fetchall()
            return {f"{schema}.{name}": bool(facts[0]) for schema, name in rows}

    def require_publication(self, publication: str, tables: Sequence[CapturedTable]) -> None:
        """Check that a publication of somebody else exists, and has the changes of partitioned tables.

        Raises:
            ConfigError: it does not; the hint has the statement.
        """
        if self.published(publication) is None:
            names = ", ".join(sql_name(table.name) for table in tables) or "..."
            raise ConfigError(
                f"{self.place}: there is no publication {publication}",
                hint=f"As the owner of the tables: CREATE PUBLICATION {sql_name(publication)} FOR TABLE {names} WITH "
                "(publish_via_partition_root = true); or leave `publication` out, if the role of `dsn` owns them.",
            )

        for error in self.find_unrooted(publication, tables).values():
            raise error

    def find_unrooted(self, publication: str, tables: Sequence[CapturedTable]) -> dict[str, FirnlineError]:
        """Return the partitioned tables whose changes a publication has under the names of their partitions: none of
        them would be captured. With the reason, whose hint has the statement."""
        query = """
            SELECT c.oid FROM pg_class c, pg_publication p
            WHERE c.oid = ANY (%s) AND p.pubname = %s AND NOT p.pubviaroot
              AND (p.puballtables OR EXISTS (
                  SELECT FROM pg_partition_tree(c.oid) t JOIN pg_class k ON k.oid = t.relid
                         JOIN pg_namespace n ON n.oid = k.relnamespace
                  WHERE EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = k.oid)
                     OR EXISTS (SELECT FROM pg_publication_tables l WHERE l.pubname = p.pubname
                                AND l.schemaname = n.nspname AND l.tablename = k.relname)))"""
        roots = {table.oid: table.name for table in tables if table.is_partitioned}
        if not roots:
            return {}
        with self.session() as db:
            found = [roots[oid] for (oid,) in db.execute(query, (list(roots), publication)).fetchall()]
        return {
            name: ConfigError(
                f"{self.place}: publication {publication} has the partitions of {name}, and not the table, so that "
                "none of its changes is captured",
                hint=f"ALTER PUBLICATION {sql_name(publication)} SET (publish_via_partition_root = true);",
            )
            for name in sorted(found)
        }

    def check_may_publish(self, publication: str, tables: Sequence[CapturedTable]) -> None:
        """Check that the role may create the publications of these tables, or add those that are missing.

        Raises:
            ConfigError: it may not; the hint has the statement.
        """
        known = {name: self.published(name) for name in (publication, inserts_only(publication))}
        published = {table for found in known.values() for table in found or {}}
        missing = [table.name for table in tables if table.name not in published]
        if not missing and known[publication] is not None:
            return
        with self.session() as db:
            role, may = _one(
                db, "SELECT current_user::text, has_database_privilege(current_user, current_database(), 'CREATE')"
            )
            if not may and known[publication] is None:
                raise ConfigError(
                    f"{self.place}: the role {role} may not create a publication",
                    hint=f'GRANT CREATE ON DATABASE "{db.info.dbname}" TO "{role}"; or set `publication` to one that '
                    "the owner of the tables creates.",
                )
            query = "SELECT pg_has_role(current_user, relowner, 'USAGE') FROM pg_class WHERE oid = %s::regclass"
            others = [name for name in missing if not _one(db, query, sql_name(name))[0]]
        if others:
            raise ConfigError(
                f"{self.place}: the role {role} does not own {', '.join(others)}, so that it cannot publish the table",
                hint=f"As the owner: CREATE PUBLICATION firnline FOR TABLE {', '.join(map(sql_name, others))} WITH "
                "(publish_via_partition_root = true); then write `publication: firnline` into the source.",
            )

    def ensure_publication(self, publication: str, tables: Sequence[CapturedTable]) -> None:
        """Create a publication of the tables, or add the missing ones. Tables without a replica identity go into a
        second one that publishes inserts only: else the server would refuse the application's own updates.

        Raises:
            SourceError: the role may not.
        """
        for name, wanted, actions in (
            (publication, [t for t in tables if t.has_identity], "insert, update, delete, truncate"),
            (inserts_only(publication), [t for t in tables if not t.has_identity], "insert, truncate"),
        ):
            known = self.published(name)
            missing = [t for t in wanted if known is None or t.name not in known]
            if known is None:  # also without tables: the log is read from before one of them comes
                statement = SQL(
                    "CREATE PUBLICATION {} {} WITH (publish = {}, publish_via_partition_root = true)"
                ).format(Identifier(name), _for_tables("FOR TABLE", missing), Literal(actions))
            elif known is not None and missing:
                statement = SQL("ALTER PUBLICATION {} {}").format(Identifier(name), _for_tables("ADD TABLE", missing))
            else:
                continue
            fault_point("postgres.publication.before")
            with self.session() as db, contextlib.suppress(psycopg.errors.DuplicateObject):
                db.execute(statement)
            fault_point("postgres.publication.after")

    # -- slot -----------------------------------------------------------------------------------------

    def find_slot(self, slot: str) -> Slot | None:
        """Return a slot of this database.

        Raises:
            ConfigError: a slot of that name serves something else.
        """
        with self.session() as db:
            reason = "invalidation_reason" if db.info.server_version >= 170000 else "NULL"
            row = db.execute(
                SQL(
                    "SELECT plugin, database = current_database(), confirmed_flush_lsn, active_pid, wal_status, {} "
                    "FROM pg_replication_slots WHERE slot_name = %s"
                ).format(SQL(reason)),
                (slot,),
            ).fetchone()
        if row is None:
            return None
        plugin, ours, confirmed, pid, status, why = row
        if plugin != PLUGIN or not ours:
            raise ConfigError(
                f"{self.place}: the slot {slot} exists, and serves another database or plugin",
                hint="Set `slot` to another name.",
            )
        if confirmed is None or status == "lost":
            raise SourceGapError(
                f"{self.place}: the slot {slot} has lost its log ({why or status})",
                hint=GAP_HINT,
            )
        return Slot(slot, parse_lsn(str(confirmed)), pid)

    def create_slot(self, slot: str) -> Slot:
        """Create a slot. The server may wait for transactions that are open now.

        Raises:
            ConfigError: the server has no room for one.
            SourceError: it does not answer.
        """
        fault_point("postgres.slot.before")
        try:
            with psycopg.connect(self.conninfo("firnline"), autocommit=True) as db:
                lsn = _one(db, "SELECT lsn FROM pg_create_logical_replication_slot(%s, %s)", slot, PLUGIN)[0]
        except psycopg.errors.DuplicateObject:
            found = self.find_slot(slot)
            if found is not None:
                return found
            raise SourceError(f"{self.place}: the slot {slot} comes and goes") from None
        except psycopg.errors.ConfigurationLimitExceeded as error:
            with self.session() as db:
                raise self._no_slot(int(_one(db, "SHOW max_replication_slots")[0])) from error
        except psycopg.Error as error:
            raise self.translate(error) from error
        fault_point("postgres.slot.after")
        return Slot(slot, parse_lsn(str(lsn)))

    def drop_slot(self, slot: str) -> None:
        """Drop a slot that is of no use any more."""
        fault_point("postgres.slot.before")
        with self.session() as db, contextlib.suppress(psycopg.errors.UndefinedObject):
            db.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        fault_point("postgres.slot.after")

    def end_reader(self, pid: int) -> None:
        """End another reader of the slot."""
        with self.session() as db:
            db.execute("SELECT pg_terminate_backend(%s)", (pid,))


def inserts_only(publication: str) -> str:
    """Return the name of the publication of tables without a replica identity."""
    return f"{publication}_inserts"


def _for_tables(words: str, tables: Sequence[CapturedTable]) -> Any:
    if not tables:
        return SQL("")
    names = [Identifier(*table.name.split(".", 1)) for table in tables]
    return SQL("{} {}").format(SQL(words), SQL(", ").join(names))


_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")  # a name that SQL need not quote; behind a schema also if it is a keyword


def sql_name(name: str) -> str:
    """Return the name of a table, or of a publication, as SQL."""
    parts = name.split(".", 1)
    return ".".join(part if _PLAIN.fullmatch(part) else '"' + part.replace('"', '""') + '"' for part in parts)


def _one(db: Connection[tuple[Any, ...]], query: str, *values: object) -> tuple[Any, ...]:
    row = db.execute(query, values or None).fetchone()
    assert row is not None
    found: tuple[Any, ...] = row
    return found

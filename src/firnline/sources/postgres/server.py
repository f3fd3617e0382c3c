"""Ordinary sessions with a captured PostgreSQL server: its identity, its settings, publication and slot."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.sql import SQL, Composed, Identifier, Literal

from firnline.errors import ConfigError, FirnlineError, SourceError, SourceGapError
from firnline.faults import fault_point
from firnline.postgres_client import NETWORK_DEFAULTS, parse_dsn
from firnline.sources.cdc.log import AWAY, GAP_HINT, UNKNOWN_HOST, UNREADABLE, names_no_host
from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.postgres.messages import Description, parse_lsn

OWN_SCHEMA = "firnline"  # of Firnline's own tables, which are never captured
OLDEST_VERSION, FAILOVER_VERSION = 14, 17
PLUGIN = "pgoutput"
KINDS = ("insert", "update", "delete", "truncate")  # of changes that a publication may have
GENERATED_VERSION = 18  # from which on a publication may have generated columns
# Text of values does not depend on the settings of server, database or role. Rows that row security hides are an error:
# the log has them.
PLAIN_TEXT = (
    "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c bytea_output=hex -c timezone=UTC "
    "-c client_encoding=UTF8 -c lc_monetary=C -c row_security=off"
)


_AWAY = ("08", "57P")  # codes of a connection that is lost, and of a server that stops or starts
# What a server, in English, or the client says of a connection that no later try gets either, and what to do.
_REFUSED = (
    (
        r"authentication failed for user|no password supplied|role .* does not exist|not permitted to log in",
        "Correct user and password in `dsn`, then run again; nothing was lost.",
    ),
    (r"database .* does not exist", "Correct the database in `dsn` (psql -l lists them), then run again."),
    (r"permission denied for database", "GRANT CONNECT ON DATABASE ... TO the role of `dsn`, then run again."),
    (
        r"no pg_hba.conf entry|pg_hba.conf rejects",
        "Let the role connect from this host in pg_hba.conf of the server, then: SELECT pg_reload_conf();",
    ),
    (r"server does not support SSL", "Write sslmode=prefer into `dsn`, or turn on ssl in the server."),
    (r"certificate verify failed", "Write the certificate of the server's authority into `dsn`: sslrootcert=PATH."),
)
_RIGHTS = {"schema": "USAGE ON SCHEMA", "table": "SELECT ON", "view": "SELECT ON"}
_MAY_ANSWER = r"[Cc]onnection refused|timeout expired|starting up"  # of several hosts, one may answer later


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot: the server keeps its log from here on for the slot's reader."""

    name: str
    confirmed: int  # the server may forget what lies before
    active_pid: int | None = None  # of its reader
    failover: bool = False  # standbys copy it


@dataclass(frozen=True, slots=True)
class LogState:
    """The server's log at a moment."""

    end: int
    now: int  # by the server's clock, microseconds since 1970
    retained_bytes: int | None  # that the slot keeps; None: there is no such slot, or it keeps nothing
    has_slot: bool = True


@dataclass(frozen=True, slots=True)
class Identity:
    """What the log says of the old rows of a table, or of a partition, which has an identity of its own."""

    name: str  # schema.table
    kind: str  # d, n, f, i: relreplident
    key: tuple[str, ...]  # columns of the index of an identity i, else of the primary key
    unlogged: tuple[str, ...] = ()  # those of them that the log does not have: they are generated
    generated: tuple[str, ...] = ()  # all columns that the log does not have

    @property
    def is_given(self) -> bool:
        """Whether the server takes updates and deletes though a publication has them."""
        return self.kind == "f" or (self.kind != "n" and bool(self.key))

    def has_old(self, key: Sequence[str]) -> bool:
        """Return whether the log has the old values of these columns, if they change."""
        return self.kind == "f" or (self.is_given and not self.unlogged and set(self.key) >= set(key))


@dataclass(frozen=True, slots=True)
class CapturedTable:
    """A table of the publication, as the catalogue describes it now."""

    name: str  # schema.table
    own: Identity
    rows: int  # the server's own estimate
    oid: int = 0  # another table that takes the name has another one
    is_partitioned: bool = False
    partitions: tuple[Identity, ...] = ()  # those that hold rows

    @property
    def key(self) -> tuple[str, ...]:
        """The columns by which changes name a row; empty if there are none."""
        return () if self.own.unlogged else self.own.key

    @property
    def generated(self) -> tuple[str, ...]:
        """The columns that the log does not have."""
        return self.own.generated

    @property
    def unnamed(self) -> list[str]:
        """The table and the partitions in which updates and deletes do not name the row."""
        return [one.name for one in (self.own, *self.partitions) if not one.has_old(self.key)]

    @property
    def has_identity(self) -> bool:
        return not self.unnamed

    @property
    def refuses_changes(self) -> bool:
        """Whether the server refuses updates and deletes of the application if a publication has them."""
        return not all(one.is_given for one in (self.own, *self.partitions))

    @property
    def partial(self) -> list[str]:
        """The partitions whose old rows are not whole in the log though the table has the identity FULL."""
        return [one.name for one in self.partitions if one.kind != "f"] if self.own.kind == "f" else []

    @property
    def flaw(self) -> str:
        """Why updates and deletes do not name the row; empty if they do."""
        if self.own.unlogged:
            return f"the key of table {self.name} has the generated column {self.own.unlogged[0]}, which is not logged"
        if self.name in self.unnamed:
            return f"table {self.name} has no primary key"
        if self.unnamed:
            names = ", ".join(self.unnamed)
            return f"table {self.name} has partitions whose replica identity is not its own ({names})"
        return ""


def identify(tables: Sequence[str]) -> str:
    """Return the statements with which the log has whole old rows of tables and partitions."""
    return "; ".join(f"ALTER TABLE {sql_name(table)} REPLICA IDENTITY FULL" for table in tables)


# What the log says of the old rows of the table `c`: name, identity, columns of its key, and which are generated.
_IDENTITY = """
    n.nspname || '.' || c.relname, c.relreplident::text,
    ARRAY(SELECT a.attname::text FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY k (attnum, place)
                 JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
          WHERE i.indrelid = c.oid AND k.place <= i.indnkeyatts
            AND CASE WHEN c.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END ORDER BY k.place),
    ARRAY(SELECT a.attname::text FROM pg_attribute a
          WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped)"""


def _identity(facts: Sequence[Any], published: Collection[str]) -> Identity:
    name, kind, key, generated = facts
    lacks = tuple(column for column in generated if f"{name}.{column}" not in published)
    return Identity(name, kind, tuple(key), tuple(column for column in key if column in lacks), lacks)


class PostgresServer:
    """One captured database. Each call uses a connection of its own; the password is never shown."""

    def __init__(self, dsn: str, place: str, publication: str = "") -> None:
        self._given = parse_dsn(dsn, "source")
        self.place = place
        self._publication = publication  # of somebody else; it may have generated columns

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

    def translate(self, error: psycopg.Error) -> FirnlineError:
        """Return an error of the server as ours, without secrets; one that no retry mends is a `ConfigError`."""
        whole = str(error).strip()
        text = whole.splitlines()[0] if whole else type(error).__name__
        password = self._given.get("password")
        words = re.sub(rf"(?<!\w){re.escape(password)}(?!\w)", "***", text) if password else text
        is_away = error.sqlstate is None or error.sqlstate.startswith(_AWAY)
        refusal = next((hint for pattern, hint in _REFUSED if is_away and re.search(pattern, whole)), "")
        if refusal and not re.search(_MAY_ANSWER, whole):
            return ConfigError(f"{self.place}: {words}", hint=refusal)
        hint = "Check the server, and user, password and database of `dsn`; then run again, nothing was lost."
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            hint = "Give the role of `dsn` the right (GRANT), then run again; nothing was lost."
        return SourceError(
            f"{self.place}: {words}",
            hint=self._grant(text) or hint,
            **({AWAY: True} if is_away else {}),
            **({UNKNOWN_HOST: True} if is_away and names_no_host(whole) else {}),
        )

    def _grant(self, text: str) -> str:
        """Return the statement that gives the right which an error of the server says is missing; empty if none."""
        role = _sql_role(str(self._given.get("user") or "ROLE"))
        if "row-level security" in text:
            return _pass_policies(role)
        found = re.search(r"permission denied for (\w+) (\S+)", text)
        right = _RIGHTS.get(found.group(1)) if found else None
        if found is None or right is None:
            return ""
        return f"GRANT {right} {sql_name(found.group(2))} TO {role};"

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
                    hint=f"ALTER ROLE {_sql_role(role)} REPLICATION;",
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

    def check_may_read(self, tables: Collection[str]) -> None:
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
            found = db.execute(query, (list(tables),)).fetchall()
        if found:
            role, names = found[0][3], [row[1] for row in found]
            closed = ", ".join(dict.fromkeys(sql_name(row[0]) for row in found if not row[2]))
            usage = f"GRANT USAGE ON SCHEMA {closed} TO {_sql_role(role)}; " if closed else ""
            raise ConfigError(
                f"{self.place}: the role {role} may not read {', '.join(names)}",
                hint=f"{usage}GRANT SELECT ON {', '.join(map(sql_name, names))} TO {_sql_role(role)}; or write "
                "`snapshot: never` into the source, to capture changes alone.",
                **{UNREADABLE: ", ".join(names)},
            )

    def find_unreadable(self, tables: Collection[str]) -> dict[str, ConfigError]:
        """Return why the role may not read the rows of tables, each with the statement that gives the right."""
        try:
            self.check_may_read(tables)
        except ConfigError as error:
            if len(tables) == 1:
                return dict.fromkeys(tables, error)
            return {table: why for one in tables for table, why in self.find_unreadable([one]).items()}
        return {}

    def check_sees_all(self, tables: Sequence[CapturedTable]) -> None:
        """Check that no policy of row security hides rows of the tables from the role: the log has them.

        Raises:
            ConfigError: one may; the hint has the statement.
        """
        query = "SELECT current_user::text, ARRAY(SELECT oid FROM unnest(%s::oid[]) oid WHERE row_security_active(oid))"
        with self.session() as db:
            role, hidden = _one(db, query, [table.oid for table in tables])
        if hidden:
            names = ", ".join(table.name for table in tables if table.oid in hidden)
            raise ConfigError(
                f"{self.place}: row security may hide rows of {names} from the role {role}, and the log has them",
                hint=f"{_pass_policies(_sql_role(role))} Or write `snapshot: never` into the source, to capture "
                "changes alone.",
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
                   pg_wal_lsn_diff(end_lsn, restart_lsn)::bigint, slot_name IS NOT NULL
            FROM (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                         ELSE pg_current_wal_flush_lsn() END AS end_lsn) log
                 LEFT JOIN pg_replication_slots ON slot_name = %s"""
        with self.session() as db:
            end, now, retained, has_slot = _one(db, query, slot)
        kept = max(0, int(retained)) if retained is not None else None
        return LogState(parse_lsn(str(end)), int(now), kept, has_slot)

    # -- publication ----------------------------------------------------------------------------------

    def find_tables(self, patterns: TablePatterns) -> list[CapturedTable]:
        """Return the tables of the database that the spec names, with what the log will say of them."""
        with self.session() as db:
            return self._find_tables(db, patterns.covers, None)

    def _find_tables(
        self, db: Connection[tuple[Any, ...]], covers: Callable[[str], bool], name: str | None
    ) -> list[CapturedTable]:
        query = f"""
            SELECT c.oid, c.relkind = 'p', c.reltuples, {_IDENTITY}
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE (c.relkind = 'p' OR c.relkind = 'r' AND NOT c.relispartition) AND c.relpersistence = 'p'
              AND n.nspname NOT IN ('pg_catalog', 'information_schema', %(own)s) AND n.nspname NOT LIKE 'pg\\_%%'
              AND (%(name)s::text IS NULL OR n.nspname || '.' || c.relname = %(name)s)
            ORDER BY n.nspname, c.relname"""  # noqa: S608  # our words
        partitions = f"""
            SELECT root.oid, {_IDENTITY}
            FROM unnest(%(roots)s::oid[]) root (oid) CROSS JOIN pg_partition_tree(root.oid) t
                 JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE t.isleaf AND c.relkind = 'r' ORDER BY n.nspname, c.relname"""  # noqa: S608  # our words
        published = self._published_generated(db)
        found = [
            CapturedTable(own.name, own, max(0, int(estimate)), oid, is_root)
            for oid, is_root, estimate, *facts in db.execute(query, {"own": OWN_SCHEMA, "name": name}).fetchall()
            if covers((own := _identity(facts, published)).name)
        ]
        roots = [table.oid for table in found if table.is_partitioned]
        parts: dict[int, list[Identity]] = {}
        for root, *facts in db.execute(partitions, {"roots": roots}).fetchall() if roots else ():
            parts.setdefault(root, []).append(_identity(facts, published))
        return [replace(table, partitions=tuple(parts.get(table.oid, ()))) for table in found]

    def find_key(self, table: str) -> tuple[str, ...] | None:
        """Return the columns that identify a row of a table (`schema.table`) in the log: those of its replica identity,
        with identity FULL those of the primary key. None: there is no such table."""
        with self.session() as db:
            found = self.describe(db, table)
        return None if found is None else found.key

    def describe(self, db: Connection[tuple[Any, ...]], table: str) -> Description | None:
        """Return what the catalogue says of a table (`schema.table`) beyond the log; None if there is none."""
        found = self._find_tables(db, lambda _: True, table)
        if not found:
            return None
        query = "SELECT attname, attnum FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped"
        numbers = dict(db.execute(query, (found[0].oid,)).fetchall())
        key = found[0].key if found[0].own.kind != "n" else ()
        is_whole = found[0].own.kind == "f" and not found[0].partial
        return Description(key, numbers, is_whole=is_whole, is_unlogged=bool(found[0].own.unlogged))

    def _published_generated(self, db: Connection[tuple[Any, ...]]) -> frozenset[str]:
        """Return the columns (`schema.table.column`) that the publication has though they are generated."""
        if not self._publication or db.info.server_version < GENERATED_VERSION * 10000:
            return frozenset()
        query = """
            SELECT p.schemaname || '.' || p.tablename || '.' || name
            FROM pg_publication_tables p CROSS JOIN unnest(p.attnames) name WHERE p.pubname = %s"""
        return frozenset(str(row[0]) for row in db.execute(query, (self._publication,)).fetchall())

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

        for error in {**self.find_unfit(publication, tables), **self.find_partial(publication, tables)}.values():
            raise error

    def find_unpublished(self, publication: str, tables: Sequence[CapturedTable]) -> dict[str, FirnlineError]:
        """Return the tables whose changes a publication of somebody else has not, or not all of them; with the reason,
        whose hint has the statement."""
        published = self.published(publication) or {}
        failed = {**self.find_partial(publication, tables), **self.find_unfit(publication, tables)}
        for table in tables:
            if table.name not in published and table.name not in failed:
                failed[table.name] = ConfigError(
                    f"{self.place}: publication {publication} has the table {table.name} no more, so that its changes "
                    "are not captured",
                    hint=f"ALTER PUBLICATION {sql_name(publication)} ADD TABLE {sql_name(table.name)}; then the table "
                    "is read again. Or take it out of `tables`.",
                )
        return failed

    def find_partial(self, publication: str, tables: Sequence[CapturedTable]) -> dict[str, FirnlineError]:
        """Return the tables of which a publication has some kinds of changes only; with the reason, whose hint has the
        statement. Of tables without a replica identity inserts are enough: the server could not publish more."""
        published, kinds = self.published(publication) or {}, self.published_kinds(publication)
        failed: dict[str, FirnlineError] = {}
        for table in tables:
            needed = ("insert", "update", "delete") if table.has_identity else ("insert",)
            missing = [kind for kind in needed if kind not in kinds]
            if table.name in published and missing:
                failed[table.name] = ConfigError(
                    f"{self.place}: publication {publication} does not publish each {' and '.join(missing)} of "
                    f"{table.name}, so that sinks would miss them",
                    hint=f"ALTER PUBLICATION {sql_name(publication)} SET (publish = '{', '.join(KINDS)}');",
                )
        return failed

    def published_kinds(self, publication: str) -> tuple[str, ...]:
        """Return the kinds of changes that a publication publishes; none if there is no such publication."""
        query = "SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = %s"
        with self.session() as db:
            found = db.execute(query, (publication,)).fetchone()
        return tuple(kind for kind, is_there in zip(KINDS, found or (), strict=False) if is_there)

    def find_members(self, publication: str) -> dict[str, str]:
        """Return, by table of a publication or of its second one, of inserts only, what makes it a member.

        It is another text if the table was out of the publication meanwhile, if the publication has other rows or
        columns of it, or if somebody changed the settings of the publication.
        """
        query = """
            SELECT n.nspname || '.' || c.relname,
                   string_agg(concat_ws(':', p.oid, p.xmin, r.oid, {}), ' ' ORDER BY p.oid)
            FROM pg_publication p JOIN pg_publication_tables t ON t.pubname = p.pubname
                 JOIN pg_namespace n ON n.nspname = t.schemaname
                 JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
                 LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
            WHERE p.pubname = ANY (%s) GROUP BY 1"""
        of_schema = "(SELECT s.oid FROM pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = n.oid)"
        names = [publication, inserts_only(publication)]
        with self.session() as db:
            more = of_schema if db.info.server_version >= 150000 else "NULL"
            return {
                str(name): str(text) for name, text in db.execute(SQL(query).format(SQL(more)), (names,)).fetchall()
            }

    def find_unfit(self, publication: str, tables: Sequence[CapturedTable]) -> dict[str, FirnlineError]:
        """Return the partitioned tables whose changes a publication has under the names of their partitions, so that
        none would be captured, or by other columns than the table's key. With the reason, whose hint has the statement.
        """
        query = """
            SELECT c.oid FROM pg_class c, pg_publication p
            WHERE c.oid = ANY (%s) AND p.pubname = %s AND NOT p.pubviaroot
              AND (p.puballtables OR EXISTS (
                  SELECT FROM pg_partition_tree(c.oid) t JOIN pg_class k ON k.oid = t.relid
                         JOIN pg_namespace n ON n.oid = k.relnamespace
                  WHERE EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = k.oid)
                     OR EXISTS (SELECT FROM pg_publication_tables l WHERE l.pubname = p.pubname
                                AND l.schemaname = n.nspname AND l.tablename = k.relname)))"""
        roots = {table.oid: table for table in tables if table.is_partitioned}
        if not roots:
            return {}
        published = self.published(publication) or {}
        with self.session() as db:
            unrooted = [roots[oid].name for (oid,) in db.execute(query, (list(roots), publication)).fetchall()]
        found: dict[str, FirnlineError] = {
            name: ConfigError(
                f"{self.place}: publication {publication} has the partitions of {name}, and not the table, so that "
                "none of its changes is captured",
                hint=f"ALTER PUBLICATION {sql_name(publication)} SET (publish_via_partition_root = true);",
            )
            for name in sorted(unrooted)
        }
        for table in roots.values():
            others = [one.name for one in table.partitions if one.is_given and not one.has_old(table.key)]
            if others and table.name not in found and published.get(table.name) and not table.own.unlogged:
                found[table.name] = ConfigError(
                    f"{self.place}: in the log, the partitions {', '.join(others)} name rows by other columns than "
                    f"the key of {table.name} ({', '.join(table.key)}), so that old rows would stay",
                    hint=f"As the owner: {identify(others)}; or REPLICA IDENTITY DEFAULT, if their primary key is the "
                    "table's.",
                )
        return found

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
        self._check_may_use(tables)
        with self.session() as db:
            role, may = _one(
                db, "SELECT current_user::text, has_database_privilege(current_user, current_database(), 'CREATE')"
            )
            if not may and known[publication] is None:
                raise ConfigError(
                    f"{self.place}: the role {role} may not create a publication",
                    hint=f'GRANT CREATE ON DATABASE "{db.info.dbname}" TO {_sql_role(role)}; or set `publication` to '
                    "one that the owner of the tables creates.",
                )
            query = "SELECT pg_has_role(current_user, relowner, 'USAGE') FROM pg_class WHERE oid = %s::regclass"
            others = [name for name in missing if not _one(db, query, sql_name(name))[0]]
        if others:
            raise ConfigError(
                f"{self.place}: the role {role} does not own {', '.join(others)}, so that it cannot publish the table",
                hint="As the owner: CREATE PUBLICATION firnline FOR TABLE "
                f"{', '.join(sql_name(table.name) for table in tables)} WITH (publish_via_partition_root = true); "
                "then write `publication: firnline` into the source.",
            )

    def _check_may_use(self, tables: Sequence[CapturedTable]) -> None:
        """Check that the role may use the schemas of the tables.

        Raises:
            ConfigError: it may not; the hint has the statement.
        """
        schemas = sorted({table.name.partition(".")[0] for table in tables})
        query = """
            SELECT nspname, current_user::text FROM pg_namespace
            WHERE nspname = ANY (%s) AND NOT has_schema_privilege(oid, 'USAGE') ORDER BY 1"""
        with self.session() as db:
            closed = db.execute(query, (schemas,)).fetchall()
        if closed:
            names = ", ".join(sql_name(name) for name, _ in closed)
            role = closed[0][1]
            raise ConfigError(
                f"{self.place}: the role {role} may not use the schema {names}",
                hint=f"GRANT USAGE ON SCHEMA {names} TO {_sql_role(role)};",
            )

    def ensure_publication(self, publication: str, tables: Sequence[CapturedTable]) -> None:
        """Create a publication of the tables, or add the missing ones. Tables without a replica identity go into a
        second one that publishes inserts only: else the server would refuse the application's own updates.

        Raises:
            SourceError: the role may not.
        """
        for name, wanted, kinds in (
            (publication, [t for t in tables if t.has_identity], KINDS),
            (inserts_only(publication), [t for t in tables if not t.has_identity], ("insert", "truncate")),
        ):
            known = self.published(name)
            if known is not None and self.published_kinds(name) != kinds:  # somebody changed it
                self._publish(SQL("ALTER PUBLICATION {} SET (publish = {})").format(Identifier(name), _kinds(kinds)))
            missing = [t for t in wanted if known is None or t.name not in known]
            if known is None:  # also without tables: the log is read from before one of them comes
                statement = SQL(
                    "CREATE PUBLICATION {} {} WITH (publish = {}, publish_via_partition_root = true)"
                ).format(Identifier(name), _for_tables("FOR TABLE", missing), _kinds(kinds))
            elif known is not None and missing:
                statement = SQL("ALTER PUBLICATION {} {}").format(Identifier(name), _for_tables("ADD TABLE", missing))
            else:
                continue
            self._publish(statement)

    def _publish(self, statement: Composed) -> None:
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
            more = "invalidation_reason, failover" if db.info.server_version >= 170000 else "NULL, false"
            row = db.execute(
                SQL(
                    "SELECT plugin, database = current_database(), confirmed_flush_lsn, active_pid, wal_status, {} "
                    "FROM pg_replication_slots WHERE slot_name = %s"
                ).format(SQL(more)),
                (slot,),
            ).fetchone()
        if row is None:
            return None
        plugin, ours, confirmed, pid, status, why, failover = row
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
        return Slot(slot, parse_lsn(str(confirmed)), pid, bool(failover))

    def check_failover(self, slot: str) -> None:
        """Check that the server has failover slots, and that this slot, if there is one, is such.

        Raises:
            ConfigError: it has none, or it is none; the hint has the statement.
        """
        with self.session() as db:
            version = db.info.server_version // 10000
        if version < FAILOVER_VERSION:
            raise ConfigError(
                f"{self.place}: failover is true, and PostgreSQL {version} has no failover slots; {FAILOVER_VERSION} "
                "or later has",
                hint="Leave `failover` out of the source.",
            )
        found = self.find_slot(slot)
        if found is not None and not found.failover:
            raise ConfigError(
                f"{self.place}: failover is true, and the slot {slot}, which exists, is no failover slot",
                hint="While no run reads it: psql 'host=... dbname=... replication=database' -c "
                f"'ALTER_REPLICATION_SLOT {slot} (FAILOVER)'. Or leave `failover` out of the source.",
            )

    def create_slot(self, slot: str, *, failover: bool = False) -> Slot:
        """Create a slot. The server may wait for transactions that are open now.

        Raises:
            ConfigError: the server has no room for one.
            SourceError: it does not answer.
        """
        fault_point("postgres.slot.before")
        try:
            with psycopg.connect(self.conninfo("firnline"), autocommit=True) as db:
                more = ", failover => true" if failover else ""
                query = f"SELECT lsn FROM pg_create_logical_replication_slot(%s, %s{more})"  # noqa: S608  # our words
                lsn = _one(db, query, slot, PLUGIN)[0]
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
        return Slot(slot, parse_lsn(str(lsn)), failover=failover)

    def drop_slot(self, slot: str) -> None:
        """Drop a slot that is of no use any more."""
        fault_point("postgres.slot.before")
        with self.session() as db, contextlib.suppress(psycopg.errors.UndefinedObject):
            db.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        fault_point("postgres.slot.after")

    def advance_slot(self, slot: str) -> None:
        """Have the server forget its log up to now, without reading it for anybody."""
        query = """
            SELECT pg_replication_slot_advance(%s, CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                                                        ELSE pg_current_wal_flush_lsn() END)"""
        fault_point("postgres.slot.before")
        with self.session() as db:
            db.execute(query, (slot,))
        fault_point("postgres.slot.after")

    def end_reader(self, pid: int) -> None:
        """End another reader of the slot."""
        with self.session() as db:
            db.execute("SELECT pg_terminate_backend(%s)", (pid,))


def _pass_policies(role: str) -> str:
    return f"As a superuser: ALTER ROLE {role} BYPASSRLS;"


def inserts_only(publication: str) -> str:
    """Return the name of the publication of tables without a replica identity."""
    return f"{publication}_inserts"


def _kinds(kinds: Sequence[str]) -> Literal:
    return Literal(", ".join(kinds))


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


def _sql_role(name: str) -> str:
    """Return the name of a role as SQL. It has no schema, and may be a keyword."""
    return '"' + name.replace('"', '""') + '"'


def _one(db: Connection[tuple[Any, ...]], query: str, *values: object) -> tuple[Any, ...]:
    row = db.execute(query, values or None).fetchone()
    assert row is not None
    found: tuple[Any, ...] = row
    return found

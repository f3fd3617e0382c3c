"""The sink of a PostgreSQL table: rows and checkpoint row become true in one transaction."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
from psycopg import Connection
from psycopg.sql import SQL, Composed, Identifier

from firnline.errors import RollbackRefusedError, SchemaError, SinkError, SinkWentBackError
from firnline.faults import fault_point
from firnline.options import template_columns
from firnline.postgres_client import place_of
from firnline.sinks.base import (
    Capabilities,
    Decided,
    Effect,
    EpochCommit,
    GoesBack,
    Head,
    ReplaceRows,
    RestoreVersion,
    SinkContext,
    SinkReturn,
)
from firnline.sinks.dead_letters import DeadLetter
from firnline.sinks.encoding import encode_rows
from firnline.sinks.follower import EpochDelivery, Follower, FollowerHead, head_after
from firnline.sinks.postgres.checkpoints import TABLES, CheckpointRow
from firnline.sinks.postgres.database import Database, Timeouts
from firnline.sinks.postgres.options import PostgresSinkOptions, split_table
from firnline.sinks.postgres.parts import EpochTables, refuse_name, split_rows
from firnline.sinks.postgres.table import EPOCH, OWN, OWNER, Table, find_table, prepare_table
from firnline.sinks.postgres.write import Chunk, RowsRefusedError, RowWriter, Shape, read_chunks
from firnline.sinks.templates import NameTemplate, too_many_parts
from firnline.types import Delivery, EntryRef, Json

Db = Connection[tuple[Any, ...]]


class PostgresSink(Follower):
    """A table that rows are appended to. Every row says which sink wrote it in which epoch."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        Delivery.EXACTLY_ONCE, goes_back=GoesBack.EXACTLY, fed_from_outbox=True, replaces=True
    )

    def __init__(self, options: PostgresSinkOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        self._schema, self._table = options.table_name  # with the columns of a template, if there is one
        self._is_template = bool(template_columns(options.table))
        if self._is_template:
            self.capabilities = replace(type(self).capabilities, has_columns=False)  # type: ignore[misc]
        self._settings = options
        timeouts = Timeouts(options.statement_timeout.total_seconds(), options.lock_timeout.total_seconds())
        self._lock_seconds = timeouts.lock
        self._database = Database(options.dsn, f"sink {self.name!r} at {place_of(options.dsn)}", timeouts)
        self._row = CheckpointRow(context.pipeline, self.head_name)
        self._run = ""
        self._claiming = 0  # the generation that is being claimed, or was

    @property
    def _owner(self) -> str:
        return f"{self.context.pipeline}/{self.head_name}"

    def shape(self) -> dict[str, Json]:
        shape = super().shape()
        own = {**shape["own"], "of_records": self.context.input_is_source}
        return {**shape, "own": own}

    # -- the head -------------------------------------------------------------------------------------

    def claim(
        self,
        run: str,
        generation: int | None = None,
        baseline: EntryRef | None = None,
        onto: int | None = None,
        *,
        again: bool = False,
        decided: Decided | None = None,
    ) -> Head:
        self._run, self._claiming = run, generation or 0
        return super().claim(run, generation, baseline, onto, again=again, decided=decided)

    @property
    def _session(self) -> str:
        return self._row.session_name(self._claiming, self._run)

    def _lock(self, db: Db) -> FollowerHead | None:
        """Lock the checkpoint row. While this run claims, backends of older runs that keep the lock are ended."""
        older_than = self._claiming if self._generation != self._claiming else 0
        return self._row.lock(db, self._session, older_than, self._lock_seconds)

    def read_head(self) -> FollowerHead | None:
        """Read the head. A run that has claimed waits for a backend that may still be committing."""
        with self._database.transaction(self._session) as db:
            if not self._row.exists(db):
                return None
            return self._lock(db) if self._claiming else self._row.read(db)

    def swap_head(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        with self._database.transaction(self._session) as db:
            if expected is None:
                self._row.ensure(db)
            self._row.require(self._lock(db), expected, new.generation)
            self._row.write(db, new)
            fault_point("postgres.head.before")
            self._database.commit(db)
            fault_point("postgres.head.after")

    # -- rows -----------------------------------------------------------------------------------------

    def deliver(self, delivery: EpochDelivery) -> FollowerHead:
        while True:
            tables = self._split(delivery)
            bad = delivery.rows.letters(tables.bad)
            if not bad:
                try:
                    return self._deliver(delivery, tables)
                except RowsRefusedError as refused:
                    bad = self._find_bad(delivery, tables)
                    if not bad:
                        reason = self._database.reason(refused)
                        raise SinkError(f"{self.uri} refused a row, and takes it now: {reason}") from refused
            delivery.refuse(bad)
            delivery = delivery.without(bad)

    def _split(self, delivery: EpochDelivery) -> EpochTables:
        """Find the tables that the rows of an epoch go to."""
        rows = delivery.rows
        if not self._is_template:
            return EpochTables(rows, [f"{self._schema}.{self._table}"] if rows.rows else [])
        known = self._known_tables(delivery.head)
        template = self._template(str(delivery.shape["parts_allowed"]), known)
        upserts = delivery.shape["write"] == "upsert"
        return split_rows(rows, template, self._settings.max_parts, known, upserts=upserts)

    def _template(self, allowed: str, known: Collection[str]) -> NameTemplate:
        """Return the template. It refuses tables of other sinks, unless this sink has written to them before."""

        def refuse(name: str) -> str:
            reason = refuse_name(name)
            if reason or name in known:
                return reason
            with self._database.transaction(self._session) as db:
                owner = self._row.find_owner(db, name)
            return f"table {name!r} belongs to sink {owner}" if owner is not None else ""

        return NameTemplate(f"{self._schema}.{self._table}", allowed, refuse)

    @staticmethod
    def _known_tables(head: FollowerHead | None) -> list[str]:
        """Return the tables that the sink has written to, as far as the head knows."""
        return [str(name) for name in (head.own if head is not None else {}).get(TABLES, [])]

    def _deliver(self, delivery: EpochDelivery, tables: EpochTables) -> FollowerHead:
        """Write rows and head in one transaction: the checkpoint row is locked first, and written last."""
        known = sorted({*self._known_tables(delivery.head), *tables.names})
        if self._is_template and len(known) > self._settings.max_parts:
            raise too_many_parts(len(known), self._settings.max_parts)
        after = replace(delivery.final_head, own={TABLES: known} if known else {})
        with self._database.transaction(self._session) as db:
            self._row.require(self._lock(db), delivery.head, after.generation)
            self._make_room(db, delivery, known)
            for name in tables.names:
                writer, chunks = self._open_writer(db, delivery, tables, name)
                writer.write(chunks)
            self._row.write(db, after)
            fault_point("postgres.commit.before")
            self._database.commit(db)
            fault_point("postgres.commit.after")
        return after

    def _find_bad(self, delivery: EpochDelivery, tables: EpochTables) -> list[DeadLetter]:
        """Return the rows that the tables can never hold. Writes nothing."""
        bad: dict[int, str] = {}
        with self._database.transaction(self._session) as db:
            self._row.require(self._lock(db), delivery.head, delivery.head.generation)
            self._make_room(db, delivery, tables.names)
            for name in tables.names:
                writer, chunks = self._open_writer(db, delivery, tables, name)
                bad |= writer.find_bad(chunks, self._database.reason)
        letters: list[DeadLetter] = []
        for rows in delivery.rows.read():
            wanted = pa.array([number in bad for number in rows.numbers.to_pylist()], pa.bool_())
            texts = encode_rows(rows.batch.filter(wanted)).to_pylist()
            numbers = rows.numbers.filter(wanted).to_pylist()
            letters += [DeadLetter(n, bad[n], json.loads(text)) for n, text in zip(numbers, texts, strict=True)]
        return letters

    def _make_room(self, db: Db, delivery: EpochDelivery, names: Iterable[str]) -> None:
        """Remove this sink's own rows before a copy, and no others; the transaction of the copy removes them.

        Raises:
            SchemaError: a table has rows that do not say which sink wrote them.
        """
        if not delivery.is_copy or Shape.of(delivery.shape).key:
            return
        for name in names:
            table = find_table(db, *split_table(name))
            if table is None:
                continue
            if table.has_marks:
                db.execute(self._own_rows("DELETE", table, -1))
                self._row.note_removed(db, 0, delivery.head.epoch)
            elif _ask(db, SQL("SELECT EXISTS (SELECT FROM {})").format(table.identifier)):
                raise SchemaError(
                    f"table {table.shown} has rows, and lacks the columns {OWNER} and {EPOCH}: the rows that sink "
                    f"{self.name!r} wrote before its copy cannot be told and removed",
                    hint=f"Remove them: TRUNCATE {table.shown}; the next run goes on.",
                )

    def _open_writer(
        self, db: Db, delivery: EpochDelivery, tables: EpochTables, name: str
    ) -> tuple[RowWriter, Iterator[Chunk]]:
        """Bring a table into shape for an epoch. Returns the writer, and the rows of the table."""
        shape = Shape.of(delivery.shape)
        columns = shape.columns(delivery.rows.shape.schema_of(delivery.rows.schema))
        own = [] if shape.key else [OWNER, EPOCH]
        table = prepare_table(
            db, *split_table(name), columns, own, shape.key, may_add=self._settings.evolution == "add"
        )
        if shape.key:
            self._require_unique(db, table, shape.key)
        writer = RowWriter(db, table, columns, shape, self._owner, delivery.rows.epoch)
        return writer, read_chunks(delivery.rows, tables.rows_of(name), shape)

    def _require_unique(self, db: Db, table: Table, key: Sequence[str]) -> None:
        missing = [name for name in key if name not in table.columns]
        if missing or not table.has_unique(db, key):
            raise SchemaError(
                f"table {table.shown} has no unique index on {', '.join(key)}, so rows cannot be found by their key",
                hint=f"CREATE UNIQUE INDEX ON {table.shown} ({', '.join(key)})",
            )

    # -- checks ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a server that is read-only, a table that does not fit, and missing rights. Read-only."""
        with self._database.transaction(self._session) as db:
            if _ask(db, "SELECT pg_is_in_recovery()"):
                raise SinkError(f"{self.uri} is a standby server, which is read-only", hint="Name the primary server.")
            if not template_columns(self._schema) and not self._find_tables(db):
                self._require_creatable(db, self._schema)
            for table in self._find_tables(db):
                self._check_table(db, table)
            if not self._row.exists(db):
                self._require_creatable(db, "firnline")
            else:
                self._require_rights(db, "firnline.checkpoints", "SELECT, INSERT, UPDATE")

    def _check_table(self, db: Db, table: Table) -> None:
        rights = "INSERT" if self._settings.write == "append" else "SELECT, INSERT, UPDATE, DELETE"
        self._require_rights(db, table.identifier.as_string(db), rights)
        upserts = self._settings.write == "upsert"
        if upserts:
            self._require_unique(db, table, self.context.key_of(self._settings))
        if self._settings.evolution == "add" and not table.has_marks and not upserts:
            owned = _ask(
                db,
                "SELECT pg_has_role(session_user, relowner, 'USAGE') FROM pg_class WHERE oid = %s",
                (table.oid,),
            )
            if not owned:
                raise SinkError(
                    f"table {table.shown} lacks the columns {OWNER} and {EPOCH}, and the role may not add them",
                    hint=f"ALTER TABLE {table.shown} ADD COLUMN {OWNER} text, ADD COLUMN {EPOCH} bigint; or set "
                    "`evolution: fail`: then the sink cannot go back.",
                )

    def _require_rights(self, db: Db, table: str, rights: str) -> None:
        for right in rights.split(", "):
            if not _ask(db, "SELECT has_table_privilege(%s, %s)", (table, right)):
                raise SinkError(
                    f"{self.uri}: the role lacks {right} on {table}", hint=f"GRANT {rights} ON {table} TO ..."
                )

    def _require_creatable(self, db: Db, schema: str) -> None:
        exists = _ask(db, "SELECT to_regnamespace(quote_ident(%s)) IS NOT NULL", (schema,))
        if exists and not _ask(db, "SELECT has_schema_privilege(%s, 'CREATE')", (schema,)):
            raise SinkError(
                f"{self.uri}: the role may not create a table in the schema {schema}",
                hint=f"GRANT CREATE, USAGE ON SCHEMA {schema} TO ..., or create the table.",
            )
        if not exists and not _ask(db, "SELECT has_database_privilege(current_database(), 'CREATE')"):
            raise SinkError(
                f"{self.uri}: the schema {schema} does not exist, and the role may not create it",
                hint=f"CREATE SCHEMA {schema} AUTHORIZATION ...",
            )

    def _find_tables(self, db: Db) -> list[Table]:
        """Return the tables of the sink that exist."""
        names = [(self._schema, self._table)]
        if self._is_template:
            names = [split_table(name) for name in self._known_tables(self._read_committed(db))]
        return [table for schema, name in names if (table := find_table(db, schema, name)) is not None]

    def _read_committed(self, db: Db) -> FollowerHead | None:
        return self._row.read(db) if self._row.exists(db) else None

    def find_parts(self) -> list[str] | None:
        if not self._is_template:
            return None
        with self._database.transaction(self._session) as db:
            known = self._known_tables(self._read_committed(db))
        return [f"{place_of(self._settings.dsn)}/{name}" for name in known]

    def find_schema(self) -> pa.Schema | None:
        table = self._find_table()
        if table is None:
            return None
        return pa.schema([(column.name, column.arrow) for column in table.columns.values() if column.name not in OWN])

    def check_columns(self, rows: pa.Schema) -> None:
        if self._is_template:
            self._template(self._settings.parts_allowed, ()).check(rows)
        table = self._find_table()
        if table is None:
            return
        shape = Shape.of(self.shape()["own"])
        wanted = shape.columns(rows)
        if self._settings.evolution == "add":
            wanted = pa.schema([field for field in wanted if field.name in table.columns])
        table.ways(wanted)

    def _find_table(self) -> Table | None:
        """Return the table of a sink without a template, if it exists."""
        if self._is_template:
            return None
        with self._database.transaction(self._session) as db:
            return find_table(db, self._schema, self._table)

    # -- going back -----------------------------------------------------------------------------------

    def check_lost(self, epoch: int) -> None:
        with self._database.transaction(self._session) as db:
            table = find_table(db, self._schema, self._table)
            if table is None or not table.has_marks:
                return
            rows = int(_ask(db, self._own_rows("SELECT count(*)", table, epoch)))
            if rows:
                raise SinkWentBackError(
                    f"sink {self.name!r} holds epoch {epoch} by its checkpoint, and {rows} rows of later epochs: its "
                    "checkpoint was lost, or is older than its rows",
                    hint=f"Restore both from one backup. Or delete the rows, which are delivered again then: "
                    f"{self._own_rows('DELETE', table, epoch).as_string(db)}",
                    sink=self.name,
                    epoch=epoch,
                )

    def version_of(self, epoch: int) -> int:
        with self._database.transaction(self._session) as db:
            self._require_way_back(db, epoch)
        return epoch

    def plan_return(self, to_epoch: int, accept: Collection[str]) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        fence = self.read_fence()
        try:
            with self._database.transaction(self._session) as db:
                tables = self._require_way_back(db, to_epoch)
                rows = sum(int(_ask(db, self._own_rows("SELECT count(*)", table, to_epoch))) for table in tables)
        except RollbackRefusedError as error:
            return SinkReturn(self.name, self.uri, fence.epoch, fence.version), [error]
        return SinkReturn(self.name, self.uri, fence.epoch, fence.version, to_epoch, rows_removed=rows), []

    def find_missing(self, effect: Effect) -> list[str]:
        if isinstance(effect, ReplaceRows) and effect.files:
            return [str(file["path"]) for file in effect.files]
        if isinstance(effect, RestoreVersion):
            with self._database.transaction(self._session) as db:
                try:
                    self._require_way_back(db, effect.version)
                except RollbackRefusedError as error:
                    return [error.message]
        return []

    def go_back(self, head: FollowerHead, commit: EpochCommit, effect: Effect) -> FollowerHead:
        """Remove this sink's own rows of later epochs, together with the new head."""
        if isinstance(effect, ReplaceRows) and effect.files:
            raise RollbackRefusedError(
                f"{self.name} cannot get back rows that it no longer holds", hint="Take the sink out of the spec."
            )
        to = effect.version if isinstance(effect, RestoreVersion) else 0
        after = head_after(head, commit)
        with self._database.transaction(self._session) as db:
            self._row.require(self._lock(db), head, after.generation)
            for table in self._require_way_back(db, to):
                db.execute(self._own_rows("DELETE", table, to))
            self._row.write(db, after)
            self._row.note_removed(db, to, head.epoch)
            fault_point("postgres.edit.before")
            self._database.commit(db)
            fault_point("postgres.edit.after")
        return after

    def _require_way_back(self, db: Db, to: int) -> list[Table]:
        """Return the tables if their rows of epochs up to `to` are all there, and later ones can be told.

        Raises:
            RollbackRefusedError: rows of earlier epochs are gone, or do not say which epoch they are of.
        """
        removed = self._row.find_removed(db, to)
        if removed is not None:
            raise RollbackRefusedError(
                f"{self.name} no longer holds epoch {to}: a rollback or a copy removed the rows of epochs {removed[0]}"
                f" to {removed[1]}",
                hint=f"Go back to epoch {removed[0] - 1}, or leave its rows: --leave {self.name}",
            )
        tables = self._find_tables(db)
        for table in tables:
            if not table.has_marks:
                raise RollbackRefusedError(
                    f"rows of table {table.shown} do not say which epoch they are of: it lacks {OWNER} or {EPOCH}",
                    hint=f"Leave its rows: --leave {self.name}",
                )
        return tables

    def _own_rows(self, verb: str, table: Table, after: int) -> Composed:
        """Return a statement about the rows of this sink that are of later epochs. It has no parameters: names may
        contain a percent sign."""
        return SQL("{} FROM {} WHERE {} = {} AND {} > {}").format(
            SQL(verb), table.identifier, Identifier(OWNER), self._owner, Identifier(EPOCH), after
        )


class PostgresUpsertSink(PostgresSink):
    """A table that holds one row per key. It cannot go back: what a change has replaced is gone."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.EXACTLY_ONCE, upserts=True, fed_from_outbox=True)
    can_empty = True

    def version_of(self, epoch: int) -> int:
        raise self._no_way_back()

    def plan_return(self, to_epoch: int, accept: Collection[str]) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        return Follower.plan_return(self, to_epoch, accept)

    def shape(self) -> dict[str, Json]:
        shape = super().shape()
        return {**shape, "own": {**shape["own"], "key": list(self.context.key_of(self._settings))}}

    def keeps_old(self, own: Mapping[str, Json]) -> bool:
        return True

    def moves(self, own: Mapping[str, Json]) -> bool:
        return not own.get("sequence_by")

    def find_missing(self, effect: Effect) -> list[str]:
        return []

    def go_back(self, head: FollowerHead, commit: EpochCommit, effect: Effect) -> FollowerHead:
        raise self._no_way_back()


def _ask(db: Db, question: Any, values: Sequence[Any] = ()) -> Any:
    found = db.execute(question, values or None).fetchone()
    return found[0] if found else None

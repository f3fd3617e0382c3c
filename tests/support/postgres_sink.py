"""PostgreSQL sinks for tests: a driver of one sink, and its table read by another reader than the sink."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier

from firnline.checkpoint.ledger import Ledger
from firnline.sinks.base import EpochCommit, SinkContext
from firnline.sinks.dead_letters import DeadLetter, list_dead_letters, read_letters
from firnline.sinks.postgres.kind import open_sink
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.postgres.sink import PostgresSink
from firnline.sinks.registry import open_stager
from firnline.testing.sinks import PIPELINE, SinkDriver
from firnline.types import Receipt

TABLE = "lake.events"


class PostgresDriver(SinkDriver):
    """One run into one PostgreSQL table; also with rows of any Arrow type."""

    batch: pa.RecordBatch | None = None  # staged instead of rows; a ledger entry has no words for all its types

    def stage_rows(self, rows: Any, attempt: str) -> Any:
        if self.batch is None:
            return super().stage_rows(rows, attempt)
        stager = open_stager(self.sink.stage_target(), attempt)
        stager.write(self.batch)
        return stager.close(), self.batch.schema

    def stage_batch(self, batch: pa.RecordBatch) -> EpochCommit:
        if self._changes:
            count = batch.num_rows
            batch = batch.append_column("_op", pa.array(["insert"] * count))
            batch = batch.append_column("_sequence", pa.array([0] * count))
        self.batch = batch
        self.sink.columns_of = lambda rows: pa.schema([])  # type: ignore[method-assign]
        try:
            return self.stage()
        finally:
            self.batch = None
            del self.sink.columns_of

    def apply_batch(self, batch: pa.RecordBatch) -> Receipt:
        return self.commit(self.stage_batch(batch))


def drive(
    dsn: str,
    ledger: Ledger,
    *,
    generation: int = 1,
    name: str = "copy",
    table: str = TABLE,
    write: str = "append",
    records: bool = False,
    run: str = "",
    **settings: Any,
) -> PostgresDriver:
    """Begin a run of the pipeline `demo` into a table; an upsert has the key `id`."""
    key = ("id",) if write == "upsert" else ()
    options = PostgresSinkOptions(name, dsn, table, write=write, key=key, **settings)  # type: ignore[arg-type]

    def opened(context: SinkContext) -> PostgresSink:
        sink = open_sink(options, replace(context, input_is_source=records))
        assert isinstance(sink, PostgresSink)
        return sink

    changes = write == "upsert" and not records
    return PostgresDriver(opened, ledger, generation=generation, run=run or secrets.token_hex(8), changes=changes)


def execute(dsn: str, *statements: str) -> None:
    """Execute statements as somebody else."""
    with psycopg.connect(dsn, autocommit=True) as db:
        for statement in statements:
            db.execute(statement)


def limited_role(dsn: str, *grants: str) -> str:
    """Make a role `limited` that may do nothing but the given; returns its dsn."""
    with psycopg.connect(dsn, autocommit=True) as db:
        if db.execute("SELECT 1 FROM pg_roles WHERE rolname = 'limited'").fetchone():
            db.execute("DROP OWNED BY limited")
            db.execute("DROP ROLE limited")
        db.execute("CREATE ROLE limited LOGIN PASSWORD 'limited-in-tests'")
        for grant in grants:
            db.execute(grant)
    return make_conninfo(dsn, user="limited", password="limited-in-tests")


def table_rows(dsn: str, table: str) -> list[dict[str, Any]]:
    """Return all rows of `schema.table`; none if it does not exist."""
    with psycopg.connect(dsn, row_factory=dict_row) as db:
        try:
            return db.execute(SQL("SELECT * FROM {}").format(Identifier(*table.split(".")))).fetchall()
        except psycopg.errors.UndefinedTable:
            return []


def column_types(dsn: str, table: str) -> dict[str, str]:
    """Return the types of the columns of a table, as people write them."""
    with psycopg.connect(dsn) as db:
        found = db.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0",
            (table,),
        ).fetchall()
    return {str(name): str(kind) for name, kind in found}


def postgres_ids(dsn: str, table: str) -> Counter[int]:
    """Return how often each `id` is there."""
    return Counter(int(row["id"]) for row in table_rows(dsn, table))


def read_all_letters(ledger: Ledger) -> list[DeadLetter]:
    """Return the dead letters of the pipeline, by row."""
    letters = {
        letter.row: letter
        for key in list_dead_letters(ledger.storage, PIPELINE)
        for letter in read_letters(ledger.storage, key)
    }
    return [letters[row] for row in sorted(letters)]

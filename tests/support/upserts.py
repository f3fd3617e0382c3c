"""An upserted table that is driven without an engine: change rows in, one epoch each, and readers that are not ours."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

from firnline.checkpoint.ledger import Ledger, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.clock import SystemClock
from firnline.options import OP, SEQUENCE
from firnline.schema import schema_to_json
from firnline.sinks.base import EpochCommit, RunTasks, SinkContext
from firnline.sinks.changes import table_columns
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.upsert.sink import UpsertSink
from firnline.sinks.registry import open_stager
from firnline.storage import open_storage
from firnline.types import EntryRef, Json, Receipt
from tests.support import duck


def sink_context(ledger: Ledger) -> SinkContext:
    """The context of a sink of the pipeline `demo`, whose positions never move."""
    return SinkContext("demo", ledger, SystemClock(), lambda positions, _inputs: positions)


class UpsertDriver:
    """One run of the pipeline `demo` into one table: claims it, then commits epoch after epoch."""

    def __init__(self, table: str, key: Sequence[str], *, floor_behind: int = 64, **options: Any) -> None:
        self.options = DeltaSinkOptions(name="delta", table=table, write="upsert", key=tuple(key), **options)
        self.ledger = Ledger(open_storage(table, self.options.storage_options), "demo")
        self.sink = UpsertSink(self.options, sink_context(self.ledger))
        self.run_tasks: RunTasks | None = None  # that commits are given
        self._floor_behind = floor_behind
        self._run = secrets.token_hex(8)
        held = self.sink.claim(self._run)
        self.epoch, self.tip, self.generation = held.epoch, held.entry, held.generation

    def stage(self, *batches: pa.RecordBatch, attempt: str | None = None) -> EpochCommit:
        """Stage change rows, each batch in a file of its own, and the entry of the next epoch."""
        attempt = attempt or secrets.token_hex(8)
        files: list[dict[str, Json]] = []
        for batch in batches:
            stager = open_stager(self.sink.stage_target(), attempt)
            stager.write(batch)
            files += stager.close()
        schema = pa.unify_schemas([batch.schema for batch in batches]) if batches else pa.schema([])
        return self.stage_files(files, schema, attempt)

    def stage_files(self, files: list[dict[str, Json]], schema: pa.Schema, attempt: str) -> EpochCommit:
        """The entry of the next epoch, over files that are staged already."""
        epoch = self.epoch + 1
        checkpoint = Checkpoint(
            pipeline="demo",
            epoch=epoch,
            generation=self.generation,
            run=self._run,
            attempt=attempt,
            created_at=datetime.now(UTC).isoformat(),
            positions={},
            floor=max(0, epoch - self._floor_behind),
        )
        entry = LedgerEntry(
            checkpoint=checkpoint,
            previous=self.tip,
            inputs={},
            staged={"delta": files},
            schema=schema_to_json(table_columns(schema)),
        )
        return EpochCommit(checkpoint, self.ledger.stage(entry), self.tip, files, schema)

    def commit(self, commit: EpochCommit) -> Receipt:
        """Commit an epoch that was staged; it is the tip then."""
        receipt = self.sink.commit(commit, self.run_tasks)
        self.epoch, self.tip = commit.checkpoint.epoch, commit.entry
        return receipt

    def apply(self, *batches: pa.RecordBatch) -> Receipt:
        """Stage and commit."""
        return self.commit(self.stage(*batches))


def changes(rows: Iterable[dict[str, Any]], schema: pa.Schema, sequence: int = 0) -> pa.RecordBatch:
    """Change rows of dicts: `_op` is update, and `_sequence` the one given, where a row has none."""
    full = pa.schema([*schema, pa.field(OP, pa.string()), pa.field(SEQUENCE, pa.int64())])
    filled = [{OP: "update", SEQUENCE: sequence, **row} for row in rows]
    return pa.RecordBatch.from_pylist(filled, schema=full)


def read_by_duckdb(table: str, columns: Sequence[str], partition_by: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """All rows: the log read by delta-rs, the files by DuckDB. Partition columns come from the log, as text."""
    actions = pa.table(DeltaTable(table).get_add_actions(flatten=True)).to_pylist()
    if not actions:
        return []
    by_name = {f"{table}/{unquote(action['path'])}": action for action in actions}
    settings = "union_by_name=true, filename=true, hive_partitioning=false"
    query = duck.execute(f"select * from read_parquet(?, {settings})", [list(by_name)])
    held = [column[0] for column in query.description]
    found: list[tuple[Any, ...]] = []
    for row in query.fetchall():
        values = dict(zip(held, row, strict=True))
        action = by_name[values["filename"]]
        values |= {name: action[f"partition.{name}"] for name in partition_by}
        found.append(tuple(values.get(name) for name in columns))
    return found


def read_by_delta(table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """All rows, by delta-rs and its own query engine."""
    rows: list[dict[str, Any]] = DeltaTable(table).to_pyarrow_table().to_pylist()
    return [tuple(row.get(name) for name in columns) for row in rows]


def tip_of(driver: UpsertDriver) -> EntryRef:
    """The entry that the newest epoch is named by."""
    assert driver.tip is not None, "nothing is committed yet"
    return driver.tip

"""A Delta table whose rows are changed by key: change rows become Remove and Add actions, in one commit."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pyarrow as pa

from firnline.errors import ConfigError, SchemaError
from firnline.options import DeltaSinkOptions
from firnline.sinks.base import Capabilities, EpochCommit, RunTasks, SinkContext
from firnline.sinks.delta.contents import missing_fields, special_features
from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.delta.upsert.changes import check_key, load_changes, table_columns
from firnline.sinks.delta.upsert.rewrite import run_in_threads
from firnline.sinks.delta.upsert.rewrite_plan import UpsertWork
from firnline.sinks.delta.upsert.rewrite_task import RewriteTask
from firnline.sinks.delta.upsert.stage import CHANGES
from firnline.types import Json, Receipt

# Features under which rows lie elsewhere than in the columns of the data files.
_REFUSED = ("deletionVectors", "columnMapping")


class UpsertSink(DeltaSink):
    """Applies change rows by key; claims, fences, receipts and the ledger are those of any Delta sink.

    The steps of a commit, under the version that was read and that the fence holds for:
    1. read the change rows of the epoch; of several with one key the newest counts;
    2. find the files of that version that may hold one of the keys;
    3. rewrite those that do, in tasks (`run_tasks`): complete and durable, visible to nobody;
    4. commit Remove and Add actions onto exactly that version, with the checkpoint.
    When another writer's commit lands first, it begins again at step 2 on the new version. A kill leaves files that
    nobody names.
    """

    capabilities: ClassVar[Capabilities] = replace(DeltaSink.capabilities, upserts=True)

    def __init__(self, options: DeltaSinkOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        if not self._options.key:
            raise ConfigError(f"sink {self.name!r} is to be upserted and has no key", hint="Set key: [column, ...].")
        self._work: UpsertWork | None = None

    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        receipt = super().commit(commit, run_tasks)
        self._work = None
        return receipt

    def _append(self, commit: EpochCommit, onto: int, run_tasks: RunTasks | None) -> int:
        changed = [file for file in commit.files if file.get("kind") == CHANGES]
        if not changed:  # nothing changed, or the epoch was made when the spec still said append
            return super()._append(commit, onto, run_tasks)
        self._check_rewritable()
        exchange = self._open_work(commit, changed).prepare(self._table, run_tasks or run_in_threads)
        told = replace(commit, facts={**commit.facts, **exchange.facts})
        txns, expiring = self._transactions(commit, onto)
        info = self._commit_info(told, onto)
        return self._table.exchange("delta.commit", exchange.removed, exchange.added, info, txns, expiring, onto=onto)

    def _open_work(self, commit: EpochCommit, changed: list[dict[str, Json]]) -> UpsertWork:
        """Return the earlier work on this attempt: an attempt with a conflict, or whose answer was lost."""
        attempt = commit.checkpoint.attempt
        if self._work is not None and self._work.attempt == attempt:
            return self._work
        check_key(self._options.key, self._table.schema())
        partition_by = self._table.partition_columns()
        task = RewriteTask(
            type=self._options.type,
            attempt=attempt,
            table=self.storage.root,
            storage_options=self._options.storage_options,
            partition_by=tuple(partition_by),
            key=tuple(self._options.key),
            file_size_mb=self._options.file_size_mb,
            changes=tuple({"path": file["path"], "crc32": file["crc32"]} for file in changed),
            schema=self._table.schema(),
        )
        changes = load_changes(self.storage, changed, self._options.key, partition_by)
        lacking = missing_fields(self._table.schema(), changes.rows.schema)
        if lacking:
            raise SchemaError(f"the changes have columns that the table lacks: {[field.name for field in lacking]}")
        self._work = UpsertWork(attempt, self.storage, changes, task)
        return self._work

    def columns_of(self, rows: pa.Schema) -> pa.Schema:
        return table_columns(rows)

    def _create(self, commit: EpochCommit) -> None:
        columns = table_columns(commit.schema)
        if len(columns):  # else its rows are still to come
            check_key(self._options.key, columns)
        super()._create(replace(commit, schema=columns))

    def _evolve(self, wanted: pa.Schema, onto: int) -> bool:
        return super()._evolve(table_columns(wanted), onto)

    def _check_joinable(self) -> None:
        super()._check_joinable()
        self._check_rewritable()
        columns = self._table.schema()
        if not set(columns.names) <= set(self._placeholder().names):  # else its rows are still to come
            check_key(self._options.key, columns)

    def _check_rewritable(self) -> None:
        """Refuse a table whose files hold less, or more, than their rows, or from which no row may be deleted."""
        used = [feature for feature in special_features(self._table.delta) if feature in _REFUSED]
        if used:
            raise SchemaError(
                f"the table {self._table.uri} uses {', '.join(used)}, under which Firnline does not change rows",
                hint="Upsert into a table of its own, or take the feature off this one.",
            )
        if (self._table.setting("delta.appendOnly") or "false").lower() == "true":
            raise SchemaError(
                f"the table {self._table.uri} is append-only, and an upsert removes rows",
                hint="Set its property delta.appendOnly to false, or write: append.",
            )

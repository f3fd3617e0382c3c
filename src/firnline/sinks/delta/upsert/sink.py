"""A Delta table whose rows are changed by key: change rows become Remove and Add actions, in one commit.

The result for a file depends only on that file and the changes. If another writer's commit comes first, only files that
are new in its version are processed, and results for files that are gone are deleted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.transaction import RemoveAction

from firnline.checkpoint.codec import canonical, checksum, short_number
from firnline.errors import SchemaError
from firnline.options import FACTS, LINEAGE, MISSING, OP
from firnline.schema import widen, wider_columns
from firnline.sinks.base import Capabilities, EpochCommit, RunTasks, SinkContext
from firnline.sinks.changes import table_columns
from firnline.sinks.delta.contents import as_in_table, bundles, find_removable, missing_fields, special_features
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import CONFLICT_TRIES, DeltaSink
from firnline.sinks.delta.stage import CHANGE_COUNTS, CHANGES, KEY, ChangeStager
from firnline.sinks.delta.table import Table
from firnline.sinks.delta.upsert.changes import (
    SEQUENCE_BY,
    Changes,
    Indices,
    Mask,
    check_key,
    check_sequence,
    comparable,
    load_changes,
)
from firnline.sinks.delta.upsert.prune import ActiveFile, KeyRanges
from firnline.sinks.delta.upsert.rewrite import (
    FileToRewrite,
    RewriteReport,
    RewriteTask,
    read_old_values,
    rewrite,
    run_in_threads,
)
from firnline.storage import Storage
from firnline.types import Json, Receipt

TASK_BYTES = 16 * 1024 * 1024  # of files per task: enough to be worth a task, few enough to distribute
TASK_FILES = 32
INSERT_ROWS = 250_000  # that one task writes
INSERT_HERE = 50_000  # up to this many rows are written in this process: a task is not worth its start


@dataclass(frozen=True, slots=True)
class Exchange:
    """The content of a commit: files to remove, files to add, and counts for people who read the log."""

    removed: list[RemoveAction]
    added: list[dict[str, Json]]
    facts: dict[str, Json]
    touched: frozenset[str]  # the removed files, by their path in the log


@dataclass(slots=True)
class _Done:
    """The result for one file."""

    file: ActiveFile
    staged: list[dict[str, Json]]
    matched: Indices
    placed: Indices
    older: Indices


@dataclass(slots=True)
class UpsertWork:
    """The work on the changes of one attempt; kept between attempts to commit."""

    attempt: str
    storage: Storage
    changes: Changes
    task: RewriteTask  # what all tasks have in common
    pipeline: str
    _given: tuple[Changes, RewriteTask] | None = None  # before old values were read from the table
    _completed: list[dict[str, Json]] = field(default_factory=list)  # files of changes with old values of the table
    _done: dict[str, _Done] = field(default_factory=dict)  # by their path in the log
    _inserted: tuple[bytes, list[dict[str, Json]]] | None = None

    def prepare(self, table: Table, run_tasks: RunTasks, types: Mapping[str, pa.DataType]) -> Exchange:
        """Write the missing files for the version of the table handle; `types` are columns to get a wider type.

        Called again only once the last exchange is known not to be committed: files are deleted here.

        Raises:
            SchemaError: a file that must go has a name in the log that cannot be repeated safely.
            SinkError: a file cannot be read or written.
        """
        schema = pa.schema([f.with_nullable(True) for f in widen(table.schema(), types)])
        self.task = replace(self.task, schema=schema)
        if self._given is not None:
            self._begin_again()
        if (numbers := self._find_elsewhere()) is not None:
            self._complete(table, numbers)
        if self.changes.empties:
            nothing = np.empty(0, np.int64)
            files = KeyRanges.all_files(table.delta)
            self._done = {file.path: _Done(file, [], nothing, nothing, nothing) for file in files}
            self._insert(np.flatnonzero(self.changes.keeps), run_tasks)
            return self._exchange()
        ranges = KeyRanges(self.changes.keys, self.task.partition_by)
        candidates, active = ranges.find_candidates(table.delta)
        for path in [path for path in self._done if path not in active]:
            self._discard(self._done.pop(path).staged)
        self._rewrite([file for file in candidates if file.path not in self._done], run_tasks)
        taken = self._settle_doubles(run_tasks)
        self._insert(np.flatnonzero(self.changes.keeps & ~taken), run_tasks)
        return self._exchange()

    def _find_elsewhere(self) -> Indices | None:
        """Return the changes that lack values and whose new rows may lie in another file than the old ones: the key
        changed, or the partition; None if there are none."""
        changes = self.changes
        if not changes.unknown or changes.empties:
            return None
        lacks = np.logical_or.reduce(list(changes.unknown.values())) & changes.keeps
        if set(self.task.partition_by) <= set(self.task.key):
            if changes.origins is None:
                return None
            same = np.ones(len(changes), np.bool_)
            for name in changes.keys.column_names:
                pair = (changes.keys.column(name), changes.origins.column(name))
                same &= pc.fill_null(pc.equal(*pair), True).to_numpy()
            lacks &= ~same
        found: Indices = np.flatnonzero(lacks)
        return found if len(found) else None

    def _complete(self, table: Table, numbers: Indices) -> None:
        """Read the old values of these changes from the table, and stage all changes anew with them, for the tasks.

        Nothing else depends on these files: a kill leaves them to the next sweep.
        """
        changes, task = self._given = (self.changes, self.task)
        origins = changes.origins if changes.origins is not None else changes.keys
        keys, columns = origins.take(pa.array(numbers)).combine_chunks(), list(changes.unknown)
        candidates, _ = KeyRanges(keys, task.partition_by).find_candidates(table.delta)
        nothing = np.empty(0, np.int64)
        files = [FileToRewrite(_removable(f), f.size_bytes, f.rows, f.partition_values, nothing) for f in candidates]
        old = read_old_values(self.storage, files, keys, task.partition_by, task.schema, columns)
        at = np.full(len(changes), -1, np.int64)
        at[numbers[old.numbers]] = np.arange(len(old.numbers))
        rows, unknown = changes.rows, dict(changes.unknown)
        for name in columns:
            takes = unknown[name] & (at >= 0)
            held = old.rows.column(name).combine_chunks().take(pa.array(at, mask=~takes))
            new = rows.column(name).cast(held.type)
            index = rows.schema.get_field_index(name)
            rows = rows.set_column(index, pa.field(name, held.type), pc.if_else(pa.array(takes), held, new))
            unknown[name] &= ~takes
        rows = rows.combine_chunks()
        self.changes = replace(changes, rows=rows, unknown={n: mask for n, mask in unknown.items() if mask.any()})
        left = self.changes.unknown.items()
        lacks = [[name for name, mask in left if mask[n]] or None for n in range(len(changes) if left else 0)]
        staged = rows.append_column(OP, pc.if_else(pa.array(changes.keeps), "update", "delete"))
        if lacks:
            staged = staged.append_column(MISSING, pa.array(lacks, pa.list_(pa.string())))
        size = max(1, staged.nbytes)
        target = {"file_size_bytes": 2 * size, "pipeline": self.pipeline, "shape": {KEY: task.key}, "partition_by": []}
        stager = ChangeStager(target, self.attempt, self.storage)
        for batch in staged.combine_chunks().to_batches():
            stager.write(batch)
        self._completed = stager.close()
        order = task.changes[0].get(SEQUENCE_BY)
        described = tuple({"path": f["path"], "crc32": f["crc32"], SEQUENCE_BY: order} for f in self._completed)
        self.task = replace(task, changes=described)

    def _begin_again(self) -> None:
        """Forget the old values that were read from another version of the table, and what was made of them."""
        assert self._given is not None
        for one in self._done.values():
            self._discard(one.staged)
        self._discard(self._inserted[1] if self._inserted is not None else [])
        self._done, self._inserted = {}, None
        self.discard_completed()
        schema = self.task.schema
        self.changes, self.task = self._given[0], replace(self._given[1], schema=schema)
        self._given = None

    def discard_completed(self) -> None:
        """Delete the changes that were staged anew."""
        self._discard(self._completed)
        self._completed = []

    def _rewrite(
        self, files: Sequence[ActiveFile], run_tasks: RunTasks, barred: dict[str, Indices] | None = None
    ) -> None:
        by_key = {_removable(file): file for file in files}
        nothing = np.empty(0, np.int64)
        described = [
            FileToRewrite(
                key, file.size_bytes, file.rows, file.partition_values, barred[file.path] if barred else nothing
            )
            for key, file in by_key.items()
        ]
        tasks = [
            replace(self.task, files=tuple(bundle)).to_json() for bundle in bundles(described, TASK_BYTES, TASK_FILES)
        ]
        for report in run_tasks(self.attempt, tasks) if tasks else []:
            for rewritten in RewriteReport.from_json(report).files:
                file = by_key[rewritten.path]
                self._done[file.path] = _Done(
                    file, rewritten.staged, rewritten.matched, rewritten.placed, rewritten.older
                )

    def _settle_doubles(self, run_tasks: RunTasks) -> Mask:
        """Keep one new row for every change, even if the table has a key twice, and none where it has a newer row.

        Returns which changes need no row in another file.
        """
        taken = self._find_older()
        barred: dict[str, Indices] = {}
        for path in sorted(self._done):
            placed = self._done[path].placed
            twice = placed[taken[placed]]
            if len(twice):
                barred[path] = twice
            taken[placed] = True
        if barred:
            again = [self._done.pop(path) for path in barred]
            for one in again:
                self._discard(one.staged)
            self._rewrite([one.file for one in again], run_tasks, barred)
        return taken

    def _find_older(self) -> Mask:
        """Return for each change whether the table has a newer row of its key."""
        older = np.zeros(len(self.changes), np.bool_)
        for one in self._done.values():
            older[one.older] = True
        return older

    def _insert(self, numbers: Indices, run_tasks: RunTasks) -> None:
        """Write the new rows that are in no rewritten file, unless they are already written."""
        mark = numbers.tobytes()
        if self._inserted is not None:
            if self._inserted[0] == mark:
                return
            self._discard(self._inserted[1])
            self._inserted = None
        parts = np.array_split(self._by_partition(numbers), -(-len(numbers) // INSERT_ROWS)) if len(numbers) else []
        tasks = [replace(self.task, insert=np.sort(part)) for part in parts]
        if len(numbers) <= INSERT_HERE:
            reports = [rewrite(task) for task in tasks]
        else:
            answers = run_tasks(self.attempt, [task.to_json() for task in tasks])
            reports = [RewriteReport.from_json(answer) for answer in answers]
        self._inserted = (mark, [file for report in reports for file in report.inserted])

    def _by_partition(self, numbers: Indices) -> Indices:
        """Return the changes ordered by partition, so that few files are written."""
        rows = self.changes.rows
        names = [name for name in self.task.partition_by if name in rows.column_names]
        if not names or len(numbers) <= INSERT_ROWS:
            return numbers
        chosen = pa.table({name: comparable(rows.column(name), True).take(pa.array(numbers)) for name in names})
        order = pc.sort_indices(chosen, sort_keys=[(name, "ascending") for name in names])
        found: Indices = numbers[order.to_numpy()]
        return found

    def _exchange(self) -> Exchange:
        now_ms = int(time.time() * 1000)
        touched = [one for one in self._done.values() if len(one.matched) or self.changes.empties]
        matched = np.zeros(len(self.changes), np.bool_)
        for one in touched:
            matched[one.matched] = True
        keeps, older = self.changes.keeps, self._find_older()
        inserted = self._inserted[1] if self._inserted is not None else []
        return Exchange(
            removed=[
                RemoveAction(_removable(f), True, now_ms, f.size_bytes, dict(f.partition_values))
                for f in (one.file for one in touched)
            ],
            added=[file for one in touched for file in one.staged] + inserted,
            facts={
                "inserted": int((keeps & ~matched & ~older).sum()),
                "updated": int((keeps & matched & ~older).sum()),
                "deleted": self._count_emptied() + int((~keeps & matched & ~older).sum()),
                "files_rewritten": len(touched),
                **({"older": int(older.sum())} if self.changes.sequence is not None else {}),
            },
            touched=frozenset(one.file.path for one in touched),
        )

    def _count_emptied(self) -> int:
        return sum(one.file.rows or 0 for one in self._done.values()) if self.changes.empties else 0

    def _discard(self, staged: Sequence[dict[str, Json]]) -> None:
        """Delete our files that no commit names."""
        for file in staged:
            self.storage.delete(str(file["path"]))


def _removable(file: ActiveFile) -> str:
    key = find_removable(file.path)
    if key is None:
        raise SchemaError(
            f"the log calls a file {file.path!r}, a name under which it cannot be replaced safely",
            hint="Rewrite the table's files with the engine that wrote them (OPTIMIZE), then run again.",
            file=file.path,
        )
    return key


def _key_number(key: Sequence[str]) -> int:
    """Return a number that stands for a key in the log; the order of its columns does not matter."""
    return short_number(checksum(canonical(sorted(key))))


_CHANGE_FACTS = ("path", "crc32", SEQUENCE_BY)

# Features under which rows lie elsewhere than in the columns of the data files.
_REFUSED = ("deletionVectors", "columnMapping")


class UpsertSink(DeltaSink):
    """Applies change rows by key; claims, fences, receipts and the ledger are those of any Delta sink.

    The steps of a commit, under the version that was read and that the fence holds for:
    1. read the change rows of the epoch; of several with one key the newest counts;
    2. find the files of that version that may hold one of the keys;
    3. rewrite those that do, in tasks (`run_tasks`): complete and durable, visible to no reader;
    4. commit Remove and Add actions onto exactly that version, with the checkpoint.
    If a column gets a wider type, step 4 replaces every file: those of step 3, and the others with that type.
    If another writer's commit comes first, the sink starts again at step 2 on the new version. A kill leaves files that
    no commit names.
    """

    capabilities: ClassVar[Capabilities] = replace(DeltaSink.capabilities, upserts=True)

    def __init__(self, options: DeltaSinkOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        context.check_key(options)
        self._work: UpsertWork | None = None
        self._applied: dict[str, int] = {}  # what the last commit did to rows

    @property
    def _key(self) -> tuple[str, ...]:
        """The columns that identify a row; a captured table's come from the source."""
        return self._context.key_of(self._options)

    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        self._applied = {}
        receipt = super().commit(commit, run_tasks)
        if self._work is not None:
            self._work.discard_completed()
        self._work = None
        return receipt if receipt.changes else replace(receipt, changes=self._applied)

    def _append(self, commit: EpochCommit, onto: int, run_tasks: RunTasks | None) -> int:
        changed = [file for file in commit.files if file.get("kind") == CHANGES]
        if not changed:  # nothing changed, or the epoch was made when the spec still said append
            return super()._append(commit, onto, run_tasks)
        self._check_rewritable()
        key = self._key_of(changed)
        self._check_table_key(key, f"epoch {commit.checkpoint.epoch} was made")
        types = wider_columns(self._table.schema(), table_columns(commit.schema))
        exchange = self._open_work(commit, changed).prepare(self._table, run_tasks or run_in_threads, types)
        self._applied = {name: int(exchange.facts[name]) for name in CHANGE_COUNTS}
        told = replace(commit, facts={**commit.facts, **exchange.facts, KEY: list(key)})
        txns, expiring = self._transactions(commit, onto)
        info = self._commit_info(told, onto)
        if not types:
            return self._table.exchange(
                "delta.commit", exchange.removed, exchange.added, info, txns, expiring, onto=onto
            )
        return self._replace_all(told, types, exchange.added, exchange.touched, info, onto, run_tasks)

    def _key_of(self, changed: Sequence[dict[str, Json]]) -> tuple[str, ...]:
        """Return the key that an epoch was made with: its files name it, those of older versions do not."""
        return tuple(changed[0].get(KEY) or self._key)

    def _transactions(self, commit: EpochCommit, onto: int) -> tuple[dict[str, int], dict[str, int]]:
        txns, expiring = super()._transactions(commit, onto)
        changed = [file for file in commit.files if file.get("kind") == CHANGES]
        if changed:
            txns[self._id("-key")] = _key_number(self._key_of(changed))
        return txns, expiring

    def _check_table_key(self, key: Sequence[str], whose: str) -> None:
        """Refuse another key than the one that the rows of the table were written by.

        Raises:
            SchemaError: it names both keys.
        """
        held = self._table.txn(self._id("-key"))
        if held is None or held == _key_number(key):
            return
        names = self._find_table_key(held)
        raise SchemaError(
            f"the rows of {self._table.uri} were upserted by {f'the key {names}' if names else 'another key'}, "
            f"{whose} with {', '.join(key)}: rows of one key would no longer be found",
            hint=self._key_hint(names),
        )

    def _key_hint(self, names: str) -> str:
        """Return what to do about another key than that of the table's rows."""
        if self._options.key or self._context.find_input_key is None:
            return f"Set the key of sink {self.name!r} back, or name another table."
        back = f"If {names} still identifies a row, set `key: [{names}]` of sink {self.name!r}. " if names else ""
        return (
            f"{back}Otherwise, nothing is lost this way: take the sink out of the spec, and run: firnline run --once. "
            "Then add it with another name, another table and `start: snapshot`. The only sink of a pipeline gets a "
            "pipeline with another `name` instead."
        )

    def _find_table_key(self, number: int) -> str:
        """Return the key of the table's rows from a recent commit, as text; nothing if the log no longer has one."""
        for commit in self._log.backwards(self._table.version, CONFLICT_TRIES):
            found = (commit.find_info(self._pipeline) or {}).get(KEY)
            if found and _key_number(found) == number:
                return ", ".join(found)
        return ""

    def _open_work(self, commit: EpochCommit, changed: list[dict[str, Json]]) -> UpsertWork:
        """Return the earlier work on this attempt: an attempt with a conflict, or whose answer was lost."""
        attempt = commit.checkpoint.attempt
        if self._work is not None and self._work.attempt == attempt:
            return self._work
        key = self._key_of(changed)
        if not self._awaits_rows(self._table.schema()):
            self._check_columns(key, self._table.schema(), changed[0].get(SEQUENCE_BY))
        partition_by = self._table.partition_columns()
        task = RewriteTask(
            type=self._options.type,
            attempt=attempt,
            table=self.storage.root,
            storage_options=self._options.storage_options,
            partition_by=tuple(partition_by),
            key=key,
            file_size_bytes=self._options.file_size,
            changes=tuple({name: file[name] for name in _CHANGE_FACTS if name in file} for file in changed),
            schema=self._table.schema(),
        )
        changes = load_changes(self.storage, changed, key, partition_by)
        columns = self._table.schema()
        lacking = missing_fields(columns, as_in_table(changes.rows.schema, columns))
        if lacking:
            raise SchemaError(f"the changes have columns that the table lacks: {', '.join(f.name for f in lacking)}")
        self._work = UpsertWork(attempt, self.storage, changes, task, self._pipeline)
        return self._work

    def _check_columns(self, key: Sequence[str], columns: pa.Schema, sequence_by: str | None) -> None:
        """Refuse columns without the key, or without the one that orders rows."""
        check_key(key, columns)
        if sequence_by is not None:
            check_sequence(sequence_by, columns)

    def stage_target(self) -> dict[str, Json]:
        target = super().stage_target()
        target["shape"]["key"] = list(self._key)
        if self._context.input_is_source:
            delete_when = {name: list(values) for name, values in self._options.delete_when.items()}
            target["shape"]["records"] = {"sequence_by": self._options.sequence_by, "delete_when": delete_when}
        return target

    def refuse_widening(self, types: Mapping[str, pa.DataType]) -> dict[str, str]:
        if self._context.input_is_source:
            return super().refuse_widening(types)
        return dict.fromkeys(types, "an upsert changes rows, not types")

    def columns_of(self, rows: pa.Schema) -> pa.Schema:
        return table_columns(rows)

    def _create(self, commit: EpochCommit) -> None:
        columns = table_columns(commit.schema)
        if not self._awaits_rows(columns):
            changed = [file for file in commit.files if file.get("kind") == CHANGES]
            key = self._key_of(changed) if changed else self._key
            order = changed[0].get(SEQUENCE_BY) if changed else self._options.sequence_by
            self._check_columns(key, columns, order)
        super()._create(replace(commit, schema=columns))

    def _check_evolution(self, wanted: pa.Schema) -> None:
        super()._check_evolution(table_columns(wanted))

    def _evolve(self, wanted: pa.Schema, onto: int, epoch: int) -> bool:
        return super()._evolve(table_columns(wanted), onto, epoch)

    def _check_joinable(self) -> None:
        super()._check_joinable()
        self._check_rewritable()
        self._check_table_key(self._key, "and the spec upserts")
        columns = self._table.schema()
        if not self._awaits_rows(columns):
            check_key(self._key, columns)

    def _awaits_rows(self, columns: pa.Schema) -> bool:
        """Return whether a table has no columns of its own yet: its rows are still to come. (The log may say that a
        table was emptied before it describes the table.)"""
        return set(columns.names) <= {*self._placeholder().names, *FACTS, *LINEAGE}

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

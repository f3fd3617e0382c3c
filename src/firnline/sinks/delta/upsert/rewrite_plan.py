"""Turns the changes of one epoch into files that replace others, at any version of the table.

The result for a file depends only on that file and the changes. If another writer's commit comes first, only files that
are new in its version are processed, and results for files that are gone are deleted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.transaction import RemoveAction

from firnline.errors import SchemaError
from firnline.sinks.base import RunTasks
from firnline.sinks.delta.contents import find_removable
from firnline.sinks.delta.table import Table
from firnline.sinks.delta.upsert.changes import Changes, Indices, Mask, comparable
from firnline.sinks.delta.upsert.prune import ActiveFile, KeyRanges
from firnline.sinks.delta.upsert.rewrite import rewrite
from firnline.sinks.delta.upsert.rewrite_task import FileToRewrite, RewriteReport, RewriteTask
from firnline.storage import Storage
from firnline.types import Json

TASK_BYTES = 16 * 1024 * 1024  # of files that one task takes: enough to be worth a task, few enough to spread
TASK_FILES = 32
INSERT_ROWS = 250_000  # that one task writes
INSERT_HERE = 50_000  # up to this many rows are written in this process: a task is not worth its start


@dataclass(frozen=True, slots=True)
class Exchange:
    """The content of a commit: files to remove, files to add, and the counts for people."""

    removed: list[RemoveAction]
    added: list[dict[str, Json]]
    facts: dict[str, Json]


@dataclass(slots=True)
class _Done:
    """The result for one file."""

    file: ActiveFile
    staged: list[dict[str, Json]]
    matched: Indices
    placed: Indices


@dataclass(slots=True)
class UpsertWork:
    """The work on the changes of one attempt; kept between attempts to commit."""

    attempt: str
    storage: Storage
    changes: Changes
    task: RewriteTask  # what all tasks have in common
    _done: dict[str, _Done] = field(default_factory=dict)  # by the path that the log spells
    _inserted: tuple[bytes, list[dict[str, Json]]] | None = None

    def prepare(self, table: Table, run_tasks: RunTasks) -> Exchange:
        """Write the missing files for the version of the table handle.

        Called again only once the last exchange is known not to be committed: files are deleted here.

        Raises:
            SchemaError: a file that must go has a name in the log that cannot be repeated safely.
            SinkError: a file cannot be read or written.
        """
        schema = pa.schema([f.with_nullable(True) for f in table.schema()])
        self.task = replace(self.task, schema=schema)
        ranges = KeyRanges(self.changes.keys, self.task.partition_by)
        candidates, active = ranges.find_candidates(table.delta)
        for path in [path for path in self._done if path not in active]:
            self._discard(self._done.pop(path).staged)
        self._rewrite([file for file in candidates if file.path not in self._done], run_tasks)
        taken = self._settle_doubles(run_tasks)
        self._insert(np.flatnonzero(self.changes.keeps & ~taken), run_tasks)
        return self._exchange()

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
        tasks = [replace(self.task, files=tuple(bundle)).to_json() for bundle in _bundles(described)]
        for report in run_tasks(self.attempt, tasks) if tasks else []:
            for rewritten in RewriteReport.from_json(report).files:
                file = by_key[rewritten.path]
                self._done[file.path] = _Done(file, rewritten.staged, rewritten.matched, rewritten.placed)

    def _settle_doubles(self, run_tasks: RunTasks) -> Mask:
        """Let every change have one place, also where a table had a key twice; returns which have one."""
        taken = np.zeros(len(self.changes), np.bool_)
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

    def _insert(self, numbers: Indices, run_tasks: RunTasks) -> None:
        """Write the new rows without a place in a rewritten file, unless they are already written."""
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
        """The same changes, those of one partition side by side, so that few files are made."""
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
        touched = [one for one in self._done.values() if len(one.matched)]
        matched = np.zeros(len(self.changes), np.bool_)
        for one in touched:
            matched[one.matched] = True
        keeps = self.changes.keeps
        inserted = self._inserted[1] if self._inserted is not None else []
        return Exchange(
            removed=[
                RemoveAction(_removable(f), True, now_ms, f.size_bytes, dict(f.partition_values))
                for f in (one.file for one in touched)
            ],
            added=[file for one in touched for file in one.staged] + inserted,
            facts={
                "inserted": int((keeps & ~matched).sum()),
                "updated": int((keeps & matched).sum()),
                "deleted": int((~keeps & matched).sum()),
                "files_rewritten": len(touched),
            },
        )

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


def _bundles(files: Sequence[FileToRewrite]) -> Iterator[list[FileToRewrite]]:
    """Group the files into tasks: large ones alone, small ones together."""
    bundle: list[FileToRewrite] = []
    size = 0
    for file in files:
        if bundle and (size + file.size_bytes > TASK_BYTES or len(bundle) == TASK_FILES):
            yield bundle
            bundle, size = [], 0
        bundle.append(file)
        size += file.size_bytes
    if bundle:
        yield bundle

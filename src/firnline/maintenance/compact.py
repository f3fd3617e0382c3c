"""Rewrites small files as large ones, without changing data or blocking other writers.

A bin is a group of files of one partition that become one file. For each batch of bins:
1. Pin the attempt, so that a concurrent sweep spares its files.
2. Write the new files, complete and durable. No reader sees them yet.
3. Commit Remove and Add actions onto one exact version. At that version every removed file is still in the table
   (delta-rs does not check it), and no sweep has declared our new files, which it does if it considers our pin
   abandoned.
4. Delete the pin.

After a conflict, the commits in between are read. If they removed none of our files and changed neither columns nor
protocol, only the commit is repeated, so compaction succeeds however often others commit. Otherwise the bins are
planned and written again. A kill leaves at most unnamed files, and a pin that expires after a day.
"""

from __future__ import annotations

import json
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
from deltalake import CommitProperties, PostCommitHookProperties
from deltalake.transaction import AddAction, RemoveAction

from firnline.checkpoint.codec import FORMAT, canonical
from firnline.clock import jitter
from firnline.errors import CommitConflictError, CommitUnknownError, ConfigError, SinkError
from firnline.maintenance.log_names import LogNames
from firnline.maintenance.survey import Progress, open_table
from firnline.names import COUNTS_KEY, INFO_KEY, compaction_pin
from firnline.process import this_process
from firnline.sinks.delta.contents import find_removable, special_features
from firnline.sinks.delta.durable import count_actions
from firnline.sinks.delta.stage import ParquetStager
from firnline.sinks.delta.sweeps import SweepLog
from firnline.sinks.delta.table import Table, add_action
from firnline.state.snapshot import exists
from firnline.storage import Storage
from firnline.types import Ids, Json, RandomIds

logger = logging.getLogger(__name__)

SMALL = 0.75  # fraction of the target size: a larger file stays as it is
BATCH_ROWS = 65_536
PartitionFilter = tuple[str, str, Any]  # column, operator, value or values

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, wanted: value in wanted,
    "not in": lambda value, wanted: value not in wanted,
}


@dataclass(frozen=True, slots=True)
class OldFile:
    """One file of the version that was read. `path` is in the form for delta-rs, which encodes it again for the log."""

    path: str
    size_bytes: int
    rows: int | None
    partition: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """Small files of one partition that become one."""

    files: tuple[OldFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


def check_supported(table: Table) -> None:
    """Refuse tables whose files hold more than rows."""
    used = special_features(table.delta)
    if used:
        raise ConfigError(
            f"{table.uri} uses {', '.join(used)}, under which Firnline does not rewrite files",
            hint="Compact it with OPTIMIZE of the engine that wrote it.",
        )


def plan(table: Table, target_bytes: int, filters: Iterable[PartitionFilter]) -> tuple[list[Bin], int]:
    """Return bins of small files, in the order of writing, and how many files cannot be named safely."""
    by_partition: dict[tuple[Any, ...], list[OldFile]] = {}
    unsafe = 0
    for file in _files(table, list(filters)):
        if file.size_bytes >= target_bytes * SMALL:
            continue
        if file.path == "":
            unsafe += 1
        else:
            by_partition.setdefault(file.partition, []).append(file)
    bins = [b for files in by_partition.values() for b in _pack(files, target_bytes)]
    return bins, unsafe


def _pack(files: list[OldFile], target_bytes: int) -> Iterator[Bin]:
    held: list[OldFile] = []
    size = 0
    for file in files:
        if held and size + file.size_bytes > target_bytes:
            if len(held) > 1:
                yield Bin(tuple(held))
            held, size = [], 0
        held.append(file)
        size += file.size_bytes
    if len(held) > 1:
        yield Bin(tuple(held))


def _files(table: Table, filters: list[PartitionFilter]) -> Iterator[OldFile]:
    columns = table.partition_columns()
    tests = [_test(table, columns, one) for one in filters]
    actions = pa.table(table.delta.get_add_actions())
    wanted = ["path", "size_bytes", "num_records", "modification_time", *(["partition"] if columns else [])]
    actions = actions.select(wanted).sort_by([("modification_time", "ascending"), ("path", "ascending")])
    for batch in actions.to_batches(max_chunksize=BATCH_ROWS):
        for row in batch.to_pylist():
            values = tuple(row["partition"][c] for c in columns) if columns else ()
            if all(test(values) for test in tests):
                path = find_removable(row["path"]) or ""
                yield OldFile(path, int(row["size_bytes"]), row["num_records"], values)


def _test(table: Table, columns: list[str], wanted: PartitionFilter) -> Callable[[tuple[Any, ...]], bool]:
    column, sign, value = wanted
    if column not in columns:
        raise ConfigError(f"{column!r} is no partition column", hint=f"The table is partitioned by {columns}.")
    if sign not in _OPERATORS:
        raise ConfigError(f"{sign!r} is no operator", hint=f"Use one of {', '.join(_OPERATORS)}.")
    kind, position = table.schema().field(column).type, columns.index(column)

    def typed(one: Any) -> Any:
        try:
            return pa.scalar(one).cast(kind).as_py() if one is not None else None
        except pa.ArrowException as error:
            raise ConfigError(f"{one!r} is no value of {column} ({kind})") from error

    if sign.endswith("in"):
        target: Any = [typed(one) for one in value]
    else:
        target = typed(value)

    def test(values: tuple[Any, ...]) -> bool:
        found = values[position]
        if found is None and sign not in ("=", "!=", "in", "not in"):
            return False
        return _OPERATORS[sign](found, target)

    return test


class Rewriter:
    """Reads files with the table's current columns and stages them again."""

    def __init__(self, table: Table, storage: Storage, options: dict[str, str], target_bytes: int) -> None:
        self._storage = storage
        self._options = options
        self._target_bytes = target_bytes
        self._partitions = table.partition_columns()
        self._schema = table.schema()
        self._format = pads.ParquetFileFormat()

    def rewrite(self, chosen: Bin, attempt: str) -> list[dict[str, Json]]:
        """Stage the rows of a bin under an attempt. Returns the staged file, durable.

        Raises:
            SinkError: a file cannot be read, or its row count differs from the log; nothing is left behind.
        """
        target = {
            "table": self._storage.root,
            "storage_options": self._options,
            "partition_by": self._partitions,
            "file_size_bytes": 2 * self._target_bytes,  # one file per bin, also when it packs worse than its parts
        }
        stager = ParquetStager(target, attempt, self._storage)
        try:
            read = 0
            for file in chosen.files:
                rows = 0
                for batch in self._read(file):
                    stager.write(batch)
                    rows += batch.num_rows
                if file.rows is not None and rows != file.rows:
                    raise SinkError(f"{file.path} holds {rows} rows, the log says {file.rows}")
                read += rows
            staged = stager.close()
            if sum(int(f["rows"]) for f in staged) != read:
                raise SinkError(f"rewriting {len(chosen.files)} files lost rows; nothing was committed")
        except (pa.ArrowException, OSError) as error:
            stager.discard()
            raise SinkError(f"cannot rewrite files of {self._storage.root}: {error}") from error
        except BaseException:
            stager.discard()
            raise
        return staged

    def _read(self, file: OldFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file, with missing columns as nulls and its partition values as columns."""
        data = pa.schema([f for f in self._schema if f.name not in self._partitions])
        fragment = self._format.make_fragment(pa.BufferReader(self._storage.get(file.path)))  # a small file, by choice
        values = dict(zip(self._partitions, file.partition, strict=True))
        for batch in fragment.to_batches(schema=data, batch_size=BATCH_ROWS):
            if not batch.num_rows:
                continue
            columns = [
                pa.repeat(pa.scalar(values[f.name], f.type), batch.num_rows)
                if f.name in values
                else batch.column(f.name)
                for f in self._schema
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=pa.schema([f.with_nullable(True) for f in self._schema]))


TARGET_BYTES = 128 * 1024 * 1024
BATCH_BYTES = 1024 * 1024 * 1024  # rewritten between two commits
BATCH_BINS = 64
COMMIT_TRIES = 30  # each is another writer's commit that came first
ROUNDS = 5  # plans that others invalidate before we give up
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The result of `compact`; in a dry run, what it would do."""

    table: str
    version: int
    files_removed: int
    files_added: int
    bytes_removed: int
    bytes_added: int
    rows: int
    commits: int
    conflicts: int  # commits that had to be repeated
    attempts: tuple[str, ...]  # part of the new files' names
    files_skipped: int = 0  # files whose names in the log cannot be repeated safely
    stopped: bool = False
    dry_run: bool = False  # then the files and bytes are those of the plan, `bytes_added` at most


@dataclass(slots=True)
class _Tally:
    files_removed: int = 0
    files_added: int = 0
    bytes_removed: int = 0
    bytes_added: int = 0
    rows: int = 0
    commits: int = 0
    conflicts: int = 0


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A bin and the file staged in its place."""

    chosen: Bin
    staged: list[dict[str, Json]]


class CompactTable(Table):
    """A table whose files can be swapped for others with the same rows."""

    def swap(self, done: Sequence[_Rewritten], info: Json, *, onto: int) -> int:
        """Remove and add in one commit, onto the version `onto`. Returns the new version."""
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = []
        for one in done:
            values = dict(one.staged[0]["partition_values"]) if one.staged else None
            actions += [RemoveAction(old.path, False, now_ms, old.size_bytes, values) for old in one.chosen.files]
            actions += [add_action(file, data_change=False) for file in one.staged]
        metadata = {INFO_KEY: json.dumps(info), COUNTS_KEY: count_actions(len(actions), 0), "isBlindAppend": False}
        properties = CommitProperties(custom_metadata=metadata, max_commit_retries=0)
        return self.transact("delta.compact", actions, properties, onto=onto)


def compact(
    table: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    target_bytes: int = TARGET_BYTES,
    partitions: Iterable[PartitionFilter] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    ids: Ids | None = None,
) -> CompactReport:
    """Rewrite small files of each partition as files of about `target_bytes`, in several commits.

    Ingestion and committers never fail because of it: compaction yields. Repeating it is safe.

    Args:
        partitions: Filters on partition columns, e.g. `("date", ">=", "2026-11-01")`; all must hold.
        stop: Called between commits; True ends it early, in a consistent state.

    Raises:
        ConfigError: a filter or the size is invalid, or the table uses features under which files hold more than rows.
        CommitConflictError: others kept changing the same files; nothing is lost, run again.
        CommitUnknownError: the answer to a commit was lost and the table cannot be read.
        SinkError: the table or a file cannot be read.
    """
    if target_bytes < 1:
        raise ConfigError(f"a target size of {target_bytes} bytes makes no sense", hint="Write e.g. 128MiB.")
    options = dict(storage_options or {})
    try:
        storage, handle = open_table(table, options, CompactTable)
        assert isinstance(handle, CompactTable)
        work = _Compaction(storage, handle, options, target_bytes, list(partitions or ()))
        return work.preview() if dry_run else work.run(progress, stop, ids or RandomIds())
    except OSError as error:
        raise SinkError(f"cannot compact {table}: {error}", table=table) from error


class _Compaction:
    def __init__(
        self,
        storage: Storage,
        table: CompactTable,
        options: dict[str, str],
        target_bytes: int,
        filters: list[PartitionFilter],
    ) -> None:
        self._storage = storage
        self._table = table
        self._options = options
        self._target_bytes = target_bytes
        self._filters = filters
        self._log = LogNames(storage, table, options)
        self._sweeps = SweepLog(storage, table)
        self._swept = (0, 0)  # the newest sweep when the bins were planned
        self._tally = _Tally()
        self._attempts: list[str] = []
        self._planned_at = 0

    def preview(self) -> CompactReport:
        """Return what `run` would do."""
        check_supported(self._table)
        bins, unsafe = plan(self._table, self._target_bytes, self._filters)
        size = sum(one.size_bytes for one in bins)
        return CompactReport(
            table=self._table.uri,
            version=self._table.version,
            files_removed=sum(len(one.files) for one in bins),
            files_added=len(bins),
            bytes_removed=size,
            bytes_added=size,
            rows=0,
            commits=0,
            conflicts=0,
            attempts=(),
            files_skipped=unsafe,
            dry_run=True,
        )

    def run(self, progress: Progress | None, stop: Callable[[], bool] | None, ids: Ids) -> CompactReport:
        unsafe, stopped = 0, False
        for _ in range(ROUNDS):
            self._table.refresh()
            check_supported(self._table)
            self._planned_at, self._swept = self._table.version, self._sweeps.newest()
            bins, unsafe = plan(self._table, self._target_bytes, self._filters)
            total, void = sum(len(b.files) for b in bins), False
            for batch in _batches(bins):
                stopped = stop is not None and stop()
                if stopped:
                    break
                void |= not self._compact_batch(batch, ids.new())
                if progress is not None:
                    progress("compacting", self._tally.files_removed, total)
            if stopped or not void:
                break
        else:
            raise CommitConflictError(f"others keep changing the files of {self._table.uri} that are compacted")
        self._table.refresh()
        t = self._tally
        return CompactReport(
            table=self._table.uri,
            version=self._table.version,
            files_removed=t.files_removed,
            files_added=t.files_added,
            bytes_removed=t.bytes_removed,
            bytes_added=t.bytes_added,
            rows=t.rows,
            commits=t.commits,
            conflicts=t.conflicts,
            attempts=tuple(self._attempts),
            files_skipped=unsafe,
            stopped=stopped,
        )

    def _compact_batch(self, batch: list[Bin], attempt: str) -> bool:
        """Write and commit some bins. Returns False if others invalidated them; then nothing was changed."""
        pin = compaction_pin(attempt)
        body = {"format": FORMAT, "kind": "compaction", "attempts": [attempt], **this_process().address}
        self._storage.put(pin, canonical(body))  # step 1
        done: list[_Rewritten] = []
        try:
            rewriter = Rewriter(self._table, self._storage, self._options, self._target_bytes)
            done.extend(_Rewritten(chosen, rewriter.rewrite(chosen, attempt)) for chosen in batch)  # step 2
        except BaseException:
            self._discard(done, pin)
            raise
        # Step 3. From here on only a clear answer deletes files: after any other error they stay for a sweep.
        try:
            committed = self._commit(done, attempt)
        except CommitConflictError:
            self._discard(done, pin)
            raise
        if not committed:
            self._discard(done, pin)
            return False
        self._storage.delete(pin)  # step 4
        self._count(done, attempt)
        return True

    def _commit(self, done: list[_Rewritten], attempt: str) -> bool:
        """Commit onto the newest version while the plan is valid there. Returns False if it is not; then nothing was
        changed.

        Raises:
            CommitConflictError: others committed first every time; nothing was changed.
            CommitUnknownError: an answer was lost, and our commit may still succeed.
        """
        removed = {old.path for one in done for old in one.chosen.files}
        info = {"kind": "compact", "pipeline": "", "attempt": attempt, "replaced": len(removed)}
        unclear = False
        for tries in range(COMMIT_TRIES + 1):
            self._table.refresh()
            onto = self._table.version
            verdict = self._judge(removed, attempt, onto)
            if verdict == "stands" and not self._is_spared(done):
                verdict = "void"
            if verdict == "landed":
                return True
            if verdict == "void" or tries == COMMIT_TRIES:
                break
            try:
                self._table.swap(done, info, onto=onto)
                return True
            except CommitConflictError:
                self._tally.conflicts += 1
            except CommitUnknownError as error:
                unclear = True
                logger.warning("commit unclear, asking the table", extra={"reason": error.message})
            time.sleep(jitter(0.01, 0.05) * min(2**tries, 40))
        if unclear:
            raise CommitUnknownError(f"a compaction of {self._table.uri} may or may not have been committed")
        if verdict == "void":
            return False
        raise CommitConflictError(f"other writers commit to {self._table.uri} all the time; compaction gave way")

    def _judge(self, removed: set[str], attempt: str, up_to: int) -> str:
        """Return what the commits since the plan mean for ours: still valid, invalid, or already committed."""
        verdict = "stands"
        for version in range(self._planned_at + 1, up_to + 1):
            try:
                actions = self._log.commit(version)
            except FileNotFoundError:
                verdict = "void"
                continue
            for action in actions:
                if _is_ours(action, attempt):
                    return "landed"
                if "metaData" in action or "protocol" in action:
                    verdict = "void"
                if "remove" in action and not removed.isdisjoint(self._log.keys(str(action["remove"]["path"]))):
                    verdict = "void"
        return verdict

    def _is_spared(self, done: list[_Rewritten]) -> bool:
        """Return whether our new files exist and no sweep deletes them, at the table's current version."""
        if self._sweeps.newest() == self._swept:
            return True  # what was declared before we wrote them cannot name them
        paths = [str(file["path"]) for one in done for file in one.staged]
        return self._sweeps.find_covering(paths) is None and all(exists(self._storage, path) for path in paths)

    def _discard(self, done: list[_Rewritten], pin: str) -> None:
        for one in done:
            for file in one.staged:
                self._storage.delete(str(file["path"]))
        self._storage.delete(pin)

    def _count(self, done: list[_Rewritten], attempt: str) -> None:
        tally = self._tally
        self._attempts.append(attempt)
        tally.commits += 1
        for one in done:
            tally.files_removed += len(one.chosen.files)
            tally.bytes_removed += one.chosen.size_bytes
            tally.files_added += len(one.staged)
            tally.bytes_added += sum(int(f["size_bytes"]) for f in one.staged)
            tally.rows += sum(int(f["rows"]) for f in one.staged)


def _is_ours(action: dict[str, Json], attempt: str) -> bool:
    raw = action.get("commitInfo", {}).get(INFO_KEY)
    if not isinstance(raw, str):
        return False
    try:
        info = json.loads(raw)
    except ValueError:
        return False
    return isinstance(info, dict) and (info.get("kind"), info.get("attempt")) == ("compact", attempt)


def _batches(bins: list[Bin]) -> Iterable[list[Bin]]:
    """Return bins that are committed together: few enough that a conflict costs little."""
    held: list[Bin] = []
    size = 0
    for chosen in bins:
        held.append(chosen)
        size += chosen.size_bytes
        if size >= BATCH_BYTES or len(held) >= BATCH_BINS:
            yield held
            held, size = [], 0
    if held:
        yield held

"""Applies changes to data files: rows whose key changed are replaced or dropped, in new files, in bounded memory.

Runs inside Spark tasks, or in threads; a `RewriteTask` goes there, a `RewriteReport` comes back. The key columns of a
file are read first: a file without a changed key stays as it is. If the new version of a row is of the same partition,
it takes the position of the old one, so files keep their size and their order. Tasks that insert write the other rows.
"""

from __future__ import annotations

import base64
import io
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from firnline.errors import SchemaError, SinkError
from firnline.faults import fault_point
from firnline.sinks.delta.stage import ParquetStager
from firnline.sinks.delta.upsert.changes import (
    SEQUENCE_BY,
    Changes,
    Indices,
    KeyIndex,
    Mask,
    comparable,
    comparable_partition,
    conform,
    find_older,
    load_changes,
)
from firnline.sinks.delta.upsert.prune import KeyRanges
from firnline.storage import Storage, is_remote, open_storage
from firnline.types import Json


@dataclass(frozen=True, slots=True, eq=False)
class FileToRewrite:
    """A data file of the table that may hold changed keys."""

    path: str
    size_bytes: int
    rows: int | None  # as the log says
    partition_values: Mapping[str, str | None]
    barred: Indices  # changes whose new row is not to be here: another file has it, or a newer row of the key

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "rows": self.rows,
            "partition_values": dict(self.partition_values),
            "barred": pack_indices(self.barred),
        }

    @classmethod
    def from_json(cls, value: Json) -> FileToRewrite:
        """Parse the output of `to_json`."""
        barred = unpack_indices(value["barred"])
        return cls(str(value["path"]), int(value["size_bytes"]), value["rows"], value["partition_values"], barred)


@dataclass(frozen=True, slots=True, eq=False)
class RewriteTask:
    """Apply the changes of an epoch to some files; or, with `insert`, write the new rows of some changes."""

    type: str  # the kind of the sink
    attempt: str
    table: str
    storage_options: Mapping[str, str]
    partition_by: tuple[str, ...]
    key: tuple[str, ...]
    file_size_bytes: int
    changes: tuple[dict[str, Json], ...]  # path, crc32 and, for records, sequence_by of each file of changes
    schema: pa.Schema
    files: tuple[FileToRewrite, ...] = ()
    insert: Indices | None = None  # numbers of changes

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "kind": "commit",
            "type": self.type,
            "attempt": self.attempt,
            "table": self.table,
            "storage_options": dict(self.storage_options),
            "partition_by": list(self.partition_by),
            "key": list(self.key),
            "file_size_bytes": self.file_size_bytes,
            "changes": list(self.changes),
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
            "files": [file.to_json() for file in self.files],
            "insert": pack_indices(self.insert) if self.insert is not None else None,
        }

    @classmethod
    def from_json(cls, value: Json) -> RewriteTask:
        """Parse the output of `to_json`."""
        return cls(
            type=str(value["type"]),
            attempt=str(value["attempt"]),
            table=str(value["table"]),
            storage_options=value["storage_options"],
            partition_by=tuple(value["partition_by"]),
            key=tuple(value["key"]),
            file_size_bytes=int(value["file_size_bytes"]),
            changes=tuple(value["changes"]),
            schema=pa.ipc.read_schema(pa.BufferReader(base64.b64decode(value["schema"]))),
            files=tuple(FileToRewrite.from_json(file) for file in value["files"]),
            insert=unpack_indices(value["insert"]) if value["insert"] is not None else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RewrittenFile:
    """The result for one file. Everything in `staged` is durable."""

    path: str
    staged: list[dict[str, Json]] = field(default_factory=list)  # files in its place
    matched: Indices = field(default_factory=lambda: np.empty(0, np.int64))  # changes whose key it held
    placed: Indices = field(default_factory=lambda: np.empty(0, np.int64))  # changes whose new row is in `staged`
    older: Indices = field(default_factory=lambda: np.empty(0, np.int64))  # changes that a row in it is newer than

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the driver."""
        return {
            "path": self.path,
            "staged": self.staged,
            "matched": pack_indices(self.matched),
            "placed": pack_indices(self.placed),
            "older": pack_indices(self.older),
        }

    @classmethod
    def from_json(cls, value: Json) -> RewrittenFile:
        """Parse the output of `to_json`."""
        numbers = [unpack_indices(value[name]) for name in ("matched", "placed", "older")]
        return cls(str(value["path"]), list(value["staged"]), *numbers)


@dataclass(frozen=True, slots=True, eq=False)
class RewriteReport:
    """The report of one task."""

    files: tuple[RewrittenFile, ...] = ()
    inserted: tuple[dict[str, Json], ...] = ()  # files of new rows

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the driver."""
        return {"files": [file.to_json() for file in self.files], "inserted": list(self.inserted)}

    @classmethod
    def from_json(cls, value: Json) -> RewriteReport:
        """Parse the output of `to_json`."""
        return cls(tuple(RewrittenFile.from_json(file) for file in value["files"]), tuple(value["inserted"]))


def pack_indices(numbers: Indices) -> str:
    """Return ascending numbers as short text."""
    if not len(numbers):
        return ""
    steps = np.diff(numbers, prepend=0).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes(), 1)).decode()


def unpack_indices(text: str) -> Indices:
    """Return the numbers that `pack_indices` packed."""
    if not text:
        return np.empty(0, np.int64)
    steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8")
    return np.cumsum(steps).astype(np.int64)


BATCH_ROWS = 131_072
_KEPT_CHANGES = 2  # per process: tasks of one epoch read the same changes
_READ_BYTES = 8 * 1024 * 1024


def run_in_threads(tag: str, tasks: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Run tasks in this process; all of them end before the first failure is raised."""
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix=f"rewrite {tag}") as pool:
        futures = [pool.submit(run_rewrite, task) for task in tasks]
    return [future.result() for future in futures]


def run_rewrite(task: dict[str, Json]) -> dict[str, Json]:
    """Run one task in a worker: a RewriteTask in, a RewriteReport out; raises as `rewrite`."""
    return rewrite(RewriteTask.from_json(task)).to_json()


def rewrite(task: RewriteTask) -> RewriteReport:
    """Apply changes to files, or write new rows. Everything in the report is durable.

    After a failure its staged files are deleted.

    Raises:
        SinkError: a file cannot be read, or its row count differs from the log.
        DamagedError: the changes differ from what was staged.
    """
    staged: list[dict[str, Json]] = []
    storage = open_storage(task.table, dict(task.storage_options))
    try:
        rewriter = _Rewriter(task, storage)
        if task.insert is not None:
            staged += rewriter.insert(task.insert)
            return RewriteReport(inserted=tuple(staged))
        rewritten = []
        for file in task.files:
            rewritten.append(rewriter.rewrite(file))
            staged += rewritten[-1].staged
    except BaseException as error:
        for staged_file in staged:
            storage.delete(str(staged_file["path"]))
        if isinstance(error, pa.ArrowException | OSError):
            raise SinkError(f"cannot rewrite files of {storage.root}: {error}", table=storage.root) from error
        raise
    return RewriteReport(tuple(rewritten))


class _Rewriter:
    def __init__(self, task: RewriteTask, storage: Storage) -> None:
        self._task = task
        self._storage = storage
        self._partition_by = list(task.partition_by)
        self._schema = pa.schema([f.with_nullable(True) for f in task.schema])  # without metadata of the table's own
        self._data = pa.schema([f for f in self._schema if f.name not in self._partition_by])
        self._key = list(task.key)
        self._sequence_by: str | None = task.changes[0].get(SEQUENCE_BY)
        self._shared = _share_changes(task, storage)

    def insert(self, numbers: Indices) -> list[dict[str, Json]]:
        """Write the new rows of these changes as separate files, per partition."""
        stager = self._stager(self._partition_by)
        fault_point("upsert.rewrite.before")
        try:
            for start in range(0, len(numbers), BATCH_ROWS):
                stager.write(self._new_rows(numbers[start : start + BATCH_ROWS], self._schema))
            staged = stager.close()
            fault_point("upsert.rewrite.after")
        except BaseException:
            stager.discard()
            raise
        return staged

    def rewrite(self, file: FileToRewrite) -> RewrittenFile:
        """Apply the changes to one file."""
        with open_data_file(self._storage, file.path, file.size_bytes) as source:
            parquet = pq.ParquetFile(source, pre_buffer=is_remote(self._storage.root))
            found = parquet.metadata.num_rows
            if file.rows is not None and found != file.rows:
                raise SinkError(f"{file.path} holds {found} rows, the log says {file.rows}", file=file.path)
            rows, changes, newer = self._find_matches(parquet, file.partition_values)
            older = np.unique(changes[newer])
            rows, changes = rows[~newer], changes[~newer]
            if not len(rows):
                return RewrittenFile(file.path, older=older)
            placed = self._find_placed(changes, file, older)
            self._check_moved(changes[~placed], file.partition_values)
            staged = self._write(parquet, file.partition_values, rows, changes, placed)
        if sum(int(f["rows"]) for f in staged) != found - len(rows) + int(placed.sum()):
            for staged_file in staged:
                self._storage.delete(str(staged_file["path"]))
            raise SinkError(f"rewriting {file.path} lost rows; nothing was committed", file=file.path)
        return RewrittenFile(file.path, staged, np.unique(changes), np.unique(changes[placed]), older)

    def _find_matches(self, parquet: pq.ParquetFile, values: Mapping[str, str | None]) -> tuple[Indices, Indices, Mask]:
        """Return the rows of a file with a changed key, ascending, the change of each, and whether the row is newer.

        Reads the key columns only, and the one that orders rows.
        """
        metadata = parquet.metadata
        starts = np.cumsum([0, *(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))])
        wanted = [k for k in self._key if k not in self._partition_by]
        if self._sequence_by is not None and self._sequence_by not in wanted:
            wanted.append(self._sequence_by)
        in_file = [name for name in wanted if name in parquet.schema_arrow.names]
        types = pa.schema([self._schema.field(name) for name in wanted])
        rows, changes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        newer: list[Mask] = [np.empty(0, np.bool_)]
        for group in self._shared.ranges.find_row_groups(metadata, types):
            offset = int(starts[group])
            for batch in self._batches(parquet, [group], in_file, types, metadata.row_group(group).num_rows):
                columns = [self._key_column(batch, name, values) for name in self._key]
                here, found = self._shared.index.find(columns)
                rows.append(here + offset)
                changes.append(found)
                newer.append(self._find_newer(batch, here, found))
                offset += batch.num_rows
        return np.concatenate(rows), np.concatenate(changes), np.concatenate(newer)

    def _find_newer(self, batch: pa.RecordBatch, rows: Indices, changes: Indices) -> Mask:
        """Return for each of these rows whether it is newer than its change."""
        if self._sequence_by is None:
            return np.zeros(len(rows), np.bool_)
        held = batch.column(self._sequence_by).take(pa.array(rows))
        sequence = self._shared.changes.sequence
        assert sequence is not None, "records with sequence_by have one"
        return find_older(sequence.take(pa.array(changes)).cast(held.type), held)

    def _key_column(self, batch: pa.RecordBatch, name: str, values: Mapping[str, str | None]) -> pa.Array:
        if name in self._partition_by:
            value = comparable_partition(pa.array([values[name]], pa.string()), self._schema.field(name).type)
            return pa.repeat(value[0], batch.num_rows)
        return comparable(batch.column(name), False)

    def _batches(
        self, parquet: pq.ParquetFile, groups: Sequence[int], columns: list[str], schema: pa.Schema, rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows with the columns of a schema; the file has only the named ones."""
        if columns:
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=columns):
                yield conform(batch, schema)
            return
        for start in range(
            0, rows, BATCH_ROWS
        ):  # a file from before all of these columns, or a key of partitions alone
            count = min(BATCH_ROWS, rows - start)
            yield _nulls(schema, count)

    def _find_placed(self, changes: Indices, file: FileToRewrite, older: Indices) -> Mask:
        """Return for each matched row whether the new version replaces it in place; at most once per change."""
        barred = np.zeros(len(self._shared.changes), np.bool_)
        barred[file.barred] = True
        barred[older] = True
        first = np.zeros(len(changes), np.bool_)
        first[np.unique(changes, return_index=True)[1]] = True
        stays = self._shared.changes.keeps & ~barred & self._is_of_partition(file.partition_values)
        found: Mask = first & stays[changes]
        return found

    def _check_moved(self, changes: Indices, values: Mapping[str, str | None]) -> None:
        """Refuse a change that moves a row to another partition and lacks a value of it.

        Raises:
            SchemaError: it names the column.
        """
        if not self._shared.changes.unknown:
            return
        moves = self._shared.changes.keeps & ~self._is_of_partition(values)
        for name, unknown in self._shared.changes.unknown.items():
            if (unknown & moves)[changes].any():
                raise SchemaError(
                    f"a change moves a row to another partition, and the log does not have its value of {name!r}",
                    hint="Partition the table by columns of the key, or let the database log whole rows "
                    "(PostgreSQL: ALTER TABLE ... REPLICA IDENTITY FULL; MySQL: binlog_row_image = FULL).",
                    column=name,
                )

    def _is_of_partition(self, values: Mapping[str, str | None]) -> Mask:
        """Return for each change whether its new row belongs to this partition."""
        found = np.ones(len(self._shared.changes), np.bool_)
        rows = self._shared.changes.rows
        for name in self._partition_by:
            if name not in rows.column_names:
                found &= values[name] is None
                continue
            wanted = pa.array([values[name]], pa.string())
            same = pc.is_in(comparable(rows.column(name), True), wanted, skip_nulls=False)
            found &= same.to_numpy(zero_copy_only=False)
        return found

    def _write(
        self, parquet: pq.ParquetFile, values: Mapping[str, str | None], rows: Indices, changes: Indices, placed: Mask
    ) -> list[dict[str, Json]]:
        """Write the result of a file; no file if nothing is left."""
        stager = self._stager([])
        columns = [n for n in self._data.names if n in parquet.schema_arrow.names]
        groups = range(parquet.metadata.num_row_groups)
        fault_point("upsert.rewrite.before")
        try:
            offset = 0
            for batch in self._batches(parquet, groups, columns, self._data, parquet.metadata.num_rows):
                first, last = np.searchsorted(rows, [offset, offset + batch.num_rows])
                part = slice(int(first), int(last))
                out = self._apply(batch, rows[part] - offset, changes[part], placed[part]) if last > first else batch
                if out.num_rows:
                    stager.write_to(dict(values), out)
                offset += batch.num_rows
            staged = stager.close()
            fault_point("upsert.rewrite.after")
        except BaseException:
            stager.discard()
            raise
        return staged

    def _apply(self, batch: pa.RecordBatch, rows: Indices, changes: Indices, placed: Mask) -> pa.RecordBatch:
        """Return the rows of a batch: replaced if the new version belongs here, otherwise dropped if changed."""
        count = batch.num_rows
        order = np.arange(count)
        order[rows[placed]] = count + np.arange(int(placed.sum()))
        left = np.ones(count, np.bool_)
        left[rows[~placed]] = False
        new = self._with_old_values(self._new_rows(changes[placed], self._data), batch, rows[placed], changes[placed])
        return pa.concat_batches([batch, new]).take(pa.array(order[left]))

    def _with_old_values(
        self, new: pa.RecordBatch, batch: pa.RecordBatch, rows: Indices, changes: Indices
    ) -> pa.RecordBatch:
        """Return new rows with the values that the rows of a batch had before, where the changes have none."""
        for name, unknown in self._shared.changes.unknown.items():
            index = new.schema.get_field_index(name)
            stays = unknown[changes]
            if index >= 0 and stays.any():
                old = batch.column(index).take(pa.array(rows))
                new = new.set_column(
                    index, new.schema.field(index), pc.if_else(pa.array(stays), old, new.column(index))
                )
        return new

    def _new_rows(self, numbers: Indices, schema: pa.Schema) -> pa.RecordBatch:
        chosen = self._shared.changes.rows.take(pa.array(numbers)).combine_chunks()
        batches = chosen.to_batches()
        if not batches:
            return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
        return conform(batches[0] if len(batches) == 1 else pa.concat_batches(batches), schema)

    def _stager(self, partition_by: list[str]) -> ParquetStager:
        target = {
            "partition_by": partition_by,
            "file_size_bytes": 2 * self._task.file_size_bytes,  # a full file whose rows change stays one file
        }
        return ParquetStager(target, self._task.attempt, self._storage)


@dataclass(frozen=True, slots=True, eq=False)
class OldValues:
    """Rows of a table, found by key."""

    numbers: Indices  # of the keys that were found
    rows: pa.Table  # of each of them the wanted columns


def read_old_values(
    storage: Storage,
    files: Sequence[FileToRewrite],
    keys: pa.Table,
    partition_by: Sequence[str],
    schema: pa.Schema,
    columns: Sequence[str],
) -> OldValues:
    """Return the values that a table has under keys in comparable form. `schema` is that of the table.

    Raises:
        SinkError: a file cannot be read.
    """
    index, ranges = KeyIndex(keys), KeyRanges(keys, partition_by)
    wanted = [name for name in dict.fromkeys((*keys.column_names, *columns)) if name not in partition_by]
    types = pa.schema([schema.field(name).with_nullable(True) for name in wanted])
    result = pa.schema([schema.field(name).with_nullable(True) for name in columns])
    numbers, found = [np.empty(0, np.int64)], [result.empty_table()]
    for file in files:
        try:
            with open_data_file(storage, file.path, file.size_bytes) as source:
                parquet = pq.ParquetFile(source, pre_buffer=is_remote(storage.root))
                groups = ranges.find_row_groups(parquet.metadata, types)
                in_file = [name for name in wanted if name in parquet.schema_arrow.names]
                for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=in_file):
                    whole = _with_partition(conform(batch, types), file.partition_values, schema)
                    own = [comparable(whole.column(name), name in partition_by) for name in keys.column_names]
                    places, changes = index.find(own)
                    numbers.append(changes)
                    found.append(pa.Table.from_batches([whole.select(list(columns)).take(pa.array(places))]))
        except (pa.ArrowException, OSError) as error:
            raise SinkError(f"cannot read {file.path} of {storage.root}: {error}", file=file.path) from error
    return OldValues(np.concatenate(numbers), pa.concat_tables(found))


def _with_partition(batch: pa.RecordBatch, values: Mapping[str, str | None], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with the partition columns of their file."""
    for name, text in values.items():
        field = schema.field(name).with_nullable(True)
        batch = batch.append_column(field, pa.repeat(pa.scalar(text, pa.string()), batch.num_rows).cast(field.type))
    return batch


def _nulls(schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """Return rows of nulls. Their number counts even without a column."""
    kind = pa.struct(list(schema))
    return pa.RecordBatch.from_struct_array(pa.repeat(pa.scalar(dict.fromkeys(schema.names), kind), rows))


class _Shared:
    """The changes of an epoch, with the index that matches rows to them."""

    def __init__(self, changes: Changes, partition_by: Sequence[str]) -> None:
        self.changes = changes
        self.index = KeyIndex(changes.keys)
        self.ranges = KeyRanges(changes.keys, partition_by)


_shared: OrderedDict[tuple[str, ...], _Shared] = OrderedDict()
_sharing = threading.Lock()


def _share_changes(task: RewriteTask, storage: Storage) -> _Shared:
    """Return the changes of a task. Their files never change, so they stay loaded for the next task."""
    files = list(task.changes)
    mark = (storage.root, *task.key, "", *task.partition_by, "", *(str(f["path"]) for f in files))
    with _sharing:
        found = _shared.get(mark)
        if found is None:
            changes = load_changes(storage, files, task.key, task.partition_by)
            found = _shared[mark] = _Shared(changes, task.partition_by)
            while len(_shared) > _KEPT_CHANGES:
                _shared.popitem(last=False)
        _shared.move_to_end(mark)
        return found


def open_data_file(storage: Storage, key: str, size_bytes: int) -> Any:
    """Open a data file for random access, without reading all of it."""
    if not is_remote(storage.root):
        return pa.OSFile(os.path.join(storage.root, key))
    return pa.PythonFile(RangeFile(storage, key, size_bytes), mode="r")


class RangeFile(io.RawIOBase):
    """A stored object as a file; every read requests a range."""

    def __init__(self, storage: Storage, key: str, size_bytes: int) -> None:
        super().__init__()
        self._storage = storage
        self._key = key
        self._size = size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self._size - self._at if size is None or size < 0 else min(size, self._size - self._at)
        stream = self._storage.open_read(self._key, self._at)
        parts: list[bytes] = []
        try:
            while wanted > 0 and (part := stream.read(min(wanted, _READ_BYTES))):
                parts.append(part)
                wanted -= len(part)
        finally:
            stream.close()
        data = b"".join(parts)
        self._at += len(data)
        return data

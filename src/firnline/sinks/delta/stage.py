"""Stages Parquet at its final path: complete, durable, and visible to no reader until a commit names it.

Runs inside Spark tasks. Rows are collected per partition and written as row groups. A new file starts when the current
one reaches its size, or when the columns change. Names contain the attempt and are used once, so a late write of a
zombie damages nothing. The change rows of an upsert are staged beside the table's data, until a commit applies them.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from firnline.faults import fault_point
from firnline.names import changes_folder, data_name
from firnline.sinks.base import Stager
from firnline.sinks.delta.stats import Path, file_stats, find_nan
from firnline.sinks.outbox import KEY as OUTBOX
from firnline.sinks.outbox import CountedStream
from firnline.storage import Storage, Writable, open_storage
from firnline.types import Json

ROW_GROUP_BYTES = 48 * 1024 * 1024  # Arrow bytes collected before a row group is encoded
MAX_GATHERED_BYTES = 128 * 1024 * 1024  # over all partitions of one task
MAX_OPEN_FILES = 64
SAMPLE_ROWS = 4096
PARQUET: dict[str, Any] = {"compression": "snappy", "write_statistics": True, "version": "2.6"}
_SAFE_VALUE = re.compile(r"[A-Za-z0-9_.~-]{1,100}")


@dataclass(slots=True)
class _Partition:
    """Rows and the open file of one partition."""

    values: dict[str, str | None]
    folder: str
    batches: list[pa.RecordBatch] = field(default_factory=list)
    size_bytes: int = 0
    file: _OpenFile | None = None


@dataclass(slots=True)
class _OpenFile:
    key: str
    stream: _Counted
    writer: pq.ParquetWriter
    schema: pa.Schema
    nan: set[Path] = field(default_factory=set)  # columns with NaN


class ParquetStager(Stager):
    """Writes the rows of one task for one sink. `target` comes from `DeltaSink.stage_target`.

    With an `outbox` in it, the files stay there, each under its final path, until the sink's lane copies them.
    """

    def __init__(self, target: dict[str, Json], attempt: str, storage: Storage | None = None) -> None:
        outbox = target.get("outbox")
        if storage is None and outbox:
            storage = open_storage(outbox["root"], outbox["storage_options"])
        self._storage = storage or open_storage(target["table"], target["storage_options"])
        self._prefix = f"{outbox['folder']}/{attempt}/" if outbox else ""  # of where files lie until they are copied
        self._partition_by = list(target["partition_by"])
        self._file_bytes = int(target["file_size_bytes"])
        self._attempt = attempt
        self._partitions: dict[tuple[str | None, ...], _Partition] = {}
        self._staged: list[dict[str, Json]] = []
        self._home = ""  # the folder, below the table's root, that all files lie in

    @property
    def files_done(self) -> int:
        """The number of complete files."""
        return len(self._staged)

    @property
    def files(self) -> int:
        """The number of files if no more rows arrive."""
        return len(self._staged) + sum(1 for p in self._partitions.values() if p.batches or p.file is not None)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows. They are complete in a file only after `close`."""
        if not self._partition_by:
            self._gather((), batch, {})
        else:
            for key, rows in _split(batch, self._partition_by):
                self._gather(key, rows, dict(zip(self._partition_by, key, strict=True)))
        self._relieve()

    def write_to(self, values: dict[str, str | None], batch: pa.RecordBatch) -> None:
        """Add rows, without partition columns, to the partition with these values."""
        self._gather(tuple(values.values()), batch, values)
        self._relieve()

    @property
    def gathered_bytes(self) -> int:
        """The size of the rows that are held in memory."""
        return sum(partition.size_bytes for partition in self._partitions.values())

    def relieve(self) -> None:
        """Write the rows that are held in memory, and finish their files."""
        for partition in self._partitions.values():
            self._flush(partition)
            self._finish(partition)

    def close(self) -> list[dict[str, Json]]:
        """Write the buffered rows, make everything durable, and describe each file."""
        self.relieve()
        self._partitions.clear()
        return self._staged

    def discard(self) -> None:
        """Delete the files of this stager, which no other attempt can name."""
        for partition in self._partitions.values():
            if partition.file is not None:
                partition.file.writer.close()
                partition.file.stream.close()
                self._storage.delete(self._prefix + partition.file.key)
        for file in self._staged:
            self._storage.delete(self._prefix + file["path"])
        self._partitions.clear()
        self._staged.clear()

    def _gather(self, key: tuple[str | None, ...], rows: pa.RecordBatch, values: dict[str, str | None]) -> None:
        if not rows.num_rows:
            return
        partition = self._partitions.get(key)
        if partition is None:
            partition = _Partition(values, "/".join(partition_folder(n, v) for n, v in values.items()))
            self._partitions[key] = partition
        if partition.batches and not partition.batches[0].schema.equals(rows.schema):
            self._flush(partition)
        partition.batches.append(rows)
        partition.size_bytes += rows.nbytes
        if partition.size_bytes >= ROW_GROUP_BYTES:
            self._flush(partition)

    def _relieve(self) -> None:
        """Keep memory and open files bounded, whatever the number of partitions."""
        if len(self._partitions) <= 1:
            return
        while self.gathered_bytes > MAX_GATHERED_BYTES:
            self._flush(max(self._partitions.values(), key=lambda p: p.size_bytes))
        open_files = [p for p in self._partitions.values() if p.file is not None]
        for partition in open_files[: max(0, len(open_files) - MAX_OPEN_FILES)]:
            self._flush(partition)
            self._finish(partition)

    def _flush(self, partition: _Partition) -> None:
        """Encode the collected rows as one row group."""
        if not partition.batches:
            return
        table = pa.Table.from_batches(partition.batches)
        partition.batches, partition.size_bytes = [], 0
        if partition.file is not None and not partition.file.schema.equals(table.schema):
            self._finish(partition)
        if partition.file is None:
            partition.file = self._open(partition, table)
        partition.file.nan.update(find_nan(table))
        partition.file.writer.write_table(table, row_group_size=table.num_rows)
        if partition.file.stream.tell() >= self._file_bytes:
            self._finish(partition)

    def _open(self, partition: _Partition, table: pa.Table) -> _OpenFile:
        name = data_name(self._attempt, uuid.uuid4().hex)
        key = "/".join(part for part in (self._home, partition.folder, name) if part)
        fault_point("stage.file.before")
        stream = _Counted(self._storage.create(self._prefix + key))
        writer = pq.ParquetWriter(stream, table.schema, use_dictionary=repetitive_columns(table), **PARQUET)
        return _OpenFile(key, stream, writer, table.schema)

    def _finish(self, partition: _Partition) -> None:
        """Close the partition's file; from here on it is durable."""
        file = partition.file
        if file is None:
            return
        file.stream.begin_footer()
        file.writer.close()
        metadata = file.writer.writer.metadata
        file.stream.close()
        fault_point("stage.file.after")
        self._staged.append(
            {
                "path": file.key,
                "size_bytes": file.stream.tell(),
                "rows": metadata.num_rows,
                "partition_values": partition.values,
                "modification_time": int(time.time() * 1000),
                "stats": file_stats(metadata, file.schema, file.nan),
                "footer_checksum": file.stream.footer_checksum(),
                "crc32": file.stream.crc32,
                **({OUTBOX: self._prefix + file.key} if self._prefix else {}),
            }
        )
        partition.file = None


class _Counted(CountedStream):
    """Also takes the checksum of the footer of a Parquet file."""

    def __init__(self, stream: Writable) -> None:
        super().__init__(stream)
        self._footer: Any = None

    def begin_footer(self) -> None:
        """Mark the start of the footer, after all row groups."""
        self._footer = hashlib.sha256()

    def footer_checksum(self) -> str:
        return str(self._footer.hexdigest())

    def write(self, data: Any) -> int:
        if self._footer is not None:
            self._footer.update(data)
        return super().write(data)


def repetitive_columns(table: pa.Table) -> list[str]:
    """Return text columns whose first rows repeat values: only there a dictionary is worth its time."""
    head = table.slice(0, SAMPLE_ROWS)
    found: list[str] = []
    for name in head.column_names:
        _add_repetitive(head.column(name).combine_chunks(), name, found)
    return found


def _add_repetitive(array: pa.Array, path: str, found: list[str]) -> None:
    kind = array.type
    if pa.types.is_struct(kind):
        for number, child in enumerate(kind):
            _add_repetitive(array.field(number), f"{path}.{child.name}", found)
    elif pa.types.is_list(kind):
        _add_repetitive(array.flatten(), f"{path}.list.element", found)
    elif pa.types.is_string(kind) and len(array) and len(pc.unique(array)) * 4 <= len(array):
        found.append(path)


def _split(batch: pa.RecordBatch, names: list[str]) -> list[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """Return the rows of each partition, without the partition columns, in order."""
    keys = [partition_text(batch.column(batch.schema.get_field_index(name))) for name in names]
    rest = batch.drop_columns(names)
    if batch.num_rows == 0:
        return []
    code = None
    for key in keys:
        part = pc.fill_null(key.dictionary_encode(null_encoding="encode").indices.cast(pa.int64()), 0)
        size = len(pc.unique(key)) + 1
        code = part if code is None else pc.add(pc.multiply(code, size), part)
    assert code is not None
    groups = pc.unique(code)
    if len(groups) == 1:
        return [(tuple(key[0].as_py() for key in keys), rest)]
    out = []
    for group in groups:
        chosen = pc.indices_nonzero(pc.equal(code, group))
        first = chosen[0].as_py()
        out.append((tuple(key[first].as_py() for key in keys), rest.take(chosen)))
    return out


def partition_text(column: pa.Array) -> pa.Array:
    """Return partition values as text, as Delta writes them."""
    kind = column.type
    if pa.types.is_string(kind):
        return pc.if_else(pc.equal(column, ""), None, column)  # Delta has no empty partition value
    if pa.types.is_timestamp(kind):
        return pc.strftime(column, format="%Y-%m-%d %H:%M:%S")
    return column.cast(pa.string())


def partition_folder(name: str, value: str | None) -> str:
    """A folder name for people; the log holds the true value, so odd characters need no escaping."""
    if value is None:
        return f"{name}=__HIVE_DEFAULT_PARTITION__"
    if _SAFE_VALUE.fullmatch(value):
        return f"{name}={value}"
    readable = re.sub(r"[^A-Za-z0-9_.~-]+", "-", value)[:60]
    return f"{name}={readable}-{hashlib.sha256(value.encode()).hexdigest()[:8]}"


CHANGE_COUNTS = ("inserted", "updated", "deleted")  # what an upsert does to rows, as its commits and receipts say
CHANGES = "changes"  # the kind of a staged file that holds change rows
KEY = "key"  # of such a file: the columns that identify a row when it was staged


class ChangeStager(ParquetStager):
    """Writes the change rows of one task for one sink; `target` as for rows that are appended.

    The files are below `_firnline/`, which Delta's readers and vacuum ignore. They are not split by partition,
    because a change may move a row from one partition to another.
    """

    def __init__(self, target: dict[str, Json], attempt: str, storage: Storage | None = None) -> None:
        super().__init__({**target, "partition_by": []}, attempt, storage)
        self._home = changes_folder(str(target["pipeline"]))
        self._key = list(target["shape"]["key"])

    def close(self) -> list[dict[str, Json]]:
        for file in super().close():
            file["kind"] = CHANGES
            file[KEY] = self._key
        return self._staged

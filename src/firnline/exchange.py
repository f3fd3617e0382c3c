"""Rows that one job of an epoch passes to the next: Arrow files, partitioned by key into shards.

The tasks of one job write them, the tasks of the next map them into memory; no row passes through the JVM. The files
belong to one attempt at an epoch and are deleted with it. They are never durable: if one is lost, the epoch runs again.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from firnline.errors import EngineError
from firnline.names import exchange_name
from firnline.operators.columns import align, micros
from firnline.state.keys import encode_keys, key_groups_of, shard_of
from firnline.storage import LocalStorage, open_storage
from firnline.types import Json

FLUSH_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection from one job to the next. Without `ranges` its rows are not partitioned."""

    name: str  # the consumer, and what it calls this input
    keys: tuple[str, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()  # key groups of each shard
    groups: int = 0  # key groups in all
    time: str = ""  # the column of event time, if there is one

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "name": self.name,
            "keys": list(self.keys),
            "ranges": [list(r) for r in self.ranges],
            "groups": self.groups,
            "time": self.time,
        }

    @classmethod
    def from_json(cls, value: Json) -> Edge:
        """Parse the output of `to_json`."""
        ranges = tuple((int(a), int(b)) for a, b in value["ranges"])
        return cls(str(value["name"]), tuple(value["keys"]), ranges, int(value["groups"]), str(value["time"]))


@dataclass(slots=True)
class ExchangeWriter:
    """Writes the rows of one task for one edge. Rows keep their order within each shard."""

    edge: Edge
    folder: dict[str, Json]  # root, storage options and folder
    _waiting: list[pa.RecordBatch] = field(default_factory=list)
    _waiting_bytes: int = 0
    _rows: int = 0
    _latest: int | None = None
    _files: list[dict[str, Json]] = field(default_factory=list)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows. They can be read only after `close`."""
        if batch.num_rows == 0:
            return
        if self._waiting and not self._waiting[0].schema.equals(batch.schema):
            self._flush()
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= FLUSH_BYTES:
            self._flush()

    def close(self) -> dict[str, Json]:
        """Write the waiting rows. Returns the files, the number of rows and the latest event time."""
        self._flush()
        return {"files": self._files, "rows": self._rows, "latest": self._latest}

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting).combine_chunks()
        self._waiting, self._waiting_bytes = [], 0
        self._rows += table.num_rows
        if self.edge.time in table.column_names and is_time(table.schema.field(self.edge.time).type):
            self._note_latest(table.column(self.edge.time))
        counts: list[int] | None = None
        if self.edge.ranges:
            table, counts = self._partition(table)
        self._files.append(self._put(table, counts))

    def _note_latest(self, times: pa.ChunkedArray) -> None:
        values, there = micros(times)
        if there.any():
            latest = int(values[there].max())
            self._latest = latest if self._latest is None else max(self._latest, latest)

    def _partition(self, table: pa.Table) -> tuple[pa.Table, list[int]]:
        """Return the rows sorted by shard, and the number of rows of each shard."""
        keys = encode_keys(select_keys(table, self.edge.keys), table.num_rows)
        groups = key_groups_of(keys, self.edge.groups)
        shards = shard_of(groups, self.edge.ranges)
        counts = np.bincount(shards, minlength=len(self.edge.ranges))
        if np.count_nonzero(counts) > 1:
            table = table.take(pa.array(np.argsort(shards, kind="stable")))
        return table, [int(n) for n in counts]

    def _put(self, table: pa.Table, counts: Sequence[int] | None) -> dict[str, Json]:
        key = f"{self.folder['folder']}/{exchange_name(uuid.uuid4().hex)}"
        numbers: dict[str, int] = {}
        with open_volatile(self.folder, key) as sink, pa.ipc.new_file(sink, table.schema) as writer:
            at = 0
            for shard, count in enumerate(counts if counts is not None else [table.num_rows]):
                if count:
                    numbers[str(shard)] = len(numbers)
                    writer.write_table(table.slice(at, count))
                at += count
        return {"key": key, "shards": numbers, "rows": table.num_rows}


@contextlib.contextmanager
def open_volatile(folder: Mapping[str, Json], key: str) -> Iterator[Any]:
    """Open a file that need not outlive the epoch: on a local disk it is not synced."""
    storage = open_storage(str(folder["root"]), folder["storage_options"])
    if isinstance(storage, LocalStorage):
        path = storage.path_of(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with pa.OSFile(path, "wb") as stream:
            yield stream
    else:
        buffer = pa.BufferOutputStream()
        yield buffer
        storage.put(key, buffer.getvalue().to_pybytes())


def is_time(kind: pa.DataType) -> bool:
    """Return whether values of a type can be event times. If a column cannot, building its operator fails."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_integer(kind))


def select_keys(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the key columns; one that no record has is null."""
    columns = [
        table.column(key) if key in table.column_names else pa.chunked_array([pa.nulls(table.num_rows, pa.string())])
        for key in keys
    ]
    return pa.table(columns, names=list(keys)) if keys else table.select([])


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The files that the tasks of a job wrote for one edge, in the order of the tasks."""

    files: list[dict[str, Json]] = field(default_factory=list)
    rows: int = 0
    latest: int | None = None

    @classmethod
    def collect(cls, reports: Iterable[dict[str, Json]], edge: str) -> Exchanged:
        """Add up the output for an edge in the reports of a job."""
        outputs = [report["exchanged"][edge] for report in reports if edge in report.get("exchanged", {})]
        latest = [int(output["latest"]) for output in outputs if output["latest"] is not None]
        return cls(
            [file for output in outputs for file in output["files"]],
            sum(int(output["rows"]) for output in outputs),
            max(latest) if latest else None,
        )


def read_exchange(
    folder: Mapping[str, Json], files: Sequence[dict[str, Json]], columns: pa.Schema, shard: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one shard, or all rows of an edge that is not partitioned, with exactly these columns.

    Raises:
        EngineError: a file is gone or damaged; the epoch runs again.
    """
    storage = open_storage(str(folder["root"]), folder["storage_options"])
    for file in files:
        number = file["shards"].get(str(shard))
        if number is None:
            continue
        try:
            source = (
                pa.memory_map(storage.path_of(file["key"]))
                if isinstance(storage, LocalStorage)
                else pa.BufferReader(storage.get(file["key"]))
            )
            batch = pa.ipc.open_file(source).get_batch(int(number))
        except (OSError, pa.ArrowInvalid) as error:
            raise EngineError(f"rows on their way to the next job are gone: {error}") from error
        yield align(batch, columns)

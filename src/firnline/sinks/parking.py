"""Parked rows: those of an optional sink whose stager failed, kept in the outbox in a form of our own.

If the stager of an optional sink fails in a worker, the run repeats the epoch without it: tasks write the rows for that
sink as Arrow files into the outbox. The sink's lane later hands them to the stager again, in the driver, and commits
what it stages. The epoch waits for none of this.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence

import pyarrow as pa
from isal import isal_zlib

from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import parked_name
from firnline.sinks.base import Sink, Stager
from firnline.sinks.outbox import KEY, read_checked
from firnline.sinks.registry import PARKED, open_stager
from firnline.storage import Storage, open_storage
from firnline.types import Json

SHAPE = "shape"  # of a target, and of a parked file in the ledger: see `Sink.stage_target`
FILE_BYTES = 64 * 1024 * 1024  # Arrow bytes in one file; the driver reads a file at a time
MOST_DELIVERIES = 1024


class ParkingStager(Stager):
    """Writes the rows of one task for an optional sink into the outbox. `target` comes from `parked_target`."""

    def __init__(self, target: dict[str, Json], attempt: str) -> None:
        outbox = target["outbox"]
        self._storage = open_storage(outbox["root"], outbox["storage_options"])
        self._folder = f"{outbox['folder']}/{attempt}"
        self._attempt = attempt
        self._shape = target[SHAPE]
        self._batches: list[pa.RecordBatch] = []
        self._size_bytes = 0
        self._files: list[dict[str, Json]] = []

    @property
    def files_done(self) -> int:
        return len(self._files)

    @property
    def files(self) -> int:
        return len(self._files) + bool(self._batches)

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._batches and not self._batches[0].schema.equals(batch.schema):
            self._flush()
        self._batches.append(batch)
        self._size_bytes += batch.nbytes
        if self._size_bytes >= FILE_BYTES:
            self._flush()

    def close(self) -> list[dict[str, Json]]:
        self._flush()
        return self._files

    def discard(self) -> None:
        for file in self._files:
            self._storage.delete(str(file[KEY]))
        self._batches, self._size_bytes, self._files = [], 0, []

    def _flush(self) -> None:
        """Write the gathered rows as one file; it is durable afterwards."""
        if not self._batches:
            return
        held = pa.BufferOutputStream()
        with pa.ipc.new_stream(
            held, self._batches[0].schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as writer:
            for batch in self._batches:
                writer.write_batch(batch)
        data = held.getvalue().to_pybytes()
        name = parked_name(self._attempt, uuid.uuid4().hex)
        fault_point("outbox.park.before")
        self._storage.put(f"{self._folder}/{name}", data)
        fault_point("outbox.park.after")
        self._files.append(
            {
                "path": name,
                "rows": sum(batch.num_rows for batch in self._batches),
                "size_bytes": len(data),
                "crc32": isal_zlib.crc32(data),
                KEY: f"{self._folder}/{name}",
                PARKED: True,
                SHAPE: self._shape,
            }
        )
        self._batches, self._size_bytes = [], 0


def parked_target(
    sink: str, partition_by: Sequence[str], outbox: dict[str, Json], shape: dict[str, Json] | None
) -> dict[str, Json]:
    """Describe to tasks where to park the rows for a sink. `outbox` has root, storage options and folder; `shape` is
    that of the sink's own target, None if it is not known."""
    return {"type": PARKED, "sink": sink, "partition_by": list(partition_by), "outbox": outbox, SHAPE: shape}


def is_parked(files: Sequence[dict[str, Json]]) -> bool:
    """Return whether files of a ledger entry are parked rows. All files of one epoch and sink are, or none."""
    return any(PARKED in file for file in files)


def restage(sink: Sink, outbox: Storage, files: Sequence[dict[str, Json]], attempt: str) -> list[dict[str, Json]]:
    """Hand parked rows to the sink's stager, with the settings that their epoch was made with; return what it staged.

    After a crash it is called again, and stages other files: nothing names the first ones.

    Raises:
        SinkError: the stager fails again.
        DamagedError: a parked file is missing, or differs from what was written.
    """
    target, shape = sink.stage_target(), files[0].get(SHAPE)
    stager = open_stager({**target, SHAPE: shape} if shape is not None else target, attempt)
    try:
        for file in files:
            for batch in _read(outbox, file):
                stager.write(batch)
        fault_point("outbox.restage.before")
        staged = stager.close()
        fault_point("outbox.restage.after")
    except BaseException:
        stager.discard()
        raise
    return staged


def _read(outbox: Storage, file: dict[str, Json]) -> Iterator[pa.RecordBatch]:
    try:
        data = b"".join(read_checked(outbox, str(file[KEY]), file))
    except FileNotFoundError as error:
        raise DamagedError(
            f"{file[KEY]} is no longer in the outbox of {outbox.root}",
            hint="Bring the file back, or take the sink out of the spec.",
        ) from error
    with pa.ipc.open_stream(pa.BufferReader(data)) as reader:
        yield from reader


class ParkedSinks:
    """The optional sinks whose rows are parked, in one run. May be used from any thread.

    A sink is parked when its stager fails in a worker. Its stager is tried again after the sink has taken parked rows:
    once at first, and twice as often after each further failure.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        self._deliveries: dict[str, int] = {}  # of parked sinks: deliveries until the stager is tried again

    def add(self, sink: str) -> None:
        """Park the rows of the next epochs for a sink."""
        with self._lock:
            self._deliveries[sink] = min(2 ** self._failures.get(sink, 0), MOST_DELIVERIES)
            self._failures[sink] = self._failures.get(sink, 0) + 1

    def delivered(self, sink: str) -> None:
        """Note that a sink has taken an epoch of parked rows."""
        with self._lock:
            left = self._deliveries.get(sink, 0) - 1
            if left > 0:
                self._deliveries[sink] = left
            else:
                self._deliveries.pop(sink, None)

    def __contains__(self, sink: str) -> bool:
        return sink in self._deliveries

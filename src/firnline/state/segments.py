"""Segments of state: immutable, mapped Arrow files of changed keys, sorted by slot and then by key."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from isal import isal_zlib

from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import segment_key
from firnline.state.columns import Layout, layout_of, to_numpy
from firnline.state.home import LocalFile, StateHome, load_file
from firnline.state.keys import SLOT_BITS, Numbers, Slots, encode_keys, order_keys
from firnline.state.manifest import SegmentRef
from firnline.storage import Storage, Writable


class ArrowFile:
    """An uncompressed Arrow file (random-access format) that is durable once `close` has returned."""

    def __init__(self, storage: Storage, key: str, schema: pa.Schema) -> None:
        self.key = key
        self._storage = storage
        self._stream = _Counted(storage.create(key))
        options = pa.ipc.IpcWriteOptions(compression=None)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._stream, mode="w"), schema, options=options)

    @property
    def size_bytes(self) -> int:
        return self._stream.written

    @property
    def crc32(self) -> int:
        return self._stream.crc32

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        """Write the footer and make the file durable."""
        self._writer.close()
        self._stream.finish()

    def abandon(self) -> None:
        """Delete the partial file: nothing refers to it, and failed writes must not fill a full disk."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._stream.finish()
        with contextlib.suppress(OSError):
            self._storage.delete(self.key)


class _Counted:
    """A stream that counts and checksums its bytes; the part of a file that Arrow needs."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream
        self.written = 0
        self.crc32 = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self.crc32 = isal_zlib.crc32(view, self.crc32)
        self.written += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.written

    def flush(self) -> None:
        """Do nothing: `finish` makes it durable."""

    def close(self) -> None:
        """Do nothing: Arrow closes the stream, but only `finish` makes it durable and reports errors."""

    def finish(self) -> None:
        self._stream.close()
        self.closed = True


BATCH_ROWS = 64 * 1024
OPEN_FILES = 256  # files mapped at once in one process

T = TypeVar("T")


# --- writing ---------------------------------------------------------------------------------------------


class SegmentWriter:
    """Writes one segment from tables in slot order. Buffers at most one batch beyond its input.

    The file is created with the first row. Its name is the prefix and a number that is never reused.
    """

    def __init__(self, storage: Storage, prefix: str, layout: Layout, *, operator: str, epoch: int) -> None:
        self._storage = storage
        self._key = segment_key(prefix, uuid.uuid4().hex)
        self._layout = layout
        self._schema = layout.schema.with_metadata(layout.metadata(operator, epoch))
        self._epoch = epoch
        self._file: ArrowFile | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._rows = 0
        self._first = self._last = 0

    def write(self, table: pa.Table) -> None:
        """Add rows of the layout, sorted by slot, none of them before those already written."""
        if table.num_rows == 0:
            return
        slots = self._layout.slots_of(table)
        if (self._rows and int(slots[0]) < self._last) or bool((slots[1:] < slots[:-1]).any()):
            raise ValueError("rows of a segment must come in the order of their slots")
        self._first = self._first if self._rows else int(slots[0])
        self._last = int(slots[-1])
        self._rows += table.num_rows
        self._waiting.append(table)
        self._waiting_rows += table.num_rows
        if self._waiting_rows >= BATCH_ROWS:
            self._flush(self._waiting_rows - self._waiting_rows % BATCH_ROWS)

    def _flush(self, rows: int) -> None:
        if self._file is None:
            fault_point("state.run.before")
            self._file = ArrowFile(self._storage, self._key, self._schema)
        table = pa.concat_tables(self._waiting).combine_chunks()
        for start in range(0, rows, BATCH_ROWS):
            for batch in table.slice(start, min(BATCH_ROWS, rows - start)).to_batches():
                self._file.write(batch.replace_schema_metadata(self._schema.metadata))
        self._waiting = [table.slice(rows)] if rows < table.num_rows else []
        self._waiting_rows -= rows

    def close(self) -> SegmentRef | None:
        """Make the segment durable. Returns None if no row was written; then there is no file."""
        if self._rows == 0:
            return None
        if self._waiting_rows:
            self._flush(self._waiting_rows)
        assert self._file is not None
        self._file.close()
        fault_point("state.run.after")
        return SegmentRef(
            path=self._key,
            size_bytes=self._file.size_bytes,
            crc32=self._file.crc32,
            rows=self._rows,
            first_group=self._first >> SLOT_BITS,
            last_group=self._last >> SLOT_BITS,
            epoch=self._epoch,
        )

    def abandon(self) -> None:
        """Discard the segment after an error."""
        if self._file is not None:
            self._file.abandon()


def write_segment(
    storage: Storage, prefix: str, table: pa.Table, layout: Layout, *, operator: str, epoch: int
) -> SegmentRef:
    """Write a segment; durable on return.

    Args:
        storage: The storage of the home that the reference is relative to.
        prefix: The start of the file's name, e.g. `<checkpoint>/shard_3/totals.<attempt>`.
        table: At least one row of the layout, sorted or not; every key once.
        layout: The columns.
        operator: The owner of the state.
        epoch: The epoch that writes it.
    """
    writer = SegmentWriter(storage, prefix, layout, operator=operator, epoch=epoch)
    try:
        writer.write(_sorted(table, layout))
        ref = writer.close()
    except BaseException:
        writer.abandon()
        raise
    if ref is None:
        raise ValueError("a segment has at least one row")
    return ref


def _sorted(table: pa.Table, layout: Layout) -> pa.Table:
    slots = layout.slots_of(table)
    if bool((slots[1:] > slots[:-1]).all()):
        return table
    order, first = order_keys(slots, encode_keys(layout.keys_of(table), table.num_rows))
    if not first.all():
        raise ValueError("a segment holds a key once")
    return table.combine_chunks().take(pa.array(order))


# --- reading ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """An open segment. Its columns are views of the mapped file: reading one touches only the pages it needs.

    Only the key groups of the reference may be read. After a rescale, another reference of the same shard may name the
    rest of the same file, and a segment between the two in age overrides only one of them.
    """

    ref: SegmentRef
    layout: Layout
    batches: tuple[pa.RecordBatch, ...]
    slots: tuple[Slots, ...]  # of each batch
    starts: Numbers  # the number of each batch's first row, and at the end the number of rows
    firsts: Slots  # the slot of each batch's first row

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def what(self) -> str:
        """For messages."""
        return f"state segment {self.ref.path}"

    @property
    def groups(self) -> tuple[int, int]:
        """The key groups `[first, last)` that are to be read."""
        return self.ref.first_group, self.ref.last_group + 1

    def slot_at(self, row: int) -> int:
        """Return the slot of one row."""
        batch = int(np.searchsorted(self.starts, row, "right")) - 1
        return int(self.slots[batch][row - int(self.starts[batch])])

    def find_row(self, slot: int, side: Any = "left") -> int:
        """Return the first row whose slot is not below `slot` (left), or is above it (right)."""
        batch = max(int(np.searchsorted(self.firsts, np.uint64(slot), side)) - 1, 0)
        return int(self.starts[batch]) + int(np.searchsorted(self.slots[batch], np.uint64(slot), side))

    def slice(self, start: int, stop: int) -> pa.Table:
        """Return the rows from `start` to before `stop`, without a copy."""
        parts = []
        for number in range(max(int(np.searchsorted(self.starts, start, "right")) - 1, 0), len(self.batches)):
            begin = int(self.starts[number])
            if begin >= stop:
                break
            first = max(start - begin, 0)
            parts.append(self.batches[number].slice(first, min(stop - begin, self.batches[number].num_rows) - first))
        return pa.Table.from_batches(parts, schema=self.layout.schema)

    def take(self, rows: Numbers, places: Sequence[int]) -> pa.Table:
        """Return some columns of some rows, whose numbers must be ascending; each column is one array."""
        cuts = np.searchsorted(rows, self.starts)
        parts = []
        for number in np.flatnonzero(np.diff(cuts)):
            inside = rows[cuts[number] : cuts[number + 1]] - self.starts[number]
            parts.append(self.batches[number].select(list(places)).take(pa.array(inside)))
        schema = pa.schema([self.layout.schema.field(place) for place in places])
        return pa.Table.from_batches(parts, schema=schema).combine_chunks()


def open_segment(home: StateHome, ref: SegmentRef) -> Segment:
    """Open a segment. It is verified on the first open in this process, and stays open.

    Raises:
        StateDamagedError: the file is missing or damaged, and no fallback has it.
        NewerFormatError: a newer Firnline wrote it.
    """
    segment = OPEN.get(load_file(home, ref), ref, _open)
    return segment if segment.ref == ref else replace(segment, ref=ref)


def open_segments(home: StateHome, refs: Sequence[SegmentRef]) -> list[Segment]:
    """Open segments, in the same order."""
    return [open_segment(home, ref) for ref in refs]


def map_batches(path: str) -> tuple[pa.Schema, tuple[pa.RecordBatch, ...]]:
    """Return the schema and the batches of an Arrow file, as views of the mapped file."""
    reader = pa.ipc.open_file(pa.memory_map(path))
    return reader.schema, tuple(reader.get_batch(i) for i in range(reader.num_record_batches))


def _open(path: str, ref: SegmentRef) -> Segment:
    schema, found = map_batches(path)
    what = f"state segment {ref.path}"
    layout = layout_of(schema, what)
    batches = tuple(batch.replace_schema_metadata(None) for batch in found)
    starts = np.zeros(len(batches) + 1, np.int64)
    np.cumsum([batch.num_rows for batch in batches], out=starts[1:])
    if not len(batches) or starts[-1] != ref.rows:
        raise DamagedError(f"{what} has {starts[-1]:,} rows, not {ref.rows:,}", what=what)
    slots = tuple(to_numpy(batch.column(0)) for batch in batches)
    return Segment(ref, layout, batches, slots, starts, np.array([s[0] for s in slots], np.uint64))


class OpenFiles:
    """Files mapped in this process; the least recently used are closed first.

    Deleted files are closed as soon as another one is opened, so that their space is freed.
    """

    def __init__(self, most: int = OPEN_FILES) -> None:
        self._most = most
        self._files: OrderedDict[tuple[LocalFile, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, file: LocalFile, ref: SegmentRef, open_it: Callable[[str, SegmentRef], T]) -> T:
        """Return the open file; opens it if needed."""
        name = (file, ref.crc32)
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
                known: T = self._files[name]
                return known
        opened = open_it(file.path, ref)
        with self._lock:
            gone = [other for other in self._files if not os.path.exists(other[0].path)]
            for other in gone:
                del self._files[other]
            self._files[name] = opened
            while len(self._files) > self._most:
                self._files.popitem(last=False)
        return opened

    def __len__(self) -> int:
        return len(self._files)

    def clear(self) -> None:
        """Close all files."""
        with self._lock:
            self._files.clear()


OPEN = OpenFiles()

"""Files of timers: which slots have a key that is due at what event time.

A timer file is an uncompressed Arrow file with the columns `due` (int64, microseconds since 1970, sorted) and `slot`
(uint64). Its entries are hints: a key's timer may have been moved or removed since, so the state's own `_timer`
decides (`access.by_slots` with `due_before`). `fired_until` of a reference says up to which event time its entries
have been fired. It is None for a new file, whatever its times: a timer that was set to a time in the past is due at
the next epoch.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import timers_key
from firnline.state.home import StateHome, load_file
from firnline.state.keys import SLOT_BITS, Slots, slot_bounds
from firnline.state.manifest import SegmentRef, TimerRef
from firnline.state.merge import plan_merge
from firnline.state.segments import BATCH_ROWS, OPEN, ArrowFile, map_batches
from firnline.storage import Storage

FORMAT = 1
MOST_FILES = 8
SCHEMA = pa.schema([pa.field("due", pa.int64(), nullable=False), pa.field("slot", pa.uint64(), nullable=False)])

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TimerFile:
    """An open timer file."""

    due: tuple[Times, ...]
    slots: tuple[Slots, ...]

    @property
    def largest(self) -> int:
        """The latest due time of any entry."""
        return int(self.due[-1][-1])

    def between(self, after: int | None, until: int | None) -> tuple[Times, Slots]:
        """Return the entries due in `(after, until]`; None leaves that side open."""
        due, slots = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
        for times, there in zip(self.due, self.slots, strict=True):
            start = 0 if after is None else int(np.searchsorted(times, after, "right"))
            stop = times.size if until is None else int(np.searchsorted(times, until, "right"))
            if start < stop:
                due.append(times[start:stop])
                slots.append(there[start:stop])
        return np.concatenate(due), np.concatenate(slots)


def write_timers(
    storage: Storage, prefix: str, due: Times, slots: Slots, *, operator: str, epoch: int
) -> TimerRef | None:
    """Write a timer file, durable on return. Returns None if there are no entries.

    Args:
        storage: The storage of the home that the reference is relative to.
        prefix: The start of the file's name.
        due: The due times, in any order.
        slots: The slot of each key.
        operator: The owner of the timers.
        epoch: The epoch that set them.
    """
    if not due.size:
        return None
    order = np.lexsort((slots, due))
    due, slots = due[order], slots[order]
    kept = np.append(True, (due[1:] != due[:-1]) | (slots[1:] != slots[:-1]))
    due, slots = due[kept], slots[kept]
    about = {"format": FORMAT, "operator": operator, "epoch": epoch}
    schema = SCHEMA.with_metadata({f"firnline.{name}": str(value) for name, value in about.items()})
    key = timers_key(prefix, uuid.uuid4().hex)
    fault_point("state.timers.before")
    file = ArrowFile(storage, key, schema)
    try:
        for start in range(0, due.size, BATCH_ROWS):
            columns = [pa.array(due[start : start + BATCH_ROWS]), pa.array(slots[start : start + BATCH_ROWS])]
            file.write(pa.record_batch(columns, schema=schema))
        file.close()
    except BaseException:
        file.abandon()
        raise
    fault_point("state.timers.after")
    first, last = int(slots.min()) >> SLOT_BITS, int(slots.max()) >> SLOT_BITS
    return TimerRef(SegmentRef(key, file.size_bytes, file.crc32, int(due.size), first, last, epoch))


def open_timers(home: StateHome, ref: TimerRef) -> TimerFile:
    """Open a timer file. Raises StateDamagedError if it is missing or damaged."""
    return OPEN.get(load_file(home, ref.segment), ref.segment, _open)


def _open(path: str, ref: SegmentRef) -> TimerFile:
    schema, batches = map_batches(path)
    if not batches or schema.names != SCHEMA.names:
        raise DamagedError(f"{ref.path} is no file of timers", path=ref.path)
    due = tuple(batch.column(0).to_numpy() for batch in batches)
    return TimerFile(due, tuple(batch.column(1).to_numpy() for batch in batches))


def due_slots(home: StateHome, timers: Sequence[TimerRef], watermark: int | None, groups: tuple[int, int]) -> Slots:
    """Return the slots of the key groups `[first, last)` that may have a key due by the watermark; sorted, unique."""
    if watermark is None:
        return np.empty(0, np.uint64)
    found = [_entries(home, ref, groups, watermark)[1] for ref in timers]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *found]))


def _entries(home: StateHome, ref: TimerRef, groups: tuple[int, int], until: int | None) -> tuple[Times, Slots]:
    """Return entries that have not fired, in the key groups of both the shard and the reference."""
    due, slots = open_timers(home, ref).between(ref.fired_until, until)
    low, high = max(groups[0], ref.segment.first_group), min(groups[1], ref.segment.last_group + 1)
    if low >= high:
        return due[:0], slots[:0]
    first, last = slot_bounds((low, high))
    own = (slots >= np.uint64(first)) & (slots <= np.uint64(last))
    return due[own], slots[own]


def after_firing(home: StateHome, timers: Sequence[TimerRef], watermark: int | None) -> tuple[TimerRef, ...]:
    """Return the files that `due_slots` searched, after its entries fired; files with nothing left are dropped.

    A file written in the same epoch is added afterwards: it was not searched.
    """
    if watermark is None:
        return tuple(timers)
    left = []
    for ref in timers:
        fired = watermark if ref.fired_until is None else max(watermark, ref.fired_until)
        if open_timers(home, ref).largest > fired:
            left.append(replace(ref, fired_until=fired))
    return tuple(left)


def merge_timers(
    home: StateHome, timers: Sequence[TimerRef], groups: tuple[int, int], prefix: str, *, operator: str, epoch: int
) -> tuple[TimerRef, ...]:
    """Return the timer files after the merge that is due, if any; fired entries and other shards' are left out.

    The merged file counts as new: from a file that has fired only later entries are taken, from a new one all.
    """
    chosen = plan_merge([ref.segment.rows for ref in timers], MOST_FILES)
    if chosen is None:
        return tuple(timers)
    entries = [_entries(home, ref, groups, None) for ref in timers[chosen]]
    due, slots = np.concatenate([e[0] for e in entries]), np.concatenate([e[1] for e in entries])
    merged = write_timers(home.storage, prefix, due, slots, operator=operator, epoch=epoch)
    return (*timers[: chosen.start], *([merged] if merged is not None else []))

"""Decides which files the next slice has, and how they are distributed to tasks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from firnline.sources.base import Limits, Split
from firnline.topology.records import Marker
from firnline.types import Json

TASK_BYTES = 32 * 1024 * 1024  # beyond one task per core, another task must be worth its start
EVEN_TASKS = 10  # evens out files of different size; more would only make smaller files
NO_LIMIT = 1 << 62

Item: TypeAlias = dict[str, Json]
FindRowGroups: TypeAlias = Callable[[Item], Sequence[int]]  # the rows before each row group of a file


@dataclass(slots=True)
class Slice:
    """The parts of files that a slice takes, within its limits. One part is always taken."""

    limits: Limits
    items: list[Item] = field(default_factory=list)
    left: list[Item] = field(default_factory=list)  # what a limit cut off
    size_bytes: int = 0
    rows: int = 0
    passed: tuple[Marker, ...] = ()  # markers between what was taken and the next version, which has no commit of them

    @property
    def is_full(self) -> bool:
        limits = self.limits
        return bool(self.items) and (
            len(self.items) >= limits.max_files or self.size_bytes >= limits.max_bytes or self.rows >= limits.max_events
        )

    def take(self, item: Item) -> bool:
        """Take a part of a file, or as many of its rows as the limits allow. Returns False if it does not fit."""
        rows, size = rows_of(item), size_of(item)
        if self.is_full or (self.items and self.size_bytes + size > self.limits.max_bytes):
            return False
        free = max(1, self.limits.max_events - self.rows)
        if rows is not None and rows > free:
            cut = int(item["from"]) + free
            self.left.append({**item, "from": cut})
            item = {**item, "to": cut}
            rows, size = free, size_of(item)
        self.items.append(item)
        self.size_bytes += size
        self.rows += rows or 0
        return True


def rows_of(item: Item) -> int | None:
    """Return the number of rows of a part of a file; None if the log does not say."""
    return int(item["to"]) - int(item["from"]) if "to" in item else None


def size_of(item: Item) -> int:
    """Return the size of a part of a file: its share of the file."""
    size, rows = int(item["size_bytes"]), rows_of(item)
    return size if rows is None or not item.get("rows") else size * rows // int(item["rows"])


def deal(
    items: Sequence[Item], limits: Limits, find_row_groups: FindRowGroups, *, in_order: bool = False
) -> list[Split]:
    """Distribute a slice as contiguous ranges of about equal size, one per split; with `in_order`, one for all.

    Files that are larger than such a range are cut between row groups.
    """
    if not items:
        return []
    total = sum(size_of(item) for item in items)
    wanted = max(limits.parallelism, min(EVEN_TASKS, total // TASK_BYTES))
    wanted = 1 if in_order else max(1, min(wanted, limits.max_output_files // limits.files_per_task))
    largest = max(TASK_BYTES, total // wanted)
    parts = [part for item in items for part in _cut(item, largest, find_row_groups)] if wanted > 1 else list(items)
    count = min(len(parts), wanted)
    ranges: list[list[Item]] = [[] for _ in range(count)]
    before = 0
    for index, item in enumerate(parts):
        size = size_of(item)
        # By the middle of the part's bytes; if all are empty, by number.
        share = (before + size / 2) / total if total else index / len(parts)
        ranges[min(int(share * count), count - 1)].append({**item, "part": index})
        before += size
    used = [part for part in ranges if part]
    return [_split(part, limits, len(used)) for part in used]


def _cut(item: Item, largest: int, find_row_groups: FindRowGroups) -> list[Item]:
    """Cut a large file between row groups, into parts of at most about `largest` bytes."""
    rows, size = rows_of(item), size_of(item)
    if not rows or size <= largest or not item.get("rows"):
        return [item]
    most = max(1, rows * largest // size)
    first, last = int(item["from"]), int(item["to"])
    bounds = [first]
    starts = [start for start in find_row_groups(item) if first < start < last]
    for start, following in zip(starts, [*starts[1:], last], strict=True):
        if following - bounds[-1] > most:
            bounds.append(start)
    return [{**item, "from": a, "to": b} for a, b in zip(bounds, [*bounds[1:], last], strict=True)]


def _split(items: list[Item], limits: Limits, splits: int) -> Split:
    rows = [rows_of(item) for item in items]
    known = [count for count in rows if count is not None]
    share = max(1, limits.max_events // splits)
    return Split(
        inputs=items,
        max_records=max(1, sum(known)) if len(known) == len(rows) else share,
        max_bytes=sum(size_of(item) for item in items) + 1,  # the slice keeps the limit
        max_output_files=max(1, limits.max_output_files // splits),
    )


def deal_again(items: Sequence[Item], parallelism: int) -> list[Split]:
    """Return contiguous ranges, as many as tasks run at once; rows keep their order."""
    size = max(1, -(-len(items) // max(1, parallelism)))
    return [Split(list(items[at : at + size]), NO_LIMIT, NO_LIMIT, NO_LIMIT) for at in range(0, len(items), size)]


def settle(splits: Sequence[Split], outcomes: Sequence[Json]) -> tuple[list[Item], list[Item]]:
    """Return the ledger's records of a slice, and the parts of files that are left.

    A part without an outcome was not reached.
    """
    ended = {int(outcome["part"]): outcome for outcome in outcomes}
    records: list[Item] = []
    left: list[Item] = []
    for item in (item for split in splits for item in split.inputs):
        plain = {key: value for key, value in item.items() if key not in ("part", "schema")}
        outcome = ended.get(int(item["part"]))
        if outcome is None:
            left.append(plain)
            continue
        to = int(outcome["to"])
        if not outcome["finished"]:
            rest = {**plain, "from": to}
            left.append(rest)
        record = {**plain, "to": to, "status": "committed" if outcome["finished"] else "in_progress"}
        records.append({**record, **({"schema": item["schema"]} if "schema" in item else {})})
    return records, left

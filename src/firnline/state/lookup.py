"""Reads keyed state from its segments: looks keys up, finds the keys in slots, scans live rows.

The newest segment with a key has its state; a removed row hides older ones. Keys in one slot are distinguished by their
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.state.columns import REMOVED, Layout, adapt, adapt_state, check_key, nulls, one_chunk, to_numpy
from firnline.state.keys import EncodedKeys, Mask, Numbers, Slots, encode_keys, order_keys, slot_bounds
from firnline.state.segments import Segment

SCAN_ROWS = 256 * 1024


class Found(NamedTuple):
    """The result of a lookup: rows of `state` and `timers` in the order of the requested keys, null where none
    exists."""

    exists: Mask
    state: pa.Table
    timers: pa.Array


def lookup(segments: Sequence[Segment], slots: Slots, keys: EncodedKeys, layout: Layout) -> Found:
    """Return the state of keys. The cost depends on the number of keys, not on the size of the state.

    Args:
        segments: Oldest first.
        slots: The keys' slots, ascending.
        keys: The keys' bytes, in the same order.
        layout: The operator's current columns.

    Raises:
        SchemaError: a segment's columns cannot be read as the current ones.
    """
    if bool((slots[1:] < slots[:-1]).any()):
        raise ValueError("slots must be sorted for a lookup")
    pending = np.arange(slots.size)
    where = np.full(slots.size, -1, np.int64)  # the row among all gathered ones; -1: no live row
    parts: list[pa.Table] = []
    gathered = 0
    for segment in reversed(segments):
        if not pending.size:
            break
        check_key(segment.layout, layout, segment.what)
        asked, rows = _candidates(segment, slots[pending])
        if not rows.size:
            continue
        found = _gather(segment, rows, layout)
        asked = pending[asked]
        same = keys.equal(asked, found.keys, np.arange(rows.size))
        live = same & ~found.removed
        where[asked[live]] = gathered + np.flatnonzero(live)
        parts.append(found.state)
        gathered += rows.size
        answered = np.zeros(slots.size, np.bool_)
        answered[asked[same]] = True
        pending = pending[~answered[pending]]
    return _aligned(parts, where, layout)


def _candidates(segment: Segment, slots: Slots) -> tuple[Numbers, Numbers]:
    """Return the rows of a segment with one of these slots: pairs of an index in `slots` and a row.

    Rows are ascending if every slot is requested once.
    """
    lowest, highest = slot_bounds(segment.groups)
    skipped = int(np.searchsorted(slots, np.uint64(lowest)))
    slots = slots[skipped : int(np.searchsorted(slots, np.uint64(highest), "right"))]
    if not slots.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.maximum(np.searchsorted(segment.firsts, slots, "left") - 1, 0)  # a slot may start in the previous batch
    last = np.searchsorted(segment.firsts, slots, "right") - 1
    asked, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for number in range(int(first[0]), int(last[-1]) + 1):
        start, stop = int(np.searchsorted(last, number, "left")), int(np.searchsorted(first, number, "right"))
        wanted, there = slots[start:stop], segment.slots[number]
        if start >= stop:
            continue
        left = np.searchsorted(there, wanted)
        hit = np.flatnonzero(there[np.minimum(left, there.size - 1)] == wanted)
        if not hit.size:
            continue
        begin = left[hit]
        many = np.searchsorted(there, wanted[hit], "right") - begin
        if many.max() > 1:  # several keys in one slot
            begin = np.repeat(begin - np.cumsum(many) + many, many) + np.arange(int(many.sum()))
            hit = np.repeat(hit, many)
        asked.append(skipped + start + hit)
        rows.append(int(segment.starts[number]) + begin)
    return np.concatenate(asked), np.concatenate(rows)


class _Gathered(NamedTuple):
    removed: Mask
    keys: EncodedKeys
    state: pa.Table  # the current columns, with the timer last


def _gather(segment: Segment, rows: Numbers, layout: Layout) -> _Gathered:
    found = segment.layout
    timer = [found.timer_place] if found.timers and layout.timers else []
    wanted = set(layout.state.names)
    state = [p for p in found.state_places if found.schema.field(p).name in wanted]
    places = [1, *found.key_places, *timer, *state]
    # If several keys share a slot, each is compared with every row there: then row numbers are not ascending.
    order = None if bool((rows[1:] >= rows[:-1]).all()) else np.argsort(rows, kind="stable")
    table = segment.take(rows if order is None else rows[order], places)
    if order is not None:
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        table = table.take(pa.array(back))
    keys = len(found.key)
    after = 1 + keys + len(timer)
    values = adapt_state(table.select(list(range(after, len(places)))), layout.state, segment.what)
    due = table.column(1 + keys) if timer else pa.nulls(rows.size, pa.int64())
    encoded = encode_keys(table.select(list(range(1, 1 + keys))), rows.size)
    both = pa.Table.from_arrays([*values.columns, due], schema=_with_timer(layout))
    return _Gathered(to_numpy(table.column(REMOVED)), encoded, both)


def _with_timer(layout: Layout) -> pa.Schema:
    return pa.schema([*layout.state, pa.field("", pa.int64())])


def _aligned(parts: list[pa.Table], where: Numbers, layout: Layout) -> Found:
    exists = where >= 0
    if not parts:
        return Found(exists, nulls(layout.state, where.size), pa.nulls(where.size, pa.int64()))
    table = pa.concat_tables(parts).combine_chunks()
    if table.num_rows != where.size or not bool((where == np.arange(where.size)).all()):
        table = table.take(pa.array(where, mask=~exists))
    last = table.num_columns - 1
    return Found(exists, table.select(list(range(last))), one_chunk(table.column(last)))


# --- many segments as one ------------------------------------------------------------------------------------


def combine(parts: Sequence[pa.Table], layout: Layout, *, keep_removed: bool) -> pa.Table:
    """Merge rows of several segments, oldest first: sorted by slot and key, only the newest row of each key.

    Every part has the layout and is sorted, and holds all rows of its slots.
    """
    parts = [part for part in parts if part.num_rows]
    if not parts:
        return nulls(layout.schema, 0)
    table = pa.concat_tables(parts)
    slots = layout.slots_of(table)
    order = np.arange(slots.size)
    if len(parts) > 1:
        order = _newest(table, slots, layout)
    if not keep_removed:
        order = order[~layout.removed_of(table)[order]]
    if order.size == slots.size and bool((order == np.arange(order.size)).all()):
        return table
    return table.combine_chunks().take(pa.array(order))


def _newest(table: pa.Table, slots: Slots, layout: Layout) -> Numbers:
    """Return the rows that no newer one overrides, in the order of slot and key."""
    order: Numbers = np.argsort(slots, kind="stable")  # older ones first within a slot
    ranked = slots[order]
    same = ranked[1:] == ranked[:-1]
    if not same.any():
        return order
    tied = np.zeros(order.size, np.bool_)
    tied[1:] |= same
    tied[:-1] |= same
    rows = order[tied]
    keys = encode_keys(layout.keys_of(table).combine_chunks().take(pa.array(rows)), rows.size)
    inner, first = order_keys(ranked[tied], keys)
    order[tied] = rows[inner]
    keep = np.ones(order.size, np.bool_)
    keep[tied] = np.append(first[1:], True)  # the last of equal keys is the newest
    return order[keep]


def by_slots(segments: Sequence[Segment], slots: Slots, layout: Layout, due_before: int | None = None) -> pa.Table:
    """Return all live rows in these slots (sorted, unique), in the order of slot and key.

    With `due_before`, only keys whose timer is due at or before that time: slots from timer files are hints.
    """
    parts = []
    for segment in segments:
        check_key(segment.layout, layout, segment.what)
        _, rows = _candidates(segment, slots)
        if rows.size:
            taken = segment.take(rows, range(len(segment.layout.schema)))
            parts.append(adapt(taken, segment.layout, layout, segment.what))
    table = combine(parts, layout, keep_removed=False)
    if due_before is not None:
        table = table.filter(pc.fill_null(pc.less_equal(layout.timers_of(table), due_before), False))
    return table


def _rows_of(segment: Segment, groups: tuple[int, int]) -> tuple[int, int]:
    """Return the rows `[start, stop)` of a segment in these key groups, limited to the reference's groups."""
    low, high = max(groups[0], segment.groups[0]), min(groups[1], segment.groups[1])
    if low >= high:
        return 0, 0
    first, last = slot_bounds((low, high))
    return segment.find_row(first), segment.find_row(last, "right")


def windows(
    segments: Sequence[Segment], groups: tuple[int, int], rows: int
) -> Iterator[list[tuple[Segment, int, int]]]:
    """Cut segments into common ranges of slots with about `rows` rows in total: `(segment, start, stop)` of each.

    A slot is never cut, so only a slot with very many keys makes a range larger.
    """
    spans = [(segment, *_rows_of(segment, groups)) for segment in segments]
    spans = [span for span in spans if span[1] < span[2]]
    while spans:
        step = max(rows // len(spans), 1)
        ends = [segment.slot_at(start + step - 1) for segment, start, stop in spans if stop - start > step]
        bound = min(ends, default=slot_bounds(groups)[1])
        cut = [
            (segment, start, min(max(segment.find_row(bound, "right"), start), stop)) for segment, start, stop in spans
        ]
        yield [piece for piece in cut if piece[1] < piece[2]]
        spans = [
            (segment, done, span[2]) for span, (segment, _, done) in zip(spans, cut, strict=True) if done < span[2]
        ]


def combined(
    segments: Sequence[Segment], groups: tuple[int, int], layout: Layout, *, keep_removed: bool, rows: int = SCAN_ROWS
) -> Iterator[pa.Table]:
    """Yield the merged rows of segments (oldest first) in the key groups `[first, last)`, in order, in bounded
    memory."""
    for pieces in windows(segments, groups, rows):
        parts = [
            adapt(segment.slice(start, stop), segment.layout, layout, segment.what) for segment, start, stop in pieces
        ]
        table = combine(parts, layout, keep_removed=keep_removed)
        if table.num_rows:
            yield table


def scan(
    segments: Sequence[Segment],
    groups: tuple[int, int],
    layout: Layout,
    columns: Sequence[str] | None = None,
    rows: int = SCAN_ROWS,
) -> Iterator[pa.Table]:
    """Yield the live rows in the key groups `[first, last)`, in the order of slots, about `rows` at a time.

    Args:
        segments: Oldest first.
        groups: The key groups.
        layout: The operator's current columns.
        columns: Names of columns, including `_slot` and `_timer`; by default those of key and state.
        rows: How many rows are read at a time.
    """
    places = [*layout.key_places, *layout.state_places]
    if columns is not None:
        names = layout.schema.names
        places = [names.index(column) for column in columns]
    for table in combined(segments, groups, layout, keep_removed=False, rows=rows):
        yield table.select(places)

"""Decides when to merge which state segments, and merges them.

Sizes stay geometric. The newest segments are merged when there are four of them and none is larger than the others
together. Each merge therefore at least doubles the segment of every row: a row is rewritten O(log n) times, and a large
old segment only when as much lies above it. If too many segments would stay, the newest are merged anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from firnline.state.columns import Layout
from firnline.state.home import StateHome
from firnline.state.lookup import SCAN_ROWS, combined
from firnline.state.manifest import SegmentRef
from firnline.state.segments import SegmentWriter, open_segments

FAN_IN = 4
MOST_SEGMENTS = 12


def plan_merge(sizes: Sequence[int], most: int = MOST_SEGMENTS) -> slice | None:
    """Return the segments to merge into one, given their rows, oldest first: a suffix of at least two, or None.

    Args:
        sizes: Rows of every segment, oldest first.
        most: The maximum number of segments.
    """
    total = sum(sizes)
    for start in range(len(sizes) - FAN_IN + 1):  # the longest suffix worth merging
        if 2 * max(sizes[start:]) <= total:
            return slice(start, len(sizes))
        total -= sizes[start]
    if len(sizes) <= most:
        return None
    start = len(sizes) - 2
    total = sizes[start] + sizes[start + 1]
    while start and sizes[start - 1] <= total:
        start -= 1
        total += sizes[start]
    return slice(start, len(sizes))


def merge_segments(
    home: StateHome,
    refs: Sequence[SegmentRef],
    groups: tuple[int, int],
    prefix: str,
    *,
    operator: str,
    epoch: int,
    with_oldest: bool,
    layout: Layout | None = None,
    rows: int = SCAN_ROWS,
) -> SegmentRef | None:
    """Merge segments into one, for the key groups `[first, last)`.

    Memory is bounded by `rows`, however large the segments are. Rows of other key groups are left out: after a rescale
    several shards read parts of the same file.

    Args:
        home: The home of the segments, and of the new one.
        refs: Neighbouring segments of one shard, oldest first.
        groups: The key groups of the shard.
        prefix: The beginning of the new file's name.
        operator: The owner of the state.
        epoch: The epoch that merges.
        with_oldest: Whether the shard's oldest segment is among them: then a removed key hides nothing older, and is
            forgotten.
        layout: The columns of the new segment; by default those of the newest one.
        rows: How many rows are read at a time.

    Returns:
        The new segment, or None if nothing is left.
    """
    segments = open_segments(home, refs)
    layout = layout or segments[-1].layout
    writer = SegmentWriter(home.storage, prefix, layout, operator=operator, epoch=epoch)
    try:
        for table in combined(segments, groups, layout, keep_removed=not with_oldest, rows=rows):
            writer.write(table)
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def merge_due(
    home: StateHome,
    refs: Sequence[SegmentRef],
    groups: tuple[int, int],
    prefix: str,
    *,
    operator: str,
    epoch: int,
    layout: Layout | None = None,
) -> tuple[SegmentRef, ...]:
    """Return the segments of a shard after the merge that is due, if any."""
    chosen = plan_merge([ref.rows for ref in refs])
    if chosen is None:
        return tuple(refs)
    merged = merge_segments(
        home,
        refs[chosen],
        groups,
        prefix,
        operator=operator,
        epoch=epoch,
        with_oldest=chosen.start == 0,
        layout=layout,
    )
    return (*refs[: chosen.start], *([merged] if merged is not None else []))

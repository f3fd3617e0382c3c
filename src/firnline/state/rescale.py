"""Another number of shards over the same files: reassigns key groups without rewriting anything. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from firnline.state.refs import OperatorState, SegmentRef, ShardState, TimerRef


def rescale(state: OperatorState, ranges: Sequence[tuple[int, int]]) -> OperatorState:
    """Return the same state for shards that own these key groups.

    A shared file may hold stale rows for key groups that its old shard did not own. Each reference is therefore limited
    to the groups that shard owned.
    """
    if [(first, last) for first, last, _ in state.shards] == list(ranges):
        return state
    shards = []
    for first, last in ranges:
        segments: list[SegmentRef] = []
        timers: list[TimerRef] = []
        for old_first, old_last, old in state.shards:
            low, high = max(first, old_first), min(last, old_last) - 1
            segments += [cut for segment in old.segments if (cut := _cut(segment, low, high)) is not None]
            timers += [replace(t, segment=cut) for t in old.timers if (cut := _cut(t.segment, low, high)) is not None]
        shards.append((first, last, ShardState(tuple(segments), tuple(timers))))
    return OperatorState(state.epoch, tuple(shards))


def _cut(segment: SegmentRef, low: int, high: int) -> SegmentRef | None:
    """Return a file limited to the groups `low` to `high`; None if it has none of them."""
    low, high = max(segment.first_group, low), min(segment.last_group, high)
    return replace(segment, first_group=low, last_group=high) if low <= high else None

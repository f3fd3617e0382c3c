"""Decides which offsets of a topic a savepoint copies, and where readers stand in the copy. Pure.

A copy has the records of each partition in their order, and other offsets: control records of transactions, and what is
void or aborted, are not copied. So a place in the old topic is found again by the first copied record at or after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from firnline.errors import RollbackRefusedError
from firnline.sources.kafka.position import PartitionState, Position, Range, TopicState
from firnline.topology.topics import Ranges

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def find_states(
    position: Position, topic: str, topic_id: str, firsts: Mapping[int, int], *, begins: bool, reader: str
) -> dict[int, PartitionState]:
    """Return where a reader stands in every partition of a topic.

    Args:
        firsts: The first offset of each partition.
        begins: Whether the reader begins with the first record of a topic that its position does not name.

    Raises:
        RollbackRefusedError: it has read another topic of the same name, or has not chosen where it begins.
    """
    known = position.topics.get(topic)
    if known is None:
        if not begins:
            raise RollbackRefusedError(
                f"{reader} has not begun to read {topic}, and does not begin with its first record",
                hint=f"Run {reader} once, and take another snapshot.",
            )
        return {number: PartitionState(first) for number, first in firsts.items()}
    if known.id not in ("", topic_id):
        raise RollbackRefusedError(
            f"topic {topic} was deleted and created again since {reader} read it", hint="Take another snapshot."
        )
    return {number: known.partitions.get(number, PartitionState(0)) for number in firsts}


def plan_ranges(
    readers: Iterable[Mapping[int, PartitionState]], ends: Mapping[int, int], void: Mapping[int, Ranges]
) -> dict[int, list[Range]]:
    """Return what to copy of each partition: from the reader that is furthest behind to the cut, without void offsets.

    A partition that is left out of `ends` had nothing at the cut.
    """
    everybody = list(readers)
    found: dict[int, list[Range]] = {}
    for number, end in sorted(ends.items()):
        start = min(states[number].next for states in everybody)
        state = PartitionState(start).cover(Range(s, e) for s, e in void.get(number, ()))
        if ranges := [Range(one.start, one.end) for one in state.unread(end)]:
            found[number] = ranges
    return found


def find_lost(ranges: Mapping[int, Sequence[Range]], firsts: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return what is gone of the ranges: partition, first and last offset. `firsts` has those that are left."""
    return [
        (number, one.start, min(first, one.end) - 1)
        for number, of in ranges.items()
        for one in of
        if (first := firsts.get(number, one.end)) > one.start
    ]


def may_be_compacted(ranges: Mapping[int, Sequence[Range]], kept_from: Mapping[int, int]) -> list[int]:
    """Return the partitions in which compaction may have taken records of the ranges.

    `kept_from` has, for each partition, the first record that is too young for compaction; -1: there is none.
    """
    return [number for number, of in ranges.items() if not 0 <= kept_from.get(number, -1) <= of[0].start]


@dataclass(slots=True)
class PlaceMap:
    """Old offsets of one partition, and where they are in the copy; fed with the copied records in their order."""

    wanted: Sequence[int]  # old offsets, in order
    _found: dict[int, int] = field(default_factory=dict)
    _end: int = 0  # behind the last copied record

    def add(self, old: Numbers, new: Numbers) -> None:
        """Add copied records: their old and their new offsets."""
        if not len(old):
            return
        for offset in self.wanted:
            if offset not in self._found and offset <= int(old[-1]):
                self._found[offset] = int(new[np.searchsorted(old, offset)])
        self._end = int(new[-1]) + 1

    def find(self, offset: int) -> int:
        """Return the place of an old offset: at the first copied record from there on, or behind the last one."""
        return self._found.get(offset, self._end)


def places_in(states: Iterable[PartitionState]) -> list[int]:
    """Return the offsets that positions name."""
    return sorted({place for one in states for place in (one.next, *(p for r in one.ahead for p in (r.start, r.end)))})


def translate(
    position: Position,
    states: Mapping[str, Mapping[int, PartitionState]],
    moves: Mapping[str, TopicMove],
    location: str,
) -> Position:
    """Return a reader's position in copies of topics. What it says of other topics stays.

    Args:
        states: Where it stands in the old topics, by topic and partition.
        moves: The copies, by the names of the old topics.
        location: What the reader's source names now.
    """
    topics = {name: topic for name, topic in position.topics.items() if name not in moves}
    for name, move in moves.items():
        topics[move.topic] = TopicState(
            move.topic_id, {number: _moved(state, move.places[number]) for number, state in states[name].items()}
        )
    return replace(position, location=location, topics=topics)


@dataclass(frozen=True, slots=True)
class TopicMove:
    """A copied topic: its name, its id, and the places of old offsets in each partition."""

    topic: str
    topic_id: str
    places: Mapping[int, PlaceMap]


def _moved(state: PartitionState, places: PlaceMap) -> PartitionState:
    ahead = [Range(places.find(one.start), places.find(one.end)) for one in state.ahead]
    return PartitionState(places.find(state.next)).cover(ahead)

"""Plans slices of topics: which offsets an epoch reads, how tasks share them, and which records a broker has lost.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from firnline.sources.kafka.position import PartitionId, PartitionState, Position, Range

TASK_RECORDS = 10_000  # fewer are not worth another task


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a broker holds of a partition: from its log start up to the last stable offset."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Records between a position and what the broker holds: `reason` says what became of them."""

    partition: PartitionId
    start: int
    end: int
    reason: str
    resume: int  # where reading could go on

    def __str__(self) -> str:
        return f"{self.partition}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Slice:
    """The ranges of one partition in a slice."""

    partition: PartitionId
    topic_id: str
    ranges: list[Range] = field(default_factory=list)

    @property
    def records(self) -> int:
        return sum(one.end - one.start for one in self.ranges)


def find_gaps(position: Position, ids: Mapping[str, str], bounds: Mapping[PartitionId, Bounds]) -> list[Gap]:
    """Return what a position still needs and the broker no longer has. `ids` has the ids of the topics that exist."""
    gaps: list[Gap] = []
    for partition, state in position.partitions():
        known, current = position.topics[partition.topic].id, ids.get(partition.topic)
        held = bounds.get(partition)
        if current is None:
            continue  # it may come back; nobody reads it meanwhile
        if known and current != known:
            start = held.start if held is not None else 0
            reason = f"the topic was deleted and created again (its id was {known} and is {current}), after offset "
            gaps.append(Gap(partition, state.next, state.next, f"{reason}{state.next} of the old one", start))
        elif held is None and known:
            continue  # a topic never loses a partition: the broker that answered does not know it yet, or any more
        elif held is None:
            gaps.append(Gap(partition, state.next, state.next, "the partition no longer exists", 0))
        elif state.next < held.start:
            lost = next((one.end for one in reversed(state.ahead) if one.end <= held.start), state.next)
            reason = f"offsets {max(state.next, lost)} to {held.start - 1} were deleted before they were read"
            gaps.append(Gap(partition, state.next, held.start, f"{reason} (retention, or deleted records)", held.start))
        elif state.next > held.end:
            reason = f"it was read up to offset {state.next}, and now ends at {held.end}: the broker lost records"
            gaps.append(Gap(partition, held.end, state.next, reason, held.end))
    return gaps


def skip_gaps(position: Position, ids: Mapping[str, str], gaps: Sequence[Gap]) -> Position:
    """Return the position beyond these gaps."""
    for gap in gaps:
        state = position.of(gap.partition) or PartitionState(gap.resume)
        ahead = tuple(one for one in state.ahead if one.start > gap.resume)
        resumed = PartitionState(gap.resume, -1, ahead).cover([one for one in state.ahead if one.end > gap.resume])
        is_new = ids[gap.partition.topic] != position.topics[gap.partition.topic].id
        if is_new:
            resumed = PartitionState(gap.resume)
        position = position.set(gap.partition, ids[gap.partition.topic], resumed)
    return position


def take(position: Position, bounds: Mapping[PartitionId, Bounds], max_records: int) -> list[Slice]:
    """Return the offsets of the next slice, by partition. Partitions share `max_records` evenly, as far as they have
    any."""
    waiting = {
        partition: unread
        for partition, state in position.partitions()
        if partition in bounds and (unread := state.unread(bounds[partition].end))
    }
    shares = _share({partition: sum(e - s for s, e, _ in unread) for partition, unread in waiting.items()}, max_records)
    slices = []
    for partition, unread in waiting.items():
        left, ranges = shares[partition], []
        for one in unread:
            if left <= 0:
                break
            end = min(one.end, one.start + left)
            ranges.append(Range(one.start, end, one.epoch))
            left -= end - one.start
        if ranges:
            slices.append(Slice(partition, position.topics[partition.topic].id, ranges))
    return slices


def _share(wanted: Mapping[PartitionId, int], total: int) -> dict[PartitionId, int]:
    """Share a number evenly: nobody gets more than it wants, and at least one gets something."""
    shares: dict[PartitionId, int] = {}
    left = max(1, total)
    for done, partition in enumerate(sorted(wanted, key=lambda one: (wanted[one], one))):
        share = min(wanted[partition], -(-left // (len(wanted) - done)))
        shares[partition] = share
        left -= share
    return shares


def share_tasks(
    slices: Sequence[Slice], parallelism: int, task_records: int = TASK_RECORDS
) -> list[list[tuple[Slice, Range]]]:
    """Cut a slice into contiguous parts of about the same number of records, one per task."""
    total = sum(one.records for one in slices)
    tasks = max(1, min(parallelism, -(-total // task_records)))
    parts: list[list[tuple[Slice, Range]]] = [[]]
    room = share = -(-total // tasks)
    for one in slices:
        for start, end, epoch in one.ranges:
            at, known = start, epoch
            while at < end:
                if room <= 0:
                    parts.append([])
                    room = share
                stop = min(end, at + room)
                parts[-1].append((one, Range(at, stop, known)))
                room -= stop - at
                at, known = stop, -1
    return parts


def spread_pieces(ranges: Sequence[Range], pieces: int, records: int) -> list[tuple[int, Range]]:
    """Choose pieces of at most `records` offsets, about `pieces` in all, spread over ranges; each with the number of
    its range. The first and the last piece of a range are among them, if it has several."""
    chosen: list[tuple[int, Range]] = []
    each = max(1, pieces // max(1, len(ranges)))
    for number, (start, end, epoch) in enumerate(ranges):
        count = -(-(end - start) // records)
        steps = range(count) if count <= each else sorted({i * (count - 1) // max(1, each - 1) for i in range(each)})
        for step in steps:
            at = start + step * records
            chosen.append((number, Range(at, min(end, at + records), epoch if at == start else -1)))
    return chosen

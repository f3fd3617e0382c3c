"""Positions of a Kafka source that a person chooses: offsets, the beginning, the end, a time; offsets to skip. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from firnline.errors import ConfigError, DamagedError
from firnline.sources.base import PositionChange
from firnline.sources.kafka.planning import Bounds
from firnline.sources.kafka.position import PartitionId, PartitionState, Position, Range

WORDS = (
    "Write TOPIC:PARTITION=WHERE, several with commas between; or WHERE alone for all partitions. WHERE is an offset, "
    "beginning, end or a time such as 2026-01-31T12:00:00Z."
)
SKIP_WORDS = (
    "Write TOPIC:PARTITION=OFFSET to skip what comes before that offset, or TOPIC:PARTITION+COUNT to skip so many "
    "offsets; several with commas between."
)
_SET = re.compile(r"(?:(?P<topic>.+):(?P<number>\d+)=)?(?P<where>[^=]+)")
_SKIP = re.compile(r"(?P<topic>.+):(?P<number>\d+)(?P<sign>[=+])(?P<count>\d+)")

OffsetsAt = Callable[[int], Mapping[PartitionId, int]]  # milliseconds -> offsets; -1: no record is that young


def choose(
    source: str,
    before: Position,
    words: str,
    ids: Mapping[str, str],
    bounds: Mapping[PartitionId, Bounds],
    at: OffsetsAt,
) -> PositionChange:
    """Return the position that `words` ask for.

    Raises:
        ConfigError: they mean nothing, or a partition does not hold the offset.
    """
    if words.lstrip().startswith("{"):
        return _change(before, _from_json(source, before, words, ids, bounds), ids, bounds)
    after = before
    for partition, where in _parse(source, words, bounds):
        offset = _find_offset(source, partition, where, bounds[partition], at)
        state = _held(before, partition, ids)
        if state is not None and state.next == offset and not state.ahead:
            continue
        after = after.set(partition, ids[partition.topic], PartitionState(offset))
    return _change(before, after, ids, bounds)


def skip(
    source: str, before: Position, words: str, ids: Mapping[str, str], bounds: Mapping[PartitionId, Bounds]
) -> PositionChange:
    """Return the position that passes over the offsets that `words` name. Raises like `choose`."""
    after = before
    for text in words.split(","):
        found = _SKIP.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"source {source!r} cannot skip {text.strip()!r}", hint=SKIP_WORDS)
        partition = _known(source, PartitionId(found["topic"], int(found["number"])), bounds)
        held, count = bounds[partition], int(found["count"])
        state = _held(after, partition, ids) or PartitionState(held.start)
        unread = state.unread(held.end)
        if found["sign"] == "=":
            _check_offset(source, partition, count, held)
            passed = [Range(one.start, min(one.end, count)) for one in unread if one.start < count]
        else:
            passed = list(_first(unread, count))
            lacking = count - sum(one.end - one.start for one in passed)
            if lacking:
                raise ConfigError(
                    f"source {source!r}, {partition}: {count} offsets cannot be skipped; {count - lacking} are unread",
                    hint=f"Skip what is there: {partition.topic}:{partition.number}={held.end}",
                )
        after = after.set(partition, ids[partition.topic], state.cover(passed))
    return _change(before, after, ids, bounds)


def _parse(source: str, words: str, bounds: Mapping[PartitionId, Bounds]) -> Iterator[tuple[PartitionId, str]]:
    parts = [part.strip() for part in words.split(",")]
    for part in parts:
        found = _SET.fullmatch(part)
        if found is None or (found["topic"] is None and len(parts) > 1):
            raise ConfigError(f"source {source!r} has no position {part!r}", hint=WORDS)
        if found["topic"] is None:
            yield from ((partition, part) for partition in sorted(bounds))
        else:
            yield _known(source, PartitionId(found["topic"], int(found["number"])), bounds), found["where"].strip()


def _known(source: str, partition: PartitionId, bounds: Mapping[PartitionId, Bounds]) -> PartitionId:
    if partition not in bounds:
        names = ", ".join(f"{one.topic}:{one.number}" for one in sorted(bounds)[:10])
        raise ConfigError(
            f"source {source!r} reads no partition {partition.topic}:{partition.number}",
            hint=f"It reads {names}{' and more' if len(bounds) > 10 else ''}." if bounds else "It reads none yet.",
        )
    return partition


def _find_offset(source: str, partition: PartitionId, where: str, held: Bounds, at: OffsetsAt) -> int:
    if where in ("beginning", "end"):
        return held.start if where == "beginning" else held.end
    if where.isdecimal():
        _check_offset(source, partition, int(where), held)
        return int(where)
    try:
        moment = datetime.fromisoformat(where)
    except ValueError:
        raise ConfigError(f"source {source!r} has no position {where!r}", hint=WORDS) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    offset = at(int(moment.timestamp() * 1000)).get(partition, -1)
    return min(max(offset, held.start), held.end) if offset >= 0 else held.end


def _check_offset(source: str, partition: PartitionId, offset: int, held: Bounds) -> None:
    if not held.start <= offset <= held.end:
        raise ConfigError(
            f"source {source!r}, {partition}: offset {offset} is not there; the partition holds {held.start} up to "
            f"{held.end}, its end",
            hint=WORDS,
        )


def _from_json(
    source: str, before: Position, words: str, ids: Mapping[str, str], bounds: Mapping[PartitionId, Bounds]
) -> Position:
    """Return a whole position; the ids of topics may be left out."""
    try:
        wanted = Position.from_json(json.loads(words))
    except (ValueError, DamagedError) as error:
        message = error.message if isinstance(error, DamagedError) else str(error)
        hint = "`firnline position show --json` prints the position as it is. " + WORDS
        raise ConfigError(f"source {source!r}: this is no position of it: {message}", hint=hint) from error
    after = Position(before.location)
    for partition, state in wanted.partitions():
        _check_offset(source, partition, state.next, bounds[_known(source, partition, bounds)])
        if (known := wanted.topics[partition.topic].id) not in ("", ids[partition.topic]):
            raise ConfigError(
                f"source {source!r}: topic {partition.topic} has the id {ids[partition.topic]}, and the position names "
                f"{known}",
                hint="The topic was deleted and created again: give offsets of the new one, without its id.",
            )
        after = after.set(partition, ids[partition.topic], state)
    return after


def _held(position: Position, partition: PartitionId, ids: Mapping[str, str]) -> PartitionState | None:
    """Return the progress in a partition of the topic that is there now; None: nothing of it was read."""
    topic = position.topics.get(partition.topic)
    return topic.partitions.get(partition.number) if topic and topic.id in ("", ids[partition.topic]) else None


def _change(
    before: Position, after: Position, ids: Mapping[str, str], bounds: Mapping[PartitionId, Bounds]
) -> PositionChange:
    """Compare what was unread with what will be. Offsets are counted: a partition may have fewer records."""
    again: list[tuple[PartitionId, Range]] = []
    never: list[tuple[PartitionId, Range]] = []
    for partition, held in sorted(bounds.items()):
        then, now = _held(before, partition, ids), _held(after, partition, ids)
        old = _unread(then, held)
        new = _unread(now, held) if now != then else old
        again += [(partition, one) for one in _minus(new, old)]
        never += [(partition, one) for one in _minus(old, new)]
    return PositionChange(
        after.to_json(),
        tuple(f"{partition} offsets {one.start} to {one.end - 1}" for partition, one in again),
        tuple(f"{partition} offsets {one.start} to {one.end - 1}" for partition, one in never),
        sum(one.end - one.start for _, one in again),
        sum(one.end - one.start for _, one in never),
        unit="offset",
    )


def _unread(state: PartitionState | None, held: Bounds) -> list[Range]:
    """Return what a partition still holds and a position has not read."""
    unread = [Range(held.start, held.end)] if state is None else state.unread(held.end)
    return [Range(max(one.start, held.start), one.end) for one in unread if one.end > held.start]


def _minus(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return what is in the first ranges and not in the others; both in order."""
    found = []
    for one in ranges:
        start = one.start
        for other in others:
            if other.end > start and other.start < one.end:
                if other.start > start:
                    found.append(Range(start, other.start))
                start = max(start, other.end)
        if start < one.end:
            found.append(Range(start, one.end))
    return found


def _first(ranges: Sequence[Range], count: int) -> Iterator[Range]:
    """Yield the first `count` offsets of these ranges."""
    for one in ranges:
        if count <= 0:
            return
        end = min(one.end, one.start + count)
        yield Range(one.start, end)
        count -= end - one.start

"""The position of a Kafka source: per topic its id, per partition the next offset and its leader epoch. Pure.

Splits of one partition may end early, so ranges beyond the next offset may be read already: they are named in `ahead`,
and the next plans read the gap before them. Offsets of a range are those from its start up to, and without, its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from firnline.errors import DamagedError
from firnline.sources.base import PositionView
from firnline.types import Json

FORMAT = 1


class Range(NamedTuple):
    """Offsets of one partition, and the leader epoch of its last record; -1: unknown."""

    start: int
    end: int
    epoch: int = -1


class PartitionId(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"

    @classmethod
    def parse(cls, text: str) -> PartitionId:
        topic, _, number = text.rpartition("/")
        return cls(topic, int(number))


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The progress in one partition. `epoch` is the leader epoch of the record before `next`; -1: unknown."""

    next: int
    epoch: int = -1
    ahead: tuple[Range, ...] = ()  # read already, beyond `next`, in order

    def unread(self, end: int) -> list[Range]:
        """Return what is to be read before `end`."""
        found, start, epoch = [], self.next, self.epoch
        for done in self.ahead:
            if start < min(done.start, end):
                found.append(Range(start, min(done.start, end), epoch))
            start, epoch = done.end, done.epoch
        if start < end:
            found.append(Range(start, end, epoch))
        return found

    def cover(self, ranges: Iterable[Range]) -> PartitionState:
        """Return the progress after these ranges were read, too."""
        state_next, epoch, ahead = self.next, self.epoch, list[Range]()
        for one in sorted([*self.ahead, *(one for one in ranges if one.start < one.end)]):
            if one.start <= state_next:
                if one.end > state_next:
                    state_next, epoch = one.end, one.epoch if one.epoch >= 0 else epoch
            elif ahead and ahead[-1].end == one.start:
                ahead[-1] = Range(ahead[-1].start, one.end, one.epoch if one.epoch >= 0 else ahead[-1].epoch)
            else:
                ahead.append(one)
        return PartitionState(state_next, epoch, tuple(ahead))

    def to_json(self) -> dict[str, Json]:
        return {
            "next": self.next,
            "leader_epoch": self.epoch,
            **({"ahead": [list(one) for one in self.ahead]} if self.ahead else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> PartitionState:
        ahead = tuple(Range(*(int(number) for number in one)) for one in value.get("ahead", ()))
        return cls(int(value["next"]), int(value["leader_epoch"]), ahead)


@dataclass(frozen=True, slots=True)
class TopicState:
    """The progress in one topic. A topic that is deleted and created again has another id; empty: not known yet."""

    id: str
    partitions: Mapping[int, PartitionState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a Kafka source stands. `location` is what the spec named when it was made: topics, or a pattern."""

    location: str
    topics: Mapping[str, TopicState] = field(default_factory=dict)
    answered: tuple[str, ...] = ()  # requests that were answered and may not be deleted yet

    def partitions(self) -> Iterator[tuple[PartitionId, PartitionState]]:
        """Yield every partition in order."""
        for name, topic in sorted(self.topics.items()):
            for number, state in sorted(topic.partitions.items()):
                yield PartitionId(name, number), state

    def of(self, partition: PartitionId) -> PartitionState | None:
        """Return the progress in a partition; None if it is not known yet."""
        topic = self.topics.get(partition.topic)
        return topic.partitions.get(partition.number) if topic is not None else None

    def set(self, partition: PartitionId, topic_id: str, state: PartitionState) -> Position:
        """Return the position with another progress in a partition. Another topic id forgets the old topic."""
        topic = self.topics.get(partition.topic)
        kept = topic.partitions if topic is not None and topic.id in ("", topic_id) else {}
        changed = TopicState(topic_id, {**kept, partition.number: state})
        return replace(self, topics={**self.topics, partition.topic: changed})

    def moved(self, location: str, names: Sequence[str]) -> Position:
        """Return the same offsets on other topics, whose ids are not known yet; the topics correspond in order."""
        pairs = zip(sorted(self.topics), sorted(names), strict=True)
        topics = {new: replace(self.topics[old], id="") for old, new in pairs}
        return replace(self, location=location, topics=topics)

    def to_json(self) -> dict[str, Json]:
        """Return the position in the form of the checkpoint."""
        return {
            "kafka": FORMAT,
            "location": self.location,
            "topics": {
                name: {
                    "id": topic.id,
                    "partitions": {str(n): state.to_json() for n, state in sorted(topic.partitions.items())},
                }
                for name, topic in sorted(self.topics.items())
            },
            **({"answered": list(self.answered)} if self.answered else {}),
        }

    @classmethod
    def from_json(cls, value: Json) -> Position:
        try:
            if value["kafka"] != FORMAT:
                raise DamagedError(f"a Kafka position has the format {value['kafka']}, which this version cannot read")
            topics = {
                str(name): TopicState(
                    str(topic["id"]),
                    {int(n): PartitionState.from_json(state) for n, state in topic["partitions"].items()},
                )
                for name, topic in value["topics"].items()
            }
            return cls(str(value["location"]), topics, tuple(str(one) for one in value.get("answered", ())))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DamagedError(f"a Kafka position is unreadable: {error}") from error

    def describe(self) -> PositionView:
        """Return the position in a form for people."""
        offsets = {str(partition): state.next for partition, state in self.partitions()}
        return PositionView(facts={"topics": self.location, "offsets": offsets}, location=self.location)

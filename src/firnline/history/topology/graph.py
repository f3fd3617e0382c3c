"""The graph of a topology: which pipeline reads the tables and topics that another one writes. Pure.

A channel is a Delta table or a Kafka topic that one member writes and another one reads. It is derived from the options
of the pipelines: nobody lists channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from firnline.errors import ConfigError
from firnline.options import PipelineOptions, template_columns
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.storage import normalise
from firnline.topology.topics import may_write

Kind = Literal["delta", "kafka"]


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """A table or topic with one writer and one reader. A table with two readers is two channels."""

    place: str  # the table's location, or the topic
    kind: Kind
    writer: str
    sink: str
    reader: str
    source: str
    part: bool = False  # the table is a part of a sink with a template

    def to_json(self) -> dict[str, str]:
        """Return the fields that commands show."""
        return {
            "place": self.place,
            "kind": self.kind,
            "writer": self.writer,
            "sink": self.sink,
            "reader": self.reader,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Conflict:
    """A table or topic that a member reads and several sinks write."""

    place: str
    writers: tuple[tuple[str, str], ...]  # pipeline and sink

    def __str__(self) -> str:
        names = " and ".join(f"{pipeline!r} (sink {sink!r})" for pipeline, sink in self.writers)
        return f"{self.place} is written by {names}"


@dataclass(frozen=True, slots=True)
class Topology:
    """Members by name, and the channels between them."""

    members: dict[str, PipelineOptions]
    channels: tuple[Channel, ...]
    conflicts: tuple[Conflict, ...]
    cycles: tuple[tuple[str, ...], ...]  # members that read from each other, in order of names

    @property
    def outside(self) -> list[str]:
        """Members without a channel: nobody reads what they write, and they read what nobody here writes."""
        joined = {name for channel in self.channels for name in (channel.writer, channel.reader)}
        return sorted(set(self.members) - joined)


def make_topology(pipelines: Iterable[PipelineOptions]) -> Topology:
    """Derive the graph of some pipelines.

    Raises:
        ConfigError: two of them have the same name.
    """
    members: dict[str, PipelineOptions] = {}
    for options in pipelines:
        if options.name in members:
            raise ConfigError(
                f"two pipeline files have the name {options.name!r}",
                hint="A name is the identity of a pipeline: list each file once, or rename one.",
            )
        members[options.name] = options
    members = dict(sorted(members.items()))
    found = sorted(channel for reader in members.values() for channel in _channels_to(reader, members.values()))
    conflicts, disputed = _find_conflicts(found, members)
    channels = tuple(channel for channel in found if channel not in disputed)
    return Topology(members, channels, conflicts, find_cycles(list(members), channels))


def _channels_to(reader: PipelineOptions, writers: Iterable[PipelineOptions]) -> list[Channel]:
    """Return the channels into one pipeline."""
    found = []
    for writer in writers:
        for sink in writer.sinks:
            for source in reader.sources:
                match source, sink:
                    case DeltaSourceOptions(), DeltaSinkOptions() if normalise(source.table) == normalise(sink.table):
                        ends = (writer.name, sink.name, reader.name, source.name)
                        found.append(Channel(normalise(source.table), "delta", *ends))
                    case DeltaSourceOptions(), DeltaPartsOptions() if _fits(sink.table, normalise(source.table)):
                        ends = (writer.name, sink.name, reader.name, source.name)
                        found.append(Channel(normalise(source.table), "delta", *ends, part=True))
                    case KafkaSourceOptions(), KafkaSinkOptions() if _same_cluster(source.brokers, sink.brokers):
                        ends = (writer.name, sink.name, reader.name, source.name)
                        found += [Channel(topic, "kafka", *ends) for topic in _common_topics(source, sink)]
    return found


def _same_cluster(one: str, other: str) -> bool:
    """Whether two lists of brokers have one in common."""
    first, second = ({broker.strip() for broker in text.split(",")} for text in (one, other))
    return bool(first & second)


def _common_topics(source: KafkaSourceOptions, sink: KafkaSinkOptions) -> list[str]:
    """Return the topics that a sink may write and a source reads; a template or pattern stands for all that fit."""
    if not template_columns(sink.topic):
        return [sink.topic] if source.covers(sink.topic) else []
    if source.pattern:
        return [sink.topic]
    return [topic for topic in source.topics if may_write(sink.topic, sink.topics_allowed, topic)]


def _fits(template: str, name: str) -> bool:
    """Whether a name may be rendered from a template with {column}."""
    parts = re.split(r"\{[^{}]*\}", template)
    return len(parts) > 1 and re.fullmatch("[^/]+".join(map(re.escape, parts)), name) is not None


def _find_conflicts(
    channels: Sequence[Channel], members: Mapping[str, PipelineOptions]
) -> tuple[tuple[Conflict, ...], set[Channel]]:
    """Return what several sinks write for one source, and the channels that it concerns. Topics of one name in two
    clusters are two topics: each source reads one of them."""
    found: set[Conflict] = set()
    disputed: set[Channel] = set()
    for channel in channels:
        same = [
            one
            for one in channels
            if (one.reader, one.source) == (channel.reader, channel.source) and _may_meet(one, channel, members)
        ]
        writers = {(one.writer, one.sink) for one in same}
        if len(writers) > 1:
            place = min(same, key=lambda one: (bool(template_columns(one.place)), one.place)).place
            found.add(Conflict(place, tuple(sorted(writers))))
            disputed.update(same)
    return tuple(sorted(found, key=lambda one: (one.place, one.writers))), disputed


def _may_meet(one: Channel, other: Channel, members: Mapping[str, PipelineOptions]) -> bool:
    """Return whether two channels can be the same table or topic. Whether two patterns of names have one in common
    cannot be told; templates with the same pattern have."""
    if one.place == other.place:
        return True
    if one.kind == "delta" or other.kind == "delta":
        return False
    first, second = _topic_sink(one, members), _topic_sink(other, members)
    if template_columns(one.place) and template_columns(other.place):
        ends = zip(_literal_ends(one.place), _literal_ends(other.place), strict=True)
        return first.topics_allowed == second.topics_allowed and all(
            (a.startswith(b) or b.startswith(a)) if at == 0 else (a.endswith(b) or b.endswith(a))
            for at, (a, b) in enumerate(ends)
        )
    if template_columns(one.place):
        return may_write(first.topic, first.topics_allowed, other.place)
    return template_columns(other.place) != [] and may_write(second.topic, second.topics_allowed, one.place)


def _topic_sink(channel: Channel, members: Mapping[str, PipelineOptions]) -> KafkaSinkOptions:
    sink = next(one for one in members[channel.writer].sinks if one.name == channel.sink)
    assert isinstance(sink, KafkaSinkOptions)
    return sink


def _literal_ends(template: str) -> tuple[str, str]:
    """Return what every name begins with that a template renders, and what it ends with."""
    return template[: template.index("{")], template[template.rindex("}") + 1 :]


def find_cycles(names: Sequence[str], channels: Iterable[Channel]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of members that read from each other, directly or through others."""
    reads: dict[str, set[str]] = {name: set() for name in names}
    for channel in channels:
        reads[channel.writer].add(channel.reader)
    reached = {name: _reach(reads, name) for name in names}
    groups = {tuple(sorted(o for o in reached[name] if name in reached[o])) for name in names if name in reached[name]}
    return tuple(sorted(groups))


def _reach(reads: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in reads[waiting.pop()] - found:
            found.add(name)
            waiting.append(name)
    return found

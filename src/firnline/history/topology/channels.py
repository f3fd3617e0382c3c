"""Compares the two ends of a channel: is a reader's position at or before an epoch of the writer, on the true chain?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, cast

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import ConfigError, RollbackRefusedError, SourceError
from firnline.history.topology.graph import Channel, Topology
from firnline.names import kafka_checkpoint_topic
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.delta.contents import find_key
from firnline.sinks.delta.options import DeltaPartsOptions
from firnline.sinks.guard import GuardedSink
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.kafka.sink import KafkaSink
from firnline.sources.delta.chain import find_path
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.delta.position import DeltaPosition
from firnline.sources.delta.table_log import TableLog
from firnline.sources.delta.versions import Kind
from firnline.sources.kafka.channels import find_first_record
from firnline.sources.kafka.clients import EARLIEST, describe_topics, list_offsets, open_admin
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.sources.kafka.position import PartitionId, PartitionState
from firnline.sources.kafka.position import Position as KafkaPosition
from firnline.storage import normalise
from firnline.topology.topics import Partition, TopicChannel, is_same_topic
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sinks.delta.parts.sink import DeltaPartsSink


def check_channels(topology: Topology) -> None:
    """Refuse a topology that cannot be taken to one instant.

    Raises:
        ConfigError: a table has several writers.
    """
    if topology.conflicts:
        raise ConfigError(
            "; ".join(map(str, topology.conflicts)),
            hint="A channel has one writer: give each a table of its own.",
        )


class TableChain:
    """The versions of one channel's table, as its reader sees them."""

    def __init__(self, reader: PipelineOptions, source: str) -> None:
        options = next(one for one in reader.sources if one.name == source)
        assert isinstance(options, DeltaSourceOptions)
        self._feeds = options.on_change == "change_feed"
        self._log = TableLog(normalise(options.table), options.storage_options)
        self._log.refresh_newest()

    def fits(self, position: Json, version: int) -> bool:
        """Return whether nothing that a position has read lies beyond a version, or is undone on the way to it."""
        at = DeltaPosition.from_json(position)
        if at.id is not None and at.id != self._log.table_id:
            return False
        for number in self._path_back(at.reached, version):
            found = self._log.find(number) if number > at.since else None
            if number > at.since and (found is None or found.kind is not Kind.EMPTY):
                return False
        return True

    def files_between(self, position: Json, version: int) -> list[str]:
        """Return the data files of the commits that a position has still to read, up to a version."""
        at = DeltaPosition.from_json(position)
        found: list[str] = [str(item["path"]) for item in at.left]
        first = at.version if at.reading is None else at.reading - 1
        if at.snapshot and at.reading is not None:
            found += (str(item["path"]) for item in self._log.snapshot(at.reading, origins=False))
            first = at.reading
        kinds = (*_NAMES, "remove") if self._feeds else _NAMES
        for number in find_path(self._parent, first, version).ahead:
            for action in self._log.actions(number):
                files = (action[kind] for kind in kinds if kind in action)
                found += (str(file["path"]) for file in files if file.get("dataChange", True) or "cdc" in action)
        return found

    def find_missing(self, position: Json, version: int) -> list[str]:
        """Return what a position has still to read, up to a version, and is gone: data files, versions of the log."""
        try:
            return [path for path in self.files_between(position, version) if find_key(self._log.storage, path) is None]
        except SourceError as error:
            return [error.message]

    def _path_back(self, reader: int, version: int) -> Iterable[int]:
        return find_path(self._parent, reader, version).undone

    def _parent(self, number: int) -> int:
        found = self._log.find(number)
        return found.parent if found is not None else number - 1


_NAMES = ("add", "cdc")


class TopicReader:
    """A channel that is a topic, as its reader sees it."""

    def __init__(self, topology: Topology, channel: Channel) -> None:
        options = next(one for one in topology.members[channel.reader].sources if one.name == channel.source)
        assert isinstance(options, KafkaSourceOptions)
        self._options = options
        self._client = {"bootstrap.servers": options.brokers, **options.security, **options.client}
        self._channel = as_topic_channel(topology, channel)

    def fits(self, position: Json, ends: Mapping[Partition, int]) -> bool:
        """Return whether a position has read no record that lies beyond the end of the writer's epoch.

        An epoch ends before the end of its transaction, which a reader passes over: only records count. A position in a
        topic that was deleted and created again fits nothing.
        """
        known = KafkaPosition.from_json(position)
        if self._find_other_topics(known):
            return False
        for partition, state in known.partitions():
            if not self._channel.covers(partition.topic):
                continue
            reached, end = max([state.next, *(one.end for one in state.ahead)]), ends.get(partition, 0)
            if find_first_record(self._client, partition, end, reached, self._options.brokers) < reached:
                return False
        return True

    def find_missing(self, position: Json, ends: Mapping[Partition, int]) -> list[str]:
        """Return the offsets that a position has still to read, up to the end of the writer's epoch, and are gone."""
        known = KafkaPosition.from_json(position)
        found = [f"{topic}, which was deleted and created again" for topic in self._find_other_topics(known)]
        # A partition that was added to a topic is read from its first record on.
        wanted = [PartitionId(*one) for one in ends if one[0] in known.topics and self._channel.covers(one[0])]
        starts = list_offsets(open_admin(self._client), wanted, EARLIEST, self._options.brokers)
        for one in sorted(wanted):
            state = known.of(one) or PartitionState(0)
            lost = min(starts.get(one, ends[one]), ends[one])  # a partition that is gone has nothing
            found += [f"{one} offsets {state.next} to {lost - 1}"] if state.next < lost else []
        return found

    def _find_other_topics(self, position: KafkaPosition) -> list[str]:
        """Return the topics of the channel that are no longer the ones that a position has read."""
        names = [name for name in position.topics if self._channel.covers(name)]
        now = describe_topics(open_admin(self._client), names, self._options.brokers)
        then = {name: position.topics[name].id for name in names}
        return [name for name in names if not is_same_topic(then, {one: now[one].id for one in now}, name)]


class Comparison:
    """Compares the two ends of channels, and remembers what it has read of them."""

    def __init__(self, topology: Topology, opened: Mapping[str, OpenPipeline]) -> None:
        self._topology = topology
        self._opened = opened
        self._readers: dict[Channel, TableChain | TopicReader] = {}
        self._versions: dict[tuple[str, str, str, int], int | None] = {}
        self._ends: dict[tuple[str, str, int], Mapping[Partition, int]] = {}

    def fits(self, channel: Channel, epoch: int, position: Json) -> bool:
        """Return whether a reader's position is at or before the end of an epoch of the writer.

        Raises:
            RollbackRefusedError: the table no longer has the version of that epoch.
        """
        if channel not in self._readers:
            options = self._topology.members[channel.reader]
            self._readers[channel] = (
                TopicReader(self._topology, channel) if channel.kind == "kafka" else TableChain(options, channel.source)
            )
        reader = self._readers[channel]
        if isinstance(reader, TopicReader):
            return reader.fits(position, self._find_ends(channel, epoch))
        version = self.find_version(channel.writer, channel.sink, epoch, channel.place if channel.part else "")
        if version is None:
            raise RollbackRefusedError(f"{channel.place} no longer has the version of epoch {epoch}")
        return reader.fits(position, version)

    def find_version(self, pipeline: str, sink: str, epoch: int, part: str = "") -> int | None:
        """Return the version of a table whose newest epoch this is; None if it no longer exists.

        Of a sink with a template: the version of one part, by its location; or the epoch, if every part has it.
        """
        key = (pipeline, sink, part, epoch)
        if key not in self._versions:
            try:
                self._versions[key] = find_version(self._opened[pipeline], sink, epoch, part)
            except RollbackRefusedError:
                self._versions[key] = None
        return self._versions[key]

    def _find_ends(self, channel: Channel, epoch: int) -> Mapping[Partition, int]:
        key = (channel.writer, channel.sink, epoch)
        if key not in self._ends:
            sink = find_topic_sink(self._opened[channel.writer], channel.sink)
            assert sink is not None
            self._ends[key] = sink.find_ends(epoch)
        return self._ends[key]


def find_missing(topology: Topology, channel: Channel, writer: OpenPipeline, epoch: int, position: Json) -> list[str]:
    """Return what a reader has still to read, up to the end of an epoch of the writer, and is gone."""
    if (sink := find_topic_sink(writer, channel.sink)) is not None:
        return TopicReader(topology, channel).find_missing(position, sink.find_ends(epoch))
    version = find_version(writer, channel.sink, epoch, channel.place if channel.part else "")
    return TableChain(topology.members[channel.reader], channel.source).find_missing(position, version)


def find_version(pipeline: OpenPipeline, name: str, epoch: int, part: str = "") -> int:
    """Return the version of a sink's table whose newest epoch this is.

    Of a sink with a template: the version of one part, by its location (-1: it does not exist); or the epoch, if every
    part has it. The head is read first: a part may still lack what the sink does not hold.

    Raises:
        RollbackRefusedError: the table no longer has it, or the sink does not hold the epoch yet.
    """
    parts = find_parts_sink(pipeline, name)
    if parts is None:
        return pipeline.sink(name).version_of(epoch)
    held = parts.read_fence().epoch
    if held < epoch:
        raise RollbackRefusedError(f"sink {name!r} does not hold epoch {epoch} yet", epoch=epoch)
    if not part:
        return parts.version_of(epoch)
    return next(table for table in parts.open_tables([part]) if table.uri == part).version_of(epoch)


def find_parts_sink(pipeline: OpenPipeline, name: str) -> DeltaPartsSink | None:
    """Return a sink that is Delta tables with a template; None if it is another kind."""
    kinds = {one.name: one for one in pipeline.options.sinks}
    if not isinstance(kinds.get(name), DeltaPartsOptions):  # the class of the sink loads the compiler
        return None
    sink = pipeline.sink(name)
    return cast("DeltaPartsSink", sink.inner if isinstance(sink, GuardedSink) else sink)


def find_parts_sinks(pipeline: OpenPipeline) -> list[DeltaPartsSink]:
    """Return the sinks of a pipeline that are Delta tables with a template."""
    found = (find_parts_sink(pipeline, sink.name) for sink in pipeline.sinks)
    return [sink for sink in found if sink is not None]


def find_topic_sink(pipeline: OpenPipeline, name: str) -> KafkaSink | None:
    """Return a sink that is topics of a cluster; None if it is another kind."""
    sink = pipeline.sink(name)
    inner = sink.inner if isinstance(sink, GuardedSink) else sink
    return inner if isinstance(inner, KafkaSink) else None


def find_topics(topology: Topology, pipeline: OpenPipeline) -> list[KafkaSink]:
    """Return the Kafka sinks of a pipeline whose topics a member reads."""
    ends = (pipeline.options.name, "kafka")
    names = {channel.sink for channel in topology.channels if (channel.writer, channel.kind) == ends}
    found = (find_topic_sink(pipeline, name) for name in sorted(names))
    return [sink for sink in found if sink is not None]


def as_topic_channel(topology: Topology, channel: Channel) -> TopicChannel:
    """Return what the reader of a Kafka channel needs to know."""
    sink = next(one for one in topology.members[channel.writer].sinks if one.name == channel.sink)
    assert isinstance(sink, KafkaSinkOptions)
    checkpoints = kafka_checkpoint_topic(channel.writer, sink.head_name)
    return TopicChannel(sink.topic, checkpoints, channel.writer, channel.sink, sink.topics_allowed)


def topics_read_by(topology: Topology, reader: str) -> dict[str, list[TopicChannel]]:
    """Return the Kafka channels that a member reads, by source."""
    found: dict[str, list[TopicChannel]] = {}
    for channel in topology.channels:
        if channel.kind == "kafka" and channel.reader == reader:
            known = found.setdefault(channel.source, [])
            if (one := as_topic_channel(topology, channel)) not in known:
                known.append(one)
    return found


def reached_version(position: Json) -> int:
    """Return the version up to which a position has read everything: it needs all later ones."""
    at = DeltaPosition.from_json(position)
    if at.snapshot and at.reading is not None:
        return at.reading  # it reads what the table had in that version
    return min([at.version, *(int(item["version"]) - 1 for item in at.left)])


def find_position(entry: LedgerEntry, channel: Channel) -> Json | None:
    """Return how far an epoch of a reader has read a channel; None if the reader had no such source then: it has read
    nothing, and begins with what the table or topic has."""
    return entry.checkpoint.positions.get(channel.source)


def channels_among(topology: Topology, names: Collection[str]) -> list[Channel]:
    """Return the channels between some members: the topology may have got others since."""
    return [channel for channel in topology.channels if channel.writer in names and channel.reader in names]


def channels_from(topology: Topology, writer: str, sink: str, part: str = "") -> list[Channel]:
    """Return the channels that one sink feeds; those of one part, by its location."""
    found = [channel for channel in topology.channels if (channel.writer, channel.sink) == (writer, sink)]
    return [channel for channel in found if not channel.part or not part or channel.place == part]

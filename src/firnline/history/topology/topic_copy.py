"""Copies the range of a topic into a savepoint: what its readers have yet to read at the cut.

The writer goes on meanwhile: the checkpoint topic names the end of the snapshot's epoch in every partition, and what
lies behind it is not read. A range is complete when a record at or beyond its end has come, or the partition ends
there. Control records and records of aborted transactions are not delivered, void offsets are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import RollbackRefusedError, SourceGapError
from firnline.history.savepoints.files import Progress
from firnline.history.topology.channels import as_topic_channel
from firnline.history.topology.graph import Channel, Topology
from firnline.history.topology.topic_files import SavedTopic, TopicFile, TopicFileWriter, as_batch
from firnline.history.topology.topic_plan import find_lost, find_states, may_be_compacted, plan_ranges
from firnline.sinks.kafka.sink import KafkaSink
from firnline.sources.kafka.channels import read_channel
from firnline.sources.kafka.clients import EARLIEST, Topic, describe_topics, lend_consumer, list_offsets, open_admin
from firnline.sources.kafka.fetching import Wave
from firnline.sources.kafka.messages import RangeInput
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.sources.kafka.position import PartitionId, PartitionState, Position, Range
from firnline.storage import Storage
from firnline.topology.topics import ChannelState, Cut, is_same_topic
from firnline.types import Clock, Json

NAMED = 3
ALL = 1 << 62
_AGAIN = "Take another snapshot."


@dataclass(frozen=True, slots=True)
class TopicClient:
    """How the readers of a channel reach their topic."""

    settings: Mapping[str, str] = field(repr=False)
    brokers: str

    @classmethod
    def of(cls, topology: Topology, channel: Channel) -> TopicClient:
        """Return the client of a channel's reader."""
        options = source_of(topology, channel)
        return cls({"bootstrap.servers": options.brokers, **options.security, **options.client}, options.brokers)

    def describe(self, topic: str) -> Topic | None:
        """Return a topic as the brokers describe it; None if there is none."""
        return describe_topics(open_admin(self.settings), [topic], self.brokers).get(topic)

    def offsets(self, topic: str, numbers: Sequence[int], at: int = EARLIEST) -> dict[int, int]:
        """Return an offset of each partition, see `list_offsets`."""
        asked = [PartitionId(topic, number) for number in numbers]
        found = list_offsets(open_admin(self.settings), asked, at, self.brokers)
        return {one.number: offset for one, offset in found.items()}

    def read(self, topic: Topic, name: str, ranges: Mapping[int, Range]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Yield the records of ranges, partition by partition: partition, offset reached, records.

        Raises:
            SourceGapError: the broker no longer has them.
            SourceError: the brokers do not answer.
        """
        if not ranges:
            return
        inputs = {number: RangeInput(f"{name}/{number}", topic.id, *one) for number, one in ranges.items()}
        with lend_consumer(self.settings) as consumer:
            wave = Wave(consumer, list(inputs.values()), self.brokers, SourceGapError)
            for number, one in inputs.items():
                reached = one.start
                while reached < one.end:
                    messages, reached = wave.take(one, reached, ALL)
                    batch = as_batch(messages, number)
                    wave.learn_size(batch.num_rows, batch.nbytes)
                    yield number, reached, batch
            wave.close()


def source_of(topology: Topology, channel: Channel) -> KafkaSourceOptions:
    """Return the source that reads a channel."""
    options = next(one for one in topology.members[channel.reader].sources if one.name == channel.source)
    assert isinstance(options, KafkaSourceOptions)
    return options


class TopicCopy:
    """The topic of one sink, on its way into a savepoint."""

    def __init__(
        self, topology: Topology, channels: Sequence[Channel], sink: KafkaSink, positions: Mapping[Channel, Json]
    ) -> None:
        self._topology = topology
        self._channels = channels
        self._sink = sink
        self._positions = {channel: Position.from_json(value) for channel, value in positions.items()}
        self._client = TopicClient.of(topology, channels[0])
        self._name = channels[0].place

    def save(
        self,
        snapshot: str,
        epoch: int,
        target: Storage,
        clock: Clock,
        progress: Progress | None,
        stopping: Callable[[], bool],
    ) -> SavedTopic:
        """Copy the range that belongs to a snapshot, whose record in the writer is this epoch.

        Raises:
            RollbackRefusedError: retention or compaction has taken a part of it, or may have; or the cut is not known.
        """
        cut, state = self._find_cut(snapshot, epoch)
        topic = self._describe()
        ids = {self._name: topic.id}
        if not is_same_topic(cut.ids, ids, self._name):
            raise RollbackRefusedError(
                f"topic {self._name} was deleted and created again since the snapshot", hint=_AGAIN
            )
        void = {number: ranges for (name, number), ranges in state.void_in(ids).items() if name == self._name}
        firsts = self._client.offsets(self._name, topic.partitions)
        ends = {number: cut.ends.get((self._name, number), 0) for number in firsts}
        ranges = plan_ranges(self._find_states(topic, firsts), ends, void)
        self._refuse_lost(find_lost(ranges, firsts))
        files: list[TopicFile] = []
        oldest: int | None = None
        try:
            for file, least in self._copy(topic, ranges, target, progress, stopping):
                files.append(file)
                oldest = least
        except SourceGapError as error:
            raise RollbackRefusedError(f"{error.message}: retention has taken it", hint=_AGAIN) from error
        self._check_whole(topic, ranges, clock)
        files.sort(key=lambda file: (file.partition, file.first))
        readers = [(channel.reader, channel.source) for channel in self._channels]
        return SavedTopic(self._name, topic.id, firsts, ends, readers, oldest, files)

    def _find_cut(self, snapshot: str, epoch: int) -> tuple[Cut, ChannelState]:
        """Return where the epoch of the snapshot ends, and the state of the channel, which says what is void."""
        channel = as_topic_channel(self._topology, self._channels[0])
        state = read_channel(self._client.settings, channel, self._client.brokers)
        cut = state.cuts.get(snapshot)
        if cut is None or cut.epoch != epoch:
            raise RollbackRefusedError(
                f"the checkpoint topic {channel.checkpoint_topic} does not name the end of epoch {epoch}", hint=_AGAIN
            )
        return cut, state

    def _describe(self) -> Topic:
        topic = self._client.describe(self._name)
        if topic is None:
            raise RollbackRefusedError(f"topic {self._name} is gone (brokers {self._client.brokers})")
        return topic

    def _find_states(self, topic: Topic, firsts: Mapping[int, int]) -> list[dict[int, PartitionState]]:
        return [
            states_of(self._topology, channel, position, self._name, topic.id, firsts)
            for channel, position in self._positions.items()
        ]

    def _copy(
        self,
        topic: Topic,
        ranges: Mapping[int, Sequence[Range]],
        target: Storage,
        progress: Progress | None,
        stopping: Callable[[], bool],
    ) -> Iterator[tuple[TopicFile, int | None]]:
        """Yield each file, and the smallest timestamp known up to then."""
        total = sum(one.end - one.start for of in ranges.values() for one in of)
        before, size_bytes, oldest = 0, 0, None
        for wave in _waves(ranges):
            writers = {number: TopicFileWriter(target, self._sink.name, number) for number in wave}
            for number, reached, batch in self._client.read(topic, self._name, wave):
                if stopping():
                    raise KeyboardInterrupt
                least = pc.min(batch.column("timestamp")).as_py()
                oldest = least if oldest is None or (least is not None and least < oldest) else oldest
                writer = writers[number]
                writer.add(batch)
                if reached >= wave[number].end:
                    writer.finish()
                yield from ((file, oldest) for file in writer.files)
                writer.files.clear()
                size_bytes += batch.nbytes
                done = before + _offsets_read(wave, number, reached)
                if progress is not None and done:
                    progress(f"copying {self._name}", size_bytes, size_bytes * total // done)
            before += sum(one.end - one.start for one in wave.values())

    # -- what is gone ---------------------------------------------------------------------------------

    def _check_whole(self, topic: Topic, ranges: Mapping[int, Sequence[Range]], clock: Clock) -> None:
        """Refuse if compaction may have taken a record before it was read, or if it was another topic."""
        if self._describe().id != topic.id:
            raise RollbackRefusedError(f"topic {self._name} was deleted and created again", hint=_AGAIN)
        lag = self._sink.find_compaction_lag(self._name)
        if lag is None or not ranges:
            return
        since = max(0, int(clock.now().timestamp() * 1000) - lag)
        suspects = may_be_compacted(ranges, self._client.offsets(self._name, list(ranges), since))
        if suspects:
            raise RollbackRefusedError(
                f"topic {self._name} is compacted: records that readers have yet to read may be gone from partition "
                f"{', '.join(map(str, suspects[:NAMED]))}",
                hint="Let the readers catch up, or raise min.compaction.lag.ms of the topic; take another snapshot.",
            )

    def _refuse_lost(self, lost: Sequence[tuple[int, int, int]]) -> None:
        if lost:
            named = "; ".join(
                f"{self._name}/{number} offsets {first} to {last}" for number, first, last in lost[:NAMED]
            )
            more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
            raise RollbackRefusedError(
                f"retention has taken records that readers have yet to read: {named}{more}", hint=_AGAIN
            )


def states_of(
    topology: Topology, channel: Channel, position: Position, topic: str, topic_id: str, firsts: Mapping[int, int]
) -> dict[int, PartitionState]:
    """Return where the reader of a channel stands in every partition of its topic. See `find_states`."""
    options = source_of(topology, channel)
    begins = options.start == "earliest" or bool(options.pattern and position.topics)
    return find_states(position, topic, topic_id, firsts, begins=begins, reader=channel.reader)


def _waves(ranges: Mapping[int, Sequence[Range]]) -> Iterator[dict[int, Range]]:
    """Yield the ranges so that none of them has a partition twice, each partition's in order."""
    for some in zip_longest(*ranges.values()):
        yield {number: one for number, one in zip(ranges, some, strict=True) if one is not None}


def _offsets_read(wave: Mapping[int, Range], number: int, reached: int) -> int:
    """Return how many offsets of a wave are read; its partitions come one after the other."""
    done = 0
    for other, one in wave.items():
        if other == number:
            return done + reached - one.start
        done += one.end - one.start
    return done

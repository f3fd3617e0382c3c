"""Writes the records of a savepoint to the topic of a new topology: each once, in its partition and in order.

Lane 0 of the new sink writes each file in one transaction, together with a checkpoint record that names the savepoint
and how many files are written. Killed anywhere, the record says where to go on; what was open is aborted. A topic that
has records before the first of these transactions is in other use. At the end the topic is read back and compared with
the savepoint: that also finds the new offsets, and refuses what somebody else has written in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import ConfigError, RollbackRefusedError, SinkError, SourceGapError
from firnline.history.savepoints.files import Progress
from firnline.history.topology.graph import Channel, Topology
from firnline.history.topology.topic_copy import TopicClient, states_of
from firnline.history.topology.topic_files import CONTENT, SCHEMA, SavedTopic, TopicFile, headers_of
from firnline.history.topology.topic_plan import PlaceMap, TopicMove, places_in
from firnline.sinks.follower import FollowerHead
from firnline.sinks.kafka.cluster import Cluster, Connection
from firnline.sinks.kafka.lane import TRIES, Lane, LostProducerError, Transaction
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.kafka.record import LaneRecord
from firnline.sources.kafka.channels import find_first_record
from firnline.sources.kafka.clients import LATEST
from firnline.sources.kafka.position import PartitionId, PartitionState, Position, Range
from firnline.storage import Storage
from firnline.types import Clock, Json

COPIED = "savepoint"  # in the head of a sink: the savepoint that its topic was filled from, and how far
SEND_RECORDS = 10_000  # that are handed to the client at once
_OVERHEAD = 100  # bytes of a batch around its only record
_OWN = "A new topology starts with topics of its own: name one that is empty, or delete what is there."


@dataclass(frozen=True, slots=True)
class TopicFill:
    """The topic of one channel, from the savepoint to where the new topology has it."""

    name: str  # in the savepoint: member/sink
    savepoint: str  # the id of the writer's savepoint
    saved: SavedTopic
    source: Storage = field(repr=False)  # the writer's folder in the savepoint
    sink: KafkaSinkOptions = field(repr=False)  # of the new topology
    channels: tuple[Channel, ...]  # of the new topology
    topology: Topology = field(repr=False)

    @property
    def writer(self) -> str:
        return self.channels[0].writer

    @property
    def readers(self) -> set[str]:
        return {channel.reader for channel in self.channels}

    @property
    def _client(self) -> TopicClient:
        return TopicClient.of(self.topology, self.channels[0])

    def _open(self) -> Cluster:
        return Cluster(Connection.of(self.sink, self.writer, self.sink.head_name))

    # -- checks ---------------------------------------------------------------------------------------

    def check(self, clock: Clock) -> None:
        """Check what can be checked before anything is written. Disturbs no producer.

        Raises:
            RollbackRefusedError: the topic, or the sink's checkpoint topic, is in other use or has another shape.
            ConfigError: the topic does not exist.
        """
        cluster = self._open()
        try:
            self._find_begun(cluster)
            count, wanted = cluster.count_partitions(self.sink.topic), len(self.saved.firsts)
            if not count and not self.sink.partitions:
                raise ConfigError(
                    f"{self.name}: topic {self.sink.topic!r} does not exist; brokers {self.sink.brokers}",
                    hint=f"kafka-topics.sh --create --topic {self.sink.topic} --partitions {wanted}; or set "
                    f"`partitions` on sink {self.sink.name!r}.",
                )
            if count and count != wanted:
                raise RollbackRefusedError(
                    f"{self.name}: topic {self.sink.topic!r} has {count} partitions, and the topic of the savepoint "
                    f"had {wanted}",
                    hint=f"Name a topic with {wanted} partitions: each record keeps its partition.",
                )
            if count:
                self._check_kept(cluster, clock)
        finally:
            cluster.close()

    def _check_kept(self, cluster: Cluster, clock: Clock) -> None:
        """Refuse a topic that deletes the records as soon as they are there: they keep their timestamps."""
        settings = cluster.settings("topic", self.sink.topic)
        if self.saved.oldest is None or settings.get("message.timestamp.type", "CreateTime") != "CreateTime":
            return
        policy = settings.get("cleanup.policy", "delete").split(",")
        age = int(clock.now().timestamp() * 1000) - self.saved.oldest
        limits = {
            "retention.ms": int(settings.get("retention.ms", -1)) if "delete" in policy else -1,
            "min.compaction.lag.ms": int(settings.get("min.compaction.lag.ms", 0)) if "compact" in policy else -1,
        }
        for setting, keeps in limits.items():
            if 0 <= keeps <= age:
                longer = "-1" if setting == "retention.ms" else str(age + 7 * 24 * 3600 * 1000)
                raise RollbackRefusedError(
                    f"{self.name}: topic {self.sink.topic!r} keeps every record for {keeps:,} ms ({setting}), and "
                    "those of the savepoint are older: the cluster would delete them before they are read",
                    hint=f"kafka-configs.sh --alter --topic {self.sink.topic} --add-config {setting}={longer}, until "
                    "the readers have caught up.",
                )

    def _find_begun(self, cluster: Cluster) -> LaneRecord | None:
        """Return the newest record of lane 0 that can be seen; None if the sink has none.

        Raises:
            RollbackRefusedError: it is not of this savepoint.
        """
        lanes = cluster.count_partitions(cluster.connection.checkpoint_topic)
        records = cluster.peek_heads(range(lanes)) if lanes else {}
        self._files_done(records.get(0))  # lane 0 is the first that a sink has
        return records.get(0)

    def _files_done(self, record: LaneRecord | None) -> int:
        """Return how many files of the savepoint the topic has, by the record of the lane."""
        if record is None:
            return 0
        copied = record.head.own.get(COPIED) or {}
        owner = (record.head.pipeline, record.head.sink, copied.get("id"))
        if owner != (self.writer, self.sink.head_name, self.savepoint):
            topic = self._open().connection.checkpoint_topic
            raise RollbackRefusedError(
                f"{self.name}: the checkpoint topic {topic!r} is of a sink that is in use (epoch {record.head.epoch}; "
                f"brokers {self.sink.brokers})",
                hint=f"Give sink {self.sink.name!r} of {self.writer!r} another name: on the cluster of the old "
                "topology, its own is taken.",
            )
        return int(copied.get("files", 0))

    # -- writing --------------------------------------------------------------------------------------

    def write(self, run: str, progress: Progress | None, stopping: Callable[[], bool]) -> None:
        """Write the records that the topic lacks.

        Raises:
            RollbackRefusedError: the topic has records of others.
            DamagedError: a file of the savepoint is not what was saved.
            SinkError: the cluster does not take them.
        """
        cluster = self._open()
        lane = Lane(cluster, 0)
        try:
            cluster.ensure_topic(self.sink.topic, len(self.saved.firsts))
            cluster.ensure_lanes(self.sink.lanes)
            lane.limit_batches(cluster.facts(self.sink.topic).max_bytes)
            self._write(lane, cluster, run, progress, stopping)
        finally:
            lane.close()
            cluster.close()

    def _write(
        self, lane: Lane, cluster: Cluster, run: str, progress: Progress | None, stopping: Callable[[], bool]
    ) -> None:
        files, tries = self.saved.files, 0
        total = sum(file.size_bytes for file in files)
        while True:
            try:
                if not lane.is_open:
                    self._find_begun(cluster)  # a producer of ours would end another run's
                    lane.open()
                done = self._files_done(lane.record)
                if lane.record is None:
                    self._check_empty()
                elif done >= len(files):
                    return
                if stopping():
                    raise KeyboardInterrupt
                table = self._load(cluster, files[done]) if done < len(files) else SCHEMA.empty_table()
                with lane.transaction() as transaction:
                    self._send(transaction, lane, table)
                    transaction.commit(self._record(lane.record, run, min(done + 1, len(files))))
                tries = 0
                if progress is not None:
                    progress(f"writing {self.sink.topic}", sum(file.size_bytes for file in files[: done + 1]), total)
            except LostProducerError as error:
                tries += 1
                if tries >= TRIES:
                    raise SinkError(error.cause.message, hint=error.cause.hint, sink=self.sink.name) from error

    def _record(self, before: LaneRecord | None, run: str, files: int) -> LaneRecord:
        head = before.head if before is not None else FollowerHead(self.writer, self.sink.head_name, 0, run)
        own: dict[str, Json] = {**head.own, COPIED: {"id": self.savepoint, "files": files}}
        return LaneRecord(1, replace(head, run=run, own=own))

    def _load(self, cluster: Cluster, file: TopicFile) -> pa.Table:
        table = file.read(self.source, self.name.partition("/")[2])
        self._check_sizes(table, cluster.facts(self.sink.topic).max_bytes)
        return table

    def _send(self, transaction: Transaction, lane: Lane, table: pa.Table) -> None:
        produce, topic = transaction.produce, self.sink.topic
        for batch in table.to_batches(max_chunksize=SEND_RECORDS):
            columns = (batch.column(name).to_pylist() for name in ("partition", "key", "value", "timestamp"))
            with lane.lost_unless_answered("the write of records"):
                for number, key, value, time, headers in zip(*columns, headers_of(batch), strict=True):
                    while True:
                        try:
                            # Partition, two callbacks, time stamp, headers.
                            produce(topic, value, key, number, None, None, time or 0, headers)
                            break
                        except BufferError:
                            transaction.wait_for_room()

    def _check_sizes(self, table: pa.Table, limit: int) -> None:
        """Refuse a record that the topic can never hold."""
        lengths = [pc.fill_null(pc.binary_length(table.column(name)), 0) for name in ("key", "value")]
        largest = pc.max(pc.add(*lengths)).as_py() or 0
        if largest + _OVERHEAD > limit:
            raise RollbackRefusedError(
                f"{self.name}: a record of the savepoint has {largest:,} bytes, and topic {self.sink.topic!r} takes "
                f"{limit:,}",
                hint=f"kafka-configs.sh --alter --topic {self.sink.topic} --add-config max.message.bytes="
                f"{largest + 1000}",
            )

    def _check_empty(self) -> None:
        """Refuse a topic that has a record."""
        client, topic = self._client, self.sink.topic
        numbers = sorted(self.saved.firsts)
        firsts, ends = client.offsets(topic, numbers), client.offsets(topic, numbers, LATEST)
        for number in numbers:
            first, end = firsts.get(number, 0), ends.get(number, 0)
            found = find_first_record(client.settings, PartitionId(topic, number), first, end, client.brokers)
            if found < end:
                raise self._foreign(number, found)

    def _foreign(self, number: int, offset: int) -> RollbackRefusedError:
        return RollbackRefusedError(
            f"{self.name}: {self.sink.topic}/{number} offset {offset} has a record that is not the savepoint's "
            f"(brokers {self.sink.brokers})",
            hint=_OWN,
        )

    # -- reading back ---------------------------------------------------------------------------------

    def find_states(self, positions: Mapping[str, Mapping[str, Json]]) -> dict[Channel, dict[int, PartitionState]]:
        """Return where each reader stands in the old topic."""
        saved, found = self.saved, {}
        for channel in self.channels:
            position = Position.from_json(positions[channel.reader][channel.source])
            found[channel] = states_of(self.topology, channel, position, saved.topic, saved.topic_id, saved.firsts)
        return found

    def read_back(self, states: Mapping[Channel, Mapping[int, PartitionState]], progress: Progress | None) -> TopicMove:
        """Compare the topic with the savepoint. Returns where the old offsets of positions are in it.

        Raises:
            RollbackRefusedError: it lacks a record, or has another one between them.
        """
        client, topic = self._client, self._client.describe(self.sink.topic)
        if topic is None:
            raise RollbackRefusedError(f"{self.name}: topic {self.sink.topic!r} is gone", hint="Run the command again.")
        cluster = self._open()
        try:
            begun = self._find_begun(cluster)
            goes_on = begun is not None and begun.head.epoch > 0  # the writer writes there already
            ends = {number: end for (_, number), end in cluster.find_ends([self.sink.topic]).items()}
        finally:
            cluster.close()
        places = {
            number: PlaceMap(places_in(of[number] for of in states.values())) for number in sorted(self.saved.firsts)
        }
        compared = {number: _Comparison(self._read_saved(number), places[number]) for number in places}
        firsts = client.offsets(self.sink.topic, topic.partitions)
        ranges = {number: Range(firsts[number], ends[number]) for number in places if ends[number] > firsts[number]}
        seen = 0
        try:
            for number, _, batch in client.read(topic, self.sink.topic, ranges):
                foreign = compared[number].add(batch)
                if foreign is not None and not (goes_on and compared[number].is_complete):
                    raise self._foreign(number, foreign)
                seen += batch.num_rows
                if progress is not None:
                    progress(f"checking {self.sink.topic}", *self._share(seen))
        except SourceGapError as error:
            raise RollbackRefusedError(f"{self.name}: {error.message}", hint=_OWN) from error
        for number, one in compared.items():
            if left := one.count_left():
                raise RollbackRefusedError(
                    f"{self.name}: {self.sink.topic}/{number} lacks {left} of the savepoint's records: the cluster has "
                    "deleted them",
                    hint="Raise the retention of the topic, delete it and the checkpoint topic of the sink "
                    f"({self._open().connection.checkpoint_topic}), and run the same command again.",
                )
        return TopicMove(self.sink.topic, topic.id, places)

    def _read_saved(self, number: int) -> Iterator[pa.Table]:
        folder = self.name.partition("/")[2]
        return (file.read(self.source, folder) for file in self.saved.of_partition(number))

    def _share(self, records: int) -> tuple[int, int]:
        """Return how many bytes of the savepoint's files so many records are, and the total."""
        total = sum(file.size_bytes for file in self.saved.files)
        return min(total, total * records // max(1, self.saved.records)), total


class _Comparison:
    """Compares the records of one partition with those of the savepoint, in order, as they come."""

    def __init__(self, saved: Iterator[pa.Table], places: PlaceMap) -> None:
        self._saved = saved
        self._rest = SCHEMA.empty_table()
        self._places = places
        self.is_complete = False  # all records of the savepoint have come

    def add(self, batch: pa.RecordBatch) -> int | None:
        """Add what the topic has. Returns the offset of the first record that is not the savepoint's; None: all are."""
        read = pa.Table.from_batches([batch])
        while read.num_rows:
            if not self._load():
                return int(read.column("offset")[0].as_py())
            count = min(read.num_rows, self._rest.num_rows)
            same = _count_same(read.slice(0, count), self._rest.slice(0, count))
            offsets = (table.column("offset").slice(0, same).to_numpy() for table in (self._rest, read))
            self._places.add(*offsets)
            if same < count:
                return int(read.column("offset")[same].as_py())
            read, self._rest = read.slice(count), self._rest.slice(count)
        return None

    def count_left(self) -> int:
        """Return how many records have not come."""
        return int(self._rest.num_rows) + sum(int(table.num_rows) for table in self._saved)

    def _load(self) -> bool:
        """Return whether the savepoint has another record."""
        while not self._rest.num_rows:
            following = next(self._saved, None)
            if following is None:
                self.is_complete = True
                return False
            self._rest = following
        return True


def _count_same(one: pa.Table, other: pa.Table) -> int:
    """Return how many of the first records of two tables are the same."""
    one, other = one.select(CONTENT), other.select(CONTENT)
    low, high = 0, int(one.num_rows)
    if one.equals(other):
        return high
    while high - low > 1:  # the first `low` are the same, the first `high` are not
        middle = (low + high) // 2
        low, high = (middle, high) if one.slice(0, middle).equals(other.slice(0, middle)) else (low, middle)
    return low

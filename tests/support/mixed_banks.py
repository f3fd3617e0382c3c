"""A bank on real pipelines whose channels are Kafka topics and a Delta table.

A plain consumer adds up the topics: committed records, without the void offsets that the checkpoint topics name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firnline.names import kafka_checkpoint_topic
from firnline.options import SchemaOptions, SinkOptions, SourceOptions
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from tests.support.banks import FIELDS, Cut, RealBank, Row, Transfers, sent_to
from tests.support.kafka import CALL_SECONDS, KafkaServer
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from confluent_kafka import Consumer, TopicPartition

TOPICS = {"a": (3, 1), "b": (2, 2), "c": (1, 1)}  # who writes one, its partitions and lanes
TABLES = {("a", "c")}  # channels that are tables: a writes to b through its topic, and to c through its table
READERS = {"a": ("b", "c"), "b": ("c",), "c": ("a",)}


@dataclass
class MixedBank(RealBank):
    """files -> a; a -> b -> c -> a through topics, a -> c through a table: a triangle, a fan-in and a cycle."""

    port: int = 0  # of the broker: handles that have been used cannot be passed to another process
    mark: str = ""  # of the names of its topics, since all tests share a broker
    _seen: dict[str, list[tuple[tuple[int, int], Row]]] = field(default_factory=dict, repr=False)  # by an audit

    @classmethod
    def make(cls, folder: Path, kafka: KafkaServer) -> MixedBank:
        """A new bank, with topics of its own."""
        mark = kafka.new_topic()
        for writer, (partitions, _) in TOPICS.items():
            kafka.create_topic(f"{mark}-{writer}", partitions)
        return cls(folder, "mixed", hops=5, port=kafka.port, mark=mark)

    @property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        return READERS

    @property
    def kafka(self) -> KafkaServer:
        return KafkaServer(self.folder, self.port)

    @property
    def sinks(self) -> list[str]:
        """The sinks that write topics."""
        return [self.topic(writer) for writer in TOPICS]

    def topic(self, writer: str) -> str:
        """The topic of a member, which is also the name of the sink that writes it."""
        return f"{self.mark}-{writer}"

    def channel_source(self, writer: str, reader: str) -> SourceOptions:
        if (writer, reader) in TABLES:
            return super().channel_source(writer, reader)
        return KafkaSourceOptions(
            writer, self.kafka.bootstrap, topics=(self.topic(writer),), group="", poll_interval_secs=0.05,
            schema=SchemaOptions(FIELDS),
        )  # fmt: skip

    def channel_sinks(self, writer: str) -> list[SinkOptions]:
        name, (_, lanes) = self.topic(writer), TOPICS[writer]
        return [KafkaSinkOptions(name, self.kafka.bootstrap, name, input="accounts", key=("id",), lanes=lanes)]

    def await_input(self, name: str) -> None:
        for writer, readers in READERS.items():
            if name in readers and (writer, name) not in TABLES:
                self.kafka.await_markers(self.topic(writer))

    # -- what the topics say ----------------------------------------------------------------------------

    def audit(self, cut: Cut | None = None) -> int:
        at = cut or self.find_now()
        self._seen = {writer: self._read(writer, at.snapshot) for writer in TOPICS}
        return super().audit(at)

    def channel_rows(self, writer: str, reader: str, table: list[Row], cut: Cut) -> list[Row]:
        if (writer, reader) in TABLES:
            return table
        rows = [row for _, row in self._seen[writer]]
        assert sent_to(reader, rows) == sent_to(reader, table), f"the table and the topic of {writer} differ"
        return rows

    def check_left(self, writer: str, reader: str, left: Transfers, cut: Cut) -> None:
        """From its position on, the reader finds what is left for it, and nothing else."""
        if (writer, reader) in TABLES:
            return
        topics: dict[str, Any] = cut.positions[reader][writer]["topics"]
        known = topics.get(self.topic(writer), {}).get("partitions", {})
        ahead = [
            row
            for (number, offset), row in self._seen[writer]
            if (place := known.get(str(number), {"next": 0}))["next"] <= offset
            and not any(start <= offset < end for start, end, _ in place.get("ahead", ()))
        ]
        assert sent_to(reader, ahead) == left, f"{reader} does not go on behind what it has read of {writer}"

    def _read(self, writer: str, snapshot: str) -> list[tuple[tuple[int, int], Row]]:
        """The rows in the topic of a member up to the cut of a snapshot, or now, without those that are void.

        Each with its partition and offset.
        """
        topic = self.topic(writer)
        ends, void = self._find_channel(writer, snapshot)
        await_stable(self.kafka, topic, ends)
        return [
            ((one.partition, one.offset), json.loads(one.value or b""))
            for one in self.kafka.read(topic)
            if (ends is None or one.offset < ends.get(one.partition, 0))
            and not any(start <= one.offset < end for start, end in void.get(one.partition, ()))
        ]

    def _find_channel(self, writer: str, snapshot: str) -> tuple[dict[int, int] | None, dict[int, list[list[int]]]]:
        """Where the marker epoch of a snapshot ends in each partition, None without one; and what is void.

        That is what the newest record of each lane says, on the checkpoint topic.
        """
        topic, checkpoints = self.topic(writer), kafka_checkpoint_topic(writer, self.topic(writer))
        await_stable(self.kafka, checkpoints)
        lanes = {one.partition: json.loads(one.value or b"").get("channel", {}) for one in self.kafka.read(checkpoints)}
        void: dict[int, list[list[int]]] = {}
        for channel in lanes.values():
            for number, ranges in channel.get("void", {}).get(topic, {}).items():
                void.setdefault(int(number), []).extend(ranges)
        if not snapshot:
            return None, void
        found: dict[int, int] = {}
        for lane in range(TOPICS[writer][1]):
            for number, end in lanes[lane]["cuts"][snapshot]["ends"].get(topic, {}).items():
                found[int(number)] = max(found.get(int(number), 0), end)
        return found, void


def await_stable(kafka: KafkaServer, topic: str, ends: Mapping[int, int] | None = None) -> None:
    """Wait until committed records can be read up to these ends, or up to those that stand now."""
    from confluent_kafka import TopicPartition

    everything, committed = (
        kafka.consumer(isolation_level=isolation) for isolation in ("read_uncommitted", "read_committed")
    )
    try:
        numbers = everything.list_topics(topic, timeout=CALL_SECONDS).topics[topic].partitions
        for number in numbers:
            place = TopicPartition(topic, number)
            newest = everything.get_watermark_offsets(place, timeout=CALL_SECONDS)[1]
            end = newest if ends is None else ends.get(number, 0)
            wait_until(partial(_is_stable, committed, place, end))
    finally:
        everything.close()
        committed.close()


def _is_stable(committed: Consumer, place: TopicPartition, end: int) -> bool:
    return committed.get_watermark_offsets(place, timeout=CALL_SECONDS)[1] >= end

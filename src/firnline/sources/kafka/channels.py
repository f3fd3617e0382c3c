"""Reads the checkpoint topics of the sinks that write what a source reads: where snapshots cut, and what is void.

The caller has asked for the last stable offsets before. A writer begins no epoch before the checkpoint records of the
one before can be seen: a cut that is not found here lies at or beyond these offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firnline.checkpoint.codec import parse, unseal
from firnline.clock import monotonic
from firnline.errors import SourceError
from firnline.kafka_client import as_source_error
from firnline.sources.kafka.clients import (
    CALL_SECONDS,
    LATEST,
    describe_topics,
    lend_consumer,
    list_offsets,
    open_admin,
)
from firnline.sources.kafka.position import PartitionId
from firnline.topology.topics import ChannelState, TopicChannel, combine_lanes

if TYPE_CHECKING:
    from confluent_kafka import Consumer

_FIRST_LOOK = 8  # offsets before the end: the newest record, and the ends of transactions around it


def read_channel(client: Mapping[str, str], channel: TopicChannel, brokers: str) -> ChannelState:
    """Return what the checkpoint topic of a channel says now. A sink that has written nothing says nothing.

    Raises:
        SourceError: the brokers do not answer, or the checkpoint topic that was there is gone.
        DamagedError: a record is invalid.
    """
    admin, name = open_admin(client), channel.checkpoint_topic
    topic = describe_topics(admin, [name], brokers).get(name)
    if channel.checkpoint_id and (topic is None or topic.id != channel.checkpoint_id):
        now = "no longer exists" if topic is None else "was deleted and created again"
        raise SourceError(
            f"the checkpoint topic {name!r} {now} (brokers {brokers}): which rows of {channel.topic!r} a restore "
            "undid, and where snapshots cut, is unknown",
            hint="Bring it back. Or, to read all rows that are there, also those that were undone, delete the folder "
            "`channels` in the home of this pipeline; the next snapshot of the topology writes it again.",
        )
    lanes = [PartitionId(name, number) for number in topic.partitions] if topic is not None else []
    left = {one: end for one, end in list_offsets(admin, lanes, LATEST, brokers).items() if end > 0}
    found: dict[int, ChannelState] = {}
    back = _FIRST_LOOK
    with lend_consumer(client) as consumer:
        while left:
            starts = {one: max(0, end - back) for one, end in left.items()}
            values = _read(consumer, starts, left, brokers)
            for one, value in values.items():
                what = f"checkpoint of lane {one.number} in {name}"
                body = unseal(parse(value, what), what)
                found[one.number] = (
                    ChannelState.from_json(body["channel"], what) if "channel" in body else ChannelState()
                )
            left = {one: end for one, end in left.items() if one not in values and starts[one] > 0}
            back *= 64
    return combine_lanes(found)


def find_first_record(client: Mapping[str, str], partition: PartitionId, start: int, end: int, brokers: str) -> int:
    """Return the offset of the first committed record from `start` on; `end` if there is none before it."""
    if start >= end:
        return end
    with lend_consumer(client) as consumer:
        return _first(consumer, partition, start, end, brokers)


def _first(consumer: Consumer, partition: PartitionId, start: int, end: int, brokers: str) -> int:
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    deadline = monotonic() + CALL_SECONDS
    consumer.assign([TopicPartition(partition.topic, partition.number, start)])
    while True:
        message = consumer.poll(1.0)
        if message is None:
            if monotonic() > deadline:
                raise SourceError(f"{partition} could not be read from offset {start} (brokers {brokers})")
            continue
        error = message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            raise as_source_error(f"cannot read {partition}", brokers, KafkaException(error))
        return min(end, message.offset() or 0) if error is None else end


def _read(
    consumer: Consumer, starts: Mapping[PartitionId, int], ends: Mapping[PartitionId, int], brokers: str
) -> dict[PartitionId, bytes]:
    """Read partitions up to their ends, and return the last value of each."""
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    found: dict[PartitionId, bytes] = {}
    waiting = set(starts)
    deadline = monotonic() + CALL_SECONDS
    consumer.assign([TopicPartition(one.topic, one.number, start) for one, start in starts.items()])
    while waiting:
        message = consumer.poll(1.0)
        if monotonic() > deadline:
            raise SourceError(f"{next(iter(waiting))} could not be read to its end (brokers {brokers})")
        if message is None:
            continue
        one, offset, error = (
            PartitionId(message.topic() or "", message.partition() or 0),
            message.offset(),
            message.error(),
        )
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            raise as_source_error(f"cannot read {one}", brokers, KafkaException(error))
        if error is not None:
            if offset is not None and offset >= ends[one]:
                waiting.discard(one)
            continue
        value = message.value()
        if offset is not None and offset < ends[one] and value is not None:
            found[one] = value
        deadline = monotonic() + CALL_SECONDS
    return found

"""Clients for the driver and for tasks. A consumer is kept and lent out again: a connection costs more than a fetch."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firnline.errors import ConfigError, SourceError
from firnline.kafka_client import CLIENT_OPTIONS, CONSUMER_OPTIONS, QUIET, as_source_error, load_library
from firnline.schema_registry import RegistryError
from firnline.sources.kafka.position import PartitionId

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

CALL_SECONDS = 15.0
EARLIEST, LATEST = -2, -1  # for `list_offsets`
CONSUMER_ONLY = CONSUMER_OPTIONS - CLIENT_OPTIONS

PREFETCH_KIB = 32 * 1024  # fetched ahead of what a task has read; what lies beyond its range is dropped
MOST_IDLE = 4  # consumers of one kind that wait to be used again
FETCH_WAIT_MS = 20  # how long a broker holds back an answer without records: at the end of a partition

_idle: dict[tuple[int, str], list[Consumer]] = {}  # by process, since threads of the library do not survive a fork
_lock = threading.Lock()


def consumer_settings(client: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a consumer that reads committed records, from given offsets alone."""
    return {
        **QUIET,
        "fetch.wait.max.ms": FETCH_WAIT_MS,
        "queued.max.messages.kbytes": PREFETCH_KIB,
        **client,
        "group.id": "firnline",  # the library asks for one; nothing is subscribed or committed under it
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",  # never anywhere else than asked
        "allow.auto.create.topics": False,
    }


@contextlib.contextmanager
def lend_consumer(client: Mapping[str, str]) -> Iterator[Consumer]:
    """Lend a consumer. It is closed instead of kept if the caller fails."""
    key = (os.getpid(), json.dumps(dict(client), sort_keys=True))
    with _lock:
        waiting = _idle.setdefault(key, [])
        consumer = waiting.pop() if waiting else None
    if consumer is None:
        consumer = load_library().Consumer(consumer_settings(client))
    try:
        yield consumer
        consumer.unassign()
    except BaseException:
        consumer.close()
        raise
    with _lock:
        if len(waiting) < MOST_IDLE:
            waiting.append(consumer)
            return
    consumer.close()


@contextlib.contextmanager
def registry_errors(source: str) -> Iterator[None]:
    """Turn the errors of a schema registry into those of a source."""
    try:
        yield
    except RegistryError as error:
        kind = ConfigError if error.is_final else SourceError
        raise kind(f"source {source!r}: {error}", hint=error.hint) from error


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the brokers describe it."""

    id: str
    partitions: tuple[int, ...]


_admins: dict[tuple[int, str], AdminClient] = {}  # serve many threads


def open_admin(client: Mapping[str, str]) -> AdminClient:
    """Return the client for questions about topics; one for the process."""
    load_library()
    from confluent_kafka.admin import AdminClient

    key = (os.getpid(), json.dumps(dict(client), sort_keys=True))
    with _lock:
        if key not in _admins:
            _admins[key] = AdminClient({**QUIET, **{k: v for k, v in client.items() if k not in CONSUMER_ONLY}})
        return _admins[key]


def describe_topics(admin: AdminClient, names: Sequence[str], brokers: str) -> dict[str, Topic]:
    """Return the topics of these names that exist.

    Raises:
        SourceError: the brokers do not answer.
        ConfigError: this user may not see a topic.
    """
    from confluent_kafka import KafkaError, KafkaException, TopicCollection

    found: dict[str, Topic] = {}
    for name, future in admin.describe_topics(TopicCollection(list(names)), request_timeout=CALL_SECONDS).items():
        try:
            topic = future.result()
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                continue
            raise as_source_error(f"cannot look at topic {name}", brokers, error) from error
        found[name] = Topic(str(topic.topic_id), tuple(sorted(one.id for one in topic.partitions)))
    return found


def list_offsets(
    admin: AdminClient, partitions: Iterable[PartitionId], at: int, brokers: str
) -> dict[PartitionId, int]:
    """Return an offset of each partition: the first (`EARLIEST`), the last stable one (`LATEST`), or the first at or
    after a time in milliseconds; -1: there is none.

    Partitions that do not exist any more are left out.

    Raises:
        SourceError: the brokers do not answer.
    """
    import confluent_kafka.admin
    from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition

    specs: Any = confluent_kafka.admin
    place = specs.OffsetSpec(at) if at < 0 else specs.OffsetSpec.for_timestamp(at)
    wanted = {TopicPartition(one.topic, one.number): place for one in partitions}
    if not wanted:
        return {}
    found: dict[PartitionId, int] = {}
    futures = admin.list_offsets(wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=CALL_SECONDS)
    for partition, future in futures.items():
        try:
            found[PartitionId(partition.topic, partition.partition)] = int(future.result().offset)
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC,
                                        KafkaError._UNKNOWN_PARTITION):  # fmt: skip
                continue
            raise as_source_error(f"cannot ask for the offsets of {partition.topic}", brokers, error) from error
    return found

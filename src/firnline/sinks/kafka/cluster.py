"""What the sink asks of a cluster: topics and their limits, and the records of its checkpoint topic."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from firnline.clock import SystemClock, monotonic
from firnline.errors import SinkError
from firnline.faults import fault_point
from firnline.kafka_client import QUIET, find_unreachable, is_final, security_settings
from firnline.names import kafka_checkpoint_topic
from firnline.options import template_columns
from firnline.schema_registry import RegistryError, SchemaRegistry, open_registry
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.kafka.record import LaneRecord
from firnline.topology.topics import Partition, may_write
from firnline.types import Json

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message
    from confluent_kafka.admin import AdminClient

CALL_SECONDS = 30.0  # for one answer of the cluster
SETTLE_SECONDS = 10.0  # for a transaction on the checkpoint topic to end, once its producer is fenced
READ_SECONDS = 1.5  # the same for somebody who only reads: a commit ends soon, and a killed run's only with the next
CHECKPOINT_BYTES = 16 * 1024 * 1024  # the largest checkpoint
CHECKPOINT_TOPIC = {
    "cleanup.policy": "compact",
    "max.message.bytes": str(CHECKPOINT_BYTES),
    "min.cleanable.dirty.ratio": "0.1",
    "segment.bytes": str(64 * 1024 * 1024),
}
LARGEST_MESSAGE = 64 * 1024 * 1024  # that a producer sends; a broker takes requests of 100 MiB by default
DEFAULT_LIMIT = 1_000_000  # of a message, if the cluster does not say
_FIRST_LOOK = 8  # offsets before the end: the newest head and the markers of transactions around it
LIBRARY_LOG = logging.getLogger("firnline.kafka")  # what the library logs is in its errors, too
LIBRARY_LOG.addHandler(logging.NullHandler())
LIBRARY_LOG.propagate = False


@dataclass(frozen=True, slots=True)
class Connection:
    """How the driver and the tasks of one sink reach their cluster. `settings` may hold secrets."""

    pipeline: str
    sink: str
    head_name: str  # of the sink, in the names of its checkpoint topic and of its producers
    brokers: str
    settings: Mapping[str, Any] = field(repr=False)  # of every client
    producer: Mapping[str, str]  # of producers
    partitions: int
    transaction_timeout_ms: int
    registry: Mapping[str, Any] | None = field(default=None, repr=False)  # of Avro values

    @classmethod
    def of(cls, options: KafkaSinkOptions, pipeline: str, head_name: str) -> Connection:
        """Return the connection of a sink, which the cluster knows as `head_name`."""
        producer = {key: value for key, value in options.client.items() if key.startswith(_PRODUCER_ONLY)}
        return cls(
            pipeline=pipeline,
            sink=options.name,
            head_name=head_name,
            brokers=options.brokers,
            settings={
                "bootstrap.servers": options.brokers,
                "socket.timeout.ms": 30_000,
                "socket.keepalive.enable": True,
                **QUIET,
                **{key: value for key, value in options.client.items() if key not in producer},
                **security_settings(options.tls, options.sasl),
            },
            producer=producer,
            partitions=options.partitions,
            transaction_timeout_ms=options.transaction_timeout_ms,
            registry=dict(options.registry) if options.registry is not None else None,
        )

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {**asdict(self), "settings": dict(self.settings), "producer": dict(self.producer)}

    @property
    def checkpoint_topic(self) -> str:
        return kafka_checkpoint_topic(self.pipeline, self.head_name)

    def error(self, what: str, error: BaseException) -> SinkError:
        """Return the error for a failed call of the library: `what` says what was tried."""
        inner: KafkaError | None = error.args[0] if error.args and hasattr(error.args[0], "name") else None
        words = f"{inner.str()} ({inner.name()})" if inner is not None else f"{type(error).__name__}: {error}"
        hint = "Check that the brokers can be reached; nothing was lost."
        if inner is not None and is_final(inner):
            hint = "Check sasl, tls and the rights of this user on the brokers; nothing was lost."
        message = f"sink {self.sink!r}: {what} failed: {words}; brokers {self.brokers}"
        return SinkError(message, hint=hint, sink=self.sink)


_PRODUCER_ONLY = ("batch.", "compression.", "linger.", "queue.buffering.")


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What limits the messages of a topic."""

    max_bytes: int
    needs_key: bool


class Cluster:
    """Read access to a cluster, and the creation of topics. Clients are opened on demand and kept."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._topics: dict[str, TopicFacts] = {}

    # -- clients --------------------------------------------------------------------------------------

    @cached_property
    def admin(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        return AdminClient(dict(self.connection.settings), logger=LIBRARY_LOG)

    @cached_property
    def registry(self) -> SchemaRegistry | None:
        settings = self.connection.registry
        return open_registry(settings) if settings is not None else None

    @cached_property
    def _reader(self) -> Consumer:
        """Reads what is committed."""
        return self._open_consumer("read_committed")

    @cached_property
    def _prober(self) -> Consumer:
        """Reads everything: an open transaction of somebody else hides nothing from it."""
        return self._open_consumer("read_uncommitted")

    def _open_consumer(self, isolation: str) -> Consumer:
        from confluent_kafka import Consumer

        return Consumer(
            {
                **self.connection.settings,
                "group.id": f"{self.connection.checkpoint_topic}.reader",
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,
                "fetch.message.max.bytes": CHECKPOINT_BYTES,
            },
            logger=LIBRARY_LOG,
        )

    def close(self) -> None:
        """Close the clients."""
        for name in ("_reader", "_prober"):
            if (consumer := self.__dict__.pop(name, None)) is not None:
                consumer.close()
        self.__dict__.pop("admin", None)

    def check_answers(self) -> None:
        """Raise SinkError soon if no broker answers, or the registry does not: for commands at a screen."""
        from confluent_kafka import KafkaException

        unreachable = find_unreachable(self.connection.settings)
        if unreachable is not None:
            raise self.connection.error("the connection to the brokers", KafkaException(unreachable))
        try:
            if self.registry is not None:
                self.registry.check()
        except RegistryError as error:
            sink = self.connection.sink
            raise SinkError(f"sink {sink!r}: {error}", hint=error.hint, sink=sink) from error

    # -- topics ---------------------------------------------------------------------------------------

    def count_partitions(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 if it does not exist.

        Never by `list_topics(topic)`: a broker that creates topics by itself would create it, with other settings.
        """
        found = self._describe(topic)
        return len(found.partitions) if found is not None else 0

    def find_topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the ids of those topics that exist. One that is deleted and created again has another id."""
        found = {topic: self._describe(topic) for topic in topics}
        return {topic: str(one.topic_id) for topic, one in found.items() if one is not None}

    def _describe(self, topic: str) -> Any:
        """Return what the brokers say of a topic; None if it does not exist."""
        from confluent_kafka import KafkaException, TopicCollection

        try:
            asked = self.admin.describe_topics(TopicCollection([topic]), request_timeout=CALL_SECONDS)
            return asked[topic].result(CALL_SECONDS)
        except KafkaException as error:
            if error.args[0].name() == "UNKNOWN_TOPIC_OR_PART":
                return None
            raise self.connection.error(f"the look-up of topic {topic!r}", error) from error

    def list_topics(self) -> list[str]:
        """Return the names of all topics that this user may see."""
        from confluent_kafka import KafkaException

        try:
            return sorted(self.admin.list_topics(timeout=CALL_SECONDS).topics)
        except KafkaException as error:
            raise self.connection.error("the list of topics", error) from error

    def longest_transaction_ms(self) -> int | None:
        """Return how long the cluster lets a transaction be open; None if it does not say."""
        from confluent_kafka import KafkaException

        try:
            brokers = self.admin.list_topics(timeout=CALL_SECONDS).brokers
        except KafkaException as error:
            raise self.connection.error("the look-up of brokers", error) from error
        longest = self.settings("broker", str(min(brokers))).get("transaction.max.timeout.ms") if brokers else None
        return int(longest) if longest is not None else None

    def facts(self, topic: str) -> TopicFacts:
        """Return what limits the messages of a topic; creates it, if the spec says so.

        Raises:
            SinkError: it does not exist.
        """
        known = self._topics.get(topic)
        if known is None:
            if not self.count_partitions(topic):
                self._create_data_topic(topic)
            settings = self.settings("topic", topic)
            policy = settings.get("cleanup.policy", "delete").split(",")
            most = min(int(settings.get("max.message.bytes", DEFAULT_LIMIT)), LARGEST_MESSAGE)
            known = TopicFacts(most, "compact" in policy)
            self._topics[topic] = known
        return known

    def forget_topics(self) -> None:
        """Ask again for what limits messages: a limit may have changed."""
        self._topics.clear()

    def settings(self, kind: str, name: str) -> dict[str, str]:
        """Return the settings of a topic or broker; empty if this user may not read them."""
        from confluent_kafka import KafkaException

        resource = _library().ConfigResource(_library().ResourceType[kind.upper()], name)
        try:
            found = next(iter(self.admin.describe_configs([resource]).values())).result(CALL_SECONDS)
        except KafkaException as error:
            if "AUTHORIZATION" in error.args[0].name():
                return {}
            raise self.connection.error(f"the look-up of the settings of {kind} {name!r}", error) from error
        return {entry.name: str(entry.value) for entry in found.values()}

    def rights(self, topic: str) -> set[str] | None:
        """Return what this user may do with a topic; None if the cluster does not say."""
        from confluent_kafka import KafkaException, TopicCollection

        try:
            asked = self.admin.describe_topics(
                TopicCollection([topic]), include_authorized_operations=True, request_timeout=CALL_SECONDS
            )
            operations = asked[topic].result(CALL_SECONDS).authorized_operations
        except KafkaException as error:
            raise self.connection.error(f"the look-up of topic {topic!r}", error) from error
        return {operation.name for operation in operations} if operations else None

    def _create_data_topic(self, topic: str) -> None:
        self._check_creates(topic)
        self._create(topic, self.connection.partitions, {})

    def _check_creates(self, topic: str) -> None:
        sink = self.connection.sink
        if not self.connection.partitions:
            raise SinkError(
                f"sink {sink!r}: topic {topic!r} does not exist; brokers {self.connection.brokers}",
                hint=f"Create the topic, or set `partitions` on sink {sink!r}; nothing was lost.",
                sink=sink,
            )

    def ensure_topic(self, topic: str, partitions: int) -> None:
        """Create a topic that does not exist, if the spec lets the sink create topics.

        Raises:
            SinkError: it does not exist.
        """
        if not self.count_partitions(topic):
            self._check_creates(topic)
            self._create(topic, partitions, {})

    def ensure_lanes(self, lanes: int) -> int:
        """Create the checkpoint topic, or add partitions to it, so that each lane has one. Returns how many it has.

        Raises:
            SinkError: it cannot be created, or it would forget checkpoints.
        """
        topic = self.connection.checkpoint_topic
        found = self.count_partitions(topic)
        if not found:
            self._create(topic, lanes, CHECKPOINT_TOPIC)
        elif found < lanes:
            self._add_partitions(topic, lanes)
        self.check_checkpoint_topic()
        self._await(lambda: self.count_partitions(topic) >= lanes, f"topic {topic!r} is not ready")
        return self.count_partitions(topic)

    def check_checkpoint_topic(self) -> None:
        """Raise SinkError if the checkpoint topic may forget the newest checkpoint."""
        topic = self.connection.checkpoint_topic
        policy = self.settings("topic", topic).get("cleanup.policy", "compact")
        if policy != "compact":
            raise SinkError(
                f"sink {self.connection.sink!r}: the checkpoint topic {topic!r} has cleanup.policy={policy}, so the "
                "cluster may delete the checkpoint",
                hint=f"kafka-configs.sh --alter --topic {topic} --add-config cleanup.policy=compact",
                sink=self.connection.sink,
            )

    def _create(self, topic: str, partitions: int, config: Mapping[str, str]) -> None:
        from confluent_kafka import KafkaException

        new = _library().NewTopic(topic, num_partitions=partitions, config=dict(config))
        fault_point("kafka.create.before")
        try:
            self.admin.create_topics([new])[topic].result(CALL_SECONDS)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":  # somebody else was faster
                raise self.connection.error(f"the creation of topic {topic!r}", error) from error
        fault_point("kafka.create.after")
        self._await(lambda: self.count_partitions(topic) > 0, f"topic {topic!r} is not ready")

    def _add_partitions(self, topic: str, partitions: int) -> None:
        from confluent_kafka import KafkaException

        new = _library().NewPartitions(topic, partitions)
        fault_point("kafka.create.before")
        try:
            self.admin.create_partitions([new])[topic].result(CALL_SECONDS)
        except KafkaException as error:
            if self.count_partitions(topic) < partitions:
                raise self.connection.error(f"the addition of partitions to topic {topic!r}", error) from error
        fault_point("kafka.create.after")

    def _await(self, is_so: Any, otherwise: str) -> None:
        deadline = monotonic() + CALL_SECONDS
        while not is_so():
            if monotonic() > deadline:
                raise SinkError(f"sink {self.connection.sink!r}: {otherwise}", sink=self.connection.sink)
            SystemClock().sleep(0.02)

    # -- heads ----------------------------------------------------------------------------------------

    def read_heads(self, lanes: Iterable[int], seconds: float = SETTLE_SECONDS) -> dict[int, LaneRecord | None]:
        """Read the newest record of each of these lanes; None for a lane without one.

        A commit is answered before its end is written to every partition, and a killed producer leaves its transaction
        open: until then the newest record is unknown, and this waits.

        Raises:
            SinkError: a transaction is still open after `seconds`, or the cluster does not answer.
        """
        partitions = {partition_of(lane): lane for lane in lanes}
        deadline = monotonic() + seconds
        while True:
            stable = self._ends(partitions, committed=True)
            newest = self._ends(partitions, committed=False)
            if is_settled(stable, newest):
                break
            if monotonic() > deadline:
                raise SinkError(
                    f"sink {self.connection.sink!r}: a transaction on {self.connection.checkpoint_topic!r} is open, so "
                    "the head is unknown now",
                    hint="Run again: a run ends what an earlier one left open; else the broker does, after its "
                    "transaction timeout. Nothing was lost.",
                    sink=self.connection.sink,
                )
            SystemClock().sleep(0.005)
        return {**dict.fromkeys(partitions.values()), **self._read_tails(stable, partitions)}

    def peek_heads(self, lanes: Iterable[int]) -> dict[int, LaneRecord | None]:
        """Read the newest record of each lane that can be seen now; an open transaction may bring another one."""
        partitions = {partition_of(lane): lane for lane in lanes}
        return {
            **dict.fromkeys(partitions.values()),
            **self._read_tails(self._ends(partitions, committed=True), partitions),
        }

    def find_ends(self, topics: Iterable[str]) -> dict[Partition, int]:
        """Return the end of every partition of some topics: of all that was written, transactions that are open
        included."""
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition

        asked = {
            TopicPartition(topic, number): _library().OffsetSpec.latest()
            for topic in topics
            for number in range(self.count_partitions(topic))
        }
        if not asked:
            return {}
        level = IsolationLevel.READ_UNCOMMITTED
        try:
            answers = self.admin.list_offsets(asked, isolation_level=level, request_timeout=CALL_SECONDS)
            return {(at.topic, at.partition): future.result(CALL_SECONDS).offset for at, future in answers.items()}
        except KafkaException as error:
            raise self.connection.error("the look-up of the topics' ends", error) from error

    def find_epoch_ends(self, topics: Iterable[str], epoch: int) -> dict[Partition, int]:
        """Return, for each partition, the first offset of a later epoch than this; the end, if it has none.

        The numbers of epochs only grow along a partition, so a few records tell. Those of others are passed over.
        Transactions count that are open or aborted, too: an epoch begins to be written when every row of the one before
        is there.
        """
        found = {}
        for (topic, number), end in self.find_ends(topics).items():
            low, high, answer = 0, end, end
            while low < high:
                middle = (low + high) // 2
                probed = self._find_epoch(topic, number, middle, high)
                if probed is not None and probed[1] <= epoch:
                    low = probed[0] + 1
                else:
                    high, answer = middle, probed[0] if probed is not None else answer
            found[topic, number] = answer
        return found

    def _find_epoch(self, topic: str, number: int, start: int, end: int) -> tuple[int, int] | None:
        """Return the offset and the epoch of the first own record at or after an offset; None if there is none before
        `end`."""
        from confluent_kafka import KafkaError, KafkaException, TopicPartition

        deadline = monotonic() + CALL_SECONDS
        try:
            self._prober.assign([TopicPartition(topic, number, start)])
            while True:
                message = self._prober.poll(1.0)
                if monotonic() > deadline:
                    raise SinkError(f"sink {self.connection.sink!r}: {topic!r} could not be read")
                if message is None:
                    continue
                offset, error = message.offset() or 0, message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if error is not None or offset >= end:
                    return None
                epoch = self._epoch_of(message)
                if epoch is not None:
                    return offset, epoch
                deadline = monotonic() + CALL_SECONDS
        except KafkaException as error:
            raise self.connection.error(f"the read of topic {topic!r}", error) from error
        finally:
            self._prober.unassign()

    def _epoch_of(self, message: Message) -> int | None:
        """Return the epoch of a record of this pipeline, or of its control record; None if it is another's."""
        headers = dict(message.headers() or ())
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if "firnline-control" in headers:
                control = json.loads(message.value() or b"{}")
                return int(control["epoch"]) if control["pipeline"] == self.connection.pipeline else None
            if headers["firnline-pipeline"] == self.connection.pipeline.encode():
                return int(headers["firnline-epoch"] or b"")
        return None

    def find_topics(self, topic: str, allowed: str) -> list[str]:
        """Return the topics of a sink: of a template, those that exist and that it could name."""
        if not template_columns(topic):
            return [topic]
        return [name for name in self.list_topics() if may_write(topic, allowed, name)]

    def _ends(self, partitions: Collection[int], *, committed: bool) -> dict[int, int]:
        """Return the end of each partition: of what is decided, or of all that was written."""
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition

        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = {
            TopicPartition(self.connection.checkpoint_topic, number): _library().OffsetSpec.latest()
            for number in partitions
        }
        try:
            answers = self.admin.list_offsets(asked, isolation_level=level, request_timeout=CALL_SECONDS)
            return {place.partition: future.result(CALL_SECONDS).offset for place, future in answers.items()}
        except KafkaException as error:
            raise self.connection.error("the look-up of the checkpoint topic's end", error) from error

    def _read_tails(self, ends: Mapping[int, int], lanes: Mapping[int, int]) -> dict[int, LaneRecord]:
        """Return the newest committed record of each partition, proven by having read up to these ends."""
        found: dict[int, LaneRecord] = {}
        back = _FIRST_LOOK
        left = {number for number, end in ends.items() if end > 0}
        while left:
            starts = {number: max(0, ends[number] - back) for number in left}
            for number, value in self._read_from(starts, ends).items():
                found[lanes[number]] = LaneRecord.parse(value, f"checkpoint of lane {lanes[number]}")
            left = {number for number in left if lanes[number] not in found and starts[number] > 0}
            back *= 64
        return found

    def _read_from(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, bytes]:
        """Read partitions up to their ends, and return the last value of each."""
        from confluent_kafka import KafkaError, KafkaException, TopicPartition

        topic, waiting = self.connection.checkpoint_topic, set(starts)
        found: dict[int, bytes] = {}
        deadline = monotonic() + CALL_SECONDS
        try:
            self._reader.assign([TopicPartition(topic, number, start) for number, start in starts.items()])
            while waiting:
                message = self._reader.poll(1.0)
                if monotonic() > deadline:
                    raise SinkError(f"sink {self.connection.sink!r}: {topic!r} could not be read to its end")
                if message is None:
                    continue
                number, offset, error = message.partition() or 0, message.offset() or 0, message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if error is not None:
                    if offset >= ends[number]:
                        waiting.discard(number)
                    continue
                value = message.value()
                if offset < ends[number] and value is not None:
                    found[number] = value
                deadline = monotonic() + CALL_SECONDS
        except KafkaException as error:
            raise self.connection.error(f"the read of topic {topic!r}", error) from error
        finally:
            self._reader.unassign()
        return found


def _library() -> Any:
    """Return the library's part for administration, which does not declare all that it has."""
    import confluent_kafka.admin

    return confluent_kafka.admin


def partition_of(lane: int) -> int:
    """Return the partition of the checkpoint topic that a lane has for itself.

    Another producer's open transaction on the same partition would hide the newest record of this one.
    """
    return lane


def is_settled(stable: Mapping[int, int], newest: Mapping[int, int]) -> bool:
    """Whether every transaction is decided: `stable` was read first, so nothing was open at that moment."""
    return all(stable[number] >= newest[number] for number in newest)

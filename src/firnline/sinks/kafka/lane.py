"""One lane of a Kafka sink: a transactional producer, and the record that its partition of the checkpoint topic holds.

The transactional id of a lane fences: once a lane is opened, every older producer of it can commit nothing more, and
what it left open is aborted. So the record that is read after that is the newest one, and stays so until this producer
commits, or another one is opened. Whether another *run* owns the sink says only the generation in the record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firnline.clock import monotonic
from firnline.errors import CommitUnknownError, ConfigError, FencedError, SinkError, SinkWentBackError
from firnline.faults import fault_point
from firnline.names import kafka_transactional_id
from firnline.sinks.follower import FollowerHead
from firnline.sinks.kafka.cluster import CALL_SECONDS, LARGEST_MESSAGE, LIBRARY_LOG, Cluster, partition_of
from firnline.sinks.kafka.record import KEY, LaneRecord

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from firnline.sinks.kafka.encode import MessageEncoder

TRIES = 4  # to open a lane, or to write to it, before the sink counts as failed
LARGEST_BATCH = 1_000_000  # bytes


class LostProducerError(Exception):
    """A producer failed or was fenced: whether its transaction is committed is unknown. Never leaves the sink."""

    def __init__(self, cause: SinkError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class LowerLimitError(LostProducerError):
    """A topic takes only smaller batches than the producer sends: a producer with smaller ones is needed."""


class Lane:
    """A lane. It is open while `producer` is there; `record` is then what its partition holds."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        self._connection = cluster.connection
        self._batch_bytes = LARGEST_BATCH
        self.number = number
        self.producer: Producer | None = None
        self.record: LaneRecord | None = None
        self.encoder: MessageEncoder | None = None  # of the newest epoch: the next one has its settings, mostly

    @property
    def is_open(self) -> bool:
        return self.producer is not None

    def limit_batches(self, limit: int) -> None:
        """Send no batch with more bytes than this, the limit of a topic.

        Raises:
            LowerLimitError: the open producer would; the lane is closed.
        """
        if limit < self._batch_bytes:
            self._batch_bytes = limit
            if self.is_open:
                self.close()
                raise LowerLimitError(SinkError(f"a topic takes only batches of {limit} bytes"))

    def close(self) -> None:
        """Let the producer go. What it left open is aborted by the next one, or by the broker."""
        producer, self.producer, self.record = self.producer, None, None
        if producer is not None:
            with contextlib.suppress(Exception):
                producer.purge()

    def open(self) -> None:
        """Fence every older producer of this lane, and read the record.

        Raises:
            SinkError: the cluster does not answer, or the record stays unknown.
        """
        self.close()
        for left in reversed(range(TRIES)):
            producer = self._init_producer()
            try:
                self.record = self._cluster.read_heads([self.number])[self.number]
                self.producer = producer
                return
            except SinkError:  # not settled: whoever holds it up may have begun before this producer
                if not left:
                    raise

    def open_as(self, generation: int) -> None:
        """Open the lane for a run that has claimed it; does nothing if it is open.

        Raises:
            FencedError: the record has a newer generation.
            SinkWentBackError: it has an older one, or there is none: somebody emptied the topic, or restored it.
        """
        if not self.is_open:
            self._check_unclaimed_since(generation)
            self.open()
            try:
                check_generation(self.record, generation, self._connection.sink)
            except BaseException:
                self.close()
                raise

    def _check_unclaimed_since(self, generation: int) -> None:
        """Raise FencedError if a newer run owns the lane, without disturbing its producer."""
        try:
            record = self._cluster.read_heads([self.number], seconds=0)[self.number]
        except SinkError:
            return  # unknown now: a producer of our own finds out
        if record is not None:
            check_generation(record, generation, self._connection.sink)

    def _init_producer(self) -> Producer:
        from confluent_kafka import KafkaException, Producer

        connection = self._connection
        settings: dict[str, Any] = {
            **connection.settings,
            "linger.ms": 5,
            "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": 256 * 1024,
            **connection.producer,
            "transactional.id": kafka_transactional_id(connection.pipeline, connection.head_name, self.number),
            "transaction.timeout.ms": connection.transaction_timeout_ms,
            "acks": "all",
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "message.max.bytes": LARGEST_MESSAGE,
            "delivery.report.only.error": True,
        }
        settings["batch.size"] = min(int(settings.get("batch.size", LARGEST_BATCH)), self._batch_bytes)
        try:
            producer = Producer(settings, logger=LIBRARY_LOG)
            # A connected client finds the coordinator at once, another one only after a pause.
            producer.list_topics(connection.checkpoint_topic, timeout=CALL_SECONDS)
            producer.init_transactions(CALL_SECONDS)
        except KafkaException as error:
            if error.args[0].name() == "INVALID_TRANSACTION_TIMEOUT":
                raise ConfigError(
                    f"sink {connection.sink!r}: transaction_timeout is longer than the broker's "
                    "transaction.max.timeout.ms",
                    hint="Lower transaction_timeout, or raise the setting of the broker.",
                ) from error
            raise connection.error(f"the start of producer {settings['transactional.id']!r}", error) from error
        return producer

    # -- transactions ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Begin a transaction. The body fills it and calls `Transaction.commit`; else it is given up.

        Raises:
            LostProducerError: a call failed; the lane is closed.
        """
        assert self.producer is not None
        try:
            with self.lost_unless_answered("the begin of a transaction"):
                self.producer.begin_transaction()
            transaction = Transaction(self, self.producer)
            yield transaction
            if not transaction.is_committed:
                self.close()
        except BaseException:
            self.close()
            raise

    def write_record(self, record: LaneRecord) -> None:
        """Write a record in a transaction of its own.

        Raises:
            CommitUnknownError: the answer was lost.
        """
        try:
            with self.transaction() as transaction:
                transaction.commit(record)
        except LostProducerError as error:
            raise CommitUnknownError(error.cause.message, sink=self._connection.sink) from error

    @contextlib.contextmanager
    def lost_unless_answered(self, what: str) -> Iterator[None]:
        from confluent_kafka import KafkaException

        try:
            yield
        except KafkaException as error:
            raise LostProducerError(self._connection.error(what, error)) from error


class Transaction:
    """An open transaction of one lane."""

    def __init__(self, lane: Lane, producer: Producer) -> None:
        self._lane = lane
        self._producer = producer
        self._deadline = monotonic() + lane._connection.transaction_timeout_ms / 1000
        self.is_committed = False

    def wait_for_room(self) -> None:
        """Wait until the client has sent some of what it was given.

        Raises:
            LostProducerError: the cluster takes nothing any more.
        """
        with self._lane.lost_unless_answered("the write of rows"):
            self._producer.poll(0.05)
        if monotonic() > self._deadline:
            connection = self._lane._connection
            raise LostProducerError(
                SinkError(
                    f"sink {connection.sink!r}: the rows of a transaction could not be sent within "
                    f"{connection.transaction_timeout_ms / 1000:g} s; brokers {connection.brokers}",
                    hint="Check that the brokers can be reached; lower max_transaction_bytes, or raise "
                    "transaction_timeout.",
                    sink=connection.sink,
                )
            )

    @property
    def produce(self) -> Callable[..., None]:
        """The client's own call for one message; it raises BufferError when there is no room."""
        return self._producer.produce

    def put_record(self, record: LaneRecord, lane: int | None = None) -> None:
        """Add the record of a lane: of this one, if none is given."""
        topic = self._lane._connection.checkpoint_topic
        partition = partition_of(self._lane.number if lane is None else lane)
        with self._lane.lost_unless_answered("the write of a checkpoint"):
            while True:
                try:
                    self._producer.produce(topic, record.to_bytes(), KEY, partition=partition)
                    return
                except BufferError:
                    self.wait_for_room()

    def flush(self) -> None:
        """Wait until the topics have all rows of the transaction.

        Raises:
            LostProducerError: they do not take them.
        """
        with self._lane.lost_unless_answered("the write of rows"):
            while self._producer.flush(1.0):
                self.wait_for_room()

    def commit(self, record: LaneRecord) -> None:
        """Add the record of this lane, and commit: from here on the lane holds it."""
        self.put_record(record)
        with self._lane.lost_unless_answered("the write of rows"):
            self._producer.flush(max(0.0, self._deadline - monotonic()))  # the commit waits for it, too
        fault_point("kafka.commit.before")
        with self._lane.lost_unless_answered("a commit"):
            self._producer.commit_transaction(max(CALL_SECONDS, self._deadline - monotonic()))
        self.is_committed = True
        self._lane.record = record
        fault_point("kafka.commit.after")


def check_generation(record: LaneRecord | None, generation: int, sink: str) -> None:
    """Check that the record is of this generation.

    Raises:
        FencedError: it has a newer one: another run owns the sink. Nothing else ends a run.
        SinkWentBackError: it has an older one, or there is none.
    """
    held = record.head.generation if record is not None else 0
    if held > generation:
        raise FencedError(f"generation {held} took sink {sink!r} over", generation=held)
    if held < generation:
        now = f"holds generation {held} now, not {generation}" if record is not None else "is empty now"
        raise SinkWentBackError(f"sink {sink!r} lost what this run wrote: it {now}", sink=sink)


def claimed(record: LaneRecord | None, empty: FollowerHead) -> LaneRecord:
    """Return the record of a lane once the run of `empty` has claimed it."""
    if record is None:
        return LaneRecord(1, empty)
    return replace(record, head=replace(record.head, generation=empty.generation, run=empty.run))


def check_owner(records: Collection[LaneRecord | None], pipeline: str, sink: str) -> None:
    """Raise SinkError if the records are of another pipeline or sink."""
    for record in records:
        if record is not None and (record.head.pipeline, record.head.sink) != (pipeline, sink):
            head = record.head
            raise SinkError(
                f"the checkpoint topic of sink {sink!r} belongs to sink {head.sink!r} of pipeline {head.pipeline!r}",
                hint="Delete the topic if nobody needs it, or name the pipeline or the sink otherwise.",
                sink=sink,
            )

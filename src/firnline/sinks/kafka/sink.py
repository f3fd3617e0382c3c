"""A Kafka sink: rows go to topics, and checkpoints to a topic of its own, in the same transactions.

Every lane has a partition of the checkpoint topic and a transactional id. Lane 0 is the main one: history edits write
there, and it brings other lanes to the newest epoch when their number changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar

from firnline.checkpoint.codec import canonical
from firnline.errors import (
    CommitConflictError,
    CommitUnknownError,
    ConfigError,
    FencedError,
    SinkError,
    SinkWentBackError,
)
from firnline.faults import fault_point
from firnline.options import template_columns
from firnline.sinks.base import Capabilities, Decided, EpochCommit, Head, SinkContext
from firnline.sinks.follower import EpochDelivery, Follower, FollowerHead, head_after
from firnline.sinks.kafka.cluster import READ_SECONDS, Cluster, Connection
from firnline.sinks.kafka.delivery import (
    BadRowsError,
    LaneEpoch,
    check_reports,
    lane_task,
    run_lane,
    write_lane,
)
from firnline.sinks.kafka.lane import TRIES, Lane, LostProducerError, check_owner, claimed
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.kafka.record import LaneRecord, combine
from firnline.topology.topics import ChannelState, Partition, combine_lanes, find_ends, has_marker
from firnline.types import Delivery, EntryRef, Json

CONTROL_KEY = b"firnline-control"
NAMED = 3  # examples in a message


class KafkaSink(Follower):
    """Topics of one cluster. See the module's docstring."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.EXACTLY_ONCE, fed_from_outbox=True, has_columns=False)

    def __init__(self, options: KafkaSinkOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        self.capabilities = replace(  # type: ignore[misc]  # they depend on the settings
            type(self).capabilities,
            delivery=Delivery.EXACTLY_ONCE_PER_PART if options.lanes > 1 else Delivery.EXACTLY_ONCE,
            upserts=options.write == "upsert",
        )
        self._kafka = options
        self._connection = Connection.of(options, context.pipeline, self.head_name)
        self._cluster = Cluster(self._connection)
        self._main = Lane(self._cluster, 0)
        # What the lanes held when this run last wrote; kept while no other process can have written since.
        self._known: dict[int, LaneRecord | None] | None = None

    def shape(self) -> dict[str, Json]:
        shape = super().shape()
        own = {**shape["own"], "key": list(self._find_key())}
        if self._kafka.envelope == "debezium":
            source, _, table = self.context.input_port.partition(".")
            own |= {"envelope": "debezium", "source": source, "table": table}
        return {**shape, "own": own}

    def _find_key(self) -> tuple[str, ...]:
        if self._kafka.write == "upsert":
            return self.context.key_of(self._kafka)
        if self._kafka.key or self._kafka.envelope == "plain" or self.context.find_input_key is None:
            return self._kafka.key
        try:
            return self.context.find_input_key()
        except ConfigError:
            return ()  # the table has none: messages without a key

    # -- the head -------------------------------------------------------------------------------------

    def read_head(self) -> FollowerHead | None:
        return self._combine(self._read_records())

    def _read_records(self) -> dict[int, LaneRecord | None]:
        lanes = self._cluster.count_partitions(self._connection.checkpoint_topic)
        return self._cluster.read_heads(range(lanes), READ_SECONDS) if lanes else {}

    def _combine(self, records: dict[int, LaneRecord | None]) -> FollowerHead | None:
        check_owner(records.values(), self.context.pipeline, self.head_name)
        return combine(records, f"sink {self.name!r}")

    def end_unfinished(self) -> None:
        lanes = self._cluster.count_partitions(self._connection.checkpoint_topic)
        if lanes and not self._peek_records(lanes):
            self._known = None
            self._main.close()
            for number in range(lanes):
                lane = Lane(self._cluster, number)
                lane.open()  # its producer aborts what older ones left open
                lane.close()

    def _require_claim(self) -> FollowerHead:
        if self._known is None or not self._main.is_open:
            self._known = None
            return super()._require_claim()
        # The producer of lane 0 has been the only one since: had another run claimed the sink, it could commit nothing.
        head = self._combine({**self._known, 0: self._main.record})
        assert head is not None
        return head

    def claim(
        self,
        run: str,
        generation: int | None = None,
        baseline: EntryRef | None = None,
        onto: int | None = None,
        *,
        again: bool = False,
        decided: Decided | None = None,
    ) -> Head:
        if generation is None:
            raise ConfigError(f"sink {self.name!r} cannot decide", hint="List a Delta table before it.")
        self._known = None
        if self._kafka.value == "avro":
            from firnline.avro.decode import warm_up

            warm_up()  # once per installation: the tasks of lanes find the compiled code
        self._check_not_newer(generation)
        self._check_timeout()
        self._cluster.ensure_lanes(self._kafka.lanes)
        empty = FollowerHead(self.context.pipeline, self.head_name, generation, run)
        records = {0: self._claim_lane(self._main, empty)}
        # Only now: whoever adds a lane needs lane 0, which nobody else has any more.
        lanes = self._cluster.count_partitions(self._connection.checkpoint_topic)
        for number in range(1, lanes):
            lane = Lane(self._cluster, number)
            records[number] = self._claim_lane(lane, empty)
            lane.close()
        self._generation = generation
        self._known = dict(records)
        return self.load()

    def _check_not_newer(self, generation: int) -> None:
        """Raise FencedError if a newer run owns the sink, without disturbing its producers."""
        lanes = self._cluster.count_partitions(self._connection.checkpoint_topic)
        for record in self._peek_records(lanes):
            self._refuse_newer(record, generation)

    def _peek_records(self, lanes: int) -> list[LaneRecord | None]:
        """Return what the lanes hold, as far as it is known now."""
        try:
            return list(self._cluster.read_heads(range(lanes), seconds=0).values()) if lanes else []
        except SinkError:  # a transaction is open, or the cluster does not answer: the claim finds out
            return []

    def _refuse_newer(self, record: LaneRecord | None, generation: int) -> None:
        if record is not None and record.head.generation > generation:
            newer = record.head.generation
            raise FencedError(f"generation {newer} took sink {self.name!r} over", generation=newer)

    def _claim_lane(self, lane: Lane, empty: FollowerHead) -> LaneRecord:
        """Fence older producers of a lane, and register our generation there. Another claim in between is no reason to
        give up; a newer generation is."""
        for left in reversed(range(TRIES)):
            lane.open()
            check_owner([lane.record], self.context.pipeline, self.head_name)
            self._refuse_newer(lane.record, empty.generation)
            record = claimed(lane.record, empty)
            if record == lane.record:
                return record
            fault_point("kafka.claim.before")
            try:
                lane.write_record(record)
            except CommitUnknownError:
                if not left:
                    raise
                continue  # a new producer, and read
            fault_point("kafka.claim.after")
            return record
        raise AssertionError("the last try returns or raises")

    def _check_timeout(self) -> None:
        """Raise ConfigError if the broker does not allow transactions of the time that the spec has."""
        longest = self._cluster.longest_transaction_ms()
        if longest is not None and longest < self._kafka.transaction_timeout_ms:
            raise ConfigError(
                f"sink {self.name!r}: transaction_timeout is {self._kafka.transaction_timeout_ms} ms, and the broker "
                f"allows {longest} ms (transaction.max.timeout.ms)",
                hint="Lower transaction_timeout, or raise the setting of the broker.",
            )

    def swap_head(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        self._write_main(expected, new, {})

    def _write_main(
        self,
        expected: FollowerHead | None,
        new: FollowerHead,
        control: dict[str, Json],
        restored: tuple[int, Mapping[Partition, int]] | None = None,
    ) -> None:
        """Write a head to lane 0, with a control record in every partition of the topics if one is given.

        After a topology's restore to an epoch, `restored` has it and where it ends: what lies between is void.
        """
        self._known = None
        if not self._main.is_open:
            self._main.open_as(new.generation)
        held = self.read_head()
        if held is not None and held.generation > new.generation:
            raise FencedError(f"generation {held.generation} took sink {self.name!r} over", generation=held.generation)
        if held != expected:
            raise CommitConflictError(f"the head of sink {self.name!r} has moved")
        try:
            with self._main.transaction() as transaction:
                topics = self._find_topics() if control else []
                for topic in topics:
                    for partition in range(self._cluster.count_partitions(topic)):
                        transaction.produce(
                            topic,
                            canonical(control),
                            CONTROL_KEY,
                            partition=partition,
                            headers=[("firnline-control", str(control["kind"]))],
                        )
                channel = self._main.record.channel if self._main.record is not None else ChannelState()
                if restored is not None:
                    transaction.flush()
                    ids = self._cluster.find_topic_ids(topics)
                    channel = channel.after_restore(*restored, self._cluster.find_ends(topics), ids)
                # One lane is enough: the others are brought here before the next epoch that has rows in them.
                transaction.commit(LaneRecord(1, new, channel))
        except LostProducerError as error:
            raise CommitUnknownError(error.cause.message, sink=self.name) from error

    def keep_rows(self, head: FollowerHead, commit: EpochCommit) -> FollowerHead:
        """Move the head, and after a rollback say in every partition which epochs are undone, though they stay."""
        after = head_after(head, commit)
        control: dict[str, Json] = {}
        jump = commit.facts.get("jump") or {}
        newest = head.partial.epoch if head.partial else head.epoch
        restored: tuple[int, Mapping[Partition, int]] | None = None
        if commit.kind == "rollback" and int(jump.get("to_epoch", newest)) < newest:
            if jump.get("restore"):
                to_epoch = int(jump["to_epoch"])
                restored = to_epoch, self.find_ends(to_epoch)
            control = {
                "kind": "rollback",
                "pipeline": self.context.pipeline,
                "sink": self.name,
                "epoch": commit.checkpoint.epoch,
                "undone": {"first": int(jump["to_epoch"]) + 1, "last": newest},
            }
        self._write_main(head, after, control, restored)
        return after

    def check_lost(self, epoch: int) -> None:
        topics = self._find_topics()
        ends = self._cluster.find_ends(topics)
        first = self._cluster.find_epoch_ends(topics, epoch)
        later = sorted(
            f"{topic}/{number} from offset {first[topic, number]} on"
            for (topic, number), end in ends.items()
            if first[topic, number] < end
        )
        if later:
            raise SinkWentBackError(
                f"sink {self.name!r} holds epoch {epoch} by its checkpoint topic, and rows of later epochs "
                f"({', '.join(later[:NAMED])}): the checkpoint topic {self._connection.checkpoint_topic!r} was lost or "
                "is older than the rows",
                hint="If the topics have all rows, go on from here; else what they lack is never delivered: "
                f"firnline sinks resume {self.name} --accept-gap",
                sink=self.name,
                epoch=epoch,
            )

    # -- a channel of a topology ----------------------------------------------------------------------

    def read_channel(self) -> ChannelState:
        """Read what members of a topology know of the topics: the cuts of snapshots that all lanes hold, and void
        offsets."""
        records = self._read_records()
        return combine_lanes({lane: record.channel for lane, record in records.items() if record is not None})

    def find_checkpoint_id(self) -> str:
        """Return the id of the checkpoint topic; empty if there is none."""
        topic = self._connection.checkpoint_topic
        return self._cluster.find_topic_ids([topic]).get(topic, "")

    def find_retention(self) -> timedelta | None:
        """Return how long the topics keep every record; None: for ever. A limit by size is not a time, and not seen."""
        found = []
        for topic in self._find_topics():
            settings = self._cluster.settings("topic", topic)
            policy = settings.get("cleanup.policy", "delete").split(",")
            if "delete" in policy and int(settings.get("retention.ms", -1)) >= 0:
                found.append(int(settings["retention.ms"]))
            if "compact" in policy:  # from then on only the newest record of a key is sure to be there
                found.append(int(settings.get("min.compaction.lag.ms", 0)))
        return timedelta(milliseconds=min(found)) if found else None

    def find_compaction_lag(self, topic: str) -> int | None:
        """Return how many milliseconds a topic keeps every record before compaction; None: it is not compacted."""
        settings = self._cluster.settings("topic", topic)
        is_compacted = "compact" in settings.get("cleanup.policy", "delete").split(",")
        return int(settings.get("min.compaction.lag.ms", 0)) if is_compacted else None

    def find_ends(self, epoch: int) -> Mapping[Partition, int]:
        """Return where an epoch that the sink holds ends in each partition; one that is left out had nothing then.

        Of a marker epoch the checkpoint topic names it. Of another one the rows do: each names its epoch.
        """
        topics = self._find_topics()
        known = find_ends(self.read_channel().cuts.values(), epoch, self._cluster.find_topic_ids(topics))
        return known if known is not None else self._cluster.find_epoch_ends(topics, epoch)

    def _find_topics(self) -> list[str]:
        """Return the topics that this sink writes."""
        return self._cluster.find_topics(self._kafka.topic, self._kafka.topics_allowed)

    # -- delivery -------------------------------------------------------------------------------------

    def deliver(self, delivery: EpochDelivery) -> FollowerHead:
        lanes = int(delivery.shape["lanes"])
        while True:
            epoch = LaneEpoch(delivery.rows, delivery.shape, delivery.final_head, self._kafka.max_transaction_bytes)
            bad = self._write_one(epoch) if lanes == 1 else self._write_lanes(epoch, lanes, delivery)
            if not bad:
                return delivery.final_head
            letters = delivery.rows.letters(dict(bad))
            delivery.refuse(letters)
            delivery = delivery.without(letters)

    def _write_one(self, epoch: LaneEpoch) -> list[tuple[int, str]]:
        """Write an epoch in lane 0, in this process. Returns bad rows, of which none was written."""
        try:
            write_lane(self._main, self._cluster, epoch)
        except BadRowsError as error:
            return list(error.rows)
        return []

    def _write_lanes(self, epoch: LaneEpoch, lanes: int, delivery: EpochDelivery) -> list[tuple[int, str]]:
        """Write an epoch in several lanes at once, by tasks. Returns bad rows, of which none was written."""
        self._join_lanes(delivery.head, epoch.head, lanes)
        self._known = None
        self._main.close()  # tasks have producers of their own
        tasks = [lane_task(self._connection, number, epoch) for number in range(lanes)]
        run: Callable[[str, list[dict[str, Json]]], list[dict[str, Json]]] = delivery.run_tasks or _run_here
        bad = check_reports(run(delivery.rows.attempt, tasks))
        if not bad and has_marker(delivery.commit.checkpoint.topology, epoch.head.epoch):
            # A commit is answered before everybody sees it: no row of the next epoch may be seen before the whole cut.
            self._cluster.read_heads(range(lanes))
        return bad

    def _join_lanes(self, before: FollowerHead, after: FollowerHead, lanes: int) -> None:
        """Bring the lanes of an epoch to the epoch before it: a lane may be new, or the last epoch had fewer.

        The producer of lane 0 does it: no older run has that any more.
        """
        if self._cluster.count_partitions(self._connection.checkpoint_topic) < lanes:
            self._cluster.ensure_lanes(lanes)
        complete = replace(before, partial=None, row=0)
        records = self._read_records()
        behind = [
            number
            for number in range(lanes)
            if (held := records.get(number)) is None or held.head.entry not in (before.entry, after.entry)
            or held.head.epoch < before.epoch
        ]  # fmt: skip
        if not behind:
            return
        self._main.open_as(before.generation)
        main = self._main.record
        assert main is not None
        if main.head.entry != before.entry:
            raise SinkError(f"sink {self.name!r}: lane 0 holds epoch {main.head.epoch}, not {before.epoch}")
        fault_point("kafka.join.before")
        try:
            with self._main.transaction() as transaction:
                for number in behind:
                    before_it = records.get(number)
                    channel = before_it.channel if before_it is not None else ChannelState()
                    transaction.put_record(LaneRecord(main.lanes, complete, channel), number)
                transaction.commit(main)
        except LostProducerError as error:
            raise CommitUnknownError(error.cause.message, sink=self.name) from error
        fault_point("kafka.join.after")

    # -- checks ---------------------------------------------------------------------------------------

    def check(self) -> None:
        self._cluster.check_answers()
        self._check_timeout()
        if not template_columns(self._kafka.topic):
            self._check_writable(self._kafka.topic)
        if self._cluster.count_partitions(self._connection.checkpoint_topic):
            self._cluster.check_checkpoint_topic()

    def _check_writable(self, topic: str) -> None:
        """Raise SinkError if a topic does not exist, or this user may not write to it."""
        if not self._cluster.count_partitions(topic):
            if self._kafka.partitions:
                return
            raise SinkError(
                f"sink {self.name!r}: topic {topic!r} does not exist; brokers {self._kafka.brokers}",
                hint=f"Create the topic, or set `partitions` on sink {self.name!r}.",
                sink=self.name,
            )
        rights = self._cluster.rights(topic)
        if rights is not None and "WRITE" not in rights:
            raise SinkError(
                f"sink {self.name!r}: this user may not write to topic {topic!r}; brokers {self._kafka.brokers}",
                hint="Give the user the right to write there (an ACL for Write), and for Write on the transactional "
                f"ids that begin with {self._connection.checkpoint_topic!r}.",
                sink=self.name,
            )


def _run_here(_: str, tasks: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Run tasks in this process, for a sink without an engine."""
    with ThreadPoolExecutor(len(tasks), thread_name_prefix="firnline kafka") as pool:
        return list(pool.map(run_lane, tasks))

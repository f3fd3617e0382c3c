"""Writes the rows of one epoch in one lane: in the driver, or as a task in a worker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import (
    CommitUnknownError,
    FencedError,
    FirnlineError,
    SinkDivergedError,
    SinkError,
    SinkWentBackError,
    error_report,
    rebuild_error,
)
from firnline.options import template_columns
from firnline.sinks.follower import EpochRows, FollowerHead
from firnline.sinks.kafka.cluster import Cluster, Connection, TopicFacts
from firnline.sinks.kafka.lane import TRIES, Lane, LostProducerError, LowerLimitError, Transaction
from firnline.sinks.kafka.record import LaneRecord
from firnline.topology.topics import Partition, has_marker
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sinks.kafka.avro_values import AvroValues
    from firnline.sinks.kafka.encode import Messages

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_MESSAGE_OVERHEAD = 270  # bytes of a batch around its only message, with all of the headers but names that a spec has
ROW_BYTES = 70  # of headers and framing, counted in the size of a transaction
_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class LaneEpoch:
    """What one lane writes of one epoch. Plain JSON describes it to a worker."""

    rows: EpochRows
    shape: Mapping[str, Json]  # the kind's settings of the epoch
    head: FollowerHead  # once the epoch is complete
    max_transaction_bytes: int

    def to_json(self) -> dict[str, Json]:
        return {
            "rows": self.rows.to_json(),
            "shape": dict(self.shape),
            "head": self.head.to_json(),
            "max_transaction_bytes": self.max_transaction_bytes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> LaneEpoch:
        return cls(
            EpochRows.from_json(value["rows"]),
            value["shape"],
            FollowerHead.from_json(value["head"], "head"),
            int(value["max_transaction_bytes"]),
        )


class BadRowsError(Exception):
    """Rows that the sink can never hold; nothing of their transaction was committed. Never leaves the sink."""

    def __init__(self, rows: Sequence[tuple[int, str]]) -> None:
        super().__init__(f"{len(rows)} bad rows")
        self.rows = rows


def write_lane(lane: Lane, cluster: Cluster, epoch: LaneEpoch) -> None:
    """Write an epoch in one lane, from where the lane stands; on return the lane holds it.

    A producer that fails is replaced, and the lane's record says what was committed.

    Raises:
        FencedError: the lane has a newer generation.
        SinkWentBackError: the lane lost what this run wrote.
        CommitUnknownError: answers were lost again and again.
        BadRowsError: rows can never be held.
    """
    tries = 0
    while True:
        try:
            lane.open_as(epoch.head.generation)
            _write(lane, cluster, epoch)
            return
        except LowerLimitError:
            continue  # limits only fall, and topics are few
        except LostProducerError as error:
            cluster.forget_topics()
            tries += 1
            if tries >= TRIES:
                raise CommitUnknownError(error.cause.message, hint=error.cause.hint, sink=epoch.rows.sink) from error


def _write(lane: Lane, cluster: Cluster, epoch: LaneEpoch) -> None:
    assert lane.record is not None
    held = lane.record.head
    entry = epoch.head.entry
    if held.epoch >= epoch.head.epoch:
        if held.epoch == epoch.head.epoch and held.entry != entry:
            raise FencedError(f"sink {epoch.rows.sink!r} holds another epoch {held.epoch}")
        return
    if held.epoch < epoch.head.epoch - 1:
        raise SinkWentBackError(
            f"sink {epoch.rows.sink!r} lost what this run wrote: it holds epoch {held.epoch} now", sink=epoch.rows.sink
        )
    if held.partial is not None and held.partial != entry:
        raise SinkDivergedError(
            f"sink {epoch.rows.sink!r} holds rows of another epoch {held.partial.epoch} than was decided",
            sink=epoch.rows.sink,
            epoch=held.partial.epoch,
        )
    writer = _RowWriter(lane, cluster, epoch)
    first = held.row if held.partial is not None else 0
    while first < epoch.rows.rows:
        with lane.transaction() as transaction:
            end = writer.send(transaction, first)
            if end >= epoch.rows.rows:
                transaction.commit(_final_record(lane.record, cluster, epoch, transaction))
                return
            partial = replace(lane.record.head, partial=entry, row=end)
            transaction.commit(replace(lane.record, head=partial))
            first = end
    with lane.transaction() as transaction:  # an epoch without rows
        transaction.commit(_final_record(lane.record, cluster, epoch, transaction))


def _final_record(held: LaneRecord, cluster: Cluster, epoch: LaneEpoch, transaction: Transaction) -> LaneRecord:
    """Return the record of a lane that holds an epoch. If it is a marker epoch, the record names where it ends.

    No lane begins the next epoch before all lanes hold this one: all that the topics hold now is of this epoch, or
    older.
    """
    head, lanes = epoch.head, int(epoch.shape["lanes"])
    remembered = head.checkpoint.topology if head.checkpoint is not None else {}
    ends: dict[Partition, int] = {}
    ids: dict[str, str] = {}
    if has_marker(remembered, head.epoch):
        transaction.flush()
        topics = cluster.find_topics(str(epoch.shape["topic"]), str(epoch.shape["topics_allowed"]))
        ids = cluster.find_topic_ids(topics)
        ends = cluster.find_ends(topics)
    return LaneRecord(lanes, head, held.channel.after_epoch(remembered, head.epoch, lanes, ends, ids))


class _RowWriter:
    """Sends the rows of an epoch that belong to one lane."""

    def __init__(self, lane: Lane, cluster: Cluster, epoch: LaneEpoch) -> None:
        self._lane = lane
        self._cluster = cluster
        self._epoch = epoch
        self._topic = str(epoch.shape["topic"])
        self._checker = MessageChecker(cluster, epoch.shape, lane, epoch.rows)
        if lane.encoder is None or lane.encoder.shape != epoch.shape:
            from firnline.sinks.kafka.encode import (
                MessageEncoder,
            )  # a compiler and a database, which lookers do not need

            lane.encoder = MessageEncoder(epoch.shape, self._avro())
        self._encoder = lane.encoder

    def _avro(self) -> AvroValues | None:
        """Return what encodes Avro values; None if the values of the epoch are JSON."""
        shape, sink = self._epoch.shape, self._epoch.rows.sink
        if shape["value"] != "avro":
            return None
        registry = self._cluster.registry
        if registry is None:
            raise SinkError(
                f"sink {sink!r}: epoch {self._epoch.head.epoch} has Avro values, and the spec has no registry",
                hint="Add `registry` to the sink until its older epochs are delivered; nothing was lost.",
                sink=sink,
            )
        from firnline.sinks.kafka.avro_values import AvroValues  # loads the encoder

        checker = self._checker
        return AvroValues(sink, registry, shape, lambda name: not checker.wrong_name(name))

    def _messages(self, first: int) -> Iterator[Messages]:
        for rows in self._epoch.rows.read(first):
            yield from self._encoder.encode(rows, self._lane.number)

    def send(self, transaction: Transaction, first: int) -> int:
        """Send rows from number `first` on, as many as a transaction may have. Returns the number after the last one.

        Raises:
            BadRowsError: with all bad rows of the epoch from `first` on.
        """
        sent_bytes, end = 0, first
        parts = self._messages(first)
        for messages in parts:
            if bad := self._checker.find_bad(messages):
                rest = [row for part in parts for row in self._checker.find_bad(part)]
                raise BadRowsError([*bad, *rest])
            sizes = messages.sizes() + ROW_BYTES
            fits = _fitting(sizes, self._epoch.max_transaction_bytes - sent_bytes, at_least_one=not sent_bytes)
            self._produce(transaction, messages, fits)
            if fits < len(messages):
                return int(messages.numbers[fits].as_py())
            sent_bytes += int(sizes.sum())
            end = messages.end
            if sent_bytes >= self._epoch.max_transaction_bytes and end < self._epoch.rows.rows:
                return end
        return end

    def _produce(self, transaction: Transaction, messages: Messages, count: int) -> None:
        """Hand the first `count` messages to the client, one call for each. It takes bytes faster than text."""
        rows = self._epoch.rows
        values = messages.values.slice(0, count).to_pylist()
        keys = messages.keys.slice(0, count).to_pylist() if messages.keys is not None else repeat(None, count)
        ids = rows.event_ids(messages.numbers.slice(0, count)).cast(pa.binary()).to_pylist()
        topics = repeat(self._topic, count) if messages.topics is None else messages.topics.slice(0, count).to_pylist()
        origins = _origins(messages, count) or repeat(None, count)
        shared = [("firnline-pipeline", rows.pipeline.encode()), ("firnline-epoch", str(rows.epoch).encode())]
        headers = [("firnline-id", b""), *shared]
        produce, wait = transaction.produce, transaction.wait_for_room
        with self._lane.lost_unless_answered("the write of rows"):
            for topic, value, key, number, origin in zip(topics, values, keys, ids, origins, strict=True):
                headers[0] = ("firnline-id", number)
                while True:
                    try:
                        # Partition, two callbacks, time stamp, headers: by name, a call takes a quarter longer.
                        produce(topic, value, key, -1, None, None, 0, headers + origin if origin else headers)
                        break
                    except BufferError:
                        wait()


def _origins(messages: Messages, count: int) -> list[list[tuple[str, bytes]]] | None:
    """Return the headers with each row's source position; None if the rows do not say it."""
    if messages.files is None or messages.records is None:
        return None
    files = messages.files.slice(0, count).cast(pa.binary()).to_pylist()
    records = messages.records.slice(0, count).cast(pa.string()).cast(pa.binary()).to_pylist()
    pairs = zip(files, records, strict=True)
    return [
        [("firnline-file", file), ("firnline-record", record)] if file is not None else [] for file, record in pairs
    ]


def _fitting(sizes: _Numbers, room: int, *, at_least_one: bool) -> int:
    """Return how many of the first messages fit into `room` bytes."""
    fits = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
    return max(fits, 1) if at_least_one and len(sizes) else fits


class MessageChecker:
    """Finds messages that a topic can never hold, before they are sent."""

    def __init__(self, cluster: Cluster, shape: Mapping[str, Json], lane: Lane, rows: EpochRows) -> None:
        self._cluster = cluster
        self._overhead = _MESSAGE_OVERHEAD + len(rows.id_prefix.encode()) + len(rows.pipeline.encode())
        self._lane = lane
        self._topic = str(shape["topic"])
        self._is_template = bool(template_columns(self._topic))
        self._allowed = re.compile(str(shape["topics_allowed"])) if shape["topics_allowed"] else None
        self._needs_key = shape["write"] == "upsert"

    def find_bad(self, messages: Messages) -> list[tuple[int, str]]:
        """Return the numbers of bad rows, each with the reason.

        Raises:
            SinkError: a topic does not exist.
            LowerLimitError: a topic takes only smaller batches than the lane sends.
        """
        if not len(messages):
            return []
        bad: dict[int, str] = {}
        if messages.topics is None:
            self._check(messages, self._cluster.facts(self._topic), self._topic, None, bad)
        else:
            for code, name in enumerate(messages.topics.dictionary.to_pylist()):
                mask = pc.fill_null(pc.equal(messages.topics.indices, code), False)
                reason = self.wrong_name(name)
                if reason:
                    bad |= dict.fromkeys(messages.numbers.filter(mask).to_pylist(), reason)
                else:
                    self._check(messages, self._cluster.facts(name), name, mask, bad)
            unnamed = messages.numbers.filter(pc.is_null(messages.topics))
            bad |= dict.fromkeys(unnamed.to_pylist(), f"a column of the topic {self._topic!r} is null")
        return sorted(bad.items())

    def wrong_name(self, name: str) -> str:
        """Return why a rendered name is no topic of this sink; empty if it may be one. A plain name is the spec's."""
        if not self._is_template:
            return ""
        if not _TOPIC_NAME.fullmatch(name) or name in (".", ".."):
            return f"{name[:300]!r} is no name of a topic"
        if self._allowed is not None and not self._allowed.fullmatch(name):
            return f"topic {name!r} does not match topics_allowed"
        return ""

    def _check(
        self, messages: Messages, facts: TopicFacts, topic: str, mask: pa.Array | None, bad: dict[int, str]
    ) -> None:
        self._lane.limit_batches(facts.max_bytes)
        numbers = messages.numbers.to_numpy()
        here = np.ones(len(messages), bool) if mask is None else mask.to_numpy(zero_copy_only=False)
        if topic in messages.refused:
            with_value = here & messages.values.is_valid().to_numpy(zero_copy_only=False)
            bad |= dict.fromkeys(numbers[with_value].tolist(), messages.refused[topic])
        if self._needs_key or facts.needs_key:
            keyless = pc.is_null(messages.keys).to_numpy(zero_copy_only=False) if messages.keys is not None else here
            reason = "the key is null" if messages.keys is not None else f"topic {topic!r} is compacted: it needs a key"
            bad |= dict.fromkeys(numbers[here & keyless].tolist(), reason)
        sizes = messages.sizes() + self._overhead
        for index in np.nonzero(here & (sizes > facts.max_bytes))[0].tolist():
            bad[int(numbers[index])] = (
                f"the message has {int(sizes[index]):,} bytes, and topic {topic!r} takes {facts.max_bytes:,}"
            )


# -- in a worker --------------------------------------------------------------------------------------


def lane_task(connection: Connection, number: int, epoch: LaneEpoch) -> dict[str, Json]:
    """Describe to a worker what one lane writes."""
    return {
        "kind": "commit",
        "type": "kafka",
        "connection": connection.to_json(),
        "lane": number,
        "epoch": epoch.to_json(),
    }


def run_lane(task: dict[str, Json]) -> dict[str, Json]:
    """Write one lane of an epoch; reports errors as values, because an engine knows no errors of a sink."""
    cluster = Cluster(Connection(**task["connection"]))
    lane = Lane(cluster, int(task["lane"]))
    try:
        write_lane(lane, cluster, LaneEpoch.from_json(task["epoch"]))
        return {"lane": lane.number}
    except BadRowsError as error:
        return {"lane": lane.number, "bad": [list(row) for row in error.rows]}
    except FirnlineError as error:
        return {"lane": lane.number, "failure": error_report(error)}
    finally:
        lane.close()
        cluster.close()


def check_reports(reports: Sequence[dict[str, Json]]) -> list[tuple[int, str]]:
    """Return the bad rows that lanes reported.

    Raises:
        FirnlineError: the error of a lane; of several, the one that decides most: another run owns the sink, the sink
            lost rows or holds others, a commit is unclear.
    """
    failures = [rebuild_error(report["failure"]) for report in reports if "failure" in report]
    if failures:
        raise min(failures, key=_rank)
    return [(int(row), str(reason)) for report in reports for row, reason in report.get("bad", ())]


def _rank(error: FirnlineError) -> int:
    kinds = (FencedError, SinkWentBackError, SinkDivergedError, CommitUnknownError)
    return next((number for number, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))

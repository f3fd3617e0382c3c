"""Fetches ranges of offsets from brokers, and proves that each was read to its end.

A range is complete when a record at or beyond its end has come, or when the partition ends there. The ranges of one
wave are fetched together and handed out one after the other, so that a task with many small ranges does not wait for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from firnline.clock import monotonic
from firnline.errors import SourceError
from firnline.kafka_client import as_source_error, load_library
from firnline.sources.kafka.messages import RangeInput
from firnline.sources.kafka.position import PartitionId

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

BATCH_RECORDS = 10_000
BATCH_BYTES = 4 * 1024 * 1024  # about so much is decoded at once
FIRST_RECORDS = 1_000  # before the size of records is known
POLL_SECONDS = 0.05
SILENT_SECONDS = 60.0  # a broker that sends nothing for so long is down
HOLD_BYTES = 32 * 1024 * 1024  # of ranges that wait for their turn


@dataclass(slots=True)
class _Waiting:
    """What has come of one range and was not handed out yet."""

    messages: list[list[Message]] = field(default_factory=list)
    end: int = -1  # where the partition ended, if it did
    paused: bool = False
    complete: bool = False  # a record at the end of the range, or beyond it, has come


def waves(ranges: Sequence[RangeInput]) -> Iterator[list[RangeInput]]:
    """Group ranges, in order, so that a wave has one topic and no partition twice."""
    wave: list[RangeInput] = []
    for one in ranges:
        topic = PartitionId.parse(one.path).topic
        if wave and (PartitionId.parse(wave[0].path).topic != topic or any(w.path == one.path for w in wave)):
            yield wave
            wave = []
        wave.append(one)
    if wave:
        yield wave


class Wave:
    """Ranges of different partitions of one topic, fetched together."""

    def __init__(
        self, consumer: Consumer, ranges: Sequence[RangeInput], brokers: str, gap_error: Callable[[str], SourceError]
    ) -> None:
        library = load_library()
        self._consumer = consumer
        self._brokers = brokers
        self._gap_error = gap_error
        self._eof = library.KafkaError._PARTITION_EOF
        self._lost = (library.KafkaError._AUTO_OFFSET_RESET, library.KafkaError.OFFSET_OUT_OF_RANGE,
                      library.KafkaError._LOG_TRUNCATION)  # fmt: skip
        self._partitions = {PartitionId.parse(one.path).number: one for one in ranges}
        self._waiting = {number: _Waiting() for number in self._partitions}
        self._left = sum(one.end - one.start for one in ranges)  # records that may still come, of all ranges
        self._held_bytes = 0
        self._mean_bytes = 0.0
        topic = PartitionId.parse(ranges[0].path).topic
        self._assigned = {
            number: library.TopicPartition(topic, number, one.start, leader_epoch=one.epoch)
            for number, one in self._partitions.items()
        }
        consumer.assign(list(self._assigned.values()))

    def take(self, one: RangeInput, at: int, most: int) -> tuple[list[Message], int]:
        """Return the next messages of a range, at most `most`, and the offset up to which it is now read.

        `at` is the offset up to which it was read before. The messages may be empty: the range ended, or had nothing
        but markers and records that compaction took.

        Raises:
            SourceError: the broker does not answer.
            SourceGapError, or what else `gap_error` is: the broker no longer has the offsets.
        """
        number = PartitionId.parse(one.path).number
        mine = self._waiting[number]
        deadline = monotonic() + SILENT_SECONDS
        while not mine.messages:
            if mine.end >= one.end:
                return [], one.end
            if mine.paused:
                self._consumer.resume([self._assigned[number]])
                mine.paused = False
            if monotonic() > deadline:
                raise SourceError(
                    f"{one.path}: no record came from offset {at} on for {SILENT_SECONDS:.0f} s, and the slice ends at "
                    f"{one.end} (brokers {self._brokers})",
                    hint="Check that the brokers can be reached, then run again; nothing was lost.",
                )
            self._poll(number, one.end - at if len(self._partitions) == 1 else self._left)
        messages = mine.messages.pop(0)
        if len(messages) > most:
            mine.messages.insert(0, messages[most:])
            messages = messages[:most]
        reached = int(messages[-1].offset() or 0) + 1
        if reached >= one.end:  # a record at the end or beyond it proves that nothing is missing
            while messages and int(messages[-1].offset() or 0) >= one.end:
                messages.pop()
            reached = one.end
        return messages, reached

    def close(self) -> None:
        """Resume what is paused: the library remembers it beyond the assignment."""
        paused = [self._assigned[number] for number, one in self._waiting.items() if one.paused]
        if paused:
            self._consumer.resume(paused)

    def learn_size(self, records: int, size_bytes: int) -> None:
        """Note the size of records, for the size of the next batch."""
        if records:
            self._mean_bytes = size_bytes / records

    def _poll(self, wanted: int, left: int) -> None:
        """Wait for messages, at most as many as are `left`, and keep those of the range that is wanted, or of all."""
        most = int(BATCH_BYTES / self._mean_bytes) + 1 if self._mean_bytes else FIRST_RECORDS
        # The call waits for as many as it is asked for. Records beyond a range may have come in place of some.
        most = min(BATCH_RECORDS, most, left if left > 0 else FIRST_RECORDS)
        messages = self._consumer.consume(most, POLL_SECONDS)
        if not messages:
            return
        self._left -= len(messages)
        if any(message.error() is not None for message in messages):
            kept = []
            for message in messages:
                if message.error() is None:
                    kept.append(message)
                else:
                    self._note(message)
            messages = kept
        if len(self._partitions) == 1:
            if messages:
                self._waiting[wanted].messages.append(messages)
            return
        self._sort(messages, wanted)

    def _note(self, message: Message) -> None:
        """Note the end of a partition; raise any other error."""
        error, number = message.error(), int(message.partition() or 0)
        assert error is not None
        one = self._partitions.get(number)
        if error.code() == self._eof:
            if one is not None:
                self._waiting[number].end = max(self._waiting[number].end, int(message.offset() or 0))
        elif error.code() in self._lost:
            path = one.path if one is not None else str(message.topic())
            raise self._gap_error(f"{path}: the broker no longer has the offset to read from: {error.str()}")
        elif not error.retriable():
            raise as_source_error(f"cannot read {one.path if one else message.topic()}", self._brokers, error)

    def _sort(self, messages: list[Message], wanted: int) -> None:
        """Keep messages by partition. If too much waits, the other partitions pause."""
        if not messages:
            return
        numbers = np.fromiter((message.partition() for message in messages), np.int64, len(messages))
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(messages)]
        for start, stop in pairwise(cuts):
            number, some = int(numbers[start]), messages[start:stop]
            waiting = self._waiting[number]
            if waiting.complete:
                continue
            waiting.messages.append(some)
            if number != wanted:
                self._held_bytes += sum(map(len, some))
            if int(some[-1].offset() or 0) >= self._partitions[number].end - 1:
                waiting.complete = waiting.paused = True
                self._consumer.pause([self._assigned[number]])
        if self._held_bytes > HOLD_BYTES:
            others = [number for number, one in self._waiting.items() if number != wanted and not one.paused]
            if others:
                self._consumer.pause([self._assigned[number] for number in others])
            for number in others:
                self._waiting[number].paused = True
            self._held_bytes = 0

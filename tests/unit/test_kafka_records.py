"""What the lanes of a Kafka sink hold together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from firnline.errors import DamagedError
from firnline.sinks.follower import FollowerHead
from firnline.sinks.kafka.record import LaneRecord, combine
from firnline.types import EntryRef


def entry(epoch: int) -> EntryRef | None:
    return EntryRef(epoch, f"{epoch}.json", f"{epoch:064d}") if epoch else None


def record(epoch: int, lanes: int = 1, generation: int = 1, row: int = 0) -> LaneRecord:
    head = FollowerHead("p", "s", generation, f"run {generation}", epoch, entry(epoch))
    return LaneRecord(lanes, replace(head, partial=entry(epoch + 1) if row else None, row=row))


def epoch_of(*records: LaneRecord | None) -> int | None:
    head = combine(dict(enumerate(records)), "the sink")
    return head.epoch if head else None


def test_an_epoch_counts_when_all_of_its_lanes_hold_it() -> None:
    assert epoch_of() is None
    assert epoch_of(None, None) is None
    assert epoch_of(record(3)) == 3
    assert epoch_of(record(3, 3), record(3, 3), record(3, 3)) == 3
    assert epoch_of(record(3, 3), record(2, 3), record(3, 3)) == 2
    assert epoch_of(record(2, 1), record(3, 2)) == 2, "the number of lanes grew"
    assert epoch_of(record(3, 1), record(2, 2)) == 3, "it fell"
    assert epoch_of(record(3, 1), record(0, 1), None) == 3


def test_lanes_that_began_the_next_epoch_name_it() -> None:
    head = combine({0: record(3, 2), 1: record(2, 2)}, "the sink")
    assert head is not None
    assert (head.epoch, head.partial) == (2, entry(3))
    head = combine({0: record(2, 2), 1: record(2, 2, row=9)}, "the sink")
    assert head is not None
    assert (head.epoch, head.partial) == (2, entry(3))
    head = combine({0: record(2, 1, row=9), 1: record(1, 2)}, "the sink")
    assert head is not None
    assert (head.epoch, head.partial, head.row) == (2, entry(3), 9)


def test_the_newest_claim_of_any_lane_counts() -> None:
    head = combine({0: record(2, 2, generation=4), 1: record(3, 2, generation=3)}, "the sink")
    assert head is not None
    assert (head.generation, head.run) == (4, "run 4")


def test_lanes_that_no_run_can_have_left_are_damage() -> None:
    for others in ((record(1, 3), record(2, 3)), (None, record(2, 3))):
        with pytest.raises(DamagedError):
            epoch_of(record(3, 3), *others)


def test_a_record_survives_its_durable_form() -> None:
    one = record(3, 2, row=7)
    assert LaneRecord.parse(one.to_bytes(), "it") == one
    for damaged in (one.to_bytes()[:-1], one.to_bytes().replace(b'"lanes":2', b'"lanes":1')):
        with pytest.raises(DamagedError):
            LaneRecord.parse(damaged, "it")

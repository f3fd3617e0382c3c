"""Every interleaving of a small topic with partitions, lanes and transactions, and planted bugs that must be caught."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from firnline.topology.topics import ChannelState, Partition, Ranges, combine_lanes
from tests.support.bank import Broken
from tests.support.proof import covered
from tests.support.topic_bank import TOPIC, TopicBank, TopicRules, TopicWorld, explore_topic

LIMIT = 1_000_000 if os.environ.get("FIRNLINE_PROOF") else 6_000

TOPICS = {
    "one lane": TopicBank(lanes=1, epochs=3, crashes=1),
    "two lanes": TopicBank(lanes=2, epochs=2),
    "two lanes, a crash": TopicBank(lanes=2, epochs=2, crashes=1),
    "restore": TopicBank(lanes=1, epochs=2, restores=True),
    "restore of two lanes": TopicBank(lanes=2, epochs=2, restores=True),
}


@pytest.mark.parametrize("name", TOPICS)
def test_the_rules_hold(name: str) -> None:
    states, complete = explore_topic(TOPICS[name], LIMIT)
    print(f"{name}: {states:,} states{', all' if complete else ''}")
    covered["states of topics searched"] += states
    covered["topics searched whole" if complete else "topics searched up to the limit"] += 1


class OnePartitionMarked(TopicRules):
    """The checkpoint record names the end of one partition."""

    def ends(self, ends: Mapping[Partition, int]) -> Mapping[Partition, int]:
        return {one: end for one, end in ends.items() if one == (TOPIC, 0)}


class OnePartitionCut(TopicRules):
    """Ends the slice of one partition at the cut."""

    def limit(self, stable: Mapping[Partition, int], cut: Mapping[Partition, int]) -> Mapping[Partition, int]:
        return {**stable, (TOPIC, 0): super().limit(stable, cut)[TOPIC, 0]}


class CheckpointsFirst(TopicRules):
    """Reads the checkpoint topic before it asks for the ends of the topic."""

    ends_first = False


class AnnouncementFirst(TopicRules):
    """Reads which topics are channels before it asks for their ends."""

    announced_last = False


class AnnouncedLate(TopicRules):
    """Tells the reader of its channels after the writer was asked."""

    announced_first = False


class LanesWithoutBarrier(TopicRules):
    """A lane begins an epoch although others do not hold the one before."""

    def may_begin(self, world: TopicWorld, epoch: int) -> bool:
        return True


class AnsweredIsSeen(TopicRules):
    """A lane begins an epoch when all commits of the one before were answered, and not everybody sees the marker."""

    def may_begin(self, world: TopicWorld, epoch: int) -> bool:
        return all(lane.holds >= epoch - 1 for lane in world.lanes)


class OneLaneIsEnough(TopicRules):
    """Takes the cut of one lane for the cut of the epoch."""

    def combine(self, lanes: Mapping[int, ChannelState]) -> ChannelState:
        return combine_lanes({0: lanes[0]}) if 0 in lanes and not lanes[0].cuts else _alone(lanes)


def _alone(lanes: Mapping[int, ChannelState]) -> ChannelState:
    return next((state for state in lanes.values() if state.cuts), ChannelState())


class VoidIsRead(TopicRules):
    """Reads what a restore undid."""

    def void(self, ranges: Ranges) -> Ranges:
        return ()


class ReleasedEarly(TopicRules):
    """Ends a restore when the record that names what is void was answered, and not everybody sees it."""

    waits_for_restore = False


TWO, THREE = TopicBank(lanes=2, epochs=2), TopicBank(lanes=1, epochs=3)
BACK = TopicBank(lanes=1, epochs=2, restores=True)
MUTANTS = (
    (OnePartitionMarked(), THREE),
    (OnePartitionCut(), THREE),
    (CheckpointsFirst(), THREE),
    (AnnouncementFirst(), THREE),
    (AnnouncedLate(), THREE),
    (LanesWithoutBarrier(), TWO),
    (AnsweredIsSeen(), TWO),
    (OneLaneIsEnough(), TWO),
    (VoidIsRead(), BACK),
    (ReleasedEarly(), BACK),
)


@pytest.mark.parametrize(("rules", "bank"), MUTANTS, ids=lambda one: type(one).__name__ * isinstance(one, TopicRules))
def test_a_planted_bug_is_caught(rules: TopicRules, bank: TopicBank) -> None:
    planted = TopicBank(bank.partitions, bank.lanes, bank.epochs, bank.crashes, bank.restores, rules)
    with pytest.raises(Broken):
        explore_topic(planted, 400_000)

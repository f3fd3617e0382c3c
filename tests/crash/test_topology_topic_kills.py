"""Snapshots and restores over a Kafka topic, killed at what they write there, and finished by the same commands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.options import PipelineOptions
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.support.kafka import KafkaServer
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.samples import SampleInput, table_ids
from tests.support.topic_chains import run_members, topic_reader, topic_writer
from tests.support.topologies import TIMEOUT, open_snapshots, settle

pytestmark = [pytest.mark.crash, pytest.mark.kafka]

SNAPSHOT = ("topology.channels.", "kafka.commit.")
RESTORE = ("kafka.commit.", "follower.edit.")


@dataclass(frozen=True)
class Chain:
    """files -> a -> topic -> b; b has read the first file."""

    folder: Path
    port: int  # of the broker
    members: tuple[PipelineOptions, PipelineOptions]
    snapshot: str
    then: Counter[int]
    ids: Counter[int]

    @property
    def kafka(self) -> KafkaServer:
        """A handle of its own: those that have been used cannot be passed to another process."""
        return KafkaServer(self.folder, self.port)

    def tables(self) -> list[Counter[int]]:
        return [table_ids(one.sinks[0].location) for one in self.members]


class Chains:
    """Makes chains, each with a topic of its own."""

    def __init__(self, folder: Path, kafka: KafkaServer, *, lanes: int, snapshot: bool) -> None:
        self._folder, self._kafka, self._lanes, self._snapshot = folder, kafka, lanes, snapshot
        self._made = 0

    def make(self) -> Chain:
        self._made += 1
        folder = self._folder / str(self._made)
        topic, sample = self._kafka.new_topic(2), SampleInput(folder / "in")
        writer = topic_writer(folder, self._kafka, topic, lanes=self._lanes)
        members = (writer, topic_reader(folder, self._kafka, topic))
        sample.add("f1.json", 4)
        taken = ""
        run_members(self._kafka, *members)
        if self._snapshot:
            snapshots = open_snapshots(folder, members)
            order = snapshots.order(TIMEOUT)
            run_members(self._kafka, *members)
            assert settle(snapshots, order) == (Outcome.COMMIT, "")
            taken = order.snapshot
        then = Counter(sample.ids)
        sample.add("f2.json", 4)
        if self._snapshot:
            run_members(self._kafka, *members)
        return Chain(folder, self._kafka.port, members, taken, then, Counter(sample.ids))


def take(chain: Chain) -> None:
    """Complete what is open, and take a snapshot."""
    snapshots = open_snapshots(chain.folder, chain.members)
    orders = snapshots.find_open()
    for order in orders:
        snapshots.settle(order)  # asks members that were not asked
    orders.append(snapshots.order(TIMEOUT))
    run_members(chain.kafka, *chain.members)
    for order in orders:
        assert settle(snapshots, order) == (Outcome.COMMIT, "")


def check_taken(chain: Chain, where: str) -> None:
    take(chain)
    assert chain.tables() == [chain.ids] * 2, where


def test_a_snapshot_is_finished_by_the_next_command(tmp_path: Path, kafka: KafkaServer) -> None:
    chains = Chains(tmp_path, kafka, lanes=2, snapshot=False)
    points = [f"{point}{side}" for point in SNAPSHOT for side in ("before", "after")]
    reached = kill_at_every_point(chains.make, take, check_taken, points=points, most=in_proof(4))
    assert reached.keys() >= set(points)


def restore(chain: Chain) -> None:
    """Restore the snapshot, as the command does."""
    snapshots = open_snapshots(chain.folder, chain.members)
    target, epochs = find_snapshot_epochs(snapshots, chain.snapshot)
    leave = [chain.members[0].sinks[1].name]
    order = find_or_order(snapshots, target, epochs, SystemClock(), RandomIds(), leave=leave)
    result = perform_restore(snapshots, order, RandomIds().new(), SystemClock(), print)
    assert result.decision is Decision.GO


def check_restored(chain: Chain, where: str) -> None:
    begun = open_snapshots(chain.folder, chain.members).home.find_unfinished()
    if begun is not None or chain.tables() != [chain.then] * 2:
        restore(chain)
    assert chain.tables() == [chain.then] * 2, where
    run_members(chain.kafka, *reversed(chain.members), *chain.members)
    assert chain.tables() == [chain.ids] * 2, where


def test_a_restore_is_finished_by_the_same_command(tmp_path: Path, kafka: KafkaServer) -> None:
    chains = Chains(tmp_path, kafka, lanes=1, snapshot=True)
    points = [f"{point}{side}" for point in RESTORE for side in ("before", "after")]
    reached = kill_at_every_point(chains.make, restore, check_restored, points=points, most=in_proof(4))
    assert reached.keys() >= set(points)

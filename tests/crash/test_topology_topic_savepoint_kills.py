"""Savepoints of a topology over a topic, and starts from them: killed at what they write, finished by the same command.

These tests cover the fault points of `topology.range`.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.history.topology.graph import Topology, make_topology
from firnline.history.topology.savepoint import create_topology_savepoint, start_from_savepoint
from firnline.history.topology.stopped import paused_run
from firnline.options import PipelineOptions
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Outcome
from firnline.types import RandomIds
from tests.support.kafka import KafkaServer
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.samples import SampleInput, table_ids
from tests.support.topic_chains import run_members, topic_reader, topic_writer
from tests.support.topologies import TIMEOUT, open_snapshots, settle

pytestmark = [pytest.mark.crash, pytest.mark.kafka]

OF_SAVEPOINTS = ("topology.range.", "topology.savepoint.", "savepoint.put.")
OF_TOPICS = ("kafka.create.", "kafka.commit.")
OF_STARTS = ("kafka.claim.", "follower.edit.", "restore.copy.", "delta.jump.")


@dataclass(frozen=True)
class Chain:
    """files -> a -> topic -> b; b has read the first file at the snapshot, a has written two, and now three."""

    folder: Path
    port: int  # of the broker
    topic: str
    new_topic: str
    snapshot: str
    then: Counter[int]
    ids: Counter[int]

    @property
    def kafka(self) -> KafkaServer:
        """A handle of its own: those that have been used cannot be passed to another process."""
        return KafkaServer(self.folder, self.port)

    @property
    def members(self) -> list[PipelineOptions]:
        return make_members(self.folder / "old", self.kafka, self.topic)

    @property
    def place(self) -> Path:
        return self.folder / "save"

    def other(self) -> Topology:
        """The same pipelines with tables and a topic of their own, which the sink creates."""
        writer, reader = make_members(self.folder / "new", self.kafka, self.new_topic, partitions=2)
        return make_topology([replace(writer, sources=self.members[0].sources), reader])

    def again(self, number: int) -> Chain:
        """The same chain, with a new topic and without anything that was made of it."""
        for name in ("save", "new"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return replace(self, new_topic=f"{self.topic}-{number}")


def make_members(folder: Path, server: KafkaServer, topic: str, **settings: int) -> list[PipelineOptions]:
    return [topic_writer(folder, server, topic, **settings), topic_reader(folder, server, topic)]


@pytest.fixture
def chain(tmp_path: Path, kafka: KafkaServer) -> Chain:
    folder, topic = tmp_path / "old", kafka.new_topic(2)
    sample = SampleInput(folder / "in")
    a, b = members = make_members(folder, kafka, topic)
    sample.add("f1.json", 4)
    run_members(kafka, a, b)
    sample.add("f2.json", 4)
    run_members(kafka, a)
    snapshots = open_snapshots(folder, members)
    order = snapshots.order(TIMEOUT)
    run_members(kafka, a)
    with paused_run(b, LocalEngine(1), lambda _: None):
        while snapshots.read_records(order)["b"].entry is None:
            SystemClock().sleep(0.02)
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    then = Counter(sample.ids)
    sample.add("f3.json", 4)
    run_members(kafka, a, b)
    return Chain(tmp_path, kafka.port, topic, "", order.snapshot, then, Counter(sample.ids))


def save(chain: Chain) -> None:
    create_topology_savepoint(open_snapshots(chain.folder / "old", chain.members), chain.snapshot, str(chain.place))


def start(chain: Chain) -> None:
    start_from_savepoint(chain.other(), str(chain.place), RandomIds().new())


def topic_rows(chain: Chain) -> Counter[int]:
    """What a reader finds in the new topic that knows nothing of Firnline."""
    return Counter(int(json.loads(record.value or b"")["id"]) for record in chain.kafka.read(chain.new_topic))


def check_started(chain: Chain, where: str) -> None:
    """Finish the start, and let the new topology go on: every row is there once."""
    start(chain)
    new = list(chain.other().members.values())
    a, b = (table_ids(one.sinks[0].location) for one in new)
    assert a == chain.then, where
    unread = chain.then - b
    assert unread.total() == 4, where
    assert topic_rows(chain) == unread, where
    run_members(chain.kafka, new[1])
    assert table_ids(new[1].sinks[0].location) == chain.then, where
    run_members(chain.kafka, *new)
    assert [table_ids(one.sinks[0].location) for one in new] == [chain.ids] * 2, where
    assert topic_rows(chain) == unread + (chain.ids - chain.then), where


class Starts:
    """Gives the chain anew, each time with another topic; with a savepoint, if it is asked for."""

    def __init__(self, chain: Chain, *, saved: bool) -> None:
        self._chain, self._saved, self._made = chain, saved, 0

    def make(self) -> Chain:
        self._made += 1
        made = self._chain.again(self._made)
        if self._saved:
            save(made)
        return made


def check_saved(chain: Chain, where: str) -> None:
    save(chain)
    files = sorted(path.name for path in (chain.place / "a/data").glob("to-*/*.parquet"))
    (topic,) = json.loads((chain.place / "topology.json").read_text())["topics"].values()
    assert files == sorted(file["name"] for file in topic["files"]), where
    check_started(chain, where)


def test_a_savepoint_of_a_topic_is_finished_by_the_same_command(chain: Chain) -> None:
    points = [f"{point}{side}" for point in OF_SAVEPOINTS for side in ("before", "after")]
    make = Starts(chain, saved=False).make
    reached = kill_at_every_point(make, save, check_saved, points=points, most=in_proof(4))
    assert reached.keys() >= set(points)


def test_a_start_is_killed_at_everything_that_it_writes_to_topics(chain: Chain) -> None:
    points = [f"{point}{side}" for point in OF_TOPICS for side in ("before", "after")]
    reached = kill_at_every_point(Starts(chain, saved=True).make, start, check_started, points=points, most=None)
    assert reached.keys() >= set(points)
    assert reached["kafka.commit.before"] >= 4, (
        "a transaction for each of two files, the claim, the head of the restore"
    )


def test_a_start_with_a_topic_is_finished_by_the_same_command(chain: Chain) -> None:
    points = [f"{point}{side}" for point in OF_STARTS for side in ("before", "after")]
    make = Starts(chain, saved=True).make
    reached = kill_at_every_point(make, start, check_started, points=points, most=in_proof(4))
    assert reached.keys() >= set(points)

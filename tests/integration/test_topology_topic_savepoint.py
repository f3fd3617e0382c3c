"""Savepoints of topologies whose channels are Kafka topics: ranges are copied, and a new topology starts from them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from firnline.clock import SystemClock
from firnline.history.topology.graph import Topology, make_topology
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.savepoint import SavedTopology, create_topology_savepoint, start_from_savepoint
from firnline.history.topology.stopped import paused_run
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.support.kafka import KafkaServer
from tests.support.pipelines import checkpoint_of
from tests.support.samples import SampleInput, table_ids
from tests.support.topic_chains import run_members, topic_reader, topic_writer
from tests.support.topologies import TIMEOUT, open_snapshots, settle

pytestmark = pytest.mark.kafka

RUN = "f" * 16


class Chain:
    """files -> a -> topic -> b and c: b has read one file, c two, a has written three."""

    def __init__(self, folder: Path, kafka: KafkaServer, *, partitions: int = 3, lanes: int = 1, **config: str) -> None:
        self.folder, self.kafka, self.lanes, self.partitions = folder, kafka, lanes, partitions
        self.topic = kafka.new_topic(partitions, **config)
        self.sample = SampleInput(folder / "in")
        self.members = make_members(folder, kafka, self.topic, lanes)
        self.snapshots = open_snapshots(folder, self.members)

    def write(self, name: str, *readers: str, rows: int = 7) -> None:
        """Add a file, which a writes, and these members read."""
        self.sample.add(f"{name}.json", rows)
        chosen = [one for one in self.members if one.name in readers]
        run_members(self.kafka, self.members[0], *chosen)

    def fill(self) -> Chain:
        self.write("f1", "b", "c")
        self.write("f2", "c")
        self.write("f3")
        return self

    def take(self) -> str:
        """Take a snapshot in which every reader has read what it has now."""
        order = self.snapshots.order(TIMEOUT)
        run_members(self.kafka, self.members[0])
        for reader in self.members[1:]:
            with paused_run(reader, LocalEngine(1), lambda _: None):
                while self.snapshots.read_records(order)[reader.name].entry is None:
                    SystemClock().sleep(0.02)
        assert settle(self.snapshots, order) == (Outcome.COMMIT, "")
        return order.snapshot

    def save(self, snapshot: str) -> SavedTopology:
        return create_topology_savepoint(self.snapshots, snapshot, str(self.place))

    @property
    def place(self) -> Path:
        return self.folder.parent / "save"

    def ids(self) -> list[Counter[int]]:
        return [table_ids(one.sinks[0].location) for one in self.members]

    def restore(self, snapshot: str) -> None:
        snapshots = open_snapshots(self.folder, self.members)
        epochs = find_snapshot_epochs(snapshots, snapshot)
        leave = [self.members[0].sinks[1].name]
        order = find_or_order(snapshots, *epochs, SystemClock(), RandomIds(), leave=leave)
        assert perform_restore(snapshots, order, RandomIds().new(), SystemClock(), print).decision is Decision.GO

    def other(self, topic: str, **settings: object) -> list[PipelineOptions]:
        """The same pipelines with tables and a topic of their own, on the same broker, and the same files."""
        found = make_members(self.folder.parent / "new", self.kafka, topic, self.lanes, **settings)
        found[0] = replace(found[0], sources=self.members[0].sources)
        return found


def make_members(folder: Path, kafka: KafkaServer, topic: str, lanes: int, **settings: object) -> list[PipelineOptions]:
    writer = topic_writer(folder, kafka, topic, lanes=lanes, **settings)
    readers = [topic_reader(folder, kafka, topic, name=name) for name in "bc"]
    return [writer, *readers]


def topic_rows(kafka: KafkaServer, topic: str) -> Counter[int]:
    """The ids in a topic, as a reader finds them that knows nothing of Firnline."""
    return Counter(int(json.loads(record.value or b"")["id"]) for record in kafka.read(topic))


def start(topology: Topology | Sequence[PipelineOptions], chain: Chain) -> None:
    new = topology if isinstance(topology, Topology) else make_topology(topology)
    start_from_savepoint(new, str(chain.place), RUN, report=print)


def tables(members: Sequence[PipelineOptions]) -> list[Counter[int]]:
    return [table_ids(one.sinks[0].location) for one in members]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_new_topology_goes_on_with_what_the_topic_held(tmp_path: Path, kafka: KafkaServer, lanes: int) -> None:
    chain = Chain(tmp_path / "old", kafka, lanes=lanes).fill()
    then = chain.ids()
    snapshot = chain.take()
    old = {(r.key, r.value): r for r in kafka.read(chain.topic)}
    chain.write("f4", "b", "c")
    saved = chain.save(snapshot)
    (topic,) = saved.topics.values()
    unread = then[0] - then[1]
    assert topic.records == unread.total(), "from the reader that is furthest behind, up to the cut"
    kept = duckdb.sql(f"SELECT * FROM '{chain.place}/a/data/to-*/*.parquet' ORDER BY partition, \"offset\"").fetchall()
    assert Counter(json.loads(row[4])["id"] for row in kept) == unread

    new_topic = kafka.new_topic(3)
    new = chain.other(new_topic)
    shutil.rmtree(tmp_path / "old/a")  # nothing of the old tables is needed, and nothing of the topic
    kafka.delete_topic(chain.topic)
    start(new, chain)
    assert tables(new) == then
    assert topic_rows(kafka, new_topic) == unread
    for record in kafka.read(new_topic):
        before = old[record.key, record.value]
        assert (record.partition, record.headers) == (before.partition, before.headers)
    order = {n: [r.value for r in kafka.read(new_topic) if r.partition == n] for n in range(3)}
    assert order == {n: [r.value for r in old.values() if r.partition == n and r.value in order[n]] for n in range(3)}
    epoch = open_pipeline(new[0]).load().epoch
    assert open_pipeline(new[0]).sink(new[0].sinks[1].name).load().epoch == epoch, "the sink goes on from the restore"
    start(new, chain)  # again: nothing is written twice
    assert topic_rows(kafka, new_topic) == unread
    run_members(kafka, *new[1:])
    assert tables(new)[1:] == [then[0]] * 2, "each reader gets what it had not read, once"
    run_members(kafka, *new)
    assert tables(new) == [chain.sample.ids] * 3
    assert topic_rows(kafka, new_topic) == unread + (chain.sample.ids - then[0])
    start(new, chain)  # long after: nothing is touched
    run_members(kafka, *new)
    assert tables(new) == [chain.sample.ids] * 3
    assert checkpoint_of(new[1]).topology == {}

"""Snapshots and restores of pipelines that are chained by Kafka topics: a real broker, runs in this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.clock import SystemClock
from firnline.errors import RollbackRefusedError
from firnline.history.topology.restore import (
    RestoreResult,
    check_plans,
    find_epochs_at,
    find_inconsistent,
    find_or_order,
    find_snapshot_epochs,
    perform_restore,
    plan_restore,
)
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.kafka import source
from firnline.sources.kafka.channels import read_channel
from firnline.topology.decide import Decision, Outcome
from firnline.topology.records import ask, load_asked, stop_asking
from firnline.topology.topics import load_channels
from firnline.types import RandomIds
from tests.support.kafka import KafkaServer
from tests.support.pipelines import checkpoint_of
from tests.support.processes import wait_until
from tests.support.samples import SampleInput, table_ids
from tests.support.topic_chains import run_members, topic_reader, topic_writer
from tests.support.topologies import TIMEOUT, open_snapshots, running, settle


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_reader_that_is_behind_ends_its_slice_at_the_cut(tmp_path: Path, kafka: KafkaServer, lanes: int) -> None:
    topic = kafka.new_topic(3)
    sample = SampleInput(tmp_path / "in")
    a, b = topic_writer(tmp_path, kafka, topic, lanes=lanes), topic_reader(tmp_path, kafka, topic)
    sample.add("f1.json", 5)
    run_members(kafka, a, b)
    snapshots = open_snapshots(tmp_path, [a, b])
    sample.add("f2.json", 5)
    run_members(kafka, a)
    order = snapshots.order(TIMEOUT)
    stop_asking(open_pipeline(b).storage, "b", order.snapshot)  # the cut alone must do
    run_members(kafka, a)
    sample.add("f3.json", 5)
    run_members(kafka, a)
    before = set(sample.ids)
    run_members(kafka, b)
    record = checkpoint_of(b).topology[order.snapshot]["epoch"]
    entries = open_pipeline(b).entries(open_pipeline(b).load().entry)
    rows = sum(int(r["records"]) for e in entries if e.epoch <= record for r in e.inputs["k"])
    assert rows == 10
    assert set(table_ids(b.sinks[0].location)) == before
    assert settle(snapshots, order) == (Outcome.COMMIT, "")


@pytest.mark.parametrize("is_planted", [False, True], ids=["ends first", "cuts first"])
def test_a_marker_between_the_two_questions_of_a_reader(
    tmp_path: Path, kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    """A reader asks for the ends of the topic, then for the cuts; the planted bug asks the other way round."""
    topic = kafka.new_topic(2)
    sample = SampleInput(tmp_path / "in")
    a, b = topic_writer(tmp_path, kafka, topic), topic_reader(tmp_path, kafka, topic)
    sample.add("f1.json", 5)
    run_members(kafka, a, b)
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    (marker,) = load_asked(open_pipeline(a).storage, "a")
    for one in (a, b):  # a records the snapshot later, b at the cut
        stop_asking(open_pipeline(one).storage, one.name, order.snapshot)
    sample.add("f2.json", 5)
    run_members(kafka, a)
    kafka.await_markers(topic)
    (channel,) = load_channels(open_pipeline(b).storage, "b", "k")
    written: list[str] = []
    look, read = source.KafkaSource._look, read_channel

    def write() -> None:
        """The writer records the snapshot and goes on, between the two questions."""
        written.append(order.snapshot)
        ask(open_pipeline(a).storage, "a", marker)
        sample.add("f3.json", 5)
        run_members(kafka, a)
        sample.add("f4.json", 5)
        run_members(kafka, a)
        kafka.await_markers(topic)

    def look_second(self: source.KafkaSource) -> object:
        if not written:
            before = read(self._client, channel, kafka.bootstrap)
            monkeypatch.setattr(source, "read_channel", lambda *_: before)
            write()
        return look(self)

    def read_second(*words: Any) -> object:
        if not written:
            write()
        return read(*words)

    if is_planted:
        monkeypatch.setattr(source.KafkaSource, "_look", look_second)
    else:
        monkeypatch.setattr(source, "read_channel", read_second)
    run_members(kafka, b)
    assert written
    monkeypatch.undo()
    if is_planted:
        snapshots.settle(order)  # asks b, which has passed the cut without a record
    run_members(kafka, b)
    outcome, reason = settle(snapshots, order)
    if is_planted:
        assert outcome is Outcome.ABORT
        assert reason.startswith("the reader is beyond the record of the writer")
        return
    assert (outcome, reason) == (Outcome.COMMIT, "")
    record = checkpoint_of(b).topology[order.snapshot]["epoch"]
    versions = open_pipeline(b).deciding
    versions.load_committed()
    held = DeltaTable(str(tmp_path / "b"), version=versions.version_of(record)).to_pyarrow_table(columns=["id"])
    assert sorted(held.column("id").to_pylist()) == list(range(1, 16)), "everything up to the marker, and nothing else"
    run_members(kafka, b)
    assert table_ids(b.sinks[0].location) == sample.ids


class Chain:
    """files -> a -> topic -> b, with a completed snapshot after the first file."""

    def __init__(
        self,
        folder: Path,
        kafka: KafkaServer,
        *,
        partitions: int = 2,
        config: Mapping[str, str] | None = None,
        **sink: Any,
    ) -> None:
        self.folder, self.kafka = folder, kafka
        self.topic = kafka.new_topic(partitions, **(config or {}))
        self.sample = SampleInput(folder / "in")
        brokers = f"{kafka.bootstrap},127.0.0.1:{kafka.proxied}" if "brokers" in sink else ""
        reader = topic_reader(folder, kafka, self.topic, brokers=brokers)
        self.members = [topic_writer(folder, kafka, self.topic, **sink), reader]
        self.sample.add("f1.json", 5)
        self.run()
        self.snapshots = open_snapshots(folder, self.members)
        self.id = self.take()
        self.then = Counter(self.sample.ids)

    @property
    def sink(self) -> str:
        return self.members[0].sinks[1].name

    def run(self, *members: PipelineOptions) -> None:
        run_members(self.kafka, *(members or self.members))

    def take(self) -> str:
        order = self.snapshots.order(TIMEOUT)
        self.run()
        assert settle(self.snapshots, order) == (Outcome.COMMIT, "")
        return order.snapshot

    def restore(
        self, target: str, epochs: dict[str, int] | None = None, *, without: tuple[str, ...] = ()
    ) -> RestoreResult:
        snapshots = open_snapshots(self.folder, self.members)
        order = find_or_order(
            snapshots, target, epochs or find_snapshot_epochs(snapshots, target)[1], SystemClock(), RandomIds(),
            leave=[self.sink], without=without,
        )  # fmt: skip
        self.inconsistent = find_inconsistent(snapshots, order)
        return perform_restore(snapshots, order, RandomIds().new(), SystemClock(), print)

    def ids(self) -> list[Counter[int]]:
        return [table_ids(one.sinks[0].location) for one in self.members]

    def outside(self) -> Counter[int]:
        """What a reader sees that knows nothing of the topology."""
        rows = (json.loads(record.value or b"{}") for record in self.kafka.read(self.topic))
        return Counter(int(row["id"]) for row in rows if "id" in row)


@pytest.mark.parametrize("lanes", [1, 2])
def test_members_skip_what_a_restore_undid_and_outside_readers_see_it_again(
    tmp_path: Path, kafka: KafkaServer, lanes: int
) -> None:
    chain = Chain(tmp_path, kafka, lanes=lanes)
    a, b = chain.members
    chain.sample.add("f2.json", 5)
    chain.run()
    chain.sample.add("f3.json", 5)
    chain.run(a)  # b has not read it
    undone = chain.sample.ids - chain.then
    assert chain.restore(chain.id).decision is Decision.GO
    assert chain.ids() == [chain.then] * 2
    chain.run()
    assert chain.ids() == [chain.sample.ids] * 2
    assert chain.outside() == chain.sample.ids + undone
    chain.sample.add("f4.json", 5)
    chain.run()
    assert chain.ids() == [chain.sample.ids] * 2
    # The snapshot is kept, and can be restored again; what is void stays void.
    assert chain.restore(chain.id).decision is Decision.GO
    assert chain.ids() == [chain.then] * 2
    chain.run(b, a, b)
    assert chain.ids() == [chain.sample.ids] * 2


def test_a_topic_keeps_what_its_reader_had_not_read(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka)
    a, b = chain.members
    chain.sample.add("f2.json", 5)
    chain.run(a)
    order = chain.snapshots.order(TIMEOUT)
    with running(b) as paused:
        paused.pause()  # it records the snapshot, and reads nothing
        wait_until(lambda: order.snapshot in checkpoint_of(b).topology)
    chain.run(a)
    assert settle(chain.snapshots, order) == (Outcome.COMMIT, "")
    chain.sample.add("f3.json", 5)
    chain.run()
    assert chain.restore(order.snapshot).decision is Decision.GO
    assert chain.ids()[1] == chain.then
    chain.run(b)
    assert chain.ids()[1] == chain.ids()[0], "it reads what the topic held at the cut, and not what was undone"
    chain.run()
    assert chain.ids() == [chain.sample.ids] * 2


def test_a_reader_of_a_topic_that_stays_gets_the_undone_rows_again(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka)
    a, b = chain.members
    chain.sample.add("f2.json", 5)
    chain.run()
    read = Counter(chain.sample.ids)
    chain.sample.add("f3.json", 5)
    chain.run(a)  # b has not read it, and never reads it from the void offsets
    assert chain.restore(chain.id, without=("b",)).decision is Decision.GO
    (line,) = chain.inconsistent
    assert line.startswith("b has read rows of a that are undone: its own stay, and it gets them again")
    assert chain.ids() == [chain.then, read]
    chain.run(b)
    assert chain.ids() == [chain.then, read]
    chain.run()
    assert chain.ids() == [chain.sample.ids, chain.sample.ids + (read - chain.then)]


def test_a_topic_must_be_left_by_name(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka)
    chain.sample.add("f2.json", 5)
    chain.run()
    snapshots = open_snapshots(tmp_path, chain.members)
    order = find_or_order(snapshots, *find_snapshot_epochs(snapshots, chain.id), SystemClock(), RandomIds())
    with pytest.raises(RollbackRefusedError) as refused:
        check_plans(snapshots, plan_restore(snapshots, order), order)
    assert refused.value.hint is not None
    assert refused.value.hint.endswith(f"firnline topology restore {chain.id} --leave {chain.sink}")
    result = perform_restore(snapshots, order, RandomIds().new(), SystemClock(), print)
    assert result.decision is Decision.WITHDRAWN
    assert chain.ids() == [chain.sample.ids] * 2


def test_a_time_gives_the_newest_consistent_cut_over_a_topic(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka)
    a, _ = chain.members
    chain.sample.add("f2.json", 5)
    chain.run(a)
    before_b, then = datetime.now(UTC), Counter(chain.sample.ids)
    chain.run()
    after_b = datetime.now(UTC)
    chain.sample.add("f3.json", 5)
    chain.run()
    earlier, later = find_epochs_at(chain.snapshots, before_b), find_epochs_at(chain.snapshots, after_b)
    assert later == {"a": earlier["a"], "b": earlier["b"] + 1}
    assert chain.restore("then", later).decision is Decision.GO
    assert chain.ids() == [then] * 2
    chain.run()
    assert chain.ids() == [chain.sample.ids] * 2


def test_retention_of_a_topic_limits_what_can_be_restored(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka, config={"retention_ms": "3600000"})
    outcome = chain.snapshots.home.find_outcome(chain.id)
    assert outcome is not None
    assert outcome.restorable_until is not None
    assert datetime.fromisoformat(outcome.restorable_until) - datetime.fromisoformat(outcome.at) == timedelta(hours=1)

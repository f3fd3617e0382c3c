"""Savepoints of topologies whose channels are Kafka topics: ranges are copied, and a new topology starts from them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.clock import SystemClock
from firnline.errors import ConfigError, DamagedError, RollbackRefusedError
from firnline.history.topology import topic_files
from firnline.history.topology.graph import Topology, make_topology
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.savepoint import (
    SavedTopology,
    copy_all,
    create_topology_savepoint,
    start_from_savepoint,
)
from firnline.history.topology.snapshot import Snapshots
from firnline.history.topology.stopped import paused_run
from firnline.history.topology.topic_fill import TopicFill
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sources.kafka.position import Position
from firnline.spec.build import load_options
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.support.kafka import KafkaServer, running_kafka
from tests.support.kafka_sinks import kafka_sink
from tests.support.pipelines import checkpoint_of, pipeline_options
from tests.support.samples import SampleInput, make_old, table_ids
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

    def other(self, topic: str, **settings: Any) -> list[PipelineOptions]:
        """The same pipelines with tables and a topic of their own, on the same broker, and the same files."""
        found = make_members(self.folder.parent / "new", self.kafka, topic, self.lanes, **settings)
        found[0] = replace(found[0], sources=self.members[0].sources)
        return found


def make_members(folder: Path, kafka: KafkaServer, topic: str, lanes: int, **settings: Any) -> list[PipelineOptions]:
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


def test_void_and_aborted_records_are_not_copied_and_bytes_stay_as_they_are(
    tmp_path: Path, kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_files, "FILE_BYTES", 1)  # every batch is a file, every file a transaction
    chain = Chain(tmp_path / "old", kafka, partitions=2)
    chain.write("f1", "b", "c")
    chain.write("f2")
    first, then = chain.take(), Counter(chain.sample.ids)
    chain.write("f3")
    undone = chain.sample.ids - then
    chain.restore(first)
    chain.write("f4")  # f3 once more, and f4
    odd: dict[str, Any] = {"headers": {"h": b"\xff\x00", "i": b""}, "timestamp": 1_000_000_000_000, "partition": 1}
    kafka.produce(chain.topic, [b"\xfe\x00", None, b""], keys=[None, b"\x00k", b""], **odd)
    kafka.produce(chain.topic, [b"gone"] * 3, partition=0, transactional_id=f"x-{chain.topic}", abort=True)
    snapshot = chain.take()
    kafka.produce(chain.topic, [b"behind the cut"], partition=1)
    saved = chain.save(snapshot)
    (topic,) = saved.topics.values()
    unread = chain.sample.ids - chain.ids()[1]
    assert unread > undone
    assert topic.records == unread.total() + 3
    assert len(topic.files) >= 4, "void offsets divide the ranges"
    assert topic.oldest == 1_000_000_000_000
    new_topic = kafka.new_topic(2, retention_ms="-1")
    new = chain.other(new_topic)
    start(new, chain)
    records = kafka.read(new_topic)
    plain = [record for record in records if record.headers.keys() >= {"firnline-id"}]
    strange = [record for record in records if record not in plain]
    assert Counter(json.loads(record.value or b"")["id"] for record in plain) == unread
    assert [(r.partition, r.key, r.value, r.headers) for r in strange] == [
        (1, None, b"\xfe\x00", {"h": b"\xff\x00", "i": b""}),
        (1, b"\x00k", None, {"h": b"\xff\x00", "i": b""}),
        (1, b"", b"", {"h": b"\xff\x00", "i": b""}),
    ]
    assert [time_of(kafka, new_topic, r.partition, r.offset) for r in strange] == [1_000_000_000_000] * 3
    assert checkpoint_of(new[1]).positions["k"]["location"] == new_topic


def time_of(kafka: KafkaServer, topic: str, partition: int, offset: int) -> int:
    from confluent_kafka import TopicPartition

    consumer = kafka.consumer()
    try:
        consumer.assign([TopicPartition(topic, partition, offset)])
        message = consumer.poll(60)
        assert message is not None
        assert message.offset() == offset
        return int(message.timestamp()[1])
    finally:
        consumer.close()


@pytest.fixture(scope="module")
def saved_chain(tmp_path_factory: pytest.TempPathFactory, kafka: KafkaServer) -> Chain:
    """A savepoint; nobody changes it."""
    chain = Chain(tmp_path_factory.mktemp("saved") / "old", kafka, partitions=2).fill()
    chain.save(chain.take())
    return chain


def elsewhere(chain: Chain, folder: Path, topic: str, **settings: Any) -> list[PipelineOptions]:
    """A new topology in a folder of its own."""
    members = make_members(folder, chain.kafka, topic, chain.lanes, **settings)
    return [replace(members[0], sources=chain.members[0].sources), *members[1:]]


def test_a_topic_that_is_in_other_use_is_refused_by_name(
    tmp_path: Path, kafka: KafkaServer, saved_chain: Chain
) -> None:
    taken = kafka.new_topic(2)
    kafka.produce(taken, [b"mine"], partition=1)
    with pytest.raises(RollbackRefusedError, match=f"{taken}/1 offset 0 has a record that is not the savepoint's"):
        start(elsewhere(saved_chain, tmp_path / "taken", taken), saved_chain)
    assert kafka.values(taken) == [b"mine"]
    wide = kafka.new_topic(3)
    with pytest.raises(RollbackRefusedError, match="has 3 partitions, and the topic of the savepoint had 2"):
        start(elsewhere(saved_chain, tmp_path / "wide", wide), saved_chain)
    with pytest.raises(ConfigError, match="does not exist"):
        start(elsewhere(saved_chain, tmp_path / "none", f"{taken}-none"), saved_chain)
    brief = kafka.new_topic(2, retention_ms="1")
    with pytest.raises(RollbackRefusedError, match="the cluster would delete them before they are read"):
        start(elsewhere(saved_chain, tmp_path / "brief", brief), saved_chain)
    compacted = kafka.new_topic(2, cleanup_policy="compact")
    with pytest.raises(RollbackRefusedError, match=r"for 0 ms \(min.compaction.lag.ms\)"):
        start(elsewhere(saved_chain, tmp_path / "compacted", compacted), saved_chain)
    small = kafka.new_topic(2, max_message_bytes="100")
    with pytest.raises(RollbackRefusedError, match=r"a record of the savepoint has .* takes 100"):
        start(elsewhere(saved_chain, tmp_path / "small", small), saved_chain)
    assert not kafka.values(small)
    assert not list(tmp_path.glob("*/a")), "no table was touched"


def test_a_sink_of_the_old_topology_is_left_alone(tmp_path: Path, kafka: KafkaServer, saved_chain: Chain) -> None:
    topic = kafka.new_topic(2)
    new = elsewhere(saved_chain, tmp_path, topic)
    table, sink = new[0].sinks
    same = replace(sink, name=saved_chain.members[0].sinks[1].name)
    before = open_pipeline(saved_chain.members[0]).sink(same.name).load()
    with pytest.raises(RollbackRefusedError, match="is of a sink that is in use"):
        start([replace(new[0], sinks=(table, same)), *new[1:]], saved_chain)
    assert open_pipeline(saved_chain.members[0]).sink(same.name).load() == before
    assert not kafka.values(topic)


def test_a_record_of_somebody_else_among_ours_is_refused(
    tmp_path: Path, kafka: KafkaServer, saved_chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.new_topic(2)
    new = elsewhere(saved_chain, tmp_path, topic)
    write = TopicFill.write

    def write_and_be_disturbed(fill: TopicFill, *arguments: Any) -> None:
        write(fill, *arguments)
        kafka.produce(topic, [b"theirs"], partition=0)

    monkeypatch.setattr(TopicFill, "write", write_and_be_disturbed)
    with pytest.raises(RollbackRefusedError, match=f"{topic}/0 offset [0-9]+ has a record that is not the savepoint's"):
        start(new, saved_chain)
    assert not list(tmp_path.glob("*/_delta_log")), "no pipeline was restored"


def test_a_topic_is_created_if_the_sink_may(tmp_path: Path, kafka: KafkaServer, saved_chain: Chain) -> None:
    topic = f"{kafka.new_topic()}-new"
    new = elsewhere(saved_chain, tmp_path, topic, partitions=5)
    start(new, saved_chain)
    ids = saved_chain.ids()
    assert topic_rows(kafka, topic) == ids[0] - ids[1]
    assert {record.partition for record in kafka.read(topic)} <= {0, 1}
    run_members(kafka, *new)
    assert tables(new) == [saved_chain.sample.ids] * 3


def test_on_another_cluster_sinks_and_topics_have_the_names_that_they_had(tmp_path: Path, saved_chain: Chain) -> None:
    with running_kafka() as other:
        other.create_topic(saved_chain.topic, 2)
        new = make_members(tmp_path / "new", other, saved_chain.topic, 1)
        new[0] = replace(new[0], sources=saved_chain.members[0].sources)
        assert new[0].sinks[1].name == saved_chain.members[0].sinks[1].name
        start(new, saved_chain)
        run_members(other, *new)
        assert tables(new) == [saved_chain.sample.ids] * 3
        ids = saved_chain.ids()
        assert topic_rows(other, saved_chain.topic) == ids[0] - ids[1]


def test_a_damaged_file_of_a_range_is_refused(tmp_path: Path, kafka: KafkaServer, saved_chain: Chain) -> None:
    place = tmp_path / "save"
    shutil.copytree(saved_chain.place, place)
    file = max(place.glob("a/data/to-*/*.parquet"))
    data = file.read_bytes()
    topic = kafka.new_topic(2)
    new = make_topology(elsewhere(saved_chain, tmp_path / "new", topic))
    file.write_bytes(data[:-9] + b"?" + data[-8:])
    with pytest.raises(DamagedError, match=f"{file.name} of the savepoint is not what was saved"):
        start_from_savepoint(new, str(place), RUN)
    file.unlink()
    with pytest.raises(DamagedError, match=f"{file.name} of the savepoint is missing"):
        start_from_savepoint(new, str(place), RUN)
    assert not list((tmp_path / "new").glob("*/_delta_log")), "no pipeline was restored"
    file.write_bytes(data)  # and with the file, the same command goes on
    start_from_savepoint(new, str(place), RUN)
    ids = saved_chain.ids()
    assert topic_rows(kafka, topic) == ids[0] - ids[1]


def test_records_that_retention_took_are_named(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path / "old", kafka, partitions=1).fill()
    position = Position.from_json(checkpoint_of(chain.members[1]).positions["k"])
    ((_, behind),) = position.partitions()
    snapshot = chain.take()
    kafka.delete_records(chain.topic, 0, behind.next + 3)
    named = f"{chain.topic}/0 offsets {behind.next} to {behind.next + 2}"
    with pytest.raises(RollbackRefusedError, match=f"retention has taken .*: {named}"):
        chain.save(snapshot)
    assert not (chain.place / "topology.json").exists()
    run_members(kafka, chain.members[0])  # the writer is not disturbed


@pytest.mark.parametrize(("lag", "taken"), [("0", True), ("3600000", False)])
def test_records_that_compaction_may_have_taken_are_refused(
    tmp_path: Path, kafka: KafkaServer, lag: str, taken: bool
) -> None:
    config: dict[str, Any] = {"cleanup_policy": "compact", "min_compaction_lag_ms": lag}
    chain = Chain(tmp_path / "old", kafka, partitions=1, **config).fill()
    snapshot = chain.take()
    if not taken:
        assert sum(topic.records for topic in chain.save(snapshot).topics.values()) == 14
        return
    with pytest.raises(RollbackRefusedError, match="is compacted: records that readers have yet to read may be gone"):
        chain.save(snapshot)
    run_members(kafka, *chain.members)
    caught_up = chain.take()
    shutil.rmtree(chain.place)
    assert sum(topic.records for topic in chain.save(caught_up).topics.values()) == 0
    new_topic = kafka.new_topic(1)
    start(chain.other(new_topic), chain)
    assert not kafka.values(new_topic)


def test_copies_in_the_home_have_the_ranges_too(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path / "old", kafka, partitions=2).fill()
    then, snapshot = chain.ids(), chain.take()
    assert copy_all(chain.snapshots, {}, print) == []
    (view,) = [one for one in chain.snapshots.list() if one.id == snapshot]
    assert view.copy is not None
    kafka.delete_topic(chain.topic)
    new_topic = kafka.new_topic(2)
    new = chain.other(new_topic)
    start_from_savepoint(make_topology(new), view.copy, RUN)
    assert topic_rows(kafka, new_topic) == then[0] - then[1]
    run_members(kafka, *new)
    assert tables(new) == [chain.sample.ids] * 3


def test_topics_of_a_template_are_refused_by_name(tmp_path: Path, kafka: KafkaServer, saved_chain: Chain) -> None:
    writer, *readers = make_members(tmp_path, kafka, saved_chain.topic, 1)
    table, sink = writer.sinks
    assert isinstance(sink, KafkaSinkOptions)
    sink = replace(sink, topic=saved_chain.topic[:-1] + "{month}")
    snapshots = saved_chain.snapshots
    other = make_topology([replace(writer, sinks=(table, sink)), *readers])
    assert other.channels
    saved = next(view.id for view in snapshots.list())
    with pytest.raises(ConfigError, match="with a template"):
        create_topology_savepoint(Snapshots(other, snapshots.home, SystemClock(), RandomIds()), saved, str(tmp_path))


def test_a_chain_of_topics_without_tables_starts_anew(tmp_path: Path, kafka: KafkaServer) -> None:
    """files -> a -> topic -> b -> topic -> c: a and b decide in journals; b has read two files, c one."""
    sample = SampleInput(tmp_path / "in")

    def chain_in(folder: Path, *topics: str) -> list[PipelineOptions]:
        source = pipeline_options(str(tmp_path / "in"), "").sources
        a, b = (
            pipeline_options(
                "",
                "",
                name,
                home=str(folder / f"home-{name}"),
                sources=source if name == "a" else topic_reader(folder, kafka, topics[0], name=name).sources,
                sinks=(kafka_sink(kafka, topic, f"to-{topic}", key=("id",)),),
            )
            for name, topic in zip("ab", topics, strict=True)
        )
        return [a, b, topic_reader(folder, kafka, topics[1], name="c")]

    old = chain_in(tmp_path / "old", kafka.new_topic(2), kafka.new_topic(2))
    for number in range(3):
        sample.add(f"f{number}.json", 4)
        run_members(kafka, *old[: 3 - number])
    snapshots = open_snapshots(tmp_path / "old", old)
    order = snapshots.order(TIMEOUT)
    for one in old:
        with paused_run(one, LocalEngine(1), lambda _: None):
            while snapshots.read_records(order)[one.name].entry is None:
                SystemClock().sleep(0.02)
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    place = str(tmp_path / "save")
    saved = create_topology_savepoint(snapshots, order.snapshot, place)
    assert {name[0]: topic.records for name, topic in saved.topics.items()} == {"a": 4, "b": 4}
    topics = [kafka.new_topic(2), kafka.new_topic(2)]
    new = chain_in(tmp_path / "new", *topics)
    start_from_savepoint(make_topology(new), place, RUN, report=print)
    sample.add("f4.json", 4)
    run_members(kafka, *new)
    assert table_ids(new[2].sinks[0].location) == sample.ids
    assert topic_rows(kafka, topics[1]).total() == 12, "what c had not read, what b had not, and the new file"
    assert topic_rows(kafka, topics[0]).total() == 8, "what b had not read, and the new file"


def test_the_commands_copy_topics_and_start_from_the_copy_in_the_home(
    tmp_path: Path, kafka: KafkaServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`snapshots: {copy: true}`, and `restore --from-savepoint` of that copy, with pipeline files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    topics = {name: kafka.new_topic(2) for name in ("old", "new")}
    for folder, topic in topics.items():
        (tmp_path / folder).mkdir()
        cluster = {"type": "kafka", "brokers": kafka.bootstrap}
        to_topic = {**cluster, "name": f"to-{topic}", "topic": topic, "key": ["a"]}
        specs: dict[str, Any] = {
            "bronze": {"sources": {"rows": {"type": "files", "path": "../in"}}, "sinks": [to_topic]},
            "silver": {
                "sources": {"rows": {**cluster, "topics": [topic]}},
                "sinks": [{"type": "delta", "table": "out/silver"}],
            },
        }
        for name, body in specs.items():
            (tmp_path / folder / f"{name}.yml").write_text(json.dumps({"name": name, **body}))
        (tmp_path / folder / "topology.yml").write_text(
            "name: lake\npipelines: [bronze.yml, silver.yml]\nsnapshots: {include_stopped: true, copy: true}\n"
        )

    def run(*specs: str) -> None:
        for spec in specs:
            options = load_options(tmp_path / spec, environ={})
            run_members(kafka, options)

    def add(first: int) -> None:
        rows = "".join(json.dumps({"a": number}) + "\n" for number in range(first, first + 5))
        (tmp_path / "in" / f"{first}.ndjson").write_text(rows)
        make_old(tmp_path / "in" / f"{first}.ndjson")

    add(0)
    run("old/bronze.yml", "old/silver.yml")
    add(5)
    run("old/bronze.yml")
    assert run_command(["topology", "snapshot", "old/topology.yml", "--json"]) == 0
    copy = json.loads(capsys.readouterr().out)["copy"]
    words = ["topology", "restore", "--from-savepoint", copy, "new/topology.yml", "--yes"]
    assert run_command(words) == 0
    assert "done: every pipeline is at snapshot" in capsys.readouterr().out
    add(10)
    run("new/bronze.yml", "new/silver.yml")
    rows = DeltaTable(tmp_path / "new/out/silver").to_pyarrow_table(columns=["a"]).column("a").to_pylist()
    assert sorted(rows) == list(range(15))
    values = [json.loads(value or b"")["a"] for value in kafka.values(topics["new"])]
    assert sorted(values) == list(range(5, 15)), "what silver had not read, and the new file"
    assert run_command(words) == 0, "again: nothing is done twice"
    assert len(kafka.values(topics["new"])) == 10

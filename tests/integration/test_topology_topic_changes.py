"""Topics of a topology that others change: open transactions, topics that are created again, sinks set aside."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.errors import DamagedError, SinkWentBackError
from firnline.history.edits.sinks import SinkEdit
from firnline.history.topology.restore import find_epochs_at, find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.snapshot import announce_channels
from firnline.names import kafka_checkpoint_topic, topic_channels
from firnline.options import OutboxOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.known import find_away
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.integration.test_topology_topics import Chain
from tests.support.kafka import CALL_SECONDS, KafkaServer, proxy_before
from tests.support.kafka_sinks import QUICK
from tests.support.pipelines import checkpoint_of, run_once, run_to_end
from tests.support.processes import wait_until
from tests.support.samples import SampleInput, table_ids
from tests.support.topic_chains import run_members, topic_reader, topic_writer
from tests.support.topologies import TIMEOUT, open_snapshots, running, settle


@contextlib.contextmanager
def open_transaction(kafka: KafkaServer, topic: str, partitions: int) -> Iterator[None]:
    """Another producer's transaction, which is open in every partition of a topic; it is aborted at the end."""
    other = kafka.producer(transactional_id=f"other-{topic}", linger_ms=1)
    other.init_transactions(CALL_SECONDS)
    other.begin_transaction()
    for partition in range(partitions):
        other.produce(topic, b"{}", partition=partition)
    assert not other.flush(CALL_SECONDS)
    yield
    other.abort_transaction(CALL_SECONDS)


@pytest.mark.parametrize("rows", [1, 5])
def test_an_open_transaction_of_somebody_else_hides_no_undone_rows(
    tmp_path: Path, kafka: KafkaServer, rows: int
) -> None:
    chain = Chain(tmp_path, kafka, partitions=1)
    a, _ = chain.members
    chain.sample.add("f2.json", 5)
    chain.run()
    epochs, then = find_epochs_at(chain.snapshots, datetime.now(UTC)), Counter(chain.sample.ids)
    with open_transaction(kafka, chain.topic, 1):
        chain.sample.add("f3.json", rows)
        chain.run(a)  # nobody can read it yet
        assert chain.restore("then", epochs).decision is Decision.GO
        assert chain.ids() == [then] * 2
    chain.run()
    assert chain.ids() == [chain.sample.ids] * 2


def recreate(kafka: KafkaServer, topic: str, partitions: int) -> None:
    kafka.delete_topic(topic)
    kafka.create_topic(topic, partitions)


def test_what_was_void_in_a_topic_that_was_created_again_is_void_no_longer(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka)
    a, b = chain.members
    chain.sample.add("f2.json", 50)
    chain.run()
    assert chain.restore(chain.id).decision is Decision.GO
    recreate(kafka, chain.topic, 2)
    c = topic_reader(tmp_path, kafka, chain.topic, name="c")
    snapshots = open_snapshots(tmp_path, [a, b, c])
    announce_channels(snapshots.topology, snapshots.opened, snapshots.home)  # as an order or a restore does
    chain.run(a, c)
    assert table_ids(c.sinks[0].location) == chain.sample.ids - chain.then


def test_a_restore_is_withdrawn_if_a_topic_with_unread_rows_was_created_again(
    tmp_path: Path, kafka: KafkaServer
) -> None:
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
    recreate(kafka, chain.topic, 2)
    chain.sample.add("f3.json", 5)
    chain.run(a)
    before = chain.ids()
    result = chain.restore(order.snapshot)
    assert result.decision is Decision.WITHDRAWN
    assert f"{chain.topic}, which was deleted and created again" in result.reason
    assert chain.ids() == before


def test_a_cut_says_nothing_of_a_topic_that_was_created_again(tmp_path: Path, kafka: KafkaServer) -> None:
    """Whatever the new topic holds came after the cut, so all of it is void."""
    chain = Chain(tmp_path, kafka)
    a, b = chain.members
    recreate(kafka, chain.topic, 2)
    chain.sample.add("f2.json", 5)
    chain.run(a)
    assert chain.restore(chain.id, without=("b",)).decision is Decision.GO
    c = topic_reader(tmp_path, kafka, chain.topic, name="c")
    snapshots = open_snapshots(tmp_path, [a, b, c])
    announce_channels(snapshots.topology, snapshots.opened, snapshots.home)
    chain.run(a, c)
    assert table_ids(c.sinks[0].location) == chain.sample.ids - chain.then


def test_a_restore_is_withdrawn_if_a_sink_that_is_set_aside_holds_undone_rows(
    tmp_path: Path, kafka: KafkaServer
) -> None:
    with proxy_before(kafka) as proxy:
        chain = Chain(tmp_path, kafka, brokers=proxy.address, required=False, client=QUICK)
        a, b = chain.members
        chain.sample.add("f2.json", 5)
        chain.run(a)  # its rows are in the topic
        proxy.treat("refuse")
        proxy.cut()
        small = replace(a, outbox=OutboxOptions(max_bytes=1, keep=timedelta(0)))
        for number in (3, 4):
            chain.sample.add(f"f{number}.json", 5)
            run_to_end(small)
        proxy.heal()
        assert chain.sink in find_away(open_pipeline(a).load().checkpoint, a.followers)
        held = table_ids(b.sinks[0].location)
        result = chain.restore(chain.id)
        assert result.decision is Decision.WITHDRAWN
        assert f"firnline sinks resume {chain.sink} --accept-gap" in result.reason
        assert table_ids(b.sinks[0].location) == held
        SinkEdit(open_pipeline(a), "resume", chain.sink).perform("person")
        chain.run(a)
        assert chain.restore(chain.id).decision is Decision.GO
        chain.run(b)
        assert chain.ids() == [chain.then] * 2
        run_members(kafka, a, b)
        assert chain.ids() == [chain.sample.ids] * 2


def test_a_lost_checkpoint_topic_stops_readers_and_the_writer(tmp_path: Path, kafka: KafkaServer) -> None:
    """It alone says what is void: a reader would read undone rows, and the writer would deliver everything again."""
    chain = Chain(tmp_path, kafka)
    a, b = chain.members
    chain.sample.add("f2.json", 5)
    chain.run()
    assert chain.restore(chain.id).decision is Decision.GO
    there = chain.outside()
    checkpoints = kafka_checkpoint_topic("a", chain.sink)
    kafka.delete_topic(checkpoints)
    failed = run_once(b).result.error
    assert failed is not None
    assert "no longer exists" in failed.message
    assert chain.ids()[1] == chain.then
    refused = run_once(a).result.error
    assert isinstance(refused, SinkWentBackError)
    assert refused.hint is not None
    assert f"firnline sinks resume {chain.sink} --accept-gap" in refused.hint
    assert chain.outside() == there
    SinkEdit(open_pipeline(a), "resume", chain.sink).perform("person")
    chain.run(a)
    failed = run_once(b).result.error
    assert failed is not None
    assert "was deleted and created again" in failed.message, "the new one knows nothing of what is void"
    assert chain.ids()[1] == chain.then


def test_topics_that_a_template_may_not_name_are_no_part_of_a_snapshot(tmp_path: Path, kafka: KafkaServer) -> None:
    base = kafka.new_topic()
    other = f"{base}.legacy"
    kafka.create_topic(other)
    kafka.produce(other, ['{"id": 1001, "month": "x"}'])
    sample = SampleInput(tmp_path / "in")
    allowed = rf"{re.escape(base)}\.[a-z]*[0-9-]+"
    a = topic_writer(tmp_path, kafka, base, topics_allowed=allowed, partitions=1)
    to_topics = replace(a.sinks[1], topic=f"{base}.{{month}}")  # type: ignore[call-arg]
    a = replace(a, sinks=(a.sinks[0], to_topics))
    b = topic_reader(tmp_path, kafka, base)
    by_pattern = replace(b.sources[0], topics=(), pattern=rf"{re.escape(base)}\..*")  # type: ignore[call-arg]
    b = replace(b, sources=(by_pattern,))

    def run_all() -> None:
        run_to_end(a)
        for topic in kafka.admin.list_topics(timeout=CALL_SECONDS).topics:
            if topic.startswith(f"{base}."):
                kafka.await_markers(topic)
        run_to_end(b)

    sample.add("f1.json", 5)
    run_all()
    snapshots = open_snapshots(tmp_path, [a, b])
    order = snapshots.order(TIMEOUT)
    run_all()
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    then = table_ids(b.sinks[0].location)
    assert then == sample.ids + Counter([1001])
    kafka.produce(other, ['{"id": 1002, "month": "x"}'])
    sample.add("f2.json", 5)
    run_all()
    ordered = find_or_order(
        snapshots, *find_snapshot_epochs(snapshots, order.snapshot), SystemClock(), RandomIds(), leave=[to_topics.name]
    )
    result = perform_restore(snapshots, ordered, RandomIds().new(), SystemClock(), print)
    assert result.decision is Decision.GO
    assert table_ids(b.sinks[0].location) == then
    run_all()
    assert table_ids(b.sinks[0].location) == sample.ids + Counter([1001, 1002])


def test_a_damaged_list_of_channels_is_named_and_the_next_order_writes_it_again(
    tmp_path: Path, kafka: KafkaServer
) -> None:
    chain = Chain(tmp_path, kafka)
    a, b = chain.members
    storage = open_pipeline(b).storage
    (name,) = (stat.name.rsplit("/", 1)[-1] for stat in storage.list(topic_channels("b")))
    key = f"{topic_channels('b')}/{name}"
    storage.put(key, storage.get(key)[:-5])
    chain.sample.add("f2.json", 5)
    chain.run(a)
    failed = run_once(b).result.error
    assert isinstance(failed, DamagedError)
    assert failed.hint is not None
    assert key in failed.hint
    assert chain.ids()[1] == chain.then, "it reads nothing: what is void, and where cuts are, is unknown"
    chain.take()
    assert chain.ids() == [chain.sample.ids] * 2

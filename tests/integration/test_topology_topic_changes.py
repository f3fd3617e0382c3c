"""Topics of a topology that others change: open transactions, topics that are created again, sinks set aside."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from firnline.history.edits.sinks import SinkEdit
from firnline.history.topology.restore import find_epochs_at
from firnline.history.topology.snapshot import announce_channels
from firnline.options import OutboxOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.known import find_away
from firnline.topology.decide import Decision, Outcome
from tests.integration.test_topology_topics import Chain
from tests.support.kafka import CALL_SECONDS, KafkaServer, proxy_before
from tests.support.kafka_sinks import QUICK
from tests.support.pipelines import checkpoint_of, run_to_end
from tests.support.processes import wait_until
from tests.support.samples import table_ids
from tests.support.topic_chains import run_members, topic_reader
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

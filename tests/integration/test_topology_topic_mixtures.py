"""Mixtures over topics: added partitions, lanes that change, sinks that lag, older producers, two topologies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from firnline.clock import SystemClock
from firnline.history.topology.graph import make_topology
from firnline.history.topology.restore import find_epochs_at
from firnline.history.topology.snapshot import Snapshots
from firnline.names import kafka_transactional_id
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.storage import open_storage
from firnline.topology.decide import Decision, Outcome
from firnline.topology.records import TopologyHome
from firnline.types import RandomIds
from tests.integration.test_topology_topics import Chain
from tests.support.kafka import CALL_SECONDS, KafkaServer, proxy_before
from tests.support.kafka_sinks import QUICK
from tests.support.pipelines import checkpoint_of, run_to_end
from tests.support.processes import wait_until
from tests.support.samples import table_ids
from tests.support.topic_chains import run_members, topic_reader
from tests.support.topologies import TIMEOUT, open_snapshots, running, settle


def test_partitions_that_are_added_at_any_time_are_cut_and_void_like_others(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka, partitions=1)
    a, b = chain.members
    order = chain.snapshots.order(TIMEOUT)
    for total in (3, 5):  # the first addition is before the record of the writer, the second behind it
        kafka.add_partitions(chain.topic, total)
        chain.sample.add(f"to-{total}.json", 20)
        chain.run(a)
    chain.run(b)
    assert settle(chain.snapshots, order) == (Outcome.COMMIT, "")
    kafka.add_partitions(chain.topic, 7)
    chain.sample.add("to-7.json", 20)
    chain.run()
    for target in (order.snapshot, chain.id):
        assert chain.restore(target).decision is Decision.GO
        then = chain.ids()[0]
        chain.run(b)
        assert chain.ids() == [then] * 2
        chain.run()
        assert chain.ids() == [chain.sample.ids] * 2


def test_rows_that_are_gone_from_a_partition_that_the_reader_did_not_know_withdraw_a_restore(
    tmp_path: Path, kafka: KafkaServer
) -> None:
    chain = Chain(tmp_path, kafka, partitions=1)
    a, b = chain.members
    order = chain.snapshots.order(TIMEOUT)
    with running(b) as paused:
        paused.pause()  # it records the snapshot, and knows one partition
        wait_until(lambda: order.snapshot in checkpoint_of(b).topology)
    kafka.add_partitions(chain.topic, 2)
    chain.sample.add("f2.json", 20)
    chain.run(a)
    assert settle(chain.snapshots, order) == (Outcome.COMMIT, "")
    kafka.delete_records(chain.topic, 1, 2)
    result = chain.restore(order.snapshot)
    assert result.decision is Decision.WITHDRAWN
    assert f"{chain.topic}/1 offsets 0 to 1" in result.reason


def test_lanes_change_between_snapshots_of_epochs_in_parts(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka, partitions=3, lanes=2, max_transaction_bytes=600)
    taken: list[tuple[str, Counter[int]]] = []
    for number, lanes in enumerate((3, 1)):
        set_lanes(chain, lanes)
        chain.sample.add(f"g{number}.json", 20)
        taken.append((chain.take(), Counter(chain.sample.ids)))
        chain.sample.add(f"h{number}.json", 20)
        chain.run()
    for lanes, (target, then) in zip((2, 3), reversed(taken), strict=True):
        assert chain.restore(target).decision is Decision.GO
        chain.run(chain.members[1])
        assert chain.ids() == [then] * 2
        set_lanes(chain, lanes)
        chain.run()
        assert chain.ids() == [chain.sample.ids] * 2


def set_lanes(chain: Chain, lanes: int) -> None:
    a, b = chain.members
    sink = a.sinks[1]
    assert isinstance(sink, KafkaSinkOptions)
    chain.members = [replace(a, sinks=(a.sinks[0], replace(sink, lanes=lanes))), b]
    chain.snapshots = open_snapshots(chain.folder, chain.members)


def test_a_sink_that_lags_behind_the_target_of_a_restore_delivers_up_to_it(tmp_path: Path, kafka: KafkaServer) -> None:
    with proxy_before(kafka) as proxy:
        chain = Chain(tmp_path, kafka, brokers=proxy.address, required=False, client=QUICK)
        a, b = chain.members
        proxy.treat("refuse")
        proxy.cut()
        chain.sample.add("f2.json", 5)
        run_to_end(a)
        moment, then = datetime.now(UTC), Counter(chain.sample.ids)
        chain.sample.add("f3.json", 5)
        run_to_end(a)
        proxy.heal()
        epochs = find_epochs_at(open_snapshots(tmp_path, chain.members), moment)
        assert chain.restore("then", epochs).decision is Decision.GO
        chain.run(b)
        assert chain.ids() == [then] * 2
        chain.run()
        assert chain.ids() == [chain.sample.ids] * 2
        assert chain.outside() == chain.sample.ids, "what was undone was never delivered"


def test_a_producer_of_an_older_run_commits_nothing_after_a_restore(tmp_path: Path, kafka: KafkaServer) -> None:
    chain = Chain(tmp_path, kafka, lanes=2, partitions=1)
    a, b = chain.members
    chain.sample.add("f2.json", 5)
    chain.run(a)
    older = kafka.producer(transactional_id=kafka_transactional_id("a", chain.sink, 1))
    older.init_transactions(CALL_SECONDS)
    older.begin_transaction()
    older.produce(chain.topic, b'{"id": 5000, "month": "z"}')  # it has no checkpoint record yet
    assert not older.flush(CALL_SECONDS)
    assert chain.restore(chain.id).decision is Decision.GO
    with pytest.raises(KafkaException):
        older.commit_transaction(CALL_SECONDS)
    chain.run(b)
    assert chain.ids() == [chain.then] * 2
    chain.run()
    assert chain.ids() == [chain.sample.ids] * 2


def test_a_restore_of_one_topology_aborts_the_snapshot_of_another_that_shares_the_writer(
    tmp_path: Path, kafka: KafkaServer
) -> None:
    chain = Chain(tmp_path, kafka)
    a, b = chain.members
    c = topic_reader(tmp_path, kafka, chain.topic, name="c")
    run_members(kafka, c)
    home = TopologyHome(open_storage(str(tmp_path / "home2")), "second")
    second = Snapshots(make_topology([a, c]), home, SystemClock(), RandomIds())
    order = second.order(TIMEOUT)
    for number in (2, 3):
        chain.sample.add(f"f{number}.json", 5)
        chain.run(a)
    assert chain.restore(chain.id).decision is Decision.GO
    run_members(kafka, c)
    assert table_ids(c.sinks[0].location) == chain.then, "it is told of the channel by its own topology"
    outcome, reason = settle(second, order)
    assert outcome is Outcome.ABORT
    assert "a rollback since the order" in reason
    chain.run(a, b, c)
    assert [*chain.ids(), table_ids(c.sinks[0].location)] == [chain.sample.ids] * 3

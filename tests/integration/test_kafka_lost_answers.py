"""Answers of the broker that are lost, late or cut off, a broker that restarts, producers that are fenced: no guess."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from firnline import faults
from firnline.errors import FencedError, SinkError
from firnline.sinks.kafka import cluster as cluster_module
from firnline.sinks.kafka import lane as lane_module
from firnline.sinks.kafka.cluster import Cluster, Connection
from firnline.sinks.kafka.lane import Lane
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.testing.sinks import SinkDriver
from tests.support.kafka import KafkaServer, proxy_before, running_kafka
from tests.support.kafka_sinks import QUICK, SinkRuns, id_rows, kafka_sink, topic_ids
from tests.support.proxy import Proxy, Treatment, kafka_call

pytestmark = pytest.mark.kafka

CALLS = {
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "FindCoordinator": 10,
    "InitProducerId": 22,
    "AddPartitionsToTxn": 24,
    "EndTxn": 26,
    "DescribeConfigs": 32,
}
OF_A_COMMIT = ("Produce", "AddPartitionsToTxn", "EndTxn")
TREATMENTS: tuple[Treatment, ...] = ("drop", "delay", "reset", "freeze")


@pytest.fixture
def behind_proxy(kafka: KafkaServer) -> Iterator[tuple[KafkaServer, Proxy]]:
    with proxy_before(kafka) as proxy:
        yield kafka, proxy


def insist(run: SinkDriver, numbers: tuple[int, ...], heal: Callable[[], None] = lambda: None) -> None:
    """Commit rows as a run does: after an error ask the sink, then try again."""
    commit = run.stage(id_rows(*numbers))
    for _ in range(6):
        try:
            run.commit(commit)
            return
        except SinkError:
            heal()
        with contextlib.suppress(SinkError):
            found = run.sink.find_receipt(commit.checkpoint.epoch)
            if found is not None and found.attempt == commit.checkpoint.attempt:
                run._follow(commit)
                return
    raise AssertionError("never committed")


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_that_never_comes(
    call: str, treatment: Treatment, behind_proxy: tuple[KafkaServer, Proxy], tmp_path: Path
) -> None:
    server, proxy = behind_proxy
    topic = server.new_topic(2)
    runs = SinkRuns(tmp_path, kafka_sink(server, topic, brokers=proxy.address, client=QUICK))
    run = runs.begin()
    insist(run, (1, 2, 3))
    proxy.treat(treatment, on=kafka_call(CALLS[call]), seconds=0.5)
    try:
        if call in OF_A_COMMIT:
            insist(run, (4, 5, 6), proxy.heal)
            proxy.wait_until_hit(0)
        else:
            with contextlib.suppress(SinkError):
                run = runs.begin()
            proxy.wait_until_hit(0)
            proxy.heal()
            run = runs.begin()
            insist(run, (4, 5, 6))
    finally:
        proxy.heal()
    insist(run, (7,))
    run = runs.begin()
    assert run.epoch == 3
    insist(run, (8,))
    assert topic_ids(server, topic) == Counter(range(1, 9))


def test_a_broker_that_is_killed_in_mid_transaction(tmp_path: Path) -> None:
    with running_kafka() as server:
        topic = server.new_topic(2)
        for lanes in (1, 2):
            sink = kafka_sink(server, topic, client=QUICK, lanes=lanes)
            runs = SinkRuns(tmp_path / str(lanes), sink)
            run = runs.begin()
            first = lanes * 100
            insist(run, (first, first + 1, first + 2))
            killed: list[str] = []

            def restart(point: str, killed: list[str] = killed) -> None:
                if point == "kafka.commit.before" and not killed:
                    killed.append(point)
                    server.kill()
                    server.start()

            faults.followers.append(restart)
            try:
                insist(run, (first + 3, first + 4, first + 5))
            finally:
                faults.followers.remove(restart)
            assert killed
            insist(runs.begin(), (first + 6,))
        assert topic_ids(server, topic) == Counter([*range(100, 107), *range(200, 207)])


# -- bugs that others had, planted -----------------------------------------------------------------------


def fence_producer(options: KafkaSinkOptions) -> None:
    """Open another producer of lane 0, as a task does that was started twice: it claims nothing."""
    lane = Lane(Cluster(Connection.of(options, "demo", options.name)), 0)
    lane.open()
    lane.close()


def test_a_fenced_producer_is_not_a_fenced_run(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.new_topic(2)
    options = kafka_sink(kafka, topic)
    run = SinkRuns(tmp_path, options).begin()
    run.apply(id_rows(1, 2))
    fence_producer(options)
    run.apply(id_rows(3, 4))
    assert topic_ids(kafka, topic) == Counter([1, 2, 3, 4])

    def taken_for_a_fenced_run(connection: Connection, what: str, error: BaseException) -> SinkError:
        raise FencedError(f"{what}: {error}")

    fence_producer(options)
    monkeypatch.setattr(Connection, "error", taken_for_a_fenced_run)
    with pytest.raises(FencedError):
        run.apply(id_rows(5))


def lag_once(monkeypatch: pytest.MonkeyPatch, ends_before: dict[int, int]) -> None:
    """Let the broker answer once as it does before the end of a commit has reached the partition."""
    real, calls = Cluster._ends, iter([True])

    def ends(cluster: Cluster, partitions: dict[int, int], *, committed: bool) -> dict[int, int]:
        return ends_before if committed and next(calls, False) else real(cluster, partitions, committed=committed)

    monkeypatch.setattr(Cluster, "_ends", ends)


def test_a_head_behind_an_open_transaction_is_unknown_not_old(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = kafka_sink(kafka, kafka.new_topic(1))
    runs = SinkRuns(tmp_path, options)
    run = runs.begin()
    run.apply(id_rows(1))
    reader = Cluster(Connection.of(options, "demo", options.name))
    reader.read_heads([0])
    before = reader._ends({0: 0}, committed=True)
    run.apply(id_rows(2))
    with monkeypatch.context() as planted:
        lag_once(planted, before)
        found = reader.read_heads([0])[0]
        assert found is not None
        assert found.head.epoch == 2
    with monkeypatch.context() as planted:
        lag_once(planted, before)
        planted.setattr(cluster_module, "is_settled", lambda *_: True)
        found = reader.read_heads([0])[0]
        assert found is not None
        assert found.head.epoch == 1, "the planted bug shows"
    reader.close()


def test_an_open_transaction_is_waited_for_and_ended_by_the_next_claim(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(1)
    options = kafka_sink(kafka, topic)
    runs = SinkRuns(tmp_path, options)
    run = runs.begin()
    run.apply(id_rows(1))
    waiting = run.stage(id_rows(2))
    with pytest.raises(faults.InjectedFaultError), failing("kafka.commit.before"):
        run.commit(waiting)
    with pytest.raises(SinkError, match="is open, so the head is unknown"):
        run.sink.load()
    assert runs.begin().epoch == 1
    assert topic_ids(kafka, topic) == Counter([1])


@contextlib.contextmanager
def failing(point: str) -> Iterator[None]:
    def fail(name: str) -> None:
        if name == point:
            raise faults.InjectedFaultError(name)

    faults.followers.append(fail)
    try:
        yield
    finally:
        faults.followers.remove(fail)


def write_while_another_lane_is_open(kafka: KafkaServer, folder: Path, plant: Callable[[], None]) -> None:
    """Write in lane 0 while lane 1 has a transaction open, then read the head of lane 0."""
    options = kafka_sink(kafka, kafka.new_topic(2), lanes=2)
    SinkRuns(folder, options).begin().apply(id_rows(1, 2, 3))
    cluster = Cluster(Connection.of(options, "demo", options.name))
    main, other = Lane(cluster, 0), Lane(cluster, 1)
    main.open()
    other.open()
    assert main.record is not None
    assert other.record is not None
    assert other.producer is not None
    plant()
    try:
        with other.transaction() as transaction:
            transaction.put_record(other.record)
            other.producer.flush(30)
            main.write_record(main.record)
            assert cluster.read_heads([0]) == {0: main.record}
    finally:
        cluster.close()


def test_lanes_have_partitions_of_their_own(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share_a_partition() -> None:
        for module in (cluster_module, lane_module):
            monkeypatch.setattr(module, "partition_of", lambda _lane: 0)

    write_while_another_lane_is_open(kafka, tmp_path / "right", lambda: None)
    with pytest.raises(SinkError, match="the head is unknown"):
        write_while_another_lane_is_open(kafka, tmp_path / "shared", share_a_partition)

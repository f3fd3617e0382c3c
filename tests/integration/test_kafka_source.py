"""The Kafka source against a real broker: what every source promises, and what Kafka adds to it."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from firnline.clock import SystemClock
from firnline.errors import InputChangedError, SourceError, SourceGapError
from firnline.history.status import load_status
from firnline.kafka_client import security_settings
from firnline.options import (
    BatchOptions,
    FieldOptions,
    Home,
    OperatorOptions,
    PipelineOptions,
    SchemaOptions,
    TriggerOptions,
)
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.testing.local import LocalEngine, run_locally
from firnline.testing.sources import LIMITS, AddRecords, ReadSlice, SourceConformance, SourceDriver
from tests.support.duck import execute
from tests.support.kafka import KafkaServer
from tests.support.pipelines import Recorder, pipeline_options
from tests.support.processes import free_port, wait_until

pytestmark = pytest.mark.kafka


class TestKafkaSource(SourceConformance):
    max_batch = 20_000  # messages that are decoded together, twice

    @pytest.fixture
    def options(self, kafka: KafkaServer) -> KafkaSourceOptions:
        return KafkaSourceOptions("events", brokers=kafka.bootstrap, topics=(kafka.new_topic(),), group="conformance")

    @pytest.fixture
    def elsewhere(self, kafka: KafkaServer) -> KafkaSourceOptions:
        return KafkaSourceOptions("events", brokers=kafka.bootstrap, topics=(kafka.new_topic(),))

    @pytest.fixture
    def add_records(self, kafka: KafkaServer, options: KafkaSourceOptions) -> AddRecords:
        def add(records: Sequence[dict[str, Any]]) -> None:
            kafka.produce(options.topics[0], [json.dumps(record) for record in records])

        return add


def options_of(kafka: KafkaServer, topic: str, **settings: Any) -> KafkaSourceOptions:
    return KafkaSourceOptions("events", **{"brokers": kafka.bootstrap, "topics": (topic,), **settings})


def pipeline_of(source: KafkaSourceOptions, table: Path, **settings: Any) -> PipelineOptions:
    batch = BatchOptions(max_events=100_000, max_bytes=64 << 20, max_ms=200)
    return PipelineOptions("p", (source,), (DeltaSinkOptions("out", str(table)),), batch=batch, **settings)


def query(text: str) -> list[tuple[Any, ...]]:
    return list(execute(text).fetchall())


def rows_of(table: Path, columns: str = "*") -> list[tuple[Any, ...]]:
    """Rows of a Delta table, read by DuckDB: the files that delta-rs names."""
    from deltalake import DeltaTable

    files = [uri.removeprefix("file://") for uri in DeltaTable(str(table)).file_uris()]
    return query(f"SELECT {columns} FROM read_parquet({files}, union_by_name=true) ORDER BY ALL")


def test_values_become_rows_and_bad_ones_go_to_quarantine(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic()
    values = ['{"id": 1}', '{\n "id": 2,\n "new": "x"\n}', "", None, '{"id": "line\nfeed"}', "nothing", '{"id": 3.5}']
    kafka.produce(topic, values)
    result = run_locally(pipeline_of(options_of(kafka, topic, lineage=True, max_bad_ratio=1.0), tmp_path / "out"))
    assert result.records == 7
    rows = rows_of(tmp_path / "out", "_firnline_file, _firnline_record, id, new")
    assert rows == [(f"{topic}/0", 0, 1.0, None), (f"{topic}/0", 1, 2.0, "x"), (f"{topic}/0", 3, None, None),
                    (f"{topic}/0", 6, 3.5, None)]  # fmt: skip
    (folder,) = (tmp_path / "out" / "_firnline").glob("**/quarantine")
    bad = query(f"SELECT file, record, line, reason, raw FROM '{folder}/*.parquet' ORDER BY record")
    assert bad == [
        (f"{topic}/0", 2, 2, "not-json", b""),
        (f"{topic}/0", 4, 4, "not-json", b'{"id": "line\nfeed"}'),
        (f"{topic}/0", 5, 5, "not-json", b"nothing"),
    ]


def test_facts_about_records_become_columns(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(2, retention_ms=-1)  # of times long ago
    kafka.produce(topic, ['{"id": 1, "_key": "no"}'], keys=["a"], partition=1, headers={"h": "1"}, timestamp=86_400_000)
    kafka.produce(topic, [None], keys=["a"], partition=0)
    kafka.produce(topic, ['{"id": 2}'], keys=[b"\xff"], partition=0)
    include = ("key", "headers", "timestamp", "topic", "partition", "offset")
    source = options_of(kafka, topic, include=include, max_bad_ratio=1.0)
    for expected in (2, 3):
        run_locally(pipeline_of(source, tmp_path / "out"))
        rows = rows_of(tmp_path / "out", "id, _key, _topic, _partition, _offset, _headers, epoch_ms(_timestamp)")
        assert len(rows) == expected
        assert rows[0] == (1, "a", topic, 1, 0, [{"name": "h", "value": b"1"}], 86_400_000)
        assert (None, "a", topic, 0, 0) in [row[:5] for row in rows]
        kafka.produce(topic, ['{"id": 3}'], partition=0)  # the table knows the columns now
    assert ('{"_key":"no"}',) in rows_of(tmp_path / "out", "_rescued_data")


def test_raw_values_stay_bytes(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic()
    for values in ([b"\x00\xff", b"", None], [b"more"]):
        kafka.produce(topic, values)
        source = options_of(kafka, topic, value="raw", include=("offset",))
        run_locally(pipeline_of(source, tmp_path / "out"))
    assert rows_of(tmp_path / "out", "_offset, value") == [(0, b"\x00\xff"), (1, b""), (2, None), (3, b"more")]


def test_aborted_and_open_transactions_are_not_read(kafka: KafkaServer, tmp_path: Path) -> None:
    topic, ids = kafka.new_topic(), itertools.count()

    def values(count: int) -> list[str]:
        return [json.dumps({"id": next(ids)}) for _ in range(count)]

    name = f"{topic}-tx"
    kafka.produce(topic, values(3))
    kafka.produce(topic, values(2), transactional_id=name, abort=True)
    kafka.produce(topic, values(2), transactional_id=name)
    other = kafka.producer(transactional_id=f"{name}-open")
    other.init_transactions(60)
    other.begin_transaction()
    other.produce(topic, values(1)[0])
    other.flush(60)
    kafka.produce(topic, values(1))  # behind an open transaction: not stable yet
    pipeline = pipeline_of(options_of(kafka, topic), tmp_path / "out")
    run_locally(pipeline)
    assert [row[0] for row in rows_of(tmp_path / "out", "id")] == [0, 1, 2, 5, 6]
    other.commit_transaction(60)
    wait_until(lambda: len(kafka.read(topic)) == 7)  # the broker makes it stable a moment later
    run_locally(pipeline)
    assert [row[0] for row in rows_of(tmp_path / "out", "id")] == [0, 1, 2, 5, 6, 7, 8]


def test_many_partitions_are_read_by_few_tasks(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(6)
    for partition in range(6):
        kafka.produce(topic, [json.dumps({"p": partition, "n": n}) for n in range(4000)], partition=partition)
    pipeline = pipeline_of(options_of(kafka, topic, include=("partition", "offset")), tmp_path / "out")
    run_locally(pipeline)
    assert rows_of(tmp_path / "out", "count(*), count(DISTINCT (p, n)), count_if(p = _partition AND n = _offset)") == [
        (24_000, 24_000, 24_000)
    ]


def test_new_partitions_begin_at_their_beginning_and_a_pattern_finds_new_topics(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    name = f"grow-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(f"{name}.a")
    kafka.produce(f"{name}.a", ['{"id": 0}'])
    source = options_of(kafka, "", topics=(), pattern=rf"{name}\..*", start="latest")
    driver = SourceDriver(source)
    position = driver.source.start(None)
    pinned = driver.step(position)
    assert pinned is not None
    assert pinned.ids == []
    kafka.produce(f"{name}.a", ['{"id": 1}'])
    later = SourceDriver(source)  # another run has the same `latest`
    first = later.step(later.source.start(pinned.after))
    assert first is not None
    assert first.ids == [1]
    kafka.add_partitions(f"{name}.a", 2)
    kafka.create_topic(f"{name}.b")
    kafka.produce(f"{name}.a", ['{"id": 2}'], partition=1)
    kafka.produce(f"{name}.b", ['{"id": 3}'])
    later = SourceDriver(source)
    found = later.step(later.source.start(first.after))
    assert found is not None
    assert sorted(found.ids) == [2, 3]
    assert json.loads(json.dumps(later.source.replay(first.after, found.records))) == found.after


def test_records_of_a_new_partition_that_retention_took_are_a_gap(kafka: KafkaServer) -> None:
    topic = kafka.new_topic()
    kafka.produce(topic, ['{"id": 0}'])
    driver = SourceDriver(options_of(kafka, topic))
    first = driver.step(driver.source.start(None))
    assert first is not None
    kafka.add_partitions(topic, 2)
    kafka.produce(topic, ['{"id": 1}', '{"id": 2}'], partition=1)
    kafka.delete_records(topic, 1, 1)
    later = SourceDriver(options_of(kafka, topic))
    with pytest.raises(SourceGapError, match="offsets 0 to 0 were deleted before they were read"):
        later.step(later.source.start(first.after))
    forgiving = SourceDriver(options_of(kafka, topic, on_gap="continue"))
    found = forgiving.step(forgiving.source.start(first.after))
    assert found is not None
    assert found.ids == [2]
    assert json.loads(json.dumps(forgiving.source.replay(first.after, found.records))) == found.after


@pytest.mark.parametrize("start", ["latest", "2100-01-01T00:00:00Z"])
def test_what_comes_between_two_runs_that_begin_at_the_end_is_read(
    kafka: KafkaServer, tmp_path: Path, start: str
) -> None:
    topic = kafka.new_topic(2)
    kafka.produce(topic, ['{"id": 0}', '{"id": 1}'])
    pipeline = pipeline_of(options_of(kafka, topic, start=start), tmp_path / "out")
    run_locally(pipeline)  # finds nothing to read
    kafka.produce(topic, ['{"id": 2}', '{"id": 3}'])
    run_locally(pipeline)
    run_locally(pipeline)
    assert sorted(row[0] for row in rows_of(tmp_path / "out", "id")) == [2, 3]


def test_a_start_time_names_the_first_record(kafka: KafkaServer) -> None:
    topic = kafka.new_topic(retention_ms=-1)  # of times long ago
    for number in range(3):
        kafka.produce(topic, [json.dumps({"id": number})], timestamp=1_700_000_000_000 + 1000 * number)
    driver = SourceDriver(options_of(kafka, topic, start="2023-11-14T22:13:21+00:00"))
    found = driver.step(driver.source.start(None))
    assert found is not None
    assert found.ids == [1, 2]


def test_a_run_that_reads_once_ends_though_records_keep_coming(kafka: KafkaServer) -> None:
    topic = kafka.new_topic()
    kafka.produce(topic, [json.dumps({"id": n}) for n in range(4)])
    driver = SourceDriver(options_of(kafka, topic))
    position, ids = driver.source.start(None), list[int]()
    while (found := driver.step(position, replace(LIMITS, max_events=2))) is not None:
        position = found.after
        ids += found.ids
        kafka.produce(topic, [json.dumps({"id": 100 + n}) for n in range(4)])
    assert ids == [0, 1, 2, 3]


# -- what the source lost while nobody read -----------------------------------------------------------


def read_some(kafka: KafkaServer, **settings: Any) -> tuple[str, KafkaSourceOptions, Any, ReadSlice]:
    topic = kafka.new_topic()
    kafka.produce(topic, [json.dumps({"id": n}) for n in range(10)])
    source = options_of(kafka, topic, **settings)
    driver = SourceDriver(source)
    found = driver.step(driver.source.start(None), replace(LIMITS, max_events=4))
    assert found is not None
    return topic, source, found.after, found


def test_retention_that_overtook_is_named_and_passed_on_demand(
    kafka: KafkaServer, caplog: pytest.LogCaptureFixture
) -> None:
    topic, source, position, found = read_some(kafka)
    kafka.delete_records(topic, 0, 6)
    driver = SourceDriver(source)
    with pytest.raises(SourceGapError, match=rf"{topic}/0: offsets 4 to 5 were deleted") as caught:
        driver.step(driver.source.start(position))
    assert "on_gap: continue" in caught.value.hint
    assert driver.source.find_unavailable(position, found.records) == [
        f"{topic}/0 offset 0: deleted; its log starts at 6"
    ]
    driver = SourceDriver(replace(source, on_gap="continue"))
    rest = driver.step(driver.source.start(position))
    assert rest is not None
    assert rest.ids == [6, 7, 8, 9]
    assert "offsets 4 to 5" in caplog.text
    assert rest.records[0]["gap"]
    assert json.loads(json.dumps(driver.source.replay(position, rest.records))) == rest.after


def test_a_topic_that_was_created_again_is_another_one(kafka: KafkaServer) -> None:
    topic, source, position, found = read_some(kafka)
    kafka.delete_topic(topic)
    driver = SourceDriver(source)
    with pytest.raises(SourceError, match="does not exist"):
        driver.step(driver.source.start(position))
    kafka.create_topic(topic)
    kafka.produce(topic, [json.dumps({"id": 100 + n}) for n in range(20)])  # more than were read of the old one
    with pytest.raises(SourceGapError, match="deleted and created again"):
        driver.step(driver.source.start(position))
    assert driver.source.find_unavailable(position, found.records)
    driver = SourceDriver(replace(source, on_gap="continue"))
    rest = driver.step(driver.source.start(position))
    assert rest is not None
    assert rest.ids == list(range(100, 120))
    assert json.loads(json.dumps(driver.source.replay(position, rest.records))) == rest.after


def test_a_topic_that_is_created_again_between_plan_and_reading_is_noticed(kafka: KafkaServer) -> None:
    topic, source, position, _ = read_some(kafka)
    driver = SourceDriver(source)
    plan = driver.source.plan(driver.source.start(position), LIMITS)
    assert plan is not None
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    kafka.produce(topic, [json.dumps({"id": 100 + n}) for n in range(20)])
    with pytest.raises(SourceGapError):
        driver.read(plan)


def test_a_replay_that_differs_stops(kafka: KafkaServer) -> None:
    _, source, _, found = read_some(kafka)
    driver = SourceDriver(source)
    records = json.loads(json.dumps(found.records))
    assert driver.read(driver.source.replan(found.after, records, 1))[0] == found.rows
    records[0]["ranges"][0][3] += 1  # as if compaction had taken a record
    with pytest.raises(InputChangedError, match="read 5 records there, and now there are 4"):
        driver.read(driver.source.replan(found.after, records, 1))
    records[0]["ranges"][0][3] -= 1
    records[0]["ranges"][0][4] = "0" * 24
    with pytest.raises(InputChangedError, match="others"):
        driver.read(driver.source.replan(found.after, records, 1))


def test_a_compacted_topic_is_read_and_its_replay_stops(kafka: KafkaServer) -> None:
    topic = kafka.new_topic(
        cleanup_policy="compact", segment_ms=100, min_cleanable_dirty_ratio=0.01, delete_retention_ms=0,
        min_compaction_lag_ms=0,
    )  # fmt: skip
    kafka.produce(topic, [json.dumps({"id": n}) for n in range(5)], keys=["k"] * 5)
    driver = SourceDriver(options_of(kafka, topic))
    found = driver.step(driver.source.start(None))
    assert found is not None

    def is_compacted() -> bool:
        kafka.produce(topic, [json.dumps({"id": 100})], keys=["other"])  # closes the segment
        return len([r for r in kafka.read(topic) if r.offset < 5]) < 5

    wait_until(is_compacted)
    with pytest.raises(InputChangedError):
        driver.read(driver.source.replan(found.after, found.records, 1))
    later = SourceDriver(options_of(kafka, topic))
    assert all(number == 100 for one in later.steps(found.after) for number in one.ids)


def test_acknowledged_offsets_are_those_of_the_group(kafka: KafkaServer) -> None:
    from confluent_kafka import TopicPartition

    group = f"g-{uuid.uuid4().hex[:8]}"
    topic, source, position, _ = read_some(kafka, group=group)
    SourceDriver(source).source.acknowledge(position)
    consumer = kafka.consumer(group_id=group)
    assert consumer.committed([TopicPartition(topic, 0)], timeout=60)[0].offset == 4
    consumer.close()
    SourceDriver(replace(source, group="")).source.acknowledge(position)
    assert source.for_pipeline("p", Home("home")).group == group
    assert replace(source, group=None).for_pipeline("p", Home("home")).group == "firnline-p"


def test_brokers_that_do_not_answer_are_named_without_secrets(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firnline.sources.kafka.clients.CALL_SECONDS", 1.0)
    security = security_settings(None, {"mechanism": "PLAIN", "username": "u", "password": "hidden"})
    source = options_of(kafka, "t", brokers=f"127.0.0.1:{free_port()}", security=security)
    driver = SourceDriver(source)
    with pytest.raises(SourceError, match=r"127\.0\.0\.1") as caught:
        driver.step(driver.source.start(None))
    assert "hidden" not in str(caught.value)


# -- event time ---------------------------------------------------------------------------------------


class SetClock(SystemClock):
    """A clock whose time of day is set by hand."""

    minute = 0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=self.minute)


@pytest.mark.parametrize("every", [1, 100])
def test_a_silent_topic_no_longer_holds_windows_open_after_idle_after(
    kafka: KafkaServer, tmp_path: Path, every: int
) -> None:
    """Also where epochs are read again from the topics after each restart: what was idle then is idle again."""
    topics = {name: kafka.new_topic(2) for name in "ab"}
    schema = SchemaOptions((FieldOptions("k", "string"), FieldOptions("at", "timestamp")))
    sources = [
        KafkaSourceOptions(name, brokers=kafka.bootstrap, topics=(topic,), schema=schema)
        for name, topic in topics.items()
    ]
    settings = {
        "keys": ["k"], "time": "at", "window": {"size_us": 600_000_000}, "delay_us": 0, "emit": "changes",
        "aggregates": [{"name": "n", "function": "count"}], "before": False,
    }  # fmt: skip
    operator = OperatorOptions("windows", "aggregate", ("a", "b"), settings, idle_after=timedelta(minutes=30))
    options = pipeline_options(
        "", "", sources=sources, operators=[operator], trigger=TriggerOptions(every_epochs=every), shards=2,
        sinks=[DeltaSinkOptions("windows", str(tmp_path / "windows"), input="windows", write="upsert")],
    )  # fmt: skip
    clock = SetClock()

    def add(name: str, at: str) -> None:
        kafka.produce(topics[name], [json.dumps({"k": "x", "at": f"2026-01-01T{at}:00Z"})])

    def run(minute: int) -> int:
        """Run one epoch at a time of day, in a run that began at midnight; the windows that it closed."""
        clock.minute = 0
        recorder = Recorder()
        runner = Runner(open_pipeline(options, once=True, clock=clock), LocalEngine(1), recorder, once=True)
        clock.minute = minute
        assert runner.run().exit_code == 0
        return int(recorder.epochs[-1].operators["windows"]["removed"])

    for name in "ab":
        add(name, "10:01")
    run(0)
    for minute, at, removed, idle in ((1, "11:01", 0, []), (30, "12:01", 0, []), (31, "13:01", 3, ["b"])):
        add("a", at)
        assert run(minute) == removed
        (status,) = load_status(open_pipeline(options)).operators
        assert list(status.idle_inputs) == idle
    add("b", "13:02")
    run(32)
    assert list(load_status(open_pipeline(options)).operators[0].idle_inputs) == []

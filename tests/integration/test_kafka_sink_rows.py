"""What a Kafka sink writes: headers, templates, bad rows, control records; and what it refuses before it writes."""

from __future__ import annotations

import builtins
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import (
    BadRowError,
    CommitUnknownError,
    ConfigError,
    FencedError,
    MissingExtraError,
    SinkError,
    SinkWentBackError,
    error_report,
)
from firnline.history.dead_letters import load_dead_letters
from firnline.history.edits.rollback import Rollback
from firnline.names import kafka_checkpoint_topic
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.dead_letters import list_dead_letters, read_letters
from firnline.sinks.kafka.cluster import Cluster
from firnline.sinks.kafka.delivery import LaneEpoch, check_reports, run_lane, write_lane
from firnline.sinks.kafka.kind import open_sink
from firnline.sinks.kafka.lane import Lane
from firnline.types import Delivery
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import SinkRuns, id_rows, kafka_sink, table_and_topic, topic_ids
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.kafka


def test_headers_name_row_epoch_and_origin(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, kafka: KafkaServer
) -> None:
    topic = kafka.new_topic(2)
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, kafka_sink(kafka, topic)))
    options = replace(options, sources=(replace(options.sources[0], lineage=True),))
    for number in (1, 2):
        sample.add(f"f{number}.json", 3)
    run_to_end(options)
    records = {json.loads(record.value or b"")["id"]: record for record in kafka.read(topic)}
    ids = [record.headers["firnline-id"].decode() for record in records.values()]
    assert len(set(ids)) == 6
    newest = records[6].headers
    assert (newest["firnline-pipeline"], newest["firnline-epoch"]) == (b"demo", b"2")
    assert newest["firnline-id"].startswith(b"demo/2/")
    assert newest["firnline-id"].endswith(b"/2")
    assert (newest["firnline-file"].endswith(b"f2.json"), newest["firnline-record"]) == (True, b"2")
    assert records[1].key == b"2026-02"


def test_keys_go_where_java_clients_put_them(kafka: KafkaServer, tmp_path: Path) -> None:
    """Partitions of three keys by Kafka's own DefaultPartitioner: toPositive(murmur2(key)) % 7."""
    topic = kafka.new_topic(7)
    run = SinkRuns(tmp_path, kafka_sink(kafka, topic, key=("k",))).begin()
    run.apply([{"id": n, "k": key} for n, key in enumerate(["21", "foobar", "a-little-bit-long-string"])])
    found = {record.key: record.partition for record in kafka.read(topic)}
    hashes = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    assert found == {key: (number & 0x7FFFFFFF) % 7 for key, number in hashes.items()}


def test_a_template_writes_to_many_topics_in_one_transaction(kafka: KafkaServer, tmp_path: Path) -> None:
    name = kafka.new_topic(1)
    kafka.create_topic(f"{name}.eu")
    options = kafka_sink(
        kafka,
        f"{name}.{{region}}",
        key=("id",),
        topics_allowed=r"t-.*\.(eu|us)",
        partitions=3,
        on_bad_row="dead_letter",
    )
    run = SinkRuns(tmp_path, options).begin()
    rows = [(1, "eu"), (2, "us"), (3, "a b"), (4, "cn"), (5, None), (6, "eu")]
    run.apply([{"id": number, "region": region} for number, region in rows])
    assert topic_ids(kafka, f"{name}.eu") == Counter([1, 6])
    assert topic_ids(kafka, f"{name}.us") == Counter([2]), "created, as the spec says"
    assert len(kafka.admin.list_topics(f"{name}.us", timeout=30).topics[f"{name}.us"].partitions) == 3
    letters = [
        letter
        for key in list_dead_letters(run.ledger.storage, "demo", run.sink.name)
        for letter in read_letters(run.ledger.storage, key)
    ]
    assert [letter.values["id"] for letter in letters] == [3, 4, 5]
    assert ["no name of a topic" in letters[0].reason, "topics_allowed" in letters[1].reason] == [True, True]
    assert "is null" in letters[2].reason


@pytest.mark.parametrize("lanes", [1, 3])
def test_bad_rows_stop_the_sink_or_become_dead_letters(kafka: KafkaServer, tmp_path: Path, lanes: int) -> None:
    topic = kafka.new_topic(2, max_message_bytes=2000)
    rows = [{**row, "text": "x" * (3000 if row["id"] == 3 else 3)} for row in id_rows(1, 2, 3, 4, 5)]
    options = kafka_sink(kafka, topic, lanes=lanes)
    run = SinkRuns(tmp_path, options).begin()
    commit = run.stage(rows)
    with pytest.raises(BadRowError, match=r"demo/1/numbers/2: the message has 3,\d+ bytes, and topic .* takes 2,000"):
        run.commit(commit)
    assert topic_ids(kafka, topic)[3] == 0
    lenient = kafka_sink(kafka, topic, options.name, lanes=lanes, on_bad_row="dead_letter")
    again = SinkRuns(tmp_path, lenient)
    again.begin()
    run = again.begin()
    assert run.epoch == 0
    run.commit(commit)  # the same decided epoch: with lanes, some of them hold it already
    assert topic_ids(kafka, topic) == Counter([1, 2, 4, 5])
    run.apply(id_rows(6))
    assert topic_ids(kafka, topic) == Counter([1, 2, 4, 5, 6])


def test_an_upsert_without_a_key_is_a_bad_row(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(1)
    run = SinkRuns(tmp_path, kafka_sink(kafka, topic, write="upsert")).begin()
    with pytest.raises(BadRowError, match="the key is null"):
        run.apply([*id_rows(1), {"id": 2, "month": None}])
    compacted = kafka.new_topic(1, cleanup_policy="compact")
    run = SinkRuns(tmp_path / "c", kafka_sink(kafka, compacted, key=())).begin()
    with pytest.raises(BadRowError, match="is compacted: it needs a key"):
        run.apply(id_rows(1))


def test_a_limit_that_is_lowered_during_a_run(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(1)
    run = SinkRuns(tmp_path, kafka_sink(kafka, topic)).begin()
    run.apply(id_rows(*range(1, 50)))
    set_limit(kafka, topic, 600)
    run.apply(id_rows(*range(50, 300)))
    assert topic_ids(kafka, topic) == Counter(range(1, 300))


def set_limit(kafka: KafkaServer, topic: str, limit: int) -> None:
    from confluent_kafka import admin

    found: Any = admin
    entry = found.ConfigEntry("max.message.bytes", str(limit), incremental_operation=found.AlterConfigOpType.SET)
    resource = found.ConfigResource(found.ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in kafka.admin.incremental_alter_configs([resource]).values():
        future.result(60)


def test_an_optional_sink_without_its_topic_stops_nobody_and_catches_up(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, kafka: KafkaServer
) -> None:
    topic = f"{kafka.new_topic()}-later"
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, kafka_sink(kafka, topic, required=False)))
    for number in range(3):
        sample.add(f"{number}.json", 5)
    run_to_end(options)
    assert table_ids(tmp_path / "table") == sample.ids
    kafka.create_topic(topic, 2)
    for _ in range(5):  # a run ends without waiting for an optional sink
        run_to_end(options)
        if topic_ids(kafka, topic) == sample.ids:
            break
    assert topic_ids(kafka, topic) == sample.ids


def test_a_rollback_that_leaves_the_topic_says_so_in_every_partition(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, kafka: KafkaServer
) -> None:
    topic = kafka.new_topic(2)
    sink = kafka_sink(kafka, topic, lanes=2)
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, sink))
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 3)
    run_to_end(options)
    Rollback(open_pipeline(options), 1, leave=[sink.name]).perform("person")
    run_to_end(options)
    controls = [record for record in kafka.read(topic) if record.key == b"firnline-control"]
    assert [record.partition for record in controls] == [0, 1]
    value = json.loads(controls[0].value or b"")
    assert (value["kind"], value["pipeline"], value["undone"]) == ("rollback", "demo", {"first": 2, "last": 3})
    assert controls[0].headers["firnline-control"] == b"rollback"
    undone = range(value["undone"]["first"], value["undone"]["last"] + 1)
    kept = [
        json.loads(record.value or b"")["id"]
        for record in kafka.read(topic)
        if record.key != b"firnline-control" and int(record.headers["firnline-epoch"]) not in undone
    ]
    assert Counter(kept) == sample.ids, "a reader that heeds control records has every row once"


# -- refused before anything is written ---------------------------------------------------------------


def test_check_proves_access(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(1)
    run = SinkRuns(tmp_path, kafka_sink(kafka, topic)).begin()
    run.sink.check()
    assert run.sink.capabilities.delivery is Delivery.EXACTLY_ONCE
    missing = SinkRuns(tmp_path / "m", kafka_sink(kafka, f"{topic}-none")).begin()
    with pytest.raises(SinkError, match="does not exist"):
        missing.sink.check()
    lanes = SinkRuns(tmp_path / "l", kafka_sink(kafka, topic, lanes=2)).begin()
    assert lanes.sink.capabilities.delivery is Delivery.EXACTLY_ONCE_PER_PART


def test_a_transaction_that_the_broker_would_not_allow_is_refused_at_start(kafka: KafkaServer, tmp_path: Path) -> None:
    options = kafka_sink(kafka, kafka.new_topic(), transaction_timeout_ms=3_600_000)
    with pytest.raises(ConfigError, match=r"transaction\.max\.timeout\.ms"):
        SinkRuns(tmp_path, options).begin()


def test_a_checkpoint_topic_that_forgets_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    options = kafka_sink(kafka, kafka.new_topic())
    kafka.create_topic(kafka_checkpoint_topic("demo", options.name), 1, cleanup_policy="delete")
    with pytest.raises(SinkError, match="the cluster may delete the checkpoint"):
        SinkRuns(tmp_path, options).begin()


def test_a_broker_that_is_away_is_an_error_of_the_sink(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firnline.sinks.kafka.cluster.CALL_SECONDS", 1.0)
    sink = kafka_sink(kafka, "anything", brokers="127.0.0.1:1", required=False)
    sample.add("1.json", 3)
    options = make_options(sinks=table_and_topic(tmp_path, sink))
    assert run_once(options).exit_code == 0
    assert table_ids(tmp_path / "table") == sample.ids


def test_without_the_library_the_command_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "confluent_kafka":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "confluent_kafka", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError) as caught:
        open_sink(kafka_sink(KafkaServer(Path("x")), "t"), None)  # type: ignore[arg-type]
    assert caught.value.hint == "pip install 'firnline[kafka]'"


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_checkpoint_topic_that_is_emptied_while_rows_are_written_went_back_and_fences_nobody(
    make_options: MakeOptions,
    sample: SampleInput,
    tmp_path: Path,
    kafka: KafkaServer,
    monkeypatch: pytest.MonkeyPatch,
    lanes: int,
) -> None:
    """The run goes on, and delivers again what the sink lost; the topic of the rows was emptied with it."""
    topic = kafka.new_topic(1)
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, kafka_sink(kafka, topic, lanes=lanes)))
    names = [topic, kafka_checkpoint_topic("demo", options.sinks[1].name)]
    emptied: list[str] = []

    def empty() -> None:
        for name, partitions in zip(names, (1, lanes), strict=True):
            kafka.delete_topic(name)
            kafka.create_topic(name, partitions, cleanup_policy="compact" if name != topic else "delete")
            emptied.append(name)

    def write_one(lane: Lane, cluster: Cluster, epoch: LaneEpoch) -> None:
        if epoch.head.epoch == 2 and not emptied:
            lane.close()  # its producer failed: the record must be read again
            empty()
        write_lane(lane, cluster, epoch)

    def run_task(task: dict[str, Any]) -> dict[str, Any]:
        if task["epoch"]["head"]["epoch"] == 2 and not emptied:
            empty()
        return run_lane(task)

    monkeypatch.setattr("firnline.sinks.kafka.sink.write_lane", write_one)
    monkeypatch.setattr("firnline.sinks.kafka.kind.run_task", run_task)
    for number in (1, 2):
        sample.add(f"f{number}.json", 5)
    run_to_end(options)
    assert emptied
    assert topic_ids(kafka, topic) == table_ids(tmp_path / "table") == sample.ids


def test_the_report_of_a_lane_keeps_the_kind_of_its_failure() -> None:
    reports = [
        {"lane": number, "failure": json.loads(json.dumps(error_report(error)))}
        for number, error in enumerate([SinkError("away"), CommitUnknownError("lost"), SinkWentBackError("empty")])
    ]
    with pytest.raises(SinkWentBackError, match="empty"):
        check_reports(reports)
    with pytest.raises(CommitUnknownError, match="lost"):
        check_reports(reports[:2])
    with pytest.raises(FencedError) as caught:
        check_reports([*reports, {"lane": 3, "failure": error_report(FencedError("taken over", generation=7))}])
    assert caught.value.fields["generation"] == 7


@pytest.mark.parametrize("limit", [4_000, 24_000_000])
def test_rows_about_as_large_as_a_topic_takes_are_delivered_or_dead_letters(
    make_options: MakeOptions, kafka: KafkaServer, tmp_path: Path, limit: int
) -> None:
    """The names that headers have count, and a large topic takes what the client does not send by default."""
    topic = kafka.new_topic(max_message_bytes=limit)
    sizes = range(limit - 600, limit + 100, 7) if limit < 10_000 else (10, limit - 1_000_000, limit + 1_000_000)
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"id": number, "text": "x" * size}) for number, size in enumerate(sizes, 1)]
    (tmp_path / "in" / "rows.json").write_text("\n".join(lines) + "\n")
    sinks = table_and_topic(tmp_path, kafka_sink(kafka, topic, key=(), on_bad_row="dead_letter"))
    options = make_options(name="p" * 100, sinks=sinks, max_record_bytes=2 * limit)
    run_to_end(options)
    dead = [one["values"]["id"] for one in load_dead_letters(open_pipeline(options))]
    assert dead
    delivered = topic_ids(kafka, topic)
    assert delivered + Counter(dead) == Counter(range(1, len(lines) + 1))
    assert len(delivered) >= len(lines) // 10

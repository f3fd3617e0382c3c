"""The Kafka source on real Spark: several tasks read ranges of the same partitions, and a killed run is taken up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.options import BatchOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from tests.support.duck import execute
from tests.support.kafka import KafkaServer
from tests.support.processes import KILLED, Launcher

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.kafka, pytest.mark.timeout(1200)]

WAIT, RECORDS = 400, 30_000


def test_tasks_read_offset_ranges_and_a_killed_run_is_taken_up(
    kafka: KafkaServer, launcher: Launcher, tmp_path: Path
) -> None:
    topic = kafka.new_topic(2)
    kafka.produce(topic, [json.dumps({"id": n}) for n in range(RECORDS)], partition=0)
    kafka.produce(topic, [json.dumps({"id": RECORDS + n}) for n in range(100)], partition=1)
    source = KafkaSourceOptions("events", brokers=kafka.bootstrap, topics=(topic,), include=("partition", "offset"))
    options = PipelineOptions(
        "spark-kafka",
        (source,),
        (DeltaSinkOptions("out", str(tmp_path / "out")),),
        batch=BatchOptions(max_events=25_000, max_ms=200),
        spark={"spark.master": "local[2]"},
    )
    ended = launcher.start(options, "delta.commit.after:1:kill", spark=True).wait(WAIT)
    assert ended.exit_code == KILLED
    assert launcher.start(options, spark=True).wait(WAIT).exit_code == 0
    files = [uri.removeprefix("file://") for uri in DeltaTable(str(tmp_path / "out")).file_uris()]
    rows = execute(f"SELECT _partition, _offset, id FROM read_parquet({files}) ORDER BY ALL").fetchall()
    assert rows == [(r.partition, r.offset, json.loads(r.value or b"")["id"]) for r in kafka.read(topic)]
    assert len(files) > 2, "several tasks wrote"

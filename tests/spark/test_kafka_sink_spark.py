"""Lanes of a Kafka sink on real Spark: each is written by a task, and a killed run is taken up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import kafka_sink, table_and_topic, topic_ids
from tests.support.pipelines import MakeOptions
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput, table_ids

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.kafka, pytest.mark.timeout(900)]

WAIT = 300


def test_tasks_write_lanes_and_a_killed_run_is_taken_up(
    kafka: KafkaServer, launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    topic = kafka.new_topic(2)
    sink = kafka_sink(kafka, topic, key=("id",), lanes=2)
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, sink))
    options = replace(options, spark={"spark.master": "local[2]"})
    for number in range(3):
        sample.add(f"{number}.json", 500)
    # The driver is killed after the tasks of the second epoch have written, before it knows.
    ended = launcher.start(options, "follower.commit.after:2:kill", spark=True).wait(WAIT)
    assert ended.exit_code == KILLED
    assert launcher.start(options, spark=True).wait(WAIT).exit_code == 0
    assert topic_ids(kafka, topic) == table_ids(tmp_path / "table") == sample.ids

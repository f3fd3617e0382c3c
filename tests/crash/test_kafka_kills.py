"""Runs that read Kafka topics are killed at every point of an epoch: no record is lost, and none is doubled."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.options import BatchOptions, CheckpointOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.testing.local import run_locally
from tests.support.duck import execute
from tests.support.kafka import KafkaServer
from tests.support.kills import kill_at_every_point

pytestmark = [pytest.mark.crash, pytest.mark.kafka]

PARTITIONS, EACH = 3, 40


@dataclass(frozen=True)
class World:
    bootstrap: str
    topic: str  # that nobody writes to any more: all worlds read the same
    table: str

    @property
    def options(self) -> PipelineOptions:
        source = KafkaSourceOptions(
            "events", brokers=self.bootstrap, topics=(self.topic,), include=("partition", "offset")
        )
        return PipelineOptions(
            f"p-{Path(self.table).name}-{self.topic}",
            (source,),
            (DeltaSinkOptions("out", self.table),),
            batch=BatchOptions(max_events=50, max_ms=1),
            checkpoint=CheckpointOptions(rollback_window=1),
        )


def run(world: World) -> None:
    run_locally(world.options, threads=1)


def fill(kafka: KafkaServer) -> str:
    """Make a topic with records of ended, aborted and no transactions."""
    topic = kafka.new_topic(PARTITIONS)
    for partition in range(PARTITIONS):
        ids = [json.dumps({"n": n}) for n in range(EACH)]
        kafka.produce(topic, ids[:10], partition=partition)
        kafka.produce(topic, ['{"n": -1}'], partition=partition, transactional_id=topic, abort=True)
        kafka.produce(topic, ids[10:], partition=partition, transactional_id=topic)
    return topic


def check(kafka: KafkaServer, world: World, where: str) -> None:
    run(world)
    files = [uri.removeprefix("file://") for uri in DeltaTable(world.table).file_uris()]
    rows = execute(f"SELECT _partition, n, _offset FROM read_parquet({files}) ORDER BY ALL").fetchall()
    expected = [(r.partition, json.loads(r.value or b"{}")["n"], r.offset) for r in kafka.read(world.topic)]
    assert rows == sorted(expected), where
    assert len(rows) == PARTITIONS * EACH, where


def test_a_kill_at_any_point_loses_and_doubles_nothing(kafka: KafkaServer, tmp_path: Path) -> None:
    topic, numbers = fill(kafka), itertools.count()

    def prepare() -> World:
        return World(kafka.bootstrap, topic, str(tmp_path / f"out-{next(numbers)}"))

    reached = kill_at_every_point(prepare, run, partial(check, kafka), most=1, helpers=False)
    assert {"stage.file.before", "delta.commit.before", "delta.commit.after", "kafka.acknowledge.before"} <= set(
        reached
    )

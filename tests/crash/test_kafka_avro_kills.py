"""Kills while a schema is registered and Avro values are written or read: every row once, each with its schema."""

from __future__ import annotations

import io
import json
from collections import Counter
from functools import partial
from pathlib import Path

import fastavro
import pytest

from firnline.options import PipelineOptions
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import kafka_sink, table_and_topic
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import MakeOptions, run_once
from tests.support.registry import running_registry
from tests.support.samples import SampleInput, table_ids

pytestmark = [pytest.mark.crash, pytest.mark.kafka]

POINTS = [f"{name}.{side}" for name in ("registry.register", "kafka.commit") for side in ("before", "after")]


def run(options: PipelineOptions) -> None:
    assert run_once(options).exit_code == 0


def test_killed_while_a_schema_is_registered(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, kafka: KafkaServer
) -> None:
    """The second file adds a column, hence a schema; an id in a topic always names a schema that is there."""
    sample.add("1.json", 30)
    sample.add("2.json", 30, more="x")
    worlds = iter(range(1000))
    with running_registry() as registry:

        def prepare() -> PipelineOptions:
            folder, topic = tmp_path / str(next(worlds)), kafka.new_topic(2)
            sink = kafka_sink(kafka, topic, value="avro", registry={"url": registry.url})
            return make_options(max_files=1, sinks=table_and_topic(folder, sink))

        def check(options: PipelineOptions, where: str) -> None:
            assert run_once(options).exit_code == 0, where
            table, sink = options.sinks
            topic = str(sink.topic)  # type: ignore[attr-defined]
            assert table_ids(Path(table.location)) == sample.ids, where
            assert read_ids(kafka, topic, registry.schemas) == sample.ids, where
            assert len(registry.versions(f"{topic}-value")) == 2, where

        reached = kill_at_every_point(prepare, partial(run), check, points=POINTS, most=in_proof(2))
    assert reached.keys() >= {"registry.register.before", "registry.register.after"}


def read_ids(kafka: KafkaServer, topic: str, schemas: dict[int, dict[str, str]]) -> Counter[int]:
    """Return how often each `id` is there, as fastavro reads it."""
    found: Counter[int] = Counter()
    for value in kafka.values(topic):
        assert value is not None
        schema = json.loads(schemas[int.from_bytes(value[1:5])]["schema"])
        record = fastavro.schemaless_reader(io.BytesIO(value[5:]), fastavro.parse_schema(schema), None)
        assert isinstance(record, dict)
        found[int(record["id"])] += 1
    return found

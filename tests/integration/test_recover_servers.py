"""A lost home is rebuilt from what real servers hold: PostgreSQL, Kafka and Redis, each named once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from firnline.history.edits.recover import Recovery
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.redis.options import RedisSinkOptions
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import kafka_sink, topic_ids
from tests.support.pipelines import MakeOptions, make_epochs, run_to_end
from tests.support.postgres_sink import TABLE, postgres_ids
from tests.support.redis import RedisServer
from tests.support.redis_sink import STREAM, redis_ids
from tests.support.samples import SampleInput

pytestmark = pytest.mark.kafka


def test_every_sink_serves(
    make_options: MakeOptions,
    sample: SampleInput,
    tmp_path: Path,
    postgres: str,
    kafka: KafkaServer,
    redis_server: RedisServer,
) -> None:
    topic = kafka.new_topic(3)
    sinks = (
        PostgresSinkOptions("copy", postgres, TABLE),
        kafka_sink(kafka, topic, lanes=2),
        RedisSinkOptions("cache", redis_server.url, **STREAM),
    )
    options = make_options(max_files=2, home=tmp_path / "home", sinks=sinks)
    make_epochs(sample, options, 1)
    for number, named in enumerate(sinks, start=1):
        sample.add(f"f{number}10.json", 5)
        run_to_end(options)
        shutil.rmtree(tmp_path / "home")
        sample.add(f"f{number}20.json", 5)
        plan, _ = Recovery(open_pipeline(options), named.name, processed=["*"]).perform("person")
        assert {one.becomes for one in plan.sinks} == {"in sync"}
    run_to_end(options)
    assert postgres_ids(postgres, TABLE) == sample.ids
    assert topic_ids(kafka, topic) == sample.ids
    assert redis_ids(redis_server, "stream") == sample.ids

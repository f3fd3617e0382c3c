"""Kafka sinks against a real broker: the conformance suite with one and with three lanes."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.kafka.sink import KafkaSink
from firnline.testing.sinks import OpenSink, ReadRows, SinkConformance
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import new_sink_name

pytestmark = pytest.mark.kafka


class KafkaConformance(SinkConformance):
    lanes = 1
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def topic(self, kafka: KafkaServer) -> str:
        return kafka.new_topic(3)

    @pytest.fixture
    def open_sink(self, kafka: KafkaServer, topic: str) -> OpenSink:
        options = KafkaSinkOptions(
            new_sink_name(), kafka.bootstrap, topic, key=("id",), lanes=self.lanes, **self.settings
        )
        return lambda context: KafkaSink(options, context)

    @pytest.fixture
    def read_rows(self, kafka: KafkaServer, topic: str) -> ReadRows:
        return lambda: [json.loads(value) for value in kafka.values(topic) if value is not None]


class TestOneLane(KafkaConformance):
    pass


class TestThreeLanes(KafkaConformance):
    lanes = 3


class TestRanges(KafkaConformance):
    settings: ClassVar[dict[str, Any]] = {"max_transaction_bytes": 150}


class TestUpsert(KafkaConformance):
    settings: ClassVar[dict[str, Any]] = {"write": "upsert"}
    writes_changes = True

    @pytest.fixture
    def read_rows(self, kafka: KafkaServer, topic: str) -> ReadRows:
        def read() -> list[dict[str, Any]]:
            latest = {record.key: record.value for record in kafka.read(topic)}
            return [json.loads(value) for value in latest.values() if value is not None]

        return read

"""The Kafka source: a task that reads a range of offsets, beside a bare consumer with the same decoder; and the latency
of small epochs."""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.cases import Row, World
from benchmarks.turns import in_turns, p50
from firnline.clock import monotonic
from firnline.ndjson.values import join_values
from firnline.options import BatchOptions, PipelineOptions
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.base import MAIN_PORT, Budget, Limits
from firnline.sources.columns import Columns
from firnline.sources.decoding import LineDecoder
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.sources.registry import open_reader, open_source
from firnline.testing.local import LocalEngine
from tests.support.kafka import KafkaServer, running_kafka

RECORDS, ROUNDS = 400_000, 7
EPOCHS, EVENTS = 30, 1000
AIM = 0.9


def kafka_source(world: World) -> list[Row]:
    """Records per second of one task, in turns with the bare consumer; then epochs of 1,000 events into a table."""
    count = max(1000, int(RECORDS * world.scale))
    with running_kafka() as server:
        topic = server.new_topic()
        server.produce(topic, (_record(n) for n in range(count)))
        consumer = server.consumer(isolation_level="read_committed")  # kept, as a worker keeps its own
        works = [lambda: _ours(server, topic, count), lambda: _bare(consumer, topic, count)]
        ours_ms, theirs_ms = in_turns(works, rounds=world.rounds(ROUNDS), each=1)
        ours, theirs = (count * 1000 / p50(times) for times in (ours_ms, theirs_ms))
        ratio = ours / theirs
        consumer.close()
        latencies = _latencies(server, world.folder / "kafka-latency", world.rounds(EPOCHS))
    tail = statistics.quantiles(latencies, n=20)[-1] if len(latencies) > 1 else latencies[0]
    return [
        Row("kafka source: records", round(ours), "per s", round(theirs), ratio, f">= {AIM:g}x", ratio >= AIM),
        Row("kafka source: 1,000 events to a visible row, p50", round(p50(latencies)), "ms"),
        Row("kafka source: 1,000 events to a visible row, p95", round(tail), "ms"),
    ]


def _record(number: int) -> str:
    place = {"name": f"customer {number % 1000}", "at": "2026-05-01T12:30:00Z"}
    return json.dumps({"id": number, **place, "price": number / 7, "tags": ["a", "b"]})


def _columns() -> dict[str, Columns]:
    return {MAIN_PORT: Columns(pa.schema([]), frozenset(), {})}


def _ours(server: KafkaServer, topic: str, count: int) -> None:
    source = open_source(KafkaSourceOptions("events", brokers=server.bootstrap, topics=(topic,)), once=True)
    limits = Limits(max_files=1, max_bytes=1 << 40, max_events=count, max_ms=1, max_output_files=1, parallelism=1)
    plan = source.plan(source.start(None), limits)
    assert plan is not None
    (split,) = plan.splits
    reader = open_reader("kafka", source.reader_settings(), split, _columns())
    schemas = {MAIN_PORT: pa.schema([])}
    read = sum(rows.batch.num_rows for group in reader.read(schemas, Budget(split)) for rows in group)
    reader.end()
    assert read == count


def _bare(consumer: Any, topic: str, count: int) -> None:
    from confluent_kafka import TopicPartition

    consumer.assign([TopicPartition(topic, 0, 0)])
    decoder = LineDecoder(pa.schema([]), _columns()[MAIN_PORT])
    read = 0
    while read < count:
        messages = consumer.consume(min(10_000, count - read), 1.0)
        block = join_values([message.value() for message in messages], np.arange(len(messages)))
        batch = decoder.decode(block).batch
        decoder.count(batch)
        read += batch.num_rows
    consumer.unassign()


class Commits(Observer):
    """Notes when epochs are committed."""

    def __init__(self) -> None:
        self.rows = self.epochs = 0
        self.changed = threading.Condition()

    def committed(self, facts: Any) -> None:
        with self.changed:
            self.rows += facts.records
            self.epochs += 1
            self.changed.notify_all()

    def wait_for_epochs(self, epochs: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.epochs >= epochs, 120), f"{self.epochs} of {epochs} epochs came"

    def wait_for(self, rows: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.rows >= rows, 120), f"{self.rows} of {rows} records came"


def _latencies(server: KafkaServer, folder: Path, epochs: int) -> list[float]:
    """Milliseconds from the acknowledgement of 1,000 events to their commit in a table, without Spark."""
    topic = server.new_topic()
    source = KafkaSourceOptions("events", brokers=server.bootstrap, topics=(topic,))
    batch = BatchOptions(max_events=100_000, max_bytes=64 << 20, max_ms=200)
    options = PipelineOptions("latency", (source,), (DeltaSinkOptions("out", str(folder)),), batch=batch)
    commits, found = Commits(), list[float]()
    runner = Runner(open_pipeline(options), LocalEngine(1), commits)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    for number in range(epochs + 1):
        server.produce(topic, [_record(n) for n in range(EVENTS)])
        began = monotonic()
        commits.wait_for(EVENTS * (number + 1))
        if number:
            found.append((monotonic() - began) * 1000)
        time.sleep(0.3)  # the run is idle again
    runner.stop()
    thread.join(60)
    return found

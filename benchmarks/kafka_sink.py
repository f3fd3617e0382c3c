"""The Kafka sink: rows of an epoch from the outbox into a topic, beside a plain loop with the same messages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from benchmarks.cases import Row, World
from benchmarks.turns import costs_in_turns, in_turns, p50
from firnline.checkpoint.ledger import Ledger
from firnline.ndjson import write
from firnline.sinks.kafka.encode import MessageEncoder
from firnline.sinks.kafka.kind import open_sink
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.shaping import ShapedRows
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, SinkDriver
from tests.support.kafka import KafkaServer, running_kafka

ROWS, ROUNDS, PARTITIONS = 200_000, 9, 4
AIM = 0.9
CALL_SECONDS = 120


def kafka_sink(world: World) -> list[Row]:
    """Rows per second: ours with the read of the outbox and the encoding, theirs with messages that are made."""
    write.warm_up()
    count = max(1000, int(ROWS * world.scale))
    start = datetime(2024, 5, 1, tzinfo=UTC)
    rows: list[dict[str, Any]] = [
        {
            "id": n,
            "name": f"customer {n}",
            "amount": n / 7,
            "city": f"c{n % 97}",
            "paid": n % 3 == 0,
            "at": start + timedelta(milliseconds=n),
        }
        for n in range(count)
    ]
    folder = world.folder / "kafka"
    folder.mkdir()
    with running_kafka() as server:
        topic = server.new_topic(PARTITIONS)
        ledger = Ledger(LocalStorage(str(folder)), PIPELINE)
        options = KafkaSinkOptions("copy", server.bootstrap, topic, key=("id",))
        driver = SinkDriver(lambda context: open_sink(options, context), ledger, generation=1)
        files, schema = driver.stage_rows(rows, "a" * 16)
        loop = _plain_loop(server, topic, rows, options)

        def ours() -> None:
            commit = driver.stage([])
            driver.commit(replace(commit, files=files, schema=schema))

        mine, theirs = costs_in_turns([ours, loop], rounds=world.rounds(ROUNDS))
        small = driver.stage_rows(rows[:1000], "b" * 16)

        def few() -> None:
            commit = driver.stage([])
            driver.commit(replace(commit, files=small[0], schema=small[1]))

        (few_ms,) = in_turns([few], rounds=world.rounds(20), each=1)
    shutil.rmtree(folder)
    return [
        _rate("rows", count, mine.wall_ms, theirs.wall_ms, "per s"),
        _rate("rows by CPU time of the process", count, mine.cpu_ms, theirs.cpu_ms, "per CPU s"),
        Row("kafka topic: an epoch of 1,000 rows, p50", round(p50(few_ms), 1), "ms"),
    ]


def _rate(what: str, rows: int, ours_ms: float, theirs_ms: float, unit: str) -> Row:
    ours, theirs = rows * 1000 / ours_ms, rows * 1000 / theirs_ms
    ratio = ours / theirs
    return Row(f"kafka topic: {what}", round(ours), unit, round(theirs), ratio, f">= {AIM:g}x", ratio >= AIM)


def _plain_loop(
    server: KafkaServer, topic: str, rows: list[dict[str, Any]], options: KafkaSinkOptions
) -> Callable[[], None]:
    """Return a loop that produces the same messages, encoded already, in one transaction."""
    producer = server.producer(
        transactional_id="plain-loop",
        acks="all",
        partitioner="murmur2_random",
        linger_ms=5,
        queue_buffering_max_messages=500_000,
        delivery_report_only_error=True,
    )
    producer.init_transactions(CALL_SECONDS)
    batch = pa.RecordBatch.from_pylist(rows)
    numbers = pa.array(range(len(rows)), pa.int64())
    values: list[bytes] = []
    keys: list[bytes] = []
    for part in MessageEncoder(options.own_shape()).encode(ShapedRows(batch, numbers, 0, len(rows))):
        assert part.keys is not None
        values += part.values.to_pylist()
        keys += part.keys.to_pylist()
    ids = [f"{PIPELINE}/1/numbers/{n}" for n in range(len(rows))]
    shared = [("firnline-pipeline", PIPELINE), ("firnline-epoch", "1")]

    def loop() -> None:
        producer.begin_transaction()
        for value, key, number in zip(values, keys, ids, strict=True):
            while True:
                try:
                    producer.produce(topic, value, key, headers=[("firnline-id", number), *shared])
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.commit_transaction(CALL_SECONDS)

    return loop

"""Pipelines with a Kafka sink, and what a `read_committed` reader finds of them."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from firnline.checkpoint.ledger import Ledger
from firnline.sinks.base import Sink, SinkContext
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.kafka.sink import KafkaSink
from firnline.storage import LocalStorage
from firnline.testing.sinks import SinkDriver
from tests.support.kafka import KafkaServer

QUICK = {"socket.timeout.ms": "3000", "reconnect.backoff.max.ms": "200"}


def new_sink_name() -> str:
    """Return a name that no other test uses: all of them share a broker."""
    return f"s-{uuid.uuid4().hex[:12]}"


def kafka_sink(server: KafkaServer, topic: str, name: str = "", *, brokers: str = "", **settings: Any) -> Any:
    """Return the options of a sink."""
    settings = {"key": ("month",), **settings}
    return KafkaSinkOptions(name or new_sink_name(), brokers or server.bootstrap, topic, **settings)


def table_and_topic(folder: Path, sink: KafkaSinkOptions) -> tuple[DeltaSinkOptions, KafkaSinkOptions]:
    """Return the sinks of a pipeline that decides in a table."""
    return DeltaSinkOptions("table", str(folder / "table")), sink


def topic_ids(server: KafkaServer, topic: str) -> Counter[int]:
    """Return how often each `id` is there; checks that the ids of one key only grow, as they do in the input."""
    found: Counter[int] = Counter()
    newest: dict[bytes | None, int] = {}
    for record in server.read(topic):
        assert record.value is not None
        number = int(json.loads(record.value)["id"])
        assert newest.get(record.key, 0) < number, f"{number} of {record.key!r} comes after {newest[record.key]}"
        newest[record.key] = number
        found[number] += 1
    return found


class SinkRuns:
    """Runs of one pipeline into one sink, one after the other, without an engine."""

    def __init__(self, folder: Path, options: KafkaSinkOptions) -> None:
        self._ledger = Ledger(LocalStorage(str(folder / "ledger")), "demo")
        self._options = options
        self._generation = 0

    def begin(self, options: KafkaSinkOptions | None = None) -> SinkDriver:
        """Begin another run, with other settings if they are given."""
        self._generation += 1
        chosen = options or self._options

        def open_sink(context: SinkContext) -> Sink:
            return KafkaSink(chosen, context)

        return SinkDriver(open_sink, self._ledger, generation=self._generation)


def id_rows(*ids: int) -> list[dict[str, Any]]:
    """Return rows with these ids; those of one month have one key."""
    return [{"id": number, "month": f"m{number % 3}"} for number in ids]

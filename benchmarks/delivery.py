"""Delivery: what the outbox costs on top of the same pipeline without it, how a sink that catches up slows the others,
and the latency of small epochs from topic to topic."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.cases import Row, World
from benchmarks.turns import costs_in_turns, p50
from firnline.clock import monotonic
from firnline.errors import SinkError
from firnline.jobs.engine import Engine
from firnline.options import BatchOptions, FollowerOptions, Home, PipelineOptions
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.base import Capabilities, SinkContext
from firnline.sinks.delta.options import DeltaSinkOptions, journal_in
from firnline.sinks.follower import EpochDelivery, Follower, FollowerHead
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.registry import KINDS
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.testing.local import LocalEngine
from firnline.types import Delivery
from tests.support.kafka import KafkaServer, running_kafka

ROUNDS = 7
OUTBOX_AIM = 1.15
SMALL_FILES, BEHIND, CATCH_UP_AIM = 60, 1000, 1.1
EPOCHS, EVENTS, LATENCY_AIM_MS = 30, 1000, 400


@dataclass(frozen=True, slots=True)
class DrainOptions(FollowerOptions):
    """A follower that reads its rows and keeps none; `is_down` makes it unreachable."""

    type: ClassVar[str] = "drain"

    is_down: bool = False


class Drain(Follower):
    """Costs what the outbox costs, and nothing else: its head is in the memory of this process."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.EXACTLY_ONCE, fed_from_outbox=True, has_columns=False)
    heads: ClassVar[dict[str, FollowerHead]] = {}

    def __init__(self, options: DrainOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        self._is_down = options.is_down

    def read_head(self) -> FollowerHead | None:
        if self._is_down:
            raise SinkError("away")
        return self.heads.get(f"{self.context.ledger.storage.root}/{self.name}")

    def swap_head(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        self.heads[f"{self.context.ledger.storage.root}/{self.name}"] = new

    def deliver(self, delivery: EpochDelivery) -> FollowerHead:
        for _ in delivery.rows.read():
            pass
        self.swap_head(delivery.head, delivery.final_head)
        return delivery.final_head


open_sink = Drain  # what the module of a kind has


def delivery(world: World) -> list[Row]:
    """The outbox, a sink that catches up, and the latency from topic to topic."""
    KINDS["drain"] = __name__
    try:
        return [*_outbox(world), _catch_up(world), *_latency(world)]
    finally:
        del KINDS["drain"]


class _Commits(Observer):
    """Notes when each epoch was committed."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def committed(self, facts: Any) -> None:
        self.times.append(monotonic())


def _run(options: PipelineOptions, observer: Observer | None = None, engine: Engine | None = None) -> None:
    result = Runner(open_pipeline(options, once=True), engine or LocalEngine(2), observer, once=True).run()
    assert result.exit_code == 0, result.error


def _outbox(world: World) -> list[Row]:
    """Large files into a table, alone and with a follower that takes the same rows."""
    source = FileSourceOptions("files", str(world.big_files), poll_interval_secs=0.1, min_age_secs=0)
    target = world.folder / "outbox"

    def ingest(*followers: FollowerOptions) -> None:
        shutil.rmtree(target, ignore_errors=True)
        Drain.heads.clear()
        _run(PipelineOptions("outbox", (source,), (DeltaSinkOptions("table", str(target)), *followers)))

    works = [lambda: ingest(DrainOptions("drain")), lambda: ingest()]
    ours, alone = costs_in_turns(works, rounds=world.rounds(ROUNDS))

    def row(what: str, mine: float, peer: float, unit: str) -> Row:
        ratio = mine / peer
        return Row(what, round(mine), unit, round(peer), ratio, f"<= {OUTBOX_AIM:g}x", ratio <= OUTBOX_AIM)

    name = "outbox: a table and a follower, beside the table alone"
    return [
        row(name, ours.wall_ms, alone.wall_ms, "ms"),
        row(f"{name}, CPU time", ours.cpu_ms, alone.cpu_ms, "CPU ms"),
    ]


def _catch_up(world: World) -> Row:
    """The time from commit to commit on Spark while an optional follower catches up, beside one in sync."""
    folder = world.folder / "catch-up"
    source = FileSourceOptions("files", str(folder / "in"), poll_interval_secs=0.05, min_age_secs=0)
    table = DeltaSinkOptions("table", str(folder / "table"))
    down = DrainOptions("drain", required=False, is_down=True)
    options = PipelineOptions("catch-up", (source,), (table, down), batch=BatchOptions(max_files=1))
    count, behind = max(3, int(SMALL_FILES * world.scale)), max(3, int(BEHIND * world.scale))
    (folder / "in").mkdir(parents=True)
    numbers = iter(range(10**6))

    def add(files: int) -> None:
        for _ in range(files):
            number = next(numbers)
            (folder / "in" / f"f{number:07}.json").write_text(f'{{"id": {number}}}\n')

    def measure() -> float:
        add(count)
        commits = _Commits()
        _run(replace(options, sinks=(table, replace(down, is_down=False))), commits, world.engine)
        return p50([(after - before) * 1000 for before, after in pairwise(commits.times)])

    add(behind)
    _run(options)  # the follower is away
    add(1)
    _run(options, engine=world.engine)  # Spark is warm
    catching_up = measure()
    in_sync = p50([measure() for _ in range(world.rounds(3))])
    ratio = catching_up / in_sync
    name = f"small epochs while a sink catches up {behind} of them, beside one in sync, p50"
    aim = f"<= {CATCH_UP_AIM:g}x"
    return Row(name, round(catching_up, 2), "ms", round(in_sync, 2), ratio, aim, ratio <= CATCH_UP_AIM)


def _latency(world: World) -> list[Row]:
    """Milliseconds from 1,000 acknowledged events in one topic to their commit in another."""
    with running_kafka() as server:
        times = _kafka_to_kafka(server, world.folder / "kafka-to-kafka", world.rounds(EPOCHS))
    tail = statistics.quantiles(times, n=20)[-1] if len(times) > 1 else times[0]
    middle = p50(times)
    aim = f"< {LATENCY_AIM_MS} ms"
    return [
        Row("kafka to kafka: 1,000 events, p50", round(middle), "ms", aim=aim, met=middle < LATENCY_AIM_MS),
        Row("kafka to kafka: 1,000 events, p95", round(tail), "ms"),
    ]


class _Delivered(Observer):
    """Notes which epoch a sink holds, and how many records were read up to each."""

    def __init__(self) -> None:
        self._records: dict[int, int] = {}
        self._total = 0
        self.delivered_records = 0
        self.changed = threading.Condition()

    def committed(self, facts: Any) -> None:
        self._total += facts.records
        self._records[facts.epoch] = self._total

    def delivered(self, sink: str, epoch: int) -> None:
        with self.changed:
            self.delivered_records = self._records.get(epoch, self.delivered_records)
            self.changed.notify_all()

    def wait_for(self, records: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.delivered_records >= records, 120), self.delivered_records


def _kafka_to_kafka(server: KafkaServer, folder: Path, epochs: int) -> list[float]:
    source, target = server.new_topic(), server.new_topic()
    options = PipelineOptions(
        "latency",
        (KafkaSourceOptions("events", brokers=server.bootstrap, topics=(source,)),),
        (KafkaSinkOptions("out", server.bootstrap, target, key=("id",)),),
        batch=BatchOptions(max_events=100_000, max_bytes=64 << 20, max_ms=200),
        journal=journal_in(Home(str(folder))),
    )
    seen, found = _Delivered(), list[float]()
    runner = Runner(open_pipeline(options), LocalEngine(1), seen)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    for number in range(epochs + 1):
        server.produce(source, [f'{{"id": {n}, "price": {n / 7}}}' for n in range(EVENTS)])
        began = monotonic()
        seen.wait_for(EVENTS * (number + 1))
        if number:
            found.append((monotonic() - began) * 1000)
        time.sleep(0.3)  # the run is idle again
    runner.stop()
    thread.join(60)
    return found

"""One pipeline with state into four targets, under random faults: Delta, Kafka, PostgreSQL and Redis agree with DuckDB.

Runs are killed, put to sleep while another takes over, and servers are killed and started again. The seed decides which
fault comes next and when; `FIRNLINE_SEED` repeats it, and `FIRNLINE_PROOF` makes it sixty faults.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from firnline.options import PipelineOptions
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.redis.options import RedisSinkOptions
from tests.support import duck
from tests.support.counters import CounterInput, counter_options, read_counts
from tests.support.kafka import KafkaServer, running_kafka
from tests.support.postgres import PostgresServer, running_postgres
from tests.support.processes import KILLED, Child, Launcher
from tests.support.proof import covered
from tests.support.redis import RedisServer, running_redis

pytestmark = [pytest.mark.crash, pytest.mark.kafka, pytest.mark.postgres, pytest.mark.redis, pytest.mark.timeout(3600)]

FAULTS = 60 if os.environ.get("FIRNLINE_PROOF") else 10
SEED = int(os.environ.get("FIRNLINE_SEED", "7"))
SAFE_TO_REPEAT = {3: "a server was away", 4: "an answer was lost", 5: "another run took over", KILLED: "killed"}
Counts = set[tuple[str, int, int, int]]


@dataclass(frozen=True)
class Servers:
    """The three servers of one test, which it kills."""

    kafka: KafkaServer
    postgres: PostgresServer
    redis: RedisServer


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(
            stack.enter_context(running_kafka()),
            stack.enter_context(running_postgres()),
            stack.enter_context(running_redis()),
        )


def pipeline(folder: Path, servers: Servers, topic: str) -> PipelineOptions:
    """Counts per key, upserted into all four; Redis is optional."""
    options = counter_options(folder / "in", folder / "table", attempts=20)
    keyed = {"input": "counters", "write": "upsert", "key": ("key",)}
    followers = (
        KafkaSinkOptions("events", servers.kafka.bootstrap, topic, **keyed),  # type: ignore[arg-type]
        PostgresSinkOptions("rows", servers.postgres.dsn, "counts", **keyed),  # type: ignore[arg-type]
        RedisSinkOptions("cache", servers.redis.url, mode="hash", required=False, **keyed),  # type: ignore[arg-type]
    )
    return replace(options, sinks=(*options.sinks, *followers))


def expected_counts(folder: Path) -> Counts:
    """What DuckDB counts in the input."""
    found = duck.execute(
        "select key, count(*), max(number), 0 from read_json(?, format='newline_delimited') group by key",
        [str(folder / "*.json")],
    ).fetchall()
    return {(str(key), int(rows), int(last), int(faults)) for key, rows, last, faults in found}


def topic_counts(kafka: KafkaServer, topic: str) -> Counts:
    """The last value of every key, and that no event is there twice and no count ever goes back."""
    newest: dict[str, dict[str, int]] = {}
    seen: set[bytes] = set()
    for record in kafka.read(topic):
        assert record.headers["firnline-id"] not in seen, f"{record.headers['firnline-id']!r} is there twice"
        seen.add(record.headers["firnline-id"])
        value = json.loads(record.value or b"")
        assert newest.get(value["key"], {"rows": 0})["rows"] < value["rows"], "a count went back"
        newest[value["key"]] = value
    return {(str(v["key"]), v["rows"], v["last"], v["faults"]) for v in newest.values()}


def postgres_counts(server: PostgresServer) -> Counts:
    with psycopg.connect(server.dsn) as connection:
        found = connection.execute("select key, rows, last, faults from counts").fetchall()
    assert len({row[0] for row in found}) == len(found), "a key is there twice"
    return {(str(row[0]), int(row[1]), int(row[2]), int(row[3])) for row in found}


def redis_counts(server: RedisServer) -> Counts:
    found: Counts = set()
    with closing(server.client()) as client:
        for name in client.scan_iter("cache:*"):
            held: Any = client.hgetall(name)
            row = {key.decode(): value.decode() for key, value in held.items()}
            found.add((row["key"], int(row["rows"]), int(row["last"]), int(row["faults"])))
    return found


class Chaos:
    """Applies one fault after the other to a run and its servers."""

    def __init__(self, launcher: Launcher, options: PipelineOptions, servers: Servers, draw: random.Random) -> None:
        self._launcher = launcher
        self._options = options
        self._servers = servers
        self._draw = draw

    def apply(self) -> str:
        """Start a run, do something to it or to a server, and see that it ends as it may."""
        faults: dict[str, Callable[[Child], None]] = {
            "kill the run": self._kill,
            "sleep while another run takes over": self._sleep,
            "restart PostgreSQL": lambda child: self._restart(self._servers.postgres, child),
            "restart Redis": lambda child: self._restart(self._servers.redis, child),
            "Redis stays away": self._lose_redis,
            "restart Kafka": lambda child: self._restart(self._servers.kafka, child),
        }
        weights = [6, 3, 3, 2, 2, 1]
        name = self._draw.choices(list(faults), weights)[0]
        child = self._launcher.start(self._options, threads=2)
        time.sleep(self._draw.uniform(0.1, 1.5))  # into whatever the run does then
        faults[name](child)
        covered["faults of servers and runs"] += 1
        return name

    def _kill(self, child: Child) -> None:
        child.signal(signal.SIGKILL)
        self._end(child)

    def _sleep(self, child: Child) -> None:
        child.signal(signal.SIGSTOP)
        other = self._launcher.start(self._options, threads=2)
        self._end(other)
        child.signal(signal.SIGCONT)
        self._end(child)

    def _restart(self, server: KafkaServer | PostgresServer | RedisServer, child: Child) -> None:
        server.kill()
        time.sleep(self._draw.uniform(0, 0.5))
        server.start()
        self._end(child)

    def _lose_redis(self, child: Child) -> None:
        self._servers.redis.kill()
        self._end(child)
        self._servers.redis.start()

    def _end(self, child: Child) -> None:
        ended = child.wait(timeout=300)
        assert ended.exit_code == 0 or ended.exit_code in SAFE_TO_REPEAT, ended


def test_four_targets_agree_whatever_fails(servers: Servers, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    sample = CounterInput(tmp_path / "in", seed=SEED)
    topic = servers.kafka.new_topic(partitions=3)
    options = pipeline(tmp_path, servers, topic)
    launcher = Launcher(tmp_path / "children")
    chaos = Chaos(launcher, options, servers, draw)
    faults: list[str] = []
    for _ in range(FAULTS):
        sample.add(rows=draw.randint(5, 60), files=draw.randint(1, 3))
        faults.append(chaos.apply())
    told = f"repeat: FIRNLINE_SEED={SEED}; {faults}"
    launcher.run_until_done(options, forgiven={3: "a server has only just started", 5: "two runs met"})
    for _ in range(10):  # a run ends without waiting for the optional sink
        if redis_counts(servers.redis) == sample.expected():
            break
        launcher.run_until_done(options)
    expected = expected_counts(tmp_path / "in")
    assert expected == sample.expected(), told
    assert read_counts(tmp_path / "table") == expected, told
    assert topic_counts(servers.kafka, topic) == expected, told
    assert postgres_counts(servers.postgres) == expected, told
    assert redis_counts(servers.redis) == expected, told

"""Captured changes in followers that upsert, killed around their transactions: the target equals the database."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.options import FollowerOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaPartsOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sinks.redis.options import RedisSinkOptions
from tests.support.captured import ORDERS, captured, delta_rows, execute, query
from tests.support.kills import kill_at_every_point
from tests.support.pipelines import run_once, run_to_end
from tests.support.postgres import PostgresServer
from tests.support.redis import RedisServer
from tests.support.redis_sink import hashes

pytestmark = pytest.mark.crash

MOST_KILLS = None if os.environ.get("FIRNLINE_PROOF") else 1
LARGE = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 400) g)"
POINTS = {
    "postgres": ("postgres.commit.before", "postgres.commit.after"),
    "redis": ("redis.range.before", "redis.range.after"),
    "parts": ("delta.commit.after", "parts.head.after"),
    "moved": ("stage.file.after",),  # Delta: values that moved rows take along are staged before the commit
}


@dataclass(frozen=True)
class World:
    kind: str
    dsn: str
    folder: Path
    redis: str

    @property
    def options(self) -> PipelineOptions:
        keyed: dict[str, Any] = {"input": "db.orders", "write": "upsert", "key": ("id",)}
        sinks: dict[str, FollowerOptions] = {
            "postgres": PostgresSinkOptions("copy", self.dsn, "lake.orders", **keyed),
            "redis": RedisSinkOptions("copy", self.redis, mode="hash", **keyed),
            "parts": DeltaPartsOptions("copy", str(self.folder / "lake" / "{kind}"), **keyed),
        }
        options = captured(self.dsn, self.folder)
        return options if self.kind == "moved" else replace(options, sinks=(options.sinks[0], sinks[self.kind]))

    def held(self, server: RedisServer) -> list[Any]:
        """The rows of the target, by another reader."""
        if self.kind == "postgres":
            return query(self.dsn, "SELECT id, amount, note FROM lake.orders ORDER BY id")
        if self.kind == "parts":
            tables = [self.folder / "lake" / part for part in ("a", "b")]
            return sorted(row for table in tables for row in delta_rows(table, "id", "amount", "note"))
        if self.kind == "moved":
            return sorted(delta_rows(self.folder / "current", "id", "amount", "note"))
        found = hashes(server, "copy:*").values()
        return sorted((int(row["id"]), row["amount"], row["note"]) for row in found)

    def wanted(self) -> list[Any]:
        amount = "amount::text" if self.kind == "redis" else "amount"
        return query(self.dsn, f"SELECT id, {amount}, note FROM orders ORDER BY id")


def work(world: World) -> None:
    assert run_once(world.options).exit_code == 0


@pytest.mark.parametrize("kind", list(POINTS))
def test_killed_around_a_transaction(
    kind: str, postgres_server: PostgresServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    numbers = itertools.count()

    def prepare() -> World:
        postgres_server.clear()
        redis_server.clear()
        world = World(kind, postgres_server.dsn, tmp_path / str(next(numbers)), redis_server.url)
        execute(world.dsn, ORDERS, "ALTER TABLE orders ADD COLUMN kind text")
        run_to_end(world.options)
        execute(world.dsn, f"INSERT INTO orders SELECT g, g, {LARGE}, chr(97 + g % 2) FROM generate_series(1, 20) g")
        run_to_end(world.options)
        if kind == "moved":
            execute(world.dsn, "UPDATE orders SET id = id + 100 WHERE id < 4")
        elif kind != "redis":
            execute(world.dsn, "TRUNCATE orders")
            execute(world.dsn, f"INSERT INTO orders SELECT g, g, {LARGE}, chr(97 + g % 2) FROM generate_series(5, 9) g")
        execute(world.dsn, "UPDATE orders SET amount = amount + 100 WHERE id < 8", "DELETE FROM orders WHERE id = 6")
        return world

    def check(world: World, where: str) -> None:
        run_to_end(world.options)
        assert world.held(redis_server) == world.wanted(), where

    most = None if kind == "moved" else MOST_KILLS  # which of the files it is, only the order says
    reached = kill_at_every_point(prepare, partial(work), check, points=POINTS[kind], most=most, helpers=False)
    assert all(reached[point] for point in POINTS[kind])

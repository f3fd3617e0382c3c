"""A pipeline that captures MySQL or MariaDB, killed at its points: every change is there exactly once."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from firnline.options import BatchOptions, CheckpointOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import delta_rows, history
from tests.support.kills import kill_at_every_point
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_once, run_to_end

pytestmark = pytest.mark.crash

LONG = bool(os.environ.get("FIRNLINE_PROOF"))
# Those of the source, and where an epoch becomes true; tests of PostgreSQL and of the sinks kill at all others.
POINTS = ("spool.file.before", "spool.file.after", "spool.delete.after", "delta.commit.before", "delta.commit.after")


@dataclass(frozen=True)
class World:
    dsn: str
    folder: Path

    @property
    def options(self) -> PipelineOptions:
        return PipelineOptions(
            name="shop",
            sources=(MySqlSourceOptions("db", f"{self.dsn}/shop", ("orders",)),),
            sinks=(
                DeltaSinkOptions("history", str(self.folder / "history"), input="db.orders"),
                DeltaSinkOptions(
                    "current", str(self.folder / "current"), input="db.orders", write="upsert", key=("id",)
                ),
            ),
            batch=BatchOptions(max_events=10),
            checkpoint=CheckpointOptions(rollback_window=1),
        )


def work(world: World, *, runs: int) -> None:
    for _ in range(runs):
        assert run_once(world.options).exit_code == 0


def change(server: BinlogServer) -> None:
    values = ", ".join(f"({number}, {number}, 'x')" for number in range(1, 31))
    server.run(
        "USE shop", f"INSERT INTO orders VALUES {values}", "UPDATE orders SET amount = 0 WHERE id < 6",
        "FLUSH BINARY LOGS", "UPDATE orders SET id = 100 WHERE id = 7", "DELETE FROM orders WHERE id = 8",
    )  # fmt: skip


def test_killed_at_every_point(binlog_server: BinlogServer, tmp_path: Path) -> None:
    numbers = itertools.count()
    server = binlog_server

    def prepare() -> World:
        server.clear()
        server.run(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.orders (id bigint PRIMARY KEY, amount decimal(10,2), note varchar(500))",
        )
        world = World(server.dsn, tmp_path / str(next(numbers)))
        run_to_end(world.options)
        change(server)
        return world

    def check(world: World, where: str) -> None:
        run_to_end(world.options)
        server.run("INSERT INTO shop.orders VALUES (200, 1, 'after')")
        run_to_end(world.options)
        held = server.run("SELECT id, amount, note FROM shop.orders")
        assert delta_rows(world.folder / "current", "id", "amount", "note") == sorted(map(tuple, held), key=repr), where
        found = Counter(op for _, op in history(world.folder))
        assert found == {"insert": 32, "update": 5, "delete": 2}, where

    reached = kill_at_every_point(
        prepare, partial(work, runs=2), check, points=() if LONG else POINTS, most=None if LONG else 1, helpers=False
    )
    assert reached["spool.file.after"] >= 1

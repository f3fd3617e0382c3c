"""A pipeline that captures PostgreSQL, killed at every point that it reaches: every change is there exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.sources.cdc import snapshots, spooling
from tests.support.captured import ORDERS, captured, check_current, execute, history
from tests.support.kills import PROOF, kill_at_every_point
from tests.support.pipelines import run_once, run_to_end
from tests.support.postgres import PostgresServer

pytestmark = pytest.mark.crash

MOST_KILLS = None if PROOF else 1
# What a captured source writes, and when it becomes true; by default all other points are tried at the first start.
POINTS = (
    ()
    if PROOF
    else tuple(
        f"{call}.{side}"
        for call in ("spool.file", "spool.chunk", "spool.delete", "delta.commit", "epoch.record", "epoch.acknowledge")
        for side in ("before", "after")
    )
)


@dataclass(frozen=True)
class World:
    dsn: str
    folder: Path

    @property
    def options(self) -> PipelineOptions:
        return captured(self.dsn, self.folder, rollback_window=1)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "WAIT_SECONDS", 0.02)


def work(world: World, *, runs: int) -> None:
    """In a child: a run that is stopped ends its reader soon."""
    spooling.WAIT_SECONDS = 0.02
    for _ in range(runs):
        assert run_once(world.options).exit_code == 0


def change(dsn: str) -> None:
    execute(
        dsn,
        "INSERT INTO orders SELECT g, g, 'x' FROM generate_series(1, 30) g",
        "UPDATE orders SET amount = 0 WHERE id < 6",
        "UPDATE orders SET id = 100 WHERE id = 7",
        "DELETE FROM orders WHERE id = 8",
    )


def check(world: World, where: str) -> None:
    run_to_end(world.options)
    execute(world.dsn, "INSERT INTO orders VALUES (200, 1, 'after')")
    run_to_end(world.options)
    check_current(world.dsn, world.folder)
    assert Counter(op for _, op in history(world.folder)) == {"insert": 32, "update": 5, "delete": 2}, where


@pytest.mark.parametrize("first", [True, False], ids=["first start", "later"])
def test_killed_at_every_point(postgres_server: PostgresServer, tmp_path: Path, first: bool) -> None:
    """`first start`: the run makes publication and slot; what the database does comes after it."""
    numbers = itertools.count()

    def prepare() -> World:
        postgres_server.clear()
        execute(postgres_server.dsn, ORDERS)
        world = World(postgres_server.dsn, tmp_path / str(next(numbers)))
        if not first:
            run_to_end(world.options)
            change(world.dsn)
        return world

    def finish(world: World, where: str) -> None:
        if first:
            run_to_end(world.options)
            change(world.dsn)
        check(world, where)

    points = () if first else POINTS
    reached = kill_at_every_point(prepare, partial(work, runs=2), finish, points=points, most=MOST_KILLS, helpers=False)
    assert reached["postgres.slot.after" if first else "spool.file.after"] >= 1


def work_in_chunks(world: World, *, runs: int) -> None:
    snapshots.CHUNK_ROWS = 40  # in the process that is killed
    work(world, runs=runs)


def test_killed_at_every_point_while_tables_are_read(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """Rows that were there before, and changes of them between the runs."""
    numbers = itertools.count(1000)

    def prepare() -> World:
        postgres_server.clear()
        execute(postgres_server.dsn, ORDERS)
        world = World(postgres_server.dsn, tmp_path / str(next(numbers)))
        execute(world.dsn, "INSERT INTO orders SELECT g, g, 'old' FROM generate_series(201, 330) g")
        return world

    def finish(world: World, where: str) -> None:
        change(world.dsn)
        execute(world.dsn, "UPDATE orders SET amount = -1 WHERE id > 320", "DELETE FROM orders WHERE id = 250")
        run_to_end(world.options)
        check_current(world.dsn, world.folder)
        ids = [id_ for id_, op in history(world.folder) if op == "read"]
        assert len(ids) == len(set(ids)), where
        assert set(ids) >= set(range(251, 321)), where

    work = partial(work_in_chunks, runs=2)
    reached = kill_at_every_point(prepare, work, finish, points=POINTS, most=MOST_KILLS, helpers=False)
    assert reached["spool.chunk.after"] >= 1


@dataclass(frozen=True)
class Altered(World):
    @property
    def options(self) -> PipelineOptions:
        return captured(self.dsn, self.folder, rollback_window=1, on_ddl="resnapshot")


def test_killed_at_every_point_while_an_altered_table_is_read_again(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """The new column has its default in all rows, and the table was read again exactly once."""
    numbers = itertools.count(2000)

    def prepare() -> World:
        postgres_server.clear()
        execute(postgres_server.dsn, ORDERS, "INSERT INTO orders SELECT g, g, 'x' FROM generate_series(1, 100) g")
        world = Altered(postgres_server.dsn, tmp_path / str(next(numbers)))
        run_to_end(world.options)
        execute(
            world.dsn, "ALTER TABLE orders ADD COLUMN extra int DEFAULT 7", "UPDATE orders SET extra = 8 WHERE id = 3"
        )
        return world

    def finish(world: World, where: str) -> None:
        run_to_end(world.options)
        execute(world.dsn, "INSERT INTO orders VALUES (200, 1, 'after', 9)")
        run_to_end(world.options)
        check_current(world.dsn, world.folder, "id, amount, note, extra")
        assert Counter(op for _, op in history(world.folder)) == {"read": 200, "update": 1, "insert": 1}, where

    points = () if PROOF else ("delta.commit.before", "delta.commit.after", "spool.chunk.after")
    work = partial(work_in_chunks, runs=1)
    reached = kill_at_every_point(prepare, work, finish, points=points, most=MOST_KILLS, helpers=False)
    assert reached["spool.chunk.after"] >= 1

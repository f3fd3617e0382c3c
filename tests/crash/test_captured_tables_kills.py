"""One sink of all captured tables, killed at every step of a delivery and of a rollback: each equals the database."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.history.edits.rollback import Rollback
from firnline.options import BatchOptions, CheckpointOptions, Home, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, journal_in
from firnline.sources.postgres.options import PostgresSourceOptions
from tests.support.captured import delta_rows, execute, query
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import run_once, run_to_end
from tests.support.postgres import PostgresServer

pytestmark = pytest.mark.crash

MOST = in_proof(None)
LARGE = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 400) g)"
DELIVERY = ("parts.head", "follower.commit", "delta.create", "delta.commit", "delta.evolve", "stage.file")
SETTINGS: dict[str, dict[str, Any]] = {"upsert": {"write": "upsert"}, "append": {}}


@dataclass(frozen=True)
class World:
    dsn: str
    folder: Path
    write: str
    epoch: int = 0  # to go back to

    @property
    def options(self) -> PipelineOptions:
        sink = DeltaPartsOptions("lake", f"{self.folder}/lake/{{table}}", input="db.*", **SETTINGS[self.write])
        return PipelineOptions(
            name="shop",
            sources=(PostgresSourceOptions("db", self.dsn, ("*.*",)),),
            sinks=(sink,),
            batch=BatchOptions(max_events=1000),
            checkpoint=CheckpointOptions(rollback_window=64),
            journal=journal_in(Home(str(self.folder / "home"))),
        )

    def check(self, where: str) -> None:
        """Tables of the current state are what the database holds; of the history, no change is lost or doubled."""
        if self.write == "upsert":
            for table, columns in (("orders", "id, amount, note, extra"), ("lines", "region, number")):
                held = sorted(query(self.dsn, f"SELECT {columns} FROM {table}"), key=repr)
                assert delta_rows(self.folder / "lake" / table, *columns.split(", ")) == held, f"{table}: {where}"
        else:
            ops = Counter(op for (op,) in delta_rows(self.folder / "lake" / "orders", "_op"))
            assert ops == {"insert": 22, "delete": 4, "update": 6, "truncate": 1}, where
            assert Counter(op for (op,) in delta_rows(self.folder / "lake" / "lines", "_op")) == {"insert": 5}, where
        assert delta_rows(self.folder / "lake" / "notes", "words", "_op") == [("b", "insert"), ("b", "insert")], where


def begin(world: World) -> None:
    execute(
        world.dsn,
        "CREATE TABLE orders (id bigint PRIMARY KEY, amount int, note text)",
        "CREATE TABLE lines (region text, number int, PRIMARY KEY (number, region))",
        "CREATE TABLE notes (words text)",
    )
    run_to_end(world.options)
    execute(world.dsn, f"INSERT INTO orders SELECT g, g, {LARGE} FROM generate_series(1, 12) g")
    run_to_end(world.options)


def change(world: World) -> None:
    """Old and new tables, values that the log leaves out, moved keys, a wider column, and a table that is emptied."""
    execute(
        world.dsn,
        "BEGIN; UPDATE orders SET amount = 100 WHERE id < 4; UPDATE orders SET id = id + 100 WHERE id < 3; COMMIT",
        "INSERT INTO lines SELECT 'r', g FROM generate_series(1, 5) g",
        "ALTER TABLE orders ADD COLUMN extra text",
        "UPDATE orders SET extra = 'x' WHERE id > 10 AND id < 100",
        "ALTER TABLE orders ALTER COLUMN amount TYPE bigint",
        "UPDATE orders SET amount = 30000000000 WHERE id = 5",
        "INSERT INTO notes VALUES ('b'), ('b')",
        "DELETE FROM orders WHERE id IN (7, 8)",
    )


def work(world: World) -> None:
    assert run_once(world.options).exit_code == 0


@pytest.mark.parametrize("write", list(SETTINGS))
def test_killed_at_every_step_of_a_delivery(write: str, postgres_server: PostgresServer, tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> World:
        postgres_server.clear()
        world = World(postgres_server.dsn, tmp_path / str(next(numbers)), write)
        begin(world)
        change(world)
        if write == "append":
            execute(world.dsn, "TRUNCATE orders")
            execute(world.dsn, "INSERT INTO orders SELECT g, g, 'n' FROM generate_series(1, 8) g")
        return world

    def check(world: World, where: str) -> None:
        run_to_end(world.options)
        world.check(where)

    points = [f"{name}.{side}" for name in DELIVERY for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(work), check, points=points, most=MOST, helpers=False)
    assert set(points) <= reached.keys()


def roll_back(world: World) -> None:
    Rollback(open_pipeline(world.options), world.epoch).perform("person")


def test_killed_at_every_step_of_a_rollback(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """All tables go back together; those that were born later are empty, and all come again."""
    numbers = itertools.count()

    def prepare() -> World:
        postgres_server.clear()
        world = World(postgres_server.dsn, tmp_path / str(next(numbers)), "upsert")
        begin(world)
        world = World(world.dsn, world.folder, "upsert", open_pipeline(world.options).load().epoch)
        change(world)
        run_to_end(world.options)
        return world

    def check(world: World, where: str) -> None:
        roll_back(world)
        rows = delta_rows(world.folder / "lake" / "orders", "id", "amount")
        assert rows == sorted(((n, n) for n in range(1, 13)), key=repr), where
        assert delta_rows(world.folder / "lake" / "lines") == [], where
        run_to_end(world.options)
        world.check(where)

    points = [
        f"{name}.{side}" for name in ("follower.edit", "parts.head", "delta.jump") for side in ("before", "after")
    ]
    reached = kill_at_every_point(prepare, partial(roll_back), check, points=points, most=MOST, helpers=False)
    assert set(points) <= reached.keys()


# -- another key ------------------------------------------------------------------------------------------

NEW_KEYS = {
    "another": (
        "UPDATE orders SET amount = 50 WHERE id = 5",
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (id, amount)",
        "INSERT INTO orders SELECT id, -amount, 'beside' FROM orders",
        "INSERT INTO lines VALUES ('r', 1)",
        "DELETE FROM orders WHERE amount IN (-1, 2)",
    ),
    "none": (
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey",
        "INSERT INTO orders SELECT id, -amount, 'beside' FROM orders",
        "INSERT INTO lines VALUES ('r', 1)",
    ),
}
KEY_STEPS = ("parts.head", "follower.commit", "delta.commit", "stage.file", "spool.chunk", "spool.file")


def check_orders(world: World, kind: str, where: str) -> None:
    held = query(world.dsn, "SELECT id, amount, note FROM orders")
    if kind == "none":  # each row once, as the snapshot has it or as an insert that it does not see
        rows = delta_rows(world.folder / "lake" / "orders", "id", "amount", "note", "_op")
        assert {row[3] for row in rows} <= {"read", "insert"}, where
        assert sorted((row[:3] for row in rows), key=repr) == sorted(held, key=repr), where
    else:
        rows = delta_rows(world.folder / "lake" / "orders", "id", "amount", "note")
        assert rows == sorted(held, key=repr), where
    assert delta_rows(world.folder / "lake" / "lines", "region", "number") == [("r", 1)], where


@pytest.mark.parametrize("kind", list(NEW_KEYS))
def test_killed_while_a_table_gets_another_key(kind: str, postgres_server: PostgresServer, tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> World:
        postgres_server.clear()
        world = World(postgres_server.dsn, tmp_path / str(next(numbers)), "upsert")
        begin(world)
        execute(world.dsn, *NEW_KEYS[kind])
        return world

    def check(world: World, where: str) -> None:
        run_to_end(world.options)
        check_orders(world, kind, where)
        execute(world.dsn, "INSERT INTO orders VALUES (1, 1000, 'later')")
        run_to_end(world.options)
        check_orders(world, kind, where)

    points = [f"{name}.{side}" for name in KEY_STEPS for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(work), check, points=points, most=MOST, helpers=False)
    assert set(points) <= reached.keys()


def test_killed_while_going_back_behind_another_key(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """The old key comes back with the old rows, and the change comes again."""
    numbers = itertools.count()

    def prepare() -> World:
        postgres_server.clear()
        world = World(postgres_server.dsn, tmp_path / str(next(numbers)), "upsert")
        begin(world)
        world = World(world.dsn, world.folder, "upsert", open_pipeline(world.options).load().epoch)
        execute(world.dsn, *NEW_KEYS["another"])
        run_to_end(world.options)
        return world

    def check(world: World, where: str) -> None:
        roll_back(world)
        rows = delta_rows(world.folder / "lake" / "orders", "id", "amount")
        assert rows == sorted(((n, n) for n in range(1, 13)), key=repr), where
        run_to_end(world.options)
        check_orders(world, "another", where)

    points = [
        f"{name}.{side}" for name in ("follower.edit", "parts.head", "delta.jump") for side in ("before", "after")
    ]
    reached = kill_at_every_point(prepare, partial(roll_back), check, points=points, most=MOST, helpers=False)
    assert set(points) <= reached.keys()

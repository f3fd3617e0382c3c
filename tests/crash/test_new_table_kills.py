"""A Delta table that is added to a pipeline with history, whatever dies while it joins: no row is lost or doubled."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from firnline.history.edits.rollback import Rollback
from firnline.options import BatchOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import spooling
from firnline.sources.postgres.options import PostgresSourceOptions
from tests.support.captured import delta_rows, execute, query
from tests.support.kills import PROOF, kill, kill_at_every_point
from tests.support.pipelines import MakeOptions, make_epochs, run_once, run_to_end
from tests.support.postgres import PostgresServer
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

LANE = "@firnline sink more"
KILLS = [
    f"{point}.{side}{LANE}:1"
    for point in ("delta.create", "delta.claim", "epoch.commit", "delta.commit")
    for side in ("before", "after")
]


@pytest.fixture
def two(make_options: MakeOptions, tmp_path: Path) -> tuple[PipelineOptions, PipelineOptions]:
    """A pipeline, and the same with one more table."""
    main = DeltaSinkOptions("main", str(tmp_path / "one"))
    first = make_options(max_files=1, sinks=(main,))
    return first, replace(first, sinks=(main, DeltaSinkOptions("more", str(tmp_path / "two"), start="now")))


@pytest.mark.parametrize("point", [point for point in KILLS if "claim" not in point])
def test_killed_while_a_table_joins(
    launcher: Launcher, sample: SampleInput, two: tuple[PipelineOptions, PipelineOptions], tmp_path: Path, point: str
) -> None:
    first, options = two
    make_epochs(sample, first, 2)
    before = sample.ids.copy()
    for name in ("b1", "b2"):
        sample.add(f"{name}.json", 3)
    assert launcher.run(options, f"{point}:kill").exit_code == KILLED
    launcher.run_until_done(options)
    sample.add("c.json", 3)
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    assert table_ids(tmp_path / "two") == sample.ids - before


@pytest.mark.parametrize("point", [point for point in KILLS if "claim" in point])
def test_killed_while_a_table_joins_that_exists(
    launcher: Launcher, sample: SampleInput, two: tuple[PipelineOptions, PipelineOptions], tmp_path: Path, point: str
) -> None:
    """The table is one of another pipeline, which has gone."""
    first, options = two
    make_epochs(sample, first, 2)
    run_to_end(replace(first, name="another", sinks=(DeltaSinkOptions("it", str(tmp_path / "two")),)))
    for name in ("b1", "b2"):
        sample.add(f"{name}.json", 3)
    assert launcher.run(options, f"{point}:kill").exit_code == KILLED
    launcher.run_until_done(options)
    sample.add("c.json", 3)
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    assert table_ids(tmp_path / "two") == sample.ids


@pytest.mark.parametrize("rolls_back", [False, True])
@pytest.mark.parametrize("point", ["delta.create.before", "delta.commit.before"])
def test_an_older_run_wakes_up_while_a_table_joins(
    launcher: Launcher,
    sample: SampleInput,
    two: tuple[PipelineOptions, PipelineOptions],
    tmp_path: Path,
    point: str,
    rolls_back: bool,
) -> None:
    first, options = two
    make_epochs(sample, first, 3)
    for name in ("b1", "b2"):
        sample.add(f"{name}.json", 3)
    zombie = launcher.start(options, f"{point}{LANE}:1:stop")
    zombie.wait_until_stopped()
    if rolls_back:
        Rollback(open_pipeline(options), 1).perform("test")
    else:
        assert run_once(options).exit_code == 0
    zombie.signal(signal.SIGCONT)
    assert zombie.wait().exit_code == 5
    run_to_end(options)
    sample.add("c.json", 3)
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    found = table_ids(tmp_path / "two")
    assert set(found.values()) == {1}
    assert len(found) == (5 if rolls_back else 3) * 3


# -- captured tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    dsn: str
    folder: Path

    def options(self, *, has_customers: bool = True) -> PipelineOptions:
        orders = DeltaSinkOptions("orders", f"{self.folder}/orders", input="db.orders", write="upsert", key=("id",))
        now = replace(orders, name="customers", table=f"{self.folder}/customers", input="db.customers")
        past = DeltaSinkOptions("past", f"{self.folder}/past", input="db.customers", start="snapshot")
        return PipelineOptions(
            name="shop",
            sources=(PostgresSourceOptions("db", self.dsn, ("orders", "customers")),),
            sinks=(orders, replace(now, start="snapshot"), past) if has_customers else (orders,),
            batch=BatchOptions(max_events=1000),
        )


def work(world: World) -> None:
    spooling.WAIT_SECONDS = 0.02
    assert run_once(world.options()).exit_code == 0


ASKING = {"storage.put.before@firnline sink orders:1": 0, "storage.put.after@firnline sink orders:1": 1}  # -> requests
JOINING = (
    "delta.create.before:1",
    "delta.create.after:2",
    "delta.commit.before@firnline sink customers:2",
    "delta.commit.after@firnline sink orders:2",
)


def test_killed_at_every_point_while_a_captured_table_joins(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """Its rows come once: the request survives, is not made twice, and is answered once."""
    numbers = itertools.count()

    def prepare() -> World:
        postgres_server.clear()
        world = World(postgres_server.dsn, tmp_path / str(next(numbers)))
        execute(
            world.dsn,
            "CREATE TABLE orders (id bigint PRIMARY KEY, note text)",
            "CREATE TABLE customers (id bigint PRIMARY KEY, note text)",
            "INSERT INTO customers SELECT g, 'old' FROM generate_series(1, 50) g",
        )
        run_to_end(world.options(has_customers=False))
        execute(world.dsn, "UPDATE customers SET note = 'x' WHERE id < 6", "INSERT INTO orders VALUES (1, 'x')")
        return world

    def check(world: World, where: str) -> None:
        run_to_end(world.options())
        execute(world.dsn, "INSERT INTO customers VALUES (100, 'new')", "DELETE FROM customers WHERE id = 7")
        run_to_end(world.options())
        rows = sorted(query(world.dsn, "SELECT id, note FROM customers"), key=repr)
        assert delta_rows(world.folder / "customers", "id", "note") == rows, where
        ops = Counter(op for _, op in delta_rows(world.folder / "past", "id", "_op"))
        assert ops == {"read": 50, "update": 5, "insert": 1, "delete": 1}, where
        assert not requests(world), where

    def requests(world: World) -> int:
        return len(list(world.folder.glob("orders/_firnline/shop/requests/*.json")))

    for fault in (*ASKING, *JOINING):
        world = prepare()
        kill(fault, work, world)
        assert fault not in ASKING or requests(world) == ASKING[fault], fault
        check(world, fault)
    if PROOF:
        kill_at_every_point(prepare, work, check)

"""Snapshots and restores over the parts of a sink, killed at every point; the same command ends them."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from firnline.faults import POINTS
from firnline.topology.decide import Decision, Outcome
from tests.support.kills import kill_at_every_point
from tests.support.part_lakes import PartLake
from tests.support.topologies import TIMEOUT, settle

pytestmark = pytest.mark.crash

OF_SNAPSHOTS = (
    "topology.pin.",
    "topology.order.",
    "topology.outcome.",
    "topology.drop.",
    "parts.head.",
    "delta.commit.",
)
OF_RESTORES = (
    "topology.restore.",
    "topology.hold.",
    "topology.decide.",
    "topology.release.",
    "delta.jump.",
    "parts.head.",
)


@dataclass
class World:
    """Two regions, a snapshot, then rows of both and of a region that was not there."""

    lake: PartLake
    keep: Path
    snapshot: str
    then: dict[str, Counter[int]]

    def start_over(self) -> World:
        shutil.rmtree(self.lake.folder)
        shutil.copytree(self.keep, self.lake.folder)
        return self


def make_world(folder: Path, **settings: Any) -> World:
    lake = PartLake(folder / "world", reads=("eu+asia", "us"), **settings)
    for region in ("eu", "us"):
        lake.add(region)
    lake.run()
    order, then = lake.take(lambda: lake.add("eu")), lake.state()
    for region in ("us", "asia", "eu"):
        lake.add(region)
    lake.run()
    shutil.copytree(lake.folder, folder / "keep")
    return World(lake, folder / "keep", order.snapshot, then)


@pytest.fixture(params=[{}, {"write": "upsert", "key": ("id",)}], ids=["append", "upsert"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return make_world(tmp_path, **request.param)


def restore(world: World) -> None:
    assert world.lake.restore(world.snapshot).decision is Decision.GO


def check_restored(world: World, where: str) -> None:
    lake = world.lake
    if lake.open().home.find_unfinished() is not None or lake.found() != world.then:
        restore(world)
    lake.check(world.then, where)
    lake.run()
    lake.check(where=where)


def test_a_restore_is_finished_by_the_same_command(world: World) -> None:
    points = [point for point in POINTS if point.startswith(OF_RESTORES)]
    reached = kill_at_every_point(world.start_over, restore, check_restored, points=points)
    assert reached.keys() >= set(points)


def take(world: World) -> None:
    """Complete what is open, take a snapshot while rows come, keep only that."""
    lake, snapshots = world.lake, world.lake.open()
    orders = snapshots.find_open()
    for order in orders:
        snapshots.settle(order)  # asks members that were not asked
    orders.append(snapshots.order(TIMEOUT))
    lake.run()
    for order in orders:
        assert settle(snapshots, order) == (Outcome.COMMIT, "")
    snapshots.keep(1)


def check_taken(world: World, where: str) -> None:
    take(world)
    lake, snapshots = world.lake, world.lake.open()
    assert snapshots.find_open() == [], where
    (kept,) = (view.id for view in snapshots.list() if view.status == "COMPLETED")
    for region in ("asia", "eu", "us"):
        pins = (lake.table(region) / "_firnline/pins").glob("topology-*")
        assert [pin.stem for pin in pins] == [f"topology-{kept}"], where
    lake.check(where=where)
    assert lake.restore(kept).decision is Decision.GO, where
    parts, read = lake.found(), lake.read()
    assert all(ids <= parts[region] for region, ids in read.items()), f"{where}: a reader has what its part has not"
    lake.run()
    lake.check(where=where)


def test_a_snapshot_is_finished_by_the_next_command(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    lake = world.lake
    for region in ("us", "asia"):  # bronze has yet to read them
        lake.add(region)
    for file in (lake.folder / "in").iterdir():
        shutil.copy2(file, world.keep / "in" / file.name)
    points = [point for point in POINTS if point.startswith(OF_SNAPSHOTS)]
    reached = kill_at_every_point(world.start_over, take, check_taken, points=points)
    assert reached.keys() >= set(points)

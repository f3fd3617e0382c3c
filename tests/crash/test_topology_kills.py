"""Snapshots and restores of a topology, killed at every point that they reach, and finished by the same command.

These tests cover the fault points of `topology.`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.faults import POINTS
from firnline.history.savepoints.catalog import load_savepoint
from firnline.history.topology.graph import Topology, make_topology
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.savepoint import create_topology_savepoint, start_from_savepoint
from firnline.options import PipelineOptions
from firnline.storage import open_storage
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.support.kills import kill_at_every_point
from tests.support.pipelines import run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.topologies import TIMEOUT, member, open_snapshots, settle

pytestmark = pytest.mark.crash

OF_SAVEPOINTS = ("topology.savepoint.", "savepoint.copy.", "savepoint.put.", "delta.create.", "delta.commit.")
OF_STARTS = ("restore.copy.", "delta.claim.", "delta.jump.")
OF_RESTORES = ("topology.restore.", "topology.hold.", "topology.decide.", "topology.release.", "delta.jump.")


@dataclass(frozen=True)
class Lake:
    """files -> a -> b, with a snapshot after the first file; `keep` holds it all as it was made."""

    folder: Path
    keep: Path
    snapshot: str
    then: Counter[int]
    ids: Counter[int]

    @property
    def members(self) -> list[PipelineOptions]:
        return [member(self.folder, "a"), member(self.folder, "b", "a")]

    def tables(self) -> list[Counter[int]]:
        return [table_ids(one.sinks[0].location) for one in self.members]

    def start_over(self) -> Lake:
        shutil.rmtree(self.folder)
        shutil.copytree(self.keep, self.folder)
        return self


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    folder, keep = tmp_path / "lake", tmp_path / "keep"
    sample = SampleInput(folder / "in")
    members = [member(folder, "a"), member(folder, "b", "a")]
    sample.add("f1.json", 3)
    for one in members:
        run_to_end(one)
    snapshots = open_snapshots(folder, members)
    order = snapshots.order(TIMEOUT)
    for one in members:
        run_to_end(one)
    assert settle(snapshots, order)[0] is Outcome.COMMIT
    then = Counter(sample.ids)
    sample.add("f2.json", 3)
    for one in members:
        run_to_end(one)
    shutil.copytree(folder, keep)
    return Lake(folder, keep, order.snapshot, then, Counter(sample.ids))


def take(lake: Lake) -> None:
    """Complete what is open, take a snapshot, keep only that."""
    snapshots = open_snapshots(lake.folder, lake.members)
    orders = snapshots.find_open()
    for order in orders:
        snapshots.settle(order)  # asks members that were not asked
    orders.append(snapshots.order(TIMEOUT))
    for one in lake.members:
        run_to_end(one)
    for order in orders:
        assert settle(snapshots, order) == (Outcome.COMMIT, "")
    snapshots.keep(1)


def check_taken(lake: Lake, where: str) -> None:
    take(lake)
    snapshots = open_snapshots(lake.folder, lake.members)
    assert snapshots.find_open() == [], where
    kept = [view.id for view in snapshots.list() if view.status == "COMPLETED"]
    assert len(kept) == 1, where
    for one in lake.members:
        pins = sorted((Path(one.sinks[0].location) / "_firnline/pins").glob("topology-*"))
        assert [pin.stem for pin in pins] == [f"topology-{kept[0]}"], where
        assert not list((Path(one.sinks[0].location) / f"_firnline/{one.name}/snapshots").glob("*.json")), where
    assert lake.tables() == [lake.ids] * 2, where


DELETES = ("storage.delete.before", "storage.delete.after")  # of requests, pins and holds
ELSEWHERE = ("topology.savepoint.", "topology.range.", "topology.channels.")  # reached by savepoints, and by topics


def test_a_snapshot_is_finished_by_the_next_command(lake: Lake) -> None:
    points = [p for p in POINTS if p.startswith("topology.") and not p.startswith((*OF_RESTORES, *ELSEWHERE))]
    points += DELETES
    reached = kill_at_every_point(lake.start_over, take, check_taken, points=points)
    assert reached.keys() >= set(points)


def restore(lake: Lake) -> None:
    """Restore the snapshot, as the command does."""
    snapshots = open_snapshots(lake.folder, lake.members)
    target, epochs = find_snapshot_epochs(snapshots, lake.snapshot)
    order = find_or_order(snapshots, target, epochs, SystemClock(), RandomIds())
    result = perform_restore(snapshots, order, RandomIds().new(), SystemClock(), print)
    assert result.decision is Decision.GO


def check_restored(lake: Lake, where: str) -> None:
    begun = open_snapshots(lake.folder, lake.members).home.find_unfinished()
    if begun is not None or lake.tables() != [lake.then] * 2:
        restore(lake)
    assert lake.tables() == [lake.then] * 2, where
    for one in lake.members:
        run_to_end(one)
    assert lake.tables() == [lake.ids] * 2, where


def test_a_restore_is_finished_by_the_same_command(lake: Lake) -> None:
    points = [*(point for point in POINTS if point.startswith(OF_RESTORES)), *DELETES]
    reached = kill_at_every_point(lake.start_over, restore, check_restored, points=points)
    assert reached.keys() >= set(points)


def save(lake: Lake) -> None:
    create_topology_savepoint(open_snapshots(lake.folder, lake.members), lake.snapshot, str(lake.folder / "save"))


def other_members(lake: Lake) -> Topology:
    """The same pipelines, with tables of their own, and the files of the lake."""
    a, b = member(lake.folder / "new", "a"), member(lake.folder / "new", "b", "a")
    return make_topology([replace(a, sources=lake.members[0].sources), b])


def start(lake: Lake) -> None:
    start_from_savepoint(other_members(lake), str(lake.folder / "save"), RandomIds().new())


def check_saved(lake: Lake, where: str) -> None:
    save(lake)
    for one in lake.members:
        saved = load_savepoint(open_storage(str(lake.folder / "save" / one.name)))
        (table,) = saved.sinks.values()
        files = [lake.folder / "save" / one.name / "data" / one.name / file.path for file in table.files]
        assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == [f.sha256 for f in table.files], (
            where
        )
    assert table_ids(lake.folder / "save/a/data/a") == lake.then, where
    assert (lake.folder / "save/topology.json").exists(), where


def check_started(lake: Lake, where: str) -> None:
    start(lake)
    new = other_members(lake).members
    assert [table_ids(one.sinks[0].location) for one in new.values()] == [lake.then] * 2, where
    for one in new.values():
        run_to_end(one)
    assert [table_ids(one.sinks[0].location) for one in new.values()] == [lake.ids] * 2, where
    assert lake.tables() == [lake.ids] * 2, where


def test_a_savepoint_is_finished_by_the_same_command(lake: Lake) -> None:
    points = [point for point in POINTS if point.startswith(OF_SAVEPOINTS)]
    reached = kill_at_every_point(lake.start_over, save, check_saved, points=points)
    assert reached.keys() >= set(points)


def test_a_start_from_a_savepoint_is_finished_by_the_same_command(lake: Lake) -> None:
    points = [point for point in POINTS if point.startswith(OF_STARTS)]

    def prepare() -> Lake:
        save(lake.start_over())
        return lake

    reached = kill_at_every_point(prepare, start, check_started, points=points)
    assert reached.keys() >= set(points)

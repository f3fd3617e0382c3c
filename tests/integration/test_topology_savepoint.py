"""Savepoints of topologies: a snapshot is copied to another place, and a new topology starts from there."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.errors import ConfigError, RollbackRefusedError
from firnline.history.topology.graph import Topology, make_topology
from firnline.history.topology.savepoint import create_topology_savepoint, start_from_savepoint
from firnline.history.topology.stopped import paused_run
from firnline.options import PipelineOptions
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Outcome
from tests.support.keyed import KeyedInput, answers, answers_without_trouble, keyed_options, run_epochs
from tests.support.pipelines import checkpoint_of, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.topologies import TIMEOUT, member, open_snapshots, settle

RUN = "f" * 16


class Lake:
    """files -> a -> b and c, b -> d; b has read one file, c two, a three; d nothing of the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sample = SampleInput(folder / "in")
        self.members = make_members(folder)
        a, b, c, d = self.members
        for number, readers in ((1, (b, c, d)), (2, (c,)), (3, ())):
            self.sample.add(f"f{number}.json", 3)
            for one in (a, *readers):
                run_to_end(one)
        self.snapshots = open_snapshots(folder, self.members)

    def take(self) -> str:
        """Take a snapshot in which every reader has read what it has now."""
        order = self.snapshots.order(TIMEOUT)
        a, *readers = self.members
        run_to_end(a)
        for reader in readers:
            with paused_run(reader, LocalEngine(1), lambda _: None):
                while self.snapshots.read_records(order)[reader.name].entry is None:
                    self.snapshots._clock.sleep(0.02)
        assert settle(self.snapshots, order) == (Outcome.COMMIT, "")
        return order.snapshot


def make_members(folder: Path, first: PipelineOptions | None = None) -> list[PipelineOptions]:
    """The members, with tables in a folder; the files are those that `first` reads."""
    found = [
        member(folder, "a", max_files=1),
        member(folder, "b", "a"),
        member(folder, "c", "a"),
        member(folder, "d", "b"),
    ]
    if first is not None:
        found[0] = replace(found[0], sources=first.sources)
    return found


def other(lake: Lake, folder: Path) -> Topology:
    return make_topology(make_members(folder, lake.members[0]))


def ids(topology: Topology) -> dict[str, Counter[int]]:
    return {name: table_ids(one.sinks[0].location) for name, one in topology.members.items()}


def test_a_new_topology_starts_where_the_snapshot_was(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "old")
    then = {one.name: table_ids(one.sinks[0].location) for one in lake.members}
    snapshot = lake.take()
    lake.sample.add("f4.json", 3)
    for one in lake.members:
        run_to_end(one)
    place = tmp_path / "save"
    saved = create_topology_savepoint(lake.snapshots, snapshot, str(place))
    # One commit for each of the two positions, and one for the cut, behind the one that creates the table.
    built = DeltaTable(place / "a/data/a")
    assert built.version() == 3
    assert [saved.positions[name]["a"]["version"] for name in "bc"] == [1, 2]
    assert Counter(built.to_pyarrow_table(columns=["id"]).column("id").to_pylist()) == then["a"]
    new = other(lake, tmp_path / "new")
    shutil.rmtree(tmp_path / "old/a")  # nothing of the old tables is needed
    shutil.rmtree(tmp_path / "old/b")
    start_from_savepoint(new, str(place), RUN)
    assert ids(new) == then
    again = start_from_savepoint(new, str(place), RUN)
    assert all(one.already for one in again.values())
    for one in new.members.values():
        run_to_end(one)
    assert ids(new) == dict.fromkeys("abcd", lake.sample.ids)
    assert checkpoint_of(new.members["b"]).topology == {}, "the new pipelines are no members of the old topology"


def test_other_shapes_other_tables_and_other_folders_are_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "old")
    snapshot = lake.take()
    place = str(tmp_path / "save")
    with pytest.raises(ConfigError, match="is no savepoint of a topology"):
        start_from_savepoint(other(lake, tmp_path / "new"), place, RUN)
    with pytest.raises(ConfigError, match="cannot hold a savepoint"):
        create_topology_savepoint(lake.snapshots, snapshot, str(tmp_path / "old/in"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        create_topology_savepoint(lake.snapshots, snapshot, str(tmp_path / "full"))
    create_topology_savepoint(lake.snapshots, snapshot, place)
    with pytest.raises(ConfigError, match="other members than the savepoint: d"):
        start_from_savepoint(make_topology(make_members(tmp_path / "new", lake.members[0])[:3]), place, RUN)
    with pytest.raises(RollbackRefusedError, match="there is a table at"):
        start_from_savepoint(make_topology(lake.members), place, RUN)


def test_state_comes_along(tmp_path: Path) -> None:
    keyed = KeyedInput(tmp_path / "old/in")
    old = keyed_options(tmp_path / "old")
    run_epochs(keyed, old, 3)
    snapshots = open_snapshots(tmp_path / "old", [old])
    order = snapshots.order(TIMEOUT)
    run_to_end(old)
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    then = answers(old.sinks[0].location)
    run_epochs(keyed, old, 2)
    create_topology_savepoint(snapshots, order.snapshot, str(tmp_path / "save"))
    expected = answers_without_trouble(tmp_path, old)
    shutil.rmtree(old.sinks[0].location)
    new = replace(keyed_options(tmp_path / "new"), sources=old.sources)
    start_from_savepoint(make_topology([new]), str(tmp_path / "save"), RUN)
    assert answers(new.sinks[0].location) == then
    run_to_end(new)
    assert answers(new.sinks[0].location) == expected

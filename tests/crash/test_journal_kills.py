"""A pipeline that decides in its journal: killed at every step, woken too late, started twice; every row lands once."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.commands import run_plainly, run_standby
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import MakeOptions, pipeline_options, run_once, run_to_end
from tests.support.processes import KILLED, Launcher, wait_until
from tests.support.samples import SampleInput, quarantined, table_ids

pytestmark = pytest.mark.crash

TAKEN = "took the lease (token"


def journal_options(folder: Path, *, policy: str = "quorum") -> PipelineOptions:
    """An optional table; with a quorum of one, every epoch waits for it."""
    table = DeltaSinkOptions("lake", str(folder / "lake"), required=False, partition_by=("month",))
    return pipeline_options(
        str(folder / "in"), "", max_files=1, home=folder / "home", sinks=(table,), commit_policy=policy, quorum=1
    )


@dataclass(frozen=True, slots=True)
class World:
    options: PipelineOptions
    sample: SampleInput


def run(world: World) -> None:
    run_to_end(world.options)


def go_back(world: World) -> None:
    Rollback(open_pipeline(world.options), 1).perform("person")


def finish(world: World, where: str) -> None:
    options, home = world.options, world.options.home.root
    run_to_end(options)
    assert table_ids(options.sinks[0].location) == world.sample.ids, where
    assert quarantined(home, options.name) == world.sample.bad, where
    assert DeltaTable(home).to_pyarrow_table().num_rows == 0


@pytest.mark.parametrize("again", [False, True])
def test_killed_at_every_step(tmp_path: Path, again: bool) -> None:
    """The first run of a pipeline, and one with history."""
    count = 0

    def prepare() -> World:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        world = World(journal_options(folder), SampleInput(folder / "in"))
        if again:
            world.sample.add("a0.json", 3)
            run_to_end(world.options)
        world.sample.add("a1.json", 3, bad=1)
        world.sample.add("a2.json", 3, extra=1)
        return world

    reached = kill_at_every_point(prepare, run, finish, most=in_proof(2), helpers=False)
    assert {"delta.claim.after", "delta.commit.before", "outbox.release.after"} <= reached.keys()
    assert ("delta.create.before" in reached) is not again


def test_a_rollback_killed_at_every_step(tmp_path: Path) -> None:
    count = 0

    def prepare() -> World:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        world = World(journal_options(folder), SampleInput(folder / "in"))
        for number in (1, 2, 3):
            world.sample.add(f"a{number}.json", 3)
        run_to_end(world.options)
        return world

    reached = kill_at_every_point(prepare, go_back, finish, most=in_proof(2), helpers=False)
    assert reached["delta.jump.after"] == 2, "in the journal, and in the table"


@pytest.mark.parametrize(
    "point",
    [
        "epoch.run.before:1",
        "epoch.stage.after:1",
        "epoch.commit.before:1",
        "delta.commit.before@firnline sink journal:1",
        "delta.commit.after@firnline sink journal:1",
        "outbox.copy.before:1",
        "delta.commit.before@firnline sink lake:1",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_wakes_after_its_successor_is_fenced(
    launcher: Launcher, sample: SampleInput, tmp_path: Path, point: str, first: bool
) -> None:
    options = journal_options(tmp_path)
    if not first:
        sample.add("a1.json", 4)
        run_to_end(options)
    sample.add("b1.json", 4)
    sample.add("b2.json", 4, extra=1)
    zombie = launcher.start(options, f"{point}:stop")
    zombie.wait_until_stopped()
    assert run_once(options).exit_code == 0
    assert table_ids(tmp_path / "lake") == sample.ids
    zombie.signal(signal.SIGCONT)
    assert zombie.wait().exit_code == 5
    sample.add("c1.json", 4)
    run_to_end(options)
    assert table_ids(tmp_path / "lake") == sample.ids


@pytest.mark.parametrize("first", [True, False])
def test_several_runs_at_once(launcher: Launcher, sample: SampleInput, tmp_path: Path, first: bool) -> None:
    options = journal_options(tmp_path)
    sample.add("a0.json", 4)
    if not first:
        run_to_end(options)
    for number in range(6):
        sample.add(f"b{number}.json", 4)
    ends = [child.wait() for child in [launcher.start(options, threads=2) for _ in range(3)]]
    assert {ended.exit_code for ended in ends} <= {0, 5}, ends
    launcher.run_until_done(options)
    assert table_ids(tmp_path / "lake") == sample.ids


def test_a_standby_takes_over(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    store = StoreOptions(type="file", path=str(tmp_path / "checkpoints"))
    table = DeltaSinkOptions("lake", str(tmp_path / "lake"), required=False)
    options = make_options(max_files=1, home=tmp_path / "home", sinks=(table,), lease_seconds=1.0, store=store)
    sample.add("a1.json", 4)
    holder = Launcher(tmp_path / "plain", run_plainly).start(options, once=False)
    wait_until(lambda: (tmp_path / "lake").exists() and table_ids(tmp_path / "lake") == sample.ids, holder)
    standby = Launcher(tmp_path / "standby", run_standby).start(options, once=False)
    standby.wait_for("standing by: run")
    holder.signal(signal.SIGKILL)
    assert holder.wait().exit_code == KILLED
    standby.wait_for(TAKEN)
    sample.add("b1.json", 4)
    wait_until(lambda: table_ids(tmp_path / "lake") == sample.ids, standby)
    standby.signal(signal.SIGTERM)
    assert standby.wait().exit_code == 0

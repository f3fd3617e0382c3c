"""A recovery of the journal that dies at any step, meets another one, or a run of the lost journal that wakes up."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from firnline.errors import CheckpointError, ConfigError, FencedError
from firnline.history.edits.recover import Recovery
from firnline.options import PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks import registry
from tests.support.kills import kill_at_every_point
from tests.support.pipelines import make_epochs, pipeline_options, run_once, run_to_end
from tests.support.processes import Child, Launcher
from tests.support.samples import SampleInput
from tests.support.sqlite_sink import SqliteSinkOptions, register_sqlite, sqlite_ids

pytestmark = pytest.mark.crash

PROOF = bool(os.environ.get("FIRNLINE_PROOF"))
KINDS = {**registry.KINDS, "sqlite": "tests.support.sqlite_sink"}


@dataclass(frozen=True)
class World:
    folder: Path
    options: PipelineOptions
    expected: Counter[int]


def recovery(world: World) -> Recovery:
    return Recovery(open_pipeline(world.options), "one", processed=["*"])


def recover(world: World) -> None:
    registry.KINDS["sqlite"] = "tests.support.sqlite_sink"
    recovery(world).perform("person")


def make_options(folder: Path) -> PipelineOptions:
    sinks = (
        SqliteSinkOptions("one", str(folder / "one.db")),
        SqliteSinkOptions("two", str(folder / "two.db"), required=False),
    )
    store = StoreOptions(path=str(folder / "store"))
    return pipeline_options(str(folder / "in"), "", max_files=1, home=str(folder / "home"), sinks=sinks, store=store)


def prepare(folder: Path, lost: str) -> World:
    sample = SampleInput(folder / "in")
    options = make_options(folder)
    make_epochs(sample, options, 2)
    run_to_end(options)
    shutil.rmtree(folder / "home" / lost)
    sample.add("g1.json", 2)
    return World(folder, options, sample.ids)


def check_arrived(world: World, where: str) -> None:
    for _ in range(3):
        run_to_end(world.options)
        if len({sink.load().epoch for sink in open_pipeline(world.options).sinks}) == 1:
            break
    for name in ("one", "two"):
        assert sqlite_ids(world.folder / f"{name}.db") == world.expected, (where, name)


@pytest.mark.parametrize(
    ("lost", "first"), [("_delta_log", False), ("", True)], ids=["the journal, repeated", "the home, a run first"]
)
def test_killed_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, first: bool) -> None:
    register_sqlite(monkeypatch)
    worlds = iter(range(1000))

    def check(world: World, where: str) -> None:
        # Without the command once more, a run goes on only from a recovery that was decided.
        if not first or run_once(world.options).exit_code:
            recover(world)
        check_arrived(world, where)

    reached = kill_at_every_point(
        lambda: prepare(tmp_path / str(next(worlds)), lost), recover, check, most=None if PROOF else 1, helpers=False
    )
    wanted = {"delta.claim.after", "follower.claim.before", "follower.claim.after", "delta.jump.before"}
    assert wanted | {"delta.jump.after", "follower.edit.before", "follower.edit.after", "storage.put.after"} <= set(
        reached
    )


@pytest.mark.parametrize("step", ["_claim_journal", "_claim", "_entry"])
@pytest.mark.parametrize("lost", ["_delta_log", ""], ids=["the journal", "the home"])
def test_of_two_at_once_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, step: str) -> None:
    """The second takes over before a step of the first, which then makes nothing, or finds it done."""
    register_sqlite(monkeypatch)
    world = prepare(tmp_path, lost)
    first = recovery(world)
    original = getattr(first, step)
    begun: list[bool] = []

    def overtaken(*arguments: object) -> object:
        if not begun:
            begun.append(True)
            recovery(world).perform("second")
        return original(*arguments)

    setattr(first, step, overtaken)
    try:
        plan, receipt = first.perform("first")
        assert plan.already
        assert receipt is None
    except (FencedError, CheckpointError, ConfigError):
        pass  # it was overtaken
    check_arrived(world, step)


@pytest.mark.parametrize(
    "point",
    [
        "delta.claim.before@firnline sink journal:1",
        "epoch.stage.after:1",
        "delta.commit.before@firnline sink journal:1",
        "delta.commit.after@firnline sink journal:1",
        "follower.claim.before:1",
        "epoch.commit.before@firnline sink one:1",
        "epoch.commit.after@firnline sink one:1",
    ],
)
@pytest.mark.parametrize("lost", ["_delta_log", ""], ids=["the journal", "the home"])
def test_a_run_of_the_lost_journal_that_wakes_up_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, point: str
) -> None:
    register_sqlite(monkeypatch)
    world, zombie, sample = stop_a_run(tmp_path, point)
    shutil.rmtree(world.folder / "home" / lost)
    recover(world)
    for number in range(4):  # its versions pass the number that the lost journal had
        sample.add(f"h{number}.json", 1)
        run_to_end(world.options)
    zombie.signal(signal.SIGCONT)
    ended = zombie.wait()
    # One that had not claimed yet claims the new journal, and is a run like any other.
    assert (ended.exit_code == 0) is point.startswith("delta.claim.before"), ended
    sample.add("i.json", 2)
    run_to_end(world.options)
    assert sqlite_ids(world.folder / "one.db") == sample.ids


def stop_a_run(tmp_path: Path, point: str) -> tuple[World, Child, SampleInput]:
    """Stop a run at a point, while none of its threads locks the SQLite file: nobody could read it before it wakes."""
    for number in range(10):
        folder = tmp_path / str(number)
        sample = SampleInput(folder / "in")
        options = make_options(folder)
        options = replace(options, sinks=options.sinks[:1])
        make_epochs(sample, options, 2)
        for name in ("g1", "g2"):
            sample.add(f"{name}.json", 3)
        patches = {"firnline.sinks.registry:KINDS": KINDS}
        zombie = Launcher(folder / "zombie").start(options, f"{point}:stop", patches=patches)
        zombie.wait_until_stopped()
        with closing(sqlite3.connect(folder / "one.db", timeout=0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                zombie.signal(signal.SIGKILL)
                zombie.wait()
                continue
            connection.execute("ROLLBACK")
            return World(folder, options, sample.ids), zombie, sample
    raise AssertionError(f"a run that stops at {point} always has the file locked")

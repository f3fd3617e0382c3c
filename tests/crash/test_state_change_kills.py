"""A rescale, an import or an export of state that dies at any step, and is repeated or left: nothing is lost."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from firnline.options import LocalTierOptions, PipelineOptions, RemoteTierOptions, TriggerOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.keyed import WINDOWS, KeyedInput, answers, answers_without_trouble, keyed_options
from tests.support.processes import KILLED, Launcher
from tests.support.state_changes import export_launcher, import_launcher, rescale_launcher, state_rows

pytestmark = pytest.mark.crash

EDIT_POINTS = ("delta.claim", "storage.put", "delta.jump", "state.begin", "state.shard", "state.commit")
POINTS = [f"{call}.{side}" for call in EDIT_POINTS for side in ("before", "after")]
LEFT = ["delta.claim.after", "state.commit.after", "delta.jump.before", "delta.jump.after"]  # and never repeated
IMPORT_POINTS = [*POINTS, "state.run.before", "state.run.after", "state.timers.before", "state.timers.after"]


def prepare(tmp_path: Path, launcher: Launcher, **settings: Any) -> tuple[KeyedInput, PipelineOptions]:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, (WINDOWS,), shards=None, **settings)
    keyed.add()
    keyed.add()
    assert launcher.run(options).exit_code == 0
    return keyed, options


def shards_of(options: PipelineOptions) -> int:
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    return int(checkpoint.state["windows"]["shards"])


@pytest.mark.parametrize(
    ("point", "count", "repeat"),
    [
        *((point, 1, True) for point in POINTS),
        *((point, 1, False) for point in LEFT),
        ("state.shard.after", 2, True),
        ("storage.put.after", 3, True),
    ],
)
def test_rescale_killed(tmp_path: Path, launcher: Launcher, point: str, count: int, repeat: bool) -> None:
    keyed, options = prepare(tmp_path, launcher)
    rescale = rescale_launcher(tmp_path / "rescales", 3)
    assert rescale.run(options, f"{point}:{count}:kill").exit_code == KILLED
    assert shards_of(options) == (3 if point == "delta.jump.after" else 1), "wholly or not at all"
    if repeat:
        done = rescale.run(options)
        assert done.exit_code == 0, done
        assert shards_of(options) == 3
    keyed.add()
    keyed.add()
    launcher.run_until_done(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


@pytest.mark.parametrize("point", ["delta.claim.after", "storage.put.after", "delta.jump.before", "delta.jump.after"])
def test_rescale_from_snapshots_that_lack_epochs_killed(tmp_path: Path, launcher: Launcher, point: str) -> None:
    keyed, options = prepare(tmp_path, launcher, trigger=TriggerOptions(every_epochs=100))
    rescale = rescale_launcher(tmp_path / "rescales", 3)
    assert rescale.run(options, f"{point}:1:kill").exit_code == KILLED
    done = rescale.run(options)
    assert done.exit_code == 0, done
    assert shards_of(options) == 1, "the next run deals the state out"
    keyed.add()
    launcher.run_until_done(options)
    assert shards_of(options) == 3
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_every_point_of_a_rescale_is_listed_above(tmp_path: Path, launcher: Launcher) -> None:
    _, options = prepare(tmp_path, launcher)
    ended = rescale_launcher(tmp_path / "rescales", 3).run(options)
    assert ended.exit_code == 0, ended
    helpers = ("delta.sync.", "storage.folder.", "storage.publish.")  # `test_fault_points.py` tries these
    assert {point for point in ended.points.keys() - set(POINTS) if not point.startswith(helpers)} == set()


@pytest.mark.parametrize("point", ["delta.claim.after", "delta.jump.after", "state.shard.before", "state.commit.after"])
def test_rescale_broken(tmp_path: Path, launcher: Launcher, point: str) -> None:
    """A failure in the middle is told, or healed; the same command again does it."""
    keyed, options = prepare(tmp_path, launcher)
    rescale = rescale_launcher(tmp_path / "rescales", 3)
    rescale.run(options, f"{point}:1:raise")
    done = rescale.run(options)
    assert done.exit_code == 0, done
    assert shards_of(options) == 3
    keyed.add()
    launcher.run_until_done(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


@pytest.mark.parametrize(
    ("point", "repeat"), [*((point, True) for point in IMPORT_POINTS), *((point, False) for point in LEFT)]
)
def test_import_killed(tmp_path: Path, launcher: Launcher, point: str, repeat: bool) -> None:
    """Either all rows are there or none; whoever repeats it has them all."""
    keyed, options = prepare(tmp_path, launcher)
    rows = state_rows(options, "windows")
    row = max(rows, key=lambda one: one["_timer"])
    new = [{**row, "k": f"new{number}"} for number in range(8)]
    imports = import_launcher(tmp_path / "imports", "windows", new)
    assert imports.run(options, f"{point}:1:kill").exit_code == KILLED
    expected = sorted([*rows, *new], key=str)
    assert state_rows(options, "windows") == (expected if point == "delta.jump.after" else rows)
    if repeat:
        done = imports.run(options)
        assert done.exit_code == 0, done
        assert state_rows(options, "windows") == expected
    keyed.add()
    launcher.run_until_done(options)
    kept = {one["k"] for one in state_rows(options, "windows")} >= {one["k"] for one in new}
    assert kept == (repeat or point == "delta.jump.after")


@pytest.mark.parametrize("point", ["state.replicate.before", "state.replicate.after"])
@pytest.mark.parametrize("count", [1, 3])
def test_rescale_killed_on_its_way_to_the_remote_tier(
    tmp_path: Path, launcher: Launcher, point: str, count: int
) -> None:
    tiers = {
        "local": LocalTierOptions(str(tmp_path / "local")),
        "remote": RemoteTierOptions(str(tmp_path / "remote"), interval_ms=1),
    }
    keyed, options = prepare(tmp_path, launcher, **tiers)
    rescale = rescale_launcher(tmp_path / "rescales", 3)
    assert rescale.run(options, f"{point}:{count}:kill").exit_code == KILLED
    assert shards_of(options) == 1, "nothing names what another machine could not find"
    assert rescale.run(options).exit_code == 0
    keyed.add()
    launcher.run_until_done(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


@pytest.mark.parametrize("point", ["before", "publish.before", "publish.after"])
def test_export_killed(tmp_path: Path, launcher: Launcher, point: str) -> None:
    """The file is there whole, or it is not there; the name is free for the next try."""
    _, options = prepare(tmp_path, launcher)
    path = tmp_path / "windows.parquet"
    export = export_launcher(tmp_path / "exports", "windows", path)
    assert export.run(options, f"state.export.{point}:1:kill").exit_code == KILLED
    if point.endswith("before"):
        assert not path.exists()
        assert export.run(options).exit_code == 0
    assert pq.read_table(path).num_rows == len(state_rows(options, "windows"))


def test_rescales_and_runs_killed_in_turns(tmp_path: Path, launcher: Launcher) -> None:
    """Kills in the recovery of kills: rescales, runs, rescales again."""
    keyed, options = prepare(tmp_path, launcher)
    points = itertools.cycle(["state.commit.after", "delta.jump.after", "delta.commit.before", "state.run.after"])
    for shards in (2, 5, 1, 4):
        rescale = rescale_launcher(tmp_path / f"rescales-{shards}", shards)
        rescale.run(options, f"{next(points)}:1:kill")
        keyed.add()
        launcher.run(options, f"{next(points)}:1:kill")
        assert rescale.run(options).exit_code == 0
        assert shards_of(options) == shards
    launcher.run_until_done(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_an_active_run_is_fenced_by_a_rescale(tmp_path: Path, launcher: Launcher) -> None:
    keyed, options = prepare(tmp_path, launcher, max_inflight=1)
    keyed.add()
    keyed.add()
    active = launcher.start(options, "delta.commit.before:1:stop", once=False)
    active.wait_until_stopped()
    done = rescale_launcher(tmp_path / "rescales", 3).run(options)
    assert done.exit_code == 0, done
    active.signal(signal.SIGCONT)
    assert active.wait().exit_code == 5
    launcher.run_until_done(options)
    assert shards_of(options) == 3
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)

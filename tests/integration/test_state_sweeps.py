"""Sweeps of state against a run that stands on old state, and against a restore that needs what is swept."""

from __future__ import annotations

from pathlib import Path

import pytest

import firnline.sinks.delta.table
from firnline.errors import RollbackRefusedError
from firnline.history.edits.restore import restore_savepoint
from firnline.history.savepoints.catalog import dispose_savepoint
from firnline.history.savepoints.create import create_savepoint
from firnline.maintenance.state import sweep_state
from firnline.options import PipelineOptions, TriggerOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.operator_state import OperatorStates
from firnline.run.progress import Base
from firnline.state.manifest import SnapshotRef
from tests.support.ageing import age_files
from tests.support.keyed import KeyedInput, answers, answers_without_trouble, keyed_options
from tests.support.kills import kill
from tests.support.pipelines import run_to_end


def home_of(options: PipelineOptions) -> Path:
    return Path(options.deciding.location) / "_firnline/demo/state"


def sweep_all(options: PipelineOptions) -> int:
    """Hours go by, and everything that nothing needs goes."""
    age_files(home_of(options), 36_000)
    return sum(one.files for one in sweep_state(open_pipeline(options), grace_seconds=900))


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[PipelineOptions, KeyedInput]:
    """Snapshots every few epochs; the newest has lost a file, so that a run goes on from an older one."""
    keyed = KeyedInput(tmp_path / "in", keys=1000)
    trigger = TriggerOptions(every_epochs=5)
    options = keyed_options(tmp_path, rollback_window=1, keep_checkpoints=1, trigger=trigger)
    for _ in range(14):
        keyed.add(40)
    run_to_end(options)
    newest = sorted(path.parent for path in home_of(options).glob("*/COMMITTED"))[-1]
    sorted(newest.glob("shard_*/*.arrow"))[0].unlink()
    keyed.add(40)
    return options, keyed


def test_a_sweep_spares_what_the_run_stands_on(
    damaged: tuple[PipelineOptions, KeyedInput], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, keyed = damaged
    real, swept = OperatorStates.catch_up, []

    def catch_up(self: OperatorStates, base: Base) -> None:
        real(self, base)
        swept.append(sweep_all(options))

    monkeypatch.setattr(OperatorStates, "catch_up", catch_up)
    run_to_end(options)
    assert swept
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)
    held = open_pipeline(options).deciding.load()
    assert held.checkpoint is not None
    made = SnapshotRef.from_json(held.checkpoint.state["totals"]).epoch
    assert made == held.epoch, "the first epoch after the restore makes a snapshot"
    assert not list(Path(options.deciding.location).glob("_firnline/pins/stands-on-*")), (
        "the sinks name it: no pin is needed"
    )
    monkeypatch.undo()
    sweep_all(options)
    keyed.add(40)
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options, "again")


@pytest.mark.crash
@pytest.mark.parametrize("point", ["state.pin.before:1", "state.pin.after:1"])
def test_a_run_that_dies_at_its_pin_leaves_nothing_that_matters(
    damaged: tuple[PipelineOptions, KeyedInput], tmp_path: Path, point: str
) -> None:
    options, _ = damaged
    kill(point, run_to_end, options)
    sweep_all(options)
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)
    assert not list(Path(options.deciding.location).glob("_firnline/pins/stands-on-*"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[PipelineOptions, str]:
    """A savepoint of epoch 2, without copies; then many epochs whose state has nothing in common with it."""
    keyed = KeyedInput(tmp_path / "in")
    options = keyed_options(tmp_path, rollback_window=1, keep_checkpoints=1)
    for _ in range(2):
        keyed.add()
    run_to_end(options)
    place = str(tmp_path / "saved")
    create_savepoint(open_pipeline(options), place, copy=False)
    for _ in range(40):
        keyed.add(60)
    run_to_end(options)
    return options, place


def at_point(monkeypatch: pytest.MonkeyPatch, wanted: str, action: object) -> list[object]:
    """Do something when a commit reaches a point for the first time; returns what came of it."""
    found: list[object] = []

    def reached(point: str) -> None:
        if point == wanted and not found:
            found.append("begun")
            try:
                found.append(action())  # type: ignore[operator]
            except RollbackRefusedError as error:
                found.append(error)

    monkeypatch.setattr(firnline.sinks.delta.table, "fault_point", reached)
    return found


def test_a_restore_is_refused_when_its_state_is_swept_before_it_commits(
    saved: tuple[PipelineOptions, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, place = saved

    def lose() -> int:
        dispose_savepoint(open_pipeline(options), place)
        for pin in Path(options.deciding.location).glob("_firnline/pins/restore-*"):
            pin.unlink()  # taken for abandoned: the restore stood still for days
        return sweep_all(options)

    found = at_point(monkeypatch, "delta.jump.before", lose)
    with pytest.raises(RollbackRefusedError):
        restore_savepoint(open_pipeline(options), place, "e" * 16)
    assert isinstance(found[-1], int)
    assert found[-1] > 0
    monkeypatch.undo()
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_a_restore_does_not_take_up_state_that_a_sweep_is_about_to_delete(
    saved: tuple[PipelineOptions, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, place = saved
    for pin in Path(options.deciding.location).glob("_firnline/pins/savepoint-*"):
        pin.unlink()
    found = at_point(
        monkeypatch, "delta.sweep.after", lambda: restore_savepoint(open_pipeline(options), place, "e" * 16)
    )
    assert sweep_all(options) > 0
    assert isinstance(found[-1], RollbackRefusedError)
    assert "deleted by a sweep of state" in found[-1].message
    monkeypatch.undo()
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_a_sweep_lets_go_when_a_restore_came_before_it_declared(
    saved: tuple[PipelineOptions, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, place = saved
    for pin in Path(options.deciding.location).glob("_firnline/pins/savepoint-*"):
        pin.unlink()
    found = at_point(
        monkeypatch, "delta.sweep.before", lambda: restore_savepoint(open_pipeline(options), place, "e" * 16)
    )
    sweep_all(options)
    assert getattr(found[-1], "to_epoch", None) == 2
    monkeypatch.undo()
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)

"""The search for a snapshot: which home serves it, what is written for it, and why other homes do not serve it."""

from __future__ import annotations

from pathlib import Path

import pytest

from firnline.errors import CheckpointError, StateDamagedError, StateIncompleteError
from firnline.state.home import StateHome
from firnline.state.manifest import CompleteCheckpoint, SnapshotRef, snapshot_ref
from firnline.state.remote import Replica, find_snapshot
from tests.support.states import make_checkpoint, sample_plan


@pytest.fixture
def home(tmp_path: Path) -> StateHome:
    return StateHome(str(tmp_path / "local"), fallback=StateHome(str(tmp_path / "remote")))


def make_in_both(home: StateHome) -> tuple[CompleteCheckpoint, SnapshotRef]:
    assert home.fallback is not None
    made = make_checkpoint(home.storage, sample_plan(1))
    Replica(home.storage, home.fallback.storage).replicate(made.checkpoint_id)
    return made, snapshot_ref(made, next(iter(made.plan.operators)))


def lose_file(home: StateHome, made: CompleteCheckpoint) -> None:
    home.storage.delete(next(iter(made.files())))


def test_the_own_home_goes_first(home: StateHome) -> None:
    made, ref = make_in_both(home)
    search = find_snapshot(home, ref)
    assert (search.complete, search.home, search.tier, search.problems) == (made, home, "local", ())


def test_read_only_the_remote_tier_serves_and_nothing_is_written(home: StateHome) -> None:
    made, ref = make_in_both(home)
    lose_file(home, made)
    search = find_snapshot(home, ref)
    assert search.require() == (made, home.fallback)
    assert search.tier == "remote"
    assert [type(problem) for problem in search.problems] == [StateDamagedError]
    assert find_snapshot(home, ref, with_files=False).tier == "local"
    with pytest.raises(FileNotFoundError):
        home.storage.stat(next(iter(made.files())))


def test_a_snapshot_is_brought_home(home: StateHome) -> None:
    made, ref = make_in_both(home)
    lose_file(home, made)
    search = find_snapshot(home, ref, bring_home=True)
    assert (search.complete, search.home, search.tier) == (made, home, "remote")
    assert find_snapshot(home, ref).tier == "local"


@pytest.mark.parametrize("bring_home", [False, True])
def test_every_home_says_why_it_does_not_serve(home: StateHome, bring_home: bool) -> None:
    made, ref = make_in_both(home)
    assert home.fallback is not None
    lose_file(home, made)
    lose_file(home.fallback, made)
    search = find_snapshot(home, ref, bring_home=bring_home)
    assert (search.complete, search.home, search.tier, len(search.problems)) == (None, None, "", 2)
    with pytest.raises(StateDamagedError):
        search.require()


def test_a_home_alone_says_why(tmp_path: Path) -> None:
    home = StateHome(str(tmp_path / "local"))
    made = make_checkpoint(StateHome(str(tmp_path / "elsewhere")).storage, sample_plan(1))
    search = find_snapshot(home, snapshot_ref(made, next(iter(made.plan.operators))))
    assert [type(problem) for problem in search.problems] == [StateIncompleteError]


def test_an_unreachable_home_is_absent_for_readers_and_an_error_for_a_run(
    home: StateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ref = make_in_both(home)

    def fail(*_: object, **__: object) -> CompleteCheckpoint:
        raise OSError("no route to host")

    monkeypatch.setattr("firnline.state.remote.load", fail)
    search = find_snapshot(home, ref)
    assert all("no route to host" in problem.message for problem in search.problems)
    with pytest.raises(CheckpointError):
        search.require()
    with pytest.raises(OSError, match="no route"):
        find_snapshot(home, ref, bring_home=True)

"""The rollback window, in epochs and in time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from firnline.checkpoint.model import Checkpoint
from firnline.run.checkpoints import RollbackWindow

START = datetime(2026, 11, 1, tzinfo=UTC)


def checkpoint(epoch: int, at: datetime) -> Checkpoint:
    return Checkpoint("p", epoch, 1, "r", f"a{epoch}", at.isoformat(), positions={})


def test_epochs() -> None:
    assert RollbackWindow(64).oldest(100, START) == 36


def test_time_keeps_the_state_of_every_moment_in_it() -> None:
    window = RollbackWindow(timedelta(hours=1))
    for epoch in range(1, 6):
        window.add(checkpoint(epoch, START + timedelta(minutes=20 * epoch)))
    now = START + timedelta(minutes=130)
    assert window.oldest(6, now) == 3, "an hour before now, at 70 minutes, epoch 3 (made at 60) was the newest"


def test_without_old_checkpoints_everything_is_kept() -> None:
    window = RollbackWindow(timedelta(hours=1))
    assert window.oldest(3, START) == 0
    window.begin([(checkpoint(7, START), False)])
    assert window.oldest(8, START + timedelta(minutes=59)) == 0
    assert window.oldest(8, START + timedelta(minutes=61)) == 7


@given(st.lists(st.integers(-5, 60), min_size=1, max_size=40), st.integers(1, 90))
def test_time_never_moves_the_floor_back(steps: list[int], minutes: int) -> None:
    window = RollbackWindow(timedelta(minutes=minutes))
    now, lowest = START, 0
    for epoch, step in enumerate(steps, 1):
        now += timedelta(minutes=step)
        found = max(lowest, window.oldest(epoch, now))
        assert found < epoch
        lowest = found
        window.add(checkpoint(epoch, now))


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 6))
def test_epochs_that_only_move_positions_do_not_count(idle: list[bool], size: int) -> None:
    """However many of them come, the last `size` epochs with rows can be undone."""
    window, floor = RollbackWindow(size), 0
    for epoch, is_idle in enumerate(idle, 1):
        floor = max(floor, window.oldest(epoch, START, is_idle=is_idle))
        counted = [n for n, one in enumerate(idle[:epoch], 1) if not one]
        assert len([n for n in counted if n > floor]) >= min(size, len(counted))
        if not any(idle[:epoch]):
            assert floor == max(0, epoch - size)
        window.add(replace(checkpoint(epoch, START), floor=floor), is_idle=is_idle)

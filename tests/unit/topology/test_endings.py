"""What a member does to snapshots that nobody looks after."""

from __future__ import annotations

import pytest

from firnline.topology.decide import Ending, find_ending


@pytest.mark.parametrize("overdue", [False, True])
def test_an_open_snapshot_is_aborted_after_its_time_limit_and_never_dropped(overdue: bool) -> None:
    assert find_ending(open_=True, aborted=False, expired=False, overdue=overdue) is None
    assert find_ending(open_=True, aborted=False, expired=True, overdue=overdue) is Ending.ABORT


@pytest.mark.parametrize("expired", [False, True])
def test_a_completed_snapshot_is_dropped_after_max_hold_and_never_aborted(expired: bool) -> None:
    assert find_ending(open_=False, aborted=False, expired=expired, overdue=False) is None
    assert find_ending(open_=False, aborted=False, expired=expired, overdue=True) is Ending.DROP
    assert find_ending(open_=False, aborted=True, expired=expired, overdue=True) is None

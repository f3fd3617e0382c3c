"""The backlog: counted now and then, current in between."""

from __future__ import annotations

from firnline.run.backpressure import RECOUNT_SECONDS, BacklogMeter
from firnline.sources.base import Backlog


def test_unknown_before_the_first_count() -> None:
    meter = BacklogMeter()
    meter.committed(1, 2, 20)
    assert meter.current is None
    assert meter.is_due(0)


def test_commits_after_the_count_are_taken_off() -> None:
    meter = BacklogMeter()
    meter.begin()
    assert not meter.is_due(1000)
    meter.committed(5, 2, 20)  # in flight when the count began on epoch 5
    meter.committed(6, 3, 30)
    meter.end(5, Backlog(10, 100), began=0, now=1)
    assert meter.current == Backlog(7, 70)
    meter.committed(7, 100, 1000)
    assert meter.current == Backlog(0, 0)


def test_counts_are_repeated_less_often_when_they_take_long() -> None:
    meter = BacklogMeter()
    meter.begin()
    meter.end(0, Backlog(1, 1), began=0, now=1)
    assert not meter.is_due(RECOUNT_SECONDS)
    assert meter.is_due(1 + RECOUNT_SECONDS)
    meter.begin()
    meter.end(0, None, began=100, now=110)
    assert meter.current == Backlog(1, 1)
    assert not meter.is_due(110 + 199)
    assert meter.is_due(110 + 200)


def test_an_empty_plan_overtakes_a_count_under_way() -> None:
    meter = BacklogMeter()
    meter.begin()
    meter.emptied()
    meter.end(3, Backlog(10, 100), began=0, now=1)
    assert meter.current == Backlog(0, 0)

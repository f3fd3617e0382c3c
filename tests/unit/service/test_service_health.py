"""Health and readiness tell the truth, at any time, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from firnline.errors import SinkError
from firnline.run.observer import EpochFacts
from firnline.service.health import Health
from firnline.sinks.base import Head
from firnline.sources.base import SourcePlan
from firnline.sources.group import EpochPlan

HELD = Head(exists=True, version=3, epoch=2)
PLAN = EpochPlan({"files": SourcePlan("files", None, [], 1, 1)})


def facts(epoch: int) -> EpochFacts:
    return EpochFacts(epoch, "a", "delta", 1, 1, 1, 1, {}, 1, 1, 1, 1, 0, 1, 0, 0)


class FakeRun:
    """A health with a clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.health = Health("flights", lambda: self.now, poll_seconds=10, stuck_seconds=900)

    def answers(self) -> tuple[bool, bool]:
        return self.health.healthy().ok, self.health.ready().ok

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> None:
        self.health.started("r", HELD)

    def plan(self, epoch: int = 3) -> None:
        self.health.planned(epoch, PLAN)

    def commit(self, epoch: int = 3) -> None:
        self.health.committed(facts(epoch))

    def fail(self) -> None:
        self.health.trouble(SinkError("disk full"), 1)


def act(*steps: Callable[[FakeRun], Any]) -> FakeRun:
    run = FakeRun()
    for step in steps:
        step(run)
    return run


READ, PLANNED, COMMITTED, FAILED = FakeRun.read, FakeRun.plan, FakeRun.commit, FakeRun.fail


def later(seconds: float) -> Callable[[FakeRun], None]:
    return lambda run: run.wait(seconds)


def ended(code: int) -> Callable[[FakeRun], None]:
    return lambda run: run.health.stopped(code)


def idle(run: FakeRun) -> None:
    run.health.idle()


@pytest.mark.parametrize(
    ("steps", "healthy", "ready"),
    [
        ([], True, False),  # the sinks have not been read
        ([later(931)], False, False),  # and never are
        ([READ], True, True),
        ([READ, PLANNED], True, True),
        ([READ, PLANNED, later(899)], True, True),
        ([READ, PLANNED, later(901)], False, False),  # stuck in an epoch
        ([READ, PLANNED, later(600), COMMITTED, later(600)], True, True),
        ([READ, PLANNED, later(600), lambda r: r.plan(4), lambda r: r.commit(3), later(301)], True, True),
        ([READ, PLANNED, later(600), lambda r: r.plan(4), lambda r: r.commit(3), later(901)], False, False),
        ([READ, idle, later(929)], True, True),
        ([READ, idle, later(931)], False, False),  # an idle run polls; one that does not is stuck
        ([READ, FAILED], True, False),
        ([READ, FAILED, FAILED], True, False),
        ([READ, FAILED, FAILED, FAILED], False, False),  # again and again
        ([READ, FAILED, FAILED, FAILED, READ, PLANNED], False, False),  # trying is no proof
        ([READ, FAILED, FAILED, FAILED, READ, PLANNED, COMMITTED], True, True),
        ([READ, FAILED, FAILED, FAILED, idle], True, True),
        ([FAILED], True, False),
        ([READ, ended(0)], True, False),
        ([READ, FAILED, ended(3)], False, False),
        ([READ, ended(0), later(5000)], True, False),  # over is not stuck
    ],
)
def test_truth_table(steps: list[Callable[[FakeRun], Any]], healthy: bool, ready: bool) -> None:
    assert act(*steps).answers() == (healthy, ready)


def test_every_no_says_why() -> None:
    assert act(READ, PLANNED, later(1000)).health.healthy().reasons == [
        "epoch 3 was planned 1000 s ago and is not committed"
    ]
    assert act(READ, FAILED).health.ready().reasons == ["retrying after 1 failure(s): disk full"]
    assert act(READ, FAILED, ended(3)).health.healthy().reasons == ["the run failed with exit code 3: disk full"]
    assert act().health.ready().reasons == ["the sinks have not been read yet"]

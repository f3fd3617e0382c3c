"""A file that is late is in one epoch, whoever was slow, lost or asked twice on the way there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firnline.clock import SystemClock
from firnline.epoch import messages as m
from firnline.options import DeltaSinkOptions, FileSourceOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sources import group
from firnline.sources.files.source import FileSource
from firnline.testing.local import LocalEngine
from tests.support.pipelines import pipeline_options, run_to_end

INTERVAL = 100.0


class HandClock(SystemClock):
    """Stands still until it is moved."""

    at = 1000.0

    def monotonic(self) -> float:
        return self.at


class Planner:
    """The source lane of a run, one turn at a time."""

    def __init__(self, options: PipelineOptions, *, once: bool = False) -> None:
        self.clock = HandClock()
        self.pipeline = open_pipeline(options, once=once, clock=self.clock)
        runner = Runner(self.pipeline, LocalEngine(1), once=once)
        self.steps, self.late_files, self.progress = runner._steps, runner._late_files, runner._progress
        runner._opening.read_sinks()
        self.base = self.progress.head.attempt

    def turn(self) -> tuple[str, list[str]]:
        """One turn: the attempt, and the names of what it reads."""
        due = self.late_files.due()
        if due:
            self.late_files.look(self.base, due)
        event, plan = self.steps.plan(self.progress.head.epoch + 1, self.base)
        names = [Path(str(item["path"])).name for item in plan.inputs] if plan else []
        return (event.attempt, names) if isinstance(event, m.Planned) else ("", names)


def add(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text('{"id": 1}\n')


@pytest.fixture
def two_sources(tmp_path: Path) -> PipelineOptions:
    """`b` has read b5 and has a late file, b1; `a` has something new."""
    sources = tuple(
        FileSourceOptions(name, str(tmp_path / name), poll_interval_secs=0.05, reconcile_interval_secs=INTERVAL)
        for name in "ab"
    )
    sinks = tuple(DeltaSinkOptions(f"t{name}", str(tmp_path / f"t{name}"), input=name) for name in "ab")
    options = pipeline_options("", "", sources=sources, sinks=sinks, max_files=2)
    add(tmp_path / "a", "a5")
    add(tmp_path / "b", "b5")
    run_to_end(options)
    add(tmp_path / "b", "b1")
    add(tmp_path / "a", "a6", "a7", "a8")
    return options


def hold_listing(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """A source that lists only when it is let."""
    may_list, listed = threading.Event(), FileSource._listed

    def slow(self: FileSource, *args: Any) -> Iterator[Any]:
        if self.name == name:
            assert may_list.wait(30)
        yield from listed(self, *args)

    monkeypatch.setattr(FileSource, "_listed", slow)
    monkeypatch.setattr(group, "ALIGN_SECONDS", 0.05)
    return may_list


def test_a_late_file_whose_plan_waits_is_not_found_late_again(
    two_sources: PipelineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_list = hold_listing(monkeypatch, "b")
    lane = Planner(two_sources)
    read = Counter(lane.turn()[1])
    assert read == {"a6": 1}
    may_list.set()
    assert lane.pipeline.sources._asked["b"].done.wait(30)
    lane.clock.at += INTERVAL  # a full listing is due while the answer that holds b1 waits
    monkeypatch.setattr(group, "ALIGN_SECONDS", 30)
    for _ in range(4):
        read.update(lane.turn()[1])
    assert read["b1"] == 1


def test_a_late_file_of_an_epoch_that_is_lost_during_a_full_listing_is_found_again(
    two_sources: PipelineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = Planner(two_sources, once=True)
    attempt, names = lane.turn()
    assert "b1" in names
    lane.late_files._looked_at.clear()  # due again
    reconcile = lane.pipeline.sources.reconcile

    def lose_meanwhile(*args: Any) -> Any:
        found = reconcile(*args)
        lane.steps.drop(attempt)
        return found

    monkeypatch.setattr(lane.pipeline.sources, "reconcile", lose_meanwhile)
    assert "b1" not in lane.turn()[1]
    monkeypatch.setattr(lane.pipeline.sources, "reconcile", reconcile)
    assert "b1" in lane.turn()[1]


def test_a_new_root_is_saved_although_the_epoch_that_would_save_it_is_lost(tmp_path: Path) -> None:
    add(tmp_path / "old", "a1")
    run_to_end(pipeline_options(str(tmp_path / "old"), str(tmp_path / "out")))
    (tmp_path / "old").rename(tmp_path / "new")
    moved = (str(tmp_path / "old"), str(tmp_path / "new"))
    source = FileSource(FileSourceOptions("files", moved[1]), moved=moved)
    held = open_pipeline(pipeline_options(moved[1], str(tmp_path / "out"))).load().checkpoint
    assert held is not None
    position = source.start(held.positions["files"])
    limits = open_pipeline(pipeline_options(moved[1], str(tmp_path / "out"))).limits(1)
    plan = source.plan(position, limits)
    assert plan is not None
    assert source.plan(position, limits) is None
    source.give_back(plan)
    assert source.plan(position, limits) is not None

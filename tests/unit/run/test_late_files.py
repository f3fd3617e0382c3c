"""A file that is late is in one epoch, whoever was slow, lost or asked twice on the way there."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.clock import SystemClock
from firnline.epoch import messages as m
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run.ledger_files import LedgerFiles
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.run.status import CheckpointWatch
from firnline.run.upkeep import names_grow, reconcile_interval
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources import group
from firnline.sources.files.options import FileSourceOptions
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
        self.steps, self.late_files, self.progress = runner._steps, runner._upkeep.late_files, runner._progress
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
            assert may_list.wait(120)
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
    assert lane.pipeline.sources._asked["b"].answered.wait(120)
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
    lane.late_files._looked.clear()  # due again
    source = lane.pipeline.sources["b"]
    reconcile = source.reconcile

    def lose_meanwhile(*args: Any) -> Any:
        found = reconcile(*args)
        lane.steps.drop(attempt)
        return found

    monkeypatch.setattr(source, "reconcile", lose_meanwhile)
    assert "b1" not in lane.turn()[1]
    monkeypatch.setattr(source, "reconcile", reconcile)
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


# -- any order of names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("took", "poll", "expected"),
    [(0.0, 10, 10), (2.0, 10, 10), (2.1, 10, 42), (3.0, 100, 100), (500, 10, 3600), (5000, 7200, 7200)],
)
def test_a_full_listing_is_made_at_every_poll_while_it_is_cheap(took: float, poll: float, expected: float) -> None:
    assert reconcile_interval(took, poll) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("recent", "grows"),
    [([], True), ([(1000, 4)], True), ([(10, 5)], False), ([(1000, 50)], True), ([(1, 1)] * 5, False)],
)
def test_names_that_do_not_grow_with_time(recent: list[tuple[int, int]], grows: bool) -> None:
    assert names_grow(recent) == grows


class Visitor(Observer):
    """Drops files with names below all others into the folder of a run, and stops it once all are read."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names = folder, names
        self.runner: Runner | None = None
        self.waited: list[int | None] = []  # what another process saw

    def idle(self) -> None:
        assert self.runner is not None
        if self.names:
            add(self.folder, self.names.pop())
        waits = load_status(open_pipeline(self.runner._pipeline.options)).files_outstanding
        if self.names:
            self.waited.append(waits)
        elif waits == 0:
            self.runner.stop()


def test_files_in_any_order_of_names_are_read_within_a_poll(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [str(uuid.UUID(int=number * 0x1234567**4 % 2**128)) for number in range(1, 13)]
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"))
    add(tmp_path / "in", "z")  # every other name sorts before it
    told = Visitor(tmp_path / "in", list(names))
    told.runner = Runner(open_pipeline(options), LocalEngine(1), told)
    assert told.runner.run().exit_code == 0
    assert DeltaTable(tmp_path / "out").to_pyarrow_table().num_rows == 13
    assert all(told.waited)  # the backlog was never empty while a file waited
    report = load_status(open_pipeline(options))
    assert (report.files_outstanding, report.unordered_names) == (0, ["files"])
    assert len([r for r in caplog.records if "do not grow with time" in r.message]) == 1


@pytest.mark.parametrize("name", ["a", "c"])
@pytest.mark.parametrize("min_age", [0, 0.3])
def test_a_requested_checkpoint_reads_late_and_young_files(tmp_path: Path, name: str, min_age: float) -> None:
    options = pipeline_options(
        str(tmp_path / "in"),
        str(tmp_path / "out"),
        reconcile_interval_secs=3600,
        poll_interval_secs=3600,
        min_age_secs=min_age,
    )
    add(tmp_path / "in", "b")
    folder, idle = tmp_path / "in", threading.Event()
    watches: list[CheckpointWatch] = []

    class Asks(Observer):
        def idle(self) -> None:
            if not watches:
                add(folder, name)
                os.utime(folder / name, (time.time() + 3600,) * 2)  # young by its own time
                watches.append(runner.checkpoint())
                idle.set()

    runner = Runner(open_pipeline(options), LocalEngine(1), Asks())
    running = threading.Thread(target=runner.run)
    running.start()
    assert idle.wait(120)
    assert watches[0].done.wait(120)
    runner.stop()
    running.join(120)
    assert watches[0].answer["committed"]
    assert DeltaTable(tmp_path / "out").to_pyarrow_table().num_rows == 2


def test_the_files_of_the_ledger_are_kept_and_built_anew_after_any_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"), max_files=1)
    add(tmp_path / "in", "a", "b")
    run_to_end(options)
    pipeline = open_pipeline(options)
    files, first = LedgerFiles(pipeline), pipeline.load()

    def names(entry: Any) -> list[str]:
        return [Path(path).name for path, _ in files.load(entry)["files"]]

    assert names(first.entry) == ["a", "b"]
    add(tmp_path / "in", "c", "0")
    run_to_end(options)
    with monkeypatch.context() as patch:
        patch.setattr(type(pipeline), "add_known", lambda *_: pytest.fail("the whole chain was read again"))
        assert names(open_pipeline(options).load().entry) == ["0", "a", "b", "c"]
    assert names(first.entry) == ["a", "b"]  # another history, as after a rollback
    files.close()


def test_late_files_beyond_the_limit_are_found_by_the_next_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firnline.sources.files.source.MAX_LATE", 2)
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"))
    add(tmp_path / "in", "z")
    run_to_end(options)
    add(tmp_path / "in", *"abcdefg")
    assert load_status(open_pipeline(options)).files_outstanding == 7
    run_to_end(options)
    assert DeltaTable(tmp_path / "out").to_pyarrow_table().num_rows == 8

"""Files that are still being written are not read yet, hold up nothing else, and are read once they rest."""

from __future__ import annotations

import gzip
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sources.base import Limits, SourcePlan
from firnline.sources.files import planning
from firnline.sources.files.config import FilesSourceConfig
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.files.position import FileState, Progress
from firnline.sources.files.source import FileSource
from firnline.sources.known import KnownFiles
from firnline.testing.local import LocalEngine
from firnline.types import Json
from tests.support.pipelines import Recorder, pipeline_options, run_to_end

LIMITS = Limits(100, 1 << 40, 1 << 40, 60_000, 100, 1)
START = datetime(2026, 1, 1, tzinfo=UTC)


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.at)

    def monotonic(self) -> float:
        return 1000 + self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class World:
    """A folder, a clock and the source that reads the folder, epoch by epoch."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.clock = folder, HandClock()
        self.options = FileSourceOptions("s", str(folder), min_age_secs=2, **settings)
        self.open()
        self.position = self.source.start(None)
        self.epoch = 0

    def open(self) -> None:
        self.source = FileSource(self.options, clock=self.clock)

    def write(self, name: str, text: str, at: float | None = None) -> None:
        path = self.folder / name
        path.write_text(text)
        moment = (START + timedelta(seconds=self.clock.at if at is None else at)).timestamp()
        os.utime(path, (moment, moment))

    def plan(self) -> SourcePlan | None:
        return self.source.plan(self.position, LIMITS)

    def names(self, plan: SourcePlan | None) -> list[str]:
        return [Path(i["path"]).name for split in plan.splits for i in split.inputs] if plan else []

    def read(self, failed: str | None = None) -> list[str]:
        """One epoch: plan, and commit it."""
        plan = self.plan()
        if plan is None:
            return []
        paths = [str(item["path"]) for split in plan.splits for item in split.inputs]
        done: dict[str, Json] = {"failed": failed} if failed else {"to": 1, "offset": 9, "line": 1, "finished": True}
        before = self.position
        self.epoch += 1
        self.position, records = self.source.advance(plan, [{"path": path, **done} for path in paths], self.epoch)
        assert self.state.files.keys() <= FileState.from_json(self.source.replay(before, records)).files.keys()
        return self.names(plan)

    @property
    def state(self) -> FileState:
        return FileState.from_json(self.position)


def test_ten_lines_written_over_seven_seconds_are_read_once_they_rest(tmp_path: Path) -> None:
    world = World(tmp_path)
    for line in range(10):
        world.write("a", "{}\n" * (line + 1))
        assert world.plan() is None
        assert world.source.too_young() is not None
        assert world.source.backlog(world.position).files_outstanding == 1
        world.clock.at += 0.7
    assert world.plan() is None
    world.clock.at += 1.4
    plan = world.plan()
    assert plan is not None
    assert plan.size_bytes == 30
    assert world.source.too_young() is None


def test_a_young_file_holds_up_nothing_and_is_read_although_the_mark_passed_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a", "{}\n", at=-10)
    world.write("c", "{}\n", at=-10)
    world.write("b", "{}\n")
    assert world.read() == ["a", "c"]
    assert world.state.mark == str(tmp_path / "c")
    assert world.source.describe(world.position).facts["files_in_progress"] == 0
    assert world.source.backlog(world.position).files_outstanding == 1
    for number in range(20):  # it grows, and other files come: the position does not grow with them
        world.clock.at += 1
        world.write("b", "{}\n" * 5)
        world.write(f"d{number:02}", "{}\n", at=-10)
        assert len(world.read()) == 1
        assert list(world.state.files) == [str(tmp_path / "b")]
    world.open()  # another run
    assert world.read() == []
    world.clock.at += 2
    assert world.read() == ["b"]
    assert world.state.files == {}


def test_a_young_file_that_is_renamed_is_forgotten(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("b", "{}\n", at=-10)
    world.write("a.part", "{}\n")
    assert world.read() == ["b"]
    (tmp_path / "a.part").rename(tmp_path / "a.json")
    world.clock.at += 5
    assert world.read() == []
    assert (world.state.files, world.state.set_aside) == ({}, {})
    world.write("a.part", "{}\n", at=-10)  # the name comes back
    known = KnownFiles([(str(tmp_path / "b"), "")])
    late = world.source.find_late(world.position, known).late
    assert [Path(stat.name).name for stat in late] == ["a.json", "a.part"]


def test_a_time_in_the_future_is_not_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a", "{}\n", at=9999)
    assert world.plan() is None
    world.clock.at += 1.9
    assert world.plan() is None
    world.clock.at += 0.1
    assert world.names(world.plan()) == ["a"]


def test_a_look_takes_files_of_any_age(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a", "{}\n")
    assert world.source.plan(world.position, Limits(1, 1, 1, 1, 1, 1, any_age=True)) is not None


@pytest.mark.parametrize(("path", "age"), [("/in", 2.0), ("file:///in", 2.0), ("s3://bucket/in", 0.0)])
def test_the_default_age_is_that_of_the_place(path: str, age: float) -> None:
    options = FilesSourceConfig(path=path).build("s", lambda text, _: text)
    assert isinstance(options, FileSourceOptions)
    assert options.min_age_secs == age
    given = FilesSourceConfig(path=path, min_age_secs=0.5).build("s", lambda text, _: text)
    assert isinstance(given, FileSourceOptions)
    assert given.min_age_secs == 0.5


# -- tries --------------------------------------------------------------------------------------------


def test_tries_are_spaced_further_and_further() -> None:
    delays = [planning.retry_delay(attempts, 10) for attempts in (1, 2, 3, 6, 7, 99)]
    assert delays == [10, 20, 40, 300, 300, 300]
    assert planning.retry_delay(50, 1000) == 1000


def test_a_slow_upload_is_not_set_aside(tmp_path: Path) -> None:
    """Every try finds another version of the file: none counts against the next."""
    world = World(tmp_path, file_attempts=2, poll_interval_secs=10)
    for size in range(1, 6):
        world.write("a.gz", "x" * size, at=world.clock.at - 5)
        assert world.read(failed="truncated") == ["a.gz"]
        assert world.read() == []  # not before the delay is over
        world.clock.at += 10
    assert world.state.set_aside == {}
    assert world.read(failed="truncated") == ["a.gz"]  # unchanged: the second try of this version
    assert list(world.state.set_aside) == [str(tmp_path / "a.gz")]


def test_a_file_that_was_set_aside_is_tried_again_when_it_changes(tmp_path: Path) -> None:
    world = World(tmp_path, file_attempts=1)
    world.write("a.gz", "x", at=-10)
    assert world.read(failed="truncated") == ["a.gz"]
    world.source.reconcile(world.position, KnownFiles([(str(tmp_path / "a.gz"), "old")]))
    assert world.read() == []
    world.write("a.gz", "xyz")
    world.source.reconcile(world.position, KnownFiles([(str(tmp_path / "a.gz"), "old")]))
    assert world.read() == []  # it is young
    world.clock.at += 2
    assert world.read(failed="truncated") == ["a.gz"]
    assert world.read() == []  # set aside again, as this version
    world.write("a.gz", "whole")
    world.clock.at += 2
    world.source.reconcile(world.position, KnownFiles([(str(tmp_path / "a.gz"), "old")]))
    assert world.read() == ["a.gz"]
    assert (world.state.set_aside, world.state.files) == ({}, {})


def test_a_half_read_file_that_changed_is_not_tried_again_by_itself(tmp_path: Path) -> None:
    world = World(tmp_path, file_attempts=1)
    world.write("a", "{}\n{}\n", at=-10)
    half = Progress(records=1, offset=3, line=1, size_bytes=6, etag="other")
    world.position = FileState(str(tmp_path), files={str(tmp_path / "a"): half}).to_json()
    assert world.read() == []
    assert list(world.state.set_aside) == [str(tmp_path / "a")]
    world.source.reconcile(world.position, KnownFiles())
    assert world.read() == []


# -- whole runs ---------------------------------------------------------------------------------------


def rows(table: Path) -> int:
    return int(DeltaTable(table).to_pyarrow_table().num_rows)


def test_a_run_with_once_waits_for_young_files_and_says_so(tmp_path: Path) -> None:
    told: list[int] = []

    class Listens(Recorder):
        def too_young(self, files: int, seconds: float) -> None:
            told.append(files)

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text('{"id": 1}\n')
    moment = time.time() + 3600  # young by its own time, however slow this machine is
    os.utime(tmp_path / "in" / "a", (moment, moment))
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"), min_age_secs=0.3)
    assert Runner(open_pipeline(options, once=True), LocalEngine(1), Listens(), once=True).run().exit_code == 0
    assert told == [1]
    assert rows(tmp_path / "out") == 1


def test_a_broken_upload_is_read_by_a_later_run_once_it_is_whole(tmp_path: Path) -> None:
    folder, whole = tmp_path / "in", gzip.compress(b'{"id": 1}\n' * 1000)
    folder.mkdir()
    (folder / "a.gz").write_bytes(whole[:-20])
    (folder / "b").write_text('{"id": 2}\n')
    options = pipeline_options(str(folder), str(tmp_path / "out"))
    run_to_end(options)
    assert rows(tmp_path / "out") == 1
    (folder / "a.gz").write_bytes(whole)
    run_to_end(options)
    assert rows(tmp_path / "out") == 1001
    run_to_end(options)
    assert rows(tmp_path / "out") == 1001

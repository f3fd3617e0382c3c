"""Snapshots of a topology: what they cost chained pipelines under load, how long each hop takes, what they write."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path

from benchmarks.cases import Row, World
from benchmarks.turns import p50, round_off
from firnline.clock import SystemClock, monotonic
from firnline.history.topology.graph import make_topology
from firnline.history.topology.snapshot import Snapshots, SnapshotView
from firnline.options import BatchOptions, OperatorOptions, PipelineOptions
from firnline.run.observer import EpochFacts, Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.storage import open_storage
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Outcome
from firnline.topology.records import TopologyHome
from firnline.types import RandomIds

MEMBERS = 5
STATEFUL = 3  # the member that remembers keys
ROWS = 200  # of a file
EVERY_SECONDS = 10.0
KEPT = 1000  # all: their figures are read at the end
TIMEOUT = timedelta(minutes=10)
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.2, 1.0  # of the command
ROUNDS = 3
MOST_SLOWER = 0.03


@dataclass
class _Load(Observer):
    """The commits of one member."""

    rows: int = 0
    wanted: int = 0
    committed_at: list[float] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def committed(self, facts: EpochFacts) -> None:
        self.committed_at.append(monotonic())
        self.rows += facts.rows
        if self.wanted and self.rows >= self.wanted:
            self.done.set()

    @property
    def longest_gap(self) -> float:
        """Seconds between two commits, at most."""
        return max((after - before for before, after in zip(self.committed_at, self.committed_at[1:], strict=False)))


def topology(world: World) -> list[Row]:
    """A chain of five under load, without snapshots and with one every few seconds, in turns."""
    work = world.folder / "topology"
    files = max(20, int(400 * world.scale))
    plain: list[_Measured] = []
    marked: list[_Measured] = []
    for _ in range(world.rounds(ROUNDS)):
        for found, every in ((plain, None), (marked, EVERY_SECONDS if not world.is_trial else 0.2)):
            shutil.rmtree(work, ignore_errors=True)
            found.append(_measure(work, files, every))
    rate, without = (max(files * ROWS / one.seconds for one in found) for found in (marked, plain))
    views = [view for one in marked for view in one.views]
    rows = [
        Row(
            f"{MEMBERS} chained pipelines with a snapshot every {EVERY_SECONDS:g} s ({len(views)} of them)",
            round_off(rate),
            "rows/s",
            round_off(without),
            rate / without,
            f">= {1 - MOST_SLOWER:.2f}x",
            rate >= without * (1 - MOST_SLOWER),
        ),
        Row(
            "CPU of these pipelines, without the command that takes snapshots",
            round_off(min(one.cpu for one in marked)),
            "s",
            round_off(min(one.cpu for one in plain)),
            min(one.cpu for one in plain) / min(one.cpu for one in marked),
            f">= {1 - MOST_SLOWER:.2f}x",
            min(one.cpu for one in plain) >= min(one.cpu for one in marked) * (1 - MOST_SLOWER),
        ),
        Row(
            "longest time between two commits of a member",
            round_off(min(one.gap for one in marked)),
            "s",
            round_off(min(one.gap for one in plain)),
            min(one.gap for one in plain) / min(one.gap for one in marked),
        ),
        Row("a topology's snapshot, from order to outcome", round_off(p50(_took(views))), "ms"),
    ]
    for hop in range(1, MEMBERS + 1):
        times = [one["duration_ms"] for view in views for one in view.members if one["name"] == f"p{hop}"]
        rows.append(Row(f"record of hop {hop}, since the order", max(1.0, round_off(p50(times))), "ms"))
    return [*rows, *_size(work, max(1000, int(50_000 * world.scale)))]


def _took(views: Sequence[SnapshotView]) -> list[float]:
    return [float(view.end_to_end_duration_ms or 0) for view in views]


@dataclass(frozen=True)
class _Measured:
    seconds: float
    cpu: float  # of the whole process
    gap: float
    views: list[SnapshotView]


def _measure(work: Path, files: int, every: float | None) -> _Measured:
    members = _make_chain(work)
    _write(work / "in", 1, range(ROWS))
    for one in members:  # each has an epoch, and everything is loaded
        Runner(open_pipeline(one, once=True), LocalEngine(1), once=True).run()
    _write(work / "in", files, range(ROWS, ROWS * (files + 1)))
    snapshots = _open(work, members)
    loads = [_Load() for _ in members]
    loads[-1].wanted = files * ROWS
    with _taking(work, every) as finish:
        began, cpu = monotonic(), time.process_time()
        with _running(members, loads):
            loads[-1].done.wait()
            seconds = monotonic() - began
            used = time.process_time() - cpu
            finish()  # the members run until the last snapshot is complete
    views = [view for view in snapshots.list() if view.status == "COMPLETED"]
    if every is not None and not views:
        _take_stopped(snapshots, members)
        views = snapshots.list()
    return _Measured(seconds, used, max(one.longest_gap for one in loads), views)


def _size(work: Path, keys: int) -> list[Row]:
    """What a snapshot adds to the state on disk, if one key in a hundred has changed."""
    shutil.rmtree(work, ignore_errors=True)
    members = _make_chain(work)
    snapshots = _open(work, members)
    sizes = []
    for batch in (range(keys), range(keys, keys + keys // 100)):
        _write(work / "in", 1, batch)
        for one in members:
            Runner(open_pipeline(one, once=True), LocalEngine(1), once=True).run()
        _take_stopped(snapshots, members)
        sizes.append(_state_size(work))
    added = sizes[1] - sizes[0]
    words = f"state that a snapshot adds, 1 % of {keys:,} keys changed"
    return [Row(words, round_off(added / 1000), "KB", round_off(sizes[0] / 1000), sizes[0] / added)]


def _state_size(work: Path) -> int:
    return sum(path.stat().st_size for path in work.rglob("state/**/*") if path.is_file())


def _take_stopped(snapshots: Snapshots, members: Sequence[PipelineOptions]) -> None:
    order = snapshots.order(TIMEOUT)
    for one in members:
        Runner(open_pipeline(one, once=True), LocalEngine(1), once=True).run()
    assert snapshots.settle(order)[0] is Outcome.COMMIT


@contextlib.contextmanager
def _taking(work: Path, every: float | None) -> Iterator[Callable[[], None]]:
    """Take snapshots in another process, as the command does. Yields what ends it, after its last snapshot."""
    if every is None:
        yield lambda: None
        return
    context = multiprocessing.get_context("spawn")
    is_ready, is_over = context.Event(), context.Event()
    process = context.Process(target=_take, args=(work, every, is_ready, is_over), daemon=True)
    process.start()
    is_ready.wait()

    def finish() -> None:
        is_over.set()
        process.join()
        if process.exitcode:
            raise RuntimeError("the process that takes snapshots failed")

    try:
        yield finish
    finally:
        process.kill()


def _take(work: Path, every: float, is_ready: Event, is_over: Event) -> None:
    snapshots = _open(work, _make_chain(work))
    is_ready.set()  # its imports are no cost of a snapshot: the command is started once
    while not is_over.wait(every):
        order, pause = snapshots.order(TIMEOUT), POLL_SECONDS
        while (found := snapshots.settle(order))[0] is Outcome.WAIT:
            SystemClock().sleep(pause)
            pause = min(pause * 1.5, LONGEST_POLL_SECONDS)
        assert found[0] is Outcome.COMMIT, found
        snapshots.keep(KEPT)


def _open(work: Path, members: Sequence[PipelineOptions]) -> Snapshots:
    home = TopologyHome(open_storage(str(work / "home")), "bench")
    return Snapshots(make_topology(members), home, SystemClock(), RandomIds())


def _make_chain(work: Path) -> list[PipelineOptions]:
    members = []
    for number in range(1, MEMBERS + 1):
        before, name = f"p{number - 1}", f"p{number}"
        files = FileSourceOptions("rows", str(work / "in"), poll_interval_secs=0.05, min_age_secs=0.0)
        table = DeltaSourceOptions("rows", str(work / before), poll_interval_secs=0.05)
        once = OperatorOptions("once", "deduplicate", ("rows",), {"keys": ["id"]})
        is_stateful = number == STATEFUL
        members.append(
            PipelineOptions(
                name=name,
                sources=(files if number == 1 else table,),
                operators=(once,) if is_stateful else (),
                sinks=(DeltaSinkOptions(name, str(work / name), input="once" if is_stateful else "rows"),),
                batch=BatchOptions(max_files=2),
            )
        )
    return members


def _write(folder: Path, files: int, ids: range) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-len(ids) // files)
    for number in range(files):
        lines = (json.dumps({"id": n, "name": f"row {n}", "value": n / 3}) for n in ids[number * each :][:each])
        (folder / f"{ids[0]:09}-{number:06}.ndjson").write_text("".join(f"{line}\n" for line in lines))


@contextlib.contextmanager
def _running(members: Sequence[PipelineOptions], loads: Sequence[_Load]) -> Iterator[None]:
    runners = [Runner(open_pipeline(one), LocalEngine(1), load) for one, load in zip(members, loads, strict=True)]
    threads = [threading.Thread(target=runner.run, daemon=True) for runner in runners]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for runner in runners:
            runner.stop()
        for thread in threads:
            thread.join()

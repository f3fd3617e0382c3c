"""Power fails at any moment: what was acknowledged is on the disk, and the next run goes on from it.

Real runs are recorded (`testing.power`), the disks that a cut may leave are rebuilt, read by delta-rs before any
code of ours has seen them, and then opened by a real run, which has one more file to read.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from firnline.epoch import messages as m
from firnline.errors import FirnlineError, TornCommitError
from firnline.options import PipelineOptions, StoreOptions
from firnline.run.steps import Steps
from firnline.sinks.delta.durable import DurableLog
from firnline.sinks.delta.options import DeltaSinkOptions, delta_tables
from firnline.storage import fsync_path
from firnline.stores import open_store
from firnline.stores.record import CheckpointRecord
from firnline.stores.sqlite import SqliteStore
from firnline.testing.stores import sample_record
from tests.support.committers import commit_table
from tests.support.keyed import KeyedInput, keyed_options
from tests.support.pipelines import delta_table, pipeline_options, run_once, run_to_end
from tests.support.power import Cut, Disk, Drop, Moment, choose, volatile
from tests.support.proof import covered
from tests.support.samples import SampleInput, newest_entry

PROOF = bool(os.environ.get("FIRNLINE_PROOF"))
CUTS = 2000 if PROOF else 24  # of one recorded run
KILLS = 200 if PROOF else 6  # moments of one recorded run at which it is killed first
SUBSETS = 8 if PROOF else 1

pytestmark = [pytest.mark.crash, pytest.mark.timeout(7200 if PROOF else 300)]

FILES = 3
FINAL = FILES + 1
NAME = "demo"


@pytest.fixture(autouse=True)
def _started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes from before the cut are gone, though here this very process plays them."""
    monkeypatch.setattr("firnline.committer.service.has_exited", lambda *_: True)


@dataclass
class World:
    """A pipeline whose tables, ledger, state and store lie on a disk that is followed."""

    options: PipelineOptions
    disk: Disk
    add: Callable[[], object]  # one more input file, which is one more epoch
    expected: dict[str, dict[int, list[Any]]] = field(default_factory=dict)  # sink -> epoch -> rows

    @property
    def staged(self) -> bool:
        return delta_table(self.options).mode == "staged"

    def record(self) -> None:
        """Run over the first files; then find out, without trouble, what each epoch has to give."""
        for _ in range(FILES):
            self.add()
        with self.disk.recording():
            self.work()
        self.add()

    def work(self) -> None:
        """One run, and the committer after it; what it is told counts as acknowledged."""
        with acknowledging(self.disk):
            run_to_end(self.options)
        if self.staged:
            self.commit()

    def commit(self) -> None:
        for sink in self.options.sinks:
            commit_table(sink.location)
            self.disk.acknowledge(f"committed {sink.name}", epoch_of(sink.location, intact_version(sink.location)))

    def learn(self) -> None:
        """What each epoch has to give, by a run without trouble over all the input."""
        with volatile():
            Cut("", {}, {}).restore(self.disk.root)
            direct = tuple(
                replace(sink, mode="direct") for sink in delta_tables(self.options.sinks)
            )  # a version for every epoch
            run_to_end(replace(self.options, sinks=direct))
        for sink in self.options.sinks:
            found: dict[int, list[Any]] = {0: []}
            for version in range(intact_version(sink.location) + 1):
                found[epoch_of(sink.location, version)] = rows_of(sink.location, version)
            self.expected[sink.name] = found

    def verify(self, cut: Cut) -> None:
        """Nothing that was acknowledged is lost, nothing doubled; and a run over what is left gives all of it."""
        with volatile():
            cut.restore(self.disk.root)
            check_state(self.disk.root)
            for sink in delta_tables(self.options.sinks):
                self.check(sink, cut.acknowledged.get(f"committed {sink.name}" if self.staged else sink.name, 0))
            if self.staged:
                for sink in delta_tables(self.options.sinks):
                    mended((sink,), partial(commit_table, sink.location))
                    self.check(sink, cut.acknowledged.get(sink.name, 0))
            mended(delta_tables(self.options.sinks), self.run)
            for sink in delta_tables(self.options.sinks):
                if self.staged:
                    commit_table(sink.location)
                self.check(sink, FINAL)

    def run(self) -> None:
        result = run_once(self.options).result
        if result.error is not None:
            raise result.error

    def check(self, sink: DeltaSinkOptions, acknowledged: int) -> None:
        version = intact_version(sink.location)
        epoch = epoch_of(sink.location, version)
        assert epoch >= acknowledged
        if epoch:
            assert rows_of(sink.location, version) == self.expected[sink.name][epoch]
            check_ledger(Path(self.options.deciding.location), sink, version)


def mended(sinks: tuple[DeltaSinkOptions, ...], work: Callable[[], object]) -> None:
    """Do something; where it stops at a commit file that the cut has torn, take that away as the error says."""
    for _ in sinks:
        try:
            work()
            return
        except TornCommitError as error:
            os.rename(*re.findall(r"'(.*?)'", error.hint)[:2])
    work()


@contextmanager
def acknowledging(disk: Disk) -> Iterator[None]:
    """Whatever a sink answers to a commit is acknowledged."""

    def told(original: Any) -> Any:
        def call(self: Steps, name: str, epoch: int) -> m.Event:
            event: m.Event = original(self, name, epoch)
            if isinstance(event, m.Committed):
                disk.acknowledge(name, epoch)
            return event

        return call

    with (
        mock.patch.object(Steps, "commit", told(Steps.commit)),
        mock.patch.object(Steps, "find_receipt", told(Steps.find_receipt)),
    ):
        yield


def intact_version(table: str) -> int:
    """The newest version up to which every commit file can be read, be it an empty one; -1 without a table."""
    version = -1
    while True:
        path = Path(table, "_delta_log", f"{version + 1:020d}.json")
        try:
            lines = path.read_bytes().splitlines()
            actions = [json.loads(line) for line in lines]
            if version < 0 and not any("metaData" in action for action in actions):
                return version
        except (FileNotFoundError, ValueError):
            return version
        version += 1


def epoch_of(table: str, version: int) -> int:
    if version < 0:
        return 0
    return DeltaTable(table, version=version).transaction_version(f"firnline:{NAME}") or 0


def rows_of(table: str, version: int) -> list[str]:
    """Every row, without what is null in it, in order."""
    rows = DeltaTable(table, version=version).to_pyarrow_table().to_pylist()
    return sorted(json.dumps({k: v for k, v in row.items() if v is not None}, sort_keys=True) for row in rows)


def check_ledger(root: Path, sink: DeltaSinkOptions, version: int) -> None:
    """Every entry that the log names is there, back to the first epoch; read as plain JSON."""
    if Path(sink.location) != root:
        return
    name = newest_entry(root, NAME, version)
    count = epoch_of(sink.location, version)
    while name is not None:
        entry = json.loads((root / "_firnline" / NAME / "ledger" / name).read_bytes())
        for file in entry["quarantine"]:
            assert (root / "_firnline" / NAME / "quarantine" / file["name"]).stat().st_size
        name = entry["previous"]["name"] if entry["previous"] else None
        count -= 1
    assert count == 0


def check_state(root: Path) -> None:
    """A checkpoint of state that is COMMITTED is complete: every file that it names is whole."""
    for committed in root.glob(f"*/_firnline/{NAME}/state/*/COMMITTED"):
        shards = json.loads(committed.read_bytes())["shards"]
        for number in range(len(shards)):
            for named in json.loads((committed.parent / f"shard_{number}" / "metadata.json").read_bytes())[
                "operators"
            ].values():
                for file in (*named["runs"], *named["timers"]):
                    data = (committed.parent.parent / file["path"]).read_bytes()
                    assert (len(data), zlib.crc32(data)) == (file["size_bytes"], file["crc32"])


# -- the pipelines ------------------------------------------------------------------------------------


def plain(folder: Path, drop: Drop, **settings: Any) -> World:
    """Files into Delta tables; the third file brings a new column."""
    sample = SampleInput(folder / "in")
    disk = Disk(folder / "disk", drop)
    store = StoreOptions(type=settings.pop("store", "file"), path=str(disk.root / "store"))
    names = settings.pop("tables", ("delta",))
    mode = settings.pop("mode", "direct")
    sinks = tuple(
        DeltaSinkOptions(name, str(disk.root / name), mode=mode, partition_by=("month",) if number else ())
        for number, name in enumerate(names)
    )
    options = pipeline_options(
        str(sample.folder), "", name=NAME, sinks=sinks, store=store, max_files=1, max_inflight=1, **settings
    )
    count = iter(range(1, 100))

    def add() -> None:
        number = next(count)
        sample.add(f"f{number}.json", 3, bad=1, **({"extra": "x"} if number > 2 else {}))

    return World(options, disk, add)


def keyed(folder: Path, drop: Drop) -> World:
    """An operator with state, whose answers are upserted."""
    disk = Disk(folder / "disk", drop)
    options = keyed_options(folder, table="disk/delta", max_inflight=1)
    return World(replace(options, name=NAME), disk, KeyedInput(folder / "in").add)


def never(_caller: str, _path: str) -> bool:
    return False


WORLDS: dict[str, Callable[[Path, Drop], World]] = {
    "direct": plain,
    "sqlite": lambda folder, drop: plain(folder, drop, store="sqlite"),
    "two sinks": lambda folder, drop: plain(folder, drop, tables=("one", "two")),
    "staged": lambda folder, drop: plain(folder, drop, mode="staged"),
    "state and upsert": keyed,
}


def cuts_of(moments: list[Moment], most: int = CUTS) -> list[Cut]:
    """Half of them the worst of a moment, half of all kinds."""
    worst = choose((next(moment.cuts()) for moment in moments), most // 2)
    found = worst + choose((cut for moment in moments for cut in moment.cuts(subsets=SUBSETS)), most // 2)
    covered["disks after a power cut"] += len(found)
    return found


def verify(world: World, cut: Cut) -> None:
    try:
        world.verify(cut)
    except BaseException as error:
        raise AssertionError(f"after a power cut at {cut.label!r}; acknowledged: {cut.acknowledged}") from error


@pytest.mark.parametrize("kind", WORLDS)
def test_power_fails_at_any_moment(tmp_path: Path, kind: str) -> None:
    world = WORLDS[kind](tmp_path, never)
    world.record()
    moments = list(world.disk.moments)
    assert moments[-1].acknowledged
    world.learn()
    for cut in cuts_of(moments):
        verify(world, cut)


@pytest.mark.parametrize("kind", ["direct", "two sinks", "staged", "state and upsert"])
def test_power_fails_after_a_killed_run_was_followed_by_another(tmp_path: Path, kind: str) -> None:
    """The second run builds on what the first one left without an fsync: it has to make that durable itself."""
    world = WORLDS[kind](tmp_path, never)
    world.record()
    undone = [moment for moment in world.disk.moments if not moment.is_durable()]
    world.learn()
    for number in range(min(KILLS, len(undone))):
        killed = undone[len(undone) * number // min(KILLS, len(undone))]
        world.disk.resume(killed)
        with world.disk.recording():
            world.work()
        try:
            for cut in cuts_of(world.disk.moments[-1:], 4 if PROOF else 2):
                verify(world, cut)
        except AssertionError as error:
            raise AssertionError(f"killed at {killed.label!r}") from error


# -- stores -------------------------------------------------------------------------------------------

KEY = "orders"


def write_store(options: StoreOptions, disk: Disk) -> None:
    """Versions, one of them packed, and a prune."""
    with disk.recording(), closing(open_store(options)) as store:
        for version in range(1, 6):
            store.compress_above_bytes = 1 if version == 4 else 1_000_000
            assert store.put(KEY, sample_record(version), expected=version - 1, note=f"n{version}") == version
            disk.acknowledge(KEY, version)
            if version == 3:
                store.prune(KEY, 2)


def verify_store(options: StoreOptions, disk: Disk, cut: Cut) -> None:
    with volatile():
        cut.restore(disk.root)
        with closing(open_store(options)) as store:
            latest = store.latest_version(KEY)
            assert latest >= cut.acknowledged.get(KEY, 0)
            kept = [info.version for info in store.list_versions(KEY)]
            assert kept == list(range(latest, latest - len(kept), -1))
            for version in kept:
                assert store.get(KEY, CheckpointRecord, version=version) == sample_record(version)
            assert store.put(KEY, sample_record(latest + 1), expected=latest) == latest + 1
            assert store.get(KEY, CheckpointRecord) == sample_record(latest + 1)


def store_options(kind: Literal["file", "sqlite"], disk: Disk) -> StoreOptions:
    return StoreOptions(type=kind, path=str(disk.root / "deep" / "store"))


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_power_fails_while_a_store_is_written(tmp_path: Path, kind: Literal["file", "sqlite"]) -> None:
    disk = Disk(tmp_path / "disk")
    options = store_options(kind, disk)
    write_store(options, disk)
    for cut in cuts_of(disk.moments, 4 * CUTS):
        try:
            verify_store(options, disk, cut)
        except BaseException as error:
            raise AssertionError(f"after a power cut at {cut.label!r}; acknowledged: {cut.acknowledged}") from error


# -- planted bugs -------------------------------------------------------------------------------------


def dropping(*callers: str, folders: bool, below: str = "") -> Drop:
    """Leave out the fsyncs that a function asks for, those of folders or those of files."""
    return lambda caller, path: caller in callers and os.path.isdir(path) == folders and below in path


MUTANTS: dict[str, tuple[str, Drop]] = {
    "commit file": ("direct", dropping("DurableLog.sync", folders=False)),
    "folder of the log": ("direct", dropping("DurableLog._sync_folders", folders=True)),
    "data of a put": ("direct", dropping("LocalStorage._put", folders=False)),
    "folder of a put": ("direct", dropping("LocalStorage._put", folders=True)),
    "unit": ("staged", dropping("LocalStorage._put", folders=True, below="/pending")),
    "staged file": ("direct", dropping("_DurableFile.close", folders=False)),
    "folder of a staged file": ("two sinks", dropping("_DurableFile.close", folders=True)),
    "new folders": ("direct", dropping("make_folders", folders=True)),
    "state files": ("state and upsert", dropping("_DurableFile.close", folders=False, below="/state/")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_left_out_fsync_is_caught(tmp_path: Path, mutant: str) -> None:
    kind, drop = MUTANTS[mutant]
    world = WORLDS[kind](tmp_path, drop)
    world.record()
    moments = world.disk.moments[::-1]  # the last ones have promised most
    world.learn()
    assert any(is_caught(partial(world.verify, next(moment.cuts()))) for moment in moments[:40])


def test_an_adopted_commit_that_is_not_made_durable_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = WORLDS["direct"](tmp_path, never)
    world.record()
    killed = [moment for moment in world.disk.moments if moment.label == "delta.commit.after"][-1]
    world.learn()
    world.disk.resume(killed)

    def sync_own(self: DurableLog, version: int, *, written: bool = False) -> None:
        if written:
            fsync_path(os.path.join(self._folder, f"{version:020d}.json"))
            fsync_path(self._folder)

    with monkeypatch.context() as patch:
        patch.setattr(DurableLog, "sync", sync_own)
        with world.disk.recording():
            world.work()
    assert is_caught(partial(world.verify, next(world.disk.moments[-1].cuts())))


@pytest.mark.parametrize("mutant", ["data", "folder"])
def test_a_left_out_fsync_of_the_file_store_is_caught(tmp_path: Path, mutant: str) -> None:
    drops = {
        "data": dropping("FileStore._write_temporary", folders=False),
        "folder": dropping("FileStore._publish", folders=True),
    }
    disk = Disk(tmp_path / "disk", drops[mutant])
    options = store_options("file", disk)
    write_store(options, disk)
    assert is_caught(partial(verify_store, options, disk, next(disk.moments[-1].cuts())))


@pytest.mark.parametrize("synchronous", ["OFF", "NORMAL"])
def test_a_weaker_synchronous_of_sqlite_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: str
) -> None:
    disk = Disk(tmp_path / "disk")
    options = store_options("sqlite", disk)
    original = SqliteStore._connect

    def weakened(self: SqliteStore) -> sqlite3.Connection:
        db = original(self)
        db.execute(f"PRAGMA synchronous = {synchronous}")
        return db

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "_connect", weakened)
        write_store(options, disk)
    moments = [moment for moment in disk.moments if moment.acknowledged]
    assert any(is_caught(partial(verify_store, options, disk, next(moment.cuts()))) for moment in moments)


def is_caught(check: Callable[[], None]) -> bool:
    try:
        check()
    except (AssertionError, FirnlineError, OSError, DeltaError, ValueError):
        return True
    return False

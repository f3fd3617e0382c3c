"""What a snapshot of a topology needs survives gc, vacuum, compaction and clean-up of the log, at any moment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

import firnline.maintenance.log_names
import firnline.sinks.delta.sweeps
import firnline.sinks.delta.table
from firnline.checkpoint.codec import canonical, seal
from firnline.clock import SystemClock
from firnline.errors import SinkError
from firnline.history.status import load_status
from firnline.history.topology import snapshot as snapshot_module
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.savepoint import create_topology_savepoint
from firnline.history.topology.snapshot import Snapshots
from firnline.history.topology.stopped import paused_run
from firnline.maintenance.compact import compact
from firnline.maintenance.gc import gc, vacuum
from firnline.names import log_cleanup, topology_copy
from firnline.process import find_process
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.log_cleanup import find_clean_up
from firnline.sinks.delta.table import Table
from firnline.storage import open_storage
from firnline.testing.local import LocalEngine
from firnline.topology import records as records_module
from firnline.topology.decide import Decision, Outcome
from firnline.topology.records import Order, TopologyHome, held_records
from firnline.types import RandomIds
from tests.support.pipelines import run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.topologies import TIMEOUT, member, open_snapshots, settle

Sweep = Callable[[Path], object]


def sweep_gc(table: Path) -> object:
    return gc(str(table), grace_seconds=0)


def sweep_vacuum(table: Path) -> object:
    return vacuum(str(table), retention_hours=0, allow_short_retention=True)


SWEEPS = pytest.mark.parametrize("sweep", [sweep_gc, sweep_vacuum], ids=["gc", "vacuum"])


@pytest.fixture(autouse=True)
def no_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for removed files that are older than the table's retention."""
    retention = firnline.maintenance.log_names.DEFAULT_RETENTION
    monkeypatch.setattr(firnline.maintenance.log_names, "DEFAULT_RETENTION", -retention)


class Lake:
    """files -> a -> b; b has read the first of three files, and the table of a is compacted since."""

    def __init__(self, folder: Path) -> None:
        self.sample = SampleInput(folder / "in")
        self.members = [member(folder, "a", max_files=1), member(folder, "b", "a")]
        self.table = folder / "a"
        self.sample.add("f1.json", 3)
        for one in self.members:
            run_to_end(one)
        for number in (2, 3):
            self.sample.add(f"f{number}.json", 3)
            run_to_end(self.members[0])
        self.snapshots = open_snapshots(folder, self.members)

    def compact(self) -> None:
        assert compact(str(self.table)).files_removed > 1

    def complete(self, order: Order) -> None:
        a, b = self.members
        run_to_end(a)
        with paused_run(b, LocalEngine(1), lambda _: None):  # it records what it has read so far, and reads nothing
            assert settle(self.snapshots, order) == (Outcome.COMMIT, "")

    def check_restore(self, order: Order) -> None:
        """Everything that was in the channel at the cut comes to the reader, once."""
        restore(self.snapshots, order.snapshot)
        for one in self.members:
            run_to_end(one)
            assert table_ids(one.sinks[0].location) == self.sample.ids


def restore(snapshots: Snapshots, snapshot: str) -> None:
    order = find_or_order(snapshots, *find_snapshot_epochs(snapshots, snapshot), SystemClock(), RandomIds())
    result = perform_restore(snapshots, order, RandomIds().new(), SystemClock(), lambda _: None)
    assert (result.decision, result.reason) == (Decision.GO, "")


def data_files(table: Path) -> set[str]:
    return {path.name for path in table.rglob("*.parquet") if "_delta_log" not in path.parts}


@SWEEPS
def test_sweeps_spare_what_an_open_and_a_complete_snapshot_need(tmp_path: Path, sweep: Sweep) -> None:
    lake = Lake(tmp_path)
    before = data_files(lake.table)
    order = lake.snapshots.order(TIMEOUT)
    lake.compact()
    sweep(lake.table)  # the pin is open
    assert data_files(lake.table) > before
    lake.complete(order)
    sweep(lake.table)  # the pin is narrow
    assert data_files(lake.table) > before
    lake.check_restore(order)


@SWEEPS
def test_a_dropped_snapshot_protects_nothing(tmp_path: Path, sweep: Sweep) -> None:
    lake = Lake(tmp_path)
    order = lake.snapshots.order(TIMEOUT)
    lake.complete(order)
    lake.compact()
    lake.snapshots.drop(order.snapshot)
    sweep(lake.table)
    assert data_files(lake.table) == {Path(name).name for name in DeltaTable(lake.table).file_uris()}


def test_a_limit_of_time_or_bytes_drops_the_oldest_snapshots(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    orders = [lake.snapshots.order(TIMEOUT) for _ in range(2)]
    for order in orders:
        lake.complete(order)
    assert lake.snapshots.find_held_files() == {}
    lake.compact()
    held = lake.snapshots.find_held_files()
    assert {Path(name).name for name in held} == data_files(lake.table) - {
        Path(name).name for name in DeltaTable(lake.table).file_uris()
    }
    assert lake.snapshots.limit_hold(timedelta(days=1)) == lake.snapshots.limit_hold(sum(held.values())) == {}
    first, second = lake.snapshots.find_complete()
    lake.snapshots.drop(first)
    (dropped,) = lake.snapshots.limit_hold(sum(held.values()) - 1).items()
    assert dropped[0] == second
    assert "more than" in dropped[1]
    assert lake.snapshots.find_held_files() == {}
    assert lake.snapshots.limit_hold(timedelta(0)) == {}, "nothing is left to drop"


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("alarm: ")]


def test_a_run_drops_a_snapshot_that_is_held_beyond_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody takes snapshots any more, so no command drops it."""
    lake = Lake(tmp_path)
    a = lake.members[0]
    kept, order = (lake.snapshots.order(TIMEOUT, most) for most in (timedelta(days=1), timedelta(0)))
    for one in (kept, order):
        lake.complete(one)
    run_to_end(a)
    caplog.clear()
    lake.sample.add("f4.json", 3)
    run_to_end(a)
    assert f"snapshot {order.snapshot} of a topology was dropped: its max_hold was over" in alarms(caplog)[0]
    assert [view.status for view in lake.snapshots.list()] == ["DROPPED", "COMPLETED"]
    assert load_status(open_pipeline(a)).overdue_snapshots == []
    sweep_gc(lake.table)
    pins = [path.stem for path in (lake.table / "_firnline/pins").glob("topology-*")]
    assert pins == [f"topology-{kept.snapshot}"], "gc deletes the pins of a snapshot that was dropped"
    lake.check_restore(kept)


def test_a_run_warns_of_a_snapshot_that_it_cannot_drop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path)
    a = lake.members[0]
    order = lake.snapshots.order(TIMEOUT, timedelta(0))
    lake.complete(order)
    run_to_end(a)
    caplog.clear()
    lake.sample.add("f4.json", 3)

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(TopologyHome, "put_dropped", refuse)
        run_to_end(a)
    command = f"firnline topology drop {order.snapshot} --yes"
    (alarm,) = alarms(caplog)
    assert f"beyond its max_hold, which ended at {order.hold_until}; to drop it: {command}" in alarm
    (overdue,) = load_status(open_pipeline(a)).overdue_snapshots
    assert (overdue["snapshot"], overdue["command"]) == (order.snapshot, command)
    lake.snapshots.drop(order.snapshot)
    assert load_status(open_pipeline(a)).overdue_snapshots == []


def test_a_run_aborts_a_snapshot_whose_command_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path)
    a = lake.members[0]
    order = lake.snapshots.order(timedelta(0))
    run_to_end(a)  # it records; nobody completes the snapshot
    lake.sample.add("f4.json", 3)
    run_to_end(a)
    assert [one.snapshot for one in lake.snapshots.find_open()] == [order.snapshot], "its command comes first"
    monkeypatch.setattr(records_module, "UNATTENDED", timedelta(0))
    lake.sample.add("f5.json", 3)
    run_to_end(a)
    (view,) = lake.snapshots.list()
    assert view.status == "FAILED"
    assert view.reason == f"its time limit was over at {order.expires_at}, and no command completed it"
    assert alarms(caplog) == [f"alarm: snapshot {order.snapshot} of a topology was aborted: {view.reason}"]
    lake.sample.add("f6.json", 3)
    run_to_end(a)
    checkpoint = open_pipeline(a).load().checkpoint
    assert checkpoint is not None
    assert held_records(checkpoint.topology) == {}, "it holds no floor"
    sweep_gc(lake.table)
    assert not list((lake.table / "_firnline/pins").glob("topology-*"))


class At:
    """Does something when a fault point is reached for the first time: whoever reached it stands still meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, point: str, action: Callable[[], object]) -> None:
        self._point, self._action = point, action
        self.found: list[object] = []
        for module in (firnline.sinks.delta.sweeps, firnline.sinks.delta.table):
            monkeypatch.setattr(module, "fault_point", self._reached)

    def _reached(self, point: str) -> None:
        if point == self._point:
            self._point = ""
            try:
                self.found.append(self._action())
            except SinkError as error:
                self.found.append(error)


@SWEEPS
def test_a_pin_that_comes_before_a_sweep_is_bound_is_seen_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: Sweep
) -> None:
    lake = Lake(tmp_path)
    lake.compact()
    before = data_files(lake.table)
    at = At(monkeypatch, "sweep.declare.before", lambda: lake.snapshots.order(TIMEOUT))
    sweep(lake.table)
    (order,) = at.found
    assert isinstance(order, Order)
    assert data_files(lake.table) == before
    lake.complete(order)
    lake.check_restore(order)


@SWEEPS
@pytest.mark.parametrize("point", ["sweep.declare.after", "delta.sweep.after", "sweep.end.before"])
def test_a_snapshot_is_refused_while_a_sweep_deletes_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: Sweep, point: str
) -> None:
    lake = Lake(tmp_path)
    lake.compact()
    at = At(monkeypatch, point, lambda: lake.snapshots.order(TIMEOUT))
    sweep(lake.table)
    assert isinstance(at.found[0], SinkError)
    assert "are being deleted by" in at.found[0].message
    assert lake.snapshots.find_open() == []
    assert not list((lake.table / "_firnline/pins").glob("topology-*"))


def test_the_log_is_not_cleaned_up_while_a_snapshot_needs_it(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    DeltaTable(lake.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    order = lake.snapshots.order(TIMEOUT)
    clean_up(lake.table)
    assert (lake.table / "_delta_log/00000000000000000000.json").exists()
    lake.complete(order)
    clean_up(lake.table)
    lake.check_restore(order)
    lake.snapshots.drop(order.snapshot)
    clean_up(lake.table)
    assert not (lake.table / "_delta_log/00000000000000000000.json").exists()


OLDEST = "_delta_log/00000000000000000000.json"


def test_the_log_is_cleaned_up_below_what_snapshots_need(tmp_path: Path) -> None:
    """A topology with periodic snapshots has a pin at any time: its logs must not grow for ever."""
    lake = Lake(tmp_path)
    a, b = lake.members
    DeltaTable(lake.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 1 hour"})
    run_to_end(b)
    clean_up(lake.table)
    begin = DeltaTable(lake.table).version()
    for number in (4, 5):
        lake.sample.add(f"f{number}.json", 3)
        run_to_end(a)
        if number == 4:
            run_to_end(b)
    order = lake.snapshots.order(TIMEOUT)
    clean_up(lake.table)
    assert log_versions(lake.table)[0] == begin, "the order is open: everything from the reader's version on stays"
    lake.complete(order)
    lake.sample.add("f6.json", 3)
    run_to_end(a)
    clean_up(lake.table)
    assert log_versions(lake.table) == list(range(begin, DeltaTable(lake.table).version() + 1))
    create_topology_savepoint(lake.snapshots, order.snapshot, str(tmp_path / "saved"))
    lake.check_restore(order)


def test_a_clean_up_below_a_pin_spares_young_versions_and_what_a_damaged_pin_may_need(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    DeltaTable(lake.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 1 hour"})
    run_to_end(lake.members[1])
    table = Table(str(lake.table), {})
    for _ in range(2):
        table.refresh()
        table.delta.create_checkpoint()
        lake.complete(lake.snapshots.order(TIMEOUT))
    newest = DeltaTable(lake.table).version()
    table.refresh()
    table.checkpoint()
    assert log_versions(lake.table) == list(range(newest + 1)), "all are younger than the retention"
    (pin, *_) = (lake.table / "_firnline/pins").glob("topology-*")
    body = pin.read_bytes()
    pin.write_bytes(b"{")
    clean_up(lake.table)
    assert (lake.table / OLDEST).exists(), "it might need any version"
    pin.write_bytes(body)
    clean_up(lake.table)
    assert not (lake.table / OLDEST).exists()


def log_versions(table: Path) -> list[int]:
    return sorted(int(path.stem) for path in (table / "_delta_log").glob("*.json"))


def test_an_order_that_comes_while_the_log_is_cleaned_up_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clean-up has looked for pins, and stands still before it deletes."""
    lake = Lake(tmp_path)
    DeltaTable(lake.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    monkeypatch.setattr(snapshot_module, "CLEAN_UP_SECONDS", 0.0)
    at = At(monkeypatch, "delta.cleanup.before", lambda: lake.snapshots.order(TIMEOUT))
    clean_up(lake.table)
    (refused,) = at.found
    assert isinstance(refused, SinkError)
    assert "is being cleaned up" in refused.message
    assert lake.snapshots.find_open() == []
    assert not (lake.table / OLDEST).exists()
    assert not list((lake.table / "_firnline/sweeps").glob("log-*"))
    with pytest.raises(SinkError, match="lacks a version"):  # which b has yet to read
        lake.snapshots.order(TIMEOUT)


def test_a_restore_does_not_clean_the_log_up(tmp_path: Path) -> None:
    """Its commit is delta-rs' own RESTORE, which cleans up by default."""
    lake = Lake(tmp_path)
    DeltaTable(lake.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    order = lake.snapshots.order(TIMEOUT)
    lake.complete(order)
    lake.sample.add("f4.json", 3)
    for one in lake.members:
        run_to_end(one)
    clean_up(lake.table)  # writes a checkpoint, and sees the pin
    lake.check_restore(order)
    assert (lake.table / OLDEST).exists()
    lake.check_restore(order)


def test_a_clean_up_that_was_declared_before_a_pin_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path)
    DeltaTable(lake.table).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    at = At(monkeypatch, "delta.checkpoint.sync.after", lambda: lake.snapshots.order(TIMEOUT))
    clean_up(lake.table)
    (order,) = at.found
    assert isinstance(order, Order)
    assert (lake.table / OLDEST).exists()
    lake.complete(order)
    lake.check_restore(order)


def test_a_clean_up_whose_process_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    storage = open_storage(str(lake.table))
    killed = subprocess.Popen(["sleep", "600"])
    body = {"below": 9, "process": asdict(find_process(killed.pid))}
    storage.put(log_cleanup("0" * 16), canonical(seal(body)))
    assert find_clean_up(storage, 8) == log_cleanup("0" * 16)
    assert find_clean_up(storage, 9) is None, "it deletes nothing that is needed"
    killed.kill()
    killed.wait()
    assert find_clean_up(storage, 8) is None
    lake.complete(lake.snapshots.order(TIMEOUT))
    clean_up(lake.table)
    assert not list((lake.table / "_firnline/sweeps").glob("log-*"))
    storage.put(log_cleanup("0" * 16), b"{")
    assert find_clean_up(storage, 9) == log_cleanup("0" * 16), "it might be about any version"


def clean_up(root: Path) -> None:
    """As a run does it now and then; every version is older than the retention."""
    for path in (root / "_delta_log").glob("*.json"):
        os.utime(path, (0, 0))
    table = Table(str(root), {})
    table.refresh()
    table.checkpoint()


@SWEEPS
def test_a_restore_needs_nothing_of_a_channel_beyond_the_cut(tmp_path: Path, sweep: Sweep) -> None:
    """What the reader has read beyond the cut was compacted and swept since: it is undone, and not read again."""
    lake = Lake(tmp_path)
    order = lake.snapshots.order(TIMEOUT)
    lake.complete(order)
    for number in (4, 5):
        lake.sample.add(f"f{number}.json", 3)
        for one in lake.members:
            run_to_end(one)
    before = data_files(lake.table)
    lake.compact()
    sweep(lake.table)
    assert before - data_files(lake.table), "files that the reader has read beyond the cut are gone"
    lake.check_restore(order)


def test_a_restore_is_withdrawn_if_a_range_of_a_channel_is_gone(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    a, b = lake.members
    then = table_ids(b.sinks[0].location)
    order = lake.snapshots.order(TIMEOUT)
    lake.compact()
    lake.complete(order)
    _, epochs = find_snapshot_epochs(lake.snapshots, order.snapshot)
    copy = f"{lake.snapshots.home.root}/{topology_copy(lake.snapshots.home.name, order.snapshot)}"
    create_topology_savepoint(lake.snapshots, order.snapshot, copy)
    for name in data_files(lake.table) - {Path(one).name for one in DeltaTable(lake.table).file_uris()}:
        next(lake.table.rglob(name)).unlink()  # another tool's vacuum, which knows no pins
    begun = find_or_order(lake.snapshots, order.snapshot, epochs, SystemClock(), RandomIds())
    result = perform_restore(lake.snapshots, begun, RandomIds().new(), SystemClock(), lambda _: None)
    assert result.decision is Decision.WITHDRAWN
    assert "b: it has yet to read" in result.reason
    assert f"firnline topology restore --from-savepoint {copy} FILE" in result.reason
    assert table_ids(b.sinks[0].location) == then
    run_to_end(a)

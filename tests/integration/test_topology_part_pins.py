"""What a snapshot needs of the parts of a sink survives gc, vacuum, compaction and clean-up of logs in each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

import firnline.maintenance.log_names
import firnline.sinks.delta.sweeps
from firnline.errors import SinkError
from firnline.history.topology.stopped import paused_run
from firnline.maintenance.compact import compact
from firnline.maintenance.gc import gc, vacuum
from firnline.sinks.delta.table import Table
from firnline.storage import Storage, open_storage
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Decision, Outcome
from firnline.topology.records import Order
from tests.support.part_lakes import PartLake
from tests.support.samples import table_ids
from tests.support.topologies import TIMEOUT, settle

Sweep = Callable[[Path], object]


def sweep_gc(table: Path) -> object:
    return gc(str(table), grace_seconds=0, ledgers=ledgers_of(table))


def sweep_vacuum(table: Path) -> object:
    return vacuum(str(table), retention_hours=0, allow_short_retention=True, ledgers=ledgers_of(table))


def ledgers_of(table: Path) -> dict[str, Storage]:
    """Where the pipelines decide that write the table, as a spec says it."""
    return {"bronze": open_storage(str(table.parents[1] / "bronze"))}


SWEEPS = pytest.mark.parametrize("sweep", [sweep_gc, sweep_vacuum], ids=["gc", "vacuum"])
OLDEST = "_delta_log/00000000000000000000.json"


@pytest.fixture(autouse=True)
def no_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for removed files that are older than the table's retention."""
    retention = firnline.maintenance.log_names.DEFAULT_RETENTION
    monkeypatch.setattr(firnline.maintenance.log_names, "DEFAULT_RETENTION", -retention)


def make_lake(folder: Path) -> PartLake:
    """Three files in each of two parts; their readers have the first one."""
    lake = PartLake(folder)
    for region in ("eu", "us"):
        lake.add(region)
    lake.run()
    for region in ("eu", "us") * 2:
        lake.add(region)
    lake.run(lake.bronze)
    return lake


def complete(lake: PartLake, order: Order) -> None:
    """Readers record what they have read so far, and read nothing."""
    lake.run(lake.bronze)
    eu, us = lake.silvers.values()
    with paused_run(eu, LocalEngine(1), print), paused_run(us, LocalEngine(1), print):
        assert settle(lake.open(), order) == (Outcome.COMMIT, "")


def data_files(table: Path) -> set[str]:
    return {path.name for path in table.rglob("*.parquet") if "_delta_log" not in path.parts}


def check_restore(lake: PartLake, order: Order) -> None:
    """Everything that was in the parts at the cut comes to the readers, once."""
    result = lake.restore(order.snapshot)
    assert (result.decision, result.reason) == (Decision.GO, "")
    lake.run()
    lake.check()


@SWEEPS
def test_sweeps_spare_what_an_open_and_a_complete_snapshot_need(tmp_path: Path, sweep: Sweep) -> None:
    lake = make_lake(tmp_path)
    tables = [lake.table(region) for region in ("eu", "us")]
    before = [data_files(table) for table in tables]
    order = lake.open().order(TIMEOUT)
    for table in tables:
        assert compact(str(table)).files_removed > 1
        sweep(table)  # the pin is open
    assert [found > then for found, then in zip(map(data_files, tables), before, strict=True)] == [True, True]
    complete(lake, order)
    for table in tables:
        sweep(table)  # the pin is narrow
    assert [found > then for found, then in zip(map(data_files, tables), before, strict=True)] == [True, True]
    check_restore(lake, order)
    lake.open().drop(order.snapshot)
    for table in tables:
        sweep(table)
        assert data_files(table) == {Path(name).name for name in DeltaTable(table).file_uris()}


def keep_no_log(root: Path) -> None:
    DeltaTable(root).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})


def clean_up(root: Path) -> None:
    """As a run does it now and then; every version is older than the retention."""
    for path in (root / "_delta_log").glob("*.json"):
        os.utime(path, (0, 0))
    table = Table(str(root), {})
    table.refresh()
    table.checkpoint()


def test_logs_are_not_cleaned_up_while_a_snapshot_needs_them(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    tables = [lake.table(region) for region in ("eu", "us")]
    for table in tables:
        keep_no_log(table)
    order = lake.open().order(TIMEOUT)
    for table in tables:
        clean_up(table)
    complete(lake, order)
    for table in tables:
        clean_up(table)
        assert (table / OLDEST).exists()
    check_restore(lake, order)
    lake.open().drop(order.snapshot)
    for table in tables:
        clean_up(table)
        assert not (table / OLDEST).exists()


def test_the_log_of_a_part_that_is_born_after_the_snapshot_is_kept(tmp_path: Path) -> None:
    lake = PartLake(tmp_path, reads=("eu+asia",))
    lake.add("eu")
    lake.run()
    order, then = lake.take(), lake.state()
    lake.add("asia")
    lake.run()
    keep_no_log(lake.table("asia"))
    clean_up(lake.table("asia"))
    assert (lake.table("asia") / OLDEST).exists()
    assert lake.restore(order.snapshot).decision is Decision.GO
    lake.check(then)
    lake.run()
    lake.check()


def test_a_part_whose_commits_were_cleaned_up_before_the_order_can_go_back(tmp_path: Path) -> None:
    lake = PartLake(tmp_path)
    for region in ("eu", "us"):
        lake.add(region)
    lake.run(lake.bronze)
    keep_no_log(lake.table("us"))  # before the reader has read it: an empty version causes no epoch
    lake.run()
    clean_up(lake.table("us"))
    assert not (lake.table("us") / OLDEST).exists()
    assert '"checkpoint"' not in "".join(path.read_text() for path in lake.table("us").glob("_delta_log/*.json"))
    order, then = lake.take(), lake.state()
    lake.add("us")
    lake.run()
    assert lake.restore(order.snapshot).decision is Decision.GO
    lake.check(then)
    lake.run()
    lake.check()


def test_an_order_is_refused_while_a_sweep_deletes_what_it_needs_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = make_lake(tmp_path)
    compact(str(lake.table("us")))
    found: list[object] = []

    def order(point: str) -> None:
        if point == "sweep.declare.after" and not found:
            try:
                found.append(lake.open().order(TIMEOUT))
            except SinkError as error:
                found.append(error.message)

    monkeypatch.setattr(firnline.sinks.delta.sweeps, "fault_point", order)
    sweep_gc(lake.table("us"))
    (refused,) = found
    assert isinstance(refused, str)
    assert "are being deleted by" in refused
    assert lake.open().find_open() == []
    assert not list(lake.folder.glob("**/pins/topology-*")), "not in any part either"


def test_a_restore_is_withdrawn_if_a_range_of_a_part_is_gone(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    order = lake.open().order(TIMEOUT)
    compact(str(lake.table("us")))
    complete(lake, order)
    table, before = lake.table("us"), lake.found()
    for name in data_files(table) - {Path(one).name for one in DeltaTable(table).file_uris()}:
        next(table.rglob(name)).unlink()  # another tool's vacuum, which knows no pins
    result = lake.restore(order.snapshot)
    assert result.decision is Decision.WITHDRAWN
    assert "silver_us: it has yet to read" in result.reason
    assert lake.found() == before
    assert table_ids(tmp_path / "silver_us").total() == 3

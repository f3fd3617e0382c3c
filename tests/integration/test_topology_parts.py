"""Snapshots and restores over tables that a sink with a template writes: real Delta tables, runs in this process."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.clock import SystemClock
from firnline.errors import ConfigError, SinkError
from firnline.history.topology.channels import Comparison
from firnline.history.topology.restore import (
    find_entry,
    find_epochs_at,
    find_inconsistent,
    find_or_order,
    find_snapshot_epochs,
    perform_restore,
)
from firnline.history.topology.savepoint import create_topology_savepoint
from firnline.history.topology.stopped import paused_run
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.parts.sink import DeltaPartsSink
from firnline.testing.local import LocalEngine
from firnline.topology.decide import Decision, Outcome
from firnline.topology.records import Order, stop_asking
from firnline.types import RandomIds
from tests.support.part_lakes import PartLake
from tests.support.pipelines import checkpoint_of, run_once
from tests.support.samples import table_ids
from tests.support.topologies import TIMEOUT, running, settle

KINDS = pytest.mark.parametrize(
    "settings",
    [{}, {"required": False}, {"write": "upsert", "key": ("id",)}],
    ids=["append", "optional", "upsert"],
)


def make_lake(folder: Path, **settings: Any) -> PartLake:
    """Two regions with rows, which their readers have."""
    lake = PartLake(folder, **settings)
    for region in ("eu", "us"):
        lake.add(region)
    lake.run()
    lake.check()
    return lake


def rows_by_epoch(options: PipelineOptions, source: str) -> dict[int, int]:
    """The rows of one source that each epoch has read, from the ledger."""
    pipeline = open_pipeline(options)
    return {
        entry.epoch: sum(int(one["to"]) - int(one["from"]) for one in entry.inputs.get(source, ()))
        for entry in pipeline.entries(pipeline.load().entry)
    }


def recorded(options: PipelineOptions, order: Order) -> int:
    return int(checkpoint_of(options).topology[order.snapshot]["epoch"])


@KINDS
def test_all_members_go_back_and_go_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    lake = make_lake(tmp_path, **settings)
    order = lake.take(lambda: lake.add("eu"))  # the record of bronze may have rows of eu; none of us
    then = lake.state()
    lake.check(then)
    for region in ("us", "eu", "asia"):  # asia is born after the snapshot
        lake.add(region)
    lake.run()
    lake.check()
    result = lake.restore(order.snapshot)
    assert (result.decision, result.reason) == (Decision.GO, "")
    lake.check(then)
    lake.run()
    lake.check()
    assert lake.restore(order.snapshot).decision is Decision.GO, "the snapshot is still kept"
    lake.check(then)


def test_a_part_that_the_record_does_not_touch_stops_its_reader(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    version = DeltaTable(lake.table("us")).version()
    snapshots = lake.open()
    order = snapshots.order(TIMEOUT)
    stop_asking(open_pipeline(lake.silvers["us"]).storage, "silver_us", order.snapshot)  # the marker alone must do
    lake.run(lake.bronze)  # the record
    assert DeltaTable(lake.table("us")).version() == version, "a part without rows gets no commit"
    lake.add("us")
    lake.run(lake.bronze, lake.silvers["us"])
    record, rows = recorded(lake.silvers["us"], order), rows_by_epoch(lake.silvers["us"], "us")
    assert sum(count for epoch, count in rows.items() if epoch <= record) == 3
    assert rows[record] == 0
    assert sum(rows.values()) == 6
    lake.run(lake.silvers["eu"])
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    lake.run()
    lake.check()


def test_a_part_that_is_born_behind_the_marker_stops_its_reader(tmp_path: Path) -> None:
    lake = PartLake(tmp_path, reads=("eu+asia",))
    silver = lake.silvers["eu+asia"]
    lake.add("eu")
    lake.run()
    snapshots = lake.open()
    order = snapshots.order(TIMEOUT)
    stop_asking(open_pipeline(silver).storage, silver.name, order.snapshot)  # the marker alone must do
    lake.run(lake.bronze)
    then = lake.state()
    lake.add("asia")
    lake.run(lake.bronze, silver)
    assert sum(rows for epoch, rows in rows_by_epoch(silver, "asia").items() if epoch <= recorded(silver, order)) == 0
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    lake.check()
    assert lake.restore(order.snapshot).decision is Decision.GO
    assert DeltaTable(lake.table("asia")).to_pyarrow_table().num_rows == 0, "it is emptied, and stays"
    lake.check(then)
    lake.run()
    lake.check()
    lake.add("asia")
    lake.run()
    assert lake.restore(order.snapshot).decision is Decision.GO
    lake.check(then)
    lake.run()
    lake.check()


def test_a_part_that_is_born_before_the_record_is_pinned_from_its_birth(tmp_path: Path) -> None:
    lake = PartLake(tmp_path, reads=("eu+asia",))
    silver = lake.silvers["eu+asia"]
    lake.add("eu")
    lake.run()
    snapshots = lake.open()
    order = snapshots.order(TIMEOUT)
    assert pins_of(lake, "asia") == [order.snapshot], "before there is a table"
    lake.add("asia")
    lake.run(lake.bronze)  # the record has its rows
    with paused_run(silver, LocalEngine(1), print):  # it records what it has read so far: nothing of asia
        assert settle(snapshots, order) == (Outcome.COMMIT, "")
    (pin,) = (lake.table("asia") / "_firnline/pins").glob("topology-*.json")
    narrow = json.loads(pin.read_bytes())
    assert narrow["versions"] == [DeltaTable(lake.table("asia")).version()]
    assert len(narrow["files"]) == 1
    then = lake.state()
    lake.add("asia")
    lake.run()
    assert lake.restore(order.snapshot).decision is Decision.GO
    assert lake.found() == then
    lake.run()
    lake.check()


def pins_of(lake: PartLake, region: str) -> list[str]:
    """The snapshots that pin a part."""
    pins = (lake.table(region) / "_firnline/pins").glob("topology-*.json")
    return sorted(pin.stem.removeprefix("topology-") for pin in pins)


def test_pins_lie_in_every_part_and_go_with_the_snapshot(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    lake.add("asia")  # nobody reads it, and it goes back with the others
    lake.run()
    order = lake.take()
    assert [pins_of(lake, region) for region in ("asia", "eu", "us")] == [[order.snapshot]] * 3
    lake.open().drop(order.snapshot)
    assert [pins_of(lake, region) for region in ("asia", "eu", "us")] == [[]] * 3
    aborted = lake.open().order(TIMEOUT)
    assert pins_of(lake, "us") == [aborted.snapshot]
    lake.open().abort(aborted, "test")
    assert pins_of(lake, "us") == []


def test_a_lagging_sink_holds_the_snapshot_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = make_lake(tmp_path, required=False)
    snapshots = lake.open()
    order = snapshots.order(TIMEOUT)
    lake.add("us")
    with monkeypatch.context() as broken:

        def fail(self: DeltaPartsSink, delivery: object) -> None:
            raise SinkError("the lake is away")

        broken.setattr(DeltaPartsSink, "deliver", fail)
        for one in lake.members:
            run_once(one)
        assert recorded(lake.bronze, order) > open_pipeline(lake.bronze).sink("lake").load().epoch
        assert snapshots.settle(order) == (Outcome.WAIT, "bronze")
    then = lake.state()
    lake.run()
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    lake.check()
    lake.add("eu")
    lake.run()
    assert lake.restore(order.snapshot).decision is Decision.GO
    assert lake.found() == then
    lake.run()
    lake.check()


def test_a_restore_brings_a_lagging_sink_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = make_lake(tmp_path, required=False)
    order, then = lake.take(), lake.state()
    lake.add("us")
    with monkeypatch.context() as broken:

        def fail(self: DeltaPartsSink, delivery: object) -> None:
            raise SinkError("the lake is away")

        broken.setattr(DeltaPartsSink, "deliver", fail)
        run_once(lake.bronze)
    heads = {sink.name: sink.load().epoch for sink in open_pipeline(lake.bronze).sinks}
    assert len(set(heads.values())) == 2, "the lake lacks an epoch"
    assert lake.restore(order.snapshot).decision is Decision.GO
    assert len({sink.load().epoch for sink in open_pipeline(lake.bronze).sinks}) == 1
    lake.check(then)
    lake.run()
    lake.check()


def test_a_time_gives_the_newest_consistent_cut(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    moment, then = datetime.now(UTC), lake.state()
    for region in ("us", "asia"):
        lake.add(region)
    lake.run()
    epochs = find_epochs_at(lake.open(), moment)
    assert lake.restore("then", epochs).decision is Decision.GO
    lake.check(then)
    lake.run()
    lake.check()


def test_a_time_lowers_a_reader_until_its_part_fits(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    snapshots = lake.open()
    newest = {name: pipeline.load().epoch for name, pipeline in snapshots.opened.items()}
    lake.add("us")
    lake.run()
    later = {name: pipeline.load().epoch for name, pipeline in lake.open().opened.items()}
    assert later["silver_us"] > newest["silver_us"]
    comparison = Comparison(snapshots.topology, snapshots.opened)
    channel = next(one for one in snapshots.topology.channels if one.reader == "silver_us")
    positions = [find_entry(snapshots.opened["silver_us"], at["silver_us"]).checkpoint.positions["us"]
                 for at in (newest, later)]  # fmt: skip
    assert [comparison.fits(channel, newest["bronze"], position) for position in positions] == [True, False]


def test_members_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    order = lake.take()
    for region in ("us", "eu"):
        lake.add(region)
    lake.run()
    snapshots = lake.open()
    target, epochs = find_snapshot_epochs(snapshots, order.snapshot)
    plan = find_or_order(snapshots, target, epochs, SystemClock(), RandomIds(), without=["silver_us"])
    (line,) = find_inconsistent(snapshots, plan)
    assert line.startswith("silver_us has read rows of bronze that are undone")
    then = lake.state()
    assert perform_restore(snapshots, plan, RandomIds().new(), SystemClock(), print).decision is Decision.GO
    assert lake.read()["us"] == then["us"]
    lake.run(lake.bronze, lake.silvers["eu"])
    assert run_once(lake.silvers["us"]).exit_code == 1, "it names the epoch to go back to"
    assert lake.found() == lake.wanted


def test_a_savepoint_of_such_a_topology_is_refused_by_name(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    order = lake.take()
    with pytest.raises(ConfigError, match="with a template"):
        create_topology_savepoint(lake.open(), order.snapshot, str(tmp_path / "save"))


def ids_at(table: Path, epoch: int, pipeline: str) -> set[int]:
    """The ids in a table once it held an epoch and no later one, found with delta-rs alone."""
    newest = DeltaTable(table).version() if (table / "_delta_log").exists() else -1
    for version in range(newest, -1, -1):
        found = DeltaTable(table, version=version)
        if (found.transaction_version(f"firnline:{pipeline}") or 0) <= epoch:
            return set(found.to_pyarrow_table().column("id").to_pylist()) if found.file_uris() else set()
    return set()


def test_snapshots_of_running_pipelines_are_cuts(tmp_path: Path) -> None:
    lake = PartLake(tmp_path, reads=("eu+asia", "us"))
    for region in ("eu", "us"):
        lake.add(region)
    lake.run()
    taken: list[tuple[Order, dict[str, int]]] = []
    with contextlib.ExitStack() as stack:
        for one in lake.members:
            stack.enter_context(running(one))
        for number in range(4):
            snapshots = lake.open()
            order = snapshots.order(TIMEOUT)
            for region in ("eu", "us", "eu") if number < 2 else ("asia", "us", "asia"):
                lake.add(region)
            assert settle(snapshots, order) == (Outcome.COMMIT, "")
            taken.append((order, find_snapshot_epochs(snapshots, order.snapshot)[1]))
    for order, epochs in taken:
        for regions, silver in lake.silvers.items():
            for region in regions.split("+"):
                sent = ids_at(lake.table(region), epochs["bronze"], "bronze")
                read = ids_at(tmp_path / f"silver_{region}", epochs[silver.name], silver.name)
                assert read <= sent, f"{order.snapshot}: {silver.name} has read what was written after the cut"
    order, epochs = taken[1]
    assert lake.restore(order.snapshot).decision is Decision.GO
    for region in ("eu", "us", "asia"):
        assert set(table_ids(lake.table(region))) == ids_at(lake.table(region), epochs["bronze"], "bronze")
    assert all(ids <= lake.found()[region] for region, ids in lake.read().items())
    lake.run()
    lake.check()


def test_a_snapshot_with_a_copy_is_refused_before_it_is_ordered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template, one = f"{tmp_path}/lake/{{region}}", f"{tmp_path}/lake/eu"
    specs = {
        "bronze": ({"in": {"path": f"{tmp_path}/in"}}, {"table": template}),
        "silver": ({"eu": {"type": "delta", "table": one}}, {"table": f"{tmp_path}/silver"}),
    }
    for name, (sources, sink) in specs.items():
        spec = {"name": name, "sources": sources, "sinks": [{"name": name, "type": "delta", **sink}]}
        (tmp_path / f"{name}.yml").write_text(json.dumps(spec))
    topology = {"name": "lake", "pipelines": ["bronze.yml", "silver.yml"], "snapshots": {"copy": True}}
    (tmp_path / "topology.yml").write_text(json.dumps(topology))
    assert run_command(["topology", "snapshot", str(tmp_path / "topology.yml")]) == 2
    said = capsys.readouterr().err
    assert f"'silver' reads {one}, which sink 'bronze' of 'bronze' writes with a template" in said
    assert "snapshots go without `copy: true`" in said

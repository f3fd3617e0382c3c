"""Snapshots and restores over tables that a sink with a template writes: real Delta tables, runs in this process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.run.open_pipeline import open_pipeline
from firnline.topology.decide import Decision, Outcome
from firnline.topology.records import stop_asking
from tests.support.part_lakes import PartLake
from tests.support.pipelines import checkpoint_of
from tests.support.topologies import TIMEOUT, settle

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
    record = checkpoint_of(lake.silvers["us"]).topology[order.snapshot]["epoch"]
    pipeline = open_pipeline(lake.silvers["us"])
    entries = {entry.epoch: entry for entry in pipeline.entries(pipeline.load().entry)}
    rows = {e: sum(int(one["to"]) - int(one["from"]) for one in entry.inputs["us"]) for e, entry in entries.items()}
    assert sum(count for epoch, count in rows.items() if epoch <= record) == 3
    assert rows[record] == 0
    assert sum(rows.values()) == 6
    lake.run(lake.silvers["eu"])
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    lake.run()
    lake.check()

"""A Delta sink with a template: the contract, parts, names, growth, keys, history edits, and parts that lost rows."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.checkpoint.ledger import Ledger
from firnline.errors import (
    BadRowError,
    FencedError,
    FirnlineError,
    SinkDivergedError,
    SinkError,
    SinkWentBackError,
)
from firnline.sinks.base import KeepRows, ReplaceRows, RestoreVersion, SinkContext
from firnline.sinks.delta.kind import open_sink as open_delta
from firnline.sinks.delta.options import DeltaPartsOptions
from firnline.sinks.delta.parts.sink import DeltaPartsSink
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, OpenSink, ReadRows, SinkConformance, SinkDriver, rows


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def parts_rows(lake: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every table below a folder, read by delta-rs, by the name of the table."""
    tables = sorted(log.parent for log in lake.glob("**/_delta_log"))
    return {
        str(table.relative_to(lake)): DeltaTable(str(table)).to_pyarrow_table().to_pylist() for table in tables
    }


def part_ids(lake: Path) -> dict[str, list[int]]:
    return {name: sorted(row["id"] for row in found) for name, found in parts_rows(lake).items()}


def drive(
    lake: Path, ledger: Ledger, *, template: str = "{region}", generation: int = 1, run: str = "", **settings: Any
) -> SinkDriver:
    """Begin a run of the pipeline `demo` into tables below `lake`."""
    name = settings.pop("name", "copy")
    options = DeltaPartsOptions(name, f"{lake}/{template}", **settings)
    changes = settings.get("write") == "upsert"
    return SinkDriver(lambda context: open_delta(options, context), ledger, generation=generation, run=run,
                      changes=changes)  # fmt: skip


def of(region: str | None, *ids: int, **columns: Any) -> list[dict[str, Any]]:
    return rows(*ids, region=region, **columns)


class TestAppend(SinkConformance):
    @pytest.fixture
    def open_sink(self, lake: Path) -> OpenSink:
        options = DeltaPartsOptions("copy", f"{lake}/{{id}}")
        return lambda context: open_delta(options, context)

    @pytest.fixture
    def read_rows(self, lake: Path) -> ReadRows:
        return lambda: [row for found in parts_rows(lake).values() for row in found]


class TestUpsert(TestAppend):
    writes_changes = True

    @pytest.fixture
    def open_sink(self, lake: Path) -> OpenSink:
        options = DeltaPartsOptions("copy", f"{lake}/{{id}}", write="upsert", key=("id",))
        return lambda context: open_delta(options, context)


# -- parts ------------------------------------------------------------------------------------------------


def test_a_table_is_created_with_its_first_row_and_only_touched_ones_are_committed(lake: Path, ledger: Ledger) -> None:
    run = drive(lake, ledger)
    run.apply(of("eu", 1, 2) + of("us", 3))
    run.apply(of("eu", 4))
    run.apply(of("asia", 5))
    run.apply(of("us", 6))
    assert part_ids(lake) == {"asia": [5], "eu": [1, 2, 4], "us": [3, 6]}
    versions = {name: DeltaTable(str(lake / name)).version() for name in ("asia", "eu", "us")}
    assert versions == {"asia": 1, "eu": 2, "us": 2}
    assert DeltaTable(str(lake / "eu")).transaction_version("firnline:demo") == 2
    assert run.sink.load().epoch == 4
    assert run.sink.find_parts() == [str(lake / name) for name in ("asia", "eu", "us")]

"""The Delta source passes the conformance suite of sources, as rows and as changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from firnline.sources.delta.options import DeltaSourceOptions
from firnline.testing.sources import AddRecords, SourceConformance


class TestDeltaSource(SourceConformance):
    max_batch = 2 * 65_536  # rows that are read from a file at once

    @pytest.fixture
    def options(self, tmp_path: Path) -> DeltaSourceOptions:
        return DeltaSourceOptions("upstream", str(tmp_path / "here"))

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> DeltaSourceOptions:
        return DeltaSourceOptions("upstream", str(tmp_path / "there"))

    @pytest.fixture
    def add_records(self, options: DeltaSourceOptions) -> AddRecords:
        def add(records: Sequence[dict[str, Any]]) -> None:
            write_deltalake(options.table, pa.Table.from_pylist(list(records)), mode="append")

        return add


class TestChangeFeed(TestDeltaSource):
    @pytest.fixture
    def options(self, tmp_path: Path) -> DeltaSourceOptions:
        return DeltaSourceOptions("upstream", str(tmp_path / "here"), on_change="change_feed")

"""Every kind of sink passes the conformance suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.sinks.base import Sink, SinkContext
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.registry import open_sinks
from firnline.testing.sinks import OpenSink, ReadRows, SinkConformance
from tests.support.committers import commit_table


class DeltaConformance(SinkConformance):
    settings: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture
    def table(self, tmp_path: Path) -> str:
        return str(tmp_path / "out")

    @pytest.fixture
    def open_sink(self, table: str) -> OpenSink:
        options = DeltaSinkOptions("delta", table, **self.settings)

        def open_again(context: SinkContext) -> Sink:
            return open_sinks([(options, context)])[0]

        return open_again

    @pytest.fixture
    def read_rows(self, table: str) -> ReadRows:
        def read() -> list[dict[str, Any]]:
            return list(DeltaTable(table).to_pyarrow_table().to_pylist()) if DeltaTable.is_deltatable(table) else []

        return read


class TestAppendedTable(DeltaConformance):
    pass


class TestUpsertedTable(DeltaConformance):
    settings = {"write": "upsert", "key": ("id",)}  # noqa: RUF012
    writes_changes = True


class TestStagedTable(DeltaConformance):
    settings = {"mode": "staged"}  # noqa: RUF012

    @pytest.fixture
    def read_rows(self, table: str) -> ReadRows:
        """Readers see what the committer has committed."""

        def read() -> list[dict[str, Any]]:
            if not DeltaTable.is_deltatable(table):
                return []
            commit_table(table)
            return list(DeltaTable(table).to_pyarrow_table().to_pylist())

        return read

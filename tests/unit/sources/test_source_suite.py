"""Every kind of source passes the conformance suite, and the file source passes it with every format."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from firnline.options import SourceOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.testing.sources import AddRecords, SourceConformance
from tests.support.formats import encode


class TestFiles(SourceConformance):
    format: Literal["ndjson", "json", "csv", "parquet"] = "ndjson"
    suffix = ""

    @pytest.fixture
    def options(self, tmp_path: Path) -> SourceOptions:
        (tmp_path / "in").mkdir()
        return FileSourceOptions("files", str(tmp_path / "in"), format=self.format)

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> SourceOptions:
        (tmp_path / "other").mkdir()
        return FileSourceOptions("files", str(tmp_path / "other"), format=self.format)

    @pytest.fixture
    def add_records(self, tmp_path: Path) -> AddRecords:
        numbers = itertools.count()

        def add(found: Sequence[dict[str, Any]]) -> None:
            data = encode(self.format, found)
            name = f"f{next(numbers):03d}.{self.format}{self.suffix}"
            (tmp_path / "in" / name).write_bytes(gzip.compress(data) if self.suffix else data)

        return add


class TestCompressedFiles(TestFiles):
    suffix = ".gz"


class TestJsonFiles(TestFiles):
    format = "json"


class TestCompressedJsonFiles(TestCompressedFiles):
    format = "json"


class TestCsvFiles(TestFiles):
    format = "csv"


class TestCompressedCsvFiles(TestCompressedFiles):
    format = "csv"


class TestParquetFiles(TestFiles):
    format = "parquet"

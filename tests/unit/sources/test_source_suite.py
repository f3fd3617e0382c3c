"""Every kind of source passes the conformance suite."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from firnline.options import SourceOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.testing.sources import AddRecords, SourceConformance


class TestFiles(SourceConformance):
    suffix = ".json"

    @pytest.fixture
    def options(self, tmp_path: Path) -> SourceOptions:
        (tmp_path / "in").mkdir()
        return FileSourceOptions("files", str(tmp_path / "in"))

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> SourceOptions:
        (tmp_path / "other").mkdir()
        return FileSourceOptions("files", str(tmp_path / "other"))

    @pytest.fixture
    def add_records(self, tmp_path: Path) -> AddRecords:
        numbers = itertools.count()

        def add(found: Sequence[dict[str, Any]]) -> None:
            text = "".join(json.dumps(record) + "\n" for record in found)
            data = text.encode() if self.suffix == ".json" else gzip.compress(text.encode())
            (tmp_path / "in" / f"f{next(numbers):03d}{self.suffix}").write_bytes(data)

        return add


class TestCompressedFiles(TestFiles):
    suffix = ".json.gz"

"""The example in plain Python: runs, and runs again without reading anything twice."""

from __future__ import annotations

import runpy
from pathlib import Path

import duckdb
import pytest

from firnline.testing.local import LocalEngine

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "python" / "run.py"


def test_the_example_runs_twice_and_reads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("firnline.pipeline.SparkEngine", lambda *_, **__: LocalEngine())
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("epoch 1: 300 rows in ")
    assert out[-1] == "300 rows, exit code 0"
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == ["0 rows, exit code 0"]
    files = str(tmp_path / "orders" / "*.parquet")
    found = duckdb.sql(f"SELECT count(*), count(DISTINCT id), sum(amount) FROM '{files}'").fetchone()
    assert found == (300, 300, 3 * 1.5 * 4950)

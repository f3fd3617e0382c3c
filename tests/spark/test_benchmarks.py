"""Every benchmark works, its peers included: each is tried at a hundredth of its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import CASES
from benchmarks.cases import Row

ROOT = Path(__file__).parents[2]


@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_every_case_at_a_hundredth_of_its_size(tmp_path: Path) -> None:
    """In a process of its own: the peers need a session with Delta's jars."""
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--scale", "0.01", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    told = json.loads(out.read_text()) if out.exists() else {}
    assert done.returncode == 0, (told.get("failed"), done.stderr[-4000:])
    assert len(told["rows"]) >= len(CASES)
    left = set(os.listdir(tmp_path)) - {"spark-warehouse"}
    assert left == {out.name}, "a case left something in the current folder"


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["firnline", "peer", "ratio"])
def test_a_figure_that_makes_no_sense_is_an_error(name: str, figure: float) -> None:
    with pytest.raises(ValueError, match="never measured"):
        Row(**{"name": "x", "firnline": 1.0, "unit": "s", "peer": 1.0, "ratio": 1.0, name: figure})  # type: ignore[arg-type]

"""Files of every format, read by Spark's workers in one run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.formats import FORMATS, encode
from tests.support.samples import table_ids

pytestmark = pytest.mark.spark

SPEC = {
    "name": "formats",
    "sources": {name: {"type": "files", "path": f"in/{name}", "format": name, "min_age_secs": 0} for name in FORMATS},
    "sinks": [{"name": name, "type": "delta", "table": f"out/{name}", "input": name} for name in FORMATS],
    "batch": {"max_events": 8},
}


def test_spark_reads_every_format(tmp_path: Path) -> None:
    for name in FORMATS:
        (tmp_path / "in" / name).mkdir(parents=True)
        data = encode(name, [{"id": number, "t": f"x\n{number}"} for number in range(20)])
        (tmp_path / "in" / name / "a").write_bytes(data)
    (tmp_path / "firnline.yml").write_text(json.dumps(SPEC))
    command = [sys.executable, "-m", "firnline.cli", "run", "--once"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for name in FORMATS:
        assert table_ids(tmp_path / "out" / name) == Counter(range(20)), name

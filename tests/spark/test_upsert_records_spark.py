"""Records of files upserted by key, on real Spark: tasks of any order give the newest record of every key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firnline.jobs.spark import SparkEngine
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from tests.support.pipelines import Recorder, pipeline_options
from tests.support.upserts import read_by_duckdb

pytestmark = pytest.mark.spark


def test_the_newest_record_of_every_key_is_the_row(tmp_path: Path) -> None:
    folder, table = tmp_path / "in", str(tmp_path / "out")
    folder.mkdir()
    settings: dict[str, Any] = {
        "write": "upsert",
        "key": ("id",),
        "sequence_by": "at",
        "delete_when": {"op": ("D",)},
        "max_files": 4,
    }
    for file in range(8):  # two epochs of four files, which both tasks share
        rows = [{"id": n, "at": (file * 7 + n) % 8, "v": file, "op": "U"} for n in range(200)]
        rows.append({"id": file, "at": 9, "op": "D"})
        (folder / f"{file}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = pipeline_options(str(folder), table, **settings)
    engine, told = SparkEngine("upsert", {"spark.master": "local[2]"}), Recorder()
    try:
        result = Runner(open_pipeline(options, once=True), engine, told, once=True).run()
    finally:
        engine.stop()
    assert result.exit_code == 0, (result, told.troubles)
    assert len(told.epochs) == 2
    expected: dict[int, tuple[int, int]] = {}
    for epoch in (range(4), range(4, 8)):
        newest: dict[int, tuple[int, int]] = {}
        for file in epoch:
            for n in range(200):
                newest[n] = max(newest.get(n, (-1, -1)), ((file * 7 + n) % 8, file))
            newest[file] = (9, -1)  # deletes
        for n, (at, file) in newest.items():
            if file < 0:
                expected.pop(n, None)
            elif n not in expected or at >= expected[n][0]:
                expected[n] = (at, file)
    found = {row[0]: row[1:] for row in read_by_duckdb(table, ["id", "at", "v"])}
    assert found == expected

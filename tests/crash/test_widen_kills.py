"""An epoch that widens a column, killed at every point that it reaches: the tables have each row once, and one type."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import pipeline_options, run_once

pytestmark = pytest.mark.crash

MOST_KILLS = in_proof(None)
POINTS = [
    f"{point}.{side}"
    for point in ("widen.rewrite", "stage.file", "delta.commit", "delta.sync", "epoch.commit")
    for side in ("before", "after")
]


def options_of(root: str) -> PipelineOptions:
    sinks = (DeltaSinkOptions("main", f"{root}/one"), DeltaSinkOptions("copy", f"{root}/two"))
    return pipeline_options(f"{root}/in", "", sinks=sinks)


def work(root: str) -> None:
    assert run_once(options_of(root)).exit_code == 0


def check(root: str, where: str) -> None:
    work(root)
    for table in ("one", "two"):
        rows = DeltaTable(f"{root}/{table}").to_pyarrow_table().sort_by("id")
        assert rows.schema.field("price").type == pa.float64(), where
        assert rows.to_pydict() == {"id": [1, 2, 3, 4], "price": [1.0, 2.0, 1.5, 2.5]}, where


def test_killed_at_every_point(tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> str:
        root = tmp_path / str(next(numbers))
        (root / "in").mkdir(parents=True)
        (root / "in" / "a.json").write_text('{"id": 1, "price": 1}\n{"id": 2, "price": 2}\n')
        work(str(root))
        (root / "in" / "b.json").write_text('{"id": 3, "price": 1.5}\n{"id": 4, "price": 2.5}\n')
        return str(root)

    reached = kill_at_every_point(prepare, partial(work), check, points=POINTS, most=MOST_KILLS)
    assert reached["widen.rewrite.after"] == 2  # one file of each table

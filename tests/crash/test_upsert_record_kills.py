"""Records of a source that are upserted, killed at every point: the table holds the newest of each key."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import pipeline_options, run_once
from tests.support.upserts import read_by_duckdb

pytestmark = pytest.mark.crash

MOST_KILLS = in_proof(None)
POINTS = [
    f"{point}.{side}"
    for point in ("stage.file", "stage.quarantine", "upsert.rewrite", "widen.rewrite", "delta.commit", "epoch.commit")
    for side in ("before", "after")
]
FIRST = [{"id": n, "at": 5, "p": f"p{n % 2}", "op": "U"} for n in range(6)]
# Moves, deletes and comes too late; a key is a fraction, so the column gets a wider type; one record has no key.
SECOND: list[dict[str, Any]] = [
    {"id": 0, "at": 6, "p": "p1", "op": "U"},
    {"id": 1, "at": 4, "p": "p0", "op": "U"},
    {"id": 2, "at": 6, "p": "p0", "op": "D"},
    {"id": 3, "at": 4, "p": "p1", "op": "D"},
    {"id": 3.5, "at": 1, "p": "p0", "op": "U"},
    {"id": 3.5, "at": 0, "p": "p0", "op": "U"},
    {"at": 9, "p": "p0", "op": "U"},
]
WANTED = [(0, 6, "p1"), (1, 5, "p1"), (3, 5, "p1"), (3.5, 1, "p0"), (4, 5, "p0"), (5, 5, "p1")]


def options_of(root: str) -> PipelineOptions:
    settings: dict[str, Any] = {
        "write": "upsert", "key": ("id",), "sequence_by": "at", "delete_when": {"op": ("D",)}, "partition_by": ("p",),
    }  # fmt: skip
    sinks = (DeltaSinkOptions("main", f"{root}/one", **settings), DeltaSinkOptions("copy", f"{root}/two", **settings))
    return pipeline_options(f"{root}/in", "", sinks=sinks)


def work(root: str) -> None:
    assert run_once(options_of(root)).exit_code == 0


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(root: str, where: str) -> None:
    work(root)
    for table in ("one", "two"):
        assert sorted(read_by_duckdb(f"{root}/{table}", ["id", "at", "p"], ["p"])) == WANTED, where


def test_killed_at_every_point(tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> str:
        root = tmp_path / str(next(numbers))
        (root / "in").mkdir(parents=True)
        write(root / "in" / "a.json", FIRST)
        work(str(root))
        write(root / "in" / "b.json", SECOND)
        return str(root)

    reached = kill_at_every_point(prepare, partial(work), check, points=POINTS, most=MOST_KILLS)
    assert reached["upsert.rewrite.after"] >= 4
    assert reached["stage.quarantine.after"] == 1

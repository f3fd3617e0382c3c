"""A run that reads the rest of grown files, killed at every point that it reaches: each record arrives once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import pipeline_options, run_once
from tests.support.samples import make_old, quarantined, table_ids

pytestmark = pytest.mark.crash

MOST_KILLS = in_proof(None)
POINTS = [
    f"{point}.{side}"
    for point in ("stage.file", "storage.put", "delta.commit", "delta.sync", "epoch.commit", "epoch.stage")
    for side in ("before", "after")
]
FIRST = {"a.json": b'{"id": 1}\n{"id": 2}', "b.json": b'{"id": 3}\n{"i', "c.json": b'{"id": 4}\n'}
REST = {"a.json": b'\n{"id": 5}\n', "b.json": b'd": 6}\n{"id": 7}\n', "c.json": b'{"id": 8}\n{"id": 9}\n'}


def options_of(root: str) -> PipelineOptions:
    return pipeline_options(f"{root}/in", f"{root}/out", on_growth="read_rest", max_files=2, max_events=2)


def work(root: str) -> None:
    assert run_once(options_of(root)).exit_code == 0


def check(root: str, where: str) -> None:
    work(root)
    assert table_ids(f"{root}/out") == dict.fromkeys(range(1, 10), 1), where
    assert not quarantined(f"{root}/out", "demo"), where


def test_killed_at_every_point(tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> str:
        root = tmp_path / str(next(numbers))
        for files in (FIRST, REST):
            for name, data in files.items():
                path = root / "in" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(data)
                make_old(path)
            if files is FIRST:
                work(str(root))
        return str(root)

    reached = kill_at_every_point(prepare, work, check, points=POINTS, most=MOST_KILLS)
    assert reached["delta.commit.before"] >= 3

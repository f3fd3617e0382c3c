"""Epochs that read parts of files, killed at every point that they reach: each record is in the table once."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from tests.support.formats import FORMATS, encode
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import pipeline_options, run_once
from tests.support.samples import table_ids

pytestmark = pytest.mark.crash

MOST_KILLS = in_proof(None)
POINTS = ["stage.file.after", "epoch.stage.after", "delta.commit.before", "delta.commit.after", "epoch.commit.after"]


def options_of(root: str, name: Any) -> PipelineOptions:
    return pipeline_options(f"{root}/in", f"{root}/out", format=name, max_events=3)


def work(name: str, root: str) -> None:
    assert run_once(options_of(root, name)).exit_code == 0


def check(name: str, root: str, where: str) -> None:
    work(name, root)
    assert table_ids(f"{root}/out") == Counter(range(8)), where


@pytest.mark.parametrize("name", FORMATS)
def test_killed_in_the_middle_of_a_file(tmp_path: Path, name: str) -> None:
    numbers = itertools.count()

    def prepare() -> str:
        root = tmp_path / str(next(numbers))
        (root / "in").mkdir(parents=True)
        (root / "in" / "a").write_bytes(encode(name, [{"id": number, "t": "x\ny"} for number in range(8)]))
        return str(root)

    reached = kill_at_every_point(prepare, partial(work, name), partial(check, name), points=POINTS, most=MOST_KILLS)
    assert reached["delta.commit.after"] >= 3  # an epoch for each part of the file

"""The tracking example on real Spark: killed at several points, its tables are those of one query over all input."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.spec.build import load_options
from tests.support.examples import TRACKING, load_example
from tests.support.processes import KILLED, Launcher

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1200)]

WAIT = 400
# Points in the driver; a point in a worker would kill every worker that takes the task up again.
KILLS = (
    "epoch.run.after",
    "epoch.stage.after",
    "epoch.record.before",
    "state.begin.after",
    "state.commit.before",
    "state.commit.after",
    "delta.commit.before",
    "delta.commit.after",
)


@pytest.fixture
def options(tmp_path: Path) -> PipelineOptions:
    """The example's own spec over small data: four epochs."""
    generate = load_example("generate")
    world = generate.World(
        seconds=70, seed=4, objects=40, radar=100, link=10, optical=10, file_seconds=12, late_part=0.02
    )
    assert generate.write(world, tmp_path / "in") == {"radar": 7000, "link": 700, "optical": 700}
    shutil.copy(TRACKING / "firnline.yml", tmp_path)
    return load_options(tmp_path, environ={})


def test_the_tables_of_the_example_after_kills(launcher: Launcher, options: PipelineOptions, tmp_path: Path) -> None:
    proof = bool(os.environ.get("FIRNLINE_PROOF"))
    rnd = random.Random(os.environ.get("FIRNLINE_PROOF", "tracking"))
    for point in rnd.sample(KILLS, len(KILLS) if proof else 2):
        ended = launcher.start(options, f"{point}:{rnd.randrange(1, 3)}:kill", spark=True).wait(WAIT)
        assert ended.exit_code in ((KILLED, 0) if proof else (KILLED,)), (point, ended)
    assert launcher.start(options, spark=True).wait(WAIT).exit_code == 0
    compared = load_example("check").compare(tmp_path)
    for table, (found, expected, apart) in compared.items():
        assert found == expected > 0, table
        assert apart == 0, table

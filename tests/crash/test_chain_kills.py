"""The chain example: three pipelines run at once, are killed at random points, and bronze is rolled back meanwhile."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.errors import SourceUndoneError
from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.spec.build import load_options
from tests.support.examples import CHAIN, load_example
from tests.support.processes import KILLED, Launcher
from tests.support.proof import covered

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

ROUNDS = 60 if os.environ.get("FIRNLINE_PROOF") else 6
SEED = os.environ.get("FIRNLINE_SEED", "1")
NAMES = ("bronze", "silver", "gold")
POINTS = (
    "epoch.plan.after",
    "epoch.run.after",
    "epoch.stage.after",
    "delta.claim.after",
    "delta.commit.before",
    "delta.commit.after",
    "epoch.record.before",
    "state.commit.after",
    "upsert.rewrite.after",
)


class Chain:
    """The pipelines of the example, over small input, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = Launcher(folder / "children")
        self._generate = load_example("generate", CHAIN)
        self._files = 0
        for name in NAMES:
            shutil.copy(CHAIN / f"{name}.yml", folder)

    def options(self, name: str) -> PipelineOptions:
        """One pipeline of the example; small epochs, so that kills hit many of them."""
        made = load_options(self.folder / f"{name}.yml", environ={})
        source = replace(made.sources[0], poll_interval_secs=0.05)
        if name == "bronze":
            source = replace(source, min_age_secs=0.0)  # type: ignore[call-arg]  # of file sources
        return replace(made, sources=(source,), batch=replace(made.batch, max_files=2, max_events=120))

    def add(self, files: int = 3) -> None:
        self._generate.write(self.folder / "in", files, orders=50, first=self._files)
        self._files += files

    def run(self, name: str) -> None:
        self.launcher.run_until_done(self.options(name))

    def check(self) -> None:
        for table, (found, expected, apart) in load_example("check", CHAIN).compare(self.folder).items():
            assert found == expected > 0, table
            assert apart == 0, table


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def test_three_pipelines_killed_at_random_points(chain: Chain) -> None:
    draw = random.Random(f"chain {SEED}")
    kills = 0
    for _ in range(ROUNDS):
        chain.add()
        children = [
            chain.launcher.start(chain.options(name), f"{draw.choice(POINTS)}:{draw.randint(1, 3)}:kill")
            for name in NAMES
        ]
        codes = [child.wait(120).exit_code for child in children]
        assert set(codes) <= {0, KILLED}, codes
        kills += codes.count(KILLED)
    assert kills >= ROUNDS, "too few were killed to prove anything"
    covered["kills of chained pipelines"] += kills
    for name in NAMES:
        chain.run(name)
    chain.check()


def test_bronze_goes_back_while_silver_reads(chain: Chain) -> None:
    """Silver lags, or has read what is undone and goes back as it says; gold likewise. Kills in between."""
    draw = random.Random(f"undone {SEED}")
    for number in range(ROUNDS // 2):
        chain.add()
        chain.run("bronze")
        newest = epoch_of(chain, "bronze")
        readers = [name for name in NAMES[1:] if draw.random() < 0.7]
        for name in readers:
            chain.launcher.run(chain.options(name), f"{draw.choice(POINTS)}:{draw.randint(1, 2)}:kill")
        Rollback(open_pipeline(chain.options("bronze")), max(1, newest - draw.randint(1, 2))).perform(f"test-{number}")
        for name in NAMES:
            follow(chain, name)
        chain.check()


def epoch_of(chain: Chain, name: str) -> int:
    return open_pipeline(chain.options(name)).deciding.load().epoch


def follow(chain: Chain, name: str) -> None:
    """Run a pipeline to its end; where its source took rows back, go back as the error says."""
    for _ in range(5):
        ended = chain.launcher.run(chain.options(name))
        if ended.exit_code == 0:
            return
        error = find_undone(lambda: plan(chain, name))
        to = error.fields["to_epoch"]
        assert isinstance(to, int), error.hint
        Rollback(open_pipeline(chain.options(name)), to).perform("test")
    raise AssertionError(f"{name} never came to its end")


def plan(chain: Chain, name: str) -> None:
    pipeline = open_pipeline(chain.options(name))
    checkpoint = pipeline.deciding.load().checkpoint
    assert checkpoint is not None
    positions = pipeline.sources.start(checkpoint.positions)
    pipeline.sources.plan(positions, pipeline.limits(1, 1))


def find_undone(work: Callable[[], None]) -> SourceUndoneError:
    with pytest.raises(SourceUndoneError) as raised:
        work()
    return raised.value

"""Keyed state under kill -9 at every point: no update is lost, doubled or out of order."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import pytest

from firnline.faults import POINTS
from firnline.options import LocalTierOptions, PipelineOptions, RemoteTierOptions, TriggerOptions
from tests.support.counters import CounterInput, counter_options, read_counts
from tests.support.processes import KILLED, Launcher

pytestmark = pytest.mark.crash

# What a run reaches that folds rows and upserts them; replication, repair and sweeps have tests of their own.
REACHED = [
    point
    for point in POINTS
    if point.startswith(("state.run", "state.begin", "state.shard", "state.commit", "upsert.", "epoch.", "stage.file"))
    or point in ("delta.commit.before", "delta.commit.after", "delta.create.after", "storage.put.before")
]


@pytest.fixture
def counted(tmp_path: Path) -> CounterInput:
    found = CounterInput(tmp_path / "in")
    found.add(files=6)
    return found


@pytest.fixture
def options(tmp_path: Path, counted: CounterInput) -> PipelineOptions:
    return counter_options(counted.folder, tmp_path / "table")


def check(counted: CounterInput, options: PipelineOptions) -> None:
    assert read_counts(options.sinks[0].location) == counted.expected()


@pytest.mark.parametrize("point", REACHED)
def test_killed_at_a_point(launcher: Launcher, counted: CounterInput, options: PipelineOptions, point: str) -> None:
    assert launcher.run(options, f"{point}:1:kill").exit_code == KILLED
    launcher.run_until_done(options)
    check(counted, options)


@pytest.mark.parametrize("point", [point for point in REACHED if not point.startswith("delta.create")])
def test_killed_at_a_point_later(
    launcher: Launcher, counted: CounterInput, options: PipelineOptions, point: str
) -> None:
    """In a run that has found state and rows, after some epochs of its own."""
    assert launcher.run(options, "epoch.acknowledge.after:1:kill").exit_code == KILLED
    assert launcher.run(options, f"{point}:3:kill").exit_code == KILLED
    launcher.run_until_done(options)
    check(counted, options)


def test_every_point_is_reached(launcher: Launcher, counted: CounterInput, options: PipelineOptions) -> None:
    ended = launcher.run(options)
    assert ended.exit_code == 0, ended
    assert set(REACHED) - ended.points.keys() == set()


@pytest.mark.parametrize("point", ["state.run.after", "state.shard.after", "state.commit.after", "epoch.stage.after"])
@pytest.mark.parametrize("mode", ["aligned", "per_operator"])
def test_killed_between_checkpoints_of_state(
    launcher: Launcher, counted: CounterInput, options: PipelineOptions, point: str, mode: Any
) -> None:
    sparse = dataclasses.replace(options.checkpoint, mode=mode, trigger=TriggerOptions(every_epochs=3))
    options = dataclasses.replace(options, checkpoint=sparse)
    codes = [launcher.run(options, f"{point}:{nth}:kill").exit_code for nth in (2, 1, 2)]
    assert set(codes) <= {KILLED, 0}, f"a recovery failed: {codes}"
    assert codes[0] == KILLED
    launcher.run_until_done(options)
    check(counted, options)


def test_random_kills_rescales_and_an_empty_local_tier(launcher: Launcher, tmp_path: Path) -> None:
    rounds, kills = 60 if os.environ.get("FIRNLINE_PROOF") else 4, 0
    for seed in range(rounds):
        rnd = random.Random(seed)
        here = tmp_path / str(seed)
        counted = CounterInput(here / "in", seed)
        base = counter_options(counted.folder, here / "table")
        tiers = dataclasses.replace(
            base.checkpoint,
            local=LocalTierOptions(str(here / "local"), 1),
            remote=RemoteTierOptions(str(here / "remote"), 1),
            trigger=TriggerOptions(every_epochs=rnd.choice([1, 1, 2, 4])),
        )
        options = dataclasses.replace(base, checkpoint=tiers)
        for _ in range(5):
            counted.add(files=rnd.randrange(1, 4))
            shards = dataclasses.replace(options.state, shards=rnd.choice([1, 2, 3, 5]))
            options = dataclasses.replace(options, state=shards)
            ended = launcher.run(options, f"{rnd.choice(REACHED)}:{rnd.randrange(1, 4)}:kill")
            assert ended.exit_code in (KILLED, 0), f"seed {seed}: a recovery failed: {ended}"
            kills += ended.exit_code == KILLED
            if rnd.random() < 0.3 and (here / "local").exists():
                (here / "local").rename(here / f"lost-{rnd.random()}")
        launcher.run_until_done(options)
        assert read_counts(options.sinks[0].location) == counted.expected(), f"seed {seed}"
    assert kills >= 2 * rounds

"""Two runs of one pipeline: the one that claimed last goes on, the other ends with exit code 5, nothing is doubled."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import Launcher
from tests.support.samples import SampleInput, quarantined, table_ids

pytestmark = pytest.mark.crash


ZOMBIES = [
    "epoch.plan.after:2",
    "epoch.run.before:1",
    "stage.file.after:1",
    "epoch.stage.before:1",
    "epoch.stage.after:1",
    "epoch.commit.before:1",
    "epoch.commit.before:2",
    "delta.commit.before:1",
    "delta.commit.before:2",
    "delta.evolve.before:1",
    "delta.evolve.after:1",
    "delta.commit.after:1",
    "epoch.record.before:1",
]


@pytest.mark.parametrize("point", ZOMBIES)
def test_zombie(launcher: Launcher, sample: SampleInput, make_options: MakeOptions, point: str) -> None:
    """A run sleeps, its successor does all the work, the first wakes up."""
    options: PipelineOptions = make_options(max_files=1)
    sample.add("a1.json", 4)
    assert run_once(options).exit_code == 0
    sample.add("b1.json", 4, bad=1, extra={"deep": 1})
    sample.add("b2.json", 4)
    sample.add("b3.json", 4)
    zombie = launcher.start(options, f"{point}:stop")
    zombie.wait_until_stopped()
    assert run_once(options).exit_code == 0
    assert table_ids(options.sinks[0].location) == sample.ids
    zombie.signal(signal.SIGCONT)
    ended = zombie.wait()
    assert ended.exit_code == 5, ended
    assert ended.error_code == "fenced"
    assert table_ids(options.sinks[0].location) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == sample.bad
    sample.add("c1.json", 4)
    assert run_once(options).exit_code == 0
    assert table_ids(options.sinks[0].location) == sample.ids


@pytest.mark.parametrize(
    "point", ["epoch.run.after:1", "epoch.stage.after:1", "delta.create.before:1", "delta.create.after:1"]
)
def test_zombie_of_a_first_run(launcher: Launcher, sample: SampleInput, make_options: MakeOptions, point: str) -> None:
    """Two first runs on a table that does not exist."""
    options: PipelineOptions = make_options(max_files=1)
    for name in ("a1.json", "a2.json", "a3.json"):
        sample.add(name, 4)
    zombie = launcher.start(options, f"{point}:stop")
    zombie.wait_until_stopped()
    assert run_once(options).exit_code == 0
    zombie.signal(signal.SIGCONT)
    assert zombie.wait().exit_code == 5
    assert table_ids(options.sinks[0].location) == sample.ids


def test_zombie_before_its_claim_takes_over(launcher: Launcher, sample: SampleInput, make_options: MakeOptions) -> None:
    """It claims last, so it goes on, on what its predecessor committed."""
    options: PipelineOptions = make_options(max_files=1)
    sample.add("a1.json", 4)
    assert run_once(options).exit_code == 0
    sample.add("b1.json", 4)
    late = launcher.start(options, "delta.claim.before:1:stop")
    late.wait_until_stopped()
    assert run_once(options).exit_code == 0
    sample.add("b2.json", 4)
    late.signal(signal.SIGCONT)
    assert late.wait().exit_code == 0
    assert table_ids(options.sinks[0].location) == sample.ids


@pytest.mark.parametrize("runs", [2, 4])
@pytest.mark.parametrize("first", [True, False])
def test_at_once(launcher: Launcher, sample: SampleInput, make_options: MakeOptions, runs: int, first: bool) -> None:
    options: PipelineOptions = make_options(max_files=2)
    sample.add("a0.json", 4)
    if not first:
        assert run_once(options).exit_code == 0
    for number in range(12):
        sample.add(f"b{number:02d}.json", 4, bad=number % 2)
    children = [launcher.start(options, threads=2) for _ in range(runs)]
    ends = [child.wait() for child in children]
    codes = sorted(ended.exit_code for ended in ends)
    assert set(codes) <= {0, 5}, ends
    launcher.run_until_done(options)
    assert table_ids(options.sinks[0].location) == sample.ids
    assert quarantined(options.sinks[0].location, options.name) == sample.bad


def test_a_running_pipeline_is_taken_over(launcher: Launcher, sample: SampleInput, make_options: MakeOptions) -> None:
    options: PipelineOptions = make_options()
    sample.add("a1.json", 4)
    running = launcher.start(options, once=False)
    table = Path(options.sinks[0].location)
    deadline = time.monotonic() + 120
    while not (table / "_delta_log").exists() or table_ids(table) != sample.ids:
        assert time.monotonic() < deadline, running.log()
        time.sleep(0.05)
    stopped = replace(options, sources=(replace(options.sources[0], poll_interval_secs=30),))
    running.signal(signal.SIGSTOP)  # so that the new file is the successor's
    sample.add("b1.json", 4)
    assert run_once(stopped).exit_code == 0
    running.signal(signal.SIGCONT)
    sample.add("c1.json", 4)
    assert running.wait().exit_code == 5
    assert run_once(options).exit_code == 0
    assert table_ids(table) == sample.ids


def test_each_claim_is_a_new_generation(sample: SampleInput, make_options: MakeOptions) -> None:
    options: PipelineOptions = make_options()
    for number in range(1, 5):
        sample.add(f"a{number}.json", 2)
        assert run_once(options).exit_code == 0
        held = open_pipeline(options).load()
        assert (held.generation, held.epoch) == (number, number)
    assert DeltaTable(options.sinks[0].location).transaction_version("firnline:demo") == 4
    assert DeltaTable(options.sinks[0].location).transaction_version("firnline-gen:demo") == 4

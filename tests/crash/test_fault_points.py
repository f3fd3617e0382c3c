"""Every named point, killed and broken: nothing is lost, nothing doubled, and no point is dead."""

from __future__ import annotations

import random

import pytest

from firnline.faults import POINTS as ALL_POINTS
from firnline.options import PipelineOptions
from tests.support.pipelines import MakeOptions, check_arrived
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput

pytestmark = pytest.mark.crash

# What only two-stage tables, stores, tiers, leases, history edits and savepoints do is tried by their own tests.
ELSEWHERE = (
    "topology.",
    "staging.", "delta.compact.", "delta.sweep.", "sweep.", "lease.", "store.", "tier.", "archive.", "delta.jump.",
    "savepoint.", "restore.",
    "upsert.",
    "widen.",
    "outbox.",
    "follower.",
    "fill.",
    "postgres.",
    "kafka.",
    "letter.",
    "redis.",
    "http.",
    "parts.",
    "registry.",
    "spool.",
    "state.",
)  # fmt: skip
POINTS = [p for p in ALL_POINTS if not p.startswith(ELSEWHERE)]

PATCHES = {
    # Delta's own checkpoint after every few commits, so that a short run writes some
    "firnline.sinks.delta.table:CREATED_WITH": {
        "delta.setTransactionRetentionDuration": "interval 7 days",
        "delta.checkpointInterval": "3",
    },
}


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions) -> PipelineOptions:
    """Several epochs, a column that comes later, bad records, a file that is broken for good."""
    sample.add("a1.json.gz", 6)
    sample.add("a2.json.gz", 6, bad=2)
    sample.add("a3.json", 6)
    sample.add_truncated("b1.json.gz")
    sample.add("b2.json.gz", 6, extra={"deep": "x"})
    sample.add("b3.json", 6, bad=1, note="y")
    sample.add("c1.json.zst", 6)
    sample.add("c2.json", 0)
    sample.add("c3.json.gz", 30)
    return make_options(max_files=2, max_events=20, partition_by=("month",), file_attempts=2)


def prepare(launcher: Launcher, options: PipelineOptions, sample: SampleInput, point: str) -> set[str]:
    """A claim is written by the second run only: the first one creates the table."""
    if not point.startswith("delta.claim"):
        return set()
    ended = launcher.run(options, patches=PATCHES)
    sample.add("d1.json", 6)
    return set(ended.points)


def test_every_point_is_reached(launcher: Launcher, options: PipelineOptions, sample: SampleInput) -> None:
    first = prepare(launcher, options, sample, "delta.claim")
    ended = launcher.run(options, patches=PATCHES)
    assert ended.exit_code == 0, ended
    check_arrived(sample, options)
    assert set(POINTS) - ended.points.keys() - first == set()


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point(launcher: Launcher, options: PipelineOptions, sample: SampleInput, point: str) -> None:
    prepare(launcher, options, sample, point)
    ended = launcher.run(options, f"{point}:1:kill", patches=PATCHES)
    assert ended.exit_code == KILLED
    launcher.run_until_done(options, patches=PATCHES)
    check_arrived(sample, options)


@pytest.mark.parametrize("point", POINTS)
def test_broken_at_a_point(launcher: Launcher, options: PipelineOptions, sample: SampleInput, point: str) -> None:
    prepare(launcher, options, sample, point)
    ended = launcher.run(options, f"{point}:1:raise", patches=PATCHES)
    assert ended.exit_code == 0, ended  # one fault is healed without a new run
    check_arrived(sample, options)


@pytest.mark.parametrize("seed", range(8))
def test_killed_again_and_again(launcher: Launcher, options: PipelineOptions, sample: SampleInput, seed: int) -> None:
    """Kills in the recovery of kills, at any time a point is reached."""
    rng = random.Random(seed)
    kills = 0
    for number in range(6):
        fault = f"{rng.choice(POINTS)}:{rng.randint(1, 4)}:kill"
        ended = launcher.run(options, fault, patches=PATCHES, threads=2)
        assert ended.exit_code in (KILLED, 0), f"a recovery failed under {fault}: {ended}"
        kills += ended.exit_code == KILLED
        sample.add(f"{rng.choice('abcxyz')}{number + 4}.json.gz", 5, bad=number % 2)
    launcher.run_until_done(options, patches=PATCHES)
    check_arrived(sample, options)
    assert kills >= 1, "nothing was killed"

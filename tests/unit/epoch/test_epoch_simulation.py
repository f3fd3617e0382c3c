"""Long seeded runs of the epoch's decisions in a simulated world, with many crashes, zombies and faults.

A failure prints its seed and how to repeat it. `FIRNLINE_SEED` repeats one seed, `FIRNLINE_PROOF=1` tries many more.
"""

from __future__ import annotations

import os
import random
from typing import get_args

from firnline.epoch import messages as m
from tests.support.explore import Judge, walk
from tests.support.followers import Followers, FollowersJudge
from tests.support.proof import covered
from tests.support.simulation import Simulation
from tests.support.two_stage import TwoStage, TwoStageJudge
from tests.support.world import Budget, Scenario

SEEDS = 20_000 if os.environ.get("FIRNLINE_PROOF") else 150
TWO = (("deciding", True), ("further", True))
THREE = (("deciding", True), ("further", True), ("optional", False))


def scenario(seed: int) -> tuple[Scenario, float]:
    """The seed also picks which faults there are."""
    pick = random.Random(seed)
    policy = pick.choice(["all", "required", "quorum"])
    down = frozenset({"optional"}) if policy != "all" and pick.random() < 0.3 else frozenset()
    sinks = THREE if down or pick.random() < 0.5 else TWO
    staged = frozenset(name for name, required in sinks if required and pick.random() < 0.4)
    return Scenario(
        sinks=sinks,
        dead=down,
        staged=staged,
        items=pick.randint(15, 30),
        policy=policy,
        quorum=pick.randint(1, len(sinks) - len(down)),
        max_inflight=pick.randint(1, 4),
        restart_attempts=40,
        late_writes=pick.random() < 0.8,
        tables_exist=bool(staged) or pick.random() < 0.7,
        budget=Budget(
            faults=pick.choice([0, 5, 30]),
            crashes=pick.choice([0, 3, 10]),
            zombies=pick.randint(0, 3),
            discards=pick.choice([0, 2]),
            rejects=pick.choice([0, 2]),
            reshards=pick.choice([0, 2]),
        ),
    ), pick.choice([0.02, 0.1, 0.3])


def with_followers(seed: int) -> tuple[Scenario, float]:
    """A scenario with a required follower and an optional one with lanes; every run may have other settings."""
    pick = random.Random(seed)
    return Scenario(
        sinks=(("deciding", True), ("table", True), ("events", False)),
        followers=("table", "events"),
        items=pick.randint(8, 20),
        policy="required",
        max_inflight=pick.randint(1, 3),
        restart_attempts=40,
        late_writes=pick.random() < 0.8,
        lanes=tuple(pick.randint(1, 3) for _ in range(6)),
        ranges=tuple(pick.randint(1, 3) for _ in range(6)),
        budget=Budget(
            faults=pick.choice([0, 5, 30]),
            crashes=pick.choice([0, 3, 10]),
            zombies=pick.randint(0, 3),
            reshards=pick.choice([0, 2]),
            asides=pick.choice([0, 2]),
            backs=pick.choice([0, 2]),
            edits=pick.choice([0, 2]),
        ),
    ), pick.choice([0.02, 0.1, 0.3])


def made(bounds: Scenario) -> tuple[Simulation, Judge]:
    """The world of a scenario, and who judges it."""
    if bounds.followers:
        followers = Followers(bounds)
        return followers, FollowersJudge(followers)
    if not bounds.staged:
        simulation = Simulation(bounds)
        return simulation, Judge(simulation)
    staged = TwoStage(bounds)
    return staged, TwoStageJudge(staged)


def test_long_runs_deliver_every_item_once_whatever_happens() -> None:
    wanted = os.environ.get("FIRNLINE_SEED")
    heard: set[type] = set()
    moves = 0
    for seed in [int(wanted)] if wanted else range(SEEDS):
        bounds, rate = with_followers(seed) if seed % 3 == 2 else scenario(seed)
        simulation, judge = made(bounds)
        result = walk(simulation, seed, fault_rate=rate, judge=judge)
        moves += result.states
        heard |= {type(event) for _, event in simulation.heard()}
        repeat = f"FIRNLINE_SEED={seed} python -m pytest {os.path.relpath(__file__)}"
        assert not result.broken, f"seed {seed}, {bounds}\nrepeat: {repeat}\n{result}"
    print(f"{moves:,} moves")
    covered["random moves"] += moves
    # What is never heard is never tested.
    assert wanted or heard == set(get_args(m.Event)) - {m.StopRequested}


def test_the_same_seed_gives_the_same_walk() -> None:
    bounds, rate = scenario(7)
    (one, judge), (other, second) = made(bounds), made(bounds)
    assert walk(one, 7, fault_rate=rate, judge=judge) == walk(other, 7, fault_rate=rate, judge=second)

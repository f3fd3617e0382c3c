"""Explores every interleaving of the epoch's decisions with crashes, zombies and lost, late and doubled answers.

`FIRNLINE_PROOF=1` adds larger bounds. With `-s` each search prints its number of states.
"""

from __future__ import annotations

import os

import pytest

from tests.support.explore import explore
from tests.support.simulation import Simulation
from tests.support.world import Budget, Scenario

ONE_OPTIONAL = (("deciding", True), ("optional", False))
THREE = (("deciding", True), ("second", True), ("third", True))
DOWN = frozenset({"optional", "third"})

BOUNDS = {
    "two faults": Scenario(budget=Budget(faults=2)),
    "three in flight, a fault": Scenario(items=5, max_inflight=3, budget=Budget(faults=1)),
    "two crashes": Scenario(budget=Budget(crashes=2)),
    "a crash and a fault": Scenario(budget=Budget(crashes=1, faults=1)),
    "two crashes and a fault": Scenario(items=2, budget=Budget(crashes=2, faults=1)),
    "two crashes, and nobody tells what is recorded": Scenario(tells_recorded=False, budget=Budget(crashes=2)),
    "a crash and a fault, and nobody tells what is acknowledged": Scenario(
        tells_recorded=False, items=2, budget=Budget(crashes=1, faults=1)
    ),
    "a zombie, and nobody tells what is acknowledged": Scenario(
        tells_recorded=False, items=2, budget=Budget(zombies=1)
    ),
    "missed acknowledgements of a run that polls": Scenario(
        tells_recorded=False, once=False, items=2, budget=Budget(stops=2, crashes=1, faults=1)
    ),
    "a zombie": Scenario(budget=Budget(zombies=1)),
    "a zombie and a fault": Scenario(items=1, budget=Budget(zombies=1, faults=1)),
    "a zombie and a crash": Scenario(items=1, budget=Budget(zombies=1, crashes=1)),
    "tables that do not exist, a fault": Scenario(tables_exist=False, budget=Budget(faults=1)),
    "tables that do not exist, a crash": Scenario(tables_exist=False, budget=Budget(crashes=1)),
    "tables that do not exist, a zombie": Scenario(tables_exist=False, items=2, budget=Budget(zombies=1)),
    "stop at any instant": Scenario(budget=Budget(stops=1, faults=1)),
    "stop a run that polls": Scenario(once=False, items=2, budget=Budget(stops=2, crashes=1)),
    "shards change twice": Scenario(items=2, budget=Budget(reshards=2)),
    "shards change, a fault": Scenario(items=2, budget=Budget(reshards=1, faults=1)),
    "shards change, a crash": Scenario(items=2, budget=Budget(reshards=1, crashes=1)),
    "shards change, a zombie": Scenario(items=1, budget=Budget(reshards=1, zombies=1)),
    "shards change before there is a table": Scenario(
        tables_exist=False, items=1, budget=Budget(reshards=1, faults=1, stops=1)
    ),
    "shards change beside an optional sink": Scenario(
        sinks=ONE_OPTIONAL, policy="required", items=1, budget=Budget(reshards=1, faults=1)
    ),
    "an optional sink": Scenario(sinks=ONE_OPTIONAL, policy="required", items=2, budget=Budget(faults=1, crashes=1)),
    "an optional sink that is down": Scenario(
        sinks=ONE_OPTIONAL, dead=DOWN, policy="required", restart_attempts=3, budget=Budget(faults=1)
    ),
    "a quorum": Scenario(sinks=THREE, policy="quorum", quorum=2, items=2, budget=Budget(crashes=1)),
    "a quorum with a sink down": Scenario(
        sinks=THREE, dead=DOWN, policy="quorum", quorum=2, items=2, restart_attempts=3, budget=Budget(faults=1)
    ),
}
LARGER = {
    "tables that do not exist, a zombie and a fault": Scenario(
        tables_exist=False, items=2, budget=Budget(zombies=1, faults=1)
    ),
    "tables that do not exist, a zombie and a crash": Scenario(
        tables_exist=False, items=2, budget=Budget(zombies=1, crashes=1)
    ),
    "three faults": Scenario(budget=Budget(faults=3)),
    "two crashes and a fault, three epochs": Scenario(budget=Budget(crashes=2, faults=1)),
    "a crash and two faults": Scenario(items=2, budget=Budget(crashes=1, faults=2)),
    "a zombie and a fault, two epochs": Scenario(items=2, budget=Budget(zombies=1, faults=1)),
    "a zombie and a crash, two epochs": Scenario(items=2, budget=Budget(zombies=1, crashes=1)),
    "a zombie, a crash and a fault": Scenario(items=1, budget=Budget(zombies=1, crashes=1, faults=1)),
    "a zombie beside an optional sink": Scenario(
        sinks=ONE_OPTIONAL, policy="required", items=2, budget=Budget(zombies=1)
    ),
    "an optional sink and two faults": Scenario(sinks=ONE_OPTIONAL, policy="required", budget=Budget(faults=2)),
}
if os.environ.get("FIRNLINE_PROOF"):
    BOUNDS |= LARGER


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BOUNDS)
def test_every_state_keeps_every_promise_and_can_come_to_its_end(name: str) -> None:
    result = explore(Simulation(BOUNDS[name]))
    print(f"{name}: {result}")
    assert result.complete
    assert not result.broken, str(result)


def test_a_required_sink_that_is_down_for_ever_ends_the_run_as_safe_to_run_again() -> None:
    scenario = Scenario(dead=frozenset({"further"}), items=1, restart_attempts=2)
    assert explore(Simulation(scenario)).broken == "a run failed with exit code 3"

"""Explores the epoch's decisions over two-stage tables: units, committers, people who discard and retry, several sinks.

The rule that is proven here: a further sink is given an epoch only once the deciding table's log holds it. The same
search with that rule, or another one, broken must find a broken promise. `FIRNLINE_PROOF=1` adds larger bounds.
"""

from __future__ import annotations

import os

import pytest

from firnline.epoch import decide as epoch
from tests.support.explore import Result, explore
from tests.support.mutants import Mutant, mutated
from tests.support.two_stage import TwoStage, TwoStageJudge
from tests.support.world import Actor, Budget, Entry, Pick, Scenario, Sink, Unit, World, Write

ONE = (("deciding", True),)
THREE = (("deciding", True), ("further", True), ("optional", False))
FIRST = frozenset({"deciding"})
SECOND = frozenset({"further"})
BOTH = FIRST | SECOND

DISCARD = Scenario(staged=BOTH, budget=Budget(discards=1))
RETRY = Scenario(sinks=ONE, staged=FIRST, budget=Budget(crashes=1, rejects=1, discards=1))
REJECT = Scenario(staged=FIRST, budget=Budget(rejects=1))
ZOMBIE = Scenario(sinks=ONE, staged=FIRST, items=2, budget=Budget(zombies=1))

BOUNDS = {
    "two staged sinks, a discard": DISCARD,
    "two staged sinks, a crash and a discard": Scenario(staged=BOTH, budget=Budget(crashes=1, discards=1)),
    "two staged sinks, a fault and a discard": Scenario(staged=BOTH, budget=Budget(faults=1, discards=1)),
    "two staged sinks, a crash and a fault": Scenario(staged=BOTH, items=2, budget=Budget(faults=1, crashes=1)),
    "two staged sinks, a crash, a bad unit and a discard": Scenario(
        staged=BOTH, items=2, budget=Budget(crashes=1, discards=1, rejects=1)
    ),
    "two staged sinks, stopped at any instant": Scenario(
        staged=BOTH, items=2, once=False, budget=Budget(stops=2, crashes=1)
    ),
    "a direct sink after a staged one, a crash, a bad unit and a discard": Scenario(
        staged=FIRST, budget=Budget(crashes=1, discards=1, rejects=1)
    ),
    "a staged sink after a direct one, a zombie": Scenario(staged=SECOND, items=2, budget=Budget(zombies=1)),
    "a staged sink after a direct one, two crashes": Scenario(staged=SECOND, budget=Budget(crashes=2)),
    "two staged sinks and an optional one, a crash": Scenario(
        sinks=THREE, staged=BOTH, policy="required", items=2, budget=Budget(crashes=1)
    ),
    "two staged sinks and an optional one that is down": Scenario(
        sinks=THREE,
        staged=BOTH,
        dead=frozenset({"optional"}),
        policy="required",
        items=2,
        restart_attempts=3,
        budget=Budget(faults=1, discards=1),
    ),
    "a zombie, and a discard, beside one staged sink": Scenario(
        sinks=ONE, staged=FIRST, items=2, budget=Budget(zombies=1, discards=1)
    ),
    "a zombie and a direct sink after a staged one": Scenario(staged=FIRST, items=2, budget=Budget(zombies=1)),
    "a unit that a person takes up again": RETRY,
    "two staged sinks whose shards change, a crash": Scenario(
        staged=BOTH, items=2, budget=Budget(crashes=1, reshards=1)
    ),
    "a staged sink whose shards change, a zombie": Scenario(
        sinks=ONE, staged=FIRST, items=1, budget=Budget(zombies=1, reshards=1)
    ),
}
LARGER = {
    "two staged sinks and a zombie": Scenario(staged=BOTH, items=2, budget=Budget(zombies=1)),
    "two staged sinks, a zombie and a discard": Scenario(
        staged=BOTH, items=2, max_inflight=1, budget=Budget(zombies=1, discards=1)
    ),
    "a zombie, a discard and a direct sink after a staged one": Scenario(
        staged=FIRST, items=2, budget=Budget(zombies=1, discards=1)
    ),
    "a zombie and a direct sink after a staged one, three items": Scenario(staged=FIRST, budget=Budget(zombies=1)),
    "one staged sink, a zombie, a bad unit and a discard": Scenario(
        sinks=ONE, staged=FIRST, budget=Budget(zombies=1, rejects=1, discards=1)
    ),
    "one staged sink, a zombie, a fault and a discard": Scenario(
        sinks=ONE, staged=FIRST, items=2, budget=Budget(zombies=1, faults=1, discards=1)
    ),
    "one staged sink, a crash, a fault, a bad unit and a discard": Scenario(
        sinks=ONE, staged=FIRST, budget=Budget(crashes=1, faults=1, rejects=1, discards=1)
    ),
}
if os.environ.get("FIRNLINE_PROOF"):
    BOUNDS |= LARGER

SOUND: dict[Scenario, Result] = {}


def searched(scenario: Scenario) -> Result:
    """What the search says of the real decisions and rules; searched once for all tests."""
    if scenario not in SOUND:
        simulation = TwoStage(scenario)
        SOUND[scenario] = explore(simulation, judge=TwoStageJudge(simulation), limit=50_000_000)
    return SOUND[scenario]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", BOUNDS)
def test_every_state_of_two_stage_tables_keeps_every_promise(name: str) -> None:
    result = searched(BOUNDS[name])
    print(f"{name}: {result}")
    assert result.complete
    assert not result.broken, str(result)


# -- planted bugs ----------------------------------------------------------------------------------------


class BlindCommitter(TwoStage):
    """A committer commits what it validated, whatever came into the log meanwhile."""

    def committer_lands(self, sink: Sink, pick: Pick) -> bool:
        return True


class NoForks(TwoStage):
    """Every unit that fits onto the log counts, whoever put it."""

    def sort_out(self, sink: Sink, units: tuple[Unit, ...]):  # type: ignore[no-untyped-def]  # as the base class
        return super().sort_out(sink._replace(generation=0), units)


class UnconditionalClaim(TwoStage):
    """A claim is written over whatever the committer wrote since it read the log."""

    def claims(self, sink: Sink, write: Write) -> bool:
        return True


class ClaimNotRead(TwoStage):
    """A run goes on though a unit that its claim adopted was set aside in between."""

    def stands(self, adopted: int, held: tuple[Entry, ...]) -> bool:
        return True


SERVED = "    if sink.epoch < state.committed:"
MUTANTS = {
    "a further sink is given what was only put": Mutant(DISCARD, SERVED, SERVED.replace("committed", "decided")),
    "an epoch is recorded when it is put": Mutant(
        ZOMBIE, "    committed = turn.state.committed\n", "    committed = turn.state.decided\n"
    ),
    "a run waits for the committer before it ends": Mutant(
        REJECT, "reached < state.committed or state.acknowledging", "reached < state.decided"
    ),
    "a put waits for the committer": Mutant(
        REJECT, "all_settled = state.settled == state.committed", "all_settled = state.settled == state.decided"
    ),
    "a log that is read too late counts": Mutant(ZOMBIE, "min(epoch, state.decided))", "epoch)"),
    "nothing to do, though a further sink lacks what was committed": Mutant(
        DISCARD, "any(s.epoch < state.committed for", "any(s.epoch < state.recorded for"
    ),
    "units that a person discarded during validation are committed": Mutant(DISCARD, world=BlindCommitter),
    "a zombie's unit counts": Mutant(ZOMBIE, world=NoForks),
    "a claim is not conditional": Mutant(ZOMBIE, world=UnconditionalClaim),
    "a claim is not read again": Mutant(RETRY, world=ClaimNotRead),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_catches_a_bug_planted_around_two_stage_tables(name: str) -> None:
    mutant = MUTANTS[name]
    sound = searched(mutant.scenario)
    assert not sound.broken, f"without the bug: {sound}"
    core = mutated(mutant.old, mutant.new) if mutant.old else epoch
    simulation = (mutant.world or TwoStage)(mutant.scenario, core)
    assert isinstance(simulation, TwoStage)
    result = explore(simulation, judge=TwoStageJudge(simulation))
    print(f"{name}: {result}")
    assert result.broken, f"{name} was not caught in {result}"


# -- a further sink that holds something else ------------------------------------------------------------


class Diverged(TwoStage):
    """The further sink holds an epoch that was never decided."""

    def start(self) -> World:
        world = super().start()
        strange = Entry(1, "9.1", "", 0, 1)
        return self.with_sink(world, 1, world.sinks[1]._replace(chain=(strange,)))


class Unproven(Diverged):
    """A sink is joined by the number of its epoch."""

    def joins(self, world: World, actor: Actor, held: tuple[Entry, ...]) -> bool:
        return True


class LooksAtRuns(TwoStageJudge):
    """Says what becomes of runs; what the sinks hold is wrong from the beginning."""

    def __call__(self, world: World) -> str:
        return next((found for actor in world.actors if actor.alive for found in self._run(world, actor)), "")


def test_a_sink_with_another_chain_ends_the_run_instead_of_being_taken_for_level() -> None:
    scenario = Scenario(staged=FIRST, items=2)
    proven, unproven = Diverged(scenario), Unproven(scenario)
    assert explore(proven, judge=LooksAtRuns(proven)).broken == "a run failed with exit code 3"
    assert "exit code 3" not in explore(unproven, judge=LooksAtRuns(unproven)).broken

"""Plants bugs in the epoch's decisions and in the rules of the world: the search must catch every one.

A bug in the decisions is a changed line of their source; a bug in a sink, the ledger or the source is a rule of
the simulated world that is overridden. With `-s` each test prints the broken promise and the shortest way there.
"""

from __future__ import annotations

import pytest

from firnline.epoch import decide as epoch
from tests.support.explore import Result, explore
from tests.support.mutants import Mutant, mutated
from tests.support.simulation import Simulation
from tests.support.world import Actor, Budget, Entry, Scenario, Sink, World, Write

PLAIN = Scenario()
FAULT = Scenario(budget=Budget(faults=1))
NO_LATE_WRITES = Scenario(late_writes=False, budget=Budget(faults=1))
CRASH = Scenario(items=2, budget=Budget(crashes=1))
NO_TABLES = Scenario(tables_exist=False, items=2, budget=Budget(crashes=1))
ZOMBIE = Scenario(items=2, budget=Budget(zombies=1))
ONE_SINK = Scenario(sinks=(("deciding", True),), items=2, budget=Budget(zombies=1, faults=1))
UNTOLD = Scenario(tells_recorded=False, budget=Budget(crashes=1))
POLLING = Scenario(once=False, budget=Budget(faults=1, stops=1))
RESHARD = Scenario(items=1, budget=Budget(reshards=1, zombies=1))
RESHARD_ALONE = Scenario(items=2, budget=Budget(reshards=1))
OPTIONAL = Scenario(sinks=(("deciding", True), ("optional", False)), policy="required", budget=Budget(faults=1))


# -- worlds with a rule broken ---------------------------------------------------------------------------


class NoFence(Simulation):
    """Sinks ask only for the entry before, not for the generation."""

    def refuses(self, sink: Sink, actor: Actor, entry: Entry) -> bool:
        return sink.tip != entry.base or len(sink.chain) != entry.epoch - 1


class NoRegistration(Simulation):
    """Further sinks neither note a generation nor ask for one."""

    def registered(self, sink: Sink, write: Write) -> Sink:
        return sink if write.sink else super().registered(sink, write)

    def refuses(self, sink: Sink, actor: Actor, entry: Entry) -> bool:
        unregistered = sink.holder == 0
        return len(sink.chain) != entry.epoch - 1 or (not unregistered and super().refuses(sink, actor, entry))


class UnconditionalClaim(Simulation):
    """A claim is written over whatever came since it read the tip."""

    def claims(self, sink: Sink, write: Write) -> bool:
        return True


class UnconditionalWrites(Simulation):
    """A write lands whatever came since it was checked."""

    def lands(self, sink: Sink, write: Write) -> bool:
        return True


class NamelessReceipts(Simulation):
    """A receipt tells the epoch, not the attempt: everybody takes it for their own."""

    def holds(self, sink: Sink, entry: Entry) -> str | None:
        return entry.attempt if super().holds(sink, entry) else None


class ReplayFromListing(Simulation):
    """A further sink is given what a new listing finds, not what the ledger entry says."""

    def replayed(self, world: World, decided: Entry) -> Entry | None:
        return decided._replace(end=min(self.scenario.items, decided.start + 1))


class LedgerAfterCommit(Simulation):
    """The ledger entry is written once the commit is known to stand."""

    def staged(self, world: World, entry: Entry) -> World:
        return world

    def concluded(self, world: World, entry: Entry) -> World:
        return super().staged(world, entry)


class NoSecondRegistration(Simulation):
    """A run that joined a sink without a table does not register in the one that an older run made since."""

    def registers(self, sink: Sink, actor: Actor) -> bool:
        return self.missing(sink)


class BlindSinks(Simulation):
    """Sinks neither recognise a repeat nor ask for the entry before; the decisions alone keep order."""

    def repeats(self, sink: Sink, entry: Entry) -> bool:
        return False

    def refuses(self, sink: Sink, actor: Actor, entry: Entry) -> bool:
        return sink.holder != actor.number


# -- the mutants -----------------------------------------------------------------------------------------


MUTANTS = {
    # in the decisions
    "a run that was fenced claims again": Mutant(RESHARD, "turn.do(m.Claim(again=True))", "turn.do(m.Claim())"),
    "a claim made again does not wait for a commit": Mutant(
        RESHARD_ALONE, "turn.state.planning is not None or is_busy:", "turn.state.planning is not None:"
    ),
    "sinks are not joined again after another claim": Mutant(
        RESHARD_ALONE, "replace(sink, joined=False) for sink", "sink for sink"
    ),
    "a later epoch is kept when the one before is lost": Mutant(
        FAULT, "if s.epoch < epoch), exhausted", "if s.epoch != epoch), exhausted"
    ),
    "a plan on a lost epoch counts": Mutant(FAULT, "if state.planning != state.planned_on:", "if False:"),
    "a plan that is not taken up is not dropped": Mutant(
        Scenario(budget=Budget(faults=2)), "turn.do(m.Drop(epoch, attempt))", "pass"
    ),
    "the newest epoch is acknowledged": Mutant(PLAIN, "min(state.recorded - 1, *(", "min(state.recorded, *("),
    "what a dead run did not acknowledge is never sent": Mutant(UNTOLD, ", owed=read.owed)", ")"),
    "what a source missed is never sent again": Mutant(POLLING, ", owed=missed)", ", owed=False)"),
    "a repeated acknowledgement goes beyond what is safe": Mutant(
        UNTOLD, "safe = min(_safe(state), state.acknowledged)", "safe = state.settled"
    ),
    "a sink that lags is forgotten when acknowledging": Mutant(
        OPTIONAL, "*(s.epoch for s in state.sinks if not s.from_outbox)))", "state.decided))"
    ),
    "recorded before the commit": Mutant(
        PLAIN, "m.Record(state.settled)", "m.Record(state.settled + len(state.slots))"
    ),
    "recorded when decided, not when settled": Mutant(FAULT, "m.Record(state.settled)", "m.Record(state.decided)"),
    "the next epoch is committed before this one is settled": Mutant(
        FAULT, "all_settled = state.settled == state.committed", "all_settled = True"
    ),
    "no question after an unclear commit": Mutant(
        NO_LATE_WRITES,
        "turn.sink(sink, busy=False, asking=epoch)",
        "turn.sink(sink, busy=False); turn.slot(epoch, Stage.STAGED)",
        world=BlindSinks,
        sound=BlindSinks,
    ),
    "unclear is taken as lost": Mutant(
        FAULT, "turn.sink(sink, busy=False, asking=epoch)", "turn.sink(sink, busy=False); _drop_from(turn, epoch)"
    ),
    "unclear is taken as committed": Mutant(
        FAULT,
        "turn.sink(sink, busy=False, asking=epoch)",
        "turn.sink(sink, busy=False, epoch=epoch)",
    ),
    "absent is taken as committed": Mutant(
        FAULT,
        "if ours:\n                turn.slot(epoch, Stage.STAGED)",
        "if ours:\n                turn.set(slots=state.slots[1:], decided=epoch, tip=state.slots[0].attempt)",
    ),
    "absent is never tried again": Mutant(
        FAULT, "if ours:\n                turn.slot(", "if False:\n                turn.slot("
    ),
    "another run's receipt is taken for ours": Mutant(
        ONE_SINK, "if ours and _stage_of(state, epoch, attempt) is None:", "if ours and not state.slots:"
    ),
    "a plan is kept though the claim stands on another tip": Mutant(
        ZOMBIE, "if (epoch, tip) != (state.decided, state.tip):", "if False:"
    ),
    "a further sink is served before the deciding one": Mutant(
        PLAIN,
        "if sink.epoch < state.committed:",
        "if sink.epoch < state.committed + (sink.name != state.deciding.name and bool(state.slots)):",
    ),
    "a run ends before its last epoch is recorded": Mutant(
        PLAIN, "if state.recorded < state.settled or reached", "if reached"
    ),
    "a run ends before further sinks are level": Mutant(
        FAULT, "reached < state.committed or state.acknowledging:", "state.acknowledging:"
    ),
    "nothing to do, though a sink lags": Mutant(
        CRASH, "return bool(state.slots) or lags or", "return bool(state.slots) or"
    ),
    "nothing to do, though an epoch is not recorded": Mutant(
        CRASH, "owes = state.recorded < state.settled or ", "owes = "
    ),
    "an answer is taken twice": Mutant(
        FAULT,
        "case m.Committed(sink, epoch, attempt, committed) if epoch == known.epoch + 1:",
        "case m.Committed(sink, epoch, attempt, committed):",
    ),
    # in sinks, ledger and source
    "a sink does not fence": Mutant(ZOMBIE, world=NoFence),
    "a claim is not conditional": Mutant(ZOMBIE, world=UnconditionalClaim),
    "writes are not conditional": Mutant(FAULT, world=UnconditionalWrites),
    "receipts without an attempt id": Mutant(ZOMBIE, world=NamelessReceipts),
    "generations are not registered in further sinks": Mutant(ZOMBIE, world=NoRegistration),
    "an older run's new table fences a newer run": Mutant(NO_TABLES, world=NoSecondRegistration),
    "a replay reads a new listing": Mutant(PLAIN, world=ReplayFromListing),
    "the ledger entry is written after the commit": Mutant(PLAIN, world=LedgerAfterCommit),
    "sinks do not recognise a repeat": Mutant(FAULT, world=BlindSinks),
}


SOUND: dict[tuple[type[Simulation], Scenario], Result] = {}


def unmutated(world: type[Simulation], scenario: Scenario) -> Result:
    """What the search says of the real decisions within the same bounds; searched once for all mutants."""
    if (world, scenario) not in SOUND:
        SOUND[world, scenario] = explore(world(scenario))
    return SOUND[world, scenario]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_catches_a_planted_bug(name: str) -> None:
    mutant = MUTANTS[name]
    sound = unmutated(mutant.sound or Simulation, mutant.scenario)
    assert not sound.broken, f"without the bug: {sound}"
    core = mutated(mutant.old, mutant.new) if mutant.old else epoch
    result = explore((mutant.world or Simulation)(mutant.scenario, core))
    print(f"{name}: {result}")
    assert result.broken, f"{name} was not caught in {result}"

"""Explores the epoch's decisions with followers: heads, lanes, row ranges, the outbox, sweeps, backups and edits.

Planted bugs must all be found. `FIRNLINE_PROOF=1` adds larger bounds, of which at most the first million
states are visited, nearest first. With `-s` each search prints its number of states.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from firnline.epoch import decide as epoch
from firnline.epoch import messages as m
from tests.support.explore import Result, explore
from tests.support.followers import Followers, FollowersJudge
from tests.support.mutants import Mutant, mutated
from tests.support.simulation import Job
from tests.support.world import Actor, Budget, Entry, Lane, Scenario, Target, World

ONE = Scenario(sinks=(("deciding", True), ("events", True)), followers=("events",), max_inflight=1)
OPTIONAL = replace(ONE, sinks=(("deciding", True), ("events", False)), policy="required")
TWO = replace(ONE, sinks=(("deciding", True), ("table", True), ("events", True)), followers=("table", "events"))
ONE_OF_TWO = replace(TWO, sinks=(("deciding", True), ("table", True), ("events", False)), policy="required")
DOWN = replace(OPTIONAL, dead=frozenset({"events"}), restart_attempts=1, sweeps=False)

QUORUM = replace(OPTIONAL, policy="quorum", quorum=2)
FILL = replace(TWO, items=4, filled="events")
FILL_DOWN = replace(FILL, dead=frozenset({"events"}), restart_attempts=1)

ZOMBIE = replace(ONE, items=1, lanes=(2,), late_writes=False, sweeps=False, budget=Budget(zombies=1))

BOUNDS = {
    "two lanes, a crash": replace(ONE, lanes=(2,), budget=Budget(crashes=1)),
    "two lanes become one, a crash": replace(ONE, lanes=(2, 1), budget=Budget(crashes=1)),
    "one lane becomes two, a crash": replace(ONE, lanes=(1, 2), budget=Budget(crashes=1)),
    "two lanes, two faults": replace(ONE, items=2, lanes=(2,), budget=Budget(faults=2)),
    "ranges of another size, a crash": replace(ONE, ranges=(1, 2), budget=Budget(crashes=1)),
    "ranges of another size, two crashes": replace(ONE, items=2, ranges=(2, 1), budget=Budget(crashes=2)),
    "a follower goes back, a crash": replace(ONE, budget=Budget(backs=1, crashes=1)),
    "a follower goes back, a crash and a fault": replace(ONE, items=2, budget=Budget(backs=1, crashes=1, faults=1)),
    "a follower with two lanes goes back": replace(ONE, lanes=(2,), budget=Budget(backs=1)),
    "an optional follower is set aside, a crash": replace(OPTIONAL, budget=Budget(asides=1, crashes=1)),
    "a follower is set aside and taken up again": replace(OPTIONAL, items=2, budget=Budget(asides=1, edits=1)),
    "a follower is set aside while shards change, a fault": replace(
        OPTIONAL, items=2, budget=Budget(asides=1, reshards=1, faults=1)
    ),
    "an optional follower is down": replace(DOWN, budget=Budget(crashes=1)),
    "two followers, a crash": replace(ONE_OF_TWO, items=2, budget=Budget(crashes=1)),
    "two followers, one of two lanes": replace(ONE_OF_TWO, items=2, lanes=(2, 1), ranges=(1,)),
    "a follower is set aside, a zombie": replace(
        OPTIONAL, items=2, late_writes=False, sweeps=False, budget=Budget(asides=1, zombies=1)
    ),
    "two followers, a rollback": replace(TWO, late_writes=False, sweeps=False, budget=Budget(edits=1)),
    "a quorum, a follower is set aside": replace(QUORUM, budget=Budget(asides=1)),
    "a quorum, one of two followers is set aside": replace(
        QUORUM,
        sinks=(("deciding", True), ("table", False), ("events", False)),
        followers=("table", "events"),
        items=2,
        budget=Budget(asides=1, crashes=1),
    ),
    "a follower is filled": replace(FILL, budget=Budget(faults=1)),
    "a follower is filled, a crash": replace(FILL, sweeps=False, budget=Budget(crashes=1)),
    "a follower is filled in ranges, a crash": replace(
        FILL,
        sinks=(("deciding", True), ("events", True)),
        followers=("events",),
        ranges=(1, 2),
        budget=Budget(crashes=1),
    ),
    "a follower is filled by two lanes": replace(
        FILL,
        sinks=(("deciding", True), ("events", True)),
        followers=("events",),
        lanes=(2, 1),
        budget=Budget(crashes=1),
    ),
    "a follower that is to be filled is down": FILL_DOWN,
    "a target of another pipeline": replace(OPTIONAL, stranger=True, restart_attempts=1, budget=Budget(faults=1)),
}
LARGER = {
    "two lanes, a zombie": ZOMBIE,
    "two lanes become one, a zombie": replace(ONE, items=2, lanes=(2, 1), budget=Budget(zombies=1)),
    "two lanes in ranges, a crash and a fault": replace(
        ONE, items=4, lanes=(2, 1), ranges=(1, 2), budget=Budget(crashes=1, faults=1)
    ),
    "a follower goes back, a crash and a fault, two epochs": replace(ONE, budget=Budget(backs=1, crashes=1, faults=1)),
    "a follower is set aside and taken up again, two epochs": replace(OPTIONAL, budget=Budget(asides=1, edits=1)),
    "two followers, one of two lanes, a crash": replace(
        ONE_OF_TWO, items=2, lanes=(2, 1), late_writes=False, budget=Budget(crashes=1)
    ),
    "two followers, a crash, two epochs": replace(ONE_OF_TWO, lanes=(2,), budget=Budget(crashes=1)),
    "two followers, set aside and a crash": replace(ONE_OF_TWO, budget=Budget(asides=1, crashes=1)),
}
if os.environ.get("FIRNLINE_PROOF"):
    BOUNDS |= LARGER


def search(
    scenario: Scenario, world: type[Followers] = Followers, core: Any = epoch, *, limit: int = 10_000_000
) -> Result:
    simulation = world(scenario, core)
    return explore(simulation, judge=FollowersJudge(simulation), limit=limit)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BOUNDS)
def test_followers_lose_nothing_double_nothing_and_hold_back_nobody(name: str) -> None:
    result = search(BOUNDS[name], limit=1_000_000)
    print(f"{name}: {result}")
    assert result.complete or name in LARGER
    assert not result.broken, str(result)


# -- worlds with a rule broken ---------------------------------------------------------------------------


class OnePartition(Followers):
    """All lanes write their heads to one partition: a reader stops at the first transaction that is open there."""

    def opened(self, target: Target) -> tuple[Lane, ...]:
        return tuple(lane._replace(open=None) for lane in target.lanes)

    def read_lane(self, target: Target, lane: int) -> Lane | None:
        found = super().read_lane(target, lane)
        hidden = [one.open[lane] for one in target.lanes if one.open]
        if found is None or not hidden:
            return found
        older = min(hidden, key=lambda one: (one.epoch, one.row))
        return found._replace(epoch=older.epoch, attempt=older.attempt, partial=older.partial, row=older.row)


class FencedProducer(Followers):
    """A run whose producer is fenced takes itself for fenced."""

    def producer_lost(self, job: Job) -> World:
        return self._hear(job, m.Fenced())


class FewerLanes(Followers):
    """A run claims the lanes of its spec, not those that the sink once had."""

    def claimed_lanes(self, target: Target, at: int, actor: Actor) -> int:
        return self.setting(self.scenario.lanes, actor) if at == self.laned else 1


class NumberedRanges(Followers):
    """A head counts ranges, not rows."""

    def first_row(self, lane: Lane, size: int) -> int:
        return lane.row * size

    def next_row(self, row: int, size: int, count: int) -> int:
        return row + 1

    def is_last(self, row: int, size: int, count: int) -> bool:
        return row * size >= count


class MissingIsFresh(Followers):
    """A follower without a head begins with the next epoch, though it held epochs once."""

    def beginning(self, world: World, actor: Actor, at: int, target: Target) -> int | None:
        if any(lane.has_head for lane in target.lanes):
            return super().beginning(world, actor, at, target)
        return int(self.view(actor).decided)


class GapIgnored(Followers):
    """A follower that went back beyond the outbox goes on with what there is."""

    def lacks(self, world: World, actor: Actor, epoch: int) -> bool:
        return False

    def beginning(self, world: World, actor: Actor, at: int, target: Target) -> int | None:
        chain: tuple[Entry, ...] = world.sinks[0].chain[: self.view(actor).decided]
        there = [e.epoch for e in chain if e.attempt not in world.outbox or e.epoch < world.folded]
        return max([super().beginning(world, actor, at, target) or 0, *there])


class SharedTable(Followers):
    """A rollback of one follower deletes the rows of every follower in the table."""

    def undone(self, world: World, at: int, to: int) -> World:
        for place in self.places:
            world = super().undone(world, place, to)
        return world


class EarlyAside(Followers):
    """A follower is given up as soon as a plan says so."""

    def decides_aside(self, job: Job, entry: Entry) -> World:
        for name, one in zip(self.scenario.followers, entry.known, strict=True):
            if one.set_aside:
                return self._tell(job.world, job.place, 0, m.SetAside(name))
        return job.world


class FastestMark(Followers):
    """The outbox is swept by what the fastest sink holds."""

    def mark(self, actor: Actor) -> int:
        return max(self.heads(actor).values())


class FoldsToFloor(Followers):
    """Ledger entries are folded up to the floor, whoever lacks their epochs."""

    def fold_below(self, actor: Actor, floor: int, waiting: list[int]) -> int:
        return floor


class ReceiptByNumber(Followers):
    """A head counts by the number of its epoch."""

    def is_on_chain(self, world: World, actor: Actor, lane: Lane) -> bool:
        return True

    def _is_of(self, chain: tuple[Entry, ...], lane: Lane) -> bool:
        return True


class FoldsPastFill(Followers):
    """Ledger entries are folded that a sink needs which is being filled."""

    def fold_below(self, actor: Actor, floor: int, waiting: list[int]) -> int:
        return min([floor, self.mark(actor) + 1, *waiting])


class SlowestLaneIgnored(Followers):
    """A follower holds what its fastest lane holds."""

    def claimed_epoch(self, target: Target, at: int, actor: Actor) -> int:
        return max((lane.epoch for lane in target.lanes), default=0)


class WentBackIsFenced(Followers):
    """A follower that lost the claim of a run is taken for one that a newer run took over."""

    def _hear(self, job: Job, event: m.Event, world: World | None = None) -> World:
        return super()._hear(job, m.Fenced() if isinstance(event, m.WentBack) else event, world)


class SilentClaim(Followers):
    """A claim does not tell which sinks are set aside."""

    def _later(self, job: Job, task: Any, world: World | None = None) -> World:
        if isinstance(task.answer, m.Claimed):
            away = tuple(sink.name for sink in self.view(job.actor).sinks if sink.away)
            task = task._replace(answer=replace(task.answer, away=away))
        return super()._later(job, task, world)


MUTANTS = {
    # in the decisions
    "a follower holds back the source": Mutant(
        BOUNDS["an optional follower is down"], " for s in state.sinks if not s.from_outbox)", " for s in state.sinks)"
    ),
    "a sink that went back is not joined again": Mutant(
        BOUNDS["a follower goes back, a crash"], "turn.sink(sink, joined=False, asking=0)", "pass"
    ),
    "a claim made again waits for a sink that is set aside": Mutant(
        BOUNDS["a follower is set aside while shards change, a fault"],
        "(sink.asking and not sink.away)",
        "sink.asking",
    ),
    "a claim made again does not wait for a sweep": Mutant(
        replace(ONE, budget=Budget(reshards=1)), "is_busy = is_busy or turn.state.acknowledging", "pass"
    ),
    "a run ends while a follower that went back lacks rows": Mutant(
        BOUNDS["a follower goes back, a crash and a fault"],
        "reached = state.settled if state.stopping else _reached(state, _held)",
        "reached = state.settled",
    ),
    "a run goes on without the quorum that it needs": Mutant(
        BOUNDS["a quorum, a follower is set aside"], "        _stop(turn, 1)", "        pass"
    ),
    "a sink that is being filled counts in the commit policy": Mutant(
        FILL_DOWN, "not (s.away or s.filling)", "not s.away"
    ),
    # in followers, outbox and ledger
    "entries are folded that a sink needs which is being filled": Mutant(
        BOUNDS["a follower is filled"], world=FoldsPastFill
    ),
    "lanes share a checkpoint partition": Mutant(BOUNDS["two lanes, a crash"], world=OnePartition),
    "a fenced producer is taken for a fenced run": Mutant(ZOMBIE, world=FencedProducer),
    "lanes that the sink once had are not claimed": Mutant(BOUNDS["two lanes become one, a crash"], world=FewerLanes),
    "a sink is taken for as far as its fastest lane": Mutant(BOUNDS["two lanes, a crash"], world=SlowestLaneIgnored),
    "progress by the number of a range": Mutant(BOUNDS["ranges of another size, a crash"], world=NumberedRanges),
    "a missing head is taken for fresh": Mutant(BOUNDS["a follower goes back, a crash"], world=MissingIsFresh),
    "a follower that went back beyond the outbox goes on": Mutant(
        BOUNDS["a follower goes back, a crash"], world=GapIgnored
    ),
    "a follower that went back is taken for a fenced run": Mutant(
        BOUNDS["a follower goes back, a crash"], world=WentBackIsFenced
    ),
    "a rollback of one follower deletes the rows of another": Mutant(
        BOUNDS["two followers, a rollback"], world=SharedTable
    ),
    "a follower is set aside without a decided epoch": Mutant(
        BOUNDS["an optional follower is set aside, a crash"], world=EarlyAside
    ),
    "a claim does not tell which sinks are set aside": Mutant(
        BOUNDS["a follower is set aside, a zombie"], world=SilentClaim
    ),
    "the outbox is swept by the fastest follower": Mutant(OPTIONAL, world=FastestMark),
    "entries are folded beyond the outbox mark": Mutant(replace(OPTIONAL, items=5), world=FoldsToFloor),
    "a receipt by the number of an epoch alone": Mutant(BOUNDS["a target of another pipeline"], world=ReceiptByNumber),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_catches_a_planted_bug(name: str) -> None:
    mutant = MUTANTS[name]
    core = mutated(mutant.old, mutant.new) if mutant.old else epoch
    world = mutant.world or Followers
    assert issubclass(world, Followers)
    result = search(mutant.scenario, world, core)
    print(f"{name}: {result}")
    assert result.broken, f"{name} was not caught in {result}"
    if mutant.scenario not in BOUNDS.values():
        sound = search(mutant.scenario, limit=2 * result.states)  # at least as deep as the bug lies
        assert not sound.broken, f"without the bug: {sound}"

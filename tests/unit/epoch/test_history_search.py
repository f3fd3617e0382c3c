"""Explores rollback, floor, acknowledgement, sweep, the remote tier and an upsert sink that lags, all at once.

A run commits epochs, a further sink applies their staged change rows in its own time, a copier brings snapshots to the
remote tier, the source forgets, a sweep deletes, and a rollback goes back: each looks first and acts later, and may
stand still in between for as long as others like. Planted bugs must all be found. `FIRNLINE_PROOF=1` searches both
bounds at once. With `-s` each search prints its number of states.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest


class Record(NamedTuple):
    """One commit of the deciding sink: an epoch, or a rollback to one. `snapshot` is the state that it names."""

    epoch: int
    back_to: int  # 0: an ordinary epoch
    position: int
    snapshot: int
    floor: int


class Look(NamedTuple):
    """What somebody saw of the deciding sink before acting on it."""

    version: int
    generation: int
    value: int = 0
    files: frozenset[int] = frozenset()


class World(NamedTuple):
    """Everything durable, and the looks that have not been acted on yet."""

    log: tuple[Record, ...] = ()
    generation: int = 1
    applied: int = 0  # records that the further sink has
    rows: tuple[int, ...] = ()  # epochs whose rows the further sink shows
    forgotten: int = 0  # items that the source no longer has
    local: frozenset[int] = frozenset()  # snapshots at home
    remote: frozenset[int] = frozenset()
    changes: frozenset[int] = frozenset()  # epochs whose rows are staged for the further sink
    staging: Look | None = None  # a run's epoch, staged and not committed
    copying: int = 0
    acknowledging: Look | None = None
    sweeping: Look | None = None
    going_back: Look | None = None
    claimed: int = 0  # by the rollback
    rollbacks: int = 1
    run: int = 1  # the generation of the run at work
    fenced: int = 0


class Step(NamedTuple):
    """One member of the true chain."""

    epoch: int
    position: int
    snapshot: int


@cache
def chain_of(log: tuple[Record, ...]) -> tuple[Step, ...]:
    """What counts: epochs that a rollback left behind do not."""
    found: list[Step] = []
    for record in log:
        if record.back_to:
            found = [step for step in found if step.epoch <= record.back_to]
        found.append(Step(record.epoch, record.position, record.snapshot))
    return tuple(found)


@cache
def rows_of(log: tuple[Record, ...]) -> tuple[int, ...]:
    rows: tuple[int, ...] = ()
    for record in log:
        rows = apply_record(rows, record)
    return rows


def apply_record(rows: tuple[int, ...], record: Record) -> tuple[int, ...]:
    if record.back_to:
        return tuple(epoch for epoch in rows if epoch <= record.back_to)
    return (*rows, record.epoch)


class Rules:
    """The protocol. A test breaks a single rule by overriding a method."""

    window = 1

    def __init__(self, epochs: int = 4) -> None:
        self.epochs = epochs

    def floor(self, world: World, epoch: int) -> int:
        """An epoch that the remote tier holds, no newer than the window and the further sink; it only grows."""
        before = world.log[-1].floor if world.log else 0
        return max(before, self.copied(world, min(epoch - self.window, self.held(world))))

    def held(self, world: World) -> int:
        """The newest epoch of the further sink."""
        return world.log[world.applied - 1].epoch if world.applied else 0

    def copied(self, world: World, limit: int) -> int:
        """The newest epoch of the true chain, up to a limit, whose snapshot is in the remote tier."""
        steps = [step for step in chain_of(world.log) if step.epoch <= limit]
        return max((step.epoch for step in steps if step.snapshot in world.remote), default=0)

    def next_epoch(self, world: World) -> int:
        return world.log[-1].epoch + 1 if world.log else 1

    def may_commit(self, world: World, look: Look) -> bool:
        """A commit is made onto the version that was looked at, by the holder of the newest generation."""
        return (len(world.log), world.generation) == (look.version, look.generation)

    def may_go_back(self, world: World, to: int) -> bool:
        """Under the version that a rollback commits onto: not below the floor."""
        return to >= world.log[-1].floor

    def may_forget(self, world: World) -> int:
        """Up to the lowest position among the checkpoints from the floor of the newest commit on."""
        floor = world.log[-1].floor
        return min((step.position for step in chain_of(world.log) if step.epoch >= floor), default=0) if floor else 0

    def doomed(self, world: World) -> frozenset[int]:
        """Snapshots and staged files of epochs below the floor that nothing from the floor on refers to."""
        floor = world.log[-1].floor
        named = {step.snapshot for step in chain_of(world.log) if step.epoch >= floor}
        return frozenset(e for e in world.local | world.remote | world.changes if e < floor and e not in named)

    def follows(self, rows: tuple[int, ...], record: Record) -> tuple[int, ...]:
        """What the further sink shows after a record: a rollback is an epoch for every sink."""
        return apply_record(rows, record)


class Model:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        yield from self.run(world)
        yield from self.others(world)
        if world.log:
            yield from self.acknowledge_and_sweep(world)
            yield from self.roll_back(world)

    def run(self, world: World) -> Iterator[tuple[str, World]]:
        epoch = self.rules.next_epoch(world)
        if world.staging is None and world.run == world.generation and epoch <= self.rules.epochs:
            begun = Look(len(world.log), world.generation, epoch)
            staged = world._replace(changes=world.changes | {epoch}, local=world.local | {epoch}, staging=begun)
            yield f"the run stages epoch {epoch}", staged
        look = world.staging
        if look is not None:
            if self.rules.may_commit(world, look):
                position = (world.log[-1].position if world.log else 0) + 1
                record = Record(look.value, 0, position, look.value, self.rules.floor(world, look.value))
                after = world._replace(log=(*world.log, record), staging=None)
                yield f"the run commits epoch {look.value}", after
            else:
                yield "the run is fenced", world._replace(staging=None)
        if world.run != world.generation and not world.claimed:
            yield "a new run claims", world._replace(run=world.generation + 1, generation=world.generation + 1)

    def others(self, world: World) -> Iterator[tuple[str, World]]:
        if world.applied < len(world.log):
            record = world.log[world.applied]
            rows = self.rules.follows(world.rows, record)
            yield f"the further sink applies {record.epoch}", world._replace(applied=world.applied + 1, rows=rows)
        wanted = world.log[-1].snapshot if world.log else 0
        if not world.copying and wanted and wanted not in world.remote and wanted in world.local:
            yield f"the copier takes snapshot {wanted}", world._replace(copying=wanted)
        if world.copying:
            there = world.remote | {world.copying} if world.copying in world.local else world.remote
            yield f"snapshot {world.copying} is copied", world._replace(copying=0, remote=there)

    def acknowledge_and_sweep(self, world: World) -> Iterator[tuple[str, World]]:
        if world.acknowledging is None and self.rules.may_forget(world) > world.forgotten:
            look = Look(len(world.log), world.generation, self.rules.may_forget(world))
            yield "what the source may forget is read", world._replace(acknowledging=look)
        if world.acknowledging is not None:
            forgotten = max(world.forgotten, world.acknowledging.value)
            yield "the source forgets", world._replace(acknowledging=None, forgotten=forgotten)
        if world.sweeping is None and self.rules.doomed(world):
            look = Look(len(world.log), world.generation, files=self.rules.doomed(world))
            yield "a sweep looks", world._replace(sweeping=look)
        if world.sweeping is not None:
            gone = world.sweeping.files
            yield (
                f"the sweep deletes {sorted(gone)}",
                world._replace(
                    sweeping=None,
                    local=world.local - gone,
                    remote=world.remote - gone,
                    changes=world.changes - gone,
                ),
            )

    def roll_back(self, world: World) -> Iterator[tuple[str, World]]:
        look = world.going_back
        if look is None:
            for step in chain_of(world.log)[:-1] if world.rollbacks else ():
                if self.rules.may_go_back(world, step.epoch):
                    found = Look(len(world.log), world.generation + 1, step.epoch)
                    claimed = world._replace(
                        going_back=found, rollbacks=world.rollbacks - 1, generation=world.generation + 1, claimed=1
                    )
                    yield f"a rollback to {step.epoch} claims", claimed
            return
        if world.generation != look.generation or not self.rules.may_go_back(world, look.value):
            yield "the rollback is refused", world._replace(going_back=None, claimed=0)
            return
        if not self.rules.may_commit(world, look):
            yield "the rollback looks again", world._replace(going_back=look._replace(version=len(world.log)))
            return
        target = next(step for step in chain_of(world.log) if step.epoch == look.value)
        epoch = self.rules.next_epoch(world)
        record = Record(epoch, target.epoch, target.position, target.snapshot, world.log[-1].floor)
        yield (
            f"the rollback commits as {epoch}",
            world._replace(log=(*world.log, record), going_back=None, claimed=0),
        )


def judge(world: World) -> str:
    if not world.log:
        return ""
    chain, newest = chain_of(world.log), world.log[-1]
    there = world.local | world.remote
    if world.forgotten > newest.position:
        return "the source forgot what is to be read again"
    at_remote = max((step.position for step in chain if step.snapshot in world.remote), default=0)
    if world.forgotten > at_remote:
        return "after the loss of the host the source lacks what the remote tier lacks"
    if any(step.snapshot not in there for step in chain if step.epoch >= max(1, newest.floor)):
        return "state that one may go back to is gone"
    if any(not r.back_to and r.epoch not in world.changes for r in world.log[world.applied :]):
        return "rows that a further sink still needs are gone"
    if world.applied == len(world.log) and world.rows != rows_of(world.log):
        return "two sinks that hold the same epoch show different rows"
    if len({record.epoch for record in world.log}) != len(world.log):
        return "an epoch number was used twice"
    return ""


def search(rules: Rules, rollbacks: int = 1) -> tuple[int, str]:
    """Visit every state; returns how many there are, and the first broken promise with the way there."""
    model, first = Model(rules), World(rollbacks=rollbacks)
    seen = {hash(first)}
    parents: list[tuple[int, str]] = [(0, "")]
    queue = deque([(0, first)])
    while queue:
        number, world = queue.popleft()
        broken = judge(world)
        if broken:
            lines: list[str] = []
            while number:
                number, name = parents[number]
                lines.append(name)
            return len(parents), f"{broken}: {' -> '.join(reversed(lines))}"
        for name, after in model.moves(world):
            key = hash(after)
            if key not in seen:
                seen.add(key)
                queue.append((len(parents), after))
                parents.append((number, name))
    return len(parents), ""


@pytest.mark.parametrize(("epochs", "rollbacks"), [(4, 2)] if os.environ.get("FIRNLINE_PROOF") else [(4, 1), (3, 2)])
def test_nothing_is_forgotten_or_swept_that_somebody_needs(epochs: int, rollbacks: int) -> None:
    states, broken = search(Rules(epochs), rollbacks=rollbacks)
    assert not broken
    print(f"{states:,} states")


class AcknowledgesTheNewest(Rules):
    """A rollback checks that the source has the input; the run acknowledges; the rollback commits."""

    def may_forget(self, world: World) -> int:
        return world.log[-1].position


class GoesBelowTheFloor(Rules):
    def may_go_back(self, world: World, to: int) -> bool:
        return True


class RewindsOneSink(Rules):
    """The further sink keeps the rows that were undone, and gets them again."""

    def follows(self, rows: tuple[int, ...], record: Record) -> tuple[int, ...]:
        return rows if record.back_to else apply_record(rows, record)


class SweepsWhatTheTipDoesNotName(Rules):
    """A sweep reads the sinks, a commit lands, the sweep deletes what it names: it must sweep below the floor."""

    def doomed(self, world: World) -> frozenset[int]:
        tip = world.log[-1].snapshot
        return frozenset(e for e in world.local | world.remote | world.changes if e != tip)


class SweepsWhatIsReferredTo(Rules):
    """A rollback names the state of an epoch whose number lies below the floor."""

    def doomed(self, world: World) -> frozenset[int]:
        return frozenset(e for e in world.local | world.remote | world.changes if e < world.log[-1].floor)


class FloorPassesALaggingSink(Rules):
    def held(self, world: World) -> int:
        return self.epochs


class FloorPassesTheRemoteTier(Rules):
    def copied(self, world: World, limit: int) -> int:
        return limit


class FloorLiesBetweenTwoCopies(Rules):
    """One may go back to an epoch whose state only the host has, and the source forgot what came before it."""

    def copied(self, world: World, limit: int) -> int:
        return min(limit, super().copied(world, self.epochs))


class CountsWhatIsBeingCopied(Rules):
    """Remote state counts as held before it is copied."""

    def copied(self, world: World, limit: int) -> int:
        return super().copied(world._replace(remote=world.remote | {world.copying}), limit)


class CommitsOntoAnyVersion(Rules):
    def may_commit(self, world: World, look: Look) -> bool:
        return True


class UsesNumbersAgain(Rules):
    def next_epoch(self, world: World) -> int:
        return chain_of(world.log)[-1].epoch + 1 if world.log and not world.log[-1].back_to else self._after(world)

    def _after(self, world: World) -> int:
        return world.log[-1].back_to + 1 if world.log else 1


@pytest.mark.parametrize(
    "broken",
    [
        AcknowledgesTheNewest,
        GoesBelowTheFloor,
        RewindsOneSink,
        SweepsWhatTheTipDoesNotName,
        SweepsWhatIsReferredTo,
        FloorPassesALaggingSink,
        FloorPassesTheRemoteTier,
        FloorLiesBetweenTwoCopies,
        CountsWhatIsBeingCopied,
        CommitsOntoAnyVersion,
        UsesNumbersAgain,
    ],
)
def test_planted_bugs_are_found(broken: type[Rules]) -> None:
    states, found = search(broken())
    assert found, states

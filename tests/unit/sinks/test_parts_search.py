"""Explores the decisions of a sink with parts: kills, zombies, a table that goes back, a rollback, in every order.

From every state that can be reached, a new run must finish alone: each table then holds each decided row once, and what
older runs do after that changes nothing. Planted bugs must all be found. With `-s` each search prints its states.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from firnline.sinks.delta.parts import state as real
from firnline.sinks.delta.parts.state import Held, Part
from tests.support.proof import covered

NAMES = ("a", "b")
PROOF = bool(os.environ.get("FIRNLINE_PROOF"))


class Entry(NamedTuple):
    """A decided entry: an epoch with the parts that it touches, or a rollback to an epoch."""

    epoch: int
    touches: tuple[str, ...] = ()
    to: int = -1
    left: bool = False  # a rollback that leaves the rows as they are

    @property
    def held(self) -> Held:
        return Held(self.epoch, self.epoch * 10)


class Version(NamedTuple):
    """A version of a table: the entry that it holds, and its rows, each by its epoch."""

    held: Held
    rows: tuple[int, ...]


class Table(NamedTuple):
    versions: tuple[Version, ...] = ()
    generation: int = 0

    @property
    def held(self) -> Held:
        return self.versions[-1].held if self.versions else Held()

    @property
    def rows(self) -> tuple[int, ...]:
        return self.versions[-1].rows if self.versions else ()


class Head(NamedTuple):
    generation: int = 0
    epoch: int = 0
    parts: tuple[tuple[str, Part], ...] = ()


class Run(NamedTuple):
    """A run: what it does, and what it knew when it began with that."""

    generation: int
    does: str = "join"  # join, next, write, close
    head: Head = Head()
    entry: Entry | None = None
    todo: tuple[str, ...] = ()


class World(NamedTuple):
    chain: tuple[Entry, ...] = ()  # the true one
    head: Head = Head()
    tables: tuple[Table, ...] = tuple(Table() for _ in NAMES)
    runs: tuple[Run, ...] = ()
    generation: int = 0
    decided: int = 0  # the newest epoch
    planned: int = 0  # epochs of the script that were decided
    kills: int = 0
    zombies: int = 0
    losses: int = 0
    rollbacks: int = 0


@dataclass(frozen=True)
class Budget:
    kills: int = 0
    zombies: int = 0
    losses: int = 0
    rollbacks: int = 0
    left: bool = False
    script: tuple[tuple[str, ...], ...] = (("a",), ("a", "b"), ("b",))


class BrokenError(Exception):
    """A rule is broken."""


class Model:
    """The moves of the world. A planted bug overrides one rule."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    # -- rules ----------------------------------------------------------------------------------------

    def open_parts(self, parts: Mapping[str, Part], entry: Entry) -> Mapping[str, Part]:
        return real.open_parts(parts, entry.touches, entry.epoch)

    def close_parts(self, parts: Mapping[str, Part], names: tuple[str, ...], entry: Entry) -> Mapping[str, Part]:
        return real.close_parts(parts, names, entry.held)

    def judge(self, part: Part, found: Held, entry: Held) -> str:
        return real.judge(part, found, entry)

    def find_lost(self, head: Head, found: Mapping[str, Held]) -> dict[str, Held]:
        return real.find_lost(dict(head.parts), found)

    def go_back_to(self, head: Head, lost: Mapping[str, Held]) -> tuple[int, Mapping[str, Part]]:
        return real.go_back_to(head.epoch, dict(head.parts), lost)

    def edited(self, head: Head, entry: Entry) -> tuple[str, ...]:
        """The parts that a rollback touches."""
        parts = dict(head.parts)
        holds = max(head.epoch, real.newest_epoch(parts))
        if entry.left or holds <= entry.to:
            return tuple(name for name, part in parts.items() if part.open)
        return tuple(name for name, part in parts.items() if part.newest > entry.to)

    # -- moves ----------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[World]:
        budget = self.budget
        lag = world.decided - world.head.epoch
        if world.planned < len(budget.script) and lag < 2 and world.generation:
            entry = Entry(world.decided + 1, budget.script[world.planned])
            yield world._replace(chain=(*world.chain, entry), decided=entry.epoch, planned=world.planned + 1)
        if not world.runs or (world.zombies < budget.zombies and len(world.runs) == 1):
            zombies = world.zombies + bool(world.runs)
            yield self._start(world)._replace(zombies=zombies)
        if world.losses < budget.losses:
            for at, table in enumerate(world.tables):
                for kept in range(len(table.versions)):
                    yield self._with_table(world, at, table._replace(versions=table.versions[:kept]))._replace(
                        losses=world.losses + 1
                    )
        if world.rollbacks < budget.rollbacks and len(world.chain) > 1:
            yield from (self._decide_rollback(world, entry.epoch) for entry in world.chain[:-1])
        for at, run in enumerate(world.runs):
            if world.kills < budget.kills:
                yield self._without(world, at)._replace(kills=world.kills + 1)
            yield from self.step(world, at, run)

    def _start(self, world: World) -> World:
        generation = world.generation + 1
        return world._replace(generation=generation, runs=(*world.runs, Run(generation)))

    def _decide_rollback(self, world: World, to: int) -> World:
        """Somebody claims the pipeline and decides a rollback; a run carries it out in the sink."""
        entry = Entry(world.decided + 1, to=to, left=self.budget.left)
        kept = tuple(one for one in world.chain if one.epoch <= to)
        return world._replace(
            chain=(*kept, entry),
            decided=entry.epoch,
            generation=world.generation + 1,
            rollbacks=world.rollbacks + 1,
        )

    @staticmethod
    def _with_table(world: World, at: int, table: Table) -> World:
        return world._replace(tables=(*world.tables[:at], table, *world.tables[at + 1 :]))

    @staticmethod
    def _without(world: World, at: int) -> World:
        return world._replace(runs=(*world.runs[:at], *world.runs[at + 1 :]))

    @staticmethod
    def _with_run(world: World, at: int, run: Run) -> World:
        return world._replace(runs=(*world.runs[:at], run, *world.runs[at + 1 :]))

    def step(self, world: World, at: int, run: Run) -> Iterator[World]:
        """What a run can do next; a run that is fenced ends."""
        if run.does == "join":
            yield self._join(world, at, run)
        elif run.does == "next":
            found = self._begin(world, at, run)
            if found is not None:
                yield found
        elif run.does == "write" and run.todo:
            for name in run.todo:
                yield self._write(world, at, run, name)
        else:
            yield self._close(world, at, run)

    def _join(self, world: World, at: int, run: Run) -> World:
        """Claim the sink; it goes on as low as the part that lost most."""
        if world.head.generation > run.generation or world.generation > run.generation:
            return self._without(world, at)
        parts = dict(world.head.parts)
        found = {name: world.tables[NAMES.index(name)].held for name in parts}
        lost, epoch = self.find_lost(world.head, found), world.head.epoch
        if lost and not world.losses:
            raise BrokenError("a sink whose tables lost nothing went back")
        if lost:
            lowest, lowered = self.go_back_to(world.head, lost)
            parts = dict(lowered)
            epoch = max((entry.epoch for entry in world.chain if entry.epoch <= lowest), default=0)
        head = Head(run.generation, epoch, tuple(sorted(parts.items())))
        return self._with_run(world._replace(head=head), at, Run(run.generation, "next", head))

    def _begin(self, world: World, at: int, run: Run) -> World | None:
        """Take the next entry that the sink lacks; names its parts as open."""
        if world.head.generation != run.generation:
            return self._without(world, at)
        entry = next((one for one in world.chain if one.epoch > world.head.epoch), None)
        if entry is None:
            return None
        head = world.head
        if entry.to >= 0:
            return self._with_run(world, at, Run(run.generation, "write", head, entry, self.edited(head, entry)))
        head = head._replace(parts=tuple(sorted(self.open_parts(dict(head.parts), entry).items())))
        return self._with_run(world._replace(head=head), at, Run(run.generation, "write", head, entry, entry.touches))

    def _write(self, world: World, at: int, run: Run, name: str) -> World:
        """Commit to one part, conditionally on what its table holds."""
        assert run.entry is not None
        place = NAMES.index(name)
        table, part = world.tables[place], dict(run.head.parts).get(name, Part(run.entry.epoch))
        todo = tuple(other for other in run.todo if other != name)
        verdict = self.judge(part, table.held, run.entry.held)
        written = self._with_run(world, at, run._replace(todo=todo))
        if verdict == "has":
            return written
        if table.generation > run.generation:
            return self._without(world, at)
        if run.entry.to >= 0:
            if table.held.epoch < part.held.epoch:
                return self._with_run(world, at, Run(run.generation))
            rows = self._rows_at(table, run.entry)
        elif verdict == "write":
            rows = (*table.rows, run.entry.epoch)
        elif verdict == "went back":
            return self._with_run(world, at, Run(run.generation))
        else:
            raise BrokenError(f"{name} holds {table.held}, which nobody decided for it")
        version = Version(run.entry.held, rows)
        return self._with_table(written, place, Table((*table.versions, version), run.generation))

    @staticmethod
    def _rows_at(table: Table, entry: Entry) -> tuple[int, ...]:
        if entry.left or table.held.epoch <= entry.to:
            return table.rows
        return next((one.rows for one in reversed(table.versions) if one.held.epoch <= entry.to), ())

    def _close(self, world: World, at: int, run: Run) -> World:
        """Say in the head that the sink holds the entry."""
        assert run.entry is not None
        if world.head != run.head:
            return self._without(world, at)
        names = run.entry.touches if run.entry.to < 0 else self.edited(run.head, run.entry)
        parts = self.close_parts(dict(run.head.parts), names, run.entry)
        head = Head(run.generation, run.entry.epoch, tuple(sorted(parts.items())))
        return self._with_run(world._replace(head=head), at, Run(run.generation, "next", head))

    # -- judgement ------------------------------------------------------------------------------------

    def judge_state(self, world: World) -> None:
        """Raise BrokenError if a table holds a row twice, or if a new run cannot finish alone."""
        for name, table in zip(NAMES, world.tables, strict=True):
            if len(set(table.rows)) != len(table.rows):
                raise BrokenError(f"{name} holds rows twice: {table.rows}")
        alone = self._start(world)
        newest, steps = len(alone.runs) - 1, 0
        while alone.runs and len(alone.runs) > newest:
            steps += 1
            if steps > 100:
                raise BrokenError("a new run never ends")
            found = next(self.step(alone, newest, alone.runs[newest]), None)
            if found is None:
                break
            alone = found
        if len(alone.runs) <= newest:
            raise BrokenError("the newest run was fenced")
        self._judge_end(alone)
        for at in range(newest):  # older runs do what they still can
            woken = alone
            while len(woken.runs) == len(alone.runs):
                found = next(self.step(woken, at, woken.runs[at]), None)
                if found is None:
                    raise BrokenError("a run that was replaced goes on")
                woken = found
            self._judge_end(woken)

    def _judge_end(self, world: World) -> None:
        if self.budget.left:
            return  # rows stay and come again: that they are not doubled within an epoch was judged
        for name, table in zip(NAMES, world.tables, strict=True):
            wanted = tuple(entry.epoch for entry in world.chain if name in entry.touches)
            if table.rows != wanted:
                raise BrokenError(f"{name} holds {table.rows}, and {wanted} was decided")


def search(model: Model, limit: int = 400_000) -> int:
    """Visit every state, nearest first; returns their number."""
    first = World()
    seen, waiting = {first}, [first]
    while waiting:
        later: list[World] = []
        for world in waiting:
            for found in model.moves(world):
                if found not in seen:
                    model.judge_state(found)
                    seen.add(found)
                    later.append(found)
        waiting = later
        if len(seen) > limit:
            assert PROOF, f"more than {limit} states"
            break
    return len(seen)


SHORT = (("a",), ("a", "b"))
BOUNDS = {
    "three kills": Budget(kills=3),
    "a zombie and two kills": Budget(zombies=1, kills=2),
    "a table goes back, two kills": Budget(losses=1, kills=2),
    "a table goes back, a zombie and a kill": Budget(losses=1, zombies=1, kills=1, script=SHORT),
    "a rollback, a zombie": Budget(rollbacks=1, zombies=1),
    "a rollback, two kills": Budget(rollbacks=1, kills=2),
    "a rollback that leaves the rows, a zombie": Budget(rollbacks=1, zombies=1, left=True),
    "a table goes back, a rollback, a kill": Budget(losses=1, rollbacks=1, kills=1, script=SHORT),
    "a table goes back, a rollback, a zombie": Budget(losses=1, rollbacks=1, zombies=1, script=SHORT),
}
if PROOF:
    BOUNDS |= {
        "two tables go back, two kills": Budget(losses=2, kills=2),
        "two tables go back, a zombie": Budget(losses=2, zombies=1),
        "two zombies, a table goes back": Budget(losses=1, zombies=2),
        "a table goes back, a rollback, a zombie and a kill": Budget(losses=1, rollbacks=1, zombies=1, kills=1),
        "two rollbacks, a zombie and a kill": Budget(rollbacks=2, zombies=1, kills=1),
        "two tables go back, a rollback, a kill": Budget(losses=2, rollbacks=1, kills=1),
    }


@pytest.mark.parametrize("name", BOUNDS)
def test_every_row_is_held_once_by_its_own_part(name: str) -> None:
    states = search(Model(BOUNDS[name]))
    covered["states"] += states
    print(f"{name}: {states} states")


# -- planted bugs -----------------------------------------------------------------------------------------


class UntouchedLags(Model):
    """An untouched part is taken for a lagging sink."""

    def find_lost(self, head: Head, found: Mapping[str, Held]) -> dict[str, Held]:
        return {name: held for name, held in found.items() if held.epoch < head.epoch}


class NoIntent(Model):
    """The head does not name the parts of an epoch before they are written."""

    def open_parts(self, parts: Mapping[str, Part], entry: Entry) -> Mapping[str, Part]:
        return {**{name: Part(entry.epoch) for name in entry.touches}, **parts}

    def close_parts(self, parts: Mapping[str, Part], names: tuple[str, ...], entry: Entry) -> Mapping[str, Part]:
        return real.close_parts(parts, names, entry.held)


class AnyVersion(Model):
    """The fence of a part asks only for an older epoch."""

    def judge(self, part: Part, found: Held, entry: Held) -> str:
        return "has" if found.epoch >= entry.epoch else "write"


class EntryBefore(Model):
    """The fence of a part asks for the entry before, as that of any other sink does."""

    def judge(self, part: Part, found: Held, entry: Held) -> str:
        if found.epoch >= entry.epoch:
            return "has"
        return "write" if found.epoch == entry.epoch - 1 else "other"


class AlwaysWrites(Model):
    """A part does not say itself whether it holds an epoch."""

    def judge(self, part: Part, found: Held, entry: Held) -> str:
        return "write"


class OpenIsIgnored(Model):
    """A rollback touches only the parts that are known to hold later rows."""

    def edited(self, head: Head, entry: Entry) -> tuple[str, ...]:
        return tuple(name for name, part in head.parts if part.held.epoch > entry.to and not entry.left)


class GoesBackTooLittle(Model):
    """Of two tables that lost rows, one after the other, the sink follows the last one."""

    def go_back_to(self, head: Head, lost: Mapping[str, Held]) -> tuple[int, Mapping[str, Part]]:
        return real.go_back_to(sys.maxsize, dict(head.parts), lost)


class ForgetsWhatIsOpen(Model):
    """A part that went back is no longer known to be open."""

    def go_back_to(self, head: Head, lost: Mapping[str, Held]) -> tuple[int, Mapping[str, Part]]:
        epoch, lowered = real.go_back_to(head.epoch, dict(head.parts), lost)
        return epoch, {name: replace(part, open=0) for name, part in lowered.items()}


class LostIsClosed(Model):
    """What a part lost is not written to it again by an older run, so the head says."""

    def go_back_to(self, head: Head, lost: Mapping[str, Held]) -> tuple[int, Mapping[str, Part]]:
        parts = dict(head.parts)
        epoch, _ = real.go_back_to(head.epoch, parts, lost)
        return epoch, {**parts, **{name: replace(parts[name], held=held) for name, held in lost.items()}}


class ClosesAll(Model):
    """The head says of every part that the newest entry touched it."""

    def close_parts(self, parts: Mapping[str, Part], names: tuple[str, ...], entry: Entry) -> Mapping[str, Part]:
        return real.close_parts(parts, tuple(parts), entry.held)


MUTANTS: dict[type[Model], Budget] = {
    UntouchedLags: Budget(kills=1),
    NoIntent: Budget(rollbacks=1, kills=1),
    AnyVersion: Budget(losses=1),
    EntryBefore: Budget(),
    AlwaysWrites: Budget(kills=1),
    OpenIsIgnored: Budget(rollbacks=1, kills=1),
    GoesBackTooLittle: Budget(losses=2, kills=1),
    ForgetsWhatIsOpen: Budget(losses=1, rollbacks=1, zombies=1, script=SHORT),
    LostIsClosed: Budget(losses=1, rollbacks=1, zombies=1, kills=1),
    ClosesAll: Budget(kills=1),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_found(mutant: type[Model]) -> None:
    with pytest.raises(BrokenError) as caught:
        search(mutant(MUTANTS[mutant]))
    print(f"{mutant.__name__}: {caught.value}")

"""Explores every interleaving of sweeps with commits that name files again: rollback, restore, compaction, savepoint.

The model follows `sinks/delta/sweeps.py` step by step; each step is one read or one write. Every actor may stand still
before any step for as long as others like, wake up and act; the budget lets actors die, too. Planted bugs must all be
found. With `-s` each search prints its number of states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import pytest

from tests.support.explore import cannot_reach
from tests.support.proof import covered
from tests.support.world import Table

A, B, C = 1, 2, 4  # files: A was removed long ago, B is part of the table, C is written by a compaction
OLD_VERSION = A | B  # what a rollback brings back
DONE, REFUSED, DEAD = "done", "refused", "dead"
ENDED = (DONE, REFUSED, DEAD)


class Intent(NamedTuple):
    """What a sweep has written down: its number, whose it is, and the files that it is going to delete."""

    number: int
    owner: int
    files: int


class Actor(NamedTuple):
    """One process: what it does next, and what it remembers."""

    kind: str
    step: str = "start"
    version: int = -1  # of the log, as it was last read
    number: int = 0  # of the newest intent in that log
    owner: int = -1  # whose that is
    live: int = 0  # the files of that version
    files: int = 0  # what this actor is about: to be deleted, brought back or pinned
    left: int = 0  # of a run: its commits


class World(NamedTuple):
    """The log (version, the files that it names, the newest intent), the files, and everybody at work."""

    actors: tuple[Actor, ...]
    present: int = A | B
    version: int = 0
    live: int = B
    number: int = 0
    owner: int = -1
    intents: tuple[Intent, ...] = ()  # that are not ended
    deleters: tuple[tuple[int, int], ...] = ()  # who may delete which files, at any moment
    pins: int = 0
    saved: int = 0  # files of savepoints that are complete
    deaths: int = 0  # that may still come


class Rules:
    """The protocol. A test breaks a single rule by overriding a method."""

    def may_bind(self, world: World, actor: Actor) -> bool:
        """A sweep declares its intent onto exactly the version that it looked at."""
        return world.version == actor.version

    def may_name(self, world: World, actor: Actor) -> bool:
        """A commit that names files again is made onto exactly the version that it looked at."""
        return world.version == actor.version

    def finds_open(self, world: World, number: int, owner: int) -> int:
        """The files of the newest intent in the log, while it is open."""
        return next((i.files for i in world.intents if (i.number, i.owner) == (number, owner)), 0)

    def shuns(self, world: World, actor: Actor) -> bool:
        """Whether the open intent covers a file that this actor needs."""
        return bool(self.finds_open(world, actor.number, actor.owner) & actor.files)

    def pin_shuns(self, world: World, actor: Actor) -> bool:
        """A savepoint looks at every intent that may yet count: its pin may have come too late for that sweep."""
        return any(
            i.files & actor.files and (i.number > world.number or (i.number, i.owner) == (world.number, world.owner))
            for i in world.intents
        )

    def may_make_again(self, world: World, actor: Actor) -> bool:
        """A name is used again only if nobody who set out to delete it may still wake up and do so."""
        return not any(files & actor.files for _, files in world.deleters)

    looks_at_pins_again = True
    finishes_others = True
    signs = True  # whoever deletes says so first
    looks_after_signing = True
    deletes_after_binding = True
    ends_after_deleting = True
    checks_presence_last = True


def start(*kinds: str, deaths: int = 1, commits: int = 1) -> World:
    return World(tuple(Actor(kind, left=commits if kind == "run" else 0) for kind in kinds), deaths=deaths)


class Model:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def put(self, world: World, index: int, actor: Actor, step: str, **changes: Any) -> World:
        actors = list(world.actors)
        actors[index] = actor._replace(step=step, **changes)
        return world._replace(actors=tuple(actors))

    def read(self, world: World, index: int, actor: Actor, step: str, **changes: int) -> World:
        """Read the log: version, files and newest intent together, as a snapshot of a table has them."""
        return self.put(
            world,
            index,
            actor,
            step,
            version=world.version,
            number=world.number,
            owner=world.owner,
            live=world.live,
            **changes,
        )

    # -- a sweep --------------------------------------------------------------------------------------

    def sweep(self, world: World, index: int, actor: Actor) -> World:
        match actor.step:
            case "start":
                return self.read(world, index, actor, "look")
            case "look":
                opened = self.rules.finds_open(world, actor.number, actor.owner)
                if opened and self.rules.finishes_others:
                    return self.put(world, index, actor, "join", files=opened)
                files = world.present & ~actor.live & ~world.pins
                return self.put(world, index, actor, "sign" if files else DONE, files=files)
            case "join":
                step = "look for it again" if self.rules.looks_after_signing else "finish"
                return self.put(self.signed(world, index, actor.files), index, actor, step)
            case "look for it again":
                is_open = self.rules.finds_open(world, actor.number, actor.owner)
                return self.put(world, index, actor, "finish" if is_open else "leave and look")
            case "finish":
                return self.delete_one(world, index, actor, "finished")
            case "finished":
                kept = tuple(i for i in world.intents if (i.number, i.owner) != (actor.number, actor.owner))
                return self.put(world._replace(intents=kept), index, actor, "leave and look")
            case "leave and look":
                return self.put(self.signed(world, index, 0), index, actor, "start")
            case "sign":
                return self.put(self.signed(world, index, actor.files), index, actor, "declare")
            case "declare":
                mine = Intent(actor.number + 1, index, actor.files)
                after = world._replace(intents=tuple(sorted((*world.intents, mine))))
                return self.put(after, index, actor, "look again")
            case "look again":
                if self.rules.looks_at_pins_again and actor.files & world.pins:
                    return self.put(self.withdrawn(world, index), index, actor, "leave and look")
                return self.put(world, index, actor, "bind" if self.rules.deletes_after_binding else "delete")
            case "bind":
                if not self.rules.may_bind(world, actor):
                    return self.put(self.withdrawn(world, index), index, actor, "leave and look")
                after = world._replace(version=world.version + 1, number=actor.number + 1, owner=index)
                return self.put(after, index, actor, "delete" if self.rules.ends_after_deleting else "end")
            case "delete":
                return self.delete_one(world, index, actor, "end" if self.rules.ends_after_deleting else "leave")
            case "end":
                step = "leave" if self.rules.ends_after_deleting else "delete"
                return self.put(self.withdrawn(world, index), index, actor, step)
            case _:  # leave
                return self.put(self.signed(world, index, 0), index, actor, DONE)

    def withdrawn(self, world: World, index: int) -> World:
        return world._replace(intents=tuple(i for i in world.intents if i.owner != index))

    def signed(self, world: World, index: int, files: int) -> World:
        others = [one for one in world.deleters if one[0] != index]
        mine = [(index, files)] if files and self.rules.signs else []
        return world._replace(deleters=tuple(sorted(others + mine)))

    def delete_one(self, world: World, index: int, actor: Actor, then: str) -> World:
        lowest = actor.files & -actor.files
        left = actor.files ^ lowest
        after = world._replace(present=world.present & ~lowest)
        return self.put(after, index, actor, actor.step if left else then, files=left)

    # -- those that name files again ------------------------------------------------------------------

    def rollback(self, world: World, index: int, actor: Actor) -> World:
        """Brings back an old version; a restore into the same table does the same."""
        return self.name(world, index, actor, OLD_VERSION)

    def compaction(self, world: World, index: int, actor: Actor) -> World:
        """Writes a file of its own and names it; whoever takes its pin for abandoned sees the file as an orphan."""
        if actor.step == "start":
            return self.put(world._replace(present=world.present | C), index, actor, "written")
        first = actor._replace(step="start") if actor.step == "written" else actor
        return self.name(world, index, first, C)

    def name(self, world: World, index: int, actor: Actor, wanted: int) -> World:
        match actor.step:
            case "start" if not self.rules.checks_presence_last:
                there = wanted & ~world.live & ~world.present == 0
                return self.put(world, index, actor, "read" if there else REFUSED)
            case "start" | "read":
                return self.read(world, index, actor, "look", files=wanted & ~world.live)
            case "look":
                return self.put(world, index, actor, REFUSED if self.rules.shuns(world, actor) else "check")
            case "check":
                there = actor.files & ~world.present == 0 or not self.rules.checks_presence_last
                return self.put(world, index, actor, "commit" if there else REFUSED)
            case _:  # commit
                if not self.rules.may_name(world, actor):
                    return self.put(world, index, actor, "start" if wanted != C else "written")
                after = world._replace(version=world.version + 1, live=world.live | wanted)
                return self.put(after, index, actor, DONE)

    def restore(self, world: World, index: int, actor: Actor) -> World:
        """Brings A back as a savepoint has it: state and ledger entries come under the name that they had."""
        match actor.step:
            case "start":
                return self.read(world, index, actor, "look", files=A & ~world.live)
            case "look":
                return self.put(world, index, actor, REFUSED if self.rules.shuns(world, actor) else "check")
            case "check":
                if not self.rules.may_make_again(world, actor):
                    return self.put(world, index, actor, REFUSED)
                return self.put(world, index, actor, "make")
            case "make":
                return self.put(world._replace(present=world.present | actor.files), index, actor, "commit")
            case _:  # commit
                if not self.rules.may_name(world, actor):
                    return self.put(world, index, actor, "start")
                after = world._replace(version=world.version + 1, live=world.live | A)
                return self.put(after, index, actor, DONE)

    def savepoint(self, world: World, index: int, actor: Actor) -> World:
        """Pins the files of the table as it is."""
        match actor.step:
            case "start":
                return self.read(world, index, actor, "pin", files=world.live)
            case "pin":
                return self.put(world._replace(pins=world.pins | actor.files), index, actor, "look")
            case "look":
                return self.put(world, index, actor, "unpin" if self.rules.pin_shuns(world, actor) else "check")
            case "check":
                there = actor.files & ~world.present == 0
                return self.put(world, index, actor, "complete" if there else "unpin")
            case "unpin":
                return self.put(world._replace(pins=0), index, actor, REFUSED)
            case _:  # complete
                return self.put(world._replace(saved=world.saved | actor.files), index, actor, DONE)

    def run(self, world: World, index: int, actor: Actor) -> World:
        """Commits epochs: the first takes B out of the table, as an upsert does; its own files matter to nobody."""
        after = world._replace(version=world.version + 1, live=world.live & ~B)
        return self.put(after, index, actor, "start" if actor.left > 1 else DONE, left=actor.left - 1)


def judge(world: World) -> str:
    if world.live & ~world.present:
        return "the table names a file that is gone"
    if world.saved & ~world.present:
        return "a savepoint names a file that is gone"
    return ""


class Steps:
    """Every step of every process, worked out once.

    What a process does depends on itself and on what all of them share, not on the others: so a state of the search is
    a number for what is shared and one for each process, and most moves are looked up.
    """

    def __init__(self, first: World, rules: Rules) -> None:
        self.shared: Table[tuple[Any, ...]] = Table()  # a world without its actors
        self.actors: Table[Actor] = Table()
        self._model = Model(rules)
        self._broken: dict[int, str] = {}
        self._moves: dict[tuple[int, int, int], list[tuple[str, int, int]]] = {}
        self._first = first

    def start(self) -> tuple[int, ...]:
        return (self.shared.number(self._first[1:]), *map(self.actors.number, self._first.actors))

    def broken(self, state: tuple[int, ...]) -> str:
        """The promise that a state breaks: it is about what is shared."""
        verdict = self._broken.get(state[0])
        if verdict is None:
            verdict = self._broken[state[0]] = judge(World((), *self.shared[state[0]]))
        return verdict

    def moves(self, state: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        shared, known = state[0], self._moves
        for place in range(1, len(state)):
            key = (shared, place, state[place])
            found = known.get(key)
            if found is None:
                found = known[key] = list(self._take(*key))
            before, behind = state[1:place], state[place + 1 :]
            for name, shared_after, actor_after in found:
                yield name, (shared_after, *before, actor_after, *behind)

    def _take(self, shared: int, place: int, number: int) -> Iterator[tuple[str, int, int]]:
        """The steps of one process, or its death."""
        actor, index = self.actors[number], place - 1
        if actor.step in ENDED:
            return
        world = World((actor,) * len(self._first.actors), *self.shared[shared])
        afters = [(f"{actor.kind} {index}: {actor.step}", getattr(self._model, actor.kind)(world, index, actor))]
        if world.deaths:
            after = world._replace(deaths=world.deaths - 1)
            afters.append((f"{actor.kind} {index} dies", self._model.put(after, index, actor, DEAD)))
        for name, after in afters:
            yield name, self.shared.number(after[1:]), self.actors.number(after.actors[index])


def search(first: World, rules: Rules | None = None) -> tuple[int, str]:
    """Visit every state; returns how many there are, and the first broken promise with the way there."""
    steps = Steps(first, rules or Rules())
    numbers = {steps.start(): 0}
    parents: list[tuple[int, str]] = [(0, "")]
    sources: list[list[int]] = [[]]
    ends: list[int] = []
    queue = deque(numbers)
    for number in count():
        if not queue:
            break
        state = queue.popleft()
        broken = steps.broken(state)
        if broken:
            return len(parents), f"{broken}: {trace(parents, number)}"
        is_end = True
        for name, after in steps.moves(state):
            is_end = False
            to = numbers.get(after)
            if to is None:
                to = numbers[after] = len(parents)
                parents.append((number, name))
                sources.append([])
                queue.append(after)
            sources[to].append(number)
        if is_end:
            ends.append(number)
    stuck = cannot_reach(ends, sources)
    return len(parents), "" if stuck is None else f"nobody can end any more: {trace(parents, stuck)}"


def trace(parents: list[tuple[int, str]], number: int) -> str:
    lines: list[str] = []
    while number:
        number, name = parents[number]
        lines.append(name)
    return " -> ".join(reversed(lines))


SCENARIOS = {
    "rollback": start("sweep", "sweep", "rollback", "run", deaths=2, commits=2),
    "two rollbacks": start("sweep", "sweep", "rollback", "rollback"),
    "compaction": start("sweep", "sweep", "compaction", "rollback"),
    "restore": start("sweep", "sweep", "restore", "run"),
    "restore and three sweeps": start("sweep", "sweep", "sweep", "restore", deaths=0),
    "savepoint": start("sweep", "sweep", "savepoint", "run"),
    "savepoint and rollback": start("sweep", "savepoint", "rollback", "run", commits=2),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_takes_a_file_away_that_something_names(name: str) -> None:
    states, broken = search(SCENARIOS[name])
    assert not broken
    print(f"{name}: {states:,} states")
    covered["states"] += states


class DeletesWithoutAnIntent(Rules):
    """Check, then act: what a sweep found out is old by the time it deletes."""

    deletes_after_binding = False


class BindsOntoAnyVersion(Rules):
    def may_bind(self, world: World, actor: Actor) -> bool:
        return True


class NamesOntoAnyVersion(Rules):
    def may_name(self, world: World, actor: Actor) -> bool:
        return True


class PassesOverIntents(Rules):
    def shuns(self, world: World, actor: Actor) -> bool:
        return False


class TakesPresenceForGranted(Rules):
    """Looks whether files are there before it reads the log, not under the version that it commits onto."""

    checks_presence_last = False


class LeavesOthersUnfinished(Rules):
    """The log tells the newest intent only: an older one that is still open would be forgotten."""

    finishes_others = False


class EndsBeforeDeleting(Rules):
    ends_after_deleting = False


class ReadsPinsOnce(Rules):
    looks_at_pins_again = False


class PinsPastUnboundIntents(Rules):
    """A savepoint looks only at intents that the log holds already."""

    def pin_shuns(self, world: World, actor: Actor) -> bool:
        return any(i.files & actor.files and (i.number, i.owner) == (world.number, world.owner) for i in world.intents)


class DeletesUnsigned(Rules):
    """Nothing tells that a sweep which another one finished may still wake up and delete what has come back."""

    signs = False


class FinishesWhatIsFinished(Rules):
    """Signs, and takes it for granted that the intent is still open."""

    looks_after_signing = False


class UsesNamesAgain(Rules):
    def may_make_again(self, world: World, actor: Actor) -> bool:
        return True


FOUND_BY = {  # the smallest world that shows the bug
    DeletesWithoutAnIntent: ("sweep", "rollback"),
    BindsOntoAnyVersion: ("sweep", "rollback"),
    NamesOntoAnyVersion: ("sweep", "rollback"),
    PassesOverIntents: ("sweep", "rollback"),
    TakesPresenceForGranted: ("sweep", "rollback"),
    EndsBeforeDeleting: ("sweep", "rollback"),
    LeavesOthersUnfinished: ("sweep", "sweep", "savepoint", "run"),
    ReadsPinsOnce: ("sweep", "savepoint", "run"),
    PinsPastUnboundIntents: ("sweep", "savepoint", "run"),
    DeletesUnsigned: ("sweep", "sweep", "restore"),
    FinishesWhatIsFinished: ("sweep", "sweep", "restore"),
    UsesNamesAgain: ("sweep", "sweep", "restore"),
}


@pytest.mark.parametrize("broken", FOUND_BY)
def test_planted_bugs_are_found(broken: type[Rules]) -> None:
    states, found = search(start(*FOUND_BY[broken], deaths=0), broken())
    assert "names a file that is gone" in found, states

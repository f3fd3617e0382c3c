"""The values of a simulated world (sinks, ledger, source, runs, writes on their way) and the rules that it keeps.

`simulation` performs the actions of runs in such a world; `explore` searches it. A test breaks a single rule by
overriding a method of `Rules`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from firnline.epoch import messages as m
from firnline.sinks.known import KnownSink

T = TypeVar("T", bound=Hashable)


class Entry(NamedTuple):
    """One epoch of a chain: its author, what it stands on, and the items after `start` up to `end`.

    The rest matters to followers alone: see `followers`.
    """

    epoch: int
    attempt: str
    base: str
    start: int
    end: int
    lanes: int = 1  # that deliver it
    known: tuple[KnownSink, ...] = ()  # what it remembers of the followers
    copied: int = 0  # the sink that gets a copy of everything up to `end`; 0: none
    back_to: int = -1  # the epoch that a rollback goes back to; -1: no rollback


class Unit(NamedTuple):
    """An epoch that was put into a two-stage table, by a run of that generation, and is not committed yet."""

    entry: Entry
    generation: int

    @property
    def name(self) -> str:
        return f"{self.entry.attempt}-{self.generation}"

    @property
    def epoch(self) -> int:
        return self.entry.epoch

    @property
    def digest(self) -> int:
        return digest(self.entry.attempt)

    @property
    def previous_digest(self) -> int | None:
        return digest(self.entry.base) if self.entry.base else None


@cache
def digest(attempt: str) -> int:
    """What a log calls the entry of an attempt."""
    run, number = attempt.split(".")
    return int(run) * 1000 + int(number)


class Sink(NamedTuple):
    """What a sink holds. Every write to its log moves the version; a unit that is put, or set aside, does not.

    `adopted` is the end of the chain, pending units included, that the newest claim in a two-stage table named.
    """

    version: int = 0
    generation: int = 0
    holder: int = 0
    chain: tuple[Entry, ...] = ()
    units: tuple[Unit, ...] = ()
    aside: tuple[Unit, ...] = ()
    adopted: tuple[int, str] = (0, "")
    discarded: tuple[str, ...] = ()

    @property
    def tip(self) -> str:
        """The attempt of the newest epoch."""
        return self.chain[-1].attempt if self.chain else ""


Row: TypeAlias = tuple[int, int]  # epoch and item


class Lane(NamedTuple):
    """The head of one lane of a follower: the newest complete epoch, and how many rows of the next one it holds."""

    generation: int = 0
    run: int = 0
    epoch: int = 0
    attempt: str = ""
    partial: str = ""
    row: int = 0
    producer: int = 0  # moves with every new producer: what an older one has sent is refused
    owner: int = 0  # the run that has the newest producer
    open: tuple[Lane, ...] | None = None  # the heads of all lanes when the open transaction began
    has_head: bool = True  # else it is a partition that nobody has claimed yet


class Target(NamedTuple):
    """What a follower holds. `chain` is not kept: heads name entries."""

    lanes: tuple[Lane, ...] = ()
    rows: tuple[Row, ...] = ()  # as they became visible
    highest: int = 0  # the newest epoch that it ever held whole
    given: tuple[Row, ...] = ()  # rows from before `since`
    since: int = 0  # it gets every later epoch
    went_back: bool = False

    @property
    def epoch(self) -> int:
        """The newest epoch that all lanes hold."""
        return min((lane.epoch for lane in self.lanes if lane.has_head), default=0)


class Write(NamedTuple):
    """A write on its way to a sink; without an entry it registers a generation.

    `tip` is what the sink held when the write was checked against it.
    """

    sink: int
    version: int
    run: int
    generation: int
    tip: tuple[int, str]
    entry: Entry | None = None
    drop: int = 0  # a person discards the units from this epoch on
    lane: int = 0  # of a follower
    expected: Lane | None = None  # the head that it was checked against
    head: Lane | None = None  # the head that it leaves
    rows: tuple[Row, ...] = ()


class Pick(NamedTuple):
    """What a committer has sorted out and validated under a version, and is about to commit."""

    sink: int
    version: int
    units: tuple[Unit, ...]
    known: tuple[Unit, ...]


class Task(NamedTuple):
    """An action under way: where it starts, what it has read or sent, or the answer that has yet to arrive."""

    action: m.Action
    start: int = 0
    read: tuple[tuple[str, int, str, int], ...] = ()
    write: Write | None = None
    answer: m.Event | None = None


class Actor(NamedTuple):
    """One run. Its state and tasks are numbers that the simulation's tables explain."""

    number: int
    state: int
    alive: bool = True
    generation: int = 0
    attempts: int = 0
    plans: tuple[Entry, ...] = ()
    tasks: tuple[int, ...] = ()


class Budget(NamedTuple):
    """How much may still go wrong."""

    faults: int = 0
    crashes: int = 0
    zombies: int = 0
    stops: int = 0
    discards: int = 0  # by a person; retries of what was set aside, too
    rejects: int = 0  # units that a committer finds invalid
    reshards: int = 0
    asides: int = 0  # followers that are set aside
    backs: int = 0  # followers that are restored from a backup
    edits: int = 0  # by a person: a follower is resumed or copied anew, a rollback


NO_FAULTS = Budget()


class World(NamedTuple):
    """Everything there is: the source holds the integers after `forgotten`. `broken` names a rule that a move broke."""

    sinks: tuple[Any, ...]  # a Sink, or the Target of a follower
    actors: tuple[Actor, ...]
    budget: Budget
    ledger: tuple[Entry, ...] = ()
    recorded: int = 0
    forgotten: int = 0
    late: tuple[int, ...] = ()
    picks: tuple[Pick, ...] = ()
    broken: str = ""
    outbox: frozenset[str] = frozenset()  # attempts whose files wait there
    folded: int = 0  # ledger entries of older epochs are folded

    def with_actor(self, index: int, actor: Actor) -> World:
        """This world with another state of one run."""
        actors = (*self.actors[:index], actor, *self.actors[index + 1 :])
        return World(self.sinks, actors, *self[2:])

    def with_sink(self, index: int, sink: Sink | Target) -> World:
        """This world with another state of one sink."""
        return World((*self.sinks[:index], sink, *self.sinks[index + 1 :]), *self[1:])

    def with_budget(self, budget: Budget) -> World:
        """This world with another budget."""
        return World(self.sinks, self.actors, budget, *self[3:])


@dataclass(frozen=True, slots=True)
class Scenario:
    """The bounds of a search: sinks as (name, required), those that are down for ever, items, and the budget."""

    sinks: tuple[tuple[str, bool], ...] = (("deciding", True), ("further", True))
    dead: frozenset[str] = frozenset()
    staged: frozenset[str] = frozenset()  # sinks that are two-stage tables
    items: int = 3
    policy: str = "all"
    quorum: int = 1
    max_inflight: int = 2
    restart_attempts: int = 9
    once: bool = True
    late_writes: bool = True
    tables_exist: bool = True  # else the first commit makes a sink's table, and only that carries the claim
    followers: tuple[str, ...] = ()  # sinks that are delivered from the outbox
    lanes: tuple[int, ...] = (1,)  # of the last follower, by run; the last number holds for all later runs
    ranges: tuple[int, ...] = (9,)  # rows in one transaction, by run
    stranger: bool = False  # the last follower holds an epoch of another pipeline of the same name
    filled: str = ""  # a follower that was added after the first epoch, and gets that one too
    sweeps: bool = True
    tells_recorded: bool = True  # whether a run can read how far its predecessors recorded and acknowledged
    budget: Budget = NO_FAULTS


class Table(Generic[T]):
    """Numbers for values, from 1, so that a world hashes and compares fast."""

    def __init__(self) -> None:
        self.numbers: dict[T, int] = {}
        self.values: list[T] = []

    def number(self, value: T) -> int:
        """The number of a value, a new one when it was never seen."""
        found = self.numbers.get(value)
        if found is None:
            self.values.append(value)
            found = self.numbers[value] = len(self.values)
        return found

    def __getitem__(self, number: int) -> T:
        return self.values[number - 1]


class Rules:
    """How sinks, ledger and source behave."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.names = [name for name, _ in scenario.sinks]

    def holds(self, sink: Sink, entry: Entry) -> str | None:
        """Whose receipt a sink shows for an epoch; None when it does not hold that epoch."""
        return next((held.attempt for held in sink.chain if held.epoch == entry.epoch), None)

    def repeats(self, sink: Sink, entry: Entry) -> bool:
        """Whether a sink sees that it holds what is committed; then it writes nothing and shows its first receipt."""
        return self.holds(sink, entry) == entry.attempt

    def refuses(self, sink: Sink, actor: Actor, entry: Entry) -> bool:
        """Whether a sink refuses a commit: another generation, or another entry before it."""
        return sink.generation != actor.generation or sink.tip != entry.base or len(sink.chain) != entry.epoch - 1

    def lands(self, sink: Sink, write: Write) -> bool:
        """Whether a write still finds the version that it was checked against."""
        return sink.version == write.version

    def missing(self, sink: Sink) -> bool:
        """Whether there is no table yet that could take a claim."""
        return sink.version == 0 and not self.scenario.tables_exist

    def registers(self, sink: Sink, actor: Actor) -> bool:
        """Whether a commit has to register first: it makes the table, or an older run made it after we had joined."""
        return self.missing(sink) or (not self.scenario.tables_exist and sink.generation < actor.generation)

    def registered(self, sink: Sink, write: Write) -> Sink:
        """A sink after a generation was registered."""
        return sink._replace(version=sink.version + 1, generation=write.generation, holder=write.run)

    def claims(self, sink: Sink, write: Write) -> bool:
        """Whether a claim still finds the version that it read; its answer tells what it read."""
        return sink.version == write.version

    def cut(self, actor: Actor, start: int) -> int:
        """Where a slice ends; different runs and attempts cut differently."""
        return min(self.scenario.items, start + 1 + (actor.number + actor.attempts) % 2)

    def replayed(self, world: World, decided: Entry) -> Entry | None:
        """What a further sink is given for a decided epoch: its ledger entry."""
        return next((entry for entry in world.ledger if entry.attempt == decided.attempt), None)

    def staged(self, world: World, entry: Entry) -> World:
        """The world once the ledger entry was written, which is before the commit."""
        return world._replace(ledger=tuple(sorted({*world.ledger, entry})))

    def concluded(self, world: World, entry: Entry) -> World:
        """The world once a run has heard that its commit to the deciding sink stands."""
        return world if entry in world.ledger else world._replace(broken="a commit stands without a ledger entry")

    def recorded(self, world: World, epoch: int) -> World:
        """The world once everything up to `epoch` was recorded."""
        if self.settled(world) < epoch:
            return world._replace(broken="recorded before it was settled")
        return world._replace(recorded=max(world.recorded, epoch))

    def acknowledged(self, world: World, epoch: int) -> World:
        """The world once the source has forgotten what lies up to `epoch`."""
        chain = world.sinks[0].chain
        if len(chain) < epoch:
            return world._replace(broken="acknowledged before it was decided")
        return world._replace(forgotten=max(world.forgotten, chain[epoch - 1].end))

    def counted(self, world: World) -> list[Sink]:
        """The sinks that the commit policy waits for, in truth."""
        if self.scenario.policy == "quorum":
            deciding, *others = world.sinks
            others.sort(key=lambda sink: len(sink.chain), reverse=True)
            return [deciding, *others[: self.scenario.quorum - 1]]
        sinks = zip(world.sinks, self.scenario.sinks, strict=True)
        return [sink for n, (sink, (_, required)) in enumerate(sinks) if required or n == 0]

    def settled(self, world: World) -> int:
        """The newest epoch that satisfies the commit policy, in truth."""
        return min(len(sink.chain) for sink in self.counted(world))

"""Explores every interleaving of the coordinator's decisions with doubled, lost, late and foreign reports.

Reports are never used up, so that each may come any number of times, at any time, or never; a write of COMMITTED may
land or not, and its answer be lost, wrong or late. The judge keeps its own account of what happened. Planted bugs
must all be found. With `-s` each search prints its number of states.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from firnline.state import coordinator
from tests.support.proof import covered

Id = str


@dataclass(frozen=True)
class Scenario:
    """Ids with their barriers; how many shards there are; whether epochs may be dropped."""

    shards: int = 2
    ids: tuple[tuple[Id, int], ...] = (("a", 1), ("b", 2))
    drops: bool = False


class World(NamedTuple):
    """The coordinator, and what truly happened."""

    state: Any
    live: Id = ""  # requested and not decided
    succeeded: frozenset[int] = frozenset()  # shards that reported success for `live`
    asked: frozenset[Id] = frozenset()  # COMMITTED is to be written
    durable: frozenset[Id] = frozenset()
    begun: frozenset[Id] = frozenset()
    committed: tuple[Id, ...] = ()
    aborted: frozenset[Id] = frozenset()
    newest: int = 0  # barrier of the newest committed one, or what a drop left of it


class BrokenError(Exception):
    """A promise is broken."""


class Search:
    def __init__(self, scenario: Scenario, core: Any = coordinator) -> None:
        self.scenario = scenario
        self.core = core
        self.barriers = dict(scenario.ids)
        self._always = tuple(self._events_of_any_world())
        self._written = {id_: core.WrittenCommitted(id_) for id_ in self.barriers}
        self._failed = {id_: core.WriteFailed(id_, "no answer") for id_ in self.barriers}

    def _events_of_any_world(self) -> Iterator[Any]:
        core = self.core
        for id_, barrier in self.scenario.ids:
            yield core.Begin(id_, barrier, self.scenario.shards)
        for id_ in (*self.barriers, "foreign"):
            for shard in range(-1, self.scenario.shards + 1):
                for success in (True, False):
                    yield core.CheckpointDone(id_, shard, success)
            yield core.TimedOut(id_)
        if self.scenario.drops:
            for barrier in {*self.barriers.values()}:
                yield core.Dropped(barrier)

    def events(self, world: World) -> Iterator[Any]:
        """Everything that the coordinator may hear now."""
        yield from self._always
        for id_ in world.durable:
            yield self._written[id_]
        for id_ in world.asked:
            yield self._failed[id_]

    def moves(self, world: World) -> Iterator[tuple[object, World]]:
        """Everything that may happen now: an event, or a write that lands; and the world after it."""
        for id_ in world.asked - world.durable:
            yield f"COMMITTED of {id_} lands", world._replace(durable=world.durable | {id_})
        for event in self.events(world):
            yield event, self.take(world, event)

    def take(self, world: World, event: Any) -> World:
        """Let the coordinator decide, and judge what it does."""
        core, live = self.core, world.live
        state, actions = core.step(world.state, event)
        after = self.note(world, event)
        for action in actions:
            after = self.judge(after, action)
        if state is not after.state:
            after = after._replace(state=state)
        ours = bool(live) and getattr(event, "checkpoint_id", None) == live
        match type(event).__name__:
            case "CheckpointDone" if ours and 0 <= event.shard_id < self.scenario.shards and not event.success:
                self.demand(live in after.aborted, "a failure does not abort")
            case "TimedOut" if ours:
                self.demand(live in after.aborted, "a timeout does not abort")
            case "WriteFailed" if ours:
                self.demand(live in after.aborted, "a failed write does not abort")
            case "WrittenCommitted" if ours:
                self.demand(live in after.committed, "a durable COMMITTED does not commit")
            case "Dropped" if live and self.barriers[live] >= event.barrier:
                self.demand(live in after.aborted, "a dropped epoch's checkpoint goes on")
            case "Begin" if not live and event.checkpoint_id not in world.begun and event.barrier > world.newest:
                self.demand(after.live == event.checkpoint_id, "a checkpoint cannot begin")
        everybody = len(after.succeeded) == self.scenario.shards
        self.demand(not (after.live and everybody and after.live not in after.asked), "it waits for nothing, for ever")
        return after

    def note(self, world: World, event: Any) -> World:
        """What an event makes true, whatever the coordinator thinks of it."""
        match type(event).__name__:
            case "CheckpointDone" if event.checkpoint_id == world.live and event.success:
                if 0 <= event.shard_id < self.scenario.shards:
                    return world._replace(succeeded=world.succeeded | {event.shard_id})
            case "Dropped":
                return world._replace(newest=min(world.newest, event.barrier - 1))
        return world

    def judge(self, world: World, action: Any) -> World:
        id_ = action.checkpoint_id
        everybody = len(world.succeeded) == self.scenario.shards
        match type(action).__name__:
            case "CheckpointRequest":
                self.demand(not world.live, "two are in progress")
                self.demand(id_ not in world.begun, "an id is used again")
                return world._replace(live=id_, succeeded=frozenset(), begun=world.begun | {id_})
            case "WriteCommitted":
                self.demand(id_ == world.live, "an action for a dead id")
                self.demand(everybody, "COMMITTED is written though a shard has not reported success")
                self.demand(id_ not in world.asked, "COMMITTED is written twice")
                return world._replace(asked=world.asked | {id_})
            case "CheckpointCommitted":
                self.demand(id_ == world.live, "an action for a dead id")
                self.demand(everybody, "committed though a shard has not reported success")
                self.demand(id_ in world.durable, "committed before COMMITTED is durable")
                self.demand(self.barriers[id_] > world.newest, "committed barriers do not grow")
                return world._replace(live="", committed=(*world.committed, id_), newest=self.barriers[id_])
            case "CheckpointAborted":
                self.demand(id_ not in world.committed, "committed and aborted")
                self.demand(id_ == world.live, "an action for a dead id")
                return world._replace(live="", aborted=world.aborted | {id_})
        return world

    def demand(self, kept: bool, promise: str) -> None:
        if not kept:
            raise BrokenError(promise)

    def explore(self) -> tuple[int, str]:
        """The number of states, and the shortest way to a broken promise if there is one."""
        first = World(self.core.initial())
        parents: dict[World, tuple[World, object] | None] = {first: None}
        queue = deque([first])
        while queue:
            world = queue.popleft()
            moves = self.moves(world)
            while True:
                try:
                    move, after = next(moves)
                except StopIteration:
                    break
                except BrokenError as broken:
                    return len(parents), f"{broken}, after {self.trace(parents, world)}"
                if after is not world and after not in parents:
                    parents[after] = (world, move)
                    queue.append(after)
        return len(parents), ""

    def trace(self, parents: dict[World, tuple[World, object] | None], world: World) -> str:
        lines: list[str] = []
        while (before := parents[world]) is not None:
            world, move = before
            lines.append(str(move))
        return "; ".join(reversed(lines))


RETRY = (("a", 1), ("b", 2), ("c", 1))
SCENARIOS = {
    "two shards": Scenario(),
    "three shards": Scenario(shards=3),
    "one shard, three checkpoints": Scenario(shards=1, ids=(("a", 1), ("b", 2), ("c", 3))),
    "two shards, epochs dropped and tried again": Scenario(ids=RETRY, drops=True),
    "three shards, epochs dropped and tried again": Scenario(shards=3, ids=RETRY, drops=True),
    "three shards, four checkpoints": Scenario(shards=3, ids=(*RETRY, ("d", 2)), drops=True),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_state_keeps_every_promise(name: str) -> None:
    states, broken = Search(SCENARIOS[name]).explore()
    print(f"{name}: {states:,} states")
    covered["states"] += states
    assert not broken
    assert states >= 100


# -- planted bugs ----------------------------------------------------------------------------------------

MUTANTS = {
    "a doubled report counts as another shard": (
        "current.done | {report.shard_id}", "current.done | {len(current.done)}",
    ),
    "a report of an unknown shard counts": ("if not 0 <= report.shard_id < current.shards:", "if False:"),
    "a report for another id counts": (
        "if current is None or current.checkpoint_id != event.checkpoint_id:", "if current is None:",
    ),
    "a late report is taken after an abort": (
        "return replace(state, current=None), [CheckpointAborted", "return state, [CheckpointAborted",
    ),
    "a late report is taken after the commit": (
        "done = replace(state, current=None, committed", "done = replace(state, committed",
    ),
    "a timeout commits": (
        "return _abort(state, current, _late(current))",
        "return replace(state, current=replace(current, writing=True)), [WriteCommitted(current.checkpoint_id)]",
    ),
    "a timeout is ignored": ("return _abort(state, current, _late(current))", "return state, []"),
    "an id is used again": ("if checkpoint_id in state.known:", "if False:"),
    "a failure is ignored": (
        'return _abort(state, current, f"shard {report.shard_id} failed")', "return state, []",
    ),
    "a failure counts as success": ("if not report.success:", "if False:"),
    "a failure after success is ignored": (
        "if not report.success:", "if not report.success and report.shard_id not in current.done:",
    ),
    "one shard is enough": ("if len(current.done) < current.shards or", "if len(current.done) < 1 or"),
    "COMMITTED is written at every report": (" or current.writing:\n", ":\n"),
    "committed before COMMITTED is durable": (
        "writing=True)), [WriteCommitted(current.checkpoint_id)]",
        "writing=True)), [WriteCommitted(current.checkpoint_id), CheckpointCommitted(current.checkpoint_id)]",
    ),
    "a failed write counts as written": (
        'return _abort(state, current, f"COMMITTED could not be written: {reason}")',
        "return replace(state, current=None), [CheckpointCommitted(current.checkpoint_id)]",
    ),
    "an older one is pushed aside": ("if state.current is not None:", "if False:"),
    "barriers go back": ("if barrier <= state.committed:", "if False:"),
    "a dropped epoch's checkpoint goes on": (
        "if current is None or current.barrier < event.barrier:", "if True:",
    ),
    "a drop is forgotten": ("committed=min(state.committed, event.barrier - 1)", "committed=state.committed"),
}  # fmt: skip


def mutated(old: str, new: str) -> ModuleType:
    """The decisions with one snippet of their source changed."""
    source = inspect.getsource(coordinator)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    module = ModuleType("mutated_coordinator")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source.replace(old, new), "mutated_coordinator.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_catches_a_planted_bug(name: str) -> None:
    scenario = SCENARIOS["two shards, epochs dropped and tried again"]
    states, broken = Search(scenario, mutated(*MUTANTS[name])).explore()
    print(f"{name}: {broken}, in state {states:,}")
    covered["mutants caught"] += bool(broken)
    assert broken, f"not caught in {states:,} states"

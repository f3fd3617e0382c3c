"""Searches a simulated world: every state breadth first, or one seeded walk, and judges every state it meets."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.support.proof import covered
from tests.support.simulation import Move, Simulation
from tests.support.world import Actor, Entry, World


class Result(NamedTuple):
    """What a search found: the promise that a state broke, if any, and the shortest way there."""

    states: int
    broken: str = ""
    trace: tuple[str, ...] = ()
    complete: bool = True

    def __str__(self) -> str:
        if not self.broken:
            return f"{self.states:,} states"
        steps = "\n".join(f"  {n:3} {line}" for n, line in enumerate(self.trace, 1))
        return f"{self.broken}, in state {self.states:,}, after\n{steps}"


class Judge:
    """Says which promise a state breaks. Verdicts are kept, since most states share their parts."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._worlds: dict[object, str] = {}
        self._runs: dict[object, str] = {}

    def __call__(self, world: World) -> str:
        """The promise that this state breaks, or nothing."""
        if world.broken:
            return world.broken
        key = (world.sinks, world.ledger, world.forgotten, world.outbox, world.folded)
        verdict = self._worlds.get(key)
        if verdict is None:
            verdict = self._worlds[key] = next(self._stored(world), "")
        for actor in world.actors:
            if verdict:
                break
            if actor.alive:
                done = (world.sinks, world.recorded, world.forgotten)
                about = (done, actor.state, actor.number, actor.generation, bool(actor.tasks))
                found = self._runs.get(about)
                if found is None:
                    found = self._runs[about] = next(self._run(world, actor), "")
                verdict = found
        return verdict

    def ended(self, world: World) -> str:
        """The promise that a world without a run breaks, or nothing."""
        return ""

    def _stored(self, world: World) -> Iterator[str]:
        """What sinks, ledger and source must agree on."""
        decided = world.sinks[0].chain
        for sink in world.sinks:
            before = Entry(0, "", "", 0, 0)
            for entry in sink.chain:
                if entry.epoch != before.epoch + 1:
                    yield "a sink holds an epoch twice or skips one"
                if entry.start != before.end or entry.end <= entry.start:
                    yield "a sink holds items twice, or has a gap"
                if entry.base != before.attempt:
                    yield "an epoch stands on another one than it was planned on"
                if entry not in world.ledger:
                    yield "a sink holds an epoch that has no ledger entry"
                before = entry
            if sink.chain != decided[: len(sink.chain)]:
                yield "a further sink holds what the deciding sink does not"
        if len(decided) > self.simulation.settled(world) + 1:
            yield "an epoch was decided before the one before it was settled"
        safe = self._safe(world)
        if world.forgotten > (decided[safe - 1].end if safe > 0 else 0):
            yield "the source forgot what a recovery may need"

    def _safe(self, world: World) -> int:
        """The newest epoch that sources may forget: not the newest of all, and none that a sink lacks."""
        return min(len(world.sinks[0].chain) - 1, *(len(sink.chain) for sink in world.sinks))

    def _is_owed(self, world: World, state: Any) -> bool:
        """Whether the source could have forgotten more, as far as a run knows."""
        safe = min(self._safe(world), state.recorded - 1, self._held(state))
        return bool(safe > 0 and world.forgotten < world.sinks[0].chain[safe - 1].end)

    def _held(self, state: Any) -> int:
        """The epoch up to which a run believes that no sink needs a source."""
        return min(int(sink.epoch) for sink in state.sinks if not sink.from_outbox)

    def _most(self, world: World, sink: int) -> int:
        """The newest epoch that a run may believe a sink to hold."""
        return len(world.sinks[sink].chain)

    def _run(self, world: World, actor: Actor) -> Iterator[str]:
        """What a run believes, and how it may end."""
        simulation, state = self.simulation, self.simulation.view(actor)
        if not state.recorded <= state.settled <= state.decided <= len(world.sinks[0].chain):
            yield "not recorded <= settled <= decided <= what the sink holds"
        elif state.decided and state.tip != world.sinks[0].chain[state.decided - 1].attempt:
            yield "a run takes another one's epoch for its own"
        if any(sink.epoch > self._most(world, n) for n, sink in enumerate(state.sinks) if not sink.away):
            yield "a run believes that a sink holds more than it does"
        if len(state.slots) > state.settings.max_inflight:
            yield "more epochs in flight than allowed"
        if [slot.epoch for slot in state.slots] != list(range(state.decided + 1, state.decided + 1 + len(state.slots))):
            yield "epochs in flight do not follow the decided one"
        if state.exit_code is None and not actor.tasks:
            yield "a run waits for nothing, for ever"
        if state.exit_code == 5 and world.sinks[0].holder == actor.number and not self._outrun(world, actor):
            yield "a run counts as fenced though nobody fenced it"
        if state.exit_code not in (None, 0, 5) and not self._may_fail(world, state.exit_code):
            yield f"a run failed with exit code {state.exit_code}"
        if state.exit_code == 0 and not state.stopping:
            if any(
                (sink.chain[-1].end if sink.chain else 0) < simulation.scenario.items
                for sink in simulation.counted(world)
            ):
                yield "a run ended well though a sink lacks items"
            recorded = world.recorded if simulation.scenario.tells_recorded else state.recorded
            if min(state.recorded, recorded) < state.settled:
                yield "a run ended well though an epoch is not recorded"
            if state.acknowledged < min(state.settled - 1, self._held(state)):
                yield "a run ended well though an epoch is not acknowledged"
            if not state.missed and self._is_owed(world, state):
                yield "a run ended well though the source missed an acknowledgement"
        is_idle = state.polling and not (state.resting or state.acknowledging or state.owing_rests or state.reclaiming)
        if is_idle and state.exit_code is None and self._is_owed(world, state):
            yield "an idle run leaves it at a missed acknowledgement"

    def _may_fail(self, world: World, exit_code: int) -> bool:
        """Whether a run may give up with an exit code."""
        return False

    def _outrun(self, world: World, actor: Actor) -> bool:
        """Whether two runs claimed a table before there was one, and the other was the first to commit."""
        late = not self.simulation.scenario.tables_exist and self.simulation.view(actor).decided == 0
        return late and bool(world.sinks[0].chain)


def explore(simulation: Simulation, *, judge: Judge | None = None, limit: int = 10_000_000) -> Result:
    """Visit every state within the scenario's bounds, shortest traces first; stop at the first broken promise.

    Besides the judge's promises: from every state the runs can come to their end without any further fault.
    """
    result = _search(simulation, judge or Judge(simulation), limit)
    covered["states"] += result.states
    covered["mutants caught"] += bool(result.broken)
    return result


def _search(simulation: Simulation, judge: Judge, limit: int) -> Result:
    first = simulation.start()
    seen = {hash(first): 0}
    parents: list[tuple[int, str, int, int]] = [(0, "", 0, 0)]
    queue = deque([(0, first)])
    sources: list[list[int]] = [[]]  # by state: the states from which a move without fault leads here
    ends: list[int] = []
    while queue:
        number, world = queue.popleft()
        broken = judge(world)
        if broken:
            return Result(len(parents), broken, _trace(simulation, parents, number))
        if not any(simulation.running(actor) for actor in world.actors):
            ends.append(number)
            broken = judge.ended(world)
            if broken:
                return Result(len(parents), broken, _trace(simulation, parents, number))
        for verb, run, task, fault, after in simulation.moves(world):
            key = hash(after)
            to = seen.get(key)
            if to is None:
                to = seen[key] = len(parents)
                parents.append((number, verb, run, task))
                sources.append([])
                queue.append((to, after))
            if not fault:
                sources[to].append(number)
        if len(parents) > limit:
            return Result(len(parents), complete=False)
    stuck = cannot_reach(ends, sources)
    if stuck is not None:
        return Result(len(parents), "a run can never end", _trace(simulation, parents, stuck))
    return Result(len(parents))


def walk(
    simulation: Simulation, seed: int, *, fault_rate: float, judge: Judge | None = None, limit: int = 20_000
) -> Result:
    """Follow one random path until every run has ended, faults coming at the given rate."""
    generator = random.Random(seed)
    judge = judge or Judge(simulation)
    world = simulation.start()
    trace: list[str] = []
    for number in range(limit):
        broken = judge(world)
        if broken:
            return Result(number, broken, tuple(trace))
        if not any(simulation.running(actor) for actor in world.actors):
            return Result(number, judge.ended(world), tuple(trace))
        moves = list(simulation.moves(world))
        faults = [move for move in moves if move.fault]
        normal = [move for move in moves if not move.fault]
        move = generator.choice(faults if faults and generator.random() < fault_rate else normal)
        trace.append(describe(simulation, move))
        world = move.world
    return Result(limit, "a run does not end", tuple(trace))


def describe(simulation: Simulation, move: Move) -> str:
    """One line of a trace."""
    return _line(simulation, move.verb, move.run, move.task)


def _line(simulation: Simulation, verb: str, run: int, task: int) -> str:
    return f"run {run} {simulation.tasks[task].action if task else ''} {verb}".replace("  ", " ")


def _trace(simulation: Simulation, parents: list[tuple[int, str, int, int]], number: int) -> tuple[str, ...]:
    lines: list[str] = []
    while number:
        number, verb, run, task = parents[number]
        lines.append(_line(simulation, verb, run, task))
    return tuple(reversed(lines))


def cannot_reach(ends: list[int], sources: list[list[int]]) -> int | None:
    """The first state from which no end can be reached, if there is one."""
    reached = bytearray(len(sources))
    for number in ends:
        reached[number] = 1
    todo = list(ends)
    while todo:
        for number in sources[todo.pop()]:
            if not reached[number]:
                reached[number] = 1
                todo.append(number)
    stuck = reached.find(0)
    return None if stuck < 0 else stuck

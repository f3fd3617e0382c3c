"""Two-stage tables in the simulated world: units, committers, and people who discard or retry units.

Which units are committed, wait or are forks is decided by the real `staging.chain`. A put is unconditional, as the
storage's is; everything that goes into a log is conditional on its version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from firnline.epoch import decide as real_core
from firnline.epoch import messages as m
from firnline.sinks.staged.chain import Arranged, LogHead, arrange
from tests.support.explore import Judge
from tests.support.simulation import Job, Move, Outcomes, Simulation
from tests.support.world import NO_FAULTS, Actor, Entry, Pick, Scenario, Sink, Task, Unit, World, Write, digest

_PUT = (("put", 0, "", 0),)  # a task whose unit lies in the folder, and that looks at its claim once more
_CLAIMED = (("claimed", 0, "", 0),)  # a task whose claim stands, and that reads the end of the chain under it


class TwoStage(Simulation):
    """Runs of one pipeline of which some sinks, `scenario.staged`, are two-stage tables."""

    def __init__(self, scenario: Scenario, core: ModuleType = real_core) -> None:
        super().__init__(scenario, core)
        self.two_stage = frozenset(n for n, name in enumerate(self.names) if name in scenario.staged)
        self._arranged: dict[Sink, Arranged[Unit]] = {}
        self._paths: dict[tuple[tuple[Entry, ...], str], dict[int, Entry]] = {}

    # -- rules ---------------------------------------------------------------------------------------------

    def arranged(self, sink: Sink) -> Arranged[Unit]:
        """The pending units of a sink, sorted out under what its log holds."""
        found = self._arranged.get(sink)
        if found is None:
            found = self._arranged[sink] = self.sort_out(sink, sink.units)
        return found

    def sort_out(self, sink: Sink, units: tuple[Unit, ...]) -> Arranged[Unit]:
        """Which units may be committed onto what a log holds."""
        epoch, tip = sink.adopted
        log_head = LogHead(
            epoch=len(sink.chain),
            entry=digest(sink.tip) if sink.chain else None,
            generation=sink.generation,
            tip_epoch=epoch,
            tip=digest(tip) if tip else None,
        )
        return arrange(log_head, units)

    def held(self, sink: Sink) -> tuple[Entry, ...]:
        """What a sink holds: its log, and the units that follow it without a gap."""
        return (*sink.chain, *(unit.entry for unit in self.arranged(sink).ready)) if sink.units else sink.chain

    def lands(self, sink: Sink, write: Write) -> bool:
        if write.entry is not None and write.sink in self.two_stage:
            return write.entry.epoch > len(sink.chain)  # else the unit is past when it arrives
        return super().lands(sink, write)

    def committer_lands(self, sink: Sink, pick: Pick) -> bool:
        """Whether what a committer picked is still what comes next, under the version that it commits onto."""
        if sink.version == pick.version:
            return True
        return tuple(self.sort_out(sink, pick.known).ready[: len(pick.units)]) == pick.units

    def adopts(self, world: World, actor: Actor, at: int) -> tuple[int, str]:
        """The end of the chain that a claim names: in a further sink, no further than what is decided."""
        held = self.held(world.sinks[at])
        if at:
            chain = self.chain_of(world, actor)
            held = tuple(entry for entry in held if chain.get(entry.epoch) == entry)
        return (held[-1].epoch, held[-1].attempt) if held else (0, "")

    def told(self, world: World, actor: Actor) -> int | None:
        """How far a run may take the deciding table's log to hold its chain; None: the log holds another one."""
        log, chain = world.sinks[0].chain, self.chain_of(world, actor)
        if log and log[-1].epoch in chain and chain[log[-1].epoch] != log[-1]:
            return None
        return len(log)

    def joins(self, world: World, actor: Actor, held: tuple[Entry, ...]) -> bool:
        """Whether what a further sink holds is proven to lie on the decided chain."""
        return not held or self.chain_of(world, actor).get(held[-1].epoch) == held[-1]

    # -- what a run knows ----------------------------------------------------------------------------------

    def chain_of(self, world: World, actor: Actor) -> dict[int, Entry]:
        """The chain down from what a run takes for the newest decided epoch, by the ledger."""
        tip = self.view(actor).tip
        found = self._paths.get((world.ledger, tip))
        if found is None:
            by_attempt = {entry.attempt: entry for entry in world.ledger}
            found, at = {}, by_attempt.get(tip)
            while at is not None:
                found[at.epoch] = at
                at = by_attempt.get(at.base)
            self._paths[world.ledger, tip] = found
        return found

    def entry_for(self, world: World, actor: Actor, at: int, epoch: int) -> Entry | None:
        if at == 0:
            return super().entry_for(world, actor, at, epoch)
        decided = self.chain_of(world, actor).get(epoch)
        return self.replayed(world, decided) if decided else None

    def _end_of(self, world: World, actor: Actor, attempt: str) -> int:
        return next((e.end for e in (*world.ledger, *actor.plans) if e.attempt == attempt), 0)

    def counted(self, world: World) -> list[Sink]:
        # A unit in a further two-stage table may turn out to be a fork: the next run puts it again, from what is
        # staged and in the ledger. So it is durable once it was put, and no world tells what was ever put.
        direct = [n for n in range(1, len(world.sinks)) if n not in self.two_stage]
        if self.scenario.policy == "quorum":
            direct.sort(key=lambda n: len(world.sinks[n].chain), reverse=True)
            units = len(world.sinks) - 1 - len(direct)
            direct = direct[: max(0, self.scenario.quorum - 1 - units)]
        else:
            direct = [n for n in direct if self.scenario.sinks[n][1]]
        return [world.sinks[n] for n in (0, *direct)]

    # -- what happens without a run ------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[Move]:
        yield from super().moves(world)
        for at in sorted(self.two_stage):
            yield from self._committer_moves(world, at)
            yield from self._person_moves(world, at)

    def _committer_moves(self, world: World, at: int) -> Iterator[Move]:
        name, sink = self.names[at], world.sinks[at]
        pick = next((found for found in world.picks if found.sink == at), None)
        if pick is not None:
            without = world._replace(picks=tuple(found for found in world.picks if found is not pick))
            if self.committer_lands(sink, pick):
                yield Move(f"committer of {name} commits", 0, 0, False, self.committed(without, pick))
            else:
                yield Move(f"committer of {name} finds the log moved", 0, 0, False, without)
            return
        ready = tuple(self.arranged(sink).ready) if sink.units else ()
        for count in sorted({1, len(ready)} if ready else ()):
            pick = Pick(at, sink.version, ready[:count], sink.units)
            picks = tuple(sorted((*world.picks, pick)))
            yield Move(f"committer of {name} picks {count}", 0, 0, False, world._replace(picks=picks))
        if ready and world.budget.rejects:
            budget = world.budget._replace(rejects=world.budget.rejects - 1)
            units = tuple(unit for unit in sink.units if unit != ready[0])
            after = self.with_sink(world, at, sink._replace(units=units, aside=(*sink.aside, ready[0])))
            yield Move(f"committer of {name} sets a unit aside", 0, 0, True, after._replace(budget=budget))

    def committed(self, world: World, pick: Pick) -> World:
        """The world once a committer has committed what it picked."""
        sink = world.sinks[pick.sink]
        chain = (*sink.chain, *(unit.entry for unit in pick.units))
        return self._prune(self.with_sink(world, pick.sink, sink._replace(version=sink.version + 1, chain=chain)))

    def _person_moves(self, world: World, at: int) -> Iterator[Move]:
        """A person discards units of the deciding table, or takes one up again that was set aside."""
        budget, sink, name = world.budget, world.sinks[at], self.names[at]
        if at or not budget.discards:
            return
        budget = budget._replace(discards=budget.discards - 1)
        held = self.held(sink)
        for epoch in sorted({len(sink.chain) + 1, len(held)}):
            if epoch <= len(sink.chain) or not (sink.units or sink.aside):
                continue
            kept = held[: epoch - 1]
            tip = (kept[-1].epoch, kept[-1].attempt) if kept else (0, "")
            write = Write(at, sink.version, 0, sink.generation + 1, tip, drop=epoch)
            late = tuple(sorted({*world.late, self.writes.number(write)}))
            after = world._replace(budget=budget, late=late)
            yield Move(f"person looks at {name} to discard from epoch {epoch}", 0, 0, True, after)
        for unit in sink.aside:
            back = sink._replace(units=tuple(sorted((*sink.units, unit))), aside=())
            after = self.with_sink(world, at, back)._replace(budget=budget)
            yield Move(f"person takes {unit.name} up again in {name}", 0, 0, True, after)

    def with_sink(self, world: World, at: int, sink: Sink) -> World:
        """This world with another state of one sink; units that are forks for ever, or past, are gone from it."""
        if at in self.two_stage and sink.units:
            beyond = tuple(unit for unit in sink.units if unit.epoch > len(sink.chain))
            sink = sink._replace(units=beyond)
            forks = set(self.arranged(sink).forks)
            if forks:
                sink = sink._replace(units=tuple(unit for unit in beyond if unit not in forks))
        return world.with_sink(at, sink)

    def _land(self, world: World, write: Write) -> World:
        if write.sink not in self.two_stage:
            return super()._land(world, write)
        sink = world.sinks[write.sink]
        if write.entry is not None:
            unit = Unit(write.entry, write.generation)
            return self._prune(
                self.with_sink(world, write.sink, sink._replace(units=tuple(sorted({*sink.units, unit}))))
            )
        sink = self.registered(sink, write)._replace(adopted=write.tip)
        if write.drop:
            kept = tuple(unit for unit in sink.units if unit.epoch < write.drop)
            gone = {unit.entry.attempt for unit in (*sink.units, *sink.aside)} - {unit.entry.attempt for unit in kept}
            sink = sink._replace(units=kept, aside=(), discarded=tuple(sorted({*sink.discarded, *gone})))
        return self._prune(self.with_sink(world, write.sink, sink))

    # -- actions -------------------------------------------------------------------------------------------

    def _outcomes(self, job: Job) -> Outcomes:
        if isinstance(job.task.action, m.WatchLog):
            return self._watch(job)
        return super()._outcomes(job)

    def _watch(self, job: Job) -> Outcomes:
        found = self.told(job.world, job.actor)
        if job.world.sinks[0].generation != job.actor.generation or found is None:
            yield "finds another generation, or chain", False, self._hear(job, m.Fenced())
        else:
            yield "reads the log", False, self._hear(job, m.LogRead(found))

    def _read(self, world: World, name: str) -> tuple[str, int, str, int]:
        sink = world.sinks[self.names.index(name)]
        held = self.held(sink)
        return name, len(held), held[-1].attempt if held else "", len(sink.chain)

    def _claim(self, job: Job, action: m.Claim) -> Outcomes:
        if 0 not in self.two_stage:
            yield from super()._claim(job, action)
            return
        world, actor, sink, failed = job.world, job.actor, job.world.sinks[0], m.Failed(retry=True)
        write = job.task.write
        if write is not None:
            if not self.claims(sink, write):
                yield "finds the version moved", False, self._later(job, Task(action))
                return
            after = self._land(world, write)
            after = after.with_actor(job.place, after.actors[job.place]._replace(generation=write.generation))
            yield "lands", False, self._later(job, Task(action, start=write.tip[0], read=_CLAIMED), after)
            if not job.faults:
                return
            yield "lands, its answer is lost", True, self._later(job, Task(action, answer=failed), after)
            yield "is lost", True, self._later(job, Task(action, answer=failed))
        elif job.task.read:
            held = self.held(sink)
            if sink.generation != actor.generation:
                yield "finds another generation", False, self._hear(job, m.Fenced())
            elif not self.stands(job.task.start, held):
                yield "finds a unit gone that it adopted", False, self._later(job, Task(action))
            else:
                tip = held[-1].attempt if held else ""
                yield "reads", False, self._hear(job, m.Claimed(len(held), tip, committed=len(sink.chain)))
        elif action.again and sink.holder != actor.number:
            yield "is refused", False, self._hear(job, m.Fenced())
        else:
            write = Write(0, sink.version, actor.number, sink.generation + 1, self.adopts(world, actor, 0))
            yield "is sent", False, self._later(job, Task(action, write=write))
        if write is None and job.faults:
            yield "fails", True, self._hear(job, failed)

    def stands(self, adopted: int, held: tuple[Entry, ...]) -> bool:
        """Whether what a claim adopted is what the table holds under it."""
        return len(held) >= adopted

    def _join(self, job: Job, action: m.Join) -> Outcomes:
        at = self.names.index(action.sink)
        world, actor, sink = job.world, job.actor, job.world.sinks[at]
        failed = m.Failed(retry=True, sink=action.sink)
        if action.sink in self.scenario.dead:
            yield "finds it down", False, self._hear(job, failed)
        elif sink.generation > actor.generation:
            yield "is refused", False, self._hear(job, m.Fenced())
        elif job.task.write is not None:
            write = job.task.write
            if not self.lands(sink, write):
                yield "finds the version moved", False, self._later(job, Task(action))
                return
            yield "lands", False, self._later(job, Task(action, read=_CLAIMED), self._land(world, write))
            if job.faults:
                yield "is lost", True, self._later(job, Task(action, answer=failed))
        elif job.task.read or (sink.holder, sink.generation) == (actor.number, actor.generation):
            held = self.held(sink)
            if self.joins(world, actor, held):
                yield "reads", False, self._hear(job, m.Joined(action.sink, len(held)))
            else:
                diverged = m.Failed(retry=False, exit_code=3, sink=action.sink)
                yield "holds another chain", False, self._hear(job, diverged)
        else:
            write = Write(at, sink.version, actor.number, actor.generation, self.adopts(world, actor, at))
            yield "is sent", False, self._later(job, Task(action, write=write))

    def _commit(self, job: Job, action: m.Commit) -> Outcomes:
        at = self.names.index(action.sink)
        if at not in self.two_stage:
            yield from super()._commit(job, action)
            return
        world, actor, sink, task = job.world, job.actor, job.world.sinks[at], job.task
        unclear = m.CommitUnclear(action.sink, action.epoch)
        fenced = sink.generation != actor.generation or (at == 0 and self.told(world, actor) is None)
        if task.write is not None:
            after = self._land(world, task.write) if self.lands(sink, task.write) else world
            yield "lands", False, self._later(job, Task(action, read=_PUT), after)
            if not job.faults:
                return
            yield "lands, its answer is lost", True, self._later(job, Task(action, answer=unclear), after)
            yield "is lost", True, self._later(job, Task(action, answer=unclear))
            if self.scenario.late_writes:
                late = tuple(sorted({*world.late, self.writes.number(task.write)}))
                lost = self._later(job, Task(action, answer=unclear))
                yield "is delayed", True, lost._replace(late=late)
        elif fenced:
            yield "is refused", False, self._hear(job, m.Fenced())
        elif (entry := self.entry_for(world, actor, at, action.epoch)) is None:
            yield "finds no entry", False, world._replace(broken="told to commit what has no entry")
        elif task.read:
            committed = len(sink.chain) if at == 0 else None
            done = m.Committed(action.sink, action.epoch, entry.attempt, committed)
            yield "is put", False, self._hear(job, done)
        else:
            if at == 0 and entry.start < world.forgotten:
                world = world._replace(broken="the source has forgotten what a commit needs")
            write = Write(at, 0, actor.number, actor.generation, (0, ""), entry)
            yield "is sent", False, self._later(job, Task(action, write=write), world)

    def _find_receipt(self, job: Job, action: m.FindReceipt) -> Outcomes:
        at = self.names.index(action.sink)
        if at not in self.two_stage:
            yield from super()._find_receipt(job, action)
            return
        held = {entry.epoch: entry.attempt for entry in self.held(job.world.sinks[at])}
        attempt = held.get(action.epoch)
        answer: m.Event = m.ReceiptAbsent(action.sink, action.epoch)
        if attempt is not None:
            committed = len(job.world.sinks[0].chain) if at == 0 else None
            answer = m.Committed(action.sink, action.epoch, attempt, committed)
        yield "is answered", False, self._hear(job, answer)
        if job.faults:
            yield "fails", True, self._hear(job, m.CommitUnclear(action.sink, action.epoch))


class TwoStageJudge(Judge):
    """Judges worlds with two-stage tables. What counts as decided is what the deciding table's log holds."""

    def __init__(self, simulation: TwoStage) -> None:
        super().__init__(simulation)
        self._world = simulation
        healthy = replace(simulation.scenario, once=True, dead=frozenset(), budget=NO_FAULTS)
        self._later = type(simulation)(healthy, simulation.core)
        self._ends: dict[object, str] = {}

    def _stored(self, world: World) -> Iterator[str]:
        log = world.sinks[0].chain
        for found in super()._stored(world):
            if 0 not in self._world.two_stage or found != "an epoch was decided before the one before it was settled":
                yield found
        if any(entry.attempt in world.sinks[0].discarded for entry in log):
            yield "a unit was committed that a person had discarded"
        for sink in world.sinks[1:]:
            if any(unit.entry not in log for unit in sink.units):
                yield "a further sink was given what the deciding table's log does not hold"

    def _safe(self, world: World) -> int:
        log = world.sinks[0].chain
        direct = [sink for n, sink in enumerate(world.sinks) if n not in self._world.two_stage]
        return min([len(log) - 1, *(len(sink.chain) for sink in direct)])

    def _most(self, world: World, sink: int) -> int:
        if sink in self._world.two_stage:  # units may be discarded, or be forks, without a run's knowing
            return len(world.ledger)
        return super()._most(world, sink)

    def _run(self, world: World, actor: Actor) -> Iterator[str]:
        simulation, state = self._world, self._world.view(actor)
        if 0 not in simulation.two_stage:
            yield from super()._run(world, actor)
            return
        log, ours = world.sinks[0].chain, simulation.chain_of(world, actor)
        if not state.recorded <= state.settled <= state.committed <= min(state.decided, len(log)):
            yield "not recorded <= settled <= committed <= what the log holds"
        elif state.committed and ours.get(state.committed) != log[state.committed - 1]:
            yield "a run takes another one's epoch for its own"
        if any(sink.epoch > self._most(world, n) for n, sink in enumerate(state.sinks)):
            yield "a run believes that a sink holds more than it does"
        if [slot.epoch for slot in state.slots] != list(range(state.decided + 1, state.decided + 1 + len(state.slots))):
            yield "epochs in flight do not follow the decided one"
        if len(state.slots) > state.settings.max_inflight:
            yield "more epochs in flight than allowed"
        if state.exit_code is None and not actor.tasks:
            yield "a run waits for nothing, for ever"
        holders = {sink.holder for sink in world.sinks}
        if state.exit_code == 5 and holders == {actor.number} and not self._is_forked(world, actor):
            yield "a run counts as fenced though nobody fenced it"
        if state.exit_code not in (None, 0, 5):
            yield f"a run failed with exit code {state.exit_code}"
        if state.exit_code == 0 and not state.stopping:
            yield from self._ended_well(world, actor)

    def _is_forked(self, world: World, actor: Actor) -> bool:
        """Whether a person took up a unit again that this run had gone past."""
        return self._world.told(world, actor) is None

    def _ended_well(self, world: World, actor: Actor) -> Iterator[str]:
        simulation, state = self._world, self._world.view(actor)
        deciding = world.sinks[0]
        if deciding.generation == actor.generation and not deciding.aside:
            held = simulation.held(deciding)
            if (held[-1].end if held else 0) < simulation.scenario.items:
                yield "a run ended well though the deciding sink lacks items"
        if any(sink.epoch < state.committed for sink in state.sinks if sink.required):
            yield "a run ended well though a sink lacks what is committed"
        if state.recorded < state.settled:
            yield "a run ended well though an epoch is not recorded"

    def ended(self, world: World) -> str:
        """Let committers and further runs go on without a fault: every sink holds every item in the end."""
        key = (world.sinks, world.ledger, world.forgotten, world.recorded)
        verdict = self._ends.get(key)
        if verdict is None:
            verdict = self._ends[key] = self._go_on(world)
        return verdict

    def _go_on(self, world: World) -> str:
        simulation = self._later
        actors = tuple(Actor(actor.number, 0, alive=False) for actor in world.actors)
        world = world._replace(budget=NO_FAULTS, late=(), picks=(), actors=actors)
        for _ in range(3):
            world = self._drain(simulation._begin(world))
            world = self._run_on(world)
            if world.broken:
                return world.broken
        world = self._drain(world)
        for sink in world.sinks:
            if sink.units or (sink.chain[-1].end if sink.chain else 0) < simulation.scenario.items:
                return "runs and committers without a fault leave a sink behind"
        return next(self._stored(world), "")

    def _drain(self, world: World) -> World:
        """Every committer commits all that it can."""
        simulation = self._later
        for at in simulation.two_stage:
            while world.sinks[at].units and (ready := simulation.arranged(world.sinks[at]).ready):
                sink = world.sinks[at]
                world = simulation.committed(world, Pick(at, sink.version, tuple(ready), sink.units))
        return world

    def _run_on(self, world: World) -> World:
        """The newest run goes on to its end, alone."""
        simulation = self._later
        for _ in range(2000):
            actor = world.actors[-1]
            if world.broken or not simulation.running(actor):
                return world
            own = (n for n in simulation.moves(world) if n.run == actor.number and not n.fault)
            moves = [move for move in own if not _is_watch(simulation, move)]
            if not moves:
                return world._replace(broken="a run does not end")
            world = moves[0].world
        return world._replace(broken="a run does not end")


def _is_watch(simulation: Simulation, move: Move) -> bool:
    return bool(move.task) and isinstance(simulation.tasks[move.task].action, m.WatchLog)

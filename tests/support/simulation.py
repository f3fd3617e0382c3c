"""Performs the actions of runs in a simulated world, one small effect at a time, with every fault there may be.

A write takes three moves: it is checked and sent, it lands, its answer arrives; so anything may come between. It
lands only on the version that it was checked against, as a conditional put does. A crash leaves what was sent on
its way. A fault is a move that costs some of the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from firnline.epoch import decide as real_core
from firnline.epoch import messages as m
from tests.support.world import Actor, Entry, Rules, Scenario, Sink, Table, Task, World, Write


class Move(NamedTuple):
    """Something that may happen next. `task` is 0 where no task is concerned."""

    verb: str
    run: int
    task: int
    fault: bool
    world: World


class Job(NamedTuple):
    """One task of one run, in the world it stands in. `faults`: whether the budget allows one."""

    world: World
    place: int
    actor: Actor
    number: int
    task: Task
    faults: bool


class Decision(NamedTuple):
    """What the decisions say to an event: the next state, tasks and plans that begin, attempts that are dropped."""

    state: int
    tasks: list[int]
    plans: list[m.Plan]
    dropped: frozenset[str]
    stops: bool
    decided: int


Outcomes: TypeAlias = Iterator[tuple[str, bool, World]]  # verb, whether it is a fault, and what the world is then


class Simulation(Rules):
    """Runs of one pipeline in one world. `core` is the module that decides."""

    def __init__(self, scenario: Scenario, core: ModuleType = real_core) -> None:
        super().__init__(scenario)
        self.core = core
        self.from_outbox: tuple[str, ...] = ()  # sinks that are delivered from the outbox
        self.states: Table[Any] = Table()  # the EpochState of whichever module `core` is
        self.tasks: Table[Task] = Table()
        self.writes: Table[Write] = Table()
        self._steps: dict[tuple[int, m.Event], Decision] = {}

    def start(self) -> World:
        """The world as its first run begins."""
        return self._begin(World(tuple(Sink() for _ in self.names), (), self.scenario.budget))

    def moves(self, world: World) -> Iterator[Move]:
        """Everything that may happen next."""
        budget = world.budget
        for index, actor in enumerate(world.actors):
            if not self.running(actor):
                continue
            for number in dict.fromkeys(actor.tasks):
                job = Job(world, index, actor, number, self.tasks[number], budget.faults > 0)
                for verb, fault, after in self._outcomes(job):
                    if fault:
                        after = after.with_budget(budget._replace(faults=budget.faults - 1))
                    yield Move(verb, actor.number, number, fault, after)
            if budget.crashes:
                after = world.with_budget(budget._replace(crashes=budget.crashes - 1))
                after = self._end(after, index, Actor(actor.number, 0, alive=False))
                yield Move("crashes, another run begins", actor.number, 0, True, self._begin(after))
            if budget.zombies and index == len(world.actors) - 1:
                after = world.with_budget(budget._replace(zombies=budget.zombies - 1))
                yield Move("lives on, another run begins", actor.number, 0, True, self._begin(after))
            if budget.stops and not self.view(actor).stopping:
                after = world.with_budget(budget._replace(stops=budget.stops - 1))
                after = self._tell(after, index, 0, m.StopRequested())
                yield Move("is told to stop", actor.number, 0, self.scenario.once, after)
            if budget.reshards:
                after = world.with_budget(budget._replace(reshards=budget.reshards - 1))
                after = self._tell(after, index, 0, m.ShardsChanged())
                yield Move("hears that its shards change", actor.number, 0, True, after)
        for number in world.late:
            write = self.writes[number]
            after = world._replace(late=tuple(n for n in world.late if n != number))
            yield Move(f"writes late: {write}", write.run, 0, True, self._land(after, write))

    def view(self, actor: Actor) -> Any:
        """The decisions' state of a run."""
        return self.states[actor.state]

    def running(self, actor: Actor) -> bool:
        """Whether a run has neither died nor stopped."""
        return actor.alive and self.view(actor).exit_code is None

    def heard(self) -> Iterator[tuple[int, m.Event]]:
        """Every state and event that the decisions were asked about."""
        return iter(self._steps)

    # -- runs ----------------------------------------------------------------------------------------------

    def _begin(self, world: World) -> World:
        s = self.scenario
        settings = self.core.Settings(
            policy=self.core.Policy(s.policy),
            quorum=s.quorum,
            max_inflight=s.max_inflight,
            restart_attempts=s.restart_attempts,
            once=s.once,
        )
        state = self.states.number(self.core.initial(settings, list(s.sinks), self.from_outbox))
        world = world._replace(actors=(*world.actors, Actor(len(world.actors) + 1, state)))
        return self._tell(world, len(world.actors) - 1, 0, m.Started())

    def _end(self, world: World, index: int, ended: Actor) -> World:
        """A run is no more; what it has sent may still land."""
        if self.scenario.late_writes:
            tasks = (self.tasks[number] for number in world.actors[index].tasks)
            sent = {self.writes.number(task.write) for task in tasks if task.write}
            if sent:
                world = self._prune(world._replace(late=tuple(sorted({*world.late, *sent}))))
        return world.with_actor(index, ended)

    def _tell(self, world: World, index: int, task: int, event: m.Event) -> World:
        """A run hears an event, which ends a task, and takes up what it then decides."""
        actor = world.actors[index]
        key = (actor.state, event)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._decide(*key)
        tasks = list(actor.tasks)
        if task:
            tasks.remove(task)
        tasks += found.tasks
        for action in found.plans:
            tasks.append(self.tasks.number(Task(action, start=self._end_of(world, actor, action.base))))
        plans = actor.plans
        if plans:
            kept = tuple(plan for plan in plans if plan.epoch > found.decided and plan.attempt not in found.dropped)
            if isinstance(event, m.Committed):
                for plan in plans:
                    if plan.attempt == event.attempt and plan.epoch <= found.decided:
                        world = self.concluded(world, plan)
            plans = kept
        tasks.sort()
        number, alive, generation, attempts = actor.number, actor.alive, actor.generation, actor.attempts
        actor = Actor(number, found.state, alive, generation, attempts, plans, tuple(tasks))
        world = world.with_actor(index, actor)
        return self._end(world, index, actor._replace(tasks=(), plans=())) if found.stops else world

    def _decide(self, state: int, event: m.Event) -> Decision:
        """What the decisions say, as what it does to a run; asked once for each state and event."""
        after, actions = self.core.step(self.states[state], event)
        plain = [a for a in actions if not isinstance(a, m.Plan | m.Drop | m.Stop)]
        return Decision(
            self.states.number(after),
            [self.tasks.number(Task(action)) for action in plain],
            [action for action in actions if isinstance(action, m.Plan)],
            frozenset(action.attempt for action in actions if isinstance(action, m.Drop)),
            any(isinstance(action, m.Stop) for action in actions),
            after.decided,
        )

    def _hear(self, job: Job, event: m.Event, world: World | None = None) -> World:
        return self._tell(world or job.world, job.place, job.number, event)

    def _later(self, job: Job, task: Task, world: World | None = None) -> World:
        """The task takes its next step."""
        world = world or job.world
        actor = world.actors[job.place]
        tasks = list(actor.tasks)
        tasks.remove(job.number)
        tasks.append(self.tasks.number(task))
        tasks.sort()
        return world.with_actor(job.place, Actor(*actor[:-1], tuple(tasks)))

    # -- writes --------------------------------------------------------------------------------------------

    def _land(self, world: World, write: Write) -> World:
        """A write takes effect in its sink."""
        sink = world.sinks[write.sink]
        if write.entry is None:
            after = self.registered(sink, write)
            claimant = next((a for a in world.actors if a.number == write.run and a.alive), None)
            if write.sink == 0 and sink.holder not in (0, write.run) and claimant and self.view(claimant).claimed:
                world = world._replace(broken="a run claimed again what another had claimed since")
        else:
            after = sink._replace(version=sink.version + 1, chain=(*sink.chain, write.entry))
            joined = [a.generation for a in world.actors if a.alive and self.view(a).sinks[write.sink].joined]
            # Where there was no table to register in, the fence begins with the first commit.
            if write.generation < (max(joined, default=0) if self.scenario.tables_exist else sink.generation):
                world = world._replace(broken="an older generation wrote where a newer one had joined")
        return self._prune(world.with_sink(write.sink, after))

    def _prune(self, world: World) -> World:
        """Forget writes on their way that can never take effect."""
        if not world.late:
            return world
        writes = ((number, self.writes[number]) for number in world.late)
        return world._replace(late=tuple(n for n, write in writes if self.lands(world.sinks[write.sink], write)))

    def _sent(self, job: Job, write: Write, done: m.Event, unclear: m.Event) -> Outcomes:
        """What may become of a write that was sent: it lands, or its answer, itself or its time is lost."""
        world, task = job.world, job.task
        lands = self.claims if isinstance(task.action, m.Claim) else self.lands
        if not lands(world.sinks[write.sink], write):
            yield "finds the version moved", False, self._later(job, Task(task.action))
            return
        after = self._land(world, write)
        made = write.entry is None and isinstance(task.action, m.Commit)  # the table, not yet the epoch
        yield "lands", False, self._later(job, Task(task.action, answer=None if made else done), after)
        if not job.faults:
            return
        yield "lands, its answer is lost", True, self._later(job, Task(task.action, answer=unclear), after)
        lost = self._later(job, Task(task.action, answer=unclear))
        yield "is lost", True, lost
        if self.scenario.late_writes:
            late = tuple(sorted({*world.late, self.writes.number(write)}))
            yield "is delayed", True, lost._replace(late=late)

    # -- actions -------------------------------------------------------------------------------------------

    def _outcomes(self, job: Job) -> Outcomes:
        """What may come of the next step of a task."""
        world, task = job.world, job.task
        if task.answer is not None:
            return self._answered(job, task.answer)
        match task.action:
            case m.Commit() as action:
                return self._commit(job, action)
            case m.FindReceipt() as action:
                return self._find_receipt(job, action)
            case m.Run(epoch, attempt):
                return self._simple(job, m.Ran(epoch, attempt), m.EpochLost(epoch, attempt))
            case m.StageEntry(epoch, attempt):
                entry = next((plan for plan in job.actor.plans if plan.attempt == attempt), None)
                after = self.staged(world, entry) if entry else world
                return self._simple(job, m.Staged(epoch, attempt), m.EpochLost(epoch, attempt), after)
            case m.Record(epoch):
                return self._simple(job, m.Recorded(epoch), m.RecordFailed(), self.recorded(world, epoch))
            case m.Acknowledge(epoch, _, again):
                failed = m.Acknowledged(epoch, missed=True) if again else m.RecordFailed()
                return self._acknowledge(job, epoch, failed)
            case m.Wait(_, sink):
                return iter([("is over", False, self._hear(job, m.TimerFired(sink)))])
            case m.Plan() as action:
                return self._plan(job, action)
            case m.Claim() as action:
                return self._claim(job, action)
            case m.Join() as action:
                return self._join(job, action)
            case m.ReadSinks():
                return self._read_sinks(job)
        raise AssertionError(task)

    def _answered(self, job: Job, answer: m.Event) -> Outcomes:
        """An answer arrives, or arrives twice; that there is none is noticed once, by the run itself."""
        after = self._hear(job, answer)
        yield f"hears {answer}", False, after
        if job.faults and not isinstance(answer, m.CommitUnclear | m.Failed):
            yield f"hears {answer} twice", True, self._tell(after, job.place, 0, answer)

    def _simple(self, job: Job, done: m.Event, failed: m.Event, after: World | None = None) -> Outcomes:
        """An action that has its effect and its answer in one move, or fails."""
        yield "is done", False, self._hear(job, done, after)
        if job.faults:
            yield "fails", True, self._hear(job, failed)

    def _acknowledge(self, job: Job, epoch: int, failed: m.Event) -> Outcomes:
        """The source takes an acknowledgement or misses it, or the step itself fails."""
        yield from self._simple(job, m.Acknowledged(epoch), failed, self.acknowledged(job.world, epoch))
        if job.faults:
            yield "is missed", True, self._hear(job, m.Acknowledged(epoch, missed=True))

    def _read_sinks(self, job: Job) -> Outcomes:
        """Sinks are read one after the other; runs differ in the order. One that is down is left out."""
        names = [n for n in self.names if n not in self.scenario.dead]
        if job.actor.number % 2:
            names.reverse()
        name = names[len(job.task.read)]
        read = (*job.task.read, self._read(job.world, name))
        if len(read) < len(names):
            yield f"reads {name}", False, self._later(job, Task(job.task.action, read=read))
        else:
            tip, committed = next((tip, log) for name, _, tip, log in read if name == self.names[0])
            epochs = tuple((name, epoch) for name, epoch, _, _ in read if epoch >= 0)
            event = m.SinksRead(tip, epochs, committed=committed, away=self.away(job.world, tip))
            event = replace(event, filling=self.filling(job.world, tip))
            if self.scenario.tells_recorded:
                forgotten = sum(entry.end <= job.world.forgotten for entry in job.world.sinks[0].chain)
                event = replace(event, recorded=job.world.recorded, acknowledged=forgotten)
            else:
                event = replace(event, owed=True)
            yield f"reads {name}", False, self._hear(job, event)
        if job.faults:
            yield "fails", True, self._hear(job, m.Failed(retry=True))

    def _read(self, world: World, name: str) -> tuple[str, int, str, int]:
        """What a sink tells of itself: its name, epoch (-1: unreadable) and tip, and the epoch that its log holds."""
        sink = world.sinks[self.names.index(name)]
        return name, len(sink.chain), sink.tip, len(sink.chain)

    def _plan(self, job: Job, action: m.Plan) -> Outcomes:
        world, actor = job.world, job.actor
        start = max(job.task.start, world.forgotten)  # a source skips what it has forgotten without a word
        if start >= self.scenario.items:
            yield "finds nothing", False, self._hear(job, m.NothingToPlan())
        else:
            attempt = f"{actor.number}.{actor.attempts + 1}"
            event = m.Planned(action.epoch, attempt, action.base)
            made = Entry(action.epoch, attempt, action.base, start, self.cut(actor, start))
            for verb, fault, entry, after in self.made(job, made):
                planner = after.actors[job.place]._replace(attempts=actor.attempts + 1, plans=(*actor.plans, entry))
                yield f"makes {attempt}{verb}", fault, self._hear(job, event, after.with_actor(job.place, planner))
        if job.faults:
            yield "fails", True, self._hear(job, m.Failed(retry=True))

    def made(self, job: Job, entry: Entry) -> Iterator[tuple[str, bool, Entry, World]]:
        """The entries that a plan may become."""
        yield "", False, entry, job.world

    def away(self, world: World, tip: str) -> tuple[str, ...]:
        """The sinks that the epoch of an attempt has set aside."""
        return ()

    def filling(self, world: World, tip: str) -> tuple[str, ...]:
        """The sinks that, by the epoch of an attempt, still get what was before they were added."""
        return ()

    def _end_of(self, world: World, actor: Actor, attempt: str) -> int:
        """Where the slice of an attempt ends that is decided or in flight."""
        return next((e.end for e in (*world.sinks[0].chain, *actor.plans) if e.attempt == attempt), 0)

    def _claim(self, job: Job, action: m.Claim) -> Outcomes:
        world, actor, sink, failed = job.world, job.actor, job.world.sinks[0], m.Failed(retry=True)
        write = job.task.write
        if write is not None:
            world = world.with_actor(job.place, actor._replace(generation=write.generation))
            claimed = m.Claimed(*write.tip, away=self.away(world, write.tip[1]))
            claimed = replace(claimed, filling=self.filling(world, write.tip[1]))
            yield from self._sent(job._replace(world=world), write, claimed, failed)
            return
        tip = (len(sink.chain), sink.tip)
        claimed = m.Claimed(*tip, away=self.away(world, sink.tip), filling=self.filling(world, sink.tip))
        if self.missing(sink):
            world = world.with_actor(job.place, actor._replace(generation=1))
            yield "finds no table", False, self._later(job, Task(job.task.action, answer=claimed), world)
        elif action.again and sink.holder != actor.number:
            yield "is refused", False, self._hear(job, m.Fenced())
        elif sink.holder == actor.number and not action.again:  # an earlier claim of ours, whose answer was lost
            world = world.with_actor(job.place, actor._replace(generation=sink.generation))
            yield "finds its own", False, self._later(job, Task(job.task.action, answer=claimed), world)
        else:
            write = Write(0, sink.version, actor.number, sink.generation + 1, tip)
            yield "is sent", False, self._later(job, Task(job.task.action, write=write))
        if job.faults:
            yield "fails", True, self._hear(job, failed)

    def _join(self, job: Job, action: m.Join) -> Outcomes:
        at = self.names.index(action.sink)
        actor, sink, failed = job.actor, job.world.sinks[at], m.Failed(retry=True, sink=action.sink)
        joined = m.Joined(action.sink, len(sink.chain))
        if action.sink in self.scenario.dead:
            yield "finds it down", False, self._hear(job, failed)
        elif job.task.write is not None:
            yield from self._sent(job, job.task.write, joined, failed)
        elif sink.generation > actor.generation:
            yield "is refused", False, self._hear(job, m.Fenced())
        elif (sink.holder, sink.generation) == (actor.number, actor.generation) or self.missing(sink):
            yield "finds its own, or no table", False, self._hear(job, joined)
        else:
            write = Write(at, sink.version, actor.number, actor.generation, (len(sink.chain), sink.tip))
            yield "is sent", False, self._later(job, Task(action, write=write))

    def _commit(self, job: Job, action: m.Commit) -> Outcomes:
        at = self.names.index(action.sink)
        world, sink, unclear = job.world, job.world.sinks[at], m.CommitUnclear(action.sink, action.epoch)
        if action.sink in self.scenario.dead:
            yield "finds it down", False, self._hear(job, unclear)
            return
        if (write := job.task.write) is not None:
            attempt = write.entry.attempt if write.entry else ""
            yield from self._sent(job, write, m.Committed(action.sink, action.epoch, attempt), unclear)
            if job.faults and at == 0 and write.entry and self.lands(sink, write):
                # somebody rewrites the table: the epoch fits no more
                after = self._prune(world.with_sink(0, sink._replace(version=sink.version + 1)))
                yield "finds a new table", True, self._hear(job, m.EpochLost(action.epoch, attempt), after)
            return
        entry = self.entry_for(world, job.actor, at, action.epoch)
        if entry is None:
            yield "finds no entry", False, world._replace(broken="told to commit what has no entry")
        elif self.registers(sink, job.actor):
            write = Write(at, sink.version, job.actor.number, job.actor.generation, (len(sink.chain), sink.tip))
            yield "registers first", False, self._later(job, Task(action, write=write))
        elif self.repeats(sink, entry):
            yield "was there", False, self._hear(job, m.Committed(action.sink, action.epoch, entry.attempt))
        elif self.refuses(sink, job.actor, entry):
            yield "is refused", False, self._hear(job, m.Fenced())
        else:
            if entry.start < world.forgotten:
                world = world._replace(broken="the source has forgotten what a commit needs")
            tip = (len(sink.chain), sink.tip)
            write = Write(at, sink.version, job.actor.number, job.actor.generation, tip, entry)
            yield "is sent", False, self._later(job, Task(action, write=write), world)

    def entry_for(self, world: World, actor: Actor, at: int, epoch: int) -> Entry | None:
        """What a commit writes: our plan in the deciding sink, the decided entry in a further one."""
        chain = world.sinks[0].chain
        if at == 0:
            return next((plan for plan in actor.plans if plan.epoch == epoch), None)
        return self.replayed(world, chain[epoch - 1]) if epoch <= len(chain) else None

    def _find_receipt(self, job: Job, action: m.FindReceipt) -> Outcomes:
        at = self.names.index(action.sink)
        unclear = m.CommitUnclear(action.sink, action.epoch)
        if action.sink in self.scenario.dead:
            yield "finds it down", False, self._hear(job, unclear)
            return
        entry = self.entry_for(job.world, job.actor, at, action.epoch)
        held = self.holds(job.world.sinks[at], entry) if entry else None
        answer: m.Event = m.ReceiptAbsent(action.sink, action.epoch)
        if held is not None:
            answer = m.Committed(action.sink, action.epoch, held)
        yield "is answered", False, self._later(job, Task(action, answer=answer))
        if job.faults:
            yield "fails", True, self._hear(job, unclear)

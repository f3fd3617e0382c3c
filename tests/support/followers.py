"""Followers in the simulated world: heads, lanes, the outbox, sweeps, backups, and people who edit.

A follower's own transaction carries its head. The last follower may have lanes, as Kafka has: a lane is fenced by its
newest producer alone, transactions of several lanes are open at once, and no lane begins an epoch before all lanes
hold the one before. The others compare the head, as a database does. Items alternate between two keys.

What a checkpoint remembers of followers is the real `known.next_known`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from firnline.epoch import decide as real_core
from firnline.epoch import messages as m
from firnline.sinks.known import BEGINNING, KnownSink, next_known
from tests.support.explore import Judge
from tests.support.simulation import Job, Move, Outcomes, Simulation
from tests.support.world import Actor, Entry, Lane, Row, Scenario, Sink, Target, Task, World, Write

_LISTED, _DOOMED = "listed", "doomed"
LOST = 4  # the exit code of a run that cannot serve a follower any more
PERSON = 99  # the "run" of somebody who edits


class Followers(Simulation):
    """Runs of one pipeline of which some sinks, `scenario.followers`, are delivered from the outbox."""

    def __init__(self, scenario: Scenario, core: ModuleType = real_core) -> None:
        super().__init__(scenario, core)
        self.from_outbox = scenario.followers
        self.places = tuple(self.names.index(name) for name in scenario.followers)
        self.laned = self.places[-1]
        self._options: list[Any] = [
            SimpleNamespace(name=name, target=name, renamed_from="", head_name=name) for name in scenario.followers
        ]

    def start(self) -> World:
        world = super().start()
        world = world._replace(sinks=tuple(Target() if n in self.places else s for n, s in enumerate(world.sinks)))
        if self.scenario.stranger:
            lane = Lane(1, PERSON, 1, f"{PERSON}.1")
            world = world.with_sink(self.laned, Target((lane,), ((1, 1), (1, 2)), 1, went_back=True))
        return self._with_history(world) if self.scenario.filled else world

    def _with_history(self, world: World) -> World:
        """The world after an epoch of two items without the filled sink, and the edit that begins to fill it."""
        known = {name: KnownSink(name, 0, 0, name) for name in self.scenario.followers}
        first = Entry(1, f"{PERSON}.1", "", 0, 2, known=tuple(known.values()))
        known[self.scenario.filled] = KnownSink(
            self.scenario.filled, 0, 0, self.scenario.filled, filled_from=BEGINNING, filled_since=1
        )
        edit = Entry(2, f"{PERSON}.2", first.attempt, 2, 2, known=tuple(known.values()))
        deciding = Sink(version=2, generation=1, holder=PERSON, chain=(first, edit))
        sinks: list[Any] = [deciding]
        for at, name in enumerate(self.names[1:], 1):
            held = Lane(1, PERSON, 2, edit.attempt)
            level = Target((held,), self.lane_rows(at, first, 0), 2)
            sinks.append(Target() if name == self.scenario.filled else level)
        return world._replace(sinks=tuple(sinks), ledger=(first, edit), recorded=2)

    # -- rules: what the followers hold --------------------------------------------------------------------

    def setting(self, values: tuple[int, ...], actor: Actor) -> int:
        """What the spec of a run says."""
        return values[min(actor.number, len(values)) - 1]

    def has_producers(self, at: int) -> bool:
        """Whether a follower is fenced by producers."""
        return at == self.laned and max(self.scenario.lanes) > 1

    def claimed_lanes(self, target: Target, at: int, actor: Actor) -> int:
        """How many lanes a run claims: every one that the sink ever had."""
        return max(len(target.lanes), self.setting(self.scenario.lanes, actor) if at == self.laned else 1)

    def read_lane(self, target: Target, lane: int) -> Lane | None:
        """The head of a lane, which has no open transaction; None if there is none."""
        return target.lanes[lane] if lane < len(target.lanes) and target.lanes[lane].has_head else None

    def opened(self, target: Target) -> tuple[Lane, ...]:
        """What an open transaction hides from readers of its checkpoint partition: nothing but itself."""
        return ()

    def lane_rows(self, at: int, entry: Entry, lane: int) -> tuple[Row, ...]:
        """The rows of an epoch that a lane delivers, by the lanes that the entry names."""
        if entry.back_to >= 0 or (entry.start == entry.end and entry.copied != at):
            return ()
        lanes = entry.lanes if at == self.laned else 1
        first = 0 if entry.copied == at else entry.start
        return tuple((entry.epoch, item) for item in range(first + 1, entry.end + 1) if item % 2 % lanes == lane)

    def first_row(self, lane: Lane, size: int) -> int:
        """The first row of a partial epoch that a lane lacks: heads count rows, whatever the size of a range was."""
        return lane.row

    def next_row(self, row: int, size: int, count: int) -> int:
        """What the head says after one more range."""
        return min(row + size, count)

    def undone(self, world: World, at: int, to: int) -> World:
        """The world once a follower has gone back: its own rows of later epochs are gone."""
        target = world.sinks[at]
        return world.with_sink(at, target._replace(rows=tuple(row for row in target.rows if row[0] <= to)))

    def goes_back(self, at: int) -> bool:
        """Whether a follower can undo epochs; one that cannot is left as it is."""
        return not self.has_producers(at)

    def is_on_chain(self, world: World, actor: Actor, lane: Lane) -> bool:
        """Whether the newest epoch of a head is a decided one, by its entry and not by its number."""
        chain = world.sinks[0].chain[: self.view(actor).decided]
        return lane.epoch == 0 or (lane.epoch <= len(chain) and chain[lane.epoch - 1].attempt == lane.attempt)

    def producer_lost(self, job: Job) -> World:
        """A run finds that its producer is fenced: it makes another one, and looks at the head."""
        return self._later(job, Task(job.task.action))

    # -- rules: what is remembered and forgotten -----------------------------------------------------------

    def known(self, world: World, actor: Actor, attempt: str) -> dict[str, KnownSink]:
        """What the checkpoint of an attempt remembers."""
        entries = (*world.ledger, *actor.plans)
        entry = next((entry for entry in entries if entry.attempt == attempt), None)
        return dict(zip(self.scenario.followers, entry.known, strict=False)) if entry else {}

    def away(self, world: World, tip: str) -> tuple[str, ...]:
        entry = next((entry for entry in world.sinks[0].chain if entry.attempt == tip), None)
        known = zip(self.scenario.followers, entry.known if entry else (), strict=False)
        return tuple(name for name, one in known if one.set_aside)

    def filling(self, world: World, tip: str) -> tuple[str, ...]:
        entry = next((entry for entry in world.sinks[0].chain if entry.attempt == tip), None)
        known = zip(self.scenario.followers, entry.known if entry else (), strict=False)
        return tuple(name for name, one in known if one.filled_from)

    def beginning(self, world: World, actor: Actor, at: int, target: Target) -> int | None:
        """The epoch that a follower goes on from; None: it lost epochs that the outbox no longer has."""
        known = self.known(world, actor, self.view(actor).tip).get(self.names[at])
        held = target.epoch
        if known is None:
            return held if held or not self.view(actor).decided else int(self.view(actor).decided)
        if held < known.held and known.held > known.born and self.lacks(world, actor, max(held, known.born)):
            return None
        return max(held, known.born)

    def lacks(self, world: World, actor: Actor, epoch: int) -> bool:
        """Whether outbox or ledger lack a later epoch."""
        later = world.sinks[0].chain[epoch : self.view(actor).decided]
        if self.scenario.filled:  # rows that the outbox lacks are made again
            return any(entry.epoch < world.folded for entry in later)
        return any(entry.attempt not in world.outbox or entry.epoch < world.folded for entry in later)

    def heads(self, actor: Actor) -> dict[str, int]:
        """What a run knows of the sinks that are not set aside."""
        return {sink.name: sink.epoch for sink in self.view(actor).sinks if not sink.away}

    def mark(self, actor: Actor) -> int:
        """The outbox mark: the epoch of the slowest sink that is neither set aside nor being filled."""
        filling = {sink.name for sink in self.view(actor).sinks if sink.filling}
        return min(epoch for name, epoch in self.heads(actor).items() if name not in filling)

    def fold_below(self, actor: Actor, floor: int, waiting: list[int]) -> int:
        """The epoch below which ledger entries may be folded."""
        return min([floor, *(epoch + 1 for epoch in self.heads(actor).values()), *waiting])

    def acknowledged(self, world: World, epoch: int) -> World:
        later = world.sinks[0].chain[epoch - 1 :]
        if not later:
            return super().acknowledged(world, epoch)
        return world._replace(forgotten=max(world.forgotten, min(entry.end for entry in later)))

    def decides_aside(self, job: Job, entry: Entry) -> World:
        """A plan that sets a follower aside changes nothing before it is decided."""
        return job.world

    # -- plans ---------------------------------------------------------------------------------------------

    def cut(self, actor: Actor, start: int) -> int:
        return min(self.scenario.items, start + 2)

    def made(self, job: Job, entry: Entry) -> Iterator[tuple[str, bool, Entry, World]]:
        before, heads = self.known(job.world, job.actor, entry.base), self.heads(job.actor)
        entry = entry._replace(lanes=self.setting(self.scenario.lanes, job.actor))

        filling = [sink.name for sink in self.view(job.actor).sinks if sink.filling]

        def remembering(reasons: dict[str, str]) -> Entry:
            known = next_known(before, self._options, entry.epoch, heads, reasons, filling)
            return entry._replace(known=tuple(known[name] for name in self.scenario.followers))

        yield "", False, remembering({}), job.world
        budget = job.world.budget
        for name, required in self.scenario.sinks:
            if budget.asides and name in self.from_outbox and not required and name in heads:
                after = job.world.with_budget(budget._replace(asides=budget.asides - 1))
                aside = remembering({name: "it lags"})
                yield f" without {name}", False, aside, self.decides_aside(job._replace(world=after), aside)

    def staged(self, world: World, entry: Entry) -> World:
        return super().staged(world._replace(outbox=world.outbox | {entry.attempt}), entry)

    def _hear(self, job: Job, event: m.Event, world: World | None = None) -> World:
        after = super()._hear(job, event, world)
        if not (isinstance(event, m.Committed) and event.sink == self.names[0]):
            return after
        view = self.view(after.actors[job.place])
        for name in self.away(after, event.attempt):
            if view.exit_code is None and any(sink.name == name and not sink.away for sink in view.sinks):
                actor = after.actors[job.place]
                task = self.tasks.number(Task(m.Commit(self.names[0], event.epoch), answer=m.SetAside(name)))
                after = after.with_actor(job.place, actor._replace(tasks=tuple(sorted((*actor.tasks, task)))))
        return after

    # -- reading and joining -------------------------------------------------------------------------------

    def _read(self, world: World, name: str) -> tuple[str, int, str, int]:
        at = self.names.index(name)
        if at not in self.places:
            return super()._read(world, name)
        target, chain = world.sinks[at], world.sinks[0].chain
        known = dict(zip(self.scenario.followers, chain[-1].known if chain else (), strict=False)).get(name)
        if known is not None and known.set_aside:
            return name, known.held, "", 0
        ours = all(lane.epoch <= len(chain) and self._is_of(chain, lane) for lane in target.lanes)
        return name, target.epoch if ours else -1, "", 0

    def _is_of(self, chain: tuple[Entry, ...], lane: Lane) -> bool:
        return lane.epoch == 0 or chain[lane.epoch - 1].attempt == lane.attempt

    def _join(self, job: Job, action: m.Join) -> Outcomes:
        at = self.names.index(action.sink)
        if at not in self.places:
            yield from super()._join(job, action)
            return
        world, actor, target = job.world, job.actor, job.world.sinks[at]
        failed = m.Failed(retry=True, sink=action.sink)
        if action.sink in self.scenario.dead:
            yield "finds it down", False, self._hear(job, failed)
            return
        if job.task.write is not None:
            yield from self._follow(job, job.task.write, failed)
            return
        held = [self.read_lane(target, n) for n in range(self.claimed_lanes(target, at, actor))]
        ours = [lane is not None and (lane.generation, lane.run) == (actor.generation, actor.number) for lane in held]
        if any(lane is not None and lane.generation > actor.generation for lane in held):
            yield "is refused", False, self._hear(job, m.Fenced(), self._steal(world, actor, at))
        elif not all(self.is_on_chain(world, actor, lane) for lane in held if lane is not None):
            yield "finds another history", False, self._hear(job, m.Failed(False, LOST, action.sink))
        elif all(ours):
            epoch = min(lane.epoch for lane in held if lane is not None)
            yield "holds all lanes", False, self._hear(job, m.Joined(action.sink, epoch))
        elif (begin := self.beginning(world, actor, at, target)) is None:
            yield "finds that it went back", False, self._hear(job, m.Failed(False, LOST, action.sink))
        elif len(held) > len(target.lanes):
            lanes = target.lanes + tuple(Lane(has_head=False) for _ in held[len(target.lanes) :])
            after = self._prune(world.with_sink(at, target._replace(lanes=lanes)))
            yield f"makes {len(lanes)} lanes", False, self._later(job, job.task, after)
        else:
            number = ours.index(False)
            if self.has_producers(at):
                world = self._with_producer(world, actor, at, number)
                target = world.sinks[at]
            before, chain = target.lanes[number], world.sinks[0].chain
            lane = self.read_lane(target, number) or before._replace(has_head=True, epoch=0)
            if not before.has_head or lane.epoch < begin:
                lane = lane._replace(epoch=begin, attempt=chain[begin - 1].attempt if begin else "", partial="", row=0)
            head = lane._replace(generation=actor.generation, run=actor.number)
            write = Write(at, 0, actor.number, actor.generation, (0, ""), lane=number, expected=before, head=head)
            yield f"claims lane {number}", False, self._later(job, Task(action, write=write), world)
        if job.faults:
            yield "fails", True, self._hear(job, failed)

    def _with_producer(self, world: World, actor: Actor, at: int, lane: int) -> World:
        """A run makes a new producer for a lane, which ends the transaction that is open there."""
        target = world.sinks[at]
        lanes = list(target.lanes)
        lanes[lane] = lanes[lane]._replace(producer=lanes[lane].producer + 1, owner=actor.number, open=None)
        return self._prune(world.with_sink(at, target._replace(lanes=tuple(lanes))))

    def _steal(self, world: World, actor: Actor, at: int) -> World:
        """An older run makes producers before it reads that a newer generation holds the sink."""
        target = world.sinks[at]
        if not self.has_producers(at) or any(lane.owner == actor.number for lane in target.lanes):
            return world
        return self._with_producer(world, actor, at, 0)

    # -- delivery ------------------------------------------------------------------------------------------

    def lands(self, sink: Any, write: Write) -> bool:
        if write.head is None:
            return super().lands(sink, write)
        lane = sink.lanes[write.lane] if write.lane < len(sink.lanes) else None
        if lane is None or write.expected is None:
            return False
        if self.has_producers(write.sink):
            return bool((lane.producer, lane.owner) == (write.expected.producer, write.expected.owner))
        return bool(lane == write.expected)

    def _land(self, world: World, write: Write) -> World:
        if write.head is None:
            return super()._land(world, write)
        target, entry = world.sinks[write.sink], write.entry
        lanes = list(target.lanes)
        lane, held = write.head._replace(open=None), 0
        newest = max((one.epoch for one in lanes if one.has_head), default=0)
        if entry is None and lane.epoch > newest:  # it begins here, after a gap or in an emptied target
            target = target._replace(given=target.rows, since=lane.epoch)
        held, lanes[write.lane] = lanes[write.lane].generation, lane
        target = target._replace(lanes=tuple(lanes), rows=target.rows + write.rows)
        target = target._replace(highest=max(target.highest, target.epoch))
        world = world.with_sink(write.sink, target)
        if entry is not None:
            if write.generation < held:
                world = world._replace(broken="an older generation wrote where a newer one had joined")
            if entry.back_to >= 0 and self.goes_back(write.sink):
                world = self.undone(world, write.sink, entry.back_to)
        return self._prune(world)

    def _follow(self, job: Job, write: Write, unclear: m.Event) -> Outcomes:
        """What may become of a write to a follower that was sent."""
        world, task = job.world, job.task
        if not self.lands(world.sinks[write.sink], write):
            yield "finds the head moved", False, self._later(job, Task(task.action))
            return
        after = self._land(world, write)
        answer = None
        if isinstance(task.action, m.Commit) and after.sinks[write.sink].epoch >= task.action.epoch and write.entry:
            answer = m.Committed(task.action.sink, task.action.epoch, write.entry.attempt)
        yield "lands", False, self._later(job, Task(task.action, answer=answer), after)
        if not job.faults:
            return
        yield "lands, its answer is lost", True, self._later(job, Task(task.action, answer=unclear), after)
        lost = self._later(job, Task(task.action, answer=unclear))
        yield "is lost", True, lost
        if self.scenario.late_writes:
            late = tuple(sorted({*world.late, self.writes.number(write)}))
            yield "is delayed", True, lost._replace(late=late)

    def _commit(self, job: Job, action: m.Commit) -> Outcomes:
        at = self.names.index(action.sink)
        if at not in self.places:
            yield from super()._commit(job, action)
            return
        world, actor, target = job.world, job.actor, job.world.sinks[at]
        unclear = m.CommitUnclear(action.sink, action.epoch)
        if action.sink in self.scenario.dead:
            yield "finds it down", False, self._hear(job, unclear)
            return
        if job.task.write is not None:
            yield from self._follow(job, job.task.write, unclear)
            return
        generations = [lane.generation for lane in target.lanes if lane.has_head]
        held = self.claimed_epoch(target, at, actor)
        entry = self.entry_for(world, actor, at, action.epoch)
        lost = entry is not None and entry.attempt not in world.outbox and entry.back_to < 0
        if entry is None or entry.epoch < world.folded or (lost and action.sink != self.scenario.filled):
            yield "finds no rows", False, self._hear(job, m.Failed(False, LOST, action.sink))
        elif max(generations, default=0) > actor.generation:
            yield "is refused", False, self._hear(job, m.Fenced(), self._steal(world, actor, at))
        elif held < action.epoch - 1 or min(generations, default=0) < actor.generation:
            yield "finds that it went back", False, self._hear(job, m.WentBack(action.sink))
        elif held >= action.epoch:
            yield "was there", False, self._hear(job, m.Committed(action.sink, action.epoch, entry.attempt))
        else:
            yield from self._deliver(job, action, at, entry)

    def claimed_epoch(self, target: Target, at: int, actor: Actor) -> int:
        """The newest epoch that every lane holds that a run looks at."""
        return target._replace(lanes=target.lanes[: self.claimed_lanes(target, at, actor)]).epoch

    def _deliver(self, job: Job, action: m.Commit, at: int, entry: Entry) -> Outcomes:
        """Every lane that lacks the epoch may go on."""
        world, actor, target = job.world, job.actor, job.world.sinks[at]
        size = self.setting(self.scenario.ranges, actor)
        for number in range(self.claimed_lanes(target, at, actor)):
            lane = target.lanes[number]
            if lane.epoch >= entry.epoch:
                continue
            if self.has_producers(at) and lane.owner != actor.number:
                made = self._with_producer(world, actor, at, number)
                lost = bool(lane.owner) and lane.run == actor.number
                after = self.producer_lost(job._replace(world=made)) if lost else self._later(job, job.task, made)
                yield f"makes a producer for lane {number}", False, after
            elif self.has_producers(at) and lane.open is None:
                lanes = list(target.lanes)
                lanes[number] = lane._replace(open=self.opened(target))
                after = world.with_sink(at, target._replace(lanes=tuple(lanes)))
                yield f"begins in lane {number}", False, self._later(job, job.task, after)
            else:
                rows = self.lane_rows(at, entry, number)
                first = self.first_row(lane, size) if lane.partial else 0
                row = self.next_row(lane.row if lane.partial else 0, size, len(rows))
                last = self.is_last(row, size, len(rows))
                head = lane._replace(partial=entry.attempt, row=row)
                if last:
                    head = lane._replace(epoch=entry.epoch, attempt=entry.attempt, partial="", row=0)
                sent = rows[first : first + size]
                ids = (at, 0, actor.number, actor.generation, (0, ""))
                write = Write(*ids, entry, lane=number, expected=lane, head=head, rows=sent)
                yield f"sends lane {number}", False, self._later(job, Task(action, write=write))

    def is_last(self, row: int, size: int, count: int) -> bool:
        """Whether an epoch is complete with this head."""
        return row >= count

    def _find_receipt(self, job: Job, action: m.FindReceipt) -> Outcomes:
        at = self.names.index(action.sink)
        if at not in self.places or action.sink in self.scenario.dead:
            yield from super()._find_receipt(job, action)
            return
        world, target = job.world, job.world.sinks[at]
        if self.has_producers(at):  # a new producer after every unclear answer
            for number, lane in enumerate(target.lanes):
                if lane.owner == job.actor.number:
                    world = self._with_producer(world, job.actor, at, number)
        entry = self.entry_for(world, job.actor, at, action.epoch)
        answer: m.Event = m.ReceiptAbsent(action.sink, action.epoch)
        if entry and self.claimed_epoch(target, at, job.actor) >= action.epoch:
            answer = m.Committed(action.sink, action.epoch, entry.attempt)
        yield "is answered", False, self._later(job, Task(action, answer=answer), world)
        if job.faults:
            yield "fails", True, self._hear(job, m.CommitUnclear(action.sink, action.epoch))

    # -- sweep and fold ------------------------------------------------------------------------------------

    def _acknowledge(self, job: Job, epoch: int, failed: m.Event) -> Outcomes:
        world, read = job.world, job.task.read
        done = m.Acknowledged(epoch)
        if read and read[0][0] == _LISTED:
            tasks = (self.tasks[number] for number in job.actor.tasks)
            unheard = any(isinstance(task.answer, m.Claimed) for task in tasks)  # it knows its older generation
            if world.sinks[0].holder != job.actor.number or unheard:
                yield "may not sweep", False, self._hear(job, m.Fenced())
                return
            listed = {attempt for _, _, attempt, _ in read}
            waiting = {e.attempt: e.epoch for e in world.sinks[0].chain if e.attempt in listed}
            keep = {attempt for attempt, one in waiting.items() if one > self.mark(job.actor)}
            keep |= {plan.attempt for plan in job.actor.plans}
            below = self.fold_below(job.actor, epoch, [waiting[attempt] for attempt in keep if attempt in waiting])
            doomed = tuple((_DOOMED, below, attempt, 0) for attempt in sorted(listed - keep))
            task = Task(job.task.action, read=doomed or ((_DOOMED, below, "", 0),))
            yield "looks what may go", False, self._later(job, task)
        elif read:
            gone = {attempt for _, _, attempt, _ in read}
            after = world._replace(outbox=world.outbox - gone, folded=max(world.folded, read[0][1]))
            yield "sweeps and folds", False, self._hear(job, done, after)
        else:
            yield from super()._acknowledge(job, epoch, failed)
            again = isinstance(job.task.action, m.Acknowledge) and job.task.action.again
            if self.scenario.sweeps and not again and world.outbox:
                listing = tuple((_LISTED, 0, attempt, 0) for attempt in sorted(world.outbox))
                after = self.acknowledged(world, epoch)
                yield "lists the outbox", False, self._later(job, Task(job.task.action, read=listing), after)

    # -- what happens without a run ------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[Move]:
        yield from super().moves(world)
        if world.budget.backs:
            yield from self._backups(world)
        if world.budget.edits and world.sinks[0].chain:
            yield from self._edits(world)

    def _backups(self, world: World) -> Iterator[Move]:
        """A follower is emptied, or restored as it was after an older epoch."""
        after = world.with_budget(world.budget._replace(backs=world.budget.backs - 1))
        chain = world.sinks[0].chain
        for at in self.places:
            target = world.sinks[at]
            for epoch in range(target.since, target.epoch):
                lanes = tuple(Lane(epoch=epoch, attempt=chain[epoch - 1].attempt) for _ in target.lanes)
                older = target._replace(lanes=lanes if epoch else (), rows=target.given, went_back=True)
                for entry in chain[target.since : epoch]:
                    for number in range(len(target.lanes)):
                        older = older._replace(rows=older.rows + self.lane_rows(at, entry, number))
                verb = f"{self.names[at]} goes back to epoch {epoch}"
                yield Move(verb, 0, 0, True, self._prune(after.with_sink(at, older)))

    def _edits(self, world: World) -> Iterator[Move]:
        """Somebody takes up a follower that is set aside, or goes back by an epoch; then another run begins."""
        chain, after = world.sinks[0].chain, world.with_budget(world.budget._replace(edits=world.budget.edits - 1))
        tip = chain[-1]
        if self.settled(world) < tip.epoch:
            return  # an edit brings every other sink up to date first
        for n, (at, one) in enumerate(zip(self.places, tip.known, strict=True)):
            if one.set_aside:
                name = self.names[at]
                entry = Entry(tip.epoch + 1, f"{PERSON}.{tip.epoch + 1}", tip.attempt, tip.end, tip.end, tip.lanes)
                resumed = KnownSink(name, entry.epoch, entry.epoch, name)
                known = (*tip.known[:n], resumed, *tip.known[n + 1 :])
                yield Move(f"{name} is resumed", 0, 0, True, self._edited(after, entry._replace(known=known)))
                known = (*tip.known[:n], KnownSink(name, tip.epoch, tip.epoch, name), *tip.known[n + 1 :])
                emptied = Target(highest=world.sinks[at].highest, went_back=world.sinks[at].went_back)
                copied = entry._replace(known=known, copied=at)
                yield Move(f"{name} is copied anew", 0, 0, True, self._edited(after.with_sink(at, emptied), copied))
        level = all(world.sinks[at].epoch == tip.epoch for at in self.places if self.goes_back(at))
        quiet = not any(self.running(actor) for actor in world.actors)
        if tip.epoch > 1 and tip.back_to < 0 and tip.end > tip.start and level and quiet:
            end = chain[-2].end
            entry = Entry(tip.epoch + 1, f"{PERSON}.{tip.epoch + 1}", tip.attempt, end, end, tip.lanes, tip.known)
            if end >= world.forgotten:
                verb = f"somebody goes back to epoch {tip.epoch - 1}"
                yield Move(verb, 0, 0, True, self._edited(after, entry._replace(back_to=tip.epoch - 1)))

    def _edited(self, world: World, entry: Entry) -> World:
        """The deciding sink after an edit that claims and decides; another run begins."""
        sink = world.sinks[0]
        decided = sink._replace(
            version=sink.version + 1, generation=sink.generation + 1, holder=PERSON, chain=(*sink.chain, entry)
        )
        world = self.staged(world.with_sink(0, decided), entry)
        return self._begin(self._prune(world))

    def counted(self, world: World) -> list[Sink]:
        chain = world.sinks[0].chain
        sinks = zip(world.sinks, self.scenario.sinks, strict=True)
        held = [sink.highest if n in self.places else len(sink.chain) for n, (sink, _) in enumerate(sinks)]
        away, filling = self.away(world, world.sinks[0].tip), self.filling(world, world.sinks[0].tip)
        if self.scenario.policy == "quorum":
            others = [0 if name in filling else held[n] for n, name in enumerate(self.names)]  # set aside or not
            best = sorted(others[1:], reverse=True)[: self.scenario.quorum - 1]
            return [Sink(chain=chain[:count]) for count in (held[0], *best)]
        uncounted = {*away, *filling}
        needed = [n for n, (name, required) in enumerate(self.scenario.sinks) if required and name not in uncounted]
        return [Sink(chain=chain[: held[n]]) for n in needed]


class FollowersJudge(Judge):
    """Says which promise a world with followers breaks."""

    simulation: Followers

    def _stored(self, world: World) -> Iterator[str]:
        simulation, chain = self.simulation, world.sinks[0].chain
        before = Entry(0, "", "", 0, 0)
        for entry in chain:
            if entry.epoch != before.epoch + 1 or entry.base != before.attempt:
                yield "an epoch stands on another one than it was planned on"
            if entry.back_to < 0 and entry.start != before.end:
                yield "the deciding sink holds items twice, or has a gap"
            if entry not in world.ledger:
                yield "a sink holds an epoch that has no ledger entry"
            before = entry
        if len(chain) > simulation.settled(world) + 1:
            yield "an epoch was decided before the one before it was settled"
        safe = len(chain) - 1
        if world.forgotten > (min(entry.end for entry in chain[safe - 1 :]) if safe > 0 else 0):
            yield "the source forgot what a recovery may need"
        away = simulation.away(world, world.sinks[0].tip)
        for at in simulation.places:
            yield from self._follower(world, at, is_away=simulation.names[at] in away)

    def _follower(self, world: World, at: int, *, is_away: bool) -> Iterator[str]:
        simulation, chain, target = self.simulation, world.sinks[0].chain, world.sinks[at]
        if simulation.scenario.stranger and target.lanes and target.lanes[0].run == PERSON:
            return
        for lane in (lane for lane in target.lanes if lane.has_head):
            named = chain[lane.epoch - 1].attempt if 0 < lane.epoch <= len(chain) else ""
            if lane.attempt != named or (lane.partial and lane.partial not in {e.attempt for e in chain}):
                yield "a follower holds what was not decided"
                return
        rows = list(target.given)
        for entry in chain[target.since :]:
            if entry.back_to >= 0 and simulation.goes_back(at) and target.epoch >= entry.epoch:
                rows = [row for row in rows if row[0] <= entry.back_to]
            for number, lane in enumerate(target.lanes):
                mine = simulation.lane_rows(at, entry, number)
                rows += mine if lane.epoch >= entry.epoch else mine[: lane.row] if lane.partial == entry.attempt else ()
        n = simulation.places.index(at)
        if target.since and target.since not in {entry.known[n].born for entry in chain}:
            yield "a follower has lost rows: it began anew, and nobody decided that"
        if sorted(rows) != sorted(target.rows):
            found = "has lost rows" if set(rows) - set(target.rows) else "has rows twice, or rows that its head lacks"
            yield f"a follower {found}"
        for key in (0, 1):
            mine = tuple(row for row in target.rows[len(target.given) :] if row[1] % 2 == key)
            if list(mine) != sorted(mine):
                yield "a follower has rows of one key out of order"
        if max((lane.epoch for lane in target.lanes), default=0) > max(target.epoch, target.since) + 1:
            yield "a lane began an epoch before all lanes held the one before"
        known = dict(zip(simulation.scenario.followers, chain[-1].known if chain else (), strict=False))
        one = known.get(simulation.names[at])
        if is_away or target.went_back:
            return
        if simulation.names[at] == simulation.scenario.filled:
            if world.folded > target.epoch + 1:
                yield "a ledger entry is gone that a sink needs which is being filled"
            return
        for entry in chain[max(target.epoch, one.born if one else 0) :]:
            if entry.attempt not in world.outbox or entry.epoch < world.folded:
                yield "an outbox file or a ledger entry is gone that a follower needs"

    def _safe(self, world: World) -> int:
        return len(world.sinks[0].chain) - 1

    def _is_owed(self, world: World, state: Any) -> bool:
        safe = min(self._safe(world), state.recorded - 1)
        chain = world.sinks[0].chain
        return bool(safe > 0 and world.forgotten < min(entry.end for entry in chain[safe - 1 :]))

    def _most(self, world: World, sink: int) -> int:
        found = world.sinks[sink]
        if isinstance(found, Target):
            return 99 if found.went_back else max(found.epoch, found.highest)
        return len(found.chain)

    def _may_fail(self, world: World, exit_code: int) -> bool:
        scenario = self.simulation.scenario
        if exit_code == 1 and scenario.policy == "quorum":  # sinks are set aside that the quorum needs
            left = len(scenario.sinks) - len(self.simulation.away(world, world.sinks[0].tip))
            return left < scenario.quorum
        return exit_code == LOST and any(isinstance(sink, Target) and sink.went_back for sink in world.sinks)

    def _run(self, world: World, actor: Actor) -> Iterator[str]:
        simulation, state = self.simulation, self.simulation.view(actor)
        tip = world.sinks[0].tip
        if state.exit_code == 0 and state.tip != tip:
            return  # somebody went on since
        yield from super()._run(world, actor)
        lacking = [s for s in state.sinks if s.required and s.epoch < state.committed and not s.filling]
        if state.exit_code == 0 and not state.stopping and lacking:
            yield "a run ended well though it knew that a follower lacks rows"
        if state.exit_code is not None or not state.claimed or world.sinks[0].holder != actor.number:
            return
        tasks = [simulation.tasks[number] for number in actor.tasks]
        waits = any(isinstance(task.answer, m.SetAside | m.Claimed | m.Committed) for task in tasks)
        claiming = any(isinstance(task.action, m.Claim | m.FindReceipt | m.Commit) for task in tasks)
        if state.tip == tip and not waits and not claiming:
            away = {sink.name for sink in state.sinks if sink.away}
            if away != set(simulation.away(world, tip)):
                yield "a run does not know which sinks are set aside"

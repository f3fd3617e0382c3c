"""A bank of chained pipelines, small enough for an exhaustive search: accounts send tokens through channels.

Each member has a balance. An epoch takes tokens from its channels and may send one. The rules of snapshots and restores
are those of `firnline.topology.decide`, and the true chain is that of the Delta source; a mutant replaces one of them.

Channels are Delta tables. Another kind of channel is a subclass of `Bank` with its own `end` and `_slices`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from firnline.sources.delta.chain import Path, find_path
from firnline.topology import decide
from firnline.topology.decide import Decision, MemberFacts, Outcome, RestoreState
from firnline.topology.records import Marker, held_records, remember

START = 2  # tokens of each member
RUN = -1  # the owner of a member that no restore has claimed


class Broken(AssertionError):  # noqa: N818
    """An invariant does not hold."""


Recorded: TypeAlias = tuple[tuple[int, int, bool], ...]  # snapshots, their epochs, and whether they hold no floor


@dataclass(frozen=True, slots=True)
class Epoch:
    """One version of a member's table. `back_to` is the epoch that a jump goes back to; -1: no jump."""

    balance: int
    positions: tuple[int, ...]  # by in-channel: the newest epoch of the writer that was read
    sends: tuple[int, ...]  # tokens, by out-channel
    markers: tuple[int, ...] = ()  # snapshots that this epoch records
    recorded: Recorded = ()
    back_to: int = -1
    restore: int = -1  # the restore that the jump is a part of


@dataclass(frozen=True, slots=True)
class Member:
    epochs: tuple[Epoch, ...]  # the first one is the beginning
    flight: tuple[Epoch, ...] = ()
    asked: tuple[int, ...] = ()
    visible: tuple[int, ...] = ()  # of a staged table: the last epochs of its commits
    floor: int = 0
    gone: int = 0  # epochs of its table up to this one were vacuumed, as far as readers need them
    owner: int = RUN  # who claimed it last: a run, or a restore
    checked: bool = True  # the run has looked for holds, under its claim
    looked: bool = False  # a run that starts has looked for holds, before its claim (only under a planted bug)
    holds: tuple[int, ...] = ()  # restores
    rolled: int = 0

    @property
    def newest(self) -> int:
        return len(self.epochs) - 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    heads: tuple[int, ...] = ()  # the epochs of the members when it was begun; empty: not yet
    positions: tuple[int, ...] = ()  # of the readers, at that time, by channel
    order: decide.OrderState | None = None
    pins: tuple[tuple[int, int], ...] = ()  # member, and the epoch of its table after which everything stays
    verdicts: tuple[tuple[Outcome, tuple[int, ...]], ...] = ()  # with records: what completers found, not written yet
    outcome: Outcome | None = None
    records: tuple[int, ...] = ()
    writes: int = 0


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore; its state is what the command knows. A crash leaves the holds and what was decided."""

    state: RestoreState
    epochs: tuple[int, ...]  # where it takes the members
    looked: str = ""  # the member whose holds it has looked at, before its own (only under a planted bug)

    @property
    def has_ended(self) -> bool:
        return self.state.released or self.state.decision is Decision.WITHDRAWN


@dataclass(frozen=True, slots=True)
class World:
    members: tuple[Member, ...]
    snapshots: tuple[Snapshot, ...]
    crashes: int = 0
    restores: tuple[Restore, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """Channels as pairs of writer and reader, and what may happen."""

    name: str
    members: int
    channels: tuple[tuple[int, int], ...]
    staged: frozenset[int] = frozenset()  # members whose table has a committer
    epochs: int = 3  # of one member, markers among them
    in_flight: int = 1
    snapshots: int = 1
    crashes: int = 1
    rollbacks: int = 0
    expires: bool = False  # a second completer may find that the time limit has passed
    restores: int = 0  # the first one to a snapshot, the second one to the beginning
    sweeps: bool = False  # floors rise and tables are vacuumed
    in_one_step: bool = False  # an epoch is planned and committed in one step; see `_plans`

    def into(self, member: int) -> list[int]:
        return [number for number, (_, reader) in enumerate(self.channels) if reader == member]

    def out_of(self, member: int) -> list[int]:
        return [number for number, (writer, _) in enumerate(self.channels) if writer == member]


class Rules:
    """The real rules. A mutant overrides one."""

    def is_barrier(self, snapshot: int, recorded: Iterable[int], channel_index: int, *, closed: bool) -> bool:
        names = [str(one) for one in recorded]
        return decide.is_barrier(str(snapshot), ["me"], "me", names, closed=closed)

    def choose(self, asked: Sequence[int], reached: Sequence[int], recorded: Iterable[int]) -> list[int]:
        names = decide.choose_records(map(str, asked), map(str, reached), [str(one) for one in recorded])
        return [int(name) for name in names]

    def record_epoch(self, epoch: int, committed: int) -> int:
        return epoch

    def units(self, has_marker: Sequence[bool]) -> int:
        return decide.count_until_marker(has_marker)

    def floor(self, oldest: int, records: Iterable[int]) -> int:
        return decide.limit_floor(oldest, records)

    def path(self, epochs: Sequence[Epoch], reader: int, newest: int) -> Path:
        return find_path(lambda n: epochs[n].back_to if epochs[n].back_to >= 0 else n - 1, reader, newest)

    def remember(self, before: Recorded, markers: Iterable[int], epoch: int, released: frozenset[int]) -> Recorded:
        return _remember(before, tuple(markers), epoch, released)

    def find_record(self, member: Member, ordered: int, recorded: int | None) -> tuple[int | None, str]:
        epochs = member.epochs
        chain = [decide.PastEpoch(n, str(n), "rollback" * (epochs[n].back_to >= 0)) for n in _chain(member)]
        return decide.find_record(ordered, str(ordered), recorded, chain)

    def next_order_step(self, state: decide.OrderState) -> decide.OrderStep | None:
        return decide.next_order_step(state)

    def find_blocking(self, holds: Iterable[int], mine: int = RUN) -> str | None:
        return decide.find_blocking(map(str, holds), str(mine))

    exclusive = True
    checks_channels = True  # before a snapshot is completed
    claims_first = True  # a run looks for holds under its claim
    holds_first = True  # a restore looks for other holds after it has written its own


@functools.cache
def _remember(before: Recorded, markers: tuple[int, ...], epoch: int, released: frozenset[int]) -> Recorded:
    known = {str(name): {"epoch": at, "released": free} for name, at, free in before}
    made = [Marker(str(one), "lake", "home", ("me",)) for one in markers]
    found = remember(known, made, epoch, {str(one) for one in released})
    held = held_records(found)
    return tuple((int(name), int(one["epoch"]), name not in held) for name, one in found.items())


@dataclass(slots=True)
class Bank:
    """One graph under some rules: `moves` yields every next world."""

    graph: Graph
    rules: Rules = field(default_factory=Rules)

    def start(self) -> World:
        members = tuple(
            Member((Epoch(START, (0,) * len(self.graph.into(n)), (0,) * len(self.graph.out_of(n))),), visible=(0,))
            for n in range(self.graph.members)
        )
        return World(members, (Snapshot(),) * self.graph.snapshots)

    @property
    def total(self) -> int:
        return START * self.graph.members

    # -- channels ---------------------------------------------------------------------------------------

    def end(self, world: World, writer: int) -> int:
        """The newest epoch of a writer that readers see."""
        member = world.members[writer]
        return member.visible[-1] if writer in self.graph.staged else member.newest

    def _sent(self, world: World, channel: int, epochs: Iterable[int]) -> int:
        writer, _ = self.graph.channels[channel]
        index = self.graph.out_of(writer).index(channel)
        return sum(
            world.members[writer].epochs[n].sends[index] for n in epochs if world.members[writer].epochs[n].back_to < 0
        )

    def true_path(self, world: World, channel: int, reader: int, to: int) -> Path:
        """The way on the true chain, whatever the rules of readers are."""
        return Rules.path(self.rules, world.members[self.graph.channels[channel][0]].epochs, reader, to)

    def fits(self, world: World, channel: int, position: int, end: int) -> bool:
        return self._sent(world, channel, self.true_path(world, channel, position, end).undone) == 0

    # -- moves ------------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[World]:
        for number in range(self.graph.members):
            yield from self._run(world, number)
        for number in range(len(world.snapshots)):
            yield from self._snapshot(world, number)
        if len(world.restores) < self.graph.restores:
            yield from self._begin_restore(world)
        for number in range(len(world.restores)):
            yield from self._restore(world, number)

    def _with(self, world: World, number: int, **changes: object) -> World:
        members = list(world.members)
        members[number] = replace(members[number], **changes)  # type: ignore[arg-type]
        return replace(world, members=tuple(members))

    def _run(self, world: World, number: int) -> Iterator[World]:
        graph, member = self.graph, world.members[number]
        if member.owner == RUN and member.checked:
            yield from self._plans(world, number)
            if member.flight:
                yield self._with(world, number, epochs=(*member.epochs, member.flight[0]), flight=member.flight[1:])
            if (member.flight or graph.restores) and world.crashes < graph.crashes:
                crashed = self._with(world, number, flight=(), checked=not graph.restores)
                yield replace(crashed, crashes=world.crashes + 1)
        yield from self._starts(world, number)
        if number in graph.staged and member.visible[-1] < member.newest:
            waiting = range(member.visible[-1] + 1, member.newest + 1)
            most = self.rules.units([bool(member.epochs[n].markers) for n in waiting])
            yield self._with(world, number, visible=(*member.visible, member.visible[-1] + most))
        is_free = member.owner == RUN and self.rules.find_blocking(self._holds(world, member)) is None
        if member.rolled < graph.rollbacks and is_free and member.newest:
            for to in range(max(member.floor, 0), member.newest):
                yield self._go_back(world, number, to, rolled=member.rolled + 1)
        if graph.sweeps:
            yield from self._sweeps(world, number)

    def _holds(self, world: World, member: Member) -> list[int]:
        """The holds of a member that count."""
        return [restore for restore in member.holds if not world.restores[restore].has_ended]

    def _starts(self, world: World, number: int) -> Iterator[World]:
        """A run that was fenced or crashed starts again: it claims, and then looks for holds."""
        member = world.members[number]
        is_free = self.rules.find_blocking(self._holds(world, member)) is None
        if self.rules.claims_first:
            if member.owner != RUN:
                yield self._with(world, number, owner=RUN, checked=False)
            elif not member.checked and is_free:
                yield self._with(world, number, checked=True)
        elif member.looked:
            yield self._with(world, number, owner=RUN, checked=True, looked=False, flight=())
        elif not member.checked and is_free:
            yield self._with(world, number, looked=True)

    def _go_back(self, world: World, number: int, to: int, restore: int = -1, **changes: object) -> World:
        """Commit a history edit. It takes no records back; in a staged table it needs no committer."""
        member = world.members[number]
        then, now = member.epochs[to], member.epochs[-1]
        jump = replace(
            then, sends=(0,) * len(then.sends), markers=(), recorded=now.recorded, back_to=to, restore=restore
        )
        visible = (*member.visible, member.newest + 1) if number in self.graph.staged else member.visible
        return self._with(world, number, epochs=(*member.epochs, jump), visible=visible, flight=(), **changes)

    def _released(self, world: World) -> frozenset[int]:
        """The snapshots that hold no floor."""
        found = enumerate(world.snapshots)
        return frozenset(
            n for n, one in found if decide.is_released(aborted=one.outcome is Outcome.ABORT, dropped=False)
        )

    def _plans(self, world: World, number: int) -> Iterator[World]:
        """Every epoch that a member may plan.

        Nobody sees a plan before its commit. Without crashes, rollbacks and restores, and with one epoch in flight, a
        commit right after the plan leads to the same cuts as a later one: whoever must not have seen the epoch by then
        may read less, which `_slices` offers. `in_one_step` leaves the later ones out.
        """
        graph, member = self.graph, world.members[number]
        at = member.newest + len(member.flight) + 1
        jumps = sum(epoch.back_to >= 0 for epoch in member.epochs)
        if len(member.flight) >= graph.in_flight or at > graph.epochs + 1 + 2 * jumps:
            return
        base = member.flight[-1] if member.flight else member.epochs[-1]
        recorded = [snapshot for snapshot, _, _ in base.recorded]
        released = self._released(world)
        asked = [one for one in member.asked if world.snapshots[one].outcome is None]
        slices = []
        for index, channel in enumerate(graph.into(number)):
            found = self._slices(world, channel, index, base.positions[index], recorded)
            if found is None:
                return  # rows that were read are undone: the run stops
            slices.append(found)
        for taken in itertools.product(*slices):
            received = sum(tokens for _, tokens, _ in taken)
            reached = [marker for _, _, markers in taken for marker in markers]
            chosen = tuple(self.rules.choose(asked, reached, recorded))
            moved = any(end != position for (end, _, _), position in zip(taken, base.positions, strict=True))
            may_send = at <= graph.epochs + 2 * jumps and base.balance + received > 0
            for send in (None, *(range(len(graph.out_of(number))) if may_send else ())):
                if not (chosen or moved or send is not None):
                    continue
                sends = tuple(int(send == index) for index in range(len(graph.out_of(number))))
                epoch = Epoch(
                    balance=base.balance + received - sum(sends),
                    positions=tuple(end for end, _, _ in taken),
                    sends=sends,
                    markers=chosen,
                    recorded=self.rules.remember(
                        base.recorded, chosen, self.rules.record_epoch(at, member.newest), released
                    ),
                )
                if graph.in_one_step:
                    yield self._with(world, number, epochs=(*member.epochs, epoch))
                else:
                    yield self._with(world, number, flight=(*member.flight, epoch))

    def _slices(
        self, world: World, channel: int, index: int, position: int, recorded: Sequence[int]
    ) -> list[tuple[int, int, tuple[int, ...]]] | None:
        """What one source may read: nothing, one version, or as much as there is up to the first barrier.

        Each with its end, its tokens and the markers that it reaches.
        """
        writer = self.graph.channels[channel][0]
        member = world.members[writer]
        path = self.rules.path(member.epochs, position, self.end(world, writer))
        if self._sent(world, channel, path.undone):
            return None
        ends = [n for n in path.ahead if writer not in self.graph.staged or n in member.visible]
        found: list[tuple[int, int, tuple[int, ...]]] = [(position, 0, ())]
        for end in ends:
            markers = tuple(
                marker
                for marker in member.epochs[end].markers
                if self.rules.is_barrier(marker, recorded, index, closed=world.snapshots[marker].outcome is not None)
            )
            tokens = self._sent(world, channel, (n for n in path.ahead if n <= end))
            found.append((end, tokens, markers))
            if markers:
                break
        return found if len(found) < 4 else [found[0], found[1], found[-1]]

    # -- snapshots --------------------------------------------------------------------------------------

    def _snapshot(self, world: World, number: int) -> Iterator[World]:
        one, members = world.snapshots[number], world.members
        if number and world.snapshots[number - 1].order is None:
            return
        if one.order is None:
            names = tuple(map(str, range(self.graph.members)))
            positions = tuple(
                members[reader].epochs[-1].positions[self.graph.into(reader).index(channel)]
                for channel, (_, reader) in enumerate(self.graph.channels)
            )
            heads = tuple(member.newest for member in members)
            tables = names if self.graph.sweeps else ()  # nothing else takes notice of pins
            order = decide.OrderState(tables, names)
            yield self._with_snapshot(world, number, order=order, heads=heads, positions=positions)
            return
        match self.rules.next_order_step(one.order):
            case decide.Pin(name):
                since = decide.pin_from(
                    self.end(world, int(name)), (one.positions[n] for n in self.graph.out_of(int(name)))
                )
                order = replace(one.order, pinned=one.order.pinned | {name})
                yield self._with_snapshot(world, number, order=order, pins=(*one.pins, (int(name), since)))
            case decide.WriteOrder():
                yield self._with_snapshot(world, number, order=replace(one.order, written=True))
            case decide.Ask(name):
                order = replace(one.order, asked=one.order.asked | {name})
                asked = self._with_snapshot(world, number, order=order)
                yield self._with(asked, int(name), asked=(*members[int(name)].asked, number))
        if one.order.written:
            yield from self._complete(world, number)

    def _with_snapshot(self, world: World, number: int, **changes: object) -> World:
        found = list(world.snapshots)
        found[number] = replace(found[number], **changes)  # type: ignore[arg-type]
        return replace(world, snapshots=tuple(found))

    def _facts(self, world: World, number: int) -> dict[str, MemberFacts]:
        found = {}
        one = world.snapshots[number]
        for name, member in enumerate(world.members):
            recorded = next((epoch for snapshot, epoch, _ in member.epochs[-1].recorded if snapshot == number), None)
            record, trouble = self.rules.find_record(member, one.heads[name], recorded)
            held = record is not None and self.end(world, name) >= record
            found[str(name)] = MemberFacts(record, held, trouble)
        return found

    def _complete(self, world: World, number: int) -> Iterator[World]:
        one = world.snapshots[number]
        if len(one.verdicts) < (2 if self.graph.expires else 1) and (one.outcome is None or one.verdicts):
            for expired in (False, True) if self.graph.expires else (False,):
                facts = self._facts(world, number)
                misfits: list[str] = []
                if self.rules.checks_channels and all(fact.record is not None for fact in facts.values()):
                    misfits = [
                        str(c) for c in range(len(self.graph.channels)) if not self._channel_fits(world, c, facts)
                    ]
                outcome, _ = decide.judge(facts, misfits, expired=expired)
                if outcome is Outcome.COMMIT:  # a rollback that comes later is found by a restore, which withdraws
                    for name, member in enumerate(world.members):
                        if facts[str(name)].record not in _chain(member):
                            raise Broken(f"snapshot {number}: the record of {name} is not in its history")
                if outcome is Outcome.ABORT and not expired and not any(m.rolled for m in world.members):
                    raise Broken(f"snapshot {number}: aborted, though nothing stood against it")
                finding = outcome, tuple(fact.record or 0 for fact in facts.values())
                if outcome is not Outcome.WAIT and outcome not in dict(one.verdicts):
                    yield self._with_snapshot(world, number, verdicts=(*one.verdicts, finding))
        for verdict, records in one.verdicts:
            left = tuple(other for other in one.verdicts if other[0] is not verdict)
            if one.outcome is not None and self.rules.exclusive:
                yield self._with_snapshot(world, number, verdicts=left)
                continue
            if one.writes > 1:
                continue
            made = self._with_snapshot(
                world, number, verdicts=left, outcome=verdict, records=records, writes=one.writes + 1
            )
            if one.outcome is not None and one.outcome is not verdict:
                raise Broken("an outcome was replaced by another one")
            self.check(made)
            yield made

    def _channel_fits(self, world: World, channel: int, facts: Mapping[str, MemberFacts]) -> bool:
        writer, reader = self.graph.channels[channel]
        end, at = facts[str(writer)].record, facts[str(reader)].record
        assert end is not None
        assert at is not None
        position = world.members[reader].epochs[at].positions[self.graph.into(reader).index(channel)]
        return self.fits(world, channel, position, end)

    # -- sweeps -----------------------------------------------------------------------------------------

    def _sweeps(self, world: World, number: int) -> Iterator[World]:
        member = world.members[number]
        kept = [epoch for _, epoch, is_free in member.epochs[-1].recorded if not is_free]
        floor = self.rules.floor(member.newest, kept)
        if floor > member.floor:
            yield self._with(world, number, floor=floor)
        limits = [self.end(world, number)]
        for channel in self.graph.out_of(number):
            reader = self.graph.channels[channel][1]
            limits.append(world.members[reader].epochs[-1].positions[self.graph.into(reader).index(channel)])
        pins = (one.pins for one in world.snapshots if one.outcome is not Outcome.ABORT)
        limits += [since for one in pins for name, since in one if name == number]
        if min(limits) > member.gone:
            yield self._with(world, number, gone=min(limits))

    # -- restores ---------------------------------------------------------------------------------------

    def _begin_restore(self, world: World) -> Iterator[World]:
        names = tuple(str(n) for n in range(self.graph.members))
        if world.restores:
            yield replace(world, restores=(*world.restores, Restore(RestoreState(names), (0,) * len(names))))
            return
        for one in world.snapshots:
            if one.outcome is Outcome.COMMIT:
                yield replace(world, restores=(Restore(RestoreState(names), one.records),))

    def _with_restore(self, world: World, number: int, **changes: object) -> World:
        found = list(world.restores)
        found[number] = replace(found[number], state=replace(found[number].state, **changes))  # type: ignore[arg-type]
        return replace(world, restores=tuple(found))

    def _restore(self, world: World, number: int) -> Iterator[World]:
        """One step of a restore, or a crash of the command, which starts again with what is durable."""
        one = world.restores[number]
        state = one.state
        if state.held and not one.has_ended and world.crashes < self.graph.crashes:
            again = replace(one, state=RestoreState(state.members, decision=state.decision))
            restores = (*world.restores[:number], again, *world.restores[number + 1 :])
            yield replace(world, crashes=world.crashes + 1, restores=restores)
        match decide.next_step(state):
            case decide.Hold(name):
                yield self._hold(world, number, name)
            case decide.Check():
                gone = any(
                    to < member.floor or to not in _chain(member)
                    for to, member in zip(one.epochs, world.members, strict=True)
                )
                yield self._with_restore(world, number, problem="a record is gone" if gone else "")
            case decide.Decide(decision):
                after = self._with_restore(world, number, decision=decision)
                if sum(other.state.decision is Decision.GO and not other.has_ended for other in after.restores) > 1:
                    raise Broken("two restores were decided at once")
                yield after
            case decide.Jump(name):
                member = world.members[int(name)]
                after = self._with_restore(world, number, jumped=state.jumped | {name})
                if member.epochs[-1].restore != number:  # a crash may have come after the jump
                    after = self._go_back(after, int(name), one.epochs[int(name)], number, owner=number)
                yield after
            case decide.Release():
                after = self._with_restore(world, number, released=True)
                self.check_live(after)
                yield after

    def _hold(self, world: World, number: int, name: str) -> World:
        """Write the hold, look for other ones, then claim: three steps."""
        member, state = world.members[int(name)], world.restores[number].state
        others = [other for other in self._holds(world, member) if other != number]
        is_foreign = self.rules.find_blocking(others, number) is not None
        has_hold = number in member.holds
        if not has_hold and not self.rules.holds_first and world.restores[number].looked != name:
            if is_foreign:
                return self._with_restore(world, number, foreign=name)
            looked = replace(world.restores[number], looked=name)
            return replace(world, restores=(*world.restores[:number], looked, *world.restores[number + 1 :]))
        if not has_hold:
            return self._with(world, int(name), holds=(*member.holds, number))
        if self.rules.holds_first and is_foreign:
            return self._with_restore(world, number, foreign=name, held=state.held | {name})
        after = self._with(world, int(name), owner=number, checked=False, flight=())
        return self._with_restore(after, number, held=state.held | {name})

    # -- invariants -------------------------------------------------------------------------------------

    def check(self, world: World) -> None:
        """Both invariants for every completed snapshot, and that it can be restored."""
        for number, one in enumerate(world.snapshots):
            if one.outcome is not Outcome.COMMIT:
                continue
            amount = 0
            for name, member in enumerate(world.members):
                record = one.records[name]
                if record < member.floor:
                    raise Broken(f"snapshot {number}: the record of {name} was swept")
                amount += member.epochs[record].balance
            for channel, (writer, reader) in enumerate(self.graph.channels):
                index = self.graph.into(reader).index(channel)
                position = world.members[reader].epochs[one.records[reader]].positions[index]
                path = self.true_path(world, channel, position, one.records[writer])
                if self._sent(world, channel, path.undone):
                    raise Broken(f"snapshot {number}: {reader} received what {writer} sent after the cut")
                if path.ahead and path.ahead[0] <= world.members[writer].gone:
                    raise Broken(f"snapshot {number}: what {reader} has yet to read was vacuumed")
                amount += self._sent(world, channel, path.ahead)
            if amount != self.total:
                raise Broken(f"snapshot {number}: {amount} tokens of {self.total}")

    def check_live(self, world: World) -> None:
        """Balances plus channel contents are the total now, and no reader has taken in what was undone."""
        amount = sum(member.epochs[-1].balance for member in world.members)
        for channel, (writer, reader) in enumerate(self.graph.channels):
            position = world.members[reader].epochs[-1].positions[self.graph.into(reader).index(channel)]
            path = self.true_path(world, channel, position, world.members[writer].newest)
            if self._sent(world, channel, path.undone):
                raise Broken(f"{reader} has read what {writer} took back")
            amount += self._sent(world, channel, path.ahead)
        if amount != self.total:
            raise Broken(f"{amount} tokens of {self.total}")

    def is_live(self, world: World) -> bool:
        """Whether the total must be right in this world: nobody goes back, or has gone back alone."""
        busy = any(not one.has_ended for one in world.restores)
        return not busy and not any(member.rolled for member in world.members)


def _chain(member: Member) -> list[int]:
    """The epochs of a member's true history, newest first."""
    found, at = [], member.newest
    while at >= 0:
        found.append(at)
        back = member.epochs[at].back_to
        at = back if back >= 0 else at - 1
    return found


def explore(bank: Bank, limit: int) -> tuple[int, bool]:
    """Visit worlds, breadth first, up to a limit. Returns how many, and whether those were all. Raises Broken."""
    first = bank.start()
    seen, front = {hash(first)}, [first]
    while front:
        later = []
        for world in front:
            for after in bank.moves(world):
                if hash(after) in seen:
                    continue
                if len(seen) >= limit:
                    return len(seen), False
                seen.add(hash(after))
                bank.check(after)
                if bank.is_live(after):
                    bank.check_live(after)
                later.append(after)
        front = later
    return len(seen), True

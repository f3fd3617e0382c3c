"""A bank of chained pipelines, small enough for an exhaustive search: accounts send tokens through channels.

Each member has a balance. An epoch takes tokens from its channels and may send one. The rules of snapshots and restores
are those of `firnline.topology.decide`, and the true chain is that of the Delta source; a mutant replaces one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from firnline.sources.delta.chain import Path, find_path
from firnline.topology import decide
from firnline.topology.decide import Decision, MemberFacts, Outcome, RestoreState

START = 2  # tokens of each member


class Broken(AssertionError):  # noqa: N818
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One version of a member's table. `back_to` is the epoch that a jump goes back to; -1: no jump."""

    balance: int
    positions: tuple[int, ...]  # by in-channel: the newest epoch of the writer that was read
    sends: tuple[int, ...]  # tokens, by out-channel
    markers: tuple[int, ...] = ()  # snapshots that this epoch records
    recorded: tuple[tuple[int, int], ...] = ()  # all recorded snapshots, with their epochs
    back_to: int = -1


@dataclass(frozen=True, slots=True)
class Member:
    epochs: tuple[Epoch, ...]  # the first one is the beginning
    flight: tuple[Epoch, ...] = ()
    asked: tuple[int, ...] = ()
    visible: tuple[int, ...] = ()  # of a staged table: the last epochs of its commits
    floor: int = 0
    gone: int = 0  # epochs of its table up to this one were vacuumed, as far as readers need them
    held: bool = False
    rolled: int = 0

    @property
    def newest(self) -> int:
        return len(self.epochs) - 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    pinned: bool = False
    pins: tuple[int, ...] = ()  # by channel: everything after this epoch stays
    order: tuple[int, ...] = ()  # the epochs of the members when it was ordered; empty: not yet
    asked: int = 0  # members that were asked
    verdicts: tuple[Outcome, ...] = ()  # what completers found, and have not written yet
    outcome: Outcome | None = None
    records: tuple[int, ...] = ()
    writes: int = 0


@dataclass(frozen=True, slots=True)
class World:
    members: tuple[Member, ...]
    snapshots: tuple[Snapshot, ...]
    crashes: int = 0
    restore: RestoreState | None = None
    restored: int = -1


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
    restores: bool = False
    sweeps: bool = False  # floors rise and tables are vacuumed

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

    def trouble(self, text: str) -> str:
        return text

    holds = True
    exclusive = True
    pins_first = True


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
        if self.graph.restores:
            yield from self._restore(world)

    def _with(self, world: World, number: int, **changes: object) -> World:
        members = list(world.members)
        members[number] = replace(members[number], **changes)  # type: ignore[arg-type]
        return replace(world, members=tuple(members))

    def _run(self, world: World, number: int) -> Iterator[World]:
        graph, member = self.graph, world.members[number]
        if not (member.held and self.rules.holds):
            yield from self._plans(world, number)
            if member.flight:
                yield self._with(world, number, epochs=(*member.epochs, member.flight[0]), flight=member.flight[1:])
            if member.flight and world.crashes < graph.crashes:
                yield replace(self._with(world, number, flight=()), crashes=world.crashes + 1)
        if number in graph.staged and member.visible[-1] < member.newest:
            waiting = range(member.visible[-1] + 1, member.newest + 1)
            most = self.rules.units([bool(member.epochs[n].markers) for n in waiting])
            yield self._with(world, number, visible=(*member.visible, member.visible[-1] + most))
        if member.rolled < graph.rollbacks and not member.held and member.newest:
            for to in range(max(member.floor, 0), member.newest):
                jump = self._jump(member, to)
                yield self._with(world, number, epochs=(*member.epochs, jump), flight=(), rolled=member.rolled + 1)
        if graph.sweeps:
            yield from self._sweeps(world, number)

    def _jump(self, member: Member, to: int) -> Epoch:
        then, now = member.epochs[to], member.epochs[-1]
        return replace(
            then, sends=(0,) * len(then.sends), markers=(), recorded=now.recorded, back_to=to
        )  # a history edit does not take records back

    def _plans(self, world: World, number: int) -> Iterator[World]:
        graph, member = self.graph, world.members[number]
        at = member.newest + len(member.flight) + 1
        jumps = sum(epoch.back_to >= 0 for epoch in member.epochs)
        if len(member.flight) >= graph.in_flight or at > graph.epochs + 1 + 2 * jumps:
            return
        base = member.flight[-1] if member.flight else member.epochs[-1]
        recorded = [snapshot for snapshot, _ in base.recorded]
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
                    recorded=(*base.recorded, *((one, self.rules.record_epoch(at, member.newest)) for one in chosen)),
                )
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
        if number and not world.snapshots[number - 1].order:
            return
        positions = tuple(
            members[reader].epochs[-1].positions[self.graph.into(reader).index(channel)]
            for channel, (_, reader) in enumerate(self.graph.channels)
        )
        may_pin = not one.pinned and (self.rules.pins_first or one.asked == len(members))
        if may_pin and one.outcome is None:
            yield self._with_snapshot(world, number, pinned=True, pins=positions)
        if not one.order and (one.pinned or not self.rules.pins_first):
            yield self._with_snapshot(world, number, order=tuple(member.newest for member in members))
        elif one.order and one.asked < len(members):
            asked = self._with_snapshot(world, number, asked=one.asked + 1)
            yield self._with(asked, one.asked, asked=(*members[one.asked].asked, number))
        if one.asked == len(members) and one.pinned:
            yield from self._complete(world, number)

    def _with_snapshot(self, world: World, number: int, **changes: object) -> World:
        found = list(world.snapshots)
        found[number] = replace(found[number], **changes)  # type: ignore[arg-type]
        return replace(world, snapshots=tuple(found))

    def _facts(self, world: World, number: int) -> dict[str, MemberFacts]:
        found = {}
        one = world.snapshots[number]
        for name, member in enumerate(world.members):
            record = dict(member.epochs[-1].recorded).get(number)
            edited = any(epoch.back_to >= 0 for epoch in member.epochs[one.order[name] + 1 :])
            trouble = self.rules.trouble("a rollback since the order") if edited else ""
            held = record is not None and self.end(world, name) >= record
            found[str(name)] = MemberFacts(record, held, trouble)
        return found

    def _complete(self, world: World, number: int) -> Iterator[World]:
        one = world.snapshots[number]
        if len(one.verdicts) < (2 if self.graph.expires else 1) and (one.outcome is None or one.verdicts):
            for expired in (False, True) if self.graph.expires else (False,):
                facts = self._facts(world, number)
                misfits: list[str] = []
                if all(fact.record is not None for fact in facts.values()):
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
                if outcome is not Outcome.WAIT and outcome not in one.verdicts:
                    yield self._with_snapshot(world, number, verdicts=(*one.verdicts, outcome))
        for verdict in one.verdicts:
            left = tuple(other for other in one.verdicts if other is not verdict)
            if one.outcome is not None and self.rules.exclusive:
                yield self._with_snapshot(world, number, verdicts=left)
                continue
            if one.writes > 1:
                continue
            records = tuple(fact.record or 0 for fact in self._facts(world, number).values())
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
        kept = [
            epoch for snapshot, epoch in member.epochs[-1].recorded
            if world.snapshots[snapshot].outcome is not Outcome.ABORT
        ]  # fmt: skip
        floor = self.rules.floor(member.newest, kept)
        if floor > member.floor:
            yield self._with(world, number, floor=floor)
        limits = [self.end(world, number)]
        for channel in self.graph.out_of(number):
            reader = self.graph.channels[channel][1]
            limits.append(world.members[reader].epochs[-1].positions[self.graph.into(reader).index(channel)])
            limits += [one.pins[channel] for one in world.snapshots if one.pinned and one.outcome is not Outcome.ABORT]
        if min(limits) > member.gone:
            yield self._with(world, number, gone=min(limits))

    # -- restores ---------------------------------------------------------------------------------------

    def _restore(self, world: World) -> Iterator[World]:
        state = world.restore
        if state is None:
            for number, one in enumerate(world.snapshots):
                if one.outcome is Outcome.COMMIT:
                    names = tuple(str(n) for n in range(self.graph.members))
                    yield replace(world, restore=RestoreState(names), restored=number)
            return
        records = world.snapshots[world.restored].records
        match decide.next_step(state):
            case decide.Hold(name):
                after = self._with(world, int(name), held=True, flight=())
                yield replace(after, restore=replace(state, held=state.held | {name}))
            case decide.Check():
                yield replace(world, restore=replace(state, problem=""))
            case decide.Decide(decision):
                yield replace(world, restore=replace(state, decision=decision))
            case decide.Jump(name):
                member = world.members[int(name)]
                jump = self._jump(member, records[int(name)])
                after = self._with(world, int(name), epochs=(*member.epochs, jump), flight=())
                yield replace(after, restore=replace(state, jumped=state.jumped | {name}))
            case decide.Release():
                after = replace(world, restore=replace(state, released=True))
                for number in range(self.graph.members):
                    after = self._with(after, number, held=False)
                self.check_live(after)
                yield after
            case None:
                assert state.decision is Decision.GO

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
        state = world.restore
        busy = state is not None and not state.released
        return not busy and not any(member.rolled for member in world.members)


def _chain(member: Member) -> set[int]:
    """The epochs of a member's true history."""
    found, at = set(), member.newest
    while at >= 0:
        found.add(at)
        back = member.epochs[at].back_to
        at = back if back >= 0 else at - 1
    return found


def explore(bank: Bank, limit: int) -> tuple[int, bool]:
    """Visit worlds, breadth first, up to a limit. Returns how many, and whether those were all. Raises Broken."""
    first = bank.start()
    seen, front = {first}, [first]
    while front:
        later = []
        for world in front:
            for after in bank.moves(world):
                if after in seen:
                    continue
                if len(seen) >= limit:
                    return len(seen), False
                seen.add(after)
                bank.check(after)
                if bank.is_live(after):
                    bank.check_live(after)
                later.append(after)
        front = later
    return len(seen), True

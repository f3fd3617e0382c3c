"""A bank whose channels are parts of sinks with a template: each part has commits of those epochs only that touch it.

A sink commits an epoch in the parts that it touches, and then moves its head. Whoever completes a snapshot looks at the
heads and at the parts at two moments. The rules are those of `firnline.topology.decide`; a mutant replaces one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from firnline.topology import decide
from firnline.topology.decide import MemberFacts, Outcome
from tests.support.bank import RUN, Bank, Broken, Member, Recorded, Rules, Snapshot, World

LAG = 2  # epochs that a sink may be behind


@dataclass(frozen=True, slots=True)
class PartMember(Member):
    head: int = 0  # the newest epoch that the sink holds in all parts
    parts: tuple[int, ...] = ()  # by out-channel: the newest epoch that was written to it


@dataclass(frozen=True, slots=True)
class PartSnapshot(Snapshot):
    looked: tuple[tuple[int, ...], ...] | None = None  # what a completer has read first, and not used yet


class PartRules(Rules):
    """The real rules. A mutant overrides one."""

    heads_first = True  # a completer reads the heads of the sinks before their parts

    def passed(self, recorded: Recorded, epoch: int) -> list[int]:
        """The snapshots behind whose markers the commit of an epoch lies, whether or not the part has their commits."""
        return [snapshot for snapshot, record, is_free in recorded if not is_free and decide.is_behind(record, epoch)]

    def part_end(self, held: int, record: int, touched: Iterable[int]) -> int | None:
        return decide.find_part_end(held, record, touched)

    def is_held(self, held: int, record: int) -> bool:
        return held >= record


@dataclass(slots=True)
class PartBank(Bank):
    """Every member that somebody reads from writes one part for each channel."""

    rules: PartRules = field(default_factory=PartRules)

    def start(self) -> World:
        world = Bank.start(self)
        members = tuple(
            PartMember(member.epochs, visible=member.visible, parts=(0,) * len(self.graph.out_of(number)))
            for number, member in enumerate(world.members)
        )
        return replace(world, members=members, snapshots=(PartSnapshot(),) * self.graph.snapshots)

    # -- parts ------------------------------------------------------------------------------------------

    def touches(self, member: Member, index: int, epoch: int) -> bool:
        """Whether an epoch has a commit in a part: rows, or a jump that takes some back."""
        found = member.epochs[epoch]
        if found.back_to < 0:
            return found.sends[index] > 0
        return any(self.touches(member, index, before) for before in range(found.back_to + 1, epoch))

    def _visible(self, world: World, channel: int) -> tuple[Member, int, int]:
        """The writer of a channel, its part, and the newest epoch that may have a commit there."""
        writer, _ = self.graph.channels[channel]
        index, member = self.graph.out_of(writer).index(channel), world.members[writer]
        assert isinstance(member, PartMember)
        return member, index, max(member.head, member.parts[index])

    def touched(self, world: World, channel: int) -> tuple[int, ...]:
        """The epochs that have a commit in the part of a channel now."""
        member, index, end = self._visible(world, channel)
        return tuple(epoch for epoch in range(1, end + 1) if self.touches(member, index, epoch))

    def end(self, world: World, writer: int) -> int:
        member = world.members[writer]
        assert isinstance(member, PartMember)
        return member.head if self.graph.out_of(writer) else member.newest

    def _run(self, world: World, number: int) -> Iterator[World]:
        for after in Bank._run(self, world, number):
            if after.members[number].newest - self.end(after, number) <= LAG:
                yield after
        yield from self._deliver(world, number)

    def _deliver(self, world: World, number: int) -> Iterator[World]:
        """The next step of a sink: the commit in one part, or the head once all parts have it."""
        member = world.members[number]
        assert isinstance(member, PartMember)
        epoch = member.head + 1
        if epoch > member.newest or member.owner != RUN or not member.checked:
            return
        waiting = [i for i, held in enumerate(member.parts) if held < epoch and self.touches(member, i, epoch)]
        for index in waiting:
            parts = tuple(epoch if i == index else held for i, held in enumerate(member.parts))
            yield self._with(world, number, parts=parts)
        if not waiting:
            yield self._with(world, number, head=epoch)

    def _go_back(self, world: World, number: int, to: int, restore: int = -1, **changes: object) -> World:
        after = Bank._go_back(self, world, number, to, restore, **changes)
        newest = after.members[number].newest  # a restore waits until the sink has the jump
        return self._with(after, number, head=newest, parts=(newest,) * len(self.graph.out_of(number)))

    def _slices(
        self, world: World, channel: int, index: int, position: int, recorded: Sequence[int]
    ) -> list[tuple[int, int, tuple[int, ...]]] | None:
        member, part, end = self._visible(world, channel)
        path = self.rules.path(member.epochs, position, end)
        if self._sent(world, channel, path.undone):
            return None

        def barriers(snapshots: Iterable[int]) -> tuple[int, ...]:
            return tuple(
                one
                for one in snapshots
                if self.rules.is_barrier(one, recorded, index, closed=world.snapshots[one].outcome is not None)
            )

        found: list[tuple[int, int, tuple[int, ...]]] = [(position, 0, ())]
        for epoch in (epoch for epoch in path.ahead if self.touches(member, part, epoch)):
            passed = barriers(self.rules.passed(member.epochs[epoch].recorded, epoch))
            if passed:
                found.append((*found[-1][:2], passed))
                break
            markers = barriers(member.epochs[epoch].markers)
            found.append((epoch, found[-1][1] + self._sent(world, channel, [epoch]), markers))
            if markers:
                break
        return found if len(found) < 4 else [found[0], found[1], found[-1]]

    # -- completing -------------------------------------------------------------------------------------

    def _look(self, world: World) -> tuple[tuple[int, ...], ...]:
        if self.rules.heads_first:
            return (tuple(self.end(world, number) for number in range(self.graph.members)),)
        return tuple(self.touched(world, channel) for channel in range(len(self.graph.channels)))

    def _facts(self, world: World, number: int) -> dict[str, MemberFacts]:
        heads = self._heads(world, number)
        return {
            name: replace(one, held=one.record is not None and self.rules.is_held(heads[int(name)], one.record))
            for name, one in Bank._facts(self, world, number).items()
        }

    def _heads(self, world: World, number: int) -> tuple[int, ...]:
        one = world.snapshots[number]
        assert isinstance(one, PartSnapshot)
        return one.looked[0] if self.rules.heads_first and one.looked is not None else self._now(world)

    def _now(self, world: World) -> tuple[int, ...]:
        return tuple(self.end(world, number) for number in range(self.graph.members))

    def _complete(self, world: World, number: int) -> Iterator[World]:
        one, seen = world.snapshots[number], self._look(world)
        assert isinstance(one, PartSnapshot)
        if one.outcome is None and not one.verdicts and one.looked != seen:
            yield self._with_snapshot(world, number, looked=seen)
        if one.looked is None:
            return
        for after in Bank._complete(self, world, number):
            if len(after.snapshots[number].verdicts) > len(one.verdicts):
                verdict, records = after.snapshots[number].verdicts[-1]
                if verdict is Outcome.COMMIT:
                    self._check_ends(world, number, records)
            yield after

    def _check_ends(self, world: World, number: int, records: Sequence[int]) -> None:
        """What the completer takes for the end of a record in a part is its end, whatever is delivered later."""
        one = world.snapshots[number]
        assert isinstance(one, PartSnapshot)
        for channel, (writer, _) in enumerate(self.graph.channels):
            member, index, _ = self._visible(world, channel)
            seen = self.touched(world, channel)
            if not self.rules.heads_first and one.looked is not None:
                seen = one.looked[channel]
            found = self.rules.part_end(self._heads(world, number)[writer], records[writer], seen)
            wanted = (epoch for epoch in range(1, records[writer] + 1) if self.touches(member, index, epoch))
            if found != max(wanted, default=0):
                raise Broken(f"snapshot {number}: a part ends at epoch {found}, and its sink has not said so")

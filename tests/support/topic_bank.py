"""A topic between two pipelines, small enough for an exhaustive search: partitions, lanes and transactions.

The writer delivers epochs through lanes, each in a transaction of its own. A commit is answered before its end is
written to each partition, the checkpoint topic among them. A reader asks for the last stable offsets, reads the
checkpoint topic, and commits an epoch: three moments. The rules are those of `firnline.topology`; a mutant replaces
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from firnline.topology import decide
from firnline.topology.records import Marker, remember
from firnline.topology.topics import ChannelState, Partition, Ranges, combine_lanes
from tests.support.bank import Broken

TOPIC = "t"
MARKER = Marker("s", "lake", "home", ("a", "b"))
END = -1  # the epoch of an entry that ends a transaction, or is a control record


@dataclass(frozen=True, slots=True)
class Entry:
    """One offset of a partition."""

    epoch: int
    lane: int
    aborted: bool = False


def _rough(state: ChannelState | None) -> int:
    """A hash that few states share."""
    return -1 if state is None else sum(sum(cut.ends.values()) + 1 for cut in state.cuts.values()) - len(state.void)


@dataclass(frozen=True, slots=True)
class Lane:
    """A producer and its partition of the checkpoint topic."""

    holds: int = 0  # the epoch that was committed
    seen: int = 0  # the epoch that readers of the checkpoint topic see
    record: ChannelState = field(default_factory=ChannelState)
    visible: ChannelState = field(default_factory=ChannelState)
    sending: int = 0  # the epoch of the open transaction
    ending: tuple[int, ...] = ()  # partitions that lack the end of the committed transaction

    def __hash__(self) -> int:  # a state of a channel holds dictionaries
        return hash((self.holds, self.seen, _rough(self.record), _rough(self.visible), self.sending, self.ending))


@dataclass(frozen=True, slots=True)
class Reader:
    position: tuple[int, ...]
    received: tuple[int, ...] = ()  # epochs of the rows
    stable: tuple[int, ...] | None = None  # asked, and not used yet
    looked: ChannelState | None = None
    announced: bool | None = None  # whether it knows the channel: a home that was read
    record: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # position and rows

    def __hash__(self) -> int:
        return hash((self.position, self.received, self.stable, _rough(self.looked), self.announced, self.record))


@dataclass(frozen=True, slots=True)
class TopicWorld:
    log: tuple[tuple[Entry, ...], ...]  # by partition
    lanes: tuple[Lane, ...]
    reader: Reader
    decided: int = 0  # the newest epoch of the writer
    marked: int = 0  # its marker epoch
    announced: bool = False
    asked: bool = False  # the reader
    crashes: int = 0
    undone: tuple[int, int] = (0, 0)  # the epochs after the first, up to the second, are undone


class TopicRules:
    """The real rules. A mutant overrides one."""

    ends_first = True  # the ends of the topic are asked for before the checkpoint topic is read
    announced_last = True  # the home is read after the ends were asked for
    announced_first = True  # a reader learns of its channels before the writer is asked
    waits_for_restore = True  # a restore ends when everybody can see what is void

    def may_begin(self, world: TopicWorld, epoch: int) -> bool:
        """Whether a lane may begin an epoch: all hold the one before, and a marker can be seen."""
        return all(
            lane.holds >= epoch - 1 and (lane.seen >= epoch - 1 or world.marked != epoch - 1) for lane in world.lanes
        )

    def ends(self, ends: Mapping[Partition, int]) -> Mapping[Partition, int]:
        return ends

    def limit(self, stable: Mapping[Partition, int], cut: Mapping[Partition, int]) -> Mapping[Partition, int]:
        return decide.limit_ends(stable, [cut])

    def combine(self, lanes: Mapping[int, ChannelState]) -> ChannelState:
        return combine_lanes(lanes)

    def void(self, ranges: Ranges) -> Ranges:
        return ranges


@dataclass(slots=True)
class TopicBank:
    """One topic under some rules: `moves` yields every next world."""

    partitions: int = 2
    lanes: int = 2
    epochs: int = 2
    crashes: int = 0
    restores: bool = False
    rules: TopicRules = field(default_factory=TopicRules)

    def start(self) -> TopicWorld:
        return TopicWorld(((),) * self.partitions, (Lane(),) * self.lanes, Reader((0,) * self.partitions))

    # -- what everybody may see -------------------------------------------------------------------------

    def _at(self, epoch: int, lane: int) -> int:
        """The partition of the one row that a lane writes in an epoch."""
        return (epoch + lane) % self.partitions

    def _stable(self, world: TopicWorld) -> tuple[int, ...]:
        """The last stable offset of each partition."""
        found = []
        for number, entries in enumerate(world.log):
            opened = [
                offset
                for offset, entry in enumerate(entries)
                if entry.epoch > 0
                and not entry.aborted
                and (world.lanes[entry.lane].sending == entry.epoch
                     or (number in world.lanes[entry.lane].ending and world.lanes[entry.lane].holds == entry.epoch))
            ]  # fmt: skip
            found.append(min(opened, default=len(entries)))
        return tuple(found)

    def _ends(self, world: TopicWorld) -> dict[Partition, int]:
        return {(TOPIC, number): len(entries) for number, entries in enumerate(world.log)}

    def _rows(self, world: TopicWorld, start: tuple[int, ...], end: tuple[int, ...], void: ChannelState) -> list[int]:
        """The epochs of the rows between two positions that are neither aborted nor void."""
        found = []
        for number, entries in enumerate(world.log):
            gone = {o for s, e in self.rules.void(tuple(void.void.get((TOPIC, number), ()))) for o in range(s, e)}
            found += [
                entries[offset].epoch
                for offset in range(start[number], end[number])
                if entries[offset].epoch > 0 and not entries[offset].aborted and offset not in gone
            ]
        return found

    # -- moves ------------------------------------------------------------------------------------------

    def moves(self, world: TopicWorld) -> Iterator[TopicWorld]:
        yield from self._order(world)
        yield from self._write(world)
        yield from self._read(world)
        if self.restores and not world.undone[1]:
            yield from self._restore(world)

    def _order(self, world: TopicWorld) -> Iterator[TopicWorld]:
        if not world.announced and (self.rules.announced_first or world.marked):
            yield replace(world, announced=True)
        if world.announced and not world.asked:
            yield replace(world, asked=True)

    def _write(self, world: TopicWorld) -> Iterator[TopicWorld]:
        last, begins = self.epochs + (self.epochs if world.undone[1] else 0), self.rules.may_begin
        if world.decided < last and min(lane.holds for lane in world.lanes) >= world.decided - 1:
            yield replace(world, decided=world.decided + 1)
            if not world.marked and (world.announced or not self.rules.announced_first):
                yield replace(world, decided=world.decided + 1, marked=world.decided + 1)
        for number, lane in enumerate(world.lanes):
            epoch = lane.holds + 1
            if lane.sending:
                yield self._commit(world, number)
            elif not lane.ending and lane.seen == lane.holds and epoch <= world.decided and begins(world, epoch):
                log = self._append(world.log, self._at(epoch, number), Entry(epoch, number))
                yield replace(self._with(world, number, sending=epoch), log=log)
            for partition in lane.ending:
                left = tuple(one for one in lane.ending if one != partition)
                yield self._with(world, number, ending=left)
            if lane.seen < lane.holds:
                yield self._with(world, number, seen=lane.holds, visible=lane.record)
        if world.crashes < self.crashes and any(lane.sending for lane in world.lanes):
            yield replace(self._abort(world), crashes=world.crashes + 1)

    def _append(self, log: tuple[tuple[Entry, ...], ...], at: int, entry: Entry) -> tuple[tuple[Entry, ...], ...]:
        return tuple((*entries, entry) if number == at else entries for number, entries in enumerate(log))

    def _with(self, world: TopicWorld, number: int, **changes: object) -> TopicWorld:
        lanes = list(world.lanes)
        lanes[number] = replace(lanes[number], **changes)  # type: ignore[arg-type]
        return replace(world, lanes=tuple(lanes))

    def _commit(self, world: TopicWorld, number: int) -> TopicWorld:
        lane = world.lanes[number]
        epoch = lane.sending
        markers = [MARKER] if epoch == world.marked else []
        before = {"s": {"epoch": world.marked, "topology": "lake", "home": "home"}} if 0 < world.marked < epoch else {}
        ends = self.rules.ends(self._ends(world))
        record = lane.record.after_epoch(remember(before, markers, epoch), epoch, self.lanes, ends)
        at = self._at(epoch, number)
        log = self._append(world.log, at, Entry(END, number))
        after = self._with(world, number, sending=0, holds=epoch, record=record, ending=(at,))
        return replace(after, log=log)

    def _abort(self, world: TopicWorld) -> TopicWorld:
        """A claim: open transactions are aborted, and committed ones are brought to their ends."""
        sending = {number: lane.sending for number, lane in enumerate(world.lanes) if lane.sending}
        log = tuple(
            tuple(replace(e, aborted=True) if sending.get(e.lane) == e.epoch else e for e in entries)
            for entries in world.log
        )
        lanes = tuple(replace(lane, sending=0, ending=(), seen=lane.holds, visible=lane.record) for lane in world.lanes)
        return replace(world, log=log, lanes=lanes)

    def _visible(self, world: TopicWorld) -> ChannelState:
        return self.rules.combine({number: lane.visible for number, lane in enumerate(world.lanes) if lane.seen})

    def _read(self, world: TopicWorld) -> Iterator[TopicWorld]:
        reader = world.reader
        if reader.announced is None and not self.rules.announced_last:
            yield replace(world, reader=replace(reader, announced=world.announced))
            return
        asked = self._ask_stable(world) if self.rules.ends_first else self._look(world)
        if (reader.stable if self.rules.ends_first else reader.looked) is None:
            yield replace(world, reader=asked)
            return
        asked = self._look(world) if self.rules.ends_first else self._ask_stable(world)
        yield from self._plan(world, replace(asked, announced=world.announced) if reader.announced is None else asked)

    def _ask_stable(self, world: TopicWorld) -> Reader:
        return replace(world.reader, stable=self._stable(world))

    def _look(self, world: TopicWorld) -> Reader:
        return replace(world.reader, looked=self._visible(world))

    def _plan(self, world: TopicWorld, reader: Reader) -> Iterator[TopicWorld]:
        """The epoch of a reader: everything up to the first barrier, or only what the first partition has."""
        assert reader.stable is not None
        assert reader.looked is not None
        state = reader.looked if reader.announced else ChannelState()
        stable = {(TOPIC, number): end for number, end in enumerate(reader.stable)}
        cut = state.cuts.get("s") if reader.record is None else None
        limits = self.rules.limit(stable, cut.ends) if cut is not None else stable
        ends = tuple(max(reader.position[n], limits[TOPIC, n]) for n in range(self.partitions))
        idle = replace(reader, stable=None, looked=None, announced=None)
        yield replace(world, reader=idle)
        for to in {ends, (*ends[:1], *reader.position[1:])}:
            rows = (*reader.received, *self._rows(world, reader.position, to, state))
            after = replace(idle, position=to, received=tuple(sorted(rows)))
            reached = cut is not None and decide.is_reached(
                {(TOPIC, number): end for number, end in enumerate(to)}, cut.ends
            )
            if reached or (world.asked and reader.record is None):
                after = replace(after, record=(to, after.received))
            if after != idle:
                yield replace(world, reader=after)

    # -- restores ---------------------------------------------------------------------------------------

    def _restore(self, world: TopicWorld) -> Iterator[TopicWorld]:
        """Take both back to the snapshot: the lanes are claimed, and the topic keeps what was undone."""
        cut = self._find_cut(world)
        if cut is None or world.reader.record is None:
            return
        claimed = self._abort(world)
        log = tuple((*entries, Entry(END, 0)) for entries in claimed.log)
        jumped = replace(claimed, log=log)
        epoch = jumped.decided + 1
        main = jumped.lanes[0]
        record = main.record.after_restore(world.marked, cut, self._ends(jumped))
        visible = record if self.rules.waits_for_restore else main.visible
        lanes = tuple(replace(lane, holds=epoch, seen=epoch) for lane in jumped.lanes)
        lanes = (replace(lanes[0], record=record, visible=visible), *lanes[1:])
        position, rows = world.reader.record
        reader = Reader(position, rows, record=world.reader.record)
        yield replace(jumped, lanes=lanes, reader=reader, decided=epoch, undone=(world.marked, epoch))

    def _find_cut(self, world: TopicWorld) -> Mapping[Partition, int] | None:
        """The cut of the snapshot, once the sink holds it."""
        cut = self._visible(world).cuts.get("s")
        return cut.ends if cut is not None else None

    # -- invariants -------------------------------------------------------------------------------------

    def check(self, world: TopicWorld) -> None:
        """What the reader has received is before the cut, or is in the topic, once; and nothing that was undone."""
        low, high = world.undone
        if len(set(world.reader.received)) * self.lanes < len(world.reader.received):
            raise Broken("a row was received twice")
        if any(low < epoch <= high for epoch in world.reader.received) and high:
            raise Broken("the reader received what was undone")
        cut = self._find_cut(world)
        if cut is None or world.reader.record is None or high:
            return
        position, rows = world.reader.record
        if any(epoch > world.marked for epoch in rows):
            raise Broken("the reader received what was sent after the cut")
        ends = tuple(cut.get((TOPIC, number), 0) for number in range(self.partitions))
        held = self._rows(world, position, ends, ChannelState())
        if sorted([*rows, *held]) != [n for n in range(1, world.marked + 1) for _ in range(self.lanes)]:
            raise Broken("rows and topic are not what was sent before the cut")


def explore_topic(bank: TopicBank, limit: int) -> tuple[int, bool]:
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
                later.append(after)
        front = later
    return len(seen), True

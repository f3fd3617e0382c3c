"""The decisions of a topology's snapshots and restores. Pure: nothing here does I/O or reads a clock.

A snapshot S is one epoch of each member, its record m. The rules, which the search under `tests/` explores with
crashes, overlapping snapshots, rollbacks and restores:

1. Pins first, then the order, then every member is asked.
2. A member records S in its next epoch, or in the epoch that reaches the first marker of S, whichever comes first. The
   commit of m is the marker in every channel; m itself lies before the cut.
3. No slice of any source goes beyond a marker of a snapshot that the member has not recorded. A unit with a marker is
   the last one of its Delta commit. In a topic, the checkpoint record of m names the end of m in every partition. A
   reader asks for the ends of the topic first and for the cuts second, and plans up to the smaller. A part of a sink
   with a template that m does not touch gets no commit of m: there the first later commit, whose checkpoint remembers
   S, lies behind the marker, and a slice ends before it.
4. The checkpoint remembers the snapshots that it has recorded, also after a history edit. The floor stays at or below
   the records until the snapshot is aborted or dropped.
5. S is complete when every member has recorded it, every channel's sink holds the marker, and every channel fits. One
   outcome, committed or aborted, is written once.

A restore R holds every pipeline, checks, decides once, takes each pipeline to its record, and then releases all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

P = TypeVar("P")  # a partition of a topic

# -- a member -----------------------------------------------------------------------------------------


def is_barrier(snapshot: str, members: Collection[str], me: str, recorded: Collection[str], *, closed: bool) -> bool:
    """Return whether a slice of the pipeline `me` must end at a marker: it has not recorded an open snapshot."""
    return me in members and snapshot not in recorded and not closed


def choose_records(asked: Iterable[str], reached: Iterable[str], recorded: Collection[str]) -> list[str]:
    """Return the snapshots that the next epoch records: those asked for, and those whose marker its slice reaches."""
    return [one for one in dict.fromkeys([*asked, *reached]) if one not in recorded]


def is_released(*, aborted: bool, dropped: bool) -> bool:
    """Return whether the record of a snapshot no longer holds the floor."""
    return aborted or dropped


def limit_floor(oldest: int, records: Iterable[int]) -> int:
    """Return the floor that keeps the records of every snapshot that is neither aborted nor dropped."""
    return min([oldest, *records])


def count_until_marker(has_marker: Sequence[bool]) -> int:
    """Return how many units one Delta commit takes: up to and including the first that has a marker."""
    return next((number + 1 for number, marker in enumerate(has_marker) if marker), len(has_marker))


# -- channels that are topics -------------------------------------------------------------------------


def combine_ends(lanes: Sequence[Mapping[P, int] | None]) -> dict[P, int] | None:
    """Return where a marker epoch ends in each partition; None while a lane of it does not hold it.

    Every lane names the ends that it saw before its commit, and none begins the next epoch before all hold this one:
    what lies below the largest is of this epoch, or an older one.
    """
    found: dict[P, int] = {}
    for ends in lanes:
        if ends is None:
            return None
        for partition, end in ends.items():
            found[partition] = max(found.get(partition, 0), end)
    return found


def limit_ends(stable: Mapping[P, int], cuts: Iterable[Mapping[P, int]]) -> dict[P, int]:
    """Return where slices may end: at the last stable offset or at the first cut, whichever comes first.

    A partition that a cut does not name had nothing then.
    """
    barriers = list(cuts)
    return {one: min([end, *(cut.get(one, 0) for cut in barriers)]) for one, end in stable.items()}


def is_reached(slices: Mapping[P, int], cut: Mapping[P, int]) -> bool:
    """Return whether slices that end here have reached a cut, in every partition."""
    return all(end >= cut.get(one, 0) for one, end in slices.items())


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges of offsets in order, with those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)


# -- channels that are parts of a sink ----------------------------------------------------------------


def is_behind(record: int, epoch: int) -> bool:
    """Return whether a commit of an epoch lies behind the marker of a record, also in a part that has no commit of it.

    The checkpoint of every epoch after the record remembers it, so the commit says so by itself.
    """
    return epoch > record


def find_part_end(held: int, record: int, touched: Iterable[int]) -> int | None:
    """Return the epoch whose commit is the end of a record in a part: the newest one at or below it.

    `held` is the epoch of the sink's head, read before the epochs that `touched` the part: only then are they all. None
    while the sink does not hold the record; 0: the part had nothing then.
    """
    return max((epoch for epoch in touched if epoch <= record), default=0) if held >= record else None


# -- ordering a snapshot ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderState:
    """How far the order of a snapshot has come."""

    tables: tuple[str, ...]  # that are to be pinned
    members: tuple[str, ...]  # that are to be asked
    pinned: frozenset[str] = frozenset()
    written: bool = False
    asked: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep everything of a table from `pin_from` on."""

    table: str


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """Write the order: from here on the snapshot exists."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a member to record the snapshot."""

    member: str


OrderStep = Pin | WriteOrder | Ask


def next_order_step(state: OrderState) -> OrderStep | None:
    """Return the next step of an order; None if every member was asked. Pins come first: a record needs them."""
    free = next((table for table in state.tables if table not in state.pinned), None)
    if free is not None:
        return Pin(free)
    if not state.written:
        return WriteOrder()
    silent = next((name for name in state.members if name not in state.asked), None)
    return Ask(silent) if silent is not None else None


def pin_from(newest: int, readers: Iterable[int]) -> int:
    """Return the version from which an open pin keeps everything: that of the slowest reader, or the newest one."""
    return max(min([newest, *readers]), -1)


def may_unpin(*, kept: bool, dropped: bool, restoring: bool) -> bool:
    """Return whether the pins of a snapshot may go: nobody keeps it any more, and no restore to it is under way.

    `kept`: it was ordered, and not aborted. `restoring` is asked after `dropped` was written. A restore is written down
    before it looks at `dropped`, so one of the two sees the other.
    """
    return not kept or (dropped and not restoring)


class Ending(Enum):
    """What a member does to a snapshot that holds its floor, and that nobody looks after."""

    ABORT = "abort"
    DROP = "drop"


def find_ending(*, open_: bool, aborted: bool, expired: bool, overdue: bool) -> Ending | None:
    """Return what a member does to a snapshot that it has recorded; None if the snapshot may hold its floor.

    `open_`: it has no outcome; `expired`: its time limit is over; `overdue`: it was held for longer than `max_hold`.
    """
    if open_:
        return Ending.ABORT if expired else None
    return Ending.DROP if overdue and not aborted else None


# -- completing a snapshot ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PastEpoch:
    """One epoch of a member's true chain."""

    epoch: int
    attempt: str
    edit: str = ""  # the kind of history edit that it is, if it is one


def find_record(ordered: int, attempt: str, recorded: int | None, chain: Iterable[PastEpoch]) -> tuple[int | None, str]:
    """Return the record of a member, and what has happened to it since the order that stands against the snapshot.

    `ordered` is its epoch when the snapshot was ordered, with its `attempt`; `recorded` is the record that its newest
    checkpoint remembers; `chain` is its true chain, newest first. A checkpoint remembers records that a history edit
    has undone: only one on the chain counts.
    """
    found = None
    for one in chain:
        if one.epoch == ordered and one.attempt != attempt:
            return None, f"epoch {one.epoch} was undone since the order"
        if one.epoch <= ordered:
            break
        if one.edit:
            return None, f"a {one.edit} since the order, epoch {one.epoch}"
        if one.epoch == recorded:
            found = one.epoch
    return found, ""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """What is known of one member of a snapshot that has no outcome yet."""

    record: int | None = None  # its epoch m on the true chain
    held: bool = False  # every sink that is a channel holds m
    trouble: str = ""  # a history edit since the order, another spec, a sink that was set aside


class Outcome(Enum):
    """What becomes of a snapshot."""

    WAIT = "wait"
    COMMIT = "commit"
    ABORT = "abort"


def judge(
    members: Mapping[str, MemberFacts], misfits: Iterable[str], *, expired: bool, written: Outcome | None = None
) -> tuple[Outcome, str]:
    """Return what becomes of a snapshot, and why.

    `misfits` are the channels that do not fit, once every member has its record: the reader's position lies beyond the
    end of the writer's record, or on an undone version. `written` is the outcome that exists: nothing changes it.
    """
    if written is not None:
        return written, ""
    trouble = [f"{name}: {facts.trouble}" for name, facts in sorted(members.items()) if facts.trouble]
    if trouble:
        return Outcome.ABORT, "; ".join(trouble)
    missing = sorted(name for name, facts in members.items() if facts.record is None or not facts.held)
    if missing:
        if expired:
            return Outcome.ABORT, f"the time limit has passed, and these have no record: {', '.join(missing)}"
        return Outcome.WAIT, ", ".join(missing)
    wrong = sorted(misfits)
    if wrong:
        return Outcome.ABORT, f"the reader is beyond the record of the writer: {', '.join(wrong)}"
    return Outcome.COMMIT, ""


def lower_cut(
    cut: Mapping[str, int],
    channels: Iterable[tuple[str, str]],
    fits: Callable[[str, int, str, int], bool],
    below: Callable[[str, int], int | None],
) -> dict[str, int] | None:
    """Return the newest consistent cut at or below `cut`: epochs by member; None if there is none.

    `channels` are pairs of writer and reader; `fits(writer, epoch, reader, epoch)` compares two epochs; `below` returns
    the epoch before one, or None at the floor. Readers are lowered until every channel fits.
    """
    found, ends = dict(cut), list(channels)
    while True:
        wrong = next((r for w, r in ends if not fits(w, found[w], r, found[r])), None)
        if wrong is None:
            return found
        lower = below(wrong, found[wrong])
        if lower is None:
            return None
        found[wrong] = lower


# -- a restore ----------------------------------------------------------------------------------------


def find_blocking(holds: Iterable[str], mine: str = "") -> str | None:
    """Return the restore that keeps somebody who has just claimed a member from going on; `mine` is its own restore.

    Asked under the claim: a restore holds first and claims then, so one of the two sees the other.
    """
    return next((restore for restore in holds if restore != mine), None)


class Decision(Enum):
    """What was decided about a restore; written once."""

    GO = "go"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class RestoreState:
    """What is known of a restore. `members` are in the order in which they are held."""

    members: tuple[str, ...]
    held: frozenset[str] = frozenset()  # those that have our hold, and a claim under it
    foreign: str = ""  # a member that another restore holds
    problem: str | None = None  # why a member cannot be held or restored; None: not checked yet; empty: all can
    decision: Decision | None = None
    jumped: frozenset[str] = frozenset()
    released: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Write the hold into a member's home, then claim the member."""

    member: str


@dataclass(frozen=True, slots=True)
class Check:
    """Check every record, file and source under the claims."""


@dataclass(frozen=True, slots=True)
class Decide:
    """Write the decision, unless one exists."""

    decision: Decision
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Jump:
    """Take a member to its record, in one epoch."""

    member: str


@dataclass(frozen=True, slots=True)
class Release:
    """Write the outcome: all holds end at once."""


RestoreStep = Hold | Check | Decide | Jump | Release


def next_step(state: RestoreState) -> RestoreStep | None:
    """Return the next step of a restore; None if it has ended.

    Before the decision, whatever stands against it withdraws the restore. Afterwards it only goes forward.
    """
    if state.released or state.decision is Decision.WITHDRAWN:
        return None
    if state.decision is None:
        if state.foreign:
            return Decide(Decision.WITHDRAWN, f"another restore holds {state.foreign}")
        if state.problem:
            return Decide(Decision.WITHDRAWN, state.problem)
        free = next((name for name in state.members if name not in state.held), None)
        if free is not None:
            return Hold(free)
        if state.problem is None:
            return Check()
        return Decide(Decision.GO)
    behind = next((name for name in state.members if name not in state.jumped), None)
    return Jump(behind) if behind is not None else Release()

"""Restores a topology to a snapshot, or to the newest consistent cut at a time: every member, or none.

The steps are those of `topology.decide.next_step`: hold every member, check, decide once, take each member to its
epoch, release all. Every step is durable and can be repeated: the same command finishes a killed restore, or finds that
it was withdrawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import cast

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import ConfigError, FirnlineError, RollbackRefusedError, SinkError
from firnline.history.edits.rollback import Rollback, RollbackPlan, find_epoch_at
from firnline.history.topology.channels import (
    Comparison,
    channels_among,
    check_channels,
    find_missing,
    find_parts_sinks,
    find_position,
    find_topics,
)
from firnline.history.topology.graph import Channel, Topology
from firnline.history.topology.snapshot import Snapshots, announce_channels, find_tables, start_from_copy
from firnline.names import JOURNAL
from firnline.run.followers import join
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.topology import check_hold, has_ended
from firnline.sinks.base import Sink
from firnline.sinks.kafka.sink import KafkaSink
from firnline.sinks.known import find_away
from firnline.topology import decide
from firnline.topology.decide import Decision, RestoreState, lower_cut, next_step
from firnline.topology.records import Hold, RestoreOrder, TopologyHome, delete_hold, find_holds, put_hold
from firnline.types import Clock, Ids

NAMED = 3  # examples in a message
_OTHER_TARGET = "Name a later time, or a snapshot: firnline topology list"


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """How a restore ended."""

    order: RestoreOrder
    decision: Decision
    reason: str = ""
    epochs: dict[str, int] = field(default_factory=dict)  # the new epoch of each member


# -- where to -----------------------------------------------------------------------------------------


def find_snapshot_epochs(snapshots: Snapshots, words: str) -> tuple[str, dict[str, int]]:
    """Return the id of a completed snapshot and the epochs of its members.

    Raises:
        ConfigError: there is none, it is not complete or was dropped, or the topology has other members now.
    """
    order = snapshots.get_order(words)
    outcome = snapshots.home.find_outcome(order.snapshot)
    why = ""
    if outcome is None:
        why = "it is not complete yet"
    elif outcome.status != "committed":
        why = f"it failed: {outcome.reason}"
    elif snapshots.home.is_dropped(order.snapshot):
        why = "it was dropped"
    if outcome is None or why:
        raise ConfigError(
            f"snapshot {order.snapshot} cannot be restored: {why}",
            hint="firnline topology list; or restore to a time: firnline topology restore --at TIME",
        )
    if set(outcome.records) != set(snapshots.topology.members):
        names = ", ".join(sorted(set(outcome.records) ^ set(snapshots.topology.members)))
        raise ConfigError(
            f"the topology has other members than snapshot {order.snapshot}: {names}",
            hint="Restore with the topology file that it was taken with.",
        )
    return order.snapshot, dict(outcome.records)


def find_epochs_at(snapshots: Snapshots, moment: datetime) -> dict[str, int]:
    """Return the newest consistent cut at or before a time, computed from the ledgers.

    Raises:
        ConfigError: a channel cannot be compared.
        RollbackRefusedError: no consistent cut is left: it reaches back to the floors.
    """
    check_channels(snapshots.topology)
    comparison = Comparison(snapshots.topology, snapshots.opened)
    members = {name: _Past(pipeline, comparison) for name, pipeline in snapshots.opened.items()}
    by_ends: dict[tuple[str, str], list[Channel]] = {}
    for channel in snapshots.topology.channels:
        by_ends.setdefault((channel.writer, channel.reader), []).append(channel)

    def fits(writer: str, end: int, reader: str, at: int) -> bool:
        entry = members[reader].entries[at]
        positions = [(one, find_position(entry, one)) for one in by_ends[writer, reader]]
        return all(position is None or comparison.fits(one, end, position) for one, position in positions)

    begin: dict[str, int] = {}
    for name, past in members.items():
        try:
            at = past.at_or_below(find_epoch_at(past.pipeline, moment))
        except RollbackRefusedError as error:
            raise RollbackRefusedError(f"{name}: {error.message}", hint=_OTHER_TARGET) from error
        if at is None:
            words = f"{name} has no epoch by {moment.isoformat(timespec='seconds')} that it can still go back to"
            raise RollbackRefusedError(words, hint=_OTHER_TARGET)
        begin[name] = at
    found = lower_cut(begin, by_ends, fits, lambda name, epoch: members[name].at_or_below(epoch - 1))
    if found is None:
        raise RollbackRefusedError(
            f"no consistent cut by {moment.isoformat()} is left: it reaches back to the floors",
            hint="checkpoint.rollback_window sets how far back; or restore a snapshot: firnline topology list",
        )
    return found


def find_entry(pipeline: OpenPipeline, epoch: int) -> LedgerEntry:
    """Return an epoch of the true history of a pipeline. Raises RollbackRefusedError if it has none."""
    head = pipeline.deciding.load_committed()
    for entry, _ in pipeline.ledger.entries(head.entry):
        if entry.epoch == epoch:
            return entry
    raise RollbackRefusedError(f"{pipeline.options.name} has no epoch {epoch}")


class _Past:
    """The epochs that a member can go back to."""

    def __init__(self, pipeline: OpenPipeline, comparison: Comparison) -> None:
        self.pipeline = pipeline
        self._comparison = comparison
        head = pipeline.deciding.load_committed()
        floor = head.checkpoint.floor if head.checkpoint is not None else 0
        self.entries: dict[int, LedgerEntry] = {}
        for entry, _ in pipeline.ledger.entries(head.entry):
            if entry.epoch < max(floor, 1) or entry.kind == "baseline":
                break
            self.entries[entry.epoch] = entry
        self._tables = [  # one that has yet to begin is not there; `version_of` reads the version of the handle
            sink.name for sink in find_tables(pipeline) if sink.load_committed().exists and sink.name != JOURNAL
        ]
        self._tables += (sink.name for sink in find_parts_sinks(pipeline))

    def at_or_below(self, epoch: int) -> int | None:
        """Return the newest epoch at or below one that every table can go back to."""
        name = self.pipeline.options.name
        for one in sorted((known for known in self.entries if known <= epoch), reverse=True):
            if all(self._comparison.find_version(name, table, one) is not None for table in self._tables):
                return one
        return None


# -- planning -----------------------------------------------------------------------------------------


def plan_restore(snapshots: Snapshots, order: RestoreOrder) -> dict[str, RollbackPlan]:
    """Return what a restore does to each member. Read-only. Obstacles are in the plans."""
    plans = {}
    for name in sorted(order.epochs):
        try:
            plans[name] = _rollback(snapshots.topology, snapshots.opened[name], order).plan()
        except RollbackRefusedError as error:  # the epoch is not in its history any more
            copy = _name_copy(snapshots, order)
            hint = f"Restore to another snapshot or time: firnline topology list. {copy}".strip()
            raise RollbackRefusedError(f"{name}: {error.message}", hint=hint) from error
    return plans


def find_inconsistent(snapshots: Snapshots, order: RestoreOrder) -> list[str]:
    """Return, in words, what becomes inconsistent because some members stay as they are. Read-only."""
    found, comparison = [], Comparison(snapshots.topology, snapshots.opened)
    for channel in snapshots.topology.channels:
        if channel.kind == "delta" and channel.sink in order.leave and channel.writer in order.epochs:
            found.append(
                f"{channel.reader} reads again what sink {channel.sink} of {channel.writer} keeps, and then gets it "
                f"once more: {channel.writer} writes it again"
            )
            continue
        if (channel.writer in order.without) == (channel.reader in order.without):
            continue
        reader, writer = snapshots.opened[channel.reader], snapshots.opened[channel.writer]
        if channel.reader in order.without:
            head = reader.deciding.load_committed()
            position = head.checkpoint.positions.get(channel.source) if head.checkpoint is not None else None
            if channel.kind == "delta":
                writer.sink(channel.sink).load_committed()  # `version_of` reads the version of the handle
            if position is not None and not comparison.fits(channel, order.epochs[channel.writer], position):
                then = (
                    "its next run stops and names the epoch to go back to"
                    if channel.kind == "delta"
                    else "it gets them again under new ids"
                )
                found.append(
                    f"{channel.reader} has read rows of {channel.writer} that are undone: its own stay, and {then}"
                )
        else:
            found.append(
                f"{channel.reader} reads again what {channel.writer} has written since: {channel.writer} keeps it"
            )
    return found


def check_plans(snapshots: Snapshots, plans: Mapping[str, RollbackPlan], order: RestoreOrder) -> None:
    """Raise RollbackRefusedError with every obstacle of every member, and the command that leaves what must be left."""
    refusals = {name: plan.refusals for name, plan in plans.items() if plan.refusals}
    if not refusals:
        return
    errors = [error for of_member in refusals.values() for error in of_member]
    hint = errors[0].hint
    named = (sink for error in errors for sink in cast("list[str]", error.fields.get("leave", [])))
    leave = sorted({*order.leave, *named})
    if all("leave" in error.fields for error in errors):
        flags = " ".join([*(f"--without {name}" for name in order.without), *(f"--leave {sink}" for sink in leave)])
        target = order.target if snapshots.home.find_order(order.target) else f"--at {order.target}"
        hint = (
            "Readers outside see the undone events, and then get them again under new ids; members skip them. To "
            f"accept that: firnline topology restore {target} {flags}"
        )
    elif words := _name_copy(snapshots, order):
        hint = f"{hint} {words}".strip()
    reasons = [f"{name}: {error.message}" for name, of_member in refusals.items() for error in of_member]
    raise RollbackRefusedError("; ".join(reasons), hint=hint, reasons=reasons)


def _name_copy(snapshots: Snapshots, order: RestoreOrder) -> str:
    """Return how to start from the copy of the snapshot, which needs nothing of the tables; empty without a copy."""
    copy = snapshots.find_copy(order.target)
    return f"A new topology can start from the copy of the snapshot: {start_from_copy(copy)}" if copy else ""


def _rollback(topology: Topology, pipeline: OpenPipeline, order: RestoreOrder) -> Rollback:
    name = pipeline.options.name
    return Rollback(
        pipeline,
        order.epochs[name],
        accept=order.accept,
        leave=[sink.name for sink in pipeline.sinks[1:] if sink.name in order.leave],
        restore=order.restore,
        covered=[one.source for one in channels_among(topology, order.epochs) if one.reader == name],
    )


def find_or_order(
    snapshots: Snapshots,
    target: str,
    epochs: Mapping[str, int],
    clock: Clock,
    ids: Ids,
    *,
    leave: Collection[str] = (),
    accept: Collection[str] = (),
    without: Collection[str] = (),
    command: str = "",
) -> RestoreOrder:
    """Return the order of a restore to a target: the one that was begun, or a new one that is not written yet.

    One that was begun and not decided has changed nothing: the same command goes on with it, and another one puts its
    own order in its place. One that was decided is finished first, with the flags that it was begun with.

    Raises:
        ConfigError: another restore was decided and has not ended; a member of it is gone; or `without` names nobody.
    """
    unknown = sorted(set(without) - set(epochs))
    if unknown or set(without) == set(epochs):
        raise ConfigError(
            f"--without {' '.join(unknown)}: no such member" if unknown else "--without names every member",
            hint=f"The members are {', '.join(sorted(epochs))}.",
        )
    order = RestoreOrder(
        restore=ids.new(),
        target=target,
        created_at=clock.now().isoformat(),
        epochs={name: epoch for name, epoch in epochs.items() if name not in without},
        leave=tuple(leave),
        accept=tuple(accept),
        without=tuple(sorted(without)),
        command=command,
    )
    begun = snapshots.home.find_unfinished()
    if begun is None:
        return order
    if snapshots.home.find_decision(begun.restore) is None:
        return begun if begun.wants() == order.wants() else order
    if begun.wants() != replace(order, epochs=begun.epochs).wants():
        raise _name_unfinished(begun)
    check_members(snapshots, begun)
    return begun


def find_decided(snapshots: Snapshots, target: str) -> RestoreOrder | None:
    """Return the restore to a target that was decided and has not ended."""
    begun = snapshots.home.find_unfinished()
    if begun is None or begun.target != target or snapshots.home.find_decision(begun.restore) is None:
        return None
    return begun


def check_members(snapshots: Snapshots, order: RestoreOrder) -> None:
    """Raise ConfigError if the topology lacks a member of a restore."""
    gone = sorted(order.epochs.keys() - snapshots.topology.members.keys())
    if gone:
        raise ConfigError(
            f"restore {order.restore} takes {', '.join(gone)} back, which is no member of the topology now",
            hint="Finish it with the topology file that it was begun with.",
        )


def _name_unfinished(begun: RestoreOrder) -> ConfigError:
    return ConfigError(
        f"restore {begun.restore} to {begun.target} has begun, and not ended",
        hint=f"Finish it first: {begun.command or f'firnline topology restore {begun.target} --yes'}",
    )


# -- performing ---------------------------------------------------------------------------------------


def perform_restore(
    snapshots: Snapshots, order: RestoreOrder, run: str, clock: Clock, say: Callable[[str], None]
) -> RestoreResult:
    """Restore every member, or none. Repeatable: it goes on where a killed one ended. Interrupted before the decision,
    it is withdrawn.

    Raises:
        FirnlineError: after the decision, a member cannot be reached or cannot go back. The holds stay; the same
            command goes on.
    """
    home = snapshots.home
    check_members(snapshots, order)
    _withdraw_others(home, order)
    with contextlib.suppress(FileExistsError):
        home.put_restore(order)
    try:
        return _perform(snapshots, order, run, clock, say)
    except BaseException:
        with contextlib.suppress(FirnlineError, OSError):  # nothing is undecided behind somebody who gives up
            home.decide_restore(order.restore, Decision.WITHDRAWN, "it was interrupted before the decision")
        raise


def _perform(
    snapshots: Snapshots, order: RestoreOrder, run: str, clock: Clock, say: Callable[[str], None]
) -> RestoreResult:
    home = snapshots.home
    announce_channels(snapshots.topology, snapshots.opened, home)  # before void offsets can be in a topic
    performing = _Performing(snapshots, order, run, say)
    decided = home.find_decision(order.restore)
    state = RestoreState(tuple(sorted(order.epochs)), decision=decided[0] if decided is not None else None)
    reason = decided[1] if decided is not None else ""
    while (step := next_step(state)) is not None:
        match step:
            case decide.Hold(name):
                foreign, problem = performing.hold(name)
                state = replace(state, held=state.held | {name}, foreign=name if foreign else "", problem=problem)
            case decide.Check():
                state = replace(state, problem=performing.check())
            case decide.Decide(decision, words):
                reason = words
                state = replace(state, decision=home.decide_restore(order.restore, decision, words))
                say(f"decided: {state.decision.value}{f' ({words})' if words else ''}" if state.decision else "")
            case decide.Jump(name):
                performing.jump(name)
                state = replace(state, jumped=state.jumped | {name})
            case decide.Release():
                home.release(order.restore, clock.now().isoformat(), performing.epochs)
                state = replace(state, released=True)
    performing.clean_up()
    assert state.decision is not None
    return RestoreResult(order, state.decision, reason, performing.epochs)


def _withdraw_others(home: TopologyHome, order: RestoreOrder) -> None:
    """Withdraw restores that were begun and not decided: nothing has changed, and this one takes their place.

    Raises:
        ConfigError: one was decided.
    """
    for other in home.load_unfinished():
        if other.restore != order.restore:
            reason = f"restore {order.restore} to {order.target} took its place"
            if home.decide_restore(other.restore, Decision.WITHDRAWN, reason) is Decision.GO:
                raise _name_unfinished(other)


def withdraw_restores(snapshots: Snapshots) -> list[RestoreOrder]:
    """Withdraw the restores that were begun and not decided, and return them. No row has changed, and none does.

    Raises:
        ConfigError: one was decided; it can only be finished.
    """
    withdrawn = []
    for order in snapshots.home.load_unfinished():
        if snapshots.home.decide_restore(order.restore, Decision.WITHDRAWN, "it was withdrawn") is Decision.GO:
            raise _name_unfinished(order)
        for name in order.epochs.keys() & snapshots.opened.keys():
            with contextlib.suppress(OSError):  # a hold that is left behind is ignored
                delete_hold(snapshots.opened[name].storage, name, order.restore)
        withdrawn.append(order)
    return withdrawn


class _Performing:
    def __init__(self, snapshots: Snapshots, order: RestoreOrder, run: str, say: Callable[[str], None]) -> None:
        self._snapshots = snapshots
        self._home = snapshots.home
        self._topology = snapshots.topology
        self._members = {name: open_pipeline(snapshots.topology.members[name]) for name in order.epochs}
        self._order = order
        self._run = run
        self._say = say
        self.epochs: dict[str, int] = {}

    def hold(self, name: str) -> tuple[bool, str | None]:
        """Hold a member and claim it. Returns whether another restore holds it, and why it cannot be claimed."""
        try:
            return self._hold(name), None
        except FirnlineError as error:
            return False, f"{name}: {error.message}"

    def _hold(self, name: str) -> bool:
        pipeline = self._members[name]
        self._put_hold(name)
        holds = find_holds(pipeline.storage, name, pipeline.options.home.storage_options)
        if decide.find_blocking((hold.restore for hold in holds), self._order.restore) is not None:
            return True
        pipeline.deciding.claim(self._run)
        self._say(f"{name} is held")
        return False

    def _put_hold(self, name: str) -> None:
        """Write the hold of a member, unless the restore has ended: this command may have stood still meanwhile.

        Raises:
            FencedError: another command has finished or withdrawn the restore.
        """
        storage = self._members[name].storage
        if not self._home.is_released(self._order.restore):
            put_hold(storage, name, Hold(self._order.restore, self._home.name, self._home.root, self._order.command))
            if not self._home.is_released(self._order.restore):
                return
            delete_hold(storage, name, self._order.restore)
        raise has_ended(self._order.restore)

    def check(self) -> str:
        """Check every member under its claim. Returns what stands against the restore."""
        if self._home.is_dropped(self._order.target):
            return f"snapshot {self._order.target} was dropped"
        problems = []
        for name, pipeline in self._members.items():
            try:
                _rollback(self._topology, pipeline, self._order).check(self._run)
                for sink in find_topics(self._topology, pipeline):
                    sink.end_unfinished()  # of a run that was killed: without that its head is unknown
                    sink.find_ends(self._order.epochs[name])  # it must be reached: it will name what is void
                    _check_not_away(pipeline, sink, self._order.epochs[name])
            except FirnlineError as error:
                problems.append(f"{name}: {error.message}")
        problems = problems or self._check_ranges()
        words = _name_copy(self._snapshots, self._order) if problems else ""
        return "; ".join(problems) + (f". {words}" if words else "")

    def _check_ranges(self) -> list[str]:
        """Return what is gone of the channels: each reader must find what it had not read by its epoch."""
        problems = []
        for channel in channels_among(self._topology, self._order.epochs):
            writer, reader = self._members[channel.writer], self._members[channel.reader]
            position = find_position(find_entry(reader, self._order.epochs[channel.reader]), channel)
            if position is None:
                continue
            try:
                gone = find_missing(self._topology, channel, writer, self._order.epochs[channel.writer], position)
            except FirnlineError as error:
                problems.append(f"{channel.reader}: {channel.place} cannot be read: {error.message}")
                continue
            if gone:
                shown = ", ".join(gone[:NAMED]) + (" ..." if len(gone) > NAMED else "")
                problems.append(f"{channel.reader}: it has yet to read, from {channel.place}, what is gone: {shown}")
        return problems

    def jump(self, name: str) -> None:
        """Take a member to its epoch, in every sink; one that was taken there before only catches up."""
        pipeline = self._members[name]
        self._put_hold(name)  # it may be damaged
        head = pipeline.deciding.load_committed()
        done = head.entry is not None and pipeline.ledger.load(head.entry).edit.get("restore") == self._order.restore
        if not done:
            _, receipt = _rollback(self._topology, pipeline, self._order).perform(self._run, self._say)
            self.epochs[name] = receipt.epoch
        else:
            self.epochs[name] = head.epoch
        self._bring_in_sync(pipeline)

    def _bring_in_sync(self, pipeline: OpenPipeline) -> None:
        """Apply the jump to every other table, and to the topics that members read: a kill or an outage may have come
        between."""
        name = pipeline.options.name
        epoch = self.epochs[name]
        followers = {sink.name for sink in (*find_parts_sinks(pipeline), *find_topics(self._topology, pipeline))}
        left = set(self._order.leave) - {one.sink for one in self._topology.channels if one.writer == name}
        others = [*find_tables(pipeline)[1:], *(sink for sink in pipeline.sinks if sink.name in followers)]
        behind = [sink for sink in others if sink.name not in left and not _holds(sink, epoch)]
        if not behind:
            return
        held = pipeline.deciding.claim(self._run)
        check_hold(pipeline, self._order.restore)
        away = find_away(held.checkpoint, pipeline.options.followers)
        for sink in behind:
            if sink.name not in away and join(pipeline, sink, self._run, held.generation, held) < epoch:
                raise SinkError(f"{sink.name} does not hold epoch {epoch} of {name!r} yet")

    def clean_up(self) -> None:
        """Delete the holds, which count no longer. One that is left behind is ignored."""
        for name, pipeline in self._members.items():
            with contextlib.suppress(OSError):
                delete_hold(pipeline.storage, name, self._order.restore)


def _check_not_away(pipeline: OpenPipeline, sink: KafkaSink, to_epoch: int) -> None:
    """Raise RollbackRefusedError if a sink that is set aside would have to say that rows of it are void."""
    checkpoint = pipeline.deciding.load_committed().checkpoint
    away = find_away(checkpoint, pipeline.options.followers)
    head = sink.read_head() if sink.name in away else None
    if head is None or max(head.epoch, head.partial.epoch if head.partial is not None else 0) <= to_epoch:
        return
    raise RollbackRefusedError(
        f"sink {sink.name!r} was set aside ({away[sink.name]}), and holds rows that would be undone, which members "
        f"would read; take it back first: firnline sinks resume {sink.name} --accept-gap"
    )


def _holds(sink: Sink, epoch: int) -> bool:
    """Return whether a sink is known to hold an epoch. A killed command may have left a transaction open."""
    try:
        return sink.read_fence().epoch >= epoch
    except SinkError:
        return False

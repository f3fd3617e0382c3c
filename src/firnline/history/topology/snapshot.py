"""Snapshots of a topology: order, watch, complete or abort, drop.

In this order:
1. Tell readers which of their topics are channels. Open pins in every table: everything from its readers' positions
   on stays.
2. Write the order.
3. Ask every member. Runs record the snapshot by themselves.
4. When every member has its record and every channel holds the marker: check every channel, narrow the pins, write the
   one outcome. Anybody may do that, at any time.
A kill at any point leaves an open snapshot, which the next command completes or aborts; or pins and requests that
nobody needs, which the next order deletes.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from firnline.checkpoint.codec import canonical, checksum, parse, unseal
from firnline.checkpoint.ledger import LedgerEntry, edit_name
from firnline.errors import ConfigError, DamagedError, FirnlineError, LedgerHoleError, RollbackRefusedError, SinkError
from firnline.history.state import state_bytes
from firnline.history.status import is_leased
from firnline.history.topology.channels import (
    Comparison,
    TableChain,
    channels_among,
    channels_from,
    check_channels,
    find_parts_sinks,
    find_position,
    find_topic_sink,
    find_topics,
    reached_version,
    topics_read_by,
)
from firnline.history.topology.graph import Topology
from firnline.maintenance.log_names import DEFAULT_RETENTION, LogNames, file_retention
from firnline.maintenance.references import is_live, read_pins
from firnline.maintenance.survey import open_table
from firnline.names import JOURNAL, PINS, TOPOLOGY_PIN, TOPOLOGY_SAVEPOINT, topology_copies, topology_copy
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.sinks.base import Head, Sink
from firnline.sinks.delta.log_cleanup import find_clean_up
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.parts.table import PartTable
from firnline.sinks.delta.sink import as_delta
from firnline.sinks.delta.sweeps import SweepLog
from firnline.sinks.delta.table import Table, find_log_retention
from firnline.sinks.kafka.sink import KafkaSink
from firnline.sinks.known import find_away
from firnline.storage import Storage, normalise
from firnline.topology import decide
from firnline.topology.decide import MemberFacts, Outcome, judge
from firnline.topology.records import (
    Marker,
    MemberOrder,
    Order,
    SnapshotOutcome,
    TopologyHome,
    Undone,
    ask,
    delete_pin,
    load_asked,
    put_pin,
    stop_asking,
)
from firnline.topology.topics import TopicChannel, put_channels
from firnline.types import Clock, Ids, Json

logger = logging.getLogger(__name__)

AT_ONCE = 16  # tables of a member that are looked at
CLEAN_UP_SECONDS = 30.0  # for which an order waits for a clean-up of a log


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """What one member has done for a snapshot."""

    facts: MemberFacts
    entry: LedgerEntry | None = None  # of its record
    recorded_at: str | None = None

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the checkpoint and of the state that it names; zeros without a record."""
        checkpoint = self.entry.checkpoint if self.entry is not None else None
        return {
            "checkpointed_size_bytes": len(canonical(checkpoint.to_json())) if checkpoint is not None else 0,
            "state_size_bytes": state_bytes(checkpoint) if checkpoint is not None else 0,
        }


def _is_done(record: MemberRecord) -> bool:
    """Return whether a member has its record, and every channel holds it."""
    return record.facts.record is not None and record.facts.held


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """One snapshot, with the fields that Flink gives a checkpoint, in the same order."""

    id: str
    status: str  # IN_PROGRESS, COMPLETED, FAILED, DROPPED
    trigger_timestamp: str
    latest_ack_timestamp: str | None
    end_to_end_duration_ms: int | None
    checkpointed_size_bytes: int | None  # of the checkpoints of its records; None: not recorded
    state_size_bytes: int | None
    acknowledged: str  # members that have recorded it / members
    restorable_until: str | None  # in place
    copy: str | None  # a savepoint, from which a new topology can start at any time
    reason: str
    members: list[dict[str, Json]] = field(default_factory=list)

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


class Snapshots:
    """The snapshots of one topology. `file` names it in commands of messages, and `files` its members."""

    def __init__(
        self,
        topology: Topology,
        home: TopologyHome,
        clock: Clock,
        ids: Ids,
        file: str = "",
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.topology = topology
        self.home = home
        self._clock = clock
        self._ids = ids
        self._file = file
        self._seen: dict[str, dict[str, MemberRecord]] = {}  # of open snapshots, by id and member
        self.files = files or {}
        self.opened = {name: open_pipeline(options) for name, options in topology.members.items()}

    def name_command(self, verb: str, members: Iterable[str]) -> list[str]:
        """Return the command for each of some members, as it can be typed."""
        return [shlex.join(["firnline", verb, self.files.get(name, f"{name}.yml")]) for name in members]

    def find_running(self) -> list[str]:
        """Return the members that have a run, by their leases; an idle run may have claimed nothing yet. Read-only."""
        return [
            name
            for name, pipeline in self.opened.items()
            if is_leased(pipeline) or is_live(pipeline.storage, name, pipeline.deciding.read_fence().generation)
        ]

    # -- order ----------------------------------------------------------------------------------------

    def order(self, timeout: timedelta, max_hold: timedelta | None = None) -> Order:
        """Order a snapshot: pins, then the order, then every member is asked.

        Args:
            max_hold: How long it may be held; runs of members warn afterwards.

        Raises:
            ConfigError: a channel has no markers or several writers, or a member has no epoch yet.
        """
        check_channels(self.topology)
        self._tidy()
        heads = {name: pipeline.deciding.load_committed() for name, pipeline in self.opened.items()}
        fresh = sorted(name for name, head in heads.items() if head.checkpoint is None)
        if fresh:
            have = "has" if len(fresh) == 1 else "have"
            raise ConfigError(
                f"{join_names(fresh)} {have} committed nothing yet, so there is nothing to record",
                hint=f"Run it first, or leave it out of the topology: {'; '.join(self.name_command('run', fresh))}",
            )
        now = self._clock.now()
        order = Order(
            snapshot=self._ids.new(),
            topology=self.home.name,
            created_at=now.isoformat(),
            expires_at=(now + timeout).isoformat(),
            members={
                name: MemberOrder(
                    head.epoch, head.attempt, fingerprint_of(self.topology.members[name]), tuple(self._tables_of(name))
                )
                for name, head in heads.items()
            },
            channels=tuple(channel.to_json() for channel in self.topology.channels),
            hold_until=(now + max_hold).isoformat() if max_hold is not None else "",
            file=self._file,
            number=max((one.number for one in self._load_kept()), default=0) + 1,
        )
        announce_channels(self.topology, self.opened, self.home)
        tables: dict[str, tuple[str, list[Sink]]] = {}  # the parts of a sink are one
        for name in self.opened:
            for sink in self._find_pinned(name):
                tables.setdefault(f"{name}/{sink.name}", (name, []))[1].append(sink)
        state = decide.OrderState(tuple(tables), tuple(order.members))
        while (step := decide.next_order_step(state)) is not None:
            match step:
                case decide.Pin(table):
                    try:
                        writer, parts = tables[table]
                        _each(partial(self._open_pin, order.snapshot, writer, heads=heads), parts)
                    except FirnlineError:
                        for name in self.opened:
                            self._delete_pins(name, order.snapshot)
                        raise
                    state = replace(state, pinned=state.pinned | {table})
                case decide.WriteOrder():
                    self.home.put_order(order)
                    state = replace(state, written=True)
                case decide.Ask(name):
                    ask(self.opened[name].storage, name, self._marker(order))
                    state = replace(state, asked=state.asked | {name})
        return order

    def _ask_missing(self, order: Order, records: Mapping[str, MemberRecord]) -> None:
        """Ask the members that have no record; a killed command may not have asked them."""
        for name, record in records.items():
            storage = self.opened[name].storage
            if record.facts.record is None and order.snapshot not in {
                one.snapshot for one in load_asked(storage, name)
            }:
                ask(storage, name, self._marker(order))

    def _marker(self, order: Order) -> Marker:
        return Marker(order.snapshot, order.topology, self.home.root, tuple(sorted(order.members)))

    def _tables_of(self, name: str) -> list[str]:
        return [str(sink.uri) for sink in self._find_pinned(name)]

    def _find_pinned(self, name: str) -> list[Sink]:
        """Return the tables of a member that a snapshot pins: those of its sinks, and the parts of those with a
        template. A part that is a channel is among them before it exists: it may be created before the record."""
        pipeline = self.opened[name]
        found = find_tables(pipeline)
        for sink in find_parts_sinks(pipeline):
            found += sink.open_tables([channel.place for channel in channels_from(self.topology, name, sink.name)])
        return found

    def _open_pin(self, snapshot: str, name: str, sink: Sink, heads: Mapping[str, Head]) -> None:
        """Keep everything of a table from its readers' positions on, or from now on if nobody reads it."""
        fence = sink.read_fence()
        if sink.storage is None or (not fence.exists and not isinstance(sink, PartTable)):
            return
        if not fence.exists:  # all that comes
            put_pin(sink.storage, snapshot, topology=self.home.name, home=self.home.root, since=-1, versions=[])
            return
        readers = []
        for channel in channels_from(self.topology, name, sink.name, str(sink.uri)):
            checkpoint = heads[channel.reader].checkpoint
            if checkpoint is not None and channel.source in checkpoint.positions:
                readers.append(reached_version(checkpoint.positions[channel.source]))
        since = decide.pin_from(fence.version, readers)
        put_pin(sink.storage, snapshot, topology=self.home.name, home=self.home.root, since=since, versions=[])
        self._wait_for_clean_up(sink.storage, str(sink.uri), since)
        _check_spared(sink, since)

    def _wait_for_clean_up(self, storage: Storage, table: str, since: int) -> None:
        """Wait, behind an open pin, for clean-ups of the log that may not have seen it.

        Raises:
            SinkError: one takes too long.
        """
        deadline = self._clock.monotonic() + CLEAN_UP_SECONDS
        while (key := find_clean_up(storage, since)) is not None:
            if self._clock.monotonic() >= deadline:
                raise SinkError(
                    f"the log of {table} is being cleaned up, and may lose what the snapshot needs",
                    hint=f"Try again. If no process works on the table any more, delete {table}/{key} first.",
                )
            self._clock.sleep(0.1)

    def _tidy(self) -> None:
        """Delete what a killed command left: pins of snapshots that nobody keeps, requests of those that have ended."""
        for name, pipeline in self.opened.items():
            for marker in load_asked(pipeline.storage, name):
                is_ours = (marker.topology, marker.home) == (self.home.name, self.home.root)
                if is_ours and self.home.find_outcome(marker.snapshot) is not None:
                    stop_asking(pipeline.storage, name, marker.snapshot)
            tables = self._find_pinned(name)
            for sink, snapshots in zip(tables, _each(self._find_pins, tables), strict=True):
                for snapshot in snapshots:
                    if self._may_unpin(snapshot) and sink.storage is not None:
                        self._void_order(snapshot)
                        delete_pin(sink.storage, snapshot)
        for snapshot in self._find_copies():
            if self._may_unpin(snapshot):
                self._delete_copy(snapshot)

    def _void_order(self, snapshot: str) -> None:
        """Abort a snapshot that has pins and no order: the command that pins for it may be alive, and about to write
        one."""
        if self.home.find_order(snapshot) is None and self.home.find_outcome(snapshot) is None:
            reason = "another command took it for one that was killed; order it again"
            self.home.put_outcome(snapshot, SnapshotOutcome("aborted", self._clock.now().isoformat(), reason))

    def _may_unpin(self, snapshot: str) -> bool:
        """Return whether nobody needs the pins of a snapshot."""
        return self.home.may_unpin(snapshot, ordered=self.home.find_order(snapshot) is not None)

    def _find_pins(self, sink: Sink) -> list[str]:
        found: list[str] = []
        for stat in list(sink.storage.list(PINS)) if sink.storage is not None else ():
            name = stat.name.rsplit("/", 1)[-1]
            if not name.startswith(TOPOLOGY_PIN):
                continue
            with contextlib.suppress(DamagedError, FileNotFoundError):
                assert sink.storage is not None
                pin = unseal(parse(sink.storage.get(f"{PINS}/{name}"), name), name)
                if (pin.get("topology"), pin.get("home")) == (self.home.name, self.home.root):
                    found.append(str(pin["snapshot"]))
        return found

    # -- complete -------------------------------------------------------------------------------------

    def settle(self, order: Order) -> tuple[Outcome, str]:
        """Complete or abort a snapshot if that is due. Returns what becomes of it, and why, or who is missing."""
        written = self.home.find_outcome(order.snapshot)
        if written is not None:
            self._clean_up(order, written)
            return (Outcome.COMMIT if written.status == "committed" else Outcome.ABORT), written.reason
        records = self._read_missing(order)
        complete = all(_is_done(one) for one in records.values())
        if complete:  # what was seen earlier may be undone since
            records = self.read_records(order)
            complete = all(_is_done(one) for one in records.values())
        try:
            misfits = self._find_misfits(records) if complete else []
        except SinkError as error:  # a topic whose state is unknown now: neither a fit nor a misfit
            return Outcome.WAIT, error.message
        expired = self._clock.now() >= datetime.fromisoformat(order.expires_at)
        outcome, reason = judge({n: one.facts for n, one in records.items()}, misfits, expired=expired)
        if outcome is Outcome.WAIT:
            self._ask_missing(order, records)
            return outcome, reason
        if outcome is Outcome.COMMIT:
            self._narrow_pins(order, records)
        made = self.home.put_outcome(order.snapshot, self._make_outcome(outcome, reason, records))
        self._seen.pop(order.snapshot, None)
        self._clean_up(order, made)
        return (Outcome.COMMIT if made.status == "committed" else Outcome.ABORT), made.reason

    def abort(self, order: Order, reason: str) -> None:
        """Abort a snapshot that has no outcome."""
        outcome = SnapshotOutcome("aborted", self._clock.now().isoformat(), reason)
        self._clean_up(order, self.home.put_outcome(order.snapshot, outcome))

    def _make_outcome(self, outcome: Outcome, reason: str, records: Mapping[str, MemberRecord]) -> SnapshotOutcome:
        now = self._clock.now()
        if outcome is Outcome.ABORT:
            return SnapshotOutcome("aborted", now.isoformat(), reason)
        epochs = {name: one.entry.epoch for name, one in records.items() if one.entry is not None}
        return SnapshotOutcome(
            status="committed",
            at=now.isoformat(),
            records=epochs,
            restorable_until=(now + self._find_retention()).isoformat(),
            facts={
                "recorded_at": {name: one.recorded_at for name, one in records.items()},
                "sizes": {name: one.sizes() for name, one in records.items()},
            },
        )

    def read_records(self, order: Order) -> dict[str, MemberRecord]:
        """Read what every member has done, from its deciding sink and its ledger."""
        return {name: self._read_record(order, name) for name in order.members}

    def _read_missing(self, order: Order) -> dict[str, MemberRecord]:
        """Like `read_records`, but a member that was seen with its record is not read again."""
        known = self._seen.setdefault(order.snapshot, {})
        for name in order.members:
            if name not in known or not _is_done(known[name]):
                known[name] = self._read_record(order, name)
        return dict(known)

    def _read_record(self, order: Order, name: str) -> MemberRecord:
        ordered, pipeline = order.members[name], self.opened.get(name)
        if pipeline is None:
            return MemberRecord(MemberFacts(trouble="it is no longer a member"))
        if fingerprint_of(pipeline.options) != ordered.spec:
            return MemberRecord(MemberFacts(trouble="its spec has changed since the order"))
        head = pipeline.deciding.load_committed()
        if head.checkpoint is None:
            return MemberRecord(MemberFacts(trouble="its history is gone"))
        known = head.checkpoint.topology.get(order.snapshot)
        entries: dict[int, LedgerEntry] = {}

        def chain() -> Iterator[decide.PastEpoch]:
            for entry, _ in pipeline.ledger.entries(head.entry):
                entries[entry.epoch] = entry
                edit = edit_name(entry.kind) if entry.is_history_edit else ""
                yield decide.PastEpoch(entry.epoch, entry.checkpoint.attempt, edit)

        recorded = int(known["epoch"]) if known is not None else None
        try:
            epoch, trouble = decide.find_record(ordered.epoch, ordered.attempt, recorded, chain())
        except LedgerHoleError as error:
            return MemberRecord(MemberFacts(trouble=error.message))
        if epoch is None:
            return MemberRecord(MemberFacts(trouble=trouble))
        record = entries[epoch]
        away = find_away(head.checkpoint, pipeline.options.followers)
        missing = [sink for sink in self._find_holders(pipeline) if not self._holds(sink, order.snapshot, record.epoch)]
        if set_aside := sorted(sink.name for sink in missing if sink.name in away):
            return MemberRecord(MemberFacts(trouble=f"sink {set_aside[0]} was set aside"))
        held = not missing
        made_at = record.checkpoint.created_at
        return MemberRecord(MemberFacts(record.epoch, held), record, made_at)

    def _find_holders(self, pipeline: OpenPipeline) -> list[Sink]:
        """Return the sinks of a member that must hold its record: its tables, and the topics that members read."""
        return [*find_tables(pipeline), *find_parts_sinks(pipeline), *find_topics(self.topology, pipeline)]

    def _holds(self, sink: Sink, snapshot: str, epoch: int) -> bool:
        """Return whether a sink holds a record. Of one with a template, its head says so for all parts."""
        if not isinstance(sink, KafkaSink):
            return sink.read_fence().epoch >= epoch
        try:
            return sink.read_fence().epoch >= epoch and snapshot in sink.read_channel().cuts
        except SinkError as error:  # it cannot be reached, or a killed run left a transaction open: unknown
            logger.warning("unknown whether a topic holds the record: %s", error.message, extra={"sink": sink.name})
            return False

    def _find_misfits(self, records: Mapping[str, MemberRecord]) -> list[str]:
        """Return the channels whose reader has read more than the record of the writer has."""
        found, comparison = [], Comparison(self.topology, self.opened)
        for channel in channels_among(self.topology, records):
            writer, reader = records[channel.writer].entry, records[channel.reader].entry
            assert writer is not None
            assert reader is not None
            position = find_position(reader, channel)
            if position is None:
                continue
            try:
                fits = comparison.fits(channel, writer.epoch, position)
            except RollbackRefusedError as error:
                found.append(f"{channel.place} ({error.message})")
                continue
            if not fits:
                found.append(f"{channel.place} ({channel.writer} to {channel.reader})")
        return found

    def _narrow_pins(self, order: Order, records: Mapping[str, MemberRecord]) -> None:
        """Keep only what a restore or a savepoint needs: the versions of the record and of its readers' positions, and
        what lies between them."""
        for name in records:
            _each(partial(self._narrow_pin, order.snapshot, name, records=records), self._find_pinned(name))

    def _narrow_pin(self, snapshot: str, name: str, sink: Sink, records: Mapping[str, MemberRecord]) -> None:
        entry = records[name].entry
        assert entry is not None
        if sink.storage is None or not (sink.read_fence().exists or isinstance(sink, PartTable)):
            return
        versions: list[int] = []
        files: set[str] = set()
        log_from = sink.read_fence().version
        if sink.name != JOURNAL:
            end = sink.version_of(entry.epoch)
            versions = [end]  # -1: without a table, the pin keeps the log of one that is created later
            for channel in channels_from(self.topology, name, sink.name, str(sink.uri)):
                reader = records[channel.reader].entry if channel.reader in records else None
                position = find_position(reader, channel) if reader is not None else None
                if position is None:
                    continue
                chain = TableChain(self.topology.members[channel.reader], channel.source)
                files.update(chain.files_between(position, end))
                versions.append(reached_version(position))  # for a savepoint
            log_from = max(0, min(versions))
        facts = {"topology": self.home.name, "home": self.home.root, "epoch": entry.epoch, "log_from": log_from}
        known = sorted({one for one in versions if one >= 0})
        put_pin(sink.storage, snapshot, **facts, versions=known, files=sorted(files))

    def _find_retention(self) -> timedelta:
        """Return the shortest time for which tables keep old files and versions if somebody else cleans them up, and
        topics keep records."""
        found = []
        for options in self.topology.members.values():
            for sink in options.sinks:
                if isinstance(sink, DeltaSinkOptions):
                    with contextlib.suppress(ConfigError, SinkError):
                        _, table = open_table(sink.table, dict(sink.storage_options))
                        found += [file_retention(table), find_log_retention(table)]
            for parts in find_parts_sinks(self.opened[options.name]):
                tables = [one.table for one in parts.open_tables()]
                for table, exists in zip(tables, _each(Table.refresh, tables), strict=True):
                    if exists:
                        found += [file_retention(table), find_log_retention(table)]
            for topics in find_topics(self.topology, self.opened[options.name]):
                retention = topics.find_retention()
                found += [retention] if retention is not None else []
        return min(found, default=DEFAULT_RETENTION)

    def _clean_up(self, order: Order, outcome: SnapshotOutcome) -> None:
        """Delete requests and, after an abort, pins. Repeated by every command; what cannot be reached is left."""
        for name in order.members:
            pipeline = self.opened.get(name)
            if pipeline is None:
                continue
            with contextlib.suppress(OSError, FirnlineError):
                stop_asking(pipeline.storage, name, order.snapshot)
                if outcome.status == "aborted":
                    self._delete_pins(name, order.snapshot)

    def _delete_pins(self, name: str, snapshot: str) -> None:
        def delete(sink: Sink) -> None:
            if sink.storage is not None:
                delete_pin(sink.storage, snapshot)

        _each(delete, self._find_pinned(name))

    # -- drop -----------------------------------------------------------------------------------------

    def drop(self, snapshot: str) -> None:
        """Keep a snapshot no longer: members let their floors rise, and the pins go.

        While a restore to it is under way, the pins stay; the next order deletes them.

        Raises:
            ConfigError: there is no such snapshot, or it is still open.
        """
        order = self.get_order(snapshot)
        if self.home.find_outcome(order.snapshot) is None:
            self.abort(order, "dropped before it was complete")
        self.home.put_dropped(order.snapshot, self._clock.now().isoformat())
        if not self._may_unpin(order.snapshot):
            return
        self._delete_copy(order.snapshot)
        for name in order.members:
            if name in self.opened:
                self._delete_pins(name, order.snapshot)

    def find_copy(self, snapshot: str) -> str | None:
        """Return the path of the copy of a snapshot in the home; None if there is none, or it is not complete."""
        folder = topology_copy(self.home.name, snapshot)
        try:
            self.home.storage.stat(f"{folder}/{TOPOLOGY_SAVEPOINT}")
        except FileNotFoundError:
            return None
        return f"{self.home.root}/{folder}"

    def _find_copies(self) -> set[str]:
        """Return the snapshots that have a copy in the home, or a part of one."""
        folder = f"{self.home.storage.root}/{topology_copies(self.home.name)}/"
        return {
            stat.name.removeprefix(folder).split("/", 1)[0]
            for stat in self.home.storage.list(topology_copies(self.home.name))
        }

    def _delete_copy(self, snapshot: str) -> None:
        """Delete the copy of a dropped snapshot, its manifest first. What a kill leaves, the next command deletes."""
        folder = topology_copy(self.home.name, snapshot)
        prefix = self.home.storage.root + "/"
        names = [stat.name.removeprefix(prefix) for stat in self.home.storage.list(folder)]
        for name in sorted(names, key=lambda one: not one.endswith(f"{folder}/{TOPOLOGY_SAVEPOINT}")):
            self.home.storage.delete(name)

    def find_complete(self) -> list[str]:
        """Return the completed snapshots that are kept, oldest first."""
        kept = [one for one in self.home.list_snapshots() if one.is_closed and not one.is_dropped]
        return [order.snapshot for order in self.home.load_orders(kept) if self._is_committed(order.snapshot)]

    def _is_committed(self, snapshot: str) -> bool:
        outcome = self.home.find_outcome(snapshot)
        return outcome is not None and outcome.status == "committed"

    def keep(self, count: int) -> list[str]:
        """Drop all but the newest completed snapshots. Returns the dropped ones.

        One whose epochs a later restore has undone can only be brought back from a copy: without one it is dropped,
        and does not count.
        """
        complete, edits = self.find_complete(), self.home.load_undone()
        undone = [one for one in complete if edits and _find_undone(self.home.find_outcome(one), edits)]
        useless = [one for one in undone if self.find_copy(one) is None]
        old = [one for one in complete if one not in useless][:-count]
        for snapshot in (dropped := [*useless, *old]):
            self.drop(snapshot)
        return dropped

    def limit_hold(self, most: timedelta | int) -> dict[str, str]:
        """Drop snapshots that hold files for too long, or too many of them, oldest first. Returns why, by id.

        Args:
            most: A time since the order; or bytes, of files that only snapshots need.
        """
        dropped: dict[str, str] = {}
        now = self._clock.now()
        for snapshot in self.find_complete():
            if isinstance(most, timedelta):
                held = now - datetime.fromisoformat(self.get_order(snapshot).created_at)
                reason = f"it was held for {held}, longer than {most}" if held > most else ""
            else:
                size = sum(self.find_held_files().values())
                reason = f"snapshots hold {size} bytes, more than {most}" if size > most else ""
            if reason:
                self.drop(snapshot)
                dropped[snapshot] = reason
        return dropped

    def find_held_files(self) -> dict[str, int]:
        """Return the files that only completed snapshots need, with their sizes: no table has them any more."""
        held: dict[str, int] = {}
        for name in self.opened:
            for sink in self._find_pinned(name):
                if sink.storage is None or sink.name == JOURNAL or not sink.read_fence().exists:
                    continue
                table = as_delta(sink).table
                table.refresh()
                log = LogNames(sink.storage, table, table.storage_options or {})
                pins = [pin for pin in read_pins(sink.storage) if pin.get("kind") == "topology"]
                needed = {key for pin in pins for path in pin.get("files", []) for key in log.keys(str(path))}
                needed |= {key for pin in pins for version in pin["versions"] for key in log.pinned(int(version))}
                for key in needed - set(log.snapshot()):
                    with contextlib.suppress(FileNotFoundError):
                        held[f"{table.uri}/{key}"] = sink.storage.stat(key).size_bytes
        return held

    # -- looking --------------------------------------------------------------------------------------

    def get_order(self, snapshot: str) -> Order:
        """Return an order by its id, or by the beginning of it. Raises ConfigError if there is none."""
        found = [one for one in self.home.list_snapshots() if one.snapshot.startswith(snapshot)]
        orders = self.home.load_orders(found) if len(found) == 1 else []
        if not orders:
            words = f"no snapshot begins with {snapshot!r}"
            if found:
                ids = join_names(sorted(one.snapshot for one in found))
                words = f"{len(found)} snapshots begin with {snapshot!r}: {ids}"
            raise ConfigError(words, hint="firnline topology list")
        return orders[0]

    def _load_kept(self) -> list[Order]:
        """Return the orders that were not dropped, oldest first."""
        return self.home.load_orders(one for one in self.home.list_snapshots() if not one.is_dropped)

    def find_open(self) -> list[Order]:
        """Return the orders without an outcome, oldest first."""
        return self.home.load_orders(one for one in self.home.list_snapshots() if not one.is_closed)

    def list(self, most: int = 0) -> list[SnapshotView]:
        """Return the snapshots, newest first; at most so many, 0 means all. Read-only."""
        orders, edits = self.home.load_orders(self.home.list_snapshots()[-most:]), self.home.load_undone()
        return [self._view(order, edits) for order in reversed(orders)]

    def view(self, order: Order) -> SnapshotView:
        """Return one snapshot as it is now. Read-only."""
        return self._view(order, self.home.load_undone())

    def _view(self, order: Order, edits: Sequence[Undone]) -> SnapshotView:
        outcome = self.home.find_outcome(order.snapshot)
        undone = _find_undone(outcome, edits)
        status = "IN_PROGRESS" if outcome is None else "COMPLETED" if outcome.status == "committed" else "FAILED"
        if status == "COMPLETED" and self.home.is_dropped(order.snapshot):
            status = "DROPPED"
        members: list[dict[str, Json]] = []
        sizes: Mapping[str, Json] = outcome.facts.get("sizes", {}) if outcome is not None else {}
        if outcome is None:
            records = self._read_all(order)
            sizes = {name: one.sizes() for name, one in records.items()}
            for name, one in records.items():
                facts = {"epoch": one.facts.record, "recorded_at": one.recorded_at, "trouble": one.facts.trouble}
                members.append({"name": name, **facts, "in_channels": one.facts.held})
        else:
            times: Mapping[str, Json] = outcome.facts.get("recorded_at", {})
            for name in order.members:
                facts = {"epoch": outcome.records.get(name), "recorded_at": times.get(name), "trouble": ""}
                members.append({"name": name, **facts, "in_channels": name in outcome.records})
        begun = datetime.fromisoformat(order.created_at)
        for member in members:
            at = member["recorded_at"]
            took = datetime.fromisoformat(at) - begun if at else None
            member["duration_ms"] = round(took.total_seconds() * 1000) if took is not None else None
        acknowledged = [member for member in members if member["epoch"] is not None]
        ended = datetime.fromisoformat(outcome.at) - begun if outcome is not None else None
        checkpointed, state = (
            sum(int(one[key]) for one in sizes.values()) if sizes else None
            for key in ("checkpointed_size_bytes", "state_size_bytes")
        )
        return SnapshotView(
            id=order.snapshot,
            status=status,
            trigger_timestamp=order.created_at,
            latest_ack_timestamp=max((str(member["recorded_at"]) for member in acknowledged), default=None),
            end_to_end_duration_ms=round(ended.total_seconds() * 1000) if ended is not None else None,
            checkpointed_size_bytes=checkpointed,
            state_size_bytes=state,
            acknowledged=f"{len(acknowledged)}/{len(order.members)}",
            restorable_until=outcome.restorable_until if outcome is not None and not undone else None,
            copy=self.find_copy(order.snapshot) if status == "COMPLETED" else None,
            reason=undone or (outcome.reason if outcome is not None else ""),
            members=members,
        )

    def _read_all(self, order: Order) -> dict[str, MemberRecord]:
        found = {}
        for name in order.members:
            try:
                found[name] = self._read_record(order, name)
            except (FirnlineError, OSError) as error:
                found[name] = MemberRecord(MemberFacts(trouble=str(error)))
        return found


def _check_spared(sink: Sink, since: int) -> None:
    """Check, behind an open pin, that everything which it keeps is there, and that no sweep is about to delete it.

    A sweep reads pins after it has declared its files, so either it sees the pin or its declaration is seen here.

    Raises:
        SinkError: the log or a file is gone, or a sweep deletes it.
    """
    table = as_delta(sink).table
    assert sink.storage is not None
    table.refresh()
    log = LogNames(sink.storage, table, table.storage_options or {})
    named = log.named_between(since, table.version)
    if named is None:
        raise SinkError(
            f"the log of {table.uri} lacks a version after {since}, which a reader has yet to read",
            hint="That reader cannot go on: firnline status. Take the snapshot afterwards.",
        )
    needed = named | set(log.pinned(since) if since >= 0 else ())
    sweep = SweepLog(sink.storage, table).find_after_pin(needed)
    if sweep is not None:
        raise SinkError(
            f"{sink.name}: files that the snapshot needs are being deleted by {sweep}",
            hint="Take the snapshot again when it has ended; one that died is finished by: firnline gc --yes",
        )


def _find_undone(outcome: SnapshotOutcome | None, edits: Sequence[Undone]) -> str:
    """Return, in words, which later restore has undone an epoch of a completed snapshot; empty if none has."""
    records = outcome.records if outcome is not None else {}
    return next((words for one in edits if (words := one.describe(records))), "")


def find_tables(pipeline: OpenPipeline) -> list[Sink]:
    """Return the sinks of a pipeline that are Delta tables or its journal."""
    kinds = {one.name: one for one in pipeline.options.ordered_sinks}
    return [sink for sink in pipeline.sinks if isinstance(kinds[sink.name], DeltaSinkOptions)]


T = TypeVar("T")
R = TypeVar("R")


def _each(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call a function for all items, several at a time: a sink with a template may have hundreds of tables."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(AT_ONCE, len(items)), "firnline topology") as pool:
        return list(pool.map(call, items))


def announce_channels(topology: Topology, opened: Mapping[str, OpenPipeline], home: TopologyHome) -> None:
    """Tell every member which topics that it reads are channels, before a marker or void offsets can be in them."""
    ids: dict[tuple[str, str], str] = {}

    def with_id(one: TopicChannel) -> TopicChannel:
        ends = (one.writer, one.sink)
        if ends not in ids:
            sink = find_topic_sink(opened[one.writer], one.sink)
            try:
                ids[ends] = sink.find_checkpoint_id() if sink is not None else ""
            except SinkError:  # it cannot be reached now: the next command tells them
                ids[ends] = ""
        return replace(one, checkpoint_id=ids[ends])

    for name, pipeline in opened.items():
        channels = {source: [with_id(one) for one in of] for source, of in topics_read_by(topology, name).items()}
        put_channels(pipeline.storage, name, home.name, home.root, channels)


def join_names(names: Sequence[str]) -> str:
    """Return names as a sentence has them: a, b and c."""
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def start_from_copy(copy: str) -> str:
    """Return the command that starts a new topology from the copy of a snapshot."""
    return f"{shlex.join(['firnline', 'topology', 'restore', '--from-savepoint', copy])} FILE"


def fingerprint_of(options: PipelineOptions) -> str:
    """Return a fingerprint of what a pipeline reads, does and writes; without secrets."""
    body = {
        "sources": {source.name: [source.type, source.location] for source in options.sources},
        "operators": [[operator.name, operator.type, operator.settings] for operator in options.operators],
        "sinks": {sink.name: [sink.type, normalise_place(sink.location), sink.write] for sink in options.sinks},
    }
    return checksum(canonical(body))[:16]


def normalise_place(location: str) -> str:
    """Return a location without a trailing slash, so that a spelling is no change."""
    return normalise(location) if "://" not in location else location.rstrip("/")

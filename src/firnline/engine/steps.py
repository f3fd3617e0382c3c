"""Performs what the decisions ask for: one method per action, each answers with events.

Lanes, one thread each, keep order where it matters: `source` plans, `spark` runs jobs, `stage` writes ledger
entries, and each sink has its own. What one step leaves for another lies in `EpochInFlight`, reached by attempt.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa

from firnline.checkpoint.codec import canonical
from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.engine import messages as m
from firnline.engine.engine import Engine
from firnline.engine.jump_entries import epoch_commit
from firnline.engine.jumps import check_new_sinks, check_staged, join_sink
from firnline.engine.observer import EpochFacts
from firnline.engine.orders import Context, Produced, agree, collect, columns_of, declared, make_orders
from firnline.engine.parts import Parts
from firnline.engine.requests import RetryRequest
from firnline.engine.window import RollbackWindow
from firnline.errors import (
    BadRecordsError,
    CheckpointLostError,
    CommitConflictError,
    FencedError,
    FirnlineError,
    LedgerHoleError,
    SchemaError,
    SinkError,
    StoreAheadError,
)
from firnline.faults import fault_point
from firnline.schema import fingerprint, merge, schema_from_json, schema_to_json
from firnline.sinks.base import Held
from firnline.sinks.delta import DeltaSink
from firnline.sinks.delta.adopt import find_foreign
from firnline.sinks.delta.columns import missing_fields
from firnline.sources.base import SourcePlan
from firnline.types import EntryRef, Json, Receipt

logger = logging.getLogger(__name__)

JUDGED_RECORDS = 100  # below this, a ratio of bad records says little
SCHEMA_ROUNDS = 8  # types only widen, so this is never reached; it keeps a bug from looping
FOLD_EVERY = 64
KEPT_ENTRIES = 8
KEPT_FLOORS = 4096  # more units than ever wait for a committer that works
CLAIM_TRIES = 20
ROOM_POLL_SECONDS = 0.5


@dataclass(slots=True)
class _Base:
    """What an epoch is planned on: an epoch that is committed or in flight."""

    epoch: int
    entry: EntryRef | None
    checkpoint: Checkpoint | None
    position: Json
    schema: pa.Schema | None


@dataclass(slots=True)
class EpochInFlight:
    """One epoch on its way from plan to commit."""

    epoch: int
    attempt: str
    base: str
    plan: SourcePlan
    requests: list[RetryRequest]
    produced: Produced = field(default_factory=Produced)
    records: list[dict[str, Json]] = field(default_factory=list)
    entry: LedgerEntry | None = None
    ref: EntryRef | None = None
    durations_ms: dict[str, int] = field(default_factory=dict)


class Steps:
    """The I/O of one run."""

    def __init__(self, parts: Parts, engine: Engine, run: str, *, once: bool, accept_duplicates: bool) -> None:
        self._parts = parts
        self._engine = engine
        self._run = run
        self._once = once
        self._accept_duplicates = accept_duplicates
        self._bases: dict[str, _Base] = {}
        self._epochs: dict[str, EpochInFlight] = {}
        self._generation = 0
        self._baseline: LedgerEntry | None = None
        self._baseline_version = -1
        self._reconciled_at: float | None = None
        self._window = RollbackWindow(parts.options.checkpoint.rollback_window)
        self._floors: dict[int, int] = {}  # of the newest epochs
        self.held: Held = Held(exists=False, version=-1)
        self.receipts: list[Receipt] = []
        self.stopping = threading.Event()
        self.going = threading.Event()  # not set while the run is paused
        self.going.set()
        self.waiting = False  # a plan is under way that has not looked at its source yet: paused, or no room
        self.tell_waiting: Callable[[tuple[int, int] | None], None] = lambda _: None  # set by the runner
        self.tell_still: Callable[[], None] = lambda: None  # set by the runner
        self.slowest = 0  # the epoch of the sink that lags most; kept up to date by the runner
        self._recent: dict[int, tuple[LedgerEntry, EntryRef]] = {}  # decided entries that a further sink takes next

    # -- reading and claiming -------------------------------------------------------------------------

    def read_sinks(self) -> m.Event:
        recorder = self._parts.recorder
        recorder.look()
        held = self._parts.deciding.load()
        if held.checkpoint is None and not held.generation:  # a log that knows our claim knows what it lacks
            self._check_no_history()
        if held.exists and held.checkpoint is None:
            self._baseline = self._find_baseline(held.version)
        self._set_tip(held)
        tip = self._baseline.checkpoint.attempt if self._baseline else held.attempt
        epochs = {self._parts.deciding.name: held.epoch}
        for sink in self._parts.sinks[1:]:
            try:
                epochs[sink.name] = sink.load().epoch
            except SinkError as error:  # left out: it counts as lagging until it can be joined
                logger.warning("sink could not be read", extra={"sink": sink.name, "reason": error.message})
        check_new_sinks(self._parts, held.entry, epochs)
        if held.checkpoint is None and self._baseline is None:
            self._check_others_know_nothing(epochs)
        recorded = recorder.begin(held)
        if held.checkpoint is None and self._baseline is None:
            logger.warning("no sink, store or tier knows this pipeline", extra={"pipeline": self._parts.options.name})
        return m.SinksRead(tip, tuple(epochs.items()), recorded=recorded)

    def _check_no_history(self) -> None:
        """Without a table there may be epochs that were staged and never committed, but no more than fly at once."""
        staged = self._parts.ledger.newest_epoch()
        if staged > self._parts.options.batch.max_inflight:
            root = self._parts.storage.root
            raise CheckpointLostError(
                f"the ledger knows epoch {staged}, but {root} is no table any more",
                hint=f"Restore {root}/_delta_log from a backup; to start over, move the whole folder away.",
                epoch=staged,
            )

    def _find_baseline(self, version: int) -> LedgerEntry | None:
        """Another tool's progress in this table's log, as the entry that the first claim will name."""
        self._baseline_version = version
        found = find_foreign(
            self._parts.storage,
            version,
            self._parts.options.checkpoint.recovery_scan_commits,
            accept_older=self._accept_duplicates,
        )
        if found is None:
            return None
        position, records = self._parts.source.adopt(found)
        name = self._parts.source.name
        checkpoint = self._checkpoint(0, self._parts.ids.new(), {name: position}, None, None)
        return LedgerEntry(checkpoint, None, {name: records}, kind="baseline")

    def _check_others_know_nothing(self, epochs: dict[str, int]) -> None:
        """A further sink that holds epochs of which the deciding one knows nothing would never be given them again."""
        ahead = {name: epoch for name, epoch in epochs.items() if epoch}
        if ahead and self._parts.deciding.load().checkpoint is None:  # else another run began in between
            name, epoch = ahead.popitem()
            raise StoreAheadError(
                f"sink {name!r} holds epoch {epoch}, but {self._parts.storage.root}, which decides, knows nothing",
                epoch=epoch,
            )

    def claim(self) -> m.Event:
        sink = self._parts.deciding
        held = self._claim_onto_baseline() if self._baseline else sink.claim(self._run)
        self._generation = held.generation
        self._set_tip(held)
        if sink.settled_epoch() is not None:
            committed = sink.load_committed()
            self._floors[committed.epoch] = committed.checkpoint.floor if committed.checkpoint else 0
        if held.exists:
            missing_fields(sink.find_schema() or pa.schema([]), declared(self._parts.options.source))
        return m.Claimed(held.epoch, held.attempt)

    def _claim_onto_baseline(self) -> Held:
        """Claim onto the very version that the other tool's progress was read from; if it moved on, read it again."""
        for _ in range(CLAIM_TRIES):
            assert self._baseline is not None
            ref = self._parts.ledger.stage(self._baseline)
            try:
                return self._parts.deciding.claim(self._run, baseline=ref, onto=self._baseline_version)
            except CommitConflictError:
                self._baseline = self._find_baseline(self._parts.deciding.load().version)
        raise SinkError("the other tool commits all the time; stop it before Firnline takes over")

    def join(self, name: str) -> m.Event:
        tip = self.held.entry
        return m.Joined(name, join_sink(self._parts, self._sink(name), self._run, self._generation, tip, tip))

    def _set_tip(self, held: Held) -> None:
        """Take what the deciding sink holds as the base of the next plan."""
        self.held = held
        if self._window.needs_history and held.checkpoint is not None:
            self._window.begin(self._since_floor(held.checkpoint.floor))
        checkpoint = held.checkpoint or (self._baseline.checkpoint if self._baseline else None)
        stored = checkpoint.positions.get(self._parts.source.name) if checkpoint else None
        self._bases[checkpoint.attempt if checkpoint else ""] = _Base(
            epoch=held.epoch,
            entry=held.entry,
            checkpoint=checkpoint,
            position=self._parts.source.start(stored),
            schema=self._parts.deciding.find_schema() if held.exists else None,
        )

    def _since_floor(self, floor: int) -> list[Checkpoint]:
        """The checkpoints that one may still go back to, oldest first; what a hole hides is not offered."""
        found: list[Checkpoint] = []
        try:
            for entry in self._parts.entries(self.held.entry):
                if entry.epoch < floor:
                    break
                found.append(entry.checkpoint)
        except LedgerHoleError as error:
            logger.warning("the ledger has a hole", extra={"reason": error.message})
        return found[::-1]

    # -- plan -----------------------------------------------------------------------------------------

    def plan(self, epoch: int, base: str) -> tuple[m.Event, SourcePlan | None]:
        fault_point("epoch.plan.before")
        began = self._parts.clock.monotonic()
        position = self._bases[base].position
        if not self._wait_for_room():
            return m.NothingToPlan(), None
        requests = self._parts.requests.load()
        for request in requests:
            self._parts.source.retry(request.path, changed=request.changed)
        plan = self._parts.source.plan(position, self._parts.limits(self._engine.parallelism))
        if plan is None:
            return m.NothingToPlan(), None
        attempt = self._parts.ids.new()
        made = EpochInFlight(epoch, attempt, base, plan, requests)
        made.durations_ms["plan"] = self._ms_since(began)
        fault_point("epoch.plan.after")
        self._epochs[attempt] = made
        return m.Planned(epoch, attempt, base), plan

    def _wait_for_room(self) -> bool:
        """Plan nothing while paused, or while a staged sink holds too much; False when the run is told to stop."""
        try:
            return self._going_on() and self._room()
        finally:
            self.waiting = False

    def _going_on(self) -> bool:
        """Wait while paused; False when a stop ended that."""
        while not self.going.is_set():
            if self.stopping.is_set():
                return False
            if not self.waiting:
                self.waiting = True
                self.tell_still()
            self.going.wait(ROOM_POLL_SECONDS)  # not for ever: a stop may come between a pause and its wait
        return not (self.waiting and self.stopping.is_set())

    def _room(self) -> bool:
        """Back-pressure."""
        told = False
        while True:
            full = next((found for sink in self._parts.sinks if (found := sink.is_full()) is not None), None)
            if full is None:
                if told:
                    self.tell_waiting(None)
                return True
            if not told:
                logger.warning("waiting for the committer", extra={"pending_units": full[0], "pending_bytes": full[1]})
                self.tell_waiting(full)
                told = True
            self.waiting = True
            if self.stopping.wait(ROOM_POLL_SECONDS) or not self._going_on():
                return False

    def reconcile_due(self) -> bool:
        interval = self._parts.options.source.reconcile_interval_secs
        if self._reconciled_at is None:
            return self._once or interval > 0
        return not self._once and self._parts.clock.monotonic() - self._reconciled_at >= interval

    def reconcile(self, base: str) -> tuple[int, list[str], int] | None:
        """Compare a full listing with the ledger; None when the ledger has a hole and nothing can be told."""
        # In flight first: what is settled in the meantime is in the ledger by then, so that neither misses it.
        flying = [str(i["path"]) for e in list(self._epochs.values()) for task in e.plan.tasks for i in task.inputs]
        position = self._bases[base].position
        try:
            known = self._parts.known_files(self.held.entry)
        except LedgerHoleError as error:
            self._reconciled_at = self._parts.clock.monotonic()
            logger.error("reconcile stopped: the ledger has a hole", extra={"reason": error.message})
            return None
        if self._baseline is not None:
            for record in self._baseline.inputs[self._parts.source.name]:
                known[str(record["path"])] = str(record["etag"])
        known.update(dict.fromkeys(flying, ""))
        found = self._parts.source.reconcile(position, known)
        self._reconciled_at = self._parts.clock.monotonic()
        return len(found.late), found.changed, found.listed

    # -- run ------------------------------------------------------------------------------------------

    def run(self, attempt: str) -> m.Event | None:
        fault_point("epoch.run.before")
        began = self._parts.clock.monotonic()
        made = self._epochs.get(attempt)
        if made is None:  # dropped while it waited for its lane
            return None
        base = self._bases[made.base]
        context = self._context(made, base)
        columns = columns_of(context, made.plan)
        reports: dict[int, dict[str, Json]] = {}
        wanted = set(range(len(made.plan.tasks)))
        for _ in range(SCHEMA_ROUNDS):
            if not wanted:
                break
            done = self._engine.run(attempt, make_orders(context, made.plan, columns, wanted))
            reports.update(zip(sorted(wanted), done, strict=True))
            columns, again = agree(columns, [reports[n] for n in sorted(reports)])
            wanted = {sorted(reports)[n] for n in again}
        if wanted:
            raise SchemaError(f"the tasks of epoch {made.epoch} do not agree on the types of their columns")
        made.produced = collect(context, columns, [reports[n] for n in sorted(reports)])
        self._judge(made.produced)
        position, records = self._parts.source.advance(made.plan, made.produced.outcomes, made.epoch)
        processed = self._parts.clock.now().isoformat(timespec="seconds")
        made.records = [{**record, "processed_time": processed} for record in records]
        made.durations_ms["run"] = self._ms_since(began)
        self._bases[attempt] = _Base(made.epoch, None, None, position, _widen(base.schema, made.produced.schema))
        fault_point("epoch.run.after")
        return m.Ran(made.epoch, attempt)

    def _context(self, made: EpochInFlight, base: _Base) -> Context:
        deciding = self._parts.options.deciding
        return Context(
            epoch=made.epoch,
            attempt=made.attempt,
            options=self._parts.options.source,
            root=self._parts.source.root,
            targets=[sink.stage_target() for sink in self._parts.sinks],
            quarantine={
                "root": self._parts.storage.root,
                "storage_options": dict(deciding.storage_options),
                "folder": f"_firnline/{self._parts.options.name}/quarantine",
            },
            base=base.schema,
        )

    def _judge(self, produced: Produced) -> None:
        """Refuse an epoch that is mostly bad records: more likely the wrong format than bad luck."""
        limit = self._parts.options.source.max_bad_ratio
        bad = produced.bad.total()
        if produced.records >= JUDGED_RECORDS and bad > limit * produced.records:
            raise BadRecordsError(
                f"{bad} of {produced.records} records are bad ({dict(produced.bad)}); max_bad_ratio is {limit}"
            )

    def drop(self, attempt: str) -> None:
        """Forget an epoch in flight. Its files stay until a sweep finds that no commit names them."""
        self._engine.cancel(attempt)
        made = self._epochs.pop(attempt, None)
        if made is not None and self._parts.source.forget_late(made.plan):
            self._reconciled_at = None  # what is late is relative to a base: it must be found again

    # -- stage and commit -----------------------------------------------------------------------------

    def stage(self, attempt: str) -> m.Event | None:
        fault_point("epoch.stage.before")
        began = self._parts.clock.monotonic()
        made = self._epochs.get(attempt)
        if made is None:  # dropped while it waited for its lane
            return None
        base, after = self._bases[made.base], self._bases[attempt]
        positions = {self._parts.source.name: after.position}
        checkpoint = self._checkpoint(made.epoch, attempt, positions, after.schema, base.checkpoint)
        made.entry = LedgerEntry(
            checkpoint=checkpoint,
            previous=base.entry,
            previous_checkpoint=base.checkpoint.checksum if base.checkpoint else "",
            inputs={self._parts.source.name: made.records},
            staged=made.produced.staged,
            quarantine=made.produced.quarantine,
            schema=schema_to_json(made.produced.schema) if made.plan.tasks else [],
            durations_ms=dict(made.durations_ms),
        )
        made.ref = self._parts.ledger.stage(made.entry)
        self._window.add(checkpoint)
        self._floors = {e: f for e, f in self._floors.items() if e > made.epoch - KEPT_FLOORS} | {
            made.epoch: checkpoint.floor
        }
        after.entry, after.checkpoint = made.ref, checkpoint
        made.durations_ms["stage"] = self._ms_since(began)
        fault_point("epoch.stage.after")
        return m.Staged(made.epoch, attempt)

    def _checkpoint(
        self,
        epoch: int,
        attempt: str,
        positions: dict[str, Json],
        schema: pa.Schema | None,
        before: Checkpoint | None,
    ) -> Checkpoint:
        columns = fingerprint(schema) if schema is not None else ""
        version, floor = (before.schema_version, before.floor) if before else (0, 0)
        if before is None or columns != before.schema_fingerprint:
            version += 1
        now = self._parts.clock.now()
        settled = [found for sink in self._parts.sinks if (found := sink.settled_epoch()) is not None]
        if (replicated := self._parts.recorder.remote_epoch) is not None:
            settled.append(replicated)
        return Checkpoint(
            pipeline=self._parts.options.name,
            epoch=epoch,
            generation=self._generation,
            run=self._run,
            attempt=attempt,
            created_at=now.isoformat(),
            positions=positions,
            schema_fingerprint=columns,
            schema_version=version,
            floor=max(floor, min(self._window.oldest(epoch, now), self.slowest, *settled)),
        )

    def commit(self, name: str, epoch: int) -> m.Event:
        """Commit to one sink: an epoch in flight to the deciding one, a decided epoch to the others."""
        fault_point("epoch.commit.before")
        sink = self._sink(name)
        began = self._parts.clock.monotonic()
        made = self._flying(epoch) if sink is self._parts.deciding else None
        entry, ref = (made.entry, made.ref) if made is not None else self._decided_entry(epoch)
        assert entry is not None
        assert ref is not None
        if made is None:
            check_staged(sink, entry)
        try:
            schema = made.produced.schema if made is not None else schema_from_json(entry.schema)
            receipt = sink.commit(epoch_commit(self._parts, sink, entry, ref, schema))
        except SchemaError as error:
            if made is None:
                raise
            logger.warning("the table changed under the epoch", extra={"reason": error.message})
            self._bases[made.base].schema = sink.find_schema()
            return m.EpochLost(epoch, made.attempt)
        if made is not None:
            made.durations_ms["commit"] = self._ms_since(began)
        self.receipts.append(receipt)
        self._parts.recorder.note_receipt(receipt)
        fault_point("epoch.commit.after")
        return m.Committed(name, epoch, receipt.attempt)

    def _decided_entry(self, epoch: int) -> tuple[LedgerEntry, EntryRef]:
        """The ledger entry of a decided epoch: what every further sink is given, and nothing else."""
        if epoch in self._recent:
            return self._recent[epoch]
        ref = self.held.entry
        for entry in self._parts.entries(self.held.entry):
            assert ref is not None
            if entry.epoch == epoch:
                return entry, ref
            if entry.previous is None:
                break
            ref = entry.previous
        raise LedgerHoleError(f"the ledger entry of epoch {epoch} is needed by a sink that lags", epoch=epoch)

    def find_receipt(self, name: str, epoch: int) -> m.Event:
        """Ask a sink whether it holds an epoch; while it does not answer, nothing else is done with that epoch."""
        receipt = self._sink(name).find_receipt(epoch)
        if receipt is None:
            return m.ReceiptAbsent(name, epoch)
        self.receipts.append(receipt)
        self._parts.recorder.note_receipt(receipt)
        return m.Committed(name, epoch, receipt.attempt)

    def settle(self, epoch: int, attempt: str) -> tuple[EpochInFlight | None, Receipt | None]:
        """The deciding sink holds an epoch: it is the tip now."""
        receipt = next((r for r in reversed(self.receipts) if r.epoch == epoch), None)
        base = self._bases.get(attempt)
        if base is not None and base.entry is not None:
            self.held = Held(
                exists=True,
                version=receipt.version if receipt else self.held.version,
                generation=self._generation,
                epoch=epoch,
                entry=base.entry,
                checkpoint=base.checkpoint,
                path=self.held.path,
            )
        made = self._epochs.pop(attempt, None)  # only now: until here a reconcile finds it in flight
        if made is not None and made.entry is not None and made.ref is not None:
            kept = {e: found for e, found in self._recent.items() if e > epoch - KEPT_ENTRIES}
            self._recent = {**kept, epoch: (made.entry, made.ref)}
            self._parts.recorder.note_durations(epoch, made.durations_ms)
        for known, old in list(self._bases.items()):  # in place: the next job may end right now and add its own
            if old.epoch < epoch - 1:
                del self._bases[known]
        del self.receipts[:-8]
        return made, receipt

    # -- after the commit -----------------------------------------------------------------------------

    def record(self, epoch: int) -> None:
        """Copy what is settled into the store and the tiers."""
        self._parts.recorder.record(epoch, self.held, self._recent)

    def acknowledge(self, epoch: int) -> m.Event:
        fault_point("epoch.acknowledge.before")
        tip = self.held
        if tip.entry is not None and tip.checkpoint is not None and epoch % FOLD_EVERY == 0:
            floor = self._committed_floor(tip.checkpoint)
            try:
                self._parts.ledger.fold(tip.entry, floor)
                self._parts.ledger.sweep(floor, tip.entry)
            except LedgerHoleError as error:
                logger.error("ledger not folded", extra={"reason": error.message})
        fault_point("epoch.acknowledge.after")
        return m.Acknowledged(epoch)

    def _committed_floor(self, tip: Checkpoint) -> int:
        """The floor that the deciding sink's newest commit names: pending units may still be taken back."""
        settled = self._parts.deciding.settled_epoch()
        if settled is None or settled >= tip.epoch:
            return tip.floor
        known = [epoch for epoch in self._floors if epoch <= settled]
        return self._floors[max(known)] if known else 0

    def finish_requests(self, made: EpochInFlight) -> None:
        """The epoch that took these requests up is committed."""
        if made.requests:
            self._parts.requests.done(made.requests)
            self._parts.source.forget_retries(r.path for r in made.requests)

    def maintain(self, name: str) -> None:
        self._sink(name).maintain()

    def find_position(self, base: str) -> Json | None:
        """Where the source stands after the epoch whose attempt is `base`, while that is known."""
        found = self._bases.get(base)
        return found.position if found else None

    def run_seconds(self, attempt: str) -> float:
        made = self._epochs.get(attempt)
        return made.durations_ms.get("run", 0) / 1000 if made else 0.0

    def facts(self, made: EpochInFlight, receipt: Receipt) -> EpochFacts:
        """An epoch that was just committed, for observers."""
        assert made.entry is not None
        checkpoint = made.entry.checkpoint
        position = checkpoint.positions[self._parts.source.name]
        staged = made.entry.staged.get(receipt.sink, [])
        return EpochFacts(
            epoch=made.epoch,
            attempt=made.attempt,
            sink=receipt.sink,
            version=receipt.version,
            files=made.plan.files,
            records=made.produced.records,
            rows=receipt.rows,
            bad=dict(made.produced.bad),
            bytes_read=made.produced.bytes_read,
            raw_bytes=made.produced.raw_bytes,
            staged_files=len(staged),
            staged_bytes=receipt.size_bytes,
            late_files=int(made.plan.notes.get("late", 0)),
            checkpoint_bytes=len(canonical(checkpoint.to_json())),
            state_files=len(position["files"]),
            set_aside=len(position["set_aside"]),
            lag_seconds=self._lag(made.plan),
            durations_ms=dict(made.durations_ms),
        )

    def _lag(self, plan: SourcePlan) -> float:
        """Seconds since the oldest file of a plan arrived."""
        arrived = [str(item["create_time"]) for task in plan.tasks for item in task.inputs]
        if not arrived:
            return 0.0
        return max(0.0, (self._parts.clock.now() - datetime.fromisoformat(min(arrived))).total_seconds())

    def _flying(self, epoch: int) -> EpochInFlight:
        return next(e for e in list(self._epochs.values()) if e.epoch == epoch)

    def _sink(self, name: str) -> DeltaSink:
        return next(s for s in self._parts.sinks if s.name == name)

    def _ms_since(self, began: float) -> int:
        return round((self._parts.clock.monotonic() - began) * 1000)


def _widen(base: pa.Schema | None, produced: pa.Schema) -> pa.Schema:
    return produced if base is None else merge(base, produced, frozen=base.names)


def failure_event(error: FirnlineError, action: Any) -> m.Event:
    """What an error of a step means to the decisions."""
    if isinstance(error, FencedError):
        return m.Fenced()
    match action:
        case m.Run(epoch, attempt) | m.StageEntry(epoch, attempt) if error.retryable:
            return m.EpochLost(epoch, attempt)
        case m.Commit(sink, epoch) | m.FindReceipt(sink, epoch) if error.retryable:
            return m.CommitUnclear(sink, epoch)
        case m.Join(sink) | m.Commit(sink) | m.FindReceipt(sink):
            return m.Failed(error.retryable, error.exit_code, sink)
        case m.Record() | m.Acknowledge():
            return m.RecordFailed(error.retryable, error.exit_code)
        case _:
            return m.Failed(error.retryable, error.exit_code)

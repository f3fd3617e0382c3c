"""Performs what the decisions ask for: one method per action, each answers with events.

Lanes, one thread each, keep order where it matters: `source` plans, `spark` runs jobs, `stage` writes ledger
entries, and each sink has its own. What one step leaves for another lies in the `Flight`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import pyarrow as pa

from firnline.checkpoint.codec import canonical
from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.epoch import messages as m
from firnline.errors import (
    FencedError,
    FirnlineError,
    LedgerHoleError,
    SchemaError,
)
from firnline.faults import fault_point
from firnline.jobs.engine import Engine
from firnline.run.backpressure import Credits
from firnline.run.checkpoints import CheckpointMaker
from firnline.run.edit_entries import epoch_commit
from firnline.run.flight import Base, EpochInFlight, Flight
from firnline.run.joining import bring_staged
from firnline.run.observer import EpochFacts
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.opening import Opening
from firnline.run.operator_state import StateKeeper
from firnline.run.requests import FileRequest
from firnline.schema import merge, schema_from_json, schema_to_json
from firnline.sinks.base import Head
from firnline.sinks.outbox import list_outbox, release, sweep_outbox, waiting_for
from firnline.sources.group import EpochPlan, Positions
from firnline.sources.known import KnownFiles
from firnline.types import EntryRef, Receipt

logger = logging.getLogger(__name__)

FOLD_EVERY = 64


class Steps:
    """The I/O of one run."""

    def __init__(
        self, pipeline: OpenPipeline, engine: Engine, run: str, *, once: bool, accept_duplicates: bool
    ) -> None:
        self._pipeline = pipeline
        self._engine = engine
        self._once = once
        self._reconciled_at: dict[str, float] = {}  # by source
        self._files_per_task = 1  # that the last epoch staged for one table
        self.hole: LedgerHoleError | None = None  # why late files are not taken in
        self._dropped = 0  # epochs, so far
        self._spared: set[str] = set()  # sinks that the spec does not have, and for which rows wait
        self._reconcile_lock = threading.Lock()  # epochs are dropped by another thread than the one that reconciles
        self.tell_lost: Callable[[FirnlineError], None] = lambda _: None  # why an epoch in flight was lost
        self.flight = Flight()
        self.state = StateKeeper(pipeline, engine, self.flight)
        self.maker = CheckpointMaker(pipeline, run, self.state)
        self.credits = Credits(pipeline.sinks)
        self.opening = Opening(pipeline, self.flight, self.maker, self.state, run, accept_duplicates=accept_duplicates)

    @property
    def held(self) -> Head:
        """What the deciding sink holds."""
        return self.flight.held

    # -- plan -----------------------------------------------------------------------------------------

    def plan(self, epoch: int, base: str) -> tuple[m.Event, EpochPlan | None]:
        fault_point("epoch.plan.before")
        began = self._pipeline.clock.monotonic()
        positions = self.flight.bases[base].positions
        if not self.credits.wait():
            return m.NothingToPlan(), None
        requests = self._pipeline.requests.load()
        for request in requests:
            if request.drop:
                self._pipeline.sources.drop(request.path)
            else:
                self._pipeline.sources.retry(request.path, changed=request.changed)
        plan = self._pipeline.sources.plan(
            positions, self._pipeline.limits(self._engine.parallelism, self._files_per_task)
        )
        if plan is None and self.state.asked.is_set() and self.state.is_behind(self.flight.bases[base]):
            plan = EpochPlan({})  # nothing to read, but state that no checkpoint holds yet
        if plan is None:
            return m.NothingToPlan(), None
        attempt = self._pipeline.ids.new()
        taken = [request for request in requests if self._is_taken_up(request, positions, plan)]
        made = EpochInFlight(epoch, attempt, base, plan, self._pipeline.clock.now().isoformat(), taken)
        made.durations_ms["plan"] = self._ms_since(began)
        fault_point("epoch.plan.after")
        self.flight.epochs[attempt] = made
        return m.Planned(epoch, attempt, base), plan

    def _is_taken_up(self, request: FileRequest, positions: Positions, plan: EpochPlan) -> bool:
        """Whether the source that set a file aside has answered the request in this plan, be it by refusing it."""
        described = self._pipeline.sources.describe(positions)
        owners = {name for name, position in described.items() if request.path in position.set_aside}
        return owners <= set(plan.plans) - plan.asked_before

    def reconcile_due(self) -> list[str]:
        """The sources whose full listing is due."""
        now = self._pipeline.clock.monotonic()
        for name in self._pipeline.sources.take_forgotten():
            self._reconciled_at.pop(name, None)
        return [
            source.name
            for source in self._pipeline.sources
            if source.reconcile_interval_secs is not None
            and not self._pipeline.sources.is_asked(source.name)
            and self._is_reconcile_due(self._reconciled_at.get(source.name), source.reconcile_interval_secs, now)
        ]

    def _is_reconcile_due(self, last: float | None, interval: float, now: float) -> bool:
        if last is None:
            return self._once or interval > 0
        return not self._once and now - last >= interval

    def reconcile(self, base: str, due: list[str]) -> tuple[int, list[str], int] | None:
        """Compare full listings with the ledger; None when the ledger has a hole and nothing can be told."""
        dropped = self._dropped
        # In flight first: what is settled in the meantime is in the ledger by then, so that neither misses it.
        flying = list(self.flight.epochs.values())
        positions = self.flight.bases[base].positions
        known = {name: KnownFiles() for name in self._pipeline.sources.names}
        try:
            for name, split in (found for made in flying for found in made.plan.splits):
                for item in split.inputs:
                    known[name].add(str(item["path"]), "")
            for name, records in (self.flight.baseline.inputs if self.flight.baseline else {}).items():
                for record in records:
                    known[name].add(str(record["path"]), str(record["etag"]))
            self._pipeline.add_known(known, self.held.entry)
            found = self._pipeline.sources.reconcile(positions, known, due)
        except LedgerHoleError as error:
            self._note_reconciled(due)
            logger.error("reconcile stopped: the ledger has a hole", extra={"reason": error.message})
            if any(self._pipeline.sources[name].late_files != "ignore" for name in due):
                self.hole = error
            return None
        finally:
            for of_source in known.values():
                of_source.close()
        self.hole = None
        with self._reconcile_lock:
            if dropped == self._dropped:  # else files of an epoch that is lost by now counted as known: due again
                self._note_reconciled(due)
        return len(found.late), found.changed, found.listed

    def _note_reconciled(self, names: list[str]) -> None:
        self._reconciled_at |= dict.fromkeys(names, self._pipeline.clock.monotonic())

    # -- run ------------------------------------------------------------------------------------------

    def run(self, attempt: str) -> m.Event | None:
        fault_point("epoch.run.before")
        began = self._pipeline.clock.monotonic()
        made = self.flight.epochs.get(attempt)
        if made is None:  # dropped while it waited for its lane
            return None
        base = self.flight.bases[made.base]
        self.state.catch_up(base)
        worked = self.state.work(made, base)
        produced = worked.produced
        made.produced = produced
        positions, records = made.advance(self._pipeline.sources, base, produced)
        processed = self._pipeline.clock.now().isoformat(timespec="seconds")
        made.records = {n: [{**r, "processed_time": processed} for r in found] for n, found in records.items()}
        made.durations_ms["run"] = self._ms_since(began)
        self._note_files(made)
        deciding = produced.schemas.get(self._pipeline.deciding.name)
        self.flight.bases[attempt] = Base(
            made.epoch,
            None,
            None,
            positions,
            _widen(base.table, deciding) if deciding is not None else base.table,
            {**base.columns, **{n: _widen(base.columns.get(n), found) for n, found in produced.columns.items()}},
            worked.state,
            worked.watermarks,
            worked.snapshots,
        )
        fault_point("epoch.run.after")
        return m.Ran(made.epoch, attempt)

    def _note_files(self, made: EpochInFlight) -> None:
        """Learn how many files a task stages, so that the next plan keeps `max_output_files`; tell when it was not."""
        if self._pipeline.options.operators or not made.plan.splits:
            return
        sink, files = max(((name, len(found)) for name, found in made.produced.staged.items()), key=lambda p: p[1])
        self._files_per_task = max(1, -(-files // len(made.plan.splits)))
        limit = self._pipeline.options.batch.max_output_files
        if files > limit:
            facts = {"sink": sink, "epoch": made.epoch, "files": files, "max_output_files": limit}
            logger.warning(
                "more files staged than batch.max_output_files: the rows fall into more partitions", extra=facts
            )

    def drop(self, attempt: str) -> None:
        """Forget an epoch in flight. Its files stay until a sweep finds that no commit names them."""
        self._engine.cancel(attempt)
        made = self.flight.epochs.pop(attempt, None)
        if made is None:
            return
        self.state.drop(made.epoch)
        with self._reconcile_lock:
            self._dropped += 1
            for name in self._pipeline.sources.give_back(made.plan):
                self._reconciled_at.pop(name, None)  # what is late is relative to a base: it must be found again

    # -- stage and commit -----------------------------------------------------------------------------

    def stage(self, attempt: str) -> m.Event | None:
        fault_point("epoch.stage.before")
        began = self._pipeline.clock.monotonic()
        made = self.flight.epochs.get(attempt)
        if made is None:  # dropped while it waited for its lane
            return None
        base, after = self.flight.bases[made.base], self.flight.bases[attempt]
        checkpoint = self.maker.make(made.epoch, attempt, self.flight.generation, after, base.checkpoint)
        found = {sink.name: made.produced.schemas.get(sink.name, pa.schema([])) for sink in self._pipeline.sinks}
        schemas = {name: schema_to_json(columns) for name, columns in found.items()}
        common = schemas[self._pipeline.deciding.name]
        made.entry = LedgerEntry(
            checkpoint=checkpoint,
            previous=base.entry,
            previous_checkpoint=base.checkpoint.checksum if base.checkpoint else "",
            inputs=made.records,
            staged=made.produced.staged,
            quarantine=made.produced.quarantine,
            schema=common if made.plan.splits else [],
            schemas={name: columns for name, columns in schemas.items() if columns != common},
            epoch_time=made.epoch_time if self._pipeline.options.operators else "",
            durations_ms=dict(made.durations_ms),
        )
        made.ref = self._pipeline.ledger.stage(made.entry)
        self.maker.add(checkpoint)
        after.entry, after.checkpoint = made.ref, checkpoint
        made.durations_ms["stage"] = self._ms_since(began)
        fault_point("epoch.stage.after")
        return m.Staged(made.epoch, attempt)

    def commit(self, name: str, epoch: int) -> m.Event:
        """Commit to one sink: an epoch in flight to the deciding one, a decided epoch to the others."""
        fault_point("epoch.commit.before")
        sink = self._pipeline.sink(name)
        began = self._pipeline.clock.monotonic()
        made = self.flight.flying(epoch) if sink is self._pipeline.deciding else None
        entry, ref = (made.entry, made.ref) if made is not None else self._decided_entry(epoch)
        assert entry is not None
        assert ref is not None
        if made is None:
            bring_staged(self._pipeline, sink, entry)
        try:
            schema = schema_from_json(entry.schema_of(name)) if made is None else self._schema(made, name)
            receipt = sink.commit(epoch_commit(self._pipeline, sink, entry, ref, schema), self.state.run_tasks)
        except SchemaError as error:
            if made is None:
                raise
            logger.warning("epoch lost: the table does not take it", extra={"reason": error.message})
            self.tell_lost(error)
            self.opening.learn_columns(self.flight.bases[made.base])
            return m.EpochLost(epoch, made.attempt)
        if made is not None:
            made.durations_ms["commit"] = self._ms_since(began)
        self.flight.receipts.append(receipt)
        self._pipeline.recorder.note_receipt(receipt)
        fault_point("epoch.commit.after")
        if made is None and sink.settled_epoch() is None:
            release(self._pipeline.storage, entry.staged.get(name, []))
        return self._committed(name, receipt)

    def _schema(self, made: EpochInFlight, sink: str) -> pa.Schema:
        """The columns of what is staged for a sink; what it has, when nothing is."""
        found = made.produced.schemas.get(sink)
        return found if found is not None else self._pipeline.sink(sink).find_schema() or pa.schema([])

    def _decided_entry(self, epoch: int) -> tuple[LedgerEntry, EntryRef]:
        """The ledger entry of a decided epoch: what every further sink is given, and nothing else."""
        if epoch in self.flight.recent:
            return self.flight.recent[epoch]
        known = self.flight.refs.get(epoch)
        if known is not None:
            return self._pipeline.ledger.load(known), known
        for entry, ref in self._pipeline.ledger.entries(self.held.entry):
            self.flight.refs[entry.epoch] = ref
            if entry.epoch == epoch:
                return entry, ref
        raise LedgerHoleError(f"the ledger entry of epoch {epoch} is needed by a sink that lags", epoch=epoch)

    def find_receipt(self, name: str, epoch: int) -> m.Event:
        """Ask a sink whether it holds an epoch; while it does not answer, nothing else is done with that epoch."""
        receipt = self._pipeline.sink(name).find_receipt(epoch)
        if receipt is None:
            return m.ReceiptAbsent(name, epoch)
        self.flight.receipts.append(receipt)
        self._pipeline.recorder.note_receipt(receipt)
        return self._committed(name, receipt)

    def _committed(self, name: str, receipt: Receipt) -> m.Event:
        deciding = self._pipeline.deciding
        return m.Committed(
            name, receipt.epoch, receipt.attempt, deciding.settled_epoch() if name == deciding.name else None
        )

    def read_log(self) -> m.Event:
        """Look how far the committer of the deciding table has come."""
        return m.LogRead(self._pipeline.deciding.read_settled() or 0)

    # -- after the commit -----------------------------------------------------------------------------

    def settle(self, epoch: int, attempt: str) -> tuple[EpochInFlight | None, Receipt | None]:
        """The deciding sink holds an epoch: it is the tip now."""
        made, receipt = self.flight.settle(epoch, attempt)
        if made is not None:
            self._pipeline.recorder.note_durations(epoch, made.durations_ms)
            if made.entry is not None:
                self.state.settled(made.entry.checkpoint)
        return made, receipt

    def record(self, epoch: int) -> None:
        """Copy what is settled into the store and the tiers."""
        self._pipeline.recorder.record(epoch, self.held, self.flight.recent)

    def acknowledge(self, action: m.Acknowledge) -> m.Event:
        fault_point("epoch.acknowledge.before")
        tip = self.held
        if tip.checkpoint is not None:
            positions = self.maker.acknowledged_positions(tip.checkpoint)
            if positions is not None:
                self._pipeline.sources.acknowledge(positions)
        if tip.entry is not None and tip.checkpoint is not None and action.passes(FOLD_EVERY):
            floor = self.maker.committed_floor(tip.checkpoint)
            try:
                self._pipeline.ledger.fold(tip.entry, floor)
                self._pipeline.ledger.sweep(floor, tip.entry)
                self.sweep_outbox()
            except LedgerHoleError as error:
                logger.error("ledger not folded", extra={"reason": error.message})
        fault_point("epoch.acknowledge.after")
        return m.Acknowledged(action.epoch)

    def sweep_outbox(self) -> None:
        """Delete what lies in the outbox and no sink needs: of lost attempts, and of epochs that every sink holds.

        What an entry names for a sink that the spec does not have stays, for the day that it has it again. Where a hole
        hides part of the history nothing is taken for lost.

        Listed first: an attempt that writes by then is in flight here, or the deciding table holds a newer generation,
        and then nothing is deleted. In flight is read before the chain: an epoch that is decided meanwhile is in one of
        the two.

        Raises:
            FencedError: another run owns the pipeline.
        """
        pipeline = self._pipeline
        listed = list_outbox(pipeline.storage, pipeline.options.name)
        if not listed:
            return
        pipeline.open_readers()[0].check_holder(self.flight.generation)
        needed = set(self.flight.epochs)
        needed |= self._needed_by_sinks({attempt: keys for attempt, keys in listed.items() if attempt not in needed})
        gone = sweep_outbox(pipeline.storage, listed, needed)
        if gone:
            logger.info("outbox swept", extra={"files": gone})

    def _needed_by_sinks(self, listed: dict[str, list[str]]) -> set[str]:
        """Those of the listed attempts that a sink lacks, in the spec or not, and those that nobody can judge.

        Below a fold no sink can be given anything any more.
        """
        settled = [sink.settled_epoch() for sink in self._pipeline.sinks[1:]]
        held = min([self.maker.slowest, *(epoch for epoch in settled if epoch is not None)])
        names = {sink.name for sink in self._pipeline.sinks}
        needed: set[str] = set()
        unknown = set(listed)
        try:
            for link in self._pipeline.ledger.chain(self.held.entry) if self.held.entry else ():
                if isinstance(link, Fold):
                    if link.is_bridge:
                        raise LedgerHoleError(f"ledger entry {link.last.name} is lost", epoch=link.last.epoch)
                    break
                attempt = link.checkpoint.attempt
                if attempt in unknown:
                    unknown.remove(attempt)
                    absent = [sink for sink in sorted(waiting_for(link.staged, listed[attempt])) if sink not in names]
                    self._tell_spared(absent)
                    if link.epoch > held or absent:
                        needed.add(attempt)
                if not unknown:
                    break
        except LedgerHoleError as error:
            logger.warning("outbox not swept behind a hole", extra={"reason": error.message, "attempts": len(unknown)})
            needed |= unknown
        return needed

    def _tell_spared(self, sinks: Iterable[str]) -> None:
        """Say, once a run, that rows wait for a sink that the spec does not have."""
        for name in sinks:
            if name not in self._spared:
                self._spared.add(name)
                logger.warning("rows wait in the outbox for a sink that the spec does not have", extra={"sink": name})

    def finish_requests(self, made: EpochInFlight) -> None:
        """The epoch that took these requests up is committed."""
        if made.requests:
            self._pipeline.requests.done(made.requests)
            self._pipeline.sources.forget_requests(r.path for r in made.requests)

    def maintain(self, name: str) -> None:
        self._pipeline.sink(name).maintain()

    def find_positions(self, base: str) -> Positions | None:
        """Where the sources stand after the epoch whose attempt is `base`, while that is known."""
        found = self.flight.bases.get(base)
        return found.positions if found else None

    def run_seconds(self, attempt: str) -> float:
        made = self.flight.epochs.get(attempt)
        return made.durations_ms.get("run", 0) / 1000 if made else 0.0

    def facts(self, made: EpochInFlight, receipt: Receipt) -> EpochFacts:
        """An epoch that was just committed, for observers."""
        assert made.entry is not None
        checkpoint = made.entry.checkpoint
        positions = self._pipeline.sources.describe(checkpoint.positions).values()
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
            late_files=made.plan.late_files,
            checkpoint_bytes=len(canonical(checkpoint.to_json())),
            state_files=sum(position.named for position in positions),
            set_aside=sum(len(position.set_aside) for position in positions),
            lag_seconds=self._lag(made.plan),
            durations_ms=dict(made.durations_ms),
            sources=dict(made.produced.read),
            align_ms=made.plan.align_ms,
            is_staged=self._pipeline.deciding.settled_epoch() is not None,
            operators=made.operators,
        )

    def _lag(self, plan: EpochPlan) -> float:
        """Seconds since the oldest input of a plan arrived; 0 where inputs do not tell."""
        arrived = [str(item["create_time"]) for item in plan.inputs if item.get("create_time")]
        if not arrived:
            return 0.0
        return max(0.0, (self._pipeline.clock.now() - datetime.fromisoformat(min(arrived))).total_seconds())

    def _ms_since(self, began: float) -> int:
        return round((self._pipeline.clock.monotonic() - began) * 1000)


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
        case m.WatchLog() if error.retryable:
            return m.LogRead(0)  # looked at again after a while
        case m.Record() | m.Acknowledge():
            return m.RecordFailed(error.retryable, error.exit_code)
        case _:
            return m.Failed(error.retryable, error.exit_code)

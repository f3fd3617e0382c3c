"""The six steps of an epoch, one method each, in this order:

    1 plan -> 2 run -> 3 stage -> 4 commit -> 5 record -> 6 acknowledge

`epoch/decide.py` decides when each step is performed, this file performs it. An epoch becomes true in step 4, by one
atomic write of the deciding sink; every other step can be repeated. Each docstring says what is durable afterwards, and
what happens when the process is killed there.

Lanes, one thread each, keep order where it matters: `source` plans, `spark` runs jobs, `stage` writes ledger entries
and records, and each sink has its own. Steps exchange values through `Progress`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import pyarrow as pa

from firnline.checkpoint.codec import canonical
from firnline.checkpoint.ledger import LedgerEntry, is_failed, is_idle_input, read_paths
from firnline.epoch import messages as m
from firnline.errors import (
    FencedError,
    FirnlineError,
    LedgerHoleError,
    OutboxDamagedError,
    SchemaError,
    SinkDivergedError,
    SinkWentBackError,
    SourceError,
    StagingError,
)
from firnline.faults import fault_point
from firnline.jobs.dataflow import dataflow_of
from firnline.jobs.engine import Engine
from firnline.jobs.epoch_job import EpochJob, EpochJobs
from firnline.jobs.heartbeat import WorkerLosses
from firnline.jobs.read_job import Produced
from firnline.names import JOURNAL
from firnline.rescued import Rescued
from firnline.run.backpressure import Backpressure
from firnline.run.checkpoints import CheckpointMaker
from firnline.run.commits import Restaged, bring_staged, entry_commit, name_in, settled_epoch, staged_for
from firnline.run.fill import Filling
from firnline.run.made_rows import FilledEpoch
from firnline.run.observer import EpochFacts
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.operator_state import OperatorStates
from firnline.run.outbox import Outbox
from firnline.run.progress import Base, EpochInFlight, Progress
from firnline.run.read_again import Judged, ReadAgain, is_up_to_date
from firnline.run.requests import FileRequest
from firnline.run.rerun import Rerun
from firnline.run.status import RunLog
from firnline.run.topology import Taking, TopologySnapshots
from firnline.run.upkeep import Upkeep
from firnline.schema import merge, schema_from_json, schema_to_json, widen, wider_columns
from firnline.sinks.base import FORBIDDEN, Sink
from firnline.sinks.outbox import release
from firnline.sinks.parking import is_parked
from firnline.sinks.shaping import check_settings, find_unknown_columns
from firnline.sources.group import EpochPlan, Positions
from firnline.topology.records import remember
from firnline.types import EntryRef, Json, Receipt

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.02  # between two looks at epochs in flight
FOLD_EVERY = 64


@dataclass(frozen=True, slots=True)
class RunContext:
    """What opening a run and the steps of its epochs share. `states` is None without stateful operators."""

    run: str
    pipeline: OpenPipeline
    progress: Progress
    jobs: EpochJobs
    states: OperatorStates | None
    checkpoints: CheckpointMaker
    outbox: Outbox


def make_context(
    run: str,
    pipeline: OpenPipeline,
    engine: Engine,
    losses: WorkerLosses,
    slowest_sink: Callable[[], int],
    heads: Callable[[], Mapping[str, int]],
    filling: Callable[[], Collection[str]],
    may_deliver: Callable[[str], bool],
) -> RunContext:
    """Return the context of a new run.

    `slowest_sink` gives the epoch of the sink that lags most, of those fed from staged files; `heads` gives the epoch
    of every sink that is not set aside, and `filling` those of them that are being filled. `may_deliver` says whether a
    sink that lags may get rows yet.
    """
    options, flow, progress = pipeline.options, dataflow_of(pipeline.options), Progress()
    jobs = EpochJobs(options, pipeline.sources, pipeline.sinks, engine, flow, pipeline.state_home, losses)
    states = OperatorStates(pipeline, jobs, progress) if flow.stateful else None
    outbox = Outbox(pipeline, progress, heads, filling, may_deliver)
    checkpoints = CheckpointMaker(pipeline, run, states, slowest_sink, outbox)
    return RunContext(run, pipeline, progress, jobs, states, checkpoints, outbox)


class Steps:
    """The steps of one run's epochs.

    `learn_columns` reads the columns of the tables into a base again. `on_lost` gets the reason if the deciding table
    refuses an epoch.
    """

    def __init__(
        self,
        context: RunContext,
        upkeep: Upkeep,
        backpressure: Backpressure,
        *,
        learn_columns: Callable[[Base], None],
        on_lost: Callable[[FirnlineError], None],
    ) -> None:
        self._pipeline = context.pipeline
        self._progress = context.progress
        self._jobs = context.jobs
        self._states = context.states
        self._checkpoints = context.checkpoints
        self._upkeep = upkeep
        self._backpressure = backpressure
        self._read_again = ReadAgain(context.pipeline, context.progress)
        self._rerun = Rerun(context.pipeline, context.progress, context.jobs)
        self._filling = Filling(context.pipeline, context.progress, self._rerun)
        self._passed_on: set[str] = set()  # requests that the sources know, by path or name
        home = context.pipeline.options.home
        self._snapshots = TopologySnapshots(
            context.pipeline.storage, context.pipeline.options.name, home.storage_options, context.pipeline.clock
        )
        self._learn_columns = learn_columns
        self._restaged: Restaged = {}
        self._on_lost = on_lost
        self._files_per_task = 1  # files that the last epoch staged for one table
        self._before: dict[int, dict[str, Json]] = {}  # by staged epoch: positions of the one before it
        self._warned: set[str] = set()  # about the settings of followers
        self._unfinished: set[tuple[str, str]] = set()  # source and path of inputs that this run began or tried

    # -- 1 plan ---------------------------------------------------------------------------------------

    def plan(self, epoch: int, base: str) -> tuple[m.Event, EpochPlan | None]:
        """1. Fix the slice of every source that the epoch reads.

        Durable afterwards: nothing. After a kill, the next run plans again from the positions in the newest commit. Its
        plan may differ.
        """
        fault_point("epoch.plan.before")
        began = self._pipeline.clock.monotonic()
        before = self._progress.bases[base]
        if not self._backpressure.wait(lambda: bool(self._snapshots.look(before.topology).asked)):
            return m.NothingToPlan(), None
        taking, paused = self._snapshots.look(before.topology), self._backpressure.paused
        requests, plan = self._open_requests() if not paused else [], None
        try:
            if not paused:  # otherwise the epoch only records a snapshot
                plan = self._plan_sources(before.positions, self._pass_on(requests, base), taking)
        except SourceError as error:
            if not error.retryable:
                self._wait_for_epochs()
            raise
        self._drop_refused(requests)
        markers = taking.choose(plan.markers if plan is not None else ())
        if markers and self._states is not None:
            self._states.request_snapshot()
        if plan is None and (markers or (self._states is not None and self._states.needs_empty_epoch(before))):
            plan = EpochPlan({})
        if plan is None:
            return m.NothingToPlan(), None
        attempt = self._pipeline.ids.new()
        answered = [request for request in requests if self._is_answered(request, before.positions, plan)]
        released = self._snapshots.find_released(before.topology)
        remembered = remember(before.topology, markers, epoch, released, self._snapshots.find_settled(before.topology))
        began_at = self._pipeline.clock.now().isoformat()
        inflight = EpochInFlight(epoch, attempt, base, plan, began_at, answered, remembered)
        for marker in markers:
            logger.info("topology snapshot recorded", extra={"snapshot": marker.snapshot, "epoch": epoch})
        inflight.durations_ms["plan"] = self._ms_since(began)
        fault_point("epoch.plan.after")
        self._progress.epochs[attempt] = inflight
        return m.Planned(epoch, attempt, base), plan

    def _wait_for_epochs(self) -> None:
        """Wait until the epochs in flight have ended: what was read before an error that ends the run is committed."""
        while self._progress.epochs and not self._backpressure.stopping:
            self._pipeline.clock.sleep(WAIT_SECONDS)

    def _open_requests(self) -> list[FileRequest]:
        """Return the requests that no committed epoch has answered; deletes those whose deletion was killed."""
        requests, checkpoint = self._pipeline.requests.load(), self._progress.head.checkpoint
        if checkpoint is None or not any(request.source for request in requests):
            return requests
        sources = self._pipeline.sources
        answered = {
            name: sources[name].answered(p) for name, p in checkpoint.positions.items() if name in sources.names
        }
        done = [request for request in requests if request.id in answered.get(request.source, ())]
        if done:
            self.finish_requests(done)
        return [request for request in requests if request not in done]

    def _plan_sources(self, positions: Positions, judged: Mapping[str, Judged], taking: Taking) -> EpochPlan | None:
        """Return the slices of all sources; never one that answers a request in another way than judged now.

        A source that answers late has planned by an earlier judgement.
        """
        sources = self._pipeline.sources
        limits = self._pipeline.limits(self._jobs.engine.parallelism, self._files_per_task)
        limits = replace(limits, stops_at=taking.stops_at, channels=taking.channels)
        while True:
            plan = sources.plan(positions, limits)
            late = plan.asked_before & set(plan.plans) if plan is not None else ()
            if plan is None or all(is_up_to_date(plan.plans[name], judged) for name in late):
                return plan
            sources.discard(plan)

    def _pass_on(self, requests: list[FileRequest], base: str) -> dict[str, Judged]:
        """Tell the sources about requests; the calls are repeated until the requests are answered.

        A request that is gone was answered by another run, before this one claimed: the sources forget it.

        Returns those to read again as they apply to this base, by their names.
        """
        sources, positions = self._pipeline.sources, self._progress.bases[base].positions
        again: list[FileRequest] = []
        names = {request.id if request.source else request.path for request in requests}
        sources.forget_requests(self._passed_on - names)
        self._passed_on = names
        for request in requests:
            if request.kind == "drop":
                sources.drop(request.path)
            elif request.kind == "retry":
                sources.retry(request.path, changed=request.changed)
            elif request.source in sources.names and request.kind == "snapshot":
                if request.id not in sources[request.source].answered(positions[request.source]):
                    sources[request.source].snapshot(
                        request.id, request.path, where=request.where, empties=request.empties
                    )
            elif request.source in sources.names and request.kind in ("reread", "replay"):
                again.append(request)
        again = [one for one in again if one.id not in sources[one.source].answered(positions[one.source])]
        try:
            found = self._read_again.judge(again, base)
        except LedgerHoleError as error:
            sources.forget_requests(request.id for request in again)
            logger.warning("requests to read again wait: %s", error.message, extra={"requests": len(again)})
            return {}
        for one in found:
            request = one.request
            if request.kind == "reread":
                sources[request.source].reread(request.id, request.path, refused=one.refused)
                continue
            sources[request.source].replay_quarantined(request.id, request.files, discard=request.discard)
            if one.gone:
                facts = {"request": request.id, "records": one.gone}
                logger.warning("records not read again: they are no longer quarantined", extra=facts)
        return {one.request.id: one for one in found}

    def _drop_refused(self, requests: list[FileRequest]) -> None:
        """Delete the requests that their sources will never answer."""
        sources = self._pipeline.sources
        named = [request for request in requests if request.source in sources.names]
        if refused := [request for request in named if request.id in sources[request.source].refused()]:
            self.finish_requests(refused)

    def _is_answered(self, request: FileRequest, positions: Positions, plan: EpochPlan) -> bool:
        """Return whether the source of a request has answered it in this plan, even by refusing it."""
        if request.source:
            return (
                request.source in set(plan.plans) - plan.asked_before
                and request.kind in ("reread", "replay", "snapshot")
                and (self._pipeline.sources[request.source].has_answered(plan.plans[request.source], request.id))
            )
        described = self._pipeline.sources.describe(positions)
        owners = {name for name, position in described.items() if request.path in position.set_aside}
        return owners <= set(plan.plans) - plan.asked_before

    # -- 2 run ----------------------------------------------------------------------------------------

    def run(self, attempt: str) -> m.Event | None:
        """2. Run the Spark jobs of the epoch: read, transform, write the files for the sinks.

        Durable afterwards: data files, quarantine files and state files of this attempt, which no commit names. After a
        kill, nothing refers to them: the next run plans again under another attempt, and garbage collection deletes
        them.

        Returns None if the epoch was dropped while it waited for its lane.
        """
        fault_point("epoch.run.before")
        began = self._pipeline.clock.monotonic()
        inflight = self._progress.epochs.get(attempt)
        if inflight is None:
            return None
        base = self._progress.bases[inflight.base]
        if self._states is not None:
            result = self._states.run(inflight, base)
        else:
            result = self._jobs.run(
                EpochJob(
                    inflight.epoch,
                    attempt,
                    inflight.epoch_time,
                    inflight.plan,
                    base.columns,
                    is_wanted=lambda: attempt in self._progress.epochs,
                )
            )
        produced = inflight.produced = result.produced
        positions, records = inflight.advance(self._pipeline.sources, base, produced)
        processed = self._pipeline.clock.now().isoformat(timespec="seconds")
        inflight.records = {
            name: [{**record, "processed_time": processed} for record in of_source]
            for name, of_source in records.items()
        }
        inflight.durations_ms["run"] = self._ms_since(began)
        self._learn_files_per_task(inflight)
        deciding = produced.schemas.get(self._pipeline.deciding.name)
        self._progress.bases[attempt] = Base(
            epoch=inflight.epoch,
            entry=None,
            checkpoint=None,
            positions=positions,
            table=_widen(base.table, deciding) if deciding is not None else base.table,
            columns={**base.columns, **{n: _widen(base.columns.get(n), c) for n, c in produced.columns.items()}},
            state=result.state,
            watermarks=result.watermarks,
            snapshots=result.snapshots,
            topology=inflight.topology,
        )
        fault_point("epoch.run.after")
        return m.Ran(inflight.epoch, attempt)

    def _learn_files_per_task(self, inflight: EpochInFlight) -> None:
        """Learn how many files a task stages, so that the next plan keeps `max_output_files`. Warns if this epoch did
        not."""
        if self._pipeline.options.operators or not inflight.plan.splits:
            return
        staged = inflight.produced.staged
        sink, files = max(((name, len(files)) for name, files in staged.items()), key=lambda pair: pair[1])
        self._files_per_task = max(1, -(-files // len(inflight.plan.splits)))
        limit = self._pipeline.options.batch.max_output_files
        if files > limit:
            facts = {"sink": sink, "epoch": inflight.epoch, "files": files, "max_output_files": limit}
            logger.warning(
                "more files staged than batch.max_output_files: the rows fall into more partitions", extra=facts
            )

    # -- 3 stage --------------------------------------------------------------------------------------

    def stage(self, attempt: str) -> m.Event | None:
        """3. Write the ledger entry: inputs, staged files, the checkpoint, and the checksum of the previous entry.

        Durable afterwards: the entry, which has no effect until a commit names it. After a kill, the next run plans the
        epoch again and writes another entry. The ledger's sweep deletes the old one.

        Returns None if the epoch was dropped while it waited for its lane.
        """
        fault_point("epoch.stage.before")
        began = self._pipeline.clock.monotonic()
        inflight = self._progress.epochs.get(attempt)
        if inflight is None:
            return None
        self._check_followers(inflight.produced)
        base, after = self._progress.bases[inflight.base], self._progress.bases[attempt]
        is_idle = is_idle_input(inflight.records)
        checkpoint = self._checkpoints.make(
            inflight.epoch, attempt, self._progress.generation, after, base.checkpoint, is_idle=is_idle
        )
        produced = inflight.produced
        schemas = {
            sink.name: schema_to_json(produced.schemas.get(sink.name, pa.schema([]))) for sink in self._pipeline.sinks
        }
        common = schemas[self._pipeline.deciding.name]
        inflight.entry = LedgerEntry(
            checkpoint=checkpoint,
            previous=base.entry,
            previous_checkpoint=base.checkpoint.checksum if base.checkpoint else "",
            inputs=inflight.records,
            staged=produced.staged,
            quarantine=produced.quarantine,
            schema=common if inflight.plan.splits or any(produced.staged.values()) else [],
            schemas={name: columns for name, columns in schemas.items() if columns != common},
            epoch_time=inflight.epoch_time if self._pipeline.options.operators else "",
            durations_ms=dict(inflight.durations_ms),
            rescued=[one.to_json() for one in produced.rescued],
            shapes={sink.name: shape for sink in self._pipeline.sinks if (shape := sink.shape())},
        )
        inflight.ref = self._pipeline.ledger.stage(inflight.entry)
        self._checkpoints.add(checkpoint, is_idle=is_idle)
        self._before[inflight.epoch] = dict(base.checkpoint.positions) if base.checkpoint is not None else {}
        after.entry, after.checkpoint = inflight.ref, checkpoint
        inflight.durations_ms["stage"] = self._ms_since(began)
        fault_point("epoch.stage.after")
        return m.Staged(inflight.epoch, attempt)

    def _check_followers(self, produced: Produced) -> None:
        """Refuse rows that the settings of a follower do not fit, before the epoch keeps these settings for ever.

        A column that `columns`, `exclude` or `mask` names and that no row has yet is logged, once.
        """
        for options in self._pipeline.options.followers:
            columns = produced.schemas.get(options.name)
            if columns is None or not produced.staged.get(options.name):
                continue
            check_settings(options, columns)
            for words in find_unknown_columns(options, columns):
                if words not in self._warned:
                    self._warned.add(words)
                    logger.warning(words)

    # -- 4 commit -------------------------------------------------------------------------------------

    def commit(self, name: str, epoch: int) -> m.Event:
        """4. Commit to one sink: an epoch in flight to the deciding sink, a decided one to every other sink.

        Durable afterwards: the epoch. The deciding sink's commit makes it true, with its checkpoint inside; a further
        sink gets the same entry. After a kill, the next run reads the sinks. If the deciding sink holds the epoch, the
        epoch is valid, and the run commits it to the sinks that lack it. Otherwise the epoch is planned again.

        If the deciding table refuses the columns, the epoch is lost: the run reads the columns and plans again.
        """
        fault_point("epoch.commit.before")
        sink = self._pipeline.sink(name)
        began = self._pipeline.clock.monotonic()
        inflight = self._progress.in_flight(epoch) if sink is self._pipeline.deciding else None
        entry, ref = (inflight.entry, inflight.ref) if inflight is not None else self._decided_entry(epoch)
        assert entry is not None
        assert ref is not None
        staged: list[dict[str, Json]] = []
        if inflight is None:
            receipt, staged = self._deliver(sink, entry, ref)
        else:
            try:
                schema = inflight.produced.schemas.get(name)
                if schema is None:  # nothing is staged here: the columns do not change
                    schema = sink.find_schema() or pa.schema([])
                receipt = sink.commit(entry_commit(self._pipeline, sink, entry, ref, schema), self._jobs.run_tasks)
            except SchemaError as error:
                if FORBIDDEN in error.fields:
                    raise
                logger.warning("epoch lost: the table does not take it", extra={"reason": error.message})
                self._on_lost(error)
                self._learn_columns(self._progress.bases[inflight.base])
                return m.EpochLost(epoch, inflight.attempt)
        _check_receipt(receipt, name, epoch)
        if inflight is not None:
            inflight.durations_ms["commit"] = self._ms_since(began)
        self._progress.receipts.append(receipt)
        self._pipeline.recorder.note_receipt(receipt)
        fault_point("epoch.commit.after")
        waiting = staged_for(entry, sink)
        if is_parked(waiting):
            self._jobs.parked.delivered(name)
            self._restaged.pop((name, entry.checkpoint.attempt), None)
            waiting = [*waiting, *staged]
        if inflight is None and settled_epoch(sink) is None and not sink.capabilities.fed_from_outbox:
            release(self._pipeline.storage, waiting)
        return self._committed(name, receipt)

    def _deliver(self, sink: Sink, entry: LedgerEntry, ref: EntryRef) -> tuple[Receipt, list[dict[str, Json]]]:
        """Commit a decided epoch to a further sink. Returns its receipt, and the files that were committed.

        Rows that are damaged in the outbox are made again from the input first.
        """
        filled = self._filling.find(sink, entry)
        deliver = partial(self._deliver_staged, sink, entry, ref, filled)
        try:
            return deliver()
        except OutboxDamagedError as error:
            logger.warning("outbox damaged", extra={"sink": sink.name, "epoch": entry.epoch, "reason": error.message})
            self._rerun.repair(sink, entry, staged_for(entry, sink) if filled is None else filled.files)
        return deliver()  # from the row on that the sink holds

    def _deliver_staged(
        self, sink: Sink, entry: LedgerEntry, ref: EntryRef, filled: FilledEpoch | None
    ) -> tuple[Receipt, list[dict[str, Json]]]:
        if filled is not None:
            commit = entry_commit(self._pipeline, sink, entry, ref, filled.schema, filled.files, filled=filled.shape)
            receipt = sink.commit(commit, self._jobs.run_tasks)
            self._filling.release(sink, entry)
            return receipt, []
        staged = bring_staged(self._pipeline, sink, entry, self._restaged)
        schema = schema_from_json(entry.schema_of(name_in(entry, sink) or sink.name))
        commit = entry_commit(self._pipeline, sink, entry, ref, schema, staged)
        return sink.commit(commit, self._jobs.run_tasks), staged

    def _decided_entry(self, epoch: int) -> tuple[LedgerEntry, EntryRef]:
        """Return the ledger entry of a decided epoch, the only input of every further sink."""
        progress, ledger = self._progress, self._pipeline.ledger
        if epoch in progress.recent:
            return progress.recent[epoch]
        known = progress.refs.get(epoch)
        if known is not None:
            return ledger.load(known), known
        for entry, ref in ledger.entries(progress.head.entry):
            progress.refs[entry.epoch] = ref
            if entry.epoch == epoch:
                return entry, ref
        raise LedgerHoleError(f"the ledger entry of epoch {epoch} is needed by a sink that lags", epoch=epoch)

    def find_receipt(self, name: str, epoch: int) -> m.Event:
        """Ask the sink whether it holds the epoch, after a commit with unknown outcome.

        Until the sink answers, nothing else happens to that epoch there.
        """
        receipt = self._pipeline.sink(name).find_receipt(epoch)
        if receipt is None:
            return m.ReceiptAbsent(name, epoch)
        _check_receipt(receipt, name, epoch)
        if name != self._pipeline.deciding.name:  # the decisions compare that one with the epoch in flight
            _check_decided(receipt, *self._decided_entry(epoch))
        self._progress.receipts.append(receipt)
        self._pipeline.recorder.note_receipt(receipt)
        return self._committed(name, receipt)

    def _committed(self, name: str, receipt: Receipt) -> m.Event:
        deciding = self._pipeline.deciding
        committed = deciding.settled_epoch() if name == deciding.name else None
        return m.Committed(name, receipt.epoch, receipt.attempt, committed)

    def rescued_by(self, name: str, epoch: int) -> list[Rescued]:
        """Return the values that a further sink rescued itself in an epoch that it has just got, and log them."""
        receipts = (one for one in reversed(self._progress.receipts) if (one.sink, one.epoch) == (name, epoch))
        receipt = next(receipts, None)
        found = [Rescued.from_json(one) for one in receipt.rescued] if receipt is not None else []
        for one in found:
            logger.warning("rescued %s", one.text(), extra={"source": one.source, "sink": name, "epoch": epoch})
        return found

    def read_log(self) -> m.Event:
        """Read the progress of the deciding table's committer."""
        return m.LogRead(self._pipeline.deciding.read_settled() or 0)

    def decided(self, epoch: int, attempt: str) -> tuple[EpochInFlight | None, Receipt | None]:
        """Make an epoch that the deciding sink holds the head. The next epoch may be committed on it."""
        inflight, receipt = self._progress.decide(epoch, attempt)
        if inflight is not None:
            self._pipeline.recorder.note_durations(epoch, inflight.durations_ms)
            for one in inflight.produced.rescued:
                logger.warning("rescued %s", one.text(), extra={"source": one.source, "epoch": epoch})
            if inflight.entry is not None:
                self._upkeep.outbox.note(inflight.entry)
                if self._states is not None:
                    self._states.decided(inflight.entry.checkpoint)
        return inflight, receipt

    # -- 5 record -------------------------------------------------------------------------------------

    def record(self, epoch: int, log: RunLog, facts: Callable[[], dict[str, Json]]) -> m.Event:
        """5. Copy the checkpoint into the store and the tiers, and write the run's progress into its history.

        Durable afterwards: the copies; the remote tier may follow later. After a kill, the next run compares the copies
        with the sink and writes missing ones from the ledger.
        """
        fault_point("epoch.record.before")
        head = self._progress.head
        self._pipeline.recorder.record(epoch, head, self._progress.recent)
        if head.checkpoint is not None and epoch == head.epoch:
            self._pipeline.sources.decided(self._before.get(epoch, {}))
            for passed in [staged for staged in list(self._before) if staged <= epoch]:  # another lane adds some
                del self._before[passed]
        log.note(epoch=epoch, generation=head.generation, **facts())
        fault_point("epoch.record.after")
        return m.Recorded(epoch)

    # -- 6 acknowledge --------------------------------------------------------------------------------

    def acknowledge(self, action: m.Acknowledge) -> m.Event:
        """6. Forget what no sink, copy or rollback needs: in the sources, the ledger and the outbox.

        Durable afterwards: what a source forgot and, at intervals, a fold in place of old ledger entries. After a kill,
        nothing is missing: the next run acknowledges again when it starts, and folds later. A source that does not take
        the acknowledgement gets it again after a while.
        """
        fault_point("epoch.acknowledge.before")
        head, missed = self._progress.head, False
        if head.checkpoint is not None and self._pipeline.sources.want_acknowledgement:
            positions, missed = self._checkpoints.acknowledged_positions(head.checkpoint)
            if positions is not None:
                missed |= not self._pipeline.sources.acknowledge(positions)
        if head.entry is not None and head.checkpoint is not None and action.passes(FOLD_EVERY):
            floor = self._checkpoints.committed_floor(head.checkpoint)
            try:
                self._upkeep.outbox.sweep()
                below = self._upkeep.outbox.fold_below(floor)
                self._pipeline.ledger.fold(head.entry, below)
                self._pipeline.ledger.sweep(below, head.entry)
            except LedgerHoleError as error:
                logger.error("ledger not folded", extra={"reason": error.message})
        fault_point("epoch.acknowledge.after")
        return m.Acknowledged(action.epoch, missed)

    # -- beside the steps -----------------------------------------------------------------------------

    def drop(self, attempt: str) -> None:
        """Forget an epoch in flight and cancel its job. A sweep deletes its files later."""
        self._jobs.engine.cancel(attempt)
        inflight = self._progress.epochs.pop(attempt, None)
        if inflight is None:
            return
        if self._states is not None:
            self._states.drop(inflight.epoch)
        self._upkeep.late_files.dropped(inflight.plan)

    def finish_requests(self, requests: list[FileRequest]) -> None:
        """Delete requests once the epoch that answers them is committed."""
        self._pipeline.requests.done(requests)
        self._pipeline.sources.forget_requests(name for r in requests for name in (r.path, r.id) if name)

    def facts(self, inflight: EpochInFlight, receipt: Receipt) -> EpochFacts:
        """Return the facts of a newly committed epoch for observers."""
        assert inflight.entry is not None
        checkpoint, produced, plan = inflight.entry.checkpoint, inflight.produced, inflight.plan
        positions = self._pipeline.sources.describe(checkpoint.positions).values()
        read = {(name, path) for name, records in inflight.entry.inputs.items() for path in read_paths(records)}
        failed = {
            (name, str(record["path"]))
            for name, records in inflight.entry.inputs.items()
            for record in records
            if is_failed(record)
        }
        read -= failed
        again = len(read & self._unfinished)
        finished = {
            (name, str(record["path"]))
            for name, records in inflight.entry.inputs.items()
            for record in records
            if record.get("status") in ("committed", "dropped")
        }
        self._unfinished = (self._unfinished | read) - finished
        staged = inflight.entry.staged.get(self._pipeline.counted, [])
        return EpochFacts(
            epoch=inflight.epoch,
            attempt=inflight.attempt,
            sink=receipt.sink,
            version=receipt.version,
            files=len(read),
            files_again=again,
            files_failed=len(failed),
            records=produced.records,
            rows=sum(int(file.get("rows", 0)) for file in staged),
            bad=dict(produced.bad),
            rescued=tuple(produced.rescued),
            bytes_read=produced.bytes_read,
            raw_bytes=produced.raw_bytes,
            staged_files=len(staged),
            staged_bytes=sum(int(file.get("size_bytes", 0)) for file in staged),
            late_files=plan.late_files,
            checkpoint_bytes=len(canonical(checkpoint.to_json())),
            state_files=sum(position.named for position in positions),
            set_aside=sum(len(position.set_aside) for position in positions),
            lag_seconds=self._lag(plan),
            sink_rows=self._rows_by_sink(inflight.entry),
            followers=frozenset(sink.name for sink in self._pipeline.options.followers),
            filtered=frozenset(sink.name for sink in self._pipeline.options.followers if sink.where),
            rows_in=self._pipeline.counted,
            upserted=frozenset(sink.name for sink in self._pipeline.options.sinks if sink.write == "upsert"),
            changes=dict(receipt.changes) if receipt.sink == self._pipeline.counted else {},
            durations_ms=dict(inflight.durations_ms),
            sources=dict(produced.read),
            align_ms=plan.align_ms,
            is_staged=self._pipeline.deciding.settled_epoch() is not None,
            operators=inflight.operators,
        )

    def _rows_by_sink(self, entry: LedgerEntry) -> dict[str, int]:
        """Return the rows that an epoch staged for each of several sinks; empty with one sink."""
        names = [sink.name for sink in self._pipeline.sinks if sink.name != JOURNAL]
        if len(names) < 2:
            return {}
        return {name: sum(int(file.get("rows", 0)) for file in entry.staged.get(name, [])) for name in names}

    def _lag(self, plan: EpochPlan) -> float:
        """Return the seconds since the oldest input of a plan arrived; 0 if the inputs have no time."""
        arrived = [str(item["create_time"]) for item in plan.inputs if item.get("create_time")]
        if not arrived:
            return 0.0
        return max(0.0, (self._pipeline.clock.now() - datetime.fromisoformat(min(arrived))).total_seconds())

    def _ms_since(self, began: float) -> int:
        return round((self._pipeline.clock.monotonic() - began) * 1000)


def _check_receipt(receipt: Receipt, sink: str, epoch: int) -> None:
    """Refuse a receipt of another epoch or sink: the decisions would wait for the right one for ever."""
    if (receipt.sink, receipt.epoch) != (sink, epoch):
        raise SinkDivergedError(
            f"sink {sink!r} answered the commit of epoch {epoch} with a receipt of epoch {receipt.epoch} of"
            f" {receipt.sink!r}"
        )


def _check_decided(receipt: Receipt, entry: LedgerEntry, ref: EntryRef) -> None:
    """Refuse the receipt of an epoch with the right number that was never decided, by attempt and entry."""
    is_same = receipt.entry in ("", ref.checksum)  # a sink may not say which entry it holds
    if receipt.attempt != entry.checkpoint.attempt or not is_same:
        raise SinkDivergedError(
            f"sink {receipt.sink!r} holds another epoch {receipt.epoch} than was decided: attempt {receipt.attempt},"
            f" and {entry.checkpoint.attempt} was decided",
            hint=f"Copy it anew: firnline sinks resync {receipt.sink} --yes",
            sink=receipt.sink,
            epoch=receipt.epoch,
        )


def _widen(base: pa.Schema | None, produced: pa.Schema) -> pa.Schema:
    if base is None:
        return produced
    return merge(widen(base, wider_columns(base, produced)), produced, frozen=base.names)


def failure_event(error: FirnlineError, action: Any) -> m.Event:
    """Return the event for the failure of a step."""
    if isinstance(error, FencedError):
        return m.Fenced()
    match action:
        case m.Commit(sink) | m.FindReceipt(sink) if isinstance(error, SinkWentBackError):
            return m.WentBack(sink)
        case m.Run(epoch, attempt) if isinstance(error, StagingError) and error.fields.get("optional"):
            return m.EpochLost(epoch, attempt, is_failure=False)
        case m.Run(epoch, attempt) | m.StageEntry(epoch, attempt) if error.retryable:
            return m.EpochLost(epoch, attempt)
        case m.Commit(sink, epoch) | m.FindReceipt(sink, epoch) if error.retryable:
            return m.CommitUnclear(sink, epoch)
        case m.Join(sink) | m.Commit(sink) | m.FindReceipt(sink):
            return m.Failed(error.retryable, error.exit_code, sink)
        case m.WatchLog() if error.retryable:
            return m.LogRead(0)  # poll again later
        case m.Acknowledge(epoch, again=True) if error.retryable:
            return m.Acknowledged(epoch, missed=True)
        case m.Record() | m.Acknowledge():
            return m.RecordFailed(error.retryable, error.exit_code)
        case _:
            return m.Failed(error.retryable, error.exit_code)

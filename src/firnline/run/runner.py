"""Runs a pipeline: feeds events to the decisions and performs the actions that they return.

The main thread holds the state and never blocks on I/O. Actions run on lanes, one thread each, so an epoch runs on
Spark while the previous one commits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial

from firnline.clock import jitter
from firnline.epoch import messages as m
from firnline.epoch.decide import EpochState, Policy, Settings, initial, step
from firnline.errors import (
    AlreadyRunningError,
    FencedError,
    FirnlineError,
    LedgerHoleError,
    SinkError,
    SourceError,
    StagingError,
    find_denied,
    hint_at_full_disk,
)
from firnline.jobs.engine import Engine
from firnline.jobs.heartbeat import WorkerLosses
from firnline.maintenance.state import RUN_GRACE_SECONDS, sweep_state
from firnline.run.backpressure import BacklogMeter, Backpressure
from firnline.run.lanes import Lanes
from firnline.run.observer import Observer, SinkLag
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.opening import Opening
from firnline.run.status import CheckpointWatch, RunLog, RunStatus, is_still, status_of
from firnline.run.steps import Steps, failure_event, make_context
from firnline.run.upkeep import Upkeep
from firnline.sinks.base import Head, Sink
from firnline.sinks.guard import hurry_optional
from firnline.sinks.known import find_away
from firnline.sources.base import Backlog, TooYoung
from firnline.stores import open_store
from firnline.stores.audit import append_audit, make_record
from firnline.types import Json

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0  # at the end of a run, for state on its way to the remote tier
YOUNG_SECONDS, YOUNG_FACTOR = 60.0, 10  # a run waits at most so long for input that keeps changing
MIN_POLL_SECONDS = 0.1
SLOW_PLAN_SECONDS = 0.5  # a `once` run that plans longer than this probably has something to do
SWEEP_EVERY = 32  # epochs between two sweeps of state
LOG_TIMER = "\0log"  # no sink has this name
NO_RECORD = (0, FencedError.exit_code, AlreadyRunningError.exit_code)  # of a run that did not claim
AWAY_SECONDS = 60.0  # between two warnings of a source that cannot be reached
LOG_SECONDS = 10.0  # between two measurements of how far sources are behind the logs of their servers
FLUSH_SECONDS = 10.0  # a requested checkpoint waits at most this long for each tier


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    run: str
    exit_code: int
    epochs: int
    records: int
    rows: int
    error: FirnlineError | None = None
    set_aside: Mapping[str, str] = field(default_factory=dict)  # files that could not be read, with the reason


@dataclass(slots=True)
class _Totals:
    epochs: int = 0
    files: int = 0
    records: int = 0
    rows: int = 0


@dataclass(slots=True)
class _Note:
    """A call that the main thread makes between two events, such as a call of the observer."""

    perform: Callable[[], None]


class _Timers:
    """Timers by name, polled by the main loop. A new timer replaces a running one of the same name."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def set(self, name: str, at: float) -> None:
        self._due[name] = at

    def drop(self, name: str) -> None:
        self._due.pop(name, None)

    def next(self, now: float) -> tuple[str | None, float | None]:
        """Remove and return the timer that is due, or return the seconds until the next one."""
        if not self._due:
            return None, None
        name = min(self._due, key=lambda known: self._due[known])
        if self._due[name] <= now:
            del self._due[name]
            return name, None
        return None, self._due[name] - now


class Runner:
    """One run of one pipeline."""

    def __init__(
        self,
        pipeline: OpenPipeline,
        engine: Engine,
        observer: Observer | None = None,
        *,
        once: bool = False,
        accept_duplicates: bool = False,
        supervised: bool = False,
    ) -> None:
        self.run_id = pipeline.ids.new()
        self.stop_requested = False  # by a person; the end of a run by itself is none
        self._pipeline = pipeline
        self._observer = observer or Observer()
        self._once = once
        self._supervised = supervised
        self._engine = engine
        self._before_claim: Callable[[], None] = lambda: None
        # SimpleQueue: a signal handler may put while the same thread is inside get.
        self._inbox: queue.SimpleQueue[m.Event | _Note] = queue.SimpleQueue()
        self._state = self._initial()
        self._backpressure = Backpressure(
            pipeline.sinks,
            on_full=self._report_full,
            on_paused=lambda: self._inbox.put(_Note(lambda: None)),  # checkpoint requests are checked after a note
        )
        losses = WorkerLosses(pipeline.clock, lambda facts: self._inbox.put(_Note(lambda: self._report_loss(facts))))
        context = make_context(
            self.run_id,
            pipeline,
            engine,
            losses,
            slowest_sink=self._slowest_sink,
            heads=self._heads,
            filling=self._filling,
            may_deliver=self._may_deliver,
        )
        self._progress, self._states = context.progress, context.states
        self._opening = Opening(context, accept_duplicates=accept_duplicates)
        self._upkeep = Upkeep(pipeline, self._progress, context.outbox, once=once)
        self._steps = Steps(
            context,
            self._upkeep,
            self._backpressure,
            learn_columns=self._opening.learn_columns,
            on_lost=self._report_trouble,
        )
        self._resumed: Head | None = None  # the heads read first
        self._watches: list[CheckpointWatch] = []
        self._lanes = Lanes()
        self._timers = _Timers()
        self._log = RunLog(pipeline.storage, pipeline.options.name, self.run_id, pipeline.clock)
        self._totals = _Totals()
        self._young_since: float | None = None  # when it first waited for young input
        self._young_limit = YOUNG_SECONDS
        self._backlog = BacklogMeter()
        self._error: FirnlineError | None = None
        self._sinks_next_try: dict[str, str] = {}  # when a sink that failed is tried again
        self._sink_failures: dict[str, int] = {}  # in a row, of optional sinks
        self._sinks_failing: dict[str, str] = {}  # why the last attempt to join or commit failed
        self._unreachable: dict[str, str | None] = {}  # by source, why its input cannot be seen
        self._away: dict[str, tuple[float, float]] = {}  # those sources: since when, and when it was logged last
        self._logs_due_at = float("-inf")  # when the lag of sources with a log is measured again
        self._alarms: dict[str, bool] = {}  # by source with a log: whether an alarm was logged
        self._unmeasured: set[str] = set()  # sources with a log whose lag is unknown, which was logged

    def _initial(self) -> EpochState:
        options = self._pipeline.options
        batch = options.batch
        settings = Settings(
            policy=Policy(batch.commit_policy),
            quorum=batch.quorum + (options.journal is not None),  # a journal is none of the sinks that the spec counts
            max_inflight=batch.max_inflight,
            restart_attempts=options.restart.attempts,
            once=self._once,
            claims_first=self._pipeline.sources.claim_first,
        )
        followers = {s.name for s in self._pipeline.sinks if s.capabilities.fed_from_outbox}
        return initial(settings, [(s.name, s.required) for s in self._pipeline.sinks], followers)

    def _slowest_sink(self) -> int:
        """The epoch of the sink that lags most, of those that are fed from staged files."""
        return min(sink.epoch for sink in self._state.sinks if not sink.from_outbox)

    def _heads(self) -> dict[str, int]:
        """The epoch of every sink that is not set aside."""
        return {sink.name: sink.epoch for sink in self._state.sinks if not sink.away}

    def _filling(self) -> set[str]:
        """The sinks that get what was before they were added, and are not in sync yet."""
        return {sink.name for sink in self._state.sinks if sink.filling}

    def _may_deliver(self, name: str) -> bool:
        """Whether a sink that lags may get rows yet."""
        return not self._backpressure.stopping and not any(s.failures for s in self._state.sinks if s.name == name)

    def stop(self) -> None:
        """Finish the epochs in flight, then end. May be called from a signal handler."""
        self.stop_requested = True
        self._backpressure.stop()
        if self._pipeline.options.batch.commit_policy != "quorum":  # a quorum may need optional sinks
            hurry_optional(self._pipeline.sinks)
        self._inbox.put(m.StopRequested())

    # -- what others may ask for, from any thread -----------------------------------------------------

    def pause(self) -> bool:
        """Pause planning until resumed or stopped; epochs in flight complete. Returns False if already paused."""
        changed = self._backpressure.pause()
        if changed:
            self._report_paused(True)
        return changed

    def resume(self) -> bool:
        """Resume planning. Returns False if the run is not paused."""
        changed = self._backpressure.resume()
        if changed:
            self._report_paused(False)
        return changed

    def checkpoint(self) -> CheckpointWatch:
        """Poll the sources at once, late files included.

        The returned watch is done once the resulting epoch is committed and recorded.
        """
        watch = CheckpointWatch()
        self._upkeep.late_files.request()
        if self._states is not None:
            self._states.request_snapshot()
        self._inbox.put(_Note(lambda: self._begin_checkpoint(watch)))
        return watch

    def status(self) -> RunStatus:
        """Return the current status of the run."""
        paused, waiting = self._backpressure.paused, self._backpressure.waiting
        return status_of(self._state, self._progress.head, paused=paused, waiting=waiting)

    def fence(self, error: FirnlineError) -> None:
        """End without waiting for epochs in flight, because another run owns the pipeline."""

        def keep() -> None:
            self._error = error

        self._inbox.put(_Note(keep))
        self._inbox.put(m.Fenced())

    def run(self, before_claim: Callable[[], None] = lambda: None) -> RunResult:
        """Run until stopped, fenced or failed or, with `once`, until the input is exhausted.

        `before_claim` is called before every claim; if it raises, the run ends without having written to a sink.
        """
        exit_code = 1
        self._before_claim = before_claim
        self._log.begin()  # a standby may have waited for days
        if not self._once:
            self._engine.start()  # while the sinks are read and the input is listed
        try:
            self._feed(m.Started())
            while self._state.exit_code is None:
                item = self._next()
                if isinstance(item, _Note):
                    item.perform()
                else:
                    self._feed(item)
                self._answer_checkpoints()
            exit_code = self._state.exit_code
            if exit_code == 0 and self._once and self._upkeep.late_files.hole is not None:  # everything else is read
                self._error = self._upkeep.late_files.hole
                exit_code = self._error.exit_code
        except FirnlineError as failure:  # of a source or sink that the main thread asked
            self._error, exit_code = failure, failure.exit_code
        finally:
            self._backpressure.stop()
            self._lanes.close(wait=exit_code == 0)
            self._pipeline.sources.close()
            if exit_code == 0:  # otherwise a lane may still use it
                self._upkeep.late_files.close()
            if self._states is not None:
                self._states.close(drain_seconds=DRAIN_SECONDS if exit_code == 0 else 0.0)
            self._pipeline.recorder.close(drain=exit_code == 0, on_drain=self._observer.draining)
            self._report_replication()
            if exit_code == 0 and self._state.committed < self._state.decided:
                behind = [sink.name for sink in self._state.sinks[1:] if sink.epoch < self._state.decided]
                waiting = self._state.decided - self._state.committed
                self._observer.left_staged(waiting, self._pipeline.storage.root, behind)
            if self._sinks_failing:  # the failure that ended the run is among them
                self._log.note(sinks_failing=dict(self._sinks_failing))
            self._log.close(exit_code, self._error, add=self._supervised or self._is_failed_start(exit_code))
            self._observer.stopped(exit_code)
        error = self._error if exit_code else None
        totals = self._totals
        return RunResult(
            self.run_id, exit_code, totals.epochs, totals.records, totals.rows, error, self._find_set_aside()
        )

    def _is_failed_start(self, exit_code: int) -> bool:
        """Whether the run failed before its claim, on a table that exists: `status` then shows why.

        A run that another one refused leaves no record, and nothing is written where a table is missing. (The end of
        a supervised run is always recorded: the service reads it there if nobody else saw it.)
        """
        return exit_code not in NO_RECORD and self._progress.head.exists

    def _find_set_aside(self) -> dict[str, str]:
        """Return the files that the newest checkpoint sets aside, with their reasons."""
        checkpoint = self._progress.head.checkpoint
        described = self._pipeline.sources.describe(checkpoint.positions) if checkpoint is not None else {}
        return {path: reason for position in described.values() for path, reason in position.set_aside.items()}

    # -- the loop -------------------------------------------------------------------------------------

    def _next(self) -> m.Event | _Note:
        """Return the next event: the answer of a lane, or a timer that is due."""
        while True:
            due, wait = self._timers.next(self._pipeline.clock.monotonic())
            if due == LOG_TIMER:
                self._on(self._deciding_lane, m.WatchLog(), self._steps.read_log)
                continue
            if due is not None:
                return m.TimerFired(due)
            try:
                return self._inbox.get(timeout=wait)
            except queue.Empty:
                continue

    def _feed(self, event: m.Event) -> None:
        self._report(event)
        before = self._state
        self._state, actions = step(before, event)
        for watch in self._watches:
            watch.follow(before, event, self._state)
        if isinstance(event, m.Committed) and self._state.decided > before.decided:
            self._decided(event)
            self._report_idle()
        if isinstance(event, m.Joined | m.Committed):
            self._sink_failures.pop(event.sink, None)
        if isinstance(event, m.Committed) and event.sink != self._pipeline.deciding.name:
            self._observer.delivered(event.sink, event.epoch)
            if rescued := self._steps.rescued_by(event.sink, event.epoch):
                self._observer.values_rescued(event.sink, event.epoch, rescued)
        if self._state.sinks[1:] and isinstance(event, m.Committed | m.SetAside | m.SinksRead):
            self._report_sinks()
        if isinstance(event, m.LogRead) and self._state.committed > before.committed:
            self._observer.log_committed(self._state.committed)
        for action in actions:
            self._perform(action)

    def _report_sinks(self) -> None:
        """Report how far each sink is behind the deciding one."""
        decided, outbox = self._state.decided, self._upkeep.outbox
        self._observer.sinks(
            [
                SinkLag(
                    sink.name,
                    sink.epoch,
                    max(0, decided - sink.epoch),
                    outbox.waiting_bytes(sink.name, sink.epoch),
                    sink.away,
                )
                for sink in self._state.sinks[1:]
            ]
        )

    def _perform(self, action: m.Action) -> None:
        steps = self._steps
        match action:
            case m.ReadSinks():
                self._on(self._deciding_lane, action, self._read)
            case m.Claim(again):
                self._on(self._deciding_lane, action, lambda: self._claim(again=again))
            case m.Join(sink):
                self._on(f"sink {sink}", action, lambda: self._opening.join(sink))
            case m.Plan(epoch, base):
                for watch in self._watches:
                    watch.plan_begins()
                self._on("source", action, lambda: self._plan(epoch, base))
            case m.Run(_, attempt):
                self._observer.running(action.epoch)
                self._on("spark", action, lambda: steps.run(attempt))
            case m.StageEntry(_, attempt):
                self._on("stage", action, lambda: steps.stage(attempt))
            case m.Commit(sink, epoch):
                self._on(f"sink {sink}", action, lambda: steps.commit(sink, epoch))
            case m.FindReceipt(sink, epoch):
                self._on(f"sink {sink}", action, lambda: steps.find_receipt(sink, epoch))
            case m.WatchLog():
                self._timers.set(LOG_TIMER, self._pipeline.clock.monotonic() + self._delay(0))
            case m.Drop(_, attempt):
                steps.drop(attempt)
            case m.Record(epoch):
                self._on("stage", action, lambda: steps.record(epoch, self._log, self._record_facts))
            case m.Acknowledge():
                self._on("stage", action, lambda: steps.acknowledge(action))
                if action.again:
                    return
                for each_sink in self._pipeline.sinks:
                    self._on(f"sink {each_sink.name}", action, partial(self._maintain, each_sink))
                if self._pipeline.recorder.prune_due():
                    self._aside("stage", self._pipeline.recorder.prune)
                if self._states is not None and action.passes(SWEEP_EVERY):
                    self._aside("upkeep", self._sweep_state)
            case m.Wait(failures, sink):
                asked = not failures and any(watch.wants_look for watch in self._watches)
                optional = self._optional(sink)
                if failures and optional:  # tried without end: the decisions count only up to the limit of a run
                    failures = self._sink_failures[optional] = self._sink_failures.get(optional, 0) + 1
                delay = 0.0 if asked else self._delay(failures)
                self._timers.set(sink, self._pipeline.clock.monotonic() + delay)
                if sink == m.ACKNOWLEDGEMENT:
                    return
                is_waited_for = not optional or self._state.settings.policy is Policy.QUORUM
                if failures and is_waited_for and self._state.settled < self._state.committed:
                    facts = {"sink": sink, "epoch": self._state.decided, "settled": self._state.settled}
                    logger.warning("commit policy not satisfied; checkpoint not advanced", extra=facts)
                if failures and sink in self._sinks_failing:
                    moment = self._pipeline.clock.now() + timedelta(seconds=delay)
                    self._sinks_next_try[sink] = moment.isoformat()
                    self._aside("stage", lambda: self._log.note(now=True, sinks_next_try=dict(self._sinks_next_try)))
                if failures:
                    self._observer.resting(delay, failures, optional)
                else:
                    self._report_idle()
                    self._aside(self._deciding_lane, self._check_holder)
                    self._on("stage", action, self._pipeline.recorder.catch_up)
            case m.Stop():
                pass

    @property
    def _deciding_lane(self) -> str:
        return f"sink {self._pipeline.deciding.name}"

    def _optional(self, name: str) -> str:
        """Return the name if an optional sink has it."""
        return next((sink.name for sink in self._pipeline.sinks if sink.name == name and not sink.required), "")

    def _delay(self, failures: int) -> float:
        if not failures:
            poll = min(source.poll_interval_secs for source in self._pipeline.sources)
            young = self._pipeline.sources.too_young()
            return poll if young is None else min(poll, max(young.seconds, MIN_POLL_SECONDS))
        restart = self._pipeline.options.restart
        delay = min(restart.backoff_secs * 2.0 ** min(failures - 1, 64), restart.max_backoff_secs)
        return delay * jitter(0.8, 1.2)

    def _on(self, lane: str, action: m.Action, work: Callable[[], m.Event | None]) -> None:
        """Perform an action on its lane. Its answer, or the event for its failure, comes back as an event."""

        def perform() -> None:
            try:
                event = work()
            except FirnlineError as error:
                event = self._failed(error, action)
            except OSError as error:
                wrapped = SinkError(f"storage failed: {error}")
                wrapped.__cause__ = error
                event = self._failed(wrapped, action)
            except BaseException as error:  # a bug, ours or of an own kind: stop safely and report it
                logger.exception("unexpected failure")
                event = self._failed(_UnexpectedError(f"{type(error).__name__}: {error}"), action)
            if event is not None:
                self._inbox.put(event)
            if isinstance(action, m.Run) and self._states is not None and self._states.take_absorbed():
                self._inbox.put(m.ShardsChanged())

        self._lanes.submit(lane, perform)

    def _aside(self, lane: str, work: Callable[[], None]) -> None:
        """Perform a call on a lane that nothing waits for. A failure is logged and changes nothing."""

        def perform() -> None:
            try:
                work()
            except Exception:
                logger.warning("side work failed", exc_info=True)

        self._lanes.submit(lane, perform)

    def _failed(self, error: FirnlineError, action: m.Action) -> m.Event:
        logger.debug("step failed", exc_info=error, extra={"action": type(action).__name__})
        error = self._find_successor(self._name_denied(error, action), action)
        event = failure_event(error, action)
        if isinstance(action, m.Join | m.Commit | m.FindReceipt):
            self._sinks_failing[action.sink] = error.message
            error.fields.setdefault("sink", action.sink)
        if isinstance(error, StagingError):
            self._sinks_failing[str(error.fields.get("sink"))] = error.message
        optional = self._optional(action.sink) if isinstance(action, m.Join | m.Commit | m.FindReceipt) else ""
        self._report_trouble(error, getattr(action, "epoch", None), optional)
        return event

    def _name_denied(self, error: FirnlineError, action: m.Action) -> FirnlineError:
        """Return an error that names the path if access is denied: a retry would not help.

        After a commit the sink must be asked first, and an optional sink or a copy holds up nothing.
        """
        hint_at_full_disk(error)
        if isinstance(action, m.Commit | m.FindReceipt | m.Record | m.Acknowledge | m.WatchLog):
            return error
        if error.fields.get("optional") or (
            isinstance(action, m.Join) and not self._pipeline.sink(action.sink).required
        ):
            return error
        return find_denied(error) or error

    def _find_successor(self, error: FirnlineError, action: m.Action) -> FirnlineError:
        """Return the error that another run took over, if one did: it removes what this one was to read."""
        if error.retryable or not isinstance(action, m.Plan | m.Run):
            return error
        try:
            self._make_holder_check()()
        except FencedError as fenced:
            return fenced
        except FirnlineError as unknown:
            logger.debug("holder not looked at", extra={"reason": unknown.message})
        return error

    def _report_trouble(self, error: FirnlineError, epoch: int | None = None, optional: str = "") -> None:
        """Keep an error as the possible result of the run, and report it to the observer. Called from any lane.

        The error of an optional sink rarely ends a run: it does not hide one that does.
        """
        if not optional or self._error is None:
            self._error = error

        def report() -> None:
            self._observer.trouble(error, self._state.failures + 1, optional)
            if self._sinks_failing:
                self._aside("stage", lambda: self._log.note(now=True, sinks_failing=dict(self._sinks_failing)))
            if self._log.is_open and error.retryable:
                self._aside("stage", lambda: self._log.restarted(error, epoch, counts=not optional))

        self._inbox.put(_Note(report))

    # -- around the steps -----------------------------------------------------------------------------

    def _read(self) -> m.Event:
        event = self._opening.read_sinks(lambda: self._inbox.put(_Note(self._report_replication)))
        self._sinks_failing |= self._opening.unread
        head = self._progress.head
        if self._resumed is None:
            logger.info("recovered", extra={"path": head.path, "epoch": head.epoch})
        self._resumed = self._resumed or head
        self._inbox.put(_Note(lambda: self._observer.started(self.run_id, head)))
        return event

    @contextlib.contextmanager
    def _engine_starts_if_slow(self) -> Iterator[None]:
        """Start the engine while a slow plan goes on. A `once` run that quickly finds nothing to do starts none."""
        timer = threading.Timer(SLOW_PLAN_SECONDS, self._engine.start) if self._once else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _plan(self, epoch: int, base: str) -> m.Event:
        with self._engine_starts_if_slow():
            return self._plan_epoch(epoch, base)

    def _plan_epoch(self, epoch: int, base: str) -> m.Event:
        self._find_late_files(base)
        event, plan = self._steps.plan(epoch, base)
        # Due since a source last answered, or because the last search could not keep all late files.
        if plan is None and self._once and self._find_late_files(base, exhausted=True):
            event, plan = self._steps.plan(epoch, base)
        began = self._pipeline.clock.monotonic()
        while plan is None and self._awaits_all_input and (young := self._pipeline.sources.too_young()) is not None:
            if not self._wait_for(young, began):
                break
            event, plan = self._steps.plan(epoch, base)
        self._report_sources()
        self._inbox.put(_Note(self._measure_logs))
        if plan is not None:
            self._engine.start()  # while the run claims the pipeline
            if self._states is not None and self._states.give_back(self._progress.bases[base]):
                self._inbox.put(m.ShardsChanged())
            self._inbox.put(_Note(lambda: self._observer.planned(epoch, plan)))
            self._inbox.put(_Note(lambda: self._count_backlog(epoch - 1, base)))
        elif self._pipeline.sources.too_young() is not None:
            self._inbox.put(_Note(lambda: self._count_backlog(epoch - 1, base)))
        else:
            self._inbox.put(_Note(self._backlog_emptied))
        return event

    def _report_sources(self) -> None:
        """Report, from the source lane, sources that cannot be reached now, and those that can be again."""
        before, now = self._unreachable, self._pipeline.sources.unreachable()
        moment = self._pipeline.clock.monotonic()
        for name, reason in now.items():
            since, warned_at = self._away.get(name, (moment, -math.inf))
            if reason and moment - warned_at >= AWAY_SECONDS:
                text = f"; waiting for it for {moment - since:.0f} s" if name in self._away else "; waiting for it"
                logger.warning("%s%s", reason, text, extra={"source": name})
                self._away[name] = (since, moment)
            elif not reason and name in self._away:
                del self._away[name]
                after = f", after {moment - since:.0f} s" if moment - since >= 1 else ""
                logger.warning("the source can be read again%s", after, extra={"source": name})
        if now != before:
            self._unreachable = now
            self._inbox.put(_Note(lambda: self._observer.sources(now)))

    @property
    def _awaits_all_input(self) -> bool:
        """Whether the current plan waits for input that is too young: with `once`, or for a requested checkpoint."""
        return self._once or any(watch.looking for watch in list(self._watches))

    def _wait_for(self, young: TooYoung, planned_at: float) -> bool:
        """Wait until all input is old enough, so that one epoch reads what arrived together.

        Returns False if the run stops, or if input never becomes old enough.
        """
        clock = self._pipeline.clock
        began = clock.monotonic()
        if self._young_since is None:
            self._young_since = began
            self._inbox.put(_Note(lambda: self._observer.too_young(young.files, young.all_seconds)))
        self._young_limit = max(self._young_limit, YOUNG_FACTOR * young.all_seconds)
        if began - (self._young_since if self._once else planned_at) > self._young_limit:
            logger.warning("files that are still being written are left for later", extra={"files": young.files})
            return False
        while (left := began + max(young.all_seconds, 0.01) - clock.monotonic()) > 0:
            if self._backpressure.stopping:
                return False
            clock.sleep(min(left, 0.2))
        return not self._backpressure.stopping

    def _find_late_files(self, base: str, *, exhausted: bool = False) -> bool:
        """Search for late files if a search is due. Returns whether it is."""
        due = self._upkeep.late_files.due(exhausted=exhausted)
        if not due:
            return False
        before = self._upkeep.late_files.hole
        found = self._upkeep.late_files.look(base, due)
        hole = self._upkeep.late_files.hole
        if (hole is None) != (before is None):
            self._inbox.put(_Note(lambda: self._report_hole(hole)))
        if found is not None:
            self._inbox.put(_Note(lambda: self._observer.reconciled(found)))
        return True

    def _count_backlog(self, epoch: int, base: str) -> None:
        """Count the backlog after `epoch` if due, on a separate lane: a slow listing blocks nothing."""
        clock = self._pipeline.clock
        began = clock.monotonic()
        known = self._progress.bases.get(base)
        if known is None or not self._backlog.is_due(began):
            return
        positions = known.positions
        self._backlog.begin()

        def count() -> None:
            found: Backlog | None = None
            try:
                found = self._pipeline.sources.backlog(positions)
            except (OSError, FirnlineError) as error:
                logger.debug("backlog not counted", extra={"reason": str(error)})
            self._inbox.put(_Note(lambda: self._backlog_counted(epoch, found, began)))

        self._aside("backlog", count)

    def _measure_logs(self) -> None:
        """Measure how far sources are behind the logs of their servers if due, on a separate lane."""
        clock, head = self._pipeline.clock, self._progress.head
        if clock.monotonic() < self._logs_due_at or not any(source.has_log for source in self._pipeline.sources):
            return
        self._logs_due_at = clock.monotonic() + LOG_SECONDS
        positions = head.checkpoint.positions if head.checkpoint is not None else {}

        def measure() -> None:
            lags = self._pipeline.sources.log_lags(positions)
            for name, lag in lags.items():
                if lag.unknown:
                    if name not in self._unmeasured and not lag.is_away:
                        logger.warning("the lag is unknown", extra={"source": name, "reason": lag.unknown})
                    self._unmeasured.add(name)
                    continue
                self._unmeasured.discard(name)
                if lag.alarm and not self._alarms.get(name):
                    logger.warning(lag.alarm, extra={"source": name})
                elif not lag.alarm and self._alarms.get(name):
                    logger.warning("the alarm is over", extra={"source": name})
                self._alarms[name] = bool(lag.alarm)
            sources = [one for one in self._pipeline.sources if positions.get(one.name) is not None]
            progress = {one.name: one.snapshots(positions[one.name]) for one in sources if one.has_log}
            self._inbox.put(_Note(lambda: self._observer.log_lags(lags)))
            self._inbox.put(_Note(lambda: self._observer.snapshots(progress)))

        self._aside("log", measure)

    def _backlog_counted(self, epoch: int, found: Backlog | None, began: float) -> None:
        self._backlog.end(epoch, found, began=began, now=self._pipeline.clock.monotonic())
        self._report_backlog()

    def _backlog_emptied(self) -> None:
        self._backlog.emptied()
        self._report_backlog()

    def _report_backlog(self) -> None:
        if self._backlog.current is not None:
            self._observer.backlog(self._backlog.current)

    def _report_full(self, full: tuple[int, int] | None) -> None:
        """Report the start and end of back-pressure from the source lane; only the main thread creates lanes."""
        reason = f"the committer: {full[0]} units, {full[1]} bytes pending" if full else None
        self._inbox.put(_Note(lambda: self._observer.held_up(full)))
        self._inbox.put(_Note(lambda: self._aside("stage", lambda: self._log.note(now=True, waiting_for=reason))))

    def _report_paused(self, paused: bool) -> None:
        self._inbox.put(_Note(lambda: self._observer.paused(paused)))
        self._inbox.put(_Note(lambda: self._aside("stage", lambda: self._log.note(now=True, paused=paused))))

    def _begin_checkpoint(self, watch: CheckpointWatch) -> None:
        """Start a requested checkpoint. A running poll timer fires now; a back-off does not."""
        watch.begin(self._state, waiting=self._backpressure.waiting)
        self._watches.append(watch)
        if self._state.polling and not self._state.resting:
            self._timers.drop("")
            self._feed(m.TimerFired())

    def _answer_checkpoints(self) -> None:
        if not self._watches:
            return
        still = self._backpressure.paused and is_still(self._state, waiting=self._backpressure.waiting)
        for watch in [w for w in self._watches if w.is_complete(self._state, still=still)]:
            self._watches.remove(watch)
            self._aside("flush", partial(self._finish_checkpoint, watch, self._progress.head))

    def _finish_checkpoint(self, watch: CheckpointWatch, head: Head) -> None:
        """Finish a checkpoint after the record of its epoch, on a separate lane: write lagging tiers first."""
        try:
            in_sync = self._states is None or self._states.flush(FLUSH_SECONDS)
            if not self._pipeline.recorder.flush(FLUSH_SECONDS) or not in_sync:
                logger.warning("checkpoint taken, but a tier lags behind it", extra={"epoch": head.epoch})
        finally:
            watch.finish(head)

    def _claim(self, *, again: bool) -> m.Event:
        """Add the run to the history once it owns the pipeline, before it stages anything: gc then spares its files.

        A run that finds nothing to do leaves no record.
        """
        self._before_claim()
        event = self._opening.claim(again=again)
        self._pipeline.sources.claimed(self._make_holder_check())
        resumed = self._resumed or self._progress.head
        self._log.open(
            generation=self._progress.head.generation,
            paused=self._backpressure.paused,
            resumed_after=resumed.epoch,
            recovery_path=resumed.path,
            state_recovery_path=self._states.restored_path if self._states is not None else None,
            sinks_failing=dict(self._sinks_failing),
        )
        if self._progress.head.exists:  # otherwise another run may create the table under the same generation
            self._inbox.put(_Note(lambda: self._aside("upkeep", self._upkeep.outbox.sweep)))
        return event

    def _sweep_state(self) -> None:
        """Delete unneeded state. Opens its own pipeline, because a sink serves one thread."""
        remote = self._states.remote if self._states is not None else None
        replica = remote.replica if remote is not None else None
        swept = sweep_state(open_pipeline(self._pipeline.options), grace_seconds=RUN_GRACE_SECONDS, replica=replica)
        facts = {"checkpoints": sum(s.checkpoints for s in swept), "files": sum(s.files for s in swept)}
        if facts["files"]:
            self._audit_sweep({**facts, "homes": [s.home for s in swept]})

    def _audit_sweep(self, facts: dict[str, Json]) -> None:
        """Write a sweep of this run to the audit trail, if the pipeline has a store."""
        options = self._pipeline.options.checkpoint.store
        if options is None or options.type == "memory":
            return
        record = make_record(self._pipeline.options.name, "state-sweep", run=self.run_id, details=facts)
        with contextlib.closing(open_store(options, held_by=self._pipeline.deciding.name)) as store:
            append_audit(store, record)

    def _check_holder(self) -> None:
        """Check in an idle run whether another run or a rollback took over, because it commits nothing that could be
        refused."""
        try:
            self._pipeline.deciding.check_holder(self._progress.head.generation)
        except FencedError as error:
            self.fence(error)
        except SinkError as error:
            logger.debug("holder not looked at", extra={"reason": error.message})

    def _make_holder_check(self) -> Callable[[], None]:
        """Return a check whether this run still owns the pipeline, for another thread."""
        generation = self._progress.head.generation
        reader = self._pipeline.open_readers()[0] if self._pipeline.sources.claim_first else None

        def check() -> None:
            if reader is not None:
                reader.check_holder(generation)

        return check

    def _maintain(self, sink: Sink) -> None:
        try:
            sink.maintain()
        except FencedError:
            raise
        except FirnlineError as error:
            if sink.required and not isinstance(error, SinkError | SourceError):
                raise
            logger.warning("housekeeping failed", extra={"sink": sink.name, "reason": str(error)})

    # -- reports --------------------------------------------------------------------------------------

    def _report_replication(self) -> None:
        lag = self._pipeline.recorder.replication()
        if lag is not None:
            self._observer.replication(lag)
        self._observer.copies(self._pipeline.recorder.lags())

    def _report_loss(self, facts: dict[str, Json]) -> None:
        """Report a lost worker or, with `took_ms`, the recovery from it."""
        if "took_ms" not in facts:
            self._observer.worker_lost(facts)
        self._aside("stage", lambda: self._log.lost_worker(facts))

    def _report_hole(self, hole: LedgerHoleError | None) -> None:
        """Report a ledger hole. The run is added to the history even if it reads nothing, so that `status` shows the
        hole."""
        self._observer.ledger_hole(hole)
        note = self._log.open if hole else partial(self._log.note, now=True)
        self._aside("stage", lambda: note(ledger_hole=hole.message if hole else None))

    def _report_idle(self) -> None:
        """Report that everything is read, once nothing is in flight. A plan may find nothing while an epoch commits."""
        if self._state.polling and not self._state.slots and not self._pipeline.sources.is_reading():
            self._observer.idle()

    def _record_facts(self) -> dict[str, Json]:
        """Write failing sinks, and how far store and tiers are behind, to the run's history."""
        lags = self._pipeline.recorder.lags()
        failing: dict[str, Json] = {lag.tier: lag.reason for lag in lags if lag.reason}
        facts: dict[str, Json] = {"sinks_failing": dict(self._sinks_failing), "copies_failing": failing}
        for lag in lags:
            if lag.tier == "remote":
                seconds = lag.lag_seconds(self._pipeline.clock.monotonic())
                facts["replication_lag_seconds"] = round(seconds, 3)
                facts["replication_epochs_behind"] = lag.epochs_behind
        return facts

    def _report(self, event: m.Event) -> None:
        match event:
            case m.Joined(sink) | m.Committed(sink):
                self._sinks_failing.pop(sink, None)
            case m.Claimed():
                self._observer.claimed(self._progress.head.generation)
            case m.Ran(epoch, attempt):
                inflight = self._progress.epochs.get(attempt)
                took_ms = inflight.durations_ms.get("run", 0) if inflight is not None else 0
                self._observer.ran(epoch, took_ms / 1000)
            case m.Recorded(epoch):
                self._observer.recorded(epoch)

    def _decided(self, event: m.Committed) -> None:
        """React to a new epoch in the deciding sink."""
        inflight, receipt = self._steps.decided(event.epoch, event.attempt)
        if inflight is None or receipt is None:
            return
        if inflight.requests:
            self._on("stage", m.Record(event.epoch), lambda: self._steps.finish_requests(inflight.requests))
        if inflight.entry is not None:
            for name in find_away(inflight.entry.checkpoint, self._pipeline.options.followers):
                if any(sink.name == name and not sink.away for sink in self._state.sinks):
                    self._inbox.put(m.SetAside(name))
        self._totals.epochs += 1
        self._totals.records += inflight.produced.records
        if self._upkeep.late_files.learn(inflight.epoch, inflight.plan):
            unordered = self._upkeep.late_files.unordered
            self._aside("stage", lambda: self._log.note(now=True, unordered_names=unordered))
        facts = self._steps.facts(inflight, receipt)
        self._totals.rows += facts.rows
        self._totals.files += facts.files - facts.files_again
        totals = {
            **asdict(self._totals),
            "last_commit_at": self._pipeline.clock.now().isoformat(),
            "lag_seconds": round(facts.lag_seconds, 3),
        }
        self._aside("stage", lambda: self._log.note(epoch=facts.epoch, **totals))
        self._observer.committed(facts)
        if len(self._pipeline.options.sources) > 1:
            self._aside("stage", lambda: self._log.note(align_ms=facts.align_ms))
        self._backlog.committed(facts.epoch, facts.files + facts.files_failed, facts.bytes_read)
        self._report_backlog()


class _UnexpectedError(FirnlineError):
    code = "internal"
    default_hint = "This is a bug in Firnline. Run again with --debug and report the traceback; your data is safe."

"""Keeps the state of a run's operators: runs epochs on it, makes checkpoints of it, catches up after a restart."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from firnline.checkpoint.model import Checkpoint
from firnline.errors import SinkError, StateLostError, WorkerLostError
from firnline.jobs.dataflow import dataflow_of
from firnline.jobs.engine import Engine
from firnline.jobs.epoch_job import EpochJob, EpochJobs, EpochResult
from firnline.maintenance.state import find_doomed_state
from firnline.run.flight import Base, Behind, EpochInFlight, Flight
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.remote_state import RemoteState, StandingState
from firnline.run.restore_state import Restored, check_operators, fed_by, known_watermarks, restore_state
from firnline.run.snapshots import Coordinated, Since, due_operators
from firnline.run.state_floor import StateFloor
from firnline.sinks.base import Head
from firnline.state.keys import shard_ranges
from firnline.state.manifest import Ranges, SnapshotRef
from firnline.types import Json

logger = logging.getLogger(__name__)

LOOKS = 3  # for state that is swept each time it is found


@dataclass(slots=True)
class _Past:
    """When an operator's state was last checkpointed."""

    epoch: int
    at: float  # monotonic seconds
    records: int = 0  # folded in since
    watermark: int | None = None


class StateKeeper:
    """The state of one run. Its work is done on the `spark` lane."""

    def __init__(self, pipeline: OpenPipeline, engine: Engine, flight: Flight) -> None:
        self._pipeline = pipeline
        self._engine = engine
        self._flight = flight
        self.flow = dataflow_of(pipeline.options)
        self.home = pipeline.state_home
        self._jobs = EpochJobs(pipeline.options, pipeline.sources, pipeline.sinks, engine, self.flow, self.home)
        self._coordinated = Coordinated(self.home, pipeline.options, pipeline.clock)
        self._shards: int | None = pipeline.options.state.shards
        self._began = pipeline.clock.now()
        self._wanted: int | None = None  # shards to go back to once workers return, while some are absorbed
        self._absorbed = threading.Event()  # a worker's shards were just dealt out to the others
        self._past: dict[str, _Past] = {}
        self._initial: dict[str, str] = {}  # digests of exported states that a replay takes up again
        self.restored_path: str | None = None  # where the state was read when the run began; None without operators
        self.asked = threading.Event()  # a checkpoint is asked for, whatever the trigger says
        self._lost_at: float | None = None  # since when an epoch has been tried again for want of a worker
        self.tell_loss: Callable[[dict[str, Json]], None] = lambda _: None  # set by the runner
        self._standing = StandingState(pipeline.storage, pipeline.options.name)
        self.remote = self._open_remote()
        self.floor = StateFloor({o.name: fed_by(pipeline, self.flow, o) for o in self.flow.stateful})

    @property
    def has_state(self) -> bool:
        return bool(self.flow.stateful)

    @property
    def shards(self) -> int:
        """How many tasks share the key groups now."""
        return self._shards or min(self._engine.parallelism, self.flow.key_groups)

    def ranges(self) -> Ranges:
        return tuple(shard_ranges(self.flow.key_groups, self.shards))

    # -- beginning ------------------------------------------------------------------------------------

    def check(self, held: Head) -> None:
        """Refuse operators that are not those of the checkpoint, unless the spec says what becomes of their state."""
        if self.has_state or (held.checkpoint is not None and held.checkpoint.state):
            check_operators(self._pipeline, self.flow, held)

    def restore(self, held: Head, base: Base) -> None:
        """Take up the state that the deciding sink's checkpoint names.

        Raises:
            StateLostError: no tier has it any more.
        """
        self._jobs.sweep_all()
        if not self.has_state:
            return
        found = self._restore(held)
        if self.remote is not None and held.checkpoint is not None:
            with contextlib.suppress(OSError):  # unreachable now: it counts as holding nothing
                self.remote.begin(held.checkpoint)
        base.state, base.behind, self._initial = found.state, found.behind, found.initial
        self.restored_path = self.restored_path or found.path
        if self._shards is None:
            self._shards = (held.checkpoint.shards if held.checkpoint else 0) or found.shards
        now = self._pipeline.clock.monotonic()
        for operator in self.flow.stateful:
            mark = base.watermarks.of(operator.name).at
            self._past[operator.name] = _Past(found.epochs.get(operator.name, 0), now, watermark=mark)
        self._coordinated.begin_after(max(found.epochs.values(), default=0))

    def _restore(self, held: Head) -> Restored:
        """Find the state; where damaged snapshots were passed over, pin it, and look for it again under the pin."""
        found = restore_state(self._pipeline, self.flow, self.home, held)
        if not found.passed_over:
            self._standing.begin(held.generation, held.epoch, None)
            return found
        self.asked.set()  # the next epoch makes a snapshot that the sinks name
        for _ in range(LOOKS):
            self._standing.begin(held.generation, held.epoch, found.used)
            pinned, found = found.used, restore_state(self._pipeline, self.flow, self.home, held)
            doomed = find_doomed_state(self._pipeline, found.used.values())
            if found.used == pinned and doomed is None:
                return found
            if doomed is not None:
                logger.warning("a sweep deletes state that is to be restored", extra={"sweep": str(doomed)})
        raise SinkError(
            f"the state of {self._pipeline.options.name!r} is swept while it is restored",
            hint="The run tries again. A sweep that died is finished by: firnline gc SPEC --yes",
        )

    def catch_up(self, base: Base) -> None:
        """Fold the epochs that came after the checkpoint of the state, as their ledger entries say."""
        while base.behind:
            self._replay(base, base.behind[0])
            del base.behind[0]

    def _replay(self, base: Base, behind: Behind) -> None:
        entry = behind.entry
        logger.info("state catches up", extra={"epoch": entry.epoch})
        plan = self._pipeline.sources.replan(entry.checkpoint.positions, entry.inputs, self._engine.parallelism)
        recorded = known_watermarks(self.flow, entry.checkpoint)
        attempt = self._pipeline.ids.new()
        job = EpochJob(
            entry.epoch,
            attempt,
            entry.epoch_time,
            plan,
            behind.columns,
            base.state,
            behind.watermarks,
            self.ranges(),
            skip=behind.skip,
            recorded=recorded,
            initial=self._initial,
        )
        worked = self._jobs.run(job)
        failed = [o for found in worked.produced.outcomes.values() for o in found if "failed" in o]
        if failed:
            raise StateLostError(
                f"the state after epoch {entry.epoch} cannot be made again: {failed[0]['path']} {failed[0]['failed']}",
                epoch=entry.epoch,
            )
        base.state = worked.state

    # -- the remote tier ------------------------------------------------------------------------------

    def _open_remote(self) -> RemoteState | None:
        remote = self._pipeline.options.checkpoint.remote
        if remote is None or self.home.fallback is None or not self.has_state:
            return None
        return RemoteState(self.home, remote, [o.name for o in self.flow.stateful], self._pipeline.clock)

    def settled(self, checkpoint: Checkpoint) -> None:
        """The deciding sink holds an epoch."""
        with contextlib.suppress(OSError):  # a pin that is left keeps more than it must, until the next run
            self._standing.settled(checkpoint)
        if self.remote is not None:
            self.remote.settled(checkpoint)

    def run_tasks(self, attempt: str, orders: list[dict[str, Json]]) -> list[dict[str, Json]]:
        """Run what a sink needs done in tasks while it commits an epoch."""
        return self._jobs.run_tasks(attempt, orders)

    # -- an epoch -------------------------------------------------------------------------------------

    def work(self, made: EpochInFlight, base: Base) -> EpochResult:
        """Run the jobs of an epoch and, when it is time, make a checkpoint of the state they leave."""
        if not self.has_state:
            job = EpochJob(made.epoch, made.attempt, made.epoch_time, made.plan, base.columns)
            with self._losing(made):
                return self._jobs.run(job)
        requested = self.asked.is_set()
        asked = requested or self._is_dealt_anew(base)  # a change of shards ends with a checkpoint

        def begin(worked: EpochResult) -> None:
            worked.due = self._due(made, base, worked, asked=asked)
            if worked.due:
                positions, _ = made.advance(self._pipeline.sources, base, worked.produced)
                self._coordinated.begin(made.epoch, made.attempt, self.ranges(), worked, positions)

        job = EpochJob(
            made.epoch,
            made.attempt,
            made.epoch_time,
            made.plan,
            base.columns,
            base.state,
            base.watermarks,
            self.ranges(),
            before_last_fold=begin,
            is_wanted=lambda: self._is_wanted(made),
            run_began=self._began,
        )
        try:
            with self._losing(made):
                worked = self._jobs.run(job)
        except BaseException as error:
            self._coordinated.lose(made.epoch, str(error))
            raise
        made.operators = {name: folded.facts() for name, folded in worked.operators.items()}
        kept = {o.name: base.snapshots[o.name] for o in self.flow.stateful if o.name in base.snapshots}
        worked.snapshots = kept
        if worked.due:
            before = self._references(base)
            references, pause = self._coordinated.complete(made.epoch, made.attempt, worked, before, self._wanted)
            worked.snapshots = {**kept, **references}
            made.durations_ms["checkpoint"] = round(pause * 1000)
            self._note_past(made, worked)
            if requested:
                self.asked.clear()
            self._warn_of_pause(made.epoch, pause)
        for name in (o.name for o in self.flow.stateful if o.name not in worked.due):
            self._past[name].records += sum(worked.produced.read.values())
        return worked

    def _references(self, base: Base) -> dict[str, SnapshotRef]:
        """What the checkpoint before an epoch names of each operator, also where the name was another."""
        found = {}
        for operator in self.flow.stateful:
            value = base.snapshots.get(operator.name) or base.snapshots.get(operator.renamed_from)
            if value is not None:
                found[operator.name] = SnapshotRef.from_json(value)
        return found

    def _is_wanted(self, made: EpochInFlight) -> bool:
        return made.attempt in self._flight.epochs

    def _is_dealt_anew(self, base: Base) -> bool:
        """Whether no snapshot has these shards yet; epochs that were folded again since have them already."""
        return any(ref.shards != self.shards for ref in self._references(base).values())

    def _warn_of_pause(self, epoch: int, seconds: float) -> None:
        most = self._pipeline.options.checkpoint.max_pause_ms
        if seconds * 1000 > most:
            facts = {"epoch": epoch, "pause_ms": round(seconds * 1000), "max_pause_ms": most}
            logger.warning("an epoch waited long for its checkpoint", extra=facts)

    def _due(self, made: EpochInFlight, base: Base, worked: EpochResult, *, asked: bool) -> frozenset[str]:
        now = self._pipeline.clock.monotonic()
        since = {}
        for operator in self.flow.stateful:
            past = self._past[operator.name]
            since[operator.name] = Since(
                epochs=made.epoch - past.epoch,
                millis=(now - past.at) * 1000,
                records=past.records + sum(worked.produced.read.values()),
                watermark_then=past.watermark,
                watermark_now=worked.watermarks.of(operator.name).at,
                never=operator.name not in base.snapshots,
            )
        return due_operators(self._pipeline.options.checkpoint, self.flow.stateful, since, asked=asked)

    def _note_past(self, made: EpochInFlight, worked: EpochResult) -> None:
        now = self._pipeline.clock.monotonic()
        for name in worked.due:
            self._past[name] = _Past(made.epoch, now, watermark=worked.watermarks.of(name).at)

    def drop(self, epoch: int) -> None:
        """An epoch in flight is lost; called from the main thread."""
        if self.has_state:
            self._coordinated.lose(epoch, "the epoch was dropped")
            for past in self._past.values():
                past.epoch = min(past.epoch, epoch - 1)

    def is_behind(self, base: Base) -> bool:
        """Whether the newest checkpoint of the state is older than the newest epoch."""
        made = [SnapshotRef.from_json(ref).epoch for ref in base.snapshots.values()]
        return self.has_state and bool(made) and min(made) < base.epoch

    # -- lost workers ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _losing(self, made: EpochInFlight) -> Iterator[None]:
        """While the block runs the jobs of an epoch, take note of a lost worker, and of when the loss is overcome."""
        began = self._pipeline.clock.monotonic()
        try:
            yield
        except WorkerLostError as error:
            if self._is_wanted(made):  # else it was stopped because its epoch is lost
                self._lost_worker(made, began, error)
            raise
        self._overcome(made.epoch)

    def take_absorbed(self) -> bool:
        """Whether a worker's shards were dealt out to the others since this was last asked."""
        taken = self._absorbed.is_set()
        self._absorbed.clear()
        return taken

    def gives_back(self, base: Base) -> bool:
        """Whether the next epoch can be dealt out to all shards again: workers are back, and a checkpoint was made."""
        wanted = self._wanted
        if wanted is None or self._is_dealt_anew(base) or self._engine.workers < wanted:
            return False
        logger.info("workers are back", extra={"shards": wanted, "shards_before": self.shards})
        self._shards, self._wanted = wanted, None
        return True

    def _lost_worker(self, made: EpochInFlight, began: float, error: WorkerLostError) -> None:
        """A task was lost with its worker: the epoch runs again, with as many shards or, to absorb it, one fewer."""
        if error.fields.get("timed_out") and self.has_state:
            self._coordinated.time_out(made.epoch, made.attempt)
        choice = self._pipeline.options.state.on_worker_loss if self.has_state else "replace"
        before = self.shards
        if choice == "absorb" and before > 1:
            self._wanted = self._wanted or before
            self._shards = before - 1
            self._absorbed.set()
        now = self._pipeline.clock.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        facts: dict[str, Json] = {
            "epoch": made.epoch,
            "choice": choice,
            "shards": self.shards,
            "shards_before": before,
            "noticed_after_ms": round((now - began) * 1000),
            "reason": error.message,
        }
        logger.warning("a worker was lost", extra=facts)
        self.tell_loss(facts)

    def _overcome(self, epoch: int) -> None:
        """An epoch ran to its end: say how long it took since the first loss."""
        if self._lost_at is not None:
            took = round((self._pipeline.clock.monotonic() - self._lost_at) * 1000)
            logger.info("the loss of a worker is overcome", extra={"epoch": epoch, "took_ms": took})
            self.tell_loss({"epoch": epoch, "took_ms": took})
            self._lost_at = None

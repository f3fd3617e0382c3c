"""The operator state of a run: restores and pins it, runs epochs on it, copies its snapshots to the remote tier.

Only a pipeline with stateful operators uses this module.

"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from firnline.checkpoint.codec import canonical, seal
from firnline.checkpoint.model import Checkpoint
from firnline.errors import SinkError, StateLostError, WorkerLostError
from firnline.faults import fault_point
from firnline.jobs.epoch_job import EpochJob, EpochJobs, EpochResult
from firnline.maintenance.state import STANDS_ON, find_doomed_state
from firnline.names import PINS, committed_key, state_pin, state_pins
from firnline.options import RemoteTierOptions
from firnline.process import this_process
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.progress import Base, EpochInFlight, MissingEpoch, Progress
from firnline.run.restore_state import Restored, fed_by, known_watermarks, restore_state
from firnline.run.snapshots import Since, Snapshots, due_operators
from firnline.sinks.base import Head
from firnline.state.home import StateHome
from firnline.state.keys import shard_ranges
from firnline.state.manifest import Ranges, SnapshotRef, stored_ref
from firnline.state.remote import CheckpointCopy, Replica, StateReplicator
from firnline.state.snapshot import exists
from firnline.storage import Storage
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)


class RemoteState:
    """Copies the snapshots that sinks name. The main thread calls it; a separate thread copies.

    Operators may have snapshots of different epochs. The oldest snapshot that the remote tier lacks goes first, so that
    frequent snapshots do not starve rare ones. A finished copy counts even if newer snapshots exist by then; otherwise
    the floor would never rise if a copy takes longer than an epoch.
    """

    def __init__(self, home: StateHome, remote: RemoteTierOptions, operators: Sequence[str], clock: Clock) -> None:
        assert home.fallback is not None
        self.replica = Replica(home.storage, home.fallback.storage)
        self._replicator = StateReplicator(
            self.replica, remote.interval_ms, clock.monotonic, lambda _: self._offer_more(), self._copied
        )
        self._lock = threading.Lock()
        self._waiting: dict[str, SnapshotRef] = {}  # by operator: what the remote tier lacks
        self._named: dict[str, dict[str, int]] = {}  # by checkpoint of state: the operators, with epochs, that name it
        self._held: dict[str, list[int]] = {name: [] for name in operators}  # epochs in the remote tier, ascending

    def begin(self, checkpoint: Checkpoint) -> None:
        """Record which snapshots of the resumed checkpoint are already in the remote tier."""
        for name, value in checkpoint.state.items():
            ref = SnapshotRef.from_json(value)
            if name in self._held and exists(self.replica.remote, committed_key(ref.checkpoint)):
                self._hold(name, ref.epoch)

    def settled(self, checkpoint: Checkpoint) -> None:
        """Queue the snapshots that the checkpoint of a decided epoch names."""
        self._replicator.start()
        with self._lock:
            for name, value in checkpoint.state.items():
                ref = SnapshotRef.from_json(value)
                if ref.epoch > max(self._held.get(name, []), default=0):
                    self._waiting[name] = ref
                    self._named.setdefault(ref.checkpoint, {})[name] = ref.epoch
            self._offer()
            # From here on the replicator takes only what waits; what it has already taken may be older.
            wanted = {ref.checkpoint for ref in self._waiting.values()} | {self._replicator.taken}
            self._named = {checkpoint: names for checkpoint, names in self._named.items() if checkpoint in wanted}

    def _copied(self, checkpoint: str) -> None:
        """Record a finished copy. Called by the replicator."""
        with self._lock:
            for name, epoch in self._named.pop(checkpoint, {}).items():
                self._hold(name, epoch)
                if name in self._waiting and self._waiting[name].epoch <= epoch:
                    del self._waiting[name]

    def _offer_more(self) -> None:
        """Offer the next snapshot. Called by the replicator after every attempt."""
        with self._lock:
            self._offer()

    def _offer(self) -> None:
        oldest = min(self._waiting.values(), key=lambda ref: ref.epoch, default=None)
        if oldest is not None:
            self._replicator.offer(CheckpointCopy(oldest.checkpoint, oldest.digest))

    def _hold(self, name: str, epoch: int) -> None:
        held = self._held.setdefault(name, [])
        if epoch > max(held, default=0):
            held.append(epoch)

    @property
    def epoch(self) -> int:
        """The oldest of the operators' newest snapshots in the remote tier."""
        with self._lock:
            return min((max(held, default=0) for held in self._held.values()), default=0)

    def below(self, limit: int) -> int:
        """Return the newest epoch up to `limit` that can be restored from the remote tier. `limit` never decreases.

        A floor between two copies is not safe: a rollback could reach an epoch whose state only this host has, after
        the source has forgotten the input before it.
        """
        with self._lock:
            for name, held in self._held.items():
                older = [epoch for epoch in held if epoch <= limit]
                self._held[name] = held[max(0, len(older) - 1) :]
            return min((held[0] if held and held[0] <= limit else 0 for held in self._held.values()), default=0)

    def flush(self, seconds: float) -> bool:
        """Bring the remote tier in sync. Returns whether it is."""
        while self._replicator.flush(seconds):
            with self._lock:
                if not self._waiting:
                    return True
        return False

    def close(self, *, drain_seconds: float) -> None:
        """Stop. With `drain_seconds`, copy what waits first, for at most that long."""
        if drain_seconds > 0:
            self.flush(drain_seconds)
        self._replicator.close()


class StatePin:
    """Pins the state that an active run depends on. Set before the run uses it, removed once the sinks name newer
    state."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._prefix = state_pins(pipeline)
        self._key: str | None = None
        self._epoch = 0

    def begin(self, generation: int, epoch: int, used: Mapping[str, SnapshotRef] | None) -> None:
        """Pin the snapshots that a run of this generation resumes from; without snapshots, no pin is needed.

        An operator without a snapshot starts empty. Pins of earlier generations are removed: their runs can no longer
        commit. `epoch` is the newest one.
        """
        key = state_pin(self._pipeline, generation)
        if used is not None:
            state = {name: ref.to_json() for name, ref in used.items()}
            pin = {"kind": STANDS_ON, "pipeline": self._pipeline, "files": [], "state": state, **this_process().address}
            fault_point("state.pin.before")
            self._storage.put(key, canonical(seal(pin)))
            fault_point("state.pin.after")
            self._key, self._epoch = key, epoch
        for stat in self._storage.list(PINS):
            found = f"{PINS}/{stat.name.rsplit('/', 1)[-1]}"
            if found.startswith(self._prefix) and found[len(self._prefix) :][:20].isdigit() and found < key:
                self._storage.delete(found)

    def settled(self, checkpoint: Checkpoint) -> None:
        """Remove the pin once every snapshot that a decided epoch names is newer than the restore."""
        if self._key is None:
            return
        made = [SnapshotRef.from_json(ref).epoch for ref in checkpoint.state.values()]
        if made and min(made) > self._epoch:
            self._storage.delete(self._key)
            self._key = None


RESTORES = 3  # attempts, while a sweep deletes the state being restored


@dataclass(slots=True)
class _Past:
    """The time of an operator's last snapshot, and what came since."""

    epoch: int
    at: float  # monotonic seconds
    records: int = 0  # folded since
    watermark: int | None = None


class OperatorStates:
    """The operator state of one run. The `spark` lane calls `catch_up` and `run`."""

    def __init__(self, pipeline: OpenPipeline, jobs: EpochJobs, progress: Progress) -> None:
        self._pipeline = pipeline
        self._engine = jobs.engine
        self._progress = progress
        self._jobs = jobs
        self._flow = jobs.flow
        self._snapshots = Snapshots(jobs.home, pipeline.options, pipeline.clock)
        self._shards: int | None = pipeline.options.state.shards
        self._began = pipeline.clock.now()
        self._wanted: int | None = None  # the number of shards to return to once workers are back
        self._absorbed = threading.Event()  # the shards of a lost worker were just reassigned
        self._past: dict[str, _Past] = {}
        self._initial: dict[str, str] = {}  # digests of exported states that a replay loads again
        self._requested = threading.Event()  # a snapshot is requested, whatever the trigger
        self._pins = StatePin(pipeline.storage, pipeline.options.name)
        self.restored_path: str | None = None  # where the state was read at the start of the run
        self.remote = self._open_remote()

    @property
    def feeds(self) -> dict[str, list[str]]:
        """The stateful operators in topological order, each with the stateful operators that its rows reach."""
        return {o.name: fed_by(self._pipeline, self._flow, o) for o in self._flow.stateful}

    @property
    def shards(self) -> int:
        """The number of tasks that share the key groups now."""
        return self._shards or min(self._engine.parallelism, self._flow.key_groups)

    def ranges(self) -> Ranges:
        """The key groups of each shard."""
        return tuple(shard_ranges(self._flow.key_groups, self.shards))

    # -- beginning ------------------------------------------------------------------------------------

    def restore(self, head: Head, base: Base) -> None:
        """Restore the state that the deciding sink's checkpoint names.

        Raises:
            StateLostError: no tier has it any more.
        """
        restored = self._restore(head)
        if self.remote is not None and head.checkpoint is not None:
            with contextlib.suppress(OSError):  # unreachable now: treated as empty
                self.remote.begin(head.checkpoint)
        base.state, base.missing_epochs, self._initial = restored.state, restored.missing_epochs, restored.initial
        self.restored_path = self.restored_path or restored.path
        if self._shards is None:
            self._shards = (head.checkpoint.shards if head.checkpoint else 0) or restored.shards
        now = self._pipeline.clock.monotonic()
        for operator in self._flow.stateful:
            mark = base.watermarks.of(operator.name).at
            self._past[operator.name] = _Past(restored.epochs.get(operator.name, 0), now, watermark=mark)
        self._snapshots.begin_after(max(restored.epochs.values(), default=0))

    def _restore(self, head: Head) -> Restored:
        """Find the state. If damaged snapshots were skipped, pin the ones in use and restore them under the pin."""
        restored = self._find_state(head)
        if not restored.passed_over:
            self._pins.begin(head.generation, head.epoch, None)
            return restored
        self._requested.set()  # the next epoch makes a snapshot, which the sinks then name
        for _ in range(RESTORES):
            self._pins.begin(head.generation, head.epoch, restored.used)
            pinned, restored = restored.used, self._find_state(head)
            doomed = find_doomed_state(self._pipeline, restored.used.values())
            if restored.used == pinned and doomed is None:
                return restored
            if doomed is not None:
                logger.warning("a sweep deletes state that is to be restored", extra={"sweep": str(doomed)})
        raise SinkError(
            f"the state of {self._pipeline.options.name!r} is swept while it is restored",
            hint="The run tries again. A sweep that died is finished by: firnline gc SPEC --yes",
        )

    def _find_state(self, head: Head) -> Restored:
        return restore_state(self._pipeline, self._flow, self._jobs.home, head)

    def catch_up(self, base: Base) -> None:
        """Fold the epochs after the checkpoint of the state, as their ledger entries describe them."""
        while base.missing_epochs:
            self._replay(base, base.missing_epochs[0])
            del base.missing_epochs[0]

    def _replay(self, base: Base, missing: MissingEpoch) -> None:
        entry = missing.entry
        logger.info("state catches up", extra={"epoch": entry.epoch})
        plan = self._pipeline.sources.replan(entry.checkpoint.positions, entry.inputs, self._engine.parallelism)
        recorded = known_watermarks(self._flow, entry.checkpoint)
        attempt = self._pipeline.ids.new()
        job = EpochJob(
            entry.epoch,
            attempt,
            entry.epoch_time,
            plan,
            missing.columns,
            base.state,
            missing.watermarks,
            self.ranges(),
            columns_after=missing.columns_after,
            skip=missing.skip,
            recorded=recorded,
            initial=self._initial,
        )
        result = self._jobs.run(job)
        for name, reason in result.produced.failed.items():
            raise StateLostError(
                f"the state after epoch {entry.epoch} cannot be made again: {name} {reason}", epoch=entry.epoch
            )
        base.state = result.state

    # -- the remote tier ------------------------------------------------------------------------------

    def _open_remote(self) -> RemoteState | None:
        remote = self._pipeline.options.checkpoint.remote
        if remote is None or self._jobs.home.fallback is None:
            return None
        return RemoteState(self._jobs.home, remote, [o.name for o in self._flow.stateful], self._pipeline.clock)

    def flush(self, seconds: float) -> bool:
        """Write the newest snapshot to the remote tier now. Returns whether the tier holds it afterwards."""
        return self.remote is None or self.remote.flush(seconds)

    def close(self, *, drain_seconds: float) -> None:
        """Close. With `drain_seconds`, wait at most that long for the remote tier to catch up."""
        if self.remote is not None:
            self.remote.close(drain_seconds=drain_seconds)

    def decided(self, checkpoint: Checkpoint) -> None:
        """Copy the snapshots of a decided epoch to the remote tier."""
        with contextlib.suppress(OSError):  # a pin left behind keeps too much until the next run
            self._pins.settled(checkpoint)
        if self.remote is not None:
            self.remote.settled(checkpoint)

    # -- an epoch -------------------------------------------------------------------------------------

    def request_snapshot(self) -> None:
        """Request a snapshot with the next epoch, whatever the trigger. May be called from any thread."""
        self._requested.set()

    def needs_empty_epoch(self, base: Base) -> bool:
        """Return whether a requested snapshot needs an epoch without input, because the newest snapshot lacks
        epochs."""
        epochs = [SnapshotRef.from_json(ref).epoch for ref in base.snapshots.values()]
        return self._requested.is_set() and bool(epochs) and min(epochs) < base.epoch

    def run(self, inflight: EpochInFlight, base: Base) -> EpochResult:
        """Run the jobs of an epoch and, if due, snapshot the state after it."""
        self.catch_up(base)
        requested = self._requested.is_set()
        forced = requested or self._is_dealt_anew(base)  # a change of shards ends with a snapshot

        def begin_snapshot(result: EpochResult) -> None:
            result.due = self._due(inflight, base, result, asked=forced)
            if result.due:
                positions, _ = inflight.advance(self._pipeline.sources, base, result.produced)
                self._snapshots.begin(inflight.epoch, inflight.attempt, self.ranges(), result, positions)

        job = EpochJob(
            inflight.epoch,
            inflight.attempt,
            inflight.epoch_time,
            inflight.plan,
            base.columns,
            base.state,
            base.watermarks,
            self.ranges(),
            before_last_fold=begin_snapshot,
            is_wanted=lambda: inflight.attempt in self._progress.epochs,
            on_worker_lost=lambda error: self._react_to_loss(inflight, error),
            run_began=self._began,
        )
        try:
            result = self._jobs.run(job)
        except BaseException as error:
            self._snapshots.lose(inflight.epoch, str(error))
            raise
        inflight.operators = {name: folded.facts() for name, folded in result.operators.items()}
        kept = {o.name: base.snapshots[o.name] for o in self._flow.stateful if o.name in base.snapshots}
        result.snapshots = kept
        if result.due:
            before = self._references(base)
            references, pause = self._snapshots.complete(inflight.epoch, inflight.attempt, result, before, self._wanted)
            result.snapshots = {**kept, **references}
            inflight.durations_ms["checkpoint"] = round(pause * 1000)
            now = self._pipeline.clock.monotonic()
            for name in result.due:
                self._past[name] = _Past(inflight.epoch, now, watermark=result.watermarks.of(name).at)
            if requested:
                self._requested.clear()
            self._warn_of_pause(inflight.epoch, pause)
        for name in (o.name for o in self._flow.stateful if o.name not in result.due):
            self._past[name].records += sum(result.produced.read.values())
        return result

    def _references(self, base: Base) -> dict[str, SnapshotRef]:
        """Return the state reference of each operator in the checkpoint before an epoch, also for renamed operators."""
        refs = {operator.name: stored_ref(operator, base.snapshots) for operator in self._flow.stateful}
        return {name: ref for name, ref in refs.items() if ref is not None}

    def _is_dealt_anew(self, base: Base) -> bool:
        """Return whether no snapshot has the current shards yet. Epochs folded again since already use them."""
        return any(ref.shards != self.shards for ref in self._references(base).values())

    def _warn_of_pause(self, epoch: int, seconds: float) -> None:
        most = self._pipeline.options.checkpoint.max_pause_ms
        if seconds * 1000 > most:
            facts = {"epoch": epoch, "pause_ms": round(seconds * 1000), "max_pause_ms": most}
            logger.warning("an epoch waited long for its checkpoint", extra=facts)

    def _due(self, inflight: EpochInFlight, base: Base, result: EpochResult, *, asked: bool) -> frozenset[str]:
        now = self._pipeline.clock.monotonic()
        since = {}
        for operator in self._flow.stateful:
            past = self._past[operator.name]
            since[operator.name] = Since(
                epochs=inflight.epoch - past.epoch,
                millis=(now - past.at) * 1000,
                records=past.records + sum(result.produced.read.values()),
                watermark_then=past.watermark,
                watermark_now=result.watermarks.of(operator.name).at,
                never=operator.name not in base.snapshots,
            )
        return due_operators(self._pipeline.options.checkpoint, self._flow.stateful, since, asked=asked)

    def drop(self, epoch: int) -> None:
        """Drop a lost epoch in flight. Called from the main thread."""
        self._snapshots.lose(epoch, "the epoch was dropped")
        for past in self._past.values():
            past.epoch = min(past.epoch, epoch - 1)

    # -- lost workers ---------------------------------------------------------------------------------

    def take_absorbed(self) -> bool:
        """Return whether the shards of a lost worker were reassigned since the last call."""
        taken = self._absorbed.is_set()
        self._absorbed.clear()
        return taken

    def give_back(self, base: Base) -> bool:
        """Use all shards again from the next epoch, if workers are back and a snapshot was made. Returns whether it
        does."""
        wanted = self._wanted
        if wanted is None or self._is_dealt_anew(base) or self._engine.workers < wanted:
            return False
        logger.info("workers are back", extra={"shards": wanted, "shards_before": self.shards})
        self._shards, self._wanted = wanted, None
        return True

    def _react_to_loss(self, inflight: EpochInFlight, error: WorkerLostError) -> dict[str, Json]:
        """React to a lost worker: rerun the epoch with the same shards or, to absorb the loss, with one fewer."""
        if error.fields.get("timed_out"):
            self._snapshots.time_out(inflight.epoch, inflight.attempt)
        choice, before = self._pipeline.options.state.on_worker_loss, self.shards
        if choice == "absorb" and before > 1:
            self._wanted = self._wanted or before
            self._shards = before - 1
            self._absorbed.set()
        return {"choice": choice, "shards": self.shards, "shards_before": before}

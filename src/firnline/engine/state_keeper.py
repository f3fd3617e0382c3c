"""Keeps the state of a run's operators: runs epochs on it, makes checkpoints of it, catches up after a restart."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from firnline.checkpoint.model import Checkpoint
from firnline.checkpoint.replication import Replication
from firnline.engine.dataflow import Ranges, dataflow_of
from firnline.engine.engine import Engine
from firnline.engine.epoch_job import EpochJob, Task, Worked, even_ranges
from firnline.engine.flight import Base, Behind, EpochInFlight, Flight
from firnline.engine.orders import columns_from_json
from firnline.engine.parts import Parts
from firnline.engine.replaying import replay_plan
from firnline.engine.restoring import check_operators, restore_state
from firnline.engine.snapshots import Coordinated
from firnline.engine.triggers import Since, due_operators
from firnline.errors import StateLostError, WorkerLostError
from firnline.sinks.base import Held
from firnline.state.manifest import SnapshotRef, Worker
from firnline.state.replica import Replica
from firnline.state.replicating import StateReplicator
from firnline.types import Json

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Past:
    """When an operator's state was last checkpointed."""

    epoch: int
    at: float  # monotonic seconds
    records: int = 0  # folded in since
    watermark: int | None = None


class StateKeeper:
    """The state of one run. Its work is done on the `spark` lane."""

    def __init__(self, parts: Parts, engine: Engine, flight: Flight) -> None:
        self._parts = parts
        self._engine = engine
        self._flight = flight
        self.flow = dataflow_of(parts.options)
        self.home = parts.state_home
        self._job = EpochJob(parts, engine, self.flow, self.home)
        self._coordinated = Coordinated(self.home, parts.options, parts.clock)
        self._shards: int | None = parts.options.state.shards
        self._past: dict[str, _Past] = {}
        self.restored_path: str | None = None  # where the state was read when the run began; None without operators
        self.asked = threading.Event()  # a checkpoint is asked for, whatever the trigger says
        self.tell_loss: Callable[[dict[str, Json]], None] = lambda _: None  # set by the runner
        self._replicator = self._open_replicator()
        self._remote: dict[str, int] = {}  # the newest snapshot of each operator that the remote tier holds
        self._offered: dict[int, list[str]] = {}  # epoch of a snapshot -> operators
        self._stands_on: dict[int, int] = {}  # epoch -> the oldest snapshot that its state is made from

    @property
    def has_state(self) -> bool:
        return bool(self.flow.stateful)

    @property
    def shards(self) -> int:
        """How many tasks share the key groups now."""
        return self._shards or min(self._engine.parallelism, self.flow.key_groups)

    def ranges(self) -> Ranges:
        return even_ranges(self.flow.key_groups, self.shards)

    # -- beginning ------------------------------------------------------------------------------------

    def check(self, held: Held) -> None:
        """Refuse operators that are not those of the checkpoint, unless the spec says what becomes of their state."""
        if self.has_state or (held.checkpoint is not None and held.checkpoint.state):
            check_operators(self._parts, self.flow, held)

    def restore(self, held: Held, base: Base) -> None:
        """Take up the state that the deciding sink's checkpoint names.

        Raises:
            StateLostError: no tier has it any more.
        """
        if self.flow.operators:
            self._job.sweep_all()
        if not self.has_state:
            return
        found = restore_state(self._parts, self.flow, self.home, held)
        base.state, base.behind = found.state, found.behind
        self.restored_path = self.restored_path or found.path
        if self._shards is None:
            self._shards = found.shards
        now = self._parts.clock.monotonic()
        for operator in self.flow.stateful:
            mark = base.watermarks.of(operator.name).at
            self._past[operator.name] = _Past(found.epochs.get(operator.name, 0), now, watermark=mark)
        self._coordinated.begin_after(max(found.epochs.values(), default=0))

    def catch_up(self, base: Base) -> None:
        """Fold the epochs that came after the checkpoint of the state, as their ledger entries say."""
        while base.behind:
            self._replay(base, base.behind[0])
            del base.behind[0]

    def _replay(self, base: Base, behind: Behind) -> None:
        entry = behind.entry
        logger.info("state catches up", extra={"epoch": entry.epoch})
        plan = replay_plan(self._parts, entry, self._engine.parallelism)
        task = Task(entry.epoch, self._parts.ids.new(), entry.epoch_time, plan, skip=behind.skip, replay=True)
        then = Base(
            entry.epoch - 1,
            None,
            None,
            base.positions,
            None,
            columns_from_json(entry.checkpoint.columns),
            base.state,
            behind.watermarks,
        )
        worked = self._job.run(task, then, self.ranges())
        failed = [o for found in worked.produced.outcomes.values() for o in found if "failed" in o]
        if failed:
            raise StateLostError(
                f"the state after epoch {entry.epoch} cannot be made again: {failed[0]['path']} {failed[0]['failed']}",
                epoch=entry.epoch,
            )
        base.state = worked.state

    # -- the remote tier ------------------------------------------------------------------------------

    def _open_replicator(self) -> StateReplicator | None:
        remote = self._parts.options.checkpoint.remote
        if remote is None or self.home.fallback is None or not self.has_state:
            return None
        replica = Replica(self.home.storage, self.home.fallback.storage)
        return StateReplicator(replica, remote.interval_ms, self._parts.clock.monotonic, self._replicated)

    def _replicated(self, found: Replication) -> None:
        for name in self._offered.get(found.epoch, []):
            self._remote[name] = found.epoch
        self._offered = {epoch: names for epoch, names in self._offered.items() if epoch > found.epoch}

    def settled(self, checkpoint: Checkpoint) -> None:
        """The deciding sink holds an epoch: what its checkpoint names may go to the remote tier."""
        if self._replicator is None:
            return
        self._replicator.start()
        refs = {name: SnapshotRef.from_json(ref) for name, ref in checkpoint.state.items()}
        for ref in {ref.checkpoint: ref for ref in refs.values() if ref.epoch == checkpoint.epoch}.values():
            self._offered[ref.epoch] = [name for name, other in refs.items() if other.checkpoint == ref.checkpoint]
            self._replicator.offer(ref.checkpoint, ref.digest)

    @property
    def remote_epoch(self) -> int | None:
        """The oldest of the newest snapshots in the remote tier: one must be able to go back there; None without it."""
        if self._replicator is None:
            return None
        return min((self._remote.get(operator.name, 0) for operator in self.flow.stateful), default=0)

    def flush(self, seconds: float) -> bool:
        """Bring the remote tier level; whether it is."""
        return self._replicator is None or self._replicator.flush(seconds)

    def close(self, *, drain_seconds: float) -> None:
        if self._replicator is not None:
            self._replicator.close(drain_seconds=drain_seconds)

    # -- an epoch -------------------------------------------------------------------------------------

    def work(self, made: EpochInFlight, base: Base) -> Worked:
        """Run the jobs of an epoch and, when it is time, make a checkpoint of the state they leave."""
        if not self.has_state:
            return self._job.run(Task(made.epoch, made.attempt, made.epoch_time, made.plan), base, ())
        requested = self.asked.is_set()
        asked = requested or self._is_dealt_anew(base)  # a change of shards ends with a checkpoint
        due: list[frozenset[str]] = []

        def begin(worked: Worked) -> frozenset[str]:
            found = self._due(made, base, worked, asked=asked)
            due.append(found)
            if found:
                positions, _ = self._parts.sources.advance(
                    made.plan, base.positions, worked.produced.outcomes, made.epoch
                )
                self._coordinated.begin(made.epoch, made.attempt, self.ranges(), found, worked, positions, _me())
            return found

        task = Task(made.epoch, made.attempt, made.epoch_time, made.plan, begin=begin)
        try:
            worked = self._job.run(task, base, self.ranges())
        except WorkerLostError as error:
            self._coordinated.lose(made.epoch, error.message)
            self._lost_worker(made.epoch, error)
            raise
        except BaseException as error:
            self._coordinated.lose(made.epoch, str(error))
            raise
        made.operators = {name: folded.facts() for name, folded in worked.operators.items()}
        kept = {o.name: base.snapshots[o.name] for o in self.flow.stateful if o.name in base.snapshots}
        worked.snapshots = kept
        if due and due[0]:
            pause = self._coordinated.complete(made.epoch, made.attempt, worked)
            worked.snapshots = {**kept, **self._coordinated.references}
            made.durations_ms["checkpoint"] = round(pause * 1000)
            self._note_past(made, worked, due[0])
            if requested:
                self.asked.clear()
            self._warn_of_pause(made.epoch, pause)
        for name, folded in worked.operators.items():
            self._past[name].records += folded.rows
        return worked

    def _is_dealt_anew(self, base: Base) -> bool:
        """Whether this epoch is the first with these shards."""
        ranges = self.ranges()
        return any(tuple((a, b) for a, b, _ in state.shards) not in ((), ranges) for state in base.state.values())

    def _warn_of_pause(self, epoch: int, seconds: float) -> None:
        most = self._parts.options.checkpoint.max_pause_ms
        if seconds * 1000 > most:
            facts = {"epoch": epoch, "pause_ms": round(seconds * 1000), "max_pause_ms": most}
            logger.warning("an epoch waited long for its checkpoint", extra=facts)

    def _due(self, made: EpochInFlight, base: Base, worked: Worked, *, asked: bool) -> frozenset[str]:
        now = self._parts.clock.monotonic()
        since = {}
        for operator in self.flow.stateful:
            past = self._past.setdefault(operator.name, _Past(0, now))
            since[operator.name] = Since(
                epochs=made.epoch - past.epoch,
                millis=(now - past.at) * 1000,
                records=past.records + sum(worked.produced.read.values()),
                watermark_then=past.watermark,
                watermark_now=worked.watermarks.of(operator.name).at,
                never=operator.name not in base.snapshots,
            )
        return due_operators(self._parts.options.checkpoint, self.flow.stateful, since, asked=asked)

    def _note_past(self, made: EpochInFlight, worked: Worked, due: frozenset[str]) -> None:
        now = self._parts.clock.monotonic()
        for name in due:
            self._past[name] = _Past(made.epoch, now, watermark=worked.watermarks.of(name).at)

    def drop(self, epoch: int) -> None:
        """An epoch in flight is lost; called from the main thread."""
        if self.has_state:
            self._coordinated.lose(epoch, "the epoch was dropped")
            for past in self._past.values():
                past.epoch = min(past.epoch, epoch - 1)

    def begin_floor(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Take what is known of the checkpoints from the floor on."""
        self._stands_on = {one.epoch: _oldest(one.state) for one in checkpoints}

    def snapshot_below(self, floor: int, epoch: int, snapshots: Mapping[str, Json]) -> int:
        """The newest epoch at or below `floor` whose state needs no epoch from before it to be made again.

        Called once for every checkpoint, with what it says of the state.
        """
        if not self.has_state:
            return floor
        self._stands_on[epoch] = _oldest(snapshots)
        known = [made for made in self._stands_on if made <= floor]
        if not known:
            return 0
        self._stands_on = {made: on for made, on in self._stands_on.items() if made >= max(known)}
        return self._stands_on[max(known)]

    def is_behind(self, base: Base) -> bool:
        """Whether the newest checkpoint of the state is older than the newest epoch."""
        return self.has_state and bool(base.snapshots) and _oldest(base.snapshots) < base.epoch

    # -- lost workers ---------------------------------------------------------------------------------

    def _lost_worker(self, epoch: int, error: WorkerLostError) -> None:
        """A task was lost with its worker: the epoch runs again, with as many shards or, to absorb it, one fewer."""
        choice = self._parts.options.state.on_worker_loss
        before = self.shards
        if choice == "absorb" and before > 1:
            self._shards = before - 1
        facts: dict[str, Json] = {"epoch": epoch, "choice": choice, "shards": self.shards, "shards_before": before}
        logger.warning("a worker was lost", extra={**facts, "reason": error.message})
        self.tell_loss(facts)


def _oldest(snapshots: Mapping[str, Json]) -> int:
    return min((SnapshotRef.from_json(ref).epoch for ref in snapshots.values()), default=0)


def _me() -> Worker:
    return Worker(socket.gethostname(), os.getpid())

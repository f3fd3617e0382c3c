"""Snapshots of operator state: decides after which epochs one is due, and completes it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from firnline.checkpoint.codec import checksum
from firnline.errors import EngineError, StateConflictError
from firnline.jobs.dataflow import shape_of
from firnline.jobs.epoch_job import EpochResult
from firnline.options import CheckpointOptions, OperatorOptions, PipelineOptions
from firnline.process import this_process
from firnline.sources.group import Positions
from firnline.state import coordinator as c
from firnline.state import snapshot as layout
from firnline.state.home import StateHome
from firnline.state.manifest import CheckpointPlan, OperatorInfo, Ranges, SnapshotRef, Worker, checkpoint_id
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Since:
    """Changes to one operator's state since its last checkpoint, including this epoch."""

    epochs: int
    millis: float
    records: int
    watermark_then: int | None  # microseconds, at the last checkpoint
    watermark_now: int | None
    never: bool = False  # no checkpoint yet: the first epoch makes one, so that every later checkpoint names its state


def due_operators(
    options: CheckpointOptions, operators: tuple[OperatorOptions, ...], since: Mapping[str, Since], *, asked: bool
) -> frozenset[str]:
    """Return the operators to checkpoint after this epoch: all or none, unless each has its own schedule."""
    names = [operator.name for operator in operators]
    if asked:
        return frozenset(names)
    if options.mode == "aligned":
        return frozenset(names if any(_is_due(options, since[name]) for name in names) else ())
    found = set()
    for operator in operators:
        past = since[operator.name]
        interval = operator.interval_ms
        in_time = past.millis >= interval if interval is not None else _is_due(options, past)
        if in_time or past.never:
            found.add(operator.name)
    return frozenset(found)


def _is_due(options: CheckpointOptions, since: Since) -> bool:
    trigger = options.trigger
    if since.never:
        return True
    if trigger.every_epochs is not None and since.epochs >= trigger.every_epochs:
        return True
    if trigger.every_ms is not None and since.millis >= trigger.every_ms:
        return True
    if trigger.every_records is not None and since.records >= trigger.every_records:
        return True
    return trigger.event_time_ms is not None and _crossed(trigger.event_time_ms * 1000, since)


def _crossed(step_us: int, since: Since) -> bool:
    """Return whether the watermark passed a multiple of `step_us`."""
    if since.watermark_now is None:
        return False
    return since.watermark_then is None or since.watermark_now // step_us > since.watermark_then // step_us


class Snapshots:
    """Makes the snapshots of one run's state, one at a time.

    `begin` is called before the last fold of an epoch, `complete` after it. The end of the Spark job is the barrier,
    and its result rows are the reports. The main thread drops epochs.
    """

    def __init__(self, home: StateHome, options: PipelineOptions, clock: Clock) -> None:
        self._home = home
        self._options = options
        self._clock = clock
        self._state = c.initial()
        self._plan: CheckpointPlan | None = None
        self._began = self._paused = 0.0
        self._lock = threading.Lock()

    def begin_after(self, epoch: int) -> None:
        """Continue after the checkpoint of an epoch."""
        self._state = c.initial(epoch)

    def begin(self, epoch: int, attempt: str, ranges: Ranges, result: EpochResult, positions: Positions) -> None:
        """Write the plan of the checkpoint before the last shards start."""
        self._began = self._clock.monotonic()
        options = {operator.name: operator for operator in self._options.operators}
        plan = CheckpointPlan(
            pipeline=self._options.name,
            epoch=epoch,
            attempt=attempt,
            key_groups=self._options.state.key_groups,
            shards=ranges,
            operators={name: _info(result, options[name]) for name in sorted(result.due)},
            positions=positions,
            watermarks=result.watermarks.to_json(),
            workers=(Worker(**this_process().address),),
            created_at=self._clock.now().isoformat(),
        )
        actions = self._feed(c.Begin(plan.checkpoint_id, epoch, len(ranges)))
        if c.CheckpointRequest(plan.checkpoint_id, epoch) not in actions:
            raise EngineError(f"a checkpoint of epoch {epoch} cannot be begun")
        self._plan = plan
        layout.begin(self._home.storage, plan)
        self._paused = self._clock.monotonic() - self._began

    def complete(
        self,
        epoch: int,
        attempt: str,
        result: EpochResult,
        before: Mapping[str, SnapshotRef],
        shards_wanted: int | None = None,
    ) -> tuple[dict[str, Json], float]:
        """Process the shards' reports. Returns the references for the checkpoint in the sinks, and how long the epoch
        waited.

        `before` has each operator's reference in the previous epoch, under its current name. `shards_wanted` is the
        number of shards that the next run starts with, if this run has absorbed some.

        Raises:
            EngineError: a shard did not list its files; the epoch is retried.
        """
        checkpoint = checkpoint_id(epoch, attempt)
        plan = self._plan
        assert plan is not None
        assert plan.checkpoint_id == checkpoint
        last = next(reversed(result.operators.values()))
        began = self._clock.monotonic()
        wanted: list[c.Action] = []
        for shard in range(len(plan.shards)):
            wanted += self._feed(c.CheckpointDone(checkpoint, shard, shard in last.checksums))
        if c.WriteCommitted(checkpoint) not in wanted:
            raise EngineError(f"the checkpoint of epoch {epoch} was aborted: a shard did not report")
        try:
            digest = layout.commit(self._home.storage, checkpoint, last.checksums)
        except (OSError, StateConflictError) as error:
            self._feed(c.WriteFailed(checkpoint, str(error)))
            raise EngineError(f"the checkpoint of epoch {epoch} cannot be completed: {error}") from error
        if c.CheckpointCommitted(checkpoint) not in self._feed(c.WrittenCommitted(checkpoint)):
            raise EngineError(f"the checkpoint of epoch {epoch} was aborted while it was completed")
        found = {name: self._reference(plan, digest, result, name, before.get(name)) for name in plan.operators}
        references = {name: replace(reference, wanted=shards_wanted).to_json() for name, reference in found.items()}
        listing = max(folded.seconds.get("list", 0.0) for folded in result.operators.values())
        return references, self._paused + listing + self._clock.monotonic() - began

    def _reference(
        self, plan: CheckpointPlan, digest: str, result: EpochResult, name: str, before: SnapshotRef | None
    ) -> SnapshotRef:
        state = result.state.get(name)
        files = {file.path: file for _, _, shard in state.shards for file in shard.files} if state else {}
        return SnapshotRef(
            checkpoint=plan.checkpoint_id,
            epoch=plan.epoch,
            digest=digest,
            shards=len(plan.shards),
            size_bytes=sum(file.size_bytes for file in files.values()),
            rows=sum(file.rows for file in files.values()),
            born=before.born if before else plan.epoch,
            initial=result.initial.get(name) or (before.initial if before else ""),
        )

    def lose(self, epoch: int, reason: str) -> None:
        """Abort the checkpoints of a failed or dropped epoch and of every later one in flight."""
        logger.debug("checkpoint of state given up", extra={"epoch": epoch, "reason": reason})
        self._feed(c.Dropped(epoch))

    def time_out(self, epoch: int, attempt: str) -> None:
        """Abort a checkpoint whose shards did not report in time."""
        self._feed(c.TimedOut(checkpoint_id(epoch, attempt)))

    def _feed(self, event: c.Event) -> list[c.Action]:
        with self._lock:
            self._state, actions = c.step(self._state, event)
        for action in actions:
            match action:
                case c.CheckpointAborted(checkpoint, reason):
                    self._abort(checkpoint, reason)
                case c.Refused(checkpoint, reason) | c.Busy(checkpoint, reason):
                    logger.warning("checkpoint of state refused", extra={"checkpoint": checkpoint, "reason": reason})
        return actions

    def _abort(self, checkpoint: str, reason: str) -> None:
        """Write an abort marker. If that fails, still no commit names the checkpoint."""
        logger.warning("checkpoint of state aborted", extra={"checkpoint": checkpoint, "reason": reason})
        with contextlib.suppress(OSError):
            layout.abort(self._home.storage, checkpoint, reason, unnamed=True)


def _info(result: EpochResult, options: OperatorOptions) -> OperatorInfo:
    operator = result.built.get(options.name)
    if operator is None:  # no input has produced a row yet
        return OperatorInfo(options.type, "", "", shape_of(options))
    key, state = _fingerprint(operator.state_key), _fingerprint(operator.state_schema)
    return OperatorInfo(options.type, key, state, shape_of(options))


def _fingerprint(schema: pa.Schema) -> str:
    """Return a fingerprint of columns; state may have types that no table has."""
    return checksum(schema.remove_metadata().to_string().encode())[:32]

"""Decides when a checkpoint of sharded state is complete: `step(state, event) -> (state, actions)`, without any I/O.

A checkpoint goes this way:

    Begin -> CheckpointRequest -> CheckpointDone of every shard
          -> WriteCommitted -> WrittenCommitted -> CheckpointCommitted

and to `CheckpointAborted` from anywhere before its end. `firnline.run.snapshots` feeds the events and performs the
actions. The rules:

1. One checkpoint is in progress at a time. A `Begin` meanwhile is refused as `Busy`, and the first one continues: the
   work of its epoch is done already, and the caller can wait, or let the first one time out.
2. A shard counts once, however often it reports. Reports of an unknown shard, for another id, or after the end of the
   checkpoint change nothing.
3. One failure aborts, also that of a shard which had reported success, until COMMITTED is known to be durable.
4. COMMITTED is written when every shard has reported success. Only when it is durable is the checkpoint committed.
5. A failed write of COMMITTED aborts, though the file may exist: a checkpoint counts only when a sink names it, and no
   sink will. The abort writes ABORTED beside it (`snapshot.abort`).
6. An id is begun once: not again after its end. Only the newest ids are remembered; older ones cannot come back,
   because `snapshot.begin` creates their files exclusively.
7. Committed barriers only grow, unless `Dropped` says that the epochs from one on are lost and begin again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

REMEMBERED = 64  # ids; far more than can be in flight


# -- events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """A checkpoint of `shards` shards, numbered from 0, is wanted at the barrier after an epoch."""

    checkpoint_id: str
    barrier: int
    shards: int


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    """A shard has finished: its files and their list are durable, or it failed."""

    checkpoint_id: str
    shard_id: int
    success: bool


@dataclass(frozen=True, slots=True)
class WrittenCommitted:
    """COMMITTED is durable."""

    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """COMMITTED could not be written, or the outcome is unknown."""

    checkpoint_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The checkpoint took too long."""

    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The epochs from `barrier` on were lost: they begin again, under other ids."""

    barrier: int


Event: TypeAlias = Begin | CheckpointDone | WrittenCommitted | WriteFailed | TimedOut | Dropped


# -- actions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """The checkpoint has begun: run the fold tasks that write its shards."""

    checkpoint_id: str
    barrier: int


@dataclass(frozen=True, slots=True)
class WriteCommitted:
    """Write COMMITTED, and answer with `WrittenCommitted` or `WriteFailed`."""

    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """The checkpoint is complete: the sinks may name it."""

    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class CheckpointAborted:
    """The checkpoint will never be complete: write ABORTED."""

    checkpoint_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Busy:
    """A `Begin` was refused, because another checkpoint is in progress; the same id may be begun later."""

    checkpoint_id: str
    in_progress: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A `Begin` was refused for good."""

    checkpoint_id: str
    reason: str


Action: TypeAlias = CheckpointRequest | WriteCommitted | CheckpointCommitted | CheckpointAborted | Busy | Refused


# -- the state ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InProgress:
    """The checkpoint that is being made."""

    checkpoint_id: str
    barrier: int
    shards: int
    done: frozenset[int] = frozenset()  # shards that reported success
    writing: bool = False  # all of them did, and COMMITTED is being written


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """The whole state of a coordinator. `committed` is the barrier of the newest committed checkpoint."""

    current: InProgress | None = None
    known: tuple[str, ...] = ()  # started ids, oldest first
    committed: int = 0


def initial(committed: int = 0) -> CoordinatorState:
    """Return the state of a run that resumes from the checkpoint of epoch `committed`."""
    return CoordinatorState(committed=committed)


def step(state: CoordinatorState, event: Event) -> tuple[CoordinatorState, list[Action]]:
    """Decide. The same state and event always give the same result; stale events change nothing."""
    if isinstance(event, Begin):
        return _begin(state, event)
    current = state.current
    if isinstance(event, Dropped):
        state = replace(state, committed=min(state.committed, event.barrier - 1))
        if current is None or current.barrier < event.barrier:
            return state, []
        return _abort(state, current, "its epoch was dropped")
    if current is None or current.checkpoint_id != event.checkpoint_id:
        return state, []
    match event:
        case CheckpointDone():
            return _take_report(state, current, event)
        case TimedOut():
            return _abort(state, current, _late(current))
        case WrittenCommitted() if current.writing:
            done = replace(state, current=None, committed=current.barrier)
            return done, [CheckpointCommitted(current.checkpoint_id)]
        case WriteFailed(reason=reason) if current.writing:
            return _abort(state, current, f"COMMITTED could not be written: {reason}")
    return state, []


def _begin(state: CoordinatorState, event: Begin) -> tuple[CoordinatorState, list[Action]]:
    checkpoint_id, barrier = event.checkpoint_id, event.barrier
    if checkpoint_id in state.known:
        return state, [Refused(checkpoint_id, "this id was begun before")]
    if event.shards < 1:
        return state, [Refused(checkpoint_id, "it has no shards")]
    if barrier <= state.committed:
        return state, [Refused(checkpoint_id, f"the checkpoint of epoch {state.committed} is committed already")]
    if state.current is not None:
        return state, [Busy(checkpoint_id, state.current.checkpoint_id)]
    current = InProgress(checkpoint_id, barrier, event.shards)
    known = (*state.known, checkpoint_id)[-REMEMBERED:]
    return replace(state, current=current, known=known), [CheckpointRequest(checkpoint_id, barrier)]


def _take_report(
    state: CoordinatorState, current: InProgress, report: CheckpointDone
) -> tuple[CoordinatorState, list[Action]]:
    if not 0 <= report.shard_id < current.shards:
        return state, []
    if not report.success:
        return _abort(state, current, f"shard {report.shard_id} failed")
    current = replace(current, done=current.done | {report.shard_id})
    if len(current.done) < current.shards or current.writing:
        return replace(state, current=current), []
    return replace(state, current=replace(current, writing=True)), [WriteCommitted(current.checkpoint_id)]


def _abort(state: CoordinatorState, current: InProgress, reason: str) -> tuple[CoordinatorState, list[Action]]:
    return replace(state, current=None), [CheckpointAborted(current.checkpoint_id, reason)]


def _late(current: InProgress) -> str:
    if current.writing:
        return "timed out while COMMITTED was written"
    missing = [str(n) for n in range(current.shards) if n not in current.done]
    return f"timed out waiting for shard{'s' if len(missing) > 1 else ''} {', '.join(missing)}"

"""What state a checkpoint names, and whether a run could take it up again. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, ConfigError, RollbackRefusedError, StateIncompleteError
from firnline.graph import stateful
from firnline.jobs.watermarks import Watermarks
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.state import snapshot as layout
from firnline.state.home import StateHome
from firnline.state.manifest import CompleteCheckpoint, SnapshotRef
from firnline.types import EntryRef, Json

NAMED = 3  # examples in a message
_1970 = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The state of one operator as a checkpoint names it.

    `rows` are those in its files: a key that was changed since its file was written counts again.
    """

    operator: str
    epoch: int  # after which the snapshot was made; the checkpoint may be of a later one
    checkpoint: str  # the checkpoint of state that holds it
    shards: int
    size_bytes: int
    rows: int
    watermark: str | None = None  # event time, RFC 3339
    idle_inputs: list[str] = field(default_factory=list)  # silent for longer than idle_after


def snapshots_of(checkpoint: Checkpoint | None) -> list[OperatorSnapshot]:
    """The state that a checkpoint names, operator by operator.

    Raises:
        DamagedError: a reference cannot be read.
    """
    if checkpoint is None:
        return []
    marks = Watermarks.from_json(checkpoint.watermarks)
    found = []
    for name, value in sorted(checkpoint.state.items()):
        ref = SnapshotRef.from_json(value, f"the state of {name!r} in the checkpoint of epoch {checkpoint.epoch}")
        found.append(
            OperatorSnapshot(
                operator=name,
                epoch=ref.epoch,
                checkpoint=ref.checkpoint,
                shards=ref.shards,
                size_bytes=ref.size_bytes,
                rows=ref.rows,
                watermark=event_time(marks.of(name).at),
                idle_inputs=sorted(marks.of(name).idle),
            )
        )
    return found


def state_bytes(checkpoint: Checkpoint | None) -> int:
    """How large the state is that a checkpoint names."""
    return sum(snapshot.size_bytes for snapshot in snapshots_of(checkpoint))


def event_time(micros: int | None) -> str | None:
    """Microseconds since 1970 as a time; the number itself where no calendar reaches."""
    if micros is None:
        return None
    try:
        return (_1970 + timedelta(microseconds=micros)).isoformat()
    except OverflowError:
        return str(micros)


def refs_of(checkpoint: Checkpoint) -> dict[str, SnapshotRef]:
    """The checkpoints of state that a checkpoint names, each once, by id."""
    found = (SnapshotRef.from_json(value) for value in checkpoint.state.values())
    return {ref.checkpoint: ref for ref in found}


def load_snapshot(home: StateHome, ref: SnapshotRef) -> tuple[CompleteCheckpoint, StateHome]:
    """A checkpoint of state with all its files there, and where: the home itself, or else the remote tier.

    Raises:
        CheckpointError: neither has it; the message is about the home.
    """
    try:
        return _load_from(home, ref), home
    except CheckpointError:
        if home.fallback is None:
            raise
        try:
            return _load_from(home.fallback, ref), home.fallback
        except CheckpointError:
            pass
        raise


def _load_from(home: StateHome, ref: SnapshotRef) -> CompleteCheckpoint:
    try:
        found = layout.load(home.storage, ref.checkpoint, ref.digest)
        layout.verify_files(home.storage, found, deep=False)
    except OSError as error:
        raise StateIncompleteError(
            f"checkpoint {ref.checkpoint} of state cannot be read in {home.storage.root}: {error}",
            checkpoint=ref.checkpoint,
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class StateLook:
    """What it takes to take up the state of an epoch, and what stands in the way."""

    snapshots: list[OperatorSnapshot] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)  # epochs since the snapshots, whose input is folded again
    replayed_files: int = 0
    used: list[SnapshotRef] = field(default_factory=list)  # that a run goes on from: older ones, where need be
    problems: list[RollbackRefusedError] = field(default_factory=list)


def look_at_state(
    pipeline: OpenPipeline,
    checkpoint: Checkpoint,
    entry: EntryRef,
    positions: Mapping[str, Json],
    home: StateHome | None = None,
) -> StateLook:
    """Look whether a run that goes on from an epoch finds its state.

    Every snapshot that its checkpoint names must be there, with all its files, in the home or in the remote tier.
    Where snapshots are older than the epoch, the epochs since are folded again: the ledger must still tell them, and
    the sources must still have their input.

    Args:
        positions: Where the sources stand now, which tells under what names their files lie.
        home: Where the state lies, if not in the pipeline's own home.
    """
    if not stateful(pipeline.options) and not checkpoint.state:
        return StateLook()
    # These load compiled code, which commands that only look need not wait for.
    from firnline.jobs.dataflow import dataflow_of
    from firnline.run.restore_state import check_operators, restore_state

    home = home or pipeline.state_home
    flow = dataflow_of(pipeline.options)
    problems: list[RollbackRefusedError] = []
    try:
        snapshots = snapshots_of(checkpoint)
        for ref in refs_of(checkpoint).values():
            load_snapshot(home, ref)
        held = Head(exists=True, version=0, epoch=checkpoint.epoch, entry=entry, checkpoint=checkpoint)
        check_operators(pipeline, flow, held)
        found = restore_state(pipeline, flow, home, held, only_look=True)
        behind, used = found.behind, list(found.used.values())
    except CheckpointError as error:
        hint = "Bring the files of state back, or go back to another epoch: `firnline checkpoints`."
        refused = RollbackRefusedError(
            f"the state of epoch {checkpoint.epoch} is not whole: {error.message}", hint=hint
        )
        return StateLook(problems=[refused])
    except ConfigError as error:
        return StateLook(problems=[RollbackRefusedError(error.message, hint=error.hint)])
    inputs = [one.entry.inputs for one in reversed(behind)]
    lost = pipeline.sources.find_unavailable(positions, inputs)
    if lost:
        shown = ", ".join(lost[:NAMED]) + (" ..." if len(lost) > NAMED else "")
        problems.append(
            RollbackRefusedError(
                f"the state of epoch {checkpoint.epoch} is to be made again from {len(behind)} epoch(s) since its"
                f" snapshot, and the source no longer has {len(lost)} file(s) of them: {shown}",
                hint="Bring the files back as they were, or go back to an epoch that has a snapshot of its own.",
                files=len(lost),
            )
        )
    files = {str(record["path"]) for of_epoch in inputs for records in of_epoch.values() for record in records}
    return StateLook(snapshots, [one.entry.epoch for one in behind], len(files), used, problems)

"""Operator state as checkpoints name it: its size, whether a run can resume from it, and its rows.

Writes nothing and starts no JVM. Modules that load compiled code are imported where used, since `status` needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, ConfigError, RollbackRefusedError
from firnline.graph import stateful
from firnline.history.epoch import load_epoch
from firnline.jobs.watermarks import Watermarks
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.state.home import StateHome
from firnline.state.manifest import SnapshotRef, stored_name
from firnline.state.remote import find_snapshot
from firnline.types import EntryRef, Json

if TYPE_CHECKING:
    from firnline.options import OperatorOptions
    from firnline.state.export import StateReader

NAMED = 3  # examples in a message
_1970 = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The state of one operator as a checkpoint names it.

    `rows` counts the rows in its files: a key that changed after its file was written counts again.
    """

    operator: str
    epoch: int  # the epoch of the snapshot; the checkpoint may be of a later one
    checkpoint: str  # the checkpoint of state that holds it
    shards: int
    size_bytes: int
    rows: int
    watermark: str | None = None  # event time, RFC 3339
    idle_inputs: list[str] = field(default_factory=list)  # silent for longer than idle_after


def snapshots_of(checkpoint: Checkpoint | None) -> list[OperatorSnapshot]:
    """Return the state that a checkpoint names, by operator.

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


@dataclass(frozen=True, slots=True)
class ShardSize:
    """The size of one shard of an operator's state; the key groups that it owns are `first_group` to `last_group`."""

    shard: int
    first_group: int
    last_group: int
    files: int
    rows: int
    size_bytes: int


def load_shards(pipeline: OpenPipeline, checkpoint: Checkpoint | None) -> dict[str, list[ShardSize]]:
    """Return the shards of every operator's state that a checkpoint names, without reading the state.

    Raises:
        CheckpointError: no tier has the complete snapshot.
    """
    if checkpoint is None:
        return {}
    found = {}
    for name, value in sorted(checkpoint.state.items()):
        complete, _ = find_snapshot(pipeline.state_home, SnapshotRef.from_json(value), with_files=False).require()
        state = complete.operators.get(name)
        found[name] = [
            ShardSize(
                shard=number,
                first_group=first,
                last_group=last,
                files=len(shard.files),
                rows=sum(segment.rows for segment in shard.segments),
                size_bytes=sum(file.size_bytes for file in shard.files),
            )
            for number, (first, last, shard) in enumerate(state.shards if state else ())
        ]
    return found


def input_watermarks(checkpoint: Checkpoint | None) -> dict[str, dict[str, str | None]]:
    """Return, by operator, the latest event time of each of its inputs."""
    marks = Watermarks.from_json(checkpoint.watermarks) if checkpoint else Watermarks()
    return {
        operator: {name: event_time(at) for name, at in sorted(mark.inputs.items())}
        for operator, mark in sorted(marks.operators.items())
    }


def state_bytes(checkpoint: Checkpoint | None) -> int:
    """Return the size of the state that a checkpoint names."""
    return sum(snapshot.size_bytes for snapshot in snapshots_of(checkpoint))


def event_time(micros: int | None) -> str | None:
    """Return microseconds since 1970 as a time; the number itself if it is out of range."""
    if micros is None:
        return None
    try:
        return (_1970 + timedelta(microseconds=micros)).isoformat()
    except OverflowError:
        return str(micros)


def refs_of(checkpoint: Checkpoint) -> dict[str, SnapshotRef]:
    """Return the checkpoints of state that a checkpoint names, each once, by id."""
    found = (SnapshotRef.from_json(value) for value in checkpoint.state.values())
    return {ref.checkpoint: ref for ref in found}


@dataclass(frozen=True, slots=True)
class StateCheck:
    """The requirements for resuming from the state of an epoch, and the obstacles."""

    snapshots: list[OperatorSnapshot] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)  # epochs since the snapshots, whose input is folded again
    replayed_files: int = 0
    used: list[SnapshotRef] = field(default_factory=list)  # the snapshots to resume from, older ones if needed
    problems: list[RollbackRefusedError] = field(default_factory=list)


def check_state(
    pipeline: OpenPipeline,
    checkpoint: Checkpoint,
    entry: EntryRef,
    positions: Mapping[str, Json],
    home: StateHome | None = None,
) -> StateCheck:
    """Check whether a run that resumes from an epoch finds its state.

    Every snapshot that its checkpoint names must exist with all its files, in the home or in the remote tier. If
    snapshots are older than the epoch, the epochs since are folded again: the ledger must still have them, and the
    sources must still have their input.

    Args:
        positions: The current positions of the sources, which give the names of their files.
        home: The location of the state, if not the pipeline's own home.
    """
    if not stateful(pipeline.options) and not checkpoint.state:
        return StateCheck()
    # These load compiled code, which read-only commands need not wait for.
    from firnline.jobs.dataflow import dataflow_of
    from firnline.run.restore_state import check_operators, restore_state

    home = home or pipeline.state_home
    flow = dataflow_of(pipeline.options)
    problems: list[RollbackRefusedError] = []
    try:
        snapshots = snapshots_of(checkpoint)
        for ref in refs_of(checkpoint).values():
            find_snapshot(home, ref).require()
        head = Head(exists=True, version=0, epoch=checkpoint.epoch, entry=entry, checkpoint=checkpoint)
        check_operators(pipeline, flow, head)
        found = restore_state(pipeline, flow, home, head, read_only=True)
        behind, used = found.missing_epochs, list(found.used.values())
    except CheckpointError as error:
        hint = "Bring the files of state back, or go back to another epoch: `firnline checkpoints`."
        refused = RollbackRefusedError(
            f"the state of epoch {checkpoint.epoch} is not whole: {error.message}", hint=hint
        )
        return StateCheck(problems=[refused])
    except ConfigError as error:
        return StateCheck(problems=[RollbackRefusedError(error.message, hint=error.hint)])
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
    return StateCheck(snapshots, [one.entry.epoch for one in behind], len(files), used, problems)


# -- the rows of one operator ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateView:
    """The state of one operator after an epoch, and its origin.

    `epoch` is the requested one; the snapshot may be of an earlier one, and `note` says so.
    """

    pipeline: str
    operator: str
    epoch: int
    ref: SnapshotRef
    key_groups: int
    watermark: int | None  # when the snapshot was made; microseconds
    reader: StateReader
    note: str = ""

    def facts(self) -> dict[str, Json]:
        """Return the facts that are known without reading the state itself."""
        files = self.reader.files.values()
        return {
            "pipeline": self.pipeline,
            "operator": self.operator,
            "epoch": self.epoch,
            "snapshot_epoch": self.ref.epoch,
            "checkpoint": self.ref.checkpoint,
            "note": self.note,
            "shards": self.ref.shards,
            "key_groups": self.key_groups,
            "files": len(files),
            "size_bytes": sum(file.size_bytes for file in files),
            "watermark": self.watermark,
            "key_columns": [{"name": f.name, "type": str(f.type)} for f in self.reader.layout.key],
            "state_columns": [{"name": f.name, "type": str(f.type)} for f in self.reader.layout.state],
        }


@dataclass(frozen=True, slots=True)
class Stateful:
    """A stateful operator, by its current name and by its name in a checkpoint."""

    name: str
    known_as: str
    deciding: int | None  # how many columns of its key select the shard; None: no longer in the spec
    options: OperatorOptions | None = field(default=None, repr=False)


def find_stateful(pipeline: OpenPipeline, name: str, checkpoint: Checkpoint | None) -> Stateful:
    """Return the operator of this name, in the spec or in a checkpoint.

    Raises:
        ConfigError: it does not exist or keeps no state; the hint names the closest match.
    """
    from firnline.jobs.dataflow import dataflow_of

    known = checkpoint.state if checkpoint else {}
    for operator in dataflow_of(pipeline.options).stateful:
        if operator.name == name:
            return Stateful(name, stored_name(operator, known) or name, len(operator.keys), operator)
    if name in known:
        return Stateful(name, name, None)
    if any(operator.name == name for operator in pipeline.options.operators):
        raise ConfigError(f"operator {name!r} is a query: it keeps no state", hint=_names(pipeline, known, ""))
    raise ConfigError(
        f"pipeline {pipeline.options.name!r} has no operator {name!r} that keeps state",
        hint=_names(pipeline, known, name),
    )


def _names(pipeline: OpenPipeline, known: dict[str, Json], word: str) -> str:
    from firnline.jobs.dataflow import dataflow_of
    from firnline.operators.columns import suggest

    return suggest(word, {operator.name for operator in dataflow_of(pipeline.options).stateful} | set(known))


def load_state_view(pipeline: OpenPipeline, operator: str, at: int | None = None) -> StateView:
    """Return the state of an operator after the newest epoch, or after epoch `at`.

    Raises:
        ConfigError: the operator or the epoch is unknown, or has no snapshot.
        CheckpointError: no tier has the complete snapshot.
    """
    from firnline.state.export import StateReader

    if at is not None:
        checkpoint: Checkpoint | None = load_epoch(pipeline, None, at).checkpoint
    else:
        checkpoint = pipeline.load().checkpoint
    found = find_stateful(pipeline, operator, checkpoint)
    if checkpoint is None:
        raise ConfigError(f"pipeline {pipeline.options.name!r} has no checkpoint yet", hint="`firnline run` makes one.")
    value = checkpoint.state.get(found.known_as)
    if value is None:
        raise ConfigError(
            f"the checkpoint of epoch {checkpoint.epoch} has no state of {operator!r}",
            hint="It had none by then; `firnline checkpoint` has a run make a snapshot now.",
        )
    ref = SnapshotRef.from_json(value)
    complete, _ = find_snapshot(pipeline.state_home, ref, with_files=False).require()
    name, plan = found.known_as, complete.plan
    if name not in complete.operators:
        raise CheckpointError(f"checkpoint {ref.checkpoint} of state has none of {name!r}", checkpoint=ref.checkpoint)
    homes = [home for home in (pipeline.state_home, pipeline.state_home.fallback) if home is not None]
    note = ""
    if ref.epoch != checkpoint.epoch:
        note = f"the newest snapshot at epoch {checkpoint.epoch} is that of epoch {ref.epoch}"
    return StateView(
        pipeline=pipeline.options.name,
        operator=operator,
        epoch=checkpoint.epoch,
        ref=ref,
        key_groups=plan.key_groups,
        watermark=Watermarks.from_json(plan.watermarks).of(name).at,
        reader=StateReader(homes, complete.operators[name], plan.key_groups, found.deciding),
        note=note,
    )

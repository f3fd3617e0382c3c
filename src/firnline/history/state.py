"""Finds the state of an operator as a checkpoint names it, in whichever tier has it; writes nothing, starts no JVM."""

from __future__ import annotations

from dataclasses import dataclass, field

from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, ConfigError
from firnline.history.epoch import load_epoch
from firnline.jobs.dataflow import dataflow_of
from firnline.jobs.watermarks import Watermarks
from firnline.operators.columns import suggest
from firnline.options import OperatorOptions
from firnline.run.open_pipeline import OpenPipeline
from firnline.state import snapshot as layout
from firnline.state.export import StateReader
from firnline.state.home import StateHome
from firnline.state.manifest import CompleteCheckpoint, SnapshotRef
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class StateView:
    """The state of one operator after an epoch, and where it was found.

    `epoch` is the one that was asked for; the snapshot may be of an earlier one, and `note` says so.
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
        """What is known without reading the state itself."""
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
    """An operator that keeps state, by its own name and by the one that a checkpoint knows it under."""

    name: str
    known_as: str
    deciding: int | None  # how many columns of its key decide the shard; None: the spec no longer has it
    options: OperatorOptions | None = field(default=None, repr=False)


def find_stateful(pipeline: OpenPipeline, name: str, checkpoint: Checkpoint | None) -> Stateful:
    """The operator of this name, in the spec or in a checkpoint.

    Raises:
        ConfigError: there is none, or it keeps no state; the hint names the one that was probably meant.
    """
    known = checkpoint.state if checkpoint else {}
    for operator in dataflow_of(pipeline.options).stateful:
        if operator.name == name:
            renamed = operator.renamed_from in known and name not in known
            return Stateful(name, operator.renamed_from if renamed else name, len(operator.keys), operator)
    if name in known:
        return Stateful(name, name, None)
    if any(operator.name == name for operator in pipeline.options.operators):
        raise ConfigError(f"operator {name!r} is a query: it keeps no state", hint=_names(pipeline, known, ""))
    raise ConfigError(
        f"pipeline {pipeline.options.name!r} has no operator {name!r} that keeps state",
        hint=_names(pipeline, known, name),
    )


def _names(pipeline: OpenPipeline, known: dict[str, Json], word: str) -> str:
    return suggest(word, {operator.name for operator in dataflow_of(pipeline.options).stateful} | set(known))


def load_state_view(pipeline: OpenPipeline, operator: str, at: int | None = None) -> StateView:
    """The state of an operator after the newest epoch, or after epoch `at`.

    Raises:
        ConfigError: the operator or the epoch is not known, or has no snapshot.
        CheckpointError: no tier has the snapshot whole.
    """
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
    complete = load_snapshot(pipeline.state_home, ref)
    name, plan = found.known_as, complete.plan
    if name not in complete.operators:
        raise CheckpointError(f"checkpoint {ref.checkpoint} of state has none of {name!r}", checkpoint=ref.checkpoint)
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
        reader=StateReader(_tiers(pipeline.state_home), complete.operators[name], plan.key_groups, found.deciding),
        note=note,
    )


def load_snapshot(home: StateHome, ref: SnapshotRef) -> CompleteCheckpoint:
    """The checkpoint of state that a sink names, from the first tier that has its metadata whole; raises as `load`."""
    problem: CheckpointError | None = None
    for tier in _tiers(home):
        try:
            return layout.load(tier.storage, ref.checkpoint, ref.digest)
        except CheckpointError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _tiers(home: StateHome) -> list[StateHome]:
    return [home] if home.fallback is None else [home, home.fallback]

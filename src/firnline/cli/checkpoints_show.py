"""`firnline checkpoints show`: shows one checkpoint, and which of its copies are intact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Spec, load_pipeline, read_with_store
from firnline.cli.output import Column, Output, count_text, size_text

if TYPE_CHECKING:
    from firnline.history.epoch import EpochView
    from firnline.history.state import OperatorSnapshot
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.sources.base import PositionView
    from firnline.types import Json

EPOCH_HELP = "The epoch, as `firnline checkpoints` lists it."

SINK_COLUMNS = (
    Column("name", "sink"),
    Column("holds"),
    Column("version", right=True),
    Column("rows", right=True),
    Column("size_bytes", "bytes", right=True),
    Column("committed_at"),
)
COPY_COLUMNS = (Column("where", "copy"), Column("status"), Column("place"), Column("detail"))

EPILOGUE = """\
Reads the ledger, the table's log and the checkpoint store; starts no Spark and
writes nothing.

Output (JSON fields):
  pipeline, epoch, kind, status, is_savepoint, undone (by a rollback, restore or
  fresh start)
  checkpoint    as it is stored, sealed: pipeline, epoch, generation, run,
                attempt, created_at, positions, state, watermarks, schema
                {fingerprint, version}, floor, format, checksum
  positions     {source: summary}; of files: last_committed_file,
                files_in_progress, files_set_aside, root
  operators     [{operator, epoch, checkpoint, shards, size_bytes, rows,
                watermark, idle_inputs}]: the snapshots of the state that the
                checkpoint names
  entry         the ledger's: epoch, name, checksum; null when unknown
  inputs        {source: files}; null when the entry is folded away
  sinks         [{name, holds, version, committed_at, rows, size_bytes}]
  sizes         checkpoint_bytes, entry_bytes, state_bytes
  durations_ms  {step: milliseconds}
  copies        [{where (ledger, commitInfo, store), status (intact, damaged,
                differs, folded, missing), place, detail}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints show 42
  firnline checkpoints show 42 --json | jq .checkpoint.positions
"""

app = App(name="show", help_epilogue=EPILOGUE)


@app.default
def show(
    epoch: Annotated[int, Parameter(help=EPOCH_HELP, validator=Number(gte=0))],
    spec: Spec = None,
    /,
    *,
    common: Common = Common(),
) -> int:
    """Show one checkpoint, and which of its copies are intact."""
    pipeline = load_pipeline(spec)
    from firnline.history.epoch import load_epoch

    view = read_with_store(pipeline, lambda store: load_epoch(pipeline, store, epoch))
    if common.json:
        common.out.json(_facts(pipeline, view))
    else:
        _show(common.out, pipeline, view)
    return 0


def _facts(pipeline: OpenPipeline, view: EpochView) -> dict[str, Json]:
    from firnline.checkpoint.codec import canonical
    from firnline.history.state import snapshots_of

    entry = view.ledger_entry
    sealed = view.checkpoint.to_json()
    positions = pipeline.sources.describe(view.checkpoint.positions)
    snapshots = snapshots_of(view.checkpoint)
    return {
        "pipeline": pipeline.options.name,
        "epoch": view.epoch,
        "kind": view.kind,
        "status": "COMPLETED",
        "is_savepoint": view.is_savepoint,
        "undone": view.undone,
        "checkpoint": sealed,
        "positions": {name: position.facts for name, position in positions.items()},
        "operators": [asdict(one) for one in snapshots],
        "entry": view.entry.to_json() if view.entry else None,
        "inputs": {name: len(files) for name, files in entry.inputs.items()} if entry else None,
        "sinks": [sink.to_json() for sink in view.sinks],
        "sizes": {
            "checkpoint_bytes": len(canonical(sealed)),
            "entry_bytes": len(entry.to_bytes()) if entry else None,
            "state_bytes": sum(one.size_bytes for one in snapshots),
        },
        "durations_ms": view.durations_ms,
        "copies": [copy.to_json() for copy in view.copies],
    }


def state_facts(snapshots: Sequence[OperatorSnapshot]) -> dict[str, str]:
    """Return one line about the state of every operator."""
    facts = {}
    for one in snapshots:
        text = f"{count_text(one.rows, 'row')}, {size_text(one.size_bytes)} in {count_text(one.shards, 'shard')}"
        mark = f", watermark {one.watermark}" if one.watermark else ""
        idle = f", idle: {', '.join(one.idle_inputs)}" if one.idle_inputs else ""
        facts[f"state of {one.operator}"] = f"{text}, snapshot of epoch {one.epoch}{mark}{idle}"
    return facts


def _show(out: Output, pipeline: OpenPipeline, view: EpochView) -> None:
    from firnline.history.state import snapshots_of

    checkpoint = view.checkpoint
    facts: dict[str, Json] = {
        "epoch": ", ".join(
            [
                str(view.epoch),
                view.kind,
                *(["undone by a later one"] if view.undone else []),
                *(["held by a savepoint"] if view.is_savepoint else []),
            ]
        ),
        "pipeline": checkpoint.pipeline,
        "made at": checkpoint.created_at,
        "generation": checkpoint.generation,
        "run": checkpoint.run,
        "attempt": checkpoint.attempt,
        "floor": f"epoch {checkpoint.floor}",
        "schema": f"version {checkpoint.schema_version}, fingerprint {checkpoint.schema_fingerprint or '-'}",
    }
    for name, position in pipeline.sources.describe(checkpoint.positions).items():
        facts[f"source {name}"] = _position_text(position)
    facts |= state_facts(snapshots_of(checkpoint)) or {"state": "none"}
    facts["checksum"] = checkpoint.checksum
    if view.entry is not None:
        facts["ledger entry"] = view.entry.name
        facts["its checksum"] = view.entry.checksum
    known = _facts(pipeline, view)
    if known["inputs"] is not None:
        facts["read"] = count_text(sum(known["inputs"].values()), "file")
    facts["checkpoint size"] = size_text(known["sizes"]["checkpoint_bytes"])
    if view.durations_ms:
        facts["took"] = ", ".join(f"{step} {ms:,} ms" for step, ms in view.durations_ms.items())
    out.facts(facts)
    out.line()
    out.table(SINK_COLUMNS, [sink.to_json() for sink in view.sinks])
    out.line()
    out.table(COPY_COLUMNS, [copy.to_json() for copy in view.copies])


def _position_text(position: PositionView) -> str:
    if not position.by_input:
        return ", ".join(f"{name} {value}" for name, value in position.facts.items())
    text = f"up to {position.last}" if position.last else "at the start"
    if position.in_progress:
        text += f", {count_text(len(position.in_progress), 'file')} in progress"
    if position.set_aside:
        text += f", {count_text(len(position.set_aside), 'file')} set aside"
    return text

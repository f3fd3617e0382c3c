"""What the ledger says of a history edit, and what that means to a sink."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import ConfigError
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import schema_to_json
from firnline.sinks.base import Effect, EpochCommit, KeepRows, ReplaceRows, RestoreVersion, Sink
from firnline.sinks.outbox import without_outbox
from firnline.types import EntryRef, Json


def edit_checkpoint(
    pipeline: OpenPipeline, base: Checkpoint, held: Checkpoint | None, *, epoch: int, generation: int, run: str
) -> Checkpoint:
    """The checkpoint of a history edit: state and positions of `base`, under a new epoch. The floor never goes back."""
    version = max(base.schema_version, held.schema_version if held else 0)
    if held is not None and held.schema_fingerprint != base.schema_fingerprint:
        version += 1
    return replace(
        base,
        epoch=epoch,
        generation=generation,
        run=run,
        attempt=pipeline.ids.new(),
        created_at=pipeline.clock.now().isoformat(),
        schema_version=version,
        floor=max(base.floor, held.floor if held else 0),
        deciding=pipeline.deciding.identity,
    )


def committed_columns(pipeline: OpenPipeline) -> list[dict[str, Json]]:
    """The columns that the deciding sink has now, as a ledger entry keeps them."""
    return schema_to_json(pipeline.deciding.find_committed_schema() or pa.schema([]))


def epoch_commit(
    pipeline: OpenPipeline, sink: Sink, entry: LedgerEntry, ref: EntryRef, schema: pa.Schema
) -> EpochCommit:
    """What a sink is given of an entry, of an epoch that was read or of a history edit."""
    if not entry.is_jump and entry.staged and sink.name not in entry.staged:
        raise new_sink_error(sink.name)
    before = entry.previous
    if before is not None and before.epoch == 0 and sink is not pipeline.deciding:
        before = None  # a baseline stands in the deciding sink alone
    facts: dict[str, Json] = {"files": sum(len(files) for files in entry.inputs.values())}
    return EpochCommit(
        checkpoint=entry.checkpoint,
        entry=ref,
        previous=before,
        previous_checkpoint=entry.previous_checkpoint,
        files=[] if entry.is_jump else without_outbox(entry.staged.get(sink.name, [])),
        schema=schema,
        source_state=_interchange(pipeline, entry),
        facts={**facts, "jump": entry.jump} if entry.is_jump else facts,
        kind=entry.kind if entry.is_jump else "epoch",
    )


def _interchange(pipeline: OpenPipeline, entry: LedgerEntry) -> Json:
    """What other tools can read of a position: only of a pipeline that takes one source to its tables as it is."""
    source = pipeline.sources.only
    if source is None or pipeline.options.operators:
        return None
    return source.interchange(entry.checkpoint.positions[source.name])


def new_sink_error(name: str) -> ConfigError:
    """A sink that has none of the epochs that were made before it was added."""
    return ConfigError(
        f"sink {name!r} was added to a pipeline that has history, which this version cannot replay",
        hint="Give the pipeline a new name, or take the sink out of the spec.",
    )


def find_effect(sink: Sink, entry: LedgerEntry, holds: int) -> Effect:
    """What a history edit does to the rows of a sink that holds epoch `holds`.

    Raises:
        RollbackRefusedError: the sink cannot go back to that epoch.
    """
    match entry.kind:
        case "fresh":
            return ReplaceRows() if entry.jump["truncate"] else KeepRows()
        case "restore":
            version = entry.jump["versions"].get(sink.name)
            return ReplaceRows(tuple(entry.staged[sink.name])) if version is None else RestoreVersion(int(version))
        case "rescale" | "import" | "repair":
            return KeepRows()
    to = int(entry.jump["to_epoch"])
    if holds <= to or sink.name in entry.jump.get("left", []):
        return KeepRows()
    return RestoreVersion(sink.version_of(to))

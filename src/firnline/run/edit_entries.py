"""Builds the ledger entry of a history edit and derives its effect on a sink."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import schema_to_json
from firnline.sinks.base import Effect, KeepRows, ReplaceRows, RestoreVersion, Sink
from firnline.types import Json


def edit_checkpoint(
    pipeline: OpenPipeline, base: Checkpoint, held: Checkpoint | None, *, epoch: int, generation: int, run: str
) -> Checkpoint:
    """Return the checkpoint of a history edit: state and positions of `base` under a new epoch. The floor never
    decreases."""
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
    """Return the current columns of the deciding sink, in the form of a ledger entry."""
    return schema_to_json(pipeline.deciding.find_committed_schema() or pa.schema([]))


def find_effect(sink: Sink, entry: LedgerEntry, holds: int) -> Effect:
    """Return the effect of a history edit on the rows of a sink that holds epoch `holds`.

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

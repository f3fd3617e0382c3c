"""Builds the commit of a ledger entry for a sink, and checks that the staged files that it names exist."""

from __future__ import annotations

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import CheckpointError, ConfigError
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import EpochCommit, Sink
from firnline.sinks.outbox import without_outbox
from firnline.storage import Storage
from firnline.types import EntryRef, Json


def entry_commit(
    pipeline: OpenPipeline, sink: Sink, entry: LedgerEntry, ref: EntryRef, schema: pa.Schema
) -> EpochCommit:
    """Return the commit of a ledger entry for one sink, for an ordinary epoch or a history edit.

    Raises:
        ConfigError: the epoch was made before the sink was added.
    """
    facts: dict[str, Json] = {"files": sum(len(files) for files in entry.inputs.values())}
    files: list[dict[str, Json]] = []
    if entry.is_jump:
        facts["jump"] = entry.jump
    elif entry.staged and sink.name not in entry.staged:
        raise new_sink_error(sink.name)
    else:
        files = without_outbox(entry.staged.get(sink.name, []))
    before, source, interchange = entry.previous, pipeline.sources.only, None
    if before is not None and before.epoch == 0 and sink is not pipeline.deciding:
        before = None  # only the deciding sink holds a baseline
    if source is not None and not pipeline.options.operators:
        interchange = source.interchange(entry.checkpoint.positions[source.name])
    return EpochCommit(
        checkpoint=entry.checkpoint,
        entry=ref,
        previous=before,
        previous_checkpoint=entry.previous_checkpoint,
        files=files,
        schema=schema,
        source_state=interchange,
        facts=facts,
        kind=entry.kind if entry.is_jump else "epoch",
    )


def new_sink_error(name: str) -> ConfigError:
    """Return the error for a sink that lacks the epochs from before it was added."""
    return ConfigError(
        f"sink {name!r} was added to a pipeline that has history, which this version cannot replay",
        hint="Give the pipeline a new name, or take the sink out of the spec.",
    )


def bring_staged(pipeline: OpenPipeline, sink: Sink, entry: LedgerEntry) -> None:
    """Move the files staged for a sink into it and check that all exist, because delta-rs does not.

    Raises:
        CheckpointError: a file is missing or damaged.
        OSError: the sink's storage cannot be reached.
    """
    sink.fetch_staged(pipeline.storage, entry.staged.get(sink.name, []))
    check_staged(sink, entry)


def check_staged(sink: Sink, entry: LedgerEntry, outbox: Storage | None = None) -> None:
    """Check that every file staged for a sink exists, in the sink or in the given outbox.

    Raises:
        CheckpointError: a file is missing.
    """
    missing = sink.find_missing_staged(entry.staged.get(sink.name, []), outbox)
    if missing:
        raise CheckpointError(
            f"sink {sink.name!r} lacks epoch {entry.epoch}, and {missing[0]}, staged for it, is gone",
            hint="Restore the sink's folder, or take the sink out of the spec.",
        )

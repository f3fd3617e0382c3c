"""Builds the commit of a ledger entry for a sink, and checks that the staged files that it names exist."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import CheckpointError, ConfigError, FirnlineError, OutboxDamagedError
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import EpochCommit, Sink
from firnline.sinks.known import name_then
from firnline.sinks.outbox import without_outbox
from firnline.sinks.parking import is_parked, restage
from firnline.storage import Storage
from firnline.types import EntryRef, Json

logger = logging.getLogger(__name__)

Restaged: TypeAlias = dict[tuple[str, str], list[dict[str, Json]]]  # by sink and attempt: parked rows staged again


def entry_commit(
    pipeline: OpenPipeline,
    sink: Sink,
    entry: LedgerEntry,
    ref: EntryRef,
    schema: pa.Schema,
    staged: Sequence[dict[str, Json]] | None = None,
    *,
    filled: dict[str, Json] | None = None,
) -> EpochCommit:
    """Return the commit of a ledger entry for one sink, for an ordinary epoch or a history edit.

    `staged` has the files from `bring_staged`, in place of those that the entry names. `filled` is the shape of rows
    for a sink that is being filled: the entry does not name it.

    Raises:
        ConfigError: the epoch was made before the sink was added.
    """
    facts: dict[str, Json] = {"files": sum(entry.count_read().values())}
    files: list[dict[str, Json]] = []
    if entry.is_history_edit:
        facts["jump"] = entry.edit
    elif entry.staged and name_in(entry, sink) is None and filled is None:
        raise new_sink_error(sink.name, f"epoch {entry.epoch} was made without it")
    else:
        files = list(staged_for(entry, sink) if staged is None else staged)
        if not sink.capabilities.fed_from_outbox:
            files = without_outbox(files)
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
        kind=entry.kind if entry.is_history_edit else "epoch",
        shape=entry.shapes.get(name_in(entry, sink) or "", {}) if filled is None else filled,
    )


def name_in(entry: LedgerEntry, sink: Sink) -> str | None:
    """Return the name under which an epoch staged rows for a sink, which may have been renamed since; None: it did
    not."""
    names = (name_then(entry.checkpoint, sink.former_name or sink.name), sink.name, sink.former_name)
    return next((name for name in names if name in entry.staged), None)


def staged_for(entry: LedgerEntry, sink: Sink) -> list[dict[str, Json]]:
    """Return the files that an epoch staged for a sink."""
    return entry.staged.get(name_in(entry, sink) or "", [])


def settled_epoch(sink: Sink) -> int | None:
    """Return the sink's `settled_epoch`; 0 if an optional sink cannot tell: then nothing is deleted on its account."""
    try:
        return sink.settled_epoch()
    except FirnlineError as error:
        if sink.required:
            raise
        logger.warning("sink could not be read", extra={"sink": sink.name, "reason": error.message})
        return 0


WAYS = {
    "now": "`start: now` gives it every later epoch, and nothing from before",
    "snapshot": "`start: snapshot` has the captured tables that it reads read again",
}


def new_sink_error(name: str, reason: str, *ways: str) -> ConfigError:
    """Return the error for a sink that lacks epochs from before it was added. `ways` are the values of `start` that
    help."""
    hint = "a pipeline of its own has every row: another `name`, the same source."
    if ways:
        hint = f"Say in the spec what it gets: {'; '.join(WAYS[way] for way in ways)}. Or {hint}"
    return ConfigError(
        f"sink {name!r}, a Delta table, was added to a pipeline that has history, and lacks what was before: {reason}",
        hint=hint[0].upper() + hint[1:],
    )


def bring_staged(
    pipeline: OpenPipeline, sink: Sink, entry: LedgerEntry, restaged: Restaged | None = None
) -> list[dict[str, Json]]:
    """Move the files staged for a sink into it and check that all exist, because delta-rs does not.

    Returns the files. They differ from those of the entry if the rows were parked: the sink's stager stages them now,
    or has done so in an earlier try that `restaged` remembers.

    Raises:
        CheckpointError: a file is missing or damaged.
        SinkError: the sink cannot be reached.
    """
    files = staged_for(entry, sink)
    key = (sink.name, entry.checkpoint.attempt)
    if is_parked(files):
        known = restaged.get(key) if restaged is not None else None
        files = known or restage(sink, pipeline.storage, files, entry.checkpoint.attempt)
        if restaged is not None:
            restaged[key] = files
    # One by one for an optional sink, whose calls have a time limit: each file that has arrived is progress.
    for some in [files] if sink.required else [[file] for file in files]:
        sink.fetch_staged(pipeline.storage, some)
    try:
        _check_files(sink, entry, files, None)
    except CheckpointError:
        if restaged is not None:
            restaged.pop(key, None)
        raise
    return files


def check_staged(sink: Sink, entry: LedgerEntry, outbox: Storage | None = None) -> None:
    """Check that every file staged for a sink exists, in the sink or in the given outbox.

    Raises:
        CheckpointError: a file is missing.
    """
    _check_files(sink, entry, staged_for(entry, sink), outbox)


def _check_files(sink: Sink, entry: LedgerEntry, files: Sequence[dict[str, Json]], outbox: Storage | None) -> None:
    missing = sink.find_missing_staged(files, outbox)
    if missing and sink.capabilities.fed_from_outbox:
        raise OutboxDamagedError(f"{missing[0]} of epoch {entry.epoch} is no longer in the outbox", sink=sink.name)
    if missing:
        raise CheckpointError(
            f"sink {sink.name!r} lacks epoch {entry.epoch}, and {missing[0]}, staged for it, is gone",
            hint="Restore the sink's folder, or take the sink out of the spec.",
        )

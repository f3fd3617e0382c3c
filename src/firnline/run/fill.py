"""Fills a sink that was added to a pipeline with history: from the beginning, or with a copy of a table.

It is decided by an epoch that reads nothing, whose checkpoint remembers the sink as one that is being filled. From then
on the sink gets epochs on its own lane like any other that lags. The rows of the epochs from before it was added are
made again from the input, epoch by epoch; a copy is the rows of that one epoch. Until it is in sync, the sink counts in
no mark and in no commit policy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import (
    CommitConflictError,
    ConfigError,
    LedgerHoleError,
    OutboxLostError,
    RollbackRefusedError,
    SinkError,
)
from firnline.names import rerun_folder
from firnline.options import FollowerOptions, PipelineOptions
from firnline.run.commits import entry_commit, name_in
from firnline.run.copied_rows import find_copied, stage_copy
from firnline.run.joining import TRIES, committed_columns, edit_checkpoint, no_columns
from firnline.run.made_rows import FilledEpoch, FilledEpochs
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.progress import Progress
from firnline.run.rerun import Rerun, find_obstacle, way_out
from firnline.schema import schema_from_json
from firnline.sinks.base import Head, Sink
from firnline.sinks.known import BEGINNING, COPY, KnownSink, find_filling, find_new, known_sinks
from firnline.types import Json

logger = logging.getLogger(__name__)


# -- what the spec asks for ---------------------------------------------------------------------------


def check_new(pipeline: OpenPipeline, head: Head) -> None:
    """Check whether every new follower can get what was before it. Writes nothing.

    Raises:
        ConfigError: one cannot; the message has the reason, and the hint the way out.
        SourceError: a source does not answer now.
    """
    for one in find_new(pipeline.options, head.checkpoint):
        if pipeline.deciding.settled_epoch() is not None:
            raise ConfigError(
                f"sink {one.name!r} cannot be filled: a committer commits to the table that decides",
                hint=f"Copy it: {_command(pipeline.options, one)}",
            )
        if one.copy_from:
            find_copied(pipeline.options, one.name, one.copy_from, same_mode=True)
            continue
        reason = _find_obstacle(pipeline, one, head)
        if reason:
            raise ConfigError(
                f"sink {one.name!r} cannot start at the beginning: {reason}",
                hint=f"Copy a table: set `copy_from`, or {_command(pipeline.options, one)}; "
                "or begin with the next epoch: `start: now`.",
            )


def _command(options: PipelineOptions, one: FollowerOptions) -> str:
    return way_out(options, one.name).partition(": ")[2]


def _find_obstacle(pipeline: OpenPipeline, one: FollowerOptions, head: Head) -> str:
    """Return why the rows of every epoch since the first cannot be made again; empty if they can."""
    entries: list[LedgerEntry] = []
    try:
        entries += (entry for entry, _ in pipeline.ledger.entries(head.entry))
    except LedgerHoleError as error:
        return error.message
    if entries[-1].previous is not None:
        return f"the ledger has folded the entries up to epoch {entries[-1].previous.epoch}"
    for entry in entries:
        if entry.is_history_edit or entry.kind == "baseline":
            return f"epoch {entry.epoch} is a {entry.kind}, which no new sink can follow"
    assert head.checkpoint is not None
    return find_obstacle(pipeline, one.name, entries, head.checkpoint.positions)


def describe_fill(one: FollowerOptions) -> str:
    """Return what a new follower gets first, for people."""
    if not one.copy_from:
        return "is filled first: every epoch since the first, made again from the input"
    order = "" if one.write == "upsert" else "; the order of rows per key is lost in the copy"
    return f"is filled first: a copy of the rows of {one.copy_from}, then every later epoch{order}"


# -- deciding it --------------------------------------------------------------------------------------


def decide_fills(pipeline: OpenPipeline, head: Head, run: str, generation: int) -> Head:
    """Decide that the new followers are filled, under our claim. Returns the head of the deciding sink afterwards.

    Raises:
        SinkError: it cannot be decided now.
    """
    deciding = pipeline.deciding
    for _ in range(TRIES):
        new = find_new(pipeline.options, head.checkpoint)
        if not new or head.checkpoint is None:
            return head
        entry = _entry(pipeline, head, head.checkpoint, new, run, generation)
        ref = pipeline.ledger.stage(entry)
        schema = deciding.find_committed_schema() or schema_from_json(entry.schema)
        try:
            deciding.commit(entry_commit(pipeline, deciding, entry, ref, schema))
        except CommitConflictError:
            pass  # another writer committed; the head is read again
        else:
            for one in new:
                logger.info("sink %s", describe_fill(one), extra={"sink": one.name})
        head = deciding.load()
    raise SinkError(f"{deciding.name}: gave up after {TRIES} conflicts with other writers; try again")


def _entry(
    pipeline: OpenPipeline,
    head: Head,
    before: Checkpoint,
    new: Iterable[FollowerOptions],
    run: str,
    generation: int,
) -> LedgerEntry:
    epoch = head.epoch + 1
    checkpoint = edit_checkpoint(pipeline, before, before, epoch=epoch, generation=generation, run=run)
    known = {name: one.to_json() for name, one in known_sinks(before).items()}
    for one in new:
        born, copy = (head.epoch, epoch) if one.copy_from else (0, 0)
        filled = KnownSink(one.target, born, born, one.renamed_from or one.name, copy=copy)
        filled = replace(filled, filled_from=one.copy_from or BEGINNING, filled_since=generation)
        known[one.name] = filled.to_json()
    return LedgerEntry(
        checkpoint=replace(checkpoint, sinks=known),
        previous=head.entry,
        previous_checkpoint=before.checksum,
        inputs={},
        staged={sink.name: [] for sink in pipeline.sinks},
        schema=committed_columns(pipeline),
        schemas=no_columns(pipeline),
        shapes={sink.name: shape for sink in pipeline.sinks if (shape := sink.shape())},
        epoch_time=checkpoint.created_at if pipeline.options.operators else "",
    )


# -- the rows -----------------------------------------------------------------------------------------


class Filling:
    """Gives sinks that are being filled their rows, in one run. Lanes of several sinks may use it at once."""

    def __init__(self, pipeline: OpenPipeline, progress: Progress, rerun: Rerun) -> None:
        self._pipeline = pipeline
        self._progress = progress
        self._rerun = rerun
        self._lists = FilledEpochs(pipeline.storage, pipeline.options.name)

    def find(self, sink: Sink, entry: LedgerEntry) -> FilledEpoch | None:
        """Return the rows of an epoch for a sink that is being filled; None if its ledger entry names them.

        Their list is durable before the first row is delivered, so every try delivers the same.

        Raises:
            OutboxLostError: they cannot be made again.
            SinkError: the table to copy from does not hold the epoch yet.
        """
        known = find_filling(self._progress.head.checkpoint, self._pipeline.options.followers).get(sink.name)
        if known is None:
            return None
        is_copy = known.filled_from != BEGINNING
        if (is_copy and known.copy != entry.epoch) or (not is_copy and name_in(entry, sink) is not None):
            return None
        attempt = entry.checkpoint.attempt
        filled = self._lists.find(known.head_name, entry.epoch, attempt)
        if filled is not None:
            return filled
        if is_copy:
            files, schema = self._copy(sink, known, entry)
            shape = {**sink.shape(), COPY: True}
            return self._lists.put(known.head_name, entry.epoch, FilledEpoch(attempt, files, schema, shape))
        if not any(entry.inputs.values()):
            return FilledEpoch(attempt, [], pa.schema([]), sink.shape())
        with self._rerun.made(sink, entry, f"epoch {entry.epoch}", keep=True) as made:
            filled = FilledEpoch(attempt, made.files, made.schema, sink.shape())
            return self._lists.put(known.head_name, entry.epoch, filled)

    def release(self, sink: Sink, entry: LedgerEntry) -> None:
        """Delete the list of an epoch that the sink holds now, and its files."""
        known = find_filling(self._progress.head.checkpoint, self._pipeline.options.followers).get(sink.name)
        if known is not None:
            self._lists.release(known.head_name, entry.epoch)

    def _copy(self, sink: Sink, known: KnownSink, entry: LedgerEntry) -> tuple[list[dict[str, Json]], pa.Schema]:
        """Copy the rows that a table holds after an epoch."""
        pipeline = self._pipeline
        table = next(one for one in pipeline.open_readers() if one.name == known.filled_from)
        held = table.load().epoch
        if held < entry.epoch:
            raise SinkError(
                f"{table.name} holds epoch {held}, and sink {sink.name!r} is to be filled from epoch {entry.epoch}"
            )
        attempt = pipeline.ids.new()
        self._progress.reruns.add(attempt)
        try:
            return stage_copy(pipeline, sink.name, attempt, table, rerun_folder(pipeline.options.name), entry.epoch)
        except RollbackRefusedError as error:
            raise OutboxLostError(
                f"{table.name} can no longer be copied as it was after epoch {entry.epoch}: {error.message}",
                hint=way_out(pipeline.options, sink.name),
                sink=sink.name,
                epoch=entry.epoch,
            ) from error
        finally:
            self._progress.reruns.discard(attempt)

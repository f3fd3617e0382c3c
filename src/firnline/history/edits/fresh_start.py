"""Starts a pipeline over after one named epoch: the only way to start again over existing history.

The fresh start is a separate epoch whose ledger chain has no predecessor, so every input file is unknown again. It
works only while the table holds exactly the named epoch. If a supervisor restarts the same command line, the command
finds the fresh start done and continues.
"""

from __future__ import annotations

from dataclasses import dataclass

from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import LedgerHoleError, RollbackRefusedError
from firnline.history.store import on_record
from firnline.run.edits import perform_edit
from firnline.run.joining import check_replaceable, committed_columns, edit_checkpoint
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sinks.known import find_away
from firnline.types import EntryRef, Json


@dataclass(frozen=True, slots=True)
class FreshStart:
    """The result: the epoch of the fresh start, made now or found done."""

    epoch: int
    after_epoch: int
    truncated: bool
    already: bool = False


def start_over(pipeline: OpenPipeline, after_epoch: int, run: str, *, truncate: bool = False) -> FreshStart:
    """Start over after `after_epoch`. The rows stay, or the same commit removes them with `truncate`.

    Raises:
        RollbackRefusedError: the table does not hold exactly that epoch, and was not started over after it.
        FencedError: another run took over meanwhile.
    """
    done = find_fresh_start(pipeline, after_epoch)
    if done is not None:
        return done
    if truncate:
        check_replaceable(pipeline.sinks)

    def look(generation: int) -> tuple[LedgerEntry, Head]:
        newest = _check(pipeline, after_epoch)
        _check_followers(pipeline, newest)
        committed = pipeline.deciding.load_committed()
        return _entry(pipeline, newest, committed.entry, generation, run, truncate=truncate), committed

    with on_record(pipeline, "fresh-start", run, from_epoch=after_epoch, to_epoch=None, truncate=truncate):
        receipt = perform_edit(pipeline, run, look)
    return FreshStart(receipt.epoch, after_epoch, truncate)


def find_fresh_start(pipeline: OpenPipeline, after_epoch: int) -> FreshStart | None:
    """Return the fresh start after an epoch if it was made already; None if it can be made now.

    Raises:
        RollbackRefusedError: the table does not hold exactly that epoch, and was not started over after it.
    """
    done = _find_done(pipeline, after_epoch)
    if done is None:
        _check(pipeline, after_epoch)
    return done


def _check(pipeline: OpenPipeline, after_epoch: int) -> Head:
    """Return the table's head if it is exactly the named epoch."""
    newest = pipeline.deciding.load()
    if newest.checkpoint is None:
        raise RollbackRefusedError(
            "there is no history to start over", hint="Run without --fresh-after; a first run starts fresh."
        )
    if newest.epoch != after_epoch:
        raise RollbackRefusedError(
            f"{pipeline.decided_in} holds epoch {newest.epoch}, not {after_epoch}",
            hint=f"To abandon the current history: --fresh-after {newest.epoch}",
            epoch=newest.epoch,
        )
    return newest


def _check_followers(pipeline: OpenPipeline, newest: Head) -> None:
    """Refuse to leave a history behind that a follower still waits for: nobody would deliver it later."""
    away = find_away(newest.checkpoint, pipeline.options.followers)
    for sink in pipeline.sinks[1:]:
        if sink.capabilities.fed_from_outbox and sink.name not in away and sink.read_fence().epoch < newest.epoch:
            raise RollbackRefusedError(
                f"sink {sink.name!r} still waits for epochs up to {newest.epoch}, which a fresh start leaves behind",
                hint=f"Let the pipeline run until it is in sync, or give them up: "
                f"firnline sinks resume {sink.name} --accept-gap",
            )


def _find_done(pipeline: OpenPipeline, after_epoch: int) -> FreshStart | None:
    """Return the fresh start after that epoch, if the true history has one."""
    edits: list[dict[str, Json]] = []
    try:
        for link in pipeline.ledger.chain(pipeline.deciding.load().entry):
            if isinstance(link, Fold):
                edits += link.edits
            elif link.is_history_edit:
                edits.append({"epoch": link.epoch, "kind": link.kind, "jump": link.edit})
    except LedgerHoleError:
        pass  # the history behind a hole is unknown
    for found in edits:
        if found["kind"] == "fresh" and found["jump"]["after_epoch"] == after_epoch:
            return FreshStart(int(found["epoch"]), after_epoch, bool(found["jump"]["truncate"]), already=True)
    return None


def _entry(
    pipeline: OpenPipeline, newest: Head, onto: EntryRef | None, generation: int, run: str, *, truncate: bool
) -> LedgerEntry:
    head = newest.checkpoint
    assert head is not None
    base = Checkpoint(
        pipeline=pipeline.options.name,
        epoch=0,
        generation=0,
        run="",
        attempt="",
        created_at="",
        positions=pipeline.sources.start({}),
        schema_fingerprint=head.schema_fingerprint,
        schema_version=head.schema_version,
    )
    epoch = newest.epoch + 1
    return LedgerEntry(
        checkpoint=edit_checkpoint(pipeline, base, head, epoch=epoch, generation=generation, run=run),
        previous=None,
        inputs={},
        schema=committed_columns(pipeline),
        kind="fresh",
        onto=onto,
        edit={"after_epoch": newest.epoch, "truncate": truncate},
    )

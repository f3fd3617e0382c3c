"""Performs a history edit: claims every sink, decides the edit in the deciding sink, applies it to every other one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import (
    CheckpointError,
    CommitConflictError,
    FencedError,
    FirnlineError,
    LedgerHoleError,
    RollbackRefusedError,
    SinkDivergedError,
    SinkError,
    SinkWentBackError,
)
from firnline.run.commits import entry_commit
from firnline.run.followers import check_owner, join
from firnline.run.joining import TRIES, find_effect, join_sink, settle_edits
from firnline.run.new_tables import find_beginning, first_entry
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.topology import check_hold
from firnline.schema import schema_from_json
from firnline.sinks.base import Head, Sink
from firnline.sinks.known import find_away, find_filling, find_new
from firnline.types import EntryRef, Receipt

logger = logging.getLogger(__name__)

Look = Callable[[int], tuple[LedgerEntry, Head]]


def perform_edit(
    pipeline: OpenPipeline,
    run: str,
    look: Look,
    tell: Callable[[str], None] = lambda _: None,
    *,
    generation: int | None = None,
    goes_on_from: EntryRef | None = None,
    leave: Collection[str] = (),
    skip: Collection[str] = (),
    replaces: bool = False,
    restore: str = "",
) -> Receipt:
    """Claim a generation everywhere, decide a history edit in the deciding sink, and apply it to every other sink.

    The claims come first: they fence an active run before anything is checked. `look` gets the generation. It checks
    everything against the current version of the deciding sink, and returns the entry to commit and the committed head
    of that sink. If the sink moves before the commit, both steps are repeated. Once the edit is decided, nothing fails
    any more: a sink that cannot apply it now does so when the next run joins it. An optional sink does not stop an edit
    when the ledger no longer has the epochs that the sink lacks.

    Args:
        generation: Only given for a deciding sink that does not exist yet.
        goes_on_from: The entry that the history continues from; a staged sink adopts no pending units beyond it.
        leave: Sinks that need not be reached now.
        skip: Sinks that are not touched: the next run joins them.
        replaces: The edit replaces all rows of a sink, so the sink need not catch up first.
        restore: The restore of a topology that this edit is a part of.

    Raises:
        FencedError: another run took over meanwhile, or the restore of a topology holds the pipeline.
        SinkError: a sink cannot be claimed; nothing is decided.
        LedgerHoleError: the ledger lacks epochs that a required sink needs; nothing is decided.
    """
    claimed = claim_sinks(
        pipeline,
        run,
        tell,
        generation=generation,
        goes_on_from=goes_on_from,
        leave=leave,
        skip=skip,
        replaces=replaces,
        restore=restore,
    )
    ref, receipt = decide_edit(pipeline, look, claimed.generation)
    tell(f"{pipeline.deciding.name} is at epoch {receipt.epoch}, version {receipt.version}")
    # A table that has no head yet begins with the next run, unless the edit gives it all its rows.
    new = claimed.new
    others = [sink for sink in claimed.others if sink.name not in new or find_beginning(pipeline, sink, ref) is None]
    apply_edit(pipeline, others, ref, tell)
    return receipt


@dataclass(frozen=True, slots=True)
class Claimed:
    """The sinks of a pipeline that a history edit has claimed."""

    generation: int
    others: list[Sink]  # beside the deciding one
    new: set[str]  # names of those that have no head yet


def claim_sinks(
    pipeline: OpenPipeline,
    run: str,
    tell: Callable[[str], None] = lambda _: None,
    *,
    generation: int | None = None,
    goes_on_from: EntryRef | None = None,
    leave: Collection[str] = (),
    skip: Collection[str] = (),
    replaces: bool = False,
    restore: str = "",
) -> Claimed:
    """Claim a generation in every sink: all that a history edit does before it is decided; see `perform_edit`."""
    deciding = pipeline.deciding
    held = deciding.claim(run, generation=generation)
    generation = held.generation
    check_hold(pipeline, restore)
    tell(f"claimed generation {generation}")
    away = find_away(held.checkpoint, pipeline.options.followers)
    skip = {*skip, *away, *(one.name for one in find_new(pipeline.options, held.checkpoint))}
    others = [sink for sink in pipeline.sinks[1:] if sink.name not in skip]
    new = {sink.name for sink in others if _has_yet_to_begin(pipeline, sink, held)}
    for sink in others:
        try:
            if replaces or sink.name in new:
                check_owner(pipeline, sink, held)
                join_sink(pipeline, sink, run, generation, None, goes_on_from)
            else:
                join(pipeline, sink, run, generation, held, goes_on_from=goes_on_from)
        except (SinkError, RollbackRefusedError, SinkDivergedError, SinkWentBackError, LedgerHoleError) as error:
            is_untold = isinstance(error, LedgerHoleError) and not sink.required
            if sink.name not in leave and not is_untold:
                raise
            tell(f"{sink.name} is left as it is: {error.message}")
    return Claimed(generation, others, new)


def _has_yet_to_begin(pipeline: OpenPipeline, sink: Sink, decided: Head) -> bool:
    try:
        return first_entry(pipeline, sink, sink.load(), decided) is not None
    except (FirnlineError, OSError):
        return False  # what stands against it is found when the sink is joined


def apply_edit(pipeline: OpenPipeline, sinks: Iterable[Sink], ref: EntryRef, tell: Callable[[str], None]) -> None:
    """Apply a decided edit to further sinks, which are claimed, and record it. Nothing fails any more."""
    for sink in sinks:
        try:
            tell(f"{sink.name} is at epoch {settle_edits(pipeline, sink, ref)}")
        except LedgerHoleError as error:
            logger.warning("sink stays behind", extra={"sink": sink.name, "reason": error.message})
            tell(f"{sink.name} stays behind: {error.message}. {error.hint}")
        except (SinkError, CheckpointError, OSError) as error:
            logger.warning("sink follows later", extra={"sink": sink.name, "reason": str(error)})
            tell(f"{sink.name} follows when the next run joins it: {error}")
    _record(pipeline)


def refuse_filling(pipeline: OpenPipeline, committed: Head) -> RollbackRefusedError | None:
    """Return what stands against a history edit while a sink is filled; None if none is."""
    filling = find_filling(committed.checkpoint, pipeline.options.followers)
    if not filling:
        return None
    return RollbackRefusedError(
        f"sink {min(filling)!r} is being filled with what was before it was added",
        hint="Let the pipeline run until it is in sync (firnline sinks list), or take it out of the spec: "
        f"firnline sinks forget {min(filling)} --yes",
    )


def decide_edit(pipeline: OpenPipeline, look: Look, generation: int) -> tuple[EntryRef, Receipt]:
    """Commit the entry that `look` makes to the deciding sink, claimed with this generation; see `perform_edit`."""
    deciding = pipeline.deciding
    for _ in range(TRIES):
        entry, committed = look(generation)
        if committed.exists and committed.generation != generation:
            raise FencedError("another run took over while this one looked")
        refused = refuse_filling(pipeline, committed)
        if refused is not None and entry.is_history_edit:
            raise refused
        ref = pipeline.ledger.stage(entry)
        as_it_is = committed.exists and entry.kind != "restore"
        schema = deciding.find_committed_schema() if as_it_is else None
        if schema is None:
            schema = schema_from_json(entry.schema)
        commit = entry_commit(pipeline, deciding, entry, ref, schema)
        effect = find_effect(deciding, entry, committed.epoch)
        try:
            if not entry.is_history_edit:
                return ref, deciding.commit(commit)
            version = committed.version if committed.exists else None
            return ref, deciding.edit(commit, effect, committed.entry, version)
        except CommitConflictError:
            continue
    raise SinkError(f"{deciding.name}: gave up after {TRIES} conflicts with other writers; try again")


def _record(pipeline: OpenPipeline) -> None:
    """Record the edit in store and tiers. If that fails, the next run does it at its start."""
    try:
        pipeline.recorder.read_copies()
        pipeline.recorder.begin(pipeline.deciding.load())
    except (FirnlineError, OSError) as error:
        logger.warning("history edit not recorded in the store yet", extra={"reason": str(error)})
    finally:
        pipeline.recorder.close(drain=True)

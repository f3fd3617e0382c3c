"""Joins a follower: where a new one begins, what happens to one that went back, and which one belongs elsewhere."""

from __future__ import annotations

import logging
from dataclasses import replace

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import LedgerHoleError, SinkDivergedError, SinkWentBackError
from firnline.run.commits import entry_commit, name_in, staged_for
from firnline.run.joining import ahead_of, join_sink
from firnline.run.new_tables import first_entry
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head, KeepRows, RunTasks, Sink
from firnline.sinks.known import KnownSink, find_known, find_new, known_sinks
from firnline.types import EntryRef

logger = logging.getLogger(__name__)


def join(
    pipeline: OpenPipeline,
    sink: Sink,
    run: str,
    generation: int,
    decided: Head,
    run_tasks: RunTasks | None = None,
    goes_on_from: EntryRef | None = None,
) -> int:
    """Register our generation in a further sink, and apply the history edits that it lacks. Returns its epoch.

    `decided` is the head of the deciding sink. A follower that is new begins after the newest epoch. One that lost
    epochs gets them again, if the outbox has them all.

    Raises:
        SinkWentBackError: the outbox lacks an epoch that the follower lost. Nothing was written.
        SinkDivergedError: the sink belongs to another pipeline, or holds an epoch that was never decided.
        LedgerHoleError: the ledger no longer has the epochs that the sink lacks.
    """
    tip, first = decided.entry, None
    if not sink.capabilities.fed_from_outbox:
        first = first_entry(pipeline, sink, sink.load(), decided)
    else:
        sink.end_unfinished()
        held = check_owner(pipeline, sink, decided)
        begin = _find_beginning(pipeline, sink, held, decided)
        if begin is not None:
            sink.claim(run, generation=generation)
            entry = replace(pipeline.ledger.load(begin), staged={})  # it gets the head of that epoch, and no rows
            sink.edit(entry_commit(pipeline, sink, entry, begin, pa.schema([])), KeepRows(), held.entry)
    return join_sink(pipeline, sink, run, generation, tip, goes_on_from or tip, run_tasks, first)


def begins_now(pipeline: OpenPipeline, sink: Sink, held: Head, decided: Head) -> bool:
    """Return whether a follower is new in a pipeline with history, and begins after the newest epoch.

    One that is to get what was before is filled instead, see `run.fill`.
    """
    if not sink.capabilities.fed_from_outbox or held.epoch >= decided.epoch or _known(sink, decided) is not None:
        return False
    return sink.name not in {one.name for one in find_new(pipeline.options, decided.checkpoint)}


def _known(sink: Sink, decided: Head) -> KnownSink | None:
    return find_known(known_sinks(decided.checkpoint), sink.name, sink.former_name)


def _find_beginning(pipeline: OpenPipeline, sink: Sink, held: Head, decided: Head) -> EntryRef | None:
    """Return the entry whose epoch a follower begins after; None if it goes on from its head."""
    tip, known = decided.entry, _known(sink, decided)
    if begins_now(pipeline, sink, held, decided):
        return tip
    if tip is None or known is None:
        return None
    if known.filled_from:
        _check_empty(sink, held, known)
    if held.epoch < known.held or not held.exists:
        sink.check_lost(max(held.epoch, known.born))
    if held.epoch < known.held and known.held > known.born:
        _check_redeliverable(pipeline, sink, max(held.epoch, known.born), tip, known)
        facts = {"sink": sink.name, "held": known.held, "holds": held.epoch}
        logger.warning("sink went back: what it lost is delivered again", extra=facts)
    if held.epoch >= known.born:
        return None
    if known.born == tip.epoch:
        return tip
    oldest, _ = next(iter(ahead_of(pipeline, tip, known.born, sink.name)))
    return oldest.previous


def _check_redeliverable(pipeline: OpenPipeline, sink: Sink, epoch: int, tip: EntryRef, known: KnownSink) -> None:
    """Raise SinkWentBackError unless the outbox has every epoch after `epoch`."""
    lost = f"sink {sink.name!r} held epoch {known.held} and holds epoch {epoch} now"
    try:
        missing = [
            f"the rows of epoch {entry.epoch}"
            for entry, _ in ahead_of(pipeline, tip, epoch, sink.name)
            if sink.find_missing_staged(staged_for(entry, sink)) or _is_before(entry, sink, known)
        ]
    except LedgerHoleError as error:
        missing = [error.message]
    if missing:
        raise SinkWentBackError(
            f"{lost}; {missing[0]} are no longer in the outbox" if "rows" in missing[0] else f"{lost}; {missing[0]}",
            hint=f"Bring the sink back, or copy it anew: firnline sinks resync {sink.name} --yes",
            sink=sink.name,
            epoch=epoch,
        )


def _is_before(entry: LedgerEntry, sink: Sink, known: KnownSink) -> bool:
    """Return whether an epoch was made before the sink was added, and its rows are not made again."""
    return not known.filled_from and not entry.is_history_edit and bool(entry.staged) and name_in(entry, sink) is None


def _check_empty(sink: Sink, held: Head, known: KnownSink) -> None:
    """Refuse to fill a sink whose target holds epochs from before it was added.

    Raises:
        SinkDivergedError: it names the ways out.
    """
    if max(held.epoch, held.partial) and held.generation < known.filled_since:
        raise SinkDivergedError(
            f"sink {sink.name!r} is to be filled, and {sink.uri} holds epoch {held.epoch} of this pipeline already",
            hint=f"Empty the target; or copy it anew: firnline sinks resync {sink.name} --yes",
            sink=sink.name,
            epoch=held.epoch,
        )


def check_owner(pipeline: OpenPipeline, sink: Sink, decided: Head) -> Head:
    """Return the head of a follower; refuse one that names another deciding table or journal. Any other sink passes.

    A head may name a journal that was lost, if the recovery of that journal carried its sink over.

    Raises:
        SinkDivergedError: the target belongs to another pipeline.
    """
    held = sink.load()
    if not sink.capabilities.fed_from_outbox:
        return held
    if held.checkpoint is None or held.entry is None:
        return held
    owner, ours = held.checkpoint.deciding.get("table"), pipeline.deciding.identity.get("table")
    if ours is None:  # another run may have created the table since we looked
        pipeline.deciding.load()
        ours = pipeline.deciding.identity.get("table")
    # A table's first checkpoint does not name the table: then our ledger has that epoch, or the epoch is not ours.
    known = _known(sink, decided)
    if known is not None and owner in known.former:
        return held
    if owner != ours if owner is not None else pipeline.ledger.find(held.entry) is None:
        raise SinkDivergedError(
            f"{sink.uri} belongs to another pipeline of the name {pipeline.options.name!r}: its head names the deciding"
            f" table {owner or 'of another ledger'}, and {pipeline.storage.root} is {ours or 'new'}",
            hint="Give this pipeline another name, or the sink another name or target.",
            sink=sink.name,
            epoch=held.epoch,
        )
    return held

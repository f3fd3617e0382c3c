"""Compares two epochs: positions, schema, watermarks, state, and what was read and written between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import LedgerHoleError
from firnline.history.epoch import EpochView, load_epoch
from firnline.history.state import event_time, snapshots_of
from firnline.jobs.watermarks import Watermarks
from firnline.run.open_pipeline import OpenPipeline
from firnline.sources.base import PositionView
from firnline.stores.base import CheckpointStore
from firnline.stores.transfer import walk_versions
from firnline.types import Json


@dataclass(slots=True)
class Between:
    """The work of the epochs after one and up to another. Unknown values stay unknown."""

    epochs: int = 0
    files: dict[str, list[dict[str, Json]]] = field(default_factory=dict)  # source -> what was read, oldest first
    rows: int = 0
    size_bytes: int = 0
    quarantined: int = 0
    edits: list[dict[str, Json]] = field(default_factory=list)
    epochs_unknown: int = 0  # epochs whose rows no copy has
    notes: list[str] = field(default_factory=list)


def diff_epochs(pipeline: OpenPipeline, store: CheckpointStore | None, one: int, other: int) -> dict[str, Json]:
    """Return the differences from the older of two epochs to the newer one, as plain JSON.

    Raises:
        ConfigError: one of them is unknown.
    """
    older, newer = load_epoch(pipeline, store, min(one, other)), load_epoch(pipeline, store, max(one, other))
    between = load_between(pipeline, store, older, newer)
    before, after = older.checkpoint, newer.checkpoint
    names = sorted({*before.positions, *after.positions})
    was, now = pipeline.sources.describe(before.positions), pipeline.sources.describe(after.positions)
    return {
        "pipeline": pipeline.options.name,
        "from_epoch": older.epoch,
        "to_epoch": newer.epoch,
        "epochs": between.epochs,
        "epochs_unknown": between.epochs_unknown,
        "rows": between.rows,
        "size_bytes": between.size_bytes,
        "quarantined": between.quarantined,
        "jumps": between.edits,
        "sources": {
            name: {
                **diff_position(was.get(name), now.get(name)),
                "files_read": between.files.get(name, []),
            }
            for name in names
        },
        "schema": _schema(older, newer),
        "watermarks": changes(_watermarks(before), _watermarks(after)),
        "state": changes(_state(before), _state(after)),
        "floor": {"from": before.floor, "to": after.floor},
        "generation": {"from": before.generation, "to": after.generation},
        "notes": between.notes,
    }


def _watermarks(checkpoint: Checkpoint) -> dict[str, Json]:
    """Return the event time of each operator."""
    marks = Watermarks.from_json(checkpoint.watermarks).operators
    return {name: event_time(mark.at) for name, mark in marks.items() if mark.at is not None}


def _state(checkpoint: Checkpoint) -> dict[str, Json]:
    """Return the snapshot of each operator, without its watermark."""
    wanted = ("epoch", "checkpoint", "shards", "size_bytes", "rows")
    return {one.operator: {name: getattr(one, name) for name in wanted} for one in snapshots_of(checkpoint)}


def changes(before: dict[str, Json], after: dict[str, Json]) -> dict[str, dict[str, Json]]:
    """Return the keys whose values differ, with both values; None for a missing value."""
    names = sorted({*before, *after})
    return {
        n: {"from": before.get(n), "to": after.get(n)}
        for n in names
        if (n in before) != (n in after) or before.get(n) != after.get(n)
    }


def diff_position(before: PositionView | None, after: PositionView | None) -> dict[str, Json]:
    """Return the differences in one source's position; for a source without named inputs, the changed facts."""
    none = PositionView({}, by_input=True)
    old, new = before or none, after or none
    if not (old.by_input and new.by_input):
        return {"changed": changes(old.facts, new.facts)}
    was, now = old.in_progress, new.in_progress
    return {
        "root": {"from": old.location, "to": new.location},
        "last_committed_file": {"from": old.last, "to": new.last},
        "in_progress": {"now": now, "begun": sorted(set(now) - set(was)), "ended": sorted(set(was) - set(now))},
        "set_aside": {path: new.set_aside[path] for path in sorted(set(new.set_aside) - set(old.set_aside))},
        "taken_up": sorted(set(old.set_aside) - set(new.set_aside)),
    }


def _schema(older: EpochView, newer: EpochView) -> dict[str, Json]:
    def told(view: EpochView) -> dict[str, Json]:
        return {"fingerprint": view.checkpoint.schema_fingerprint, "version": view.checkpoint.schema_version}

    found: dict[str, Json] = {"from": told(older), "to": told(newer), "columns": None}
    if older.ledger_entry and newer.ledger_entry:  # only the ledger has the columns
        found["columns"] = changes(_columns(older.ledger_entry), _columns(newer.ledger_entry))
    return found


def _columns(entry: LedgerEntry) -> dict[str, Json]:
    return {str(column["name"]): column["type"] for column in entry.schema}


def load_between(pipeline: OpenPipeline, store: CheckpointStore | None, older: EpochView, newer: EpochView) -> Between:
    """Add up the epochs after `older` up to `newer`, from the ledger, and from the store where the ledger is folded."""
    found = Between()
    known: set[int] = set()
    folded: set[int] = set()
    links: list[LedgerEntry | Fold] = []
    try:
        for link in _chain(pipeline, newer):
            epoch = link.last.epoch if isinstance(link, Fold) else link.epoch
            if epoch <= older.epoch:
                if isinstance(link, LedgerEntry) and epoch < older.epoch:
                    found.notes.append(f"epoch {older.epoch} does not lie on the history of epoch {newer.epoch}")
                break
            links.append(link)
    except LedgerHoleError as error:
        found.notes.append(f"{error.message}: what was read and written before it is unknown")
    for link in reversed(links):
        if isinstance(link, Fold):
            _add_fold(found, link, older.epoch)
            folded |= set(range(max(link.first_epoch, older.epoch + 1), link.last.epoch + 1))
        else:
            _add_entry(found, link, pipeline.counted)
            known.add(link.epoch)
    told = _add_stored(pipeline, store, found, folded)
    found.epochs = len(known) + len(folded)
    found.epochs_unknown = len(folded - told)
    return found


def _chain(pipeline: OpenPipeline, newer: EpochView) -> Iterator[LedgerEntry | Fold]:
    """Yield the chain down from an epoch. A folded epoch is found on the way down from the newest."""
    if newer.ledger_entry is not None:
        yield from pipeline.ledger.chain(newer.entry)
        return
    for link in pipeline.ledger.chain(pipeline.load().entry):
        if isinstance(link, LedgerEntry) and link.epoch > newer.epoch:
            continue
        if isinstance(link, Fold) and link.last.epoch > newer.epoch:
            inputs = {
                source: [f for f in files if int(f.get("epoch", 0)) <= newer.epoch]
                for source, files in link.inputs.items()
            }
            if link.first_epoch <= newer.epoch:
                assert newer.entry is not None  # every copy names its entry
                yield Fold(link.first_epoch, newer.entry, link.previous, inputs)
            continue
        yield link


def _add_entry(found: Between, entry: LedgerEntry, sink: str) -> None:
    if entry.is_history_edit:
        found.edits.append({"epoch": entry.epoch, "kind": entry.kind, **entry.edit})
    else:
        staged = entry.staged.get(sink, [])
        found.rows += sum(int(f["rows"]) for f in staged)
        found.size_bytes += sum(int(f["size_bytes"]) for f in staged)
    found.quarantined += sum(int(q["rows"]) for q in entry.quarantine)
    for source, records in entry.inputs.items():
        found.files.setdefault(source, []).extend(_read(record, entry.epoch) for record in records if _was_read(record))


def _add_fold(found: Between, fold: Fold, after: int) -> None:
    for source, records in fold.inputs.items():
        wanted = [r for r in records if int(r.get("epoch", 0)) > after and _was_read(r)]
        found.files.setdefault(source, []).extend(_read(record, int(record["epoch"])) for record in wanted)


def _was_read(record: dict[str, Json]) -> bool:
    return record.get("status") not in ("pending", "refused")


def _read(record: dict[str, Json], epoch: int) -> dict[str, Json]:
    return {
        "path": record["path"],
        "epoch": epoch,
        "from": record.get("from"),
        "to": record.get("to"),
        "status": record.get("status"),
    }


def _add_stored(pipeline: OpenPipeline, store: CheckpointStore | None, found: Between, folded: set[int]) -> set[int]:
    """Add folded epochs from the store. Returns which of them the store has."""
    told: set[int] = set()
    if store is None or not folded:
        return told
    for version in walk_versions(store, pipeline.options.name):
        record = version.record
        if record is None or record.epoch not in folded or record.epoch in told:
            continue
        sink = record.sinks.get(pipeline.counted, {})
        if "rows" in sink:
            found.rows += int(sink["rows"])
            found.size_bytes += int(sink.get("size_bytes", 0))
            told.add(record.epoch)
        if told == folded:
            break
    return told

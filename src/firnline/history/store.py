"""What the deciding sink and the ledger say, for comparing a store or an archive with it; and the store itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

from firnline.errors import ConfigError, LedgerHoleError
from firnline.history.savepoints.pins import load_pins
from firnline.run.open_pipeline import Parts
from firnline.stores.base import CheckpointStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.transfer import Truth
from firnline.types import EntryRef


def find_store(parts: Parts) -> CheckpointStore | None:
    """The checkpoint store, opened, for looking; None without one, or while nothing was ever put on local disk."""
    options = parts.options.checkpoint.store
    if options is None or options.type == "memory" or (options.path and not os.path.exists(options.path)):
        return None
    return _open(parts, looking=True)


def check_store(parts: Parts) -> None:
    """ConfigError when the spec names no store that outlives a process."""
    options = parts.options.checkpoint.store
    if options is None or options.type == "memory":
        raise ConfigError(
            "this pipeline has no checkpoint store that outlives a process",
            hint="Set checkpoint.store in the spec, e.g. store: {type: file}.",
        )


def open_for_writing(parts: Parts) -> CheckpointStore:
    """The checkpoint store, opened.

    Raises:
        ConfigError: the spec names none that outlives a process.
    """
    check_store(parts)
    return _open(parts)


def _open(parts: Parts, *, looking: bool = False) -> CheckpointStore:
    from firnline.stores import open_store

    options = parts.options.checkpoint.store
    assert options is not None
    return open_store(options, held_by=parts.deciding.name, looking=looking)


def savepoint_epochs(parts: Parts) -> frozenset[int]:
    """The epochs that savepoints hold."""
    return frozenset(pin.epoch for pin in load_pins(parts.storage, parts.options.name) if pin.completed)


def load_truth(parts: Parts) -> Truth:
    """What the deciding sink holds, for comparing copies with it."""
    held = parts.load()
    entries: dict[int, EntryRef] = {}
    try:
        entries.update((ref.epoch, ref) for _, ref in parts.ledger.entries(held.entry))
    except LedgerHoleError:
        entries.clear()  # nothing is compared with a chain that is broken, but the newest epoch still is
    return Truth(
        epoch=held.epoch,
        entry=held.entry,
        # One that was put together from what is left need not be the same to the last word.
        checkpoint_checksum=held.checkpoint.checksum if held.checkpoint and not held.repairs else "",
        entries=entries,
    )


def records_from_ledger(parts: Parts) -> Iterator[CheckpointRecord]:
    """The records that a store would have of the entries that are not folded yet, newest first."""
    for entry, ref in parts.ledger.entries(parts.load().entry):
        sinks = {
            name: {
                "rows": sum(int(f["rows"]) for f in files),
                "size_bytes": sum(int(f["size_bytes"]) for f in files),
            }
            for name, files in entry.staged.items()
        }
        yield CheckpointRecord(entry.checkpoint, ref, entry.kind, sinks, entry.durations_ms)

"""Writes the checkpoints of a pipeline into an archive: from the store, or from the ledger where that has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import chain

from firnline.history.store import find_store, records_from_ledger
from firnline.run.open_pipeline import Parts
from firnline.stores.archive import Manifest, Stored, write_archive
from firnline.stores.base import CheckpointStore
from firnline.stores.payload import encode
from firnline.stores.record import CheckpointRecord
from firnline.stores.transfer import stored_versions


def export_checkpoints(parts: Parts, path: str, *, replace: bool = False) -> Manifest:
    """Write the archive, atomically.

    Raises:
        ConfigError: the file is there already and is not to be replaced.
        LedgerHoleError: there is no store, and the ledger's chain is broken.
    """
    store = find_store(parts)
    if store is None:
        return _write(parts, path, _from_ledger(parts), "ledger", [], replace)
    with closing(store):
        return export_store(parts, store, path, replace=replace)


def export_store(parts: Parts, store: CheckpointStore, path: str, *, replace: bool = False) -> Manifest:
    """The same from a store that is open."""
    name = parts.options.name
    left_out: list[str] = []
    if not store.list_versions(name, limit=1):
        kept = (item for item in stored_versions(store, name, left_out) if item.part == "audit")
        return _write(parts, path, chain(_from_ledger(parts), kept), "ledger", left_out, replace)
    return _write(parts, path, stored_versions(store, name, left_out), store.kind, left_out, replace)


def _write(
    parts: Parts, path: str, versions: Iterator[Stored], origin: str, left_out: list[str], replace: bool
) -> Manifest:
    created_at = parts.clock.now().isoformat()
    return write_archive(
        path,
        versions,
        pipeline=parts.options.name,
        created_at=created_at,
        origin=origin,
        left_out=left_out,
        replace=replace,
    )


def _from_ledger(parts: Parts) -> Iterator[Stored]:
    """Versions as a store would have numbered them, had it been there since the oldest entry."""
    for number, record in enumerate(list(records_from_ledger(parts))[::-1], 1):
        data = encode(record.to_json(), CheckpointRecord.__name__)
        yield Stored("checkpoints", number, record.checkpoint.created_at, f"epoch {record.epoch}", data)

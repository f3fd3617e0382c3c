"""Tells a table that is gone from a pipeline that never ran: the checkpoint store may know of epochs."""

from __future__ import annotations

import contextlib
from contextlib import closing

from firnline.errors import FirnlineError, RollbackRefusedError
from firnline.history.store import find_store
from firnline.run.open_pipeline import Parts
from firnline.sinks.base import Held
from firnline.stores.base import CheckpointStore
from firnline.stores.transfer import walk_versions


def find_lost(parts: Parts, held: Held, store: CheckpointStore | None) -> str | None:
    """What to say when the table knows nothing and the store knows epochs; None when all is as it should be."""
    if held.checkpoint is not None or held.epoch or store is None:
        return None
    records = (version.record for version in walk_versions(store, parts.options.name))
    epoch = next((record.epoch for record in records if record is not None), None)
    if epoch is None:
        return None
    root = parts.storage.root
    lost = f"the table is gone: nothing is at {root}"
    if held.exists:
        lost = f"{root} knows nothing of {parts.options.name!r}"
    return f"{lost}, but the checkpoint store {store.place} holds epoch {epoch}"


def nothing_to_leave(parts: Parts, held: Held) -> RollbackRefusedError:
    """Why one cannot go back: nothing ever ran, or the table is gone."""
    lost = None
    with contextlib.suppress(OSError, FirnlineError):  # a store that cannot be read tells nothing
        store = find_store(parts)
        if store is not None:
            with closing(store):
                lost = find_lost(parts, held, store)
    if lost is None:
        return RollbackRefusedError("there is no epoch to go back from", hint="`firnline run` makes the first.")
    return RollbackRefusedError(
        f"there is no epoch to go back from: {lost}",
        hint="Bring the right table back, or restore a savepoint: firnline run --from-savepoint PATH",
    )

"""The checkpoint store for commands that only look: one that cannot be read is told of and done without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from firnline.cli.output import brief, say
from firnline.errors import DamagedError, StoreUnsafeError

if TYPE_CHECKING:
    from firnline.run.open_pipeline import Parts
    from firnline.stores.base import CheckpointStore

T = TypeVar("T")


def look(parts: Parts, work: Callable[[CheckpointStore | None], T]) -> T:
    """Do it with the store, or with None where there is none, nothing was ever put, or it cannot be read."""
    from firnline.history.store import find_store

    try:
        store = find_store(parts)
        if store is None:
            return work(None)
        with closing(store):
            return work(store)
    except (OSError, StoreUnsafeError, DamagedError) as error:
        found = work(None)  # raises again if it was not the store's fault
        say(f"the checkpoint store cannot be read, so only what the table tells is shown: {brief(str(error))}")
        return found

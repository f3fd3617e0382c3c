"""The checkpoint store for commands that only look: one that cannot be opened is told of and done without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from firnline.cli.output import say
from firnline.errors import StoreUnsafeError

if TYPE_CHECKING:
    from firnline.checkpoint.store import CheckpointStore
    from firnline.engine.parts import Parts


@contextmanager
def store_to_look_at(parts: Parts) -> Iterator[CheckpointStore | None]:
    """The store, or None where there is none, nothing was ever put, or it cannot be opened."""
    from firnline.history.recorded import find_store

    try:
        store = find_store(parts)
    except (OSError, StoreUnsafeError) as error:
        say(f"the checkpoint store cannot be opened, so only what the table tells is shown: {error}")
        store = None
    if store is None:
        yield None
        return
    with closing(store):
        yield store

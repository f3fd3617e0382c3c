"""What several backends share: times for people, forks, and the proof that a storage creates only what is absent."""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from datetime import UTC, datetime
from typing import Protocol

from firnline.clock import SystemClock
from firnline.errors import StoreUnsafeError
from firnline.storage import Storage


class Connected(Protocol):
    """A store with a connection, which a forked child must neither use nor close."""

    def after_fork(self) -> None: ...


_connected: weakref.WeakSet[Connected] = weakref.WeakSet()  # the system's own list of hooks only grows


def reset_after_fork(store: Connected) -> None:
    """Have `after_fork` called in forked children, for as long as the store lives."""
    _connected.add(store)


def _reset_all() -> None:
    for store in list(_connected):
        store.after_fork()


os.register_at_fork(after_in_child=_reset_all)


def timestamp(at: float | None = None) -> str:
    """RFC 3339, UTC: of a file's time, or now."""
    moment = SystemClock().now() if at is None else datetime.fromtimestamp(at, UTC)
    return moment.isoformat(timespec="milliseconds")


def prove_put_if_absent(storage: Storage, folder: str = "") -> None:
    """Try on the real storage that `put_new` refuses what exists; leaves nothing behind.

    Raises:
        StoreUnsafeError: it replaced what was there.
        OSError: the storage cannot be reached or written.
    """
    key = f"{folder}/probe-{uuid.uuid4().hex}".removeprefix("/")
    storage.put(key, b"first\n")
    try:
        with contextlib.suppress(FileExistsError):
            storage.put_new(key, b"second\n")
            raise StoreUnsafeError(f"{storage.root} replaces what exists, although it was told to create only")
        if storage.get(key) != b"first\n":
            raise StoreUnsafeError(f"{storage.root} says that it refused to replace, but replaced")
    finally:
        storage.delete(key)
